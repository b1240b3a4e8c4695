"""Events: a function is called with them and webhooks get them; neither harms a training, nor do logs have the URL."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from lightning_spot import AutoResume, Event, PreemptedError, PreemptionGuard, SettingsError, SpotCheckpoint
from lightning_spot.config import read_environment
from lightning_spot.events import Events
from lightning_spot.say import recovered, say
from tests.support.answering import Answering
from tests.support.program import run
from tests.support.said import said
from tests.support.server import RunningServer
from tests.support.snapshots import serverless
from tests.support.trainer import At, Net, Stop, StopAt, data, trainer
from tests.support.training import train
from tests.support.waiting import new_process, until

SECRET = "T000-very-secret"
BROKEN = "<!channel> & more"


class Chat(Answering):
    """A webhook over real HTTP.

    Attributes:
        statuses: of the answers; the last one stays.
        got: bodies of the requests that were answered.
        gate: requests are answered while it is set.
    """

    def __init__(self) -> None:
        self.statuses, self.got, self.gate, self.asked = [200], list[dict[str, Any]](), threading.Event(), 0
        self.paths: list[str] = []
        self.gate.set()
        super().__init__()
        self.host, self.url = self.url, f"{self.url}/services/{SECRET}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked += 1
        self.paths.append(f"{request.command} {request.path}")
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        self.gate.wait(120)
        self.got.append(body)
        request.send_response(self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0], "no\x1b[2J")
        request.send_header("Location", f"{self.url}/elsewhere")
        request.send_header("Content-Length", "0")
        request.end_headers()

    def close(self) -> None:
        self.gate.set()
        super().close()

    @property
    def kinds(self) -> list[str]:
        return [body["kind"] for body in self.got]


@pytest.fixture
def chat() -> Iterator[Chat]:
    with contextlib.closing(Chat()) as running:
        yield running


@contextlib.contextmanager
def telling(webhook: str, **more: Any) -> Iterator[Events]:
    events = Events(webhook=webhook, **more)
    try:
        yield events
    finally:
        events.close(10.0)


# -- what a training tells --------------------------------------------------------------------------------------------


def test_a_run_that_is_resumed_and_finished(tmp_path: Path, chat: Chat) -> None:
    events: list[Event] = []
    told: dict[str, Any] = {"on_event": events.append, "webhook": chat.url}
    with pytest.raises(Stop):
        trainer(serverless(tmp_path / "run-1", **told), StopAt(6)).fit(Net(), data())
    assert events == []
    trainer(serverless(tmp_path / "run-1", **told)).fit(Net(), data())
    assert [event.kind for event in events] == chat.kinds == ["resumed", "finished"]
    resumed, finished = events
    assert (resumed.run, resumed.attempt, resumed.step) == ("run-1", 2, 6)
    assert resumed.detail["snapshot"] == "step-000000006-attempt-0001"
    assert resumed.detail["exact"] is True
    assert (finished.step, finished.detail["persisted"]) == (40, True)
    assert time.time() - 300 < finished.time_unix_s <= time.time()
    new_process()
    trainer(serverless(tmp_path / "run-1", **told)).fit(Net(), data())  # nothing is left to train
    assert len(events) == 2


def taken(step: int) -> At:
    """Has the process told to end, in a step."""
    return At(step, lambda: os.kill(os.getpid(), signal.SIGTERM), "on_train_batch_start")


def test_a_notice(tmp_path: Path, chat: Chat) -> None:
    seen: list[tuple[Event, bool]] = []

    def see(event: Event) -> None:
        seen.append((event, any((tmp_path / "run-1").glob("step-*/manifest.json"))))

    guarded = serverless(tmp_path / "run-1", notices="signal", on_event=see, webhook=chat.url)
    with pytest.raises(PreemptedError):
        trainer(guarded, taken(5)).fit(Net(), data())
    [(event, is_stored)] = seen
    assert is_stored  # what a function takes of the time that is left comes last
    assert (event.kind, event.run, event.attempt, event.detail["source"]) == ("preempted", "run-1", 1, "signal")
    assert chat.kinds == ["preempted"]


def test_what_a_function_raises_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError(event.kind)

    with pytest.raises(PreemptedError):  # its exit code counts
        trainer(serverless(tmp_path / "run-1", notices="signal", on_event=broken, on_error="raise"), taken(5)).fit(
            Net(), data()
        )
    assert [facts["about"] for facts in said(caplog, "on-event-failed")] == ["preempted"]
    trainer(serverless(tmp_path / "run-1", on_event=broken, on_error="raise")).fit(Net(), data())
    assert [facts["about"] for facts in said(caplog, "on-event-failed")] == ["preempted", "resumed", "finished"]


def test_callbacks_that_stand_alone(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_WEBHOOK", chat.url)
    with pytest.raises(Stop):
        trainer(serverless(tmp_path / "run-1"), StopAt(6)).fit(Net(), data())
    parts = AutoResume(str(tmp_path / "run-1"), local_server=False), PreemptionGuard("signal")
    with pytest.raises(PreemptedError):
        trainer(*parts, taken(6)).fit(Net(), data())
    assert chat.kinds == ["resumed", "preempted"]


def test_one_of_two_ranks_tells(tmp_path: Path, chat: Chat, warm_python: str) -> None:
    """The notice comes to the other one."""
    told = {"ranks": 2, "notices": "signal", "webhook": chat.url}
    run(warm_python, train, tmp_path, code=143, notice=[1, 5], **told)
    outcome = run(warm_python, train, tmp_path, **told)
    assert chat.kinds == ["preempted", "resumed", "finished"]
    assert [body["attempt"] for body in chat.got] == [1, 2, 2]
    assert SECRET not in outcome.log


def test_a_function_is_called_under_no_lock_of_a_logger() -> None:
    lock, seen = threading.RLock(), list[bool]()

    def see(event: Event) -> None:
        seen.append(lock.acquire(timeout=5.0))
        lock.release()

    events = Events(see)
    with lock:
        say(logging.WARNING, "upload-failing", "{about} fails", about=f"{SECRET}-1")
        assert seen == []
    events.close(10.0)
    assert seen == [True]


def test_a_server_whose_storage_fails_for_a_while(
    tmp_path: Path, chat: Chat, start_server: Callable[..., RunningServer]
) -> None:
    storage, away = tmp_path / "storage", tmp_path / "away"
    storage.mkdir()
    server = start_server("--storage", str(storage), environment={"LIGHTNING_SPOT_WEBHOOK": chat.url})

    def break_it() -> None:
        storage.rename(away)
        storage.write_text("")

    def mend() -> None:
        until(lambda: chat.got, "it to be degraded")
        storage.unlink()
        away.rename(storage)
        until(lambda: len(chat.got) > 1, "it to be recovered")

    told = serverless(tmp_path / "run-1", local_server=True, servers=server.url, min_upload_interval_s=0)
    trainer(told, At(4, break_it), At(10, mend)).fit(Net(), data())
    assert chat.kinds == ["degraded", "recovered"]
    assert (chat.got[0]["run"], chat.got[0]["attempt"], chat.got[0]["detail"]["cause"]) == ("", 0, "upload-failing")
    assert SECRET not in server.log.read_text()


def test_a_drill_tells_no_chat(tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_DRILL", str(tmp_path / "drill"))
    events: list[Event] = []
    trainer(serverless(tmp_path / "run-1", on_event=events.append, webhook=chat.url)).fit(Net(), data())
    assert [event.kind for event in events] == ["finished"]
    assert chat.asked == 0


def test_a_webhook_that_hangs_holds_nobody_up_for_long(
    tmp_path: Path, chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    chat.gate.clear()
    trainer(serverless(tmp_path / "run-1", webhook=chat.url)).fit(Net(), data())
    assert [facts["about"] for facts in said(caplog, "webhook-failing")] == [chat.host]
    assert SECRET not in caplog.text


def test_nothing_listens_after_the_end(tmp_path: Path, chat: Chat) -> None:
    before = set(threading.enumerate())  # what other tests have left hanging
    trainer(serverless(tmp_path / "run-1", webhook=chat.url)).fit(Net(), data())
    say(logging.WARNING, "upload-failing", "{about} fails", about="of another")
    recovered("upload-failing", "{about} works", about="of another")
    assert chat.kinds == ["finished"]
    assert not [each for each in set(threading.enumerate()) - before if each.name == "spot-webhook"]
    events = Events(print)
    left = weakref.ref(events)
    events.close(1.0)
    del events
    gc.collect()
    assert left() is None


# -- the webhook ------------------------------------------------------------------------------------------------------


def test_the_body(chat: Chat) -> None:
    with telling(chat.url, now=lambda: ("run-1", 2, 40)) as events:
        events.emit("degraded", BROKEN, cause="upload-failing")
    [body] = chat.got
    text = body.pop("text")
    assert body.keys() == {"kind", "run", "attempt", "step", "time_unix_s", "host", "detail"}
    assert (body["run"], body["attempt"], body["step"]) == ("run-1", 2, 40)
    assert body["detail"] == {"message": BROKEN, "cause": "upload-failing"}
    assert "run-1" in text
    assert "&lt;!channel&gt; &amp; more" in text  # it calls nobody, and leads nowhere
    with telling(chat.url) as events:
        events.emit("degraded", "x" * 100_000)
    assert len(chat.got[1]["text"]) <= 1000


def test_events_come_in_order_and_the_newest_ones_count(chat: Chat) -> None:
    chat.gate.clear()
    with telling(chat.url) as events:
        events.emit("resumed", "0")
        until(lambda: chat.asked, "the first one to be sent")
        for number in range(1, 200):
            events.emit("degraded", str(number))
        chat.gate.set()
        until(lambda: len(chat.got) == 65, "all that are kept")
    assert [int(body["detail"]["message"]) for body in chat.got] == [0, *range(136, 200)]


@pytest.mark.parametrize(
    ("statuses", "asked"),
    [
        *(([status, 204], 2) for status in (500, 503, 429, 408)),
        *(([status], 1) for status in (301, 302, 307, 308, 400, 401, 404, 410)),
        ([503], 5),
    ],
)
def test_it_is_tried_again_where_that_may_help(
    chat: Chat, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, statuses: list[int], asked: int
) -> None:
    """Nor does an event go where the other side says."""
    monkeypatch.setattr("lightning_spot.retry.time.sleep", lambda _: None)
    chat.statuses = [*statuses]
    with telling(chat.url) as events:
        events.emit("resumed", "")
    assert chat.paths == asked * [f"POST /services/{SECRET}"]
    failed = [] if statuses[-1] == 204 else [f"HTTP status {statuses[-1]}"]
    assert [facts["why"] for facts in said(caplog, "webhook-failing")] == failed
    assert SECRET not in caplog.text
    assert "\x1b" not in caplog.text


def test_it_works_again(chat: Chat, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chat.statuses = [404, 204]
    with telling(chat.url) as events:
        events.emit("resumed", "")
        events.emit("finished", "")
    found = [record.levelno for record in caplog.records if getattr(record, "spot_key", "") == "webhook-failing"]
    assert found == [logging.WARNING, logging.INFO]


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with telling(f"http://127.0.0.1:1/{SECRET}") as events:
        events.emit("resumed", "")
        events.close(0.2)
    assert len(said(caplog, "webhook-failing")) == 1
    assert SECRET not in caplog.text


def test_a_proxy_of_the_environment(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", chat.host)
    monkeypatch.delenv("no_proxy", raising=False)
    with telling(f"http://chat.invalid/{SECRET}") as events:
        events.emit("resumed", "")
    assert chat.paths == [f"POST http://chat.invalid/{SECRET}"]


def test_no_error_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError) as raised:
        SpotCheckpoint("run-1", webhook=f"https://chat.example.com:{SECRET}/x")
    assert raised.value.__context__ is None
    assert SECRET not in str(raised.value)
    monkeypatch.setenv("LIGHTNING_SPOT_WEBHOOK", f"ftp://{SECRET}")
    with pytest.raises(SettingsError, match="LIGHTNING_SPOT_WEBHOOK") as raised:
        read_environment()
    assert SECRET not in str(raised.value)
    monkeypatch.setenv("LIGHTNING_SPOT_WEBHOOK", f"https://chat.example.com/{SECRET}")
    assert SECRET not in repr(read_environment())
