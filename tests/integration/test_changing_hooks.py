"""Hooks that change what Lightning goes through: its list of callbacks, the optimizers of a training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import ModelChangedError
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process

every_other = functools.partial(serverless, interval=EverySteps(2))


class Reverses(pl.Callback):
    """Changes the list that Lightning goes through just then: some are called twice, others not at all."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.callbacks.reverse()  # type: ignore[attr-defined]


@pytest.mark.parametrize("others", [0, 1])
def test_changing_the_callbacks_at_the_start_costs_no_snapshot(tmp_path: Path, others: int) -> None:
    """None but the last was taken, without a word, and no notice heard."""

    def fit(root: Path, *stop: pl.Callback) -> tuple[Net, SpotCheckpoint]:
        new_process()
        pl.seed_everything(1, verbose=False)
        callback, net = every_other(root / "run"), Net()
        trainer(Reverses(), *[pl.Callback() for _ in range(others)], *stop, callback).fit(net, data(12))
        return net, callback

    whole, _ = fit(tmp_path / "whole")
    with pytest.raises(Stop):
        fit(tmp_path / "broken", StopAt(9))
    again, callback = fit(tmp_path / "broken")
    assert callback.resumed_from.step == 8
    assert callback.goodput.compute() > 0.0
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


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


@pytest.mark.parametrize(
    ("groups", "optimizers", "said"),
    [
        (3, 1, r"\b2, 2, 2\b.*\b6\b"),
        (1, 2, r"\b6; 6\b.*\b6\b"),
    ],
)
def test_replacing_an_optimizer_in_training_is_one_clear_error(
    tmp_path: Path, groups: int, optimizers: int, said: str
) -> None:
    """Torch's own named no snapshot and no way on; that one of two was left out was not said at all."""
    run = tmp_path / "run"
    with pytest.raises(Stop):
        trainer(Replaces(groups, optimizers), StopAt(9), every_other(run)).fit(Net(), data(12))
    new_process()
    with pytest.raises(ModelChangedError, match=said):
        trainer(every_other(run)).fit(Net(), data(12))
    trainer(every_other(run, resume=False)).fit(Net(), data(12))


class Refuses(Net):
    """Ends a resume itself."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise ZeroDivisionError


def test_nothing_is_left_of_a_resume_that_a_hook_has_ended(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        trainer(StopAt(9), every_other(tmp_path / "run")).fit(Net(), data(12))
    new_process()
    again = trainer(every_other(tmp_path / "run"))
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
    run = tmp_path / "run"
    with pytest.raises(Stop):
        trainer(StopAt(9), every_other(run)).fit(Regroups(), data(12))
    new_process()
    monkeypatch.setattr(Regroups, "version", 2)
    callback = every_other(run)
    again = trainer(callback)
    again.fit(Regroups(), data(12))
    assert callback.resumed_from.step == 8
    state = again.optimizers[0].state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 4]
    assert {int(each["step"]) for each in state["state"].values()} == {again.global_step}
