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
GET        /v1/runs/RUN/files                  every file of the run that is in memory
POST       /v1/runs/RUN/uploads                take a slot
POST       /v1/runs/RUN/shares                 take a share of one that several ranks fill (this host only)
POST       /v1/runs/RUN/decline                there will be no such snapshot to share (this host only)
POST       /v1/uploads/ID/share                for which snapshot it was taken, if ranks fill it (this host only)
POST       /v1/uploads/ID/placed               the bytes of a share are in place (this host only)
POST       /v1/…/joint…                        one that several hosts bring together: see :mod:`.hosts`
*          /v1/…/portions…                     what several nodes hold together: see :mod:`.hosts`
POST       /v1/uploads/ID/stream               fill it, over a connection of its own: see ``protocol/wire.py``
POST       /v1/uploads/ID/commit               make it a snapshot
POST       /v1/uploads/ID/seal                 the same for a slot filled through shared memory (this host only)
DELETE     /v1/uploads/ID                      give it up
POST       /v1/flush                           bring everything to the tiers below
GET, HEAD  /v1/files/RUN/PATH                  read what is in memory (ranges too); ``last.ckpt`` is the newest snapshot
DELETE     /v1/files/RUN/PATH                  remove a snapshot or file
=========  ==================================  =================================================================

``RUN`` is ``NAME@ID``, or ``NAME`` where only one run has it. What comes by TCP and changes a run, but for ``open``,
shows the token of the run's attempt in the header ``Spot-Attempt`` (:meth:`Registry.check_attempt`).
Every number and text of a request is checked before anything is done with it (``fields``); connections that say nothing
are bounded (``connections``).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.errors import ServerRefusedError, SettingsError, SpotError, TierReason
from lightning_spot.image.parts import checksum
from lightning_spot.memory.node import Node
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.counted_log import CountedLog
from lightning_spot.protocol.listening import open_files
from lightning_spot.protocol.wire import (
    ATTEMPT_HEADER,
    DIGEST_HEADER,
    ERROR_HEADER,
    PROTOCOL_HEADER,
    TARGET_HEADER,
    error_body,
    error_status,
    read_attempt,
    target_of,
)
from lightning_spot.service.connections import (
    HEAD_TIMEOUT_S,
    LONGEST_FIELD_BYTES,
    MOST_CONNECTIONS,
    MOST_HEADERS,
    SERVER_IDLE_TIMEOUT_S,
    THIS_HOST,
    Connections,
    request_logger,
)
from lightning_spot.service.fields import BODIES, BODIES_BYTES, LONGEST_WAIT_S, STILL_MAY, json_body, same_host, seconds
from lightning_spot.service.files import Files
from lightning_spot.service.hosts import HostRequests, PortionRequests
from lightning_spot.service.quotas import Handler, Quota, Turns, client_of
from lightning_spot.service.runs import OPEN_PATH, RunRequests
from lightning_spot.service.settings import is_loopback
from lightning_spot.service.shares import ShareRequests
from lightning_spot.service.uploads import UploadRequests
from lightning_spot.service.waiting import Waiting
from lightning_spot.untrusted import text

logger = logging.getLogger(__name__)


def not_ready(node: Node) -> list[str]:
    """Why a run would not be well at a node now, in words that tell a stranger nothing; empty if it would."""
    reasons = ["shutting down"] if node.draining or node.closing else []
    if node.ring.full:
        slots, most = node.ring.files
        enough = slots < most
        reasons.append("memory is full" if enough else f"{slots} of {most} slots are in use, as open files allow")
    if any(health.error for health in list(node.flusher.health.values())) or node.uploads.abroad.bringing.failing():
        reasons.append("a tier below is failing")
    return reasons


_OPEN_TO_ALL = ("/healthz", "/readyz")
_READING = (hdrs.METH_GET, hdrs.METH_HEAD)
_READ_BUFFER_BYTES = 256 * 1024
_FLUSH_TURN_S = 5.0
_FLUSHES = 64  # that are waited for, on threads of their own: each may take an hour
_LOOKS = 16  # of a client's requests that ask a tier at once: threads are left for what others ask


class Service:
    """HTTP handlers over a node.

    Args:
        node: what is served.
        token: secret every request must carry as ``Authorization: Bearer …``; ``None`` asks for none, but for our
            header of every request that comes by TCP.

    Attributes:
        last_request_s: when the last request came (monotonic).
        counted: what strangers do.
    """

    def __init__(self, node: Node, token: str | None) -> None:
        self.node = node
        self.last_request_s = time.monotonic()
        self.counted = CountedLog(logger)
        self._token = token
        self._waiting: Waiting | None = None
        self._uploads = UploadRequests(node, self._wait_for_slot)
        self._connections: Connections | None = None
        self._flushing, self._flush_threads = Quota(_FLUSHES), ThreadPoolExecutor(_FLUSHES, "spot-flush")

    def application(self) -> web.Application:
        """The aiohttp application."""
        files, shares = Files(self.node), ShareRequests(self.node, self._wait_to_join)
        in_turn = Turns(_LOOKS).handler
        hosts = HostRequests(self.node, self._wait_for_slot, self._wait_to_join, self._wait_for_hosts, self._gone)
        app = web.Application(middlewares=[self._guard])
        app[BODIES] = Quota(BODIES_BYTES)
        app.on_response_prepare.append(_name_protocol)
        app.add_routes(
            [
                web.get("/healthz", self._healthy),
                web.get("/readyz", self._ready),
                web.get("/v1/status", self._status),
                *RunRequests(self.node).routes(),
                *self._uploads.routes(),
                web.get("/v1/runs/{run}/files", files.listing),
                web.post("/v1/runs/{run}/shares", shares.join),
                web.post("/v1/runs/{run}/decline", shares.decline),
                web.post("/v1/uploads/{upload}/share", shares.say),
                web.post("/v1/uploads/{upload}/placed", shares.placed),
                *hosts.routes(),
                *PortionRequests(self.node).routes(),
                web.post("/v1/flush", self._flush),
                web.get("/v1/files/{run}/{path:.+}", files.read),
                web.delete("/v1/files/{run}/{path:.+}", in_turn(files.remove)),
            ]
        )
        return app

    def connections(self, make_handler: Callable[[], asyncio.Protocol]) -> Connections:
        """What makes the protocol of each connection, with its limits."""
        self._connections = Connections(make_handler, most=min(MOST_CONNECTIONS, open_files() // 4))
        return self._connections

    def runner(self, shutdown_timeout_s: float = 60.0) -> web.AppRunner:
        """What runs the application, with bounds on what a connection may cost before its token is looked at."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            logger=request_logger(self.counted),
            shutdown_timeout=shutdown_timeout_s,
            read_bufsize=_READ_BUFFER_BYTES,
            auto_decompress=False,
            max_line_size=LONGEST_FIELD_BYTES,
            max_field_size=LONGEST_FIELD_BYTES,
            max_headers=MOST_HEADERS,
            lingering_time=HEAD_TIMEOUT_S,
            keepalive_timeout=SERVER_IDLE_TIMEOUT_S,
        )

    def close(self) -> None:
        """Stop receiving parts. Call it once the uploads were given up."""
        self._uploads.close()
        self.counted.write()
        self._flush_threads.shutdown(wait=False, cancel_futures=True)

    @property
    def last_upload_s(self) -> float:
        """When a trainer asked for a slot, or committed a snapshot, last (monotonic), 0 for never."""
        return max(self._uploads.committed_s, self._waiting.asked_s if self._waiting is not None else 0.0)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        accepted = self._connections.of(request.transport) if self._connections is not None else None
        if accepted is not None:
            accepted.begin_request()
        try:
            if request.path != "/healthz":
                self._check_not_of_a_page(request)
            if request.path not in _OPEN_TO_ALL:
                self.last_request_s = time.monotonic()
                self._check_token(request)
                _check_protocol(request)
                _check_target(request)
                self._check_attempt(request)
            response = await handler(request)
        except SpotError as error:
            if isinstance(error, ServerRefusedError) and error.is_for_the_token:
                self.counted.add("requests without this node's token", request.remote or THIS_HOST)
            status = error.status if isinstance(error, ServerRefusedError) and error.status else error_status(error)
            response = web.json_response(error_body(error), status=status)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            body = error_body(SettingsError(f"malformed request: {type(error).__name__}: {error}"))
            response = web.json_response(body, status=400)
        except ConnectionResetError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            response = web.Response(status=400)  # who asked has gone, and hears no answer: no error of this node's
        except web.HTTPException:
            raise  # an answer of aiohttp's, as of a path that is none
        except Exception as error:  # such as want of memory: who asks may ask again, or do without
            if request.path in _OPEN_TO_ALL:  # whoever asks, as often as he likes
                self.counted.add_error(f"failures of {request.path}", error)
            else:
                logger.exception("%s %s failed unexpectedly", request.method, request.path)
            failure = ServerRefusedError(
                f"the snapshot server failed ({type(error).__name__}: {error})", reason=TierReason.SERVER_FAILED
            )
            response = web.json_response(error_body(failure), status=error_status(failure))
        finally:
            if accepted is not None:
                accepted.end_request(is_whole=request.content.is_eof())
        if isinstance(response, web.Response) and isinstance(response.body, bytes) and not response.prepared:
            response.headers[DIGEST_HEADER] = checksum(response.body)
            if request.method == hdrs.METH_HEAD and response.status >= 400:
                response.headers[ERROR_HEADER] = response.body.decode()
        return response

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        given = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            wrong = "has another token than the one that came" if given else "asks for a token"
            raise ServerRefusedError(
                f"this node {wrong}: set LIGHTNING_SPOT_TOKEN (or LIGHTNING_SPOT_TOKEN_FILE) to the one it was started"
                " with",
                status=401,
            )

    def _check_attempt(self, request: web.Request) -> None:
        """Refuse to change a run for another attempt than its own; processes of this user's on this host may.

        Who opens a run is asked for the token there. The id of an upload, which is random, says as much. What is done
        then is done to the very run that was looked at, whatever its name means meanwhile; when a body has come, which
        may take its time, the attempt is asked for once more.

        Raises:
            SpotError: see :meth:`Registry.check_attempt`.
        """
        run, resource = request.match_info.get("run"), request.match_info.route.resource
        opens = resource is not None and resource.canonical == OPEN_PATH
        if run is None or opens or request.method in _READING or same_host(request):
            return
        key, shown = self.node.registry.key(run), read_attempt(request.headers.get(ATTEMPT_HEADER, ""))
        self.node.registry.check_attempt(key, *shown)
        request.match_info["run"] = key
        request[STILL_MAY] = functools.partial(self.node.registry.check_attempt, key, *shown)

    def _check_not_of_a_page(self, request: web.Request) -> None:
        """Refuse what a web page may have a browser of this host send, by its address or by a name of the page's own.

        A page cannot have our header sent without asking first, which is never answered. A token proves as much.

        Raises:
            ServerRefusedError: to one that sends the header.
            web.HTTPForbidden: the same as text, for people.
        """
        by_header = PROTOCOL_HEADER in request.headers
        if hdrs.ORIGIN in request.headers:
            why = "this node refuses requests of web pages. Nothing was done. Use a client that is no browser"
        elif self._token is not None or same_host(request):
            return
        elif not is_loopback(urlsplit(f"//{request.headers.get(hdrs.HOST, '')}").hostname or ""):
            why = (
                "this node has no token, and the request names another host than this one. Nothing was done. Use"
                " 127.0.0.1 or localhost, or set LIGHTNING_SPOT_TOKEN on both sides"
            )
        elif not by_header:
            why = (
                f"this node has no token: each request needs the header {PROTOCOL_HEADER}. Nothing was done. Add"
                f" -H '{PROTOCOL_HEADER}: {PROTOCOL_VERSION}' to curl, or set LIGHTNING_SPOT_TOKEN on both sides"
            )
        else:
            return
        raise ServerRefusedError(why, status=403) if by_header else web.HTTPForbidden(text=f"{why}.\n")

    # -- the node -------------------------------------------------------------------------------------------------

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        reasons = await asyncio.to_thread(not_ready, self.node)
        return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _status(self, _request: web.Request) -> web.Response:
        return web.json_response({"protocol": PROTOCOL_VERSION, **await asyncio.to_thread(self.node.status)})

    async def _flush(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        run = text(body, "run") if body.get("run") is not None else None
        wait_s = seconds(body, "wait_s", 60.0, LONGEST_WAIT_S)
        with self._flushing.holding(client_of(request)) as may:
            if not may:
                raise ServerRefusedError(
                    "this client has its share of the flushes that this node waits for", status=503
                )
            gone, loop = self._gone(request), asyncio.get_running_loop()
            deadline_s = loop.time() + wait_s
            while True:  # in turns: who has hung up meanwhile keeps no thread, and no place of the next one
                for_s = max(0.0, min(_FLUSH_TURN_S, deadline_s - loop.time()))
                left = await loop.run_in_executor(self._flush_threads, self.node.flush, run, for_s)
                if not left or gone.done() or loop.time() >= deadline_s:
                    return web.json_response({"unreached": left})

    # -- who waits ------------------------------------------------------------------------------------------------

    async def _wait_for_slot(
        self, request: web.Request, run: str, attempt: int, nbytes: int, wait_s: float, **more: Any
    ) -> Upload:
        client = self._waiter(request, run)
        return await self._queue().lease(client, self._gone(request), run, attempt, nbytes, wait_s, **more)

    async def _wait_to_join(self, request: web.Request, run: str, *what: Any, **more: Any) -> Upload | None:
        client = self._waiter(request, run)
        return await self._queue().join(client, self._gone(request), run, *what, **more)

    def _waiter(self, request: web.Request, run: str) -> str:
        """Who waits: an address for one run, by whatever name it calls that."""
        return f"{client_of(request)} {self.node.registry.key(run)}"

    async def _wait_for_hosts(self, upload: Upload) -> None:
        await self._queue().all_there(upload)

    def _gone(self, request: web.Request) -> asyncio.Future[None]:
        """Done once whoever asks has hung up."""
        accepted = self._connections.of(request.transport) if self._connections is not None else None
        return accepted.gone if accepted is not None else asyncio.get_running_loop().create_future()

    def _queue(self) -> Waiting:
        if self._waiting is None:
            self._waiting = Waiting(self.node)
        return self._waiting


async def _name_protocol(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)


def _check_protocol(request: web.Request) -> None:
    spoken = request.headers.get(PROTOCOL_HEADER)
    if spoken is not None and spoken != str(PROTOCOL_VERSION):
        raise ServerRefusedError(
            f"this node speaks protocol {PROTOCOL_VERSION}, the client {spoken[:16]}: install the same version of"
            " lightning_spot on both hosts",
            reason=TierReason.PROTOCOL,
        )


def _check_target(request: web.Request) -> None:
    target = target_of(request.method, request.path)
    if request.headers.get(TARGET_HEADER, target) != target:
        raise ServerRefusedError("the request was damaged on its way", status=400)
