"""Where the elements of thousands of tensors lie, and how, to be compared from one snapshot to the next."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

try:
    from lightning_spot.image import _whereabouts
except ImportError:  # installed where there was no compiler
    _compiled: Any = None
else:
    _compiled = _whereabouts.whereabouts

_exchange: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""DLPack's table of functions: what torch gives to C. Older versions have none."""

_shape = operator.attrgetter("shape")


def whereabouts(tensors: list[torch.Tensor]) -> object:
    """What is equal to that of other tensors if all of them have their elements at the same places, in the same order.

    Args:
        tensors: strided ones.

    Raises:
        RuntimeError: if one has no elements anywhere, as sparse ones, or such that torch does not say where they are.
    """
    if _compiled is None or _exchange is None:
        return by_torch(tensors)
    try:
        return _compiled(_exchange, torch.Tensor, torch.nn.Parameter, tensors)
    except (BufferError, RuntimeError, TypeError, ValueError):  # of another class, or of a DLPack of other days
        return by_torch(tensors)


def by_torch(tensors: Sequence[torch.Tensor]) -> object:
    """The same, asked of each tensor: that takes four times as long."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    return addresses, list(map(_shape, tensors)), [tensor.stride() for tensor in tensors]
