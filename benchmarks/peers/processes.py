"""What a cell costs the machine, seen from outside: CPU seconds and memory of all its processes, bytes on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CHILD_SUBREAPER = 36  # prctl(2)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # ioctls of network devices, netdevice(7)
_BLOCK_BYTES = 512  # of ru_oublock
_LOOK_S, _QUIET_LOOKS = 0.1, 3
_IDLE = 0.3  # of one processor: to look takes some of it, and ticks are coarse


def adopt_orphans() -> None:
    """Become the parent of descendants that were detached, such as servers, so that what they used is counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this system has no child subreaper (Linux has)")


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, without it."""
    children: dict[int, list[int]] = {}
    for pid, fields in _stats():
        children.setdefault(int(fields[1]), []).append(pid)
    found, look_at = [], [root]
    while look_at:
        below = children.get(look_at.pop(), [])
        found += below
        look_at += below
    return found


def cpu_s(root: int) -> float:
    """CPU seconds so far of all processes below ``root``, with those that they have waited for."""
    pids = set(descendants(root))
    ticks = sum(sum(map(int, fields[11:15])) for pid, fields in _stats() if pid in pids)
    return ticks / _TICKS_PER_S


def _stats() -> Iterator[tuple[int, list[str]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # After the name, which may hold anything: state, parent, ...
                yield int(entry.name), Path(entry.path, "stat").read_text().rpartition(")")[2].split()


def wait_idle(root: int, limit_s: float) -> float:
    """Wait until no process below ``root`` computes or writes any more; the seconds that took, ``limit_s`` at most.

    Called by one of them, which does nothing else meanwhile.
    """
    began_s, is_synced = time.monotonic(), False
    before_s, quiet = cpu_s(root), 0
    while (waited_s := time.monotonic() - began_s) < limit_s:
        time.sleep(_LOOK_S)
        now_s = cpu_s(root)
        quiet, before_s = (quiet + 1 if now_s - before_s < _IDLE * _LOOK_S else 0), now_s
        if quiet == _QUIET_LOOKS:
            if is_synced:
                break
            os.sync()  # who waits for the disk uses no processor
            is_synced, quiet = True, 0
    return waited_s


def forget_pages(folder: Path) -> None:
    """Have the files in a folder read from the disk the next time: some were written past the page cache."""
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError), open(os.path.join(place, name), "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def total_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """What can still be had of it, page cache included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return total_bytes()


def memory_bytes(root: int, shm: Path) -> int:
    """Memory of all processes below ``root``, what they share counted once, and files in ``shm``."""
    private = shared = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Pss_Anon", "Pss_File", "Pss_Shmem"):
                    nbytes = int(rest.split()[0]) * 1024
                    private, shared = (private, shared + nbytes) if name == "Pss_Shmem" else (private + nbytes, shared)
    return private + max(shared, _on_disk(shm))


def _on_disk(folder: Path) -> int:
    nbytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            nbytes += path.stat().st_blocks * 512
    return nbytes


class Spent:
    """What all processes used that were waited for since this was made."""

    def __init__(self) -> None:
        self._before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def cpu_s(self) -> float:
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return now.ru_utime + now.ru_stime - self._before.ru_utime - self._before.ru_stime

    def written_bytes(self) -> int:
        """To disks; a file that is deleted before it is written back counts as well."""
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (now.ru_oublock - self._before.ru_oublock) * _BLOCK_BYTES


def reap(patience_s: float, spare: set[int]) -> list[int]:
    """Wait for all processes below this one but ``spare``; kill and return what is left after ``patience_s``."""
    deadline_s, killed = time.monotonic() + patience_s, []
    while left := set(descendants(os.getpid())) - spare:
        if time.monotonic() > deadline_s:
            killed += [pid for pid in left if pid not in killed]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    return killed


def own_network() -> bool:
    """Give this process and its children a loopback device of their own; whether the system lets it."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        return False
    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
    return True


def sent_bytes() -> int:
    """Bytes sent so far over this process's loopback device, acknowledgements and headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0
