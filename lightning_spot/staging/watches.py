"""Tensors that must not change until they are copied, by torch's counts of the writes to them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch

from lightning_spot.image.rows import each_of, versions_of


class Watches:
    """Tensors that must not change until they are copied; on any device, and kept alive meanwhile.

    Args:
        tensors: the tensors.
        versions: their version counters when the copy was ordered, as :func:`versions_of` them.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor] = (), versions: object = None) -> None:
        self._tensors = list(tensors)
        self._versions = versions if versions is not None else versions_of([])

    def __len__(self) -> int:
        return len(self._tensors)

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        versions = versions_of(self._tensors)
        if versions == self._versions:  # so it is nearly always, and there may be thousands
            return []
        pairs = zip(each_of(versions), each_of(self._versions), strict=True)
        return list(itertools.compress(self._tensors, itertools.starmap(operator.ne, pairs)))


def watch(tensors: Iterable[torch.Tensor]) -> Watches:
    """Note the version counters of ``tensors``. Inference tensors have none and are left out: nothing tracks them."""
    watched = list(tensors)
    try:
        versions = versions_of(watched)
    except RuntimeError:  # to ask each of them first takes longer than all else
        watched = [tensor for tensor in watched if not tensor.is_inference()]
        versions = versions_of(watched)
    return Watches(watched, versions)
