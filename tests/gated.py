"""A node without network over stores that can be held up or made to fail: what the tests of the ring work with."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SnapshotNotFoundError
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.node import Node
from lightning_spot.memory.ring import FindEarlier, nothing_earlier
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.tier import Listed, Sent
from lightning_spot.tiers.local import LocalStore

MIB = 2**20
RUN_ID, OTHER_ID = "0123456789ab", "ba9876543210"


class GatedStore(LocalStore):
    """A local store that can be held up, slowed down, or made to fail.

    Attributes:
        open: nothing is put while this is cleared.
        bytes_per_s: speed of puts.
        errors: called with the kind of each request and its manifest; what it returns is raised.
        tries: ``put NAME``, ``delete NAME``… in order.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.bytes_per_s = float("inf")
        self.errors: Callable[[str, Manifest], Exception | None] = lambda _kind, _manifest: None
        self.tries: list[str] = []
        self._pause = threading.Event()

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        self._note("put", manifest)
        assert self.open.wait(30)
        self._pause.wait(manifest.nbytes / self.bytes_per_s)
        super().put(manifest, image, attempt=attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        self._note("put", manifest)
        assert self.open.wait(30)
        return super().put_parts(manifest, parts, attempt=attempt)

    def delete(self, manifest: Manifest) -> None:
        self._note("delete", manifest)
        super().delete(manifest)

    def puts(self) -> list[int]:
        """Steps of the snapshots that were tried, in order."""
        return [int(tried.split("step-")[1][:9]) for tried in self.tries if tried.startswith("put step-")]

    def fail(self, error: Exception | None) -> None:
        """Let every request fail from now on, or none."""
        self.errors = lambda _kind, _manifest: error

    def _note(self, kind: str, manifest: Manifest) -> None:
        self.tries.append(f"{kind} {manifest.name}")
        if (error := self.errors(kind, manifest)) is not None:
            raise error


class Bench:
    """A node over gated stores, with one run or several."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.stores: dict[str, GatedStore] = {}
        self.root = root
        self.node = Node(**{"allow": None, "slots": 3, "memory_bytes": 64 * MIB, "open_store": self.store, **settings})

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
        self.node.routes.close()
        self.node.flusher.close()
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
    """The next node of a chain, in this process: what :class:`~lightning_spot.client.remote.NodeStore` is over HTTP.

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

    def __init__(self, url: str, node: Node | None) -> None:
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
        held = [(slot, slot.manifest) for slot in self._node().committed(self.run)]
        return [Listed(manifest, list(slot.dirty), list(slot.safe)) for slot, manifest in held if manifest]

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
        upload = node.lease(self.run, attempt, plain.nbytes, name=plain.name, manifest=plain, wait_s=5.0)
        with upload.slot.view(plain.nbytes) as view:
            for start, stop, checksum in coming.sealed_parts():
                self._node().uploads.arriving(upload, start, stop)
                view[start:stop] = coming.image[start:stop]
                self._node().uploads.arrived(upload, start, checksum)
                self.sent.whole_bytes += stop - start
        manifest = coming.committed()
        self._node().commit(upload.id, manifest)
        self.arrived.append(manifest.step)
        return manifest

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        self.send(Coming(manifest, image), attempt=attempt)

    def delete(self, manifest: Manifest) -> None:
        with contextlib.suppress(SnapshotNotFoundError):
            self._node().remove(self.run, manifest.name)

    def claimed(self) -> int:
        return self._node().claimed(self.run)

    def _node(self) -> Node:
        if self.node is None:
            raise ServerUnreachableError(f"nobody answers at {self.url}")
        return self.node
