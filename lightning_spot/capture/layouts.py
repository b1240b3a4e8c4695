"""What one rank writes of a snapshot, laid out before it is filled: all of a checkpoint, a range of it, or its shard.

A shard of several is the rank's part of the files that all have in common, and behind it what only this rank knows.
Each of these begins with a new part of the image, and zeros fill the last one up: so the checksums of the whole are
those of the shards.

With DDP all ranks hold the same parameters and states of optimizers. These storages begin the one file, in the order in
which the optimizers hold them, so that each rank computes their places by itself. The file is cut there, at multiples
of the size of a part, into about equal ranges; the last one, with all that follows, is rank 0's.
"""

from __future__ import annotations

import ctypes
import logging
import random
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lightning_spot.capture.tensors import Owners, storage_address, tensors_in
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.say import say
from lightning_spot.sharded.file_plan import ShardedLayouter, state_file
from lightning_spot.sharded.plan import State, aligned
from lightning_spot.snapshot.files import FILE_ALIGNMENT_BYTES, MODEL_FILE, FileSpan
from lightning_spot.snapshot.layout import Entry, Layout, lay_out_first, lay_out_in_any_case, outline_of
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum
from lightning_spot.snapshot.shards import part_bytes_for


class Laid(NamedTuple):
    """What a rank writes of a snapshot.

    Attributes:
        layout: of its slot.
        manifest: of the snapshot or shard, with size and files; not sealed.
        tried: of a checkpoint that is tried to be read back, what is no tensor's; ``None`` where there is none.
    """

    layout: Layout
    manifest: Manifest
    tried: Layout | None


_OWN = "the state of this rank"


def _put_together(
    manifest: Manifest, main: Layout, files: Sequence[FileSpan], own: Layout | None, *, splits: bool
) -> tuple[Layout, Manifest]:
    """Put what only this rank knows behind its part of the files that ranks have in common.

    Args:
        manifest: of the shard, with the size of its parts.
        main: that part.
        files: of it.
        own: what only this rank knows; ``None`` if that is in the part.
        splits: whether each begins with a part of the image; else with a page.
    """
    part_bytes = manifest.part_bytes
    start = aligned(main.nbytes, part_bytes if splits else FILE_ALIGNMENT_BYTES)
    frame, pieces, end = [*main.frame], main.pieces, main.nbytes
    if own is not None:
        frame += [*_zeros(end, start), *((start + at, data) for at, data in own.frame)]
        pieces = (*pieces, *(piece._replace(offset=start + piece.offset) for piece in own.pieces))
        end = start + own.nbytes
        files = (*files, FileSpan(state_file(manifest.shard.writer if manifest.shard else 0), start, own.nbytes))
    nbytes = aligned(end, part_bytes if manifest.shard is not None else FILE_ALIGNMENT_BYTES)
    frame += _zeros(end, nbytes)
    return Layout(nbytes, tuple(frame), pieces), replace(manifest, nbytes=nbytes, files=tuple(files))


def _zeros(start: int, stop: int) -> list[Entry]:
    """Zeros for a range of a slot, which may hold anything there."""
    return [(start, bytes(stop - start))] if start < stop else []


# -- ranks that all hold the same (DDP), and one alone ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankCheckpoint:
    """A checkpoint that several ranks write, as one of them has it.

    Attributes:
        values: Lightning's checkpoint; on rank 0 with its own exact state.
        own: the exact state of this rank; on rank 0 it is not looked at.
        nbytes: of the parameters, which tell how large parts are; the same on all ranks.
        ranges: the ranks that write a range of the one file, rank 0 last; the same on all ranks.
    """

    values: dict[str, Any]
    own: Any
    nbytes: int
    ranges: tuple[int, ...] = (0,)


RANGE_BYTES = 64 * 1024 * 1024
"""For less, no further rank writes: the bytes of a range are to be worth a slot."""

_SAMPLES, _SAMPLE_BYTES = 32, 64


def ranges_for(nbytes: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks that write a range of a file, rank 0 last.

    Args:
        nbytes: of the storages that all ranks hold alike, about.
        ranks: that could, rank 0 among them.
    """
    others = [rank for rank in ranks if rank]
    return (*others[: max(0, -(-nbytes // RANGE_BYTES) - 1)], 0)


def plan_ranges(
    tensors: Sequence[torch.Tensor], ranges: Sequence[int], part_bytes: int, seal: Sequence[str]
) -> tuple[dict[int, tuple[int, int | None]], str]:
    """Cut a file into ranges.

    Args:
        tensors: that begin the file, and that all ranks hold alike, each the whole of its storage.
        ranges: the ranks that write a range each, rank 0 last. Where a part is too large for so many, the last of the
            others write none.
        part_bytes: size of a part.
        seal: what else has to be the same on all ranks.

    Returns:
        by the rank that writes it, the first byte of each range, and where it stops: ``None`` at the end of the file;
        and the digest of all that the ranks must agree on.
    """
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    nbytes = sum(sizes)
    count = max(1, min(len(ranges), nbytes // part_bytes))
    cuts = [number * nbytes // count // part_bytes * part_bytes for number in range(count)]
    facts = [part_bytes, *cuts, *([*sizes, *(tensor.dtype for tensor in tensors)] if count > 1 else ())]
    digest = checksum(" ".join(map(str, [*facts, *seal])).encode())
    bounds = zip(cuts, [*cuts[1:], None], strict=True)
    return dict(zip((*ranges[: count - 1], 0), bounds, strict=True)), digest


def sample(tensors: Sequence[torch.Tensor], seed: str) -> str:
    """Checksums of a few bytes of what this rank holds, at places that ``seed`` tells: equal states give equal ones.

    Tensors on a GPU are not looked at: that would wait for it.
    """
    dice = random.Random(seed)
    on_cpu = [tensor for tensor in tensors if tensor.is_cpu]
    sums = []
    for tensor in dice.sample(on_cpu, min(len(on_cpu), _SAMPLES)):
        storage = tensor.untyped_storage()
        start = dice.randrange(max(1, storage.nbytes() - _SAMPLE_BYTES))
        data = ctypes.string_at(storage.data_ptr() + start, min(_SAMPLE_BYTES, storage.nbytes()))
        sums.append(f"{zlib.crc32(data):08x}")
    return ".".join(sums)


class CheckpointLayouter:
    """Lays out checkpoints of which rank 0 has all, or a rank's shard of them.

    The content of a snapshot of one writer is the checkpoint itself, that of one of several a :class:`RankCheckpoint`.

    Args:
        token: of the attempt: ranks of two trainers never agree.

    Attributes:
        why_alone: why this rank alone can write a checkpoint, as far as the last one showed; ``""`` if others can take
            ranges of it.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self.why_alone = ""

    def lay_out(self, content: Any, manifest: Manifest, owned: Owners) -> Laid:
        """Lay a snapshot out.

        Args:
            content: what to save.
            manifest: what it is.
            owned: tensors that only optimizers change, by the address of their storage.

        Raises:
            NotSerializableError: if it holds what cannot be pickled.
            SnapshotFailedError: if this rank cannot write its shard of it.
            MemoryError: if there is not the memory for it now; the next one may be laid out.
        """
        shard = manifest.shard
        if shard is None:
            layout = lay_out_in_any_case(content, early=owned)
            return Laid(layout, replace(manifest, nbytes=layout.nbytes), outline_of(layout))
        assert isinstance(content, RankCheckpoint)
        part_bytes = part_bytes_for(content.nbytes // shard.writers)
        alike = _alike(content, owned) if len(content.ranges) > 1 else []
        seal = (self._token, sample(alike, manifest.snapshot))
        bounds, digest = plan_ranges(alike, content.ranges, part_bytes, seal)
        main, whole = self._main(content.values, shard.writer, alike if len(bounds) > 1 else [], bounds)
        start, files = 0, list[FileSpan]()
        if shard.writer in bounds:
            start, stop = bounds[shard.writer]
            main = main.cut(start, main.nbytes if stop is None else stop)
            files = [FileSpan(MODEL_FILE, 0, main.nbytes)]
        own = lay_out_in_any_case(content.own, what=_OWN) if shard.writer else None
        manifest = replace(manifest, part_bytes=part_bytes, shard=replace(shard, digest=digest, start=start))
        layout, manifest = _put_together(manifest, main, files, own, splits=True)
        return Laid(layout, manifest, outline_of(whole) if whole is not None else None)

    def _main(
        self, values: dict[str, Any], writer: int, first: Sequence[torch.Tensor], bounds: Container[int]
    ) -> tuple[Layout, Layout | None]:
        """The file that is cut into ranges, as far as a writer has to know it; and if it is rank 0, all of it."""
        storages = [tensor.untyped_storage() for tensor in first]
        if writer:
            return lay_out_first(storages) if writer in bounds else Layout(0, (), ()), None
        whole = lay_out_in_any_case(values, storages)
        self.why_alone = whole.problem
        if self.why_alone and first:
            raise SnapshotFailedError(
                f"rank 0 alone can write it: it is serialised with plain torch.save ({self.why_alone})",
                reason=FailureReason.SHARD_MISSING,
            )
        return whole, whole


def _alike(content: RankCheckpoint, owned: Owners) -> list[torch.Tensor]:
    """What optimizers own of a checkpoint, one tensor of each storage: a user's hooks may have taken some out."""
    saved = {storage_address(tensor) for tensor in tensors_in(content.values)} - {0}  # which is that of empty ones
    return [tensors[0] for address, tensors in owned.items() if address in saved]


# -- ranks that each have a shard of the model (FSDP2, tensor parallelism) --------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardedCheckpoint:
    """A checkpoint of a model in shards, as one rank has it.

    Attributes:
        state: of the model and its optimizers, nested, by the keys of Lightning's sharded checkpoints.
        own: exact state of this rank.
        rest: of the checkpoint; that of rank 0 counts.
    """

    state: State
    own: Any
    rest: dict[str, Any]


class ShardedCheckpointLayouter:
    """Lays out one rank's shard of a model in shards, a :class:`ShardedCheckpoint`.

    Args:
        rank: this one.
        world_size: number of ranks.
        token: of the attempt: ranks of two trainers never agree.
    """

    why_alone = ""

    def __init__(self, rank: int, world_size: int, token: str = "") -> None:
        self._world_size = world_size
        self._layouter = ShardedLayouter(rank, world_size, token)

    def lay_out(self, content: ShardedCheckpoint, manifest: Manifest, owned: Owners) -> Laid:
        """See :meth:`CheckpointLayouter.lay_out`."""
        own = lay_out_in_any_case(content.own, what=_OWN)
        image = self._layouter.lay_out(content.state, content.rest)
        if why := self._layouter.unreadable:
            text = "snapshots are taken, but NO RESUME from them will be possible: {about}"
            say(logging.ERROR, "not-resumable", text, about=why)
        if manifest.shard is not None:
            part_bytes = part_bytes_for(image.tensor_nbytes // self._world_size)
            manifest = replace(manifest, part_bytes=part_bytes, shard=replace(manifest.shard, digest=image.digest))
        layout, manifest = _put_together(manifest, image.layout, image.files, own, splits=False)
        return Laid(layout, manifest, image.rest)


RankLayouter = CheckpointLayouter | ShardedCheckpointLayouter
"""Lays out what one rank writes of one snapshot after the other, for one thread."""
