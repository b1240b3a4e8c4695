"""ETTR, the effective training time ratio, with a kill every ten minutes: of a real training, simulated, and exactly.

The clock is scaled: a second of the real training stands for a minute, and so do what the package knows in seconds, and
what a snapshot costs: the state of 4.6 MB stands for one of 0.3 GB. Only a restart counts as long as it takes, since
it would not grow with the state, and the start of Python and its imports are left out. `kill -9` ends the trainer: the
server on its host keeps what is committed there. All ways are killed after the same times.

Productive are the steps that are kept, each as long as a step took that waited for no snapshot, in the same training:
so a machine that does much else changes little; on one that does, give it precedence (`chrt -r 1`). What hooks add to
each step would not grow with it, either: step times stand beside those without snapshots.

GPT-2's costs are what `benchmarks/LOG.md` has of it: of these the ratios are simulated only.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.closed_form import FailureClass, expected_total_s
from benchmarks.measure import Result, bare_trainer, scratch
from lightning_spot import ConvergenceAware, EverySteps, IntervalPolicy, SpotCheckpoint
from lightning_spot.interval import adaptive, coci, convergence, costs
from lightning_spot.interval.adaptive import young_daly_s
from lightning_spot.session import snapshotter
from lightning_spot.simulation.failures import Fleet, Weibull
from lightning_spot.simulation.simulator import SimulatedJob, compare, exponential_loss

SCALE = 60.0
MTBF_S = 600.0  # of the scaled clock, as all that follow
WORK_S = 6 * 3600.0  # of a simulated job
PACE_S = 0.02  # of the real clock, that a step waits
WIDTH = 600
PROBED_STEPS = 150
RUNS = 2000

_KNOWN_IN_SECONDS = (
    *((module, "FIRST_S") for module in (adaptive, coci, convergence)),
    *((costs, "PRIOR_MTBF_S"), (snapshotter, "LEARN_EVERY_S"), (snapshotter, "READ_EVERY_S")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to save.

    Attributes:
        name: for people.
        kind: ``"default"``, ``"steps"``, ``"ModelCheckpoint"``; or ``"none"``.
        every: steps between two snapshots; 0 where the policy decides.
    """

    name: str
    kind: str
    every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """How an attempt went, in seconds of the real clock.

    Attributes:
        first, last: its steps.
        trained_s: from its first step on.
        blocked_s: of these, that training waited for snapshots.
        restart_s: from the call of ``fit`` to its first step.
        snapshots: taken.
        is_killed: whether it did not come to the end.
    """

    first: int
    last: int
    trained_s: float
    blocked_s: float
    restart_s: float
    snapshots: int
    is_killed: bool


# -- one attempt, in a process of its own -----------------------------------------------------------------------------


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
        self.last = torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(PACE_S)  # as a larger model's, which needs no processor of the host
        return torch.nn.functional.mse_loss(self.last(torch.relu(self.net(batch))), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Diary(pl.Callback):
    """Notes how the attempt went, when it ends or right before it is killed.

    Args:
        path: a line is added to this file.
        up_s: after which it is killed, between forward and backward.
        saved: seconds that training has waited, and snapshots.
    """

    def __init__(self, path: Path, up_s: float, saved: Callable[[], tuple[float, int]]) -> None:
        self._path, self._up_s, self._saved = path, up_s, saved
        self._called_s, self._began_s, self._first = time.monotonic(), 0.0, 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._began_s, self._first = time.monotonic(), trainer.global_step

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if time.monotonic() - self._began_s >= self._up_s:
            self._write(trainer, is_killed=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._write(trainer, is_killed=False)

    def _write(self, trainer: pl.Trainer, *, is_killed: bool) -> None:
        blocked_s, snapshots = self._saved()
        now_s = time.monotonic()
        times = {"trained_s": now_s - self._began_s, "restart_s": self._began_s - self._called_s}
        steps = {"first": self._first, "last": trainer.global_step, "is_killed": is_killed}
        with open(self._path, "a") as file:
            file.write(json.dumps({**times, **steps, "blocked_s": blocked_s, "snapshots": snapshots}) + "\n")


class TimedCheckpoint(ModelCheckpoint):
    """Lightning's own, and how long training waits for it."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every_n_train_steps=every, save_last="link", save_on_train_epoch_end=False)
        self.blocked_s, self.count = 0.0, 0

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        began_s = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        self.blocked_s, self.count = self.blocked_s + time.monotonic() - began_s, self.count + 1


def attempt(folder: Path, way: Way, steps: int, up_s: float) -> None:
    """Train until the end, or until the kill."""
    for module, name in _KNOWN_IN_SECONDS:
        setattr(module, name, getattr(module, name) / SCALE)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_spot"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    data = torch.utils.data.DataLoader(torch.randn(8 * 10_000, 32), 8)
    if way.kind == "none":
        bare_trainer(steps, [Diary(folder / "diary", up_s, lambda: (0.0, 0))]).fit(Net(), data)
    elif way.kind == "ModelCheckpoint":
        timed = TimedCheckpoint(folder / "run", way.every)
        diary = Diary(folder / "diary", up_s, lambda: (timed.blocked_s, timed.count))
        trainer = bare_trainer(steps, [timed, diary], enable_checkpointing=True)
        trainer.fit(Net(), data, ckpt_path="last")
    else:
        interval: IntervalPolicy = EverySteps(way.every) if way.every else ConvergenceAware()
        spot = SpotCheckpoint(str(folder / "run"), interval=interval, notices=None)
        diary = Diary(folder / "diary", up_s, lambda: (spot.blocked_s, _taken(spot)))
        bare_trainer(steps, [spot, diary]).fit(Net(), data)


def _taken(spot: SpotCheckpoint) -> int:
    return spot.snapshots.snapshotter.writing.taken if spot.snapshots.snapshotter is not None else 0


# -- a training -------------------------------------------------------------------------------------------------------


def train(folder: Path, way: Way, steps: int, uptimes_s: Iterator[float]) -> list[Attempt]:
    """Train to the end, killed after each of the times; how each attempt went."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.ettr"])
    attempts: list[Attempt] = []
    while not attempts or attempts[-1].is_killed:
        process = context.Process(target=attempt, args=(folder, way, steps, next(uptimes_s)))
        process.start()
        process.join(600)
        if process.exitcode not in (0, -signal.SIGKILL):
            process.kill()
            raise RuntimeError(f"{way.name}: an attempt ended with {process.exitcode}")
        attempts = [Attempt(**json.loads(line)) for line in (folder / "diary").read_text().splitlines()]
    return attempts


def uptimes() -> Iterator[float]:
    """Seconds of the real clock between kills, the same for all ways: exponential, and of each eight one from each
    eighth of that, so that the mean of a few is what it should be."""
    chance = random.Random(7)
    while True:
        shares = [(number + chance.random()) / 8 for number in range(8)]
        chance.shuffle(shares)
        yield from (-math.log1p(-share) * MTBF_S / SCALE for share in shares)


def never() -> Iterator[float]:
    while True:
        yield float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a training has shown; seconds of the scaled clock, but the restart.

    Attributes:
        ettr: productive time over all time.
        step_s: of a step that waits for nothing.
        blocked_s: by a snapshot.
        interval_s: from one to the next.
        restart_s: from ``fit`` to its first step, of those that resumed.
        kills: how many.
    """

    ettr: float
    step_s: float
    blocked_s: float
    interval_s: float
    restart_s: float
    kills: int

    @classmethod
    def of(cls, attempts: list[Attempt]) -> Figures:
        trained_s, blocked_s = (sum(getattr(each, name) for each in attempts) for name in ("trained_s", "blocked_s"))
        snapshots = max(1, sum(each.snapshots for each in attempts))
        restarts_s = [each.restart_s for each in attempts[1:]]
        step_s = SCALE * (trained_s - blocked_s) / sum(each.last - each.first for each in attempts)
        return cls(
            ettr=attempts[-1].last * step_s / (SCALE * trained_s + sum(restarts_s)),
            step_s=step_s,
            blocked_s=SCALE * blocked_s / snapshots,
            interval_s=SCALE * trained_s / snapshots,
            restart_s=statistics.mean(restarts_s) if restarts_s else 0.0,
            kills=len(restarts_s),
        )


def simulated(way: Way, found: Figures) -> float:
    """The ETTR of a long job with the same costs, simulated."""
    loss = exponential_loss(5)
    job = SimulatedJob(
        work_s=WORK_S, steps=round(WORK_S / found.step_s), stall_s=found.blocked_s, restore_s=found.restart_s, loss=loss
    )
    policies = {way.name: (lambda: EverySteps(way.every)) if way.every else ConvergenceAware}
    return compare(job, Fleet(Weibull(MTBF_S, k=1)), policies, runs=RUNS)[0].goodput


def exact(way: Way, found: Figures) -> float:
    """The same at a fixed interval, in closed form."""
    interval_s = way.every * found.step_s
    work_s = round(WORK_S / interval_s) * interval_s
    return work_s / expected_total_s(
        work_s, interval_s, found.blocked_s, MTBF_S, [FailureClass(restore_s=found.restart_s)]
    )


GPT2 = {
    kind: Figures(ettr=0.0, step_s=2.28, blocked_s=blocked_s, interval_s=0.0, restart_s=10.0, kills=0)
    for kind, blocked_s in (("steps", 0.084), ("ModelCheckpoint", 3.82))
}
"""124 million parameters, 1.5 GB: a step, and how much longer a snapshot makes it; a restart is a guess."""


def ways_of(costs_of: Mapping[str, Figures]) -> list[Way]:
    """What is compared, by the costs of each kind."""
    best = {kind: best_every(found) for kind, found in costs_of.items()}
    five_minutes = round(300.0 / costs_of["ModelCheckpoint"].step_s)
    return [
        Way(name="default interval", kind="default"),
        Way(name="every step", kind="steps", every=1),
        Way(name="Young/Daly, fixed", kind="steps", every=best["steps"]),
        Way(name="ModelCheckpoint, Young/Daly, fixed", kind="ModelCheckpoint", every=best["ModelCheckpoint"]),
        Way(name="ModelCheckpoint every 5 min", kind="ModelCheckpoint", every=five_minutes),
    ]


def best_every(found: Figures) -> int:
    """Steps between two snapshots by Young and Daly's rule, where costs and failures are known beforehand."""
    return max(1, round(young_daly_s(found.blocked_s, MTBF_S) / found.step_s))


def ratios_of(way: Way, found: Figures) -> dict[str, float]:
    """The ETTR of a way with such costs."""
    return {"simulated": simulated(way, found)} | ({"closed form": exact(way, found)} if way.every else {})


def run(quick: bool) -> list[Result]:
    steps = 600 if quick else 2500
    results = []
    with scratch() as folder:
        os.environ["LIGHTNING_SPOT_CLOUD"] = "none"
        probes = {
            kind: Figures.of(train(folder / f"probe-{kind}", Way(name="", kind=kind, every=10), PROBED_STEPS, never()))
            for kind in ("none", "steps", "ModelCheckpoint")
        }
        results.append(Result("no snapshots: step", [probes.pop("none").step_s], None, unit="s"))
        for number, way in enumerate(ways_of(probes)):
            found = Figures.of(train(folder / f"way-{number}", way, steps, uptimes()))
            print(f"  {way.name}: {json.dumps(asdict(found))}", file=sys.stderr, flush=True)
            ratios = {"measured": found.ettr, **ratios_of(way, found)}
            results += [Result(f"ETTR, {way.name}: {how}", [ratio], None, unit="") for how, ratio in ratios.items()]
            taken = {"blocked by a snapshot": found.blocked_s, "interval": found.interval_s, "step": found.step_s}
            results += [Result(f"{way.name}: {what}", [value], None, unit="s") for what, value in taken.items()]
            results.append(Result(f"{way.name}: kills", [float(found.kills)], None, unit=""))
    for way in ways_of(GPT2):
        ratios = ratios_of(way, GPT2.get(way.kind, GPT2["steps"]))
        results += [Result(f"ETTR, GPT-2, {way.name}: {how}", [ratio], None, unit="") for how, ratio in ratios.items()]
    return results
