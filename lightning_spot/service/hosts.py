"""Requests of hosts that bring one snapshot together: begin it, join it, say what is there, commit it.

=========  ==============================  ===========================================================
method     path                            what
=========  ==============================  ===========================================================
POST       /v1/runs/RUN/joint              begin one; the first host does
POST       /v1/runs/RUN/joint/join         take part in it
POST       /v1/runs/RUN/joint/decline      there will be none of that name
POST       /v1/uploads/ID/joint/placed     what a host brings is there, or never will be
POST       /v1/uploads/ID/joint/seal       commit it, once all is there; the first host does
=========  ==============================  ===========================================================

The bytes come as those of other uploads, see ``protocol/wire.py``, but for ranges of the image instead of its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from lightning_spot.config import HIGHEST_ATTEMPT
from lightning_spot.errors import NodeRefused
from lightning_spot.image.portion import MOST_HOSTS
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.node import Node
from lightning_spot.memory.upload import Upload
from lightning_spot.service.fields import (
    LAYOUT_BODY_BYTES,
    LONGEST_WAIT_S,
    MANIFEST_BODY_BYTES,
    MOST_BYTES,
    identifier,
    integer,
    json_body,
    long_text,
    manifest,
    seconds,
    text,
)
from lightning_spot.service.seals import AllThere, Seals
from lightning_spot.service.shares import Join, base_info, joined

Lease = Callable[..., Awaitable[Upload]]


class HostRequests:
    """Handlers over the uploads that several hosts fill.

    Args:
        node: whose.
        lease: waits for a slot on the event loop, see :meth:`Waiting.lease`.
        join: waits for an upload on the event loop, see :meth:`Waiting.join`.
        all_there: waits for all hosts, see :meth:`Waiting.all_there`.
        gone: done once who has sent a request has hung up.
    """

    def __init__(
        self,
        node: Node,
        lease: Lease,
        join: Join,
        all_there: AllThere,
        gone: Callable[[web.Request], asyncio.Future[None]],
    ) -> None:
        self._node, self._shares, self._seals = node, node.uploads.shares, Seals(node, all_there)
        self._lease, self._join, self._gone = lease, join, gone

    def routes(self) -> list[web.RouteDef]:
        """Where they are asked."""
        return [
            web.post("/v1/runs/{run}/joint", self.begin),
            web.post("/v1/runs/{run}/joint/join", self.join),
            web.post("/v1/runs/{run}/joint/decline", self.decline),
            web.post("/v1/uploads/{upload}/joint/placed", self.placed),
            web.post("/v1/uploads/{upload}/joint/seal", self.seal),
        ]

    async def begin(self, request: web.Request) -> web.Response:
        """Begin one; the first host does."""
        body = await json_body(request, LAYOUT_BODY_BYTES)
        name = text(body, "name")
        shared = Shared(
            name=name,
            shares=integer(body, "hosts", None, 2, MOST_HOSTS),
            digest=text(body, "digest"),
            layout=long_text(body, "layout"),
            by_hosts=True,
        )
        upload = await self._lease(
            request,
            request.match_info["run"],
            integer(body, "attempt", None, 0, HIGHEST_ATTEMPT),
            integer(body, "nbytes", None, 1, MOST_BYTES),
            seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
            name=name,
            upload_id=identifier(body, "upload"),
            shared=shared,
            layout_id=identifier(body, "layout_id"),
        )
        return web.json_response({"base": base_info(upload)})

    async def join(self, request: web.Request) -> web.Response:
        """Take part in one, as soon as it has begun."""
        body = await json_body(request)
        upload = await self._join(
            request,
            request.match_info["run"],
            integer(body, "attempt", None, 0, HIGHEST_ATTEMPT),
            text(body, "name"),
            integer(body, "host", None, 1, MOST_HOSTS),
            None,
            "",
            wait_s=seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
            again=body.get("again") is True,
        )
        if upload is None:
            return web.json_response({"upload": ""})
        told = {"nbytes": upload.nbytes, "base": base_info(upload), **joined(upload, body)}
        return web.json_response({"upload": upload.id, **told})

    async def placed(self, request: web.Request) -> web.Response:
        """All that a host brings is there, or never will be."""
        body = await json_body(request)
        host = integer(body, "host", None, 1, MOST_HOSTS)
        upload = self._gathered(request)
        await asyncio.to_thread(self._shares.placed, upload.id, host, text(body, "torn"))
        return web.json_response({})

    async def seal(self, request: web.Request) -> web.Response:
        """Commit one, once all hosts have brought what they bring."""
        body = await json_body(request, MANIFEST_BODY_BYTES)
        whole = await asyncio.to_thread(manifest, body)
        upload_id = request.match_info["upload"]
        sealed = await self._seals.seal(self._gone(request), upload_id, lambda: self._gathered(request), whole)
        return web.json_response({"checksums": list(sealed)})

    async def decline(self, request: web.Request) -> web.Response:
        """There will be none of a name."""
        body = await json_body(request)
        attempt = integer(body, "attempt", None, 0, HIGHEST_ATTEMPT)
        run, name, why = request.match_info["run"], text(body, "name"), text(body, "why")
        host = integer(body, "host", 0, 0, MOST_HOSTS)
        await asyncio.to_thread(self._shares.decline, run, attempt, name, why, by_hosts=True, host=host)
        return web.json_response({})

    def _gathered(self, request: web.Request) -> Upload:
        upload = self._node.find_upload(request.match_info["upload"])
        if not upload.is_gathered:
            raise NodeRefused("this upload is not one that several hosts fill", status=403)
        return upload
