"""Trains a model that FSDP1 shards (on CPUs, gloo), stopped and gone on with: ``python -m tests.exact_flat ROOT``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.conftest import new_process
from tests.exact_cases import Model
from tests.exact_sharded import Stop, StopAt, train_with


class OnCpus(FSDPStrategy):
    """Lightning takes FSDP1 for GPUs only; torch has it on CPUs, too, if it is told the device."""

    def __init__(self, sharding: str = "FULL_SHARD", **settings: Any) -> None:
        super().__init__(state_dict_type="sharded", sharding_strategy=sharding, **settings)  # type: ignore[arg-type]

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return super()._setup_model(
            FullyShardedDataParallel(
                model,
                cpu_offload=self.cpu_offload,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=torch.device("cpu"),  # type: ignore[arg-type]
                **{"auto_wrap_policy": None, **self.kwargs},
            )
        )


class Flat(Model):
    """The model of the exact cases with odd sizes, a frozen layer, tied weights, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(8, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), nn.ReLU(), nn.Linear(13, 3), nn.Linear(3, 1)
        )
        self.still = nn.Linear(3, 5).requires_grad_(False)
        self.idle = nn.Linear(3, 1)
        self.tied = nn.Linear(1, 1)
        self.tied.again = self.tied.weight

    def loss(self, batch: Any) -> torch.Tensor:
        ones = batch[0].new_ones(1, 3)
        return super().loss(batch) + 0.1 * self.tied(ones[:, :1]).pow(2).sum() + 0 * self.still(ones).sum()

    def configure_optimizers(self) -> Any:
        whole = getattr(self.trainer.strategy, "kwargs", {}).get("use_orig_params", True)
        parameters = self.parameters() if whole else self.trainer.strategy.model.parameters()  # type: ignore[union-attr]
        optimizer = torch.optim.AdamW([one for one in parameters if one.requires_grad], 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def train(root: Path, strategy: Any, *callbacks: pl.Callback, seed: int, ranks: int, **settings: Any) -> pl.Trainer:
    """Train to the end, or go on."""
    return train_with(root, Flat, strategy, *callbacks, seed=seed, ranks=ranks, **settings)


def undisturbed_and_stopped(root: Path, make: Any, *callbacks: pl.Callback, ranks: int, **settings: Any) -> None:
    """Train to the end in ``whole``; in ``broken``, stop on the way and go on."""
    train(root / "whole", make(), seed=11, ranks=ranks, **settings)
    try:
        train(root / "broken", make(), StopAt(5), seed=11, ranks=ranks, **settings)
    except Stop:
        new_process()
    train(root / "broken", make(), *callbacks, seed=99, ranks=ranks, **settings)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--sharding", default="FULL_SHARD")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
    parser.add_argument("--units", action="store_true", help="each layer in a flat parameter of its own")
    arguments = parser.parse_args()

    def make() -> OnCpus:
        policy = {"auto_wrap_policy": {nn.Linear}} if arguments.units else {}
        return OnCpus(arguments.sharding, use_orig_params=not arguments.flat, **policy)

    undisturbed_and_stopped(arguments.root, make, ranks=arguments.ranks, precision=arguments.precision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
