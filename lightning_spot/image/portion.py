"""What of an image one host brings: some ranges of it, which may lie one after another in memory of their own."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from lightning_spot.errors import SettingsError
from lightning_spot.image.written import Ranges, read_ranges
from lightning_spot.untrusted import LARGE_BYTES, MOST_BYTES, read_object

_GRAIN = 64
_MOST_RANKS = 1024

MOST_HOSTS = 512
"""That bring one snapshot together: of eight GPUs each, 4,096."""


class Image(Protocol):
    """The bytes of an image, or of the ranges of it that are here."""

    def __len__(self) -> int:
        """Bytes of the whole image."""

    def __getitem__(self, bounds: slice, /) -> memoryview:
        """The bytes from one place in the image to another."""


class Portion:
    """Ranges of an image, as they lie in memory that holds nothing else.

    Args:
        ranges: first byte and length of each, in their order in the image.

    Attributes:
        ranges: see above.
        nbytes: of the memory.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = ranges
        self.nbytes = 0
        self._starts, self._places = [start for start, _ in ranges], []
        for _, nbytes in ranges:
            self._places.append(-(-self.nbytes // _GRAIN) * _GRAIN)
            self.nbytes = self._places[-1] + nbytes

    def place(self, start: int) -> int:
        """Where in the memory a byte of the image lies.

        Raises:
            SettingsError: if it is in none of the ranges.
        """
        index = bisect_right(self._starts, start) - 1
        if index < 0 or start >= self._starts[index] + self.ranges[index][1]:
            raise SettingsError(f"byte {start} of the image is another host's")
        return self._places[index] + start - self._starts[index]


class PortionImage:
    """An image of which some ranges are here.

    Args:
        portion: which, and where in the memory.
        memory: that holds them.
        nbytes: of the image.

    Attributes:
        portion: see above.
        memory: likewise.
    """

    def __init__(self, portion: Portion, memory: memoryview, nbytes: int) -> None:
        self.portion, self.memory, self._nbytes = portion, memory, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, bounds: slice, /) -> memoryview:
        start, stop, _ = bounds.indices(self._nbytes)
        place = self.portion.place(start)
        return self.memory[place : place + stop - start]


@dataclass(frozen=True, slots=True)
class Portions:
    """What each host but the first brings to an image; the first brings the rest.

    Attributes:
        ranges: of each of these hosts.
        ranks: how many ranks fill them, on each of these hosts.
    """

    ranges: tuple[Ranges, ...]
    ranks: tuple[int, ...]

    @property
    def hosts(self) -> int:
        """How many hosts there are, the first among them."""
        return 1 + len(self.ranges)

    def to_dict(self) -> dict[str, object]:
        """As entries of a layout, which is a JSON object."""
        return {"portions": self.ranges, "ranks": self.ranks}

    @classmethod
    def read(cls, layout: str, nbytes: int) -> Portions:
        """Read them from the layout of an image of ``nbytes`` bytes.

        Raises:
            SettingsError: if there are none, or they are malformed.
        """
        portions = _read(layout)
        if any(each and sum(each[-1]) > nbytes for each in portions.ranges):
            raise SettingsError(f"a layout has portions beyond the {nbytes} bytes of the image")
        return portions

    def rest(self, nbytes: int) -> Ranges:
        """What the first host brings to an image of ``nbytes`` bytes.

        Raises:
            SettingsError: if a byte is two hosts'.
        """
        found, end = [], 0
        for start, length in sorted(item for each in self.ranges for item in each):
            if start < end:
                raise SettingsError(f"byte {start} of the image is to come from two hosts")
            if start > end:
                found.append((end, start - end))
            end = start + length
        return (*found, (end, nbytes - end)) if nbytes > end else tuple(found)


@functools.lru_cache(maxsize=4)  # it stays the same from one snapshot to the next
def _read(layout: str) -> Portions:
    try:
        fields = read_object(layout, LARGE_BYTES)
        ranges, ranks = fields["portions"], tuple(fields["ranks"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"a layout says nothing of the hosts that bring the image: {error}") from error
    if not 1 <= len(ranks) < MOST_HOSTS or not isinstance(ranges, list) or len(ranges) != len(ranks):
        raise SettingsError(f"a layout is for {len(ranks) + 1} hosts; it must be from 2 to {MOST_HOSTS}")
    if any(type(count) is not int or not 1 <= count < _MOST_RANKS for count in ranks):
        raise SettingsError("a layout names hosts without ranks")
    return Portions(tuple(read_ranges(each, MOST_BYTES) or () for each in ranges), ranks)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in their order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted(ranges):
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        elif nbytes:
            found.append((start, nbytes))
    return tuple(found)


def cut(ranges: Ranges, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of each piece of ranges that are cut where parts of the image end."""
    for start, nbytes in ranges:
        stop = start + nbytes
        while start < stop:
            end = min(stop, (start // part_bytes + 1) * part_bytes)
            yield start, end
            start = end


def is_whole(received: Mapping[int, tuple[int, str]], nbytes: int) -> bool:
    """Whether pieces, by their first byte, make up an image of ``nbytes`` bytes, each byte once."""
    end = 0
    for start in sorted(received):
        if start != end:
            return False
        end = start + received[start][0]
    return end == nbytes
