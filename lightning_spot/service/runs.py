"""Requests about runs: which there are, let an attempt write one, what of it is here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from aiohttp import web

from lightning_spot.config import HIGHEST_ATTEMPT, MOST_NODES, take_environment
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import RunInfo, parse_run
from lightning_spot.service.fields import (
    LONGEST_PLACE,
    SMALL_BODY_BYTES,
    compression,
    json_body,
    same_host,
    seconds,
    texts,
)
from lightning_spot.service.quotas import client_of
from lightning_spot.tiers.filesystem import forget_sessions
from lightning_spot.untrusted import LONGEST_NAME, integer, text

logger = logging.getLogger(__name__)


OPEN_PATH = "/v1/runs/{run}/open"

_MOST_KEPT = 10**6
_LONGEST_OPENING_BYTES = 4 * 2**20  # with an environment, of which Linux allows about so much
_MOST_PID = 2**31


class RunRequests:
    """Handlers over the runs of a node.

    Args:
        node: whose.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        """Where they are asked."""
        return [
            web.get("/v1/runs", self.listing),
            web.post(OPEN_PATH, self.open),
            web.post("/v1/runs/{run}/close", self.close),
            web.post("/v1/runs/{run}/settle", self.settle),
            web.get("/v1/runs/{run}/snapshots", self.snapshots),
        ]

    async def listing(self, _request: web.Request) -> web.Response:
        """The runs this node knows."""
        return web.json_response({"runs": await asyncio.to_thread(self._node.listed)})

    async def open(self, request: web.Request) -> web.Response:
        """Let an attempt write."""
        near = same_host(request)
        body = await json_body(request, _LONGEST_OPENING_BYTES if near else SMALL_BODY_BYTES)
        name, identity = parse_run(request.match_info["run"])
        info = RunInfo(
            name=name,
            id=identity,
            location=text(body, "location", most=LONGEST_PLACE),
            attempt=integer(body, "attempt", 0, 0, HIGHEST_ATTEMPT),
            token=text(body, "token", most=LONGEST_NAME),
            keep=integer(body, "keep", 2, 0, _MOST_KEPT),
            durable_url=_durable_url(body),
            min_upload_interval_s=_pace(body),
            compression=compression(body),
            nodes=texts(body, "nodes") if near else (),
            replicas=integer(body, "replicas", 1, 1, MOST_NODES) if near else 1,
            carry=body.get("carry", True) is not False,
            spread=body.get("spread") is True,
            left=body.get("left") is True,
            is_claimed=not (near and body.get("is_claimed") is False),
            session=text(body, "session", most=LONGEST_NAME) if near else "",
            pid=integer(body, "pid", 0, 0, _MOST_PID),
            host=text(body, "host", most=LONGEST_NAME),
        )
        opened = await asyncio.to_thread(self._node.open_run, info, client_of(request))
        if near:
            await asyncio.to_thread(self._take_environment, info.key, body.get("environment"))
        where = repr(info.durable_url) if info.durable_url is not None else "its trainer's host brings it on"
        logger.info("attempt %d of run %s is served: %s", info.attempt, info.key, where)
        return web.json_response(asdict(opened))

    def _take_environment(self, key: str, given: object) -> None:
        """Go on with the credentials of the attempt that has just begun: those of the one before may have expired."""
        if not isinstance(given, dict) or not all(isinstance(text, str) for item in given.items() for text in item):
            return
        if take_environment(given):
            forget_sessions()
            self._node.uploads.abroad.bringing.forget(key)
            self._node.flusher.wait_clean(None, 0.0)  # what fails is tried soon

    async def close(self, request: web.Request) -> web.Response:
        """The trainer leaves."""
        body = await json_body(request)
        session = text(body, "session")
        self._node.close_run(request.match_info["run"], session, complete=body.get("complete") is True)
        return web.json_response({})

    async def settle(self, request: web.Request) -> web.Response:
        """A snapshot was made durable by its sender."""
        body = await json_body(request)
        attempt = integer(body, "attempt", None, 0, HIGHEST_ATTEMPT)
        name, lineage = text(body, "name"), text(body, "lineage")
        await asyncio.to_thread(self._node.settle, request.match_info["run"], attempt, name, lineage)
        return web.json_response({})

    async def snapshots(self, request: web.Request) -> web.Response:
        """The attempt that writes, what is in memory, what a tier has refused."""
        run = request.match_info["run"]
        key = self._node.registry.key(run)
        listed = [
            {"manifest": manifest.to_dict(), "dirty": slot.dirty, "safe": slot.safe}
            for slot, manifest in self._node.ring.readable(key)
        ]
        refused = [manifest.to_dict() for manifest in self._node.flusher.refused(key)]
        claimed = await asyncio.to_thread(self._node.claimed, run)
        return web.json_response({"attempt": claimed, "snapshots": listed, "refused": refused})


def _durable_url(body: Mapping[str, Any]) -> str | None:
    return text(body, "durable_url", most=LONGEST_PLACE) if body.get("durable_url") is not None else None


def _pace(body: Mapping[str, Any]) -> float | None:
    """Least seconds between two snapshots brought to the durable tier."""
    return (
        seconds(body, "min_upload_interval_s", 0.0, 365 * 86400.0)
        if body.get("min_upload_interval_s") is not None
        else None
    )
