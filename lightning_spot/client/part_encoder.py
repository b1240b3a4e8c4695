"""Decides how each part of a snapshot goes to a node: not at all, as what changed of it, or whole."""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from lightning_spot.client.compression import LEAST_BYTES, PROBE_BYTES, CompressionRule
from lightning_spot.image.packing import can_pack
from lightning_spot.image.portion import Image
from lightning_spot.memory.bases import Glance
from lightning_spot.protocol.wire import BaseInfo, PartKind

Part = tuple[int, int, str]  # first byte, end, checksum

WORTH = 7 / 8
"""Share of a part above which naming what changed of it saves too little."""


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
        rule: decides what is packed; ``None`` for nothing.
        always: whether all that can be is packed, whatever the rule says.
    """

    def __init__(
        self,
        image: Image,
        part_bytes: int,
        base: BaseInfo | None,
        earlier: Glance | None,
        packers: Executor,
        rule: CompressionRule | None,
        *,
        always: bool = False,
    ) -> None:
        self._image, self._part_bytes = image, part_bytes
        self._base = base if base is not None and base.part_bytes == part_bytes else None
        self._earlier = earlier if self._base is not None and _is(earlier, self._base) else None
        self._rule = rule if base is not None and base.unpacks and can_pack() else None
        self._packers, self._always = packers, always

    def whole(self, part: Part) -> OutgoingPart:
        """A part to be sent whole, because anything else went wrong."""
        start, stop, digest = part
        return OutgoingPart.whole(start, self._image[start:stop], digest)

    def encode(self, part: Part) -> OutgoingPart:
        """A part in the way in which it is sent."""
        start, stop, digest = part
        if self._base is not None and self._base.has(start, stop, digest):
            return OutgoingPart(start, stop - start, digest, PartKind.SAME, b"")
        earlier = self._earlier
        delta = self._delta(part, earlier) if earlier is not None and start < earlier.manifest.nbytes else None
        if delta is None or earlier is None or not earlier.is_there():
            return self.whole(part)
        return delta

    def sent(self, part: OutgoingPart, wire_s: float) -> None:
        """Note that a part was under way for ``wire_s`` seconds."""
        if self._rule is not None and len(part.content) >= LEAST_BYTES:
            self._rule.sent(len(part.content), wire_s)

    def _delta(self, part: Part, earlier: Glance) -> OutgoingPart | None:
        """What changed of a part; ``None`` if that is nearly all of it and not worth packing."""
        from lightning_spot.image.delta import Coding, changed_ranges, encode, part_of  # numpy: not needed before

        start, stop, digest = part
        new, base = self._image[start:stop], part_of(earlier.image, start, stop)
        ranges = changed_ranges(new, base)
        changed = sum(end - begin for begin, end in ranges)
        if self._rule is not None and changed >= LEAST_BYTES:
            if self._always or self._rule.packs:
                packed, pack_s = self._pack(new, base, ranges)
                self._rule.packed(changed, len(packed), pack_s)
                if len(packed) < min(changed, len(new) * WORTH):
                    return OutgoingPart(start, len(new), digest, PartKind.DELTA, packed)
            elif self._rule.probes():
                begin, end = max(ranges, key=lambda bounds: bounds[1] - bounds[0])
                end = min(end, begin + PROBE_BYTES)
                self._probe(self._rule, new[begin:end], base[begin:end])
        if changed > len(new) * WORTH:
            return None
        return OutgoingPart(start, len(new), digest, PartKind.DELTA, encode(new, base, ranges, Coding.PLAIN))

    def _probe(self, rule: CompressionRule, new: memoryview, base: memoryview) -> None:
        """Pack a piece of a part to see how that goes. Nothing waits for it: the part is on its way meanwhile."""
        from lightning_spot.image.delta import Coding, encode

        began_s = time.perf_counter()

        def note(done: Future[bytes]) -> None:
            if not done.cancelled():
                rule.probed(len(new), len(done.result()), time.perf_counter() - began_s)

        self._packers.submit(encode, new, base, [(0, len(new))], Coding.PACKED).add_done_callback(note)

    def _pack(self, new: memoryview, base: memoryview, ranges: list[tuple[int, int]]) -> tuple[bytes, float]:
        """A packed delta, and the seconds that it took."""
        from lightning_spot.image.delta import Coding, encode

        began_s = time.perf_counter()
        packed = self._packers.submit(encode, new, base, ranges, Coding.PACKED).result()
        return packed, time.perf_counter() - began_s


def _is(earlier: Glance | None, base: BaseInfo) -> bool:
    """Whether a snapshot that is here is the one that the receiver speaks of."""
    return earlier is not None and (earlier.manifest.nbytes, earlier.manifest.checksums) == (
        base.nbytes,
        base.checksums,
    )
