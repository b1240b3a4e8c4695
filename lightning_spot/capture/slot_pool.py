"""Slots to fill, made before they are needed and leased in time: while snapshots follow each other closely, ahead."""

from __future__ import annotations

import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.host_link import SAY_S, HostLink, say_waiting, within
from lightning_spot.config import format_bytes, read_environment
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SpotError
from lightning_spot.protocol.slot import SHM_FULL, most_in, slot_capacity
from lightning_spot.say import UNEXPECTED, say
from lightning_spot.server.host import Host, Lease
from lightning_spot.server.slots import Making

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


def _made_within_s(nbytes: int) -> float:
    return _ALLOCATE_S + nbytes / _ALLOCATED_BYTES_PER_S


def give_back(host: Host, lease: Lease) -> None:
    """Give a slot back unfilled; that the ring is gone is no harm."""
    for is_last in (False, True):
        try:
            host.abort(lease)
        except SpotError as error:
            logger.debug("a slot could not be given back: %s", error)
        except Exception:  # such as want of memory: the server would keep it for as long as this process lives
            if is_last:
                raise
            continue
        break


def _lease(host: Host, nbytes: int, wait_s: float, making: Making, *, making_s: float, writer: int) -> Lease:
    """Lease a slot, whose memory may have to be made: that has up to ``making_s`` more, see :meth:`Host.lease`."""
    limit_s = max(making_s, host.server_call_timeout_s)
    lease = host.lease(nbytes, wait_s, limit_s=limit_s, making=making, writer=writer)
    if lease.backing == "memfd" and (shm_dir := read_environment().shm_dir) is not None:
        say(logging.WARNING, "shm-full", SHM_FULL, about=shm_dir, size=format_bytes(lease.nbytes))
    return lease


class SlotViews:
    """Views of slots, by ring and place in it. One slot is used by one thread at a time, which leased it.

    Args:
        copier: pins slots, and unpins them before they are unmapped.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._views: dict[Host, dict[int, SlotView]] = {}

    def of(self, host: Host, lease: Lease) -> SlotView:
        """The view of a leased slot; made again if the slot has other memory than last time."""
        if host not in self._views:
            self._views[host] = {}
            host.released = functools.partial(self._release, host)
        views = self._views[host]
        view = views.get(lease.slot)
        if view is None or view.map is not lease.map:
            if view is not None:
                self._copier.unpin(view)
            view = views[lease.slot] = SlotView(lease.map)
        return view

    def others(self, host: Host | None) -> list[Host]:
        """Rings beside ``host`` of which there are views: they were lost."""
        return [other for other in list(self._views) if other is not host]

    def drop(self, host: Host) -> None:
        """Let the slots of a ring go; nothing may be copied into them any more."""
        host.released = None
        for view in self._views.pop(host, {}).values():
            self._copier.unpin(view)

    def _release(self, host: Host, shared: mmap.mmap) -> None:
        """The ring has replaced a slot: let its memory go before it is unmapped."""
        views = self._views.get(host, {})
        for slot in [slot for slot, view in list(views.items()) if view.map is shared]:  # another thread may add one
            self._copier.unpin(views.pop(slot))


class SlotMaker:
    """Has slots made, mapped and (for a GPU) pinned on a thread of its own: the first one, then each that is wanted.

    A slot takes a second of all processors for each GiB or two, which training loses. So the second one is made when
    the first snapshot is there, and a third only if the next snapshot would find both in use, or has.

    Args:
        views: of the slots.
        copier: that pins them.
        lose: called if the ring is lost meanwhile.
        writer: number of the rank that fills them.

    Attributes:
        beyond: whether snapshots from a GPU may have slots beyond the ring's bound, see :func:`.slots.bound`.
    """

    def __init__(
        self, views: SlotViews, copier: Copier, lose: Callable[[Host, SpotError], None], writer: int = 0
    ) -> None:
        self._views, self._copier, self._lose, self._writer = views, copier, lose, writer
        self.beyond = False
        self._asked, self._has_made = 0, False
        self._size: tuple[int, int | None] | None = None
        self._was_too_small = False
        self._next: tuple[Host, Making] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ready = threading.Event()
        self._ready.set()

    @property
    def ready(self) -> bool:
        """Whether a snapshot can begin now without waiting for the first slot to be made."""
        return self._ready.is_set()

    def wait(self, wait_s: float) -> bool:
        """Wait for the first slot; whether it is there."""
        return self._ready.wait(wait_s)

    def first(self, host: Host | None, nbytes: int, *, gpu: int | None) -> None:
        """Have the first slot made in the background, and later those that are wanted.

        Args:
            host: the ring, ``None`` while there is none.
            nbytes: expected size of a snapshot.
            gpu: number of the GPU that tensors will come from, if they do.
        """
        self._size = (nbytes, gpu)
        if host is not None:
            self._begin(host, Making.NOW)

    def has_outgrown(self, nbytes: int) -> bool:
        """Whether slots are made too small for a snapshot."""
        return self._size is not None and nbytes > slot_capacity(self._size[0])

    def fits(self, host: Host, nbytes: int, wait_s: float) -> bool:
        """Whether a snapshot can take its slot; if slots are made too small, a larger one is made in the background.

        What callbacks add is not known before, nor what a training gets later: another optimizer's state, averages. A
        state that has grown may go on growing, so its slots have room for more. Where it grows so fast that the one
        that was made in the background is too small again, training waits for the next, up to
        ``server_call_timeout_s``: not every snapshot is skipped.

        Args:
            host: the ring.
            nbytes: of the snapshot.
            wait_s: how long who asks waits for the larger slot.
        """
        if self._size is None or not self.has_outgrown(nbytes):
            self._was_too_small = False
            return True
        again, self._was_too_small = self._was_too_small, True
        self.first(host, _with_room(nbytes, host.memory_bytes), gpu=self._size[1])
        return self.wait(wait_s or (host.server_call_timeout_s if again else 0.0))

    def again(self, host: Host) -> None:
        """Make the first slot of another ring; returns when it is there."""
        if self._size is not None:
            self.make(host, *self._size, Making.NOW)

    def another(self, host: Host, nbytes: int) -> bool:
        """The next snapshot, of about ``nbytes``, would need a slot that is not made yet: make it in the background.

        Returns:
            whether slots are made here at all; else who needs one has it made.
        """
        if self._size is None:
            return False
        self._begin(host, Making.SPARE, nbytes)
        return True

    def making(self, nbytes: int) -> Making:
        """Whether who takes a slot may have its memory made: not if that takes long, and is done here.

        For a large one it takes longer than a server has to answer, which would count as lost, and nobody would have
        pinned it.
        """
        is_done_here = self._has_made and self._asked < _MOST_ASKED
        return Making.NEVER if is_done_here and nbytes >= LEAST_BYTES else Making.NOW

    def found_none(self, host: Host, nbytes: int) -> None:
        """A snapshot found no slot, or had to wait for it: have a further one made, if there is to be one."""
        if self._has_made and self._asked < _MOST_ASKED and self._size is not None:
            self._asked += 1
            is_on_gpu = self._size[1] is not None
            self._begin(host, Making.BEYOND if is_on_gpu and self.beyond else Making.SPARE, nbytes)

    @property
    def while_waiting(self) -> Making:
        """Whether who waits for a slot may have its memory made: not while slots are being made here."""
        return Making.NEVER if self._thread is not None else Making.NOW

    def close(self, wait_s: float) -> bool:
        """Make no more; whether nothing is being made any more, after ``wait_s`` seconds at most."""
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            thread.join(wait_s)
        return thread is None or not thread.is_alive()

    def _begin(self, host: Host, making: Making, nbytes: int = 0) -> None:
        with self._lock:
            if self._closed or self._size is None:
                return
            self._size = (max(nbytes, self._size[0]), self._size[1])
            if not making.is_ahead:
                self._ready.clear()
            if self._thread is not None:  # a spare one, perhaps too small by now
                self._next = self._next if making.is_ahead else (host, making)
                return
            self._next = (host, making)
            self._thread = threading.Thread(target=self._run, name="spot-slots", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads can be had: who needs the slot makes it
                text = "no slot can be made in the background: {error}. Snapshots make them. Raise ulimit -u."
                say(logging.WARNING, "no-threads", text, about="slots", error=error)
                self._end()

    def _run(self) -> None:
        try:
            while (order := self.take_order()) is not None:
                self.make(*order)
        except Exception:  # who needs the slot makes it
            say(logging.ERROR, "unexpected", UNEXPECTED, about="making a slot", exc_info=True)
            with self._lock:
                self._end()

    def take_order(self) -> tuple[Host, int, int | None, Making] | None:
        """What to make next, of the size that is wanted now; ``None`` at the end."""
        with self._lock:
            following, self._next = self._next, None
            if following is None or self._closed or self._size is None:
                self._end()
                return None
            return (following[0], *self._size, following[1])

    def _end(self) -> None:
        """Nothing is made any more, and nobody waits for it; under the lock."""
        self._thread = self._next = None
        self._ready.set()

    def make(self, host: Host, nbytes: int, gpu: int | None, making: Making) -> None:
        """Make one slot, map it and pin it; a failure is logged, and who needs the slot makes it."""
        began_s = time.monotonic()
        try:
            lease = self._leased(host, nbytes, making)
            try:
                view = self._views.of(host, lease)
                if gpu is not None:
                    self._copier.pin(view, gpu)
                self._has_made, self._asked = True, 0
            finally:
                give_back(host, lease)
            logger.debug("slot %d was made in %.2f s", lease.slot, time.monotonic() - began_s)
        except ServerUnreachableError as error:
            self._lose(host, error)
        except SpotError as error:  # who needs it has it made then, and is told; or nobody does any more
            logger.debug("no slot was made ahead: %s", error)
        except Exception:
            say(logging.ERROR, "unexpected", UNEXPECTED, about="making a slot", exc_info=True)

    def _leased(self, host: Host, nbytes: int, making: Making) -> Lease:
        """Lease the slot to be made; where a snapshot has found none, as that would have had it made itself.

        So what is superseded goes for it, where its slots are too small for a state that has grown.
        """
        lease = functools.partial(_lease, host, nbytes, 0.0, making_s=_made_within_s(nbytes), writer=self._writer)
        try:
            return lease(making)
        except SnapshotFailedError as error:
            if error.reason is not FailureReason.RING_FULL or not (making.is_ahead and self._asked):
                raise
            return lease(Making.NOW)


def _with_room(nbytes: int, memory_bytes: int) -> int:
    """What a slot for a state that has grown to ``nbytes`` is made for."""
    grown, most = nbytes + nbytes // _ROOM_TO_GROW, most_in(memory_bytes // _LEAST_SLOTS)
    return min(grown, most) if most >= nbytes else grown


class SlotPool:
    """Leases the slots of a ring for one snapshot after the other. Methods may be called from any thread.

    Args:
        link: to the ring.
        maker: makes them.
        writer: number of the rank that fills them.
    """

    def __init__(self, link: HostLink, maker: SlotMaker, writer: int = 0) -> None:
        self._link, self._maker, self._writer = link, maker, writer
        self._lock = threading.Lock()  # held while a slot is leased ahead: who needs one now waits for that
        self._ahead: tuple[Host, Lease] | None = None
        self._taken_s, self._pace_s = float("-inf"), float("inf")
        self._is_awaited = False  # the next slot is for who waits for it, not to be leased ahead

    @property
    def idle_s(self) -> float | None:
        """After how long a slot that is leased, and nobody has asked for yet, is given back; ``None`` if none is."""
        return AHEAD_S if self._ahead is not None else None

    def wait_warm(self, host: Host, wait_s: float) -> None:
        """Wait while the first slot is made in the background, no longer than for a clean one.

        Raises:
            SnapshotFailedError: if it is not there by then.
        """
        wait_s = wait_s or host.server_call_timeout_s
        if not self._maker.wait(wait_s):
            raise SnapshotFailedError(
                f"the slot for it is still being made after {wait_s:.0f} s", reason=FailureReason.RING_FULL
            )

    def take(self, host: Host, nbytes: int, wait_s: float) -> Lease:
        """Take a slot: the one that was leased ahead, or the next that can be had; a further one may be made.

        Who waits for a slot takes that one, or one that is clean before it is made.

        Args:
            host: the ring.
            nbytes: of the snapshot.
            wait_s: how long to wait for a clean slot, in all.

        Raises:
            SpotError: if there is none.
        """
        maker, deadline_s = self._maker, time.monotonic() + wait_s
        if maker.has_outgrown(nbytes):
            self.give_back()  # it is too small, and its memory is to be made again
        if not maker.fits(host, nbytes, wait_s):
            raise SnapshotFailedError(
                "the slots are too small for it; a larger one is being made", reason=FailureReason.RING_FULL
            )
        with self._lock:
            ahead, self._ahead, self._is_awaited = self._ahead, None, True
            now_s = time.monotonic()
            self._taken_s, self._pace_s = now_s, now_s - self._taken_s
        try:
            if ahead is not None and ahead[0] is host:  # else its ring is lost, and the slot with it
                if nbytes <= len(ahead[1].map):
                    return replace(ahead[1], nbytes=nbytes)
                give_back(*ahead)
            return self._next(host, nbytes, deadline_s)
        finally:
            self._is_awaited = False

    def _next(self, host: Host, nbytes: int, deadline_s: float) -> Lease:
        """The next slot that can be had; where none could be had at once, a further one is made in the background.

        Who waits asks every few seconds: a ring that hangs is told from one that is full, or busy with making it.
        """
        maker, began_s, wait_s = self._maker, time.monotonic(), 0.0
        making = maker.making(nbytes)
        while True:
            left_s = within(deadline_s)
            wait_s = min(wait_s, left_s)
            try:
                # Its memory may be still to be made, which takes long for a large one: who waits anyway waits for that.
                making_s = min(left_s - wait_s, _made_within_s(nbytes))
                return _lease(host, nbytes, wait_s, making, making_s=making_s, writer=self._writer)
            except SnapshotFailedError as full:
                if full.reason is not FailureReason.RING_FULL:
                    raise
                if wait_s == 0:
                    maker.found_none(host, nbytes)
                if left_s <= wait_s:
                    raise
                if time.monotonic() - began_s >= SAY_S:
                    say_waiting(self._link, full, within(deadline_s))
            except ServerUnreachableError as error:
                self._link.lose(host, error)
                raise
            wait_s, making = _SLICE_S, maker.while_waiting

    def look_ahead(self, host: Host, nbytes: int, *, is_short: bool) -> None:
        """A snapshot is committed: have the slot of the next one made, or lease it.

        Args:
            host: the ring.
            nbytes: of the next one, about.
            is_short: whether it needs a slot that is still to be made.
        """
        if not (is_short and self._maker.another(host, nbytes)):
            self.lease_ahead(host, nbytes)

    def lease_ahead(self, host: Host, nbytes: int, *, comes: bool = False) -> None:
        """Lease the slot for the next snapshot, if that comes soon and there is one; nobody waits for it.

        Args:
            host: the ring.
            nbytes: size of the last snapshot.
            comes: whether it is known to come soon; else it is if snapshots have followed each other so far.
        """
        with self._lock:
            is_wanted = self._ahead is None and not self._is_awaited and (comes or self._pace_s < AHEAD_S)
            if not is_wanted or host is not self._link.host:
                return
            try:
                making = self._maker.making(nbytes)
                self._ahead = host, _lease(host, nbytes, 0.0, making, making_s=0.0, writer=self._writer)
            except ServerUnreachableError as error:
                self._link.lose(host, error)
            except SpotError as error:
                logger.debug("no slot ahead: %s", error)

    def give_back(self) -> None:
        """Let the slot go that was leased ahead."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            give_back(*ahead)
