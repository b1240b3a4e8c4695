"""Makes the memory of slots before it is asked for, while a snapshot is received."""

from __future__ import annotations

import logging
import threading

from lightning_spot.errors import SpotError
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import SlotState

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 * 1024 * 1024
"""Smaller slots are made when they are asked for: that takes some hundredths of a second."""

_WAIT_S = 30.0


class SlotsAhead:
    """Slots made before they are asked for, one at a time for each run. Methods may be called from any thread.

    Only memory that is free is used: nothing that is held leaves memory for it.

    Args:
        ring: whose slots.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._making: dict[str, threading.Thread] = {}
        self._closed = False

    def make(self, run: str, nbytes: int, count: int) -> None:
        """Have one more slot made in the background, unless a run has ``count`` of them.

        Args:
            run: key of the run.
            nbytes: size of its snapshots.
            count: slots that it will use in turn.
        """
        if nbytes < LEAST_BYTES:
            return
        with self._ring.changed:
            fitting = [slot for slot in self._ring.slots if slot.takes(nbytes)]
            usable = sum(slot.run == run or slot.state is SlotState.FREE for slot in fitting)
            if usable >= count or run in self._making or self._closed:
                return
            thread = threading.Thread(target=self._make, args=(run, nbytes), name="spot-slot-ahead", daemon=True)
            self._making[run] = thread
            try:
                thread.start()
            except RuntimeError as error:  # no more threads can be had now: who asks for the slot makes it
                del self._making[run]
                logger.debug("no slot is made ahead for run %s: %s", run, error)

    def wait(self, run: str) -> None:
        """Wait for the slot that is being made for a run, if one is: to make another one would take longer."""
        if (thread := self._making.get(run)) is not None:
            thread.join(_WAIT_S)

    def close(self) -> None:
        """Make no more, and wait for what is being made."""
        with self._ring.changed:
            self._closed = True
            threads = list(self._making.values())
        for thread in threads:
            thread.join(_WAIT_S)

    def _make(self, run: str, nbytes: int) -> None:
        try:
            if (slot := self._ring.try_lease(run, nbytes, only_new=True)) is not None:
                self._ring.abort(slot)
        except SpotError as error:
            logger.debug("no slot was made ahead for run %s: %s", run, error)
        except Exception:  # who asks for a slot makes it then, and is told what is wrong
            logger.exception("a slot could not be made ahead")
        finally:
            with self._ring.changed:
                self._making.pop(run, None)
