"""The server on the trainer's host dies, hangs or is too small: training goes on, and its end is durable or named."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import SpotCheckpoint, retry
from lightning_spot.capture import attempt as attempt_module
from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import HostLink
from lightning_spot.capture.layouts import CheckpointLayouter
from lightning_spot.capture.writer import store_streamed
from lightning_spot.cli.command import main
from lightning_spot.client import starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import FencedError, ServerUnreachableError, SettingsError, TierError
from lightning_spot.interval.deadline import Deadline
from lightning_spot.protocol.record import find_record
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.runs import RunInfo
from lightning_spot.session.coordinator import Coordinator
from lightning_spot.snapshot.layout import lay_out
from lightning_spot.snapshot.manifest import snapshot_name
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Holdings
from tests.support.filled import check_archive, fill
from tests.support.ranks import RING
from tests.support.said import informed, said
from tests.support.server import RUN_ID, image_of, manifest_of, server_pid
from tests.support.snapshots import check_all, spot
from tests.support.store import GatedStore
from tests.support.trainer import Net, Probe, Stop, StopAt, data, trainer
from tests.support.waiting import lives, new_process, until

pytestmark = pytest.mark.guarantee("G24")


class Strike(pl.Callback):
    """Sends the server a signal at a step, before the last snapshot, or after it. Notes how long each batch took."""

    def __init__(self, callback: SpotCheckpoint, number: int, when: int | str) -> None:
        self.callback, self.number, self.when = callback, number, when
        self.struck: list[int] = []
        self.longest_s = 0.0
        self._last_s: float | None = None

    def strike(self) -> None:
        if not self.struck:
            host = self.callback.snapshots.snapshotter.writing.attempt.writer.host
            self.struck.append(server_pid(host))
            os.kill(self.struck[0], self.number)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        now_s = time.monotonic()
        self.longest_s = max(self.longest_s, now_s - self._last_s if self._last_s is not None else 0.0)
        if trainer.global_step == self.when:
            self.strike()
        self._last_s = time.monotonic()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.when == "before the last":
            self.strike()

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.when == "after the last":
            self.strike()


STRIKES = [
    pytest.param(
        when,
        number,
        memory_file,
        id=f"{when}-{number.name}-{'memory-file' if memory_file else 'tmpfs'}",
        marks=[] if (number is signal.SIGKILL) is memory_file else pytest.mark.soak,
    )
    for when in ("before the last", "after the last")
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for memory_file in (False, True)
]


@pytest.mark.parametrize(("when", "number", "memory_file"), STRIKES)
def test_the_end_is_durable_although_the_server_is_lost(
    tmp_path: Path,
    when: str,
    number: int,
    memory_file: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Step 40 of 40 was lost without a word, and ``fit`` returned."""
    if memory_file:
        monkeypatch.setenv("LIGHTNING_SPOT_SHM_DIR", "")  # what the server held goes with it
    caplog.set_level("INFO")
    probe, callback = Probe(), spot(tmp_path, server_call_timeout_s=1.0, notices=None)
    strike = Strike(callback, number, when)
    trainer(callback, probe, strike).fit(Net(), data())
    assert check_all(tmp_path, probe)[0].complete
    assert informed(caplog)["run-complete"]["about"] == str(tmp_path / "run-1")
    until(lambda: not lives(strike.struck[0]), "the lost server to be gone")
    new_process()
    again = spot(tmp_path, notices=None)
    trainer(again).fit(Net(), data())
    assert again.resumed_from.step == 40


def test_beside_a_server_of_another_version_no_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may have the newest snapshot: an attempt would go on from an older one. Who only looks leaves it there."""
    with monkeypatch.context() as earlier:
        (tmp_path / "earlier").mkdir()
        change = "from lightning_spot import config\nconfig.PROTOCOL_VERSION -= 1\n"
        (tmp_path / "earlier/sitecustomize.py").write_text(change)
        earlier.setattr(starting, "subprocess", subprocess)  # a fork would not read it
        earlier.setenv("PYTHONPATH", str(tmp_path / "earlier"))  # of the server that this one starts
        earlier.setattr("lightning_spot.client.server_client.PROTOCOL_VERSION", PROTOCOL_VERSION - 1)
        with pytest.raises(Stop):
            trainer(spot(tmp_path, notices=None, min_upload_interval_s=1000.0), StopAt(7)).fit(Net(), data())
    new_process()
    process = find_record(str(tmp_path / "run-1")).process()
    with pytest.raises(SettingsError, match="lightning-spot stop RUN"):
        trainer(spot(tmp_path, notices=None)).fit(Net(), data())
    assert main(["ls", str(tmp_path / "run-1")]) == 3
    assert "lightning-spot stop RUN" in capsys.readouterr().err
    assert process.alive
    assert main(["stop", str(tmp_path / "run-1")]) == 0
    assert not process.alive
    callback = spot(tmp_path, notices=None)
    trainer(callback).fit(Net(), data())
    assert (callback.resumed_from.step, callback.resumed_from.tier) == (6, "storage")


@pytest.mark.parametrize("when", [7, 20])
def test_of_a_server_that_is_lost_there_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, when: int
) -> None:
    """Three said the same."""
    # Where a machine is slow, the next server may be silent for a second, too; that this one is killed is seen at once.
    callback = spot(tmp_path, server_call_timeout_s=20.0, notices=None, min_upload_interval_s=0)
    trainer(callback, Strike(callback, signal.SIGKILL, when)).fit(Net(), data())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 1, lines
    assert len(said(caplog, "local-server-lost")) == 1


def test_a_server_lost_before_the_attempt_begins_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look, callback = Coordinator.look, spot(tmp_path, notices=None)

    def kill_behind(beginning: Coordinator) -> Survey:
        found = look(beginning)
        server = find_record(callback.location.url).process()
        assert server.kill(30.0)
        return found

    monkeypatch.setattr(Coordinator, "look", kill_behind)
    probe = Probe()
    trainer(callback, probe).fit(Net(), data())
    assert check_all(tmp_path, probe)[0].complete
    assert said(caplog, "local-server-lost")


def test_a_hung_server_blocks_training_only_for_its_timeout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It kept it for 120 s."""
    probe, callback = Probe(), spot(tmp_path, server_call_timeout_s=1.0, notices=None)
    strike = Strike(callback, signal.SIGSTOP, 20)
    run = trainer(callback, probe, strike, max_epochs=4)
    run.fit(Net(), data())
    assert run.global_step == 80
    assert strike.longest_s < 60.0  # on a machine that does much else; a few seconds on a quiet one
    assert "did not answer within server_call_timeout_s=1.0 s" in str(said(caplog, "local-server-lost")[0]["why"])
    assert check_all(tmp_path, probe)[0].complete
    until(lambda: not lives(strike.struck[0]), "the server that hung to be gone")


@pytest.mark.parametrize("local_server", [True, False])
def test_a_state_that_fits_no_memory_is_streamed(
    tmp_path: Path, local_server: bool, caplog: pytest.LogCaptureFixture
) -> None:
    probe, callback = Probe(), spot(tmp_path, local_server=local_server, memory_limit=1000, notices=None)
    with pytest.raises(Stop):
        trainer(callback, probe, StopAt(31)).fit(Net(), data())
    found = check_all(tmp_path, probe)
    assert found[0].step == 30
    for manifest in found[:2]:
        path = tmp_path / "run-1" / manifest.data_path
        check_archive(path)
    assert len(said(caplog, "past-memory")) == 1
    assert not said(caplog, "no-local-server")  # it has as little memory as was said
    caplog.set_level("INFO")
    again = spot(tmp_path, local_server=local_server, memory_limit=1000, keep=2, notices=None)
    trainer(again).fit(Net(), data())
    assert again.resumed_from.step == 30
    assert [manifest.step for manifest in LocalStore(tmp_path / "run-1").survey().manifests] == [40, 39]
    assert "run-complete" in informed(caplog)


def told(durable: Path, attempt: int = 1) -> RunInfo:
    return RunInfo(name="run", id=RUN_ID, location="", attempt=attempt, token=f"{attempt}", durable_url=str(durable))


def attempt_at(durable: Path, host: Any) -> Attempt:
    """One that writes into a ring."""
    location = Location.of(str(durable), local_server=False)
    return Attempt(location, told(durable), host, RING, CheckpointLayouter(), lineage="1" * 12)


def write(attempt: Attempt, state: Any, step: int, *, complete: bool = False) -> None:
    attempt.write(state, owned={}, step=step, complete=complete, epoch=0, world_size=1, wait_s=30.0)
    attempt.writer.wait_all(30.0)


def secured(attempt: Attempt, try_s: float) -> str:
    deadline = Deadline.of(None, try_s)
    return attempt.secure(deadline, attempt.plan(deadline), lambda: False)


def test_saves_past_memory_persist_if_no_old_one_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The ring knows nothing of them: they are said to be safe, and no urgent snapshot waits for them."""
    monkeypatch.setattr(LocalStore, "delete", Mock(side_effect=TierError("it may not be deleted", tier="")))
    host = InProcessHost(slots=4, memory_bytes=1000, open_store=LocalStore)
    host.open_run(told(tmp_path))
    attempt = attempt_at(tmp_path, host)
    for step in (1, 2, 3, 4):
        write(attempt, {"weights": torch.ones(5000)}, step)
    assert len(LocalStore(tmp_path).survey().manifests) == 4
    assert [str(facts["error"]) for facts in said(caplog, "retention-failed")] == ["it may not be deleted"]
    assert "is safe in" in secured(attempt, 60.0)
    attempt.writer.past_memory = None
    assert "safe nowhere else" in secured(attempt, 0.0)
    attempt.finish(0.0, complete=False)


@pytest.mark.parametrize("is_durable", [False, True])
def test_what_a_lost_server_had_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_durable: bool) -> None:
    """The one that was started anew has nothing to flush, and says so."""
    ask: Any = lambda _question, default: default  # noqa: E731
    link: Any = SimpleNamespace(losses=1, host=None, wait=lambda _: None, close=lambda: None, ask=ask)
    attempt = attempt_at(tmp_path, SimpleNamespace(tiers=dict))
    attempt.writer.link, attempt.writer.committed = link, manifest_of(1, nbytes=5000)
    if is_durable:
        part = memoryview(image_of(1, 5000))
        attempt.writer.committed = LocalStore(tmp_path).put_parts(manifest_of(1, nbytes=5000), iter([part]), attempt=1)
    assert attempt.finish(0.1, complete=False) is None
    found = [str(facts["why"]) for facts in said(caplog, "newest-lost")]
    assert len(found) == (not is_durable)
    assert all("lost with the snapshot server that had it" in why for why in found)


def test_a_call_cut_off_as_the_ring_is_left_starts_no_server(tmp_path: Path) -> None:
    """Another thread may be asking the server something at that moment; its connection is closed under it."""
    found = []

    def leave(*, complete: bool) -> None:
        link.ask(lambda _host: broken_off(), None)

    def broken_off() -> None:
        raise ServerUnreachableError("Remote end closed connection without response")

    host: Any = SimpleNamespace(
        leave=leave, flush=lambda _wait_s: [], tiers=dict, server_call_timeout_s=5.0, disconnect=found.clear
    )
    attempt = attempt_at(tmp_path, host)
    attempt.writer.link = link = HostLink(host, lambda: cast(Host, found.append("a new server")))
    assert attempt.finish(0.1, complete=False) is None
    assert link.losses == 0
    assert not found
    assert link.host is host


def test_what_a_lost_ring_could_not_be_told_the_next_one_is_told() -> None:
    """Else other ranks would wait for ten minutes for a snapshot that rank 0 cannot begin."""
    lost, new = SimpleNamespace(server_call_timeout_s=1.0, disconnect=lambda: None), SimpleNamespace()
    is_there, told = threading.Event(), list[Any]()

    def find() -> Host:
        assert is_there.wait(120)
        return cast(Host, new)

    def say(host: Host) -> None:
        if host is cast(Host, lost):
            raise ServerUnreachableError("it has gone")
        told.append(host)

    link = HostLink(cast(Host, lost), find)
    link.tell(say)  # by which it is seen to be lost
    link.tell(say)  # while there is none
    assert link.host is None
    is_there.set()
    until(lambda: len(told) == 2, "the new ring to be told")
    link.tell(say)
    assert told == [new] * 3


@pytest.mark.parametrize("is_left", [False, True], ids=["the only one", "left"])
def test_a_lost_ring_that_none_replaces_is_told_once(is_left: bool) -> None:
    """Each try lasts as long as a call may: who had something to tell waited twice for that."""
    tries = list[Host]()

    def say(host: Host) -> None:
        tries.append(host)
        raise ServerUnreachableError("it has gone")

    lost = cast(Host, SimpleNamespace(server_call_timeout_s=1.0, disconnect=lambda: None))
    link = HostLink(lost, (lambda: pytest.fail("no other is looked for")) if is_left else None)
    if is_left:
        link.close()
    link.tell(say)
    assert tries == [lost]


class Damaging:
    """A run with one snapshot that is durable, and a newer one that was damaged in memory before a tier took it."""

    def __init__(self, root: Path, *, complete: bool) -> None:
        self.root = root / "run"
        self.store = GatedStore(str(self.root))
        self.host = InProcessHost(slots=4, memory_bytes=2**24, open_store=lambda _url: self.store)
        self.host.open_run(told(self.root))
        self.attempt = attempt_at(self.root, self.host)
        self.state = {"weights": torch.arange(100.0)}
        self.take(1)
        assert self.host.flush(30.0) == []
        self.store.fail(TierError("not now"))
        self.take(2, complete=complete)
        self.damage()

    def take(self, step: int, *, complete: bool = False) -> None:
        write(self.attempt, self.state, step, complete=complete)
        assert self.attempt.writer.committed.step == step

    def damage(self) -> None:
        slot = self.host._server.ring.contents()[0]
        with slot.view() as image:
            image[100] ^= 1
        slot.commit.checked_s = float("-inf")  # as long ago
        self.store.fail(None)

    def durable(self) -> list[int]:
        return [manifest.step for manifest in self.store.survey().manifests]

    def end(self, wait_s: float = 30.0, *, complete: bool = False) -> tuple[bool | None, str]:
        """Whether the last snapshot is durable, and where the newest one is."""
        return self.attempt.finish(wait_s, complete=complete), self.attempt.where


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Damaging]:
    made = Damaging(tmp_path, complete=getattr(request, "param", False))
    yield made
    made.end()


def test_what_was_damaged_in_memory_is_not_called_durable(run: Damaging, caplog: pytest.LogCaptureFixture) -> None:
    """It is dropped, nothing is owed any more; an exception that ended the run was told that step 2 is durable."""
    assert run.end() == (None, "lost")
    assert run.durable() == [1]
    (facts,) = said(caplog, "newest-lost")
    assert "damaged in memory and dropped (run/step-000000002-attempt-0001" in facts["why"]


def test_a_silent_tier_is_not_reported_to_have_lost_a_snapshot(run: Damaging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "survey", Mock(side_effect=TierError("not now")))
    assert run.end() == (None, "committed in memory, and not known to be durable")


@pytest.mark.parametrize("run", [True], indirect=True)
@pytest.mark.parametrize(
    "write",
    [None, lambda weights: weights.add_(1), lambda weights: weights.data.add_(1)],
    ids=["as it was", "counted", "not"],
)
def test_the_last_snapshot_is_taken_again_if_damaged_in_memory(
    run: Damaging, write: Callable[[torch.Tensor], Any] | None
) -> None:
    """Unless weights have changed since, counted by torch or not: what is there now is another state."""
    if write is not None:
        write(run.state["weights"])
    assert run.end(complete=True) == ((True, f"durable in {run.root}") if write is None else (False, "lost"))
    assert run.durable() == ([2, 1] if write is None else [1])


def test_damage_before_a_deadline_is_logged(run: Damaging) -> None:
    """The notice's whole grace went by, and it was said to be in memory."""
    assert "dropped (run/step-000000002" in secured(run.attempt, 600.0)
    assert run.durable() == [1]


def test_what_a_tier_has_refused_is_not_called_durable(run: Damaging) -> None:
    """It was, at the end of an attempt that a later one had taken over from."""
    later = FencedError("a later one", current=2)
    run.store.errors = lambda kind, _: later if kind == "put" else None
    run.take(3)
    assert run.end() == (None, "lost")


def test_the_log_says_how_long_the_end_waits_for_uploads(
    run: Damaging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a full disk one warning came, then nothing for minutes."""
    monkeypatch.setattr(attempt_module, "SAY_S", 0.2)
    run.store.fail(TierError("No space left on device"))
    run.take(3)
    run.end(2.0)
    (facts,) = said(caplog, "upload-awaited")
    assert facts["wait_s"] == pytest.approx(2.0, abs=0.5)
    assert "No space left on device" in facts["about"]


def test_a_fenced_snapshot_is_not_reported_lost_with_a_server(
    run: Damaging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers may refuse a shard as it is committed: no tier is known to."""
    run.take(3)
    later = FencedError("attempt 2 has taken over", current=2)
    monkeypatch.setattr(run.host, "seal", Mock(side_effect=later))
    write(run.attempt, run.state, 4)
    monkeypatch.setattr(run.host, "safe_step", lambda: None)
    monkeypatch.setattr(LocalStore, "survey", lambda _store: Holdings())
    assert run.end() == (None, "lost")
    (facts,) = said(caplog, "newest-lost")
    assert "step-000000003-attempt-0001, is not in storage: attempt 2 has taken over" in facts["why"]


def test_no_earlier_attempt_and_no_file_makes_a_snapshot_safe(tmp_path: Path) -> None:
    """Of later steps than it, and safe: a run that was begun afresh, or anew from an older snapshot, has these."""
    stores: dict[str, GatedStore] = {}
    durable = str(tmp_path / "run")
    host = InProcessHost(slots=4, memory_bytes=2**24, open_store=lambda url: stores.setdefault(url, GatedStore(url)))

    def save(step: int, attempt: int, destinations: list[str] | None = None, **fields: Any) -> None:
        lease = host.lease(1000, 0.0)
        lease.map[:1000] = image_of(step, 1000)
        host.seal(lease, manifest_of(step, attempt, **fields), destinations)

    for attempt, step in ((1, 900), (2, 50)):
        host.open_run(told(tmp_path / "run", attempt))
        save(step, attempt, lineage=str(attempt) * 12)
        if attempt == 1:
            assert host.flush(30.0) == []
            assert host.safe_step() == 900
            stores[durable].fail(TierError("full"))
    save(50, 2, [str(tmp_path / "files")], name="best.ckpt", file="")
    until(lambda: (tmp_path / "files" / "best.ckpt").exists(), "the file")
    until(lambda: len([slot for slot in host._server.ring.contents() if slot.safe]) == 2, "the server to know")
    assert host.safe_step() is None
    attempt = attempt_at(tmp_path / "run", host)
    attempt.writer.committed = manifest_of(50, 2)
    assert "safe nowhere else" in secured(attempt, 0.0)
    stores[durable].fail(None)
    assert host.flush(30.0) == []
    assert host.safe_step() == 50
    attempt.finish(0.0, complete=False)


def test_streamed_parts_are_the_file_with_right_checksums() -> None:
    state = {
        "weights": [torch.randn(701, 13), torch.arange(5), torch.zeros(0), torch.randn(3_000_000).to(torch.bfloat16)],
        "tied": (shared := torch.randn(64, 64), shared),
        "words": "x" * 5000,
    }
    layout = lay_out(state)
    image = fill(layout)
    for part_bytes in (1000, 4096, 2**20, 2**24):
        put = Mock()
        store_streamed(layout, manifest_of(1, part_bytes=part_bytes), put)
        parts = [bytes(part) for part in put.put_parts.call_args.args[1]]
        assert {len(part) for part in parts[:-1]} <= {part_bytes}
        assert b"".join(parts) == bytes(image)
    loaded = torch.load(io.BytesIO(bytes(image)), weights_only=True)
    assert torch.equal(loaded["weights"][3], state["weights"][3])


@pytest.mark.parametrize("asked", ["runs", "snapshots"])
def test_a_server_lost_while_a_resume_asks_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """It alone has the newest snapshot, and the next server takes that over."""
    with pytest.raises(Stop):
        trainer(spot(tmp_path), StopAt(10)).fit(Net(), data())
    record, left = find_record(str(tmp_path / "run-1")), [True]
    newest = tmp_path / "run-1" / f"{snapshot_name(9, 1)}"
    until(lambda: (newest / "manifest.json").exists(), "the newest snapshot to be durable")
    shutil.rmtree(newest)

    def is_lost(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **more: Any) -> Any:
            if left and left.pop():
                server = record.process()
                server.kill(5.0)
            return real(*arguments, **more)

        return ask

    if asked == "runs":
        call, lost = ServerClient.call, is_lost(ServerClient.call)
        monkeypatch.setattr(
            ServerClient,
            "call",
            lambda client, method, path, *what, **more: (lost if path == "/v1/runs" else call)(
                client, method, path, *what, **more
            ),
        )
    else:
        monkeypatch.setattr(LocalServer, "listing", is_lost(LocalServer.listing))
    monkeypatch.setattr(retry, "DEFAULT_POLICY", RetryPolicy(tries=3, first_pause_s=0.05))
    probe = Probe()
    with pytest.raises(Stop):
        trainer(spot(tmp_path), probe, StopAt(11)).fit(Net(), data())
    assert not left
    assert min(probe.states) == 9
