"""The discrete-event simulator: from failure to failure, for all runs at once.

Snapshots are taken at fixed places of the work: a policy's state is kept in the snapshots, so after a failure it
decides again as it did. Between two failures nothing has to be simulated: where the work has got to, and what each tier
holds, follow from the time by searches in sorted tables. A run costs some array operations for each of its failures,
whatever the number of snapshots.

A tier takes the newest snapshot that the one before it holds, whenever it is free. Where snapshots come further apart
than it takes for one, it is free when each comes, and has it ``drain_s`` later. Where they come faster it is always
busy: its transfers follow each other without a gap from the first one of an attempt on, so the one under way, and the
snapshot that was newest when it began, follow from a division and a search in a sorted table. A transfer that is under
way when a failure comes begins anew with what was resumed from, if both ends are still there.

:func:`compare` has policies side by side, on the same failures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_spot.interval.adaptive import OverheadBudget, YoungDaly
from lightning_spot.interval.coci import COCI
from lightning_spot.interval.convergence import ConvergenceAware
from lightning_spot.interval.costs import Costs
from lightning_spot.interval.policy import EverySeconds, IntervalPolicy
from lightning_spot.simulation.failures import Failure, Failures

Array = NDArray[np.float64]
Loss = Callable[[Array], Array]
Indices = NDArray[np.int64]

# -- a job, and what to expect of it without a simulation -------------------------------------------------------------
# benchmarks/intervals.md derives the expectations. ``period_s`` is the time from the begin of one snapshot to that of
# the next: the work between them, and the time that training waits for one.


def exponential_loss(rate: float) -> Loss:
    """``exp(-rate * x)``: ``rate`` is COCI's a times the run's length."""
    return lambda x: np.exp(-rate * x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place in which snapshots are safe. It takes the newest one whenever it is free.

    Attributes:
        name: for people.
        drain_s: seconds it takes for one snapshot, and to read it back, at least 0.
        lag_s: from a snapshot's commit in the trainer's memory until the tier can begin with it, at least 0.
        survives: the worst failure that leaves its snapshots in place.
        price_per_hour: of having it, in any currency.
    """

    name: str
    drain_s: float = 0.0
    lag_s: float = 0.0
    survives: Failure = Failure.SERVER
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A training job. All times in seconds.

    Attributes:
        work_s: how long it trains undisturbed, without snapshots.
        steps: optimizer steps of it.
        stall_s: how long training waits for one snapshot, which is in memory when that ends.
        tiers: where its snapshots go, nearest first; one of them outlives every failure.
        restart_s: from the loss of a machine until machines run again; a process that crashed starts again at once.
        restore_s: from there until training goes on, without reading the snapshot.
        price_per_hour: of all its machines, in any currency.
        loss: the loss at a share of the work (0 to 1), any shape in, the same out.
    """

    work_s: float
    steps: int = 20_000
    stall_s: float = 1.0
    tiers: tuple[Tier, ...] = (Tier(name="storage"),)
    restart_s: float = 0.0
    restore_s: float = 0.0
    price_per_hour: float = 0.0
    loss: Loss | None = None

    def costs(self, mtbf_s: float) -> Costs:
        """What a policy would measure in it."""
        outside = [tier.drain_s for tier in self.tiers if tier.survives >= Failure.MACHINE]
        return Costs(stall_s=self.stall_s, mtbf_s=mtbf_s, drain_s=min(outside, default=0.0), total_steps=self.steps)


def chain(*tiers: Tier) -> tuple[Tier, ...]:
    """The memory of the job's own host and the given tiers behind it, nearest first.

    A tier gets a snapshot from the one before it, once it is whole there: so it is later by what that one takes, and
    cannot get a new one more often.
    """
    linked: list[Tier] = [Tier(name="memory of the host", survives=Failure.PROCESS)]
    for tier in tiers:
        before = linked[-1]
        lag_s = before.lag_s + before.drain_s
        linked.append(replace(tier, drain_s=max(tier.drain_s, before.drain_s), lag_s=lag_s))
    return tuple(linked)


def server_tier(snapshot_bytes: float, bytes_per_s: float, price_per_hour: float = 0.0) -> Tier:
    """A snapshot server on a machine of its own, ``bytes_per_s`` away."""
    drain_s = snapshot_bytes / bytes_per_s
    return Tier(name="snapshot server", drain_s=drain_s, survives=Failure.MACHINE, price_per_hour=price_per_hour)


def storage_tier(snapshot_bytes: float, bytes_per_s: float) -> Tier:
    """A bucket or file system that stores ``bytes_per_s``."""
    return Tier(name="storage", drain_s=snapshot_bytes / bytes_per_s)


def lost_s(period_s: float, drain_s: float, lag_s: float = 0.0) -> float:
    """Mean running time that a failure takes away, to first order.

    Half a period, and the time until a snapshot is safe; where the tier is always busy, half of that time again, since
    the newest one waits for the one under way.
    """
    waits_s = drain_s / 2 if drain_s > period_s else 0.0
    return period_s / 2 + lag_s + drain_s + waits_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What to expect of a run whose machines are lost now and then.

    Attributes:
        stall_s: training waits for one snapshot at most (if nothing overlaps).
        uploaded_s: from a snapshot's begin until it is outside of this machine.
        interval_s: from one snapshot to the next, as Young and Daly's rule chooses it.
        overhead: share of the time spent waiting for snapshots.
        loss_s: work that a preemption without notice takes away, on average.
    """

    stall_s: float
    uploaded_s: float
    interval_s: float
    overhead: float
    loss_s: float


def outlook(job: SimulatedJob, mtbf_s: float) -> Outlook:
    """Say what to expect of a job that loses a machine every ``mtbf_s`` seconds."""
    costs = job.costs(mtbf_s)
    policy = YoungDaly()
    policy.learn(costs)
    interval_s, near_s = policy.interval_s(0), costs.drain_s
    return Outlook(
        stall_s=job.stall_s,
        uploaded_s=job.stall_s + near_s,
        interval_s=interval_s,
        overhead=job.stall_s / interval_s,
        loss_s=lost_s(interval_s, near_s),
    )


# -- its simulation ---------------------------------------------------------------------------------------------------

NEVER_S = 1e15
ALWAYS_S = -1e15

MOST_FAILURES = 5_000
"""A run that was stopped so often is given up: its total time is infinite."""


class Delivery:
    """The snapshots of an undisturbed job on their way to one tier.

    Args:
        ready_s: when the tier can begin with each, growing, of shape ``(snapshots + 1,)``; the first one is the start.
        drain_s: seconds the tier takes for one.
    """

    def __init__(self, ready_s: Array, drain_s: float) -> None:
        self.drain_s = drain_s
        self._ready_s = ready_s
        self._next_s = np.append(ready_s[1:], NEVER_S)
        shorter = np.diff(ready_s[1:]) < drain_s * (1 - 1e-9)
        # Before the first gap as in it, behind the last one likewise.
        self._busy = np.pad(shorter, 1, mode="edge") if len(shorter) else np.zeros(len(ready_s), dtype=bool)

    def newest(self, now_s: Array, resumed: Indices, stored: Indices, caught_up_s: Array) -> Indices:
        """The newest snapshot that the tier holds; all of shape ``(runs,)``, snapshots as places in the table.

        Args:
            now_s: on the clock of the undisturbed job.
            resumed: snapshot that the attempt went on from.
            stored: newest one that the tier stored when the attempt before it ended.
            caught_up_s: when the tier has ``resumed``.
        """
        opened_s = np.maximum(self._next_s[resumed], caught_up_s)  # its first transfer of this attempt begins
        sent_s = now_s - self.drain_s  # the last transfer that is done began
        if self._busy.any():
            place = np.clip(np.searchsorted(self._ready_s, sent_s, side="right") - 1, 0, None)
            turns = np.floor((now_s - opened_s) / self.drain_s) - 1
            sent_s = np.where(self._busy[place], opened_s + turns * self.drain_s, sent_s)
        found = np.searchsorted(self._ready_s, sent_s, side="right") - 1
        return np.where(sent_s >= opened_s, found, np.where(now_s >= caught_up_s, resumed, stored))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each run; arrays of shape ``(runs,)``, or ``(tiers,)``, times in seconds.

    Attributes:
        total_s: from the first start to the end; infinite for a run that was given up.
        stall_s: training waited for snapshots, also those taken again.
        lost_s: work done again.
        down_s: no machines.
        restore_s: machines ran, and training did not yet.
        failures: number of failures.
        progress_lost: fall of the loss that failures took away, in sum; zeros for a job without a loss.
        behind_s: for each tier of the job, over all failures: work that the newest snapshot there was behind.
        resumed: for each tier, the failures after which the job went on from there: no nearer tier had one as new.
        resumed_lost_s: for each tier, the work that these took away.
    """

    total_s: Array
    stall_s: Array
    lost_s: Array
    down_s: Array
    restore_s: Array
    failures: Array
    progress_lost: Array
    behind_s: Array
    resumed: Array
    resumed_lost_s: Array


def places(policy: IntervalPolicy, job: SimulatedJob, mtbf_s: float, seed: int = 0, noise: float = 0.0) -> Array:
    """Where in the work a policy takes its snapshots, in seconds of work, if nothing goes wrong.

    Args:
        policy: a fresh one.
        job: to take them in.
        mtbf_s: what it comes to know of failures.
        seed: of the noise.
        noise: standard deviation of the loss's readings.
    """
    step_s = job.work_s / job.steps
    listens = policy.monitor != ""  # another one decides by the time alone: where nothing can be due it is not asked
    losses: list[float] = []
    if listens and job.loss is not None:
        drawn = noise * np.random.default_rng(seed).standard_normal(job.steps)
        losses = (job.loss(np.arange(1, job.steps + 1) / job.steps) + drawn).tolist()
    taken: list[float] = []
    policy.learn(job.costs(mtbf_s))
    policy.taken(0, 0.0)
    step = 1
    while step < job.steps:
        now_s = step * step_s + len(taken) * job.stall_s
        if losses:
            policy.progress(step, losses[step - 1])
        if policy.due(step, now_s):
            policy.taken(step, now_s)
            taken.append(step * step_s)
        elif not listens:
            step += max(0, int(policy.wait_s(step, now_s) / step_s) - 1)
        step += 1
    return np.array(taken)


def simulate(job: SimulatedJob, taken: Array, failures: Failures, *, runs: int, seed: int = 0) -> Outcome:
    """Simulate a job.

    Args:
        job: what is done.
        taken: where snapshots are taken, seconds of work, growing (see :func:`places`).
        failures: what happens to it.
        runs: how many times.
        seed: of everything random.
    """
    begun = np.concatenate([[0.0], taken])
    count = np.arange(len(begun))
    clock = begun + job.stall_s * np.maximum(count - 1, 0)  # when each begins, undisturbed
    after = begun + job.stall_s * count  # when it is in memory, and training goes on behind it
    end_s = job.work_s + job.stall_s * len(taken)
    found = Outcome(*np.zeros((7, runs)), *np.zeros((3, len(job.tiers))))
    tiers = _Tiers(job, begun, after, found)

    at = np.zeros(runs, dtype=np.int64)  # the snapshot each run goes on from
    running = np.arange(runs)
    random = np.random.default_rng(seed)
    for _, (drawn, kinds) in zip(range(MOST_FAILURES), failures.events(random, runs), strict=False):
        up, here = drawn[running], at[running]
        restoring = np.minimum(up, tiers.restore_s[running])
        now = after[here] + up - tiers.restore_s[running]
        reached = after[here] + up - restoring
        done = reached >= end_s
        reached = np.minimum(reached, end_s)
        last = np.searchsorted(clock, reached, side="right") - 1
        work = begun[last] + np.maximum(reached - after[last], 0.0)
        work = np.where(done, job.work_s, work)
        trained = reached - after[here]
        found.restore_s[running] += restoring
        found.stall_s[running] += trained - (work - begun[here])
        found.total_s[running] += restoring + trained
        failed = ~done
        gone, work = running[failed], work[failed]
        at[gone] = kept = tiers.fail(gone, kinds[gone], here[failed], now[failed], work)
        found.lost_s[gone] += work - begun[kept]
        found.failures[gone] += 1
        found.down_s[gone] += tiers.down_s[gone]
        found.total_s[gone] += tiers.down_s[gone]
        if job.loss is not None:
            found.progress_lost[gone] += job.loss(begun[kept] / job.work_s) - job.loss(work / job.work_s)
        running = gone
        if not len(running):
            break
    found.total_s[running] = np.inf
    return found


class _Tiers:
    """What each tier holds, run by run, and what a failure leaves of it."""

    def __init__(self, job: SimulatedJob, begun: Array, committed: Array, found: Outcome) -> None:
        runs, self._job, self._begun, self._committed, self._found = len(found.total_s), job, begun, committed, found
        self.restore_s = np.zeros(runs)  # of the attempt that runs
        self.down_s = np.zeros(runs)  # before it
        self._drain_s = np.array([[tier.drain_s] for tier in job.tiers])
        self._survives = np.array([[tier.survives] for tier in job.tiers])
        self._deliveries = [Delivery(committed + tier.lag_s, tier.drain_s) for tier in job.tiers]
        self._newest = np.zeros((len(job.tiers), runs), dtype=np.int64)

    def fail(self, gone: Indices, kinds: Indices, here: Indices, now: Array, work: Array) -> Indices:
        """Failures of the runs ``gone``, all other arguments of their shape; returns the snapshots they go on from."""
        failed_s = self._committed[here] - self.restore_s[gone] - self.down_s[gone]  # the attempt before them ended
        stored = self._newest[:, gone]
        caught_up_s = np.where(stored >= here, ALWAYS_S, failed_s + self._drain_s)
        at_tiers = zip(self._deliveries, stored, caught_up_s, strict=True)
        newest = np.array([delivery.newest(now, here, *at_tier) for delivery, *at_tier in at_tiers])
        left = np.where(self._survives >= kinds, newest, -1)
        source = left.argmax(axis=0)  # the first, hence nearest, of those with the newest
        kept: Indices = left.max(axis=0)
        self._newest[:, gone] = np.where(left >= 0, newest, kept)  # a lost tier owes nothing older than what is resumed
        count, lost_s = len(newest), work - self._begun[kept]
        self._found.behind_s[:] += (work - self._begun[newest]).sum(axis=1)
        self._found.resumed[:] += np.bincount(source, minlength=count)
        self._found.resumed_lost_s[:] += np.bincount(source, weights=lost_s, minlength=count)
        self.restore_s[gone] = self._job.restore_s + self._drain_s[source, 0]
        self.down_s[gone] = np.where(kinds >= Failure.MACHINE, self._job.restart_s, 0.0)
        return kept


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
        blocked: share of the work's time that training waited for snapshots.
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
    blocked: float
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
        noise: of the loss's readings, see :func:`~lightning_spot.simulation.simulator.places`.
    """
    fall = 1.0 if job.loss is None else float(-np.diff(job.loss(np.array([0.0, 1.0])))[0]) or 1.0
    rows = []
    for name, make in policies.items():
        taken = places(make(), job, failures.mtbf_s, seed, noise)
        outcome = simulate(job, taken, failures, runs=runs, seed=seed)
        total_s, hits = float(outcome.total_s.mean()), float(outcome.failures.sum())
        tiers = [
            TierRow(
                name=tier.name,
                drain_s=tier.drain_s,
                survives=tier.survives.name.lower(),
                behind_s=float(behind_s) / max(1.0, hits),
                resumed=float(resumed) / max(1.0, hits),
                lost_s=float(lost_s) / max(1.0, resumed),
                price=tier.price_per_hour * total_s / 3600,
            )
            for tier, behind_s, resumed, lost_s in zip(
                job.tiers, outcome.behind_s, outcome.resumed, outcome.resumed_lost_s, strict=True
            )
        ]
        row = PolicyRow(
            name=name,
            snapshots=len(taken),
            total_s=total_s,
            error_s=float(outcome.total_s.std()) / runs**0.5 if math.isfinite(total_s) else math.inf,
            goodput=job.work_s / total_s,
            blocked=float(outcome.stall_s.mean()) / job.work_s,
            lost=float(outcome.lost_s.mean()) / job.work_s,
            down=float(outcome.down_s.mean()) / job.work_s,
            restore=float(outcome.restore_s.mean()) / job.work_s,
            failures=hits / runs,
            progress_lost=float(outcome.progress_lost.sum()) / hits / fall if hits else 0.0,
            price=sum(tier.price for tier in tiers) + job.price_per_hour * total_s / 3600,
            tiers=tuple(tiers),
        )
        rows.append(row)
    return rows
