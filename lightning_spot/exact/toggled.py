"""An optimizer that is toggled in one batch and back in a later one: Lightning keeps in the module what was trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spot.exact import private

if TYPE_CHECKING:
    import lightning.pytorch as pl


def capture(module: pl.LightningModule) -> dict[str, bool]:
    """Which parameters are to be trained again when the optimizer is toggled back; by their names."""
    kept = private.TOGGLED.of(module)
    return {name: kept[parameter] for name, parameter in module.named_parameters() if parameter in kept} if kept else {}


def restore(module: pl.LightningModule, saved: dict[str, bool]) -> None:
    """Give the module what :meth:`capture` returned."""
    parameters = dict(module.named_parameters())
    private.TOGGLED.set(module, {parameters[name]: trains for name, trains in saved.items() if name in parameters})
