"""Policies side by side, on the same failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_spot.interval.adaptive import OverheadBudget, YoungDaly
from lightning_spot.interval.coci import COCI
from lightning_spot.interval.convergence import ConvergenceAware
from lightning_spot.interval.policy import EverySeconds, IntervalPolicy
from lightning_spot.simulation.engine import AtTier, places, simulate
from lightning_spot.simulation.failures import Failures
from lightning_spot.simulation.job import SimulatedJob, Tier

Makers = Mapping[str, Callable[[], IntervalPolicy]]

POLICIES: Makers = {
    "ConvergenceAware": ConvergenceAware,
    "YoungDaly": YoungDaly,
    "OverheadBudget": OverheadBudget,
    "COCI": COCI,
    "every 1 min": lambda: EverySeconds(60),
    "every 10 min": lambda: EverySeconds(600),
    "every 60 min": lambda: EverySeconds(3600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy, as means over all runs.

    Attributes:
        name: of the policy.
        snapshots: taken in an undisturbed run.
        total_s: time to finish, seconds; infinite if some run never does.
        error_s: its standard error.
        goodput: work over time to finish.
        stall: share of the work's time that training waited for snapshots.
        lost: share of it that was done again.
        down: without machines, as a share of it.
        restore: until training went on after failures, as a share of it.
        failures: per run.
        progress_lost: share of the whole fall of the loss that one failure takes away.
        price: of the run.
        tiers: what its snapshots at each tier are worth, nearest first.
    """

    name: str
    snapshots: int
    total_s: float
    error_s: float
    goodput: float
    stall: float
    lost: float
    down: float
    restore: float
    failures: float
    progress_lost: float
    price: float
    tiers: tuple[TierRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One tier under one policy, as means over all failures.

    Attributes:
        name: of the tier.
        drain_s: seconds it takes for one snapshot.
        survives: the worst failure it outlives, in lower case.
        behind_s: work that the newest snapshot there is behind when a failure comes.
        resumed: share of the failures after which the job went on from there.
        lost_s: work that each of these took away; 0 if there were none.
        price: of having the tier for the whole run.
    """

    name: str
    drain_s: float
    survives: str
    behind_s: float
    resumed: float
    lost_s: float
    price: float


def compare(
    job: SimulatedJob,
    failures: Failures,
    policies: Makers = POLICIES,
    *,
    runs: int = 1000,
    seed: int = 0,
    noise: float = 0.0,
) -> list[PolicyRow]:
    """Simulate a job with each policy.

    Args:
        job: what is done.
        failures: what happens to it; the same for all.
        policies: names and makers.
        runs: how many times.
        seed: of everything random.
        noise: of the loss's readings, see :func:`~lightning_spot.simulation.engine.places`.
    """
    return [row_of(name, make(), job, failures, runs=runs, seed=seed, noise=noise) for name, make in policies.items()]


def row_of(
    name: str,
    policy: IntervalPolicy,
    job: SimulatedJob,
    failures: Failures,
    *,
    runs: int,
    seed: int = 0,
    noise: float = 0.0,
) -> PolicyRow:
    """Simulate a job with one policy."""
    taken = places(policy, job, failures.mtbf_s, seed, noise)
    outcome = simulate(job, taken, failures, runs=runs, seed=seed)
    total_s, hits = float(outcome.total_s.mean()), float(outcome.failures.sum())
    return PolicyRow(
        name=name,
        snapshots=len(taken),
        total_s=total_s,
        error_s=float(outcome.total_s.std()) / runs**0.5 if math.isfinite(total_s) else math.inf,
        goodput=job.work_s / total_s,
        stall=float(outcome.stall_s.mean()) / job.work_s,
        lost=float(outcome.lost_s.mean()) / job.work_s,
        down=float(outcome.down_s.mean()) / job.work_s,
        restore=float(outcome.restore_s.mean()) / job.work_s,
        failures=hits / runs,
        progress_lost=float(outcome.progress_lost.sum()) / hits / _whole_fall(job) if hits else 0.0,
        price=job.whole_price_per_hour * total_s / 3600,
        tiers=tuple(_tier_row(*pair, hits, total_s) for pair in zip(job.tiers, outcome.tiers, strict=True)),
    )


def _tier_row(tier: Tier, found: AtTier, hits: float, total_s: float) -> TierRow:
    return TierRow(
        name=tier.name,
        drain_s=tier.drain_s,
        survives=tier.survives.name.lower(),
        behind_s=found.behind_s / max(1.0, hits),
        resumed=found.resumed / max(1.0, hits),
        lost_s=found.lost_s / max(1, found.resumed),
        price=tier.price_per_hour * total_s / 3600,
    )


def _whole_fall(job: SimulatedJob) -> float:
    if job.loss is None:
        return 1.0
    ends = job.loss(np.array([0.0, 1.0]))
    return float(ends[0] - ends[1]) or 1.0
