"""A TCP proxy on loopback that loses all that goes to a server, cuts it off, or spoils one message."""

from __future__ import annotations

import itertools
import random
import re
import select
import socket
import threading
import time

KINDS = ("cut before", "cut within", "cut after", "delay", "corrupt")
"""What may happen to a message: never sent, half sent, sent but its answer lost, late, one bit flipped."""


class Proxy:
    """Stands before a server.

    Args:
        target: its ``spot://`` URL, or that of an HTTP server.
        seed: of what is random.

    Attributes:
        url: where to connect instead.
        cut_after: bytes of a connection towards the server after which it is cut.
        given_bytes: that the server has sent.
        silent: whether it takes connections and says nothing; see :meth:`fall_silent`.
    """

    def __init__(self, target: str, seed: int) -> None:
        scheme, _, place = target.partition("://")
        host, _, port = place.partition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._messages = itertools.count(1)
        self._strike = (0, "")
        self.url = f"{scheme}://127.0.0.1:{self._socket.getsockname()[1]}"
        self.cut_after: int | None = None
        self.given_bytes = 0
        self._counting = threading.Lock()
        self.struck = False
        self.silent = False
        self._reads = True
        self._mutes: list[threading.Event] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def strike(self, number: int, kind: str) -> None:
        """From now on count messages towards the server, and do ``kind`` to that ``number``, from 1."""
        self._messages, self._strike, self.struck = itertools.count(1), (number, kind), False

    def fall_silent(self, *, reads: bool = True) -> None:
        """Say nothing any more: for ever on the connections there are, on new ones until :meth:`speak`.

        Args:
            reads: whether what comes is taken, and lost; else it stays in the kernel.
        """
        with self._counting:
            self._reads, self.silent = reads, True
            for mute in self._mutes:
                mute.set()

    def speak(self) -> None:
        """Serve new connections again."""
        with self._counting:
            self.silent = False

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            mute, lost = threading.Event(), threading.Event()
            with self._counting:
                self._mutes.append(lost)
                if self.silent:
                    lost.set()
            threading.Thread(target=self._pump, args=(near, far, True, mute, lost), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False, mute, lost), daemon=True).start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        towards_server: bool,
        mute: threading.Event,
        lost: threading.Event,
    ) -> None:
        moved = 0
        try:
            while self._may_read(source, lost) and (chunk := source.recv(65536)):
                if lost.is_set():
                    continue
                moved += len(chunk)
                if towards_server:
                    if self.cut_after is not None and moved > self.cut_after:
                        break
                    chunk, goes_on = self._treat(chunk, mute)
                    sink.sendall(chunk)
                    if not goes_on:
                        break
                elif mute.is_set():
                    break
                else:
                    with self._counting:
                        self.given_bytes += len(chunk)
                    sink.sendall(chunk)
        except OSError:
            pass  # the other end closed first
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                end.close()

    def _may_read(self, source: socket.socket, lost: threading.Event) -> bool:
        """Wait until something is there, and may be taken; false once the other end has given up."""
        given_up = select.poll()
        try:
            given_up.register(source, select.POLLHUP | select.POLLERR)
        except ValueError:  # it is closed
            return False
        while not self._reads and lost.is_set():
            if given_up.poll(20):
                return False
        return True

    def _treat(self, chunk: bytes, mute: threading.Event) -> tuple[bytes, bool]:
        """What becomes of a message, and whether its connection goes on."""
        with self._counting:  # several connections send at once
            number, kind = self._strike
            if next(self._messages) != number:
                return chunk, True
            self.struck = True
        if kind == "cut before":
            return b"", False
        if kind == "cut within":
            return chunk[: len(chunk) // 2], False
        if kind == "cut after":
            mute.set()
        elif kind == "delay":
            time.sleep(0.3)
        elif kind == "corrupt":
            return self._flip(chunk), True
        return chunk, True

    def _flip(self, chunk: bytes) -> bytes:
        # Another length would only make both ends wait for what never comes.
        spared = [range(*match.span()) for match in re.finditer(rb"Content-Length: \d+", chunk)]
        while any((place := self._random.randrange(len(chunk))) in span for span in [range(0), *spared]):
            continue
        return chunk[:place] + bytes([chunk[place] ^ 0x10]) + chunk[place + 1 :]
