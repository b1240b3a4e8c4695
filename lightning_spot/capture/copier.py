"""Copies tensor storages into a slot while training goes on: CPU storages by threads, CUDA ones by a side stream."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
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

logger = logging.getLogger(__name__)


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

    Who cannot go on without them calls :meth:`wait_cpu` and helps.

    Args:
        pieces: what is copied.
        watches: tensors to compare before and after.
        woken: tells the background threads that there is something to do.
        clock: of the background threads, seconds.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        watches: Watches,
        woken: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moved: frozenset[int] = frozenset()
        """Addresses of storages that changed before they were copied; if any, the copy is worthless."""
        self.pieces: Sequence[Piece] = list(pieces)
        """What is copied; let go when it is done, so that no storage is kept alive."""
        self.stands_still = False
        """Whether training stands still until the snapshot is sealed."""
        self._watches = watches
        self._woken, self._clock = woken, clock
        self._tasks: deque[Batch] = deque()
        self._lock = threading.Lock()  # of the tasks, and of what is settled
        self._handed_over = threading.Event()  # all of the CPU is in the slot, and all of the GPUs is ordered
        self._cuda: CudaCopy | None = None
        self._is_ordered, self._order_s = True, NEVER  # all of the GPUs is; when the background orders the rest
        self._is_settled = False
        self._ordering = threading.Lock()  # of what is ordered on GPUs, which may take long
        self._error: BaseException | None = None

    def release(self, place: int) -> None:
        """Training has come to ``place`` in its iteration: what was held until then is copied now, or soon."""
        now_s = self._clock()
        with self._lock:
            for task in self._tasks:
                if task.place <= place:
                    task.ready_s = min(task.ready_s, now_s + task.after_s)
        self._order(lambda cuda: cuda.release(place))
        self._woken()

    def wait_cpu(self) -> None:
        """Help with the CPU storages and return when all of them are in the slot, and all others are on their way.

        Nothing is held any more. CUDA storages may change on the current stream after :meth:`Copier.fence`.

        Raises:
            SpotError: if a copy failed.
        """
        self._order(CudaCopy.release_all)
        self._help()
        self._end_if_done()
        self._wait_cpu()

    def _wait_cpu(self) -> None:
        self._handed_over.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise SpotError(f"copying a tensor into its slot failed: {self._error}") from self._error

    def wait(self) -> None:
        """Return when every byte is in the slot, those of CUDA storages included, and was not written to meanwhile.

        Does not help: for the background.

        Raises:
            SpotError: if a copy failed.
        """
        try:
            self._wait_cpu()
        finally:  # also after an error: the slot is given back then, and nothing may come to it later
            if self._cuda is not None:
                self._cuda.wait()
        self.settle()
        self._check()
        self.pieces = []

    def fail(self, error: Exception) -> None:
        """Nobody may use what was copied, or is yet: the calling thread trains on, and did not wait for it."""
        self._error = error
        here = threading.get_ident()
        with self._lock:
            for task in self._tasks:
                if task.taken_by == here:  # the background ends what this thread was at
                    task.taken_by = None
        self._woken()

    def settle(self) -> None:
        """Compare the version counters for the last time: from now on the tensors may change.

        Called when all bytes are copied, or when what changes them is ordered after the copies (a CUDA stream).
        """
        with self._lock:
            if not self._is_settled:
                self.moved = frozenset(tensor.untyped_storage().data_ptr() for tensor in self._watches.changed())
                self._is_settled = True

    def hold(self, batches: Iterable[Batch], cuda: CudaCopy | None, latest_s: float = NEVER) -> None:
        """Take over what is to be copied; once, before anything else.

        Args:
            batches: from the CPU.
            cuda: from GPUs.
            latest_s: when a background thread orders what is held of that.
        """
        self._tasks.extend(batches)
        self._cuda, self._is_ordered, self._order_s = cuda, cuda is None, latest_s
        self._end_if_done()

    def release_to_background(self) -> None:
        """Hold nothing back from the background threads any more."""
        with self._lock:
            self._order_s = NOW
            for task in self._tasks:
                task.ready_s = NOW

    def copy_here(self) -> None:
        """Copy all storages on the CPU, on this thread and as many others as there are processors, up to a few.

        These take the next piece when they are done with one. In torch's team, each waits for the slowest after every
        storage, and uses its processor meanwhile.
        """
        work_together(self._help, min(_MOST_THREADS, processors()), "spot-copy")

    def give_up(self) -> None:
        """Copy no more of it, and return when nobody is at it any more: its slot is given back."""
        with self._ordering:
            self._is_ordered = True
        with self._lock:
            if not self._handed_over.is_set() and self._error is None:
                self._error = SpotError("it was given up")
            here = threading.get_ident()
            self._tasks = deque(task for task in self._tasks if task.taken_by not in (None, here))
        self._end_if_done()
        self._handed_over.wait()
        if self._cuda is not None:
            try:
                self._cuda.wait()
            except SpotError as error:
                logger.debug("nothing more comes from a GPU that has failed: %s", error)

    def step_in_background(self) -> None:
        """Copy one batch that is due, if there is one; order what is held on GPUs for too long."""
        now_s = self._clock()
        if self._order_s <= now_s:
            self._order(CudaCopy.release_rest)
        self._step(Batch.at_once, now_s)

    @property
    def is_done(self) -> bool:
        """Whether the host has nothing left to do; GPUs may still be copying."""
        return self._handed_over.is_set()

    def ready_s(self) -> float:
        """When something may be done next, on the clock of the background threads; infinity if nothing is left."""
        with self._lock:
            ready_s = min((task.ready_s for task in self._tasks if task.taken_by is None), default=NEVER)
            return ready_s if self._is_ordered else min(ready_s, self._order_s)

    def _order(self, order: Callable[[CudaCopy], bool]) -> None:
        """Order copies on GPUs, if any are left; ``order`` says whether none are after it."""
        with self._ordering:
            if self._cuda is None or self._is_ordered:
                return
            try:
                self._is_ordered = order(self._cuda)
            except BaseException as error:  # told to whoever waits
                self._error, self._is_ordered = error, True
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
            task = next((task for task in self._tasks if task.ready_s <= now_s and task.taken_by in (None, here)), None)
            if task is None:
                return False
            task.taken_by = here
        try:
            copy(task)
        except Exception as error:  # told to whoever waits
            self._error = error
        except BaseException:  # Ctrl-C is for the thread it came to; whoever comes next copies this
            task.taken_by = None
            raise
        with self._lock:
            self._tasks.remove(task)
        self._end_if_done()
        return True

    def _help(self) -> None:
        """Copy what is left to take, held or not."""
        while self._step(Batch.helping, NEVER):
            pass

    def _end_if_done(self) -> None:
        """Tell whoever waits if nothing is left; said again each time, since Ctrl-C may have come in between."""
        with self._lock:
            is_done = self._is_ordered and not self._tasks
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
        job = CopyJob(pieces, watches or Watches(), self._notify, self._clock)
        with self._wake:
            self._slots[job] = ref(slot)  # before anything goes there
        job.stands_still = timetable is not None and timetable.stands_still
        if job.stands_still:
            timetable = None
        self._fill(job, pieces, slot, timetable, buffered=schedule is not None)
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
        slot: SlotView,
        timetable: Timetable | None,
        *,
        buffered: bool,
    ) -> None:
        """Give a job what it has to copy, held until its place in the iteration is reached or its time is up."""
        latest_s = NOW if timetable is None else self._clock() + timetable.limit_s
        parts: list[tuple[int, float, Sequence[Piece]]] = [(0, 0.0, pieces)]
        if timetable is not None:
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
                else:  # MPS, XPU, …: no side stream is known here; copied in order, by the caller
                    piece.target(slot.tensor).copy_(piece.source())
            batches += batches_of(on_cpu, slot, place, after_s, latest_s)
        cuda = self._cuda.begin(on_gpu, slot.tensor, buffered=buffered) if on_gpu else None
        job.hold(batches, cuda, latest_s if timetable is not None else self._clock() + HELD_S)

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            try:
                if (job := self._next()) is None:
                    return
                job.step_in_background()
            except Exception:  # such as want of memory: what is left is copied in a moment, or by who waits for it
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
