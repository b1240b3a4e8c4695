"""A snapshot whose portions lie apart, each at a server of its own: the whole is made of their manifests.

In the whole, each portion begins with a new part, so that the checksums of all parts are known without reading a byte.
What lies between the end of a portion and the next part is zero, and in no file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.image.files import FileSpan, check_files
from lightning_spot.image.manifest import Manifest, PortionOf, portion_name
from lightning_spot.image.parts import checksum


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
