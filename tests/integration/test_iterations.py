"""Copying spread over real iterations, in every mode: each snapshot is its step to the bit, and the model is let go."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_spot import EverySteps, RemoteSnapshot
from lightning_spot.capture import attempt, schedule
from lightning_spot.capture.batch import CopyJob
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.schedule import PlaceKind, Profile, Schedule, Timetable
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.server.host import InProcessHost, Lease
from lightning_spot.session import coordinator, snapshotter
from lightning_spot.snapshot.manifest import Manifest
from tests.support.said import said
from tests.support.trainer import At, Net, Probe, Stop, StopIn, TwoOptimizers, data, equal, state_of, trainer

MODES = ("eager", "asymmetric", "backward", "blocking", "auto")


class Seen:
    """What was committed, read out of the slots, and what was planned for it."""

    def __init__(self) -> None:
        self.images: dict[int, bytes] = {}  # of one step, the first: not that of the end
        self.timetables: list[tuple[Profile, Timetable]] = []
        self.released: list[int] = []

    def check(self, probe: Probe) -> None:
        assert self.images
        for step, image in self.images.items():
            saved = torch.load(io.BytesIO(image), weights_only=True)
            assert saved["global_step"] == step
            assert equal(state_of(saved), probe.states[step]), step


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Small states count as large ones, so that they are cut."""
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    monkeypatch.setattr(coordinator, "BUCKET_BYTES", 300)
    found = Seen()
    real_seal, real_timetable, real_release = InProcessHost.seal, Schedule.timetable, CopyJob.release

    def seal(self: InProcessHost, lease: Lease, manifest: Manifest, *more: Any, **named: Any) -> Any:
        done = real_seal(self, lease, manifest, *more, **named)
        found.images.setdefault(manifest.step, bytes(lease.map[: manifest.nbytes]))
        return done

    def timetable(self: Schedule, *pieces: Any) -> Timetable | None:
        made = real_timetable(self, *pieces)
        if made is not None and not made.stands_still:
            assert self._profile is not None
            found.timetables.append((self._profile, made))
        return made

    def release(self: CopyJob, place: int) -> None:
        found.released.append(place)
        real_release(self, place)

    monkeypatch.setattr(InProcessHost, "seal", seal)
    monkeypatch.setattr(Schedule, "timetable", timetable)
    monkeypatch.setattr(CopyJob, "release", release)
    return found


def spot(root: Path, copy_mode: Any, every: int = 1) -> RemoteSnapshot:
    return RemoteSnapshot(
        str(root / "run"), local_server=False, interval=EverySteps(every), on_full="wait", copy_mode=copy_mode
    )


def hooks_of(module: nn.Module) -> list[Any]:
    """Hooks of any kind that are left on a module or its parameters."""
    left = [hook for part in module.modules() for kind in vars(part) if "hooks" in kind for hook in vars(part)[kind]]
    return left + [hook for item in module.parameters() for hook in (item._post_accumulate_grad_hooks or {}).values()]


@pytest.mark.parametrize("copy_mode", MODES)
def test_every_snapshot_is_its_step(tmp_path: Path, seen: Seen, copy_mode: str) -> None:
    probe, model = Probe(), Net()
    callback = spot(tmp_path, copy_mode)
    trainer(callback, probe).fit(model, data(10), data(2))
    assert set(seen.images) == set(range(1, 21))
    seen.check(probe)
    beside = copy_mode not in ("eager", "blocking")
    assert bool(seen.timetables) == beside
    assert hooks_of(model) == []
    assert any(seen.released) == beside  # while training went on
    for profile, timetable in seen.timetables:
        kinds = {place: point.kind for point, place in profile.places.items()}
        points = [kinds[part.point] for part in timetable.partitions]
        assert copy_mode == "auto" or len(points) > 1
        assert copy_mode != "backward" or set(points) == {PlaceKind.GRADIENT}


class WritesWhereAnEpochEnds(pl.Callback):
    """To one number, past the counts; its hook comes before ours."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net[0].weight.data[0, 0] += 1


class SkipsTheLast(Net):
    """Steps by itself, but not in the last of four batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if batch_idx < 3:
            optimizer.step()


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


ENDS: dict[str, tuple[Callable[[], Net], int, int, dict[str, Any]]] = {
    "its batches are over": (Net, 2, 4, {}),
    "the last one does not step": (SkipsTheLast, 4, 6, {}),
    "max_steps": (Net, 8, 3, {"max_steps": 3}),
    "should_stop": (Net, 8, 3, {}),
}


@pytest.mark.parametrize("how", ENDS)
def test_callbacks_at_an_epochs_end_write_after_its_snapshots(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(attempt, "Copier", partial(Copier, threads=0))  # copied only where training waits
    module, batches, steps, more = ENDS[how]
    probe, others = Probe(), [Stops()] if how == "should_stop" else []
    trainer(probe, *others, WritesWhereAnEpochEnds(), spot(tmp_path, "eager"), **more).fit(module(), data(batches))
    assert set(seen.images) == set(range(1, steps + 1))
    seen.check(probe)


class Watched(pl.Callback):
    """Notes which snapshot is committed as each step begins."""

    def __init__(self, spot: RemoteSnapshot) -> None:
        self.spot = spot
        self.committed: dict[int, int | None] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.committed[trainer.global_step] = self.spot.last_committed_step


def test_training_stands_still_until_a_snapshot_is_committed(tmp_path: Path, seen: Seen) -> None:
    callback = spot(tmp_path, "blocking", every=3)
    watched = Watched(callback)
    trainer(callback, watched).fit(Net(), data())
    assert {step: watched.committed[step] for step in range(3, 40)} == {step: step // 3 * 3 for step in range(3, 40)}


def test_an_unresponsive_ring_blocks_training_within_its_limit(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go_on = InProcessHost.seal, threading.Event()

    def seal(self: InProcessHost, *arguments: Any, **named: Any) -> Any:
        assert go_on.wait(120)
        return real(self, *arguments, **named)

    monkeypatch.setattr(InProcessHost, "seal", seal)
    monkeypatch.setattr(InProcessHost, "server_call_timeout_s", 0.05, raising=False)
    callback = spot(tmp_path, "blocking", every=3)
    # Training went on after the first.
    trainer(callback, At(5, go_on.set, "on_train_batch_start")).fit(Net(), data())
    assert go_on.is_set()
    assert 3 in seen.images


class Unused(Net):
    """Has a layer that only every third step uses, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.never = nn.Linear(16, 1), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss + self.rare(batch[0]).mean() if batch_idx % 3 == 0 else loss


class Recomputed(Net):
    """Runs its forward pass again in the backward pass."""

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = checkpoint(self.net[:3], batch[0], use_reentrant=False)
        return nn.functional.mse_loss(self.net[3](hidden), batch[1])


class Lazy(Net):
    """Has a parameter without a shape until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(32)


class Closures(Net):
    """Steps with closures that run several forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnStep(Net):
    """Steps its optimizer past Lightning, as its ``optimizer_step`` may: ``on_before_optimizer_step`` is not called."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for callback in self.trainer.callbacks:
            if isinstance(callback, RemoteSnapshot) and callback.snapshotter and callback.snapshotter.writing.attempt:
                assert all(pending.job.is_done for pending in callback.snapshotter.writing.attempt.writer._pending)
        optimizer.optimizer.step()


class LateProbe(Probe):
    """Looks once every parameter has its shape."""

    def on_train_batch_start(self, trainer: pl.Trainer, *more: Any) -> None:
        if trainer.global_step:
            super().on_train_batch_start(trainer, *more)


WAYS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "accumulation": (Net, {"accumulate_grad_batches": 3, "max_epochs": 3}),
    "clip-bf16": (Net, {"gradient_clip_val": 0.1, "precision": "bf16-mixed"}),
    "two-optimizers": (TwoOptimizers, {}),
    "unused": (Unused, {}),
    "recomputed": (Recomputed, {}),
    "lazy": (Lazy, {}),
    "closures": (Closures, {}),
    "own-step": (OwnStep, {}),
    "compiled": (lambda: torch.compile(Net(), backend="aot_eager"), {}),
}


def ways() -> Iterator[Any]:
    """Every way in every mode; half of them, each way and each mode among them, outside of the long run."""
    for number, name in enumerate(WAYS):
        for turn, copy_mode in enumerate(("backward", "asymmetric")):
            marks = [pytest.mark.soak] if (number + turn) % 2 else []
            yield pytest.param(name, copy_mode, marks=marks, id=f"{name}-{copy_mode}")


@pytest.mark.parametrize(("name", "copy_mode"), ways())
def test_ways_to_train(tmp_path: Path, seen: Seen, name: str, copy_mode: str) -> None:
    module, settings = WAYS[name]
    probe, model = LateProbe(), module()
    pl.seed_everything(1, verbose=False)
    trainer(spot(tmp_path, copy_mode), probe, **{"max_epochs": 1, **settings}).fit(model, data())
    seen.check(probe)
    assert len(seen.images) >= 20
    assert len(seen.timetables) >= 10
    assert hooks_of(model) == []


class Copies(pl.Callback):
    """Copies and pickles the model in mid-training, and trains the copies for a step."""

    def __init__(self) -> None:
        self.copies: list[nn.Module] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Net, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step in (3, 15):
            for made in (copy.deepcopy(pl_module.net), pickle.loads(pickle.dumps(pl_module.net))):
                nn.functional.mse_loss(made(batch[0]), batch[1]).backward()
                self.copies.append(made)


def test_the_model_can_be_copied_in_mid_training(tmp_path: Path, seen: Seen) -> None:
    probe, copies = Probe(), Copies()
    trainer(spot(tmp_path, "backward"), probe, copies).fit(Net(), data())
    seen.check(probe)
    assert len(copies.copies) == 4
    assert [hooks_of(made) for made in copies.copies] == [[]] * 4


def test_after_an_exception_nothing_is_left_on_the_model(tmp_path: Path, seen: Seen) -> None:
    model, probe = Net(), Probe()
    with pytest.raises(Stop):
        trainer(spot(tmp_path, "backward"), probe, StopIn("on_train_batch_start", 13)).fit(model, data())
    assert hooks_of(model) == []
    assert max(seen.images) == 12  # what was held is copied, and committed
    seen.check(probe)


class Noting(EverySteps):
    """Notes the newest step of which a snapshot was begun."""

    newest = 0

    def taken(self, step: int, now_s: float) -> None:
        self.newest = step
        super().taken(step, now_s)


def test_a_budget_makes_the_interval_grow(tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits 2 s for each snapshot, on a clock that goes on by 1 s a step: every 20th step is taken then."""
    now_s = 0.0
    interval = Noting(1, max_overhead=0.1)
    monkeypatch.setattr(snapshotter.time, "monotonic", lambda: now_s)

    class Slow(RemoteSnapshot):
        def on_train_batch_start(self, *arguments: Any) -> None:
            nonlocal now_s
            now_s += 1.0
            super().on_train_batch_start(*arguments)

        def on_before_optimizer_step(self, trainer: pl.Trainer, *arguments: Any) -> None:
            nonlocal now_s
            with self.snapshotter.pacing.stalling():
                now_s += 2.0 * (trainer.global_step > 0 and interval.newest == trainer.global_step)
            super().on_before_optimizer_step(trainer, *arguments)

    callback = Slow(str(tmp_path / "run"), local_server=False, interval=interval, on_full="wait", copy_mode="eager")
    trainer(callback, max_epochs=5).fit(Net(), data())
    assert sorted(seen.images)[:-1] == [1, *range(19, 100, 18)]


def test_snapshots_that_find_no_slot_are_counted_and_said_once(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, busy, interval = InProcessHost.lease, range(4, 10), Noting(1)
    callback = RemoteSnapshot(str(tmp_path / "run"), local_server=False, interval=interval)

    def lease(self: InProcessHost, *arguments: Any, **named: Any) -> Lease:
        if interval.newest in busy:
            raise SnapshotFailedError("every slot is busy", reason=FailureReason.RING_FULL)
        return real(self, *arguments, **named)

    monkeypatch.setattr(InProcessHost, "lease", lease)
    monkeypatch.setattr(SnapshotWriter, "ready", True)  # slots that are still being made are waited for
    trainer(callback, max_epochs=1).fit(Net(), data())
    assert callback.num_skipped >= 5
    assert len(set(busy) & set(seen.images)) <= 1  # one slot may have been leased ahead
    assert len(said(caplog, "slots-full")) == 1
