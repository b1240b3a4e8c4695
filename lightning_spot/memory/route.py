"""Where each run's snapshots go from a node: to the durable tier it may write to, and to its trainer's nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_spot.memory.flusher import Flusher
from lightning_spot.memory.prefixes import check_prefix, refusal
from lightning_spot.memory.replication import Replication
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.slots import Tiers
from lightning_spot.tiers.claims import Owner, Standing, digest_of
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_JOIN_S = 6.0  # a request to a node that does not answer takes 5 s


class Routes:
    """The tiers of every run of a node. Call :meth:`open` and :meth:`forget` under the node's lock.

    Args:
        ring: is told where the runs go.
        flusher: tells how tiers are doing.
        open_store: makes the store of a tier's URL.
        busy: URLs of runs to which a snapshot that several hosts bring is on its way.
        run: what is known of a run, by its key; ``None`` if nothing is.
        flush_to: see :class:`~lightning_spot.memory.node.Node`.
        allow: likewise.

    Attributes:
        prefixes: below which this node writes for others; ``None`` for no bound.
    """

    def __init__(
        self,
        ring: Ring,
        flusher: Flusher,
        open_store: Callable[[str], Store],
        busy: Callable[[], set[str]],
        run: Callable[[str], RunInfo | None],
        *,
        flush_to: str | None,
        allow: Sequence[str] | None,
    ) -> None:
        self.flush_to = flush_to.rstrip("/") if flush_to else None
        self._allow = [check_prefix(prefix) for prefix in allow] if allow is not None else None
        self.prefixes = [*self._allow, *filter(None, [self.flush_to])] if self._allow is not None else None
        self._ring = ring
        self._flusher = flusher
        self._busy, self._run = busy, run
        self.open_store = open_store
        self._replications: dict[str, Replication] = {}
        self._refusals: dict[str, str] = {}

    def open(self, info: RunInfo) -> None:
        """Decide where a run goes, and begin to look for its trainer's nodes."""
        key = info.key
        refused = self.allowed(info.durable_url) if info.durable_url is not None else "no durable URL was named"
        if not info.carry:
            self.forget(key)
            self._refusals[key] = "another node that has it does"
            self._ring.set_tiers(key, Tiers())
            return
        self._refusals[key] = refused
        if info.nodes:
            known = self._replications.get(key)
            if known is None or not _same(known.info, info):
                self._begin(info)
            return
        self.forget(key)
        self._refusals[key] = refused
        url = self._own_tier(info)
        self._ring.set_tiers(key, Tiers(own=(url,) if url is not None else ()))

    def spread(self, info: RunInfo) -> Replication | None:
        """Have the snapshots of a run spread over its trainer's nodes, if there are any."""
        known = self._replications.get(info.key)
        if known is not None and not known.info.spread:
            self._begin(replace(known.info, spread=True))
        return self._replications.get(info.key)

    def opened(self, info: RunInfo) -> Opened:
        """What to answer who opens a run: whether it is brought to its durable tier from here."""
        replication, refused = self._replications.get(info.key), self._refusals[info.key]
        if info.spread and not info.nodes:  # a tier that fails is tried again, and portions are safe here meanwhile
            return Opened(info.attempt, not refused, refused)
        if replication is not None:
            carries = replication.carries or not refused
            return Opened(info.attempt, carries, "" if carries else replication.why_not)
        why_not = refused
        if not why_not and info.durable_url is not None and self._flusher.failing(info.durable_url):
            why_not = f"its storage fails here: {self._flusher.health[info.durable_url].error}"
        return Opened(info.attempt, not why_not, why_not)

    def carries(self, key: str) -> bool:
        """Whether a run is brought to its durable tier from here."""
        replication = self._replications.get(key)
        return (replication is not None and replication.carries) or self._refusals.get(key, "unknown") == ""

    def allowed(self, url: str) -> str:
        """Why this node may not write to a durable URL, for people; ``""`` if it may."""
        if self.prefixes is None:
            return ""
        return refusal(url, self.prefixes or [])

    def standing(self, key: str, url: str) -> Standing:
        """On whose behalf this node acts at the URL of a run.

        Where a client has named the place, nothing is done unless the claim there has a digest of the token that the
        client gave: who cannot write there cannot have this node do so. At a place of its own, and of the trainer's
        host, the node claims for the trainer what that could not.
        """
        info = self._run(key)
        if url.startswith("spot://") or info is None:
            return Standing()
        is_lent = self._allow is not None and url == info.durable_url
        if info.token and info.is_claimed and (is_lent or self._allow is None or url == f"{self.flush_to}/{info.text}"):
            return Standing(Owner(info.attempt, digest_of(info.token)), None if is_lent else info.claim())
        return Standing(Owner(info.attempt, "") if is_lent else None)

    def check_owner(self, key: str) -> None:
        """Refuse to change anything for a run whose attempt, by its claim, may not do so itself at its durable tier.

        What is queued may be done for a later attempt.

        Raises:
            SpotError: in that case, or if the tier fails.
        """
        info = self._run(key)
        if info is None or info.durable_url is None:
            return
        standing = self.standing(key, info.durable_url)
        if self._allow is not None and standing.is_lent:
            store = self.open_store(info.durable_url)
            store.owner = standing.owner
            store.check_owner()

    def claimed(self, info: RunInfo) -> int:
        """Highest attempt that has claimed a run, as far as this node may look; 0 if that cannot be seen from here."""
        url = self._own_tier(info)
        return self.open_store(url).claimed() if url is not None else 0

    def durable(self, info: RunInfo) -> str | None:
        """URL of the directory where what has left memory lies; ``None`` if nobody has said one."""
        return info.durable_url if info.durable_url is not None else self._own_tier(info)

    def away(self) -> dict[str, str]:
        """URLs of runs at nodes that do not work, and what is wrong."""
        return {
            url: why for replication in list(self._replications.values()) for url, why in replication.away().items()
        }

    def heard(self, url: str, error: Exception | None) -> None:
        """Take note of how a put at a tier went."""
        for replication in list(self._replications.values()):
            replication.heard(url, error)

    def ask_soon(self, key: str) -> None:
        """Have the nodes of a run asked whether they are there, see :meth:`Replication.ask_soon`."""
        if (replication := self._replications.get(key)) is not None:
            replication.ask_soon()

    def status(self, key: str) -> dict[str, Any]:
        """Where a run goes, as JSON-ready values."""
        tiers, replication = self._ring.tiers(key), self._replications.get(key)
        return {
            "destinations": [*tiers.own, *tiers.carried],
            "carried": list(tiers.carried),
            "node": replication.active if replication is not None else "",
            "carrier": replication.active if replication is not None and replication.carries else "",
            "kept_at": replication.used if replication is not None else [],
            "nodes": replication.status() if replication is not None else {},
            "why_not": replication.why_not if replication is not None else self._refusals.get(key, ""),
        }

    def forget(self, key: str) -> None:
        """Look after a run no longer."""
        self._refusals.pop(key, None)
        if (replication := self._replications.pop(key, None)) is not None:
            replication.close()

    def close(self) -> None:
        """Look after no run any longer."""
        replications = list(self._replications.values())
        for replication in replications:
            replication.close()
        for replication in replications:
            replication.join(_JOIN_S)

    def _begin(self, info: RunInfo) -> None:
        """Look for the nodes of a run anew.

        Raises:
            RuntimeError: see :meth:`Replication.start`; who opens the run asks once more.
        """
        key, known = info.key, self._replications.get(info.key)
        replication = Replication(
            self._ring,
            self.open_store,
            info,
            is_urgent=lambda: self._flusher.is_urgent(key),
            is_busy=lambda url: url in self._busy(),
            is_left=lambda: self._is_left(key),
        )
        with self._ring.changed:
            replication.start()
            self._replications[key] = replication
            if known is not None:
                known.close()

    def _is_left(self, key: str) -> bool:
        """Whether the trainer is gone: only its own host is told of nodes; others know what they were told."""
        info = self._run(key)
        return info is not None and (info.left or (bool(info.nodes) and not info.session))

    def _own_tier(self, info: RunInfo) -> str | None:
        """Where this node makes a run durable by itself; ``None`` if nowhere."""
        if info.durable_url is not None and not self.allowed(info.durable_url):
            return info.durable_url
        return f"{self.flush_to}/{info.text}" if self.flush_to is not None else None


def _same(known: RunInfo, info: RunInfo) -> bool:
    """Whether a run is opened once more by the same attempt, with the same tiers."""
    one, other = (replace(each, session="", pid=0, host="", spread=False, left=False) for each in (known, info))
    return one == other
