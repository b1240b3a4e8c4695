"""Each tier at its own pace: what it takes when it is free, what is not owed to it any more, and what fails alone."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import FailureReason, SnapshotFailedError, SnapshotNotFoundError, TierError
from lightning_spot.server import worker
from lightning_spot.server.reconcile import LAST_RETRY_S, Action, Destination, Kind
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.retention import Keep
from tests.support.server import FIRST, MIB, OTHER_ID, RUN, RUN_ID, Bench, WithServers, is_kept, manifest_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G19")


def errors_for(name: str, error: Exception) -> Callable[[str, Manifest], Exception | None]:
    return lambda kind, manifest: error if name in f"{kind} {manifest.name}" else None


def hold(bench: Bench, **settings: Any) -> None:
    """Have the tier be at the first snapshot, until :func:`let_go`."""
    bench.open(**settings)
    bench.tier().open.clear()
    bench.save(1)
    until(lambda: bench.tier().tries, "the tier to be at it")


def let_go(bench: Bench) -> None:
    bench.tier().open.set()
    assert bench.flush() == []


# -- the newest when it is free ---------------------------------------------------------------------------------------


def test_a_slow_tier_takes_the_newest_when_it_is_free(bench: Bench) -> None:
    hold(bench, keep=Keep(newest=50))
    for step in range(2, 21):
        bench.save(step)  # no slot is ever missing
    let_go(bench)
    assert bench.tier().puts() == [1, 20]
    for manifest in bench.tier().survey().manifests:  # and what was in flight was not torn
        buffer = bytearray(manifest.nbytes)
        bench.tier().fetch(manifest, memoryview(buffer))
        manifest.verify(memoryview(buffer), "the tier")


def test_the_end_of_a_run_and_files_are_owed_for_ever(bench: Bench, tmp_path: Path) -> None:
    bench.close()
    bench = Bench(tmp_path, slots=6)
    hold(bench)
    bench.save(2, complete=True)
    bench.file("best.ckpt", 3)
    bench.save(4)
    bench.save(5)
    let_go(bench)
    assert bench.tier().puts() == [1, 2, 5]
    assert "put best.ckpt" in bench.tier().tries
    bench.close()


def test_the_newest_of_another_lineage_is_owed_too(bench: Bench) -> None:
    hold(bench)
    bench.save(90, lineage="2" * 12)
    bench.open(attempt=2)
    bench.save(3, attempt=2, lineage="3" * 12)  # a fresh start
    let_go(bench)
    assert bench.tier().puts() == [1, 90, 3, 1]  # the first try was on behalf of the attempt before


def test_a_damaged_newest_makes_the_one_before_it_owed_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CHECKED_S", 0.0)  # as if it had waited for the tier
    hold(bench)
    bench.save(2)
    bench.save(3)
    slot = bench.server.ring.find(RUN_ID, snapshot_name(3, 1))
    with slot.view() as image:
        image[7] ^= 1
    let_go(bench)
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [2, 1]


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


@pytest.mark.parametrize("kind", [SnapshotNotFoundError, FileNotFoundError, TierError, OSError, ValueError])
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
    bench.tier().fail(None)
    assert bench.flush() == []
    assert bench.server.reconciler.health[bench.tier().url].error == ""


def test_one_file_that_fails_holds_nothing_else_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=6)
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
    bench.close()


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
    place.shorten()
    assert place.due_s(tried["a"].key) == now_s + 0.5


# -- a slow bucket and a fast snapshot server
# -----------------------------------------------------------------------------


def lags(save: Callable[[int], Any], newest: Callable[[], int], *, steps: int, step_s: float) -> list[int]:
    """Train for ``steps`` steps, with a snapshot every 5; how far the newest at the server is behind at each."""
    measured = []
    for step in range(1, steps + 1):
        if step % 5 == 0:
            try:
                save(step)
            except SnapshotFailedError as error:
                if error.reason is not FailureReason.RING_FULL:
                    raise
                print("skipped", step)
        time.sleep(step_s)  # a machine that is slow for a moment makes up for nothing
        measured.append(step - newest())
    return measured


@pytest.mark.parametrize("allowed", [True, False])
def test_a_slow_bucket_does_not_slow_the_server_down(tmp_path: Path, allowed: bool) -> None:
    """In small: a durable tier that takes as long as 200 steps for one snapshot. It was 143 steps behind."""
    bench = WithServers(tmp_path, [str(tmp_path)] if allowed else [])
    try:
        bench.open(servers=(FIRST,))
        until(lambda: is_kept(bench.server.status()["runs"][RUN]), "the server")
        nbytes, step_s = 100_000, 0.01
        for store in (bench.by_server(FIRST), bench.tier()):
            store.bytes_per_s = nbytes / (200 * step_s)

        def newest() -> int:
            held = [manifest.step for slot in bench.servers[FIRST].ring.contents(RUN_ID) if (manifest := slot.manifest)]
            return max(held, default=0)

        measured = lags(lambda step: bench.save(step, nbytes=nbytes), newest, steps=500, step_s=step_s)
        print(f"median {statistics.median(measured)}, most {max(measured)}")
        assert statistics.median(measured) <= 100  # 7 on a quiet machine; the bucket takes 200 steps for one
        assert (bench.by_server(FIRST) if allowed else bench.tier()).puts()
        assert sum(slot.capacity for slot in bench.server.ring.slots) <= 64 * MIB
    finally:
        bench.close()
