"""What one thread copies from the CPU into a slot in one go: spans of storages, cut into batches, and moved."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_spot.errors import SpotError
from lightning_spot.image.pieces import Piece
from lightning_spot.staging.partitions import Span

_LEAST_BATCH_BYTES = 16 * 1024 * 1024
_SMALL_BYTES = 32 * 1024  # copied in less time than it takes to hand a tensor over to torch, or to get the GIL back
NOW, NEVER = float("-inf"), float("inf")
memmove = ctypes.CDLL(None).memmove  # lets go of the GIL
memmove_small = ctypes.PyDLL(None).memmove  # keeps it
memmove.argtypes = memmove_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = memmove_small.restype = None


class SlotSpan(NamedTuple):
    """Some bytes of a storage and their place in a slot.

    Attributes:
        storage: they belong to; on any device.
        start: first byte in it.
        place: first byte in the slot.
        nbytes: length.
    """

    storage: torch.UntypedStorage
    start: int
    place: int
    nbytes: int

    def source(self) -> torch.Tensor:
        """The bytes, as a uint8 tensor that shares them.

        Raises:
            SpotError: if the storage was made smaller since, or its memory given back.
        """
        if not 0 <= self.start <= self.start + self.nbytes <= self.storage.nbytes():
            raise gone()
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, self.start, (self.nbytes,), (1,))

    def target(self, slot: torch.Tensor) -> torch.Tensor:
        """Their place in the slot, as a uint8 tensor that shares it.

        Raises:
            SpotError: if they do not all lie in it: a slice would be cut short.
        """
        if not 0 <= self.place <= self.place + self.nbytes <= slot.numel():
            raise outside()
        return slot[self.place : self.place + self.nbytes]

    def cut(self, nbytes: int) -> tuple[SlotSpan, SlotSpan]:
        """The first ``nbytes`` and the rest."""
        rest = SlotSpan(self.storage, self.start + nbytes, self.place + nbytes, self.nbytes - nbytes)
        return self._replace(nbytes=nbytes), rest


def between(spans: Sequence[SlotSpan], ends: Sequence[int], begin: int, end: int) -> Sequence[Sequence[SlotSpan]]:
    """What lies between two places, counted in bytes over all spans; ``ends`` says where each begins."""
    first, behind = bisect.bisect_right(ends, begin) - 1, bisect.bisect_left(ends, end)
    if (begin, end) == (ends[first], ends[behind]):
        return (spans[first:behind],)
    if behind - first == 1:
        return ([spans[first].cut(end - ends[first])[0].cut(begin - ends[first])[1]],)
    head, tail = spans[first].cut(begin - ends[first])[1], spans[behind - 1].cut(end - ends[behind - 1])[0]
    return ([head], spans[first + 1 : behind - 1], [tail])


def gone() -> SpotError:
    """What to raise of a storage that is shorter than it was: beyond its end is memory of somebody else, or none."""
    return SpotError("its storage was resized, or its memory given back, before it was copied")


def outside() -> SpotError:
    """What to raise of a place that is not in the slot: what lies beside it is memory of somebody else, or none."""
    return SpotError("its place is not in the slot: that is smaller than what was laid out")


def address_in(storage: torch.UntypedStorage, start: int, nbytes: int) -> int:
    """Address of some bytes of a storage on the CPU.

    Raises:
        SpotError: if it has not as many.
    """
    if not 0 <= start <= start + nbytes <= storage.nbytes():
        raise gone()
    return storage.data_ptr() + start


def whole(pieces: Iterable[Piece]) -> list[SlotSpan]:
    """Whole pieces."""
    return [SlotSpan(piece.storage, piece.start, piece.offset, piece.nbytes) for piece in pieces]


def some(pieces: Sequence[Piece], spans: Iterable[Span]) -> list[SlotSpan]:
    """Parts of pieces, which ``spans`` name by number."""
    found = ((pieces[span.piece], span) for span in spans)
    return [
        SlotSpan(piece.storage, piece.start + span.start, piece.offset + span.start, span.nbytes)
        for piece, span in found
    ]


def cut_at(span: SlotSpan, every: int) -> Iterator[SlotSpan]:
    """Cut a span where its place in the slot is a multiple of ``every``."""
    while (until := every - span.place % every) < span.nbytes:
        first, span = span.cut(until)
        yield first
    yield span


def cut_end(spans: Sequence[SlotSpan], nbytes: int) -> tuple[list[SlotSpan], list[SlotSpan]]:
    """Cut the last ``nbytes`` off: what is before them, and they."""
    before, end = list(spans), []
    while before and nbytes > 0:
        span = before.pop()
        if span.nbytes > nbytes:
            first, span = span.cut(span.nbytes - nbytes)
            before.append(first)
        end.append(span)
        nbytes -= span.nbytes
    return before, end[::-1]


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

    def at(self, place: int, nbytes: int) -> int:
        """Address of some bytes of it.

        Raises:
            SpotError: if they do not all lie in it.
        """
        if not 0 <= place <= place + nbytes <= self.nbytes:
            raise outside()
        return self.address + place


class Batch:
    """Some storages, or parts of them, and their places: what one thread copies in one go.

    Args:
        spans: to copy, in one or several rows.
        slot: where to.
        place: of the iteration, until which it is held.
        after_s: it is held so long after that.
        ready_s: when background threads may take it, whatever was reached.

    Attributes:
        taken_by: number of the thread that copies it; ``None`` while nobody does.
    """

    def __init__(
        self,
        spans: Sequence[Sequence[SlotSpan]],
        slot: SlotView,
        place: int,
        after_s: float,
        ready_s: float,
    ) -> None:
        self.taken_by: int | None = None
        self._spans = spans
        self._slot = slot
        self.place, self.after_s, self.ready_s = place, after_s, ready_s

    def at_once(self) -> None:
        """Copy all of it without the GIL in between, which the training thread holds for milliseconds at a time."""
        if not hasattr(torch, "_foreach_copy_"):  # private; only time depends on it
            self.helping()
            return
        self._move(_SMALL_BYTES)
        if large := [span for span in itertools.chain(*self._spans) if span.nbytes > _SMALL_BYTES]:
            targets = [span.target(self._slot.tensor) for span in large]
            torch._foreach_copy_(targets, [span.source() for span in large])

    def helping(self) -> None:
        """Copy it on the calling thread alone: no second team of threads beside those of training."""
        self._move()

    def _move(self, most: float = NEVER) -> None:
        """Copy spans of up to so many bytes."""
        for target, source, nbytes in self._moves(most):  # thousands of small ones, by a thread that keeps the GIL
            (memmove if nbytes > _SMALL_BYTES else memmove_small)(target, source, nbytes)

    def _moves(self, most: float) -> Iterator[tuple[int, int, int]]:
        base, room = self._slot.address, self._slot.nbytes
        for storage, start, place, nbytes in itertools.chain(*self._spans):
            if nbytes > most:
                continue
            if storage.nbytes() < start + nbytes:
                raise gone()
            if not 0 <= place <= place + nbytes <= room:  # thousands of these take 20 µs
                raise outside()
            yield base + place, storage.data_ptr() + start, nbytes


def batches_of(
    spans: Sequence[SlotSpan], slot: SlotView, place: int, after_s: float, ready_s: float
) -> Iterator[Batch]:
    """Cut into batches, large ones first: those run while nobody can help; the last even the load out."""
    begin, total = 0, sum(span.nbytes for span in spans)
    if 0 < total <= _LEAST_BATCH_BYTES:
        yield Batch((spans,), slot, place, after_s, ready_s)
        return
    ends = list(itertools.accumulate((span.nbytes for span in spans), initial=0))
    while begin < total:
        end = min(total, begin + max((total - begin) // 3, _LEAST_BATCH_BYTES))
        yield Batch(between(spans, ends, begin, end), slot, place, after_s, ready_s)
        begin = end
