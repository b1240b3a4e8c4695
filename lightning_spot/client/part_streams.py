"""Sends the parts of a snapshot to a server over several connections; what goes wrong is sent again, and whole.

The other end of a stream is in ``http/upload_requests.py``; the frames are described in ``protocol/wire.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from lightning_spot.client.connection import BoundedSocket
from lightning_spot.client.encoding import OutgoingPart, Part, PartEncoder
from lightning_spot.client.server_client import REPLY_TIMEOUT_S, ServerClient
from lightning_spot.config import SEND_BYTES
from lightning_spot.errors import CorruptSnapshotError, ServerUnreachableError, SpotError, TierReason
from lightning_spot.protocol.wire import DIGEST_BYTES, Frame, PartKind
from lightning_spot.retry import growing, retried
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import part_ranges
from lightning_spot.untrusted import plain

CONNECTIONS = 4
"""Connections a snapshot moves over: a cloud VM gets about 5 Gbit/s per flow outside a placement group."""

SILENT_S = 5.0
"""If nothing arrives for so long, the server is asked whether it is there."""

_WINDOW = 2  # parts under way on one connection before an answer is waited for
_SENDS_OF_A_PART, _FIRST_PAUSE_S = 3, 0.5


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
            self._socket.within(REPLY_TIMEOUT_S).sendall(piece)
        self.busy_s += time.perf_counter() - began_s

    def _digest(self) -> str:
        began_s = time.perf_counter()
        buffer = bytearray(DIGEST_BYTES)
        self._socket.within(REPLY_TIMEOUT_S).fill(memoryview(buffer))
        self.busy_s += time.perf_counter() - began_s
        return buffer.hex()


def send_parts(
    client: ServerClient, url: str, upload: str, manifest: Manifest, encoder: PartEncoder
) -> tuple[Counter[PartKind], float]:
    """Send all parts of an upload, each over the connection that is free first.

    Args:
        client: of the server.
        url: of the run there, for messages.
        upload: its id.
        manifest: sealed, of what is sent.
        encoder: says how each is sent.

    Returns:
        bytes that were sent of whole parts and deltas, those of parts that the server had, and seconds that connections
        took to send, and to have it acknowledged; what had to be sent again is counted each time.

    Raises:
        ServerUnreachableError: if the server does not answer any more.
        ServerRefusedError: if it serves no connection for the parts.
        CorruptSnapshotError: if a part arrives damaged again and again.
    """
    ranges = part_ranges(manifest.nbytes, manifest.part_bytes)
    parts = [(start, stop, digest) for (start, stop), digest in zip(ranges, manifest.checksums, strict=True)]
    sending, connections = _Sending(client, url, upload, parts, encoder), min(CONNECTIONS, len(parts))
    with ThreadPoolExecutor(max(1, connections)) as pool:
        jobs = [pool.submit(sending.run) for _ in range(connections)]
        try:
            for job in jobs:
                while not wait([job], SILENT_S).done:
                    if time.monotonic() - sending.arrived_s >= SILENT_S:
                        client.ping_under_load()
                job.result()
        except BaseException:
            sending.stop()
            raise
    if sending.unserved is not None and sending.parts:
        raise sending.unserved
    return sending.sent, sending.wire_s


class _Sending:
    """The parts of an upload, which several connections take in turn.

    Args:
        client, url, upload, parts, encoder: see :func:`send_parts`.

    Attributes:
        parts: that no connection has taken yet.
        sent, wire_s: how the parts went.
        unserved: why a connection that has sent nothing could not be had.
        arrived_s: when the last one did, by the monotonic clock.
    """

    def __init__(
        self, client: ServerClient, url: str, upload: str, parts: Iterable[Part], encoder: PartEncoder
    ) -> None:
        self._client, self._url, self._upload, self._encoder = client, url, upload, encoder
        self.parts, self._lock = deque(parts), threading.Lock()
        self._streams: set[PartStream] = set()
        self.sent, self.wire_s = Counter[PartKind](), 0.0
        self.unserved: SpotError | None = None
        self._are_stopped = False
        self.arrived_s = time.monotonic()

    def run(self) -> None:
        """Send over one connection at a time; what arrives damaged, or not at all, is sent again a few times."""
        left: dict[int, Part] = {}
        pauses_s = itertools.islice(growing(_FIRST_PAUSE_S), _SENDS_OF_A_PART - 1)
        try:
            retried(lambda: self._send_over(left), pauses_s, lambda error: bool(left) and self._may_pass(error))
        except SpotError as error:
            if left or not self._may_pass(error):
                raise
            self.unserved = error  # the connections that the server serves do the rest

    def _may_pass(self, error: Exception) -> bool:
        """Whether another connection may go otherwise: the server may not know yet that the one before it broke."""
        passes = isinstance(error, CorruptSnapshotError | ServerUnreachableError)
        return not self._are_stopped and (passes or TierReason.TOO_MANY_STREAMS.caused(error))

    def stop(self) -> None:
        """Send nothing more: what is under way fails at once."""
        self._are_stopped = True
        for stream in list(self._streams):
            stream.cut()

    def _send_over(self, left: dict[int, Part]) -> None:
        """Send what is left of earlier connections, and the next parts, over another one; what is not there stays."""
        stream, sent = PartStream(self._client, self._upload), Counter[PartKind]()
        self._streams.add(stream)
        if self._are_stopped:  # since it was begun
            stream.cut()
        try:
            for part, digest in stream.send(self._outgoing(left)):
                sent[part.kind] += part.nbytes if part.kind is PartKind.SAME else len(part.content)
                if digest == part.digest:
                    del left[part.start]
                    self.arrived_s = time.monotonic()
        finally:
            with self._lock:
                self.sent.update(sent)
                self.wire_s += stream.busy_s
            self._streams.discard(stream)
            stream.close()
        if left:
            raise CorruptSnapshotError(f"bytes {min(left)}… arrive damaged at {self._url}", where=self._url)

    def _outgoing(self, left: dict[int, Part]) -> Iterator[OutgoingPart]:
        """What an earlier connection left, whole; then the next parts."""
        for part in list(left.values()):
            yield self._encoder.whole(part)
        while not self._are_stopped:
            try:
                following = self.parts.popleft()
            except IndexError:
                return
            left[following[0]] = following
            yield self._encoder.encode(following)
