"""How a server is run, and the flags of ``lightning-spot serve`` that say so."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_spot.config import (
    SERVER_IDLE_TIMEOUT_S,
    UPLOAD_TIMEOUT_S,
    check_number,
    format_bytes,
    names_server,
    parse_flag_bytes,
    parse_listen,
    parse_seconds,
    read_environment,
    why_no_place,
    without_password,
)
from lightning_spot.errors import SettingsError
from lightning_spot.protocol.record import ServerRecord
from lightning_spot.protocol.slot import host_memory_bytes
from lightning_spot.protocol.wire import DEFAULT_PORT
from lightning_spot.server.runs import check_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """How a server is run.

    Attributes:
        host: address to listen on, ``""`` for a Unix socket only.
        port: TCP port; 0 takes a free one.
        record: sockets of a local server.
        flush_to: directory, or URL of a bucket, below which runs are stored.
        allow: prefixes of durable URLs that trainers may have this server write to.
        tls: files with the certificate, its key, and the certificates that clients are verified by, if they are;
            ``None`` to speak in clear.
        memory_bytes: limit of the slots' memory.
        run_memory_bytes: limit of the slots' memory of one run; ``None`` for no such limit.
        slots: most slots of the ring; ``None`` for as many as fit the memory.
        server_idle_timeout_s: a local server ends after so long without a trainer.
        drain_timeout_s: how long SIGTERM waits for trainers and for uploads.
    """

    host: str = ""
    port: int = 0
    record: ServerRecord | None = None
    flush_to: str | None = None
    allow: tuple[str, ...] = ()
    tls: tuple[str, str, str | None] | None = None
    memory_bytes: int = 8 * 2**30
    run_memory_bytes: int | None = None
    slots: int | None = None
    server_idle_timeout_s: float = SERVER_IDLE_TIMEOUT_S
    drain_timeout_s: float = UPLOAD_TIMEOUT_S


class CheckedValue(argparse.Action):
    """A flag whose value is read and checked by ``read(text, flag)``, so that an error names the flag."""

    def __init__(self, *, read: Callable[[str, str], object], **how: Any) -> None:
        super().__init__(**how)
        self._read = read

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, _flag: object = None) -> None:
        """See :class:`argparse.Action`."""
        setattr(namespace, self.dest, self._read(values, self.option_strings[-1]))


def takes_time(least_s: float = 0, *, above: bool = False) -> dict[str, Any]:
    """For a flag that takes a duration such as ``90s`` or ``2h``: ``least_s`` or more, more only if ``above``."""

    def read(given: str, flag: str) -> float:
        check_number(flag, value_s := parse_seconds(given, f"{flag} "), least_s, above=above)
        return value_s

    return {"action": CheckedValue, "read": read, "metavar": "TIME"}


def takes_size(per: str = "") -> dict[str, Any]:
    """For a flag that takes a size, or a speed with ``per="/s"`` behind it."""

    def read(given: str, flag: str) -> int:
        return parse_flag_bytes(given.removesuffix(per), flag)

    return {"action": CheckedValue, "read": read, "metavar": f"SIZE{per}"}


def takes_number(least: float = 0, *, whole: bool = True) -> dict[str, Any]:
    """For a flag that takes a number, of ``least`` or more."""

    def read(given: str, flag: str) -> object:
        number: object = given
        with contextlib.suppress(ValueError):
            number = int(given) if whole else float(given)
        check_number(flag, number, least, whole=whole)
        return number

    return {"action": CheckedValue, "read": read, "metavar": "N"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``lightning-spot serve``."""
    parser.add_argument(
        "--listen",
        default=f"127.0.0.1:{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="address to listen on; beyond this host only with a token (default: %(default)s)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="speak TLS (spots://) with this certificate, in PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="key of that certificate")
    parser.add_argument("--client-ca", metavar="FILE", help="only serve clients with a certificate of this CA")
    parser.add_argument("--storage", metavar="URL", help="directory or fsspec URL below which each run is stored")
    parser.add_argument(
        "--allow-storage",
        action="append",
        default=[],
        metavar="PREFIX",
        help="directory or fsspec URL below which trainers may have their runs stored; may be given several times",
    )
    parser.add_argument(
        "--memory-limit", default=8 * 2**30, help="most memory for slots (default: 8GiB)", **takes_size()
    )
    parser.add_argument(
        "--run-memory-limit", help="most memory for the slots of one run (default: all)", **takes_size()
    )
    parser.add_argument("--slots", help="most slots of each rank of a run (default: as many as fit)", **takes_number(1))
    parser.add_argument(
        "--drain-timeout",
        default=UPLOAD_TIMEOUT_S,
        help="on SIGTERM, serve trainers and upload for so long; a second signal ends that (default: 5min)",
        **takes_time(),
    )
    parser.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="of the lines on standard error: with time and level, or one JSON object each (default: %(default)s)",
    )


def settings_from(arguments: argparse.Namespace) -> ServerSettings:
    """Check the flags.

    Raises:
        SettingsError: naming the flag and what is wrong with it.
    """
    if (whole := host_memory_bytes()) < arguments.memory_limit:
        raise SettingsError(
            f"--memory-limit {format_bytes(arguments.memory_limit)}: this machine (or container) has"
            f" {format_bytes(whole)} in all. Give what slots may take of it, and leave some for everything else"
        )
    has_token = bool(read_environment().secrets)
    host, port = parse_listen("--listen", arguments.listen, has_token=has_token)
    cert, key, client_ca = arguments.tls_cert, arguments.tls_key, arguments.client_ca
    if (cert is None) != (key is None) or (client_ca is not None and cert is None):
        raise SettingsError("--tls-cert and --tls-key are given together, and --client-ca with them only")
    flush_to = _absolute("--storage", arguments.storage) if arguments.storage is not None else None
    allow = tuple(check_prefix(_absolute("--allow-storage", prefix)) for prefix in arguments.allow_storage)
    tls = (cert, key, client_ca) if cert is not None else None
    return ServerSettings(
        host=host,
        port=port,
        flush_to=flush_to,
        allow=allow,
        tls=tls,
        memory_bytes=arguments.memory_limit,
        run_memory_bytes=arguments.run_memory_limit,
        slots=arguments.slots,
        drain_timeout_s=arguments.drain_timeout,
    )


def _absolute(flag: str, url: str) -> str:
    if why := why_no_place(url):  # it would be below the directory that the server happens to be started in
        raise SettingsError(f"{flag} {without_password(url)!r}: {why}")
    if names_server(url):
        raise SettingsError(
            f"{flag} {url}: a server stores runs in directories and buckets only. To keep each snapshot at two servers,"
            " pass servers=['spot://…', 'spot://…'] and replicas=2 to the trainer"
        )
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))
