"""``PUT`` below ``/v1/files``: a file that comes in one body, whole or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import xxhash
from aiohttp import hdrs, web

from lightning_spot.client.stores import open_store
from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshot, NodeRefused, SettingsError, SnapshotNotFound
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.node import Node
from lightning_spot.memory.paths import file_name
from lightning_spot.memory.runs import RunInfo, parse_run
from lightning_spot.memory.upload import Upload
from lightning_spot.protocol.wire import DIGEST_HEADER
from lightning_spot.service.fields import MOST_BYTES
from lightning_spot.service.quotas import client_of

Lease = Callable[[web.Request, str, int, int, float], Awaitable[Upload]]

WAIT_FOR_SLOT_S = 60.0
_QUIET_BODY_S = 30.0
_SLOWEST_BYTES_PER_S = 64 * 1024


class Saving:
    """Takes files that are written to a run.

    Args:
        node: whose runs these are.
        lease: takes a slot, waiting on the event loop: request, run, attempt, bytes, seconds.
        find: what a path names, in memory or below; raises where that is nothing.
    """

    def __init__(self, node: Node, lease: Lease, find: Callable[[str, str], Awaitable[Manifest]]) -> None:
        self._node, self._lease, self._find = node, lease, find
        self._writing: set[tuple[str, str]] = set()

    async def write(self, request: web.Request) -> web.Response:
        """``PUT``: whole or not at all; with ``If-None-Match: *`` only where there is none yet."""
        text, name = request.match_info["run"], file_name(request.match_info["path"])
        nbytes = request.content_length
        if nbytes is None or nbytes > MOST_BYTES:
            raise SettingsError(f"a file needs a Content-Length of at most {MOST_BYTES}")
        info = await self._writer(text, client_of(request))
        exclusive = (info.key, name) if request.headers.get(hdrs.IF_NONE_MATCH) == "*" else None
        if exclusive is not None:
            if exclusive in self._writing:
                raise NodeRefused(f"{name} is being created by somebody else", status=412)
            self._writing.add(exclusive)
        try:
            if exclusive is not None:
                await self._refuse_existing(text, name)
            digest = await self._store(request, info, name, nbytes, exclusive=exclusive is not None)
        finally:
            if exclusive is not None:
                self._writing.discard(exclusive)
        return web.json_response({"xxh3_128": digest}, status=201)

    async def _refuse_existing(self, text: str, name: str) -> None:
        try:
            manifest = await self._find(text, name)
        except SnapshotNotFound:
            return
        if manifest.name == name:
            raise NodeRefused(f"{name} exists already", status=412)

    async def _writer(self, text: str, client: str) -> RunInfo:
        """The run that a file is written to, made if this node does not know it."""
        try:
            return self._node.registry.find(text).info
        except SnapshotNotFound:
            name, identity = parse_run(text)
            attempt = max(1, await asyncio.to_thread(self._claimed, text))
            info = RunInfo(name=name, id=identity, location="", attempt=attempt, token="")
            await asyncio.to_thread(self._node.open_run, info, client)
            return info

    def _claimed(self, text: str) -> int:
        """Highest attempt of a run that this node does not know, by what it holds and by the tier below."""
        url = self._node.below(text)
        return max(self._node.claimed(text), open_store(url).claimed() if url is not None else 0)

    async def _store(self, request: web.Request, info: RunInfo, name: str, nbytes: int, *, exclusive: bool) -> str:
        upload = await self._lease(request, info.text, info.attempt, nbytes, WAIT_FOR_SLOT_S)
        try:
            digest = await self._receive(request, upload)
            if exclusive:  # again: somebody may have written it meanwhile, not exclusively
                await self._refuse_existing(info.text, name)
            manifest = Manifest(
                run=info.name,
                run_id=info.id,
                name=name,
                file="",
                step=0,
                attempt=info.attempt,
                nbytes=nbytes,
                created_unix_s=time.time(),
            )
            await asyncio.to_thread(self._seal, upload, manifest)
            return digest
        except BaseException:
            self._node.abort(upload.id)
            raise

    async def _receive(self, request: web.Request, upload: Upload) -> str:
        """Take a body straight into the slot, unless it comes too slowly; its xxh3-128."""
        digest = xxhash.xxh3_128()
        place, deadline_s = 0, time.monotonic() + _QUIET_BODY_S + upload.nbytes / _SLOWEST_BYTES_PER_S
        with upload.slot.view(upload.nbytes) as view:
            while place < upload.nbytes:
                within_s = min(_QUIET_BODY_S, deadline_s - time.monotonic())
                try:
                    chunk = await asyncio.wait_for(request.content.readany(), within_s)
                except asyncio.TimeoutError:
                    raise NodeRefused(f"only {place} of {upload.nbytes} bytes came in time", status=408) from None
                if not chunk:
                    raise CorruptSnapshot(f"the connection broke after {place} of {upload.nbytes} bytes")
                if self._node.find_upload(upload.id) is not upload:
                    raise SnapshotNotFound("this upload was given up; begin again")
                view[place : place + len(chunk)] = chunk
                digest.update(chunk)
                place += len(chunk)
        if request.headers.get(DIGEST_HEADER, digest.hexdigest()) != digest.hexdigest():
            raise NodeRefused("the file was damaged on its way", status=400)
        return digest.hexdigest()

    def _seal(self, upload: Upload, manifest: Manifest) -> None:
        """Commit a file that came in one body: checksum its parts here, but leave its bytes as they came."""
        with upload.slot.view(upload.nbytes) as view:
            sealed = manifest.sealed(view)
        for index, digest in enumerate(sealed.checksums):
            start = index * PART_BYTES
            upload.received.begin(start, min(start + PART_BYTES, upload.nbytes))
            upload.received.end(start, digest)
        self._node.commit(upload.id, sealed)
