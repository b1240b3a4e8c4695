"""OTeaCheck: the snapshot of a step is built during the backward pass of the next one, bucket by bucket.

As published: when the gradients of a bucket are merged, the parameters of that bucket (and what belongs to them) go to
the same offset of one bucket-sized buffer on the device, and from there to shared memory of the host while the
all-reduce runs. The state of a step is constant until the optimizer steps, so the snapshot is one iteration behind.

Simplified: buckets are those that DDP would make (25 MB, last parameters first) also where there is one rank; no device
buffer, partitions go to the host by a stream of their own.

Mended: the released code's partitions add up to twice the state; here each byte is copied once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning.pytorch as pl

from benchmarks.baselines.flat import Pair
from benchmarks.baselines.partitioned import Partitioned, owners

BUCKET_BYTES = 25 * 2**20
WITHOUT_GRADIENT = -1


class OTeaCheck(Partitioned):
    """See the top of this file."""

    def watch(self, trainer: pl.Trainer) -> list[Any]:
        self._bucket: dict[int, int] = {}
        nbytes = 0
        trained = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
        for parameter in reversed(trained):
            self._bucket[id(parameter)] = nbytes // BUCKET_BYTES
            nbytes += parameter.nbytes
        self._sizes = Counter(self._bucket.values())
        self._missing = dict(self._sizes)
        return [parameter.register_post_accumulate_grad_hook(self._merged) for parameter in trained]

    def begin(self, *arguments: Any) -> None:
        self._missing = dict(self._sizes)
        super().begin(*arguments)

    def _merged(self, parameter: Any) -> None:
        bucket = self._bucket[id(parameter)]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self.release(bucket)

    def cut(self, pairs: list[Pair], trainer: pl.Trainer) -> dict[int, list[Pair]]:
        owner = owners(trainer)
        found: dict[int, list[Pair]] = {}
        for pair in pairs:
            parameter = owner.get(pair[1].data_ptr())
            found.setdefault(self._bucket.get(id(parameter), WITHOUT_GRADIENT), []).append(pair)
        return found
