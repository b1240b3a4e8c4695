"""Takes snapshots of sharded state: every rank writes its part of one image, into one slot of the local server.

Rank 0 leases the slot and commits the image (:class:`ShardedWriter`); the others join by the snapshot's name
(:class:`Joining`). No collective. On several hosts each has a slot for the files of its own ranks. The local server
sends them to a snapshot server, where they are put together, or, without one, writes them to storage; then all ranks
find out by themselves what is whose.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from lightning_spot.capture.contents import SealedContent
from lightning_spot.capture.copying import OpenedSnapshot, Pending, say_past_counts
from lightning_spot.capture.following import Follower, Task, is_said_by_node
from lightning_spot.capture.split import Number, SharingRanks, outgrown
from lightning_spot.capture.tensors import Owners, copies_of
from lightning_spot.capture.unexpected import failure_of
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import (
    FailureReason,
    ServerUnreachableError,
    ShareProblem,
    SnapshotFailedError,
    SpotError,
)
from lightning_spot.image.files import FILE_ALIGNMENT_BYTES, FileSpan
from lightning_spot.image.layout import DoesNotFitError, Entry, Layout, Layouter
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.notes import Own
from lightning_spot.image.portion import Portion, Portions, joined
from lightning_spot.memory.host import Host, Lease
from lightning_spot.memory.joint import Shared, is_by_itself
from lightning_spot.say import say
from lightning_spot.sharded.file_plan import (
    Places,
    ShardedImage,
    ShardedLayouter,
    aligned,
    load_state,
    state_archive,
    state_file,
    tensors_file,
)
from lightning_spot.sharded.plan import State
from lightning_spot.staging.copier import Copier, Watches, watch
from lightning_spot.staging.schedule import Schedule
from lightning_spot.untrusted import LARGE_BYTES, read_object

logger = logging.getLogger(__name__)

_HEADROOM_BYTES = 64 * 1024


_BEYOND = 2**46  # no image is so long: its end is what rank 0 adds, and no place of another rank's depends on it


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
        """Whether each host brings its portion to storage by itself."""
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
            text = "snapshots are taken, but NO RESUME from them will be possible: {about}"
            say(logging.ERROR, "not-resumable", text, about=why)
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
        """What the other ranks, and the local server, have to know of an image; the same text while it is."""
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
                raise outgrown(0, nbytes, self._own_bytes) from None
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
            fault = error.fault
            if fault is not None and fault.problem is ShareProblem.OUTGROWN and not self._is_by_itself:
                self._own_bytes = room_for(fault.nbytes)
            raise


def room_for(nbytes: int) -> int:
    """The room that every rank has for its own state where the longest needs ``nbytes`` bytes."""
    return -(-2 * nbytes // _HEADROOM_BYTES) * _HEADROOM_BYTES


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """What a rank writes, as at the seam.

    Attributes:
        state: of the model and its optimizers.
        own: the file with this rank's own state; if that fits, as long as the room for it.
        room: that it has by what was heard last.
        image: laid out with that.
        kept: tensors that seldom change, by the address of their storage.
        copies: of the memory of other tensors that training may change while it computes, by address.
        watches: the tensors that must not change meanwhile.
        trusts: whether counts of writes are trusted.
        frozen: set when what is ``kept`` is in the slot, or never will be.
    """

    state: State
    own: bytes
    room: int
    image: ShardedImage
    kept: Owners
    copies: dict[int, torch.UntypedStorage]
    watches: Watches
    trusts: bool
    frozen: threading.Event


class Joining(Follower[_Part | SpotError]):
    """Writes the part of one rank, from 1 on, of every snapshot of an attempt.

    Args:
        host: connection of this rank to the server of its host, with run and attempt; closed with the writer.
        connect: makes another one when it was lost.
        hosts: the ranks of each host, if there are several.
        copier: that copies; closed with the writer.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.
        rank: this one.
        world_size: number of ranks.
        token: of the attempt, see :class:`ShardedLayouter`.

    Attributes:
        needs: bytes of this rank's own state, where it has outgrown a room of which all have to know; else 0.
    """

    def __init__(
        self,
        host: Host,
        connect: Callable[[], Host],
        hosts: tuple[tuple[int, ...], ...] = (),
        copier: Copier | None = None,
        schedule: Schedule | None = None,
        *,
        rank: int,
        world_size: int,
        token: str = "",
    ) -> None:
        self._attempt, self._hosts, self._rank, self._world_size = host.attempt, hosts, rank, world_size
        self._token = token
        self._laying_out = threading.Lock()
        self._lay_out_anew()
        self._heard: tuple[str, list[int], list[str], bool] = ("", [], [], False)
        self._portioned = Portioned()
        self._room = self.needs = 0
        self._told: tuple[Places | None, str] = (None, "")
        super().__init__(host, connect, copier, schedule)  # last: it begins a thread

    def _lay_out_anew(self) -> None:
        """Know nothing of what was laid out so far."""
        with self._laying_out:
            self._layouter = ShardedLayouter(self._rank, self._world_size, self._token)
        self._own_layouter = Layouter()  # of the training thread

    # -- on the training thread -----------------------------------------------------------------------------------

    def write(
        self,
        checkpoint: ShardedCheckpoint | SpotError,
        *,
        owned: Owners,
        kept: Owners,
        step: int,
        complete: bool = False,
        wait_s: float,
        at: str = "",
        still: bool = False,
    ) -> Task[_Part | SpotError]:
        """Begin to write this rank's part. If there is no such snapshot in the end, rank 0 says why.

        Args:
            checkpoint: as this rank has it; or why it is not known. (Rank 0 hears of it.)
            owned: tensors that only the optimizer changes, by the address of their storage; they must not change until
                :meth:`copied` returned.
            kept: further tensors that seldom change. If there are any, this returns when they are in the slot.
            step: Lightning's ``global_step``.
            complete: whether the run is at its end.
            wait_s: how long rank 0 may wait for a slot.
            at: URL of the run at the snapshot server, or storage, to which several hosts bring it.
            still: whether nothing changes any tensor until :meth:`settle` returned. Then this waits for nothing.
        """
        name = snapshot_name(step, self._attempt, complete=complete)
        number = Number.of_hosts(self._hosts, self._rank) if at else Number(self._rank, 0, self._rank, self._rank)
        part: _Part | SpotError
        try:
            if isinstance(checkpoint, SpotError):
                raise checkpoint
            part = self._part(checkpoint, owned, kept, trusts=not complete, is_agreed=is_by_itself(at))
        except Exception as error:
            if not isinstance(error, SpotError):
                self._lay_out_anew()  # what was laid out in part is no base for the next one
            part = failure_of(error)
        to = at if number.host else ""
        task: Task[_Part | SpotError] = Task(name, f"rank {self._rank}", number, to, part, wait_s, still)
        if is_by_itself(to) and isinstance(part, _Part):
            task.told = (self._tell(part.image, number.host), part.image.digest)
        self._put(task)
        if kept and not still and isinstance(part, _Part):
            self._wait(task, part.frozen)
            self._copier.fence()
        return task

    def _tell(self, image: ShardedImage, host: int) -> str:
        """What the local server has to know of an image that it brings to storage by itself."""
        if self._told[0] is not image.places:
            told = portions_of(image.files, self._hosts).to_dict() | own_of(image.places, self._hosts[host]).to_dict()
            self._told = (image.places, json.dumps(told))
        return self._told[1]

    def _part(
        self, checkpoint: ShardedCheckpoint, owned: Owners, kept: Owners, *, trusts: bool, is_agreed: bool
    ) -> _Part:
        """What this rank writes; where rank 0 is not asked (``is_agreed``), with the room that all know of.

        That follows from what all were told last, whatever became of the snapshots before on any of them.
        """
        room = self._room if is_agreed else self._heard[1][self._rank] if self._heard[1] else 0
        if checkpoint.most_own_bytes > (0 if is_agreed else room):
            room = room_for(checkpoint.most_own_bytes)
        self._room = room if is_agreed else self._room
        self.needs = 0
        try:
            own = bytes(state_archive(checkpoint.own, room, self._own_layouter))
        except DoesNotFitError:
            own = bytes(state_archive(checkpoint.own))
            if is_agreed:
                self.needs = len(own)
                raise outgrown(self._rank, len(own), room) from None
        image = self._lay_out(checkpoint.state, own, [room] * self._world_size)
        by_address = {piece.storage.data_ptr(): piece.storage for piece in image.layout.pieces}
        watched = [address for address in by_address if address in owned and address not in self._unsteady]
        others = by_address.keys() - kept.keys() - set(watched)
        copies = copies_of({address: by_address[address] for address in others})
        watches = watch(chain.from_iterable(map(owned.__getitem__, watched)))
        return _Part(checkpoint.state, own, room, image, kept, copies, watches, trusts, threading.Event())

    def newest_differs(self) -> bool:
        """See :meth:`Follower.newest_differs`; no other rank knows of these bytes, so this one says it."""
        if differs := super().newest_differs():
            say_past_counts(1)
        return differs

    # -- on the background thread ---------------------------------------------------------------------------------

    def _write(self, task: Task[_Part | SpotError]) -> None:
        frozen = task.what.frozen if isinstance(task.what, _Part) else threading.Event()
        try:
            super()._write(task)
        finally:
            frozen.set()  # training waits for it, also where there is no slot

    def _lost(self, task: Task[_Part | SpotError], error: BaseException) -> None:
        if isinstance(task.what, _Part):
            task.what.frozen.set()
        super()._lost(task, error)

    def flush(self, wait_s: float) -> None:
        """Wait until the local server has brought what its ranks have written: it may end with their processes."""
        try:
            late = self._host.flush(wait_s) if self._host is not None else []
        except SpotError as error:  # rank 0 says what became of the snapshot
            logger.debug("the local server: %s", error)
        else:
            for line in late:
                text = "not persisted yet: {about}. The local server retries."
                say(logging.WARNING, "not-persisted", text, about=line)

    def _check_begun(self, task: Task[_Part | SpotError], what: _Part | SpotError) -> None:
        if isinstance(what, SpotError) and is_by_itself(task.at):  # the server is told at once, see below
            raise what

    def _fill(self, host: Host, lease: Lease, task: Task[_Part | SpotError], what: _Part | SpotError) -> None:
        if isinstance(what, SpotError):
            raise what
        try:
            layout = self._check(lease, task, what)
            view = self._views.of(host, lease)
            known = self._views.take(view, lease.held)
            # Of the optimizers' nothing is left out: theirs may write past the counts, see ShardedWriter.
            plan = self._unchanged.plan(layout, what.kept, known if what.trusts else None, view)
            self.copied_bytes += plan.nbytes
            if frozen := [piece for piece in plan.pieces if piece.storage.data_ptr() in what.kept]:
                job = self._copier.start(frozen, view, after=task.after)
                job.wait_cpu()
                what.frozen.set()
                job.wait()
        finally:
            what.frozen.set()
        pieces = [
            piece._replace(storage=what.copies.get(piece.storage.data_ptr(), piece.storage))
            for piece in plan.pieces
            if piece.storage.data_ptr() not in what.kept
        ]
        job = self._copy(task, plan, pieces, view, what.watches)
        plan.pieces = ()
        pieces.clear()
        for offset, data in plan.frame:
            view.map[offset : offset + len(data)] = data
        self._check_steady(task, job)
        self._views.sealed(view, SealedContent(lease.id, layout.frame, plan.marks))

    def _failed(self, task: Task[_Part | SpotError], error: SpotError) -> None:
        super()._failed(task, error)
        if is_by_itself(task.at):  # the other hosts have nobody else to hear it from
            self._owe(task.name, f"{task.who}: {error}", task.at)
        if not is_said_by_node(error):
            text = "this rank writes no part of {snapshot}, which is dropped: {error}. The next snapshot is tried."
            cause = getattr(error, "reason", type(error).__name__)
            say(logging.WARNING, "share-failed", text, about=cause, snapshot=task.name, error=error)

    def _check(self, lease: Lease, task: Task[_Part | SpotError], part: _Part) -> Layout:
        """What this rank writes into the slot, if all that rank 0 said of the image is so here, too."""
        shared = lease.shared
        assert shared is not None
        if by_itself := task.told[0]:
            return self._moved(part.image.layout, by_itself, lease, task.number.host)
        if shared.layout != self._heard[0]:
            told = read_object(shared.layout, LARGE_BYTES)
            self._heard = (shared.layout, told["state_bytes"], told["items"], "portions" in told)
        _, state_bytes, lines, is_portioned = self._heard
        image = self._with_room(part, state_bytes)
        if image.digest != shared.digest:
            raise SnapshotFailedError(
                f"it has another model or other optimizers than rank 0: {_first_difference(image.plan.lines(), lines)}."
                " All ranks must build the same",
                reason=FailureReason.SHARE_MISSING,
            )
        if not is_portioned:
            return fitting(image.layout, lease.nbytes)
        return self._moved(image.layout, shared.layout, lease, task.number.host)

    def _moved(self, layout: Layout, told: str, lease: Lease, host: int) -> Layout:
        """What this rank writes into a slot for the portion of its host."""
        moved = self._portioned.moved(layout, told, _BEYOND, host)
        if host and moved.nbytes != lease.nbytes:  # that of the first host ends where rank 0 says
            raise SnapshotFailedError(
                f"its host's portion has {moved.nbytes} bytes, and the slot for it {lease.nbytes}",
                reason=FailureReason.SHARE_MISSING,
            )
        return fitting(replace(moved, nbytes=lease.nbytes), lease.nbytes)

    def _with_room(self, part: _Part, state_bytes: list[int]) -> ShardedImage:
        """The image with the room that rank 0 has given the ranks' own states."""
        room = state_bytes[self._rank]
        if state_bytes == [part.room] * self._world_size and len(part.own) <= room:
            return part.image
        own = load_state(memoryview(part.own))
        try:
            archive = state_archive(own, room)
        except DoesNotFitError:
            raise outgrown(self._rank, len(state_archive(own)), room) from None
        return self._lay_out(part.state, archive, state_bytes)

    def _lay_out(self, state: State, own: bytes | bytearray, state_bytes: Sequence[int]) -> ShardedImage:
        with self._laying_out:
            return self._layouter.lay_out(state, own, state_bytes)


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    pairs = zip(ours, theirs, strict=False)
    found = next((f"{one}, and there {other}" for one, other in pairs if one != other), "")
    return found or f"{len(ours)} items, and there {len(theirs)}"
