"""What killed writers left in a directory, and its removal; nothing that is not our own. See `sweeping` for objects."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_spot.image.files import is_own_file
from lightning_spot.image.manifest import MANIFEST_FILE, OWN_DIR, Manifest, Order, snapshot_order
from lightning_spot.tiers import claims, files, store
from lightning_spot.tiers.claims import ATTEMPTS_DIR
from lightning_spot.tiers.temporaries import temporary_owner, writer_has_ended

if TYPE_CHECKING:
    from lightning_spot.tiers.local import LocalStore


def sweep_run(local: LocalStore, current: Manifest) -> None:
    """See :meth:`Store.sweep`."""
    root, problem = local.root, None
    for name in files.list_directory(root):
        order = snapshot_order(name)
        if not ((name in (ATTEMPTS_DIR, OWN_DIR) or order is not None) and files.is_own_directory(root / name)):
            continue
        try:
            with local.inside(root / name) as folder:
                _sweep_temporaries(folder, current)
                if order is not None:
                    _sweep_snapshot(folder, order, current)
                elif name == ATTEMPTS_DIR:
                    for old in claims.forgettable(os.listdir(folder)):
                        files.remove(folder / old)
            if order is not None:
                files.remove_if_empty(root / name)
        except FileNotFoundError:  # it has ended there, or another node removes it, too
            continue
        except OSError as error:  # one place that fails keeps nothing else from being swept
            problem = error
    _sweep_temporaries(root, current)
    if problem is not None:
        raise problem


def sweep_folder(local: LocalStore) -> None:
    """See :meth:`Store.sweep_files`."""
    _sweep_ended(local.root, files.list_directory(local.root))
    if files.is_own_directory(local.root / OWN_DIR):
        with local.inside(local.root / OWN_DIR) as folder:
            _sweep_ended(folder, files.list_directory(folder))


def remove_own(folder: Path) -> None:
    """Remove our own files in a snapshot's directory; it stays, with what is somebody else's."""
    for name in os.listdir(folder):
        if is_own_file(name) or temporary_owner(name) is not None:
            files.remove(folder / name)


def _sweep_snapshot(folder: Path, order: Order, current: Manifest) -> None:
    names = os.listdir(folder)
    if order >= current.order or MANIFEST_FILE in names or not all(map(is_own_file, names)):
        return
    newest_s = max(
        os.stat(path, follow_symlinks=path == folder).st_mtime for path in (folder, *(folder / name for name in names))
    )
    if files.is_there(folder / MANIFEST_FILE):
        return  # a listing may be older than the manifest
    if order[0] < current.attempt or time.time() - newest_s >= store.SETTLED_S:
        remove_own(folder)


def _sweep_temporaries(folder: Path, current: Manifest) -> None:
    for name in os.listdir(folder):
        if (owner := temporary_owner(name)) is None:
            continue
        run_id, attempt = owner
        of_earlier = run_id == current.run_id and 0 < attempt < current.attempt
        if of_earlier or writer_has_ended(name) or _is_settled(folder / name):
            files.remove(folder / name)


def _sweep_ended(folder: Path, names: list[str]) -> None:
    for name in names:
        if temporary_owner(name) is not None and (writer_has_ended(name) or _is_settled(folder / name)):
            files.remove(folder / name)


def _is_settled(path: Path) -> bool:
    """Whether a file was not written to for so long that it has no writer any more."""
    try:
        return time.time() - os.lstat(path).st_mtime >= store.SETTLED_S
    except FileNotFoundError:
        return False  # its writer is done
