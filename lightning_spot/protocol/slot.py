"""Slot memory: preallocated, warm, shared between the trainer and the server on its host. Torch-free."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_spot.config import format_bytes
from lightning_spot.errors import TierError
from lightning_spot.protocol.ownership import open_file
from lightning_spot.say import say
from lightning_spot.threads import in_turn, processors

logger = logging.getLogger(__name__)

SHM_FULL = (
    "{about} has no room for a slot of {size}: it is a memory file, which is lost if the server is killed. Enlarge it"
    " (docker: --shm-size)."
)
"""Text of messages with the key ``shm-full``."""

CGROUPS = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")

_PAGE = 2 * 1024 * 1024
_AT_ONCE_BYTES = 64 * 1024 * 1024  # of a mapping, filled in one call
_MOST_THREADS = 4
_LEFT_SHARE, _MOST_LEFT_BYTES = 8, 2**30  # of a tmpfs: an eighth, up to a GiB, is left to others
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_libc = ctypes.CDLL(None)


def slot_capacity(nbytes: int) -> int:
    """Bytes to reserve for a snapshot of ``nbytes``: 1/64 more, so that growing counters don't force a new slot."""
    return max(1, -(-(nbytes + nbytes // 64) // _PAGE)) * _PAGE


def most_in(capacity: int) -> int:
    """Bytes of the largest snapshot for which :func:`slot_capacity` reserves no more than ``capacity``."""
    return capacity // _PAGE * _PAGE * 64 // 65


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` of an open file for reading and writing, shared, with its page tables filled at once.

    Other threads go on meanwhile: ``mmap`` with ``MAP_POPULATE`` would hold Python's lock for the second or two that
    gigabytes take, and with it the event loop of a server and the training thread of a trainer. All processors do it:
    a training that computes on all of them waits for the one that is busy with something else, so that it loses less
    where all are, for a shorter time.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    shared = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection)
    if not _map_pages(shared, nbytes, write=False):  # a kernel before 5.14
        shared.close()
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
    return shared


def make_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Make the pages of an empty file in memory, and map them, see :func:`map_shared`.

    All processors make them, for the same reason; ``fallocate`` would use one.

    Raises:
        OSError: if there is no room for all of them.
    """
    os.ftruncate(fd, nbytes)
    shared = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if _map_pages(shared, nbytes, write=True):
        return shared
    shared.close()
    os.posix_fallocate(fd, 0, nbytes)  # on a kernel before 5.14; or it says what is wrong
    return map_shared(fd, nbytes)


def _check_room(fd: int, nbytes: int) -> None:
    """Raise ``OSError`` where the file system has no room, before a page is made: filling it up would end its users.

    Workers of a DataLoader, which pass tensors on through it, are killed by SIGBUS where it is full for a moment. So
    some of it is left to them.
    """
    found = os.fstatvfs(fd)
    left = min(found.f_blocks * found.f_frsize // _LEFT_SHARE, _MOST_LEFT_BYTES)
    if found.f_blocks and found.f_bavail * found.f_frsize < nbytes + left:  # without blocks it has no limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _map_pages(shared: mmap.mmap, nbytes: int, *, write: bool) -> bool:
    """Fill the page tables of a mapping on several threads, see :func:`populate`; whether that could be done."""
    failed: list[int] = []
    todo = (start for start in range(0, nbytes, _AT_ONCE_BYTES) if not failed)

    def fill(start: int) -> None:
        if not populate(shared, start, min(_AT_ONCE_BYTES, nbytes - start), write=write):
            failed.append(start)

    threads = min(_MOST_THREADS, processors(), -(-nbytes // _AT_ONCE_BYTES))
    in_turn(todo, fill, threads, "spot-map")
    return not failed


def populate(shared: mmap.mmap, start: int, nbytes: int, *, write: bool) -> bool:
    """Fill the page tables of a mapping, many pages at a time, while other threads go on; whether that could be done.

    Args:
        shared: a writable mapping.
        start: first byte, a multiple of a page.
        nbytes: how many bytes.
        write: whether pages that do not exist are made; otherwise those that exist are mapped, at a third of the cost.
            In shared memory they may be written to all the same, without a fault.
    """
    first = ctypes.c_char.from_buffer(shared, start)
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    return not _libc.madvise(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(nbytes), advice)


def memory_file(name: str) -> int:
    """Descriptor of an empty file in memory that no path leads to; the caller's to close. See :func:`seal_memory`."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_memory(fd: int) -> bool:
    """Make a memory file one that nobody can write to any more, whoever has it; whether that could be done.

    Nobody may have it mapped for writing when this is called.
    """
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        logger.debug("this memory cannot be sealed: %s", error)
        return False
    return True


class SlotMemory:
    """The memory of one slot.

    Created by the ring that owns it; others map it by its descriptor. Its pages exist from the start,
    so that a copy into it never faults and a full tmpfs shows here, not as a ``SIGBUS`` in the middle of a copy.

    Attributes:
        fd: open descriptor of the memory.
        capacity: size in bytes.
        backing: ``"tmpfs"`` (a file others can find) or ``"memfd"`` (reachable by descriptor only).
        path: the file, if it has one.
        map: the memory as this process sees it.
        generation: tells it from all others of this process, so that a peer knows when to map a slot again.
    """

    _generations = itertools.count(1)

    def __init__(self, fd: int, shared: mmap.mmap, backing: str, path: Path | None) -> None:
        self.fd = fd
        self.generation = next(self._generations)
        self.capacity = len(shared)
        self.backing = backing
        self.path = path
        self.map = shared

    @classmethod
    def create(cls, capacity: int, path: Path | None) -> SlotMemory:
        """Reserve ``capacity`` bytes, in a tmpfs file at ``path`` if there is room, else in a memory file.

        Raises:
            TierError: if this host has not that much memory to give.
        """
        available = available_bytes()
        if available is not None and capacity > available:
            raise TierError(
                f"a slot of {format_bytes(capacity)} does not fit the memory that this host, or this container, has"
                f" left ({format_bytes(available)}); use fewer slots, a smaller model state or more memory"
            )
        if path is not None:
            fd = -1
            try:
                path.unlink(missing_ok=True)
                fd = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                _check_room(fd, capacity)
                shared = make_shared(fd, capacity)
            except OSError as error:
                if fd >= 0:
                    os.close(fd)
                path.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    raise
                where, size = os.path.realpath(path.parent), format_bytes(capacity)
                say(logging.WARNING, "shm-full", SHM_FULL, about=where, size=size)
            else:
                return cls(fd, shared, "tmpfs", path)
        return cls._memory_file(capacity)

    @classmethod
    def _memory_file(cls, capacity: int) -> SlotMemory:
        fd = memory_file("lightning-spot-slot")
        try:
            shared = make_shared(fd, capacity)
        except OSError as error:
            os.close(fd)
            raise TierError(f"this host gives no {format_bytes(capacity)} of memory for a slot: {error}") from error
        return cls(fd, shared, "memfd", None)

    @classmethod
    def reopen(cls, path: Path) -> SlotMemory:
        """Open a slot that an earlier server left in tmpfs."""
        fd = open_file(path, os.O_RDWR, linked=True)  # that server may have been killed while it took it over, too
        try:
            return cls(fd, map_shared(fd, os.fstat(fd).st_size), "tmpfs", path)
        except BaseException:
            os.close(fd)
            raise

    def view(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` bytes, writable. Release it before the slot is closed."""
        return memoryview(self.map)[:nbytes]

    def unlink(self) -> None:
        """Remove the file, so that its name is free; the memory stays until :meth:`close`."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def close(self) -> None:
        """Give the memory back. A peer that still maps it keeps its pages until it lets go."""
        try:
            self.map.close()
        except BufferError:
            # A reader still holds a view; the mapping goes when the view does.
            logger.debug("slot memory is still being read; it is freed when the reader is done")
        os.close(self.fd)
        self.unlink()


def host_memory_bytes() -> int:
    """Memory that this process may use at all: that of the host, or less where its container is limited."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit, _used in _cgroup_limits())])


def available_bytes() -> int | None:
    """Memory that can be had now without swapping, here and in this container; ``None`` if it cannot be told."""
    left = [max(0, limit - used) for limit, used in _cgroup_limits()]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            left += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    except OSError:
        logger.debug("this host has no /proc/meminfo")
    return min(left, default=None)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Memory limit and use of each cgroup above this process, versions 2 and 1, in bytes."""
    try:
        lines = PROC_CGROUP.read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, below = line.split(":", 2)
        if controllers == "":
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host, of which only the end is mounted here.
        folder = root / below.strip("/")
        for place in (folder, *folder.parents):
            if (limits := _limit_of(place, *names)) is not None:
                yield limits
            if place == root:
                break


def _limit_of(folder: Path, limit_file: str, used_file: str, reclaimable: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_file).read_text(encoding="ascii"))
        used = int((folder / used_file).read_text(encoding="ascii"))
        fields = (folder / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # "max", or no such cgroup
        return None
    cache = int(fields[fields.index(reclaimable) + 1]) if reclaimable in fields else 0
    return limit, max(0, used - cache)
