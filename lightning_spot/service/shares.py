"""Requests of the ranks on this host that fill one slot together: take a share, say when its bytes are in place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from lightning_spot.config import HIGHEST_ATTEMPT
from lightning_spot.errors import SettingsError
from lightning_spot.image.packing import can_pack
from lightning_spot.memory.joint import MOST_SHARES, Shared, is_by_itself
from lightning_spot.memory.node import Node
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import BaseInfo, read_fault
from lightning_spot.service.fields import (
    LAYOUT_BODY_BYTES,
    LONGEST_WAIT_S,
    MOST_BYTES,
    identifier,
    json_body,
    long_text,
    only_same_host,
    place,
    seconds,
)
from lightning_spot.untrusted import integer, text

Join = Callable[..., Awaitable[Upload | None]]


class ShareRequests:
    """Handlers over the joint uploads of a node.

    Args:
        node: whose.
        join: waits for an upload on the event loop, see :meth:`Waiting.join`.
    """

    def __init__(self, node: Node, join: Join) -> None:
        self._node, self._shares, self._join = node, node.uploads.shares, join

    async def join(self, request: web.Request) -> web.Response:
        """Take a share of a snapshot, as soon as its slot is leased."""
        only_same_host(request)
        body = await shared_body(request)
        run, name = request.match_info["run"], text(body, "name")
        attempt = integer(body, "attempt", None, 0, HIGHEST_ATTEMPT)
        if at := place(body):
            host, told = integer(body, "host", None, 1, MOST_SHARES), None
            if is_by_itself(at):
                layout = long_text(body, "layout")
                told = Shared(name=name, shares=1, digest=text(body, "digest"), layout=layout, at=at)
            layout_id, visits = identifier(body, "layout_id"), self._node.uploads.abroad.visits
            await asyncio.to_thread(visits.join, run, attempt, name, at, host, told, layout_id)
        upload = await self._join(
            request,
            run,
            attempt,
            name,
            integer(body, "share", None, 1, MOST_SHARES),
            text(body, "session"),
            text(body, "digest"),
            not at,
            wait_s=seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
        )
        assert upload is not None
        return web.json_response({**leased(self._node, upload), **joined(upload, body)})

    async def say(self, request: web.Request) -> web.Response:
        """A slot that was leased ahead is for a snapshot that ranks fill together."""
        only_same_host(request)
        body = await shared_body(request)
        upload, shared = self._node.find_upload(request.match_info["upload"]), shared_of(body)
        if shared is None or shared.at:  # hosts are told of theirs when it is leased
            raise SettingsError("it is to be said how many ranks of this host fill it")
        nbytes, layout_id = integer(body, "nbytes", None, 0, MOST_BYTES), identifier(body, "layout_id")
        await asyncio.to_thread(self._shares.say, upload, nbytes, shared, layout_id)
        return web.json_response({})

    async def placed(self, request: web.Request) -> web.Response:
        """The bytes of a share are in place, or never will be."""
        only_same_host(request)
        body = await json_body(request)
        share = integer(body, "share", None, 1, MOST_SHARES)
        torn, fault = text(body, "torn"), read_fault(body.get("fault"))
        await asyncio.to_thread(self._shares.placed, request.match_info["upload"], share, torn, fault)
        return web.json_response({})

    async def decline(self, request: web.Request) -> web.Response:
        """There will be no snapshot of a name."""
        only_same_host(request)
        body = await json_body(request)
        attempt = integer(body, "attempt", None, 0, HIGHEST_ATTEMPT)
        run, name, why, at = request.match_info["run"], text(body, "name"), text(body, "why"), place(body)
        host, abroad = integer(body, "host", 0, 0, MOST_SHARES), self._node.uploads.abroad
        share = integer(body, "share", 1, 1, MOST_SHARES)
        if host and await asyncio.to_thread(self._shares.is_joined, run, name, share):
            return web.json_response({})  # the rank has lost its connection only
        await asyncio.to_thread(self._shares.decline, run, attempt, name, why)
        if at:
            abroad.decline(run, at, name, attempt, why, host)
        return web.json_response({})


async def shared_body(request: web.Request) -> dict[str, Any]:
    """What a request for a slot brings, a layout perhaps."""
    return await json_body(request, LAYOUT_BODY_BYTES)


def shared_of(body: dict[str, Any]) -> Shared | None:
    """What a request for a slot says of the ranks that will fill it; ``None`` if one does."""
    if body.get("shares") is None:
        return None
    return Shared(
        name=text(body, "name"),
        shares=integer(body, "shares", None, 1, MOST_SHARES),
        digest=text(body, "digest"),
        layout=long_text(body, "layout"),
        at=place(body),
        image_nbytes=integer(body, "image_nbytes", 0, 0, MOST_BYTES),
    )


def joined(upload: Upload, body: dict[str, Any]) -> dict[str, Any]:
    """What who takes part in an upload is told of it; not the layout again, if that is known by its id."""
    joint = upload.joint
    assert joint is not None
    shared, known = joint.shared, identifier(body, "layout_id") == joint.layout_id
    told = {"shares": shared.shares, "digest": shared.digest, "layout_id": joint.layout_id}
    return {**told, "layout": None if known else shared.layout}


def base_info(upload: Upload) -> dict[str, Any] | None:
    """What a sender has to know of the snapshot from which parts of an upload can be made; ``None`` for none."""
    if upload.base is None:
        return None
    manifest = upload.base.manifest
    return asdict(BaseInfo(manifest.name, manifest.nbytes, manifest.part_bytes, manifest.checksums, can_pack()))


def leased(node: Node, upload: Upload) -> dict[str, Any]:
    """What who fills a slot has to know of it."""
    slot = upload.slot
    return {
        "upload": upload.id,
        "slot": slot.index,
        "generation": slot.generation,
        "capacity": slot.capacity,
        "nbytes": upload.nbytes,
        "backing": slot.memory.backing if slot.memory else "",
        "held": upload.held,
        "generations": {item.index: item.generation for item in node.ring.slots if item.memory},
    }
