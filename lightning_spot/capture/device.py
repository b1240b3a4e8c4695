"""What the copier asks of a GPU: streams, events, copies, page-locked memory. All calls of CUDA are here.

No decision is made here. Only a copy into page-locked memory runs beside kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device's context
PAGE_LOCKED_BYTES = 64 * 1024 * 1024
"""What is page-locked at once, from the beginning of a slot. No copy may go from one such piece into the next.

While CUDA page-locks memory, nothing is launched: 0.76 s for 12 GB at once (H100), 3 ms at most for so much.
"""
_UNKNOWN = 999  # cudaErrorUnknown
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_locked: dict[int, tuple[int, int]] = {}
"""What this process has page-locked, as CUDA knows it: address, bytes, and the device it was asked of."""
_locking = threading.Lock()
_seen: dict[int, torch.Tensor] = {}
"""Slots as tensors of the device by which they were page-locked, if its kernels see them where they are here."""


def _page_lock(address: int, nbytes: int, index: int) -> int:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
    if (code := int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))) == 0:
        _locked[address] = nbytes, index
    return code


class _Bytes:
    """Memory that a device sees, as torch and others ask for it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _note_seen(pieces: Sequence[tuple[int, int]]) -> int:
    """Note a slot of these page-locked pieces, if the device sees each of them where it is for the host.

    Always 0, as a call that went well: where it does not, copies are made without kernels.
    """
    driver, address = driver_library(), pieces[0][0]
    if driver is None:
        return 0
    for at, _ in pieces:
        there = ctypes.c_void_p()
        code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(there), ctypes.c_void_p(at), 0)
        if code != 0 or there.value != at:
            logger.debug("the GPU does not see a slot where it is: %s, CUDA error %d", there.value, code)
            return 0
    try:
        found = torch.as_tensor(_Bytes(address, sum(nbytes for _, nbytes in pieces)))
    except (RuntimeError, TypeError) as error:
        logger.debug("a slot is no tensor of the GPU: %s", error)
        return 0
    if found.data_ptr() == address and found.is_cuda:
        _seen[address] = found
    return 0


def _let_go(first: int, end: int) -> int:
    """Undo :func:`_page_lock` for all that lies there in part; 0, or CUDA's error."""
    gone = [at for at, (nbytes, _) in _locked.items() if at < end and first < at + nbytes]
    if not gone:
        return 0
    index = _locked[gone[0]][1]
    return _on_own_thread(index, [functools.partial(_page_unlock, address) for address in gone])


def _page_unlock(address: int) -> int:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
    del _locked[address]
    _seen.pop(address, None)
    return int(cudart.cudaHostUnregister(address))


@functools.cache
def driver_library() -> Any:
    """CUDA's driver; ``None`` if there is none of that name."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        logger.debug("a CUDA graph may be recorded in the default mode only while no slot is made: %s", error)
        return None


@contextlib.contextmanager
def beside_recordings() -> Iterator[None]:
    """Call CUDA on this thread, whatever others do.

    While one records a graph in the mode that is torch's default, CUDA refuses most calls on all threads, and the graph
    is lost by them. It does neither to a thread that has said that it knows.
    """
    mode = ctypes.c_int(_RELAXED)
    driver = driver_library()
    if driver is None or driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _on_own_thread(index: int, calls: Sequence[Callable[[], int]]) -> int:
    """Call CUDA's runtime on a thread of its own, whose device is ``index``, until a call fails; 0, or its error.

    CUDA keeps an error for the thread that made it, and torch raises it at whatever that thread launches next. After
    each call training has as much time as it took.
    """
    codes = [0]

    def work() -> None:
        try:
            with torch.cuda.device(index), beside_recordings():
                for call in calls:
                    began_s = time.perf_counter()
                    codes.append(call())
                    if codes[-1] != 0:
                        return
                    time.sleep(time.perf_counter() - began_s)
        except RuntimeError as error:  # the device is lost
            logger.debug("GPU %d has failed: %s", index, error)
            codes.append(_UNKNOWN)

    thread = threading.Thread(target=work, name="spot-page-lock", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and nothing is launched any more
        work()
    else:
        thread.join()
    return codes[-1]


@functools.cache
def _kind(device: torch.device) -> str:
    """What torch calls its kind; torch makes that again each time, which takes four times as long as to look it up."""
    return device.type


class Cuda:
    """The GPUs of this process, as copies need them. Streams and events are torch's; a test has others."""

    def kinds(self, storages: Sequence[torch.UntypedStorage]) -> list[str]:
        """What each storage lies on: ``"cuda"`` for one of them, else what torch calls it. There may be thousands."""
        return list(map(_kind, [storage.device for storage in storages]))

    def index(self, storage: torch.UntypedStorage) -> int:
        """Number of the GPU that a storage lies on."""
        return storage.device.index or 0

    def current(self, index: int) -> torch.cuda.Stream:
        """The stream that the calling thread's work goes to."""
        return torch.cuda.current_stream(index)

    def stream(self, index: int) -> torch.cuda.Stream:
        """A new stream."""
        with torch.cuda.device(index):
            return torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's

    def warm(self, stream: torch.cuda.Stream) -> None:
        """Have all ready that work on a stream will need. Waits for whatever that takes."""
        with beside_recordings(), self._on(stream):
            there = torch.zeros(2, 64, dtype=torch.uint8, device=stream.device)
            here = torch.empty(64, dtype=torch.uint8, pin_memory=True)
            self.write(stream, [there[0]], [there[1]])
            self.copy(stream, [(here, there[0])])
            self.synchronize(self.record(stream))  # then the memory may be used again

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Enqueue work on a stream. A thread that has no device yet would be given the first one at the end."""
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def record(self, stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
        """An event that is over when all that was enqueued on ``stream`` so far is done."""
        # Who waits for one sleeps: by default it would use a processor up. One for times is only looked at.
        event = torch.cuda.Event(enable_timing=timed, blocking=not timed)  # type: ignore[no-untyped-call] # torch's
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """What is enqueued on ``stream`` from now on begins when ``event`` is over. The host does not wait."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Enqueue copies ``(target, source)`` on ``stream``. The host does not wait."""
        with self._on(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def write(
        self, stream: torch.cuda.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Enqueue copies within a device on ``stream``, or into what of a slot it sees. The host does not wait."""
        if not hasattr(torch, "_foreach_copy_"):  # a private name; only the time of the training thread depends on it
            self.copy(stream, zip(targets, sources, strict=True))
            return
        with self._on(stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def seen(self, slot: torch.Tensor, index: int) -> torch.Tensor | None:
        """A page-locked slot as a device sees it: what is written there is in the slot. ``None`` if it doesn't."""
        found = _seen.get(slot.data_ptr())
        return found if found is not None and found.device.index == index else None

    def to_host(self, number: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Enqueue a copy of one number by the calling thread's stream: it, and an event after which it is there."""
        here = torch.empty((), dtype=number.dtype, pin_memory=True)
        here.copy_(number.reshape(()), non_blocking=True)
        return here, self.record(self.current(number.device.index))

    def is_over(self, event: torch.cuda.Event) -> bool:
        """Whether all that was enqueued before ``event`` is done."""
        return bool(event.query())  # type: ignore[no-untyped-call] # torch's

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Time between two events that were recorded as ``timed`` and are over."""
        return float(first.elapsed_time(last)) / 1000

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Have the calling thread wait until ``event`` is over."""
        with self.beside(event.device.index):
            event.synchronize()

    @contextlib.contextmanager
    def beside(self, index: int) -> Iterator[None]:
        """Have the calling thread, not that which trains, use a device itself, for as long as this lasts.

        Args:
            index: number of the device.
        """
        # Without a device of its own, a thread takes memory for a context on the first.
        with torch.cuda.device(index), beside_recordings():
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
        """Page-lock memory of the host, from which a device is copied to; 0, or CUDA's error.

        It goes piece by piece: training goes on between them. What was page-locked where this memory lies now was
        unmapped without being let go: CUDA would go on copying to the pages that were there before.
        """
        address, end = slot.data_ptr(), slot.data_ptr() + slot.numel()
        pieces = [(at, min(PAGE_LOCKED_BYTES, end - at)) for at in range(address, end, PAGE_LOCKED_BYTES)]
        with _locking:
            _let_go(address, end)
            calls = [functools.partial(_page_lock, *piece, index) for piece in pieces]
            code = _on_own_thread(index, [*calls, functools.partial(_note_seen, pieces)])
            if code != 0:
                _let_go(address, end)
        return code

    def unpin(self, slot: torch.Tensor) -> int:
        """Undo :meth:`pin`; 0, or CUDA's error."""
        with _locking:
            return _let_go(slot.data_ptr(), slot.data_ptr() + slot.numel())


class DeviceClock:
    """Time of a GPU's work, by events on the current stream: the host runs ahead of it. Idle is all of it for copies.

    Args:
        index: the device.
        device: the layer below.
    """

    def __init__(self, index: int, device: Cuda | None = None) -> None:
        self._index = index
        self._device = device if device is not None else Cuda()

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
