"""Training in shards (FSDP2): exact to the bit on as many ranks, weights and optimizers as they were on any number."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_spot.errors import SettingsError
from lightning_spot.session.preflight import takes_part
from lightning_spot.session.selection import load_shards
from lightning_spot.sharded.reader import read_folder, write_plain
from lightning_spot.state.compare import differences
from lightning_spot.state.compare import main as compare_files
from tests.support.exact_cases import loader
from tests.support.exact_sharded import Sharded, train, train_ranks, train_with, undisturbed_and_stopped
from tests.support.program import Outcome, launch, run
from tests.support.trainer import trainer
from tests.support.waiting import new_process

Twin = Callable[..., Outcome]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process becomes a rank, and is none afterwards."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


class Weights(pl.Callback):
    """Notes the weights and states of the first optimizer when training begins."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.step = trainer.global_step
        self.seen = {name: full(value).clone() for name, value in module.state_dict().items()}
        self.states = [
            {key: full(value).clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in trainer.optimizers[0].state.values()
        ]
        self.never = [dict(optimizer.state) for optimizer in trainer.optimizers[2:]]


def without_what_came_later(done: Outcome, root: Path, step: int) -> Outcome:
    """A copy of a run as it was after a step."""
    later = {manifest.name for manifest in done.snapshots if manifest.step > step or manifest.complete}
    shutil.copytree(done.root / "run", root / "run", ignore=lambda _, names: later.intersection(names))
    return Outcome(root)


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.usefixtures("one_rank")
def test_others_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a directory that the user names is gone on from exactly, with each rank's own state."""

    def stepped(root: str, seed: int, **more: Any) -> Outcome:
        train_with(tmp_path / root, Stepped, ModelParallelStrategy(1, 1), seed=seed, ranks=1, **more)
        return Outcome(tmp_path / root)

    done = stepped("whole", 11)
    # A drill compares two of them.
    last, *_, first = (str(done.root / "run" / manifest.name) for manifest in done.snapshots)
    for other, is_equal in ((last, True), (first, False)):
        capsys.readouterr()
        assert compare_files([last, other]) == 0
        kinds = {path.partition(".")[0] for path, _ in json.loads(capsys.readouterr().out)["different"]}
        assert is_equal == (not kinds)
        assert is_equal or {"state_dict", "optimizer_0", "lightning_spot"} <= kinds
    # Lightning alone reads the same directory.
    alone, saved = Weights(), done.final()
    small(ModelParallelStrategy(1, 1), alone).fit(Stepped(), loader(), ckpt_path=last)
    assert list(differences(saved["state_dict"], alone.seen)) == []
    # So does a single device, once it is one plain file.
    write_plain(Path(last), tmp_path / "plain.ckpt")
    on_one_device = Weights()
    small("auto", on_one_device).fit(Plain(), loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert list(differences(saved["state_dict"], on_one_device.seen)) == []
    assert on_one_device.states == [] or len(on_one_device.states) == 2
    image, manifest = read_folder(Path(last))
    with pytest.raises(SettingsError, match="SingleDeviceStrategy"):
        load_shards(small("auto"), image, manifest, trusts=False)
    named = done.root / "run" / done.snapshots[2].name
    new_process()
    found = stepped("named", 99, ckpt_path=named).final()
    for key in ("state_dict", "global_step"):
        assert list(differences(saved[key], found[key])) == []
    (named / "rank-0000.pt").unlink()
    with pytest.raises(SettingsError, match=named.name):
        stepped("torn", 99, ckpt_path=named)


class Stepped(Sharded):
    """The same without the optimizer that never steps: Lightning looks for a state of each."""

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        return optimizers[:2], schedulers


class Plain(Sharded):
    def configure_model(self) -> None:
        pass


def small(strategy: Any, *callbacks: pl.Callback) -> pl.Trainer:
    limits: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 1, "limit_val_batches": 0}
    return trainer(*callbacks, devices=1, strategy=strategy, **limits)


def test_two_ranks_are_stopped_and_go_on_as_if_they_had_not_been(tmp_path: Path, warm_python: str) -> None:
    assert launch(warm_python, undisturbed_and_stopped, tmp_path, ranks=2).resumed
    whole, broken = Outcome(tmp_path / "whole"), Outcome(tmp_path / "broken")
    for manifest in whole.snapshots:
        assert manifest.world_size == 2
        names = {file.name for file in manifest.files}
        assert {"__0_0.distcp", "__1_0.distcp", "rank-0000.pt", "rank-0001.pt"} <= names
    broken.check_end(whole)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.soak
def test_any_number_of_ranks_goes_on_from_an_earlier_snapshot(tmp_path: Path, warm_python: str, twin: Twin) -> None:
    """As many as if they had not been stopped, one from the same weights and optimizers."""
    whole = twin(train_ranks)
    again = without_what_came_later(whole, tmp_path / "again", 5)
    run(warm_python, train_ranks, again.root, seed=99)
    assert again.resumed
    again.check_end(whole)
    one, start = without_what_came_later(whole, tmp_path / "one", 5), Weights()
    newest = one.snapshots[0]
    saved = one.content(newest)
    train(one.root, start, seed=99, ranks=1)
    assert start.step == newest.step
    assert start.never == [{}]  # it has never stepped, and does not for a snapshot
    assert list(differences(saved["state_dict"], start.seen)) == []
    assert list(differences(list(saved["optimizer_states"][0]["state"].values()), start.states)) == []


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_are_not_supported_say_what_to_use(kind: type, state_dict_type: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = kind
    trainer.strategy._state_dict_type = state_dict_type  # type: ignore[attr-defined] # FSDPStrategy has it
    with pytest.raises(SettingsError, match=rf"{kind.__name__} .*ModelParallelStrategy"):
        takes_part(trainer, "fit")
