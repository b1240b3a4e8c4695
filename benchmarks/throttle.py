"""A TCP proxy that gives each connection its share of bandwidth: ``python -m benchmarks.throttle PORT MB_PER_S``.

It stands for a cloud's object store, which limits streams and not clients. A process of its own, so that what is
measured does not wait for it. Prints the port it listens on.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.beside import Beside

CHUNK_BYTES = 64 * 1024


def pump(
    source: socket.socket, sink: socket.socket, bytes_per_s: float, seen: Callable[[int], None] | None = None
) -> None:
    """Move bytes one way, no faster than that; ``seen`` is told how many."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    due_s = time.monotonic()
    try:
        while count := source.recv_into(buffer):
            if seen is not None:
                seen(count)
            sink.sendall(buffer[:count])
            # Time that was not used is not saved up, but for a hundredth of a second.
            due_s = max(due_s, time.monotonic() - 0.01) + count / bytes_per_s
            if (early_s := due_s - time.monotonic()) > 0.001:
                time.sleep(early_s)
    except OSError:
        pass
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def serve(port: int, bytes_per_s: float) -> None:
    """Accept until the process ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for ends in ((near, far), (far, near)):
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(*ends, bytes_per_s), daemon=True).start()


class Throttle(Beside):
    """The proxy as a process of its own."""

    def __init__(self, port: int, megabytes_per_s: float) -> None:
        super().__init__("benchmarks.throttle", port, megabytes_per_s)


class CountingProxy:
    """A proxy in this process, as fast as it can be, that counts what clients send through it.

    Attributes:
        port: it listens here.
        received_bytes: all that has come from clients so far.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._node = ("127.0.0.1", port)
        self._lock = threading.Lock()
        self.port: int = self._listener.getsockname()[1]
        self.received_bytes = 0

    def __enter__(self) -> CountingProxy:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._node)
                threading.Thread(target=pump, args=(near, far, math.inf, self._count), daemon=True).start()
                threading.Thread(target=pump, args=(far, near, math.inf), daemon=True).start()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.received_bytes += nbytes


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]) * 1e6)
