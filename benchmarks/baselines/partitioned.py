"""What OTeaCheck and AsymCheck share: a snapshot that is cut into partitions, which are released during the next step.

A released partition is copied by a thread to one of two host buffers; what the optimizer finds unreleased is released
then, and waited for. Another thread writes the newest whole buffer to the disk (as published, a process of each host
does), and passes over those that a newer one has superseded.
"""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.baselines.baseline import DURABLE, HOST, Baseline, Copies
from benchmarks.baselines.files import keep_two, newest, read_whole, write_whole
from benchmarks.baselines.flat import Flat, Pair, TwoBuffers, as_blocks, copied_now, from_content
from lightning_spot.capture.copier import compute_alone


class Partitioned(Baseline):
    """A baseline whose partitions are released one by one.

    Attributes:
        partitions: of the snapshot under way, those that are not released yet; each is released once.
    """

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self.partitions: dict[int, list[Pair]] = {}
        self._copies, self._buffers = Copies(), TwoBuffers()
        self._writer = ThreadPoolExecutor(1, "writer", compute_alone)
        self._under_way: tuple[int, Flat, torch.Tensor] | None = None
        self._newest: tuple[int, Flat, torch.Tensor] | None = None
        self._written: Future[None] | None = None
        self._being_read: torch.Tensor | None = None
        self._hooks: list[Any] = []

    @abstractmethod
    def cut(self, pairs: list[Pair], trainer: pl.Trainer) -> dict[int, list[Pair]]:
        """The partitions, by the number with which :meth:`release` asks for them. Each pair is in exactly one."""

    @abstractmethod
    def watch(self, trainer: pl.Trainer) -> list[Any]:
        """Register the hooks that release partitions; returns their handles."""

    def join(self, trainer: pl.Trainer) -> None:
        self.leave()
        self._hooks = self.watch(trainer)

    def leave(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        flat = Flat(checkpoint)
        buffer = self._buffers.next(flat, self._being_read if self._is_writing() else None)
        self._newest = None  # whole until now, unless the writer has it
        self._under_way = (step, flat, buffer)
        self.partitions = self.cut(copied_now(flat.pairs(buffer), trainer), trainer)

    def release(self, number: int) -> None:
        """Have a partition copied, if it is there and was not released before."""
        pairs = self.partitions.pop(number, None)
        if pairs:
            self._copies.add(pairs)

    def wait(self) -> None:
        if self._under_way is None:
            return
        for number in list(self.partitions):
            self.release(number)
        self._copies.wait()
        self._newest, self._under_way = self._under_way, None
        self.reached(self._newest[0], HOST)
        if not self._is_writing():
            self._write_newest()

    def _is_writing(self) -> bool:
        return self._written is not None and not self._written.done()

    def _write_newest(self) -> None:
        if self._written is not None:
            self._written.result()
        if self._newest is not None:
            self._being_read = self._newest[2]
            self._written = self._writer.submit(self.write, *self._newest)
            self._newest = None

    def write(self, step: int, flat: Flat, buffer: torch.Tensor) -> None:
        """Make a whole snapshot durable; called on the writer's thread."""
        write_whole(self.folder / f"step-{step:09d}.part", *as_blocks(flat, buffer))
        self.reached(step, DURABLE)
        keep_two(self.folder, "step-*.part")

    def settle(self) -> None:
        self.wait()
        self._write_newest()
        if self._written is not None:
            self._written.result()

    def let_go(self) -> None:
        self._copies.close()
        self._writer.shutdown()

    def restore(self) -> tuple[int, dict[str, Any]]:
        path = newest(self.folder, "step-*.part")
        return int(path.stem.removeprefix("step-")), from_content(read_whole(path))


def owners(trainer: pl.Trainer) -> dict[int, torch.nn.Parameter]:
    """Which parameter a storage belongs to, by its address: the parameter itself, and its optimizer's state."""
    found = {parameter.data_ptr(): parameter for parameter in trainer.lightning_module.parameters()}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            found.update({value.data_ptr(): parameter for value in state.values() if isinstance(value, torch.Tensor)})
    return found
