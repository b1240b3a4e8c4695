"""How large the parts of a transfer should be, and how many under way, from the measured pace of a tier. Pure rules.

AsymCheck flushes in batches of B* = sqrt(C·T_d·c / T_c) bytes, which minimises (C/B)·T_d + (B/c)·T_c: C bytes in all,
T_d seconds that a write takes whatever its size, T_c seconds until a chunk of c bytes is ready. Here nothing is
compressed, and n streams share the work. What a larger part costs is the end, when streams wait for the last one: half
a part's time on average. With w bytes a second in one stream all takes C/(n·B)·T_d + B/(2·w) beyond the bytes
themselves, and B* = sqrt(2·C·T_d·w / n). The last batch is not special: whatever is left goes at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_SAMPLES = 16
_SOCKET_BYTES = 4 * 1024 * 1024  # Linux: the end of net.ipv4.tcp_wmem
_FASTEST_LINK_BYTES_PER_S = 25e9 / 8
_STEP_BYTES = 1024 * 1024  # sizes are multiples of it, so that a pace that wavers gives one size


@dataclass(slots=True)
class Pace:
    """How a tier answers, from the newest measurements; 0 as long as nothing is known."""

    _answers_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _speeds: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def answered(self, seconds: float) -> None:
        """A request that carries next to nothing took so long."""
        self._answers_s.append(seconds)

    def moved(self, nbytes: int, seconds: float) -> None:
        """A part of so many bytes took so long on one stream, beside the others."""
        if nbytes >= _STEP_BYTES:  # of less the time is that of the answer
            self._speeds.append(nbytes / max(1e-9, seconds - min(self.latency_s, seconds / 2)))

    @property
    def latency_s(self) -> float:
        """Seconds that a request takes whatever its size."""
        return median(self._answers_s) if self._answers_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of one stream, while bytes move."""
        return median(self._speeds) if self._speeds else 0.0


def best_part_bytes(nbytes: int, streams: int, pace: Pace, *, least: int, under_way: int) -> int:
    """Bytes of a part with which a transfer is over soonest.

    Args:
        nbytes: of the transfer.
        streams: how many parts are under way at once, at least 1.
        pace: of the tier.
        least: bytes of a part at least; what is taken as long as nothing is known.
        under_way: bytes of all streams together at most; ``least`` wins.
    """
    best = math.sqrt(2 * nbytes * pace.latency_s * pace.bytes_per_s / streams)
    whole = int(min(best, under_way / streams)) // _STEP_BYTES * _STEP_BYTES
    return max(least, whole)


def useful_streams(latency_s: float, *, fewest: int, most: int) -> int:
    """Streams that may make a transfer faster where each has to wait for answers; whether they do, is to be measured.

    One stream has at most a few MiB on their way (what systems give a socket), so it moves that much in each
    ``latency_s``. Once all together could fill the fastest link there is, more bring nothing.

    Args:
        latency_s: seconds that an answer takes; 0 if unknown.
        fewest: streams at least.
        most: of them.
    """
    return max(fewest, min(most, math.ceil(_FASTEST_LINK_BYTES_PER_S * latency_s / _SOCKET_BYTES)))
