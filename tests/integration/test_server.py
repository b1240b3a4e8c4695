"""The server as a program: HTTP, tokens, protocol, draining, the local server, and ``spot://``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spot.cli import main
from lightning_spot.client import server_client as client_module
from lightning_spot.client import starting
from lightning_spot.client.encoding import OutgoingPart
from lightning_spot.client.part_streams import PartStream
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import (
    CorruptSnapshotError,
    ServerRefusedError,
    ServerUnreachableError,
    SettingsError,
    TierError,
    TierReason,
)
from lightning_spot.http import program
from lightning_spot.protocol.wire import (
    DIGEST_HEADER,
    NO_DIGEST,
    PROTOCOL_HEADER,
    Address,
    Frame,
    PartKind,
    parse_spot_url,
)
from lightning_spot.server.runs import RunInfo, parse_run
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.parts import checksum
from tests.support.answering import Answering
from tests.support.server import MIB, RunningServer, StartServer, manifest_of, named_run, server_pid
from tests.support.store import snapshot
from tests.support.waiting import until

OURS = {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}


def put(server: RunningServer, step: int) -> tuple[Manifest, bytes]:
    """Send a snapshot to a server; it is one part."""
    manifest, data = snapshot(step, nbytes=20_000, part_bytes=MIB)
    ServerStore(f"{server.url}/run").put(manifest, memoryview(data), attempt=1)
    return manifest, data


def put_file(server: RunningServer, run: str, name: str, data: bytes, info: RunInfo | None = None) -> None:
    """As the server on a trainer's host brings a file that its user saved."""
    name_of_run, identity = parse_run(run)
    manifest = Manifest(
        run=name_of_run, run_id=identity, name=name, file="", step=0, attempt=1, nbytes=len(data), created_unix_s=1.0
    )
    store = ServerStore(f"{server.url}/{run}")
    if info is not None:
        store.know(info)
    store.put(manifest.sealed(memoryview(data)), memoryview(data), attempt=1)


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("listen", "reached"), [("[::1]:0", ["[::1]"]), ("[::]:0", ["[::1]", "127.0.0.1"])])
def test_it_listens_by_ipv6_and_says_so_in_a_url(start_server: StartServer, listen: str, reached: list[str]) -> None:
    server = start_server(listen=listen, environment={**os.environ, "LIGHTNING_SPOT_TOKEN": "secret"})
    address = parse_spot_url(server.url)[0]
    assert address.host == listen.removesuffix(":0")
    for host in reached:
        client = ServerClient(parse_spot_url(f"spot://{host}:{address.port}")[0], "secret")
        assert client.call("GET", "/v1/status")["slots"] == []


# -- HTTP -------------------------------------------------------------------------------------------------------------


def test_curl_can_read_a_snapshot(start_server: StartServer) -> None:
    server = start_server()
    _, data = put(server, 3)
    address = f"{server.url.replace('spot://', 'http://')}/v1/files/run"

    def read(path: str, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(f"{address}/{path}", headers={**OURS, **headers})
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()

    path = f"{snapshot_name(3, 1)}/model.ckpt"
    assert read(path) == (200, data)
    assert read(path, Range="bytes=-10") == (206, data[-10:])
    assert json.loads(read(f"{snapshot_name(3, 1)}/manifest.json")[1])["step"] == 3


def test_a_request_that_came_damaged_is_refused(start_server: StartServer) -> None:
    server, said = start_server(), b'{"attempt": 1}'
    url = server.url.replace("spot://", "http://") + "/v1/runs/run/open"
    headers = {**OURS, DIGEST_HEADER: checksum(said[::-1])}
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, data=said, headers=headers, method="POST"))
    assert caught.value.code == 400
    assert server.client().call("GET", "/v1/runs")["runs"] == []


def test_from_another_host_nobody_seals_awaits_or_measures(start_server: StartServer) -> None:
    server = start_server().client()
    server.call("POST", "/v1/runs/run/open", {"attempt": 1})
    for asked in ("awaited", "figures"):
        with pytest.raises(ServerRefusedError, check=lambda error: error.status == 403):
            server.call("POST", f"/v1/runs/run/{asked}", {})
    upload = server.call("POST", "/v1/runs/run/uploads", {"attempt": 1, "nbytes": 9})["upload"]
    filled = manifest_of(1, nbytes=9, run_id="").sealed(memoryview(bytes(9)))
    with pytest.raises(CorruptSnapshotError):  # nothing of it has come
        server.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": filled.to_dict()})


def test_another_protocol_is_named(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    monkeypatch.setattr(client_module, "PROTOCOL_VERSION", 1)
    with pytest.raises(ServerRefusedError, match=f"{PROTOCOL_VERSION}.*1", check=TierReason.PROTOCOL.caused):
        server.client().call("GET", "/v1/status")


def test_something_else_at_the_port() -> None:
    with contextlib.closing(Answering()) as other:
        url = other.url.replace("http://", "spot://")
        with pytest.raises(ServerRefusedError, check=TierReason.PROTOCOL.caused):
            ServerClient(parse_spot_url(url)[0]).call("GET", "/v1/status")


def test_a_given_up_stream_cannot_reach_the_next_snapshot(start_server: StartServer) -> None:
    server = start_server("--slots", "1")
    client = server.client()
    body = {"attempt": 1, "nbytes": 2**20}
    client.call("POST", "/v1/runs/run/open", {"attempt": 1})
    upload = client.call("POST", "/v1/runs/run/uploads", body)["upload"]
    stream = PartStream(client, upload)
    stream._socket.sendall(Frame(PartKind.WHOLE, 0, 2**20, 2**20, NO_DIGEST).pack() + b"first half")
    client.call("DELETE", f"/v1/uploads/{upload}")
    assert client.call("POST", "/v1/runs/run/uploads", {**body, "wait_s": 20.0})["upload"] != upload
    assert stream._socket.recv(1) == b""  # the server has hung up


def test_a_part_that_came_damaged_is_never_committed(start_server: StartServer) -> None:
    client, data = start_server().client(), random.Random(1).randbytes(2**16)
    client.call("POST", "/v1/runs/run/open", {"attempt": 1})
    upload = client.call("POST", "/v1/runs/run/uploads", {"attempt": 1, "nbytes": len(data)})["upload"]
    stream = PartStream(client, upload)
    part = OutgoingPart.whole(0, memoryview(data), checksum(data[::-1]))
    ((_, arrived),) = stream.send([part])
    stream.close()
    assert arrived == checksum(data)
    manifest = Manifest(run="run", name=snapshot_name(1, 1), step=1, attempt=1, nbytes=len(data))
    with pytest.raises(CorruptSnapshotError):
        client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": manifest.to_dict()})


def test_a_part_damaged_on_its_way_is_sent_again(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    real = PartStream.send
    sent = []

    def damaging(self: PartStream, parts: Iterable[OutgoingPart]) -> Any:
        parts = list(parts)
        sent.append(len(parts))
        if len(sent) == 1:
            content = bytes(parts[0].content)
            parts = [replace(parts[0], content=bytes([content[0] ^ 1]) + content[1:]), *parts[1:]]
        return real(self, parts)

    monkeypatch.setattr(PartStream, "send", damaging)
    manifest, data = put(server, 1)
    assert sent == [1, 1]
    buffer = bytearray(len(data))
    ServerStore(f"{server.url}/run").fetch(manifest, memoryview(buffer))
    assert bytes(buffer) == data


def test_what_is_damaged_on_its_way_back_is_fetched_again(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    manifest, data = put(server, 1)
    real = ServerClient.receive
    damaged: list[int] = []

    def damaging(self: ServerClient, path: str, start: int, into: memoryview, etag: str | None = None) -> None:
        real(self, path, start, into, etag)
        if len(damaged) < most:
            damaged.append(start)
            into[0] ^= 1

    monkeypatch.setattr(ServerClient, "receive", damaging)
    store, buffer, most = ServerStore(f"{server.url}/run"), bytearray(len(data)), 1
    store.fetch(manifest, memoryview(buffer))
    assert damaged == [0]
    assert bytes(buffer) == data
    most = 3
    with pytest.raises(CorruptSnapshotError, check=lambda error: error.part == 0):
        store.fetch(manifest, memoryview(buffer))


def test_a_line_that_damages_everything_is_named(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server()
    monkeypatch.setattr(PartStream, "send", lambda _self, parts: [(part, "wrong") for part in parts])
    with pytest.raises(CorruptSnapshotError):
        put(server, 1)
    assert ServerStore(f"{server.url}/run").survey().manifests == []


def test_sigterm_says_what_it_could_not_flush(start_server: StartServer, tmp_path: Path) -> None:
    target = tmp_path / "durable"
    server = start_server("--storage", str(target), "--drain-timeout", "1s")
    target.rmdir()  # the server has made it, to see whether it can
    target.write_text("a file in the way")
    put(server, 4)
    assert server.stop() == 1
    assert "not stored" in server.log.read_text()


# -- the local server ------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"slots": 2, "memory_bytes": 2**26, "server_idle_timeout_s": 60.0}


def test_nobody_is_served_before_the_storage_was_tried(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that could not store anything took runs, and ended."""
    answers = list[Any]()

    def tried(url: str) -> None:
        try:
            answers.append(ServerClient(Address("127.0.0.1", port)).call("GET", "/healthz", timeout_s=1.0))
        except ServerUnreachableError:
            raise TierError("access denied", tier=url) from None

    monkeypatch.setattr(program, "try_writing", tried)
    flags = ["--listen", f"127.0.0.1:{port}", "--memory-limit", "64MiB", "--storage", "s3://bucket"]
    assert main(["serve", *flags]) == 2
    assert answers == []
    assert "access denied" in capsys.readouterr().err


def test_two_trainers_at_once_get_one_server(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        hosts = list(pool.map(lambda index: starting.start(str(tmp_path), f"run-{index}", **SETTINGS), range(4)))
    assert len({server_pid(host) for host in hosts}) == 1


def test_the_token_is_handed_over_and_in_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later attempt may have another one, since the first has expired: the server goes on with that."""
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", "first-secret-of-a-trainer")
    host = starting.start(str(tmp_path), "run", **SETTINGS)
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", "second-secret-of-a-trainer")
    later = starting.attach(str(tmp_path), "run")
    assert later is not None
    assert server_pid(later) == server_pid(host)
    process = Path(f"/proc/{server_pid(host)}")
    assert b"secret" not in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()


def test_a_slot_that_is_asked_for_at_ctrl_c_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was leased until the session ended: with few slots, none was left for the last snapshot."""
    host = starting.start(str(tmp_path), "run", **SETTINGS)
    host.open_run(named_run("run", tmp_path))

    def pressed(*what: Any, call: Callable[..., Any] = host.client.call, **more: Any) -> Any:
        answer = call(*what, **more)
        if what[:1] == ("POST",):
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(host.client, "call", pressed)
        with pytest.raises(KeyboardInterrupt):
            host.lease(1000, 0.0)
    assert [slot["state"] for slot in host.client.call("GET", "/v1/status")["slots"]] == ["free"]
    host.leave(complete=True)


@pytest.mark.parametrize(
    ("does", "says"), [('rm "$3/$4.log"', r"exit \d"), ("exec sleep 60", r"pid (?P<pid>\d+)")], ids=["ends", "is slow"]
)
def test_a_server_that_does_not_start_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, says: str
) -> None:
    """Of one that is slow, and goes on, it was said that it had ended, with ``exit None``; one removes its log."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    monkeypatch.setattr(starting, "subprocess", subprocess)
    if does.startswith("exec"):
        monkeypatch.setattr(starting, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ServerUnreachableError) as caught:
        starting.start(str(tmp_path), "run", **SETTINGS)
    named = re.search(says, str(caught.value))
    assert named, str(caught.value)
    if "pid" in named.groupdict():
        os.kill(int(named["pid"]), signal.SIGKILL)


def test_a_server_that_python_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests fork theirs."""
    monkeypatch.setattr(starting, "subprocess", subprocess)
    host = starting.start(str(tmp_path), "run", **SETTINGS)
    command = Path(f"/proc/{server_pid(host)}/cmdline").read_text().split("\0")
    assert command[:3] == [sys.executable, "-m", "lightning_spot.http.program"]
    host.disconnect()


def test_runtime_dir_that_is_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
    with pytest.raises(SettingsError, match="LIGHTNING_SPOT_RUNTIME_DIR"):
        starting.find_record("run")


def test_abandoned_slots_are_removed_after_a_day(tmp_path: Path) -> None:
    shm = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])
    old, fresh = shm / f"lightning-spot-{'0' * 16}", shm / f"lightning-spot-{'1' * 16}"
    for area in (old, fresh):
        area.mkdir()
        (area / "slot-0.img").write_bytes(b"x")
    for path in (old / "slot-0.img", old):
        os.utime(path, (0, 0))
    starting.start(str(tmp_path), "run", **SETTINGS)
    assert not old.exists()
    assert fresh.exists()


def test_files_of_a_killed_server_are_removed_after_a_day(tmp_path: Path, runtime_dir: Path) -> None:
    for key, age in (("0" * 16, 0.0), ("1" * 16, time.time())):
        for ending in ("http", "log", "alive"):
            (runtime_dir / f"{key}.{ending}").touch()
            os.utime(runtime_dir / f"{key}.{ending}", (age, age))
    starting.start(str(tmp_path), "run", **SETTINGS)
    assert not list(runtime_dir.glob("0000*"))
    assert len(list(runtime_dir.glob("1111*"))) == 3


def test_what_shows_that_a_server_lives_never_grows_old(tmp_path: Path, runtime_dir: Path) -> None:
    """What cleans ``/tmp`` of old files would hide it: another server would be started beside it."""
    starting.start(str(tmp_path), "run", **SETTINGS)
    (alive,) = runtime_dir.glob("*.alive")
    os.utime(alive, (0, 0))
    until(lambda: alive.stat().st_mtime > 0, "the server to note that it lives")


def test_the_idle_time_begins_when_the_last_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the server was last seen busy, which may be long before."""
    now_s = [1000.0]
    server: Any = SimpleNamespace(busy=True, finished=False, ring=SimpleNamespace(watch=lambda _: None))
    service: Any = SimpleNamespace(last_request_s=0.0)

    async def passes(waited_for: Coroutine[Any, Any, bool], within_s: float) -> bool:
        waited_for.close()
        now_s[0] += within_s
        server.busy = now_s[0] < 1007
        raise TimeoutError

    monkeypatch.setattr(program, "asyncio", SimpleNamespace(**(vars(asyncio) | {"wait_for": passes})))
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def wait() -> None:
        await program._until_unneeded(server, service, 20.0, program._Signals())

    asyncio.run(wait())
    assert 1027 <= now_s[0] <= 1027 + program.LATEST_CHECK_S + 1
