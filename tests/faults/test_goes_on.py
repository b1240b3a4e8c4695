"""A thread beside training that fails at one thing, as where memory runs out for a moment, goes on with the next."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_spot.capture.batch import CopyJob
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.host_link import HostLink
from lightning_spot.capture.slot_pool import SlotPool, give_back
from lightning_spot.capture.writer import Background
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.stores import open_store
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import (
    FailureReason,
    ServerRefusedError,
    SnapshotNotFoundError,
    TierReason,
)
from lightning_spot.goodput import records
from lightning_spot.goodput.records import read_records
from lightning_spot.http import program
from lightning_spot.protocol.wire import PROTOCOL_HEADER, Address
from lightning_spot.retry import RetryPolicy, with_retries
from lightning_spot.run import attempts
from lightning_spot.server import uploads
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.store.fences import Claim
from lightning_spot.store.local import LocalStore
from tests.faults.test_harmless import fit
from tests.support.copies import Desk as Copies
from tests.support.ranks import Desk
from tests.support.said import said
from tests.support.server import named_run, served
from tests.support.uploads import commit
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G21")

SOON_S = 120.0


def once(does: Callable[..., Any], failed: threading.Event) -> Callable[..., Any]:
    """Fails when it is called for the first time."""
    times = itertools.count()  # several threads may call it at once

    def call(*arguments: Any, **named: Any) -> Any:
        if next(times) == 0:
            failed.set()
            raise MemoryError("none is left")
        return does(*arguments, **named)

    return call


def test_a_task_thread_continues_after_a_failure_while_idle() -> None:
    failed, done = threading.Event(), threading.Event()
    tasks = Background("spot-test", idle_s=once(lambda: None, failed))
    assert failed.wait(SOON_S)
    tasks.put(done.set)
    assert done.wait(SOON_S)
    assert tasks.close(SOON_S)


def test_copies_go_on_beside_training(caplog: pytest.LogCaptureFixture) -> None:
    desk, failed = Copies(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is not threading.main_thread() and not failed.is_set():
            failed.set()
            raise MemoryError("none is left")
        return time.monotonic()

    copier = Copier(clock=clock)
    for _ in range(2):
        job = copier.start(desk.pieces, desk.view)
        until(lambda job=job: job.is_done, "copies that nobody helps with")  # type: ignore[misc]
    assert failed.is_set()
    copier.close()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1


def test_who_needs_a_slot_waits_for_no_thread_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    monkeypatch.setattr(SlotPool, "make", once(SlotPool.make, failed))
    with contextlib.closing(Desk(tmp_path)) as desk:
        desk.writer.warm(3_000_000)
        until(lambda: desk.writer.ready, "a snapshot may begin")
        assert failed.is_set()
        desk.begin(1, desk.checkpoint()).result(SOON_S)


@pytest.mark.parametrize("where", [[(CopyJob, "wait")], [(CopyJob, "wait"), (HostLink, "is_loss")]])
def test_nobody_waits_for_a_snapshot_whose_end_has_failed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, where: list[tuple[type, str]]
) -> None:
    for each in where:
        monkeypatch.setattr(*each, once(getattr(*each), threading.Event()))
    first = desk.begin(1, desk.checkpoint())
    desk.writer.copied()
    assert str(first.exception(SOON_S)) == "MemoryError: none is left"
    assert desk.begin(2, desk.checkpoint()).result(SOON_S).step == 2
    began_s = time.monotonic()
    desk.writer.wait_all(SOON_S)
    assert time.monotonic() - began_s < SOON_S / 2


def test_waiting_for_a_snapshot_that_fails_gives_one_warning(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a run, that was an error of its own: the end failed, too, and was said to."""
    waits = threading.Event()

    def fails(_: Any) -> None:
        waits.wait(SOON_S)
        raise MemoryError("none is left")

    monkeypatch.setattr(CopyJob, "wait", fails)
    done = desk.begin(1, desk.checkpoint(), complete=True)
    threading.Timer(0.5, waits.set).start()
    desk.writer.wait_all(SOON_S)
    assert FailureReason.UNEXPECTED.caused(done.exception())
    (facts,) = said(caplog, "snapshot-failed")
    assert facts["snapshot"] == "step-000000001-attempt-0001-complete"
    assert "none is left" in str(facts["error"])
    assert len(caplog.records) == 1


def test_a_tier_is_asked_again_whatever_fails_in_that() -> None:
    failed, bounds = threading.Event(), RetryPolicy(first_pause_s=0.01)
    assert with_retries(once(lambda: 7, failed), bounds, "a tier") == 7
    with pytest.raises(SnapshotNotFoundError):  # it has answered
        with_retries(Mock(side_effect=[SnapshotNotFoundError("none"), 7]), bounds, "a tier")
    with pytest.raises(MemoryError):
        with_retries(Mock(side_effect=MemoryError), bounds, "a tier")


def test_a_slot_is_given_back_whatever_fails_in_that(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was being made ahead kept the server from making any other: no snapshot was taken after that."""
    lease = desk.host.lease(1000, 0.0)
    monkeypatch.setattr(desk.host, "abort", once(desk.host.abort, threading.Event()))
    give_back(desk.host, lease)
    assert [slot["state"] for slot in desk.host._server.status()["slots"]] == ["free"]


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    made = SnapshotServer(slots=1, memory_bytes=2**26, open_store=open_store)
    made.open_run(named_run("run"))
    yield made
    made.close()


def test_a_slot_is_free_where_nobody_comes_to_know_of_it(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "Upload", once(uploads.Upload, threading.Event()))
    with pytest.raises(MemoryError):
        server.uploads.lease("run", 1, 1000)
    assert server.uploads.lease("run", 1, 1000).nbytes == 1000


def test_a_server_that_fails_a_request_reports_it_and_is_retried(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An attempt could not begin, and a snapshot of the end was not waited for, as if no server were there."""
    whole, body = server.flush, {"run": None, "wait_s": 0.0}
    with served(server) as port:
        client = ServerClient(Address(host="127.0.0.1", port=port))
        monkeypatch.setattr(server, "flush", once(whole, threading.Event()))
        assert client.call("POST", "/v1/flush", body, again=True) == {"unreached": []}
        monkeypatch.setattr(server, "flush", once(whole, threading.Event()))
        with pytest.raises(
            ServerRefusedError,
            match="MemoryError: none is left",
            check=TierReason.SERVER_FAILED.caused,
        ):
            client.call("POST", "/v1/flush", body)
        monkeypatch.setattr(server, "flush", Mock(side_effect=MemoryError("for good")))
        with pytest.raises(ServerRefusedError, check=TierReason.SERVER_FAILED.caused):
            client.call("POST", "/v1/flush", body, again=True)
        client.close()
    assert [getattr(record, "spot_key", "") for record in caplog.records].count("request-failed") == 1


def test_a_file_that_cannot_be_read_to_its_end_breaks_off(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that the server had failed came in place of the rest of the file, as if it were that."""

    async def sendfile(_loop: Any, transport: asyncio.Transport, *_what: Any) -> None:
        transport.write(b"x" * 100)
        raise MemoryError("none is left")

    monkeypatch.setattr(asyncio.BaseEventLoop, "sendfile", sendfile)
    with served(server) as port:
        client = ServerClient(Address(host="127.0.0.1", port=port))
        manifest = commit(client, 1, bytes(400))
        client.close()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SOON_S)
        headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}
        connection.request("GET", f"/v1/files/run/{manifest.name}/model.ckpt", headers=headers)
        answer = connection.getresponse()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        connection.close()
    assert [facts["why"] for facts in said(caplog, "read-broke-off")] == ["MemoryError: none is left"]


def test_a_server_ends_properly_whatever_fails_in_its_last_flush(
    server: SnapshotServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left the memory of its slots behind."""
    monkeypatch.setattr(server, "flush", once(server.flush, threading.Event()))

    async def drain() -> list[str]:
        return await program._drain(server, Mock(**{"uploads.asked_s": float("-inf")}), 0.0, program._Signals())

    assert asyncio.run(drain()) == ["MemoryError: none is left"]
    assert server.uploads.closing


def test_server_memory_is_freed_whatever_fails_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SnapshotServer(slots=1, memory_bytes=2**26, open_store=open_store, area=tmp_path / "area")
    server.open_run(named_run("run"))
    server.uploads.lease("run", 1, 1000)
    monkeypatch.setattr(server.uploads, "close", once(server.uploads.close, threading.Event()))
    with pytest.raises(MemoryError):
        server.close()
    assert not (tmp_path / "area").exists()


def test_the_ring_is_left_whatever_fails_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of a training that had ended kept its server for as long as the program."""
    left: list[bool] = []
    leave = InProcessHost.leave

    def noted(host: InProcessHost, *, complete: bool) -> None:
        left.append(complete)
        leave(host, complete=complete)

    monkeypatch.setattr(InProcessHost, "leave", noted)
    monkeypatch.setattr(InProcessHost, "flush", Mock(side_effect=ServerRefusedError("no", status=400)))
    fit(tmp_path / "run", min_upload_interval_s=60.0)
    assert left == [False]


def test_an_attempt_is_claimed_whatever_fails_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no tier would refuse what earlier attempts write."""
    failed = threading.Event()
    monkeypatch.setattr(attempts, "open_store", once(attempts.open_store, failed))
    url = str(tmp_path / "run")
    claim = Claim(attempt=3, run_id="1" * 32, digest="t", location=url, started_unix_s=0.0)
    watch = attempts.ClaimWatch(url, claim, is_made=False, fenced=lambda error: pytest.fail(str(error)))
    until(lambda: LocalStore(url).claimed() == 3, "the claim")
    assert failed.is_set()
    watch.close()


def test_goodput_is_noted_at_the_next_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()
    monkeypatch.setattr(records, "write_record", once(records.write_record, failed))
    kept = records.Journal(str(tmp_path), 1, heartbeat_s=0.05, begun_unix_s=time.time())
    assert until(lambda: read_records(str(tmp_path)), "a record")[0].end == "running"
    kept.close("complete")
    assert read_records(str(tmp_path))[0].end == "complete"
    assert [facts["why"] for facts in said(caplog, "goodput-failing")] == ["MemoryError: none is left"]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
