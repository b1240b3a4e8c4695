"""How a server is run, and the flags of ``lightning-spot serve`` that say so."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

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


def seconds(text: str) -> float:
    """A duration with a unit, such as ``90s``, ``10min``, ``2h`` or ``3d``; only 0 does without.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    try:
        return parse_seconds(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_time(add_argument: Callable[..., object], flag: str, default_s: float, text: str) -> None:
    """Add a flag that takes a duration, such as ``90s`` or ``2h``, by this method of a parser or of a group."""
    add_argument(flag, type=seconds, default=default_s, metavar="TIME", help=text)


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
        "--memory-limit", default="8GiB", metavar="SIZE", help="most memory for slots (default: %(default)s)"
    )
    parser.add_argument(
        "--run-memory-limit", metavar="SIZE", help="most memory for the slots of one run (default: all)"
    )
    parser.add_argument(
        "--slots", type=int, metavar="N", help="most slots of each rank of a run (default: as many as fit)"
    )
    drain = "on SIGTERM, serve trainers and upload for so long; a second signal ends that (default: 5min)"
    add_time(parser.add_argument, "--drain-timeout", UPLOAD_TIMEOUT_S, drain)
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
    if arguments.slots is not None and arguments.slots < 1:
        raise SettingsError(f"--slots {arguments.slots}: a ring has at least one slot")
    check_number("--drain-timeout", arguments.drain_timeout, 0)
    memory_bytes, run_memory = parse_flag_bytes(arguments.memory_limit, "--memory-limit"), arguments.run_memory_limit
    if (whole := host_memory_bytes()) < memory_bytes:
        raise SettingsError(
            f"--memory-limit {arguments.memory_limit}: this machine (or container) has {format_bytes(whole)} in all."
            " Give what slots may take of it, and leave some for everything else"
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
        memory_bytes=memory_bytes,
        run_memory_bytes=parse_flag_bytes(run_memory, "--run-memory-limit") if run_memory is not None else None,
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
