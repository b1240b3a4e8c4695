"""Lays a sharded snapshot out before it is filled: the files that each rank writes, and what lies where in them.

Where in the ranks' files their tensors lie, every rank finds from the plan, by itself. What else there is to write is
rank 0's, and lies behind its tensors. No tensor is kept alive from one snapshot to the next.

At rest the files are a directory that ``torch.distributed.checkpoint`` reads, and Lightning's own strategies.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError
from lightning_spot.sharded import metadata
from lightning_spot.sharded.plan import ALIGNMENT, Plan, Planner, State, aligned, archive_of, is_extra, tensors_file
from lightning_spot.sharded.reader import load_value
from lightning_spot.snapshot.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.snapshot.layout import Entry, Layout, filled, lay_out_in_any_case
from lightning_spot.snapshot.pieces import Piece
from lightning_spot.snapshot.safe_load import safe_load
from lightning_spot.snapshot.tensor_index import SHARDS_FILE, Archived, Path, Shard, Shards


def state_file(rank: int) -> str:
    """Name of the file with a rank's own state."""
    return f"rank-{rank:04d}.pt"


def _piece(path: Path, box: Shard, tensor: torch.Tensor) -> Piece:
    """The elements of a box that this rank writes, and where they go.

    Raises:
        NotSerializableError: if this rank has others than the tensor's placements say.
    """
    # to_local() asks autograd, which takes 50 times as long
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.shape != box.sizes:
        raise NotSerializableError(
            f"{metadata.name_of(path)} has {tuple(local.shape)} elements on this rank, and {box.sizes} by its"
            " placements: it cannot be saved in shards"
        )
    if not _is_in_order(local):
        local = local.detach().resolve_conj().resolve_neg().contiguous()
    start = int(local.storage_offset()) * local.element_size()
    return Piece(local.untyped_storage(), box.at.offset + box.data, local.nbytes, start)


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


_VALUES_FILE = "__0_1.distcp"


@dataclass(frozen=True, slots=True)
class ShardedImage:
    """What one rank writes of a sharded snapshot, before it is filled; not its own state.

    Attributes:
        layout: of it.
        files: into which it is cut at rest.
        digest: of all that the ranks must agree on.
        tensor_nbytes: of the tensors of all ranks, with what is around them.
        rest: on rank 0, the file with the rest of the checkpoint.
    """

    layout: Layout
    files: tuple[FileSpan, ...]
    digest: str
    tensor_nbytes: int
    rest: Layout | None


class ShardedLayouter:
    """Lays one sharded snapshot after the other out, on each rank, for one thread.

    Args:
        rank: this one.
        world_size: number of ranks.
        token: of the attempt: ranks of two trainers never agree.

    Attributes:
        unreadable: why no resume will read what was laid out, as far as trying has shown; ``""`` if one will.
    """

    def __init__(self, rank: int, world_size: int, token: str = "") -> None:
        self._rank, self._token = rank, token
        self._planner = Planner(world_size)
        self._plan: Plan | None = None
        self._digest = ""
        self._frame: list[Entry] = []
        self._mine: list[tuple[int, Shard]] = []
        self.unreadable = ""
        self._tried: set[tuple[Path, type]] = set()
        self._index: tuple[Plan, list[tuple[Path, Archived]], list[tuple[str, bytes]]] | None = None

    def lay_out(self, state: State, rest: Any = None) -> ShardedImage:
        """Lay a snapshot out.

        Args:
            state: of the model and its optimizers, nested; the keys are those of Lightning's sharded checkpoints.
            rest: of the checkpoint, on rank 0.

        Raises:
            NotSerializableError: if something of it cannot be saved.
        """
        plan, tensors, values = self._planner.plan(state)
        if self._plan is not plan:
            self._place(plan)
        pieces = tuple([_piece(plan.tensors[number].path, box, tensors[number]) for number, box in self._mine])
        frame, nbytes = [*self._frame], plan.sizes[self._rank]
        files = [FileSpan(tensors_file(self._rank), 0, nbytes)] if nbytes else []
        end, found = nbytes, None
        if self._rank == 0:
            content = bytes(filled(lay_out_in_any_case(rest, what="the checkpoint")))
            found = Layout(len(content), ((0, content),), ())
            for name, data in (*self._behind(plan, values), (metadata.REST_FILE, content)):
                span = FileSpan(name, aligned(end, FILE_ALIGNMENT_BYTES), len(data))
                end = span.stop
                files.append(span)  # with zeros up to the next one: the slot may hold anything there
                frame.append((span.offset, data + bytes(aligned(end, FILE_ALIGNMENT_BYTES) - end)))
        layout = Layout(aligned(end, FILE_ALIGNMENT_BYTES), tuple(frame), pieces)
        return ShardedImage(layout, tuple(files), self._digest, sum(plan.sizes), found)

    def _place(self, plan: Plan) -> None:
        mine, frame = plan.by_rank[self._rank], list[Entry]()
        ends = [*(box.at.offset for _, box in mine[1:]), aligned(plan.sizes[self._rank], FILE_ALIGNMENT_BYTES)]
        for (number, box), end in zip(mine, ends, strict=False):
            archive, _ = archive_of(metadata.dtype_of(plan.tensors[number]), box.sizes)
            frame += [(box.at.offset + at, data) for at, data in archive.frame]
            frame.append((box.at.offset + box.at.nbytes, bytes(end - box.at.offset - box.at.nbytes)))
        self._frame = _joined(frame)
        self._digest = plan.digest(self._token)
        self._mine = [(number, box) for number, box in mine if box.numel]
        self._plan = plan

    def _behind(self, plan: Plan, values: Sequence[Any]) -> list[tuple[str, bytes]]:
        """Files of values that are no tensors, and of what says where all lies: that is long, and seldom changes."""
        data = bytearray()
        placed: list[tuple[Path, Archived]] = []
        for path, value in zip(plan.values, values, strict=True):
            archive = filled(lay_out_in_any_case(value, what=metadata.name_of(path)))
            self._try(path, type(value), archive)
            data += bytes(-len(data) % ALIGNMENT)
            placed.append((path, Archived(_VALUES_FILE, len(data), len(archive))))
            data += archive
        if self._index is None or self._index[0] is not plan or self._index[1] != placed:
            shards = Shards(plan.world_size, plan.tensors, tuple(placed))
            index = [(SHARDS_FILE, shards.to_json()), (metadata.METADATA_FILE, metadata.pickled(shards))]
            self._index = (plan, placed, index)
        return [*([(_VALUES_FILE, bytes(data))] if placed else []), *self._index[2]]

    def _try(self, path: Path, kind: type, archive: bytearray) -> None:
        """Try once whether a value can be read back; what modules give with ``get_extra_state`` is read elsewhere."""
        if (path, kind) in self._tried or any(map(is_extra, map(str, path[1:2]))):
            return
        self._tried.add((path, kind))
        try:
            load_value(io.BytesIO(archive), metadata.name_of(path))
        except CorruptSnapshotError as error:
            self.unreadable = self.unreadable or str(error)


def _joined(frame: list[Entry]) -> list[Entry]:
    """The same frame in fewer entries: what lies side by side is one."""
    joined: list[tuple[int, bytearray]] = []
    for at, data in frame:
        if joined and joined[-1][0] + len(joined[-1][1]) == at:
            joined[-1][1].extend(data)
        else:
            joined.append((at, bytearray(data)))
    return [(at, bytes(data)) for at, data in joined]


def load_state(data: memoryview) -> Any:
    """Read the file with a rank's own state; nothing in it runs code."""
    return safe_load(io.BytesIO(data))
