"""Takes a snapshot that another process has opened: its memory on this host, its bytes from another one."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_spot.errors import CorruptSnapshot, SpotError, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.protocol.listening import greeted
from lightning_spot.protocol.ownership import connect
from lightning_spot.protocol.wire import error_from_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.sharing import CONNECT_S, CONNECTIONS, SILENCE_S, Card, Lines
from lightning_spot.tiers.store import Progress
from lightning_spot.untrusted import read_object


class NotShared(TierError):
    """What another process has opened cannot be had from it."""


def take(card: Card, turn: int, manifest: Manifest) -> OpenSnapshot:
    """Take over what a giver of this host has opened. It was checked there; the memory is the same.

    Raises:
        NotShared: if there is no way to that process, or it has ended.
        SpotError: why it could not open the snapshot.
    """
    with _greeted(lambda: connect(card.address, CONNECT_S), card.secret, turn) as connection:
        lines = Lines(connection, descriptors=1)
        facts = _first_answer(lines)
    if len(lines.fds) != 1:
        raise NotShared("the rank that opened the snapshot sent no descriptor of it")
    return OpenSnapshot(manifest, facts["tier"], facts["url"], lines.fds[0], facts["in_memory"], facts["sealed"])


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
                _first_answer(Lines(connection))
                for start, stop in ranges[first::CONNECTIONS]:
                    self._read(connection, start, into[start:stop])
                    manifest.verify_range(start, into[start:stop], self.url)
                    if progress is not None:
                        progress(stop - start)

        try:
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(read, range(min(CONNECTIONS, len(ranges)))))
        except OSError as error:
            if isinstance(error, SpotError):
                raise
            raise NotShared(f"{self.url} cannot be read ({error})", tier=self.url) from error

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._address, CONNECT_S)

    def _read(self, connection: socket.socket, start: int, into: memoryview) -> None:
        connection.sendall(json.dumps([start, start + len(into)]).encode() + b"\n")
        got = 0
        while got < len(into):
            count = connection.recv_into(into[got:])
            if not count:
                raise CorruptSnapshot(f"{self.url} has hung up at byte {start + got}", where=self.url)
            got += count


def _first_answer(lines: Lines) -> dict[str, Any]:
    """What a giver says once it is ready."""
    try:
        while not (line := lines.next()):
            pass  # it lives
        facts = read_object(line)
    except (OSError, ValueError) as error:
        raise NotShared(f"the rank that opens the snapshot does not answer ({error})") from error
    if (failed := facts.get("failed")) is not None:
        if not failed:
            raise NotShared("the rank that opened the snapshot has given it up")
        raise error_from_body(500, json.dumps(failed).encode(), "")
    return facts


@contextlib.contextmanager
def _greeted(connect: Callable[[], socket.socket], secret: str, turn: int) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as opened:
        try:
            connection = opened.enter_context(greeted(connect, secret, turn=turn))
            connection.settimeout(SILENCE_S)
        except OSError as error:
            raise NotShared(f"the rank that opens the snapshot cannot be reached ({error})") from error
        yield connection
