"""Reads what a request brings, and trusts no number in it before it is within its bounds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from aiohttp import hdrs, web

from lightning_spot.config import HIGHEST_ATTEMPT, LARGEST, MOST_PART_BYTES
from lightning_spot.errors import ServerRefusedError, SettingsError
from lightning_spot.http.limits import ACCEPTED, Quota
from lightning_spot.protocol.wire import DIGEST_HEADER
from lightning_spot.snapshot.manifest import Manifest, snapshot_order
from lightning_spot.snapshot.parts import checksum
from lightning_spot.untrusted import SMALL_JSON_BYTES, integer, number, read_object, text

BODIES = web.AppKey("bodies", Quota)
"""Bytes of JSON bodies that are read at the moment."""

BODY = web.RequestKey("body", Mapping[str, Any])
"""The JSON object that a request carries."""

BODIES_BYTES = 512 * 1024 * 1024

LONGEST_WAIT_S = 3600.0
BODY_TIMEOUT_S = 30.0
"""The body of a request has so long to arrive."""
_UNCOUNTED_BYTES = 4096  # of each body: those of most requests have no more
_MOST_VALUES = 2**21  # in a body: each takes some 100 bytes, and a microsecond in which nobody else is answered
_MOST_SMALL_PARTS = 4096
_LEAST_PART_BYTES = 2**20
_FEW_FILES = 64  # of a shard: its writer has three
_LEAST_FILE_BYTES = 2**20  # of each beyond these


async def json_body(request: web.Request, most_bytes: int) -> dict[str, Any]:
    """The JSON object that a request carries; empty without a body, and for one that is not looked at.

    Raises:
        SettingsError: if it is none.
        ServerRefusedError: if it is too long, damaged, or comes too slowly, or its client sends too much at once.
    """
    if request.method in (hdrs.METH_GET, hdrs.METH_HEAD) or request.match_info.route.resource is None:
        return {}
    if (request.content_length or 0) > most_bytes:
        raise ServerRefusedError(f"the request's body is longer than {most_bytes} bytes", status=413)
    with ExitStack() as held:
        try:
            body = await asyncio.wait_for(_collect(request, most_bytes, held), BODY_TIMEOUT_S)
        except TimeoutError:
            text = f"the request's body did not come within {BODY_TIMEOUT_S:.0f} s"
            raise ServerRefusedError(text, status=408) from None
        if request.headers.get(DIGEST_HEADER, checksum(body)) != checksum(body):
            raise ServerRefusedError("the request's body was damaged on its way", status=400)
        if len(body) <= SMALL_JSON_BYTES:
            return read_object(body or b"{}")
        if sum(map(body.count, (b"[", b"{", b",", b":"))) > _MOST_VALUES:
            raise SettingsError(f"the request's body holds more than {_MOST_VALUES} values")
        return await asyncio.to_thread(read_object, body, most_bytes)


def only_same_host(request: web.Request) -> None:
    """Refuse a request from elsewhere.

    Raises:
        ServerRefusedError: if it is one.
    """
    if not request[ACCEPTED].is_near:
        raise ServerRefusedError("this request is for trainers on the server's own host (Unix socket)", status=403)


async def _collect(request: web.Request, most_bytes: int, held: ExitStack) -> bytes:
    """What comes of a body. It counts as held by its client as it comes: what is only announced takes no room."""
    bodies, client, body, counted = request.app[BODIES], request[ACCEPTED].client, bytearray(), _UNCOUNTED_BYTES
    async for piece in request.content.iter_any():
        body += piece
        if (more := len(body) - counted) > 0:
            held.enter_context(bodies.holding(client, more))
            counted += more
        if len(body) > most_bytes:
            raise ServerRefusedError(f"the request's body is longer than {most_bytes} bytes", status=413)
    return bytes(body)


def seconds(fields: Mapping[str, Any], name: str, default: float, high: float) -> float:
    """A duration in seconds; one beyond ``high`` is taken for ``high``.

    Raises:
        MalformedError: if it is no number from 0.
    """
    return min(number(fields, name, default, 0, LARGEST), high)


def identifier(fields: Mapping[str, Any], name: str) -> str:
    """32 hexadecimal digits, ``""`` if there are none.

    Raises:
        SettingsError: if it is something else.
    """
    value = text(fields, name)
    if value and not re.fullmatch(r"[0-9a-f]{32}", value):
        raise SettingsError(f"malformed request: {name} is not made of 32 hexadecimal digits")
    return value


def manifest(fields: Mapping[str, Any]) -> Manifest:
    """The manifest of a snapshot that comes over the network.

    Raises:
        CorruptSnapshotError: if it is none.
        SettingsError: if its parts are too large to be made up in memory, or so small that nobody could read of them,
            or if it has more files than any writer: what is held of them would be larger than its slot.
    """
    read = Manifest.from_dict(fields.get("manifest"))
    parts = -(-read.nbytes // read.part_bytes)
    if read.part_bytes > MOST_PART_BYTES or (parts > _MOST_SMALL_PARTS and read.part_bytes < _LEAST_PART_BYTES):
        raise SettingsError(
            f"{read.name} has {parts} parts of {read.part_bytes} bytes: they have from {_LEAST_PART_BYTES} to"
            f" {MOST_PART_BYTES}, and fewer only if they are no more than {_MOST_SMALL_PARTS}"
        )
    if len(read.files) > (most := _FEW_FILES + read.nbytes // _LEAST_FILE_BYTES):
        raise SettingsError(f"{read.name} of {read.nbytes} bytes has {len(read.files)} files, more than {most}")
    return read


def attempt_of(fields: Mapping[str, Any]) -> int:
    """The number of an attempt.

    Raises:
        MalformedError: if it is none.
    """
    return integer(fields, "attempt", None, 0, HIGHEST_ATTEMPT)


def committed(fields: Mapping[str, Any], attempt: int) -> str:
    """Name of the newest snapshot that counts, as an attempt says; ``""`` for one that it cannot know of yet.

    Raises:
        SettingsError: if it is no text.
    """
    name = text(fields, "committed")
    order = snapshot_order(name)
    return name if order is not None and order[0] <= attempt else ""
