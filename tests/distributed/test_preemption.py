"""Notices in training: all ranks stop after one step, the state is safe, and the run ends as if undisturbed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_spot import EverySteps, PreemptedError, PreemptionGuard, SpotCheckpoint
from lightning_spot.capture.attempt import Attempt
from lightning_spot.errors import TierError
from lightning_spot.interval.deadline import plan_urgent
from lightning_spot.preemption.clouds import AwsSource
from lightning_spot.preemption.notice import Notice
from lightning_spot.session.ranks import StopAgreement
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.state.compare import differences
from lightning_spot.store.local import LocalStore
from tests.support.exact_cases import CASES, KillAt, Model, loader, train, train_case, train_ranks
from tests.support.metadata_server import MetadataServer
from tests.support.program import Outcome, run, start
from tests.support.said import said
from tests.support.trainer import At, Net, Stop, StopAt, data, trainer
from tests.support.waiting import lives, until

pytestmark = pytest.mark.guarantee("G26")

Twin = Callable[..., Outcome]
LATEST_S = 60.0  # of seconds, however slow the machine; who waits for a rank that has gone waits for minutes


class Program:
    """``train_ranks`` of the exact cases, which can be sent signals in a phase of training."""

    def __init__(self, python: str, root: Path, ranks: int, **arguments: Any) -> None:
        self.outcome, self.ranks = Outcome(root), ranks
        for diary in root.glob("diary-*"):
            diary.unlink()
        self.process = start(python, train_ranks, root, ranks=ranks, **arguments)

    def notes(self, rank: int) -> list[tuple[str, int]]:
        diary = self.outcome.root / f"diary-{rank}"
        lines = diary.read_text().splitlines() if diary.exists() else []
        return [(phase, int(number)) for phase, number in map(str.split, lines)]

    def wait_for(self, phase: str, step: int, rank: int = 0) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.outcome.log[-3000:]
            return any(name == phase and number >= step for name, number in self.notes(rank))

        until(reached, f"{phase} of step {step}", 150)

    def signal(self, rank: int) -> None:
        os.kill(self.noted(rank, "pid"), signal.SIGTERM)

    def noted(self, rank: int, phase: str) -> int:
        return next(number for name, number in self.notes(rank) if name == phase)

    def stopped_at(self) -> int:
        """The step of all ranks, once they have ended: the first one before the others, whose code launchers see."""
        try:
            code = self.process.wait(120)
        finally:
            self.process.kill()
        pids = [self.noted(rank, "pid") for rank in range(1, self.ranks)]
        until(lambda: not any(lives(pid) for pid in pids), f"the other ranks {pids} to end")
        assert code == 143, self.outcome.log[-3000:]
        (step,) = {self.noted(rank, "stopped-by-PreemptedError") for rank in range(self.ranks)}
        return step


EVERYDAY = [
    (2, "forward", "last", 0.0),
    (2, "optimizer", "all", 0.07),
    (2, "validation", "first", 0.0),
    (2, "sanity-batch", "last", 0.0),
]
CELLS = itertools.product(
    (2, 4),
    ("forward", "backward", "optimizer", "validation", "sanity-batch"),
    (("first", 0.0), ("last", 0.0), ("all", 0.0), ("all", 0.07)),
)
EVERY_CELL = [(ranks, phase, *told) for ranks, phase, told in CELLS]


@pytest.mark.parametrize(
    ("ranks", "phase", "who", "gap_s"),
    [pytest.param(*cell, marks=[] if cell in EVERYDAY else pytest.mark.soak) for cell in EVERY_CELL],
)
def test_all_ranks_stop_at_one_step(
    warm_python: str, tmp_path: Path, twin: Twin, ranks: int, phase: str, who: str, gap_s: float
) -> None:
    program = Program(warm_python, tmp_path, ranks, pace_s=0.04)
    targets = {"first": [0], "last": [ranks - 1], "all": list(range(ranks))}[who]
    program.wait_for(phase, 0 if phase == "sanity-batch" else 14 // ranks, targets[0])  # in the middle of the run
    started = time.monotonic()
    for rank in targets:
        program.signal(rank)
        time.sleep(gap_s)
    step = program.stopped_at()
    assert time.monotonic() - started < LATEST_S
    held = program.outcome.snapshots
    assert held[0].step == step if held else step == 0  # all were in the sanity check still: nothing was trained
    run(warm_python, train_ranks, tmp_path, ranks=ranks, seed=5).check_end(twin(train_ranks, ranks=ranks))


def test_the_guard_alone_stops_both_ranks_if_the_second_is_told(warm_python: str, tmp_path: Path, twin: Twin) -> None:
    """It saves beside the ``ModelCheckpoint``, and ``fit(ckpt_path="last")`` goes on from there."""
    program = Program(warm_python, tmp_path, 2, pace_s=0.04, guard=True)
    program.wait_for("forward", 7, 1)
    program.signal(1)
    step = program.stopped_at()
    assert torch.load(tmp_path / "best" / "last-preempted.ckpt", weights_only=True)["global_step"] == step
    run(warm_python, train_ranks, tmp_path, guard=True, seed=5)
    ends = torch.load(tmp_path / "final.ckpt", weights_only=True), twin(train_ranks, ranks=2).final()
    for part in ("state_dict", "optimizer_states", "global_step"):
        assert list(differences(ends[0][part], ends[1][part])) == []


@pytest.mark.slow
def test_four_ranks_add_up_in_the_order_they_did(warm_python: str, tmp_path: Path, twin: Twin) -> None:
    """From three ranks on, rounding depends on DDP's buckets, which it rebuilds after its first step."""
    run(warm_python, train_ranks, tmp_path, ranks=4, kill_at=8, code=None)
    done = run(warm_python, train_ranks, tmp_path, ranks=4, seed=5)
    assert done.resumed
    done.check_end(twin(train_ranks, ranks=4))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quarter", range(4))
def test_a_hundred_mixed_kills(warm_python: str, tmp_path: Path, seed: int, twin: Twin, quarter: int) -> None:
    """SIGKILL, SIGTERM and a notice file at random places, over the grid of cases: all end as undisturbed."""
    chance = random.Random(seed)
    kills, number = 0, quarter * len(CASES) // 4
    while kills < 25:
        case = list(CASES)[number % len(CASES)]
        root = tmp_path / f"{number}-{case}"
        number += 1
        kills += _train_with_kills(warm_python, case, root, chance)
        Outcome(root).check_end(twin(train_case, case=case))


def _train_with_kills(python: str, case: str, root: Path, chance: random.Random) -> int:
    kills = 0
    for attempt in range(12):
        notice = root / "notice"
        process = start(python, train_case, root, case=case, seed=100 + attempt, pace_s=0.02, notice=notice)
        if attempt < 3 and _kill_somewhere(process, notice, chance):
            kills += 1
        code = process.wait(120)
        notice.unlink(missing_ok=True)
        if code == 0:
            return kills
        # -15: the signal came before training was set up, or after its end.
        assert code in (143, -9, -15), Outcome(root).log[-3000:]
    raise AssertionError("twelve attempts were not enough")


def _kill_somewhere(process: subprocess.Popen[bytes], notice: Path, chance: random.Random) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(chance.uniform(0.2, 5.0))
        return False
    how = chance.choice(["SIGKILL", "SIGTERM", "notice"])
    if how == "notice":
        notice.write_text("20")
    else:
        process.send_signal(signal.Signals[how])
    return True


# -- in this process --------------------------------------------------------------------------------------------------


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def handling_term(handler: Any) -> Iterator[None]:
    former = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def snapshots(root: Path) -> list[Manifest]:
    return Outcome(root).snapshots


def stopping(root: Path, **more: Any) -> SpotCheckpoint:
    settings = {"interval": EverySteps(1000), "on_full": "wait", "notices": "signal", **more}
    return SpotCheckpoint(str(root / "run"), **settings)


def test_an_urgent_snapshot_and_the_exit_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spot = stopping(tmp_path, grace_period_s=60.0)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        trainer(At(7, term), spot, logger=CSVLogger(str(tmp_path))).fit(Net(), data())
    assert isinstance(stopped.value, PreemptedError)
    assert stopped.value.code == 143
    assert snapshots(tmp_path)[0].step == 8
    assert spot.notice is not None
    assert re.search(r"step 8 \(.*\) is safe in \d+\.\d s of (5\d|60) s", caplog.text)
    assert signal.getsignal(signal.SIGTERM) == handler
    done = stopping(tmp_path)
    trainer(done).fit(Net(), data())
    assert done.resumed_from.step == 8


@pytest.mark.parametrize(("more", "least_s", "most_s"), [({}, 900, 1000), ({"grace_period_s": 60.0}, 0, 60)])
def test_ranks_wait_as_long_as_the_first_one_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, float], least_s: float, most_s: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(StopAgreement, "wait_for_first", lambda _, wait_s: waits.append(wait_s))
    spot = stopping(tmp_path, local_server=False, upload_timeout_s=1000.0, **more)
    with pytest.raises(PreemptedError):
        trainer(At(1, term), spot).fit(Net(), data())
    assert least_s < waits[0] <= most_s


def test_an_end_that_fails_leaves_no_handler_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Attempt.finish

    def fails(attempt: Attempt, wait_s: float, *, complete: bool) -> None:
        finish(attempt, wait_s, complete=complete)
        raise TierError("the disk is gone", tier="here")

    monkeypatch.setattr(Attempt, "finish", fails)
    spot = stopping(tmp_path, local_server=False, on_error="raise")
    with handling_term(signal.SIG_DFL):  # Lightning's own stays where a callback raises
        with pytest.raises(TierError, match="the disk is gone") as raised:
            trainer(StopAt(1), spot).fit(Net(), data())
        left = signal.getsignal(signal.SIGTERM)
    assert isinstance(raised.value.__context__, Stop)
    assert not getattr(left, "__module__", "").startswith("lightning_spot")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spot-notice")]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_late_signal_waits_until_the_last_snapshot_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    """Lightning puts back the handlers that were there before training, and only then asks for the end of ``fit``."""
    finish, put, there, may_be_safe = Attempt.finish, LocalStore.put, [], threading.Event()
    if signals == 1:
        may_be_safe.set()

    def put_then(*arguments: Any, **more: Any) -> Any:
        assert may_be_safe.wait(120)
        return put(*arguments, **more)

    def passed_on(*_: Any) -> None:
        there.append([manifest.complete for manifest in snapshots(tmp_path)])
        may_be_safe.set()

    def slow(attempt: Attempt, wait_s: float, *, complete: bool) -> bool | None:
        for _ in range(signals):
            term()
        return finish(attempt, wait_s, complete=complete)

    monkeypatch.setattr(LocalStore, "put", put_then)
    monkeypatch.setattr(Attempt, "finish", slow)
    with handling_term(passed_on):
        trainer(stopping(tmp_path, local_server=False), max_epochs=1).fit(Net(), data(3))
        assert signal.getsignal(signal.SIGTERM) == passed_on
    assert there == [[True]] if signals == 1 else there == [[]]  # of two, the second does not wait


@pytest.mark.parametrize("told", [True, False])
def test_a_signal_at_the_end_is_passed_on_after_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Launchers end all ranks once one has ended, and the first one was still bringing the snapshot to safety.

    A signal behind the last place to stop at was noted, and nobody asked for it: it ended never.
    """
    came: list[Any] = []
    monkeypatch.setattr(StopAgreement, "wait_for_first", lambda *_: came.append("the first rank is done"))
    at_end = LambdaCallback(on_train_end=lambda *_: term() if told else None)
    with handling_term(lambda *_: came.append([manifest.complete for manifest in snapshots(tmp_path)])):
        trainer(at_end, stopping(tmp_path, local_server=False), max_epochs=1).fit(Net(), data(3))
    assert came == (["the first rank is done", [True]] if told else [])


def test_a_second_signal_cuts_the_waiting_short(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(SystemExit):
        trainer(At(7, lambda: (term(), term())), stopping(tmp_path)).fit(Net(), data())
    assert time.monotonic() - started < LATEST_S
    manifest = snapshots(tmp_path)[0]
    manifest.verify((tmp_path / "run" / manifest.data_path).read_bytes(), "here")


def test_a_deadline_that_is_past_leaves_the_last_snapshot(tmp_path: Path) -> None:
    late: list[int] = []
    spot = stopping(tmp_path, interval=EverySteps(3), notices=lambda: 0.0 if late else None)

    def wait() -> None:
        host = spot.snapshots.snapshotter.writing.attempt.writer.host
        until(lambda: host.safe_step() == 6, "step 6 to be safe")
        late.append(1)
        until(lambda: spot._guard._watcher.notice, "the notice")

    with pytest.raises(SystemExit):
        trainer(At(8, wait, "on_train_batch_start"), spot).fit(Net(), data())
    assert snapshots(tmp_path)[0].step == 6


@pytest.mark.parametrize("content", ["1767225600000", "inf", "nan"])
def test_a_number_that_is_no_time_left_costs_no_snapshot(tmp_path: Path, content: str) -> None:
    """A script may write when the machine ends, in milliseconds since 1970; no lock waits for so long."""
    path = tmp_path / "notice"
    spot = stopping(tmp_path, notices=f"file:{path}")

    def tell() -> None:
        path.write_text(content)
        until(lambda: spot._guard._watcher.notice, "the notice")

    with pytest.raises(PreemptedError):
        trainer(At(7, tell), spot).fit(Net(), data())
    assert snapshots(tmp_path)[0].step == 8
    assert spot.notice.grace_period_s is None


def test_should_stop_and_an_exception_at_the_same_moment(tmp_path: Path) -> None:
    def both() -> None:
        run.should_stop = True
        term()

    run = trainer(At(5, both, "on_train_batch_end"), stopping(tmp_path))
    with pytest.raises(SystemExit):
        run.fit(Net(), data())
    assert snapshots(tmp_path)[0].step == 5

    def broken(*_: Any) -> None:
        term()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(LambdaCallback(on_before_backward=broken), stopping(tmp_path / "b")).fit(Net(), data())


def test_in_mid_accumulation_nothing_is_lost(tmp_path: Path) -> None:
    """The urgent snapshot holds the gradients of the window that was cut."""

    def fit(root: Path, *callbacks: pl.Callback, seed: int = 11) -> Outcome:
        spot = stopping(root, local_server=False, keep=100)
        train(CASES["accumulation"], root, *callbacks, seed=seed, spot=spot, max_epochs=1)
        return Outcome(root)

    twin, root = fit(tmp_path / "twin"), tmp_path / "r"
    with pytest.raises(SystemExit):
        fit(root, KillAt(7, number=signal.SIGTERM))
    (manifest,) = snapshots(root)
    assert manifest.step == 1
    assert Outcome(root).content(manifest)["lightning_spot"]["ranks"][0]["gradients"]
    fit(root, seed=77).check_end(twin)


def guarded(*callbacks: pl.Callback, path: str | None = "last", seed: int = 1, **more: Any) -> pl.Trainer:
    """Train with a guard, but none of our snapshots, beside checkpoints of Lightning's, and go on from one."""
    pl.seed_everything(seed, verbose=False)
    made = trainer(*callbacks, PreemptionGuard("signal"), limit_train_batches=8, **more)
    made.fit(Model(), loader(), ckpt_path=path)
    return made


def test_a_folder_that_a_restart_cannot_find_is_named_early(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit):
        guarded(At(11, term), ModelCheckpoint(), logger=CSVLogger(str(tmp_path)))
    assert said(caplog, "last-not-found")
    (saved,) = tmp_path.rglob("last-preempted.ckpt")
    assert saved.is_relative_to(tmp_path / "lightning_logs" / "version_0")
    assert guarded(ModelCheckpoint(), logger=CSVLogger(str(tmp_path))).ckpt_path is None


def test_a_bucket_lightning_cannot_search_is_named_with_a_fix(s3: str, caplog: pytest.LogCaptureFixture) -> None:
    """``fit(ckpt_path="last")`` began at step 0, though the file was there."""
    saved = f"{s3}/best/last-preempted.ckpt"
    with pytest.raises(SystemExit):
        guarded(At(11, term), ModelCheckpoint(f"{s3}/best"))
    (facts,) = said(caplog, "last-not-found")
    assert saved in str(facts["instead"])
    assert guarded(ModelCheckpoint(f"{s3}/best")).ckpt_path is None  # if it finds it one day, the warning goes
    assert guarded(ModelCheckpoint(f"{s3}/best"), path=saved).ckpt_path == saved


def test_advice_raises_the_rate_and_does_not_stop(tmp_path: Path) -> None:
    advice = Notice(source="aws", kind="advice", text="EC2 recommends to rebalance", seen_s=0.0)
    spot = stopping(tmp_path, notices=lambda: advice)
    heard = At(0, lambda: until(lambda: spot._guard._watcher.advice, "the advice"), "on_train_batch_start")
    run = trainer(heard, spot)
    run.fit(Net(), data())
    assert spot.snapshots.snapshotter.pacing._rate.mtbf_s == 600.0
    assert run.global_step == 40


def test_a_local_dirpath_on_a_vm_of_a_cloud_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(MetadataServer()) as server:
        trainer(stopping(tmp_path, notices=AwsSource(server.url))).fit(Net(), data())
        (facts,) = said(caplog, "dirpath-local")
        assert (facts["about"], facts["cloud"]) == (str(tmp_path / "run"), "aws")
        caplog.clear()
        trainer(stopping(tmp_path / "other", notices="signal")).fit(Net(), data())  # no cloud is known
        monkeypatch.setattr("lightning_spot.session.session.local_file_system", lambda _: None)
        trainer(stopping(tmp_path / "shared", notices=AwsSource(server.url))).fit(Net(), data())
    assert not said(caplog, "dirpath-local")


def test_planning_against_a_deadline() -> None:
    fits = plan_urgent(10_000, 60.0, [100.0, 1000.0])
    assert fits.take
    assert fits.expected_s == 10.0
    assert not plan_urgent(10_000, 11.0, [1000.0]).take
    assert plan_urgent(10_000, None, [1.0]).take
    assert plan_urgent(10_000, 5.0, []).take
    assert not plan_urgent(10_000, 0.0, []).take
