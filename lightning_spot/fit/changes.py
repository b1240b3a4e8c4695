"""What the user has changed since a snapshot was taken: the shape of the model, its hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from lightning_spot.capture.tensors import shape_of
from lightning_spot.errors import ModelChanged, SettingsError
from lightning_spot.exact import namespaces, progress
from lightning_spot.exact.compare import shown
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.hyperparameters import OF_DATA, OF_MODEL, held
from lightning_spot.sharded.reader import changed

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
    if not module.strict_loading or namespaces.overrides(module, "on_load_checkpoint"):
        return  # the user's own hook sees the checkpoint before it is loaded, and may mend the difference
    saved = checkpoint.get("state_dict", {})
    present = trainer.strategy.lightning_module_state_dict()
    missing, unexpected = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
    reshaped = {
        key: f"{key} {tuple(shape_of(saved[key]))}→{tuple(shape_of(value))}"
        for key, value in present.items()
        if isinstance(saved.get(key), torch.Tensor)
        and isinstance(value, torch.Tensor)
        and not is_lazy(value)  # it takes the shape that comes
        and shape_of(saved[key]) != shape_of(value)
    }
    if missing or unexpected or not all(_loads_by_itself(module, key) for key in reshaped):
        way = "set strict_loading=False in the LightningModule to load what fits, "
        raise changed(snapshot, missing=missing, unexpected=unexpected, reshaped=[*reshaped.values()], way=way)


def _loads_by_itself(module: torch.nn.Module, key: str) -> bool:
    """Whether the module that has a tensor loads it in a way of its own, and so may take the shape that comes.

    Those of torch that learn a quantisation do: what is for each channel shows in training.
    """
    owner = dict(module.named_modules()).get(key.rpartition(".")[0])
    if owner is None:
        return False
    has_hooks = bool(getattr(owner, "_load_state_dict_pre_hooks", ()))
    overridden = "_load_from_state_dict"  # where torch should have it no more, nobody overrides it
    return has_hooks or getattr(type(owner), overridden, None) is not getattr(torch.nn.Module, overridden, None)


def check_optimizers(trainer: pl.Trainer, snapshot: str) -> None:
    """Have it named if the optimizers of a checkpoint are not those of the program, when they are loaded.

    Torch would name neither. That is so late since hooks may change the checkpoint until then, and those of an
    optimizer its state even later: only what torch refuses does not fit.

    Args:
        trainer: that resumes.
        snapshot: its name and place, for the message.
    """
    strategy: Any = trainer.strategy
    load = strategy.load_optimizer_state_dict

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        vars(strategy).pop("load_optimizer_state_dict", None)
        FitState.of(trainer).fixed_steps.note(trainer)
        saved, present = checkpoint["optimizer_states"], trainer.optimizers
        if len(saved) != len(present):
            raise _other_optimizers(snapshot, f"{len(saved)} optimizers", f"{len(present)}")
        try:
            load(checkpoint)
        except ValueError as error:
            for number, (state, optimizer) in enumerate(zip(saved, present, strict=True)):
                if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
                    continue
                before, now = _groups(state["param_groups"]), _groups(optimizer.param_groups)
                if before != now:
                    raise _other_optimizers(snapshot, f"optimizer {number} with {before}", now) from error
            raise

    strategy.load_optimizer_state_dict = load_optimizer_state_dict


def _groups(groups: list[dict[str, Any]]) -> str:
    return f"groups of {', '.join(str(len(group['params'])) for group in groups)} parameters"


def _other_optimizers(snapshot: str, before: str, now: str) -> ModelChanged:
    return ModelChanged(
        f"snapshot {snapshot} has {before}, and configure_optimizers makes {now}. If the program was changed, take that"
        " back; if it replaces optimizers, or adds groups of parameters, in mid-training, make them so in"
        " configure_optimizers when it is started again. Or start afresh with resume=False",
        missing=[],
        unexpected=[],
        reshaped=[],
    )


def check_limits(trainer: pl.Trainer, checkpoint: dict[str, Any], snapshot: str) -> None:
    """Refuse a checkpoint from beyond where the training is to end.

    Args:
        trainer: that resumes.
        checkpoint: that it goes on from.
        snapshot: its name and place, for the message.

    Raises:
        SettingsError: naming the limit.
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    is_beyond = epochs is not None and 0 <= epochs < checkpoint["epoch"] + progress.is_in_epoch(checkpoint)
    if not is_beyond and not 0 <= steps < checkpoint["global_step"]:
        return
    limit = f"max_epochs={epochs}" if is_beyond else f"max_steps={steps}"
    raise SettingsError(
        f"snapshot {snapshot} is of epoch {checkpoint['epoch']}, step {checkpoint['global_step']}, and this fit ends"
        f" before that, with {limit}: it cannot go on from there. Raise {limit.partition('=')[0]}, name an earlier"
        " checkpoint in fit(ckpt_path=), or give this training a dirpath of its own"
    )


def other_hyperparameters(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> list[str]:
    """Plain ones of the model and the data module that a snapshot has otherwise, or not: ``name saved→present``."""
    found: list[str] = []
    for key, owner in ((OF_MODEL, trainer.lightning_module), (OF_DATA, trainer.datamodule)):  # type: ignore[attr-defined] # it has one
        saved = checkpoint.get(key, {})  # what stands for an object that is not loaded has no truth value
        if owner is not None and isinstance(saved, Mapping) and isinstance(owner.hparams, Mapping):
            found += _changed(saved, owner.hparams)
    return found


def _changed(saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[str]:
    before, now = _plain_ones(saved), _plain_ones(present)
    for name, value in now.items():
        if name not in saved:
            yield f"{name} {shown(value)} (new)"
        elif name in before and repr(before[name]) != repr(value):
            yield f"{name} {shown(before[name])}→{shown(value)}"
    for name, value in before.items():
        if name not in present:
            yield f"{name} {shown(value)} (gone)"


def _plain_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held(values) if isinstance(value, (bool, int, float, str))}
