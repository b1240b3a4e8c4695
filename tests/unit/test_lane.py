"""Two threads order copies on one side stream: who trains, and who orders what was held for too long."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_spot.capture.cuda import Lane
from lightning_spot.snapshot.pieces import Piece
from tests.support.fake_device import FakeDevice


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
        lane.order_beside([Piece(tensors[number].untyped_storage(), 4096 * number, 4096)], slot)
        goes_on.set()

    monkeypatch.setattr(device, "record", slowly)
    late = threading.Thread(target=order, args=(0,))
    late.start()
    assert recorded.wait(10)
    order(1)
    late.join()
    assert lane.read.number == lane.done.number == len(lane.read.stream.work)
