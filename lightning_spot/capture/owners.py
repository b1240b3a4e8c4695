"""The tensors whose counts of writes tell of a storage, and what these say."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_spot.capture.tensors import local_of

Owners = Mapping[int, Sequence[torch.Tensor]]
"""Tensors whose counts of writes count, by the address of their storage."""

NOBODY: Owners = {}

Mark = tuple[int, ...]
"""What is the same as long as the tensors of a storage are, and are not written to."""

COUNTED_S = 0.05
"""A write may be under way whose count is noted when it ends: so long later it is, as a rule."""

_UNCOUNTED = itertools.count()


def owners_of(owned: Owners, kept: Owners) -> Owners:
    """All owners: a storage may have some of either."""
    owners = dict(owned)
    for address, tensors in kept.items():
        found = owners.setdefault(address, tensors)
        if len(tensors) == 1 and tensors[0] is found[0]:  # so it is nearly always
            continue
        if more := [tensor for tensor in tensors if all(tensor is not other for other in found)]:
            owners[address] = [*found, *more]
    return owners


class StorageOwner:
    """The tensors whose counts tell of a storage; but for parameters, they are not kept alive.

    Where there is a weak reference to a parameter, ``torch.utils.swap_tensors`` fails, and with it what torch does by
    it (``module.to()``, as ``torch.__future__`` may have it). A ``DTensor`` is known by what this rank has of it.

    Attributes:
        number: begins each :meth:`mark`.
        only: gives the tensor, if it is the only one and writes to it are counted; ``None`` if not, or if it is gone.
    """

    __slots__ = ("_counts", "_known", "number", "only")

    def __init__(self, tensors: Sequence[torch.Tensor], number: int) -> None:
        self._known = [_reference(local_of(tensor)) for tensor in tensors]
        self._counts = not any(tensor.is_inference() for tensor in tensors)
        self.number = number
        is_only = self._counts and len(tensors) == 1
        self.only: Callable[[], torch.Tensor | None] = self._known[0] if is_only else _nothing

    def is_that_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors."""
        return len(self._known) == len(tensors) and all(
            one() is local_of(other) for one, other in zip(self._known, tensors, strict=True)
        )

    def mark(self, tensors: Sequence[torch.Tensor]) -> Mark:
        """What stays the same as long as the tensors do, and are not written to."""
        if not self._counts:
            return (self.number, next(_UNCOUNTED))  # like no other: nothing counts writes to it
        return (self.number, *[tensor._version for tensor in tensors])

    def is_still(self, tensors: Sequence[torch.Tensor], mark: Mark) -> bool:
        """Whether nothing was written to the tensors since they had a mark; waits until what is under way counts."""
        time.sleep(COUNTED_S)
        return self.mark(tensors) == mark


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    return (lambda: tensor) if isinstance(tensor, torch.nn.Parameter) else weakref.ref(tensor)


def _nothing() -> None:
    return None
