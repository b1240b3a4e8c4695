"""Cuts a file into parts of fixed size and checks them with xxh3-128. Not for choosing what is copied when."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import xxhash

from lightning_spot.errors import CorruptSnapshotError, TierError
from lightning_spot.threads import in_turn, processors

if TYPE_CHECKING:
    from lightning_spot.snapshot.shards import Image

_FEW, _MOST_THREADS = 4, 16
_READ_BYTES = 512 * 1024  # stays in the processor's cache until it is checksummed


def part_ranges(nbytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of every part of a file of ``nbytes`` bytes; an empty file has no part."""
    for start in range(0, nbytes, part_bytes):
        yield start, min(start + part_bytes, nbytes)


def checksum(data: memoryview | bytes | bytearray) -> str:
    """xxh3-128 of ``data`` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_parts(image: memoryview, part_bytes: int, threads: int | None = None) -> tuple[str, ...]:
    """Checksum of every part of ``image``.

    A training that computes on all processors waits for the one that is busy with something else: where one thread
    computes checksums, it loses the time of that thread, and where all processors do, their share of it. Where a host
    has many, training is on GPUs, whose snapshots are large: one is to be sealed before the next one comes.

    Args:
        image: the whole file.
        part_bytes: size of a part.
        threads: that compute, the calling one among them; ``None`` for one for each of this host's processors, up to a
            few; of many processors half.
    """
    if threads is None:
        threads = min(processors(), max(_FEW, processors() // 2), _MOST_THREADS)
    parts = list(enumerate(part_ranges(len(image), part_bytes)))
    checksums = [""] * len(parts)

    def compute(part: tuple[int, tuple[int, int]]) -> None:
        index, (start, stop) = part
        checksums[index] = checksum(image[start:stop])

    in_turn(parts, compute, max(1, min(threads, len(parts))), "spot-seal")
    return tuple(checksums)


def verify_parts(image: Image, checksums: tuple[str, ...], part_bytes: int, where: str, first: int = 0) -> None:
    """Compare every part of ``image`` with its checksum.

    Args:
        image: the whole file, or a run of its parts.
        checksums: expected xxh3-128 of each of these parts.
        part_bytes: size of a part.
        where: what to call the place in the error.
        first: place of ``image`` in the file.

    Raises:
        CorruptSnapshotError: at the first part that differs.
    """
    for start, stop, expected in _expected(len(image), checksums, part_bytes, where):
        if checksum(image[start:stop]) != expected:
            raise _damaged(where, first + start, first + stop, part_bytes)


def verify_file(
    fd: int,
    nbytes: int,
    checksums: Sequence[str],
    part_bytes: int,
    where: str,
    progress: Callable[[int], None] | None = None,
    threads: int = 1,
) -> None:
    """Compare every part of an open file with its checksum.

    It is read, not mapped: where the disk fails or the file is cut meanwhile, that is an error and no SIGBUS.

    Args:
        fd: the file; its position is neither used nor moved. It may be longer than ``nbytes`` (a slot).
        nbytes: bytes to check.
        checksums: expected xxh3-128 of each part.
        part_bytes: size of a part.
        where: what to call the place in the error.
        progress: called with the number of bytes just checked, by any of the threads.
        threads: that read at once.

    Raises:
        CorruptSnapshotError: at a part that differs, or if the file is shorter.
        TierError: if it cannot be read.
    """

    def check(part: tuple[int, int, str]) -> None:
        (start, stop, expected), digest = part, xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
        for place in range(start, stop, _READ_BYTES):
            data = buffer[: stop - place]
            read_at(fd, place, data, where)
            digest.update(data)
            if progress is not None:
                progress(len(data))
        if digest.hexdigest() != expected:
            raise _damaged(where, start, stop, part_bytes)

    in_turn(_expected(nbytes, checksums, part_bytes, where), check, threads, "spot-verify")


def _expected(nbytes: int, checksums: Sequence[str], part_bytes: int, where: str) -> list[tuple[int, int, str]]:
    """First byte, end and checksum of each part."""
    ranges = list(part_ranges(nbytes, part_bytes))
    if len(ranges) != len(checksums):
        raise CorruptSnapshotError(f"{where}: {len(ranges)} parts found, {len(checksums)} expected", where=where)
    return [(start, stop, expected) for (start, stop), expected in zip(ranges, checksums, strict=True)]


def read_at(fd: int, place: int, into: memoryview, where: str) -> None:
    """Fill memory from a file, from one byte on; the file's position is neither used nor moved.

    Raises:
        CorruptSnapshotError: if the file ends before.
        TierError: if it cannot be read.
    """
    while into:
        try:
            count = os.preadv(fd, [into], place)
        except OSError as error:
            raise TierError(
                f"{where} cannot be read at byte {place}: {error.strerror}; another copy is needed", tier=where
            ) from error
        if count == 0:
            raise CorruptSnapshotError(f"{where} is cut short at byte {place}", where=where)
        into, place = into[count:], place + count


def _damaged(where: str, start: int, stop: int, part_bytes: int) -> CorruptSnapshotError:
    part = start // part_bytes
    return CorruptSnapshotError(
        f"{where}: bytes {start}–{stop} (part {part}) do not have the checksum they were committed with",
        where=where,
        part=part,
    )
