"""Copies on their way into one slot: what is left of them, who may take it when, and whether the tensors held still."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from lightning_spot.errors import SpotError
from lightning_spot.image.pieces import Piece
from lightning_spot.staging.batch import NEVER, NOW, Batch
from lightning_spot.staging.cuda import CudaCopy
from lightning_spot.threads import processors, work_together

logger = logging.getLogger(__name__)

_MOST_THREADS = 4


class Watches:
    """Tensors that must not change until they are copied; on any device, and kept alive meanwhile.

    Args:
        tensors: the tensors.
        versions: their version counters when the copy was ordered.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor] = (), versions: Sequence[int] = ()) -> None:
        self._tensors = list(tensors)
        self._versions = list(versions)

    def __len__(self) -> int:
        return len(self._tensors)

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version]


def watch(tensors: Iterable[torch.Tensor]) -> Watches:
    """Note the version counters of ``tensors``. Inference tensors have none and are left out: nothing tracks them."""
    watched = [tensor for tensor in tensors if not tensor.is_inference()]
    return Watches(watched, [tensor._version for tensor in watched])


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
        self._lock = threading.Lock()
        self._handed_over = threading.Event()
        self._cuda: CudaCopy | None = None
        self._before: CopyJob | None = None
        self._is_ordered = True
        self._order_s = NEVER
        self._is_settled = False
        self._ordering = threading.Lock()
        self._error: BaseException | None = None

    def release(self, place: int) -> None:
        """Training has come to ``place`` in its iteration: what was held until then is copied now, or soon."""
        now_s = self._clock()
        with self._lock:
            for task in self._tasks:
                if task.place <= place:
                    task.ready_s = min(task.ready_s, now_s + task.after_s)
        if (cuda := self._cuda) is not None:
            self._order(lambda: cuda.release(place))
        self._woken()

    def wait_cpu(self) -> None:
        """Help with the CPU storages and return when all of them are in the slot, and all others are on their way.

        Nothing is held any more. CUDA storages may change on the current stream after :meth:`Copier.fence`.

        Raises:
            SpotError: if a copy failed.
        """
        if self._cuda is not None:
            self._order(self._cuda.release_all)
        while self._step(Batch.helping, NEVER):
            pass
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
            for job in (self._before, self):
                if job is not None and job._cuda is not None:
                    job._cuda.wait()
        self.settle()
        self._check()
        self.pieces = []
        if self._before is not None:
            self._before.pieces = []
            self._before = None

    def fail(self, error: Exception) -> None:
        """Nobody may use what was copied, or is yet: the calling thread trains on, and did not wait for it."""
        self._error = error
        here = threading.get_ident()
        with self._lock:
            for task in self._tasks:
                if task.taken_by == here:  # the background ends what this thread was at
                    task.taken_by = None
        self._woken()

    def follow(self, first: CopyJob) -> None:
        """Have :meth:`wait` wait, too, for what another job has ordered on GPUs: its :meth:`wait_cpu` does not.

        Its storages are kept alive until then. One that only the snapshot had may be of another stream than the one
        that waits for the copy (:meth:`Copier.fence`): its memory would be used again too early.
        """
        self._before = first

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
        self._cuda, self._order_s = cuda, latest_s
        self._is_ordered = cuda is None
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

        def work() -> None:
            while self._step(Batch.helping, NEVER):
                pass

        work_together(work, min(_MOST_THREADS, processors()), "spot-copy")

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
        if self._cuda is not None and self._order_s <= now_s:
            self._order(self._cuda.release_rest)
        self._step(Batch.at_once, now_s)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do for background threads."""
        return self._handed_over.is_set()

    def ready_s(self) -> float:
        """When something may be done next, on the clock of the background threads; infinity if nothing is left."""
        with self._lock:
            ready_s = min((task.ready_s for task in self._tasks if task.taken_by is None), default=NEVER)
            return ready_s if self._is_ordered else min(ready_s, self._order_s)

    def _order(self, order: Callable[[], None]) -> None:
        """Order copies on a GPU."""
        with self._ordering:
            cuda = self._cuda
            if cuda is None or self._is_ordered:
                return
            try:
                order()
            except BaseException as error:  # told to whoever waits
                self._error = error
                if not isinstance(error, Exception):  # Ctrl-C is for the thread it came to
                    raise
            finally:
                self._is_ordered = cuda.is_ordered
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

    def _end_if_done(self) -> None:
        """Tell whoever waits if nothing is left; said again each time, since Ctrl-C may have come in between."""
        with self._lock:
            is_done = self._is_ordered and not self._tasks
        if is_done:
            self._handed_over.set()
