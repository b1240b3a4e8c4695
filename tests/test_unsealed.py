"""Snapshots that another one follows in a moment: sealed when somebody needs them, and never read before that."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest

from lightning_spot import EverySeconds, EverySteps, RemoteSnapshot
from lightning_spot.client import starting
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.node_client import quoted
from lightning_spot.errors import SnapshotNotFound
from lightning_spot.fit import snapshotter
from lightning_spot.fit.pacing import Pacing
from lightning_spot.fit.snapshotter import _SEAMS
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.sealing import Sealing
from lightning_spot.memory import unsealed, work
from lightning_spot.memory.bases import Base, glance
from lightning_spot.memory.host import InProcessHost, Lease
from lightning_spot.memory.paths import resolve
from lightning_spot.memory.slots import Slot
from lightning_spot.run.location import Location
from lightning_spot.run.patience import Patience
from lightning_spot.run.survey import survey
from lightning_spot.tiers.local import LocalStore
from tests import small_trainer
from tests.conftest import until
from tests.gated import MIB, RUN_ID, Bench, image_of, manifest_of
from tests.models import Net, data, trainer

RUN = f"run@{RUN_ID}"
TRAINER = "trainer"
FOLLOWED_S = unsealed.FOLLOWED_S  # which the tests change


class Followed(Bench):
    """A bench whose trainer is connected, and takes a snapshot every few moments."""

    def open(self, **more: Any) -> Any:
        self.node.begin_session(TRAINER)
        return super().open(session=TRAINER, **more)

    def follow(self, *steps: int) -> None:
        """Save steps, each of which another one is to follow."""
        for step in steps:
            self.save(step, followed=True)

    def newest(self) -> Slot:
        return self.node.committed(RUN)[0]

    def sealed(self) -> list[int]:
        """Steps in memory that are sealed; what is must hold."""
        slots = [slot for slot in self.node.committed(RUN) if not slot.unsealed]
        found = [(slot, manifest) for slot in slots if (manifest := slot.manifest)]  # unless it was let go meanwhile
        for slot, manifest in found:
            manifest.verify(slot.view(manifest.nbytes), "memory")
        return [manifest.step for _, manifest in found]

    def hold_up(self) -> None:
        """Save a first one, with which the durable tier is busy from then on."""
        self.tier().open.clear()
        self.save(1)
        until(lambda: self.tier().tries, "the tier to be at it")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Followed]]:
    made: list[Followed] = []

    def bench(*, opened: bool = True, **settings: Any) -> Followed:
        made.append(Followed(tmp_path, **settings))
        if opened:
            made[-1].open()
        return made[-1]

    yield bench
    for each in made:
        each.close()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was sealed, in order."""
    names: list[str] = []
    run = Sealing.run

    def noted(self: Sealing, threads: int) -> Manifest:
        names.append(self.manifest.name)
        return run(self, threads)

    monkeypatch.setattr(Sealing, "run", noted)
    return names


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is expected for so long that none of these tests comes too late, however slow the machine."""
    for module in (unsealed, snapshotter):
        monkeypatch.setattr(module, "FOLLOWED_S", 60.0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is expected to follow for long."""
    monkeypatch.setattr(unsealed, "FOLLOWED_S", 0.2)


# -- what is superseded costs nothing ---------------------------------------------------------------------------------


def test_what_is_superseded_before_anybody_needs_it_is_never_sealed(
    make: Callable[..., Followed], runs: list[str]
) -> None:
    bench = make()
    bench.hold_up()
    bench.follow(*range(2, 20))
    assert runs == [snapshot_name(1, 1)]
    assert bench.committed() == [19, 1]  # and of what was not, only the newest is kept
    assert bench.newest().unsealed
    assert bench.newest().dirty
    bench.tier().open.set()
    assert bench.flush() == []
    assert bench.tier().puts() == [1, 19]
    assert runs == [snapshot_name(1, 1), snapshot_name(19, 1)]
    assert [manifest.step for manifest in bench.tier().survey().manifests] == [19, 1]
    for manifest in bench.tier().survey().manifests:
        buffer = bytearray(manifest.nbytes)
        bench.tier().fetch(manifest, memoryview(buffer))
        assert bytes(buffer) == image_of(manifest.step, manifest.nbytes)


def test_a_tier_that_is_free_has_it_sealed_at_once(make: Callable[..., Followed], runs: list[str]) -> None:
    bench = make()
    bench.follow(1)
    assert len(runs) == 1
    until(lambda: bench.newest().safe, "the tier to take it")


def test_where_there_is_no_tier_it_waits(make: Callable[..., Followed], runs: list[str]) -> None:
    bench = make(opened=False)
    bench.open(durable=False)
    bench.follow(1, 2, 3)
    assert runs == []
    assert bench.committed() == [3]


def test_a_failing_tier_does_not_seem_to_work_meanwhile(make: Callable[..., Followed], caplog: Any) -> None:
    """What it failed to take is owed still, though it cannot be taken before it is sealed."""
    bench = make()
    bench.tier().fail(OSError("the disk is full"))
    bench.save(1)
    until(lambda: bench.node.flusher.failing(bench.tier().url), "the tier to fail")
    with bench.node.ring.changed:
        bench.node.flusher._busy.add(bench.tier().url)  # in another try, say
    bench.follow(2)
    assert bench.newest().unsealed
    job, due_s = bench.node.flusher.work.next(bench.tier().url, time.monotonic())
    assert job is None
    assert due_s is not None
    assert bench.node.flusher.work.error(bench.tier().url) == ""  # of the first, which is not owed any more
    bench.node.flusher._busy.clear()


@pytest.mark.parametrize("fields", [{"complete": True}, {"name": "best.ckpt", "file": ""}], ids=["complete", "file"])
def test_the_last_one_and_files_are_sealed_at_once(make: Callable[..., Followed], fields: dict[str, Any]) -> None:
    bench = make(slots=6)
    bench.hold_up()
    bench.save(2, followed=True, **fields)
    assert 2 in bench.sealed()


def test_what_is_in_part_sealed_already_is_sealed_at_once(make: Callable[..., Followed], runs: list[str]) -> None:
    """It costs next to nothing, and the next one of that slot would have to be sealed as a whole."""
    bench = make(opened=False)
    bench.open(durable=False)
    upload = bench.node.lease(RUN, 1, 1000)
    with upload.slot.view(1000) as view:
        view[:] = image_of(1, 1000)
    first = bench.node.seal(upload.id, manifest_of(1))
    bench.node.remove(RUN, first.name)
    again = bench.node.lease(RUN, 1, 1000)
    assert again.held == upload.id
    second = bench.node.seal(again.id, manifest_of(2), written=(), followed=True)
    assert second.checksums == first.checksums
    bench.node.remove(RUN, second.name)
    third = bench.node.lease(RUN, 1, 1000)
    assert third.held == again.id
    unsealed_one = bench.node.seal(third.id, manifest_of(3), followed=True)  # all of it was written
    assert not unsealed_one.is_sealed
    bench.node.remove(RUN, unsealed_one.name)
    fourth = bench.node.lease(RUN, 1, 1000)
    assert fourth.held == third.id
    count = len(runs)
    fifth = bench.node.seal(fourth.id, manifest_of(4), written=())  # of what it was filled with nothing is known
    assert len(runs) == count + 1
    fifth.verify(bench.newest().view(), "memory")


# -- who needs it has it sealed ---------------------------------------------------------------------------------------


def test_it_stays_unsealed_only_as_long_as_another_one_may_follow(make: Callable[..., Followed], at_once: None) -> None:
    bench = make()
    bench.hold_up()
    bench.follow(2)
    until(lambda: not bench.newest().unsealed, "it to be sealed")
    assert bench.sealed() == [2, 1]
    bench.tier().open.set()
    until(lambda: bench.newest().safe, "the tier to take it")
    until(lambda: not threads(), "the thread to end")
    bench.follow(3)  # and another one comes
    until(lambda: not bench.newest().unsealed, "it to be sealed")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "spot-unsealed"]


def test_of_a_trainer_that_has_gone_nothing_is_expected(make: Callable[..., Followed]) -> None:
    bench = make()
    bench.hold_up()
    bench.follow(2, 3)
    assert bench.newest().unsealed
    bench.node.end_session(TRAINER)
    until(lambda: bench.sealed() == [3, 1], "it to be sealed", deadline_s=unsealed.FOLLOWED_S / 2)
    bench.tier().open.set()
    until(lambda: bench.newest().safe, "the tier to take it")


def test_a_tier_that_takes_each_as_soon_as_it_can_has_it_sealed_when_it_is_free(
    make: Callable[..., Followed],
) -> None:
    bench = make(opened=False)
    bench.open(durable_every_s=0.0)
    bench.hold_up()
    bench.follow(2)
    assert bench.newest().unsealed
    bench.tier().open.set()
    until(lambda: bench.newest().safe, "the tier to take it", deadline_s=unsealed.FOLLOWED_S / 2)
    assert bench.tier().puts() == [1, 2]


def test_a_durable_tier_leaves_out_most_of_those_that_follow_each_other(
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
    monkeypatch.setattr(work, "_APART", 1e6)
    monkeypatch.setattr(work, "MOST_APART_S", 0.1)  # held up for no longer than that
    began_s, count = time.monotonic(), len(bench.tier().puts())
    while len(bench.tier().puts()) < count + 5:
        step += 1
        bench.save(step, followed=True, wait_s=5)
        time.sleep(0.01)
        assert time.monotonic() - began_s < 60
    monkeypatch.setattr(work, "MOST_APART_S", 3600.0)
    bench.follow(step + 1)
    assert bench.newest().unsealed
    bench.save(step + 2)  # an ordinary one
    until(lambda: bench.tier().puts()[-1] == step + 2, "the tier to take it")
    bench.follow(step + 3)
    assert bench.newest().unsealed
    assert bench.flush() == []  # who waits for it does not wait for its turn
    assert bench.tier().puts()[-1] == step + 3


@pytest.mark.parametrize("slots", [1, 2])
def test_with_little_memory_nobody_waits_until_it_is_not_followed(make: Callable[..., Followed], slots: int) -> None:
    """Where the only slot holds it, the next one waits for that."""
    bench = make(slots=slots)
    began_s = time.monotonic()
    for step in range(1, 5):
        bench.save(step, followed=True, wait_s=20)
    assert time.monotonic() - began_s < unsealed.FOLLOWED_S / 2
    assert slots > 1 or bench.tier().puts()[:3] == [1, 2, 3]


def test_a_tier_is_free_for_it_once_something_else_is_done_there(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that ends without a change in memory, such as a deletion."""
    bench = make(opened=False)
    bench.open(durable_every_s=0.0)
    bench.save(1)
    until(lambda: bench.newest().safe, "the tier to take it")
    began, goes_on = threading.Event(), threading.Event()
    delete = bench.tier().delete

    def slowly(manifest: Manifest) -> None:
        began.set()
        goes_on.wait(30)
        delete(manifest)

    monkeypatch.setattr(bench.tier(), "delete", slowly)
    bench.node.remove(RUN, snapshot_name(1, 1))
    assert began.wait(30)
    bench.follow(2)
    assert bench.newest().unsealed
    goes_on.set()
    until(lambda: bench.newest().safe, "the tier to take it", deadline_s=unsealed.FOLLOWED_S / 2)


def test_nobody_reads_what_is_not_sealed(make: Callable[..., Followed]) -> None:
    bench = make(opened=False)
    bench.open(durable=False)
    bench.follow(1)
    name = snapshot_name(1, 1)
    ring = bench.node.ring
    assert Base.newest(ring, RUN_ID) is None
    assert glance(ring, RUN_ID, name) is None
    with pytest.raises(SnapshotNotFound):
        resolve(ring, RUN_ID, f"{name}/model.ckpt")
    bench.node.seal_committed(RUN_ID)
    slot, manifest = resolve(ring, RUN_ID, f"{name}/model.ckpt")
    manifest.verify(slot.view(), "memory")
    assert glance(ring, RUN_ID, name) is not None


def test_superseded_while_it_is_sealed_it_is_there_all_the_same(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(opened=False)
    bench.open(durable=False)
    bench.follow(1)
    begun, go_on = threading.Event(), threading.Event()
    run = Sealing.run

    def slow(self: Sealing, threads: int) -> Manifest:
        begun.set()
        assert go_on.wait(30)
        return run(self, threads)

    monkeypatch.setattr(Sealing, "run", slow)
    reader = threading.Thread(target=bench.node.seal_committed, args=(RUN_ID,))
    reader.start()
    assert begun.wait(30)
    bench.follow(2, 3)
    assert bench.committed() == [3, 1]
    go_on.set()
    reader.join(30)
    assert bench.sealed() == [1]


def test_what_cannot_be_sealed_is_dropped(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.save(1)
    assert bench.flush() == []
    bench.tier().open.clear()
    bench.save(2)
    until(lambda: len(bench.tier().tries) == 2, "the tier to be at it")
    bench.follow(3)
    monkeypatch.setattr(Sealing, "run", raising)
    monkeypatch.setattr(unsealed, "_AGAIN_S", (0.01,))
    with caplog.at_level(logging.ERROR):
        bench.node.seal_committed(RUN_ID)
    assert "cannot be sealed" in caplog.text
    assert bench.committed()[0] == 2
    bench.tier().open.set()
    assert bench.flush() == []


def raising(*_: Any) -> Manifest:
    raise MemoryError


def test_what_cannot_be_sealed_for_a_moment_is_sealed_later(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    """Those before it have gone: to drop it would lose all that came since a tier took one."""
    bench = make(opened=False)
    bench.open(durable=False)
    monkeypatch.setattr(unsealed, "_AGAIN_S", (0.01, 0.01, 0.01))
    run, failures = Sealing.run, iter((MemoryError(), RuntimeError("can't start new thread"), OSError()))

    def now_and_then(self: Sealing, threads: int) -> Manifest:
        if (failure := next(failures, None)) is not None:
            raise failure
        return run(self, threads)

    monkeypatch.setattr(Sealing, "run", now_and_then)
    bench.follow(1, 2)
    until(lambda: bench.sealed() == [2], "it to be sealed")


def test_a_node_that_ends_leaves_what_it_could_not_seal_to_the_next_one(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = make(area=tmp_path / "area", opened=False)
    bench.open(durable=False)
    bench.follow(1)
    with monkeypatch.context() as patched:
        tried = threading.Event()

        def failing(*_: Any) -> Manifest:
            tried.set()
            raise MemoryError

        patched.setattr(Sealing, "run", failing)
        patched.setattr(unsealed, "_AGAIN_S", (60.0,))
        bench.node.end_session(TRAINER)
        assert tried.wait(30)
        bench.die()
    assert make(area=tmp_path / "area", opened=False, slots=4).sealed() == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_off_is_followed_by_another(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    bench = make(opened=False)
    bench.open(durable=False)
    with monkeypatch.context() as patched:
        patched.setattr(bench.node.ring, "sealed", raising)
        bench.follow(1)
        until(lambda: not threads() and bench.node._unsealed._thread is None, "the thread to break off")
    bench.follow(2)
    until(lambda: bench.sealed() == [2], "it to be sealed")


def test_without_threads_a_reader_seals_it(make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(opened=False)
    bench.open(durable=False)

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        bench.follow(1)
    bench.node.seal_committed(RUN_ID)
    assert bench.sealed() == [1]
    bench.follow(2)
    bench.node.end_session(TRAINER)
    until(lambda: bench.sealed()[0] == 2, "it to be sealed", deadline_s=unsealed.FOLLOWED_S / 2)


# -- across nodes -----------------------------------------------------------------------------------------------------


def test_what_a_killed_node_left_unsealed_is_sealed_by_the_next_one(
    make: Callable[..., Followed], tmp_path: Path
) -> None:
    area = tmp_path / "area"
    bench = make(area=area, opened=False)
    bench.open(durable=False)
    bench.follow(1, 2)
    bench.die()
    heir = make(area=area, opened=False, slots=4)
    assert heir.sealed() == [2]
    assert heir.newest().view().tobytes() == image_of(2, 1000)
    heir.die()
    assert make(area=area, opened=False, slots=4).sealed() == [2]  # by its record, not anew


def test_what_left_no_record_supersedes_nothing_that_did(
    make: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its host's tmpfs is full: after a kill of the node it is gone, and the one before it must not be."""
    bench = make(area=tmp_path / "area", opened=False)
    bench.open(durable=False)
    bench.follow(1)
    assert bench.node.ring.area is not None
    monkeypatch.setattr(bench.node.ring.area, "_write", lambda *_: False)
    bench.follow(2)
    bench.die()
    assert make(area=tmp_path / "area", opened=False, slots=4).sealed() == [1]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EmbeddedHost]:
    made = starting.start(str(tmp_path), "run", slots=3, memory_bytes=64 * MIB, idle_timeout_s=10.0, max_stall_s=5.0)
    made.open_run(replace(small_trainer.info_of(str(tmp_path), 1), durable_url=None))
    yield made
    made.leave(complete=True)


def is_sealed(manifest: Manifest, image: bytes) -> bool:
    """Whether a snapshot that was read is whole, and has its checksums."""
    manifest.verify(memoryview(image), "what was read")
    return manifest.is_sealed and image == small_trainer.image_of(manifest.step, manifest.nbytes)


@pytest.mark.parametrize("how", ["listing", "descriptor", "bytes", "folder"])
def test_each_way_of_reading_from_a_node_has_it_sealed(host: EmbeddedHost, how: str) -> None:
    """Over its socket, as another process reads it that resumes, or copies the run."""
    manifest = small_trainer.take(host, 7, 3 * MIB, followed=True)
    path = f"/v1/files/{quoted(host.run, manifest.name)}"
    if how == "descriptor":
        fd = host.open_snapshot(manifest)
        image = os.pread(fd, manifest.nbytes, 0)
        os.close(fd)
        assert is_sealed(host.manifests()[0], image)
    elif how == "bytes":
        image = bytearray(manifest.nbytes)
        host.client.receive(f"{path}/model.ckpt", 0, memoryview(image))
        assert is_sealed(host.manifests()[0], bytes(image))
    elif how == "listing":
        assert host.manifests()[0].is_sealed
    else:
        files = host.client.call("GET", f"/v1/runs/{quoted(host.run)}/files")
        assert [entry["path"] for entry in files["files"]] == [f"{manifest.name}/model.ckpt"]


def test_who_reads_one_by_its_name_has_no_other_sealed(host: EmbeddedHost) -> None:
    """Each piece of a large file is a request: the newest would be sealed for each."""
    first = small_trainer.take(host, 7, MIB, followed=True)
    assert host.manifests()[0].is_sealed
    began_s = time.monotonic()
    small_trainer.take(host, 8, MIB, followed=True)
    for _ in range(2):
        host.client.receive(f"/v1/files/{quoted(host.run, first.name)}/model.ckpt", 0, memoryview(bytearray(MIB)))
        os.close(host.open_snapshot(first))
    names = [item["manifest"]["name"] for item in host._as_is()["snapshots"]]
    assert names == [first.name] or time.monotonic() - began_s > FOLLOWED_S  # it is sealed by then, where this was slow


STALL_S = 3.0


HOLDS_UP = """
import os, time
from lightning_spot.image.sealing import Sealing
run = Sealing.run

def held_up(*how):
    while os.path.exists({shut!r}):
        time.sleep(0.01)
    return run(*how)

Sealing.run = held_up
"""


@pytest.fixture
def shut(tmp_path: Path) -> Path:
    """While this is there, the node of :func:`slow_host` seals nothing."""
    return tmp_path / "shut"


@pytest.fixture
def slow_host(tmp_path: Path, shut: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedHost]:
    """Of a node to which sealing takes longer than a trainer waits for an answer: a large snapshot."""
    (tmp_path / "sitecustomize.py").write_text(HOLDS_UP.format(shut=str(shut)))
    path = [str(tmp_path), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path).rstrip(os.pathsep))
    monkeypatch.setattr(starting, "subprocess", subprocess)  # a node of its own, which is forked from none
    run = str(tmp_path / "run")
    made = starting.start(run, "run", slots=3, memory_bytes=64 * MIB, idle_timeout_s=10.0, max_stall_s=20.0)
    made.open_run(replace(small_trainer.info_of(run, 1), durable_every_s=3600.0))
    small_trainer.take(made, 1, MIB, followed=True)
    until(lambda: made.safe_step() == 1, "the first one to be durable")
    shut.touch()
    small_trainer.take(made, 2, MIB, followed=True)
    yield made
    shut.unlink(missing_ok=True)
    made.leave(complete=True)


def test_no_question_of_a_trainer_waits_until_it_is_sealed(slow_host: EmbeddedHost, shut: Path) -> None:
    """It would take its node for lost, at a notice, too."""
    assert slow_host.safe_step() == 1
    assert slow_host.refused() == []
    assert len(slow_host.flush(0.05)) == 1  # waits no longer than it was told to
    shut.unlink()
    until(lambda: slow_host.flush(0.05) == [], "what somebody waits for to be brought")
    assert slow_host.safe_step() == 2


def test_who_resumes_waits_until_it_is_sealed(slow_host: EmbeddedHost, shut: Path) -> None:
    slow_host.max_stall_s = STALL_S
    began_s = time.monotonic()
    threading.Timer(1.3 * STALL_S, shut.unlink).start()
    assert [manifest.step for manifest in slow_host.manifests()] == [2, 1]
    assert time.monotonic() - began_s > STALL_S


def test_who_resumes_passes_over_nothing_that_is_being_sealed_for_longer_than_tiers_are_waited_for(
    slow_host: EmbeddedHost, shut: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest one was passed over for the durable one before it."""
    opened = threading.Event()

    def open_late() -> None:
        until(lambda: "memory has not said what it has after 3 s: it is waited for" in caplog.text, "that it is said")
        opened.wait(1.0)
        shut.unlink()
        opened.set()

    threading.Thread(target=open_late).start()
    found = survey(Location.of(str(tmp_path / "run"), "auto", None), Patience(answer_s=3.0))
    assert opened.wait(STALL_S)
    assert [manifest.step for manifest, _ in found.candidates] == [2, 1, 1]
    assert not found.problems


def test_where_memory_goes_with_the_trainer_the_durable_tier_gets_each_that_it_can_take(tmp_path: Path) -> None:
    host = InProcessHost(slots=3, memory_bytes=64 * MIB, open_store=LocalStore)
    info = small_trainer.info_of(str(tmp_path / "run"), 1)
    assert info.durable_every_s is None
    host.open_run(info)
    for step in range(1, 4):
        lease = host.lease(3 * MIB, 10.0)
        small_trainer.fill(lease, step)
        host.seal(lease, small_trainer.manifest_of(step, 1, 3 * MIB), followed=True)
        until(lambda step=step: host.safe_step() == step, "it to be durable", deadline_s=unsealed.FOLLOWED_S / 2)  # type: ignore[misc]
    host.leave(complete=True)


# -- in a training ----------------------------------------------------------------------------------------------------


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
    each = {"memory": None, "interval": interval, "on_full": "wait"}
    trainer(RemoteSnapshot(str(tmp_path / "run-1"), **each), max_epochs=1).fit(Net(), data(20))
    assert said[-1] == (True, False)
    assert len(said) > 2
    assert {how for complete, how in said if not complete} == {followed}
    newest = LocalStore(tmp_path / "run-1").survey().manifests[0]
    assert newest.complete
    assert newest.is_sealed


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
