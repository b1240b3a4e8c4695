"""Each tier at its own pace: what it takes when it is free, what is not owed to it any more, and what fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_spot.errors import CorruptSnapshotError, TierError
from lightning_spot.server import reconcile, worker
from lightning_spot.server.reconcile import LAST_RETRY_S, Action, Destination, Kind
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.retention import Keep
from tests.support.server import FIRST, OTHER_ID, RUN, RUN_ID, Bench, MakeBench, MakeWithServers, manifest_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G19")


def errors_for(name: str, error: Exception) -> Callable[[str, Manifest], Exception | None]:
    return lambda kind, manifest: error if name in f"{kind} {manifest.name}" else None


def let_go(bench: Bench) -> None:
    bench.tier().open.set()
    assert bench.flush() == []


# -- the newest when it is free ---------------------------------------------------------------------------------------


def test_a_slow_tier_takes_the_newest_when_it_is_free(bench: Bench) -> None:
    bench.hold(keep=Keep(newest=50))
    for step in range(2, 21):
        bench.save(step)  # no slot is ever missing
    let_go(bench)
    assert bench.tier().puts() == [1, 20]
    for manifest in bench.tier().survey().manifests:  # and what was in flight was not torn
        buffer = bytearray(manifest.nbytes)
        bench.tier().fetch(manifest, memoryview(buffer))
        manifest.verify(memoryview(buffer), "the tier")


def test_a_damaged_newest_makes_the_one_before_it_owed_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CHECKED_S", 0.0)  # as if it had waited for the tier
    bench.hold()
    bench.save(2)
    bench.save(3)
    slot = bench.server.ring.find(RUN_ID, snapshot_name(3, 1))
    with slot.view() as image:
        image[7] ^= 1
    let_go(bench)
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [2, 1]
    assert 3 not in bench.committed()


def test_two_snapshots_are_durable_every_s_apart(bench: Bench) -> None:
    bench.open(min_upload_interval_s=0.6)
    began, step = time.monotonic(), 0
    while len(bench.tier().puts()) < 3 or step < 4:
        step += 1
        bench.save(step, wait_s=60)
        time.sleep(0.01)
        assert len(bench.tier().puts()) <= 1 + (time.monotonic() - began) / 0.6
    bench.open(min_upload_interval_s=600.0)
    bench.save(step + 1, wait_s=60)
    assert bench.flush() == []  # who waits for it does not wait for the next turn
    assert bench.tier().puts()[-1] == step + 1


def follow_closely(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a trainer that is expected to take the next snapshot soon, however slow the machine."""
    monkeypatch.setattr(reconcile, "QUICK_S", 60.0)
    bench.server.registry.begin_session("trainer")
    bench.open(session="trainer")


def test_storage_leaves_out_most_snapshots_in_quick_succession(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one in 40 times as long as that takes."""
    follow_closely(bench, monkeypatch)
    bench.tier().bytes_per_s = 1000 / 0.01
    began_s, step = time.monotonic(), 0
    while len(bench.tier().puts()) < 3:
        step += 1
        bench.save(step, wait_s=5)
        time.sleep(0.01)
    took_s = time.monotonic() - began_s
    assert took_s >= 2 * 40 * 0.01
    assert step > 6 or took_s > 0.1 * step  # where each of them takes long


@pytest.mark.parametrize("slots", [1, 2])
def test_with_little_memory_no_snapshot_waits_for_a_successor(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Where the only slot holds it, the next one waits for that."""
    bench = make_bench(slots=slots)
    follow_closely(bench, monkeypatch)
    began_s = time.monotonic()
    for step in range(1, 5):
        bench.save(step, wait_s=20)
    assert time.monotonic() - began_s < reconcile.QUICK_S / 2
    assert slots > 1 or bench.tier().puts()[:3] == [1, 2, 3]


def test_how_long_a_tier_takes_is_measured(bench: Bench) -> None:
    bench.open()
    bench.tier().bytes_per_s = 1000 / 0.2
    began_s = time.monotonic()
    for step in (1, 2):
        bench.save(step)
        assert bench.flush() == []
    until(lambda: bench.server.reconciler.health[bench.tier().url].flushed == 2, "it to be noted, after it has come")
    took_s = time.monotonic() - began_s
    health = bench.server.reconciler.health[bench.tier().url]
    assert (health.kind, health.flushed, health.flushed_bytes) == ("durable", 2, 2000)
    assert 0.2 <= health.drain_s <= took_s - 0.2  # of one of the two
    assert 0.4 <= health.flush_s <= took_s


def test_a_thread_with_nothing_to_do_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server serves thousands of runs over its life."""
    monkeypatch.setattr(worker, "IDLE_S", 0.1)
    bench.open()
    for step in (1, 2):
        bench.save(step)
        assert bench.flush() == []
        until(lambda: not _threads(bench.tier().url), "the thread to end")
    assert bench.tier().puts() == [1, 2]


def _threads(url: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if url in thread.name]


# -- what fails, fails alone ------------------------------------------------------------------------------------------


KINDS = [CorruptSnapshotError, FileNotFoundError, TierError, ValueError]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_error_is_counted_shown_and_retried(bench: Bench, kind: type[Exception]) -> None:
    """Today a FileNotFoundError of the store made 71,920 puts in 2 s, silently."""
    bench.open()
    bench.tier().fail(kind("the bucket does not exist"))
    began_s = time.monotonic()
    bench.save(1)
    until(lambda: len(bench.tier().tries) >= 3, "two tries more")
    tries = len(bench.tier().tries)
    assert time.monotonic() - began_s > 1.4  # half a second before the first, a second before the other
    health = bench.server.reconciler.health[bench.tier().url]
    assert health.failures_total >= tries - 1
    assert "the bucket does not exist" in health.error
    assert snapshot_name(1, 1) in health.error
    (line,) = bench.flush(0.1)
    assert "the bucket does not exist" in line
    assert bench.committed() == [1]
    bench.tier().fail(None)
    assert bench.flush() == []
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [1]
    assert bench.server.reconciler.health[bench.tier().url].error == ""


def test_one_file_that_fails_holds_nothing_else_up(make_bench: MakeBench) -> None:
    bench = make_bench(slots=6)
    bench.open()
    bench.tier().errors = errors_for("put bad.ckpt", OSError("name too long"))
    bench.file("bad.ckpt", 1)
    until(lambda: bench.server.reconciler.health[bench.tier().url].failures_total >= 2, "it to fail twice")
    for step in range(2, 6):
        bench.save(step)
        until(lambda step=step: step in bench.tier().puts(), "the snapshot to be taken")
    bench.file("good.ckpt", 6)
    until(lambda: "put good.ckpt" in bench.tier().tries, "the other file to be taken")
    health = bench.server.reconciler.health[bench.tier().url]
    assert "bad.ckpt: name too long" in health.error  # and it is still said
    (line,) = bench.flush(0.1)
    assert "bad.ckpt" in line


def test_a_deletion_that_fails_is_retried_by_itself(bench: Bench) -> None:
    bench.open()
    first = bench.save(1)
    bench.save(2)
    assert bench.flush() == []
    bench.tier().errors = errors_for("delete", PermissionError("not allowed"))
    bench.server.remove(RUN, snapshot_name(2, 1))
    until(lambda: bench.server.reconciler.health[bench.tier().url].failures_total, "the deletion to fail")
    bench.save(3)
    until(lambda: 3 in bench.tier().puts(), "the next snapshot to go on")
    (line,) = bench.flush(0.2)
    assert "delete" in line
    assert "not allowed" in line
    bench.tier().fail(None)
    assert bench.flush() == []
    steps = [manifest.step for manifest in bench.tier().survey().manifests]
    assert 2 not in steps
    assert steps[0] == 3
    assert first.step == 1


def test_an_earlier_deletion_spares_a_file_written_again(bench: Bench) -> None:
    bench.open()
    bench.file("last.ckpt", 1)
    assert bench.flush() == []
    bench.tier().errors = errors_for("delete", OSError("later"))
    bench.server.remove(RUN, "last.ckpt")
    until(lambda: "delete last.ckpt" in bench.tier().tries, "the deletion to fail")
    bench.file("last.ckpt", 2)
    bench.tier().fail(None)
    assert bench.flush() == []
    assert (Path(bench.tier().url) / "last.ckpt").exists()


def test_a_failed_retention_is_retried_without_a_new_snapshot(bench: Bench) -> None:
    bench.open(keep=Keep(newest=1))
    bench.tier().errors = errors_for("delete", OSError("later"))
    for step in (1, 2):
        bench.save(step)
        bench.flush(2.0)
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [2, 1]
    until(lambda: "retain" in bench.server.reconciler.health[bench.tier().url].error, "it to be noted, too")
    bench.tier().fail(None)
    until(lambda: len(bench.tier().survey().manifests) == 1, "the old one to go")


def test_a_tier_that_fails_as_a_whole_is_given_time(bench: Bench) -> None:
    """However often there is a new snapshot, and however often somebody asks for a flush."""
    bench.open()
    bench.tier().fail(OSError("no route to host"))
    began_s, step = time.monotonic(), 0
    while time.monotonic() - began_s < 3.0 or step <= 20:
        step += 1
        bench.save(step, wait_s=60)
        bench.flush(0.01)
    tries = len(bench.tier().tries)
    assert tries <= 6 + 2 * (time.monotonic() - began_s)  # half a second apart, and fewer for what is older


def test_one_tier_that_fails_holds_no_other_up(bench: Bench) -> None:
    bench.open()
    bench.open(run_id=OTHER_ID)
    bench.tier().fail(TierError("disk full"))
    bench.save(1)
    bench.save(2, run_id=OTHER_ID)
    assert bench.server.flush(f"run@{OTHER_ID}", 20) == []
    assert bench.server.flush(RUN, 0.1) != []


def test_back_off_of_things_and_of_the_tier() -> None:
    place, now_s = Destination("/storage"), 100.0
    tried = {
        name: Action(Kind.PUT, place.url, "run", manifest=manifest_of(step)) for step, name in enumerate("abcdefg")
    }
    new = ("put", "run", "new")
    for _ in range(4):
        place.failed(tried["a"], "down", now_s)
    assert place.due_s(tried["a"].key) == now_s + 4.0
    assert place.due_s(new) == 0.0  # one thing that fails says nothing of the others
    for action in list(tried.values())[1:]:
        place.failed(action, "down", now_s)
    assert now_s < place.due_s(new) <= now_s + LAST_RETRY_S  # but many in a row do
    place.done(tried["b"])
    assert place.due_s(new) == 0.0
    assert place.due_s(tried["a"].key) == now_s + 4.0
    for _ in range(1100):  # to the power of so many two is no float
        place.failed(tried["a"], "down", now_s)
    assert place.due_s(tried["a"].key) == now_s + LAST_RETRY_S
    place.shorten()
    assert place.due_s(tried["a"].key) == now_s + 0.5


# -- a slow bucket and a fast snapshot server -------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [True, False])
def test_a_slow_bucket_does_not_slow_the_server_down(with_servers: MakeWithServers, allowed: bool) -> None:
    """It was 143 steps behind; now each snapshot comes to the server while the bucket is still at the first one."""
    bench = with_servers(None if allowed else [])
    bench.start(FIRST)
    bucket = bench.by_server(FIRST) if allowed else bench.tier()
    bucket.open.clear()
    for step in range(1, 30):
        bench.save(step)  # no slot is ever missing
        until(lambda step=step: step in bench.held(FIRST), "the server to have it")
    assert bucket.puts()[1:] == []
