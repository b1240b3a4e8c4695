"""How one snapshot is put to a tier: from its slot or while it still comes in, checked before it leaves this node."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from lightning_spot.errors import CorruptSnapshot, Fenced, SnapshotNotFound, SpotError
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.bases import glance
from lightning_spot.memory.later import PutOff
from lightning_spot.memory.portion_put import NotWhole, put_portion
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.slots import Slot
from lightning_spot.memory.tier import NodeTier
from lightning_spot.memory.work import Job, Work
from lightning_spot.tiers.store import SETTLED_S, Store

logger = logging.getLogger(__name__)

CHECKED_S = 5.0
"""A snapshot that a tier takes later than this after it was sealed is read again before that, and checked."""


class Putting:
    """Puts what a :class:`~lightning_spot.memory.flusher.Flusher` has found to be next. From the thread of each tier.

    Args:
        ring: where snapshots come from.
        work: of all tiers.
        run: what is known of a run, by its key; ``None`` if nothing is.
        dropped: called with the URL of a tier, and why what it was to take was dropped.
    """

    def __init__(
        self, ring: Ring, work: Work, run: Callable[[str], RunInfo | None], dropped: Callable[[str, str], None]
    ) -> None:
        self._ring = ring
        self._work = work
        self._run = run
        self._dropped = dropped
        self._earlier = functools.partial(glance, ring)
        self._swept_s: dict[tuple[str, str], float] = {}
        self._put_off: dict[tuple[str, str, int], str] = {}  # by tier, run and host: of which snapshot it was said last

    def put(self, store: Store, url: str, job: Job, attempt: int) -> Manifest | None:
        """Put a snapshot; what is at the tier now, ``None`` if there was nothing to put.

        Raises:
            PutOff: if it waits for others.
            Fenced: if a later attempt has claimed the run there, and this is not what a trainer has left that is gone.
        """
        name = job.manifest.name
        while True:  # one more attempt may claim the run meanwhile
            try:
                return self._put(store, url, job, attempt)
            except Fenced as error:
                if error.current <= attempt or not self._is_left_over(store, job, error):
                    raise
                attempt = error.current
                logger.info("%s goes to %s all the same: its trainer is gone, and nothing is newer there", name, url)

    def _is_left_over(self, store: Store, job: Job, fence: Fenced) -> bool:
        """Whether what a later attempt fences off is the newest of its run all the same, and its trainer is gone.

        That attempt may have ended before it had a snapshot, and before this node heard of it.

        Raises:
            PutOff: if that is not known yet.
        """
        info = self._run(job.run)
        is_snapshot = job.slot is not None and job.coming is None and not job.manifest.is_file
        if not is_snapshot or isinstance(store, NodeTier) or (info is not None and info.session):
            return False
        with self._ring.changed:
            is_left = self._work.is_left(job.run, time.monotonic())
        if not is_left:
            portion = job.manifest.portion
            of_what = (store.url, job.run, portion.host if portion is not None else 0)
            if self._put_off.get(of_what) != job.manifest.name:
                self._put_off[of_what] = job.manifest.name
                logger.warning("%s. What is here of it is tried again when that trainer is gone", fence)
            raise PutOff(f"{fence}, and its trainer may live")
        return not self._has_newer(store, job.manifest)

    def _has_newer(self, store: Store, than: Manifest) -> bool:
        return any(m.run_id == than.run_id and m.order > than.order for m in store.survey().manifests)

    def _put(self, store: Store, url: str, job: Job, attempt: int) -> Manifest | None:
        slot, info = job.slot, self._run(job.run)
        assert slot is not None
        with self._ring.changed:
            floats = () if self._work.must_be_exact(job.run, job.manifest) else slot.floats
        if job.manifest.portion is not None:
            return self._portion(store, url, job, slot, attempt)
        if job.coming is not None:
            brought = self._while_it_comes(store, job.coming, attempt, floats)
        else:
            brought = self._from_slot(store, url, job, slot, attempt, floats)
        if brought is None:
            return None
        manifest = job.manifest if job.coming is None else job.coming.committed()
        if manifest.exact and not brought.exact:
            self._ring.mark_inexact(slot, manifest, url)
            return brought
        with self._ring.changed:
            if url not in self._ring.tiers(job.run).carried and not url.startswith("spot://") and not manifest.is_file:
                self._work.retain(url, job.run, manifest)
            self._ring.mark_safe(slot, manifest, url)
        if manifest.is_file:
            self._sweep_files(store, job.run)
        elif info is not None:
            self._ring.trim(job.run, info.keep)
        return manifest

    def _portion(self, store: Store, url: str, job: Job, slot: Slot, attempt: int) -> Manifest | None:
        """Bring one host's portion to a durable tier, to which other nodes bring the others; see :meth:`put`.

        Raises:
            NotWhole: if these are still to come.
        """
        manifest = job.manifest
        with slot.view(manifest.nbytes) as image:
            if slot.manifest is not manifest:
                return None
            try:
                whole = put_portion(store, manifest, image, attempt=attempt)
            except NotWhole as error:
                error.is_surpassed = self._has_newer(store, manifest)
                raise
            except CorruptSnapshot:
                if not self._is_intact(url, image, job, slot):
                    return None
                raise
        with self._ring.changed:
            self._work.retain(url, job.run, whole)
            self._ring.mark_safe(slot, manifest, url)
        return manifest

    def _while_it_comes(
        self, store: Store, coming: Coming, attempt: int, floats: tuple[Floats, ...]
    ) -> Manifest | None:
        """Bring a file to a tier while it is still coming in; it is committed there once it is here."""
        try:
            if isinstance(store, NodeTier):
                return store.send(coming, attempt=attempt, earlier=self._earlier, floats=floats)
            store.put_parts(coming.manifest, coming.parts_in_order(), attempt=attempt)
            return coming.committed()
        except SnapshotNotFound:
            if coming.given_up:
                return None
            raise

    def _from_slot(
        self, store: Store, url: str, job: Job, slot: Slot, attempt: int, floats: tuple[Floats, ...]
    ) -> Manifest | None:
        """Bring a committed file to a tier."""
        manifest = job.manifest
        with slot.view(manifest.nbytes) as image:
            if slot.manifest is not manifest:
                return None  # it has just left memory
            fresh = time.monotonic() - slot.checked_s < CHECKED_S
            # A memory node checks every part that it receives anyway.
            if not (fresh or url.startswith("spot://")) and not self._is_intact(url, image, job, slot):
                return None
            try:
                if isinstance(store, NodeTier):
                    coming = Coming(manifest, image)
                    return store.send(coming, attempt=attempt, earlier=self._earlier, floats=floats)
                store.put(manifest, image, attempt=attempt)
                return manifest
            except CorruptSnapshot:
                if not self._is_intact(url, image, job, slot):
                    return None
                raise

    def _is_intact(self, url: str, image: memoryview, job: Job, slot: Slot) -> bool:
        """Whether a slot still holds what was committed; if not it is dropped, never carried further."""
        try:
            job.manifest.verify(image, "memory")
        except CorruptSnapshot as error:
            logger.error("%s. It is dropped; the one before it stands", error)
            self._dropped(url, str(error))
            slot.held = ""  # nothing that is in it counts as known
            try:
                self._ring.drop(job.run, job.manifest.name)
            except SnapshotNotFound:
                logger.debug("%s has left memory already", job.manifest.name)
            return False
        return True

    def _sweep_files(self, store: Store, run: str) -> None:
        """Remove what killed writers left beside a user's files: with the first put there, and now and then."""
        now_s = time.monotonic()
        if now_s - self._swept_s.get((store.url, run), -SETTLED_S) < SETTLED_S:
            return
        self._swept_s[store.url, run] = now_s
        try:
            store.sweep_files()
        except SpotError as error:
            logger.warning("what killed writers left at %s stays for now: %s", store.url, error)
