"""How to spread snapshots over a run so that a failure loses the least progress, at a bounded price in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Stretch = TypeVar("Stretch", float, Array)

WIDEST = 2.0
"""An interval is at most so many times the evenly spaced one, and at least its inverse."""


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
