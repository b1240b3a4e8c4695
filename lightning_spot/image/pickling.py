"""Pickles a checkpoint as ``torch.save`` does, storages apart, and remembers the tensors it has seen.

Three quarters of the time that ``torch.save`` takes go into asking each tensor how it is put together. A training state
is put together the same way each time, so what torch answered is kept for each storage as long as that lives. Whatever
is no plain tensor is asked anew each time, and answered by torch itself.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import os
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
_BEGIN, _END = pickle.PROTO + bytes([_PROTOCOL]), pickle.STOP
_NUMBER = int.from_bytes(os.urandom(16), "big")  # that no checkpoint has in it
_MARK = pickle.dumps(_NUMBER, _PROTOCOL)[len(_BEGIN) : -len(_END)] + pickle.BINPERSID
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

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is that storage."""
        return bool(self.identity == storage._cdata)


_PLAIN = frozenset([str, int, float, bool, type(None), tuple, dict, list, type, types.FunctionType, OrderedDict])
"""Kinds of which no object is a storage or a tensor: most of what is pickled."""


class _Tensor:
    """Stands for a tensor of which torch has said how it is put together."""

    __slots__ = ("reduction",)

    def __init__(self, reduction: tuple[Any, ...]) -> None:
        self.reduction = reduction


class _Learned:
    """How a tensor is put together, pickled; its storage is named in it."""

    __slots__ = ("data", "dtype", "named")

    def __init__(self, data: bytes, named: Named, dtype: torch.dtype) -> None:
        self.data = data
        self.named = named
        self.dtype = dtype  # as which torch files the storage


class TensorPickler:
    """Pickles one checkpoint after the other, for one thread.

    What was learned of a tensor is its part of the pickle, which refers to nothing else in it. The pickler of Python
    writes a mark in its place: it would ask here about each of the twenty objects that a tensor is put together from.
    A tensor that the checkpoint holds twice is one object for who loads it, so it is left to the pickler.

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
        self._twice: set[tuple[Any, ...]] = set()  # forms of tensors that a checkpoint held twice
        self._met: dict[int, torch.Tensor] = {}  # tensors of this checkpoint that are marked, kept alive, by identity
        self._marked: list[bytes] = []  # what comes in place of the marks
        self._answer: tuple[torch.Tensor, Any] | None = None  # what torch said of the last tensor that is not marked
        self._marks = True
        self._free: list[int] = []
        self._numbers = 0

    def dump(self, checkpoint: Any) -> bytes:
        """Pickle ``checkpoint``; what is in it that ``torch.save`` refuses raises here too."""
        try:
            for self._marks in (True, True, False):  # objects may be others each time they are asked for their parts
                twice = len(self._twice)
                self.storages, self._dtypes, self._met, self._marked = {}, {}, {}, []
                data = io.BytesIO()
                _Pickler(data, self).dump(checkpoint)
                if twice == len(self._twice):
                    break
        except BaseException:
            self._reset()  # what was met in part is no base for the next one
            raise
        for named in [named for named in self._named.values() if named not in self.storages]:
            self._drop(named)
        between, marked = data.getvalue().split(_MARK), self._marked
        self._met, self._marked, self._answer = {}, [], None
        return b"".join(itertools.chain.from_iterable(zip(between, [*marked, b""], strict=True)))

    def forget(self) -> None:
        """Keep no storage alive any more."""
        self.storages = {}

    def mark(self, tensor: torch.Tensor) -> bool:
        """Whether what was learned of a tensor, now or before, comes in place of a mark."""
        if tensor.__dict__ or not self._marks:
            return False
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
            return False
        if form in self._twice:
            return False
        learned = self._learned.get(form) or self._learn(tensor, form)
        if learned is None:
            return False
        if id(tensor) in self._met:
            self._twice.add(form)
            return False
        self._met[id(tensor)] = tensor
        self._check_dtype(storage, learned.dtype)
        self.storages.setdefault(learned.named, storage)
        self._marked.append(learned.data)
        return True

    def reduce(self, tensor: torch.Tensor) -> Any:
        """How a tensor is put together that is not marked, as torch says."""
        answer, self._answer = self._answer, None
        return answer[1] if answer is not None and answer[0] is tensor else _as_torch_says(tensor)

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

    def _learn(self, tensor: torch.Tensor, form: tuple[Any, ...]) -> _Learned | None:
        reduction = _as_torch_says(tensor)
        rebuild, fields = reduction[0], reduction[1]
        if _FIELDS.get(rebuild) != len(fields) or fields[5]:
            self._answer = (tensor, reduction)
            return None
        data = io.BytesIO()
        pickler = _Pickler(data, self)
        pickler.fast = True  # refers to nothing that was pickled before
        pickler.dump(_Tensor(reduction))
        named = self._named[form[0]]
        dtype = fields[0].dtype if isinstance(fields[0], TypedStorage) else torch.uint8
        learned = self._learned[form] = _Learned(data.getvalue()[len(_BEGIN) : -len(_END)], named, dtype)
        named.forms.append(form)
        return learned

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
            self._twice.discard(form)


class _Pickler(pickle.Pickler):
    """The pickler of ``torch.save``, which passes over plain tensors."""

    def __init__(self, file: io.BytesIO, owner: TensorPickler) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._owner = owner
        self.dispatch_table = {torch.Tensor: owner.reduce, _Tensor: _reduction, **copyreg.dispatch_table}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _PLAIN:
            return None
        if kind is torch.Tensor:
            return _NUMBER if self._owner.mark(obj) else None
        if isinstance(obj, TypedStorage) or torch.is_storage(obj):
            return self._owner.persistent_id(obj)
        return None


def _reduction(tensor: _Tensor) -> Any:
    return tensor.reduction


def _as_torch_says(tensor: torch.Tensor) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call] # torch's
