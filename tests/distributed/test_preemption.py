"""Notices in training: all ranks stop after one step, the state is safe, and the run ends as if undisturbed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_spot import EverySteps, PreemptedError, PreemptionGuard, RemoteSnapshot, SpotCheckpoint
from lightning_spot.capture.ending import Ending
from lightning_spot.errors import SettingsError, TierError
from lightning_spot.exact.compare import differences
from lightning_spot.fit.ranks import Meeting, Ranks
from lightning_spot.interval.deadline import plan_urgent
from lightning_spot.preemption.clouds import AwsSource
from lightning_spot.preemption.key_value import KeyValueServer
from lightning_spot.preemption.notice import Notice
from lightning_spot.tiers.local import LocalStore
from tests.support.exact_cases import CASES, Model, loader, train
from tests.support.metadata_server import MetadataServer
from tests.support.said import said
from tests.support.snapshots import read
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import lives, until

pytestmark = pytest.mark.guarantee("G26")

LATEST_S = 60.0  # of seconds, however slow the machine; who waits for a rank that has gone waits for minutes


class Program:
    """``tests.support.exact_ddp`` on some ranks, which can be sent signals in a phase of training."""

    def __init__(self, python: str, root: Path, *arguments: str, ranks: int = 2) -> None:
        self.root, self.ranks = root, ranks
        root.mkdir(exist_ok=True)
        for diary in root.glob("diary-*"):
            diary.unlink()
        command = [python, "-m", "tests.support.exact_ddp", str(root), "--ranks", str(ranks), *arguments]
        with open(root / "log", "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def lines(self, rank: int) -> list[str]:
        diary = self.root / f"diary-{rank}"
        return diary.read_text().splitlines() if diary.exists() else []

    def wait_for(self, phase: str, step: int, rank: int = 0) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, (self.root / "log").read_text()[-3000:]
            found = [line.split() for line in self.lines(rank)]
            return any(name == phase and int(number) >= step for name, number in found)

        until(reached, f"{phase} of step {step}", 150)

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        os.kill(self.pids(rank)[0], number)

    def pids(self, rank: int) -> list[int]:
        return [int(line.split()[1]) for line in self.lines(rank) if line.startswith("pid ")]

    def end(self) -> int:
        """Wait for all ranks: the first one leaves before the others, and is the one whose code launchers see."""
        try:
            code = self.process.wait(120)
        finally:
            self.process.kill()
        pids = [pid for rank in range(1, self.ranks) for pid in self.pids(rank)]
        until(lambda: not any(lives(pid) for pid in pids), f"the other ranks {pids} to end", 60)
        return code

    def stopped_at(self, rank: int) -> int:
        found = [re.fullmatch(r"stopped-by-PreemptedError (\d+)", line) for line in self.lines(rank)]
        return int(next(match for match in found if match)[1])


def final(root: Path) -> dict[str, Any]:
    manifest = LocalStore(root / "run").survey().manifests[0]
    assert manifest.complete, (root / "log").read_text()[-3000:]
    return read(root / "run", manifest)


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Any:
    """Final checkpoint of as many ranks that are left alone: trained once for all workers."""
    home = tmp_path_factory.getbasetemp()
    home = home.parent if hasattr(request.config, "workerinput") else home

    @functools.cache
    def of(ranks: int) -> dict[str, Any]:
        root = home / f"undisturbed-{ranks}"
        with open(f"{root}.lock", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not root.exists():
                assert Program(warm_python, root, ranks=ranks).end() == 0
        return final(root)

    return of


def check_cell(
    python: str, root: Path, undisturbed: Callable[..., Any], ranks: int, phase: str, who: str, gap_s: float
) -> None:
    program = Program(python, root, "--pace", "0.04", ranks=ranks)
    targets = {"first": [0], "last": [ranks - 1], "all": list(range(ranks))}[who]
    program.wait_for(phase, 0 if phase == "sanity-batch" else 14 // ranks, targets[0])  # in the middle of the run
    started = time.monotonic()
    for rank in targets:
        program.signal(rank)
        time.sleep(gap_s)
    assert program.end() == 143, (root / "log").read_text()[-3000:]
    assert time.monotonic() - started < LATEST_S
    (step,) = {program.stopped_at(rank) for rank in range(ranks)}
    held = LocalStore(root / "run").survey().manifests
    assert held[0].step == step if held else step == 0  # all were in the sanity check still: nothing was trained
    again = Program(python, root, "--seed", "5", ranks=ranks)
    assert again.end() == 0
    assert list(differences(undisturbed(ranks), final(root))) == []


@pytest.mark.parametrize(
    ("phase", "who", "gap_s"),
    [
        ("forward", "last", 0.0),
        ("optimizer", "all", 0.07),
        ("validation", "first", 0.0),
        ("sanity-batch", "last", 0.0),
    ],
)
def test_two_ranks_stop_at_one_step(
    warm_python: str, tmp_path: Path, undisturbed: Any, phase: str, who: str, gap_s: float
) -> None:
    check_cell(warm_python, tmp_path / "r", undisturbed, 2, phase, who, gap_s)


def test_the_guard_alone_stops_both_ranks_if_the_second_is_told(
    warm_python: str, tmp_path: Path, undisturbed: Any
) -> None:
    """It saves beside the ``ModelCheckpoint``, and ``fit(ckpt_path="last")`` goes on from there."""
    root = tmp_path / "r"
    program = Program(warm_python, root, "--guard", "--pace", "0.04")
    program.wait_for("forward", 7, 1)
    program.signal(1)
    assert program.end() == 143, (root / "log").read_text()[-3000:]
    step = program.stopped_at(0)
    assert program.stopped_at(1) == step
    assert torch.load(root / "best" / "last-preempted.ckpt", weights_only=True)["global_step"] == step
    assert Program(warm_python, root, "--guard", "--seed", "5").end() == 0, (root / "log").read_text()[-3000:]
    ends = torch.load(root / "final.ckpt", weights_only=True), undisturbed(2)
    for part in ("state_dict", "optimizer_states", "global_step"):
        assert list(differences(ends[0][part], ends[1][part])) == []


@pytest.mark.slow
def test_four_ranks_add_up_in_the_order_they_did(warm_python: str, tmp_path: Path, undisturbed: Any) -> None:
    """From three ranks on, rounding depends on DDP's buckets, which it rebuilds after its first step."""
    program = Program(warm_python, tmp_path / "r", "--kill-at", "8", ranks=4)
    assert program.end() != 0
    again = Program(warm_python, tmp_path / "r", "--seed", "5", ranks=4)
    assert again.end() == 0
    assert "resumes at step" in (tmp_path / "r" / "log").read_text()
    assert list(differences(undisturbed(4), final(tmp_path / "r"))) == []


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("who", "gap_s"), [("first", 0.0), ("last", 0.0), ("all", 0.0), ("all", 0.07)])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "validation", "sanity-batch"])
def test_every_cell(
    warm_python: str, tmp_path: Path, undisturbed: Any, ranks: int, who: str, gap_s: float, phase: str
) -> None:
    check_cell(warm_python, tmp_path / "r", undisturbed, ranks, phase, who, gap_s)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("quarter", range(4))
def test_a_hundred_mixed_kills(warm_python: str, tmp_path: Path, seed: int, quarter: int) -> None:
    """SIGKILL, SIGTERM and a notice file at random places, over the grid of cases: all end as undisturbed."""
    chance = random.Random(seed)
    kills, number = 0, quarter * len(CASES) // 4
    while kills < 25:
        case = list(CASES)[number % len(CASES)]
        root = tmp_path / f"{number}-{case}"
        number += 1
        kills += _train_with_kills(warm_python, case, root, chance)
        twin = tmp_path / f"twin-{case}"
        if not twin.exists():
            assert _run_case(warm_python, case, twin, 11).wait(120) == 0
        assert list(differences(final(twin), final(root))) == [], (case, seed)


def _train_with_kills(python: str, case: str, root: Path, chance: random.Random) -> int:
    kills = 0
    for attempt in range(12):
        notice = root / "notice"
        process = _run_case(python, case, root, 100 + attempt, notice)
        if attempt >= 3 or not _kill_somewhere(process, notice, chance):
            code = process.wait(120)
        else:
            kills += 1
            code = process.wait(60)
        notice.unlink(missing_ok=True)
        if code == 0:
            return kills
        # -15: the signal came before training was set up, or after its end.
        assert code in (143, -9, -15), (root / "log").read_text()[-3000:]
    raise AssertionError("twelve attempts were not enough")


def _run_case(python: str, case: str, root: Path, seed: int, notice: Path | None = None) -> subprocess.Popen[bytes]:
    root.mkdir(exist_ok=True)
    command = [python, "-m", "tests.support.exact_cases", case, str(root), "--seed", str(seed), "--pace", "0.02"]
    command += ["--notice", str(notice)] if notice is not None else []
    with open(root / "log", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _kill_somewhere(process: subprocess.Popen[bytes], notice: Path, chance: random.Random) -> bool:
    deadline = time.monotonic() + chance.uniform(0.2, 5.0)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    how = chance.choice(["SIGKILL", "SIGTERM", "notice"])
    if how == "notice":
        notice.write_text("20")
    else:
        process.send_signal(signal.Signals[how])
    return True


# -- in this process --------------------------------------------------------------------------------------------------


class NoticeAt(pl.Callback):
    """Makes the notice come in the middle of a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopping(root: Path, **more: Any) -> SpotCheckpoint:
    settings = {"interval": EverySteps(1000), "on_full": "wait", "notices": "signal", **more}
    return SpotCheckpoint(str(root / "run"), **settings)


def test_an_urgent_snapshot_and_the_exit_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spot = stopping(tmp_path, grace_period_s=60.0)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        trainer(NoticeAt(7, term), spot, logger=CSVLogger(str(tmp_path))).fit(Net(), data())
    assert isinstance(stopped.value, PreemptedError)
    assert stopped.value.code == 143
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == 8
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
    monkeypatch.setattr(Ranks, "part", lambda _, wait_s: waits.append(wait_s))
    spot = stopping(tmp_path, local_server=False, upload_timeout_s=1000.0, **more)
    with pytest.raises(PreemptedError):
        trainer(NoticeAt(1, term), spot).fit(Net(), data())
    assert least_s < waits[0] <= most_s


class OneOfTwo(SimpleNamespace):
    """A trainer, as far as it is asked for its rank."""


def test_a_rank_that_comes_late_does_not_wait_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one has nothing to bring to safety, and its process has ended by then: nobody listens any more."""
    monkeypatch.setattr(Meeting, "of", lambda _: Meeting("127.0.0.1", "aa", ["", ""], 1))
    server = KeyValueServer("secret")
    strategy = SimpleNamespace(
        broadcast=lambda _, src=None: ("127.0.0.1", server.port, "secret") if src is None else None
    )
    second: Any = OneOfTwo(global_rank=1, world_size=2, strategy=strategy)
    ranks = Ranks(second)
    server.close()
    ranks.part(LATEST_S)


def test_an_end_that_fails_leaves_no_handler_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(*_: Any) -> None:
        raise TierError("the disk is gone", tier="here")

    def stop() -> None:
        raise KeyError("of the user's")

    monkeypatch.setattr(Ending, "bring", bring)
    handler = signal.getsignal(signal.SIGTERM)
    spot = stopping(tmp_path, local_server=False, on_error="raise")
    try:
        with pytest.raises(TierError, match="the disk is gone") as raised:
            trainer(NoticeAt(1, stop), spot).fit(Net(), data())
        left = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler)  # Lightning's own stays where a callback raises
    assert isinstance(raised.value.__context__, KeyError)
    assert not getattr(left, "__module__", "").startswith("lightning_spot")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spot-notice")]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_late_signal_waits_until_the_last_snapshot_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    """Lightning puts back the handlers that were there before training, and only then asks for the end of ``fit``."""
    bring, put, there, may_be_safe = Ending.bring, LocalStore.put, [], threading.Event()
    if signals == 1:
        may_be_safe.set()

    def put_then(*arguments: Any, **more: Any) -> Any:
        assert may_be_safe.wait(30.0)
        return put(*arguments, **more)

    monkeypatch.setattr(LocalStore, "put", put_then)

    def passed_on(*_: Any) -> None:
        there.append([manifest.complete for manifest in LocalStore(tmp_path / "run").survey().manifests])
        may_be_safe.set()

    def slow(self: Ending, wait_s: float) -> bool | None:
        for _ in range(signals):
            term()
        return bring(self, wait_s)

    monkeypatch.setattr(Ending, "bring", slow)
    former = signal.signal(signal.SIGTERM, passed_on)
    try:
        trainer(stopping(tmp_path, local_server=False), max_epochs=1).fit(Net(), data(3))
        assert signal.getsignal(signal.SIGTERM) == passed_on
    finally:
        signal.signal(signal.SIGTERM, former)
    assert there == [[True]] if signals == 1 else there == [[]]  # of two, the second does not wait


class AtEnd(pl.Callback):
    """Told to end, once the last step is done."""

    def on_train_end(self, *_: Any) -> None:
        term()


@pytest.mark.parametrize("more", [[AtEnd()], []])
def test_a_signal_at_the_end_ends_no_rank_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[pl.Callback]
) -> None:
    """Launchers end all ranks once one has ended, and the first one was still bringing the snapshot to safety."""
    came: list[str] = []
    monkeypatch.setattr(Ranks, "part", lambda *_: came.append("the first rank is done"))
    former = signal.signal(signal.SIGTERM, lambda *_: came.append("the signal goes on"))
    try:
        trainer(*more, stopping(tmp_path, local_server=False), max_epochs=1).fit(Net(), data(3))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert came == (["the first rank is done", "the signal goes on"] if more else [])


def test_a_signal_behind_the_last_place_to_stop_at_is_passed_on(tmp_path: Path) -> None:
    """It was noted, and nobody asked for it any more: the program went on until it was killed."""
    there = []

    def passed_on(*_: Any) -> None:
        there.append([manifest.complete for manifest in LocalStore(tmp_path / "run").survey().manifests])

    former = signal.signal(signal.SIGTERM, passed_on)
    try:
        trainer(AtEnd(), stopping(tmp_path, local_server=False), max_epochs=1).fit(Net(), data(3))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert there == [[True]]


def test_a_second_signal_cuts_the_waiting_short(tmp_path: Path) -> None:
    class Twice(Exception):
        pass

    def twice() -> None:
        term()
        term()

    started = time.monotonic()
    with pytest.raises(SystemExit):
        trainer(NoticeAt(7, twice), stopping(tmp_path)).fit(Net(), data())
    assert time.monotonic() - started < LATEST_S
    manifest = LocalStore(tmp_path / "run").survey().manifests[0]
    manifest.verify((tmp_path / "run" / manifest.data_path).read_bytes(), "here")


def test_a_deadline_that_is_past_leaves_the_last_snapshot(tmp_path: Path) -> None:
    spot = stopping(tmp_path, interval=EverySteps(3), notices=lambda: 0.0 if late else None)
    late: list[int] = []

    class Wait(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 8:
                until(
                    lambda: (
                        spot.snapshots.snapshotter.writing.attempt is not None
                        and spot.snapshots.snapshotter.writing.attempt.writer.host.safe_step() == 6
                    ),
                    "step 6 to be safe",
                )
                late.append(1)
                until(lambda: spot._guard._watcher.notice, "the notice")

    with pytest.raises(SystemExit):
        trainer(Wait(), spot).fit(Net(), data())
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == 6


def test_should_stop_and_an_exception_at_the_same_moment(tmp_path: Path) -> None:
    def both(trainer: pl.Trainer) -> None:
        trainer.should_stop = True
        term()

    class Both(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                both(trainer)

    with pytest.raises(SystemExit):
        trainer(Both(), stopping(tmp_path)).fit(Net(), data())
    assert LocalStore(tmp_path / "run").survey().manifests[0].step == 5

    class Broken(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
            term()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer(Broken(), stopping(tmp_path / "b", interval=EverySteps(2))).fit(Net(), data())


def test_in_mid_accumulation_nothing_is_lost(tmp_path: Path) -> None:
    """The urgent snapshot holds the gradients of the window that was cut."""
    settings = {"interval": EverySteps(1000), "local_server": False, "on_full": "wait", "keep": 100}
    case = CASES["accumulation"]
    twin = SpotCheckpoint(str(tmp_path / "twin" / "run"), **settings)
    train(case, tmp_path / "twin", seed=11, spot=twin, max_epochs=1)

    class Term(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 7:
                term()

    root = tmp_path / "r"
    with pytest.raises(SystemExit):
        train(case, root, Term(), seed=11, spot=SpotCheckpoint(str(root / "run"), **settings), max_epochs=1)
    manifest = LocalStore(root / "run").survey().manifests[0]
    checkpoint = torch.load(root / "run" / manifest.data_path, weights_only=True)
    assert manifest.step == 1
    assert checkpoint["lightning_spot"]["ranks"][0]["gradients"]
    train(case, root, seed=77, spot=SpotCheckpoint(str(root / "run"), **settings), max_epochs=1)
    (root / "log").touch()
    assert list(differences(final(tmp_path / "twin"), final(root))) == []


def test_the_guard_alone_beside_model_checkpoint(tmp_path: Path) -> None:
    def fit(*callbacks: pl.Callback, seed: int, ckpt_path: str | None = None) -> pl.Trainer:
        pl.seed_everything(seed, verbose=False)
        save = ModelCheckpoint(str(tmp_path / "best"), save_last=True)
        made = trainer(*callbacks, PreemptionGuard("signal"), save, limit_train_batches=8)
        made.fit(Model(), loader(), ckpt_path=ckpt_path)
        return made

    pl.seed_everything(1, verbose=False)
    twin = fit(seed=1)
    expected = {name: value.clone() for name, value in twin.lightning_module.state_dict().items()}
    for path in (tmp_path / "best").iterdir():
        path.unlink()
    with pytest.raises(SystemExit):
        fit(NoticeAt(11, term), seed=1)
    assert (tmp_path / "best" / "last-preempted.ckpt").exists()
    resumed = fit(seed=9, ckpt_path="last")
    assert list(differences(expected, resumed.lightning_module.state_dict())) == []


def test_a_folder_that_a_restart_cannot_find_is_named_early(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(*callbacks: pl.Callback, **more: Any) -> pl.Trainer:
        made = trainer(*callbacks, PreemptionGuard("signal"), ModelCheckpoint(), limit_train_batches=8, **more)
        made.fit(Model(), loader(), ckpt_path="last")
        return made

    with pytest.raises(SystemExit):
        fit(NoticeAt(11, term), logger=CSVLogger(str(tmp_path)))
    assert said(caplog, "folder-changes")
    (saved,) = tmp_path.rglob("last-preempted.ckpt")
    assert saved.is_relative_to(tmp_path / "lightning_logs" / "version_0")
    resumed = fit(logger=CSVLogger(str(tmp_path)))
    assert resumed.ckpt_path is None


def test_a_bucket_lightning_cannot_search_is_named_with_a_fix(s3: str, caplog: pytest.LogCaptureFixture) -> None:
    """``fit(ckpt_path="last")`` began at step 0, though the file was there."""

    def fit(path: str, *callbacks: pl.Callback) -> pl.Trainer:
        made = trainer(*callbacks, PreemptionGuard("signal"), ModelCheckpoint(f"{s3}/best"), limit_train_batches=8)
        made.fit(Model(), loader(), ckpt_path=path)
        return made

    saved = f"{s3}/best/last-preempted.ckpt"
    with pytest.raises(SystemExit):
        fit("last", NoticeAt(11, term))
    assert [facts["path"] for facts in said(caplog, "last-not-found")] == [saved]
    assert fit("last").ckpt_path is None  # if it finds it one day, the warning goes
    assert fit(saved).ckpt_path == saved


def test_advice_raises_the_rate_and_does_not_stop(tmp_path: Path) -> None:
    advice = Notice(source="aws", kind="advice", text="EC2 recommends to rebalance", seen_s=0.0)
    spot = stopping(tmp_path, notices=lambda: advice)

    class Wait(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            until(lambda: spot._guard._watcher.advice, "the advice")

    snapshots = trainer(Wait(), spot)
    snapshots.fit(Net(), data())
    assert spot.snapshots.snapshotter.pacing._rate.mtbf_s == 600.0
    assert snapshots.global_step == 40


def test_a_grace_that_fits_no_tier_is_said_early(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spot = stopping(tmp_path, interval=EverySteps(3), grace_period_s=1e-9)

    class Wait(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 99:
                until(lambda: spot.snapshots.snapshotter.writing.safe_after_s() is not None, "a measured speed")

    trainer(Wait(), spot, max_epochs=5).fit(Net(), data(21))
    assert len(said(caplog, "grace-too-short")) == 1


def test_a_local_dirpath_on_a_vm_of_a_cloud_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(MetadataServer()) as server:
        trainer(stopping(tmp_path, notices=AwsSource(server.url))).fit(Net(), data())
        (facts,) = said(caplog, "dirpath-local")
        assert (facts["about"], facts["cloud"]) == (str(tmp_path / "run"), "aws")
        caplog.clear()
        trainer(stopping(tmp_path / "other", notices="signal")).fit(Net(), data())  # no cloud is known
        monkeypatch.setattr("lightning_spot.fit.session.local_file_system", lambda _: None)
        trainer(stopping(tmp_path / "shared", notices=AwsSource(server.url))).fit(Net(), data())
    assert not said(caplog, "dirpath-local")


def test_bad_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="mean 'aws'"):
        SpotCheckpoint(str(tmp_path / "run"), notices="awss")
    with pytest.raises(SettingsError, match="grace_period_s=-1"):
        PreemptionGuard(grace_period_s=-1)
    with pytest.raises(SettingsError, match="data_resume='back'"):
        SpotCheckpoint(str(tmp_path / "run"), data_resume="back")  # type: ignore[arg-type]


def test_planning_against_a_deadline() -> None:
    fits = plan_urgent(10_000, 60.0, {"slow": 100.0, "fast": 1000.0})
    assert fits.take
    assert fits.url == "fast"
    assert fits.expected_s == 10.0
    assert not plan_urgent(10_000, 11.0, {"fast": 1000.0}).take
    assert not plan_urgent(10_000, 20.0, {"fast": 1000.0}, waiting_bytes=10_000).take
    assert plan_urgent(10_000, None, {"slow": 1.0}).take
    assert plan_urgent(10_000, 5.0, {}).take
    assert not plan_urgent(10_000, 0.0, {}).take


def test_remote_snapshot_alone_has_no_guard(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    trainer(RemoteSnapshot(str(tmp_path / "run"), interval=EverySteps(5)), max_epochs=1).fit(Net(), data())
    assert signal.getsignal(signal.SIGTERM) == handler
