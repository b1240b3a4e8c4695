"""What the ranks of a ``fit`` tell each other through the process group: agreements and broadcasts.

An error of one rank is an error of all. Only names, places, errors and small facts travel so, never a checkpoint: under
NCCL it would go through the memory of the GPUs. A broadcast that is begun a step ahead holds no rank up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from lightning_spot.errors import SpotError
from lightning_spot.protocol.wire import error_body, error_from_body
from lightning_spot.state.per_trainer import OfTrainer
from lightning_spot.untrusted import LARGE_JSON_BYTES, read_json, read_object

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")


_NBYTES = 16 * 1024
"""Of a word: the numbers of a thousand ranks fit into it, and are heard in a tenth of a millisecond."""
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of one rank, for the others.

    Attributes:
        rank: that has it.
        body: the error as JSON, see :func:`~lightning_spot.protocol.wire.error_body`.
    """

    rank: int
    body: str

    @classmethod
    def of(cls, error: Exception, rank: int = 0) -> Failed:
        """What the others are told of it."""
        known = error if isinstance(error, SpotError) else SpotError(f"{type(error).__name__}: {error}")
        return cls(rank, json.dumps(error_body(known)))

    def error(self) -> SpotError:
        """What the others raise: an error of the same kind."""
        body = read_object(self.body, LARGE_JSON_BYTES)
        body["message"] = f"rank {self.rank}: {body['message']}"
        return error_from_body(500, json.dumps(body).encode(), f"rank {self.rank}")


class Agreement(OfTrainer):
    """The ranks of one trainer, by its process group; one rank agrees with itself.

    Args:
        trainer: whose ranks they are; the process group exists.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.rank: int = trainer.global_rank
        self.size: int = trainer.world_size

    def tell(self, said: Any = None) -> Any:
        """Tell all ranks what rank 0 says; every rank calls it, and gets that."""
        return self._trainer.strategy.broadcast(said)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has to say, in their order; every rank calls it. It should be short."""
        if self.size == 1:
            return [mine]
        if dist.is_available() and dist.is_initialized():
            everyones: list[Any] = [None] * self.size
            dist.all_gather_object(everyones, mine)
            return everyones
        strategy = self._trainer.strategy
        return [strategy.broadcast(mine if rank == self.rank else None, src=rank) for rank in range(self.size)]

    def together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; where it fails on one, it fails on all.

        Returns:
            what it gave on this rank.

        Raises:
            Exception: of this rank, or the first of the others, of the same kind where it is one of ours.
        """
        result: list[T] = []
        self.everyones(lambda: result.append(action()))
        return result[0]

    def everyones(self, action: Callable[[], T]) -> list[T]:
        """What an action gives on each rank, in their order, likewise; it should be short."""
        mine: T | Failed
        raised: Exception | None = None
        try:
            mine = action()
        except Exception as error:  # raised again below, once the others know
            raised, mine = error, Failed.of(error, self.rank)
        everyones = self.gather(mine)
        if raised is not None:
            raise raised
        for each in everyones:
            if isinstance(each, Failed):
                raise each.error()
        return everyones

    def on_rank_zero(self, action: Callable[[], T]) -> T | None:
        """The same of what rank 0 does alone; ``None`` on the others."""
        return self.together(lambda: action() if self.rank == 0 else None)


class AsyncBroadcast(OfTrainer):
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
        self._told: tuple[torch.Tensor, Callable[[], object]] | None = None
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
            self._told = data, _broadcast(data).wait
            return
        # On a stream of its own: who asks waits for nothing that training has queued since.
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
        with torch.cuda.stream(self._stream):
            there = data.to(device, non_blocking=True)
            _broadcast(there).wait()  # the stream does, not the host
            data.copy_(there, non_blocking=True)
            self._told = data, self._stream.record_event().synchronize

    def hear(self) -> Any:
        """What rank 0 has said."""
        (said, told), self._said, self._told = (self._said, self._told), None, None
        self.is_under_way = False
        if told is not None:
            there, wait = told
            wait()
            data = there.numpy().tobytes()
            if length := int.from_bytes(data[:_LENGTH_BYTES], "little"):
                return read_json(data[_LENGTH_BYTES : _LENGTH_BYTES + length], LARGE_JSON_BYTES)
        return self._trainer.strategy.broadcast(said)  # it is too long, or could not be told ahead


def _broadcast(data: torch.Tensor) -> dist.Work:
    """Begin to tell all ranks what rank 0 has in a tensor."""
    work: dist.Work | None = dist.broadcast(data, 0, async_op=True)
    assert work is not None
    return work


def _device_of(trainer: pl.Trainer) -> torch.device | None:
    """Where a tensor lies that the ranks' process group can tell; ``None`` if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != trainer.world_size:
        return None
    kinds = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]  # "cpu:gloo,cuda:nccl"
    own = trainer.strategy.root_device
    return torch.device("cpu") if "cpu" in kinds else own if own.type == "cuda" and "cuda" in kinds else None
