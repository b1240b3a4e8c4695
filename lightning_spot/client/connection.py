"""Connections of a client to a server: each call ends in time, idle ones are kept for the next, none crosses a fork."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

from lightning_spot.errors import ServerRefusedError, TierReason
from lightning_spot.protocol.credentials import client_context
from lightning_spot.protocol.ownership import is_own_user
from lightning_spot.protocol.process import wait_readable
from lightning_spot.protocol.wire import Address

CONNECT_TIMEOUT_S = 5.0
_PULSE_S = 1.0
_KEEP_S = 15.0  # less than a server keeps an idle connection
_MOST_IDLE = 8


def connect_to_own(path: str, timeout_s: float) -> socket.socket:
    """Connect to the Unix socket of a server of this user's.

    Raises:
        ServerRefusedError: if another user's process is at it: waiting would not help.
        OSError: if nothing can be reached there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
        if not is_own_user(connection):
            raise PermissionError("another user's process is at this socket")
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, PermissionError):
            raise ServerRefusedError(
                f"{path} is not used ({error.strerror or error}). Remove it, or set LIGHTNING_SPOT_RUNTIME_DIR to a"
                " private directory",
                status=403,
            ) from error
        raise


class BoundedSocket(socket.socket):
    """A socket whose calls end at a deadline, however slowly bytes trickle in.

    Attributes:
        deadline_s: no call lasts beyond it (monotonic clock).
        pulse: called about every second while an answer is waited for; what it raises ends the waiting.
    """

    deadline_s: float = 0.0
    pulse: Callable[[], None] | None = None

    def within(self, seconds: float) -> Self:
        """This socket, with a deadline so many seconds from now."""
        self.deadline_s = time.monotonic() + seconds
        return self

    def recv_into(self, *arguments: Any) -> int:
        """Receive, by the deadline."""
        while True:
            left_s = self.left_s
            self.settimeout(left_s if self.pulse is None else min(left_s, _PULSE_S))
            try:
                return super().recv_into(*arguments)
            except TimeoutError:
                if self.pulse is None:
                    raise
            self.pulse()

    def fill(self, target: memoryview, *, at_boundary: bool = False) -> bool:
        """Receive exactly ``target``, by the deadline.

        Args:
            target: what to fill.
            at_boundary: whether the peer may close before the first byte.

        Returns:
            ``False`` if it did.

        Raises:
            TimeoutError: if it takes longer.
            ConnectionError: if the peer closed in the middle.
        """
        place = 0
        while place < len(target):
            with target[place:] as rest:  # which no traceback keeps: a slot may be given other memory
                count = self.recv_into(rest)
            if not count:
                if at_boundary and place == 0:
                    return False
                raise ConnectionError("the peer closed the connection in the middle of a part")
            place += count
        return True

    def sendall(self, *arguments: Any) -> None:
        """Send, by the deadline."""
        self.settimeout(self.left_s)
        super().sendall(*arguments)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline.

        Raises:
            TimeoutError: if it is over.
        """
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s


class BoundedTLSSocket(BoundedSocket, ssl.SSLSocket):
    """The same by TLS; :class:`ssl.SSLContext` makes it."""

    def send(self, *arguments: Any) -> int:
        """Send what fits one record, by the deadline."""
        self.settimeout(self.left_s)
        return super().send(*arguments)

    def shutdown(self, how: int) -> None:
        """End the connection. Other than in the base class, no thread that uses it goes on without encryption."""
        socket.socket.shutdown(self, how)


class Connection(http.client.HTTPConnection):
    """An HTTP connection to an :class:`Address`, not open yet."""

    sock: BoundedSocket

    def __init__(self, address: Address) -> None:
        super().__init__(address.host.strip("[]") or "localhost", address.port or 80)
        self._address = address
        self.idle_since_s: float | None = None

    def open(self, deadline_s: float) -> None:
        """Open the socket by a deadline (monotonic).

        Raises:
            ServerRefusedError: if another user's process is at a Unix socket, or by TLS the server cannot be trusted.
            SettingsError: if the certificates of this process cannot be used.
            OSError: if nothing can be reached.
        """
        self.timeout = _left(deadline_s)
        context = client_context() if self._address.tls else None
        if self._address.socket_path:
            plain = connect_to_own(self._address.socket_path, self.timeout)
        else:
            plain = socket.create_connection((self.host, self.port), self.timeout)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            self.sock = BoundedSocket(fileno=plain.detach())
        else:
            plain.settimeout(_left(deadline_s))
            self.sock = self._secured(plain, context)

    def _secured(self, plain: socket.socket, context: ssl.SSLContext) -> BoundedTLSSocket:
        """The connection by TLS; what fails has closed it."""
        context.sslsocket_class = BoundedTLSSocket
        try:
            secured = context.wrap_socket(plain, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise self._untrusted(
                f"shows a certificate that is not trusted ({error.verify_message}). Nothing was sent. Set"
                " LIGHTNING_SPOT_CA to the file of its CA, or correct the address"
            ) from error
        except ssl.SSLEOFError:  # it went away, or is too busy
            raise
        except ssl.SSLError as error:
            raise self._untrusted(
                f"does not speak TLS with this client ({error.reason}). Nothing was sent. If it runs without"
                " --tls-cert, write spot:// instead of spots://"
            ) from error
        assert isinstance(secured, BoundedTLSSocket)
        return secured

    def _untrusted(self, why: str) -> ServerRefusedError:
        return ServerRefusedError(f"{self._address} {why}", tier=str(self._address), reason=TierReason.TLS)

    @property
    def was_kept(self) -> bool:
        """Whether it has been used before."""
        return self.idle_since_s is not None

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed it, or may have, while nobody used it."""
        if self.idle_since_s is None or time.monotonic() - self.idle_since_s > _KEEP_S:
            return True
        return bool(wait_readable([self.sock.fileno()], 0.0))  # nothing was asked, so what came is the end


def _left(deadline_s: float) -> float:
    return max(0.001, min(CONNECT_TIMEOUT_S, deadline_s - time.monotonic()))


forgetting: weakref.WeakSet[Any] = weakref.WeakSet()
"""What has connections that a forked child must not use: its ``forget()`` is called there."""


class Pool:
    """Open connections to one server that nobody uses at the moment. May be used from any thread.

    Args:
        address: of the server.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: deque[Connection] = deque()  # both change in one step, whatever other threads do
        self._taken: set[BoundedSocket] = set()
        weakref.finalize(self, _close_all, self._idle).atexit = False  # whoever only asks a server something lets it go
        forgetting.add(self)

    @contextlib.contextmanager
    def connection(self, deadline_s: float) -> Iterator[Connection]:
        """An open connection for one exchange. It is kept where that ends well, else closed.

        Raises:
            OSError: if none can be opened.
        """
        connection = self._kept() or Connection(self._address)
        if not connection.was_kept:
            connection.open(deadline_s)
        connected = connection.sock  # the connection forgets it when the server says that it will close it
        self._taken.add(connected)
        try:
            yield connection
            if connection.sock is not None and len(self._idle) < _MOST_IDLE:
                connection.idle_since_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()
        except BaseException:
            connection.close()
            raise
        finally:
            self._taken.discard(connected)

    def close(self) -> None:
        """Close every connection; a call that uses one fails at once."""
        _close_all(self._idle)
        for connected in list(self._taken):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connected.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Begin anew, as a forked child must: its parent goes on with the connections there were."""
        _close_all(self._idle)  # this process' descriptors only
        self._taken = set()

    def _kept(self) -> Connection | None:
        with contextlib.suppress(IndexError):
            while (connection := self._idle.pop()).is_stale:
                connection.close()
            return connection
        return None


def _close_all(idle: deque[Connection]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            idle.pop().close()


def _forget_all() -> None:
    for each in list(forgetting):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
