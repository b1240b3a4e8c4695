"""Where the time of a run went, over all its attempts. Each attempt carries the account of those before it on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any

from lightning_spot.config import HIGHEST_ATTEMPT
from lightning_spot.errors import MalformedError
from lightning_spot.untrusted import UnixSeconds, decoded, listed, text, whole

MOST_CARRIED = 64
ENDS = ("running", "killed", "preempted", "complete", "failed")
_MOST_STEPS = 10**18

_Step = Annotated[int, whole(0, _MOST_STEPS)]


def _end(fields: Mapping[str, Any], name: str, default: str | None) -> str:
    if (end := text(fields, name, default)) not in ENDS:
        raise MalformedError(f"its end is none of {', '.join(ENDS)}")
    return end


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """One attempt, as it last recorded itself. Times are seconds since 1970.

    Attributes:
        attempt: its number.
        begun_unix_s: when it began: its process, or ``fit``, see :func:`~lightning_spot.goodput.records.begin_unix_s`.
        trained_unix_s: when training began, with everything restored; ``None`` if it never did.
        from_step: ``global_step`` at that time.
        from_unix_s: when the snapshot that it was resumed from was taken; ``None`` where it was resumed from none.
        step: the last one.
        unix_s: when this was noted.
        alive_unix_s: when its trainer wrote this to storage last, which it does in a long validation, too.
        blocked_s: seconds that training waited for snapshots.
        snapshots: how many it has taken.
        restore_s: of the seconds before training began, those that finding and reading the snapshot took; 0 for a fresh
            start.
        end: one of :data:`ENDS`.
        earlier: account of the attempts before it.
    """

    attempt: Annotated[int, whole(0, HIGHEST_ATTEMPT)]
    begun_unix_s: UnixSeconds
    trained_unix_s: UnixSeconds | None = None
    from_step: _Step = 0
    from_unix_s: UnixSeconds | None = None
    step: _Step = 0
    unix_s: UnixSeconds = 0.0
    alive_unix_s: UnixSeconds = 0.0
    blocked_s: UnixSeconds = 0.0
    snapshots: _Step = 0
    restore_s: UnixSeconds = 0.0
    end: Annotated[str, _end] = "running"
    earlier: Account | None = None

    @property
    def before(self) -> Account:
        """The account of the attempts before it."""
        return self.earlier or Account()

    @property
    def known(self) -> list[AttemptRecord]:
        """The attempts that are known in full: the latest before it, and itself."""
        return [*self.before.latest, self]

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> AttemptRecord:
        """Of plain values; what a later version may have added is left out.

        Raises:
            MalformedError: if a value is not what it should be.
        """
        return decoded(cls, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a run, or of one attempt with the pause after it.

    Attributes:
        productive_s: trained, and kept.
        blocked_s: waited for snapshots.
        lost_s: trained, and done again by the next attempt.
        restore_s: found and read the snapshot that an attempt went on from.
        down_s: from the end of an attempt to the start of the process of the next; none after one that completed the
            run.
        startup_s: the rest of the time from the start of the process until training began.
    """

    productive_s: UnixSeconds = 0.0
    blocked_s: UnixSeconds = 0.0
    lost_s: UnixSeconds = 0.0
    restore_s: UnixSeconds = 0.0
    down_s: UnixSeconds = 0.0
    startup_s: UnixSeconds = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return float(sum(getattr(self, name) for name in Spent.__slots__))

    @property
    def goodput(self) -> float:
        """Share of the time that was productive; 1 before any time has passed."""
        return self.productive_s / self.total_s if self.total_s > 0 else 1.0


@dataclass(slots=True, kw_only=True)
class Account:
    """What is known of the attempts before one: the latest in full, the sum of those before them.

    Attributes:
        attempts: number of those summed up in ``closed``.
        closed: where their time went, the pause after the last of them included.
        latest: records of the latest attempts before this one, at most :data:`MOST_CARRIED`, the first first; without
            accounts of their own.
    """

    attempts: Annotated[int, whole(0, HIGHEST_ATTEMPT)] = 0
    closed: Spent = field(default_factory=Spent)
    latest: Annotated[list[AttemptRecord], listed(AttemptRecord, 2 * MOST_CARRIED)] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of attempts before this one that are known."""
        return self.attempts + len(self.latest)

    def spent(self, current: AttemptRecord | None) -> Spent:
        """Where the time of the run went, the current attempt included."""
        return total([self.closed, *spent([*self.latest, *([current] if current is not None else [])])])


def account_after(previous: AttemptRecord | None) -> Account:
    """The account with which the attempt after ``previous`` begins."""
    if previous is None:
        return Account()
    before = previous.before
    latest = [*before.latest, replace(previous, earlier=None)]
    dropped = max(0, len(latest) - MOST_CARRIED)
    closed = total([before.closed, *spent(latest)[:dropped]])
    return Account(attempts=before.attempts + dropped, closed=closed, latest=latest[dropped:])


def spent(records: Sequence[AttemptRecord]) -> list[Spent]:
    """Where the time of each attempt went, and the pause after it.

    Args:
        records: of one run, in the order of the attempts.
    """
    return [_of(*item) for item in zip(records, _pauses(records), _lost(records), strict=True)]


def lost_steps(records: Sequence[AttemptRecord]) -> list[int]:
    """Steps of each attempt that a later one did again; one that never trained did none.

    Args:
        records: of one run, in the order of the attempts.
    """
    return [steps for steps, _ in _lost(records)]


def _lost(records: Sequence[AttemptRecord]) -> list[tuple[int, float | None]]:
    """Steps of each attempt that a later one did again, and when it had begun with them, as far as that is known."""
    lost: list[tuple[int, float | None]] = []
    lowest: AttemptRecord | None = None
    for record in reversed(records):
        again = record.step - lowest.from_step if lowest is not None else 0
        steps = max(0, min(again, record.step - record.from_step))
        lost.append((steps, lowest.from_unix_s if lowest is not None else None))
        if record.trained_unix_s is not None and (lowest is None or record.from_step < lowest.from_step):
            lowest = record
    return lost[::-1]


def total(parts: Sequence[Spent]) -> Spent:
    """The sum."""
    return Spent(**{name: sum(getattr(part, name) for part in parts) for name in Spent.__slots__})


def _pauses(records: Sequence[AttemptRecord]) -> list[float]:
    """Seconds from the end of each attempt to the next one; none after one that completed the run."""
    pauses = [0.0 if one.end == "complete" else then.begun_unix_s - _end_s(one) for one, then in pairwise(records)]
    return [*(max(0.0, pause) for pause in pauses), *[0.0] * bool(records)]


def _end_s(record: AttemptRecord) -> float:
    return max(record.unix_s, record.begun_unix_s)


def _of(record: AttemptRecord, down_s: float, lost: tuple[int, float | None]) -> Spent:
    end_s = _end_s(record)
    if record.trained_unix_s is None:
        return Spent(startup_s=end_s - record.begun_unix_s, down_s=down_s)
    before_s = max(0.0, record.trained_unix_s - record.begun_unix_s)
    restore_s = min(record.restore_s, before_s)
    training_s = max(0.0, end_s - record.trained_unix_s)
    blocked_s = min(record.blocked_s, training_s)
    share = _share_of_time(record, *lost, end_s, training_s)
    work_s = training_s - blocked_s
    return Spent(
        productive_s=work_s * (1 - share),
        blocked_s=blocked_s,
        lost_s=work_s * share,
        restore_s=restore_s,
        down_s=down_s,
        startup_s=before_s - restore_s,
    )


def _share_of_time(
    record: AttemptRecord, lost: int, since_unix_s: float | None, end_s: float, training_s: float
) -> float:
    """Share of an attempt's training that its last ``lost`` steps took: since the snapshot before them, if known."""
    if lost <= 0 or training_s <= 0:
        return 0.0
    share = (end_s - since_unix_s) / training_s if since_unix_s is not None else lost / (record.step - record.from_step)
    return min(1.0, max(0.0, share))
