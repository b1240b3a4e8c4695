"""Trains on several ranks (gloo), each of which has a parameter of its own: ``python -m tests.support.exact_own ROOT``.

To the end; and, beside it, stopped on the way and gone on with. It says what differs in the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_spot import EverySteps, SpotCheckpoint
from tests.support.exact_cases import loader
from tests.support.exact_models import ByParameter
from tests.support.trainer import Stop, StopAfter
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process

ROWS = 64


class Own(pl.LightningModule):
    """An embedding of each rank, which nothing makes like that of another, under a layer that all have."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        self.own = nn.Embedding(rows, 8)
        self._ddp_params_and_buffers_to_ignore = ["own.weight"]

    def setup(self, stage: str) -> None:
        if self.trainer.global_rank and not hasattr(self, "is_set"):
            self.is_set = True
            nn.init.normal_(self.own.weight)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index] # set by the strategy

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        rows = torch.arange(len(batch[0])) + batch_idx
        return (self.net(batch[0] + self.own(rows)) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.parameters(), 0.01)]


class Manual(Own):
    """Steps by hand: DDP gives ranks the statistics of rank 0 in the first step only; then each has its own."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.automatic_optimization, self.norm = False, nn.BatchNorm1d(8)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step((self.norm(batch[0]), batch[1]), batch_idx)
        self.manual_backward(loss)
        optimizer.step()


class OnShards(ByParameter):
    """Works on this rank's part, as those with kernels of their own do: what it keeps is no DTensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        weight, gradient = parameter.to_local(), parameter.grad.to_local()
        state["momentum"] = state.get("momentum", torch.zeros_like(weight)).mul_(0.9).add_(gradient)
        weight.sub_(group["lr"] * state["momentum"])


class Kernels(Own):
    """All of it is in shards, and its optimizer keeps what only this rank has."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        del self.own

    def setup(self, stage: str) -> None:
        """It has no embedding."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return (self.net(batch[0]).mean(1, keepdim=True) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return [OnShards(self.parameters())]


def strategy_of(name: str, ranks: int) -> Any:
    """A strategy that leaves the embedding to each rank."""
    if name in ("ddp", "manual"):
        return DDPStrategy(process_group_backend="gloo")
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)


def train(root: Path, name: str, *callbacks: pl.Callback, seed: int) -> dict[str, torch.Tensor]:
    """The buffers of this rank in the end."""
    new_process()
    pl.seed_everything(seed, verbose=False)
    module = {"manual": Manual, "kernels": Kernels}.get(name, Own)(ROWS)
    spot = SpotCheckpoint(str(root), interval=EverySteps(2), on_full="wait", run_name="run")
    trainer = quiet(*callbacks, spot, devices=2, strategy=strategy_of(name, 2), max_epochs=-1, max_steps=8)
    trainer.fit(module, loader())
    return dict(module.named_buffers())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("strategy", choices=("ddp", "manual", "fsdp2", "kernels"))
    given = parser.parse_args()
    whole = train(given.root / "whole", given.strategy, seed=11)
    stopped = given.root / "stopped"
    try:
        train(stopped, given.strategy, StopAfter(5), seed=11)
    except Stop:
        print("it was stopped", flush=True)
    found = train(stopped, given.strategy, seed=99)
    differ = [key for key, value in whole.items() if not torch.equal(value, found[key])]
    print(f"of {', '.join(sorted(whole))} there differ: {differ}", flush=True)


if __name__ == "__main__":
    main()
