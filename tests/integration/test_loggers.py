"""A killed and resumed run leaves one log, with the rows of an undisturbed one."""

from __future__ import annotations

import csv
import io
import shutil
import uuid
import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_spot import EverySteps
from lightning_spot.state.compare import differences
from tests.integration.test_exact import rows
from tests.support import exact_cases
from tests.support.exact_cases import Augmented, Model, loader
from tests.support.said import said
from tests.support.snapshots import serverless
from tests.support.trainer import Stop, StopAfter, trainer
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G28")


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of 16 batches, two validations in each."""
    monkeypatch.setattr(exact_cases, "SAMPLES", 64)


def fit(
    root: Path, logger: Any, *callbacks: pl.Callback, seed: int, ckpt_path: str | None = None, **more: Any
) -> pl.Trainer:
    spot = serverless(root / "run", interval=EverySteps(5))
    pl.seed_everything(seed, verbose=False)
    made = trainer(*callbacks, spot, logger=logger, log_every_n_steps=1, val_check_interval=7, **more)
    made.fit(Model(), loader(), DataLoader(Augmented(), 16), ckpt_path=ckpt_path)
    return made


VERSIONS = {"numbered": None, "fixed": 0, "named": "mine"}
STOPS = {"epoch-0": StopAfter(13), "validation": StopAfter(2, in_validation=True), "epoch-1": StopAfter(22)}
QUICK = {("numbered", "epoch-0", 1), ("fixed", "validation", 1), ("named", "epoch-1", 1), ("numbered", "epoch-1", 2)}


@pytest.mark.parametrize(
    ("version", "stop", "accumulate"),
    [
        pytest.param(
            VERSIONS[version],
            STOPS[stop],
            accumulate,
            id=f"{version}-{stop}-{accumulate}",
            marks=[] if (version, stop, accumulate) in QUICK else pytest.mark.soak,
        )
        for version in VERSIONS
        for stop in STOPS
        for accumulate in (1, 2)
    ],
)
def test_csv(tmp_path: Path, version: int | str | None, stop: StopAfter, accumulate: int) -> None:
    def logger(name: str) -> CSVLogger:
        return CSVLogger(str(tmp_path), name, version, flush_logs_every_n_steps=7)

    with pytest.raises(Stop):
        fit(tmp_path / "b", logger("logs"), StopAfter(stop.left, in_validation=stop.in_validation), seed=1)
    fit(tmp_path / "b", logger("logs"), seed=1, accumulate_grad_batches=accumulate)
    (folder,) = (tmp_path / "logs").iterdir()
    if accumulate == 1:
        fit(tmp_path / "a", logger("twin"), seed=1)
        (twin,) = (tmp_path / "twin").iterdir()
        assert rows(folder) == rows(twin)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert len(rows(folder)) == len({tuple(row.items()) for row in rows(folder)})


def test_no_row_is_lost_in_a_kill_while_a_column_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first validation does: Lightning alone empties the file for that, and its rows are in the process only."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    class Kills(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                logger.log_metrics({"another": 1.0}, 7)
                with monkeypatch.context() as patch:
                    patch.setattr(csv.DictWriter, "writeheader", killed)
                    with pytest.raises(KeyboardInterrupt):
                        logger.save()
                left.extend(rows(Path(logger.log_dir)))

    logger, left = CSVLogger(str(tmp_path), "logs"), list[dict[str, str]]()
    fit(tmp_path / "b", logger, Kills(), seed=1)
    assert [row["step"] for row in left] == [str(step) for step in range(6)]
    assert "1.0" in [row["another"] for row in rows(Path(logger.log_dir))]
    assert "save" not in vars(logger.experiment), "something of ours stays behind"


@pytest.mark.parametrize("by_another", [False, True])
def test_rows_of_a_second_fit_follow_those_of_the_first(tmp_path: Path, by_another: bool) -> None:
    """Of a trainer's two fits in one log, the resume of the first took out what the second had logged."""

    def fit_twice(root: Path, *stop: pl.Callback) -> list[dict[str, str]]:
        new_process()
        pl.seed_everything(1, verbose=False)
        logger = CSVLogger(str(root), "logs", flush_logs_every_n_steps=1)
        more: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
        spot = serverless(root / "run", interval=EverySteps(5))
        run, model = trainer(spot, *stop, **more, max_epochs=1), Model()
        run.fit(model, loader())
        if by_another:
            more["logger"] = CSVLogger(str(root), "logs", logger.version, flush_logs_every_n_steps=1)
            run = trainer(spot, *stop, **more, max_epochs=2)
        run.fit_loop.max_epochs = 2
        run.fit(model, loader())
        (folder,) = (root / "logs").iterdir()
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        return rows(folder)

    whole = fit_twice(tmp_path / "whole")
    with pytest.raises(Stop):
        fit_twice(tmp_path / "broken", StopAfter(16 + 13))
    assert fit_twice(tmp_path / "broken") == whole


def test_checkpoints_below_the_logger_stay_where_they_were(tmp_path: Path) -> None:
    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val_loss", save_top_k=1)

    twin = fit(tmp_path / "a", CSVLogger(str(tmp_path), "twin"), checkpoint(), seed=1)
    with pytest.raises(Stop):
        fit(tmp_path / "b", CSVLogger(str(tmp_path), "logs"), checkpoint(), StopAfter(24), seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Experiment logs directory")  # it says that these logs are deleted
        made = fit(tmp_path / "b", CSVLogger(str(tmp_path), "logs"), checkpoint(), seed=7)
    assert list((tmp_path / "logs").iterdir()) == [tmp_path / "logs" / "version_0"]
    best, expected = made.checkpoint_callback.best_model_path, twin.checkpoint_callback.best_model_path
    assert best.startswith(str(tmp_path / "logs" / "version_0"))
    assert list(differences(expected, best)) == []


def test_another_version_that_the_user_names_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        fit(tmp_path, CSVLogger(str(tmp_path), "logs", "one"), StopAfter(13), seed=1)
    before = rows(tmp_path / "logs" / "one")
    fit(tmp_path, CSVLogger(str(tmp_path), "logs", "two"), seed=1)
    assert rows(tmp_path / "logs" / "one") == before
    assert rows(tmp_path / "logs" / "two")[0]["step"] == "10"


@pytest.mark.parametrize("how", ["copied", "ckpt_path"])
def test_the_log_of_a_run_stays_when_another_is_made_from_it(tmp_path: Path, how: str) -> None:
    def logger() -> CSVLogger:
        return CSVLogger(str(tmp_path), "logs")

    with pytest.raises(Stop):
        fit(tmp_path / "a", logger(), StopAfter(22), seed=1)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (file,) = (tmp_path / "copy" / "run").glob("step-000000020-*/model.ckpt")
    fit(tmp_path / "a", logger(), seed=1)
    first, second = tmp_path / "logs" / "version_0", tmp_path / "logs" / "version_1"
    whole = (first / "metrics.csv").read_bytes()

    if how == "copied":
        fit(tmp_path / "copy", logger(), seed=1)
    else:
        fit(tmp_path / "b", logger(), seed=1, ckpt_path=str(file))
    assert (first / "metrics.csv").read_bytes() == whole
    assert rows(second) == rows(first)[-len(rows(second)) :]
    assert rows(second)[0]["step"] == "20"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [first.name, second.name]


class Events:
    """Stands for TensorBoard's writer: keeps what it is told."""

    def __init__(self, log_dir: str, purge_step: int | None = None, **_: Any) -> None:
        self.file = Path(log_dir) / f"events.out.tfevents.{purge_step}"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()
        self.scalars: list[tuple[str, int]] = []

    def add_scalar(self, name: str, _value: float, step: int) -> None:
        self.scalars.append((name, step))
        self.file.write_text("\n".join(str(step) for _, step in self.scalars))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard itself is not among the test's needs; it is told to forget from the step on that comes again."""
    monkeypatch.setattr("lightning.fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", True)

    class Logger(TensorBoardLogger):
        @property
        def experiment(self) -> Any:
            if self._experiment is None:
                self._experiment = Events(self.log_dir, **self._kwargs)  # type: ignore[assignment]
            return self._experiment

    with pytest.raises(Stop):
        fit(tmp_path, Logger(str(tmp_path), "logs"), StopAfter(13), seed=1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy" / "run")
    fit(tmp_path, Logger(str(tmp_path), "logs"), seed=1)
    (folder,) = (tmp_path / "logs").iterdir()
    assert folder.name == "version_0"
    steps = [int(step) for step in (folder / "events.out.tfevents.10").read_text().split()]
    assert min(steps) == 10

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    fit(tmp_path / "copy", Logger(str(tmp_path), "logs"), seed=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert folder.with_name("version_1").is_dir()


@pytest.mark.parametrize("version", [None, "mine"])
def test_a_csv_log_at_a_url_keeps_the_rows_of_earlier_attempts(
    tmp_path: Path, version: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """They were deleted: the URL was opened as a local path, where there is no file, and Lightning began anew."""
    url = f"memory://{tmp_path.name}-{uuid.uuid4().hex}"
    with pytest.raises(Stop):
        fit(tmp_path, CSVLogger(url, "logs", version), StopAfter(13), seed=1)
    files = fsspec.filesystem("memory")
    before = {path: files.cat_file(path) for path in files.find(url)}
    assert any(path.endswith("metrics.csv") for path in before)
    resumed = fit(tmp_path, CSVLogger(url, "logs", version), seed=1)
    after = {path: files.cat_file(path) for path in files.find(url)}
    if version is None:  # with a fixed version, Lightning alone deletes the former file
        assert {path: after[path] for path in before} == before
    assert len(after) > len(before) or version is not None
    first = next(csv.DictReader(io.StringIO(files.cat_file(f"{resumed.logger.log_dir}/metrics.csv").decode())))
    assert first["step"] == "10"
    assert len(said(caplog, "log-not-continued")) == 1


def test_others_are_told_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WandbLikeLogger(DummyLogger):
        runs = 0

        def __init__(self) -> None:
            super().__init__()
            type(self).runs += 1

        @property
        def name(self) -> str:
            return "project"

        @property
        def version(self) -> str:
            return f"run-{self.runs}"

    with pytest.raises(Stop):
        fit(tmp_path, WandbLikeLogger(), StopAfter(13), seed=1)
    fit(tmp_path, WandbLikeLogger(), seed=1)
    (facts,) = said(caplog, "log-not-continued")
    assert (facts["now"], facts["before"]) == ("run-2", "run-1")
    assert "WANDB_RUN_ID" in facts["hint"]
