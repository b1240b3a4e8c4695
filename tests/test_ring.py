"""The ring and the flusher, through a node without network: slots, dirty bits, back-pressure, fences, adoption."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import (
    CorruptSnapshot,
    Fenced,
    RingFull,
    RunBusy,
    SnapshotNotFound,
    SnapshotTooLarge,
    TierError,
)
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import RunInfo
from lightning_spot.tiers.local import LocalStore
from tests.conftest import until
from tests.oracle import claim_of

MIB = 2**20


class GatedStore(LocalStore):
    """A local store that can be held up, or made to fail."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.tries = 0

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        self.tries += 1
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        super().put(manifest, image, attempt=attempt)


class Bench:
    """A node over gated stores."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.stores: dict[str, GatedStore] = {}
        self.root = root
        self.node = Node(**{"allow": None, "slots": 3, "memory_bytes": 64 * MIB, "open_store": self.store, **settings})

    def store(self, url: str) -> GatedStore:
        return self.stores.setdefault(url, GatedStore(url))

    def open(self, *, tiers: int = 1, **more: Any) -> int:
        info = RunInfo(name="run", id="", location="", attempt=0, token="")
        durable = str(self.root / "tier-0") if tiers else None
        return self.node.open_run(replace(info, durable_url=durable, **more)).attempt

    def tier(self, index: int = 0) -> GatedStore:
        return self.store(str(self.root / f"tier-{index}"))

    def save(self, step: int, *, attempt: int = 1, nbytes: int = 1000, wait_s: float = 0.0, **more: Any) -> Manifest:
        upload = self.node.lease("run", attempt, nbytes, wait_s=wait_s)
        with upload.slot.view(nbytes) as view:
            view[:] = random.Random(step).randbytes(nbytes)
            view[-22:] = b"PK\x05\x06" + bytes(18)  # the end of an empty zip
        manifest = Manifest(run="run", name=snapshot_name(step, attempt), step=step, attempt=attempt, nbytes=nbytes)
        return self.node.seal(upload.id, manifest, **more)

    def held(self) -> list[int]:
        return [slot.manifest.step for slot in self.node.ring.committed("run") if slot.manifest]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for store in made.stores.values():
        store.open.set()
    made.node.close()


def test_what_is_committed_becomes_durable(bench: Bench) -> None:
    bench.open()
    sealed = bench.save(1)
    assert bench.node.flush("run", 30) == []
    assert bench.tier().survey().manifests == [sealed]
    (slot,) = bench.node.ring.committed("run")
    assert (slot.dirty, slot.safe) == ([], [bench.tier().url])


def test_a_dirty_bit_stays_until_the_tier_has_it(bench: Bench) -> None:
    bench.open()
    bench.tier().open.clear()
    bench.save(1)
    (slot,) = bench.node.ring.committed("run")
    assert slot.dirty == [bench.tier().url]
    bench.tier().open.set()
    assert bench.node.flush("run", 30) == []
    assert (slot.dirty, slot.safe) == ([], [bench.tier().url])


def test_back_pressure_when_all_slots_are_dirty(bench: Bench) -> None:
    bench.open()
    bench.tier().open.clear()
    for step in (1, 2, 3):
        bench.save(step)
    with pytest.raises(RingFull, match="dirty"):
        bench.save(4)
    threading.Timer(0.2, bench.tier().open.set).start()
    bench.save(4, wait_s=30)  # waits for the flusher
    assert 1 not in bench.held()
    assert bench.held()[0] == 4


def test_the_oldest_clean_slot_is_reused(bench: Bench) -> None:
    bench.open()
    for step in range(1, 8):
        bench.save(step, wait_s=30)
        assert bench.node.flush("run", 30) == []
    assert bench.held() == [7, 6]
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [7, 6]


def test_without_tiers_the_newest_stays(bench: Bench) -> None:
    bench.open(tiers=0)
    for step in range(1, 8):
        bench.save(step)
    assert bench.held() == [7, 6]


def test_one_slot_never_gives_its_only_snapshot_away(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=1)
    bench.open(tiers=0)
    bench.save(1)
    with pytest.raises(RingFull):
        bench.save(2)
    bench.node.close()


def test_a_failing_tier_does_not_stop_snapshots(bench: Bench) -> None:
    bench.open()
    bench.tier().error = TierError("disk full")
    for step in range(1, 4):
        bench.save(step)
    until(lambda: bench.node.flusher.failing(bench.tier().url), "the failure to be seen")
    bench.save(4)
    bench.save(5)
    assert bench.held() == [5, 4, 3]
    (problem,) = bench.node.flush("run", 0.1)
    assert "disk full" in problem
    bench.tier().error = None
    assert bench.node.flush("run", 30) == []  # asking for a flush retries at once
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [5, 4]


def test_too_large_is_not_a_full_ring(bench: Bench) -> None:
    bench.open()
    with pytest.raises(SnapshotTooLarge) as caught:
        bench.node.lease("run", 1, 65 * MIB)
    assert (caught.value.nbytes, caught.value.memory_bytes) == (65 * MIB, 64 * MIB)


def test_memory_limit_holds_over_all_slots(bench: Bench) -> None:
    bench.open()
    for step in (1, 2, 3, 4):
        bench.save(step, nbytes=30 * MIB, wait_s=30)
        assert sum(slot.capacity for slot in bench.node.ring.slots) <= 64 * MIB
    assert bench.node.flush("run", 30) == []
    assert len(bench.held()) == 2


def test_slots_grow_with_the_snapshot(bench: Bench) -> None:
    bench.open()
    for step, nbytes in enumerate((1000, 5 * MIB, 1000, 9 * MIB), start=1):
        sealed = bench.save(step, nbytes=nbytes, wait_s=30)
        assert bench.node.flush("run", 30) == []
        assert sealed in bench.tier().survey().manifests


def test_earlier_attempts_are_refused(bench: Bench) -> None:
    assert bench.open() == 1
    upload = bench.node.lease("run", 1, 100)
    assert bench.open() == 2
    with pytest.raises(Fenced):
        bench.save(5, attempt=1)
    with pytest.raises(Fenced):
        bench.node.seal(upload.id, Manifest(run="run", name="x", step=1, attempt=1, nbytes=100))
    assert bench.node.uploads == {}
    bench.save(5, attempt=2)


def test_what_was_committed_before_the_fence_still_becomes_durable(bench: Bench) -> None:
    bench.open()
    bench.tier().open.clear()
    bench.save(5)
    bench.open()
    bench.tier().open.set()
    assert bench.node.flush("run", 30) == []
    assert [manifest.attempt for manifest in bench.tier().survey().manifests] == [1]


def test_a_fence_set_elsewhere_stops_the_flusher(bench: Bench) -> None:
    bench.open()
    LocalStore(bench.tier().url).claim(claim_of(7))
    bench.save(5)
    assert bench.node.flush("run", 30) == []
    assert bench.tier().survey().manifests == []
    assert bench.open() == 8


def test_a_live_trainer_keeps_its_run(bench: Bench) -> None:
    bench.node.begin_session("first")
    bench.open(session="first", pid=4711)
    bench.node.begin_session("second")
    with pytest.raises(RunBusy, match="4711"):
        bench.open(session="second")
    bench.node.end_session("first")
    assert bench.open(session="second") == 2


def test_a_killed_trainer_gives_its_half_filled_slot_back(bench: Bench) -> None:
    bench.node.begin_session("trainer")
    bench.open(session="trainer")
    for _ in range(3):
        bench.node.lease("run", 1, 100, session="trainer")
    with pytest.raises(RingFull):
        bench.node.lease("run", 1, 100)
    bench.node.end_session("trainer")
    bench.node.lease("run", 1, 100)


def test_a_corrupted_slot_goes_nowhere(bench: Bench) -> None:
    bench.open()
    bench.tier().open.clear()
    bench.save(1)
    until(lambda: bench.tier().tries == 1, "the flusher to take the first")
    bench.save(2)
    slot = bench.node.ring.find("run", snapshot_name(2, 1))
    assert slot is not None
    with slot.view(10) as view:
        view[3] ^= 0xFF
    bench.tier().open.set()
    assert bench.node.flush("run", 30) == []
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [1]
    assert bench.held() == [1]


def test_what_a_tier_calls_corrupt_stays_in_memory(bench: Bench) -> None:
    bench.open()
    bench.tier().error = CorruptSnapshot("damaged on its way")
    sealed = bench.save(1)
    until(lambda: bench.node.flusher.failing(bench.tier().url), "the failure to be seen")
    assert bench.held() == [1]
    bench.tier().error = None
    assert bench.node.flush("run", 30) == []
    assert bench.tier().survey().manifests == [sealed]


def test_removal_reaches_the_tier_also_while_it_is_written(bench: Bench) -> None:
    bench.open()
    bench.tier().open.clear()
    first = bench.save(1)
    until(lambda: bench.tier().tries == 1, "the flusher to be at it")
    bench.node.remove("run", first.name)
    assert bench.held() == []
    bench.tier().open.set()
    assert bench.node.flush("run", 30) == []
    assert bench.tier().survey().manifests == []
    with pytest.raises(SnapshotNotFound):
        bench.node.remove("run", first.name)


def test_a_user_file_is_never_dropped_from_memory_only(bench: Bench) -> None:
    bench.open(tiers=0)
    upload = bench.node.lease("run", 1, 100)
    with upload.slot.view(100) as view:
        view[:] = bytes(78) + b"PK\x05\x06" + bytes(18)
    bench.node.seal(upload.id, Manifest(run="run", name="best.ckpt", file="", step=1, attempt=1, nbytes=100))
    for step in range(5):
        bench.save(step)
    assert bench.node.ring.find("run", "best.ckpt") is not None


def test_readers_are_safe_from_reuse(bench: Bench) -> None:
    bench.open()
    first = bench.save(1)
    slot = bench.node.ring.find("run", first.name)
    assert slot is not None
    with bench.node.ring.reading(slot, first) as image:
        before = bytes(image)
        for step in range(2, 7):
            bench.save(step, wait_s=30)
            bench.node.flush("run", 30)
        assert bytes(image) == before


@pytest.mark.parametrize("dirty", [True, False])
def test_a_new_node_takes_over_what_a_killed_one_left(tmp_path: Path, runtime_dir: Path, dirty: bool) -> None:
    area = runtime_dir / "area"
    killed = Bench(tmp_path, area=area)
    killed.open()
    if dirty:
        killed.tier().open.clear()
    sealed = killed.save(5)
    if not dirty:
        assert killed.node.flush("run", 30) == []
    # Nothing is closed: as after kill -9, only the files are left.
    heir = Bench(tmp_path, area=area)
    assert heir.held() == [5]
    assert heir.node.flush("run", 30) == []
    assert heir.tier().survey().manifests == [sealed]
    assert heir.open() == 2
    heir.node.close()
    assert not area.exists()


def test_an_heir_with_fewer_slots_loses_nothing(tmp_path: Path, runtime_dir: Path) -> None:
    killed = Bench(tmp_path, area=runtime_dir / "area")
    killed.open(tiers=0, keep=9)
    for step in (1, 2, 3):
        killed.save(step)
    heir = Bench(tmp_path, area=runtime_dir / "area", slots=2)
    assert heir.held() == [3, 2, 1]
    heir.node.close()


def test_a_damaged_leftover_is_dropped(tmp_path: Path, runtime_dir: Path) -> None:
    area = runtime_dir / "area"
    killed = Bench(tmp_path, area=area)
    killed.open(tiers=0)
    for step in (1, 2):
        killed.save(step)
    with open(area / "slot-1.img", "r+b") as file:
        file.seek(100)
        file.write(b"\0damage\0")
    heir = Bench(tmp_path, area=area)
    assert heir.held() == [1]
    heir.node.close()


def test_small_tmpfs_falls_back_to_memory_files(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import os

    def full(_fd: int, _offset: int, _nbytes: int, real: Callable[..., None] = os.posix_fallocate) -> None:
        if os.readlink(f"/proc/self/fd/{_fd}").startswith(str(runtime_dir)):
            raise OSError(28, "No space left on device")
        real(_fd, _offset, _nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    bench = Bench(tmp_path, area=runtime_dir / "area")
    bench.open()
    sealed = bench.save(1)
    assert bench.node.flush("run", 30) == []
    assert bench.tier().survey().manifests == [sealed]
    backings = {slot["backing"] for slot in bench.node.status()["slots"] if slot["snapshot"]}
    assert backings == {"memfd"}
    assert "shm-size" in caplog.text
    bench.node.close()


def test_parts_must_all_have_arrived(bench: Bench) -> None:
    bench.open()
    upload = bench.node.lease("run", 1, 100)
    manifest = Manifest(run="run", name="x", step=1, attempt=1, nbytes=100).sealed(memoryview(bytes(100)))
    with pytest.raises(CorruptSnapshot, match="lost or damaged"):
        bench.node.commit(upload.id, manifest)
    assert bench.held() == []
    with pytest.raises(SnapshotNotFound):
        bench.node.find_upload(upload.id)
