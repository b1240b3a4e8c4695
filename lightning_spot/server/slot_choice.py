"""Which slot a new snapshot gets: a free one, a new one, or that of the snapshot which is missed least.

Decisions only: no memory is made here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_spot.config import format_bytes
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.protocol.slot import slot_capacity
from lightning_spot.server.slots import Slot, Slots, SlotState, View, evictable

_OVERLAPPING = 2
_MOST_BEYOND = 2
_FEW = 64  # free slots of one size that are compared: with thousands, any will do
_MUCH_LARGER = 4
_SMALL_BYTES = 64 * 2**20

MOST_SLOTS = 16384
"""However much memory there is: an answer that lists what is in them is to be read."""

MOST_OF_A_WRITER = 64
"""Of these, a writer of a run has no more, whatever it sends; it needs a few more than the run keeps snapshots."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a ring.

    Attributes:
        slots: most slots of each writer of a run; ``None`` for :data:`MOST_OF_A_WRITER`.
        memory_bytes: most bytes of all slots together.
        run_memory_bytes: most bytes of the slots of one run; ``None`` for no such bound.
        files: slots for which this process may have files open.
    """

    slots: int | None
    memory_bytes: int
    run_memory_bytes: int | None
    files: int = MOST_SLOTS

    def has_share(self, slots: Slots, run: str, writer: int) -> bool:
        """Whether a writer of a run has fewer slots than it may have."""
        used = sum(slot.capacity > 0 for slot in slots.writers.get((run, writer), ()))
        return used < (self.slots or MOST_OF_A_WRITER)

    def allow_one_more(self, slots: Slots, run: str, writer: int = 0) -> bool:
        """Whether one more slot may be made for a writer of a run, as far as their number goes."""
        if self.slots is not None:
            made = [(slot.run, slot.writer) for slot in slots if slot.capacity]
            writers = {each for each in made if each[0]} | {(run, writer)}
            if len(made) >= self.slots * len(writers):
                return False
        return self.has_share(slots, run, writer) and self.has_files(slots, run)

    def has_files(self, slots: Slots, run: str) -> bool:
        """Whether files are left for one more slot of a run: it has no more than are left for others."""
        if len(slots) < self.files // 2:
            return True
        used = len(slots) - sum(map(len, slots.free.values()))
        return len(slots) < self.files and len(slots.runs.get(run, ())) < self.files - used

    def are_alike_for_all(self, slots: Slots, run: str, writer: int) -> bool:
        """Whether no bound of its own keeps a writer of a run from a slot: where it has no room, no other has any."""
        if self.slots is not None or self.run_memory_bytes is not None or not self.has_share(slots, run, writer):
            return False
        return self.has_files(slots, run) or not self.has_files(slots, "")


@dataclass(slots=True)
class SlotChoice:
    """Where a snapshot goes.

    Attributes:
        slot: the slot to take; ``None`` for a new one.
        is_made: whether its memory is made.
        forget: slots whose content is dropped: that one, and others that make room.
        release: slots whose memory is given back.
        is_spare: whether its memory is made, and nothing dropped for it but superseded snapshots.
    """

    slot: Slot | None
    is_made: bool
    forget: list[Slot]
    release: list[Slot]
    is_spare: bool = False


def bound(slots: Slots, run: str, writer: int, limits: Limits) -> Limits:
    """The limits for a slot that is made because a snapshot of a writer of a run found none.

    On a GPU, which is a step behind its host, three are under way at each step: the newest has its slot, one is copied,
    one is sealed. With two on the way, one more slot is of use, up to two beyond ``slots=``. With three, snapshots are
    sealed more slowly than they come, or the host is too far ahead: more slots would only hold older ones.
    """
    mine = slots.writers.get((run, writer), ())
    on_the_way = sum(slot.state is SlotState.FILLING and not slot.is_prefault for slot in mine)
    if limits.slots is None or on_the_way != _OVERLAPPING:
        return limits
    return replace(limits, slots=limits.slots + _MOST_BEYOND)


def capacity_for(nbytes: int, limits: Limits) -> int:
    """Memory to give a snapshot of ``nbytes``.

    Raises:
        SnapshotFailedError: if it can never fit.
    """
    most = min(limits.memory_bytes, limits.run_memory_bytes or limits.memory_bytes)
    if nbytes > most:
        limit = "--memory-limit (or memory_limit=)" if most == limits.memory_bytes else "--run-memory-limit"
        raise SnapshotFailedError(
            f"a snapshot of {format_bytes(nbytes)} cannot fit the {format_bytes(most)} of this server's memory that a"
            f" run may use; start the server with more {limit}",
            reason=FailureReason.TOO_LARGE,
        )
    return min(slot_capacity(nbytes), most)


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A slot that is asked for.

    Attributes:
        run: key of the run it is for.
        nbytes: size of the snapshot.
        capacity: memory to give it, if none that is there fits.
        writer: number of the rank that fills it.
        reuse: whether a superseded snapshot, of which nobody needs the bytes, goes before new memory is used.
    """

    run: str
    nbytes: int
    capacity: int
    writer: int = 0
    reuse: bool = False


Views = Callable[[], list[View]]


def find_room(
    slots: Slots, request: SlotRequest, limits: Limits, *, views: Views = list, now_s: float = 0.0
) -> SlotChoice | None:
    """Choose a slot for a snapshot: a free one, a new one, or the one whose snapshot is missed least.

    Args:
        slots: all there are.
        request: what is asked for.
        limits: of the ring.
        views: tells of each run what its slots hold.
        now_s: the time (monotonic).

    Returns:
        ``None`` if no slot can be had now.
    """
    run, writer, nbytes = request.run, request.writer, request.nbytes
    has_share = limits.has_share(slots, run, writer)
    # Beyond its share, those made beyond ``slots=`` are its own still: its process has them mapped.
    usable = [*_usable(slots, writer, of_others=has_share)] if has_share or limits.slots is not None else []
    new = [None] if limits.allow_one_more(slots, run, writer) else []
    free = [slot for slot in usable if new or slot.capacity]

    def first(candidates: Iterable[Slot | None], idle: Sequence[Slot] = ()) -> SlotChoice | None:
        found = (_try(slots, request, limits, candidate, idle) for candidate in candidates)
        return next((each for each in found if each is not None), None)

    def best(*held: Slot) -> SlotChoice | None:
        return first(sorted([*free, *held, *new], key=lambda slot: _rank(slot, nbytes)))

    superseded: set[Slot] = set()
    found = best() if not request.reuse else None
    if found is None:  # mostly there is one: then nobody asks what each of hundreds of slots is worth
        idle = [slot for slot in evictable(views(), now_s) if slot.capacity]
        own = [slot for slot in idle if has_share or (slot.run, slot.writer) == (run, writer)]
        if request.reuse:
            missed = {slot for view in views() for slot in view.newest | view.bases}
            superseded = {slot for slot in own if slot.snapshot and slot not in missed}
            found = best(*(slot for slot in own if slot in superseded and _fits(slot, nbytes)))
        found = found or first([*own, *new], idle)
    if found is not None:
        found.is_spare = found.is_made and superseded.issuperset(found.forget)
    return found


def why_full(slots: Slots, run: str, limits: Limits, views: list[View]) -> str:
    """Why no slot can be had now for a run, for people."""
    owed = {slot: urls for view in views for slot, urls in view.owed.items()}
    filling = sum(slot.state is SlotState.FILLING for slot in slots)
    stay = sum(slot.state is SlotState.HELD and slot not in owed for slot in slots)
    why = f"{filling} being filled, {stay} newest of their runs and safe nowhere else, not complete yet or being read"
    if owed:
        urls = " and ".join(sorted({url for each in owed.values() for url in each}))
        why += f", {len(owed)} not at {urls} yet, which is too slow, fails or waits for min_upload_interval_s"
    if limits.run_memory_bytes is not None:
        why += f"; one run may use {format_bytes(limits.run_memory_bytes)} (--run-memory-limit)"
    if not limits.has_files(slots, run):
        why += f"; open files allow for {limits.files} slots, half of them for a run: raise the server's ulimit -n"
    return f"none of {len(slots)} slots can be had now, and there is no room for more: {why}"


def _usable(slots: Slots, writer: int, *, of_others: bool) -> Iterator[Slot]:
    """Of each size a free slot that nobody reads; of the first few, one that this writer filled last."""
    for of_size in slots.free.values():
        found = (slot for slot in of_size if not slot.readers and (of_others or slot.writer == writer))
        few = list(itertools.islice(found, _FEW))
        if few:
            yield next((slot for slot in few if slot.writer == writer), few[0])


def _rank(slot: Slot | None, nbytes: int) -> tuple[int, int]:
    """Free slots that fit come first, then superseded ones, a new one, and those that must be made again.

    A small file leaves much larger ones alone: they come last.
    """
    if slot is None or not slot.capacity:
        return 2, slot is None
    if slot.capacity < nbytes:
        return 3, 0
    if slot.state is SlotState.HELD:
        return 1, 0
    return (0 if _fits(slot, nbytes) else 4), slot.capacity


def _fits(slot: Slot, nbytes: int) -> bool:
    """Whether a slot is large enough, and not much larger."""
    return nbytes <= slot.capacity <= _MUCH_LARGER * nbytes + _SMALL_BYTES


def _try(
    slots: Slots, request: SlotRequest, limits: Limits, candidate: Slot | None, idle: Sequence[Slot]
) -> SlotChoice | None:
    """Room in a slot, or in a new one (``None``); by memory of free and idle ones if there is too little.

    The slots of a run that exceeds its own bound make room for it; other runs give up only what is short beyond that.
    """
    run, capacity = request.run, candidate.capacity if candidate is not None else 0
    most = limits.run_memory_bytes or sys.maxsize
    used = sum(slot.capacity for slot in slots.runs.get(run, ()) if slot is not candidate) if most < sys.maxsize else 0
    is_made = capacity < request.nbytes or used + capacity > most
    over = slots.nbytes - capacity + request.capacity - limits.memory_bytes if is_made else 0
    over_run = used + (request.capacity if is_made else capacity) - most
    if over_run > 0 and candidate is not None and candidate.run not in ("", run):
        return None
    release = [candidate] if candidate is not None and capacity and is_made else []

    def enough(nbytes: int, *, are_own: bool) -> int:
        """Let the first of the others go that have so much memory together, all if they have less; what they have."""
        found = 0
        for other in itertools.chain((slot for of_size in slots.free.values() for slot in of_size), idle):
            if found >= nbytes:
                break
            is_left = other is not candidate and other not in release and other.capacity and not other.readers
            if is_left and (other.run == run or not are_own):
                release.append(other)
                found += other.capacity
        return found

    own = enough(over_run, are_own=True)  # first: less has to go of other runs then
    over_run, over = over_run - own, over - own
    over -= enough(over, are_own=False)
    forget = [slot for slot in dict.fromkeys([candidate, *release]) if slot and slot.state is SlotState.HELD]
    return SlotChoice(candidate, is_made, forget, release) if over <= 0 and over_run <= 0 else None
