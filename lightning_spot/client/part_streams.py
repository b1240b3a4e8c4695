"""Sends the parts of a snapshot to a server over several connections; what goes wrong is sent again, and whole.

The other end of a stream is in ``http/upload_requests.py``; the frames are described in ``protocol/wire.py``.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from lightning_spot.client.connection import BoundedSocket
from lightning_spot.client.encoding import OutgoingPart, Part, PartEncoder
from lightning_spot.client.server_client import PING_S, REPLY_TIMEOUT_S, ServerClient
from lightning_spot.config import SEND_BYTES
from lightning_spot.errors import CorruptSnapshotError, ServerRefusedError, ServerUnreachableError, TierReason
from lightning_spot.protocol.wire import DIGEST_BYTES, Frame, PartKind, fill
from lightning_spot.server.tier import Sent
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import part_ranges
from lightning_spot.untrusted import plain

CONNECTIONS = 4
"""Connections a snapshot moves over: a cloud VM gets about 5 Gbit/s per flow outside a placement group."""

_WINDOW = 2  # parts under way on one connection before an answer is waited for
_SENDS_OF_A_PART = 3
_PAUSE_S = 1.0
_SILENT_S = 5.0  # if nothing arrives for so long, the server is asked whether it is there
_PATIENCE = 2  # in times of a ping's: the line may be full of what is sent


class PartStream:
    """A connection for the parts of one upload. Use from one thread; close it.

    Args:
        client: of the server.
        upload: id of the upload.

    Raises:
        ServerUnreachableError: if no server answers.
        SpotError: whatever the server answered with.

    Attributes:
        busy_s: seconds that were spent on sending, and on waiting for answers.
    """

    def __init__(self, client: ServerClient, upload: str) -> None:
        self._name = str(client.address)
        self.busy_s = 0.0
        self._socket: BoundedSocket = client.upgraded(f"/v1/uploads/{upload}/stream")

    def send(self, parts: Iterable[OutgoingPart]) -> Iterator[tuple[OutgoingPart, str]]:
        """Send parts, and yield each with the xxh3-128 of what lies there now.

        Raises:
            ServerUnreachableError: if the connection breaks.
        """
        waiting: list[OutgoingPart] = []
        try:
            for part in parts:
                self._send(part)
                waiting.append(part)
                if len(waiting) >= _WINDOW:
                    yield waiting.pop(0), self._digest()
            for part in waiting:
                yield part, self._digest()
        except OSError as error:
            why = f"the connection to {self._name} broke ({plain(error)})"
            raise ServerUnreachableError(why, tier=self._name) from error

    def cut(self) -> None:
        """End the connection from another thread: what waits for it fails at once."""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, part: OutgoingPart) -> None:
        began_s = time.perf_counter()
        content = memoryview(part.content)
        frame = Frame(part.kind, part.start, part.nbytes, len(content), part.digest).pack()
        for piece in (frame, *(content[start : start + SEND_BYTES] for start in range(0, len(content), SEND_BYTES))):
            self._socket.deadline_s = time.monotonic() + REPLY_TIMEOUT_S
            self._socket.sendall(piece)
        self.busy_s += time.perf_counter() - began_s

    def _digest(self) -> str:
        began_s = time.perf_counter()
        buffer = bytearray(DIGEST_BYTES)
        self._socket.deadline_s = time.monotonic() + REPLY_TIMEOUT_S
        fill(self._socket, memoryview(buffer), REPLY_TIMEOUT_S)
        self.busy_s += time.perf_counter() - began_s
        return buffer.hex()


def send_parts(client: ServerClient, url: str, upload: str, manifest: Manifest, encoder: PartEncoder) -> Sent:
    """Send all parts of an upload, each over the connection that is free first.

    Args:
        client: of the server.
        url: of the run there, for messages.
        upload: its id.
        manifest: sealed, of what is sent.
        encoder: says how each is sent.

    Returns:
        how the parts went; what had to be sent again is counted each time.

    Raises:
        ServerUnreachableError: if the server does not answer any more.
        CorruptSnapshotError: if a part arrives damaged again and again.
    """
    ranges = part_ranges(manifest.nbytes, manifest.part_bytes)
    parts = [(start, stop, digest) for (start, stop), digest in zip(ranges, manifest.checksums, strict=True)]
    shared, sent = _Shared(parts), Sent()
    senders = [_Sender(client, url, upload, shared, encoder) for _ in range(min(CONNECTIONS, len(parts)))]
    with ThreadPoolExecutor(max(1, len(senders))) as pool:
        jobs = [pool.submit(sender.run) for sender in senders]
        try:
            for job in jobs:
                while not wait([job], _SILENT_S).done:
                    if time.monotonic() - shared.arrived_s >= _SILENT_S:
                        client.ping(_PATIENCE * PING_S)
                sent.add(job.result())
        except BaseException:
            shared.are_stopped = True
            for sender in senders:
                sender.stop()
            raise
    if parts and not shared.are_taken:
        raise ServerRefusedError(
            "this server serves no connection for the parts", tier=url, reason=TierReason.TOO_MANY_STREAMS
        )
    return sent


class _Sender:
    """One connection at a time, and what did not arrive over it.

    Args:
        client, url, upload, encoder: see :func:`send_parts`.
        parts: to take from.
    """

    def __init__(self, client: ServerClient, url: str, upload: str, parts: _Shared, encoder: PartEncoder) -> None:
        self._client, self._url, self._upload = client, url, upload
        self._parts, self._encoder = parts, encoder
        self._again: dict[int, Part] = {}
        self._sent = Sent()
        self._stream: PartStream | None = None

    def run(self) -> Sent:
        """Send parts; what arrives damaged, or not at all, is sent again a few times. How they went."""
        for last_try in (False,) * (_SENDS_OF_A_PART - 1) + (True,):
            try:
                self._send_over()
            except ServerRefusedError as error:
                if error.reason is not TierReason.TOO_MANY_STREAMS:
                    raise
                if not self._again:
                    return self._sent  # the server has many others to serve: the connections that it serves do the rest
                if last_try:
                    raise
                time.sleep(_PAUSE_S)  # it may not have noticed yet that the connection before this one broke
            except ServerUnreachableError:
                if last_try or self._parts.are_stopped:
                    raise
            if not self._again:
                return self._sent
        raise CorruptSnapshotError(
            f"bytes {min(self._again)}… arrive damaged at {self._url}, {_SENDS_OF_A_PART} times", where=self._url
        )

    def stop(self) -> None:
        """Send nothing more: what is under way fails at once."""
        if self._stream is not None:
            self._stream.cut()

    def _send_over(self) -> None:
        self._stream = stream = PartStream(self._client, self._upload)
        try:
            for part, digest in stream.send(self._outgoing()):
                self._note(part)
                if digest == part.digest:
                    del self._again[part.start]
                    self._parts.arrived_s = time.monotonic()
        finally:
            self._sent.wire_s += stream.busy_s
            stream.close()

    def _note(self, part: OutgoingPart) -> None:
        match part.kind:
            case PartKind.WHOLE:
                self._sent.whole_bytes += len(part.content)
            case PartKind.DELTA:
                self._sent.delta_bytes += len(part.content)
            case PartKind.SAME:
                self._sent.same_bytes += part.nbytes

    def _outgoing(self) -> Iterator[OutgoingPart]:
        """What an earlier connection left, whole; then the next parts."""
        for part in list(self._again.values()):
            yield self._encoder.whole(part)
        for part in self._parts:
            self._again[part[0]] = part
            yield self._encoder.encode(part)


class _Shared:
    """Parts that several connections take from in turn.

    Attributes:
        are_taken: whether none is left.
        are_stopped: whether no more are handed out.
        arrived_s: when the last one did, by the monotonic clock.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.are_taken = self.are_stopped = False
        self.arrived_s = time.monotonic()
        self._parts = iter(parts)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Part]:
        while not self.are_stopped:
            with self._lock:
                part = next(self._parts, None)
            if part is None:
                self.are_taken = True
                return
            yield part
