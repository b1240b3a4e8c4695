"""Bytes of storages and their places in a slot: what copiers are given."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_spot.errors import SpotError
from lightning_spot.image.pieces import Piece
from lightning_spot.staging.partitions import Span


class SlotSpan(NamedTuple):
    """Some bytes of a storage and their place in a slot.

    Attributes:
        storage: they belong to; on any device.
        start: first byte in it.
        place: first byte in the slot.
        nbytes: length.
    """

    storage: torch.UntypedStorage
    start: int
    place: int
    nbytes: int

    def source(self) -> torch.Tensor:
        """The bytes, as a uint8 tensor that shares them.

        Raises:
            SpotError: if the storage was made smaller since, or its memory given back.
        """
        if not 0 <= self.start <= self.start + self.nbytes <= self.storage.nbytes():
            raise gone()
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, self.start, (self.nbytes,), (1,))

    def target(self, slot: torch.Tensor) -> torch.Tensor:
        """Their place in the slot, as a uint8 tensor that shares it.

        Raises:
            SpotError: if they do not all lie in it: a slice would be cut short.
        """
        if not 0 <= self.place <= self.place + self.nbytes <= slot.numel():
            raise outside()
        return slot[self.place : self.place + self.nbytes]

    def cut(self, nbytes: int) -> tuple[SlotSpan, SlotSpan]:
        """The first ``nbytes`` and the rest."""
        rest = SlotSpan(self.storage, self.start + nbytes, self.place + nbytes, self.nbytes - nbytes)
        return self._replace(nbytes=nbytes), rest


def between(spans: Sequence[SlotSpan], ends: Sequence[int], begin: int, end: int) -> Sequence[Sequence[SlotSpan]]:
    """What lies between two places, counted in bytes over all spans; ``ends`` says where each begins."""
    first, behind = bisect.bisect_right(ends, begin) - 1, bisect.bisect_left(ends, end)
    if (begin, end) == (ends[first], ends[behind]):
        return (spans[first:behind],)
    if behind - first == 1:
        return ([spans[first].cut(end - ends[first])[0].cut(begin - ends[first])[1]],)
    head, tail = spans[first].cut(begin - ends[first])[1], spans[behind - 1].cut(end - ends[behind - 1])[0]
    return ([head], spans[first + 1 : behind - 1], [tail])


def gone() -> SpotError:
    """What to raise of a storage that is shorter than it was: beyond its end is memory of somebody else, or none."""
    return SpotError("its storage was resized, or its memory given back, before it was copied")


def outside() -> SpotError:
    """What to raise of a place that is not in the slot: what lies beside it is memory of somebody else, or none."""
    return SpotError("its place is not in the slot: that is smaller than what was laid out")


def address_in(storage: torch.UntypedStorage, start: int, nbytes: int) -> int:
    """Address of some bytes of a storage on the CPU.

    Raises:
        SpotError: if it has not as many.
    """
    if not 0 <= start <= start + nbytes <= storage.nbytes():
        raise gone()
    return storage.data_ptr() + start


def whole(pieces: Iterable[Piece]) -> list[SlotSpan]:
    """Whole pieces."""
    return [SlotSpan(piece.storage, piece.start, piece.offset, piece.nbytes) for piece in pieces]


def some(pieces: Sequence[Piece], spans: Iterable[Span]) -> list[SlotSpan]:
    """Parts of pieces, which ``spans`` name by number."""
    found = ((pieces[span.piece], span) for span in spans)
    return [
        SlotSpan(piece.storage, piece.start + span.start, piece.offset + span.start, span.nbytes)
        for piece, span in found
    ]


def cut_at(span: SlotSpan, every: int) -> Iterator[SlotSpan]:
    """Cut a span where its place in the slot is a multiple of ``every``."""
    while (until := every - span.place % every) < span.nbytes:
        first, span = span.cut(until)
        yield first
    yield span


def cut_end(spans: Sequence[SlotSpan], nbytes: int) -> tuple[list[SlotSpan], list[SlotSpan]]:
    """Cut the last ``nbytes`` off: what is before them, and they."""
    before, end = list(spans), []
    while before and nbytes > 0:
        span = before.pop()
        if span.nbytes > nbytes:
            first, span = span.cut(span.nbytes - nbytes)
            before.append(first)
        end.append(span)
        nbytes -= span.nbytes
    return before, end[::-1]
