"""The time to finish that is known exactly: the simulator is checked against it; benchmarks/intervals.md derives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_spot.simulation.failures import Failure, Mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """One kind of failure.

    Attributes:
        share: of all failures.
        drain_s: seconds that the nearest tier which outlives it takes for a snapshot.
        lag_s: from a snapshot's commit until that tier can begin with it.
        restore_s: from a restart until training goes on.
        restart_s: from the failure until machines run again.
    """

    share: float = 1.0
    drain_s: float = 0.0
    lag_s: float = 0.0
    restore_s: float = 0.0
    restart_s: float = 0.0


def shares_of(failures: Mixed) -> dict[Failure, float]:
    """Of all failures, by what they take away."""
    process, gone = failures.mtbf_s / failures.process_mtbf_s, failures.server_gone
    machine = 1 - process
    return {Failure.PROCESS: process, Failure.MACHINE: machine * (1 - gone), Failure.SERVER: machine * gone}


def safe_snapshots(period_s: float, drain_s: float, mtbf_s: float) -> float:
    """Expected number of snapshots of an attempt that a failure finds safe at a tier, with a constant hazard.

    Those of an idle tier are safe ``k * period_s + drain_s`` after training began, ``k = 1, 2, …``, which makes a
    geometric series. A busy tier is done ``period_s + j * drain_s`` after it, with the newest that there was
    ``drain_s`` before.
    """
    if drain_s <= period_s:
        return math.exp(-drain_s / mtbf_s) / math.expm1(period_s / mtbf_s)
    turns = np.arange(1, 2 + math.ceil(40 * mtbf_s / drain_s))
    newest = 1 + np.floor((turns - 1) * drain_s / period_s)
    gained = np.diff(newest, prepend=0.0)
    return float((gained * np.exp(-(period_s + turns * drain_s) / mtbf_s)).sum())


def expected_total_s(
    work_s: float, interval_s: float, stall_s: float, mtbf_s: float, classes: Sequence[FailureClass] = (FailureClass(),)
) -> float:
    """Expected time to finish with evenly spaced snapshots and a constant hazard.

    For one class of failures and a tier that takes no time it is Daly's (2006, eq. 20). With several classes it leaves
    out failures that come before a farther tier has caught up with what was resumed from.

    Args:
        work_s: of the job; a whole number of intervals.
        interval_s: work between two snapshots.
        stall_s: of one snapshot.
        mtbf_s: mean time between failures, which may come at any time but while no machine is there.
        classes: of failures; their shares sum to 1.
    """
    restored = sum(one.share * math.exp(-one.restore_s / mtbf_s) for one in classes)
    period_s = interval_s + stall_s
    safe = sum(
        one.share * math.exp(-one.lag_s / mtbf_s) * safe_snapshots(period_s, one.drain_s, mtbf_s) for one in classes
    )
    attempts = work_s / interval_s / (restored * safe)
    return attempts * (mtbf_s + sum(one.share * one.restart_s for one in classes))
