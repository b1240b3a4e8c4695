"""The exchange: a few named values that all ranks of a run can publish and wait for, beside their collectives.

Rank 0 serves it. JSON lines over TCP: ``{"set": key, "value": …}`` publishes and is not answered; ``{"get": key}`` is
answered with ``{"key": key, "value": …}`` as soon as somebody has published it. The first line of a connection is a
secret that the ranks share. Where training has come to its end, rank 0 says ``{"over": true}`` before it hangs up.
(torch's ``TCPStore`` would do, but aborts the process when its server goes first.)
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time
from typing import Any

from lightning_spot.protocol.listening import Listening

CONNECT_S = 30.0
_LINE_BYTES = 64 * 1024


class Over(ConnectionResetError):
    """Rank 0 has closed the exchange, since its training has come to its end."""


class ExchangeServer:
    """Serves an exchange on a thread of its own.

    Args:
        secret: that every connection must begin with.

    Attributes:
        port: it listens at, on all interfaces.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._values: dict[str, Any] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()
        self._listening = Listening(self._talk, "spot-exchange")
        self.port = self._listening.port

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
        try:
            if not hmac.compare_digest((await reader.readline()).strip(), self._secret.encode()):
                return
            self._writers.add(writer)
            while line := await reader.readline():
                request = json.loads(line)
                if "set" in request:
                    await self._publish(request["set"], request["value"])
                else:
                    answers.add(asyncio.create_task(self._answer(writer, request["get"])))
        except (OSError, ValueError):
            return  # whoever it was has gone, or does not speak our language
        except asyncio.CancelledError:
            return  # the server closes; asyncio would print a connection's cancelled task as an error
        finally:
            for task in answers:
                task.cancel()
            self._writers.discard(writer)
            writer.close()

    async def _publish(self, key: str, value: Any) -> None:
        async with self._changed:
            self._values.setdefault(key, value)  # the first word counts
            self._changed.notify_all()

    async def _answer(self, writer: asyncio.StreamWriter, key: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: key in self._values)
        writer.write(json.dumps({"key": key, "value": self._values[key]}).encode() + b"\n")
        await writer.drain()


class Exchange:
    """A connection to the exchange, for one thread.

    Args:
        host: of rank 0.
        port: of its server.
        secret: of the run.

    Raises:
        OSError: if rank 0 cannot be reached; so do the methods when it has gone.
        Over: by the methods, if it has gone because its training has come to its end.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=CONNECT_S)
        self._socket.sendall(secret.encode() + b"\n")
        self._received = b""
        self._asked: set[str] = set()
        self._values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        """Publish a plain value. Of several for one key, the first counts."""
        self._socket.sendall(json.dumps({"set": key, "value": value}).encode() + b"\n")

    def get(self, key: str, wait_s: float) -> Any:
        """A published value; ``None`` if there is none within ``wait_s`` seconds."""
        if key not in self._asked:
            self._asked.add(key)
            self._socket.sendall(json.dumps({"get": key}).encode() + b"\n")
        deadline = time.monotonic() + wait_s
        while key not in self._values and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        return self._values.get(key)

    def close(self) -> None:
        """Hang up. A second call does nothing."""
        self._socket.close()

    def _receive(self, wait_s: float) -> None:
        self._socket.settimeout(wait_s)
        try:
            received = self._socket.recv(_LINE_BYTES)
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(CONNECT_S)
        if not received:
            raise ConnectionResetError("rank 0 has hung up")
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "over" in answer:
                raise Over("the training of rank 0 has come to its end")
            self._values[answer["key"]] = answer["value"]
