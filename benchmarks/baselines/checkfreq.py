"""CheckFreq: snapshot, then persist, in two phases that both run beside training.

As published: the state is copied to host memory while the next forward and backward run, and the optimizer waits for
that; then another process writes it with ``torch.save`` and ``fsync``. A new snapshot waits until the last one is
persisted, so that one is under way at a time.

Simplified: a thread persists, not a process (its memory and its start would count against it). The interval is the
given one: CheckFreq would take max(1, ceil((time of a checkpoint - stall) / time of a step)) and two more when its
overhead exceeds the budget, and comparing at equal intervals is the point here.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.baselines.baseline import DURABLE, HOST, Baseline, Copies
from benchmarks.baselines.files import keep_two, newest
from benchmarks.baselines.flat import Flat, Place, copied_now, rebuilt
from lightning_spot.capture.copier import compute_alone


class CheckFreq(Baseline):
    """See the top of this file."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._copies = Copies()
        self._writer = ThreadPoolExecutor(1, "persist", compute_alone)
        self._copy: dict[Place, torch.Tensor] = {}
        self._persisted: Future[None] | None = None

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        if self._persisted is not None:
            self._persisted.result()
        flat = Flat(checkpoint)
        if list(self._copy) != [place for place, _ in flat.sources]:
            pinned = any(source.is_cuda for _, source in flat.sources)
            self._copy = {place: place.empty(pinned=pinned) for place, _ in flat.sources}
        pairs = [(self._copy[place], source) for place, source in flat.sources]
        copied = self._copies.add(copied_now(pairs, trainer))
        self._persisted = self._writer.submit(self._persist, step, flat.rest, copied)

    def _persist(self, step: int, rest: bytes, copied: Future[None]) -> None:
        copied.result()
        self.reached(step, HOST)
        path = self.folder / f"step-{step:09d}.pt"
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(rebuilt(rest, self._copy.__getitem__), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self.reached(step, DURABLE)
        keep_two(self.folder, "step-*.pt")

    def wait(self) -> None:
        self._copies.wait()

    def settle(self) -> None:
        if self._persisted is not None:
            self._persisted.result()

    def let_go(self) -> None:
        self._copies.close()
        self._writer.shutdown()

    def restore(self) -> tuple[int, dict[str, Any]]:
        path = newest(self.folder, "step-*.pt")
        return int(path.stem.removeprefix("step-")), torch.load(path, weights_only=False)
