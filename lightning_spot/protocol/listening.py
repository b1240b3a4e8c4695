"""A server of a few connections within a trainer: on a thread of its own, for who knows its port.

Ranks may be silent for hours, and what is between two hosts (address translation, a firewall) forgets connections that
are, without a word to either. So the kernel asks now and then whether the other end is there: :func:`keep_alive`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)

_PROBES = 3
_UNLIMITED = 2**30
_AGAIN_S = 0.1


def port_of_all_interfaces() -> socket.socket:
    """A port that listens at all addresses of this host, of either version of IP."""
    with contextlib.suppress(OSError):  # a kernel without IPv6
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accepted(listener: socket.socket, is_closed: Callable[[], bool]) -> Iterator[socket.socket]:
    """Yield each connection to a listener until that is closed. Who connects while no descriptor can be had, waits.

    Args:
        listener: that listens.
        is_closed: whether it was closed, or is just being.
    """
    is_said = False
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if is_closed():
                return
            if not is_said:
                logger.warning("no connection can be accepted now: %s", error)
            is_said = True
            time.sleep(_AGAIN_S)
        else:
            is_said = False
            yield connection


def allow_descriptors(more: int) -> None:
    """Let this process open so many files more, as far as it may raise its limit: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more
    with contextlib.suppress(OSError):  # where nothing shows what is open
        wanted += len(os.listdir("/proc/self/fd"))
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays at %d: %s", soft, error)


def open_files() -> int:
    """How many files this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def keep_alive(connection: socket.socket, silent_s: float) -> None:
    """Have a connection fail when the other end has answered nothing for some seconds, also while nothing is sent.

    Args:
        connection: or a listener, whose connections will.
        silent_s: how long; 3 or more.
    """
    between_s = int(silent_s) // _PROBES
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    named = {"KEEPIDLE": between_s, "KEEPINTVL": between_s, "KEEPCNT": _PROBES, "USER_TIMEOUT": int(1000 * silent_s)}
    for name, value in named.items():
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Listening:
    """Listens on all interfaces until it is closed.

    Args:
        talk: with whoever connects, on that thread. When this is closed it is cancelled, and must not raise that.
        name: of the thread.
        silent_s: connections of whom nothing was heard for so many seconds are closed, see :func:`keep_alive`.

    Attributes:
        port: it listens at.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(self, talk: Talk, name: str, silent_s: float) -> None:
        self._talk = talk
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        begun: Future[None] = Future()
        try:
            listener = port_of_all_interfaces()
            keep_alive(listener, silent_s)
            self.port: int = listener.getsockname()[1]
            self._thread = threading.Thread(target=self._serve, args=(listener, begun), name=name, daemon=True)
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had
            listener.close()
            self._loop.close()
            raise OSError(f"{name} cannot listen: {error}") from error
        except OSError:
            self._loop.close()
            raise
        begun.result()

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Close all connections. A second call does nothing.

        Args:
            last: called before that, on the thread of the connections.
        """
        with self._closing:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(last)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()

    def _serve(self, listener: socket.socket, begun: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(asyncio.start_server(self._talk, sock=listener))
        except Exception as error:
            listener.close()
            self._loop.close()
            begun.set_exception(OSError(f"{self._thread.name} cannot listen: {error}"))
            return
        begun.set_result(None)
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()
