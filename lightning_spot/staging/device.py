"""What the copier asks of a GPU: streams, events, copies, pinned memory. All calls of CUDA are here, no decision is."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from lightning_spot.staging import page_lock


class Device(Protocol):
    """GPUs as copies need them. Streams and events are whatever it makes of them."""

    def kinds(self, storages: Sequence[torch.UntypedStorage]) -> list[str]:
        """What each storage lies on: ``"cuda"`` for one of them, else what torch calls it. There may be thousands."""

    def index(self, storage: torch.UntypedStorage) -> int:
        """On which."""

    def in_use(self) -> Sequence[int]:
        """Numbers of those that the calling thread's work goes to, as far as that is known."""

    def current(self, index: int) -> Any:
        """The stream that the calling thread's work goes to."""

    def stream(self, index: int) -> Any:
        """A new stream."""

    def warm(self, stream: Any) -> None:
        """Have all ready that work on a stream will need. Waits for whatever that takes."""

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        """An event that is over when all that was ordered on ``stream`` so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is ordered on ``stream`` from now on begins when ``event`` is over. The host does not wait."""

    def copy(self, stream: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Order copies ``(target, source)`` on ``stream``. The host does not wait."""

    def write(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Order copies within a device on ``stream``, or into what of a slot it sees. The host does not wait."""

    def seen(self, slot: torch.Tensor, index: int) -> torch.Tensor | None:
        """A page-locked slot as a device sees it: what is written there is in the slot. ``None`` if it doesn't."""

    def to_host(self, number: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Order a copy of one number by the calling thread's stream: it, and an event after which it is there."""

    def is_over(self, event: Any) -> bool:
        """Whether it is."""

    def seconds(self, first: Any, last: Any) -> float:
        """Time between two events that were recorded as ``timed`` and are over."""

    def synchronize(self, event: Any) -> None:
        """Have the calling thread wait until ``event`` is over."""

    def beside(self, index: int, stream: Any = None) -> contextlib.AbstractContextManager[None]:
        """Have the calling thread, not that which trains, use a device itself, for as long as this lasts.

        Args:
            index: number of the device.
            stream: what its own work goes to; ``None`` if it orders none.
        """

    def allocate(self, index: int, nbytes: int) -> torch.Tensor | None:
        """Bytes on a device; ``None`` if it has no room."""

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded from the calling thread's stream."""

    def pin(self, slot: torch.Tensor, index: int) -> int:
        """Page-lock memory of the host, from which a device is copied to; 0, or CUDA's error."""

    def unpin(self, slot: torch.Tensor) -> int:
        """Undo :meth:`pin`; 0, or CUDA's error."""


@functools.cache
def _kind(device: torch.device) -> str:
    """What torch calls its kind; torch makes that anew each time, which takes four times as long as to look it up."""
    return device.type


class Cuda:
    """The GPUs of this process."""

    def kinds(self, storages: Sequence[torch.UntypedStorage]) -> list[str]:
        """What each storage lies on."""
        return list(map(_kind, [storage.device for storage in storages]))

    def index(self, storage: torch.UntypedStorage) -> int:
        """On which."""
        return storage.device.index or 0

    def in_use(self) -> Sequence[int]:
        """The calling thread's device, if CUDA was used at all."""
        return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call] # torch's

    def current(self, index: int) -> torch.cuda.Stream:
        """The stream that the calling thread's work goes to."""
        return torch.cuda.current_stream(index)

    def stream(self, index: int) -> torch.cuda.Stream:
        """A new stream."""
        with torch.cuda.device(index):
            return torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's

    def warm(self, stream: torch.cuda.Stream) -> None:
        """Use kernels and copies once: CUDA loads each at its first use, which can take until the device is idle."""
        with page_lock.beside_recordings(), self._on(stream):
            there = torch.zeros(2, 64, dtype=torch.uint8, device=stream.device)
            here = torch.empty(64, dtype=torch.uint8, pin_memory=True)
            self.write(stream, [there[0]], [there[1]])
            self.copy(stream, [(here, there[0])])
            self.synchronize(self.record(stream))  # then the memory may be used again

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Order work on a stream. A thread that has no device yet would be given the first one at the end."""
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def record(self, stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
        """An event that is over when all that was ordered on ``stream`` so far is done."""
        # Who waits for one sleeps: by default it would use a processor up. One for times is only looked at.
        event = torch.cuda.Event(enable_timing=timed, blocking=not timed)  # type: ignore[no-untyped-call] # torch's
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """What is ordered on ``stream`` from now on begins when ``event`` is over."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Order copies ``(target, source)`` on ``stream``."""
        with self._on(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def write(
        self, stream: torch.cuda.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Order copies on ``stream``, many in each launch of a kernel."""
        if not hasattr(torch, "_foreach_copy_"):  # a private name; only the time of the training thread depends on it
            self.copy(stream, zip(targets, sources, strict=True))
            return
        with self._on(stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def seen(self, slot: torch.Tensor, index: int) -> torch.Tensor | None:
        """A page-locked slot as a tensor of a device."""
        return page_lock.seen(slot.data_ptr(), index)

    def to_host(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Order a copy of one number, into page-locked memory."""
        here = torch.empty((), dtype=number.dtype, pin_memory=True)
        here.copy_(number.reshape(()), non_blocking=True)
        return here, self.record(self.current(number.device.index))

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Whether it is."""
        return bool(event.query())  # type: ignore[no-untyped-call] # torch's

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Time between two events."""
        return float(first.elapsed_time(last)) / 1000

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Have the calling thread wait until ``event`` is over."""
        with self.beside(event.device.index):
            event.synchronize()

    @contextlib.contextmanager
    def beside(self, index: int, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Have the calling thread, not that which trains, use a device itself, for as long as this lasts."""
        # Without a device of its own, a thread takes memory for a context on the first.
        with torch.cuda.device(index), torch.cuda.stream(stream), page_lock.beside_recordings():
            yield

    def allocate(self, index: int, nbytes: int) -> torch.Tensor | None:
        """Bytes on a device; ``None`` if it has no room."""
        try:
            with self.beside(index):
                return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
        except torch.cuda.OutOfMemoryError:
            return None

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being recorded from the calling thread's stream."""
        return torch.cuda.is_current_stream_capturing()

    def pin(self, slot: torch.Tensor, index: int) -> int:
        """Page-lock memory of the host."""
        return page_lock.lock(slot.data_ptr(), slot.numel(), index)

    def unpin(self, slot: torch.Tensor) -> int:
        """Undo :meth:`pin`."""
        return page_lock.let_go(slot.data_ptr(), slot.numel())


class DeviceClock:
    """Time of a GPU's work, by events on the current stream: the host runs ahead of it. Idle is all of it for copies.

    Args:
        index: the device.
        device: the layer below.
    """

    def __init__(self, index: int, device: Device | None = None) -> None:
        self._index = index
        self._device: Device = device if device is not None else Cuda()

    def mark(self) -> Any:
        """Now, in the order of the current stream; ``None`` where a graph is recorded, which has no time."""
        if self._device.is_capturing():
            return None
        return self._device.record(self._device.current(self._index), timed=True)

    def is_over(self, mark: Any) -> bool:
        """Whether the GPU has come there."""
        return mark is None or self._device.is_over(mark)

    def between(self, first: Any, last: Any) -> tuple[float, float]:
        """Seconds between two marks, all of them idle for the copy engine."""
        seconds = self._device.seconds(first, last) if first is not None and last is not None else 0.0
        return seconds, seconds
