"""Gemini: snapshots in the memory of this host and of a peer, sent in small chunks through a small buffer.

As published: the state goes in chunks from the device to this host's memory and to that of a peer, in the gaps that
training leaves on the network, so that both ends hold the newest one or two snapshots; a failed machine is restored
from its peer. Storage is written every few hours only, which is left out here: ``restore`` reads the peer.

Simplified: one rank has no network traffic of its own, so that every moment is a gap: chunks are sent as soon as they
are copied. The peer is a process on this host. The optimizer waits for the copies, not for the network.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.baselines.baseline import HOST, PEER, Baseline, Copies
from benchmarks.baselines.flat import Flat, Pair, TwoBuffers, as_blocks, copied_now, from_content
from benchmarks.baselines.peer_memory import PeerMemory
from lightning_spot.capture.copier import compute_alone

CHUNK_BYTES = 32 * 2**20


def in_chunks(pairs: list[Pair], chunk_bytes: int) -> list[list[Pair]]:
    """Neighbouring pairs, at least so many bytes together (the last fewer)."""
    chunks: list[list[Pair]] = [[]]
    nbytes = 0
    for pair in pairs:
        if nbytes >= chunk_bytes:
            chunks.append([])
            nbytes = 0
        chunks[-1].append(pair)
        nbytes += pair[0].nbytes
    return chunks


class Gemini(Baseline):
    """See the top of this file."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self._copies, self._buffers = Copies(), TwoBuffers()
        self._peer = PeerMemory()
        self._sender = ThreadPoolExecutor(1, "sender", compute_alone)
        self._sent: list[Future[None]] = []

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        while len(self._sent) > 1:
            self._sent.pop(0).result()  # the older buffer is still being sent
        flat = Flat(checkpoint)
        buffer = self._buffers.next(flat)
        later = copied_now(flat.pairs(buffer), trainer)
        copied = [(chunk, self._copies.add(chunk)) for chunk in in_chunks(later, CHUNK_BYTES)]
        self._sent.append(self._sender.submit(self._send, step, flat, buffer, copied))

    def _send(self, step: int, flat: Flat, buffer: torch.Tensor, copied: list[tuple[list[Pair], Future[None]]]) -> None:
        head, data = as_blocks(flat, buffer)
        self._peer.begin(step, len(head) + len(data))
        self._peer.send(head)
        sent, start = 0, buffer.data_ptr()
        for chunk, done in copied:
            done.result()
            end = chunk[-1][0].data_ptr() - start if chunk else sent  # whole but for the chunk's last tensor
            self._peer.send(data[sent:end])
            sent = max(sent, end)
        self.reached(step, HOST)
        self._peer.send(data[sent:])
        if self._peer.answer() != b"k":
            raise ConnectionError(f"the peer has ended before step {step} was there")
        self.reached(step, PEER)

    def wait(self) -> None:
        self._copies.wait()

    def settle(self) -> None:
        while self._sent:
            self._sent.pop(0).result()

    def let_go(self) -> None:
        self._copies.close()
        self._sender.shutdown()

    def restore(self) -> tuple[int, dict[str, Any]]:
        step, data = self._peer.get()
        if step < 0:
            raise FileNotFoundError("the peer holds no snapshot")
        return step, from_content(data)

    def close(self) -> None:
        self._peer.close()
