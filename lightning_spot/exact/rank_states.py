"""The exact state of each rank beside one checkpoint: rank 0's as values, that of every other rank as bytes of its own.

So another rank can write its state into the file by itself: the file holds room for it, a tensor of bytes. Whoever
reads a checkpoint gets values in place of the bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from lightning_spot.image.layout import Layout, filled, lay_out
from lightning_spot.sharded.file_plan import load_state, state_file

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

_LENGTH_BYTES = 8
_PAGE = 4096


def packed(state: State) -> bytes:
    """A rank's state as it lies in its room."""
    buffer = io.BytesIO()
    buffer.write(bytes(_LENGTH_BYTES))
    torch.save(state, buffer)
    data = buffer.getbuffer()
    data[:_LENGTH_BYTES] = (len(data) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return bytes(data)


class Packing:
    """What :func:`packed` makes of a state, as it is when this is made. Its length is known at once.

    ``bytes()`` of it may be asked for later, on any thread: until then, no tensor on a GPU is waited for.

    Args:
        state: values of its own, which nothing changes any more.
    """

    def __init__(self, state: State) -> None:
        self._layout: Layout | None = None
        layout = lay_out(state)
        if any(_waits_for(piece.storage) for piece in layout.pieces):
            self._layout = layout
        else:
            self._data = _with_length(filled(layout))

    def __len__(self) -> int:
        return _LENGTH_BYTES + self._layout.nbytes if self._layout is not None else len(self._data)

    def __bytes__(self) -> bytes:
        return _with_length(filled(self._layout)) if self._layout is not None else self._data


def _waits_for(storage: torch.UntypedStorage) -> bool:
    return storage.device.type != "cpu"


def _with_length(data: bytearray) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def unpacked(states: list[Any], read: Callable[[IO[bytes]], Any]) -> list[Any]:
    """The states as values; what is none of ours stays as it is.

    Args:
        states: of all ranks, as they were read.
        read: reads a file of ``torch.save``.
    """
    return [read(io.BytesIO(_content(state))) if _is_room(state) else state for state in states]


class Rooms:
    """Room for the states of the ranks but the first, kept from one snapshot to the next; on rank 0."""

    def __init__(self) -> None:
        self._rooms: dict[int, torch.Tensor] = {}

    @property
    def known(self) -> dict[int, torch.Tensor]:
        """The rooms there are, by rank: twice as large as the last state for which one was made."""
        return dict(self._rooms)

    def make(self, rank: int, nbytes: int) -> torch.Tensor:
        """Have room for a state of so many bytes: that which is there, if it is large enough."""
        room = self._rooms.get(rank)
        if room is None or room.numel() < nbytes:
            # States of metrics grow with each batch: with less room, every second snapshot would be dropped.
            size = -(-(2 * nbytes + _PAGE) // _PAGE) * _PAGE
            room = self._rooms[rank] = torch.zeros(size, dtype=torch.uint8)
        return room

    def put(self, rank: int, data: bytes) -> torch.Tensor:
        """A room with a state in it."""
        room = self.make(rank, len(data))
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return room


def _is_room(state: Any) -> bool:
    return isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.device.type == "cpu"


def _content(room: torch.Tensor) -> bytes:
    data = room.numpy().tobytes()
    nbytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return data[_LENGTH_BYTES : _LENGTH_BYTES + nbytes]


def states_in_files(trainer: pl.Trainer, shared: State, read: Callable[[str], memoryview]) -> list[State]:
    """The states of the ranks of a model in shards, each in a file: those that this rank needs, others empty.

    Args:
        trainer: that goes on.
        shared: what the snapshot has for all ranks.
        read: a file, by its name.
    """
    size = shared["world_size"]
    wanted = (0, trainer.global_rank) if are_these(shared, trainer) else range(size)
    return [load_state(read(state_file(rank))) if rank in wanted else {} for rank in range(size)]


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
