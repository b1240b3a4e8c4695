"""AsymCheck: partitions of unequal size in the gaps of the next forward and backward pass.

As published: transfers of a snapshot are put into slots before each layer's forward and backward. Ten warm-up
iterations measure how long each slot is idle; then a slot's partition gets that share of the state, so that those in
the backward pass come out larger. Flushing batches partitions; compression is in ``asymcheck_topk.py``.

Simplified: there is no prefetch of parameters here, so a slot's idle time is the time until the next slot (on a GPU the
time until the host has enqueued it). One write for each snapshot.

Mended: the released code's sizes add up to twice the state; here each byte is copied once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from benchmarks.baselines.flat import Pair
from benchmarks.baselines.partitioned import Partitioned

WARM_UP = 10


def cut_by_share(pairs: list[Pair], shares: list[float]) -> dict[int, list[Pair]]:
    """One partition for each share, in proportion to it; tensors are cut where need be, the last takes what is left."""
    total = sum(shares)
    nbytes = sum(source.nbytes for _, source in pairs)
    bounds, passed = [], 0.0
    for share in shares[:-1]:
        passed += share
        bounds.append(int(nbytes * passed / total) if total > 0 else 0)
    found: dict[int, list[Pair]] = {number: [] for number in range(len(shares))}
    number = begin = 0
    for target, source in pairs:
        if not (source.is_contiguous() and target.is_contiguous()):
            number = _number_at(begin, number, bounds)
            found[number].append((target, source))
            begin += source.nbytes
            continue
        flat_target, flat_source, taken = target.view(-1), source.view(-1), 0
        while taken < source.numel():
            number = _number_at(begin, number, bounds)
            left = bounds[number] - begin if number < len(bounds) else source.nbytes
            count = min(source.numel() - taken, max(1, left // source.element_size()))
            found[number].append((flat_target[taken : taken + count], flat_source[taken : taken + count]))
            taken += count
            begin += count * source.element_size()
    return found


def _number_at(begin: int, number: int, bounds: list[int]) -> int:
    while number < len(bounds) and begin >= bounds[number]:
        number += 1
    return number


class AsymCheck(Partitioned):
    """See the top of this file."""

    tries = WARM_UP + 2

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._idle_s: list[float] = []
        self._next = self._iterations = 0
        self._slot, self._since_s = -1, 0.0

    def watch(self, trainer: pl.Trainer) -> list[Any]:
        layers = [
            module
            for module in trainer.lightning_module.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        trained = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
        self._idle_s = self._idle_s or [0.0] * (len(layers) + len(trained))
        hooks: list[Any] = [layer.register_forward_pre_hook(lambda *_: self._at_slot()) for layer in layers]
        return hooks + [weight.register_post_accumulate_grad_hook(lambda _: self._at_slot()) for weight in trained]

    def on_train_batch_start(self, *_: Any) -> None:
        self._next = 0

    def _at_slot(self) -> None:
        if self._iterations < WARM_UP:
            self._measure()
        self.release(self._next)
        self._next += 1

    def _measure(self) -> None:
        now_s = time.perf_counter()
        if 0 <= self._slot < len(self._idle_s):
            self._idle_s[self._slot] += now_s - self._since_s
        self._slot, self._since_s = self._next, now_s

    def on_before_optimizer_step(self, *arguments: Any) -> None:
        if self._iterations < WARM_UP:
            self._measure()
            self._slot = -1
            self._iterations += 1
        super().on_before_optimizer_step(*arguments)

    def cut(self, pairs: list[Pair], trainer: pl.Trainer) -> dict[int, list[Pair]]:
        if self._iterations < WARM_UP:
            return {0: pairs}
        return cut_by_share(pairs, self._idle_s)
