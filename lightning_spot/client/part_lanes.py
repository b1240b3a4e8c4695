"""Sends the parts of a snapshot to a node over several connections; what goes wrong is sent again, and whole."""

from __future__ import annotations

import functools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from lightning_spot.client.node_client import PING_S, NodeClient
from lightning_spot.client.part_encoder import OutgoingPart, Part, PartEncoder
from lightning_spot.client.part_sender import PartStream
from lightning_spot.errors import CorruptSnapshot, NodeUnreachable, TooManyStreams
from lightning_spot.memory.tier import Sent
from lightning_spot.protocol.wire import PartKind
from lightning_spot.tiers.batches import Pace, useful_streams
from lightning_spot.tiers.lanes import Climb

CONNECTIONS = 4
"""Connections a snapshot moves over, at first: a cloud VM gets about 5 Gbit/s per flow outside a placement group."""

_MOST_CONNECTIONS = 16
_SENDS_OF_A_PART = 3
_PAUSE_S = 1.0
_SILENT_S = 5.0  # if nothing arrives for so long, the node is asked whether it is there
_PATIENCE = 2  # in times of a ping's: the line may be full of what is sent


class PartLanes:
    """The connections to a node: more of them where it is far and more of them move more.

    Args:
        client: of the node.
        url: of the run there, for messages.
    """

    def __init__(self, client: NodeClient, url: str) -> None:
        self._client, self._url = client, url
        self._sender = uuid.uuid4().hex
        self._pace = Pace()
        self._connections = CONNECTIONS

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
            NodeUnreachable: if the node does not answer any more.
            CorruptSnapshot: if a part arrives damaged again and again.
        """
        most = self._useful(count, self._pace.latency_s)
        climb, lock = Climb(min(self._connections, most), most), threading.Lock()
        open_stream = functools.partial(self._client.stream, upload, self._sender)
        lanes: list[_Lane] = []
        jobs: list[Future[Sent]] = []
        sent, moved_s = Sent(), time.monotonic()
        with ThreadPoolExecutor(max(1, min(count, _MOST_CONNECTIONS))) as pool:

            def moved(nbytes: int) -> None:
                nonlocal moved_s
                with lock:
                    moved_s = time.monotonic()
                    if not self._pace.latency_s:  # the first time: how far it is shows when the first one is connected
                        climb.most = self._useful(count, _connect_s(lanes))
                    climb.moved(nbytes)
                    begin()

            def begin() -> None:
                while len(jobs) < climb.lanes:
                    lanes.append(_Lane(open_stream, self._url, shared, encoder, moved))
                    jobs.append(pool.submit(lanes[-1].run))

            shared = _Shared(parts)
            with lock:
                begin()
            try:
                for job in jobs:  # which grow: a lane adds others before it ends
                    while not wait([job], _SILENT_S).done:
                        if time.monotonic() - moved_s >= _SILENT_S:
                            self._client.ping(_PATIENCE * PING_S)
                    sent.add(job.result())
            except BaseException:
                shared.stop()
                for lane in lanes:
                    lane.stop()
                raise
        if count and not shared.are_taken:
            raise TooManyStreams("this node serves no connection for the parts", tier=self._url)
        if connect_s := _connect_s(lanes):
            self._pace.answered(connect_s)
        self._connections = max(CONNECTIONS, climb.best_lanes)
        return sent

    def _useful(self, count: int, latency_s: float) -> int:
        return min(count, useful_streams(latency_s, fewest=CONNECTIONS, most=_MOST_CONNECTIONS))


class _Lane:
    """One connection at a time, and what did not arrive over it.

    Args:
        open_stream: opens a connection.
        url: of the run there, for messages.
        parts: to take from.
        encoder: says how each is sent.
        moved: called with the bytes that a part took.

    Attributes:
        connects_s: how long it took to connect, each time: how far away the node is, however busy.
    """

    def __init__(
        self,
        open_stream: Callable[[], PartStream],
        url: str,
        parts: _Shared,
        encoder: PartEncoder,
        moved: Callable[[int], None],
    ) -> None:
        self.connects_s: list[float] = []
        self._open_stream, self._url = open_stream, url
        self._parts, self._encoder, self._moved = parts, encoder, moved
        self._again: dict[int, Part] = {}
        self._sent = Sent()
        self._stream: PartStream | None = None

    def run(self) -> Sent:
        """Send parts; what arrives damaged, or not at all, is sent again a few times. How they went."""
        for last_try in (False,) * (_SENDS_OF_A_PART - 1) + (True,):
            try:
                self._send_over()
            except TooManyStreams:
                if not self._again:
                    return self._sent  # the node has many others to serve: the lanes that it serves do the rest
                if last_try:
                    raise
                time.sleep(_PAUSE_S)  # it may not have noticed yet that the connection before this one broke
            except NodeUnreachable:
                if last_try or self._parts.are_stopped:
                    raise
            if not self._again:
                return self._sent
        raise CorruptSnapshot(
            f"bytes {min(self._again)}… arrive damaged at {self._url}, {_SENDS_OF_A_PART} times", where=self._url
        )

    def stop(self) -> None:
        """Send nothing more: what is under way fails at once."""
        if self._stream is not None:
            self._stream.cut()

    def _send_over(self) -> None:
        self._stream = stream = self._open_stream()
        self.connects_s.append(stream.connect_s)
        try:
            for part, digest in stream.send(self._outgoing()):
                self._encoder.sent(part, stream.lap())
                self._note(part)
                if digest == part.digest:
                    del self._again[part.start]
                    self._moved(len(part.content))
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


def _connect_s(lanes: list[_Lane]) -> float:
    """How long it took to connect, 0 if none did: the shortest time, since others waited for a processor besides."""
    return min((connect_s for lane in lanes for connect_s in lane.connects_s), default=0.0)


class _Shared:
    """Parts that several connections take from in turn.

    Attributes:
        are_taken: whether none is left.
        are_stopped: whether no more are handed out.
    """

    def __init__(self, parts: Iterator[Part]) -> None:
        self.are_taken = False
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
