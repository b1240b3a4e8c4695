"""Where the time of a run went, over all its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_SNAPSHOTS = 500


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """One attempt, as it last told of itself. Times are seconds since 1970.

    Attributes:
        attempt: its number.
        begun_unix_s: when ``fit`` began.
        trained_unix_s: when training began, with everything restored; ``None`` if it never did.
        from_step: ``global_step`` at that time.
        step: the last one.
        unix_s: when this was noted.
        stall_s: seconds that training waited for snapshots.
        snapshots: step and time of those begun; every other one is left out when there are too many.
        end: ``"running"`` (or killed), ``"preempted"``, ``"complete"`` or ``"failed"``.
    """

    attempt: int
    begun_unix_s: float
    trained_unix_s: float | None = None
    from_step: int = 0
    step: int = 0
    unix_s: float = 0.0
    stall_s: float = 0.0
    snapshots: list[tuple[int, float]] = field(default_factory=list)
    end: str = "running"

    def begin_snapshot(self, step: int, unix_s: float) -> None:
        """Note a snapshot."""
        self.snapshots.append((step, unix_s))
        if len(self.snapshots) > MOST_SNAPSHOTS:
            self.snapshots = self.snapshots[::2]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> AttemptRecord:
        """Of what :meth:`as_dict` gave; what a later version may have added is left out."""
        known = {name: record[name] for name in cls.__slots__ if name in record}
        known["snapshots"] = [(int(step), float(at)) for step, at in known.get("snapshots", [])]
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a run, or of one attempt with the pause after it.

    Attributes:
        productive_s: trained, and kept.
        stall_s: waited for snapshots.
        lost_s: trained, and done again by the next attempt.
        restore_s: from the start of ``fit`` until training began.
        down_s: from the end of an attempt to the start of the next.
    """

    productive_s: float = 0.0
    stall_s: float = 0.0
    lost_s: float = 0.0
    restore_s: float = 0.0
    down_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.productive_s + self.stall_s + self.lost_s + self.restore_s + self.down_s

    @property
    def goodput(self) -> float:
        """Share of the time that was productive; 1 before any time has passed."""
        return self.productive_s / self.total_s if self.total_s > 0 else 1.0


def spent(records: Sequence[AttemptRecord]) -> list[Spent]:
    """Where the time of each attempt went, and the pause after it.

    An attempt that was killed is known until it last told of itself: what it did after that counts as down.

    Args:
        records: of one run, in the order of the attempts.
    """
    return [_of(record, after) for record, after in zip(records, [*records[1:], None], strict=True)]


def total(parts: Sequence[Spent]) -> Spent:
    """The sum."""
    names = ("productive_s", "stall_s", "lost_s", "restore_s", "down_s")
    return Spent(**{name: sum(getattr(part, name) for part in parts) for name in names})


def lost_steps(record: AttemptRecord, after: AttemptRecord | None) -> int:
    """Steps that the next attempt did again."""
    if after is None or after.trained_unix_s is None:
        return 0
    return max(0, min(record.step - after.from_step, record.step - record.from_step))


def _of(record: AttemptRecord, after: AttemptRecord | None) -> Spent:
    end_s = max(record.unix_s, record.begun_unix_s)
    down_s = max(0.0, after.begun_unix_s - end_s) if after is not None else 0.0
    if record.trained_unix_s is None:
        return Spent(restore_s=end_s - record.begun_unix_s, down_s=down_s)
    restore_s = max(0.0, record.trained_unix_s - record.begun_unix_s)
    training_s = max(0.0, end_s - record.trained_unix_s)
    stall_s = min(record.stall_s, training_s)
    steps = record.step - record.from_step
    share = lost_steps(record, after) / steps if steps > 0 else 0.0
    work_s = training_s - stall_s
    return Spent(
        productive_s=work_s * (1 - share),
        stall_s=stall_s,
        lost_s=work_s * share,
        restore_s=restore_s,
        down_s=down_s,
    )
