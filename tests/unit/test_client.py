"""The client of a server: its calls end in time, its connections stay its own, nothing is asked twice by accident."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spot.client import part_streams, remote, server_client
from lightning_spot.client.encoding import PartEncoder
from lightning_spot.client.local_server import LocalServer, Session
from lightning_spot.client.part_streams import PartStream, send_parts
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import ServerRefusedError, ServerUnreachableError, SnapshotNotFoundError, SpotError
from lightning_spot.protocol.wire import PROTOCOL_HEADER, Address, parse_spot_url
from lightning_spot.server.tier import TierHealth
from tests.support.server import StartServer, image_of, manifest_of
from tests.support.waiting import until

GOOD = f"HTTP/1.1 200 OK\r\n{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\nContent-Length: 2\r\n\r\n{{}}".encode()


class Peer:
    """A server that answers as it is told, connection by connection, request by request.

    Args:
        answers: for each connection, what to answer to each of its requests; then it hangs up.
        pause_s: between two bytes.
    """

    def __init__(self, *answers: list[bytes], pause_s: float = 0.0) -> None:
        self.requests: list[bytes] = []
        self._answers = answers
        self._pause_s = pause_s
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        for answers in self._answers:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                for answer in [*answers, b""]:
                    if not (request := connection.recv(65536)):
                        break
                    self.requests.append(request.split(b" ")[0])
                    self._send(connection, answer)

    def _send(self, connection: socket.socket, answer: bytes) -> None:
        try:
            for place in range(0, len(answer), 1 if self._pause_s else len(answer) or 1):
                connection.sendall(answer[place : place + (1 if self._pause_s else len(answer))])
                time.sleep(self._pause_s)
        except OSError:
            return  # the client gave up


@pytest.fixture
def serve() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(*answers: list[bytes], pause_s: float = 0.0) -> Peer:
        peers.append(Peer(*answers, pause_s=pause_s))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.mark.parametrize(("method", "times"), [("POST", 1), ("GET", 2), ("DELETE", 2)])
def test_only_harmless_requests_are_sent_twice(serve: Callable[..., Peer], method: str, times: int) -> None:
    peer = serve([GOOD], [GOOD])  # hangs up at the second request of the first connection
    client = ServerClient(peer.address)
    client.call("GET", "/")
    if times == 1:
        with pytest.raises(ServerUnreachableError):
            client.call(method, "/")
    else:
        client.call(method, "/")
    assert peer.requests[1:] == [method.encode()] * times
    client.close()


def test_a_connection_the_server_closed_meanwhile_is_not_used(serve: Callable[..., Peer]) -> None:
    peer = serve([GOOD], [GOOD])
    client = ServerClient(peer.address)
    client.call("GET", "/")
    idle = client._pool._idle[0].sock
    idle.shutdown(socket.SHUT_WR)  # the peer sees the end and closes
    assert idle.recv(1, socket.MSG_PEEK) == b""
    client.call("POST", "/")
    client.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_peer_that_drips_cannot_hold_a_call(serve: Callable[..., Peer], method: str) -> None:
    peer = serve([GOOD + b" " * 1000], [GOOD], pause_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(ServerUnreachableError):
        ServerClient(peer.address).call(method, "/", timeout_s=0.8)
    assert time.monotonic() - began_s < 20.0  # it would drip for minutes


def test_an_answer_that_is_damaged_or_no_json_is_an_error(serve: Callable[..., Peer]) -> None:
    damaged = GOOD.replace(b"\r\n\r\n", b"\r\nSpot-Digest: 00\r\n\r\n")
    for answer in (damaged, GOOD.replace(b"{}", b"[}"), b"garbage\r\n\r\n", GOOD[:-1]):
        peer = serve([answer])
        with pytest.raises(ServerUnreachableError):
            ServerClient(peer.address).call("GET", "/", timeout_s=5.0)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_unknown_page_at_a_stranger_does_not_mean_no_snapshot(serve: Callable[..., Peer]) -> None:
    # What stands in front of a server that is gone for a moment answers so: a run must not start afresh over it.
    client = ServerClient(serve([b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]).address)
    with pytest.raises(ServerRefusedError, check=lambda error: error.status == 404):
        client.call("GET", "/v1/runs")
    client.close()


def test_nothing_leaks(start_server: StartServer) -> None:
    address = parse_spot_url(start_server().url)[0]
    client = ServerClient(address)
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        for _ in range(20):
            with pytest.raises(SnapshotNotFoundError):
                PartStream(client, "none")
            with pytest.raises(SpotError):
                client.call("DELETE", "/v1/files/run/none")
        threads = [threading.Thread(target=client.call, args=("GET", "/healthz")) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        assert descriptors() == before
    finally:
        gc.enable()


def test_a_fork_shares_no_connection(start_server: StartServer) -> None:
    client = start_server().client()
    client.call("GET", "/v1/status")
    pid = os.fork()
    try:
        for _ in range(50):
            assert client.call("GET", "/v1/status")["protocol"] == PROTOCOL_VERSION
            assert client.call("GET", "/v1/runs") == {"runs": []}
    except BaseException:
        if pid == 0:
            os._exit(1)
        raise
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_closing_ends_a_call_under_way(serve: Callable[..., Peer]) -> None:
    peer = serve([b" "], pause_s=30.0)
    client = ServerClient(peer.address)

    def close_then() -> None:
        until(lambda: peer.requests, "the call to be under way")
        client.close()

    threading.Thread(target=close_then).start()
    began_s = time.monotonic()
    with pytest.raises(ServerUnreachableError):
        client.call("GET", "/", timeout_s=100.0)
    assert time.monotonic() - began_s < 60.0


def test_closing_a_session_ends_a_call_under_way(tmp_path: Path) -> None:
    """Who asked waited for as long as a call may take, and for as long the server took the trainer for alive."""
    is_asked, has_ended = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for answer in (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b'{"session": "one"}\n'):
                connection.recv(65536)
                connection.sendall(answer)
            connection.recv(65536)
            is_asked.set()
            connection.recv(1)
            has_ended.set()

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(2) as pool:
        listener.bind(str(tmp_path / "http"))
        listener.listen()
        pool.submit(serve)
        session = Session(ServerClient(Address(socket_path=str(tmp_path / "http"))), 90.0)
        call = pool.submit(session.map_slot, 0, 1)
        assert is_asked.wait(60)
        time.sleep(0.2)  # by then it waits for the answer
        session.close()
        with pytest.raises(ServerUnreachableError):
            call.result(30)
        assert has_ended.wait(30)


def test_what_a_newer_server_tells_besides_of_a_tier_is_left_out() -> None:
    told = TierHealth(kind="server", flushed=3, drain_s=0.5)
    answer = {"tiers": {"spot://server": {**asdict(told), "of_another_day": {"x": 1}}}}
    host: Any = SimpleNamespace(_call=lambda *_: answer)
    assert LocalServer.tiers(host) == {"spot://server": told}


@pytest.mark.parametrize("answers", [True, False], ids=["says-little", "says-nothing"])
def test_a_server_that_begins_to_receive_nothing_is_not_awaited(
    serve: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Each byte of its answer was given a minute, three times over. A slot was held for that long, and nothing sent."""
    monkeypatch.setattr(ServerClient.upgraded, "__defaults__", (0.2,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        if answers:
            address = serve([b"H" * 10_000], pause_s=0.01).address
        with pytest.raises(ServerUnreachableError):
            PartStream(ServerClient(address), "upload")


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda store: store.put(manifest_of(1), memoryview(image_of(1, 1000)), attempt=1), id="slot"),
        pytest.param(lambda store: store.client.receive("/v1/files/run/x", 0, memoryview(bytearray(9))), id="file"),
    ],
)
def test_a_server_vanishing_while_it_is_asked_is_probed(
    ask: Callable[[ServerStore], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that is cut closes no connection: an answer was waited for as long as it may take."""
    monkeypatch.setattr(ServerClient.ping, "__defaults__", (0.2,))
    monkeypatch.setattr(server_client, "PING_S", 0.1)
    monkeypatch.setattr(remote, "ASK_S", 0.2)
    monkeypatch.setattr(remote, "WAIT_FOR_SLOT_S", 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store, began_s = ServerStore(f"spot://127.0.0.1:{silent.getsockname()[1]}/run"), time.monotonic()
        with pytest.raises(ServerUnreachableError):
            ask(store)
        assert time.monotonic() - began_s < 45.0


@pytest.mark.parametrize("sends", [True, False], ids=["while-parts-are-sent", "while-it-is-to-answer"])
def test_a_server_vanishing_while_chunks_are_sent_is_probed(monkeypatch: pytest.MonkeyPatch, sends: bool) -> None:
    """Its answer was given a minute, and another connection was tried twice. With several hosts, nothing went on."""
    monkeypatch.setattr(part_streams, "SILENT_S", 0.2)
    monkeypatch.setattr(server_client, "PING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken, began_s = _upgraded_and_left(listener), time.monotonic()
        with pytest.raises(ServerUnreachableError):
            _send_to(listener.getsockname()[1], 2**26 if sends else 1000)
        assert time.monotonic() - began_s < 45.0
        for connection in taken:
            connection.close()


def test_a_server_gone_before_the_first_chunk_is_unreachable() -> None:
    """It was said to serve too many other connections."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ServerUnreachableError):
        _send_to(port, 1000)


def _send_to(port: int, nbytes: int) -> None:
    """Send a snapshot of one part as an upload that was begun."""
    image = memoryview(bytes(nbytes))
    manifest = manifest_of(1, 1, nbytes, part_bytes=nbytes).sealed(image)
    with ThreadPoolExecutor(1) as packing:
        encoder = PartEncoder(image, nbytes, None, None, packing)
        send_parts(ServerClient(Address("127.0.0.1", port)), "spot://gone", "upload", manifest, encoder)


def _upgraded_and_left(listener: socket.socket) -> list[socket.socket]:
    """Take connections for parts, and never read nor write again; what was taken."""
    taken: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(listener.accept()[0])
                if b"/stream " in taken[-1].recv(1000):
                    taken[-1].sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    return taken


def test_a_client_that_is_gone_leaves_no_connection_open(start_server: StartServer) -> None:
    """Each resume over a snapshot server left one, until it was collected with a ResourceWarning."""
    client = start_server().client()
    client.call("GET", "/v1/runs")
    (connection,) = client._pool._idle
    connected = connection.sock
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        del client, connection
        gc.collect()
        assert connected.fileno() == -1
