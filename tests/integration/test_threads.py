"""Where no more threads can be had, those that there are do the work: nothing is lost, and training goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_spot import threads
from lightning_spot.capture.host_link import HostLink
from lightning_spot.errors import ServerUnreachableError
from lightning_spot.protocol.wire import UPGRADE
from lightning_spot.server.host import Host
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.store.local import LocalStore
from lightning_spot.threads import processors, work_together
from tests.support.oracle import image_of, manifest_of, run_info
from tests.support.ranks import Desk as WriterDesk
from tests.support.said import said
from tests.support.server import FIRST, SECOND, MakeBench, WithServers, committed, sessions_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G27")


@pytest.fixture
def only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what several threads do together, a second one starts, and no third."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(("spot-copy", "spot-slots")):
            if started or thread.name == "spot-slots":
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize(
    ("says", "most"), [("250000 100000\n", 3), ("50000 100000\n", 1), ("max 100000\n", None), ("", None)]
)
def test_a_container_has_its_share_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, most: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(threads, "CPU_QUOTA", tmp_path / "cpu.max")
    if says:
        (tmp_path / "cpu.max").write_text(says)
    assert processors.__wrapped__() == (64 if most is None else most)


def test_joint_work_is_done_by_the_threads_that_could_start(only_one: None) -> None:
    left, by = list(range(50)), set()
    both = threading.Barrier(2)

    def work() -> None:
        by.add(threading.get_ident())
        both.wait(120)
        with contextlib.suppress(IndexError):  # the other one had the last
            while True:
                left.pop()

    work_together(work, 8, "spot-copy")
    assert not left
    assert len(by) == 2


def test_concurrent_requests_are_answered_in_order() -> None:
    at_once = threading.Barrier(3)

    def ask(number: int) -> int:
        at_once.wait(120)  # broken if one comes after the other
        return 2 * number

    def fail(number: int) -> int:
        raise OSError(f"{ask(number)}")

    def asked(*asks: Callable[[int], int]) -> list[int]:
        return threads.all_at_once([functools.partial(one, number) for number, one in enumerate(asks)], "ask")

    assert asked(ask, ask, ask) == [0, 2, 4]
    with pytest.raises(OSError, match="2"):  # the first of those that fail, whichever failed first
        asked(ask, fail, fail)
    assert asked() == []
    assert threads.both(lambda: 1, lambda: "2", "ask") == (1, "2")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_no_request_follows_a_failure_or_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Of hundreds of requests the rest went on, each until its own time was over."""
    begun, both, waits, join = list[int](), threading.Barrier(2), threading.Event(), threading.Thread.join

    def ask(number: int) -> None:
        begun.append(number)
        both.wait(120)  # each thread has one
        if threading.current_thread() is threading.main_thread():
            raise error
        assert waits.wait(120)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)

    with pytest.raises(error):
        threads.all_at_once([functools.partial(ask, number) for number in range(20)], "ask", 2)
    monkeypatch.undo()
    assert sorted(begun) == [0, 1]


def test_a_slot_not_made_during_training_is_made_when_needed(only_one: None, tmp_path: Path) -> None:
    desk = WriterDesk(tmp_path)
    desk.writer.warm(700_000)
    until(lambda: desk.writer.ready, "no slot is waited for")
    desk.begin(1, desk.checkpoint()).result(120)
    desk.writer.close()
    desk.host.leave(complete=True)


def test_a_tier_that_had_no_thread_gets_one_later(tmp_path: Path, lacking: Callable[[str, int], None]) -> None:
    """It never got one, and nothing of the run was durable in the end."""
    with contextlib.closing(SnapshotServer(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None)) as server:
        server.open_run(run_info(tmp_path))
        lacking("spot-uploader", 3)
        committed(server, "run", manifest_of(1), image_of(1), wait_s=60)
        assert server.flush("run", 20.0) == []
    assert LocalStore(tmp_path / "durable").survey().manifests[0].step == 1


@pytest.mark.guarantee("G24")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_whose_servers_no_thread_asked_is_asked_for_later(
    tmp_path: Path, make_bench: MakeBench, lacking: Callable[[str, int], None], replicas: int
) -> None:
    """Nothing of it went anywhere."""
    bench: Any = make_bench(kind=WithServers, allow=[str(tmp_path)])
    lacking("spot-asker", 1)
    bench.start(FIRST, SECOND, replicas=replicas)
    assert bench.open(servers=(FIRST, SECOND), replicas=replicas).carries
    bench.save(1)
    assert bench.flush() == []
    assert bench.durable() == [1]


def test_a_lost_server_no_thread_replaces_is_found_lost_again(lacking: Callable[[str, int], None]) -> None:
    """It ended training, or nobody looked for a new server any more."""
    lost, new = SimpleNamespace(server_call_timeout_s=1.0, disconnect=lambda: None), SimpleNamespace()
    link = HostLink(cast(Host, lost), lambda: cast(Host, new))
    lacking("spot-reconnect", 1)
    gone = ServerUnreachableError("it has gone")
    link.lose(cast(Host, lost), gone)
    assert link.host is lost
    link.lose(cast(Host, lost), gone)
    assert link.wait(120) is new


def test_nobody_looks_for_a_server_once_the_ring_is_left() -> None:
    """A thread was left after `fit`."""
    begun, go_on = threading.Event(), threading.Event()

    def find() -> Host:
        begun.set()
        assert go_on.wait(120)
        raise ServerUnreachableError("none can be started")

    lost = cast(Host, SimpleNamespace(server_call_timeout_s=1.0, disconnect=lambda: None))
    link = HostLink(lost, find)
    link.lose(lost, ServerUnreachableError("it has gone"))
    assert begun.wait(120)
    threading.Timer(0.2, go_on.set).start()
    link.close()
    assert "spot-reconnect" not in [thread.name for thread in threading.enumerate()]


def test_512_ranks_of_a_host_may_connect_at_once(tmp_path: Path) -> None:
    """Those beyond the 64 that nobody had accepted yet were refused, and the 257th was hung up on."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            contextlib.closing(SnapshotServer(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None))
        )
        stack.enter_context(sessions_of(server, tmp_path / "http"))
        ranks = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(512)]
        for rank in ranks:
            rank.setblocking(False)
            rank.connect(str(tmp_path / "http"))
        for rank in ranks:
            rank.settimeout(30.0)
            rank.sendall(f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nUpgrade: {UPGRADE}\r\n\r\n".encode())
        assert all(b"101" in rank.recv(1000) for rank in ranks)
        for rank in ranks:
            rank.sendall(b"{}\n")
        assert all(b"session" in rank.recv(1000) for rank in ranks)


def test_a_server_without_a_thread_for_one_serves_the_next(tmp_path: Path, lacking: Callable[[str, int], None]) -> None:
    """It accepted nobody any more."""
    server = SnapshotServer(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None)
    with sessions_of(server, tmp_path / "http") as begin:
        lacking("spot-session", 1)
        with pytest.raises(ServerUnreachableError):
            begin()
        begin().close()


def test_a_python_built_for_old_kernels_has_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as uv installs: without ``os.pidfd_open`` each session failed, and no local server was used."""
    monkeypatch.delattr(os, "pidfd_open")
    server = SnapshotServer(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None)
    with sessions_of(server, tmp_path / "http") as begin:
        begin().close()


def test_a_session_that_fails_is_no_want_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever went wrong in a session was logged as one that was refused, and a descriptor stayed open for ever."""

    def fails(_index: int) -> None:
        raise RuntimeError("a defect")

    server = SnapshotServer(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None)
    monkeypatch.setattr(server.ring, "slot", fails)
    with sessions_of(server, tmp_path / "http") as begin:
        before = pidfds()
        session = begin()
        assert pidfds() > before
        with pytest.raises(ServerUnreachableError):
            session.map_slot(0, 1)
        until(lambda: pidfds() == before, "the server to close its descriptor of this process")
        until(lambda: said(caplog, "request-failed"), "the failure to be logged")
        assert not said(caplog, "no-threads")


def pidfds() -> int:
    """Descriptors of processes that this process has open."""
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed by now
            count += "pidfd" in os.readlink(each)
    return count
