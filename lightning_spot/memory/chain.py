"""The chain: which node a run's snapshots go to next, and who brings them to the durable tier, it or this node.

A node with others behind it sends to the first of them that works. If that one says that it carries the run on to its
durable tier, this node does not write there, and learns from it what is safe. When it fails or refuses, this node
writes there itself, until a node carries the run on again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.slots import Slot, Tiers, newest_of_lineages
from lightning_spot.memory.tier import NodeTier
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

FIRST_AWAY_S = 1.0
LAST_AWAY_S = 30.0
ASK_AGAIN_S = 10.0
"""How often a node is asked whether it carries the run on: one that does not, and one that takes long about it."""

_FIRST_LOOK_S = 0.1
_LAST_LOOK_S = 2.0
_MOST_FAILURES = 3
_HURRIED_S = 0.5


@dataclass(slots=True)
class _Candidate:
    """A node that may come next.

    Attributes:
        url: of the run at it.
        failures: in a row.
        away_until_s: not tried before (monotonic).
        why: what was wrong last.
        store: reaches it, once it was needed.
        told: snapshots of which it was told that they are durable, and whether it had them then.
    """

    url: str
    failures: int = 0
    away_until_s: float = 0.0
    why: str = ""
    store: NodeTier | None = None
    told: set[tuple[str, bool]] = field(default_factory=set)


class Chain:
    """What follows this node for one run; a thread keeps it up to date until :meth:`close`.

    Args:
        ring: holds the run's snapshots; is told where they go.
        open_store: makes the stores of nodes and of the durable tier.
        info: of the run; its ``nodes`` are the candidates, in order of preference.
        may_write: whether this node may write to the durable tier itself.
        is_urgent: tells whether somebody waits for the run to be safe.
    """

    def __init__(
        self,
        ring: Ring,
        open_store: Callable[[str], Store],
        info: RunInfo,
        *,
        may_write: bool,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.info = info
        self.carries = False
        self.why_not = "no node has answered yet"
        self._ring = ring
        self._open_store = open_store
        self._may_write = may_write
        self._is_urgent = is_urgent
        self._candidates = [_Candidate(f"{node.rstrip('/')}/{info.text}") for node in info.nodes]
        self._active: _Candidate | None = None
        self._decided = False
        self._doubted = False
        self._asked_s = 0.0
        self._look_s = _FIRST_LOOK_S
        self._closed = False
        self._apply()
        self._thread = threading.Thread(target=self._work, name=f"spot-chain-{info.text}", daemon=True)

    def start(self) -> None:
        """Begin to look for a node."""
        self._thread.start()

    @property
    def active(self) -> str:
        """URL of the run at the node that comes next; ``""`` while none does."""
        return self._active.url if self._active is not None else ""

    def heard(self, url: str, error: Exception | None) -> None:
        """Take note of how a put at a tier went."""
        with self._ring.changed:
            if self._active is None or self._active.url != url:
                return
            if error is None:
                self._active.failures = 0
                self._look_s = _FIRST_LOOK_S
            else:
                self._active.failures += 1
                self._active.why = str(error)
                self._doubted = True
            self._ring.notify()

    def close(self) -> None:
        """Stop looking after the chain. Its thread ends once the request under way has."""
        with self._ring.changed:
            self._closed = True
            self._ring.notify()

    def join(self, wait_s: float) -> None:
        """Wait for its thread."""
        self._thread.join(wait_s)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed:
            try:
                wait_s = self._find() if self._active is None else self._follow(self._active)
            except Exception:  # a bug must not end the thread: nothing would be learned any more
                logger.exception("the chain of run %s failed unexpectedly", self.info.text)
                wait_s = _LAST_LOOK_S
            with self._ring.changed:
                if not self._closed and not self._doubted and wait_s > 0:
                    self._ring.changed.wait(wait_s)
        if self._active is not None:
            self._tell(self._active)

    def _find(self) -> float:
        """Open the run at the first node that works; how long to wait if none does."""
        for candidate in self._candidates:
            if self._closed or candidate.away_until_s > time.monotonic():
                continue
            if self._open(candidate):
                return 0.0
        soonest_s = min((candidate.away_until_s for candidate in self._candidates), default=0.0)
        return max(_FIRST_LOOK_S, soonest_s - time.monotonic())

    def _open(self, candidate: _Candidate) -> bool:
        """Open the run at a node, or ask once more how things are; whether it works."""
        self._asked_s = time.monotonic()
        try:
            opened = self._node(candidate).open_run(replace(self.info, nodes=(), session=""))
        except SpotError as error:
            self._lost(candidate, error)
            return False
        with self._ring.changed:
            if self._active is not candidate or opened.carries != self.carries:
                self._say(candidate, opened.carries, opened.why_not)
            if self._active is not candidate:
                candidate.told.clear()
            self._active, self._doubted = candidate, False
            self.carries, self.why_not = opened.carries, opened.why_not
            self._decided = True
            self._apply()
        return True

    def _lost(self, candidate: _Candidate, error: Exception) -> None:
        with self._ring.changed:
            was_active = self._active is candidate
            if was_active or not candidate.failures:
                logger.warning("run %s: the node at %s does not work (%s)", self.info.text, candidate.url, error)
            candidate.failures += 1
            away_s = min(LAST_AWAY_S, FIRST_AWAY_S * 2 ** min(candidate.failures - 1, 10))
            now = time.monotonic()
            candidate.away_until_s, candidate.why = now + away_s, str(error)
            # While there is another one to be tried, this node does not begin to write itself.
            self._decided = all(other.away_until_s > now for other in self._candidates)
            if was_active or self._active is None:
                self._active, self._doubted, self.carries = None, False, False
                self.why_not = f"{candidate.url}: {error}"
            self._apply()

    def _follow(self, candidate: _Candidate) -> float:
        """Learn from the node what is safe; how long to wait before the next look."""
        if self._doubted:
            if candidate.failures >= _MOST_FAILURES:
                self._lost(candidate, NodeUnreachable(candidate.why, tier=candidate.url))
                return 0.0
            # One failed put may be a broken connection: the node is lost only if it does not answer either.
            return _FIRST_LOOK_S if self._open(candidate) else 0.0
        waiting = self._waiting(candidate)
        # A node that was stopped in the middle of a snapshot breaks no connection: it is asked whether it is there.
        asking = bool(waiting) or self._sending(candidate) or not self.carries
        if asking and time.monotonic() - self._asked_s >= ASK_AGAIN_S and not self._open(candidate):
            return 0.0
        self._tell(candidate)
        if not waiting:
            return ASK_AGAIN_S
        try:
            self._learn(candidate, waiting)
        except SpotError as error:
            self.heard(candidate.url, error)
            return 0.0
        self._look_s = min(_LAST_LOOK_S, self._look_s * 1.5)
        return 0.0 if self._is_urgent() else self._look_s

    def _waiting(self, candidate: _Candidate) -> list[tuple[Slot, Manifest]]:
        """Snapshots that the node has, and of which it is not known yet that they are durable."""
        with self._ring.changed:
            if not self.carries:
                return []
            return [
                (slot, slot.manifest)
                for slot in self._ring.committed(self.info.key)
                if slot.manifest is not None
                and slot.places is None
                and candidate.url in slot.safe
                and self.info.durable_url in slot.dirty
            ]

    def _sending(self, candidate: _Candidate) -> bool:
        """Whether the node is owed something."""
        with self._ring.changed:
            return any(candidate.url in slot.dirty for slot in self._ring.committed(self.info.key))

    def _tell(self, candidate: _Candidate) -> None:
        """Say what is durable, to a node that does not bring it there: what it holds would stay there for ever."""
        with self._ring.changed:
            committed = self._ring.committed(self.info.key)
            slots = [slot for slot in committed if slot.settled or self.info.durable_url in slot.safe]
            known = [
                (slot.manifest, (slot.manifest.name, candidate.url in slot.safe))
                for slot in newest_of_lineages(slots)
                if slot.manifest is not None and not self.carries
            ]
        for manifest, fact in known:
            if fact in candidate.told:
                continue
            try:
                self._node(candidate).settle(manifest, self.info.attempt)
            except SpotError as error:
                logger.debug("%s could not be told what is durable: %s", candidate.url, error)
                return
            candidate.told.add(fact)

    def _learn(self, candidate: _Candidate, waiting: list[tuple[Slot, Manifest]]) -> None:
        node, durable_url = self._node(candidate), self.info.durable_url
        assert durable_url is not None
        if self._is_urgent():
            node.flush(_HURRIED_S)  # nobody there puts anything off while this is waited for
        listed = {(manifest.name, manifest.checksums): safe for manifest, _dirty, safe in node.listing()}
        for slot, manifest in waiting:
            safe = listed.get((manifest.name, manifest.checksums))
            if safe is not None and durable_url in safe:
                self._ring.mark_safe(slot, manifest, durable_url)
            elif safe is None:
                self._ask_durable(candidate, slot, manifest, durable_url)

    def _ask_durable(self, candidate: _Candidate, slot: Slot, manifest: Manifest, durable_url: str) -> None:
        """A snapshot left the node's memory: because it is durable, or because the node lost it."""
        try:
            durable = self._open_store(durable_url).has(manifest)
        except SpotError as error:
            logger.debug("%s does not answer (%s); it is asked again", durable_url, error)
            return
        if durable:
            self._ring.mark_safe(slot, manifest, durable_url)
        else:
            self._ring.mark_lost(slot, manifest, candidate.url)

    def _node(self, candidate: _Candidate) -> NodeTier:
        if candidate.store is None:
            store = self._open_store(candidate.url)
            if not isinstance(store, NodeTier):
                raise NodeUnreachable(f"{candidate.url} is no node", tier=candidate.url)
            candidate.store = store
        return candidate.store

    def _apply(self) -> None:
        """Tell the ring where the run's snapshots go now."""
        if self._closed:
            return
        own = [self._active.url] if self._active is not None else []
        carried = []
        if self.info.durable_url is not None:
            if self.carries or not self._decided:
                carried.append(self.info.durable_url)
            elif self._may_write:
                own.append(self.info.durable_url)
        if not own and not carried and self._candidates:
            carried.append(self._candidates[0].url)  # nobody takes it now: it is owed to whoever will
        self._ring.set_tiers(self.info.key, Tiers(tuple(own), tuple(carried)))

    def _say(self, candidate: _Candidate, carries: bool, why_not: str) -> None:
        if carries:
            logger.info("run %s goes to %s, which carries it on", self.info.text, candidate.url)
        elif self.info.durable_url is not None:
            who = "this host writes there itself" if self._may_write else "nobody does"
            logger.warning(
                "run %s goes to %s, which does not carry it on to its durable tier (%s): %s",
                self.info.text,
                candidate.url,
                why_not,
                who,
            )
