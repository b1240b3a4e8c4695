"""Snapshot servers: in this process without network or on a port of it, and as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spot.client.local_server import LocalServer, Session
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SnapshotNotFoundError
from lightning_spot.http.routes import Service
from lightning_spot.protocol.ownership import own_socket
from lightning_spot.protocol.wire import Address, parse_spot_url
from lightning_spot.server.ring import FindEarlier, nothing_earlier
from lightning_spot.server.runs import Opened, RunInfo
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.tier import Listed
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.parts import part_ranges
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.store.local import LocalStore
from tests.support import warm
from tests.support.store import GatedStore
from tests.support.waiting import DEADLINE_S, until

MIB = 2**20
RUN_ID, OTHER_ID = "0123456789ab", "ba9876543210"
RUN = f"run@{RUN_ID}"
FIRST, SECOND, THIRD = "spot://first:7070", "spot://second:7070", "spot://third:7070"


class Bench:
    """A server over gated stores, with one run or several."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.stores: dict[str, GatedStore] = {}
        self.root = root
        self.server = SnapshotServer(
            **{"allow": None, "slots": 3, "memory_bytes": 64 * MIB, "open_store": self.store, **settings}
        )

    def store(self, url: str) -> GatedStore:
        return self.stores.setdefault(url, GatedStore(url))

    def open(self, *, attempt: int = 1, durable: bool = True, run_id: str = RUN_ID, **more: Any) -> Opened:
        url = str(self.root / f"tier-{run_id}")
        info = RunInfo(name="run", id=run_id, location=f"file://{url}", attempt=attempt, token=f"token-{attempt}")
        info = replace(info, durable_url=url if durable else None, **more)
        opened = self.server.open_run(info)
        if info.durable_url == url and (store := LocalStore(url)).claimed() < attempt:
            store.claim(info.claim())  # as the trainer of the attempt does
        return opened

    def tier(self, run_id: str = RUN_ID) -> GatedStore:
        return self.store(str(self.root / f"tier-{run_id}"))

    def save(
        self,
        step: int,
        *,
        attempt: int = 1,
        nbytes: int = 1000,
        wait_s: float = 0.0,
        run_id: str = RUN_ID,
        destinations: list[str] | None = None,
        **fields: Any,
    ) -> Manifest:
        manifest = manifest_of(step, attempt, nbytes, run_id, **fields)
        image = image_of(step, nbytes)
        return committed(self.server, f"run@{run_id}", manifest, image, destinations, wait_s=wait_s)

    def hold(self, **settings: Any) -> Manifest:
        """Have the tier be at the first snapshot, until it is open."""
        self.open(**settings)
        self.tier().open.clear()
        first = self.save(1)
        until(lambda: self.tier().tries, "the tier to be at it")
        return first

    def file(self, name: str, step: int, **more: Any) -> Manifest:
        """Commit a user's file."""
        return self.save(step, name=name, file="", **more)

    def committed(self, run_id: str = RUN_ID) -> list[int]:
        return [manifest.step for slot in self.server.ring.contents(run_id) if (manifest := slot.manifest)]

    def flush(self, wait_s: float = 120.0) -> list[str]:
        return self.server.flush(None, wait_s)

    def die(self) -> None:
        """Leave everything as ``kill -9`` does: only the files remain, and nobody holds their lock."""
        area = self.server.ring.area
        self.server.reconciler.close()
        area._lock_file.close()

    def close(self) -> None:
        for store in self.stores.values():
            store.open.set()
            store._pause.set()
        self.server.close()


def committed(
    server: SnapshotServer,
    run: str,
    manifest: Manifest,
    image: bytes | bytearray,
    destinations: list[str] | None = None,
    floats: Sequence[Floats] = (),
    **lease: Any,
) -> Manifest:
    """Have a server commit a snapshot, or a shard of one, as a trainer on its host does."""
    upload = server.uploads.lease(run, manifest.attempt, manifest.nbytes, **lease)
    with upload.slot.view(manifest.nbytes) as view:
        view[:] = image
    return server.uploads.seal(upload.id, manifest, destinations, tuple(floats))


def image_of(step: int, nbytes: int) -> bytes:
    """A checkpoint's bytes: those of a step."""
    return random.Random(step).randbytes(nbytes)


def manifest_of(step: int, attempt: int = 1, nbytes: int = 1000, run_id: str = RUN_ID, **fields: Any) -> Manifest:
    name = snapshot_name(step, attempt, complete=bool(fields.get("complete")))
    plain: dict[str, Any] = {"run": "run", "run_id": run_id, "lineage": "1" * 12, "name": name, "step": step}
    return Manifest(**{**plain, "attempt": attempt, "nbytes": nbytes, **fields})


class ServerBehind:
    """A snapshot server in this process: what :class:`~lightning_spot.client.remote.ServerStore` is over HTTP.

    Attributes:
        server: the server itself; ``None`` while it does not answer.
        full: whether it has no slot.
        sent_bytes: received so far.
        opened: how often a run was opened.
        open: it takes nothing while this is cleared.
        waiting: whether somebody waits for that.
        arrived: steps that were sent whole.
        known: what it would be told if it had forgotten the run.
    """

    def __init__(self, url: str, server: SnapshotServer | None) -> None:
        self.url = url
        self.run = url.rpartition("/")[2]
        self.server = server
        self.full = False
        self.sent_bytes = 0
        self.opened = 0
        self.open = threading.Event()
        self.open.set()
        self.waiting = False
        self.arrived: list[int] = []
        self.known: RunInfo | None = None

    def open_run(self, info: RunInfo) -> Opened:
        self.opened += 1
        return self._reached().open_run(info)

    def know(self, info: RunInfo) -> None:
        self.known = info

    def listing(self) -> list[Listed]:
        server = self._reached()
        held = [(slot, slot.manifest) for slot in server.ring.contents(server.registry.key(self.run))]
        return [Listed(manifest, server.ring.owed([slot]), slot.safe) for slot, manifest in held if manifest]

    def flush(self, wait_s: float) -> list[str]:
        return self._reached().flush(self.run, wait_s)

    def send(
        self,
        manifest: Manifest,
        image: memoryview,
        *,
        attempt: int,
        earlier: FindEarlier = nothing_earlier,
        floats: Sequence[Floats] = (),
    ) -> Manifest:
        if self.full:
            raise SnapshotFailedError("no slot", reason=FailureReason.RING_FULL)
        self.waiting = True
        assert self.open.wait(120)
        self.waiting = False
        server = self._reached()
        plain = replace(manifest, checksums=())
        upload = server.uploads.lease(self.run, attempt, plain.nbytes, manifest=plain, wait_s=5.0)
        with upload.slot.view(plain.nbytes) as view:
            ranges = part_ranges(manifest.nbytes, manifest.part_bytes)
            for (start, stop), checksum in zip(ranges, manifest.checksums, strict=True):
                upload.received.begin(start)
                view[start:stop] = image[start:stop]
                upload.received.end(start, checksum)
                self.sent_bytes += stop - start
        self._reached().uploads.commit(upload.id, manifest)
        self.arrived.append(manifest.step)
        return manifest

    def fail(self, manifest: Manifest) -> None:
        self._reached().uploads.fail(self.run, manifest.attempt, manifest)

    def delete(self, manifest: Manifest) -> None:
        with contextlib.suppress(SnapshotNotFoundError):
            self._reached().remove(self.run, manifest.name)

    def _reached(self) -> SnapshotServer:
        if self.server is None:
            raise ServerUnreachableError(f"nobody answers at {self.url}")
        return self.server


class WithServers(Bench):
    """A host whose runs have snapshot servers; each of them has stores of its own over the same directories."""

    slots_behind: int | None = None

    def __init__(self, root: Path, allow: list[str] | None) -> None:
        self.behind: dict[str, ServerBehind] = {}
        self.far: dict[str, dict[str, GatedStore]] = {FIRST: {}, SECOND: {}, THIRD: {}}
        self.servers = {base: self.make_server(base, allow) for base in (FIRST, SECOND, THIRD)}
        super().__init__(root, slots=4)
        for base in (FIRST, SECOND, THIRD):
            self.behind[base] = ServerBehind(f"{base}/{RUN}", self.servers[base])

    def make_server(self, base: str, allow: list[str] | None) -> SnapshotServer:
        stores = self.far[base]
        return SnapshotServer(
            slots=self.slots_behind,
            memory_bytes=64 * MIB,
            allow=allow,
            open_store=lambda url: stores.setdefault(url, GatedStore(url)),
        )

    def store(self, url: str) -> Any:
        return self.behind[url.rpartition("/")[0]] if url.startswith("spot://") else super().store(url)

    def by_server(self, base: str) -> GatedStore:
        """The durable tier as a snapshot server sees it."""
        url = self.tier().url
        return self.far[base].setdefault(url, GatedStore(url))

    def durable(self) -> list[int]:
        return [manifest.step for manifest in LocalStore(self.tier().url).survey().manifests]

    def start(self, *servers: str, **more: Any) -> None:
        self.open(servers=servers, **more)

    def held(self, base: str) -> list[int]:
        """Steps that a snapshot server has."""
        return [slot.manifest.step for slot in self.servers[base].ring.contents(RUN_ID) if slot.manifest]

    def close(self) -> None:
        for stores in self.far.values():
            for store in stores.values():
                store.open.set()
        for behind in self.behind.values():
            behind.open.set()
        super().close()
        for server in self.servers.values():
            server.close()


class OverHttp(Bench):
    """A host whose snapshot servers are processes."""

    def store(self, url: str) -> Any:
        if url.startswith("spot://"):
            return ServerStore(url)
        return super().store(url)


_LAST_S = 60.0  # of what never takes so long


@contextlib.contextmanager
def snapshot_server(root: Path, **settings: Any) -> Iterator[tuple[SnapshotServer, str]]:
    """The usual snapshot server, which stores below ``root`` only; it, and its URL."""
    usual = {"slots": None, "memory_bytes": 64 * MIB, "open_store": open_store, "allow": [str(root)]}
    server = SnapshotServer(**{**usual, **settings})
    with served(server) as port:
        yield server, f"spot://127.0.0.1:{port}"


@contextlib.contextmanager
def served(
    server: SnapshotServer,
    port: int = 0,
    *,
    path: Path | None = None,
    secrets: tuple[str, ...] = (),
    tls: Callable[[], ssl.SSLContext] | None = None,
    **service_fields: Any,
) -> Iterator[int]:
    """Serve ``server`` as long as the context lasts, at a port, any that is free by default, or at a Unix socket."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ends = contextlib.AsyncExitStack()

    async def begin() -> int:
        service = Service(server, (lambda: secrets) if secrets else None, **service_fields)
        if path is not None:
            path.unlink(missing_ok=True)
        listener = own_socket(path) if path is not None else socket.create_server(("127.0.0.1", port))
        await service.accept(listener, ends, tls, shutdown_timeout_s=0.0)
        return int(listener.getsockname()[1]) if path is None else 0

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(_LAST_S)
    finally:
        asyncio.run_coroutine_threadsafe(ends.aclose(), loop).result(_LAST_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        server.close()


@contextlib.contextmanager
def sessions_of(server: SnapshotServer, path: Path) -> Iterator[Callable[[], Session]]:
    """Serve ``server`` at a Unix socket; begins a session there."""
    with served(server, path=path):
        yield lambda: Session(ServerClient(Address(socket_path=str(path))), 10.0)


def named_run(name: str, durable: Path | str | None = None, **more: Any) -> RunInfo:
    """A run without an identity, by its name, and where it is durable."""
    url = str(durable) if durable is not None else None
    fields = {"id": "", "location": url or "", "attempt": 1, "token": "", "durable_url": url, "pid": os.getpid()}
    return RunInfo(name=name, **{**fields, **more})


class RunningServer:
    """A ``lightning-spot server`` process.

    Attributes:
        python: the warm Python that it is forked from.
    """

    python = ""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with open(log, "wb") as output:
            command = ["-m", "lightning_spot", "serve", *arguments]
            self.process = warm.Fork(self.python, command, stdout=output, env={**os.environ, **(environment or {})})
        self.url = ""

    def wait_listening(self) -> RunningServer:
        def announced() -> str:
            assert self.process.poll() is None, self.log.read_text()
            text = self.log.read_text()
            return text.split("server listening on ")[1].split(",")[0] if "server listening on " in text else ""

        self.url = until(announced, "the server to listen")
        return self

    def client(self, token: str | None = None) -> ServerClient:
        return ServerClient(parse_spot_url(self.url)[0], token)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout=DEADLINE_S)


@contextlib.contextmanager
def lasting_server(folder: Path, *arguments: str) -> Iterator[RunningServer]:
    """A server for all tests of a module, with folders of its own."""
    environment = {"LIGHTNING_SPOT_SHM_DIR": "", "LIGHTNING_SPOT_RUNTIME_DIR": str(folder)}
    server = RunningServer(["--listen", "127.0.0.1:0", *arguments], folder / "server.log", environment)
    try:
        yield server.wait_listening()
    finally:
        server.stop(signal.SIGKILL)


def is_kept(run: dict[str, Any]) -> bool:
    """Whether a run is kept at a snapshot server, by what its host's server says of it."""
    return not {"holds it", "carries it on"}.isdisjoint(run["servers"].values())


def server_pid(host: LocalServer) -> int:
    """Of the local server of a host."""
    return int(host.client.call("GET", "/v1/status")["pid"])


StartServer = Callable[..., RunningServer]
MakeBench = Callable[..., Bench]
MakeWithServers = Callable[..., WithServers]
