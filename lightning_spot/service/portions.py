"""Requests about snapshots whose portions lie at several nodes: what is here of them, and what became of them.

=========  ==============================  ===========================================================
method     path                            what
=========  ==============================  ===========================================================
GET        /v1/runs/RUN/portions           what is here of the run's snapshots, see :meth:`Spread.look`
POST       /v1/runs/RUN/portions/whole     all portions of one are at nodes
POST       /v1/runs/RUN/portions/torn      one will never be whole
POST       /v1/runs/RUN/spread             where hosts may bring the next one (this host only)
=========  ==============================  ===========================================================
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from lightning_spot.config import HIGHEST_ATTEMPT, MOST_NODES
from lightning_spot.memory.node import Node
from lightning_spot.memory.spread import Told
from lightning_spot.service.fields import integer, json_body, only_same_host, text, texts


class PortionRequests:
    """Handlers over the portions that a node holds.

    Args:
        node: whose.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        """Where they are asked."""
        return [
            web.get("/v1/runs/{run}/portions", self.look),
            web.post("/v1/runs/{run}/portions/whole", self.whole),
            web.post("/v1/runs/{run}/portions/torn", self.torn),
            web.post("/v1/runs/{run}/spread", self.spread),
        ]

    async def look(self, request: web.Request) -> web.Response:
        """What is here of the run's snapshots."""
        name = text(await json_body(request), "name")
        return web.json_response(await asyncio.to_thread(self._node.spread.look, request.match_info["run"], name))

    async def whole(self, request: web.Request) -> web.Response:
        """All portions of one are at nodes."""
        body, run = await json_body(request), request.match_info["run"]
        attempt = integer(body, "attempt", None, 0, HIGHEST_ATTEMPT)
        names = texts(body, "overtaken"), texts(body, "left")
        told = Told(text(body, "name"), body.get("brings") is True, *names)
        await asyncio.to_thread(self._node.spread.whole, run, attempt, told)
        return web.json_response({})

    async def torn(self, request: web.Request) -> web.Response:
        """One will never be whole."""
        body, run = await json_body(request), request.match_info["run"]
        attempt, name = integer(body, "attempt", None, 0, HIGHEST_ATTEMPT), text(body, "name")
        why, over = text(body, "why"), body.get("over") is True
        await asyncio.to_thread(self._node.spread.torn, run, attempt, name, why, over=over)
        return web.json_response({})

    async def spread(self, request: web.Request) -> web.Response:
        """Where hosts may bring the next one."""
        only_same_host(request)
        replicas = integer(await json_body(request), "replicas", 1, 1, MOST_NODES)
        place = await asyncio.to_thread(self._node.spread_over, request.match_info["run"], replicas)
        return web.json_response({"at": place.at if place is not None else ""})
