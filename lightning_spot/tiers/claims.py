"""What an attempt notes at a tier before it writes, and the fence that follows from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from lightning_spot.config import KEEP, LARGEST
from lightning_spot.errors import CorruptManifest, Fenced, Malformed
from lightning_spot.untrusted import MOST_UNIX_S, file_name, integer, line, number, read_sealed, sealed_json

logger = logging.getLogger(__name__)

Read = TypeVar("Read")

ATTEMPTS_DIR = "attempts"
KEPT_ATTEMPTS = 100
"""Claims and records of so many attempts stay listed."""

_MOST_FORGOTTEN = 20
_MOST_DAMAGED = 8
_MOST_ATTEMPTS = 10**9
_CLAIM = re.compile(r"attempt-(\d{1,9})\.json")
_OF_ATTEMPT = re.compile(r"attempt-(\d{1,9})(?:\.progress)?\.json")


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
    token: str = field(repr=False)
    location: str
    started_unix_s: float
    inode: int = 0
    host: str = ""
    pid: int = 0
    keep: int = KEEP

    def to_json(self) -> str:
        """The claim as JSON text."""
        return sealed_json(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim:
        """Read a claim; what a later version may have added is left out.

        Raises:
            CorruptManifest: if it is damaged.
        """
        try:
            fields = read_sealed(text)
            return cls(
                attempt=integer(fields, "attempt", 0, 0, _MOST_ATTEMPTS),
                run_id=file_name(fields, "run_id"),
                token=line(fields, "token"),
                location=line(fields, "location"),
                started_unix_s=number(fields, "started_unix_s", 0.0, 0, MOST_UNIX_S),
                inode=integer(fields, "inode", 0, 0, 2**64),
                host=line(fields, "host"),
                pid=integer(fields, "pid", 0, 0, 2**32),
                keep=integer(fields, "keep", KEEP, 0, LARGEST),
            )
        except Malformed as error:
            raise CorruptManifest(f"a claim is damaged: {error}") from error


def claim_name(attempt: int) -> str:
    """File name of an attempt's claim."""
    return f"attempt-{attempt:04d}.json"


def highest_claim(names: Sequence[str]) -> int:
    """Highest attempt among claim file names; other names are ignored."""
    return max((int(match[1]) for name in names if (match := _CLAIM.fullmatch(name))), default=0)


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
