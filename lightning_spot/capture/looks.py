"""Bytes of GPUs that are looked at: brought to the host beside training, and compared there with a slot.

They come as a snapshot's other copies do, after what training had ordered and before anything overwrites them. The
host waits for nothing, and the snapshot is committed only when they were compared.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_spot.capture.owners import COUNTED_S
from lightning_spot.capture.turns import CHECK_EVERY, Unchecked, same_bytes
from lightning_spot.image.pickling import Named
from lightning_spot.image.pieces import Piece
from lightning_spot.staging.copier import Copier, CopyJob, Marks, SlotView

GRAIN = 64
"""Looks lie at multiples of so many bytes."""


class Look(NamedTuple):
    """Some bytes that are looked at.

    Attributes:
        item: of which piece, and which of its bytes.
        at: their place in the scratch memory.
        was: what the slot held there, of a piece that is copied this time all the same; else that is in the slot.
    """

    item: Unchecked
    at: int
    was: bytes | None

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.item.stop - self.item.start

    @property
    def end(self) -> int:
        """The place behind it."""
        return self.at + -(-self.nbytes // GRAIN) * GRAIN

    @property
    def source(self) -> Piece:
        """They, to be copied to their place in the scratch memory."""
        piece = self.item.piece
        return piece._replace(offset=self.at, start=piece.start + self.item.start, nbytes=self.nbytes)

    @property
    def is_unwritten(self) -> bool:
        """Whether no write was counted since the slot was filled."""
        return self.item.owner.mark(self.item.tensors) == self.item.mark

    def differs(self, scratch: SlotView, view: SlotView) -> bool:
        """Whether the slot held other bytes."""
        at = scratch.at(self.at, self.nbytes)
        if self.was is not None:
            return ctypes.string_at(at, self.nbytes) != self.was
        return not same_bytes(at, view.at(self.item.piece.offset + self.item.start, self.nbytes), self.nbytes)


class Found(NamedTuple):
    """What was seen.

    Attributes:
        past_counts: storages that were left out, and are not what the slot holds, which no count tells.
        distrusted: storages that were copied all the same, but would have been that.
        alike: of those copied, the others: they may be left out from now on.
    """

    past_counts: frozenset[Named] = frozenset()
    distrusted: frozenset[Named] = frozenset()
    alike: frozenset[Named] = frozenset()


class NoLooks:
    """Nothing is looked at.

    Attributes:
        within: in how many snapshots each byte has its turn.
    """

    within = CHECK_EVERY

    def begin_at_once(self, trains: int | None = None, after: Marks | None = None) -> None:
        """Order copies of some bytes of each piece. Call :meth:`Copier.fence` before training goes on.

        See :meth:`Copier.start`.

        Raises:
            SpotError: if they could not be ordered.
        """

    def begin(self, trains: int | None = None, after: Marks | None = None) -> None:
        """Order the other copies, which may follow until the optimizer steps; see :meth:`Copier.start`."""

    def close(self) -> None:
        """What follows may change the tensors, once the current stream waits for copies; it is called before.

        On the thread that trains, which waits for nothing.

        Raises:
            SpotError: if the copies could not be ordered.
        """

    def found(self) -> Found:
        """Wait for the bytes, beside training, and compare them.

        A write that was counted meanwhile says nothing: the slot holds what was there before it, as it should.

        Raises:
            SpotError: if a copy failed.
        """
        return Found()

    def end(self) -> None:
        """Let go of all of it, whatever has become of it. A second call does nothing."""


NOTHING = NoLooks()


class Looks(NoLooks):
    """Bytes of one snapshot that are looked at.

    Args:
        copier: that brings them.
        scratch: where to; given back at the end.
        view: the slot.
        spots: some bytes of each piece.
        share: others.
        within: in how many snapshots each byte has its turn.
    """

    def __init__(
        self,
        copier: Copier,
        scratch: SlotView,
        view: SlotView,
        spots: Sequence[Look],
        share: Sequence[Look],
        within: int,
    ) -> None:
        self.within = within
        self._copier, self._scratch, self._view = copier, scratch, view
        self._looks = [*spots, *share]
        self._spots = len(spots)
        self._begun, self._fenced = 0, 0
        self._jobs: list[CopyJob] = []
        self._are_unwritten: list[bool] | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes are looked at."""
        return sum(look.nbytes for look in self._looks)

    def begin_at_once(self, trains: int | None = None, after: Marks | None = None) -> None:
        """Order those of each piece: no later write is in them."""
        self._begin(self._spots, trains, after).wait_cpu()
        self._fenced = self._spots

    def begin(self, trains: int | None = None, after: Marks | None = None) -> None:
        """Order all that is not ordered yet."""
        self._begin(len(self._looks), trains, after)

    def _begin(self, end: int, trains: int | None, after: Marks | None) -> CopyJob:
        pieces = [look.source for look in self._looks[self._begun : end]]
        self._begun = end
        self._jobs.append(self._copier.start(pieces, self._scratch, trains=trains, after=after))
        return self._jobs[-1]

    def close(self) -> None:
        """Note which counts are as they were: a write that is counted later comes after the copies."""
        jobs, looks = list(self._jobs), self._looks
        if self._are_unwritten is None and jobs:
            self._are_unwritten = self._without_counted(looks)
        for job in jobs:
            job.wait_cpu()

    def _without_counted(self, looks: Sequence[Look]) -> list[bool]:
        """Of each whether no counted write can be in what was brought."""
        return [number < self._fenced or look.is_unwritten for number, look in enumerate(looks)]

    def found(self) -> Found:
        """What differs, by whether it was left out."""
        try:
            for job in self._jobs:
                job.wait()
            looks = self._looks[: self._begun]
            differ = [look.differs(self._scratch, self._view) for look in looks]
            if any(differ):
                time.sleep(COUNTED_S)
            are_unwritten = self._are_unwritten or self._without_counted(looks)
            return _found(looks, differ, are_unwritten)
        finally:
            self.end()

    def end(self) -> None:
        """Give the scratch memory back, once nothing is copied there any more."""
        jobs, self._jobs = self._jobs, []
        looks, self._looks = self._looks, []
        for job in jobs:
            job.give_up()
        if looks:
            self._copier.scratch.give_back(self._scratch)


def _found(looks: Sequence[Look], differ: Sequence[bool], are_unwritten: Sequence[bool]) -> Found:
    past_counts: set[Named] = set()
    distrusted: set[Named] = set()
    alike: set[Named] = set()
    for look, differs, is_unwritten in zip(looks, differ, are_unwritten, strict=True):
        named = look.item.piece.named
        if named is None or not is_unwritten:
            continue
        if differs:
            (past_counts if look.was is None else distrusted).add(named)
        elif look.was is not None:
            alike.add(named)
    return Found(frozenset(past_counts), frozenset(distrusted), frozenset(alike))


def placed(looked_at: Iterable[tuple[Unchecked, bytes | None]], at: int = 0) -> list[Look]:
    """One behind the other in scratch memory, from a place on."""
    found = []
    for item, was in looked_at:
        found.append(Look(item, at, was))
        at = found[-1].end
    return found
