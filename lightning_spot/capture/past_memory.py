"""Where snapshots go that fit no memory here: to a snapshot server that brings them on, else to storage."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lightning_spot.capture.host_link import within
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.remote import NodeStore
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FencedError, ServerUnreachableError, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.joint import SpreadPlace
from lightning_spot.memory.runs import RunInfo
from lightning_spot.say import say
from lightning_spot.tiers.fences import Owner, Standing
from lightning_spot.tiers.store import on_behalf, retain

logger = logging.getLogger(__name__)

_AWAY_S = 30.0  # a server that failed is not tried before; training waits for each try
_CARRIED_S = 15.0  # for a server that alone has the newest one to be asked to carry the run on
_LOOK_S = 0.1
_SPREAD_S = 2.0  # one of several servers that have some of a snapshot is waited for, before it is seen what is durable


class PastMemory:
    """Brings snapshots to the next tier part by part, from the training thread.

    Args:
        writer: makes their parts.
        url: durable directory of the run.
        info: of the attempt; its servers are asked in order.
    """

    def __init__(self, writer: SnapshotWriter, url: str, info: RunInfo) -> None:
        self._writer = writer
        self._url = url
        self._info = info
        self._away_until_s: dict[str, float] = {}

    def write(self, checkpoint: Any, manifest: Manifest) -> None:
        """Bring a snapshot to the first snapshot server that has room and carries the run on, else to storage.

        Raises:
            FencedError: if a later attempt has taken the run over.
            SpotError: if it is nowhere in the end.
        """
        for node in self._info.nodes:
            if self._away_until_s.get(node, 0.0) <= time.monotonic() and self._write_to(node, checkpoint, manifest):
                return
        self.write_durably(checkpoint, manifest)

    def write_durably(self, checkpoint: Any, manifest: Manifest) -> None:
        """Bring a snapshot to storage.

        Raises:
            SpotError: if it is not there in the end.
        """
        store, claim = open_store(self._url), self._info.claim()
        standing = Standing(Owner(claim.attempt, claim.digest), claim)
        stored = on_behalf(store, standing, lambda: self._writer.store_past_memory(checkpoint, manifest, store))
        try:
            unseen = retain(store, self._info.keep, stored)
        except SpotError as error:  # the next one tries again
            text = "snapshots older than {snapshot} could not be deleted at {about}: {error}. The next one retries."
            say(logging.WARNING, "retention-failed", text, about=store.url, snapshot=stored.name, error=error)
        else:
            if unseen:
                say(logging.WARNING, "upload-not-listed", "{about} ({snapshot})", about=unseen, snapshot=stored.name)

    @property
    def is_at_a_node(self) -> bool:
        """Whether the newest such snapshot went to a snapshot server, which may have lost it since."""
        return bool(self._writer.across.at)

    def flush(self, wait_s: float) -> list[str]:
        """Wait until a server that has the newest such snapshot has made it durable.

        Returns:
            what was not reached in time, one line each.
        """
        newest, deadline_s = self._writer.past_memory, time.monotonic() + wait_s
        give_up_s = min(deadline_s, time.monotonic() + _CARRIED_S)
        if (place := SpreadPlace.read(self._writer.across.at)) is not None:
            return self._flush_all(place, newest.name if newest is not None else "", deadline_s)
        while True:
            owed, away = list[str](), list[str]()
            for url in self._writer.across.at.split():  # it was written there, or several hosts have brought it
                try:
                    lines = self._owed_at(url, newest.name, deadline_s) if newest is not None else None
                except SpotError as error:
                    away.append(f"the snapshot server that has the newest snapshot cannot be asked: {error}")
                    continue
                if lines == []:
                    return []
                owed += lines or []
            if not owed or time.monotonic() >= give_up_s:
                return owed or away
            time.sleep(_LOOK_S)

    def _flush_all(self, place: SpreadPlace, name: str, deadline_s: float) -> list[str]:
        """The same where the newest snapshot is spread over several nodes: each brings down what it has of it."""

        def flush(url: str) -> list[str]:
            try:
                return NodeStore(url).flush(min(_SPREAD_S, within(deadline_s)))
            except SpotError as error:
                return [f"a snapshot server that has some of the newest snapshot cannot be asked: {error}"]

        while True:
            with ThreadPoolExecutor(len(place.urls)) as pool:
                late = [line for lines in pool.map(flush, place.urls) for line in lines]
            if not late or self._is_durable(name):  # of what two servers have, one brings all that is needed
                return []
            if time.monotonic() >= deadline_s:
                return late

    def _is_durable(self, name: str) -> bool:
        try:
            return any(manifest.name == name for manifest in open_store(self._url).survey().manifests)
        except SpotError as error:
            logger.debug("%s does not answer (%s)", self._url, error)
            return False

    def _owed_at(self, url: str, name: str, deadline_s: float) -> list[str] | None:
        """What a server owes of a snapshot in the end, one line each; ``None`` if it does not have it (any more)."""
        store = NodeStore(url)
        if not any(manifest.name == name for manifest, _dirty, _safe in store.listing()):
            return None
        if owed := store.flush(within(deadline_s)):
            return owed
        held = [safe for manifest, _dirty, safe in store.listing() if manifest.name == name]
        if held and self._info.durable_url not in held[0]:
            return [f"{name} is at {url}, which does not make it durable"]
        return []

    def _write_to(self, node: str, checkpoint: Any, manifest: Manifest) -> bool:
        """Bring a snapshot to a snapshot server; whether it is there, and will be durable without this host."""
        store = NodeStore(f"{node.rstrip('/')}/{self._info.text}")
        try:
            opened = store.open_run(replace(self._info, nodes=(), session=""))
            if not opened.carries:
                raise ServerUnreachableError(opened.why_not, tier=node)
            self._writer.store_past_memory(checkpoint, manifest, store)
        except FencedError:
            raise
        except SpotError as error:
            self._away_until_s[node] = time.monotonic() + _AWAY_S
            text = "{about} does not take {snapshot}: {error}. Another server or the storage gets it."
            say(logging.WARNING, "server-failing", text, about=node, snapshot=manifest.name, error=error)
            return False
        return True
