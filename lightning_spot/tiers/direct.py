"""Writes memory to a file past the page cache, where memory, place and file system let it. Not for when it is synced.

A buffered write copies every byte and makes a page for it: 2 to 4 s of CPU a GiB on small machines, taken from
training, and the pages push the training data out of the cache. With ``O_DIRECT`` the disk reads the slot's own memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterable
from typing import Protocol

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_ALIGNED_BYTES = 4096  # what disks and file systems ask for is this or less; who asks for more refuses, see below
_LEAST_BYTES = 1024 * 1024  # less is over sooner by way of the cache
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})  # tmpfs before Linux 6.6, some FUSE and NFS


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
