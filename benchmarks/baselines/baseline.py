"""What all baselines share: when a snapshot begins, what is noted of it, and the hooks in which training waits."""

from __future__ import annotations

import time
from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_spot.capture.copier import compute_alone

HOST, PEER, DURABLE = "host", "peer", "durable"
"""Tiers: memory of this host, memory of another process (which stands for another host), a disk."""


class Baseline(pl.Callback):
    """Saves Lightning's checkpoint every ``every`` optimizer steps.

    Args:
        folder: where it may write; exists.
        every: optimizer steps between snapshots, at least 1.

    Attributes:
        begun: when the snapshot of each step was begun, on the monotonic clock.
        safe: step, tier and when the snapshot was whole there.
        exact: whether what is restored is what was saved, bit for bit.
        exact_buffers: whether that holds for what forward changes, such as BatchNorm's statistics.
        tries: snapshots until they are taken as they will be from then on.
    """

    exact = exact_buffers = True
    tries = 3

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.begun: dict[int, float] = {}
        self.safe: list[tuple[int, str, float]] = []
        self._step = 0

    @abstractmethod
    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        """Begin a snapshot. The checkpoint's tensors are the live ones."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the optimizer may change the tensors."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until all that was begun is as safe as it gets."""

    @abstractmethod
    def let_go(self) -> None:
        """End what snapshots are made with; nothing is under way any more."""

    def join(self, trainer: pl.Trainer) -> None:
        """Hook into training. Called before each of its turns, where several ways take turns within one training."""
        return

    def leave(self) -> None:
        """Take out what :meth:`join` has hooked in, so that it costs nothing in the turns of others."""
        return

    def finish(self) -> None:
        """Wait until all that was begun is as safe as it gets, and let everything go."""
        self.settle()
        self.leave()
        self.let_go()

    @abstractmethod
    def restore(self) -> tuple[int, dict[str, Any]]:
        """The newest snapshot that is left after :meth:`finish`: its step, and the checkpoint."""

    def close(self) -> None:
        """Let go of what :meth:`restore` needed."""
        return

    def reached(self, step: int, tier: str) -> None:
        """Note that a snapshot is whole at a tier."""
        self.safe.append((step, tier, time.monotonic()))

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        self.join(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step, before = trainer.global_step, self._step
        self._step = step
        if step != before and step % self.every == 0:
            self.begun[step] = time.monotonic()
            self.begin(step, trainer._checkpoint_connector.dump_checkpoint(weights_only=False), trainer)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.wait()

    def on_train_end(self, *_: Any) -> None:
        self.wait()

    def on_fit_end(self, *_: Any) -> None:
        self.finish()

    def on_exception(self, *_: Any) -> None:
        self.finish()


class Copies:
    """Copies tensors on a thread of its own; from a CUDA device by a stream of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "copies", compute_alone)
        self._left: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None

    def add(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Future[None]:
        """Copy the second of each pair into the first, after what was added before."""
        on_device = any(source.is_cuda for _, source in pairs)
        if on_device:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # what computes them was enqueued by now
        self._left.append(self._thread.submit(self._copy, pairs, on_device))
        return self._left[-1]

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], on_device: bool) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream if on_device else None):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if on_device and self._stream is not None:
            self._stream.synchronize()

    def wait(self) -> None:
        """Return when all that was added is copied."""
        while self._left:
            self._left.pop(0).result()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
