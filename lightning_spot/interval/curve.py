"""The loss curve of a run, fitted online: how fast the loss falls now, and how fast it will later.

Readings are kept as medians of at most 64 buckets of steps, whose width doubles as the run grows, so neither memory
nor time grows with it. The fit is an average over curves, each weighted by how well it explains the medians:
exponentials and power laws with a floor, ``floor + drop * shape(x)``. Early on, when the data cannot tell them apart,
all of them count; later the best does. Only derivatives are used, and only relative to each other: nothing depends on
the loss's scale or offset.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CAPACITY = 64
LEAST_IN_BUCKET = 5  # so that a spike is not the median
MOST_IN_BUCKET = 64
LEAST_POINTS = 12
SIGNIFICANT = 4.0
"""How many standard errors the last third of the curve must lie below the first one."""
BROKEN = 6.0
"""How many standard errors the latest buckets may miss the fit by before it is given up."""


class Buckets:
    """Medians of a metric over ranges of steps.

    Args:
        least: readings that a bucket has before it is closed.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._width = 1
        self._closed: list[list[float]] = []  # index, mean step, median, number of readings
        self._open: list[list[float]] = []  # step, value, number of readings
        self._index = 0

    def add(self, step: int, value: float) -> bool:
        """Another reading, of a step not before the last one; whether a bucket was closed by it."""
        closes = len(self._open) >= self._least and step // self._width != self._index
        if closes:
            self._close()
        if not self._open:
            self._index = step // self._width
        self._open.append([float(step), value, 1.0])
        if len(self._open) > MOST_IN_BUCKET:
            self._open = [_mean(pair) for pair in _pairs(self._open)]
        return closes

    def points(self) -> tuple[Array, Array, Array]:
        """Mean step, median and number of readings of each closed bucket, each of shape ``(buckets,)``."""
        table = np.array(self._closed, dtype=float).reshape(-1, 4)
        return table[:, 1], table[:, 2], table[:, 3]

    def keep_last(self, count: int) -> None:
        """Forget all closed buckets but the last ones."""
        self._closed = self._closed[-count:]

    def state_dict(self) -> dict[str, Any]:
        """All buckets."""
        return {"width": self._width, "closed": self._closed, "open": self._open, "index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the buckets of an earlier attempt."""
        self._width, self._index = state["width"], state["index"]
        self._closed, self._open = [list(row) for row in state["closed"]], [list(row) for row in state["open"]]

    def _close(self) -> None:
        step, _, count = _mean(self._open)
        self._closed.append([float(self._index), step, statistics.median(row[1] for row in self._open), count])
        self._open = []
        if len(self._closed) >= CAPACITY:
            self._width *= 2
            rows = [[row[0] // 2, *row[1:]] for row in self._closed]
            merged: dict[float, list[list[float]]] = {}
            for row in rows:
                merged.setdefault(row[0], []).append(row[1:])
            self._closed = [[index, *_mean(group)] for index, group in merged.items()]


def _pairs(rows: list[list[float]]) -> list[list[list[float]]]:
    return [rows[start : start + 2] for start in range(0, len(rows), 2)]


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
class Fit:
    """A falling curve.

    Attributes:
        drops: factor of each shape, shape ``(shapes,)``.
        shares: how probable each shape is; they sum to 1.
        floor: what the most probable one falls to.
    """

    drops: Array
    shares: Array
    floor: float

    def speed(self, x: Array) -> Array:
        """How fast the metric falls at ``x``, in its own unit per run: at least 0, of the shape of ``x``."""
        return (self.drops * self.shares) @ _slopes(x)

    def value(self, x: Array) -> Array:
        """The most probable curve at ``x``."""
        best = int(np.argmax(self.shares))
        return self.floor + self.drops[best] * _values(x)[best]  # type: ignore[no-any-return]


class LossCurve:
    """Fits a metric that is to fall.

    Args:
        averaged: whether each reading is a mean over many samples, as that of a validation is: one will do, then,
            where otherwise it takes several to tell a spike.

    Attributes:
        fit: the newest, or ``None`` while the metric does not clearly fall.
        version: changes whenever ``fit`` does.
    """

    def __init__(self, *, averaged: bool = False) -> None:
        self._buckets = Buckets(1 if averaged else LEAST_IN_BUCKET)
        self._unreadable = 0
        self.fit: Fit | None = None
        self.version = 0

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
                self._set(None)
            return
        self._unreadable = 0
        if self._buckets.add(step, value):
            self.refit(total_steps)

    def refit(self, total_steps: float) -> None:
        """Fit what is there."""
        steps, values, counts = self._buckets.points()
        if len(steps) < LEAST_POINTS or not math.isfinite(total_steps) or total_steps <= 0:
            self._set(None)
            return
        fitted = fit_points(steps / total_steps, values, counts)
        if fitted is BREAK:
            self._buckets.keep_last(3)  # a restart of the learning rate, or another phase: begin anew
            fitted = None
        self._set(fitted)

    def state_dict(self) -> dict[str, Any]:
        """The readings."""
        return self._buckets.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the readings of an earlier attempt; :meth:`refit` fits them."""
        self._buckets.load_state_dict(state)

    def _set(self, fit: Fit | None) -> None:
        if fit is not self.fit:
            self.version += 1
        self.fit = fit


BREAK = Fit(np.zeros(0), np.zeros(0), 0.0)
"""Stands for: the curve broke off lately."""


def fit_points(x: Array, y: Array, counts: Array) -> Fit | None:
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
        floors, drops, residuals = _least_squares(shapes, y, weights * robust)
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
    return Fit(np.maximum(drops, 0.0) * spread, shares / shares.sum(), lowest + float(floors[best]) * spread)


def _least_squares(shapes: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Floor and drop of each shape, and what is left, of shape ``(shapes, points)``."""
    share = weights / weights.sum()
    centre, mean = (shapes * share).sum(axis=1, keepdims=True), float((y * share).sum())
    varied = shapes - centre
    variance = (share * varied**2).sum(axis=1)
    drops = (share * varied * (y - mean)).sum(axis=1) / np.maximum(variance, 1e-300)
    floors = mean - drops * centre[:, 0]
    return floors, drops, y - floors[:, None] - drops[:, None] * shapes


def _falls(y: Array, weights: Array, sigma: float) -> bool:
    """Whether the last third lies clearly below the first one."""
    third = len(y) // 3
    first, last = np.median(y[:third]), np.median(y[-third:])
    error = 1.2533 * sigma * math.sqrt(1 / weights[:third].sum() + 1 / weights[-third:].sum())
    return bool(first - last > SIGNIFICANT * error)
