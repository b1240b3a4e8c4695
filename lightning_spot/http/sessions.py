"""Sessions of trainers on a server's host: by them it knows that a trainer lives, and hands it descriptors of slots.

Upgraded connections, which speak no HTTP any more, are made here, for streams of parts, too.

A trainer upgrades a connection to the server's Unix socket, and keeps it as long as it lives. Over it, each line of
JSON that asks for a slot or a snapshot is answered by a line, with the descriptor of its memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import hdrs, web

from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import ServerRefusedError, SnapshotNotFoundError, TierError
from lightning_spot.goodput.records import forget_reached, newest_record, read_reached, write_record
from lightning_spot.http.fields import only_same_host
from lightning_spot.http.limits import ACCEPTED
from lightning_spot.protocol.ownership import peer_of
from lightning_spot.protocol.process import ProcessId, open_pidfd, wait_readable
from lightning_spot.protocol.wire import PROTOCOL_HEADER, UPGRADE
from lightning_spot.say import say
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.slots import Slot
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.threads import in_background
from lightning_spot.untrusted import read_object

logger = logging.getLogger(__name__)

_LONGEST_LINE = 65536
_SEND_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 30.0
_MOST_SESSIONS = 1024  # of ranks, and of commands that look what is there; each has a thread


@asynccontextmanager
async def switched(request: web.Request) -> AsyncIterator[socket.socket]:
    """Agree to an upgrade: the connection as a socket for a thread that blocks. It is closed in the end.

    One by TLS goes on being decrypted on the event loop: a pair of sockets parts the two, and no buffer grows.

    Raises:
        ServerRefusedError: if none was asked for.
    """
    transport = request.transport
    if request.headers.get(hdrs.UPGRADE) != UPGRADE or transport is None:
        why = f"this request needs 'Upgrade: {UPGRADE}'. Nothing was done. Have proxies on its way pass upgrades on"
        raise ServerRefusedError(why, status=426)
    assert isinstance(transport, asyncio.Transport)
    head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
    agreed = f"{head}{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\n\r\n".encode()
    try:
        if transport.get_extra_info("sslcontext") is None:
            transport.pause_reading()
            with transport.get_extra_info("socket").dup() as connection:
                transport.write(agreed)
                yield connection
            return
        ours, connection = socket.socketpair()
        with connection:
            inside, _ = await asyncio.get_running_loop().create_connection(lambda: _Relay(transport), sock=ours)
            try:
                transport.set_protocol(_Relay(inside, request[ACCEPTED]))
                transport.write(agreed)  # not before: what comes then is no HTTP
                yield connection
            finally:
                inside.close()
    finally:
        transport.close()  # the connection no longer speaks HTTP


class _Relay(asyncio.Protocol):
    """Passes what comes by its own transport on to another one, no faster than that takes it.

    Args:
        other: the other one.
        accepted: the connection to which its own belonged; it is told the end.
    """

    def __init__(self, other: asyncio.Transport, accepted: asyncio.Protocol | None = None) -> None:
        self._other, self._accepted = other, accepted

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._other.write(data)

    def pause_writing(self) -> None:
        """Its own transport takes no more: the other one reads no more."""
        self._other.pause_reading()

    def resume_writing(self) -> None:
        """The reverse."""
        self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever is at the other end reads to the end of what came."""
        self._other.close()
        if self._accepted is not None:
            self._accepted.connection_lost(exc)


class Sessions:
    """Handler of ``POST /v1/sessions``.

    Args:
        server: whose slots are handed over.
    """

    def __init__(self, server: SnapshotServer) -> None:
        self._server = server
        self._open: set[socket.socket] = set()

    def close(self) -> None:
        """End every session. Call it on the event loop."""
        for connection in self._open:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    async def begin(self, request: web.Request) -> web.Response:
        """Hand the connection over to a thread that answers it, until it ends (this host only)."""
        only_same_host(request)
        if len(self._open) >= _MOST_SESSIONS:
            raise ServerRefusedError(f"this server has {_MOST_SESSIONS} sessions already", status=503)
        async with switched(request) as connection:
            self._open.add(connection)
            try:
                ended = in_background(partial(self._serve, connection), "spot-session")
            except RuntimeError as error:  # no more threads can be had now: others come after this one
                say(logging.WARNING, "no-threads", "a session was refused: {error}", error=error)
            else:
                await asyncio.wrap_future(ended)
            finally:
                self._open.discard(connection)
        return web.Response()

    # -- on its thread --------------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        pid, _user = peer_of(connection)
        pidfd = open_pidfd(pid)
        try:
            left = self._answer_all(connection, pid, pidfd)
            if left and pidfd is not None:
                # The kernel closes a killed process' sockets a moment before it counts as dead.
                wait_readable([pidfd], _EXIT_TIMEOUT_S)
        finally:
            if pidfd is not None:
                os.close(pidfd)
        for info in left:
            note_killed(info)

    def _answer_all(self, connection: socket.socket, pid: int, pidfd: int | None) -> list[RunInfo]:
        """Answer a trainer until it ends; the runs that it had not left."""
        session = uuid.uuid4().hex
        process = ProcessId.of(pid) if pidfd is not None else None
        with ExitStack() as pins:
            self._server.registry.begin_session(session, process)
            try:
                lines = _lines(connection, pidfd)
                if next(lines, b""):  # by then the answer of HTTP was read, and no more
                    connection.sendall(_line(session=session))
                for line in lines:
                    self._answer(connection, read_object(line), pins)
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                logger.debug("a session ended: %s", error)
            finally:
                left = self._server.end_session(session)
        return left

    def _answer(self, connection: socket.socket, asked: dict[str, Any], pins: ExitStack) -> None:
        """Say what the memory of a slot or a snapshot is, with a descriptor of it."""
        connection.settimeout(_SEND_TIMEOUT_S)
        ring = self._server.ring
        run = self._server.registry.key(str(asked["run"])) if "slot" not in asked else ""
        with ring.changed:  # another thread may give the slot other memory
            slot = ring.slot(int(asked["slot"])) if "slot" in asked else self._find(run, str(asked["name"]), pins)
            fd = ring.descriptor(slot) if slot is not None else None
            told = {"capacity": slot.capacity, "generation": slot.generation} if slot is not None else {}
        if fd is None:
            connection.sendall(_line(missing=True))
            return
        try:
            socket.send_fds(connection, [_line(**told)], [fd])
        finally:
            os.close(fd)

    def _find(self, run: str, name: str, pins: ExitStack) -> Slot | None:
        """Slot of a snapshot, shard or file of that name, if any, pinned until the connection closes."""
        ring = self._server.ring
        for held, _ in ring.readable(run, name):
            with suppress(SnapshotNotFoundError):  # it has just left
                if len(held.slots) == 1:  # of several, each shard is asked for
                    pins.enter_context(ring.reading(held))
                    return held.slots[0]
        return None


def _lines(connection: socket.socket, pidfd: int | None) -> Iterator[bytes]:
    """Lines that a trainer sends, until the connection closes, or the trainer's process ends.

    Raises:
        ValueError: if a line is too long.
    """
    fds, data = [connection.fileno(), *([pidfd] if pidfd is not None else [])], b""
    while True:
        while b"\n" not in data:
            if len(data) > _LONGEST_LINE:
                raise ValueError("a message is too long")
            if pidfd in wait_readable(fds, None) or not (piece := connection.recv(_LONGEST_LINE)):
                return
            data += piece
        line, _, data = data.partition(b"\n")
        yield line


def _line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def note_killed(info: RunInfo) -> None:
    """Write the record of an attempt to storage, if its trainer was killed.

    Where that fails, what is left on this host stays, and the next attempt's record carries it on.

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
        write_record(info.durable_url, replace(record, earlier=written.earlier))
    except TierError as error:
        text = "how far attempt {attempt} of {about} got was not written: {error}"
        say(logging.WARNING, "goodput-not-written", text, about=info.text, attempt=info.attempt, error=error)
    else:
        forget_reached(info.durable_url, info.attempt)
