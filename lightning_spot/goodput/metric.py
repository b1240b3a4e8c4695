"""Goodput as a metric: the share of a run's time that was spent on training that was kept."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric

from lightning_spot.goodput.ledger import Spent


class Goodput(Metric):
    """Productive time over all time of a run, between 0 and 1.

    Total time alone hides how much was lost, goodput alone how long it took: ``lightning-spot report`` has both. States
    are sums of seconds (float64), so they add up over attempts and over ranks.

    Args:
        options: of every torchmetrics metric, such as ``sync_on_compute``.

    Example::

        goodput = Goodput()
        goodput.update(productive_s=90.0, blocked_s=1.0, lost_s=4.0, restore_s=2.0, down_s=3.0)
        goodput.compute()  # tensor(0.9000)
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in Spent.__slots__:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self,
        productive_s: float,
        blocked_s: float = 0.0,
        lost_s: float = 0.0,
        restore_s: float = 0.0,
        down_s: float = 0.0,
        startup_s: float = 0.0,
    ) -> None:
        """Add seconds.

        Args:
            productive_s: trained, and kept.
            blocked_s: waited for snapshots.
            lost_s: trained, and done again.
            restore_s: found and read what an attempt went on from.
            down_s: without machines.
            startup_s: the rest of the time from a start until training began.
        """
        # All are named above: so a MetricCollection knows which values are for this metric.
        spent = Spent(
            productive_s=productive_s,
            blocked_s=blocked_s,
            lost_s=lost_s,
            restore_s=restore_s,
            down_s=down_s,
            startup_s=startup_s,
        )
        for name in Spent.__slots__:
            setattr(self, name, getattr(self, name) + getattr(spent, name))

    def compute(self) -> torch.Tensor:
        """Productive over total seconds; 1 before any time has passed."""
        productive, *badput = (getattr(self, name) for name in Spent.__slots__)
        whole = productive + sum(badput)
        return torch.where(whole > 0, productive / whole.clamp(min=1e-9), torch.ones_like(whole)).float()
