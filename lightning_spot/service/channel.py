"""The node's end of the descriptor channel: hands slots over to trainers on this host, and knows who of them is alive.

A slot cannot travel over HTTP, its file descriptor can travel over a Unix socket (``SCM_RIGHTS``). A trainer keeps its
connection open as long as it lives. Its session ends when the connection closes, and also when the trainer's process
ends while a forked child, a worker of a DataLoader say, still holds the connection. Messages are lines of JSON.
The trainer's end is ``session``.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spot.errors import SnapshotNotFoundError, TierError
from lightning_spot.goodput.records import forget_reached, newest_record, read_reached, write_record
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.slots import Slot
from lightning_spot.protocol.listening import accepted
from lightning_spot.protocol.ownership import is_own_user, own_socket, peer_of
from lightning_spot.protocol.process import ProcessId, open_pidfd, wait_readable
from lightning_spot.untrusted import read_object

logger = logging.getLogger(__name__)


def note_killed(info: RunInfo) -> None:
    """Write the record of an attempt to the durable tier, if its trainer was killed.

    Where that fails, what is left on this host stays, and the next attempt writes it.

    Args:
        info: of a run whose trainer has gone without leaving it.
    """
    if info.durable_url is None:
        return
    record = read_reached(info.durable_url, info.attempt)
    if record is None or record.end != "killed":
        return  # it measured nothing, or is about to write its own end
    try:
        written = newest_record(info.durable_url, before=info.attempt + 1)
        if written is None or written.attempt != info.attempt:
            return  # which alone knows the attempts before
        write_record(info.durable_url, info.attempt, replace(record, earlier=written.earlier).as_dict())
    except TierError as error:
        logger.warning("how far attempt %d of %s got was not written: %s", info.attempt, info.text, error)
    else:
        forget_reached(info.durable_url, info.attempt)


LONGEST_LINE = 65536
_GREETING_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 30.0
_MOST_SESSIONS = 256


class DescriptorChannel:
    """Accepts trainers of this host. One thread accepts, one thread per connected trainer answers.

    Args:
        node: whose slots are handed over.
        path: of the Unix socket.
        token: secret the greeting must carry, if any.
    """

    def __init__(self, node: Node, path: Path, token: str | None) -> None:
        self._node = node
        self._token = token
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._socket = own_socket(path)
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="spot-channel", daemon=True).start()

    def close(self) -> None:
        """Stop accepting, and end every session."""
        with self._lock:
            self._closed, open_now = True, list(self._open)
        for connection in (self._socket, *open_now):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("a session has ended by itself")
        self._socket.close()

    def _accept(self) -> None:
        for connection in accepted(self._socket, lambda: self._closed):
            if not is_own_user(connection):
                connection.close()
                continue
            with self._lock:
                full = len(self._open) >= _MOST_SESSIONS
                if not full:
                    self._open.add(connection)
            if full:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="spot-session", daemon=True).start()
            except RuntimeError as error:  # no more threads can be had now: others come after this one
                logger.warning("a session was refused: %s", error)
                with self._lock:
                    self._open.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        session = uuid.uuid4().hex
        begun = False
        pid, _user = peer_of(connection) or (0, 0)
        pidfd = open_pidfd(pid)
        process = ProcessId.of(pid) if pidfd is not None else None
        with ExitStack() as pins:
            try:
                lines = _Lines(connection, pidfd)
                greeting = read_object(lines.next(_GREETING_TIMEOUT_S) or b"{}")
                if self._token and not hmac.compare_digest(str(greeting.get("token")).encode(), self._token.encode()):
                    connection.sendall(b'{"refused": "token"}\n')
                    return
                self._node.begin_session(session, process.to_json() if process is not None else "")
                begun = True
                _send(connection, {"session": session}, None)
                while line := lines.next(None):
                    self._answer(connection, read_object(line), pins)
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                logger.debug("a session ended: %s", error)
            finally:
                left = self._node.end_session(session) if begun else []
                with self._lock:
                    self._open.discard(connection)
                connection.close()
                if pidfd is not None:
                    if left:  # the kernel closes a killed process' sockets a moment before it counts as dead
                        wait_readable([pidfd], _EXIT_TIMEOUT_S)
                    os.close(pidfd)
        for info in left:
            note_killed(info)

    def _answer(self, connection: socket.socket, asked: dict[str, Any], pins: ExitStack) -> None:
        connection.settimeout(_SEND_TIMEOUT_S)
        if "slot" in asked:
            with self._of_slot(int(asked["slot"])) as (told, fd):
                _send(connection, told, fd)
            return
        key = self._node.registry.key(str(asked["run"]))
        found = self._find(key, str(asked["name"]), pins)
        if found is None:
            _send(connection, {"missing": True}, None)
            return
        with self._of_slot(found.index) as (told, fd):
            _send(connection, told, fd)

    @contextmanager
    def _of_slot(self, index: int) -> Iterator[tuple[dict[str, Any], int | None]]:
        """What is said of a slot, and a descriptor of its memory that stays what it is until it is sent."""
        ring = self._node.ring
        with ring.changed:  # another thread may give the slot other memory
            slot = ring.slot(index)
            fd = ring.descriptor(slot) if slot is not None else None
            told = {"capacity": slot.capacity, "generation": slot.generation} if slot is not None else {}
        try:
            yield (told, fd) if fd is not None else ({"missing": True}, None)
        finally:
            if fd is not None:
                os.close(fd)

    def _find(self, run: str, name: str, pins: ExitStack) -> Slot | None:
        """The slot of a snapshot or file of that name, pinned until the connection closes."""
        ring = self._node.ring
        for slot, manifest in ring.readable(run, name):
            with suppress(SnapshotNotFoundError):  # it has just left
                pins.enter_context(ring.reading(slot, manifest))
                return slot
        return None


class _Lines:
    """Lines that a trainer sends, until it ends."""

    def __init__(self, connection: socket.socket, pidfd: int | None) -> None:
        self._connection = connection
        self._fds = [connection.fileno(), *([pidfd] if pidfd is not None else [])]
        self._pidfd = pidfd
        self._data = b""

    def next(self, within_s: float | None) -> bytes:
        """The next line; ``b""`` when the connection closes, the trainer's process ends, or it takes too long.

        Raises:
            ValueError: if a line is too long.
        """
        while b"\n" not in self._data:
            if len(self._data) > LONGEST_LINE:
                raise ValueError("a message is too long")
            ready = wait_readable(self._fds, within_s)
            if not ready or self._pidfd in ready:
                return b""
            piece = self._connection.recv(LONGEST_LINE)
            if not piece:
                return b""
            self._data += piece
        line, _, self._data = self._data.partition(b"\n")
        return line


def _send(connection: socket.socket, message: dict[str, Any], fd: int | None) -> None:
    data = json.dumps(message).encode() + b"\n"
    if fd is None:
        connection.sendall(data)
    else:
        socket.send_fds(connection, [data], [fd])
