"""Sends the parts of a snapshot to a server over several connections; what goes wrong is sent again, and whole."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from lightning_spot.client.encoding import OutgoingPart, Part, PartEncoder
from lightning_spot.client.server_client import PING_S, PartStream, ServerClient
from lightning_spot.errors import CorruptSnapshotError, ServerRefusedError, ServerUnreachableError, TierReason
from lightning_spot.memory.tier import Sent
from lightning_spot.protocol.wire import PartKind

CONNECTIONS = 4
"""Connections a snapshot moves over: a cloud VM gets about 5 Gbit/s per flow outside a placement group."""

_SENDS_OF_A_PART = 3
_PAUSE_S = 1.0
_SILENT_S = 5.0  # if nothing arrives for so long, the server is asked whether it is there
_PATIENCE = 2  # in times of a ping's: the line may be full of what is sent


class PartLanes:
    """The connections to a server.

    Args:
        client: of the server.
        url: of the run there, for messages.
    """

    def __init__(self, client: ServerClient, url: str) -> None:
        self._client, self._url = client, url

    def send(self, upload: str, parts: Iterator[Part], count: int, encoder: PartEncoder) -> Sent:
        """Send all parts of an upload, each over the connection that is free first.

        Args:
            upload: its id.
            parts: in the order in which they become final.
            count: how many they are.
            encoder: says how each is sent.

        Returns:
            how the parts went; what had to be sent again is counted each time.

        Raises:
            ServerUnreachableError: if the server does not answer any more.
            CorruptSnapshotError: if a part arrives damaged again and again.
        """
        open_stream = functools.partial(self._client.stream, upload)
        shared, sent = _Shared(parts), Sent()
        lanes = [_Lane(open_stream, self._url, shared, encoder) for _ in range(min(CONNECTIONS, count))]
        with ThreadPoolExecutor(max(1, len(lanes))) as pool:
            jobs = [pool.submit(lane.run) for lane in lanes]
            try:
                for job in jobs:
                    while not wait([job], _SILENT_S).done:
                        if time.monotonic() - shared.arrived_s >= _SILENT_S:
                            self._client.ping(_PATIENCE * PING_S)
                    sent.add(job.result())
            except BaseException:
                shared.stop()
                for lane in lanes:
                    lane.stop()
                raise
        if count and not shared.are_taken:
            raise ServerRefusedError(
                "this server serves no connection for the parts", tier=self._url, reason=TierReason.TOO_MANY_STREAMS
            )
        return sent


class _Lane:
    """One connection at a time, and what did not arrive over it.

    Args:
        open_stream: opens a connection.
        url: of the run there, for messages.
        parts: to take from.
        encoder: says how each is sent.
    """

    def __init__(self, open_stream: Callable[[], PartStream], url: str, parts: _Shared, encoder: PartEncoder) -> None:
        self._open_stream, self._url = open_stream, url
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
                    return self._sent  # the server has many others to serve: the lanes that it serves do the rest
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
        self._stream = stream = self._open_stream()
        try:
            for part, digest in stream.send(self._outgoing()):
                self._encoder.sent(part, stream.lap())
                self._note(part)
                if digest == part.digest:
                    del self._again[part.start]
                    self._parts.arrived_s = time.monotonic()
        finally:
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
        """What an earlier connection left, whole; then parts as they are final."""
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

    def __init__(self, parts: Iterator[Part]) -> None:
        self.are_taken = False
        self.arrived_s = time.monotonic()
        self._parts = parts
        self._lock = threading.Lock()
        self.are_stopped = False

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> Part:
        with self._lock:
            if self.are_stopped:
                raise StopIteration
            try:
                return next(self._parts)
            except StopIteration:
                self.are_taken = True
                raise

    def stop(self) -> None:
        """Hand out no more."""
        self.are_stopped = True
