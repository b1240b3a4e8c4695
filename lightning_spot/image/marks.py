"""The picklers of ``torch.save`` with marks in the place of plain tensors, in one checkpoint of which all are known."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage

PROTOCOL = 2
"""Of ``torch.save``."""

BEGIN, END = pickle.PROTO + bytes([PROTOCOL]), pickle.STOP
_NUMBER = int.from_bytes(os.urandom(16), "big")  # that no checkpoint has in it
MARK = pickle.dumps(_NUMBER, PROTOCOL)[len(BEGIN) : -len(END)] + pickle.BINPERSID
"""What :class:`AskingPickler` writes in the place of a tensor."""

Left = dict[int, tuple[torch.Tensor, Any]]
"""Tensors that are not marked, by identity, with what torch has said of them already."""

_PLAIN = frozenset([str, int, float, bool, type(None), tuple, dict, list, type, types.FunctionType, OrderedDict])
"""Kinds of which no object is a storage or a tensor: most of what is pickled."""


class PlainTensor:
    """Stands for a tensor of which torch has said how it is put together."""

    __slots__ = ("reduction",)

    def __init__(self, reduction: tuple[Any, ...]) -> None:
        self.reduction = reduction


def _put_together(number: int) -> None:
    """Stands in a pickle for how a tensor is put together, until that takes its place."""
    raise pickle.UnpicklingError(f"no tensor has taken the place of its mark, {number}")


_STANDS_FOR = (_put_together, tuple(range(1)))  # no constant: Python may make one object of those that are equal
_REFERS = pickle.BINGET + b"\0" + pickle.BINGET + b"\1" + pickle.REDUCE  # to its parts, which were pickled before


class Unmarked(Exception):
    """A checkpoint holds what no mark can stand for."""


class Marking(pickle.Pickler):
    """The pickler of ``torch.save`` for a checkpoint in which a mark stands for each tensor.

    It is not asked about each object, only about those that Python itself cannot pickle. A tensor that comes twice is
    pickled once, as there.

    Attributes:
        met: tensors in whose place there is a mark, in order.
    """

    def __init__(self) -> None:
        self._data = io.BytesIO()
        super().__init__(self._data, protocol=PROTOCOL)
        self.met: list[torch.Tensor] = []

    def pickled(self, checkpoint: Any) -> list[bytes]:
        """What stands before, between and behind the marks.

        Raises:
            Unmarked: if there is a storage, or a tensor with attributes.
        """
        self.dump(_STANDS_FOR)  # what comes next refers to it, by the same numbers each time
        begin = self._data.tell()
        self.dump(checkpoint)
        return self._data.getvalue()[begin:].split(_REFERS)

    def reducer_override(self, obj: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        if type(obj) is torch.Tensor:
            if obj.__dict__:
                raise Unmarked
            self.met.append(obj)
            return _STANDS_FOR
        if isinstance(obj, TypedStorage) or torch.is_storage(obj):
            raise Unmarked
        return NotImplemented


class AskingPickler(pickle.Pickler):
    """The pickler of ``torch.save``, which passes over plain tensors.

    Args:
        file: to write to.
        reduce: says how tensors that are not passed over are put together.
        name: says how a storage is named.
        left: tensors that are not passed over, by identity; ``None`` for all.

    Attributes:
        met: tensors in whose place there is a mark, in order.
    """

    def __init__(
        self,
        file: io.BytesIO,
        reduce: Callable[[torch.Tensor], Any],
        name: Callable[[Any], tuple[Any, ...]],
        left: Left | None,
    ) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.met: list[torch.Tensor] = []
        self._name = name
        self._left = left
        self.dispatch_table = {torch.Tensor: reduce, PlainTensor: _reduction, **copyreg.dispatch_table}

    def persistent_id(self, obj: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        kind = type(obj)
        if kind in _PLAIN:
            return None
        if kind is torch.Tensor:
            if self._left is None or obj.__dict__ or id(obj) in self._left:
                return None
            self.met.append(obj)
            return _NUMBER
        if isinstance(obj, TypedStorage) or torch.is_storage(obj):
            return self._name(obj)
        return None


def _reduction(tensor: PlainTensor) -> Any:
    return tensor.reduction
