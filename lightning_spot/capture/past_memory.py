"""Where snapshots go that fit no memory here: to a snapshot server that brings them on, else to storage."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from lightning_spot.capture.host_link import within
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FencedError, ServerUnreachableError, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.runs import RunInfo
from lightning_spot.say import say
from lightning_spot.tiers.fences import Owner, Standing
from lightning_spot.tiers.store import on_behalf, retain

logger = logging.getLogger(__name__)

_AWAY_S = 30.0  # a server that failed is not tried before; training waits for each try
_CARRIED_S = 15.0  # for a server that alone has the newest one to be asked to carry the run on
_LOOK_S = 0.1


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
        self._at = ""

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
        self._at = ""
        try:
            unseen = retain(store, self._info.keep, stored)
        except SpotError as error:  # the next one tries again
            text = "snapshots older than {snapshot} could not be deleted at {about}: {error}. The next one retries."
            say(logging.WARNING, "retention-failed", text, about=store.url, snapshot=stored.name, error=error)
        else:
            if unseen:
                say(logging.WARNING, "upload-not-listed", "{about} ({snapshot})", about=unseen, snapshot=stored.name)

    @property
    def newest_at(self) -> str:
        """URL of the run at the snapshot server that got the newest snapshot; ``""`` if that is somewhere else."""
        newest = self._writer.past_memory
        return self._at if newest is not None and newest is self._writer.committed else ""

    def why_lost(self, wait_s: float) -> str:
        """Why the server that got the newest snapshot is not known to have it any more; ``""`` if it has it.

        Args:
            wait_s: how long to wait for its answer.
        """
        newest, url = self._writer.past_memory, self.newest_at
        if not url or newest is None:
            return ""
        try:
            return "" if ServerStore(url).holds(newest.name, wait_s) else "has it no more"
        except SpotError as error:
            return f"cannot be asked ({error})"

    def flush(self, wait_s: float) -> list[str]:
        """Wait until a server that has the newest snapshot has made it durable.

        Returns:
            what was not reached in time, one line each.
        """
        newest, url = self._writer.past_memory, self.newest_at
        deadline_s = time.monotonic() + wait_s
        give_up_s = min(deadline_s, time.monotonic() + _CARRIED_S)
        while url and newest is not None:
            try:
                owed = self._owed_at(url, newest.name, deadline_s)
            except SpotError as error:
                return [f"the snapshot server that has the newest snapshot cannot be asked: {error}"]
            if not owed or time.monotonic() >= give_up_s:
                return owed or []
            time.sleep(_LOOK_S)
        return []

    def _owed_at(self, url: str, name: str, deadline_s: float) -> list[str] | None:
        """What a server owes of a snapshot in the end, one line each; ``None`` if it does not have it (any more)."""
        store = ServerStore(url)
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
        store = ServerStore(f"{node.rstrip('/')}/{self._info.text}")
        try:
            opened = store.open_run(replace(self._info, nodes=(), session=""))
            if not opened.carries:
                raise ServerUnreachableError(opened.why_not, tier=node)
            self._writer.store_past_memory(checkpoint, manifest, store)
            self._at = store.url
        except FencedError:
            raise
        except SpotError as error:
            self._away_until_s[node] = time.monotonic() + _AWAY_S
            text = "{about} does not take {snapshot}: {error}. Another server or the storage gets it."
            say(logging.WARNING, "server-failing", text, about=node, snapshot=manifest.name, error=error)
            return False
        return True
