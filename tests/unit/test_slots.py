"""Slots made when they are needed: how many a training gets, who waits for one, what is said of skipped snapshots."""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot.capture import host_link, slot_pool
from lightning_spot.capture.slot_pool import SlotPool, SlotViews
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client import starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError
from lightning_spot.interval.deadline import Deadline
from lightning_spot.interval.policy import EverySeconds, EverySteps
from lightning_spot.protocol.slot import SlotMemory, slot_capacity
from lightning_spot.server.host import InProcessHost, Lease
from lightning_spot.server.slot_choice import Limits, SlotRequest, find_room
from lightning_spot.server.slots import Commit, Making, Mark, Slot, Slots, SlotState, View
from lightning_spot.session.snapshotter import Pacing
from lightning_spot.store.retention import Keep
from tests.support.ranks import Desk
from tests.support.server import MIB, image_of, manifest_of, named_run
from tests.support.store import GatedStore
from tests.support.waiting import until

NBYTES = 1000


class Here:
    """A ring in this process, and its trainer's hold on it."""

    def __init__(self, root: Path, slots: int = 3) -> None:
        self.store = GatedStore(str(root / "tier"))
        self.host = InProcessHost(slots=slots, memory_bytes=2**26, open_store=lambda _url: self.store)
        self.host.open_run(named_run("run", self.store.url, keep=Keep(newest=100)))
        self.slots = self.host._server.ring.slots

    def take(self, step: int) -> bool:
        """A snapshot; whether the next one would need a slot that is not made yet."""
        lease = self.host.lease(NBYTES, 0.0)
        lease.map[:NBYTES] = image_of(step, NBYTES)
        return self.host.seal(lease, manifest_of(step, run_id=""))


@pytest.fixture
def here(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Here]:
    made = Here(tmp_path, getattr(request, "param", 3))
    yield made
    made.store.open.set()
    made.host.leave(complete=True)


def test_a_third_is_wanted_while_the_tier_reads_one(here: Here) -> None:
    here.store.open.clear()
    here.take(1)
    until(lambda: here.store.tries, "the tier to be at it")
    assert here.take(2)
    assert not here.take(3)  # where there is room for no more, none is wanted
    assert len(here.slots) == 3


@pytest.mark.parametrize("here", [2], indirect=True)
def test_a_larger_slot_made_ahead_replaces_only_superseded_ones(here: Here) -> None:
    """The newest snapshot is there until the next one is: what is made ahead of that never takes its place."""
    larger = 4 * slot_capacity(NBYTES)

    def there() -> list[int]:
        assert here.host.flush(30) == []
        return sorted(slot.snapshot.step for slot in here.slots if slot.snapshot is not None)

    here.take(1)
    filled = here.host.lease(NBYTES, 0.0)  # so the newest is all that could make room
    assert there() == [1]
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        here.host.lease(larger, 0.0, making=Making.SPARE)
    assert there() == [1]
    here.host.abort(filled)
    here.take(2)
    assert there() == [1, 2]
    here.host.abort(here.host.lease(larger, 0.0, making=Making.SPARE))
    assert there() == [2]


def test_who_needs_the_slot_that_is_being_made_waits_for_it(here: Here) -> None:
    here.take(1)
    spare = here.host.lease(NBYTES, 0.0, making=Making.SPARE)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        here.host.lease(NBYTES, 0.0)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(here.host.lease(NBYTES, 30.0).slot))
    waiting.start()
    here.host.abort(spare)
    waiting.join()
    assert found == [spare.slot]
    assert len(here.slots) == 2


def test_a_server_is_told_that_only_a_slot_that_is_made_will_do(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    host = starting.start(url, "run", slots=2, memory_bytes=2**26, server_idle_timeout_s=60.0)
    host.open_run(named_run("run", url))
    try:
        with pytest.raises(
            SnapshotFailedError, check=FailureReason.RING_FULL.caused
        ):  # and not that there is no memory for it
            host.lease(NBYTES, 0.0, making=Making.NEVER)
        first = host.lease(NBYTES, 0.0)
        host.abort(first)
        assert host.lease(NBYTES, 0.0, making=Making.NEVER).slot == first.slot
    finally:
        host.leave(complete=True)


# -- the writer -------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_by(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have made slots."""
    made: list[threading.Thread] = []

    def create(capacity: int, path: Path | None, real: Callable[..., SlotMemory] = SlotMemory.create) -> SlotMemory:
        made.append(threading.current_thread())
        return real(capacity, path)

    monkeypatch.setattr(SlotMemory, "create", create)
    return made


def slots_of(desk: Desk) -> list[str]:
    return [slot["state"] for slot in desk.host._server.status()["slots"]]


def test_the_writer_has_slots_made_one_after_the_other(desk: Desk) -> None:
    desk.writer.warm(700_000)
    until(lambda: desk.writer.ready, "the first slot")
    assert slots_of(desk) == ["free"]
    desk.begin(1, desk.checkpoint()).result(120)
    until(lambda: slots_of(desk) == ["held", "free"], "the second one")
    for step in range(2, 6):
        assert desk.host.flush(30) == []
        desk.begin(step, desk.checkpoint()).result(120)
    assert len(slots_of(desk)) == 2


LARGE = pytest.mark.parametrize("least", [1000, 2**30], ids=["large", "small"])
"""Whether slots count as large, so that training makes none itself."""


def skipped(writer: SnapshotWriter, sizes: Iterable[int]) -> list[int]:
    """Take a snapshot of each size; the steps of those that found no slot."""
    found = []
    writer.warm(700_000)
    for step, size in enumerate(sizes, 1):
        looked_ahead = threading.Event()
        writer._tasks.put(looked_ahead.set)  # which comes after the snapshot before is known to be there
        assert looked_ahead.wait(120)
        until(lambda: writer.ready and writer._slots._requests.is_idle, "nothing is being made")
        try:
            writer.begin({"more": torch.ones(size)}, manifest_of(step, run_id=""), owned={}).result(120)
        except SnapshotFailedError as error:
            if error.reason is not FailureReason.RING_FULL:
                raise
            found.append(step)
    return found


@LARGE
def test_a_state_that_goes_on_growing_is_not_skipped_each_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, made_by: list[threading.Thread], least: int
) -> None:
    """As with a metric that keeps all it has seen: each slot that was made in the background was too small again."""
    monkeypatch.setattr(slot_pool, "LEAST_BYTES", least)
    assert skipped(desk.writer, [150_000 + 500_000 * step for step in range(1, 6)]) == [1]
    assert least > 1000 or threading.current_thread() not in made_by


@LARGE
def test_a_state_that_grew_once_has_superseded_slots_replaced(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """All slots held snapshots, too small ones: the second was made anew only when one had been skipped for it."""
    monkeypatch.setattr(slot_pool, "LEAST_BYTES", least)
    host = InProcessHost(slots=2, memory_bytes=2**28, open_store=lambda url: pytest.fail(url))
    host.open_run(named_run("run"))
    writer = SnapshotWriter(host)
    try:
        assert skipped(writer, [100_000] * 4 + [3_000_000] * 7) == [5]
    finally:
        writer.close()
        host.leave(complete=True)


def test_a_larger_state_than_expected_gets_a_slot_in_background(desk: Desk, made_by: list[threading.Thread]) -> None:
    """As with averages that a callback adds: training waited while it was made, and a slow server seemed lost."""
    desk.writer.warm(700_000)
    until(lambda: desk.writer.ready, "the first slot")
    averages = torch.ones(3_000_000)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        desk.writer.begin(desk.checkpoint(more=averages), manifest_of(1))
    until(lambda: desk.writer.ready, "the larger one")
    desk.begin(2, desk.checkpoint(more=averages)).result(120)
    until(lambda: slots_of(desk).count("free") == 2, "the second one, beside the small one")
    desk.begin(3, desk.checkpoint(more=torch.ones(9_000_000))).result(120)  # who may wait, waits for it
    assert threading.current_thread() not in made_by


@pytest.mark.parametrize(("memory_mib", "slot_mib"), [(50, 24), (54, 26), (99, 28)])
def test_room_to_grow_leaves_a_second_slot_if_there_was_one(tmp_path: Path, memory_mib: int, slot_mib: int) -> None:
    """The first of them was so large that there was no memory for a second: no snapshot while a tier read it."""
    desk = Desk(tmp_path, memory_bytes=memory_mib * MIB)
    try:
        desk.writer.warm(700_000)
        until(lambda: desk.writer.ready, "the first slot")
        desk.begin(1, desk.checkpoint(more=torch.ones(6_000_000))).result(120)
        large = functools.partial(_slots_above, desk, 6_000_000 * 4)
        until(lambda: large() == [slot_mib] * 2, f"two slots, not {large()}")  # of whole pages of 2 MiB
    finally:
        desk.writer.close()
        desk.host.leave(complete=True)


def _slots_above(desk: Desk, nbytes: int) -> list[int]:
    return [slot.capacity // MIB for slot in desk.host._server.ring.slots if slot.capacity > nbytes]


def test_an_urgent_snapshot_waits_for_its_slot_only_as_allowed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, go_on = desk.host.lease, threading.Event()

    def slow(*what: Any, **more: Any) -> Any:
        assert go_on.wait(120)
        return lease(*what, **more)

    monkeypatch.setattr(desk.host, "lease", slow)
    desk.writer.warm(700_000)
    waited: list[float] = []
    monkeypatch.setattr(SlotPool, "wait", lambda _pool, wait_s: bool(waited.append(wait_s)))
    manifest = manifest_of(1)
    over = Deadline(end_s=0.0, is_named=True)
    for wait_s in (3.0, over.wait_s, 0.0):
        with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
            desk.writer.begin(desk.checkpoint(), manifest, wait_s=wait_s)
    assert waited == [3.0, over.wait_s, desk.host.server_call_timeout_s]
    assert 0 < over.wait_s < 0.1
    go_on.set()


@pytest.mark.parametrize(("wait_s", "longest_s"), [(0.0, 5.0), (20.0, 20.0), (1000.0, 110.0)])
def test_who_waits_for_a_slot_waits_for_its_memory_to_be_made(
    wait_s: float, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of 10 GB took longer than a call may take: the server was ended as a lost one, at each checkpoint."""
    asked, now = [], [0.0]

    def lease(nbytes: int, wait_s: float, *, limit_s: float = 5.0, **_more: Any) -> Any:
        asked.append(wait_s + limit_s)
        now[0] += wait_s
        raise SnapshotFailedError("still being made", reason=FailureReason.RING_FULL)

    host: Any = SimpleNamespace(lease=lease, server_call_timeout_s=5.0)
    link: Any = SimpleNamespace(host=host, lose=lambda *_: None, ask=lambda _, otherwise: otherwise)
    for module in (slot_pool, host_link):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        SlotPool(link, cast(Any, None)).take(host, 10**10, wait_s)
    assert asked[0] == longest_s
    assert max(asked) <= longest_s + 3
    assert now[0] == wait_s


def test_a_server_still_making_a_slot_does_not_count_as_lost() -> None:
    pings: list[float] = []
    asked: list[str] = []
    given_back: list[str] = []

    def call(method: str, path: str, body: Any = None, **more: Any) -> Any:
        if method == "DELETE":
            given_back.append(path)
            return {}
        asked.append(body["upload"])
        raise ServerUnreachableError("no answer") from TimeoutError()

    host: Any = object.__new__(LocalServer)
    host.run, host.attempt, host.server_call_timeout_s = "run@1", 1, 5.0
    host.session, host.client = SimpleNamespace(id="1"), SimpleNamespace(call=call, ping=pings.append)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        host.lease(NBYTES, 1.0, limit_s=30.0)
    assert pings
    assert given_back == [f"/v1/uploads/{asked[0]}"]  # the answer may have come while nobody listened any more
    with pytest.raises(ServerUnreachableError):
        host.lease(NBYTES, 1.0)


# -- what is counted -------------------------------------------------------------------------------------------------


def at_seams(pacing: Pacing, steps: range, can_begin: Callable[[], str]) -> None:
    trainer = SimpleNamespace(global_step=0, is_global_zero=True, world_size=1)
    for trainer.global_step in steps:
        if pacing.due(cast(Any, trainer), can_begin, float):
            pacing.taken(trainer.global_step)


def test_snapshots_without_a_slot_are_counted() -> None:
    pacing = Pacing(EverySteps(1))
    at_seams(pacing, range(1, 4), lambda: "")
    at_seams(pacing, range(4, 9), lambda: "alone")
    at_seams(pacing, range(9, 10), lambda: "")
    at_seams(pacing, range(10, 12), lambda: "alone")
    assert pacing.passed_over == 4


@pytest.mark.parametrize("policy", [EverySteps(4), EverySeconds(1e-9)])
def test_one_that_comes_late_is_not_skipped(policy: Any) -> None:
    pacing = Pacing(policy)
    at_seams(pacing, range(1, 7), lambda: "")
    at_seams(pacing, range(7, 30), lambda: "alone")
    assert pacing.passed_over == 0


def stored_slot(index: int, run: str, step: int, nbytes: int) -> Slot:
    """A slot with a snapshot that storage has."""
    manifest, seen = manifest_of(step, nbytes=nbytes, run_id=run), {"tier": Mark.SAFE}
    state, commit = SlotState.HELD, Commit(step)
    return Slot(index, state, reserved_bytes=nbytes, run=run, manifest=manifest, commit=commit, seen=seen)


def test_who_exceeds_its_own_bound_costs_other_runs_nothing() -> None:
    """The oldest snapshots went first, those of other runs among them, although its own had to go anyway."""
    own, other = "run@1", "other@2"
    slots = Slots([stored_slot(*each, 250) for each in ((0, other, 1), (1, own, 2), (2, own, 3), (3, other, 4))])

    def views() -> list[View]:
        return [View([each for each in slots if each.run == run]) for run in (own, other)]

    limits = Limits(slots=None, memory_bytes=1000, run_memory_bytes=500)
    found = find_room(slots, SlotRequest(own, 300, 300), limits, views=views)
    assert {found.slot, *found.forget} == {slots[1], slots[2]}


def test_a_larger_slot_made_ahead_costs_other_runs_no_snapshot() -> None:
    """In place of what is superseded and too small: that drops nothing else, and else it is not made ahead."""
    own = "run@1"
    slots = Slots([stored_slot(0, own, 1, 100), stored_slot(1, own, 2, 100), stored_slot(2, "other@2", 1, 500)])
    more, same = (Limits(slots=2, memory_bytes=nbytes, run_memory_bytes=None) for nbytes in (2000, 800))

    def views() -> list[View]:
        return [View([each for each in slots if each.run == run]) for run in (own, "other@2")]

    request = SlotRequest(own, 400, 400, reuse=True)
    found = find_room(slots, request, more, views=views)
    assert (found.slot, found.forget, found.is_spare) == (slots[0], [slots[0]], True)
    found = find_room(slots, request, same, views=views)
    assert found.slot is slots[0]
    assert found.forget[1:]
    assert not found.is_spare


def test_a_slot_made_ahead_may_replace_several_superseded() -> None:
    slots = Slots([stored_slot(index, "run@1", index + 1, 100) for index in range(4)])
    limits = Limits(slots=4, memory_bytes=500, run_memory_bytes=None)
    request = SlotRequest("run@1", 300, 300, reuse=True)
    found = find_room(slots, request, limits, views=lambda: [View(slots)])
    assert (found.forget, found.release, found.is_spare) == (slots[:2], slots[:2], True)
    found = find_room(slots, replace(request, nbytes=400, capacity=500), limits, views=lambda: [View(slots)])
    assert (found.forget, found.is_spare) == (slots[:], False)  # the newest, too


def test_a_writer_gets_the_free_slot_that_it_filled_last() -> None:
    """It is mapped, and page-locked, in the process of that writer."""
    free = [Slot(index, reserved_bytes=400, writer=index) for index in range(3)]
    limits = Limits(slots=4, memory_bytes=4000, run_memory_bytes=None)
    for writer, index in ((2, 2), (1, 1), (7, 0)):
        found = find_room(Slots(free), SlotRequest("run", 400, 400, writer), limits)
        assert found.slot is free[index]


def test_a_slot_may_be_replaced_while_its_ring_is_let_go() -> None:
    """Each is unpinned once."""
    host: Any = type("Ring", (), {"released": None})()
    maps, unpinned = [mmap.mmap(-1, 4096) for _ in range(2)], list[Any]()

    def unpin(view: Any) -> None:
        unpinned.append(view.map)
        replaced(maps[1])  # by another thread, meanwhile

    views = SlotViews(cast(Any, SimpleNamespace(unpin=unpin)))
    for slot, shared in enumerate(maps):
        views.of(host, Lease("", shared, 1, "process", slot))
    replaced = host.released
    views.drop(host)
    assert unpinned == maps
