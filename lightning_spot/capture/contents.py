"""How a snapshot comes into its slot: only what is not there yet; at once what forward may change, the rest after it.

A storage that was not written to since it was copied into a slot is not copied again. What is copied must not change
meanwhile, and what is left out must be as the slot has it; both are looked at when the copy is over.

Torch counts the writes to a tensor, but not those that go past it (``tensor.data``, some kernels). So only parameters
and states of optimizers are left out, whose writes are counted as a rule, and their bytes are looked at: some of each
as the snapshot begins, and before it is committed all of them, or, above :data:`CHECK_BYTES`, a share of them such
that each byte has its turn within :data:`CHECK_EVERY` snapshots. What lies on a GPU is copied each time: fused kernels,
compiled steps and the replays of CUDA graphs write there without torch's counting it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import mmap
import operator
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier, CopyJob, Watches
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.tensors import Mark, Owners, StorageOwner
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.say import say
from lightning_spot.server.host import Host, Lease
from lightning_spot.snapshot.layout import Entry, Layout
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.pickling import Named
from lightning_spot.snapshot.pieces import Piece, address_in
from lightning_spot.snapshot.ranges import Floats, Ranges, in_order

CHECK_BYTES = 64 * 1024 * 1024
"""How much is compared for each snapshot (some 5 ms in the background), of which nothing is left to be found later."""

CHECK_EVERY = 10
"""Every byte that is not copied again is compared with the tensor once in so many snapshots, if not each time."""

dice = random.Random()
"""Draws what is looked at; training's own generator is left alone."""

_memcmp = ctypes.CDLL(None).memcmp  # lets go of the GIL
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_LEAST_BYTES = 1024  # below, comparing costs as much as copying
_WHOLE_BYTES = 64 * 1024  # up to here all of a storage is compared each time
_SPOTS = 4
_SPOT_BYTES = 64
_PLACED = 3  # of a mark, what says where something lies


def same_bytes(first: int, other: int, nbytes: int) -> bool:
    """Whether so many bytes at two addresses are the same."""
    return not _memcmp(first, other, nbytes)


class Unchecked(NamedTuple):
    """A piece that its slot holds already, as far as the counts of its storage's owners tell.

    Attributes:
        start: first byte of it that is compared this time.
        stop: behind the last one.
    """

    piece: Piece
    tensors: Sequence[torch.Tensor]
    owner: StorageOwner
    mark: Mark
    start: int
    stop: int


class ShareTurns:
    """Which share is compared for a snapshot: each in its turn, in an order drawn again each time around.

    An old byte may lie in one slot only. With a fixed order, slots that are used one after the other might meet the
    same share each time.
    """

    def __init__(self) -> None:
        self._among = 0
        self._left: list[int] = []

    def next(self, among: int) -> int:
        """The share, of so many."""
        if not self._left or among != self._among:
            self._among, self._left = among, dice.sample(range(among), among)
        return self._left.pop()


def share_of(unchecked: Iterable[Unchecked], start: int, nbytes: int) -> Iterator[Unchecked]:
    """What lies in a range of all bytes, one piece behind the other: one may be larger than all others together."""
    before = 0
    for item in unchecked:
        first, last = max(start - before, 0), min(start + nbytes - before, item.stop)
        if first < last:
            yield item._replace(start=first, stop=last)
        before += item.stop


@dataclass(frozen=True, slots=True)
class SealedContent:
    """What a slot held when it was sealed.

    Attributes:
        upload: as which it was filled.
        frame: of its file.
        marks: of the storages whose counts count: place in the file, in the storage, and length, and then the counts.
    """

    upload: str
    frame: tuple[Entry, ...]
    marks: dict[Named, Mark]


@dataclass(slots=True)
class CopyPlan:
    """What is to be copied into a slot.

    Attributes:
        frame: entries of the frame that are not there yet.
        pieces: that are not there yet.
        written: the ranges that are not there yet, ``None`` where most are not, or that is unknown.
        unchecked: pieces that are there, by the counts of their owners, and whose bytes are compared this time.
        found: of these, how many were compared and differ.
        looking: held by whoever compares them.
        at_once: addresses of storages that were written to past the counts before: nobody would see such a write after
            the snapshot has begun.
        marks: see :class:`SealedContent`.
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

    @property
    def nbytes(self) -> int:
        """What is written into the slot."""
        return sum([len(data) for _, data in self.frame]) + sum([piece.nbytes for piece in self.pieces])


class Unchanged:
    """Finds what has not changed.

    Attributes:
        distrusted: storages that were written to past the counts; they are always copied.
        checks_all: whether all that is left out is compared each time: no later snapshot would find a difference.
    """

    def __init__(self) -> None:
        self.distrusted: set[Named] = set()
        self.checks_all = False
        self._trusted: set[Named] = set()  # left out of a snapshot before
        self._owners: dict[Named, StorageOwner] = {}
        self._generation = 0
        self._turns = ShareTurns()
        self._of_newest: tuple[list[Unchecked], SlotView] | None = None  # if a share of it is compared only

    def plan(self, layout: Layout, owners: Owners, known: SealedContent | None, view: SlotView) -> CopyPlan:
        """What of a layout has to be copied into a slot.

        Args:
            layout: of the snapshot.
            owners: tensors whose counts count.
            known: what the slot holds, ``None`` if that is unknown.
            view: the slot.
        """
        frame, there = (known.frame, known.marks) if known is not None else ((), {})
        copied: list[Piece] = []
        is_new = map(operator.ne, layout.frame, itertools.chain(frame, itertools.repeat(None)))
        plan = CopyPlan(list(itertools.compress(layout.frame, is_new)), copied, {})
        found, known_owners = plan.marks, self._owners
        present: dict[Named, StorageOwner] = {}
        left_out = set()
        if not owners:
            plan.pieces = layout.pieces
        for piece in layout.pieces if owners else ():
            storage, offset, nbytes, named, start = piece
            tensors = owners.get(storage.data_ptr())
            if named is None or tensors is None:
                copied.append(piece)
                continue
            owner, first = known_owners.get(named), tensors[0]
            if owner is not None and owner.only() is first and len(tensors) == 1:  # so it is nearly always
                mark: Mark = (offset, start, nbytes, owner.number, first._version)
            elif first.is_cpu:
                if owner is None or not owner.is_that_of(tensors):
                    owner = self._new_owner(tensors)
                mark = (offset, start, nbytes, *owner.mark(tensors))
            else:
                copied.append(piece)
                continue
            present[named] = owner
            found[named] = mark
            if nbytes < _LEAST_BYTES or there.get(named) != mark or named in self.distrusted:
                copied.append(piece)
            elif not _looks_alike(piece, view):
                self.distrusted.add(named)
                plan.past_counts += named in self._trusted
                copied.append(piece)
            else:
                left_out.add(named)
                if nbytes > _WHOLE_BYTES:
                    plan.unchecked.append(Unchecked(piece, tensors, owner, mark[_PLACED:], 0, nbytes))
        if owners and known is not None and 2 * plan.nbytes < layout.nbytes:
            entries = [(offset, len(data)) for offset, data in plan.frame]
            plan.written = in_order([*entries, *((piece.offset, piece.nbytes) for piece in plan.pieces)])
        if self.distrusted:
            plan.at_once = frozenset(piece.storage.data_ptr() for piece in copied if piece.named in self.distrusted)
        unchecked = plan.unchecked
        self._leave_for_later(plan)
        self._of_newest = (unchecked, view) if plan.unchecked is not unchecked else None
        self._trusted = {named for named in self._trusted | left_out if named in plan.marks}
        self.distrusted &= plan.marks.keys()
        self._owners = present
        return plan

    def written_past_counts(self, plan: CopyPlan, view: SlotView) -> int:
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

    def newest_differs(self) -> bool:
        """Compare all of the newest snapshot that was left out of it, if that was left to later ones.

        Call it once it is committed, when nothing was begun since, and no optimizer has stepped.
        """
        newest, self._of_newest = self._of_newest, None
        if newest is None:
            return False
        unchecked, view = newest
        return self.written_past_counts(CopyPlan([], [], {}, unchecked=unchecked), view) > 0

    def _leave_for_later(self, plan: CopyPlan) -> None:
        """Compare a share only where all of it would take long."""
        if self.checks_all:
            return
        nbytes = sum(item.piece.nbytes for item in plan.unchecked)
        turns = min(CHECK_EVERY, -(-nbytes // CHECK_BYTES))
        if turns > 1:
            share = -(-nbytes // turns)
            plan.unchecked = list(share_of(plan.unchecked, share * self._turns.next(turns), share))

    def _new_owner(self, tensors: Sequence[torch.Tensor]) -> StorageOwner:
        """The owners of a storage, with a number that no others have: another tensor counts from zero."""
        self._generation += 1
        return StorageOwner(tensors, self._generation)


def _looks_alike(piece: Piece, view: SlotView) -> bool:
    """Whether a storage is, at a glance, what the slot holds at its place."""
    if piece.nbytes <= _WHOLE_BYTES:
        return _same(piece, view, 0, piece.nbytes)
    last = piece.nbytes - _SPOT_BYTES
    return all(_same(piece, view, dice.randrange(last), _SPOT_BYTES) for _ in range(_SPOTS))


def _same(piece: Piece, view: SlotView, start: int, nbytes: int) -> bool:
    here = address_in(piece.storage, piece.start + start, nbytes)
    return same_bytes(here, view.at(piece.offset + start, nbytes), nbytes)


class SlotViews:
    """Views of slots, by ring and place in it, and what each holds, as far as the writer put it there.

    One slot is used by one thread at a time, which leased it.

    Args:
        copier: pins slots, and unpins them before they are unmapped.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._views: dict[Host, dict[int, SlotView]] = {}
        self._sealed: WeakKeyDictionary[SlotView, SealedContent] = WeakKeyDictionary()

    def of(self, host: Host, lease: Lease) -> SlotView:
        """The view of a leased slot; made again if the slot has other memory than last time."""
        if host not in self._views:
            self._views[host] = {}
            host.released = functools.partial(self._release, host)
        views = self._views[host]
        view = views.get(lease.slot)
        if view is None or view.map is not lease.map:
            if view is not None:
                self._copier.unpin(view)
            view = views[lease.slot] = SlotView(lease.map)
        return view

    def take(self, view: SlotView, held: str) -> SealedContent | None:
        """What a slot holds, if nobody else has filled it since; from now on that is unknown, until it is sealed.

        Args:
            view: of the slot.
            held: the upload as which the slot was filled last, as the ring says.
        """
        known = self._sealed.pop(view, None)
        return known if known is not None and known.upload == held else None

    def sealed(self, view: SlotView, known: SealedContent) -> None:
        """Note what a slot holds now."""
        self._sealed[view] = known

    def others(self, host: Host | None) -> list[Host]:
        """Rings beside ``host`` of which there are views: they were lost."""
        return [other for other in list(self._views) if other is not host]

    def drop(self, host: Host) -> None:
        """Let the slots of a ring go; nothing may be copied into them any more."""
        host.released = None
        for view in self._views.pop(host, {}).values():
            self._copier.unpin(view)

    def _release(self, host: Host, shared: mmap.mmap) -> None:
        """The ring has replaced a slot: let its memory go before it is unmapped."""
        views = self._views.get(host, {})
        for slot in [slot for slot, view in list(views.items()) if view.map is shared]:  # another thread may add one
            self._copier.unpin(views.pop(slot))


@dataclass(slots=True)
class Pending:
    """A snapshot on its way.

    Attributes:
        manifest: what it will be.
        lease: its slot.
        first: copies that were ordered before it was begun. What of them comes from a GPU is waited for as well: its
            storages may be those of the snapshot only, and of another stream, so that they are kept alive until then.
        job: copies that may go on until the next optimizer step.
        done: becomes the manifest when committed, or the error.
        destinations: tiers below, if not the run's.
        outline: of what is written, without the tensors.
        tried: what is tried to be read back, see :class:`~lightning_spot.capture.layouts.Laid`.
        plan: what is copied.
        view: its slot, as the writer sees it.
        floats: where in it numbers lie that may be approximated on their way to a snapshot server.
        followed: whether another one is to follow in a moment, see :meth:`Host.seal`.
    """

    manifest: Manifest
    lease: Lease
    first: CopyJob
    job: CopyJob
    done: Future[Manifest]
    destinations: list[str] | None
    outline: Layout
    tried: Layout | None
    plan: CopyPlan
    view: SlotView
    floats: tuple[Floats, ...] = ()
    followed: bool = False

    def torn(self, found: int) -> SnapshotFailedError | None:
        """Why what was copied is worthless, if it is.

        Args:
            found: how many tensors were left out, and are not as they were thought to be.
        """
        name = self.manifest.snapshot
        if self.job.moved:
            return SnapshotFailedError(
                f"snapshot {name} was dropped: {len(self.job.moved)} tensors changed between two optimizer steps while"
                " they were copied. From now on these are copied before the step goes on",
                reason=FailureReason.TORN,
            )
        if found:
            return SnapshotFailedError(
                f"snapshot {name} was dropped: {found} tensors were not as they were thought to be",
                reason=FailureReason.TORN,
            )
        return None


class Copying:
    """Copies one snapshot after the other.

    Args:
        copier: that does.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.

    Attributes:
        copier: that does.
        views: of the slots.
        unchanged: finds what a slot has already.
    """

    def __init__(self, copier: Copier, schedule: Schedule | None) -> None:
        self.copier = copier
        self.views = SlotViews(copier)
        self.unchanged = Unchanged()
        self._schedule = schedule
        self._unsteady: frozenset[int] = frozenset()

    # -- on the training thread -----------------------------------------------------------------------------------

    def plan(self, layout: Layout, lease: Lease, view: SlotView, owners: Owners, *, trusts: bool) -> CopyPlan:
        """What of a layout is not in the slot yet.

        Args:
            layout: of the snapshot.
            lease: of the slot.
            view: of the slot.
            owners: tensors whose counts of writes tell whether they have changed.
            trusts: whether they are trusted. Those of the last snapshot are not: no later one checks them.
        """
        known = self.views.take(view, lease.held)
        plan = self.unchanged.plan(layout, owners, known if trusts else None, view)
        if plan.past_counts:
            say_past_counts(plan.past_counts)
        return plan

    def start(self, plan: CopyPlan, view: SlotView, owned: Owners) -> tuple[CopyJob, CopyJob]:
        """Copy now what forward may change, and let the optimizer's own follow until its next step; both copies."""
        following = owned.keys() - self._unsteady - plan.at_once
        first = [piece for piece in plan.pieces if piece.storage.data_ptr() not in following]
        later = [piece for piece in plan.pieces if piece.storage.data_ptr() in following]
        watched = dict.fromkeys(piece.storage.data_ptr() for piece in later)  # each once, of however many pieces
        copied = self.copier.start(first, view)
        for offset, data in plan.frame:
            view.map[offset : offset + len(data)] = data
        copied.wait_cpu()
        self.copier.fence()  # before what may take longer: a GPU's training would wait for that too
        watches = Watches(itertools.chain.from_iterable(map(owned.__getitem__, watched)))
        job = self.copier.start(later, view, watches, self._schedule)
        plan.pieces = ()  # no storage is kept alive longer than its copy takes
        return copied, job

    def copied(self, pending: Pending) -> None:
        """Return when the tensors of a snapshot may change."""
        self.unchanged.written_past_counts(pending.plan, pending.view)
        pending.job.wait_cpu()
        self.copier.fence()
        pending.job.settle()
        self._unsteady |= pending.job.moved

    def newest_differs(self) -> bool:
        """See :meth:`Unchanged.newest_differs`."""
        if differs := self.unchanged.newest_differs():
            say_past_counts(1)
        return differs

    def close(self) -> None:
        """Let the slots go. Nothing is copied any more."""
        self.copier.close()
        for host in self.views.others(None):
            self.views.drop(host)

    # -- on the background thread ---------------------------------------------------------------------------------

    def check(self, pending: Pending) -> None:
        """Wait until all of a snapshot is in its slot.

        Raises:
            SnapshotFailedError: if that is not what the tensors were.
        """
        found = self.unchanged.written_past_counts(pending.plan, pending.view)
        try:
            pending.first.wait()
        finally:
            pending.job.wait()
        if (torn := pending.torn(found)) is not None:
            if not pending.job.moved:
                say_past_counts(found)
            raise torn

    def sealed(self, pending: Pending) -> None:
        """A slot holds a snapshot now: note what."""
        known = SealedContent(pending.lease.id, pending.outline.frame, pending.plan.marks)
        self.views.sealed(pending.view, known)


def say_past_counts(count: int) -> None:
    """Log that so many tensors were written to in a way that torch does not count."""
    text = (
        "{count} tensors were written to past torch's count of writes (tensor.data). The last {checked} snapshots may"
        " hold their earlier values. From now on they are copied each time."
    )
    say(logging.WARNING, "writes-uncounted", text, count=count, checked=CHECK_EVERY)
