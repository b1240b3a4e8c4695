"""GPT-2 of 124 million parameters, a snapshot at every step and at every tenth: the mean of twenty steps in a row.

In turns with none in one training. A mean also has what a median of steps does not see: the sealing and the writing of
those snapshots that are brought to the disk, at their own pace.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.partitions import NONE
from benchmarks.turns import Turns
from lightning_spot import SpotCheckpoint

NEEDS = ("transformers",)
WAYS = (NONE, "blocking")
TURN = 21  # in the first of which the turn before still ends
AIMS = {1: 5.0, 10: 1.0}


class Clock(pl.Callback):
    """Notes when each step has begun.

    Args:
        spot: takes the snapshots.
        turns: tells it when and how.
    """

    def __init__(self, spot: SpotCheckpoint, turns: Turns) -> None:
        self._spot, self._turns = spot, turns
        self._began_s: dict[int, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._turns.decide_for(self._spot)
        self._began_s[trainer.global_step] = time.perf_counter()

    def mean_s(self, number: int) -> float:
        """Mean time of the steps of a turn, without its first."""
        first = number * TURN
        return (self._began_s[first + TURN] - self._began_s[first + 1]) / (TURN - 1)


def longer_by(model: pl.LightningModule, data: Any, every: int, rounds: int) -> list[float]:
    """By round, in percent: by how much the mean step with snapshots is longer than that of the turn without.

    Args:
        model: what is trained.
        data: with a batch for each step.
        every: steps between snapshots.
        rounds: that count; the first one does not.
    """
    with scratch() as folder:
        turns = Turns(WAYS, TURN, every)
        spot = SpotCheckpoint(str(folder / "run-1"), interval=turns, notices=None)
        clock = Clock(spot, turns)
        bare_trainer(steps_of(rounds), [spot, clock]).fit(model, data)
        print(f"  skipped for want of a slot: {spot.num_skipped}")
    plain_s, ours_s = ([clock.mean_s(place + 2 * turn) for turn in range(1, rounds + 1)] for place in (0, 1))
    print(f"  a step without snapshots, s: {[round(value, 3) for value in plain_s]}")
    return [100 * (ours / plain - 1) for ours, plain in zip(ours_s, plain_s, strict=True)]


def steps_of(rounds: int) -> int:
    """Steps that :func:`longer_by` takes with :data:`WAYS`."""
    return TURN * len(WAYS) * (rounds + 1) + 1


def run(quick: bool) -> list[Result]:
    from benchmarks.peers import models  # needs transformers

    rounds = 2 if quick else 8
    results = []
    for every, aim in AIMS.items():
        model, data = models.build("gpt2", "small" if quick else "full", steps_of(rounds))
        often = "tenth " if every > 1 else ""
        values = longer_by(model, data, every, rounds)
        results.append(
            Result(f"GPT-2, a snapshot at every {often}step, still: longer mean step", values, aim, unit="%")
        )
    return results
