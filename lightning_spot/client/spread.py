"""Snapshots whose portions lie at several memory nodes, as one store: read from all of them in parallel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_spot.client.part_lanes import CONNECTIONS
from lightning_spot.client.portions import JointPortions
from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import (
    CorruptSnapshot,
    NodeUnreachable,
    SettingsError,
    SnapshotNotFound,
    SpotError,
    TierError,
)
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.spread import missing, place_of, starts, whole_of
from lightning_spot.memory.joint import SpreadPlace
from lightning_spot.memory.runs import RunInfo
from lightning_spot.tiers.claims import Claim, Owner
from lightning_spot.tiers.store import Holdings, Progress, newest_first

logger = logging.getLogger(__name__)

Held = tuple[NodeStore, Manifest]
"""A portion, and the node that has it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Whole:
    """A snapshot of which all portions are there.

    Attributes:
        holders: of the portion of each host.
        begins: where in the whole each portion begins, see :func:`~lightning_spot.image.spread.starts`.
    """

    holders: list[list[Held]]
    begins: list[int]


class SpreadStore:
    """A run's snapshots that are spread over nodes; implements :class:`~lightning_spot.tiers.store.Store`.

    They come there portion by portion only, see :attr:`joint`.

    Args:
        url: see :class:`~lightning_spot.memory.joint.SpreadPlace`.
    """

    owner: Owner | None = None

    def __init__(self, url: str) -> None:
        place = SpreadPlace.read(url)
        if place is None:
            raise SettingsError(f"{url!r} names no memory nodes over which a snapshot is spread")
        self.url, self.place = url, place
        self.nodes = [NodeStore(each) for each in place.urls]
        self._held: dict[str, _Whole] = {}  # by its name
        self._silent: set[str] = set()  # URLs of nodes that did not answer when something was read from them last

    @functools.cached_property
    def joint(self) -> JointPortions:
        """See :class:`~lightning_spot.memory.tier.HasJoint`."""
        return JointPortions([*self.nodes, *map(NodeStore, self.place.besides)], self.place)

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`: what is whole at the nodes that answer."""
        asked = self._ask_all(lambda node: [(node, portion) for portion in node.survey().portions])
        found = [held for answer in asked if not isinstance(answer, SpotError) for held in answer]
        problems = [answer for answer in asked if isinstance(answer, SpotError)]
        if len(problems) == len(asked):
            raise TierError(f"no memory node answers: {problems[0]}", tier=self.url)
        manifests = self.know(found)
        return Holdings(manifests, {}, max((portion.attempt for _, portion in found), default=0))

    def know(self, found: Iterable[Held]) -> list[Manifest]:
        """Take note of portions; the snapshots of which all are among them, newest first."""
        by_snapshot: dict[tuple[str, str], dict[int, list[Held]]] = {}
        for node, portion in found:
            assert portion.portion is not None
            hosts = by_snapshot.setdefault((portion.snapshot, portion.portion.digest), {})
            hosts.setdefault(portion.portion.host, []).append((node, portion))
        manifests = []
        for (name, _digest), hosts in by_snapshot.items():
            by_host = [hosts[host] for host in sorted(hosts)]
            portions = [held[0][1] for held in by_host]
            if late := missing(portions):
                logger.info("%s is not whole at memory nodes: what host %s has brought is at none", name, late)
                continue
            try:
                manifests.append(whole_of(portions))
            except CorruptSnapshot as error:
                logger.warning("lightning_spot: %s", error)
                continue
            # Of two replicas only those that are the same count.
            holders = [
                [held for held in each if held[1].checksums == portion.checksums]
                for each, portion in zip(by_host, portions, strict=True)
            ]
            self._held[name] = _Whole(holders, starts(portions))
        return newest_first(manifests)

    def hold(self, name: str, info: RunInfo) -> None:
        """See :meth:`JointPortions.hold`; nothing happens if it was not found whole here."""
        if name in self._held:
            self.joint.hold(name, info)

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        return any(each.name == manifest.name and each.checksums == manifest.checksums for each in self._manifests())

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        self._check_known(manifest)

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            self.read(manifest, start, into[start:stop])
            if progress is not None:
                progress(stop - start)

        with ThreadPoolExecutor(CONNECTIONS * len(self.nodes)) as pool:
            list(pool.map(read, self._in_turn(manifest)))

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read one of ``manifest.ranges()``, and check it; from any thread. Errors are those of :meth:`fetch`."""
        self._check_known(manifest)
        for begin in range(0, len(into), manifest.part_bytes):
            self._read_part(manifest, start + begin, into[begin : begin + manifest.part_bytes])

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        for node in self.nodes:
            for portion in node.survey().portions:
                if portion.snapshot == manifest.name:
                    node.delete(portion)

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        return max(node.claimed() for node in self.nodes)

    def newest_claim(self) -> Claim | None:
        """See :meth:`NodeStore.newest_claim`."""
        return max((node.newest_claim() for node in self.nodes), key=lambda claim: claim.attempt if claim else 0)

    def check_owner(self) -> None:
        """Nothing to do: nodes know who has opened a run."""

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        for node in self.nodes:
            node.claim(claim)

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """No process has all of such a snapshot."""
        raise TierError(f"{manifest.name} comes to {self.url} portion by portion only", tier=self.url)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`put`."""
        raise TierError(f"{manifest.name} comes to {self.url} portion by portion only", tier=self.url)

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """Nothing to do: a node frees unfinished uploads by itself."""

    def sweep_files(self) -> None:
        """See :meth:`sweep`."""

    # -- inside ---------------------------------------------------------------------------------------------------

    def _manifests(self) -> list[Manifest]:
        return self.survey().manifests

    def _check_known(self, manifest: Manifest) -> None:
        """Know where its portions are."""
        if manifest.name not in self._held:
            self.survey()
        if manifest.name not in self._held:
            raise SnapshotNotFound(f"{manifest.name} is not whole at {self.url} (any more)")

    def _in_turn(self, manifest: Manifest) -> list[tuple[int, int]]:
        """The ranges of a snapshot, in an order in which all nodes are asked at the same time."""
        begins = self._held[manifest.name].begins
        by_place = {bounds: place_of(bounds[0], begins) for bounds in manifest.ranges()}
        return sorted(by_place, key=lambda bounds: (by_place[bounds][1], by_place[bounds][0]))

    def _read_part(self, manifest: Manifest, start: int, into: memoryview) -> None:
        whole = self._held[manifest.name]
        host, within = place_of(start, whole.begins)
        problem: SpotError | None = None
        holders = whole.holders[host]
        first = within // manifest.part_bytes % len(holders)  # each replica is read as much as the others
        # Each part would else wait again for a node whose link is cut.
        in_turn = sorted((*holders[first:], *holders[:first]), key=lambda held: held[0].url in self._silent)
        for node, portion in in_turn:
            nbytes = min(len(into), portion.nbytes - within)
            try:
                node.read(portion, within, into[:nbytes])
                self._silent.discard(node.url)
                into[nbytes:] = bytes(len(into) - nbytes)
                manifest.verify_range(start, into, node.url)
                return
            except SpotError as error:
                problem = error
                if isinstance(error, NodeUnreachable):
                    self._silent.add(node.url)
        raise problem or SnapshotNotFound(f"{manifest.name} has left {self.url}")

    def _ask_all(self, ask: Callable[[NodeStore], T]) -> list[T | SpotError]:
        def one(node: NodeStore) -> T | SpotError | Any:
            try:
                return ask(node)
            except SnapshotNotFound:
                return []
            except SpotError as error:
                return error

        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(one, self.nodes))
