"""Pickles a checkpoint as ``torch.save`` does, storages apart, and remembers the tensors it has seen.

Three quarters of the time that ``torch.save`` takes go into asking each tensor how it is put together. A training state
is put together the same way each time, so what torch answered is kept for each storage as long as that lives. Whatever
is no plain tensor is asked anew each time, and answered by torch itself.
"""

from __future__ import annotations

import heapq
import io
import itertools
import os
import pickle
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.storage import TypedStorage

from lightning_spot.image.forms import Form, Row, form_of, has_form
from lightning_spot.image.marks import BEGIN, END, MARK, PROTOCOL, AskingPickler, Left, Marking, PlainTensor, Unmarked

# Nothing here may end a training where torch names it otherwise one day: a tensor that is put together in another way
# is asked anew each time, and whatever raises while a checkpoint is pickled leads to plain `torch.save`.
try:
    from torch.multiprocessing.reductions import StorageWeakRef
except ImportError:
    StorageWeakRef = None  # type: ignore[assignment, misc] # raises when it is called

_MOST_KINDS = 4096
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


class TensorPickler:
    """Pickles one checkpoint after the other, for one thread.

    What was learned of a tensor is its part of the pickle, which refers to nothing else in it. The pickler of Python
    writes a mark in its place: it would ask here about each of the twenty objects that a tensor is put together from.
    Afterwards all marked tensors are looked at together, and what was learned takes the place of the marks: if they
    have the forms of those before, one by one, then at once. A checkpoint in which one cannot be marked is pickled once
    more, by a pickler that asks of each object whether it is a storage, and those are left to it; so it is if the
    checkpoint holds one twice, which is one object for who loads it.

    Attributes:
        storages: of the checkpoint that was pickled last, in the order in which they were met; :meth:`forget` lets
            them go.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.storages: dict[Named, torch.UntypedStorage] = {}
        self._named: dict[int, Named] = {}  # by identity
        self._learned: dict[Form, _Learned] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # of what is not marked in this checkpoint, by address
        self._left: Left = {}
        self._numbers = 0
        self._free: list[int] = []
        self._row: Row[_Learned] | None = None
        self._all_marked = True  # as far as is known

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
        if self._all_marked and (pickled := self._dump_marked(checkpoint)) is not None:
            return pickled
        self._all_marked = False
        self._left = {}
        for marks in (True, True, False):  # objects may be others each time they are asked for their parts
            self.storages, self._dtypes = {}, {}
            data = io.BytesIO()
            pickler = AskingPickler(data, self.reduce, self.persistent_id, self._left if marks else None)
            pickler.dump(checkpoint)
            left = len(self._left)
            learned = self._recognise(pickler.met)
            if left == len(self._left):
                break
        self._left = {}
        return _filled_in(data.getvalue().split(MARK), learned)

    def _dump_marked(self, checkpoint: Any) -> bytes | None:
        """A checkpoint in which all tensors can be marked; ``None`` if one cannot be."""
        self.storages, self._dtypes, self._left = {}, {}, {}
        marking = Marking()
        try:
            parts = marking.pickled(checkpoint)
        except Unmarked:
            return None
        learned = self._recognise(marking.met)
        # What is like a mark may stand in a text, too: then there are more parts.
        return _filled_in(parts, learned) if not self._left and len(parts) == len(learned) + 1 else None

    def forget(self) -> None:
        """Keep no storage alive any more."""
        self.storages = {}

    def _recognise(self, met: list[torch.Tensor]) -> list[_Learned]:
        """What is known of the tensors that were marked. Those that cannot be are added to what is left."""
        try:
            storages = [tensor.untyped_storage() for tensor in met]
            learned = self._look_up(met, storages)
        except (NotImplementedError, RuntimeError):  # sparse, nested: nothing of the kind
            self._left.update((id(tensor), (tensor, None)) for tensor in met if not has_form(tensor))
            met = [tensor for tensor in met if id(tensor) not in self._left]
            storages = [tensor.untyped_storage() for tensor in met]
            learned = self._look_up(met, storages)
        if len(set(map(id, met))) < len(met):
            times = Counter(map(id, met))
            self._left.update((id(tensor), (tensor, None)) for tensor in met if times[id(tensor)] > 1)
        if len(learned) == len(storages):
            self._check_dtypes(storages, learned)
            self.storages.update(zip([known.named for known in learned], storages, strict=True))
        return learned

    def _look_up(self, tensors: list[torch.Tensor], storages: list[torch.UntypedStorage]) -> list[_Learned]:
        """What is known of tensors, one after the other; what is not is learned. Those that cannot be are left out."""
        row = self._row
        if row is not None and row.is_still_of(tensors, storages):
            learned: list[_Learned | None] = [*row.learned]
            for number in row.renewed:
                learned[number] = self._know(tensors[number], storages[number])
            found = [known for known in learned if known is not None]
        else:
            learned = list(map(self._know, tensors, storages))
            found = [known for known in learned if known is not None]
            self._row = Row(tensors, storages, found, row) if len(found) == len(learned) else None
        return found

    def _know(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Learned | None:
        form = form_of(tensor, storage)  # it is not kept: thousands of them would have Python look for garbage
        return self._learned.get(form) or self._learn(tensor, storage, form)

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

    def _learn(self, tensor: torch.Tensor, storage: torch.UntypedStorage, form: Form) -> _Learned | None:
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
            pickler = AskingPickler(data, self.reduce, self._any_number, None)
            pickler.fast = True  # refers to nothing that was pickled before
            pickler.dump(PlainTensor(reduction))
            found = data.getvalue()[len(BEGIN) : -len(END)].split(_PICKLED_ANY)
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


def _filled_in(parts: list[bytes], learned: list[_Learned]) -> bytes:
    """The pickle, with what is known of each tensor in place of its mark."""
    marked = [known.data for known in learned]
    return b"".join(itertools.chain.from_iterable(zip(parts, [*marked, b""], strict=True)))


def _as_torch_says(tensor: torch.Tensor) -> Any:
    return tensor.__reduce_ex__(PROTOCOL)  # type: ignore[no-untyped-call] # torch's
