"""Names of files on their way. They tell who writes them, so that what a killed writer left is known as that."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets

from lightning_spot.protocol.process import ProcessId

_PREFIX = ".lightning-spot-tmp-"
_TEMPORARY = re.compile(
    re.escape(_PREFIX) + r"(\d{1,9})-([0-9a-f]*)-([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{8}"
)
_TICKS = 2**32
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def temporary_name(attempt: int, run_id: str) -> str:
    """Name of a file that this process writes on behalf of an attempt of a run."""
    machine, pid, started = _writer(os.getpid())
    return f"{_PREFIX}{attempt:04d}-{run_id}-{machine}{pid:08x}{started:08x}{secrets.token_hex(4)}"


def temporary_owner(name: str) -> tuple[str, int] | None:
    """Run id and attempt of a temporary of ours; ``("", 0)`` if another version wrote it, ``None`` if it is none."""
    if match := _TEMPORARY.fullmatch(name):
        return match[2], int(match[1])
    return ("", 0) if name.startswith(_PREFIX) else None


def writer_has_ended(name: str) -> bool:
    """Whether the process that wrote a temporary is known to have ended: one of this machine, since it was started."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or match[3] != _machine():  # also where nothing is known of other processes
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


@functools.lru_cache(maxsize=1)  # a forked child has another number
def _writer(pid: int) -> tuple[str, int, int]:
    process = ProcessId.of(pid)
    return _machine() or secrets.token_hex(4), pid, process.started % _TICKS if process is not None else 0


@functools.cache
def _machine() -> str | None:
    """Eight digits that stand for this machine, since it was started, and the namespace in which processes count.

    ``None`` where nothing is known of other processes, such as where ``/proc`` is that of another namespace.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
    except OSError:
        return None
    return hashlib.sha256(f"{boot}:{namespace}".encode()).hexdigest()[:8]
