"""What goes by the side stream of one GPU, or through the buffer on it: in which order, and by copies or kernels."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_spot.staging.device import Device
from lightning_spot.staging.spans import SlotSpan, cut_end

logger = logging.getLogger(__name__)

_SMALL_BYTES = 128 * 1024
_MANY = 16
"""So many small copies, or more, are made by kernels: a stream takes about a thousand, then the host waits."""

Held = tuple[int, list[SlotSpan]]
"""A place of the iteration, and what is copied from there on."""


class Lane:
    """The side stream of one device, and its buffer.

    Attributes:
        index: of the device.
        read: an event after which no copy ordered so far reads storages of the training any more.
        done: an event after which all that was ordered so far is in the slots.
    """

    def __init__(self, index: int, device: Device, buffer_bytes: int, say: Any) -> None:
        self.index = index
        self.read: Any = None
        self.done: Any = None
        self._device, self._say = device, say
        self._stream = device.stream(index)
        self._buffer_bytes = buffer_bytes
        self._buffer: torch.Tensor | None = None
        self._left: Any = None
        self._ordering = threading.Lock()  # two threads may order: the event of who came last has to stay
        self._is_warm = False

    def buffer(self) -> torch.Tensor | None:
        """The buffer, made when it is wanted first; ``None`` without, or if the device has no room."""
        if self._buffer is None and self._buffer_bytes:
            self._buffer = self._device.allocate(self.index, self._buffer_bytes)
            if self._buffer is None:
                self._buffer_bytes = 0
                self._say("buffer", "the device has no room for device_buffer: the optimizer waits for every copy")
        return self._buffer

    def warm(self) -> None:
        """Have ready what is wanted, once: to get memory, or to load a kernel, can take until the device is idle."""
        if self._is_warm:
            return
        self._is_warm = True
        self.buffer()
        try:
            self._device.warm(self._stream)
        except RuntimeError as error:
            logger.debug("what GPU %d needs for copies is loaded with the first: %s", self.index, error)

    def follow(self, event: Any) -> None:
        """Copy nothing more before ``event`` is over."""
        self._device.wait(self._stream, event)

    def order(self, spans: Sequence[SlotSpan], slot: torch.Tensor) -> None:
        """Copy after what training has ordered so far."""
        if spans:
            self._after_training()
            self.order_beside(spans, slot)

    def order_beside(self, spans: Sequence[SlotSpan], slot: torch.Tensor) -> None:
        """Copy after what the stream follows already: on a thread that knows nothing of what training has ordered."""
        with self._ordering:
            self._to_slot(slot, spans, [span.source() for span in spans])
            self.read = self.done = self._device.record(self._stream)

    def order_buffered(self, spans: Sequence[SlotSpan], slot: torch.Tensor) -> None:
        """Copy into the buffer, in the order of training's own stream, and from there beside what follows."""
        buffer = self.buffer()
        if not spans or buffer is None:
            return
        training = self._device.current(self.index)
        if self._left is not None:
            self._device.wait(training, self._left)  # what was in the buffer before has left it
        inside, at = [], 0
        for span in spans:
            inside.append(buffer[at : at + span.nbytes])
            at += span.nbytes
        self._device.write(training, inside, [span.source() for span in spans])
        with self._ordering:
            self._after_training()
            self._to_slot(slot, spans, inside)
            self._left = self.done = self._device.record(self._stream)

    def synchronize(self) -> None:
        """Have the calling thread wait for all that was ordered."""
        if self.done is not None:
            self._device.synchronize(self.done)

    def _to_slot(self, slot: torch.Tensor, spans: Sequence[SlotSpan], sources: Sequence[torch.Tensor]) -> None:
        small = [number for number, span in enumerate(spans) if span.nbytes <= _SMALL_BYTES]
        seen = self._device.seen(slot, self.index) if len(small) >= _MANY else None
        rest: Iterable[int] = range(len(spans))
        if seen is not None:
            targets = [spans[number].target(seen) for number in small]
            self._device.write(self._stream, targets, [sources[number] for number in small])
            rest = (number for number, span in enumerate(spans) if span.nbytes > _SMALL_BYTES)
        self._device.copy(self._stream, ((spans[number].target(slot), sources[number]) for number in rest))

    def _after_training(self) -> None:
        self._device.wait(self._stream, self._device.record(self._device.current(self.index)))


class LaneCopy:
    """Copies of one snapshot from one device.

    Args:
        lane: of the device.
        held: what is copied from which place of the iteration on, in order.
        slot: where to.
        buffered: whether the last bytes are kept for the buffer.
    """

    def __init__(self, lane: Lane, held: Iterable[Held], slot: torch.Tensor, *, buffered: bool) -> None:
        self.lane = lane
        self._slot = slot
        self._held = deque(held)
        self._last: list[SlotSpan] = []
        buffer = lane.buffer() if buffered else None
        self._room = buffer.numel() if buffer is not None else 0
        room = self._room
        while self._held and room > 0:
            place, spans = self._held.pop()
            before, end = cut_end(spans, room)
            if before:
                self._held.append((place, before))
            self._last = [*end, *self._last]
            room -= sum(span.nbytes for span in end)

    def release(self, place: int) -> bool:
        """Order what was held until ``place``; whether nothing is left."""
        now: list[SlotSpan] = []
        while self._held and self._held[0][0] <= place:
            now += self._held.popleft()[1]
        self.lane.order(now, self._slot)
        return not self._held and not self._last

    def release_rest(self) -> None:
        """Order the rest while the optimizer is not about to step: all of it has time."""
        rest = self._take_rest()
        if rest:
            self.lane.order_beside(rest, self._slot)

    def release_all(self) -> None:
        """Order the rest: what the optimizer overwrites last goes through the buffer, as far as it has room."""
        now, buffered = cut_end(self._take_rest(), self._room)
        self.lane.order(now, self._slot)
        self.lane.order_buffered(buffered, self._slot)

    def _take_rest(self) -> list[SlotSpan]:
        rest = [span for _, spans in self._held for span in spans] + self._last
        self._held.clear()
        self._last = []
        return rest
