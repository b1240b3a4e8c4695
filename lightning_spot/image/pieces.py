"""What is copied into a file: storages and their places, one by one, or in rows of thousands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import compress
from typing import Any, NamedTuple, overload

import torch

from lightning_spot.image.pickling import Named


class Piece(NamedTuple):
    """A storage, or some bytes of one, and its place in the file.

    Attributes:
        storage: bytes to copy; on any device. Keeping the piece keeps the storage alive.
        offset: first byte in the file.
        nbytes: length in bytes.
        crc_at: places in the file of the 4-byte little-endian CRC-32 fields that describe it.
        named: tells the storage from all others, also those that came before it or will come after.
        start: first byte in the storage.
    """

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    crc_at: tuple[int, ...] = ()
    named: Named | None = None
    start: int = 0

    def cut(self, start: int, nbytes: int) -> Piece:
        """Some bytes of it, from byte ``start`` on."""
        if (start, nbytes) == (0, self.nbytes):
            return self
        return self._replace(offset=self.offset + start, start=self.start + start, nbytes=nbytes, crc_at=())


_piece: Callable[[tuple[Any, ...]], Piece] = partial(tuple.__new__, Piece)
"""Makes one of thousands of pieces: to call the class takes thrice as long."""


class _Rows(NamedTuple):
    offsets: Sequence[int]
    sizes: Sequence[int]
    crc_at: Sequence[tuple[int, ...]]
    named: Sequence[Named | None]
    starts: Sequence[int]


class Places(_Rows):
    """All of a row of pieces but their storages, see :class:`Piece`; it keeps nothing alive, and never changes."""

    @cached_property
    def nbytes(self) -> int:
        """Of all pieces: it is asked for five times in a snapshot, and the places are those of the last one."""
        return sum(self.sizes)


class Pieces(Sequence[Piece]):
    """Pieces, one property beside the other: most of them go their way without an object being made of each.

    Args:
        storages: of the pieces; they are kept alive.
        places: of them; the same object as before tells that ``tensors`` are the same, in the same memory.
        tensors: what lies in each of them, where that is one.
    """

    __slots__ = ("places", "storages", "tensors")

    def __init__(
        self, storages: Sequence[torch.UntypedStorage], places: Places, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        self.storages, self.places, self.tensors = storages, places, tensors

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.places.nbytes

    def __len__(self) -> int:
        return len(self.storages)

    def __iter__(self) -> Iterator[Piece]:
        return map(_piece, zip(self.storages, *self.places, strict=True))

    @overload
    def __getitem__(self, number: int) -> Piece: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Piece]: ...
    def __getitem__(self, number: int | slice) -> Piece | Sequence[Piece]:
        if isinstance(number, slice):
            return list(self)[number]
        return _piece((self.storages[number], *[row[number] for row in self.places]))


def places_of(pieces: Iterable[Piece]) -> Places:
    """The places of pieces."""
    rows = list(zip(*[piece[1:] for piece in pieces], strict=True))
    return Places(*rows) if rows else Places((), (), (), (), ())


def some(places: Places, which: Sequence[bool]) -> Places:
    """Those of some pieces of a row."""
    offsets, sizes, crc_at, named, starts = places
    return Places(
        list(compress(offsets, which)),
        list(compress(sizes, which)),
        list(compress(crc_at, which)),
        list(compress(named, which)),
        list(compress(starts, which)),
    )


def end_of(pieces: Sequence[Piece]) -> int:
    """Where in the file the last of them ends; 0 if there is none."""
    if isinstance(pieces, Pieces):
        return max(map(operator.add, pieces.places.offsets, pieces.places.sizes), default=0)
    return max([piece.offset + piece.nbytes for piece in pieces], default=0)


def nbytes_of(pieces: Sequence[Piece]) -> int:
    """How much they are, all together."""
    return pieces.nbytes if isinstance(pieces, Pieces) else sum([piece.nbytes for piece in pieces])
