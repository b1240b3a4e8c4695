"""Whether what changed is compressed before it is sent (``compression="auto"``): decided for each snapshot.

Of the snapshot before it is known how long a byte took on a connection; of one piece of it that was packed, how long
packing takes and what is left. It pays where packing takes less time than what it saves on the way. What a snapshot
that was packed took shows whether that is so: if not, what packing costs is taken for twice as much from then on.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

LEAST_BYTES = 256 * 1024
"""Less than this is never packed: it takes no time either way."""

PROBE_BYTES = 256 * 1024
"""How much is packed to see how that would go."""

_PACKERS = 4
_NICENESS = 10
_COST = 2.0  # of packing, in times of what it takes: the receiver unpacks, and others need the processors
_HIGHEST_COST = 64.0


def packers() -> Executor:
    """Threads to pack on, which stand back behind training: what processors it leaves decides how fast they are."""
    return ThreadPoolExecutor(_PACKERS, thread_name_prefix="spot-pack", initializer=_stand_back)


def _stand_back() -> None:
    thread = threading.get_native_id()  # on Linux each thread has a priority of its own
    os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


@dataclass(slots=True)
class _Measured:
    """What was measured since it was decided last, of sending and of packing.

    Attributes:
        sent_bytes: as they went over a connection.
        sent_s: that they took.
        packed_bytes: of what was packed.
        packed_s: that it took, as if all threads had packed.
        left_bytes: of it.
    """

    sent_bytes: int = 0
    sent_s: float = 0.0
    packed_bytes: int = 0
    packed_s: float = 0.0
    left_bytes: int = 0

    @property
    def wire_s(self) -> float:
        """For each byte that is sent."""
        return self.sent_s / self.sent_bytes

    @property
    def pack_s(self) -> float:
        """For each byte that is packed."""
        return self.packed_s / self.packed_bytes

    @property
    def left(self) -> float:
        """Of each byte that is packed."""
        return self.left_bytes / self.packed_bytes


class CompressionRule:
    """Decides for the snapshots that go to one node. Methods may be called from any thread.

    Attributes:
        packs: whether the present one is packed.
    """

    def __init__(self) -> None:
        self.packs = False
        self._measured, self._plain_s, self._cost = _Measured(), 0.0, _COST
        self._has_probed = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """A snapshot begins: it goes as what is known by now says."""
        with self._lock:
            self._has_probed = False
            if self._measured.sent_bytes and self._measured.packed_bytes:
                found, self._measured = self._measured, _Measured()
                if not self.packs:
                    self._plain_s = found.wire_s
                elif found.pack_s + found.left * found.wire_s > self._plain_s:
                    self._cost = min(2 * self._cost, _HIGHEST_COST)
                self.packs = self._cost * found.pack_s < (1 - found.left) * found.wire_s

    def probes(self) -> bool:
        """Whether to pack a piece, and throw it away: once in a snapshot that is sent as it is."""
        with self._lock:
            has_probed, self._has_probed = self._has_probed, True
            return not (has_probed or self.packs)

    def probed(self, nbytes: int, left_bytes: int, seconds: float) -> None:
        """Note that packing ``nbytes`` on one thread took ``seconds`` and left ``left_bytes``."""
        self.packed(nbytes, left_bytes, seconds * max(1.0, _PACKERS / (os.cpu_count() or 1)))

    def packed(self, nbytes: int, left_bytes: int, seconds: float) -> None:
        """Note that packing ``nbytes`` beside other threads took ``seconds`` and left ``left_bytes``."""
        with self._lock:
            self._measured.packed_bytes += nbytes
            self._measured.packed_s += seconds
            self._measured.left_bytes += left_bytes

    def sent(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` took ``seconds`` on a connection, until they had arrived."""
        with self._lock:
            self._measured.sent_bytes += nbytes
            self._measured.sent_s += seconds
