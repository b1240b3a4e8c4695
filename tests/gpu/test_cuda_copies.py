"""Copies from a GPU into pinned slots: many small tensors, large states, memory used again, recorded graphs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_spot.capture import device
from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.device import Cuda, DeviceClock
from lightning_spot.capture.partitions import BESIDE, Mode
from lightning_spot.capture.schedule import GradientWatch, PlaceKind, Schedule
from lightning_spot.capture.tensors import Watches
from lightning_spot.protocol.slot import SlotMemory, slot_capacity
from lightning_spot.snapshot.layout import Layout, lay_out
from tests.support.gpus import NEEDS_GPU

pytestmark = NEEDS_GPU
SOON = 10**9
"""Cycles of a GPU's clock: half a second or more."""


class Desk:
    """Slots in memory that are pinned, and copiers into them; both end with a test, whatever it did with them."""

    def __init__(self) -> None:
        self._made: list[tuple[Copier, SlotView]] = []

    def slot(self, nbytes: int) -> SlotView:
        memory = SlotMemory.create(slot_capacity(nbytes), Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]) / "slot")
        memory.unlink()
        os.close(memory.fd)
        return SlotView(memory.map)

    def copier(self, view: SlotView, buffer_bytes: int = 0) -> Copier:
        copier = Copier(buffer_bytes=buffer_bytes)
        copier.pin(view, 0)
        self._made.append((copier, view))
        return copier


@pytest.fixture
def desk(runtime_dir: Path) -> Iterator[Desk]:
    made = Desk()
    yield made
    for copier, view in made._made:
        copier.close()
        copier.unpin(view)
        assert not view.tensor.is_pinned()


def wrong(layout: Layout, view: SlotView, truth: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of the pieces that are not, bit for bit, what they should be. A copy lies in one page-locked piece."""
    copied = (view.tensor[piece.offset : piece.offset + piece.nbytes].clone().cuda() for piece in layout.pieces)
    pairs = enumerate(zip(copied, truth, strict=True))
    return [number for number, (found, true) in pairs if not torch.equal(found, true.reshape(-1).view(torch.uint8))]


SIZES = (1, 3, 4, 64, 255, 1000, 1024, 4097, 20_000, 100_001)


@pytest.mark.parametrize("buffer_bytes", [0, 64 << 20])
@pytest.mark.parametrize("count", [1200, 5000])
def test_many_small_tensors(desk: Desk, count: int, buffer_bytes: int) -> None:
    """More copies than a stream of CUDA takes at once: the host may not wait until the device has come to them."""
    tensors = [torch.randn(SIZES[number % len(SIZES)], device="cuda") for number in range(count)]
    layout = lay_out(dict(enumerate(tensors)))
    view = desk.slot(layout.nbytes)
    copier = desk.copier(view, buffer_bytes)
    for turn in range(3):
        truth = [tensor.clone() for tensor in tensors]
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(SOON)  # type: ignore[no-untyped-call] # a training that is behind its host
        busy.record()
        began_s = time.perf_counter()
        job = copier.start(layout.pieces, view, Watches(tensors), Schedule("eager"))
        job.wait_cpu()
        copier.fence()
        job.validate()
        took_s = time.perf_counter() - began_s
        torch._foreach_add_(tensors, 1.0)
        assert not busy.query(), f"the host waited, {took_s:.3f} s"
        job.wait()
        print(f"{count} tensors, buffer of {buffer_bytes >> 20} MiB, turn {turn}: {1e3 * took_s:.1f} ms of the host")
        assert not job.moved
        assert wrong(layout, view, truth) == []


@pytest.fixture(scope="module")
def large() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two GB of parameters and state of AdamW."""
    width = 4096
    model = nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(width, width), nn.GELU())]).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@pytest.mark.parametrize("buffer_bytes", [0, 64 << 20])
@pytest.mark.parametrize("mode", BESIDE)
def test_a_large_state_in_every_mode(
    desk: Desk, large: tuple[nn.Module, torch.optim.Optimizer], mode: Mode, buffer_bytes: int
) -> None:
    model, optimizer = large
    x = torch.randn(512, 4096, device="cuda")
    schedule = Schedule(mode)
    gradients = GradientWatch(model.parameters(), partial(schedule.reached, PlaceKind.GRADIENT))
    numbers = {parameter: number for number, parameter in enumerate(gradients.parameters)}

    def storages() -> dict[int, int]:
        return {
            tensor.untyped_storage().data_ptr(): number
            for parameter, number in numbers.items()
            for tensor in (parameter, *optimizer.state[parameter].values())
        }

    def forward_and_backward() -> None:
        schedule.reached(PlaceKind.FORWARD)
        loss = model(x).square().mean()
        schedule.reached(PlaceKind.BACKWARD)
        loss.backward()
        schedule.reached(PlaceKind.BACKWARD_END)
        schedule.stepping()

    schedule.begin(gradients, storages, clock=DeviceClock(0))
    for _ in range(8):
        schedule.iteration_begins()
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        schedule.iteration_ends()
    tensors = [tensor for parameter in numbers for tensor in (parameter, *optimizer.state[parameter].values())]
    layout = lay_out([tensor.detach() for tensor in tensors])
    assert layout.nbytes > 2 * 10**9
    view = desk.slot(layout.nbytes)
    copier = desk.copier(view, buffer_bytes)
    for _ in range(3):
        truth = [tensor.detach().clone() for tensor in tensors]
        job = copier.start(layout.pieces, view, Watches(tensors), schedule)
        schedule.iteration_begins()
        forward_and_backward()
        job.wait_cpu()
        copier.fence()
        job.validate()
        optimizer.step()
        optimizer.zero_grad()
        schedule.iteration_ends()
        job.wait()
        assert not job.moved
        assert wrong(layout, view, truth) == []
    gradients.close()


@pytest.mark.parametrize("is_unpinned", [True, False])
def test_a_slot_is_right_at_an_address_that_another_had(is_unpinned: bool) -> None:
    """A registration left behind would send copies to pages that another slot has replaced at the same address."""
    copier, addresses = Copier(), []
    for value in range(6):
        tensor = torch.full((1 << 20,), float(value), device="cuda")
        layout = lay_out({"w": tensor})
        memory = SlotMemory.create(slot_capacity(layout.nbytes), None)
        view = SlotView(memory.map)
        pins = copier if is_unpinned else Copier()  # one that is never told to let it go
        pins.pin(view, 0)
        assert view.tensor.is_pinned()
        copier.start(layout.pieces, view, Watches([tensor])).wait()
        (piece,) = layout.pieces
        copied = view.tensor[piece.offset : piece.offset + piece.nbytes].view(torch.float32)
        assert torch.equal(copied, tensor.cpu())
        addresses.append(view.address)
        copier.unpin(view)
        assert not (is_unpinned and view.tensor.is_pinned())
        del view, copied
        memory.close()
    print(f"{6 - len(set(addresses))} of 6 slots came to an address that another had before")
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


def test_a_graph_can_be_recorded_during_pinning_and_copying(desk: Desk) -> None:
    """In CUDA's strictest mode, torch's default, what another thread asks of the device can end the recording."""
    tensor = torch.ones(1 << 24, device="cuda")
    layout = lay_out({"w": tensor})
    view, other = desk.slot(layout.nbytes), desk.slot(64 << 20)
    copier = desk.copier(view)
    recorded, errors, rounds = threading.Event(), [], []

    def beside() -> None:
        try:
            while not recorded.is_set():
                copier.pin(other, 0)
                assert other.tensor.is_pinned()
                copier.unpin(other)
                job.wait()
                rounds.append(time.perf_counter())
        except BaseException as error:
            errors.append(error)

    torch.cuda._sleep(SOON)  # type: ignore[no-untyped-call]
    job = copier.start(layout.pieces, view)
    job.wait_cpu()
    copier.fence()
    job.validate()
    thread = threading.Thread(target=beside)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            began = len(rounds)
            deadline_s = time.perf_counter() + 20
            while len(rounds) < began + 3 and not errors and time.perf_counter() < deadline_s:
                time.sleep(0.01)
            tensor.add_(1)
    finally:
        recorded.set()
        thread.join(120)
    assert not errors
    assert len(rounds) >= began + 3
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensor, torch.full_like(tensor, 2.0))
    copied = view.tensor[layout.pieces[0].offset :][: 1 << 26].view(torch.float32)
    assert torch.equal(copied, torch.ones_like(copied))
