"""The service's routes below ``/v1/files``: what memory holds of a run, as a folder of files."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import xxhash
from aiohttp import hdrs, web

from lightning_spot.config import SEND_BYTES, without_password
from lightning_spot.errors import ServerRefusedError, SettingsError, SnapshotNotFoundError, SpotError
from lightning_spot.image.files import MODEL_FILE, FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.image.parts import checksum
from lightning_spot.memory.node import Node
from lightning_spot.memory.paths import LAST, resolve
from lightning_spot.memory.slots import Slot
from lightning_spot.protocol.wire import DIGEST_HEADER, LONGEST_DIGESTED_BYTES, WANT_DIGEST_HEADER
from lightning_spot.service.fields import json_body

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 60.0
_SENDFILE_BYTES = 16 * 1024 * 1024  # a reader that takes longer than the timeout for so much is hung up on


class Files:
    """Handlers of ``/v1/files/RUN/PATH`` and of the listing of a run.

    Args:
        node: whose runs these are.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    # -- listing --------------------------------------------------------------------------------------------------

    async def listing(self, request: web.Request) -> web.Response:
        """Every file of a run that is in memory."""
        text = request.match_info["run"]
        key = self._node.registry.key(text)
        listed = dict(sorted(self._in_memory(key).items()))
        if not listed and key not in self._node.registry.runs:
            raise SnapshotNotFoundError(f"this node has no run {text!r}")
        return web.json_response({"files": list(listed.values()), "last": self._newest(list(listed))})

    def _in_memory(self, key: str) -> dict[str, dict[str, object]]:
        return {
            manifest.path_of(span): {
                "path": manifest.path_of(span),
                "nbytes": span.nbytes,
                "created_unix_s": manifest.created_unix_s,
                "dirty": list(slot.dirty),
                "safe": list(slot.safe),
                "step": manifest.step,
            }
            for slot, manifest in self._node.ring.readable(key)
            for span in manifest.spans
        }

    def _newest(self, paths: list[str]) -> str | None:
        """What ``last.ckpt`` stands for: a file of that name, else the newest exact snapshot.

        Of a snapshot of several files it is the directory. Who reads it is told of no other kind.
        """
        if LAST in paths:
            return LAST
        names = {path.partition("/")[0] for path in paths if "/" in path}
        orders = {name: order for name in names if (order := snapshot_order(name)) is not None and order[2]}
        newest = max(orders, key=orders.__getitem__, default=None)
        one_file = f"{newest}/{MODEL_FILE}"
        return one_file if one_file in paths else newest

    # -- reading --------------------------------------------------------------------------------------------------

    async def read(self, request: web.Request) -> web.StreamResponse:
        """``GET`` and ``HEAD``."""
        text, path = request.match_info["run"], request.match_info["path"].strip("/")
        found = await self._find(text, path)
        try:
            return await self._answer(request, path, *found)
        except SnapshotNotFoundError:  # it left memory just now; something newer may have that name
            return await self._answer(request, path, *await self._find(text, path))

    async def _answer(self, request: web.Request, path: str, slot: Slot, manifest: Manifest) -> web.StreamResponse:
        if path.endswith("manifest.json"):
            return web.Response(text=manifest.to_json(), content_type="application/json")
        etag = f'"{xxhash.xxh3_128_hexdigest(manifest.to_json().encode())}"'
        if request.headers.get(hdrs.IF_MATCH, etag) != etag:
            raise ServerRefusedError(f"{path} was replaced while it was being read", status=412)
        span = manifest.span_at(path) or FileSpan(path, 0, manifest.nbytes)  # another name, of a snapshot of one file
        start, stop, status = byte_range(request.headers.get(hdrs.RANGE), span.nbytes)
        response = web.StreamResponse(status=status)
        response.content_length = stop - start
        response.content_type = "application/octet-stream"
        response.last_modified = manifest.created_unix_s
        response.headers.update(
            {
                hdrs.ACCEPT_RANGES: "bytes",
                hdrs.ETAG: etag,
                "Spot-Created": str(manifest.created_unix_s),
                "Spot-Path": quote(_path_to(manifest, span)),  # a header holds ASCII only
                "Spot-Snapshot": quote(manifest.name),
            }
        )
        if status == 206:
            response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{stop - 1}/{span.nbytes}"
        start, stop = span.offset + start, span.offset + stop
        with_digest = WANT_DIGEST_HEADER in request.headers and stop - start <= LONGEST_DIGESTED_BYTES
        if request.method == hdrs.METH_HEAD:
            await response.prepare(request)
        else:
            with self._node.ring.reading(slot, manifest) as image:
                if with_digest:
                    response.headers[DIGEST_HEADER] = checksum(image[start:stop])
                await response.prepare(request)
                with _hanging_up(request):
                    await self._send(request, response, slot, image, start, stop)
        await response.write_eof()
        return response

    async def _find(self, text: str, path: str) -> tuple[Slot, Manifest]:
        """What a path names."""
        key = self._node.registry.key(text)
        newest = self._newest(list(self._in_memory(key))) if path == LAST else None
        if newest is not None and snapshot_order(newest) is not None:
            raise SnapshotNotFoundError(
                f"the newest snapshot of run {text!r} is a directory of several files: read it at {newest}/"
                f" instead of {LAST}, or make one file of it with lightning-spot cp"
            )
        try:
            return resolve(self._node.ring, key, newest or path)
        except SnapshotNotFoundError as error:
            info = self._node.registry.info(key)
            if info is None or (url := self._node.routes.durable(info)) is None:
                raise
            where = without_password(url)
            raise SnapshotNotFoundError(f"{error}. What has left its memory lies in {where}: read it there") from error

    async def _send(
        self, request: web.Request, response: web.StreamResponse, slot: Slot, image: memoryview, start: int, stop: int
    ) -> None:
        """Send bytes of a slot: by ``sendfile``, which copies nothing, or in pieces where the transport cannot."""
        transport = request.transport
        fd = self._node.ring.descriptor(slot) if stop - start > SEND_BYTES and transport is not None else None
        if transport is not None and fd is not None:
            loop = asyncio.get_running_loop()
            with open(fd, "rb", buffering=0) as file:
                try:
                    while start < stop:
                        count = min(_SENDFILE_BYTES, stop - start)
                        sending = loop.sendfile(transport, file, start, count, fallback=False)
                        start += await asyncio.wait_for(sending, _SEND_TIMEOUT_S)
                except (NotImplementedError, asyncio.SendfileNotAvailableError):
                    logger.debug("this transport has no sendfile")
        for place in range(start, stop, SEND_BYTES):
            # A copy: the transport may keep what it could not send at once, the slot may not be kept.
            data = bytes(image[place : min(place + SEND_BYTES, stop)])
            await asyncio.wait_for(response.write(data), _SEND_TIMEOUT_S)

    # -- removing -------------------------------------------------------------------------------------------------

    async def remove(self, request: web.Request) -> web.Response:
        """``DELETE``: a snapshot or file, in memory and at its tiers; never through the alias ``last.ckpt``.

        With ``unseen`` in its body a file, also if it is not in memory.
        """
        text, path = request.match_info["run"], request.match_info["path"].strip("/")
        key = self._node.registry.key(text)
        await asyncio.to_thread(self._node.routes.check_owner, key)
        if (await json_body(request)).get("unseen") is True:
            await asyncio.to_thread(self._node.remove, text, path, unseen=True)
            return web.json_response({})
        _, manifest = await self._find(text, path)
        if path not in (manifest.name, manifest.data_path):
            raise ServerRefusedError(
                f"{path!r} is only another name, or one file, of {manifest.data_path}; remove that by its own name",
                status=409,
            )
        await asyncio.to_thread(self._node.remove, text, manifest.name)
        return web.json_response({})


@contextmanager
def _hanging_up(request: web.Request) -> Iterator[None]:
    """Break the connection when a body that was begun cannot be ended: nothing else tells the reader."""
    try:
        yield
    except Exception as error:  # whatever it is: an answer that says so would be taken for the rest of the body
        if isinstance(error, TimeoutError):
            logger.warning("reading %s broke off: the reader is too slow", request.path)
        elif not isinstance(error, ConnectionError):  # that is the reader's, or its line's
            why = error if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"
            logger.warning("reading %s broke off: %s", request.path, why)
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("hung up") from error


def byte_range(header: str | None, nbytes: int) -> tuple[int, int, int]:
    """``(start, stop, status)`` of the bytes asked for; one range, as in RFC 9110 §14."""
    if header is None:
        return 0, nbytes, 200
    match = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", header)
    if match is None or match.groups() == ("", ""):
        raise SettingsError(f"range {header[:80]!r} is not understood; one range of bytes, please")
    first, last = match.groups()
    start = int(first) if first else max(0, nbytes - int(last))
    stop = min(nbytes, int(last) + 1) if first and last else nbytes
    if start >= stop:
        raise ServerRefusedError(f"range {header!r} lies outside the file of {nbytes} bytes", status=416)
    return start, stop, 206


def _path_to(manifest: Manifest, span: FileSpan) -> str:
    """Where a reader finds what it was given: a file, or all files of a directory, whose path ends with a slash."""
    if span in manifest.files:
        return manifest.path_of(span)
    return f"{manifest.name}/" if manifest.files else manifest.data_path
