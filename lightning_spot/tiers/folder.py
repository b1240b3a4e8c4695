"""The folder of one snapshot at a durable tier, file by file: for snapshots that no process has as a whole."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning_spot.image.parts import part_ranges
from lightning_spot.tiers import files
from lightning_spot.tiers.filesystem import make_parent, tier_errors
from lightning_spot.tiers.temporaries import temporary_name
from lightning_spot.tiers.writing import ignored, nothing, write_whole

if TYPE_CHECKING:
    from lightning_spot.tiers.local import LocalStore
    from lightning_spot.tiers.object_files import ObjectFiles

_WRITE_BYTES = 128 * 1024 * 1024


class Folder(Protocol):
    """The files of one snapshot. Each appears whole or not at all. Methods may be called from any thread.

    All of them raise :class:`~lightning_spot.errors.TierError` if the tier fails.
    """

    def sizes(self) -> dict[str, int]:
        """The files that are there, with their sizes; empty if there is no such folder."""

    def write(self, name: str, data: memoryview) -> None:
        """Write a file, in place of what is there; when this returns it is as durable as the tier is."""

    def write_all(
        self, contents: Mapping[str, memoryview], goes_on: Callable[[], None], done: Callable[[str], None]
    ) -> None:
        """Write several files, each as by :meth:`write`; side by side in an object store.

        Args:
            contents: by name.
            goes_on: called before each of them, and at S3 before each of their blocks; what it raises ends all of it.
            done: told the name of each that is there. Both may be called on several threads.
        """

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some of a file, by default all of it.

        Raises:
            SnapshotNotFound: if it is not there.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; nothing happens to those that are gone. Where one cannot be removed, the others are."""


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
        store: of the run.
        name: of the snapshot.
        attempt: on whose behalf it is written to.
        run_id: of its run.
    """

    def __init__(self, store: LocalStore, name: str, *, attempt: int, run_id: str) -> None:
        self._store, self._name, self._attempt, self._run_id = store, name, attempt, run_id

    @property
    def _path(self) -> Path:
        return self._store.root / self._name

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        with files.tier_errors(self._store.url):
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
        with files.tier_errors(self._store.url), self._left_as_it_was():
            slices = (data[start:stop] for start, stop in part_ranges(len(data), _WRITE_BYTES))
            with self._store.inside(self._store.made() / self._name, make=True) as folder:
                temporary = files.write_aside(folder, slices, attempt=self._attempt, run_id=self._run_id)
                try:
                    os.replace(temporary, folder / name)
                except BaseException:
                    files.remove(temporary)
                    raise
                files.sync_directory(folder)

    def write_all(
        self, contents: Mapping[str, memoryview], goes_on: Callable[[], None], done: Callable[[str], None]
    ) -> None:
        """See :meth:`Folder.write_all`. A disk writes faster at one place."""
        for name, data in contents.items():
            goes_on()
            self.write(name, data)
            done(name)

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
        with files.tier_errors(self._store.url, reading=True), open(self._path / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start if stop is not None else -1)

    def remove(self, names: Sequence[str]) -> None:
        """See :meth:`Folder.remove`."""
        problem: OSError | None = None
        with files.tier_errors(self._store.url):
            if not files.is_own_directory(self._path):
                return
            with self._store.inside(self._path) as folder:
                for name in names:
                    try:
                        files.remove(folder / name)
                    except OSError as error:
                        problem = error
            if problem is not None:
                raise problem


class ObjectFolder:
    """A folder on an fsspec file system; see :class:`Folder`.

    Args:
        objects: the run's.
        name: of the snapshot.
        attempt: on whose behalf it is written to.
        run_id: of its run.
    """

    def __init__(self, objects: ObjectFiles, name: str, *, attempt: int, run_id: str) -> None:
        self._objects, self._name = objects, name
        self._url, self._attempt, self._run_id = objects.url, attempt, run_id

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        with tier_errors(self._url):
            return self._objects.sizes(self._name)

    def write(self, name: str, data: memoryview) -> None:
        """See :meth:`Folder.write`."""
        self.write_all({name: data}, nothing, ignored)

    def write_all(
        self, contents: Mapping[str, memoryview], goes_on: Callable[[], None], done: Callable[[str], None]
    ) -> None:
        """See :meth:`Folder.write_all`."""
        names = {self._path(name): name for name in contents}
        with tier_errors(self._url):
            make_parent(self._objects.fs, self._path("any"))
            write_whole(
                self._objects.fs,
                {path: contents[name] for path, name in names.items()},
                temporary=lambda: self._path(temporary_name(self._attempt, self._run_id)),
                goes_on=goes_on,
                done=lambda path: done(names[path]),
            )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See :meth:`Folder.read`."""
        with tier_errors(self._url, reading=True):
            return bytes(self._objects.fs.cat_file(self._path(name), start=start, end=stop))

    def remove(self, names: Sequence[str]) -> None:
        """See :meth:`Folder.remove`."""
        with tier_errors(self._url):
            self._objects.remove_all([f"{self._name}/{name}" for name in names])

    def _path(self, name: str) -> str:
        return self._objects.path(f"{self._name}/{name}")
