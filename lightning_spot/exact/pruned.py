"""ModelPruning: masks and the weights behind them, which its checkpoints leave out, captured and put back.

Pruning renames ``weight`` into ``weight_orig`` and adds ``weight_mask``. A snapshot holds the model as it acts, so that
anybody can load it; a resume prunes the new model by the saved mask and gives it the weights behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import prune

from lightning_spot.exact import namespaces, private

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]


def capture(trainer: pl.Trainer) -> State:
    """Masks, the weights behind them, and the first weights for a lottery ticket; empty without the callback."""
    callbacks = _callbacks(trainer)
    if not callbacks:
        return {}
    masked = {
        f"{name}.{tensor}" if name else tensor: (getattr(module, f"{tensor}_orig"), getattr(module, f"{tensor}_mask"))
        for name, module, tensor in _masked(trainer.lightning_module)
    }
    return {
        "masked": {name: [part.detach().clone() for part in parts] for name, parts in masked.items()},
        "first": [list(_first(callback)) for callback in callbacks],
    }


def as_it_acts(trainer: pl.Trainer, checkpoint: State) -> None:
    """Give a checkpoint's ``state_dict`` the names and values that the model has without its masks."""
    if not _callbacks(trainer):
        return
    values = checkpoint["state_dict"]
    for name, module, tensor in _masked(trainer.lightning_module):
        key = f"{name}.{tensor}" if name else tensor
        if f"{key}_orig" in values and f"{key}_mask" in values:
            values.pop(f"{key}_orig"), values.pop(f"{key}_mask")
            values[key] = (getattr(module, f"{tensor}_mask") * getattr(module, f"{tensor}_orig")).detach()


def restore(trainer: pl.Trainer, saved: State) -> None:
    """Prune the model as it was; after the optimizers were made, which hold the weights behind the masks."""
    modules = dict(trainer.lightning_module.named_modules())
    for key, (weights, mask) in saved.get("masked", {}).items():
        name, _, tensor = key.rpartition(".")
        module = modules.get(name)
        if module is None or not isinstance(getattr(module, tensor, None), nn.Parameter):
            continue
        behind = getattr(module, tensor)
        prune.custom_from_mask(module, tensor, mask.to(behind))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            behind.copy_(weights)
        delattr(module, tensor)
        setattr(module, tensor, getattr(module, f"{tensor}_mask") * behind)
    for callback, firsts in zip(_callbacks(trainer), saved.get("first", []), strict=False):
        _restore_first(callback, firsts)


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return [item for item in trainer.callbacks if isinstance(item, namespaces.classes("callbacks", "ModelPruning"))]  # type: ignore[attr-defined]


def _masked(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for name, part in module.named_modules():
        for buffer in dict(part.named_buffers(recurse=False)):
            tensor = buffer.removesuffix("_mask")
            if tensor != buffer and isinstance(getattr(part, f"{tensor}_orig", None), nn.Parameter):
                yield name, part, tensor


def _layers(callback: Any) -> Iterator[tuple[int, nn.Module, str, nn.Module]]:
    for layer in (private.ORIGINAL_LAYERS.of(callback) or {}).values():
        for number, tensor in layer["names"]:
            yield number, layer["data"], tensor, private.PARAMETERS_TO_PRUNE.of(callback)[number][0]


def _behind(module: nn.Module, tensor: str) -> Any:
    return getattr(module, f"{tensor}_orig", None) if hasattr(module, f"{tensor}_orig") else getattr(module, tensor)


def _first(callback: Any) -> Iterator[tuple[int, torch.Tensor | None]]:
    """The first weights of each layer; ``None`` where they share memory with the weights, as Lightning leaves them."""
    for number, first, tensor, module in _layers(callback):
        value, present = getattr(first, tensor), _behind(module, tensor)
        shared = value.data_ptr() == present.data_ptr()
        yield number, None if shared else value.detach().clone()


def _restore_first(callback: Any, saved: list[tuple[int, torch.Tensor | None]]) -> None:
    values = dict(saved)
    for number, first, tensor, module in _layers(callback):
        if number in values:
            value, target = values[number], getattr(first, tensor)
            target.data = _behind(module, tensor).data if value is None else value.to(target.device)
