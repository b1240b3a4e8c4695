"""A server's intake over loopback, against a raw TCP socket that moves the same bytes in the same rounds."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import GIB, Result, scratch, seconds
from lightning_spot.client.remote import ServerStore
from lightning_spot.config import PART_BYTES
from lightning_spot.protocol.wire import PartKind
from lightning_spot.snapshot.manifest import Manifest, snapshot_name

RECEIVER = """
import socket, sys, threading
import xxhash
nbytes, parts = int(sys.argv[1]), int(sys.argv[2])
target = memoryview(bytearray(nbytes))
target[::4096] = bytes(len(target[::4096]))
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
def take(connection, start, stop):
    digest = xxhash.xxh3_128()
    while start < stop:
        count = connection.recv_into(target[start:min(start + 2**20, stop)])
        if not count: return
        digest.update(target[start:start + count])
        start += count
    connection.sendall(b"k")
    connection.close()
while True:
    takers = []
    for index in range(parts):
        connection, _ = server.accept()
        size = nbytes // parts
        takers.append(threading.Thread(target=take, args=(connection, index * size, (index + 1) * size)))
        takers[-1].start()
    for taker in takers: taker.join()
"""
CHUNK = 2**20


@contextlib.contextmanager
def raw_receiver(nbytes: int, connections: int) -> Iterator[int]:
    command = [sys.executable, "-c", RECEIVER, str(nbytes), str(connections)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def send_raw(port: int, image: memoryview, connections: int) -> None:
    """Send the image over plain sockets, checksummed by the receiver as a server does it."""
    import threading

    size = len(image) // connections

    def send(index: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for start in range(index * size, (index + 1) * size, CHUNK):
                connection.sendall(image[start : min(start + CHUNK, (index + 1) * size)])
            assert connection.recv(1) == b"k"

    threads = [threading.Thread(target=send, args=(index,)) for index in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def node(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "lightning_spot", "serve", "--listen", "127.0.0.1:0"]
    command += ["--memory-limit", "4GiB", "--slots", "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split("listening on ")[1].split(",")[0]
    finally:
        process.terminate()
        process.wait()


def run(quick: bool) -> list[Result]:
    rounds = 4 if quick else 10
    image = memoryview(bytearray(b"\x5a" * GIB))
    ours: list[float] = []
    raw: dict[int, list[float]] = {1: [], 4: []}
    with scratch() as folder, node(folder) as url, contextlib.ExitStack() as stack:
        ports = {count: stack.enter_context(raw_receiver(GIB, count)) for count in raw}
        store = ServerStore(f"{url}/run")
        for step in range(rounds + 3):  # the first three make the slots
            for start in range(0, GIB, PART_BYTES):  # what the server has already would not be sent
                image[start : start + 8] = step.to_bytes(8, "little")
            plain = Manifest(run="run", name=snapshot_name(step, 1), step=step, attempt=1, nbytes=GIB)
            manifest = plain.sealed(image)
            ours.append(seconds(lambda m=manifest: store.put(m, image, attempt=1)))
            for count, port in ports.items():
                raw[count].append(seconds(lambda c=count, p=port: send_raw(p, image, c)))
            time.sleep(0.1)
        assert store.sent[PartKind.WHOLE] == (rounds + 3) * GIB
    print(f"  server, GiB/s: {[round(1 / value, 2) for value in ours[3:]]}")
    return [
        Result(
            f"server ingest / raw socket ({count} connection{'s' if count > 1 else ''})",
            [base / own for own, base in zip(ours[3:], times[3:], strict=True)],
            0.85,
            at_most=False,
        )
        for count, times in raw.items()
    ]
