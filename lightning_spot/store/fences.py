"""What an attempt notes at a tier before it writes, and the fence that follows from it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

from lightning_spot.config import HIGHEST_ATTEMPT
from lightning_spot.errors import CorruptSnapshotError, FencedError, MalformedError, TierError, TierReason
from lightning_spot.snapshot.manifest import Order, order_name, snapshot_order
from lightning_spot.untrusted import FileName, Line, UnixSeconds, decoded, read_sealed, sealed_json, whole

Read = TypeVar("Read")

ATTEMPTS_DIR = "attempts"
KEPT_ATTEMPTS = 100
"""Claims and records of so many attempts stay listed."""

_MOST_FORGOTTEN = 20
_CLAIM = re.compile(r"attempt-(\d{1,9})\.json", re.ASCII)
_OF_ATTEMPT = re.compile(r"attempt-(\d{1,9})(?:\.progress)?\.json", re.ASCII)
_REWIND = re.compile(r"rewind-(\d{1,9})-(.+)\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What an attempt notes at a tier before it writes: the fence, and the run's identity.

    Attributes:
        attempt: its number, from 1.
        run_id: identity of the run.
        digest: of the attempt's random token, see :func:`digest_of`: tells two claims of one number apart.
        location: durable directory of the run: ``file:///abs/path`` or the fsspec URL.
        inode: of the attempts directory where the tier is a directory, 0 elsewhere; a copied directory has another.
        started_unix_s: when the attempt began, seconds since 1970.
        host: name of its machine.
        pid: its process.
    """

    attempt: Annotated[int, whole(0, HIGHEST_ATTEMPT)]
    run_id: FileName
    digest: Line = ""
    location: Line = ""
    started_unix_s: UnixSeconds = 0.0
    inode: Annotated[int, whole(0, 2**64)] = 0
    host: Line = ""
    pid: Annotated[int, whole(0, 2**32)] = 0

    def to_json(self) -> str:
        """The claim as JSON text."""
        return sealed_json(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim:
        """Read a claim; what a later version may have added is left out.

        Raises:
            CorruptSnapshotError: if it is damaged.
        """
        try:
            return decoded(cls, read_sealed(text))
        except MalformedError as error:
            raise CorruptSnapshotError(f"a claim is damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class Rewind:
    """The next start is to resume from an earlier snapshot. The name of its file in the attempts directory has all.

    Of several of one attempt the one that goes back furthest counts, so that a file takes another one's place safely:
    it is written first, then the other one is removed.

    Attributes:
        after: the newest attempt when it was asked for: what later ones take is newer.
        to: that snapshot, by its :attr:`~lightning_spot.snapshot.manifest.Manifest.order`.
    """

    after: int
    to: Order

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"rewind-{self.after:04d}-{order_name(self.to)}.json"

    def sets_aside(self, order: Order | None) -> bool:
        """Whether no resume takes the snapshot of that order."""
        return order is not None and order[0] <= self.after and order > self.to


def rewinds_in(names: Iterable[str]) -> list[Rewind]:
    """The rewinds among the file names of an attempts directory."""
    matches = filter(None, map(_REWIND.fullmatch, names))
    found = ((int(match[1]), snapshot_order(match[2])) for match in matches)
    return [Rewind(after, to) for after, to in found if to is not None]


@dataclass(frozen=True, slots=True)
class Owner:
    """The attempt on whose behalf a store writes and deletes.

    Attributes:
        attempt: its number.
        digest: of its token, as its claim has it; ``""`` if it has shown none: then no claim is its own.
    """

    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What a server may do at the URL of a run.

    Attributes:
        owner: on whose behalf it writes and deletes; ``None`` where only the attempt's number counts.
        claim: what it may claim for that, where nobody has; ``None`` where it may not.
    """

    owner: Owner | None = None
    claim: Claim | None = None

    @property
    def is_lent(self) -> bool:
        """Whether only a claim that its trainer has made counts there."""
        return self.owner is not None and self.claim is None


def digest_of(token: str) -> str:
    """What a claim has of its attempt's token: who reads it, as readers of the directory can, does not know that."""
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def claim_name(attempt: int) -> str:
    """File name of an attempt's claim."""
    return f"attempt-{attempt:04d}.json"


def claimed_in(names: Iterable[str]) -> list[int]:
    """The attempts whose claims are among file names, the newest first; other names are ignored."""
    return sorted((int(match[1]) for match in map(_CLAIM.fullmatch, names) if match), reverse=True)


def highest_claim(names: Iterable[str]) -> int:
    """Highest attempt whose claim is among file names, 0 if none is."""
    return max(claimed_in(names), default=0)


def check_fence(run: str, attempt: int, current: int) -> None:
    """Refuse a writer whose attempt is not the latest.

    Raises:
        FencedError: if ``current`` is later than ``attempt``.
    """
    if current > attempt:
        raise FencedError(
            f"attempt {attempt} of run {run!r} may no longer write: attempt {current} has taken over."
            " Stop this trainer, or give it another dirpath",
            current=current,
        )


def check_claim(claim: Claim, existing: Claim | None) -> None:
    """Refuse a claim whose number is taken by somebody else; the same claim again is none.

    Raises:
        FencedError: if ``existing``, of the same number, has another token.
    """
    if existing is None or existing.digest != claim.digest:
        raise _taken(claim.attempt, claim.location, existing)


def check_owner(owner: Owner, existing: Claim | None, url: str) -> None:
    """Refuse to act on behalf of an attempt whose claim is not there.

    Args:
        owner: the attempt.
        existing: the claim of its number that is there now, if any.
        url: of the tier.

    Raises:
        FencedError: if that is another trainer's.
        TierError: if there is none.
    """
    if existing is None:
        raise TierError(
            f"{url} is not claimed by attempt {owner.attempt}: nothing is read or written there for it. Let its"
            " trainer write there, or correct the directory",
            tier=url,
            reason=TierReason.UNCLAIMED,
        )
    if not owner.digest or existing.digest != owner.digest:
        raise _taken(owner.attempt, url, existing)


def _taken(attempt: int, where: str, by: Claim | None) -> FencedError:
    who = f" (host {by.host}, pid {by.pid})" if by is not None and by.host else ""
    return FencedError(
        f"attempt {attempt} of the run at {where} is taken by another trainer{who}: two were started at once. Stop one"
        " of them",
        current=attempt,
    )


def read_twice(read: Callable[[], Read]) -> Read:
    """Read a manifest or claim; what seems damaged is read once more, since a read may end early.

    Raises:
        CorruptSnapshotError: if it is damaged.
    """
    try:
        return read()
    except CorruptSnapshotError:
        return read()


def forgettable(names: Iterable[str], stored: int) -> list[str]:
    """Claims, records and rewinds of attempts too old to be needed.

    A later claim fences as well, a later record sums them up. A rewind is needed until a later attempt has a snapshot,
    however many have begun since: what it has set aside is still there. At most 20 of them at a time, so that no sweep
    takes long. Only claims say which attempts there were: a record whose number no attempt has had makes nothing old.

    Args:
        names: files of the attempts directory.
        stored: attempt of a snapshot that is stored.
    """
    names = list(names)
    oldest_kept = highest_claim(names) - KEPT_ATTEMPTS
    needed = {rewind.file for rewind in rewinds_in(names) if rewind.after >= stored}
    old = [name for number, _, name in _of_attempts(names) if number <= oldest_kept and name not in needed]
    return old[:_MOST_FORGOTTEN]


def files_of_attempts(names: Iterable[str]) -> list[str]:
    """Claims, records and rewinds among file names; the newest claim is the last."""
    return [name for _, _, name in _of_attempts(names)]


def _of_attempts(names: Iterable[str]) -> list[tuple[int, bool, str]]:
    names = list(names)
    matches = [match for name in names if (match := _OF_ATTEMPT.fullmatch(name))]
    found = [(int(match[1]), _CLAIM.fullmatch(match[0]) is not None, match[0]) for match in matches]
    return sorted([*found, *((rewind.after, False, rewind.file) for rewind in rewinds_in(names))])
