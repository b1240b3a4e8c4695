"""Whether an urgent snapshot can be safe before a deadline, from measured speeds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

MARGIN = 1.2
"""An urgent snapshot is planned to need this much more than measured: the network is busiest when VMs are taken."""


LEAVE_S = 1.0
"""Kept of the time before a deadline for loggers and the interpreter to end."""

_LEAST_WAIT_S = 0.01


@dataclass(frozen=True, slots=True)
class Deadline:
    """When everything has to be safe.

    Attributes:
        end_s: on the monotonic clock.
        is_named: whether a notice named it; otherwise it is only how long to try.
    """

    end_s: float
    is_named: bool

    @classmethod
    def of(cls, named_s: float | None, try_s: float) -> Deadline:
        """The deadline that a notice named, on the monotonic clock; where it named none, in ``try_s`` seconds."""
        return cls(named_s if named_s is not None else time.monotonic() + try_s, named_s is not None)

    @property
    def left_s(self) -> float:
        """Seconds left to work, at least 0: the process needs some more to end."""
        return max(0.0, self.end_s - LEAVE_S - time.monotonic())

    @property
    def wait_s(self) -> float:
        """How long a call may wait: the seconds that are left, and never 0, which stands for a usual wait."""
        return max(_LEAST_WAIT_S, self.left_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePlan:
    """What to do before a deadline.

    Attributes:
        take: whether a new snapshot is worth it; otherwise only what is committed already is brought to safety.
        expected_s: seconds until it is safe at the fastest tier; ``None`` where no speed was measured yet.
    """

    take: bool
    expected_s: float | None


def plan_urgent(nbytes: int, left_s: float | None, bytes_per_s: Iterable[float]) -> DeadlinePlan:
    """Plan an urgent snapshot.

    Args:
        nbytes: size of a snapshot, and of what goes before it.
        left_s: seconds until the deadline, at most 0 if it is past; ``None`` if it is not known.
        bytes_per_s: measured speeds of the tiers that outlive this machine.
    """
    fastest = max(bytes_per_s, default=0.0)
    if fastest <= 0:
        return DeadlinePlan(take=left_s is None or left_s > 0, expected_s=None)
    expected_s = nbytes / fastest
    return DeadlinePlan(take=left_s is None or expected_s * MARGIN <= left_s, expected_s=expected_s)
