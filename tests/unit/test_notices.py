"""Notice sources: one conformance suite for all of them, and what is special about each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import UserList
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import NoticeUnavailableError, SettingsError
from lightning_spot.preemption import clouds, signals
from lightning_spot.preemption.clouds import (
    AlibabaSource,
    AwsSource,
    AzureSource,
    GcpSource,
    detect_cloud,
)
from lightning_spot.preemption.notice import Notice, NoticeSource
from lightning_spot.preemption.signals import SignalSource
from lightning_spot.preemption.watcher import CallSource, FileSource, Watcher, open_sources
from tests.support.metadata_server import MetadataServer
from tests.support.said import said, said_about
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G26")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """It is given more time than one beside a real machine, which has its processors to itself."""
    monkeypatch.setattr(clouds, "ASK_S", 20.0)
    running = MetadataServer()
    yield running
    running.close()


@dataclass
class Subject:
    """A source under test, and how to make its notice come."""

    source: NoticeSource
    announce: Callable[[float], None]


CLOUDS: dict[str, Callable[[str], NoticeSource]] = {
    "aws": AwsSource,
    "gcp": lambda url: GcpSource(url, hold_s=0.2),
    "azure": AzureSource,
    "alibaba": AlibabaSource,
}


@pytest.fixture(params=[*CLOUDS, "file", "call", "signal"])
def subject(request: pytest.FixtureRequest, server: MetadataServer, tmp_path: Path) -> Iterator[Subject]:
    if request.param in CLOUDS:
        yield Subject(CLOUDS[request.param](server.url), server.announce)
    elif request.param == "file":
        yield Subject(FileSource(tmp_path / "notice"), lambda s: (tmp_path / "notice").write_text(str(s)) and None)
    elif request.param == "call":
        answers: list[float] = []
        yield Subject(CallSource(lambda: answers[0] if answers else None), answers.append)
    else:
        source = SignalSource(["SIGUSR2"], grace_period_s=60.0)
        source.install()
        yield Subject(source, lambda _: os.kill(os.getpid(), signal.SIGUSR2))
        source.restore()


def test_nothing_then_a_notice(subject: Subject) -> None:
    assert [subject.source.poll(), subject.source.poll()] == [None, None]
    subject.announce(60.0)
    notice = until(subject.source.poll, "a notice")
    assert notice.kind == "stop"
    assert notice.source == subject.source.name
    assert notice.text
    expected = 30.0 if subject.source.name == "gcp" else 60.0
    assert notice.grace_period_s == pytest.approx(expected, abs=10.0)  # whole seconds, on a machine that may be slow
    assert notice.deadline_s == pytest.approx(time.monotonic() + expected, abs=10.0)
    subject.source.close()
    subject.source.close()


@pytest.mark.parametrize("cloud", ["aws", "azure", "alibaba"])
@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_deadline_is_by_the_clock_that_named_it(server: MetadataServer, cloud: str, ahead_s: float) -> None:
    """That of a VM may be an hour off after its start: the deadline was past, or an hour away."""
    source, server.ahead_s = CLOUDS[cloud](server.url), ahead_s
    server.announce(60.0)
    assert until(source.poll, "a notice").grace_period_s == pytest.approx(60.0, abs=10.0)


def test_the_first_notice_is_latched(subject: Subject) -> None:
    watcher = Watcher([subject.source])
    subject.announce(60.0)
    until(subject.source.poll, "a notice")
    watcher.start()
    first = until(lambda: watcher.notice, "the notice")
    time.sleep(0.3)  # the fake server's time slides with every question
    assert watcher.notice is first
    watcher.stop()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_no_answer_is_no_notice(cloud: str, server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    source = CLOUDS[cloud](server.url)
    assert source.poll() is None  # the proxy was not asked
    server.garbage = True
    server.announce(60.0)
    with pytest.raises(NoticeUnavailableError):
        source.poll()
    server.garbage = False
    server.close()
    with pytest.raises(NoticeUnavailableError, match=rf"{cloud} .*http://127\.0\.0\.1"):
        source.poll()


def test_a_hanging_service_is_given_up(server: MetadataServer) -> None:
    server.hang = True
    started = time.monotonic()
    with pytest.raises(NoticeUnavailableError):
        clouds.ask(server.url, {}, source="aws", wait_s=0.2)
    assert time.monotonic() - started < 15  # it would hang for 30 s


def test_aws_renews_its_token(server: MetadataServer) -> None:
    server.token_uses = 3
    source = AwsSource(server.url)
    for _ in range(6):
        assert source.poll() is None
    assert server.tokens > 3
    server.announce(100)
    assert "terminate" in source.poll().text


def test_aws_recommends(server: MetadataServer) -> None:
    server.rebalance = True
    watcher = Watcher([AwsSource(server.url)])
    watcher.start()
    advice = until(lambda: watcher.advice, "the recommendation")
    assert advice.kind == "advice"
    assert watcher.notice is None
    watcher.stop()


def test_gcp_hears_at_once_what_it_waits_for(server: MetadataServer) -> None:
    source = GcpSource(server.url, hold_s=200)
    assert source.poll() is None
    threading.Timer(0.2, server.announce, [30.0]).start()
    started = time.monotonic()
    assert source.poll() is not None
    assert time.monotonic() - started < 60


def test_gcp_maintenance_and_another_server(server: MetadataServer) -> None:
    server.maintenance = True
    assert "maintenance" in GcpSource(server.url, hold_s=0.1).poll().text


def test_azure_event_of_another_vm_and_a_withdrawn_one(server: MetadataServer) -> None:
    server.concerned = "vm-2"
    server.announce(30)
    source = AzureSource(server.url)
    assert source.poll() is None
    server.concerned = "vm-1"
    watcher = Watcher([source])
    source.every_s = 0.01
    watcher.start()
    until(lambda: watcher.notice, "the event")
    server.announce(None)
    until(lambda: watcher.notice is None, "its withdrawal")
    server.announce(30)
    until(lambda: watcher.notice, "the event again")
    watcher.accept()
    server.announce(None)
    time.sleep(0.2)
    assert watcher.notice is not None  # it is being acted on
    watcher.stop()


def test_azure_may_take_its_time_for_the_first_answer(server: MetadataServer) -> None:
    server.slow_first_s = 0.3
    server.announce(30)
    assert AzureSource(server.url).poll() is not None


def test_a_broken_source_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def call() -> bool:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("not yet")
        return True

    source = CallSource(call)
    source.every_s = 0.01
    watcher = Watcher([source])
    watcher.start()
    until(lambda: watcher.notice, "the notice after two failures")
    assert said_about(caplog, "notices-unavailable") == ["call"]
    watcher.stop()


def test_a_call_may_answer_in_several_ways() -> None:
    own = Notice(source="mine", kind="advice", text="soon", seen_s=0.0)
    false, true, seconds, notice = (CallSource(lambda value=value: value).poll() for value in (False, True, 12, own))
    assert false is None
    assert (true.grace_period_s, seconds.grace_period_s) == (None, 12.0)
    assert notice is own
    with pytest.raises(NoticeUnavailableError, match="'soon'"):
        CallSource(lambda: "soon").poll()


def test_a_file_may_say_why(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("maintenance tonight")
    notice = FileSource(tmp_path / "notice").poll()
    assert notice.grace_period_s is None
    assert "maintenance tonight" in notice.text
    with pytest.raises(NoticeUnavailableError):
        FileSource(tmp_path).poll()


def test_signals_are_counted_and_handlers_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_GRACE_PERIOD_S", "25")
    before = signal.getsignal(signal.SIGTERM)
    source = SignalSource()
    watcher = Watcher([source])
    watcher.signals.install()
    watcher.signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert watcher.notice.grace_period_s == 25
    assert watcher.signals.repeated == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert watcher.signals.repeated == 1
    watcher.signals.restore()
    assert signal.getsignal(signal.SIGTERM) == before


def torch_raises(*_: Any) -> None:
    """Stands for torch's handler of SIGCHLD: a worker has died."""
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")


@pytest.fixture
def source() -> Iterator[SignalSource]:
    """Watches SIGUSR2 where torch listens for workers that die."""
    before = signal.signal(signal.SIGCHLD, torch_raises)
    source = SignalSource(["SIGUSR2"])
    source.install()
    yield source
    source.restore()
    signal.signal(signal.SIGCHLD, before)


def hear_of_a_worker_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends by itself, and then one by a signal to the whole group, which comes here a moment later."""
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        signal.raise_signal(signal.SIGCHLD)
    monkeypatch.setattr(signals, "GROUP_S", 20.0)  # a thread may be kept waiting for longer than a signal takes
    late = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    late.start()
    signal.raise_signal(signal.SIGCHLD)
    late.join()


def test_a_worker_may_get_a_group_signal_before_this_process(
    source: SignalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that was killed alone, torch's error comes a moment later."""
    source.expect_workers()
    hear_of_a_worker_first(monkeypatch)
    assert source.notice is not None
    source.restore()
    source.expect_workers()  # nothing: signals are watched no more
    assert signal.getsignal(signal.SIGCHLD) is torch_raises


def test_workers_that_end_by_a_signal_do_not_interrupt_the_end(
    source: SignalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is kept until the last snapshot is safe; torch's error of a worker came in the middle of that."""
    source.hold()
    hear_of_a_worker_first(monkeypatch)
    signal.raise_signal(signal.SIGCHLD)
    source.restore()
    assert signal.getsignal(signal.SIGCHLD) is torch_raises


def test_worker_errors_return_later_even_to_a_wrapped_handler(source: SignalSource) -> None:
    signal.raise_signal(signal.SIGUSR2)
    ours = signal.getsignal(signal.SIGCHLD)
    assert callable(ours)
    signal.signal(signal.SIGCHLD, lambda number, frame: ours(number, frame))
    signal.raise_signal(signal.SIGCHLD)
    source.restore()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        signal.raise_signal(signal.SIGCHLD)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: open_sources("asw"), r"'asw'.* auto, aws.*'aws'"),
        (lambda: open_sources(3), "3"),
        (lambda: SignalSource(["SIGKILL"]), "SIGKILL"),
        (lambda: open_sources("signal"), "LIGHTNING_SPOT_GRACE_PERIOD_S='soon'"),
        (lambda: open_sources("auto"), "azrue"),
    ],
)
def test_bad_settings(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], why: str) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_CLOUD", "azrue")
    if "GRACE" in why:
        monkeypatch.setenv("LIGHTNING_SPOT_GRACE_PERIOD_S", "soon")
    with pytest.raises(SettingsError, match=why):
        make()


@pytest.mark.parametrize(
    ("notices", "names"),
    [
        ("auto", "signal file"),
        (["aws", "file:/x", "SIGUSR1", lambda: None], "aws file signal call"),
        (UserList(["aws", "SIGUSR1"]), "aws signal"),  # as omegaconf's
        (None, ""),
    ],
)
def test_choosing(monkeypatch: pytest.MonkeyPatch, notices: Any, names: str) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_NOTICE_FILE", "/tmp/never")
    assert [source.name for source in open_sources(notices)] == names.split()


def test_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("LIGHTNING_SPOT_CLOUD")
    for file, text, cloud in [
        ("sys_vendor", "Amazon EC2", "aws"),
        ("bios_version", "4.11.amazon", "aws"),
        ("product_name", "Google Compute Engine", "gcp"),
        ("sys_vendor", "Alibaba Cloud", "alibaba"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
        ("sys_vendor", "LENOVO", None),
    ]:
        (dmi := tmp_path / f"{cloud} by {file}").mkdir()
        (dmi / file).write_text(text + "\n")
        assert detect_cloud(dmi) == cloud
        (dmi / file).unlink()  # it is read once
        assert detect_cloud(dmi) == cloud
    assert not said(caplog, "cloud-unknown")
    assert detect_cloud(tmp_path / "none") is None
    assert len(said(caplog, "cloud-unknown")) == 1
    for variable, cloud in (("GCE_METADATA_HOST", "gcp"), ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "aws")):
        monkeypatch.setenv(variable, "127.0.0.1:9")
        assert detect_cloud(tmp_path / "none") == cloud
    assert open_sources("auto")[-1].name == "aws"
