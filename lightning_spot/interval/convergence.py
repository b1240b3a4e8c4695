"""ConvergenceAware: as many snapshots as Young and Daly would take, where the loss falls fastest.

The loss curve of a run is fitted online: how fast the loss falls now, and how fast it will later. Readings are kept as
medians of at most 64 buckets of steps, whose width doubles as the run grows, so neither memory nor time grows with it.
The fit is an average over curves, each weighted by how well it explains the medians: exponentials and power laws with a
floor, ``floor + drop * shape(x)``. Early on, when the data cannot tell them apart, all of them count; later the best
does. Only derivatives are used, and only relative to each other: nothing depends on the loss's scale or offset.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_spot.errors import SettingsError
from lightning_spot.interval.adaptive import FIRST_S, OverheadBudget, YoungDaly
from lightning_spot.interval.costs import Costs
from lightning_spot.interval.policy import check_share

Array = NDArray[np.float64]

CAPACITY = 64
LEAST_IN_BUCKET = 5  # so that a spike is not the median
MOST_IN_BUCKET = 64
LEAST_POINTS = 12
SIGNIFICANT = 4.0
"""How many standard errors the last third of the curve must lie below the first one."""
BROKEN = 6.0
"""How many standard errors the latest buckets may miss the fit by before it is given up."""

Stretch = TypeVar("Stretch", float, Array)
WIDEST = 2.0
"""An interval is at most so many times the evenly spaced one, and at least its inverse."""
PLACES = 64
_REPLAN = 1 / 256  # of the run
Mode = Literal["min", "max"]


def _mean(rows: list[list[float]]) -> list[float]:
    """Mean step and value of rows of step, value and weight, and their total weight."""
    total = sum(row[2] for row in rows)
    return [sum(row[0] * row[2] for row in rows) / total, sum(row[1] * row[2] for row in rows) / total, total]


def _shapes() -> tuple[Array, Array, Array]:
    """Parameters of all shapes, each of shape ``(shapes,)``: rate, exponent (0 for exponentials) and offset."""
    rates = np.geomspace(0.3, 300.0, 31)
    powers = [(beta, offset) for beta in (0.25, 0.5, 1.0, 1.5, 2.0) for offset in (0.001, 0.01, 0.1)]
    rate = np.concatenate([rates, np.zeros(len(powers))])
    beta = np.concatenate([np.zeros(len(rates)), [beta for beta, _ in powers]])
    offset = np.concatenate([np.ones(len(rates)), [offset for _, offset in powers]])
    return rate[:, None], beta[:, None], offset[:, None]


_RATE, _BETA, _OFFSET = _shapes()


def _values(x: Array) -> Array:
    """All shapes at ``x`` (shape ``(points,)``, shares of the run): falling, of shape ``(shapes, points)``."""
    return np.exp(-_RATE * x) * (x + _OFFSET) ** -_BETA


def _slopes(x: Array) -> Array:
    """How fast they fall, at least 0."""
    return _values(x) * (_RATE + _BETA / (x + _OFFSET))


@dataclass(frozen=True, slots=True)
class CurveFit:
    """A falling curve.

    Attributes:
        drops: factor of each shape, shape ``(shapes,)``.
        shares: how probable each shape is; they sum to 1.
    """

    drops: Array
    shares: Array

    def speed(self, x: Array) -> Array:
        """How fast the metric falls at ``x``, in its own unit per run: at least 0, of the shape of ``x``."""
        return (self.drops * self.shares) @ _slopes(x)


class LossCurve:
    """Fits a metric that is to fall, by medians of it over ranges of steps.

    Args:
        averaged: whether each reading is a mean over many samples, as that of a validation is: one will do, then,
            where otherwise it takes several to tell a spike.

    Attributes:
        fit: the newest, or ``None`` while the metric does not clearly fall.
    """

    def __init__(self, *, averaged: bool = False) -> None:
        self._least = 1 if averaged else LEAST_IN_BUCKET
        self._width, self._index = 1, 0
        self._closed: list[list[float]] = []  # index, mean step, median, number of readings
        self._open: list[list[float]] = []  # step, value, number of readings
        self._unreadable = 0
        self.fit: CurveFit | None = None

    def add(self, step: int, value: float, total_steps: float) -> None:
        """Another reading.

        Args:
            step: not before the last one's.
            value: left out if it is no finite number; several such in a row end the fit.
            total_steps: of the run; infinite where not known, and nothing is fitted then.
        """
        if not math.isfinite(value):
            self._unreadable += 1
            if self._unreadable >= 3:
                self.fit = None
            return
        self._unreadable = 0
        closes = len(self._open) >= self._least and step // self._width != self._index
        if closes:
            self._close()
        if not self._open:
            self._index = step // self._width
        self._open.append([float(step), value, 1.0])
        if len(self._open) > MOST_IN_BUCKET:
            self._open = [_mean(self._open[start : start + 2]) for start in range(0, len(self._open), 2)]
        if closes:
            self.refit(total_steps)

    def refit(self, total_steps: float) -> None:
        """Fit what is there."""
        if len(self._closed) < LEAST_POINTS or not math.isfinite(total_steps) or total_steps <= 0:
            self.fit = None
            return
        _, steps, values, counts = np.array(self._closed, dtype=float).T
        self.fit = fit_points(steps / total_steps, values, counts)
        if self.fit is BREAK:
            self._closed = self._closed[-3:]  # a restart of the learning rate, or another phase: begin anew
            self.fit = None

    def state_dict(self) -> dict[str, Any]:
        """The readings."""
        return {"width": self._width, "closed": self._closed, "open": self._open, "index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the readings of an earlier attempt; :meth:`refit` fits them."""
        self._width, self._index = state["width"], state["index"]
        self._closed, self._open = [list(row) for row in state["closed"]], [list(row) for row in state["open"]]

    def _close(self) -> None:
        step, _, count = _mean(self._open)
        self._closed.append([float(self._index), step, statistics.median(row[1] for row in self._open), count])
        self._open = []
        if len(self._closed) >= CAPACITY:
            self._width *= 2
            merged: dict[float, list[list[float]]] = {}
            for index, *row in self._closed:
                merged.setdefault(index // 2, []).append(row)
            self._closed = [[index, *_mean(rows)] for index, rows in merged.items()]


BREAK = CurveFit(np.zeros(0), np.zeros(0))
"""Stands for: the curve broke off lately."""


def fit_points(x: Array, y: Array, counts: Array) -> CurveFit | None:
    """Fit a falling curve.

    Args:
        x: shares of the run, growing, of shape ``(points,)``.
        y: values there.
        counts: readings behind each value, its weight.

    Returns:
        the fit, ``None`` if the values do not clearly fall, and :data:`BREAK` if the last ones are not on the curve of
        those before.
    """
    lowest, spread = float(y.min()), float(y.max()) - float(y.min())
    if not 0 < spread < math.inf:
        return None
    y = (y - lowest) / spread  # so that no scale over- or underflows
    weights = counts / counts.mean()
    shapes = _values(x)
    robust = np.ones_like(y)
    for _ in range(3):  # iteratively reweighted: Huber's loss
        drops, residuals = _least_squares(shapes, y, weights * robust)
        losses = (weights * robust * residuals**2).sum(axis=1)
        losses = np.where(drops > 0, losses, np.inf)
        if not np.isfinite(losses).any():
            return None
        best = int(np.argmin(losses))
        scaled = residuals[best] * np.sqrt(weights)
        sigma = max(1.4826 * float(np.median(np.abs(scaled))), 1e-9)
        robust = np.minimum(1.0, 2 * sigma / np.maximum(np.abs(scaled), 1e-300))
    if not _falls(y, weights, sigma):
        return None
    tail = weights[-3:]
    miss = float((residuals[best][-3:] * tail).sum() / tail.sum())
    if abs(miss) > max(BROKEN * sigma / math.sqrt(tail.sum()), 0.1):
        return BREAK
    shares = np.exp(-(losses - losses[best]) / (2 * sigma**2))
    return CurveFit(np.maximum(drops, 0.0) * spread, shares / shares.sum())


def _least_squares(shapes: Array, y: Array, weights: Array) -> tuple[Array, Array]:
    """Drop of each shape, and what is left, of shape ``(shapes, points)``."""
    share = weights / weights.sum()
    centre, mean = (shapes * share).sum(axis=1, keepdims=True), float((y * share).sum())
    varied = shapes - centre
    variance = (share * varied**2).sum(axis=1)
    drops = (share * varied * (y - mean)).sum(axis=1) / np.maximum(variance, 1e-300)
    floors = mean - drops * centre[:, 0]
    return drops, y - floors[:, None] - drops[:, None] * shapes


def _falls(y: Array, weights: Array, sigma: float) -> bool:
    """Whether the last third lies clearly below the first one."""
    third = len(y) // 3
    first, last = np.median(y[:third]), np.median(y[-third:])
    error = 1.2533 * sigma * math.sqrt(1 / weights[:third].sum() + 1 / weights[-third:].sum())
    return bool(first - last > SIGNIFICANT * error)


@dataclass(frozen=True, slots=True)
class Price:
    """What stretching an interval costs, to first order, as shares of the training time.

    Attributes:
        stall: share of the time spent waiting for evenly spaced snapshots.
        rework: expected share of the time spent on work done twice.
    """

    stall: float
    rework: float

    def rise(self, stretch: Stretch) -> Stretch:
        """By how much the expected time to finish rises where intervals are ``stretch`` times as long."""
        return self.stall * (1 / stretch - 1) + self.rework * (stretch - 1)


def spread(speed: Array, *, snapshots: float, price: Price, most_rise: float) -> Array:
    """Spread snapshots over the rest of a run.

    Losing least progress per failure, ``min sum(speed * interval)``, for a given number of snapshots means intervals
    in proportion to ``1 / sqrt(speed)``. With a bound on the expected time to finish besides, they go with
    ``1 / sqrt(speed + mu)``: the larger ``mu``, the more even. The smallest ``mu`` that keeps to the bound is taken.

    Args:
        speed: how fast the loss falls at evenly spaced places of the rest of the run, at least 0; shape ``(places,)``.
        snapshots: how many to take, as a factor of those evenly spaced.
        price: of stretching.
        most_rise: bound on the mean of ``price.rise``.

    Returns:
        by which factor to stretch the interval at each place, between ``1 / WIDEST`` and ``WIDEST``.
    """
    even = np.ones_like(speed)
    mean = float(speed.mean())
    if not (math.isfinite(mean) and mean > 0):
        return even
    snapshots = min(max(snapshots, 1 / WIDEST), WIDEST)

    def stretched(exponent: float) -> Array:
        return _with_count(speed / mean + 10.0**exponent, snapshots)

    low, high = -3.0, 3.0  # at most 1000 times the mean: even; at least a thousandth: what is slower is a plateau
    if _rise(stretched(low), price) <= most_rise:
        return stretched(low)
    if _rise(stretched(high), price) > most_rise:
        return even
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if _rise(stretched(middle), price) <= most_rise else (middle, high)
    return stretched(high)


def _rise(stretch: Array, price: Price) -> float:
    return float(price.rise(stretch).mean())


def _with_count(weight: Array, snapshots: float) -> Array:
    """Intervals in proportion to ``1 / sqrt(weight)``, within the limits, such that the snapshots come out.

    With intervals of ``scale / inverse`` the number of snapshots is a straight line over ``1 / scale`` between any two
    scales at which the interval of some place comes to a limit.
    """
    inverse = np.sqrt(weight)
    edges = np.sort(np.concatenate([inverse / WIDEST, inverse * WIDEST]))
    counts = np.clip(inverse / edges[:, None], 1 / WIDEST, WIDEST).mean(axis=1)
    scale = 1 / np.interp(snapshots, counts[::-1], 1 / edges[::-1])
    return np.clip(scale / inverse, 1 / WIDEST, WIDEST)


class Stretches(NamedTuple):
    """Stretches for the rest of a run, and what they were planned for.

    Attributes:
        fit: of the loss.
        even_s: the evenly spaced interval.
        begin: share of the run at which it was planned.
        places: shares of the run.
        stretches: the factor of the interval at each.
    """

    fit: CurveFit | None
    even_s: float
    begin: float
    places: Array
    stretches: Array


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
        self._plan = Stretches(None, 0.0, -1.0, np.zeros(0), np.zeros(0))

    def learn(self, costs: Costs) -> None:
        """Take over what was measured; the readings of an earlier attempt can be fitted then."""
        if self._costs is None and costs.total_steps is not None:
            self._curve.refit(costs.total_steps)
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
        self._costs = None  # what they are now is learned first, and the readings are fitted then

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
        total, fit, even_s = costs.total_steps, self._curve.fit, self._even_s
        if total is None or not (math.isfinite(total) and 0 < step < total) or not even_s > 0:
            return 1.0
        x, plan = step / total, self._plan
        is_stale = plan.fit is not fit or abs(plan.even_s - even_s) > 0.02 * even_s
        if is_stale or not plan.begin <= x < plan.begin + _REPLAN:
            plan = self._plan = Stretches(fit, even_s, x, *self._planned(x, costs))
        return float(np.interp(x, plan.places, plan.stretches))

    def _planned(self, x: float, costs: Costs) -> tuple[Array, Array]:
        """Evenly spaced places from ``x`` to the end, and stretches there; one of 1 where progress is not seen."""
        fit = self._curve.fit
        if fit is None or self._elapsed_s <= 0:
            return np.array([x]), np.ones(1)
        left_s = self._elapsed_s * (1 - x) / x
        whole_s = self._elapsed_s + left_s
        places = x + (1 - x) * (np.arange(PLACES) + 0.5) / PLACES
        stretches = spread(
            fit.speed(places),
            snapshots=1 + self._owed * self._even_s / left_s,
            price=self._price(costs),
            most_rise=(self.max_regret * whole_s - self._regret_s) / left_s,
        )
        return places, stretches
