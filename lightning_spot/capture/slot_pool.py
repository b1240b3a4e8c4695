"""Slots to fill, made before they are needed and leased in time: while snapshots follow each other closely, ahead."""

from __future__ import annotations

import functools
import logging
import mmap
import threading
import time
from dataclasses import replace

from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.host_link import SAY_S, HostLink, say_waiting, seconds_left
from lightning_spot.config import format_bytes, read_environment
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SpotError
from lightning_spot.protocol.slot import SHM_FULL, most_in, slot_capacity
from lightning_spot.retry import retried
from lightning_spot.say import UNEXPECTED, say
from lightning_spot.server.host import Host, Lease
from lightning_spot.server.slots import Making
from lightning_spot.threads import InBackground

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 * 1024 * 1024
"""Smaller slots are made when they are asked for: that takes some hundredths of a second."""

AHEAD_S = 1.0
"""A slot is leased ahead if the next snapshot comes sooner; one that is not used for so long is given back."""

_SLICE_S = 2.0
_ALLOCATE_S, _ALLOCATED_BYTES_PER_S = 60.0, 200e6  # a slot's pages are made by the kernel at 3 GB/s; swapping is slower

_ROOM_TO_GROW = 8
"""Slots of a state that has grown have room for so much of it again: an eighth."""
_MOST_ASKED = 8
"""So often a further slot is asked for in vain: there is no memory, or one more would not help."""
_LEAST_SLOTS = 2
"""One stays whole while the other is filled: room to grow never takes the memory of the second."""


def give_back(host: Host, lease: Lease) -> None:
    """Give a slot back unfilled; that the ring is gone is no harm."""
    try:
        # Once more after such as want of memory: the server would keep it for as long as this process lives.
        retried(lambda: host.abort(lease), [0.0], lambda error: not isinstance(error, SpotError))
    except SpotError as error:
        logger.debug("a slot could not be given back: %s", error)


class SlotViews:
    """Views of slots, by ring and place in it. One slot is used by one thread at a time, which leased it.

    Args:
        copier: pins slots, and unpins them before they are unmapped.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._views: dict[tuple[Host, int], SlotView] = {}

    def of(self, host: Host, lease: Lease) -> SlotView:
        """The view of a leased slot; made again if the slot has other memory than last time."""
        host.released = functools.partial(self._unpin, host)
        key = (host, lease.slot)
        view = self._views.get(key)
        if view is None or view.map is not lease.map:
            if view is not None:
                self._copier.unpin(view)
            view = self._views[key] = SlotView(lease.map)
        return view

    def others(self, host: Host | None) -> set[Host]:
        """Rings beside ``host`` of which there are views: they were lost."""
        return {other for other, _ in list(self._views) if other is not host}

    def drop(self, host: Host) -> None:
        """Let the slots of a ring go; nothing may be copied into them any more."""
        host.released = None
        self._unpin(host)

    def _unpin(self, host: Host, shared: mmap.mmap | None = None) -> None:
        """Let slots of a ring go before they are unmapped: that which it has replaced, or all of them."""
        for key, view in list(self._views.items()):  # another thread may add one, or let one go
            is_meant = key[0] is host and (shared is None or view.map is shared)
            if is_meant and self._views.pop(key, None) is not None:
                self._copier.unpin(view)


class SlotPool:
    """Leases the slots of a ring for one snapshot after the other, and has them made, mapped and (for a GPU) pinned.

    Making a slot takes a second of all processors for each GiB or two, which training loses. So it is done on a thread
    of its own: the first slot at the beginning, the second when the first snapshot is there, and a third only if the
    next snapshot would find both in use, or has. Methods may be called from any thread.

    Args:
        link: to the ring.
        copier: pins slots.
        writer: number of the rank that fills them.

    Attributes:
        views: of the slots.
        beyond: whether snapshots from a GPU may have slots beyond the ring's bound, see :func:`.slot_choice.bound`.
    """

    def __init__(self, link: HostLink, copier: Copier, writer: int = 0) -> None:
        self.views = SlotViews(copier)
        self.beyond = False
        self._link, self._copier, self._writer = link, copier, writer
        # What is leased ahead.
        self._leasing = threading.RLock()  # of the one thread that leases the next slot
        self._ahead: tuple[Host, Lease] | None = None
        self._taken_s, self._pace_s = float("-inf"), float("inf")
        # What is made ahead.
        self._size: tuple[int, int | None] | None = None
        self._asked, self._has_made, self._was_too_small = 0, False, False
        self._requesting = threading.Lock()
        self._requests = InBackground[_Request](lambda request: request[0].make(*request[1:]), "spot-slots", 1)
        self._makes_further = False  # whether what was requested last is a further slot: then the first was made before

    # -- leased -------------------------------------------------------------------------------------------------------

    @property
    def idle_s(self) -> float | None:
        """After how long a slot that is leased, and nobody has asked for yet, is given back; ``None`` if none is."""
        return AHEAD_S if self._ahead is not None else None

    def take(self, host: Host, nbytes: int, wait_s: float) -> Lease:
        """Take a slot: the one that was leased ahead, or the next that can be had; a further one may be made.

        While it waits, it takes what comes first: the further slot, or another one that is clean by then.

        Args:
            host: the ring.
            nbytes: of the snapshot.
            wait_s: how long to wait for a clean slot, in all.

        Raises:
            SpotError: if there is none.
        """
        deadline_s = time.monotonic() + wait_s
        with self._leasing:  # also while it waits: no slot is leased ahead of this one
            self._make_larger(host, nbytes, wait_s)
            ahead, self._ahead = self._ahead, None
            now_s = time.monotonic()
            self._taken_s, self._pace_s = now_s, now_s - self._taken_s
            if ahead is not None and ahead[0] is host:  # else its ring is lost, and the slot with it
                if nbytes <= len(ahead[1].map):
                    return replace(ahead[1], nbytes=nbytes)
                give_back(*ahead)
            return self._next(host, nbytes, deadline_s)

    def _next(self, host: Host, nbytes: int, deadline_s: float) -> Lease:
        """The next slot that can be had; where none could be had at once, a further one is made in the background.

        Who waits asks every few seconds: a ring that hangs is told from one that is full, or busy with making it.
        """
        began_s, wait_s, making = time.monotonic(), 0.0, self._making(nbytes)
        while True:
            left_s = seconds_left(deadline_s)
            wait_s = min(wait_s, left_s)
            try:
                # Its memory may be still to be made, which takes long for a large one: who waits anyway waits for that.
                return self._lease(host, nbytes, making, wait_s, most_making_s=left_s - wait_s)
            except SnapshotFailedError as full:
                if full.reason is not FailureReason.RING_FULL:
                    raise
                if wait_s == 0:
                    self._found_none(host, nbytes)
                if left_s <= wait_s:
                    raise
                if time.monotonic() - began_s >= SAY_S:
                    say_waiting(self._link, full, seconds_left(deadline_s))
            wait_s, making = _SLICE_S, Making.NOW if self._requests.is_idle else Making.NEVER

    def _lease(
        self, host: Host, nbytes: int, making: Making, wait_s: float = 0.0, *, most_making_s: float = float("inf")
    ) -> Lease:
        """Lease a slot, whose memory may have to be made: that has some time more, see :meth:`Host.lease`."""
        making_s = min(most_making_s, _ALLOCATE_S + nbytes / _ALLOCATED_BYTES_PER_S)
        limit_s = max(making_s, host.server_call_timeout_s)
        try:
            lease = host.lease(nbytes, wait_s, limit_s=limit_s, making=making, writer=self._writer)
        except ServerUnreachableError as error:
            self._link.lose(host, error)
            raise
        if lease.backing == "memfd" and (shm_dir := read_environment().shm_dir) is not None:
            say(logging.WARNING, "shm-full", SHM_FULL, about=shm_dir, size=format_bytes(lease.nbytes))
        return lease

    def look_ahead(self, host: Host, nbytes: int, *, is_short: bool) -> None:
        """A snapshot is committed: have the slot of the next one made, or lease it.

        Args:
            host: the ring.
            nbytes: of the next one, about.
            is_short: whether it needs a slot that is still to be made.
        """
        if is_short and self._size is not None:
            self._have_made(host, Making.SPARE, nbytes)
        else:  # who needs one has it made
            self.lease_ahead(host, nbytes)

    def lease_ahead(self, host: Host, nbytes: int, *, comes: bool = False) -> None:
        """Lease the slot for the next snapshot, if that comes soon and there is one; nobody waits for it.

        Args:
            host: the ring.
            nbytes: size of the last snapshot.
            comes: whether it is known to come soon; else it is if snapshots have followed each other so far.
        """
        if not self._leasing.acquire(blocking=False):  # a snapshot takes the next one
            return
        try:
            is_wanted = self._ahead is None and (comes or self._pace_s < AHEAD_S)
            if is_wanted and host is self._link.host:
                self._ahead = host, self._lease(host, nbytes, self._making(nbytes), most_making_s=0.0)
        except SpotError as error:
            logger.debug("no slot ahead: %s", error)
        finally:
            self._leasing.release()

    def give_back_ahead(self) -> None:
        """Let the slot go that was leased ahead."""
        if self._leasing.acquire(blocking=False):  # else a snapshot has taken it
            try:
                ahead, self._ahead = self._ahead, None
            finally:
                self._leasing.release()
            if ahead is not None:
                give_back(*ahead)

    # -- made ---------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a snapshot can begin now without waiting for the first slot to be made."""
        return self._makes_further or self._requests.is_idle

    def wait(self, wait_s: float) -> bool:
        """Wait for the first slot; whether it is there."""
        return self._makes_further or self._requests.wait(wait_s)

    def wait_warm(self, host: Host, wait_s: float) -> None:
        """Wait while the first slot is made in the background, no longer than for a clean one.

        Raises:
            SnapshotFailedError: if it is not there by then.
        """
        wait_s = wait_s or host.server_call_timeout_s
        if not self.wait(wait_s):
            raise SnapshotFailedError(
                f"the slot for it is still being made after {wait_s:.0f} s", reason=FailureReason.RING_FULL
            )

    def warm(self, host: Host | None, nbytes: int, gpu: int | None) -> None:
        """Have the first slot made in the background, and later those that are wanted.

        Args:
            host: the ring, ``None`` while there is none.
            nbytes: expected size of a snapshot.
            gpu: number of the GPU that tensors will come from, if they do.
        """
        self._size = (nbytes, gpu)
        if host is not None:
            self._have_made(host, Making.NOW)

    def close(self, wait_s: float) -> bool:
        """Make no more; whether nothing is being made any more, after ``wait_s`` seconds at most."""
        with self._requesting:
            self._size = None
        return self._requests.close(wait_s)

    def _make_larger(self, host: Host, nbytes: int, wait_s: float) -> None:
        """Have a larger slot made in the background if slots are made too small for a snapshot, and wait for it or not.

        What callbacks add is not known before, nor what a training gets later: another optimizer's state, averages. A
        state that has grown may go on growing, so its slots have room for more. Where it grows so fast that the one
        that was made in the background is too small again, training waits for the next, up to
        ``server_call_timeout_s``: not every snapshot is skipped.

        Raises:
            SnapshotFailedError: if there is none yet.
        """
        again = self._was_too_small
        self._was_too_small = self._size is not None and nbytes > slot_capacity(self._size[0])
        if not self._was_too_small:
            return
        self.give_back_ahead()  # it is too small, and its memory is to be made again
        self._have_made(host, Making.NOW, _with_room(nbytes, host.memory_bytes))
        if not self.wait(wait_s or (host.server_call_timeout_s if again else 0.0)):
            raise SnapshotFailedError(
                "the slots are too small for it; a larger one is being made", reason=FailureReason.RING_FULL
            )

    def _making(self, nbytes: int) -> Making:
        """Whether taking a slot may make its memory: not for a large one, as long as the pool makes these itself.

        Making a large one takes longer than a server has to answer, which would count as lost. Only the pool pins it.
        """
        is_made_by_pool = self._has_made and self._asked < _MOST_ASKED
        return Making.NEVER if is_made_by_pool and nbytes >= LEAST_BYTES else Making.NOW

    def _found_none(self, host: Host, nbytes: int) -> None:
        """A snapshot found no slot, or had to wait for it: have a further one made, if there is to be one."""
        if self._has_made and self._asked < _MOST_ASKED and self._size is not None:
            self._asked += 1
            is_on_gpu = self._size[1] is not None
            self._have_made(host, Making.BEYOND if is_on_gpu and self.beyond else Making.SPARE, nbytes)

    def _have_made(self, host: Host, making: Making, nbytes: int = 0) -> None:
        """Have a slot made in the background, for as much as was wanted so far or more."""
        with self._requesting:
            if self._size is None:
                return
            self._size = (max(nbytes, self._size[0]), self._size[1])
            if making.is_ahead and not self._requests.is_idle:  # a spare one, perhaps too small by now
                return
            self._makes_further = making.is_ahead
            if not self._requests.add((self, host, making)):
                text = "no slot can be made in the background: no thread is left. Snapshots make them. Raise ulimit -u."
                say(logging.WARNING, "no-threads", text, about="slots")

    def make(self, host: Host, making: Making) -> None:
        """Make one slot, map it and pin it; a failure is logged, and who needs the slot makes it.

        Where a snapshot has found none, it is made as that would have had it made itself. So what is superseded goes
        for it, where its slots are too small for a state that has grown.
        """
        if (size := self._size) is None:  # nothing is wanted yet, or any more
            return
        nbytes, gpu = size
        try:
            try:
                lease = self._lease(host, nbytes, making)
            except SnapshotFailedError as error:
                if error.reason is not FailureReason.RING_FULL or not (making.is_ahead and self._asked):
                    raise
                lease = self._lease(host, nbytes, Making.NOW)
            try:
                view = self.views.of(host, lease)
                if gpu is not None:
                    self._copier.pin(view, gpu)
                self._has_made, self._asked = True, 0
            finally:
                give_back(host, lease)
        except SpotError as error:  # who needs it has it made then, and is told; or nobody does any more
            logger.debug("no slot was made ahead: %s", error)
        except Exception:
            say(logging.ERROR, "unexpected", UNEXPECTED, about="making a slot", exc_info=True)


_Request = tuple[SlotPool, Host, Making]  # the pool comes with each: no cycle keeps its slots once it is let go


def _with_room(nbytes: int, memory_bytes: int) -> int:
    """What a slot for a state that has grown to ``nbytes`` is made for."""
    grown, most = nbytes + nbytes // _ROOM_TO_GROW, most_in(memory_bytes // _LEAST_SLOTS)
    return min(grown, most) if most >= nbytes else grown
