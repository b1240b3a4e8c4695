"""A snapshot that one process has opened is shared with others of its host, which map the same memory.

The first rank of each host opens the snapshot, once, and exports its descriptor to the others. Sockets of the host have
no path (Linux' abstract names), so nothing is left behind, whoever dies. Messages are lines of JSON; an empty line says
that the exporter lives and is not ready yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_spot.errors import SpotError, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.protocol.listening import Listening, greeted, most_connections
from lightning_spot.protocol.ownership import connect, is_own_user
from lightning_spot.protocol.wire import error_body, error_from_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.say import say
from lightning_spot.untrusted import read_object

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_PULSE_S = 1.0
_SILENCE_S = 60.0  # an exporter that lives says so every second
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_LONGEST_LINE = 65536


class NotExportedError(TierError):
    """What another process has opened cannot be had from it."""


@dataclass(frozen=True, slots=True)
class ExporterAddress:
    """How an exporter is reached.

    Attributes:
        host: the same for processes that can share memory.
        name: of its socket on that host, ``""`` if it has none.
        secret: to greet it with.
    """

    host: str
    name: str
    secret: str = field(repr=False)

    @property
    def socket_name(self) -> str:
        """Of that socket, which has no path."""
        return f"\0lightning-spot-{self.name}"


def this_host() -> str:
    """Tells hosts apart, whatever their names: one boot of one kernel, and one network of it.

    Containers of one machine that share its network count as one host; those which do not, cannot meet at a socket.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NETWORK.stat().st_ino}"
    except OSError as error:
        logger.debug("it cannot be told which processes share a host: %s", error)
        return secrets.token_hex(16)


class Exporter:
    """Hands out what a process has opened, to whoever of its host knows its secret. One thread serves all who ask.

    Args:
        world_size: how many ranks there are.

    Attributes:
        address: how it is reached.
    """

    def __init__(self, world_size: int = 2) -> None:
        self._lock = threading.Lock()
        self._turn = 0
        self._exported: OpenSnapshot | SpotError | None = None
        self._fd: int | None = None
        self._closed = False
        self._listening: Listening | None = None
        self._news = asyncio.Event()
        secret, name = secrets.token_hex(16), secrets.token_hex(16)
        self.address = ExporterAddress(this_host(), name, secret)
        try:
            listener = _bound(self.address.socket_name)
            self._listening = Listening(listener, self._talk, "spot-exporter", secret, most_connections(world_size))
        except OSError as error:
            logger.debug("no memory can be shared on this host: %s", error)
            self.address = ExporterAddress(secrets.token_hex(16), "", secret)

    def export(self, turn: int, what: OpenSnapshot | SpotError) -> None:
        """Hand out a snapshot, or why there is none, to those who ask for that turn; the one before is gone then.

        Args:
            turn: counts what was tried, from 1.
            what: the snapshot; its descriptor is kept until the next turn.
        """
        with self._lock:
            self._drop()
            self._turn, self._exported = turn, what
            try:
                self._fd = os.dup(what.fd) if isinstance(what, OpenSnapshot) else None
            except OSError as error:  # who asks hears that there is nothing to be had, and reads for itself
                say(
                    logging.WARNING,
                    "not-exported",
                    "a snapshot cannot go to other ranks: {error}",
                    error=error,
                )
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
        self._exported = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    # -- on its thread --------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _talk(self, connection: socket.socket, greeting: dict[str, object]) -> None:
        if not is_own_user(connection):
            return
        given, fd = await self._await(connection, int(str(greeting["turn"])))
        try:
            if isinstance(given, SpotError) or fd is None:
                await _say(connection, {"failed": error_body(given) if isinstance(given, SpotError) else {}})
            else:
                facts = {name: getattr(given, name) for name in ("tier", "url", "in_memory", "sealed")}
                socket.send_fds(connection, [json.dumps(facts).encode() + b"\n"], [fd])  # so short a line fits at once
        finally:
            if fd is not None:
                os.close(fd)

    async def _await(self, connection: socket.socket, turn: int) -> tuple[OpenSnapshot | SpotError | None, int | None]:
        """What is exported in a turn, with a descriptor of the caller's own; until then, a sign of life each second."""
        while True:
            news = self._news
            with self._lock:
                if self._closed or self._turn > turn:
                    return None, None
                if self._turn == turn:
                    return self._exported, os.dup(self._fd) if self._fd is not None else None
            try:
                await asyncio.wait_for(news.wait(), _PULSE_S)
            except TimeoutError:
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connection, b"\n"), _SILENCE_S)


async def _say(connection: socket.socket, answer: dict[str, object]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(connection, line), _SILENCE_S)


def _bound(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def import_snapshot(address: ExporterAddress, turn: int, manifest: Manifest) -> OpenSnapshot:
    """Take over what an exporter of this host has opened. It was checked there; the memory is the same.

    Args:
        address: of the exporter.
        turn: see :meth:`Exporter.export`.
        manifest: of the snapshot.

    Raises:
        NotExportedError: if there is no way to that process, or it has ended.
        SpotError: why it could not open the snapshot.
    """
    with _greeted(address, turn) as connection:
        lines = _Lines(connection)
        facts = _first_answer(lines)
    if len(lines.fds) != 1:
        raise NotExportedError("the rank that opened the snapshot sent no descriptor of it")
    return OpenSnapshot(manifest, facts["tier"], facts["url"], lines.fds[0], facts["in_memory"], facts["sealed"])


class _Lines:
    """Lines from a connection, with the descriptor that comes along."""

    def __init__(self, connection: socket.socket) -> None:
        self.fds: list[int] = []
        self._connection = connection
        self._data = b""

    def next(self) -> bytes:
        """The next line without its end, ``b""`` also for an empty one; ``ConnectionError`` if it ends before."""
        while b"\n" not in self._data:
            if len(self._data) > _LONGEST_LINE:
                raise ValueError("a message is too long")
            piece, fds, _, _ = socket.recv_fds(self._connection, _LONGEST_LINE, 1)
            self.fds += fds
            if not piece:
                raise ConnectionError("the other end has hung up")
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line


def _first_answer(lines: _Lines) -> dict[str, Any]:
    """What an exporter says once it is ready."""
    try:
        while not (line := lines.next()):
            pass  # it lives
        facts = read_object(line)
    except (OSError, ValueError) as error:
        raise NotExportedError(f"the rank that opens the snapshot does not answer ({error})") from error
    if (failed := facts.get("failed")) is not None:
        if not failed:
            raise NotExportedError("the rank that opened the snapshot has given it up")
        raise error_from_body(500, json.dumps(failed).encode(), "")
    return facts


@contextlib.contextmanager
def _greeted(address: ExporterAddress, turn: int) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as opened:
        try:
            connection = opened.enter_context(
                greeted(lambda: connect(address.socket_name, _CONNECT_S), address.secret, turn=turn)
            )
            connection.settimeout(_SILENCE_S)
        except OSError as error:
            raise NotExportedError(f"the rank that opens the snapshot cannot be reached ({error})") from error
        yield connection
