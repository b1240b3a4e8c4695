"""A snapshot server without its network: runs, uploads and what becomes of them, over a ring and a reconciler.

The HTTP service puts this on a socket; with ``local_server=False`` a trainer holds one in its own process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_spot.config import names_server
from lightning_spot.errors import SettingsError, SnapshotNotFoundError, TierError
from lightning_spot.server.placement import placed_apart
from lightning_spot.server.reconcile import Servers
from lightning_spot.server.registry import MOST_RUNS, Registry
from lightning_spot.server.ring import Ring
from lightning_spot.server.runs import Figures, Opened, Run, RunInfo, check_name, check_prefix, file_name, refusal
from lightning_spot.server.slots import Tiers
from lightning_spot.server.tier import Tier, TierHealth, as_storage
from lightning_spot.server.uploads import Uploads
from lightning_spot.server.worker import Reconciler
from lightning_spot.snapshot.manifest import Manifest, snapshot_order
from lightning_spot.snapshot.shards import Status
from lightning_spot.store import fsspec_client
from lightning_spot.store.fences import Owner, Standing, digest_of
from lightning_spot.store.store import Store

IN_PROCESS = "in-process"
"""The session of a trainer that holds the server in its own process."""


class SnapshotServer:
    """Runs and uploads. All methods may be called from any thread.

    Args:
        slots: most slots of each writer of a run; ``None`` for as many as fit the memory.
        memory_bytes: most bytes all slots together may hold.
        open_store: makes the store of a tier's URL.
        flush_to: URL below which runs are flushed that name no durable URL, or one that is not allowed.
        area: tmpfs directory for slots. What a killed server left in it is checked and taken over: seconds for
            gigabytes.
        allow: prefixes of durable URLs that a trainer may have this server write to (and ``flush_to``); ``None`` for
            any, at the server of the trainer's own host.
        run_memory_bytes: most bytes that the slots of one run may hold; ``None`` for no such limit.
    """

    def __init__(
        self,
        *,
        slots: int | None,
        memory_bytes: int,
        open_store: Callable[[str], Tier],
        flush_to: str | None = None,
        area: Path | None = None,
        allow: Sequence[str] | None = (),
        run_memory_bytes: int | None = None,
    ) -> None:
        self.ring = Ring(slots=slots, memory_bytes=memory_bytes, area=area, run_memory_bytes=run_memory_bytes)
        self.registry = Registry(self.ring, self._claimed)
        self._not_needed = False  # a trainer has come and gone whose attempt could not begin
        self.reconciler = Reconciler(self.ring, open_store, self.registry.info, self._standing)
        self.uploads = Uploads(self.ring, self.registry, self.reconciler.cancel_deletions)
        self._open_store, self._lock = open_store, self.registry.lock
        self.flush_to = flush_to.rstrip("/") if flush_to else None
        self._allow = [check_prefix(prefix) for prefix in allow] if allow is not None else None
        self._take_over()

    # -- runs -----------------------------------------------------------------------------------------------------

    def open_run(self, info: RunInfo, client: str = "") -> Opened:
        """Let an attempt write a run; from now on earlier attempts' writes are refused.

        Opened once more by the same attempt, nothing changes.

        Args:
            info: what is said of the run.
            client: who says it.

        Raises:
            RunBusyError: if a live trainer on this host writes the run.
            FencedError: if a later attempt writes the run, or another one of the same number.
        """
        check_name(info.name)
        if self.draining and info.key not in self.registry.runs:
            raise TierError("this server is shutting down and takes no new runs")
        if info.attempt < 1:
            raise SettingsError(f"attempt {info.attempt} of run {info.name!r}: attempts are counted from 1")
        self.registry.check_ahead(info)
        with self._lock:
            before = self.registry.highest(info.key)
            run, forgotten = self.registry.take(info, client)
            if info.attempt > before:
                self.ring.forget_refusals(info.key)
            self._not_needed = False
            self.uploads.fence(info.key, info.attempt)
            self.ring.raise_watermark(info.key, info.committed)
            if (order := snapshot_order(info.persisted)) is not None:
                self.ring.mark_persisted(info.key, info.lineage, order)
            self._route(run.info)
            self._note(run)
            if forgotten:
                self._forget(forgotten)
            with self.ring.changed:
                self.ring.touch(info.key)
        opened = self.opened(run.info)
        if self.draining and not info.session:
            return replace(opened, carries=False, why_not="it is shutting down", leaves=True)
        return opened

    def close_run(self, run: str, session: str, *, complete: bool) -> None:
        """The trainer of this session leaves; ``complete`` says that the run has reached its end.

        One that was refused because another trainer lives leaves, too: the run stays that one's.
        """
        with self._lock:
            try:
                known = self.registry.find(run)
            except SnapshotNotFoundError:  # its attempt could not begin
                self._not_needed = True
                return
            if session not in known.sessions and self.registry.has_other_writer(known.info, session):
                return
            self.registry.leave(known, session)
            known.complete = complete
            self._note(known)
        self._wake(known.info.key)

    def report(self, run: str, figures: Figures) -> None:
        """Note what the trainer of a run has measured.

        The run's servers hear of it when they are asked next; at once if it is a notice, or how an attempt has ended.
        """
        with self._lock:
            known = self.registry.find(run)
            before, known.info = known.info.figures, replace(known.info, figures=figures)
            if before is None or (before.attempts, before.notices) != (figures.attempts, figures.notices):
                self.reconciler.ask_now(known.info.key)

    def claimed(self, run: str) -> int:
        """Highest attempt of a run known here; 0 if none."""
        return self.registry.highest(self.registry.key(run))

    def listed(self) -> list[dict[str, Any]]:
        """Every run known here, as JSON-ready values."""
        return self.registry.listed(self._carries)

    def newest(self, info: RunInfo) -> dict[str, dict[str, float]]:
        """Step and time (Unix) of the newest snapshot of a run in each state, see :meth:`Ring.newest`."""
        newest = self.ring.newest(info.key).items()
        found = {state: {"step": each.step, "unix_s": each.created_unix_s} for state, each in newest}
        told, known = info.figures, found.get("persisted", {"unix_s": 0.0})  # shards of other hosts are stored, too
        if told is not None and told.persisted_step >= 0 and told.persisted_unix_s > known["unix_s"]:
            found["persisted"] = {"step": told.persisted_step, "unix_s": told.persisted_unix_s}
        return found

    def wait_for(
        self, run: str, name: str, wait_s: float, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[Status, str]:
        """What has become of a snapshot, as soon as it counts or never will, and why it is aborted, for people.

        Args:
            run: the run, as in URLs.
            name: of the snapshot.
            wait_s: how long to wait.
            cancelled: asked while waiting: whether nobody wants to know any more.
        """
        key, deadline_s, ring = self.registry.key(run), time.monotonic() + wait_s, self.ring
        with ring.changed:
            found = ring.status_of(key, name)
            while found[0] is Status.PENDING and ring.wait(deadline_s, lambda: cancelled() or self.uploads.closing):
                found = ring.status_of(key, name)
            return found

    def end_session(self, session: str) -> list[RunInfo]:
        """The connection of a rank has closed (it ended or was killed): its half-filled slots are freed.

        Returns:
            the runs that it had not left, as one does that was killed, if no other rank is connected for them.
        """
        left = self.registry.end_session(session)
        for info in left:  # what a tier refused for a later attempt may be the newest that there is all the same
            self.ring.forget_refusals(info.key)
        self.uploads.end_session(session)
        self._wake(*(info.key for info in left))
        return left

    @property
    def draining(self) -> bool:
        """Whether this server is about to end, and takes no new runs."""
        return self.reconciler.leaves

    def drain(self) -> None:
        """Take no new runs: this server is about to end."""
        self.reconciler.leave()

    @property
    def drained(self) -> bool:
        """Whether no upload is under way and nothing waits for a tier, deletions neither."""
        return not len(self.uploads) and not self.reconciler.awaited()

    @property
    def busy(self) -> bool:
        """Whether a trainer is connected, an upload under way, or a working tier waits for something."""
        waits = any(not self.reconciler.failing(url) for url in self.reconciler.awaited())
        return bool(self.registry.sessions or len(self.uploads) or waits)

    @property
    def finished(self) -> bool:
        """Whether no run needs this server: each has said that it is complete and all is safe below, or none began.

        If several hosts write the snapshot of a run's end, its shards here must be durable: else they stay in tmpfs.
        """
        runs = list(self.registry.runs.values())
        needed = not all(run.complete for run in runs) if runs else not self._not_needed
        with self.ring.changed:
            owed = [slot for view in self.ring.views() for slot in view.owed]
            owes_an_end = any(slot.content.complete and not slot.is_durable for slot in owed)
        return not (needed or self.registry.sessions or owes_an_end) and self.drained

    # -- snapshots ------------------------------------------------------------------------------------------------

    def remove(self, run: str, name: str, *, unseen: bool = False) -> None:
        """Remove a snapshot or file here at once, and at the tiers below in the background.

        At a tier it is removed after the files that are owed there now of the same run: one may be what replaces it.

        Args:
            run: the run.
            name: of the snapshot or file.
            unseen: whether a file that is not in memory is removed at the run's tiers all the same.

        Raises:
            SnapshotNotFoundError: if it is not in memory.
        """
        key = self.registry.key(run)
        try:
            manifest, urls = self.ring.drop(key, name)
            if manifest.is_file:  # also one of its name that went past this server's memory since
                manifest = replace(manifest, attempt=self.registry.highest(key))
        except SnapshotNotFoundError:
            if not unseen:
                raise
            info, tiers = self.registry.find(run).info, self.ring.tiers(key)
            manifest = Manifest(
                run=info.name, run_id=info.id, name=file_name(name), file="", step=0, attempt=info.attempt, nbytes=0
            )
            urls = [*tiers.all]
        for url in urls:
            self.reconciler.delete(url, manifest)

    # -- the whole ------------------------------------------------------------------------------------------------

    def flush(self, run: str | None, wait_s: float, cancelled: Callable[[], bool] = lambda: False) -> list[str]:
        """Bring everything to the tiers below; see :meth:`Reconciler.flush`."""
        return self.reconciler.flush(self.registry.key(run) if run else None, wait_s, cancelled)

    def close(self, *, keep_unsafe: bool = False) -> None:
        """Stop uploading and give the memory back."""
        with ExitStack() as ends:  # from the last one on, whatever fails in one: the memory is given back
            ends.callback(self.ring.close, keep_unsafe=keep_unsafe)
            for part in (self.reconciler, self.uploads):
                ends.callback(part.close)

    def tiers(self) -> dict[str, TierHealth]:
        """How each tier below is doing, by its URL."""
        carried = self.ring.carried()
        with self.ring.changed:
            found = (each for servers in self.reconciler.servers.values() for each in servers.all)
            wrong = {each.url: each.why for each in found if each.failures and not each.used}
        return {
            url: replace(
                health,
                kind="server" if names_server(url) else "durable",
                carried=url in carried,
                error=health.error or wrong.get(url, ""),
                refused=self._refused(health),
                silent=fsspec_client.silent(url),
            )
            for url, health in {**{each: TierHealth() for each in wrong}, **self.reconciler.health}.items()
        }

    def _refused(self, health: TierHealth) -> str:
        """What a tier has refused for good, unless a later attempt of that run has begun here since."""
        if health.refused and self.registry.highest(health.refused_run) > health.refused_attempt:
            return ""
        return health.refused

    def status(self, covers: Callable[[str], bool] | None = None) -> dict[str, Any]:
        """Everything a person wants to see, as JSON-ready values.

        Args:
            covers: tells of a run's name whether that person may see it; ``None`` for all, and their tiers.
        """
        with self._lock:
            runs = [run for run in self.registry.runs.values() if covers is None or covers(run.info.name)]
        tiers = self.tiers()
        if covers is not None:
            keys = {run.info.key for run in runs}
            urls = {url for key in keys for url in self.ring.tiers(key).all}
            tiers = {
                url: health if health.refused_run in keys else replace(health, refused="", refused_run="")
                for url, health in tiers.items()
                if url in urls
            }
        return {
            **self.ring.status(covers),
            "flush_to": self.flush_to if covers is None else None,
            "runs": {
                run.info.text: {
                    "attempt": run.info.attempt,
                    "pid": run.info.pid,
                    "live": bool(run.info.session),
                    "state": self.registry.state(run),
                    "newest": self.newest(run.info),
                    "slots": len(self.ring.slots.runs.get(run.info.key, ())),
                    **self.route(run.info.key),
                }
                for run in runs
            },
            "tiers": {url: asdict(health) for url, health in tiers.items()},
            "pid": os.getpid(),
        }

    # -- where a run goes -----------------------------------------------------------------------------------------

    def _route(self, info: RunInfo) -> None:
        """Decide where a run goes, and begin to look for its trainer's servers. Call it under the lock."""
        key = info.key
        if info.carry and info.servers:
            if info.apart is not None and info.apart < info.hosts:  # each host's shards go to servers of their own
                mine = placed_apart(info.servers, info.id, info.hosts, info.replicas)[info.apart]
                info = replace(info, servers=mine)
            known = self._servers(key)
            if known is None or not _same(known.info, info):
                self.reconciler.set_servers(key, Servers(info))
            return
        if self._servers(key) is not None:
            self.reconciler.set_servers(key, None)
        url = self._own_tier(info) if info.carry else None
        self.ring.set_tiers(key, Tiers(own=(url,) if url is not None else ()))

    def opened(self, info: RunInfo) -> Opened:
        """What to answer who opens a run: whether it is brought to its storage from here."""
        servers, why_not = self._servers(info.key), self._refusal(info)
        if servers is not None:
            why_not = servers.why_not if why_not and servers.uploader is None else ""
        elif not why_not and info.durable_url is not None and self.reconciler.failing(info.durable_url):
            why_not = f"its storage fails here: {self.reconciler.health[info.durable_url].error}"
        return Opened(info.attempt, not why_not, why_not)

    def _carries(self, key: str) -> bool:
        """Whether a run is brought to its storage from here."""
        servers, info = self._servers(key), self.registry.info(key)
        carried_on = servers is not None and servers.uploader is not None
        return carried_on or (info is not None and not self._refusal(info))

    def allowed(self, url: str) -> str:
        """Why this server may not write to a durable URL, for people; ``""`` if it may."""
        if self._allow is None:
            return ""
        return refusal(url, [*self._allow, *filter(None, [self.flush_to])])

    def _standing(self, key: str, url: str) -> Standing:
        """On whose behalf this server acts at the URL of a run.

        Where a client has named the place, nothing is done unless the claim there has a digest of the token that the
        client gave: who cannot write there cannot have this server do so. At a place of its own, and of the trainer's
        host, the server claims for the trainer what that could not.
        """
        info = self.registry.info(key)
        if names_server(url) or info is None:
            return Standing()
        is_lent = self._allow is not None and url == info.durable_url
        if info.token and info.is_claimed and (is_lent or self._allow is None or url == f"{self.flush_to}/{info.text}"):
            return Standing(Owner(info.attempt, digest_of(info.token)), None if is_lent else info.claim())
        return Standing(Owner(info.attempt, "") if is_lent else None)

    def check_owner(self, key: str) -> None:
        """Refuse to change anything for a run whose attempt, by its claim, may not do so itself at its storage.

        What is queued may be done for a later attempt.

        Raises:
            SpotError: in that case, or if the tier fails.
        """
        info = self.registry.info(key)
        if info is None or info.durable_url is None:
            return
        standing = self._standing(key, info.durable_url)
        if self._allow is not None and standing.is_lent:
            store = as_storage(self._open_store(info.durable_url), info.durable_url)
            store.owner = standing.owner
            store.check_owner()

    def _claimed(self, info: RunInfo) -> int:
        """Highest attempt that has claimed a run, as far as this server may look; 0 if that is not known here."""
        url = self._own_tier(info)
        return as_storage(self._open_store(url), url).claimed() if url is not None else 0

    def durable(self, info: RunInfo) -> str | None:
        """URL of the directory where what has left memory lies; ``None`` if nobody has said one."""
        return info.durable_url if info.durable_url is not None else self._own_tier(info)

    def storage(self, info: RunInfo) -> Store | None:
        """A run's storage, if this server may read it on behalf of the run; ``None`` if it has none.

        Raises:
            SpotError: if the run's attempt may not read it itself, or the tier fails.
        """
        if (url := self._own_tier(info)) is None:
            return None
        if url == info.durable_url:
            self.check_owner(info.key)
        return as_storage(self._open_store(url), url)

    def route(self, key: str) -> dict[str, Any]:
        """Where a run goes, as JSON-ready values."""
        with self.ring.changed:
            tiers, servers, info = self.ring.tiers(key), self._servers(key), self.registry.info(key)
            found = servers.all if servers is not None else []
        return {
            "destinations": [*tiers.all],
            "kept_at": self.kept_at(key),
            "servers": {
                each.url: f"away: {each.why}" if each.failures and not each.used else each.role.value for each in found
            },
            "why_not": servers.why_not if servers is not None else self._refusal(info) if info is not None else "",
        }

    def kept_at(self, key: str) -> list[str]:
        """URLs of a run at the servers that it is kept at, that first which uploads it; none while none does.

        A server that has just failed, and was not asked since, is none of them.
        """
        with self.ring.changed:
            servers = self._servers(key)
            uploader = servers.uploader if servers is not None else None
            if servers is None or uploader is None or not uploader.is_sound:
                return []
            others = [each.url for each in servers.all if each.is_sound and each is not uploader]
            return [uploader.url, *others]

    def _refusal(self, info: RunInfo) -> str:
        """Why this server may not bring a run to its storage, for people; ``""`` if it may."""
        if not info.carry:
            return "another server that has it does"
        return self.allowed(info.durable_url) if info.durable_url is not None else "no durable URL was named"

    def _servers(self, key: str) -> Servers | None:
        return self.reconciler.servers.get(key)

    def _own_tier(self, info: RunInfo) -> str | None:
        """Where this server makes a run durable by itself; ``None`` if nowhere."""
        if info.durable_url is not None and not self.allowed(info.durable_url):
            return info.durable_url
        return f"{self.flush_to}/{info.text}" if self.flush_to is not None else None

    # -- inside ---------------------------------------------------------------------------------------------------

    def _wake(self, *keys: str) -> None:
        """A trainer has gone: what servers have of its run approximately is to be there exactly now."""
        with self.ring.changed:
            for key in keys:
                self.ring.touch(key)

    def _forget(self, key: str) -> None:
        """Others need the place of a run: keep nothing of it."""
        self.ring.set_tiers(key, None)
        self.reconciler.forget(key)
        if self.ring.area is not None:
            self.ring.area.forget_run(key)

    def _note(self, run: Run) -> None:
        """Note a run as it is now, where the slots outlive the server."""
        if self.ring.area is not None:
            self.ring.area.keep_run(run.info, run.complete)

    def _take_over(self) -> None:
        """Take over the runs that a killed server noted; those without snapshots here last, while there is room."""
        area, registry = self.ring.area, self.registry
        left = [(not self.ring.contents(each.info.key), each) for each in (area.runs() if area is not None else ())]
        for is_empty, each in sorted(left, key=lambda item: item[0]):
            info = each.info
            if area is not None and is_empty and len(registry.runs) >= MOST_RUNS:
                area.forget_run(info.key)
                continue
            registry.runs[info.key] = replace(each, opened_s=time.monotonic())
            self._route(info)
            self.ring.forget_refusals(info.key)


def _same(known: RunInfo, info: RunInfo) -> bool:
    """Whether a run is opened once more by the same attempt, with the same tiers."""
    nothing: dict[str, Any] = {"session": "", "pid": 0, "host": "", "left": False, "figures": None}
    nothing |= {"committed": "", "persisted": "", "lineage": ""}
    return replace(known, **nothing) == replace(info, **nothing)
