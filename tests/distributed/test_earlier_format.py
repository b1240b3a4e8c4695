"""Runs that were left by the version before: they go on exactly from what lies in their directories."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import EverySteps, SpotCheckpoint
from tests.support.program import launch, run
from tests.support.trainer import trainer as quiet

LEFT = Path(__file__).parents[1] / "data" / "format-4.tar.xz"
"""What :func:`train` left, killed at its 5th step; and, trained on undisturbed, its ``end.json``."""


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


def train(root: Path, kind: str) -> None:
    pl.seed_everything(3)
    inputs = torch.arange(256.0).reshape(64, 4) / 256
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    strategies: dict[str, Any] = {"ddp": DDPStrategy, "fsdp": ModelParallelStrategy}
    strategy = strategies[kind](process_group_backend="gloo") if kind in strategies else "auto"
    spot = SpotCheckpoint(str(root / "run"), interval=EverySteps(2), keep=1)
    trainer = quiet(spot, devices=1 + (kind in strategies), strategy=strategy, max_steps=8, max_epochs=-1)
    model = Model(shards=kind == "fsdp")
    trainer.fit(model, data)
    whole = {name: getattr(item, "full_tensor", lambda item=item: item)() for name, item in model.state_dict().items()}  # type: ignore[misc]
    if trainer.is_global_zero:
        (root / "end.json").write_text(json.dumps({name: item.tolist() for name, item in whole.items()}))


def go_on(root: Path) -> None:
    for kind in ("ddp", "fsdp"):
        train(root / kind, kind)


def test_runs_of_the_version_before_go_on_exactly(tmp_path: Path, warm_python: str) -> None:
    with tarfile.open(LEFT) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11 has it from 3.11.4 on
        archive.extractall(tmp_path)
    ends = {kind: tmp_path / kind / "end.json" for kind in ("single", "ddp", "fsdp")}
    undisturbed = {kind: json.loads(end.read_text()) for kind, end in ends.items()}
    for end in ends.values():
        end.unlink()
    assert run(warm_python, train, tmp_path / "single", kind="single").resumed == [4]
    assert launch(warm_python, go_on, tmp_path).resumed == [4, 4]
    # Another processor rounds otherwise than the one that trained it; another batch or mask would differ by some 1e-3.
    for kind, end in ends.items():
        for name, weights in json.loads(end.read_text()).items():
            wanted = torch.tensor(undisturbed[kind].pop(name))
            torch.testing.assert_close(torch.tensor(weights), wanted, rtol=1e-5, atol=1e-6)
        assert not undisturbed[kind]
