"""Names below a node: ``RUN/SNAPSHOT/model.ckpt`` (or other files), ``RUN/FILE``, ``RUN/last.ckpt`` for the newest."""

from __future__ import annotations

from lightning_spot.errors import ServerRefusedError, SettingsError, SnapshotNotFoundError
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.memory.prefixes import is_own_folder
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import Slot

LAST = "last.ckpt"


def resolve(ring: Ring, run: str, path: str) -> tuple[Slot, Manifest]:
    """The slot that holds what a path names; ``last.ckpt`` only if a user stored a file of that name.

    Raises:
        SnapshotNotFoundError: if nothing committed has that name.
    """
    found = ring.readable(run)
    for slot, manifest in found:
        if path == manifest.manifest_path or manifest.span_at(path) is not None:
            return slot, manifest
    names = ", ".join(manifest.name for _, manifest in found) or "nothing"
    raise SnapshotNotFoundError(
        f"no {path!r} in run {run!r} at this node; it holds {names} (and {MANIFEST_FILE} of each)"
    )


def file_name(path: str) -> str:
    """Name of a user's file below a run.

    Raises:
        ServerRefusedError: if the path has folders: a run has none.
        SettingsError: if it is no name.
    """
    if "/" in path.strip("/"):
        raise ServerRefusedError(f"{path!r} names no file: those of a run are in no folders", status=409)
    if not path or path.startswith(".") or "\0" in path or len(path.encode()) > 200:
        raise SettingsError(f"{path!r} cannot name a file: it is empty, hidden or too long")
    if is_own_folder(path):
        raise SettingsError(f"{path!r} cannot name a file: a run has a directory of that name")
    return path
