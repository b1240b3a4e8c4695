"""Lays a checkpoint file out before it is filled: a frame of small pieces and a place for every storage's bytes.

The file is one that ``torch.load`` reads, and every tool that reads zip files. Other than in a file of ``torch.save``
the storages come first, and what varies in length (the pickle, small records, the directory) behind them: so every
storage keeps its place from one snapshot to the next, as long as those before it are there.

The records of such a file are never compressed, so every tensor lies in one run of bytes. Headers and directory are
written by the published zip format (APPNOTE.TXT 4.3). The CRC-32 of a tensor's bytes is 0 in them, as in files that
torch writes after ``torch.serialization.set_crc32_options(False)``: a snapshot's manifest has checksums of every byte.
"""

from __future__ import annotations

import io
import logging
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch

from lightning_spot.errors import NotSerializableError
from lightning_spot.say import say
from lightning_spot.snapshot.pickling import Named, TensorPickler
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
    """

    nbytes: int
    frame: tuple[Entry, ...]
    pieces: Sequence[Piece]

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


class Layouter:
    """Lays one checkpoint after the other out, for one thread; storages that stay keep their places.

    What is new comes behind what was there before. What is gone leaves no hole: those behind it move.
    """

    def __init__(self) -> None:
        self._pickler = TensorPickler()
        self._places: dict[Named, _Place] = {}  # in the order of the file

    def lay_out(self, checkpoint: Any, first: Sequence[torch.UntypedStorage] = ()) -> Layout:
        """Lay ``checkpoint`` out.

        Args:
            checkpoint: anything ``torch.save`` takes, usually Lightning's checkpoint dict.
            first: storages that come first, in this order, whether or not the checkpoint has them; each once, and none
                empty. Their places depend on nothing but their sizes.
        """
        pickled = self._pickler.dump(checkpoint, first)
        head = self._head(len(first))
        places = self._places.values()
        last_nbytes = next(reversed(places)).nbytes if places else 0
        tail = _tail(pickled, [place.entry for place in places], last_nbytes, head.nbytes)
        return Layout(head.nbytes + len(tail), (*head.frame, (head.nbytes, tail)), head.pieces)

    def lay_out_first(self, first: Sequence[torch.UntypedStorage]) -> Layout:
        """Lay out how a file begins that has these storages first, see :meth:`lay_out`."""
        self._pickler.name(first)
        return self._head(len(first))

    def _head(self, first: int) -> Layout:
        """All storages that were met, each in its place, so many of them first. They are not kept alive."""
        storages = self._pickler.storages
        self._pickler.forget()
        if list(storages) != list(self._places):  # seldom
            self._place(list(storages), first)
        places = self._places.values()
        end = next(reversed(places)).end if places else 0
        pieces = [Piece(storages[place.named], place.offset, place.nbytes) for place in places if place.nbytes]
        return Layout(end, tuple([place.before for place in places]), tuple(pieces))

    def _place(self, present: Sequence[Named], first: int) -> None:
        """Give the storages that are there now their places; so many of them come first, in their order."""
        known, is_there, heads = self._places, set(present), set(present[:first])
        order = [*present[:first], *(named for named in known if named in is_there and named not in heads)]
        order += [named for named in present if named not in known and named not in heads]
        places: dict[Named, _Place] = {}
        last, stays, before = None, True, iter(known)
        for named in order:
            stays = stays and named is next(before, None)
            places[named] = last = known[named] if stays else _Place(named, last)
        self._places = places


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


def lay_out_plain(checkpoint: Any, what: str = "the training state") -> Layout:
    """Serialise ``checkpoint`` with plain ``torch.save``: all frame, no pieces. Slower, holds a second copy.

    Args:
        checkpoint: what to serialise.
        what: it is, for people.

    Raises:
        NotSerializableError: if it holds what cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(checkpoint, buffer)
    except MemoryError:
        raise
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise NotSerializableError(
            f"{what} cannot be serialised ({type(error).__name__}: {error}); look at what on_save_checkpoint,"
            " state_dict and hyperparameters put into the checkpoint"
        ) from error
    data = buffer.getvalue()
    return Layout(len(data), ((0, data),), ())


class Outliner:
    """Makes layouts of checkpoints.

    Args:
        what: it is, for people.

    Attributes:
        problem: why the last one was serialised with plain ``torch.save``; ``""`` if it was not.
    """

    def __init__(self, what: str = "the training state") -> None:
        self._what = what
        self._layouter = Layouter()
        self.problem = ""

    def lay_out(self, checkpoint: Any, first: Sequence[torch.UntypedStorage] = ()) -> Layout:
        """Lay ``checkpoint`` out.

        Args:
            checkpoint: what to save.
            first: storages that come first, see :meth:`Layouter.lay_out`.

        Raises:
            NotSerializableError: if it holds what cannot be pickled.
            MemoryError: if there is not the memory for it now; the next one may be laid out.
        """
        self.problem = ""
        try:
            return self._layouter.lay_out(checkpoint, first)
        except MemoryError:
            raise
        except Exception as error:  # pickling runs the user's code, which may raise anything
            self.problem = f"{type(error).__name__}: {error}"
        layout = lay_out_plain(checkpoint, self._what)
        text = "checkpoints are serialized with plain torch.save, which is slower: {about}. Report it."
        say(logging.WARNING, "saved-slowly", text, about=self.problem)
        return layout

    def lay_out_first(self, first: Sequence[torch.UntypedStorage]) -> Layout:
        """Lay out how a checkpoint begins that has these storages first."""
        return self._layouter.lay_out_first(first)


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
