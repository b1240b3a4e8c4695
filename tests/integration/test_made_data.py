"""Data that a module makes and wraps in training: no snapshot has them, and what reads them goes on all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_spot import EverySteps
from lightning_spot.state.dump import VERSION, in_present_form
from tests.support.said import listening, points
from tests.support.snapshots import serverless
from tests.support.trainer import Stop, StopAt, StopIn, trainer
from tests.support.waiting import new_process


class Rows(Dataset[Any]):
    def __init__(self, seed: int) -> None:
        self.rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[index]}


class WithBaseline(Dataset[Any]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.rows[index], "baseline": self.rows[index]["x"].sum()}


class Baseline(nn.Module):
    """Reads what the data have of it once it has warmed up, as the rollout baselines of reinforcement learning do."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = 0.0

    def wrap(self, rows: Rows) -> Dataset[Any]:
        return WithBaseline(rows) if self.alpha else rows

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return batch["baseline"] if self.alpha else 0.0


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.baseline = nn.Linear(4, 1), Baseline()

    def setup(self, stage: str) -> None:
        self.rows = self.baseline.wrap(Rows(0))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch["x"]).sum(1) - self.baseline(batch)).square().mean()

    def on_train_epoch_end(self) -> None:
        self.baseline.alpha = 1.0
        self.rows = self.baseline.wrap(Rows(self.current_epoch + 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(run: Path, *callbacks: pl.Callback) -> tuple[Learner, list[str]]:
    new_process()
    pl.seed_everything(1, verbose=False)
    learner = Learner()
    spot = serverless(run, interval=EverySteps(1))
    fits = trainer(*callbacks, spot, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    with listening() as logged:
        fits.fit(learner)
    return learner, points(logged)


def test_a_resume_in_the_middle_of_an_epoch_goes_on(tmp_path: Path) -> None:
    """Each start died with its first batch: it read what the wrapped data have, which were not there."""
    for stop in (8, 10):
        with pytest.raises(Stop):
            fit(tmp_path / "run", StopAt(stop))
    learner, said = fit(tmp_path / "run")
    assert learner.baseline.alpha == 1.0
    assert type(learner.rows) is WithBaseline
    assert sum("begin anew: Baseline.alpha, Learner.rows." in text for text in said) == 1


def test_a_resume_at_the_end_of_an_epoch_is_exact(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole")
    with pytest.raises(Stop):
        fit(tmp_path / "run", StopIn("on_train_epoch_end", 2))
    again, _ = fit(tmp_path / "run")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_what_was_kept_beside_wrapped_data_is_dropped_and_named() -> None:
    """An earlier build kept it until the epoch's end: put back at once, it killed each start with its first batch."""
    attributes = {"baseline": {"alpha": 1.0, "training": True}, "net": {"scale": 2.0}}
    hooked = {"made_data": ["baseline"], "attributes": attributes}
    found = in_present_form({"version": VERSION, "lost": ["Learner.rows"], "ranks": [{"hooked": hooked}, None]})
    assert found["ranks"][0]["hooked"]["attributes"] == {"baseline": {"training": True}, "net": {"scale": 2.0}}
    assert found["lost"] == ["Learner.rows", "baseline.alpha"]
