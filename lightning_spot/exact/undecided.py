"""What one rank has logged in an epoch that several go on with: whether they reduce it is known when they log it again.

Without other ranks, Lightning notes of no value that it is to be reduced. So each of the new ranks has all that was
logged, as of something that is not reduced. When it is logged for the first time, Lightning compares how: where it is
reduced, the first rank keeps the sum, and the others let go of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lightning_spot.exact import private


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an accumulator is. Lightning copies what names it, and a copy names the same one.

    Attributes:
        results: all accumulators.
        key: of this one.
        is_first: whether this rank is the first.
    """

    results: Any
    key: str
    is_first: bool

    def __deepcopy__(self, _: Any) -> _Place:
        return self

    def decide(self, sync: Any) -> None:
        """It is logged, and reduced in this way."""
        item = self.results[self.key]
        item.meta.sync = sync
        if not getattr(sync, private.SHOULD_SYNC) or not item.is_tensor:
            return
        if item.meta.is_mean_reduction:
            # Lightning takes the mean of this over ranks, whole numbers where these are: it would be cut off.
            item.cumulated_batch_size = self._part(item.cumulated_batch_size.float())
        if item.meta.is_mean_reduction or item.meta.is_sum_reduction:  # of others, each rank may have the result
            item.value = self._part(item.value)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.is_first else torch.zeros_like(whole)


def leave_open(results: Any, key: str, *, is_first: bool) -> None:
    """Have it decided by the next call of ``self.log`` how an accumulator is reduced.

    Args:
        results: Lightning's accumulators.
        key: of this one.
        is_first: whether this rank is the first.
    """
    meta = results[key].meta
    sync = meta.sync
    kind: Any = type(sync)
    opened = _open(kind)(sync.fn, getattr(sync, private.SHOULD_SYNC), sync.rank_zero_only)
    opened.place = _Place(results, key, is_first)
    meta.sync = opened


def is_open(sync: Any) -> bool:
    """Whether it is not decided yet."""
    return hasattr(sync, "place")


@cache
def _open(kind: Any) -> Any:
    """A kind of Lightning's note of how values are reduced that is equal to any, and becomes that."""

    def equals(self: Any, other: Any) -> bool:
        if type(other) is kind:
            self.place.decide(other)
        return isinstance(other, kind)

    return type("Open", (kind,), {"__eq__": equals, "__hash__": None})
