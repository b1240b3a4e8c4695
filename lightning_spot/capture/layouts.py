"""What one rank writes of a snapshot, laid out before it is filled: all of a checkpoint, a range of it, or its shard.

A shard of several is the rank's part of the files that all have in common, and behind it what only this rank knows.
Each of these begins with a new part of the image, and zeros fill the last one up: so the checksums of the whole are
those of the shards.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from lightning_spot.capture.ddp_plan import name_of, plan_ranges, sample
from lightning_spot.capture.tensors import Owners, owned_nbytes, owners_of, storage_address, tensors_in
from lightning_spot.errors import FailureReason, NotSerializableError, SnapshotFailedError
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, MODEL_FILE, FileSpan
from lightning_spot.image.layout import Entry, FileRange, Layout, Layouter, lay_out_plain, outline_of
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.shards import part_bytes_for
from lightning_spot.say import say
from lightning_spot.sharded.file_plan import ShardedLayouter, aligned, state_file
from lightning_spot.sharded.plan import State


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


class RankLayouter(Protocol):
    """Lays out what one rank writes of one snapshot after the other, for one thread.

    Attributes:
        why_alone: why this rank alone can write a checkpoint, as far as the last one showed; ``""`` if others can take
            ranges of it.
    """

    why_alone: str

    def lay_out(self, content: Any, manifest: Manifest, owned: Owners, kept: Owners) -> Laid:
        """Lay a snapshot out.

        Args:
            content: what to save.
            manifest: what it is.
            owned: tensors that only optimizers change, by the address of their storage.
            kept: further tensors that seldom change.

        Raises:
            NotSerializableError: if it holds what cannot be pickled.
            SnapshotFailedError: if this rank cannot write its shard of it.
            MemoryError: if there is not the memory for it now; the next one may be laid out.
        """

    def counted(self, owned: Owners, kept: Owners) -> Owners:
        """Tensors whose counts of writes tell whether they have changed."""

    def forget(self) -> None:
        """What was laid out in part is no base for the next one."""


class Outliner:
    """Makes layouts of checkpoints.

    Args:
        what: it is, for people.

    Attributes:
        problem: why the last one was serialised with plain ``torch.save``; ``""`` if it was not.
    """

    def __init__(self, what: str = "the training state") -> None:
        self._what = what
        self._layouter = Layouter()
        self.problem = ""

    def lay_out(self, checkpoint: Any, first: Sequence[torch.UntypedStorage] = ()) -> Layout:
        """Lay ``checkpoint`` out.

        Args:
            checkpoint: what to save.
            first: storages that come first, see :meth:`Layouter.lay_out`.

        Raises:
            NotSerializableError: if it holds what cannot be pickled.
            MemoryError: if there is not the memory for it now; the next one may be laid out.
        """
        self.problem = ""
        try:
            return self._layouter.lay_out(checkpoint, first)
        except MemoryError:
            raise
        except Exception as error:  # pickling runs the user's code, which may raise anything
            self.problem = f"{type(error).__name__}: {error}"
        try:
            layout = lay_out_plain(checkpoint)
        except MemoryError:
            raise
        except Exception as error:
            raise NotSerializableError(
                f"{self._what} cannot be serialised ({type(error).__name__}: {error}); look at what"
                " on_save_checkpoint, state_dict and hyperparameters put into the checkpoint"
            ) from error
        text = "checkpoints are serialized with plain torch.save, which is slower: {about}. Report it."
        say(logging.WARNING, "saved-slowly", text, about=self.problem)
        return layout

    def lay_out_first(self, first: Sequence[torch.UntypedStorage]) -> Layout:
        """Lay out how a checkpoint begins that has these storages first."""
        return self._layouter.lay_out_first(first)


class _Shards:
    """Puts the shards of one writer together, of one snapshot after the other."""

    def __init__(self) -> None:
        self._padding: dict[int, Entry] = {}  # by place in the slot
        self._last: dict[int, Entry] = {}

    def put_together(
        self, manifest: Manifest, main: Layout, files: Sequence[FileSpan], own: Layout | None, *, splits: bool
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
        self._last, self._padding = self._padding, {}
        start = aligned(main.nbytes, part_bytes if splits else FILE_ALIGNMENT_BYTES)
        frame, pieces, end = [*main.frame], main.pieces, main.nbytes
        if own is not None:
            frame += [*self._zeros(end, start), *((start + at, data) for at, data in own.frame)]
            pieces = (*pieces, *(piece._replace(offset=start + piece.offset) for piece in own.pieces))
            end = start + own.nbytes
            assert manifest.shard is not None or not splits
            files = (*files, FileSpan(state_file(_writer(manifest)), start, own.nbytes))
        nbytes = aligned(end, part_bytes if manifest.shard is not None else FILE_ALIGNMENT_BYTES)
        frame += self._zeros(end, nbytes)
        return Layout(nbytes, tuple(frame), pieces), replace(manifest, nbytes=nbytes, files=tuple(files))

    def _zeros(self, start: int, stop: int) -> list[Entry]:
        """Zeros for a range of a slot, most of them the same object as before: these are there already."""
        middle = min(stop, aligned(start, FILE_ALIGNMENT_BYTES))
        found: list[Entry] = [(start, bytes(middle - start))] if start < middle else []
        if middle < stop:
            known = self._last.get(middle)
            if known is None or len(known[1]) != stop - middle:
                known = (middle, bytes(stop - middle))
            self._padding[middle] = known
            found.append(known)
        return found


def _writer(manifest: Manifest) -> int:
    return manifest.shard.writer if manifest.shard is not None else 0


# -- ranks that all hold the same (DDP), and one alone ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankCheckpoint:
    """A checkpoint that several ranks write, as one of them has it.

    Attributes:
        values: Lightning's checkpoint; on rank 0 with its own exact state.
        own: the exact state of this rank; on rank 0 it is not looked at.
        ranges: the ranks that write a range of the one file, rank 0 last; the same on all ranks.
    """

    values: dict[str, Any]
    own: Any
    ranges: tuple[int, ...] = (0,)


class CheckpointLayouter:
    """Lays out checkpoints of which rank 0 has all, or a rank's shard of them. Implements :class:`RankLayouter`.

    The content of a snapshot of one writer is the checkpoint itself, that of one of several a :class:`RankCheckpoint`.

    Args:
        token: of the attempt: ranks of two trainers never agree.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token
        self.why_alone = ""
        self.forget()

    def forget(self) -> None:
        """See :meth:`RankLayouter.forget`."""
        self._outliner, self._own = Outliner(), Outliner("the state of this rank")
        self._range, self._shards = FileRange(), _Shards()

    def counted(self, owned: Owners, kept: Owners) -> Owners:
        """See :meth:`RankLayouter.counted`."""
        return owners_of(owned, kept)

    def lay_out(self, content: Any, manifest: Manifest, owned: Owners, kept: Owners) -> Laid:
        """See :meth:`RankLayouter.lay_out`."""
        shard = manifest.shard
        if shard is None:
            layout = self._outliner.lay_out(content)
            return Laid(layout, replace(manifest, nbytes=layout.nbytes), outline_of(layout))
        assert isinstance(content, RankCheckpoint)
        part_bytes = part_bytes_for(owned_nbytes(kept) // shard.writers)
        alike = _alike(content, owned) if len(content.ranges) > 1 else []
        first = [tensor.untyped_storage() for tensor in alike]
        sizes, dtypes = [storage.nbytes() for storage in first], [name_of(tensor.dtype) for tensor in alike]
        values = sample(alike, manifest.snapshot)
        agreed = plan_ranges(sizes, dtypes, content.ranges, part_bytes, (self._token, values))
        if len(agreed.ranges) == 1:
            first = []
        main, whole, start = Layout(0, (), ()), None, 0
        if shard.writer == 0:
            main = whole = self._outliner.lay_out(content.values, first)
            self.why_alone = self._outliner.problem
            if self.why_alone and first:
                raise SnapshotFailedError(
                    f"rank 0 alone can write it: it is serialised with plain torch.save ({self.why_alone})",
                    reason=FailureReason.SHARD_MISSING,
                )
        elif shard.writer in agreed.ranges:
            main = self._outliner.lay_out_first(first)
        if (bounds := agreed.range_of(shard.writer, main.nbytes)) is not None:
            main, start = self._range.of(main, *bounds), bounds[0]
        files = [FileSpan(MODEL_FILE, 0, main.nbytes)] if bounds is not None else []
        own = self._own.lay_out(content.own) if shard.writer else None
        manifest = replace(manifest, part_bytes=part_bytes, shard=replace(shard, digest=agreed.digest, start=start))
        layout, manifest = self._shards.put_together(manifest, main, files, own, splits=True)
        return Laid(layout, manifest, outline_of(whole) if whole is not None else None)


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
    """Lays out one rank's shard of a model in shards, a :class:`ShardedCheckpoint`. Implements :class:`RankLayouter`.

    Args:
        rank: this one.
        world_size: number of ranks.
        token: of the attempt: ranks of two trainers never agree.
    """

    why_alone = ""

    def __init__(self, rank: int, world_size: int, token: str = "") -> None:
        self._rank, self._world_size, self._token = rank, world_size, token
        self.forget()

    def forget(self) -> None:
        """See :meth:`RankLayouter.forget`."""
        self._layouter = ShardedLayouter(self._rank, self._world_size, self._token)
        self._own, self._shards = Outliner("the state of this rank"), _Shards()

    def counted(self, owned: Owners, kept: Owners) -> Owners:
        """What is in ``kept``, and nothing of the optimizers: theirs may write past the counts.

        (Torch counts writes to a ``DTensor``, but not those of ``foreach``, neither there nor at its local tensor.)
        """
        return kept

    def lay_out(self, content: ShardedCheckpoint, manifest: Manifest, owned: Owners, kept: Owners) -> Laid:
        """See :meth:`RankLayouter.lay_out`."""
        own = self._own.lay_out(content.own)
        image = self._layouter.lay_out(content.state, content.rest)
        if why := self._layouter.unreadable:
            text = "snapshots are taken, but NO RESUME from them will be possible: {about}"
            say(logging.ERROR, "not-resumable", text, about=why)
        if manifest.shard is not None:
            part_bytes = part_bytes_for(image.tensor_nbytes // self._world_size)
            manifest = replace(manifest, part_bytes=part_bytes, shard=replace(manifest.shard, digest=image.digest))
        layout, manifest = self._shards.put_together(manifest, image.layout, image.files, own, splits=False)
        return Laid(layout, manifest, image.rest)
