"""Which trainings our callbacks take part in, and which of them a trainer has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_spot.errors import SettingsError
from lightning_spot.exact.shipped import is_tuned

if TYPE_CHECKING:
    import lightning.pytorch as pl

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def takes_part(trainer: pl.Trainer, stage: str) -> bool:
    """Whether a ``setup`` is that of a training whose state is to be kept.

    Raises:
        SettingsError: if it is, and its strategy is a sharded one.
    """
    if stage != "fit" or getattr(trainer, "fast_dev_run", False) or is_tuned(trainer):
        return False
    # Sharded strategies write their checkpoints themselves, in pieces that one rank cannot gather.
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if found := names.intersection(_SHARDED):
        raise SettingsError(
            f"{found.pop()} is not supported yet: snapshots work on a single device and with DDP. Use Lightning's"
            " ModelCheckpoint with this strategy"
        )
    return True


def parts_of(trainer: pl.Trainer) -> Iterator[Any]:
    """The callbacks of a trainer, each also by the parts that it is composed of."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's Trainer has it
        yield from getattr(callback, "parts", (callback,))
