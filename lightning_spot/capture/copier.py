"""Copies tensor storages into a slot while training goes on: CPU storages by threads, CUDA ones by a side stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from lightning_spot.capture.batch import NEVER, NOW, Batch, SlotView, batches_of
from lightning_spot.capture.cuda import CudaCopier, CudaCopy, Held
from lightning_spot.capture.tensors import Watches
from lightning_spot.errors import SpotError
from lightning_spot.say import UNEXPECTED, say
from lightning_spot.snapshot.pieces import Piece
from lightning_spot.threads import processors, work_together

if TYPE_CHECKING:
    from lightning_spot.capture.device import Cuda
    from lightning_spot.capture.schedule import Schedule, Timetable

_MOST_THREADS = 4
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


class CopyJob:
    """Copies on their way into one slot, some of them held until training has come to their place in the iteration.

    The thread that cannot go on without them calls :meth:`wait_cpu` and helps. Whatever goes wrong with one of them
    goes to :meth:`fail`; from there on each wait raises it.

    Args:
        pieces: what is copied.
        watches: tensors to compare before and after.
        batches: of the pieces on the CPU.
        cuda: copies those on GPUs.
        enqueue_s: when a background thread enqueues what of these is held.
        woken: tells the background threads that there is something to do.
        clock: of the background threads, seconds.

    Attributes:
        moved: addresses of storages that changed before they were copied; if any, the copy is worthless.
        pieces: what is copied; let go when it is done, so that no storage is kept alive.
        stands_still: whether training stands still until the snapshot is sealed.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        watches: Watches,
        batches: Iterable[Batch],
        cuda: CudaCopy | None,
        enqueue_s: float,
        *,
        woken: Callable[[], None],
        clock: Callable[[], float],
        stands_still: bool,
    ) -> None:
        self.moved: frozenset[int] = frozenset()
        self.pieces: Sequence[Piece] = list(pieces)
        self.stands_still = stands_still
        self._watches = watches
        self._is_validated = False
        self._woken, self._clock = woken, clock
        self._lock = threading.Lock()  # of the batches, and of what is validated
        self._batches = list(batches)
        self._enqueuing = threading.RLock()  # which may take long
        self._cuda, self._is_enqueued, self._enqueue_s = cuda, cuda is None, enqueue_s
        self._handed_over = threading.Event()  # all of the CPU is in the slot, and all of the GPUs is enqueued
        self._error: BaseException | None = None
        self._end_if_done()

    def release(self, place: int) -> None:
        """Training has come to ``place`` in its iteration: what was held until then is copied now, or soon."""
        now_s = self._clock()
        with self._lock:
            for batch in self._batches:
                if batch.place <= place:
                    batch.ready_s = min(batch.ready_s, now_s + batch.after_s)
        self._enqueue(lambda cuda: cuda.release(place))
        self._woken()

    def wait_cpu(self) -> None:
        """Help with the CPU storages and return when all of them are in the slot, and all others are on their way.

        Nothing is held any more. CUDA storages may change on the current stream after :meth:`Copier.fence`.

        Raises:
            SpotError: see :meth:`fail`.
        """
        self._enqueue(CudaCopy.release_all)
        self._help()
        self._end_if_done()
        self._handed_over.wait()
        self._raise_failure()

    def wait(self) -> None:
        """Return when every byte is in the slot, those of CUDA storages included, and was not written to meanwhile.

        Does not help: for the background.

        Raises:
            SpotError: see :meth:`fail`.
        """
        self._handed_over.wait()
        if self._cuda is not None:  # also after a failure: the slot is given back then, and nothing may come to it
            self._cuda.wait()
        self.validate()
        self._raise_failure()
        self.pieces = []

    def fail(self, error: BaseException) -> None:
        """Copy nothing more, since the copy is worthless: each wait for it raises a ``SpotError``, of the first error.

        What other threads are copying just now still goes into the slot, and is waited for.
        """
        here = threading.get_ident()
        with self._enqueuing:
            self._is_enqueued = True
            with self._lock:
                self._error = self._error or error
                self._batches = [batch for batch in self._batches if batch.taken_by not in (None, here)]
        self._end_if_done()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise SpotError(f"copying a tensor into its slot failed: {self._error}") from self._error

    def validate(self) -> None:
        """Compare the version counters for the last time: from now on the tensors may change.

        Called when all bytes are copied, or when what changes them comes after the copies (on a CUDA stream).
        """
        with self._lock:
            if not self._is_validated:
                self.moved = frozenset(tensor.untyped_storage().data_ptr() for tensor in self._watches.changed())
                self._is_validated = True

    def release_to_background(self) -> None:
        """Hold nothing back from the background threads any more."""
        with self._lock:
            self._enqueue_s = NOW
            for batch in self._batches:
                batch.ready_s = NOW

    def copy_here(self) -> None:
        """Copy all storages on the CPU, on this thread and as many others as there are processors, up to a few.

        These take the next piece when they are done with one. In torch's team, each waits for the slowest after every
        storage, and uses its processor meanwhile.
        """
        work_together(self._help, min(_MOST_THREADS, processors()), "spot-copy")

    def give_up(self) -> None:
        """Copy no more of it, and return when the host is at none of it any more: its slot is given back."""
        self.fail(SpotError("it was given up"))
        self._handed_over.wait()

    def step_in_background(self) -> None:
        """Copy one batch that is due, if there is one; enqueue what is held for GPUs for too long."""
        now_s = self._clock()
        if self._enqueue_s <= now_s:
            self._enqueue(CudaCopy.release_rest)
        self._step(Batch.at_once, now_s)

    @property
    def is_done(self) -> bool:
        """Whether the host has nothing left to do; GPUs may still be copying."""
        return self._handed_over.is_set()

    def ready_s(self) -> float:
        """When something may be done next, on the clock of the background threads; infinity if nothing is left."""
        with self._lock:
            ready_s = min((batch.ready_s for batch in self._batches if batch.taken_by is None), default=NEVER)
            return ready_s if self._is_enqueued else min(ready_s, self._enqueue_s)

    def _enqueue(self, enqueue: Callable[[CudaCopy], bool]) -> None:
        """Enqueue copies from GPUs, if any are left; ``enqueue`` says whether none are after it."""
        with self._enqueuing:
            if self._cuda is None or self._is_enqueued:
                return
            try:
                self._is_enqueued = enqueue(self._cuda)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):  # Ctrl-C is for the thread it came to
                    raise
            finally:
                self._end_if_done()

    def _step(self, copy: Callable[[Batch], None], now_s: float) -> bool:
        """Copy one batch; ``False`` when none is left to take now.

        It counts as left until it is in the slot. A thread that was interrupted with it (Ctrl-C) may take it again.
        """
        here = threading.get_ident()
        with self._lock:
            due = (each for each in self._batches if each.ready_s <= now_s and each.taken_by in (None, here))
            if (batch := next(due, None)) is None:
                return False
            batch.taken_by = here
        try:
            copy(batch)
        except Exception as error:
            self.fail(error)
            return False
        except BaseException:  # Ctrl-C is for the thread it came to; the next thread copies this
            batch.taken_by = None
            raise
        with self._lock:
            self._batches.remove(batch)
        self._end_if_done()
        return True

    def _help(self) -> None:
        """Copy what is left to take, held or not."""
        while self._step(Batch.helping, NEVER):
            pass

    def _end_if_done(self) -> None:
        """Let the waiting threads go if nothing is left; each time again, since Ctrl-C may have come in between."""
        with self._lock:
            is_done = self._is_enqueued and not self._batches
        if is_done:
            self._handed_over.set()


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
