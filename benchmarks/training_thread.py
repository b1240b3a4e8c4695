"""What the training thread does for a snapshot beside copying, where nothing but values changed.

150 parameters with AdamW's state are 600 tensors, so small that to copy them takes next to nothing. Counted is all
that is spent in our hooks and at seams, from outside.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.blocking import Waits
from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.peers.seam_watch import SeamWatch
from lightning_spot import EverySteps, SpotCheckpoint

TENSORS = 600
_EVERY, _LEFT_OUT = 3, 4  # the first ones make slots, and meet tensors for the first time


class Model(pl.LightningModule):
    """A small transformer: 150 parameters in 125 modules."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(12))
        self.layers = nn.Sequential(nn.Linear(width, width), *layers, nn.Linear(width, width), nn.LayerNorm(width))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.parameters()]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Rounds(pl.Callback):
    """Notes what each snapshot costs: until the optimizer step after it has passed."""

    def __init__(self, spot: SpotCheckpoint, waits: Waits) -> None:
        self.spot, self.waits = spot, waits
        self.before_s = 0.0
        self.found_s: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        step = trainer.global_step
        if step % _EVERY == _EVERY - 1:
            self.before_s = self.waits.spent_s
        if step % _EVERY == 1 and self.spot.snapshots.begun_step == step - 1:
            self.found_s.append(self.waits.spent_s - self.before_s)
            self.waits.quieten()  # here: a step before the next one, its slot is leased


def run(quick: bool) -> list[Result]:
    rounds = 10 if quick else 40
    with scratch() as folder:
        spot = SpotCheckpoint(str(folder / "run-1"), interval=EverySteps(_EVERY), on_full="wait", copy_mode="eager")
        watch = SeamWatch(spot)
        noted = Rounds(spot, Waits(spot, watch))
        model = Model()
        bare_trainer(_EVERY * (rounds + _LEFT_OUT) + 2, [watch, spot, noted]).fit(
            model, DataLoader(TensorDataset(torch.zeros(10_000, 1)), 1)
        )
        states = sum(len(state) for state in model.trainer.optimizers[0].state.values())
    assert states + len(list(model.parameters())) == TENSORS
    times = [1000 * spent_s for spent_s in noted.found_s[_LEFT_OUT:]]
    name = f"work of the training thread for {TENSORS} tensors, beside copying"
    return [Result(name, times, 5 + 0.005 * TENSORS, unit="ms")]
