"""The storage of a run: put a snapshot, list what is committed, fetch it, delete it, claim an attempt.

How storage lays a run out below its URL::

    run-1/
      attempts/attempt-0001.json           who wrote, so that a later attempt fences an earlier one
      step-000000400-attempt-0001/
        model.ckpt                         an ordinary Lightning checkpoint; or the files of a sharded one
        manifest.json                      written last: without it the snapshot does not exist
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from lightning_spot.errors import CorruptSnapshotError, FencedError, SpotError, TierError, TierReason
from lightning_spot.say import say
from lightning_spot.snapshot.files import FileSpan, check_zero, is_note, is_own_file, pieces
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, Order, snapshot_order
from lightning_spot.snapshot.parts import checksum, part_ranges
from lightning_spot.snapshot.shards import (
    Image,
    Status,
    assemble,
    by_snapshot,
    cut_out,
    registers_of,
    slices,
    status,
)
from lightning_spot.store.fences import (
    ATTEMPTS_DIR,
    Claim,
    Owner,
    Rewind,
    Standing,
    check_claim,
    check_fence,
    check_owner,
    claim_name,
    claimed_in,
    forgettable,
    highest_claim,
    read_twice,
    rewinds_in,
)
from lightning_spot.threads import in_turn
from lightning_spot.untrusted import LARGE_JSON_BYTES

Result = TypeVar("Result")

Progress = Callable[[int], None]
"""Called with the number of bytes just moved."""


class Target(Protocol):
    """What the file of a snapshot is written to: memory, or a file; from any thread."""

    def __setitem__(self, where: slice, data: memoryview, /) -> None:
        """Write bytes."""


@dataclass(slots=True)
class Holdings:
    """What a tier that answered holds of a run; all empty when nothing is there.

    Attributes:
        manifests: of committed snapshots, newest first.
        unreadable: name of each snapshot whose manifest is there but cannot be used, and why.
        highest_attempt: over claims, manifests and the names of snapshots, committed or not; 0 if there is none.
        unfinished: names of snapshots that are not committed.
        shards: registers of snapshots that several ranks write, as far as they are at this tier.
        attempts: files in the folder of claims.
        rewinds: that were asked for in storage.
        copies: by the name of each snapshot or shard in memory, whether another copy is on its way, and whether it is
            at all its destinations.
    """

    manifests: list[Manifest] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    highest_attempt: int = 0
    unfinished: list[str] = field(default_factory=list)
    shards: list[Manifest] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    rewinds: list[Rewind] = field(default_factory=list)
    copies: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    def sets_aside(self, order: Order | None) -> bool:
        """Whether a rewind has set the snapshot of that order aside, see :class:`Rewind`."""
        return any(rewind.sets_aside(order) for rewind in self.rewinds)


_MOST_DAMAGED = 8  # claims that are read to find one that is not

SETTLED_S = 3600.0
"""A temporary or uncommitted snapshot of a live attempt that was not written to for so long has no writer any more."""

Writer = tuple[int, str]
"""On whose behalf something is written: an attempt, and its run's identity."""

Ready = Callable[[], None]
"""Called when all bytes of a file have come, before it becomes visible; before the first one does, of several."""


def nothing() -> None:
    """Nothing has to be done before an object becomes visible."""


def fetch_ranges(
    read: Callable[[int, memoryview], object],
    ranges: Iterable[tuple[int, int]],
    into: Target,
    progress: Progress | None,
    threads: int,
) -> None:
    """Read ranges of a snapshot side by side.

    Each comes into memory of its thread, and is written whole: new memory that is received into costs twice as much.

    Args:
        read: reads from a byte on, and checks it.
        ranges: first byte, and the one behind the last.
        into: where to.
        progress: called with the number of bytes that have just come.
        threads: how many read at a time.
    """
    bounds = list(ranges)
    longest = max((stop - start for start, stop in bounds), default=0)
    buffers = [memoryview(bytearray(longest)) for _ in range(min(threads, len(bounds)))]

    def fetch(found: tuple[int, int]) -> None:
        start, stop = found
        buffer = buffers.pop()
        part = buffer[: stop - start]
        read(start, part)
        into[start:stop] = part
        buffers.append(buffer)
        if progress is not None:
            progress(stop - start)

    in_turn(bounds, fetch, threads, "spot-fetch")


class NotedParts:
    """Parts on their way through :meth:`Store.put_parts`, their checksums noted for the manifest.

    Args:
        manifest: not sealed.
        parts: of its file, in order; each is valid until the next one is asked for.
    """

    def __init__(self, manifest: Manifest, parts: Iterable[memoryview]) -> None:
        self._manifest, self._parts = manifest, parts
        self._noted: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return self._manifest.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        for part in self._parts:
            self._noted.append((checksum(part), len(part)))
            yield part

    def sealed(self) -> Manifest:
        """The manifest, once all parts have passed.

        Raises:
            CorruptSnapshotError: if the parts are not those that the manifest announced.
        """
        manifest, sizes = self._manifest, [nbytes for _, nbytes in self._noted]
        wanted = [stop - start for start, stop in part_ranges(manifest.nbytes, manifest.part_bytes)]
        if sizes != wanted:
            what = f"{sum(sizes)} bytes in {len(sizes)} parts, not as {manifest.nbytes} bytes in {len(wanted)}"
            raise CorruptSnapshotError(f"{manifest.name} came as {what}; it is not committed")
        return replace(manifest, checksums=tuple(digest for digest, _ in self._noted))


Data = Image | NotedParts
"""The bytes of a file, see :func:`parts_of`."""


def parts_of(data: Data, most: int) -> Iterator[memoryview]:
    """The bytes of a file, each part done with when the next one is asked for; of an image, of at most so many."""
    return iter(data) if isinstance(data, NotedParts) else slices(data, most)


class Store(ABC):
    """The storage of one run: a directory, or a place in a bucket. Each passes ``tests/integration/test_stores.py``.

    Methods may be called from any thread. "Nothing there" and "could not be read" are two things: what is not there is
    an empty answer or :class:`~lightning_spot.errors.SnapshotNotFoundError`, what could not be read or written is
    :class:`~lightning_spot.errors.TierError`, bytes that are not those that were committed are
    :class:`~lightning_spot.errors.CorruptSnapshotError`.

    Files are named by their path below the run, ``below``. The name of a snapshot is given once, so that nothing but
    users' files, and what was left half, is written over.

    Args:
        url: of the run.
        is_lent: whether a server acts for others: then of users' files only those that have a manifest of ours are
            replaced or deleted.

    Attributes:
        url: of the run.
        owner: the attempt on whose behalf this object writes and deletes. What it does asks for its claim, again before
            each manifest and each deletion; whoever has another one is refused. ``None`` where nothing is claimed, as
            for users' files: then only numbers count.
    """

    owner: Owner | None = None
    _at_once_bytes = 128 * 1024 * 1024  # written: 0.06 s of the kernel's CPU a GiB; 0.10 s with 8 MiB, or all at once
    _checks_what_comes = False
    """Whether the tier acknowledges only bytes that have the checksum they were sent with, and keeps them so."""

    def __init__(self, url: str, *, is_lent: bool) -> None:
        self.url, self._is_lent = url, is_lent

    # -- operations on files --------------------------------------------------------------------------------------

    @abstractmethod
    def _errors(self, *, reading: bool = False) -> AbstractContextManager[None]:
        """Turn errors of the library into ours, see :func:`~lightning_spot.store.posix.tier_errors`."""

    @abstractmethod
    def _all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do several things that only read; at once where that is faster."""

    @abstractmethod
    def _names(self, below: str) -> list[str]:
        """Names in a folder; empty if there is none."""

    @abstractmethod
    def _sizes(self, below: str) -> dict[str, int]:
        """The files in a folder; empty if there is none."""

    @abstractmethod
    def _size(self, below: str) -> int | None:
        """Bytes of a file; ``None`` if it is not there."""

    @abstractmethod
    def _read(self, below: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some of a file.

        Raises:
            FileNotFoundError: if it is not there.
            CorruptSnapshotError: if it is no file.
        """

    @abstractmethod
    def _fill(self, below: str, start: int, into: memoryview) -> int:
        """Read a file from byte ``start`` on; how many bytes there were."""

    @abstractmethod
    def _readers(self, part_bytes: int) -> int:
        """How many threads read a snapshot of such parts."""

    @abstractmethod
    def _write(self, contents: Mapping[str, Data], by: Writer, ready: Ready = nothing) -> None:
        """Write files of one folder, each in place of what is there, whole or not at all.

        When this returns they are durable. On a disk all are written, or none where it is full.

        Args:
            contents: their bytes, by their path.
            by: on whose behalf.
            ready: see :data:`Ready`.
        """

    @abstractmethod
    def _create(self, below: str, data: bytes, by: Writer) -> None:
        """Create a file, whole or not at all, unless there is one."""

    @abstractmethod
    def _remove(self, below: str, names: Sequence[str]) -> None:
        """Remove files of a folder, if they are there, and it if it is empty then; one that fails keeps no other."""

    @abstractmethod
    def _settle(self, *belows: str) -> None:
        """Make the names of files durable that another process has written, or removed."""

    @abstractmethod
    def _is_settled(self, name: str, files: Sequence[str], current: Manifest) -> bool:
        """Whether these files of a folder, and it, were last written to :data:`SETTLED_S` before a manifest was.

        The tier's clock has stamped both: that of this host may be hours off.
        """

    @abstractmethod
    def _sweep_temporaries(self, current: Manifest) -> None:
        """Remove what killed writers left beside its place: of the run of a snapshot, or of a file of users'."""

    # -- what is there --------------------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """What the tier holds of the run, in a bounded number of requests; all empty when it holds nothing.

        Snapshots whose manifest is there but cannot be used are named in :attr:`Holdings.unreadable`.

        Raises:
            TierError: if the tier could not be listed, or its bucket does not exist.
        """
        found = Holdings()
        with self._errors():
            listed, found.attempts = self._all([partial(self._names, below) for below in ("", ATTEMPTS_DIR)])
            if found.attempts and ATTEMPTS_DIR not in listed:  # a gateway's page, or an answer without a body
                why = f"the listing of {self.url} does not show {ATTEMPTS_DIR}/, in which there are files"
                raise TierError(why, tier=self.url)
            names = [name for name in listed if snapshot_order(name) is not None]
            for name, manifest in zip(
                names, self._all([partial(self._committed, name) for name in names]), strict=True
            ):
                if isinstance(manifest, Manifest):
                    found.manifests.append(manifest)
                elif manifest:
                    found.unreadable[name] = manifest
                else:
                    found.unfinished.append(name)
        found.manifests, found.rewinds = newest_first(found.manifests), rewinds_in(found.attempts)
        found.highest_attempt = highest_attempt(highest_claim(found.attempts), names, found.manifests)
        return found

    def claimed(self) -> int:
        """Highest attempt that has claimed the run, 0 if none: the fence. One cheap request.

        Raises:
            TierError: if it could not be read.
        """
        with self._errors():
            return highest_claim(self._names(ATTEMPTS_DIR))

    def rewinds(self) -> list[Rewind]:
        """Those that were asked for. One cheap request.

        Raises:
            TierError: if it could not be read.
        """
        with self._errors():
            return rewinds_in(self._names(ATTEMPTS_DIR))

    def newest_claim(self) -> Claim | None:
        """The claim of the highest attempt that can be read, ``None`` if nobody has claimed the run.

        Raises:
            CorruptSnapshotError: if there are claims and the newest few are all damaged.
            TierError: if it could not be read.
        """
        damage: CorruptSnapshotError | None = None
        with self._errors():
            for attempt in claimed_in(self._names(ATTEMPTS_DIR))[:_MOST_DAMAGED]:
                try:
                    return self._read_claim(attempt)
                except FileNotFoundError:
                    continue  # removed meanwhile
                except CorruptSnapshotError as error:
                    damage = damage or error
                    where = f"{self.url}/{ATTEMPTS_DIR}/{claim_name(attempt)}"
                    say(logging.WARNING, "claim-damaged", "{about} cannot be used: {error}", about=where, error=error)
        if damage is not None:
            raise damage
        return None

    def claim_of(self, attempt: int) -> Claim | None:
        """The claim of an attempt, also where it is not listed; ``None`` if there is none, or it is damaged.

        Raises:
            TierError: if it could not be read.
        """
        with self._errors():
            return self._claim_of(attempt)

    def has(self, manifest: Manifest) -> bool:
        """Whether this very snapshot is committed: its manifest is read back and equal, its file has its size.

        Raises:
            TierError: if it could not be read.
        """
        with self._errors():
            noted, sizes = self._all([lambda: self._noted(manifest), lambda: self._sizes_of(manifest)])
        return bool(noted == manifest and sizes == [span.nbytes for span in manifest.spans])

    def inode(self) -> int:
        """Inode of the attempts directory, by which a copied run is told from a moved one; 0 if there is none."""
        return 0

    def folder(self, name: str, *, attempt: int, run_id: str) -> Folder:
        """The folder of a snapshot, or that of claims.

        Args:
            name: of the folder.
            attempt: on whose behalf it is written to.
            run_id: of its run.
        """
        return Folder(self, name, (attempt, run_id))

    def _small(self, below: str) -> bytes:
        """A manifest or claim.

        Raises:
            FileNotFoundError: if it is not there.
            CorruptSnapshotError: if it is too long for one.
        """
        data = self._read(below, 0, LARGE_JSON_BYTES + 1)
        if len(data) > LARGE_JSON_BYTES:
            raise CorruptSnapshotError(f"{self.url}/{below} is too long for what it should be")
        return data

    def _manifest_at(self, below: str) -> Manifest | CorruptSnapshotError | None:
        """The manifest there, why it cannot be used, or ``None`` if there is none."""
        try:
            return read_twice(lambda: Manifest.from_json(self._small(below)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptSnapshotError as error:
            return error

    def _noted(self, manifest: Manifest) -> Manifest | CorruptSnapshotError | None:
        """What is at the place of a manifest now."""
        return self._manifest_at(manifest.manifest_path)

    def _committed(self, name: str) -> Manifest | str | None:
        """Manifest of a snapshot, ``None`` if it has none, or why it cannot be read."""
        try:
            with self._errors():
                manifest = self._manifest_at(f"{name}/{MANIFEST_FILE}")
        except SpotError as error:
            return str(error)
        if not isinstance(manifest, Manifest):
            return str(manifest) if manifest is not None else None
        return manifest if manifest.name == name else f"its manifest is that of {manifest.name}"

    def _read_claim(self, attempt: int) -> Claim:
        """The claim of an attempt.

        Raises:
            FileNotFoundError: if it is not there.
            CorruptSnapshotError: if it is damaged, or another one's.
        """
        name = claim_name(attempt)
        claim = read_twice(lambda: Claim.from_json(self._small(f"{ATTEMPTS_DIR}/{name}")))
        if claim.attempt != attempt:
            raise CorruptSnapshotError(f"{name} holds the claim of attempt {claim.attempt}")
        return claim

    def _claim_of(self, attempt: int) -> Claim | None:
        try:
            return self._read_claim(attempt)
        except (FileNotFoundError, CorruptSnapshotError):
            return None

    def _sizes_of(self, manifest: Manifest) -> list[int | None]:
        """Size of each file of a snapshot, ``None`` for one that is not there; in one request if all are listed."""
        listed = self._sizes(manifest.name) if manifest.files else {}
        return [
            listed[span.name] if span.name in listed else self._size(manifest.path_of(span)) for span in manifest.spans
        ]

    def _read_image(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read the image from byte ``start`` on, unchecked.

        Raises:
            CorruptSnapshotError: if a file is too short.
        """

        def fill(span: FileSpan | None, first: int, last: int) -> None:
            target = into[first - start : last - start]
            if span is None:
                target[:] = bytes(len(target))
            elif (count := self._fill(manifest.path_of(span), first - span.offset, target)) < len(target):
                where = f"{self.url}/{manifest.path_of(span)}"
                there = first - span.offset + count
                raise CorruptSnapshotError(f"{where} is cut short: {there} of {span.nbytes} bytes came", where=where)

        self._all([partial(fill, *piece) for piece in pieces(manifest.spans, start, start + len(into))])

    def _read_checked(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read one of ``manifest.ranges()``.

        Raises:
            CorruptSnapshotError: if it is not what was committed.
        """
        self._read_image(manifest, start, into)
        manifest.verify_range(start, into, self.url)

    def fetch(self, manifest: Manifest, into: Target, progress: Progress | None = None) -> None:
        """Read the file of a snapshot into ``into`` (``manifest.nbytes`` long), and check every part as it comes.

        Raises:
            SnapshotNotFoundError: if it is not there.
            CorruptSnapshotError: if it is shorter, or a part has not the checksum it was committed with.
            TierError: if it could not be read.
        """
        read, ranges = partial(self._read_checked, manifest), manifest.ranges()
        with self._errors(reading=True):
            fetch_ranges(read, ranges, into, progress, self._readers(manifest.part_bytes))

    def _has_the_bytes(self, manifest: Manifest) -> bool:
        try:
            for start, stop in manifest.ranges():
                self._read_checked(manifest, start, memoryview(bytearray(stop - start)))
        except (SpotError, OSError):  # what cannot be read is written anew
            return False
        return True

    # -- who may change what --------------------------------------------------------------------------------------

    def check_owner(self) -> None:
        """Whether the claim of :attr:`owner` is there, and its own; nothing where there is no owner. One cheap request.

        Raises:
            FencedError: if another trainer has claimed that number.
            TierError: if nobody has, or it could not be read.
        """
        if (owner := self.owner) is not None:
            with self._errors():
                claim = self._claim_of(owner.attempt)
            check_owner(owner, claim, self.url)

    def check_fence(self, run: str, attempt: int) -> None:
        """Refuse to act for an attempt that does not hold the run, see :meth:`check_owner`.

        Raises:
            FencedError: if a later one has claimed it, or another trainer that number.
            TierError: if the claims could not be read.
        """
        self._all([lambda: check_fence(run, attempt, self.claimed()), self.check_owner])

    def _check_owner(self, run: str) -> None:
        """Refuse to delete anything for an attempt that does not hold the run any more."""
        if self.owner is not None:
            self.check_fence(run, self.owner.attempt)

    def _check_fences(self, manifest: Manifest, attempt: int) -> None:
        """Refuse to write for an attempt that does not hold the run, or over a later one's file."""
        self.check_fence(manifest.run, attempt)
        if manifest.is_file:
            with self._errors():
                noted = self._noted(manifest)
            if isinstance(noted, Manifest) and (noted.run_id, noted.run) == (manifest.run_id, manifest.run):
                check_fence(manifest.run, manifest.attempt, noted.attempt)

    # -- changes --------------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> None:
        """Record that an attempt writes the run from now on. The same claim again does nothing.

        Of two claims of one number the tier takes the first, where it can create a file exclusively. Elsewhere the
        last one stays, and :meth:`check_owner` tells the other.

        Raises:
            FencedError: if that number, under another token, or a later one is taken.
            TierError: if it could not be written.
        """
        below = f"{ATTEMPTS_DIR}/{claim_name(claim.attempt)}"
        with self._errors():
            # Looked at before, too: three of four servers that speak S3 create over what is there, without an error.
            claimed, existing = self._all([self.claimed, lambda: self._claim_of(claim.attempt)])
            check_fence(claim.location, claim.attempt, claimed)
            if existing is None:
                self._create(below, claim.to_json().encode(), (claim.attempt, claim.run_id))
                existing = self._claim_of(claim.attempt)  # of two writers, the last one may have won
            check_claim(claim, existing)
            self._settle(below)  # the attempt that wrote it may have been killed before it did

    def put(self, manifest: Manifest, image: Image, *, attempt: int) -> None:
        """Store a snapshot or file; when this returns it is committed and as durable as the tier is.

        Args:
            manifest: sealed manifest of the snapshot.
            image: its file; not kept.
            attempt: attempt on whose behalf it is written; refused if a later one has claimed the run. A file is
                refused, too, if one of its name is there that a later attempt than its own has written.

        Raises:
            FencedError: if a later attempt holds the run.
            TierError: if it could not be written. What was there before is there still.
        """
        with self._errors():
            _, noted = self._all([lambda: self._check_fences(manifest, attempt), lambda: self._noted(manifest)])
            if noted == manifest and self.has(manifest) and (self._checks_what_comes or self._has_the_bytes(manifest)):
                # A server that takes over from a killed one may not know that this was committed, and must not undo it.
                # Its predecessor may have been killed before the names were durable.
                self._settle(manifest.path_of(manifest.spans[0]), manifest.manifest_path, manifest.name)
                return
        self._commit(manifest, image, attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """Store a snapshot, or file, of one file that never is in memory as a whole; like :meth:`put` otherwise.

        Args:
            manifest: without checksums; its ``nbytes`` is the sum of the parts.
            parts: consecutive parts of ``manifest.part_bytes`` each, but the last; each is done with when the next one
                is asked for. An error raised by it is passed on, and nothing is committed.
            attempt: as in :meth:`put`.

        Returns:
            the sealed manifest.
        """
        assert not manifest.files
        self._check_fences(manifest, attempt)
        return self._commit(manifest, NotedParts(manifest, parts), attempt)

    def _commit(self, manifest: Manifest, data: Data, attempt: int) -> Manifest:
        """Write the bytes, then the manifest; whatever fails, none with checksums stands beside other bytes.

        Args:
            manifest: of it, with no checksums yet if it comes in parts.
            data: the bytes.
            attempt: on whose behalf.
        """
        by = (attempt, manifest.run_id)
        with self._errors():
            sealed = self._write_bytes(manifest, data, by)

            for span, size in zip(manifest.spans, self._sizes_of(manifest), strict=True):
                if size != span.nbytes:
                    what = manifest.path_of(span)
                    why = f"{self.url} shows {size} of {span.nbytes} bytes of {what}: it is written again"
                    raise TierError(why, tier=self.url)
        self.note(sealed, attempt=attempt)
        if sealed.files:
            self._remove_notes(sealed.name)
        return sealed

    def _remove_notes(self, name: str) -> None:
        """Remove what writers have noted of a snapshot; it is committed all the same where that fails."""
        with contextlib.suppress(TierError), self._errors():
            self._remove(name, [file for file in self._names(name) if is_note(file)])

    def note(self, manifest: Manifest, *, attempt: int) -> None:
        """Write the manifest of what is there; of two starts at once, that of the one that keeps the number stays.

        Args:
            manifest: sealed.
            attempt: on whose behalf.

        Raises:
            FencedError: if the other one has taken the number, even just now.
            TierError: if it could not be written.
        """
        with self._errors():
            self.check_owner()
            self._write_manifest(manifest, (attempt, manifest.run_id))
            self._settle(manifest.name)
            try:
                self.check_owner()
            except FencedError:
                if not manifest.is_file and self._noted(manifest) == manifest:
                    self._unnote(manifest)  # the other one may write the same files: they are swept
                raise

    def _write_bytes(self, manifest: Manifest, data: Data, by: Writer) -> Manifest:
        """Write the files of an image, with no manifest of other bytes beside them; the sealed manifest.

        Raises:
            CorruptSnapshotError: if a byte that is in no file is not zero.
        """
        sealed = data.sealed if isinstance(data, NotedParts) else lambda: manifest
        files: dict[str, Data] = {manifest.data_path: data}
        if manifest.files and not isinstance(data, NotedParts):
            for gap, start, stop in pieces(manifest.spans, 0, len(data)):
                if gap is None:
                    check_zero(data[start:stop])
            files = {manifest.path_of(span): cut_out(data, span.offset, span.stop) for span in manifest.spans}
        self._write(files, by, lambda: self._make_way(sealed(), by))
        return sealed()

    def _make_way(self, manifest: Manifest, by: Writer) -> None:
        """The first file is about to become visible: have no manifest of other bytes stand beside it.

        Beside a user's file there is always one, so that it is known as ours whatever fails next: without checksums
        until its bytes are there.
        """
        self.check_owner()  # again: it has taken its time
        if manifest.is_file:
            self._check_fences(manifest, by[0])
        noted = self._noted(manifest)
        if noted is None and manifest.is_file and self._is_lent and self._size(manifest.name) is not None:
            what = f"{self.url}/{manifest.name}"
            why = f"{what} was not saved by lightning_spot: it stays as it is. Save under another name"
            raise FencedError(why, current=manifest.attempt)
        if noted == manifest:  # the very same, once more, stays durable meanwhile
            return
        if manifest.is_file:
            self._write_manifest(replace(manifest, checksums=()), by)
        elif noted is not None:
            self._unnote(manifest)

    def _write_manifest(self, manifest: Manifest, by: Writer) -> None:
        self._write({manifest.manifest_path: memoryview(manifest.to_json().encode())}, by)

    def _unnote(self, manifest: Manifest) -> None:
        """Remove a manifest; it is gone also after a loss of power."""
        folder, _, name = manifest.manifest_path.rpartition("/")
        self._remove(folder, [name])
        self._settle(manifest.manifest_path)

    def delete(self, manifest: Manifest, *, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Remove a snapshot: first its manifest, then its bytes, and no other file. Nothing happens if it is gone.

        Nor if another snapshot of its name is there, such as that of a trainer on another machine; nor if a later
        attempt of the same run than that of ``manifest`` has written a file of its name meanwhile.

        Args:
            manifest: of it.
            wanted: asked without the manifest there: whether it is to stay after all. Who wants it says so first, and
                looks for the manifest then, so that one of the two sees the other.

        Returns:
            whether nobody wanted it.

        Raises:
            FencedError: if :attr:`owner` does not hold the run any more.
        """
        with self._errors():
            _, noted = self._all([lambda: self._check_owner(manifest.run), lambda: self._noted(manifest)])
            if not self._is_meant(manifest, noted):
                why = "it is another one, or not ours"
                say(logging.INFO, "not-deleted", "{about} stays: {why}", about=f"{self.url}/{manifest.name}", why=why)
                return True
            self._unnote(manifest)  # never at once with the others: not without its bytes
            if wanted():
                self._write_manifest(manifest, (manifest.attempt, manifest.run_id))
                return False
            self._remove("" if manifest.is_file else manifest.name, [span.name for span in manifest.spans])
        return True

    def _is_meant(self, manifest: Manifest, noted: object) -> bool:
        """Whether a manifest may delete what is noted at its place: another trainer may have written it."""
        if not isinstance(noted, Manifest):
            return not (manifest.is_file and self._is_lent)
        if not manifest.is_file:
            return (noted.lineage, noted.checksums) == (manifest.lineage, manifest.checksums)
        return noted.attempt <= manifest.attempt or (noted.run_id, noted.run) != (manifest.run_id, manifest.run)

    def sweep_files(self, current: Manifest) -> None:
        """Remove what killed writers of files left behind, in a folder in which other processes may save, too.

        That is: temporaries. At once if the writer was a process of this machine that has ended, else once they have
        not been touched for :data:`SETTLED_S`.

        Args:
            current: of a file that was just written there.
        """
        with self._errors():
            self._sweep_temporaries(current)

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """Remove what killed writers left behind, after ``current`` was committed here; nothing that is not our own.

        That is: temporaries, and uncommitted snapshots older than ``current`` that hold nothing but our own files. Of
        attempts before that of ``current``, which are fenced, at once; of its own, whose other writers may be alive,
        once they have not been touched for :data:`SETTLED_S`.

        Args:
            current: a snapshot that is committed here.
            seen: what :meth:`survey` has just shown; ``None`` to ask.
        """
        self._check_owner(current.run)
        seen = seen or self.survey()
        orders = {name: snapshot_order(name) for name in seen.unfinished}
        older = [name for name, order in orders.items() if order is not None and order < current.order]
        old = forgettable(seen.attempts, current.attempt)
        with self._errors(), contextlib.ExitStack() as each:  # one place that fails keeps nothing else from being swept
            if old:
                each.callback(self._remove, ATTEMPTS_DIR, old)
            for name in older:
                each.callback(self._sweep_snapshot, name, current)
            self._sweep_temporaries(current)

    def _sweep_snapshot(self, name: str, current: Manifest) -> None:
        """Remove an uncommitted snapshot that holds nothing but our own files."""
        order = snapshot_order(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files = self._names(name)
            is_left = (order is not None and order[0] < current.attempt) or self._is_settled(name, files, current)
            if not all(map(is_own_file, files)) or not is_left:
                return
            if self._size(f"{name}/{MANIFEST_FILE}") is None:  # a listing may be older than the manifest
                self._remove(name, files)


class Folder:
    """The files of one folder of a store. Methods may be called from any thread.

    All of them raise :class:`~lightning_spot.errors.TierError` if the tier fails.

    Args:
        store: of the run.
        name: of the folder.
        by: on whose behalf it is written to.
    """

    def __init__(self, store: Store, name: str, by: Writer) -> None:
        self._store, self._name, self._by = store, name, by

    def sizes(self) -> dict[str, int]:
        """The files that are there, with their sizes; empty if there is no such folder."""
        with self._store._errors():
            return self._store._sizes(self._name)

    def write(self, name: str, data: Image) -> None:
        """Write a file, in place of what is there, whole or not at all; when this returns it is durable."""
        self.write_all({name: data})

    def write_all(self, contents: Mapping[str, Image]) -> None:
        """Write several files, by name, each as by :meth:`write`; side by side in an object store."""
        with self._store._errors():
            self._store._write({f"{self._name}/{name}": data for name, data in contents.items()}, self._by)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some of a file, by default all of it.

        Raises:
            SnapshotNotFoundError: if it is not there.
        """
        with self._store._errors(reading=True):
            return self._store._read(f"{self._name}/{name}", start, stop)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; nothing happens to those that are gone. Where one cannot be removed, the others are."""
        with self._store._errors():
            self._store._remove(self._name, names)


def check_claimed(store: Store, attempt: int) -> None:
    """Refuse to write for a later attempt what one has left that never claimed the run: it may be a stranger's.

    Raises:
        TierError: if there is no claim of that number, or it could not be read.
    """
    store.owner = Owner(attempt, "")
    with contextlib.suppress(FencedError):  # there is one: whose it is, that attempt was asked when it opened the run
        store.check_owner()


def on_behalf(store: Store, standing: Standing, action: Callable[[], Result]) -> Result:
    """Do something at a tier for an attempt. What its trainer, who may be gone, could not claim is claimed for it.

    Raises:
        FencedError: if another one has claimed it.
        TierError: if nobody has, and this server may not.
        SpotError: whatever else failed.
    """
    store.owner = standing.owner
    try:
        return action()
    except TierError as error:
        if error.reason is not TierReason.UNCLAIMED or standing.claim is None:
            raise
    claim_late(store, standing.claim)
    return action()


def claim_late(store: Store, claim: Claim) -> None:
    """Claim for an attempt what could not be claimed when it began, or was removed since.

    Where all was removed and another run has begun since, numbers begin again: there, a higher one is no later attempt.

    Raises:
        FencedError: if another run, or a later attempt, has claimed it.
        TierError: if it could not be read or written.
    """
    newest = store.newest_claim()
    if newest is not None and newest.run_id != claim.run_id and newest.started_unix_s > claim.started_unix_s:
        raise FencedError(
            f"attempt {claim.attempt} of a run that was removed from {store.url} may no longer write there: another run"
            " has begun since. Stop this trainer, or give it another dirpath",
            current=newest.attempt,
        )
    store.claim(claim)


def newest_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Sort manifests by attempt, then step, newest first."""
    return sorted(manifests, key=lambda manifest: manifest.order, reverse=True)


def put_together(shards: Iterable[Manifest]) -> list[Manifest]:
    """The snapshots that count, of those of which these are the registers that are seen; one of each writer."""
    found = []
    for name, manifests in by_snapshot(shards).items():
        if status(registers_of(manifests), manifests[0].order) is Status.COMMITTED:
            try:
                found.append(assemble(manifests))
            except CorruptSnapshotError as error:
                say(logging.WARNING, "snapshot-skipped", "snapshot {about} skipped: {reason}", about=name, reason=error)
    return found


def highest_attempt(claimed: int, names: Iterable[str], manifests: Iterable[Manifest]) -> int:
    """Highest attempt over claims, names of snapshots (committed or not) and manifests."""
    named = (order[0] for name in names if (order := snapshot_order(name)) is not None)
    return max([claimed, *named, *(manifest.attempt for manifest in manifests)])
