"""Speaks to a server: a small blocking HTTP client over TCP or a Unix socket. Every call ends in time."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from lightning_spot.client.connection import BoundedSocket, Connection, Pool
from lightning_spot.config import PROTOCOL_VERSION, SEND_BYTES, check_token
from lightning_spot.errors import ServerRefusedError, ServerUnreachableError, SpotError, TierReason
from lightning_spot.protocol.credentials import current_secrets
from lightning_spot.protocol.wire import (
    ATTEMPT_HEADER,
    DIGEST_HEADER,
    LONGEST_DIGESTED_BYTES,
    PROTOCOL_HEADER,
    TARGET_HEADER,
    UPGRADE,
    WANT_DIGEST_HEADER,
    Address,
    answered,
    attempt_text,
    error_from_body,
    target_of,
)
from lightning_spot.snapshot.parts import checksum
from lightning_spot.untrusted import LARGE_JSON_BYTES, plain, read_object

_UPGRADE_TIMEOUT_S = 10.0  # a server answers before it does anything; meanwhile a slot is taken, and nothing sent

REPLY_TIMEOUT_S = 60.0
PING_S = 5.0
"""A server that does not answer in that time is lost: its link may be cut, which closes no connection."""

_PATIENCE = 2  # in times of a ping's
_CHECK_CERTIFICATE = "; if it asks for a client certificate, check LIGHTNING_SPOT_CLIENT_CERT"
_CHECK_SCHEME = "; if it speaks TLS, write spots://"
_IDEMPOTENT = ("GET", "DELETE")


_Read = Callable[[http.client.HTTPResponse, BoundedSocket], Any]
"""Reads an answer; what takes longer than the whole request may sets the deadline of its connection again."""


class ServerClient:
    """Requests to one server. May be used from any thread.

    Args:
        address: where it listens.
        token: secret to send; default from the environment, as it is at each request.
    """

    def __init__(self, address: Address, token: str | None = None) -> None:
        self.address = address
        given = (check_token("token=", token),) if token is not None else ()
        self._secrets = (lambda: given) if given else current_secrets
        self._pool = Pool(address)
        self._attempt = ""

    def speak_for(self, attempt: int, token: str) -> None:
        """Show a run's attempt, and its token, with each request from now on that may change something."""
        self._attempt = attempt_text(attempt, token) if token else ""

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        again: bool | None = None,
        pulse: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Send a JSON request and return the JSON answer.

        Args:
            method: of HTTP.
            path: quoted.
            body: JSON-ready, or ``None`` for none.
            timeout_s: bound on the whole call, seconds.
            again: whether the request may be sent twice when a connection breaks; default: as HTTP says of ``method``.
            pulse: called about every second while the answer is waited for; what it raises ends the call.

        Raises:
            ServerUnreachableError: if no server answers in time.
            SpotError: whatever the server answered with.
        """
        data = json.dumps(body).encode() if body is not None else b""
        headers = {DIGEST_HEADER: checksum(data)} if data else {}
        again = method in _IDEMPOTENT if again is None else again
        answer = self._exchange(method, path, headers, data, _read_all, timeout_s, again=again, pulse=pulse)
        with answered(str(self.address)):
            return read_object(answer or b"{}", LARGE_JSON_BYTES)

    def ping(self, timeout_s: float = PING_S) -> None:
        """Ask whether the server is there: who waits for a long answer does it meanwhile.

        Raises:
            ServerUnreachableError: if it does not answer in time.
        """
        self.call("GET", "/healthz", timeout_s=timeout_s)

    def ping_under_load(self) -> None:
        """Ask whether the server is there while the line may be full of what is read or sent."""
        self.ping(_PATIENCE * PING_S)

    def upgraded(self, path: str, timeout_s: float = _UPGRADE_TIMEOUT_S) -> BoundedSocket:
        """A connection of its own that speaks no HTTP any more, once the server has agreed to that at ``path``.

        Raises:
            ServerUnreachableError: if no server answers in time.
            SpotError: whatever the server answered with.
        """
        connection, deadline_s = Connection(self.address), time.monotonic() + timeout_s
        try:
            connection.open(deadline_s)
            connection.sock.deadline_s = deadline_s
            headers = {**self._headers("POST", path), "Connection": "Upgrade", "Upgrade": UPGRADE}
            connection.request("POST", path, headers={**headers, "Content-Length": "0"})
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
                    raise error_from_body(response.status, response.read(LARGE_JSON_BYTES), str(self.address))
            return connection.sock
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | http.client.HTTPException) and not isinstance(error, SpotError):
                raise self._unreachable(error) from error
            raise

    def receive(self, path: str, start: int, into: memoryview, etag: str | None = None) -> None:
        """Read ``len(into)`` bytes of a file, from byte ``start`` on.

        Args:
            path: quoted.
            start: first byte.
            into: is filled.
            etag: of the version wanted; another one is refused, and bytes that were damaged on their way are an error.
                Without, the caller checks what came.

        Raises:
            ServerUnreachableError: if the connection breaks before all of them came.
        """
        if etag is not None and len(into) > LONGEST_DIGESTED_BYTES:
            for place in range(0, len(into), LONGEST_DIGESTED_BYTES):
                self.receive(path, start + place, into[place : place + LONGEST_DIGESTED_BYTES], etag)
            return

        def read(response: http.client.HTTPResponse, connected: BoundedSocket) -> None:
            place = 0
            while place < len(into):
                count = response.readinto(into[place : place + SEND_BYTES])
                if not count:
                    raise ConnectionError(f"only {place} of {len(into)} bytes came")
                place += count
                connected.within(REPLY_TIMEOUT_S)  # all of it may take longer, as long as it moves
            response.read()
            if not response.getheader("Content-Range", "").startswith(f"bytes {start}-{start + len(into) - 1}/"):
                raise ConnectionError("another range came than was asked for")
            if etag is not None and response.getheader(DIGEST_HEADER) != checksum(into):
                raise ConnectionError("what came was damaged on its way")

        if len(into):
            headers = {"Range": f"bytes={start}-{start + len(into) - 1}"}
            if etag is not None:
                headers.update({"If-Match": etag, WANT_DIGEST_HEADER: "1"})
            self._exchange("GET", path, headers, b"", read, REPLY_TIMEOUT_S, again=True, pulse=self.ping_under_load)

    def close(self) -> None:
        """Close the connections; calls under way fail at once. The client may be used again."""
        self._pool.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _exchange(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        read: _Read,
        timeout_s: float,
        *,
        again: bool,
        pulse: Callable[[], None] | None,
    ) -> Any:
        """Send a request; once more if a kept connection broke, or the server failed, and that does no harm."""
        deadline_s = time.monotonic() + timeout_s
        has_failed = False
        while True:
            was_kept = False
            try:
                with self._pool.connection(deadline_s) as connection:
                    was_kept, connected = connection.was_kept, connection.sock  # which a closing answer takes from it
                    connected.deadline_s, connected.pulse = deadline_s, pulse
                    sent = {**self._headers(method, path), "Content-Length": str(len(body)), **headers}
                    connection.request(method, path, body or None, sent)
                    response = connection.getresponse()
                    if response.status >= 400:
                        raise error_from_body(response.status, response.read(LARGE_JSON_BYTES), str(self.address))
                    self._check_protocol(response)
                    return read(response, connected)
            except SpotError as error:
                if has_failed or not again or not TierReason.SERVER_FAILED.caused(error):
                    raise
                has_failed = True
            except (OSError, http.client.HTTPException, ValueError) as error:
                if was_kept and again and not isinstance(error, TimeoutError):
                    continue
                raise self._unreachable(error) from (error if isinstance(error, OSError) else None)

    def _unreachable(self, error: Exception) -> ServerUnreachableError:
        # The text of errors of HTTP quotes headers: ours, with the token, or what a stranger has answered.
        why = f"{type(error).__name__}: {plain(error)}" if isinstance(error, OSError) else type(error).__name__
        if isinstance(error, ConnectionError | ssl.SSLError) and not isinstance(error, ConnectionRefusedError):
            why += _CHECK_CERTIFICATE if self.address.tls else _CHECK_SCHEME if self.address.host else ""
        return ServerUnreachableError(f"no snapshot server answers at {self.address} ({why})", tier=str(self.address))

    def _headers(self, method: str, path: str) -> dict[str, str]:
        """What every request shows."""
        token = next(iter(self._secrets()), None)
        return {
            PROTOCOL_HEADER: str(PROTOCOL_VERSION),
            TARGET_HEADER: target_of(method, path),
            **({"Authorization": f"Bearer {token}"} if token else {}),
            **({ATTEMPT_HEADER: self._attempt} if self._attempt and method != "GET" else {}),
        }

    def _check_protocol(self, response: http.client.HTTPResponse) -> None:
        spoken = response.getheader(PROTOCOL_HEADER)
        if spoken != str(PROTOCOL_VERSION):
            remedy = ": install the same version of lightning_spot on both hosts (or check the address)"
            raise ServerRefusedError(
                f"{self.address} speaks protocol {plain(spoken or 'unknown')}, this client {PROTOCOL_VERSION}"
                f"{remedy if self.address.host else ''}",
                tier=str(self.address),
                reason=TierReason.PROTOCOL,
            )


def _read_all(response: http.client.HTTPResponse, _connected: BoundedSocket) -> bytes:
    answer = response.read(LARGE_JSON_BYTES + 1)
    if len(answer) > LARGE_JSON_BYTES:
        raise ConnectionError("its answer is too long")
    if response.getheader(DIGEST_HEADER, checksum(answer)) != checksum(answer):
        raise ConnectionError("its answer was damaged on its way")
    return answer


def quoted(*names: str) -> str:
    """Path of URL-quoted names: ``quoted("run", "a=b")`` is ``run/a%3Db``."""
    return "/".join(quote(name, safe="/") for name in names)
