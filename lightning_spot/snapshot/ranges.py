"""Ranges of a file, as plain data: what a trainer knows of its bytes, and tells its server.

It knows where floating-point numbers lie, and what it wrote into a slot since that was sealed last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning_spot.errors import SettingsError

CHECK_EVERY = 10
"""A part whose checksum is taken over is read all the same once in so many times that its slot is sealed."""

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of each type that can be approximated."""

Ranges = tuple[tuple[int, int], ...]
"""First byte and length of each run of bytes that was written, in their order in the file."""

_MOST = 2**20


class Floats(NamedTuple):
    """A run of numbers of one type.

    Attributes:
        start: first byte in the file.
        nbytes: length in bytes, whole numbers only.
        dtype: one of :data:`WIDTHS`.
    """

    start: int
    nbytes: int
    dtype: str

    @property
    def stop(self) -> int:
        """First byte behind them."""
        return self.start + self.nbytes


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

    def touches(self, start: int, stop: int) -> bool:
        """Whether anything was written from ``start`` to before ``stop``."""
        index = bisect_right(self.written, start, key=sum)
        return index < len(self.written) and self.written[index][0] < stop


def in_order(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges of some bytes, none of which is in two of them."""
    return tuple(sorted(item for item in ranges if item[1]))


def read_ranges(fields: Any, nbytes: int) -> Ranges | None:
    """Read what a request says was written of a file of ``nbytes`` bytes; ``None`` for all of it.

    Raises:
        SettingsError: if it is malformed, or ranges overlap, are not in order or reach beyond the file.
    """
    if fields is None:
        return None
    return tuple((start, length) for start, length in _read(fields, nbytes, 2))


def read_floats(fields: Any, nbytes: int) -> tuple[Floats, ...]:
    """Read what a request says of numbers in a file of ``nbytes`` bytes.

    Raises:
        SettingsError: if it is malformed, or they overlap, are not in order or reach beyond the file.
    """
    found = tuple(Floats(*item) for item in _read(fields, nbytes, 3))
    for floats in found:
        if type(floats.dtype) is not str or floats.dtype not in WIDTHS or floats.nbytes % WIDTHS[floats.dtype]:
            raise SettingsError(f"malformed request: {str(floats)[:100]} are no numbers that can be approximated")
    return found


def _read(fields: Any, nbytes: int, length: int) -> list[Any]:
    """Items that begin with a range each, all in order within a file."""
    if not isinstance(fields, Sequence) or len(fields) > _MOST:
        raise SettingsError("malformed request: ranges are no list")
    end = 0
    for item in fields:
        is_item = isinstance(item, Sequence) and len(item) == length and type(item[0]) is type(item[1]) is int
        if not is_item or item[0] < end or item[1] < 1 or item[0] + item[1] > nbytes:
            raise SettingsError(f"malformed request: {str(item)[:100]} is no range, or not in order, of {nbytes} bytes")
        end = item[0] + item[1]
    return list(fields)
