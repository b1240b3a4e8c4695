"""What is copied into a file: storages, or some bytes of them, and their places; and how such is cut."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_spot.errors import SpotError


class Piece(NamedTuple):
    """A storage, or some bytes of one, and its place in the file.

    Attributes:
        storage: bytes to copy; on any device. Keeping the piece keeps the storage alive.
        offset: first byte in the file.
        nbytes: length in bytes.
        start: first byte in the storage.
    """

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    start: int = 0

    def source(self) -> torch.Tensor:
        """The bytes, as a uint8 tensor that shares them.

        Raises:
            SpotError: if the storage was made smaller since, or its memory given back.
        """
        if not 0 <= self.start <= self.start + self.nbytes <= self.storage.nbytes():
            raise gone()
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, self.start, (self.nbytes,), (1,))

    def target(self, file: torch.Tensor) -> torch.Tensor:
        """Their place in memory that the file is written to, as a uint8 tensor that shares it.

        Raises:
            SpotError: if they do not all lie in it: a slice would be cut short.
        """
        if not 0 <= self.offset <= self.offset + self.nbytes <= file.numel():
            raise outside()
        return file[self.offset : self.offset + self.nbytes]

    def part(self, start: int, nbytes: int) -> Piece:
        """Some of the bytes, from ``start`` on."""
        return Piece(self.storage, self.offset + start, nbytes, self.start + start)


def gone() -> SpotError:
    """What to raise of a storage that is shorter than it was: beyond its end is memory of somebody else, or none."""
    return SpotError("its storage was resized, or its memory given back, before it was copied")


def outside() -> SpotError:
    """What to raise of a place that is not in the slot: what lies beside it is memory of somebody else, or none."""
    return SpotError("its place is not in the slot: that is smaller than what was laid out")


def between(pieces: Sequence[Piece], ends: Sequence[int], begin: int, end: int) -> Sequence[Sequence[Piece]]:
    """What lies between two places, counted in bytes over all pieces; ``ends`` says where each begins."""
    first, behind = bisect.bisect_right(ends, begin) - 1, bisect.bisect_left(ends, end)
    if (begin, end) == (ends[first], ends[behind]):
        return (pieces[first:behind],)
    if behind - first == 1:
        return ([pieces[first].part(begin - ends[first], end - begin)],)
    head, tail = pieces[first], pieces[behind - 1]
    skipped = begin - ends[first]
    return (
        [head.part(skipped, head.nbytes - skipped)],
        pieces[first + 1 : behind - 1],
        [tail.part(0, end - ends[behind - 1])],
    )


def within(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    """What lies in a range of the file, each at its place in the range. The pieces are in the order of the file."""
    for number in range(bisect.bisect_right(pieces, start, key=lambda piece: piece.offset + piece.nbytes), len(pieces)):
        storage, offset, nbytes, at = pieces[number]
        if offset >= stop:
            return
        skipped = max(0, start - offset)
        length = min(offset + nbytes, stop) - offset - skipped
        yield Piece(storage, offset + skipped - start, length, at + skipped)


def cut_at(piece: Piece, every: int) -> Iterator[Piece]:
    """Cut a piece where its place in the file is a multiple of ``every``."""
    start = 0
    while start < piece.nbytes:
        length = min(every - (piece.offset + start) % every, piece.nbytes - start)
        yield piece.part(start, length)
        start += length


def cut_end(pieces: Sequence[Piece], nbytes: int) -> tuple[list[Piece], list[Piece]]:
    """Cut the last ``nbytes`` off: what is before them, and they."""
    before, end = list(pieces), []
    while before and nbytes > 0:
        piece = before.pop()
        kept = max(0, piece.nbytes - nbytes)
        if kept:
            before.append(piece.part(0, kept))
        end.append(piece.part(kept, piece.nbytes - kept))
        nbytes -= piece.nbytes - kept
    return before, end[::-1]
