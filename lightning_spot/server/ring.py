"""The ring: slots of memory that runs fill in turn, and what each of them owes to the tiers below.

A new snapshot gets a free slot, a new one, or that of a snapshot which may go, see :mod:`.slot_choice`. Which may go,
and what each tier is owed, follows from what the slots hold and what was seen elsewhere, see :mod:`.slots`.

A slot holds a snapshot, a user's file, or what one of several writers has written of a snapshot: its shard. Where the
shards of all writers are here, they are read as one.

Memory is made, checked and given back outside the lock: gigabytes take seconds. Under it, and under the registry's,
nothing is waited for but processors and tmpfs, where commit records and notes of runs are written: no socket, no
storage, and no standard error, unless such a record or a plan fails. So the event loop may take both.

Parts of a snapshot are made of an earlier one that both ends hold, its base, instead of being sent. The receiver pins
its base as long as an upload needs it. The sender only looks at its own: if it kept the slot from being filled, it
would need one slot more, or training would pay with snapshots that are skipped. What it makes of a base that was taken
meanwhile is not used, and would not have the right checksum.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_spot.config import names_server
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SnapshotFailedError,
    SnapshotNotFoundError,
)
from lightning_spot.protocol.listening import open_files
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.say import say
from lightning_spot.server.area import SlotArea
from lightning_spot.server.runs import writer_of
from lightning_spot.server.slot_choice import (
    MOST_SLOTS,
    Limits,
    SlotChoice,
    SlotRequest,
    bound,
    capacity_for,
    find_room,
    why_full,
)
from lightning_spot.server.slots import (
    Known,
    Making,
    Mark,
    Reached,
    Resident,
    Slot,
    Slots,
    SlotState,
    Tiers,
    View,
    evictable,
    file_version,
    shards_in,
    status_of,
)
from lightning_spot.snapshot.manifest import Manifest, Order, ShardOf, order_name, shard_name, snapshot_order
from lightning_spot.snapshot.shards import Image, Status, assemble, check_of_one, failed, registers_of, status

logger = logging.getLogger(__name__)

MOST_ABORTED = 16
"""Snapshots whose failures stay, although nothing newer is committed: their writers ask why."""

LOOK_S = 0.25
"""How often a thread that waits for a change looks by itself."""

_NOWHERE = Tiers()
_MOST_MARKS = 64  # snapshots of a run of which it is remembered what has become of them: who waits for one asks soon


class Ring:
    """The slots of a server, bounded in number or in memory only, and what is known of them.

    All methods may be called from any thread.

    Args:
        slots: most slots of each writer of a run; ``None`` for as many as fit the memory, see
            :class:`~lightning_spot.server.slot_choice.Limits`.
        memory_bytes: most bytes all slots together may hold.
        area: directory on tmpfs for the slots, ``None`` for memory files; what a killed server left in it is taken
            over.
        run_memory_bytes: most bytes the slots of one run may hold; ``None`` for no such limit.

    Attributes:
        slots: all of them.
        memory_bytes, area: see above.
        lock: of all that the ring holds.
        changed: the same lock; notified whenever something changed.
        changes: how often that was.
        begun_s: when the ring was made (monotonic); what was left in the area may be asked for soon.
        opened_s: when each run was opened last, or was asked for by the host of its trainer, as long as that lives
            (monotonic); minus infinity once its trainer on this host has gone.
        known: of the snapshots of each run, beyond what is in the slots; see :meth:`known_of`.
        stale: keys of runs of which something changed that nobody has looked at since.
    """

    def __init__(
        self,
        *,
        slots: int | None,
        memory_bytes: int,
        area: Path | None = None,
        run_memory_bytes: int | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.memory_bytes, self.area = memory_bytes, SlotArea(area) if area is not None else None
        self.slots = Slots(self.area.adopt() if self.area is not None else ())
        self.changes = 0
        self.begun_s = time.monotonic()
        self.opened_s: dict[str, float] = {}
        self.known: dict[str, Known] = {}
        self.stale = set(self.slots.runs)
        # Two files for each, one of them in its mapping: half is left for connections and tiers.
        self._limits = Limits(slots, memory_bytes, run_memory_bytes, min(MOST_SLOTS, open_files() // 4))
        self._full = (-1, 0)  # how often things had changed when there was no room, and for how many bytes
        self._sequence = max((slot.commit.sequence for slot in self.slots), default=0)
        self._views: dict[str, View] = {}
        self._assembled: dict[tuple[str, str], tuple[tuple[Manifest, ...], Manifest]] = {}
        self._tiers: dict[str, Tiers] = {}
        self._watchers: list[Callable[[], None]] = []

    # -- where a run's snapshots go, and are ----------------------------------------------------------------------

    def set_tiers(self, run: str, tiers: Tiers | None) -> None:
        """Say where a run's snapshots go from now on (``None``: it is forgotten); what is owed follows from it."""
        with self.changed:
            if self._tiers.get(run) != tiers:
                self._tiers.pop(run, None)
                if tiers is not None:
                    self._tiers[run] = tiers
                self.touch(run)

    def tiers(self, run: str) -> Tiers:
        """Where a run's snapshots go."""
        return self._tiers.get(run, _NOWHERE)

    def destinations(self) -> set[str]:
        """URLs that any run goes to."""
        with self.changed:
            return {url for tiers in self._tiers.values() for url in tiers.all}

    def carried(self) -> set[str]:
        """URLs that other servers write, and this one does not."""
        with self.changed:
            return self.destinations() - {url for tiers in self._tiers.values() for url in tiers.own}

    def mark(self, resident: Resident, url: str, mark: Mark) -> None:
        """Note what was seen of a snapshot, or of shards of one, at a tier: safe is what that has said to have."""
        with self.changed:
            here = [(slot, manifest) for slot, manifest in resident.each() if slot.manifest is manifest]
            seen = [(slot, manifest) for slot, manifest in here if slot.seen.get(url) is not mark]
            for slot, _ in seen:
                slot.seen[url] = mark
                self._record(slot)
            for slot, manifest in seen[:1]:
                of_it = self.registers(slot.run, manifest.snapshot).values()
                is_there = all(each.seen.get(url) is Mark.SAFE for each in of_it)
                is_there = is_there and status(shards_in(of_it), manifest.order) is Status.COMMITTED
                # A shard that is safe at storage is part of a snapshot that counts there.
                if mark is Mark.SAFE and (is_there or manifest.shard is None or not names_server(url)):
                    self.reach(slot.run, manifest, url)
                    if manifest.shard is not None:
                        self.mark_committed(slot.run, manifest.lineage, manifest.order)
                self.touch(slot.run)

    def reach(self, run: str, manifest: Manifest, url: str) -> None:
        """Note that a tier has a snapshot, as :meth:`newest` tells."""
        reached = Reached.REPLICATED if names_server(url) else Reached.PERSISTED
        with self.changed:
            newest = self.known.setdefault(run, Known()).reached
            if not manifest.is_file and (reached not in newest or newest[reached].order < manifest.order):
                newest[reached] = manifest

    def newest(self, run: str) -> dict[str, Manifest]:
        """The newest snapshot of a run that is committed, replicated and persisted, as far as known here."""
        with self.changed:
            found = list(self.known_of(run).reached.items())
            found += [(each.reached, each.manifest) for each in self.view(run).groups if each.reached is not None]
        found.sort(key=lambda each: each[1].order)  # below, the last of each key stays: the newest
        return {least.name.lower(): manifest for least in Reached for reached, manifest in found if reached >= least}

    def forget_refusals(self, run: str) -> None:
        """A later attempt writes from here now, or the trainer is gone: what tiers refused is owed to them again."""
        with self.changed:
            for slot in self.contents(run):
                if slot.refused and slot.snapshot is not None:
                    slot.seen = {url: mark for url, mark in slot.seen.items() if mark is not Mark.REFUSED}
                    self._record(slot)
            self.touch(run)

    def mark_lost(self, slot: Slot, manifest: Manifest, url: str) -> None:
        """A tier has lost a snapshot that was safe there: it is owed again if it is the newest."""
        with self.changed:
            if slot.manifest is manifest and slot.seen.get(url) is Mark.SAFE:
                del slot.seen[url]
                self._record(slot)
                self.touch(slot.run)

    def mark_persisted(self, run: str, lineage: str, order: Order) -> None:
        """Note that a snapshot is durable although nobody brought it there from here: it, and older ones, may go."""
        with self.changed:
            here = [slot for slot in self.contents(run) if slot.snapshot is not None and not slot.durable_or_superseded]
            found = [slot for slot in here if slot.content.lineage == lineage and slot.content.order <= order]
            for slot in found:
                slot.durable_or_superseded = True
                self._record(slot)
                self.reach(run, slot.content, "")  # storage, of whatever URL
            if found:
                self.touch(run)

    # -- when a snapshot of several writers counts ----------------------------------------------------------------

    def registers(self, run: str, name: str) -> dict[int, Slot]:
        """The slots that hold shards of a snapshot, or why there will be none, by the number of the writer."""
        with self.changed:
            found = self.slots.snapshots.get((run, name), ())
            return {slot.writer: slot for slot in found if slot.shard is not None}

    def view(self, run: str) -> View:
        """The snapshots of a run that are here, whole or not, and what is owed of it. Call it under the lock."""
        if (view := self._views.get(run)) is None:
            view = View(self.slots.runs.get(run, ()), self.tiers(run), self.known_of(run))
            if run in self.slots.runs:  # anybody may ask for runs that are not here, by any name
                self._views[run] = view
        return view

    def views(self) -> list[View]:
        """Those of all runs. Call it under the lock."""
        return [self.view(run) for run in self.slots.runs]

    def owed(self, slots: Iterable[Slot]) -> list[str]:
        """URLs at which some of what slots hold is owed."""
        with self.changed:
            urls = (url for slot in slots if slot.run for url in self.view(slot.run).owed.get(slot, ()))
            return list(dict.fromkeys(urls))

    def known_of(self, run: str) -> Known:
        """What is known of a run's snapshots, to be read only. Call it under the lock."""
        return self.known.get(run) or Known()

    def status_of(self, run: str, name: str) -> tuple[Status, str]:
        """What has become of a snapshot, as far as is known here, and why it is aborted, for people."""
        with self.changed:
            for group in self.view(run).groups:
                if group.manifest.snapshot == name:
                    return group.state, group.why
            order, committed = snapshot_order(name) or (0, 0, 0), self._committed_elsewhere(run)
            committed += [group.manifest.order for group in self.view(run).groups if group.is_here]
            if order in committed:
                return Status.COMMITTED, ""
            return status_of(self.known_of(run), name, "", order, {}, max(committed, default=None))

    def mark_committed(self, run: str, lineage: str, order: Order) -> None:
        """Note that a snapshot is committed over snapshot servers, or at storage: it makes older ones superfluous."""
        with self.changed:
            known = self.known.setdefault(run, Known())
            before = known.committed.get(lineage, set())
            orders = set(sorted({*before, order})[-_MOST_MARKS:])
            if orders == before:
                return
            known.committed[lineage], newest = orders, max(orders)
            for name in [name for name in known.seen_registers if (snapshot_order(name) or newest) < newest]:
                del known.seen_registers[name]
            self.touch(run)

    def raise_watermark(self, run: str, name: str) -> None:
        """Note that a snapshot is committed, as who writes the run says, see :attr:`RunInfo.committed`."""
        if (order := snapshot_order(name)) is None:
            return
        with self.changed:
            for slot in self.slots.runs.get(run, ()):  # an attempt is of one lineage
                if slot.snapshot is not None and slot.snapshot.attempt == order[0]:
                    self.mark_committed(run, slot.snapshot.lineage, order)
                    return

    def newest_committed(self, run: str) -> str:
        """Name of the newest snapshot known to be committed over snapshot servers, or at storage; ``""`` for none."""
        with self.changed:
            return order_name(max(self._committed_elsewhere(run), default=None))

    def _committed_elsewhere(self, run: str) -> list[Order]:
        return [order for orders in self.known_of(run).committed.values() for order in orders]

    def see(self, run: str, name: str, registers: Mapping[int, ShardOf]) -> None:
        """Note which registers of a snapshot other places have shown."""
        with self.changed:
            seen = self.known.setdefault(run, Known()).seen_registers
            if seen.get(name) != registers:
                seen[name] = dict(registers)
                while len(seen) > _MOST_MARKS:
                    del seen[next(iter(seen))]
                self.touch(run)

    # -- what slots hold ------------------------------------------------------------------------------------------

    def contents(self, run: str | None = None, writer: int | None = None) -> list[Slot]:
        """Slots that hold something, newest first; if only these are meant, of a run, or of a writer of it."""
        with self.changed:
            slots: Iterable[Slot] = self.slots
            if run is not None:
                of_run = self.slots.runs.get(run, ())
                slots = of_run if writer is None else self.slots.writers.get((run, writer), ())
            found = [slot for slot in slots if slot.manifest is not None]
            return sorted(found, key=lambda slot: slot.commit.sequence, reverse=True)

    def highest_attempt(self, run: str) -> int:
        """Highest attempt of what is here of a run; 0 if nothing is."""
        with self.changed:
            return self.slots.attempts.get(run, 0)

    def readable(self, run: str, name: str | None = None) -> list[tuple[Resident, Manifest]]:
        """What anybody may read of a run, newest first; a snapshot whose shards are all here as one.

        Of a snapshot that is not complete here, its shards are listed, and those that failed, too.

        Args:
            run: key of the run.
            name: of a snapshot, a shard or a file, if only that is meant.
        """
        with self.changed:
            together: dict[Slot, tuple[Resident, Manifest]] = {}
            for group in self.view(run).groups:
                if group.is_here and group.manifest.shard is not None:
                    resident = Resident.of(group.slots)
                    try:
                        together |= dict.fromkeys(resident.slots, (resident, self._whole(run, resident.manifests)))
                    except CorruptSnapshotError as error:  # they do not fit each other
                        logger.debug("%s: %s", group.manifest.snapshot, error)
            found: dict[Resident, Manifest] = {}
            for slot in self.contents(run):
                alone = Resident.of([slot]), slot.content
                resident, manifest = together.get(slot, alone) if name != slot.content.name else alone
                if name in (None, manifest.name):
                    found[resident] = manifest
            return list(found.items())

    def _whole(self, run: str, shards: tuple[Manifest, ...]) -> Manifest:
        """The manifest of a snapshot, of those of its shards."""
        key = run, shards[0].snapshot
        known = self._assembled.get(key)
        if known is None or known[0] != shards:
            here = {(slot.run, slot.manifest.snapshot) for slot in self.slots if slot.manifest is not None}
            self._assembled = {key: each for key, each in self._assembled.items() if key in here}
            known = self._assembled[key] = shards, assemble(shards)
        return known[1]

    def check_fits(self, run: str, manifest: Manifest) -> None:
        """Refuse a shard that is there as another one, or was forged: who saw a register is not to be wrong.

        A snapshot of which all registers are here can be put together. While others are missing, it is enough that a
        shard fits one of those that are here: they fit each other.

        Raises:
            SnapshotFailedError: if the shards of its snapshot that are here, and it, can never be one image.
        """
        if manifest.shard is None:
            return
        with self.changed:
            of_it = [slot.content for slot in self.slots.snapshots.get((run, manifest.snapshot), ())]
            others = [each for each in of_it if each.name != manifest.name]
            is_last = len(of_it) + 1 >= manifest.shard.writers
            shards = tuple(sorted([*(others if is_last else others[:1]), manifest], key=writer_of))
            state = status(registers_of(shards), manifest.order)
            try:
                if any(each.name == manifest.name and each != manifest for each in of_it):
                    raise CorruptSnapshotError("it is there already, and is another one")
                if state is Status.COMMITTED:
                    self._whole(run, shards)
                elif state is Status.PENDING:
                    check_of_one(shards)
            except CorruptSnapshotError as error:
                raise SnapshotFailedError(
                    f"{manifest.name} does not fit what is here of its snapshot: {error}",
                    reason=FailureReason.SHARD_MISSING,
                ) from error

    def find(self, run: str, name: str) -> Slot | None:
        """The slot that holds a snapshot, shard or file of that name, if any."""
        with self.changed:
            return next(iter(self._named(run, name)), None)

    def glance(self, run: str, name: str) -> Glance | None:
        """Look at a snapshot, or shard of one; ``None`` if it is not here."""
        with self.changed:
            slot = self.find(run, name)
            if slot is None or (manifest := slot.snapshot) is None:
                return None
            return Glance(manifest, slot.view(manifest.nbytes), lambda: slot.manifest is manifest)

    def slot(self, index: int) -> Slot | None:
        """The slot of a number, if there is one."""
        with self.changed:
            return next((slot for slot in self.slots if slot.index == index), None)

    def descriptor(self, slot: Slot) -> int | None:
        """A descriptor of a slot's memory that is the caller's to close; ``None`` if it has no memory.

        That of the slot itself is closed when it gets other memory, and its number goes to the next file.
        """
        with self.changed:
            return os.dup(slot.memory.fd) if slot.memory is not None else None

    def pin(self, resident: Resident) -> None:
        """Keep what can be read here as it is, until :meth:`unpin`.

        Raises:
            SnapshotNotFoundError: if the slots hold something else by now.
        """
        with self.changed:
            if not resident.is_here:
                raise SnapshotNotFoundError(f"snapshot {resident.manifests[0].snapshot!r} has just left memory")
            for slot in resident.slots:
                slot.readers += 1

    def unpin(self, resident: Resident) -> None:
        """Let go of what was pinned. Nobody may read it any more."""
        with self.changed:
            for slot in resident.slots:
                slot.readers -= 1
            self.notify()

    @contextmanager
    def reading(self, resident: Resident) -> Iterator[Image]:
        """Pin what can be read here, and hand out its bytes; see :meth:`pin`."""
        self.pin(resident)
        try:
            yield resident.image()
        finally:
            self.unpin(resident)

    def pin_base(self, run: str, writer: int | None) -> Resident | None:
        """Pin the snapshot of a run that was committed last, or the shard of a writer; ``None`` if there is none."""
        with self.changed:
            for slot in self.contents(run, writer):
                manifest, shard = slot.snapshot, slot.shard
                is_meant = (shard.writer if shard is not None else None) == writer
                if manifest is not None and is_meant and not manifest.why_failed:
                    self.pin(base := Resident.of([slot]))
                    return base
        return None

    # -- changes --------------------------------------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called whenever something changed. It must return at once, and runs under the lock."""
        with self.changed:
            self._watchers.append(callback)

    def wait(self, deadline_s: float, cancelled: Callable[[], bool]) -> bool:
        """Wait a moment for a change; ``False`` if it is too late, or nobody wants to know any more. Under the lock."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or cancelled():
            return False
        self.changed.wait(min(left_s, LOOK_S))
        return True

    def notify(self) -> None:
        """Wake whoever waits for a change; call it under the lock."""
        self.changes += 1
        self.changed.notify_all()
        for callback in self._watchers:
            callback()

    def touch(self, run: str) -> None:
        """Something of a run has changed: what is owed of it is to be worked out again. Call it under the lock."""
        self._stale(run)
        self.notify()

    # -- who fills a slot -----------------------------------------------------------------------------------------

    def try_lease(
        self,
        run: str,
        nbytes: int,
        *,
        reuse: bool = False,
        making: Making = Making.NOW,
        writer: int = 0,
    ) -> Slot | None:
        """Take a slot if one can be had now; making its memory may take seconds.

        Args:
            run: key of the run.
            nbytes: size of the snapshot.
            reuse: whether superseded snapshots go before memory is made, which is made for one slot at a time.
            making: whether memory is made at all; ahead of need, it is made only if no superseded snapshot can go.
            writer: number of the rank that fills it.
        """
        capacity, spare = capacity_for(nbytes, self._limits), making.is_ahead
        with self.changed:
            limits = bound(self.slots, run, writer, self._limits) if making is Making.BEYOND else self._limits
            full_at, full_bytes = self._full  # many who wait ask for it, and nothing has changed since
            if full_at == self.changes and full_bytes <= nbytes:
                return None
            found = self._room(run, nbytes, limits, writer, reuse=reuse or spare)
            if found is None and limits.are_alike_for_all(self.slots, run, writer):
                self._full = self.changes, nbytes
            if found is None or (spare and not found.is_spare) or (making is Making.NEVER and found.is_made):
                return None
            mine = self.slots.writers.get((run, writer), ())
            if found.is_spare and (reuse or spare) and any(slot.is_prefault for slot in mine):
                return None
            self._keep_aborted(found.forget)
            for other in found.forget:
                self._forget(other)
            released = [memory for other in found.release for memory in self._take_memory(other)]
            slot = found.slot or self.slots.new()
            slot.is_prefault = spare
            slot.reserved_bytes = capacity if slot.memory is None else 0
            self._take(slot, run, writer)
            if found.release:
                self.notify()
        for memory in released:
            memory.close()
        if slot.memory is None:
            self._make_memory(slot, capacity)
        return slot

    def is_short(self, run: str, nbytes: int, writer: int = 0) -> bool:
        """Whether one more snapshot of a writer of a run would need new memory, and there is some for it."""
        with self.changed:
            found = self._room(run, nbytes, self._limits, writer, reuse=True)
            return found is not None and found.is_spare

    def why_full(self, run: str) -> str:
        """Why no slot can be had now for a run, for people."""
        with self.changed:
            return why_full(self.slots, run, self._limits, self.views())

    def is_full(self, run: str = "", writer: int = 0) -> bool:
        """Whether there is no room now for one more snapshot as large as those that are here."""
        with self.changed:
            nbytes = max((slot.manifest.nbytes for slot in self.slots if slot.manifest is not None), default=1)
            # One that a larger server has left here may fit no bound of this one.
            nbytes = min(nbytes, self._limits.memory_bytes, self._limits.run_memory_bytes or nbytes)
            return self._room(run, nbytes, self._limits, writer) is None

    @property
    def files(self) -> tuple[int, int]:
        """How many slots there are, and how many there may be, since each has open files."""
        with self.changed:
            return len(self.slots), self._limits.files

    def is_stuck(self, run: str, writer: int = 0) -> bool:
        """Whether a writer has no room for one more, nor is any slot being filled that gives some: so with one slot."""
        with self.changed:
            is_filling = any(slot.state is SlotState.FILLING for slot in self.slots)
            return not is_filling and self.is_full(run, writer)

    def is_jammed(self, run: str, writer: int) -> bool:
        """Whether shards that wait for that of a writer have all the memory: none of them will ever leave it some."""
        with self.changed:
            pending = [group.slots for group in self.view(run).groups if group.state is Status.PENDING]
            waiting = {slot for slots in pending if all(slot.writer != writer for slot in slots) for slot in slots}
            made = [slot for slot in self.slots if slot.capacity]
            return bool(made) and all(slot in waiting for slot in made)

    def commit(self, slot: Slot, manifest: Manifest, destinations: tuple[str, ...] | None = None) -> None:
        """Have a filled slot hold what is in it; what the run has here by that name is dropped.

        Args:
            slot: a leased slot whose bytes fit ``manifest``.
            manifest: of it, with checksums.
            destinations: URLs of the directories that a user's file goes to instead of the run's tiers.

        Raises:
            FencedError: if it is a file, and a newer one of its name is here.
        """
        with self.changed:
            older = self._named(slot.run, manifest.name)
            for other in older:
                if file_version(other.content) > file_version(manifest):
                    why = f"{manifest.name} of attempt {manifest.attempt} is older than the one that is there"
                    raise FencedError(why, current=other.content.attempt)
                if other.manifest == manifest:  # its sender never heard that it had arrived
                    slot.seen = dict.fromkeys(other.safe, Mark.SAFE)
                    slot.durable_or_superseded = other.durable_or_superseded
            slot.commit.destinations = destinations
            self._commit(slot, manifest)
            for other in older:  # only now: killed between the two, both are left, never none
                self._forget(other)
            self.notify()

    def fail(self, run: str, manifest: Manifest) -> None:
        """Note why a shard will never be there. Nothing happens if something is known of that shard already.

        One failure is enough for a snapshot, and only the last few of a run stay, with what is here of their snapshots:
        the trainer may report 65,536 writers as failed, and no other limit bounds these slots.

        Args:
            run: key of the run.
            manifest: of the shard, of no bytes; its ``shard.failed`` says why.
        """
        with self.changed:
            of_it = self.registers(run, manifest.snapshot)
            is_failed = any(slot.shard is not None and slot.shard.failed for slot in of_it.values())
            if manifest.shard is None or is_failed or manifest.shard.writer in of_it:
                return
            free = (slot for slot in self.slots.free.get(0, ()) if not slot.readers)
            slot = next(free, None) or self.slots.new()
            self._take(slot, run, manifest.shard.writer)
            self._commit(slot, manifest)
            failures = [each.content for each in self.contents(run) if each.content.why_failed]
            for failure in failures[MOST_ABORTED:]:
                for other in self.registers(run, failure.snapshot).values():  # without it, they would be waiting for it
                    self._forget(other)
            self.notify()

    def fail_missing(self, run: str, attempt: int, writer: int, why: str) -> None:
        """A writer has gone: the shards that it has not put, of snapshots that others wait for, will never be there.

        Args:
            run: key of the run.
            attempt: that writes.
            writer: number of the rank.
            why: for people.
        """
        with self.changed:
            # Each that fails may have an older failure forgotten: what is here is looked at before.
            pending = [group.manifest for group in self.view(run).groups if group.state is Status.PENDING]
            for manifest in pending:
                if manifest.attempt == attempt and manifest.shard is not None:
                    name, shard = shard_name(manifest.snapshot, writer), replace(manifest.shard, writer=writer)
                    self.fail(run, failed(replace(manifest, name=name, shard=shard), why))

    def abort(self, slot: Slot) -> None:
        """Give a leased slot back unfilled."""
        with self.changed:
            if slot.state is SlotState.FILLING:
                self._forget(slot)
                self.notify()

    # -- what goes ------------------------------------------------------------------------------------------------

    def trim(self, run: str, keep: int) -> None:
        """Forget what is superseded of a run, see :meth:`View.superfluous`."""
        with self.changed:
            slots = self.view(run).superfluous(keep, time.monotonic())
            for slot in slots:
                self._forget(slot)
            if slots:
                self.notify()

    def drop(self, run: str, name: str) -> tuple[Manifest, list[str]]:
        """Forget a snapshot. Who reads it at the moment may go on: the slot is not reused before that.

        Returns:
            its manifest and the tiers at which it is, or may be about to be.

        Raises:
            SnapshotNotFoundError: if it is not here.
        """
        with self.changed:
            if not (slots := self._named(run, name) or list(self.registers(run, name).values())):
                raise SnapshotNotFoundError(f"no snapshot {name!r} of run {run!r} in memory")
            found = self.readable(run, name)
            none = replace(slots[0].content, name=name, shard=None, files=(), checksums=())
            manifest = found[0][1] if found else none
            own = slots[0].commit.destinations
            below = own if own is not None else self.tiers(run).all
            urls = list(dict.fromkeys([*below, *(url for slot in slots for url in slot.safe)]))
            for slot in slots:
                self._forget(slot)
            reached = self.known_of(run).reached
            for key in [key for key, each in reached.items() if each.snapshot == name]:
                del reached[key]
            self.notify()
            return manifest, urls

    def occupants(self) -> tuple[set[str], set[str]]:
        """Keys of runs that have slots here, and of those among them of which one must stay, or is being filled."""
        with self.changed:
            used = [slot for slot in self.slots if slot.state is not SlotState.FREE]
            idle = set(evictable(self.views(), time.monotonic()))
            return {slot.run for slot in used}, {slot.run for slot in used if slot not in idle}

    def forget_run(self, run: str) -> None:
        """Forget all snapshots of a run, as far as they may be reused."""
        with self.changed:
            for slot in self.view(run).evictable(time.monotonic()):
                self._forget(slot)
            self.known.pop(run, None)
            self.touch(run)

    # -- the whole ------------------------------------------------------------------------------------------------

    def status(self, covers: Callable[[str], bool] | None = None) -> dict[str, Any]:
        """The slots, as JSON-ready values; only those of runs whose names are covered."""
        with self.changed:
            slots = [each for each in self.slots if covers is None or (each.manifest and covers(each.manifest.run))]
            shown = [
                {
                    "index": slot.index,
                    "state": slot.state.value,
                    "capacity_bytes": slot.capacity,
                    "backing": slot.memory.backing if slot.memory else None,
                    "run": slot.manifest.run if slot.manifest else None,
                    "snapshot": slot.manifest.name if slot.manifest else None,
                    "dirty": self.owed([slot]),
                    "safe": slot.safe,
                }
                for slot in slots
            ]
            return {"memory_bytes": self.memory_bytes, "slots": shown}

    def close(self, *, keep_unsafe: bool) -> None:
        """Give all memory back; with ``keep_unsafe``, leave what is safe nowhere else in tmpfs for the next server."""
        released, left, area = list[SlotMemory](), list[Manifest](), self.area
        with self.changed:
            unsafe = {slot for view in self.views() for slot in view.only_here} if keep_unsafe else set()
            for slot in self.slots:
                memory = slot.memory if slot in unsafe else None
                if memory is not None and memory.path is not None and area is not None and area.has_record(slot):
                    left.append(slot.content)
                    memory.path = None
                else:
                    self._forget(slot)
                    released += self._take_memory(slot)
            self.notify()
        for memory in released:
            memory.close()
        if area is not None:
            for manifest in left:
                text = "{about} stays in {path} for the next server on this host"
                say(logging.INFO, "snapshot-left", text, about=manifest.name, path=area.path)
            area.close()

    # -- inside, under the lock -----------------------------------------------------------------------------------

    def _named(self, run: str, name: str) -> list[Slot]:
        return list(self.slots.names.get((run, name), ()))

    def _stale(self, run: str) -> None:
        self._views.pop(run, None)
        self.stale.add(run)

    def _is_one_more(self, run: str, manifest: Manifest) -> bool:
        """Whether a shard that has come changes nothing of what is to be done, see :meth:`_commit`.

        Its snapshot is as incomplete as it was, and another shard of it is still owed wherever this one is.
        """
        of_it, shard = self.slots.snapshots.get((run, manifest.snapshot), {}), manifest.shard
        other = next(iter(of_it))  # there is one: the slot of this shard is noted already
        if shard is None or other.manifest in (None, manifest) or len(of_it) >= shard.writers:
            return False
        is_known = manifest.order in self.known_of(run).committed.get(manifest.lineage, ())
        is_alike = status(shards_in([other]) | {shard.writer: shard}, manifest.order) is Status.PENDING
        return is_alike and not (other.seen or other.durable_or_superseded or is_known)

    def _record(self, slot: Slot) -> None:
        if self.area is not None:
            self.area.record(slot)

    def _take(self, slot: Slot, run: str, writer: int) -> None:
        """A run fills a slot from now on."""
        slot.run, slot.writer, slot.state = run, writer, SlotState.FILLING
        self.slots.note(slot)

    def _commit(self, slot: Slot, manifest: Manifest) -> None:
        """A slot holds something from now on.

        Each commit drops the view of the run. The plan is made again, too, unless it would only gain one more slot in
        an action that it has: this is done with the slots it has, or planned again then. What is left is still owed.
        """
        now_s, of_writer = time.monotonic(), self.slots.writers.get((slot.run, slot.writer), ())
        before_s = max((each.commit.at_s for each in of_writer if each.snapshot is not None), default=float("-inf"))
        self._sequence += 1
        slot.manifest, slot.state = manifest, SlotState.HELD
        slot.commit.sequence, slot.commit.at_s, slot.commit.after_s = self._sequence, now_s, now_s - before_s
        self.slots.note(slot)
        self._record(slot)
        if self._is_one_more(slot.run, manifest):
            self._views.pop(slot.run, None)
        else:
            self._stale(slot.run)

    def _room(self, run: str, nbytes: int, limits: Limits, writer: int, *, reuse: bool = False) -> SlotChoice | None:
        request = SlotRequest(run, max(1, nbytes), capacity_for(nbytes, self._limits), writer, reuse)
        return find_room(self.slots, request, limits, views=self.views, now_s=time.monotonic())

    def _forget(self, slot: Slot) -> None:
        if self.area is not None and slot.manifest is not None:
            self.area.forget(slot)
        run = slot.run
        slot.forget()
        self.slots.note(slot)
        self._stale(run)

    def _keep_aborted(self, slots: list[Slot]) -> None:
        """These make room: what they show of a snapshot that never counts stays known, or others would wait for it."""
        for run in {slot.run for slot in slots if slot.shard is not None}:
            for group in self.view(run).groups:
                if group.state is Status.ABORTED and any(slot in slots for slot in group.slots):
                    name, seen = group.manifest.snapshot, self.known_of(run).seen_registers
                    self.see(run, name, {**seen.get(name, {}), **shards_in(group.slots)})

    def _take_memory(self, slot: Slot) -> list[SlotMemory]:
        """Take a slot's memory, if it has any, to be closed outside the lock; its file's name is free at once."""
        taken, slot.memory = [slot.memory] if slot.memory is not None else [], None
        self.slots.note(slot)
        for memory in taken:
            memory.unlink()
        return taken

    # -- outside the lock -----------------------------------------------------------------------------------------

    def _make_memory(self, slot: Slot, capacity: int) -> None:
        try:
            memory = SlotMemory.create(capacity, self.area.image(slot) if self.area is not None else None)
        except BaseException:
            with self.changed:
                slot.reserved_bytes = 0
                self._forget(slot)
                self.notify()
            raise
        with self.changed:
            slot.memory, slot.reserved_bytes = memory, 0
            self.slots.note(slot)
            if self.area is not None and memory.path is not None:
                self.area.reserve(slot)


@dataclass(frozen=True, slots=True)
class Glance:
    """A snapshot or shard that a slot holds, which is looked at without being pinned.

    Attributes:
        manifest: of it.
        image: its bytes, as long as it is there.
        is_there: whether what was read until now was the snapshot.
    """

    manifest: Manifest
    image: Image
    is_there: Callable[[], bool]


FindEarlier = Callable[[str, str], Glance | None]
"""Looks for a snapshot by its run's key and its name, see :meth:`Ring.glance`."""


def nothing_earlier(_run: str, _name: str) -> Glance | None:
    """Where no earlier snapshot is at hand."""
    return None
