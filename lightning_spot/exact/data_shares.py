"""Shares of the data: as many as ranks, or fewer, where ranks of tensor parallelism see the same batches."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import lightning.pytorch as pl


_known: WeakKeyDictionary[Any, tuple[Any, tuple[int, int]]] = WeakKeyDictionary()
"""Of strategies: their mesh, and the share by it."""


def share_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Which share of the data this rank has, and of how many: ranks of tensor parallelism have the same."""
    mesh = None
    with suppress(RuntimeError):  # before it is set up, a strategy raises this
        mesh = getattr(trainer.strategy, "device_mesh", None)
    if mesh is None:
        return _share(trainer)
    known = _known.get(trainer.strategy)
    if known is None or known[0] is not mesh:  # to cut its part out of a mesh takes longer than all that goes with it
        known = _known[trainer.strategy] = (mesh, _share(trainer))
    return known[1]


def _share(trainer: pl.Trainer) -> tuple[int, int]:
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
