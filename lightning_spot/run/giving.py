"""Gives a snapshot that this process has opened to others: by descriptor on its host, by ranges to other hosts."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import threading

from lightning_spot.errors import SpotError
from lightning_spot.protocol.listening import accepted, port_of_all_interfaces
from lightning_spot.protocol.ownership import is_own_user
from lightning_spot.protocol.wire import error_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.sharing import CONNECT_S, SILENCE_S, Card, Lines, address_of, this_host

logger = logging.getLogger(__name__)

_PULSE_S = 1.0


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
            self._listen(_bound(address_of(name)), with_descriptor=True)
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
            try:
                self._fd = os.dup(what.fd) if isinstance(what, OpenSnapshot) else None
            except OSError as error:  # who asks hears that there is nothing to be had, and reads for itself
                logger.warning("a snapshot cannot be given to other ranks: %s", error)
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
        accept = threading.Thread(target=self._accept, args=(listener, with_descriptor), name="spot-giver", daemon=True)
        try:
            listener.listen(256)
            accept.start()
        except RuntimeError as error:  # no more threads can be had
            listener.close()
            raise OSError(f"nobody can be given a snapshot: {error}") from error
        self._sockets.append(listener)

    def _accept(self, listener: socket.socket, with_descriptor: bool) -> None:
        for connection in accepted(listener, lambda: self._closed):
            with self._ready:
                if self._closed:
                    connection.close()
                    return
                self._sockets.append(connection)
            serve = threading.Thread(
                target=self._serve, args=(connection, with_descriptor), name="spot-give", daemon=True
            )
            try:
                serve.start()
            except RuntimeError as error:  # no more threads can be had now: this one reads for itself
                logger.warning("somebody who asked for a snapshot was refused: %s", error)
                self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        with self._ready:
            if connection in self._sockets:
                self._sockets.remove(connection)
        connection.close()

    def _serve(self, connection: socket.socket, with_descriptor: bool) -> None:
        lines = Lines(connection)
        try:
            if with_descriptor and not is_own_user(connection):
                return
            connection.settimeout(CONNECT_S)
            greeting = json.loads(lines.next())
            if not hmac.compare_digest(str(greeting["secret"]).encode(), self.card.secret.encode()):
                return
            self._answer(connection, lines, int(greeting["turn"]), with_descriptor)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("somebody who asked for a snapshot has gone: %s", error)
        finally:
            self._let_go(connection)

    def _answer(self, connection: socket.socket, lines: Lines, turn: int, with_descriptor: bool) -> None:
        given, fd = self._await(connection, turn)
        try:
            connection.settimeout(SILENCE_S)
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


def _bound(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener
