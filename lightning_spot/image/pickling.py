"""Pickles a checkpoint as ``torch.save`` does, storages apart, and remembers the tensors it has seen.

Three quarters of the time that ``torch.save`` takes go into asking each tensor how it is put together. A training state
is put together the same way each time, so what torch answered is kept for each storage as long as that lives. Whatever
is no plain tensor is asked anew each time, and answered by torch itself.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections import OrderedDict
from typing import Any

import torch
from torch.storage import TypedStorage

# Nothing here may end a training where torch names it otherwise one day: a tensor that is put together in another way
# is asked anew each time, and whatever raises while a checkpoint is pickled leads to plain `torch.save`.
try:
    from torch.multiprocessing.reductions import StorageWeakRef
except ImportError:
    StorageWeakRef = None  # type: ignore[assignment, misc] # raises when it is called

_PROTOCOL = 2  # of torch.save
_FIELDS = {
    getattr(torch._utils, rebuild, None): count  # storage, offset, shape, strides, requires_grad, hooks; dtype
    for rebuild, count in (("_rebuild_tensor_v2", 6), ("_rebuild_tensor_v3", 7))
}
"""What plain tensors are put together by, and of how many fields; more of them would say more."""


class Named:
    """A storage that was pickled, by the number under which it is filed.

    Attributes:
        number: of its record; no other storage has it as long as this one lives.
        nbytes: its size when it was pickled.
        identity: of the storage; no other one has the same as long as this object is there.
    """

    __slots__ = ("_alive", "forms", "identity", "nbytes", "number")

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number = number
        self.nbytes = storage.nbytes()
        self.identity = storage._cdata
        self.forms: list[Any] = []  # keys of the tensors on it that were learned
        self._alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # keeps the identity, not the memory


class _Reference:
    """Stands for a storage in what was learned of a tensor."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Hooks:
    """Stands for the dictionary of hooks of a tensor, which torch leaves empty; each has one of its own."""

    __slots__ = ()


_NO_STORAGE = frozenset(
    [str, int, float, bool, type(None), tuple, dict, list, type, types.FunctionType, torch.Tensor, OrderedDict, _Hooks]
)
"""Kinds of which no object is a storage: most of what is pickled."""


class _Learned:
    """How a tensor is put together."""

    __slots__ = ("dtype", "dump", "named", "reduction")

    def __init__(self, reduction: tuple[Any, ...], named: Named, dtype: torch.dtype) -> None:
        self.reduction = reduction
        self.named = named
        self.dtype = dtype  # as which torch files the storage
        self.dump = 0


class TensorPickler:
    """Pickles one checkpoint after the other, for one thread.

    Attributes:
        storages: of the checkpoint that was pickled last, in the order in which they were met; :meth:`forget` lets
            them go.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.storages: dict[Named, torch.UntypedStorage] = {}
        self._named: dict[int, Named] = {}  # by identity
        self._learned: dict[tuple[Any, ...], _Learned] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # by address, in this checkpoint
        self._free: list[int] = []
        self._numbers = 0
        self._dump = 0

    def dump(self, checkpoint: Any) -> bytes:
        """Pickle ``checkpoint``; what is in it that ``torch.save`` refuses raises here too."""
        self._dump += 1
        self.storages, self._dtypes = {}, {}
        data = io.BytesIO()
        try:
            _Pickler(data, self).dump(checkpoint)
        except BaseException:
            self._reset()  # what was met in part is no base for the next one
            raise
        for named in [named for named in self._named.values() if named not in self.storages]:
            self._drop(named)
        return data.getvalue()

    def forget(self) -> None:
        """Keep no storage alive any more."""
        self.storages = {}

    def reduce(self, tensor: torch.Tensor) -> Any:
        """How a tensor is put together: as learned, or as torch says."""
        if tensor.__dict__:
            return _as_torch_says(tensor)
        try:
            storage = tensor.untyped_storage()
            form = (
                storage._cdata,
                storage.nbytes(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.requires_grad,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        except (NotImplementedError, RuntimeError):  # sparse, nested: nothing of the kind
            return _as_torch_says(tensor)
        learned = self._learned.get(form)
        if learned is None:
            return self._learn(tensor, form)
        if (
            learned.dump == self._dump
        ):  # a second tensor of that form: torch gives each a dictionary of hooks of its own
            return _as_torch_says(tensor)
        learned.dump = self._dump
        self._check_dtype(storage, learned.dtype)
        self.storages.setdefault(learned.named, storage)
        return learned.reduction

    def persistent_id(self, storage: Any) -> tuple[Any, ...]:
        """How a storage is named in the pickle, as ``torch.save`` does it."""
        if isinstance(storage, TypedStorage):
            untyped, dtype = storage._untyped_storage, storage.dtype
            kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call] # torch's
            count = storage._size()  # type: ignore[no-untyped-call] # torch's
        else:
            untyped, dtype = storage, torch.uint8
            kind = getattr(torch, type(storage).__name__)
            count = storage.nbytes()
        if untyped.device.type != "meta":
            self._check_dtype(untyped, dtype)
        named = self._named.get(untyped._cdata)
        if named is not None and named.nbytes != untyped.nbytes():
            if named in self.storages:
                raise RuntimeError("a tensor's storage was resized while the checkpoint was pickled")
            self._drop(named)
            named = None
        if named is None:
            named = self._named[untyped._cdata] = Named(self._number(), untyped)
        self.storages.setdefault(named, untyped)
        return ("storage", kind, str(named.number), torch.serialization.location_tag(untyped), count)

    def _learn(self, tensor: torch.Tensor, form: tuple[Any, ...]) -> Any:
        reduction = _as_torch_says(tensor)
        rebuild, fields = reduction[0], reduction[1]
        if _FIELDS.get(rebuild) != len(fields) or fields[5]:
            return reduction
        named_as = self.persistent_id(fields[0])
        named = self._named[form[0]]
        dtype = fields[0].dtype if isinstance(fields[0], TypedStorage) else torch.uint8
        learned = _Learned((rebuild, (_Reference(named_as), *fields[1:5], _Hooks(), *fields[6:])), named, dtype)
        learned.dump = self._dump
        self._learned[form] = learned
        named.forms.append(form)
        return learned.reduction

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError("tensors of different dtypes share their memory, which torch.save refuses")

    def _number(self) -> int:
        if self._free:
            return self._free.pop()
        self._numbers += 1
        return self._numbers - 1

    def _drop(self, named: Named) -> None:
        del self._named[named.identity]
        self._free.append(named.number)
        for form in named.forms:
            self._learned.pop(form, None)


class _Pickler(pickle.Pickler):
    """The pickler of ``torch.save``, with a table for plain tensors."""

    def __init__(self, file: io.BytesIO, owner: TensorPickler) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._owner = owner
        self.dispatch_table = {torch.Tensor: owner.reduce, _Hooks: _no_hooks, **copyreg.dispatch_table}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _NO_STORAGE:
            return None
        if kind is _Reference:
            return obj.persistent_id
        if isinstance(obj, TypedStorage) or torch.is_storage(obj):
            return self._owner.persistent_id(obj)
        return None


def _no_hooks(_: _Hooks) -> tuple[Any, ...]:
    return (OrderedDict, ())


def _as_torch_says(tensor: torch.Tensor) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call] # torch's
