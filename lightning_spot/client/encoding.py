"""How each part of a snapshot goes to a server: not at all, as what changed of it, whole, or as an approximation.

With ``compression="auto"`` what changed is compressed where the snapshot before took long on its connections.

With ``lossy="topk"`` what a server has of a run is kept here, too. The next snapshot is approximated from that:
the numbers that it is most behind in are put there, and sent; everything that is no such number is put there, and sent,
as it is. What comes out is a whole checkpoint file with checksums of its own, which the server makes in the same way
and checks. Now and then a snapshot is sent exactly, and all begins from it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from lightning_spot.config import format_bytes
from lightning_spot.protocol.slot import available_bytes, slot_capacity
from lightning_spot.protocol.wire import PartKind
from lightning_spot.say import say
from lightning_spot.server.ring import Glance
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.packing import can_pack
from lightning_spot.snapshot.parts import part_ranges
from lightning_spot.snapshot.ranges import WIDTHS, Floats
from lightning_spot.snapshot.shards import Image

logger = logging.getLogger(__name__)

LEAST_PACKED_BYTES = 256 * 1024
"""Less than this is never packed: it takes no time either way."""

SLOW_BYTES_PER_S = 20e6
"""What changed is packed where a connection is slower than this: that takes far less time, of the smallest machine."""

_PACKERS = 4
_NICENESS = 10

Part = tuple[int, int, str]  # first byte, end, checksum

WORTH = 7 / 8
"""Share of a part above which naming what changed of it saves too little."""

EXACT_EVERY = 10
"""One in so many snapshots is sent exactly: a full base."""

Range = tuple[int, int]


def packers() -> Executor:
    """Threads to pack on, which stand back behind training: what processors it leaves decides how fast they are."""
    return ThreadPoolExecutor(_PACKERS, thread_name_prefix="spot-pack", initializer=_stand_back)


def _stand_back() -> None:
    thread = threading.get_native_id()  # on Linux each thread has a priority of its own
    os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


@dataclass(frozen=True, slots=True)
class OutgoingPart:
    """A part as it is sent.

    Attributes:
        start: first byte in the file.
        nbytes: its length.
        digest: its xxh3-128.
        kind: what ``content`` is.
        content: what is sent.
    """

    start: int
    nbytes: int
    digest: str
    kind: PartKind
    content: memoryview | bytes

    @classmethod
    def whole(cls, start: int, part: memoryview, digest: str) -> OutgoingPart:
        """A part that is sent whole."""
        return cls(start, len(part), digest, PartKind.WHOLE, part)


class PartEncoder:
    """Encodes the parts of one snapshot. May be used from any thread.

    Args:
        image: the whole file, or the ranges of it that are sent.
        part_bytes: size of its parts.
        base: the snapshot that the receiver holds, as it said; ``None`` for none.
        earlier: the same snapshot here, if it still is.
        packers: threads to pack on.
        packs: whether what changed is packed, if that can be done here.
    """

    def __init__(
        self,
        image: Image,
        part_bytes: int,
        base: Manifest | None,
        earlier: Glance | None,
        packers: Executor,
        *,
        packs: bool = False,
    ) -> None:
        self._image = image
        self._base = base if base is not None and base.part_bytes == part_bytes else None
        self._earlier = earlier if self._base is not None and _is(earlier, self._base) else None
        self._packs = packs and can_pack()
        self._packers = packers

    def whole(self, part: Part) -> OutgoingPart:
        """A part to be sent whole, because anything else went wrong."""
        start, stop, digest = part
        return OutgoingPart.whole(start, self._image[start:stop], digest)

    def encode(self, part: Part) -> OutgoingPart:
        """A part in the way in which it is sent."""
        start, stop, digest = part
        if self._base is not None and _has(self._base, part):
            return OutgoingPart(start, stop - start, digest, PartKind.SAME, b"")
        earlier = self._earlier
        delta = self._delta(part, earlier) if earlier is not None and start < earlier.manifest.nbytes else None
        if delta is None or earlier is None or not earlier.is_there():
            return self.whole(part)
        return delta

    def _delta(self, part: Part, earlier: Glance) -> OutgoingPart | None:
        """What changed of a part; ``None`` if that is nearly all of it and not worth packing."""
        from lightning_spot.snapshot.delta import Coding, changed_ranges, encode, part_of  # numpy: not needed before

        start, stop, digest = part
        new, base = self._image[start:stop], part_of(earlier.image, start, stop)
        ranges = changed_ranges(new, base)
        changed = sum(end - begin for begin, end in ranges)
        if self._packs and changed >= LEAST_PACKED_BYTES:
            packed = self._packers.submit(encode, new, base, ranges, Coding.PACKED).result()
            if len(packed) < min(changed, len(new) * WORTH):
                return OutgoingPart(start, len(new), digest, PartKind.DELTA, packed)
        if changed > len(new) * WORTH:
            return None
        return OutgoingPart(start, len(new), digest, PartKind.DELTA, encode(new, base, ranges, Coding.PLAIN))


def _has(base: Manifest, part: Part) -> bool:
    """Whether a snapshot of parts of the same size has the same part."""
    start, stop, digest = part
    index = start // base.part_bytes
    return stop == min(start + base.part_bytes, base.nbytes) and base.checksums[index : index + 1] == (digest,)


def _is(earlier: Glance | None, base: Manifest) -> bool:
    """Whether a snapshot that is here is the one that the receiver speaks of."""
    return earlier is not None and (earlier.manifest.nbytes, earlier.manifest.checksums) == (
        base.nbytes,
        base.checksums,
    )


Change = tuple[list[Range], bytes]
"""What makes a part of an approximation into that of the next: ranges sent as they are, and picked numbers, encoded."""


class Approximation:
    """The approximation that one server has of one run. Used by one thread at a time."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None
        self._memory = mmap.mmap(-1, 1)
        self._floats: tuple[Floats, ...] = ()
        self._since_exact = 0

    def leads_to(self, manifest: Manifest, floats: Sequence[Floats]) -> bool:
        """Whether the next snapshot may be approximated from it.

        Args:
            manifest: of that.
            floats: where in it numbers lie that may be approximated.
        """
        mine = self._manifest
        return (
            mine is not None
            and tuple(floats) == self._floats
            and manifest.nbytes <= len(self._memory)
            and (manifest.lineage, manifest.part_bytes, manifest.files) == (mine.lineage, mine.part_bytes, ())
            and self._since_exact < EXACT_EVERY - 1
        )

    def glance(self, base: Manifest | None) -> Glance | None:
        """It, if a server says that this is what it has."""
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
        if manifest.files:
            return
        if manifest.nbytes > len(self._memory):
            before = None
            if not self._make_memory(slot_capacity(manifest.nbytes)):
                return
        with memoryview(self._memory) as memory:
            memory[: manifest.nbytes] = image[: manifest.nbytes]
            _clear(memory, manifest, before)
        self._manifest, self._floats, self._since_exact = manifest, tuple(floats), 0

    def advance(
        self, exact: Manifest, image: memoryview, threads: Executor
    ) -> tuple[Manifest, memoryview, dict[int, Change]]:
        """Approximate the next snapshot.

        Args:
            exact: its sealed manifest, see :meth:`leads_to`.
            image: its file.
            threads: to work on.

        Returns:
            the sealed manifest of the approximation; its file, which lies here until the next call; and what changed in
            its parts, by their first bytes.
        """
        before, self._manifest = self._manifest, None  # until it is done
        nbytes, parts = exact.nbytes, list(part_ranges(exact.nbytes, exact.part_bytes))
        memory = memoryview(self._memory)
        changes = dict(threads.map(functools.partial(self._advance, image, memory), parts))
        _clear(memory, exact, before)
        self._manifest = exact.inexact().sealed(memory[:nbytes])
        self._since_exact += 1
        return self._manifest, memory[:nbytes], changes

    def _advance(self, image: memoryview, memory: memoryview, bounds: Range) -> tuple[int, Change]:
        """Approximate a part; numbers of it that may be are picked, everything else is taken as it is."""
        from lightning_spot.snapshot.delta import changed_ranges, pick  # numpy is not needed before

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
        return start, (ranges, picks)

    def _make_memory(self, capacity: int) -> bool:
        self._memory = mmap.mmap(-1, 1)
        available = available_bytes()
        if available is None or capacity <= available:
            try:
                self._memory = mmap.mmap(-1, capacity)
                return True
            except (OSError, OverflowError) as error:
                logger.debug("no memory for an approximation: %s", error)
        text = "lossy='topk' needs {size} more memory than this host has left. Snapshots are sent exactly"
        say(logging.WARNING, "lossy-no-memory", text, size=format_bytes(capacity))
        return False


class ApproximateEncoder(PartEncoder):
    """Encodes the parts of an approximation by what changed in them. See :class:`PartEncoder`."""

    def __init__(
        self, manifest: Manifest, image: memoryview, changes: dict[int, Change], base: Manifest, threads: Executor
    ) -> None:
        super().__init__(image, manifest.part_bytes, base, None, threads)
        self._changes = changes

    def encode(self, part: Part) -> OutgoingPart:
        """A part in the way in which it is sent."""
        from lightning_spot.snapshot.delta import MOST_RANGES, Coding, encode

        sent = super().encode(part)
        start, stop, digest = part
        ranges, picks = self._changes[start]
        as_it_is = len(picks) + sum(last - first for first, last in ranges)
        if sent.kind is PartKind.SAME or as_it_is > WORTH * (stop - start) or len(ranges) > MOST_RANGES:
            return sent
        content = encode(self._image[start:stop], b"", ranges, Coding.PICKED, picks)
        return OutgoingPart(start, stop - start, digest, PartKind.DELTA, content)


def _clipped(floats: Sequence[Floats], start: int, stop: int) -> Iterator[Floats]:
    """The numbers that lie wholly in a part, by their places in it."""
    for run in itertools.islice(floats, bisect.bisect_right(floats, start, key=lambda run: run.stop), None):
        if run.start >= stop:
            break
        width = WIDTHS[run.dtype]
        first = run.start + max(0, -(-(start - run.start) // width)) * width
        count = (min(run.stop, stop) - first) // width
        if count > 0:
            yield Floats(first - start, count * width, run.dtype)


def _clear(memory: memoryview, manifest: Manifest, before: Manifest | None) -> None:
    """Beyond its end a file counts as zeros, see :func:`~lightning_spot.snapshot.delta.part_of`."""
    if before is not None and before.nbytes > manifest.nbytes:
        memory[manifest.nbytes : before.nbytes] = bytes(before.nbytes - manifest.nbytes)
