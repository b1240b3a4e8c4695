"""What fails in our functions on the thread that trains costs a snapshot, and not the training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture import unexpected
from lightning_spot.capture.unexpected import UnexpectedFailures
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.store.local import LocalStore
from tests.support.program import run
from tests.support.said import said
from tests.support.strike import Strike
from tests.support.trainer import Net, data, trainer
from tests.support.training import longest_fit_s, train
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G24")

BATCHES = 14


@pytest.fixture(autouse=True)
def _no_profile() -> Iterator[None]:
    yield
    sys.setprofile(None)


def fit(root: Path, *callbacks: pl.Callback, **settings: Any) -> tuple[Net, SpotCheckpoint]:
    pl.seed_everything(1, verbose=False)
    spot = SpotCheckpoint(str(root), local_server=False, interval=EverySteps(1), notices=None, **settings)
    net = Net()
    trainer(*callbacks, spot, max_epochs=1, limit_val_batches=2).fit(net, data(BATCHES), data(2))
    return net, spot


def is_alike(net: Net, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in fit(tmp_path_factory.mktemp("twin"))[0].state_dict().items()}


WHERE = [
    "capture/writer:SnapshotWriter.begin",
    "capture/writer:SnapshotWriter._copy",
    "capture/writer:SnapshotWriter.copied",
    "capture/slot_pool:SlotPool.take",
    "state/dump:Dump.complete",
    "state/fit_state:FitState.capture",
    "state/module_state:ModuleState.capture",
    "capture/schedule:GradientWatch.keep",
    "session/snapshotter:Pacing._learn",
    "session/coordinator:Coordinator.warm",
    "snapshot/layout:_tail",
    "snapshot/layout:lay_out",
    "interval/policy:EverySteps.due",
    "capture/copier:Copier.start",
    "capture/batch:CopyJob.validate",
    "capture/batch:CopyJob.wait_cpu",
    "capture/schedule:Profiler.reached",
    "goodput/records:Journal.note",
]


@pytest.mark.parametrize("where", WHERE)
def test_an_error_of_ours_ends_no_training_and_harms_no_snapshot(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture, where: str
) -> None:
    step = 0 if where.endswith(".warm") else 5
    strike = Strike(where, MemoryError("none is left"), step=step)
    net, _ = fit(tmp_path / "run", strike, on_full="wait")
    assert not strike.left, "it was not called"
    assert is_alike(net, undisturbed)
    newest = LocalStore(tmp_path / "run").survey().manifests[0]
    assert (newest.step, newest.complete) == (BATCHES, True)
    saved = torch.load(tmp_path / "run" / newest.data_path, weights_only=True)
    assert is_alike(net, saved["state_dict"])
    lines = [record.getMessage() for record in caplog.records if "none is left" in record.getMessage()]
    # What was copied had ended in the background, perhaps: then nothing is lost.
    had_ended = where.endswith((".validate", ".wait_cpu"))
    assert len(lines) == 1 or (had_ended and not lines), lines
    assert saved["lightning_spot"]["ranks"][0]["hooked"] is not None, "a part was turned off for good"


class Settled(pl.Callback):
    """At step 5 waits until what was begun before is committed: else that would come between two failures."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            (own,) = [callback for callback in trainer.callbacks if isinstance(callback, SpotCheckpoint)]
            attempt = own.snapshots.snapshotter.writing.attempt
            attempt.writer.wait_all(30.0)


def test_repeated_failures_pause_all_snapshots_except_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = "capture/writer:SnapshotWriter.begin"
    strikes = [Strike(where, RuntimeError("no luck"), step=step) for step in (5, 6, 7, 8, 9)]
    _, spot = fit(tmp_path / "run", Settled(), *strikes, on_full="wait")
    assert [bool(strike.left) for strike in strikes] == [False, False, False, True, True]
    assert [str(facts["error"]) for facts in said(caplog, "no-snapshot")] == ["RuntimeError: no luck"]
    assert len(said(caplog, "snapshots-paused")) == 1
    assert spot.last_committed_step == BATCHES


def test_a_pause_grows_and_is_forgotten_when_one_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(unexpected.time, "monotonic", lambda: now_s)
    failures, first, second = UnexpectedFailures(), object(), object()
    assert [failures.add(first) for _ in range(3)] == [False, False, True]
    assert failures.are_too_many
    now_s = 60.0
    assert not failures.are_too_many
    assert failures.add(first)
    now_s = 179.0
    assert failures.are_too_many
    now_s = 180.0
    assert not failures.are_too_many
    assert not failures.add(second)
    assert not failures.are_too_many


class Users(pl.Callback):
    """A user's callback that fails when a checkpoint is saved."""

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise MemoryError("of the user")


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_user_code_ends_training_as_in_lightning(tmp_path: Path, strict: bool) -> None:
    with pytest.raises(MemoryError, match="of the user"):
        fit(tmp_path / "run", Users(), on_full="wait", on_error="raise" if strict else "warn")
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == 6
    _, spot = fit(tmp_path / "run")
    assert spot.resumed_from.step == 6


def test_where_it_is_wished_so_an_error_of_ours_is_raised(tmp_path: Path) -> None:
    with pytest.raises(SnapshotFailedError, check=FailureReason.UNEXPECTED.caused):
        fit(
            tmp_path / "run",
            Strike("capture/writer:SnapshotWriter.begin", MemoryError("none is left")),
            on_error="raise",
        )


SHARED = [
    (True, 0, "state/fit_state:FitState.capture"),
    (True, 0, "capture/writer:SnapshotWriter.begin"),
    (True, 1, "state/fit_state:FitState.dump"),
    (True, 1, "capture/writer:SnapshotWriter.begin"),
    (True, 1, "session/coordinator:Coordinator._content"),
    (False, 0, "state/fit_state:FitState.capture"),
    (False, 1, "state/fit_state:FitState.capture"),
]


@pytest.mark.parametrize(
    ("local_server", "rank", "where"),
    [
        (True, 1, "state/fit_state:FitState.capture"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in SHARED),
    ],
)
def test_other_ranks_learn_of_a_failure_and_wait_for_nothing(
    tmp_path: Path, warm_python: str, local_server: bool, rank: int, where: str
) -> None:
    step = 0 if where.endswith(".dump") else 6  # of the first one
    done = run(warm_python, train, tmp_path, strike=(rank, step, where), local_server=local_server)
    assert longest_fit_s(done.log) < 50.0  # what does not come is waited for, a minute
    assert "MemoryError: of a test" in done.log
    assert ("rank 1: " in done.log) is (rank == 1)
    done.check_states()
    assert [manifest.step for manifest in done.snapshots if manifest.complete] == [12]
    told = done.accounts(1)[0]  # not all of them come to a slow disk
    assert 1 <= told["skipped"] + told["aborted"] <= 3


class AtException(Strike):
    """Strikes when an exception has ended the training."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ArithmeticError("the program's own")

    def on_exception(self, *_: Any) -> None:
        sys.setprofile(self.strike)


AT_THE_END = [
    "capture/attempt:Attempt._bring",
    "capture/attempt:Attempt._flush",
    "capture/attempt:Attempt._where_newest_is",
    "session/snapshotter:Snapshotter.close",
    "session/coordinator:Coordinator.let_go",
]


@pytest.mark.parametrize("where", AT_THE_END)
@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_ours_at_the_end_loses_no_committed_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, strict: bool
) -> None:
    """What is in this process only is brought to the durable tier all the same, and the ring is let go."""
    strike, before = AtException(where, MemoryError("none is left"), step=12), threads()
    with pytest.raises((MemoryError, SnapshotFailedError) if strict else ArithmeticError):
        fit(
            tmp_path / "run", strike, min_upload_interval_s=60.0, on_full="wait", on_error="raise" if strict else "warn"
        )
    assert not strike.left, "it was not called"
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == 12
    assert len([record for record in caplog.records if "none is left" in record.getMessage()]) == 1 or strict
    assert threads() <= before


class AtTheEnd(Strike):
    """Strikes when training has come to its end."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Not yet."""

    def on_train_end(self, *_: Any) -> None:
        sys.setprofile(self.strike)


LAST = [
    "session/coordinator:Coordinator._decision",
    "session/snapshotter:Pacing.taken",
    "session/snapshotter:Snapshotter.close",
    "capture/attempt:Attempt._manifest",
]


@pytest.mark.parametrize("where", LAST)
def test_an_error_of_ours_in_the_last_snapshot_ends_no_training(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture, where: str
) -> None:
    strike = AtTheEnd(where, MemoryError("none is left"))
    net, _ = fit(tmp_path / "run", strike, on_full="wait")
    assert not strike.left, "it was not called"
    assert is_alike(net, undisturbed)
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == BATCHES
    (line,) = (record.getMessage() for record in caplog.records if "none is left" in record.getMessage())
    assert "run ends all the same" in line
    new_process()
    again, spot = fit(tmp_path / "run")
    assert spot.resumed_from.step == BATCHES
    assert is_alike(again, undisturbed)
    assert LocalStore(tmp_path / "run").survey().manifests[0].complete


class UsersAtTheEnd(pl.Callback):
    """A user's callback that fails when the last snapshot is saved, or is ended there."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error, self._has_ended = error, False

    def on_train_end(self, *_: Any) -> None:
        self._has_ended = True

    def on_save_checkpoint(self, *_: Any) -> None:
        if self._has_ended:
            raise self._error("of the user")


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_ends_training_in_its_last_snapshot_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException], on_error: str
) -> None:
    """An error that storage does not have the last snapshot took its place."""
    with pytest.raises((error, SystemExit)):
        fit(tmp_path / "run", UsersAtTheEnd(error), on_full="wait", on_error=on_error)
    assert not said(caplog, "end-not-durable")
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == BATCHES


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


URGENT = [
    (0, "session/session:_has_taken"),
    (1, "capture/schedule:Schedule.end"),
    (0, "capture/attempt:Attempt.plan"),
    (1, "session/coordinator:Coordinator._decision"),
]


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (1, "session/snapshotter:Snapshotter.newest_state"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in URGENT),
    ],
)
def test_at_a_notice_the_others_hear_of_an_error_and_all_leave(
    tmp_path: Path, warm_python: str, rank: int, where: str
) -> None:
    """Without a deadline, ranks would wait in the others' agreement for as long as a process group waits."""
    log = run(warm_python, train, tmp_path, strike=(rank, 6, where), notice=(1, 6), every=4, code=143).log
    assert longest_fit_s(log) < 50.0
    failed = "the urgent snapshot failed, all ranks leave, and the run goes on from the snapshot before"
    assert f"{failed}: MemoryError: of a test" in log
    assert (f"{failed}: rank 1: MemoryError: of a test" in log) is (rank == 1)
