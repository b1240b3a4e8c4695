"""The flusher: brings dirty slots to the tiers below, one thread a tier, oldest first, and clears a bit when it may."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_spot.errors import CorruptSnapshot, Fenced, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.ring import Ring, Slot
from lightning_spot.memory.runs import key_of
from lightning_spot.tiers.store import Store, retain

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


@dataclass(slots=True)
class TierHealth:
    """How a tier below is doing.

    Attributes:
        error: what failed last, ``""`` while the tier works.
        failures: failures in a row.
        flushed: snapshots brought there so far.
        flushed_bytes: their bytes.
        flush_s: seconds that took.
    """

    error: str = ""
    failures: int = 0
    flushed: int = 0
    flushed_bytes: int = 0
    flush_s: float = 0.0


class Flusher:
    """Copies committed snapshots from a ring to the stores of their destinations.

    Args:
        ring: where snapshots come from.
        open_store: makes the store of a destination URL.
        writer: tells on behalf of which attempt a run is written now.
        keep: tells how many snapshots of a run each tier keeps.
    """

    def __init__(
        self,
        ring: Ring,
        open_store: Callable[[str], Store],
        writer: Callable[[str], int],
        keep: Callable[[str], int],
    ) -> None:
        self.health: dict[str, TierHealth] = {}
        self._ring = ring
        self._open_store = open_store
        self._writer = writer
        self._keep = keep
        self._threads: dict[str, threading.Thread] = {}
        self._deletions: dict[str, list[Manifest]] = {}
        self._tidying: set[str] = set()
        self._hurry: set[str] = set()
        self._closed = False

    def failing(self, url: str) -> bool:
        """Whether the tier failed last time it was tried."""
        health = self.health.get(url)
        return health is not None and bool(health.error)

    def serve(self, url: str) -> None:
        """Make sure a thread flushes to ``url``."""
        with self._ring.changed:
            if url in self._threads or self._closed:
                return
            self.health.setdefault(url, TierHealth())
            thread = threading.Thread(target=self._work, args=(url,), name=f"spot-flusher-{url}", daemon=True)
            self._threads[url] = thread
        thread.start()

    def delete(self, url: str, manifest: Manifest) -> None:
        """Delete a snapshot at ``url``, after whatever is under way there (so that it cannot reappear)."""
        with self._ring.changed:
            self._deletions.setdefault(url, []).append(manifest)
            self._ring.changed.notify_all()
        self.serve(url)

    def wait_clean(self, run: str | None, wait_s: float) -> list[str]:
        """Retry failing tiers now and wait until nothing of ``run`` (``None``: of any run) is dirty.

        Returns:
            URLs of the tiers that were not reached in time, each with its last error; empty when all is safe.
        """
        deadline = time.monotonic() + wait_s
        with self._ring.changed:
            self._hurry.update(self._threads)
            self._ring.changed.notify_all()
            while dirty := self._dirty(run):
                left = deadline - time.monotonic()
                if left <= 0:
                    return [f"{url}: {self.health[url].error or 'not done in time'}" for url in sorted(dirty)]
                self._ring.changed.wait(left)
        return []

    def close(self) -> None:
        """Stop after the snapshot under way. Does not drain: see :meth:`wait_clean`."""
        with self._ring.changed:
            self._closed = True
            self._ring.changed.notify_all()
        for thread in self._threads.values():
            thread.join(timeout=LAST_RETRY_S)

    def _dirty(self, run: str | None) -> set[str]:
        deleting = {url for url, waiting in self._deletions.items() if waiting}
        return deleting | self._tidying | {url for slot in self._ring.committed(run) for url in slot.dirty}

    def _work(self, url: str) -> None:
        store: Store | None = None
        while True:
            with self._ring.changed:
                while not (self._closed or self._deletions.get(url) or self._ring.next_dirty(url)):
                    self._ring.changed.wait()
                if self._closed:
                    return
                slot = self._ring.next_dirty(url)
                manifest = slot.manifest if slot is not None else None
            try:
                store = store or self._open_store(url)
                self._delete_waiting(store, url)
                if slot is not None and manifest is not None:
                    self._flush(store, url, slot, manifest)
            except SnapshotNotFound:
                continue  # dropped while we looked at it
            except Fenced as error:
                if slot is None or manifest is None or self._writer(key_of(manifest)) >= error.current:
                    continue  # the later attempt is this node's own: write on its behalf
                logger.warning("%s", error)
                self._ring.give_up(slot, manifest, url)
            except SpotError as error:
                self._failed(url, error)
            except Exception as error:  # a bug must not end the thread, or nothing would ever be safe again
                logger.exception("flushing to %s failed unexpectedly", url)
                self._failed(url, error)

    def _delete_waiting(self, store: Store, url: str) -> None:
        while waiting := self._deletions.get(url):
            store.delete(waiting[0])
            with self._ring.changed:
                waiting.pop(0)
                self._ring.changed.notify_all()

    def _flush(self, store: Store, url: str, slot: Slot, manifest: Manifest) -> None:
        started = time.monotonic()
        with self._ring.reading(slot, manifest) as image:
            try:
                manifest.verify(image, "memory")  # never carry a corrupted slot further
            except CorruptSnapshot as error:
                logger.error("%s. It is dropped; the one before it stands", error)
                self._drop(manifest)
                return
            store.put(manifest, image, attempt=max(self._writer(key_of(manifest)), manifest.attempt))
        self._succeeded(url, manifest.nbytes, time.monotonic() - started)
        with self._ring.changed:
            self._tidying.add(url)
            self._ring.mark_safe(slot, manifest, url)
        try:
            if not manifest.is_file:
                self._ring.trim(key_of(manifest), self._keep(key_of(manifest)))
                retain(store, self._keep(key_of(manifest)), manifest)
        except SpotError as error:
            logger.warning("old snapshots at %s could not be removed: %s", url, error)
        finally:
            with self._ring.changed:
                self._tidying.discard(url)
                self._ring.changed.notify_all()

    def _drop(self, manifest: Manifest) -> None:
        try:
            self._ring.drop(key_of(manifest), manifest.name)
        except SnapshotNotFound:
            logger.debug("%s has left memory already", manifest.name)

    def _succeeded(self, url: str, nbytes: int, seconds: float) -> None:
        health = self.health[url]
        if health.error:
            logger.warning("%s works again", url)
        health.error, health.failures = "", 0
        health.flushed += 1
        health.flushed_bytes += nbytes
        health.flush_s += seconds

    def _failed(self, url: str, error: Exception) -> None:
        health = self.health[url]
        if not health.error:
            logger.warning("%s fails (%s); snapshots stay in memory and it is tried again", url, error)
        with self._ring.changed:
            health.error, health.failures = str(error), health.failures + 1
            self._ring.changed.notify_all()  # the ring may now supersede what waits for this tier
            pause = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(health.failures - 1, 10))
            deadline = time.monotonic() + pause
            self._hurry.discard(url)
            while not self._closed and url not in self._hurry and (left := deadline - time.monotonic()) > 0:
                self._ring.changed.wait(left)
            self._hurry.discard(url)
