"""What was seen of runs and where they go, what each run is to have, and the questions to servers that show more.

All that :func:`~lightning_spot.server.reconcile.actions` starts from.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning_spot.errors import ServerUnreachableError, SpotError, TierError
from lightning_spot.say import UNEXPECTED, recovered, say
from lightning_spot.server.reconcile import (
    ASK_AGAIN_S,
    Action,
    Desired,
    Destination,
    Kind,
    Observed,
    Role,
    Server,
    Servers,
    awaited,
    expected,
    newest_durable,
    presumed_gone_s,
    unknown,
)
from lightning_spot.server.ring import Ring
from lightning_spot.server.runs import RunInfo, key_of
from lightning_spot.server.slots import Mark, Resident
from lightning_spot.server.tier import Listed, ServerTier, Tier, TierHealth, as_storage
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Status, by_snapshot
from lightning_spot.store import commit

logger = logging.getLogger(__name__)

_HURRIED_S = 0.5


class Observations:
    """What was seen of the runs of a ring. Any thread may call it; all of it changes under the ring's lock.

    Args:
        ring: where snapshots come from.
        open_store: makes the store of a tier's URL.
        info: tells what is known of a run, by its key; ``None`` if nothing is.

    Attributes:
        servers: that each run may be kept at, by its key.
        info: see above.
    """

    def __init__(self, ring: Ring, open_store: Callable[[str], Tier], info: Callable[[str], RunInfo | None]) -> None:
        self.servers: dict[str, Servers] = {}
        self.info = info
        self._ring, self._open_store = ring, open_store
        self._stores: dict[str, Tier] = {}
        self._destinations: dict[str, Destination] = {}
        self._waited_for: Counter[str | None] = Counter()  # runs (None: all) that somebody waits for
        self._leaves_s: float | None = None

    @property
    def health(self) -> dict[str, TierHealth]:
        """How each tier is doing, by its URL."""
        with self._ring.changed:
            return {url: replace(each.health, error=each.error) for url, each in self._destinations.items()}

    @property
    def leaves(self) -> bool:
        """Whether this server is about to end."""
        return self._leaves_s is not None

    def desired(self, run: str) -> Desired:
        """What a run is to have now. Call it under the lock."""
        info = self.info(run)
        asked_s = self._ring.opened_s.get(run, self._ring.begun_s)
        return Desired(
            info=info,
            presumed_gone_s=presumed_gone_s(info, asked_s, self._leaves_s),
            urgent=bool(self._waited_for[run] or self._waited_for[None]),
            leaves=self.leaves,
            # Only its own host is told of servers; others know what they were told.
            is_abandoned=info is not None and (info.left or (bool(info.servers) and not info.session)),
            is_stuck=functools.partial(self._ring.is_stuck, run),
        )

    def observed(self, run: str) -> Observed:
        """What was seen of a run. Call it under the lock."""
        ring = self._ring
        return Observed(run, ring.view(run), ring.tiers(run), self._destinations, self.servers.get(run))

    def awaited(self, run: str | None = None) -> set[str]:
        """URLs that are waited for because of a run (``None``: of any), see :func:`~.reconcile.awaited`."""
        with self._ring.changed:
            runs = [run] if run is not None else self._runs()
            return {url for each in runs for url in awaited(self.desired(each), self.observed(each))}

    def destination(self, url: str) -> Destination:
        """What was seen at a destination. Call it under the lock."""
        return self._destinations.setdefault(url, Destination(url))

    def store(self, url: str) -> Tier:
        """The store of a tier; of a server it is one for all, since it learns how fast that is."""
        found = self._stores.get(url) or self._open_store(url)
        if isinstance(found, ServerTier):
            return self._stores.setdefault(url, found)
        return found

    def failing(self, url: str) -> bool:
        """Whether nothing succeeded at the tier since it failed."""
        with self._ring.changed:
            return url in self._destinations and bool(self._destinations[url].failing)

    def hear(self, run: str, url: str, why: str) -> None:
        """Take note of how something went at a server, if it is one: why it failed, ``""`` if it did not."""
        with self._ring.changed:
            servers = self.servers.get(run)
            if servers is None or (server := servers.find(url)) is None:
                return
            was_used = server.used
            servers.heard(server, why, time.monotonic())
            is_lost = was_used and not server.used
            self._ring.touch(run)
        if is_lost:
            say_lost(servers, server)

    def told(self, info: RunInfo, url: str) -> RunInfo:
        """What a server hears of a run each time that it is asked: it may have missed, or forgotten, all of it."""
        run = info.key
        with self._ring.changed:
            desired, durable = self.desired(run), newest_durable(self.observed(run))
            server = self.servers[run].find(url) if run in self.servers else None
            committed = self._ring.newest_committed(run)
        return replace(
            info,
            servers=(),
            replicas=1,
            session="",
            carry=server is not None and Role.UPLOADS in (server.asked, server.role),
            committed=committed,
            persisted=durable.snapshot if durable is not None else "",
            lineage=durable.lineage if durable is not None else "",
            left=desired.is_abandoned,
            figures=(desired.info or info).figures,
        )

    def _runs(self) -> set[str]:
        known = self._destinations.values()
        deleting = {key_of(each.manifest) for destination in known for each in destination.deletions}
        trimming = {run for destination in known for run in destination.newest}
        return {*self._ring.slots.runs, *deleting, *trimming, *self.servers}

    # -- questions to servers --------------------------------------------------------------------------------------

    def ask(self, action: Action, servers: Servers) -> None:
        """Ask, and note what was seen."""
        server = servers.find(action.url)
        if server is None:
            return
        try:
            (self._open if action.kind is Kind.ASK else self._look)(action.run, servers, server)
        finally:
            with self._ring.changed:
                self._ring.touch(action.run)

    def _tier(self, server: Server) -> ServerTier:
        """A server as a tier; it knows what it was told of the run.

        Raises:
            ServerUnreachableError: if it is no server.
        """
        store = self.store(server.url)
        if not isinstance(store, ServerTier):
            raise ServerUnreachableError(f"{server.url} is no server", tier=server.url)
        return store

    def _open(self, run: str, servers: Servers, server: Server) -> None:
        """Open the run there, or ask once more how things are."""
        ring = self._ring
        try:
            opened = self._tier(server).open_run(self.told(servers.info, server.url))
            if opened.leaves:
                raise TierError("it is shutting down", tier=server.url)
            self._find_lost(run, server)
        except Exception as error:
            if not isinstance(error, SpotError):  # a bug must not end the thread: nothing would be learned any more
                say(logging.ERROR, "unexpected", UNEXPECTED, about=f"asking {server.url}", exc_info=True)
            with ring.changed:
                was_said = bool(server.why) and not server.used
                servers.lost(server, str(error), time.monotonic())
            if not was_said:
                say_lost(servers, server)
            return
        with ring.changed:
            before, refused, anew = servers.uploader, bool(server.why_not), not server.used
            servers.answered(server, opened, time.monotonic())
            is_news = anew or servers.uploader is not before or (server.why_not and not refused)
        if is_news:
            self._say(servers, server)

    def _find_lost(self, run: str, server: Server) -> None:
        """Have the newest snapshots sent again that were safe there, and that it has no more."""
        with self._ring.changed:
            sent = Resident.of(expected(self.observed(run), server, durable_too=not server.used))
        if sent.slots:
            self._learn(server, sent, self._tier(server).listing())

    def _is_at(self, durable_url: str, manifest: Manifest) -> bool | None:
        """Whether a snapshot that left a server's memory is at storage, or was lost; ``None`` if that is not known."""
        try:
            store = as_storage(self.store(durable_url), durable_url)
            if manifest.shard is None:
                return store.has(manifest)
            whole = commit.look(store, manifest.snapshot).manifest
            return whole is not None and commit.contains(whole, manifest)
        except SpotError as error:  # it is asked again
            logger.debug("%s does not answer (%s)", durable_url, error)
            return None

    def _look(self, run: str, servers: Servers, server: Server) -> None:
        """Look what it has made durable, and whether snapshots of which other hosts have shards are complete."""
        with self._ring.changed:
            desired = self.desired(run)
            waiting = Resident.of(unknown(desired, self.observed(run), server))
        try:
            tier = self._tier(server)
            if desired.urgent and waiting.slots:
                tier.flush(_HURRIED_S)  # nobody there puts anything off while this is waited for
            listing = tier.listing()
            self._learn(server, waiting, listing, servers.info.durable_url or "")
        except SpotError as error:
            logger.debug("%s does not tell what it has: %s", server.url, error)
            if server.used:
                self.hear(run, server.url, str(error))
            else:  # it may have what is missing; it is asked less often
                with self._ring.changed:
                    server.away_until_s = max(server.away_until_s, time.monotonic() + ASK_AGAIN_S)
            return
        with self._ring.changed:
            server.shown, server.looked_s = by_snapshot(item.manifest for item in listing), time.monotonic()
            for lineage, order in list(servers.committed(self._ring.known_of(run).committed)):
                self._ring.mark_committed(run, lineage, order)
            for group in self._ring.view(run).groups:
                if group.state is Status.PENDING and (found := servers.registers(group.manifest.snapshot)):
                    self._ring.see(run, group.manifest.snapshot, found)

    def _learn(self, server: Server, sent: Resident, listing: Iterable[Listed], durable_url: str = "") -> None:
        """Note which snapshots a server has lost, or has made durable at a URL if one is given."""
        listed = {(item.manifest.name, item.manifest.checksums): item.safe for item in listing}
        for slot, manifest in sent.each():
            safe = listed.get((manifest.name, manifest.checksums))
            if safe is None:
                is_durable = self._is_at(durable_url, manifest) if durable_url else False
            else:
                is_durable = durable_url in safe
            if is_durable:
                self._ring.mark(Resident((slot,), (manifest,)), durable_url, Mark.SAFE)
            elif safe is None and is_durable is not None:
                self._ring.mark_lost(slot, manifest, server.url)

    def _say(self, servers: Servers, server: Server) -> None:
        facts: dict[str, Any] = {"about": server.url, "run": servers.info.text}
        recovered("server-lost", "{about} works again", about=server.url)
        if server.role is Role.UPLOADS:
            say(logging.INFO, "server-used", "{about} takes the snapshots of run {run} and uploads them", **facts)
        elif not server.why_not:
            say(logging.INFO, "server-used", "{about} takes the snapshots of run {run}, too", **facts)
        elif servers.info.durable_url is not None:
            who = "This host does" if servers.is_nobody else "Another server is asked"
            text = "{about} does not upload run {run} to its storage: {why}. {who}."
            say(logging.WARNING, "server-not-uploading", text, why=server.why_not, who=who, **facts)


def say_lost(servers: Servers, server: Server) -> None:
    """Log that a server is lost, and how many are left."""
    text = "{about} fails ({why}). Run {run} has {used} of {wanted} servers until it works again. Check it."
    facts: dict[str, Any] = {"why": server.why, "run": servers.info.text}
    facts |= {"used": len(servers.used), "wanted": servers.replicas}
    say(logging.WARNING, "server-lost", text, about=server.url, **facts)
