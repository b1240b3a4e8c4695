"""Pickles a checkpoint as ``torch.save`` does, with storages apart; one that stays has the same number each time."""

from __future__ import annotations

import copyreg
import heapq
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import UntypedStorage
from torch.storage import TypedStorage

# Nothing here may end a training where torch names it otherwise one day: whatever raises while a checkpoint is pickled
# leads to plain `torch.save`.
try:
    from torch.multiprocessing.reductions import StorageWeakRef
except ImportError:
    StorageWeakRef = None  # type: ignore[assignment, misc] # raises when it is called

_PROTOCOL = 2  # of torch.save
_KINDS = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""What the storage of a plain tensor is called in a pickle."""
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda _: False)  # until torch 2.12


class Named:
    """A storage that was pickled, by the number under which it is filed.

    Attributes:
        number: of its record; no other storage has it as long as this one lives.
        nbytes: its size when it was pickled.
        identity: of the storage; no other one has the same as long as this object is there.
    """

    __slots__ = ("_alive", "identity", "nbytes", "number")

    def __init__(self, number: int, storage: UntypedStorage) -> None:
        self.number = number
        self.nbytes = storage.nbytes()
        self.identity = storage._cdata
        self._alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # keeps the identity, not the memory

    def is_of(self, storage: UntypedStorage) -> bool:
        """Whether this is that storage."""
        return bool(self.identity == storage._cdata)


class TensorPickler:
    """Pickles one checkpoint after the other, for one thread.

    Attributes:
        storages: of the checkpoint that was pickled last, in the order in which they were met; :meth:`forget` lets
            them go.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self, first: int = 0) -> None:
        self.storages: dict[Named, UntypedStorage] = {}
        self._named: dict[int, Named] = {}  # by identity
        self._dtypes: dict[int, torch.dtype] = {}  # of the memory of this checkpoint, by address
        self._first = self._numbers = first
        self._free: list[int] = []

    def name(self, first: Sequence[UntypedStorage]) -> None:
        """Begin a checkpoint with these storages, whether or not it will have them; their numbers are their places.

        Args:
            first: each once; none is empty.
        """
        if len(first) != self._first:
            self._reset(len(first))
        self.storages, self._dtypes = {}, {}
        for number, storage in enumerate(first):
            named = self._named.get(storage._cdata)
            if named is None or named.number != number or named.nbytes != storage.nbytes():
                if named is not None:
                    self._drop(named)
                named = self._named[storage._cdata] = Named(number, storage)
            self.storages[named] = storage

    def dump(self, checkpoint: Any, first: Sequence[UntypedStorage] = ()) -> bytes:
        """Pickle a checkpoint; what :mod:`pickle` raises here, it raises in ``torch.save``, too.

        Args:
            checkpoint: what to pickle.
            first: see :meth:`name`.

        Raises:
            RuntimeError: what ``torch.save`` raises here too.
        """
        self.name(first)
        data = io.BytesIO()
        try:
            _Pickler(data, self._persistent_id).dump(checkpoint)
        except BaseException:
            self._reset()  # what was met in part is no base for the next one
            raise
        for named in [named for named in self._named.values() if named not in self.storages]:
            self._drop(named)
        return data.getvalue()

    def forget(self) -> None:
        """Keep no storage alive any more."""
        self.storages = {}

    def _persistent_id(self, storage: _OfPlain | TypedStorage | UntypedStorage) -> tuple[Any, ...]:
        """How a storage is named in the pickle, as ``torch.save`` does it."""
        kind: Any
        if isinstance(storage, _OfPlain):
            untyped, dtype = storage
            kind = _KINDS[dtype]
            count = untyped.nbytes() // dtype.itemsize
        elif isinstance(storage, TypedStorage):
            untyped, dtype = storage._untyped_storage, storage.dtype
            kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call] # torch's
            count = storage._size()  # type: ignore[no-untyped-call] # torch's
        else:
            untyped, dtype = storage, torch.uint8
            kind = getattr(torch, type(storage).__name__)
            count = storage.nbytes()
        device = untyped.device.type
        address = untyped.data_ptr() if device != "meta" else 0
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError("tensors of different dtypes share their memory, which torch.save refuses")
        location = "cpu" if device == "cpu" else torch.serialization.location_tag(untyped)
        return ("storage", kind, str(self._name(untyped).number), location, count)

    def _name(self, storage: UntypedStorage) -> Named:
        """The name of a storage that is met."""
        named = self._named.get(storage._cdata)
        if named is not None and named.nbytes != storage.nbytes():
            if named in self.storages:
                raise RuntimeError("a tensor's storage was resized while the checkpoint was pickled")
            self._drop(named)
            named = None
        if named is None:
            named = self._named[storage._cdata] = Named(self._number(), storage)
        self.storages.setdefault(named, storage)
        return named

    def _number(self) -> int:
        if self._free:
            return heapq.heappop(self._free)  # what is made again each time has the same numbers each time
        self._numbers += 1
        return self._numbers - 1

    def _drop(self, named: Named) -> None:
        del self._named[named.identity]
        if named.number >= self._first:
            heapq.heappush(self._free, named.number)


class _OfPlain(NamedTuple):
    """The storage of a plain tensor, and its dtype."""

    storage: UntypedStorage
    dtype: torch.dtype


_STORAGES = frozenset((_OfPlain, TypedStorage, UntypedStorage))


class _Pickler(pickle.Pickler):
    """The pickler of ``torch.save``.

    Args:
        file: to write to.
        name: says how a storage is named.
    """

    def __init__(self, file: io.BytesIO, name: Callable[[Any], tuple[Any, ...]]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
        self._name = name

    def persistent_id(self, obj: Any) -> Any:
        """See :class:`pickle.Pickler`."""
        return self._name(obj) if type(obj) in _STORAGES else None


def _reduced(tensor: torch.Tensor) -> Any:
    """How a tensor is put together. Of a plain one this is what torch says, which takes ten times as long."""
    if (
        tensor.dtype not in _KINDS
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not (tensor.is_cpu or tensor.is_cuda)
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
        or _has_names(tensor)
    ):
        return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call] # torch's
    storage = _OfPlain(tensor.untyped_storage(), tensor.dtype)
    fields = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
    return torch._utils._rebuild_tensor_v2, (*fields, OrderedDict())
