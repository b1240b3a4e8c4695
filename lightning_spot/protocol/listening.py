"""A server of the other ranks within a trainer: on a thread of its own, for those who know its secret.

All ports that a trainer opens are here. A connection begins with a greeting, one line of JSON that holds the secret,
and is answered by one byte. Until then it is a stranger's: it has ten seconds and 64 KiB, and gives way to others where
there are too many.

Ranks may be silent for hours, and what is between two hosts (address translation, a firewall) forgets connections that
are, without a word to either. So the kernel asks now and then whether the other end is there: :func:`keep_alive`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import resource
import socket
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from lightning_spot.untrusted import read_object

logger = logging.getLogger(__name__)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

LOOPBACK = "127.0.0.1"

GREETING_S = 10.0
"""A connection must have greeted within this time."""

_PROBES = 3
_UNLIMITED = 2**30
_AT_ONCE = 4  # accepted in one turn: however many come, each is read before many others are taken
_STRANGERS = 16  # that may be there besides two connections of each rank
_BACKLOG = 256
_LONGEST_LINE = 64 * 1024  # of a greeting, and of what a rank publishes: the text of a notice may be long
_WELCOME = b"\n"
_TRIES = 3


def most_connections(world_size: int) -> int:
    """Connections that rank 0 has at a time: one of each rank, another while that is made anew, and strangers'."""
    return 2 * world_size + _STRANGERS


def resolved(host: str) -> str:
    """The address that a name has for this host; ``""`` if none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        logger.debug("%s has no address here: %s", host, error)
        return ""


def facing(host: str) -> str:
    """The address of this host from which packets to another one leave; of this host's own address, that itself.

    Raises:
        OSError: if there is no way there.
    """
    error: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.bind((address[0], 0, *address[2:]))
                except OSError:  # it is another host's
                    probe.connect(address)  # nothing is sent
                return str(probe.getsockname()[0])
        except OSError as raised:  # of the other version of IP, there may be a way
            error = raised
    raise error or OSError(f"{host} has no address")


def tcp_listener(host: str, silent_s: float) -> socket.socket:
    """A port at one address of this host, whose connections fail where nothing is heard: see :func:`keep_alive`."""
    listener = socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
    )
    keep_alive(listener, silent_s)
    return listener


def greeted(address: tuple[str, int], within_s: float, secret: str) -> socket.socket:
    """Connect to one who is :class:`Listening`, and be let in.

    Args:
        address: host and port.
        within_s: timeout of the connection.
        secret: to greet with.

    Raises:
        OSError: if nobody is there, or the secret is another one.
    """
    tries = _TRIES
    while True:
        connection = socket.create_connection(address, within_s)
        try:
            connection.sendall(json.dumps({"secret": secret}).encode() + b"\n")
            if connection.recv(len(_WELCOME)) == _WELCOME:
                return connection
            raise ConnectionResetError("the rank that listens has hung up")
        except ConnectionError:
            connection.close()
            tries -= 1
            if not tries:  # in a flood of strangers, one that has not greeted yet may have had to give way
                raise
        except BaseException:
            connection.close()
            raise


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
    """Listens, and talks to those who know the secret, until it is closed.

    Args:
        listener: whose connections it takes; it is closed with this.
        talk: with one who has greeted, on the thread of this. The connection is closed when it returns; when this is
            closed, it is cancelled.
        name: of the thread.
        secret: that a greeting must hold.
        most: connections at a time. Beyond, the stranger who has waited longest gives way; where all have greeted,
            the new one.

    Raises:
        OSError: if it cannot listen.
    """

    def __init__(self, listener: socket.socket, talk: Talk, name: str, secret: str, most: int) -> None:
        self._talk, self._secret, self._most = talk, secret.encode(), most
        self._closing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._counted = CountedLog(logger)
        self._let_in: set[asyncio.Task[None]] = set()  # nothing else keeps them: the loop does not
        self._strangers: dict[asyncio.Task[None], None] = {}  # in the order in which they came
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._beginning = self._loop.create_task(self._begin())
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had
            listener.close()
            self._loop.close()
            raise OSError(f"{name} cannot listen: {error}") from error

    def call(self, action: Callable[[], Any]) -> None:
        """Do something on the thread of this."""
        self._loop.call_soon_threadsafe(action)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Close all connections. A second call does nothing.

        Args:
            last: called before that, on the thread of the connections.
        """
        with self._closing:
            if self._thread.is_alive():
                self.call(last)
                self.call(self._loop.stop)
                self._thread.join()

    # -- on its thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._counted.on_loop_error)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))
                self._loop.run_until_complete(asyncio.sleep(0))  # their connections are closed
            self._listener.close()
            self._counted.write()
            self._loop.close()

    async def _begin(self) -> None:
        await asyncio.start_server(self._serve, sock=self._listener, limit=_LONGEST_LINE, backlog=_AT_ONCE)
        self._listener.listen(_BACKLOG)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            self._strangers[task] = None
            if len(self._strangers) + len(self._let_in) > self._most:
                longest = next(iter(self._strangers))
                del self._strangers[longest]
                if longest is task:
                    return
                longest.cancel()
            greeting = read_object(await asyncio.wait_for(reader.readline(), GREETING_S))
            if not hmac.compare_digest(str(greeting.get("secret")).encode(), self._secret):
                return
            if task in self._strangers:  # else it had to give way, just as it greeted
                del self._strangers[task]
                self._let_in.add(task)
                writer.write(_WELCOME)
                await self._talk(reader, writer)
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, asyncio.CancelledError) as error:
            logger.debug("a rank has gone, or speaks another language: %s", error)
        finally:
            self._strangers.pop(task, None)
            self._let_in.discard(task)
            writer.transport.abort()


_EVERY_S = 60.0
_MOST_KINDS = 16
_LONGEST_KIND = 240


class CountedLog:
    """Counts what happens, and writes one line a minute for each kind of it. All methods: on one event loop.

    Args:
        logger: gets the lines.
        every_s: seconds between two lines of one kind.
    """

    def __init__(self, logger: logging.Logger, every_s: float = _EVERY_S) -> None:
        self._logger, self._every_s = logger, every_s
        self._counts: Counter[tuple[str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, kind: str, whose: str = "", *, key: str = "") -> None:
        """Count one.

        Args:
            kind: what has happened, in the plural.
            whose: address of the client, if that is known; a few addresses are remembered until they are written.
            key: of the line, as :mod:`lightning_spot.say` has them.
        """
        line = (f"{kind} from {whose}" if whose else kind)[:_LONGEST_KIND], key
        if line not in self._counts and len(self._counts) >= _MOST_KINDS:
            line = "further events", ""
        self._counts[line] += 1
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(self._every_s, self.write)
            except RuntimeError:  # the loop has ended: what is left of it comes now
                self.write()

    def add_error(self, kind: str, error: BaseException | None) -> None:
        """Count an error: by its class and the place where it was raised. Its text may hold what a stranger sent."""
        if isinstance(error, OSError):
            kind += f" ({error.strerror or type(error).__name__})"
        elif error is not None:
            places = traceback.extract_tb(error.__traceback__)
            where = f" at {places[-1].filename}:{places[-1].lineno}" if places else ""
            kind += f" ({type(error).__name__}{where})"
        self.add(kind)

    def on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What :meth:`asyncio.loop.set_exception_handler` takes. By default, asyncio writes a traceback for each."""
        self.add_error(f"errors of the event loop: {context.get('message')}", context.get("exception"))

    def write(self) -> None:
        """Write what was counted, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (line, key), count in self._counts.items():
            extra = {"spot_key": key, "spot_facts": {"count": count, "about": line}}
            self._logger.warning("%d %s in the last minute", count, line, extra=extra)
        self._counts.clear()
