"""Others at the start of a ``fit``: those that resume it from files of their own, and those that end a second start."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger

from lightning_spot import EverySteps
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


def begins(root: Path, callbacks: list[pl.Callback], stop: int, **more: Any) -> tuple[int, list[str]]:
    """The step from which training begins, and our warnings."""
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Stop):
            fits.fit(Net(), data(10), **more)
    said = [str(item.message) for item in caught]
    return min(probe.states), [text for text in said if text.startswith("lightning_spot") and ".ckpt" in text]


@pytest.mark.parametrize("kind", [of_slurm, of_an_exception, last_beside_that])
def test_the_newest_snapshot_wins_over_what_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: Path, kind: Callable[[Path], Any]
) -> None:
    """Each start went back to the same file, for ever, and nothing was said."""
    if kind is of_slurm:
        for name, value in SLURM.items():
            monkeypatch.setenv(name, value)
    path, callbacks = kind(tmp_path)
    path.parent.mkdir(exist_ok=True)
    shutil.copy(left, path)
    first, said = begins(tmp_path, callbacks, 8)
    assert first == 3
    assert sum(path.name in text and "begins with" in text for text in said) == 1
    shutil.copy(left, path)  # OnExceptionCheckpoint has written there meanwhile
    second, said = begins(tmp_path, callbacks, 12)
    assert second == 8
    assert sum(path.name in text and "is not used" in text for text in said) == 1


def test_a_named_checkpoint_wins_and_what_that_takes_away_is_said(tmp_path: Path, left: Path) -> None:
    """A program that looks for a checkpoint by itself passes the same one to each start."""
    for stop in (8, 12):
        first, said = begins(tmp_path, [], stop, ckpt_path=str(left))
        assert first == 3
        assert len([text for text in said if "Leave ckpt_path out" in text]) == (stop == 12)


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
def test_the_first_start_names_what_ends_the_second(tmp_path: Path) -> None:
    """Where its callback comes before ours, as in a program that adds ours behind."""
    said = r"config\.yaml is in .*fixed by then.*'overwrite': True"
    with pytest.warns(UserWarning, match=said), pytest.raises(Stop):
        start(tmp_path, StopAt(4), ours_first=False)
    with pytest.raises(RuntimeError, match=r"config\.yaml to NOT exist"):
        start(tmp_path, ours_first=False)


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_new_run_overwrites_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        start(tmp_path, StopAt(4))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"config\.yaml to NOT exist"):
        start(tmp_path)
