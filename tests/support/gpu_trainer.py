"""Trains on a GPU, exactly: ``python -m tests.support.gpu_trainer ROOT [--kill STEP | --fault STEP]``.

Killed in the middle of a backward pass, or ended by an error that takes the device away, it goes on when started again.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_spot import EverySteps, SpotCheckpoint
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import until


class Exact(Net):
    """Dropout, fused AdamW, and a width at which the kernels of a GPU add up in some order."""

    def __init__(self) -> None:
        super().__init__(width=256)
        self.net.insert(3, nn.Dropout(0.3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class EndAt(pl.Callback):
    """Ends the training in the batch after a step, once a snapshot of this attempt is committed."""

    def __init__(self, spot: SpotCheckpoint, kill: int, fault: int) -> None:
        self.spot, self.kill, self.fault = spot, kill, fault

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step in (self.kill, self.fault):
            until(lambda: self.spot.last_committed_step == step - 1, "the last snapshot")
        if step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.fault:
            there = torch.zeros(4, device="cuda")
            there[torch.tensor([10**6], device="cuda")] += 1  # an assertion on the device: nothing works there any more


def train(root: Path, kill: int = -1, fault: int = -1) -> None:
    """Train to the end, or until it is ended."""
    torch.use_deterministic_algorithms(True)
    pl.seed_everything(3, verbose=False)
    spot = SpotCheckpoint(str(root / "run-1"), interval=EverySteps(2), keep=100, on_full="wait")
    settings = {"accelerator": "gpu", "devices": 1, "max_epochs": 2}
    trainer(spot, EndAt(spot, kill, fault), **settings).fit(Exact(), data())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--kill", type=int, default=-1, help="end by SIGKILL in the batch after this step")
    parser.add_argument("--fault", type=int, default=-1, help="lose the device in it")
    arguments = parser.parse_args()
    train(arguments.root, arguments.kill, arguments.fault)


if __name__ == "__main__":
    main()
