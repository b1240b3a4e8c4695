"""Gives a snapshot that one process has opened to the others: by descriptor on its host, by ranges to other hosts.

The first rank of each host opens the snapshot, once; the others of the host map the same memory. A host that finds the
snapshot at no tier of its own asks the first rank of all. Sockets of the host have no path (Linux' abstract names), so
nothing is left behind, whoever dies. Messages are lines of JSON; an empty line says that the giver lives and is not
ready yet.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spot.errors import CorruptSnapshot, SpotError, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.protocol.listening import port_of_all_interfaces
from lightning_spot.protocol.wire import error_body, error_from_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.tiers.store import Progress

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_CONNECT_S = 10.0
_PULSE_S = 1.0
_SILENCE_S = 60.0  # a giver that lives says so every second
_LONGEST_LINE = 65536
_CONNECTIONS = 4
_PEER = struct.Struct("3i")  # pid, user and group, see unix(7)


@dataclass(frozen=True, slots=True)
class Card:
    """How a giver is reached.

    Attributes:
        host: the same for processes that can share memory.
        name: of its socket on that host, ``""`` if it has none.
        secret: to greet it with.
    """

    host: str
    name: str
    secret: str


def this_host() -> str:
    """Tells hosts apart, whatever their names: one boot of one kernel, and one network of it.

    Containers of one machine that share its network count as one host; those which do not, cannot meet at a socket.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NETWORK.stat().st_ino}"
    except OSError as error:
        logger.debug("it cannot be told which processes share a host: %s", error)
        return secrets.token_hex(16)


class Giver:
    """Hands out what a process has opened, to whoever knows its secret.

    Attributes:
        card: how it is reached.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._turn = 0
        self._given: OpenSnapshot | SpotError | None = None
        self._fd: int | None = None
        self._closed = False
        self._sockets: list[socket.socket] = []
        name = secrets.token_hex(16)
        try:
            self._listen(_bound(f"\0lightning-spot-{name}"), with_descriptor=True)
        except OSError as error:
            logger.debug("no memory can be shared on this host: %s", error)
            name = ""
        self.card = Card(this_host() if name else secrets.token_hex(16), name, secrets.token_hex(16))

    def give_elsewhere(self) -> int:
        """Let processes of other hosts ask, too; the port."""
        listener = port_of_all_interfaces()
        self._listen(listener, with_descriptor=False)
        return int(listener.getsockname()[1])

    def give(self, turn: int, what: OpenSnapshot | SpotError) -> None:
        """Hand out a snapshot, or why there is none, to those who ask for that turn; the one before is gone then.

        Args:
            turn: counts what was tried, from 1.
            what: the snapshot; its descriptor is kept until the next turn.
        """
        with self._ready:
            self._drop()
            self._turn, self._given = turn, what
            self._fd = os.dup(what.fd) if isinstance(what, OpenSnapshot) else None
            self._ready.notify_all()

    def close(self) -> None:
        """Hand out nothing more."""
        with self._ready:
            self._closed = True
            self._drop()
            self._ready.notify_all()
            sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):  # not connected, or gone already
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._given = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _listen(self, listener: socket.socket, *, with_descriptor: bool) -> None:
        listener.listen(256)
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, with_descriptor), name="spot-giver", daemon=True).start()

    def _accept(self, listener: socket.socket, with_descriptor: bool) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            with self._ready:
                if self._closed:
                    connection.close()
                    return
                self._sockets.append(connection)
            threading.Thread(
                target=self._serve, args=(connection, with_descriptor), name="spot-give", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, with_descriptor: bool) -> None:
        lines = _Lines(connection)
        try:
            connection.settimeout(_CONNECT_S)
            greeting = json.loads(lines.next())
            if not hmac.compare_digest(str(greeting["secret"]).encode(), self.card.secret.encode()):
                return
            if with_descriptor and _user_of(connection) != os.geteuid():
                return
            self._answer(connection, lines, int(greeting["turn"]), with_descriptor)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("somebody who asked for a snapshot has gone: %s", error)
        finally:
            with self._ready:
                if connection in self._sockets:
                    self._sockets.remove(connection)
            connection.close()

    def _answer(self, connection: socket.socket, lines: _Lines, turn: int, with_descriptor: bool) -> None:
        given, fd = self._await(connection, turn)
        try:
            connection.settimeout(_SILENCE_S)
            if isinstance(given, SpotError) or fd is None:
                answer = error_body(given) if isinstance(given, SpotError) else {}
                connection.sendall(json.dumps({"failed": answer}).encode() + b"\n")
            elif with_descriptor:
                facts = {name: getattr(given, name) for name in ("tier", "url", "in_memory", "sealed")}
                socket.send_fds(connection, [json.dumps(facts).encode() + b"\n"], [fd])
            else:
                connection.sendall(b"{}\n")
                with open(fd, "rb", buffering=0, closefd=False) as file:
                    while line := lines.next():
                        start, stop = json.loads(line)
                        connection.sendfile(file, start, stop - start)
        finally:
            if fd is not None:
                os.close(fd)

    def _await(self, connection: socket.socket, turn: int) -> tuple[OpenSnapshot | SpotError | None, int | None]:
        """What is given in a turn, with a descriptor of the caller's own; while it is not ready, say that we live."""
        while True:
            with self._ready:
                if self._turn < turn and not self._closed:
                    self._ready.wait(_PULSE_S)
                if self._closed or self._turn > turn:
                    return None, None
                if self._turn == turn:
                    return self._given, os.dup(self._fd) if self._fd is not None else None
            connection.sendall(b"\n")


def take(card: Card, turn: int, manifest: Manifest) -> OpenSnapshot:
    """Take over what a giver of this host has opened. It was checked there; the memory is the same.

    Raises:
        NotShared: if there is no way to that process, or it has ended.
        SpotError: why it could not open the snapshot.
    """
    with _greeted(lambda: _connected(card.name), card.secret, turn) as connection:
        if _user_of(connection) != os.geteuid():
            raise NotShared("another user's process is at the socket of this host's first rank")
        lines = _Lines(connection, descriptors=1)
        facts = _first_answer(lines)
    if len(lines.fds) != 1:
        raise NotShared("the rank that opened the snapshot sent no descriptor of it")
    return OpenSnapshot(manifest, facts["tier"], facts["url"], lines.fds[0], facts["in_memory"], facts["sealed"])


class NotShared(TierError):
    """What another process has opened cannot be had from it."""


class FromRank:
    """Fetches what the first rank of all has opened, on another host; see :class:`~.receiving.Fetches`.

    Args:
        address: host and port.
        secret: to greet it with.
        turn: see :meth:`Giver.give`.
    """

    def __init__(self, address: tuple[str, int], secret: str, turn: int) -> None:
        self.url = f"rank 0 at {address[0]}"
        self._address = address
        self._secret = secret
        self._turn = turn

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`~.receiving.Fetches.fetch`."""
        ranges = list(manifest.ranges())

        def read(first: int) -> None:
            with _greeted(self._connect, self._secret, self._turn) as connection:
                _first_answer(_Lines(connection))
                for start, stop in ranges[first::_CONNECTIONS]:
                    self._read(connection, start, into[start:stop])
                    manifest.verify_range(start, into[start:stop], self.url)
                    if progress is not None:
                        progress(stop - start)

        try:
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                list(pool.map(read, range(min(_CONNECTIONS, len(ranges)))))
        except OSError as error:
            if isinstance(error, SpotError):
                raise
            raise NotShared(f"{self.url} cannot be read ({error})", tier=self.url) from error

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, _CONNECT_S)

    def _read(self, connection: socket.socket, start: int, into: memoryview) -> None:
        connection.sendall(json.dumps([start, start + len(into)]).encode() + b"\n")
        got = 0
        while got < len(into):
            count = connection.recv_into(into[got:])
            if not count:
                raise CorruptSnapshot(f"{self.url} has hung up at byte {start + got}", where=self.url)
            got += count


# -- on both ends -------------------------------------------------------------------------------------------------


class _Lines:
    """Lines from a connection, with the descriptors that come along."""

    def __init__(self, connection: socket.socket, descriptors: int = 0) -> None:
        self.fds: list[int] = []
        self._connection = connection
        self._descriptors = descriptors
        self._data = b""

    def next(self) -> bytes:
        """The next line without its end, ``b""`` also for an empty one; ``ConnectionError`` if it ends before."""
        while b"\n" not in self._data:
            if len(self._data) > _LONGEST_LINE:
                raise ValueError("a message is too long")
            if self._descriptors:
                piece, fds, _, _ = socket.recv_fds(self._connection, _LONGEST_LINE, self._descriptors)
                self.fds += fds
            else:
                piece = self._connection.recv(_LONGEST_LINE)
            if not piece:
                raise ConnectionError("the other end has hung up")
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line


def _first_answer(lines: _Lines) -> dict[str, Any]:
    """What a giver says once it is ready."""
    try:
        while not (line := lines.next()):
            pass  # it lives
        facts: dict[str, Any] = json.loads(line)
    except (OSError, ValueError) as error:
        raise NotShared(f"the rank that opens the snapshot does not answer ({error})") from error
    if (failed := facts.get("failed")) is not None:
        if not failed:
            raise NotShared("the rank that opened the snapshot has given it up")
        raise error_from_body(500, json.dumps(failed).encode(), "")
    return facts


@contextlib.contextmanager
def _greeted(connect: Callable[[], socket.socket], secret: str, turn: int) -> Iterator[socket.socket]:
    try:
        connection = connect()
    except OSError as error:
        raise NotShared(f"the rank that opens the snapshot cannot be reached ({error})") from error
    with connection:
        connection.settimeout(_SILENCE_S)
        connection.sendall(json.dumps({"secret": secret, "turn": turn}).encode() + b"\n")
        yield connection


def _connected(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(f"\0lightning-spot-{name}")
    except BaseException:
        connection.close()
        raise
    return connection


def _bound(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
    except BaseException:
        listener.close()
        raise
    return listener


def _user_of(connection: socket.socket) -> int:
    """User of the process at the other end of a socket of this host; -1 where it cannot be seen."""
    try:
        return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])
    except (AttributeError, OSError):
        return -1
