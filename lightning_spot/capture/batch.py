"""What one thread copies from the CPU into a slot in one go: pieces, cut into batches, and moved."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence

import torch

from lightning_spot.snapshot.pieces import Piece, between, gone, outside

LEAST_BATCH_BYTES = 16 * 1024 * 1024
"""One thread copies at least so much in one go."""

SMALL_BYTES = 32 * 1024
"""So much is copied in less time than it takes to hand a tensor over to torch, or to get the GIL back."""

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
