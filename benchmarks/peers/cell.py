"""One cell of the comparison: one fit in a process of its own, with one way of saving, measured."""

from __future__ import annotations

import functools
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.peers import processes
from benchmarks.peers.models import build, state_bytes
from benchmarks.peers.ways import WAYS, Saving
from benchmarks.placement import bind_team
from lightning_spot import EverySteps

LEAD = 4
SETTLE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured.

    Attributes:
        model: one of ``MODELS``.
        interval: optimizer steps between snapshots.
        way: one of ``WAYS``.
        round: from 0.
        scale: one of ``SCALES``.
        device: ``"cpu"`` or ``"cuda"``.
        warm_up: steps at least before it is waited until all that was begun is over.
        least: steps at least that are measured.
    """

    model: str
    interval: int
    way: str
    round: int
    scale: str
    device: str
    warm_up: int = 50
    least: int = 40

    @property
    def settled(self) -> int:
        """The step before which training waits until nothing runs beside it: first saves start processes, make slots.

        The snapshot of that step is over then.
        """
        return -(-self.warm_up // self.interval) * self.interval

    @property
    def first(self) -> int:
        """The first step that is measured: half-way between two snapshots, so that what each leaves to do is in it."""
        half = self.interval // 2
        return self.settled + half + -(-max(0, LEAD - half) // self.interval) * self.interval

    @property
    def measured(self) -> int:
        """Steps that are measured: a multiple of the interval."""
        return -(-self.least // self.interval) * self.interval

    @property
    def steps(self) -> int:
        """All steps. The last one is saved where that does not take long, so that what is restored can be compared."""
        least = self.first + self.measured + 1
        return -(-least // self.interval) * self.interval if self.interval <= 10 else least


class Stopwatch:
    """Seconds that the training thread spends in methods, each counted once where one calls another."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def wrap(self, timed: Any) -> None:
        """Time all hooks of a callback."""
        names = [name for name in dir(timed) if name.startswith(("on_", "before_", "after_"))]
        for name in names:
            if callable(method := getattr(timed, name)):
                setattr(timed, name, self._timed(method))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            self._depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.spent_s += time.perf_counter() - began

        return timed


class Meter(pl.Callback):
    """Reads the clocks where the measured steps begin and end. The first callback of the trainer."""

    def __init__(self, cell: Cell, saving: Saving, command: int, *, own_network: bool) -> None:
        self._cell, self._saving, self._command, self._own_network = cell, saving, command, own_network
        self._stopwatch = Stopwatch()
        for timed in saving.timed:
            self._stopwatch.wrap(timed)
        self._began_s = self._wall_s = self._blocked_s = 0.0
        self.found: dict[str, Any] = {}

    def on_train_start(self, *_: Any) -> None:
        self._began_s = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._cell.settled:
            self._settle(pl_module)
            self.found["settle_s"] = processes.wait_idle(self._command, SETTLE_S)
        if batch_idx == self._cell.first:
            self.found["cpu_before_s"] = processes.cpu_s(self._command)
            self.found["sent_before"] = processes.sent_bytes() if self._own_network else None
            self._settle(pl_module)
            self._wall_s, self._blocked_s = time.monotonic(), self._waited_s()
            self.found["warm_up_s"] = self._wall_s - self._began_s
        if batch_idx == self._cell.first + self._cell.measured:
            self._settle(pl_module)
            now_s = time.monotonic()
            self.found["wall_s"] = now_s - self._wall_s
            self.found["blocked_s"] = self._waited_s() - self._blocked_s
            self.found["window"] = (self._wall_s, now_s)

    def on_train_end(self, *_: Any) -> None:
        self.found["ended_s"] = time.monotonic()

    def _waited_s(self) -> float:
        return self._stopwatch.spent_s + self._saving.waited_elsewhere_s()

    def _settle(self, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()


def run(cell: Cell, folder: Path, command: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """Train, and restore.

    Args:
        cell: what to measure.
        folder: where it may write; empty.
        command: process id of whoever counts what this process and its children use.
        tell: is told what was measured, as plain values.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    own_network = processes.own_network()
    bind_team()
    model, data = build(cell.model, cell.scale, cell.steps)
    saving = WAYS[cell.way](folder, EverySteps(cell.interval))
    meter = Meter(cell, saving, command, own_network=own_network)
    trainer = pl.Trainer(
        max_steps=cell.steps,
        callbacks=[meter, *saving.callbacks],
        plugins=saving.plugins,
        # Without a ModelCheckpoint in the list Lightning adds one, which saves at the end.
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in saving.callbacks),
        accelerator="gpu" if cell.device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    found = meter.found
    found["drain_s"] = time.monotonic() - found.pop("ended_s")
    sent_before = found.pop("sent_before")
    found["sent_bytes"] = None if sent_before is None else processes.sent_bytes() - sent_before
    found["state_bytes"] = state_bytes(trainer)
    found |= _restore(saving, trainer, folder)
    saving.close()
    found["begun"], found["safe"] = dict(saving.begun), list(saving.safe)
    found["last_ones"] = saving.last_ones
    tell(found)


def _restore(saving: Saving, trainer: pl.Trainer, folder: Path) -> dict[str, Any]:
    if saving.restore is None:
        return {"restore_s": None, "restore_cpu_s": 0.0, "lost_steps": None, "equal": None}
    processes.forget_pages(folder)
    cpu, began = os.times(), time.monotonic()
    step, checkpoint = saving.restore()
    restore_s, after = time.monotonic() - began, os.times()
    equal = None
    if step == trainer.global_step:
        live = trainer.lightning_module.state_dict()
        equal = all(torch.equal(checkpoint["state_dict"][name].cpu(), live[name].cpu()) for name in live)
    return {
        "restore_s": restore_s,
        "restore_cpu_s": after.user + after.system - cpu.user - cpu.system,
        "lost_steps": trainer.global_step - step,
        "equal": equal,
    }
