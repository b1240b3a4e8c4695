"""The interface of interval policies, and the two simplest: a number of steps, a number of seconds."""

from __future__ import annotations

from abc import abstractmethod
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from lightning_spot.config import check_number
from lightning_spot.errors import SettingsError
from lightning_spot.interval.costs import Costs


@runtime_checkable  # jsonargparse may ask whether an object is one
class IntervalPolicy(Protocol):
    """Decides when the next snapshot is due. Rank 0 asks, at every step; whoever derives needs the first two only.

    Attributes:
        by_step: whether the decision follows from the step alone, so that all ranks agree without asking each other.
            Then it is also asked for a step that is still to come.
        monitor: name of the logged metric that :meth:`progress` is to be told; ``None`` for the training loss, and
            ``""`` for none at all.
    """

    by_step: bool = False
    monitor: str | None = ""

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({told})"

    @abstractmethod
    def due(self, step: int, now_s: float) -> bool:
        """Whether a snapshot is due.

        Args:
            step: Lightning's ``global_step`` (optimizer steps).
            now_s: a monotonic clock, seconds.
        """

    @abstractmethod
    def taken(self, step: int, now_s: float) -> None:
        """A snapshot of ``step`` was begun; also called with the starting point when training begins."""

    def passed_over(self, step: int) -> int:
        """How many snapshots before that of ``step`` were due and never taken; one that comes late is not counted."""
        return 0

    def wait_s(self, step: int, now_s: float) -> float:
        """Seconds for which nothing will be due, as far as known now: ranks need not talk to each other until then."""
        return 0.0

    def learn(self, costs: Costs) -> None:
        """What was measured; called before :meth:`due` whenever it changed."""
        return

    def shortest_s(self) -> float:
        """Seconds from one snapshot to the next that the budget for waiting asks for at least; 0 without one."""
        return 0.0

    def progress(self, step: int, value: float) -> None:
        """The monitored metric at a step; any float, also NaN."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What a later attempt of the run goes on with, as plain values; it is kept in the snapshots."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what an earlier attempt knew."""
        return


class EverySteps(IntervalPolicy):
    """A snapshot at every multiple of ``n`` optimizer steps, or at the next step where one can be taken.

    Args:
        n: steps, at least 1.
        max_overhead: the share of the time that training may wait for snapshots: steps are passed over where it would
            be more. ``None`` for no such limit.

    Raises:
        SettingsError: if ``n`` is below 1, or ``max_overhead`` no share.

    Example::

        SpotCheckpoint("checkpoints/run-1", interval=EverySteps(1, max_overhead=0.05))
    """

    by_step = True

    def __init__(self, n: int, max_overhead: float | None = None) -> None:
        check_number("EverySteps: n", n, 1, whole=True)
        self.n = int(n)
        self.max_overhead = check_share("max_overhead", max_overhead) if max_overhead is not None else None
        self._last = 0
        self._stall_s = 0.0

    def due(self, step: int, now_s: float) -> bool:
        """Whether a multiple of ``n`` was reached since the last snapshot."""
        return step // self.n > self._last // self.n

    def taken(self, step: int, now_s: float) -> None:
        """Start counting anew."""
        self._last = step

    def passed_over(self, step: int) -> int:
        """Multiples of ``n`` since the last snapshot, but for the newest."""
        return max(0, step // self.n - self._last // self.n - 1)

    def learn(self, costs: Costs) -> None:
        """Take over what training waits for a snapshot."""
        self._stall_s = costs.stall_s

    def shortest_s(self) -> float:
        """``stall / max_overhead``."""
        return self._stall_s / self.max_overhead if self.max_overhead is not None else 0.0


class ByTime(IntervalPolicy):
    """What policies with an interval in seconds share. It is that from one snapshot's begin to the next's."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._costs: Costs | None = None

    def learn(self, costs: Costs) -> None:
        """Take over what was measured."""
        self._costs = costs

    @abstractmethod
    def interval_s(self, step: int) -> float:
        """Seconds from one snapshot to the next, as things are at ``step``."""

    def due(self, step: int, now_s: float) -> bool:
        """Whether the interval has passed. It is computed anew at every step, so none can be missed."""
        return self.wait_s(step, now_s) <= 0

    def wait_s(self, step: int, now_s: float) -> float:
        """What is left of the interval."""
        if self._last_s is None:
            self._last_s = now_s
        return self._last_s + self.interval_s(step) - now_s

    def taken(self, step: int, now_s: float) -> None:
        """Start counting anew."""
        self._last_s = now_s


class EverySeconds(ByTime):
    """A snapshot every ``s`` seconds.

    Args:
        s: seconds, more than 0.

    Raises:
        SettingsError: if ``s`` is not positive.

    Example::

        SpotCheckpoint("checkpoints/run-1", interval=EverySeconds(30))
    """

    def __init__(self, s: float) -> None:
        super().__init__()
        check_number("EverySeconds: s", s, 0, above=True)
        self.s = float(s)

    def interval_s(self, step: int) -> float:
        """``s``."""
        return self.s


def check_share(name: str, value: float) -> float:
    """A share between 0 and 1.

    Raises:
        SettingsError: if it is none.
    """
    if not (isinstance(value, Real) and 0 < value < 1):
        raise SettingsError(f"{name}={value!r}: it is a share of the training time, more than 0 and less than 1")
    return float(value)
