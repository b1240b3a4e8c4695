"""DataStates-LLM: tensors are copied lazily into a ring on the host, at offsets known up front, and flushed from there.

As published: offsets of all tensors in the file are computed at once; tensors are copied to a pinned ring buffer while
the next forward and backward run (during which they do not change); training waits for these copies only, just before
the optimizer steps; a flush takes each tensor to its place in the file as soon as it is copied.

Simplified: one file a rank; the flush is a thread that writes with ``pwrite``. Room for two snapshots in the ring: a
third one waits. Added: ``fsync``, and the file gets its name when it is whole.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.baselines.baseline import DURABLE, HOST, Baseline, Copies
from benchmarks.baselines.files import keep_two, newest, read_whole
from benchmarks.baselines.flat import Flat, Pair, TwoBuffers, as_blocks, copied_now, from_content
from lightning_spot.capture.copier import compute_alone


class DataStates(Baseline):
    """See the top of this file."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._copies, self._buffers = Copies(), TwoBuffers()
        self._flusher = ThreadPoolExecutor(1, "flush", compute_alone)
        self._flushed: list[Future[None]] = []

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        while len(self._flushed) > 1:
            self._flushed.pop(0).result()  # the ring is full
        flat = Flat(checkpoint)
        buffer = self._buffers.next(flat)
        pairs = flat.pairs(buffer)
        later = {id(target) for target, _ in copied_now(pairs, trainer)}
        copied = [(pair, self._copies.add([pair]) if id(pair[0]) in later else None) for pair in pairs]
        self._flushed.append(self._flusher.submit(self._flush, step, flat, buffer, copied))

    def _flush(
        self, step: int, flat: Flat, buffer: torch.Tensor, copied: list[tuple[Pair, Future[None] | None]]
    ) -> None:
        head, data = as_blocks(flat, buffer)
        begin = len(head)
        temporary = self.folder / ".writing"
        with temporary.open("wb", buffering=0) as file:
            _write_at(file.fileno(), head, 0)
            for ((target, _), done), (place, _) in zip(copied, flat.sources, strict=True):
                if done is not None:
                    done.result()
                _write_at(file.fileno(), data[place.offset : place.offset + target.nbytes], begin + place.offset)
            self.reached(step, HOST)
            file.truncate(begin + len(data))
            os.fsync(file.fileno())
        temporary.replace(self.folder / f"step-{step:09d}.ds")
        self.reached(step, DURABLE)
        keep_two(self.folder, "step-*.ds")

    def wait(self) -> None:
        self._copies.wait()

    def settle(self) -> None:
        while self._flushed:
            self._flushed.pop(0).result()

    def let_go(self) -> None:
        self._copies.close()
        self._flusher.shutdown()

    def restore(self) -> tuple[int, dict[str, Any]]:
        path = newest(self.folder, "step-*.ds")
        return int(path.stem.removeprefix("step-")), from_content(read_whole(path))


def _write_at(file: int, data: memoryview | bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count
