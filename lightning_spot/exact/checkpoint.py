"""Lightning's own checkpoint of a trainer, as a snapshot takes it: without what cannot be pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_spot.exact import namespaces, private
from lightning_spot.exact.hyperparameters import OF_DATA, OF_MODEL, held
from lightning_spot.exact.sharded import live_states

if TYPE_CHECKING:
    import lightning.pytorch as pl


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What Lightning would save; of a sharded strategy, with the live tensors."""
    with live_states(trainer):
        checkpoint: dict[str, Any] = private.DUMP_CHECKPOINT.of(private.DUMPING_CONNECTOR.of(trainer))(False)
    return checkpoint


def checkpoint_through_save(trainer: pl.Trainer) -> dict[str, Any]:
    """The same by public names only."""
    caught: dict[str, Any] = {}
    strategy = trainer.strategy
    strategy.save_checkpoint = lambda checkpoint, *_, **__: caught.update(checkpoint)  # type: ignore[method-assign]
    try:
        with live_states(trainer):
            trainer.save_checkpoint("snapshot.ckpt", weights_only=False)
    finally:
        vars(strategy).pop("save_checkpoint", None)
    return caught


def leave_out_callbacks(checkpoint: dict[str, Any]) -> list[str]:
    """Take hyperparameters out that hold a callback: it holds the trainer, and nothing of that can be pickled.

    Returns:
        their names.
    """
    names: list[str] = []
    for key in (OF_MODEL, OF_DATA):
        values = dict(held(checkpoint.get(key) or {}))
        left_out = [name for name, value in values.items() if _holds_callback(value)]
        if left_out:
            checkpoint[key] = {name: value for name, value in values.items() if name not in left_out}
            names += left_out
    return names


def _holds_callback(value: Any, depth: int = 3) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(_holds_callback(item, depth - 1) for item in value)
    return isinstance(value, (*namespaces.classes("callbacks", "Callback"), *namespaces.classes("", "Trainer")))
