"""Page-locked memory of this process, into which bytes of GPUs are brought that are only looked at."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable

from lightning_spot.staging.batch import SlotView

logger = logging.getLogger(__name__)

MOST = 3
"""Snapshots on their way at once, of which some bytes are looked at. One more finds no memory for that."""

_GRAIN = 2 * 1024 * 1024


class Scratch:
    """Some memories for a snapshot each, no more than were wanted at once.

    Args:
        pin: page-locks one for copies from a GPU, which has a number.
        unpin: undoes that, once nothing is copied there any more.
    """

    def __init__(self, pin: Callable[[SlotView, int], None], unpin: Callable[[SlotView], None]) -> None:
        self._pin, self._unpin = pin, unpin
        self._free: list[SlotView] = []
        self._lent: list[SlotView] = []
        self._closed = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> SlotView | None:
        """A memory of so many bytes at least, until it is given back; ``None`` if none is free."""
        with self._lock:
            found = next((view for view in self._free if len(view.map) >= nbytes), None)
            if found is not None:
                self._free.remove(found)
                self._lent.append(found)
            return found

    def give_back(self, view: SlotView) -> None:
        """Nothing is copied there any more, and nobody reads it."""
        with self._lock:
            if view in self._lent:
                self._lent.remove(view)
                self._free.append(view)

    def make(self, nbytes: int, index: int) -> None:
        """Have one more of so many bytes, if none is free and there may be one; the thread that trains would wait.

        Args:
            nbytes: that are wanted.
            index: number of a GPU from which it is copied to.
        """
        with self._lock:
            too_small = [view for view in self._free if len(view.map) < nbytes]
            if self._closed or len(too_small) < len(self._free) or len(self._lent) >= MOST:
                return
            self._free.clear()
        for view in too_small:
            self._unpin(view)
        try:
            made = SlotView(mmap.mmap(-1, -(-nbytes // _GRAIN) * _GRAIN))
        except OSError as error:  # then all is copied
            logger.debug("no memory to look at what is not copied again: %s", error)
            return
        self._pin(made, index)
        with self._lock:
            if not self._closed:
                self._free.append(made)
                return
        self._unpin(made)

    def close(self) -> None:
        """Let all of it go; nothing is copied there any more."""
        with self._lock:
            self._closed = True
            views = [*self._free, *self._lent]
            self._free.clear()
            self._lent.clear()
        for view in views:
            self._unpin(view)
