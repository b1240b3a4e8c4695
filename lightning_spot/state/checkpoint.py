"""Lightning's own checkpoint of a trainer, as a snapshot takes it: without what cannot be pickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_spot.patches import Patches
from lightning_spot.state import compat, namespaces
from lightning_spot.state.sharded import live_states
from lightning_spot.trees import leaves

if TYPE_CHECKING:
    import lightning.pytorch as pl

OF_MODEL, OF_DATA = "hyper_parameters", "datamodule_hyper_parameters"
"""Their names in a checkpoint."""


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What Lightning would save; of a sharded strategy, with the live tensors."""
    with live_states(trainer):
        checkpoint: dict[str, Any] = compat.DUMP_CHECKPOINT.of(compat.DUMPING_CONNECTOR.of(trainer))(False)
    return checkpoint


def checkpoint_through_save(trainer: pl.Trainer) -> dict[str, Any]:
    """The same by public names only."""
    caught: dict[str, Any] = {}
    with Patches() as patches, live_states(trainer):
        patches.wrap(
            trainer.strategy, "save_checkpoint", lambda _: lambda checkpoint, *_, **__: caught.update(checkpoint)
        )
        trainer.save_checkpoint("snapshot.ckpt", weights_only=False)
    return caught


def leave_out_callbacks(checkpoint: dict[str, Any]) -> list[str]:
    """Take hyperparameters out that hold a callback: it holds the trainer, and nothing of that can be pickled.

    Returns:
        their names.
    """
    kinds = (*namespaces.classes("callbacks", "Callback"), *namespaces.classes("", "Trainer"))
    names: list[str] = []
    for key in (OF_MODEL, OF_DATA):
        values = dict(held(checkpoint.get(key) or {}))
        left_out = [name for name, value in values.items() if next(leaves(value, kinds), None) is not None]
        if left_out:
            checkpoint[key] = {name: value for name, value in values.items() if name not in left_out}
            names += left_out
    return names


# -- hyperparameters: a dictionary, or omegaconf's configuration, which may leave values open ------------------------


def held(value: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each key or index with its value, ``None`` for one that cannot be had: a configuration may leave some open."""
    for key in value if isinstance(value, Mapping) else range(len(value)):
        try:
            item = value[key]
        except Exception:  # of omegaconf, or a class of the user's
            item = None
        yield key, item


def as_saved(hyperparameters: Any) -> Any:
    """What Lightning puts into a checkpoint for them: its own kind of dictionary as a plain one, others as they are."""
    return dict(hyperparameters) if isinstance(hyperparameters, dict) else hyperparameters
