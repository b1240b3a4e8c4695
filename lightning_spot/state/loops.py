"""Lightning's loops: where a batch ends, and counters that would lead a resume astray.

Training can be cut at two places of a batch's end and go on from there exactly. Lightning's ``on_train_batch_end`` is
too early for that: the module's own hook, the step's logging, the validation and metric-driven schedulers follow it.
What follows it all is ``on_advance_end`` of Lightning's training epoch loop, so that is what is wrapped here.
``tests/integration/test_exact.py`` guards it against changes in Lightning.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lightning_spot.patches import Patches
from lightning_spot.state import compat

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StepBoundary(enum.Enum):
    """Where training is when it is to stop."""

    SANITY_CHECK = enum.auto()
    AFTER_BATCH = enum.auto()
    BEFORE_VALIDATION = enum.auto()
    VALIDATION = enum.auto()


class BoundaryListener(Protocol):
    """What is told where training is."""

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


State = dict[str, Any]

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def mark_before_validation(checkpoint: State) -> dict[str, int]:
    """Make a checkpoint taken in front of a validation look as if that had begun: Lightning then runs it on resume.

    Returns:
        the count of validation batches that the mark replaced.
    """
    progress = checkpoint["loops"]["fit_loop"][_VALIDATION]
    total: dict[str, int] = dict(progress["total"])
    done = total["completed"]
    progress["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    progress["current"] = dict.fromkeys(("ready", "started", "processed", "completed"), 0)
    return total


def even_out(checkpoint: State) -> State:
    """Let batches that ended their epoch early count as done: a restarted Lightning takes them for one in its middle.

    (``on_train_batch_start`` that returns -1 leaves a batch begun for ever.)

    Returns:
        what was added to each count.
    """
    progress = checkpoint["loops"]["fit_loop"][_BATCHES]
    total = progress["total"]
    progress["total"] = dict.fromkeys(total, total["ready"])
    return {name: total["ready"] - count for name, count in total.items() if count != total["ready"]}


def number_batches(trainer: pl.Trainer, done: int) -> None:
    """Let ``done`` batches of this epoch count as done, before its loop begins: an epoch has other batches now."""
    current = compat.BATCH_PROGRESS.of(trainer.fit_loop.epoch_loop).current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, done)


def validate_first(trainer: pl.Trainer, patches: Patches) -> dict[str, int]:
    """Have a validation come before the next batch, of which the ranks that took the snapshot knew nothing.

    It is due where the batches of this epoch are numbered anew: behind its last one, or in its middle. Lightning would
    take the run for one that was stopped behind it.

    Returns:
        the count of validation batches.
    """
    loop = trainer.fit_loop.epoch_loop

    def validate(advance: Callable[[Any], None], data_fetcher: Any) -> None:
        if not (loop.restarting and compat.SHOULD_VALIDATE.of(loop)(data_fetcher)):
            advance(data_fetcher)

    patches.once(loop, compat.ADVANCE_IN_EPOCH.name, validate)
    return dict(compat.VAL_BATCH_PROGRESS.of(loop.val_loop).total.state_dict())


def restore(trainer: pl.Trainer, added: State) -> None:
    """Take back what :func:`even_out` added, when training goes on."""
    total = compat.BATCH_PROGRESS.of(trainer.fit_loop.epoch_loop).total
    for name, count in added.items():
        setattr(total, name, getattr(total, name) - count)


def is_validation_due(trainer: pl.Trainer, *, should_stop: bool) -> bool:
    """Whether a run that was stopped in front of a validation, and is about to go on, will begin with it.

    Args:
        trainer: that fits, where training begins.
        should_stop: as it was; a validation may be due because of that.
    """
    loop, stops = trainer.fit_loop, trainer.should_stop
    trainer.should_stop = should_stop
    try:
        return bool(compat.SHOULD_VALIDATE.of(loop.epoch_loop)(compat.DATA_FETCHER.of(loop)))
    finally:
        trainer.should_stop = stops


def end_restart(trainer: pl.Trainer) -> None:
    """Of a fit that had nothing left to train: have its loops forget that a checkpoint was loaded, as after training.

    A further fit of this trainer would begin its first epoch as one that is resumed: with a shuffled order that was
    drawn in the fit before, when other numbers were due.
    """
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        loop.on_iteration_done()


def is_in_epoch(checkpoint: State) -> bool:
    """Whether the end of an epoch was still to come when a checkpoint was taken."""
    epochs = checkpoint["loops"]["fit_loop"][_EPOCHS]["current"]
    return bool(epochs["ready"] > epochs["processed"])


def may_stop(trainer: pl.Trainer, checkpoint: State) -> bool:
    """Whether a run that was told to stop does so: not before it has done its least epochs and steps."""
    loop = trainer.fit_loop
    epochs = checkpoint["loops"]["fit_loop"][_EPOCHS]["current"]["processed"]
    return bool(epochs >= (loop.min_epochs or 0) and checkpoint["global_step"] >= (loop.epoch_loop.min_steps or 0))


def forget_validations(trainer: pl.Trainer) -> None:
    """Have a loop that goes on from a checkpoint not take a validation of before for the one that is due.

    There is one where the process has tuned, or fitted with this trainer. Lightning would leave the validation out,
    and each epoch that follows without a single batch.
    """
    compat.HAS_VALIDATED.set(trainer.fit_loop.epoch_loop.val_loop, False)


def enter_epoch(trainer: pl.Trainer, patches: Patches, *, validates: bool, should_stop: bool) -> None:
    """Have Lightning go into the epoch it was stopped in, though no step is left: the end of it is, and of training.

    It would not, where the number of steps is reached or ``should_stop`` is set.

    Args:
        trainer: that fits.
        validates: whether the end of the epoch begins with a validation; with none, if the run is to validate no more.
        should_stop: as it was; a validation may be due because of that.
        patches: take that back, as far as the epoch was not entered.
    """
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    kind = type(loop)

    def enter(advance: Callable[[], None]) -> None:
        if validates:
            patches.once(epoch_loop, compat.ADVANCE_IN_EPOCH.name, validate)
        else:  # or one more batch would be fetched before that is looked at
            compat.HAS_VALIDATED.set(epoch_loop.val_loop, True)
        advance()

    def validate(advance: Callable[[Any], None], data_fetcher: Any) -> None:
        trainer.should_stop = should_stop
        if compat.SHOULD_VALIDATE.of(epoch_loop)(data_fetcher):  # else it would train one more batch
            advance(data_fetcher)

    patches.once(loop, compat.ADVANCE.name, enter).callback(setattr, loop, "__class__", kind)
    loop.__class__ = type(kind.__name__, (kind,), {"done": False})
