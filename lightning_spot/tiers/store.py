"""The interface of a tier: put a snapshot, list what is committed, fetch it, delete it, claim an attempt.

How a tier lays a run out below its URL::

    run-1/
      attempts/attempt-0001.json           who wrote, so that a later attempt fences an earlier one
      step-000000400-attempt-0001/
        model.ckpt                         an ordinary Lightning checkpoint; or the files of a sharded one
        manifest.json                      written last: without it the snapshot does not exist
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol, TypeVar

from lightning_spot.config import KEEP
from lightning_spot.errors import CorruptManifest, Fenced
from lightning_spot.image.manifest import Manifest, snapshot_order

logger = logging.getLogger(__name__)

Read = TypeVar("Read")

Progress = Callable[[int], None]
"""Called with the number of bytes just moved."""

ATTEMPTS_DIR = "attempts"
KEPT_ATTEMPTS = 100
"""Claims and records of so many attempts stay listed."""

_MOST_FORGOTTEN = 20
_MOST_DAMAGED = 8
_CLAIM = re.compile(r"attempt-(\d{1,9})\.json")
_OF_ATTEMPT = re.compile(r"attempt-(\d{1,9})(?:\.progress)?\.json")

LONGEST_MANIFEST_BYTES = 64 * 2**20
"""A manifest or claim that is longer is refused before it is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What an attempt notes at a tier before it writes: the fence, and the run's identity.

    Attributes:
        attempt: its number, from 1.
        run_id: identity of the run.
        token: random, of this attempt: tells two claims of one number apart.
        location: durable directory of the run: ``file:///abs/path`` or the fsspec URL.
        inode: of the attempts directory where the tier is a directory, 0 elsewhere; a copied directory has another.
        started_unix_s: when the attempt began, seconds since 1970.
        host: name of its machine.
        pid: its process.
        keep: snapshots each tier keeps.
    """

    attempt: int
    run_id: str
    token: str
    location: str
    started_unix_s: float
    inode: int = 0
    host: str = ""
    pid: int = 0
    keep: int = KEEP

    def to_json(self) -> str:
        """The claim as JSON text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim:
        """Read a claim; what a later version may have added is left out.

        Raises:
            CorruptManifest: if it is damaged.
        """
        try:
            fields = json.loads(text)
            known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
            texts = {name: str(known.pop(name, "")) for name in ("run_id", "token", "location", "host")}
            numbers = {name: int(known.pop(name, 0)) for name in ("attempt", "pid", "inode", "keep")}
            started_unix_s = float(known.get("started_unix_s", 0.0))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptManifest(f"a claim is damaged: {error}") from error
        return cls(**texts, **numbers, started_unix_s=started_unix_s)  # type: ignore[arg-type]


@dataclass(slots=True)
class Holdings:
    """What a tier that answered holds of a run; all empty when nothing is there.

    Attributes:
        manifests: of committed snapshots, newest first.
        unreadable: name of each snapshot whose manifest is there but cannot be used, and why.
        highest_attempt: over claims, manifests and the names of snapshots, committed or not; 0 if there is none.
        unfinished: names of snapshots that are not committed.
    """

    manifests: list[Manifest] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    highest_attempt: int = 0
    unfinished: list[str] = field(default_factory=list)


class Store(Protocol):
    """A tier for one run. Every implementation passes ``tests/test_stores.py``.

    Methods may be called from any thread. "Nothing there" and "could not be read" are two things: what is not there is
    an empty answer or :class:`~lightning_spot.errors.SnapshotNotFound`, what could not be read or written is
    :class:`~lightning_spot.errors.TierError`, bytes that are not those that were committed are
    :class:`~lightning_spot.errors.CorruptSnapshot`.
    """

    url: str

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

    def claim(self, claim: Claim) -> None:
        """Record that an attempt writes the run from now on. The same claim again does nothing.

        Of two claims of one number the tier takes the first, where it can create a file exclusively: directories and
        S3 can, other object stores look first and write then.

        Raises:
            Fenced: if that number, under another token, or a later one is taken.
            TierError: if it could not be written.
        """

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """Store a snapshot or file; when this returns it is committed and as durable as the tier is.

        Args:
            manifest: sealed manifest of the snapshot.
            image: its file; not kept.
            attempt: attempt on whose behalf it is written; refused if a later one has claimed the run. A file is
                refused, too, if one of its name is there that a later attempt than its own has written.

        Raises:
            Fenced: if a later attempt holds the run.
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

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """Read the file of a snapshot into ``into`` (``manifest.nbytes`` long), and check every part as it comes.

        Raises:
            SnapshotNotFound: if it is not there.
            CorruptSnapshot: if it is shorter, or a part has not the checksum it was committed with.
            TierError: if it could not be read.
        """

    def delete(self, manifest: Manifest) -> None:
        """Remove a snapshot: first its manifest, then its bytes, and no other file. Nothing happens if it is gone.

        Nor if a later attempt of the same run than that of ``manifest`` has written a file of its name meanwhile.
        """

    def sweep(self, current: Manifest) -> None:
        """Remove what killed writers left behind, after ``current`` was committed here; nothing that is not our own.

        That is: temporaries, unfinished uploads, and uncommitted snapshots older than ``current`` that hold nothing
        but our own files. Of attempts before that of ``current``, which are fenced, at once; of its own, whose other
        writers may be alive, once they have not been touched for :data:`SETTLED_S`.
        """

    def sweep_files(self) -> None:
        """Remove what killed writers of files left behind, in a folder in which other processes may save, too.

        That is: temporaries, and unfinished uploads that are noted in one. At once if the writer was a process of this
        machine that has ended, else once they have not been touched for :data:`SETTLED_S`.
        """


SETTLED_S = 3600.0
"""A temporary or uncommitted snapshot of a live attempt that was not written to for so long has no writer any more."""


def check_fence(run: str, attempt: int, current: int) -> None:
    """Refuse a writer whose attempt is not the latest.

    Raises:
        Fenced: if ``current`` is later than ``attempt``.
    """
    if current > attempt:
        raise Fenced(
            f"attempt {attempt} of run {run!r} may no longer write: attempt {current} has taken over."
            " Stop this trainer, or give it another dirpath",
            run=run,
            attempt=attempt,
            current=current,
        )


def claim_name(attempt: int) -> str:
    """File name of an attempt's claim."""
    return f"attempt-{attempt:04d}.json"


def highest_claim(names: Sequence[str]) -> int:
    """Highest attempt among claim file names; other names are ignored."""
    return max((int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))), default=0)


def newest_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Sort manifests by attempt, then step, newest first."""
    return sorted(manifests, key=lambda manifest: manifest.order, reverse=True)


def check_claim(claim: Claim, existing: Claim | None) -> None:
    """Refuse a claim whose number is taken by somebody else; the same claim again is none.

    Raises:
        Fenced: if ``existing``, of the same number, has another token.
    """
    if existing is None or existing.token != claim.token:
        raise Fenced(
            f"attempt {claim.attempt} of the run at {claim.location} is taken by another trainer"
            f"{f' (host {existing.host}, pid {existing.pid})' if existing is not None else ''}",
            attempt=claim.attempt,
            current=claim.attempt,
        )


def is_newer(existing: Manifest | None, manifest: Manifest) -> bool:
    """Whether a later attempt of the same run has written the file that is there."""
    of_the_run = existing is not None and (existing.run_id, existing.run) == (manifest.run_id, manifest.run)
    return existing is not None and of_the_run and existing.attempt > manifest.attempt


def check_file_fence(manifest: Manifest, existing: Manifest | None) -> None:
    """Refuse to put an older file of a user's over one that a later attempt of the same run has written.

    Raises:
        Fenced: in that case.
    """
    if existing is not None and is_newer(existing, manifest):
        check_fence(manifest.run, manifest.attempt, existing.attempt)


def highest_attempt(claimed: int, names: Iterable[str], manifests: Iterable[Manifest]) -> int:
    """Highest attempt over claims, names of snapshots (committed or not) and manifests."""
    named = (order[0] for name in names if (order := snapshot_order(name)) is not None)
    return max([claimed, *named, *(manifest.attempt for manifest in manifests)])


def first_readable(names: Sequence[str], read: Callable[[str], bytes], url: str) -> Claim | None:
    """The newest claim that can be read; ``None`` if there is no claim.

    Args:
        names: files of the attempts directory.
        read: gives the content of one.
        url: of the tier, for messages.

    Raises:
        CorruptManifest: if there are claims and the newest few are all damaged.
    """
    claims = sorted(((int(match[1]), name) for name in names if (match := _CLAIM.fullmatch(name))), reverse=True)
    damage: CorruptManifest | None = None
    for attempt, name in claims[:_MOST_DAMAGED]:
        try:
            claim = whole(lambda name=name: Claim.from_json(read(name)))  # type: ignore[misc]
        except FileNotFoundError:
            continue  # removed meanwhile
        except CorruptManifest as error:
            damage = damage or error
            logger.warning("lightning_spot: %s/%s/%s cannot be used: %s", url, ATTEMPTS_DIR, name, error)
            continue
        if claim.attempt == attempt:
            return claim
    if damage is not None:
        raise damage
    return None


def whole(read: Callable[[], Read]) -> Read:
    """Read a manifest or claim; what seems damaged is read once more, since a read may end early.

    Raises:
        CorruptManifest: if it is damaged.
    """
    try:
        return read()
    except CorruptManifest:
        return read()


def forgettable(names: Iterable[str]) -> list[str]:
    """Claims and records of attempts too old to be needed: a later claim fences as well, a later record sums them up.

    At most 20 of them at a time, so that no sweep takes long. Only claims say which attempts there were: a record whose
    number no attempt has had makes nothing old.
    """
    names = list(names)
    oldest_kept = highest_claim(names) - KEPT_ATTEMPTS
    numbered = sorted((int(match[1]), name) for name in names if (match := _OF_ATTEMPT.fullmatch(name)))
    return [name for number, name in numbered[:_MOST_FORGOTTEN] if number <= oldest_kept]


def worth_keeping(line: Sequence[Manifest]) -> list[Manifest]:
    """Snapshots, newest first, but last those whose state is there twice: as the end of the run, or taken once more."""
    ends = [item for item in line if item.complete]
    seen = {(end.lineage, end.attempt, end.step, False, exact) for end in ends for exact in (True, False)}
    first: list[Manifest] = []
    last: list[Manifest] = []
    for item in line:
        state = (item.lineage, item.attempt, item.step, item.complete, item.exact)
        (last if state in seen else first).append(item)
        seen.add(state)
    return [*first, *last]


def retain(store: Store, keep: int, current: Manifest) -> None:
    """Delete older snapshots of the lineage of ``current`` beyond the newest ``keep``, and what killed writers left.

    Nothing is deleted before the tier has shown that ``current`` is committed there: it is listed, its manifest, read
    back, is equal, and its file has its size (that its bytes arrived, the tier has acknowledged: directories by fsync,
    object stores by the checksum of each request). Snapshots of another lineage, newer ones and those that cannot be
    read stay. So do the newest ``keep`` exact ones, and every exact one until another is put there. One whose state is
    there as the end of the run, too, goes before an older one does.

    Args:
        store: the tier.
        keep: snapshots to keep, ``current`` among them; at least 1.
        current: a snapshot just put there.

    Raises:
        TierError: if the tier fails; what was not deleted is deleted next time.
    """
    listed = store.survey().manifests
    if current.name not in [manifest.name for manifest in listed] or not store.has(current):
        logger.warning(
            "lightning_spot: %s was written to %s but is not seen there; nothing older is deleted",
            current.name,
            store.url,
        )
        return
    older = [manifest for manifest in listed if manifest.lineage == current.lineage and manifest.order < current.order]
    line = worth_keeping([current, *older])
    kept = [*line[: max(1, keep)], *[manifest for manifest in line if manifest.exact][: max(1, keep)]]
    for manifest in older:
        if manifest not in kept and (current.exact or not manifest.exact):
            store.delete(manifest)
    store.sweep(current)
