"""Slots to fill, leased in time: ahead, while snapshots follow each other closely, or where one is known to come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_spot.capture.host_link import HostLink
from lightning_spot.capture.saying import SAY_S
from lightning_spot.config import read_environment
from lightning_spot.errors import NodeUnreachable, RingFull, SpotError
from lightning_spot.memory.host import Host, Lease
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.slots import Making

logger = logging.getLogger(__name__)

AHEAD_S = 1.0
"""A slot is leased ahead if the next snapshot comes sooner; one that is not used for so long is given back."""

_SLICE_S = 2.0
_ALLOCATE_S, _ALLOCATED_BYTES_PER_S = 60.0, 200e6  # a slot's pages are made by the kernel at 3 GB/s; swapping is slower


class Leases:
    """Leases slots of a ring. Methods may be called from any thread.

    Args:
        link: to the ring.
        leased: called with each lease.
        waits: called now and then while somebody waits for long, with why there is no slot and the seconds left.
    """

    def __init__(
        self, link: HostLink, leased: Callable[[Lease], None], waits: Callable[[RingFull, float], None]
    ) -> None:
        self._link = link
        self._leased, self._waits = leased, waits
        self._lock = threading.Lock()  # held while a slot is leased ahead: who needs one now waits for that
        self._ahead: tuple[Host, Lease] | None = None
        self._taken_s, self._pace_s = float("-inf"), float("inf")
        self._is_awaited = False  # the next slot is for who waits for it, not to be leased ahead
        self._unsaid: dict[str, tuple[Host, Lease]] = {}  # one at most

    @property
    def is_ahead(self) -> bool:
        """Whether a slot is leased that nobody has asked for yet."""
        return self._ahead is not None

    @property
    def idle_s(self) -> float | None:
        """After how long a slot that nobody has asked for is given back; ``None`` if there is none."""
        return AHEAD_S if self.is_ahead else None

    def take(
        self,
        host: Host,
        nbytes: int,
        wait_s: float,
        shared: Shared | None = None,
        making: Making = Making.NOW,
    ) -> Lease:
        """A slot of a ring to fill: the one that was leased ahead, or the next that can be had.

        It is asked for every few seconds: a ring that hangs is told from one that is full, or busy with making it.

        Args:
            host: the ring.
            nbytes: size of the snapshot.
            wait_s: how long to wait for a clean slot.
            shared: if other ranks will fill it too. Of one that was leased ahead the ring is still to be told
                (:meth:`Host.say`); where other hosts take part, it is none of these.
            making: whether its memory is made for it.
        """
        self.say_now()
        with self._lock:
            ahead, self._ahead, self._is_awaited = self._ahead, None, True
            now_s = time.monotonic()
            self._taken_s, self._pace_s = now_s, now_s - self._taken_s
        try:
            if ahead is not None and ahead[0] is host:  # else its ring is lost, and the slot with it
                if nbytes <= len(ahead[1].map) and (shared is None or not shared.at):
                    return ahead[1] if shared is None else self._for(*ahead, nbytes, shared)
                give_back(*ahead, untouched=True)
            return self._take_in_time(host, nbytes, wait_s, shared, lambda: making)
        finally:
            self._is_awaited = False

    def wait(
        self, host: Host, nbytes: int, wait_s: float, shared: Shared | None, making: Callable[[], Making]
    ) -> Lease:
        """The next slot that can be had, for who has asked for one in vain. See :meth:`take`.

        Args:
            host: the ring.
            nbytes: size of the snapshot.
            wait_s: how long to wait for a clean slot.
            shared: if other ranks will fill it too.
            making: asked every few seconds: whether its memory is made for it by now.
        """
        self._is_awaited = True
        try:
            return self._take_in_time(host, nbytes, wait_s, shared, making)
        finally:
            self._is_awaited = False

    def _take_in_time(
        self, host: Host, nbytes: int, wait_s: float, shared: Shared | None, making: Callable[[], Making]
    ) -> Lease:
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = deadline_s - time.monotonic()
            slice_s = max(0.0, min(left_s, _SLICE_S))
            try:
                # Its memory may be still to be made, which takes long for a large one: who waits anyway waits for that.
                limit_s = min(left_s - slice_s, _made_within_s(nbytes))
                return self._ask(host, nbytes, slice_s, making(), shared, limit_s)
            except RingFull as full:
                if left_s <= _SLICE_S or time.monotonic() >= deadline_s:
                    raise
                if wait_s - left_s >= SAY_S:
                    self._waits(full, left_s)
            except NodeUnreachable as error:
                self._link.lose(host, error)
                raise

    def lease_ahead(self, host: Host, nbytes: int, making: Making = Making.NOW, *, comes: bool = False) -> None:
        """Lease the slot for the next snapshot, if that comes soon and there is one; nobody waits for it.

        Args:
            host: the ring.
            nbytes: size of the last snapshot.
            making: whether its memory is made for it.
            comes: whether it is known to come soon; else it is if snapshots have followed each other so far.
        """
        with self._lock:
            is_wanted = self._ahead is None and not self._is_awaited and (comes or self._pace_s < AHEAD_S)
            if is_wanted and host is self._link.host:
                try:
                    self._ahead = (host, self._ask(host, nbytes, 0.0, making))
                except NodeUnreachable as error:
                    self._link.lose(host, error)
                except SpotError as error:
                    logger.debug("no slot ahead: %s", error)

    def say(self, host: Host, lease: Lease) -> None:
        """Of a slot that was leased ahead: have the other ranks take part. Where that fails, nobody waits for it.

        Args:
            host: the ring.
            lease: as :meth:`take` gave it.

        Raises:
            SpotError: if there will be no snapshot.
        """
        if (shared := lease.shared) is None or lease.is_said:
            return
        try:
            host.say(lease)
        except BaseException as error:
            if isinstance(error, NodeUnreachable):
                self._link.lose(host, error)
            name, why = shared.name, f"rank 0 cannot begin it ({error})"
            self._link.tell(lambda host: host.decline(name, why))
            raise
        finally:
            self._unsaid.pop(lease.id, None)

    def say_now(self) -> None:
        """Say at once what :meth:`say` is still to say: before anything is said of a later snapshot.

        Who waits for a snapshot would hear that it was overtaken by a later one, or is over with one that cannot begin.
        To say it twice is no harm; what fails here fails there, too.
        """
        for host, lease in list(self._unsaid.values()):
            self._unsaid.pop(lease.id, None)
            try:
                host.say(lease)
            except NodeUnreachable as error:
                self._link.lose(host, error)
            except SpotError as error:
                logger.debug("for which snapshot a slot is could not be said: %s", error)

    def give_back(self) -> None:
        """Let the slot go that was leased ahead."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            give_back(*ahead, untouched=True)

    def _for(self, host: Host, lease: Lease, nbytes: int, shared: Shared) -> Lease:
        """A slot that was leased ahead, for a snapshot that is known now."""
        lease = replace(lease, nbytes=nbytes, shared=shared, is_said=shared.shares == 1)
        if not lease.is_said:
            self._unsaid[lease.id] = (host, lease)
        return lease

    def _ask(
        self,
        host: Host,
        nbytes: int,
        wait_s: float,
        making: Making,
        shared: Shared | None = None,
        limit_s: float = 0.0,
    ) -> Lease:
        more: dict[str, Any] = {"shared": shared} if shared is not None else {}
        if making is not Making.NOW:
            more["making"] = making
        if limit_s > host.max_stall_s:
            more["limit_s"] = limit_s
        lease = host.lease(nbytes, wait_s, **more)
        self._leased(lease)
        return lease


def have_made(host: Host, nbytes: int, making: Making = Making.NOW) -> Lease:
    """Lease a slot only to have its memory made, for which there is more time; see :meth:`Host.lease`."""
    return host.lease(nbytes, 0.0, limit_s=_made_within_s(nbytes), making=making)


def _made_within_s(nbytes: int) -> float:
    return _ALLOCATE_S + nbytes / _ALLOCATED_BYTES_PER_S


def give_back(host: Host, lease: Lease, *, untouched: bool = False) -> None:
    """Give a slot back unfilled; that the ring is gone is no harm. See :meth:`Host.abort`."""
    for is_last in (False, True):
        try:
            host.abort(lease, untouched=untouched)
        except SpotError as error:
            logger.debug("a slot could not be given back: %s", error)
        except Exception:  # such as want of memory: the node would keep it for as long as this process lives
            if is_last:
                raise
            continue
        break


def say_backing(say_once: Callable[..., None], lease: Lease) -> None:
    """Warn if a slot is a memory file, since tmpfs was too small for it."""
    if lease.backing == "memfd" and (shm_dir := read_environment().shm_dir) is not None:
        say_once(
            "memfd",
            "%s is too small for the slots; they are memory files held by the node instead. Same speed; a new"
            " node cannot take them over if the node itself is killed (docker: give it --shm-size)",
            shm_dir,
        )
