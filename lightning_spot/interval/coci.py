"""COCI's rule, for those who want to compare with the paper: snapshots at equal drops of an exponential loss."""

from __future__ import annotations

import bisect
import math
from typing import Any, Literal

import numpy as np

from lightning_spot.config import LARGEST, check_number
from lightning_spot.errors import SettingsError
from lightning_spot.interval.adaptive import FIRST_S
from lightning_spot.interval.policy import ByTime
from lightning_spot.renamed import refusing_old

CociMode = Literal["auto", "manual", "ccm"]
_MOVED = 0.1
_MOST_READINGS = 4096


class COCI(ByTime):
    """Snapshots where the fitted loss ``exp(slope * t + offset)`` has fallen by another equal part.

    The published rule (COCI, convergence-oriented checkpoint intervals) finds the number of parts by subtracting a time
    from a loss, so the same job planned in seconds, minutes and hours gets different numbers. Here, every number has
    its unit, and the parts are as many as Young's rule would take snapshots in the rest of the run: the rule's idea,
    equal progress between snapshots, at the same cost as :class:`YoungDaly`. Where the loss is not falling, not
    positive, or the run has no known end, Young's interval holds. Slots that fall into one step count as one.

    Nothing bounds how far apart two slots may be: late in a run that is very far. :class:`ConvergenceAware` bounds it.

    Args:
        mode: ``"auto"`` measures cost and fits the loss; ``"manual"`` takes them; ``"ccm"`` is Young's rule alone.
        snapshot_cost_s: seconds that training waits for one snapshot, ``ts`` in the paper (manual; ccm measures it if
            not given).
        slope: of the loss's logarithm, per second, below 0; ``theta_1`` in the paper (manual).
        offset: of it; ``theta_2`` in the paper (manual).
        failure_rate_per_s: ``lambda`` in the paper; measured if not given.
        fit_interval: readings of the loss between two fits (auto).
        profile_threshold: readings before the first fit, and steps before the first plan.

    Raises:
        SettingsError: if an argument is missing or cannot be used.
    """

    monitor = None

    @refusing_old
    def __init__(
        self,
        mode: CociMode = "auto",
        *,
        snapshot_cost_s: float | None = None,
        slope: float | None = None,
        offset: float | None = None,
        failure_rate_per_s: float | None = None,
        fit_interval: int = 50,
        profile_threshold: int = 50,
    ) -> None:
        super().__init__()
        if mode not in ("auto", "manual", "ccm"):
            raise SettingsError(f'COCI(mode={mode!r}): it is "auto", "manual" or "ccm"')
        if mode == "manual" and (snapshot_cost_s is None or slope is None or offset is None):
            raise SettingsError('COCI(mode="manual") needs snapshot_cost_s, slope and offset; "auto" measures them')
        for name, value in (("snapshot_cost_s", snapshot_cost_s), ("failure_rate_per_s", failure_rate_per_s)):
            if value is not None:
                check_number(f"COCI: {name}", value, 0, above=True)
        for name, value in (("slope", slope), ("offset", offset)):
            if value is not None:
                check_number(f"COCI: {name}", value, -LARGEST)
        if slope is not None and not slope < 0:
            raise SettingsError(f"COCI: slope={slope!r}: it is less than 0, since the loss falls")
        check_number("COCI: fit_interval", fit_interval, 1, whole=True)
        check_number("COCI: profile_threshold", profile_threshold, 2, whole=True)
        self.mode: CociMode = mode
        self.snapshot_cost_s = float(snapshot_cost_s) if snapshot_cost_s is not None else None
        self.failure_rate_per_s = float(failure_rate_per_s) if failure_rate_per_s is not None else None
        self.fit_interval, self.profile_threshold = int(fit_interval), int(profile_threshold)
        self._theta = (
            (float(slope), float(offset)) if slope is not None and offset is not None and mode == "manual" else None
        )
        self._readings: list[tuple[float, float]] = []
        self._since_fit = 0
        self._elapsed_s = 0.0
        self._now_s: float | None = None
        self._slots: list[float] | None = None  # that are to come, as training seconds; to be planned yet

    def interval_s(self, step: int) -> float:
        """Young's interval ``sqrt(2 * snapshot_cost_s / failure_rate_per_s)``, which holds where there are no slots."""
        costs = self._costs
        if costs is None:
            return FIRST_S
        stall_s = self.snapshot_cost_s if self.snapshot_cost_s is not None else costs.stall_s
        mtbf_s = 1 / self.failure_rate_per_s if self.failure_rate_per_s is not None else costs.mtbf_s
        return max(math.sqrt(2 * stall_s * mtbf_s), costs.drain_s)

    def wait_s(self, step: int, now_s: float) -> float:
        """What is left until the next slot, or of Young's interval."""
        if self._now_s is not None:
            self._elapsed_s += max(0.0, now_s - self._now_s)
        self._now_s = now_s
        if self._slots is None:
            self._slots = self._plan(step)
        if self._slots:
            drained_s = self._costs.drain_s if self._costs is not None else 0.0
            since_s = now_s - self._last_s if self._last_s is not None else math.inf
            return max(self._slots[0] - self._elapsed_s, drained_s - since_s)
        return super().wait_s(step, now_s)

    def taken(self, step: int, now_s: float) -> None:
        """All slots up to now are served."""
        super().taken(step, now_s)
        if self._slots is not None:
            self._slots = self._slots[bisect.bisect_right(self._slots, self._elapsed_s) :]

    def progress(self, step: int, value: float) -> None:
        """A reading of the loss."""
        if self.mode != "auto" or not math.isfinite(value):
            return
        self._readings.append((self._elapsed_s, value))
        self._since_fit += 1
        if len(self._readings) > _MOST_READINGS:
            self._readings = self._readings[::2]
        if len(self._readings) >= self.profile_threshold and self._since_fit >= self.fit_interval:
            self._since_fit = 0
            self._refit()

    def state_dict(self) -> dict[str, Any]:
        """Readings, and what was fitted to them; slots are planned again from it."""
        readings = [list(reading) for reading in self._readings]
        theta = list(self._theta) if self._theta is not None else None
        return {"readings": readings, "elapsed_s": self._elapsed_s, "theta": theta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the snapshot was taken."""
        self._readings = [(t, value) for t, value in state["readings"]]
        self._elapsed_s, self._slots = state["elapsed_s"], None
        if self.mode == "auto" and state["theta"] is not None:
            self._theta = (state["theta"][0], state["theta"][1])

    # -- inside ---------------------------------------------------------------------------------------------------

    def _refit(self) -> None:
        at_s, losses = np.array(self._readings, dtype=float).T
        theta: tuple[float, float] | None = None
        if (losses > 0).all() and np.ptp(at_s) > 0:
            slope, offset = np.polyfit(at_s, np.log(losses), 1)
            theta = (float(slope), float(offset))
        old, self._theta = self._theta, theta
        if theta is None or old is None or _moved(old, theta):
            self._slots = None

    def _plan(self, step: int) -> list[float] | None:
        """Slots for the rest of the run; none where Young's interval holds, ``None`` where that is not known yet."""
        costs, total = self._costs, self._costs.total_steps if self._costs is not None else None
        if costs is None or total is None or not (math.isfinite(total) and self.profile_threshold <= step < total):
            return None
        if self._elapsed_s <= 0:
            return None  # how long a step takes
        if self._theta is None or self.mode == "ccm" or not self._theta[0] < 0:
            return []
        slope, offset = self._theta
        begin_s, end_s = self._elapsed_s, self._elapsed_s * total / step
        interval_s = self.interval_s(step)
        count = int((end_s - begin_s) / interval_s) if interval_s > 0 else 0
        begin, end = slope * begin_s + offset, slope * end_s + offset
        if count < 1 or not -700 < end <= begin < 700:
            return []
        losses = math.exp(begin) - (math.exp(begin) - math.exp(end)) * np.arange(1, count + 1) / count
        with np.errstate(divide="ignore", invalid="ignore"):  # where it falls by more than a float tells
            slots = np.fmin((np.log(losses) - offset) / slope, end_s)
        found: list[float] = slots.tolist()
        return found


def _moved(old: tuple[float, float], new: tuple[float, float]) -> bool:
    """Whether the slope has changed by more than a tenth of itself, or the fitted loss by more than a tenth."""
    return abs(new[0] - old[0]) > _MOVED * abs(old[0]) or abs(new[1] - old[1]) > _MOVED
