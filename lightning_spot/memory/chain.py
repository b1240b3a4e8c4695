"""The chain: which nodes a run's snapshots go to next, and who brings them to the durable tier: one of them, or this.

A node with others behind it sends to the first of them that works, or, with replicas, to the first few. One of these is
asked to carry the run on to its durable tier: if it says that it does, this node does not write there, and learns from
it what is safe. When it fails or refuses, another one is asked, and while none does this node writes there itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.memory.missed import Missed
from lightning_spot.memory.next_node import NextNode
from lightning_spot.memory.portions import fall_back
from lightning_spot.memory.replica import FIRST_LOOK_S, Replica
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.slots import Tiers
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

FIRST_AWAY_S = 1.0
LAST_AWAY_S = 30.0
ASK_AGAIN_S = 10.0
"""How often a node is asked how things are: one that does not carry the run on, and one that takes long about it."""

_LAST_LOOK_S = 2.0
_MOST_FAILURES = 3


class LeftBehind(NodeUnreachable):
    """Another node has a snapshot that several hosts have brought, and this one, which carries the run on, has not."""


class Chain:
    """What follows this node for one run; a thread for each replica keeps it up to date until :meth:`close`.

    Args:
        ring: holds the run's snapshots; is told where they go.
        open_store: makes the stores of nodes and of the durable tier.
        info: of the run; its ``nodes`` may come next, in order of preference, and ``replicas`` of them do.
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
        self.why_not = "no node has answered yet"
        self._ring = ring
        self._is_urgent, self._is_left = is_urgent, is_left
        self._nodes = [NextNode(f"{node.rstrip('/')}/{info.text}", info, ring, open_store) for node in info.nodes]
        count = len(self._nodes) if info.spread else min(max(1, info.replicas), len(self._nodes))
        self._replicas = [Replica() for _ in range(count)]
        self._carrier: NextNode | None = None
        self._asked: NextNode | None = None  # to carry the run on; it has not answered yet
        self._closed = False
        self._missed = Missed(ring, info, lambda url: self._closed or is_busy(url))
        self._threads = [
            threading.Thread(target=self._work, args=(replica,), name=f"spot-chain-{info.text}", daemon=True)
            for replica in self._replicas
        ]

    def start(self) -> None:
        """Begin to look for nodes, in the place of another chain of the run, if there is one.

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
        """Whether a node carries the run on to its durable tier."""
        return self._carrier is not None

    @property
    def active(self) -> str:
        """URL of the run at the node that comes next, of several the one that carries it on; ``""`` while none does."""
        nodes = [replica.node.url for replica in self._replicas if replica.node is not None]
        return self._carrier.url if self._carrier is not None else next(iter(nodes), "")

    @property
    def used(self) -> list[str]:
        """URLs of the run at the nodes that it is kept at, the carrier's first; none while none carries it on.

        Of snapshots that are spread over nodes, all that carry on what they hold.

        A node that has just failed, and was not asked since, is none of them.
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
        """URLs of the run at nodes that do not work, and what was wrong."""
        with self._ring.changed:
            used = [replica.node for replica in self._replicas]
            return {node.url: node.why for node in self._nodes if node.failures and node not in used}

    def status(self) -> dict[str, str]:
        """What each node does for the run, for people."""
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
        """Have the nodes asked whether they are there: somebody waits for the run to be safe."""
        with self._ring.changed:
            for replica in self._replicas:
                if replica.node is not None and time.monotonic() - replica.node.asked_s >= _LAST_LOOK_S:
                    replica.doubted = True
            self._ring.notify()

    def close(self) -> None:
        """Stop looking after the chain. Its threads end once the requests under way have."""
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
                logger.exception("the chain of run %s failed unexpectedly", self.info.text)
                wait_s = _LAST_LOOK_S
            with self._ring.changed:
                if not self._closed and not replica.doubted and wait_s > 0:
                    self._ring.changed.wait(wait_s)
        if replica.node is not None and replica.node is not self._carrier:
            replica.node.tell()

    def _find(self, replica: Replica) -> float:
        """Open the run at the first node that works and is no other replica; how long to wait if none does."""
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

    def _open(self, replica: Replica, node: NextNode) -> bool:
        """Open the run at a node, or ask once more how things are; whether it works."""
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

    def _lost(self, replica: Replica, node: NextNode, error: Exception) -> None:
        with self._ring.changed:
            was_used, before = replica.node is node, self._carrier
            node.failures += 1
            now_s = time.monotonic()
            node.away_until_s = now_s + min(LAST_AWAY_S, FIRST_AWAY_S * 2 ** min(node.failures - 1, 10))
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

    def _follow(self, replica: Replica, node: NextNode) -> float:
        """Learn from the node what is safe, or tell it; how long to wait before the next look."""
        if replica.doubted:
            if node.failures >= _MOST_FAILURES or replica.is_behind:
                self._lost(replica, node, NodeUnreachable(node.why, tier=node.url))
                return 0.0
            # One failed put may be a broken connection: the node is lost only if it does not answer either.
            return FIRST_LOOK_S if self._open(replica, node) else 0.0
        # Also where nothing is owed: a node that was stopped breaks no connection, and one that is lost has lost what
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
            list(pool.map(NextNode.hurry, nodes))

    # -- decisions, under the ring's lock -------------------------------------------------------------------------

    def _any_carrier(self) -> NextNode | None:
        """Where all nodes carry the run on: one that does."""
        used = [replica.node for replica in self._replicas if self.info.spread]
        return next((node for node in used if node is not None and node.carries), None)

    def _is_taken(self, node: NextNode) -> bool:
        return any(node in (replica.node, replica.trying) for replica in self._replicas)

    def _is_to_carry(self, replica: Replica, node: NextNode) -> bool:
        """Whether a node is to be asked to carry the run on: one only does, so that the bytes leave it once.

        Of snapshots that are spread over nodes, each carries what it holds.
        """
        if self.info.spread:
            return True
        if self._carrier is not None or self._asked is not None:
            return self._carrier is node
        before = self._replicas[: self._replicas.index(replica)]
        return all(self._is_out(other) for other in before)

    def _is_out(self, replica: Replica) -> bool:
        """Whether a replica is known not to carry the run on: it refuses, or there is no node that it could be at."""
        if replica.node is not None:
            return bool(replica.node.why_not)
        free = [node for node in self._nodes if not self._is_taken(node) or node is replica.trying]
        now_s = time.monotonic()
        return all(node.away_until_s > now_s for node in free)

    def _ask_others(self, replica: Replica, before: NextNode | None) -> None:
        """Have the other nodes told at once that another one carries the run on now, or asked whether they do."""
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
            # While there is a node that may carry it on and was not asked, this one does not begin to write itself.
            if self._carrier is not None or not all(self._is_out(replica) for replica in self._replicas):
                carried.append(self.info.durable_url)
            else:
                own.append(self.info.durable_url)
        self._ring.set_tiers(self.info.key, Tiers(tuple(own), tuple(carried)))

    # -- what is said ---------------------------------------------------------------------------------------------

    def _say(self, node: NextNode) -> None:
        if self.info.spread and node.why_not:
            logger.warning("run %s is not spread over %s: %s", self.info.text, node.url, node.why_not)
        elif self.info.spread:
            logger.info("run %s is spread, among others over %s", self.info.text, node.url)
        elif node is self._carrier:
            logger.info("run %s goes to %s, which carries it on", self.info.text, node.url)
        elif not node.why_not:
            logger.info("run %s goes to %s besides", self.info.text, node.url)
        elif self.info.durable_url is not None:
            who = "this host writes there itself"
            if not all(self._is_out(replica) for replica in self._replicas):
                who = "another node is asked"
            logger.warning(
                "run %s goes to %s, which does not carry it on to its durable tier (%s): %s",
                self.info.text,
                node.url,
                node.why_not,
                who,
            )

    def _say_lost(self, node: NextNode) -> None:
        used, wanted = sum(replica.node is not None for replica in self._replicas), len(self._replicas)
        how = "spread over" if self.info.spread else "kept at"
        left = f". The run is {how} {used} of {wanted} nodes until one works again" if wanted > 1 else ""
        logger.warning("run %s: the node at %s does not work (%s)%s", self.info.text, node.url, node.why, left)
