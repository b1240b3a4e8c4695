"""A node that may come next in the chain of a run: what it is told, and what is learned from it. No decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.portions import fall_back, surpassing
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.slots import Slot, newest_of_lineages
from lightning_spot.memory.tier import NodeTier
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_HURRIED_S = 0.5

Waiting = list[tuple[Slot, Manifest]]


class NextNode:
    """A node that may come next. Its numbers change under the ring's lock only.

    Args:
        url: of the run at the node.
        info: of the run.
        ring: holds the run's snapshots.
        open_store: makes the stores of nodes and of the durable tier.

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
        """The node as a tier; it knows what it was told of the run.

        Raises:
            NodeUnreachable: if it is no node.
        """
        if self._store is None:
            store = self._open_store(self.url)
            if not isinstance(store, NodeTier):
                raise NodeUnreachable(f"{self.url} is no node", tier=self.url)
            self._store = store
        return self._store

    def open(self, *, carry: bool, left: bool = False) -> Opened:
        """Open the run there, or ask once more how things are.

        Args:
            carry: whether it is to bring the run on to the durable tier.
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
        """It comes next anew: it may have forgotten what it was told."""
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
            logger.warning("%s has lost %s, which several hosts had brought there", self.url, newer.name)
            fall_back(self._ring, self._info.key)

    def waiting(self) -> Waiting:
        """Snapshots that the node has, and of which it is not known yet that they are durable."""
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
        """Say what is durable, to a node that does not bring it there: what it holds would stay there for ever."""
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
        """A snapshot left the node's memory: because it is durable, or because the node lost it."""
        durable = self._is_durable(manifest)
        if durable:
            self._ring.mark_safe(slot, manifest, durable_url)
        elif durable is not None:
            self._ring.mark_lost(slot, manifest, self.url)

    def _is_durable(self, manifest: Manifest) -> bool | None:
        """Whether the durable tier has a snapshot; ``None`` if it does not answer: it is asked again."""
        if self._info.durable_url is None:
            return False
        try:
            return self._open_store(self._info.durable_url).has(manifest)
        except SpotError as error:
            logger.debug("%s does not answer (%s)", self._info.durable_url, error)
            return None


def _same(one: Manifest, other: Manifest) -> bool:
    return (one.name, one.checksums) == (other.name, other.checksums)
