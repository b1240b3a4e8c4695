"""What each rank has for itself is named when a run goes on; buffers come back to the rank that had them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.state.replicas import what_is_rank_0s
from tests.support.exact_cases import loader
from tests.support.exact_models import ByParameter
from tests.support.program import launch
from tests.support.ranks import as_rank
from tests.support.trainer import Stop, StopAfter
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process

PARAMETERS = "each rank trains parameters of its own, and snapshots have them as rank 0 has them"
VALUES = "optimizers keep something for each rank by itself beside parameters in shards"


class Own(pl.LightningModule):
    """An embedding of each rank, which nothing makes like that of another, under a layer that all have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        self.own = nn.Embedding(64, 8)
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

    def __init__(self) -> None:
        super().__init__()
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

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        del self.own

    def setup(self, stage: str) -> None:
        """It has no embedding."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return (self.net(batch[0]).mean(1, keepdim=True) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return [OnShards(self.parameters())]


def train(root: Path, kind: str, *callbacks: pl.Callback, seed: int) -> dict[str, torch.Tensor]:
    """The buffers of this rank in the end."""
    new_process()
    pl.seed_everything(seed, verbose=False)
    module = {"manual": Manual, "kernels": Kernels}.get(kind, Own)()
    ddp, shards = DDPStrategy(process_group_backend="gloo"), ModelParallelStrategy(2, 1)
    spot = SpotCheckpoint(str(root), interval=EverySteps(2), on_full="wait", run_name="run")
    where = {"devices": 2, "strategy": ddp if kind in ("ddp", "manual") else shards}
    quiet(*callbacks, spot, max_epochs=-1, max_steps=8, **where).fit(module, loader())
    return dict(module.named_buffers())


NAMED = {
    "ddp": f"{PARAMETERS}: all ranks go on with its own.weight.",
    "manual": f"{PARAMETERS}: all ranks go on with its own.weight.",
    "fsdp2": f"{PARAMETERS}: all ranks go on with its own.weight.",
    "kernels": f"{VALUES}, and snapshots have it as rank 0 has it: all ranks go on with its net.0.weight",
}
BEGINS = "-- now trains "


def compare(root: Path) -> None:
    """Train each kind to the end; and, beside it, be stopped, and go on. Each rank notes which buffers are the same."""
    for kind in NAMED:
        if os.environ["LOCAL_RANK"] == "0":
            print(f"{BEGINS}{kind}", file=sys.stderr, flush=True)
        whole = train(root / kind / "whole", kind, seed=11)
        with pytest.raises(Stop):
            train(root / kind / "stopped", kind, StopAfter(5), seed=11)
        found = train(root / kind / "stopped", kind, seed=99)
        same = {key: torch.equal(value, found[key]) for key, value in whole.items()}
        (root / kind / f"same-{os.environ['LOCAL_RANK']}").write_text(json.dumps(same))


def test_what_is_of_each_rank_is_named_and_buffers_come_back(tmp_path: Path, warm_python: str) -> None:
    log = launch(warm_python, compare, tmp_path).log
    for (kind, says), said in zip(NAMED.items(), log.split(BEGINS)[1:], strict=True):
        for rank in range(2):
            same = json.loads((tmp_path / kind / f"same-{rank}").read_text())
            assert all(same.values()), kind
            assert ({"norm.running_mean", "norm.running_var"} <= same.keys()) == (kind == "manual")
        assert said.count(says) == 1, kind


ORDERS = {
    "static graph": ({"static_graph": True}, False, 4, True),
    "static graph of two": ({"static_graph": True}, False, 2, False),
    "hook": ({}, True, 4, True),
    "hook, never rebuilt": ({"find_unused_parameters": True}, True, 4, False),
    "rehearsed": ({}, False, 4, False),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_of_sums_that_cannot_be_had_again_is_named(kind: str) -> None:
    """Of four ranks with a static graph, the first step after a resume was rounded in another way, without a word."""
    settings, has_hook, ranks, is_named = ORDERS[kind]
    with as_rank(0, (ranks,)):
        ddp = DistributedDataParallel(nn.Linear(1, 1), **settings)
        if has_hook:
            ddp.register_comm_hook(None, fp16_compress_hook)
        strategy, module = SimpleNamespace(model=ddp), ddp.module
        trainer: Any = SimpleNamespace(
            world_size=ranks, model=ddp, strategy=strategy, lightning_module=module, optimizers=[]
        )
        assert any("another order" in sentence for sentence in what_is_rank_0s(trainer)) == is_named
