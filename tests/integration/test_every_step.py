"""A snapshot at every step is, bit for bit, the state of its step, whatever the model does to its tensors."""

from __future__ import annotations

import copy
import io
import logging
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn

from lightning_spot import EverySteps, RemoteSnapshot
from lightning_spot.capture import cuda, schedule
from lightning_spot.server.host import InProcessHost, Lease
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.support.fake_device import Emulated
from tests.support.snapshots import EachDurable, check_all, spot
from tests.support.trainer import Net, Probe, TwoOptimizers, Unhurried, data, digest_of, trainer

pytestmark = pytest.mark.guarantee("G9")

WIDTH = 160  # of a frozen layer


class Adapted(pl.LightningModule):
    """A frozen layer with an adapter, tied weights, BatchNorm, a target network, weights clipped past the counts.

    In mid-training it gets another parameter. Momentum is written to in place by one optimizer and past the counts by
    another.
    """

    grows = True

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.twin = nn.Linear(16, WIDTH)
        self.twin.weight = self.base.weight
        self.head = nn.Linear(WIDTH, 1)
        self.target = copy.deepcopy(self.frozen)
        self.wide = nn.Linear(WIDTH, WIDTH, bias=False)  # trained in every third step only
        self.later: nn.Parameter | None = None
        self.batches = 0

    def loss(self, batch: Any) -> torch.Tensor:
        x = self.base(batch[0]) + self.twin(batch[0])
        x = self.frozen(x) + self.up(self.down(x)) + (self.wide(x) if self.batches % 3 == 0 else 0)
        x = torch.relu(self.norm(x))
        return nn.functional.mse_loss(self.head(x) * (self.later if self.later is not None else 1), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        self.head.weight.data.clamp_(-0.05, 0.05)
        if self.batches % 7 == 0:
            self.target.weight.data.mul_(0.9)
            self.target.weight.data.add_(0.1 * self.frozen.weight)
        if self.batches % 11 == 0:
            self.frozen.bias.data = self.frozen.bias.data + 1
        if self.grows and self.batches == 12:
            self.later = nn.Parameter(torch.ones(1))
            self.trainer.optimizers[0].add_param_group({"params": [self.later]})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


class RunsAhead(Adapted):
    """Its optimizers step several times a batch; one of them writes past the counts, as older ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first = self.optimizers()
        second = torch.optim.SGD([self.head.bias], lr=0.01)
        for _ in range(2):
            first.zero_grad(set_to_none=True)
            self.manual_backward(self.loss(batch))
            first.step()
        second.step()
        for parameter in (self.up.weight, self.wide.weight):
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.01)


class OfOneSize(Adapted):
    """Gets no other parameter: torch's averages take none."""

    grows = False


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, str], dict[int, str]]:
    """What is in each snapshot when it is committed in memory, and when it is durable. Small states are cut, too."""
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    committed: dict[int, str] = {}
    durable: dict[int, str] = {}
    real_seal, real_put = InProcessHost.seal, LocalStore.put

    def seal(self: InProcessHost, lease: Lease, manifest: Manifest, *more: Any, **named: Any) -> Any:
        done = real_seal(self, lease, manifest, *more, **named)
        image = io.BytesIO(bytes(lease.map[: manifest.nbytes]))
        committed.setdefault(manifest.step, digest_of(torch.load(image, weights_only=True)))
        return done

    def put(self: LocalStore, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        real_put(self, manifest, image, attempt=attempt)
        durable[manifest.step] = digest_of(torch.load(self.root / manifest.data_path, weights_only=True))

    monkeypatch.setattr(InProcessHost, "seal", seal)
    monkeypatch.setattr(LocalStore, "put", put)
    return committed, durable


Found = tuple[dict[int, str], dict[int, str]]


def trained(root: Path, model: pl.LightningModule, steps: int, *callbacks: pl.Callback, **more: Any) -> dict[int, str]:
    """Train with a snapshot at every step; the digests of what each is to be."""
    unhurried = Unhurried()
    trainer(*callbacks, unhurried, max_epochs=1, **more).fit(model, data(steps), data(2))
    truth = {step: one for step, one in unhurried.digests.items() if step}
    assert len(truth) == steps
    return truth


def at_every_step(root: Path, **more: Any) -> RemoteSnapshot:
    return RemoteSnapshot(str(root / "run"), local_server=False, interval=EverySteps(1), on_full="wait", keep=2, **more)


def many(steps: int) -> list[Any]:
    """So few steps, or very many."""
    return [pytest.param(16), pytest.param(steps, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("steps", many(500))
@pytest.mark.parametrize("kind", [Adapted, RunsAhead, OfOneSize])
def test_every_snapshot_is_its_step(
    tmp_path: Path, found: Found, steps: int, kind: type[Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each validation swaps averages, right after a snapshot has begun. Each becomes durable."""
    swaps: list[int] = []
    swap = WeightAveraging._swap_models

    def counted(self: Any, module: pl.LightningModule) -> None:
        swaps.append(module.global_step)
        swap(self, module)

    monkeypatch.setattr(WeightAveraging, "_swap_models", counted)
    is_swapped = kind is OfOneSize
    averages: list[pl.Callback] = [EMAWeightAveraging(decay=0.9)] if is_swapped else []
    callbacks = (*averages, at_every_step(tmp_path, min_upload_interval_s=0.0), EachDurable(tmp_path / "run", 1))
    truth = trained(tmp_path, kind(), steps, *callbacks, **({"val_check_interval": 3} if is_swapped else {}))
    _, durable = found
    if is_swapped:
        assert set(swaps) >= set(range(3, steps, 3))
        truth.pop(steps), durable.pop(steps)  # at the end, the averages are put in
    assert durable == truth
    assert LocalStore(tmp_path / "run").survey().manifests[0].complete


BESIDE = [(Adapted, "backward"), (RunsAhead, "eager"), pytest.param(Adapted, "auto", marks=pytest.mark.soak)]


@pytest.mark.parametrize("steps", many(1000))
@pytest.mark.parametrize(("kind", "copy_mode"), BESIDE)
def test_every_snapshot_is_its_step_while_training_continues(
    tmp_path: Path, found: Found, caplog: pytest.LogCaptureFixture, kind: type[Adapted], copy_mode: Any, steps: int
) -> None:
    """Nobody waits for a copy, a commit or the disk: slots are used again while others are written and read."""
    committed, durable = found
    with caplog.at_level(logging.WARNING):
        each = trained(tmp_path, kind(), steps, at_every_step(tmp_path, copy_mode=copy_mode))
    assert committed == each
    assert durable.items() <= each.items()
    assert max(durable) == max(each)
    assert "was dropped" not in caplog.text


class LooksOn(pl.Callback):
    """Notes who had waited for a GPU when training ended."""

    def __init__(self, device: Emulated) -> None:
        self.device = device
        self.waited: set[threading.Thread] = set()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.waited = set(self.device.waited)


ON_GPUS = [
    pytest.param(
        kind, copy_mode, buffer, marks=[] if (kind, copy_mode) == (RunsAhead, "asymmetric") else pytest.mark.soak
    )
    for kind in (Adapted, RunsAhead, TwoOptimizers)
    for copy_mode, buffer in (("eager", 2000), ("asymmetric", 2000), ("backward", 10**6), ("backward", None))
]


@pytest.mark.parametrize(("kind", "copy_mode", "buffer"), ON_GPUS)
def test_every_snapshot_is_its_step_on_gpus_whose_copies_lag(
    tmp_path: Path,
    found: Found,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[pl.LightningModule],
    copy_mode: Any,
    buffer: int | None,
) -> None:
    """The training thread waits for none of them."""
    device, (committed, _) = Emulated(), found
    monkeypatch.setattr(cuda, "Cuda", lambda: device)
    looks_on, snapshots = LooksOn(device), at_every_step(tmp_path, copy_mode=copy_mode, device_buffer=buffer)
    truth = trained(tmp_path, kind(), 12, snapshots, looks_on)
    assert committed == truth
    assert snapshots.num_dropped == 0
    assert looks_on.waited  # the background does
    assert threading.current_thread() not in looks_on.waited
    assert device.allocated <= 2 * (buffer or 0)
    assert not device.unpinned_copies
    assert not device.pinned  # each slot was let go


@pytest.mark.parametrize(("copy_mode", "buffer"), [("eager", "64MiB"), ("asymmetric", "1KiB"), ("backward", None)])
def test_a_snapshot_is_committed_while_training_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_mode: Any, buffer: str | None
) -> None:
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    monkeypatch.setattr(cuda, "Cuda", lambda: device)
    device, probe = Emulated(), Probe()
    callback = spot(tmp_path, interval=EverySteps(1), device_buffer=buffer, copy_mode=copy_mode)
    pauses = EachDurable(tmp_path / "run-1", 9)  # before the next optimizer step
    trainer(callback, probe, pauses).fit(Net(), data())
    assert len(check_all(tmp_path, probe)) >= 2
    snapshotter = callback.snapshots.snapshotter
    assert snapshotter.writing.dropped == 0
