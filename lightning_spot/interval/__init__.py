"""Ground floor: when to take a snapshot. Pure: clock and step are parameters."""

from lightning_spot.interval.policy import EverySeconds, EverySteps, IntervalPolicy

__all__ = ["EverySeconds", "EverySteps", "IntervalPolicy"]
