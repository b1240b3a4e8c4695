"""Trains on any number of ranks (gloo), notes which samples each has seen, and can be killed:

``python -m tests.support.elastic_trainer ROOT --ranks N --kill-at BATCH``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.tiers.local import LocalStore
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process, until

LENGTH = 144


class Numbers(Dataset[int]):
    """Each sample is its index."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Adds(pl.LightningModule):
    """What it logs of an epoch is known if every sample is seen once: the sum and the mean of all numbers."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes
        self.layer = torch.nn.Linear(1, 1)
        self.total = torchmetrics.SumMetric()

    def setup(self, stage: str) -> None:
        self.file = os.open(f"{self.notes}-{self.trainer.global_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, **facts: Any) -> None:
        os.write(self.file, f"{json.dumps(facts)}\n".encode())

    def on_train_start(self) -> None:
        self.note(begins_at=self.trainer.global_step)

    def training_step(self, numbers: torch.Tensor, batch_idx: int) -> torch.Tensor:
        step, epoch = self.trainer.global_step, self.current_epoch
        self.note(step=step, epoch=epoch, batch=batch_idx, samples=numbers.tolist())
        self.total.update(numbers)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("mean", numbers.float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("of this rank", numbers.float().mean(), on_step=False, on_epoch=True)
        return self.layer(numbers.float().unsqueeze(1) / LENGTH).square().mean()

    def on_train_epoch_end(self) -> None:
        logged = self.trainer.callback_metrics
        self.note(ended=self.current_epoch, total=float(logged["total"]), mean=float(logged["mean"]))

    def on_validation_epoch_end(self) -> None:
        self.note(validated=self.current_epoch)

    def validation_step(self, numbers: torch.Tensor, batch_idx: int) -> None:
        self.log("validated", numbers.float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class KillAt(pl.Callback):
    """Ends this process in a batch, once there is something to resume from: memory goes with it."""

    def __init__(self, batch: int, run: Path) -> None:
        self.batch, self.store = batch, LocalStore(run)

    def on_before_backward(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            until(lambda: self.store.survey().manifests, "a snapshot to be durable")
            os._exit(9)


def _ends_unless_finite() -> EarlyStopping:
    """Raises an error where nothing was logged; where a rank has no number, all of them end."""
    return EarlyStopping("of this rank", patience=10**6, check_on_train_epoch_end=True)


def train(
    root: Path,
    ranks: int,
    notes: str,
    kill_at: int = -1,
    *,
    every: int = 1,
    data: Any = None,
    more: Sequence[pl.Callback] = (),
    **settings: Any,
) -> pl.Trainer:
    """Train two epochs, or go on."""
    new_process()
    pl.seed_everything(3, verbose=False)
    loader = DataLoader(Numbers(), 3, shuffle=True, **(data or {}))
    spot = SpotCheckpoint(str(root / "run"), local_server=False, interval=EverySteps(every), on_full="wait", keep=100)
    strategy = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    callbacks = (KillAt(kill_at, root / "run"), _ends_unless_finite(), *more, spot)
    usual = {"devices": ranks, "strategy": strategy, "num_sanity_val_steps": 0}
    trainer = quiet(*callbacks, **{**usual, **settings})
    trainer.fit(Adds(root / notes), loader, DataLoader(Numbers(), LENGTH // 4))
    return trainer


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--notes", required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--drop-last", action="store_true")
    given = parser.parse_args()
    data = {"num_workers": given.workers, "persistent_workers": given.persistent, "drop_last": given.drop_last}
    train(given.root, given.ranks, given.notes, given.kill_at, data=data, **given.settings)


if __name__ == "__main__":
    main()
