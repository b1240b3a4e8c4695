"""The part of benchmarks/intervals.md on several tiers: what a snapshot server gains, closed forms for failures.

``python -m benchmarks.intervals`` calls it; it has no command of its own.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np

from benchmarks.closed_form import FailureClass, expected_total_s, shares_of
from lightning_spot.config import format_seconds
from lightning_spot.interval.convergence import ConvergenceAware
from lightning_spot.interval.policy import EverySeconds
from lightning_spot.simulation.failures import Failure, Fleet, Mixed, Weibull
from lightning_spot.simulation.simulator import (
    PolicyRow,
    SimulatedJob,
    Tier,
    chain,
    compare,
    exponential_loss,
    server_tier,
    simulate,
    storage_tier,
)

HOUR_S = 3600.0
NODE_BYTES_PER_S = 600e6
STALL_S_PER_GB = 0.1
RESTART_S, RESTORE_S = 600.0, 60.0


MIXES = ((168.0, 720.0, 16.7, 125.0), (4.0, 720.0, 16.7, 125.0), (4.0, 2.0, 1.7, 12.5))
"""Hours between crashes and between losses of the snapshot server, seconds that server and storage take."""


def job_of(snapshot_bytes: float, bucket_bytes_per_s: float, *, with_node: bool) -> SimulatedJob:
    """24 hours of work."""
    durable = storage_tier(snapshot_bytes, bucket_bytes_per_s)
    node = server_tier(snapshot_bytes, NODE_BYTES_PER_S)
    return SimulatedJob(
        work_s=24 * HOUR_S,
        stall_s=STALL_S_PER_GB * snapshot_bytes / 1e9,
        tiers=chain(node, durable) if with_node else chain(durable),
        restart_s=RESTART_S,
        restore_s=RESTORE_S,
        loss=exponential_loss(5),
    )


def mix_of(snapshot_bytes: float, machines: int, lifetime_s: float = 2 * HOUR_S) -> Mixed:
    """Spot machines that live for ``lifetime_s``, and what else fails, as ``lightning-spot simulate`` assumes it."""
    return Mixed(Fleet(Weibull(lifetime_s), machines), server_back_s=RESTART_S + snapshot_bytes / NODE_BYTES_PER_S)


def gains(runs: int) -> str:
    """The table of what a snapshot server gains."""
    lines, ours = [], {"ConvergenceAware": ConvergenceAware}
    for snapshot_bytes, bucket, machines in itertools.product((1e9, 10e9, 100e9), (80e6, 400e6), (1, 8)):
        failures = mix_of(snapshot_bytes, machines)
        without, having = (
            row
            for with_node in (False, True)
            for row in compare(job_of(snapshot_bytes, bucket, with_node=with_node), failures, ours, runs=runs)
        )
        every = [format_seconds(_period_s(row, snapshot_bytes)) for row in (without, having)]
        lost = [format_seconds(_lost_s(row)) for row in (without, having)]
        saved = 1 - having.total_s / without.total_s
        worth = machines * (without.total_s / having.total_s - 1)
        lines.append(
            f"| {snapshot_bytes / 1e9:.0f} GB | {bucket / 1e6:.0f} MB/s | {machines} | {' → '.join(every)} |"
            f" {' → '.join(lost)} | {without.total_s / HOUR_S:.1f} h → {having.total_s / HOUR_S:.1f} h"
            f" ({-100 * saved:+.1f} %) | {max(0.0, worth):.2f} |"
        )
    return "\n".join(lines)


def _period_s(row: PolicyRow, snapshot_bytes: float) -> float:
    """From one snapshot's begin to the next's, on average over an undisturbed run."""
    return 24 * HOUR_S / row.snapshots + STALL_S_PER_GB * snapshot_bytes / 1e9


def _lost_s(row: PolicyRow) -> float:
    return sum(tier.resumed * tier.lost_s for tier in row.tiers)


def node_gone() -> float:
    """Share of the lost machines that are lost while the snapshot server is gone, for 10 GB."""
    shares = shares_of(mix_of(10e9, 1))
    return shares[Failure.SERVER] / (shares[Failure.SERVER] + shares[Failure.MACHINE])


def mixed_closed_form(runs: int) -> list[float]:
    """Simulated over exact time with three classes of failures, for several settings."""
    ratios = []
    for process_h, node_h, node_s, durable_s in MIXES:
        interval_s, stall_s = 82.0, 1.0
        count = int(5 * 24 * HOUR_S / interval_s)
        node = Tier(name="node", drain_s=node_s, survives=Failure.MACHINE)
        tiers = chain(node, Tier(name="durable", drain_s=durable_s))
        job = SimulatedJob(
            work_s=count * interval_s, stall_s=stall_s, tiers=tiers, restore_s=RESTORE_S, restart_s=RESTART_S
        )
        failures = Mixed(Fleet(Weibull(HOUR_S, k=1)), process_h * HOUR_S, node_h * HOUR_S, RESTART_S + node_s)
        taken = np.arange(1, count + 1) * interval_s
        outcome = simulate(job, taken, failures, runs=runs)
        classes = []
        for kind, share in shares_of(failures).items():
            tier = next(tier for tier in tiers if tier.survives >= kind)
            restart_s = RESTART_S if kind >= Failure.MACHINE else 0.0
            one = FailureClass(share=share, drain_s=tier.drain_s, lag_s=tier.lag_s, restart_s=restart_s)
            classes.append(replace(one, restore_s=RESTORE_S + tier.drain_s))
        exact_s = expected_total_s(job.work_s, interval_s, stall_s, failures.mtbf_s, classes)
        ratios.append(float(outcome.total_s.mean()) / exact_s)
    return ratios


def losing_cases(runs: int) -> str:
    """Where the rule is not the best there is: 100 GB, a bucket of 80 MB/s and no snapshot server."""
    lines = []
    for name, machines, lifetime_h, crash_h in (
        ("8 machines are lost about as often as the bucket takes a snapshot", 8, 2.0, 168.0),
        ("one machine's process crashes as often as the machine is lost (every 4 h)", 1, 4.0, 4.0),
        ("its process crashes ten times as often (every 2 h) as the machine is lost", 1, 20.0, 2.0),
    ):
        job = replace(job_of(100e9, 80e6, with_node=False), loss=None)
        failures = replace(mix_of(100e9, machines, lifetime_h * HOUR_S), process_mtbf_s=crash_h * HOUR_S)
        every = (150, 300, 600, 1200)
        policies = {f"every {s} s": functools.partial(EverySeconds, s) for s in every}
        ours, *rows = compare(job, failures, {"ours": ConvergenceAware, **policies}, runs=runs)
        ours_s, fixed = ours.total_s, {s: row.total_s for s, row in zip(every, rows, strict=True)}
        best = min(fixed, key=lambda s: fixed[s])
        longer = ours_s / fixed[best] - 1
        lines.append(f"- {name}: {longer:.1%} longer than with a snapshot every {format_seconds(best)}.")
    return "\n".join(lines)
