"""Which slot a new snapshot gets, and whose memory is given back for it. Decides only; the ring does it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from lightning_spot.config import format_bytes
from lightning_spot.errors import SnapshotTooLarge
from lightning_spot.image.manifest import Order, snapshot_order
from lightning_spot.memory.slots import Slot, SlotState, bases_of, left_if_lost, newest_of_lineages, reusable
from lightning_spot.staging.slot import slot_capacity

_OVERLAPPING = 2
_MOST_BEYOND = 2
_MUCH_LARGER = 4
_SMALL_BYTES = 64 * 2**20

MOST_SLOTS = 16384
"""However much memory there is: an answer that lists what is in them is to be read."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a ring.

    Attributes:
        slots: most slots; ``None`` for no bound but memory.
        memory_bytes: most bytes of all slots together.
        run_memory_bytes: most bytes of the slots of one run; ``None`` for no such bound.
        files: slots for which this process may have files open.
    """

    slots: int | None
    memory_bytes: int
    run_memory_bytes: int | None
    files: int = MOST_SLOTS

    def allow_one_more(self, slots: list[Slot], run: str) -> bool:
        """Whether one more slot may be made for a run, as far as their number goes."""
        return (self.slots is None or len(slots) < self.slots) and self.has_files(slots, run)

    def has_files(self, slots: list[Slot], run: str) -> bool:
        """Whether files are left for one more slot of a run: it has no more than are left for others."""
        if len(slots) < self.files // 2:
            return True
        used = [slot.run for slot in slots if slot.state is not SlotState.FREE]
        return len(slots) < self.files and used.count(run) < self.files - len(used)


@dataclass(slots=True)
class Room:
    """Where a snapshot goes.

    Attributes:
        slot: the slot to take; ``None`` for a new one.
        forget: committed slots whose snapshots make room.
        release: slots whose memory is given back.
        outgrown: whether the slot is too small, and only what is superseded is dropped with its memory.
    """

    slot: Slot | None
    forget: list[Slot] = field(default_factory=list)
    release: list[Slot] = field(default_factory=list)
    outgrown: bool = False

    @property
    def is_new(self) -> bool:
        """Whether it is memory that was not used before, and nothing makes room for it."""
        return not (self.forget or self.release or (self.slot is not None and self.slot.capacity))

    @property
    def is_spare(self) -> bool:
        """Whether memory is made, and no snapshot dropped for it that anybody would miss."""
        if self.outgrown:
            return True
        drops = bool(self.forget) or (self.slot is not None and self.slot.state is SlotState.COMMITTED)
        return not drops and (self.is_new or bool(self.release))


def bound(slots: list[Slot], run: str, limits: Limits) -> Limits:
    """The limits for a slot that is made because a snapshot of a run found none.

    On a GPU, which is a step behind its host, three are under way at each step: the newest has its slot, one is copied,
    one is sealed. With two on the way, one more slot is of use. With three, snapshots are sealed more slowly than they
    come, or the host is too far ahead: more slots would only hold older ones.
    """
    on_the_way = sum(slot.state is SlotState.FILLING and slot.run == run and not slot.spare for slot in slots)
    if limits.slots is None or on_the_way != _OVERLAPPING:
        return limits
    return replace(limits, slots=limits.slots + _MOST_BEYOND)


def capacity_for(nbytes: int, limits: Limits) -> int:
    """Memory to give a snapshot of ``nbytes``.

    Raises:
        SnapshotTooLarge: if it can never fit.
    """
    for limit, name, remedy in (
        (limits.memory_bytes, "this node's memory", "more --memory (or memory_limit=)"),
        (limits.run_memory_bytes, "what one run may use of this node's memory", "more --run-memory"),
    ):
        if limit is not None and nbytes > limit:
            raise SnapshotTooLarge(
                f"a snapshot of {format_bytes(nbytes)} cannot fit {name} of {format_bytes(limit)}; start the node"
                f" with {remedy}",
                nbytes=nbytes,
                memory_bytes=limit,
            )
    most = min(limits.memory_bytes, limits.run_memory_bytes or limits.memory_bytes)
    return min(slot_capacity(nbytes), max(nbytes, most))


def find_room(
    slots: list[Slot], run: str, nbytes: int, capacity: int, limits: Limits, *, reuse: bool = False
) -> Room | None:
    """Choose a slot for a snapshot: a free one, a new one, or the one whose snapshot is missed least.

    Args:
        slots: all there are.
        run: key of the run it is for.
        nbytes: size of the snapshot.
        capacity: memory to give it, if none that is there fits.
        limits: of the ring.
        reuse: whether a superseded snapshot, of which nobody needs the bytes, goes before new memory is used.

    Returns:
        ``None`` if no slot can be had now.
    """
    free = [slot for slot in slots if slot.state is SlotState.FREE and not slot.readers]
    if not reuse and limits.run_memory_bytes is None:
        room = _without_loss(slots, run, free, [], nbytes, capacity, limits)
        if room is not None:  # mostly there is: then nobody asks what each of hundreds of slots is worth
            return room
    idle = reusable(slots)
    forget = _within_quota(slots, idle, run, capacity, limits)
    if forget is None:
        return None
    free += forget
    idle = [slot for slot in idle if slot not in forget]
    superseded = _superseded(slots, idle) if reuse and not forget else []
    fitting = [slot for slot in superseded if slot.takes(nbytes)]
    if (room := _without_loss(slots, run, free, fitting, nbytes, capacity, limits)) is not None:
        return Room(room.slot, forget, room.release)
    for candidate in idle:
        if (room := _try(slots, candidate, free, idle, nbytes, capacity, limits)) is not None:
            outgrown = candidate in superseded and candidate.capacity < nbytes and not room.forget
            return Room(room.slot, [*forget, *room.forget], room.release, outgrown)
    return None


def why_full(slots: list[Slot], run: str, nbytes: int, limits: Limits, *, is_known: bool) -> str:
    """Why no slot can be had now, for people.

    Args:
        slots: all there are.
        run: key of the run that wants one.
        nbytes: size of its snapshot.
        limits: of the ring.
        is_known: whether it is known that there is no room: else there may be some, but no memory made in it.
    """
    idle = reusable(slots)
    share = ""
    if _within_quota(slots, idle, run, capacity_for(nbytes, limits), limits) is None:
        share = f"; one run may use {format_bytes(limits.run_memory_bytes or 0)} of this node's memory (--run-memory)"
    reasons: Counter[str] = Counter()
    for slot in slots:
        if slot.spare:
            reasons["being made"] += 1
        elif slot.state is SlotState.FILLING:
            reasons["being filled"] += 1
        elif slot.dirty:
            urls = " and ".join(sorted(slot.dirty))
            reasons[f"not at {urls} yet, which is too slow, fails or waits for durable_every_s"] += 1
        elif slot.readers:
            reasons["being read"] += 1
        elif slot.state is SlotState.COMMITTED and slot not in idle:
            reasons["the newest of its run and safe nowhere else, since nobody carries that run on from here"] += 1
    if not is_known and not reasons["being made"]:
        room = find_room(slots, run, max(1, nbytes), capacity_for(nbytes, limits), limits)
        reasons += Counter({"still to be made": int(room is not None)})
    if not limits.has_files(slots, run):
        share += f"; open files allow for {limits.files} slots, half of them for a run: raise the node's ulimit -n"
    listed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "there is no memory for more"
    return f"none of {len(slots)} slots can be had now ({listed}){share}"


def _within_quota(slots: list[Slot], idle: list[Slot], run: str, capacity: int, limits: Limits) -> list[Slot] | None:
    """Snapshots of the run itself that must go for it to stay within its own bound; ``None`` if that is not enough."""
    if limits.run_memory_bytes is None:
        return []
    used = sum(slot.capacity for slot in slots if slot.run == run and slot.state is not SlotState.FREE)
    over = used + min(capacity, limits.run_memory_bytes) - limits.run_memory_bytes
    forget = []
    for slot in idle:
        if over > 0 and slot.run == run:
            forget.append(slot)
            over -= slot.capacity
    return forget if over <= 0 else None


def _superseded(slots: list[Slot], idle: list[Slot]) -> list[Slot]:
    """Slots that hold what neither a resume nor a node behind would miss: older snapshots.

    What would be left if a memory node is lost goes only once there is no memory for more.
    """
    missed = newest_of_lineages(slots) | bases_of(slots) | left_if_lost(slots)
    return [slot for slot in idle if slot.snapshot and slot not in missed]


def _without_loss(
    slots: list[Slot], run: str, free: list[Slot], superseded: list[Slot], nbytes: int, capacity: int, limits: Limits
) -> Room | None:
    """Room that costs no snapshot which anybody would miss."""
    for candidate in _free_first(slots, run, free, nbytes, limits, superseded):
        if (room := _try(slots, candidate, free, [], nbytes, capacity, limits)) is not None:
            return room
    return None


def _free_first(
    slots: list[Slot], run: str, free: list[Slot], nbytes: int, limits: Limits, superseded: list[Slot]
) -> list[Slot | None]:
    """Free slots that fit, a new one, then those that must be made anew; a small file leaves large slots alone.

    Superseded ones go before a new one is made.
    """
    fitting = sorted((slot for slot in free if slot.takes(nbytes)), key=lambda slot: (slot.capacity, _kept(slot)))
    wasted = [slot for slot in fitting if _is_much_larger(slot, nbytes)]
    superseded = [slot for slot in superseded if not _is_much_larger(slot, nbytes)]
    new: list[Slot | None] = [None] if limits.allow_one_more(slots, run) else []
    without = [slot for slot in free if not slot.capacity]
    unfit = [slot for slot in free if slot.capacity and not slot.takes(nbytes)]
    base = max((slot for slot in fitting if slot.portion is not None), key=_kept, default=None)
    last = [slot for slot in fitting if slot is base]  # of the next snapshot, only what changed since it is sent
    rest = [slot for slot in fitting if slot not in wasted and slot is not base]
    return [*rest, *superseded, *without, *new, *last, *unfit, *(slot for slot in wasted if slot is not base)]


def _is_much_larger(slot: Slot, nbytes: int) -> bool:
    return slot.capacity > _MUCH_LARGER * nbytes + _SMALL_BYTES


def _kept(slot: Slot) -> Order:
    """Sort key: the portion of the newest snapshot is missed most, if its slot is taken."""
    return (snapshot_order(slot.portion.name) if slot.portion is not None else None) or (0, 0, 0)


def _try(
    slots: list[Slot],
    candidate: Slot | None,
    free: list[Slot],
    idle: list[Slot],
    nbytes: int,
    capacity: int,
    limits: Limits,
) -> Room | None:
    if candidate is not None and candidate.takes(nbytes):
        return Room(candidate)
    more = capacity - (candidate.capacity if candidate is not None else 0)
    over = sum(slot.capacity for slot in slots) + more - limits.memory_bytes
    room = Room(candidate, release=[candidate] if candidate is not None and candidate.capacity else [])
    for other in (slot for slot in [*free, *idle] if slot is not candidate and slot.capacity):
        if over <= 0:
            break
        over -= other.capacity
        room.release.append(other)
        if other in idle:
            room.forget.append(other)
    return room if over <= 0 else None
