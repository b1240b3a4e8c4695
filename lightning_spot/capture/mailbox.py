"""What only one rank knows of a snapshot, on its way to rank 0, where that rank cannot write it into the slot itself.

That is so for ranks on another host than rank 0's, and for all of them where the ring is in rank 0's own process. It
goes over a connection of each rank's own, beside training, so that no rank waits for another one. Each letter is
answered by one byte once it is there; one that is not answered is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_spot.capture.background import CLOSE_S, Background
from lightning_spot.capture.share import SizedBytes
from lightning_spot.capture.split import outgrown
from lightning_spot.capture.unexpected import as_failure
from lightning_spot.errors import FailureReason, SnapshotFailedError, SpotError
from lightning_spot.memory.shares import HOST_SILENT_S, RECONNECT_S
from lightning_spot.protocol.listening import LOOPBACK, Listening, greeted, keep_alive, most_connections, tcp_listener
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.cuda import Marks

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("!?HQ")  # whether it is torn, length of the name, length of what follows
_THERE = b"\1"
_CONNECT_S, _ANSWER_S = 5.0, 10.0
_SILENT_S = 20.0  # then a connection is lost: who waits for that rank need not wait longer, and the rank connects again
_PAUSES_S = (0.0, 0.5, 2.0)  # before each try
_OVER = 64  # so many snapshots are remembered of which nothing is kept any more


class Letter(NamedTuple):
    """What a rank knows of a snapshot.

    Attributes:
        torn: whether there is none in the end; ``content`` says why.
        content: its state.
    """

    torn: bool
    content: bytes


class Mailbox:
    """Takes the letters of the other ranks, on rank 0, on a thread of its own.

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
        self._changed = threading.Condition()
        self._letters: dict[str, dict[int, Letter]] = {}
        self._over: deque[str] = deque(maxlen=_OVER)
        self._connected: Counter[int] = Counter()
        self._left_s: dict[int, float] = {}
        self._closed = False
        listener = tcp_listener(host, _SILENT_S)
        self.port: int = listener.getsockname()[1]
        self._listening = Listening(listener, self._talk, "spot-mail", secret, most_connections(world_size))

    def all_of(self, name: str, sizes: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
        """What ranks know of a snapshot, as it comes; afterwards nothing of that name is kept.

        Args:
            name: of the snapshot.
            sizes: of the room for what each rank sends, by rank.

        Raises:
            SnapshotFailedError: if it does not come, or does not fit.
        """
        began_s = time.monotonic()
        try:
            for rank, nbytes in sizes.items():
                state = self._take(name, rank, began_s)
                if len(state) > nbytes:
                    raise outgrown(rank, len(state), nbytes)
                yield rank, state
        finally:
            self.over(name)

    def put_into(self, rooms: Mapping[int, memoryview], name: str) -> None:
        """Write what ranks know of a snapshot into the rooms that it has for that, see :meth:`all_of`.

        Args:
            rooms: for what each rank sends, by rank.
            name: of the snapshot.
        """
        for rank, state in self.all_of(name, {rank: len(room) for rank, room in rooms.items()}):
            rooms[rank][: len(state)] = state

    def _take(self, name: str, rank: int, began_s: float) -> bytes:
        with self._changed:
            while rank not in (letters := self._letters.get(name, {})):
                now_s = time.monotonic()
                left_s = began_s + HOST_SILENT_S - now_s
                if not self._connected[rank]:  # one that was lost is made again when there is something to send
                    left_s = min(left_s, max(began_s, self._left_s.get(rank, 0.0)) + RECONNECT_S - now_s)
                if self._closed or left_s <= 0:
                    why = "did not come in time" if self._connected[rank] else "did not come, and that rank has gone"
                    raise SnapshotFailedError(f"what only rank {rank} knows {why}", reason=FailureReason.SHARE_MISSING)
                self._changed.wait(left_s)
            letter = letters.pop(rank)
        if letter.torn:
            raise SnapshotFailedError(
                f"rank {rank}: {letter.content.decode(errors='replace')}", reason=FailureReason.SHARE_MISSING
            )
        return letter.content

    def over(self, name: str) -> None:
        """Nothing that came, or comes yet, of a snapshot is wanted any more."""
        with self._changed:
            self._letters.pop(name, None)
            self._over.append(name)

    def close(self) -> None:
        """Take nothing more; who waits is told that nothing comes. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listening.close()

    # -- on its thread --------------------------------------------------------------------------------------------

    async def _talk(self, connection: socket.socket, greeting: dict[str, Any]) -> None:
        rank = int(greeting["rank"])
        reader, writer = await asyncio.open_connection(sock=connection)
        self._came(rank)
        try:
            writer.write(_THERE)  # who waits for this rank knows that it has come
            while True:
                torn, length, nbytes = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                name = (await reader.readexactly(length)).decode()
                self._put(name, rank, Letter(torn, await reader.readexactly(nbytes)))
                writer.write(_THERE)
                await writer.drain()
        finally:
            self._went(rank)
            writer.transport.abort()

    def _came(self, rank: int) -> None:
        with self._changed:
            self._connected[rank] += 1
            self._changed.notify_all()

    def _went(self, rank: int) -> None:
        with self._changed:
            self._connected[rank] -= 1
            self._left_s[rank] = time.monotonic()
            self._changed.notify_all()

    def _put(self, name: str, rank: int, letter: Letter) -> None:
        with self._changed:
            if name not in self._over:
                self._letters.setdefault(name, {})[rank] = letter
                self._changed.notify_all()


class Sender:
    """Sends rank 0 what this rank knows, on a thread of its own.

    Args:
        host: of rank 0.
        port: of its mailbox.
        secret: of that.
        rank: this one.

    Raises:
        OSError: if rank 0 cannot be reached.
    """

    def __init__(self, host: str, port: int, secret: str, rank: int) -> None:
        self._address, self._secret, self._rank = (host, port), secret, rank
        self._closed = threading.Event()
        self._socket: socket.socket | None = self._connected()
        self._copier = Copier(threads=0)
        self._tasks = Background("spot-mail")

    def send(self, name: str, state: SizedBytes | SpotError) -> None:
        """Have something sent; training does not wait for it.

        Args:
            name: of the snapshot.
            state: what only this rank knows; or why that is not known.
        """
        after = self._copier.marks()
        self._tasks.put(lambda: self._send(name, self._letter(state, after)))

    def close(self) -> None:
        """Send what is left, for a while, and hang up."""
        if not self._tasks.close(CLOSE_S):
            self._closed.set()
            self._hang_up()  # what it waits for breaks off
            self._tasks.close(CLOSE_S)
        self._hang_up()
        self._copier.close()

    # -- on its thread --------------------------------------------------------------------------------------------

    def _letter(self, state: SizedBytes | SpotError, after: Marks) -> Letter:
        try:
            if isinstance(state, SpotError):
                raise state
            with self._copier.reading(after):
                return Letter(torn=False, content=bytes(state))
        except Exception as error:  # else rank 0 would wait for it
            return Letter(torn=True, content=str(as_failure(error)).encode())

    def _send(self, name: str, letter: Letter) -> None:
        data = name.encode()
        data = _HEAD.pack(letter.torn, len(data), len(letter.content)) + data + letter.content
        for pause_s in _PAUSES_S:
            if self._closed.wait(pause_s):
                return
            try:
                connection = self._socket = self._socket or self._connected()
                connection.sendall(data)
                _wait_answer(connection)
            except OSError as error:
                logger.debug("what this rank knows of %s is not there yet: %s", name, error)
                self._hang_up()
            else:
                return

    def _connected(self) -> socket.socket:
        connection = greeted(
            lambda: socket.create_connection(self._address, timeout=_CONNECT_S), self._secret, rank=self._rank
        )
        try:
            keep_alive(connection, _SILENT_S)
            connection.settimeout(_ANSWER_S)
            _wait_answer(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _hang_up(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):  # it was lost before
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _wait_answer(connection: socket.socket) -> None:
    if connection.recv(len(_THERE)) != _THERE:
        raise ConnectionResetError("rank 0 has hung up")
