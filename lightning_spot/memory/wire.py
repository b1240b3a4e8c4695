"""What both ends of the node protocol share: addresses, headers, and errors as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lightning_spot import errors
from lightning_spot.errors import SettingsError, SpotError, TierError

PROTOCOL_HEADER = "Spot-Protocol"
DEFAULT_PORT = 7070

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
