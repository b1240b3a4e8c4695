"""Copies tensor storages into a slot while training goes on: CPU storages by threads, CUDA ones by a side stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from lightning_spot.capture.batch import NEVER, NOW, Batch, CopyJob, SlotView, batches_of
from lightning_spot.capture.cuda import CudaCopier, CudaCopy, Held
from lightning_spot.capture.tensors import Watches
from lightning_spot.say import UNEXPECTED, say
from lightning_spot.snapshot.pieces import Piece

if TYPE_CHECKING:
    from lightning_spot.capture.device import Cuda
    from lightning_spot.capture.schedule import Schedule, Timetable

HELD_S = 1.0
"""So long, at most, what would leave a GPU while its optimizer steps is held where iterations are not measured."""
_AGAIN_S = 0.1  # the next optimizer step waits no longer than that for a thread that has failed


def compute_alone() -> None:
    """Have torch compute without a team on the calling thread.

    That becomes the default of threads that torch meets for the first time afterwards, too: see :class:`LoneThread`.
    """
    torch.get_num_threads()  # sets this thread up with the default; torch would do so later, and undo the next line
    torch.set_num_threads(1)


class LoneThread(threading.Thread):
    """A daemon thread on which torch never starts a team of its own.

    A second team does harm as long as it exists, even where it is idle. GNU's OpenMP counts the threads of all teams,
    and when these are more than the processors, no team waits actively any more (``gomp_managed_threads``, ``wait.h``
    of libgomp): the threads of training then sleep and are woken for each operation, which took up to half as long
    again for small models.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(daemon=True, **settings)
        self._is_alone = threading.Event()

    def start(self) -> None:
        """Start it, and return when torch computes alone there."""
        default = torch.get_num_threads()
        super().start()
        self._is_alone.wait()
        torch.set_num_threads(default)  # torch keeps the number for each thread, but the last one set is the default

    def run(self) -> None:
        """What the thread does: what it was given, alone."""
        compute_alone()
        self._is_alone.set()
        super().run()


class Copier:
    """Copies pieces into slots, on ``threads`` background threads and a side CUDA stream.

    Args:
        threads: background threads for CPU storages. One leaves the cores to training; a waiting trainer helps.
        buffer_bytes: of the buffer on each GPU through which the last bytes of a snapshot go; 0 for none.
        device: calls the GPUs.
        clock: when held copies are due, seconds.
    """

    def __init__(
        self,
        threads: int = 1,
        buffer_bytes: int = 0,
        device: Cuda | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs: list[CopyJob] = []
        self._slots: WeakKeyDictionary[CopyJob, ReferenceType[SlotView]] = WeakKeyDictionary()
        self._wake = threading.Condition()
        self._closed = False
        self._clock = clock
        self._cuda = CudaCopier(buffer_bytes, device)
        self._threads = [LoneThread(target=self._work, name=f"spot-copier-{index}") for index in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(
        self,
        pieces: Sequence[Piece],
        slot: SlotView,
        watches: Watches | None = None,
        schedule: Schedule | None = None,
    ) -> CopyJob:
        """Start copying and return at once.

        CPU storages must not change until :meth:`CopyJob.wait_cpu` returned; CUDA storages may change on the current
        stream once :meth:`fence` was called after it.

        Args:
            pieces: storages and their places.
            slot: where to.
            watches: tensors to compare before and after.
            schedule: when each of them goes; ``None`` for at once.
        """
        timetable = None
        if schedule is not None:
            addresses = (piece.storage.data_ptr() for piece in pieces)
            timetable = schedule.timetable(addresses, [piece.nbytes for piece in pieces])
        stands_still = timetable is not None and timetable.stands_still
        held = None if stands_still else timetable
        batches, cuda, enqueue_s = self._planned(pieces, slot, held, buffered=schedule is not None)
        job = CopyJob(
            *(pieces, watches or Watches(), batches, cuda, enqueue_s),
            woken=self._notify,
            clock=self._clock,
            stands_still=stands_still,
        )
        with self._wake:
            self._slots[job] = ref(slot)  # before anything goes there
        if stands_still:
            job.copy_here()
        if job.is_done:
            return job
        with self._wake:
            self._jobs.append(job)
        job.release(0)
        if self._cuda.records_graphs:
            job.wait_cpu()  # a replay calls no hook that would wait
            self.fence()
        elif schedule is not None:
            schedule.attach(job.release)
        return job

    def give_up(self, slot: SlotView) -> None:
        """Return when nothing goes into a slot any more, whatever was begun: it is given back unfilled."""
        with self._wake:
            jobs = [job for job, where in self._slots.items() if where() is slot]
        for job in jobs:
            job.give_up()
        self._cuda.synchronize()

    def pin(self, slot: SlotView, index: int) -> None:
        """Page-lock a slot ahead of the first copy from a GPU, that with the number ``index``."""
        self._cuda.pin(slot.tensor, index)

    def unpin(self, slot: SlotView) -> None:
        """Undo :meth:`pin`; call it before the slot is unmapped."""
        self._cuda.unpin(slot.tensor)

    def fence(self) -> None:
        """Make the current CUDA stream wait for the copies enqueued so far; the calling thread does not wait."""
        self._cuda.fence()

    def close(self) -> None:
        """Stop the threads once their copies are done."""
        with self._wake:
            self._closed = True
            for job in self._jobs:
                job.release_to_background()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _planned(
        self, pieces: Sequence[Piece], slot: SlotView, timetable: Timetable | None, *, buffered: bool
    ) -> tuple[list[Batch], CudaCopy | None, float]:
        """What is copied from the CPU and from GPUs, held as a timetable says; and when the latter goes at the latest.

        What is on other devices is copied now: no side stream is known there.
        """
        now_s = self._clock()
        latest_s, enqueue_s = NOW, now_s + HELD_S
        parts: list[tuple[int, float, Sequence[Piece]]] = [(0, 0.0, pieces)]
        if timetable is not None:
            latest_s = enqueue_s = now_s + timetable.limit_s
            parts = [
                (part.point, part.after_s, [pieces[span.piece].part(span.start, span.nbytes) for span in part.spans])
                for part in timetable.partitions
            ]
        batches: list[Batch] = []
        on_gpu: list[Held] = []
        for place, after_s, part in parts:
            on_cpu: list[Piece] = []
            for piece, kind in zip(part, self._cuda.device.kinds([piece.storage for piece in part]), strict=True):
                if kind == "cpu":
                    on_cpu.append(piece)
                elif kind == "cuda":
                    on_gpu.append((place, [piece]))
                else:  # MPS, XPU, …
                    piece.target(slot.tensor).copy_(piece.source())
            batches += batches_of(on_cpu, slot, place, after_s, latest_s)
        cuda = self._cuda.begin(on_gpu, slot.tensor, buffered=buffered) if on_gpu else None
        return batches, cuda, enqueue_s

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            try:
                if (job := self._next()) is None:
                    return
                job.step_in_background()
            except Exception:  # such as want of memory: what is left is copied in a moment, or by the next step
                say(logging.ERROR, "unexpected", UNEXPECTED, about="copying during training", exc_info=True)
                if self._closed:
                    return
                time.sleep(_AGAIN_S)

    def _next(self) -> CopyJob | None:
        """A job with something to copy now, as soon as there is one; ``None`` at the end."""
        with self._wake:
            while True:
                due = [(job.ready_s(), job) for job in self._jobs]
                self._jobs = [job for ready_s, job in due if ready_s < NEVER]
                soonest_s = min((ready_s for ready_s, _ in due), default=NEVER)
                for ready_s, job in due:
                    if ready_s <= self._clock():
                        return job
                if self._closed and not self._jobs:
                    return None
                self._wake.wait(soonest_s - self._clock() if soonest_s < NEVER else None)
