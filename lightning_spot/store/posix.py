"""Files and directories that survive a loss of power: written aside, synced, renamed. Not for what they mean.

Memory is written past the page cache where memory, place and file system let it. A buffered write copies every byte and
makes a page for it: 2 to 4 s of CPU a GiB on small machines, taken from training, and the pages push the training data
out of the cache. With ``O_DIRECT`` the disk reads the slot's own memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.protocol.process import ProcessId, this_host
from lightning_spot.retry import retried

DIRECT_FLAG = getattr(os, "O_DIRECT", 0)
"""The flag for writes past the page cache; 0 on a system that has none."""

_ALIGNED_BYTES = 4096  # what disks and file systems ask for is this or less; who asks for more refuses, see below
_LEAST_BYTES = 1024 * 1024  # less is over sooner by way of the cache
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})  # tmpfs before Linux 6.6, some FUSE and NFS

_PASSES = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO})
PAUSES_S = (0.05, 0.2)
"""Pauses before a file operation that failed in passing is retried; callers retry after a file server's failover."""

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

Result = TypeVar("Result")


def write_parts(file: io.FileIO, parts: Iterable[memoryview]) -> None:
    """Write parts one after the other; what is page-aligned in memory and in the file goes past the page cache.

    Args:
        file: at its beginning. Whoever wants the bytes on the disk syncs it afterwards, in any case.
        parts: consecutive, each done with when the next one is asked for.

    Raises:
        OSError: if they could not be written.
    """
    place, past_cache, refused = 0, False, not DIRECT_FLAG
    for part in parts:
        while part:
            wanted = not refused and _is_aligned(part, place)
            if wanted != past_cache:
                past_cache = _switch(file.fileno(), past_cache=wanted)
                refused = refused or wanted != past_cache
            whole = part[: len(part) // _ALIGNED_BYTES * _ALIGNED_BYTES] if past_cache else part
            try:
                count = file.write(whole)
            except OSError as error:
                if not past_cache or error.errno not in _REFUSALS:
                    raise
                refused = True
                continue
            part, place = part[count:], place + count


def _is_aligned(part: memoryview, place: int) -> bool:
    """Whether it can go past the cache; memory that is read-only tells no address, and is small (manifests)."""
    if part.readonly or len(part) < _LEAST_BYTES or place % _ALIGNED_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(part)) % _ALIGNED_BYTES == 0


def _switch(fd: int, *, past_cache: bool) -> bool:
    """Have writes go past the cache or through it; whether they go past it now."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | DIRECT_FLAG if past_cache else flags & ~DIRECT_FLAG)
    except OSError as error:
        if not past_cache or error.errno not in _REFUSALS:
            raise
        return False
    return past_cache


def why_not_writable(path: str | Path) -> str:
    """Why nothing can be written below a directory, made here if it is not there yet; ``""`` if something can."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        return f"cannot be made ({'it is a file' if isinstance(error, FileExistsError) else error.strerror})"
    return "" if os.access(path, os.W_OK | os.X_OK) else "is not writable"


def patiently(action: Callable[[], Result]) -> Result:
    """Do what only reads; where a disk or file server fails in a way that may pass, try twice more."""
    return retried(action, PAUSES_S, lambda error: isinstance(error, OSError) and error.errno in _PASSES)


def is_there(path: Path) -> bool:
    """Whether there is anything of that name. Unlike ``os.path.lexists`` it does not take an error for a no."""
    try:
        patiently(lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_own_directory(path: Path) -> bool:
    """Whether this is a directory and no link to one. An error is an error, and no answer; see :func:`if_there`."""
    try:
        status = if_there(path, lambda: os.lstat(path))
    except NotADirectoryError:
        return False
    return status is not None and stat.S_ISDIR(status.st_mode)


def if_there(path: Path, action: Callable[[], Result]) -> Result | None:
    """Do what only reads ``path``; ``None`` if there is nothing of that name.

    "Nothing there" is asked for twice, in two ways: it may have appeared meanwhile, a file server that fails over may
    have said so wrongly, and a link to a place that is not there now is not the same as nothing.

    Raises:
        OSError: if it cannot be read.
    """
    for _ in range(2):
        try:
            return patiently(action)
        except FileNotFoundError:
            if not is_there(path):
                return None
    raise OSError(errno.ENOLINK, "it is a link to what is not there", str(path))


def list_directory(path: Path) -> list[str]:
    """Names in a directory; empty if there is no such directory.

    Raises:
        OSError: if there is something of that name and it cannot be listed.
    """
    return if_there(path, lambda: os.listdir(path)) or []


def open_regular(path: Path) -> int:
    """A descriptor to read a file by.

    Raises:
        CorruptSnapshotError: if it is no regular file: a pipe of that name would keep us for ever.
        OSError: if it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptSnapshotError(f"{path} is no regular file")
    return fd


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes:
    """Some of a file, by default all of it.

    Raises:
        CorruptSnapshotError: if it is no regular file.
        OSError: if it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        return file.read(max(0, (size if stop is None else min(size, stop)) - start))


def write_aside(folder: Path, parts: Iterable[memoryview], *, attempt: int, run_id: str) -> Path:
    """Write a temporary file and sync it; nothing of it stays if that fails."""
    temporary = folder / temporary_name(attempt, run_id)
    try:
        with open(temporary, "xb", buffering=0) as file:
            write_parts(file, parts)
            os.fsync(file.fileno())
    except BaseException:
        remove(temporary)
        raise
    return temporary


def create_exclusively(path: Path, data: memoryview, *, attempt: int, run_id: str) -> None:
    """Create ``path`` with ``data``, whole or not at all, unless it exists."""
    temporary = write_aside(path.parent, [data], attempt=attempt, run_id=run_id)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _create_in_place(path, data)
    finally:
        remove(temporary)


def _create_in_place(path: Path, data: memoryview) -> None:
    """Where there are no hard links. Killed in the middle it leaves a damaged file, whose name still counts."""
    with contextlib.suppress(FileExistsError), open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_directory(path: Path, *, like_parent: bool = False) -> None:
    """Make a directory and those above it; the name of each new one is synced.

    Args:
        path: of the directory.
        like_parent: whether it gets the permissions of the one above it, so that whoever may write there may here.
    """
    wanted, missing = path, []
    while not path.is_dir():
        missing.append(path)
        if path.parent == path:
            break
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            if like_parent and folder == wanted:
                with contextlib.suppress(OSError):  # a mount that knows no permissions
                    os.chmod(folder, stat.S_IMODE(os.stat(folder.parent).st_mode))
        sync_directory(folder.parent)


def remove(path: Path) -> None:
    """Remove a file if it is there; a link is removed, not what it leads to."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        if is_there(path):  # a file server that fails over may have said so wrongly
            os.unlink(path)


def remove_if_empty(path: Path) -> None:
    """Remove a directory if nothing is in it; one that cannot be removed stays."""
    with contextlib.suppress(OSError):
        os.rmdir(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def tier_errors(url: str, *, reading: bool = False) -> Iterator[None]:
    """Turn errors of the system into ours.

    Args:
        url: of the tier.
        reading: whether a file that is not there is :class:`SnapshotNotFoundError`; when writing it is a tier that
            fails.
    """
    try:
        yield
    except SpotError:
        raise
    except OSError as error:
        if reading and isinstance(error, FileNotFoundError):
            raise SnapshotNotFoundError(f"{error.filename or url} does not exist") from error
        place = f" ({error.filename})" if str(error.filename or url) != url else ""
        raise TierError(f"{url}: {error.strerror or error}{place}", tier=url) from error


_PREFIX = ".lightning-spot-tmp-"
_TEMPORARY = re.compile(
    re.escape(_PREFIX) + r"(\d{1,9})-([0-9a-f]*)-([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{8}"
)
_TICKS = 2**32


def temporary_name(attempt: int, run_id: str) -> str:
    """Name of a file that this process writes on behalf of an attempt of a run."""
    pid = os.getpid()
    process = ProcessId.of(pid)
    started = process.started % _TICKS if process is not None else 0
    return f"{_PREFIX}{attempt:04d}-{run_id}-{_machine()}{pid:08x}{started:08x}{secrets.token_hex(4)}"


def temporary_owner(name: str) -> tuple[str, int] | None:
    """Run id and attempt of a temporary of ours; ``("", 0)`` if another version wrote it, ``None`` if it is none."""
    if match := _TEMPORARY.fullmatch(name):
        return match[2], int(match[1])
    return ("", 0) if name.startswith(_PREFIX) else None


def is_left(name: str, is_settled: Callable[[], bool], run_id: str = "", attempt: int = 0) -> bool:
    """Whether a file is a temporary that has no writer any more.

    Args:
        name: of the file.
        is_settled: asked last: whether it was not written to for :data:`~lightning_spot.store.store.SETTLED_S`.
        run_id: of a run whose earlier attempts are fenced.
        attempt: of the run, before which attempts are.
    """
    if (owner := temporary_owner(name)) is None:
        return False
    is_fenced = owner[0] == run_id and 0 < owner[1] < attempt
    return is_fenced or writer_has_ended(name) or is_settled()


def writer_has_ended(name: str) -> bool:
    """Whether the process that wrote a temporary is known to have ended: one of this machine, since it was started."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or match[3] != _machine():  # nor where nothing is known of other processes
        return False
    pid = int(match[4], 16)
    process = ProcessId.of(pid)
    if process is not None:
        return process.started % _TICKS != int(match[5], 16)
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False  # somebody else's, which is not shown to this user
    except ProcessLookupError:
        pass
    return True


def _machine() -> str:
    """Eight digits that stand for :func:`~lightning_spot.protocol.process.this_host`."""
    return hashlib.sha256(this_host().encode()).hexdigest()[:8]


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
        prefix = next((prefix for prefix in lent if real.is_relative_to(prefix)), None)
        if prefix is None:
            raise TierError(f"{root} is below none of the directories that this server may write to", tier=str(root))
        self._prefix, self._names = str(prefix), real.relative_to(prefix).parts
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
        at: int | None = None
        try:
            for name in (self._prefix, *self._names):
                if make and at is not None:
                    _make(name, at)
                above, at = at, os.open(name, _OPEN, dir_fd=at)
                if above is not None:
                    os.close(above)
        except BaseException as error:
            if at is not None:
                os.close(at)
            if isinstance(error, FileNotFoundError) and not make:
                return None
            if not isinstance(error, NotADirectoryError):
                raise
            why = f"{self._root} leads through a link, or a file: nothing is read or written there"
            raise TierError(why) from error
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
        sync_directory(_DESCRIPTORS / str(at))


def _is_same(folder: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(folder, other)
    except OSError:  # of a file server that has removed it
        return False


def _close(opened: list[int]) -> None:
    for each in opened:
        os.close(each)
