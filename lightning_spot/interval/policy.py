"""The seam of interval policies, and the two simplest: a number of steps, a number of seconds."""

from __future__ import annotations

from typing import Protocol

from lightning_spot.errors import SettingsError


class IntervalPolicy(Protocol):
    """Decides when the next snapshot is due.

    Attributes:
        by_step: whether the decision follows from the step alone, so that all ranks agree without asking each other.
    """

    by_step: bool

    def due(self, step: int, now_s: float) -> bool:
        """Whether a snapshot is due.

        Args:
            step: Lightning's ``global_step`` (optimizer steps).
            now_s: a monotonic clock, seconds.
        """

    def taken(self, step: int, now_s: float) -> None:
        """A snapshot of ``step`` was begun; also called with the starting point when training begins."""


class EverySteps:
    """A snapshot at every multiple of ``n`` optimizer steps, or at the next step where one can be taken.

    Args:
        n: steps, at least 1.

    Raises:
        SettingsError: if ``n`` is below 1.

    Example::

        SpotCheckpoint("checkpoints/run-1", interval=EverySteps(100))
    """

    by_step = True

    def __init__(self, n: int) -> None:
        if n < 1:
            raise SettingsError(f"EverySteps({n}): the interval is at least 1 step")
        self.n = n
        self._last = 0

    def due(self, step: int, now_s: float) -> bool:
        """Whether a multiple of ``n`` was reached since the last snapshot."""
        return step // self.n > self._last // self.n

    def taken(self, step: int, now_s: float) -> None:
        """Start counting anew."""
        self._last = step


class EverySeconds:
    """A snapshot every ``s`` seconds.

    Args:
        s: seconds, more than 0.

    Raises:
        SettingsError: if ``s`` is not positive.

    Example::

        SpotCheckpoint("checkpoints/run-1", interval=EverySeconds(30))
    """

    by_step = False

    def __init__(self, s: float) -> None:
        if not s > 0:
            raise SettingsError(f"EverySeconds({s}): the interval is more than 0 seconds")
        self.s = s
        self._last_s: float | None = None

    def due(self, step: int, now_s: float) -> bool:
        """Whether ``s`` seconds have passed."""
        if self._last_s is None:
            self._last_s = now_s
        return now_s - self._last_s >= self.s

    def taken(self, step: int, now_s: float) -> None:
        """Start counting anew."""
        self._last_s = now_s


class Hastened:
    """Another policy, and besides it a snapshot every few seconds: for a machine that is likely to be taken away.

    Args:
        policy: the policy of normal times.
        s: seconds, more than 0.
    """

    by_step = False

    def __init__(self, policy: IntervalPolicy, s: float = 15.0) -> None:
        self._policy = policy
        self._besides = EverySeconds(s)

    def due(self, step: int, now_s: float) -> bool:
        """Whether either is due."""
        return self._besides.due(step, now_s) or self._policy.due(step, now_s)

    def taken(self, step: int, now_s: float) -> None:
        """Start counting anew."""
        self._besides.taken(step, now_s)
        self._policy.taken(step, now_s)
