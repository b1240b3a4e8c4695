"""``lightning-spot serve``: runs a snapshot server."""

from __future__ import annotations

import argparse
import logging
import os

from lightning_spot.cli.arguments import takes_number, takes_size, takes_time
from lightning_spot.config import (
    UPLOAD_TIMEOUT_S,
    format_bytes,
    names_server,
    parse_listen,
    read_environment,
    why_no_place,
    without_password,
)
from lightning_spot.errors import SettingsError
from lightning_spot.http.program import ServerSettings, run_server
from lightning_spot.protocol.slot import host_memory_bytes
from lightning_spot.protocol.wire import DEFAULT_PORT
from lightning_spot.server.runs import check_prefix
from lightning_spot.untrusted import log_plainly


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``serve``."""
    listen = "address to listen on; beyond this host only with a token (default: %(default)s)"
    parser.add_argument("--listen", default=f"127.0.0.1:{DEFAULT_PORT}", metavar="HOST:PORT", help=listen)
    parser.add_argument("--tls-cert", metavar="FILE", help="speak TLS (spots://) with this certificate, in PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="key of that certificate")
    parser.add_argument("--client-ca", metavar="FILE", help="only serve clients with a certificate of this CA")
    parser.add_argument("--storage", metavar="URL", help="directory or fsspec URL below which each run is stored")
    allow = "directory or fsspec URL below which trainers may have their runs stored; may be given several times"
    parser.add_argument("--allow-storage", action="append", default=[], metavar="PREFIX", help=allow)
    memory, run_memory = "most memory for slots (default: 8GiB)", "most memory for the slots of one run (default: all)"
    parser.add_argument("--memory-limit", default=8 * 2**30, help=memory, **takes_size())
    parser.add_argument("--run-memory-limit", help=run_memory, **takes_size())
    parser.add_argument("--slots", help="most slots of each rank of a run (default: as many as fit)", **takes_number(1))
    drain = "on SIGTERM, serve trainers and upload for so long; a second signal ends that (default: 5min)"
    parser.add_argument("--drain-timeout", default=UPLOAD_TIMEOUT_S, help=drain, **takes_time())
    lines = "of the lines on standard error: with time and level, or one JSON object each (default: %(default)s)"
    parser.add_argument("--log-format", choices=["text", "json"], default="text", help=lines)


def serve(arguments: argparse.Namespace) -> int:
    """Run a server as the flags say."""
    log_plainly(logging.INFO, arguments.log_format)
    return run_server(_settings(arguments))


def _settings(arguments: argparse.Namespace) -> ServerSettings:
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
    return ServerSettings(
        host=host,
        port=port,
        flush_to=_absolute("--storage", arguments.storage) if arguments.storage is not None else None,
        allow=tuple(check_prefix(_absolute("--allow-storage", prefix)) for prefix in arguments.allow_storage),
        tls=(cert, key, client_ca) if cert is not None else None,
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
