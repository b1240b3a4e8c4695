"""Where everything of fixed size lies in a sharded snapshot: found by every rank from the plan, by itself.

First the file of each rank's tensors, then that of each rank's own state. What varies in length from one snapshot to
the next is rank 0's, and lies behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import Entry, lay_out
from lightning_spot.image.shards import Archived, Shard, ShardedTensor
from lightning_spot.sharded.plan import Chunk, Plan

ALIGNMENT = 64
"""Bytes of which the offset of every archive in its file is a multiple, and so that of every tensor's elements."""


@dataclass(frozen=True, slots=True)
class Form:
    """The archive of a box of a tensor, but for its elements. All boxes of that dtype and size have the same.

    Attributes:
        frame: ``(offset, bytes)`` of what is around the elements.
        data: offset of the elements.
        data_nbytes: their length.
        nbytes: length of the archive.
    """

    frame: tuple[Entry, ...]
    data: int
    data_nbytes: int
    nbytes: int


@functools.lru_cache(maxsize=4096)
def form_of(dtype: str, sizes: tuple[int, ...]) -> Form:
    """The archive of a box of so many elements."""
    # Memory that nobody touches: the kernel gives no page for it.
    layout = lay_out(torch.empty(sizes, dtype=getattr(torch, dtype)))
    if not layout.pieces:
        return Form(layout.frame, 0, 0, layout.nbytes)
    piece = layout.pieces[0]
    return Form(layout.frame, piece.offset, piece.nbytes, layout.nbytes)


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor that this rank writes.

    Attributes:
        item: number of the tensor in the plan.
        chunk: the box.
        form: of its archive.
        offset: of the archive in the image.
        pad: zeros behind it, up to the next one.
    """

    item: int
    chunk: Chunk
    form: Form
    offset: int
    pad: int


class Places:
    """Where everything of fixed size lies, for one plan.

    Args:
        plan: of the state.
        state_bytes: of the file that each rank has for its own state.

    Attributes:
        plan: of the state.
        state_bytes: of the file that each rank has for its own state.
        files: in the order of their places.
        tensors: where their boxes lie.
        by_rank: the boxes that each rank writes.
        end: of all of it in the image.
    """

    def __init__(self, plan: Plan, state_bytes: Sequence[int]) -> None:
        self.plan = plan
        self.state_bytes = tuple(state_bytes)
        self.files: list[FileSpan] = []
        self.by_rank: list[list[Placed]] = [[] for _ in range(plan.world_size)]
        self.end = 0
        chunks: list[list[tuple[int, Chunk]]] = [[] for _ in range(plan.world_size)]
        for number, tensor in enumerate(plan.tensors):
            for chunk in tensor.chunks:
                chunks[chunk.rank].append((number, chunk))
        shards: list[list[Shard]] = [[] for _ in plan.tensors]
        for rank, boxes in enumerate(chunks):
            if boxes:
                self._place(rank, boxes, shards)
        for rank, nbytes in enumerate(self.state_bytes):
            self._add(state_file(rank), nbytes)
        self.tensors = tuple(
            ShardedTensor(tensor.path, tensor.dtype, tensor.shape, tuple(shards[number]))
            for number, tensor in enumerate(plan.tensors)
        )

    def _place(self, rank: int, boxes: list[tuple[int, Chunk]], shards: list[list[Shard]]) -> None:
        """Give the boxes of one rank their places in its file."""
        name, start, at = tensors_file(rank), self.end, 0
        for place, (number, chunk) in enumerate(boxes):
            form = form_of(self.plan.tensors[number].dtype, chunk.sizes)
            end = at + form.nbytes
            following = aligned(end, ALIGNMENT if place < len(boxes) - 1 else FILE_ALIGNMENT_BYTES)
            self.by_rank[rank].append(Placed(number, chunk, form, start + at, following - end))
            shards[number].append(Shard(chunk.offsets, chunk.sizes, Archived(name, at, form.nbytes), form.data))
            at = following
        self._add(name, end)

    def _add(self, name: str, nbytes: int) -> None:
        self.files.append(FileSpan(name, self.end, nbytes))
        self.end = aligned(self.end + nbytes, FILE_ALIGNMENT_BYTES)

    def state_of(self, rank: int) -> FileSpan:
        """The file for a rank's own state."""
        return self.files[len(self.files) - len(self.state_bytes) + rank]


def tensors_file(rank: int) -> str:
    """Name of the file with the tensors that a rank writes."""
    return f"__{rank}_0.distcp"


def state_file(rank: int) -> str:
    """Name of the file with a rank's own state."""
    return f"rank-{rank:04d}.pt"


def aligned(place: int, alignment: int) -> int:
    """The next multiple."""
    return -(-place // alignment) * alignment
