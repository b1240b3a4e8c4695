"""Trains to its 8th step, killed at a step if told: ``python -m tests.support.earlier_trainer ROOT KIND [KILL]``.

``KIND`` is ``single``, ``ddp`` or ``fsdp``; the last two have two ranks. Runs of an earlier format, in
``tests/data/format-4.tar.xz``, were left by it at their 5th step, with a snapshot of the 4th.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import EverySteps, SpotCheckpoint

STEPS = 8


class Model(pl.LightningModule):
    """Small, with dropout, so that it depends on generators."""

    def __init__(self, *, shards: bool) -> None:
        super().__init__()
        self.shards = shards
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1))

    def configure_model(self) -> None:
        if self.shards:
            self.shards = False
            for module in (self.net[0], self.net[2], self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Kill(pl.Callback):
    """Ends the process without a word."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.step > 0:
            time.sleep(0.5)  # each snapshot is there before the next one
        if trainer.global_step == self.step:
            os._exit(9)


def main(root: Path, kind: str, kill: int = -1) -> None:
    pl.seed_everything(3)
    inputs = torch.arange(256.0).reshape(64, 4) / 256
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    strategies: dict[str, Any] = {"ddp": DDPStrategy, "fsdp": ModelParallelStrategy}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if kind == "single" else 2,
        strategy=strategies[kind](process_group_backend="gloo") if kind in strategies else "auto",
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[SpotCheckpoint(str(root / "run"), interval=EverySteps(2), keep=1), Kill(kill)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    model = Model(shards=kind == "fsdp")
    trainer.fit(model, data)
    state = model.state_dict()
    whole = {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in state.items()}
    if trainer.is_global_zero:
        (root / "end.json").write_text(json.dumps({name: item.tolist() for name, item in whole.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
