"""What an epoch was made of: written down with its position, and compared where another process goes on with it.

Likewise whether schedulers, which come back with the number of steps they had, are made for those the run takes now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.exact.randomness import State

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


def differences(position: State, loader: Any) -> Iterator[str]:
    """What has changed since an epoch began, and what that means, for a loader that goes on at a position."""
    was: State = position.get("made_of") or {}  # not of an earlier version
    now = made_of(loader)
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


def schedulers_that_end(trainer: pl.Trainer) -> Iterator[str]:
    """Schedulers whose steps end before the run does: torch raises an error in the step after their last one."""
    if not trainer.lightning_module.automatic_optimization:
        return
    for config in trainer.lr_scheduler_configs:
        last = getattr(config.scheduler, "total_steps", None)
        planned = trainer.max_epochs if config.interval == "epoch" else trainer.estimated_stepping_batches
        if isinstance(last, int) and planned is not None and float("inf") > planned // config.frequency > last:
            yield (
                f"the scheduler {type(config.scheduler).__name__} has total_steps={last}, and the run is to take"
                f" {planned // config.frequency}: it stops there with an error of torch's. Give the run as many steps"
                " as before, or a dirpath of its own"
            )
