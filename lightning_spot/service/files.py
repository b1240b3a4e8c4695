"""The service's routes below ``/v1/files``: a run as a folder of files, in memory and at the tier below as one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import xxhash
from aiohttp import hdrs, web

from lightning_spot.config import SEND_BYTES
from lightning_spot.errors import NodeRefused, SettingsError, SnapshotNotFound, SpotError
from lightning_spot.image.files import MODEL_FILE, FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.image.parts import checksum
from lightning_spot.memory.node import Node
from lightning_spot.memory.paths import LAST, resolve
from lightning_spot.memory.slots import Slot
from lightning_spot.protocol.wire import DIGEST_HEADER, LONGEST_DIGESTED_BYTES, WANT_DIGEST_HEADER
from lightning_spot.service.below import Below, Entry, open_below
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
        """Every file of a run, at whichever tier."""
        text = request.match_info["run"]
        key, directory = self._node.registry.key(text), self._directory(text)
        in_memory = self._in_memory(key)  # before what is below: what moves there meanwhile is seen at one of the two
        entries = {} if directory is None else await asyncio.to_thread(self._below, directory, key)
        known = bool(entries) or key in self._node.registry.runs
        listed = {path: _as_json(entry, [], ["below"]) for path, entry in entries.items()} | in_memory
        if not listed and not known:
            raise SnapshotNotFound(f"this node has no run {text!r}")
        last = LAST if LAST in listed else self._newest(list(listed))
        return web.json_response({"files": [listed[path] for path in sorted(listed)], "last": last})

    def _in_memory(self, key: str) -> dict[str, dict[str, object]]:
        listed = {}
        for slot, manifest in self._node.ring.readable(key):
            for span in manifest.spans:
                entry = Entry(manifest.path_of(span), span.nbytes, manifest.created_unix_s)
                listed[entry.path] = {**_as_json(entry, slot.dirty, slot.safe), "step": manifest.step}
        return listed

    def _below(self, directory: Below, key: str) -> dict[str, Entry]:
        hidden = self._hidden(key)  # before it is listed: what is gone meanwhile may be listed still
        return {entry.path: entry for entry in directory.entries() if _name(entry.path) not in hidden}

    def _hidden(self, key: str) -> set[str]:
        """Names of what was removed here, and not below yet."""
        return {manifest.name for _url, manifest in self._node.flusher.deletions(key)}

    def _newest(self, paths: list[str]) -> str | None:
        """Path of the newest exact snapshot, or of its directory if that is of several files.

        Who reads it is told of no other kind.
        """
        names = {_name(path) for path in paths if "/" in path}
        orders = {name: order for name in names if (order := snapshot_order(name)) is not None and order[2]}
        newest = max(orders, key=orders.__getitem__, default=None)
        one_file = f"{newest}/{MODEL_FILE}"
        return one_file if one_file in paths else newest

    def _directory(self, text: str) -> Below | None:
        """Where what left memory of a run is, if anywhere."""
        key, url = self._node.registry.key(text), self._node.below(text)
        if url is None:
            return None
        routes = self._node.routes
        return open_below(url, routes.prefixes, lambda: routes.check_readable(key, url))

    # -- reading --------------------------------------------------------------------------------------------------

    async def read(self, request: web.Request) -> web.StreamResponse:
        """``GET`` and ``HEAD``: from memory, else from the tier below."""
        text, path = request.match_info["run"], request.match_info["path"].strip("/")
        found = await self._find(text, path)
        try:
            return await self._answer(request, path, *found)
        except SnapshotNotFound:  # it left memory just now; it may be below
            return await self._answer(request, path, *await self._find(text, path))

    async def _answer(
        self,
        request: web.Request,
        path: str,
        slot: Slot | None,
        manifest: Manifest,
        directory: Below | None,
    ) -> web.StreamResponse:
        if path.endswith("manifest.json"):
            return web.Response(text=manifest.to_json(), content_type="application/json")
        etag = f'"{xxhash.xxh3_128_hexdigest(manifest.to_json().encode())}"'
        if request.headers.get(hdrs.IF_MATCH, etag) != etag:
            raise NodeRefused(f"{path} was replaced while it was being read", status=412)
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
        elif slot is not None:
            with self._node.ring.reading(slot, manifest) as image:
                if with_digest:
                    response.headers[DIGEST_HEADER] = checksum(image[start:stop])
                await response.prepare(request)
                with _hanging_up(request):
                    await self._send(request, response, slot, image, start, stop)
        elif directory is not None:
            parts = directory.read(manifest, start, stop)
            if with_digest:
                whole = b"".join(await asyncio.to_thread(list, parts))
                parts, response.headers[DIGEST_HEADER] = iter([whole]), checksum(whole)
            await self._send_parts(request, response, parts)
        await response.write_eof()
        return response

    async def _find(self, text: str, path: str) -> tuple[Slot | None, Manifest, Below | None]:
        """What a path names, in memory or below."""
        key, directory = self._node.registry.key(text), self._directory(text)
        try:
            return *resolve(self._node.ring, key, path), None
        except SnapshotNotFound as error:
            missing = error
        if path == LAST and (alias := await self._alias(key, directory)) is not None:
            if snapshot_order(alias) is not None:
                raise SnapshotNotFound(
                    f"the newest snapshot of run {text!r} is a directory of several files: read it at {alias}/"
                    f" instead of {LAST}, or make one file of it with lightning-spot pull"
                )
            return await self._find(text, alias)
        if directory is None or _name(path) in self._hidden(key):
            raise missing
        manifest = await asyncio.to_thread(directory.manifest, path)
        return None, manifest, directory

    async def _alias(self, key: str, directory: Below | None) -> str | None:
        """Path of what ``last.ckpt`` stands for; ``None`` if it is a file below, or there is nothing."""
        paths = list(self._in_memory(key))
        if directory is not None:
            try:
                paths += await asyncio.to_thread(self._below, directory, key)
            except SpotError as error:
                if not paths:
                    raise
                logger.warning("%s; last.ckpt is the newest snapshot in memory", error)
        return None if LAST in paths else self._newest(paths)

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

    async def _send_parts(self, request: web.Request, response: web.StreamResponse, parts: Iterator[bytes]) -> None:
        data = await asyncio.to_thread(next, parts, b"")  # an error shows before anything is promised
        await response.prepare(request)
        with _hanging_up(request):
            while data:
                for place in range(0, len(data), SEND_BYTES):
                    await asyncio.wait_for(response.write(data[place : place + SEND_BYTES]), _SEND_TIMEOUT_S)
                data = await asyncio.to_thread(next, parts, b"")

    # -- removing -------------------------------------------------------------------------------------------------

    async def remove(self, request: web.Request) -> web.Response:
        """``DELETE``: a snapshot or file, in memory and below; never through the alias ``last.ckpt``.

        With ``unseen`` in its body a file, which is not looked for below: nothing waits for the tier.
        """
        text, path = request.match_info["run"], request.match_info["path"].strip("/")
        info = self._node.registry.info(self._node.registry.key(text))
        if info is not None and info.durable_url is not None:  # once it is queued, it may be done for a later attempt
            await asyncio.to_thread(self._node.routes.check_readable, info.key, info.durable_url)
        if (await json_body(request)).get("unseen") is True:
            await asyncio.to_thread(self._node.remove, text, path, unseen=True)
            return web.json_response({})
        slot, manifest, directory = await self._find(text, path)
        if path not in (manifest.name, manifest.data_path):
            raise NodeRefused(
                f"{path!r} is only another name, or one file, of {manifest.data_path}; remove that by its own name",
                status=409,
            )
        if slot is not None:
            await asyncio.to_thread(self._node.remove, text, manifest.name)
        elif directory is not None:
            self._node.flusher.delete(directory.url, manifest)
        return web.json_response({})


@contextmanager
def _hanging_up(request: web.Request) -> Iterator[None]:
    """Break the connection when a body that was begun cannot be ended: nothing else tells the reader."""
    try:
        yield
    except Exception as error:  # whatever it is: an answer that says so would be taken for the rest of the body
        if isinstance(error, asyncio.TimeoutError):
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
        raise NodeRefused(f"range {header!r} lies outside the file of {nbytes} bytes", status=416)
    return start, stop, 206


def _name(path: str) -> str:
    """Name of the snapshot or file that a path below a run belongs to."""
    return path.partition("/")[0]


def _path_to(manifest: Manifest, span: FileSpan) -> str:
    """Where a reader finds what it was given: a file, or all files of a directory, whose path ends with a slash."""
    if span in manifest.files:
        return manifest.path_of(span)
    return f"{manifest.name}/" if manifest.files else manifest.data_path


def _as_json(entry: Entry, dirty: list[str], safe: list[str]) -> dict[str, object]:
    return {
        "path": entry.path,
        "nbytes": entry.nbytes,
        "created_unix_s": entry.created_unix_s,
        "dirty": list(dirty),
        "safe": list(safe),
    }
