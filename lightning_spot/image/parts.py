"""Cuts a file into parts of fixed size and checks them with xxh3-128. Not for choosing what is copied when."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshot


def part_ranges(nbytes: int, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of every part of a file of ``nbytes`` bytes; an empty file has no part."""
    for start in range(0, nbytes, part_bytes):
        yield start, min(start + part_bytes, nbytes)


def checksum(data: memoryview | bytes | bytearray) -> str:
    """xxh3-128 of ``data`` as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksum_parts(image: memoryview, part_bytes: int = PART_BYTES) -> tuple[str, ...]:
    """Checksum of every part of ``image``."""
    return tuple(checksum(image[start:stop]) for start, stop in part_ranges(len(image), part_bytes))


def verify_parts(image: memoryview, checksums: tuple[str, ...], part_bytes: int, where: str) -> None:
    """Compare every part of ``image`` with its checksum.

    Args:
        image: the whole file.
        checksums: expected xxh3-128 of each part.
        part_bytes: size of a part.
        where: what to call the place in the error.

    Raises:
        CorruptSnapshot: at the first part that differs.
    """
    ranges = list(part_ranges(len(image), part_bytes))
    if len(ranges) != len(checksums):
        raise CorruptSnapshot(f"{where}: {len(ranges)} parts found, {len(checksums)} expected", where=where)
    for index, ((start, stop), expected) in enumerate(zip(ranges, checksums, strict=True)):
        if checksum(image[start:stop]) != expected:
            raise CorruptSnapshot(
                f"{where}: bytes {start}–{stop} (part {index}) do not have the checksum they were committed with",
                where=where,
                part=index,
            )
