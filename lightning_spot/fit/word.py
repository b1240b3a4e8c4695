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
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._said: Any = None
        self._data: torch.Tensor | None = None
        self._work: Any = None
        self.is_under_way = False
        """Whether one was said, and not heard yet."""

    def say(self, said: Any) -> None:
        """Begin to tell all ranks what rank 0 says, as plain values; that of the others is not looked at."""
        self.is_under_way, self._said = True, said
        device = _device_of(self._trainer)
        if device is None:
            return
        data = torch.zeros(_NBYTES, dtype=torch.uint8)
        told = json.dumps(said).encode()
        if self._trainer.is_global_zero and len(told) <= _NBYTES - _LENGTH_BYTES:
            whole = len(told).to_bytes(_LENGTH_BYTES, "little") + told
            data[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        self._data = data.to(device, non_blocking=True)
        self._work = dist.broadcast(self._data, 0, async_op=True)

    def hear(self) -> Any:
        """What rank 0 has said."""
        said, data, work = self._said, self._data, self._work
        self.is_under_way, self._said, self._data, self._work = False, None, None, None
        if data is not None:
            work.wait()
            told = data.cpu().numpy().tobytes()
            if length := int.from_bytes(told[:_LENGTH_BYTES], "little"):
                return json.loads(told[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return self._trainer.strategy.broadcast(said)  # it is too long, or could not be told ahead


def _device_of(trainer: pl.Trainer) -> torch.device | None:
    """Where a tensor lies that the ranks' process group can tell; ``None`` if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != trainer.world_size:
        return None
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]  # "cpu:gloo,cuda:nccl"
    own = trainer.strategy.root_device
    return torch.device("cpu") if "cpu" in kinds else own if own.type in kinds else None
