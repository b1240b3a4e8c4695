"""Where a host's snapshots go: to which servers, and who brings them to storage: one of these, or this host.

A server on a trainer's host sends to the first of the trainer's servers that works, or, with replicas, to the first
few. One of these is asked to carry the run on to its storage: if it says that it does, this host does not write there,
and learns from it what is safe. When it fails or refuses, another is asked; while none does, this host writes there.

What a server has missed, since it was away or takes another one's place, it is given. What this host has as a whole,
the flusher sends. Of a snapshot that several hosts have brought, each has its portion only: it is copied from a server
that has all of it, part by part, each checked, through this host, which both servers know.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    ServerUnreachableError,
    SnapshotFailedError,
    SpotError,
)
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import part_ranges
from lightning_spot.memory.held_portions import fall_back, surpassing
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.slots import Slot, Tiers, newest_of_lineages
from lightning_spot.memory.tier import HasParts, NodeTier
from lightning_spot.retry import pause_after
from lightning_spot.say import UNEXPECTED, recovered, say
from lightning_spot.threads import in_background
from lightning_spot.tiers.store import Store

_LAGS = "{about} could not be given the newest snapshot of several hosts. It is retried: {error}"

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
        carries: whether it carries the run on, as it said last.
        leaves: whether it is shutting down, and takes no portions of snapshots any more.
        asked_s: when it was asked last (monotonic).
    """

    def __init__(self, url: str, info: RunInfo, ring: Ring, open_store: Callable[[str], Store]) -> None:
        self.url = url
        self.failures = 0
        self.away_until_s = 0.0
        self.why = ""
        self.why_not = ""
        self.carries = self.leaves = False
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
        return self.tier().open_run(replace(self._info, nodes=(), replicas=1, session="", carry=carry, left=left))

    def hurry(self) -> None:
        """Have it bring down what it has; nothing happens if it does not answer."""
        try:
            self.tier().flush(_HURRIED_S)
        except SpotError as error:
            logger.debug("%s cannot be asked to bring down what it has: %s", self.url, error)

    def forget_told(self) -> None:
        """It is used anew: it may have forgotten what it was told."""
        self._informed_of.clear()

    def find_lost(self, *, durable_too: bool) -> None:
        """Have the newest snapshots sent again that were safe there, and that it has no more.

        Args:
            durable_too: also those that are durable: it may have let them go since, or have come back empty.
        """
        with self._ring.changed:
            held = [
                (slot, slot.manifest)
                for slot in newest_of_lineages(self._ring.committed(self._info.key))
                if slot.manifest is not None
                and self.url in slot.safe
                and (durable_too or not (slot.settled or self._info.durable_url in slot.safe))
            ]
        if not held:
            return
        listed = {(item.manifest.name, item.manifest.checksums) for item in self.tier().listing()}
        for slot, manifest in held:
            if (manifest.name, manifest.checksums) not in listed:
                self._ring.mark_lost(slot, manifest, self.url)

    def find_surpassing(self) -> None:
        """Have older snapshots count again if the newer one is lost that several hosts had brought here."""
        newer = surpassing(self._ring, self._info.key)
        if newer is None or any(_same(newer, item.manifest) for item in self.tier().listing()):
            return
        if self._is_durable(newer) is False:
            text = "{about} has lost {snapshot}, a snapshot of several hosts. Older snapshots are kept again."
            say(logging.WARNING, "snapshot-lost", text, about=self.url, snapshot=newer.name)
            fall_back(self._ring, self._info.key)

    def waiting(self) -> Waiting:
        """Snapshots that the server has, and of which it is not known yet that they are durable."""
        with self._ring.changed:
            return [
                (slot, slot.manifest)
                for slot in self._ring.committed(self._info.key)
                if slot.manifest is not None
                and slot.places is None
                and self.url in slot.safe
                and self._info.durable_url in slot.dirty
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
            ]
            known = [
                (slot.manifest, (slot.manifest.name, self.url in slot.safe))
                for slot in newest_of_lineages(slots)
                if slot.manifest is not None
            ]
        for manifest, fact in known:
            if fact in self._informed_of:
                continue
            try:
                self.tier().settle(manifest, self._info.attempt)
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
                self._ring.mark_safe(slot, manifest, durable_url)
            elif safe is None:
                self._ask_durable(slot, manifest, durable_url)

    def _ask_durable(self, slot: Slot, manifest: Manifest, durable_url: str) -> None:
        """A snapshot left the server's memory: because it is durable, or because the server lost it."""
        durable = self._is_durable(manifest)
        if durable:
            self._ring.mark_safe(slot, manifest, durable_url)
        elif durable is not None:
            self._ring.mark_lost(slot, manifest, self.url)

    def _is_durable(self, manifest: Manifest) -> bool | None:
        """Whether the storage has a snapshot; ``None`` if it does not answer: it is asked again."""
        if self._info.durable_url is None:
            return False
        try:
            return self._open_store(self._info.durable_url).has(manifest)
        except SpotError as error:
            logger.debug("%s does not answer (%s)", self._info.durable_url, error)
            return None


def _same(one: Manifest, other: Manifest) -> bool:
    return (one.name, one.checksums) == (other.name, other.checksums)


@dataclass(eq=False, slots=True)
class Replica:
    """One of the servers that a run is to be kept at.

    Attributes:
        node: which one it is now; ``None`` while none works.
        trying: the one that is being asked whether it works; no other replica asks it meanwhile.
        doubted: whether something is to be asked of it at once.
        is_behind: whether it is to be let go, see :class:`LeftBehind`.
        look_s: until it is asked next what is durable.
    """

    node: Peer | None = None
    trying: Peer | None = None
    doubted: bool = False
    is_behind: bool = False
    look_s: float = FIRST_LOOK_S


class Missed:
    """Gives the servers that a run is kept at what they have missed. Methods may be called from any thread.

    Args:
        ring: of this host: what is in it is not copied from elsewhere.
        info: of the run.
        stops: whether nothing is to be sent now to a URL of the run, since something newer is on its way there.
    """

    def __init__(self, ring: Ring, info: RunInfo, stops: Callable[[str], bool]) -> None:
        self._ring, self._info, self._stops = ring, info, stops
        self._lock = threading.Lock()
        self._looked_at: set[str] = set()

    def look(self, node: Peer, others: Sequence[Peer]) -> None:
        """Have a server given the newest snapshot, in the background, if it has missed that one.

        Args:
            node: which one.
            others: the other servers in use, which may have it.
        """
        url = node.url
        with self._lock:
            if not others or url in self._looked_at or self._stops(url):
                return
            self._looked_at.add(url)

        def look() -> None:
            try:
                for other in others:
                    self._try(node, other)
            except Exception:
                say(logging.ERROR, "unexpected", UNEXPECTED, about=f"catching up {url}", exc_info=True)
            finally:
                with self._lock:
                    self._looked_at.discard(url)

        try:
            in_background(look, "spot-missed")
        except RuntimeError as error:  # no more threads can be had: it is looked at again
            say(logging.INFO, "server-lags", _LAGS, about=url, error=error)
            with self._lock:
                self._looked_at.discard(url)

    def _try(self, node: Peer, other: Peer) -> None:
        try:
            self._copy(node, other)
        except SpotError as error:  # it is looked at again
            say(logging.INFO, "server-lags", _LAGS, about=node.url, error=error)

    def _copy(self, node: Peer, other: Peer) -> None:
        url, source, target = node.url, other.tier(), node.tier()
        if not (isinstance(source, HasParts) and isinstance(target, HasParts)):
            return
        newest, there = _newest(source), _newest(target)
        if newest is None or self._is_here(newest) or (there is not None and there.order >= newest.order):
            return
        goes_on = functools.partial(self._check, newest, url)
        sealed = target.put_parts(newest, _parts(source, newest, goes_on), attempt=self._info.attempt)
        if sealed.checksums != newest.checksums:
            raise CorruptSnapshotError(f"{newest.name} is another one at {url} than at {other.url}", where=url)
        say(logging.INFO, "server-caught-up", "{about} has caught up to {snapshot}", about=url, snapshot=newest.name)

    def _is_here(self, newest: Manifest) -> bool:
        """Whether this host has that snapshot or a newer one, which the flusher sends."""
        with self._ring.changed:
            here = [slot.snapshot for slot in self._ring.committed(self._info.key)]
        return any(manifest is not None and manifest.order >= newest.order for manifest in here)

    def _check(self, manifest: Manifest, url: str) -> None:
        """Raise if a snapshot is not to be copied any further."""
        if self._stops(url):
            raise SnapshotFailedError(
                f"{manifest.name} is not copied any further: a newer one comes, or the run has ended",
                reason=FailureReason.SHARE_MISSING,
            )


def _newest(node: NodeTier) -> Manifest | None:
    """The newest snapshot that a server has, as a whole and exactly."""
    held = [item.manifest for item in node.listing()]
    snapshots = [each for each in held if each.exact and not each.is_file and each.portion is None]
    return max(snapshots, key=lambda manifest: manifest.order, default=None)


def _parts(source: HasParts, manifest: Manifest, goes_on: Callable[[], None]) -> Iterator[memoryview]:
    """The parts of a snapshot at a server, each read while the one before is sent, and checked."""

    def read(bounds: tuple[int, int]) -> memoryview:
        start, stop = bounds
        part = memoryview(bytearray(stop - start))
        source.read(manifest, start, part)
        return part

    bounds = part_ranges(manifest.nbytes, manifest.part_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="spot-missed") as reading:
        reads = (reading.submit(read, each) for each in bounds)
        following = next(reads, None)
        while following is not None:
            part, following = following.result(), next(reads, None)
            goes_on()
            yield part


class LeftBehind(ServerUnreachableError):
    """Another server has a snapshot that several hosts have brought, and this one, which uploads the run, has not."""


class Replication:
    """The servers that one run is kept at; a thread for each replica keeps them up to date until :meth:`close`.

    Args:
        ring: holds the run's snapshots; is told where they go.
        open_store: makes the stores of servers and of storage.
        info: of the run; its ``nodes`` may be used, in order of preference, and ``replicas`` of them are.
        is_urgent: tells whether somebody waits for the run to be safe.
        is_busy: tells whether a snapshot that several hosts bring is on its way to a URL of the run.
        is_left: tells whether the trainer on this host is gone.
    """

    def __init__(
        self,
        ring: Ring,
        open_store: Callable[[str], Store],
        info: RunInfo,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
        is_busy: Callable[[str], bool] = lambda _url: False,
        is_left: Callable[[], bool] = lambda: False,
    ) -> None:
        self.info = info
        self.why_not = "no server has answered yet"
        self._ring = ring
        self._is_urgent, self._is_left = is_urgent, is_left
        self._nodes = [Peer(f"{node.rstrip('/')}/{info.text}", info, ring, open_store) for node in info.nodes]
        count = len(self._nodes) if info.spread else min(max(1, info.replicas), len(self._nodes))
        self._replicas = [Replica() for _ in range(count)]
        self._carrier: Peer | None = None
        self._asked: Peer | None = None  # to carry the run on; it has not answered yet
        self._closed = False
        self._missed = Missed(ring, info, lambda url: self._closed or is_busy(url))
        self._threads = [
            threading.Thread(target=self._work, args=(replica,), name=f"spot-replication-{info.text}", daemon=True)
            for replica in self._replicas
        ]

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

        Of snapshots that are spread over servers, all that carry on what they hold.

        A server that has just failed, and was not asked since, is none of them.
        """
        with self._ring.changed:
            sound = [each.node for each in self._replicas if not (each.doubted and each.node and each.node.failures)]
            if self.info.spread:
                return [node.url for node in sound if node is not None and node.carries]
            if self._carrier is None or self._carrier not in sound:
                return []
            return [self._carrier.url, *(node.url for node in sound if node and node is not self._carrier)]

    @property
    def besides(self) -> list[str]:
        """Of snapshots that are spread over nodes: URLs of the run at those that answer, and take none (any more)."""
        with self._ring.changed:
            answer = [each.node for each in self._replicas if each.node is not None and self.info.spread]
            return [node.url for node in answer if not node.carries]

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
                if node is self._carrier or (self.info.spread and node.carries and node in used)
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
                    replica.is_behind |= isinstance(error, LeftBehind) and replica.node is self._carrier
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
            if anew or not opened.carries:
                node.find_lost(durable_too=anew)
            if carry:
                node.find_surpassing()  # another replica may be behind
        except SpotError as error:
            self._lost(replica, node, error)
            return False
        finally:
            with self._ring.changed:
                self._asked = None if self._asked is node else self._asked
        with self._ring.changed:
            before, refused = self._carrier, bool(node.why_not)
            node.leaves = opened.leaves
            node.why_not = (opened.why_not or "it does not say why") if carry and not opened.carries else ""
            node.carries = carry and opened.carries
            if anew:
                node.forget_told()
            replica.node, replica.doubted = node, replica.is_behind
            if carry:
                self._carrier = node if opened.carries else None
                self.why_not = node.why_not
            if self.info.spread:
                self._carrier = self._any_carrier()
            self._apply()
            if anew or self._carrier is not before or (node.why_not and not refused):
                self._say(node)
            self._ask_others(replica, before)
            used = [each.node for each in self._replicas if each.node is not None and each.node is not node]
        if not self.info.spread:
            self._missed.look(node, used)  # also the carrier: it may have been away for a moment only
        return True

    def _lost(self, replica: Replica, node: Peer, error: Exception) -> None:
        with self._ring.changed:
            was_used, before = replica.node is node, self._carrier
            node.failures += 1
            now_s = time.monotonic()
            node.away_until_s = now_s + pause_after(node.failures, FIRST_AWAY_S, LAST_AWAY_S)
            said, node.why, node.why_not = bool(node.why) and not was_used, str(error), ""
            if was_used:
                replica.node, replica.doubted, replica.is_behind = None, False, False
            is_last = not any(other.node is not None for other in self._replicas)
            if was_used and is_last:  # else another one has what this one had, or it shows when that is asked to carry
                fall_back(self._ring, self.info.key)
            if before is node or is_last:
                self._carrier, self.why_not = self._any_carrier(), f"{node.url}: {error}"
            self._apply()
            if not said:
                self._say_lost(node)
            self._ask_others(replica, before)

    def _follow(self, replica: Replica, node: Peer) -> float:
        """Learn from the server what is safe, or tell it; how long to wait before the next look."""
        if replica.doubted:
            if node.failures >= _MOST_FAILURES or replica.is_behind:
                self._lost(replica, node, ServerUnreachableError(node.why, tier=node.url))
                return 0.0
            # One failed put may be a broken connection: the server is lost only if it does not answer either.
            return FIRST_LOOK_S if self._open(replica, node) else 0.0
        # Also where nothing is owed: a server that was stopped breaks no connection, and one that is lost has lost what
        # counted as safe there.
        if time.monotonic() - node.asked_s >= ASK_AGAIN_S:
            left = node.leaves
            if not self._open(replica, node):
                return 0.0
            if left and node.leaves:
                self._hurry()
        if node is not self._carrier:
            node.tell()
        waiting = node.waiting() if node is self._carrier else []
        if not waiting:
            return max(0.0, node.asked_s + ASK_AGAIN_S - time.monotonic())
        try:
            node.learn(waiting, urgent=self._is_urgent())
        except SpotError as error:
            self.heard(node.url, error)
            return 0.0
        replica.look_s = min(_LAST_LOOK_S, replica.look_s * 1.5)
        return 0.0 if self._is_urgent() else replica.look_s

    def _hurry(self) -> None:
        """One leaves, and waits for the newest snapshot, if no other was taken since: all bring it down."""
        with self._ring.changed:
            nodes = [replica.node for replica in self._replicas if replica.node is not None]
        with ThreadPoolExecutor(len(nodes) or 1) as pool:
            list(pool.map(Peer.hurry, nodes))

    # -- decisions, under the ring's lock -------------------------------------------------------------------------

    def _any_carrier(self) -> Peer | None:
        """Where all servers carry the run on: one that does."""
        used = [replica.node for replica in self._replicas if self.info.spread]
        return next((node for node in used if node is not None and node.carries), None)

    def _is_taken(self, node: Peer) -> bool:
        return any(node in (replica.node, replica.trying) for replica in self._replicas)

    def _is_to_carry(self, replica: Replica, node: Peer) -> bool:
        """Whether a server is to be asked to carry the run on: one only does, so that the bytes leave it once.

        Of snapshots that are spread over servers, each carries what it holds.
        """
        if self.info.spread:
            return True
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
        if self.info.spread and node.why_not:
            text = "{about} takes no part of run {run}: {why}. The other servers take more."
            say(logging.WARNING, "server-not-used", text, why=node.why_not, **facts)
        elif self.info.spread:
            say(logging.INFO, "server-used", "{about} takes a part of each snapshot of run {run}", **facts)
        elif node is self._carrier:
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
