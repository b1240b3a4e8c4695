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
from lightning_spot.sharded.plan import ALIGNMENT, Placed, Plan, Planner, State, aligned, is_extra, tensors_file
from lightning_spot.sharded.reader import load_value
from lightning_spot.snapshot.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.snapshot.layout import Entry, Layout, filled, lay_out_in_any_case, lay_out_plain
from lightning_spot.snapshot.pieces import Piece
from lightning_spot.snapshot.safe_load import safe_load
from lightning_spot.snapshot.tensor_index import SHARDS_FILE, Archived, Path, Shards, StoredValue


def state_file(rank: int) -> str:
    """Name of the file with a rank's own state."""
    return f"rank-{rank:04d}.pt"


def _piece(placed: Placed, tensor: torch.Tensor) -> Piece:
    """The elements of a box that this rank writes, and where they go.

    Raises:
        NotSerializableError: if this rank has others than the tensor's placements say.
    """
    # to_local() asks autograd, which takes 50 times as long
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if local.shape != placed.sizes:
        raise NotSerializableError(
            f"{metadata.name_of(placed.path)} has {tuple(local.shape)} elements on this rank, and"
            f" {tuple(placed.sizes)} by its placements: it cannot be saved in shards"
        )
    if not _is_in_order(local):
        local = local.detach().resolve_conj().resolve_neg().contiguous()
    start = int(local.storage_offset()) * local.element_size()
    return Piece(local.untyped_storage(), placed.offset + placed.form.data, placed.form.data_nbytes, start)


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


_VALUES_FILE = "__0_1.distcp"

Frame = list[Entry]

_SCALARS = frozenset((type(None), bool, int, float, str))
_TEXTS = frozenset((str,))


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
    """

    def __init__(self, rank: int, world_size: int, token: str = "") -> None:
        self._rank, self._token = rank, token
        self._planner = Planner(world_size)
        self._plan: Plan | None = None
        self._digest = ""
        self._frame: Frame = []
        self._mine: list[Placed] = []
        self._values = _Values()
        self._index: tuple[Plan, tuple[StoredValue, ...], list[tuple[str, bytes]]] | None = None

    @property
    def unreadable(self) -> str:
        """Why no resume will read what was laid out, as far as that was found by trying; ``""`` if nothing was."""
        return self._values.unreadable

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
        pieces = tuple([_piece(placed, tensors[placed.number]) for placed in self._mine])
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
        self._frame, mine = [], plan.by_rank[self._rank]
        for placed in mine:
            *before, (last_at, last) = placed.form.frame
            for at, data in (*before, (last_at, last + bytes(placed.pad))):
                self._frame.append((placed.offset + at, data))
        self._frame = _joined(self._frame)
        self._digest = plan.digest(self._token)
        self._mine = [placed for placed in mine if placed.form.data_nbytes]
        self._plan = plan

    def _behind(self, plan: Plan, values: Sequence[Any]) -> list[tuple[str, bytes]]:
        """Files of values that are no tensors, and of what says where all lies: that is long, and seldom changes."""
        placed, data = self._values.archive(plan.values, values)
        if self._index is None or self._index[0] is not plan or self._index[1] is not placed:
            shards = Shards(plan.world_size, plan.tensors, placed)
            index = [(SHARDS_FILE, shards.to_json()), (metadata.METADATA_FILE, metadata.pickled(shards))]
            self._index = (plan, placed, index)
        return [*([(_VALUES_FILE, data)] if placed else []), *self._index[2]]


class _Values:
    """Archives of values that are no tensors; those that stay as they are, are not made anew.

    Attributes:
        unreadable: why one of them cannot be read back, found by trying; ``""`` if all can.
    """

    def __init__(self) -> None:
        self.unreadable = ""
        self._last: tuple[Sequence[Path], list[int], tuple[StoredValue, ...]] = ((), [], ())
        self._known: dict[Path, tuple[object, bytes | bytearray]] = {}
        self._tried: set[tuple[Path, type]] = set()

    def archive(self, paths: Sequence[Path], found: Sequence[Any]) -> tuple[tuple[StoredValue, ...], bytes]:
        """Where each of them lies in a file of all, and the file."""
        made = [self._archived(path, value) for path, value in zip(paths, found, strict=True)]
        data = bytearray()
        starts = []
        for archive in made:
            data += bytes(-len(data) % ALIGNMENT)
            starts.append(len(data))
            data += archive
        sizes = list(map(len, made))
        if self._last[0] is not paths or self._last[1] != sizes:
            places = [Archived(_VALUES_FILE, start, nbytes) for start, nbytes in zip(starts, sizes, strict=True)]
            self._last = (paths, sizes, tuple(map(StoredValue, paths, places)))
        return self._last[2], bytes(data)

    def _archived(self, path: Path, value: Any) -> bytes | bytearray:
        told = _told(value)
        known = self._known.get(path)
        if told is None or known is None or known[0] != told:
            known = (told, lay_out_plain(value, metadata.name_of(path)).frame[0][1])
            if told is not None:
                self._known[path] = known
            elif (path, type(value)) not in self._tried and not any(map(is_extra, map(str, path[1:2]))):
                self._tried.add((path, type(value)))
                self._try(path, known[1])
        return known[1]

    def _try(self, path: Path, archive: bytes | bytearray) -> None:
        try:
            load_value(io.BytesIO(archive), metadata.name_of(path))
        except CorruptSnapshotError as error:
            self.unreadable = self.unreadable or str(error)


def _joined(frame: Frame) -> Frame:
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


def _told(value: Any) -> object:
    """What tells all of a plain value, ``None`` of others."""
    if type(value) is list and _TEXTS.issuperset(map(type, value)):  # as the names of thousands of parameters
        return (list, *value)
    return repr(value) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    """Whether ``repr`` tells all of a value."""
    if type(value) in (tuple, list):
        return _SCALARS.issuperset(map(type, value)) or all(map(_is_plain, value))
    return type(value) in _SCALARS
