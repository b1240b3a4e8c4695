"""The trainer's end of ``benchmarks/chain.py``: commits snapshots, and waits until the snapshot server has them.

``receive ADDRESS`` is the other end of its comparison: takes bytes over plain sockets.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import torch
import xxhash

from benchmarks.measure import training_state
from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.client import starting
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.layout import Layout, lay_out
from lightning_spot.snapshot.manifest import Manifest, snapshot_name

RUN_ID = "00c0ffee0000"
PORT = 7071
CONNECTIONS = 4
CHUNK = 2**20
_PLAIN, _CHECKED = b"p", b"c"
WAITS = {"server_idle_timeout_s": 60.0, "server_call_timeout_s": 60.0}


def main(node: str, durable: str, rounds: int) -> dict[str, object]:
    layout = lay_out(training_state())
    host = starting.start(durable, f"run-1@{RUN_ID}", slots=4, memory_bytes=6 * 2**30, **WAITS)
    info = RunInfo(name="run-1", id=RUN_ID, location=f"file://{durable}", attempt=1, token="t", servers=(node,))
    host.open_run(info)  # without storage: what is measured is the way to the snapshot server
    copier, views, safe_s, committed_s, raw_s, checked_s = Copier(), {}, [], [], [], []
    for step in range(rounds + 2):  # the first ones make the slots
        lease = host.lease(layout.nbytes, 60.0)
        view = views.setdefault(lease.slot, SlotView(lease.map))
        name = snapshot_name(step, 1)
        _change(layout)  # what the snapshot server has already would not be sent
        fields = {"run": "run-1", "run_id": RUN_ID, "name": name, "step": step, "attempt": 1}
        began = time.perf_counter()
        for offset, data in layout.frame:
            lease.map[offset : offset + len(data)] = data
        copier.start(layout.pieces, view).wait()
        copied = time.perf_counter()
        host.seal(lease, Manifest(**fields, nbytes=layout.nbytes))
        sealed = time.perf_counter()
        while not any(safe for manifest, _, safe in host.listing() if manifest.name == name):
            time.sleep(0.005)
        safe_s.append(time.perf_counter() - began)
        committed_s.append((copied - began, sealed - copied))
        address = node.removeprefix("spot://").partition(":")[0]
        raw_s.append(_send(address, layout.nbytes, checks=False))
        checked_s.append(_send(address, layout.nbytes, checks=True))  # on a machine as busy as it was for that
    host.leave(complete=True)
    found = {"safe_s": safe_s, "copy_and_seal_s": committed_s, "raw_s": raw_s, "checked_s": checked_s}
    return {"nbytes": layout.nbytes} | {name: values[2:] for name, values in found.items()}


def _change(layout: Layout) -> None:
    for piece in layout.pieces:
        whole = torch.empty(0, dtype=torch.uint8).set_(piece.storage)
        whole[: len(whole) // 8 * 8].view(torch.int64).random_()


def _send(address: str, nbytes: int, *, checks: bool) -> float:
    """Seconds that so many bytes take; with what no transfer of snapshots can do without: a copy, and two checksums."""
    data = memoryview(b"\1" * (nbytes // CONNECTIONS))  # of pages that are there

    def lane() -> None:
        copied = memoryview(bytearray(CHUNK))
        with socket.create_connection((address, PORT)) as connection:
            connection.sendall(_CHECKED if checks else _PLAIN)
            for start in range(0, len(data), CHUNK):
                piece = data[start : start + CHUNK]
                if checks:
                    copied[: len(piece)] = piece
                    xxhash.xxh3_128_digest(copied[: len(piece)])
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    lanes = [threading.Thread(target=lane) for _ in range(CONNECTIONS)]
    began = time.perf_counter()
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    return time.perf_counter() - began


def receive(address: str) -> None:
    def lane(connection: socket.socket) -> None:
        target, content = memoryview(bytearray(CHUNK)), xxhash.xxh3_128()
        with connection:
            checks = connection.recv(1) == _CHECKED
            while count := connection.recv_into(target):
                if checks:
                    content.update(target[:count])
            connection.sendall(b"k")

    server = socket.create_server((address, PORT))
    while True:
        connection, _ = server.accept()
        threading.Thread(target=lane, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
