"""Names a process so that another one with the same number is never taken for it, watches it, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import time
from dataclasses import asdict, dataclass
from typing import Annotated

from lightning_spot import untrusted
from lightning_spot.errors import MalformedError

_POLL_S = 0.02
_MOST_PID = 2**22


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine, as ``/proc`` knows it.

    Attributes:
        pid: its number, as seen from its own process namespace.
        started: when it began, in clock ticks since the machine did.
        namespace: in which its number counts.
    """

    pid: Annotated[int, untrusted.whole(1, _MOST_PID)]
    started: Annotated[int, untrusted.whole(0, 2**63)]
    namespace: untrusted.Line

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process of that number in this process' namespace; ``None`` if there is none, or it has ended."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]), _namespace())

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessId | None:
        """Read what :meth:`to_json` wrote; ``None`` if it is something else."""
        try:
            return untrusted.decoded(cls, untrusted.read_object(text))
        except MalformedError:
            return None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @property
    def alive(self) -> bool:
        """Whether it runs (or is stopped); never true for another process that has got its number."""
        return ProcessId.of(self.pid) == self

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        began_s = self.started / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        fields = _stat(self.pid)
        return self.alive and fields is not None and fields[0] in "Tt"

    def kill(self, within_s: float, number: signal.Signals = signal.SIGKILL) -> bool:
        """End it with a signal, and wait for that.

        Returns:
            whether it has ended.
        """
        self.send(number)
        deadline = time.monotonic() + within_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.alive

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens if it has ended, or is another user's."""
        fd = open_pidfd(self.pid)
        try:
            if not self.alive:  # looked at after the descriptor was opened, which now names this very process
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if fd is None:
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(fd, number)
        finally:
            if fd is not None:
                os.close(fd)


def descendants(pid: int) -> list[int]:
    """Numbers of the processes that a process has started, and that these have, as far as they live and are known."""
    started: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(int(name))) is not None:
            started.setdefault(int(fields[1]), []).append(int(name))
    found = [pid]
    for each in found:
        found += started.get(each, ())
    return found[1:]


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; ``None`` where there is none to be had."""
    with contextlib.suppress(OSError, AttributeError):  # of an old kernel; of a Python that was built for old ones
        return os.pidfd_open(pid) if pid > 0 else None
    return None


def this_host() -> str:
    """Tells hosts apart, whatever their names: one boot of one kernel, one network, and processes that see each other.

    Containers of one machine do not see each other's. Where that cannot be told it is another one each time, such as
    where ``/proc`` is that of another namespace.
    """
    with contextlib.suppress(OSError):
        inodes = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid")]
        if os.readlink("/proc/self") == str(os.getpid()):
            return f"{this_boot()} {inodes}"
    return secrets.token_hex(16)


def this_boot() -> str:
    """Tells kernels apart, from one start to the next; the same in all containers of a machine.

    Raises:
        OSError: if that cannot be told.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def wait_readable(fds: list[int], within_s: float | None) -> set[int]:
    """Those of ``fds`` that are readable or closed, once one is; empty when it takes longer than ``within_s``."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if within_s is None else max(0, int(within_s * 1000)))}


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the third (its state) on; ``None`` if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
