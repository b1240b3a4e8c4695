"""The key-value channel: all ranks of a run publish a few named values and wait for them, besides their collectives.

Rank 0 serves it. JSON lines over TCP: ``{"set": key, "value": …}`` publishes and is not answered; ``{"get": key}`` is
answered with ``{"key": key, "value": …}`` as soon as a rank has published it. When training has come to its end, rank 0
sends ``{"over": true}`` before it hangs up. Connections begin as :mod:`~lightning_spot.protocol.listening` says.
(torch's ``TCPStore`` would do, but aborts the process when its server goes first.)
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import time
from typing import Any

from lightning_spot.protocol.listening import LOOPBACK, Listening, greeted, keep_alive, most_connections, tcp_listener
from lightning_spot.untrusted import read_object

logger = logging.getLogger(__name__)

CONNECT_S = 30.0
SILENT_S = 60.0
"""After so long without an answer a connection is made anew, as long as training lives through that."""
RECONNECT_S = 5.0
"""A connection that was lost is made again within so long at each try."""

_PAUSE_S = 1.0
_LINE_BYTES = 64 * 1024
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)


class RankZeroEnded(ConnectionResetError):
    """Rank 0 has closed the channel, since its training has come to its end."""


class KeyValueServer:
    """Serves the values on a thread of its own.

    Args:
        secret: that every connection must begin with.
        host: address of this host that it listens at.
        world_size: how many ranks there are.

    Attributes:
        port: it listens at.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(self, secret: str, host: str = LOOPBACK, world_size: int = 2) -> None:
        self._values: dict[str, Any] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()
        listener = tcp_listener(host, SILENT_S)
        self.port: int = listener.getsockname()[1]
        self._listening = Listening(listener, self._talk, "spot-key-value", secret, most_connections(world_size))

    def close(self, *, over: bool = False) -> None:
        """Stop serving; connections are closed.

        Args:
            over: tell those who are connected that nothing is wrong.
        """
        self._listening.close(self._say_over if over else lambda: None)

    def _say_over(self) -> None:
        for writer in self._writers:
            writer.write(b'{"over": true}\n')  # so short a line goes out at once

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers: set[asyncio.Task[None]] = set()
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                request = read_object(line)
                if "set" in request:
                    await self._publish(request["set"], request["value"])
                else:
                    answers.add(asyncio.create_task(self._answer(writer, request["get"])))
        finally:
            for task in answers:
                task.cancel()
            self._writers.discard(writer)

    async def _publish(self, key: str, value: Any) -> None:
        async with self._changed:
            self._values.setdefault(key, value)  # the first word counts
            self._changed.notify_all()

    async def _answer(self, writer: asyncio.StreamWriter, key: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._values)
        writer.write(json.dumps({"key": key, "value": self._values[key]}).encode() + b"\n")
        await writer.drain()


class KeyValueClient:
    """A connection to the server, for one thread. One that is lost is made anew.

    Args:
        host: of rank 0.
        port: of its server.
        secret: of the run.

    Raises:
        OSError: if rank 0 cannot be reached; so do the methods when it has gone.
        RankZeroEnded: by the methods, if it has gone because its training has come to its end.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._address, self._secret = (host, port), secret
        self._said: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._values: dict[str, Any] = {}
        self._received = b""
        self._socket: socket.socket | None = self._connected(CONNECT_S)

    def set(self, key: str, value: Any) -> None:
        """Publish a plain value. Of several for one key, the first counts."""
        self._said.setdefault(key, value)
        self._send(_line(set=key, value=value))

    def get(self, key: str, wait_s: float) -> Any:
        """A published value; ``None`` if there is none within ``wait_s`` seconds."""
        if key not in self._asked:
            self._asked.add(key)
            self._send(_line(get=key))
        deadline = time.monotonic() + wait_s
        while key not in self._values and (left := deadline - time.monotonic()) > 0:
            if self._socket is None:
                self._connect_again(left)
            else:
                self._receive(self._socket, left)
        return self._values.get(key)

    def close(self) -> None:
        """Hang up. A second call does nothing."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _connected(self, within_s: float) -> socket.socket:
        """A connection on which all is said that was said, and asked that is not known."""
        connection = greeted(self._address, within_s, self._secret)
        try:
            keep_alive(connection, SILENT_S)
            connection.settimeout(CONNECT_S)
            lines = [_line(set=key, value=value) for key, value in self._said.items()]
            lines += [_line(get=key) for key in self._asked - self._values.keys()]
            connection.sendall(b"".join(lines))
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect_again(self, wait_s: float) -> None:
        """Connect, as soon as rank 0 can be reached.

        Raises:
            OSError: if rank 0 has gone, and does not only fail to answer.
        """
        time.sleep(min(wait_s, _PAUSE_S))
        try:
            self._socket = self._connected(RECONNECT_S)
        except OSError as error:
            if error.errno not in _NO_WAY and not isinstance(error, (TimeoutError, socket.gaierror)):
                raise
            logger.debug("rank 0 cannot be reached at present: %s", error)

    def _send(self, line: bytes) -> None:
        if self._socket is not None:  # else it is said when there is a connection again
            try:
                self._socket.sendall(line)
            except OSError as error:
                self._lost(error)

    def _receive(self, connection: socket.socket, wait_s: float) -> None:
        connection.settimeout(wait_s)
        try:
            received = connection.recv(_LINE_BYTES)
            connection.settimeout(CONNECT_S)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # nothing was there to receive
                connection.settimeout(CONNECT_S)
            else:
                self._lost(error)
            return
        if not received:
            raise ConnectionResetError("rank 0 has hung up")
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            answer = read_object(line)
            if "over" in answer:
                raise RankZeroEnded("the training of rank 0 has come to its end")
            self._values[answer["key"]] = answer["value"]

    def _lost(self, error: OSError) -> None:
        """Hang up: this connection is lost. Whether rank 0 has gone is seen when another one is made.

        A reset does not tell: rank 0 may only have found before us that nothing came from this rank, or what lies
        between them has forgotten the connection.
        """
        self.close()
        self._received = b""
        logger.debug("the connection to rank 0 is lost: %s", error)


def _line(**request: Any) -> bytes:
    return json.dumps(request).encode() + b"\n"
