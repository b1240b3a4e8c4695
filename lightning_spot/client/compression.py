"""Whether it pays to compress what changed before it is sent: decided from measured speeds only.

For a part it pays where packing it and sending what is left of it takes less time than sending it as it is:
``T_c(p) + T_w(c(p)) < T_w(p)``. The times are those that one connection sees: that others share its link, or training
the processors, is in them. What packing took beyond that, since the receiver must unpack, is added from then on, less
and less, so that it is tried again. While packing pays, some parts are sent plain, to see whether it still does; while
it does not, a small piece of some parts is packed and thrown away, of fewer the clearer it is.

What no connection sees is what packing costs the others: where processors are short, the very parts that are sent as
they are take longer, and packing seems to pay. So whole snapshots are compared, too: if one with packed parts was not
faster than those without, the next ones go without, and each time that happens twice as many.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

LEAST_BYTES = 256 * 1024
"""Less than this is never packed: it takes no time either way."""

PROBE_BYTES = 256 * 1024
"""How much of a part is packed to see how that would go."""

_MARGIN = 0.9  # packing must be expected to save a tenth
_WEIGHT = 0.2  # of the newest measurement
_WEIGHT_OF_WORSE = 0.5  # where packing took longer than expected
_FORGETS = 0.98  # with each part, how much longer it took: so that it is tried again
_MEASURED = 9  # times of packing that are remembered: threads that pack stand back, and may wait long for their turn
_PROBE_EVERY = 7  # parts; this and the next do not divide the number of parts of usual snapshots
_PROBE_SELDOM = _PROBE_EVERY * 2**5
_PLAIN_EVERY = 13
_CLEAR = 1.5  # by which packing must be expected to be slower for it to be looked at less often

_GAIN = 0.97  # of the time of a snapshot without packed parts, what one with them may take
_OTHER = 1.5  # by which times differ where something has changed: the link, or the load
_SHARE = 0.03  # of a snapshot that is packed for it to count as such
_WEIGHT_OF_PLAIN = 0.5  # of the newest snapshot without packed parts
_FEWEST, _MOST = 4, 64  # snapshots from one comparison to the next


class CompressionRule:
    """Decides for the parts of the snapshots that go to one node. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._comparison = _Comparison()
        self._plain_s = 0.0  # for each byte that is sent as it is; 0 until measured
        self._beyond_s = 0.0  # for each byte of what was packed: beyond what was expected
        self._pack_s: deque[float] = deque(maxlen=_MEASURED)  # for each byte
        self._ratio = 1.0  # bytes left of each byte, of all parts
        self._ratios: dict[int, float] = {}  # of each part
        self._asked = 0
        self._probe_at = self._probe_every = _PROBE_EVERY

    def begin(self) -> None:
        """A snapshot begins."""
        with self._lock:
            self._comparison.begin()

    def end(self, seconds: float) -> None:
        """All of it was sent within ``seconds``."""
        with self._lock:
            self._comparison.end(seconds)

    def packs(self, index: int) -> bool:
        """Whether to pack the part of that number now."""
        with self._lock:
            self._asked += 1
            self._beyond_s *= _FORGETS
            if not (self._pack_s and self._plain_s and self._comparison.packs):
                return False
            pays = self._expected_s(self._ratios.get(index, self._ratio)) < _MARGIN * self._plain_s
            return pays and self._asked % _PLAIN_EVERY != 0

    def probes(self) -> bool:
        """Whether to pack a piece of a part that is sent as it is, to learn how that goes."""
        with self._lock:
            if not self._plain_s or (self._pack_s and self._asked < self._probe_at):
                return False
            clear = bool(self._pack_s) and self._expected_s(self._ratio) > _CLEAR * self._plain_s
            self._probe_every = min(2 * self._probe_every, _PROBE_SELDOM) if clear else _PROBE_EVERY
            self._probe_at = self._asked + self._probe_every
            return True

    def packed(self, index: int, nbytes: int, left_bytes: int, seconds: float) -> None:
        """Note that packing some of a part took ``seconds`` and left ``left_bytes`` of ``nbytes``."""
        ratio = left_bytes / nbytes
        with self._lock:
            self._ratio += (_WEIGHT if self._pack_s else 1.0) * (ratio - self._ratio)
            self._ratios[index] = self._ratios.get(index, ratio) + _WEIGHT * (ratio - self._ratios.get(index, ratio))
            self._pack_s.append(seconds / nbytes)

    def sent_plain(self, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` which were sent as they are took ``seconds``."""
        with self._lock:
            self._comparison.add(nbytes, packed=False)
            self._plain_s += (_WEIGHT if self._plain_s else 1.0) * (seconds / nbytes - self._plain_s)

    def sent_packed(self, index: int, nbytes: int, seconds: float) -> None:
        """Note that ``nbytes`` of a part took ``seconds`` to be packed and sent."""
        with self._lock:
            self._comparison.add(nbytes, packed=True)
            expected_s = self._expected_s(self._ratios[index]) - self._beyond_s
            beyond_s = max(0.0, seconds / nbytes - expected_s)
            self._beyond_s += (_WEIGHT_OF_WORSE if beyond_s > self._beyond_s else _WEIGHT) * (beyond_s - self._beyond_s)

    def _expected_s(self, ratio: float) -> float:
        """For each byte of a part that is packed; of the last times, one may have been bad luck."""
        usual = sorted(self._pack_s)[: max(1, len(self._pack_s) - 1)]
        return statistics.fmean(usual) + ratio * self._plain_s + self._beyond_s


class _Comparison:
    """Compares snapshots of which parts were packed with those of which none was.

    Attributes:
        packs: whether parts of the present one may be packed.
    """

    def __init__(self) -> None:
        self.packs = False
        self._left = 1  # snapshots that are to go in this way, before the other one is tried
        self._next_packed, self._next_plain = _FEWEST, 1  # how many then will
        self._plain_s = self._packed_s = 0.0  # for each byte; 0 until measured
        self._nbytes = self._packed_bytes = 0

    def begin(self) -> None:
        """A snapshot begins."""
        self._nbytes = self._packed_bytes = 0
        if self._left <= 0:
            self.packs = not self.packs
            self._left = self._next_packed if self.packs else 1

    def add(self, nbytes: int, *, packed: bool) -> None:
        """Some of it was sent."""
        self._nbytes += nbytes
        self._packed_bytes += nbytes if packed else 0

    def end(self, seconds: float) -> None:
        """All of it was sent."""
        if not self._nbytes:
            return
        each_s = seconds / self._nbytes
        if not self.packs:
            self._left -= 1
        if self._packed_bytes >= _SHARE * self._nbytes:
            self._compare(each_s)
            return
        if self._plain_s and each_s > _OTHER * self._plain_s:  # what was found out on a faster link counts no more
            self._next_plain = 1
            self._left = self._left if self.packs else 0
        self._plain_s += (_WEIGHT_OF_PLAIN if self._plain_s else 1.0) * (each_s - self._plain_s)

    def _compare(self, each_s: float) -> None:
        self._left -= 1
        before_s, self._packed_s = self._packed_s, each_s
        if each_s > _GAIN * self._plain_s:
            self.packs, self._left = False, self._next_plain
            self._next_plain, self._next_packed = min(2 * self._next_plain, _MOST), _FEWEST
        elif before_s > _OTHER * each_s:  # the link has become faster: perhaps it pays no more
            self._left, self._next_packed = 0, _FEWEST
        else:
            self._next_plain = 1
            if self._left <= 0:
                self._next_packed = min(2 * self._next_packed, _MOST)
