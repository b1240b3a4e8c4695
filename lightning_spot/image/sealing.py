"""Seals a filled file: checksums every part, on several threads, the first parts first."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.image.coming import Coming
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import checksum, part_ranges
from lightning_spot.image.written import CHECK_EVERY, Before, Written
from lightning_spot.threads import processors, work_together

_FEW, _MOST_THREADS = 4, 16


def sealing_threads() -> int:
    """Threads to seal with: one for each of this host's processors, up to a few; of many processors half.

    A training that computes on all processors waits for the one that is busy with something else: where one thread
    seals, it loses the time of that thread, and where all processors seal, their share of it. Where a host has many,
    training is on GPUs, whose snapshots are large: one is to be sealed before the next one comes.
    """
    count = processors()
    return min(count, max(_FEW, count // 2), _MOST_THREADS)


class Sealing(Coming):
    """A file that is being sealed here. See :class:`Coming`.

    Args:
        manifest: of the file, not sealed.
        image: the whole file.
        before: what is known of its memory, if it was sealed before and not all of it was written since.
    """

    def __init__(self, manifest: Manifest, image: memoryview, before: Before | None = None) -> None:
        super().__init__(manifest, image)
        self._before = before
        self._lock = threading.Lock()

    def run(self, threads: int) -> Manifest:
        """Seal the file on ``threads`` threads at most, this one among them; its sealed manifest.

        Raises:
            CorruptSnapshotError: if a part that nobody has written to is not what it was.
        """
        if self._before is not None:
            self._take_over(self._before)
        todo = iter([index for index, digest in enumerate(self._checksums) if not digest])
        threads = max(1, min(threads, len(self._parts)))
        work_together(lambda: self._work(todo), threads, "spot-seal")
        return replace(self.manifest, checksums=tuple(self._checksums))

    def _take_over(self, before: Before) -> None:
        """Parts that are as they were have the checksums that they had; of these, some are read in their turn."""
        written = Written(before.written)
        for index, (known, (start, stop)) in enumerate(zip(before.checksums, self._parts, strict=False)):
            if written.touches(start, stop):
                continue
            if (index + before.turn) % CHECK_EVERY == 0 and checksum(self.image[start:stop]) != known:
                raise CorruptSnapshotError(
                    f"part {index} of {self.manifest.name} is not what it was, though it was not to change: somebody"
                    " else has written to this memory. It is not committed",
                    part=index,
                )
            self._final(index, known)

    def _work(self, todo: Iterator[int]) -> None:
        while True:
            with self._lock:
                index = next(todo, None)
            if index is None:
                return
            start, stop = self._parts[index]
            self._final(index, checksum(self.image[start:stop]))


class NotedParts:
    """Parts on their way through ``Store.put_parts``, their checksums noted for the manifest.

    Args:
        manifest: not sealed.
        parts: of its file, in order; each is valid until the next one is asked for.
    """

    def __init__(self, manifest: Manifest, parts: Iterable[memoryview]) -> None:
        self._manifest, self._parts = manifest, parts
        self._checksums: list[str] = []
        self._sizes: list[int] = []

    def __iter__(self) -> Iterator[memoryview]:
        for part in self._parts:
            self._checksums.append(checksum(part))
            self._sizes.append(len(part))
            yield part

    def sealed(self) -> Manifest:
        """The manifest, once all parts have passed; see :func:`seal_parts`."""
        return seal_parts(self._manifest, self._checksums, self._sizes)


def seal_parts(manifest: Manifest, checksums: Sequence[str], sizes: Sequence[int]) -> Manifest:
    """The sealed manifest of a file that came in parts.

    Raises:
        CorruptSnapshotError: if the parts are not those that the manifest announced.
    """
    wanted = [stop - start for start, stop in part_ranges(manifest.nbytes, manifest.part_bytes)]
    if list(sizes) != wanted:
        raise CorruptSnapshotError(
            f"{manifest.name} came as {sum(sizes)} bytes in {len(sizes)} parts, not as {manifest.nbytes} bytes in"
            f" {len(wanted)}; it is not committed"
        )
    return replace(manifest, checksums=tuple(checksums))
