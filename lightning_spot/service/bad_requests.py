"""What aiohttp logs of requests that it cannot read: counted, where it writes a traceback with the header in it."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

from lightning_spot.protocol.counted_log import CountedLog

THIS_HOST = "this host"
"""Address of those who come by a Unix socket."""


def request_logger(counted: CountedLog) -> logging.Logger:
    """A logger for aiohttp's server. It belongs to one server, and no settings of logging reach it."""
    made = logging.Logger("aiohttp.server", logging.DEBUG)  # aiohttp logs what is no HTTP at all at that level
    made.addHandler(_Counting(counted))
    return made


class _Counting(logging.Handler):
    def __init__(self, counted: CountedLog) -> None:
        super().__init__()
        self._counted = counted

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            address = record.args[0] if isinstance(record.args, tuple) and record.args else None
            self._counted.add("bad requests", str(address or THIS_HOST))
        elif record.levelno >= logging.WARNING:
            self._counted.add_error(f"errors of the HTTP server: {record.msg}", error)
