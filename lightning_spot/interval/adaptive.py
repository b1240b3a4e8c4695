"""Policies that find the interval from measured costs: Young and Daly's optimum, and CheckFreq's budget."""

from __future__ import annotations

import math

from lightning_spot.interval.policy import ByTime, check_share

FIRST_S = 10.0
"""The interval until something was measured: a first snapshot soon both measures and protects."""


def young_daly_s(stall_s: float, mtbf_s: float) -> float:
    """Work between two snapshots that makes the expected time to finish shortest, seconds.

    Daly's higher-order estimate (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
    dumps", FGCS 22, 2006, eq. 37), which refines Young's ``sqrt(2 * stall * mtbf)``.

    Args:
        stall_s: cost of one snapshot, at least 0.
        mtbf_s: mean time between failures, more than 0.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


class OverheadBudget(ByTime):
    """As often as a share of the training time allows, whatever the risk (CheckFreq, Mohan et al., FAST 2021).

    Args:
        max_overhead: the share of the time that training may wait for snapshots.

    Raises:
        SettingsError: if it is no share.
    """

    def __init__(self, max_overhead: float = 0.03) -> None:
        super().__init__()
        self.max_overhead = check_share("max_overhead", max_overhead)

    def interval_s(self, step: int) -> float:
        """``stall / max_overhead``, and never faster than the nearest tier that outlives the machine takes them."""
        costs = self._costs
        return FIRST_S if costs is None else max(self.shortest_s(), costs.drain_s)

    def shortest_s(self) -> float:
        """``stall / max_overhead``."""
        return self._costs.stall_s / self.max_overhead if self._costs is not None else 0.0


class YoungDaly(OverheadBudget):
    """The interval with the shortest expected time to finish, from measured cost and failure rate.

    Args:
        max_overhead: the share of the time that training may wait for snapshots, even where more would pay.

    Raises:
        SettingsError: if it is no share.
    """

    def interval_s(self, step: int) -> float:
        """Daly's work between snapshots and the snapshot itself, within the budget and the nearest tier's pace.

        Training waits once for a snapshot, whatever the number of tiers, so the optimum for one tier holds for several.
        """
        costs, within_s = self._costs, super().interval_s(step)
        return within_s if costs is None else max(young_daly_s(costs.stall_s, costs.mtbf_s) + costs.stall_s, within_s)
