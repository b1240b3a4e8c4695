"""What a memory node has missed: it was away, or takes another one's place, and is given the newest snapshot.

What this host has as a whole, the flusher sends. Of a snapshot that several hosts have brought, each has its portion
only: it is copied from a node that has all of it, part by part, each checked, through this host, which both nodes know.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightning_spot.errors import CorruptSnapshot, ShareMissing, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import part_ranges
from lightning_spot.memory.next_node import NextNode
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.tier import HasParts, NodeTier
from lightning_spot.threads import in_background

logger = logging.getLogger(__name__)


class Missed:
    """Gives the nodes that a run is kept at what they have missed. Methods may be called from any thread.

    Args:
        ring: of this host: what is in it is not copied from elsewhere.
        info: of the run.
        stops: whether nothing is to be sent now to a URL of the run, since something newer is on its way there.
    """

    def __init__(self, ring: Ring, info: RunInfo, stops: Callable[[str], bool]) -> None:
        self._ring, self._info, self._stops = ring, info, stops
        self._lock = threading.Lock()
        self._looked_at: set[str] = set()

    def look(self, node: NextNode, others: Sequence[NextNode]) -> None:
        """Have a node given the newest snapshot, in the background, if it has missed that one.

        Args:
            node: which one.
            others: the other nodes in use, which may have it.
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
                logger.exception("to give %s what it has missed failed unexpectedly", url)
            finally:
                with self._lock:
                    self._looked_at.discard(url)

        try:
            in_background(look, "spot-missed")
        except RuntimeError as error:  # no more threads can be had: it is looked at again
            logger.info("whether %s has missed anything is not known: %s", url, error)
            with self._lock:
                self._looked_at.discard(url)

    def _try(self, node: NextNode, other: NextNode) -> None:
        try:
            self._copy(node, other)
        except SpotError as error:  # it is looked at again
            logger.info("%s cannot be given what it has missed: %s", node.url, error)

    def _copy(self, node: NextNode, other: NextNode) -> None:
        url, source, target = node.url, other.tier(), node.tier()
        if not (isinstance(source, HasParts) and isinstance(target, HasParts)):
            return
        newest, there = _newest(source), _newest(target)
        if newest is None or self._is_here(newest) or (there is not None and there.order >= newest.order):
            return
        goes_on = functools.partial(self._check, newest, url)
        sealed = target.put_parts(newest, _parts(source, newest, goes_on), attempt=self._info.attempt)
        if sealed.checksums != newest.checksums:
            raise CorruptSnapshot(f"{newest.name} is another one at {url} than at {other.url}", where=url)
        logger.info("%s has %s, too, which it had missed", url, newest.name)

    def _is_here(self, newest: Manifest) -> bool:
        """Whether this host has that snapshot or a newer one, which the flusher sends."""
        with self._ring.changed:
            here = [slot.snapshot for slot in self._ring.committed(self._info.key)]
        return any(manifest is not None and manifest.order >= newest.order for manifest in here)

    def _check(self, manifest: Manifest, url: str) -> None:
        """Raise if a snapshot is not to be copied any further."""
        if self._stops(url):
            raise ShareMissing(f"{manifest.name} is not copied any further: a newer one comes, or the run has ended")


def _newest(node: NodeTier) -> Manifest | None:
    """The newest snapshot that a node has, as a whole and exactly."""
    held = [item.manifest for item in node.listing()]
    snapshots = [each for each in held if each.exact and not each.is_file and each.portion is None]
    return max(snapshots, key=lambda manifest: manifest.order, default=None)


def _parts(source: HasParts, manifest: Manifest, goes_on: Callable[[], None]) -> Iterator[memoryview]:
    """The parts of a snapshot at a node, each read while the one before is sent, and checked."""

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
