"""What killed writers left at an object store, and its removal; nothing that is not our own."""

from __future__ import annotations

import functools

from lightning_spot.image.files import is_own_file
from lightning_spot.image.manifest import MANIFEST_FILE, OWN_DIR, Manifest, snapshot_order
from lightning_spot.threads import all_at_once
from lightning_spot.tiers import claims
from lightning_spot.tiers.claims import ATTEMPTS_DIR
from lightning_spot.tiers.filesystem import speaks
from lightning_spot.tiers.object_files import READERS, ObjectFiles
from lightning_spot.tiers.store import Holdings
from lightning_spot.tiers.temporaries import temporary_owner, writer_has_ended


def sweep_run(objects: ObjectFiles, current: Manifest, seen: Holdings, *, is_first: bool) -> None:
    """Remove temporaries, uncommitted snapshots older than ``current``, and claims that nobody asks for any more.

    Args:
        objects: of the run.
        current: a snapshot that is committed.
        seen: what has just been listed.
        is_first: whether also snapshots that are whole are looked into, in a bucket: nothing is written aside there.
    """
    names, attempts = seen.names, seen.attempts
    older = [name for name in names if (order := snapshot_order(name)) is not None and order < current.order]
    if speaks(objects.fs) and not is_first:
        older = [name for name in older if name in seen.unfinished]
    insides = all_at_once([functools.partial(objects.names, name) for name in older], "spot-list", READERS)
    for name, inside in zip(older, insides, strict=True):
        _sweep_snapshot(objects, name, inside, current)
    _sweep_temporaries(objects, "", names, current)
    _sweep_temporaries(objects, f"{ATTEMPTS_DIR}/", attempts, current)
    _sweep_temporaries(objects, f"{OWN_DIR}/", objects.names(OWN_DIR) if OWN_DIR in names else [], current)
    objects.remove_all([f"{ATTEMPTS_DIR}/{name}" for name in claims.forgettable(attempts)])


def sweep_folder(objects: ObjectFiles) -> None:
    """Remove temporaries in a folder in which other processes may save, too."""
    for below in [*objects.names(""), *(f"{OWN_DIR}/{name}" for name in objects.names(OWN_DIR))]:
        name = below.rpartition("/")[2]
        if temporary_owner(name) is not None and (writer_has_ended(name) or objects.is_settled(below)):
            objects.remove(below)


def _sweep_snapshot(objects: ObjectFiles, name: str, names: list[str], current: Manifest) -> None:
    """Remove an uncommitted snapshot that holds nothing but our own files."""
    _sweep_temporaries(objects, f"{name}/", names, current)
    order = snapshot_order(name)
    names = [item for item in names if temporary_owner(item) is None]
    if not names or not all(map(is_own_file, names)) or order is None or order[0] > current.attempt:
        return
    paths = [f"{name}/{item}" for item in names]
    if order[0] == current.attempt and not all(map(objects.is_settled, paths)):
        return
    if not objects.fs.exists(objects.path(f"{name}/{MANIFEST_FILE}")):  # a listing may be older than the manifest
        objects.remove_all(paths)
        objects.remove_directory(name)


def _sweep_temporaries(objects: ObjectFiles, folder: str, names: list[str], current: Manifest) -> None:
    for name in names:
        if (owner := temporary_owner(name)) is None:
            continue
        of_earlier = owner[0] == current.run_id and 0 < owner[1] < current.attempt
        if of_earlier or writer_has_ended(name) or objects.is_settled(f"{folder}{name}"):
            objects.remove(f"{folder}{name}")
