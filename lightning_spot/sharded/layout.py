"""Lays a sharded snapshot out before it is filled: what each rank writes into the image, and the files it is cut into.

At rest it is a directory that ``torch.distributed.checkpoint`` reads, and Lightning's own strategies.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_spot.errors import LayoutUnsupported, NotSerialisable
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import Layout, Layouter, Piece, filled, lay_out_plain
from lightning_spot.image.parts import checksum
from lightning_spot.image.pickling import Named
from lightning_spot.image.shards import SHARDS_FILE, Archived, Path, Shards, StoredValue
from lightning_spot.sharded import metadata
from lightning_spot.sharded.places import ALIGNMENT, Placed, Places, aligned
from lightning_spot.sharded.plan import Plan, Planner, State

_VALUES_FILE = "__0_1.distcp"

Frame = list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class ShardedImage:
    """A sharded snapshot before it is filled, as far as one rank writes it.

    Attributes:
        layout: what this rank writes; on rank 0, its size is that of the whole image.
        files: into which the image is cut at rest; on rank 0 only.
        digest: of all that the ranks must agree on.
    """

    layout: Layout
    files: tuple[FileSpan, ...]
    digest: str


class ShardedLayouter:
    """Lays one sharded snapshot after the other out, on each rank, for one thread.

    Args:
        rank: this one.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._planner = Planner(world_size)
        self._places: Places | None = None
        self._digest = ""
        self._frame: Frame = []
        self._named: dict[tuple[Path, int], Named] = {}
        self._numbers = 0
        self._values = _Values()
        self._index: tuple[tuple[Any, ...], tuple[tuple[str, bytes], ...]] = ((), ())

    def plan(self, state: State) -> Plan:
        """Who writes what of a state; see :meth:`Planner.plan`."""
        return self._planner.plan(state)[0]

    def lay_out(
        self, state: State, own: bytes | bytearray, state_bytes: Sequence[int], rest: Any = None
    ) -> ShardedImage:
        """Lay a snapshot out.

        Args:
            state: of the model and its optimizers, nested; the keys are those of Lightning's sharded checkpoints.
            own: the file with this rank's own state, of ``state_bytes[rank]`` bytes, see :func:`state_archive`.
            state_bytes: of the file that each rank has for its own state, agreed by all.
            rest: of the checkpoint, on rank 0.

        Raises:
            NotSerialisable: if something of it cannot be saved.
        """
        plan, items = self._planner.plan(state)
        places = self._places
        if places is None or places.plan is not plan or places.state_bytes != tuple(state_bytes):
            places = self._places = self._place(plan, state_bytes)
        pieces = [self._piece(places, placed, items) for placed in places.by_rank[self._rank]]
        frame = list(self._frame)
        span = places.state_of(self._rank)
        frame.append((span.offset, _padded(bytes(own), span)))
        files, end = list(places.files), places.end
        if self._rank == 0:
            end = self._behind(places, items, rest, frame, files)
        present = tuple(piece for piece in pieces if piece is not None)
        return ShardedImage(Layout(end, tuple(frame), present), tuple(files), self._digest)

    def _place(self, plan: Plan, state_bytes: Sequence[int]) -> Places:
        places = Places(plan, state_bytes)
        self._frame = []
        for placed in places.by_rank[self._rank]:
            *before, (last_at, last) = placed.form.frame
            for at, data in (*before, (last_at, last + bytes(placed.pad))):
                self._frame.append((placed.offset + at, data))
        self._digest = checksum(f"{plan.digest} {places.state_bytes}".encode())
        self._named = {}
        return places

    def _piece(self, places: Places, placed: Placed, items: dict[Path, Any]) -> Piece | None:
        """A box of a tensor, and where its elements go; ``None`` if it has none."""
        form, tensor = placed.form, places.plan.tensors[placed.item]
        if not form.data_nbytes:
            return None
        local = items[tensor.path]
        local = getattr(local, "_local_tensor", local)  # to_local() asks autograd, which takes 50 times as long
        if tuple(local.shape) != placed.chunk.sizes:
            raise NotSerialisable(
                f"{metadata.name_of(tensor.path)} has {tuple(local.shape)} elements on rank {self._rank}, and"
                f" {placed.chunk.sizes} by its placements: it cannot be saved in shards"
            )
        if not local.is_contiguous() or local.is_conj() or local.is_neg():
            local = local.detach().resolve_conj().resolve_neg().contiguous()
        storage = local.untyped_storage()
        named = self._name(tensor.path, placed, storage, form.data_nbytes)
        start = local.storage_offset() * local.element_size()
        if (start, form.data_nbytes) != (0, storage.nbytes()):
            storage = storage[start : start + form.data_nbytes]  # which shares its memory
        crc_at = tuple(placed.offset + at for at in form.crc_at)
        return Piece(storage, placed.offset + form.data, form.data_nbytes, crc_at, named)

    def _name(self, path: Path, placed: Placed, storage: torch.UntypedStorage, nbytes: int) -> Named:
        """The storage by name, the same object as long as it is the same storage."""
        key = (path, placed.offset)
        named = self._named.get(key)
        if named is None or not named.is_of(storage):
            self._numbers += 1
            named = self._named[key] = Named(self._numbers, storage)
            named.nbytes = nbytes
        return named

    def _behind(self, places: Places, items: dict[Path, Any], rest: Any, frame: Frame, files: list[FileSpan]) -> int:
        """Lay out what varies in length; the end of the image."""
        values, data = self._values.archive(places.plan.values, items)
        key = (id(places), tuple(value.at for value in values))
        if self._index[0] != key:
            shards = Shards(places.plan.world_size, places.tensors, values)
            index = ((SHARDS_FILE, shards.to_json()), (metadata.METADATA_FILE, metadata.pickled(shards)))
            self._index = (key, index)
        end = places.end
        last = (metadata.REST_FILE, serialised(rest, "the checkpoint"))
        for name, content in (*([(_VALUES_FILE, data)] if values else []), *self._index[1], last):
            span = FileSpan(name, end, len(content))
            files.append(span)
            frame.append((end, _padded(content, span)))
            end = aligned(end + len(content), FILE_ALIGNMENT_BYTES)
        return end


class _Values:
    """Archives of values that are no tensors; those that stay as they are, are not made anew."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[str, bytes]] = {}

    def archive(self, paths: Sequence[Path], items: dict[Path, Any]) -> tuple[tuple[StoredValue, ...], bytes]:
        """The file with all of them, and where each lies in it."""
        data = bytearray()
        values = []
        for path in paths:
            archive = self._archived(path, items[path])
            data += bytes(-len(data) % ALIGNMENT)
            values.append(StoredValue(path, Archived(_VALUES_FILE, len(data), len(archive))))
            data += archive
        return tuple(values), bytes(data)

    def _archived(self, path: Path, value: Any) -> bytes:
        told = repr(value) if _is_plain(value) else None
        known = self._known.get(path)
        if told is None or known is None or known[0] != told:
            known = (told or "", serialised(value, metadata.name_of(path)))
            if told is not None:
                self._known[path] = known
        return known[1]


def state_archive(state: Any, nbytes: int | None = None) -> bytearray:
    """The file with a rank's own state, which ``torch.load`` reads.

    Args:
        state: plain values and tensors.
        nbytes: size that it is to have; ``None`` for no more than it needs.

    Raises:
        LayoutUnsupported: if it needs more than ``nbytes``.
        NotSerialisable: if something of it cannot be saved.
    """
    try:
        return filled(Layouter().lay_out(state, nbytes))
    except LayoutUnsupported:
        raise
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise _cannot("the state of this rank", error) from error


def serialised(value: Any, what: str) -> bytes:
    """``torch.save`` of a value.

    Raises:
        NotSerialisable: if it cannot be saved.
    """
    try:
        return lay_out_plain(value).frame[0][1]
    except Exception as error:  # as above
        raise _cannot(what, error) from error


def load_state(data: memoryview) -> Any:
    """Read what :func:`state_archive` made; nothing in it runs code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _cannot(what: str, error: Exception) -> NotSerialisable:
    return NotSerialisable(
        f"{what} cannot be serialised ({type(error).__name__}: {error}); look at what on_save_checkpoint, state_dict"
        " and hyperparameters put into the checkpoint"
    )


def _is_plain(value: Any) -> bool:
    """Whether ``repr`` tells all of a value."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _padded(data: bytes, span: FileSpan) -> bytes:
    """With zeros up to the next file: the slot may hold anything there."""
    return data + bytes(aligned(span.stop, FILE_ALIGNMENT_BYTES) - span.stop)
