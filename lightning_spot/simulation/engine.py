"""The discrete-event simulator: from failure to failure, for all runs at once.

Snapshots are taken at fixed places of the work: a policy's state is kept in the snapshots, so after a failure it
decides again as it did. Between two failures nothing has to be simulated: where the work has got to follows from the
time by a search in a sorted table. A run costs some array operations for each of its failures, whatever the number of
snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.simulation.failures import Failures
from lightning_spot.simulation.job import Job

Array = NDArray[np.float64]

MOST_FAILURES = 5_000
"""A run that was stopped so often is given up: its total time is infinite."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each run; all of shape ``(runs,)``, times in seconds.

    Attributes:
        total_s: from the first start to the end; infinite for a run that was given up.
        stall_s: training waited for snapshots, also those taken again.
        lost_s: work done again.
        down_s: no machines.
        restore_s: machines ran, and training did not yet.
        failures: number of failures.
        progress_lost: fall of the loss that failures took away, in sum; zeros for a job without a loss.
    """

    total_s: Array
    stall_s: Array
    lost_s: Array
    down_s: Array
    restore_s: Array
    failures: Array
    progress_lost: Array


def places(policy: IntervalPolicy, job: Job, mtbf_s: float, seed: int = 0, noise: float = 0.0) -> Array:
    """Where in the work a policy takes its snapshots, in seconds of work, if nothing goes wrong.

    Args:
        policy: a fresh one.
        job: to take them in.
        mtbf_s: what it comes to know of failures.
        seed: of the noise.
        noise: standard deviation of the loss's readings.
    """
    step_s = job.work_s / job.steps
    random = np.random.default_rng(seed)
    if job.loss is not None:
        shares = np.arange(1, job.steps + 1) / job.steps
        losses = (job.loss(shares) + noise * random.standard_normal(job.steps)).tolist()
    taken: list[float] = []
    policy.learn(job.costs(mtbf_s))
    policy.taken(0, 0.0)
    now_s, stored_s = 0.0, 0.0
    for step in range(1, job.steps):
        now_s += step_s
        if job.loss is not None:
            policy.progress(step, losses[step - 1])
        if policy.due(step, now_s) and now_s >= stored_s:
            policy.taken(step, now_s)
            taken.append(step * step_s)
            stored_s = now_s + job.drain_s  # the ring is full until then
            now_s += job.stall_s
    return np.array(taken)


def simulate(job: Job, taken: Array, failures: Failures, *, runs: int, seed: int = 0) -> Outcome:
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
    after = begun + job.stall_s * count  # when training goes on behind it
    safe = clock + np.maximum(job.safe_s, job.stall_s)
    safe[0] = 0.0
    end_s = job.work_s + job.stall_s * len(taken)

    total, stall, lost, down, restore, hits, progress = (np.zeros(runs) for _ in range(7))
    at = np.zeros(runs, dtype=int)  # the snapshot each run goes on from
    running = np.arange(runs)
    random = np.random.default_rng(seed)
    for number, drawn in zip(range(MOST_FAILURES), failures.uptimes(random, runs), strict=False):
        up = drawn[running]
        here = at[running]
        restoring = np.minimum(up, job.restore_s if number else 0.0)
        reached = after[here] + up - restoring
        done = reached >= end_s
        reached = np.minimum(reached, end_s)
        last = np.searchsorted(clock, reached, side="right") - 1
        work = begun[last] + np.maximum(reached - after[last], 0.0)
        work = np.where(done, job.work_s, work)
        # What is not safe when the machine goes is gone; what was resumed from is safe.
        kept = np.maximum(np.searchsorted(safe, reached, side="right") - 1, here)
        trained = reached - after[here]
        restore[running] += restoring
        stall[running] += trained - (work - begun[here])
        total[running] += restoring + trained
        failed = ~done
        gone = running[failed]
        lost[gone] += (work - begun[kept])[failed]
        hits[gone] += 1
        down[gone] += job.restart_s
        total[gone] += job.restart_s
        if job.loss is not None:
            fall = job.loss(begun[kept] / job.work_s) - job.loss(work / job.work_s)
            progress[gone] += fall[failed]
        at[running] = kept
        running = gone
        if not len(running):
            return Outcome(total, stall, lost, down, restore, hits, progress)
    total[running] = np.inf
    return Outcome(total, stall, lost, down, restore, hits, progress)
