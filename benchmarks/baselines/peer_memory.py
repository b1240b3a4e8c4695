"""The memory of another host, played by a process on this one: keeps the newest two snapshots, may write them down.

``python -m benchmarks.baselines.peer_memory [FOLDER]`` prints its port. One message is a command, a step and a length:
``P`` puts (bytes follow; answered by ``k`` once they are in memory, and by ``d`` once they are in FOLDER), ``G`` gets
the newest whole one. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.baselines.files import keep_two, write_whole

MESSAGE = struct.Struct("<cqq")
CHUNK = 2**20


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target[:CHUNK])
        if not count:
            raise ConnectionError("the other end closed the connection in the middle of a message")
        target = target[count:]


class PeerMemory:
    """The near end: starts the process, sends to it, gets from it. Used by one thread at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.baselines.peer_memory", *([str(folder)] if folder else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        self._connection = socket.create_connection(("127.0.0.1", int(self._process.stdout.readline())))

    def begin(self, step: int, nbytes: int) -> None:
        self._connection.sendall(MESSAGE.pack(b"P", step, nbytes))

    def send(self, data: memoryview | bytes) -> None:
        """A piece of what was begun, in order."""
        self._connection.sendall(data)

    def answer(self) -> bytes:
        """``k`` or ``d``; see above."""
        return self._connection.recv(1)

    def get(self) -> tuple[int, bytearray]:
        """The newest whole snapshot; step -1 if there is none."""
        self._connection.sendall(MESSAGE.pack(b"G", 0, 0))
        head = bytearray(MESSAGE.size)
        _receive(self._connection, memoryview(head))
        _, step, nbytes = MESSAGE.unpack(head)
        data = bytearray(nbytes)
        _receive(self._connection, memoryview(data))
        return step, data

    def close(self) -> None:
        self._connection.close()
        self._process.communicate()


def _serve(connection: socket.socket, folder: Path | None) -> None:
    slots: dict[int, bytearray] = {}
    head = bytearray(MESSAGE.size)
    while True:
        _receive(connection, memoryview(head))
        command, step, nbytes = MESSAGE.unpack(head)
        if command == b"G":
            newest = max(slots, default=-1)
            data = slots.get(newest, bytearray())
            connection.sendall(MESSAGE.pack(b"G", newest, len(data)))
            connection.sendall(data)
            continue
        oldest = slots.pop(min(slots)) if len(slots) == 2 else bytearray()
        data = oldest if len(oldest) == nbytes else bytearray(nbytes)
        _receive(connection, memoryview(data))
        slots[step] = data
        connection.sendall(b"k")
        if folder is not None:
            write_whole(folder / f"step-{step:09d}.bin", data)
            keep_two(folder, "step-*.bin")
            connection.sendall(b"d")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()

    def serve() -> None:
        with contextlib.suppress(ConnectionError):  # the trainer has left
            _serve(connection, folder)

    threading.Thread(target=serve, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
