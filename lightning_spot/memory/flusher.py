"""The flusher: brings to each tier below what it is owed, one thread a tier, each at its own pace.

A tier takes the newest snapshot when it is free: from its slots or while it still comes in, checked before it leaves
this server. What fails is retried with back-off on its own (a snapshot, a file, a deletion, a retention) and holds
nothing else up; when several things fail in a row, the tier as a whole is given time.

A snapshot server has each shard of a snapshot by itself. Storage has a snapshot of which all shards are here as one; of
another one, each place brings what it has, see :mod:`~lightning_spot.tiers.commit`.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from lightning_spot.config import KEEP
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.image.coming import Coming
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.shards import assemble
from lightning_spot.memory.ring import Held, Ring, glance
from lightning_spot.memory.runs import RunInfo, key_of
from lightning_spot.memory.slots import ORPHANED_S, Slot
from lightning_spot.memory.tier import NodeTier, TierHealth
from lightning_spot.memory.work import SURPASSED_S, Job, Kind, PutOff, Work
from lightning_spot.say import UNEXPECTED, recovered, say
from lightning_spot.tiers import commit
from lightning_spot.tiers.fences import Standing
from lightning_spot.tiers.store import SETTLED_S, Store, check_claimed, on_behalf, retain

logger = logging.getLogger(__name__)


def _say_refused(run: str, attempt: int, error: FencedError) -> None:
    """Log that a later attempt has taken over a run, so that the uploads of this one are refused."""
    text = "{error}. Snapshots of attempt {attempt} are no longer uploaded. End its trainer."
    say(logging.WARNING, "attempt-refused", text, about=f"{run} {attempt}", attempt=attempt, error=error)


CHECKED_S = 5.0
"""A snapshot that a tier takes later than this after it was sealed is read again before that, and checked."""


class Putting:
    """Puts what a :class:`~lightning_spot.memory.flusher.Flusher` has found to be next. From the thread of each tier.

    Args:
        ring: where snapshots come from.
        work: of all tiers.
        run: what is known of a run, by its key; ``None`` if nothing is.
        dropped: called with the URL of a tier, the name of a snapshot that it was to take, and why that was dropped.
    """

    def __init__(
        self,
        ring: Ring,
        work: Work,
        run: Callable[[str], RunInfo | None],
        dropped: Callable[[str, str, str], None],
    ) -> None:
        self._ring = ring
        self._work = work
        self._run = run
        self._dropped = dropped
        self._earlier = functools.partial(glance, ring)
        self._swept_s: dict[tuple[str, str], float] = {}

    def put(self, store: Store, url: str, job: Job, attempt: int) -> Manifest | None:
        """Put a snapshot; what is at the tier now, ``None`` if there was nothing to put.

        Raises:
            PutOff: if it waits for others.
            FencedError: if a later attempt has claimed the run there, and this is not what a trainer has left that is
                gone.
        """
        name = job.name
        while True:  # one more attempt may claim the run meanwhile
            try:
                return self._put(store, url, job, attempt)
            except FencedError as error:
                if error.current <= attempt or not self._is_left_over(store, job, error):
                    raise
                attempt = error.current
                text = "{about} is uploaded to {url} for a trainer that is gone: nothing there is newer"
                say(logging.INFO, "orphan-uploaded", text, about=name, url=url)

    def _is_left_over(self, store: Store, job: Job, fence: FencedError) -> bool:
        """Whether what a later attempt fences off is the newest of its run all the same, and its trainer is gone.

        That attempt may have ended before it had a snapshot, and before this server heard of it.

        Raises:
            PutOff: if that is not known yet.
        """
        info = self._run(job.run)
        is_snapshot = job.held is not None and job.coming is None and not job.manifest.is_file
        if not is_snapshot or isinstance(store, NodeTier) or (info is not None and info.session):
            return False
        with self._ring.changed:
            is_left = self._work.is_left(job.run, time.monotonic())
        if not is_left:
            _say_refused(job.run, job.manifest.attempt, fence)
            raise PutOff(f"{fence}, and its trainer may live")
        return not self.has_newer(store, job.manifest)

    def has_newer(self, store: Store, than: Manifest) -> bool:
        """Whether storage has a newer snapshot of that run."""
        return any(m.run_id == than.run_id and m.order > than.order for m in store.survey().manifests)

    def _put(self, store: Store, url: str, job: Job, attempt: int) -> Manifest | None:
        assert job.held is not None
        if job.coming is not None:
            return self._while_it_comes(store, url, job, job.coming, attempt)
        if not job.held.is_here:
            return None  # some of it has just left memory
        fresh_s = time.monotonic() - CHECKED_S
        # A snapshot server checks every part that it receives anyway.
        is_checked = url.startswith("spot://") or all(slot.checked_s > fresh_s for slot in job.slots)
        if not is_checked and not self._is_intact(url, job, job.held):
            return None
        try:
            if isinstance(store, NodeTier):
                return self._to_server(store, url, job, job.held, attempt)
            return self._to_storage(store, url, job, job.held, attempt)
        except CorruptSnapshotError:
            if not self._is_intact(url, job, job.held):
                return None
            raise

    def _to_server(self, store: NodeTier, url: str, job: Job, held: Held, attempt: int) -> Manifest:
        """Bring what slots hold to a snapshot server, one after the other; shards exactly."""
        with self._ring.changed:
            is_exact = job.manifest.shard is not None or self._work.must_be_exact(job.run, job.manifest)
        nbytes, brought = 0, job.manifest
        for slot, manifest in zip(held.slots, held.manifests, strict=True):
            if manifest.why_failed:
                store.fail(manifest)
            else:
                coming, floats = Coming(manifest, slot.view(manifest.nbytes)), () if is_exact else slot.floats
                brought = store.send(coming, attempt=attempt, earlier=self._earlier, floats=floats)
                nbytes += brought.nbytes
            self._note(slot, manifest, brought, url)
        self._trim(job)
        return replace(brought, nbytes=nbytes)

    def _to_storage(self, store: Store, url: str, job: Job, held: Held, attempt: int) -> Manifest | None:
        """Bring what slots hold to storage: as one if that is all of a snapshot; ``None`` if it is aborted.

        Raises:
            PutOff: if other shards are still to come there.
            SnapshotFailedError: if they never will.
        """
        whole: Manifest | None
        if job.is_whole:
            whole = job.manifest if job.manifest.shard is None else assemble(held.manifests)
            store.put(whole, held.image(), attempt=attempt)
        else:
            views = [slot.view(manifest.nbytes) for slot, manifest in zip(held.slots, held.manifests, strict=True)]
            found = commit.put_shards(store, list(zip(held.manifests, views, strict=True)), attempt=attempt)
            self._ring.see(job.run, job.name, found.registers)
            whole = found.manifest
            if found.why_aborted:
                for slot, manifest in zip(held.slots, held.manifests, strict=True):
                    self._ring.mark_refused(slot, manifest, url)
                return None
        if whole is None:
            why = f"{job.name} is at {store.url} as far as this server has it"
            raise PutOff(why, len(found.sizes))
        with self._ring.changed:
            if not whole.is_file and url not in self._ring.tiers(job.run).carried:
                self._work.retain(url, job.run, whole)
            for slot, manifest in zip(held.slots, held.manifests, strict=True):
                self._ring.mark_safe(slot, manifest, url)
            if job.manifest.shard is not None:
                self._ring.mark_committed(job.run, whole.lineage, whole.order)
        if whole.is_file:
            self._sweep_files(store, job.run)
        else:
            self._trim(job)
        return whole

    def _while_it_comes(self, store: Store, url: str, job: Job, coming: Coming, attempt: int) -> Manifest | None:
        """Bring a file to a tier while it is still coming in; it is committed there once it is here."""
        slot = job.slots[0]
        with self._ring.changed:
            is_exact = self._work.must_be_exact(job.run, job.manifest)
            floats = () if is_exact else slot.floats
        try:
            if isinstance(store, NodeTier):
                brought = store.send(coming, attempt=attempt, earlier=self._earlier, floats=floats)
            else:
                store.put_parts(coming.manifest, coming.parts_in_order(), attempt=attempt)
                brought = coming.committed()
        except SnapshotNotFoundError:
            if coming.given_up:
                return None
            raise
        manifest = coming.committed()
        if not url.startswith("spot://"):
            with self._ring.changed:
                self._work.retain(url, job.run, manifest)
        self._note(slot, manifest, brought, url)
        if manifest.exact == brought.exact:
            self._trim(job)
        return brought

    def _note(self, slot: Slot, manifest: Manifest, brought: Manifest, url: str) -> None:
        """A tier has what a slot holds, or an approximation of it."""
        if manifest.exact and not brought.exact:
            self._ring.mark_inexact(slot, manifest, url)
        else:
            self._ring.mark_safe(slot, manifest, url)

    def _trim(self, job: Job) -> None:
        if (info := self._run(job.run)) is not None and not job.manifest.is_file:
            self._ring.trim(job.run, info.keep)

    def _is_intact(self, url: str, job: Job, held: Held) -> bool:
        """Whether slots still hold what was committed; what is not is dropped, never carried further."""
        is_intact = True
        for slot, manifest in zip(held.slots, held.manifests, strict=True):
            try:
                manifest.verify(slot.view(manifest.nbytes), "memory")
            except CorruptSnapshotError as error:
                text = "{error}. {about} is dropped; the snapshot before it counts. Check the memory of this host."
                say(logging.ERROR, "snapshot-dropped", text, about=manifest.name, error=error)
                self._dropped(url, manifest.name, str(error))
                slot.held = ""  # nothing that is in it counts as known
                is_intact = False
                try:
                    self._ring.drop(job.run, manifest.name)
                except SnapshotNotFoundError:
                    logger.debug("%s has left memory already", manifest.name)
        return is_intact

    def _sweep_files(self, store: Store, run: str) -> None:
        """Remove what killed writers left beside a user's files: with the first put there, and now and then."""
        now_s = time.monotonic()
        if now_s - self._swept_s.get((store.url, run), -SETTLED_S) < SETTLED_S:
            return
        self._swept_s[store.url, run] = now_s
        try:
            store.sweep_files()
        except SpotError as error:
            text = "files that killed writers left at {about} could not be removed. It is retried: {error}"
            say(logging.WARNING, "leftovers-stay", text, about=store.url, error=error)


_IDLE_S = 5.0  # a thread with nothing to do ends after so long
_JOIN_S = 30.0
_AGAIN_S = 1.0  # how often who waits tries again to have a thread for a tier


class Flusher:
    """Copies committed snapshots from a ring to the stores of their tiers.

    Args:
        ring: where snapshots come from.
        open_store: makes the store of a tier's URL.
        run: what is known of a run, by its key; ``None`` if nothing is.
        heard: called after each try at a tier: its URL, and the error, or ``None`` if it worked.
        standing: what may be done for a run (its key) at a tier's URL.
    """

    def __init__(
        self,
        ring: Ring,
        open_store: Callable[[str], Store],
        run: Callable[[str], RunInfo | None],
        heard: Callable[[str, Exception | None], None] = lambda _url, _error: None,
        standing: Callable[[str, str], Standing] = lambda _run, _url: Standing(),
    ) -> None:
        self.health: dict[str, TierHealth] = {}
        self.work = Work(ring, run)
        self._ring = ring
        self._open_store = open_store
        self._run = run
        self._heard, self._standing = heard, standing
        self._putting = Putting(ring, self.work, run, self._dropped)
        self._threads: dict[str, threading.Thread] = {}
        self._wakes: dict[str, threading.Condition] = {}  # of each thread: one change wakes one, and not hundreds
        self._delayed: set[str] = set()  # tiers whose next job is to be done later
        self._busy: set[str] = set()  # tiers at which something is being done
        self._stores: dict[str, Store] = {}
        self._refused: dict[str, dict[str, Manifest]] = {}
        self._closed = False
        ring.watch(self._serve)
        with ring.changed:
            self._serve()

    def failing(self, url: str) -> bool:
        """Whether nothing succeeded at the tier since it failed."""
        with self._ring.changed:
            return self.work.backoff(url).failing

    def delete(self, url: str, manifest: Manifest) -> None:
        """Delete a snapshot at ``url``, after what is under way there (it cannot reappear) or owed of its run."""
        with self._ring.changed:
            self.work.delete(url, manifest)
            self._refused.get(key_of(manifest), {}).pop(manifest.name, None)
            self._ring.notify()

    def forget(self, run: str, urls: Iterable[str]) -> None:
        """Forget a run, and how tiers did that nothing goes to any more."""
        with self._ring.changed:
            self._refused.pop(run, None)
            for url in urls:
                if url not in self._threads:
                    self.health.pop(url, None)
                    self._stores.pop(url, None)

    def keep(self, run: str, name: str) -> None:
        """Delete nothing of that name any more: it is committed again, and will be written over."""
        with self._ring.changed:
            self.work.keep(run, name)
            self._refused.get(run, {}).pop(name, None)

    def refused(self, run: str) -> list[Manifest]:
        """Files of a run that a tier has refused for good, and that were not saved again since."""
        with self._ring.changed:
            slots = self._ring.committed(run)
            refused = [slot.manifest for slot in slots if slot.manifest is not None and slot.refused]
            found = {item.name: item for item in [*refused, *self._refused.get(run, {}).values()] if item.is_file}
            return list(found.values())

    def deletions(self, run: str) -> tuple[tuple[str, Manifest], ...]:
        """What is still to be deleted of a run, and where."""
        with self._ring.changed:
            return self.work.deletions(run)

    def is_urgent(self, run: str) -> bool:
        """Whether somebody waits for a run to be safe."""
        with self._ring.changed:
            return self.work.is_urgent(run)

    @property
    def leaves(self) -> bool:
        """Whether this server is about to end."""
        return self.work.leaves_s is not None

    def leave(self) -> None:
        """This server is about to end, see :attr:`Work.leaves_s`."""
        with self._ring.changed:
            self.work.leaves_s = time.monotonic()
            self._ring.notify()

    def owed(self) -> set[str]:
        """Tiers that wait for something, see :meth:`Work.owed`."""
        with self._ring.changed:
            return self.work.owed(None)

    def wait_clean(self, run: str | None, wait_s: float) -> list[str]:
        """Retry failing tiers now and wait until nothing of ``run`` (``None``: of any run) is owed to any tier.

        Returns:
            URLs of the tiers that were not reached in time, each with its last error; empty when all is safe.
        """
        deadline = time.monotonic() + wait_s
        with self._ring.changed:
            self.work.urge(run)
            self._ring.notify()
            try:
                while owed := self.work.owed(run):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return [f"{url}: {self._problem(url)}" for url in sorted(owed)]
                    self._ring.changed.wait(min(left, _AGAIN_S))
                    self._serve()  # a tier for which there was no thread
            finally:
                self.work.relax(run)
        return []

    def close(self) -> None:
        """Stop after the snapshot under way. Does not drain: see :meth:`wait_clean`."""
        with self._ring.changed:
            self._closed = True
            threads = list(self._threads.values())
            for wake in self._wakes.values():
                wake.notify()
            self._ring.notify()
        for thread in threads:
            thread.join(timeout=_JOIN_S)

    def _problem(self, url: str) -> str:
        health = self.health.get(url)
        return (health.error if health else "") or "not done in time"

    def _serve(self) -> None:
        """Have a thread work for every tier that is owed something. Under the ring's lock."""
        if self._closed:
            return
        urls = self.work.urls()
        for url in (urls | self._delayed) & self._wakes.keys():
            self._wakes[url].notify()
        for url in urls - self._threads.keys():
            self.health.setdefault(url, TierHealth.of(url))
            thread = threading.Thread(target=self._work, args=(url,), name=f"spot-flusher-{url}", daemon=True)
            self._threads[url], self._wakes[url] = thread, threading.Condition(self._ring.lock)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads can be had now: it is tried again with the next change
                del self._threads[url], self._wakes[url]
                self.health[url].error = str(error)

    def _work(self, url: str) -> None:
        """Do what is to be done at a tier, as long as something may be. Whatever fails, nothing would be safe after."""
        store: Store | None = None
        while True:
            try:
                if (job := self._next(url)) is None:
                    return
                store = self._work_on(url, job, store)
            except Exception as error:  # such as want of memory: there may be some again in a moment
                say(logging.ERROR, "unexpected", UNEXPECTED, about=f"uploading to {url}", exc_info=True)
                self.health[url].error = f"{type(error).__name__}: {error}"
                time.sleep(_AGAIN_S)

    def _work_on(self, url: str, job: Job, store: Store | None) -> Store | None:
        """Do one thing; the tier's store, opened if it was not, is given back."""
        attempt = job.manifest.attempt
        try:
            attempt = self._attempt(job)
            store = store or self._stores.get(url) or self._open_store(url)
            if isinstance(store, NodeTier):
                self._stores[url] = store  # it has learned how fast the server is
            self._do(store, url, job, attempt)
        except FencedError as error:
            self._fenced(url, job, attempt, error)
        except PutOff as error:
            self._put_off(store, url, job, error)
        except Exception as error:
            if isinstance(error, SnapshotFailedError) and error.reason is FailureReason.SHARD_MISSING:
                self._give_up(url, job, error)
            else:  # whatever it is, it is tried again
                if not isinstance(error, SpotError):
                    say(logging.ERROR, "unexpected", UNEXPECTED, about=f"uploading to {url}", exc_info=True)
                self._failed(url, job, error)
                store = None  # a new one reads credentials again, which may have been renewed
        finally:
            with self._ring.changed:
                self._busy.discard(url)
                for slot in job.slots:
                    slot.readers -= 1
                self._ring.notify()
        return store

    def _next(self, url: str) -> Job | None:
        """The next thing to do at a tier, its slot pinned; ``None`` when this thread is not needed any more."""
        idle_until = time.monotonic() + _IDLE_S
        wake = self._wakes[url]
        with wake:
            while not self._closed:
                now = time.monotonic()
                job, due_s = self.work.next(url, now)
                self._delayed.discard(url)
                if job is not None:
                    self._busy.add(url)
                    for slot in job.slots:
                        slot.readers += 1
                    return job
                if due_s is None:
                    self.health[url].error = ""  # what failed is not wanted any more
                    if now >= idle_until:
                        self.work.rest(url)
                        break
                    wake.wait(idle_until - now)
                else:
                    self._delayed.add(url)
                    idle_until = now + _IDLE_S
                    wake.wait(min(due_s - now, threading.TIMEOUT_MAX))  # what waits for something else has no time
            del self._threads[url], self._wakes[url]
            return None

    def _attempt(self, job: Job) -> int:
        """The attempt on whose behalf something is done: this server's own, if it has a trainer."""
        info = self._run(job.run)
        return max(info.attempt if info is not None else 0, job.manifest.attempt)

    def _do(self, store: Store, url: str, job: Job, attempt: int) -> None:
        started, standing, info = time.monotonic(), self._standing(job.run, url), self._run(job.run)
        if isinstance(store, NodeTier) and info is not None:
            # Of several servers the replication says which one carries the run on; this one may have forgotten the run.
            committed = self._ring.newest_committed(job.run, elsewhere=True)
            store.know(replace(info, nodes=(), session="", carry=info.replicas == 1, committed=committed))
        if job.kind is Kind.DELETE:
            on_behalf(store, standing, lambda: store.delete(job.manifest))
        elif job.kind is Kind.RETAIN:
            keep = info.keep if info is not None else KEEP
            name = job.name
            if unseen := on_behalf(store, standing, lambda: retain(store, keep, job.manifest)):
                text = "{why} ({snapshot})"
                say(logging.WARNING, "upload-not-listed", text, about=f"{job.run} {unseen}", why=unseen, snapshot=name)
        else:
            if standing.owner is not None and standing.is_lent and job.manifest.attempt != standing.owner.attempt:
                check_claimed(store, job.manifest.attempt)
            put = on_behalf(store, standing, lambda: self._putting.put(store, url, job, attempt))
            with self._ring.changed:
                if put is None:
                    self.work.dropped(url, job)
                    return
                sent = store.sent if isinstance(store, NodeTier) else None
                seconds = time.monotonic() - started
                self.health[url].took(put, seconds, sent)
                self.work.took(url, job.run, seconds)
        with self._ring.changed:
            self.work.done(url, job)
            self._succeeded(url)
            self._ring.notify()
        self._heard(url, None)

    def _dropped(self, url: str, name: str, why: str) -> None:
        self.health[url].dropped, self.health[url].dropped_name = why, name

    def _succeeded(self, url: str) -> None:
        health = self.health[url]
        if health.failures and not self.work.backoff(url).failing:
            recovered("upload-failing", "{about} works again", about=url)
            health.failures = 0
        health.error = self.work.error(url)

    def _failed(self, url: str, job: Job, error: Exception) -> None:
        with self._ring.changed:
            health = self.health[url]
            why = f"{job.kind.value} {job.name}: {error or type(error).__name__}"
            # A failing server is logged by the replication, with the number of servers that are left.
            if health.kind != "node" or any(slot.places is not None for slot in job.slots):
                text = "{about} fails ({why}). It is retried; snapshots stay in memory meanwhile. Check the storage."
                say(logging.WARNING, "upload-failing", text, about=url, why=why)
            self.work.failed(url, job, why)
            health.error = self.work.error(url)
            health.failures, health.failures_total = health.failures + 1, health.failures_total + 1
            self._ring.notify()
        self._heard(url, error)

    def _put_off(self, store: Store | None, url: str, job: Job, error: PutOff) -> None:
        """A put waits for the shards that others bring. In the end it is given up there."""
        with self._ring.changed:
            waited_s = self.work.later(url, job, time.monotonic(), error.there)
            self._succeeded(url)
        is_over = waited_s >= ORPHANED_S
        if waited_s >= SURPASSED_S and store is not None and not is_over:
            try:
                is_over = self._putting.has_newer(store, job.manifest)
            except SpotError as failure:  # it is looked at again
                logger.debug("%s does not tell whether it has something newer: %s", url, failure)
        if is_over:
            self._give_up(url, job, error)
        self._heard(url, None)

    def _give_up(self, url: str, job: Job, error: SpotError) -> None:
        """A tier will never have the whole of a snapshot."""
        with self._ring.changed:
            text = "{error}. No host uploads the rest; the snapshot makes room for newer ones."
            say(logging.WARNING, "upload-abandoned", text, about=url, error=error)
            self.work.done(url, job)
            for slot in job.slots:
                if slot.manifest is not None:
                    self._ring.mark_refused(slot, slot.manifest, url)
            self._succeeded(url)

    def _fenced(self, url: str, job: Job, attempt: int, error: FencedError) -> None:
        if self._attempt(job) >= error.current > attempt:
            with self._ring.changed:  # the later attempt has just become this server's own, which writes it at once
                self.work.dropped(url, job)
            return
        _say_refused(job.run, attempt, error)
        if job.coming is not None:
            job.coming.give_up()
        with self._ring.changed:
            self.work.done(url, job)
            if job.held is not None and job.kind is Kind.PUT:
                self.health[url].refuses(error, job.run, attempt)
                for slot, manifest in zip(job.slots, job.held.manifests, strict=True):
                    self._ring.mark_refused(slot, manifest, url)
                if job.manifest.is_file:
                    self._refused.setdefault(job.run, {})[job.manifest.name] = job.manifest
            self._ring.notify()
        self._heard(url, error)
