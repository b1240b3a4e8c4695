"""A store that takes connections and says nothing for a while: requests are bounded, and sent again when it is back."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import aiohttp
import pytest
import s3fs

from lightning_spot.cli import doctor, main, snapshots
from lightning_spot.client.stores import open_store
from lightning_spot.retry import RetryPolicy
from lightning_spot.store import fsspec_client
from lightning_spot.threads import in_background
from tests.support.proxy import Proxy
from tests.support.said import said_about
from tests.support.store import put

pytestmark = [pytest.mark.guarantee("G2"), pytest.mark.guarantee("G17")]

MIB = 2**20
SILENT_S = 1.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_client, "SILENT_S", SILENT_S)


@pytest.fixture
def proxy(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Before the bucket."""
    proxy = Proxy(s3_server, seed=0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    s3fs.S3FileSystem.clear_instance_cache()  # of one that an earlier test has left, which knows another way there
    yield proxy
    proxy.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("reads", [True, False], ids=["what comes is lost", "nothing is read"])
@pytest.mark.parametrize("nbytes", [1000, 12 * MIB], ids=["small", "in blocks"])
def test_a_put_is_durable_soon_after_the_store_is_back(
    s3: str, proxy: Proxy, reads: bool, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """S3's library waited for 15 s on each of its dead connections, one after the other."""
    store = open_store(f"{s3}/run-1")
    put(store, 1, nbytes=nbytes, part_bytes=MIB)  # connections that will be lost
    proxy.fall_silent(reads=reads)
    putting = in_background(lambda: put(store, 2, nbytes=nbytes, part_bytes=MIB), "put")
    time.sleep(2 * SILENT_S)  # that long it is silent; not for order
    assert not putting.done()
    proxy.speak()
    second = putting.result(timeout=40)  # its library would wait for longer, see above
    assert store.has(second)
    (silent,) = said_about(caplog, "storage-silent")
    assert silent.startswith(s3)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("command", ["doctor", "ls", "show"])
def test_commands_do_not_wait_for_a_store_that_says_nothing(
    s3: str, proxy: Proxy, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``doctor`` took four minutes, and asked again to delete what it had not written."""
    monkeypatch.setattr(fsspec_client, "SILENT_S", 60.0)
    monkeypatch.setattr(doctor, "DEFAULT_POLICY", RetryPolicy(silent_s=0.5))
    monkeypatch.setattr(snapshots, "ONCE", RetryPolicy(tries=1, silent_s=0.5))
    monkeypatch.setattr(doctor, "local_server_speed", lambda _url, _nbytes: 1e9)
    proxy.fall_silent()
    begun_s = time.monotonic()
    assert main([command, f"{s3}/run"]) in (1, 2)
    assert time.monotonic() - begun_s < 45  # one answer that is waited for takes 60 s
    said = capsys.readouterr()
    assert (said.out + said.err).count(f"{s3}/run: no answer within 0 s. Check it and the network to it") == 1


# -- any library ------------------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


def says_nothing(near: socket.socket) -> None:
    near.recv(65536)


def says_half(near: socket.socket) -> None:
    near.recv(65536)
    near.sendall(OK + b"12345")


def takes_nothing(_near: socket.socket) -> None:
    """What is sent stays in the kernel."""


def says_a_byte_now_and_then(near: socket.socket) -> None:
    near.recv(65536)
    near.sendall(OK)
    for _ in range(10):
        time.sleep(SILENT_S / 8)
        near.sendall(b"1")


def answers(near: socket.socket) -> None:
    near.recv(65536)
    near.sendall(OK + b"1234567890")


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Serve each connection by a function, and then leave it open; the URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def start(behave: Callable[[socket.socket], None]) -> str:
        def accept() -> None:
            while True:
                try:
                    near, _ = listening.accept()
                except OSError:
                    return
                held.append(near)
                threading.Thread(target=behave, args=(near,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    listening.shutdown(socket.SHUT_RDWR)
    for connection in [listening, *held]:
        connection.close()


async def _request(url: str, nbytes: int, idle_s: float) -> tuple[bytes, int]:
    """The answer, and how many connections are kept for more requests after a while."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.put(url, data=bytes(nbytes)) as answer:
            body = await answer.read()
        await asyncio.sleep(idle_s)
        kept = session.connector._conns if session.connector is not None else {}
        return body, sum(protocol.is_connected() for conns in kept.values() for protocol, _ in conns)


@pytest.mark.parametrize(
    ("behave", "nbytes", "fails"),
    [
        (says_nothing, 10, True),
        (says_half, 10, True),
        (takes_nothing, 16 * MIB, True),
        (says_a_byte_now_and_then, 10, False),
        (answers, 10, False),
    ],
)
def test_what_moves_no_byte_is_given_up_and_nothing_else(
    serve: Callable[[Callable[[socket.socket], None]], str],
    behave: Callable[[socket.socket], None],
    nbytes: int,
    fails: bool,
) -> None:
    url = serve(behave)
    loop = fsspec_client.loop_of(f"x://{url[-5:]}")
    asked = asyncio.run_coroutine_threadsafe(_request(url, nbytes, 2 * SILENT_S), loop)
    if fails:
        with pytest.raises(aiohttp.ClientError):
            asked.result(timeout=120)
        assert "no byte moved" in loop.silent
    else:
        assert asked.result(timeout=120) == (b"1" * 10 if behave is not answers else b"1234567890", 0)
        assert loop.silent == ""  # that an unused one is closed concerns nobody
