"""A store on a local or mounted file system: temporary file, fsync, rename, fsync of the directory; manifest last."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptManifest, CorruptSnapshot, SnapshotNotFound, SpotError, TierError
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest, snapshot_order
from lightning_spot.tiers.store import (
    ATTEMPTS_DIR,
    Progress,
    check_fence,
    claim_name,
    highest_claim,
    newest_first,
)

logger = logging.getLogger(__name__)
_TEMPORARY = ".lightning-spot-tmp-"


class LocalStore:
    """Snapshots of one run below a directory; implements :class:`~lightning_spot.tiers.store.Store`.

    Args:
        root: the run's directory; made when first written to.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)

    def put(self, manifest: Manifest, image: memoryview, *, writer: int) -> None:
        """See :meth:`Store.put`."""
        if not manifest.is_file:
            check_fence(manifest.run, writer, self.claimed())
        with _tier_errors(self.url):
            data, commit = self.root / manifest.data_path, self.root / manifest.manifest_path
            if _holds(data, commit, manifest):
                # A node that takes over from a killed one may not know that this was committed, and must not undo it.
                # Its predecessor may have been killed before it synced the names.
                _sync_directory(data.parent)
                _sync_directory(self.root)
                return
            data.parent.mkdir(parents=True, exist_ok=True)
            commit.unlink(missing_ok=True)  # while the data is replaced there is no snapshot of this name
            _write_durably(data, image)
            _write_durably(commit, memoryview(manifest.to_json().encode()))
            if not manifest.is_file:
                _sync_directory(self.root)

    def manifests(self) -> list[Manifest]:
        """See :meth:`Store.manifests`."""
        found = []
        with _tier_errors(self.url):
            for path in self.root.glob(f"*/{MANIFEST_FILE}"):
                try:
                    manifest = Manifest.from_json(path.read_bytes())
                except FileNotFoundError:
                    continue  # deleted meanwhile
                except CorruptManifest as error:
                    logger.warning("%s is left out: %s", path, error)
                    continue
                if manifest.name == path.parent.name:
                    found.append(manifest)
        return newest_first(found)

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        path = self.root / manifest.data_path
        with _tier_errors(self.url), open(path, "rb", buffering=0) as file:
            place = 0
            while place < manifest.nbytes:
                count = file.readinto(into[place : min(place + PART_BYTES, manifest.nbytes)])
                if not count:
                    raise CorruptSnapshot(
                        f"{path} is cut short: {place} of {manifest.nbytes} bytes are there", where=self.url
                    )
                place += count
                if progress is not None:
                    progress(count)

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        with _tier_errors(self.url):
            (self.root / manifest.manifest_path).unlink(missing_ok=True)
            if manifest.is_file:
                (self.root / manifest.data_path).unlink(missing_ok=True)
            else:
                shutil.rmtree(self.root / manifest.name, ignore_errors=True)

    def sweep(self, current: Manifest) -> None:
        """See :meth:`Store.sweep`."""
        with _tier_errors(self.url):
            for folder in self.root.glob("step-*-attempt-*"):
                order = snapshot_order(folder.name)
                if order is not None and order < current.order and not (folder / MANIFEST_FILE).exists():
                    shutil.rmtree(folder, ignore_errors=True)

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        with _tier_errors(self.url):
            try:
                return highest_claim(os.listdir(self.root / ATTEMPTS_DIR))
            except FileNotFoundError:
                return 0

    def claim(self, attempt: int, record: dict[str, Any]) -> None:
        """See :meth:`Store.claim`."""
        with _tier_errors(self.url):
            path = self.root / ATTEMPTS_DIR / claim_name(attempt)
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_durably(path, memoryview(json.dumps(record, indent=1).encode()))


def _holds(data: Path, commit: Path, manifest: Manifest) -> bool:
    """Whether this very snapshot is committed already, with every byte as it should be."""
    try:
        if Manifest.from_json(commit.read_bytes()) != manifest or data.stat().st_size != manifest.nbytes:
            return False
        with open(data, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            with memoryview(image) as view:
                manifest.verify(view, str(data))
            os.fsync(file.fileno())
    except (FileNotFoundError, CorruptSnapshot, ValueError):  # an empty file cannot be mapped
        return False
    return True


def _write_durably(path: Path, data: memoryview) -> None:
    """Make ``path`` hold ``data`` or leave it as it was, also if power fails in between."""
    temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb", buffering=0) as file:
            for start in range(0, len(data), PART_BYTES):
                part = data[start : start + PART_BYTES]
                while part:
                    part = part[file.write(part) :]
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _tier_errors(url: str) -> Iterator[None]:
    try:
        yield
    except SpotError:
        raise
    except FileNotFoundError as error:
        raise SnapshotNotFound(f"{error.filename or url} does not exist") from error
    except OSError as error:
        raise TierError(f"{url}: {error.strerror or error} ({error.filename or url})", tier=url) from error
