"""What watching for preemption notices costs a step, with a step that does as little as Lightning allows.

Fits with and without a ``PreemptionGuard`` alternate in the same processes; a pair of neighbours is one round. With two
ranks (gloo), two fits without a guard alternate in the same way: their ratio is the noise to compare with.
``python -m benchmarks.guard ROUNDS`` is what each of the two ranks runs.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import Result
from lightning_spot import PreemptionGuard

STEPS = 1000
RANKS = 2


class Small(pl.LightningModule):
    """A step of some hundred microseconds, most of them Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """Seconds of a step: the median, which what else the machine does now and then leaves alone."""

    def __init__(self) -> None:
        self._at_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._at_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        return median(after - before for before, after in itertools.pairwise(self._at_s[STEPS // 10 :]))


def step_s(*callbacks: pl.Callback, ranks: int = 1) -> float:
    clock = Clock()
    pl.Trainer(
        max_steps=STEPS,
        callbacks=[clock, *callbacks],
        accelerator="cpu",
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        devices=ranks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Small(), DataLoader(TensorDataset(torch.ones(STEPS * ranks * 4, 8)), 4))
    return clock.step_s


def on_two_ranks(rounds: int) -> list[dict[str, float]]:
    """Seconds a step of each kind, as rank 0 saw them."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, "-m", "benchmarks.guard", str(rounds)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **address, "LOCAL_RANK": str(rank), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=1200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of the benchmark ended with {[rank.returncode for rank in ranks]}")
    found: list[dict[str, float]] = json.loads(said[0].splitlines()[-1])
    return found


def run(quick: bool) -> list[Result]:
    rounds = 3 if quick else 9
    step_s(PreemptionGuard())
    alone = [(step_s(), step_s(PreemptionGuard())) for _ in range(rounds)]
    pairs = on_two_ranks(rounds)
    print(f"  a step without guard: {alone[0][0] * 1e6:.0f} us on one rank, {pairs[0]['plain'] * 1e6:.0f} us on two")
    noise = [pair["again"] / pair["plain"] for pair in pairs]
    return [
        Result("guard's cost of a step, one rank", [1e6 * (with_ - plain) for plain, with_ in alone], 50, unit="µs"),
        Result("step with guard / without, 2 ranks", [pair["guard"] / pair["plain"] for pair in pairs], 1.05),
        Result("the same without any guard (noise), 2 ranks", noise, 1.05),
    ]


def main() -> int:
    step_s(PreemptionGuard(), ranks=RANKS)
    found = []
    for number in range(int(sys.argv[1])):
        kinds = [("plain", ()), ("guard", (PreemptionGuard(),)), ("again", ())]
        turned = kinds if number % 2 else kinds[::-1]  # neither is always first
        found.append({name: step_s(*callbacks, ranks=RANKS) for name, callbacks in turned})
    if os.environ["LOCAL_RANK"] == "0":
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
