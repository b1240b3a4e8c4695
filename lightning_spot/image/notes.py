"""What each of several hosts leaves beside the files that it has brought to storage: from all of it, a manifest.

A snapshot that hosts bring there by themselves has parts of which no host has all bytes. So each notes the checksums of
its own pieces, and who finds the notes of all hosts makes the manifest of them, whichever host that is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from lightning_spot.errors import CorruptSnapshotError, MalformedError, SettingsError
from lightning_spot.image.files import FileSpan, check_files, pieces
from lightning_spot.image.manifest import MOST_HOSTS, Manifest
from lightning_spot.image.parts import checksum, part_ranges
from lightning_spot.image.portion import whole_of
from lightning_spot.threads import all_at_once
from lightning_spot.untrusted import (
    LARGE_BYTES,
    MOST_BYTES,
    file_name,
    integer,
    items,
    line,
    read_object,
    read_sealed,
    sealed_json,
)

_MOST_PIECES = 2**21
_READERS = 8

Piece = tuple[int, int, str]
"""First byte in the image, length and checksum of bytes that one host has, all within one part."""


@dataclass(frozen=True, slots=True)
class Own:
    """What a layout says of the host that brings a portion by itself.

    Attributes:
        files: that it writes.
    """

    files: tuple[FileSpan, ...]

    def to_dict(self) -> dict[str, object]:
        """As entries of a layout, which is a JSON object."""
        return {"files": [[file.name, file.offset, file.nbytes] for file in self.files]}


@functools.lru_cache(maxsize=4)  # it stays the same from one snapshot to the next
def read_own(layout: str) -> Own:
    """Read it from a layout.

    Raises:
        SettingsError: if it is not there, or malformed.
    """
    try:
        fields = read_object(layout, LARGE_BYTES)
        files = tuple(FileSpan(*item) for item in fields["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"a layout says nothing of the files that this host brings: {error}") from error
    if problem := check_files(files, MOST_BYTES):
        raise SettingsError(f"a layout contradicts itself: {problem}")
    return Own(files)


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What a host has brought of a snapshot.

    Attributes:
        name: of the snapshot.
        host: its number, from 0.
        hosts: how many there are.
        digest: what all of them must agree on: a checksum of the layout.
        pieces: all bytes that it has, in order.
        manifest: of the snapshot, without checksums; of host 0 only, and not where there is a :attr:`portion`.
        portion: its manifest, if this host's portion lay at a snapshot server by itself: then it has no pieces.
    """

    name: str
    host: int
    hosts: int
    digest: str
    pieces: tuple[Piece, ...]
    manifest: Manifest | None = None
    portion: Manifest | None = None

    @classmethod
    def of_portion(cls, portion: Manifest) -> Note:
        """The note of a portion that lay at a snapshot server by itself."""
        of = portion.portion
        if of is None:
            raise CorruptSnapshotError(f"{portion.name} is no host's portion of a snapshot")
        return cls(name=portion.snapshot, host=of.host, hosts=of.hosts, digest=of.digest, pieces=(), portion=portion)

    def to_json(self) -> str:
        """The note as JSON text."""
        manifest = self.manifest.to_dict() if self.manifest is not None else None
        fields = {"name": self.name, "host": self.host, "hosts": self.hosts, "digest": self.digest}
        portion = {"portion": self.portion.to_dict()} if self.portion is not None else {}
        return sealed_json({**fields, "pieces": self.pieces, "manifest": manifest, **portion})

    @classmethod
    def from_json(cls, text: str | bytes) -> Note:
        """Read a note.

        Raises:
            CorruptSnapshotError: if it is damaged or contradicts itself.
        """
        try:
            fields = read_sealed(text, LARGE_BYTES)
            if fields.get("portion") is not None:
                return cls.of_portion(Manifest.from_dict(fields["portion"]))
            noted = fields.get("manifest")
            note = cls(
                name=file_name(fields, "name", None),
                host=integer(fields, "host", None, 0, MOST_HOSTS),
                hosts=integer(fields, "hosts", None, 1, MOST_HOSTS),
                digest=line(fields, "digest", None),
                pieces=tuple(_piece(item) for item in items(fields, "pieces", _MOST_PIECES)),
                manifest=Manifest.from_dict(noted) if noted is not None else None,
            )
        except MalformedError as error:
            raise CorruptSnapshotError(f"the note of a host is damaged: {error}") from error
        named = note.manifest is None or note.manifest.name == note.name
        if not named or note.host >= note.hosts or (note.manifest is not None) != (note.host == 0):
            raise CorruptSnapshotError(f"the note of host {note.host} of {note.hosts} contradicts itself")
        return note


def _piece(item: object) -> Piece:
    if not isinstance(item, list) or len(item) != 3:
        raise MalformedError("a piece is no place, length and checksum")
    fields = dict(zip(("place", "length", "checksum"), item, strict=True))
    return (
        integer(fields, "place", None, 0, MOST_BYTES),
        integer(fields, "length", None, 1, MOST_BYTES),
        line(fields, "checksum", None, most=32),
    )


def missing(notes: Mapping[int, Note]) -> list[int]:
    """Hosts whose notes are not there yet; host 0 if there is none at all."""
    hosts = max((note.hosts for note in notes.values()), default=1)
    return [host for host in range(hosts) if host not in notes]


def spans_of(notes: Iterable[Note]) -> tuple[FileSpan, ...] | None:
    """The files of the snapshot of which these are notes of all hosts; ``None`` if nobody says it."""
    found: list[FileSpan] = []
    for note in notes:
        found += note.portion.files if note.portion is not None else note.manifest.spans if note.manifest else ()
    return tuple(found) or None


def sealed(notes: Iterable[Note], read: Callable[[FileSpan, int, int], bytes]) -> Manifest:
    """The manifest of a snapshot, of the notes of all hosts. Whoever makes it makes the same.

    Args:
        notes: of all hosts.
        read: gives bytes of one of its files, from one place in the file to another: where a part is not one host's,
            its checksum is made again. Called on several threads.

    Raises:
        CorruptSnapshotError: if the notes do not fit each other, or bytes are not those that were noted.
    """
    by_host = sorted(notes, key=lambda note: note.host)
    portions = [note.portion for note in by_host if note.portion is not None]
    if portions:
        return whole_of(portions)
    first = by_host[0]
    manifest = first.manifest
    if manifest is None:
        raise CorruptSnapshotError(f"the first host has left no note of {first.name}")
    for note in by_host:
        if (note.name, note.hosts, note.digest) != (first.name, first.hosts, first.digest):
            raise CorruptSnapshotError(f"host {note.host} has another layout of {first.name} than the first host")
    found = sorted(piece for note in by_host for piece in note.pieces)
    ends = [0, *(start + nbytes for start, nbytes, _ in found)]
    if [start for start, _, _ in found] != ends[:-1] or ends[-1] != manifest.nbytes:
        raise CorruptSnapshotError(f"what the hosts have brought of {first.name} is not every byte of it once")
    source, parts = iter(found), list[list[Piece]]()
    for start, stop in part_ranges(manifest.nbytes, manifest.part_bytes):
        of_part: list[Piece] = []
        while sum(nbytes for _, nbytes, _ in of_part) < stop - start:
            of_part.append(next(source))
        if of_part[-1][0] + of_part[-1][1] != stop:
            raise CorruptSnapshotError(f"the hosts have cut {first.name} into other parts than its manifest")
        parts.append(of_part)

    def checksum_of(of_part: list[Piece]) -> str:
        return of_part[0][2] if len(of_part) == 1 else _whole(manifest, of_part, read)

    with ThreadPoolExecutor(_READERS) as pool:
        return replace(manifest, checksums=tuple(pool.map(checksum_of, parts)))


def _whole(manifest: Manifest, found: list[Piece], read: Callable[[FileSpan, int, int], bytes]) -> str:
    """The checksum of a part that several hosts have brought, each of whose pieces is checked."""
    begin, end = found[0][0], sum(found[-1][:2])
    wanted = list(pieces(manifest.spans, begin, end))

    def bring(span: FileSpan | None, first: int, last: int) -> bytes:
        return bytes(last - first) if span is None else read(span, first - span.offset, last - span.offset)

    # Far away, each of them takes as long as all together.
    came = all_at_once([functools.partial(bring, *each) for each in wanted], "spot-note", _READERS)
    data = memoryview(b"".join(came))
    for start, nbytes, noted in found:
        piece = data[start - begin : start - begin + nbytes]
        if len(data) != end - begin or checksum(piece) != noted:
            raise CorruptSnapshotError(
                f"bytes {start}–{start + nbytes} of {manifest.name} are not those that were brought"
            )
    return checksum(data)
