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
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.retry import retried
from lightning_spot.tiers.store import LONGEST_MANIFEST_BYTES
from lightning_spot.tiers.temporaries import temporary_name

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_ALIGNED_BYTES = 4096  # what disks and file systems ask for is this or less; who asks for more refuses, see below
_LEAST_BYTES = 1024 * 1024  # less is over sooner by way of the cache
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})  # tmpfs before Linux 6.6, some FUSE and NFS

_PASSES = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO})
_PAUSES_S = (0.05, 0.2)  # a failover of a file server takes longer; who calls tries again then
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

Result = TypeVar("Result")


class RawFile(Protocol):
    """An unbuffered file that was opened for writing and is empty."""

    def fileno(self) -> int:
        """Its descriptor."""

    def write(self, data: memoryview, /) -> int:
        """Write some of ``data``; how many bytes."""


def write_parts(file: RawFile, parts: Iterable[memoryview]) -> None:
    """Write parts one after the other; what is page-aligned in memory and in the file goes past the page cache.

    Args:
        file: at its beginning. Whoever wants the bytes on the disk syncs it afterwards, in any case.
        parts: consecutive, each done with when the next one is asked for.

    Raises:
        OSError: if they could not be written.
    """
    place, past_cache, refused = 0, False, not _O_DIRECT
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
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if past_cache else flags & ~_O_DIRECT)
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
    return retried(action, _PAUSES_S, lambda error: isinstance(error, OSError) and error.errno in _PASSES)


def is_there(path: Path) -> bool:
    """Whether there is anything of that name. Unlike ``os.path.lexists`` it does not take an error for a no."""
    try:
        patiently(lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_own_directory(path: Path) -> bool:
    """Whether this is a directory and no link to one. An error is an error, and no answer."""
    try:
        return stat.S_ISDIR(patiently(lambda: os.lstat(path)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


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


def read_small(path: Path) -> bytes:
    """A manifest or claim.

    Raises:
        FileNotFoundError: if there is nothing of that name.
        CorruptSnapshotError: if it is no regular file, or too long.
        OSError: if it cannot be read.
    """
    data = if_there(path, lambda: _read_small(path))
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return data


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


def _read_small(path: Path) -> bytes:
    fd = open_regular(path)
    try:
        found = os.fstat(fd)
        if found.st_size > LONGEST_MANIFEST_BYTES:
            raise CorruptSnapshotError(f"{path} has {found.st_size} bytes, which is too long for what it should be")
        data = b""
        while chunk := os.read(fd, found.st_size + 1):
            data += chunk
        return data
    finally:
        os.close(fd)


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


def create_exclusively(path: Path, data: memoryview, *, attempt: int, run_id: str) -> bool:
    """Create ``path`` with ``data``, whole or not at all, unless it exists; whether that was done."""
    temporary = write_aside(path.parent, [data], attempt=attempt, run_id=run_id)
    try:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_in_place(path, data)
    finally:
        remove(temporary)
    sync_directory(path.parent)
    return True


def _create_in_place(path: Path, data: memoryview) -> bool:
    """Where there are no hard links. Killed in the middle it leaves a damaged file, whose name still counts."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.parent)
    return True


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


def sync_file(path: Path) -> None:
    """Make a file's bytes durable, and leave the page cache to the training data."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


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
