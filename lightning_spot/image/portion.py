"""What of an image one host brings: some ranges of it, which may lie one after another in memory of their own.

Portions may lie apart, each at a server of its own. In the whole that is made of their manifests, each portion begins
with a new part, so that the checksums of all parts are known without reading a byte. What lies between the end of a
portion and the next part is zero, and in no file.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_spot.errors import CorruptSnapshotError, SettingsError
from lightning_spot.image.files import FileSpan, check_files
from lightning_spot.image.manifest import MOST_HOSTS, Manifest, PortionOf, portion_name
from lightning_spot.image.parts import checksum
from lightning_spot.image.written import Ranges, read_ranges
from lightning_spot.untrusted import LARGE_BYTES, MOST_BYTES, read_object

_GRAIN = 64
_MOST_RANKS = 1024


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


# -- portions that lie apart, each at a server of its own: the whole is made of their manifests -----------------------


def portion_of(
    manifest: Manifest, files: Sequence[FileSpan], memory: memoryview, *, host: int, hosts: int, digest: str
) -> Manifest:
    """The sealed manifest of one host's portion.

    Args:
        manifest: of the snapshot, as far as this host knows it.
        files: of this host, at their places in the memory.
        memory: that holds the portion, and nothing else.
        host: number of this host, from 0.
        hosts: how many there are.
        digest: what all of them agree on.
    """
    plain = replace(manifest, name=portion_name(manifest.name, host), files=tuple(files), checksums=())
    sealed = plain.sealed(memory)
    start = (len(memory) - 1) // sealed.part_bytes * sealed.part_bytes
    tail = checksum(bytes(memory[start:]) + bytes(start + sealed.part_bytes - len(memory)))
    return replace(sealed, portion=PortionOf(host, hosts, digest, tail))


def missing(portions: Iterable[Manifest]) -> list[int]:
    """Hosts whose portions of a snapshot are not among these; host 0 if there are none at all."""
    found = [portion.portion for portion in portions if portion.portion is not None]
    hosts = max((portion.hosts for portion in found), default=1)
    return sorted(set(range(hosts)) - {portion.host for portion in found})


def starts(portions: Sequence[Manifest]) -> list[int]:
    """Where in the whole each of the portions of all hosts, in their order, begins; and where the last one ends."""
    found = [0]
    for portion in portions:
        found.append(found[-1] + -(-portion.nbytes // portion.part_bytes) * portion.part_bytes)
    return found


def whole_of(portions: Iterable[Manifest]) -> Manifest:
    """The manifest of the snapshot, of those of the portions of all hosts. Whoever makes it makes the same.

    Raises:
        CorruptSnapshotError: if they do not fit each other.
    """
    by_host = sorted(portions, key=_host)
    name, first = by_host[0].snapshot, by_host[0]
    if missing(by_host) or len({_host(portion) for portion in by_host}) != len(by_host):
        raise CorruptSnapshotError(f"the portions of {name} are not those of all hosts once")
    files, checksums = list[FileSpan](), list[str]()
    for portion, start in zip(by_host, starts(by_host), strict=False):
        of = portion.portion
        assert of is not None
        assert first.portion is not None
        agreed = (portion.snapshot, portion.part_bytes, of.hosts, of.digest)
        if agreed != (name, first.part_bytes, first.portion.hosts, first.portion.digest):
            raise CorruptSnapshotError(f"host {of.host} has another layout of {name} than the first host")
        files += (replace(span, offset=span.offset + start) for span in portion.files)
        checksums += (*portion.checksums[:-1], of.tail)
    nbytes = starts(by_host)[-1]
    # Also before anybody makes room for what a stranger says.
    if not all(checksums) or len(checksums) * first.part_bytes != nbytes:
        raise CorruptSnapshotError(f"the portions of {name} have no checksums of all their parts")
    if problem := check_files(files, nbytes):
        raise CorruptSnapshotError(f"the portions of {name} make no snapshot: {problem}")
    return replace(first, name=name, nbytes=nbytes, files=tuple(files), checksums=tuple(checksums), portion=None)


def place_of(part: int, begins: Sequence[int]) -> tuple[int, int]:
    """Which portion holds a part of the whole that begins at a byte, and where in it.

    Args:
        part: first byte.
        begins: see :func:`starts`.
    """
    index = bisect_right(begins, part, hi=len(begins) - 1) - 1
    return index, part - begins[index]


def _host(portion: Manifest) -> int:
    if portion.portion is None:
        raise CorruptSnapshotError(f"{portion.name} is no host's portion of a snapshot")
    return portion.portion.host
