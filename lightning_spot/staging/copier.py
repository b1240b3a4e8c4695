"""Copies tensor storages into a slot while training goes on: CPU storages by threads, CUDA ones by a side stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING
from weakref import ReferenceType, WeakKeyDictionary, ref

from lightning_spot.image.pieces import Piece
from lightning_spot.staging.alone import LoneThread
from lightning_spot.staging.batch import (
    NEVER,
    NOW,
    Batch,
    SlotSpan,
    SlotView,
    batches_of,
    some,
    whole,
)
from lightning_spot.staging.copy_job import CopyJob, Watches, watch
from lightning_spot.staging.cuda import CudaCopier, Held, Marks

if TYPE_CHECKING:
    from lightning_spot.staging.device import Device
    from lightning_spot.staging.schedule import Schedule, Timetable

__all__ = ["Copier", "CopyJob", "Marks", "SlotView", "Watches", "watch"]

logger = logging.getLogger(__name__)

_HELD_S = 1.0
"""So long, at most, what would leave a GPU while its optimizer steps is held where iterations are not measured."""

_AGAIN_S = 0.1  # the next optimizer step waits no longer than that for a thread that has failed


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
        device: Device | None = None,
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
        after: Marks | None = None,
    ) -> CopyJob:
        """Start copying and return at once.

        CPU storages must not change until :meth:`CopyJob.wait_cpu` returned; CUDA storages may change on the current
        stream once :meth:`fence` was called after it.

        Args:
            pieces: storages and their places.
            slot: where to.
            watches: tensors to compare before and after, see :func:`watch`.
            schedule: when each of them goes; ``None`` for at once.
            after: what copies from GPUs come after, see :meth:`marks`; ``None`` for what this thread has ordered.
        """
        spans, timetable = whole(pieces), None
        if schedule is not None:
            addresses = (span.storage.data_ptr() for span in spans)
            timetable = schedule.timetable(addresses, [span.nbytes for span in spans])
        job = CopyJob(pieces, watches or Watches(), self._notify, self._clock)
        with self._wake:
            self._slots[job] = ref(slot)  # before anything goes there
        job.stands_still = timetable is not None and timetable.stands_still
        if job.stands_still:
            timetable = None
        self._fill(job, pieces, spans, slot, timetable, after, buffered=schedule is not None)
        if job.stands_still:
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
            schedule.attach(job)
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

    def marks(self) -> Marks:
        """What the calling thread has ordered on GPUs so far."""
        return self._cuda.marks()

    def reading(self, after: Marks) -> AbstractContextManager[None]:
        """Have the calling thread read from GPUs itself, after what another one had ordered, and beside what it does.

        Raises:
            SpotError: if one fails.
        """
        return self._cuda.reading(after)

    def fence(self) -> None:
        """Make the current CUDA stream wait for the copies ordered so far; the calling thread does not wait."""
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

    def _fill(
        self,
        job: CopyJob,
        pieces: Sequence[Piece],
        spans: Sequence[SlotSpan],
        slot: SlotView,
        timetable: Timetable | None,
        after: Marks | None,
        *,
        buffered: bool,
    ) -> None:
        """Give a job what it has to copy, held until its place in the iteration is reached or its time is up."""
        latest_s = NOW if timetable is None else self._clock() + timetable.limit_s
        parts = [(0, 0.0, spans)]
        if timetable is not None:
            parts = [(part.point, part.after_s, some(pieces, part.spans)) for part in timetable.partitions]
        batches: list[Batch] = []
        on_gpu: list[Held] = []
        for place, after_s, spans in parts:
            on_cpu: list[SlotSpan] = []
            for span, kind in zip(spans, self._cuda.device.kinds([span.storage for span in spans]), strict=True):
                if kind == "cpu":
                    on_cpu.append(span)
                elif kind == "cuda":
                    on_gpu.append((place, [span]))
                else:  # MPS, XPU, …: no side stream is known here; copied in order, by the caller
                    span.target(slot.tensor).copy_(span.source())
            batches += batches_of(on_cpu, slot, place, after_s, latest_s)
        cuda = self._cuda.begin(on_gpu, slot.tensor, buffered=buffered, after=after) if on_gpu else None
        job.hold(batches, cuda, latest_s if timetable is not None else self._clock() + _HELD_S)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _work(self) -> None:
        is_said = False
        while True:
            try:
                if (job := self._next()) is None:
                    return
                job.step_in_background()
            except Exception:  # such as want of memory: what is left is copied in a moment, or by who waits for it
                if not is_said:
                    logger.exception("lightning_spot: copying beside training failed; it is tried again")
                is_said = True
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
