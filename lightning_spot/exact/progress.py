"""Lightning's counters of batches, where what it saves of them would lead a resume astray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl


from lightning_spot.exact import private

State = dict[str, Any]

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
    current = private.BATCH_PROGRESS.of(trainer.fit_loop.epoch_loop).current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, done)


def restore(trainer: pl.Trainer, added: State) -> None:
    """Take back what :func:`even_out` added, when training goes on."""
    total = private.BATCH_PROGRESS.of(trainer.fit_loop.epoch_loop).total
    for name, count in added.items():
        setattr(total, name, getattr(total, name) - count)
