"""The ring: a bounded number of slots, reused in a circle, each with dirty bits for the tiers it is not yet safe at.

Rules, in the order in which they bind:

1. A slot that is being filled or read is never taken.
2. The newest committed snapshot of a run is never taken, unless it is safe at a tier below.
3. A dirty slot is not taken while its tiers work. When every tier it waits for is failing, an older snapshot may be
   superseded by a newer one: training goes on being protected in memory while, say, the disk is full.
4. Otherwise the oldest goes first.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_spot.config import format_bytes
from lightning_spot.errors import CorruptSnapshot, RingFull, SnapshotNotFound, SnapshotTooLarge, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.runs import key_of
from lightning_spot.staging.slot import SlotMemory, slot_capacity

logger = logging.getLogger(__name__)


class SlotState(enum.Enum):
    """What a slot is doing."""

    FREE = "free"
    FILLING = "filling"
    COMMITTED = "committed"


@dataclass(eq=False, slots=True)
class Slot:
    """One slot of the ring; its fields change only under the ring's lock.

    Attributes:
        index: place in the ring.
        state: what it is doing.
        memory: its memory, once it has any.
        generation: counts its memories, so that a peer knows when to map anew.
        manifest: the committed snapshot.
        dirty: URLs of the tiers at which the snapshot is not yet safe (the dirty bits).
        safe: URLs of the tiers at which it is.
        sequence: order of commits.
        readers: how many are reading it now.
    """

    index: int
    state: SlotState = SlotState.FREE
    memory: SlotMemory | None = None
    generation: int = 0
    manifest: Manifest | None = None
    dirty: list[str] = field(default_factory=list)
    safe: list[str] = field(default_factory=list)
    sequence: int = 0
    readers: int = 0

    @property
    def capacity(self) -> int:
        """Bytes of memory the slot holds now."""
        return self.memory.capacity if self.memory is not None else 0

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


class Ring:
    """A bounded set of slots. All methods may be called from any thread.

    Args:
        slots: how many slots at most; at least 1, and 2 to keep one snapshot whole while the next is filled.
        memory_bytes: most bytes all slots together may hold.
        area: directory on tmpfs for the slots, or ``None`` for memory files.
        failing: tells whether a tier is failing at present.
    """

    def __init__(
        self,
        *,
        slots: int,
        memory_bytes: int,
        area: Path | None = None,
        failing: Callable[[str], bool] = lambda _url: False,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.slots = [Slot(index) for index in range(slots)]
        self.changed = threading.Condition()
        self._area = area
        self._failing = failing
        self._sequence = 0
        if area is not None:
            area.mkdir(mode=0o700, parents=True, exist_ok=True)
            if area.stat().st_uid != os.getuid():
                raise TierError(f"{area} belongs to another user; set LIGHTNING_SPOT_SHM_DIR to another tmpfs")
            self._adopt(area)

    def lease(self, nbytes: int, wait_s: float = 0.0) -> Slot:
        """Take a slot for a snapshot of ``nbytes`` and mark it as being filled.

        Args:
            nbytes: size of the snapshot.
            wait_s: how long to wait for a slot to become clean.

        Raises:
            SnapshotTooLarge: if it can never fit.
            RingFull: if no slot became available in time.
            TierError: if the host has no memory for it.
        """
        capacity = slot_capacity(nbytes)
        if nbytes > self.memory_bytes:
            raise SnapshotTooLarge(
                f"a snapshot of {format_bytes(nbytes)} cannot fit this node's memory of"
                f" {format_bytes(self.memory_bytes)}; start the node with more --memory (or memory_limit=)",
                nbytes=nbytes,
                memory_bytes=self.memory_bytes,
            )
        capacity = min(capacity, max(nbytes, self.memory_bytes))
        deadline = time.monotonic() + wait_s
        with self.changed:
            while (slot := self._take(nbytes, capacity)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RingFull(f"all {len(self.slots)} slots are dirty or in use: the tiers below are too slow")
                self.changed.wait(left)
            return slot

    def commit(self, slot: Slot, manifest: Manifest, destinations: list[str]) -> None:
        """Make the filled slot a committed snapshot; an older one of the same run and name is dropped.

        Args:
            slot: a leased slot whose bytes fit ``manifest``.
            manifest: sealed.
            destinations: URLs of the tiers it must still reach; these become its dirty bits.
        """
        with self.changed:
            for other in self._committed(key_of(manifest), manifest.name):
                other.dirty = []
                self._free(other)
            self._sequence += 1
            slot.manifest, slot.sequence = manifest, self._sequence
            slot.dirty, slot.safe = list(destinations), []
            slot.state = SlotState.COMMITTED
            self._record(slot)
            self.changed.notify_all()

    def abort(self, slot: Slot) -> None:
        """Give a leased slot back unfilled."""
        with self.changed:
            if slot.state is SlotState.FILLING:
                slot.state = SlotState.FREE
                self.changed.notify_all()

    def trim(self, run: str, keep: int) -> None:
        """Forget all but the newest ``keep`` snapshots of a run, as far as they are clean and nobody reads them."""
        with self.changed:
            held = [slot for slot in self.committed(run) if slot.manifest and not slot.manifest.is_file]
            held.sort(key=lambda slot: slot.manifest.order if slot.manifest else (0, 0, False), reverse=True)
            for slot in held[max(1, keep) :]:
                if not slot.dirty and not slot.readers:
                    self._free(slot)

    def mark_safe(self, slot: Slot, manifest: Manifest, destination: str) -> None:
        """Clear one dirty bit; call it only after the tier said the snapshot is committed there."""
        with self.changed:
            if slot.manifest is manifest and destination in slot.dirty:
                slot.dirty.remove(destination)
                slot.safe.append(destination)
                self._record(slot)
                self.changed.notify_all()

    def drop(self, run: str, name: str) -> tuple[Manifest, list[str]]:
        """Forget a snapshot. Who reads it at the moment may go on: the slot is not reused before that.

        Returns:
            its manifest and the tiers at which it is, or may be about to be.

        Raises:
            SnapshotNotFound: if it is not here.
        """
        with self.changed:
            for slot in self._committed(run, name):
                assert slot.manifest is not None
                manifest, urls = slot.manifest, [*slot.dirty, *slot.safe]
                slot.dirty = []
                self._free(slot)
                return manifest, urls
            raise SnapshotNotFound(f"no snapshot {name!r} of run {run!r} in memory")

    def give_up(self, slot: Slot, manifest: Manifest, destination: str) -> None:
        """Stop trying to bring a snapshot to a tier that refuses it for good (a fence)."""
        with self.changed:
            if slot.manifest is manifest and destination in slot.dirty:
                slot.dirty.remove(destination)
                self._record(slot)
                self.changed.notify_all()

    def committed(self, run: str | None = None) -> list[Slot]:
        """Slots that hold a committed snapshot, newest first."""
        with self.changed:
            found = [slot for slot in self.slots if slot.manifest and run in (None, key_of(slot.manifest))]
            return sorted(found, key=lambda slot: slot.sequence, reverse=True)

    def find(self, run: str, name: str) -> Slot | None:
        """The slot that holds a committed snapshot, if any."""
        with self.changed:
            return next(iter(self._committed(run, name)), None)

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
            with self.changed:
                slot.readers -= 1
                self.changed.notify_all()

    def next_dirty(self, destination: str) -> Slot | None:
        """The oldest slot that is dirty for ``destination``."""
        with self.changed:
            found = [slot for slot in self.slots if slot.manifest is not None and destination in slot.dirty]
            return min(found, key=lambda slot: slot.sequence, default=None)

    def status(self) -> dict[str, Any]:
        """The slots, as JSON-ready values."""
        return {"memory_bytes": self.memory_bytes, "slots": [slot.status() for slot in self.slots]}

    def close(self, *, keep_dirty: bool) -> None:
        """Give all memory back; with ``keep_dirty``, leave dirty slots in tmpfs for the next node to adopt."""
        with self.changed:
            for slot in self.slots:
                if keep_dirty and slot.dirty and slot.memory is not None and slot.memory.path is not None:
                    continue
                self._free(slot)
                self._release(slot)
        if self._area is not None and not any(self._area.iterdir()):
            self._area.rmdir()

    def _committed(self, run: str, name: str) -> list[Slot]:
        return [
            slot for slot in self.slots if slot.manifest and (key_of(slot.manifest), slot.manifest.name) == (run, name)
        ]

    def _take(self, nbytes: int, capacity: int) -> Slot | None:
        """Choose a slot, make sure it has enough memory, mark it FILLING; ``None`` if none can be had now."""
        for slot in self._takeable(nbytes):
            if slot.capacity < nbytes and not self._make_room(capacity - slot.capacity, slot):
                continue
            self._free(slot)
            if slot.capacity < nbytes:
                self._release(slot)
                slot.memory = SlotMemory.create(capacity, self._path(slot, ".img"))
                slot.generation += 1
            slot.state = SlotState.FILLING
            return slot
        return None

    def _takeable(self, nbytes: int = 0) -> list[Slot]:
        """Slots that may be taken, best first: free and large enough, free, then the oldest that may go."""
        free = [slot for slot in self.slots if slot.state is SlotState.FREE and not slot.readers]
        idle = [slot for slot in self.slots if slot.state is SlotState.COMMITTED and not slot.readers]
        old = sorted((slot for slot in idle if self._reclaimable(slot)), key=lambda slot: slot.sequence)
        return [*sorted(free, key=lambda slot: slot.capacity < nbytes), *old]

    def _reclaimable(self, slot: Slot) -> bool:
        manifest = slot.manifest
        assert manifest is not None
        if slot.dirty and not all(self._failing(url) for url in slot.dirty):
            return False
        if manifest.is_file:
            return bool(slot.safe)  # a file that is only here stays until it is removed
        newest = max(
            (other for other in self.slots if other.manifest and key_of(other.manifest) == key_of(manifest)),
            key=lambda other: (not other.manifest.is_file if other.manifest else False, other.sequence),
        )
        return slot is not newest or (bool(slot.safe) and not slot.dirty)

    def _make_room(self, more: int, keep: Slot) -> bool:
        """Release memory of free slots (and, to grow a slot that is reused, of old ones) until ``more`` bytes fit."""
        used = sum(slot.capacity for slot in self.slots)
        for slot in self._takeable():
            if used + more <= self.memory_bytes:
                break
            if slot is not keep and slot.capacity and (slot.state is SlotState.FREE or keep.capacity):
                used -= slot.capacity
                self._free(slot)
                self._release(slot)
        return used + more <= self.memory_bytes

    def _free(self, slot: Slot) -> None:
        if slot.dirty and slot.manifest is not None:
            logger.warning(
                "snapshot %s of run %s leaves memory before it was safe at %s, which is failing",
                slot.manifest.name,
                slot.manifest.run,
                ", ".join(slot.dirty),
            )
        slot.manifest, slot.dirty, slot.safe = None, [], []
        slot.state = SlotState.FREE
        if (path := self._path(slot, ".json")) is not None:
            path.unlink(missing_ok=True)
        self.changed.notify_all()

    def _release(self, slot: Slot) -> None:
        if slot.memory is not None:
            slot.memory.close()
            slot.memory = None

    def _path(self, slot: Slot, ending: str) -> Path | None:
        return self._area / f"slot-{slot.index}{ending}" if self._area is not None else None

    def _record(self, slot: Slot) -> None:
        """Write the commit record beside a tmpfs slot: temporary file, then rename."""
        path = self._path(slot, ".json")
        if path is None or slot.memory is None or slot.memory.path is None or slot.manifest is None:
            return
        record = {
            "manifest": asdict(slot.manifest),
            "dirty": slot.dirty,
            "safe": slot.safe,
            "sequence": slot.sequence,
        }
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(record), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            # Committed all the same, as with memory files; an older record of the slot only knows more dirty bits.
            logger.warning("%s has no room for a commit record: %s", path.parent, error)
            temporary.unlink(missing_ok=True)

    def _adopt(self, area: Path) -> None:
        """Take over committed slots that a killed node left (also more than this ring was to have)."""
        left = [path.stem.removeprefix("slot-") for path in area.glob("slot-*.json")]
        most = max((int(index) for index in left if index.isdigit()), default=-1)
        self.slots += [Slot(index) for index in range(len(self.slots), most + 1)]
        for slot in self.slots:
            record_path, image_path = area / f"slot-{slot.index}.json", area / f"slot-{slot.index}.img"
            try:
                record = json.loads(record_path.read_bytes())
                manifest = Manifest.from_dict(record["manifest"])
                slot.memory = SlotMemory.reopen(image_path)
                if manifest.nbytes > slot.capacity:
                    raise CorruptSnapshot(f"{image_path} is shorter than its manifest says")
                with slot.view(manifest.nbytes) as view:
                    manifest.verify(view, str(image_path))
            except FileNotFoundError:
                self._discard(slot, image_path, record_path)
            except (OSError, ValueError, KeyError, CorruptSnapshot) as error:
                logger.warning("a slot left by an earlier node is dropped: %s", error)
                self._discard(slot, image_path, record_path)
            else:
                slot.manifest, slot.state = manifest, SlotState.COMMITTED
                slot.dirty, slot.safe = list(record["dirty"]), list(record["safe"])
                slot.sequence, slot.generation = int(record["sequence"]), 1
                self._sequence = max(self._sequence, slot.sequence)
                logger.info("took over snapshot %s of run %s from an earlier node", manifest.name, manifest.run)
        for leftover in area.glob("slot-*"):
            index = leftover.stem.removeprefix("slot-")
            if leftover.suffix == ".tmp" or not index.isdigit() or int(index) >= len(self.slots):
                leftover.unlink(missing_ok=True)

    def _discard(self, slot: Slot, image_path: Path, record_path: Path) -> None:
        self._release(slot)
        image_path.unlink(missing_ok=True)
        record_path.unlink(missing_ok=True)
