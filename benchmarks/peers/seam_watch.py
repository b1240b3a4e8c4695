"""Ours take snapshots at the seams of training, which are no hooks: this says from outside when, and for how long."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lightning_spot import SpotCheckpoint
from lightning_spot.state.fit_state import FitState


class SeamWatch(pl.Callback):
    """Hears of every seam before and after ours. Stands before it in the trainer's list.

    Args:
        spot: ours.

    Attributes:
        begun: when the snapshot of each step was begun, on the monotonic clock.
        spent_s: seconds that training has spent at seams.
    """

    def __init__(self, spot: SpotCheckpoint) -> None:
        self._spot = spot
        self._begun_s, self._before = 0.0, (-1, 0)
        self._last: _Last | None = None
        self.begun: dict[int, float] = {}
        self.spent_s = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        FitState.of(trainer).listeners.insert(0, self)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._last is None:  # by now ours have added themselves
            self._last = _Last(self)
            FitState.of(trainer).listen(self._last)

    def before_validation(self, trainer: pl.Trainer) -> None:
        self._begun_s, self._before = time.monotonic(), self._counts()

    after_batch = before_validation

    def passed(self) -> None:
        """Ours have done what they do at this seam."""
        self.spent_s += time.monotonic() - self._begun_s
        step, skipped = self._counts()
        if step != self._before[0] and skipped == self._before[1]:  # one for which there was no slot is none
            self.begun[step] = self._begun_s

    def _counts(self) -> tuple[int, int]:
        return self._spot.snapshots.begun_step, self._spot.num_skipped


class _Last:
    """Hears of every seam after ours."""

    def __init__(self, watch: SeamWatch) -> None:
        self._watch = watch

    def before_validation(self, trainer: pl.Trainer) -> None:
        self._watch.passed()

    after_batch = before_validation
