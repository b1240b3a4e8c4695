"""When to take a snapshot. Pure: clock, step and measured costs are parameters."""

from lightning_spot.interval.adaptive import OverheadBudget, YoungDaly
from lightning_spot.interval.coci import COCI
from lightning_spot.interval.convergence import ConvergenceAware
from lightning_spot.interval.costs import Costs
from lightning_spot.interval.policy import EverySeconds, EverySteps, IntervalPolicy

__all__ = [
    "COCI",
    "ConvergenceAware",
    "Costs",
    "EverySeconds",
    "EverySteps",
    "IntervalPolicy",
    "OverheadBudget",
    "YoungDaly",
]
