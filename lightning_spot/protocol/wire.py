"""What both ends of the node protocol share: addresses, headers, errors as JSON, and the frames of part streams.

A stream of parts is an HTTP connection upgraded to raw bytes. A client asks ``POST /v1/uploads/ID/stream`` with
``Upgrade: spot-parts``. After ``101`` it sends frames: offset and length (two unsigned 64-bit big-endian numbers), then
the bytes; each is answered by the 16 bytes of its xxh3-128. The same bytes through the HTTP parser and the event loop
took nearly three times as long (measured on loopback, 2 cores).
"""

from __future__ import annotations

import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from lightning_spot import errors
from lightning_spot.errors import SettingsError, SpotError, TierError
from lightning_spot.image.parts import checksum

PROTOCOL_HEADER = "Spot-Protocol"
DIGEST_HEADER = "Spot-Digest"
"""xxh3-128 of a JSON body, a written file or a range that is read: neither TCP nor HTTP notices every flipped bit."""

TARGET_HEADER = "Spot-Target"
"""Checksum of a request's method and path: a flipped bit there must not read, write or delete something else."""

WANT_DIGEST_HEADER = "Want-Spot-Digest"
"""Asks for it where a range is read of at most so many bytes:"""
LONGEST_DIGESTED_BYTES = 16 * 1024 * 1024

DEFAULT_PORT = 7070

UPGRADE = "spot-parts"
FRAME = struct.Struct(">QQ")
DIGEST_BYTES = 16

_STATUS: dict[type[SpotError], int] = {
    errors.ProtocolMismatch: 426,
    errors.RingFull: 503,
    errors.SnapshotTooLarge: 413,
    errors.Fenced: 409,
    errors.RunBusy: 423,
    errors.SnapshotNotFound: 404,
    errors.CorruptSnapshot: 422,
    errors.SettingsError: 400,
}
_FIELDS = ("nbytes", "memory_bytes", "run", "attempt", "current", "pid", "part", "where")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node listens: a TCP host and port, or a Unix socket.

    Attributes:
        host: host name or IP address, ``""`` for a Unix socket.
        port: TCP port.
        socket_path: path of the Unix socket, ``""`` for TCP.
    """

    host: str = ""
    port: int = 0
    socket_path: str = ""

    def __str__(self) -> str:
        return f"spot://{self.host}:{self.port}" if self.host else f"unix:{self.socket_path}"


def parse_spot_url(url: str) -> tuple[Address, str]:
    """Split ``spot://host:port/run/path`` into an address and the path without its leading slash.

    Raises:
        SettingsError: if it is malformed.
    """
    help_text = (
        f"{url!r} is no node URL; write it like spot://10.0.0.5:{DEFAULT_PORT} or spot://host:7070/run/last.ckpt"
    )
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError as error:
        raise SettingsError(f"{help_text} ({error})") from error
    if parts.scheme != "spot" or not parts.hostname or parts.query or parts.fragment:
        raise SettingsError(help_text)
    if parts.username or parts.password:
        raise SettingsError(f"{parts.hostname}: secrets do not belong into URLs; set LIGHTNING_SPOT_TOKEN instead")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(host=host, port=port), parts.path.strip("/")


def error_status(error: SpotError) -> int:
    """HTTP status for an error."""
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def error_body(error: SpotError) -> dict[str, Any]:
    """JSON object for an error: its class, message and facts."""
    facts = {name: value for name in _FIELDS if (value := getattr(error, name, None)) not in (None, "")}
    return {"error": type(error).__name__, "message": str(error), "facts": facts}


def error_from_body(status: int, body: bytes, tier: str) -> SpotError:
    """The error a node answered with; only classes of our own tree are ever made."""
    if not body and status == 404:  # an answer to HEAD has no body
        return errors.SnapshotNotFound(f"{tier} has no such file")
    try:
        fields = json.loads(body)
        kind = getattr(errors, fields["error"])
        message, facts = str(fields["message"]), dict(fields.get("facts") or {})
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body[:200].decode("utf-8", "replace").strip()
        return errors.NodeRefused(f"{tier} answered {status}: {text}", tier=tier, status=status)
    if not (isinstance(kind, type) and issubclass(kind, SpotError)):
        return errors.NodeRefused(f"{tier} answered {status}: {message}", tier=tier, status=status)
    if kind is errors.NodeRefused:
        return errors.NodeRefused(message, tier=tier, status=status)
    if issubclass(kind, TierError):
        return kind(message, tier=tier)
    try:
        return kind(message, **{name: value for name, value in facts.items() if name in _FIELDS})
    except TypeError:
        return errors.NodeRefused(message, tier=tier, status=status)


def target_of(method: str, path: str) -> str:
    """Value of :data:`TARGET_HEADER` for a method and a path that may be quoted."""
    return checksum(f"{method} {unquote(path)}".encode())


def fill(connection: socket.socket, target: memoryview, within_s: float, *, at_boundary: bool = False) -> bool:
    """Receive exactly ``target`` within ``within_s`` seconds in all.

    Args:
        connection: where from.
        target: what to fill.
        within_s: seconds for all of it, however it is cut up.
        at_boundary: whether the peer may close before the first byte.

    Returns:
        ``False`` if the peer closed before the first byte and that is allowed.

    Raises:
        TimeoutError: if it takes longer.
        ConnectionError: if the peer closed in the middle.
    """
    deadline = time.monotonic() + within_s
    place = 0
    while place < len(target):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"only {place} of {len(target)} bytes came within {within_s:.0f} s")
        connection.settimeout(left)
        count = connection.recv_into(target[place:])
        if count == 0:
            if at_boundary and place == 0:
                return False
            raise ConnectionError("the peer closed the connection in the middle of a part")
        place += count
    return True
