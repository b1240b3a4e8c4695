"""In which order a GPU's copies come, whatever thread orders them; what they are made of; what CUDA is told of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_spot.capture import cuda, device
from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.partitions import Span
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.tensors import Watches
from lightning_spot.session import snapshotter
from lightning_spot.snapshot.pieces import Piece
from tests.support.copies import Fixed
from tests.support.fake_device import FakeDevice, StreamOfEachThread
from tests.support.waiting import until

NBYTES = 4096


@pytest.fixture
def view() -> SlotView:
    return SlotView(mmap.mmap(-1, NBYTES))


@pytest.fixture
def copiers() -> Iterator[list[Copier]]:
    made: list[Copier] = []
    yield made
    for copier in made:
        copier.close()


def late() -> Fixed:
    """Holds everything until the first place of the iteration."""
    return Fixed([(1, 0.0, [Span(0, 0, NBYTES)])], limit_s=1e9)


@pytest.mark.parametrize("number", range(8))
def test_a_copy_comes_after_the_step_whoever_orders_it(view: SlotView, copiers: list[Copier], number: int) -> None:
    tensor = torch.zeros(NBYTES, dtype=torch.uint8)
    device = StreamOfEachThread(number)
    device.own([tensor])
    copiers.append(copier := Copier(device=device))
    pieces = [Piece(tensor.untyped_storage(), 0, NBYTES)]
    for step in (1, 2, 3):
        device.do(lambda step=step: tensor.fill_(step))
        job = copier.start(pieces, view, Watches([tensor]), schedule=late())
        with ThreadPoolExecutor(1) as another:
            another.submit(job.release, 1).result()  # held copies, which a gradient's hook orders
        job.wait_cpu()
        copier.fence()
        job.validate()
        device.do(lambda: tensor.fill_(99))
        job.wait()
        assert (view.tensor == step).all()
        device.run()


def test_what_is_saved_is_kept_until_it_is_copied(view: SlotView, copiers: list[Copier]) -> None:
    """A tensor of a stream of the user's may be given back to that stream, whose next work waits for no copy."""
    tensor = torch.ones(64, dtype=torch.uint8)
    device = FakeDevice()
    device.own([tensor])
    copiers.append(copier := Copier(device=device))
    job = copier.start([Piece(tensor.untyped_storage(), 0, 64)], view)
    job.wait_cpu()
    copier.fence()
    assert job.pieces
    job.wait()
    assert job.pieces == []
    assert (view.tensor[:64] == 1).all()


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("buffer_bytes", [0, 3000])
@pytest.mark.parametrize("number", range(3))
def test_many_small_ones_are_written_together(
    monkeypatch: pytest.MonkeyPatch, copiers: list[Copier], buffer_bytes: int, number: int, sees: bool
) -> None:
    monkeypatch.setattr(cuda, "SMALL_BYTES", 100)
    sizes = [1, 100, 7, 101, 64, 3000] * 8
    tensors = [torch.full((nbytes,), 1, dtype=torch.uint8) for nbytes in sizes]
    device = FakeDevice(number)
    device.own(tensors)
    device.sees = sees
    copiers.append(copier := Copier(buffer_bytes=buffer_bytes, device=device))
    view = SlotView(mmap.mmap(-1, 2**18))
    pieces = [Piece(tensor.untyped_storage(), 4096 * place, tensor.numel()) for place, tensor in enumerate(tensors)]
    job = copier.start(pieces, view, Watches(tensors), Schedule("eager"))
    job.wait_cpu()
    copier.fence()
    job.validate()
    device.do(lambda: [tensor.fill_(99) for tensor in tensors])
    job.wait()
    assert view.tensor.sum() == sum(sizes)
    assert all((view.tensor[piece.offset : piece.offset + piece.nbytes] == 1).all() for piece in pieces)
    assert (device.written >= 20) == sees  # without, what fits the buffer
    device.run()


@pytest.mark.parametrize("buffer_bytes", [0, 1000])
@pytest.mark.parametrize("held", [True, False])
def test_what_is_held_goes_when_its_time_is_up(view: SlotView, buffer_bytes: int, held: bool) -> None:
    """Training may stand at the begin of an iteration: in a hook, or since it waits for data."""
    tensor = torch.ones(NBYTES, dtype=torch.uint8)
    device, now = FakeDevice(), [0.0]
    device.own([tensor])
    copier = Copier(buffer_bytes=buffer_bytes, device=device, clock=lambda: now[0])
    pieces = [Piece(tensor.untyped_storage(), 0, NBYTES)]
    job = copier.start(pieces, view, Watches([tensor]), late() if held else Schedule("eager"))
    latest_s = 1e9 if held else 1.0
    now[0] = latest_s - 0.01
    copier._notify()
    assert job.is_done == (not held and not buffer_bytes)
    now[0] = latest_s
    copier._notify()
    until(lambda: job.is_done, "what is held to be ordered")
    job.validate()
    job.wait()
    assert (view.tensor == 1).all()
    job.release(1)
    job.wait_cpu()
    copier.fence()
    copier.close()
    device.run()


def test_a_step_that_is_recorded_waits_for_the_copies_itself(view: SlotView, copiers: list[Copier]) -> None:
    """Its replay waits for none of them."""
    tensor = torch.ones(NBYTES, dtype=torch.uint8)
    device = FakeDevice()
    device.own([tensor])
    copiers.append(copier := Copier(device=device))
    job = copier.start([Piece(tensor.untyped_storage(), 0, NBYTES)], view, Watches([tensor]), Schedule("eager"))
    device.capturing = True
    job.wait_cpu()
    copier.fence()
    assert (view.tensor == 1).all()
    device.capturing = False
    job.validate()
    job.wait()


class Driver:
    """Has the mode of one thread, as CUDA's has."""

    def __init__(self, code: int = 0) -> None:
        self.mode, self.code = 0, code

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # CUDA's name
        if self.code == 0:
            self.mode, mode._obj.value = mode._obj.value, self.mode
        return self.code


def test_cuda_is_told_that_a_recording_is_no_concern_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(device, "driver_library", lambda: driver)
    with device.beside_recordings():
        assert driver.mode == 2
    assert driver.mode == 0
    refuses = Driver(3)
    monkeypatch.setattr(device, "driver_library", lambda: refuses)
    with device.beside_recordings():
        assert refuses.mode == 0
    monkeypatch.setattr(device, "driver_library", lambda: None)
    with device.beside_recordings():
        pass  # there is no CUDA: nobody to tell


@pytest.mark.parametrize("inference", [True, False])
def test_what_is_logged_is_read_from_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    """The metric that an interval follows: to ask for its number waited for all that training had ordered."""
    monkeypatch.setattr(snapshotter, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(snapshotter, "is_on_gpu", lambda _value: True)
    device = FakeDevice()
    read = snapshotter.Readings(device)
    with torch.inference_mode(inference):
        values = [torch.zeros(()) for _ in range(4)]
    found: list[snapshotter.Reading | None] = []
    for step, value in enumerate(values):
        device.do(lambda step=step, value=value: value.data.fill_(step + 1.0))  # type: ignore[misc]
        found.append(read.read_at_times(lambda value=value: value, step))  # type: ignore[misc]
        if step == 2:  # until here, the host is ahead
            device.run()
    assert found == [None, None, None, (0, 1.0)]
    assert read.read_at_times(lambda: values[-1], 4) is None
    device.run()
    assert read.read_at_times(lambda: values[-1], 4) == (3, 4.0)
    assert device.synchronized == 0


def test_losses_arrive_however_far_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had not arrived at the next reading was given up: with a host that is always ahead, all of them."""
    monkeypatch.setattr(snapshotter, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(snapshotter, "is_on_gpu", lambda _value: True)
    device, ahead, found = FakeDevice(), 5, []
    read = snapshotter.Readings(device)
    for step in range(20):
        found.append(read.add({"loss": torch.full((), float(step))}, step))
        device.run(lambda step=step: device.training.done >= step - ahead)  # type: ignore[misc]
    steps = [reading[0] for reading in found if reading is not None]
    assert [reading for reading in found if reading is not None] == [(step, step) for step in steps]
    assert steps == sorted(set(steps))
    assert len(steps) >= 20 // (ahead + 2)
