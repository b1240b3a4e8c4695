"""What a slot of the ring holds, where it must still go, when it may be reused, and which one a new snapshot gets.

Bookkeeping and decisions only: no memory is made here.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_spot.config import format_bytes
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest, Order, PortionOf, snapshot_order
from lightning_spot.image.written import Ranges
from lightning_spot.staging.slot import SlotMemory, slot_capacity


class SlotState(enum.Enum):
    """What a slot is doing."""

    FREE = "free"
    FILLING = "filling"
    COMMITTED = "committed"


class Making(enum.Enum):
    """Whether the memory of a slot is made for who asks for one."""

    NOW = "now"
    """It is, and who asks waits for it."""
    NEVER = "never"
    """It is not: only a slot that is made already will do."""
    SPARE = "spare"
    """Only for a slot that the next snapshot would need, and that is not made yet."""
    BEYOND = "beyond"
    """Likewise, and beyond the bound of slots where snapshots of the run overlap, see :func:`bound`."""

    @property
    def is_ahead(self) -> bool:
        """Whether a slot is made before anybody needs it."""
        return self in (Making.SPARE, Making.BEYOND)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers below that a run's snapshots go to from here.

    Attributes:
        own: URLs of the run's directories that this server writes.
        carried: URLs that a server behind this one writes; what is safe there is learned from it.
    """

    own: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPortion:
    """What of a snapshot lies in a free slot.

    Attributes:
        run: key of its run.
        name: of the snapshot.
        ranges: of its image.
    """

    run: str
    name: str
    ranges: Ranges


@dataclass(eq=False, slots=True)
class Slot:
    """One slot of the ring; its fields change only under the ring's lock.

    Attributes:
        index: place in the ring.
        state: what it is doing.
        memory: its memory, once it has any.
        reserved_bytes: size of the memory that is being made for it.
        generation: counts its memories, so that a peer knows when to map again.
        run: key of the run that fills or holds it.
        manifest: the committed snapshot.
        coming: the snapshot on its way to being committed, while parts of it may go on already.
        places: URLs a user's file goes to instead of its run's tiers.
        dirty: URLs at which the snapshot is owed (the dirty bits).
        safe: URLs at which it is.
        refused: URLs that refuse it for good (a fence).
        settled: whether its sender said that it, or a newer one of its lineage, is durable.
        sequence: order of commits.
        readers: how many are reading it now.
        held: the upload as which its memory was filled last, ``""`` if that is unknown.
        held_as: what that was committed as.
        seals: how often it was sealed.
        checked_s: when its bytes were read last, and had the checksums of its manifest (monotonic).
        floats: where in it numbers lie that may be approximated on their way to a server behind.
        inexact_at: URLs at which an approximation of the snapshot is.
        surpassed: a newer snapshot of the lineage that a snapshot server has, and this host a portion of only.
        whole: of one host's portion of a snapshot: whether the portions of all hosts are known to be at snapshot
            servers.
        overtaken: likewise: whether a newer snapshot is known to be whole.
        brings: likewise: whether it is to be brought to storage, also if a newer one is whole.
        forsaken: likewise: whether the others' are not expected at storage any more.
        portion: the ranges of a snapshot at a snapshot server that the memory holds; all else in it is something else.
        spare: whether it is made ready before anybody needs it: who does waits for it, and makes no other.
        followed: whether another snapshot was to follow in a moment when this one was committed.
        committed_s: when the snapshot was committed (monotonic).
    """

    index: int
    state: SlotState = SlotState.FREE
    memory: SlotMemory | None = None
    reserved_bytes: int = 0
    generation: int = 0
    run: str = ""
    manifest: Manifest | None = None
    coming: Coming | None = None
    places: tuple[str, ...] | None = None
    dirty: list[str] = field(default_factory=list)
    safe: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    settled: bool = False
    sequence: int = 0
    readers: int = 0
    held: str = ""
    held_as: Manifest | None = None
    seals: int = 0
    checked_s: float = float("-inf")
    floats: tuple[Floats, ...] = ()
    inexact_at: list[str] = field(default_factory=list)
    surpassed: Manifest | None = None
    whole: bool = False
    overtaken: bool = False
    brings: bool = False
    forsaken: bool = False
    portion: HeldPortion | None = None
    spare: bool = False
    followed: bool = False
    committed_s: float = 0.0

    def takes(self, nbytes: int) -> bool:
        """Whether a snapshot of ``nbytes`` can be written to its memory."""
        return self.capacity >= nbytes

    @property
    def capacity(self) -> int:
        """Bytes of memory the slot holds, or is about to hold."""
        return self.memory.capacity if self.memory is not None else self.reserved_bytes

    @property
    def snapshot(self) -> Manifest | None:
        """The committed snapshot, if it holds one that is no user's file."""
        return self.manifest if self.manifest is not None and not self.manifest.is_file else None

    @property
    def of_host(self) -> PortionOf | None:
        """What of a snapshot it holds, if that is one host's portion of it."""
        return self.manifest.portion if self.manifest is not None else None

    def status(self) -> dict[str, Any]:
        """The slot, as JSON-ready values."""
        return {
            "index": self.index,
            "state": self.state.value,
            "capacity_bytes": self.capacity,
            "backing": self.memory.backing if self.memory else None,
            "run": self.manifest.run if self.manifest else None,
            "snapshot": self.manifest.name if self.manifest else None,
            "dirty": self.dirty,
            "safe": self.safe,
        }

    def view(self, nbytes: int | None = None) -> memoryview:
        """The slot's bytes; by default those of its snapshot. The caller must have it leased or pinned."""
        assert self.memory is not None
        return self.memory.view(nbytes if nbytes is not None else self.manifest.nbytes if self.manifest else 0)

    def forget(self) -> None:
        """Hold nothing any more; the memory stays."""
        self.state, self.run, self.manifest, self.places = SlotState.FREE, "", None, None
        self.dirty, self.safe, self.refused, self.settled = [], [], [], False
        self.floats, self.inexact_at, self.surpassed = (), [], None
        self.spare = self.followed = self.whole = self.overtaken = self.brings = self.forsaken = False


def newest_of_lineages(slots: Iterable[Slot]) -> set[Slot]:
    """The slots that hold the newest exact snapshot of each lineage of each run, or a newer one that is not exact.

    Where a snapshot server has a newer one, this host has none of these. Of portions of hosts, which lie at several
    servers, each counts that is not known to be of an older snapshot than a whole one.
    """
    slots = list(slots)
    portions = {slot for slot in slots if slot.of_host is not None and not slot.overtaken}
    newest: dict[tuple[str, str, bool], tuple[Order, Slot]] = {}
    for slot in slots:
        if (manifest := slot.snapshot) is not None and not slot.surpassed and slot.of_host is None:
            order = manifest.order
            for only_exact in (False, True) if manifest.exact else (False,):
                key = (slot.run, manifest.lineage, only_exact)
                if key not in newest or order > newest[key][0]:
                    newest[key] = (order, slot)
    return {slot for _, slot in newest.values()} | portions


def left_if_lost(slots: Iterable[Slot]) -> set[Slot]:
    """The slots whose snapshot is nowhere else, if only a snapshot server has a newer one: that server may be lost."""
    return {slot for slot in slots if slot.surpassed and not (slot.safe or slot.settled)}


def bases_of(slots: Iterable[Slot]) -> set[Slot]:
    """The slots that hold the newest snapshot of each run that is at a server behind this one, for each such server."""
    newest = {
        (slot.run, url): slot
        for slot in sorted((slot for slot in slots if slot.safe), key=lambda slot: slot.sequence)
        for url in slot.safe
        if slot.snapshot is not None and url.startswith("spot://")
    }
    return set(newest.values())


def only_here(slots: list[Slot]) -> set[Slot]:
    """The slots whose snapshot or file is still owed to a tier, or is the newest and safe nowhere."""
    newest = newest_of_lineages(slots)
    return {
        slot
        for slot in slots
        if slot.manifest is not None
        and (
            slot.dirty
            or (not (slot.safe or slot.refused or slot.settled) and (slot in newest or slot.manifest.is_file))
        )
    }


def owed(slot: Slot, tiers: Tiers, *, newest: bool) -> list[str]:
    """URLs at which a committed snapshot is owed: what was superseded is not, unless it ended the run or is a file."""
    manifest = slot.manifest
    if manifest is None or not (newest or manifest.complete or manifest.is_file or slot.brings):
        return []
    urls = slot.places if slot.places is not None else (*tiers.own, *tiers.carried)
    if slot.of_host is not None:
        is_over = slot.forsaken or (slot.overtaken and not slot.whole)
        urls = tuple(url for url in tiers.own if not (is_over or url.startswith("spot:")))
    return [url for url in urls if url not in slot.safe and url not in slot.refused]


def reusable(slots: list[Slot]) -> list[Slot]:
    """Committed slots that may be reused, in the order in which they should be: the newest of a run last.

    A slot may be reused when nobody reads it and it is owed to no tier. The newest snapshot of a lineage, and a file,
    must be safe somewhere below besides, or its sender have said that it is durable, or the file have been refused
    there, since a newer one is at its place; or the other hosts' portions of it are not expected any more. What a
    server behind holds goes late: only changes to it need to be sent.
    One that is not exact takes no memory from others.
    """
    newest = newest_of_lineages(slots)
    bases = bases_of(slots)
    idle = [
        slot
        for slot in slots
        if slot.state is SlotState.COMMITTED
        and not slot.readers
        and not slot.dirty
        and (slot.safe or slot.settled or slot.forsaken or _may_go(slot, newest))
    ]
    return sorted(idle, key=lambda slot: (slot in newest, slot in bases, slot.sequence))


def _may_go(slot: Slot, newest: set[Slot]) -> bool:
    """Whether what a slot holds need not be safe elsewhere."""
    manifest = slot.snapshot
    return bool(slot.refused) if manifest is None else slot not in newest or not manifest.exact


def file_order(manifest: Manifest | None) -> tuple[int, int, float]:
    """What makes a file of a name newer than another; snapshots are committed once, by their one attempt."""
    if manifest is None or not manifest.is_file:
        return (0, 0, 0.0)
    return (manifest.attempt, manifest.step, manifest.created_unix_s)


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
                nbytes=nbytes,
                memory_bytes=limit,
                reason=FailureReason.TOO_LARGE,
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
        most = format_bytes(limits.run_memory_bytes or 0)
        share = f"; one run may use {most} of this server's memory (--run-memory-limit)"
    reasons: Counter[str] = Counter()
    for slot in slots:
        if slot.spare:
            reasons["being made"] += 1
        elif slot.state is SlotState.FILLING:
            reasons["being filled"] += 1
        elif slot.dirty:
            urls = " and ".join(sorted(slot.dirty))
            reasons[f"not at {urls} yet, which is too slow, fails or waits for min_upload_interval_s"] += 1
        elif slot.readers:
            reasons["being read"] += 1
        elif slot.state is SlotState.COMMITTED and slot not in idle:
            reasons["the newest of its run and safe nowhere else, since nobody carries that run on from here"] += 1
    if not is_known and not reasons["being made"]:
        room = find_room(slots, run, max(1, nbytes), capacity_for(nbytes, limits), limits)
        reasons += Counter({"still to be made": int(room is not None)})
    if not limits.has_files(slots, run):
        share += f"; open files allow for {limits.files} slots, half of them for a run: raise the server's ulimit -n"
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
    """Slots that hold what neither a resume nor a server behind would miss: older snapshots.

    What would be left if a snapshot server is lost goes only once there is no memory for more.
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
    """Free slots that fit, a new one, then those that must be made again; a small file leaves large slots alone.

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
