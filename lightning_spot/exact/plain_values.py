"""Plain values of attributes as a checkpoint holds them: numbers, text, tensors, lists, tuples and dicts of those.

Generators, too, which are put back where the program has one of the same kind.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_spot.exact.change_detector import SCALARS
from lightning_spot.exact.randomness import GENERATORS, capture_generator, is_of_process, restore_generator

MOST_BYTES = 2**24
"""Largest tensor, or list of tensors, that is kept of a module's attributes."""

_MOST_ITEMS = 100_000
_DEEPEST = 8
_REPLACED: frozenset[type] = SCALARS | {torch.Tensor, np.float64, list, tuple, dict}
"""Kinds of what is replaced by another value: what else a program has there is its own."""

_STACKED = "lightning_spot.stacked"
_GENERATOR = "lightning_spot.generator"


class NotPlain(Exception):
    """A value cannot be kept."""


def copy_of(value: Any) -> Any:
    """A copy that stays as it is.

    Raises:
        NotPlain: if it is no plain value, or too large.
    """
    if issubclass(type(value), GENERATORS):  # to a proxy of what is gone, isinstance fails
        if is_of_process(value) or isinstance(value, random.SystemRandom):
            raise NotPlain
        return {_GENERATOR: type(value).__qualname__, "state": capture_generator(value)}
    return _copy_of(value, [MOST_BYTES, _MOST_ITEMS], 0)


def _copy_of(value: Any, left: list[int], depth: int) -> Any:
    kind: type = type(value)
    left[1] -= 1
    if left[1] < 0 or depth > _DEEPEST:
        raise NotPlain
    if kind in SCALARS:
        return value
    if kind is np.float64:  # what a mean of floats is
        return float(value)
    if kind is torch.Tensor:
        return _tensors([value], left)[0].detach().clone()
    if kind is dict:
        if not all(map(_is_key, value)):
            raise NotPlain
        return {key: _copy_of(item, left, depth + 1) for key, item in list(value.items())}
    if kind is not list and kind is not tuple:
        raise NotPlain
    items = list(value)
    if kind is list and len(items) > 1 and _are_alike(items):
        return {_STACKED: torch.stack(_tensors(items, left)).detach()}  # a checkpoint pays for each tensor
    return kind(_copy_of(item, left, depth + 1) for item in items)


def _tensors(tensors: list[torch.Tensor], left: list[int]) -> list[torch.Tensor]:
    left[0] -= sum(tensor.nbytes for tensor in tensors)
    if left[0] < 0 or any(tensor.requires_grad or tensor.layout is not torch.strided for tensor in tensors):
        raise NotPlain
    return tensors


def _are_alike(items: list[Any]) -> bool:
    if not all(type(item) is torch.Tensor and item.layout is torch.strided for item in items):
        return False
    return len({(item.shape, item.dtype, item.device) for item in items}) == 1


def _is_key(key: Any) -> bool:
    return type(key) in SCALARS or (type(key) is tuple and all(map(_is_key, key)))


def is_generator(saved: Any) -> bool:
    """Whether it is the state of a generator: that is set again just before the first step."""
    return isinstance(saved, dict) and _GENERATOR in saved


def put(part: nn.Module, name: str, saved: Any, device: torch.device) -> None:
    """Give an attribute its value back, in place where others may hold it, too.

    Args:
        part: has the attribute.
        name: of it.
        saved: what :func:`copy_of` returned.
        device: for tensors.
    """
    present = getattr(part, name, None)
    if is_generator(saved):
        if type(present).__qualname__ == saved[_GENERATOR]:
            restore_generator(present, saved["state"])
        return
    value = _whole(saved, device)
    if type(present) is list and type(value) is list:
        present[:] = value
    elif type(present) is dict and type(value) is dict:
        present.clear()
        present.update(value)
    elif type(present) in _REPLACED:
        setattr(part, name, value)


def _whole(saved: Any, device: torch.device) -> Any:
    if isinstance(saved, torch.Tensor):
        return saved.to(device)
    if isinstance(saved, dict):
        if _STACKED in saved:
            return [item.clone() for item in saved[_STACKED].to(device)]
        return {key: _whole(item, device) for key, item in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_whole(item, device) for item in saved)
    return saved
