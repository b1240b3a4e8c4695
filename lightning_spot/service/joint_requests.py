"""Requests of those who bring one snapshot together: the ranks of a host, which fill one slot, and hosts.

=========  ==============================  ===========================================================
method     path                            what
=========  ==============================  ===========================================================
POST       /v1/runs/RUN/joint              begin one; the first host does
POST       /v1/runs/RUN/joint/join         take part in it
POST       /v1/runs/RUN/joint/decline      there will be none of that name
POST       /v1/uploads/ID/joint/placed     what a host brings is there, or never will be
POST       /v1/uploads/ID/joint/seal       commit it, once all is there; the first host does
GET        /v1/runs/RUN/portions           what is here of the run's snapshots, see :meth:`Spread.look`
POST       /v1/runs/RUN/portions/whole     all portions of one are at servers
POST       /v1/runs/RUN/portions/torn      one will never be whole
POST       /v1/runs/RUN/spread             where hosts may bring the next one (this host only)
=========  ==============================  ===========================================================

The bytes come as those of other uploads, see ``protocol/wire.py``, but for ranges of the image instead of its parts.

A seal is done once, however often the first host asks for it: its connection may break while hosts still bring their
portions, or just before the answer. Then it asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lightning_spot.config import MOST_NODES
from lightning_spot.errors import FailureReason, ServerRefusedError, SettingsError, SnapshotFailedError
from lightning_spot.image.manifest import MOST_HOSTS, Manifest
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import MOST_SHARES, Shared, is_by_itself
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import texts
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import read_fault
from lightning_spot.service.fields import (
    LAYOUT_BODY_BYTES,
    LONGEST_WAIT_S,
    MANIFEST_BODY_BYTES,
    attempt_of,
    identifier,
    json_body,
    long_text,
    manifest,
    only_same_host,
    place,
    seconds,
    shared_body,
    shared_of,
)
from lightning_spot.service.upload_requests import ASKED_AGAIN_S, Join, Lease, base_info, joined, leased
from lightning_spot.untrusted import MOST_BYTES, integer, text

_KEPT = 16  # seals whose outcome is still told; a run brings one snapshot at a time

AllThere = Callable[[Upload], Awaitable[None]]


@dataclass(slots=True)
class _Seal:
    """One that was asked for.

    Attributes:
        done: becomes the checksums.
        asking: requests that wait for it.
    """

    done: asyncio.Task[tuple[str, ...]]
    asking: int = 0


class Seals:
    """The seals of a server. All methods are called on the event loop.

    Args:
        node: whose.
        all_there: waits for all hosts, see :meth:`Waiting.all_there`.
    """

    def __init__(self, node: Node, all_there: AllThere) -> None:
        self._node, self._all_there = node, all_there
        self._seals: dict[str, _Seal] = {}

    async def seal(
        self, gone: asyncio.Future[None], upload_id: str, find: Callable[[], Upload], manifest: Manifest
    ) -> tuple[str, ...]:
        """Have an upload committed once all hosts have brought what they bring; its checksums.

        Args:
            gone: done once who asks has hung up.
            upload_id: which.
            find: finds it, if this is the first time that it is asked for.
            manifest: without checksums.

        Raises:
            ConnectionResetError: if who asks is gone. If it does not ask again, the upload is given up.
        """
        seal = self._seals.get(upload_id)
        if seal is None:
            seal = self._seals[upload_id] = _Seal(asyncio.create_task(self._sealed(find(), manifest)))
            seal.done.add_done_callback(_look_at)
            self._forget()
        seal.asking += 1
        try:
            either: list[asyncio.Future[Any]] = [gone, seal.done]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            seal.asking -= 1
        if seal.done.done():
            return seal.done.result()
        asyncio.get_running_loop().call_later(ASKED_AGAIN_S, self._give_up, upload_id, seal)
        raise ConnectionResetError("the first host has gone")

    async def _sealed(self, upload: Upload, manifest: Manifest) -> tuple[str, ...]:
        await self._all_there(upload)  # holds no thread, however many runs wait
        if upload.given_up and upload.joint is not None:
            raise SnapshotFailedError(
                f"{upload.name} was given up: {upload.joint.failed or 'nobody says why'}",
                reason=FailureReason.SHARE_MISSING,
                fault=upload.joint.fault,
            )
        return (await asyncio.to_thread(self._node.seal, upload.id, manifest)).checksums

    def _give_up(self, upload_id: str, seal: _Seal) -> None:
        if not seal.asking and not seal.done.done():
            asyncio.get_running_loop().run_in_executor(None, self._node.abort, upload_id)  # which ends the seal

    def _forget(self) -> None:
        over = [upload_id for upload_id, seal in self._seals.items() if seal.done.done()]
        for upload_id in over[:-_KEPT]:
            del self._seals[upload_id]


def _look_at(done: asyncio.Task[tuple[str, ...]]) -> None:
    """Asyncio would print an error of which nobody asks."""
    if not done.cancelled():
        done.exception()


class PortionRequests:
    """Handlers over the portions that a server holds.

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
        """All portions of one are at servers."""
        body, run = await json_body(request), request.match_info["run"]
        attempt = attempt_of(body)
        names = texts(body, "overtaken"), texts(body, "left")
        told = Told(text(body, "name"), body.get("brings") is True, *names)
        await asyncio.to_thread(self._node.spread.whole, run, attempt, told)
        return web.json_response({})

    async def torn(self, request: web.Request) -> web.Response:
        """One will never be whole."""
        body, run = await json_body(request), request.match_info["run"]
        attempt, name = attempt_of(body), text(body, "name")
        why, over = text(body, "why"), body.get("over") is True
        await asyncio.to_thread(self._node.spread.torn, run, attempt, name, why, over=over)
        return web.json_response({})

    async def spread(self, request: web.Request) -> web.Response:
        """Where hosts may bring the next one."""
        only_same_host(request)
        replicas = integer(await json_body(request), "replicas", 1, 1, MOST_NODES)
        place = await asyncio.to_thread(self._node.spread_over, request.match_info["run"], replicas)
        return web.json_response({"at": place.at if place is not None else ""})


class JointRequests:
    """Handlers over the uploads that several fill: ranks of this host, through shared memory, or hosts, by streams.

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
            web.post("/v1/runs/{run}/shares", self.join_ranks),
            web.post("/v1/runs/{run}/decline", self.decline_ranks),
            web.post("/v1/uploads/{upload}/share", self.say),
            web.post("/v1/uploads/{upload}/placed", self.placed),
            web.post("/v1/runs/{run}/joint", self.begin),
            web.post("/v1/runs/{run}/joint/join", self.join_hosts),
            web.post("/v1/runs/{run}/joint/decline", self.decline_hosts),
            web.post("/v1/uploads/{upload}/joint/placed", self.placed),
            web.post("/v1/uploads/{upload}/joint/seal", self.seal),
        ]

    async def join_ranks(self, request: web.Request) -> web.Response:
        """Take a share of a snapshot, as soon as its slot is leased."""
        only_same_host(request)
        body = await shared_body(request)
        run, name = request.match_info["run"], text(body, "name")
        attempt = attempt_of(body)
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
            attempt_of(body),
            integer(body, "nbytes", None, 1, MOST_BYTES),
            seconds(body, "wait_s", 0.0, LONGEST_WAIT_S),
            name=name,
            upload_id=identifier(body, "upload"),
            shared=shared,
            layout_id=identifier(body, "layout_id"),
        )
        return web.json_response({"base": base_info(upload)})

    async def join_hosts(self, request: web.Request) -> web.Response:
        """Take part in one, as soon as it has begun."""
        body = await json_body(request)
        upload = await self._join(
            request,
            request.match_info["run"],
            attempt_of(body),
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
        """The bytes of a rank's share, or all that a host brings, are in place, or never will be."""
        body = await json_body(request)
        if "host" in body:
            upload, number = self._gathered(request).id, integer(body, "host", None, 1, MOST_HOSTS)
        else:
            only_same_host(request)
            upload, number = request.match_info["upload"], integer(body, "share", None, 1, MOST_SHARES)
        torn, fault = text(body, "torn"), read_fault(body.get("fault"))
        await asyncio.to_thread(self._shares.placed, upload, number, torn, fault)
        return web.json_response({})

    async def seal(self, request: web.Request) -> web.Response:
        """Commit one, once all hosts have brought what they bring."""
        body = await json_body(request, MANIFEST_BODY_BYTES)
        whole = await asyncio.to_thread(manifest, body)
        upload_id = request.match_info["upload"]
        sealed = await self._seals.seal(self._gone(request), upload_id, lambda: self._gathered(request), whole)
        return web.json_response({"checksums": list(sealed)})

    async def decline_ranks(self, request: web.Request) -> web.Response:
        """There will be no snapshot of a name."""
        only_same_host(request)
        body = await json_body(request)
        attempt = attempt_of(body)
        run, name, why, at = request.match_info["run"], text(body, "name"), text(body, "why"), place(body)
        host, abroad = integer(body, "host", 0, 0, MOST_SHARES), self._node.uploads.abroad
        share = integer(body, "share", 1, 1, MOST_SHARES)
        if host and await asyncio.to_thread(self._shares.is_joined, run, name, share):
            return web.json_response({})  # the rank has lost its connection only
        await asyncio.to_thread(self._shares.decline, run, attempt, name, why)
        if at:
            abroad.decline(run, at, name, attempt, why, host)
        return web.json_response({})

    async def decline_hosts(self, request: web.Request) -> web.Response:
        """There will be none of a name."""
        body = await json_body(request)
        attempt = attempt_of(body)
        run, name, why = request.match_info["run"], text(body, "name"), text(body, "why")
        host = integer(body, "host", 0, 0, MOST_HOSTS)
        await asyncio.to_thread(self._shares.decline, run, attempt, name, why, by_hosts=True, host=host)
        return web.json_response({})

    def _gathered(self, request: web.Request) -> Upload:
        upload = self._node.find_upload(request.match_info["upload"])
        if not upload.is_gathered:
            raise ServerRefusedError("this upload is not one that several hosts fill", status=403)
        return upload
