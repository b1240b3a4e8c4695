"""Requests that fill a slot: wait for one, receive the parts of a snapshot into it, make it one, wait until it counts.

Those that wait do so on threads of their own: what else is asked is answered meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash
from aiohttp import web

from lightning_spot.client.connection import BoundedSocket
from lightning_spot.config import SEND_BYTES
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    ServerRefusedError,
    SnapshotNotFoundError,
    SpotError,
    TierReason,
)
from lightning_spot.http.fields import (
    BODY,
    LONGEST_WAIT_S,
    attempt_of,
    committed,
    identifier,
    manifest,
    only_same_host,
    seconds,
)
from lightning_spot.http.limits import ACCEPTED, Quota
from lightning_spot.http.sessions import switched
from lightning_spot.protocol.wire import (
    NO_DIGEST,
    Frame,
    PartKind,
)
from lightning_spot.say import say
from lightning_spot.server.runs import key_of, texts, writer_of
from lightning_spot.server.slots import Making
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.uploads import Upload
from lightning_spot.snapshot.manifest import MOST_WRITERS, Manifest
from lightning_spot.snapshot.packing import can_pack
from lightning_spot.snapshot.parts import checksum
from lightning_spot.snapshot.ranges import read_floats
from lightning_spot.untrusted import MOST_BYTES, integer, text

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)

COMMIT_PATH, FLUSH_PATH = "/v1/uploads/{upload}/commit", "/v1/flush"

MOST_WAITING = 1024
"""Requests that wait at a time, shared by who sends them: each address has a share for one run."""

FRAME_WAIT_S = 60.0
"""A sender that begins no frame for so long, or sends one more slowly than the rate below, is hung up on."""

SLOWEST_BYTES_PER_S = 64 * 1024
SCRATCH_BYTES = 512 * 1024 * 1024
"""Memory beside the slots for what parts are made of, of all streams. Where a client has its share, it sends whole."""

_LARGEST_DELTA_BYTES = 16 * 1024 * 1024  # a delta is kept beside the slot until all of it is here
_DECODING_BYTES = 8 * 1024 * 1024  # its ranges, as Python holds them


class PartReceiver:
    """Takes the parts of an upload from a connection, into its slot. It blocks, on a thread of its own.

    Args:
        connection: to the client, for one thread.
        client: who that is.
        server: whose upload it is.
        upload: that is filled.
        scratch: bytes that all streams may take beside the slots.
    """

    def __init__(
        self, connection: BoundedSocket, client: str, server: SnapshotServer, upload: Upload, scratch: Quota
    ) -> None:
        self._connection, self._client, self._scratch = connection, client, scratch
        self._server, self._upload = server, upload

    def run(self) -> None:
        """Take frames until the client closes.

        Raises:
            SnapshotNotFoundError: if the upload is given up meanwhile.
            CorruptSnapshotError: if a frame is no part of the snapshot.
            OSError: if the connection breaks or is too slow.
        """
        header, received = bytearray(Frame.SIZE), self._upload.received
        while self._connection.within(FRAME_WAIT_S).fill(memoryview(header), at_boundary=True):
            frame, digest = Frame.unpack(header), NO_DIGEST
            _check_frame(frame, self._upload)
            received.begin(frame.start, self._connection)
            try:
                digest = self._receive(frame) if frame.kind is PartKind.WHOLE else self._make(frame)
            finally:
                received.end(frame.start, digest if digest == frame.digest != NO_DIGEST else None)
            self._connection.within(FRAME_WAIT_S).sendall(bytes.fromhex(digest))

    def _receive(self, frame: Frame) -> str:
        """Receive a part into the slot; its checksum."""
        digest, stop = xxhash.xxh3_128(), frame.start + frame.nbytes
        with self._upload.slot.view(self._upload.nbytes) as view, view[frame.start : stop] as part:
            self._fill(frame, part, digest.update)
        return digest.hexdigest()

    def _make(self, frame: Frame) -> str:
        """Make a part of what the base holds at its place, and of a delta to it; its checksum, or ``NO_DIGEST``."""
        from lightning_spot.snapshot.delta import decode, part_of  # numpy is not needed before

        base, stop = self._upload.base, frame.start + frame.nbytes
        base_bytes = base.manifests[0].nbytes if base is not None else 0
        # The delta, and a copy of the base where that is not as it was.
        needed = frame.content_bytes + _DECODING_BYTES if frame.kind is PartKind.DELTA else 0
        needed += frame.nbytes if stop > base_bytes else 0
        if base is None or frame.start >= base_bytes or not self._scratch.take(self._client, needed):
            self._fill(frame, memoryview(bytearray(SEND_BYTES)))
            return NO_DIGEST
        try:
            content = bytearray(frame.content_bytes)
            self._fill(frame, memoryview(content))
            self._check_goes_on()
            with self._upload.slot.view(self._upload.nbytes) as view, view[frame.start : stop] as part:
                with part_of(base.image(), frame.start, stop) as earlier:
                    if frame.kind is PartKind.SAME:
                        part[:] = earlier
                    else:
                        decode(content, earlier, part)
                return checksum(part)
        except CorruptSnapshotError as error:
            text = "{about}: {error}; the part is sent whole"
            say(logging.WARNING, "delta-damaged", text, about=self._upload.name, error=error)
            return NO_DIGEST
        finally:
            self._scratch.give_back(self._client, needed)

    def _fill(self, frame: Frame, target: memoryview, note: Callable[[memoryview], object] = lambda _: None) -> None:
        """Receive what a frame brings; into memory that is smaller, piece over piece."""
        connection = self._connection.within(FRAME_WAIT_S + frame.content_bytes / SLOWEST_BYTES_PER_S)
        for place in range(0, frame.content_bytes, SEND_BYTES):
            self._check_goes_on()
            start, nbytes = place % len(target), min(SEND_BYTES, frame.content_bytes - place)
            with target[start : start + nbytes] as piece:
                connection.fill(piece)
                note(piece)

    def _check_goes_on(self) -> None:
        if self._server.uploads.find(self._upload.id) is not self._upload:
            raise SnapshotNotFoundError("this upload was given up")


def _check_frame(frame: Frame, upload: Upload) -> None:
    stop = frame.start + frame.nbytes
    if not frame.start < stop == upload.end_of(frame.start):
        raise CorruptSnapshotError(f"bytes {frame.start}–{stop} are no part of a snapshot of {upload.nbytes}")
    most = {PartKind.WHOLE: frame.nbytes, PartKind.SAME: 0, PartKind.DELTA: min(frame.nbytes, _LARGEST_DELTA_BYTES)}
    least = frame.nbytes if frame.kind is PartKind.WHOLE else 0
    if not least <= frame.content_bytes <= most[frame.kind]:
        raise CorruptSnapshotError(f"{frame.content_bytes} bytes are no {frame.kind.name} part of {frame.nbytes}")


MOST_STREAMS = 1024
"""Streams of parts at once, shared by clients, each on a thread: many hosts send their shards at the same time."""

_FURTHER = 4  # so much of these is for more than one of an upload: who comes first must keep no upload out


class UploadRequests:
    """Handlers over the uploads of a server.

    Args:
        server: whose.

    Attributes:
        asked_s: when a slot was asked for, or what was received was committed, last (monotonic), 0 for never.
    """

    def __init__(self, server: SnapshotServer) -> None:
        self.asked_s = 0.0
        self._server = server
        self._waiting = Quota(MOST_WAITING, "requests that wait", FailureReason.RING_FULL)
        self._waiting_threads = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="spot-wait")
        self._stream_threads = ThreadPoolExecutor(MOST_STREAMS, thread_name_prefix="spot-stream")
        self._streaming = Quota(MOST_STREAMS, "streams", TierReason.TOO_MANY_STREAMS)
        self._scratch = Quota(SCRATCH_BYTES, "memory beside the slots")

    def routes(self) -> list[web.RouteDef]:
        """Where they are asked."""
        return [
            web.post("/v1/runs/{run}/uploads", self.lease),
            web.post("/v1/runs/{run}/awaited", self.awaited),
            web.post("/v1/runs/{run}/fail", self.fail),
            web.post("/v1/uploads/{upload}/stream", self.stream),
            web.post(COMMIT_PATH, self.commit),
            web.delete("/v1/uploads/{upload}", self.abort),
            web.post(FLUSH_PATH, self.flush),
        ]

    def close(self) -> None:
        """Give up what is being received."""
        for upload in self._server.uploads:
            self._server.uploads.abort(upload)
        for threads in (self._stream_threads, self._waiting_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def lease(self, request: web.Request) -> web.Response:
        """Take a slot."""
        near, run, body = request[ACCEPTED].is_near, request.match_info["run"], request[BODY]
        self.asked_s = time.monotonic()
        attempt = attempt_of(body)
        ask = functools.partial(
            self._server.uploads.lease,
            run,
            attempt,
            integer(body, "nbytes", None, 0, MOST_BYTES),
            session=text(body, "session") if near else "",
            manifest=manifest(body) if body.get("manifest") is not None else None,
            upload_id=identifier(body, "upload"),
            making=Making(text(body, "making", Making.NOW.value)) if near else Making.NOW,
            writer=integer(body, "writer", 0, 0, MOST_WRITERS) if near else 0,
            committed=committed(body, attempt),
            wait_s=seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
            cancelled=request[ACCEPTED].gone.done,
        )
        upload = await self._wait(request, run, ask)
        if request[ACCEPTED].gone.done():
            self._server.uploads.abort(upload.id)  # nobody will ever fill it
        return web.json_response({**leased(self._server, upload), "base": base_info(upload), "unpacks": can_pack()})

    async def awaited(self, request: web.Request) -> web.Response:
        """Wait until a snapshot counts, or never will (this host only)."""
        only_same_host(request)
        run, body = request.match_info["run"], request[BODY]
        name, wait_s = text(body, "name"), seconds(body, "wait_s", 0.0, LONGEST_WAIT_S)
        ask = functools.partial(self._server.wait_for, run, name, wait_s, request[ACCEPTED].gone.done)
        status, why = await self._wait(request, run, ask)
        return web.json_response({"status": status.value, "why": why})

    async def flush(self, request: web.Request) -> web.Response:
        """Bring everything, or all of a run, to the tiers below, and wait for that."""
        run = text(request[BODY], "run") if request[BODY].get("run") is not None else None
        wait_s = seconds(request[BODY], "wait_s", 60.0, LONGEST_WAIT_S)
        ask = functools.partial(self._server.flush, run, wait_s, request[ACCEPTED].gone.done)
        return web.json_response({"unreached": await self._wait(request, run or "", ask)})

    async def _wait(self, request: web.Request, run: str, ask: Callable[[], Answer]) -> Answer:
        """Ask the server for something on a thread; a run is one that is waited for by whatever name it is called."""
        whose = f"{request[ACCEPTED].client} {self._server.registry.key(run) if run else ''}"
        with self._waiting.holding(whose):
            return await asyncio.get_running_loop().run_in_executor(self._waiting_threads, ask)

    async def fail(self, request: web.Request) -> web.Response:
        """A writer will never have its shard of a snapshot."""
        self._server.uploads.fail(request.match_info["run"], attempt_of(request[BODY]), manifest(request[BODY]))
        return web.json_response({})

    async def stream(self, request: web.Request) -> web.Response:
        """Hand the connection over to a thread that receives straight into the slot."""
        upload = self._server.uploads.find(request.match_info["upload"])
        client, loop = request[ACCEPTED].client, asyncio.get_running_loop()
        if upload.streams and self._streaming.held >= MOST_STREAMS // _FURTHER:
            text = "many uploads come to this server: it grants each one connection for its parts, and this one has it"
            raise ServerRefusedError(text, status=503, reason=TierReason.TOO_MANY_STREAMS)
        with self._streaming.holding(client):
            async with switched(request) as connection:  # what it refuses is answered: no stream has begun
                try:
                    with (
                        BoundedSocket(fileno=connection.detach()) as bounded,
                        self._server.uploads.streaming(upload, bounded),
                    ):
                        receiver = PartReceiver(bounded, client, self._server, upload, self._scratch)
                        await loop.run_in_executor(self._stream_threads, receiver.run)
                except (OSError, SpotError) as error:
                    logger.debug("a stream of parts ended: %s", error)
        return web.Response()

    async def commit(self, request: web.Request) -> web.Response:
        """Make it a snapshot; on this host one that was filled through shared memory."""
        body = request[BODY]
        upload = self._server.uploads.find(request.match_info["upload"])
        if not request[ACCEPTED].is_near:
            self.asked_s = time.monotonic()
            done = await asyncio.to_thread(lambda: self._server.uploads.commit(upload.id, manifest(body)))
            return web.json_response({"checksums": list(done.checksums)})
        whole = Manifest.from_dict(body.get("manifest"))
        floats = read_floats(body.get("floats", []), whole.nbytes)
        destinations = list(texts(body, "destinations")) if body.get("destinations") is not None else None
        done = await asyncio.to_thread(self._server.uploads.seal, upload.id, whole, destinations, floats)
        short = self._server.ring.is_short(key_of(done), done.nbytes, writer_of(done))
        return web.json_response({"checksums": list(done.checksums), "short": short})

    async def abort(self, request: web.Request) -> web.Response:
        """Give it up."""
        self._server.uploads.abort(request.match_info["upload"])
        return web.json_response({})


def base_info(upload: Upload) -> dict[str, Any] | None:
    """The manifest of the snapshot from which parts of an upload can be made; ``None`` for none."""
    return upload.base.manifests[0].to_dict() if upload.base is not None else None


def leased(server: SnapshotServer, upload: Upload) -> dict[str, Any]:
    """What who fills a slot has to know of it."""
    slot = upload.slot
    mapped = server.ring.slots if upload.announced is None else ()  # who sends it over the network maps none
    return {
        "upload": upload.id,
        "slot": slot.index,
        "generation": slot.generation,
        "backing": slot.memory.backing if slot.memory else "",
        "generations": {item.index: item.generation for item in mapped if item.memory},
    }
