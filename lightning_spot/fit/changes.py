"""What the user has changed since a snapshot was taken: the shape of the model, its hyperparameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.errors import ModelChanged
from lightning_spot.exact import namespaces

if TYPE_CHECKING:
    import lightning.pytorch as pl

_MOST_NAMED = 5


def check_model(trainer: pl.Trainer, checkpoint: dict[str, Any], snapshot: str) -> None:
    """Refuse a checkpoint of another model, before Lightning loads half of it.

    Args:
        trainer: whose model it is for.
        checkpoint: as it was saved.
        snapshot: its name and place, for the message.

    Raises:
        ModelChanged: naming what differs.
    """
    module = trainer.lightning_module
    if not module.strict_loading or _mends_itself(module):
        return  # the user's own hook may mend the difference
    saved = checkpoint.get("state_dict", {})
    present = trainer.strategy.lightning_module_state_dict()
    missing, unexpected = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
    reshaped = [
        f"{key} {tuple(saved[key].shape)}→{tuple(value.shape)}"
        for key, value in present.items()
        if key in saved and isinstance(value, torch.Tensor) and getattr(saved[key], "shape", None) != value.shape
    ]
    if missing or unexpected or reshaped:
        parts = [("new in the model", missing), ("gone from the model", unexpected), ("changed shape", reshaped)]
        listed = "; ".join(f"{what}: {some(keys)}" for what, keys in parts if keys)
        raise ModelChanged(
            f"the model has changed since snapshot {snapshot}: {listed}. Use the model it was taken"
            " of, set strict_loading=False in the LightningModule to load what fits, or start afresh with resume=False"
            " or another dirpath. The snapshot is left as it is",
            missing=missing,
            unexpected=unexpected,
            reshaped=reshaped,
        )


def other_hyperparameters(module: pl.LightningModule, checkpoint: dict[str, Any]) -> list[str]:
    """The plain ones that a snapshot has otherwise, as ``name saved→present``."""
    saved, plain = checkpoint.get("hyper_parameters"), (bool, int, float, str)
    if not isinstance(saved, dict):
        return []
    pairs = [(name, saved[name], value) for name, value in module.hparams.items() if name in saved]
    return [
        f"{name} {old!r}→{value!r}"
        for name, old, value in pairs
        if isinstance(old, plain) and isinstance(value, plain) and repr(old) != repr(value)
    ]


def some(names: list[str]) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _mends_itself(module: pl.LightningModule) -> bool:
    """Whether a hook of the user's sees the checkpoint before it is loaded."""
    plain = [kind.on_load_checkpoint for kind in namespaces.classes("", "LightningModule")]
    return type(module).on_load_checkpoint not in plain
