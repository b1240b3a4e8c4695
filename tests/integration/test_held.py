"""What a server holds on to, for how long, what a full ring says of it, and what the next server takes over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.capture.attempt import drain_s_of
from lightning_spot.client import starting
from lightning_spot.errors import FailureReason, FencedError, SnapshotFailedError, TierError
from lightning_spot.protocol.record import find_record
from lightning_spot.snapshot.manifest import snapshot_name
from tests.support.server import (
    FIRST,
    MIB,
    OTHER_ID,
    RUN,
    RUN_ID,
    Bench,
    MakeBench,
    MakeWithServers,
    ServerBehind,
    WithServers,
    is_kept,
)
from tests.support.waiting import until


class TwoSlots(WithServers):
    """Its snapshot servers have two slots, and take any run."""

    slots_behind = 2

    def store(self, url: str) -> Any:
        if not url.startswith("spot://"):
            return super().store(url)
        return self.behind.setdefault(url, ServerBehind(url, self.servers[url.rpartition("/")[0]]))


def test_finished_runs_do_not_fill_a_server_that_uploads_nothing(make_bench: Callable[..., TwoSlots]) -> None:
    bench = make_bench(kind=TwoSlots, allow=[])
    for run_id in (f"{number:012x}" for number in range(4)):  # twice as many as it has slots
        bench.start(FIRST, run_id=run_id)
        until(lambda run_id=run_id: is_kept(bench.server.status()["runs"][f"run@{run_id}"]), "the server")
        for step in (1, 2):
            bench.save(step, run_id=run_id, complete=step == 2)
            assert bench.flush() == []
    status = bench.servers[FIRST].ring.status()
    assert snapshot_name(2, 1, complete=True) in [slot["snapshot"] for slot in status["slots"]]
    assert bench.servers[FIRST].ring.contents(f"{3:012x}")
    assert not [slot for slot in status["slots"] if slot["safe"] or slot["dirty"]]  # it wrote, and promises, nothing


def test_the_last_word_is_said_when_the_trainers_server_ends(with_servers: MakeWithServers) -> None:
    bench = with_servers([])
    bench.start(FIRST)
    until(lambda: is_kept(bench.server.status()["runs"][RUN]), "the server")
    bench.tier().open.clear()
    bench.save(1)
    until(lambda: bench.held(FIRST), "the snapshot server to have it")
    assert not bench.servers[FIRST].ring.contents(RUN_ID)[0].durable_or_superseded  # it is not durable yet
    bench.tier().open.set()
    assert bench.flush() == []
    bench.server.close()
    assert bench.servers[FIRST].ring.contents(RUN_ID)[0].durable_or_superseded


def test_only_what_is_superseded_or_durable_is_let_go(make_bench: MakeBench) -> None:
    bench = make_bench(allow=(), slots=4)
    bench.open(attempt=2)
    for step, lineage in ((1, "1" * 12), (3, "1" * 12), (5, "1" * 12), (2, "2" * 12)):
        bench.save(step, attempt=2, lineage=lineage)
    bench.open(attempt=2, persisted=snapshot_name(3, 2), lineage="1" * 12)

    def settled() -> set[int]:
        held = bench.server.ring.contents(RUN_ID)
        return {slot.manifest.step for slot in held if slot.manifest and slot.durable_or_superseded}

    known = settled()
    assert known == {1, 3} & set(bench.committed())
    with pytest.raises(FencedError):
        bench.open(attempt=1, persisted=snapshot_name(5, 2), lineage="1" * 12)
    bench.open(attempt=2, persisted="best.ckpt", lineage="1" * 12)  # no name of a snapshot
    assert settled() == known
    bench.save(6, attempt=2, lineage="1" * 12)
    bench.save(7, attempt=2, lineage="1" * 12)
    assert 2 in bench.committed()  # the newest of its lineage, and nobody said that it is durable


def test_a_full_ring_says_why(make_bench: MakeBench) -> None:
    bench = make_bench(slots=None, memory_bytes=7 * MIB, run_memory_bytes=None)  # for three slots
    bench.open()
    bench.open(run_id=OTHER_ID, durable=False)
    bench.save(1, run_id=OTHER_ID)
    bench.tier().open.clear()
    bench.save(1)
    bench.server.uploads.lease(RUN, 1, 1000)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused) as found:
        bench.server.uploads.lease(RUN, 1, 1000)
    assert "none of 3 slots" in str(found.value)
    assert f"1 not at {bench.tier().url} yet" in str(found.value)
    assert "1 being filled" in str(found.value)
    assert "1 newest of their runs and safe nowhere else" in str(found.value)
    assert "--run-memory-limit" not in str(found.value)


def test_a_run_that_has_used_up_its_share_is_told(make_bench: MakeBench) -> None:
    bench = make_bench(slots=None, run_memory_bytes=MIB)
    bench.open(durable=False)
    bench.save(1, nbytes=900_000)
    with pytest.raises(
        SnapshotFailedError,
        match="--run-memory-limit",
        check=FailureReason.RING_FULL.caused,
    ):
        bench.save(2, nbytes=900_000)


def test_the_speed_of_a_tier_that_a_server_now_writes_is_ignored(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    behind = bench.behind[FIRST]
    server, behind.server = behind.server, None
    bench.start(FIRST)
    bench.save(1)
    assert bench.flush() == []  # written from here, while there was no server
    url = bench.tier().url
    assert not bench.server.tiers()[url].carried
    behind.server = server
    until(lambda: bench.server.status()["runs"][RUN]["kept_at"], "the server to carry the run on")
    bench.save(2)
    assert bench.flush() == []
    health = bench.server.tiers()
    assert health[url].carried
    assert health[url].flushed == 1
    assert drain_s_of({url: health[url]}, 60.0) == 0.0


# -- what the next server takes over -----------------------------------------------------------------------------------


def test_what_a_server_left_in_a_second_directory_is_taken_over(
    make_bench: MakeBench, tmp_path: Path, runtime_dir: Path
) -> None:
    """Two servers lived side by side on one tmpfs and both were killed: nothing of either is lost."""
    area = runtime_dir / "area"

    def bench(run_id: str) -> Bench:
        made = Bench(tmp_path / run_id, area=area, slots=4, open_store=_away)
        made.open(run_id=run_id, durable=False)
        return made

    first, second = bench(RUN_ID), bench(OTHER_ID)
    for step in (1, 2):
        first.save(step)
        second.save(step, run_id=OTHER_ID)
    second.open(run_id=RUN_ID, durable=False, attempt=3)
    first.die()
    second.die()
    (beside,) = runtime_dir.glob("area-*")
    heir = make_bench(tmp_path / "heir", area=area, slots=8, open_store=_away)
    assert sorted(heir.committed()) == [1, 2]
    assert sorted(heir.committed(OTHER_ID)) == [1, 2]
    assert heir.server.claimed(RUN) == 3
    assert not beside.exists()
    for slot in heir.server.ring.contents():
        slot.manifest.verify(slot.view(), "memory")


def test_a_directory_of_somebody_else_is_left_as_it_is(make_bench: MakeBench, runtime_dir: Path) -> None:
    (runtime_dir / "area-1" / "lock").mkdir(parents=True)
    bench = make_bench(area=runtime_dir / "area")
    bench.open(durable=False)
    bench.save(1)
    assert bench.committed() == [1]
    assert (runtime_dir / "area-1" / "lock").is_dir()


def test_a_kill_during_recovery_loses_and_duplicates_nothing(
    make_bench: MakeBench, tmp_path: Path, runtime_dir: Path
) -> None:
    area = runtime_dir / "area"
    killed = Bench(tmp_path, area=area, slots=4)
    killed.open(durable=False)
    killed.save(1)
    killed.die()
    shutil.copytree(area, runtime_dir / "area-1")
    record = json.loads((runtime_dir / "area-1" / "slot-0.json").read_text())
    record["sequence"] += 1
    (runtime_dir / "area-1" / "slot-0.json").write_text(json.dumps(record))
    heir = make_bench(tmp_path / "heir", area=area, slots=4)
    assert heir.committed() == [1]
    assert len(list(area.glob("slot-*.img"))) == 1


def test_a_server_is_given_the_time_that_its_slots_take(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks every byte before it answers: gigabytes take longer than a start usually may."""
    url = str(tmp_path / "run-1")
    record = find_record(url)
    monkeypatch.setattr(starting, "START_TIMEOUT_S", 0.001)
    (area := runtime_dir / f"lightning-spot-{record.key}-1").mkdir()
    with open(area / "slot-0.img", "wb") as image:
        image.truncate(12 * 10**9)  # a minute; it has no blocks, and no record
    monkeypatch.setattr("lightning_spot.protocol.record.read_environment", lambda: _Environment(runtime_dir))
    host = starting.start(url, RUN, slots=2, memory_bytes=MIB, server_idle_timeout_s=0.1)
    host.disconnect()
    until(lambda: not record.running(), "the server to end")


class _Environment:
    def __init__(self, folder: Path) -> None:
        self.shm_dir = self.runtime_dir = folder


def _away(url: str) -> Any:
    raise TierError(f"{url} is away")
