"""The workers that do what a run is still to have: one for each destination, and one for questions to each server.

Each has a pace and a back-off of its own. It takes what :mod:`~lightning_spot.server.reconcile` says is to be done at
its destination now, does it, and notes what it has seen. What failed is still to be done then.

A snapshot server gets each shard of a snapshot by itself. Storage gets a snapshot as one where all its shards are here;
of any other snapshot, each place brings what it has, see :mod:`~lightning_spot.store.commit`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_spot.config import names_server
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SnapshotFailedError,
    SpotError,
)
from lightning_spot.say import UNEXPECTED, recovered, say
from lightning_spot.server.observations import Observations
from lightning_spot.server.reconcile import (
    LAST_LOOK_S,
    SURPASSED_S,
    WORKER,
    Action,
    Deletion,
    Kind,
    Lane,
    Servers,
    actions,
    owed_files,
)
from lightning_spot.server.ring import Ring
from lightning_spot.server.runs import RunInfo, key_of
from lightning_spot.server.slots import ORPHANED_S, Mark, Resident
from lightning_spot.server.tier import ServerTier, Tier
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import assemble
from lightning_spot.store import commit
from lightning_spot.store.fences import Standing
from lightning_spot.store.retention import retain
from lightning_spot.store.store import Result, Store, check_claimed, on_behalf

logger = logging.getLogger(__name__)

CHECKED_S = 5.0
"""A snapshot that was sealed longer ago than this is read again, and checked, before a tier takes it."""

IDLE_S = 5.0
"""A thread with nothing to do ends after so long."""

_JOIN_S = 30.0
_AGAIN_S = 1.0  # pause of a worker in which something unexpected failed


class PutOff(SpotError):
    """An upload waits for what others do; its tier works.

    Attributes:
        there: files of the snapshot that are there, of all places.
    """

    def __init__(self, why: str, there: int = 0) -> None:
        super().__init__(why)
        self.there = there


@dataclass(eq=False, slots=True)
class _Worker:
    thread: threading.Thread
    wake: threading.Condition  # of its own: one change wakes one, and not hundreds


class Reconciler(Observations):
    """Brings the snapshots of a ring to where they are to be, and keeps the servers of its runs up to date.

    Any thread may call it.

    Args:
        ring: where snapshots come from.
        open_store: makes the store of a tier's URL.
        info: tells what is known of a run, by its key; ``None`` if nothing is.
        standing: what may be done for a run (its key) at a tier's URL.
    """

    def __init__(
        self,
        ring: Ring,
        open_store: Callable[[str], Tier],
        info: Callable[[str], RunInfo | None],
        standing: Callable[[str, str], Standing] = lambda _run, _url: Standing(),
    ) -> None:
        super().__init__(ring, open_store, info)
        self._standing = standing
        self._plans: dict[str, list[Action]] = {}
        self._workers: dict[Lane, _Worker] = {}
        self._refused: dict[str, dict[str, Manifest]] = {}  # files, by run and name: their slots may be reused
        self._is_planning = self._closed = False
        ring.watch(self._plan_stale)
        with ring.changed:
            self._plan_stale()

    # -- what is wanted -------------------------------------------------------------------------------------------

    def delete(self, url: str, manifest: Manifest) -> None:
        """Delete a snapshot or file at ``url``, after what is under way there (it cannot reappear)."""
        run = key_of(manifest)
        with self._ring.changed:
            self.destination(url).deletions.append(Deletion(manifest, owed_files(self._ring.view(run), url)))
            self._refused.get(run, {}).pop(manifest.name, None)
            self._ring.touch(run)

    def cancel_deletions(self, run: str, committed: Manifest) -> None:
        """Delete nothing of that name any more: it was committed again, and will be written over."""
        name = committed.name
        with self._ring.changed:
            for deletions in [each.deletions for each in self._destinations.values()]:
                left = [each for each in deletions if (key_of(each.manifest), each.manifest.name) != (run, name)]
                if len(left) < len(deletions):
                    deletions[:] = left
                    self._ring.touch(run)
            self._refused.get(run, {}).pop(name, None)

    def set_servers(self, run: str, servers: Servers | None) -> None:
        """Say which servers a run may be kept at from now on; ``None`` for none."""
        with self._ring.changed:
            before = self.servers.pop(run, None)
            if servers is not None:
                self.servers[run] = servers
            for each in before.all if before is not None else ():
                if servers is None or servers.find(each.url) is None:
                    self._stores.pop(each.url, None)
                    self._forget(each.url, run)
            self._ring.touch(run)

    def ask_now(self, run: str) -> None:
        """Ask the servers of a run how they are, which tells them what is known of it."""
        with self._ring.changed:
            if (servers := self.servers.get(run)) is not None:
                for server in servers.used:
                    server.is_due = True
                self._ring.touch(run)

    def forget(self, run: str) -> None:
        """Forget a run, and how tiers did that nothing goes to any more."""
        with self._ring.changed:
            self._refused.pop(run, None)
            self.set_servers(run, None)
            for url in list(self._destinations):
                self._forget(url, run)

    def _forget(self, url: str, run: str) -> None:
        """Nothing of a run goes there any more: a destination is forgotten if nothing does and its worker has ended."""
        if (destination := self._destinations.get(url)) is not None:
            destination.forget(run)
            if destination.is_blank and (url, False) not in self._workers:
                del self._destinations[url]

    def leave(self) -> None:
        """This server is about to end: what it has of snapshots that are not complete here is waited for, too."""
        with self._ring.changed:
            self._leaves_s = time.monotonic()
            self._touch(None)

    def flush(self, run: str | None, wait_s: float, cancelled: Callable[[], bool] = lambda: False) -> list[str]:
        """Put nothing of ``run`` (``None``: of any run) off, and wait until nothing of it is awaited any more.

        Args:
            run: key of the run.
            wait_s: for how long.
            cancelled: asked while waiting: whether nobody wants to know any more.

        Returns:
            URLs that were not reached in time, each with its last error; empty when all is safe.
        """
        deadline_s = time.monotonic() + wait_s
        with self._ring.changed:
            self._waited_for[run] += 1
            try:
                self.hurry(run)
                while (awaited := self.awaited(run)) and self._ring.wait(deadline_s, cancelled):
                    self._plan_stale()  # also a tier for which there was no thread
                return [f"{url}: {self.destination(url).error or 'not done in time'}" for url in sorted(awaited)]
            finally:
                self._waited_for -= Counter({run: 1})  # unlike ``[run] -= 1``, this removes a run at 0
                self._touch(run)

    def hurry(self, run: str | None = None) -> None:
        """Have what fails of a run (``None``: of any) tried soon, and its servers asked."""
        with self._ring.changed:
            for url in self._destinations.keys() if run is None else self._destinations.keys() & self.awaited(run):
                self._destinations[url].shorten()
            now_s = time.monotonic()
            for key, servers in self.servers.items():
                for server in servers.used if run in (None, key) else ():
                    server.is_due |= now_s - server.answered_s >= LAST_LOOK_S
            self._touch(run)

    # -- what is so -----------------------------------------------------------------------------------------------

    def refused(self, run: str) -> list[Manifest]:
        """Files of a run that a tier has refused for good, and that were not saved again since."""
        with self._ring.changed:
            refused = [slot.content for slot in self._ring.contents(run) if slot.refused]
            found = {item.name: item for item in [*refused, *self._refused.get(run, {}).values()] if item.is_file}
            return list(found.values())

    # -- who does it ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop after what is under way. Does not drain: see :meth:`flush`."""
        with self._ring.changed:
            self._closed = True
            workers = list(self._workers.values())
            for worker in workers:
                worker.wake.notify()
            self._ring.notify()
        deadline_s = time.monotonic() + _JOIN_S
        for worker in workers:
            worker.thread.join(max(0.0, deadline_s - time.monotonic()))

    def _touch(self, run: str | None) -> None:
        self._ring.stale |= {run} if run is not None else self._runs()
        self._ring.notify()

    def _plan_stale(self) -> None:
        """Find out what is to be done of runs of which something has changed, and by whom. Under the ring's lock.

        Whoever has changed something has done so, whatever fails here: it is found out with the next change, and soon
        while any worker lives.
        """
        if self._closed or self._is_planning:
            return
        self._is_planning, lanes, failed = True, set[Lane](), set[str]()
        try:
            while self._ring.stale:
                run = next(iter(self._ring.stale))
                try:
                    lanes |= self._plan(run)
                except Exception:  # such as want of memory: there may be some again in a moment
                    self._ring.stale.discard(run)
                    failed.add(run)
                    say(logging.ERROR, "unexpected", UNEXPECTED, about=f"planning for {run}", exc_info=True)
        finally:
            self._is_planning = False
            self._ring.stale |= failed
        for lane in lanes & self._workers.keys():
            self._workers[lane].wake.notify()
        self._start()

    def _replan(self, run: str) -> None:
        self._ring.stale.add(run)
        self._plan_stale()

    def _plan(self, run: str) -> set[Lane]:
        """Find out what is to be done for a run; the lanes at which it has changed."""
        if (info := self.info(run)) is not None:
            self._ring.trim(run, info.keep.newest)
        if (servers := self.servers.get(run)) is not None:
            self._ring.set_tiers(run, servers.tiers())
        before, plan = self._plans.pop(run, []), actions(self.desired(run), self.observed(run), time.monotonic())
        if plan:
            self._plans[run] = plan
        self._ring.stale.discard(run)
        return {each.lane for each in (*before, *plan)}

    def _planned(self, lane: Lane) -> list[Action]:
        return [each for plan in self._plans.values() for each in plan if each.lane == lane]

    def _start(self) -> None:
        """Have a worker for every lane on which something is to be done."""
        lanes = {each.lane for plan in self._plans.values() for each in plan}
        for lane in lanes - self._workers.keys() if not self._closed else ():
            url, asks = lane
            if not asks:
                self.destination(url)  # it is seen from now on
            name = f"spot-{'asker' if asks else 'uploader'}-{url}"
            thread = threading.Thread(target=self._work, args=(lane,), name=name, daemon=True)
            self._workers[lane] = _Worker(thread, threading.Condition(self._ring.lock))
            try:
                thread.start()
            except RuntimeError as error:  # no more threads can be had now: it is tried again with the next change
                del self._workers[lane]
                self.destination(url).failing[WORKER] = str(error)

    def _work(self, lane: Lane) -> None:
        """Do what is to be done at a destination, whatever fails: nothing would be safe after that."""
        url, asks = lane
        store: Tier | None = None
        while True:
            try:
                if (found := self._next(lane)) is None:
                    break
                action, servers = found
                if servers is not None and asks:
                    self.ask(action, servers)
                elif not asks:
                    store = self._work_on(action, store)
            except Exception as error:  # such as want of memory: there may be some again in a moment
                say(logging.ERROR, "unexpected", UNEXPECTED, about=f"working at {url}", exc_info=True)
                if not asks:
                    with self._ring.changed:
                        self.destination(url).failing[WORKER] = f"{type(error).__name__}: {error}"
                time.sleep(_AGAIN_S)
        if asks:
            self._last_word(url)

    def _last_word(self, url: str) -> None:
        """If this server ends, a server hears how each run has ended here: it would keep what is durable for ever."""
        with self._ring.changed:
            served = list(self.servers.values()) if self._closed else []
        for servers in served:
            try:
                if (server := servers.find(url)) is not None and server.used:
                    self._tier(server).open_run(self.told(servers.info, url))
            except SpotError as error:
                logger.debug("%s did not hear how run %s has ended: %s", url, servers.info.text, error)

    def _next(self, lane: Lane) -> tuple[Action, Servers | None] | None:
        """The next thing to do at a destination, its slots pinned; ``None`` when this worker is not needed any more."""
        url, asks = lane
        idle_until_s, wake = time.monotonic() + IDLE_S, self._workers[lane].wake
        with wake:
            while not self._closed:
                self._plan_stale()
                now_s = time.monotonic()
                if (action := self._due(lane, now_s)) is not None:
                    servers = self.servers.get(action.run)
                    self._begin(action, servers, now_s)
                    return action, servers
                plan = self._planned(lane)
                if not asks:
                    self.destination(url).only({each.key for each in plan})
                due_s = [each.due_s for each in plan] + ([now_s + _AGAIN_S] if self._ring.stale else [])
                if due_s:
                    idle_until_s = now_s + IDLE_S
                elif now_s >= idle_until_s:
                    break
                until_s = min(due_s, default=idle_until_s)
                wake.wait(min(until_s - now_s, threading.TIMEOUT_MAX))  # infinite while a trainer lives
            del self._workers[lane]
            if not asks and self.destination(url).is_blank and url not in self._ring.destinations():
                del self._destinations[url]
            return None

    def _due(self, lane: Lane, now_s: float) -> Action | None:
        """What comes first there of what may be done now; ``None`` if nothing may, or that may have changed."""
        due = [each for each in self._planned(lane) if each.due_s <= now_s]
        first = min(due, key=lambda each: each.rank, default=None)
        if first is None or first.due_s == 0:
            return first
        self._replan(first.run)  # it was put off: things may be different now
        plan = self._plans.get(first.run, ())
        return next((each for each in plan if each.lane == lane and each.due_s <= now_s), None)

    def _begin(self, action: Action, servers: Servers | None, now_s: float) -> None:
        if action.kind is Kind.ASK:
            if servers is not None and (server := servers.find(action.url)) is not None:
                servers.asks(server, now_s)
            self._replan(action.run)  # nobody else is asked for it
        elif not action.kind.is_question:
            for slot in action.slots:
                slot.readers += 1

    # -- one thing ------------------------------------------------------------------------------------------------

    def _work_on(self, action: Action, store: Tier | None) -> Tier | None:
        """Do one thing; the tier's store, opened if it was not, is given back."""
        attempt, why, was_tried = action.about.attempt, "", True
        try:
            attempt = self._attempt(action)
            store = store or self.store(action.url)
            was_tried = self._do(store, action, attempt)
        except FencedError as error:
            why = self._fenced(action, attempt, error)
        except PutOff as error:
            self._put_off(store, action, error)
        except Exception as error:
            if isinstance(error, SnapshotFailedError) and error.reason is FailureReason.SHARD_MISSING:
                self._give_up(action, error)
            else:  # whatever it is, it is tried again
                if not isinstance(error, SpotError):
                    say(logging.ERROR, "unexpected", UNEXPECTED, about=f"uploading to {action.url}", exc_info=True)
                why = str(error) or type(error).__name__
                self._failed(action, why)
                store = None  # a new one reads credentials again, which may have been renewed
        finally:
            with self._ring.changed:
                for slot in action.slots:
                    slot.readers -= 1
                self._ring.touch(action.run)
        if was_tried:
            self.hear(action.run, action.url, why)
        if was_tried and not self.failing(action.url):
            recovered("upload-failing", "{about} works again", about=action.url)
        return store

    def _attempt(self, action: Action) -> int:
        """The attempt on whose behalf something is done: this server's own, if it has a trainer."""
        info = self.info(action.run)
        return max(info.attempt if info is not None else 0, action.about.attempt)

    def _do(self, store: Tier, action: Action, attempt: int) -> bool:
        """Do it; whether there was anything to do."""
        url, run = action.url, action.run
        started_s, standing, info = time.monotonic(), self._standing(run, url), self.info(run)
        storage = None if isinstance(store, ServerTier) else store

        def on_its_behalf(act: Callable[[], Result]) -> Result:
            return on_behalf(storage, standing, act) if storage is not None else act()

        if isinstance(store, ServerTier) and info is not None:
            store.know(self.told(info, url))
        put: Manifest | None = None
        if action.kind is Kind.DELETE:
            on_its_behalf(lambda: store.delete(action.about))
        elif action.kind is Kind.RETAIN:
            if info is None or storage is None:  # the run was just forgotten: retention waits until it is opened again
                return False
            keep = info.keep
            if unseen := on_its_behalf(lambda: retain(storage, keep, action.about)):
                facts: dict[str, Any] = {"why": unseen, "snapshot": action.name}
                say(logging.WARNING, "upload-not-listed", "{why} ({snapshot})", about=f"{run} {unseen}", **facts)
        else:
            owner = standing.owner
            if storage is not None and owner is not None and standing.is_lent and action.about.attempt != owner.attempt:
                check_claimed(storage, action.about.attempt)
            if (put := on_its_behalf(lambda: self._bring(store, action, attempt))) is None:
                return False
        with self._ring.changed:
            self.destination(url).done(action)
            if put is not None:
                self.destination(url).took(put, started_s, time.monotonic() - started_s)
        return True

    def _failed(self, action: Action, why: str) -> None:
        why = f"{action.kind.value} {action.name}: {why}"
        # A failing server is logged with the number of servers that are left.
        if not names_server(action.url) or any(slot.commit.destinations is not None for slot in action.slots):
            text = "{about} fails ({why}). It is retried; snapshots stay in memory meanwhile. Check the storage."
            say(logging.WARNING, "upload-failing", text, about=action.url, why=why)
        with self._ring.changed:
            self.destination(action.url).failed(action, why, time.monotonic())

    def _put_off(self, store: Tier | None, action: Action, error: PutOff) -> None:
        """An upload waits for the shards that others bring. In the end it is given up there."""
        with self._ring.changed:
            now_s = time.monotonic()
            since_s = self.destination(action.url).waits_for(action, error.there, now_s)
            waited_s = now_s - max(since_s, self.desired(action.run).presumed_gone_s)
        is_over = waited_s >= ORPHANED_S
        if waited_s >= SURPASSED_S and isinstance(store, Store) and not is_over:
            try:
                is_over = has_newer(store, action.about)
            except SpotError as failure:  # it is looked at again
                logger.debug("%s does not tell whether it has something newer: %s", action.url, failure)
        if is_over:
            self._give_up(action, error)

    def _give_up(self, action: Action, error: SpotError) -> None:
        """A tier will never have the whole of a snapshot."""
        text = "{error}. No host uploads the rest; the snapshot makes room for newer ones."
        say(logging.WARNING, "upload-abandoned", text, about=action.url, error=error)
        with self._ring.changed:
            self.destination(action.url).done(action)
            self._ring.mark(Resident.of(action.slots), action.url, Mark.REFUSED)

    def _fenced(self, action: Action, attempt: int, error: FencedError) -> str:
        """A tier refuses an attempt; why it did, unless the later one has just become this server's own."""
        if self._attempt(action) >= error.current > attempt:  # which writes it at once
            return ""
        say_refused(action.run, attempt, error)
        with self._ring.changed:
            destination = self.destination(action.url)
            destination.done(action)
            if action.kind.is_upload:
                health = destination.health
                health.refused, health.refused_run, health.refused_attempt = str(error), action.run, attempt
                self._ring.mark(Resident.of(action.slots), action.url, Mark.REFUSED)
                if action.about.is_file:
                    self._refused.setdefault(action.run, {})[action.about.name] = action.about
        return str(error)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _bring(self, store: Tier, action: Action, attempt: int) -> Manifest | None:
        """Bring it; what is at the tier now, ``None`` if there was nothing to bring.

        Raises:
            PutOff: if it waits for others.
            FencedError: if a later attempt has claimed the run there, and this is not what a trainer has left that is
                gone.
        """
        while True:  # one more attempt may claim the run meanwhile
            try:
                return self._bring_now(store, action, attempt)
            except FencedError as error:
                if error.current <= attempt or not self._is_left_over(store, action, error):
                    raise
                attempt = error.current
                text = "{about} is uploaded to {url} for a trainer that is gone: nothing there is newer"
                say(logging.INFO, "orphan-uploaded", text, about=action.name, url=action.url)

    def _is_left_over(self, store: Tier, action: Action, fence: FencedError) -> bool:
        """Whether what a later attempt fences off is the newest of its run all the same, and its trainer is gone.

        That attempt may have ended before it had a snapshot, and before this server heard of it.

        Raises:
            PutOff: if that is not known yet.
        """
        info = self.info(action.run)
        if action.about.is_file or isinstance(store, ServerTier) or (info is not None and info.session):
            return False
        with self._ring.changed:
            is_expired = time.monotonic() >= self.desired(action.run).presumed_gone_s
        if not is_expired:
            say_refused(action.run, action.about.attempt, fence)
            raise PutOff(f"{fence}, and its trainer may live")
        return not has_newer(store, action.about)

    def _bring_now(self, store: Tier, action: Action, attempt: int) -> Manifest | None:
        with self._ring.changed:
            resident = Resident.of(action.slots)
        if len(resident.slots) < len(action.slots) or resident.manifests[0].snapshot != action.about.snapshot:
            return None  # some of it has just left memory
        fresh_s = time.monotonic() - CHECKED_S
        try:
            if isinstance(store, ServerTier):  # it checks every part that it receives
                return self._to_server(store, action, resident, attempt)
            if all(slot.commit.checked_s > fresh_s for slot in resident.slots) or self._is_intact(action, resident):
                return self._to_storage(store, action, resident, attempt)
            return None
        except CorruptSnapshotError:
            if not self._is_intact(action, resident):
                return None
            raise

    def _to_server(self, store: ServerTier, action: Action, resident: Resident, attempt: int) -> Manifest:
        """Bring what slots hold to a snapshot server, one after the other; shards exactly."""
        with self._ring.changed:
            is_exact = self.desired(action.run).must_be_exact(action.about)
        is_exact = is_exact or action.about.shard is not None
        nbytes, brought = 0, action.about
        for slot, manifest in resident.each():
            if manifest.why_failed:
                store.fail(manifest)
                brought = manifest
            else:
                image, floats = slot.view(manifest.nbytes), () if is_exact else slot.commit.floats
                brought = store.send(manifest, image, attempt=attempt, earlier=self._ring.glance, floats=floats)
                nbytes += brought.nbytes
            mark = Mark.INEXACT if manifest.exact and not brought.exact else Mark.SAFE
            self._ring.mark(Resident((slot,), (manifest,)), action.url, mark)
        return replace(brought, nbytes=nbytes)

    def _to_storage(self, store: Store, action: Action, resident: Resident, attempt: int) -> Manifest | None:
        """Bring what slots hold to storage: as one if that is all of a snapshot; ``None`` if it is aborted.

        Raises:
            PutOff: if other shards are still to come there.
            SnapshotFailedError: if they never will.
        """
        whole: Manifest | None
        if action.kind is Kind.PUT:
            whole = action.about if action.about.shard is None else assemble(resident.manifests)
            store.put(whole, resident.image(), attempt=attempt)
        else:
            views = [slot.view(manifest.nbytes) for slot, manifest in resident.each()]
            found = commit.put_shards(store, list(zip(resident.manifests, views, strict=True)), attempt=attempt)
            self._ring.see(action.run, action.name, found.registers)
            whole = found.manifest
            if found.why_aborted:
                self._ring.mark(resident, action.url, Mark.REFUSED)
                return None
            if whole is None:
                raise PutOff(f"{action.name} is at {store.url} as far as this server has it", len(found.sizes))
        with self._ring.changed:  # older ones are to go there, if nobody else sees to that
            if not whole.is_file and action.url not in self._ring.tiers(action.run).carried:
                self.destination(action.url).newest[action.run] = whole
        self._ring.mark(resident, action.url, Mark.SAFE)
        if whole.is_file:
            self._sweep_files(store, whole)
        return whole

    def _is_intact(self, action: Action, resident: Resident) -> bool:
        """Whether slots still hold what was committed; what is not is dropped, never carried further."""
        is_intact = True
        for slot, manifest in resident.each():
            try:
                manifest.verify(slot.view(manifest.nbytes), "memory")
            except CorruptSnapshotError as error:
                text = "{error}. {about} is dropped; the snapshot before it counts. Check the memory of this host."
                say(logging.ERROR, "snapshot-dropped", text, about=manifest.name, error=error)
                is_intact = False
                with self._ring.changed:
                    health = self.destination(action.url).health
                    health.dropped, health.dropped_name = str(error), manifest.name
                    if slot.manifest is manifest:  # else something newer may be here by its name
                        self._ring.drop(action.run, manifest.name)
        return is_intact

    def _sweep_files(self, store: Store, current: Manifest) -> None:
        """Remove what killed writers left beside a user's files."""
        try:
            store.sweep_files(current)
        except SpotError as error:
            text = "files that killed writers left at {about} could not be removed. It is retried: {error}"
            say(logging.WARNING, "leftovers-stay", text, about=store.url, error=error)


def say_refused(run: str, attempt: int, error: FencedError) -> None:
    """Log that a later attempt has taken over a run, so that the uploads of this one are refused."""
    text = "{error}. Snapshots of attempt {attempt} are no longer uploaded. End its trainer."
    say(logging.WARNING, "attempt-refused", text, about=f"{run} {attempt}", attempt=attempt, error=error)


def has_newer(store: Store, than: Manifest) -> bool:
    """Whether storage has a newer snapshot of that run."""
    return any(m.run_id == than.run_id and m.order > than.order for m in store.survey().manifests)
