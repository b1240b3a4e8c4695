"""Tensors of which each rank has a range of the elements, in the order of rows: how FSDP1 shards parameters.

FSDP1 puts parameters one behind the other into a flat one, and cuts that into equal parts. ``torch.distributed``'s
checkpoints know boxes only, and so a range is written as the few boxes that it is made of.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

Range = tuple[int, int]
"""The first element, and the one behind the last; ``(0, 0)`` for none."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in each dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """What this rank has of a tensor.

    Attributes:
        local: its elements, in one dimension.
        shape: of the whole tensor.
        ranges: of its elements, for each rank.
        rank: this one.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    rank: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.local.dtype

    def boxes(self) -> tuple[Box, ...]:
        """What this rank has of it."""
        return boxes(self.shape, *self.ranges[self.rank])

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A view of one of these boxes."""
        first = self._first(offsets)
        return self.local[first : first + prod(sizes)].view(tuple(sizes))

    def _first(self, offsets: Sequence[int]) -> int:
        """The first element of a box in what is here."""
        first = 0
        for offset, size in zip(offsets, self.shape, strict=True):
            first = first * size + offset
        return first - self.ranges[self.rank][0]


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for an item that cannot be saved in shards.

    Attributes:
        reason: why, and what to do.
    """

    reason: str


@functools.lru_cache(maxsize=65536)
def boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes that a range of a tensor's elements is made of: at most twice as many as it has dimensions."""
    return tuple(_boxes(shape, start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if stop <= start:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    (first, before), (last, behind) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _within(shape, first, before, behind)
        return
    if before:
        yield from _within(shape, first, before, row)
        first += 1
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if behind:
        yield from _within(shape, last, 0, behind)


def _within(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """The boxes of a range in what has one index of the first dimension."""
    for offsets, sizes in _boxes(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


@functools.lru_cache(maxsize=1024)
def ranges_of(numels: tuple[int, ...], padding: tuple[bool, ...], shards: int) -> tuple[tuple[Range, ...], ...]:
    """What each shard of a flat parameter has of the parameters in it.

    Args:
        numels: numbers of elements of what lies one behind the other.
        padding: which of it is no parameter.
        shards: into how many it is cut.

    Returns:
        for each parameter, the range of its elements that each shard has.
    """
    each = -(-sum(numels) // shards)
    found, at = [], 0
    for numel, is_padding in zip(numels, padding, strict=True):
        if not is_padding:
            ends = [(max(shard * each - at, 0), min((shard + 1) * each - at, numel)) for shard in range(shards)]
            found.append(tuple((start, stop) if start < stop else (0, 0) for start, stop in ends))
        at += numel
    return tuple(found)
