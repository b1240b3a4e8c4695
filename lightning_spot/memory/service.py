"""The node's HTTP service on aiohttp, over TCP and over a Unix socket. Thin: everything happens in :class:`Node`.

=========  ==================================  =================================================================
method     path                                what
=========  ==================================  =================================================================
GET        /v1/status                          slots, runs, tiers
GET        /v1/runs                            the runs it knows, with name, id, location and attempt
POST       /v1/runs/RUN/open                   begin an attempt
POST       /v1/runs/RUN/close                  the trainer leaves
GET        /v1/runs/RUN/claimed                the attempt that holds the run
GET        /v1/runs/RUN/snapshots              committed snapshots and files, newest first
POST       /v1/runs/RUN/uploads                take a slot
PUT        /v1/uploads/ID/parts/OFFSET         fill a part of it; answers with its xxh3-128
POST       /v1/uploads/ID/stream               the same for many parts, fast: see :mod:`lightning_spot.memory.stream`
POST       /v1/uploads/ID/commit               make it a snapshot
POST       /v1/uploads/ID/seal                 the same for a slot filled through shared memory (this host only)
DELETE     /v1/uploads/ID                      give it up
POST       /v1/flush                           bring everything to the tiers below
GET, HEAD  /v1/files/RUN/PATH                  read (ranges too); ``last.ckpt`` is the newest snapshot
PUT        /v1/files/RUN/PATH                  write a file
DELETE     /v1/files/RUN/PATH                  remove a snapshot or file
=========  ==================================  =================================================================
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import xxhash
from aiohttp import hdrs, web

from lightning_spot.config import PART_BYTES, PROTOCOL_VERSION, SEND_BYTES
from lightning_spot.errors import (
    CorruptSnapshot,
    NodeRefused,
    ProtocolMismatch,
    SettingsError,
    SnapshotNotFound,
    SpotError,
)
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.node import Node
from lightning_spot.memory.paths import resolve
from lightning_spot.memory.ring import Slot
from lightning_spot.memory.runs import RunInfo, parse_run
from lightning_spot.memory.stream import UPGRADE, receive_parts
from lightning_spot.memory.uploads import Upload
from lightning_spot.memory.wire import PROTOCOL_HEADER, error_body, error_status

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LONGEST_WAIT_S = 3600.0


class Service:
    """HTTP handlers over a node.

    Args:
        node: what is served.
        token: secret every request must carry as ``Authorization: Bearer …``; ``None`` asks for none.
    """

    def __init__(self, node: Node, token: str | None) -> None:
        self.node = node
        self.last_request_s = time.monotonic()
        self._token = token

    def application(self) -> web.Application:
        """The aiohttp application."""
        # 0 = no limit on a body: parts are bounded by the slot they go to.
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.on_response_prepare.append(_name_protocol)
        app.add_routes(
            [
                web.get("/v1/status", self._status),
                web.get("/v1/runs", self._runs),
                web.post("/v1/runs/{run}/open", self._open),
                web.post("/v1/runs/{run}/close", self._close),
                web.get("/v1/runs/{run}/claimed", self._claimed),
                web.get("/v1/runs/{run}/snapshots", self._snapshots),
                web.post("/v1/runs/{run}/uploads", self._lease),
                web.put("/v1/uploads/{upload}/parts/{offset:\\d+}", self._part),
                web.post("/v1/uploads/{upload}/stream", self._stream),
                web.post("/v1/uploads/{upload}/commit", self._commit),
                web.post("/v1/uploads/{upload}/seal", self._seal),
                web.delete("/v1/uploads/{upload}", self._abort),
                web.post("/v1/flush", self._flush),
                web.get("/v1/files/{run}/{path:.+}", self._read),
                web.put("/v1/files/{run}/{path:.+}", self._write),
                web.delete("/v1/files/{run}/{path:.+}", self._remove),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.last_request_s = time.monotonic()
        try:
            self._check_token(request)
            spoken = request.headers.get(PROTOCOL_HEADER)
            if spoken is not None and spoken != str(PROTOCOL_VERSION):
                raise ProtocolMismatch(
                    f"this node speaks protocol {PROTOCOL_VERSION}, the client {spoken}: install the same version of"
                    " lightning_spot on both hosts"
                )
            response = await handler(request)
        except SpotError as error:
            status = error.status if isinstance(error, NodeRefused) and error.status else error_status(error)
            response = web.json_response(error_body(error), status=status)
        except (ValueError, KeyError, TypeError) as error:
            body = error_body(SettingsError(f"malformed request: {type(error).__name__}: {error}"))
            response = web.json_response(body, status=400)
        return response

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        given = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise NodeRefused(
                "this node asks for a token: set LIGHTNING_SPOT_TOKEN (or LIGHTNING_SPOT_TOKEN_FILE) to the one it"
                " was started with",
                status=401,
            )

    # -- runs -----------------------------------------------------------------------------------------------------

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response({"protocol": PROTOCOL_VERSION, **await asyncio.to_thread(self.node.status)})

    async def _runs(self, _request: web.Request) -> web.Response:
        return web.json_response({"runs": await asyncio.to_thread(self.node.listed)})

    async def _open(self, request: web.Request) -> web.Response:
        body = await _json(request)
        name, identity = parse_run(request.match_info["run"])
        same_host = _same_host(request)
        durable_url = body.get("durable_url")
        info = RunInfo(
            name=name,
            id=identity,
            location=str(body.get("location", "")),
            attempt=int(body.get("attempt", 0)),
            token=str(body.get("token", "")),
            keep=int(body.get("keep", 2)),
            durable_url=str(durable_url) if durable_url is not None else None,
            durable_every_s=float(body.get("durable_every_s", 0.0)),
            nodes=tuple(str(url) for url in body.get("nodes", ())) if same_host else (),
            session=str(body.get("session", "")) if same_host else "",
            pid=int(body.get("pid", 0)),
            host=str(body.get("host", "")),
        )
        return web.json_response(asdict(await asyncio.to_thread(self.node.open_run, info)))

    async def _close(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self.node.close_run(request.match_info["run"], complete=bool(body.get("complete")))
        return web.json_response({})

    async def _claimed(self, request: web.Request) -> web.Response:
        claimed = await asyncio.to_thread(self.node.claimed, request.match_info["run"])
        return web.json_response({"attempt": claimed})

    async def _snapshots(self, request: web.Request) -> web.Response:
        listed = [
            {"manifest": json.loads(slot.manifest.to_json()), "dirty": slot.dirty, "safe": slot.safe}
            for slot in self.node.ring.committed(self.node.key(request.match_info["run"]))
            if slot.manifest is not None
        ]
        return web.json_response({"snapshots": listed})

    async def _flush(self, request: web.Request) -> web.Response:
        body = await _json(request)
        wait_s = min(float(body.get("wait_s", 60.0)), LONGEST_WAIT_S)
        left = await asyncio.to_thread(self.node.flush, body.get("run"), wait_s)
        return web.json_response({"unreached": left})

    # -- uploads --------------------------------------------------------------------------------------------------

    async def _lease(self, request: web.Request) -> web.Response:
        body = await _json(request)
        upload = await asyncio.to_thread(
            self.node.lease,
            request.match_info["run"],
            int(body["attempt"]),
            int(body["nbytes"]),
            wait_s=min(float(body.get("wait_s", 0.0)), LONGEST_WAIT_S),
            session=str(body.get("session", "")) if _same_host(request) else "",
        )
        slot = upload.slot
        return web.json_response(
            {
                "upload": upload.id,
                "slot": slot.index,
                "generation": slot.generation,
                "capacity": slot.capacity,
                "backing": slot.memory.backing if slot.memory else "",
            }
        )

    async def _part(self, request: web.Request) -> web.Response:
        upload = self.node.find_upload(request.match_info["upload"])
        digest = await self._receive(request, upload, int(request.match_info["offset"]))
        return web.json_response({"xxh3_128": digest})

    async def _stream(self, request: web.Request) -> web.Response:
        """Hand the connection over to a thread that receives straight into the slot."""
        upload = self.node.find_upload(request.match_info["upload"])
        transport = request.transport
        sock = transport.get_extra_info("socket") if transport is not None else None
        if request.headers.get(hdrs.UPGRADE) != UPGRADE or transport is None or sock is None:
            raise NodeRefused(f"a stream needs 'Upgrade: {UPGRADE}'", status=426)
        transport.pause_reading()
        with sock.dup() as connection:
            try:
                with self.node.streaming(upload, connection):
                    await asyncio.to_thread(receive_parts, connection, self.node, upload)
            except (OSError, SpotError) as error:
                logger.debug("a stream of parts ended: %s", error)
        transport.close()  # the connection no longer speaks HTTP
        return web.Response()

    async def _receive(self, request: web.Request, upload: Upload, start: int) -> str:
        """Take a body straight into the slot, checksumming on the way."""
        nbytes = request.content_length
        if nbytes is None or start + nbytes > upload.nbytes:
            raise SettingsError("a part needs a Content-Length and must lie within the snapshot's size")
        digest, place = xxhash.xxh3_128(), start
        with upload.slot.view(upload.nbytes) as view:
            async for chunk in request.content.iter_any():
                if self.node.uploads.get(upload.id) is not upload:
                    raise SnapshotNotFound("this upload was given up; begin again")
                view[place : place + len(chunk)] = chunk
                digest.update(chunk)
                place += len(chunk)
        if place != start + nbytes:
            raise CorruptSnapshot(f"the connection broke after {place - start} of {nbytes} bytes")
        upload.touched_s = time.monotonic()
        upload.received[start] = (nbytes, digest.hexdigest())
        return digest.hexdigest()

    async def _commit(self, request: web.Request) -> web.Response:
        manifest = Manifest.from_dict((await _json(request))["manifest"])
        done = await asyncio.to_thread(self.node.commit, request.match_info["upload"], manifest)
        return web.json_response({"checksums": list(done.checksums)})

    async def _seal(self, request: web.Request) -> web.Response:
        self._only_same_host(request)
        body = await _json(request)
        manifest = Manifest.from_dict(body["manifest"])
        upload = request.match_info["upload"]
        done = await asyncio.to_thread(self.node.seal, upload, manifest, body.get("destinations"))
        return web.json_response({"checksums": list(done.checksums)})

    async def _abort(self, request: web.Request) -> web.Response:
        self.node.abort(request.match_info["upload"])
        return web.json_response({})

    # -- files ----------------------------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> web.StreamResponse:
        slot, manifest = resolve(self.node.ring, self.node.key(request.match_info["run"]), request.match_info["path"])
        if request.match_info["path"].endswith("manifest.json"):
            return web.Response(text=manifest.to_json(), content_type="application/json")
        start, stop, status = _range(request, manifest.nbytes)
        response = web.StreamResponse(status=status)
        response.content_length = stop - start
        response.content_type = "application/octet-stream"
        response.last_modified = manifest.created_unix_s
        response.headers["Accept-Ranges"] = "bytes"
        response.headers["Spot-Snapshot"] = manifest.name
        if status == 206:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{manifest.nbytes}"
        with self.node.ring.reading(slot, manifest) as image:
            await response.prepare(request)
            if request.method != "HEAD":
                await self._send(request, response, slot, image, start, stop)
            await response.write_eof()
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, slot: Slot, image: memoryview, start: int, stop: int
    ) -> None:
        """Send bytes of a slot: by ``sendfile``, which copies nothing, or in pieces where the transport cannot."""
        transport, memory = request.transport, slot.memory
        if stop - start > SEND_BYTES and transport is not None and memory is not None:
            with open(memory.fd, "rb", buffering=0, closefd=False) as file:
                try:
                    await asyncio.get_running_loop().sendfile(transport, file, start, stop - start, fallback=False)
                except (NotImplementedError, asyncio.SendfileNotAvailableError):
                    logger.debug("this transport has no sendfile")
                else:
                    return
        for place in range(start, stop, SEND_BYTES):
            # A copy: the transport may keep what it could not send at once, the slot may not be kept.
            await response.write(bytes(image[place : min(place + SEND_BYTES, stop)]))

    async def _write(self, request: web.Request) -> web.Response:
        run, name = request.match_info["run"], request.match_info["path"]
        nbytes = request.content_length
        if nbytes is None:
            raise SettingsError("a file needs a Content-Length")
        try:
            info = self.node.find_run(run).info
        except SnapshotNotFound:
            run_name, identity = parse_run(run)
            info = RunInfo(name=run_name, id=identity, location="", attempt=0, token="")
            info = replace(info, attempt=(await asyncio.to_thread(self.node.open_run, info)).attempt)
        attempt = info.attempt
        upload = await asyncio.to_thread(self.node.lease, run, attempt, nbytes, wait_s=60.0)
        try:
            await self._receive(request, upload, 0)
            manifest = Manifest(
                run=info.name,
                run_id=info.id,
                name=name,
                file="",
                step=0,
                attempt=attempt,
                nbytes=nbytes,
                created_unix_s=time.time(),
            )
            manifest._check()
            await asyncio.to_thread(self._seal_received, upload, manifest)
        except BaseException:
            self.node.abort(upload.id)
            raise
        return web.json_response({}, status=201)

    def _seal_received(self, upload: Upload, manifest: Manifest) -> None:
        """Commit a file that came in one body: checksum its parts here, but leave its bytes as they came."""
        with upload.slot.view(upload.nbytes) as view:
            sealed = manifest.sealed(view)
        upload.received = {
            index * PART_BYTES: (min(PART_BYTES, upload.nbytes - index * PART_BYTES), digest)
            for index, digest in enumerate(sealed.checksums)
        }
        self.node.commit(upload.id, sealed)

    async def _remove(self, request: web.Request) -> web.Response:
        run = request.match_info["run"]
        _slot, manifest = resolve(self.node.ring, self.node.key(run), request.match_info["path"])
        await asyncio.to_thread(self.node.remove, run, manifest.name)
        return web.json_response({})

    def _only_same_host(self, request: web.Request) -> None:
        if not _same_host(request):
            raise NodeRefused("this request is for trainers on the node's own host (Unix socket)", status=403)


async def _name_protocol(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)


async def _json(request: web.Request) -> dict[str, Any]:
    body = await request.read()
    fields = json.loads(body or b"{}")
    if not isinstance(fields, dict):
        raise SettingsError("the request's body must be a JSON object")
    return fields


def _same_host(request: web.Request) -> bool:
    transport = request.transport
    sock = transport.get_extra_info("socket") if transport is not None else None
    return sock is not None and sock.family == socket.AF_UNIX


def _range(request: web.Request, nbytes: int) -> tuple[int, int, int]:
    """``(start, stop, status)`` of the bytes asked for; one range, as in RFC 9110 §14."""
    header = request.headers.get(hdrs.RANGE)
    if header is None:
        return 0, nbytes, 200
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if match is None or match.groups() == ("", ""):
        raise SettingsError(f"range {header!r} is not understood; one range of bytes, please")
    first, last = match.groups()
    if not first:
        return max(0, nbytes - int(last)), nbytes, 206
    stop = min(nbytes, int(last) + 1) if last else nbytes
    if int(first) >= stop:
        raise NodeRefused(f"range {header!r} lies outside the file of {nbytes} bytes", status=416)
    return int(first), stop, 206
