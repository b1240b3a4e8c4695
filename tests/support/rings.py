"""A ring in memory for several ranks of one process: slots and registers, and nothing else of a server."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError
from lightning_spot.server.host import Lease
from lightning_spot.server.slots import Making
from lightning_spot.server.tier import TierHealth
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.snapshot.shards import JoinedImage, Status, assemble, failed, sections, status, why_aborted

SLOTS = 3  # of each writer


@dataclass(eq=False)
class _Slot:
    memory: mmap.mmap
    index: int


class Registers:
    """What ranks have written; it may be shown by several rings, one after the other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.there: dict[str, dict[int, tuple[Manifest, bytes]]] = {}

    def put(self, manifest: Manifest, image: bytes) -> None:
        with self.changed:
            self.there.setdefault(manifest.snapshot, {}).setdefault(manifest.shard.writer, (manifest, image))
            self.changed.notify_all()

    def status(self, name: str) -> tuple[Status, str]:
        manifests = [manifest for manifest, _ in self.there.get(name, {}).values()]
        shards = {each.shard.writer: each.shard for each in manifests if each.shard is not None}
        order = manifests[0].order if manifests else (0, 0, 0)
        return status(shards, order), why_aborted(shards)

    def image(self, name: str) -> tuple[memoryview, Manifest]:
        """A snapshot that counts, checked."""
        assert self.status(name)[0] is Status.COMMITTED
        found = self.there[name]
        manifests = [found[writer][0] for writer in sorted(found)]
        image = JoinedImage(sections(manifests), {writer: memoryview(data) for writer, (_, data) in found.items()})
        data, whole = memoryview(bytes(image[0 : len(image)])), assemble(manifests)
        whole.verify(data, "here")
        return data, whole


class RankRing:
    """The ring as one rank sees it. Implements :class:`~lightning_spot.server.host.Host`.

    Args:
        registers: of all ranks.
    """

    server_call_timeout_s = 5.0
    memory_bytes = 2**30

    def __init__(self, registers: Registers) -> None:
        self.run, self.attempt = "run@0123456789ab", 1
        self.released: Callable[[mmap.mmap], None] | None = None
        self.is_lost = False
        self._registers = registers
        self._slots: list[_Slot] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._leased: dict[str, _Slot] = {}

    def _ask(self) -> None:
        if self.is_lost:
            raise ServerUnreachableError("the ring is lost")

    def open_run(self, info: Any) -> Any:
        raise NotImplementedError

    def lease(
        self, nbytes: int, wait_s: float, *, limit_s: float | None = None, making: Making = Making.NOW, writer: int = 0
    ) -> Lease:
        self._ask()
        with self._lock:
            free = [slot for slot in self._slots if slot not in self._leased.values()]
            slot = next((each for each in free if len(each.memory) >= nbytes), None)
            if slot is None:
                if len(self._slots) >= SLOTS and not free:
                    raise SnapshotFailedError("all slots are in use", reason=FailureReason.RING_FULL)
                if len(self._slots) >= SLOTS:
                    self._slots.remove(free[0])
                slot = _Slot(mmap.mmap(-1, max(nbytes, 1)), next(self._numbers))
                slot.memory[:] = b"\xa5" * len(slot.memory)
                self._slots.append(slot)
            name = f"upload-{next(self._numbers)}"
            self._slots.remove(slot)  # the one that was used last comes last
            self._slots.append(slot)
            self._leased[name] = slot
        return Lease(name, slot.memory, nbytes, "process", slot.index)

    def seal(
        self,
        lease: Lease,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
    ) -> bool:
        self._ask()
        image = bytes(lease.map[: lease.nbytes])
        assert manifest.nbytes == lease.nbytes
        sealed = manifest.sealed(memoryview(image), 1)
        assert sealed == Manifest.from_json(sealed.to_json())
        with self._lock:
            del self._leased[lease.id]
        self._registers.put(sealed, image)
        return False

    def fail(self, manifest: Manifest, why: str) -> None:
        self._ask()
        self._registers.put(failed(manifest, why), b"")

    def wait_for(self, name: str, wait_s: float) -> tuple[Status, str]:
        registers = self._registers
        with registers.changed:
            registers.changed.wait_for(
                lambda: self.is_lost or registers.status(name)[0] is not Status.PENDING, timeout=wait_s
            )
        self._ask()
        return registers.status(name)

    def lose(self) -> None:
        """As if its server was killed."""
        with self._registers.changed:
            self.is_lost = True
            self._registers.changed.notify_all()

    def abort(self, lease: Lease) -> None:
        with self._lock:
            del self._leased[lease.id]

    def flush(self, wait_s: float) -> list[str]:
        return []

    def check(self) -> None:
        self._ask()

    def remove(self, name: str) -> None:
        pass

    def tiers(self) -> dict[str, TierHealth]:
        return {}

    def kept_at(self) -> list[str]:
        return []

    def refused(self) -> list[Manifest]:
        return []

    def safe_step(self) -> int | None:
        return None

    def leave(self, *, complete: bool) -> None:
        pass

    def disconnect(self) -> None:
        self.lose()
