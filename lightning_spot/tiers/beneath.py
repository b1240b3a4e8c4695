"""A directory below a prefix that an operator lends to others: reached without following links, it leads nowhere else.

Every path that is given out begins with a descriptor, so a directory that is swapped for a link later changes nothing.
One that was moved away is found not to be there: the way from the prefix is walked each time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_spot.errors import TierError

_OPEN = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DESCRIPTORS = Path("/proc/self/fd")
_NOWHERE = _DESCRIPTORS / "none"  # nothing is there, and nothing can be made there


class Beneath:
    """A directory below one of several prefixes. Links in a prefix, which the operator named, are followed.

    Args:
        root: the directory; it need not be there.
        prefixes: absolute paths; others are no directories.

    Raises:
        TierError: if it is below none of them.
    """

    def __init__(self, root: Path, prefixes: Sequence[str]) -> None:
        self._root, real = root, Path(os.path.realpath(root))
        lent = [
            Path(os.path.realpath(each))
            for each in (each.removeprefix("file://") for each in prefixes)
            if each[:1] == "/"
        ]
        self._prefix = next((prefix for prefix in lent if real.is_relative_to(prefix)), None)
        if self._prefix is None:
            raise TierError(f"{root} is below none of the directories that this node may write to", tier=str(root))
        self._names = real.relative_to(self._prefix).parts
        self._lock = threading.Lock()
        self._opened: list[int] = []  # the last one is in use; a path with an earlier one may be, too
        weakref.finalize(self, _close, self._opened)

    def path(self, *, make: bool = False) -> Path:
        """The directory, as long as this object lives.

        Args:
            make: whether it is made if it is not there; otherwise the path is one at which there is nothing.

        Raises:
            OSError: if it cannot be opened, or made.
            TierError: if a link is on the way.
        """
        with self._lock:
            found = self._walk(make=make)
            if found is None:
                return _NOWHERE
            if self._opened and _is_same(self._opened[-1], found):
                os.close(found)
            else:
                self._opened.append(found)
            return _DESCRIPTORS / str(self._opened[-1])

    def _walk(self, *, make: bool) -> int | None:
        assert self._prefix is not None
        try:
            at = os.open(self._prefix, _OPEN)
        except FileNotFoundError:
            if not make:
                return None
            raise
        try:
            for name in self._names:
                if make:
                    _make(name, at)
                below = os.open(name, _OPEN, dir_fd=at)
                os.close(at)
                at = below
        except FileNotFoundError:
            os.close(at)
            if make:
                raise
            return None
        except NotADirectoryError as error:
            os.close(at)
            raise TierError(
                f"{self._root} leads through a link, or a file: nothing is read or written there"
            ) from error
        except BaseException:
            os.close(at)
            raise
        return at


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """A folder that is no link, as a path that leads nowhere else until the context ends.

    Raises:
        NotADirectoryError: if it is a link, or no folder.
        OSError: if it cannot be opened.
    """
    at = os.open(folder, _OPEN)
    try:
        yield _DESCRIPTORS / str(at)
    finally:
        os.close(at)


def _make(name: str, at: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=at)
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _is_same(folder: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(folder, other)
    except OSError:  # of a file server that has removed it
        return False


def _close(opened: list[int]) -> None:
    for each in opened:
        os.close(each)
