"""More than one training in one process: none is given another's weights, and each is resumed by the same program."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_spot import AutoResume, EverySteps, GoodputMonitor, RemoteSnapshot, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.errors import ModelChangedError
from lightning_spot.goodput.records import read_records
from lightning_spot.protocol.record import find_record
from lightning_spot.session.resume import other_hyperparameters
from lightning_spot.state.fit_state import FitState
from lightning_spot.store.local import LocalStore
from tests.support.said import informed, keys, said, said_about
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Stop, StopAt, data, equal, trainer
from tests.support.waiting import new_process, until

pytestmark = pytest.mark.guarantee("G7")


class TrialPruned(Exception):
    """As Optuna's."""


def spot(root: Path, **more: Any) -> SpotCheckpoint:
    return serverless(root / "run", **{"interval": EverySteps(2), **more})


def fold(root: Path, *callbacks: pl.Callback, start: float, **more: Any) -> tuple[SpotCheckpoint, Net]:
    """One training of a script that makes several."""
    callback, model = spot(root), Net()
    with torch.no_grad():
        model.net[0].bias.fill_(start)
    trainer(callback, *callbacks, max_epochs=1, **more).fit(model, data(6))
    return callback, model


class Wrapping(pl.Callback):
    """Another library, which wraps what we have replaced, and leaves that."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop: Any = trainer.fit_loop.epoch_loop
        loop.on_advance_end = partial(loop.on_advance_end)
        if not self.batches:
            FitState.of(trainer).listen(self)

    def before_validation(self, trainer: pl.Trainer) -> None:
        self.batches += 1

    after_batch = before_validation


def test_a_fit_that_is_over_is_told_of_no_batch_of_the_next_one(tmp_path: Path) -> None:
    """It took snapshots of the next one, with its own number, where another library had kept its way in."""
    wrapping = Wrapping()
    training = trainer(spot(tmp_path), wrapping, max_epochs=1)
    training.fit(Net(), data(6))
    assert (told := wrapping.batches) > 0
    training.fit_loop.max_epochs = 2
    training.fit(Net(), data(6))
    assert training.current_epoch == 2
    assert wrapping.batches == told


def test_folds_have_runs_of_their_own_and_each_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _, first = fold(tmp_path, start=0.0)
    with pytest.raises(Stop):
        fold(tmp_path, StopAt(5), start=1.0)
    assert informed(caplog)["run-of-its-own"]["url"] == str(tmp_path / "run" / "fit-2")
    new_process()  # the script is killed, and started again
    again, model = fold(tmp_path, start=0.0)
    assert again.resumed_from.complete
    assert torch.equal(model.net[0].bias, first.net[0].bias)
    second, _ = fold(tmp_path, start=1.0)
    assert (second.resumed_from.step, second.location.url) == (4, str(tmp_path / "run" / "fit-2"))
    third, _ = fold(tmp_path, start=2.0)
    assert third.resumed_from is None
    assert third.attempt == 1
    assert [LocalStore(path).survey().manifests[0].step for path in (third.location.url, tmp_path / "run")] == [6, 6]


def test_a_link_to_a_dirpath_is_the_same_place(tmp_path: Path) -> None:
    """Without a word, the second training was given the first one's weights."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _, first = fold(tmp_path / "real", start=0.0)
    callback, second = fold(tmp_path / "link", start=1.0)
    assert callback.resumed_from is None
    assert callback.location.name == "run-fit-2"
    assert not torch.equal(second.net[0].bias, first.net[0].bias)


def _fold_in_a_child(folder: Path, start: float) -> None:
    callback, _ = fold(folder, start=start)
    with open(folder / "names", "a") as file:
        print(callback.location.name, callback.resumed_from is None, file=file)


def test_processes_that_a_program_starts_per_fit_count_together(tmp_path: Path) -> None:
    """What one of them had trained, the next one did not know: the second fold had the weights of the first."""
    for start in (0.0, 1.0):
        process = multiprocessing.get_context("fork").Process(target=_fold_in_a_child, args=(tmp_path, start))
        process.start()
        process.join(100)
        assert process.exitcode == 0
    assert (tmp_path / "names").read_text().splitlines() == ["run True", "run-fit-2 True"]


class Tried(Net):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_restarted_sweep_finds_its_trials_by_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trial(rate: float, *callbacks: pl.Callback) -> SpotCheckpoint:
        callback = spot(tmp_path)
        trainer(callback, *callbacks, max_epochs=1).fit(Tried(rate), data(6))
        return callback

    with pytest.raises(TrialPruned):
        trial(0.1, StopAt(3, TrialPruned))
    trial(0.01)
    with pytest.raises(Stop):
        trial(0.001, StopAt(5))
    new_process()
    caplog.clear()
    again = [trial(0.1), trial(0.01), trial(0.001), trial(0.0001)]
    assert keys(caplog) <= {"resumes-failing"}
    assert [each.location.name for each in again] == ["run", "run-fit-2", "run-fit-3", "run-fit-4"]
    assert [each.resumed_from and each.resumed_from.step for each in again] == [2, 6, 4, None]


class Deeper(Net):
    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.more = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("width", [32, 48], ids=["names", "shapes too"])
def test_a_program_that_skips_a_training_gets_no_others_weights(tmp_path: Path, width: int) -> None:
    """The first ``fit`` of a process is the first run, whatever it trains."""
    fold(tmp_path, start=0.0)
    store = LocalStore(tmp_path / "run")
    before = {each.name: (store.root / each.data_path).read_bytes() for each in store.survey().manifests}
    new_process()
    model = Deeper(width)
    untouched = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelChangedError, match=r"fit-n.*dirpath") as error:
        trainer(spot(tmp_path), max_epochs=9).fit(model, data(6))
    assert error.value.missing == ["more.bias", "more.weight"]
    assert "more.bias" in str(error.value)
    assert [line for line in error.value.reshaped if "net.0.weight" in line] == (
        ["net.0.weight (32, 16)→(48, 16)"] if width == 48 else []
    )
    assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())
    assert {each.name: (store.root / each.data_path).read_bytes() for each in store.survey().manifests} == before


class Fold(pl.LightningDataModule):
    def __init__(self, fold: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return data(6)


def test_hyperparameters_that_are_new_or_gone_are_said() -> None:
    run: Any = SimpleNamespace(lightning_module=Tried(0.1), datamodule=None)
    assert other_hyperparameters(run, {"hyper_parameters": {"rate": 0.1}}) == []
    assert other_hyperparameters(run, {"hyper_parameters": {"depth": 2}}) == ["rate 0.1 (new)", "depth 2 (gone)"]
    assert other_hyperparameters(run, {}) == ["rate 0.1 (new)"]
    run.datamodule = Fold(2)
    saved = {"hyper_parameters": {"rate": 0.1}, "datamodule_hyper_parameters": {"fold": 1}}
    assert other_hyperparameters(run, saved) == ["fold 1→2"]


def test_one_trainer_and_callback_for_two_models(tmp_path: Path) -> None:
    callback = spot(tmp_path)
    run = trainer(callback, max_epochs=1)
    run.fit(Net(), data(6))
    run.fit_loop.max_epochs = 2
    other = Net()
    before = other.net[0].weight.detach().clone()
    seen: list[bool] = []
    look = pl.callbacks.LambdaCallback(
        on_train_start=lambda _, module: seen.append(torch.equal(module.net[0].weight, before))
    )
    run.callbacks.insert(0, look)  # type: ignore[attr-defined]
    run.fit(other, data(6))
    assert seen == [True]
    assert callback.location.name == "run-fit-2"


def test_a_pruned_trial_is_over_and_another_exception_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrialPruned):
        fold(tmp_path, StopAt(5, TrialPruned), start=0.0)
    with pytest.raises(Stop):
        fold(tmp_path, StopAt(5), start=0.0)
    callback, _ = fold(tmp_path, start=0.0)
    assert [facts["error"] for facts in said(caplog, "fit-continued")] == ["Stop"]
    assert callback.resumed_from is not None
    assert callback.location.name == "run-fit-2"


def test_the_server_of_a_pruned_trial_goes_with_it(tmp_path: Path) -> None:
    with pytest.raises(TrialPruned):
        trainer(spot(tmp_path, local_server=True), StopAt(5, TrialPruned)).fit(Net(), data(6))
    record = find_record(str(tmp_path / "run"))
    until(lambda: not record.running(), "its server to end")
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == 4


class Tuned(Net):
    """Has a learning rate to tune."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_finder_that_keeps_nothing_does_not_undo_a_resume(tmp_path: Path) -> None:
    first: list[int] = []

    def fit(*callbacks: pl.Callback) -> pl.Trainer:
        finder = LearningRateFinder(num_training_steps=3, update_attr=False)
        look = pl.callbacks.LambdaCallback(on_train_batch_start=lambda run, *_: first.append(run.global_step))
        run = trainer(finder, spot(tmp_path), look, *callbacks, max_epochs=1, default_root_dir=tmp_path)
        run.fit(Tuned(), data(6))
        return run

    with pytest.raises(Stop):
        fit(StopAt(5))
    first.clear()
    assert fit().global_step == 6
    assert first[0] == 4


def test_the_tuner_is_no_training_of_the_run(tmp_path: Path) -> None:
    def fit(*callbacks: pl.Callback) -> SpotCheckpoint:
        callback, model = spot(tmp_path), Tuned()
        run = trainer(callback, *callbacks, max_epochs=1, default_root_dir=tmp_path)
        Tuner(run).lr_find(model, data(6), num_training=3)
        assert callback.attempt == 0
        run.fit(model, data(6))
        return callback

    with pytest.raises(Stop):
        fit(StopAt(5))
    new_process()
    resumed = fit()
    assert resumed.attempt == 2
    assert resumed.resumed_from.step == 4


def test_a_second_fit_has_its_own_account_at_any_monitor_place(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    snapshots = RemoteSnapshot(run, local_server=False, interval=EverySteps(2))
    callbacks = [GoodputMonitor(log_every_s=None), AutoResume(run, local_server=False), snapshots]
    for place in ("run", "run/fit-2"):
        trainer(*callbacks, max_epochs=1).fit(Net(), data(4))
        assert [record.attempt for record in read_records(str(tmp_path / place))] == [1]
    assert read_records(run)[0].end == "complete"


class Remembers(Net):
    """Logs what a study asks for, and keeps what it predicted last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.predicted: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.cache = self.net(batch[0])
        self.predicted = [self.cache.clone()]
        return self.cache


class Freezes(Net):
    """What its first training has changed at it, the second one goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.net[0].bias.requires_grad_(False)
            self.scale = 0.5


@pytest.mark.parametrize("killed", [12, 15], ids=["before the second fit has a snapshot", "after that"])
def test_a_fit_after_a_complete_run_has_its_data_and_changes(tmp_path: Path, killed: int) -> None:
    """Without a word, the second fit trained what the first had frozen, when the program was started again.

    Lightning's loops took it for one that is resumed, and kept the order that the first had drawn.
    """

    def fit_twice(root: Path, seed: int, *callbacks: pl.Callback) -> dict[str, torch.Tensor]:
        new_process()
        pl.seed_everything(seed)
        run, model = trainer(spot(root), *callbacks, max_epochs=1), Freezes()
        shuffled = DataLoader(data(6).dataset, 4, shuffle=True)  # 12 batches
        run.fit(model, shuffled)
        run.fit_loop.max_epochs = 2
        run.fit(model, shuffled)
        return {**model.state_dict(), "scale": torch.tensor(model.scale)}

    whole = fit_twice(tmp_path / "whole", 1)
    with pytest.raises(Stop):
        fit_twice(tmp_path / "broken", 1, StopAt(killed))
    assert equal(whole, fit_twice(tmp_path / "broken", 2))


def test_a_fit_after_predictions_keeps_inference_mode_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(*callbacks: pl.Callback) -> Remembers:
        torch.manual_seed(1)
        model = Remembers()
        trainer(max_epochs=1).predict(model, data(1))
        assert model.cache.is_inference()
        trainer(spot(tmp_path), *callbacks, max_epochs=1).fit(model, data(6))
        assert not said(caplog, "part-off")
        return model

    with pytest.raises(Stop):
        fit(StopAt(5))
    new_process()
    resumed = fit()
    (kept,) = LocalStore(tmp_path / "run").survey().manifests[:1]
    state = torch.load(tmp_path / "run" / kept.data_path, weights_only=True)["lightning_spot"]["ranks"][0]
    assert torch.equal(state["buffers"]["cache"], resumed.cache)
    assert len(state["hooked"]["attributes"][""]["predicted"]) == 1


# -- copies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))])
def test_callback_and_trainer_can_be_copied_before_and_after_fit(tmp_path: Path, copied: Any) -> None:
    def copies(run: pl.Trainer, callback: SpotCheckpoint) -> None:
        assert isinstance(copied(callback), SpotCheckpoint)
        again = copied(run)
        (theirs,) = (item for item in again.callbacks if isinstance(item, SpotCheckpoint))
        assert theirs is not callback
        assert theirs.location == callback.location
        assert theirs.interval is not callback.interval

    callback = spot(tmp_path, local_server=True, notices="signal")
    run = trainer(callback, max_epochs=1, plugins=[SpotCheckpointIO(local_server=False)])
    copies(run, callback)
    copied(run).fit(Net(), data(4))
    new_process()
    run.fit(Net(), data(4))
    assert callback.resumed_from is not None
    copies(run, callback)


def test_callbacks_in_hyperparameters_do_not_stop_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(Net):
        def __init__(self, width: int, callbacks: list[Any]) -> None:
            super().__init__()
            self.save_hyperparameters()

    def fit(*callbacks: pl.Callback) -> SpotCheckpoint:
        callback = spot(tmp_path)
        held = [callback, pl.callbacks.Timer(), *callbacks]
        trainer(*held, max_epochs=1).fit(Keeps(3, held), data(6))
        return callback

    with pytest.raises(Stop):
        fit(StopAt(5))
    assert said_about(caplog, "hyperparameters-left-out") == ["callbacks"]
    resumed = fit().resumed_from
    assert resumed.step == 4
