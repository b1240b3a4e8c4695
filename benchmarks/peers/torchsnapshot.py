"""torchsnapshot's ``Snapshot.async_take``. It is not maintained any more; 0.1.0 still imports with torch 2.13."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchsnapshot
from torch.utils._pytree import tree_map

from benchmarks.baselines.baseline import DURABLE, HOST, Baseline


class TorchSnapshot(Baseline):
    """Saves every ``every`` steps; the last one is awaited first. ``async_take`` returns when it is staged."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._pending: torchsnapshot.PendingSnapshot | None = None
        self._watcher: threading.Thread | None = None
        self._template: dict[str, Any] = {}

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        self.settle()
        self._template = checkpoint
        state = {"checkpoint": torchsnapshot.StateDict(**{str(key): value for key, value in checkpoint.items()})}
        self._pending = torchsnapshot.Snapshot.async_take(str(self.folder / f"step-{step:09d}"), state)
        self.reached(step, HOST)
        self._watcher = threading.Thread(target=self._watch, args=(self._pending, step))
        self._watcher.start()

    def _watch(self, pending: torchsnapshot.PendingSnapshot, step: int) -> None:
        pending.wait()
        self.reached(step, DURABLE)
        for older in sorted(self.folder.glob("step-*"))[:-2]:
            shutil.rmtree(older)

    def settle(self) -> None:
        if self._watcher is not None:
            self._watcher.join()
        if self._pending is not None:
            self._pending.wait()  # raises what went wrong

    def wait(self) -> None:
        """What was to be staged is staged when ``async_take`` returns."""

    def let_go(self) -> None:
        """Its threads end with each snapshot."""

    def restore(self) -> tuple[int, dict[str, Any]]:
        path = max(self.folder.glob("step-*"))
        empty = tree_map(
            lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, self._template
        )
        state = torchsnapshot.StateDict(**empty)
        torchsnapshot.Snapshot(str(path)).restore({"checkpoint": state})
        return int(path.name.removeprefix("step-")), dict(state)
