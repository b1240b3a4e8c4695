"""Which trainings our callbacks take part in, and which of them a trainer has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_spot.errors import SettingsError
from lightning_spot.exact.builtin_callbacks import is_tuned

if TYPE_CHECKING:
    import lightning.pytorch as pl

_INSTEAD = {
    "DeepSpeedStrategy": "its engine keeps weights and optimizers to itself. Use ModelParallelStrategy (FSDP2), or DDP",
    "FSDPStrategy": "torch has deprecated FSDP1. Use ModelParallelStrategy with fully_shard (FSDP2)",
}
"""Strategies that are not supported: why, and what to use."""


def takes_part(trainer: pl.Trainer, stage: str) -> bool:
    """Whether a ``setup`` is that of a training whose state is to be kept.

    Raises:
        SettingsError: if it is, and its strategy is not supported.
    """
    if stage != "fit" or getattr(trainer, "fast_dev_run", False) or is_tuned(trainer):
        return False
    for kind in type(trainer.strategy).__mro__:
        if instead := _INSTEAD.get(kind.__name__):
            raise SettingsError(
                f"{kind.__name__} is not supported: {instead}; or Lightning's ModelCheckpoint with this one"
            )
    return True


def parts_of(trainer: pl.Trainer) -> Iterator[Any]:
    """The callbacks of a trainer, each also by the parts that it is composed of."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's Trainer has it
        yield from parts_in(callback)


def parts_in(callback: Any) -> tuple[Any, ...]:
    """The parts that a callback is composed of; itself, if it is not."""
    parts: tuple[Any, ...] = getattr(callback, "parts", (callback,))
    return parts
