"""Copies tensor storages into a slot while training goes on: CPU storages by threads, CUDA ones by a side stream."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_spot.errors import SpotError
from lightning_spot.image.layout import Piece
from lightning_spot.staging.cuda import CudaCopier

_LEAST_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Watch:
    """A tensor that must not change until it is copied.

    Attributes:
        tensor: the tensor (any device); kept alive meanwhile.
        version: its version counter when the copy was ordered.
    """

    tensor: torch.Tensor
    version: int


def watch(tensors: Iterable[torch.Tensor]) -> list[Watch]:
    """Note the version counters of ``tensors``. Inference tensors have none and are left out: nothing tracks them."""
    return [Watch(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


class SlotView:
    """A slot as the trainer sees it: its mapping, and where that lies in this process.

    Attributes:
        map: the shared mapping.
        address: address of its first byte.
        tensor: the mapping as a uint8 tensor of shape ``(capacity,)`` on the CPU; shares the memory.
    """

    def __init__(self, shared: mmap.mmap) -> None:
        self.map = shared
        self._held = memoryview(shared)  # nobody unmaps it as long as this view is there, and the slot perhaps pinned
        self.tensor = torch.frombuffer(shared, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


class CopyJob:
    """Copies on their way into one slot. Who cannot go on without them calls :meth:`wait_cpu` and helps."""

    def __init__(self, pieces: Sequence[Piece], watches: Sequence[Watch]) -> None:
        self.moved: frozenset[int] = frozenset()
        """Addresses of storages that changed before they were copied; if any, the copy is worthless."""
        self.pieces = list(pieces)
        """What is copied; emptied when it is done, so that no storage is kept alive."""
        self._watches = watches
        self._tasks: deque[_Batch] = deque()
        self._left = 0
        self._lock = threading.Lock()
        self._on_cpu = threading.Event()
        self._on_gpu: Callable[[], None] | None = None
        self._settled = False
        self._error: BaseException | None = None

    def wait_cpu(self) -> None:
        """Help with the CPU storages and return when all of them are in the slot.

        Raises:
            SpotError: if a copy failed.
        """
        while self._step(_Batch.helping):
            pass
        self._wait_cpu()

    def _wait_cpu(self) -> None:
        self._on_cpu.wait()
        if self._error is not None:
            raise SpotError(f"copying a tensor into its slot failed: {self._error}") from self._error

    def wait(self) -> None:
        """Return when every byte is in the slot, those of CUDA storages included. Does not help: for the background.

        Raises:
            SpotError: if a copy failed.
        """
        self._wait_cpu()
        if self._on_gpu is not None:
            self._on_gpu()
        self.settle()
        self.pieces.clear()

    def settle(self) -> None:
        """Compare the version counters for the last time: from now on the tensors may change.

        Called when all bytes are copied, or when what changes them is ordered after the copies (a CUDA stream).
        """
        with self._lock:
            if not self._settled:
                self._settled = True
                self.moved = frozenset(
                    item.tensor.untyped_storage().data_ptr()
                    for item in self._watches
                    if item.tensor._version != item.version
                )

    def _step(self, copy: Callable[[_Batch], None]) -> bool:
        """Copy one batch; ``False`` when none is left to take."""
        try:
            task = self._tasks.popleft()
        except IndexError:
            return False
        try:
            copy(task)
        except BaseException as error:  # told to whoever waits
            self._error = error
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish_cpu()
        return True

    def _finish_cpu(self) -> None:
        if self._on_gpu is None:
            self.settle()
        self._on_cpu.set()


class Copier:
    """Copies pieces into slots, on ``threads`` background threads and a side CUDA stream.

    Args:
        threads: background threads for CPU storages. One leaves the cores to training; a waiting trainer helps.
    """

    def __init__(self, threads: int = 1) -> None:
        self._jobs: deque[CopyJob] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._started = threading.Semaphore(0)
        self._cuda = CudaCopier()
        self._threads = [
            threading.Thread(target=self._work, name=f"spot-copier-{index}", daemon=True) for index in range(threads)
        ]
        default = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
            self._started.acquire()
        torch.set_num_threads(default)

    def start(self, pieces: Sequence[Piece], slot: SlotView, watches: Sequence[Watch] = ()) -> CopyJob:
        """Start copying and return at once.

        CPU storages must not change until :meth:`CopyJob.wait_cpu` returned; CUDA storages may change on the current
        stream once :meth:`fence` was called.

        Args:
            pieces: storages and their places.
            slot: where to.
            watches: tensors to compare before and after, see :func:`watch`.
        """
        job = CopyJob(pieces, watches)
        by_device: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.storage.device.type, []).append(piece)
        on_cpu, on_gpu = by_device.pop("cpu", []), by_device.pop("cuda", [])
        if on_gpu:
            job._on_gpu = self._cuda.copy(on_gpu, slot.tensor)
        for others in by_device.values():
            for piece in others:  # MPS, XPU, …: no side stream is known here; copied in order, by the caller
                _copy_any(piece, slot)
        job._tasks.extend(_cpu_batches(on_cpu, slot))
        job._left = len(job._tasks)
        if job._left == 0:
            job._finish_cpu()
            return job
        with self._wake:
            self._jobs.append(job)
            self._wake.notify_all()
        return job

    def pin(self, slot: SlotView) -> None:
        """Page-lock a slot ahead of the first copy from a GPU."""
        self._cuda.pin(slot.tensor)

    def unpin(self, slot: SlotView) -> None:
        """Undo :meth:`pin`; call it before the slot is unmapped."""
        self._cuda.unpin(slot.tensor)

    def fence(self) -> None:
        """Make the current CUDA stream wait for the copies ordered so far; the calling thread does not wait."""
        self._cuda.fence()

    def close(self) -> None:
        """Stop the threads once their copies are done."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        # One thread, also inside torch: a team of several would fight with the one that trains. torch keeps this per
        # thread, but notes it as the default too, which the constructor puts right.
        torch.set_num_threads(1)
        self._started.release()
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if not self._jobs:
                    return
                job = self._jobs[0]
            if not job._step(_Batch.in_background):
                with self._wake:
                    if self._jobs and self._jobs[0] is job:
                        self._jobs.popleft()


class _Batch:
    """Some storages, or parts of them, and their places: what one thread copies in one go.

    Args:
        spans: ``(storage, first byte in it, first byte in the slot, length)``.
        slot: where to.
    """

    def __init__(self, spans: list[tuple[torch.UntypedStorage, int, int, int]], slot: SlotView) -> None:
        self._spans = spans
        self._slot = slot

    def in_background(self) -> None:
        """Copy all of it without the GIL in between, which the training thread holds for milliseconds at a time."""
        sources, targets = [], []
        for storage, start, place, nbytes in self._spans:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            sources.append(whole[start : start + nbytes])
            targets.append(self._slot.tensor[place : place + nbytes])
        torch._foreach_copy_(targets, sources)

    def helping(self) -> None:
        """Copy it on the calling thread alone: no second team of threads beside those of training."""
        for storage, start, place, nbytes in self._spans:
            ctypes.memmove(self._slot.address + place, storage.data_ptr() + start, nbytes)  # lets go of the GIL


def _cpu_batches(pieces: Sequence[Piece], slot: SlotView) -> Iterator[_Batch]:
    """Cut the pieces into batches, large ones first: those run while nobody can help; the last even the load out."""
    left = sum(piece.nbytes for piece in pieces)
    limit = max(left // 3, _LEAST_BATCH_BYTES)
    spans: list[tuple[torch.UntypedStorage, int, int, int]] = []
    size = 0
    for piece in pieces:
        start = 0
        while start < piece.nbytes:
            nbytes = min(piece.nbytes - start, limit - size)
            spans.append((piece.storage, start, piece.offset + start, nbytes))
            start, size, left = start + nbytes, size + nbytes, left - nbytes
            if size >= limit:
                yield _Batch(spans, slot)
                spans, size, limit = [], 0, max(left // 3, _LEAST_BATCH_BYTES)
    if spans:
        yield _Batch(spans, slot)


def _copy_any(piece: Piece, slot: SlotView) -> None:
    source = torch.empty(0, dtype=torch.uint8, device=piece.storage.device).set_(piece.storage)
    slot.tensor[piece.offset : piece.offset + piece.nbytes].copy_(source)
