"""What a snapshot adds in all, beside ``AsyncCheckpointIO``'s and none, all in turns of one training.

A process of its own for each way, as ``peers`` and ``in-all`` have it, differs from one to the next by more than a
snapshot costs.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.partitions import LENGTH, WORDS, Model
from benchmarks.turns import Turns
from lightning_spot import SpotCheckpoint

NEEDS = ("transformers",)
LARGE = "49 million parameters"
SMALL = ("gpt2", "bert", "resnet", "vit", "roberta", "bloom")
STEPS, STEPS_OF_LARGE = 10, 4
WARM_UP = 2
NONE, OTHER = "none", "AsyncCheckpointIO"
WAYS = (NONE, "still", "eager", OTHER)


class Clock(pl.Callback):
    """Notes how long each turn took, and saves in the other way in its turns."""

    def __init__(self, spot: SpotCheckpoint, turns: Turns, folder: Path, steps: int) -> None:
        self.turns_s: list[float] = []
        self._spot, self._turns, self._folder, self._steps = spot, turns, folder, steps
        self._other = AsyncCheckpointIO(TorchCheckpointIO())
        self._began_s = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._turns.decide_for(self._spot)
        step = trainer.global_step
        if step % self._steps:
            return
        now_s = time.perf_counter()
        self.turns_s.append(now_s - self._began_s)
        self._began_s = now_s
        if self._turns.at(step) == OTHER:
            content = trainer._checkpoint_connector.dump_checkpoint()
            self._other.save_checkpoint(content, self._folder / f"other-{step % 4}.ckpt")


def build(model: str, steps: int) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """A model and its data."""
    if model == LARGE:
        return Model(), DataLoader(TensorDataset(torch.randint(WORDS, (2 * steps, LENGTH))), 2)
    from benchmarks.peers import models  # needs transformers

    return models.build(model, "small", steps)


def measure(model: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a turn of so many steps of each way, one for each round."""
    draw = random.Random(model)
    order = [way for _ in range(WARM_UP + rounds) for way in draw.sample(WAYS, len(WAYS))]
    with scratch() as folder:
        turns = Turns(order, steps, steps)
        spot = SpotCheckpoint(str(folder / "run"), interval=turns, notices=None)
        clock = Clock(spot, turns, folder, steps)
        bare_trainer(len(order) * steps, [clock, spot]).fit(*build(model, len(order) * steps))
    first = WARM_UP * len(WAYS)
    timed = list(zip(order, clock.turns_s, strict=True))[first:]
    return {way: [seconds for whose, seconds in timed if whose == way] for way in WAYS}


def run(quick: bool) -> list[Result]:
    results = []
    for model in ("bert",) if quick else (LARGE, *SMALL):
        steps = STEPS_OF_LARGE if model == LARGE else STEPS
        found = measure(model, steps, 2 if quick else 12)
        plain = found.pop(NONE)
        print(f"  {model}: {steps} steps without snapshots take {median(plain):.2f} s")
        for way, seconds in found.items():
            added = [turn - base for turn, base in zip(seconds, plain, strict=True)]
            results.append(Result(f"{model}, a snapshot every {steps} steps: {way} adds", added, None, unit="s"))
    return results
