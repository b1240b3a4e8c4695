"""Slots whose memory was given to processes that look at it for as long as they like: ranks that resume from it.

Nothing is written to that memory any more: as long as the slot holds its snapshot it stays, then the slot gets another.
"""

from __future__ import annotations

import logging

from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import Slot, SlotState, bases_of, left_if_lost, newest_of_lineages, reusable

logger = logging.getLogger(__name__)


def give(ring: Ring, slot: Slot, manifest: Manifest) -> bool:
    """Give the memory of a committed snapshot away; whether that could be done.

    Its file ends where the snapshot does from then on, and a node that takes the slot over knows of it, too.

    Args:
        ring: of the slot.
        slot: pinned by the caller.
        manifest: of the snapshot that is in it.
    """
    with ring.changed:
        if slot.manifest is not manifest or slot.memory is None:
            return False
        if not slot.given:
            slot.given = True
            if ring.area is not None and slot.memory.path is not None and not ring.area.record(slot):
                # The next node would write to it.
                slot.given = False
                return False
        ring.notify()  # the rest of it is room for others
        slot.memory.cut(manifest.nbytes)  # also where the node that has recorded it was killed before that
        return True


def idle(ring: Ring, run: str) -> Slot | None:
    """A slot that may get new memory now: its own was given away, and nobody would miss what is in it.

    Args:
        ring: of the slot.
        run: key of the run whose slots may be taken.
    """
    with ring.changed:
        missed = newest_of_lineages(ring.slots) | bases_of(ring.slots) | left_if_lost(ring.slots)
        may_go = reusable(ring.slots)
        for slot in ring.slots:
            if not slot.given or slot.memory is None or slot.readers:
                continue
            if slot.state is SlotState.FREE or (slot.run == run and slot in may_go and slot not in missed):
                return slot
    return None


def renewed(ring: Ring, run: str, nbytes: int) -> Slot | None:
    """Give such a slot new memory; as it was leased, ``None`` if there is none any more.

    Args:
        ring: of the slot.
        run: key of the run.
        nbytes: size of its snapshots.
    """
    with ring.changed:
        slot = idle(ring, run)
        if slot is None or slot.memory is None:
            return None
        if slot.manifest is not None:
            ring.drop(slot.run, slot.manifest.name)
        memory, slot.memory = slot.memory, None
        memory.unlink()
        ring.notify()  # there is room now
    memory.close()
    return ring.try_lease(run, nbytes, only_new=True)
