"""Requests that fill a slot: take one, receive the parts of a snapshot into it, make it one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from aiohttp import hdrs, web

from lightning_spot.config import HIGHEST_ATTEMPT
from lightning_spot.errors import NodeRefused, SpotError, TooManyStreams
from lightning_spot.image.floats import read_floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.written import read_ranges
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.slots import Making
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import SENDER_HEADER, UPGRADE
from lightning_spot.service.fields import (
    LONGEST_WAIT_S,
    MANIFEST_BODY_BYTES,
    MOST_BYTES,
    identifier,
    integer,
    json_body,
    making,
    manifest,
    only_same_host,
    same_host,
    seconds,
    text,
    texts,
)
from lightning_spot.service.hosts import Lease
from lightning_spot.service.part_receiver import SCRATCH_BYTES, receive_parts
from lightning_spot.service.quotas import Quota, client_of
from lightning_spot.service.shares import base_info, leased, shared_body, shared_of

logger = logging.getLogger(__name__)

MOST_STREAMS = 256
"""Streams of parts at once, shared by who sends: each host has one for each upload, as long as there are threads."""

MOST_STREAM_THREADS = 1024
"""Of which each stream takes one: all hosts of one snapshot have theirs, see :data:`~.portion.MOST_HOSTS`."""

_MOST_STREAMS_OF_A_SENDER = 16


class UploadRequests:
    """Handlers over the uploads of a node.

    Args:
        node: whose.
        lease: waits for a slot on the event loop, see :meth:`Waiting.lease`.

    Attributes:
        committed_s: when a snapshot was committed last (monotonic), 0 for never.
    """

    def __init__(self, node: Node, lease: Lease) -> None:
        self.committed_s = 0.0
        self._node, self._wait_for_slot = node, lease
        self._streams: Counter[tuple[str, str]] = Counter()  # of each upload and sender
        self._stream_threads = ThreadPoolExecutor(MOST_STREAM_THREADS, thread_name_prefix="spot-stream")
        self._threads, self._scratch = Quota(MOST_STREAM_THREADS), Quota(SCRATCH_BYTES)

    def routes(self) -> list[web.RouteDef]:
        """Where they are asked."""
        return [
            web.post("/v1/runs/{run}/uploads", self.lease),
            web.post("/v1/uploads/{upload}/stream", self.stream),
            web.post("/v1/uploads/{upload}/commit", self.commit),
            web.post("/v1/uploads/{upload}/seal", self.seal),
            web.delete("/v1/uploads/{upload}", self.abort),
        ]

    def close(self) -> None:
        """Stop receiving parts. Call it once the uploads were given up."""
        self._stream_threads.shutdown(wait=False, cancel_futures=True)

    async def lease(self, request: web.Request) -> web.Response:
        """Take a slot."""
        near = same_host(request)
        body = await shared_body(request) if near else await json_body(request)
        upload = await self._wait_for_slot(
            request,
            request.match_info["run"],
            integer(body, "attempt", None, 0, HIGHEST_ATTEMPT),
            integer(body, "nbytes", None, 0, MOST_BYTES),
            seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
            session=text(body, "session") if near else "",
            name=text(body, "name"),
            manifest=manifest(body) if body.get("manifest") is not None else None,
            upload_id=identifier(body, "upload"),
            shared=shared_of(body) if near else None,
            layout_id=identifier(body, "layout_id"),
            making=making(body) if near else Making.NOW,
        )
        return web.json_response({**leased(self._node, upload), "base": base_info(upload)})

    async def stream(self, request: web.Request) -> web.Response:
        """Hand the connection over to a thread that receives straight into the slot."""
        upload = self._node.find_upload(request.match_info["upload"])
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if request.headers.get(hdrs.UPGRADE) != UPGRADE or transport is None or sock is None:
            raise NodeRefused(f"a stream needs 'Upgrade: {UPGRADE}'", status=426)
        sender = upload.id, request.headers.get(SENDER_HEADER, "")
        self._check_streams(upload, sender)
        client = client_of(request)
        if not self._threads.take(client):
            raise TooManyStreams("this client has its share of the streams that this node serves at once")
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        loop = asyncio.get_running_loop()
        self._streams[sender] += 1
        try:
            with sock.dup() as connection, self._node.streaming(upload, connection):
                await loop.run_in_executor(
                    self._stream_threads, receive_parts, connection, self._node, upload, self._scratch
                )
        except (OSError, SpotError) as error:
            logger.debug("a stream of parts ended: %s", error)
        finally:
            self._streams -= Counter([sender])  # which forgets who has none
            self._threads.give_back(client)
            transport.close()  # the connection no longer speaks HTTP
        return web.Response()

    def _check_streams(self, upload: Upload, sender: tuple[str, str]) -> None:
        """Refuse a stream beyond a sender's part of them, and more senders than hosts that send the upload."""
        mine = self._streams[sender]
        hosts = upload.joint.shared.shares if upload.joint is not None and upload.is_gathered else 1
        if not mine and sum(upload_id == upload.id for upload_id, _ in self._streams) >= hosts:
            raise TooManyStreams(f"this upload is sent by {hosts} already, as many as it has hosts")
        senders = len(self._streams) + (not mine)
        most = min(_MOST_STREAMS_OF_A_SENDER, MOST_STREAMS // senders)
        if mine and (mine >= most or self._streams.total() >= MOST_STREAMS):
            raise TooManyStreams("this host has its part of the streams that this node serves at once")

    async def commit(self, request: web.Request) -> web.Response:
        """Make it a snapshot."""
        self.committed_s = time.monotonic()
        body = await json_body(request, MANIFEST_BODY_BYTES)
        upload = request.match_info["upload"]
        done = await asyncio.to_thread(lambda: self._node.commit(upload, manifest(body)))
        return web.json_response({"checksums": list(done.checksums)})

    async def seal(self, request: web.Request) -> web.Response:
        """Make a slot a snapshot that was filled through shared memory (this host only)."""
        only_same_host(request)
        body = await json_body(request, MANIFEST_BODY_BYTES)
        whole = Manifest.from_dict(body.get("manifest"))
        floats = read_floats(body.get("floats", []), whole.nbytes)
        destinations = list(texts(body, "destinations")) if body.get("destinations") is not None else None
        written = read_ranges(body.get("written"), whole.nbytes)
        upload = self._node.find_upload(request.match_info["upload"])
        followed = body.get("followed") is True
        done = await asyncio.to_thread(
            self._node.seal, upload.id, whole, destinations, floats, written, followed=followed
        )
        is_portion = upload.joint is not None and upload.joint.shared.image_nbytes > 0
        short = self._node.ring.is_short(key_of(done), upload.nbytes if is_portion else done.nbytes)
        return web.json_response({"checksums": list(done.checksums), "short": short})

    async def abort(self, request: web.Request) -> web.Response:
        """Give it up."""
        untouched = same_host(request) and (await json_body(request)).get("untouched") is True
        self._node.abort(request.match_info["upload"], untouched=untouched)
        return web.json_response({})
