"""Takes snapshots of sharded state: every rank writes its own part of one image, into one slot of the node on its host.

Rank 0 leases the slot and commits the image; the others join by the snapshot's name (see :mod:`.joining`). No
collective. On several hosts each has a slot for the files of its own ranks, which its node sends to a snapshot server;
there they are put together. Without one, it writes them to the durable tier, and all ranks find out by themselves what
is whose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_spot.capture.copying import OpenedSnapshot, Pending
from lightning_spot.capture.owners import Owners
from lightning_spot.capture.saying import outgrown, read_outgrown
from lightning_spot.capture.split import SharingRanks
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, SpotError
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import DoesNotFitError, Entry, Layout, Layouter
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.notes import Own
from lightning_spot.image.portion import Portion, Portions, joined
from lightning_spot.memory.host import Host, Lease
from lightning_spot.memory.joint import Shared, is_by_itself
from lightning_spot.sharded.file_plan import (
    Places,
    ShardedImage,
    ShardedLayouter,
    aligned,
    state_archive,
    state_file,
    tensors_file,
)
from lightning_spot.sharded.plan import State
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

_HEADROOM_BYTES = 64 * 1024


def portions_of(files: Sequence[FileSpan], hosts: Sequence[Sequence[int]]) -> Portions:
    """What each host but the first brings: the files of its ranks, with the zeros behind them.

    Args:
        files: into which the image is cut.
        hosts: the ranks of each host, those of the first, which brings the rest, among them.
    """
    spans = {file.name: file for file in files}

    def ranges(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
        for rank in ranks:
            for name in (tensors_file(rank), state_file(rank)):
                if (span := spans.get(name)) is not None:  # a rank may have no tensors to write
                    yield span.offset, aligned(span.stop, FILE_ALIGNMENT_BYTES) - span.offset

    return Portions(tuple(joined(ranges(ranks)) for ranks in hosts[1:]), tuple(map(len, hosts[1:])))


def own_of(places: Places, ranks: Sequence[int]) -> Own:
    """What one host writes by itself, as far as its size is fixed.

    Args:
        places: in the image.
        ranks: of the host.
    """
    names = {name for rank in ranks for name in (tensors_file(rank), state_file(rank))}
    return Own(tuple(file for file in places.files if file.name in names))


def fitting(layout: Layout, nbytes: int) -> Layout:
    """The layout, if what it places lies in a slot of so many bytes.

    Raises:
        SnapshotFailedError: if it does not.
    """
    frame_end = max([at + len(data) for at, data in layout.frame], default=0)
    end = max([frame_end, *[piece.offset + piece.nbytes for piece in layout.pieces]])
    if end > nbytes:
        raise SnapshotFailedError(
            f"what it writes ends at {end} bytes, and the slot for it at {nbytes}", reason=FailureReason.SHARE_MISSING
        )
    return layout


class Portioned:
    """Moves layouts from their places in an image to those in a slot for one host's portion of it."""

    def __init__(self) -> None:
        self._portion = Portion(())
        self._frame: dict[int, tuple[Entry, Entry]] = {}

    def moved(self, layout: Layout, told: str, nbytes: int, host: int) -> Layout:
        """The same content in the slot. Entries of the frame that stay the same objects do so here, too.

        Args:
            layout: of what this rank writes into the image.
            told: what all ranks know of the image.
            nbytes: where it ends.
            host: number of this one.
        """
        portions = Portions.read(told, nbytes)
        ranges = portions.ranges[host - 1] if host else portions.rest(nbytes)
        if self._portion.ranges != ranges:
            self._portion, self._frame = Portion(ranges), {}
        place = self._portion.place
        frame, known = [], self._frame
        self._frame = {}
        for entry in layout.frame:
            at, data = entry
            before = known.get(at)
            kept = before if before is not None and before[0] is entry else (entry, (place(at), data))
            self._frame[at] = kept
            frame.append(kept[1])
        pieces = tuple([piece._replace(offset=place(piece.offset)) for piece in layout.pieces])
        return Layout(self._portion.nbytes, tuple(frame), pieces)


@dataclass(frozen=True, slots=True)
class ShardedCheckpoint:
    """A checkpoint as one rank has it.

    Attributes:
        state: of the model and its optimizers, nested, by the keys of Lightning's sharded checkpoints.
        own: exact state of this rank.
        rest: of the checkpoint; that of rank 0 counts.
        most_own_bytes: that the longest of the ranks' own states needs, as all ranks have seen; 0 if they have not.
    """

    state: State
    own: Any
    rest: dict[str, Any]
    most_own_bytes: int = 0


class ShardedWriter(SnapshotWriter):
    """Takes the snapshots of a sharded run, on rank 0; see :class:`SnapshotWriter`.

    Args:
        host: the ring.
        reconnect: makes a new connection to the ring.
        copier: that copies.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.
        look: see :class:`SnapshotWriter`; it is shown the rest of each checkpoint.
        world_size: number of ranks.
        token: of the attempt, see :class:`ShardedLayouter`.
    """

    _leases_shared = True

    def __init__(
        self,
        host: Host,
        reconnect: Callable[[], Host] | None = None,
        copier: Copier | None = None,
        schedule: Schedule | None = None,
        look: Callable[[Layout], str | None] = lambda _outline: None,
        *,
        world_size: int,
        token: str = "",
    ) -> None:
        self._world_size, self._token = world_size, token
        self._layouter = ShardedLayouter(0, world_size, token)
        self._own_layouter = Layouter()
        self._own_bytes = 0
        self._told: tuple[Any, str] = (None, "")
        self._at = ""
        self._portioned = Portioned()
        super().__init__(host, reconnect, look, copier, schedule)  # last: it begins a thread

    def begin(self, checkpoint: Any, manifest: Manifest, **how: Any) -> Future[Manifest]:
        """See :meth:`SnapshotWriter.begin`. Where rank 0 cannot, the others are told: they do not wait for the slot."""
        ranks: SharingRanks | None = how.get("ranks")
        self._at = ranks.at if ranks is not None else ""
        if checkpoint.most_own_bytes > (0 if self._is_by_itself else self._own_bytes):  # as all do, whatever fails here
            self._own_bytes = room_for(checkpoint.most_own_bytes)
        try:
            return super().begin(checkpoint, manifest, **how)
        except BaseException as error:
            self.decline(manifest.name, f"rank 0 cannot begin it ({error})", self._at)
            raise

    @property
    def _is_by_itself(self) -> bool:
        """Whether each host brings its portion to the durable tier by itself."""
        return is_by_itself(self._at)

    # -- see SnapshotWriter ---------------------------------------------------------------------------------------

    def _lay_out_anew(self, error: BaseException) -> None:
        if not isinstance(error, SpotError):
            self._layouter = ShardedLayouter(0, self._world_size, self._token)
            self._own_layouter = Layouter()

    def _open(self, host: Host, checkpoint: Any, manifest: Manifest, wait_s: float, divide: object) -> OpenedSnapshot:
        try:
            layout, lease, manifest = self._lead(host, checkpoint, manifest, wait_s)
        except ServerUnreachableError as error:
            self.link.lose(host, error)
            raise
        return OpenedSnapshot(layout, lease, manifest, layout, {})

    def _lead(
        self, host: Host, checkpoint: ShardedCheckpoint, manifest: Manifest, wait_s: float
    ) -> tuple[Layout, Lease, Manifest]:
        """Lay the whole image out and lease its slot."""
        image, state_bytes = self._laid_out(checkpoint)
        if why := self._layouter.unreadable:
            self.say_once("unreadable", "snapshots are taken, but NO RESUME from them will be possible: %s", why)
        nbytes, layout, told = image.layout.nbytes, image.layout, self._tell(image, state_bytes)
        here = len(self.across.hosts[0]) if self._at else self._world_size
        shared = Shared(name=manifest.name, shares=here, digest=image.digest, layout=told)
        if self._at:
            layout = self._portioned.moved(layout, told, nbytes, host=0)
            self.across.own_nbytes = layout.nbytes
            shared = replace(shared, at=self._at, image_nbytes=nbytes)
        ask = host.lease if self._at else partial(self._leases.take, host)
        lease = ask(layout.nbytes, wait_s, shared=shared)
        return layout, lease, replace(manifest, nbytes=nbytes, files=image.files)

    def _tell(self, image: ShardedImage, state_bytes: list[int]) -> str:
        """What the other ranks, and the node of this host, have to know of an image; the same text while it is."""
        key, text = (image.plan, state_bytes, self._at), self._told[1]
        if self._told[0] != key:
            told: dict[str, Any] = {"state_bytes": state_bytes, "items": image.plan.lines()}
            told |= portions_of(image.files, self.across.hosts).to_dict() if self._at else {}
            if self._is_by_itself:
                told |= own_of(image.places, self.across.hosts[0]).to_dict()
            text = json.dumps(told)
        self._told = (key, text)  # with this plan: one that is equal only would be compared tensor by tensor
        return text

    def _laid_out(self, checkpoint: ShardedCheckpoint) -> tuple[ShardedImage, list[int]]:
        """The image with room for the ranks' own states: twice what the longest needed."""
        try:
            own = state_archive(checkpoint.own, self._own_bytes, self._own_layouter)
        except DoesNotFitError:
            nbytes = len(state_archive(checkpoint.own))
            if self._is_by_itself:  # only what all ranks were told is the same for all of them
                raise SnapshotFailedError(
                    f"rank 0: {outgrown(nbytes, self._own_bytes)}", reason=FailureReason.SHARE_MISSING
                ) from None
            self._own_bytes = room_for(nbytes)
            own = state_archive(checkpoint.own, self._own_bytes)
        state_bytes = [self._own_bytes] * self._world_size
        return self._layouter.lay_out(checkpoint.state, own, state_bytes, checkpoint.rest), state_bytes

    def _counted(self, owned: Owners, kept: Owners) -> Owners:
        """What is in ``kept``, and nothing of the optimizers: theirs may write past the counts.

        (Torch counts writes to a ``DTensor``, but not those of ``foreach``, neither there nor at its local tensor.)
        """
        return kept

    def _commit(self, host: Host, pending: Pending) -> bool:
        try:  # what was written is not told: this rank knows of its own part only
            return host.seal(pending.lease, pending.manifest, pending.destinations)
        except SnapshotFailedError as error:
            if (
                error.reason is FailureReason.SHARE_MISSING
                and not self._is_by_itself
                and (said := read_outgrown(str(error)))
            ):
                self._own_bytes = room_for(said.nbytes)
            raise


def room_for(nbytes: int) -> int:
    """The room that every rank has for its own state where the longest needs ``nbytes`` bytes."""
    return -(-2 * nbytes // _HEADROOM_BYTES) * _HEADROOM_BYTES
