"""A snapshot that one process has opened is shared with others of its host and user, which read the same memory.

The first rank of each host opens the snapshot, once, and exports its descriptors to the others. Sockets of the host
have no path (Linux' abstract names), so nothing is left behind, whoever dies. Anybody can list these names, also in a
container that shares the network, so a rank greets with a secret, and says which turn it is at. An empty line says that
the exporter lives and is not ready yet, and a line of JSON comes with the descriptors.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning_spot.errors import SpotError, TierError
from lightning_spot.protocol.listening import Listening, greeted, most_connections
from lightning_spot.protocol.ownership import connect, is_own_user
from lightning_spot.protocol.wire import error_body, error_from_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.say import say
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Section
from lightning_spot.untrusted import read_object

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_PULSE_S = 1.0
_SILENCE_S = 60.0  # an exporter that lives says so every second
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_LONGEST_LINE = 65536
_MOST_FDS = 253  # in one message, of Linux; of more slots, each rank opens them itself


class NotExportedError(TierError):
    """What another process has opened cannot be had from it."""


@dataclass(frozen=True, slots=True)
class ExporterAddress:
    """How an exporter is reached.

    Attributes:
        host: the same for processes that can share memory.
        name: of its socket on that host, ``""`` if it has none.
        secret: to show it.
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
    """Hands out what a process has opened, to processes of its host that know its secret. One thread serves all.

    Args:
        world_size: how many ranks there are.

    Attributes:
        address: how it is reached.
    """

    def __init__(self, world_size: int = 2) -> None:
        self._lock = threading.Lock()
        self._turn = 0
        self._exported: OpenSnapshot | SpotError | None = None
        self._fds: list[int] = []
        self._closed = False
        self._listening: Listening | None = None
        self._news = asyncio.Event()
        name, secret = secrets.token_hex(16), secrets.token_hex(16)
        self.address = ExporterAddress(this_host(), name, secret)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.address.socket_name)
            listener.listen()
            self._listening = Listening(listener, self._talk, "spot-exporter", secret, most_connections(world_size))
        except OSError as error:
            logger.debug("no memory can be shared on this host: %s", error)
            listener.close()
            self.address = ExporterAddress(secrets.token_hex(16), "", secret)

    def export(self, turn: int, what: OpenSnapshot | SpotError) -> None:
        """Hand out a snapshot, or why there is none, to those who ask for that turn; the one before is gone then.

        Args:
            turn: counts what was tried, from 1.
            what: the snapshot; its descriptors are kept until the next turn.
        """
        with self._lock:
            self._drop()
            self._turn, self._exported = turn, what
            try:
                for fd in what.fds if isinstance(what, OpenSnapshot) else ():
                    self._fds.append(os.dup(fd))
            except OSError as error:  # who asks hears that there is nothing to be had, and reads for itself
                self._drop()
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
        _close_all(self._fds)
        self._fds = []

    # -- on its thread --------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _talk(self, connection: socket.socket, greeting: dict[str, object]) -> None:
        if not is_own_user(connection):
            return
        turn, loop = int(str(greeting["turn"])), asyncio.get_running_loop()
        while (found := self._find(turn)) is None:
            try:
                await asyncio.wait_for(self._news.wait(), _PULSE_S)
            except TimeoutError:
                await asyncio.wait_for(loop.sock_sendall(connection, b"\n"), _SILENCE_S)
        answer, fds = found
        try:
            socket.send_fds(connection, [json.dumps(answer).encode() + b"\n"], fds)  # so short a line fits at once
        finally:
            _close_all(fds)

    def _find(self, turn: int) -> tuple[dict[str, Any], list[int]] | None:
        """What is exported in a turn, with descriptors of the caller's own; ``None`` while nothing is."""
        with self._lock:
            if not self._closed and self._turn < turn:
                return None
            given = self._exported if self._turn == turn else None
            if isinstance(given, OpenSnapshot):
                facts = {name: getattr(given, name) for name in ("tier", "url", "in_memory", "sealed", "sections")}
                return facts, [os.dup(fd) for fd in self._fds]
            return {"failed": error_body(given) if given is not None else {}}, []


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


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
    fds: list[int] = []
    try:
        with greeted(partial(connect, address.socket_name, _CONNECT_S), address.secret, turn=turn) as connection:
            connection.settimeout(_SILENCE_S)
            line = b""
            while not line.endswith(b"}\n"):
                piece, more, _, _ = socket.recv_fds(connection, _LONGEST_LINE, _MOST_FDS)
                fds += more
                line = (line + piece).lstrip(b"\n")  # empty lines say that it lives
                if not piece or len(line) > _LONGEST_LINE:
                    raise ConnectionError("it has hung up, or says what is too long")
            facts = read_object(line)
    except (OSError, ValueError) as error:
        _close_all(fds)
        raise NotExportedError(f"the rank that opens the snapshot does not answer ({error})") from error
    if (failed := facts.get("failed")) is not None:
        if not failed:
            raise NotExportedError("the rank that opened the snapshot has given it up")
        raise error_from_body(500, json.dumps(failed).encode(), "")
    sections = [Section(*section) for section in facts["sections"]]
    if len(fds) <= max((section.writer for section in sections), default=0):
        _close_all(fds)
        raise NotExportedError("the rank that opened the snapshot sent not all descriptors of it")
    return OpenSnapshot(manifest, facts["tier"], facts["url"], fds, facts["in_memory"], facts["sealed"], sections)
