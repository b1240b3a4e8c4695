"""The trainer's end of the descriptor channel: a session with the node on this host. The node's end is ``channel``."""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from lightning_spot.client.connection import connect_to_own
from lightning_spot.errors import NodeRefused, NodeUnreachable, SnapshotNotFound, TierError
from lightning_spot.protocol.process import wait_readable
from lightning_spot.staging.slot import map_shared
from lightning_spot.untrusted import read_object

_LONGEST_LINE = 65536


class Session:
    """A connection that says that this process lives, and by which it gets at slots. May be used from any thread.

    A forked child does not have it: its copy of the connection is closed at the fork.

    Args:
        path: of the node's channel.
        token: secret to greet with, if any.
        max_stall_s: bound on every call, seconds.

    Raises:
        NodeUnreachable: if the node does not answer in time (then its ``__cause__`` is a ``TimeoutError``), or at all.
        NodeRefused: if it has another secret, or is another user's: to wait for it would not help.

    Attributes:
        id: names this session in HTTP requests.
    """

    def __init__(self, path: Path, token: str | None, max_stall_s: float) -> None:
        self._max_stall_s = max_stall_s
        self._lock = threading.Lock()
        try:
            self._socket = connect_to_own(str(path), max_stall_s)
            answer, _ = self._ask({"token": token, "pid": os.getpid()})
        except BlockingIOError as error:  # nobody accepts connections any more
            raise NodeUnreachable(f"the node on this host does not answer at {path}") from TimeoutError(str(error))
        except NodeUnreachable:
            raise
        except OSError as error:
            raise NodeUnreachable(f"the node on this host does not answer at {path}: {error}") from error
        if "session" not in answer:
            self._socket.close()
            raise NodeRefused(
                "the node on this host was started with another LIGHTNING_SPOT_TOKEN than this process has; set that",
                status=401,
            )
        self.id = str(answer["session"])
        _sessions.add(self)

    def map_slot(self, index: int, generation: int) -> mmap.mmap:
        """Map the memory of a leased slot into this process, shared and writable.

        Args:
            index: of the slot.
            generation: of its memory; what is written into another one is somebody else's snapshot.

        Raises:
            TierError: if this process may not map so much.
        """
        answer, fd = self._ask({"slot": index})
        if fd is None or answer.get("generation") != generation:
            _close_all([fd] if fd is not None else [])
            raise NodeUnreachable(f"the node on this host no longer has slot {index} as it was leased")
        try:
            return map_shared(fd, int(answer["capacity"]))
        except (OSError, ValueError) as error:  # such as ``ulimit -v``, too many mappings, or a memory that is shorter
            raise TierError(f"this process cannot map a slot of {answer['capacity']} bytes: {error}") from error
        finally:
            os.close(fd)

    def open_snapshot(self, run: str, name: str) -> int:
        """Descriptor of a committed snapshot's memory, which stays as it is until this session closes.

        Args:
            run: the run, as ``NAME@ID``.
            name: of the snapshot.

        Raises:
            SnapshotNotFound: if the node holds none of that name.
        """
        _, fd = self._ask({"run": run, "name": name})
        if fd is None:
            raise SnapshotNotFound(f"snapshot {name!r} of run {run!r} has left the memory of this host's node")
        return fd

    def check(self) -> None:
        """Raise if it is over: what was told in it is not known to a node that has come in the place of this one.

        Raises:
            NodeUnreachable: if the node has gone, or has closed it.
        """
        with self._lock:  # the node says nothing unasked: what can be read while nobody asks is the end
            fd = self._socket.fileno()
            if fd < 0 or wait_readable([fd], 0.0):
                raise NodeUnreachable("the node on this host has gone")

    def close(self) -> None:
        """Leave: what was pinned is let go."""
        self._socket.close()

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        deadline = time.monotonic() + self._max_stall_s
        if not self._lock.acquire(timeout=self._max_stall_s):
            raise NodeUnreachable("the node on this host does not answer") from TimeoutError()
        fds: list[int] = []
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            data, fds, _, _ = socket.recv_fds(self._socket, _LONGEST_LINE, 1)
            while data and not data.endswith(b"\n"):
                self._socket.settimeout(_left(deadline))
                piece = self._socket.recv(_LONGEST_LINE)
                data = data + piece if piece else b""
            answer = read_object(data) if data else None
        except BaseException as error:
            _close_all(fds)
            self._socket.close()  # an answer that comes late, or after Ctrl-C, must not be taken for the next one's
            if not isinstance(error, (OSError, ValueError)):
                raise
            raise NodeUnreachable(f"the node on this host has gone, or does not answer: {error}") from error
        finally:
            self._lock.release()
        if not isinstance(answer, dict):
            _close_all(fds)
            raise NodeUnreachable("the node on this host has gone")
        return answer, fds[0] if fds else None

    def forget(self) -> None:
        """Drop the connection in a forked child; its parent goes on with it."""
        self._lock = threading.Lock()
        self._socket.close()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _forget_all() -> None:
    for session in list(_sessions):
        session.forget()


os.register_at_fork(after_in_child=_forget_all)
