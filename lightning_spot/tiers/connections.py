"""The event loops on which file systems reach stores. A connection on which no byte moves is given up.

The libraries' own time-outs do not suffice: gcsfs has none, none of them notices a store that takes no bytes, and what
is tried again may get the next dead connection of a pool. All of them connect through asyncio, so one bound holds there
for every library: it sees the connection lost, and sends the request again on a new one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from lightning_spot.config import without_password
from lightning_spot.say import say

logger = logging.getLogger(__name__)

T = TypeVar("T")

SILENT_S = 20.0
"""How long no byte may move on a connection. The libraries keep an unused one for 15 s at most."""

CONNECT_S = 10.0
_LOOKS = 8  # at each connection in SILENT_S; counted, so that a process that was stopped gives nothing up
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux only
_SENT_AND_RECEIVED_AGO = struct.Struct("=44xI4xI")
_ACKNOWLEDGED_AND_RECEIVED = struct.Struct("=120xQQ")  # since Linux 4.1


class StoreLoop(asyncio.SelectorEventLoop):
    """An event loop that bounds connecting, and gives up connections on which no byte moves for :data:`SILENT_S`.

    Args:
        store: scheme and bucket, for messages.

    Attributes:
        silent: what was given up last, ``""`` if nothing was.
    """

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store = store
        self.silent = ""
        self._count = 0
        # Asyncio resolves names in a pool whose threads Python waits for: minutes where no name server answers.
        self.set_default_executor(_Daemons())

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connect, within a bound."""
        try:
            await asyncio.wait_for(super().sock_connect(sock, address), CONNECT_S)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {CONNECT_S:.0f} s") from error

    async def create_connection(self, *arguments: Any, **more: Any) -> Any:
        """Connect, and watch the connection."""
        if more.get("ssl"):
            more.setdefault("ssl_handshake_timeout", SILENT_S)
        transport, protocol = await super().create_connection(*arguments, **more)
        if (moved := _moved(transport)) is not None:
            self._look_later(transport, protocol, moved, 0)
        return transport, protocol

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log what nobody waits for, such as clients that s3fs closes on another loop than theirs."""
        logger.debug("%s: %s", self._store, context.get("message"), exc_info=context.get("exception"))

    def _look_later(self, transport: Any, protocol: Any, moved: tuple[int, int], still: int) -> None:
        self.call_later(SILENT_S / _LOOKS, self._look, transport, protocol, moved, still)

    def _look(self, transport: Any, protocol: Any, before: tuple[int, int], still: int) -> None:
        if transport.is_closing() or (moved := _moved(transport)) is None:
            return
        still = still + 1 if moved == before else 0
        if still < _LOOKS:
            self._look_later(transport, protocol, moved, still)
            return
        if _is_awaited(transport, protocol, moved):
            self._warn()
        transport.abort()

    def _warn(self) -> None:
        self.silent = f"{self._store}: no byte moved for {SILENT_S:.0f} s"
        self._count += 1
        say(
            logging.WARNING,
            "storage-silent",
            "{about} ({count} so far). The request is sent again on a new connection. If this repeats, check the store"
            " and the network to it.",
            about=self.silent,
            count=self._count,
        )


def loop_of(url: str) -> StoreLoop:
    """The running loop of a URL's bucket in this process; started if there is none."""
    key = _key(url)
    if (loop := _LOOPS.get(key)) is None:
        made = StoreLoop(key[1])
        threading.Thread(target=made.run_forever, name="spot-store-loop", daemon=True).start()
        if (loop := _LOOPS.setdefault(key, made)) is not made:
            made.call_soon_threadsafe(made.stop)
    return loop


def silent(url: str) -> str:
    """What was given up last at a URL's bucket by this process, ``""`` if nothing was."""
    loop = _LOOPS.get(_key(url))
    return loop.silent if loop is not None else ""


_LOOPS: dict[tuple[int, str], StoreLoop] = {}
"""By process (none runs in a forked child) and bucket."""


def _key(url: str) -> tuple[int, str]:
    return os.getpid(), "/".join(without_password(url).split("/")[:3])


def _moved(transport: Any) -> tuple[int, int] | None:
    """Bytes that the other end has acknowledged, and that it has sent; ``None`` if the kernel does not count them."""
    facts = _facts(transport, _ACKNOWLEDGED_AND_RECEIVED)
    return facts if facts is not None and facts[0] else None  # what counts has counted the handshake


def _is_awaited(transport: Any, protocol: Any, moved: tuple[int, int]) -> bool:
    """Whether a request is under way: the last byte went out, or an answer is unfinished, as aiohttp tells."""
    sent_ago, received_ago = _facts(transport, _SENT_AND_RECEIVED_AGO) or (0, 0)
    return not moved[1] or sent_ago < received_ago or bool(getattr(protocol, "should_close", False))


def _facts(transport: Any, which: struct.Struct) -> tuple[int, int] | None:
    connection = transport.get_extra_info("socket")
    if _TCP_INFO is None or connection is None:
        return None
    try:
        facts = which.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256))
    except (OSError, struct.error):  # closed, no TCP, or an older kernel
        return None
    return int(facts[0]), int(facts[1])


class _Daemons(ThreadPoolExecutor):
    """No pool at all, though asyncio takes nothing else: each call has a daemon thread of its own."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn``."""
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=call, name="spot-asyncio", daemon=True).start()
        return future
