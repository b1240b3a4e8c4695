"""Seams: the two places of a batch's end at which training can be cut and sewn together again exactly.

Lightning's ``on_train_batch_end`` comes too early for that: the module's own hook, the step's logging, the validation
and metric-driven schedulers follow it. What follows it all is ``on_advance_end`` of Lightning's training epoch loop, so
that is what is wrapped here. ``tests/integration/test_exact.py`` guards it against changes in Lightning.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lightning_spot.exact import private
from lightning_spot.exact.per_trainer import PerTrainer
from lightning_spot.patches import Patches

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Seam(enum.Enum):
    """Where training is when it is to stop."""

    SANITY_CHECK = enum.auto()
    AFTER_BATCH = enum.auto()
    BEFORE_VALIDATION = enum.auto()
    VALIDATION = enum.auto()


class SeamListener(Protocol):
    """What is told of seams."""

    def before_validation(self, trainer: pl.Trainer) -> None:
        """A batch is done and a validation follows; also when a resumed run comes to the one it stopped at."""

    def after_batch(self, trainer: pl.Trainer) -> None:
        """A batch is done, with no validation after it; schedulers have stepped, the epoch's end may follow."""


def is_tuning(trainer: pl.Trainer, callbacks: Sequence[pl.Callback]) -> bool:
    """Whether a tuner is at work: it trains for a trial, with none of the run's callbacks.

    Args:
        trainer: any trainer.
        callbacks: of the run.
    """
    present = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    return bool(callbacks) and not any(callback in present for callback in callbacks)


class Seams(PerTrainer):
    """The seams of one trainer. One for each trainer: see :meth:`of`.

    Attributes:
        is_on: whether this Lightning lets them be found. If not, :meth:`batch_ended` stands for them.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._listeners: list[SeamListener] = []
        self._patches = Patches()
        self.is_on = True

    def add(self, listener: SeamListener) -> None:
        """Tell ``listener``, after those added before it."""
        if listener in self._listeners:
            return
        self._listeners.append(listener)
        if len(self._listeners) == 1 and self.is_on:
            self._wrap()

    def batch_ended(self, listener: SeamListener) -> None:
        """Where there are no seams, tell ``listener`` in ``on_train_batch_end``: before what follows the batch."""
        if not self.is_on and listener in self._listeners:
            listener.after_batch(self._trainer)

    def remove(self, listener: SeamListener) -> None:
        """Tell it no more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
            if not self._listeners:
                self._patches.close()

    def _wrap(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        ours = list(self._trainer.callbacks)  # type: ignore[attr-defined] # Lightning's Trainer has it

        def on_advance_end(original: Callable[[Any], None], data_fetcher: Any) -> None:
            if is_tuning(self._trainer, ours):
                original(data_fetcher)
                return
            # A checkpoint of Lightning's own, taken after the last validation of an epoch, comes here once more.
            validates = private.SHOULD_VALIDATE.of(loop)(data_fetcher) and not private.SKIP_NEXT_VAL.of(loop)
            if validates:
                for listener in list(self._listeners):
                    listener.before_validation(self._trainer)
            original(data_fetcher)
            if not validates:
                for listener in list(self._listeners):
                    listener.after_batch(self._trainer)

        private.ADVANCE_END.wrap(self._patches, loop, partial(partial, on_advance_end))
