"""What strangers without a token cost a server: no line of its log with a secret in it, few lines, little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pkgutil
import re
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import pytest

import lightning_spot
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import read_environment
from lightning_spot.errors import ServerRefusedError, ServerUnreachableError, SettingsError
from lightning_spot.protocol.wire import Address, error_from_body
from tests.integration.test_service_limits import address_of
from tests.support.server import StartServer

pytestmark = pytest.mark.guarantee("G30")

LAST_S = 120.0
MANY = 200


# -- the token ---------------------------------------------------------------------------------------------------------

TOKEN = "correct-horse-battery"


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize(
    ("given", "token"),
    [
        (TOKEN, TOKEN),
        (TOKEN + "\n", TOKEN),  # a Kubernetes secret made with `echo`
        (f" \t{TOKEN}\r\n", TOKEN),
        ("\n", None),
        ("correct horse battery", None),
        ("correct-horse\nbattery staple", None),
        ("correct-hörse-battery", None),
        ("correct-horse-\x7fbattery", None),
        ("correct-horse-battery" * 40, None),
    ],
)
def test_a_token_is_clean_or_an_error_that_does_not_quote_it(
    given: str, token: str | None, by_file: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "LIGHTNING_SPOT_TOKEN_FILE" if by_file else "LIGHTNING_SPOT_TOKEN"
    path = tmp_path / "token"
    path.write_text(given, encoding="latin-1", newline="")
    monkeypatch.setenv(name, str(path) if by_file else given)
    if token is not None:
        environment = read_environment()
        assert environment.token == token
        assert token not in repr(environment)
        return
    with pytest.raises(SettingsError, match=name) as caught:
        read_environment()
    assert "horse" not in str(caught.value)
    with pytest.raises(SettingsError, match="token=") as caught:
        ServerClient(Address("127.0.0.1", 1), given)
    assert "horse" not in str(caught.value)


def test_a_token_file_that_is_a_pipe_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(SettingsError, match="LIGHTNING_SPOT_TOKEN_FILE"):
        read_environment()


@pytest.mark.parametrize(("token", "is_weak"), [(None, False), ("x" * 15, True), ("x" * 16, False)])
def test_a_short_token_is_a_warning_of_the_server(token: str | None, is_weak: bool, start_server: StartServer) -> None:
    server = start_server(environment={"LIGHTNING_SPOT_TOKEN": token} if token else {})
    log = server.log.read_text()
    assert log.count("fewer than 16 characters") == is_weak
    assert "xxx" not in log


def test_no_dataclass_shows_its_secret() -> None:
    """A token in a repr is a token in the next traceback or debug line."""
    for module in pkgutil.walk_packages(lightning_spot.__path__, "lightning_spot."):
        if not module.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(module.name)
    shown, hidden = set(), set()
    for name, module in list(sys.modules.items()):
        for kind in vars(module).values() if name.startswith("lightning_spot.") else ():
            for each in dataclasses.fields(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else ():
                if re.search("token|secret|password", each.name):
                    (shown if each.repr else hidden).add(f"{kind.__name__}.{each.name}")
    assert shown == set()
    assert {"Environment.secrets", "RunInfo.token"} <= hidden


def test_an_answer_that_is_none_of_a_server_is_not_quoted() -> None:
    """What cannot read a request quotes the line that it cannot read: the one with the token, for instance."""
    body = f"400, message:\n  Invalid header value char:\n\n    b'Bearer {TOKEN}\\x01'".encode()
    error = error_from_body(400, body, "spot://10.0.0.1:7070")
    assert isinstance(error, ServerRefusedError)
    assert "horse" not in str(error)


def test_an_answer_that_is_no_http_is_not_quoted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                heard = connection.recv(65536)
                connection.sendall(heard[heard.index(b"Bearer") :])

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(ServerUnreachableError, match="BadStatusLine") as caught:
            ServerClient(Address("127.0.0.1", listener.getsockname()[1]), TOKEN).call("POST", "/v1/flush")
        answering.join()
    assert "horse" not in "".join(traceback.format_exception(caught.value))


# -- the log -----------------------------------------------------------------------------------------------------------

HEAD = f"GET /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}"


NO_HTTP = "bad request (no valid HTTP from 127.0.0.1)"


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        (f"{HEAD}\x01\r\n\r\n".encode(), NO_HTTP),
        (f"{HEAD}\r\nAuthorization {TOKEN}\r\n\r\n".encode(), NO_HTTP),
        (f"{HEAD}\r\nX: {TOKEN * 99}\r\n\r\n".encode(), NO_HTTP),
        (
            f"{HEAD}\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n".encode(),
            NO_HTTP,
        ),
        (f"G%T /{TOKEN} HTTP/1.1\r\n\r\n".encode(), NO_HTTP),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", NO_HTTP),
        (
            HEAD.encode() + b"x\r\n\r\n",
            "denied a request (GET /v1/runs, this server has another token than the one that came, from 127.0.0.1)",
        ),
        (
            b"PUT /v1/files/run/x HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n",
            "denied a request (PUT ?, this server asks for a token, from 127.0.0.1)",
        ),
        (b"", ""),
    ],
    ids=["damaged", "no colon", "too long", "two lengths", "method", "TLS", "wrong token", "half a file", "silence"],
)
def test_a_stranger_costs_a_few_log_lines_whatever_is_sent(sent: bytes, line: str, start_server: StartServer) -> None:
    """It was a traceback for each bad request, which quoted the header: 500 bytes, or 96 GiB a day."""
    server = start_server("--drain-timeout", "0", environment={"LIGHTNING_SPOT_TOKEN": TOKEN})
    before = len(server.log.read_bytes())
    for _ in range(MANY):
        with socket.create_connection(address_of(server), timeout=LAST_S) as connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            if sent:
                connection.recv(100)
    server.stop(signal.SIGTERM)
    log = server.log.read_bytes()[before:].decode()
    assert "Traceback" not in log
    assert "horse" not in log
    assert len(log) < 500
    assert log.count(line) == 1 if line else not log, log


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 20_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000,
        b"GET / HTTP/1.1\r\n" + b"X" * 20_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3_000,
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: %s\r\n" % (each, b"a" * 900) for each in range(40)),
        b"\r\n\r\n\r\n\r\nGET / HTTP/1.1\r\n" + b"".join(b"X%d: %s\r\n" % (each, b"a" * 900) for each in range(40)),
    ],
    ids=["line", "value", "name", "many headers", "40 headers", "after blank lines"],
)
@pytest.mark.parametrize("piece", [200, 10**6])
def test_a_head_that_does_not_end_is_not_kept(head: bytes, piece: int, start_server: StartServer) -> None:
    """It was kept up to a megabyte, for ten seconds; 4,096 of them were 4 GiB."""
    server = start_server()
    with (
        socket.create_connection(address_of(server), timeout=LAST_S) as connection,
        contextlib.suppress(ConnectionError),
    ):
        for start in range(0, len(head), piece):
            connection.sendall(head[start : start + piece])
        while connection.recv(1000):
            pass


def test_a_head_within_its_bound_is_read_however_it_is_cut(start_server: StartServer) -> None:
    server = start_server()
    headers = b"".join(b"X%d: %s\r\n" % (each, b"a" * 900) for each in range(8))
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n"
    for piece in (1000, 7, 10**6):
        with socket.create_connection(address_of(server), timeout=LAST_S) as connection:
            for _ in range(2):  # the second on the same connection
                for start in range(0, len(head), piece):
                    connection.sendall(head[start : start + piece])
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
