"""Seals a filled file: writes the zip's CRCs and checksums every part, on several threads, the first parts first."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_spot.errors import CorruptSnapshot, LayoutUnsupported
from lightning_spot.image.archive import ZipEntry, read_entries
from lightning_spot.image.coming import Coming
from lightning_spot.image.crc import combine, crc32
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import checksum, part_ranges

_CRC_BYTES = 4
_MOST_THREADS = 4


def sealing_threads() -> int:
    """Threads to seal with: half of this host's processors, so that training keeps the other half."""
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))


class Sealing(Coming):
    """A file that is being sealed here; CRC fields in it are written. See :class:`Coming`."""

    def run(self, threads: int) -> Manifest:
        """Seal the file on ``threads`` threads, this one among them; its sealed manifest.

        Raises:
            LayoutUnsupported: if the file is no archive of stored records.
        """
        plan = _Plan(read_entries(self.image[: self.manifest.nbytes]), self._parts, self.manifest.part_bytes)
        helpers = [threading.Thread(target=self._work, args=(plan,), name="spot-seal") for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        self._work(plan)
        for helper in helpers:
            helper.join()
        return replace(self.manifest, checksums=tuple(self._checksums))

    def _work(self, plan: _Plan) -> None:
        while (index := plan.next_part()) is not None:
            for ready in plan.finish(index, self.image):
                start, stop = self._parts[ready]
                self._final(ready, checksum(self.image[start:stop]))


class _Plan:
    """Which parts still wait for CRCs: a part may be checksummed once every CRC field that lies in it is written."""

    def __init__(self, records: list[ZipEntry], parts: list[tuple[int, int]], part_bytes: int) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._part_bytes = part_bytes
        self._records = records
        self._pieces: list[list[tuple[int, int, int]]] = [[] for _ in parts]  # of a part: record, start, stop
        self._crcs: list[dict[int, tuple[int, int]]] = [{} for _ in records]  # start -> CRC, bytes
        self._left = [0] * len(records)  # bytes without a CRC yet
        self._waits = [1] * len(parts)  # for its own pieces and for the fields in it
        for number, record in enumerate(records):
            self._left[number] = record.nbytes
            end = record.offset + record.nbytes
            if max(end, *(place + _CRC_BYTES for place in record.crc_at)) > (parts[-1][1] if parts else 0):
                raise LayoutUnsupported(f"record {record.name!r} reaches beyond the end of the checkpoint file")
            for index in range(record.offset // part_bytes, -(-end // part_bytes) if record.nbytes else 0):
                start, stop = parts[index]
                self._pieces[index].append((number, max(start, record.offset), min(stop, end)))
            if record.nbytes:  # a field of an empty record holds zero already
                for index in self._parts_of(record):
                    self._waits[index] += 1

    def next_part(self) -> int | None:
        """Take the next part to work on; ``None`` when all are taken."""
        with self._lock:
            self._next += 1
            return self._next - 1 if self._next <= len(self._waits) else None

    def finish(self, index: int, image: memoryview) -> list[int]:
        """Compute the CRCs of a part's pieces, write those that are complete, and return the parts that are ready."""
        crcs = [(number, start, stop, crc32(image[start:stop])) for number, start, stop in self._pieces[index]]
        with self._lock:
            ready = self._no_longer_waits([index])
            for number, start, stop, crc in crcs:
                self._crcs[number][start] = (crc, stop - start)
                self._left[number] -= stop - start
                if not self._left[number]:
                    ready += self._no_longer_waits(self._write(number, image))
            return ready

    def _write(self, number: int, image: memoryview) -> list[int]:
        pieces = self._crcs[number]
        whole = 0
        for start in sorted(pieces):
            whole = combine(whole, *pieces[start])
        for place in self._records[number].crc_at:
            struct.pack_into("<L", image, place, whole)
        return self._parts_of(self._records[number])

    def _parts_of(self, record: ZipEntry) -> list[int]:
        """Parts in which fields of a record lie, once for each field and part."""
        return [
            index
            for place in record.crc_at
            for index in range(place // self._part_bytes, (place + _CRC_BYTES - 1) // self._part_bytes + 1)
        ]

    def _no_longer_waits(self, parts: list[int]) -> list[int]:
        ready = []
        for index in parts:
            self._waits[index] -= 1
            if not self._waits[index]:
                ready.append(index)
        return ready


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
        CorruptSnapshot: if the parts are not those that the manifest announced.
    """
    wanted = [stop - start for start, stop in part_ranges(manifest.nbytes, manifest.part_bytes)]
    if list(sizes) != wanted:
        raise CorruptSnapshot(
            f"{manifest.name} came as {sum(sizes)} bytes in {len(sizes)} parts, not as {manifest.nbytes} bytes in"
            f" {len(wanted)}; it is not committed"
        )
    return replace(manifest, checksums=tuple(checksums))
