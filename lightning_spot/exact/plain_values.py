"""Plain values of attributes, tensors and containers of them: known again by a mark, copied, and put back."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_spot.exact.private import writes_of

MOST_BYTES = 2**24
"""Largest tensor, or list of tensors, that is kept of a module's attributes."""

MOST_ITEMS = 100_000
_DEEPEST = 8
SCALARS: frozenset[type] = frozenset((bool, int, float, str, type(None)))
"""Kinds of values that are compared by what they are."""

_CONTAINERS: frozenset[type] = frozenset((list, tuple, dict, deque))
KEPT: frozenset[type] = _CONTAINERS | {torch.Tensor}
"""Kinds of values that are known again by a :func:`mark`."""


def mark(value: Any, depth: int = 0, *, most: int = MOST_ITEMS) -> Any:
    """What a value is, without a copy of its tensors: those are held, so that no other can take their address.

    Args:
        value: any value.
        depth: of containers around it.
        most: items of a container; of one with more it is seen only whether it is another one.
    """
    if isinstance(value, torch.Tensor):
        return _Marked(value, writes_of(value))
    if type(value) not in _CONTAINERS or depth > _DEEPEST or len(value) > most:
        return value
    if type(value) is dict:
        return {key: mark(item, depth + 1, most=most) for key, item in value.items()}
    return [mark(item, depth + 1, most=most) for item in value]


class _Marked(NamedTuple):
    tensor: torch.Tensor
    version: int


def is_same(left: Any, right: Any) -> bool:
    """Whether two marks are of one value that nobody has written to between."""
    if isinstance(left, _Marked) or isinstance(right, _Marked):
        return type(left) is type(right) and left.tensor is right.tensor and left.version == right.version
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(is_same, left, right))
    return left is right or (type(left) in SCALARS and type(left) is type(right) and left == right)


class NotPlain(Exception):
    """A value cannot be kept."""


def copy_of(value: Any, left: list[int], depth: int = 0) -> Any:
    """A copy that stays as it is. Tensors of one kind are put into one: a checkpoint pays for each.

    Args:
        value: any value.
        left: bytes of tensors, and items, that may still be taken.
        depth: of containers around it.
    """
    kind = type(value)
    left[1] -= 1
    if left[1] < 0 or depth > _DEEPEST:
        raise NotPlain
    if kind in SCALARS:
        return value
    if kind is torch.Tensor:
        left[0] -= value.nbytes
        if left[0] < 0 or value.requires_grad or value.layout is not torch.strided:
            raise NotPlain
        return value.detach().clone()
    if kind is dict:
        if not all(type(key) in SCALARS for key in value):
            raise NotPlain
        return {key: copy_of(item, left, depth + 1) for key, item in value.items()}
    if kind not in _CONTAINERS:
        raise NotPlain
    if len(value) > 1 and all(type(item) is torch.Tensor for item in value):
        first = value[0]
        if all((t.shape, t.dtype, t.device) == (first.shape, first.dtype, first.device) for t in value):
            left[0] -= first.nbytes * len(value)
            if left[0] < 0 or any(item.requires_grad for item in value):
                raise NotPlain
            return {_STACKED: torch.stack(tuple(value))}
    items = [copy_of(item, left, depth + 1) for item in value]
    return tuple(items) if kind is tuple else items


_STACKED = "lightning_spot.stacked"


def put(part: nn.Module, name: str, saved: Any, device: torch.device) -> None:
    """Give an attribute its value back, in place where others may hold it, too."""
    value, present = _whole(saved, device), getattr(part, name, None)
    if isinstance(present, (list, deque)) and isinstance(value, (list, tuple)):
        present.clear()
        present.extend(value)
    elif isinstance(present, dict) and isinstance(value, dict):
        present.clear()
        present.update(value)
    elif type(present) in {*SCALARS, torch.Tensor, type(value)}:
        setattr(part, name, value)


def _whole(saved: Any, device: torch.device) -> Any:
    if isinstance(saved, torch.Tensor):
        return saved.to(device)
    if isinstance(saved, dict):
        if set(saved) == {_STACKED}:
            return [item.clone() for item in saved[_STACKED].to(device)]
        return {key: _whole(item, device) for key, item in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_whole(item, device) for item in saved)
    return saved
