"""What goes into one slot: batches, each of which one thread copies in one go, and the job that they belong to."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from lightning_spot.capture.cuda import CudaCopy
from lightning_spot.capture.tensors import Watches
from lightning_spot.errors import SpotError
from lightning_spot.snapshot.pieces import Piece, between, gone, outside
from lightning_spot.threads import processors, work_together

LEAST_BATCH_BYTES = 16 * 1024 * 1024
"""One thread copies at least so much in one go."""

SMALL_BYTES = 32 * 1024
"""So much is copied in less time than it takes to hand a tensor over to torch, or to get the GIL back."""

_MOST_THREADS = 4
NOW, NEVER = float("-inf"), float("inf")
memmove = ctypes.CDLL(None).memmove  # lets go of the GIL
memmove_small = ctypes.PyDLL(None).memmove  # keeps it
memmove.argtypes = memmove_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = memmove_small.restype = None


class SlotView:
    """A slot as the trainer sees it: its mapping, and where that lies in this process.

    Attributes:
        map: the shared mapping.
        address: address of its first byte.
        nbytes: its size.
        tensor: the mapping as a uint8 tensor of shape ``(capacity,)`` on the CPU; shares the memory.
    """

    def __init__(self, shared: mmap.mmap) -> None:
        self.map = shared
        # The tensor, and each that shares its memory, keeps the view, and as long as that is there nobody unmaps it. Of
        # the mapping itself torch would keep the object only, which may be closed.
        self.tensor = torch.frombuffer(memoryview(shared), dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.nbytes = len(shared)


class Batch:
    """Some storages, or parts of them, and their places: what one thread copies in one go.

    Args:
        pieces: to copy, in one or several rows.
        slot: where to.
        place: of the iteration, until which it is held.
        after_s: it is held so long after that.
        ready_s: when background threads may take it, whatever was reached.

    Attributes:
        taken_by: number of the thread that copies it; ``None`` while nobody does.
    """

    def __init__(
        self,
        pieces: Sequence[Sequence[Piece]],
        slot: SlotView,
        place: int,
        after_s: float,
        ready_s: float,
    ) -> None:
        self.taken_by: int | None = None
        self._pieces = pieces
        self._slot = slot
        self.place, self.after_s, self.ready_s = place, after_s, ready_s

    def at_once(self) -> None:
        """Copy all of it without the GIL in between, which the training thread has for milliseconds at a time."""
        if not hasattr(torch, "_foreach_copy_"):  # private; only time depends on it
            self.helping()
            return
        self._move(SMALL_BYTES)
        if large := [piece for piece in itertools.chain(*self._pieces) if piece.nbytes > SMALL_BYTES]:
            targets = [piece.target(self._slot.tensor) for piece in large]
            torch._foreach_copy_(targets, [piece.source() for piece in large])

    def helping(self) -> None:
        """Copy it on the calling thread alone: no second team of threads beside those of training."""
        self._move()

    def _move(self, most: float = NEVER) -> None:
        """Copy pieces of up to so many bytes: thousands of small ones, by a thread that keeps the GIL."""
        base, room = self._slot.address, self._slot.nbytes
        for storage, place, nbytes, start in itertools.chain(*self._pieces):
            if nbytes > most:
                continue
            if storage.nbytes() < start + nbytes:
                raise gone()
            if not 0 <= place <= place + nbytes <= room:  # thousands of these take 20 µs
                raise outside()
            move = memmove if nbytes > SMALL_BYTES else memmove_small
            move(base + place, storage.data_ptr() + start, nbytes)


def batches_of(pieces: Sequence[Piece], slot: SlotView, place: int, after_s: float, ready_s: float) -> Iterator[Batch]:
    """Cut into batches, large ones first: those run while nobody can help; the last even the load out."""
    begin, total = 0, sum(piece.nbytes for piece in pieces)
    if 0 < total <= LEAST_BATCH_BYTES:
        yield Batch((pieces,), slot, place, after_s, ready_s)
        return
    ends = list(itertools.accumulate((piece.nbytes for piece in pieces), initial=0))
    while begin < total:
        end = min(total, begin + max((total - begin) // 3, LEAST_BATCH_BYTES))
        yield Batch(between(pieces, ends, begin, end), slot, place, after_s, ready_s)
        begin = end


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
