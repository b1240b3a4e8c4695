"""What to expect of a run, to first order: for a quick answer where a simulation would take too long."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spot.interval.adaptive import YoungDaly
from lightning_spot.simulation.closed_form import FailureClass, lost_s, overhead
from lightning_spot.simulation.job import Job


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


def outlook(job: Job, mtbf_s: float) -> Outlook:
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
