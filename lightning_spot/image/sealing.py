"""Seals a filled file: writes the zip's CRCs and checksums every part, on several threads, the first parts first."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import xxhash

from lightning_spot.errors import CorruptSnapshot, LayoutUnsupported
from lightning_spot.image.archive import ZipEntry, read_entries
from lightning_spot.image.coming import Coming
from lightning_spot.image.crc import combine, crc32
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import checksum, part_ranges
from lightning_spot.image.portion import Image
from lightning_spot.image.shards import records_of
from lightning_spot.image.written import CHECK_EVERY, Before, Ranges, Written
from lightning_spot.threads import processors, work_together

CRC_BYTES = 4
"""Length of a CRC field in a zip."""

_CHUNK_BYTES = 512 * 1024  # stays in the cache between its checksum and its CRC
_CHUNK_BYTES_A_THREAD = 128 * 1024  # with less, threads wait for the GIL: each takes it for every chunk
_CRC_BYTES_AT_ONCE = 8 * 1024 * 1024
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
    """A file that is being sealed here; CRC fields in it are written. See :class:`Coming`.

    Args:
        manifest: of the file, not sealed.
        image: the whole file.
        before: what is known of its memory, if it was sealed before and not all of it was written since.
    """

    def __init__(self, manifest: Manifest, image: memoryview, before: Before | None = None) -> None:
        super().__init__(manifest, image)
        self._before = before

    def run(self, threads: int) -> Manifest:
        """Seal the file on ``threads`` threads at most, this one among them; its sealed manifest.

        Raises:
            LayoutUnsupported: if it is no archive of stored records, nor made of such.
            CorruptSnapshot: if it is sharded, and where its archives lie cannot be read; or if a part that nobody has
                written to is not what it was.
        """
        before = self._before
        threads = max(1, min(threads, len(self._parts)))
        plan = _Plan(records_of(self.image, self.manifest), self._parts, self.image, before)
        plan.chunk_bytes = max(_CHUNK_BYTES, threads * _CHUNK_BYTES_A_THREAD)
        if before is not None:
            for index in plan.untouched:
                self._take_over(index, before)
        work_together(lambda: self._work(plan), threads, "spot-seal")
        return replace(self.manifest, checksums=tuple(self._checksums))

    def _take_over(self, index: int, before: Before) -> None:
        """A part is as it was: so is its checksum."""
        start, stop = self._parts[index]
        if (index + before.turn) % CHECK_EVERY == 0 and checksum(self.image[start:stop]) != before.checksums[index]:
            raise CorruptSnapshot(
                f"part {index} of {self.manifest.name} is not what it was, though it was not to change: somebody else"
                " has written to this memory. It is not committed",
                part=index,
            )
        self._final(index, before.checksums[index])

    def _work(self, plan: _Plan) -> None:
        while (index := plan.next_part()) is not None:
            for ready in plan.finish(index):
                self._final(ready, plan.checksum(ready))


class _Part:
    """A part that is checksummed as far as every CRC field before that place is written.

    Whoever works on it does so alone: first who takes it from the plan, then who writes the last field in it.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.pieces: list[tuple[int, int, int]] = []  # of records that lie in it: record, start, stop
        self.waits = 1  # for its own pieces, and for each field in it
        self._fields: list[int] = []
        self._written: set[int] = set()
        self._next_field = 0
        self._hashed = start
        self._digest = xxhash.xxh3_128()

    def expects(self, place: int) -> None:
        """A CRC field, or the end of one, will be written at a place in it."""
        self.waits += 1
        self._fields.append(max(place, self.start))

    def begin(self) -> None:
        """All fields are known."""
        self._fields.sort()
        self.pieces.sort(key=lambda piece: piece[1])

    def written(self, place: int) -> None:
        """A field was written."""
        self.waits -= 1
        self._written.add(max(place, self.start))

    @property
    def is_awaited(self) -> bool:
        """Whether something in it is to be read for a CRC, or a field in it to be written."""
        return bool(self.pieces or self._fields)

    def hash(self, image: memoryview, upto: int) -> None:
        """Checksum what is there up to a place, or up to the first field before it that is not written yet."""
        while self._next_field < len(self._fields) and self._fields[self._next_field] in self._written:
            self._next_field += 1
        if self._next_field < len(self._fields):
            upto = min(upto, self._fields[self._next_field])
        if upto > self._hashed:
            self._digest.update(image[self._hashed : upto])
            self._hashed = upto

    def checksum(self, image: memoryview) -> str:
        """Of all of it, once nothing is to be written in it any more."""
        self.hash(image, self.stop)
        return self._digest.hexdigest()


class _Plan:
    """Which parts still wait for CRCs: a part may be checksummed once every CRC field that lies in it is written.

    Attributes:
        untouched: numbers of the parts that are as they were when their memory was sealed before.
        chunk_bytes: what is read for its checksum, and then for its CRC.
    """

    chunk_bytes = _CHUNK_BYTES

    def __init__(
        self, records: list[ZipEntry], parts: list[tuple[int, int]], image: memoryview, before: Before | None
    ) -> None:
        self._lock = threading.Lock()
        self._image = image
        written = Written(before.written) if before is not None else None
        self._records = records
        self._parts = [_Part(start, stop) for start, stop in parts]
        self._part_bytes = self._parts[0].stop if parts else 1  # the first is as long as any
        self._crcs: list[dict[int, tuple[int, int]]] = [{} for _ in records]  # start -> CRC, bytes
        self._left = [record.nbytes for record in records]  # bytes without a CRC yet
        for number, record in enumerate(records):
            end = record.offset + record.nbytes
            if max(end, max(record.crc_at) + CRC_BYTES) > (parts[-1][1] if parts else 0):
                raise LayoutUnsupported(f"record {record.name!r} reaches beyond the end of the checkpoint file")
            if record.nbytes and not (written is not None and self._is_kept(record, written)):
                # A field of an empty record holds zero already.
                for part in self._parts[record.offset // self._part_bytes : -(-end // self._part_bytes)]:
                    part.pieces.append((number, max(part.start, record.offset), min(part.stop, end)))
                for place, part in self._fields_of(record):
                    part.expects(place)
        for part in self._parts:
            part.begin()
        self.untouched = [
            index
            for index, part in enumerate(self._parts[: len(before.checksums)] if before is not None else ())
            if written is not None and not part.is_awaited and not written.touches(part.start, part.stop)
        ]
        self._todo = iter(sorted({*range(len(parts))}.difference(self.untouched)))

    def next_part(self) -> int | None:
        """Take the next part to work on; ``None`` when all are taken."""
        with self._lock:
            return next(self._todo, None)

    def finish(self, index: int) -> list[int]:
        """Compute the CRCs of a part's pieces, write those that are complete, and return the parts that are ready."""
        part, ready = self._parts[index], []
        for number, start, stop in part.pieces:
            crc = 0
            for place in range(start, stop, self.chunk_bytes):
                end = min(place + self.chunk_bytes, stop)
                part.hash(self._image, end)  # first: it fetches ahead from memory, and the CRC finds it in the cache
                crc = crc32(self._image[place:end], crc)
            with self._lock:
                self._crcs[number][start] = (crc, stop - start)
                self._left[number] -= stop - start
                if not self._left[number]:
                    ready += self._write(number)
        with self._lock:
            part.waits -= 1
            if not part.waits:
                ready.append(index)
        return ready

    def checksum(self, index: int) -> str:
        """Of a part that is ready."""
        return self._parts[index].checksum(self._image)

    def _write(self, number: int) -> list[int]:
        """Write the CRC of a record that has been read to its end; the parts that are ready now. Under the lock."""
        pieces, record = self._crcs[number], self._records[number]
        whole = 0
        for start in sorted(pieces):
            whole = combine(whole, *pieces[start])
        for place in record.crc_at:
            struct.pack_into("<L", self._image, place, whole)
        ready = []
        for place, part in self._fields_of(record):
            part.written(place)
            if not part.waits:
                ready.append(part.start // self._part_bytes)
        return ready

    def _is_kept(self, record: ZipEntry, written: Written) -> bool:
        """Whether a record was not written to, nor the CRC behind it; then that is written where else it belongs."""
        *others, behind = record.crc_at
        if written.touches(record.offset, record.offset + record.nbytes) or written.touches(behind, behind + CRC_BYTES):
            return False
        crc = bytes(self._image[behind : behind + CRC_BYTES])
        for place in others:
            if self._image[place : place + CRC_BYTES] != crc:
                if not written.touches(place, place + CRC_BYTES):
                    return False
                self._image[place : place + CRC_BYTES] = crc
        return True

    def _fields_of(self, record: ZipEntry) -> Iterator[tuple[int, _Part]]:
        """Each CRC field of a record, with each part in which some of it lies."""
        for place in record.crc_at:
            for part in self._parts[place // self._part_bytes : -(-(place + CRC_BYTES) // self._part_bytes)]:
                yield place, part


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


def crc_fields(image: memoryview, manifest: Manifest) -> tuple[tuple[int, bytes], ...]:
    """Place and content of every CRC field of a filled file, in their order.

    Raises:
        LayoutUnsupported: see :meth:`Sealing.run`.
        CorruptSnapshot: likewise.
    """
    places = sorted(place for record in records_of(image, manifest) for place in record.crc_at)
    return tuple((place, bytes(image[place : place + CRC_BYTES])) for place in places)


def fill_crcs(image: Image, archives: Ranges) -> None:
    """Write the CRCs into archives that were filled in place, where the image is not sealed as a whole.

    Args:
        image: of which these archives are here.
        archives: first byte and length of each.

    Raises:
        LayoutUnsupported: if one cannot be read.
    """
    for start, nbytes in archives:
        archive = image[start : start + nbytes]
        for record in read_entries(archive):
            crc = 0
            for place in range(record.offset, record.offset + record.nbytes, _CRC_BYTES_AT_ONCE):
                crc = crc32(archive[place : min(place + _CRC_BYTES_AT_ONCE, record.offset + record.nbytes)], crc)
            for place in record.crc_at if record.nbytes else ():
                struct.pack_into("<L", archive, place, crc)


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
