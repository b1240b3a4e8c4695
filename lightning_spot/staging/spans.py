"""Bytes of storages and their places in a slot: what copiers are given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_spot.errors import SpotError
from lightning_spot.image.layout import Piece
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
        if self.storage.nbytes() < self.start + self.nbytes:
            raise gone()
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, self.start, (self.nbytes,), (1,))

    def target(self, slot: torch.Tensor) -> torch.Tensor:
        """Their place in the slot, as a uint8 tensor that shares it."""
        return slot[self.place : self.place + self.nbytes]

    def cut(self, nbytes: int) -> tuple[SlotSpan, SlotSpan]:
        """The first ``nbytes`` and the rest."""
        rest = SlotSpan(self.storage, self.start + nbytes, self.place + nbytes, self.nbytes - nbytes)
        return self._replace(nbytes=nbytes), rest


def gone() -> SpotError:
    """What to raise of a storage that is shorter than it was: beyond its end is memory of somebody else, or none."""
    return SpotError("its storage was resized, or its memory given back, before it was copied")


_SPAN = tuple.__new__
"""Makes one of thousands of spans: to call the class takes thrice as long."""


def whole(pieces: Iterable[Piece]) -> list[SlotSpan]:
    """Whole pieces."""
    return [_SPAN(SlotSpan, (storage, start, place, nbytes)) for storage, place, nbytes, _, _, start in pieces]


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
