"""Snapshots of several writers in a ring: which of them stay, which give way, and where each is still to go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.server.ring import Ring
from lightning_spot.server.slot_choice import Limits, SlotRequest, find_room
from lightning_spot.server.slots import (
    ORPHANED_S,
    Commit,
    Known,
    Mark,
    Resident,
    Slot,
    SlotState,
    Tiers,
    View,
    evictable,
)
from lightning_spot.server.slots import Slots as AllSlots
from lightning_spot.snapshot.manifest import Manifest, Order, shard_name, snapshot_name
from lightning_spot.snapshot.shards import Status
from lightning_spot.store import commit
from lightning_spot.store.local import LocalStore
from tests.support.server import RUN, RUN_ID, Bench, MakeBench, committed, manifest_of
from tests.support.shards import apart_shard, failed_shard, sealed_apart, sealed_shard, shard_image, shard_manifest
from tests.support.waiting import until

LINEAGE = "1" * 12
STORAGE, SERVER = "/tier", "spot://first/run"


class Slots:
    """Slots by snapshot and writer, in the order in which they were committed."""

    def __init__(self) -> None:
        self.all: list[Slot] = []
        self.known = Known()
        self.now_s = 0.0

    def add(self, step: int, *writers: int, of: int = 2, persist: bool = True, **fields: Any) -> list[Slot]:
        made = []
        for writer in writers:
            manifest = sealed_shard(step, writer, of)
            made.append(self._slot(replace(manifest, shard=replace(manifest.shard, persist=persist)), **fields))
        return made

    def plain(self, step: int, **fields: Any) -> Slot:
        return self._slot(manifest_of(step), **fields)

    def failed(self, step: int, writer: int) -> Slot:
        return self._slot(failed_shard(step, writer), nbytes=0)

    def _slot(self, manifest: Any, *, at_s: float = 0.0, nbytes: int = 2**20, refused: str = "") -> Slot:
        slot = Slot(len(self.all), SlotState.HELD, reserved_bytes=nbytes, run=RUN_ID, manifest=manifest)
        slot.commit = Commit(len(self.all), at_s)
        slot.seen = {refused: Mark.REFUSED} if refused else {}
        slot.writer = manifest.shard.writer if manifest.shard is not None else 0
        self.all.append(slot)
        return slot

    def committed(self, step: int) -> None:
        """Other places show that a snapshot is complete over them."""
        order: Order = (1, step, 2)
        self.known.committed.setdefault(LINEAGE, set()).add(order)

    def states(self) -> dict[int, Status]:
        return {group.manifest.step: group.state for group in self.view().groups}

    def view(self, tiers: Tiers = Tiers()) -> View:  # noqa: B008
        return View(self.all, tiers, self.known)

    def newest(self) -> set[int]:
        return _steps(self.view().newest)

    def idle(self) -> list[int]:
        return [slot.manifest.step for slot in evictable([self.view()], self.now_s) if slot.manifest is not None]

    def owed(self, tiers: Tiers) -> dict[int, list[str]]:
        owed = self.view(tiers).owed
        return {slot.manifest.step: owed.get(slot, []) for slot in self.all if slot.manifest is not None}


def _steps(slots: set[Slot]) -> set[int]:
    return {slot.manifest.step for slot in slots if slot.manifest is not None}


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(slots=None, memory_bytes=2**28)
    yield made
    made.close(keep_unsafe=False)


def test_what_is_whole_stays_until_something_newer_is_here_too(slots: Slots) -> None:
    """The one server with what superseded it may be lost: with replicas=2, one may."""
    whole = slots.add(1, 0, 1)
    slots.add(2, 0)
    slots.committed(2)
    assert slots.idle() == []
    slots.add(2, 1)
    assert slots.idle() == [1, 1]
    del slots.all[-1]
    for slot in whole:
        slot.seen[STORAGE] = Mark.SAFE
    assert slots.idle() == [1, 1]


def test_only_what_is_complete_supersedes(slots: Slots) -> None:
    slots.add(1, 0, 1)
    slots.add(2, 0)
    slots.add(3, 1)
    assert slots.states() == {1: Status.COMMITTED, 2: Status.PENDING, 3: Status.PENDING}
    assert slots.newest() == {1, 2, 3}
    assert slots.idle() == []
    slots.add(3, 0)
    assert slots.states() == {1: Status.COMMITTED, 2: Status.ABORTED, 3: Status.COMMITTED}
    assert slots.newest() == {3}
    assert set(slots.idle()) == {1, 2}


def test_a_complete_one_at_other_places_supersedes_what_is_here(slots: Slots) -> None:
    for step in (1, 2, 3):
        slots.add(step, 0)
    slots.committed(2)
    assert slots.states() == {1: Status.ABORTED, 2: Status.COMMITTED, 3: Status.PENDING}
    assert slots.newest() == {2, 3}
    assert slots.idle() == [1]
    slots.all[1].seen = {SERVER: Mark.SAFE}
    assert slots.idle() == [1, 2]  # the newest last


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_shard_that_failed_gives_the_others_up(slots: Slots, where: str) -> None:
    slots.add(1, 0, 1)
    slots.add(2, 0)
    if where == "here":
        slots.failed(2, 1)
    else:
        shard = failed_shard(2, 1).shard
        slots.known.seen_registers[failed_shard(2, 1).snapshot] = {1: shard}
    assert slots.states()[2] is Status.ABORTED
    assert slots.newest() == {1}
    assert set(slots.idle()) == {2}


def test_a_failure_is_owed_until_something_newer_is_complete(slots: Slots) -> None:
    tiers = Tiers((SERVER, STORAGE))
    slots.failed(1, 1)
    assert slots.owed(tiers) == {1: [SERVER, STORAGE]}
    slots.add(2, 0, 1)
    assert slots.owed(tiers) == {1: [], 2: [SERVER, STORAGE]}


def test_a_failure_is_not_owed_where_a_server_brings_it(slots: Slots) -> None:
    failed = slots.failed(1, 1)
    assert slots.owed(Tiers((SERVER,), (STORAGE,))) == {1: [SERVER]}
    assert slots.owed(Tiers((), (SERVER,))) == {1: [SERVER]}  # no server takes it now, one will
    failed.seen = {SERVER: Mark.SAFE}
    assert slots.owed(Tiers((SERVER,), (STORAGE,))) == {1: []}  # nobody here would ever hear that it is there
    assert slots.owed(Tiers((SERVER, STORAGE))) == {1: [STORAGE]}  # no server brings it any more


def test_half_a_superseded_one_is_not_owed_if_servers_bring_it(slots: Slots) -> None:
    """Its other slot was reused: the half waited for storage to have a newer one, and training for all such slots."""
    slots.add(1, 0)
    slots.committed(1)
    slots.add(2, 0, 1)
    assert slots.owed(Tiers((SERVER,), (STORAGE,)))[1] == []
    assert slots.owed(Tiers((SERVER, STORAGE)))[1] == [STORAGE]  # other hosts bring theirs


def test_an_incomplete_snapshot_gives_way_after_an_hour(slots: Slots) -> None:
    slots.add(1, 0, at_s=100.0)
    slots.now_s = 100.0 + ORPHANED_S
    assert slots.idle() == []
    slots.now_s += 1.0
    assert slots.idle() == [1]


def test_an_aborted_one_that_storage_refuses_gives_way(slots: Slots) -> None:
    slots.add(1, 0, 1)
    slots.add(2, 0, at_s=100.0, refused=STORAGE)
    slots.now_s = 101.0
    assert slots.idle() == []  # nobody has said yet that it is aborted
    shard = failed_shard(2, 1).shard
    slots.known.seen_registers[failed_shard(2, 1).snapshot] = {1: shard}
    assert slots.idle() == [2]


def test_a_refused_part_gives_way_to_newer_or_in_time(slots: Slots) -> None:
    slots.add(1, 0, at_s=100.0, refused=STORAGE)
    slots.committed(1)
    slots.now_s = 101.0
    assert slots.idle() == []
    slots.now_s += ORPHANED_S
    assert slots.idle() == [1]
    slots.now_s = 101.0
    slots.committed(2)
    assert slots.idle() == [1]


def test_the_newest_of_each_lineage_stays(slots: Slots) -> None:
    slots.plain(1).manifest = replace(manifest_of(1), lineage="2" * 12)
    slots.add(2, 0, 1)
    slots.plain(3)
    assert slots.newest() == {1, 3}
    assert _steps(slots.view().only_here) == {1, 3}


def test_what_lacks_a_replica_only_is_not_only_here(slots: Slots) -> None:
    """A local server that had ended left it in shared memory for a day, though its run was complete and durable."""
    tiers = Tiers((SERVER, "spot://second/run"), (STORAGE,))
    for slot in slots.add(1, 0, 1):
        slot.seen = {SERVER: Mark.SAFE}
    assert _steps(slots.view(tiers).only_here) == {1}
    for slot in slots.all:
        slot.seen[STORAGE] = Mark.SAFE
    assert slots.owed(tiers) == {1: ["spot://second/run"]}
    assert _steps(slots.view(tiers).only_here) == set()


def test_servers_are_owed_the_newest_and_storage_what_is_wanted(slots: Slots) -> None:
    tiers = Tiers((SERVER, STORAGE))
    slots.add(1, 0, 1)
    slots.add(2, 0, 1, persist=False)
    assert slots.owed(tiers) == {1: [STORAGE], 2: [SERVER, STORAGE]}
    slots.add(3, 0, 1)
    assert slots.owed(tiers) == {1: [], 2: [], 3: [SERVER, STORAGE]}


def test_storage_is_owed_incomplete_ones_until_a_newer_one(slots: Slots) -> None:
    """All places must bring the same ones: none is left out because a newer one is there."""
    tiers = Tiers((STORAGE,))
    for step in (1, 2, 3):
        slots.add(step, 0, persist=step != 2)
        slots.committed(step)
    assert slots.owed(tiers) == {1: [STORAGE], 2: [], 3: [STORAGE]}
    slots.all[2].seen = {STORAGE: Mark.SAFE}
    assert slots.owed(tiers) == {1: [], 2: [], 3: []}


def test_each_writer_has_slots_of_its_own(slots: Slots) -> None:
    limits = Limits(slots=2, memory_bytes=2**30, run_memory_bytes=None)
    slots.add(1, 0, 1)
    slots.add(2, 0)
    slots.committed(1)

    def room(writer: int) -> Any:
        request = SlotRequest(RUN_ID, 2**20, 2**20, writer)
        return find_room(AllSlots(slots.all), request, limits, views=lambda: [slots.view()])

    assert room(0) is None  # its newest, and what may become so
    found = room(1)
    assert found.is_spare
    slots.add(2, 1)
    found = room(0)
    assert found.slot is slots.all[0]  # and not the other writer's


def sealed_first(bench: Bench) -> Manifest:
    """Have rank 0 write its shard of the first step, of two."""
    first = shard_manifest(1, 0)
    return bench.server.uploads.seal(bench.server.uploads.lease(RUN, 1, first.nbytes).id, first)


# -- what a ring forgets ----------------------------------------------------------------------------------------------


def put(ring: Ring, manifest: Manifest) -> None:
    slot = ring.try_lease(RUN_ID, manifest.nbytes, writer=manifest.shard.writer)
    ring.commit(slot, manifest)


def test_what_is_whole_here_stays_until_something_newer_is(ring: Ring) -> None:
    """With two replicas, the other server has the newer one first, and may be lost before this one has all of it."""
    for writer in (0, 1):
        put(ring, sealed_shard(1, writer))
    ring.raise_watermark(RUN_ID, snapshot_name(2, 1))
    for writer, whole in ((0, 1), (1, 2)):
        put(ring, sealed_shard(2, writer))
        ring.trim(RUN_ID, 1)
        assert [manifest.step for _, manifest in ring.readable(RUN_ID) if manifest.shard is None] == [whole]


def test_one_more_shard_has_not_all_of_a_run_looked_at(ring: Ring) -> None:
    """Else each would cost what all of them cost."""
    looked_at = []
    for writer in range(5):
        ring.stale.clear()
        put(ring, sealed_shard(1, writer, 5))
        looked_at.append(bool(ring.stale))
        assert ring.status_of(RUN_ID, snapshot_name(1, 1))[0] is (Status.COMMITTED if writer == 4 else Status.PENDING)
    assert looked_at == [True, False, False, False, True]


@pytest.mark.parametrize("what", ["safe", "persisted", "committed", "failed"])
def test_a_shard_is_looked_at_if_the_others_are_done_with(ring: Ring, what: str) -> None:
    manifest = sealed_shard(1, 0, 5)
    put(ring, manifest)
    if what == "safe":
        ring.mark(Resident.of(ring.contents(RUN_ID)), STORAGE, Mark.SAFE)
    elif what == "persisted":
        ring.mark_persisted(RUN_ID, manifest.lineage, manifest.order)
    elif what == "committed":
        ring.mark_committed(RUN_ID, manifest.lineage, manifest.order)
    ring.stale.clear()
    if what == "failed":
        ring.fail(RUN_ID, failed_shard(1, 1, 5))
    else:
        put(ring, sealed_shard(1, 1, 5))
    assert ring.stale == {RUN_ID}


def test_where_each_slot_belongs_is_known_at_any_time(ring: Ring) -> None:
    for step in range(1, 9):
        for writer in range(step % 3 + 1):
            put(ring, sealed_shard(step, writer, 3))
        if step % 3:
            ring.fail(RUN_ID, failed_shard(step, 2, 3))
        if (slot := ring.try_lease("other", step * 2**20)) is not None and step % 2:
            ring.abort(slot)
        ring.trim(RUN_ID, 1)
        again = AllSlots(ring.slots)
        assert (again.nbytes, again.free.keys()) == (ring.slots.nbytes, ring.slots.free.keys())
        assert all(again.free[size].keys() == slots.keys() for size, slots in ring.slots.free.items())
        for name in ("runs", "writers", "snapshots", "names"):
            assert getattr(ring.slots, name) == getattr(again, name)


def test_shards_that_fail_one_after_the_other_do_not_pile_up(ring: Ring) -> None:
    for writer in (0, 1):
        put(ring, sealed_shard(1, writer))
    for step in range(2, 60):
        put(ring, sealed_shard(step, 0))
        ring.fail(RUN_ID, failed_shard(step, 1))
        ring.trim(RUN_ID, 1)
        assert ring.status_of(RUN_ID, snapshot_name(step, 1))[0] is Status.ABORTED
    assert len(ring.slots) < 40
    assert ring.readable(RUN_ID, snapshot_name(1, 1))


def test_a_writer_waits_for_no_memory_that_only_its_shard_frees(make_bench: MakeBench) -> None:
    """Else training would stand as long as it may wait for a slot."""
    bench = make_bench(memory_bytes=2**21)
    bench.open(durable=False)
    sealed_first(bench)
    with pytest.raises(SnapshotFailedError) as caught:
        bench.server.uploads.lease(RUN, 1, 2**21, writer=1, wait_s=30.0, cancelled=lambda: pytest.fail("it waits"))
    assert caught.value.reason is FailureReason.TOO_LARGE
    bench.server.uploads.fail(RUN, 1, failed_shard(1, 1))
    assert bench.server.uploads.lease(RUN, 1, 2**21, writer=1, wait_s=30.0)


def test_a_rank_that_ends_may_drop_an_older_failure(ring: Ring) -> None:
    """Its failure makes room by dropping the oldest one, which comes later in the list of what is here."""
    slot = ring.try_lease(RUN_ID, 1000)
    for step in range(2, 18):
        ring.fail(RUN_ID, failed_shard(step, 1))
    ring.commit(slot, sealed_shard(1, 0))
    ring.fail_missing(RUN_ID, 1, 1, "it ended")
    assert ring.status_of(RUN_ID, snapshot_name(1, 1))[0] is Status.ABORTED


def test_a_rank_that_ends_without_a_slot_is_waited_for_no_more(make_bench: MakeBench) -> None:
    """One that had raised an error before it asked for the next slot: rank 0 waited a minute for its shard."""
    bench = make_bench()
    for rank in (0, 1):
        bench.server.registry.begin_session(f"rank {rank}")
        bench.open(session=f"rank {rank}")
        shard = shard_manifest(1, rank)
        committed(bench.server, RUN, shard, shard_image(shard), session=f"rank {rank}", writer=rank)
    later = shard_manifest(2, 0)
    committed(bench.server, RUN, later, shard_image(later), session="rank 0")
    assert bench.server.wait_for(RUN, later.snapshot, 0.0)[0] is Status.PENDING
    bench.server.end_session("rank 1")
    assert bench.server.wait_for(RUN, later.snapshot, 0.0)[0] is Status.ABORTED
    assert bench.server.wait_for(RUN, snapshot_name(1, 1), 0.0)[0] is Status.COMMITTED


def test_why_a_shard_failed_outlives_a_killed_server(make_bench: MakeBench, runtime_dir: Path) -> None:
    """The next one waited for what would never come."""
    killed = make_bench(area=runtime_dir / "area")
    killed.open(durable=False)
    first = sealed_first(killed)
    killed.server.uploads.fail(RUN, 1, failed_shard(1, 1))
    killed.die()
    heir = make_bench(area=runtime_dir / "area")
    assert heir.server.ring.status_of(RUN_ID, first.snapshot) == (Status.ABORTED, "rank 1: no memory")


def test_an_orphan_keeps_no_server_of_a_complete_run(make_bench: MakeBench) -> None:
    """It lived for as long as a shard was put off that nobody waits for."""
    bench = make_bench()
    bench.server.registry.begin_session("rank 0")
    bench.open(session="rank 0")
    sealed_first(bench)
    bench.server.end_session("rank 0")
    assert not bench.server.finished
    bench.server.close_run(RUN, "rank 0", complete=True)
    assert bench.server.finished


def test_a_host_of_several_lets_its_part_of_the_last_snapshot_go(make_bench: MakeBench) -> None:
    """Its server ended before it saw that another host had committed it, and left it in shared memory for a day."""
    bench = make_bench()
    bench.server.registry.begin_session("rank 0")
    bench.open(session="rank 0", hosts=2)
    names = [shard_name(snapshot_name(9, 1, complete=True), writer) for writer in (0, 1)]
    first = apart_shard(9, 0, name=names[0], complete=True)
    second = sealed_apart(9, 1, name=names[1], complete=True)
    committed(bench.server, RUN, first, shard_image(first))
    folder = Path(bench.tier().url) / first.snapshot
    until(lambda: (folder / "shard-00000.json").exists(), "the shard to be there")
    bench.server.end_session("rank 0")
    bench.server.close_run(RUN, "rank 0", complete=True)
    until(lambda: bench.server.drained, "nobody to wait for it")
    assert not bench.server.finished
    commit.put_shards(
        LocalStore(bench.tier().url), [(second, memoryview(shard_image(second)))], attempt=1
    )  # as another host
    until(lambda: bench.server.finished, "it to be seen complete")
    assert bench.server.ring.view(RUN_ID).only_here == set()
