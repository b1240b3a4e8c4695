"""The exact state of each rank beside one checkpoint: rank 0's as values in it, others' in files of their own.

A checkpoint in one file that no snapshot holds (a user's, or one of an earlier version) has the others' as bytes: a
tensor with a file of ``torch.save``. Whoever reads it gets values in place of them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from lightning_spot.sharded.file_plan import load_state, state_file

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

_LENGTH_BYTES = 8


def packed(state: State) -> torch.Tensor:
    """A rank's state as bytes, for a checkpoint in one file."""
    buffer = io.BytesIO()
    buffer.write(bytes(_LENGTH_BYTES))
    torch.save(state, buffer)
    data = buffer.getbuffer()
    data[:_LENGTH_BYTES] = (len(data) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpacked(states: list[Any], read: Callable[[IO[bytes]], Any]) -> list[Any]:
    """The states as values; what is none of ours stays as it is.

    Args:
        states: of all ranks, as they were read.
        read: reads a file of ``torch.save``.
    """
    return [read(io.BytesIO(_content(state))) if _is_packed(state) else state for state in states]


def _is_packed(state: Any) -> bool:
    return isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.device.type == "cpu"


def _content(state: torch.Tensor) -> bytes:
    data = state.numpy().tobytes()
    nbytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES : _LENGTH_BYTES + nbytes]


def states_in_files(trainer: pl.Trainer, shared: State, read: Callable[[str], memoryview]) -> list[State]:
    """The states of the ranks of a snapshot, as far as this rank needs them; others are empty.

    Args:
        trainer: that goes on.
        shared: what the snapshot has for all ranks; those of some may be in it.
        read: a file of the snapshot, by its name.
    """
    known, size = shared.get("ranks") or [], shared["world_size"]
    wanted = (0, trainer.global_rank) if are_these(shared, trainer) else range(size)
    return [*known, *(load_state(read(state_file(rank))) if rank in wanted else {} for rank in range(len(known), size))]


# -- shares of the data: as many as ranks, or fewer, where ranks of tensor parallelism see the same batches ------------

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
