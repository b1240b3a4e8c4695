"""What rank 0 tells all ranks a step before they need it: it is there by then, and nobody waits for it.

A broadcast in which ranks wait for each other holds every one of them up until the slowest has come, on a GPU until
what was queued there is done. This one is only begun; a training step later it is long over.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_spot.exact.per_trainer import OfTrainer

if TYPE_CHECKING:
    import lightning.pytorch as pl

_NBYTES = 1024
_LENGTH_BYTES = 4


class Word(OfTrainer):
    """One word of rank 0 at a time. Every rank calls the same methods in the same order.

    Where ranks do not talk by ``torch.distributed``, or in a way that is not known here, they wait for each other when
    the word is heard.

    Args:
        trainer: whose ranks they are.

    Attributes:
        is_under_way: whether one was said, and not heard yet.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.is_under_way = False
        self._said: Any = None
        self._told: _OnCpu | _OnGpu | None = None
        self._stream: torch.cuda.Stream | None = None

    def say(self, said: Any) -> None:
        """Begin to tell all ranks what rank 0 says, as plain values; that of the others is not looked at."""
        trainer = self._trainer
        self.is_under_way, self._said = True, said
        device = _device_of(trainer)
        if device is None:
            return
        told = json.dumps(said).encode() if trainer.is_global_zero else b""
        data = torch.zeros(_NBYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if len(told) <= _NBYTES - _LENGTH_BYTES:
            whole = len(told).to_bytes(_LENGTH_BYTES, "little") + told
            data[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        if device.type == "cpu":
            self._told = _OnCpu(data)
        else:
            self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
            self._told = _OnGpu(data, self._stream)

    def hear(self) -> Any:
        """What rank 0 has said."""
        (said, told), self._said, self._told = (self._said, self._told), None, None
        self.is_under_way = False
        if told is not None:
            data = told.heard().numpy().tobytes()
            if length := int.from_bytes(data[:_LENGTH_BYTES], "little"):
                return json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return self._trainer.strategy.broadcast(said)  # it is too long, or could not be told ahead


class _OnCpu:
    """Some bytes on their way from rank 0, by Gloo."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._work = dist.broadcast(data, 0, async_op=True)

    def heard(self) -> torch.Tensor:
        """What came, once it is there."""
        assert self._work is not None
        self._work.wait()
        return self._data


class _OnGpu:
    """The same by NCCL. On a stream of its own: who asks waits for nothing that training has queued since."""

    def __init__(self, data: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._data = data
        with torch.cuda.stream(stream):
            self._there = data.to(stream.device, non_blocking=True)
            work = dist.broadcast(self._there, 0, async_op=True)
            assert work is not None
            work.wait()  # the stream does, not the host
            data.copy_(self._there, non_blocking=True)
            self._is_there = stream.record_event()

    def heard(self) -> torch.Tensor:
        """See :meth:`_OnCpu.heard`."""
        self._is_there.synchronize()
        return self._data


def _device_of(trainer: pl.Trainer) -> torch.device | None:
    """Where a tensor lies that the ranks' process group can tell; ``None`` if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != trainer.world_size:
        return None
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]  # "cpu:gloo,cuda:nccl"
    own = trainer.strategy.root_device
    return torch.device("cpu") if "cpu" in kinds else own if own.type == "cuda" and "cuda" in kinds else None
