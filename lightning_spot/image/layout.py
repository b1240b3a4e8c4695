"""Lays a checkpoint file out before it is filled: a frame of small pieces and a place for every storage's bytes.

The file is one that ``torch.load`` reads, and every tool that reads zip files. Other than in a file of ``torch.save``
the storages come first, and what varies in length (the pickle, small records, the directory) behind them: so every
storage keeps its place from one snapshot to the next, as long as those before it are there.

The records of such a file are never compressed, so every tensor lies in one run of bytes. Headers and directory are
written by the published zip format (APPNOTE.TXT 4.3). The CRC-32 of a tensor's bytes is 0 in them, as in files that
torch writes after ``torch.serialization.set_crc32_options(False)``: a snapshot's manifest has checksums of every byte.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import logging
import operator
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch

from lightning_spot.image.pickling import Named, TensorPickler
from lightning_spot.image.pieces import Piece

logger = logging.getLogger(__name__)

_TOGETHER_BYTES = 16 * 1024 * 1024  # of a device's memory, for as long as its tensors are fetched together
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
        frame: ``(offset, bytes)`` of everything that is not tensor data; entries that did not change since the last
            layout by the same :class:`Layouter` are the same objects.
        pieces: every non-empty storage once, in file order.
    """

    nbytes: int
    frame: tuple[Entry, ...]
    pieces: Sequence[Piece]


class Layouter:
    """Lays one checkpoint after the other out, for one thread; storages that stay keep their places.

    What is new comes behind what was there before. What is gone leaves no hole: those behind it move.
    """

    def __init__(self) -> None:
        self._pickler = TensorPickler()
        self._places = _Places()

    def lay_out(self, checkpoint: Any, first: Sequence[torch.UntypedStorage] = ()) -> Layout:
        """Lay ``checkpoint`` out.

        Args:
            checkpoint: anything ``torch.save`` takes, usually Lightning's checkpoint dict.
            first: storages that come first, in this order, whether or not the checkpoint has them; each once, and none
                empty. Their places depend on nothing but their sizes.
        """
        pickled = self._pickler.dump(checkpoint, first)
        storages, places = self._take(len(first)), self._places
        last = places.all[-1] if places.all else None
        end, last_nbytes = (last.end, last.nbytes) if last is not None else (0, 0)
        tail = _tail(pickled, places.entries, last_nbytes, end)
        return Layout(end + len(tail), (*places.before, (end, tail)), places.pieces(storages))

    def lay_out_first(self, first: Sequence[torch.UntypedStorage]) -> Layout:
        """Lay out how a file begins that has these storages first, see :meth:`lay_out`."""
        self._pickler.name(first)
        storages, places = self._take(len(first)), self._places
        return Layout(places.all[-1].end if places.all else 0, tuple(places.before), places.pieces(storages))

    def _take(self, first: int) -> dict[Named, torch.UntypedStorage]:
        """The storages that were met, each with its place, so many of them first; they are not kept alive."""
        storages = self._pickler.storages
        self._pickler.forget()
        self._places.place(storages, first)
        return storages


class FileRange:
    """Cuts a range out of one layout after the other; what stays is the same object."""

    def __init__(self) -> None:
        self._bounds = (0, 0)
        self._frame: dict[int, tuple[Entry, Entry]] = {}  # by place in the file: what is there, and what is cut of it
        self._whole: tuple[Entry, ...] = ()
        self._cut: tuple[Entry, ...] = ()

    def of(self, layout: Layout, start: int, stop: int) -> Layout:
        """What of a file lies in a range of it, as a file of its own.

        Args:
            layout: of the file.
            start: first byte of the range.
            stop: behind its last byte.
        """
        if (start, stop) == (0, layout.nbytes):
            return layout
        if self._bounds != (start, stop):
            self._bounds, self._frame, self._whole = (start, stop), {}, ()
        if len(layout.frame) != len(self._whole) or not all(map(operator.is_, layout.frame, self._whole)):
            known, self._frame, cut = self._frame, {}, list[Entry]()
            for entry in layout.frame:
                at, data = entry
                if start < at + len(data) and at < stop:
                    before = known.get(at)
                    if before is None or before[0] is not entry:
                        first = max(at, start)
                        before = (entry, (first - start, data[first - at : stop - at]))
                    self._frame[at] = before
                    cut.append(before[1])
            self._whole, self._cut = layout.frame, tuple(cut)
        pieces = layout.pieces
        begin = bisect_right(pieces, start, key=_end_of)
        end = bisect_left(pieces, stop, lo=begin, key=_start_of)
        return Layout(stop - start, self._cut, tuple([_cut(piece, start, stop) for piece in pieces[begin:end]]))


def _start_of(piece: Piece) -> int:
    return piece.offset


def _end_of(piece: Piece) -> int:
    return piece.offset + piece.nbytes


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    """What of a piece lies in a range of its file, counted from there."""
    storage, offset, nbytes, named, at = piece
    skipped = max(0, start - offset)
    return Piece(storage, offset + skipped - start, min(offset + nbytes, stop) - offset - skipped, named, at + skipped)


class _Places:
    """The places of all storages, in the order of the file; what is needed of each place for a layout lies in a row.

    Attributes:
        all: the places.
        before: what stands in front of each storage, and where.
        entries: in the directory.
    """

    def __init__(self) -> None:
        self.all: list[_Place] = []
        self.before: list[tuple[int, bytes]] = []
        self.entries: list[bytes] = []
        self._placed: dict[Named, None] = {}

    def place(self, present: Mapping[Named, object], first: int) -> None:
        """Give the storages that are there now their places; so many of them come first, in their order."""
        if list(present) == list(self._placed):  # so it is nearly always; to compare their keys takes ten times as long
            return
        heads = dict.fromkeys(itertools.islice(present, first))
        gone = map(operator.not_, map(present.__contains__, self._placed))
        kept = next(itertools.compress(itertools.count(), gone), len(self.all))
        moved = map(operator.is_not, heads, self._placed)
        kept_heads = next(itertools.compress(itertools.count(), moved), min(first, len(self.all)))
        kept = kept if kept_heads == first else min(kept, kept_heads)
        behind = [named for place in self.all[kept:] if (named := place.named) in present and named not in heads]
        new = [named for named in present if named not in self._placed and named not in heads]
        following = [*itertools.islice(heads, kept, None), *behind, *new]
        if kept < len(self.all):
            self._cut(kept)
        for named in following:
            self._add(_Place(named, self.all[-1] if self.all else None))

    def pieces(self, storages: Mapping[Named, torch.UntypedStorage]) -> tuple[Piece, ...]:
        """All storages but empty ones, by those that have a place."""
        return tuple(
            [
                Piece(storages[place.named], place.offset, place.nbytes, place.named)
                for place in self.all
                if place.nbytes
            ]
        )

    def _add(self, place: _Place) -> None:
        self.all.append(place)
        self.before.append(place.before)
        self.entries.append(place.entry)
        self._placed[place.named] = None

    def _cut(self, kept: int) -> None:
        gone = self.all[kept:]
        for row in (self.all, self.before, self.entries):
            del row[kept:]
        for place in gone:
            del self._placed[place.named]


class _Place:
    """Where a storage lies in the file, and what goes with it."""

    __slots__ = ("before", "end", "entry", "named", "nbytes", "offset")

    def __init__(self, named: Named, last: _Place | None) -> None:
        start: int = last.end if last is not None else 0
        behind_last = _descriptor(last.nbytes) if last is not None else b""
        name = f"{_FOLDER}/data/{named.number}"
        at = start + len(behind_last)
        self.named = named
        self.nbytes: int = named.nbytes
        self.before = (start, behind_last + _header(name, named.nbytes, at))
        self.offset = start + len(self.before[1])
        self.end: int = self.offset + named.nbytes
        self.entry = _directory_entry(name, named.nbytes, at)


def lay_out(checkpoint: Any) -> Layout:
    """Lay one ``checkpoint`` out, see :meth:`Layouter.lay_out`."""
    return Layouter().lay_out(checkpoint)


def lay_out_plain(checkpoint: Any) -> Layout:
    """Serialise ``checkpoint`` with plain ``torch.save``: all frame, no pieces. Slower, holds a second copy."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    data = buffer.getvalue()
    return Layout(len(data), ((0, data),), ())


def outline_of(layout: Layout) -> Layout:
    """The layout without its pieces: it keeps no tensor alive."""
    return replace(layout, pieces=())


def filled(layout: Layout) -> bytearray:
    """The file of a layout, with all its bytes; GPUs that have tensors of it are waited for."""
    data = bytearray(layout.nbytes)
    for offset, entry in layout.frame:
        data[offset : offset + len(entry)] = entry
    held = ctypes.c_char.from_buffer(data) if data else None  # as long as it is there, the memory stays where it is
    begin = ctypes.addressof(held) if held is not None else 0
    away = []
    for piece in layout.pieces:
        if not _is_here(piece.storage):
            away.append(piece)
        elif piece.storage.nbytes() < piece.start + piece.nbytes:
            raise RuntimeError("a tensor's storage was resized while its checkpoint was written")
        elif not 0 <= piece.offset <= piece.offset + piece.nbytes <= layout.nbytes == len(data):
            raise RuntimeError("a tensor's place is not in the file that was laid out")
        else:  # for torch, each is some ten calls
            ctypes.memmove(begin + piece.offset, piece.storage.data_ptr() + piece.start, piece.nbytes)
    for piece, elements in zip(away, _fetched_all(away), strict=True):
        place = memoryview(data)[piece.offset : piece.offset + piece.nbytes]
        torch.frombuffer(place, dtype=torch.uint8).copy_(elements)
    return data


def _fetched_all(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """Bytes of devices; small ones of one come together, in as few copies as that takes little of its memory."""
    found = [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start : start + nbytes]
        for storage, _, nbytes, _, start in pieces
    ]
    for device in {piece.storage.device for piece in pieces}:
        there = [number for number, piece in enumerate(pieces) if piece.storage.device == device]
        for numbers in _batches(there, pieces):
            for number, part in zip(numbers, _fetched([found[number] for number in numbers]), strict=True):
                found[number] = part
    return found


def _batches(numbers: Sequence[int], pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """Those of some pieces that are put together on their device, in order."""
    batch: list[int] = []
    nbytes = 0
    for number in numbers:
        if batch and nbytes + pieces[number].nbytes > _TOGETHER_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(number)
        nbytes += pieces[number].nbytes
    if batch:
        yield batch


def _fetched(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of one device, in memory of the host."""
    if len(parts) > 1:
        try:
            return list(torch.split(torch.cat(list(parts)).cpu(), list(map(len, parts))))
        except torch.cuda.OutOfMemoryError:  # training has nearly all of it: then one after another
            logger.debug("a GPU has no room for %d tensors at one place", len(parts))
    return [part.cpu() for part in parts]


def _is_here(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _tail(pickled: bytes, entries: list[bytes], last_nbytes: int, start: int) -> bytes:
    """What follows the last storage.

    Args:
        pickled: the checkpoint without its storages.
        entries: in the directory, of the storages.
        last_nbytes: size of the last storage.
        start: where it ends.
    """
    parts = [_descriptor(last_nbytes)]
    at = start + len(parts[0])
    own = []
    for name, data in (("data.pkl", pickled), *_RECORDS):
        path, crc = f"{_FOLDER}/{name}", crc32(data)
        record = [_header(path, len(data), at), data, _descriptor(len(data), crc)]
        own.append(_directory_entry(path, len(data), at, crc))
        parts += record
        at += sum(map(len, record))
    parts.append(_directory([*entries, *own], at))
    return b"".join(parts)


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


def _directory(entries: Sequence[bytes], at: int) -> bytes:
    """The directory, which ends the file.

    Args:
        entries: of all records, see :func:`_directory_entry`.
        at: where in the file it begins.
    """
    table = b"".join(entries)
    count, end = len(entries), at + len(table)
    end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _MADE_BY64, _MADE_BY64, 0, 0, count, count, len(table), at)
    counted = min(count, _FULL16)
    last = _END.pack(b"PK\5\6", 0, 0, counted, counted, min(len(table), _FULL), min(at, _FULL), 0)
    return table + end64 + _END64_LOCATOR.pack(b"PK\6\7", 0, end, 1) + last


def _flags(nbytes: int) -> int:
    return _UTF8 | (_STREAMED if nbytes else 0)


def _version(large: bool) -> int:
    return _MADE_BY64 if large else _MADE_BY
