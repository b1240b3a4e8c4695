"""A resume that fails at its first batch fails so at each start: that is said, and an older snapshot may be tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot import AutoResume, EverySteps, PreemptedError, RemoteSnapshot, SpotCheckpoint
from tests.support.said import said
from tests.support.snapshots import EachDurable, serverless
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process


class Dies(pl.Callback):
    """Ends a training with its first batch, as what was restored for half does."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error if error is not None else AssertionError()
        self.step = -1

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step
        raise self.error


def spot(run: Path, **more: Any) -> SpotCheckpoint:
    return serverless(run, keep=3, min_upload_interval_s=0.0, **more)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Interrupted after step 9: snapshots of steps 3, 6 and 9."""
    new_process()
    with pytest.raises(Stop):
        trainer(spot(tmp_path / "run"), StopAt(10), EachDurable(tmp_path / "run", 3)).fit(Net(), data())
    return tmp_path / "run"


def start(
    run: Path, dies: Dies, caplog: pytest.LogCaptureFixture, *callbacks: pl.Callback, **more: Any
) -> tuple[int, list[str]]:
    """Where a start that fails begins, and what it says of those before it."""
    new_process()
    fits = trainer(dies, *(callbacks or [spot(run, **more)]))
    caplog.clear()
    with pytest.raises(type(dies.error)):
        fits.fit(Net(), data())
    return dies.step, [str(facts["way_on"]) for facts in said(caplog, "resumes-failing")]


@pytest.mark.parametrize(("on_failure", "steps"), [("error", [9, 9, 9, 9]), ("older", [9, 9, 6, 6, 3, 3, 3])])
def test_each_start_after_one_that_failed_says_so(
    run: Path, on_failure: Any, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """All began there for ever, and each said that the same command goes on."""
    told = list[str]()
    for failed, step in enumerate(steps):
        at, ways_on = start(run, Dies(), caplog, on_resume_failure=on_failure)
        assert (at, len(ways_on)) == (step, bool(failed))
        told += ways_on
    assert "on_resume_failure='older'" in told[0] or on_failure == "older"
    assert "resume=False" in told[-1]


def test_a_snapshot_of_its_own_ends_that(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        start(run, Dies(), caplog, on_resume_failure="older")
    new_process()
    with pytest.raises(Stop):
        trainer(spot(run, on_resume_failure="older"), StopAt(13), EachDurable(run, 3)).fit(Net(), data())
    assert start(run, Dies(), caplog, on_resume_failure="older") == (12, [])


def test_only_starts_that_failed_are_counted(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A notice may come before the first snapshot, as often as machines are taken away."""
    for _ in range(3):
        assert start(run, Dies(PreemptedError("taken away", 143)), caplog, on_resume_failure="older") == (9, [])


def test_parts_alone_count_them_without_records(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def parts() -> list[pl.Callback]:
        more: dict[str, Any] = {"local_server": False}
        snapshots = RemoteSnapshot(str(run), interval=EverySteps(3), **more)
        return [AutoResume(str(run), on_resume_failure="older", **more), snapshots]

    assert [start(run, Dies(), caplog, *parts())[0] for _ in range(4)] == [9, 9, 6, 6]
