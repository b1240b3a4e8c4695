"""Others at the start of a ``fit``: those that resume it from files of their own, and those that end a second start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger

from lightning_spot import EverySteps
from tests.support.said import said, said_about
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Probe, Stop, StopAt, data, trainer
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G6")

SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 3 that something else has left."""
    path = tmp_path_factory.mktemp("left") / "left.ckpt"
    earlier = trainer(max_steps=3)
    earlier.fit(Net(), data(10))
    earlier.save_checkpoint(path)
    return path


def of_slurm(root: Path) -> tuple[Path, list[pl.Callback]]:
    return root / "hpc_ckpt_2.ckpt", []


def of_an_exception(root: Path) -> tuple[Path, list[pl.Callback]]:
    return root / "on_exception.ckpt", [OnExceptionCheckpoint(root)]


def last_beside_that(root: Path) -> tuple[Path, list[pl.Callback]]:
    saves = ModelCheckpoint(root / "best", save_last=True, every_n_epochs=50)
    return root / "best" / "last.ckpt", [OnExceptionCheckpoint(root), saves]


def begins(root: Path, callbacks: list[pl.Callback], stop: int, **more: Any) -> int:
    """The step from which training begins."""
    new_process()
    probe = Probe()
    fits = trainer(
        *callbacks,
        probe,
        StopAt(stop),
        serverless(root / "run", interval=EverySteps(1)),
        devices=1,
        default_root_dir=root,
    )
    with pytest.raises(Stop):
        fits.fit(Net(), data(10), **more)
    return min(probe.states)


@pytest.mark.parametrize("kind", [of_slurm, of_an_exception, last_beside_that])
def test_the_newest_snapshot_wins_over_what_was_not_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: Path,
    kind: Callable[[Path], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each start went back to the same file, for ever, and nothing was said."""
    if kind is of_slurm:
        for name, value in SLURM.items():
            monkeypatch.setenv(name, value)
    path, callbacks = kind(tmp_path)
    path.parent.mkdir(exist_ok=True)
    shutil.copy(left, path)
    assert begins(tmp_path, callbacks, 8) == 3
    (found,) = said(caplog, "checkpoint-found")
    assert (Path(str(found["about"])).name, found["name"]) == (path.name, "")
    caplog.clear()
    shutil.copy(left, path)  # OnExceptionCheckpoint has written there meanwhile
    assert begins(tmp_path, callbacks, 12) == 8
    (found,) = said(caplog, "checkpoint-found")
    assert (Path(str(found["about"])).name, bool(found["name"])) == (path.name, True)


def test_a_named_checkpoint_wins_and_the_loss_is_logged(
    tmp_path: Path, left: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that looks for a checkpoint by itself passes the same one to each start."""
    for stop in (8, 12):
        assert begins(tmp_path, [], stop, ckpt_path=str(left)) == 3
        assert len(said(caplog, "older-checkpoint")) == (stop == 12)


def start(root: Path, *callbacks: pl.Callback, ours_first: bool = True) -> None:
    """A start of LightningCLI, which puts its own callback behind those that are configured."""
    new_process()
    parser = LightningArgumentParser()
    parser.add_argument("--seed", default=1)
    saves = SaveConfigCallback(parser, parser.parse_args([]))
    ours = serverless(root / "run", interval=EverySteps(1))
    logger = CSVLogger(root, name="logs", version="fixed")
    order = [ours, saves] if ours_first else [saves, ours]
    trainer(*callbacks, *order, logger=logger, max_epochs=1, log_every_n_steps=1).fit(Net(), data(10))


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_second_start_of_lightning_cli_goes_on(tmp_path: Path) -> None:
    """It ended, as each later one: the configuration was there."""
    with pytest.raises(Stop):
        start(tmp_path, StopAt(4))
    config = tmp_path / "logs" / "fixed" / "config.yaml"
    before = config.stat().st_mtime_ns
    start(tmp_path)
    assert config.stat().st_mtime_ns > before


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_the_first_start_names_what_ends_the_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where its callback comes before ours, as in a program that adds ours behind."""
    with pytest.raises(Stop):
        start(tmp_path, StopAt(4), ours_first=False)
    assert said_about(caplog, "config-in-the-way") == ["config.yaml"]
    with pytest.raises(RuntimeError, match=r"config\.yaml to NOT exist"):
        start(tmp_path, ours_first=False)


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_new_run_overwrites_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        start(tmp_path, StopAt(4))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"config\.yaml to NOT exist"):
        start(tmp_path)
