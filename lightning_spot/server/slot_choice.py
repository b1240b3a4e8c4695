"""Which slot a new snapshot gets: a free one, a new one, or that of the snapshot which is missed least.

Decisions only: no memory is made here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_spot.config import format_bytes
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.protocol.slot import slot_capacity
from lightning_spot.server.slots import Slot, Slots, SlotSet, SlotState, View, reusable

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
        forget: slots that hold what makes room.
        release: slots whose memory is given back.
        outgrown: whether the slot is too small, and only what is superseded is dropped with its memory.
    """

    slot: Slot | None
    forget: list[Slot] = field(default_factory=list)
    release: list[Slot] = field(default_factory=list)
    outgrown: bool = False

    @property
    def is_spare(self) -> bool:
        """Whether memory is made, and no snapshot dropped for it that anybody would miss."""
        if self.outgrown:
            return True
        if self.forget or (self.slot is not None and self.slot.state is SlotState.HELD):
            return False
        return bool(self.release) or self.slot is None or not self.slot.capacity


def bound(slots: Slots, run: str, writer: int, limits: Limits) -> Limits:
    """The limits for a slot that is made because a snapshot of a writer of a run found none.

    On a GPU, which is a step behind its host, three are under way at each step: the newest has its slot, one is copied,
    one is sealed. With two on the way, one more slot is of use. With three, snapshots are sealed more slowly than they
    come, or the host is too far ahead: more slots would only hold older ones.
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
    for limit, name, remedy in (
        (limits.memory_bytes, "this server's memory", "more --memory-limit (or memory_limit=)"),
        (limits.run_memory_bytes, "what one run may use of this server's memory", "more --run-memory-limit"),
    ):
        if limit is not None and nbytes > limit:
            raise SnapshotFailedError(
                f"a snapshot of {format_bytes(nbytes)} cannot fit {name} of {format_bytes(limit)}; start the server"
                f" with {remedy}",
                reason=FailureReason.TOO_LARGE,
            )
    most = min(limits.memory_bytes, limits.run_memory_bytes or limits.memory_bytes)
    return min(slot_capacity(nbytes), max(nbytes, most))


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

Free = dict[int, SlotSet]
"""Free slots by their capacity."""


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
    run, writer, free = request.run, request.writer, slots.free
    can_be_new, has_share = limits.allow_one_more(slots, run, writer), limits.has_share(slots, run, writer)
    if not has_share:  # those made beyond ``slots=`` are its own still: its process has them mapped
        mine = (slot for slot in _each(free) if slot.writer == writer)
        free = _by_capacity(mine if limits.slots is not None else ())

    def room(candidates: Iterable[Slot | None], idle: Sequence[Slot] = ()) -> SlotChoice | None:
        found = (_try(slots, request, limits, candidate, free, idle) for candidate in candidates)
        return next((each for each in found if each is not None), None)

    if not request.reuse and limits.run_memory_bytes is None:
        found = room(_free_first(request, free, [], can_be_new=can_be_new))
        if found is not None:  # mostly there is: then nobody asks what each of hundreds of slots is worth
            return found
    idle = [slot for slot in reusable(views(), now_s) if slot.capacity]
    forget = _within_quota(slots, request, limits, idle)
    if forget is None:
        return None
    if forget:
        free, idle = _by_capacity([*_each(free), *forget]), [slot for slot in idle if slot not in forget]
    own = [slot for slot in idle if has_share or (slot.run, slot.writer) == (run, writer)]
    superseded = _superseded(own, views()) if request.reuse and not forget else []
    fitting = [slot for slot in superseded if slot.takes(request.nbytes)]
    found = room(_free_first(request, free, fitting, can_be_new=can_be_new)) or room(own, idle)
    if found is not None:
        is_outgrown = found.slot in superseded and found.slot not in fitting
        return replace(found, forget=[*forget, *found.forget], outgrown=is_outgrown and not found.forget)
    return None


def why_full(slots: Slots, run: str, limits: Limits, views: list[View], now_s: float) -> str:
    """Why no slot can be had now for a run, for people."""
    idle, owed = reusable(views, now_s), {slot: urls for view in views for slot, urls in view.owed.items()}
    reasons: Counter[str] = Counter()
    for slot in slots:
        if slot.state is SlotState.FILLING:
            reasons["being made" if slot.is_prefault else "being filled"] += 1
        elif slot in owed:
            urls = " and ".join(sorted(owed[slot]))
            reasons[f"not at {urls} yet, which is too slow, fails or waits for min_upload_interval_s"] += 1
        elif slot.readers:
            reasons["being read"] += 1
        elif slot.state is SlotState.HELD and slot not in idle:
            reasons["the newest of its run and safe nowhere else, or not complete yet"] += 1
    share = ""
    if limits.run_memory_bytes is not None:
        share = f"; one run may use {format_bytes(limits.run_memory_bytes)} of it (--run-memory-limit)"
    if not limits.has_files(slots, run):
        share += f"; open files allow for {limits.files} slots, half of them for a run: raise the server's ulimit -n"
    listed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "there is no memory for more"
    return f"none of {len(slots)} slots can be had now ({listed}){share}"


def _within_quota(slots: Slots, request: SlotRequest, limits: Limits, idle: list[Slot]) -> list[Slot] | None:
    """Snapshots of the run itself that must go for it to stay within its own bound; ``None`` if that is not enough."""
    if limits.run_memory_bytes is None:
        return []
    used = sum(slot.capacity for slot in slots.runs.get(request.run, ()))
    over = used + min(request.capacity, limits.run_memory_bytes) - limits.run_memory_bytes
    forget = []
    for slot in idle:
        if over > 0 and slot.run == request.run:
            forget.append(slot)
            over -= slot.capacity
    return forget if over <= 0 else None


def _superseded(idle: list[Slot], views: Iterable[View]) -> list[Slot]:
    """Slots that hold what neither a resume nor a server behind would miss: older snapshots."""
    missed = {slot for view in views for slot in (*view.newest, *view.bases)}
    return [slot for slot in idle if slot.snapshot and slot not in missed]


def _by_capacity(slots: Iterable[Slot]) -> Free:
    found: Free = {}
    for slot in slots:
        found.setdefault(slot.capacity, {})[slot] = None
    return found


def _each(free: Free) -> Iterator[Slot]:
    """Free slots that nobody reads any more."""
    return (slot for slots in free.values() for slot in slots if not slot.readers)


def _free_first(request: SlotRequest, free: Free, superseded: list[Slot], *, can_be_new: bool) -> list[Slot | None]:
    """Free slots that fit, a new one, then those that must be made again; a small file leaves large slots alone.

    Of each size there is one. Superseded ones go before a new one is made.
    """
    nbytes, each = request.nbytes, [_one_of(slots, request.writer) for slots in free.values()]
    of_each = [slot for slot in each if slot is not None]
    fitting = sorted((slot for slot in of_each if slot.takes(nbytes)), key=lambda slot: slot.capacity)
    wasted = [slot for slot in fitting if _is_much_larger(slot, nbytes)]
    superseded = [slot for slot in superseded if not _is_much_larger(slot, nbytes)]
    new: list[Slot | None] = [None] if can_be_new else []
    without = [slot for slot in of_each if not slot.capacity]
    unfit = [slot for slot in of_each if slot.capacity and not slot.takes(nbytes)]
    rest = [slot for slot in fitting if slot not in wasted]
    return [*rest, *superseded, *(without if can_be_new else []), *new, *unfit, *wasted]


def _one_of(free: SlotSet, writer: int) -> Slot | None:
    """One that nobody reads; of the first few, one that this writer filled last: its process has it mapped."""
    few = list(itertools.islice((slot for slot in free if not slot.readers), _FEW))
    return next((slot for slot in few if slot.writer == writer), few[0] if few else None)


def _is_much_larger(slot: Slot, nbytes: int) -> bool:
    return slot.capacity > _MUCH_LARGER * nbytes + _SMALL_BYTES


def _try(
    slots: Slots, request: SlotRequest, limits: Limits, candidate: Slot | None, free: Free, idle: Sequence[Slot]
) -> SlotChoice | None:
    """Room in a slot, or in a new one (``None``); by memory of free and idle ones where it does not fit."""
    if candidate is not None and candidate.takes(request.nbytes):
        return SlotChoice(candidate)
    more = request.capacity - (candidate.capacity if candidate is not None else 0)
    over = slots.nbytes + more - limits.memory_bytes
    room = SlotChoice(candidate, release=[candidate] if candidate is not None and candidate.capacity else [])
    others = itertools.chain(_each(free), idle)
    for other in (slot for slot in others if slot is not candidate and slot.capacity):
        if over <= 0:
            break
        over -= other.capacity
        room.release.append(other)
        if other in idle:
            room.forget.append(other)
    return room if over <= 0 else None
