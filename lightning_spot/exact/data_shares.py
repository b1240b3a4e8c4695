"""Shares of the data: as many as ranks, or fewer, where ranks of tensor parallelism see the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as pl


def share_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Which share of the data this rank has, and of how many: ranks of tensor parallelism have the same."""
    data = getattr(trainer.strategy, "distributed_sampler_kwargs", None)  # a single device has none
    return (data["rank"], data["num_replicas"]) if data else (trainer.global_rank, trainer.world_size)


def are_these(shared: dict[str, Any], trainer: pl.Trainer) -> bool:
    """Whether the ranks of a snapshot are those of a trainer: as many, with as many shares of the data.

    Args:
        shared: the exact state of the snapshot.
        trainer: that goes on from it.
    """
    shares = share_of(trainer)[1]
    return bool(shared["world_size"] == trainer.world_size and shared.get("shares", shares) == shares)
