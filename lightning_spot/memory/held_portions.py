"""Portions of snapshots that several hosts bring: at a server, while those of other hosts lie at others, and at a host.

At a server, a portion takes the place of an older one only when the snapshot is known to be whole, which whoever leads
it says to all servers once every portion is at one. So whoever is lost in between, the portions of one snapshot are
there, of all hosts. A trainer's host keeps its portion of each snapshot that it has brought to a server.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_spot.errors import SettingsError
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.image.portion import Portion, PortionImage
from lightning_spot.image.written import Ranges
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Glance, Ring, glance
from lightning_spot.memory.slots import HeldPortion, Slot, SlotState
from lightning_spot.protocol.wire import BaseInfo
from lightning_spot.tiers.fences import check_fence

_MOST_TORN = 64


@dataclass(frozen=True, slots=True)
class Told:
    """What who leads the snapshots of a run says of them.

    Attributes:
        name: of the newest that is whole.
        brings: whether it is to be brought to storage, whatever follows.
        overtaken: names of those that are not needed any more.
        left: names of those of another lineage, which are to be brought there in any case.
    """

    name: str
    brings: bool = False
    overtaken: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Spread:
    """What a server knows of snapshots of which it holds portions. Methods may be called from any thread.

    Args:
        ring: holds the portions.
        registry: tells who may speak for a run.
        rests_s: how long the storage of a run, by its key, is still to be left alone.
    """

    def __init__(self, ring: Ring, registry: Registry, rests_s: Callable[[str], float]) -> None:
        self._ring, self._registry, self._rests_s = ring, registry, rests_s
        self._lock = threading.Lock()
        self._torn: dict[tuple[str, str], str] = {}
        self._over: dict[tuple[str, str], None] = {}

    def look(self, run: str, name: str = "") -> dict[str, Any]:
        """What is here of a run's snapshots, as JSON-ready values.

        Args:
            run: as in URLs.
            name: of a snapshot, of which it is told whether, and why, it will never be whole.
        """
        key = self._registry.key(run)
        with self._ring.changed:
            portions = [_as_json(slot) for slot in self._ring.committed(key) if slot.of_host is not None]
        with self._lock:
            torn = self._torn.get((key, name), "")
        return {"portions": portions, "torn": torn, "rests_s": self._rests_s(key)}

    def whole(self, run: str, attempt: int, told: Told) -> None:
        """Note that the portions of all hosts of a snapshot are at nodes: what it overtakes is not needed any more.

        Args:
            run: as in URLs.
            attempt: that says so.
            told: what it says.

        Raises:
            FencedError: if that attempt no longer holds the run.
        """
        key = self._admit(run, attempt, told.name)
        with self._ring.changed:
            for slot, name in _portions_of(self._ring, key):
                if name == told.name or name in told.left:
                    # A word that comes late does not have brought down what the others let go since.
                    brings = (told.brings and not slot.overtaken) or name in told.left
                    slot.whole, slot.brings, slot.forsaken = True, slot.brings or brings, False
                elif name in told.overtaken:
                    slot.overtaken, slot.brings = True, slot.brings and not told.brings
                else:
                    continue
                if self._ring.area is not None:
                    self._ring.area.record(slot)
            self._ring.refresh(key)
            self._ring.notify()

    def torn(self, run: str, attempt: int, name: str, why: str, *, over: bool = False) -> None:
        """Note that a snapshot will never be whole.

        Args:
            run: as in URLs.
            attempt: that says so.
            name: of the snapshot.
            why: for people.
            over: whether who leads it says so, and nobody else: then what is here of it goes, unless it was said to be
                whole, and what still comes. Another host may be wrong: its portion may be there, and all the others.

        Raises:
            FencedError: if that attempt no longer holds the run.
        """
        key = self._admit(run, attempt, name)
        with self._lock:
            self._torn.setdefault((key, name), why)
            _bound(self._torn)
            if not over:
                return
            self._over[key, name] = None
            _bound(self._over)
        with self._ring.changed:
            for slot, its in _portions_of(self._ring, key):
                if its == name:
                    self._drop(key, slot)

    def arrived(self, key: str, manifest: Manifest) -> None:
        """A portion was committed here; nobody asks for one that comes when its snapshot is over.

        Args:
            key: of the run.
            manifest: of the portion.
        """
        with self._lock:
            is_over = (key, manifest.snapshot) in self._over
        if is_over and manifest.portion is not None:
            with self._ring.changed:
                for slot in self._ring.committed(key):
                    if slot.manifest is manifest:
                        self._drop(key, slot)

    def _drop(self, key: str, slot: Slot) -> None:
        """Let a portion go, if its snapshot was not said to be whole; under the ring's lock."""
        if not slot.whole and slot.manifest is not None:
            self._ring.drop(key, slot.manifest.name)

    def _admit(self, run: str, attempt: int, name: str) -> str:
        """The key of a run, for which an attempt may speak."""
        if snapshot_order(name) is None:
            raise SettingsError(f"{name!r} names no snapshot")
        key = self._registry.find(run).info.key
        check_fence(run, attempt, self._registry.highest(key))
        return key


def _bound(names: dict[tuple[str, str], Any]) -> None:
    while len(names) > _MOST_TORN:
        del names[next(iter(names))]


def _portions_of(ring: Ring, key: str) -> list[tuple[Slot, str]]:
    """The slots that hold portions of a run, each with the name of the snapshot."""
    with ring.changed:
        slots = [slot for slot in ring.committed(key) if slot.of_host is not None]
        return [(slot, slot.manifest.snapshot) for slot in slots if slot.manifest is not None]


def _as_json(slot: Slot) -> dict[str, Any]:
    assert slot.manifest is not None
    assert slot.of_host is not None
    of = slot.of_host
    told = {"name": slot.manifest.snapshot, "host": of.host, "hosts": of.hosts, "digest": of.digest}
    told["lineage"] = slot.manifest.lineage
    return {**told, "whole": slot.whole, "brings": slot.brings and bool(slot.dirty), "safe": list(slot.safe)}


def hold(ring: Ring, slot: Slot, held: HeldPortion, upload: str) -> None:
    """Give a leased slot back, and remember what is in it until it is used again.

    Args:
        ring: of the slot.
        slot: being filled until now.
        held: what is in it.
        upload: as which it was filled.
    """
    with ring.changed:
        ring.abort(slot)
        slot.portion, slot.held, slot.held_as = held, upload, None
        ring.notify()


def find(ring: Ring, run: str, ranges: Ranges, base: BaseInfo, *, is_apart: bool) -> Glance | None:
    """What a snapshot server has as the base of an upload, as far as it is here; ``None`` if it is not.

    Args:
        ring: of this host.
        run: key of the run.
        ranges: that this host brings now. It finds what it had there before, also where the file has become longer or
            shorter since: that is the end of the last range.
        base: as the server has it.
        is_apart: whether portions lie in slots of their own, range after range; else each lies as in the image.
    """
    with ring.changed:
        for slot in ring.slots:
            held = slot.portion
            if slot.state is not SlotState.FREE or held is None or slot.memory is None:
                continue
            if (held.run, held.name) != (run, base.name) or _begins(held.ranges) != _begins(ranges):
                continue
            portion = Portion(held.ranges)
            memory = slot.view(portion.nbytes if is_apart else base.nbytes)
            image = PortionImage(portion, memory, base.nbytes) if is_apart else memory
            return Glance(_manifest(base), image, functools.partial(_holds, slot, held))
    return None if is_apart else glance(ring, run, base.name)


def find_alone(ring: Ring, run: str, portion: Manifest) -> Glance | None:
    """A portion that lies at snapshot servers by itself, as far as it is here, too; ``None`` if it is not.

    Args:
        ring: of this host.
        run: key of the run.
        portion: as it was sent.
    """
    with ring.changed:
        for slot in ring.slots:
            held = slot.portion
            if slot.state is not SlotState.FREE or held is None or slot.memory is None:
                continue
            if (held.run, held.name, Portion(held.ranges).nbytes) == (run, portion.snapshot, portion.nbytes):
                return Glance(portion, slot.view(portion.nbytes), functools.partial(_holds, slot, held))
    return None


def _begins(ranges: Ranges) -> tuple[Ranges, int]:
    """All of them, but for where the last one ends."""
    return (ranges[:-1], ranges[-1][0]) if ranges else ((), 0)


def surpass(ring: Ring, run: str, newer: Manifest) -> None:
    """Note that a snapshot server has a newer snapshot, of which no host has all: older ones are not waited for."""
    with ring.changed:
        for slot in ring.committed(run):
            manifest = slot.surpassed or slot.snapshot  # a slow server may have an older one only now
            if manifest is not None and manifest.lineage == newer.lineage and manifest.order < newer.order:
                slot.surpassed = newer
        ring.refresh(run)
        ring.notify()


def surpassing(ring: Ring, run: str) -> Manifest | None:
    """The snapshot at a snapshot server that is newer than all here; ``None`` if there is none."""
    with ring.changed:
        slots = ring.committed(run)
        newer = [slot.surpassed for slot in slots if slot.surpassed is not None]
        newest = max(newer, key=lambda manifest: manifest.order, default=None)
        here = [slot.snapshot for slot in slots if slot.snapshot is not None]
        return None if newest is None or any(manifest.order > newest.order for manifest in here) else newest


def fall_back(ring: Ring, run: str) -> None:
    """The snapshot server is lost, and perhaps what it had with it: what is here may be the newest again."""
    with ring.changed:
        for slot in ring.slots:
            slot.surpassed = slot.surpassed if slot.run != run else None
        ring.refresh(run)
        ring.notify()


def _holds(slot: Slot, held: HeldPortion) -> bool:
    return slot.portion is held


def _manifest(base: BaseInfo) -> Manifest:
    plain = Manifest(run="", name=base.name, step=0, attempt=0, nbytes=base.nbytes, part_bytes=base.part_bytes)
    return replace(plain, checksums=base.checksums)
