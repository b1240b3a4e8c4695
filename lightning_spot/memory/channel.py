"""The descriptor channel: a Unix socket beside a node's HTTP socket that hands slots over and tells who is alive.

A slot cannot travel over HTTP, its file descriptor can travel over a Unix socket (``SCM_RIGHTS``). A trainer keeps its
connection open as long as it lives; when the kernel closes it, the node knows at once that the trainer has ended.
Messages are lines of JSON.
"""

from __future__ import annotations

import hmac
import json
import logging
import mmap
import os
import socket
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_spot.errors import NodeUnreachable, SnapshotNotFound
from lightning_spot.memory.node import Node
from lightning_spot.staging.slot import map_shared

logger = logging.getLogger(__name__)

_LONGEST_LINE = 65536
_TIMEOUT_S = 30.0


class DescriptorChannel:
    """The node's end. One thread accepts, one thread per connected trainer answers.

    Args:
        node: whose slots are handed over.
        path: of the Unix socket.
        token: secret the greeting must carry, if any.
    """

    def __init__(self, node: Node, path: Path, token: str | None) -> None:
        self._node = node
        self._token = token
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="spot-channel", daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), name="spot-session", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        session = uuid.uuid4().hex
        begun = False
        with connection, ExitStack() as pins:
            try:
                reader = connection.makefile("rb")
                greeting = json.loads(reader.readline(_LONGEST_LINE) or b"{}")
                if self._token and not hmac.compare_digest(str(greeting.get("token")).encode(), self._token.encode()):
                    connection.sendall(b'{"refused": "token"}\n')
                    return
                self._node.begin_session(session)
                begun = True
                _send(connection, {"session": session}, None)
                while line := reader.readline(_LONGEST_LINE):
                    self._answer(connection, json.loads(line), pins)
            except (OSError, ValueError, KeyError) as error:
                logger.debug("a session ended: %s", error)
            finally:
                if begun:
                    self._node.end_session(session)

    def _answer(self, connection: socket.socket, asked: dict[str, Any], pins: ExitStack) -> None:
        if "slot" in asked:
            slot = self._node.ring.slots[int(asked["slot"])]
            memory = slot.memory
            if memory is None:
                _send(connection, {"missing": True}, None)
                return
            _send(connection, {"capacity": memory.capacity, "generation": slot.generation}, memory.fd)
            return
        slot_or_none = self._node.ring.find(self._node.key(str(asked["run"])), str(asked["name"]))
        manifest = slot_or_none.manifest if slot_or_none is not None else None
        if slot_or_none is None or manifest is None or slot_or_none.memory is None:
            _send(connection, {"missing": True}, None)
            return
        try:
            # Pinned until the connection closes, so that the slot is not reused under the reader.
            pins.enter_context(self._node.ring.reading(slot_or_none, manifest))
        except SnapshotNotFound:
            _send(connection, {"missing": True}, None)
            return
        _send(connection, {"capacity": slot_or_none.memory.capacity}, slot_or_none.memory.fd)


class Session:
    """The trainer's end. Not thread-safe on its own; calls take a lock.

    Args:
        path: of the node's channel.
        token: secret to greet with, if any.

    Attributes:
        id: names this session in HTTP requests.
    """

    def __init__(self, path: Path, token: str | None) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        try:
            self._socket.connect(str(path))
            answer, _ = self._ask({"token": token, "pid": os.getpid()})
        except OSError as error:
            self._socket.close()
            raise NodeUnreachable(f"the node on this host does not answer at {path}: {error}") from error
        if "session" not in answer:
            raise NodeUnreachable(
                "the node on this host refuses this trainer's token: it was started with another LIGHTNING_SPOT_TOKEN"
            )
        self.id = str(answer["session"])

    def map_slot(self, index: int) -> mmap.mmap:
        """Map the memory of a leased slot into this process, shared and writable."""
        answer, fd = self._ask({"slot": index})
        if fd is None:
            raise NodeUnreachable(f"the node on this host no longer has slot {index}")
        try:
            return map_shared(fd, int(answer["capacity"]))
        finally:
            os.close(fd)

    def open_snapshot(self, run: str, name: str) -> int:
        """Descriptor of a committed snapshot's memory, which stays as it is until this session closes.

        Raises:
            SnapshotNotFound: if the node holds none of that name.
        """
        _, fd = self._ask({"run": run, "name": name})
        if fd is None:
            raise SnapshotNotFound(f"snapshot {name!r} of run {run!r} has left the memory of this host's node")
        return fd

    def close(self) -> None:
        """Leave: what was pinned is let go."""
        self._socket.close()

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        with self._lock:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
                data, fds, _, _ = socket.recv_fds(self._socket, _LONGEST_LINE, 1)
                while data and not data.endswith(b"\n"):
                    data += self._socket.recv(_LONGEST_LINE)
            except OSError as error:
                raise NodeUnreachable(f"the node on this host has gone: {error}") from error
            if not data:
                raise NodeUnreachable("the node on this host has gone")
            return json.loads(data), fds[0] if fds else None


def _send(connection: socket.socket, message: dict[str, Any], fd: int | None) -> None:
    data = json.dumps(message).encode() + b"\n"
    if fd is None:
        connection.sendall(data)
    else:
        socket.send_fds(connection, [data], [fd])
