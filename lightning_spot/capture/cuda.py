"""Copies CUDA storages into pinned slots on a side stream. Only touches CUDA when it is given a CUDA storage.

What the optimizer is about to overwrite and is not on its way yet goes into a small buffer on the device, in the order
of the training's own stream, and leaves from there while the optimizer runs. The host waits for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_spot.capture.device import PAGE_LOCKED_BYTES, Cuda
from lightning_spot.errors import SpotError
from lightning_spot.say import say
from lightning_spot.snapshot.pieces import Piece, cut_at, cut_end

logger = logging.getLogger(__name__)

SMALL_BYTES = 128 * 1024
"""Copies of up to so much may be made by a kernel."""

_MANY = 16
"""So many small copies, or more, are made by kernels: a stream takes about a thousand, then the host waits."""

Held = tuple[int, list[Piece]]
"""A place of the iteration, and what is copied from there on."""


class Lane:
    """The side stream of one device, and its buffer.

    Attributes:
        index: of the device.
        read: an event after which no copy enqueued so far reads storages of the training any more.
        done: an event after which all that was enqueued so far is in the slots.
    """

    def __init__(self, index: int, device: Cuda, buffer_bytes: int) -> None:
        self.index = index
        self.read: Any = None
        self.done: Any = None
        self._device = device
        self._stream = device.stream(index)
        self._buffer_bytes = buffer_bytes
        self._buffer: torch.Tensor | None = None
        self._left: Any = None  # an event after which the buffer may be written to again
        self._enqueuing = threading.Lock()  # of two threads, the event of the last one has to stay
        self._is_warm = False

    def buffer(self) -> torch.Tensor | None:
        """The buffer, made when it is wanted first; ``None`` without, or if the device has no room."""
        if self._buffer is None and self._buffer_bytes:
            self._buffer = self._device.allocate(self.index, self._buffer_bytes)
            if self._buffer is None:
                self._buffer_bytes = 0
                text = "GPU {about} has no memory for device_buffer. The optimizer waits for copies. Reduce it."
                say(logging.WARNING, "no-device-buffer", text, about=self.index)
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

    def enqueue(self, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        """Copy after what training has enqueued so far."""
        self._after_training()
        self.enqueue_beside(pieces, slot)

    def enqueue_beside(self, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        """Copy after what the stream follows already: on a thread that knows nothing of what training has enqueued."""
        with self._enqueuing:
            self._to_slot(slot, pieces, [piece.source() for piece in pieces])
            self.read = self.done = self._device.record(self._stream)

    def enqueue_buffered(self, pieces: Sequence[Piece], slot: torch.Tensor) -> None:
        """Copy into the buffer, in the order of training's own stream, and from there beside what follows."""
        buffer = self.buffer()
        assert buffer is not None
        training = self._device.current(self.index)
        if self._left is not None:
            self._device.wait(training, self._left)  # what was in the buffer before has left it
        inside, at = [], 0
        for piece in pieces:
            inside.append(buffer[at : at + piece.nbytes])
            at += piece.nbytes
        self._device.write(training, inside, [piece.source() for piece in pieces])
        with self._enqueuing:
            self._after_training()
            self._to_slot(slot, pieces, inside)
            self._left = self.done = self._device.record(self._stream)

    def synchronize(self) -> None:
        """Have the calling thread wait for all that was enqueued."""
        if self.done is not None:
            self._device.synchronize(self.done)

    def _to_slot(self, slot: torch.Tensor, pieces: Sequence[Piece], sources: Sequence[torch.Tensor]) -> None:
        small = [number for number, piece in enumerate(pieces) if piece.nbytes <= SMALL_BYTES]
        seen = self._device.seen(slot, self.index) if len(small) >= _MANY else None
        rest: Iterable[int] = range(len(pieces))
        if seen is not None:
            targets = [pieces[number].target(seen) for number in small]
            self._device.write(self._stream, targets, [sources[number] for number in small])
            rest = (number for number, piece in enumerate(pieces) if piece.nbytes > SMALL_BYTES)
        self._device.copy(self._stream, ((pieces[number].target(slot), sources[number]) for number in rest))

    def _after_training(self) -> None:
        self._device.wait(self._stream, self._device.record(self._device.current(self.index)))


class LaneCopy:
    """Copies of one snapshot from one device.

    Args:
        lane: of the device.
        held: what is copied from which place of the iteration on, in order.
        slot: where to.
        buffered: whether the last bytes are kept for the buffer.

    Attributes:
        done: an event after which all that was enqueued is in the slot.
    """

    def __init__(self, lane: Lane, held: Iterable[Held], slot: torch.Tensor, *, buffered: bool) -> None:
        self.done: Any = None
        self._lane, self._slot = lane, slot
        self._held = deque(held)
        buffer = lane.buffer() if buffered else None
        self._room = room = buffer.numel() if buffer is not None else 0
        self._last: list[Piece] = []
        while self._held and room > 0:
            place, pieces = self._held.pop()
            before, end = cut_end(pieces, room)
            if before:
                self._held.append((place, before))
            self._last = [*end, *self._last]
            room -= sum(piece.nbytes for piece in end)

    def release(self, place: int) -> bool:
        """Enqueue what was held until ``place``; whether nothing is left."""
        now: list[Piece] = []
        while self._held and self._held[0][0] <= place:
            now += self._held.popleft()[1]
        self._enqueue(self._lane.enqueue, now)
        return not self._held and not self._last

    def release_rest(self) -> None:
        """Enqueue the rest while the optimizer is not about to step: all of it has time."""
        self._enqueue(self._lane.enqueue_beside, self._take_rest())

    def release_all(self) -> None:
        """Enqueue the rest: what the optimizer overwrites last goes through the buffer, as far as it has room."""
        now, buffered = cut_end(self._take_rest(), self._room)
        self._enqueue(self._lane.enqueue, now)
        self._enqueue(self._lane.enqueue_buffered, buffered)

    def _enqueue(self, enqueue: Callable[[Sequence[Piece], torch.Tensor], None], pieces: Sequence[Piece]) -> None:
        try:
            if pieces:
                enqueue(pieces, self._slot)
        finally:
            self.done = self._lane.done

    def _take_rest(self) -> list[Piece]:
        rest = [piece for _, pieces in self._held for piece in pieces] + self._last
        self._held.clear()
        self._last = []
        return rest


@contextmanager
def _failures_as_ours() -> Iterator[None]:
    """Have an error of CUDA cost a snapshot, or nothing more than what is cleared up: training meets it by itself."""
    try:
        yield
    except RuntimeError as error:
        raise SpotError(f"the GPU failed: {error}") from error


class CudaCopier:
    """Enqueues device-to-host copies on one side stream per device.

    A slot is pinned (page-locked, ``cudaHostRegister``) the first time it is copied to, because only a copy into
    pinned memory runs beside kernels.

    Args:
        buffer_bytes: of the buffer on each device; 0 for none.
        device: the layer below.
    """

    def __init__(self, buffer_bytes: int = 0, device: Cuda | None = None) -> None:
        self.device: Cuda = device if device is not None else Cuda()
        self._buffer_bytes = buffer_bytes
        self._lanes: dict[int, Lane] = {}
        self._pinned: dict[int, bool] = {}
        """Slots that were to be page-locked, by their address, and whether they are."""
        self._making = threading.Lock()
        self.records_graphs = False
        """Whether a CUDA graph was seen being recorded: its replays call no hooks, so nothing may follow later."""

    @_failures_as_ours()
    def begin(self, held: Iterable[Held], slot: torch.Tensor, *, buffered: bool) -> CudaCopy:
        """Take copies over; none is enqueued yet. They come after what the calling thread has enqueued so far.

        Args:
            held: what is copied from which place of the iteration on, in order.
            slot: uint8 CPU tensor of shape ``(capacity,)`` over the slot.
            buffered: whether the last bytes may go through the buffer on the device, before the optimizer steps.

        Raises:
            SpotError: if the device fails.
        """
        by_lane: dict[Lane, list[Held]] = {}
        for place, pieces in held:
            for piece in pieces:
                parts = by_lane.setdefault(self._lane(self.device.index(piece.storage)), [])
                if not parts or parts[-1][0] != place:
                    parts.append((place, []))
                parts[-1][1].extend(cut_at(piece, PAGE_LOCKED_BYTES))
        self.pin(slot, next(iter(by_lane)).index)
        if not self.capturing():
            for lane in by_lane:  # a hook that enqueues some of them may be on a thread with another stream
                lane.follow(self.device.record(self.device.current(lane.index)))
        return CudaCopy(self, [LaneCopy(lane, parts, slot, buffered=buffered) for lane, parts in by_lane.items()])

    @_failures_as_ours()
    def fence(self) -> None:
        """Make each device's current stream wait for the copies enqueued so far (no host wait).

        Raises:
            SpotError: if the device fails.
        """
        if self.capturing():  # a replay waits for none of them
            self.synchronize()
            return
        for lane in list(self._lanes.values()):  # a slot that is being made may add one
            if lane.read is not None:
                self.device.wait(self.device.current(lane.index), lane.read)

    def capturing(self) -> bool:
        """Whether nothing can be enqueued now, since a CUDA graph is being recorded, which is logged."""
        if not self._lanes or not self.device.is_capturing():
            return False
        self.records_graphs = True
        text = "a CUDA graph is recorded around the optimizer's step. The step waits for copies from now on."
        say(logging.WARNING, "cuda-graph", text)
        return True

    def pin(self, slot: torch.Tensor, index: int) -> None:
        """Page-lock a slot, once, for copies from a device. A slot that can't be is copied to more slowly."""
        address = slot.data_ptr()
        if address in self._pinned:
            return
        code = self.device.pin(slot, index)
        self._pinned[address] = code == 0
        if code == 0:
            self._lane(index).warm()
        else:
            text = (
                "a slot of {nbytes} bytes could not be page-locked (CUDA error {code}). Snapshots are slower."
                " Raise the memlock limit (docker: --ulimit memlock=-1)."
            )
            say(logging.WARNING, "slot-not-pinned", text, about=index, nbytes=slot.numel(), code=code)

    def unpin(self, slot: torch.Tensor) -> None:
        """Undo :meth:`pin` once the copies under way are done; call it before the slot is unmapped.

        Another slot may be mapped at the same address later: with this one's registration left, copies would go to
        pages that are no longer mapped there.
        """
        address = slot.data_ptr()
        if address not in self._pinned:
            return
        self.synchronize()
        if self._pinned.pop(address) and (code := self.device.unpin(slot)) != 0:
            text = "a slot of {nbytes} bytes could not be unlocked (CUDA error {code}). Its memory stays in use."
            say(logging.WARNING, "slot-not-unpinned", text, nbytes=slot.numel(), code=code)

    def synchronize(self) -> None:
        """Have the calling thread wait for all that was enqueued. To a device that has failed, nothing goes on."""
        for lane in list(self._lanes.values()):
            try:
                lane.synchronize()
            except RuntimeError as error:
                logger.debug("copies from GPU %d have ended: %s", lane.index, error)

    def _lane(self, index: int) -> Lane:
        with self._making:
            if index not in self._lanes:
                self._lanes[index] = Lane(index, self.device, self._buffer_bytes)
            return self._lanes[index]


class CudaCopy:
    """Copies of one snapshot from GPUs.

    Everything but :meth:`wait` and :meth:`release_rest` is called where training enqueues its work.
    """

    def __init__(self, copier: CudaCopier, lanes: Sequence[LaneCopy]) -> None:
        self._copier = copier
        self._lanes = lanes

    def release(self, place: int) -> bool:
        """Enqueue what was held until ``place``; whether nothing is left."""
        return not self._copier.capturing() and all([lane.release(place) for lane in self._lanes])

    def release_all(self) -> bool:
        """Enqueue the rest: the optimizer is about to step.

        Raises:
            SpotError: if a CUDA graph is being recorded, into which no copy of ours belongs.
        """
        if self._copier.capturing():
            raise SpotError("a CUDA graph was recorded while it was copied; from now on nothing is copied beside steps")
        for lane in self._lanes:
            lane.release_all()
        return True

    def release_rest(self) -> bool:
        """Enqueue the rest: training comes to no place of its iteration, in which copies were to go, for long."""
        for lane in self._lanes:
            lane.release_rest()
        return True

    @_failures_as_ours()
    def wait(self) -> None:
        """Have the calling thread wait until all that was enqueued is in the slot.

        Raises:
            SpotError: if the device fails.
        """
        for lane in self._lanes:
            if lane.done is not None:
                self._copier.device.synchronize(lane.done)
        self._lanes = ()
