"""Loss curves over a run, as functions of the share of the work done."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Loss = Callable[[Array], Array]


def exponential(rate: float) -> Loss:
    """``exp(-rate * x)``: ``rate`` is COCI's a times the run's length."""
    return lambda x: np.exp(-rate * x)


def power(exponent: float = 0.5, offset: float = 0.01) -> Loss:
    """``(1 + x / offset) ** -exponent``: heavy-tailed, as scaling laws are."""
    return lambda x: (1 + x / offset) ** -exponent


def floor(rate: float = 30.0) -> Loss:
    """A fall that is over early: the rest of the run is a plateau."""
    return lambda x: 0.5 + 0.5 * np.exp(-rate * x)


def step_schedule(drops: tuple[float, ...] = (0.3, 0.6, 0.8)) -> Loss:
    """A learning rate that is cut now and then: the loss falls anew after each cut."""
    begins = np.array([0.0, *drops])
    sizes = 0.5 ** np.arange(len(begins))

    def loss(x: Array) -> Array:
        since = np.maximum(np.asarray(x)[..., None] - begins, 0.0)
        return (sizes * np.exp(-12 * since)).sum(axis=-1)  # type: ignore[no-any-return]

    return loss
