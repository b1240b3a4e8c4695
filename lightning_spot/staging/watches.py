"""Tensors that must not change until they are copied, by torch's counts of the writes to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lightning_spot.staging.samples import Samples


class Watches:
    """Tensors that must not change until they are copied; on any device, and kept alive meanwhile.

    Args:
        tensors: the tensors.
        versions: their version counters when the copy was ordered.
        samples: some of their bytes at that time; ``None`` where the copy begins at once, and notes them.

    Attributes:
        samples: likewise.
    """

    __slots__ = ("_tensors", "_versions", "samples")

    def __init__(
        self, tensors: Sequence[torch.Tensor] = (), versions: Sequence[int] = (), samples: Samples | None = None
    ) -> None:
        self._tensors, self.samples = list(tensors), samples
        self._versions = list(versions)

    def __len__(self) -> int:
        return len(self._tensors)

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version]


def watch(tensors: Iterable[torch.Tensor], samples: Samples | None = None) -> Watches:
    """Note the version counters of ``tensors``. Inference tensors have none and are left out: nothing tracks them."""
    watched = [tensor for tensor in tensors if not tensor.is_inference()]
    return Watches(watched, [tensor._version for tensor in watched], samples)
