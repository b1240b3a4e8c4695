"""A checkpoint's tensors at places known up front, in one flat buffer on the host: DataStates' idea, used by most."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._pytree import tree_map

ALIGNMENT = 64
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        nbytes = self.dtype.itemsize * torch.Size(self.shape).numel()
        return buffer[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)

    def empty(self, *, pinned: bool) -> torch.Tensor:
        """Host memory for it alone."""
        return torch.zeros(self.shape, dtype=self.dtype, pin_memory=pinned)


class Flat:
    """Places for all tensors of a checkpoint. Tensors that are the same memory get one place.

    Args:
        checkpoint: what to save; kept alive through its tensors.

    Attributes:
        nbytes: size of the buffer that holds them.
        sources: each tensor with its place.
        rest: the checkpoint with places instead of tensors, pickled.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self.nbytes = 0
        self.sources: list[tuple[Place, torch.Tensor]] = []
        self._known: dict[tuple[object, ...], Place] = {}
        self.rest = pickle.dumps(tree_map(self._place, checkpoint))

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        key = (leaf.device, leaf.data_ptr() or id(leaf), leaf.shape, leaf.stride(), leaf.dtype)
        if key not in self._known:
            self._known[key] = Place(self.nbytes, tuple(leaf.shape), leaf.dtype)
            self.sources.append((self._known[key], leaf.detach()))
            self.nbytes += -(-leaf.numel() * leaf.element_size() // ALIGNMENT) * ALIGNMENT
        return self._known[key]

    def pairs(self, buffer: torch.Tensor) -> list[Pair]:
        """What to copy: a view of the buffer, and the tensor."""
        return [(place.view(buffer), source) for place, source in self.sources]


def buffer_of(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Host memory whose pages exist."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)


def rebuilt(rest: bytes, tensor_at: Callable[[Place], torch.Tensor]) -> dict[str, Any]:
    """The checkpoint, with a tensor for each place."""
    found: dict[str, Any] = tree_map(
        lambda leaf: tensor_at(leaf) if isinstance(leaf, Place) else leaf, pickle.loads(rest)
    )
    return found


def copied_now(pairs: list[Pair], trainer: pl.Trainer) -> list[Pair]:
    """Copy what the next forward may change (buffers: BatchNorm's statistics), and return the rest.

    The papers do not speak of it; without it their snapshots of a ResNet are torn.
    """
    buffers = {buffer.data_ptr() for buffer in trainer.lightning_module.buffers()}
    later = []
    for target, source in pairs:
        if source.data_ptr() in buffers:
            target.copy_(source)
        else:
            later.append((target, source))
    return later


class TwoBuffers:
    """Two host buffers in turn, so that one stays whole while the other is filled."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def next(self, flat: Flat, busy: torch.Tensor | None = None) -> torch.Tensor:
        """The older one, or the other where that is still being read."""
        if len(self._buffers) == 2:
            oldest = self._buffers.pop(self._buffers[0] is busy)
            if oldest.numel() == flat.nbytes:
                self._buffers.append(oldest)
                return oldest
        self._buffers.append(buffer_of(flat.nbytes, pinned=any(source.is_cuda for _, source in flat.sources)))
        return self._buffers[-1]


_LENGTHS_BYTES = 16


def as_blocks(flat: Flat, buffer: torch.Tensor) -> tuple[bytes, memoryview]:
    """A file's content: two lengths and the pickled rest, padded so that tensors stay aligned; the tensors."""
    padding = bytes(-(_LENGTHS_BYTES + len(flat.rest)) % ALIGNMENT)
    rest = flat.rest + padding
    return len(rest).to_bytes(8, "little") + flat.nbytes.to_bytes(8, "little") + rest, memoryview(buffer.numpy())


def from_blocks(data: bytearray) -> tuple[bytes, torch.Tensor]:
    """The pickled rest and the buffer of a file's content; the buffer is ``data``'s memory."""
    begin = _LENGTHS_BYTES + int.from_bytes(data[:8], "little")
    return bytes(data[_LENGTHS_BYTES:begin]), torch.frombuffer(data, dtype=torch.uint8)[begin:]


def from_content(data: bytearray) -> dict[str, Any]:
    """The checkpoint of a file's content; its tensors are views of ``data``."""
    rest, buffer = from_blocks(data)
    return rebuilt(rest, lambda place: place.view(buffer))
