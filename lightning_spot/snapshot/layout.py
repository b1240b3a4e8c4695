"""Lays a checkpoint file out before it is filled: a frame of small pieces and a place for every storage's bytes.

The file is one that ``torch.load`` reads, and every tool that reads zip files. Other than in a file of ``torch.save``
the storages come first, and what varies in length (the pickle, small records, the directory) behind them: so every
storage keeps its place from one snapshot to the next, as long as those before it are there.

The records of such a file are never compressed, so every tensor lies in one run of bytes. Headers and directory are
written by the published zip format (APPNOTE.TXT 4.3). The CRC-32 of a tensor's bytes is 0 in them, as in files that
torch writes after ``torch.serialization.set_crc32_options(False)``: a snapshot's manifest has checksums of every byte.
"""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import pickle
import struct
import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import UntypedStorage
from torch.storage import TypedStorage

from lightning_spot.errors import NotSerializableError
from lightning_spot.say import say
from lightning_spot.snapshot.pieces import Piece, within

_FOLDER = "model"
_RECORDS = (
    # What torch wants to know of the file. It is not told '.format_version': from 1 on torch computes the places of
    # records instead of looking them up, in the order in which torch.save would have written them.
    ("version", b"3\n"),
    ("byteorder", sys.byteorder.encode()),
)


Entry = tuple[int, bytes | bytearray]
"""Some bytes of a file that are no tensor's, and where they begin. Nobody changes them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint file before it is filled.

    Attributes:
        nbytes: size of the file.
        frame: ``(offset, bytes)`` of everything that is not tensor data, in file order.
        pieces: every non-empty storage once, in file order.
        problem: why it was serialised with plain ``torch.save``; ``""`` if it was not.
    """

    nbytes: int
    frame: tuple[Entry, ...]
    pieces: Sequence[Piece]
    problem: str = ""

    def cut(self, start: int, stop: int) -> Layout:
        """What of the file lies in a range of it, as a file of its own.

        Args:
            start: first byte of the range.
            stop: behind its last byte.
        """
        first = bisect_right(self.frame, start, key=lambda entry: entry[0] + len(entry[1]))
        behind = bisect_left(self.frame, stop, lo=first, key=lambda entry: entry[0])
        frame = [(max(at - start, 0), data[max(start - at, 0) : stop - at]) for at, data in self.frame[first:behind]]
        return Layout(stop - start, tuple(frame), tuple(within(self.pieces, start, stop)))


def lay_out(checkpoint: Any, first: Sequence[UntypedStorage] = (), early: Container[int] = ()) -> Layout:
    """Lay ``checkpoint`` out. Nothing that is laid out later knows of it.

    Args:
        checkpoint: anything ``torch.save`` takes, usually Lightning's checkpoint dict.
        first: storages that come first, in this order, whether or not the checkpoint has them; each once, and none
            empty. Their places depend on nothing but their sizes.
        early: addresses of storages that come next, if the checkpoint has them: what comes and goes lies behind them.

    Raises:
        Exception: what :mod:`pickle` raises here, it raises in ``torch.save``, too.
    """
    data = io.BytesIO()
    pickler = _Pickler(data, first)
    pickler.dump(checkpoint)
    storages = pickler.storages
    met = sorted(range(len(first), len(storages)), key=lambda number: storages[number].data_ptr() not in early)
    numbers = (*range(len(first)), *met)
    places = _places(numbers, tuple([pickler.sizes[number] for number in numbers]))
    tail = _tail(data.getvalue(), places)
    return Layout(places.end + len(tail), (*places.frame, (places.end, tail)), _pieces(storages, numbers, places))


def lay_out_first(first: Sequence[UntypedStorage]) -> Layout:
    """Lay out how a file begins that has these storages first, see :func:`lay_out`."""
    numbers = tuple(range(len(first)))
    places = _places(numbers, tuple([storage.nbytes() for storage in first]))
    return Layout(places.end, places.frame, _pieces(first, numbers, places))


def _pieces(storages: Sequence[UntypedStorage], numbers: Sequence[int], places: _Places) -> tuple[Piece, ...]:
    found = zip(numbers, places.offsets, places.sizes, strict=True)
    return tuple([Piece(storages[number], offset, nbytes) for number, offset, nbytes in found if nbytes])


class _Places(NamedTuple):
    """Where storages lie in a file, and what goes with them.

    Attributes:
        sizes: of the storages, in the order of the file.
        offsets: of their first bytes.
        frame: what stands in front of each.
        entries: what the directory says of them.
        end: where the last one ends.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    frame: tuple[Entry, ...]
    entries: bytes
    end: int


@functools.lru_cache(maxsize=8)  # nothing but values changes from one snapshot to the next, as a rule
def _places(numbers: tuple[int, ...], sizes: tuple[int, ...]) -> _Places:
    """The places of storages, by the numbers under which they are filed and their sizes, in the order of the file."""
    offsets: list[int] = []
    frame: list[Entry] = []
    entries: list[bytes] = []
    end, behind_last = 0, b""
    for number, nbytes in zip(numbers, sizes, strict=True):
        name, at = f"{_FOLDER}/data/{number}", end + len(behind_last)
        before = behind_last + _header(name, nbytes, at)
        frame.append((end, before))
        offsets.append(end + len(before))
        entries.append(_directory_entry(name, nbytes, at))
        end, behind_last = offsets[-1] + nbytes, _descriptor(nbytes)
    return _Places(sizes, tuple(offsets), tuple(frame), b"".join(entries), end)


def lay_out_in_any_case(
    checkpoint: Any,
    first: Sequence[UntypedStorage] = (),
    early: Container[int] = (),
    what: str = "the training state",
) -> Layout:
    """Lay ``checkpoint`` out; where that fails, with plain ``torch.save``: all frame, no pieces. That is said.

    Args:
        checkpoint: what to save.
        first: see :func:`lay_out`.
        early: see :func:`lay_out`.
        what: it is, for people.

    Raises:
        NotSerializableError: if it holds what cannot be pickled.
        MemoryError: if there is not the memory for it now; the next one may be laid out.
    """
    try:
        return lay_out(checkpoint, first, early)
    except MemoryError:
        raise
    except Exception as error:  # pickling runs the user's code, which may raise anything
        problem = f"{type(error).__name__}: {error}"
    buffer = io.BytesIO()
    try:
        torch.save(checkpoint, buffer)
    except MemoryError:
        raise
    except Exception as error:
        raise NotSerializableError(
            f"{what} cannot be serialised ({type(error).__name__}: {error}); look at what on_save_checkpoint,"
            " state_dict and hyperparameters put into the checkpoint"
        ) from error
    text = "checkpoints are serialized with plain torch.save, which is slower: {about}. Report it."
    say(logging.WARNING, "saved-slowly", text, about=problem)
    data = buffer.getvalue()
    return Layout(len(data), ((0, data),), (), problem)


def outline_of(layout: Layout) -> Layout:
    """The layout without its pieces: it keeps no tensor alive."""
    return replace(layout, pieces=())


def filled(layout: Layout) -> bytearray:
    """The file of a layout, with all its bytes; GPUs that have tensors of it are waited for.

    Raises:
        SpotError: if a storage was resized since.
    """
    data = bytearray(layout.nbytes)
    for offset, entry in layout.frame:
        data[offset : offset + len(entry)] = entry
    if layout.pieces:
        file = torch.frombuffer(data, dtype=torch.uint8)
        for piece in layout.pieces:
            piece.target(file).copy_(piece.source())
    return data


def _tail(pickled: bytes, places: _Places) -> bytes:
    """What follows the last storage.

    Args:
        pickled: the checkpoint without its storages.
        places: of these.
    """
    parts = [_descriptor(places.sizes[-1] if places.sizes else 0)]
    at = places.end + len(parts[0])
    entries = [places.entries]
    for name, data in (("data.pkl", pickled), *_RECORDS):
        path, crc = f"{_FOLDER}/{name}", crc32(data)
        record = [_header(path, len(data), at), data, _descriptor(len(data), crc)]
        entries.append(_directory_entry(path, len(data), at, crc))
        parts += record
        at += sum(map(len, record))
    count = len(places.sizes) + len(entries) - 1
    parts.append(_directory(b"".join(entries), count, at))
    return b"".join(parts)


# -- the pickle: as torch.save writes it, with storages apart ---------------------------------------------------------


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


class _OfPlain(NamedTuple):
    """The storage of a plain tensor, and its dtype."""

    storage: UntypedStorage
    dtype: torch.dtype


_STORAGES = frozenset((_OfPlain, TypedStorage, UntypedStorage))


class _Pickler(pickle.Pickler):
    """The pickler of ``torch.save``, which files storages by number.

    Args:
        file: to write to.
        first: storages that are filed first; each once.

    Attributes:
        storages: by number.
        sizes: of each, when it was met.
    """

    def __init__(self, file: io.BytesIO, first: Sequence[UntypedStorage]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduced}
        self.storages = list(first)  # kept alive: what is made meanwhile would have its identity again
        self.sizes = [storage.nbytes() for storage in first]
        self._numbers = {storage._cdata: number for number, storage in enumerate(first)}
        self._dtypes: dict[int, torch.dtype] = {}  # by address

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """How a storage is named in the pickle, as ``torch.save`` does it."""
        if type(obj) not in _STORAGES:  # nearly all that is pickled
            return None
        kind: Any
        if type(obj) is _OfPlain:
            untyped, dtype = obj
            kind = _KINDS[dtype]
            count = untyped.nbytes() // dtype.itemsize
        elif type(obj) is TypedStorage:
            untyped, dtype = obj._untyped_storage, obj.dtype
            kind = getattr(torch, obj._pickle_storage_type())  # type: ignore[no-untyped-call] # torch's
            count = obj._size()  # type: ignore[no-untyped-call] # torch's
        else:
            untyped, dtype = obj, torch.uint8
            kind = UntypedStorage
            count = obj.nbytes()
        device = untyped.device.type
        address = untyped.data_ptr() if device != "meta" else 0
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError("tensors of different dtypes share their memory, which torch.save refuses")
        location = "cpu" if device == "cpu" else torch.serialization.location_tag(untyped)
        return ("storage", kind, str(self._number(untyped)), location, count)

    def _number(self, storage: UntypedStorage) -> int:
        number, nbytes = self._numbers.get(storage._cdata), storage.nbytes()
        if number is None:
            number = self._numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage)
            self.sizes.append(nbytes)
        elif self.sizes[number] != nbytes:
            raise RuntimeError("a tensor's storage was resized while the checkpoint was pickled")
        return number


def reduced(tensor: torch.Tensor) -> Any:
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


# -- the archive (ZIP64, stored records): the bytes around its records ------------------------------------------------


_ALIGNMENT = 64
"""Bytes of which the offset of every record's data is a multiple, as in files of ``torch.save``."""

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2sH")  # tag and length of a field of one's own
_SIZES64 = struct.Struct("<2sH2Q")
_STREAMED = 0x08  # flag: CRC and sizes follow the data in a descriptor
_UTF8 = 0x800
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF  # the number is in a ZIP64 field
_MADE_BY, _MADE_BY64 = 20, 45  # versions of the format that a reader needs
_FIRST_DAY = 0x21  # 1980-01-01: the same bytes give the same file at any time


def _header(name: str, nbytes: int, at: int) -> bytes:
    """What stands in front of a record's data, padded so that the data begins at a multiple of :data:`_ALIGNMENT`.

    Args:
        name: path inside the archive, ASCII.
        nbytes: length of the data.
        at: where in the file the header begins.
    """
    path = name.encode("ascii")
    large = nbytes >= _FULL
    sizes = _SIZES64.pack(b"\1\0", 16, nbytes, nbytes) if large else b""
    padding = -(at + _LOCAL.size + len(path) + len(sizes) + _EXTRA.size) % _ALIGNMENT
    extra = sizes + _EXTRA.pack(b"FB", padding) + bytes(padding)
    size = _FULL if large else 0
    fields = (_version(large), _flags(nbytes), 0, 0, _FIRST_DAY, 0, size, size, len(path), len(extra))
    return _LOCAL.pack(b"PK\3\4", *fields) + path + extra


def _descriptor(nbytes: int, crc: int = 0) -> bytes:
    """What stands behind a record's data. An empty record has none.

    Args:
        nbytes: length of the data.
        crc: its CRC-32; 0 for none.
    """
    if not nbytes:
        return b""
    return struct.pack("<4sL2Q" if nbytes >= _FULL else "<4s3L", b"PK\7\x08", crc, nbytes, nbytes)


def _directory_entry(name: str, nbytes: int, header_at: int, crc: int = 0) -> bytes:
    """A record's entry in the directory; see :func:`_header` and :func:`_descriptor`."""
    path = name.encode("ascii")
    large, far = nbytes >= _FULL, header_at >= _FULL
    numbers = [*([nbytes, nbytes] if large else []), *([header_at] if far else [])]
    extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    size, version = _FULL if large else nbytes, _version(large or far)
    fields = (version, version, _flags(nbytes), 0, 0, _FIRST_DAY, crc, size, size, len(path), len(extra), 0, 0, 0, 0)
    return _CENTRAL.pack(b"PK\1\2", *fields, _FULL if far else header_at) + path + extra


def _directory(table: bytes, count: int, at: int) -> bytes:
    """The directory, which ends the file.

    Args:
        table: entries of all records, see :func:`_directory_entry`.
        count: how many these are.
        at: where in the file it begins.
    """
    end = at + len(table)
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY64, _MADE_BY64, 0, 0, count, count, len(table), at)
    counted = min(count, _FULL16)
    last = _END.pack(b"PK\5\6", 0, 0, counted, counted, min(len(table), _FULL), min(at, _FULL), 0)
    return table + end64 + _END64_LOCATOR.pack(b"PK\6\7", 0, end, 1) + last


def _flags(nbytes: int) -> int:
    return _UTF8 | (_STREAMED if nbytes else 0)


def _version(large: bool) -> int:
    return _MADE_BY64 if large else _MADE_BY
