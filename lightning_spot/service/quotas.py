"""How much of something one client may hold: never so much that nothing is left for another."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

from lightning_spot.protocol.ownership import peer_of

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


class Turns:
    """Handles so many requests of each client at once; its others wait, and hold no thread meanwhile.

    Args:
        most: of one client.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._asking: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}

    def handler(self, handle: Handler) -> Handler:
        """A handler of requests that has each wait for its turn."""

        async def in_turn(request: web.Request) -> web.StreamResponse:
            client = client_of(request)
            self._asking[client] += 1
            try:
                async with self._turns.setdefault(client, asyncio.Semaphore(self._most)):
                    return await handle(request)
            finally:
                self._asking -= Counter([client])
                if client not in self._asking:
                    del self._turns[client]

        return in_turn


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
