"""What a slot of the ring holds, where it must still go, and when it may be reused. Bookkeeping only: no memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest, Order, PortionOf
from lightning_spot.image.written import Ranges
from lightning_spot.staging.slot import SlotMemory


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
    """Likewise, and beyond the bound of slots where snapshots of the run overlap, see :func:`room.bound`."""

    @property
    def is_ahead(self) -> bool:
        """Whether a slot is made before anybody needs it."""
        return self in (Making.SPARE, Making.BEYOND)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers below that a run's snapshots go to from here.

    Attributes:
        own: URLs of the run's directories that this node writes.
        carried: URLs that a node behind this one writes; what is safe there is learned from it.
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
        generation: counts its memories, so that a peer knows when to map anew.
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
        floats: where in it numbers lie that may be approximated on their way to a node behind.
        inexact_at: URLs at which an approximation of the snapshot is.
        surpassed: a newer snapshot of the lineage that a memory node has, and this host a portion of only.
        whole: of one host's portion of a snapshot: whether the portions of all hosts are known to be at memory nodes.
        overtaken: likewise: whether a newer snapshot is known to be whole.
        brings: likewise: whether it is to be brought to the durable tier, also if a newer one is whole.
        forsaken: likewise: whether the others' are not expected at the durable tier any more.
        portion: the ranges of a snapshot at a memory node that the memory holds; all else in it is something else.
        given: whether other processes look at its memory for as long as they like: nothing is written to that any more.
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
    given: bool = False
    spare: bool = False
    followed: bool = False
    committed_s: float = 0.0

    def takes(self, nbytes: int) -> bool:
        """Whether a snapshot of ``nbytes`` can be written to its memory."""
        return self.capacity >= nbytes and not self.given

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

    Where a memory node has a newer one, this host has none of these. Of portions of hosts, which lie at several nodes,
    each counts that is not known to be of an older snapshot than a whole one.
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
    """The slots whose snapshot is nowhere else, if only a memory node has a newer one: that node may be lost."""
    return {slot for slot in slots if slot.surpassed and not (slot.safe or slot.settled)}


def bases_of(slots: Iterable[Slot]) -> set[Slot]:
    """The slots that hold the newest snapshot of each run that is at a node behind this one, for each such node."""
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
    there, since a newer one is at its place; or the other hosts' portions of it are not expected any more. What a node
    behind holds goes late: only changes to it need to be sent.
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
