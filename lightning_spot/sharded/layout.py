"""Lays a sharded snapshot out before it is filled: what each rank writes into the image, and the files it is cut into.

At rest it is a directory that ``torch.distributed.checkpoint`` reads, and Lightning's own strategies.
"""

from __future__ import annotations

import io
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import DoesNotFitError, Entry, Layout, Layouter, filled, lay_out_plain
from lightning_spot.image.parts import checksum
from lightning_spot.image.safe_load import safe_load
from lightning_spot.image.shards import SHARDS_FILE, Archived, Path, Shards, StoredValue
from lightning_spot.sharded import metadata
from lightning_spot.sharded.items import is_extra
from lightning_spot.sharded.places import ALIGNMENT, Places, aligned
from lightning_spot.sharded.plan import Plan, Planner, State
from lightning_spot.sharded.reader import load_value
from lightning_spot.sharded.sources import Source

_VALUES_FILE = "__0_1.distcp"

Frame = list[Entry]

_SCALARS = frozenset((type(None), bool, int, float, str))
_TEXTS = frozenset((str,))


@dataclass(frozen=True, slots=True)
class ShardedImage:
    """A sharded snapshot before it is filled, as far as one rank writes it.

    Attributes:
        layout: what this rank writes; on rank 0, its size is that of the whole image.
        files: into which the image is cut at rest; on rank 0 only.
        digest: of all that the ranks must agree on.
        plan: who writes what; the same object as long as that stays as it is.
        places: where everything of fixed size lies.
    """

    layout: Layout
    files: tuple[FileSpan, ...]
    digest: str
    plan: Plan
    places: Places


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
        self._sources: list[tuple[int, Source]] = []  # of the boxes that this rank writes, by number of their tensor
        self._numbers = itertools.count(1)
        self._values = _Values()
        self._rest_layouter = Layouter()
        self._last_behind: _Behind | None = None

    @property
    def unreadable(self) -> str:
        """Why no resume will read what was laid out, as far as that was found by trying; ``""`` if nothing was."""
        return self._values.unreadable

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
            NotSerializableError: if something of it cannot be saved.
        """
        plan, tensors, values = self._planner.plan(state)
        places = self._places
        if places is None or places.plan is not plan or places.state_bytes != tuple(state_bytes):
            places = self._places = self._place(plan, state_bytes)
        pieces = tuple([source.piece(tensors[number]) for number, source in self._sources])
        frame = list(self._frame)
        span = places.state_of(self._rank)
        frame.append(_entry(span, own))
        files, end = list(places.files), places.end
        if self._rank == 0:
            end = self._behind(places, values, rest, frame, files)
        return ShardedImage(Layout(end, tuple(frame), pieces), tuple(files), self._digest, plan, places)

    def _place(self, plan: Plan, state_bytes: Sequence[int]) -> Places:
        places = Places(plan, state_bytes)
        self._frame = []
        for placed in places.by_rank[self._rank]:
            *before, (last_at, last) = placed.form.frame
            for at, data in (*before, (last_at, last + bytes(placed.pad))):
                self._frame.append((placed.offset + at, data))
        self._frame = _joined(self._frame)
        # Also of the places: another torch may put other frames around the elements.
        told = f"{plan.digest} {places.state_bytes} {[file.nbytes for file in places.files]} {self._token}"
        self._digest = checksum(told.encode())
        filled = (placed for placed in places.by_rank[self._rank] if placed.form.data_nbytes)
        self._sources = [
            (placed.item, Source(plan.tensors[placed.item].path, placed, self._numbers)) for placed in filled
        ]
        return places

    def _behind(self, places: Places, found: list[Any], rest: Any, frame: Frame, files: list[FileSpan]) -> int:
        """Lay out what varies in length; the end of the image."""
        archives = self._values.archive(places.plan.values, found)
        behind = self._last_behind
        if behind is None or behind.places is not places or behind.archives is not archives:
            behind = self._last_behind = _put_behind(places, archives, behind)
        last = FileSpan(metadata.REST_FILE, behind.end, len(content := self._rest_of(rest)))
        files += [*behind.files, last]
        frame += [*behind.frame, _entry(last, content)]
        return aligned(last.stop, FILE_ALIGNMENT_BYTES)

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


def _put_behind(places: Places, archives: _Archives, before: _Behind | None) -> _Behind:
    """Lay values out, and what says where all lies: that is long, and stays until a value takes another length."""
    files: list[FileSpan] = []
    frame: Frame = []
    end = places.end

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


def state_archive(state: Any, nbytes: int | None = None, layouter: Layouter | None = None) -> bytearray:
    """The file with a rank's own state, which ``torch.load`` reads.

    Args:
        state: plain values and tensors.
        nbytes: size that it is to have; ``None`` for no more than it needs.
        layouter: that has laid such states out before, and knows how their tensors are put together.

    Raises:
        DoesNotFitError: if it needs more than ``nbytes``.
        NotSerializableError: if something of it cannot be saved.
    """
    try:
        return filled((layouter or Layouter()).lay_out(state, nbytes))
    except (DoesNotFitError, MemoryError):
        raise
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise _cannot("the state of this rank", error) from error


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
    """Read what :func:`state_archive` made; nothing in it runs code."""
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
