"""What training or reading has changed in a loader's data: marks of attributes, and digests of what they hold."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Any

import numpy as np
import torch

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_MOST_BYTES = 2**16
_SAMPLES = 4096
_ITEMS = 16


def mark_of(value: Any) -> Any:
    """How a value is, for :func:`is_as`; of a tensor, no byte is read."""
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return weakref.ref(value), value._version
    return digest_of(value)


def is_as(mark: Any, value: Any) -> bool:
    """Whether a value of this process is as it was at :func:`mark_of`."""
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return isinstance(mark, tuple) and mark[0]() is value and bool(mark[1] == value._version)
    return bool(mark == digest_of(value))


def digest_of(value: Any) -> str:
    """What a value contains, equal in every process: of large arrays by samples, of containers by items at both ends.

    Objects are their class: what they hold is not looked at. An open file or connection counts as ``None``, which it
    takes the place of where a sample is read first: every process opens its own.
    """
    if _is_handle(value):
        value = None
    if isinstance(value, _SCALARS):
        return repr(value)[:_ITEMS] + format(zlib.crc32(repr(value).encode()), "x")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{_crc_of(_sampled(value.detach()).cpu().view(torch.uint8).numpy())}"
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return f"{value.dtype}{value.shape}{_crc_of(_sampled(value))}"
    if isinstance(value, dict):
        return f"dict{len(value)}{_ends(value)}{_ends(value.values())}"
    if isinstance(value, (list, tuple, deque)):
        return f"{type(value).__name__}{len(value)}{_ends(value)}"
    if isinstance(value, (set, frozenset)):
        return f"set{len(value)}"
    return type(value).__qualname__


def _is_handle(value: Any) -> bool:
    """Whether a value is something to be closed that no other process could be given, and nothing to iterate over."""
    if not callable(getattr(value, "close", None)) or hasattr(value, "__next__"):
        return False
    try:
        value.__reduce_ex__(2)
    except Exception:
        return True
    return False


def _sampled(values: Any) -> Any:
    """A flat part of an array or tensor: all of it, or numbers at equal distances."""
    flat = values.reshape(-1)
    part = flat if flat.nbytes <= _MOST_BYTES else flat[:: max(1, len(flat) // _SAMPLES)]
    return np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part.contiguous()


def _crc_of(values: Any) -> str:
    return format(zlib.crc32(values.tobytes()), "x")


def _ends(items: Collection[Any]) -> list[str]:
    """Digests of a container's first items, and of its last ones."""
    shown = [*islice(items, _ITEMS), *islice(reversed(items), _ITEMS)]  # type: ignore[call-overload]
    return [type(item).__name__ if isinstance(item, (dict, list, tuple)) else digest_of(item) for item in shown]
