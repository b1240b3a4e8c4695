"""Speaks to a node: a small blocking HTTP client, one kept-alive connection per thread, TCP or Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import quote

from lightning_spot.config import PROTOCOL_VERSION, SEND_BYTES, read_environment
from lightning_spot.errors import NodeUnreachable, ProtocolMismatch, SpotError
from lightning_spot.memory.stream import PartStream
from lightning_spot.memory.wire import PROTOCOL_HEADER, Address, error_from_body

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 60.0


class _Connection(http.client.HTTPConnection):
    """An HTTP connection to an :class:`Address`."""

    def __init__(self, address: Address) -> None:
        super().__init__(address.host.strip("[]") or "localhost", address.port or 80, timeout=CONNECT_TIMEOUT_S)
        self._address = address

    def connect(self) -> None:
        """Open the socket."""
        if self._address.socket_path:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(CONNECT_TIMEOUT_S)
            self.sock.connect(self._address.socket_path)
        else:
            super().connect()
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class NodeClient:
    """Requests to one node. May be used from any thread.

    Args:
        address: where it listens.
        token: secret to send; default from the environment.
    """

    def __init__(self, address: Address, token: str | None = None) -> None:
        self.address = address
        self._token = token if token is not None else read_environment().token
        self._local = threading.local()

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = REPLY_TIMEOUT_S) -> dict[str, Any]:
        """Send a JSON request and return the JSON answer.

        Raises:
            NodeUnreachable: if no node answers.
            SpotError: whatever the node answered with.
        """
        data = json.dumps(body).encode() if body is not None else None
        answer = self._exchange(method, path, data, len(data) if data else 0, {}, timeout_s, _read_all)
        return cast(dict[str, Any], json.loads(answer or b"{}"))

    def send(self, path: str, data: memoryview, *, method: str = "PUT") -> dict[str, Any]:
        """Send raw bytes and return the JSON answer. ``data`` is not copied and may be reused afterwards."""
        answer = self._exchange(method, path, data, len(data), {}, REPLY_TIMEOUT_S, _read_all)
        return cast(dict[str, Any], json.loads(answer or b"{}"))

    def stream(self, upload: str) -> PartStream:
        """Open a connection of its own for the parts of an upload; see :class:`PartStream`."""
        return PartStream(self.address, self._token, upload)

    def receive(self, path: str, start: int, into: memoryview) -> None:
        """Read ``len(into)`` bytes of a file, from byte ``start`` on.

        Raises:
            NodeUnreachable: if the connection breaks before all of them came.
        """

        def read(response: http.client.HTTPResponse) -> bytes:
            place = 0
            while place < len(into):
                count = response.readinto(into[place : place + SEND_BYTES])
                if not count:
                    raise ConnectionError(f"only {place} of {len(into)} bytes came")
                place += count
            response.read()
            return b""

        if len(into):
            headers = {"Range": f"bytes={start}-{start + len(into) - 1}"}
            self._exchange("GET", path, None, 0, headers, REPLY_TIMEOUT_S, read)

    def head(self, path: str) -> dict[str, str]:
        """Headers of a file, in lower case."""
        headers: dict[str, str] = {}

        def read(response: http.client.HTTPResponse) -> bytes:
            headers.update({name.lower(): value for name, value in response.getheaders()})
            return response.read()

        self._exchange("GET", path, None, 0, {"Range": "bytes=0-0"}, REPLY_TIMEOUT_S, read)
        return headers

    def close(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | memoryview | None,
        nbytes: int,
        headers: dict[str, str],
        timeout_s: float,
        read: Callable[[http.client.HTTPResponse], bytes],
    ) -> bytes:
        headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION), "Content-Length": str(nbytes), **headers}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        for last_try in (False, True):
            connection: _Connection | None = getattr(self._local, "connection", None)
            reused = connection is not None
            try:
                if connection is None:
                    connection = self._local.connection = _Connection(self.address)
                    connection.connect()
                connection.sock.settimeout(timeout_s)
                # An iterable body bounds each send; larger sends were measured a third slower.
                connection.request(method, path, body=_slices(body), headers=headers)
                response = connection.getresponse()
                if response.status >= 400:
                    raise error_from_body(response.status, response.read(), str(self.address))
                self._check_protocol(response)
                return read(response)
            except SpotError:
                self.close()
                raise
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A kept-alive connection may have been closed by the node meanwhile: try once on a fresh one.
                if last_try or not reused or isinstance(error, TimeoutError):
                    raise NodeUnreachable(
                        f"no memory node answers at {self.address} ({type(error).__name__}: {error})",
                        tier=str(self.address),
                    ) from error
        raise AssertionError("unreachable")

    def _check_protocol(self, response: http.client.HTTPResponse) -> None:
        spoken = response.getheader(PROTOCOL_HEADER)
        if spoken != str(PROTOCOL_VERSION):
            raise ProtocolMismatch(
                f"{self.address} speaks protocol {spoken or 'unknown'}, this client {PROTOCOL_VERSION}: install the"
                " same version of lightning_spot on both hosts (or check the address)",
                tier=str(self.address),
            )


def _slices(body: bytes | memoryview | None) -> Iterator[memoryview] | None:
    if body is None:
        return None
    view = memoryview(body)
    return (view[start : start + SEND_BYTES] for start in range(0, len(view), SEND_BYTES))


def _read_all(response: http.client.HTTPResponse) -> bytes:
    return response.read()


def quoted(*names: str) -> str:
    """Path of URL-quoted names: ``quoted("run", "a=b")`` is ``run/a%3Db``."""
    return "/".join(quote(name, safe="/") for name in names)
