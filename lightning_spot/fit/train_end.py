"""The very end of training, after the hooks of all callbacks and of the module: what is to happen there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl


def after_train_end(trainer: pl.Trainer, action: Callable[[], None]) -> Callable[[], None]:
    """Have ``action`` called once training has ended, also for the module, whose own hook follows those of callbacks.

    Returns:
        takes that back.
    """
    strategy: Any = trainer.strategy
    original = strategy.on_train_end  # the last that Lightning calls then

    def undo() -> None:
        vars(strategy).pop("on_train_end", None)

    def on_train_end() -> None:
        undo()
        original()
        action()

    strategy.on_train_end = on_train_end
    return undo
