"""A snapshot at every step, its copying spread in each way, against the same training without snapshots.

One training goes through all of them in turn, some steps of each, so that what else the machine does touches all alike.
The first step of each turn is left out: the one before still ends in it.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.turns import Turns
from lightning_spot import SpotCheckpoint
from lightning_spot.staging.modes import MODES

STEPS = 4
NONE = "none"
WAYS = (NONE, *MODES)
WORDS, WIDTH, LAYERS, LENGTH = 8000, 768, 6, 128
PROFILED = 9


class Model(pl.LightningModule):
    """A transformer of 49 million parameters; with Adam's moments 0.59 GB."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.layers(self.words(batch[0]))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Clock(pl.Callback):
    """Notes how long each step took, and what it waited."""

    def __init__(self, spot: SpotCheckpoint, turns: Turns) -> None:
        self.spot, self.turns = spot, turns
        self.steps: list[tuple[int, str, float, float]] = []
        self.behind: list[float] = []
        self._before: tuple[float, float] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.perf_counter(), self.spot.stall_s
        step, way = trainer.global_step, self.turns.way
        decided = self.turns.decide_for(self.spot)
        if self._before is not None and step > PROFILED and decided and (step - 1) % STEPS:
            seconds, waited_s = (here - there for here, there in zip(now, self._before, strict=True))
            if way != NONE and (committed := self.spot.last_committed_step) is not None:
                self.behind.append(step - committed)
            self.steps.append(((step - 1) // STEPS // len(WAYS), way, seconds, waited_s))
        self._before = now

    def of(self, turn: int, way: str) -> list[tuple[float, float]]:
        """Seconds and waiting of the steps of one turn."""
        return [(seconds, waited_s) for at, whose, seconds, waited_s in self.steps if (at, whose) == (turn, way)]


def measure(rounds: int) -> Clock:
    with scratch() as folder:
        turns = Turns(WAYS, STEPS, every=1)
        spot = SpotCheckpoint(str(folder / "run-1"), interval=turns, durable_every_s=3600.0, notices=None)
        clock = Clock(spot, turns)
        bare_trainer(STEPS * len(WAYS) * (rounds + 1) + 1, [spot, clock]).fit(
            Model(), DataLoader(TensorDataset(torch.randint(WORDS, (10_000, LENGTH))), 2)
        )
        print(f"  skipped for want of a slot: {spot.skipped}")
        return clock


def run(quick: bool) -> list[Result]:
    rounds = 2 if quick else 7
    clock = measure(rounds)
    results = [Result("the newest committed snapshot is behind by", clock.behind, 1.0, unit="steps")]
    plain = [median(step[0] for step in clock.of(turn, NONE)) for turn in range(1, rounds + 1)]
    print(f"  a step without snapshots, s: {[round(value, 3) for value in plain]}")
    for mode in MODES:
        steps = [clock.of(turn, mode) for turn in range(1, rounds + 1)]
        added = [100 * (median(step[0] for step in found) / base - 1) for found, base in zip(steps, plain, strict=True)]
        waited = [100 * median(step[1] for step in found) / base for found, base in zip(steps, plain, strict=True)]
        results.append(Result(f"a snapshot at every step, {mode}: longer step", added, 5.0, unit="%"))
        results.append(Result(f"a snapshot at every step, {mode}: waiting in hooks", waited, 5.0, unit="%"))
    return results
