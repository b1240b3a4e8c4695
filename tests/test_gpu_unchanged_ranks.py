"""Frozen parameters on GPUs where several ranks write a snapshot, and in whole trainings on emulated GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_spot import EverySteps, RemoteSnapshot
from lightning_spot.capture import on_gpus, share, split
from lightning_spot.capture.joining import Joining
from lightning_spot.capture.share import ShareWriter
from lightning_spot.capture.split import Number
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import ShareMissing
from lightning_spot.sharded.consolidate import read_folder
from lightning_spot.sharded.reader import ImageReader, load_all
from lightning_spot.staging import cuda
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.samples import Sampler, Samples
from tests import test_sharded_writer, test_split
from tests.fake_device import Emulated, StreamOfEachThread
from tests.gpus import copied
from tests.models import data, trainer
from tests.sharded_states import rows
from tests.test_every_step import Adapted, LooksOn, Unhurried, found
from tests.test_lost_device import Fallible, LoseAt

__all__ = ["copied", "found"]

COUNT = 30_000
LAST_S = 60.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors count as large ones do. No bytes are noted by the host, as of what lies on a GPU in truth."""
    monkeypatch.setattr(on_gpus, "LEAST_BYTES", 10_000)
    monkeypatch.setattr(Sampler, "take", lambda *_: Samples((), 0))
    monkeypatch.setattr(Sampler, "note", lambda *_: Samples((), 0))
    for module in (share, split):
        monkeypatch.setattr(module, "sample", lambda *_: "")


class Ranks(test_split.Desk):
    """Three ranks, each with a GPU, whose optimizers have frozen weights, too."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, 3)
        self.devices = [StreamOfEachThread(rank) for rank in range(3)]
        for rank, device in zip(self.ranks, self.devices, strict=True):
            frozen = [nn.Parameter(torch.full((COUNT,), float(number)), requires_grad=False) for number in range(6)]
            rank.weights = [*frozen, nn.Parameter(torch.zeros(COUNT))]
            device.own(rank.weights)
        for writer in (self.writer, *self.shares):
            writer.close()
        self.writer = SnapshotWriter(self.first, copier=Copier(device=self.devices[0]))
        self.shares = [
            ShareWriter(self.joined(), self.joined, Number(rank, here=rank), Copier(device=self.devices[rank]))
            for rank in (1, 2)
        ]

    def write(self, index: int, value: float, *, counted: bool) -> None:
        for rank, device in zip(self.ranks, self.devices, strict=True):
            weight = rank.weights[index]
            if counted:
                torch.autograd.graph.increment_version(weight)
            numbers = weight.data
            device.do(lambda numbers=numbers: numbers.fill_(value))  # type: ignore[misc]

    def take(self, step: int) -> list[int]:
        """Bytes that each rank copies for a snapshot."""
        wanted: list[torch.Tensor] = []
        weights = self.ranks[0].weights
        self.devices[0].do(lambda: wanted.extend(weight.detach().clone() for weight in weights))
        writers = [self.writer, *self.shares]
        before = [writer.copied_bytes for writer in writers]
        done = self.begin(step)
        self.copied()
        self.write(-1, step, counted=True)
        saved = self.saved(done.result(LAST_S))
        assert all(torch.equal(*pair) for pair in zip(saved["w"], wanted, strict=True))
        assert self.first.flush(LAST_S) == []
        return [writer.copied_bytes - was for writer, was in zip(writers, before, strict=True)]

    def close(self) -> None:
        super().close()
        assert not any(device.pinned for device in self.devices)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_each_rank_leaves_out_what_is_frozen_of_its_share(ranks: Ranks) -> None:
    copied = [ranks.take(step) for step in range(1, 12)]
    assert min(copied[0]) > 1.9 * COUNT * 4
    assert sum(copied[-1]) < 1.5 * COUNT * 4
    ranks.write(4, 7.0, counted=True)
    assert sum(ranks.take(12)) > 2 * COUNT * 4
    assert ranks.writer.torn == sum(writer.torn for writer in ranks.shares) == 0


def test_a_write_past_the_counts_in_a_share_drops_the_snapshot(ranks: Ranks) -> None:
    for step in range(1, 10):
        ranks.take(step)
    ranks.write(3, 7.0, counted=False)  # which is the second rank's
    done = ranks.begin(20)
    ranks.copied()
    with pytest.raises(ShareMissing, match="past torch's count of writes"):
        done.result(LAST_S)
    assert sum(writer.torn for writer in ranks.shares) == 1
    for step in range(21, 25):
        ranks.take(step)
    assert all(len(writer._copier.scratch._lent) == 0 for writer in ranks.shares)


class InShards(test_sharded_writer.Desk):
    """Two ranks of a model in shards, of which the second one's frozen part is on a GPU."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.device = StreamOfEachThread(1)
        self.frozen = nn.Parameter(torch.rand(COUNT), requires_grad=False)
        self.kept = [self.frozen]
        self.device.own([self.frozen])
        self.other.close()
        copier = Copier(device=self.device)
        self.other = Joining(self.joined(), self.joined, copier=copier, rank=1, world_size=2)
        self.root = root

    def begin_parts(self, step: int) -> tuple[list[torch.Tensor], Any]:
        """Begin a snapshot on both ranks; and what the second one's frozen part is."""
        whole: list[torch.Tensor] = []
        self.device.do(lambda: whole.append(self.frozen.detach().clone()))
        part = rows(self.frozen.detach(), 2)
        dones = [self.begin(rank, step, part=part) for rank in (0, 1)]
        self.copied()
        return whole, dones

    def take_parts(self, step: int) -> int:
        """Bytes that the second rank copies."""
        before = self.other.copied_bytes
        whole, dones = self.begin_parts(step)
        manifest, _ = [done.result(LAST_S) for done in dones]
        assert self.first.flush(LAST_S) == []
        saved = load_all(ImageReader(*read_folder(self.root / "run" / manifest.name)))["state_dict"]["part"]
        assert torch.equal(saved[COUNT:], whole[0])
        return self.other.copied_bytes - before


def test_a_rank_of_a_model_in_shards_leaves_out_what_is_frozen(tmp_path: Path) -> None:
    desk = InShards(tmp_path)
    copied = [desk.take_parts(step) for step in range(1, 10)]
    assert copied[0] > COUNT * 4
    assert copied[-1] < COUNT * 4  # room for its own state
    torch.autograd.graph.increment_version(desk.frozen)
    desk.device.do(lambda: desk.frozen.data.fill_(3.0))
    assert desk.take_parts(10) > COUNT * 4
    for step in range(11, 15):
        desk.take_parts(step)
    desk.device.do(lambda: desk.frozen.data.fill_(4.0))
    _, dones = desk.begin_parts(20)
    with pytest.raises(ShareMissing, match="past torch's count of writes"):
        dones[0].result(LAST_S)
    assert desk.other.torn == 1
    assert desk.take_parts(21) > COUNT * 4
    desk.close()


class Counted(Adapted):
    """Its averages are written in the right way, in forward."""

    grows = False

    def on_train_batch_start(self, *_: Any) -> None:
        if self.batches % 7 == 6:
            with torch.no_grad():
                self.target.weight.lerp_(self.frozen.weight, 0.1)
        if self.batches == 11:
            self.frozen.requires_grad_(True)
        if self.batches == 14:
            self.frozen.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize(("partitions", "buffer"), [("eager", 2000), ("asymmetric", None), ("backward", 10**6)])
def test_every_snapshot_of_a_training_is_its_step(
    tmp_path: Path,
    found: tuple[dict[int, str], dict[int, str]],
    copied: list[int],
    monkeypatch: pytest.MonkeyPatch,
    partitions: Any,
    buffer: int | None,
) -> None:
    """The training thread waits for no look."""
    device, unhurried, (committed, _) = Emulated(), Unhurried(), found
    monkeypatch.setattr(cuda, "Cuda", lambda: device)
    looks_on = LooksOn(device)
    each: dict[str, Any] = {"interval": EverySteps(1), "on_full": "wait", "slots": 3}
    snapshots = RemoteSnapshot(str(tmp_path / "run"), memory=None, partitions=partitions, device_buffer=buffer, **each)
    trainer(snapshots, unhurried, looks_on, max_epochs=1).fit(Counted(), data(20), data(2))
    assert committed == {step: one for step, one in unhurried.digests.items() if step}
    assert snapshots.torn == 0
    assert min(copied) < max(copied) - 150_000  # of two frozen layers, of 100 kB each
    assert threading.current_thread() not in looks_on.waited
    assert not device.unpinned_copies
    assert not device.pinned


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"])
def test_a_gpu_that_is_lost_meanwhile_harms_nothing_that_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    device, threads = Fallible(), threading.active_count()
    monkeypatch.setattr(cuda, "Cuda", lambda: device)
    callback = RemoteSnapshot(str(tmp_path / "run"), memory=None, interval=EverySteps(1), on_full="wait")
    lose: pl.Callback = LoseAt(device, callback, 10, hook)  # type: ignore[arg-type] # it has the same last step
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer(callback, lose, max_epochs=1).fit(Counted(), data(20))
    assert callback.last_committed_step in (9, 10)
    assert threading.active_count() <= threads
