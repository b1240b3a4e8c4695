"""The table of slots: what each of them holds, at which tiers that is, and what it still owes. No memory is made."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_spot.errors import SnapshotNotFound
from lightning_spot.image.manifest import Manifest, Order
from lightning_spot.memory.area import SlotArea
from lightning_spot.memory.slots import Slot, Tiers, newest_of_lineages, owed

_NOWHERE = Tiers()


class SlotTable:
    """The slots of a node, and what is known of them. All methods may be called from any thread.

    Args:
        area: directory on tmpfs for the slots, ``None`` for memory files; what a killed node left in it is taken over.

    Attributes:
        slots: all of them.
        lock: of all that the table holds.
        changed: the same lock; notified whenever something changed.
        changes: how often that was.
        area: see above.
        begun_s: when the table was made (monotonic); what was left in the area may be asked for soon.
        opened_s: when each run was opened last, or was asked for by the host of its trainer, as long as that lives
            (monotonic).
    """

    def __init__(self, area: SlotArea | None) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.area = area
        self.slots = area.adopt() if area is not None else []
        self.changes = 0
        self.begun_s = time.monotonic()
        self.opened_s: dict[str, float] = {}
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
                self.refresh(run)
                self.notify()

    def tiers(self, run: str) -> Tiers:
        """Where a run's snapshots go."""
        return self._tiers.get(run, _NOWHERE)

    def carried(self) -> set[str]:
        """URLs that nodes behind this one write, and this one does not."""
        with self.changed:
            own = {url for tiers in self._tiers.values() for url in tiers.own}
            return {url for tiers in self._tiers.values() for url in tiers.carried} - own

    def mark_safe(self, slot: Slot, manifest: Manifest, url: str) -> None:
        """Clear a dirty bit; call it only after the tier said the snapshot is committed there."""
        self._note(slot, manifest, slot.safe, url)

    def mark_inexact(self, slot: Slot, manifest: Manifest, url: str) -> None:
        """Note that a tier has an approximation of a snapshot, which stays owed there."""
        self._note(slot, manifest, slot.inexact_at, url)

    def mark_refused(self, slot: Slot, manifest: Manifest, url: str) -> None:
        """Stop trying to bring a snapshot to a tier that refuses it for good (a fence)."""
        self._note(slot, manifest, slot.refused, url)

    def forget_refusals(self, run: str) -> None:
        """A later attempt writes from here now, or the trainer is gone: what tiers refused is owed to them again."""
        with self.changed:
            for slot in self.committed(run):
                if slot.refused and slot.snapshot is not None:
                    slot.refused = []
                    self._written(slot)

    def mark_lost(self, slot: Slot, manifest: Manifest, url: str) -> None:
        """A tier has lost a snapshot that was safe there: it is owed again if it is the newest."""
        with self.changed:
            if slot.manifest is manifest and url in slot.safe:
                slot.safe.remove(url)
                self._written(slot)

    def forsake(self, slot: Slot, manifest: Manifest) -> None:
        """Have one host's portion of a snapshot owed nowhere any more, and give way where its room is needed."""
        with self.changed:
            if slot.manifest is manifest:
                slot.forsaken = True
                self._written(slot)

    def settle(self, run: str, lineage: str, order: Order) -> None:
        """Note that a snapshot is durable although nobody brought it there from here: it, and older ones, may go."""
        with self.changed:
            for slot in self.committed(run):
                manifest = slot.snapshot
                if (
                    manifest is not None
                    and not slot.settled
                    and manifest.lineage == lineage
                    and manifest.order <= order
                ):
                    slot.settled = True
                    self._written(slot)

    # -- what is committed ----------------------------------------------------------------------------------------

    def committed(self, run: str | None = None) -> list[Slot]:
        """Slots that hold a committed snapshot, newest first."""
        with self.changed:
            found = [slot for slot in self.slots if slot.manifest and run in (None, slot.run)]
            return sorted(found, key=lambda slot: slot.sequence, reverse=True)

    def readable(self, run: str, name: str | None = None) -> list[tuple[Slot, Manifest]]:
        """What anybody may read of a run: what is committed, newest first.

        Args:
            run: key of the run.
            name: of a snapshot or file, if only that is meant.
        """
        with self.changed:
            return [
                (slot, slot.manifest)
                for slot in self.committed(run)
                if slot.manifest is not None and name in (None, slot.manifest.name)
            ]

    def find(self, run: str, name: str) -> Slot | None:
        """The slot that holds a committed snapshot, if any."""
        with self.changed:
            return next(iter(self._named(run, name)), None)

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

    @contextmanager
    def reading(self, slot: Slot, manifest: Manifest) -> Iterator[memoryview]:
        """Pin a committed snapshot and hand out its bytes.

        Raises:
            SnapshotNotFound: if the slot holds another one by now.
        """
        with self.changed:
            if slot.manifest is not manifest:
                raise SnapshotNotFound(f"snapshot {manifest.name!r} has just left memory")
            slot.readers += 1
        view = slot.view(manifest.nbytes)
        try:
            yield view
        finally:
            view.release()
            self.unpin(slot)

    def unpin(self, slot: Slot) -> None:
        """One reader of a slot, which was counted before, is done."""
        with self.changed:
            slot.readers -= 1
            self.notify()

    # -- changes --------------------------------------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called whenever something changed. It must return at once, and runs under the lock."""
        with self.changed:
            self._watchers.append(callback)

    def notify(self) -> None:
        """Wake whoever waits for a change; call it under the lock."""
        self.changes += 1
        self.changed.notify_all()
        for callback in self._watchers:
            callback()

    def refresh(self, run: str) -> None:
        """Work out anew what is owed of a run. Call it under the lock."""
        newest = newest_of_lineages(slot for slot in self.slots if slot.run == run)
        for slot in self.slots:
            if slot.run == run and slot.manifest is not None:
                slot.dirty = owed(slot, self.tiers(run), newest=slot in newest)

    # -- inside, under the lock -----------------------------------------------------------------------------------

    def _named(self, run: str, name: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.manifest and slot.run == run and slot.manifest.name == name]

    def _note(self, slot: Slot, manifest: Manifest, urls: list[str], url: str) -> None:
        with self.changed:
            if slot.manifest is manifest and url not in urls:
                urls.append(url)
                self._written(slot)

    def _written(self, slot: Slot) -> None:
        self.refresh(slot.run)
        if self.area is not None:
            self.area.record(slot)
        self.notify()
