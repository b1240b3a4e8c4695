"""Who writes which range of a ``model.ckpt`` of DDP: every rank plans the same, by itself.

All ranks hold the same parameters and states of optimizers. These storages begin the file, in the order in which the
optimizers hold them, so that each rank computes their places by itself. The file is cut there, at multiples of
the size of a part, into about equal ranges; the last one, with all that follows, is rank 0's.
"""

from __future__ import annotations

import ctypes
import functools
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_spot.image.parts import checksum

RANGE_BYTES = 64 * 1024 * 1024
"""For less, no further rank writes: the bytes of a range are to be worth a slot."""

_SAMPLES, _SAMPLE_BYTES = 32, 64


def ranges_for(nbytes: int, ranks: Sequence[int], least_bytes: int = RANGE_BYTES) -> tuple[int, ...]:
    """The ranks that write a range of a file, rank 0 last.

    Args:
        nbytes: of the storages that all ranks hold alike, about.
        ranks: that could, rank 0 among them.
        least_bytes: for each of them.
    """
    others = [rank for rank in ranks if rank]
    return (*others[: max(0, -(-nbytes // least_bytes) - 1)], 0)


@dataclass(frozen=True, slots=True)
class RangePlan:
    """How a file is cut.

    Attributes:
        ranges: the ranks that write one, in the order of the file; the last one is rank 0's.
        cuts: where each range begins. The last one ends where the file does.
        digest: of all that the ranks must agree on.
    """

    ranges: tuple[int, ...]
    cuts: tuple[int, ...]
    digest: str

    def range_of(self, rank: int, nbytes: int) -> tuple[int, int] | None:
        """First byte of what a rank writes of the file, and behind the last one; ``None`` if it writes nothing.

        Args:
            rank: which.
            nbytes: of the file; on other ranks than 0 any number behind the last cut.
        """
        if rank not in self.ranges:
            return None
        number = self.ranges.index(rank)
        return self.cuts[number], (*self.cuts, nbytes)[number + 1]


def plan_ranges(
    sizes: Sequence[int], dtypes: Sequence[str], ranges: Sequence[int], part_bytes: int, seal: Sequence[str]
) -> RangePlan:
    """Plan a file.

    Args:
        sizes: of the storages that all ranks hold alike, in their order.
        dtypes: of their elements.
        ranges: the ranks that write a range each, rank 0 last. Where a part is too large for so many, the last of the
            others write none.
        part_bytes: size of a part.
        seal: what else has to be the same on all ranks.
    """
    nbytes = sum(sizes)
    count = max(1, min(len(ranges), nbytes // part_bytes))
    cuts = tuple(number * nbytes // count // part_bytes * part_bytes for number in range(count))
    facts = [str(part_bytes), *map(str, cuts), *map(str, sizes if count > 1 else ()), *(dtypes if count > 1 else ())]
    return RangePlan((*ranges[: count - 1], 0), cuts, checksum(" ".join([*facts, *seal]).encode()))


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """What torch calls a dtype."""
    return str(dtype).removeprefix("torch.")


def sample(tensors: Sequence[torch.Tensor], seed: str) -> str:
    """Checksums of a few bytes of what this rank holds, at places that ``seed`` tells: equal states give equal ones.

    Tensors on a GPU are not looked at: that would wait for it.
    """
    dice = random.Random(seed)
    on_cpu = [tensor for tensor in tensors if tensor.is_cpu]
    sums = []
    for tensor in dice.sample(on_cpu, min(len(on_cpu), _SAMPLES)):
        storage = tensor.untyped_storage()
        start = dice.randrange(max(1, storage.nbytes() - _SAMPLE_BYTES))
        data = ctypes.string_at(storage.data_ptr() + start, min(_SAMPLE_BYTES, storage.nbytes()))
        sums.append(f"{zlib.crc32(data):08x}")
    return ".".join(sums)
