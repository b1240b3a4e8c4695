"""What a snapshot does for its slot: waits until one is made, takes it, and has the next one made or leased ahead."""

from __future__ import annotations

import time

from lightning_spot.capture.host_link import within
from lightning_spot.capture.leases import Leases
from lightning_spot.capture.warming import SlotMaker
from lightning_spot.errors import RingFull
from lightning_spot.memory.host import Host, Lease
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.slots import Making

_LONG_S = 0.05  # who waits longer for a slot waits for one that is in use


class Supply:
    """The slots of a ring for one snapshot after the other.

    Args:
        maker: makes them.
        leases: leases them.
    """

    def __init__(self, maker: SlotMaker, leases: Leases) -> None:
        self._maker, self._leases = maker, leases

    def wait_warm(self, host: Host, wait_s: float) -> None:
        """Wait while the first slot is made in the background, no longer than for a clean one.

        Raises:
            RingFull: if it is not there by then.
        """
        wait_s = wait_s or host.max_stall_s
        if not self._maker.wait(wait_s):
            raise RingFull(f"the slot for it is still being made after {wait_s:.0f} s")

    def take(self, host: Host, nbytes: int, wait_s: float, shared: Shared | None) -> Lease:
        """Take a slot; where there is none, a further one may be made.

        Who waits for a slot takes that one, or one that is clean before it is made.

        Args:
            host: the ring.
            nbytes: of the snapshot.
            wait_s: how long to wait for a clean slot, in all.
            shared: if other ranks fill it too.

        Raises:
            SpotError: if there is none.
        """
        deadline_s = time.monotonic() + wait_s
        if self._maker.has_outgrown(nbytes):
            self._leases.give_back()  # it is too small, and its memory is to be made anew
        if not self._maker.fits(host, nbytes, waits=wait_s > 0) and not (wait_s and self._maker.wait(wait_s)):
            raise RingFull("the slots are too small for it; a larger one is being made")
        wait_s = within(deadline_s)
        making, began_s = self._maker.making(nbytes), time.monotonic()
        if not wait_s or making is Making.NEVER:
            try:
                return self._leases.take(host, nbytes, 0.0, shared, making)
            except RingFull:
                self._maker.found_none(host, nbytes)
                if not wait_s:
                    raise
                return self._leases.wait(host, nbytes, within(deadline_s), shared, lambda: self._maker.now)
        lease = self._leases.take(host, nbytes, wait_s, shared)
        if time.monotonic() - began_s > _LONG_S:
            self._maker.found_none(host, nbytes)
        return lease

    def look_ahead(self, host: Host, nbytes: int, *, is_short: bool, leases: bool) -> None:
        """A snapshot is committed: have the slot of the next one made, or lease it.

        Args:
            host: the ring.
            nbytes: of the next one, about; of several hosts, this one's portion.
            is_short: whether it needs a slot that is still to be made.
            leases: whether one that is made may be leased ahead.
        """
        if not (is_short and self._maker.another(host, nbytes)) and leases:
            self.lease_ahead(host, nbytes)

    def lease_ahead(self, host: Host, nbytes: int, *, comes: bool = False) -> None:
        """See :meth:`Leases.lease_ahead`."""
        self._leases.lease_ahead(host, nbytes, self._maker.making(nbytes), comes=comes)
