"""The node's end of a stream of parts: puts frames straight into a slot. The other end is ``part_sender``."""

from __future__ import annotations

import socket
import time

import xxhash

from lightning_spot.config import PROTOCOL_VERSION, SEND_BYTES
from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound
from lightning_spot.memory.node import Node
from lightning_spot.memory.uploads import Upload
from lightning_spot.protocol.wire import FRAME, PROTOCOL_HEADER, UPGRADE, fill

FRAME_WAIT_S = 60.0
"""A sender that begins no frame for so long, or sends one more slowly than the rate below, is hung up on."""

SLOWEST_BYTES_PER_S = 64 * 1024
_LARGEST_FRAME_BYTES = 2**30
_MOST_PARTS = 2**20


def receive_parts(connection: socket.socket, node: Node, upload: Upload) -> None:
    """Take frames until the client closes. Blocks; runs on a thread of its own.

    Raises:
        SnapshotNotFound: if the upload is given up meanwhile.
        CorruptSnapshot: if a frame lies outside the slot, or there are too many.
        OSError: if the connection breaks or is too slow.
    """
    connection.settimeout(FRAME_WAIT_S)
    head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
    connection.sendall(f"{head}{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\n\r\n".encode())
    frame = bytearray(FRAME.size)
    while fill(connection, memoryview(frame), FRAME_WAIT_S, at_boundary=True):
        start, nbytes = FRAME.unpack(frame)
        _check_frame(start, nbytes, upload)
        node.uploads.arriving(upload, start, start + nbytes)
        digest = xxhash.xxh3_128()
        deadline = time.monotonic() + FRAME_WAIT_S + nbytes / SLOWEST_BYTES_PER_S
        with upload.slot.view(upload.nbytes) as view:
            for place in range(start, start + nbytes, SEND_BYTES):
                if node.find_upload(upload.id) is not upload:
                    raise SnapshotNotFound("this upload was given up")
                with view[place : min(place + SEND_BYTES, start + nbytes)] as chunk:
                    fill(connection, chunk, deadline - time.monotonic())
                    digest.update(chunk)
        node.uploads.arrived(upload, start, start + nbytes, digest.hexdigest())
        connection.settimeout(FRAME_WAIT_S)
        connection.sendall(digest.digest())


def _check_frame(start: int, nbytes: int, upload: Upload) -> None:
    if start + nbytes > upload.nbytes:
        raise CorruptSnapshot(f"bytes {start}–{start + nbytes} lie outside a snapshot of {upload.nbytes}")
    if not 0 < nbytes <= _LARGEST_FRAME_BYTES:
        raise CorruptSnapshot(f"a part of {nbytes} bytes is none")
    if len(upload.received) >= _MOST_PARTS:
        raise CorruptSnapshot(f"an upload has more than {_MOST_PARTS} parts")
