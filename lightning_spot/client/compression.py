"""Whether it pays to compress what changed of a part before it is sent: decided from measured speeds only.

It pays where packing a part and sending what is left of it takes less time than sending it as it is:
``T_c(p) + T_w(c(p)) < T_w(p)``. The times are those that one connection sees: that others share its link, or training
the processors, is in them. What packing took beyond that, since the receiver must unpack, is added from then on, less
and less, so that it is tried again. While packing pays, some parts are sent plain, to see whether it still does; while
it does not, a small piece of some parts is packed and thrown away.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

LEAST_BYTES = 256 * 1024
"""Less than this is never packed: it takes no time either way."""

PROBE_BYTES = 256 * 1024
"""How much of a part is packed to see how that would go."""

_MARGIN = 0.9  # packing must be expected to save a tenth
_WEIGHT = 0.2  # of the newest measurement
_WEIGHT_OF_WORSE = 0.5  # where packing took longer than expected
_FORGETS = 0.98  # with each part, how much longer it took: so that it is tried again
_PROBE_EVERY = 7  # parts; these two do not divide the number of parts of usual snapshots
_PLAIN_EVERY = 13


@dataclass(slots=True)
class _Packing:
    """How packing goes.

    Attributes:
        seconds: for each byte.
        ratio: bytes left of each byte.
    """

    seconds: float
    ratio: float

    def note(self, seconds: float, ratio: float) -> None:
        """Take the faster time at once: a slower one may be that of a thread that had to wait for its turn."""
        self.seconds = min(seconds, self.seconds + _WEIGHT * (seconds - self.seconds))
        self.ratio += _WEIGHT * (ratio - self.ratio)


class CompressionRule:
    """Decides for the parts of the snapshots that go to one node. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plain_s = 0.0  # for each byte that is sent as it is; 0 until measured
        self._beyond_s = 0.0  # for each byte of what was packed: beyond what was expected
        self._overall: _Packing | None = None
        self._parts: dict[int, _Packing] = {}
        self._asked = 0

    def packs(self, index: int) -> bool:
        """Whether to pack the part of that number now."""
        with self._lock:
            self._asked += 1
            self._beyond_s *= _FORGETS
            packing = self._parts.get(index, self._overall)
            if packing is None or not self._plain_s:
                return False
            expected_s = packing.seconds + packing.ratio * self._plain_s + self._beyond_s
            return expected_s < _MARGIN * self._plain_s and self._asked % _PLAIN_EVERY != 0

    def probes(self) -> bool:
        """Whether to pack a piece of a part that is sent as it is, to learn how that goes."""
        with self._lock:
            return bool(self._plain_s) and (self._overall is None or self._asked % _PROBE_EVERY == 0)

    def packed(self, index: int, nbytes: int, left_bytes: int, seconds: float) -> None:
        """Note that packing some of a part took ``seconds`` and left ``left_bytes`` of ``nbytes``."""
        new = _Packing(seconds / nbytes, left_bytes / nbytes)
        with self._lock:
            for known in (self._overall, self._parts.get(index)):
                if known is not None:
                    known.note(new.seconds, new.ratio)
            self._overall = self._overall or _Packing(new.seconds, new.ratio)
            self._parts.setdefault(index, new)

    def sent_plain(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` which were sent as they are took ``seconds``."""
        with self._lock:
            self._plain_s += (_WEIGHT if self._plain_s else 1.0) * (seconds / nbytes - self._plain_s)

    def sent_packed(self, index: int, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` of a part took ``seconds`` to be packed and sent."""
        with self._lock:
            packing = self._parts[index]
            beyond_s = max(0.0, seconds / nbytes - packing.seconds - packing.ratio * self._plain_s)
            self._beyond_s += (_WEIGHT_OF_WORSE if beyond_s > self._beyond_s else _WEIGHT) * (beyond_s - self._beyond_s)
