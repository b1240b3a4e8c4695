"""Nobody spoils a server: silent and slow peers, numbers that lie, requests that are not what they seem."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from lightning_spot.cli.cert import CA, SERVER, SERVER_KEY
from lightning_spot.client.encoding import OutgoingPart
from lightning_spot.client.part_streams import PartStream
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    ServerRefusedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
)
from lightning_spot.http import fields, limits, routes, upload_requests
from lightning_spot.http.limits import Connections
from lightning_spot.protocol.credentials import server_context
from lightning_spot.protocol.wire import NO_DIGEST, PROTOCOL_HEADER, Frame, PartKind, parse_spot_url
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.uploads import Received
from lightning_spot.snapshot.parts import checksum
from tests.integration.test_server import put_file
from tests.support.server import RunningServer, StartServer, image_of, manifest_of
from tests.support.server import lasting_server as lasting
from tests.support.small_trainer import image_of as archive_of
from tests.support.uploads import asked, begin, commit, open_run, part_of, plain_of, send, server_of, streaming
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G30")

MANY = 300
OURS = f"Host: localhost\r\n{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\n"


def address_of(server: RunningServer) -> tuple[str, int]:
    address = parse_spot_url(server.url)[0]
    return address.host, address.port


@contextmanager
def connected(server: RunningServer, count: int, say: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that each said ``say``."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(address_of(server), timeout=30)))
            made[-1].sendall(say)
        yield made


def request(method: str, path: str, body: bytes = b"", headers: str = "", nbytes: int | None = None) -> bytes:
    length = len(body) if nbytes is None else nbytes
    return f"{method} {path} HTTP/1.1\r\n{OURS}Content-Length: {length}\r\n{headers}\r\n".encode() + body


def answer(server: RunningServer, sent: bytes, timeout_s: float = 30.0) -> tuple[int, bytes]:
    """Status and body of what a server answers to raw bytes; status 0 if it hangs up."""
    with socket.create_connection(address_of(server), timeout=timeout_s) as connection:
        connection.sendall(sent)
        data = b""
        while b"\r\n\r\n" not in data and (piece := connection.recv(65536)):
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        return (int(head.split(b" ")[1]), body) if head else (0, b"")


# -- peers that say nothing, or little --------------------------------------------------------------------------------


@pytest.fixture
def descriptors() -> None:
    """This process needs a descriptor for each of its connections, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))


def test_idle_slow_and_waiting_peers_keep_nobody_waiting(start_server: StartServer, descriptors: None) -> None:
    server = start_server("--slots", "1")
    client = server.client()
    open_run(client)
    begin(client, 100)  # the only slot
    lease = json.dumps({"attempt": 1, "nbytes": 100, "wait_s": 60}).encode()
    with (
        connected(server, MANY, b""),
        connected(server, MANY, b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: "),
        connected(server, MANY // 3, request("POST", "/v1/runs/run/close", b"begun", nbytes=10**5)),
        connected(server, 2 * MANY // 3, request("POST", "/v1/runs/run/uploads", lease)),
    ):
        for _ in range(3):
            assert client.call("GET", "/v1/status", timeout_s=30)["protocol"] == PROTOCOL_VERSION
            assert server.client().call("GET", "/healthz", timeout_s=30) == {"status": "ok"}
            time.sleep(0.3)


def test_a_server_that_makes_memory_for_many_answers_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leased on the threads on which it answers: for a minute, no trainer of 64 that began at once had an answer."""
    made, leasing = threading.Event(), threading.Semaphore(0)
    server = server_of()
    lease = server.uploads.lease

    def slow(*what: Any, **more: Any) -> Any:
        leasing.release()
        assert made.wait(120)
        return lease(*what, **more)

    monkeypatch.setattr(server.uploads, "lease", slow)
    with asked(server) as client, ThreadPoolExecutor(32) as pool:
        open_run(client)
        leased = [pool.submit(begin, client, 9) for _ in range(32)]
        try:
            for _ in leased:
                assert leasing.acquire(timeout=120)
            assert [run["name"] for run in client.call("GET", "/v1/runs", timeout_s=30)["runs"]] == ["run"]
        finally:
            made.set()
        assert len({answer.result(120) for answer in leased}) == 32


def test_who_waits_for_a_slot_and_goes_leaves_nothing(start_server: StartServer) -> None:
    server = start_server("--slots", "1")
    client = server.client()
    open_run(client)
    upload = begin(client, 100)
    lease = request("POST", UPLOADS, json.dumps({"attempt": 1, "nbytes": 100, "wait_s": 60}).encode())
    with connected(server, 5, lease):
        time.sleep(0.3)
    time.sleep(0.2)
    client.call("DELETE", f"/v1/uploads/{upload}")
    time.sleep(0.5)  # whoever still waited would have it by now

    def leased() -> bool:
        with suppress(SnapshotFailedError):  # a server that is slow has not heard yet that they have gone
            return bool(begin(client, 100))
        return False

    until(leased, "the slot to be had")
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        begin(client, 100)


async def never(_request: web.BaseRequest) -> web.StreamResponse:
    """Answer nobody."""
    return await asyncio.Future()


Connect = Callable[..., Awaitable[asyncio.StreamReader]]
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Handler = never, **bounds: Any) -> AsyncIterator[tuple[Connections, Connect]]:
    """Serve silently within these limits; what connects from an address of loopback, and waits until that counts."""
    connections, kept = Connections(web.Server(answer), **bounds), list[asyncio.StreamWriter]()
    server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)

    async def connect(
        say: bytes = b"", address: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> asyncio.StreamReader:
        before, port = {*connections._open}, server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), ssl=tls)
        kept.append(writer)
        while not {*connections._open} - before:
            await asyncio.sleep(0.01)
        dripping.add(asyncio.create_task(_drip(writer, say)))
        return reader

    dripping = set[asyncio.Task[None]]()
    yield connections, connect
    for task in dripping:
        task.cancel()
    server.close()


async def _drip(writer: asyncio.StreamWriter, say: bytes) -> None:
    for byte in say:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)


async def hung_up(reader: asyncio.StreamReader) -> None:
    """Wait until the service hangs up."""
    with suppress(ConnectionResetError):
        await asyncio.wait_for(reader.read(), 30)


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certs: Path) -> Callable[[], ssl.SSLContext] | None:
    return context_of(certs) if request.param == "tls" else None


def context_of(folder: Path) -> Callable[[], ssl.SSLContext]:
    return server_context(str(folder / SERVER), str(folder / SERVER_KEY), None)


def test_a_head_or_a_handshake_has_its_time(tls: Callable[[], ssl.SSLContext] | None) -> None:
    async def run() -> None:
        async with serving(tls=tls, head_timeout_s=0.5) as (connections, connect):
            begun_s = time.monotonic()
            await hung_up(await connect())
            assert time.monotonic() - begun_s >= 0.5
            await hung_up(await connect(b"\x16\x03\x01\x02\x00\x01" + bytes(1000)))  # a byte now and then gains none
            while connections._open:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_request_that_is_being_handled_is_no_silence() -> None:
    async def run() -> None:
        async with serving(head_timeout_s=0.5) as (connections, connect):
            kept = await connect()
            (handled,) = connections._open
            handled.begin_request()
            await asyncio.sleep(1.0)
            assert not handled.gone.done()
            handled.end_request()
            handled.data_received(b"a head")
            await hung_up(kept)

    asyncio.run(run())


def test_each_of_many_that_come_at_once_displaces_another(tls: Callable[[], ssl.SSLContext] | None) -> None:
    """Those that came in one turn of the loop displaced the same one, and the others stayed: beyond all limits."""

    async def run() -> None:
        async with serving(tls=tls, most=5, most_strangers=50, head_timeout_s=60.0) as (connections, connect):
            readers = [await connect() for _ in range(5)]
            readers += await asyncio.gather(*(connect() for _ in range(20)))
            for reader in readers[:20]:
                await hung_up(reader)
            assert len(connections._open) == 5

    asyncio.run(run())


def test_silence_between_requests_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.HTTP, "keepalive_timeout", 0.5)
    with asked(server_of()) as client, _connect(client, request("GET", "/healthz")) as connection:
        while connection.recv(4096):
            pass


def test_what_aiohttp_hangs_up_on_is_forgotten(
    tls: Callable[[], ssl.SSLContext] | None, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection that had been silent for a minute stayed in memory for as long as the server."""
    monkeypatch.setitem(limits.HTTP, "keepalive_timeout", 0.5)
    trusting = ssl.create_default_context(cafile=str(certs / CA)) if tls is not None else None

    async def well(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def run() -> None:
        async with serving(well, tls=tls, head_timeout_s=60.0) as (connections, connect):
            await hung_up(await connect(b"GET / HTTP/1.1\r\n\r\n", tls=trusting))
            deadline_s = time.monotonic() + 30
            while connections._server.connections and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
            assert connections._server.connections == []

    asyncio.run(run())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SnapshotServer, ServerClient]]:
    """A server in this process that gives nobody more than two seconds."""
    for module, name in (
        (fields, "BODY_TIMEOUT_S"),
        (routes, "SEND_TIMEOUT_S"),
        (routes, "LONGEST_READ_S"),
        (upload_requests, "FRAME_WAIT_S"),
    ):
        monkeypatch.setattr(module, name, 2.0)
    server = server_of(slots=2)
    with asked(server) as client:
        open_run(client)
        yield server, client


def _connect(client: ServerClient, sent: bytes) -> socket.socket:
    connection = socket.create_connection((client.address.host, client.address.port), timeout=30)
    connection.sendall(sent)
    return connection


def _nobody_holds_a_slot(server: SnapshotServer) -> bool:
    return not len(server.uploads) and not any(slot.readers for slot in server.ring.slots)


def test_a_body_that_does_not_come_is_not_waited_for(hasty: tuple[SnapshotServer, ServerClient]) -> None:
    _, client = hasty
    with _connect(client, request("POST", OPEN, b"{", nbytes=100)) as connection:
        assert b" 408 " in connection.recv(4096)


def test_a_stream_that_goes_quiet_is_hung_up_on(hasty: tuple[SnapshotServer, ServerClient]) -> None:
    server, client = hasty
    with streaming(client, 1000) as stream:
        stream.sendall(Frame(PartKind.WHOLE, 0, 1000, 1000, NO_DIGEST).pack() + b"half")
        with suppress(ConnectionError):
            assert stream.recv(16) == b""
    until(lambda: _nobody_holds_a_slot(server), "the slot to be free")


@pytest.mark.parametrize("other", ["SEND_TIMEOUT_S", "LONGEST_READ_S"])
def test_a_reader_that_does_not_read_lets_go_of_its_slot(
    hasty: tuple[SnapshotServer, ServerClient], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(routes, other, 600.0)  # the other bound does
    server, client = hasty
    nbytes, manifest = 50 * 2**20, manifest_of(1, nbytes=50 * 2**20, run_id="")
    upload = server.uploads.lease("run", 1, nbytes)
    with upload.slot.view(nbytes) as view:
        view[:] = archive_of(1, nbytes)
    server.uploads.seal(upload.id, manifest)
    with _connect(client, request("GET", f"/v1/files/run/{manifest.data_path}")) as connection:
        until(lambda: any(slot.readers for slot in server.ring.slots), "the reader to begin")
        until(lambda: _nobody_holds_a_slot(server), "the slot to be let go")
        with suppress(ConnectionResetError):
            while connection.recv(2**20):
                pass


# -- numbers that lie -------------------------------------------------------------------------------------------------

HUGE = 10**15
MANIFEST = asdict(plain_of(1, 100))
BOMB = {**MANIFEST, "nbytes": HUGE, "part_bytes": 1}
OPEN, UPLOADS = "/v1/runs/run/open", "/v1/runs/run/uploads"


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for every bad request: it must live through all of them."""
    with lasting(tmp_path_factory.mktemp("server"), "--memory-limit", "64MiB") as server:
        open_run(server.client())
        yield server


_SPOKEN = f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\n"


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /v1/runs", f"Host: localhost\r\n{_SPOKEN}", 200),
        ("GET /v1/runs", f"Host: LOCALHOST:7070\r\n{_SPOKEN}", 200),
        ("GET /v1/runs", f"Host: 127.8.9.1:7070\r\n{_SPOKEN}", 200),
        ("GET /v1/runs", f"Host: [::1]:7070\r\n{_SPOKEN}", 200),
        ("GET /v1/runs", "Host: localhost\r\n", 403),
        ("GET /v1/status", "Host: localhost\r\n", 403),
        ("GET /readyz", "Host: localhost\r\n", 403),
        ("GET /v1/runs", f"Host: evil.example:7070\r\n{_SPOKEN}", 403),
        ("GET /v1/runs", f"Host: localhost.evil.example\r\n{_SPOKEN}", 403),
        ("GET /v1/runs", f"Host: 127.0.0.1.nip.io\r\n{_SPOKEN}", 403),
        ("GET /v1/runs", f"Host: 10.0.0.5\r\n{_SPOKEN}", 403),
        ("GET /v1/runs", f"Host: \r\n{_SPOKEN}", 403),
        ("GET /v1/runs", f"Host: localhost\r\n{_SPOKEN}Origin: http://evil.example\r\n", 403),
        ("GET /v1/runs", f"Host: localhost\r\n{_SPOKEN}Origin: null\r\n", 403),
        ("POST /v1/runs/of-a-page/open", "Host: 127.0.0.1\r\nContent-Length: 14\r\n\r\n" + '{"attempt": 1}', 403),
        (f"OPTIONS {OPEN}", "Host: 127.0.0.1\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n", 403),
        ("GET /healthz", "Host: evil.example\r\n", 200),
        ("GET /metrics", "Host: localhost\r\n", 200),  # Prometheus sends no header of ours; a page has an origin
        ("GET /metrics", "Host: localhost\r\nOrigin: http://evil\r\n", 403),
        ("GET /metrics", "Host: evil\r\n", 403),
    ],
)
def test_no_page_in_a_browser_of_this_host_is_served(
    lasting_server: RunningServer, request_line: str, headers: str, status: int
) -> None:
    """Any page could open runs at a server without a token, and read them by a name that it has lead to 127.0.0.1."""
    got, body = answer(lasting_server, f"{request_line} HTTP/1.1\r\n{headers}\r\n".encode())
    assert got == status
    if status == 403 and PROTOCOL_HEADER not in headers:
        assert body.startswith(b"this server"), "a person would read JSON"


_BROWSER = "Host: server.example\r\nAccept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\n"


def test_a_run_opened_again_is_logged_once(start_server: StartServer) -> None:
    server = start_server("--log-format", "json")
    for attempt in (1, 1, 2, 2):
        open_run(server.client(), attempt=attempt)
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert [line["attempt"] for line in lines if line.get("key") == "run-opened"] == ["1", "2"]


@pytest.mark.parametrize("token", [None, "0123456789abcdef"])
def test_a_browser_shows_what_this_is_and_nothing_else(
    start_server: StartServer, tmp_path: Path, token: str | None
) -> None:
    server = start_server("--storage", str(tmp_path), environment={"LIGHTNING_SPOT_TOKEN": token} if token else {})
    open_run(server.client(token) if token else server.client(), "hush")
    pages = {
        answer(server, f"GET {path} HTTP/1.1\r\n{_BROWSER}\r\n".encode())
        for path in ("/", "/v1/runs", "/v1/runs/hush/snapshots", "/v1/nothing", "/favicon.ico", "/%3Cb%3Ex")
    }
    assert len(pages) == 1, "an address that is there looks like another one"
    ((status, page),) = pages
    assert status == 401
    text = page.decode()
    assert text.startswith("<!DOCTYPE html>")
    assert "lightning-spot status --open --server spot://HOST:PORT" in text
    assert "lightning-spot ls spot://HOST:PORT/RUN" in text
    assert ("LIGHTNING_SPOT_TOKEN" in text) == (token is not None)
    for secret in ("hush", str(tmp_path), "server.example", token or "hush"):
        assert secret not in text


_TOKEN = "0123456789abcdef"
_BEARER = f"Authorization: Bearer {_TOKEN}\r\n"


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /v1/runs", _BEARER, 200),
        ("GET /v1/runs", f"{_BEARER}Origin: http://a.example\r\n", 403),
        ("GET /v1/runs", "Origin: http://a.example\r\n", 403),
        ("GET /v1/runs", _SPOKEN, 401),
        ("GET /healthz", "", 200),
        ("GET /readyz", "", 200),
        ("HEAD /", "", 401),
        ("POST /v1/flush", "Content-Length: 0\r\n", 401),
    ],
)
def test_a_token_suffices_and_the_page_is_for_people_only(
    start_server: StartServer, request_line: str, headers: str, status: int
) -> None:
    server = start_server(environment={"LIGHTNING_SPOT_TOKEN": _TOKEN})
    got, body = answer(server, f"{request_line} HTTP/1.1\r\n{_BROWSER}{headers}\r\n".encode())
    assert got == status
    assert not body.startswith(b"<")


OUT_OF_BOUNDS = [
    *((UPLOADS, {"attempt": 1, "nbytes": nbytes}) for nbytes in (2**46 + 1, -1, 1e3, "x")),
    *((UPLOADS, {"attempt": attempt, "nbytes": 1}) for attempt in (10**30, True)),
    *((UPLOADS, {"attempt": 1, "nbytes": 1, "wait_s": wait_s}) for wait_s in (float("nan"), -1, "60")),
    (OPEN, {"attempt": 1, "keep": {"newest": 10**30}}),
    (OPEN, {"attempt": 1, "min_upload_interval_s": float("nan")}),
    (OPEN, {"attempt": 1, "token": "x" * 10**5}),
    (OPEN, {"attempt": 1, "location": ["a"]}),
    ("/v1/runs/run@zz/open", {"attempt": 1}),
    ("/v1/flush", {"wait_s": float("nan")}),
    ("/v1/flush", {"run": 5}),
]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("GET", "/v1/files/run/none.ckpt"), 404),
        (request("DELETE", "/v1/files/run/none.ckpt"), 404),
        (request("GET", "/v1/nothing"), 404),
        (request("POST", "/v1/uploads/none/stream"), 404),
        (request("POST", "/v1/runs/bad%20name/open", b"{}"), 400),
        *((request("POST", UPLOADS, said), 400) for said in (b"{", b"[]")),
        *((request("POST", path, json.dumps(body).encode()), 400) for path, body in OUT_OF_BOUNDS),
        (request("POST", UPLOADS, b'{"nbytes": 999999999999, "attempt": 1}'), 413),
        (request("POST", OPEN, nbytes=10**12), 413),
        (request("POST", OPEN, b"[" * 100_000), 400),
        (request("POST", OPEN, b'{"attempt": ' + b"9" * 10_000 + b"}"), 400),
        (request("POST", OPEN, b"\xff\xfe"), 400),
        (request("PUT", "/v1/files/run/x", nbytes=2**45), 405),
        (request("GET", "/v1/status", headers="X-Long: " + "x" * 5_000 + "\r\n"), 400),
        (request("GET", "/v1/files/run/x", headers="Range: bytes=0-" + "9" * 500 + "\r\n"), 404),
        (request("GET", "/v1/status", headers="X: y\r\n" * 50), 400),
        (request("GET", "/v1/status", headers="X: y\r\n" * 2_000), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    ],
)
def test_a_request_that_is_wrong_or_too_much_is_refused(
    lasting_server: RunningServer, sent: bytes, status: int
) -> None:
    assert answer(lasting_server, sent)[0] == status
    assert lasting_server.client().call("GET", "/healthz") == {"status": "ok"}


@pytest.mark.parametrize("header", ["bytes=10-5", "bytes=100-", "bytes=99999999999999999999-", "bytes=x"])
def test_a_range_outside_a_file_is_refused(lasting_server: RunningServer, header: str) -> None:
    put_file(lasting_server, "run", "small", b"0123456789")
    status, _ = answer(lasting_server, request("GET", "/v1/files/run/small", headers=f"Range: {header}\r\n"))
    assert status in (400, 416)


def test_a_manifest_that_promises_a_petabyte_costs_nothing(lasting_server: RunningServer) -> None:
    client, process = lasting_server.client(), psutil.Process(lasting_server.process.pid)
    upload = begin(client, 100)
    before = process.memory_info().rss
    for text in (json.dumps({"manifest": BOMB}), json.dumps({"manifest": {**BOMB, "part_bytes": 0}})):
        assert answer(lasting_server, request("POST", f"/v1/uploads/{upload}/commit", text.encode()))[0] in (400, 422)
    assert process.memory_info().rss - before < 50 * 2**20
    client.call("DELETE", f"/v1/uploads/{upload}")


LYING_FRAMES = [
    (0, 0, 0, 0),
    (0, 0, 2**40, 2**40),
    (0, 2**63, 2**63, 2**63),
    (0, 90, 20, 20),
    (0, 0, 50, 50),  # half a part
    (0, 0, 100, 99),  # a whole part of other bytes than its own
    (1, 0, 100, 1),
    (2, 0, 100, 101),  # a delta longer than its part
    (2, 0, 100, 2**50),
    (7, 0, 100, 100),
]


@pytest.mark.parametrize("frame", LYING_FRAMES)
def test_a_frame_that_lies_ends_its_stream_only(
    lasting_server: RunningServer, frame: tuple[PartKind, int, int, int]
) -> None:
    with streaming(lasting_server.client(), 100) as stream:
        stream.sendall(Frame(*frame, NO_DIGEST).pack())
        assert stream.recv(16) == b""


# -- requests that are not what they seem -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"run": "other"}, {"run_id": "0123456789ab"}, {"attempt": 7}, {"name": "other"}, {"nbytes": 50}],
    ids=lambda change: next(iter(change)),
)
def test_an_upload_commits_only_what_it_was_opened_for(lasting_server: RunningServer, change: dict[str, Any]) -> None:
    client, data = lasting_server.client(), bytes(100)
    upload = begin(client, 100)
    assert len(send(client, upload, part_of(data))) == 1
    manifest = {**MANIFEST, **change}
    with pytest.raises((SettingsError, CorruptSnapshotError)):
        client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": manifest})
    for run in ("run", "other"):
        held = client.call("GET", f"/v1/runs/{run}/snapshots")["snapshots"]
        assert manifest["name"] not in [item["manifest"]["name"] for item in held]


def test_nothing_is_removed_by_another_name(lasting_server: RunningServer) -> None:
    client = lasting_server.client()
    open_run(client, "alias")
    manifest = commit(client, 5, b"alias", "alias")

    def held() -> list[str]:
        return [item["manifest"]["name"] for item in client.call("GET", "/v1/runs/alias/snapshots")["snapshots"]]

    with pytest.raises(SnapshotNotFoundError, match=manifest.name):
        client.call("DELETE", "/v1/files/alias/last.ckpt")
    with pytest.raises(ServerRefusedError, match=manifest.name):
        client.call("DELETE", f"/v1/files/alias/{manifest.name}/manifest.json")
    put_file(lasting_server, "alias", "last.ckpt", b"x")  # a file of its own
    client.call("DELETE", "/v1/files/alias/last.ckpt")
    assert held() == [manifest.name]
    client.call("DELETE", f"/v1/files/alias/{manifest.name}")
    assert held() == []


def test_health_and_readiness_tell_strangers_no_secret(start_server: StartServer, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    server = start_server(
        "--memory-limit", "4MiB", "--storage", str(durable), environment={"LIGHTNING_SPOT_TOKEN": "open-sesame-to-me"}
    )
    trainer = server.client("open-sesame-to-me")

    def ready() -> tuple[int, list[str]]:
        status, body = answer(server, request("GET", "/readyz"))
        assert str(tmp_path).encode() not in body
        assert b"hush" not in body
        return status, json.loads(body)["reasons"]

    assert answer(server, request("GET", "/healthz"))[0] == 200
    assert answer(server, request("GET", "/v1/status"))[0] == 401
    assert ready() == (200, [])
    open_run(trainer, "hush")
    durable.rmdir() if durable.exists() else None
    durable.write_text("a file in the way")
    commit(trainer, 1, b"hush", "hush")
    until(lambda: "the storage, or another server, is failing" in ready()[1], "the tier to fail")
    assert ready()[0] == 503
    begin(trainer, 100, "hush")
    assert "memory is full" in ready()[1]
    server.process.send_signal(signal.SIGTERM)
    until(lambda: "shutting down" in ready()[1], "the server to begin its end")


def test_a_stream_whose_upgrade_a_proxy_took_away_is_told_so(lasting_server: RunningServer) -> None:
    """It was answered 200: the sender asked whether that was the right address."""
    client = lasting_server.client()
    upload = begin(client, 100)
    status, body = answer(lasting_server, request("POST", f"/v1/uploads/{upload}/stream"))
    assert status == 426
    assert json.loads(body)["error"] == "ServerRefusedError"
    client.call("DELETE", f"/v1/uploads/{upload}")


# -- many senders at once ---------------------------------------------------------------------------------------------


def test_every_upload_has_a_stream_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many hosts, perhaps behind one address, sends over four connections: the first keep no others out."""
    monkeypatch.setattr(upload_requests, "MOST_STREAMS", 64)
    with asked(server_of()) as client, ExitStack() as stack:
        open_run(client)
        streams = []
        for _ in range(18):  # of 32 streams, which one address may have
            upload = begin(client, 4096)
            streams.append(stack.enter_context(closing(PartStream(client, upload))))
            for _ in range(3):
                with suppress(ServerRefusedError):
                    stack.enter_context(closing(PartStream(client, upload)))
        for step, stream in enumerate(streams):
            part = part_of(image_of(step, 4096))
            assert list(stream.send([part])) == [(part, part.digest)]


def test_a_sender_makes_do_with_the_connections_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_requests, "MOST_STREAMS", 4)  # half of them are for a lone client
    server = server_of()
    with asked(server) as client:
        store = ServerStore(f"{client.address}/run")
        open_run(client)
        for step in range(3):
            image = image_of(step, 2**20)
            store.put(plain_of(step, 2**20, part_bytes=2**16).sealed(memoryview(image)), memoryview(image), attempt=1)
            assert bytes(server.ring.contents("run")[0].view()) == image


OTHER = b"\xee" * 50


@pytest.mark.parametrize(
    ("sent", "announced"),
    [(OTHER, OTHER), (bytes(999) + b"\1", bytes(1000))],
    ids=["half of it", "damaged on its way"],
)
def test_what_was_checked_and_written_again_is_unchecked_again(
    lasting_server: RunningServer, sent: bytes, announced: bytes
) -> None:
    client, data = lasting_server.client(), bytes(1000)
    manifest, upload = plain_of(90, 1000).sealed(memoryview(data)), begin(client, 1000)
    send(client, upload, part_of(data))
    is_refused = False
    try:
        send(client, upload, part_of(sent, 0, checksum(announced)))
    except ServerUnreachableError:
        is_refused = True
    try:
        client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": manifest.to_dict()})
    except CorruptSnapshotError:
        assert not is_refused
        return
    into = bytearray(1000)
    client.receive(f"/v1/files/run/{manifest.data_path}", 0, memoryview(into))
    assert is_refused
    assert bytes(into) == data


def test_a_part_that_is_being_written_is_not_checked() -> None:
    received, (mine, other) = Received(), socket.socketpair()
    with mine, other:
        received.begin(0, mine)
        done = threading.Thread(target=lambda: (received.begin(0), received.end(0, "b" * 32)))
        done.start()  # which has the first connection closed, and waits for its end
        assert other.recv(1) == b""
        assert received.checked == {}
        received.end(0, None)
        done.join(120)
        assert received.close() == {0: "b" * 32}
        with pytest.raises(SnapshotNotFoundError):
            received.begin(0)


def test_a_part_that_could_not_be_made_is_not_there(lasting_server: RunningServer) -> None:
    client = lasting_server.client()
    manifest, upload = plain_of(91, 10, checksums=(NO_DIGEST,)), begin(client, 10)
    assert send(client, upload, OutgoingPart(0, 10, NO_DIGEST, PartKind.SAME, b"")) == [NO_DIGEST]
    with pytest.raises(CorruptSnapshotError):
        client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": manifest.to_dict()})
