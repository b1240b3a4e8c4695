"""The node's end of a stream of parts: puts frames straight into a slot. The other end is ``part_sender``."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import xxhash

from lightning_spot.config import MOST_PART_BYTES, PROTOCOL_VERSION, SEND_BYTES
from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound
from lightning_spot.image.parts import checksum
from lightning_spot.memory.node import Node
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import NO_DIGEST, PROTOCOL_HEADER, UPGRADE, Frame, PartKind, fill
from lightning_spot.service.quotas import Quota, client_at
from lightning_spot.untrusted import plain

logger = logging.getLogger(__name__)

FRAME_WAIT_S = 60.0
"""A sender that begins no frame for so long, or sends one more slowly than the rate below, is hung up on."""

SLOWEST_BYTES_PER_S = 64 * 1024
SCRATCH_BYTES = 512 * 1024 * 1024
"""Memory beside the slots for what parts are made of, of all streams. Where a client has its share, it sends whole."""

_LARGEST_DELTA_BYTES = 16 * 1024 * 1024  # a delta is kept beside the slot until all of it is here
_DECODING_BYTES = 8 * 1024 * 1024  # its ranges, as Python holds them
_MOST_PARTS = 2**20


def receive_parts(connection: socket.socket, node: Node, upload: Upload, scratch: Quota) -> None:
    """Take frames until the client closes. Blocks; runs on a thread of its own.

    Args:
        connection: to the client.
        node: whose upload it is.
        upload: that is filled.
        scratch: bytes that all streams may take beside the slots.

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
        digest = _take(connection, node, upload, frame, scratch)
        connection.settimeout(FRAME_WAIT_S)
        connection.sendall(bytes.fromhex(digest))


def _take(connection: socket.socket, node: Node, upload: Upload, frame: Frame, scratch: Quota) -> str:
    """Put a part into the slot; its checksum, or ``NO_DIGEST`` for one that overlaps another: of that, nothing is."""
    digest = NO_DIGEST
    try:
        node.uploads.arriving(upload, frame.start, frame.start + frame.nbytes, connection)
    except CorruptSnapshot as error:
        # No line of the log for each: they may come by the thousand.
        logger.debug("%s: %s; it is refused", plain(upload.name or upload.id), error)
        _content(connection, node, upload, frame, lambda _chunk: None)
        return digest
    try:
        if frame.kind is PartKind.WHOLE:
            digest = _receive(connection, node, upload, frame)
        else:
            with scratch.holding(client_at(connection), _scratch_bytes(frame, upload)) as has_room:
                digest = _make(connection, node, upload, frame, has_room=has_room)
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


def _scratch_bytes(frame: Frame, upload: Upload) -> int:
    """What is needed beside the slot to make a part: the delta, and a copy of the base where that is not as it was."""
    delta_bytes = frame.content_bytes + _DECODING_BYTES if frame.kind is PartKind.DELTA else 0
    if upload.base is None or frame.start >= upload.base.manifest.nbytes:
        return 0
    is_beyond = frame.start + frame.nbytes > upload.base.manifest.nbytes
    return delta_bytes + (is_beyond + upload.is_gathered) * frame.nbytes


def _make(connection: socket.socket, node: Node, upload: Upload, frame: Frame, *, has_room: bool) -> str:
    """Make a part of what the base holds at its place, and of a delta to it; its checksum, or ``NO_DIGEST``."""
    from lightning_spot.image.delta import decode, part_of  # numpy is not needed before

    can_make = has_room and upload.base is not None and frame.start < upload.base.manifest.nbytes
    content = bytearray()
    _content(connection, node, upload, frame, content.extend if can_make else lambda _chunk: None)
    if not can_make or upload.base is None:
        return NO_DIGEST
    stop = frame.start + frame.nbytes
    _check_goes_on(node, upload)
    with upload.slot.view(upload.nbytes) as view, view[frame.start : stop] as part:
        earlier = part_of(upload.base.image, frame.start, stop)
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
    if not 0 < frame.nbytes <= MOST_PART_BYTES:
        raise CorruptSnapshot(f"a part of {frame.nbytes} bytes is none: it has at most {MOST_PART_BYTES}")
    most = {PartKind.WHOLE: frame.nbytes, PartKind.SAME: 0, PartKind.DELTA: min(frame.nbytes, _LARGEST_DELTA_BYTES)}
    least = frame.nbytes if frame.kind is PartKind.WHOLE else 0
    if not least <= frame.content_bytes <= most[frame.kind]:
        raise CorruptSnapshot(f"{frame.content_bytes} bytes are no {frame.kind.name} part of {frame.nbytes}")
    if len(upload.received) >= _MOST_PARTS:
        raise CorruptSnapshot(f"an upload has more than {_MOST_PARTS} parts")
