"""What both ends of the server protocol share: addresses, headers, errors as JSON, and the frames of part streams.

A stream of parts is an HTTP connection upgraded to raw bytes. A client asks ``POST /v1/uploads/ID/stream`` with
``Upgrade: spot-parts``. After ``101`` it sends frames, one for each part: a :class:`Frame`, then its content. Each is
answered by the 16 bytes of the xxh3-128 of the part as it now lies there. The same bytes through the HTTP parser and
the event loop took nearly three times as long (measured on loopback, 2 cores).

A part may come in three ways. Whole. As what it differs in from the same part of the *base*, the newest snapshot of the
run that the server holds, which it names in its answer to a request for a slot. Or not at all, if it is the same there.
What a server makes of a base counts only if it has the checksum that the frame announces; if not, the answer says so,
and the part is sent whole.
"""

from __future__ import annotations

import contextlib
import enum
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote, urlsplit

from lightning_spot import errors, untrusted
from lightning_spot.config import SERVER_SCHEMES, without_password
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    MalformedError,
    SettingsError,
    SnapshotFailedError,
    SpotError,
    TierError,
    TierReason,
)
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum

PROTOCOL_HEADER = "Spot-Protocol"
DIGEST_HEADER = "Spot-Digest"
"""xxh3-128 of a JSON body or a range that is read: neither TCP nor HTTP notices every flipped bit."""

TARGET_HEADER = "Spot-Target"
"""Checksum of a request's method and path: a flipped bit there must not read, write or delete something else."""

ATTEMPT_HEADER = "Spot-Attempt"
"""On whose behalf a run is changed, see :func:`attempt_text`: only its attempt may, whoever has the server's secret."""

WANT_DIGEST_HEADER = "Want-Spot-Digest"
"""Asks for it where a range is read of at most so many bytes:"""
LONGEST_DIGESTED_BYTES = 16 * 1024 * 1024

DEFAULT_PORT = 7070

UPGRADE = "spot-parts"
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES).hex()
"""Answers a frame of which no part could be made."""

_OTHER_PROTOCOL = 426
_STATUS_OF_REASON: dict[errors.Reason, int] = {
    TierReason.PROTOCOL: _OTHER_PROTOCOL,
    TierReason.TOO_MANY_STREAMS: 503,
    TierReason.UNCLAIMED: 403,
    FailureReason.RING_FULL: 503,
    FailureReason.TOO_LARGE: 413,
}
_STATUS: dict[type[SpotError], int] = {
    errors.FencedError: 409,
    errors.RunBusyError: 423,
    errors.SnapshotNotFoundError: 404,
    errors.CorruptSnapshotError: 422,
    errors.SettingsError: 400,
}
KnownReason = TypeVar("KnownReason", bound=errors.Reason)

_FACTS: dict[str, type] = {"current": int, "part": int, "where": str}
"""Attributes of errors that are sent with them, besides their reason."""


class PartKind(enum.IntEnum):
    """What a frame holds of its part."""

    WHOLE = 0
    SAME = 1
    DELTA = 2


_FRAME = struct.Struct(f">BQQQ{DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Frame:
    """What precedes the content of a part on a stream.

    Attributes:
        kind: what the content is: the part, nothing, or a delta (see :mod:`~lightning_spot.snapshot.delta`).
        start: first byte of the part in the file.
        nbytes: length of the part.
        content_bytes: length of the content.
        digest: xxh3-128 of the part.
    """

    kind: PartKind
    start: int
    nbytes: int
    content_bytes: int
    digest: str

    SIZE: ClassVar[int] = _FRAME.size

    def pack(self) -> bytes:
        """The frame as bytes."""
        return _FRAME.pack(self.kind, self.start, self.nbytes, self.content_bytes, bytes.fromhex(self.digest))

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Frame:
        """Read a frame of :attr:`SIZE` bytes.

        Raises:
            CorruptSnapshotError: if it holds something unknown.
        """
        kind, start, nbytes, content_bytes, digest = _FRAME.unpack(data)
        if kind not in tuple(PartKind):
            raise errors.CorruptSnapshotError(f"a frame of kind {kind} is none")
        return cls(PartKind(kind), start, nbytes, content_bytes, digest.hex())


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a TCP host and port, or a Unix socket.

    Attributes:
        host: host name or IP address, ``""`` for a Unix socket.
        port: TCP port.
        socket_path: path of the Unix socket, ``""`` for TCP.
        tls: whether it is spoken to by TLS.
    """

    host: str = ""
    port: int = 0
    socket_path: str = ""
    tls: bool = False

    def __str__(self) -> str:
        return (
            f"{'spots' if self.tls else 'spot'}://{self.host}:{self.port}" if self.host else f"unix:{self.socket_path}"
        )


def parse_spot_url(url: str) -> tuple[Address, str]:
    """Split ``spot://host:port/run/path``, or ``spots://…``, into an address and the path without its leading slash.

    Raises:
        SettingsError: if it is malformed.
    """
    help_text = f"{without_password(url)!r} is no server URL; write it like spot://10.0.0.5:{DEFAULT_PORT} or spot://host:7070/run/last.ckpt"
    try:
        parts = urlsplit(url)
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise SettingsError(f"{help_text} ({error})") from error
    if parts.scheme not in SERVER_SCHEMES or not parts.hostname or not port or parts.query or parts.fragment:
        raise SettingsError(help_text)
    if parts.username or parts.password:
        raise SettingsError(f"{parts.hostname}: secrets do not belong into URLs; set LIGHTNING_SPOT_TOKEN instead")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(host=host, port=port, tls=parts.scheme == "spots"), parts.path.strip("/")


def error_status(error: SpotError) -> int:
    """HTTP status for an error."""
    if isinstance(error, errors.ServerRefusedError) and error.status:
        return error.status
    for reason, status in _STATUS_OF_REASON.items():
        if reason.caused(error):
            return status
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def error_body(error: SpotError) -> dict[str, Any]:
    """JSON object for an error: its class, message and facts."""
    facts = _facts(vars(error))
    if isinstance(error, SnapshotFailedError | TierError):
        facts["reason"] = error.reason.value
    return {"error": type(error).__name__, "message": str(error), "facts": facts}


def error_from_body(status: int, body: bytes, tier: str) -> SpotError:
    """The error a server answered with; only classes of our own tree are ever made."""
    try:
        fields = untrusted.read_object(body)
        kind = getattr(errors, untrusted.text(fields, "error", None), None)
        message = untrusted.plain(untrusted.text(fields, "message", None, most=len(body)), untrusted.LONGEST_TEXT)
        said = untrusted.as_object(fields.get("facts", {}))
    except errors.MalformedError:
        # Its text is not quoted: one that answers a bad request may quote the token that came with it.
        why = f"{tier} answered {status}, which no snapshot server of this version says: is it the right address?"
        return errors.ServerRefusedError(why, tier=tier, status=status)
    refused = TierReason.PROTOCOL if status == _OTHER_PROTOCOL else TierReason.REFUSED
    if not (isinstance(kind, type) and issubclass(kind, SpotError)):
        kind, message, said = errors.ServerRefusedError, f"{tier} answered {status}: {message}", {}
    facts: dict[str, Any] = {"tier": tier} if issubclass(kind, TierError) else _facts(said)
    if kind is errors.ServerRefusedError:
        facts |= {"status": status, "reason": _reason(said, refused)}
    elif kind is TierError:
        facts["reason"] = _reason(said, TierReason.FAILED)
    elif kind is SnapshotFailedError:
        facts["reason"] = _reason(said, FailureReason.UNEXPECTED)
    try:
        return kind(message, **facts)
    except TypeError:
        return errors.ServerRefusedError(message, tier=tier, status=status)


@contextlib.contextmanager
def answered(tier: str) -> Iterator[None]:
    """What a server has answered is read: whatever is missing, or is something else, is one error.

    Raises:
        ServerUnreachableError: it is no answer of a server of this version.
    """
    try:
        yield
    except (CorruptSnapshotError, MalformedError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, SpotError) and not isinstance(error, CorruptSnapshotError | MalformedError):
            raise
        why = untrusted.plain(f"{type(error).__name__}: {error}")
        raise errors.ServerUnreachableError(
            f"{tier} gave an answer of no snapshot server of this version ({why}); is it the right address?",
            tier=tier,
        ) from error


def file_path(said: object) -> str:
    """The path of a file below a run, as a server says it: whoever copies it stays below where it is copied to.

    Raises:
        MalformedError: if it is no such path.
    """
    path = untrusted.line({"path": said}, "path", None)
    if not path or any(name in ("", ".", "..") for name in path.split("/")):
        raise MalformedError(f"{untrusted.plain(path)} is no path below a run")
    return path


def _reason(said: dict[str, Any], other: KnownReason) -> KnownReason:
    """The reason of an error; ``other`` for one that only another version knows."""
    return next((reason for reason in type(other) if reason.value == said.get("reason")), other)


def _facts(fields: dict[str, Any]) -> dict[str, Any]:
    """Those facts of an error that are what they should be."""
    given = {name: fields[name] for name, kind in _FACTS.items() if type(fields.get(name)) is kind}
    return {name: untrusted.plain(value) if isinstance(value, str) else value for name, value in given.items()}


def attempt_text(attempt: int, token: str) -> str:
    """Value of :data:`ATTEMPT_HEADER`: the number of an attempt, and its token."""
    return f"{attempt}:{quote(token, safe='')}"


def read_attempt(header: str) -> tuple[int, str]:
    """What :func:`attempt_text` has made of an attempt; 0 and ``""`` where it is something else."""
    attempt, _, token = header.partition(":")
    return (int(attempt), unquote(token)) if re.fullmatch("[0-9]{1,10}", attempt) else (0, "")


def etag_of(manifest: Manifest) -> str:
    """Names one version of the files of a snapshot, in HTTP: another one of its name has another."""
    return f'"{checksum(manifest.to_json().encode())}"'


def target_of(method: str, path: str) -> str:
    """Value of :data:`TARGET_HEADER` for a method and a path that may be quoted."""
    return checksum(f"{method} {unquote(path)}".encode())
