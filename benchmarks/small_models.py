"""A snapshot every ten steps of small models, beside ``AsyncCheckpointIO``'s and none, all in turns of one training.

A process of its own for each way, as ``peers`` has it, differs from one to the next by more than a snapshot costs here.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.turns import Turns
from lightning_spot import SpotCheckpoint

NEEDS = ("transformers",)
STEPS = 10
WARM_UP = 2
NONE, OTHER = "none", "AsyncCheckpointIO"
WAYS = (NONE, "still", "eager", OTHER)


class Clock(pl.Callback):
    """Notes how long each turn took, and saves in the other way in its turns."""

    def __init__(self, spot: SpotCheckpoint, turns: Turns, folder: Path) -> None:
        self.turns_s: list[float] = []
        self._spot, self._turns, self._folder = spot, turns, folder
        self._other = AsyncCheckpointIO(TorchCheckpointIO())
        self._began_s = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._turns.decide_for(self._spot)
        step = trainer.global_step
        if step % STEPS:
            return
        now_s = time.perf_counter()
        self.turns_s.append(now_s - self._began_s)
        self._began_s = now_s
        if self._turns.at(step) == OTHER:
            content = trainer._checkpoint_connector.dump_checkpoint()
            self._other.save_checkpoint(content, self._folder / f"other-{step % 4}.ckpt")


def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a turn of each way, one for each round."""
    from benchmarks.peers.models import build  # needs transformers

    draw = random.Random(model)
    order = [way for _ in range(WARM_UP + rounds) for way in draw.sample(WAYS, len(WAYS))]
    with scratch() as folder:
        turns = Turns(order, STEPS, STEPS)
        spot = SpotCheckpoint(str(folder / "run"), interval=turns, notices=None)
        clock = Clock(spot, turns, folder)
        bare_trainer(len(order) * STEPS, [clock, spot]).fit(*build(model, "small", len(order) * STEPS))
    first = WARM_UP * len(WAYS)
    timed = list(zip(order, clock.turns_s, strict=True))[first:]
    return {way: [seconds for whose, seconds in timed if whose == way] for way in WAYS}


def run(quick: bool) -> list[Result]:
    results = []
    for model in ("bert",) if quick else ("gpt2", "bert", "resnet", "vit", "roberta", "bloom"):
        found = measure(model, 2 if quick else 12)
        plain = found.pop(NONE)
        print(f"  {model}: {STEPS} steps without snapshots take {median(plain):.2f} s")
        for way, seconds in found.items():
            added = [turn - base for turn, base in zip(seconds, plain, strict=True)]
            name = f"{model}, a snapshot every {STEPS} steps: {way} adds"
            results.append(Result(name, added, None, unit="s"))
    return results
