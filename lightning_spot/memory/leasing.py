"""Waits for a slot of a ring."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_spot.errors import RingFull
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import Making, Slot

_LOOK_S = 0.25  # how often who waits looks whether it should go on waiting


def lease(
    ring: Ring,
    run: str,
    nbytes: int,
    wait_s: float,
    *,
    cancelled: Callable[[], bool],
    reuse: bool,
    making: Making,
    make_way: Callable[[], bool] = lambda: False,
) -> Slot:
    """Take a slot for a snapshot of ``nbytes`` and mark it as being filled.

    Args:
        ring: whose slot.
        run: key of the run.
        nbytes: size of the snapshot.
        wait_s: how long to wait for a slot.
        cancelled: asked while waiting: whether nobody wants the slot any more.
        reuse: see :meth:`Ring.try_lease`.
        making: whether its memory is made, see :class:`Making`.
        make_way: has slots let go that are kept for what may be left undone; whether there were any.

    Raises:
        SnapshotTooLarge: if it can never fit.
        RingFull: if no slot became available in time.
        TierError: if the host has no memory for it.
    """
    deadline = time.monotonic() + wait_s
    while True:
        seen = ring.changes
        if (slot := ring.try_lease(run, nbytes, reuse=reuse, making=making)) is not None:
            return slot
        if not making.is_ahead and make_way():
            continue
        with ring.changed:
            while seen == ring.changes:
                left = deadline - time.monotonic()
                if left <= 0 or cancelled():
                    raise RingFull(ring.why_full(run, nbytes))
                ring.changed.wait(min(left, _LOOK_S))
