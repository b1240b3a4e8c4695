"""A snapshot's file is sealed: each of its parts gets the checksum that it keeps wherever it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum, part_ranges
from lightning_spot.threads import in_turn, processors

_FEW, _MOST_THREADS = 4, 16


def seal(manifest: Manifest, image: memoryview, threads: int | None = None) -> Manifest:
    """The manifest of a file with the checksums of its parts.

    A training that computes on all processors waits for the one that is busy with something else: where one thread
    seals, it loses the time of that thread, and where all processors seal, their share of it. Where a host has many,
    training is on GPUs, whose snapshots are large: one is to be sealed before the next one comes.

    Args:
        manifest: of the file; checksums in it do not count.
        image: the whole file.
        threads: on which it is sealed, the calling one among them; ``None`` for one for each of this host's processors,
            up to a few; of many processors half.
    """
    if threads is None:
        threads = min(processors(), max(_FEW, processors() // 2), _MOST_THREADS)
    parts = list(part_ranges(manifest.nbytes, manifest.part_bytes))
    checksums = [""] * len(parts)
    todo = iter(range(len(parts)))

    def seal_part(index: int) -> None:
        start, stop = parts[index]
        checksums[index] = checksum(image[start:stop])

    in_turn(lambda: next(todo, None), seal_part, max(1, min(threads, len(parts))), "spot-seal")
    return replace(manifest, checksums=tuple(checksums))


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
        """The manifest, once all parts have passed.

        Raises:
            CorruptSnapshotError: if the parts are not those that the manifest announced.
        """
        manifest, sizes = self._manifest, self._sizes
        wanted = [stop - start for start, stop in part_ranges(manifest.nbytes, manifest.part_bytes)]
        if sizes != wanted:
            raise CorruptSnapshotError(
                f"{manifest.name} came as {sum(sizes)} bytes in {len(sizes)} parts, not as {manifest.nbytes} bytes in"
                f" {len(wanted)}; it is not committed"
            )
        return replace(manifest, checksums=tuple(self._checksums))
