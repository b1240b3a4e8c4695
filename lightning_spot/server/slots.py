"""What a slot of the ring holds, where that is to be, and when it may be reused.

Decisions only: no memory is made here. What a slot owes to a place is never noted: it is what should be there, minus
what was seen there.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_spot.config import names_server
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.snapshot.manifest import Manifest, Order, ShardOf
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.snapshot.shards import (
    Image,
    JoinedImage,
    Status,
    is_evictable,
    registers_of,
    sections,
    status,
    why_aborted,
)
from lightning_spot.store.retention import worth_keeping
from lightning_spot.store.store import newest_first


class SlotState(enum.Enum):
    """What a slot is doing."""

    FREE = "free"
    FILLING = "filling"
    HELD = "held"
    """It holds a snapshot, a shard of one that may still be pending, a file, or why there will be no shard."""


class Making(enum.Enum):
    """Whether memory is made for a slot that is asked for."""

    NOW = "now"
    """Memory is made if need be; the caller waits for it."""
    NEVER = "never"
    """No memory is made: only a slot that has some already will do."""
    SPARE = "spare"
    """Memory is made ahead, only if the next snapshot would find no slot."""
    BEYOND = "beyond"
    """As ``SPARE``, also beyond the bound of slots where snapshots of the run overlap, see
    :func:`~lightning_spot.server.slot_choice.bound`."""

    @property
    def is_ahead(self) -> bool:
        """Whether a slot is made before anybody needs it."""
        return self in (Making.SPARE, Making.BEYOND)


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers below that a run's snapshots go to from here.

    Attributes:
        own: URLs that this server brings them to by itself: at other servers, and at storage.
        carried: URLs that a server behind this one writes; what is safe there is learned from it.
    """

    own: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """The URLs of both."""
        return (*self.own, *self.carried)


class Reached(enum.IntEnum):
    """How far a snapshot that counts has come: each includes what comes before it."""

    COMMITTED = 0
    REPLICATED = 1
    """At a server behind this one."""
    PERSISTED = 2
    """At storage."""


class Mark(enum.Enum):
    """What was seen of a snapshot at a place below."""

    SAFE = "safe"
    """It is there; of a shard that failed, why."""
    INEXACT = "inexact"
    """An approximation of it is: it is owed there still."""
    REFUSED = "refused"
    """The place refuses it for good (a fence), or will never have the rest of the snapshot."""


@dataclass(slots=True)
class Commit:
    """How what a slot holds was committed.

    Attributes:
        sequence: counts the commits of this server.
        at_s: when (monotonic).
        destinations: URLs a user's file goes to instead of its run's tiers.
        floats: where in it numbers lie that may be approximated on their way to a server behind.
        after_s: so long after the writer's snapshot before it; infinity for the first.
        checked_s: when its bytes were read last, and had the checksums of the manifest (monotonic).
    """

    sequence: int = 0
    at_s: float = 0.0
    destinations: tuple[str, ...] | None = None
    floats: tuple[Floats, ...] = ()
    after_s: float = float("inf")
    checked_s: float = float("-inf")


@dataclass(eq=False, slots=True)
class Slot:
    """One slot of the ring; its fields change only under the ring's lock. What it owes is no field, see :func:`owed`.

    Attributes:
        index: place in the ring.
        state: what it is doing.
        memory: its memory, once that is made.
        reserved_bytes: size of the memory that is being made.
        run: key of the run that fills or holds it.
        writer: number of the rank that fills it, or has filled it last; 0 where one writes all.
        manifest: of what it holds. A shard that failed is of no bytes, and needs no memory.
        commit: how what it holds was committed.
        seen: what was seen of it at places below, by URL.
        durable_or_superseded: whether its sender said that it, or a newer one of its lineage, is durable.
        readers: how many are reading it now.
        is_prefault: whether it is being made ahead: a snapshot that needs a slot waits for it, and none other is made.
    """

    index: int
    state: SlotState = SlotState.FREE
    memory: SlotMemory | None = None
    reserved_bytes: int = 0
    run: str = ""
    writer: int = 0
    manifest: Manifest | None = None
    commit: Commit = field(default_factory=Commit)
    seen: dict[str, Mark] = field(default_factory=dict)
    durable_or_superseded: bool = False
    readers: int = 0
    is_prefault: bool = False

    @property
    def capacity(self) -> int:
        """Bytes of memory the slot holds, or is about to hold."""
        return self.memory.capacity if self.memory is not None else self.reserved_bytes

    @property
    def generation(self) -> int:
        """Of its memory; 0 while it has none."""
        return self.memory.generation if self.memory is not None else 0

    @property
    def content(self) -> Manifest:
        """The manifest of what it holds; it holds something."""
        assert self.manifest is not None
        return self.manifest

    @property
    def snapshot(self) -> Manifest | None:
        """The snapshot, or shard of one, that it holds, if that is no user's file."""
        return self.manifest if self.manifest is not None and not self.manifest.is_file else None

    @property
    def shard(self) -> ShardOf | None:
        """What of a snapshot it holds, if that is one writer's shard of it."""
        return self.manifest.shard if self.manifest is not None else None

    @property
    def safe(self) -> list[str]:
        """URLs at which it is, or why it failed."""
        return self._at(Mark.SAFE)

    @property
    def refused(self) -> list[str]:
        """URLs that refuse it for good."""
        return self._at(Mark.REFUSED)

    @property
    def is_safe(self) -> bool:
        """Whether what it holds is safe elsewhere, or something newer."""
        return self.durable_or_superseded or Mark.SAFE in self.seen.values()

    @property
    def is_durable(self) -> bool:
        """Whether what it holds is at storage, or something newer."""
        return self.durable_or_superseded or not _are_servers(self.safe)  # of no URL, "all are servers" is true

    def lacks(self, urls: Iterable[str]) -> list[str]:
        """Those of ``urls`` that neither have it nor refuse it."""
        return [url for url in urls if self.seen.get(url) not in (Mark.SAFE, Mark.REFUSED)]

    def view(self, nbytes: int | None = None) -> memoryview:
        """The slot's bytes; by default those of its snapshot. The caller must have leased or pinned it."""
        wanted = nbytes if nbytes is not None else self.manifest.nbytes if self.manifest else 0
        return self.memory.view(wanted) if self.memory is not None else memoryview(b"")

    def forget(self) -> None:
        """Hold nothing any more; the memory stays."""
        self.state, self.run, self.manifest, self.commit = SlotState.FREE, "", None, Commit()
        self.seen, self.durable_or_superseded, self.is_prefault = {}, False, False

    def _at(self, mark: Mark) -> list[str]:
        return [url for url, seen in self.seen.items() if seen is mark]


SlotSet = dict[Slot, None]
"""Slots in the order in which they came to it."""


class Slots(list[Slot]):
    """All slots of a server, and where each of them belongs: with thousands, none looks at all of them for one.

    Args:
        slots: that there are already.

    Attributes:
        nbytes: capacity of all of them.
        free: those that are free, by their capacity.
        runs: those that each run fills or holds.
        writers: likewise those of each of its writers, by the run and the number.
        snapshots: those that hold shards of a snapshot, the whole of it, or a file, by the run and its name.
        names: likewise, but each shard by its own name; two where one is about to replace the other.
        attempts: highest attempt that each run has had here, since it had nothing last.
    """

    def __init__(self, slots: Iterable[Slot] = ()) -> None:
        super().__init__(slots)
        self.nbytes = 0
        self.free: dict[int, SlotSet] = {}
        self.runs: dict[str, SlotSet] = {}
        self.writers: dict[tuple[str, int], SlotSet] = {}
        self.snapshots: dict[tuple[str, str], SlotSet] = {}
        self.names: dict[tuple[str, str], SlotSet] = {}
        self.attempts: dict[str, int] = {}
        self._noted: dict[Slot, tuple[int, str, list[tuple[dict[Any, SlotSet], Any]]]] = {}
        self._next = max((slot.index for slot in self), default=-1) + 1
        for slot in self:
            self.note(slot)

    def new(self) -> Slot:
        """One more, which is free and has no memory yet."""
        slot = Slot(self._next)
        self._next += 1
        self.append(slot)
        self.note(slot)
        return slot

    def note(self, slot: Slot) -> None:
        """Something of a slot has changed: its state, its memory, its writer, or what it holds."""
        nbytes, run, entries = self._noted.get(slot, (0, "", []))
        for index, key in entries:
            del index[key][slot]
            if not index[key]:
                del index[key]
        entries = [(self.free, slot.capacity)]
        if slot.state is not SlotState.FREE:
            entries = [(self.runs, slot.run), (self.writers, (slot.run, slot.writer))]
            if (content := slot.manifest) is not None:
                entries += [(self.snapshots, (slot.run, content.snapshot)), (self.names, (slot.run, content.name))]
                self.attempts[slot.run] = max(content.attempt, self.attempts.get(slot.run, 0))
        for index, key in entries:
            index.setdefault(key, {})[slot] = None
        if run not in self.runs:
            self.attempts.pop(run, None)
        self.nbytes += slot.capacity - nbytes
        self._noted[slot] = slot.capacity, slot.run, entries


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A snapshot or file in memory that can be read as one: it is in one slot, or its shards are in several.

    Attributes:
        slots: that hold it; of several, in the order of their writers.
        manifests: of what each of them holds.
    """

    slots: tuple[Slot, ...]
    manifests: tuple[Manifest, ...]

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Resident:
        """What slots hold now."""
        filled = [slot for slot in slots if slot.manifest is not None]
        return cls(tuple(filled), tuple(slot.content for slot in filled))

    @property
    def is_here(self) -> bool:
        """Whether it is still what the slots hold."""
        return all(slot.manifest is manifest for slot, manifest in self.each())

    @property
    def safe(self) -> list[str]:
        """URLs at which all of it is."""
        return [url for url in self.slots[0].safe if all(slot.seen.get(url) is Mark.SAFE for slot in self.slots)]

    def each(self) -> Iterator[tuple[Slot, Manifest]]:
        """Each slot, and the manifest of what it holds."""
        return zip(self.slots, self.manifests, strict=True)

    def image(self) -> Image:
        """Its bytes. The caller must have it pinned."""
        views = [slot.view(manifest.nbytes) for slot, manifest in self.each()]
        return views[0] if len(views) == 1 else JoinedImage(sections(self.manifests), views)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Slot, int, int]]:
        """Yield ``(slot, start, stop)`` of what lies in a range of its image: in which slot, and where there."""
        if len(self.slots) == 1:
            yield self.slots[0], start, stop
            return
        for writer, first, last in JoinedImage(sections(self.manifests), ()).pieces(start, stop):
            yield self.slots[writer], first, last


# -- snapshots, and what is known of them beyond what is here ---------------------------------------------------------


@dataclass(slots=True)
class Known:
    """What is known of a run's snapshots beyond what the slots here hold.

    Attributes:
        committed: orders of the newest snapshots that are known to be committed over snapshot servers, or at storage,
            by lineage. What the rings of hosts hold does not count: it is lost sooner.
        reached: the newest snapshot that is known to have come so far.
        seen_registers: that other places have shown, by name of the snapshot.
    """

    committed: dict[str, set[Order]] = field(default_factory=dict)
    reached: dict[Reached, Manifest] = field(default_factory=dict)
    seen_registers: dict[str, dict[int, ShardOf]] = field(default_factory=dict)


ORPHANED_S = 3600.0
"""A shard whose snapshot is not complete after so long gives way to others: its trainer is gone."""

_NOTHING = Known()


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A snapshot, as far as it is here: in one slot, or in those of several writers' shards.

    Attributes:
        slots: in the order of their writers.
        state: what has become of it, as far as is known here.
        why: if it is aborted, the reason, for people.
        is_here: whether all of it is.
        watermark: order of the newest snapshot of its lineage that is known to be committed, it may be its own; for an
            exact snapshot that of the newest exact one, since no approximation supersedes it.
        has_newer: whether all of what supersedes it is here, too.
    """

    slots: tuple[Slot, ...]
    state: Status
    why: str
    is_here: bool
    watermark: Order | None = None
    has_newer: bool = False

    @property
    def manifest(self) -> Manifest:
        """That of the snapshot, or of the first of the shards that are here."""
        return self.slots[0].content

    @property
    def reached(self) -> Reached | None:
        """How far it has come; ``None`` if it does not count. A shard says nothing of the others."""
        if self.state is not Status.COMMITTED:
            return None
        if not (self.is_here or any(slot.durable_or_superseded for slot in self.slots)):
            return Reached.COMMITTED
        if all(slot.is_durable for slot in self.slots):
            return Reached.PERSISTED
        return Reached.REPLICATED if all(slot.is_safe for slot in self.slots) else Reached.COMMITTED

    @property
    def persist(self) -> bool:
        """Whether storage is to have it."""
        shard = self.manifest.shard
        return shard is None or shard.persist

    @property
    def ends_run(self) -> bool:
        """Whether the run has come to its end with it. A server that has a shard says nothing of the others."""
        is_durable = any(slot.is_durable for slot in self.slots)
        is_known = self.state is Status.COMMITTED or (self.state is Status.PENDING and is_durable)
        return self.manifest.complete and is_known

    # The rules by which slots are reused, each in one place; :class:`View` says which slots they give.

    @property
    def is_superseded(self) -> bool:
        """Whether something newer of its lineage is committed, which a resume takes instead."""
        return self.watermark is not None and self.manifest.order < self.watermark

    @property
    def is_newest(self) -> bool:
        """Whether a resume would miss it: nothing newer is committed, and it is, or may still become so."""
        return self.state is not Status.ABORTED and not self.is_superseded

    def is_evictable(self, now_s: float) -> bool:
        """Whether its slots may be reused, as far as it is up to the snapshot.

        ============================================  ===================================================
        superseded, or aborted                        yes
        … but only this one is whole here             as the newest: the server that has the other may be lost
        committed, the newest of its lineage          if each slot is safe at a tier, or what is newer is
        … of which a tier will never have the rest    after :data:`ORPHANED_S`
        … which is an approximation                   yes: it keeps no memory from exact ones
        pending                                       after :data:`ORPHANED_S`
        ============================================  ===================================================
        """
        is_orphan = now_s - max(slot.commit.at_s for slot in self.slots) > ORPHANED_S
        if self.state is Status.PENDING:
            return is_orphan
        is_given_up = is_orphan and not self.is_here and all(slot.refused for slot in self.slots)
        is_safe = is_given_up or not self.manifest.exact or all(slot.is_safe for slot in self.slots)
        watermark = None if self.is_here and not self.has_newer else self.watermark
        return is_evictable(self.manifest.order, self.state, watermark, is_durable=is_safe)


def grouped(slots: Iterable[Slot], known: Known = _NOTHING) -> list[Group]:
    """The snapshots that slots of a run hold, or hold shards of."""
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot.snapshot is not None:
            found.setdefault(slot.snapshot.snapshot, []).append(slot)
    marks, here = {lineage: list(orders) for lineage, orders in known.committed.items()}, dict[str, Order]()
    for name, shards in found.items():
        first = shards[0].content
        if first.shard is None or status(shards_in(shards), first.order) is Status.COMMITTED:
            here[name] = first.order
            marks.setdefault(first.lineage, []).append(first.order)
    groups, whole = [], set(here.values())
    for name, shards in found.items():
        first = shards[0].content
        orders, state, why = marks.get(first.lineage, []), Status.COMMITTED, ""
        if name not in here:  # else no register that is elsewhere says anything new
            newest = max(orders, default=None)
            state, why = status_of(known, name, first.lineage, first.order, shards_in(shards), newest)
        by_writer = tuple(sorted(shards, key=lambda slot: slot.writer))
        superseding = [order for order in orders if order[2] or not first.exact]  # [2] is 0 of an approximation
        has_newer = any(first.order < order and order in whole for order in superseding)
        groups.append(Group(by_writer, state, why, name in here, max(superseding, default=None), has_newer))
    return groups


def status_of(
    known: Known, name: str, lineage: str, order: Order, here: dict[int, ShardOf], watermark: Order | None
) -> tuple[Status, str]:
    """What has become of a snapshot, and why it is aborted.

    Args:
        known: beyond what is here.
        name: of the snapshot.
        lineage: of it.
        order: of it.
        here: registers that are here. It counts where all of them are, here or elsewhere: not some here and some there.
        watermark: see :func:`~lightning_spot.snapshot.shards.status`.
    """
    if order in known.committed.get(lineage, ()):
        return Status.COMMITTED, ""
    seen = {**known.seen_registers.get(name, {}), **here}
    if why := why_aborted(seen):
        return Status.ABORTED, why
    state = status(here, order, watermark)
    return state, "a newer snapshot is complete" if state is Status.ABORTED else ""


def shards_in(slots: Iterable[Slot]) -> dict[int, ShardOf]:
    """What slots hold of a snapshot, by the number of the writer."""
    return registers_of(slot.content for slot in slots)


class View:
    """The snapshots and files of a run as they are now: what each slot owes, and which may be reused.

    Everything in it follows from what the slots hold, what was seen of it at other places, and where the run goes.

    Args:
        slots: of the run, committed ones and others.
        tiers: where its snapshots go.
        known: of its snapshots, beyond what is in the slots.

    Attributes:
        slots: those that hold something.
        groups: its snapshots.
        owed: URLs at which what a slot holds is owed, for those slots that owe it anywhere.
    """

    def __init__(self, slots: Iterable[Slot], tiers: Tiers = Tiers(), known: Known = _NOTHING) -> None:
        self.slots = [slot for slot in slots if slot.manifest is not None]
        self.groups = grouped(self.slots, known)
        self.owed = {slot: urls for slot, urls in owed(self.slots, self.groups, tiers) if urls}

    @functools.cached_property
    def newest(self) -> set[Slot]:
        """The slots of the newest exact snapshot of each lineage, and of what is newer, or may become so."""
        return {slot for group in self.groups if group.is_newest for slot in group.slots}

    @functools.cached_property
    def bases(self) -> set[Slot]:
        """The slots that hold the newest of each writer that is at a server behind this one, for each of these."""
        newest = {
            (slot.writer, url): slot
            for slot in sorted(self.slots, key=lambda slot: slot.commit.sequence)
            for url in slot.safe
            if slot.snapshot is not None and names_server(url)
        }
        return set(newest.values())

    @property
    def only_here(self) -> set[Slot]:
        """The slots whose snapshot or file is still owed to a tier, or is the newest and safe nowhere.

        What is at storage, and owed to servers only, is not among them: no more than a replica is missing.
        """
        unsafe = (slot for slot in self.slots if not (slot.is_safe or slot.refused))
        newest = (slot for slot in unsafe if slot in self.newest or slot.snapshot is None)
        lack_a_replica = {slot for slot, urls in self.owed.items() if slot.is_durable and _are_servers(urls)}
        return {*self.owed, *newest} - lack_a_replica

    def evictable(self, now_s: float) -> list[Slot]:
        """Slots that may be reused when memory is needed: nobody reads them, they owe nothing, and the content may go.

        A snapshot may go by :meth:`Group.is_evictable`; a file once it is safe at a tier, or refused there, since a
        newer one is at its place.
        """
        may_go = {slot for group in self.groups if group.is_evictable(now_s) for slot in group.slots}
        may_go |= {slot for slot in self.slots if slot.snapshot is None and (slot.is_safe or slot.refused)}
        return [slot for slot in self.slots if slot in may_go and not slot.readers and slot not in self.owed]

    def superfluous(self, keep: int, now_s: float) -> list[Slot]:
        """Evictable slots that are freed though no memory is needed: what is superseded, beyond the newest snapshots.

        Args:
            keep: so many of these stay.
            now_s: the time (monotonic).
        """
        committed = [group for group in self.groups if group.state is Status.COMMITTED]
        # What is whole here stays until something newer is, too: the place that has all of that may be lost.
        kept = [
            manifest
            for some in (committed, [group for group in committed if group.is_here])
            for manifest in worth_keeping(newest_first([group.manifest for group in some]))[: max(1, keep)]
        ]
        gone = [group for group in self.groups if group.is_superseded and group.manifest not in kept]
        over = {slot for group in gone for slot in group.slots} - self.bases
        return [slot for slot in self.evictable(now_s) if slot in over] if over else []


def _are_servers(urls: Iterable[str]) -> bool:
    return all(names_server(url) for url in urls)


def owed(slots: Iterable[Slot], groups: Sequence[Group], tiers: Tiers) -> Iterator[tuple[Slot, list[str]]]:
    """Yield for each slot of a run the URLs at which its content is to be, and is not.

    A file is owed to all tiers, a snapshot see :func:`_wanted`. Why a shard failed is owed everywhere, until something
    newer is committed; but not where a server behind this one brings it to storage: nobody tells of it.
    """
    for slot in slots:
        if slot.snapshot is None:
            yield slot, slot.lacks(tiers.all if slot.commit.destinations is None else slot.commit.destinations)
    told = (*tiers.own, *(url for url in tiers.carried if names_server(url)))
    for group in groups:
        wanted = _wanted(group, groups, tiers)
        for slot in group.slots:
            yield slot, slot.lacks((() if group.is_superseded else told) if slot.content.why_failed else wanted)


def _wanted(group: Group, groups: Sequence[Group], tiers: Tiers) -> Sequence[str]:
    """Where a snapshot is to be.

    =================================================  =============================================================
    the newest, or the end of the run                  at all tiers
    superseded, and all of it is here                  at storage, if it is exact and no newer one here is meant for it
    superseded, and committed over several places      at storage that this server writes, until that has a newer one:
                                                       all places must bring the same
    not meant for storage, not committed, or aborted   nowhere
    =================================================  =============================================================
    """
    manifest, is_committed = group.manifest, group.state is Status.COMMITTED
    if group.is_newest or (manifest.complete and is_committed):
        return tiers.all
    if not (group.persist and is_committed):
        return ()
    storage = [url for url in tiers.all if not names_server(url)]
    of_lineage = (each for each in groups if each.manifest.lineage == manifest.lineage)
    newer = [each for each in of_lineage if each.manifest.order > manifest.order]
    if group.is_here:
        is_last = not any(each.is_here and each.persist and each.manifest.exact for each in newer)
        return storage if manifest.exact and is_last else ()
    # What a server brings there, it has all of, though the slots of other writers here may be reused by now.
    mine = (url for url in storage if url not in tiers.carried)
    return [url for url in mine if not any(each.slots[0].seen.get(url) is Mark.SAFE for each in newer)]


def evictable(views: Iterable[View], now_s: float) -> list[Slot]:
    """Slots that may be reused, first what is missed least: see :attr:`View.newest` and :attr:`View.bases`."""
    found = [
        (slot in view.newest, slot in view.bases, slot.commit.sequence, slot)
        for view in views
        for slot in view.evictable(now_s)
    ]
    return [slot for *_, slot in sorted(found, key=lambda each: each[:3])]


def file_version(manifest: Manifest | None) -> tuple[int, int, float]:
    """What makes a file of a name newer than another; snapshots are committed once, by their one attempt."""
    if manifest is None or not manifest.is_file:
        return (0, 0, 0.0)
    return (manifest.attempt, manifest.step, manifest.created_unix_s)
