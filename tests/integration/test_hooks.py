"""What hooks of a user change at the start of training, or in it: weights, callbacks, optimizers, data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import ModelChangedError
from lightning_spot.state.dump import VERSION, in_present_form
from tests.support.said import listening, points
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Stop, StopAt, StopIn, data, equal, trainer
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G9")


def fit(
    run: Path, make: Callable[[], Any], *callbacks: pl.Callback, every: int = 2, resume: bool = True, **more: Any
) -> tuple[Any, SpotCheckpoint, list[logging.LogRecord]]:
    """A start of a program: the module, which may have data of its own, our callback, and what was warned of."""
    new_process()
    pl.seed_everything(1, verbose=False)
    module, spot = make(), serverless(run, interval=EverySteps(every), resume=resume)
    with listening() as logged:
        trainer(*callbacks, spot, **more).fit(module, *(() if isinstance(module, Learner) else (data(12),)))
    return module, spot, logged


# -- weights and buffers ----------------------------------------------------------------------------------------------


class Initialises(Net):
    """In a hook at the start of training, as some projects do."""

    def on_train_start(self) -> None:
        for parameter in self.net[0].parameters():
            nn.init.normal_(parameter, std=0.1)


class InitialisesEarlier(Initialises):
    def on_fit_start(self) -> None:
        self.net[3].weight.data.normal_(std=0.1)  # past torch's counts

    def on_train_start(self) -> None:
        """Nothing."""


class LoadsItsOwn(Net):
    """A resume of the project's own: a file of weights, if there is one."""

    def on_train_start(self) -> None:
        self.load_state_dict(Net().state_dict())


class KeepsFull(Net):
    """Sums in full precision, whatever the module is converted to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def on_fit_start(self) -> None:
        self.total = self.total.float()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.total += torch.tensor([0.1, 1e-4, 3.3])
        return self.loss([part.bfloat16() for part in batch])


class KeepsFullLater(KeepsFull):
    """It decides on that at its first step."""

    def on_fit_start(self) -> None:
        """Nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 0:
            self.total = self.total.float()
        return super().training_step(batch, batch_idx)


def put_back(logged: list[logging.LogRecord]) -> list[str]:
    """Which values were said to be."""
    return [item.spot_facts["about"] for item in logged if item.spot_key == "weights-put-back"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "names", "more"),
    [
        (Initialises, "net.0.bias, net.0.weight", {}),
        (InitialisesEarlier, "net.3.weight", {}),
        (LoadsItsOwn, "net.0.bias, net.0.weight, net.1.bias, net.1.num_batches_tracked", {}),
        (KeepsFull, "", {"precision": "bf16-true"}),
        (KeepsFullLater, "", {"precision": "bf16-true"}),
        (Net, "", {"precision": "64-true"}),
    ],
)
def test_a_resumed_run_has_the_values_of_its_snapshot(
    tmp_path: Path, kind: type[Net], names: str, more: dict[str, Any]
) -> None:
    """They were lost, or rounded, and nothing was said."""
    if more.get("precision") == "64-true":
        kind = type("Double", (kind,), {"loss": lambda self, batch: Net.loss(self, [part.double() for part in batch])})
    whole, _, logged = fit(tmp_path / "whole", kind, **more)
    assert put_back(logged) == []
    with pytest.raises(Stop):
        fit(tmp_path / "run", kind, StopAt(5), every=1, **more)
    again, _, logged = fit(tmp_path / "run", kind, **more)
    assert [names in text for text in put_back(logged)] == ([True] if names else [])
    for name, value in whole.state_dict().items():
        assert again.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(value, again.state_dict()[name]), name


# -- callbacks and optimizers -----------------------------------------------------------------------------------------


class Reverses(pl.Callback):
    """Changes the list that Lightning goes through just then: some are called twice, others not at all."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.callbacks.reverse()  # type: ignore[attr-defined]


@pytest.mark.parametrize("others", [0, 1])
def test_changing_the_callbacks_at_the_start_costs_no_snapshot(tmp_path: Path, others: int) -> None:
    """None but the last was taken, without a word, and no notice heard."""
    callbacks = [Reverses(), *[pl.Callback() for _ in range(others)]]
    whole, *_ = fit(tmp_path / "whole", Net, *callbacks)
    with pytest.raises(Stop):
        fit(tmp_path / "broken", Net, *callbacks, StopAt(9))
    again, spot, _ = fit(tmp_path / "broken", Net, *callbacks)
    assert spot.resumed_from.step == 8
    assert spot.goodput.compute() > 0.0
    assert equal(whole.state_dict(), again.state_dict())


class Replaces(pl.Callback):
    """Has another optimizer from a step on."""

    def __init__(self, groups: int, optimizers: int) -> None:
        self.groups, self.optimizers = groups, optimizers

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            parameters = list(module.parameters())
            groups = [{"params": parameters[number :: self.groups]} for number in range(self.groups)]
            trainer.optimizers = [torch.optim.Adam(groups) for _ in range(self.optimizers)]
            trainer.lr_scheduler_configs[0].scheduler.optimizer = trainer.optimizers[0]


@pytest.mark.parametrize(("groups", "optimizers", "said"), [(3, 1, r"\b2, 2, 2\b.*\b6\b"), (1, 2, r"\b6; 6\b.*\b6\b")])
def test_replacing_an_optimizer_in_training_is_one_clear_error(
    tmp_path: Path, groups: int, optimizers: int, said: str
) -> None:
    """Torch's own named no snapshot and no way on; that one of two was left out was not said at all."""
    run = tmp_path / "run"
    with pytest.raises(Stop):
        fit(run, Net, Replaces(groups, optimizers), StopAt(9))
    with pytest.raises(ModelChangedError, match=said):
        fit(run, Net)
    fit(run, Net, resume=False)


class Refuses(Net):
    """Ends a resume itself."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise ZeroDivisionError


def test_nothing_is_left_of_a_resume_that_a_hook_has_ended(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        fit(tmp_path / "run", Net, StopAt(9))
    new_process()
    again = trainer(serverless(tmp_path / "run"))
    with pytest.raises(ZeroDivisionError):
        again.fit(Refuses(), data(12))
    assert "load_optimizer_state_dict" not in vars(again.strategy)


class Regroups(Net):
    """From a version on it has two groups of parameters, and says how the one of before fits, as torch has it."""

    version = 1

    def configure_optimizers(self) -> Any:
        if self.version == 1:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        parameters = list(self.parameters())
        optimizer = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)
        optimizer.register_load_state_dict_pre_hook(self.adapt)
        return optimizer

    def adapt(self, _optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        groups = [{**group, "params": group["params"][:2]}, {**group, "params": group["params"][2:]}]
        return {**state, "param_groups": groups}


def test_a_hook_of_an_optimizer_may_make_what_was_saved_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stop):
        fit(tmp_path / "run", Regroups, StopAt(9))
    monkeypatch.setattr(Regroups, "version", 2)
    again, spot, _ = fit(tmp_path / "run", Regroups)
    assert spot.resumed_from.step == 8
    state = again.optimizers(use_pl_optimizer=False).state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 4]
    assert {int(each["step"]) for each in state["state"].values()} == {again.global_step}


# -- data that a module makes and wraps: no snapshot has them, and what reads them goes on all the same ----------------


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


RELOADED: dict[str, Any] = {"every": 1, "max_epochs": 4, "reload_dataloaders_every_n_epochs": 1}


def test_a_resume_in_the_middle_of_an_epoch_goes_on(tmp_path: Path) -> None:
    """Each start died with its first batch: it read what the wrapped data have, which were not there."""
    for stop in (8, 10):
        with pytest.raises(Stop):
            fit(tmp_path / "run", Learner, StopAt(stop), **RELOADED)
    learner, _, logged = fit(tmp_path / "run", Learner, **RELOADED)
    assert learner.baseline.alpha == 1.0
    assert type(learner.rows) is WithBaseline
    assert sum("begin anew: Baseline.alpha, Learner.rows." in text for text in points(logged)) == 1


def test_a_resume_at_the_end_of_an_epoch_is_exact(tmp_path: Path) -> None:
    whole, *_ = fit(tmp_path / "whole", Learner, **RELOADED)
    with pytest.raises(Stop):
        fit(tmp_path / "run", Learner, StopIn("on_train_epoch_end", 2), **RELOADED)
    again, *_ = fit(tmp_path / "run", Learner, **RELOADED)
    assert equal(whole.state_dict(), again.state_dict())


def test_what_was_kept_beside_wrapped_data_is_dropped_and_named() -> None:
    """An earlier build kept it until the epoch's end: put back at once, it killed each start with its first batch."""
    attributes = {"baseline": {"alpha": 1.0, "training": True}, "net": {"scale": 2.0}}
    hooked = {"made_data": ["baseline"], "attributes": attributes}
    found = in_present_form({"version": VERSION, "lost": ["Learner.rows"], "ranks": [{"hooked": hooked}, None]})
    assert found["ranks"][0]["hooked"]["attributes"] == {"baseline": {"training": True}, "net": {"scale": 2.0}}
    assert found["lost"] == ["Learner.rows", "baseline.alpha"]
