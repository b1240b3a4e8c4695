"""One training for ``thread-in-shards``: ``python -m benchmarks.thread_in_shards_trainer JSON`` fits in shards (FSDP2).

Every second snapshot is taken without its copies. Rank 0 writes what each has cost its training thread into
``FOLDER/costs.json``, beside what torch took for the first half of a save: ``get_state_dict``, then a rank's plan.
What our hooks take at each step, also without a snapshot, is told apart: it is seen at a step between two of them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.blocking import writer_of
from benchmarks.measure import bare_trainer
from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.batch import Batch

RANKS = 2
EVERY = 4
_STEPS = 3  # in which there is something to do for a snapshot: it is said in the first, and copied until the last
EARLY = 6  # the first ones make slots, and meet tensors for the first time
_HOOKS = ("on_train_batch_end", "on_before_optimizer_step")


@dataclass(frozen=True)
class Cost:
    """What one snapshot has cost the training thread: it is told of a step before, and copied until the step after.

    Attributes:
        copies: whether anything was copied for it.
        cpu_s: time of the thread, without what our hooks take at these three steps all the same.
        wall_s: likewise by the clock.
        hooks_s: of the thread, what they take at a step without a snapshot.
    """

    copies: bool
    cpu_s: float
    wall_s: float
    hooks_s: float


class Model(pl.LightningModule):
    """A small transformer, each layer in shards; its gradients are given, since only snapshots count."""

    def __init__(self, layers: int, width: int = 32) -> None:
        super().__init__()
        found = (nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(layers))
        self.layers = nn.Sequential(nn.Linear(width, width), *found, nn.Linear(width, width), nn.LayerNorm(width))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index] # set by the strategy
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)

    def backward(self, loss: torch.Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:
                assert isinstance(parameter, DTensor)
                parameter.grad = torch.full_like(parameter, 0.01)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)

    def optimizer_zero_grad(self, *_: Any) -> None:
        """They stay."""


class Spent:
    """Counts what the training thread spends at seams and in our hooks."""

    def __init__(self, spot: SpotCheckpoint) -> None:
        self.cpu_s = self.wall_s = 0.0
        self._spot = spot
        for hook in _HOOKS:
            self._wrap(spot, hook)

    def begin(self, trainer: pl.Trainer) -> None:
        """By now ours listens to the seams."""
        self._wrap(self._spot.snapshots.snapshotter, "after_batch")

    def _wrap(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def timed(*arguments: Any) -> None:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            real(*arguments)
            self.cpu_s += time.thread_time() - cpu_s
            self.wall_s += time.perf_counter() - wall_s

        setattr(owner, name, timed)


@contextmanager
def no_copies() -> Iterator[None]:
    """Nothing is copied, but for the frame."""
    real, at_once = Batch.helping, Batch.at_once
    Batch.helping = Batch.at_once = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Batch.helping, Batch.at_once = real, at_once  # type: ignore[method-assign]


class Rounds(pl.Callback):
    """Notes what each snapshot costs: until the optimizer step after it has passed."""

    def __init__(self, spot: SpotCheckpoint) -> None:
        self.spot, self.spent = spot, Spent(spot)
        self.before = self.at_rest = (0.0, 0.0)
        self.number = 0
        self.costs: list[Cost] = []
        self.torch_cpu_s: list[float] = []
        self._without: AbstractContextManager[None] = nullcontext()

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # Lightning's word about SIGTERM in each step, for which a rank would wait.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            self.spent.begin(trainer)
        step, spent = trainer.global_step, (self.spent.cpu_s, self.spent.wall_s)
        if step % EVERY == 2:
            self.at_rest, self.before = _less(spent, self.before), spent
            self._without = no_copies() if self.number % 2 else nullcontext()
            self._without.__enter__()
        if step % EVERY == 1 and self.spot.snapshots.begun_step == step - 1:
            if self.number >= EARLY:
                cpu_s, wall_s = _less(_less(spent, self.before), self.at_rest, times=_STEPS)
                self.costs.append(Cost(not self.number % 2, cpu_s, wall_s, self.at_rest[0]))
            self.number += 1
            if writer := writer_of(self.spot):
                writer.wait_all(60.0)
            self._without.__exit__(None, None, None)
            if self.number > EARLY:
                self.torch_cpu_s.append(_capture_by_torch(trainer, module))
            self.before = spent


def _less(spent: tuple[float, float], before: tuple[float, float], times: int = 1) -> tuple[float, float]:
    return spent[0] - times * before[0], spent[1] - times * before[1]


def _capture_by_torch(trainer: pl.Trainer, module: pl.LightningModule) -> float:
    """CPU seconds in which torch finds the same state and where it goes, before anything is copied."""
    before_s = time.thread_time()
    weights, optimizers = get_state_dict(module, trainer.optimizers)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"state_dict": weights, "optimizer_0": optimizers}, None, trainer.is_global_zero)
    planner.create_local_plan()
    return time.thread_time() - before_s


def main() -> int:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plan = json.loads(sys.argv[1])
    folder = Path(plan["folder"])
    spot = SpotCheckpoint(
        str(folder / "run-1"), interval=EverySteps(EVERY), on_full="wait", copy_mode="eager", min_upload_interval_s=1e6
    )
    rounds = Rounds(spot)
    model = Model(plan["layers"])
    steps = EVERY * (2 * plan["rounds"] + EARLY) + 2
    strategy = ModelParallelStrategy(RANKS, 1)
    trainer = bare_trainer(steps, [spot, rounds], devices=RANKS, strategy=strategy)
    trainer.fit(model, DataLoader(TensorDataset(torch.zeros(10_000, 1)), 1))
    if trainer.is_global_zero:
        states = sum(len(state) for state in trainer.optimizers[0].state.values())
        tensors = states + len(list(model.parameters()))
        found = {"tensors": tensors, "costs": list(map(asdict, rounds.costs)), "torch_cpu_s": rounds.torch_cpu_s}
        (folder / "costs.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
