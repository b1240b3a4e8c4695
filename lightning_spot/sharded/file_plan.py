"""Lays a sharded snapshot out before it is filled: the files that each rank writes, and what lies where in them.

Where in the ranks' files their tensors lie, every rank finds from the plan, by itself. What else there is to write is
rank 0's, and lies behind its tensors. No tensor, and no memory, is kept alive from one snapshot to the next.

At rest the files are a directory that ``torch.distributed.checkpoint`` reads, and Lightning's own strategies.
"""

from __future__ import annotations

import functools
import io
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import Entry, Layout, Layouter, filled, lay_out, lay_out_plain
from lightning_spot.image.parts import checksum
from lightning_spot.image.pickling import Named
from lightning_spot.image.pieces import Piece
from lightning_spot.image.safe_load import safe_load
from lightning_spot.image.tensor_index import SHARDS_FILE, Archived, Path, Shard, ShardedTensor, Shards, StoredValue
from lightning_spot.sharded import metadata
from lightning_spot.sharded.plan import Chunk, Plan, Planner, State, is_extra
from lightning_spot.sharded.reader import load_value

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
        offset: of the archive in the rank's file.
        pad: zeros behind it, up to the next one.
    """

    item: int
    chunk: Chunk
    form: Form
    offset: int
    pad: int


class Places:
    """Where the tensors lie, for one plan.

    Args:
        plan: of the state.

    Attributes:
        plan: of the state.
        sizes: of the file with each rank's tensors; 0 for a rank that writes none.
        tensors: where their boxes lie.
        by_rank: the boxes that each rank writes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.by_rank: list[list[Placed]] = [[] for _ in range(plan.world_size)]
        chunks: list[list[tuple[int, Chunk]]] = [[] for _ in range(plan.world_size)]
        for number, tensor in enumerate(plan.tensors):
            for chunk in tensor.chunks:
                chunks[chunk.rank].append((number, chunk))
        shards: list[list[Shard]] = [[] for _ in plan.tensors]
        self.sizes = [self._place(rank, boxes, shards) for rank, boxes in enumerate(chunks)]
        self.tensors = tuple(
            ShardedTensor(tensor.path, tensor.dtype, tensor.shape, tuple(shards[number]))
            for number, tensor in enumerate(plan.tensors)
        )

    def _place(self, rank: int, boxes: list[tuple[int, Chunk]], shards: list[list[Shard]]) -> int:
        """Give the boxes of one rank their places in its file; the size of that."""
        name, at, end = tensors_file(rank), 0, 0
        for place, (number, chunk) in enumerate(boxes):
            form = form_of(self.plan.tensors[number].dtype, chunk.sizes)
            end = at + form.nbytes
            following = aligned(end, ALIGNMENT if place < len(boxes) - 1 else FILE_ALIGNMENT_BYTES)
            self.by_rank[rank].append(Placed(number, chunk, form, at, following - end))
            shards[number].append(Shard(chunk.offsets, chunk.sizes, Archived(name, at, form.nbytes), form.data))
            at = following
        return end


def tensors_file(rank: int) -> str:
    """Name of the file with the tensors that a rank writes."""
    return f"__{rank}_0.distcp"


def state_file(rank: int) -> str:
    """Name of the file with a rank's own state."""
    return f"rank-{rank:04d}.pt"


def aligned(place: int, alignment: int) -> int:
    """The next multiple."""
    return -(-place // alignment) * alignment


class _Source:
    """A box of a tensor that this rank writes, and the memory it was in last.

    Args:
        path: of the tensor.
        placed: the box.
        numbers: for storages that come one after the other.

    Attributes:
        sizes: of the box.
        local: gives what this rank had of the tensor, as long as that lives.
        address: of its first element.
    """

    __slots__ = ("_chunk", "_named", "_numbers", "_path", "_place", "address", "local", "sizes")

    def __init__(self, path: Path, placed: Placed, numbers: Iterator[int]) -> None:
        self._path, self._numbers = path, numbers
        self._chunk, self.sizes = placed.chunk, torch.Size(placed.chunk.sizes)
        self._place: Any = (placed.offset + placed.form.data, placed.form.data_nbytes, None, 0)
        self.address = 0
        self.local: Callable[[], torch.Tensor | None] = lambda: None
        self._named: Named | None = None

    def piece(self, tensor: torch.Tensor) -> Piece:
        """The elements, and where they go.

        Raises:
            NotSerializableError: if this rank has others than the tensor's placements say.
        """
        # to_local() asks autograd, which takes 50 times as long
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        if (
            self.local() is not local
            or local.data_ptr() != self.address
            or local.shape != self.sizes
            or not _is_in_order(local)
            or self._named is None
            or not self._named.is_of(local.untyped_storage())
        ):
            local = self._look(local)
        return Piece(local.untyped_storage(), *self._place)

    def _look(self, local: torch.Tensor) -> torch.Tensor:
        """Find out where elements lie that are not where they were; or give them a place, in order."""
        if local.shape != self.sizes:
            raise NotSerializableError(
                f"{metadata.name_of(self._path)} has {tuple(local.shape)} elements on rank {self._chunk.rank}, and"
                f" {tuple(self.sizes)} by its placements: it cannot be saved in shards"
            )
        if not _is_in_order(local):
            local = local.detach().resolve_conj().resolve_neg().contiguous()
        storage = local.untyped_storage()
        if self._named is None or not self._named.is_of(storage):
            self._named = Named(next(self._numbers), storage)
        start = int(local.storage_offset()) * local.element_size()
        self._place = (*self._place[:2], self._named, start)
        self.local, self.address = weakref.ref(local), local.data_ptr()
        return local


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
        self._places: Places | None = None
        self._digest = ""
        self._frame: Frame = []
        self._sources: list[tuple[int, _Source]] = []  # of the boxes that this rank writes, by number of their tensor
        self._numbers = itertools.count(1)
        self._values = _Values()
        self._rest_layouter = Layouter()
        self._last_behind: _Behind | None = None

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
        places = self._places
        if places is None or places.plan is not plan:
            places = self._places = self._place(plan)
        pieces = tuple([source.piece(tensors[number]) for number, source in self._sources])
        frame, nbytes = self._frame, places.sizes[self._rank]
        files = (FileSpan(tensors_file(self._rank), 0, nbytes),) if nbytes else ()
        end, found = aligned(nbytes, FILE_ALIGNMENT_BYTES), None
        if self._rank == 0:
            behind = self._behind(places, values, end)
            content = self._rest_of(rest)
            last = FileSpan(metadata.REST_FILE, behind.end, len(content))
            files = (*files, *behind.files, last)
            frame = [*frame, *behind.frame, _entry(last, content)]
            end, found = aligned(last.stop, FILE_ALIGNMENT_BYTES), Layout(len(content), ((0, content),), ())
        return ShardedImage(Layout(end, tuple(frame), pieces), files, self._digest, sum(places.sizes), found)

    def _place(self, plan: Plan) -> Places:
        places = Places(plan)
        self._frame = []
        for placed in places.by_rank[self._rank]:
            *before, (last_at, last) = placed.form.frame
            for at, data in (*before, (last_at, last + bytes(placed.pad))):
                self._frame.append((placed.offset + at, data))
        self._frame = _joined(self._frame)
        # Also of the places: another torch may put other frames around the elements.
        self._digest = checksum(f"{plan.digest} {places.sizes} {self._token}".encode())
        filled = (placed for placed in places.by_rank[self._rank] if placed.form.data_nbytes)
        self._sources = [
            (placed.item, _Source(plan.tensors[placed.item].path, placed, self._numbers)) for placed in filled
        ]
        return places

    def _behind(self, places: Places, found: list[Any], start: int) -> _Behind:
        """Lay out what says where everything lies, and the values that are no tensors."""
        archives = self._values.archive(places.plan.values, found)
        behind = self._last_behind
        if behind is None or behind.places is not places or behind.archives is not archives:
            behind = self._last_behind = _put_behind(places, archives, behind, start)
        return behind

    def _rest_of(self, rest: Any) -> bytes | bytearray:
        """The file with the rest of the checkpoint; ``torch.save`` takes three times as long."""
        try:
            return filled(self._rest_layouter.lay_out(rest))
        except Exception:  # pickling runs the user's code, which may raise anything; what is really wrong is said below
            return serialised(rest, "the checkpoint")


class _Archives(NamedTuple):
    """Values that are no tensors, in one file.

    Attributes:
        values: where each lies in it.
        data: the file.
    """

    values: tuple[StoredValue, ...]
    data: bytes


class _Behind(NamedTuple):
    """What comes behind all that is of fixed size, but for the rest of the checkpoint.

    Attributes:
        places: of what is of fixed size.
        archives: of the values.
        files: of the values, if there are any, and two that say what lies where.
        frame: with each file; where one has stayed as it was, it is the same entry.
        end: where the last one ends.
    """

    places: Places
    archives: _Archives
    files: list[FileSpan]
    frame: Frame
    end: int


def _put_behind(places: Places, archives: _Archives, before: _Behind | None, start: int) -> _Behind:
    """Lay values out, and what says where all lies: that is long, and stays until a value takes another length."""
    files: list[FileSpan] = []
    frame: Frame = []
    end = start

    def put(name: str, content: bytes) -> None:
        nonlocal end
        files.append(FileSpan(name, end, len(content)))
        frame.append(_entry(files[-1], content))
        end = aligned(files[-1].stop, FILE_ALIGNMENT_BYTES)

    if archives.values:
        put(_VALUES_FILE, archives.data)
    if before is not None and before.places is places and before.archives.values == archives.values:
        return _Behind(places, archives, before.files, [*frame, *before.frame[len(frame) :]], before.end)
    shards = Shards(places.plan.world_size, places.tensors, archives.values)
    put(SHARDS_FILE, shards.to_json())
    put(metadata.METADATA_FILE, metadata.pickled(shards))
    return _Behind(places, archives, files, frame, end)


class _Values:
    """Archives of values that are no tensors; those that stay as they are, are not made anew.

    Attributes:
        unreadable: why one of them cannot be read back, found by trying; ``""`` if all can.
    """

    def __init__(self) -> None:
        self.unreadable = ""
        self._last: tuple[Sequence[Path], list[bytes | bytearray], _Archives] = ((), [], _Archives((), b""))
        self._known: dict[Path, tuple[object, bytes | bytearray]] = {}
        self._tried: set[tuple[Path, type]] = set()

    def archive(self, paths: Sequence[Path], found: Sequence[Any]) -> _Archives:
        """The file with all of them, and where each lies in it; the same object where nothing has changed."""
        made = [self._archived(path, value) for path, value in zip(paths, found, strict=True)]
        of_paths, before, archives = self._last
        if of_paths is paths and all(map(operator.is_, made, before)):
            return archives
        data = bytearray()
        values = []
        for path, archive in zip(paths, made, strict=True):
            data += bytes(-len(data) % ALIGNMENT)
            values.append(StoredValue(path, Archived(_VALUES_FILE, len(data), len(archive))))
            data += archive
        archives = _Archives(tuple(values), bytes(data))
        self._last = (paths, made, archives)
        return archives

    def _archived(self, path: Path, value: Any) -> bytes | bytearray:
        told = _told(value)
        known = self._known.get(path)
        if told is None or known is None or known[0] != told:
            known = (told, serialised(value, metadata.name_of(path)))
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


def serialised(value: Any, what: str) -> bytes | bytearray:
    """``torch.save`` of a value.

    Raises:
        NotSerializableError: if it cannot be saved.
    """
    try:
        return lay_out_plain(value).frame[0][1]
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise _cannot(what, error) from error


def load_state(data: memoryview) -> Any:
    """Read the file with a rank's own state; nothing in it runs code."""
    return safe_load(io.BytesIO(data))


def _cannot(what: str, error: Exception) -> NotSerializableError:
    return NotSerializableError(
        f"{what} cannot be serialised ({type(error).__name__}: {error}); look at what on_save_checkpoint, state_dict"
        " and hyperparameters put into the checkpoint"
    )


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


def _entry(span: FileSpan, data: bytes | bytearray) -> Entry:
    """A file in the frame, with zeros up to the next one: the slot may hold anything there."""
    padding = aligned(span.stop, FILE_ALIGNMENT_BYTES) - span.stop
    return span.offset, data + bytes(padding) if padding else data
