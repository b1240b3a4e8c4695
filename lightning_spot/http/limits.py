"""Bounds what one client may cost a server: its connections, above all those without a request, and what it holds.

What strangers do is logged by kind and address, of which :mod:`~lightning_spot.say` tells few apart.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lightning_spot.errors import FailureReason, ServerRefusedError, SnapshotFailedError, TierReason
from lightning_spot.protocol.listening import open_files
from lightning_spot.protocol.ownership import is_own_user, peer_of
from lightning_spot.say import say

THIS_HOST = "this host"
"""Address of those who come by a Unix socket."""


class RequestLogger(logging.Logger):
    """A logger for aiohttp's server. It belongs to one server, and no settings of logging reach it."""

    def __init__(self) -> None:
        super().__init__("aiohttp.server", logging.DEBUG)  # aiohttp logs what is no HTTP at all at that level

    def handle(self, record: logging.LogRecord) -> None:
        """Log it as a message of ours: nothing of what a stranger sent."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            address = record.args[0] if isinstance(record.args, tuple) and record.args else None
            say_bad_request("no valid HTTP", str(address or THIS_HOST))
        elif record.levelno >= logging.WARNING:
            say_server_error(str(record.msg), error)


def say_bad_request(what: str, client: str) -> None:
    """Log that a client has sent something that is no request."""
    say(logging.WARNING, "request-bad", "bad request ({about})", about=f"{what} from {client}", of_strangers=True)


def say_server_error(what: str, error: BaseException | None) -> None:
    """Log an error beside all requests, by its class and place: its text may hold what a stranger sent."""
    if isinstance(error, OSError):
        what += f" ({error.strerror or type(error).__name__})"
    elif error is not None:
        places = traceback.extract_tb(error.__traceback__)
        where = f" at {places[-1].filename}:{places[-1].lineno}" if places else ""
        what += f" ({type(error).__name__}{where})"
    text = "the server goes on after an error: {about}"
    say(logging.WARNING, "server-error", text, about=what, of_strangers=True)


HEAD_TIMEOUT_S = 10.0
"""A request's line and headers must be there within this time of its first byte, and of the connection's start."""

LONGEST_FIELD_BYTES = 1024
"""One header of a request, or its line, has no more bytes than this; a token has 512 at most."""

MOST_HEADERS = 32
"""Headers of one request: its head is within 32 KiB. Our clients send about ten, proxies add theirs."""

KEEPALIVE_S = 60.0
"""A kept-alive connection without a request is closed after this time."""

MOST_CONNECTIONS = 4096
"""When there are so many, a new one takes the place of the one that has been idle longest."""

MOST_STRANGERS = 512
"""Connections by TLS that have shown no token, each of which costs about 0.3 MB."""

HTTP: dict[str, Any] = {
    "logger": RequestLogger(),
    "access_log": None,
    "read_bufsize": 256 * 1024,
    "auto_decompress": False,
    "max_line_size": LONGEST_FIELD_BYTES,
    "max_field_size": LONGEST_FIELD_BYTES,
    "max_headers": MOST_HEADERS,
    "lingering_time": HEAD_TIMEOUT_S,
    "keepalive_timeout": KEEPALIVE_S,
}
"""What bounds the cost of a connection before its token is looked at."""

BACKLOG = 512
"""Of a socket that is listened to."""

AT_ONCE = 4  # asyncio accepts its backlog in one turn: before those beyond the most are dropped, all descriptors
_SHUTDOWN_S = 5.0  # of TLS: what is written still is sent, and the end is acknowledged

DESCRIPTORS = 2**20
"""Open files that a server should be allowed, as far as it may: each connection, stream of parts and slot is one."""


class Connections:
    """Makes one :class:`Accepted` for each connection. All methods are called on the event loop.

    Args:
        server: handles their requests.
        most: connections at most; default: a quarter of the files that may be open, see :data:`MOST_CONNECTIONS`.
        most_strangers: by TLS, connections at most that have shown no token; default: half of them, since they displace
            those with a token. A new one takes the place of the oldest one of the address that has most of them.
        head_timeout_s: see :data:`HEAD_TIMEOUT_S`.
        tls: how to speak TLS, asked for each connection; ``None`` for plain connections.
    """

    def __init__(
        self,
        server: web.Server,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        most: int | None = None,
        most_strangers: int | None = None,
        head_timeout_s: float = HEAD_TIMEOUT_S,
    ) -> None:
        self.head_timeout_s, self.tls = head_timeout_s, tls
        self._server = server
        self._most = most or min(MOST_CONNECTIONS, open_files() // 4)
        self._most_strangers = most_strangers or min(MOST_STRANGERS, self._most // 2)
        self._open: set[Accepted] = set()
        self._strangers: dict[Accepted, None] = {}  # in the order in which they came

    def __call__(self) -> Accepted:
        """The protocol of a new connection, as ``loop.create_server`` wants it."""
        return Accepted(self, self._server)

    def opened(self, accepted: Accepted) -> None:
        """A connection was made; if there are too many now, the one that has been idle longest goes."""
        self._open.add(accepted)
        if self.tls is not None:
            self._strangers[accepted] = None
            if len(self._strangers) > self._most_strangers:
                ((greediest, _),) = Counter(each.client for each in self._strangers).most_common(1)
                next(each for each in self._strangers if each.client == greediest).drop()
        if len(self._open) > self._most:
            idle = [each for each in self._open if not each.busy]
            min(idle, key=lambda each: each.idle_since_s, default=accepted).drop()

    def admitted(self, accepted: Accepted) -> None:
        """A connection has shown a token, or has ended: it is no stranger's any more."""
        self._strangers.pop(accepted, None)

    def closed(self, accepted: Accepted) -> None:
        """A connection has ended."""
        self._open.discard(accepted)
        self.admitted(accepted)


class Accepted(web.RequestHandler):
    """One connection that speaks HTTP; keeps the time until a request's head is there.

    Attributes:
        busy: whether a request of it is being handled.
        idle_since_s: time of the event loop since when it is not.
        gone: done once the connection has ended.
        client: who is at its other end, see :func:`client_at`.
        is_near: whether that is a process on this host, at a Unix socket.
    """

    def __init__(self, connections: Connections, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **HTTP)
        self._connections = connections
        self._wire: asyncio.Transport | None = None  # over which HTTP is spoken, once TLS is
        self._is_begun = False  # and HTTP is; :attr:`transport` says less: aiohttp lets go of it before it is closed
        self._early = b""  # what comes just before
        self._securing: asyncio.Task[None] | None = None
        self.client, self.is_near = "", False
        self._timer: asyncio.TimerHandle | None = None
        self.busy = False
        self.idle_since_s = loop.time()
        self.gone: asyncio.Future[None] = loop.create_future()

    def begin_request(self) -> None:
        """The headers of a request are there: its handler keeps the time now."""
        self.busy = True
        self._stop_timer()

    def end_request(self) -> None:
        """The request was handled; another one may follow. aiohttp hangs up where none does."""
        self.busy, self.idle_since_s = False, self._loop.time()

    def admit(self) -> None:
        """It has shown that it may ask for something."""
        self._connections.admitted(self)

    def drop(self) -> None:
        """Close the connection without a word. It counts no more at once: the next to come is to displace another."""
        if self._wire is not None:
            self._connections.closed(self)
            self._wire.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        sock = transport.get_extra_info("socket")
        self.client, self.is_near = client_at(sock), sock is not None and sock.family == socket.AF_UNIX
        self._begin_head()
        if self._connections.tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()
            self._securing = self._loop.create_task(self._secure(transport, self._connections.tls()))
        if self.is_near and not is_own_user(sock):
            self.drop()
        else:
            self._connections.opened(self)

    async def _secure(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Begin to speak TLS. The time for the head of the first request runs already."""
        if plain.is_closing():  # it had to give way at once: a handshake would never be told
            return
        secured = None
        with suppress(OSError):  # of OpenSSL, too
            secured = await self._loop.start_tls(
                plain,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._connections.head_timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        if secured is None or plain.is_closing():  # it was dropped, or the client has gone
            say_bad_request("a TLS handshake that failed", self.client)
            (secured or plain).abort()
            self.connection_lost(None)
            return
        self._wire = secured
        self._begin(secured)
        early, self._early = self._early, b""
        if early:
            self.data_received(early)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._is_begun = True
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if not self._is_begun:
            self._early += data
            return
        if data and not self.busy and self._timer is None:
            self._begin_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._stop_timer()
        self._connections.closed(self)
        if not self.gone.done():
            self.gone.set_result(None)
        if self._is_begun:
            super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._timer = self._loop.call_later(self._connections.head_timeout_s, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


ACCEPTED = web.RequestKey("accepted", Accepted)
"""The connection that a request came by."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NETWORK_BITS = 64  # of IPv6: one host has at least as many addresses as these leave


class Quota:
    """So many of something, shared by clients of whom nobody knows beforehand how many there will be.

    A client may hold as much as is left (the dynamic threshold of switches that share a buffer, Choudhury and Hahne
    1998): half of all if it is alone, a share of n + 1 if n want as much as they can get. So a new one finds room, if
    not too many have come first. Methods may be called on any thread.

    Args:
        most: of all clients together.
        what: is shared, for people.
        reason: of the error for who has its share.
    """

    def __init__(self, most: int, what: str, reason: TierReason | FailureReason = TierReason.REFUSED) -> None:
        self._most, self._what, self._reason = most, what, reason
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """What all clients hold."""
        return self._held.total()

    def take(self, client: str, amount: int = 1) -> bool:
        """Let a client have more; whether it may."""
        with self._lock:
            if self._held[client] + amount > self._most - self._held.total():
                return False
            self._held[client] += amount
            return True

    def give_back(self, client: str, amount: int = 1) -> None:
        """What a client had taken is free again."""
        with self._lock:
            self._held -= Counter({client: amount})  # which forgets who holds nothing

    @contextmanager
    def holding(self, client: str, amount: int = 1) -> Iterator[None]:
        """Let a client have more for a while.

        Raises:
            SpotError: if it has its share.
        """
        if not self.take(client, amount):
            text = f"this client has its share of the {self._what} that this server bears at once"
            if isinstance(self._reason, FailureReason):
                raise SnapshotFailedError(text, reason=self._reason)
            raise ServerRefusedError(text, status=503, reason=self._reason)
        try:
            yield
        finally:
            self.give_back(client, amount)


def client_at(connection: Any) -> str:
    """Who is at the other end of a socket: an address of TCP, the process at a Unix socket, ``""`` if it has gone."""
    with suppress(OSError, ValueError):
        if connection.family == socket.AF_UNIX:
            return f"pid {peer_of(connection)[0]}"
        address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
        if isinstance(address, ipaddress.IPv4Address):
            return str(address)
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False))
    return ""
