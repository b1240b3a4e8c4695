"""Bounds what one client may cost a server: its connections, above all those without a request, and what it holds."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lightning_spot.protocol.listening import CountedLog
from lightning_spot.protocol.ownership import is_own_user, peer_of

THIS_HOST = "this host"
"""Address of those who come by a Unix socket."""


def request_logger(counted: CountedLog) -> logging.Logger:
    """A logger for aiohttp's server. It belongs to one server, and no settings of logging reach it."""
    made = logging.Logger("aiohttp.server", logging.DEBUG)  # aiohttp logs what is no HTTP at all at that level
    made.addHandler(_Counting(counted))
    return made


class _Counting(logging.Handler):
    def __init__(self, counted: CountedLog) -> None:
        super().__init__()
        self._counted = counted

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            address = record.args[0] if isinstance(record.args, tuple) and record.args else None
            self._counted.add("bad requests", str(address or THIS_HOST))
        elif record.levelno >= logging.WARNING:
            self._counted.add_error(f"errors of the HTTP server: {record.msg}", error)


HEAD_TIMEOUT_S = 10.0
"""A request's line and headers must be there within this time of its first byte, and of the connection's start."""

LONGEST_FIELD_BYTES = 1024
"""One header of a request, or its line, has no more bytes than this; a token has 512 at most."""

MOST_HEADERS = 32
"""Headers of one request: its head is within 32 KiB. Our clients send about ten, proxies add theirs."""

SERVER_IDLE_TIMEOUT_S = 60.0
"""A kept-alive connection without a request is closed after this time."""

MOST_CONNECTIONS = 4096
"""When there are so many, a new one takes the place of the one that has been idle longest."""

DESCRIPTORS = 2**20
"""Open files that a server should be allowed, as far as it may: each connection, stream of parts and slot is one."""


class Connections:
    """Makes one :class:`Accepted` for each connection. All methods are called on the event loop.

    Args:
        make_handler: makes the HTTP protocol of one connection.
        most: connections at most.
        head_timeout_s: see :data:`HEAD_TIMEOUT_S`.
        server_idle_timeout_s: see :data:`SERVER_IDLE_TIMEOUT_S`.
    """

    def __init__(
        self,
        make_handler: Callable[[], asyncio.Protocol],
        *,
        most: int = MOST_CONNECTIONS,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        server_idle_timeout_s: float = SERVER_IDLE_TIMEOUT_S,
    ) -> None:
        self.head_timeout_s = head_timeout_s
        self.server_idle_timeout_s = server_idle_timeout_s
        self._make_handler = make_handler
        self._most = most
        self._open: dict[asyncio.BaseTransport, Accepted] = {}

    def __call__(self) -> Accepted:
        """The protocol of a new connection, as ``loop.create_server`` wants it."""
        return Accepted(self, self._make_handler())

    def of(self, transport: asyncio.BaseTransport | None) -> Accepted | None:
        """The connection of a transport, if it is open."""
        return self._open.get(transport) if transport is not None else None

    def opened(self, transport: asyncio.BaseTransport, accepted: Accepted) -> None:
        """A connection was made; if there are too many now, the one that has been idle longest goes."""
        self._open[transport] = accepted
        if len(self._open) > self._most:
            idle = [item for item in self._open.items() if not item[1].busy]
            oldest, dropped = min(idle, key=lambda item: item[1].idle_since_s) if idle else (transport, accepted)
            self.closed(oldest)  # at once: the next one that comes is to displace another
            dropped.drop()

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """A connection has ended."""
        self._open.pop(transport, None)


class Accepted(asyncio.Protocol):
    """One connection: hands everything on to its HTTP protocol and keeps the time.

    Attributes:
        busy: whether a request of it is being handled.
        idle_since_s: time of the event loop since when it is not.
        gone: done once the connection has ended.
    """

    def __init__(self, connections: Connections, handler: asyncio.Protocol) -> None:
        self._connections = connections
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._head_begun = self._lingers = False
        self.busy = False
        self.idle_since_s = self._loop.time()
        self.gone: asyncio.Future[None] = self._loop.create_future()

    def begin_request(self) -> None:
        """The headers of a request are there: its handler keeps the time now."""
        self.busy = True
        self._head_begun = self._lingers = False
        self._stop_timer()

    def end_request(self, *, is_whole: bool = True) -> None:
        """The request was handled; another one may follow.

        Args:
            is_whole: whether all of it has come. What is still on its way of one that was refused is no head: the HTTP
                protocol drops it for a while, since a client that is hung up on meanwhile never reads why.
        """
        self.busy, self.idle_since_s, self._lingers = False, self._loop.time(), not is_whole
        self._start_timer(self._connections.server_idle_timeout_s if is_whole else self._connections.head_timeout_s)

    def drop(self) -> None:
        """Close the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._head_begun = True
        self._start_timer(self._connections.head_timeout_s)
        self._handler.connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX and not is_own_user(sock):
            self.drop()
        else:
            self._connections.opened(transport, self)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if not (self.busy or self._lingers or self._head_begun):
            self._head_begun = True
            self._start_timer(self._connections.head_timeout_s)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        """See :class:`asyncio.Protocol`."""
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._stop_timer()
        if self._transport is not None:
            self._connections.closed(self._transport)
        if not self.gone.done():
            self.gone.set_result(None)
        self._handler.connection_lost(exc)

    def __getattr__(self, name: str) -> Any:
        # asyncio and aiohttp look at attributes of a transport's protocol, which is this object and not the handler.
        return getattr(self._handler, name)

    def _start_timer(self, within_s: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(within_s, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NETWORK_BITS = 64  # of IPv6: one host has at least as many addresses as these leave


class Quota:
    """So many of something, shared by clients of whom nobody knows beforehand how many there will be.

    A client may hold as much as is left (the dynamic threshold of switches that share a buffer, Choudhury and Hahne
    1998): half of all if it is alone, a share of n + 1 if n want as much as they can get. So a new one finds room, if
    not too many have come first. Methods may be called on any thread.

    Args:
        most: of all clients together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
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
    def holding(self, client: str, amount: int = 1) -> Iterator[bool]:
        """Let a client have more for a while; whether it may."""
        may = self.take(client, amount)
        try:
            yield may
        finally:
            if may:
                self.give_back(client, amount)


def client_at(connection: Any) -> str:
    """Who is at the other end of a socket: an address of TCP, the process at a Unix socket, ``""`` if it has gone."""
    with suppress(OSError, ValueError):
        if connection.family == socket.AF_UNIX:
            peer = peer_of(connection)
            return f"pid {peer[0]}" if peer is not None else ""
        address = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
        if isinstance(address, ipaddress.IPv4Address):
            return str(address)
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False))
    return ""


def client_of(request: web.Request) -> str:
    """Who sent a request, see :func:`client_at`."""
    sock = request.transport.get_extra_info("socket") if request.transport is not None else None
    return client_at(sock) if sock is not None else ""
