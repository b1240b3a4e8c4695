"""The HTTP service on aiohttp, over TCP and over a Unix socket. Thin: everything happens in :class:`SnapshotServer`.

=========  ==================================  =================================================================
method     path                                what
=========  ==================================  =================================================================
GET        /healthz                            200 while the event loop turns; needs no token
GET        /readyz                             200 if a run would be well here, else 503 and why; needs no token
GET        /metrics                            the same for Prometheus, see ``metrics``
GET        /v1/status                          slots, runs, tiers
GET        /v1/runs                            the runs this server knows
POST       /v1/runs/RUN/open                   let an attempt write
POST       /v1/runs/RUN/close                  the trainer leaves
POST       /v1/runs/RUN/figures                what the trainer has measured (this host only)
GET        /v1/runs/RUN/snapshots              the attempt that writes, the newest snapshot that counts, what is in
                                                memory (shards as they are), what a tier has refused
POST       /v1/runs/RUN/awaited                wait until a snapshot counts, or never will (this host only)
POST       /v1/runs/RUN/uploads                take a slot
POST       /v1/runs/RUN/fail                   a writer will never have its shard of a snapshot
POST       /v1/uploads/ID/stream               fill it, over a connection of its own: see ``protocol/wire.py``
POST       /v1/uploads/ID/commit               make it a snapshot; on this host a slot filled through shared memory
DELETE     /v1/uploads/ID                      give it up
POST       /v1/sessions                        be connected as a trainer (this host only): see ``sessions``
POST       /v1/flush                           bring everything to the tiers below
POST       /v1/links                           make a link that a browser may open once
GET        /open/LINK                          open it: a cookie, for the next two and nothing else
GET        /                                   the status page
GET        /v1/page                            what it shows
GET        /v1/files/RUN/PATH                  read what is in memory (ranges too)
DELETE     /v1/files/RUN/PATH                  remove a snapshot or file
=========  ==================================  =================================================================

A scoped token covers requests of its runs only, and of those that name no run, ``metrics``, ``status``, ``runs`` and
``flush``.
``RUN`` is ``NAME@ID``, or ``NAME`` where only one run has it. What comes by TCP and changes a run, but for ``open``,
shows the token of the run's attempt in the header ``Spot-Attempt`` (:meth:`Registry.check_attempt`).
Every number and text of a request is checked before anything is done with it (``fields``); connections that say nothing
are bounded (``limits``).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from lightning_spot.client.remote import ONLY_NEAR
from lightning_spot.config import (
    PROTOCOL_VERSION,
    SEND_BYTES,
    is_loopback,
    take_environment,
    without_password,
)
from lightning_spot.errors import ServerRefusedError, SettingsError, SnapshotNotFoundError, SpotError, TierReason
from lightning_spot.http.fields import BODIES, BODIES_BYTES, BODY, committed, json_body, only_same_host
from lightning_spot.http.limits import (
    ACCEPTED,
    AT_ONCE,
    BACKLOG,
    THIS_HOST,
    Accepted,
    Connections,
    Handler,
    Quota,
)
from lightning_spot.http.metrics import CONTENT_TYPE, exposition, not_ready
from lightning_spot.http.page import HEADERS, Page
from lightning_spot.http.sessions import Sessions
from lightning_spot.http.upload_requests import COMMIT_PATH, FLUSH_PATH, UploadRequests
from lightning_spot.protocol.credentials import Rights, Scope, scope_of
from lightning_spot.protocol.wire import (
    ATTEMPT_HEADER,
    DIGEST_HEADER,
    LONGEST_DIGESTED_BYTES,
    PROTOCOL_HEADER,
    TARGET_HEADER,
    WANT_DIGEST_HEADER,
    error_body,
    error_status,
    etag_of,
    read_attempt,
    target_of,
)
from lightning_spot.say import say
from lightning_spot.server.ring import Ring
from lightning_spot.server.runs import Figures, RunInfo, parse_run
from lightning_spot.server.slots import Resident
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest
from lightning_spot.snapshot.parts import checksum
from lightning_spot.snapshot.shards import Image
from lightning_spot.store.fsspec_client import forget_sessions
from lightning_spot.untrusted import LARGE_JSON_BYTES, SMALL_JSON_BYTES, decoded, plain, text

SCOPE = web.RequestKey("scope", Scope)
"""What the token of a request holds for, if that is not everything."""

_OPEN_TO_ALL = ("/healthz", "/readyz")
_METRICS = "/metrics"
_SHOW_WHAT_IS_COVERED = (_METRICS, "/v1/status", "/v1/runs")  # by themselves, of what a scoped token covers

OPEN_PATH = "/v1/runs/{run}/open"

_LONGEST_OPENING_BYTES = 4 * 2**20  # with an environment, of which Linux allows about so much

SEND_TIMEOUT_S = 60.0
"""A client has so long to take each block of a file."""
LONGEST_READ_S = 3600.0
"""A reader keeps what it reads from making room for so long at most; one on a slow link reads ranges."""
_SENDFILE_BYTES = 16 * 1024 * 1024  # a reader that takes longer than the timeout for so much is hung up on
MOST_LOOKS = 32
"""Requests that ask storage at once, shared by their clients: threads are left for other requests."""

_NO_SESSION = Path(__file__).with_name("no_session.html").read_text()
_TOKEN_LINE = "export LIGHTNING_SPOT_TOKEN=...  # every request needs the token that this server was started with\n"


class Service:
    """HTTP handlers over a server.

    Args:
        server: what is served.
        secrets: tells those of which every request must carry one, or a token signed by one, as ``Authorization:
            Bearer …``; ``None`` asks for none, but for our header of every request that comes by TCP.
        only_metrics: whether nothing else is answered than ``/metrics`` and ``/healthz``.
        clock: gives seconds, for the sessions of browsers.

    Attributes:
        last_request_s: when the last request came (monotonic).
        uploads: handlers of requests that fill slots.
    """

    def __init__(
        self,
        server: SnapshotServer,
        secrets: Callable[[], tuple[str, ...]] | None,
        *,
        only_metrics: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server, self._only_metrics = server, only_metrics
        self.last_request_s = time.monotonic()
        self._secrets = secrets
        self.uploads, self._sessions = UploadRequests(server), Sessions(server)
        self._page = Page(server, clock)
        self._looking = Quota(MOST_LOOKS, "requests to storage")

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard])
        app[BODIES] = Quota(BODIES_BYTES, "requests")
        app.on_response_prepare.append(_name_protocol)
        app.add_routes([web.get("/healthz", self._healthy), web.get(_METRICS, self._metrics)])
        if self._only_metrics:
            return app
        app.add_routes(
            [
                web.get("/readyz", self._ready),
                web.get("/v1/status", self._status),
                web.get("/v1/runs", self._listing),
                web.post(OPEN_PATH, self._open),
                web.post("/v1/runs/{run}/close", self._close),
                web.post("/v1/runs/{run}/figures", self._figures),
                web.get("/v1/runs/{run}/snapshots", self._snapshots),
                web.get("/v1/files/{run}/{path:.+}", self._read, allow_head=False),
                web.delete("/v1/files/{run}/{path:.+}", self._remove),
                *self.uploads.routes(),
                *self._page.routes(),
                web.post("/v1/sessions", self._sessions.begin),
            ]
        )
        return app

    async def accept(
        self,
        listener: socket.socket,
        ends: AsyncExitStack,
        tls: Callable[[], ssl.SSLContext] | None = None,
        shutdown_timeout_s: float = 2.5,
    ) -> None:
        """Answer who connects to a socket, until ``ends``.

        Args:
            listener: the socket, which is bound.
            ends: with it, nobody is answered any more.
            tls: how to speak TLS, see :class:`~lightning_spot.http.limits.Connections`.
            shutdown_timeout_s: how long requests under way may take then, and once more to be cancelled.
        """
        runner = web.AppRunner(self.application(), shutdown_timeout=shutdown_timeout_s)
        await runner.setup()
        assert runner.server is not None
        ends.push_async_callback(runner.cleanup)
        ends.callback(self.close)
        connections = Connections(runner.server, tls=tls)
        accepting = await asyncio.get_running_loop().create_server(connections, sock=listener, backlog=AT_ONCE)
        ends.callback(accepting.close)
        listener.listen(BACKLOG)

    def close(self) -> None:
        """End sessions, and give up what is being received."""
        self._sessions.close()
        self.uploads.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        accepted = request.transport.get_protocol() if request.transport is not None else None
        if not isinstance(accepted, Accepted):
            return web.Response(status=400)  # who asked has gone; by TLS, its transport may still be there
        accepted.begin_request()
        request[ACCEPTED] = accepted
        try:
            is_refused = _is_of_a_person(request) and not self._page.admits(request)
            response = self._refusal(request) if is_refused else await self._answer(request, handler)
        except web.HTTPException:
            raise  # an answer of aiohttp's, as of a path that is none
        except ConnectionResetError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            response = web.Response(status=400)  # who asked has gone, and hears no answer: no error of this server's
        except Exception as error:
            failure = _failure(request, error)
            response = web.json_response(error_body(failure), status=error_status(failure))
        finally:
            accepted.end_request()
        if isinstance(response, web.Response) and isinstance(response.body, bytes) and not response.prepared:
            response.headers[DIGEST_HEADER] = checksum(response.body)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_admitted = self._page.admits(request)
        if request.path != "/healthz":
            self._check_not_of_a_page(request, is_admitted=is_admitted)
        if request.path not in _OPEN_TO_ALL:
            if request.path != _METRICS:  # which nobody waits for: a local server that is only watched ends
                self.last_request_s = time.monotonic()
            if not is_admitted and self._secrets is not None:
                given = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ")
                if (scope := scope_of(given, self._secrets())) is not None:
                    request[SCOPE] = scope
            request[ACCEPTED].admit()
            _check_wire(request)
            request[BODY] = await json_body(request, _longest_body(request))
            self._check_scope(request)  # not before: while a body comes, a run may go to another attempt
            self._check_attempt(request)
        return await handler(request)

    def _refusal(self, request: web.Request) -> web.Response:
        """What a browser without a session is shown, the same at every address: how to have one."""
        if self._secrets is not None:
            _say_denied(request, "a browser without a session")
        page = _NO_SESSION.format(
            token="" if self._secrets is None else _TOKEN_LINE, scheme="spots" if request.secure else "spot"
        )
        return web.Response(text=page, content_type="text/html", status=401, headers=HEADERS)

    def _check_scope(self, request: web.Request) -> None:
        """Refuse what a scoped token does not cover. What names no run or upload is refused but for a few requests.

        Raises:
            ServerRefusedError: if it does not.
        """
        if (scope := request.get(SCOPE)) is None:
            return
        if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD) and scope.rights is not Rights.WRITE:
            raise ServerRefusedError("this token is for reading only: this request changes something", status=403)
        path = _route(request)
        run = request[BODY].get("run") if path == FLUSH_PATH else request.match_info.get("run")
        if run is not None:
            self._check_covers(scope, str(run))
        elif (upload := request.match_info.get("upload")) is not None:
            self._check_key(scope, self.server.uploads.find(upload).run)
        elif path not in _SHOW_WHAT_IS_COVERED:
            raise ServerRefusedError("this token is for some runs only: use the server's secret", status=403)

    def _check_covers(self, scope: Scope, run: str) -> None:
        """A run is found by its identity, whatever name stands before that: both names must be covered."""
        self._check_key(scope, self.server.registry.key(run), parse_run(run)[0])

    def _check_key(self, scope: Scope, key: str, *names: str) -> None:
        """Each name, and each that is known of what lies under a key, must be covered."""
        info = self.server.registry.info(key)
        with self.server.ring.changed:  # else a slot may be emptied in between
            resident = [slot.content.run for slot in self.server.ring.contents(key)]
        for name in (*names, *resident, *([info.name] if info is not None else [])):
            if not scope.covers(name):
                why = f"this token is for runs {scope.prefix}… only: it does not cover {name}"
                raise ServerRefusedError(why, status=403)

    def _check_attempt(self, request: web.Request) -> None:
        """Refuse to change a run for another attempt than its own; processes of this user's on this host may.

        Who opens a run is asked for the token there. The id of an upload, which is random, says as much. What is done
        then is done to the very run that was looked at, whatever its name means meanwhile.

        Raises:
            SpotError: see :meth:`Registry.check_attempt`.
        """
        run, opens = request.match_info.get("run"), _route(request) == OPEN_PATH
        if run is None or opens or request.method == hdrs.METH_GET or request[ACCEPTED].is_near:
            return
        key, shown = self.server.registry.key(run), read_attempt(request.headers.get(ATTEMPT_HEADER, ""))
        self.server.registry.check_attempt(key, *shown)
        request.match_info["run"] = key

    def _check_not_of_a_page(self, request: web.Request, *, is_admitted: bool) -> None:
        """Refuse what a web page may have a browser of this host send, by its address or by a name of the page's own.

        A page cannot have our header sent without asking first, which is never answered. A token proves as much, as do
        a link and its cookie at an address of this host.

        Raises:
            ServerRefusedError: to one that sends the header.
            web.HTTPForbidden: the same as text, for people.
        """
        by_header = PROTOCOL_HEADER in request.headers
        if hdrs.ORIGIN in request.headers:
            why = "this server refuses requests of web pages. Nothing was done. Use a client that is no browser"
        elif self._secrets is not None or request[ACCEPTED].is_near:
            return
        elif not is_loopback(urlsplit(f"//{request.headers.get(hdrs.HOST, '')}").hostname or ""):
            why = (
                "this server has no token, and the request names another host than this one. Nothing was done. Use"
                " 127.0.0.1 or localhost, or set LIGHTNING_SPOT_TOKEN on both sides"
            )
        elif not (by_header or is_admitted or request.path == _METRICS):  # a page cannot read what Prometheus does
            why = (
                f"this server has no token: each request needs the header {PROTOCOL_HEADER}. Nothing was done. Add"
                f" -H '{PROTOCOL_HEADER}: {PROTOCOL_VERSION}' to curl, or set LIGHTNING_SPOT_TOKEN on both sides"
            )
        else:
            return
        raise ServerRefusedError(why, status=403) if by_header else web.HTTPForbidden(text=f"{why}.\n")

    # -- the server -------------------------------------------------------------------------------------------------

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _request: web.Request) -> web.Response:
        reasons = await asyncio.to_thread(not_ready, self.server)
        return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        covers = request[SCOPE].covers if SCOPE in request else None
        body = await asyncio.to_thread(exposition, self.server, covers)
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def _status(self, request: web.Request) -> web.Response:
        covers = request[SCOPE].covers if SCOPE in request else None
        shown = await asyncio.to_thread(self.server.status, covers)
        return web.json_response({"protocol": PROTOCOL_VERSION, **shown})

    # -- runs, and what is in memory of each -------------------------------------------------------------------------

    async def _listing(self, request: web.Request) -> web.Response:
        """The runs this server knows."""
        listed, scope = await asyncio.to_thread(self.server.listed), request.get(SCOPE)
        return web.json_response({"runs": [run for run in listed if scope is None or scope.covers(run["name"])]})

    async def _open(self, request: web.Request) -> web.Response:
        """Let an attempt write."""
        near, body = request[ACCEPTED].is_near, request[BODY]
        name, identity = parse_run(request.match_info["run"])
        known = {name: value for name, value in body.items() if near or name not in ONLY_NEAR}
        least = {"location": "", "attempt": 0, "token": ""}
        info = decoded(RunInfo, {**least, **known, "name": name, "id": identity})
        info = replace(info, committed=committed(body, info.attempt))
        before, client = self.server.registry.runs.get(info.key), request[ACCEPTED].client
        with self._looking.holding(client) if self.server.registry.is_ahead(info) else nullcontext():
            opened = await asyncio.to_thread(self.server.open_run, info, client)
        if near:
            await asyncio.to_thread(self._take_environment, body.get("environment"))
        if before is None or before.info.attempt != info.attempt:  # its hosts open it again every few seconds
            where = repr(info.durable_url) if info.durable_url is not None else "its trainer's host brings it on"
            line = "attempt {attempt} of run {about} is served: {where}"
            say(logging.INFO, "run-opened", line, about=info.text, attempt=info.attempt, where=where)
        return web.json_response(asdict(opened))

    def _take_environment(self, given: object) -> None:
        """Go on with the credentials of the attempt that has just begun: those of the one before may have expired."""
        if not isinstance(given, dict) or not all(isinstance(text, str) for item in given.items() for text in item):
            return
        if take_environment(given):
            forget_sessions()
            self.server.reconciler.hurry()

    async def _close(self, request: web.Request) -> web.Response:
        """The trainer leaves."""
        session, complete = text(request[BODY], "session"), request[BODY].get("complete") is True
        self.server.close_run(request.match_info["run"], session, complete=complete)
        return web.json_response({})

    async def _figures(self, request: web.Request) -> web.Response:
        """What the trainer has measured."""
        only_same_host(request)
        figures = decoded(Figures, request[BODY])
        await asyncio.to_thread(self.server.report, request.match_info["run"], figures)
        return web.json_response({})

    async def _snapshots(self, request: web.Request) -> web.Response:
        """The attempt that writes, the newest snapshot that counts, what is in memory, what a tier has refused."""
        run = request.match_info["run"]
        key = self.server.registry.key(run)
        ring = self.server.ring
        with ring.changed:  # else a slot may be emptied in between
            resident = [(slot.content, ring.owed([slot]), slot.safe) for slot in ring.contents(key)]
        listed = [{"manifest": each.to_dict(), "dirty": owed, "safe": safe} for each, owed, safe in resident]
        refused = [manifest.to_dict() for manifest in self.server.reconciler.refused(key)]
        claimed = await asyncio.to_thread(self.server.claimed, run)
        newest = ring.newest_committed(key)
        return web.json_response({"attempt": claimed, "committed": newest, "snapshots": listed, "refused": refused})

    # -- files ---------------------------------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> web.StreamResponse:
        """Read what is in memory: ``GET /v1/files/RUN/PATH``."""
        path = request.match_info["path"].strip("/")
        resident, manifest = self._find(request.match_info["run"], path)
        etag = etag_of(manifest)
        if request.headers.get(hdrs.IF_MATCH, etag) != etag:
            raise ServerRefusedError(f"{path} was replaced while it was being read", status=412)
        if path.endswith("manifest.json"):
            return web.Response(text=manifest.to_json(), content_type="application/json")
        span = manifest.span_at(path)
        assert span is not None
        start, stop, _ = request.http_range.indices(span.nbytes)
        is_range = hdrs.RANGE in request.headers
        if start >= stop and is_range:
            raise ServerRefusedError(f"this range lies outside the file of {span.nbytes} bytes", status=416)
        response = web.StreamResponse(status=206 if is_range else 200)
        response.content_length = stop - start
        response.content_type = "application/octet-stream"
        response.headers.update({hdrs.ACCEPT_RANGES: "bytes", hdrs.ETAG: etag})
        if is_range:
            response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{stop - 1}/{span.nbytes}"
        start, stop = span.offset + start, span.offset + stop
        with_digest = WANT_DIGEST_HEADER in request.headers and stop - start <= LONGEST_DIGESTED_BYTES
        with self.server.ring.reading(resident) as image:
            if with_digest:
                response.headers[DIGEST_HEADER] = checksum(image[start:stop])
            await response.prepare(request)
            with _hanging_up(request):
                await asyncio.wait_for(self._send(request, response, resident, image, start, stop), LONGEST_READ_S)
        await response.write_eof()
        return response

    def _find(self, run: str, path: str) -> tuple[Resident, Manifest]:
        """What a path names."""
        key = self.server.registry.key(run)
        try:
            return resolve(self.server.ring, key, path)
        except SnapshotNotFoundError as error:
            info = self.server.registry.info(key)
            if info is None or (url := self.server.durable(info)) is None:
                raise
            where = without_password(url)
            raise SnapshotNotFoundError(f"{error}. What has left its memory lies in {where}: read it there") from error

    async def _send(
        self, request: web.Request, response: web.StreamResponse, whole: Resident, image: Image, start: int, stop: int
    ) -> None:
        """Send bytes of slots: in clear by ``sendfile``, which copies nothing."""
        if request.secure:
            for place in range(start, stop, SEND_BYTES):  # copies: the transport may keep what it could not send
                data = bytes(image[place : min(place + SEND_BYTES, stop)])
                await asyncio.wait_for(response.write(data), SEND_TIMEOUT_S)
            return
        loop, transport = asyncio.get_running_loop(), request.transport
        assert isinstance(transport, asyncio.Transport)
        for slot, first, last in whole.pieces(start, stop):
            if (fd := self.server.ring.descriptor(slot)) is None:
                raise SnapshotNotFoundError("it has left the memory")
            with open(fd, "rb", buffering=0) as file:
                for place in range(first, last, _SENDFILE_BYTES):
                    sending = loop.sendfile(transport, file, place, min(_SENDFILE_BYTES, last - place))
                    await asyncio.wait_for(sending, SEND_TIMEOUT_S)

    async def _remove(self, request: web.Request) -> web.Response:
        """``DELETE``: remove a snapshot or file, in memory and at its tiers.

        With ``unseen`` in its body a file, also if it is not in memory.
        """
        text, path = request.match_info["run"], request.match_info["path"].strip("/")
        key = self.server.registry.key(text)
        with self._looking.holding(request[ACCEPTED].client):
            await asyncio.to_thread(self.server.check_owner, key)
        if request[BODY].get("unseen") is True:
            await asyncio.to_thread(self.server.remove, text, path, unseen=True)
            return web.json_response({})
        _, manifest = self._find(key, path)
        if path not in (manifest.name, manifest.data_path):
            raise ServerRefusedError(
                f"{path!r} is only another name, or one file, of {manifest.data_path}; remove that by its own name",
                status=409,
            )
        await asyncio.to_thread(self.server.remove, text, manifest.name)
        return web.json_response({})


def _route(request: web.Request) -> str:
    """The path of a kind of request; ``"?"`` if there is no such kind."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "?"


def _asked(request: web.Request) -> str:
    """What a request asks for. What a stranger asks for is named as few kinds of requests."""
    return plain(f"{request.method} {request.path if BODY in request else _route(request)}", 100)


def _failure(request: web.Request, error: Exception) -> SpotError:
    """What a client is told of an error, which is logged where it has to be."""
    if isinstance(error, SpotError):
        if isinstance(error, ServerRefusedError) and error.status in (401, 403):
            _say_denied(request, str(error).partition(":")[0])
        return error
    if isinstance(error, ValueError | KeyError | TypeError | OverflowError | RecursionError):
        return SettingsError(f"malformed request: {type(error).__name__}: {error}")
    # Such as want of memory: who asks may ask again, or do without.
    say(logging.ERROR, "request-failed", "{about} failed unexpectedly", about=_asked(request), exc_info=True)
    why = f"the snapshot server failed ({type(error).__name__}: {error})"
    return ServerRefusedError(why, reason=TierReason.SERVER_FAILED)


def _say_denied(request: web.Request, why: str) -> None:
    about = f"{_asked(request)}, {why}, from {request.remote or THIS_HOST}"
    say(logging.WARNING, "request-denied", "denied a request ({about})", about=about, of_strangers=True)


def _longest_body(request: web.Request) -> int:
    if _route(request) == COMMIT_PATH:
        return LARGE_JSON_BYTES
    return _LONGEST_OPENING_BYTES if request[ACCEPTED].is_near else SMALL_JSON_BYTES


def _is_of_a_person(request: web.Request) -> bool:
    """Whether somebody has opened an address of this server in a browser, as he would a page."""
    shown = (hdrs.AUTHORIZATION, PROTOCOL_HEADER, hdrs.ORIGIN)
    return (
        request.method == hdrs.METH_GET
        and "text/html" in request.headers.get(hdrs.ACCEPT, "")
        and request.path not in _OPEN_TO_ALL
        and not any(name in request.headers for name in shown)
    )


async def _name_protocol(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers[PROTOCOL_HEADER] = str(PROTOCOL_VERSION)


def _check_wire(request: web.Request) -> None:
    """Refuse what another protocol says, and what was damaged on its way."""
    spoken, target = request.headers.get(PROTOCOL_HEADER), target_of(request.method, request.path)
    if spoken is not None and spoken != str(PROTOCOL_VERSION):
        raise ServerRefusedError(
            f"this server speaks protocol {PROTOCOL_VERSION}, the client {spoken[:16]}: install the same version of"
            " lightning_spot on both hosts",
            reason=TierReason.PROTOCOL,
        )
    if request.headers.get(TARGET_HEADER, target) != target:
        raise ServerRefusedError("the request was damaged on its way", status=400)


@contextmanager
def _hanging_up(request: web.Request) -> Iterator[None]:
    """Break the connection when a body that was begun cannot be ended: nothing else tells the reader."""
    try:
        yield
    except Exception as error:  # whatever it is: an answer that says so would be taken for the rest of the body
        if isinstance(error, TimeoutError) or not isinstance(error, ConnectionError):  # that is the reader's
            why = "the reader is too slow" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            text = "reading {about} broke off: {why}"
            say(logging.WARNING, "read-broke-off", text, about=request.path, why=why)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("hung up") from error


def resolve(ring: Ring, run: str, path: str) -> tuple[Resident, Manifest]:
    """What a path names, and where it is in memory.

    Raises:
        SnapshotNotFoundError: if nothing committed has that name.
    """
    found = ring.readable(run)
    for resident, manifest in [*found, *ring.readable(run, path.partition("/")[0])]:  # by its name a shard, too
        if path == manifest.manifest_path or manifest.span_at(path) is not None:
            return resident, manifest
    names = ", ".join(manifest.name for _, manifest in found) or "nothing"
    raise SnapshotNotFoundError(
        f"no {path!r} in run {run!r} at this server; it holds {names} (and {MANIFEST_FILE} of each)"
    )
