"""What all ranks do together before training: each does its part, and an error of one is an error of all.

Only names, places and errors travel through the process group, never a checkpoint: under NCCL that would go through
the memory of the GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from lightning_spot.errors import SpotError
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.protocol.wire import error_body, error_from_body
from lightning_spot.untrusted import LARGE_BYTES, read_object

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")


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
        body = read_object(self.body, LARGE_BYTES)
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
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            everyones: list[Any] = [None] * self.size
            torch.distributed.all_gather_object(everyones, mine)
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
