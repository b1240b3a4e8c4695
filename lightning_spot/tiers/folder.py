"""The folder of one snapshot at a durable tier, file by file: for snapshots that no process has as a whole."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning_spot.errors import TierError
from lightning_spot.image.parts import part_ranges
from lightning_spot.tiers import files
from lightning_spot.tiers.filesystem import make_parent, tier_errors
from lightning_spot.tiers.temporaries import temporary_name
from lightning_spot.tiers.writing import write_object

if TYPE_CHECKING:
    from lightning_spot.tiers.lanes import Lanes

_WRITE_BYTES = 128 * 1024 * 1024


class Folder(Protocol):
    """The files of one snapshot. Each appears whole or not at all. Methods may be called from any thread.

    All of them raise :class:`~lightning_spot.errors.TierError` if the tier fails.
    """

    def sizes(self) -> dict[str, int]:
        """The files that are there, with their sizes; empty if there is no such folder."""

    def write(self, name: str, data: memoryview) -> None:
        """Write a file, in place of what is there; when this returns it is as durable as the tier is."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some of a file, by default all of it.

        Raises:
            SnapshotNotFound: if it is not there.
        """

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is gone."""


@runtime_checkable
class HasFolders(Protocol):
    """A store whose snapshots can be written file by file."""

    def folder(self, name: str, *, attempt: int, run_id: str) -> Folder:
        """The folder of a snapshot.

        Args:
            name: of the snapshot.
            attempt: on whose behalf it is written to.
            run_id: of its run.
        """


class LocalFolder:
    """A folder below a directory; see :class:`Folder`.

    Args:
        root: the run's directory.
        name: of the snapshot.
        attempt: on whose behalf it is written to.
        run_id: of its run.
    """

    def __init__(self, root: Path, name: str, *, attempt: int, run_id: str) -> None:
        self._root, self._path, self._attempt, self._run_id = root, root / name, attempt, run_id

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        with files.tier_errors(str(self._root)):
            found: dict[str, int] = {}
            if not files.is_own_directory(self._path):
                return found
            for name in files.list_directory(self._path):
                status = files.if_there(self._path / name, lambda name=name: os.lstat(self._path / name))  # type: ignore[misc]
                if status is not None and stat.S_ISREG(status.st_mode):  # a pipe of such a name keeps nobody waiting
                    found[name] = status.st_size
            return found

    def write(self, name: str, data: memoryview) -> None:
        """See :meth:`Folder.write`."""
        with files.tier_errors(str(self._root)), self._left_as_it_was():
            files.make_directory(self._path)
            if not files.is_own_directory(self._path):
                raise TierError(f"{self._path} is a link; nothing is written where it leads to", tier=str(self._root))
            slices = (data[start:stop] for start, stop in part_ranges(len(data), _WRITE_BYTES))
            temporary = files.write_aside(self._path, slices, attempt=self._attempt, run_id=self._run_id)
            try:
                os.replace(temporary, self._path / name)
            except BaseException:
                files.remove(temporary)
                raise
            files.sync_directory(self._path)

    @contextlib.contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Leave no empty folder where nothing can be written; another host that finds it gone makes it again."""
        try:
            yield
        except BaseException:
            files.remove_if_empty(self._path)
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See :meth:`Folder.read`."""
        with files.tier_errors(str(self._root), reading=True), open(self._path / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start if stop is not None else -1)

    def remove(self, name: str) -> None:
        """See :meth:`Folder.remove`."""
        with files.tier_errors(str(self._root)):
            files.remove(self._path / name)


class ObjectFolder:
    """A folder on an fsspec file system; see :class:`Folder`.

    Args:
        filesystem: where it is.
        root: path of the run.
        url: of the run.
        lanes: that move large files.
        name: of the snapshot.
        attempt: on whose behalf it is written to.
        run_id: of its run.
    """

    def __init__(
        self, filesystem: Any, root: str, url: str, lanes: Lanes, name: str, *, attempt: int, run_id: str
    ) -> None:
        self._fs, self._path, self._url, self._lanes = filesystem, f"{root}/{name}", url, lanes
        self._attempt, self._run_id = attempt, run_id

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        with tier_errors(self._url):
            try:
                listed = self._fs.ls(self._path, detail=True)
            except FileNotFoundError:
                return {}
            return {str(item["name"]).rstrip("/").rpartition("/")[2]: int(item["size"] or 0) for item in listed}

    def write(self, name: str, data: memoryview) -> None:
        """See :meth:`Folder.write`."""
        path = f"{self._path}/{name}"
        temporary = f"{self._path}/{temporary_name(self._attempt, self._run_id)}"
        with tier_errors(self._url):
            make_parent(self._fs, path)
            write_object(self._fs, path, data, len(data), lanes=self._lanes, temporary=temporary, ready=lambda: None)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See :meth:`Folder.read`."""
        with tier_errors(self._url, reading=True):
            return bytes(self._fs.cat_file(f"{self._path}/{name}", start=start, end=stop))

    def remove(self, name: str) -> None:
        """See :meth:`Folder.remove`."""
        with tier_errors(self._url):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._path}/{name}")
