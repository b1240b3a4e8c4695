"""What a trainer's host keeps of snapshots that several hosts have brought to a server: its portion of each."""

from __future__ import annotations

import functools
from dataclasses import replace

from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Portion, PortionImage
from lightning_spot.image.written import Ranges
from lightning_spot.memory.bases import Glance, glance
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import HeldPortion, Slot, SlotState
from lightning_spot.protocol.wire import BaseInfo


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
        base: as the node has it.
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
            manifest = slot.surpassed or slot.snapshot  # a slow node may have an older one only now
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
