"""What adaptive policies decide from, and how it is measured: nothing of it is asked of the user."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs, all in seconds of one clock.

    Attributes:
        stall_s: how long training waits for one snapshot.
        mtbf_s: mean time between failures of the job.
        drain_s: that the nearest tier which outlives the machine takes for one snapshot; 0 if none was measured.
            Snapshots that follow each other faster than that bring no newer one out of the machine.
        total_steps: optimizer steps of the whole run; ``None`` if it has no known end.
    """

    stall_s: float
    mtbf_s: float
    drain_s: float = 0.0
    total_steps: float | None = None


class RobustMean:
    """Mean of the middle half of the latest values: outliers, such as a first snapshot, do not count for long."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=32)

    def add(self, value: float) -> None:
        """Another value; what is no finite number is left out."""
        if math.isfinite(value):
            self._values.append(value)

    @property
    def value(self) -> float | None:
        """The mean, ``None`` before the first value."""
        if not self._values:
            return None
        ordered = sorted(self._values)
        cut = len(ordered) // 4
        middle = ordered[cut : len(ordered) - cut]
        return sum(middle) / len(middle)

    def state_dict(self) -> dict[str, Any]:
        """The values."""
        return {"values": list(self._values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values of an earlier attempt."""
        self._values.extend(state["values"])


PRIOR_MTBF_S = 2 * 3600.0
"""Mean lifetime of a spot VM before anything was seen: that of V100 VMs in public traces."""

PROCESS_MTBF_S = 7 * 86400.0
"""Assumed, where nothing else is known: a crash that leaves the machine alone (an exception, memory that ran out, a
collective that timed out) comes once a week."""

SERVER_MTBF_S = 30 * 86400.0
"""Assumed likewise: a snapshot server on a machine that is not preemptible is lost once in thirty days."""

ADVISED_MTBF_S = 600.0
"""What to expect of a machine that its cloud calls likely to be taken away."""


class FailureRate:
    """Mean time between failures, from a Gamma prior worth one failure, updated by the failures of a run.

    An event counts once however many machines it takes: those that go within minutes stop the job only once. Rate and
    prior are conjugate: after ``events`` failures in ``exposure_s``, the mean rate is
    ``(1 + events) / (prior + exposure_s)``.

    Args:
        machines: of the job; each has the prior's lifetime.
    """

    def __init__(self, machines: int = 1) -> None:
        self._prior_s = PRIOR_MTBF_S / max(1, machines)
        self._advised = False
        self.events = 0
        self.exposure_s = 0.0

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures, more than 0."""
        mean_s = (self._prior_s + self.exposure_s) / (1 + self.events)
        return min(mean_s, ADVISED_MTBF_S) if self._advised else mean_s

    def ran(self, seconds: float) -> None:
        """The job ran for so long without a failure."""
        self.exposure_s += max(0.0, seconds)

    def failed(self, events: int = 1) -> None:
        """The job was stopped so many times."""
        self.events += max(0, events)

    def advised(self) -> None:
        """The cloud expects this machine to be taken away; holds until the next attempt."""
        self._advised = True

    def state_dict(self) -> dict[str, Any]:
        """What was seen."""
        return {"events": self.events, "exposure_s": self.exposure_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what earlier attempts saw."""
        self.events, self.exposure_s = int(state["events"]), float(state["exposure_s"])
