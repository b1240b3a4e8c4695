"""The node's HTTP service on aiohttp, over TCP and over a Unix socket. Thin: everything happens in :class:`Node`.

=========  ==================================  =================================================================
method     path                                what
=========  ==================================  =================================================================
GET        /healthz                            200 while the event loop turns; needs no token
GET        /readyz                             200 if a run would be well here, else 503 and why; needs no token
GET        /v1/status                          slots, runs, tiers
GET        /v1/runs                            the runs this node knows
POST       /v1/runs/RUN/open                   let an attempt write
POST       /v1/runs/RUN/close                  the trainer leaves
POST       /v1/runs/RUN/settle                 a snapshot was made durable by its sender
GET        /v1/runs/RUN/snapshots              the attempt that writes, what is in memory, what a tier has refused
GET        /v1/runs/RUN/files                  every file of the run, in memory and at the tier below
POST       /v1/runs/RUN/uploads                take a slot
POST       /v1/runs/RUN/shares                 take a share of one that several ranks fill (this host only)
POST       /v1/runs/RUN/decline                there will be no such snapshot to share (this host only)
POST       /v1/uploads/ID/placed               the bytes of a share are in place (this host only)
POST       /v1/…/joint…                        one that several hosts bring together: see :mod:`.hosts`
POST       /v1/uploads/ID/stream               fill it, over a connection of its own: see :mod:`.wire`
POST       /v1/uploads/ID/commit               make it a snapshot
POST       /v1/uploads/ID/seal                 the same for a slot filled through shared memory (this host only)
DELETE     /v1/uploads/ID                      give it up
POST       /v1/check                           whether this node's tier below answers, and is not who asks
POST       /v1/flush                           bring everything to the tiers below
GET, HEAD  /v1/files/RUN/PATH                  read (ranges too); ``last.ckpt`` is the newest snapshot
PUT        /v1/files/RUN/PATH                  write a file; with ``If-None-Match: *`` a new one only
DELETE     /v1/files/RUN/PATH                  remove a snapshot or file
=========  ==================================  =================================================================

``RUN`` is ``NAME@ID``, or ``NAME`` where only one run has it. Every number and text of a request is checked before
anything is done with it (``fields``); connections that say nothing are bounded (``connections``).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from aiohttp import hdrs, web

from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import NodeRefused, ProtocolMismatch, SettingsError, SpotError, TooManyStreams
from lightning_spot.image.floats import read_floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import checksum
from lightning_spot.image.written import read_ranges
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import RunInfo, key_of, parse_run
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import (
    DIGEST_HEADER,
    PROTOCOL_HEADER,
    TARGET_HEADER,
    UPGRADE,
    error_body,
    error_status,
    target_of,
)
from lightning_spot.service.connections import MOST_CONNECTIONS, Connections
from lightning_spot.service.fields import (
    LONGEST_WAIT_S,
    MANIFEST_BODY_BYTES,
    MOST_ATTEMPTS,
    MOST_BYTES,
    compression,
    identifier,
    integer,
    json_body,
    only_same_host,
    same_host,
    seconds,
    text,
    texts,
)
from lightning_spot.service.files import Files
from lightning_spot.service.hosts import HostRequests
from lightning_spot.service.part_receiver import receive_parts
from lightning_spot.service.readiness import not_ready
from lightning_spot.service.shares import ShareRequests, base_info, leased, shared_body, shared_of
from lightning_spot.service.waiting import Waiting

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_STREAMS = 256
"""Streams of parts at once, shared by the uploads; each has one in any case."""

_MOST_STREAMS_OF_AN_UPLOAD = 16
_MOST_KEPT = 10**6
_MOST_NODES = 64
_MOST_PID = 2**31
_OPEN_TO_ALL = ("/healthz", "/readyz")


class Service:
    """HTTP handlers over a node.

    Args:
        node: what is served.
        token: secret every request must carry as ``Authorization: Bearer …``; ``None`` asks for none.

    Attributes:
        last_request_s: when the last request came (monotonic).
        committed_s: when a snapshot was committed last (monotonic), 0 for never.
    """

    def __init__(self, node: Node, token: str | None) -> None:
        self.node = node
        self.last_request_s = time.monotonic()
        self.committed_s = 0.0
        self._token = token
        self._waiting: Waiting | None = None
        self._streams: Counter[str] = Counter()  # of each upload
        self._stream_threads = ThreadPoolExecutor(MOST_CONNECTIONS, thread_name_prefix="spot-stream")
        self._connections: Connections | None = None

    def application(self) -> web.Application:
        """The aiohttp application."""
        files = Files(self.node, self._wait_for_slot)
        shares = ShareRequests(self.node, self._wait_to_join)
        hosts = HostRequests(self.node, self._wait_for_slot, self._wait_to_join, self._wait_for_hosts)
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(_name_protocol)
        app.add_routes(
            [
                web.get("/healthz", self._healthy),
                web.get("/readyz", self._ready),
                web.get("/v1/status", self._status),
                web.get("/v1/runs", self._runs),
                web.post("/v1/runs/{run}/open", self._open),
                web.post("/v1/runs/{run}/close", self._close),
                web.post("/v1/runs/{run}/settle", self._settle),
                web.get("/v1/runs/{run}/snapshots", self._snapshots),
                web.get("/v1/runs/{run}/files", files.listing),
                web.post("/v1/runs/{run}/uploads", self._lease),
                web.post("/v1/runs/{run}/shares", shares.join),
                web.post("/v1/runs/{run}/decline", shares.decline),
                web.post("/v1/uploads/{upload}/placed", shares.placed),
                *hosts.routes(),
                web.post("/v1/uploads/{upload}/stream", self._stream),
                web.post("/v1/uploads/{upload}/commit", self._commit),
                web.post("/v1/uploads/{upload}/seal", self._seal),
                web.delete("/v1/uploads/{upload}", self._abort),
                web.post("/v1/check", self._check),
                web.post("/v1/flush", self._flush),
                web.get("/v1/files/{run}/{path:.+}", files.read),
                web.put("/v1/files/{run}/{path:.+}", files.write),
                web.delete("/v1/files/{run}/{path:.+}", files.remove),
            ]
        )
        return app

    def connections(self, make_handler: Callable[[], asyncio.Protocol]) -> Connections:
        """What makes the protocol of each connection, with its limits."""
        self._connections = Connections(make_handler)
        return self._connections

    def close(self) -> None:
        """Stop receiving parts. Call it once the uploads were given up."""
        self._stream_threads.shutdown(wait=False, cancel_futures=True)

    @property
    def last_upload_s(self) -> float:
        """When a trainer asked for a slot, or committed a snapshot, last (monotonic), 0 for never."""
        return max(self.committed_s, self._waiting.asked_s if self._waiting is not None else 0.0)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        accepted = self._connections.of(request.transport) if self._connections is not None else None
        if accepted is not None:
            accepted.begin_request()
        try:
            if request.path not in _OPEN_TO_ALL:
                self.last_request_s = time.monotonic()
                self._check_token(request)
                _check_protocol(request)
                _check_target(request)
            response = await handler(request)
        except SpotError as error:
            status = error.status if isinstance(error, NodeRefused) and error.status else error_status(error)
            response = web.json_response(error_body(error), status=status)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            body = error_body(SettingsError(f"malformed request: {type(error).__name__}: {error}"))
            response = web.json_response(body, status=400)
        finally:
            if accepted is not None:
                accepted.end_request()
        if isinstance(response, web.Response) and isinstance(response.body, bytes) and not response.prepared:
            response.headers[DIGEST_HEADER] = checksum(response.body)
        return response

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        given = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            raise NodeRefused(
                "this node asks for a token: set LIGHTNING_SPOT_TOKEN (or LIGHTNING_SPOT_TOKEN_FILE) to the one it"
                " was started with",
                status=401,
            )

    # -- the node -------------------------------------------------------------------------------------------------

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        reasons = await asyncio.to_thread(not_ready, self.node)
        return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response({"protocol": PROTOCOL_VERSION, **await asyncio.to_thread(self.node.status)})

    async def _check(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        await asyncio.to_thread(self.node.check_flush_to, texts(body, "via", _MOST_NODES))
        return web.json_response({})

    async def _flush(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        run = text(body, "run") if body.get("run") is not None else None
        left = await asyncio.to_thread(self.node.flush, run, seconds(body, "wait_s", 60.0, LONGEST_WAIT_S))
        return web.json_response({"unreached": left})

    # -- runs -----------------------------------------------------------------------------------------------------

    async def _runs(self, _request: web.Request) -> web.Response:
        return web.json_response({"runs": await asyncio.to_thread(self.node.listed)})

    async def _open(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        name, identity = parse_run(request.match_info["run"])
        near = same_host(request)
        info = RunInfo(
            name=name,
            id=identity,
            location=text(body, "location"),
            attempt=integer(body, "attempt", 0, 0, MOST_ATTEMPTS),
            token=text(body, "token"),
            keep=integer(body, "keep", 2, 0, _MOST_KEPT),
            durable_url=text(body, "durable_url") if body.get("durable_url") is not None else None,
            durable_every_s=seconds(body, "durable_every_s", 0.0, 365 * 86400.0),
            compression=compression(body),
            nodes=texts(body, "nodes", _MOST_NODES) if near else (),
            replicas=integer(body, "replicas", 1, 1, _MOST_NODES) if near else 1,
            carry=body.get("carry", True) is not False,
            session=text(body, "session") if near else "",
            pid=integer(body, "pid", 0, 0, _MOST_PID),
            host=text(body, "host"),
        )
        return web.json_response(asdict(await asyncio.to_thread(self.node.open_run, info)))

    async def _close(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        self.node.close_run(request.match_info["run"], complete=body.get("complete") is True)
        return web.json_response({})

    async def _settle(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        attempt = integer(body, "attempt", None, 0, MOST_ATTEMPTS)
        name, lineage = text(body, "name"), text(body, "lineage")
        await asyncio.to_thread(self.node.settle, request.match_info["run"], attempt, name, lineage)
        return web.json_response({})

    async def _snapshots(self, request: web.Request) -> web.Response:
        key = self.node.key(request.match_info["run"])
        listed = [
            {"manifest": json.loads(slot.manifest.to_json()), "dirty": slot.dirty, "safe": slot.safe}
            for slot in self.node.ring.committed(key)
            if slot.manifest is not None
        ]
        refused = [json.loads(manifest.to_json()) for manifest in self.node.flusher.refused(key)]
        claimed = await asyncio.to_thread(self.node.claimed, request.match_info["run"])
        return web.json_response({"attempt": claimed, "snapshots": listed, "refused": refused})

    # -- uploads --------------------------------------------------------------------------------------------------

    async def _lease(self, request: web.Request) -> web.Response:
        near = same_host(request)
        body = await shared_body(request) if near else await json_body(request)
        upload = await self._wait_for_slot(
            request,
            request.match_info["run"],
            integer(body, "attempt", None, 0, MOST_ATTEMPTS),
            integer(body, "nbytes", None, 0, MOST_BYTES),
            seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
            session=text(body, "session") if near else "",
            name=text(body, "name"),
            manifest=Manifest.from_dict(body["manifest"]) if body.get("manifest") is not None else None,
            upload_id=identifier(body, "upload"),
            shared=shared_of(body) if near else None,
            layout_id=identifier(body, "layout_id"),
            spare=near and body.get("spare") is True,
        )
        return web.json_response({**leased(self.node, upload), "base": base_info(upload)})

    async def _wait_for_slot(
        self, request: web.Request, run: str, attempt: int, nbytes: int, wait_s: float, **more: Any
    ) -> Upload:
        return await self._queue().lease(self._gone(request), run, attempt, nbytes, wait_s, **more)

    async def _wait_to_join(self, request: web.Request, *what: Any, **more: Any) -> Upload | None:
        return await self._queue().join(self._gone(request), *what, **more)

    async def _wait_for_hosts(self, request: web.Request, upload: Upload) -> None:
        await self._queue().all_there(self._gone(request), upload)

    def _gone(self, request: web.Request) -> asyncio.Future[None]:
        """Done once whoever asks has hung up."""
        accepted = self._connections.of(request.transport) if self._connections is not None else None
        return accepted.gone if accepted is not None else asyncio.get_running_loop().create_future()

    def _queue(self) -> Waiting:
        if self._waiting is None:
            self._waiting = Waiting(self.node)
        return self._waiting

    async def _stream(self, request: web.Request) -> web.Response:
        """Hand the connection over to a thread that receives straight into the slot."""
        upload = self.node.find_upload(request.match_info["upload"])
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if request.headers.get(hdrs.UPGRADE) != UPGRADE or transport is None or sock is None:
            raise NodeRefused(f"a stream needs 'Upgrade: {UPGRADE}'", status=426)
        self._check_streams(upload)
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        loop = asyncio.get_running_loop()
        self._streams[upload.id] += 1
        try:
            with sock.dup() as connection, self.node.streaming(upload, connection):
                await loop.run_in_executor(self._stream_threads, receive_parts, connection, self.node, upload)
        except (OSError, SpotError) as error:
            logger.debug("a stream of parts ended: %s", error)
        finally:
            self._streams -= Counter([upload.id])  # which forgets an upload that has none
            transport.close()  # the connection no longer speaks HTTP
        return web.Response()

    def _check_streams(self, upload: Upload) -> None:
        """Refuse a stream beyond an upload's part of them; the first one of an upload never."""
        mine, uploads = self._streams[upload.id], len(self._streams | Counter([upload.id]))
        hosts = upload.joint.shared.shares if upload.joint is not None else 1
        most = min(_MOST_STREAMS_OF_AN_UPLOAD * hosts, max(hosts, MOST_STREAMS // uploads))
        if mine and (mine >= most or self._streams.total() >= MOST_STREAMS):
            raise TooManyStreams("this upload has its part of the streams that this node serves at once")

    async def _commit(self, request: web.Request) -> web.Response:
        self.committed_s = time.monotonic()
        body = await json_body(request, MANIFEST_BODY_BYTES)
        manifest = await asyncio.to_thread(Manifest.from_dict, body.get("manifest"))
        done = await asyncio.to_thread(self.node.commit, request.match_info["upload"], manifest)
        return web.json_response({"checksums": list(done.checksums)})

    async def _seal(self, request: web.Request) -> web.Response:
        only_same_host(request)
        body = await json_body(request, MANIFEST_BODY_BYTES)
        manifest = Manifest.from_dict(body.get("manifest"))
        floats = read_floats(body.get("floats", []), manifest.nbytes)
        destinations = list(texts(body, "destinations", _MOST_NODES)) if body.get("destinations") is not None else None
        written = read_ranges(body.get("written"), manifest.nbytes)
        upload = request.match_info["upload"]
        done = await asyncio.to_thread(self.node.seal, upload, manifest, destinations, floats, written)
        short = self.node.ring.is_short(key_of(done), done.nbytes)
        return web.json_response({"checksums": list(done.checksums), "short": short})

    async def _abort(self, request: web.Request) -> web.Response:
        self.node.abort(request.match_info["upload"])
        return web.json_response({})


async def _name_protocol(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)


def _check_protocol(request: web.Request) -> None:
    spoken = request.headers.get(PROTOCOL_HEADER)
    if spoken is not None and spoken != str(PROTOCOL_VERSION):
        raise ProtocolMismatch(
            f"this node speaks protocol {PROTOCOL_VERSION}, the client {spoken[:16]}: install the same version of"
            " lightning_spot on both hosts"
        )


def _check_target(request: web.Request) -> None:
    target = target_of(request.method, request.path)
    if request.headers.get(TARGET_HEADER, target) != target:
        raise NodeRefused("the request was damaged on its way", status=400)
