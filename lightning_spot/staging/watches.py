"""Tensors that must not change until they are copied, by torch's counts of the writes to them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import torch


class Watches:
    """Tensors that must not change until they are copied; on any device, and kept alive meanwhile.

    Args:
        tensors: the tensors.
        versions: their version counters when the copy was ordered.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[torch.Tensor] = (), versions: Sequence[int] = ()) -> None:
        self._tensors, self._versions = tensors, versions

    def __len__(self) -> int:
        return len(self._tensors)

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:  # so it is nearly always, and there may be thousands
            return []
        pairs = zip(versions, self._versions, strict=True)
        return list(itertools.compress(self._tensors, itertools.starmap(operator.ne, pairs)))


def watch(tensors: Iterable[torch.Tensor]) -> Watches:
    """Note the version counters of ``tensors``. Inference tensors have none and are left out: nothing tracks them."""
    watched = list(tensors)
    try:
        versions = [tensor._version for tensor in watched]
    except RuntimeError:  # to ask each of them first takes longer than all else
        watched = [tensor for tensor in watched if not tensor.is_inference()]
        versions = [tensor._version for tensor in watched]
    return Watches(watched, versions)
