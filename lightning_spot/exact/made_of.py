"""What an epoch was made of: written down with its position, and compared where another process goes on with it.

Likewise whether schedulers, which come back with the number of steps they had, are made for those the run takes now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.errors import SettingsError
from lightning_spot.exact.randomness import State
from lightning_spot.say import say

if TYPE_CHECKING:
    import lightning.pytorch as pl


def made_of(loader: Any) -> State:
    """Length of the data set, workers, sampler and ``drop_last`` of a loader; ``None`` for what it has not."""
    length = None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        with suppress(TypeError, NotImplementedError):
            length = len(loader.dataset)  # type: ignore[arg-type]
    return {
        "length": length,
        "workers": getattr(loader, "num_workers", 0),
        "sampler": type(sampler).__name__ if (sampler := _sampler_of(loader)) is not None else None,
        "drop_last": getattr(loader, "drop_last", None),
    }


def _sampler_of(loader: Any) -> Any:
    """The sampler that decides on the order: one of batches is that of another, or is of the user's own."""
    batches = getattr(loader, "batch_sampler", None)
    return batches if batches is not None and not hasattr(batches, "sampler") else getattr(loader, "sampler", None)


def differences(position: State | None, loader: Any) -> Iterator[str]:
    """What has changed since an epoch began, and what that means, for a loader that goes on at a position."""
    if position is None:
        return
    was, now = position["made_of"], made_of(loader)
    changed = {name for name, value in was.items() if value != now[name]}
    within = "at_iter" in position and not position["exhausted"] and position["yielded"]
    if "workers" in changed:
        what = "random numbers drawn in loading (augmentation) are others"
        if now["length"] is None:
            what = "a stream deals its samples to them in another way, so that some are seen twice or not at all"
        yield f"num_workers was {was['workers']} and is {now['workers']}: {what}"
    if changed & {"length", "sampler"}:
        facts = [f"{text} was {was[name]} and is {now[name]}" for name, text in _NAMES.items() if name in changed]
        what = "epochs from here on are made of what there is now"
        if within:
            what = (
                f"this epoch goes on behind batch {position['yielded']} in another order, so that some of its samples"
                " are seen twice or not at all; the next epoch is a whole one"
            )
        yield f"{', '.join(facts)}: {what}"
    if "drop_last" in changed:
        yield f"drop_last was {was['drop_last']} and is {now['drop_last']}: epochs end with another batch"


_NAMES = {"length": "the number of samples in the data set", "sampler": "the sampler"}


class FixedSteps:
    """Schedulers for a fixed number of steps: of the program, and as they come back with the number that they had."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def note(self, trainer: pl.Trainer) -> None:
        """Before their states are loaded: how many steps the program has made them for."""
        self._made = {name: last for name, last, _ in _fixed_steps(trainer, float("inf"))}

    def check(self, trainer: pl.Trainer) -> None:
        """When training begins: refuse what torch ends in the step after a scheduler's last one.

        A program that makes them for too few steps itself is left alone: its run may end sooner than it could.

        Raises:
            SettingsError: naming the scheduler.
        """
        if not self._made or not trainer.lightning_module.automatic_optimization:
            return
        for name, last, steps in _fixed_steps(trainer, None):
            if last < steps <= self._made.get(name, 0):
                # The error alone may be caught by the program, which then would not know which step is meant.
                text = "the scheduler {about} ends at its step {last}, this run at {steps}: the run is refused"
                say(
                    logging.WARNING,
                    "scheduler-too-short",
                    text,
                    about=name,
                    only_rank_zero=True,
                    last=last,
                    steps=steps,
                )
                raise SettingsError(
                    f"scheduler {name} is restored with total_steps={last}, and this run takes {steps} steps. Train for"
                    " as many epochs and steps as before, or give the run its own dirpath"
                )


def _fixed_steps(trainer: pl.Trainer, planned: float | None) -> Iterator[tuple[str, int, float]]:
    """Name, ``total_steps`` and steps to come of each scheduler that has these.

    Args:
        trainer: whose schedulers they are.
        planned: steps of the run, ``None`` for what the trainer says, which asks for its loaders.
    """
    for number, config in enumerate(trainer.lr_scheduler_configs):
        steps = planned
        if steps is None:
            steps = trainer.max_epochs if config.interval == "epoch" else trainer.estimated_stepping_batches
        if steps is None or steps < 0:
            steps = float("inf")
        if isinstance(last := getattr(config.scheduler, "total_steps", None), int):
            yield type(config.scheduler).__name__ + (f" {number}" if number else ""), last, steps // config.frequency
