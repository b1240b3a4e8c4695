"""What a node has of a run whose snapshots it is sent approximately (``compression="topk"``), kept on this side, too.

The next snapshot is approximated from it: the numbers that it is most behind in are put there, and sent; everything
that is no such number is put there, and sent, as it is. What comes out is a whole checkpoint file with checksums of its
own, which the node makes in the same way, and checks. Now and then a snapshot is sent exactly, and all begins from it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from lightning_spot.client.part_encoder import WORTH, OutgoingPart, Part, PartEncoder
from lightning_spot.config import format_bytes
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import WIDTHS, Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import part_ranges
from lightning_spot.image.sealing import Sealing, sealing_threads
from lightning_spot.memory.bases import Glance
from lightning_spot.protocol.wire import BaseInfo, PartKind
from lightning_spot.staging.slot import available_bytes, slot_capacity

logger = logging.getLogger(__name__)

EXACT_EVERY = 10
"""One in so many snapshots is sent exactly: a full base."""

_WEIGHT = 0.3  # of the newest measurement

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Change:
    """What makes a part of the approximation before into that of the next one.

    Attributes:
        ranges: whose bytes are sent as they are, within the part.
        picks: single numbers outside of them, encoded.
    """

    ranges: list[Range]
    picks: bytes


class Approximation:
    """The approximation that one node has of one run. Used by one thread at a time."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._memory = mmap.mmap(-1, 1)
        self._floats: tuple[Floats, ...] = ()
        self._since_exact = 0
        self._skipped = 0
        self._took_s: dict[bool, float] = {}
        self._has_said = False

    def took(self, manifest: Manifest, seconds: float) -> None:
        """Note how long it took until a snapshot, or its approximation, was there."""
        each_s = seconds / max(1, manifest.nbytes)
        before_s = self._took_s.get(manifest.exact, each_s)
        self._took_s[manifest.exact] = before_s + _WEIGHT * (each_s - before_s)

    def pays(self) -> bool:
        """Whether an approximation was there sooner than an exact snapshot; it is tried again now and then."""
        return len(self._took_s) < 2 or self._took_s[False] < self._took_s[True] or self._skipped >= EXACT_EVERY - 1

    def leads_to(self, manifest: Manifest, floats: Sequence[Floats]) -> bool:
        """Whether the next snapshot may be approximated from it.

        Args:
            manifest: of that.
            floats: where in it numbers lie that may be approximated.
        """
        if not self.pays():
            self._skipped += 1
            return False
        mine = self._manifest
        return (
            mine is not None
            and tuple(floats) == self._floats
            and manifest.nbytes <= len(self._memory)
            and (manifest.lineage, manifest.part_bytes, manifest.files) == (mine.lineage, mine.part_bytes, ())
            and self._since_exact < EXACT_EVERY - 1
        )

    def glance(self, base: BaseInfo | None) -> Glance | None:
        """It, if a node says that this is what it has."""
        mine = self._manifest
        if mine is None or base is None:
            return None
        is_it = (base.name, base.nbytes, base.checksums) == (mine.name, mine.nbytes, mine.checksums)
        return Glance(mine, memoryview(self._memory)[: mine.nbytes], lambda: True) if is_it else None

    def begin(self, manifest: Manifest, image: memoryview, floats: Sequence[Floats]) -> None:
        """Begin with a snapshot that was sent exactly.

        Args:
            manifest: sealed.
            image: its file; it is copied.
            floats: where in it numbers lie that may be approximated in the next ones.
        """
        before, self._manifest = self._manifest, None
        if manifest.files or not self.pays():
            return
        if manifest.nbytes > len(self._memory):
            before = None
            if not self._make_memory(slot_capacity(manifest.nbytes)):
                return
        with memoryview(self._memory) as memory:
            memory[: manifest.nbytes] = image[: manifest.nbytes]
            _clear(memory, manifest, before)
        self._manifest, self._floats, self._since_exact = manifest, tuple(floats), 0

    def advance(self, exact: Manifest, image: memoryview, threads: Executor) -> tuple[Coming, dict[int, Change]]:
        """Approximate the next snapshot.

        Args:
            exact: its sealed manifest, see :meth:`leads_to`.
            image: its file.
            threads: to work on.

        Returns:
            the approximation, which lies here until the next call; what changed in its parts, by their first bytes.
        """
        before, self._manifest = self._manifest, None  # until it is done
        self._skipped = 0
        nbytes, parts = exact.nbytes, list(part_ranges(exact.nbytes, exact.part_bytes))
        memory = memoryview(self._memory)
        changes = dict(threads.map(functools.partial(self._advance, image, memory), parts))
        _clear(memory, exact, before)
        sealing = Sealing(exact.inexact(), memory[:nbytes])
        sealed = sealing.run(sealing_threads())
        sealing.commit(sealed)
        for change in changes.values():
            change.ranges[:] = _merged(change.ranges)
        self._manifest = sealed
        self._since_exact += 1
        return sealing, changes

    def _advance(self, image: memoryview, memory: memoryview, bounds: Range) -> tuple[int, Change]:
        """Approximate a part; numbers of it that may be are picked, everything else is taken as it is."""
        from lightning_spot.image.delta import changed_ranges  # numpy is not needed before
        from lightning_spot.image.picked import pick

        start, stop = bounds
        new, has = image[start:stop], memory[start:stop]
        within = list(_clipped(self._floats, start, stop))
        picks = pick(new, has, within)
        ranges, place = [], 0
        for begin, end in [*((run.start, run.stop) for run in within), (stop - start, stop - start)]:
            if place < begin:
                changed = changed_ranges(new[place:begin], has[place:begin])
                ranges += [(place + first, place + last) for first, last in changed]
            place = end
        for first, last in ranges:
            has[first:last] = new[first:last]
        return start, Change(ranges, picks)

    def _make_memory(self, capacity: int) -> bool:
        self._memory = mmap.mmap(-1, 1)
        available = available_bytes()
        if available is None or capacity <= available:
            try:
                self._memory = mmap.mmap(-1, capacity)
                return True
            except (OSError, OverflowError) as error:
                logger.debug("no memory for an approximation: %s", error)
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "compression='topk' needs %s more memory on this host, which has not as much left: snapshots are sent"
                " exactly",
                format_bytes(capacity),
            )
        return False


class ApproximateEncoder(PartEncoder):
    """Encodes the parts of an approximation by what changed in them. See :class:`PartEncoder`."""

    def __init__(self, coming: Coming, changes: dict[int, Change], base: BaseInfo, threads: Executor) -> None:
        super().__init__(coming.image, coming.manifest.part_bytes, base, None, threads, None)
        self._changes = changes

    def encode(self, part: Part) -> OutgoingPart:
        """A part in the way in which it is sent."""
        from lightning_spot.image.delta import MOST_RANGES, encode_picked

        sent = super().encode(part)
        start, stop, digest = part
        change = self._changes[start]
        as_it_is = len(change.picks) + sum(last - first for first, last in change.ranges)
        if sent.kind is PartKind.SAME or as_it_is > WORTH * (stop - start) or len(change.ranges) > MOST_RANGES:
            return sent
        content = encode_picked(self._image[start:stop], change.ranges, change.picks)
        return OutgoingPart(start, stop - start, digest, PartKind.DELTA, content, as_it_is)


def _clipped(floats: Sequence[Floats], start: int, stop: int) -> Iterator[Floats]:
    """The numbers that lie wholly in a part, by their places in it."""
    for run in itertools.islice(floats, bisect.bisect_right(floats, start, key=_stop_of), None):
        if run.start >= stop:
            break
        width = WIDTHS[run.dtype]
        first = run.start + max(0, -(-(start - run.start) // width)) * width
        count = (min(run.stop, stop) - first) // width
        if count > 0:
            yield Floats(first - start, count * width, run.dtype)


def _stop_of(run: Floats) -> int:
    return run.stop


def _merged(ranges: list[Range]) -> list[Range]:
    """Ranges in order, those that overlap or touch as one."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _clear(memory: memoryview, manifest: Manifest, before: Manifest | None) -> None:
    """Beyond its end a file counts as zeros, see :func:`~lightning_spot.image.delta.part_of`."""
    if before is not None and before.nbytes > manifest.nbytes:
        memory[manifest.nbytes : before.nbytes] = bytes(before.nbytes - manifest.nbytes)
