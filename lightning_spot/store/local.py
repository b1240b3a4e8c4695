"""A store on a local or mounted file system: temporary file, fsync, rename, fsync of the directory; manifest last."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spot.errors import TierError
from lightning_spot.snapshot.manifest import OWN_DIR, Manifest, snapshot_order
from lightning_spot.store import posix, store
from lightning_spot.store.fences import ATTEMPTS_DIR, Claim
from lightning_spot.store.posix import Beneath, open_regular, opened, tier_errors
from lightning_spot.store.store import Data, Ready, Store, Writer, parts_of


class LocalStore(Store):
    """Snapshots of one run below a directory; a :class:`~lightning_spot.store.store.Store`.

    The directory may be a link. Links inside it are read, but nothing they lead to is ever changed or deleted.

    Args:
        root: the run's directory; made when first written to.
        beneath: prefixes below one of which it must be, where a server acts for others: no link below leads out of
            that, and of users' files only those that have a manifest of ours are replaced or deleted. ``None`` for no
            bound.

    Raises:
        TierError: if it is below none of them.
    """

    def __init__(self, root: str | Path, beneath: Sequence[str] | None = None) -> None:
        self._root = Path(root).absolute()
        super().__init__(str(self._root), is_lent=beneath is not None)
        self._beneath = Beneath(self._root, beneath) if beneath is not None else None
        self._in_place = threading.Lock()  # a disk reads faster from one place

    @property
    def root(self) -> Path:
        """The run's directory."""
        return self._root if self._beneath is None else self._beneath.path()

    def inode(self) -> int:
        """See :meth:`Store.inode`."""
        try:
            return os.stat(self.root / ATTEMPTS_DIR).st_ino
        except OSError:
            return 0

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`. The inode of the attempts directory is noted in it."""
        with tier_errors(self.url), self._inside(self.made() / ATTEMPTS_DIR):
            super().claim(replace(claim, inode=self.inode()))

    def made(self) -> Path:
        """The run's directory, made where it is reached without following links."""
        return self._root if self._beneath is None else self._beneath.path(make=True)

    # -- operations on files --------------------------------------------------------------------------------------

    def _errors(self, *, reading: bool = False) -> contextlib.AbstractContextManager[None]:
        return tier_errors(self.url, reading=reading)

    def _all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return [job() for job in jobs]

    def _names(self, below: str) -> list[str]:
        return posix.list_directory(self.root / below)

    def _sizes(self, below: str) -> dict[str, int]:
        found: dict[str, int] = {}
        folder = self.root / below
        for name in posix.list_directory(folder) if posix.is_own_directory(folder) else ():
            status = posix.if_there(folder / name, functools.partial(os.lstat, folder / name))
            if status is not None and stat.S_ISREG(status.st_mode):  # a pipe of such a name keeps nobody waiting
                found[name] = status.st_size
        return found

    def _size(self, below: str) -> int | None:
        try:
            return posix.patiently(lambda: os.stat(self.root / below)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _read(self, below: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self.root / below
        data = posix.if_there(path, lambda: posix.read(path, start, stop))
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return data

    def _readers(self, part_bytes: int) -> int:
        return 2

    def _read_image(self, manifest: Manifest, start: int, into: memoryview) -> None:
        with self._in_place:
            super()._read_image(manifest, start, into)

    def _fill(self, below: str, start: int, into: memoryview) -> int:
        with open(open_regular(self.root / below), "rb") as file:
            file.seek(start)
            return file.readinto(into)

    def _write(self, contents: Mapping[str, Data], by: Writer, ready: Ready = store.nothing) -> None:
        """See :meth:`Store._write`. None is in its place before all are on the disk; where that is full, nothing stays.

        What becomes a user's file is not seen in the user's folder before.
        """
        below = next(iter(contents)).rpartition("/")[0]
        parent = self.made() / below
        aside = parent if below else parent / OWN_DIR
        temporaries: list[Path] = []
        try:
            with self._inside(aside) as folder:
                place = folder if below else parent
                try:
                    for data in contents.values():
                        parts = parts_of(data, self._at_once_bytes)
                        temporaries.append(posix.write_aside(folder, parts, attempt=by[0], run_id=by[1]))
                    ready()
                    for temporary, name in zip(temporaries, contents, strict=True):
                        os.replace(temporary, place / Path(name).name)
                except BaseException:
                    for temporary in temporaries:
                        posix.remove(temporary)
                    raise
                posix.sync_directory(place)
        except BaseException:
            posix.remove_if_empty(aside)  # a disk that is full for long would have one for each snapshot
            raise

    def _create(self, below: str, data: bytes, by: Writer) -> None:
        with self._inside((self.made() / below).parent) as folder:
            posix.create_exclusively(folder / Path(below).name, memoryview(data), attempt=by[0], run_id=by[1])

    def _remove(self, below: str, names: Sequence[str]) -> None:
        folder = self.root / below
        if below and not posix.is_own_directory(folder):
            return  # not there, or a link to somebody's place

        def remove() -> None:
            with self._held(folder) as held, contextlib.ExitStack() as each:
                for name in names:
                    each.callback(posix.remove, held / name)

        try:
            remove()
        except FileNotFoundError:  # another server has removed it, or a file server that fails over says so wrongly
            if posix.is_there(folder):
                remove()
        if below:
            posix.remove_if_empty(folder)

    def _settle(self, *belows: str) -> None:
        for parent in dict.fromkeys((self.root / below).parent for below in belows):
            with contextlib.suppress(FileNotFoundError):  # another server deletes it, too
                posix.sync_directory(parent)

    def _is_settled(self, name: str, files: Sequence[str], current: Manifest) -> bool:
        folder = self.root / name
        return all(self._is_old(each, current) for each in (folder, *(folder / file for file in files)))

    def _is_old(self, path: Path, current: Manifest) -> bool:
        """Whether a file was not written to for so long that it has no writer any more."""
        try:
            now_s = os.lstat(self.root / current.manifest_path).st_mtime
            return now_s - os.lstat(path).st_mtime >= store.SETTLED_S
        except FileNotFoundError:
            return False  # its writer is done

    def _sweep_temporaries(self, current: Manifest) -> None:
        run_id, attempt = (current.run_id, current.attempt) if not current.is_file else ("", 0)
        names = ["", OWN_DIR]
        if not current.is_file:
            names += [ATTEMPTS_DIR, *(name for name in self._names("") if snapshot_order(name) is not None)]

        def sweep(name: str) -> None:
            if name and not posix.is_own_directory(self.root / name):
                return
            with contextlib.suppress(FileNotFoundError), self._held(self.root / name) as folder:
                for file in posix.list_directory(folder):
                    if posix.is_left(file, functools.partial(self._is_old, folder / file, current), run_id, attempt):
                        posix.remove(folder / file)

        with contextlib.ExitStack() as each:  # one place that fails keeps nothing else from being swept
            for name in names:
                each.callback(sweep, name)

    # -- inside ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _inside(self, folder: Path) -> Iterator[Path]:
        """A folder of the run, made if it is not there: nothing is written where a link in its place leads to."""
        posix.make_directory(folder, like_parent=folder.name == OWN_DIR and self._beneath is None)
        if not posix.is_own_directory(folder):
            raise TierError(f"{self.url}/{folder.name} is a link; nothing is written where it leads to", tier=self.url)
        with self._held(folder) as held:
            yield held

    def _held(self, folder: Path) -> contextlib.AbstractContextManager[Path]:
        """A folder that is no link, as a path that leads nowhere else meanwhile."""
        return contextlib.nullcontext(folder) if self._beneath is None or folder == self.root else opened(folder)
