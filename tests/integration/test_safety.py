"""What is said to be safe at a notice, and what is left of a writer when its training has ended."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import AutoResume, EverySteps, RemoteSnapshot
from lightning_spot.capture import schedule
from lightning_spot.capture.layouts import ShardedCheckpoint, ShardedCheckpointLayouter
from lightning_spot.capture.slot_pool import SlotPool
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SpotError
from lightning_spot.interval.deadline import Deadline
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.runs import RunInfo
from lightning_spot.session.session import FitSession, secure
from lightning_spot.state.loops import StepBoundary
from lightning_spot.store.local import LocalStore
from tests.support.server import MIB, RUN_ID, manifest_of
from tests.support.trainer import Net, Stop, data, trainer

pytestmark = pytest.mark.guarantee("G13")


class Noticed(pl.Callback):
    """A notice comes after step 3 of a training, which is stopped for it.

    Args:
        snapshots: of the training.
        before: what happens just before.
        wait_s: seconds until the deadline.
    """

    def __init__(
        self, snapshots: RemoteSnapshot, before: Callable[[], object] = lambda: None, wait_s: float = 60.0
    ) -> None:
        self.snapshots, self.before, self.wait_s, self.said = snapshots, before, wait_s, ""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self.secure(trainer, StepBoundary.AFTER_BATCH)

    def secure(self, trainer: pl.Trainer, boundary: StepBoundary) -> None:
        self.before()
        assert self.snapshots.snapshotter is not None
        deadline = Deadline.of(None, self.wait_s)
        self.said = secure(trainer, self.snapshots.snapshotter, boundary, deadline, lambda: False)
        raise Stop


def test_training_does_not_stand_still_for_an_urgent_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did for server_call_timeout_s, also where the deadline was nearer."""
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    real, real_wait, begun, stood = InProcessHost.seal, SnapshotWriter.wait_all, threading.Event(), []

    def seal(self: InProcessHost, lease: Any, manifest: Any, *more: Any, **named: Any) -> None:
        if manifest.step == 3:
            stood.append(not begun.wait(30.0))
        real(self, lease, manifest, *more, **named)

    def wait_all(self: SnapshotWriter, wait_s: float) -> None:
        begun.set()
        real_wait(self, wait_s)

    monkeypatch.setattr(InProcessHost, "seal", seal)
    monkeypatch.setattr(InProcessHost, "server_call_timeout_s", 60.0)
    monkeypatch.setattr(SnapshotWriter, "wait_all", wait_all)
    root = str(tmp_path / "run")
    callback = RemoteSnapshot(root, local_server=False, interval=EverySteps(2), on_full="wait", copy_mode="blocking")
    noticed = Noticed(callback)
    with pytest.raises(Stop):
        trainer(callback, noticed).fit(Net(), data())
    assert "step 3" in noticed.said
    assert "is safe in" in noticed.said
    assert stood == [False]


def test_a_fenced_trainer_does_not_wait_at_a_notice(tmp_path: Path) -> None:
    """It did, for all of `upload_timeout_s`: no tier would ever have what it had taken."""

    def take_over() -> None:
        store = LocalStore(tmp_path / "run")
        mine = store.newest_claim()
        store.claim(replace(mine, attempt=mine.attempt + 1, digest="of another host"))

    callback = RemoteSnapshot(str(tmp_path / "run"), local_server=False, interval=EverySteps(1000))
    noticed = Noticed(callback, take_over, wait_s=15.0)
    with pytest.raises(Stop):
        trainer(callback, noticed).fit(Net(), data())
    assert "step 3" in noticed.said
    assert "was refused (attempt 1 of run 'run' may no longer write: attempt 2 has taken over" in noticed.said


class InValidation(Noticed):
    """It comes in the middle of a validation."""

    def __init__(self, snapshots: RemoteSnapshot) -> None:
        super().__init__(snapshots)
        self.seen: list[int] = []  # part of its state, as it is

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        FitSession.of(trainer).expect_stop()

    def on_train_batch_end(self, *_: Any) -> None:
        """Not yet."""

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.global_step)
        if not trainer.sanity_checking:
            self.secure(trainer, StepBoundary.VALIDATION)


class Averaged(InValidation):
    """Validates with other weights, as averages are put in by many: by ``tensor.data``."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data.mul_(0.5)


def noticed_in_validation(
    root: Path, kind: type[InValidation], every: int, *more: pl.Callback
) -> tuple[str, list[dict[str, Any]]]:
    """What was said, and the snapshots there are."""
    snapshots = RemoteSnapshot(str(root), local_server=False, interval=EverySteps(every))
    callback = kind(snapshots)
    with pytest.raises(Stop):
        trainer(callback, *more, snapshots, limit_train_batches=4).fit(Net(), data(), data(2))
    found = LocalStore(root).survey().manifests
    return callback.said, [torch.load(root / manifest.data_path, weights_only=True) for manifest in found]


def test_uncounted_weight_swaps_are_not_taken_for_training(tmp_path: Path) -> None:
    """The urgent snapshot had the averages: the resumed run trained on from them."""
    said, found = noticed_in_validation(tmp_path / "run", Averaged, every=1000)
    assert said.startswith("no snapshot of this attempt is committed")
    assert not found


def test_state_a_validation_adds_is_not_in_the_snapshot_before(tmp_path: Path) -> None:
    """The resumed run validates again, and had it twice."""
    said, found = noticed_in_validation(tmp_path / "run", InValidation, every=1000)
    assert "step 4" in said
    (state,) = [state for key, state in found[0]["callbacks"].items() if key.startswith("InValidation")]
    assert state == {"seen": [0, 0]}  # of the sanity check


def test_an_urgent_slot_has_its_full_time_right_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of a validation there was no step yet. A large slot took longer than a call may: its server was lost."""
    resumes = AutoResume(str(tmp_path / "run"), local_server=False)
    noticed_in_validation(tmp_path / "run", InValidation, 1000, resumes)
    create, made_by = SlotMemory.create, []

    def noted(capacity: int, path: Path | None) -> SlotMemory:
        made_by.append(threading.current_thread().name)
        return create(capacity, path)

    monkeypatch.setattr(SlotMemory, "create", noted)
    said, found = noticed_in_validation(tmp_path / "run", InValidation, 1000, resumes)
    assert resumes.resumed_from is not None
    assert set(made_by) == {"spot-slots"}
    assert "step 4" in said
    assert "is safe in" in said
    assert len(found) == 2


@pytest.mark.parametrize(
    ("every", "error"),
    [
        (4, SnapshotFailedError("all slots are on their way", reason=FailureReason.RING_FULL)),
        (1000, ServerUnreachableError("gone")),
    ],
    ids=["skipped before", "server lost now"],
)
def test_a_snapshot_that_could_not_be_begun_is_taken_at_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, error: SpotError
) -> None:
    """It counted as begun: nothing was taken, and the run resumed from an older one."""
    lease, refused = InProcessHost.lease, []

    def refuses(self: InProcessHost, *what: Any, **more: Any) -> Any:
        if not refused:
            refused.append(what)
            raise error
        return lease(self, *what, **more)

    monkeypatch.setattr(SlotPool, "warm", lambda *_, **__: None)
    monkeypatch.setattr(InProcessHost, "lease", refuses)
    said, found = noticed_in_validation(tmp_path / "run", InValidation, every)
    assert refused
    assert "step 4" in said
    assert "is safe in" in said
    assert len(found) == 1


class Owner:
    """Has a writer, and makes rings for it: a cycle."""

    writer: SnapshotWriter

    def reconnect(self) -> Host:
        raise ServerUnreachableError("there is no other")


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("sharded", [True, False])
def test_a_writer_that_is_closed_is_gone_when_it_is_let_go(tmp_path: Path, sharded: bool) -> None:
    """It was there, with its ring and all views of slots, until Python looked for cycles."""
    durable = str(tmp_path / "run")
    host = InProcessHost(slots=2, memory_bytes=16 * MIB, open_store=open_store)
    host.open_run(RunInfo(name="run", id=RUN_ID, location=durable, attempt=1, token="t", durable_url=durable))
    state: dict[str, Any] = {"w": torch.rand(1000)}

    owner = Owner()
    if sharded:
        writer = SnapshotWriter(host, owner.reconnect, layouter=ShardedCheckpointLayouter(0, 1))
        state = cast(Any, ShardedCheckpoint({"state_dict": state}, {}, {"epoch": 1}))
    else:
        writer = SnapshotWriter(host, owner.reconnect)
    owner.writer = writer
    writer.begin(state, manifest_of(1, nbytes=0), wait_s=60.0).result(60.0)
    writer.wait_all(60.0)
    writer.close()
    host.leave(complete=False)
    left = [weakref.ref(writer), weakref.ref(host), weakref.ref(writer.link)]
    del owner, writer, host
    assert [item() for item in left] == [None, None, None]
