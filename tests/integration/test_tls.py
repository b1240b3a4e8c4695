"""TLS: a snapshot goes and comes over it as without, who is not trusted gets nothing, and all bounds hold."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest

from lightning_spot import retry
from lightning_spot.cli.cert import CA, CLIENT, SERVER, SERVER_KEY, make
from lightning_spot.client.filesystem import SpotFileSystem
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import ServerRefusedError, ServerUnreachableError, SettingsError, TierReason
from lightning_spot.http import limits, upload_requests
from lightning_spot.http.limits import MOST_STRANGERS, Connections
from lightning_spot.protocol.credentials import client_context, server_context
from lightning_spot.protocol.wire import NO_DIGEST, Address, Frame, PartKind, parse_spot_url
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.parts import checksum
from tests.integration.test_fit import stopped
from tests.integration.test_service_limits import connected, context_of, descriptors, hung_up, serving
from tests.support import folders
from tests.support.said import said_about
from tests.support.server import RunningServer, StartServer
from tests.support.snapshots import spot
from tests.support.trainer import Net, Probe, data, trainer
from tests.support.uploads import asked, begin, open_run, part_of, plain_of, send, server_of, streaming
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G30")
__all__ = ["descriptors"]  # a fixture

PARTS = 5 * 2**20
TOKEN = "correct-horse-battery"


@pytest.fixture
def start_tls(start_server: StartServer, certs: Path, monkeypatch: pytest.MonkeyPatch) -> StartServer:
    """Starts servers that speak TLS; this process trusts their CA."""
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(certs / CA))
    return lambda *flags, **more: start_server(*pair(certs), *flags, **more)


def pair(folder: Path) -> list[str]:
    return ["--tls-cert", str(folder / SERVER), "--tls-key", str(folder / SERVER_KEY)]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, certs: Path) -> Iterator[tuple[SnapshotServer, ServerClient]]:
    """A server in this process that gives no stream more than two seconds."""
    monkeypatch.setattr(upload_requests, "FRAME_WAIT_S", 2.0)
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(certs / CA))
    server = server_of(slots=2)
    with asked(server, tls=context_of(certs)) as client:
        open_run(client)
        yield server, client


@pytest.mark.parametrize("what", [SERVER, SERVER_KEY, CA])
@pytest.mark.parametrize(("name", "complaint"), [("pipe", "is a pipe"), ("long" * 100, "can be read")])
def test_what_is_no_certificate_is_a_bad_setting(
    certs: Path, tmp_path: Path, what: str, name: str, complaint: str
) -> None:
    """Nobody may ever write to a pipe: the server would hang."""
    os.mkfifo(tmp_path / "pipe")
    cert, key, ca = (str(tmp_path / name if each == what else certs / each) for each in (SERVER, SERVER_KEY, CA))
    with pytest.raises(SettingsError, match=complaint):
        server_context(cert, key, ca)


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_snapshot_goes_and_comes_by_tls(start_tls: StartServer, cli: Callable[..., str]) -> None:
    url = start_tls(environment={"LIGHTNING_SPOT_TOKEN": TOKEN}).url
    assert url.startswith("spots://")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
        store = ServerStore(f"{url}/run")
        first = random.Random(1).randbytes(4 * PARTS + 12345)
        second = first[: 2 * PARTS] + random.Random(2).randbytes(len(first) - 2 * PARTS)
        manifests = [
            plain_of(step, len(image), part_bytes=PARTS).sealed(memoryview(image))
            for step, image in enumerate((first, second), 1)
        ]
        for manifest, image in zip(manifests, (first, second), strict=True):
            store.put(manifest, memoryview(image), attempt=1)
        assert store.sent[PartKind.SAME] == 2 * PARTS  # as without TLS, what the server has is not sent
        for manifest, image in zip(manifests, (first, second), strict=True):
            into = bytearray(len(image))
            store.fetch(manifest, memoryview(into))
            assert into == image
        fsspec.register_implementation("spots", SpotFileSystem, clobber=True)
        assert fsspec.open(f"{url}/run/{manifests[1].name}/model.ckpt").open().read() == second
        files, path = fsspec.url_to_fs(f"{url}/run/last.ckpt")
        assert files.unstrip_protocol(path) == f"{url}/run/last.ckpt"
        assert manifests[1].name in cli("ls", f"{url}/run")
        cli("verify", f"{url}/run@2")


@pytest.mark.slow
def test_a_training_resumes_from_servers_by_tls(
    start_tls: StartServer, tmp_path: Path, runtime_dir: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host and storage are lost; two servers that ask for a token and a certificate have the newest snapshot."""
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    monkeypatch.chdir(certs)  # the local server runs elsewhere
    monkeypatch.setenv("LIGHTNING_SPOT_CA", CA)
    monkeypatch.setenv("LIGHTNING_SPOT_CLIENT_CERT", CLIENT)
    monkeypatch.setattr(retry, "DEFAULT_POLICY", RetryPolicy(first_pause_s=0.05))
    servers = [start_tls("--client-ca", str(certs / CA)) for _ in range(2)]
    urls = [server.url for server in servers]
    stopped(tmp_path, servers=urls, replicas=2, run_name="run")
    for url in urls:
        store = ServerStore(f"{url}/run")
        until(lambda: 15 in {each.step for each in store.survey().manifests}, f"step 15 at {url}")  # noqa: B023
    folders.end_servers(runtime_dir)
    shutil.rmtree(tmp_path / "run-1")
    servers[0].stop(9)
    probe, callback = Probe(), spot(tmp_path, servers=urls, replicas=2, run_name="run")
    trainer(callback, probe).fit(Net(), data())
    assert min(probe.states) == 15


# -- who is trusted ----------------------------------------------------------------------------------------------------


def test_an_untrusted_server_gets_nothing(
    start_tls: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another CA's nor that of another host; and nobody falls back to sending in clear."""
    url = start_tls().url
    client = ServerClient(parse_spot_url(url)[0])
    client.ping()
    (tmp_path / "other").mkdir()
    make(tmp_path / "other", ["127.0.0.1"])
    for ca in (tmp_path / "other" / CA, None):
        monkeypatch.setenv("LIGHTNING_SPOT_CA", str(ca or ""))
        with pytest.raises(ServerRefusedError, match="LIGHTNING_SPOT_CA", check=TierReason.TLS.caused):
            ServerClient(client.address).ping()
    assert client.call("GET", "/healthz")  # the connection that there is stays


def test_the_name_of_a_host_is_verified(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, ["snapshots.example"])
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(tmp_path / CA))
    url = start_server(*pair(tmp_path)).url
    with pytest.raises(ServerRefusedError, match=r"127\.0\.0\.1", check=TierReason.TLS.caused):
        ServerClient(parse_spot_url(url)[0]).ping()


def test_an_untrusted_server_is_not_asked_again(
    start_server: StartServer, certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = start_server(*pair(certs)).url
    place = Location.of(tmp_path / "run-1", servers=url)
    (why,) = survey(place, RetryPolicy(tries=3, first_pause_s=0.05)).problems.values()
    assert "LIGHTNING_SPOT_CA" in why
    assert not said_about(caplog, "read-retried")


def test_each_side_is_told_which_scheme_to_use(start_tls: StartServer, start_server: StartServer) -> None:
    for url, other, advice, refusal in (
        (start_tls().url, "spot", "spots://", ServerUnreachableError),
        (start_server().url, "spots", r"\bspot://", ServerRefusedError),
    ):
        address = parse_spot_url(url.replace(url.split(":")[0], other, 1))[0]
        with pytest.raises(refusal, match=advice):
            ServerClient(address, TOKEN).call("GET", "/v1/runs")
        ServerClient(parse_spot_url(url)[0]).ping()


def test_clients_show_a_certificate(
    start_tls: StartServer, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_tls("--client-ca", str(certs / CA), "--drain-timeout", "0")
    address = parse_spot_url(server.url)[0]
    with pytest.raises(ServerUnreachableError, match="LIGHTNING_SPOT_CLIENT_CERT"):
        ServerClient(address).ping()
    monkeypatch.setenv("LIGHTNING_SPOT_CLIENT_CERT", str(certs / CLIENT))
    ServerClient(address).ping()
    make(tmp_path, ["127.0.0.1"])
    monkeypatch.setenv("LIGHTNING_SPOT_CLIENT_CERT", str(tmp_path / CLIENT))
    with pytest.raises(ServerUnreachableError, match="LIGHTNING_SPOT_CLIENT_CERT"):
        ServerClient(address).ping()
    server.stop()
    log = server.log.read_text()
    assert "a TLS handshake that failed from 127.0.0.1" in log
    assert "Traceback" not in log


def test_new_certificates_are_used_without_a_restart(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, used = (tmp_path / name for name in ("old", "new", "used"))
    for folder in (old, new):
        folder.mkdir()
        make(folder, ["127.0.0.1"])
    shutil.copytree(old, used)
    server = start_server(*pair(used))
    address = parse_spot_url(server.url)[0]
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(old / CA))
    kept = ServerClient(address)
    kept.ping()
    shutil.copy(new / SERVER, used / SERVER)  # its key is still the old one's
    ServerClient(address).ping()
    until(lambda: "stays in use" in server.log.read_text(), "the warning")
    shutil.copy(new / SERVER_KEY, used / SERVER_KEY)
    with pytest.raises(ServerRefusedError, match="LIGHTNING_SPOT_CA"):
        ServerClient(address).ping()
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(new / CA))
    ServerClient(address).ping()
    kept.ping()


def test_a_clients_files_are_read_again(
    start_tls: StartServer, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse_spot_url(start_tls().url)[0]
    make(tmp_path, ["127.0.0.1"])
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(tmp_path / CA))
    with pytest.raises(ServerRefusedError):
        ServerClient(address).ping()
    shutil.copy(certs / CA, tmp_path / CA)
    ServerClient(address).ping()


@pytest.mark.parametrize("variable", ["LIGHTNING_SPOT_CA", "LIGHTNING_SPOT_CLIENT_CERT"])
def test_a_file_without_certificates_is_an_error(
    variable: str, start_tls: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse_spot_url(start_tls().url)[0]
    (tmp_path / "file").write_text("none")
    for path in (tmp_path / "file", tmp_path / "nothing"):
        monkeypatch.setenv(variable, str(path))
        with pytest.raises(SettingsError, match=variable):
            ServerClient(address).ping()


def test_old_versions_of_tls_are_refused(certs: Path) -> None:
    for context in (context_of(certs)(), client_context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert client_context().verify_mode == ssl.CERT_REQUIRED
    assert client_context().check_hostname


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_head_after_the_handshake_has_what_is_left(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_CA", str(certs / CA))

    async def run() -> None:
        async with serving(tls=context_of(certs), head_timeout_s=1.0) as (_, connect):
            await hung_up(await connect(tls=client_context()))

    asyncio.run(run())


def test_those_without_a_token_displace_each_other_only(certs: Path) -> None:
    """First the oldest one of the address that has most; never one that has shown a token."""

    async def run() -> None:
        async with serving(tls=context_of(certs), most_strangers=3) as (connections, connect):
            admitted = await connect(address="127.0.0.2")
            next(iter(connections._open)).admit()
            alone = await connect(address="127.0.0.3")
            flood = [await connect(address="127.0.0.2") for _ in range(20)]
            for reader in flood[:-2]:
                await hung_up(reader)
            assert not any(reader.at_eof() for reader in (admitted, alone, *flood[-2:]))
            assert len(connections._open) == 4

    asyncio.run(run())


def test_where_few_files_may_be_open_a_token_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "open_files", lambda: 16)
    connections = Connections(Mock(), tls=Mock())
    assert (connections._most, connections._most_strangers) == (4, 2)


@pytest.mark.slow
def test_a_flood_by_tls_costs_little_and_keeps_nobody_out(
    start_tls: StartServer, descriptors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    server = start_tls()
    address = parse_spot_url(server.url)[0]
    kept = ServerClient(address)
    kept.call("GET", "/v1/runs")
    (at,) = kept._pool._idle
    with connected(server, 3 * MOST_STRANGERS, b"\x16\x03\x01"):
        assert kept.call("GET", "/v1/runs") == ServerClient(address).call("GET", "/v1/runs")
        assert list(kept._pool._idle) == [at]  # it was not displaced
        until(lambda: len(_open_sockets(server)) < 3 * MOST_STRANGERS, "those beyond the bound to go")
        assert len(_open_sockets(server)) < 1.2 * MOST_STRANGERS


def _open_sockets(server: RunningServer) -> list[str]:
    return os.listdir(f"/proc/{server.process.pid}/fd")


@pytest.mark.parametrize("end", ["it goes quiet", "its upload ends"])
def test_a_stream_by_tls_has_an_end(hasty: tuple[SnapshotServer, ServerClient], end: str) -> None:
    server, client = hasty
    with streaming(client, 1000) as stream:
        (upload,) = map(server.uploads.find, server.uploads)
        if end == "its upload ends":
            server.uploads.abort(upload.id)
        else:
            stream.sendall(Frame(PartKind.WHOLE, 0, 1000, 1000, NO_DIGEST).pack() + b"half")
        with suppress(ConnectionError):
            assert stream.recv(1) == b""
        until(lambda: not upload.streams, "the stream to end")


def test_what_comes_at_once_after_the_upgrade_is_received(
    hasty: tuple[SnapshotServer, ServerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server agrees once it can take parts, not while it makes ready for them."""
    connects = asyncio.BaseEventLoop.create_connection

    async def late(*arguments: Any, **more: Any) -> Any:
        await asyncio.sleep(0.3)
        return await connects(*arguments, **more)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", late)
    _, client = hasty
    image = b"x" * 1000
    assert send(client, begin(client, 1000), part_of(image)) == [checksum(image)]


def test_who_reads_no_answers_makes_no_buffer_grow(hasty: tuple[SnapshotServer, ServerClient]) -> None:
    """Each part is answered: of who only sends, the server reads no more."""
    _, client = hasty
    frames, sent = Frame(PartKind.SAME, 0, 1000, 0, NO_DIGEST).pack() * 10_000, 0
    with streaming(client, 1000) as stream, suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while sent < 2**28:
            stream.deadline_s = time.monotonic() + 10
            stream.sendall(frames)
            sent += len(frames)
    assert sent < 2**28


def test_a_client_whose_server_stalls_is_not_kept() -> None:
    """In the handshake, too."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client, began_s = ServerClient(Address("127.0.0.1", silent.getsockname()[1], tls=True)), time.monotonic()
        with pytest.raises(ServerUnreachableError):
            client.call("GET", "/v1/runs", timeout_s=0.5)
        assert time.monotonic() - began_s < 20


def test_closing_a_client_ends_its_calls_by_tls(hasty: tuple[SnapshotServer, ServerClient]) -> None:
    _, client = hasty
    begin(client, 1000)
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(ServerUnreachableError):
            client.call("POST", "/v1/runs/run/uploads", {"attempt": 1, "nbytes": 2**28, "wait_s": 60}, timeout_s=90)
        failed.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: client._pool._taken, "the call to begin")
    until(lambda: (client.close(), failed.wait(0.2))[1], "the call to end")
    waiting.join()
