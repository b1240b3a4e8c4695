"""Snapshots from a GPU: copies on a side stream into pinned slots, ordered before what changes the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps
from lightning_spot.capture import device, schedule
from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier, Watches
from lightning_spot.capture.device import Cuda
from lightning_spot.capture.schedule import Schedule
from lightning_spot.errors import SpotError
from lightning_spot.protocol.slot import SlotMemory, slot_capacity
from lightning_spot.snapshot.layout import lay_out
from lightning_spot.state.compare import differences
from tests.support.gpus import NEEDS_GPU
from tests.support.snapshots import check_all, spot
from tests.support.trainer import Net, Probe, Stop, StopAt, TwoOptimizers, data, trainer
from tests.support.waiting import new_process

pytestmark = NEEDS_GPU


def test_copies_are_ordered_before_later_writes() -> None:
    tensors = [torch.full((1 << 24,), float(index), device="cuda") for index in range(8)]
    layout = lay_out({str(index): tensor for index, tensor in enumerate(tensors)})
    memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
    copier, view = Copier(), SlotView(memory.map)
    copier.pin(view, 0)
    job = copier.start(layout.pieces, view, Watches(tensors))
    copier.fence()
    job.settle()
    for tensor in tensors:
        tensor.fill_(-1.0)  # ordered after the copies by the fence, without a host wait
    job.wait()
    assert not job.moved
    for index, piece in enumerate(layout.pieces):
        copied = view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.float32)
        assert torch.equal(copied, torch.full_like(copied, float(index)))
    copier.unpin(view)
    copier.close()


def test_a_write_before_the_fence_is_seen() -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    layout = lay_out({"w": tensor})
    memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
    copier, view = Copier(), SlotView(memory.map)
    job = copier.start(layout.pieces, view, Watches([tensor]))
    tensor.add_(1)
    copier.fence()
    job.settle()
    job.wait()
    assert job.moved
    copier.close()


def test_a_slot_is_unpinned_before_it_is_unmapped() -> None:
    """A registration left behind would send copies to pages that another slot has replaced at the same address."""
    copier, addresses = Copier(), []
    for value in range(6):
        tensor = torch.full((1 << 20,), float(value), device="cuda")
        layout = lay_out({"w": tensor})
        memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
        view = SlotView(memory.map)
        copier.pin(view, 0)
        assert view.tensor.is_pinned()
        copier.start(layout.pieces, view, Watches([tensor])).wait()
        (piece,) = layout.pieces
        copied = view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.float32)
        assert torch.equal(copied, tensor.cpu())
        addresses.append(view.address)
        copier.unpin(view)
        assert not view.tensor.is_pinned()
        del view, copied
        memory.close()
    print(f"{6 - len(set(addresses))} of 6 slots came to an address that another had before")
    copier.close()


def test_a_slot_that_is_unmapped_but_still_pinned_is_harmless() -> None:
    copier = Copier()
    for value in range(4):
        tensor = torch.full((1 << 20,), float(value), device="cuda")
        layout = lay_out({"w": tensor})
        memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
        view = SlotView(memory.map)
        Copier().pin(view, 0)  # one that is never told to let it go
        copier.start(layout.pieces, view, Watches([tensor])).wait()
        (piece,) = layout.pieces
        copied = view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.float32)
        assert torch.equal(copied, tensor.cpu())
        copier.unpin(view)
        del view, copied
        memory.close()
    copier.close()


def test_memory_that_cannot_be_page_locked_is_copied_anyway(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.arange(1 << 20, device="cuda")
    layout = lay_out({"w": tensor})
    memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
    copier, view = Copier(), SlotView(memory.map)
    locked = Cuda()
    assert locked.pin(view.tensor[4096:8192], 0) == 0
    device._locked.clear()  # nothing knows of it: the whole can't be
    copier.start(layout.pieces, view, Watches([tensor])).wait()
    assert "could not be page-locked" in caplog.text
    assert (tensor + 1).sum().item() == (1 << 20) * ((1 << 20) + 1) // 2  # torch would raise it here
    (piece,) = layout.pieces
    assert torch.equal(view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.int64), tensor.cpu())
    device._locked[view.address + 4096] = 4096, 0
    locked.unpin(view.tensor[4096:8192])
    copier.unpin(view)
    copier.close()


@pytest.fixture
def strict_sync() -> Iterator[None]:
    """Any wait of the host for the device, on any thread of torch's, is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("buffer_bytes", [0, 1 << 20, 64 << 20])
def test_the_rest_passes_the_buffer_and_takes_no_more_memory(buffer_bytes: int, strict_sync: None) -> None:
    tensors = [torch.full((1 << 22,), float(index), device="cuda") for index in range(8)]  # 16 MiB each
    layout = lay_out({str(index): tensor for index, tensor in enumerate(tensors)})
    memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
    copier, view = Copier(buffer_bytes=buffer_bytes), SlotView(memory.map)
    copier.pin(view, 0)
    before = torch.cuda.memory_allocated()
    for turn in range(3):
        torch.cuda.reset_peak_memory_stats()
        job = copier.start(layout.pieces, view, Watches(tensors), Schedule("eager"))
        job.wait_cpu()
        copier.fence()
        job.settle()
        for tensor in tensors:
            tensor.add_(1.0)
        assert torch.cuda.max_memory_allocated() <= before + buffer_bytes
        torch.cuda.set_sync_debug_mode("default")
        job.wait()
        for index, piece in enumerate(layout.pieces):
            copied = view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.float32)
            assert torch.equal(copied, torch.full_like(copied, float(index + turn)))
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")
    copier.unpin(view)
    copier.close()


def test_a_graph_that_is_recorded_gets_nothing_of_ours() -> None:
    tensor, more = torch.ones(1 << 20, device="cuda"), torch.ones(1, device="cuda")
    layout = lay_out({"w": tensor})
    memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
    copier, view = Copier(buffer_bytes=1 << 20), SlotView(memory.map)
    job = copier.start(layout.pieces, view, Watches([tensor]), Schedule("eager"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with pytest.raises(SpotError, match="CUDA graph"):
            job.wait_cpu()
        copier.fence()
        tensor.add_(more)
    with pytest.raises(SpotError, match="CUDA graph"):
        job.wait()
    job = copier.start(layout.pieces, view, Watches([tensor]), Schedule("eager"))
    graph.replay()
    job.wait()
    (piece,) = layout.pieces
    copied = view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.float32)
    assert torch.equal(copied, torch.ones_like(copied))
    assert torch.equal(tensor, torch.full_like(tensor, 2.0))
    copier.unpin(view)
    copier.close()


@pytest.mark.parametrize("copy_mode", ["asymmetric", "backward", "auto"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_every_mode_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_mode: str, compiled: bool) -> None:
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    probe, model = Probe(), Net()
    settings = {"accelerator": "gpu", "devices": 1, "max_epochs": 3}
    callback = spot(tmp_path, interval=EverySteps(1), copy_mode=copy_mode, device_buffer="1KiB")
    trainer(callback, probe, **settings).fit(torch.compile(model) if compiled else model, data())
    check_all(tmp_path, probe)


@pytest.mark.parametrize("module", [Net, TwoOptimizers])
@pytest.mark.parametrize("local_server", [True, False])
def test_training_on_a_gpu(tmp_path: Path, module: type[Net], local_server: bool) -> None:
    probe = Probe()
    settings = {"accelerator": "gpu", "devices": 1, "max_epochs": 3}
    trainer(spot(tmp_path, local_server=local_server), probe, **settings).fit(module(), data(), data(3))
    check_all(tmp_path, probe)


def test_mixed_precision_with_a_scaler(tmp_path: Path) -> None:
    settings = {"accelerator": "gpu", "devices": 1, "precision": "16-mixed", "max_epochs": 3}
    run, callback = trainer(spot(tmp_path), **settings), spot(tmp_path)
    run.fit(Net(), data())
    new_process()
    again = trainer(callback, **{**settings, "max_epochs": 4})
    again.fit(Net(), data())
    assert callback.resumed_from is not None
    assert again.global_step == 80


class Drops(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.5))


def test_dropout_goes_on_exactly(tmp_path: Path) -> None:
    """Its numbers come from the GPU's own generator."""
    settings = {"accelerator": "gpu", "devices": 1, "max_epochs": 3}

    def final(name: str, *stops: StopAt, seed: int = 1) -> Any:
        pl.seed_everything(seed, verbose=False)
        run = trainer(spot(tmp_path / name), *stops, **settings)
        with contextlib.suppress(Stop):
            run.fit(Drops(), data())
        return {key: value.cpu() for key, value in run.lightning_module.state_dict().items()}

    undisturbed = final("twin")
    final("run", StopAt(33))
    assert list(differences(undisturbed, final("run", seed=5))) == []
