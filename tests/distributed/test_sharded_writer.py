"""Ranks that write one sharded snapshot together, each with a connection of its own to the node on their host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning_spot.capture.sharded_writer import Joining, ShardedCheckpoint, ShardedWriter
from lightning_spot.fit.in_shards import InShards
from lightning_spot.fit.together import TOGETHER

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.contents import SlotViews
from lightning_spot.capture.host_link import RingSettings
from lightning_spot.capture.tensors import by_storage
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client import starting
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.errors import (
    FailureReason,
    NotSerializableError,
    SettingsError,
    SnapshotFailedError,
    SpotError,
)
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.sharded import Dtensors
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.host import Lease
from lightning_spot.run.location import Location
from lightning_spot.sharded.reader import ImageReader, load_all, read_folder
from lightning_spot.staging.batch import NEVER
from lightning_spot.staging.copier import Copier, CopyJob
from tests.support.fake_device import StreamOfEachThread
from tests.support.ranks import rows
from tests.support.said import said
from tests.support.small_trainer import RUN_ID, info_of
from tests.support.waiting import until

LAST_S = 600.0  # of what never takes so long


class Desk:
    """The writers of two ranks."""

    def __init__(self, root: Path) -> None:
        self.url = str(root / "run")
        self.first = self.connect()
        self.first.open_run(info_of(self.url, 1))
        self.writer = ShardedWriter(self.first, world_size=2)
        self.other_host = self.joined()
        self.other = Joining(self.other_host, self.joined, rank=1, world_size=2)
        self.weights = torch.rand(100)
        self.frozen = torch.rand(100_000)
        self.kept = [self.frozen]
        self.groups: list[Any] = []

    def connect(self) -> EmbeddedHost:
        return starting.start(self.url, "run", slots=3, memory_bytes=2**26, server_idle_timeout_s=30.0)

    def joined(self) -> EmbeddedHost:
        host = self.connect()
        host.run, host.attempt = self.first.run, 1
        return host

    def begin(
        self, rank: int, step: int, wait_s: float = LAST_S, part: torch.Tensor | None = None, **rest: Any
    ) -> Future[Any]:
        tensors: dict[str, Any] = {"w": self.weights, "f": self.frozen}
        state: dict[str, Any] = {"state_dict": tensors, "groups": self.groups}
        if part is not None:
            tensors["part"] = part
        checkpoint = ShardedCheckpoint(state, {"rank": rank}, {"epoch": 1, **rest})
        how: dict[str, Any] = {"owned": by_storage([self.weights]), "kept": by_storage(self.kept), "wait_s": wait_s}
        if rank:
            return self.other.write(checkpoint, step=step, **how).done
        manifest = Manifest(run="run", run_id=RUN_ID, name=snapshot_name(step, 1), step=step, attempt=1, nbytes=0)
        return self.writer.begin(checkpoint, manifest, **how)

    def take(self, step: int) -> Manifest:
        """A snapshot of both ranks."""
        done, other = self.begin(0, step), self.begin(1, step)
        self.copied()
        other.result(LAST_S)
        manifest: Manifest = done.result(LAST_S)
        return manifest

    def copied(self) -> None:
        self.writer.copied()
        self.other.copied()

    def close(self) -> None:
        self.other.close()
        self.writer.close()
        if self.writer.host is not None:
            self.writer.host.disconnect()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()


def test_a_rank_that_loses_its_connection_takes_part_again(desk: Desk) -> None:
    assert desk.take(1).step == 1
    desk.other_host.disconnect()  # as if its node had been killed
    assert desk.take(2).step == 2


def test_a_rank_whose_training_goes_on_before_the_slot_is_there_drops_that_snapshot_only(desk: Desk) -> None:
    desk.kept = []
    desk.other._max_stall_s, usual_s = 0.1, desk.other._max_stall_s
    other = desk.begin(1, 1, wait_s=0.0)
    desk.other.copied()  # training goes on
    done = desk.begin(0, 1)
    for future in (done, other):  # not after the ten minutes that a rank may need to write its share
        with pytest.raises(SnapshotFailedError, match="training went on", check=FailureReason.SHARE_MISSING.caused):
            future.result(120.0)
    desk.other._max_stall_s = usual_s
    assert desk.take(2).step == 2


def test_elastic_hear_at_once_that_rank_0_cannot_begin(desk: Desk) -> None:
    first, desk.kept = desk.writer, []
    desk.first.server_call_timeout_s, usual_s = 0.1, desk.first.server_call_timeout_s
    first._maker._ready.clear()  # its slot is still being made
    other = desk.begin(1, 1)
    with pytest.raises(SnapshotFailedError, match="still being made", check=FailureReason.RING_FULL.caused):
        desk.begin(0, 1, wait_s=0.0)
    with pytest.raises(SnapshotFailedError, match=r"rank 0 .*the slot", check=FailureReason.SHARE_MISSING.caused):
        other.result(60.0)
    first._maker._ready.set()
    desk.first.server_call_timeout_s = usual_s

    other = desk.begin(1, 2)
    with pytest.raises(NotSerializableError):
        desk.begin(0, 2, bad=lambda: 0)
    with pytest.raises(SnapshotFailedError, match=r"rank 0 .*serialised", check=FailureReason.SHARE_MISSING.caused):
        other.result(60.0)
    desk.copied()
    assert desk.take(3).step == 3


def ahead(desk: Desk) -> None:
    """Have the slot of the next snapshot leased."""
    desk.writer.settle(LAST_S)
    desk.writer.next_comes()
    until(lambda: desk.writer._leases.is_ahead, "a slot leased ahead")


def test_where_a_slot_that_was_leased_ahead_cannot_be_said_to_be_for_it_nobody_waits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.take(1)
    ahead(desk)
    real = desk.first.say

    def refused(lease: Lease) -> None:
        raise SettingsError("it does not know of it")

    monkeypatch.setattr(desk.first, "say", refused)
    done, other = desk.begin(0, 2), desk.begin(1, 2)
    with pytest.raises(SettingsError, match="does not know"):
        done.result(60.0)
    with pytest.raises(SnapshotFailedError, match="rank 0 cannot begin it", check=FailureReason.SHARE_MISSING.caused):
        other.result(60.0)
    desk.copied()
    monkeypatch.setattr(desk.first, "say", real)
    assert desk.take(3).step == 3


def test_nothing_comes_into_a_slot_that_was_given_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was still to be copied came there later on, when the slot may be another snapshot's."""
    desk.take(1)
    ahead(desk)

    def refused(_lease: Lease) -> None:
        raise SettingsError("it does not know of it")

    monkeypatch.setattr(desk.first, "say", refused)
    monkeypatch.setattr(CopyJob, "ready_s", lambda _job: NEVER)  # no background thread comes to it
    desk.weights.fill_(2)
    done = desk.begin(0, 2)
    (pending,) = desk.writer._pending
    with pytest.raises(SettingsError, match="does not know"):
        done.result(60.0)
    held = bytes(pending.view.map)
    desk.weights.fill_(3)
    desk.copied()
    with pytest.raises(SpotError, match="given up"):
        pending.job.wait_cpu()
    assert bytes(pending.view.map) == held


@pytest.mark.parametrize(("owner", "method"), [(SnapshotWriter, "_finish"), (Joining, "_write")])
def test_where_a_background_thread_fails_before_it_begins_nobody_waits_and_nothing_is_left_behind(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, owner: type[Any], method: str
) -> None:
    """Want of memory may come up where a function is entered: ``fit`` waited for what was never to end."""
    desk.take(1)
    whole, left = getattr(owner, method), [None]

    def struck(*arguments: Any) -> Any:
        if left:
            left.pop()
            raise MemoryError("none is left")
        return whole(*arguments)

    monkeypatch.setattr(owner, method, struck)
    done, other = desk.begin(0, 2), desk.begin(1, 2)
    desk.copied()
    assert "none is left" in str(done.exception(60.0))
    assert other.exception(60.0) is not None or owner is SnapshotWriter
    desk.writer.settle(LAST_S)
    for step in (3, 4, 5, 6):  # more than there are slots
        assert desk.take(step).step == step


@contextmanager
def unsaid(desk: Desk) -> Iterator[Future[Any]]:
    """Step 2 begun on rank 0 in a slot that was leased ahead; the background does not come to it meanwhile."""
    desk.kept = []
    desk.take(1)
    ahead(desk)
    may_go_on = threading.Event()
    desk.writer._tasks.put(lambda: may_go_on.wait(60.0) and None)
    try:
        yield desk.begin(0, 2)
    finally:
        may_go_on.set()


def test_a_slot_leased_ahead_is_said_before_a_later_snapshot_is_begun(desk: Desk) -> None:
    """Else the others hear that it was overtaken, and rank 0 waits for ten minutes for what they do not write."""
    with unsaid(desk) as second:
        third = desk.begin(0, 3)
        other = desk.begin(1, 2)
        desk.copied()
        assert other.exception(30.0) is None
    other = desk.begin(1, 3)
    desk.copied()
    assert other.exception(60.0) is None
    assert [done.result(60.0).step for done in (second, third)] == [2, 3]


def test_a_slot_leased_ahead_is_said_before_a_later_snapshot_is_declined(desk: Desk) -> None:
    """Else it is over for the others before it has begun."""
    with unsaid(desk) as second:
        with pytest.raises(NotSerializableError):
            desk.begin(0, 3, bad=lambda: 0)
        other = desk.begin(1, 2)
        desk.copied()
        assert other.exception(30.0) is None
    assert second.result(60.0).step == 2


def test_a_slot_leased_ahead_is_said_at_once_where_an_earlier_snapshot_is_not_done(desk: Desk) -> None:
    """Else the others' training waits until rank 0 has sealed that one."""
    desk.kept = []
    desk.take(1)
    desk.writer.settle(LAST_S)
    begun = [desk.begin(0, 2)]
    desk.writer.next_comes()  # to be done once step 2 is there
    begun.append(desk.begin(0, 3))
    others = [desk.begin(1, 2)]
    begun[0].result(60.0)
    until(lambda: desk.writer._leases.is_ahead, "a slot leased ahead")
    begun.append(desk.begin(0, 4))
    lease = desk.other_host.join(snapshot_name(4, 1), share=1, wait_s=1.0)
    assert lease.shared is not None
    others += [desk.begin(1, step) for step in (3, 4)]
    desk.copied()
    assert [other.exception(60.0) for other in others] == [None] * 3
    assert [done.result(60.0).step for done in begun] == [2, 3, 4]


def test_a_part_that_training_could_not_wait_for_is_not_written(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training went on, and may have written to its tensors past torch's counts."""
    desk.kept = []
    desk.take(1)
    other = desk.begin(1, 2)
    wait = threading.Event.wait

    def fails(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise MemoryError
        return wait(event, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", fails)
        desk.other.copied()
    desk.weights.numpy()[:] = 2.0  # as the optimizer does
    done = desk.begin(0, 2)
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused):
        other.result(60.0)
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused):
        done.result(60.0)
    assert desk.take(3).step == 3


def test_elastic_hear_at_once_that_rank_0_is_fenced(desk: Desk) -> None:
    desk.kept = []
    other = desk.begin(1, 1)
    rank_0 = SimpleNamespace(number=1, writer=desk.writer)
    Attempt.decline(cast(Attempt, rank_0), 1, "a later attempt has taken the run over", complete=False)
    with pytest.raises(SnapshotFailedError, match="a later attempt", check=FailureReason.SHARE_MISSING.caused):
        other.result(60.0)


def test_what_is_frozen_is_copied_again_only_where_it_changed(desk: Desk, tmp_path: Path) -> None:
    def copied(step: int) -> int:
        before = desk.writer.copied_bytes
        manifest = desk.take(step)
        assert desk.first.flush(60.0) == []
        image, manifest = read_folder(tmp_path / "run" / manifest.name)
        saved = load_all(ImageReader(image, manifest))["state_dict"]
        assert torch.equal(saved["w"], desk.weights)
        assert torch.equal(saved["f"], desk.frozen)
        return desk.writer.copied_bytes - before

    frozen_bytes = 4 * len(desk.frozen)
    nbytes = []
    for step in range(1, 7):
        desk.weights += 1
        nbytes.append(copied(step))
    assert nbytes[0] > frozen_bytes > nbytes[-1] > 0  # each slot has it by then
    desk.frozen.data.add_(1)  # past the counts
    assert copied(7) > frozen_bytes


class Alone(SimpleNamespace):
    """A trainer of one rank, as far as its snapshots in shards ask it."""

    global_rank, global_step, max_steps, world_size = 0, 1, -1, 1
    optimizers: tuple[Any, ...] = ()
    lightning_module = torch.nn.Module()
    strategy = SimpleNamespace(model=lightning_module)


def dump_of(state: dict[str, Any]) -> Dump:
    return Dump(checkpoint={}, state=state, validation_progress=None, loggers=[], untracked=[], lost=[])


def ring(*, strict: bool) -> RingSettings:
    return RingSettings(slots=2, memory_bytes=2**20, server_idle_timeout_s=9.0, keep=1, strict=strict)


@pytest.mark.parametrize("number", range(2))
def test_what_is_frozen_is_copied_as_it_is_at_the_seam_whatever_stream_trains(
    desk: Desk, tmp_path: Path, number: int
) -> None:
    """A hook may write what no optimizer does, as one that averages weights, on a stream of the training's own."""
    device = StreamOfEachThread(number)
    device.own([desk.frozen])
    desk.other._copier.close()
    desk.other._copier = Copier(device=device)
    desk.other._views = SlotViews(desk.other._copier)
    count = len(desk.frozen)
    part = rows(desk.frozen, 2)
    for _ in range(20):  # what is ordered before that takes its time
        device.do(lambda: None)
    device.do(lambda: desk.frozen.fill_(2.0))
    dones = [desk.begin(rank, 1, part=part) for rank in (0, 1)]
    desk.copied()
    manifest, _ = [done.result(LAST_S) for done in dones]
    assert desk.first.flush(60.0) == []
    saved = load_all(ImageReader(*read_folder(tmp_path / "run" / manifest.name)))["state_dict"]["part"]
    assert (saved[count:] == 2.0).all()


def test_a_fenced_rank_0_says_that_there_will_be_no_snapshot() -> None:
    told: list[Any] = []
    attempt = SimpleNamespace(fenced=True, decline=lambda step, why, **how: told.append((step, why, how)))
    trainer = cast(Any, Alone())
    in_shards = InShards(trainer, Location.of("/nowhere"), ring(strict=False))
    in_shards.write(cast(Any, attempt), dump_of({}), {}, complete=True, how=TOGETHER, wait_s=0.0, commit_s=0.0)
    assert told == [(1, "a later attempt has taken the run over", {"complete": True, "at": ""})]


def test_a_state_that_cannot_be_saved_ends_no_training_unless_it_is_to(caplog: pytest.LogCaptureFixture) -> None:
    attempt = cast(Any, SimpleNamespace(fenced=False, writer=SimpleNamespace(), skipped=0))
    trainer, bad = cast(Any, Alone()), dump_of({"bad": lambda: 0})
    how: dict[str, Any] = {"complete": False, "how": TOGETHER, "wait_s": 0.0, "commit_s": 0.0}
    InShards(trainer, Location.of("/nowhere"), ring(strict=False)).write(attempt, bad, dict, **how)
    (facts,) = said(caplog, "no-snapshot")
    assert "the state of this rank cannot be serialised" in str(facts["error"])
    assert attempt.skipped == 1
    with pytest.raises(NotSerializableError):
        InShards(trainer, Location.of("/nowhere"), ring(strict=True)).write(attempt, bad, dict, **how)


def test_optimizers_have_names_while_a_module_is_gathered_for_a_validation() -> None:
    """The last snapshot of a training that ended with one came with a warning that asked to report it."""
    module = torch.nn.Linear(2, 2)
    optimizer, own = torch.optim.SGD(module.parameters()), module.weight
    module._parameters["weight"] = torch.nn.Parameter(own.detach().clone())  # as FSDP2 does for forward
    module.register_state_dict_pre_hook(lambda *_: module._parameters.update(weight=own))
    (group,) = Dtensors(module).optimizer_state(optimizer)["param_groups"]
    assert group["params"] == ["weight", "bias"]
