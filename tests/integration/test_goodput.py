"""Where the time of a run goes: the ledger, the metric, the monitor, ``report`` and ``doctor``."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import s3fs
import torch
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MetricCollection, SumMetric

from lightning_spot import (
    ConvergenceAware,
    EverySeconds,
    EverySteps,
    Goodput,
    GoodputMonitor,
    RemoteSnapshot,
    SpotCheckpoint,
    YoungDaly,
)
from lightning_spot.cli import doctor
from lightning_spot.config import read_environment
from lightning_spot.errors import SettingsError, TierError
from lightning_spot.goodput.ledger import (
    Account,
    AttemptRecord,
    Spent,
    account_after,
    lost_steps,
    spent,
    total,
)
from lightning_spot.goodput.records import (
    Journal,
    forget_reached,
    keep_reached,
    read_reached,
    read_records,
    write_record,
)
from lightning_spot.http.sessions import note_killed
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.protocol.process import ProcessId
from lightning_spot.run.identity import starts_between
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.session.snapshotter import Pacing
from lightning_spot.store.fences import ATTEMPTS_DIR, Rewind
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Folder
from tests.conftest import Cli
from tests.support.said import said
from tests.support.server import StartServer, manifest_of, sessions_of
from tests.support.snapshots import EachDurable
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process, until

pytestmark = pytest.mark.guarantee("G29")

# -- the ledger -------------------------------------------------------------------------------------------------------


def attempt(number: int, begun: float, trained: float | None, steps: tuple[int, int], until: float, **more: Any) -> Any:
    return AttemptRecord(
        attempt=number,
        begun_unix_s=begun,
        trained_unix_s=trained,
        from_step=steps[0],
        step=steps[1],
        unix_s=until,
        **more,
    )


FIRST = attempt(1, 0.0, 10.0, (0, 100), 110.0)
TAKEN = attempt(2, 130.0, None, (0, 0), 135.0)  # away before it trained
THIRD = attempt(3, 140.0, 150.0, (80, 180), 252.0, blocked_s=2.0, restore_s=4.0)
TRAINED = Spent(startup_s=10.0, productive_s=80.0, lost_s=20.0)
REST = [Spent(startup_s=5.0, down_s=5.0), Spent(startup_s=6.0, restore_s=4.0, blocked_s=2.0, productive_s=100.0)]
LATE = replace(THIRD, from_unix_s=105.0)  # the first attempt was slow at first: the snapshot of step 80 tells


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param([FIRST, TAKEN, THIRD], [replace(TRAINED, down_s=20.0), *REST], id="three"),
        pytest.param([replace(FIRST, end="complete"), TAKEN, THIRD], [TRAINED, *REST], id="max_epochs raised later"),
        pytest.param(
            [FIRST, LATE],
            [Spent(startup_s=10.0, productive_s=95.0, lost_s=5.0, down_s=30.0), REST[1]],
            id="slow at first",
        ),
    ],
)
def test_each_second_is_counted_once(records: list[AttemptRecord], expected: list[Spent]) -> None:
    parts = spent(records)
    assert [asdict(part) for part in parts] == [pytest.approx(asdict(part)) for part in expected]
    whole = total(parts)
    assert whole.total_s == pytest.approx(sum(asdict(whole).values()))
    assert whole.goodput == pytest.approx(whole.productive_s / whole.total_s)


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([(0, 100), (80, 200)], [20, 0]),
        ([(0, 100), None, (80, 200)], [20, 0, 0]),
        ([(0, 100), (80, 200), (60, 300)], [40, 120, 0]),
    ],
)
def test_lost_steps_are_those_done_again(steps: list[tuple[int, int] | None], lost: list[int]) -> None:
    assert lost_steps([attempt(1, 0.0, None if each is None else 0.0, each or (0, 0), 1.0) for each in steps]) == lost


def test_the_last_line_and_the_report_tell_the_same(tmp_path: Path) -> None:
    """Where training went back far, the line took all steps for as long."""
    write_record(str(tmp_path), attempt(1, 0.0, 10.0, (0, 60), 500.0, end="killed"))
    journal = Journal(str(tmp_path), 2, heartbeat_s=60.0, begun_unix_s=600.0)
    journal.train(5, 21.0)
    journal.note(9, 0.0, 0)
    journal.close("complete")
    reported = total(spent(read_records(str(tmp_path))))
    assert asdict(journal.spent) == pytest.approx(asdict(reported))
    assert reported.lost_s == pytest.approx(500.0 - 21.0)
    third = Journal(str(tmp_path), 3, heartbeat_s=60.0, begun_unix_s=time.time())
    third.close("failed")
    assert third.spent.lost_s == pytest.approx(reported.lost_s)


def test_what_a_later_version_adds_to_a_record_is_left_out() -> None:
    record = attempt(2, 0.0, 0.0, (0, 0), 0.0, snapshots=7)
    record.earlier = Account(attempts=1, latest=[attempt(1, 0.0, 1.0, (0, 5), 2.0)])
    again = AttemptRecord.from_dict(json.loads(json.dumps({**asdict(record), "of_a_later_version": 1})))
    assert again == record


def test_the_newest_record_that_is_whole_has_all_before_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    previous = None
    for number in (1, 2, 10):
        previous = AttemptRecord(attempt=number, begun_unix_s=1.0, earlier=account_after(previous))
        write_record(str(tmp_path), previous)
    (tmp_path / "attempts" / "attempt-0011.progress.json").write_text('{"attempt":')
    (tmp_path / "attempts" / "attempt-0012.json").write_text("{}")
    assert [record.attempt for record in read_records(str(tmp_path))] == [1, 2, 10]
    assert [facts["attempt"] for facts in said(caplog, "goodput-damaged")] == [11]
    assert read_records(str(tmp_path / "nowhere")) == []


def test_what_a_killed_attempt_could_not_carry_on_is_not_lost(tmp_path: Path) -> None:
    """It was killed before it could read the record of the one before; its own is the newest."""
    for record in (attempt(1, 0.0, 10.0, (0, 60), 500.0), attempt(2, 600.0, 610.0, (50, 70), 700.0)):
        write_record(str(tmp_path), record)
    assert [(each.attempt, each.end) for each in read_records(str(tmp_path))] == [(1, "killed"), (2, "running")]
    kept = journal(str(tmp_path), 3, heartbeat_s=60.0)
    assert [each.end for each in kept.record.known] == ["killed", "killed", "running"]
    kept.close("complete")


def test_the_account_is_carried_on_once_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read that failed at the start took all earlier attempts out of it."""
    write_record(str(tmp_path), attempt(1, 0.0, 10.0, (0, 60), 500.0, end="killed"))
    sizes, fails = Folder.sizes, [TierError("it fails")]

    def failing(self: Folder) -> dict[str, int]:
        if fails:
            raise fails.pop()
        return sizes(self)

    monkeypatch.setattr(Folder, "sizes", failing)
    kept = journal(str(tmp_path), 2, heartbeat_s=0.01)
    until(lambda: len(read_records(str(tmp_path))) == 2, "both attempts")
    kept.close("complete")
    assert kept.spent.total_s >= 500.0


# -- the metric -------------------------------------------------------------------------------------------------------


def test_metric() -> None:
    goodput = Goodput()
    goodput.update(productive_s=90.0, blocked_s=1.0, lost_s=4.0, restore_s=2.0, down_s=3.0)
    assert goodput.compute() == pytest.approx(0.9)
    goodput.update(productive_s=100.0)
    assert MetricCollection([goodput.clone()]).compute()["Goodput"] == pytest.approx(0.95)
    both = MetricCollection([Goodput(), SumMetric()])  # each is given what it takes
    both.update(productive_s=3.0, down_s=1.0, value=5.0)
    assert both.compute() == {"Goodput": pytest.approx(0.75), "SumMetric": 5.0}
    assert not goodput.state_dict()
    again = Goodput()
    for each in (goodput, again):
        each.persistent(True)
    again.load_state_dict(goodput.state_dict())
    assert again.compute() == pytest.approx(0.95)
    goodput.reset()
    assert goodput.compute() == 1.0


# -- the monitor ------------------------------------------------------------------------------------------------------


BADPUT = [f"badput_{kind}_s" for kind in ("blocked", "lost", "restore", "startup", "down")]
LOGGED = ("goodput", *BADPUT, "last_committed_step", "last_persisted_step", "snapshot_blocked_ms")


class Slow(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.01)


def test_a_run_over_two_attempts(tmp_path: Path, cli: Cli) -> None:
    url = str(tmp_path / "run")
    with pytest.raises(Stop):
        trainer(Slow(), SpotCheckpoint(url, interval=EverySteps(10), on_full="wait"), StopAt(25)).fit(Net(), data())
    time.sleep(0.3)
    spot = SpotCheckpoint(url, interval=EverySteps(10))
    logger = CSVLogger(str(tmp_path), name="log")
    trainer(Slow(), spot, logger=logger).fit(Net(), data())
    first, second = read_records(url)
    assert (first.end, second.end) == ("failed", "complete")
    assert (first.step, second.from_step, second.step) == (25, 20, 40)
    assert first.snapshots == 2
    assert first.from_unix_s is None
    assert first.trained_unix_s < second.from_unix_s <= first.unix_s
    whole = total(spent([first, second]))
    assert whole.down_s >= 0.25
    assert whole.lost_s >= 0.04
    assert 0 < spot.goodput.compute() < 1
    assert 0 < second.restore_s < second.trained_unix_s - second.begun_unix_s
    assert first.restore_s == 0
    rows = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {name for name in rows[0].split(",") if "/" in name} == {f"spot/{name}" for name in LOGGED}
    assert "spot-goodput" not in {thread.name for thread in threading.enumerate()}
    said = cli("report", url)
    assert "5 steps" in said
    assert "goodput" in said


class Rows(CSVLogger):
    """Keeps what it is told, and ends a training once that is of a snapshot in storage."""

    def __init__(self, training: pl.Trainer, root: Path) -> None:
        super().__init__(str(root))
        self.training, self.persisted = training, list[float]()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.persisted += [metrics["spot/last_persisted_step"]] if "spot/goodput" in metrics else []
        self.training.should_stop = self.persisted[-1:] > [0]


def storing(run: Path, every: int) -> RemoteSnapshot:
    usual: dict[str, Any] = {"local_server": False, "min_upload_interval_s": 0.0, "keep": 9, "on_full": "wait"}
    return RemoteSnapshot(str(run), interval=EverySteps(every), **usual)


def persisted(run: Path, *callbacks: pl.Callback, every: int) -> list[float]:
    """Steps of the newest snapshot in storage, as loggers are told them, until there is one."""
    snapshots = storing(run, every)
    training = trainer(snapshots, GoodputMonitor(log_every_s=0.01, heartbeat_s=0.01), *callbacks, max_epochs=200)
    training.logger = rows = Rows(training, run.parent)
    training.fit(Net(), data())
    return rows.persisted


def test_the_newest_snapshot_in_storage_is_logged(tmp_path: Path) -> None:
    told = persisted(tmp_path / "run", Slow(), every=5)
    assert told[0] == -1
    assert told[-1] > 0
    assert told[-1] % 5 == 0
    assert sorted(told) == told


def test_what_is_set_aside_is_not_the_newest_in_storage(tmp_path: Path) -> None:
    """Nor is it told to a server, for its metrics, until something newer is stored."""
    store = LocalStore(run := tmp_path / "run")
    trainer(storing(run, 5), EachDurable(run, 5), max_steps=20).fit(Net(), data())
    to = next(each for each in store.survey().manifests if each.step == 10)
    store.folder(ATTEMPTS_DIR, attempt=1, run_id="").write(Rewind(1, to.order).file, memoryview(b""))
    new_process()
    assert persisted(run, Slow(), every=1000)[-1] == 10


def test_a_storage_that_fails_leaves_what_was_known(tmp_path: Path) -> None:
    look = Mock(side_effect=[OSError("it fails"), (7, 1e9), OSError("it fails again")])
    kept = journal(str(tmp_path), 1, heartbeat_s=0.01, newest_persisted=look)
    until(lambda: look.call_count > 3, "looks")
    kept.close("complete")
    assert kept.persisted == (7, 1e9)


def test_a_sign_of_life_has_the_time_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the clock was set, as after a boot, a live run looked idle: it could be rewound, and removed."""
    kept, now = journal(str(tmp_path), 1, heartbeat_s=0.01), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)
    until(lambda: any(each.alive_unix_s > now() + 3000.0 for each in read_records(str(tmp_path))), "a sign of life")
    kept.close("complete")


def test_it_needs_snapshots() -> None:
    with pytest.raises(SettingsError, match="RemoteSnapshot"):
        trainer(GoodputMonitor()).fit(Net(), data())
    with pytest.raises(SettingsError, match="heartbeat_s"):
        GoodputMonitor(heartbeat_s=0)


# -- attempts that are killed -----------------------------------------------------------------------------------------


def journal(url: str, attempt: int, **more: Any) -> Journal:
    return Journal(url, attempt, **{"heartbeat_s": 3600.0, "begun_unix_s": time.time(), **more})


def written(url: str, number: int = 0) -> AttemptRecord:
    return [each for each in read_records(url) if each.attempt > 0][number]


@contextlib.contextmanager
def as_trainer(pid: int) -> Iterator[None]:
    """What is kept of an attempt is that of another process."""
    process = ProcessId.of(pid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_spot.goodput.records.ProcessId.of", lambda _pid: process)
        yield


@pytest.mark.parametrize("days", [3, -3])
def test_a_clock_that_is_set_in_mid_training_is_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    began_s, clock = time.monotonic(), time.time
    kept = journal(str(tmp_path), 1)
    kept.train(0)
    monkeypatch.setattr(time, "time", lambda: clock() + days * 86400)
    kept.note(10, 0.0, 1)
    kept.close("complete")
    spent_s, passed_s = kept.spent, time.monotonic() - began_s
    assert 0 <= spent_s.total_s <= passed_s
    assert written(str(tmp_path)).unix_s - written(str(tmp_path)).begun_unix_s <= passed_s


def test_what_an_attempt_reached_is_on_this_host(tmp_path: Path) -> None:
    record = attempt(7, 100.0, 110.0, (5, 5), 110.0)
    for step in range(6, 60):
        record.step, record.unix_s, record.blocked_s, record.snapshots = step, 110.0 + step, step / 100, step // 20
        keep_reached(str(tmp_path), record)
        assert read_reached(str(tmp_path), 7) == record
    assert read_reached(str(tmp_path), 8) is None
    (path,) = read_environment().runtime_dir.glob("*.attempt-0007.reached*")
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], b"\xff" * 8 + whole[8:], b"[]", b"{}"):
        path.write_bytes(damaged)
        assert read_reached(str(tmp_path), 7) is None
    forget_reached(str(tmp_path), 7)
    assert not path.exists()


def test_steps_are_kept_on_this_host_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = journal(str(tmp_path), 1)
    kept.train(0)
    found = []
    for step in range(1, 8):
        now[0] += 0.4
        kept.note(step, 0.0, step)
        left = read_reached(str(tmp_path), 1)
        found.append(left.step)
    assert found == [0, 0, 3, 3, 3, 6, 6]
    kept.leave()


def test_a_trainer_that_is_gone_was_killed(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    gone = subprocess.Popen(["sleep", "60"])
    with as_trainer(gone.pid):
        keep_reached(url, attempt(1, 100.0, 110.0, (0, 9), 120.0))
    alive = read_reached(url, 1)
    info = RunInfo(name="run", id="0123456789ab", location=url, attempt=1, token="t", durable_url=url)
    note_killed(info)
    gone.kill()
    gone.wait()
    dead = read_reached(url, 1)
    assert (alive.end, dead.end) == ("running", "killed")
    note_killed(info)
    assert read_records(url) == []  # nobody else knows the attempts before it
    before = account_after(attempt(0, 10.0, 20.0, (0, 3), 30.0))
    write_record(url, replace(attempt(1, 100.0, 110.0, (0, 2), 113.0), earlier=before))
    note_killed(info)  # as its server does
    assert (written(url).end, written(url).step, written(url).earlier) == ("killed", 9, before)
    assert read_reached(url, 1) is None


LEAVES = """
import sys
from lightning_spot.client.local_server import Session
from lightning_spot.client.server_client import ServerClient
from lightning_spot.protocol.wire import Address
connection = Session(ServerClient(Address(socket_path=sys.argv[1])), 30.0)
print("there", flush=True)
sys.stdin.readline()
connection.close()
sys.stdin.read()
"""


def test_a_trainer_whose_connection_closes_first_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes a killed process' connections a moment before the process counts as dead."""
    url, ended = str(tmp_path / "run"), threading.Event()

    server = SnapshotServer(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None)

    def end_session(_session: str) -> list[RunInfo]:
        ended.set()
        return [RunInfo(name="run", id="0123456789ab", location=url, attempt=1, token="t", durable_url=url)]

    monkeypatch.setattr(server, "end_session", end_session)
    path = read_environment().runtime_dir / "http"
    with sessions_of(server, path):
        child = subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        child.stdout.readline()
        with as_trainer(child.pid):
            keep_reached(url, attempt(1, 100.0, 110.0, (0, 9), 120.0))
        write_record(url, attempt(1, 100.0, 110.0, (0, 2), 113.0))
        child.stdin.write("\n")
        child.stdin.flush()
        assert ended.wait(120)
        time.sleep(0.5)  # a server that does not wait has looked by then, and found a living trainer
        assert written(url).end == "running"
        child.kill()
        child.wait()
        until(lambda: written(url).end == "killed", "what the server writes")
        assert written(url).step == 9


def test_the_next_attempt_completes_the_record_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spot.goodput.records.KEEP_S", 0.0)
    url = str(tmp_path / "run")
    killed = journal(url, 1)
    killed.train(0)
    until(lambda: bool(read_records(url)) and written(url).trained_unix_s is not None, "the first records")
    taken_s = 0.0
    for step in range(1, 18):
        killed.note(step, 0.0, step // 10)
        taken_s = killed.record.unix_s if step == 10 else taken_s
    assert written(url).step == 0
    following = journal(url, 2)
    following.train(10, taken_s, 0.5)
    first, _ = following.record.before.latest[0], until(lambda: len(read_records(url)) == 2, "the next record")
    assert (first.step, first.snapshots, first.end) == (17, 1, "killed")
    assert written(url) == first
    assert lost_steps([first, following.record]) == [7, 0]
    assert following.spent.lost_s == pytest.approx(first.unix_s - taken_s)
    until(lambda: not list(read_environment().runtime_dir.glob("*.attempt-0001.reached")), "its note forgotten")
    following.close("complete")
    assert [written(url, number).end for number in (0, 1)] == ["killed", "complete"]
    assert not list(read_environment().runtime_dir.glob("*.reached"))
    killed.close("failed")


@pytest.mark.parametrize("end", ["running", "killed"])
def test_the_snapshots_tell_where_the_machine_is_gone(tmp_path: Path, end: str) -> None:
    url, begun = str(tmp_path / "run"), time.time() - 100
    write_record(url, attempt(1, begun, begun + 10, (0, 0), begun + 10, end=end))
    tiers = [
        manifest_of(step, number, created_unix_s=begun + 10 + step) for number, step in ((1, 20), (1, 40), (2, 60))
    ]
    following = journal(url, 2, snapshots=tiers)
    first = following.record.before.latest[0]
    assert (first.step, first.unix_s, first.end) == (40, begun + 50, "killed")
    following.close("complete")
    assert written(url).step == 40


BEGUN = """
import time
at_s = time.time()
from lightning_spot.goodput.records import begin_unix_s
print(at_s, begin_unix_s(), begin_unix_s())
"""


def test_the_first_attempt_of_a_process_begins_with_it() -> None:
    before_s, tick_s = time.time(), 2 / os.sysconf("SC_CLK_TCK")
    done = subprocess.run([sys.executable, "-c", BEGUN], capture_output=True, text=True, check=True, timeout=120)
    at_s, first_s, second_s = map(float, done.stdout.split())
    assert before_s - tick_s <= first_s <= at_s <= second_s


class Shown(pl.Callback):
    """Logs something; what the progress bar shows."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        module.log("loss", 1.0, prog_bar=True)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.names = set(trainer.progress_bar_callback.get_metrics(trainer, module))


def test_goodput_is_logged_from_the_first_row_or_not_at_all(tmp_path: Path) -> None:
    shown: dict[bool, set[str]] = {}
    for wanted in (True, False):
        spot = SpotCheckpoint(str(tmp_path / str(wanted)), local_server=False, notices=None, log_goodput=wanted)
        logger = CSVLogger(str(tmp_path), name="log", version=str(wanted), flush_logs_every_n_steps=1)
        bar = {"enable_progress_bar": True, "log_every_n_steps": 1, "max_steps": 3}
        fits = trainer(spot, look := Shown(), logger=logger, **bar)
        fits.fit(Net(), data())
        shown[wanted] = look.names
        assert 0 < spot.goodput.compute() <= 1
        assert "goodput" not in fits.callback_metrics
        assert "goodput" not in fits.progress_bar_callback.get_metrics(fits, fits.lightning_module)
    rows = (tmp_path / "log" / "True" / "metrics.csv").read_text().splitlines()
    assert dict(zip(rows[0].split(","), rows[1].split(","), strict=True))["spot/goodput"]
    assert "spot" not in (tmp_path / "log" / "False" / "metrics.csv").read_text()
    assert shown[True] - shown[False] == {"goodput"}


# -- pacing -----------------------------------------------------------------------------------------------------------


def test_the_default_interval_measures_and_needs_no_setting(tmp_path: Path) -> None:
    spot = SpotCheckpoint(str(tmp_path / "run"))
    policy = spot.interval
    assert isinstance(policy, ConvergenceAware)

    class Soon(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            time.sleep(0.02)
            if trainer.global_step == 10:
                policy._last_s -= 60.0  # the first snapshot is due

    trainer(Soon(), spot).fit(Net(), data())
    costs = policy._costs
    assert costs.stall_s > 0
    assert costs.mtbf_s >= 7200
    assert costs.total_steps == 40
    curve = policy.state_dict()["curve"]
    assert curve["open"] or curve["closed"]  # the loss was read


def test_what_was_measured_survives_a_restart(tmp_path: Path) -> None:
    url = str(tmp_path / "run")

    def measured(root: str, stop: int | None) -> SpotCheckpoint:
        spot = SpotCheckpoint(root, interval=EverySeconds(0.05), on_full="wait")
        stops = [StopAt(stop)] if stop is not None else []
        with contextlib.suppress(Stop):
            trainer(Slow(), spot, *stops).fit(Net(), data())
        return spot

    measured(url, 25)
    spot = measured(url, None)
    assert spot.snapshots.snapshotter.pacing._rate.events == 1
    assert spot.snapshots.snapshotter.pacing._rate.exposure_s > 0.1
    assert spot.snapshots.snapshotter.pacing._stall.value is not None


@pytest.mark.parametrize(
    ("earlier", "attempt", "starts"), [(3, 4, 1), (3, 7, 4), (3, 1003, 1), (3, 1005, 3), (4, 4, 0)]
)
def test_an_attempt_far_above_the_last_one_is_one_failure(earlier: int, attempt: int, starts: int) -> None:
    """Numbers are left free where the durable tier could not be read; snapshots every stall / 3 % were the price."""
    assert starts_between(earlier, attempt) == starts


@pytest.mark.parametrize(
    ("monitor", "validates", "found"),
    [
        ("val_los", True, [(6, "val_loss", "of_step, val_loss")]),
        ("val_loss", True, []),
        ("of_step", True, []),
        ("no_such", False, [(100, "", "of_step")]),
    ],
)
def test_an_unlogged_monitor_is_named_within_the_first_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monitor: str, validates: bool, found: list[tuple[Any, ...]]
) -> None:
    """An epoch may be all of a training: it was said at its end only."""

    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("of_step", 1.0)
            return super().training_step(batch, batch_idx)

    spot = RemoteSnapshot(str(tmp_path / "run"), local_server=False, interval=ConvergenceAware(monitor=monitor))
    checks = {"val_check_interval": 5, "limit_val_batches": 1}
    settings = {"limit_train_batches": 15, **checks} if validates else {"limit_train_batches": 120}
    trainer(spot, max_epochs=1, **settings).fit(Logs(), data(120), data(1) if validates else None)
    facts = said(caplog, "monitor-not-logged")
    assert [(each["step"], each["near"], each["logged"]) for each in facts] == found


def test_a_monitor_is_read_when_it_changes(tmp_path: Path) -> None:
    class Logs(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0 / (1 + self.trainer.global_step))

    interval = ConvergenceAware(monitor="val_loss")
    spot = SpotCheckpoint(str(tmp_path / "run"), interval=interval)
    trainer(Slow(), spot, max_epochs=14, limit_train_batches=15).fit(Logs(), data(), data(2))
    values = [value for _, _, value, _ in interval.state_dict()["curve"]["closed"]]
    assert 8 <= len(values) <= 14  # one for each validation, but those read too late
    assert values == sorted(values, reverse=True)


class TwoRanks:
    """A trainer of two ranks as far as pacing sees it; broadcasts are counted."""

    world_size, num_nodes, is_global_zero, global_step, estimated_stepping_batches = 2, 2, True, 0, 1000

    def __init__(self) -> None:
        self.strategy, self.broadcasts = self, 0

    def broadcast(self, said: Any) -> Any:
        self.broadcasts += 1
        return said


def _taken_at(
    monkeypatch: pytest.MonkeyPatch, policy: IntervalPolicy, steps_s: list[float], most_words: float = math.inf
) -> list[float]:
    """When two ranks take snapshots whose steps take so long."""
    now, taken, two = [0.0], [], cast(Any, TwoRanks())
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pacing = Pacing(policy)
    pacing.begin(two, 1, None)
    for step, step_s in enumerate(steps_s, start=1):
        two.global_step, now[0] = step, now[0] + step_s
        if pacing.due(two, lambda: "alone", float):
            taken.append(now[0])
            pacing.taken(step)
        pacing.look_ahead(two, lambda: "alone")
    assert two.broadcasts <= most_words
    return taken


def test_ranks_talk_in_few_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _taken_at(monkeypatch, EverySeconds(100), [1.0] * 1000, 100) == list(range(100, 1001, 100))


@pytest.mark.parametrize("long", [[60.0], [0.1] * 50 + [3600.0], [0.1, 900.0, 0.1, 900.0]])
def test_a_long_step_makes_no_snapshot_due_before_its_time(monkeypatch: pytest.MonkeyPatch, long: list[float]) -> None:
    taken = _taken_at(monkeypatch, EverySeconds(10), long + [0.1] * 2000)
    apart = [later - earlier for earlier, later in itertools.pairwise([0.0, *taken])]
    assert all(seconds > 9.8 for seconds in apart)
    assert all(seconds < 10.5 for seconds in apart[len(long) + 1 :])
    assert len(apart) > 15


def test_a_policy_may_say_that_nothing_is_ever_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many steps that is ended the training of several ranks."""
    never = EverySeconds(10)
    monkeypatch.setattr(never, "wait_s", lambda _step, _now_s: math.inf)
    assert _taken_at(monkeypatch, never, [1.0] * 100, 10) == []


def test_ranks_talk_in_time_when_steps_become_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _taken_at(monkeypatch, EverySeconds(60), [0.1] * 36_000 + [1.0] * 3600)
    late = [seconds for seconds in taken if seconds > 3600 + 600]
    assert all(later - earlier <= 63 for earlier, later in itertools.pairwise(late))
    assert len(late) >= 40


def test_the_rate_of_two_machines_is_twice_as_high() -> None:
    pacing = Pacing(YoungDaly())
    pacing.begin(TwoRanks(), 1, None)  # type: ignore[arg-type]
    assert pacing._rate.mtbf_s == 3600.0
    saved = pacing.state_dict()
    later = Pacing(YoungDaly())
    later.begin(TwoRanks(), 3, json.loads(json.dumps(saved)))  # type: ignore[arg-type]
    assert later._rate.events == 2
    later.expect_failure()
    assert later._rate.mtbf_s == 600.0


# -- doctor -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor starts no server."""
    monkeypatch.setattr(doctor, "local_server_speed", lambda _url, _nbytes: 1e9)


def test_doctor(tmp_path: Path, cli: Cli) -> None:
    said = cli("doctor", tmp_path / "mistyped" / "run")
    for word in ("committed by a local server", "stored at", "one every", "SpotCheckpoint("):
        assert word in said
    assert not (tmp_path / "mistyped").exists()
    memory = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])
    until(lambda: not list(memory.iterdir()), "what was measured leaves nothing in memory")


def test_doctor_with_a_server(tmp_path: Path, cli: Cli, start_server: StartServer) -> None:
    run, server = tmp_path / "run", start_server()
    size = ("--snapshot-size", "2GB")
    told = json.loads(cli("doctor", run, "--server", server.url, *size, "-o", "json"))
    assert set(told["tiers_bytes_per_s"]) == {server.url, str(run)}
    outlook = told["outlook"]
    assert outlook["loss_s"] == pytest.approx(outlook["interval_s"] / 2 + outlook["uploaded_s"] - outlook["stall_s"])
    assert f"SpotCheckpoint({str(run)!r}, servers=[{server.url!r}])" in told["advice"][-1]
    assert outlook["uploaded_s"] == pytest.approx(2e9 / told["tiers_bytes_per_s"][server.url] + outlook["stall_s"])


def test_doctor_names_a_tier_that_fails(tmp_path: Path, cli: Cli) -> None:
    said = cli("doctor", tmp_path / "run", "--server", "spot://127.0.0.1:9", code=1)
    assert "spot://127.0.0.1:9: no snapshot server answers" in said
    assert "lightning-spot serve --listen" in said
    assert "servers=" not in said  # what does not work is not recommended
    assert "the snapshot server on this host:" not in said  # that one works


def test_doctor_says_that_a_bucket_cannot_be_used(cli: Cli, no_credentials: None) -> None:
    """Neither the measurement nor the deletion after it ends in a traceback; the problem is named once."""
    said = cli("doctor", "s3://bucket/run", code=1)
    assert said.count("no credentials were found for s3://bucket/run (") == 1  # not of a place made up to be measured
    assert "nothing can be recommended for s3://bucket/run" in said
    assert "SpotCheckpoint(" not in said


SMALL = ("--snapshot-size", "1MB")


@pytest.mark.parametrize(("command", "code"), [(["doctor", *SMALL], 1), (["report"], 2)])
def test_a_bucket_that_is_not_there_is_said_to_be_so(s3: str, cli: Cli, command: list[str], code: int) -> None:
    assert "bucket 'nowhere' of s3://nowhere/run does not exist" in cli(*command, "s3://nowhere/run", code=code)


def test_doctor_looks_for_the_rule_that_ends_unfinished_uploads(
    s3: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    def advice() -> list[str]:
        found: list[str] = json.loads(cli("doctor", f"{s3}/run", *SMALL, "-o", "json"))["advice"]
        return [line for line in found if "AbortIncompleteMultipartUpload" in line]

    (line,) = advice()
    rules = json.loads(line[line.index("{") : line.rindex("}") + 1])
    call = s3fs.S3FileSystem.call_s3

    def refused(self: s3fs.S3FileSystem, method: str, *arguments: Any, **more: Any) -> Any:
        if method == "get_bucket_lifecycle_configuration":
            raise PermissionError("not allowed to")
        return call(self, method, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "call_s3", refused)
        assert "not allowed to" in advice()[0]
    bucket = s3.removeprefix("s3://")
    s3fs.S3FileSystem().call_s3("put_bucket_lifecycle_configuration", Bucket=bucket, LifecycleConfiguration=rules)
    assert advice() == []


def test_doctor_says_what_to_do_about_the_memory_for_slots(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=1))
    monkeypatch.setattr(doctor, "memory_limit_bytes", lambda _limit: 2 * 10**6)
    said = cli("doctor", tmp_path / "run", *SMALL)
    assert f"{os.environ['LIGHTNING_SPOT_SHM_DIR']} is too small for the slots, 1 B" in said
    assert "docker run --shm-size" in said
    assert "3 slots need 3.00 MB" in said
    monkeypatch.setenv("LIGHTNING_SPOT_SHM_DIR", str(tmp_path / "none"))
    assert "no directory for slots (LIGHTNING_SPOT_SHM_DIR" in cli("doctor", tmp_path / "run", *SMALL)
