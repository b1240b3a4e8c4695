"""The node's end of a stream of parts: puts frames straight into a slot. The other end is ``part_sender``."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import xxhash

from lightning_spot.config import PROTOCOL_VERSION, SEND_BYTES
from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound
from lightning_spot.image.parts import checksum
from lightning_spot.memory.node import Node
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import NO_DIGEST, PROTOCOL_HEADER, UPGRADE, Frame, PartKind, fill
from lightning_spot.untrusted import plain

logger = logging.getLogger(__name__)

FRAME_WAIT_S = 60.0
"""A sender that begins no frame for so long, or sends one more slowly than the rate below, is hung up on."""

SLOWEST_BYTES_PER_S = 64 * 1024
_LARGEST_FRAME_BYTES = 2**30
_LARGEST_DELTA_BYTES = 16 * 1024 * 1024  # a delta is kept beside the slot until all of it is here
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
    header = bytearray(Frame.SIZE)
    while fill(connection, memoryview(header), FRAME_WAIT_S, at_boundary=True):
        frame = Frame.unpack(header)
        _check_frame(frame, upload)
        digest = _take(connection, node, upload, frame)
        connection.settimeout(FRAME_WAIT_S)
        connection.sendall(bytes.fromhex(digest))


def _take(connection: socket.socket, node: Node, upload: Upload, frame: Frame) -> str:
    """Put a part into the slot; its checksum, or ``NO_DIGEST`` for one that overlaps another: of that, nothing is."""
    digest = NO_DIGEST
    try:
        node.uploads.arriving(upload, frame.start, frame.start + frame.nbytes, connection)
    except CorruptSnapshot as error:
        logger.warning("%s: %s; it is refused", plain(upload.name or upload.id), error)
        _content(connection, node, upload, frame, lambda _chunk: None)
        return digest
    try:
        digest = (_receive if frame.kind is PartKind.WHOLE else _make)(connection, node, upload, frame)
    finally:
        if digest == frame.digest != NO_DIGEST:
            node.uploads.arrived(upload, frame.start, digest)
        else:
            node.uploads.lost(upload, frame.start)
    return digest


def _content(
    connection: socket.socket, node: Node, upload: Upload, frame: Frame, use: Callable[[memoryview], None]
) -> None:
    """Receive what a frame brings, piece by piece: memory is taken for what has come, not for what is said."""
    chunk = memoryview(bytearray(min(SEND_BYTES, frame.content_bytes)))
    deadline, left = _deadline(frame), frame.content_bytes
    while left > 0:
        _check_goes_on(node, upload)
        fill(connection, chunk[:left], deadline - time.monotonic())
        use(chunk[:left])
        left -= len(chunk)


def _receive(connection: socket.socket, node: Node, upload: Upload, frame: Frame) -> str:
    """Receive a part into the slot; its checksum."""
    digest = xxhash.xxh3_128()
    deadline = _deadline(frame)
    stop = frame.start + frame.nbytes
    with upload.slot.view(upload.nbytes) as view:
        for place in range(frame.start, stop, SEND_BYTES):
            _check_goes_on(node, upload)
            with view[place : min(place + SEND_BYTES, stop)] as chunk:
                fill(connection, chunk, deadline - time.monotonic())
                digest.update(chunk)
    return digest.hexdigest()


def _make(connection: socket.socket, node: Node, upload: Upload, frame: Frame) -> str:
    """Make a part of what the base holds at its place, and of a delta to it; its checksum, or ``NO_DIGEST``."""
    from lightning_spot.image.delta import decode, part_of  # numpy is not needed before

    content = bytearray()
    _content(connection, node, upload, frame, content.extend)
    stop = frame.start + frame.nbytes
    if upload.base is None or frame.start >= upload.base.manifest.nbytes:
        return NO_DIGEST
    _check_goes_on(node, upload)
    with upload.slot.view(upload.nbytes) as view, view[frame.start : stop] as part:
        earlier = part_of(upload.base.image, frame.start, stop)
        if upload.is_gathered:
            earlier = upload.base.as_sent(earlier, frame.start)
        try:
            if frame.kind is PartKind.SAME:
                part[:] = earlier
            else:
                decode(content, earlier, part)
            return checksum(part)
        except CorruptSnapshot as error:
            logger.warning("%s: %s; the part is sent whole", upload.name or upload.id, error)
            return NO_DIGEST
        finally:
            earlier.release()


def _check_goes_on(node: Node, upload: Upload) -> None:
    if node.find_upload(upload.id) is not upload:
        raise SnapshotNotFound("this upload was given up")


def _deadline(frame: Frame) -> float:
    return time.monotonic() + FRAME_WAIT_S + frame.content_bytes / SLOWEST_BYTES_PER_S


def _check_frame(frame: Frame, upload: Upload) -> None:
    if frame.start + frame.nbytes > upload.nbytes:
        raise CorruptSnapshot(
            f"bytes {frame.start}–{frame.start + frame.nbytes} lie outside a snapshot of {upload.nbytes}"
        )
    if not 0 < frame.nbytes <= _LARGEST_FRAME_BYTES:
        raise CorruptSnapshot(f"a part of {frame.nbytes} bytes is none")
    most = {PartKind.WHOLE: frame.nbytes, PartKind.SAME: 0, PartKind.DELTA: min(frame.nbytes, _LARGEST_DELTA_BYTES)}
    least = frame.nbytes if frame.kind is PartKind.WHOLE else 0
    if not least <= frame.content_bytes <= most[frame.kind]:
        raise CorruptSnapshot(f"{frame.content_bytes} bytes are no {frame.kind.name} part of {frame.nbytes}")
    if len(upload.received) >= _MOST_PARTS:
        raise CorruptSnapshot(f"an upload has more than {_MOST_PARTS} parts")
