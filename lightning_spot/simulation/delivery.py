"""Which snapshot a tier holds at a time: worked out from times alone, for many runs at once.

A tier takes the newest snapshot that the one before it holds, whenever it is free. Where snapshots come further apart
than it takes for one, it is free when each comes, and has it ``drain_s`` later. Where they come faster it is always
busy: its transfers follow each other without a gap from the first one of an attempt on, so the one under way, and the
snapshot that was newest when it began, follow from a division and a search in a sorted table. No transfer has to be
simulated.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

NEVER_S = 1e15
ALWAYS_S = -1e15


class Delivery:
    """The snapshots of an undisturbed job on their way to one tier.

    Args:
        ready_s: when the tier can begin with each, growing, of shape ``(snapshots + 1,)``; the first one is the start.
        drain_s: seconds the tier takes for one.
    """

    def __init__(self, ready_s: Array, drain_s: float) -> None:
        self.drain_s = drain_s
        self._ready_s = ready_s
        self._next_s = np.append(ready_s[1:], NEVER_S)
        shorter = np.diff(ready_s[1:]) < drain_s * (1 - 1e-9)
        # Before the first gap as in it, behind the last one likewise.
        self._busy = np.pad(shorter, 1, mode="edge") if len(shorter) else np.zeros(len(ready_s), dtype=bool)

    def newest(self, now_s: Array, resumed: Indices, stored: Indices, caught_up_s: Array) -> Indices:
        """The newest snapshot that the tier holds; all of shape ``(runs,)``, snapshots as places in the table.

        Args:
            now_s: on the clock of the undisturbed job.
            resumed: snapshot that the attempt went on from.
            stored: newest one that the tier stored when the attempt before it ended.
            caught_up_s: when the tier has ``resumed``.
        """
        opened_s = np.maximum(self._next_s[resumed], caught_up_s)  # its first transfer of this attempt begins
        sent_s = now_s - self.drain_s  # the last transfer that is done began
        if self._busy.any():
            place = np.clip(np.searchsorted(self._ready_s, sent_s, side="right") - 1, 0, None)
            turns = np.floor((now_s - opened_s) / self.drain_s) - 1
            sent_s = np.where(self._busy[place], opened_s + turns * self.drain_s, sent_s)
        found = np.searchsorted(self._ready_s, sent_s, side="right") - 1
        return np.where(sent_s >= opened_s, found, np.where(now_s >= caught_up_s, resumed, stored))
