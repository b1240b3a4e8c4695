"""What left a node's memory, as the node reads it for others: in the durable directory.

Bytes are read in whole parts and each is checked, so nothing is held in memory as a whole. Calls block.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec

from lightning_spot.config import MOST_PART_BYTES, PART_BYTES
from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound, SpotError, TierError
from lightning_spot.image.files import is_data_file, pieces
from lightning_spot.image.manifest import MANIFEST_FILE, OWN_DIR, Manifest, manifest_path_of, snapshot_order
from lightning_spot.image.parts import checksum
from lightning_spot.tiers.beneath import Beneath, open_file, opened
from lightning_spot.tiers.filesystem import time_of
from lightning_spot.untrusted import LARGE_BYTES

_LARGEST_CHECKED_PART = MOST_PART_BYTES
_LONGEST_MANIFEST = LARGE_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a run.

    Attributes:
        path: below the run.
        nbytes: its size.
        created_unix_s: when it was made, 0 where that is not known.
    """

    path: str
    nbytes: int
    created_unix_s: float = 0.0


class Below(ABC):
    """One run below a node. Make one with :func:`open_below`.

    Args:
        url: of the run there.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @abstractmethod
    def entries(self) -> list[Entry]:
        """Committed snapshots and files; empty where there is none.

        Raises:
            TierError: if they could not be listed.
        """

    def manifest(self, path: str) -> Manifest:
        """Manifest of the snapshot or file that a path below the run names.

        Raises:
            SnapshotNotFound: if there is none.
            TierError: if it could not be read.
            CorruptManifest: if it is damaged.
        """
        is_below = {"", ".", ".."}.isdisjoint(path.split("/"))
        for wanted in _manifests_for(path) if is_below else ():
            manifest = self._manifest_at(wanted)
            if manifest is not None and (path == manifest.manifest_path or manifest.span_at(path) is not None):
                return manifest
        raise SnapshotNotFound(f"no {path!r} at {self.url}")

    def read(self, manifest: Manifest, start: int, stop: int) -> Iterator[bytes]:
        """Bytes ``[start, stop)`` of a snapshot's image, a part at a time, each checked.

        Raises:
            SnapshotNotFound: if it has gone.
            CorruptSnapshot: if a part does not have its checksum.
            TierError: if it could not be read.
        """
        checked = bool(manifest.checksums) and manifest.part_bytes <= _LARGEST_CHECKED_PART
        step = manifest.part_bytes if checked else PART_BYTES
        for index in range(start // step, -(-stop // step)):
            first, last = index * step, min((index + 1) * step, manifest.nbytes)
            data = self._range(manifest, first, last)
            if len(data) != last - first or (checked and checksum(data) != manifest.checksums[index]):
                raise CorruptSnapshot(
                    f"{self.url}/{manifest.data_path}: bytes {first}–{last} are not those that were committed",
                    where=self.url,
                    part=index,
                )
            yield data[max(0, start - first) : stop - first]

    def _failed(self, error: Exception) -> TierError:
        return TierError(f"{self.url} could not be read: {error}", tier=self.url)

    @abstractmethod
    def _manifest_at(self, path: str) -> Manifest | None:
        """The manifest at a path below the run, ``None`` if there is none."""

    @abstractmethod
    def _range(self, manifest: Manifest, first: int, last: int) -> bytes:
        """Bytes of a snapshot's image."""


class DurableDirectory(Below):
    """The durable directory of one run: an absolute path or an fsspec URL.

    Args:
        url: of the run.
        check: raises where this node may not read.
    """

    def __init__(self, url: str, check: Callable[[], None]) -> None:
        super().__init__(url)
        self._fs, self._root = fsspec.core.url_to_fs(self.url)
        self._check = check

    def entries(self) -> list[Entry]:
        """See :meth:`Below.entries`."""
        self._check()
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, maxdepth=2, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # every file system has errors of its own
            raise self._failed(error) from error
        below = ((path[len(self._root) :].strip("/"), fact) for path, fact in found.items())
        return _counted([Entry(path, int(fact.get("size") or 0), time_of(fact)) for path, fact in below])

    def _manifest_at(self, path: str) -> Manifest | None:
        self._check()
        try:
            return Manifest.from_json(self._fs.cat_file(f"{self._root}/{path}", end=_LONGEST_MANIFEST))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        except SpotError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _range(self, manifest: Manifest, first: int, last: int) -> bytes:
        found = bytearray()
        try:
            for span, start, stop in pieces(manifest.spans, first, last):
                if span is None:
                    found += bytes(stop - start)
                else:
                    path = f"{self._root}/{manifest.path_of(span)}"
                    found += self._fs.cat_file(path, start=start - span.offset, end=stop - span.offset)
        except FileNotFoundError as error:
            raise SnapshotNotFound(f"{manifest.data_path} has left {self.url}") from error
        except Exception as error:
            raise self._failed(error) from error
        return bytes(found)


class LentDirectory(Below):
    """A durable directory that a node reads for others: no link on the way to it, or in it, is followed.

    Args:
        url: of the run.
        prefixes: below which it must be.
        check: raises where this node may not read.
    """

    def __init__(self, url: str, prefixes: Sequence[str], check: Callable[[], None]) -> None:
        super().__init__(url)
        self._prefixes, self._check = prefixes, check

    @functools.cached_property
    def _beneath(self) -> Beneath:
        return Beneath(Path(self.url.removeprefix("file://")), self._prefixes)

    def entries(self) -> list[Entry]:
        """See :meth:`Below.entries`."""
        self._check()
        try:
            root = self._beneath.path()
            found = list(_files_in(root, ""))
            for name in os.listdir(root):
                if (snapshot_order(name) or name == OWN_DIR) and stat.S_ISDIR(os.lstat(root / name).st_mode):
                    with opened(root / name) as folder:
                        found += _files_in(folder, f"{name}/")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed(error) from error
        return _counted(found)

    def _manifest_at(self, path: str) -> Manifest | None:
        self._check()
        try:
            with open(open_file(self._beneath.path(), path), "rb") as file:
                return Manifest.from_json(file.read(_LONGEST_MANIFEST))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):  # a name with a zero is none
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link
                return None
            raise self._failed(error) from error

    def _range(self, manifest: Manifest, first: int, last: int) -> bytes:
        found = bytearray()
        try:
            for span, start, stop in pieces(manifest.spans, first, last):
                if span is None:
                    found += bytes(stop - start)
                    continue
                with open(open_file(self._beneath.path(), manifest.path_of(span)), "rb") as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        raise SnapshotNotFound(f"{manifest.path_of(span)} at {self.url} is no plain file")
                    file.seek(start - span.offset)
                    found += file.read(stop - start)
        except FileNotFoundError as error:
            raise SnapshotNotFound(f"{manifest.data_path} has left {self.url}") from error
        except OSError as error:
            raise self._failed(error) from error
        return bytes(found)


def open_below(url: str, prefixes: Sequence[str] | None, check: Callable[[], None]) -> Below:
    """What is at the URL of a run.

    Args:
        url: of the run.
        prefixes: below which a directory must be, of a node that acts for others.
        check: raises where the node may not read.
    """
    if prefixes is not None and ("://" not in url or url.startswith("file://")):
        return LentDirectory(url, prefixes, check)
    return DurableDirectory(url, check)


def _files_in(folder: Path, prefix: str) -> Iterator[Entry]:
    for name in os.listdir(folder):
        fact = os.lstat(folder / name)
        if stat.S_ISREG(fact.st_mode):
            yield Entry(f"{prefix}{name}", fact.st_size, fact.st_mtime)


def _counted(found: Sequence[Entry]) -> list[Entry]:
    """Those that a manifest of ours makes count, of what lies in a run."""
    paths = {entry.path for entry in found}

    def counts(path: str) -> bool:
        folder, _, file = path.rpartition("/")
        if not folder:
            return manifest_path_of(file) in paths
        return is_data_file(file) and bool(snapshot_order(folder)) and f"{folder}/{MANIFEST_FILE}" in paths

    return [entry for entry in found if counts(entry.path)]


def _manifests_for(path: str) -> list[str]:
    """Where the manifest of a path may lie."""
    folder, _, file = path.rpartition("/")
    if folder == OWN_DIR:
        return [path]
    if folder:
        return [f"{folder}/{MANIFEST_FILE}"]
    return [manifest_path_of(file), f"{file}/{MANIFEST_FILE}"]
