"""Snapshots in quick succession: the durable tier takes some of them, and the last one in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lightning_spot.server import reconcile
from lightning_spot.server.slots import Slot
from tests.support.server import RUN_ID, Bench
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G19")

TRAINER = "trainer"


class Quick(Bench):
    """A bench whose trainer is connected, and takes a snapshot every few moments."""

    def open(self, **more: Any) -> Any:
        self.server.registry.begin_session(TRAINER)
        return super().open(session=TRAINER, **more)

    def newest(self) -> Slot:
        return self.server.ring.contents(RUN_ID)[0]

    def keep_apart(self) -> None:
        """Save a first one that took the durable tier so long that it takes no other one in quick succession."""
        self.save(1)
        until(lambda: self.newest().safe, "the tier to take it")
        with self.server.ring.changed:
            self.server.reconciler.destination(self.tier().url).took_s[RUN_ID] = 1e6


@pytest.fixture
def make(make_bench: Callable[..., Quick]) -> Callable[..., Quick]:
    def bench(**settings: Any) -> Quick:
        made = make_bench(kind=Quick, **settings)
        made.open()
        return made

    return bench


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is expected for so long that none of these tests comes too late, however slow the machine."""
    monkeypatch.setattr(reconcile, "QUICK_S", 60.0)


def test_storage_leaves_out_most_snapshots_in_quick_succession(
    make: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes one in 40 times as long as that takes."""
    bench = make()
    bench.tier().bytes_per_s = 1000 / 0.01
    began_s, step = time.monotonic(), 0
    while len(bench.tier().puts()) < 3:
        step += 1
        bench.save(step, wait_s=5)
        time.sleep(0.01)
    took_s = time.monotonic() - began_s
    assert took_s >= 2 * 40 * 0.01
    assert step > 6 or took_s > 0.1 * step  # where each of them takes long
    monkeypatch.setattr(reconcile, "APART_FACTOR", 1e6)
    monkeypatch.setattr(reconcile, "MOST_APART_S", 0.1)  # held up for no longer than that
    began_s, count = time.monotonic(), len(bench.tier().puts())
    while len(bench.tier().puts()) < count + 5:
        step += 1
        bench.save(step, wait_s=5)
        time.sleep(0.01)
        assert time.monotonic() - began_s < 60
    monkeypatch.setattr(reconcile, "MOST_APART_S", 3600.0)
    bench.save(step + 1)
    assert bench.server.ring.owed([bench.newest()])
    assert bench.flush() == []  # who waits for it does not wait for its turn
    assert bench.tier().puts()[-1] == step + 1


def test_one_that_none_follows_in_time_is_taken(make: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    bench.keep_apart()
    bench.save(2)
    assert bench.server.ring.owed([bench.newest()])
    monkeypatch.setattr(reconcile, "QUICK_S", 0.2)
    bench.save(3)
    until(lambda: bench.newest().safe, "the tier to take it")
    assert bench.tier().puts()[-1] == 3  # on a slow machine the one before it was not followed in time, either


def test_one_after_a_pause_is_taken_at_once(make: Callable[..., Quick], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    bench.keep_apart()
    monkeypatch.setattr(reconcile, "QUICK_S", 0.0)
    bench.save(2)
    until(lambda: bench.newest().safe, "the tier to take it")
    monkeypatch.setattr(reconcile, "QUICK_S", 60.0)
    bench.save(3)
    assert bench.server.ring.owed([bench.newest()])


def test_of_a_trainer_that_has_gone_nothing_is_expected(make: Callable[..., Quick]) -> None:
    bench = make()
    bench.keep_apart()
    bench.save(2)
    assert bench.server.ring.owed([bench.newest()])
    bench.server.end_session(TRAINER)
    until(lambda: bench.newest().safe, "the tier to take it", deadline_s=reconcile.QUICK_S / 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_with_little_memory_no_snapshot_waits_for_a_successor(make: Callable[..., Quick], slots: int) -> None:
    """Where the only slot holds it, the next one waits for that."""
    bench = make(slots=slots)
    began_s = time.monotonic()
    for step in range(1, 5):
        bench.save(step, wait_s=20)
    assert time.monotonic() - began_s < reconcile.QUICK_S / 2
    assert slots > 1 or bench.tier().puts()[:3] == [1, 2, 3]
