"""Snapshots that are committed and not sealed yet, since another one is to follow in a moment.

Of snapshots at every step most are superseded before anybody reads them: their checksums would be of no use, and cost
as much as the copy. Such a snapshot is sealed when somebody needs it: a tier that takes it, a reader, whoever comes
after a trainer that has gone; or when none has followed in time. Who reads one has it sealed before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.sealing import Sealing, sealing_threads
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import Slot

logger = logging.getLogger(__name__)

FOLLOWED_S = 5.0
"""A snapshot counts as followed if another one is to come within so many seconds. It stays unsealed no longer."""

_IDLE_S = 5.0  # a thread with nothing to do ends after so long
_AGAIN_S = (0.2, 1.0, 4.0)  # what could not be sealed is tried again after so long each time


class Unsealed:
    """Seals what was committed unsealed. All methods may be called from any thread.

    Args:
        ring: that holds it.
        expects: whether a run (its key) may go on to another snapshot, and nobody waits for what is there.
        wants: whether a tier is free that takes what is there of a run at once. Both are asked under the ring's lock.
    """

    def __init__(self, ring: Ring, expects: Callable[[str], bool], wants: Callable[[str], bool]) -> None:
        self._ring, self._expects, self._wants = ring, expects, wants
        self._one = threading.Lock()  # seals at a time: each has all processors
        self._thread: threading.Thread | None = None
        self._closed = False
        ring.watch(self._serve)

    def seal(self, run: str | None = None) -> None:
        """Seal what is committed of a run (``None``: of any). What cannot be sealed is dropped."""
        for slot in self._ring.committed(run):
            if slot.unsealed and self._pin(slot):
                self._seal(slot)

    def hurry(self, run: str | None = None) -> None:
        """Have what is committed of a run (``None``: of any) sealed now, in the background: somebody waits for it.

        It may take longer than who asks for it may wait.
        """
        with self._ring.changed:
            waiting = [slot for slot in self._ring.slots if slot.unsealed and run in (None, slot.run)]
            for slot in waiting:
                slot.followed = False
            if waiting:
                self._ring.notify()
            is_served = not waiting or self._thread is not None
        if not is_served:  # no more threads can be had
            self.seal(run)

    def close(self) -> None:
        """Seal nothing more by itself."""
        with self._ring.changed:
            self._closed = True
            thread = self._thread
            self._ring.notify()
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        """Have a thread at work while there is something to seal in time. Under the ring's lock."""
        if self._thread is not None or self._closed or not any(map(_is_watched, self._ring.slots)):
            return
        self._thread = threading.Thread(target=self._work, name="spot-unsealed", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had now: it is tried again with the next change
            self._thread = None
            logger.warning("a snapshot stays unsealed for now: %s", error)

    def _pin(self, slot: Slot) -> bool:
        """Keep a slot as it is until it was sealed; whether it is still to be."""
        with self._ring.changed:
            if slot.unsealed:
                slot.readers += 1
            return slot.unsealed

    def _seal(self, slot: Slot) -> None:
        """Seal what a pinned slot holds, and let go of it."""
        try:
            with self._one:
                manifest = slot.manifest
                if manifest is None or not slot.unsealed:
                    return  # somebody else has just done it, or it was removed
                self._try_to_seal(slot, manifest)
        finally:
            self._ring.unpin(slot)

    def _try_to_seal(self, slot: Slot, manifest: Manifest) -> None:
        """Seal a snapshot. Those before it are gone, so one is not dropped for what passes, such as want of memory."""
        for pause_s in (*_AGAIN_S, None):
            began_s = time.monotonic()
            try:
                sealed = Sealing(replace(manifest, checksums=()), slot.view(manifest.nbytes)).run(sealing_threads())
            except Exception as error:  # whatever it is: nothing unsealed may be read, nor waited for for ever
                is_damaged = isinstance(error, CorruptSnapshot)
                if pause_s is None or is_damaged:
                    told = "snapshot %s cannot be sealed. It is dropped: %s"
                    logger.error(told, manifest.name, error, exc_info=not is_damaged)
                    self._drop(slot)
                    return
                why = str(error) or type(error).__name__
                logger.warning("snapshot %s cannot be sealed now (%s); it is tried again", manifest.name, why)
                with self._ring.changed:
                    if self._ring.changed.wait_for(lambda: self._closed, pause_s):
                        return  # it stays as it is, for the next node here
            else:
                self._ring.sealed(slot, manifest, sealed, began_s)
                return

    def _drop(self, slot: Slot) -> None:
        with self._ring.changed:
            slot.held = ""  # nothing that is in it counts as known
            if slot.manifest is not None:
                try:
                    self._ring.drop(slot.run, slot.manifest.name)
                except SnapshotNotFound:
                    logger.debug("it has left memory already")

    def _work(self) -> None:
        try:
            while (slot := self._next()) is not None:
                self._seal(slot)
        finally:
            with self._ring.changed:
                if self._thread is threading.current_thread():  # what is raised ends this thread: another one follows
                    self._thread = None

    def _next(self) -> Slot | None:
        """The next slot to seal, pinned; ``None`` when this thread is not needed any more."""
        idle_until = time.monotonic() + _IDLE_S
        with self._ring.changed:
            while not self._closed:
                now = time.monotonic()
                watched = [slot for slot in self._ring.slots if _is_watched(slot)]
                for slot in watched:
                    if self._is_due(slot, now) and slot.unsealed:
                        slot.readers += 1
                        return slot
                soonest = min((slot.committed_s + FOLLOWED_S for slot in watched), default=idle_until)
                if not watched and now >= idle_until:
                    break
                idle_until = max(idle_until, now + _IDLE_S if watched else 0.0)
                self._ring.changed.wait(max(0.0, soonest - now))
            self._thread = None
            return None

    def _is_due(self, slot: Slot, now_s: float) -> bool:
        """Whether a slot is to be sealed now. Where none has followed in time, none is expected any more."""
        if not slot.followed:
            return True
        if slot.committed_s + FOLLOWED_S <= now_s or not self._expects(slot.run):
            slot.followed = False
            self._ring.notify()  # tiers take it at once then
            return True
        return self._wants(slot.run)


def _is_watched(slot: Slot) -> bool:
    """Whether something is to be done about a slot in time."""
    return slot.followed or slot.unsealed
