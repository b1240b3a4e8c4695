"""Trains the model of the exact cases in shards (FSDP2; gloo or NCCL), in this process or as a program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_spot import EverySteps, SpotCheckpoint
from tests.support.exact_cases import Model, loader
from tests.support.snapshots import EachDurable
from tests.support.trainer import Stop, StopAfter
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process


class Sharded(Model):
    """The model of the exact cases, each of its layers in shards, and an optimizer that never steps."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2), nn.ReLU(), nn.Linear(hidden, 3)
        )
        self.idle = nn.Linear(3, 1)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index] # set by the strategy
        for layer in (self.net[0], self.net[4], self.idle):
            if not hasattr(layer, "set_reshard_after_backward"):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second, *_ = self.optimizers()  # type: ignore[misc]
        loss = self.loss((batch[0], batch[1].repeat(1, 3)))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        for scheduler in self.lr_schedulers() or []:  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[call-arg]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.net[0].parameters(), 0.01)
        second = torch.optim.SGD(self.net[4].parameters(), 0.01, momentum=0.9)
        never = torch.optim.Adam(self.idle.parameters(), 0.01)
        steps = int(self.trainer.estimated_stepping_batches)  # asks for the data, before a checkpoint is loaded
        sizes = {first: max(1, steps // 4), second: 2}
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, size) for optimizer, size in sizes.items()]
        return [first, second, never], schedulers


def train(root: Path, *callbacks: pl.Callback, seed: int, ranks: int, **settings: Any) -> pl.Trainer:
    """Train to the end, or go on."""
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return train_with(root, Sharded, strategy, *callbacks, seed=seed, ranks=ranks, **settings)


def train_with(
    root: Path,
    model: Callable[[], pl.LightningModule],
    strategy: Any,
    *callbacks: pl.Callback,
    seed: int,
    ranks: int,
    accelerator: str = "cpu",
    ckpt_path: Path | None = None,
    **settings: Any,
) -> pl.Trainer:
    """The same with any sharded strategy; the model is made after seeding. Each snapshot becomes durable."""
    pl.seed_everything(seed, verbose=False)
    each: dict[str, Any] = {"interval": EverySteps(2), "on_full": "wait", "min_upload_interval_s": 0.0}
    spot = SpotCheckpoint(str(root / "run"), keep=100, run_name="run", **each)
    # Where another run's snapshot is gone on from, that of its step is not in this one.
    waits = [EachDurable(root / "run", 2)] if ckpt_path is None else []
    limits = {"limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    where = {"accelerator": accelerator, "devices": ranks, "strategy": strategy}
    trainer = quiet(*callbacks, *waits, spot, **where, **limits, **settings)
    trainer.fit(model(), loader(), loader(), ckpt_path=ckpt_path)
    return trainer


def undisturbed_and_stopped(root: Path, ranks: int, accelerator: str = "cpu") -> None:
    """Train to the end in ``whole``; in ``broken``, stop on the way and go on."""
    where: dict[str, Any] = {"ranks": ranks, "accelerator": accelerator}
    train(root / "whole", seed=11, **where)
    try:
        train(root / "broken", StopAfter(5), seed=11, **where)
    except Stop:
        new_process()
    train(root / "broken", seed=99, **where)


def train_ranks(root: Path, seed: int = 11, ranks: int = 2) -> None:
    """Train on several ranks."""
    train(root, seed=seed, ranks=ranks)
