"""Plain values of attributes, as a checkpoint holds them and as they are put back.

Numbers, text, tensors, NumPy arrays of numbers, generators, and lists, tuples and dicts of those.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from lightning_spot.state.buffers import write
from lightning_spot.state.change_detector import SCALARS
from lightning_spot.state.randomness import GENERATORS, capture_generator, is_of_process, restore_generator

MOST_BYTES = 2**24
"""Largest tensor or array, or list of those, that is kept of an attribute."""

_MOST_ITEMS = 100_000
_DEEPEST = 8
_LONG = 64
"""A longer list of numbers is kept as a tensor."""

_REPLACED: frozenset[type] = SCALARS | {torch.Tensor, np.ndarray, np.float64, list, tuple, dict}
"""Kinds of what is replaced by another value: what else a program has there is its own."""

_ARRAY = "lightning_spot.array"
_NUMBERS = "lightning_spot.numbers"
_STACKED = "lightning_spot.stacked"
_GENERATOR = "lightning_spot.generator"


class NotPlain(Exception):
    """A value cannot be kept."""


def copy_of(value: Any, most_bytes: int = MOST_BYTES, most_items: int = _MOST_ITEMS) -> Any:
    """A copy that stays as it is, and loads with ``weights_only=True``.

    Args:
        value: any.
        most_bytes: of its tensors, arrays and long lists of numbers.
        most_items: with all that is in it.

    Raises:
        NotPlain: if it is no plain value, or too large.
    """
    if issubclass(type(value), GENERATORS):  # to a proxy of what is gone, isinstance fails
        if is_of_process(value) or isinstance(value, random.SystemRandom):
            raise NotPlain
        return {_GENERATOR: type(value).__qualname__, "state": capture_generator(value)}
    return _copy_of(value, [most_bytes, most_items], 0)


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
    if kind is np.ndarray:
        return {_ARRAY: _tensors([_of_array(np.array(value))], left)[0]}
    if kind is dict:
        if not all(map(_is_key, value)):
            raise NotPlain
        return {key: _copy_of(item, left, depth + 1) for key, item in list(value.items())}
    if kind is not list and kind is not tuple:
        raise NotPlain
    items = list(value)
    if kind is list and len(items) > _LONG and set(map(type, items)) in ({int}, {float}):
        numbers = _of_array(np.array(items))
        if numbers.is_floating_point() is (type(items[0]) is float):  # of integers that fit no type, NumPy makes floats
            return {_NUMBERS: _tensors([numbers], left)[0]}
    if kind is list and len(items) > 1 and are_alike(items):
        return {_STACKED: torch.stack(_tensors(items, left)).detach()}  # a checkpoint pays for each tensor
    return kind(_copy_of(item, left, depth + 1) for item in items)


def _of_array(array: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:  # of objects, of another machine's bytes, of large integers
        raise NotPlain from error


def _tensors(tensors: list[torch.Tensor], left: list[int]) -> list[torch.Tensor]:
    left[0] -= sum(tensor.nbytes for tensor in tensors)
    if left[0] < 0 or any(tensor.requires_grad or tensor.layout is not torch.strided for tensor in tensors):
        raise NotPlain
    return tensors


def are_alike(items: list[Any]) -> bool:
    """Whether all are plain tensors of one shape, dtype and device."""
    if not all(type(item) is torch.Tensor and item.layout is torch.strided for item in items):
        return False
    return len({(item.shape, item.dtype, item.device) for item in items}) == 1


def _is_key(key: Any) -> bool:
    return type(key) in SCALARS or (type(key) is tuple and all(map(_is_key, key)))


def is_generator(saved: Any) -> bool:
    """Whether it is the state of a generator: that is set again just before the first step."""
    return isinstance(saved, dict) and _GENERATOR in saved


def put(
    part: Any,
    name: str,
    saved: Any,
    device: torch.device | None = None,
    *,
    place: str = "",
    tied: Collection[str] = (),
) -> None:
    """Give an attribute its value back; lists and dicts, which others may hold, and what is tied, in place.

    Args:
        part: an object or a class; has the attribute.
        name: of it.
        saved: what :func:`copy_of` returned.
        device: for tensors; ``None`` for the one they were on.
        place: of the attribute; those of what is in its containers begin with it.
        tied: places of which the present values are others' as well, and are written to.
    """
    present: Any = getattr(part, name, None)
    if is_generator(saved):
        if type(present).__qualname__ == saved[_GENERATOR]:
            restore_generator(present, saved["state"])
        return
    value = written(present, whole(saved, device), place, tied)
    if not _fill(present, value) and type(present) in _REPLACED and not _are_equal(present, value):
        setattr(part, name, value)


def written(present: Any, value: Any, place: str = "", tied: Collection[str] = ("",)) -> Any:
    """A value of which the parts that are tied are the present ones, written to.

    Args:
        present: what is in its place.
        value: that is to be there.
        place: of both, and the beginning of those of what is in them.
        tied: places of what is written to; by default the value as a whole.
    """
    kind = type(value)
    if type(present) is kind and kind is dict:
        both = ((key, present.get(key), item) for key, item in value.items())
        value = {key: written(mine, item, f"{place}.{key}", tied) for key, mine, item in both}
    elif type(present) is kind and kind in (list, tuple):
        mine = [*present, *[None] * len(value)]
        value = kind(written(mine[index], item, f"{place}.{index}", tied) for index, item in enumerate(value))
    if place not in tied:
        return value
    if kind is torch.Tensor and are_alike([present, value]) and not present.requires_grad and write(present, value):
        return present
    if kind is np.ndarray and type(present) is kind and present.flags.writeable and _form(present) == _form(value):
        present[...] = value
        return present
    return present if _fill(present, value) else value


def _fill(present: Any, value: Any) -> bool:
    """Whether both are lists, or dicts: then the present one has the items of the other."""
    if type(present) is list and type(value) is list:
        present[:] = value
        return True
    if type(present) is dict and type(value) is dict:
        items = {**value}
        present.clear()
        present.update(items)
        return True
    return False


def _form(array: Any) -> tuple[Any, Any]:
    return array.shape, array.dtype


def _are_equal(present: Any, value: Any) -> bool:
    if type(present) is not torch.Tensor or type(value) is not torch.Tensor:
        return False
    return (present.dtype, present.device) == (value.dtype, value.device) and torch.equal(present, value)


def whole(saved: Any, device: torch.device | None = None) -> Any:
    """The value that :func:`copy_of` copied."""
    if isinstance(saved, torch.Tensor):
        return saved.to(device) if device is not None else saved.clone()
    if isinstance(saved, dict):
        if _STACKED in saved:
            return [item.clone() for item in whole(saved[_STACKED], device)]
        if _NUMBERS in saved:
            return saved[_NUMBERS].tolist()
        if _ARRAY in saved:
            return saved[_ARRAY].numpy().copy()
        return {key: whole(item, device) for key, item in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(whole(item, device) for item in saved)
    return saved
