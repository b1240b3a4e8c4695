"""What shows who may do what at a snapshot server: secrets, tokens for some runs, certificates.

A scoped token is ``spot1.CLAIMS.SIGNATURE``. The claims are JSON: the prefix of runs, the rights, the time it expires.
The signature is the HMAC-SHA256 of what stands before it, by a secret of the server. Both are in URL-safe Base64. A
server keeps no list of tokens: to withdraw one before it expires, change the secret.

Files are read again once they have changed.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import functools
import hashlib
import hmac
import json
import logging
import os
import ssl
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_spot.config import SHORTEST_TOKEN, check_run_name, read_environment, read_secrets, token_file
from lightning_spot.errors import MalformedError, ServerRefusedError, SettingsError
from lightning_spot.say import recovered, say
from lightning_spot.untrusted import MOST_UNIX_S, file_name, integer, read_object, text

Made = TypeVar("Made")

_VERSION = "spot1"
_SEPARATORS = "._=+-"  # within the name of a run


class Reloaded(Generic[Made]):
    """What is made of files; made again when one of them has changed. What cannot be made leaves the last as it is.

    Args:
        paths: of the files.
        make: makes it.

    Raises:
        SettingsError: if it cannot be made now.
    """

    def __init__(self, paths: Iterable[str], make: Callable[[], Made]) -> None:
        self._paths, self._make = tuple(paths), make
        self._seen = self._look()
        self._made = make()

    def __call__(self) -> Made:
        """What the files make now."""
        if self._paths and (seen := self._look()) != self._seen:
            self._seen, about = seen, " and ".join(self._paths)
            try:
                self._made = self._make()
            except SettingsError as error:
                text = "{error}. What was read before stays in use. Fix the file"
                say(logging.WARNING, "credentials-not-read", text, about=about, error=error)
            else:
                recovered("credentials-not-read", "{about} can be read again", about=about)
        return self._made

    def _look(self) -> list[tuple[int, ...]]:
        """One version of the files, whatever makes another: a write, a rename, a link that leads elsewhere."""
        found: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                at = os.stat(path)
            except OSError:
                found.append(())
            else:
                found.append((at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns))
        return found


# -- secrets and tokens -----------------------------------------------------------------------------------------------


def current_secrets() -> tuple[str, ...]:
    """The secrets of this process now, see :func:`~lightning_spot.config.read_secrets`: the first is sent.

    The environment may change, too: a trainer hands its credentials to the local server.

    Raises:
        SettingsError: if they cannot be used, and could not before.
    """
    path = token_file()
    return _secrets_in(path)() if path is not None else read_secrets()


@functools.cache
def _secrets_in(path: str) -> Reloaded[tuple[str, ...]]:
    return Reloaded([path], read_secrets)


class Rights(enum.Enum):
    """What a token lets its holder do with its runs."""

    READ = "read"
    """List them, and read their snapshots."""

    WRITE = "write"
    """Also open them and upload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What a token holds for.

    Attributes:
        prefix: a run is covered if this is its name, or if its name goes on after it with one of ``. _ = + -``:
            ``run-1`` covers ``run-1`` and ``run-1-fit-2``, but not ``run-10``.
        rights: what may be done with these runs.
        expires_unix_s: from when on it holds no more.
    """

    prefix: str
    rights: Rights
    expires_unix_s: int

    def covers(self, name: str) -> bool:
        """Whether a run of that name is meant."""
        rest = name.removeprefix(self.prefix)
        return name.startswith(self.prefix) and (not rest or self.prefix[-1] in _SEPARATORS or rest[0] in _SEPARATORS)

    def token(self, secret: str) -> str:
        """A token for it.

        Raises:
            SettingsError: if the prefix can be that of no run, or the secret is so short that a holder could guess it.
        """
        if len(secret) < SHORTEST_TOKEN:
            raise SettingsError(
                f"the secret has fewer than {SHORTEST_TOKEN} characters: whoever holds a token could find it out. Make"
                " one with: openssl rand -hex 16"
            )
        claims = {
            "prefix": check_run_name(self.prefix),
            "rights": self.rights.value,
            "expires": self.expires_unix_s,
        }
        signed = f"{_VERSION}.{_encoded(json.dumps(claims, separators=(',', ':')).encode())}"
        return f"{signed}.{_signature(signed, secret)}"


def scope_of(given: str, secrets: Iterable[str], now_unix_s: float | None = None) -> Scope | None:
    """What a token holds for; ``None`` for a secret itself, which holds for everything.

    Args:
        given: what a request shows.
        secrets: of the server.
        now_unix_s: the time; default now.

    Raises:
        ServerRefusedError: if no such token is given.
    """
    signed, _, signature = given.rpartition(".")
    is_secret = is_signed = False
    for secret in secrets:  # all of them, in constant time
        is_secret |= hmac.compare_digest(given.encode(errors="replace"), secret.encode())
        is_signed |= hmac.compare_digest(signature.encode(errors="replace"), _signature(signed, secret).encode())
    if is_secret:
        return None
    if not (given and is_signed and signed.startswith(f"{_VERSION}.")):
        wrong = "has another token than the one that came" if given else "asks for a token"
        raise ServerRefusedError(
            f"this server {wrong}: set LIGHTNING_SPOT_TOKEN (or LIGHTNING_SPOT_TOKEN_FILE) to the one it was"
            " started with, or to one made by lightning-spot token",
            status=401,
        )
    scope = _read_claims(signed.partition(".")[2])
    if (time.time() if now_unix_s is None else now_unix_s) >= scope.expires_unix_s:
        raise ServerRefusedError(
            "this token has expired: set LIGHTNING_SPOT_TOKEN to a new one, made by lightning-spot token", status=401
        )
    return scope


def _read_claims(encoded: str) -> Scope:
    """What a secret has signed: all the same, a later version may write something else."""
    try:
        fields = read_object(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)))
        return Scope(
            prefix=check_run_name(file_name(fields, "prefix", None)),
            rights=Rights(text(fields, "rights", None)),
            expires_unix_s=integer(fields, "expires", None, 0, int(MOST_UNIX_S)),
        )
    except (MalformedError, SettingsError, ValueError) as error:
        raise ServerRefusedError(
            "this token's claims cannot be read: make one with the lightning-spot of the server", status=401
        ) from error


def _signature(signed: str, secret: str) -> str:
    return _encoded(hmac.digest(secret.encode(), signed.encode(errors="replace"), hashlib.sha256))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


# -- certificates -----------------------------------------------------------------------------------------------------


def server_context(cert: str, key: str, client_ca: str | None) -> Reloaded[ssl.SSLContext]:
    """How a server speaks TLS.

    Args:
        cert: file with its certificate, and those between it and the CA.
        key: file with its key.
        client_ca: file with the certificates that clients are verified by; ``None`` to serve those without, too.

    Raises:
        SettingsError: if a file cannot be used.
    """

    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.num_tickets = 0  # a client takes what comes unasked for the end of the connection
        context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
        _load_pair(context, f"--tls-cert {cert} and --tls-key {key}", cert, key)
        if client_ca is not None:
            _load_ca(context, f"--client-ca {client_ca}", client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return Reloaded([cert, key, *([client_ca] if client_ca is not None else [])], make)


def client_context() -> ssl.SSLContext:
    """How this process speaks TLS to servers, whose certificates and names it verifies.

    Raises:
        SettingsError: if a file that the environment names cannot be used.
    """
    environment = read_environment()
    return _client_files(environment.ca_file, environment.client_cert)()


@functools.cache
def _client_files(ca: str | None, cert: str | None) -> Reloaded[ssl.SSLContext]:
    def make() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies certificates and host names
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if ca is None:
            context.load_default_certs()
        else:
            _load_ca(context, f"LIGHTNING_SPOT_CA={ca!r}", ca)
        if cert is not None:
            _load_pair(context, f"LIGHTNING_SPOT_CLIENT_CERT={cert!r}", cert, None)
        return context

    return Reloaded(filter(None, [ca, cert]), make)


def _load_pair(context: ssl.SSLContext, name: str, cert: str, key: str | None) -> None:
    def no_password() -> str:
        raise SettingsError(f"{name}: the key has a password, which nobody can be asked for. Store it without")

    with _read(name, "certificate with its key", cert, key):
        context.load_cert_chain(cert, key, no_password)


def _load_ca(context: ssl.SSLContext, name: str, ca: str) -> None:
    with _read(name, "certificates", ca):
        context.load_verify_locations(ca)


@contextlib.contextmanager
def _read(name: str, what: str, *paths: str | None) -> Iterator[None]:
    """Files are read. They are again when they have changed: a pipe brings it once, or keeps who reads it waiting."""
    try:
        if pipe := next((path for path in filter(None, paths) if stat.S_ISFIFO(os.stat(path).st_mode)), None):
            raise SettingsError(f"{name}: {pipe} is a pipe, which cannot be read again. Give a file")
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
        raise SettingsError(f"{name}: no {what} can be read ({why})") from error
