"""Where a host's snapshots go: to which servers, and who brings them to storage: one of these, or this host.

A server on a trainer's host sends to the first of the trainer's servers that works, or, with replicas, to the first
few. One of these is asked to carry the run on to its storage: if it says that it does, this host does not write there,
and learns from it what is safe. When it fails or refuses, another is asked; while none does, this host writes there.

What a server has missed, since it was away or takes another one's place, the flusher sends from the slots of this host.
Of a snapshot whose other shards come from other hosts, it is looked up at all servers whether all of them are there.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning_spot.errors import ServerUnreachableError, SpotError, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.shards import Status, by_snapshot, registers_of, status
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.slots import Slot, Tiers, newest_of_lineages
from lightning_spot.memory.tier import Listed, NodeTier
from lightning_spot.retry import growing, pause_after
from lightning_spot.say import UNEXPECTED, recovered, say
from lightning_spot.threads import all_at_once
from lightning_spot.tiers import commit
from lightning_spot.tiers.store import Store, put_together

logger = logging.getLogger(__name__)

FIRST_AWAY_S = 1.0
LAST_AWAY_S = 30.0
ASK_AGAIN_S = 10.0
"""How often a server is asked how things are: one that does not carry the run on, and one that takes long about it."""

FIRST_LOOK_S, _LAST_LOOK_S = 0.1, 2.0
_MOST_FAILURES = 3
_HURRIED_S = 0.5

Waiting = list[tuple[Slot, Manifest]]


class Peer:
    """A server that a run may be kept at: what it is told, and what is learned from it. It decides nothing.

    Its numbers change under the ring's lock only.

    Args:
        url: of the run at the server.
        info: of the run.
        ring: holds the run's snapshots.
        open_store: makes the stores of servers and of storage.

    Attributes:
        url: see above.
        failures: in a row.
        away_until_s: not tried before (monotonic).
        why: what was wrong last.
        why_not: why it does not carry the run on, ``""`` if it was not asked to, or does.
        asked_s: when it was asked last (monotonic).
    """

    def __init__(self, url: str, info: RunInfo, ring: Ring, open_store: Callable[[str], Store]) -> None:
        self.url = url
        self.failures = 0
        self.away_until_s = 0.0
        self.why = ""
        self.why_not = ""
        self.asked_s = 0.0
        self._info = info
        self._ring = ring
        self._open_store = open_store
        self._store: NodeTier | None = None
        self._informed_of: set[tuple[str, bool]] = set()  # what it knows to be durable, and whether it had it then

    def tier(self) -> NodeTier:
        """The server as a tier; it knows what it was told of the run.

        Raises:
            ServerUnreachableError: if it is no server.
        """
        if self._store is None:
            store = self._open_store(self.url)
            if not isinstance(store, NodeTier):
                raise ServerUnreachableError(f"{self.url} is no server", tier=self.url)
            self._store = store
        return self._store

    def open(self, *, carry: bool, left: bool = False) -> Opened:
        """Open the run there, or ask once more how things are.

        Args:
            carry: whether it is to bring the run on to storage.
            left: whether the trainer is gone.
        """
        self.asked_s = time.monotonic()
        committed = self._ring.newest_committed(self._info.key, elsewhere=True)
        asked = replace(self._info, nodes=(), replicas=1, session="", committed=committed, carry=carry, left=left)
        return self.tier().open_run(asked)

    def forget_told(self) -> None:
        """It is used anew: it may have forgotten what is durable."""
        self._informed_of.clear()

    def find_lost(self, *, durable_too: bool) -> None:
        """Have the newest snapshots sent again that were safe there, and that it has no more.

        Args:
            durable_too: also those that are durable: it may have let them go since, or have come back empty.
        """
        with self._ring.changed:
            held = [
                (slot, slot.manifest)
                for slot in newest_of_lineages(self._ring.committed(self._info.key), self._ring.known)
                if slot.manifest is not None
                and not slot.manifest.why_failed
                and self.url in slot.safe
                and (durable_too or not (slot.settled or self._info.durable_url in slot.safe))
            ]
        if not held:
            return
        listed = {(item.manifest.name, item.manifest.checksums) for item in self.tier().listing()}
        for slot, manifest in held:
            if (manifest.name, manifest.checksums) not in listed:
                self._ring.mark_lost(slot, manifest, self.url)

    def waiting(self, *, all_too: bool) -> Waiting:
        """Snapshots that the server has, and of which it is not known yet that they are durable.

        Args:
            all_too: also those that storage is not meant to have, unless nothing newer comes.
        """
        with self._ring.changed:
            return [
                (slot, slot.manifest)
                for slot in self._ring.committed(self._info.key)
                if slot.manifest is not None
                and slot.places is None
                and self.url in slot.safe
                and self._info.durable_url in slot.dirty
                and (all_too or slot.shard is None or slot.shard.persist)
            ]

    def tell(self) -> None:
        """Say what is durable, to a server that does not bring it there: what it holds would stay there for ever."""
        with self._ring.changed:
            committed = self._ring.committed(self._info.key)
            slots = [
                slot
                for slot in committed
                if slot.manifest is not None
                and slot.manifest.exact  # another one says nothing of the exact ones before it
                and (slot.settled or self._info.durable_url in slot.safe)
                and not slot.manifest.why_failed
            ]
            known = [
                (slot.manifest, (slot.manifest.name, self.url in slot.safe))
                for slot in newest_of_lineages(slots, self._ring.known)
                if slot.manifest is not None
            ]
        for manifest, fact in known:
            if fact in self._informed_of:
                continue
            try:
                self.tier().settle(replace(manifest, name=manifest.snapshot, shard=None), self._info.attempt)
            except SpotError as error:
                logger.debug("%s could not be told what is durable: %s", self.url, error)
                return
            self._informed_of.add(fact)

    def learn(self, waiting: Waiting, *, urgent: bool) -> None:
        """Ask which of these snapshots it has made durable, see :meth:`waiting`."""
        node, durable_url = self.tier(), self._info.durable_url
        assert durable_url is not None
        if urgent:
            node.flush(_HURRIED_S)  # nobody there puts anything off while this is waited for
        listed = {(item.manifest.name, item.manifest.checksums): item.safe for item in node.listing()}
        for slot, manifest in waiting:
            safe = listed.get((manifest.name, manifest.checksums))
            if safe is not None and durable_url in safe:
                self._mark_durable(slot, manifest, durable_url)
            elif safe is None:
                self._ask_durable(slot, manifest, durable_url)

    def _ask_durable(self, slot: Slot, manifest: Manifest, durable_url: str) -> None:
        """A snapshot left the server's memory: because it is durable, or because the server lost it."""
        durable = self._is_durable(manifest)
        if durable:
            self._mark_durable(slot, manifest, durable_url)
        elif durable is not None:
            self._ring.mark_lost(slot, manifest, self.url)

    def _mark_durable(self, slot: Slot, manifest: Manifest, durable_url: str) -> None:
        self._ring.mark_safe(slot, manifest, durable_url)
        if manifest.shard is not None:
            self._ring.mark_committed(self._info.key, manifest.lineage, manifest.order)

    def _is_durable(self, manifest: Manifest) -> bool | None:
        """Whether the storage has a snapshot; ``None`` if it does not answer: it is asked again."""
        if self._info.durable_url is None:
            return False
        try:
            store = self._open_store(self._info.durable_url)
            if manifest.shard is None:
                return store.has(manifest)
            whole = commit.look(store, manifest.snapshot).manifest
            return whole is not None and commit.contains(whole, manifest)
        except SpotError as error:
            logger.debug("%s does not answer (%s)", self._info.durable_url, error)
            return None


@dataclass(eq=False, slots=True)
class Replica:
    """One of the servers that a run is to be kept at.

    Attributes:
        node: which one it is now; ``None`` while none works.
        trying: the one that is being asked whether it works; no other replica asks it meanwhile.
        doubted: whether something is to be asked of it at once.
        look_s: until it is asked next what is durable.
    """

    node: Peer | None = None
    trying: Peer | None = None
    doubted: bool = False
    look_s: float = FIRST_LOOK_S


class Registers:
    """Looks up at the servers of a run whether snapshots of which other hosts have shards are complete there.

    Args:
        ring: of this host.
        key: of the run.
        nodes: all servers that hosts of the run may use.
    """

    def __init__(self, ring: Ring, key: str, nodes: list[Peer]) -> None:
        self._ring, self._key, self._nodes = ring, key, nodes

    def wanted(self) -> set[str]:
        """Names of the snapshots that are looked for; call it under the ring's lock."""
        return {group.manifest.snapshot for group in self._ring.groups(self._key) if group.state is Status.PENDING}

    def look(self, names: set[str]) -> None:
        """Ask all servers for snapshots, and tell the ring. One that does not answer may have what is missing."""
        now_s = time.monotonic()
        nodes = [node for node in self._nodes if node.away_until_s <= now_s]
        listings = all_at_once([functools.partial(self._listing, node) for node in nodes], "spot-registers")
        seen = by_snapshot(item.manifest for listed in listings for item in listed)
        for name, shards in seen.items():
            registers, lineage, order = registers_of(shards), shards[0].lineage, shards[0].order
            if status(registers, order) is not Status.COMMITTED:
                if name in names:
                    self._ring.see(self._key, name, registers)
            elif order not in self._ring.known.committed.get((self._key, lineage), ()) and put_together(shards):
                self._ring.mark_committed(self._key, lineage, order)

    def _listing(self, node: Peer) -> list[Listed]:
        try:
            return node.tier().listing()
        except SpotError as error:
            logger.debug("%s does not tell what it has: %s", node.url, error)
            with self._ring.changed:  # who does not answer does not keep the others waiting each time
                node.away_until_s = max(node.away_until_s, time.monotonic() + ASK_AGAIN_S)
            return []


class Replication:
    """The servers that one run is kept at; a thread for each replica keeps them up to date until :meth:`close`.

    Args:
        ring: holds the run's snapshots; is told where they go.
        open_store: makes the stores of servers and of storage.
        info: of the run; its ``nodes`` may be used, in order of preference, and ``replicas`` of them are.
        is_urgent: tells whether somebody waits for the run to be safe.
        is_left: tells whether the trainer on this host is gone.
    """

    def __init__(
        self,
        ring: Ring,
        open_store: Callable[[str], Store],
        info: RunInfo,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
        is_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self.info = info
        self.why_not = "no server has answered yet"
        self._ring = ring
        self._is_urgent, self._is_left = is_urgent, is_left
        self._nodes = [Peer(f"{node.rstrip('/')}/{info.text}", info, ring, open_store) for node in info.nodes]
        self._replicas = [Replica() for _ in range(min(max(1, info.replicas), len(self._nodes)))]
        self._carrier: Peer | None = None
        self._asked: Peer | None = None  # to carry the run on; it has not answered yet
        self._closed = False
        name = f"spot-replication-{info.text}"
        self._threads = [
            threading.Thread(target=self._work, args=(replica,), name=name, daemon=True) for replica in self._replicas
        ]
        if info.hosts > 1:
            self._threads.append(threading.Thread(target=self._watch, name=f"spot-registers-{info.text}", daemon=True))

    def start(self) -> None:
        """Begin to look for servers, in the place of an earlier one of the run, if there is one.

        Raises:
            RuntimeError: if no thread can be had now: nothing is looked for, and the run goes where it went.
        """
        with self._ring.changed:
            try:
                for thread in self._threads:
                    thread.start()
            except RuntimeError:
                self._closed = True
                raise
            self._apply()

    @property
    def carries(self) -> bool:
        """Whether a server carries the run on to its storage."""
        return self._carrier is not None

    @property
    def active(self) -> str:
        """URL of the run at the server that is used, of several the one that carries it on; ``""`` while none does."""
        nodes = [replica.node.url for replica in self._replicas if replica.node is not None]
        return self._carrier.url if self._carrier is not None else next(iter(nodes), "")

    @property
    def used(self) -> list[str]:
        """URLs of the run at the servers that it is kept at, the carrier's first; none while none carries it on.

        A server that has just failed, and was not asked since, is none of them.
        """
        with self._ring.changed:
            sound = [each.node for each in self._replicas if not (each.doubted and each.node and each.node.failures)]
            if self._carrier is None or self._carrier not in sound:
                return []
            return [self._carrier.url, *(node.url for node in sound if node and node is not self._carrier)]

    def away(self) -> dict[str, str]:
        """URLs of the run at servers that do not work, and what was wrong."""
        with self._ring.changed:
            used = [replica.node for replica in self._replicas]
            return {node.url: node.why for node in self._nodes if node.failures and node not in used}

    def status(self) -> dict[str, str]:
        """What each server does for the run, for people."""
        with self._ring.changed:
            used, away = [replica.node for replica in self._replicas], self.away()
            return {
                node.url: "carries it on"
                if node is self._carrier
                else "holds it"
                if node in used
                else f"away: {away[node.url]}"
                if node.url in away
                else "spare"
                for node in self._nodes
            }

    def heard(self, url: str, error: Exception | None) -> None:
        """Take note of how a put at a tier went."""
        with self._ring.changed:
            for replica in self._replicas:
                if replica.node is None or replica.node.url != url:
                    continue
                if error is None:
                    replica.node.failures = 0
                    replica.look_s = FIRST_LOOK_S
                else:
                    replica.node.failures += 1
                    replica.node.why = str(error)
                    replica.doubted = True
                self._ring.notify()

    def ask_soon(self) -> None:
        """Have the servers asked whether they are there: somebody waits for the run to be safe."""
        with self._ring.changed:
            for replica in self._replicas:
                if replica.node is not None and time.monotonic() - replica.node.asked_s >= _LAST_LOOK_S:
                    replica.doubted = True
            self._ring.notify()

    def close(self) -> None:
        """Stop looking after the servers. Its threads end once the requests under way have."""
        with self._ring.changed:
            self._closed = True
            self._ring.notify()

    def join(self, wait_s: float) -> None:
        """Wait for its threads."""
        deadline_s = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # -- the threads ----------------------------------------------------------------------------------------------

    def _work(self, replica: Replica) -> None:
        while not self._closed:
            try:
                wait_s = self._find(replica) if replica.node is None else self._follow(replica, replica.node)
            except Exception:  # a bug must not end the thread: nothing would be learned any more
                about = f"watching the servers of run {self.info.text}"
                say(logging.ERROR, "unexpected", UNEXPECTED, about=about, exc_info=True)
                wait_s = _LAST_LOOK_S
            with self._ring.changed:
                if not self._closed and not replica.doubted and wait_s > 0:
                    self._ring.changed.wait(wait_s)
        if replica.node is not None and replica.node is not self._carrier:
            replica.node.tell()

    def _find(self, replica: Replica) -> float:
        """Open the run at the first server that works and is no other replica; how long to wait if none does."""
        replica.doubted, first = False, self._replicas.index(replica)
        for node in (*self._nodes[first:], *self._nodes[:first]):  # no two begin with the same one
            with self._ring.changed:
                if self._closed or node.away_until_s > time.monotonic() or self._is_taken(node):
                    continue
                replica.trying = node
            try:
                if self._open(replica, node):
                    return 0.0
            finally:
                replica.trying = None
        with self._ring.changed:
            away = [node.away_until_s for node in self._nodes if not self._is_taken(node)]
        return max(FIRST_LOOK_S, min(away, default=time.monotonic() + ASK_AGAIN_S) - time.monotonic())

    def _open(self, replica: Replica, node: Peer) -> bool:
        """Open the run at a server, or ask once more how things are; whether it works."""
        with self._ring.changed:
            anew, carry = replica.node is not node, self._is_to_carry(replica, node)
            if carry:
                self._asked = node
        try:
            opened = node.open(carry=carry, left=self._is_left())
            if opened.leaves:
                raise TierError("it is shutting down", tier=node.url)
            node.find_lost(durable_too=anew)
        except SpotError as error:
            self._lost(replica, node, error)
            return False
        finally:
            with self._ring.changed:
                self._asked = None if self._asked is node else self._asked
        with self._ring.changed:
            before, refused = self._carrier, bool(node.why_not)
            node.why_not = (opened.why_not or "it does not say why") if carry and not opened.carries else ""
            if anew:
                node.forget_told()
            replica.node, replica.doubted = node, False
            if carry:
                self._carrier = node if opened.carries else None
                self.why_not = node.why_not
            self._apply()
            if anew or self._carrier is not before or (node.why_not and not refused):
                self._say(node)
            self._ask_others(replica, before)
        return True

    def _lost(self, replica: Replica, node: Peer, error: Exception) -> None:
        with self._ring.changed:
            was_used, before = replica.node is node, self._carrier
            node.failures += 1
            now_s = time.monotonic()
            node.away_until_s = now_s + pause_after(node.failures, FIRST_AWAY_S, LAST_AWAY_S)
            said, node.why, node.why_not = bool(node.why) and not was_used, str(error), ""
            if was_used:
                replica.node, replica.doubted = None, False
            is_last = not any(other.node is not None for other in self._replicas)
            if before is node or is_last:
                self._carrier, self.why_not = None, f"{node.url}: {error}"
            self._apply()
            if not said:
                self._say_lost(node)
            self._ask_others(replica, before)

    def _follow(self, replica: Replica, node: Peer) -> float:
        """Learn from the server what is safe, or tell it; how long to wait before the next look."""
        if replica.doubted:
            if node.failures >= _MOST_FAILURES:
                self._lost(replica, node, ServerUnreachableError(node.why, tier=node.url))
                return 0.0
            # One failed put may be a broken connection: the server is lost only if it does not answer either.
            return FIRST_LOOK_S if self._open(replica, node) else 0.0
        # Also where nothing is owed: a server that was stopped breaks no connection, and one that is lost has lost what
        # counted as safe there.
        if time.monotonic() - node.asked_s >= ASK_AGAIN_S and not self._open(replica, node):
            return 0.0
        if node is not self._carrier:
            node.tell()
        all_too = self._is_urgent() or self._is_left()
        waiting = node.waiting(all_too=all_too) if node is self._carrier else []
        if not waiting:
            return max(0.0, node.asked_s + ASK_AGAIN_S - time.monotonic())
        try:
            node.learn(waiting, urgent=self._is_urgent())
        except SpotError as error:
            self.heard(node.url, error)
            return 0.0
        replica.look_s = min(_LAST_LOOK_S, replica.look_s * 1.5)
        return 0.0 if self._is_urgent() else replica.look_s

    def _watch(self) -> None:
        """Look for snapshots of which other hosts have shards, as long as some are not complete."""
        registers = Registers(self._ring, self.info.key, self._nodes)
        looked_for: set[str] = set()
        pauses = growing(FIRST_LOOK_S, _LAST_LOOK_S, 1.5)
        while True:
            with self._ring.changed:
                while not self._closed and not (names := registers.wanted()):
                    self._ring.changed.wait(ASK_AGAIN_S)
                if self._closed:
                    return
            if names != looked_for:
                looked_for, pauses = names, growing(FIRST_LOOK_S, _LAST_LOOK_S, 1.5)
            try:
                registers.look(names)
            except Exception:  # a bug must not end the thread: nothing would be learned any more
                about = f"looking for shards of run {self.info.text}"
                say(logging.ERROR, "unexpected", UNEXPECTED, about=about, exc_info=True)
            due_s = time.monotonic() + next(pauses)
            with self._ring.changed:
                while not self._closed and names == registers.wanted() and (left_s := due_s - time.monotonic()) > 0:
                    self._ring.changed.wait(left_s)

    # -- decisions, under the ring's lock -------------------------------------------------------------------------

    def _is_taken(self, node: Peer) -> bool:
        return any(node in (replica.node, replica.trying) for replica in self._replicas)

    def _is_to_carry(self, replica: Replica, node: Peer) -> bool:
        """Whether a server is to be asked to carry the run on: one only does, so that the bytes leave it once."""
        if self._carrier is not None or self._asked is not None:
            return self._carrier is node
        before = self._replicas[: self._replicas.index(replica)]
        return all(self._is_out(other) for other in before)

    def _is_out(self, replica: Replica) -> bool:
        """Whether a replica is known not to carry the run on: it refuses, or there is no server that it could be at."""
        if replica.node is not None:
            return bool(replica.node.why_not)
        free = [node for node in self._nodes if not self._is_taken(node) or node is replica.trying]
        now_s = time.monotonic()
        return all(node.away_until_s > now_s for node in free)

    def _ask_others(self, replica: Replica, before: Peer | None) -> None:
        """Have the other servers told at once that another one carries the run on now, or asked whether they do."""
        for other in self._replicas:
            if other is not replica and other.node is not None:
                refuses = bool(other.node.why_not)
                other.doubted |= self._carrier is not before or (self._carrier is None and not refuses)
        self._ring.notify()

    def _apply(self) -> None:
        """Tell the ring where the run's snapshots go now."""
        if self._closed:
            return
        own = [replica.node.url for replica in self._replicas if replica.node is not None][: max(1, self.info.replicas)]
        carried = []
        if self.info.durable_url is not None:
            # While there is a server that may carry it on and was not asked, this one does not begin to write itself.
            if self._carrier is not None or not all(self._is_out(replica) for replica in self._replicas):
                carried.append(self.info.durable_url)
            else:
                own.append(self.info.durable_url)
        if not own and not carried and self._nodes:
            carried.append(self._nodes[0].url)  # nobody takes it now: it is owed to whoever will
        self._ring.set_tiers(self.info.key, Tiers(tuple(own), tuple(carried)))

    # -- what is said ---------------------------------------------------------------------------------------------

    def _say(self, node: Peer) -> None:
        facts: dict[str, Any] = {"about": node.url, "run": self.info.text}
        recovered("server-lost", "{about} works again", about=node.url)
        if node is self._carrier:
            say(logging.INFO, "server-used", "{about} takes the snapshots of run {run} and uploads them", **facts)
        elif not node.why_not:
            say(logging.INFO, "server-used", "{about} takes the snapshots of run {run}, too", **facts)
        elif self.info.durable_url is not None:
            who = "This host does"
            if not all(self._is_out(replica) for replica in self._replicas):
                who = "Another server is asked"
            text = "{about} does not upload run {run} to its storage: {why}. {who}."
            say(logging.WARNING, "server-not-uploading", text, why=node.why_not, who=who, **facts)

    def _say_lost(self, node: Peer) -> None:
        used, wanted = sum(replica.node is not None for replica in self._replicas), len(self._replicas)
        text = "{about} fails ({why}). Run {run} has {used} of {wanted} servers until it works again. Check it."
        facts: dict[str, Any] = {"why": node.why, "run": self.info.text, "used": used, "wanted": wanted}
        say(logging.WARNING, "server-lost", text, about=node.url, **facts)
