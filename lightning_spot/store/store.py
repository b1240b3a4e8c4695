"""The interface of a tier: put a snapshot, list what is committed, fetch it, delete it, claim an attempt.

How a tier lays a run out below its URL::

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from lightning_spot.errors import CorruptSnapshotError, FencedError, SpotError, TierError, TierReason
from lightning_spot.say import say
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, snapshot_order
from lightning_spot.snapshot.shards import Image, Status, assemble, by_snapshot, registers_of, status
from lightning_spot.store.fences import (
    ATTEMPTS_DIR,
    Claim,
    Owner,
    Rewind,
    Standing,
    check_fence,
    check_owner,
    claim_name,
    first_readable,
    highest_claim,
    read_twice,
    rewinds_in,
)
from lightning_spot.threads import in_turn

Result = TypeVar("Result")

Progress = Callable[[int], None]
"""Called with the number of bytes just moved."""


class Target(Protocol):
    """What the file of a snapshot is written to: memory, or a file; from any thread."""

    def __setitem__(self, where: slice, data: memoryview, /) -> None:
        """Write bytes."""


LONGEST_MANIFEST_BYTES = 64 * 2**20
"""A manifest or claim that is longer is refused before it is read."""


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
    """

    manifests: list[Manifest] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    highest_attempt: int = 0
    unfinished: list[str] = field(default_factory=list)
    shards: list[Manifest] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    rewinds: list[Rewind] = field(default_factory=list)

    def sets_aside(self, manifest: Manifest) -> bool:
        """Whether a rewind has set a snapshot aside, see :class:`Rewind`."""
        return any(rewind.sets_aside(manifest.order) for rewind in self.rewinds)

    @classmethod
    def of_memory(cls, held: Iterable[Manifest], claimed: int = 0) -> Holdings:
        """What a ring holds: snapshots, users' files, and shards, put together where all of a snapshot are there."""
        snapshots = [manifest for manifest in held if not manifest.is_file]
        shards = [manifest for manifest in snapshots if manifest.shard is not None]
        whole = [manifest for manifest in snapshots if manifest.shard is None]
        manifests = newest_first([*whole, *put_together(shards)])
        return cls(manifests, {}, highest_attempt(claimed, (), snapshots), shards=shards)


class Store(Protocol):
    """A tier for one run. Every implementation passes ``tests/integration/test_stores.py``.

    Methods may be called from any thread. "Nothing there" and "could not be read" are two things: what is not there is
    an empty answer or :class:`~lightning_spot.errors.SnapshotNotFoundError`, what could not be read or written is
    :class:`~lightning_spot.errors.TierError`, bytes that are not those that were committed are
    :class:`~lightning_spot.errors.CorruptSnapshotError`.

    Attributes:
        url: of the run at the tier.
        owner: the attempt on whose behalf this object writes and deletes. What it does asks for its claim, again before
            each manifest and each deletion; whoever has another one is refused. ``None`` where nothing is claimed, as
            for users' files: then only numbers count.
    """

    url: str
    owner: Owner | None

    def survey(self) -> Holdings:
        """What the tier holds of the run, in a bounded number of requests; all empty when it holds nothing.

        Snapshots whose manifest is there but cannot be used are named in :attr:`Holdings.unreadable`.

        Raises:
            TierError: if the tier could not be listed, or its bucket does not exist.
        """

    def claimed(self) -> int:
        """Highest attempt that has claimed the run, 0 if none: the fence. One cheap request.

        Raises:
            TierError: if it could not be read.
        """

    def newest_claim(self) -> Claim | None:
        """The claim of the highest attempt that can be read, ``None`` if nobody has claimed the run.

        Raises:
            TierError: if it could not be read.
        """

    def check_owner(self) -> None:
        """Whether the claim of :attr:`owner` is there, and its own; nothing where there is no owner. One cheap request.

        Raises:
            FencedError: if another trainer has claimed that number.
            TierError: if nobody has, or it could not be read.
        """

    def claim(self, claim: Claim) -> None:
        """Record that an attempt writes the run from now on. The same claim again does nothing.

        Of two claims of one number the tier takes the first, where it can create a file exclusively. Elsewhere the
        last one stays, and :meth:`check_owner` tells the other.

        Raises:
            FencedError: if that number, under another token, or a later one is taken.
            TierError: if it could not be written.
        """

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

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """Store a snapshot or file that never is in memory as a whole; like :meth:`put` otherwise.

        Args:
            manifest: without checksums; its ``nbytes`` is the sum of the parts.
            parts: consecutive parts of ``manifest.part_bytes`` each, but the last; each is done with when the next one
                is asked for. An error raised by it is passed on, and nothing is committed.
            attempt: as in :meth:`put`.

        Returns:
            the sealed manifest.
        """

    def has(self, manifest: Manifest) -> bool:
        """Whether this very snapshot is committed: its manifest is read back and equal, its file has its size.

        Raises:
            TierError: if it could not be read.
        """

    def fetch(self, manifest: Manifest, into: Target, progress: Progress | None = None) -> None:
        """Read the file of a snapshot into ``into`` (``manifest.nbytes`` long), and check every part as it comes.

        Raises:
            SnapshotNotFoundError: if it is not there.
            CorruptSnapshotError: if it is shorter, or a part has not the checksum it was committed with.
            TierError: if it could not be read.
        """

    def delete(self, manifest: Manifest) -> None:
        """Remove a snapshot: first its manifest, then its bytes, and no other file. Nothing happens if it is gone.

        Nor if another snapshot of its name is there, such as that of a trainer on another machine; nor if a later
        attempt of the same run than that of ``manifest`` has written a file of its name meanwhile.

        Raises:
            FencedError: if :attr:`owner` does not hold the run any more.
        """

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """Remove what killed writers left behind, after ``current`` was committed here; nothing that is not our own.

        That is: temporaries, unfinished uploads, and uncommitted snapshots older than ``current`` that hold nothing
        but our own files. Of attempts before that of ``current``, which are fenced, at once; of its own, whose other
        writers may be alive, once they have not been touched for :data:`SETTLED_S`.

        Args:
            current: a snapshot that is committed here.
            seen: what :meth:`survey` has just shown; ``None`` to ask.
        """

    def sweep_files(self) -> None:
        """Remove what killed writers of files left behind, in a folder in which other processes may save, too.

        That is: temporaries. At once if the writer was a process of this machine that has ended, else once they have
        not been touched for :data:`SETTLED_S`.
        """


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
    left = iter(bounds)

    def fetch(found: tuple[int, int]) -> None:
        start, stop = found
        buffer = buffers.pop()
        part = buffer[: stop - start]
        read(start, part)
        into[start:stop] = part
        buffers.append(buffer)
        if progress is not None:
            progress(stop - start)

    in_turn(lambda: next(left, None), fetch, threads, "spot-fetch")


class FileStore(ABC):
    """What stores of files have in common: what is listed, claims, and who may change what. See :class:`Store`."""

    url: str
    owner: Owner | None = None

    # -- how files are reached; ``below`` is a path in the run ----------------------------------------------------

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
    def _small(self, below: str) -> bytes:
        """A manifest or claim.

        Raises:
            FileNotFoundError: if it is not there.
            CorruptSnapshotError: if it is too long for one.
        """

    @abstractmethod
    def _manifest_at(self, manifest: Manifest) -> Manifest | None:
        """What the manifest at the place of one says now; ``None`` if there is none that can be used."""

    @abstractmethod
    def _why(self, error: Exception) -> str:
        """What an error of the library says, for people."""

    # -- what is there --------------------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        found = Holdings()
        with self._errors():
            listed, found.attempts = self._all([partial(self._names, below) for below in ("", ATTEMPTS_DIR)])
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
        """See :meth:`Store.claimed`."""
        with self._errors():
            return highest_claim(self._names(ATTEMPTS_DIR))

    def newest_claim(self) -> Claim | None:
        """See :meth:`Store.newest_claim`."""
        with self._errors():
            return first_readable(
                self._names(ATTEMPTS_DIR), lambda name: self._small(f"{ATTEMPTS_DIR}/{name}"), self.url
            )

    def _committed(self, name: str) -> Manifest | str | None:
        """Manifest of a snapshot, ``None`` if it has none, or why it cannot be read."""
        try:
            manifest = read_twice(lambda: Manifest.from_json(self._small(f"{name}/{MANIFEST_FILE}")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every cloud library has errors of its own
            return str(error) if isinstance(error, SpotError) else self._why(error)
        return manifest if manifest.name == name else f"its manifest is that of {manifest.name}"

    def _claim_of(self, attempt: int) -> Claim | None:
        try:
            return read_twice(lambda: Claim.from_json(self._small(f"{ATTEMPTS_DIR}/{claim_name(attempt)}")))
        except (FileNotFoundError, CorruptSnapshotError):
            return None

    # -- who may change what --------------------------------------------------------------------------------------

    def check_owner(self) -> None:
        """See :meth:`Store.check_owner`."""
        if (owner := self.owner) is not None:
            with self._errors():
                claim = self._claim_of(owner.attempt)
            check_owner(owner, claim, self.url)

    def _check_fence(self, run: str, attempt: int) -> None:
        """Refuse to act for an attempt that does not hold the run."""

        def later() -> None:
            check_fence(run, attempt, self.claimed())

        if self.owner is None:
            later()
        else:
            self._all([later, self.check_owner])

    def _check_owner(self, run: str) -> None:
        """Refuse to delete anything for an attempt that does not hold the run any more."""
        if self.owner is not None:
            self._check_fence(run, self.owner.attempt)

    def _check_fences(self, manifest: Manifest, attempt: int) -> None:
        """Refuse to write for an attempt that does not hold the run, or over a later one's file."""
        self._check_fence(manifest.run, attempt)
        if manifest.is_file:
            with self._errors():
                check_file_fence(manifest, self._manifest_at(manifest))


SETTLED_S = 3600.0
"""A temporary or uncommitted snapshot of a live attempt that was not written to for so long has no writer any more."""


class Folder(Protocol):
    """The files of one snapshot. Each appears whole or not at all. Methods may be called from any thread.

    All of them raise :class:`~lightning_spot.errors.TierError` if the tier fails.
    """

    def sizes(self) -> dict[str, int]:
        """The files that are there, with their sizes; empty if there is no such folder."""

    def write(self, name: str, data: Image) -> None:
        """Write a file, in place of what is there; when this returns it is as durable as the tier is."""

    def write_all(self, contents: Mapping[str, Image]) -> None:
        """Write several files, by name, each as by :meth:`write`; side by side in an object store."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some of a file, by default all of it.

        Raises:
            SnapshotNotFoundError: if it is not there.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; nothing happens to those that are gone. Where one cannot be removed, the others are."""


@runtime_checkable
class HasFolders(Protocol):
    """A store whose snapshots can be written file by file."""

    def folder(self, name: str, *, attempt: int, run_id: str) -> Folder:
        """The folder of a snapshot.

        Args:
            name: of the snapshot.
            attempt: on whose behalf it is written to.
            run_id: of its run.
        """


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
    store.claim(standing.claim)
    return action()


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


def is_newer(existing: Manifest | None, manifest: Manifest) -> bool:
    """Whether a later attempt of the same run has written the file that is there."""
    of_the_run = existing is not None and (existing.run_id, existing.run) == (manifest.run_id, manifest.run)
    return existing is not None and of_the_run and existing.attempt > manifest.attempt


def is_another(noted: Manifest | None, manifest: Manifest) -> bool:
    """Whether what is at the place of a snapshot is another one than that: two trainers may have begun one number."""
    if noted is None or manifest.is_file:
        return False
    return (noted.lineage, noted.checksums) != (manifest.lineage, manifest.checksums)


def not_ours(url: str, manifest: Manifest) -> FencedError:
    """Why a file is not replaced on behalf of others: it has no manifest of ours."""
    why = f"{url}/{manifest.name} was not saved by lightning_spot: it stays as it is. Save under another name"
    return FencedError(why, current=manifest.attempt)


def check_file_fence(manifest: Manifest, existing: Manifest | None) -> None:
    """Refuse to put an older file of a user's over one that a later attempt of the same run has written.

    Raises:
        FencedError: in that case.
    """
    if existing is not None and is_newer(existing, manifest):
        check_fence(manifest.run, manifest.attempt, existing.attempt)


def highest_attempt(claimed: int, names: Iterable[str], manifests: Iterable[Manifest]) -> int:
    """Highest attempt over claims, names of snapshots (committed or not) and manifests."""
    named = (order[0] for name in names if (order := snapshot_order(name)) is not None)
    return max([claimed, *named, *(manifest.attempt for manifest in manifests)])
