"""Snapshot servers: in this process without network or on a port of it, and as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spot.client.stores import open_store
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SnapshotNotFoundError
from lightning_spot.http.routes import Service
from lightning_spot.server.ring import FindEarlier, nothing_earlier
from lightning_spot.server.runs import Opened, RunInfo
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.tier import Listed, Sent
from lightning_spot.snapshot.coming import Coming
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.store.local import LocalStore
from tests.support import warm
from tests.support.store import GatedStore
from tests.support.waiting import DEADLINE_S, until

MIB = 2**20
RUN_ID, OTHER_ID = "0123456789ab", "ba9876543210"


class Bench:
    """A node over gated stores, with one run or several."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.stores: dict[str, GatedStore] = {}
        self.root = root
        self.node = SnapshotServer(
            **{"allow": None, "slots": 3, "memory_bytes": 64 * MIB, "open_store": self.store, **settings}
        )

    def store(self, url: str) -> GatedStore:
        return self.stores.setdefault(url, GatedStore(url))

    def open(self, *, attempt: int = 1, durable: bool = True, run_id: str = RUN_ID, **more: Any) -> Opened:
        url = str(self.root / f"tier-{run_id}")
        info = RunInfo(name="run", id=run_id, location=f"file://{url}", attempt=attempt, token=f"token-{attempt}")
        info = replace(info, durable_url=url if durable else None, **more)
        opened = self.node.open_run(info)
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
        followed: bool = False,
        **fields: Any,
    ) -> Manifest:
        upload = self.node.lease(f"run@{run_id}", attempt, nbytes, wait_s=wait_s)
        with upload.slot.view(nbytes) as view:
            view[:] = image_of(step, nbytes)
        manifest = manifest_of(step, attempt, nbytes, run_id, **fields)
        return self.node.seal(upload.id, manifest, destinations, followed=followed)

    def file(self, name: str, step: int, **more: Any) -> Manifest:
        """Commit a user's file."""
        return self.save(step, name=name, file="", **more)

    def committed(self, run_id: str = RUN_ID) -> list[int]:
        return [manifest.step for slot in self.node.committed(f"run@{run_id}") if (manifest := slot.manifest)]

    def flush(self, wait_s: float = 30.0) -> list[str]:
        return self.node.flush(None, wait_s)

    def die(self) -> None:
        """Leave everything as ``kill -9`` does: only the files remain, and nobody holds their lock."""
        area = self.node.ring.area
        assert area is not None
        self.node.reconciler.close()
        area._lock_file.close()

    def close(self) -> None:
        for store in self.stores.values():
            store.open.set()
            store._pause.set()
        self.node.close()


def image_of(step: int, nbytes: int) -> bytes:
    """A checkpoint's bytes: those of a step."""
    return random.Random(step).randbytes(nbytes)


def manifest_of(step: int, attempt: int = 1, nbytes: int = 1000, run_id: str = RUN_ID, **fields: Any) -> Manifest:
    name = snapshot_name(step, attempt, complete=bool(fields.get("complete")))
    plain: dict[str, Any] = {"run": "run", "run_id": run_id, "lineage": "1" * 12, "name": name, "step": step}
    return Manifest(**{**plain, "attempt": attempt, "nbytes": nbytes, **fields})


class NodeBehind:
    """The next node of a chain, in this process: what :class:`~lightning_spot.client.remote.ServerStore` is over HTTP.

    Attributes:
        node: the node itself; ``None`` while it does not answer.
        full: whether it has no slot.
        sent: received so far.
        opened: how often a run was opened.
        open: it takes nothing while this is cleared.
        waiting: whether somebody waits for that.
        arrived: steps that were sent whole.
        known: what it would be told if it had forgotten the run.
    """

    def __init__(self, url: str, node: SnapshotServer | None) -> None:
        self.url = url
        self.run = url.rpartition("/")[2]
        self.node = node
        self.full = False
        self.sent = Sent()
        self.opened = 0
        self.open = threading.Event()
        self.open.set()
        self.waiting = False
        self.arrived: list[int] = []
        self.known: RunInfo | None = None

    def open_run(self, info: RunInfo) -> Opened:
        self.opened += 1
        return self._node().open_run(info)

    def know(self, info: RunInfo) -> None:
        self.known = info

    def listing(self) -> list[Listed]:
        node = self._node()
        held = [(slot, slot.manifest) for slot in node.committed(self.run)]
        return [Listed(manifest, node.ring.owed([slot]), slot.safe) for slot, manifest in held if manifest]

    def flush(self, wait_s: float) -> list[str]:
        return self._node().flush(self.run, wait_s)

    def settle(self, manifest: Manifest, attempt: int) -> None:
        self._node().settle(self.run, attempt, manifest.name, manifest.lineage)

    def send(
        self,
        coming: Coming,
        *,
        attempt: int,
        earlier: FindEarlier = nothing_earlier,
        floats: Sequence[Floats] = (),
    ) -> Manifest:
        if self.full:
            raise SnapshotFailedError("no slot", reason=FailureReason.RING_FULL)
        self.waiting = True
        assert self.open.wait(30)
        self.waiting = False
        node = self._node()
        plain = replace(coming.manifest, checksums=())
        upload = node.lease(self.run, attempt, plain.nbytes, manifest=plain, wait_s=5.0)
        with upload.slot.view(plain.nbytes) as view:
            for start, stop, checksum in coming.sealed_parts():
                upload.received.begin(start, stop)
                view[start:stop] = coming.image[start:stop]
                upload.received.end(start, checksum)
                self.sent.whole_bytes += stop - start
        manifest = coming.committed()
        self._node().commit(upload.id, manifest)
        self.arrived.append(manifest.step)
        return manifest

    def fail(self, manifest: Manifest) -> None:
        self._node().fail(self.run, manifest.attempt, manifest)

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        self.send(Coming(manifest, image), attempt=attempt)

    def delete(self, manifest: Manifest) -> None:
        with contextlib.suppress(SnapshotNotFoundError):
            self._node().remove(self.run, manifest.name)

    def claimed(self) -> int:
        return self._node().claimed(self.run)

    def _node(self) -> SnapshotServer:
        if self.node is None:
            raise ServerUnreachableError(f"nobody answers at {self.url}")
        return self.node


_LAST_S = 60.0  # of what never takes so long


@contextlib.contextmanager
def snapshot_server(root: Path, **settings: Any) -> Iterator[tuple[SnapshotServer, str]]:
    """The usual snapshot server, which stores below ``root`` only; it, and its URL."""
    usual = {"slots": None, "memory_bytes": 64 * MIB, "open_store": open_store, "allow": [str(root)]}
    node = SnapshotServer(**{**usual, **settings})
    with served(node) as port:
        yield node, f"spot://127.0.0.1:{port}"


@contextlib.contextmanager
def served(
    node: SnapshotServer,
    port: int = 0,
    *,
    secrets: tuple[str, ...] = (),
    tls: Callable[[], ssl.SSLContext] | None = None,
    **service_fields: Any,
) -> Iterator[int]:
    """Serve ``node`` as long as the context lasts; its port, which is any that is free by default."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ends = contextlib.AsyncExitStack()

    async def begin() -> int:
        service = Service(node, (lambda: secrets) if secrets else None, **service_fields)
        runner = service.runner(shutdown_timeout_s=0.0)
        await runner.setup()
        ends.push_async_callback(runner.cleanup)
        assert runner.server is not None
        server = await loop.create_server(service.connections(runner.server, tls), "127.0.0.1", port)
        ends.callback(server.close)
        return int(server.sockets[0].getsockname()[1])

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(_LAST_S)
    finally:
        asyncio.run_coroutine_threadsafe(ends.aclose(), loop).result(_LAST_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        node.close()


def named_run(name: str, durable: Path | str | None = None, **more: Any) -> RunInfo:
    """A run without an identity, by its name, and where it is durable."""
    url = str(durable) if durable is not None else None
    fields = {"id": "", "location": url or "", "attempt": 1, "token": "", "durable_url": url, "pid": os.getpid()}
    return RunInfo(name=name, **{**fields, **more})


class RunningNode:
    """A ``lightning-spot node`` process.

    Attributes:
        python: the warm Python that it is forked from.
    """

    python = ""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with open(log, "wb") as output:
            self.process = warm.Fork(
                self.python,
                ["-m", "lightning_spot.http.program", *arguments],
                stdout=output,
                environment={**os.environ, **(environment or {})},
            )
        self.url = ""

    def wait_listening(self) -> RunningNode:
        def announced() -> str:
            assert self.process.poll() is None, self.log.read_text()
            text = self.log.read_text()
            return text.split("server listening on ")[1].split(",")[0] if "server listening on " in text else ""

        self.url = until(announced, "the node to listen")
        return self

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout=DEADLINE_S)
