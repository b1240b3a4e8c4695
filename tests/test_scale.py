"""One snapshot server under many clients: nobody is refused, all wait for the same time, and memory is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import scale
from lightning_spot.memory import flusher, slots
from lightning_spot.memory.slots import Slot
from lightning_spot.memory.work import Job, Work
from lightning_spot.service.upload_requests import MOST_STREAMS
from tests.conftest import until
from tests.gated import RUN_ID, Bench

OTHERS = [f"{number:012x}" for number in range(1, 4)]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A node that has brought two snapshots of each of four runs to their directories, and has nothing to do."""
    monkeypatch.setattr(flusher, "_IDLE_S", 600.0)
    bench = Bench(tmp_path, slots=None)
    for run_id in [*OTHERS, RUN_ID]:
        bench.open(run_id=run_id)
        for step in (1, 2):
            bench.save(step, run_id=run_id)
            assert bench.flush() == []
    yield bench
    bench.close()


def test_a_commit_asks_nothing_of_the_slots_of_other_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 64 runs, it took a node half as much processor time again as beside none."""
    looked_at: set[str] = set()
    own = Work._own

    def note(work: Work, slot: Slot) -> list[str]:
        looked_at.add(slot.run)
        return own(work, slot)

    monkeypatch.setattr(Work, "_own", note)
    monkeypatch.setattr(slots, "reusable", lambda _slots: pytest.fail("there was room"))
    bench.save(3)
    assert bench.flush() == []
    assert looked_at == {RUN_ID}
    assert bench.tier().puts() == [1, 2, 3]


def test_a_change_wakes_the_thread_of_its_own_tier_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 threads looked at all slots whenever anything had changed at one of them."""
    work = bench.node.flusher.work
    ask, found = work.next, dict[str, tuple[Job | None, float | None]]()

    def note(url: str, now_s: float) -> tuple[Job | None, float | None]:
        found[url] = ask(url, now_s)
        return found[url]

    monkeypatch.setattr(work, "next", note)
    for run_id in [*OTHERS, RUN_ID]:
        bench.save(3, run_id=run_id)
    assert bench.flush() == []
    until(lambda: list(found.values()) == [(None, None)] * 4, "all threads to wait")
    found.clear()
    bench.save(4)
    assert bench.flush() == []
    assert list(found) == [bench.tier().url]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_64_clients_are_served_alike_and_within_bounds(tmp_path: Path) -> None:
    memory_bytes = scale.CLIENTS * scale.SLOTS * scale.NBYTES * 2
    with scale.node(tmp_path, memory_bytes) as (url, process):
        load = scale.measure(url, process, clients=scale.CLIENTS, seconds=20.0)
        assert load.errors == []
        assert load.fairness >= 0.9
        assert min(load.commits) >= 1
        assert load.p99_s <= 3 * load.clients * scale.NBYTES / load.bytes_per_s
        assert load.own_bytes < 256 * 2**20
        assert load.threads < MOST_STREAMS + 64
        assert process.memory_info().shared <= memory_bytes + 64 * 2**20


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_clients_of_a_node_without_room_for_all_take_turns(tmp_path: Path) -> None:
    """The newest of each has room, and half as many more: senders wait for slots, and all get some."""
    slot_bytes = scale.NBYTES * 5 // 4
    with scale.node(tmp_path, 24 * slot_bytes) as (url, process):
        load = scale.measure(url, process, clients=16, seconds=20.0)
        assert min(load.commits) >= 1
        assert load.fairness >= 0.5
        assert all(error.startswith("SnapshotFailedError") for error in load.errors)
        assert process.memory_info().shared <= 24 * slot_bytes + 64 * 2**20
