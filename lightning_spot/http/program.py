"""The server as a program: that of ``lightning-spot serve``, and the local server that a trainer starts by itself.

On SIGTERM or SIGINT it takes no new runs, goes on serving the trainers it has, and ends when they have left and nothing
waits for a tier any more, or when the drain time is over. A second signal ends the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_spot.client.stores import open_store, open_tier
from lightning_spot.config import (
    SERVER_IDLE_TIMEOUT_S,
    UPLOAD_TIMEOUT_S,
    Environment,
    directory_of,
    format_bytes,
    read_environment,
    scheme_of,
    take_token,
    why_weak,
)
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.events import CLOSE_S, Events
from lightning_spot.http.limits import BACKLOG, DESCRIPTORS, say_server_error
from lightning_spot.http.routes import Service
from lightning_spot.protocol.credentials import Reloaded, current_secrets, server_context
from lightning_spot.protocol.listening import allow_descriptors
from lightning_spot.protocol.ownership import own_socket, remove_file
from lightning_spot.protocol.record import ABANDONED_S, ServerRecord, hold, local_areas, port_area, settings_of, sweep
from lightning_spot.retry import unless_silent
from lightning_spot.say import say
from lightning_spot.server.area import remove_abandoned
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.store.fsspec_client import try_writing
from lightning_spot.store.posix import why_not_writable
from lightning_spot.untrusted import LONGEST_TEXT, log_plainly, plain, read_object, text

CHECK_S = 0.25
"""A local server looks whether it is needed at most so often."""
LATEST_CHECK_S = 5.0
"""A local server looks whether it is needed at least so often, also where nothing tells it of a change."""
UNCONNECTED_S = 15.0
"""A draining server waits so long for a client that has begun to send a snapshot and is not connected now."""

_THREADS = 64
_HOLD_S = 1.0
_QUIET_S = 3.0  # a snapshot server's trainers have left, or moved on, when none asked for a slot for so long
_SILENT_S = 20.0


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


def run_server(settings: ServerSettings) -> int:
    """Serve until SIGTERM or SIGINT (or, embedded, until the run ends or nobody comes), then drain.

    Returns:
        exit code: 0 when everything is stored, 1 when something could not be uploaded.

    Raises:
        SettingsError: if the port is taken, and nothing was touched then; or if no file system that is installed can
            write to where it is to.
    """
    allow_descriptors(DESCRIPTORS)
    for why in filter(None, map(why_weak, read_environment().secrets)):
        say(logging.WARNING, "token-weak", "{why}", why=why)
    record = settings.record
    if record is None:
        tls = server_context(*settings.tls) if settings.tls is not None else None
        for url in settings.allow:
            open_store(url)  # to say so now, not when a trainer comes
        with _bind(settings.host, settings.port) as listener:
            _check_storage(settings.flush_to)  # before a trainer is served: those who connect wait meanwhile
            return asyncio.run(_serve(settings, listener, tls))
    with record.opened() as opened:
        return _run_embedded(replace(settings, record=opened), opened)


def _run_embedded(settings: ServerSettings, record: ServerRecord) -> int:
    """Serve this host's trainers by what is in the open runtime directory."""
    alive = hold(record.alive, _HOLD_S)
    if alive is None:
        say(logging.INFO, "server-there", "another server already serves {about}", about=record.key)
        return 0
    try:
        record.note(
            alive,
            slots=settings.slots,
            memory_bytes=settings.memory_bytes,
            server_idle_timeout_s=settings.server_idle_timeout_s,
        )
        _sweep(read_environment().shm_dir, record.folder)
        remove_file(record.http)  # a killed server's
        return asyncio.run(_serve(settings))
    finally:
        os.close(alive)


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before anything else is touched.

    Raises:
        SettingsError: if it cannot be had.
    """
    try:
        if host == "::" and socket.has_dualstack_ipv6():  # all interfaces, as elsewhere
            return socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        known_by = {each[0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        family = socket.AF_INET if socket.AF_INET in known_by else socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(f"{host}:{port} cannot be bound: {error.strerror or error}") from error


async def _serve(
    settings: ServerSettings, listener: socket.socket | None = None, tls: Reloaded[ssl.SSLContext] | None = None
) -> int:
    environment, loop, signals = read_environment(), asyncio.get_running_loop(), _Signals()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))
    record, is_lent = settings.record, settings.record is None
    area = record.area if record is not None else partial(port_area, port=settings.port or os.getpid())
    beneath = [*settings.allow, *filter(None, [settings.flush_to])] if is_lent else None
    server = SnapshotServer(
        slots=settings.slots,
        memory_bytes=settings.memory_bytes,
        run_memory_bytes=settings.run_memory_bytes,
        open_store=partial(open_tier, beneath=beneath),
        flush_to=settings.flush_to,
        area=area(environment.shm_dir) if environment.shm_dir is not None else None,
        allow=settings.allow if is_lent else None,
    )
    events = Events(webhook=environment.webhook if is_lent else None)  # a trainer tells its own
    # A local server asks for no token: whoever reaches its sockets is the same user.
    service = Service(server, current_secrets if is_lent and environment.secrets else None)
    loop.set_exception_handler(lambda _, of: say_server_error(str(of.get("message")), of.get("exception")))
    async with AsyncExitStack() as ends:
        ends.push_async_callback(asyncio.to_thread, events.close, CLOSE_S)
        # What could not be flushed stays in tmpfs; the next server of this run takes it over.
        ends.push_async_callback(asyncio.to_thread, server.close, keep_unsafe=True)
        if record is None:
            assert listener is not None
            await service.accept(listener, ends, tls)
            _announce(settings, listener)
            await signals.first.wait()
        else:
            await service.accept(ends.enter_context(own_socket(record.http)), ends)  # whoever finds it may connect
            ends.callback(record.http.unlink, missing_ok=True)
            await _serve_metrics(server, environment, ends)
            await _until_unneeded(server, service, settings.server_idle_timeout_s, signals, record.touch)
        left = await _drain(server, service, settings.drain_timeout_s, signals)
    if record is not None:
        if not left:
            record.log.unlink(missing_ok=True)
        record.alive.unlink(missing_ok=True)  # last: who finds it gone may start a new server
    return 1 if left else 0


async def _serve_metrics(server: SnapshotServer, environment: Environment, ends: AsyncExitStack) -> None:
    """Answer ``GET /metrics`` of a local server at the address that the environment names, until ``ends``."""
    if environment.metrics is None:
        return
    try:
        listener = ends.enter_context(_bind(*environment.metrics))
    except SettingsError as error:  # the server of another run on this host may have it
        text = "metrics of this host's server are not served: {error}. Set LIGHTNING_SPOT_METRICS to a free address"
        say(logging.WARNING, "metrics-not-served", text, error=error)
        return
    service = Service(server, current_secrets if environment.secrets else None, only_metrics=True)
    await service.accept(listener, ends)


def _check_storage(flush_to: str | None) -> None:
    """Fail at the start where this server cannot write to the directory or URL below which it is to make runs durable.

    Raises:
        SettingsError: if it cannot.
    """
    if flush_to is None:
        return
    why = "" if scheme_of(flush_to) else why_not_writable(directory_of(flush_to))
    if scheme_of(flush_to):
        try:
            unless_silent(partial(try_writing, flush_to), threading.Event(), _SILENT_S, flush_to)
        except SpotError as error:
            why = f"cannot be used ({error})"
    if why:
        raise SettingsError(f"--storage {flush_to} {why}; nothing would be durable there")


def _announce(settings: ServerSettings, listener: socket.socket) -> None:
    facts = [f"{format_bytes(settings.memory_bytes)} of memory"]
    facts.append(f"stores runs below {settings.flush_to}" if settings.flush_to else "stores nothing by itself")
    if settings.allow:
        facts.append(f"stores runs of trainers that ask for it below {' and '.join(settings.allow)}")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "spots" if settings.tls is not None else "spot"
    print(f"server listening on {scheme}://{host}:{listener.getsockname()[1]}, {', '.join(facts)}", flush=True)


class _Signals:
    """SIGTERM and SIGINT: the first has what is owed flushed, the second ends the server at once.

    Attributes:
        woken: set with each of them, and by :meth:`wake`.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._came)

    def wake(self) -> None:
        """Something else has happened. Called on any thread."""
        if not (self.woken.is_set() or self._loop.is_closed()):
            self._loop.call_soon_threadsafe(self.woken.set)

    def _came(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
        self.woken.set()


async def _until_unneeded(
    server: SnapshotServer,
    service: Service,
    server_idle_timeout_s: float,
    signals: _Signals,
    note_alive: Callable[[], None] = lambda: None,
) -> None:
    """Return when the run has ended, when nobody was there for ``server_idle_timeout_s``, or on a signal.

    ``note_alive`` is called again and again until then. It is looked at when something has changed, and seldom else: to
    look four times a second took more CPU time than all requests of a training.
    """
    server.ring.watch(signals.wake)
    last_busy_s, was_busy = time.monotonic(), True
    while not signals.first.is_set():
        signals.woken.clear()
        note_alive()
        now_s, is_busy = time.monotonic(), server.busy
        if is_busy or was_busy:  # until now
            last_busy_s = now_s
        was_busy = is_busy
        if server.finished:
            say(logging.INFO, "server-ends", "the run has ended")
            return
        left_s = server_idle_timeout_s - (now_s - max(last_busy_s, service.last_request_s))
        if left_s < 0:
            say(logging.INFO, "server-ends", "idle for {idle_s:.0f} s", idle_s=server_idle_timeout_s)
            return
        await _wait(signals.first, CHECK_S)
        await _wait(signals.woken, min(left_s, LATEST_CHECK_S))


async def _drain(server: SnapshotServer, service: Service, drain_timeout_s: float, signals: _Signals) -> list[str]:
    """Serve on until the trainers have left and all is safe below; what is not, one line for each tier."""
    server.drain()
    deadline_s = time.monotonic() + drain_timeout_s
    while not signals.second.is_set() and time.monotonic() < deadline_s:
        server.uploads.expire(UNCONNECTED_S)
        here = bool(server.registry.sessions) or time.monotonic() - service.uploads.asked_s < _QUIET_S
        if server.drained and not here:
            break
        # Asks failing tiers again at once; who serves on does so meanwhile.
        await _flush(server, max(0.0, min(1.0, deadline_s - time.monotonic())))
        await _wait(signals.second, CHECK_S)
    server.uploads.close()
    left = await _flush(server, 0.0)
    for line in left:
        say(logging.ERROR, "not-stored", "not stored: {about}", about=line)
    return left


async def _flush(server: SnapshotServer, wait_s: float) -> list[str]:
    """What could not be flushed in time, one line for each tier. Whatever fails, the server ends as it should."""
    try:
        return await asyncio.to_thread(server.flush, None, wait_s)
    except Exception as error:
        say(logging.ERROR, "last-upload-failed", "the last uploads failed unexpectedly", exc_info=True)
        return [f"{type(error).__name__}: {error}"]


async def _wait(event: asyncio.Event, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within_s)


def _sweep(shm_dir: Path | None, records: Path) -> None:
    """Remove what local servers left when they were killed and whose runs nobody carried on for a day."""
    for key, area in local_areas(shm_dir):
        with contextlib.suppress(OSError, SettingsError):  # another server may be sweeping it too
            latest_s = max([area.here.stat().st_mtime, *(path.lstat().st_mtime for path in area.here.iterdir())])
            is_recent = time.time() - latest_s < ABANDONED_S
            if not (is_recent or ServerRecord(records, key).running()) and remove_abandoned(area):
                say(logging.INFO, "slots-removed", "removed {about}, abandoned for a day", about=area.path)
    sweep(records)


def main() -> int:
    """Run the local server of a trainer, who names its record, and how it is run by JSON on standard input."""
    log_plainly(logging.INFO, "text")
    folder, key = sys.argv[1:]
    try:
        given = read_object(sys.stdin.read())
        take_token(text(given, "token"))
        return run_server(ServerSettings(record=ServerRecord(Path(folder), key), **settings_of(given)))
    except (SpotError, OSError) as error:
        print(plain(f"the local server cannot be run: {error}", LONGEST_TEXT), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
