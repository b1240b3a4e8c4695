"""Writes benchmarks/intervals.md: what the interval policies do, simulated, and the simulator against a real run.

``python -m benchmarks.intervals [--quick]``; every figure in the document comes from here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import tier_pace
from benchmarks.closed_form import FailureClass, expected_total_s
from benchmarks.measure import scratch
from lightning_spot.goodput.ledger import AttemptRecord
from lightning_spot.goodput.records import read_records
from lightning_spot.simulation.failures import Array, Failures, Fleet, Trace, Weibull
from lightning_spot.simulation.simulator import Loss, PolicyRow, SimulatedJob, Tier, compare, exponential_loss, simulate

ROOT = Path(__file__).parent.parent
HOUR_S = 3600.0


def power_loss(exponent: float = 0.5, offset: float = 0.01) -> Loss:
    """``(1 + x / offset) ** -exponent``: heavy-tailed, as scaling laws are."""
    return lambda x: (1 + x / offset) ** -exponent


def floor_loss(rate: float = 30.0) -> Loss:
    """A fall that is over early: the rest of the run is a plateau."""
    return lambda x: 0.5 + 0.5 * np.exp(-rate * x)


def stepwise_loss(drops: tuple[float, ...] = (0.3, 0.6, 0.8)) -> Loss:
    """A learning rate that is cut now and then: the loss falls anew after each cut."""
    begins = np.array([0.0, *drops])
    sizes = 0.5 ** np.arange(len(begins))

    def loss(x: Array) -> Array:
        since = np.maximum(np.asarray(x)[..., None] - begins, 0.0)
        return (sizes * np.exp(-12 * since)).sum(axis=-1)  # type: ignore[no-any-return]

    return loss


@dataclass(frozen=True, slots=True)
class Bathtub:
    """Many die young, few in the middle, the rest at an age limit, as in Google's class of at most 24 hours."""

    mean_s: float
    early: float = 0.3

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""
        young = random.exponential(0.05, shape)
        old = np.maximum(1 - random.exponential(0.1, shape), 0.0)
        drawn = np.where(random.random(shape) < self.early, young, old)
        mean = self.early * 0.05 + (1 - self.early) * (1 - 0.1 * (1 - np.exp(-10.0)))
        return drawn * (self.mean_s / mean)  # type: ignore[no-any-return]


CURVES: dict[str, Loss] = {
    "exponential, a·T = 3": exponential_loss(3),
    "exponential, a·T = 5": exponential_loss(5),
    "exponential, a·T = 8": exponential_loss(8),
    "exponential, a·T = 12": exponential_loss(12),
    "power law": power_loss(),
    "floor reached early": floor_loss(),
    "step learning rate": stepwise_loss(),
}
HAZARDS: dict[str, Failures] = {
    "exponential": Fleet(Weibull(2 * HOUR_S, k=1)),
    "Weibull 0.6": Fleet(Weibull(2 * HOUR_S)),
    "bathtub": Fleet(Bathtub(2 * HOUR_S)),
    "4 of 16 at a time": Fleet(Weibull(8 * HOUR_S, k=1), 16, 4),
}
NOISE = 0.02
DURABLE = (Tier(name="storage", drain_s=3.0),)

TEMPLATE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True, slots=True)
class RealRun:
    """A training run under kills, and what the simulator says of it; seconds."""

    kills: int
    measured_s: float
    predicted_s: float


def study(runs: int) -> dict[tuple[str, str], dict[str, PolicyRow]]:
    found = {}
    for (curve, loss), (hazard, failures) in itertools.product(CURVES.items(), HAZARDS.items()):
        job = SimulatedJob(work_s=48 * HOUR_S, stall_s=2.0, tiers=DURABLE, restart_s=600.0, restore_s=60.0, loss=loss)
        found[curve, hazard] = {row.name: row for row in compare(job, failures, runs=runs, noise=NOISE)}
        print(f"  {curve}, {hazard}", file=sys.stderr, flush=True)
    return found


def closed_form(runs: int) -> list[float]:
    """Simulated over exact time, for several settings."""
    ratios = []
    for stall_s, mtbf_s, interval_s, drain_s in (
        (5, 7200, 268, 0),
        (60, 3600, 600, 0),
        (1, 1800, 60, 13),
        (1, 900, 41, 125),
    ):
        count = int(24 * HOUR_S / interval_s)
        tiers = (Tier(name="storage", drain_s=drain_s),)
        job = SimulatedJob(work_s=count * interval_s, stall_s=stall_s, tiers=tiers, restore_s=60, restart_s=300)
        taken = np.arange(1, count + 1) * float(interval_s)
        outcome = simulate(job, taken, Fleet(Weibull(mtbf_s, k=1)), runs=runs)
        one = FailureClass(drain_s=drain_s, restore_s=60 + drain_s, restart_s=300)
        exact_s = expected_total_s(job.work_s, interval_s, stall_s, mtbf_s, [one])
        ratios.append(float(outcome.total_s.mean()) / exact_s)
    return ratios


def real_run(mean_s: float, epochs: int, seed: int = 7) -> RealRun:
    """Train with kills, and predict how long that takes."""
    chance = random.Random(seed)
    every = 50
    with scratch() as folder:
        _train(folder / "undisturbed", epochs, [])
        (alone,) = _records(folder / "undisturbed")
        uptimes = [max(3.0, chance.expovariate(1 / mean_s)) for _ in range(200)]
        measured_s, starts = _train(folder / "killed", epochs, uptimes)
        attempts = _records(folder / "killed")
    # Each record belongs to the last start before it; one that was killed while it imported has none.
    owners = [(max(at for at in starts if at <= record.begun_unix_s), record) for record in attempts]
    start_s = float(np.mean([r.trained_unix_s - at for at, r in owners if r.trained_unix_s is not None]))
    assert alone.trained_unix_s is not None
    training_s = alone.unix_s - alone.trained_unix_s
    stall_s = alone.blocked_s / max(1, alone.step // every)
    work_s = training_s - alone.blocked_s
    job = SimulatedJob(work_s=work_s, steps=alone.step, stall_s=stall_s, restore_s=start_s)
    taken = np.arange(every, alone.step, every) * work_s / alone.step
    trace = Trace((uptimes[0] - start_s, *uptimes[1:], 1e9))
    outcome = simulate(job, taken, trace, runs=1)
    return RealRun(len(starts) - 1, measured_s, float(outcome.total_s[0]) + start_s)


def _records(run: Path) -> list[AttemptRecord]:
    return read_records(str(run))


def _train(run: Path, epochs: int, uptimes: list[float]) -> tuple[float, list[float]]:
    """Train to the end, killed after each of the uptimes; returns the seconds in all, and when each attempt began."""
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--dirpath", str(run), "--epochs", str(epochs)]
    command += ["--pace-s", "0.01"]
    environment = {**os.environ, "LIGHTNING_SPOT_CLOUD": "none"}
    begun, starts = time.time(), []
    for up_s in [*uptimes, 600.0]:
        starts.append(time.time())
        process = subprocess.Popen(
            command, cwd=run.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            code = process.wait(up_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            continue
        if code != 0:
            raise RuntimeError(f"the training ended with exit code {code}")
        records = _records(run)
        return records[-1].unix_s - begun, starts
    raise RuntimeError("the training did not come to its end")


def _gains(found: dict[tuple[str, str], dict[str, PolicyRow]]) -> str:
    lines = []
    for (curve, hazard), rows in found.items():
        ours, evenly = rows["ConvergenceAware"], rows["YoungDaly"]
        ratios = (ours.snapshots / evenly.snapshots, ours.progress_lost / evenly.progress_lost)
        told = " | ".join(f"{ratio:.2f} x" for ratio in ratios)
        lines.append(f"| {curve} | {hazard} | {told} | {ours.total_s / evenly.total_s:.4f} x |")
    return "\n".join(lines)


def _times(found: dict[tuple[str, str], dict[str, PolicyRow]]) -> str:
    names = ("ConvergenceAware", "COCI", "every 1 min", "every 10 min", "every 60 min")
    lines = []
    for (curve, hazard), rows in found.items():
        evenly = rows["YoungDaly"].total_s
        ratios = [rows[name].total_s / evenly for name in names]
        told = " | ".join(f"{ratio:.3f}" if np.isfinite(ratio) else "never" for ratio in ratios)
        lines.append(f"| {curve} | {hazard} | {told} |")
    return "\n".join(lines)


def _verdicts(found: dict[tuple[str, str], dict[str, PolicyRow]]) -> str:
    """What was aimed at, and whether it was reached."""
    steep = [rows for (curve, _), rows in found.items() if curve.startswith("exponential") and curve[-2:] != " 3"]
    least = max(rows["ConvergenceAware"].progress_lost / rows["YoungDaly"].progress_lost for rows in steep)
    apart = max(abs(rows["ConvergenceAware"].blocked / rows["YoungDaly"].blocked - 1) for rows in steep)
    longest = max(rows["ConvergenceAware"].total_s / rows["YoungDaly"].total_s for rows in found.values())
    others = ("COCI", "every 1 min", "every 10 min", "every 60 min")
    beaten = sum(rows[name].total_s > rows["ConvergenceAware"].total_s for rows in found.values() for name in others)
    coci = [(rows["COCI"], rows["YoungDaly"]) for rows in steep]
    count = [one.snapshots / evenly.snapshots for one, evenly in coci]
    lost = [one.progress_lost / evenly.progress_lost for one, evenly in coci]
    lines = [
        f"- Where the loss falls exponentially with a·T ≥ 5: at least {1 - least:.0%} less progress lost per failure"
        f" (aim: 20 %), with an overhead at most {apart:.1%} apart (aim: 5 %).",
        f"- Anywhere: at most {longest - 1:.2%} more time to finish than Young and Daly's (aim: 1 %).",
        f"- Faster than COCI and the fixed intervals in {beaten} of {len(others) * len(found)} cases (aim: all).",
        f"- What is lost against COCI: where its exponential is right (a·T ≥ 5), it loses only {min(lost):.2f} to"
        f" {max(lost):.2f} times as much progress as Young and Daly. Part of that is paid for with {min(count):.2f} to"
        f" {max(count):.2f} times as many snapshots, since every new fit plans the rest of the run anew.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.intervals", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--to", type=Path, default=ROOT / "benchmarks" / "intervals.md", help="the file to write")
    parser.add_argument(
        "--real",
        type=Path,
        metavar="JSON",
        help="the real run, as an earlier call printed it: it needs a quiet machine",
    )
    arguments = parser.parse_args()
    runs = 200 if arguments.quick else 2000
    if arguments.real is None:
        real = real_run(mean_s=20.0, epochs=20 if arguments.quick else 60)
    else:
        real = RealRun(**json.loads(arguments.real.read_text()))
    print(f"  {real}", file=sys.stderr, flush=True)
    found = study(runs)
    exact = closed_form(10 * runs)
    text = TEMPLATE.read_text().format(
        stall=2.0,
        safe=5.0,
        runs=runs,
        noise=NOISE,
        gains=_gains(found),
        times=_times(found),
        verdicts=_verdicts(found),
        closed_runs=10 * runs,
        closed=", ".join(f"{ratio:.4f}" for ratio in exact),
        mixed=", ".join(f"{ratio:.4f}" for ratio in tier_pace.mixed_closed_form(runs)),
        node_gone=f"{tier_pace.node_gone():.2%}",
        nodes=tier_pace.gains(runs),
        node_speed=f"{tier_pace.NODE_BYTES_PER_S / 1e6:.0f} MB/s (5 Gbit/s)",
        stall_per_gb=tier_pace.STALL_S_PER_GB,
        losing=tier_pace.losing_cases(runs),
        kills=real.kills,
        predicted=real.predicted_s,
        measured=real.measured_s,
        ratio=real.predicted_s / real.measured_s,
    )
    arguments.to.write_text(text)
    print(json.dumps(asdict(real)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
