"""Makes the slots of a ring before they are needed, and no more: no snapshot meets a cold one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lightning_spot.capture.leases import give_back, have_made
from lightning_spot.capture.views import SlotViews
from lightning_spot.errors import NodeUnreachable, RingFull, SpotError
from lightning_spot.memory.ahead import LEAST_BYTES
from lightning_spot.memory.host import Host, Lease
from lightning_spot.memory.slots import Making
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.slot import most_in, slot_capacity

logger = logging.getLogger(__name__)

_ROOM_TO_GROW = 8
"""Slots of a state that has grown have room for so much of it again: an eighth."""
_MOST_ASKED = 8
"""So often a further slot is asked for in vain: there is no memory, or one more would not help."""
_LEAST_SLOTS = 2
"""One stays whole while the other is filled: room to grow never takes the memory of the second."""


class SlotMaker:
    """Has slots made, mapped and (for a GPU) pinned on a thread of its own: the first one, then each that is wanted.

    A slot takes a second of all processors for each GiB or two, which training loses. So the second one is made when
    the first snapshot is there, and a third only if the next snapshot would find both in use, or has.

    Args:
        views: of the slots.
        copier: that pins them.
        lose: called if the ring is lost meanwhile.

    Attributes:
        beyond: whether snapshots from a GPU may have slots beyond the ring's bound, see :func:`room.bound`.
    """

    def __init__(self, views: SlotViews, copier: Copier, lose: Callable[[Host, SpotError], None]) -> None:
        self._views, self._copier, self._lose = views, copier, lose
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

    def fits(self, host: Host, nbytes: int, *, waits: bool) -> bool:
        """Whether a snapshot can take its slot; if slots are made too small, a larger one is made in the background.

        What callbacks add is not known before, nor what a training gets later: another optimizer's state, averages. A
        state that has grown may go on growing, so its slots have room for more. Where it grows so fast that the one
        that was made in the background is too small again, training waits for the next, up to ``max_stall_s``: not
        every snapshot is skipped.

        Args:
            host: the ring.
            nbytes: of the snapshot.
            waits: whether who asks waits for the larger slot.
        """
        if self._size is None or not self.has_outgrown(nbytes):
            self._was_too_small = False
            return True
        again, self._was_too_small = self._was_too_small, True
        self.first(host, _with_room(nbytes, host.memory_bytes), gpu=self._size[1])
        return again and not waits and self.wait(host.max_stall_s)

    def again(self, host: Host) -> None:
        """Make the first slot of another ring; returns when it is there."""
        if self._size is not None:
            self._make(host, *self._size, Making.NOW)

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

        For a large one it takes longer than a node has to answer, which would count as lost, and nobody would have
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
    def now(self) -> Making:
        """Whether who waits for a slot may have its memory made now: not while slots are being made."""
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
                logger.warning("lightning_spot: no slot can be made in the background: %s", error)
                self._end()

    def _run(self) -> None:
        try:
            while (order := self._take_order()) is not None:
                self._make(*order)
        except Exception:  # who needs the slot makes it
            logger.exception("lightning_spot: a slot could not be made ahead")
            with self._lock:
                self._end()

    def _take_order(self) -> tuple[Host, int, int | None, Making] | None:
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

    def _make(self, host: Host, nbytes: int, gpu: int | None, making: Making) -> None:
        began_s = time.monotonic()
        try:
            lease = self._leased(host, nbytes, making)
            try:
                view = self._views.of(host, lease)
                if gpu is not None:
                    self._copier.pin(view, gpu)
                self._has_made, self._asked = True, 0
            finally:
                give_back(host, lease, untouched=True)  # one that was there already holds what it held
            logger.debug("slot %d was made in %.2f s", lease.slot, time.monotonic() - began_s)
        except NodeUnreachable as error:
            self._lose(host, error)
        except SpotError as error:  # who needs it has it made then, and is told; or nobody does any more
            logger.debug("no slot was made ahead: %s", error)
        except Exception:
            logger.exception("lightning_spot: a slot could not be made ahead")

    def _leased(self, host: Host, nbytes: int, making: Making) -> Lease:
        """Lease the slot to be made; where a snapshot has found none, as that would have had it made itself.

        So what is superseded goes for it, where its slots are too small for a state that has grown.
        """
        try:
            return have_made(host, nbytes, making)
        except RingFull:
            if not (making.is_ahead and self._asked):
                raise
            return have_made(host, nbytes)


def _with_room(nbytes: int, memory_bytes: int) -> int:
    """What a slot for a state that has grown to ``nbytes`` is made for."""
    grown, most = nbytes + nbytes // _ROOM_TO_GROW, most_in(memory_bytes // _LEAST_SLOTS)
    return min(grown, most) if most >= nbytes else grown
