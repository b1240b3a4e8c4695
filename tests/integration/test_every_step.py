"""A snapshot at every step is, bit for bit, the state of its step, whatever the model does to its tensors.

At every tier that it reached: the ring or the server on the host, a snapshot server, the durable directory.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn

from lightning_spot import EverySteps, RemoteSnapshot
from lightning_spot.capture import cuda, schedule
from lightning_spot.client.local_server import LocalServer
from lightning_spot.server.host import InProcessHost, Lease
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.support.fake_device import Emulated
from tests.support.server import MIB, snapshot_server
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


@dataclass
class Tiers:
    """Digests of what is in each snapshot, by its step, as it was committed at each tier.

    Attributes:
        url: of the snapshot server.
    """

    url: str = ""
    host: dict[int, str] = field(default_factory=dict)
    memory: dict[int, str] = field(default_factory=dict)
    durable: dict[int, str] = field(default_factory=dict)


def read(image: bytes | memoryview) -> str:
    return digest_of(torch.load(io.BytesIO(image), weights_only=True))


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> Tiers:
    """What the ring, of this process or of its local server, and the durable tier get. Small states are cut, too."""
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    found = Tiers()

    def and_read(real: Callable[..., Any]) -> Callable[..., Any]:
        def seal(host: Any, lease: Lease, manifest: Manifest, *more: Any, **named: Any) -> Any:
            done = real(host, lease, manifest, *more, **named)
            found.host.setdefault(manifest.step, read(lease.map[: manifest.nbytes]))
            return done

        def put(store: LocalStore, manifest: Manifest, *more: Any, **named: Any) -> Any:
            done = real(store, manifest, *more, **named)
            found.durable[manifest.step] = read((store.root / manifest.data_path).read_bytes())
            return done

        return seal if real.__name__ == "seal" else put

    for kind, name in ((InProcessHost, "seal"), (LocalServer, "seal"), (LocalStore, "put"), (LocalStore, "put_parts")):
        monkeypatch.setattr(kind, name, and_read(getattr(kind, name)))
    return found


@pytest.fixture
def far(tiers: Tiers, tmp_path: Path) -> Iterator[Tiers]:
    """A snapshot server in this process besides, that carries the run on."""
    with snapshot_server(tmp_path, memory_bytes=256 * MIB) as (server, tiers.url):

        def look() -> None:
            for slot in server.ring.slots:
                manifest = slot.manifest
                if manifest is not None and manifest.step not in tiers.memory:
                    manifest.verify(slot.view(), "the snapshot server")
                    tiers.memory[manifest.step] = read(slot.view(manifest.nbytes))

        server.ring.watch(look)
        yield tiers


def trained(model: pl.LightningModule, steps: int, *callbacks: pl.Callback, **more: Any) -> dict[int, str]:
    """Train with a snapshot at every step; the digests of what each is to be."""
    unhurried = Unhurried()
    trainer(*callbacks, unhurried, max_epochs=1, **more).fit(model, data(steps), data(2))
    truth = {step: one for step, one in unhurried.digests.items() if step}
    assert len(truth) == steps
    return truth


def at_every_step(root: Path, **more: Any) -> RemoteSnapshot:
    usual = {"interval": EverySteps(1), "on_full": "wait", "local_server": False}
    return RemoteSnapshot(str(root / "run"), **{**usual, **more})


def many(steps: int, few: int = 16) -> list[Any]:
    """So few steps, or very many."""
    return [pytest.param(few), pytest.param(steps, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("steps", many(500))
def test_every_snapshot_is_its_step_beside_averages(
    tmp_path: Path, tiers: Tiers, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which each validation swaps, right after a snapshot has begun. Each becomes durable."""
    swaps: list[int] = []
    swap = WeightAveraging._swap_models

    def counted(self: Any, module: pl.LightningModule) -> None:
        swaps.append(module.global_step)
        swap(self, module)

    monkeypatch.setattr(WeightAveraging, "_swap_models", counted)
    snapshots, durable = at_every_step(tmp_path, min_upload_interval_s=0.0), EachDurable(tmp_path / "run", 1)
    truth = trained(OfOneSize(), steps, EMAWeightAveraging(decay=0.9), snapshots, durable, val_check_interval=3)
    assert set(swaps) >= set(range(3, steps, 3))
    truth.pop(steps), tiers.durable.pop(steps)  # at the end, the averages are put in
    assert tiers.durable == truth
    assert LocalStore(tmp_path / "run").survey().manifests[0].complete


# As users have it: the server is its own process, and what no tier takes at once is committed before it has checksums.


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("steps", many(1000, few=24))
@pytest.mark.parametrize(
    ("kind", "compression"), [(Adapted, "auto"), (RunsAhead, "always"), (Adapted, None), (RunsAhead, None)]
)
def test_every_snapshot_is_its_step_at_each_tier_it_reached(
    tmp_path: Path, far: Tiers, caplog: pytest.LogCaptureFixture, kind: type[Adapted], compression: Any, steps: int
) -> None:
    """The snapshot server and the durable tier take the newest one whenever they are free.

    Or there is no server, and no tier takes any but the first and the last: others are superseded in memory.
    """
    how = {"servers": far.url, "compression": compression, "min_upload_interval_s": 0.0}
    if compression is None:
        how = {"min_upload_interval_s": 3600.0}
    snapshots = at_every_step(tmp_path, local_server=True, **how)
    each = trained(kind(), steps, snapshots, val_check_interval=5)
    assert snapshots.num_dropped == 0
    assert "was dropped" not in caplog.text
    assert LocalStore(tmp_path / "run").survey().manifests[0].complete
    assert far.host == each
    for tier in (far.memory, far.durable) if compression else ():
        assert tier.items() <= each.items()
        assert len(tier) > 1
        assert max(tier) == max(each)


# -- on GPUs ----------------------------------------------------------------------------------------------------------


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
    tiers: Tiers,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[pl.LightningModule],
    copy_mode: Any,
    buffer: int | None,
) -> None:
    """The training thread waits for none of them."""
    device = Emulated()
    monkeypatch.setattr(cuda, "Cuda", lambda: device)
    looks_on, snapshots = LooksOn(device), at_every_step(tmp_path, copy_mode=copy_mode, device_buffer=buffer)
    each = trained(kind(), 12, snapshots, looks_on)
    assert tiers.host == each
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
