"""Finds the tensors of a checkpoint and tells which of them only the optimizer may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_STRIDED = torch.strided
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dicts, lists and tuples. Tensors inside other objects are not seen."""
    stack = [state]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a ``DTensor``; of others, the tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def storage_address(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage, 0 if it has none of its own (sparse, quantised, most wrapper subclasses).

    That of a ``DTensor`` is the storage of what this rank has of it.
    """
    tensor = local_of(tensor)  # first: to ask a DTensor for anything else takes long
    if tensor.layout is not _STRIDED:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Tensors by the address of their storage; those without one of their own are left out."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if address := storage_address(tensor):
            if address in found:
                found[address].append(tensor)
            else:
                found[address] = [tensor]
    return found


def optimizer_owned(optimizers: Iterable[Any]) -> dict[int, list[torch.Tensor]]:
    """Tensors that change in ``optimizer.step()`` and nowhere else, by storage: parameters and their state.

    Args:
        optimizers: ``torch.optim.Optimizer`` or Lightning's wrappers.
    """
    owned: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned += group["params"]
        owned += tensors_in(list(optimizer.state.values()))
    return by_storage({id(tensor): tensor for tensor in owned}.values())
