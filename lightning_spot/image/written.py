"""What was written into a slot since it was sealed last, as plain data: a trainer knows it, and tells its server."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning_spot.errors import SettingsError

CHECK_EVERY = 10
"""A part whose checksum is taken over is read all the same once in so many times that its slot is sealed."""

Ranges = tuple[tuple[int, int], ...]
"""First byte and length of each run of bytes that was written, in their order in the file."""

_MOST = 2**20


class Written:
    """Says whether something was written at a place.

    Args:
        ranges: see :data:`Ranges`.
    """

    def __init__(self, ranges: Ranges) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [start + nbytes for start, nbytes in ranges]

    def touches(self, start: int, stop: int) -> bool:
        """Whether anything was written from ``start`` to before ``stop``."""
        index = bisect_right(self._ends, start)
        return index < len(self._starts) and self._starts[index] < stop


class Before(NamedTuple):
    """What is known of memory that was sealed before.

    Attributes:
        written: into it since.
        checksums: of each whole part of what it was sealed as.
        turn: counts how often it was sealed: of the parts that were not written to, a share is read in its turn.
    """

    written: Ranges
    checksums: tuple[str, ...]
    turn: int


def in_order(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges of some bytes, none of which is in two of them."""
    return tuple(sorted(item for item in ranges if item[1]))


def read_ranges(fields: Any, nbytes: int) -> Ranges | None:
    """Read what a request says of a file of ``nbytes`` bytes; ``None`` for all of it.

    Raises:
        SettingsError: if it is malformed, or ranges overlap, are not in order or reach beyond the file.
    """
    if fields is None:
        return None
    if not isinstance(fields, Sequence) or len(fields) > _MOST:
        raise SettingsError("malformed request: what was written is no list")
    found, end = [], 0
    for item in fields:
        is_pair = isinstance(item, Sequence) and [type(number) for number in item] == [int, int]
        if not is_pair or item[0] < end or item[1] < 1 or item[0] + item[1] > nbytes:
            raise SettingsError(f"malformed request: {str(item)[:100]} is no range, or not in order, of {nbytes} bytes")
        found.append((item[0], item[1]))
        end = item[0] + item[1]
    return tuple(found)
