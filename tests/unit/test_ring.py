"""The ring and its workers, through a server without network: slots, what they owe, back-pressure, fences, adoption."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    RunBusyError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    TierError,
)
from lightning_spot.protocol import slot as slot_module
from lightning_spot.protocol.ownership import open_file
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import AREA_LOCK
from lightning_spot.protocol.slot import SlotMemory, host_memory_bytes
from lightning_spot.server import area as area_module
from lightning_spot.server import reconcile, registry, worker
from lightning_spot.server.area import SlotArea
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.ring import MOST_ABORTED
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.slot_choice import MOST_OF_A_WRITER
from lightning_spot.server.slots import Resident, Slot, View
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.shards import Status
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep
from tests.support.oracle import claim_of
from tests.support.said import said, said_about
from tests.support.server import (
    MIB,
    OTHER_ID,
    RUN,
    RUN_ID,
    Bench,
    MakeBench,
    image_of,
    manifest_of,
)
from tests.support.shards import failed_shard
from tests.support.waiting import until

# -- slots and what they owe -------------------------------------------------------------------------------------------


def test_back_pressure_when_every_slot_is_needed(make_bench: MakeBench) -> None:
    bench = make_bench(slots=2)
    bench.hold()
    bench.save(2)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        bench.save(3)  # one is being written, the other is the newest
    threading.Timer(0.2, bench.tier().open.set).start()
    bench.save(3, wait_s=60)
    assert bench.committed()[0] == 3


def test_the_end_of_a_run_stays_until_the_tier_has_it(make_bench: MakeBench) -> None:
    bench = make_bench(slots=3)
    bench.hold()
    bench.save(2, complete=True)
    bench.save(3)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        bench.save(4)  # one is being written, one is owed, and one is the newest
    assert sorted(bench.committed()) == [1, 2, 3]
    bench.tier().open.set()


@pytest.mark.parametrize("durable", [True, False])
def test_the_oldest_clean_slot_is_reused(bench: Bench, durable: bool) -> None:
    bench.open(durable=durable)
    for step in range(1, 8):
        bench.save(step, wait_s=60)
        assert bench.flush() == []
    assert bench.committed() == [7, 6]
    assert [manifest.step for manifest in bench.tier().survey().manifests] == ([7, 6] if durable else [])


def test_the_end_of_a_run_is_not_held_twice(make_bench: MakeBench) -> None:
    bench = make_bench(slots=4)
    bench.open(durable=False)
    for step in (1, 2, 3):
        bench.save(step)
    bench.save(3, complete=True)
    held = [manifest.name for slot in bench.server.ring.contents(RUN_ID) if (manifest := slot.manifest)]
    assert held == [snapshot_name(3, 1, complete=True), snapshot_name(2, 1)]


def test_one_slot_never_gives_its_only_snapshot_away(make_bench: MakeBench) -> None:
    bench = make_bench(slots=1)
    bench.open(durable=False)
    bench.save(1)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        bench.save(2)


@pytest.mark.parametrize("slots", [3, None])
def test_memory_limit_holds_over_all_slots(make_bench: MakeBench, slots: int | None) -> None:
    bench = make_bench(slots=slots, memory_bytes=32 * MIB)
    bench.open()
    for step in (1, 2, 3, 4):
        bench.save(step, nbytes=15 * MIB, wait_s=60)
        assert sum(slot.capacity for slot in bench.server.ring.slots) <= 32 * MIB
    assert bench.flush() == []
    assert len(bench.committed()) == 2


def test_making_memory_holds_nobody_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of fresh memory take seconds; listing, sealing and reading go on meanwhile."""
    bench.open()
    real, making, go_on = SlotMemory.create, threading.Event(), threading.Event()

    def slow(capacity: int, path: Path | None) -> SlotMemory:
        making.set()
        assert go_on.wait(120)
        return real(capacity, path)

    sealed = bench.save(1)
    monkeypatch.setattr(SlotMemory, "create", slow)
    leasing = threading.Thread(target=lambda: bench.server.uploads.lease(RUN, 1, 1000))
    leasing.start()
    assert making.wait(120)
    began = time.monotonic()
    assert bench.committed() == [1]
    assert bench.flush() == []
    slot = bench.server.ring.find(RUN_ID, sealed.name)
    with bench.server.ring.reading(Resident((slot,), (sealed,))):
        bench.server.status()
    assert time.monotonic() - began < 60
    assert leasing.is_alive()
    go_on.set()
    leasing.join()


def test_memory_is_mapped_even_if_the_kernel_cannot_prefault_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "populate", lambda *_, write: False)
    memory = SlotMemory.create(2 * MIB, tmp_path / "slot")
    memory.view(2 * MIB)[-1] = 7
    assert (tmp_path / "slot").read_bytes()[-1] == 7
    memory.close()


def test_memory_that_cannot_be_had_leaves_no_slot_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open()
    monkeypatch.setattr(slot_module, "available_bytes", lambda: MIB)
    for _ in range(5):
        with pytest.raises(TierError, match=r"\b1\.05 MB"):
            bench.server.uploads.lease(RUN, 1, 4 * MIB)
    monkeypatch.undo()
    bench.save(1)


# -- runs and attempts ------------------------------------------------------------------------------------------------


def test_two_runs_of_one_name_live_side_by_side(bench: Bench) -> None:
    bench.open(attempt=3)
    bench.save(20, attempt=3)
    assert bench.open(run_id=OTHER_ID).attempt == 1  # not fenced by the other one's attempts
    bench.save(5, run_id=OTHER_ID)
    assert (bench.committed(), bench.committed(OTHER_ID)) == ([20], [5])
    assert bench.flush() == []
    assert [manifest.step for manifest in bench.tier(OTHER_ID).survey().manifests] == [5]
    with pytest.raises(SettingsError, match=f"run@{RUN_ID}.*run@{OTHER_ID}"):
        bench.server.registry.find("run")
    bench.server.remove(f"run@{OTHER_ID}", snapshot_name(5, 1))
    assert (bench.committed(), bench.committed(OTHER_ID)) == ([20], [])


def test_earlier_attempts_are_refused(bench: Bench) -> None:
    bench.open()
    upload = bench.server.uploads.lease(RUN, 1, 100)
    bench.open(attempt=2)
    with pytest.raises(FencedError):
        bench.save(5, attempt=1)
    with pytest.raises(FencedError):
        bench.server.uploads.seal(upload.id, manifest_of(1, nbytes=100))
    assert len(bench.server.uploads) == 0
    with pytest.raises(FencedError):
        bench.open(attempt=1)
    bench.save(5, attempt=2)


def test_a_refusal_of_one_attempt_is_not_reported_for_the_next(bench: Bench) -> None:
    """Its server may serve a run again that another host had taken over meanwhile."""
    bench.server.registry.begin_session("trainer")
    bench.open(attempt=1, session="trainer")
    bench.tier().fail(FencedError("a later one", current=2))
    bench.save(1)
    until(lambda: any(tier.refused for tier in bench.server.tiers().values()), "the tier to refuse it")
    bench.server.end_session("trainer")
    bench.tier().fail(None)  # or it would refuse the next try, which may come at any moment, too
    bench.open(attempt=3)
    assert [tier.refused for tier in bench.server.tiers().values()] == [""]
    assert bench.flush() == []
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [1]  # which that one may go on from


@pytest.mark.parametrize("session", ["", "trainer"])
def test_an_overtaken_attempt_is_logged_once(bench: Bench, session: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a trainer of this host, whose snapshots are let go, and one of another, which may be gone."""
    if session:
        bench.server.registry.begin_session(session)
    bench.open(session=session)
    bench.tier().fail(FencedError("attempt 2 has taken over", current=2))

    def refused(step: int) -> None:
        name = bench.save(step, wait_s=60).name
        until(lambda: f"put {name}" in bench.tier().tries, f"step {step} to be refused")

    for step in range(1, 6):
        refused(step)
    assert [facts["attempt"] for facts in said(caplog, "attempt-refused")] == [1]


def test_a_run_that_is_not_known_is_to_be_opened(bench: Bench) -> None:
    with pytest.raises(SnapshotNotFoundError, match=RUN):
        bench.server.uploads.lease(RUN, 1, 100)


def test_what_came_before_the_fence_is_uploaded_for_this_one(bench: Bench) -> None:
    """A file was refused and tried again for ever."""
    bench.open()
    bench.tier().open.clear()
    bench.save(5)
    bench.file("notes.txt", 5)
    bench.open(attempt=2)
    bench.tier().open.set()
    assert bench.flush() == []
    assert [manifest.attempt for manifest in bench.tier().survey().manifests] == [1]
    assert (Path(bench.tier().url) / "notes.txt").read_bytes() == image_of(5, 1000)
    assert bench.server.tiers()[bench.tier().url].failures_total == 0  # nobody is told to stop this trainer


def refused_of_a_live_trainer(bench: Bench) -> None:
    """A snapshot that its tier refuses, since another attempt has claimed the run there."""
    bench.server.registry.begin_session("trainer")
    bench.open(session="trainer")
    LocalStore(bench.tier().url).claim(claim_of(7))
    bench.save(5)
    assert bench.flush() == []
    assert bench.tier().survey().manifests == []
    assert len(bench.tier().tries) == 1


def test_leftovers_are_uploaded_after_another_trainer_has_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It claimed the run, was killed before it opened it here, and had no snapshot: this one was let go, and lost."""
    monkeypatch.setattr(reconcile, "HEARTBEAT_TIMEOUT_S", 600.0)
    bench.open()
    LocalStore(bench.tier().url).claim(claim_of(7))
    bench.save(5)
    until(lambda: bench.tier().tries, "it to be tried")
    assert bench.server.flush(RUN, 0.2) != []
    assert bench.tier().survey().manifests == []
    monkeypatch.setattr(reconcile, "HEARTBEAT_TIMEOUT_S", 0.1)
    assert bench.flush() == []
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [5]


def test_a_refused_snapshot_is_tried_again_once_its_trainer_dies(bench: Bench) -> None:
    """Its server ended as if all were safe, with the newest snapshot that there was."""
    refused_of_a_live_trainer(bench)
    bench.server.end_session("trainer")
    until(lambda: bench.tier().survey().manifests, "it to be brought")
    assert not bench.server.ring.contents(RUN_ID)[0].refused


def test_the_next_server_uploads_a_refused_snapshot_if_both_die(
    make_bench: MakeBench, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = make_bench(area=runtime_dir / "area")
    refused_of_a_live_trainer(killed)
    killed.die()
    monkeypatch.setattr(reconcile, "HEARTBEAT_TIMEOUT_S", 0.1)
    heir = make_bench(area=runtime_dir / "area")
    assert [slot.manifest and slot.manifest.step for slot in heir.server.ring.contents(RUN_ID)] == [5]
    until(lambda: heir.tier().survey().manifests, "it to be brought")


def test_an_attempt_that_claims_during_an_upload_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "HEARTBEAT_TIMEOUT_S", 0.1)
    bench.open()
    store, claims = LocalStore(bench.tier().url), [9, 8]
    survey = bench.tier().survey
    store.claim(claim_of(7))

    def claimed_meanwhile() -> Any:
        if claims:
            store.claim(claim_of(claims.pop()))
        return survey()

    monkeypatch.setattr(bench.tier(), "survey", claimed_meanwhile)
    bench.save(5)
    assert bench.flush() == []
    assert not claims
    assert [manifest.step for manifest in survey().manifests] == [5]


def test_an_abandoned_identity_that_comes_late_takes_nothing(bench: Bench) -> None:
    """A slow link had held the request up, and the server let the right one go, and its fence."""
    told = {"location": "file:///run", "token": "one"}
    bench.open(attempt=2, **told)
    bench.open(attempt=1, run_id=OTHER_ID, **told)
    assert bench.server.registry.highest(RUN_ID) == 2
    with pytest.raises(FencedError):
        bench.open(attempt=1, location="file:///run", token="theirs")


def test_ranks_follow_to_the_identity_that_came_first(bench: Bench) -> None:
    """Of two starts on two hosts, the second takes the run of the first: its other ranks were refused."""
    told = {"location": "file:///run", "token": "one"}
    for session in ("rank 0", "rank 1"):
        bench.server.registry.begin_session(session)
    bench.open(attempt=1, run_id=OTHER_ID, session="rank 0", **told)
    bench.open(attempt=2, session="rank 0", **told)
    bench.open(attempt=2, session="rank 1", **told)
    assert [run.info.id for run in bench.server.registry.runs.values()] == [RUN_ID]


def test_a_live_trainer_keeps_its_run(bench: Bench) -> None:
    bench.server.registry.begin_session("first")
    bench.open(session="first", pid=4711)
    bench.server.registry.begin_session("second")
    with pytest.raises(RunBusyError, match="4711"):
        bench.open(attempt=2, session="second")
    bench.open(session="second")  # its own trainer, which connected again
    bench.server.end_session("second")
    assert bench.open(attempt=2, session="first").attempt == 2


def test_a_killed_trainer_keeps_nothing_though_still_connected(bench: Bench) -> None:
    """Who started it again in the moment after the kill was told that it lives, and ended."""
    with subprocess.Popen(["sleep", "60"]) as killed:
        process = ProcessId.of(killed.pid)
        bench.server.registry.begin_session("first", process)
        bench.open(session="first", pid=killed.pid)
        bench.server.registry.begin_session("second", ProcessId.of(os.getpid()))
        with pytest.raises(RunBusyError, match=str(killed.pid)):
            bench.open(attempt=2, session="second")
        killed.kill()
    assert bench.open(attempt=2, session="second").attempt == 2
    assert bench.server.end_session("first") == []
    with pytest.raises(RunBusyError):
        bench.open(attempt=3)


def test_one_of_two_trainers_that_begin_a_run_at_once_is_refused(bench: Bench) -> None:
    """Each has found nothing, and made an identity of its own: both trained, and the later one fenced the earlier."""
    for session in ("first", "second"):
        bench.server.registry.begin_session(session)
    first = RunInfo(name="x", id="1" * 12, location="file:///x", attempt=1, token="a", session="first", pid=4711)
    second = replace(first, id="2" * 12, token="b", session="second")
    bench.server.open_run(first)
    with pytest.raises(RunBusyError, match="4711"):
        bench.server.open_run(second)
    bench.server.open_run(replace(second, id="3" * 12, location="file:///y"))
    bench.server.end_session("first")
    assert bench.server.open_run(second).attempt == 1


def test_an_older_file_never_replaces_a_newer_one(bench: Bench) -> None:
    """A dead trainer's file that arrives late, by attempt, step or time."""
    bench.open(attempt=2)
    newest = bench.file("last.ckpt", 9, attempt=2, created_unix_s=50.0)
    upload = bench.server.uploads.lease(RUN, 2, 1000)
    with upload.slot.view(1000) as view:
        view[:] = image_of(20, 1000)
    with pytest.raises(FencedError):
        bench.server.uploads.seal(upload.id, manifest_of(20, 1, name="last.ckpt", file="", created_unix_s=60.0))
    with pytest.raises(FencedError):
        bench.file("last.ckpt", 8, attempt=2, created_unix_s=60.0)
    assert len(bench.server.uploads) == 0
    assert [slot.manifest for slot in bench.server.ring.contents(RUN_ID)] == [newest]
    assert bench.flush() == []
    assert (Path(bench.tier().url) / "last.ckpt").read_bytes() == image_of(9, 1000)


# -- uploads ----------------------------------------------------------------------------------------------------------


def test_parts_must_all_have_arrived(bench: Bench) -> None:
    bench.open()
    upload = bench.server.uploads.lease(RUN, 1, 100)
    manifest = manifest_of(1, nbytes=100).sealed(memoryview(bytes(100)))
    with pytest.raises(CorruptSnapshotError, check=lambda error: error.part == 0):
        bench.server.uploads.commit(upload.id, manifest)
    assert bench.committed() == []
    with pytest.raises(SnapshotNotFoundError):
        bench.server.uploads.find(upload.id)


# -- what readers and tiers see ---------------------------------------------------------------------------------------


def test_removal_reaches_the_tier_also_while_it_is_written(bench: Bench) -> None:
    first = bench.hold()
    bench.server.remove(RUN, first.name)
    assert bench.committed() == []
    bench.tier().open.set()
    assert bench.flush() == []
    assert bench.tier().survey().manifests == []
    with pytest.raises(SnapshotNotFoundError):
        bench.server.remove(RUN, first.name)


def test_a_user_file_is_never_dropped_from_memory_only(bench: Bench) -> None:
    bench.open(durable=False)
    bench.file("best.ckpt", 1)
    for step in range(5):
        bench.save(step)
    assert bench.server.ring.find(RUN_ID, "best.ckpt") is not None


def test_readers_are_safe_from_reuse(make_bench: MakeBench) -> None:
    bench = make_bench(slots=2)
    bench.open()
    first = bench.save(1)
    slot = bench.server.ring.find(RUN_ID, first.name)
    with bench.server.ring.reading(Resident((slot,), (first,))) as image:
        before = bytes(image)
        for step in range(2, 7):
            bench.save(step, wait_s=60)
            bench.flush()
        assert bytes(image) == before


# -- several runs -----------------------------------------------------------------------------------------------------


def test_one_run_cannot_fill_a_server(make_bench: MakeBench) -> None:
    """Snapshots of a run that were superseded, and clean old ones, make room for another run's."""
    bench = make_bench(slots=None, memory_bytes=40 * MIB)
    bench.open(keep=Keep(newest=100))
    for step in range(1, 8):
        bench.save(step, nbytes=4 * MIB, wait_s=60)
    bench.open(run_id=OTHER_ID)
    for step in range(1, 4):
        bench.save(step, nbytes=12 * MIB, run_id=OTHER_ID, wait_s=60)
    assert bench.committed(OTHER_ID)[0] == 3
    assert bench.committed()[0] == 7  # the newest is not given away for it


def test_a_run_stays_within_its_own_bound(make_bench: MakeBench) -> None:
    bench = make_bench(slots=None, memory_bytes=64 * MIB, run_memory_bytes=16 * MIB)
    bench.open(keep=Keep(newest=100))
    for step in range(1, 10):
        bench.save(step, nbytes=5 * MIB, wait_s=60)
        held = [slot for slot in bench.server.ring.slots if slot.run == RUN_ID]
        assert sum(slot.capacity for slot in held) <= 16 * MIB
    assert bench.committed()[0] == 9
    with pytest.raises(SnapshotFailedError, check=FailureReason.TOO_LARGE.caused):
        bench.save(10, nbytes=17 * MIB)
    bench.open(run_id=OTHER_ID, durable=False)
    bench.save(1, nbytes=15 * MIB, run_id=OTHER_ID)


# -- what a killed server leaves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dirty", [True, False])
def test_a_new_server_takes_over_what_a_killed_one_left(make_bench: MakeBench, runtime_dir: Path, dirty: bool) -> None:
    area = runtime_dir / "area"
    killed = make_bench(area=area)
    killed.open()
    if dirty:
        killed.tier().fail(TierError("not now"))
    sealed = killed.save(5)
    if not dirty:
        assert killed.flush() == []
    killed.die()
    heir = make_bench(area=area)
    assert heir.committed() == [5]
    assert heir.flush() == []  # though nobody has opened the run at it
    assert heir.tier().survey().manifests == [sealed]
    heir.open(attempt=2)
    heir.server.close()
    assert not area.exists()


def test_a_restarted_server_knows_the_attempts_of_what_it_holds(make_bench: MakeBench, runtime_dir: Path) -> None:
    killed = make_bench(area=runtime_dir / "area", allow=[])
    killed.open(attempt=7)
    killed.save(5, attempt=7)
    killed.open(attempt=8)  # of which nothing was committed yet
    killed.die()
    heir = make_bench(area=runtime_dir / "area", allow=[])
    assert heir.server.claimed(RUN) == 8
    with pytest.raises(FencedError):
        heir.open(attempt=7)
    with pytest.raises(FencedError):
        heir.open(attempt=8, token="of somebody else")
    heir.open(attempt=8)
    listed = heir.server.listed()
    assert [(run["name"], run["id"], run["attempt"]) for run in listed] == [("run", RUN_ID, 8)]


def test_who_waits_for_a_snapshot_holds_no_lock_of_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked the run up under the ring's lock, while who commits holds the other one and waits for that."""
    host, inverted = InProcessHost(slots=1, memory_bytes=MIB, open_store=LocalStore), list[str]()
    host.open_run(RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="token"))
    ring, registry = host._server.ring, host._server.registry

    class Checked:
        def __enter__(self) -> None:
            if ring.lock._is_owned():  # type: ignore[attr-defined]
                inverted.append(threading.current_thread().name)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(registry, "lock", Checked())
    assert host.wait_for(snapshot_name(1, 1), 0.0)[0] is Status.PENDING
    monkeypatch.undo()
    host.leave(complete=True)
    assert not inverted


def test_an_orderly_end_keeps_what_is_safe_nowhere_else(make_bench: MakeBench, runtime_dir: Path) -> None:
    """A server without a tier below holds the only copy; after SIGTERM the next server has it, as after SIGKILL."""
    ended = make_bench(area=runtime_dir / "area", allow=[])
    ended.open(attempt=7)
    ended.save(4, attempt=7)
    ended.save(5, attempt=7)
    ended.server.close(keep_unsafe=True)
    heir = make_bench(area=runtime_dir / "area", allow=[])
    assert heir.committed() == [5]
    assert heir.server.claimed(RUN) == 7


def test_a_record_is_replaced_not_written_over(tmp_path: Path) -> None:
    """A kill within leaves the old one."""
    area = SlotArea(tmp_path / "area")
    info = RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="")
    area.keep_run(info, False)
    with open(area.path / f"run-{info.key}.json") as old:
        area.keep_run(info, True)
        assert '"complete": false' in old.read()
    area.close()


def test_records_that_cannot_be_written_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was said of every snapshot, twice, that there is no room for its record."""
    area = SlotArea(tmp_path / "area")
    info = RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="")
    record = area.path / f"run-{info.key}.json"
    record.mkdir()
    for _ in range(3):
        area.keep_run(info, False)
    assert said_about(caplog, "slots-not-recorded") == [str(area.path)]
    record.rmdir()
    area.keep_run(info, False)
    assert [left.info.name for left in area.runs()] == ["run"]
    shutil.rmtree(area.path)
    area.keep_run(info, True)
    assert said_about(caplog, "slots-not-recorded") == [str(area.path)] * 2
    area.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """While something is in it, no file can be made in an area, ``"new"``, or none be written, ``"all"``."""
    why: set[str] = set()

    def short(path: Path, flags: int = os.O_RDONLY, *, linked: bool = False) -> int:
        if flags & os.O_CREAT and ("all" in why or (why and not path.exists())):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, flags, linked=linked)

    monkeypatch.setattr(area_module, "open_file", short)
    return why


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.guarantee("G3")
def test_what_is_committed_to_a_full_tmpfs_outlives_a_kill(
    make_bench: MakeBench, runtime_dir: Path, full: set[str], before: int
) -> None:
    """Of three slots full of snapshots nothing was left: there was no room for their records."""
    killed = make_bench(area=runtime_dir / "area", allow=[])
    killed.open()
    killed.server.uploads.abort(killed.server.uploads.lease(RUN, 1, 1000).id)  # made ahead
    for step in range(1, before + 1):
        killed.save(step)
    full.add("new")
    for step in range(before + 1, before + (4 if before else 2)):
        killed.save(step)
    held = killed.committed()
    killed.die()
    full.clear()
    assert make_bench(area=runtime_dir / "area", allow=[]).committed() == held


@pytest.mark.guarantee("G13")
def test_what_is_said_to_stay_in_tmpfs_has_its_record(make_bench: MakeBench, runtime_dir: Path, full: set[str]) -> None:
    """It was full for a moment as the snapshot was committed; the next server removed what it was told to take over."""
    ended = make_bench(area=runtime_dir / "area", allow=[])
    ended.open()
    full.add("all")
    ended.save(1)
    full.clear()
    ended.server.close(keep_unsafe=True)
    assert make_bench(area=runtime_dir / "area", allow=[]).committed() == [1]


def test_a_record_that_two_areas_have_is_not_written_over(make_bench: MakeBench, killed: Path, tmp_path: Path) -> None:
    """That of a slot is linked while it is taken over, and its room is that of the next one."""
    taken = {name: (killed / name).read_bytes() for name in ("slot-0.json", "slot-1.json")}
    for name in taken:
        os.link(killed / name, killed.parent / f"other-{name}")
    heir = make_bench(area=killed)
    heir.open(durable=False)
    for step in (3, 4, 5):
        heir.save(step)
    assert {name: (killed.parent / f"other-{name}").read_bytes() for name in taken} == taken


@pytest.fixture
def killed(make_bench: MakeBench, runtime_dir: Path) -> Path:
    """The area of a server that was killed with two steps in memory."""
    bench = make_bench(area=runtime_dir / "area")
    bench.open(durable=False)
    for step in (1, 2):
        bench.save(step)
    bench.die()
    return runtime_dir / "area"


def test_two_living_servers_never_share_an_area(make_bench: MakeBench, runtime_dir: Path) -> None:
    """Containers with a /dev/shm in common and runtime directories of their own."""
    one, other = make_bench(area=runtime_dir / "area"), make_bench(area=runtime_dir / "area")
    for bench, step in ((one, 1), (other, 2)):
        bench.open(durable=False)
        bench.save(step)
    assert (one.committed(), other.committed()) == ([1], [2])
    one.die()
    heir = make_bench(area=runtime_dir / "area")
    assert heir.committed() == [1]
    heir.server.close()
    other.server.close()
    assert list(runtime_dir.glob("area*")) == []


def test_an_heir_adopts_while_somebody_looks_for_servers(make_bench: MakeBench, killed: Path) -> None:
    """As `status` and `stop` do, which take its lock for a moment."""
    looks = open(killed / AREA_LOCK, "rb")  # noqa: SIM115 - closed by the timer
    fcntl.flock(looks, fcntl.LOCK_SH | fcntl.LOCK_NB)
    threading.Timer(0.2, looks.close).start()
    heir = make_bench(area=killed)
    assert heir.committed() == [2, 1]
    assert heir.server.ring.area.path == killed


def test_an_heir_with_fewer_slots_loses_nothing(make_bench: MakeBench, killed: Path) -> None:
    assert make_bench(area=killed, slots=1).committed() == [2, 1]


def test_a_damaged_leftover_is_dropped(make_bench: MakeBench, killed: Path) -> None:
    with open(killed / "slot-1.img", "r+b") as file:
        file.seek(100)
        file.write(b"\0damage\0")
    assert make_bench(area=killed).committed() == [1]


@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize(
    ("lacks", "error"),
    [
        ("map_shared", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("map_shared", MemoryError()),
        ("open_file", OSError(errno.ENFILE, os.strerror(errno.ENFILE))),
    ],
    ids=["map", "objects", "lock"],
)
@pytest.mark.guarantee("G2")
def test_a_recovery_that_lacks_something_drops_no_snapshot(
    make_bench: MakeBench, killed: Path, monkeypatch: pytest.MonkeyPatch, times: int, lacks: str, error: Exception
) -> None:
    """It is tried again; if it does not pass, the server does not start, and the next one takes it over.

    Without the lock, the heir began beside it with nothing, and the run went back to what was in storage.
    """
    left, owner = [error] * times, slot_module if lacks == "map_shared" else area_module
    real = getattr(owner, lacks)

    def short(what: Any, *arguments: Any, **more: Any) -> Any:
        if left and (lacks == "map_shared" or what.name == AREA_LOCK):
            raise left.pop()
        return real(what, *arguments, **more)

    monkeypatch.setattr(owner, lacks, short)
    monkeypatch.setattr(area_module, "REOPEN_PAUSES_S", (0.01, 0.01))
    if times > 1:
        with pytest.raises(TierError, match=r"slot-|area"):
            make_bench(area=killed)
        left.clear()
    assert make_bench(area=killed).committed() == [2, 1]


def test_small_tmpfs_falls_back_to_memory_files(
    make_bench: MakeBench,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(fd: int, nbytes: int, real: Callable[..., mmap.mmap] = slot_module.make_shared) -> mmap.mmap:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(runtime_dir)):
            raise OSError(28, "No space left on device")
        return real(fd, nbytes)

    monkeypatch.setattr(slot_module, "make_shared", full)
    bench = make_bench(area=runtime_dir / "area")
    bench.open()
    sealed = bench.save(1)
    assert bench.flush() == []
    assert bench.tier().survey().manifests == [sealed]
    backings = {slot["backing"] for slot in bench.server.status()["slots"] if slot["snapshot"]}
    assert backings == {"memfd"}
    assert said(caplog, "shm-full")


@pytest.mark.parametrize(
    ("size", "free", "backing"),
    [(1024, 639, "memfd"), (1024, 640, "tmpfs"), (2**25, 2**18 + 511, "memfd"), (2**25, 2**18 + 512, "tmpfs")],
    ids=["small-full", "small", "large-full", "large"],
)
def test_a_tmpfs_is_never_filled_up_by_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, free: int, backing: str
) -> None:
    """It was, and for a moment even by one: workers of a DataLoader, which pass tensors on through it, are killed then.

    An eighth of it is left to them, up to 1 GiB.
    """
    filled: list[str] = []

    def noted(fd: int, nbytes: int, real: Callable[..., mmap.mmap] = slot_module.make_shared) -> mmap.mmap:
        filled.append(os.readlink(f"/proc/self/fd/{fd}"))
        return real(fd, nbytes)

    monkeypatch.setattr(slot_module, "make_shared", noted)
    room = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda _fd: room)
    memory = SlotMemory.create(2 * MIB, tmp_path / "slot")
    assert memory.backing == backing
    assert [str(tmp_path) in path for path in filled] == [backing == "tmpfs"]
    memory.close()
    assert not (tmp_path / "slot").exists()


# -- this host's memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/pod/box\n", {"pod/memory.max": "1000000", "pod/memory.current": "400000", "pod/memory.stat": "anon 1"}),
        (
            "4:memory:/pod\n0::/\n",
            {
                "memory/pod/memory.limit_in_bytes": "1000000",
                "memory/pod/memory.usage_in_bytes": "500000",
                "memory/pod/memory.stat": "total_inactive_file 100000",
            },
        ),
    ],
)
def test_a_containers_memory_limit_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "cgroup").write_text(cgroup)
    monkeypatch.setattr(slot_module, "CGROUPS", tmp_path)
    monkeypatch.setattr(slot_module, "PROC_CGROUP", tmp_path / "cgroup")
    assert host_memory_bytes() == 1000000
    assert slot_module.available_bytes() == 600000
    with pytest.raises(TierError, match=r"700\.00 kB.*600\.00 kB"):
        SlotMemory.create(700000, None)


def test_without_a_container_the_limit_is_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "PROC_CGROUP", tmp_path / "none")
    assert host_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_writer_without_a_bound_of_slots_has_a_few(make_bench: Callable[..., Bench]) -> None:
    """Of as many lineages, each has a newest snapshot that never gives way: they took half of all slots there are."""
    bench = make_bench(slots=None, memory_bytes=256 * MIB)
    bench.open(durable=False)
    bench.open(run_id=OTHER_ID, durable=False)
    bench.save(1, run_id=OTHER_ID)
    for step in range(MOST_OF_A_WRITER):
        bench.save(step, lineage=f"{step:012x}")
    bench.server.remove(f"run@{OTHER_ID}", snapshot_name(1, 1))  # a slot that is free is one more, too
    with pytest.raises(SnapshotFailedError):
        bench.save(0, lineage="f" * 12)
    bench.save(1, run_id=OTHER_ID)  # at once: it is full for the other one only


def test_nothing_is_kept_of_runs_that_are_not_here(bench: Bench) -> None:
    def views() -> int:
        return sum(isinstance(each, View) for each in gc.get_objects())

    bench.open(durable=False)
    before = views()
    for number in range(100):
        assert bench.server.ring.readable(f"{number:012x}") == []
    assert views() <= before + 1


def test_a_token_holder_has_few_registers_that_failed(bench: Bench) -> None:
    bench.open(durable=False)
    for writer in range(5):
        for step in range(20):
            bench.server.uploads.fail(f"run@{RUN_ID}", 1, failed_shard(step, writer, 5))
    assert len(bench.committed()) == MOST_ABORTED
    forged = failed_shard(99, 0, 5)
    upload = bench.server.uploads.lease(f"run@{RUN_ID}", 1, 0, manifest=forged)
    with pytest.raises(SettingsError):
        bench.server.uploads.commit(upload.id, forged)
    assert len(bench.committed()) == MOST_ABORTED


@pytest.mark.parametrize("idle_s", [0.01, 1.0])
def test_places_of_files_are_forgotten_with_their_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    monkeypatch.setattr(worker, "IDLE_S", idle_s)
    elsewhere = str(bench.root / "files")
    bench.open()
    bench.file("best.ckpt", 1, destinations=[elsewhere])
    assert bench.flush() == []
    bench.server.remove(f"run@{RUN_ID}", "best.ckpt")
    assert bench.flush() == []
    assert elsewhere in bench.server.tiers()
    monkeypatch.setattr(registry, "MOST_RUNS", 1)
    if idle_s < 1.0:
        until(lambda: not bench.server.reconciler._workers, "its worker to end")
    bench.open(run_id=OTHER_ID)
    until(lambda: elsewhere not in bench.server.tiers(), "its place to be forgotten")


def test_a_file_whose_replacement_is_killed_has_one_version(
    make_bench: MakeBench, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_area: SlotArea, _slot: Slot) -> None:
        raise Killed

    bench = make_bench(area=runtime_dir / "area")
    bench.open()
    bench.tier().open.clear()
    bench.file("best.ckpt", 1)
    with monkeypatch.context() as patch:
        patch.setattr(SlotArea, "record", die)
        with pytest.raises(Killed):
            bench.file("best.ckpt", 2)
    left = shutil.copytree(runtime_dir / "area", runtime_dir / "left")
    (left / "lock").unlink()
    assert make_bench(area=left).committed() == [1]


def test_opening_a_run_without_its_token_changes_nothing_of_it(bench: Bench) -> None:
    bench.open(keep=Keep(newest=7))
    bench.tier().open.clear()
    bench.save(1)
    known = bench.server.registry.find(RUN).info
    for token in ("", "another"):
        with pytest.raises(FencedError):
            bench.server.open_run(replace(known, token=token, durable_url="/elsewhere"))
    for moved in (replace(known, durable_url="/elsewhere"), replace(known, location="file:///elsewhere")):
        with pytest.raises(SettingsError, match="/elsewhere"):
            bench.server.open_run(moved)
    assert bench.server.ring.owed(bench.server.ring.contents(RUN_ID)[:1]) == [bench.tier().url]
    assert bench.server.registry.find(RUN).info.keep == Keep(newest=7)


def test_one_writer_never_undoes_what_another_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = memoryview(image_of(1, 1000))
    sealed = manifest_of(1).sealed(image)
    first, second = LocalStore(tmp_path / "run"), LocalStore(tmp_path / "run")

    def overtaken() -> Iterator[memoryview]:
        yield image
        second.put(sealed, image, attempt=1)
        monkeypatch.setattr(os, "unlink", lambda *_: pytest.fail("the manifest was taken away"))

    assert first.put_parts(replace(sealed, checksums=()), overtaken(), attempt=1) == sealed
    monkeypatch.undo()
    assert second.has(sealed)


def fails_once(real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    left = [error]

    def fails(*arguments: Any, **more: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments, **more)

    return fails


@pytest.mark.parametrize("what", ["store", "failed", "only"])
def test_a_tier_is_served_whatever_fails_beside_its_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What ended its thread would keep everything after that from being safe."""
    bench.open()
    failing: list[tuple[Any, str, Exception]] = [
        (bench.server.reconciler if what == "store" else reconcile.Destination, what, MemoryError())
    ]
    if what == "failed":
        failing.append((bench.tier(), "put", TierError("made")))
    for each, name, error in failing:
        monkeypatch.setattr(each, name, fails_once(getattr(each, name), error))
    bench.save(1)
    assert bench.flush() == []
    assert [slot.readers for slot in bench.server.ring.contents(RUN_ID)] == [0]


def test_what_is_committed_is_so_whatever_fails_in_planning(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer heard of a failure, and nothing of its run was done until something of it changed again."""
    bench.open()
    bench.save(1)
    assert bench.flush() == []
    monkeypatch.setattr(worker, "actions", fails_once(worker.actions, MemoryError()))
    bench.save(2)
    until(lambda: 2 in [each.step for each in bench.tier().survey().manifests], "the upload to be planned")


def test_a_flush_of_one_run_hurries_no_place_of_another(bench: Bench) -> None:
    """Whoever could write one run kept the failing storage of others busy."""
    for run_id in (RUN_ID, OTHER_ID):
        bench.open(run_id=run_id)
        bench.tier(run_id).fail(TierError("made"))
        bench.save(1, run_id=run_id)
    at = [bench.server.reconciler.destination(bench.tier(run_id).url) for run_id in (RUN_ID, OTHER_ID)]
    until(lambda: all(each.tried for each in at), "both to have failed")
    with bench.server.ring.changed:
        tried = [tried for each in at for tried in each.tried.values()]
        for each in tried:
            each.failures, each.failed_s = 9, time.monotonic()
        assert bench.server.reconciler.flush(RUN_ID, 0.0)
        assert [each.failures for each in tried] == [1, 9]


def test_a_damaged_file_goes_and_not_what_has_replaced_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, names = Manifest.verify, iter(["best.ckpt"])

    def replaced_meanwhile(manifest: Manifest, view: memoryview, where: str) -> None:
        if manifest.name == next(names, None):
            bench.file(manifest.name, 2)
            raise CorruptSnapshotError("made")
        verify(manifest, view, where)

    bench.open()
    monkeypatch.setattr(worker, "CHECKED_S", -1.0)
    monkeypatch.setattr(Manifest, "verify", replaced_meanwhile)
    bench.file("best.ckpt", 1)
    assert bench.flush() == []
    assert bench.committed() == [2]
    assert (Path(bench.tier().url) / "best.ckpt").read_bytes() == image_of(2, 1000)
