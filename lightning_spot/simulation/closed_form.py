"""What is known exactly, to check the simulator against, and for a quick answer; benchmarks/intervals.md derives it.

``period_s`` is the time from one snapshot's begin to the next's: the work between them and what training waits for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_spot.interval.adaptive import YoungDaly
from lightning_spot.simulation.job import SimulatedJob


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


def lost_s(period_s: float, drain_s: float, lag_s: float = 0.0) -> float:
    """Mean running time that a failure takes away, to first order.

    Half a period, and the time until a snapshot is safe; where the tier is always busy, half of that time again, since
    the newest one waits for the one under way.
    """
    waits_s = drain_s / 2 if drain_s > period_s else 0.0
    return period_s / 2 + lag_s + drain_s + waits_s


def overhead(period_s: float, stall_s: float, mtbf_s: float, classes: Sequence[FailureClass]) -> float:
    """Share of the time that snapshots and failures take, to first order."""
    return stall_s / period_s + sum(one.share * lost_s(period_s, one.drain_s, one.lag_s) for one in classes) / mtbf_s


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What to expect of a run whose machines are lost now and then.

    Attributes:
        stall_s: training waits for one snapshot at most (if nothing overlaps).
        safe_s: from a snapshot's begin until it is safe outside this machine.
        interval_s: from one snapshot to the next, as Young and Daly's rule chooses it.
        overhead: share of the time spent waiting for snapshots.
        loss_s: work that a preemption without notice takes away, on average.
        total: share of the time that both cost.
        behind_s: how much training the newest snapshot at each tier is behind, on average, by the tier's name.
    """

    stall_s: float
    safe_s: float
    interval_s: float
    overhead: float
    loss_s: float
    total: float
    behind_s: dict[str, float]


def outlook(job: SimulatedJob, mtbf_s: float) -> Outlook:
    """Say what to expect of a job that loses a machine every ``mtbf_s`` seconds."""
    costs = job.costs(mtbf_s)
    policy = YoungDaly()
    policy.learn(costs)
    interval_s, near_s = policy.interval_s(0), costs.drain_s
    return Outlook(
        stall_s=job.stall_s,
        safe_s=job.stall_s + near_s,
        interval_s=interval_s,
        overhead=job.stall_s / interval_s,
        loss_s=lost_s(interval_s, near_s),
        total=overhead(interval_s, job.stall_s, mtbf_s, [FailureClass(drain_s=near_s)]),
        behind_s={tier.name: lost_s(interval_s, tier.drain_s, tier.lag_s) for tier in job.tiers},
    )
