"""Plain values of attributes, tensors and containers of them: known again by a mark, copied, and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import nn

from lightning_spot.exact.further_kinds import (
    DEEPEST,
    KEYED,
    MOST_ITEMS,
    MOST_WHOLE,
    SETS,
    Seen,
    decoded,
    encoded,
    is_encoded,
    is_further,
    is_steady,
    items_of,
    needs_its_like,
    of_items,
    seen,
)
from lightning_spot.exact.private import writes_of

MOST_BYTES = 2**24
"""Largest tensor, or list of tensors, that is kept of a module's attributes."""

SCALARS: frozenset[type] = frozenset((bool, int, float, str, type(None)))
"""Kinds of values that are compared by what they are."""

_CONTAINERS: frozenset[type] = frozenset((list, tuple, dict, deque))
_NO_ENUMS: Mapping[str, type] = MappingProxyType({})
_KEPT: frozenset[type] = _CONTAINERS | KEYED | SETS | {torch.Tensor}


def is_kept(kind: type) -> bool:
    """Whether values of a kind, no scalars, are known again by a :func:`mark`."""
    return kind in _KEPT or is_further(kind)


def mark(value: Any, depth: int = 0, *, most: int = MOST_ITEMS, whole: list[int] | None = None) -> Any:
    """What a value is, without a copy of its tensors: those are held, so that no other can take their address.

    Args:
        value: any value.
        depth: of containers around it.
        most: items of a container; of one with more it is seen only whether it is another one.
        whole: bytes of arrays that may still be compared whole; of further ones, some are.
    """
    kind: type = type(value)
    whole = [MOST_WHOLE] if whole is None else whole
    if kind in SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return _Marked(value, writes_of(value))
    if is_further(kind):
        return seen(value, whole)
    if not (kind in _CONTAINERS or kind in KEYED or kind in SETS) or depth > DEEPEST or len(value) > most:
        return value
    if kind in SETS:
        return Seen(kind, frozenset(value)) if all(map(is_steady, value)) else value
    if kind is dict or kind in KEYED:
        return {key: mark(item, depth + 1, most=most, whole=whole) for key, item in list(value.items())}
    return [mark(item, depth + 1, most=most, whole=whole) for item in list(value)]


class _Marked(NamedTuple):
    tensor: torch.Tensor
    version: int


def without(marked: Any, is_left_out: Callable[[torch.Tensor], bool]) -> Any:
    """A mark that does not tell of some tensors whether they were written to."""
    if isinstance(marked, _Marked):
        return marked.tensor if is_left_out(marked.tensor) else marked
    if type(marked) is dict:
        return {key: without(item, is_left_out) for key, item in marked.items()}
    return [without(item, is_left_out) for item in marked] if type(marked) is list else marked


def is_same(left: Any, right: Any, *, loosely: bool = False) -> bool:
    """Whether two marks are of one value that nobody has written to between.

    Args:
        left: a mark.
        right: another one.
        loosely: whether what is written within a generator does not count.
    """
    if isinstance(left, _Marked) or isinstance(right, _Marked):
        return type(left) is type(right) and left.tensor is right.tensor and left.version == right.version
    if isinstance(left, Seen) and isinstance(right, Seen):
        if loosely and left.holds is not None and left.holds is right.holds:
            return True
        return left[:2] == right[:2]
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key], loosely=loosely) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(is_same(*pair, loosely=loosely) for pair in pairs)
    return left is right or (type(left) in SCALARS and type(left) is type(right) and left == right)


class NotPlain(Exception):
    """A value cannot be kept."""


def copy_of(value: Any, left: list[int], enums: Mapping[str, type] = _NO_ENUMS, depth: int = 0) -> Any:
    """A copy that stays as it is. Tensors of one kind are put into one: a checkpoint pays for each.

    Args:
        value: any value.
        left: bytes of tensors, and items, that may still be taken.
        enums: classes that a resumed process has at hand, by name: in a container, only theirs are kept.
        depth: of containers around it.
    """
    kind: type = type(value)
    left[1] -= 1
    if left[1] < 0 or depth > DEEPEST:
        raise NotPlain
    if kind in SCALARS:
        return value
    if kind is torch.Tensor:
        left[0] -= value.nbytes
        if left[0] < 0 or value.requires_grad or value.layout is not torch.strided:
            raise NotPlain
        return value.detach().clone()
    if is_further(kind) or kind in SETS or kind in KEYED:
        return _encoded(value, left, enums, depth)
    if kind is dict:
        if not all(type(key) in SCALARS for key in value):
            return _encoded(value, left, enums, depth)
        return {key: copy_of(item, left, enums, depth + 1) for key, item in value.items()}
    if kind not in _CONTAINERS:
        raise NotPlain
    if len(value) > 1 and all(type(item) is torch.Tensor for item in value):
        first = value[0]
        if all((t.shape, t.dtype, t.device) == (first.shape, first.dtype, first.device) for t in value):
            left[0] -= first.nbytes * len(value)
            if left[0] < 0 or any(item.requires_grad for item in value):
                raise NotPlain
            return {_STACKED: torch.stack(tuple(value))}
    items = [copy_of(item, left, enums, depth + 1) for item in value]
    return tuple(items) if kind is tuple else items


_STACKED = "lightning_spot.stacked"


def _encoded(value: Any, left: list[int], enums: Mapping[str, type], depth: int) -> dict[str, Any]:
    kind: type = type(value)
    if depth and needs_its_like(value) and enums.get(kind.__qualname__) is not kind:
        raise NotPlain  # others are looked for among attributes only
    if is_further(kind):
        left[0] -= getattr(value, "nbytes", 0)
        plain = encoded(value) if left[0] >= 0 else None
        if plain is None:
            raise NotPlain
        return plain
    items = [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)
    return of_items(value, [copy_of(item, left, enums, depth + 1) for item in items])


def put(part: nn.Module, name: str, saved: Any, device: torch.device, enums: Mapping[str, type[Enum]]) -> None:
    """Give an attribute its value back, in place where others may hold it, too.

    Args:
        part: has the attribute.
        name: of it.
        saved: what :func:`copy_of` returned.
        device: for tensors.
        enums: classes that the program has at hand, by name.
    """
    present = getattr(part, name, None)
    value = _whole(saved, device, enums, present)
    if isinstance(present, (list, deque)) and isinstance(value, (list, tuple)):
        present.clear()
        present.extend(value)
    elif isinstance(present, (dict, set)) and isinstance(value, dict if isinstance(present, dict) else set):
        present.clear()
        present.update(value)
    elif _fits(present, value):
        np.copyto(present, value)
    elif type(present) in {*SCALARS, torch.Tensor, type(value)} or isinstance(present, np.generic):
        setattr(part, name, value)


def _fits(present: Any, value: Any) -> TypeGuard[np.ndarray[Any, Any]]:
    are_arrays = type(present) is np.ndarray and type(value) is np.ndarray
    return are_arrays and present.shape == value.shape and present.dtype == value.dtype and present.flags.writeable


def _whole(saved: Any, device: torch.device, enums: Mapping[str, type[Enum]], present: Any = None) -> Any:
    if isinstance(saved, torch.Tensor):
        return saved.to(device)
    if is_encoded(saved):
        return decoded(saved, [_whole(item, device, enums) for item in items_of(saved)], present, enums)
    if isinstance(saved, dict):
        if set(saved) == {_STACKED}:
            return [item.clone() for item in saved[_STACKED].to(device)]
        return {key: _whole(item, device, enums) for key, item in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_whole(item, device, enums) for item in saved)
    return saved
