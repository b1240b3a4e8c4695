"""The snapshots of a writer that several hosts bring to one place: one at a time; which node has the newest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures

from lightning_spot.capture.copying import Pending
from lightning_spot.capture.host_link import HostLink
from lightning_spot.capture.saying import SAY_S
from lightning_spot.capture.slot_pool import give_back
from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import FailureReason, SnapshotFailedError, SpotError
from lightning_spot.memory.host import Host
from lightning_spot.memory.joint import SpreadPlace, is_durable, nodes_of

logger = logging.getLogger(__name__)


class Across:
    """What a writer knows of them. It is asked on the training thread, and told on the writer's own.

    Args:
        link: to the ring of this host.
        waits: told that training waits for long, and for how long it may yet.

    Attributes:
        wanted: whether there are other hosts, and a snapshot server is to carry the run on.
        carrier: where hosts may bring the next snapshot, as known when the last one was committed; see
            :meth:`~lightning_spot.memory.host.Host.carrier`.
        brought: snapshots that hosts have brought together.
        at: URLs of the run at the snapshot servers to which the newest snapshot was brought, separated by spaces; one
            of them has it, or, of a :class:`~lightning_spot.memory.joint.SpreadPlace`, all together, and may have lost
            it since. ``""`` if this host has it, or the durable tier.
        spread: where snapshots are spread over snapshot servers: at how many each portion is to be kept; else 0.
        hosts: the ranks of each host, if they bring a state in shards; that of rank 0 first.
        own_nbytes: what this host brings of such a snapshot, on rank 0; 0 before the first one.
    """

    def __init__(self, link: HostLink, waits: Callable[[SnapshotFailedError, float], None]) -> None:
        self.wanted = False
        self.carrier = ""
        self.brought = 0
        self.at = ""
        self.hosts: tuple[tuple[int, ...], ...] = ()
        self.own_nbytes = 0
        self.spread = 0
        self._link, self._waits = link, waits
        self._last: Pending | None = None
        self._gave_way: Pending | None = None

    @property
    def part(self) -> float:
        """Which part of a state in shards this host has, about, on rank 0."""
        return len(self.hosts[0]) / sum(map(len, self.hosts)) if self.hosts else 1.0

    @property
    def is_by_itself(self) -> bool:
        """Whether each host brings what it has of a state in shards to the durable tier by itself."""
        return bool(self.hosts) and not self.wanted

    @property
    def is_under_way(self) -> bool:
        """Whether one is not committed yet."""
        return self._last is not None and not self._last.done.done()

    def has_given_way(self, pending: Pending) -> bool:
        """Whether a snapshot was given up for one that does not wait for other hosts: then nothing is wrong."""
        return self._gave_way is pending

    def begun(self, pending: Pending) -> None:
        """A snapshot is under way."""
        if _at(pending):
            self._last = pending

    def make_way(self, host: Host, at: str, wait_s: float) -> None:
        """Have no other one under way. What this host writes by itself does not wait for other hosts.

        Args:
            host: the ring.
            at: where hosts are to bring the next snapshot, ``""`` if this host writes it.
            wait_s: how long to wait for the one before.

        Raises:
            SnapshotFailedError: if that is not committed by then.
        """
        before, self._last = self._last, None
        if before is None or before.done.done():
            return
        if not at:
            self._gave_way = before
            give_back(host, before.lease)
            return
        full = SnapshotFailedError(
            f"{before.manifest.name} is still on its way to {_at(before)}", reason=FailureReason.RING_FULL
        )
        try:
            futures.wait([before.done], min(wait_s, SAY_S))
            if wait_s > SAY_S and not before.done.done():
                self._waits(full, wait_s - SAY_S)
            before.done.result(timeout=max(0.0, wait_s - SAY_S))
        except TimeoutError:
            self._last = before
            raise full from None
        except SpotError as error:
            logger.debug("%s: %s", before.manifest.name, error)

    def committed(self, pending: Pending) -> bool:
        """Note that a snapshot is committed; whether several hosts have brought it."""
        at = _at(pending)
        self.at = "" if is_durable(at) else at
        self.brought += bool(at)
        if self.wanted:
            self.look()
        return bool(at)

    def look(self) -> str:
        """Ask where hosts may bring the next snapshot."""
        self.carrier = self._link.ask(lambda host: host.carrier(self.spread), "")
        return self.carrier

    def close(self) -> None:
        """Let the slots of snapshots go: none comes after them."""
        self._last = self._gave_way = None

    def why_lost(self, name: str, wait_s: float) -> str:
        """Why none of the snapshot servers at :attr:`at` is known to have a snapshot any more; ``""`` if one has it.

        Args:
            name: of the snapshot.
            wait_s: how long to wait for their answers.
        """
        urls, reasons = nodes_of(self.at), []
        if SpreadPlace.read(self.at) is not None:
            return self._why_not_whole(name, urls, wait_s)
        for url in urls:
            try:
                if NodeStore(url).holds(name, wait_s / len(urls)):
                    return ""
                reasons.append("has it no more")
            except SpotError as error:
                reasons.append(f"cannot be asked ({error})")
        return "; the other one ".join(reasons)

    def _why_not_whole(self, name: str, urls: list[str], wait_s: float) -> str:
        """The same where it is spread over the nodes."""
        missing: set[int] | None = None
        reasons = []
        for url in urls:
            try:
                portions = NodeStore(url).look(name, wait_s / len(urls))["portions"]
            except SpotError as error:
                reasons.append(f"{url} cannot be asked ({error})")
                continue
            for item in (item for item in portions if item["name"] == name):
                missing = (set(range(item["hosts"])) if missing is None else missing) - {item["host"]}
        if missing == set():
            return ""
        listed = "any host" if missing is None else f"host {', '.join(map(str, sorted(missing)))}"
        return "; ".join([f"have no portion of {listed} (any more)", *reasons])


def _at(pending: Pending) -> str:
    shared = pending.lease.shared
    return shared.at if shared is not None else ""
