"""Gives a snapshot that this process has opened to others: by descriptor on its host, by ranges to other hosts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from typing import IO

from lightning_spot.errors import SpotError
from lightning_spot.protocol.listening import LOOPBACK, Listening, most_connections, next_line, tcp_listener
from lightning_spot.protocol.ownership import is_own_user
from lightning_spot.protocol.wire import error_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.sharing import CONNECTIONS, SILENCE_S, Card, address_of, this_host
from lightning_spot.untrusted import read_json

logger = logging.getLogger(__name__)

_PULSE_S = 1.0
_SEND_BYTES = 4 * 2**20  # each may take SILENCE_S


class Giver:
    """Hands out what a process has opened, to whoever knows its secret.

    One thread serves all who ask: the kernel copies, and a snapshot lies in memory, unless the host has none for it.

    Args:
        world_size: how many ranks there are.

    Attributes:
        card: how it is reached.
    """

    def __init__(self, world_size: int = 2) -> None:
        self._lock = threading.Lock()
        self._turn = 0
        self._given: OpenSnapshot | SpotError | None = None
        self._fd: int | None = None
        self._closed = False
        self._most = most_connections(world_size, CONNECTIONS)
        self._listening: Listening | None = None
        self._news = asyncio.Event()
        secret, name = secrets.token_hex(16), secrets.token_hex(16)
        self.card = Card(this_host(), name, secret)
        try:
            self._listen(_bound(address_of(name)))
        except OSError as error:
            logger.debug("no memory can be shared on this host: %s", error)
            self.card = Card(secrets.token_hex(16), "", secret)

    def give_elsewhere(self, host: str = LOOPBACK) -> int:
        """Let processes of other hosts ask, too, at an address of this host; the port."""
        listener = tcp_listener(host, SILENCE_S)
        port: int = listener.getsockname()[1]
        self._listen(listener)
        return port

    def give(self, turn: int, what: OpenSnapshot | SpotError) -> None:
        """Hand out a snapshot, or why there is none, to those who ask for that turn; the one before is gone then.

        Args:
            turn: counts what was tried, from 1.
            what: the snapshot; its descriptor is kept until the next turn.
        """
        with self._lock:
            self._drop()
            self._turn, self._given = turn, what
            try:
                self._fd = os.dup(what.fd) if isinstance(what, OpenSnapshot) else None
            except OSError as error:  # who asks hears that there is nothing to be had, and reads for itself
                logger.warning("a snapshot cannot be given to other ranks: %s", error)
        if self._listening is not None:
            self._listening.call(self._tell)

    def close(self) -> None:
        """Hand out nothing more. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._drop()
        if self._listening is not None:
            self._listening.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._given = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _listen(self, listener: socket.socket) -> None:
        if self._listening is not None:
            self._listening.listen(listener)
        else:
            self._listening = Listening(listener, self._talk, "spot-giver", self.card.secret, self._most)

    # -- on its thread --------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _talk(self, connection: socket.socket, greeting: dict[str, object]) -> None:
        is_here = connection.family == socket.AF_UNIX
        if is_here and not is_own_user(connection):
            return
        given, fd = await self._await(connection, int(str(greeting["turn"])))
        try:
            if isinstance(given, SpotError) or fd is None:
                await _say(connection, {"failed": error_body(given) if isinstance(given, SpotError) else {}})
            elif is_here:
                facts = {name: getattr(given, name) for name in ("tier", "url", "in_memory", "sealed")}
                socket.send_fds(connection, [json.dumps(facts).encode() + b"\n"], [fd])  # so short a line fits at once
            else:
                await _say(connection, {})
                with open(fd, "rb", buffering=0, closefd=False) as file:
                    while True:
                        start, stop = read_json(await next_line(connection))
                        await _send(connection, file, start, stop)
        finally:
            if fd is not None:
                os.close(fd)

    async def _await(self, connection: socket.socket, turn: int) -> tuple[OpenSnapshot | SpotError | None, int | None]:
        """What is given in a turn, with a descriptor of the caller's own; while it is not ready, say that we live."""
        while True:
            news = self._news
            with self._lock:
                if self._closed or self._turn > turn:
                    return None, None
                if self._turn == turn:
                    return self._given, os.dup(self._fd) if self._fd is not None else None
            try:
                await asyncio.wait_for(news.wait(), _PULSE_S)
            except TimeoutError:
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connection, b"\n"), SILENCE_S)


async def _say(connection: socket.socket, answer: dict[str, object]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connection, line), SILENCE_S)


async def _send(connection: socket.socket, file: IO[bytes], start: int, stop: int) -> None:
    loop = asyncio.get_running_loop()
    for place in range(start, stop, _SEND_BYTES):
        nbytes = min(_SEND_BYTES, stop - place)
        await asyncio.wait_for(loop.sock_sendfile(connection, file, place, nbytes), SILENCE_S)


def _bound(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener
