"""Pickles a checkpoint as ``torch.save`` does, storages apart, and remembers the tensors it has seen.

Three quarters of the time that ``torch.save`` takes go into asking each tensor how it is put together. A training state
is put together the same way each time, so what torch answered is kept for each storage as long as that lives. Whatever
is no plain tensor is asked anew each time, and answered by torch itself.
"""

from __future__ import annotations

import copyreg
import heapq
import io
import itertools
import os
import pickle
import struct
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.storage import TypedStorage

# Nothing here may end a training where torch names it otherwise one day: a tensor that is put together in another way
# is asked anew each time, and whatever raises while a checkpoint is pickled leads to plain `torch.save`.
try:
    from torch.multiprocessing.reductions import StorageWeakRef
except ImportError:
    StorageWeakRef = None  # type: ignore[assignment, misc] # raises when it is called

_MOST_KINDS = 4096
_PROTOCOL = 2  # of torch.save
_BEGIN, _END = pickle.PROTO + bytes([_PROTOCOL]), pickle.STOP
_NUMBER = int.from_bytes(os.urandom(16), "big")  # that no checkpoint has in it
_MARK = pickle.dumps(_NUMBER, _PROTOCOL)[len(_BEGIN) : -len(_END)] + pickle.BINPERSID
_ANY = os.urandom(16).hex()  # stands for the number of a storage
_OTHER_DTYPE = "tensors of different dtypes share their memory, which torch.save refuses"
_PICKLED_ANY = pickle.BINUNICODE + struct.pack("<L", len(_ANY)) + _ANY.encode()
_FIELDS = {
    getattr(torch._utils, rebuild, None): count  # storage, offset, shape, strides, requires_grad, hooks; dtype
    for rebuild, count in (("_rebuild_tensor_v2", 6), ("_rebuild_tensor_v3", 7))
}
"""What plain tensors are put together by, and of how many fields; more of them would say more."""


_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda _: False)  # until torch 2.12


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


class _Kind(NamedTuple):
    """How tensors are put together that are alike but for their storage.

    Attributes:
        before: pickled, what stands before the number of the storage.
        behind: and behind it.
        dtype: as which torch files the storage.
    """

    before: bytes
    behind: bytes
    dtype: torch.dtype


class _Learned(NamedTuple):
    """How a tensor is put together.

    Attributes:
        data: pickled; its storage is named in it.
        named: the storage.
        dtype: as which torch files it.
    """

    data: bytes
    named: Named
    dtype: torch.dtype


_Form = tuple[Any, ...]
_Left = dict[int, tuple[torch.Tensor, Any]]
"""Tensors that are not marked, by identity, with what torch has said of them already."""


class TensorPickler:
    """Pickles one checkpoint after the other, for one thread.

    What was learned of a tensor is its part of the pickle, which refers to nothing else in it. The pickler of Python
    writes a mark in its place: it would ask here about each of the twenty objects that a tensor is put together from.
    Afterwards all marked tensors are looked at together, and what was learned takes the place of the marks. Where one
    cannot be marked, or the checkpoint holds it twice, which is one object for who loads it, it is pickled once more,
    and those are left to the pickler.

    Attributes:
        storages: of the checkpoint that was pickled last, in the order in which they were met; :meth:`forget` lets
            them go.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.storages: dict[Named, torch.UntypedStorage] = {}
        self._named: dict[int, Named] = {}  # by identity
        self._learned: dict[_Form, _Learned] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # of what is not marked in this checkpoint, by address
        self._left: _Left = {}
        self._numbers = 0
        self._free: list[int] = []

    def dump(self, checkpoint: Any) -> bytes:
        """Pickle a checkpoint; what :mod:`pickle` raises here, it raises in ``torch.save``, too.

        Raises:
            RuntimeError: what ``torch.save`` raises here too.
        """
        try:
            pickled = self._dump(checkpoint)
        except BaseException:
            self._reset()  # what was met in part is no base for the next one
            raise
        for named in list(itertools.filterfalse(self.storages.__contains__, self._named.values())):
            self._drop(named)
        return pickled

    def _dump(self, checkpoint: Any) -> bytes:
        self._left = {}
        for marks in (True, True, False):  # objects may be others each time they are asked for their parts
            self.storages, self._dtypes = {}, {}
            data = io.BytesIO()
            pickler = _Pickler(data, self.reduce, self.persistent_id, self._left if marks else None)
            pickler.dump(checkpoint)
            left = len(self._left)
            learned = self._recognise(pickler.met)
            if left == len(self._left):
                break
        self._left = {}
        marked = [known.data for known in learned]
        return b"".join(itertools.chain.from_iterable(zip(data.getvalue().split(_MARK), [*marked, b""], strict=True)))

    def forget(self) -> None:
        """Keep no storage alive any more."""
        self.storages = {}

    def _recognise(self, met: list[torch.Tensor]) -> list[_Learned]:
        """What is known of the tensors that were marked. Those that cannot be are added to what is left."""
        try:
            storages, found = self._look_up(met)
        except (NotImplementedError, RuntimeError):  # sparse, nested: nothing of the kind
            self._left.update((id(tensor), (tensor, None)) for tensor in met if not _has_form(tensor))
            met = [tensor for tensor in met if id(tensor) not in self._left]
            storages, found = self._look_up(met)
        for number in [number for number, known in enumerate(found) if known is None]:
            form = _form_of(met[number], storages[number])
            found[number] = self._learned.get(form) or self._learn(met[number], storages[number], form)
        if len(set(map(id, met))) < len(met):
            times = Counter(map(id, met))
            self._left.update((id(tensor), (tensor, None)) for tensor in met if times[id(tensor)] > 1)
        learned = [known for known in found if known is not None]
        if len(learned) == len(storages):
            self._check_dtypes(storages, learned)
            self.storages.update(zip([known.named for known in learned], storages, strict=True))
        return learned

    def _look_up(self, tensors: list[torch.Tensor]) -> tuple[list[torch.UntypedStorage], list[_Learned | None]]:
        """The storages of tensors, and what is known of each."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        known = self._learned.get  # no form is kept: thousands of them would have Python look for garbage
        return storages, [known(_form_of(tensor, storage)) for tensor, storage in zip(tensors, storages, strict=True)]

    def reduce(self, tensor: torch.Tensor) -> Any:
        """How a tensor is put together that is not marked, as torch says."""
        _, answer = self._left.get(id(tensor), (None, None))
        return answer if answer is not None else _as_torch_says(tensor)

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
        number = str(self._name(untyped).number)
        return ("storage", kind, number, torch.serialization.location_tag(untyped), count)

    def _any_number(self, storage: Any) -> tuple[Any, ...]:
        """The same with what stands for the number of any storage."""
        tag, kind, _, location, count = self.persistent_id(storage)
        return (tag, kind, _ANY, location, count)

    def _name(self, storage: torch.UntypedStorage) -> Named:
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

    def _learn(self, tensor: torch.Tensor, storage: torch.UntypedStorage, form: _Form) -> _Learned | None:
        """What a tensor is pickled as, which has not been met before; ``None`` if it cannot be marked."""
        key = (*form[1:], storage.device)
        kind = None if _has_names(tensor) else self._kinds.get(key)
        if kind is None:
            if (kind := self._ask(tensor)) is None:
                return None
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            self._kinds[key] = kind
        named = self._name(storage)
        number = str(named.number).encode()
        data = b"".join((kind.before, pickle.BINUNICODE, struct.pack("<L", len(number)), number, kind.behind))
        learned = self._learned[form] = _Learned(data, named, kind.dtype)
        if len(named.forms) >= _MOST_KINDS:  # as where a window moves over it
            self._unlearn(named)
        named.forms.append(form)
        return learned

    def _ask(self, tensor: torch.Tensor) -> _Kind | None:
        """Ask torch how a tensor is put together; ``None`` if not as plain tensors are."""
        reduction = _as_torch_says(tensor)
        rebuild, fields = reduction[0], reduction[1]
        if _FIELDS.get(rebuild) == len(fields) and not fields[5]:
            data = io.BytesIO()
            pickler = _Pickler(data, self.reduce, self._any_number, None)
            pickler.fast = True  # refers to nothing that was pickled before
            pickler.dump(_Tensor(reduction))
            found = data.getvalue()[len(_BEGIN) : -len(_END)].split(_PICKLED_ANY)
            if len(found) == 2:
                dtype = fields[0].dtype if isinstance(fields[0], TypedStorage) else torch.uint8
                return _Kind(found[0], found[1], dtype)
        self._left[id(tensor)] = (tensor, reduction)
        return None

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError(_OTHER_DTYPE)

    def _check_dtypes(self, storages: list[torch.UntypedStorage], learned: list[_Learned]) -> None:
        """The same for all tensors that are marked."""
        addresses = [storage.data_ptr() for storage in storages]
        if not self._dtypes and len(set(addresses)) == len(addresses):
            return  # no two share their memory
        dtypes = [known.dtype for known in learned]
        first = {**dict(zip(addresses, dtypes, strict=True)), **self._dtypes, 0: None}
        if list(map(first.get, addresses)) != dtypes and any(
            first[address] not in (None, dtype) for address, dtype in zip(addresses, dtypes, strict=True)
        ):
            raise RuntimeError(_OTHER_DTYPE)

    def _number(self) -> int:
        if self._free:
            return heapq.heappop(self._free)  # what is made anew each time has the same numbers each time
        self._numbers += 1
        return self._numbers - 1

    def _drop(self, named: Named) -> None:
        del self._named[named.identity]
        heapq.heappush(self._free, named.number)
        self._unlearn(named)

    def _unlearn(self, named: Named) -> None:
        for form in named.forms:
            self._learned.pop(form, None)
        named.forms.clear()


class _Pickler(pickle.Pickler):
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
        left: _Left | None,
    ) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.met: list[torch.Tensor] = []
        self._name = name
        self._left = left
        self.dispatch_table = {torch.Tensor: reduce, _Tensor: _reduction, **copyreg.dispatch_table}

    def persistent_id(self, obj: Any) -> Any:
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


def _form_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Form:
    """All by which a tensor on a storage differs from another in the pickle."""
    dtype = tensor.dtype
    return (
        storage._cdata,
        storage.nbytes(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        dtype,
        tensor.requires_grad,
        dtype.is_complex and tensor.is_conj(),  # of no other can it be said
        tensor.is_neg(),
    )


def _has_form(tensor: torch.Tensor) -> bool:
    try:
        return bool(_form_of(tensor, tensor.untyped_storage()))
    except (NotImplementedError, RuntimeError):
        return False


def _reduction(tensor: _Tensor) -> Any:
    return tensor.reduction


def _as_torch_says(tensor: torch.Tensor) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call] # torch's
