"""Ways of copying that take turns within one training, so that whatever else the machine does touches all alike."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.partitions import MODES, Mode, ModeTrial


class Turns(EverySteps, ModeTrial):
    """Says when a snapshot is due, and how it is copied: as the way does whose turn it is.

    Args:
        order: the ways, one after the other, from the beginning again at the end. Those that are none of ours take no
            snapshots.
        steps: of each turn.
        every: steps between snapshots, from the second step of a turn on: in its first one the turn before still ends.
    """

    def __init__(self, order: Sequence[str], steps: int, every: int) -> None:
        EverySteps.__init__(self, 1)
        ModeTrial.__init__(self, MODES)
        self._order, self._steps, self._every = order, steps, every
        self.step = 0

    def at(self, step: int) -> str:
        """Whose turn it is after ``step`` steps."""
        return self._order[step // self._steps % len(self._order)]

    @property
    def way(self) -> str:
        """Whose turn it was when it was last asked whether a snapshot is due."""
        return self.at(self.step)

    def due(self, step: int, now_s: float) -> bool:
        self.step = step
        return self.way in MODES and (step % self._steps - 1) % self._every == 0

    def take(self) -> Mode:
        return next(mode for mode in MODES if mode == self.way)

    @property
    def best(self) -> Mode | None:
        return None

    def decide_for(self, spot: SpotCheckpoint) -> bool:
        """Have ``spot`` ask this instead of its own trial, once it has a trial; whether it did already."""
        snapshotter = spot.snapshots.snapshotter
        assert snapshotter is not None
        schedule = snapshotter.writing.schedule
        decided = schedule._trial is self
        if schedule._trial is not None:
            schedule._trial = self
        return decided
