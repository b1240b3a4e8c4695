"""Snapshots that another one follows in a moment: the durable tier takes some of them, and the last one in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest

from lightning_spot import EverySeconds, EverySteps, RemoteSnapshot
from lightning_spot.server import reconcile
from lightning_spot.server.host import InProcessHost, Lease
from lightning_spot.server.slots import Slot
from lightning_spot.session import snapshotter
from lightning_spot.session.snapshotter import _SEAMS, Pacing
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.support.server import RUN, RUN_ID, Bench
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G19")

TRAINER = "trainer"
FOLLOWED_S = reconcile.FOLLOWED_S  # which the tests change


class Followed(Bench):
    """A bench whose trainer is connected, and takes a snapshot every few moments."""

    def open(self, **more: Any) -> Any:
        self.server.begin_session(TRAINER)
        return super().open(session=TRAINER, **more)

    def newest(self) -> Slot:
        return self.server.committed(RUN)[0]

    def keep_apart(self) -> None:
        """Save a first one that took the durable tier so long that it takes no other one that is followed."""
        self.save(1)
        until(lambda: self.newest().safe, "the tier to take it")
        with self.server.ring.changed:
            self.server.reconciler.place(self.tier().url).took_s[RUN_ID] = 1e6


@pytest.fixture
def make(make_bench: Callable[..., Followed]) -> Callable[..., Followed]:
    def bench(**settings: Any) -> Followed:
        made = make_bench(kind=Followed, **settings)
        made.open()
        return made

    return bench


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is expected for so long that none of these tests comes too late, however slow the machine."""
    for module in (reconcile, snapshotter):
        monkeypatch.setattr(module, "FOLLOWED_S", 60.0)


def test_storage_leaves_out_most_snapshots_in_quick_succession(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes one in 40 times as long as that takes, and what is left at once when none follows."""
    bench = make()
    bench.tier().bytes_per_s = 1000 / 0.01
    began_s, step = time.monotonic(), 0
    while len(bench.tier().puts()) < 3:
        step += 1
        bench.save(step, followed=True, wait_s=5)
        time.sleep(0.01)
    took_s = time.monotonic() - began_s
    assert took_s >= 2 * 40 * 0.01
    assert step > 6 or took_s > 0.1 * step  # where each of them takes long
    monkeypatch.setattr(reconcile, "_APART", 1e6)
    monkeypatch.setattr(reconcile, "MOST_APART_S", 0.1)  # held up for no longer than that
    began_s, count = time.monotonic(), len(bench.tier().puts())
    while len(bench.tier().puts()) < count + 5:
        step += 1
        bench.save(step, followed=True, wait_s=5)
        time.sleep(0.01)
        assert time.monotonic() - began_s < 60
    monkeypatch.setattr(reconcile, "MOST_APART_S", 3600.0)
    bench.save(step + 1, followed=True)
    assert bench.server.ring.owed([bench.newest()])
    bench.save(step + 2)  # an ordinary one
    until(lambda: bench.tier().puts()[-1] == step + 2, "the tier to take it")
    bench.save(step + 3, followed=True)
    assert bench.server.ring.owed([bench.newest()])
    assert bench.flush() == []  # who waits for it does not wait for its turn
    assert bench.tier().puts()[-1] == step + 3


def test_one_that_none_has_followed_in_time_is_taken(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.keep_apart()
    bench.save(2, followed=True)
    assert bench.server.ring.owed([bench.newest()])
    monkeypatch.setattr(reconcile, "FOLLOWED_S", 0.2)
    bench.save(3, followed=True)
    until(lambda: bench.newest().safe, "the tier to take it")
    assert bench.tier().puts()[-1] == 3  # on a slow machine the one before it was not followed in time, either


def test_of_a_trainer_that_has_gone_nothing_is_expected(make: Callable[..., Followed]) -> None:
    bench = make()
    bench.keep_apart()
    bench.save(2, followed=True)
    assert bench.server.ring.owed([bench.newest()])
    bench.server.end_session(TRAINER)
    until(lambda: bench.newest().safe, "the tier to take it", deadline_s=reconcile.FOLLOWED_S / 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_with_little_memory_no_snapshot_waits_for_a_successor(make: Callable[..., Followed], slots: int) -> None:
    """Where the only slot holds it, the next one waits for that."""
    bench = make(slots=slots)
    began_s = time.monotonic()
    for step in range(1, 5):
        bench.save(step, followed=True, wait_s=20)
    assert time.monotonic() - began_s < reconcile.FOLLOWED_S / 2
    assert slots > 1 or bench.tier().puts()[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("interval", "followed"), [(EverySteps(1), True), (EverySteps(4), True), (EverySeconds(0.01), False)]
)
def test_a_trainer_says_so_of_steps_that_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: Any, followed: bool
) -> None:
    said: list[tuple[bool, bool]] = []
    seal = InProcessHost.seal

    def noted(self: InProcessHost, lease: Lease, manifest: Manifest, *args: Any, **how: Any) -> bool:
        said.append((manifest.complete, how["followed"]))
        return seal(self, lease, manifest, *args, **how)

    monkeypatch.setattr(InProcessHost, "seal", noted)
    each = {"local_server": False, "interval": interval, "on_full": "wait"}
    trainer(RemoteSnapshot(str(tmp_path / "run-1"), **each), max_epochs=1).fit(Net(), data(20))
    assert said[-1] == (True, False)
    assert len(said) > 2
    assert {how for complete, how in said if not complete} == {followed}
    newest = LocalStore(tmp_path / "run-1").survey().manifests[0]
    assert newest.complete


@pytest.mark.parametrize(
    ("interval", "lap_s", "followed"),
    [(1, 4.9, True), (1, 5.1, False), (4, 1.2, True), (4, 1.3, False), (65, 0.0, False)],
)
def test_one_is_followed_if_another_one_comes_in_time(interval: int, lap_s: float, followed: bool) -> None:
    pacing = Pacing(EverySteps(interval))
    pacing.taken(interval)
    pacing._laps_s = (lap_s, 0.0)
    fitting = cast("pl.Trainer", SimpleNamespace(global_step=interval))
    assert pacing.next_within(fitting, FOLLOWED_S, seams=_SEAMS) is followed
