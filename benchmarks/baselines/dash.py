"""ACUTE and DASH (one code base, two names): the whole checkpoint is serialised to memory by a copier thread and sent.

As published: a thread calls ``torch.save`` on the whole dictionary, into a single buffer in memory; the bytes go to a
reliable remote machine, which holds them in a circular buffer with dirty bits and flushes them to its disk. Training
waits for the copy before the optimizer steps.

Simplified: one sender over TCP instead of byte ranges from several ranks over MPI.

Mended: the wait waits (in the released code it looks at a flag that nobody sets, so that snapshots can be torn); a slot
counts as clean after its write, not before; each snapshot is a file of its own. Not mended: buffers that forward
changes (BatchNorm's) may be those of the next step.
"""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.baselines.baseline import DURABLE, HOST, PEER, Baseline
from benchmarks.baselines.files import newest
from benchmarks.baselines.peer_memory import PeerMemory
from lightning_spot.capture.copier import compute_alone


class Dash(Baseline):
    """See the top of this file."""

    exact_buffers = False

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._peer = PeerMemory(folder)
        self._copier = ThreadPoolExecutor(1, "copier", compute_alone)
        self._sender = ThreadPoolExecutor(1, "sender", compute_alone)
        self._copied: Future[io.BytesIO] | None = None
        self._sent: Future[None] | None = None

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        if self._sent is not None:
            self._sent.result()  # a single buffer
        copied = self._copied = self._copier.submit(self._copy, step, checkpoint)
        self._sent = self._sender.submit(lambda: self._send(step, copied.result()))

    def _copy(self, step: int, checkpoint: dict[str, Any]) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        self.reached(step, HOST)
        return buffer

    def _send(self, step: int, buffer: io.BytesIO) -> None:
        data = buffer.getbuffer()
        self._peer.begin(step, len(data))
        self._peer.send(data)
        for expected, tier in ((b"k", PEER), (b"d", DURABLE)):
            if self._peer.answer() != expected:
                raise ConnectionError(f"the remote memory has ended before step {step} was safe there ({tier})")
            self.reached(step, tier)

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.result()

    def settle(self) -> None:
        if self._sent is not None:
            self._sent.result()

    def let_go(self) -> None:
        self._copier.shutdown()
        self._sender.shutdown()
        self._peer.close()

    def restore(self) -> tuple[int, dict[str, Any]]:
        path = newest(self.folder, "step-*.bin")
        return int(path.stem.removeprefix("step-")), torch.load(path, weights_only=False)
