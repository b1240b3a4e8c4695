"""Copies that are held until their place in the iteration: when they go, that all of them go, and the GPU's order."""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from lightning_spot.capture import batch as batch_module
from lightning_spot.capture import cuda
from lightning_spot.capture.batch import Batch, SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.cuda import CudaCopier, Lane
from lightning_spot.capture.device import DeviceClock
from lightning_spot.capture.partitions import Span
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.tensors import Watches
from lightning_spot.errors import SpotError
from lightning_spot.snapshot import pieces
from lightning_spot.snapshot.pieces import Piece
from tests.support.copies import SIZES, Desk, Fixed
from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.said import said
from tests.support.waiting import until


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def copier(desk: Desk) -> Iterator[Copier]:
    made = Copier(clock=lambda: desk.now_s)
    yield made
    made.close()


IN_TURN = [(0, 0.0, [Span(3, 0, 700)]), (2, 0.0, [Span(0, 0, 3000), Span(1, 0, 1)]), (5, 3.0, [Span(2, 0, 50_000)])]


def test_partitions_go_when_their_place_is_reached(desk: Desk, copier: Copier) -> None:
    schedule = Fixed(IN_TURN, limit_s=100.0)
    job = copier.start(desk.pieces, desk.view, Watches(desk.tensors), schedule)
    assert schedule.releases == [job.release]
    until(lambda: desk.copied(3), "what goes at once")
    job.release(1)
    assert all(map(desk.untouched, (0, 1, 2)))
    job.release(3)  # past the place itself, which was not reached
    until(lambda: desk.copied(0) and desk.copied(1), "what was held until place 2")
    assert desk.untouched(2)
    job.release(5)
    assert desk.untouched(2)
    desk.now_s = 3.0
    copier._notify()
    until(lambda: desk.copied(2), "what goes 3 s later")
    job.wait()
    assert not job.moved


def test_nothing_is_held_longer_than_an_iteration_takes(desk: Desk, copier: Copier) -> None:
    job = copier.start(desk.pieces, desk.view, schedule=Fixed(IN_TURN, limit_s=100.0))
    desk.now_s = 99.9
    copier._notify()
    until(lambda: desk.copied(3), "what goes at once")
    assert desk.untouched(0)
    desk.now_s = 100.0
    copier._notify()
    job.wait()
    assert all(map(desk.copied, range(4)))


def test_who_needs_the_tensors_copies_what_is_held(desk: Desk, copier: Copier) -> None:
    job = copier.start(desk.pieces, desk.view, Watches(desk.tensors), Fixed(IN_TURN, limit_s=1e9))
    job.wait_cpu()
    assert all(map(desk.copied, range(4)))
    job.validate()
    desk.tensors[0].zero_()
    job.wait()
    assert not job.moved
    job.release(5)  # a place that is reached later is no harm


def test_a_held_tensor_that_changes_is_noticed(desk: Desk, copier: Copier) -> None:
    job = copier.start(desk.pieces, desk.view, Watches(desk.tensors), Fixed(IN_TURN, limit_s=1e9))
    desk.tensors[2].add_(1)
    job.wait_cpu()
    job.wait()
    assert job.moved == {desk.tensors[2].untyped_storage().data_ptr()}


def test_where_training_stands_still_all_processors_copy(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the next piece by itself: in torch's team each waits for the slowest after every tensor."""
    monkeypatch.setattr(batch_module, "LEAST_BATCH_BYTES", 64)
    monkeypatch.setattr(batch_module, "processors", lambda: 2)
    helping, at_it, both = Batch.helping, set(), threading.Event()

    def noted(batch: Batch) -> None:
        at_it.add(threading.get_ident())
        if len(at_it) == 2:
            both.set()
        assert both.wait(120)
        helping(batch)

    monkeypatch.setattr(Batch, "helping", noted)
    copier = Copier(threads=0)
    copier.start(desk.pieces, desk.view, schedule=Fixed.still()).wait_cpu()
    assert len(at_it) == 2
    assert all(map(desk.copied, range(4)))
    copier.close()


@pytest.mark.parametrize("in_background", [True, False])
def test_a_held_storage_whose_memory_was_given_back_is_an_error(
    desk: Desk, copier: Copier, in_background: bool
) -> None:
    job = copier.start(desk.pieces, desk.view, schedule=Fixed(IN_TURN, limit_s=1e9))
    desk.tensors[0].untyped_storage().resize_(0)
    desk.tensors[2].untyped_storage().resize_(100)
    if in_background:
        desk.now_s = 1e9
        job.release(5)
        until(lambda: job.is_done, "what is copied in the background")
    with pytest.raises(SpotError, match=re.escape(str(pieces.gone()))):
        job.wait_cpu()


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("place", [-1, 2**16 - 100, 2**16, 2**40])
def test_a_place_outside_the_slot_is_an_error_and_is_not_written(
    desk: Desk, copier: Copier, in_background: bool, number: int, place: int
) -> None:
    desk.view.nbytes = 2**16  # what is mapped behind it is somebody else's
    desk.view.tensor = desk.view.tensor[: 2**16]
    first, wrong = desk.pieces[0], desk.pieces[number]._replace(offset=place)
    held = Fixed([(4, 0.0, [Span(0, 0, first.nbytes), Span(1, 0, wrong.nbytes)])], limit_s=1e9)
    job = copier.start([first, wrong], desk.view, schedule=None if in_background else held)
    if in_background:
        until(lambda: job.is_done, "what is copied in the background")
    with pytest.raises(SpotError, match=re.escape(str(pieces.outside()))):
        job.wait_cpu()
    assert not any(desk.view.map[2**16 :])


def test_storages_are_copied_one_by_one_if_torch_cannot_batch(
    desk: Desk, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    monkeypatch.setattr(batch_module, "SMALL_BYTES", 0)
    job = copier.start(desk.pieces, desk.view, Watches(desk.tensors))
    until(lambda: all(map(desk.copied, range(4))), "copies in the background")
    job.wait()


def test_closing_copies_what_is_held(desk: Desk) -> None:
    copier = Copier()
    copier.start(desk.pieces, desk.view, schedule=Fixed(IN_TURN, limit_s=1e9))
    closing = threading.Thread(target=copier.close)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()
    assert all(map(desk.copied, range(4)))


@pytest.mark.parametrize(
    ("owner", "call", "number"),
    [
        pytest.param(Piece, "target", 2, id="large"),
        pytest.param(batch_module, "memmove_small", 0, id="small"),
    ],
)
def test_a_failed_copy_is_told_to_who_waits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, owner: object, call: str, number: int
) -> None:
    monkeypatch.setattr(owner, call, lambda *_: 1 / 0)
    copier = Copier()
    job = copier.start([desk.pieces[number]], desk.view)
    with pytest.raises(SpotError, match="division by zero"):
        job.wait()
    copier.close()


# -- a GPU that is a list of work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_bytes", [0, 1, 500, 40_000, 10**6])
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "at-once"])
def test_the_slot_holds_the_state_before_the_step_in_any_order(desk: Desk, buffer_bytes: int, planned: bool) -> None:
    for seed in range(30):
        device = FakeDevice(seed)
        device.own(desk.tensors)
        copier = Copier(buffer_bytes=buffer_bytes, device=device)
        jobs = []
        for value in (7, 8, 9):  # one before the other has left the buffer
            ready = torch.full((1,), value, dtype=torch.uint8)
            for tensor in desk.tensors:  # the last step's work, not done yet when the snapshot begins
                device.do(lambda tensor=tensor, ready=ready: tensor.copy_(ready))
            schedule = Fixed(IN_TURN, limit_s=1.0) if planned else Schedule("eager")
            view = SlotView(mmap.mmap(-1, 2**17))
            job = copier.start(desk.pieces, view, schedule=schedule)
            job.release(2)
            job.wait_cpu()
            copier.fence()
            assert not device.synchronized, "the host waited"
            for tensor in desk.tensors:  # the optimizer
                device.do(lambda tensor=tensor: tensor.fill_(99))
            device.run(lambda device=device: device.random.random() < 0.2)
            jobs.append((value, job, view))
        for value, job, view in jobs:
            job.wait()
            for piece in desk.pieces:
                assert (view.tensor[piece.offset : piece.offset + piece.nbytes] == value).all(), (seed, value)
        device.run()
        assert device.allocated == buffer_bytes
        copier.close()


def test_buffered_copies_delay_the_optimizer_by_a_device_copy(desk: Desk) -> None:
    device = FakeDevice()
    device.own(desk.tensors)
    copier = CudaCopier(sum(SIZES), device)
    copy = copier.begin([(0, desk.pieces)], desk.view.tensor, buffered=True)
    copy.release(0)
    copy.release_all()
    copier.fence()
    while device.training.is_ready:
        device.training.advance()  # the side stream has not moved
    assert device.training.done == len(device.training.work)
    for tensor in desk.tensors:
        tensor.zero_()
    copy.wait()
    assert all(map(desk.copied, range(4)))


def test_a_device_without_room_for_the_buffer_is_said_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    device.own(desk.tensors)
    device.room = 10
    copier = Copier(buffer_bytes=100, device=device)
    for _ in range(2):
        job = copier.start(desk.pieces, desk.view, schedule=Schedule("eager"))
        job.wait_cpu()
        copier.fence()
        job.wait()
    assert all(map(desk.copied, range(4)))
    assert len(said(caplog, "no-device-buffer")) == 1
    copier.close()


def test_a_graph_that_is_recorded_gets_nothing_of_ours(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """The snapshot under way is dropped, later ones are copied before training goes on: replays call no hooks."""
    device = FakeDevice()
    device.own(desk.tensors)
    copier = Copier(buffer_bytes=100, device=device)
    job = copier.start(desk.pieces, desk.view, schedule=Fixed(IN_TURN, limit_s=1.0))
    device.capturing = True
    job.release(5)
    with pytest.raises(SpotError, match="CUDA graph"):
        job.wait_cpu()
    copier.fence()
    device.capturing = False
    with pytest.raises(SpotError, match="CUDA graph"):
        job.wait()
    desk.view.tensor.zero_()
    schedule = Fixed(IN_TURN, limit_s=1.0)
    job = copier.start(desk.pieces, desk.view, schedule=schedule)
    for tensor in desk.tensors:
        device.do(tensor.zero_)  # a replay
    job.wait()
    assert all(map(desk.copied, range(4)))
    assert schedule.releases == []
    assert len(said(caplog, "cuda-graph")) == 1
    copier.close()


def test_slots_are_pinned_once_and_unpinned(desk: Desk) -> None:
    device = FakeDevice()
    device.own(desk.tensors)
    copier = Copier(device=device)
    copier.pin(desk.view, 0)
    assert list(device.pinned) == [desk.view.address]
    copier.start(desk.pieces, desk.view).wait_cpu()
    copier.unpin(desk.view)
    assert not device.pinned
    assert all(map(desk.copied, range(4)))  # not before what was under way was there
    copier.close()


def test_no_copy_goes_from_one_page_locked_piece_into_the_next(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses such a copy."""
    monkeypatch.setattr(cuda, "PAGE_LOCKED_BYTES", 4096)
    device, base = FakeDevice(), desk.view.address
    device.own(desk.tensors)
    copy, ends = device.copy, []

    def watched(stream: FakeStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pairs = list(pairs)
        ends.extend((target.data_ptr() - base, target.numel()) for target, _ in pairs)
        copy(stream, pairs)

    monkeypatch.setattr(device, "copy", watched)
    copier = Copier(device=device)
    copier.start(desk.pieces, desk.view).wait()
    assert all(map(desk.copied, range(4)))
    assert len(ends) > len(desk.pieces)
    assert all(start // 4096 == (start + nbytes - 1) // 4096 for start, nbytes in ends)
    copier.close()


def test_a_gpus_clock_tells_time_in_the_order_of_its_work() -> None:
    device = FakeDevice()
    clock = DeviceClock(0, device)
    first = clock.mark()
    for _ in range(3):
        device.do(lambda: None)
    last = clock.mark()
    assert clock.is_over(first)
    assert not clock.is_over(last)
    device.run()
    assert clock.is_over(last)
    assert clock.between(first, last) == (3.0, 3.0)
    device.capturing = True
    assert clock.mark() is None
    assert clock.between(first, None) == (0.0, 0.0)


def test_what_shares_the_memory_of_a_slot_keeps_it_mapped() -> None:
    """A ring in the trainer's process unmaps a slot that it replaces; a copy on a GPU holds the tensor only."""
    shared = mmap.mmap(-1, 4096)
    part = SlotView(shared).tensor[64:128]
    with pytest.raises(BufferError):
        shared.close()
    part.fill_(7)
    assert shared[64:128] == b"\7" * 64
    del part
    shared.close()


def test_the_event_of_the_last_order_is_the_one_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the optimizer would overwrite what is still to be copied."""
    device, slot = FakeDevice(), torch.zeros(8192, dtype=torch.uint8)
    tensors = [torch.full((1024,), value) for value in (1.0, 2.0)]
    device.own(tensors)
    lane = Lane(0, device, 0)
    record, recorded, goes_on = device.record, threading.Event(), threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Any:
        event = record(*arguments, **named)
        if threading.current_thread() is late:
            recorded.set()
            goes_on.wait(0.5)  # the other one has come by then, if nothing keeps it
        return event

    def order(number: int) -> None:
        lane.enqueue_beside([Piece(tensors[number].untyped_storage(), 4096 * number, 4096)], slot)
        goes_on.set()

    monkeypatch.setattr(device, "record", slowly)
    late = threading.Thread(target=order, args=(0,))
    late.start()
    assert recorded.wait(120)
    order(1)
    late.join()
    assert lane.read.number == lane.done.number == len(lane.read.stream.work)
