"""A snapshot at every step, its copying spread in each way, against the same training without snapshots.

One training goes through all of them in turn, some steps of each, so that what else the machine does touches all alike.
The first step of each turn is left out: the one before still ends in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.turns import Turns
from lightning_spot import SpotCheckpoint
from lightning_spot.capture.partitions import MODES

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
    """Notes how long each step took, and what it waited.

    Args:
        spot: takes the snapshots.
        turns: tells it when and how.
        ways: that take turns, in their order.
    """

    def __init__(self, spot: SpotCheckpoint, turns: Turns, ways: Sequence[str]) -> None:
        self.spot, self.turns, self.ways = spot, turns, ways
        self.steps: list[tuple[int, str, float, float]] = []
        self.behind: list[float] = []
        self._before: tuple[float, float] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.perf_counter(), self.spot.blocked_s
        step, way = trainer.global_step, self.turns.way
        decided = self.turns.decide_for(self.spot)
        if self._before is not None and step > PROFILED and decided and (step - 1) % STEPS:
            seconds, waited_s = (here - there for here, there in zip(now, self._before, strict=True))
            if way != NONE and (committed := self.spot.last_committed_step) is not None:
                self.behind.append(step - committed)
            self.steps.append(((step - 1) // STEPS // len(self.ways), way, seconds, waited_s))
        self._before = now

    def of(self, turn: int, way: str) -> list[tuple[float, float]]:
        """Seconds and waiting of the steps of one turn."""
        return [(seconds, waited_s) for at, whose, seconds, waited_s in self.steps if (at, whose) == (turn, way)]


def measure(
    model: pl.LightningModule, data: DataLoader[Any], ways: Sequence[str], rounds: int, **settings: Any
) -> Clock:
    """Train a model in turns, a snapshot at each step; the first round is not among those that count.

    Args:
        model: what is trained.
        data: with a batch for each step.
        ways: of copying, or ``NONE``, in their order.
        rounds: that count.
        **settings: of ``SpotCheckpoint``.
    """
    with scratch() as folder:
        turns = Turns(ways, STEPS, every=1)
        spot = SpotCheckpoint(str(folder / "run-1"), interval=turns, notices=None, **settings)
        clock = Clock(spot, turns, ways)
        bare_trainer(steps_of(ways, rounds), [spot, clock]).fit(model, data)
        print(f"  skipped for want of a slot: {spot.num_skipped}")
        return clock


def steps_of(ways: Sequence[str], rounds: int) -> int:
    """Steps that :func:`measure` takes."""
    return STEPS * len(ways) * (rounds + 1) + 1


def added(clock: Clock, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """By way and round: by how much its steps are longer than those without, and what they wait, in percent."""
    plain = [median(step[0] for step in clock.of(turn, NONE)) for turn in range(1, rounds + 1)]
    print(f"  a step without snapshots, s: {[round(value, 3) for value in plain]}")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in clock.ways if way != NONE}
    for way, values in found.items():
        for turn, base in enumerate(plain, 1):
            seconds, waited = zip(*clock.of(turn, way), strict=True)
            values.append((100 * (median(seconds) / base - 1), 100 * median(waited) / base))
    return found


def run(quick: bool) -> list[Result]:
    rounds = 2 if quick else 7
    data = DataLoader(TensorDataset(torch.randint(WORDS, (10_000, LENGTH))), 2)
    clock = measure(Model(), data, WAYS, rounds, min_upload_interval_s=3600.0)
    results = [Result("the newest committed snapshot is behind by", clock.behind, 1.0, unit="steps")]
    for mode, values in added(clock, rounds).items():
        longer, waited = map(list, zip(*values, strict=True))
        results.append(Result(f"a snapshot at every step, {mode}: longer step", longer, 5.0, unit="%"))
        results.append(Result(f"a snapshot at every step, {mode}: waiting in hooks", waited, 5.0, unit="%"))
    return results
