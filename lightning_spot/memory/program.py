"""The node as a program: ``lightning-spot node``, and the embedded node that a trainer starts by itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from lightning_spot.config import format_bytes, parse_bytes, read_environment
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.memory.channel import DescriptorChannel
from lightning_spot.memory.embedded import Record
from lightning_spot.memory.node import Node
from lightning_spot.memory.service import Service
from lightning_spot.memory.stores import open_store
from lightning_spot.memory.wire import DEFAULT_PORT

logger = logging.getLogger("lightning_spot.node")

_CHECK_S = 0.25
_THREADS = 64
_LOCK_TRIES = 50
_LOCK_PAUSE_S = 0.02
_ABANDONED_S = 24 * 3600.0
_READ_BUFFER_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """How a node is run.

    Attributes:
        host: address to listen on, ``""`` for a Unix socket only.
        port: TCP port; 0 takes a free one.
        record: sockets of an embedded node.
        flush_to: URL below which runs are flushed.
        memory_bytes: limit of the slots' memory.
        slots: slots of the ring.
        idle_timeout_s: an embedded node ends after so long without a trainer.
        drain_timeout_s: how long SIGTERM waits for dirty slots.
    """

    host: str = ""
    port: int = 0
    record: Record | None = None
    flush_to: str | None = None
    memory_bytes: int = 8 * 2**30
    slots: int = 4
    idle_timeout_s: float = 900.0
    drain_timeout_s: float = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``lightning-spot node``."""
    parser.add_argument(
        "--listen", default=f"127.0.0.1:{DEFAULT_PORT}", metavar="HOST:PORT", help="default: %(default)s"
    )
    parser.add_argument(
        "--flush-to", metavar="URL", help="directory or fsspec URL below which each run is made durable"
    )
    parser.add_argument("--memory", default="8GiB", metavar="SIZE", help="most memory for slots (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=4, metavar="N", help="slots of the ring (default: %(default)s)")
    parser.add_argument(
        "--drain-timeout", type=float, default=300.0, metavar="S", help="on SIGTERM, flush for so long (default: 300)"
    )
    parser.add_argument("--idle-timeout", type=float, default=900.0, metavar="S", help=argparse.SUPPRESS)
    parser.add_argument("--embedded", nargs=2, metavar=("DIR", "KEY"), help=argparse.SUPPRESS)


def settings_from(arguments: argparse.Namespace) -> NodeSettings:
    """Check the flags.

    Raises:
        SettingsError: naming the flag and what is wrong with it.
    """
    if arguments.slots < 1:
        raise SettingsError(f"--slots {arguments.slots}: a ring has at least one slot")
    shared = {
        "memory_bytes": parse_bytes(arguments.memory),
        "slots": arguments.slots,
        "idle_timeout_s": arguments.idle_timeout,
        "drain_timeout_s": arguments.drain_timeout,
    }
    if arguments.embedded:
        folder, key = arguments.embedded
        return NodeSettings(record=Record(Path(folder), key), **shared)
    host, _, port = arguments.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"--listen {arguments.listen!r}: write it like 127.0.0.1:{DEFAULT_PORT}")
    host = host.strip("[]")
    if not _is_loopback(host) and read_environment().token is None:
        raise SettingsError(
            f"--listen {arguments.listen}: a node listens beyond this host only with a token. Set LIGHTNING_SPOT_TOKEN"
            " (or LIGHTNING_SPOT_TOKEN_FILE) here and on the trainers, or listen on 127.0.0.1"
        )
    flush_to = arguments.flush_to
    if flush_to is not None and "://" not in flush_to:
        flush_to = os.path.abspath(flush_to)
    return NodeSettings(host=host, port=int(port), flush_to=flush_to, **shared)


def run_node(settings: NodeSettings) -> int:
    """Serve until SIGTERM or SIGINT (or, embedded, until the run ends or nobody comes), then drain.

    Returns:
        exit code: 0 when everything is safe below, 1 when something could not be flushed.
    """
    with contextlib.ExitStack() as stack:
        if settings.record is not None:
            alive = stack.enter_context(open(settings.record.alive, "wb"))
            if not _hold(alive):
                logger.info("another node already serves %s", settings.record.key)
                return 0
            _sweep(read_environment().shm_dir, settings.record.folder)
        return asyncio.run(_serve(settings))


def _hold(alive: BinaryIO) -> bool:
    """Take the lock that says this node lives. Trainers that look whether one does hold it for an instant."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False


async def _serve(settings: NodeSettings) -> int:
    environment = read_environment()
    # Requests that wait for a slot hold a thread each; commits must never queue up behind them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    node = Node(
        slots=settings.slots,
        memory_bytes=settings.memory_bytes,
        open_store=open_store,
        flush_to=settings.flush_to,
        area=_area(settings, environment.shm_dir),
        allow=None if settings.record is not None else (),
    )
    if settings.flush_to is not None:
        await asyncio.to_thread(open_store(f"{settings.flush_to}/probe").claimed)  # a wrong URL shows at start
    service = Service(node, environment.token)
    runner = web.AppRunner(service.application(), access_log=None, read_bufsize=_READ_BUFFER_BYTES)
    await runner.setup()
    channel = await _listen(settings, runner, node, environment.token)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    if settings.record is not None:
        await _until_unneeded(node, service, settings.idle_timeout_s, stop)
    else:
        await stop.wait()
    return await _drain(node, runner, channel, settings)


async def _listen(
    settings: NodeSettings, runner: web.AppRunner, node: Node, token: str | None
) -> DescriptorChannel | None:
    if settings.record is None:
        site = web.TCPSite(runner, settings.host, settings.port, backlog=256)
        await site.start()
        port = runner.addresses[0][1]
        flushing = f"flushes to {settings.flush_to}" if settings.flush_to else "flushes nowhere: memory only"
        print(
            f"node listening on spot://{settings.host}:{port}, {settings.slots} slots in"
            f" {format_bytes(settings.memory_bytes)}, {flushing}",
            flush=True,
        )
        return None
    for leftover in (settings.record.http, settings.record.fds):
        leftover.unlink(missing_ok=True)  # a killed node's
    await web.UnixSite(runner, str(settings.record.http)).start()
    return DescriptorChannel(node, settings.record.fds, token)


async def _until_unneeded(node: Node, service: Service, idle_timeout_s: float, stop: asyncio.Event) -> None:
    """Return when the run has ended, when nobody was there for ``idle_timeout_s``, or on a signal."""
    last_busy_s = time.monotonic()
    while not stop.is_set():
        if node.busy:
            last_busy_s = time.monotonic()
        if node.finished:
            logger.info("the run has ended")
            return
        if time.monotonic() - max(last_busy_s, service.last_request_s) > idle_timeout_s:
            logger.info("idle for %.0f s", idle_timeout_s)
            return
        with contextlib.suppress(asyncio.TimeoutError):  # a class of its own before Python 3.11
            await asyncio.wait_for(stop.wait(), _CHECK_S)


async def _drain(node: Node, runner: web.AppRunner, channel: DescriptorChannel | None, settings: NodeSettings) -> int:
    node.closing = True
    left = await asyncio.to_thread(node.flush, None, settings.drain_timeout_s)
    for line in left:
        logger.error("not flushed: %s", line)
    if settings.record is not None:
        for path in (settings.record.http, settings.record.fds):
            path.unlink(missing_ok=True)
    if channel is not None:
        channel.close()
    await runner.cleanup()
    # What could not be flushed stays in tmpfs; the next node of this run takes it over.
    await asyncio.to_thread(lambda: node.close(keep_dirty=True))
    if settings.record is not None and not left:
        settings.record.log.unlink(missing_ok=True)
        settings.record.alive.unlink(missing_ok=True)  # last: who finds it gone may start a new node
    return 1 if left else 0


def _area(settings: NodeSettings, shm_dir: Path | None) -> Path | None:
    if shm_dir is None:
        return None
    if settings.record is not None:
        return shm_dir / f"lightning-spot-{settings.record.key}"
    return shm_dir / f"lightning-spot-{os.getuid()}-port-{settings.port or os.getpid()}"


def _sweep(shm_dir: Path | None, records: Path) -> None:
    """Remove slots that embedded nodes left when they were killed and whose runs nobody carried on for a day."""
    for area in shm_dir.glob("lightning-spot-" + "[0-9a-f]" * 16) if shm_dir is not None else ():
        key = area.name.removeprefix("lightning-spot-")
        with contextlib.suppress(OSError):  # another node may be sweeping it too
            latest_s = max([area.stat().st_mtime, *(path.stat().st_mtime for path in area.iterdir())])
            owned = area.stat().st_uid == os.getuid()
            if owned and time.time() - latest_s > _ABANDONED_S and not Record(records, key).running():
                logger.info("removing %s, abandoned for a day", area)
                shutil.rmtree(area)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> int:
    """Run a node from command-line flags."""
    parser = argparse.ArgumentParser(prog="lightning-spot node")
    add_arguments(parser)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return run_node(settings_from(parser.parse_args(argv)))
    except (SpotError, OSError) as error:
        print(f"lightning-spot node: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
