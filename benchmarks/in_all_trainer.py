"""One training for ``in_all``: ``python -m benchmarks.in_all_trainer JSON`` fits once and prints what it used.

CPU seconds are the kernel's, read at marks of which each lies three steps after a snapshot: of this process, of each of
its threads, and of the server, its child.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import WarmCopy
from benchmarks.placement import bind_team
from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.partitions import CopyMode

OURS = "spot-"
"""What the names of our threads begin with."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, and what is saved.

    Attributes:
        mode: ``"none"``, ``"spot"``, ``"async"`` or ``"plain"``.
        folder: on the disk that snapshots go to.
        width: of each layer.
        layers: how many.
        batch: samples in a step; sets how long it takes.
        every: steps between snapshots.
        early: snapshots before the first mark: slots are made and touched meanwhile.
        snapshots: between the two marks; as many as take longer than storage is left alone (30 s).
        copy_mode: how ours copies; the default is what ``"auto"`` comes to here when it has tried all ways.
        min_upload_interval_s: how far apart ours are in storage, see ``SpotCheckpoint``.
    """

    mode: str
    folder: str
    width: int
    layers: int
    batch: int
    every: int = 4
    early: int = 3
    snapshots: int = 20
    copy_mode: CopyMode = "blocking"
    min_upload_interval_s: float | None = None


@dataclass
class Used:
    """What was used since the beginning: wall seconds, and CPU seconds by process and thread."""

    wall_s: float
    trainer_s: float
    node_s: float
    node_kernel_s: float
    hooks_s: float
    threads: dict[str, float] = field(default_factory=dict)


class Model(pl.LightningModule):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(plan.width, plan.width) for _ in range(plan.layers)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Watch(pl.Callback):
    """Notes what was used, at the start, at the first mark and at the second."""

    def __init__(self, plan: Plan) -> None:
        first = plan.every * plan.early + plan.every - 1
        self.marks = {0: "start", first: "first", first + plan.every * plan.snapshots: "second"}
        self.last = max(self.marks)
        self.used: dict[str, Used] = {}
        self.hooks_s = 0.0
        self.step_s: list[float] = []
        self._step_began_s = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        """Count the CPU seconds of this process in a method, without what threads of ours use that stay."""
        real: Callable[..., Any] = getattr(owner, name)

        def staying_s() -> float:
            return sum(seconds for name, seconds in threads_s().items() if name.startswith(OURS))

        def timed(*arguments: Any, **named: Any) -> Any:
            before_s, began_s = staying_s(), time.process_time()  # in this order: to look takes 0.2 ms
            try:
                return real(*arguments, **named)
            finally:
                used_s = time.process_time() - began_s
                self.hooks_s += used_s - (staying_s() - before_s)

        setattr(owner, name, timed)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.wrap(trainer.fit_loop.epoch_loop, "on_advance_end")  # ours is in it, see state/loops.py

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        now_s = time.perf_counter()
        self.step_s.append(now_s - self._step_began_s)
        self._step_began_s = now_s
        if (mark := self.marks.get(trainer.global_step)) is not None:
            self.used[mark] = self._look()

    def _look(self) -> Used:
        own = psutil.Process()
        times = own.cpu_times()
        nodes = [child.cpu_times() for child in own.children() if "lightning_spot" in " ".join(child.cmdline())]
        return Used(
            time.perf_counter(),
            times.user + times.system,
            sum(node.user + node.system for node in nodes),
            sum(node.system for node in nodes),
            self.hooks_s,
            threads_s(),
        )


def threads_s() -> dict[str, float]:
    """CPU seconds of each thread that Python knows, but the main one, by its name."""
    threads: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.native_id is not None and thread is not threading.main_thread():
            with contextlib.suppress(OSError):  # it has just ended
                ran = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
                threads[thread.name] = threads.get(thread.name, 0.0) + int(ran[0]) / 1e9
    return threads


def train(plan: Plan) -> dict[str, Any]:
    """Fit once; what was used, as JSON-ready values."""
    watch, folder = Watch(plan), Path(plan.folder)
    callbacks: list[pl.Callback] = []
    plugins: list[Any] = []
    if plan.mode == "spot":
        how: dict[str, Any] = {"copy_mode": plan.copy_mode, "min_upload_interval_s": plan.min_upload_interval_s}
        spot = SpotCheckpoint(str(folder / "run"), interval=EverySteps(plan.every), **how)
        for name in [name for name in dir(spot) if name.startswith("on_") and callable(getattr(spot, name))]:
            watch.wrap(spot, name)
        callbacks.append(spot)
    elif plan.mode in ("async", "plain"):
        callbacks.append(ModelCheckpoint(folder / "saves", every_n_train_steps=plan.every, save_top_k=1))
        plugins = [AsyncCheckpointIO(TorchCheckpointIO())] if plan.mode == "async" else []
    model = Model(plan)
    trainer = pl.Trainer(
        max_steps=watch.last + 1,
        callbacks=[*callbacks, watch],
        plugins=plugins,
        enable_checkpointing=plan.mode in ("async", "plain"),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = torch.randn(plan.batch, plan.width).repeat(watch.last + 2, 1)
    trainer.fit(model, DataLoader(TensorDataset(samples), plan.batch))
    state = {str(index): tensor for index, tensor in enumerate(_tensors(trainer))}
    copy, copies = WarmCopy(state), []
    for _ in range(5):
        began_s = time.perf_counter(), time.process_time()
        copy()
        copies.append((time.perf_counter() - began_s[0], time.process_time() - began_s[1]))
    return {
        "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in state.values()),
        "copy_s": min(wall_s for wall_s, _ in copies),
        "copy_cpu_s": min(cpu_s for _, cpu_s in copies),
        "step_s": watch.step_s[1:],
        "used": {mark: asdict(used) for mark, used in watch.used.items()},
    }


def _tensors(trainer: pl.Trainer) -> list[torch.Tensor]:
    optimizer = trainer.optimizers[0]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach() for parameter in trainer.lightning_module.parameters()), *moments]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    bind_team()
    print(json.dumps(train(Plan(**json.loads(sys.argv[1])))))
