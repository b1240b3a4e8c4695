"""ConvergenceAware: as many snapshots as Young and Daly would take, where the loss falls fastest."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from lightning_spot.errors import SettingsError
from lightning_spot.interval.adaptive import FIRST_S, OverheadBudget, YoungDaly
from lightning_spot.interval.costs import Costs
from lightning_spot.interval.curve import LossCurve
from lightning_spot.interval.policy import check_share
from lightning_spot.interval.spread import Price, spread

PLACES = 64
_REPLAN = 1 / 256  # of the run

Mode = Literal["min", "max"]


class ConvergenceAware(YoungDaly):
    """Young and Daly's interval, shorter where the loss falls fast and longer where it does not.

    For wall time alone, evenly spaced snapshots are the best there is. But a failure also takes progress away, and
    early in training the same minutes hold more of it. With ``v`` the speed at which the loss falls, the interval is
    that of :class:`YoungDaly` times ``sqrt(mean(v) / v)``, such that the number of snapshots stays the same; within
    half and twice, and only so far that the expected time to finish rises by at most ``max_regret``. Where the loss
    is not clearly falling, or the run has no known end, it *is* Young and Daly's. The idea of spending snapshots
    where convergence is comes from COCI; see :class:`COCI` for its rule.

    Args:
        monitor: a logged metric that shows progress; default the training loss.
        mode: whether progress makes it smaller (``"min"``) or larger (``"max"``).
        max_regret: how much longer than with Young and Daly's interval training may be expected to take, as a share.
        max_overhead: the share of the time that training may wait for snapshots, even where more would pay.

    Raises:
        SettingsError: if an argument cannot be used.

    Example::

        SpotCheckpoint("checkpoints/run-1", interval=ConvergenceAware(monitor="val_accuracy", mode="max"))
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Mode = "min",
        *,
        max_regret: float = 0.01,
        max_overhead: float = 0.03,
    ) -> None:
        super().__init__(max_overhead)
        if mode not in ("min", "max"):
            raise SettingsError(f'ConvergenceAware(mode={mode!r}): it is "min" or "max"')
        if monitor is not None and not (isinstance(monitor, str) and monitor):
            raise SettingsError(f"ConvergenceAware(monitor={monitor!r}): it is the name of a logged metric, or None")
        self.monitor = monitor
        self.mode: Mode = mode
        self.max_regret = check_share("max_regret", max_regret)
        self._curve = LossCurve(averaged=monitor is not None)
        self._even_s = self._shortest_s = FIRST_S
        self._now_s: float | None = None
        self._step = 0
        # What the run has had so far, which the rest of it has to make up for:
        self._elapsed_s = 0.0
        self._owed = 0.0  # snapshots that evenly spaced ones would be ahead by
        self._regret_s = 0.0
        self._plan: tuple[float, list[float]] = (-1.0, [])
        self._planned_for: tuple[int, float] = (-1, 0.0)

    def learn(self, costs: Costs) -> None:
        """Take over what was measured."""
        super().learn(costs)
        self._even_s = YoungDaly.interval_s(self, 0)
        self._shortest_s = OverheadBudget.interval_s(self, 0)

    def progress(self, step: int, value: float) -> None:
        """A reading of the metric."""
        total = self._costs.total_steps if self._costs is not None else None
        self._curve.add(step, -value if self.mode == "max" else value, total if total is not None else math.inf)

    def wait_s(self, step: int, now_s: float) -> float:
        """What is left of the interval."""
        if self._now_s is not None and now_s > self._now_s:
            self._account(now_s - self._now_s)
        self._now_s, self._step = now_s, step
        return super().wait_s(step, now_s)

    def interval_s(self, step: int) -> float:
        """Young and Daly's interval times the stretch planned for this place of the run."""
        costs = self._costs
        if costs is None:
            return FIRST_S
        return max(self._even_s * self._stretch(step, costs), self._shortest_s)

    def state_dict(self) -> dict[str, Any]:
        """The readings, and what the run has had."""
        return {
            "curve": self._curve.state_dict(),
            "elapsed_s": self._elapsed_s,
            "owed": self._owed,
            "regret_s": self._regret_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the snapshot was taken."""
        self._curve.load_state_dict(state["curve"])
        self._elapsed_s, self._owed, self._regret_s = state["elapsed_s"], state["owed"], state["regret_s"]
        self._planned_for = (-1, 0.0)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _account(self, seconds: float) -> None:
        costs = self._costs
        if costs is None or not self._even_s > 0:
            return
        stretch = self.interval_s(self._step) / self._even_s
        self._elapsed_s += seconds
        self._owed += seconds / self._even_s * (1 - 1 / stretch)
        self._regret_s += seconds * self._price(costs).rise(stretch)

    def _price(self, costs: Costs) -> Price:
        return Price(stall=costs.stall_s / self._even_s, rework=self._even_s / (2 * costs.mtbf_s))

    def _stretch(self, step: int, costs: Costs) -> float:
        total = costs.total_steps
        if total is None or not (math.isfinite(total) and 0 < step < total) or not self._even_s > 0:
            return 1.0
        wanted = (self._curve.version, self._even_s)
        begin, stretches = self._plan
        x = step / total
        stale = self._planned_for[0] != wanted[0] or abs(self._planned_for[1] - wanted[1]) > 0.02 * wanted[1]
        if stale or not begin <= x < begin + _REPLAN:
            begin, stretches = self._plan = self._replan(x, costs)
            self._planned_for = wanted
        if not stretches:
            return 1.0
        place = min(max((x - begin) / (1 - begin) * PLACES - 0.5, 0.0), PLACES - 1.0)
        before = min(int(place), PLACES - 2)
        return stretches[before] + (place - before) * (stretches[before + 1] - stretches[before])

    def _replan(self, x: float, costs: Costs) -> tuple[float, list[float]]:
        """Stretches at ``PLACES`` evenly spaced places from ``x`` to the end; none where progress is not seen."""
        if self._curve.fit is None and self._curve.version == 0 and costs.total_steps is not None:
            self._curve.refit(costs.total_steps)  # after a resume
        fit = self._curve.fit
        if fit is None or self._elapsed_s <= 0:
            return x, []
        left_s = self._elapsed_s * (1 - x) / x
        whole_s = self._elapsed_s + left_s
        places = x + (1 - x) * (np.arange(PLACES) + 0.5) / PLACES
        stretches = spread(
            fit.speed(places),
            snapshots=1 + self._owed * self._even_s / left_s,
            price=self._price(costs),
            most_rise=(self.max_regret * whole_s - self._regret_s) / left_s,
        )
        return x, stretches.tolist()
