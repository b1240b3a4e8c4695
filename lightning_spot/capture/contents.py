"""What the slots hold already: a storage that was not written to since it was copied into a slot is not copied again.

Torch counts the writes to a tensor, but not those that go past it (``tensor.data``, some kernels). So only parameters
and states of optimizers are left out, whose writes are counted as a rule, and their bytes are looked at: some of each
as the snapshot begins, and before it is committed all of them, or, above :data:`CHECK_BYTES`, a share of them such
that each byte has its turn within :data:`CHECK_EVERY` snapshots. Of what lies on GPUs, see :mod:`.on_gpus`.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_spot.capture.looks import NOTHING, NoLooks
from lightning_spot.capture.on_gpus import OnGpus, may_leave_out
from lightning_spot.capture.owners import Mark, Owner, Owners
from lightning_spot.capture.turns import CHECK_BYTES, CHECK_EVERY, Turns, Unchecked, dice, same_bytes, share_of
from lightning_spot.image.layout import Entry, Layout
from lightning_spot.image.pickling import Named
from lightning_spot.image.pieces import Piece
from lightning_spot.image.written import Ranges, in_order
from lightning_spot.staging.copier import SlotView
from lightning_spot.staging.spans import address_in

_LEAST_BYTES = 1024  # below, comparing costs as much as copying
_WHOLE_BYTES = 64 * 1024  # up to here all of a storage is compared each time
_SPOTS = 4
_SPOT_BYTES = 64

PAST_COUNTS = (
    "%d tensors were written to past torch's count of writes (tensor.data, or code of your own); the last %d snapshots"
    " may hold what they were before. From now on these are copied each time, and at once"
)

_PLACED = 3  # of a mark, what says where something lies


@dataclass(frozen=True, slots=True)
class Known:
    """What a slot held when it was sealed.

    Attributes:
        upload: as which it was filled.
        frame: of its file.
        marks: of the storages whose counts count: place in the file, in the storage, and length, and then the counts.
    """

    upload: str
    frame: tuple[Entry, ...]
    marks: dict[Named, Mark]


class Content:
    """What one slot holds, as far as the writer put it there; unknown from when it is leased until it is sealed."""

    def __init__(self) -> None:
        self._known: Known | None = None

    def take(self, held: str) -> Known | None:
        """What it holds, if nobody else has filled it since; from now on that is unknown.

        Args:
            held: the upload as which the slot was filled last, as the ring says.
        """
        known, self._known = self._known, None
        return known if known is not None and known.upload == held else None

    def sealed(self, known: Known) -> None:
        """Note what it holds now."""
        self._known = known


@dataclass(slots=True)
class Plan:
    """What is to be copied into a slot.

    Attributes:
        frame: entries of the frame that are not there yet.
        pieces: that are not there yet.
        written: the ranges that are not there yet, ``None`` where most are not, or that is unknown.
        unchecked: pieces that are there, by the counts of their owners, and whose bytes are compared this time.
        found: of these, how many were compared and differ.
        looking: held by whoever compares them.
        looks: at pieces on GPUs that are there, by the counts of their owners.
        at_once: addresses of storages that were written to past the counts before: nobody would see such a write after
            the snapshot has begun.
        marks: see :class:`Known`.
    """

    frame: list[Entry]
    pieces: Sequence[Piece]
    marks: dict[Named, Mark]
    past_counts: int = 0
    written: Ranges | None = None
    unchecked: list[Unchecked] = field(default_factory=list)
    found: int = 0
    looking: threading.Lock = field(default_factory=threading.Lock)
    at_once: frozenset[int] = frozenset()
    looks: NoLooks = NOTHING

    @property
    def nbytes(self) -> int:
        """What is written into the slot."""
        return sum([len(data) for _, data in self.frame]) + sum([piece.nbytes for piece in self.pieces])


class Unchanged:
    """Finds what has not changed.

    Args:
        on_gpus: finds it on GPUs; ``None`` if all that lies there is copied each time.

    Attributes:
        distrusted: storages that were written to past the counts; they are always copied.
        checks_all: whether all that is left out is compared each time: no later snapshot would find a difference.
    """

    def __init__(self, on_gpus: OnGpus | None = None) -> None:
        self.distrusted: set[Named] = set()
        self._on_gpus = on_gpus
        self.checks_all = False
        self._trusted: set[Named] = set()  # left out of a snapshot before
        self._owners: dict[Named, Owner] = {}
        self._generation = 0
        self._turns = Turns()
        self._of_newest: tuple[list[Unchecked], SlotView] | None = None  # if a share of it is compared only

    def plan(self, layout: Layout, owners: Owners, known: Known | None, view: SlotView) -> Plan:
        """What of a layout has to be copied into a slot.

        Args:
            layout: of the snapshot.
            owners: tensors whose counts count.
            known: what the slot holds, ``None`` if that is unknown.
            view: the slot.
        """
        frame, there = (known.frame, known.marks) if known is not None else ((), {})
        copied: list[Piece] = []
        is_new = map(operator.is_not, layout.frame, itertools.chain(frame, itertools.repeat(None)))
        plan = Plan(list(itertools.compress(layout.frame, is_new)), copied, {})
        found, known_owners = plan.marks, self._owners
        present: dict[Named, Owner] = {}
        left_out = set()
        if not owners:
            plan.pieces = layout.pieces
        on_gpus = self._on_gpus if owners else None
        which = on_gpus.which(layout.pieces) if on_gpus is not None else None
        frozen: list[Piece] = []
        same: list[Unchecked] = []
        are_far = which if which is not None else itertools.repeat(False)
        for piece, is_far in zip(layout.pieces, are_far, strict=False) if owners else ():
            storage, offset, nbytes, named, start = piece
            tensors = owners.get(storage.data_ptr())
            if named is None or tensors is None or (is_far and not may_leave_out(nbytes, tensors)):
                copied.append(piece)
                continue
            owner, first = known_owners.get(named), tensors[0]
            if owner is not None and owner.only() is first and len(tensors) == 1:  # so it is nearly always
                mark: Mark = (offset, start, nbytes, owner.number, first._version)
            elif is_far or first.is_cpu:
                if owner is None or not owner.is_that_of(tensors):
                    owner = self._new_owner(tensors)
                mark = (offset, start, nbytes, *owner.mark(tensors))
            else:
                copied.append(piece)
                continue
            present[named] = owner
            found[named] = mark
            if is_far:
                frozen.append(piece)
                if there.get(named) != mark or named in self.distrusted:
                    copied.append(piece)
                else:
                    same.append(Unchecked(piece, tensors, owner, mark[_PLACED:], 0, nbytes))
            elif nbytes < _LEAST_BYTES or there.get(named) != mark or named in self.distrusted:
                copied.append(piece)
            elif not _looks_alike(piece, view):
                self.distrusted.add(named)
                plan.past_counts += named in self._trusted
                copied.append(piece)
            else:
                left_out.add(named)
                if nbytes > _WHOLE_BYTES:
                    plan.unchecked.append(Unchecked(piece, tensors, owner, mark[_PLACED:], 0, nbytes))
        if on_gpus is not None:
            plan.looks, again = on_gpus.plan(frozen, same, view, trusts=not self.checks_all)
            copied += again
        try:
            if owners and known is not None and 2 * plan.nbytes < layout.nbytes:
                entries = [(offset, len(data)) for offset, data in plan.frame]
                plan.written = in_order([*entries, *((piece.offset, piece.nbytes) for piece in plan.pieces)])
            if self.distrusted:
                plan.at_once = frozenset(piece.storage.data_ptr() for piece in copied if piece.named in self.distrusted)
            unchecked = plan.unchecked
            self._leave_for_later(plan)
        except BaseException:  # nobody else has the plan yet
            plan.looks.end()
            raise
        self._of_newest = (unchecked, view) if plan.unchecked is not unchecked else None
        self._trusted = {named for named in self._trusted | left_out if named in plan.marks}
        self.distrusted &= plan.marks.keys()
        self._owners = present
        return plan

    def written_past_counts(self, plan: Plan, view: SlotView) -> int:
        """Compare the bytes that were left to be checked, on any thread; how many storages differ from the slot.

        A storage that was written to in the right way meanwhile says nothing: so it is to be over before the optimizer
        steps. Who comes while it is under way waits, and a later call compares nothing.
        """
        with plan.looking:
            found = [
                piece.named
                for piece, tensors, owner, mark, start, stop in plan.unchecked
                if piece.named is not None
                and piece.storage.nbytes() == piece.named.nbytes  # else its memory was given back: nothing is there
                and not _same(piece, view, start, stop - start)
                and owner.is_still(tensors, mark)
            ]
            plan.unchecked = []  # only now: after Ctrl-C, whoever comes next compares them
            self.distrusted.update(named for named in found if named is not None)
            plan.found += len(found)
            return plan.found

    def looked(self, looks: NoLooks) -> int:
        """Wait for what is looked at on GPUs, beside training; how many storages differ from the slot.

        Raises:
            SpotError: if it does not come.
        """
        if self._on_gpus is None:
            return 0
        found = self._on_gpus.found(looks)
        self.distrusted.update(found.past_counts, found.distrusted)
        return len(found.past_counts)

    def newest_differs(self) -> bool:
        """Compare all of the newest snapshot that was left out of it, if that was left to later ones.

        Call it once it is committed, when nothing was begun since, and no optimizer has stepped.
        """
        newest, self._of_newest = self._of_newest, None
        far = self._on_gpus.newest_differs() if self._on_gpus is not None else frozenset()
        self.distrusted.update(far)
        if newest is None:
            return bool(far)
        unchecked, view = newest
        return self.written_past_counts(Plan([], [], {}, unchecked=unchecked), view) > 0 or bool(far)

    def _leave_for_later(self, plan: Plan) -> None:
        """Compare a share only where all of it would take long."""
        if self.checks_all:
            return
        nbytes = sum(item.piece.nbytes for item in plan.unchecked)
        turns = min(CHECK_EVERY, -(-nbytes // CHECK_BYTES))
        if turns > 1:
            share = -(-nbytes // turns)
            plan.unchecked = list(share_of(plan.unchecked, share * self._turns.next(turns), share))

    def _new_owner(self, tensors: Sequence[torch.Tensor]) -> Owner:
        """The owners of a storage, with a number that no others have: another tensor counts from zero."""
        self._generation += 1
        return Owner(tensors, self._generation)


def _looks_alike(piece: Piece, view: SlotView) -> bool:
    """Whether a storage is, at a glance, what the slot holds at its place."""
    if piece.nbytes <= _WHOLE_BYTES:
        return _same(piece, view, 0, piece.nbytes)
    last = piece.nbytes - _SPOT_BYTES
    return all(_same(piece, view, dice.randrange(last), _SPOT_BYTES) for _ in range(_SPOTS))


def _same(piece: Piece, view: SlotView, start: int, nbytes: int) -> bool:
    here = address_in(piece.storage, piece.start + start, nbytes)
    return same_bytes(here, view.at(piece.offset + start, nbytes), nbytes)
