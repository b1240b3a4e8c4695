"""Trainers and servers that are killed, stopped or told to end, at every phase: nothing is lost, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_spot.cli import main
from lightning_spot.client import local_server, starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.stores import open_store
from lightning_spot.errors import RunBusyError, ServerUnreachableError, SpotError, TierError
from lightning_spot.http import program
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import find_record
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.uploads import UploadState
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.support.said import said_about
from tests.support.server import StartServer, named_run, served, server_pid
from tests.support.small_trainer import PHASES, image_of, info_of, manifest_of, reach, take
from tests.support.uploads import begin, commit, open_run
from tests.support.waiting import lives, until

pytestmark = pytest.mark.guarantee("G3")

NBYTES = 3 * 2**20
STALL_S, PATIENT_S = 2.0, 20.0  # of who meets a server that stands still, and of who meets one that is slow at most
LATEST_S = 60.0  # however slow the machine; who waits for the server instead waits for minutes
SEALED = ("committed", "flushing", "leaving")
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM


def start(dirpath: Path, slots: int = 3, **more: Any) -> LocalServer:
    settings = {
        "slots": slots,
        "memory_bytes": 2**28,
        "server_idle_timeout_s": 30.0,
        "server_call_timeout_s": PATIENT_S,
        **more,
    }
    return starting.start(str(dirpath), "run", **settings)


def opened(dirpath: Path, attempt: int = 1, **more: Any) -> LocalServer:
    """Start, or find, the local server, and open the run."""
    host = start(dirpath, **more)
    host.open_run(info_of(str(dirpath), attempt))
    return host


def filling(host: LocalServer) -> int:
    return sum(slot["state"] == "filling" for slot in host.client.call("GET", "/v1/status")["slots"])


class Small:
    """A ``tests.support.small_trainer`` in a process of its own."""

    python = sys.executable

    def __init__(
        self, dirpath: Path, phase: str, *, committed: int = 2, worker: bool = False, attempt: int = 1
    ) -> None:
        wish = {"dirpath": str(dirpath), "phase": phase, "committed": committed, "nbytes": NBYTES}
        wish = {**wish, "slots": 3, "attempt": attempt, "worker": worker}
        command = [self.python, "-m", "tests.support.small_trainer", json.dumps(wish)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        line = self.process.stdout.readline()
        assert line, "the trainer did not come that far"
        self.pid, self.worker = (int(json.loads(line)[key]) for key in ("pid", "worker"))

    def kill(self) -> None:
        os.kill(self.pid, KILL)
        assert self.process.wait() == -KILL
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture(autouse=True)
def warm_trainers(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer of the tests is forked."""
    monkeypatch.setattr(Small, "python", warm_python)


def safe_everywhere(dirpath: Path, host: LocalServer | None) -> dict[int, Manifest]:
    """Snapshots by step, in memory or durable, each with the bytes it was committed with."""
    found = {manifest.step: manifest for manifest in LocalStore(dirpath).survey().manifests}
    for manifest in found.values():
        buffer = bytearray(manifest.nbytes)
        LocalStore(dirpath).fetch(manifest, memoryview(buffer))
        assert bytes(buffer) == image_of(manifest.step, manifest.nbytes)
    for manifest in host.manifests() if host is not None else []:
        fd = host.open_snapshot(manifest) if host is not None else -1
        assert os.pread(fd, manifest.nbytes, 0) == image_of(manifest.step, manifest.nbytes)
        os.close(fd)
        found.setdefault(manifest.step, manifest)
    return found


def nothing_is_left(runtime_dir: Path, pids: set[int]) -> None:
    """No process of a server, no file in the runtime directory, no slot in tmpfs."""
    shm = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])
    until(lambda: not any(lives(pid) for pid in pids), "the servers to end")
    until(lambda: not list(runtime_dir.iterdir()), f"files to go: {list(runtime_dir.iterdir())}")
    assert list(shm.rglob("slot-*")) == []


def go_on_and_end(
    dirpath: Path, runtime_dir: Path, newest: int, attempt: int, pids: set[int], stall_s: float = PATIENT_S
) -> None:
    """The next trainer comes: it finds the newest that was committed, takes another, and leaves nothing behind."""
    host = opened(dirpath, attempt, server_call_timeout_s=stall_s)
    pids.add(server_pid(host))
    reader = start(dirpath)  # what it looks at stays in memory until it leaves
    reader.run = host.run
    assert max(safe_everywhere(dirpath, reader)) >= newest
    reader.disconnect()
    until(lambda: filling(host) == 0, "slots of the dead to be free")
    take(host, 100, NBYTES)
    assert host.flush(30.0) == []
    host.leave(complete=True)
    assert max(safe_everywhere(dirpath, None)) == 100
    nothing_is_left(runtime_dir, pids)


# -- every phase ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_trainer_is_killed(tmp_path: Path, runtime_dir: Path, phase: str) -> None:
    trainer = Small(tmp_path, phase, worker=phase in ("leasing", "filling"))
    pid = ProcessId.from_json(find_record(str(tmp_path)).alive.read_bytes())
    assert pid is not None
    trainer.kill()
    try:
        go_on_and_end(tmp_path, runtime_dir, 3 if phase in SEALED else 2, 2, {pid.pid})
    finally:
        if trainer.worker:
            os.kill(trainer.worker, KILL)


QUICK = {(KILL, "filling"), (KILL, "sealing"), (KILL, "committed"), (STOP, "leasing"), (STOP, "flushing")}
QUICK |= {(TERM, "flushing"), (TERM, "leaving")}
BLOWS = [
    pytest.param(blow, phase, id=f"{blow.name}-{phase}", marks=[] if (blow, phase) in QUICK else pytest.mark.soak)
    for blow in (KILL, STOP, TERM)
    for phase in PHASES
]


@pytest.mark.parametrize(("blow", "phase"), BLOWS)
def test_a_server_is_struck(
    tmp_path: Path, runtime_dir: Path, blow: signal.Signals, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    stall_s = STALL_S if blow is STOP else PATIENT_S
    host = opened(tmp_path, server_call_timeout_s=stall_s)
    pid = server_pid(host)
    for step in (1, 2):
        take(host, step, NBYTES)
    threads = reach(host, phase, 3, NBYTES)
    os.kill(pid, blow)
    began_s = time.monotonic()
    for thread in threads:
        if phase != "leasing" or blow is not TERM:
            thread.join(LATEST_S)
            assert not thread.is_alive(), "a call to the server did not end"
    assert time.monotonic() - began_s < LATEST_S
    host.disconnect()
    go_on_and_end(tmp_path, runtime_dir, 3 if phase in SEALED else 2, 1, {pid}, stall_s)
    assert said_about(caplog, "local-server-hung") == ([str(pid)] if blow is STOP else [])


def test_a_stopped_trainer_keeps_its_run_and_goes_on(tmp_path: Path, runtime_dir: Path) -> None:
    trainer = Small(tmp_path, "filling")
    os.kill(trainer.pid, STOP)
    host = start(tmp_path)
    time.sleep(0.5)
    assert filling(host) == 1
    with pytest.raises(RunBusyError):
        host.open_run(info_of(str(tmp_path), 2))
    trainer.kill()  # SIGKILL ends a stopped process, too
    pid = server_pid(host)
    until(lambda: filling(host) == 0, "its slot to be free")
    host.disconnect()
    go_on_and_end(tmp_path, runtime_dir, 2, 2, {pid})


def test_a_snapshot_sealed_by_a_trainer_just_killed_counts(tmp_path: Path) -> None:
    """Its connection had gone when its request was read, which was taken for one from elsewhere, and refused."""
    server = SnapshotServer(slots=2, memory_bytes=2**26, open_store=open_store, allow=None)
    with served(server, path=tmp_path / "http"):
        server.open_run(info_of(str(tmp_path / "run"), 1))
        upload = server.uploads.lease("run", 1, NBYTES)
        with upload.slot.view(NBYTES) as view:
            view[:] = image_of(1, NBYTES)
        body = json.dumps({"manifest": manifest_of(1, 1, NBYTES).to_dict(), "pad": "x" * 300_000}).encode()
        head = f"POST /v1/uploads/{upload.id}/commit HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as trainer:
            trainer.connect(str(tmp_path / "http"))
            trainer.sendall(head.encode() + body)
        until(lambda: server.ring.contents(server.registry.key("run")), "the snapshot to count")


# -- a server that does not answer -------------------------------------------------------------------------------------


def test_every_call_to_a_stopped_server_ends_in_time(tmp_path: Path) -> None:
    host = opened(tmp_path, server_call_timeout_s=STALL_S)
    lease = host.lease(NBYTES, 0.0)
    take(host, 1, NBYTES)
    manifest = host.manifests()[0]
    server = ProcessId.of(server_pid(host))
    os.kill(server.pid, STOP)
    until(lambda: server.stopped, "the server to stop")  # its threads do, one after another
    calls: list[Callable[[], Any]] = [
        lambda: host.lease(NBYTES, 0.0),
        lambda: host.lease(NBYTES, 600.0),
        lambda: host.seal(lease, manifest_of(2, 1, NBYTES)),
        lambda: host.abort(lease),
        lambda: host.flush(600.0),
        lambda: host.remove("x"),
        host.tiers,
        host.check,
        host.safe_step,
        host.manifests,
        lambda: host.open_run(info_of(str(tmp_path), 1)),
        lambda: host.open_snapshot(manifest),
    ]

    def bounded(call: Callable[[], Any]) -> None:
        began_s = time.monotonic()
        with pytest.raises(ServerUnreachableError):
            call()
        assert time.monotonic() - began_s < LATEST_S

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(bounded, calls))
    bounded(lambda: host.leave(complete=False))


def test_a_slow_server_is_waited_for_as_long_as_it_answers(tmp_path: Path) -> None:
    host = opened(tmp_path, slots=1, server_call_timeout_s=STALL_S)
    only = host.lease(NBYTES, 0.0)
    began_s = time.monotonic()
    threading.Timer(3 * STALL_S, lambda: host.abort(only)).start()
    host.lease(NBYTES, 30.0)
    assert time.monotonic() - began_s > 2 * STALL_S


def test_a_process_that_got_the_dead_servers_number_is_never_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "START_TIMEOUT_S", 1.0)
    record = find_record(str(tmp_path))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process = until(lambda: ProcessId.of(bystander.pid), "the bystander to run")
        os.kill(bystander.pid, STOP)  # as a hung server would look
        changed = ProcessId(process.pid, process.started - 1, process.namespace)
        record.alive.write_text(changed.to_json())
        with open(record.alive, "rb") as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
            with pytest.raises(ServerUnreachableError):
                start(tmp_path, server_call_timeout_s=STALL_S)
        assert not changed.kill(0.1) or lives(bystander.pid)
        assert lives(bystander.pid)
        assert process.kill(30.0)
        assert not lives(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stopped_starter_does_not_block_others_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "START_TIMEOUT_S", 0.5)
    record = find_record(str(tmp_path))
    with open(record.lock, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began_s = time.monotonic()
        with pytest.raises(ServerUnreachableError, match=r"\b0 s\b"):
            start(tmp_path)
        assert time.monotonic() - began_s < LATEST_S


# -- who is alive -----------------------------------------------------------------------------------------------------


def test_a_new_session_of_one_trainer_never_loses_to_its_old_one(tmp_path: Path) -> None:
    old = opened(tmp_path)
    new = opened(tmp_path)
    take(new, 1, NBYTES)
    old.disconnect()
    take(new, 2, NBYTES)
    assert {manifest.step for manifest in new.manifests()} == {1, 2}


def test_a_server_that_replaced_another_is_not_taken_for_it(tmp_path: Path) -> None:
    lost, closed = start(tmp_path), start(tmp_path)
    lost.check()
    closed.session.close()
    with pytest.raises(ServerUnreachableError):
        closed.check()
    os.kill(server_pid(lost), KILL)
    new = start(tmp_path)
    new.check()
    assert server_pid(lost) == server_pid(new)  # requests are answered all the same
    with pytest.raises(ServerUnreachableError):
        lost.check()


def test_a_forked_child_has_no_session_and_does_no_harm(tmp_path: Path) -> None:
    host = opened(tmp_path)
    lease = host.lease(NBYTES, 0.0)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(ServerUnreachableError):
            host.session.map_slot(0, 1)
            code = 2
        with contextlib.suppress(SpotError):
            host.client.call("GET", "/v1/status")  # over a connection of its own
            code = 0 if code == 1 else code
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.map[: lease.nbytes] = image_of(1, lease.nbytes)
    host.seal(lease, manifest_of(1, 1, NBYTES))
    assert [manifest.step for manifest in host.manifests()] == [1]


def test_an_answer_that_ctrl_c_left_is_not_used_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next slot that was mapped was another one: what was written there was not what its server had sealed."""
    host = opened(tmp_path)
    take(host, 1, NBYTES)

    def pressed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", pressed)
        with pytest.raises(KeyboardInterrupt):
            host.session.map_slot(0, 1)
    with pytest.raises(ServerUnreachableError):
        host.session.map_slot(1, 1)
    host.leave(complete=False)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), TierError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_slot_that_cannot_be_mapped_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    """As under ``ulimit -v``: it ended the training. At Ctrl-C it stayed leased until the session ended."""
    host = opened(tmp_path)

    def fails(_fd: int, _nbytes: int) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(local_server, "map_shared", fails)
        with pytest.raises(raised, match=str(error.args[-1]) if error.args else ""):
            host.lease(NBYTES, 0.0)
    assert filling(host) == 0
    take(host, 1, NBYTES)
    host.leave(complete=False)


def test_replaced_slots_are_unmapped_in_the_trainer(tmp_path: Path) -> None:
    host = opened(tmp_path, slots=1)
    released = []
    host.released = lambda shared: released.append(len(shared))
    for step, nbytes in enumerate((NBYTES, 2 * NBYTES, 4 * NBYTES, 8 * NBYTES), start=1):
        take(host, step, nbytes)
        assert host.flush(30.0) == []
    gc.collect()
    own = f"{os.environ['LIGHTNING_SPOT_SHM_DIR']}/"  # another test of this process may have some mapped still
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if own in line and "slot-" in line]
    assert len(mapped) == 1
    assert len(released) == 3


# -- SIGTERM ----------------------------------------------------------------------------------------------------------


def test_an_embedded_server_serves_its_trainer_after_sigterm(tmp_path: Path, runtime_dir: Path) -> None:
    host = opened(tmp_path)
    pid = server_pid(host)
    os.kill(pid, TERM)
    time.sleep(0.7)
    take(host, 1, NBYTES)  # the urgent one
    assert host.flush(30.0) == []
    time.sleep(0.7)
    take(host, 2, NBYTES)
    assert lives(pid)
    host.leave(complete=False)
    until(lambda: not lives(pid), "the server to end")
    assert max(safe_everywhere(tmp_path, None)) == 2
    nothing_is_left(runtime_dir, {pid})


def test_a_second_sigterm_ends_the_server_at_once(tmp_path: Path) -> None:
    host = opened(tmp_path)
    pid = server_pid(host)
    os.kill(pid, TERM)
    until(lambda: not _ready(host.client), "the server to begin its end")  # of two at once it would hear one
    assert lives(pid)
    os.kill(pid, TERM)
    until(lambda: not lives(pid), "the server to end")


def test_a_draining_server_takes_no_new_runs_and_serves_others(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--storage", str(tmp_path / "durable"), "--drain-timeout", "60s")
    open_run(client := server.client())
    upload = begin(client, 1000)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not _ready(client), "the server to begin its end")
    with pytest.raises(TierError, check=lambda error: type(error) is TierError):  # it answers
        open_run(client, "another")
    commit(client, 1, image_of(1, 1000), upload=upload)  # was under way
    commit(client, 2, image_of(2, 1000))  # is urgent
    assert server.process.wait(120) == 0
    assert LocalStore(tmp_path / "durable" / "run").survey().manifests[0].step == 2


def test_a_draining_server_waits_for_no_killed_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had begun to send a snapshot, and was killed: nobody would ever have committed or given it up."""
    monkeypatch.setattr(program, "UNCONNECTED_S", 0.5)
    server = SnapshotServer(slots=2, memory_bytes=2**26, open_store=open_store)

    async def drain() -> tuple[list[str], float]:
        begun_s = time.monotonic()
        service = Mock(**{"uploads.asked_s": float("-inf")})
        return await program._drain(server, service, 20.0, program._Signals()), time.monotonic() - begun_s

    try:
        server.open_run(named_run("run"))
        connected, killed = (server.uploads.lease("run", 1, 1000) for _ in range(2))
        with socket.socketpair()[0] as stream, server.uploads.streaming(connected, stream):
            server.uploads.expire(-1.0)
            assert list(server.uploads) == [connected.id]
        assert killed.state is UploadState.ABORTED
        left, took_s = asyncio.run(drain())
    finally:
        server.close()
    assert left == []
    assert 0.5 < took_s < 19  # and not the 20 s that it has


def _ready(client: ServerClient) -> bool:
    try:
        return bool(client.call("GET", "/readyz")["ready"])
    except SpotError:
        return False


def test_a_second_server_on_a_taken_port_touches_nothing(
    start_server: StartServer, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    server = start_server(listen=f"127.0.0.1:{port}")
    client = server.client()
    open_run(client)
    commit(client, 1, image_of(1, 1000))
    upload = begin(client, 1000)
    shm = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])
    before = sorted((path, path.stat().st_ino) for path in shm.rglob("*"))
    assert before
    assert main(["serve", "--listen", f"127.0.0.1:{port}", "--memory-limit", "64MiB"]) == 2
    assert "in use" in capsys.readouterr().err
    assert sorted((path, path.stat().st_ino) for path in shm.rglob("*")) == before
    commit(client, 2, image_of(2, 1000), upload=upload)
    assert len(client.call("GET", "/v1/runs/run/snapshots")["snapshots"]) == 2
