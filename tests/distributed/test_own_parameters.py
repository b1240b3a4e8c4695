"""Parameters that each rank has for itself come back to it, or are named where they are too large for that."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.exact import own_parameters
from lightning_spot.exact.own_parameters import (
    OwnParameters,
    capture_values,
    what_is_the_first_ranks,
    what_other_ranks_kept,
)
from tests.support.exact_cases import loader
from tests.support.exact_models import ByParameter
from tests.support.program import launch
from tests.support.trainer import Stop, StopAfter
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process

NAMED = "each rank trains parameters of its own, and those above 16 MiB are in snapshots as rank 0 has them"


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

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "seen": 0.0})

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        weight, gradient = parameter.to_local(), parameter.grad.to_local()
        if not state:
            state.update(momentum=torch.zeros_like(weight), norm=None, more={}, ring=[0.0, torch.zeros(())])
        state["momentum"].mul_(0.9).add_(gradient)
        state["norm"] = 0.9 * (state["norm"] or 0.0) + float(gradient.norm())
        state["more"]["mean"] = state["more"].get("mean", 0.0) + gradient.mean()
        state["ring"] = [state["norm"], state["ring"][1] + gradient.max()]
        group["seen"] += state["norm"]
        scale = 1 + state["norm"] + float(state["more"]["mean"]) + 0.01 * group["seen"] + 0.1 * float(state["ring"][1])
        weight.sub_(group["lr"] * state["momentum"] / scale)


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


def train(root: Path, name: str, rows: int, *callbacks: pl.Callback, seed: int) -> dict[str, torch.Tensor]:
    """What this rank has of its embedding in the end, and its buffers."""
    new_process()
    pl.seed_everything(seed, verbose=False)
    module = {"manual": Manual, "kernels": Kernels}.get(name, Own)(rows)
    ddp, shards = DDPStrategy(process_group_backend="gloo"), ModelParallelStrategy(2, 1)
    spot = SpotCheckpoint(str(root), interval=EverySteps(2), on_full="wait", run_name="run")
    where = {"devices": 2, "strategy": ddp if name in ("ddp", "manual") else shards}
    trainer = quiet(*callbacks, spot, max_epochs=-1, max_steps=8, **where)
    trainer.fit(module, loader())
    (optimizer,) = trainer.optimizers
    if name == "kernels":
        kept = [value for state in optimizer.state.values() for value in (state["momentum"].flatten(), state["norm"])]
        weights = [parameter.to_local().flatten() for parameter in module.parameters()]
        seen = torch.tensor([each for each in kept if isinstance(each, float)] + [optimizer.param_groups[0]["seen"]])
        moments = torch.cat([each for each in kept if isinstance(each, torch.Tensor)])
        return {"weight": torch.cat(weights).detach(), "moments": moments, "seen": seen}
    return {"weight": module.own.weight.detach(), **optimizer.state[module.own.weight], **dict(module.named_buffers())}


def compare(root: Path, strategy: str, rows: int = 64) -> None:
    """Train to the end; and, beside it, be stopped, and go on. Each rank notes which tensors are the same."""
    whole = train(root / "whole", strategy, rows, seed=11)
    with pytest.raises(Stop):
        train(root / "stopped", strategy, rows, StopAfter(5), seed=11)
    found = train(root / "stopped", strategy, rows, seed=99)
    same = {key: torch.equal(value, found[key]) for key, value in whole.items()}
    (root / f"same-{os.environ['LOCAL_RANK']}").write_text(json.dumps(same))


def compared(root: Path) -> list[dict[str, bool]]:
    return [json.loads((root / f"same-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", ["ddp", "manual", "fsdp2", "kernels"])
def test_each_rank_goes_on_with_its_own(strategy: str, tmp_path: Path, warm_python: str) -> None:
    done = launch(warm_python, compare, tmp_path, strategy=strategy)
    for same in compared(tmp_path):
        assert all(same.values())
        assert ({"norm.running_mean", "norm.running_var"} <= same.keys()) == (strategy == "manual")
    assert NAMED not in done.log


def test_optimizer_state_of_one_rank_is_named_if_it_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept if it is too large, or if the number of ranks has changed."""
    module = torch.nn.Linear(2, 1)
    optimizer = OnShards(module.parameters())
    for parameter in module.parameters():
        optimizer.state[parameter] = {"momentum": torch.ones_like(parameter), "step": 3, "norm": 1.0}
    trainer: Any = SimpleNamespace(
        lightning_module=module, optimizers=[optimizer], world_size=2, strategy=object.__new__(ModelParallelStrategy)
    )
    saved = capture_values(trainer)
    assert saved["optimizers"][0]["bias"] == {"momentum": torch.ones(1), "norm": 1.0}
    optimizer.state[module.bias].update(late=None, ring=[2.0, torch.ones(1)], more={"none": None})
    grown = capture_values(trainer)["optimizers"][0]["bias"]  # what is there by now, of whatever kind
    assert grown == {
        "momentum": torch.ones(1),
        "norm": 1.0,
        "late": None,
        "ring": [2.0, torch.ones(1)],
        "more": {"none": None},
    }
    assert saved["groups"] == [[{"lr": 0.05, "seen": 0.0}]]
    (said,) = what_other_ranks_kept([saved, {**saved, "groups": [[{"lr": 0.05, "seen": 1.0}]]}])
    assert "(weight, bias, seen) goes on as rank 0 had it" in said
    assert not list(what_other_ranks_kept([{"groups": saved["groups"]}] * 2))
    monkeypatch.setattr(own_parameters, "MOST_BYTES", 2**20)
    optimizer.state[module.weight]["more"] = torch.zeros(2**19)
    saved = capture_values(trainer)
    assert "optimizers" not in saved
    assert next(what_is_the_first_ranks({}, saved)).count("weight (momentum, norm, more)") == 1
    trainer.optimizers = [torch.optim.AdamW(module.parameters())]  # torch's keep the same on all ranks
    assert capture_values(trainer) == {}


def test_what_is_too_large_is_named_before_training_goes_on(tmp_path: Path, warm_python: str) -> None:
    rows = 2**24 // (3 * 8 * 4) + 1  # a weight and two moments
    done = launch(warm_python, compare, tmp_path, strategy="ddp", rows=rows)
    assert not any(same["weight"] for same in compared(tmp_path))  # what rank 0 trains depends on what the other has
    assert f"{NAMED}: all ranks go on with its own.weight." in done.log


def test_what_an_optimizer_keeps_on_a_device_comes_back_there() -> None:
    """A fused one has its counts of steps beside the parameters, and fails with one on the host."""
    module = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.state[module.weight] = {"step": torch.zeros((), device="meta"), "on host": torch.zeros(())}
    trainer: Any = SimpleNamespace(lightning_module=module, optimizers=[optimizer])
    values = {"step": torch.ones(()), "on host": torch.ones(()), "exp_avg": torch.ones(1, 2), "new": torch.ones(())}
    OwnParameters().restore(trainer, {"optimizers": [{"weight": values}]})
    where = {key: value.device.type for key, value in optimizer.state[module.weight].items()}
    assert where == {"step": "meta", "on host": "cpu", "exp_avg": "meta", "new": "cpu"}
