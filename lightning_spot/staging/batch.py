"""What one thread copies from the CPU into a slot in one go: how spans are cut into such batches, and moved."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterator, Sequence

import torch

from lightning_spot.staging.moving import memmove, memmove_small, move_past_caches
from lightning_spot.staging.spans import SlotSpan, between, gone, outside

_LEAST_BATCH_BYTES = 16 * 1024 * 1024
_SMALL_BYTES = 32 * 1024  # copied in less time than it takes to hand a tensor over to torch, or to get the GIL back
NOW, NEVER = float("-inf"), float("inf")


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
        past_caches: whether it is copied past them.

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
        past_caches: bool = False,
    ) -> None:
        self.taken_by: int | None = None
        self._spans = spans
        self._slot = slot
        self._past_caches = past_caches
        self.place, self.after_s, self.ready_s = place, after_s, ready_s

    def at_once(self) -> None:
        """Copy all of it without the GIL in between, which the training thread holds for milliseconds at a time."""
        if self._past_caches or not hasattr(torch, "_foreach_copy_"):  # private; only time depends on it
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
        if self._past_caches:
            move_past_caches(self._moves(most), self._slot.address, self._slot.nbytes)
            return
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
    spans: Sequence[SlotSpan], slot: SlotView, place: int, after_s: float, ready_s: float, past_caches: bool = False
) -> Iterator[Batch]:
    """Cut into batches, large ones first: those run while nobody can help; the last even the load out."""
    begin, total = 0, sum(span.nbytes for span in spans)
    if 0 < total <= _LEAST_BATCH_BYTES:
        yield Batch((spans,), slot, place, after_s, ready_s, past_caches)
        return
    ends = list(itertools.accumulate((span.nbytes for span in spans), initial=0))
    while begin < total:
        end = min(total, begin + max((total - begin) // 3, _LEAST_BATCH_BYTES))
        yield Batch(between(spans, ends, begin, end), slot, place, after_s, ready_s, past_caches)
        begin = end
