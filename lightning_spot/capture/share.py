"""Writes one rank's share of snapshots whose slots rank 0 leases.

The training thread calls :meth:`ShareWriter.begin` and, before the tensors change, :meth:`~ShareWriter.copied`.
Everything else happens on one background thread: to wait for the slot, to copy, to say that the bytes are in place.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lightning_spot.capture.contents import Known, Owners, Plan, Unchanged, owners_of
from lightning_spot.capture.host_link import leave
from lightning_spot.capture.split import ALIKE, Held, Number, Split, held_by, sample
from lightning_spot.capture.views import SlotViews
from lightning_spot.errors import NodeUnreachable, ShareMissing, SpotError, TornSnapshot
from lightning_spot.image.layout import Layout, Piece
from lightning_spot.image.pickling import Named
from lightning_spot.image.portion import Portion
from lightning_spot.memory.host import Host, Lease
from lightning_spot.staging.copier import Copier, CopyJob, SlotView, Watch
from lightning_spot.staging.schedule import Schedule

logger = logging.getLogger(__name__)

_JOIN_S = 600.0  # as long as rank 0 may wait for a slot; a node says at once if there will be none
_CLOSE_S = 10.0


@dataclass(eq=False, slots=True)
class _Task:
    """A share on its way.

    Attributes:
        name: of the snapshot.
        number: which share of it is this rank's.
        at: URL of the run at the memory node to which several hosts bring it; ``""`` if one host writes it.
        owned: the tensors of which this rank writes some, as at the seam.
        held: what they are.
        versions: torch's counts of the writes to them.
        copies: of the memory of tensors that change while training computes, by address.
        state: what only this rank knows.
        sample: see :func:`~lightning_spot.capture.split.sample`.
        wait_s: how long rank 0 may wait for a clean slot.
        thread: number of the thread that trains.
        job: the copies, once the slot is there.
        begun: whether the copies have begun, or never will.
        late: whether training has gone on without them.
    """

    name: str
    number: Number
    at: str
    owned: Owners
    held: tuple[Held, ...]
    versions: list[list[int]]
    copies: dict[int, torch.UntypedStorage]
    state: bytes
    sample: str
    wait_s: float
    thread: int
    job: CopyJob | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    late: bool = False


class ShareWriter:
    """Writes a rank's shares.

    Args:
        host: connection to the node of this host, with run and attempt; closed with the writer.
        connect: makes another one when it was lost.
        number: which share is this rank's where the ranks of rank 0's host write; ``None`` if it is on another one.
        across: likewise where all hosts do; ``None`` if they never do.
        copier: that copies; closed with the writer.
        schedule: when each part is copied; ``None`` for at once.

    Attributes:
        copied_bytes: written into slots so far.
        torn: shares that were given up since a tensor changed while it was copied.
    """

    def __init__(
        self,
        host: Host,
        connect: Callable[[], Host],
        number: Number | None,
        copier: Copier | None = None,
        schedule: Schedule | None = None,
        across: Number | None = None,
    ) -> None:
        self.copied_bytes = 0
        self.torn = 0
        self._connect, self._number, self._across = connect, number, across
        self._copier = copier if copier is not None else Copier()
        self._schedule = schedule
        self._max_stall_s = host.max_stall_s
        self._host: Host | None = host
        self._views = SlotViews(self._copier)
        self._unchanged = Unchanged()
        self._unsteady: frozenset[int] = frozenset()
        self._split: tuple[str, Split, Portion | None] = ("", Split((), (), (), {}), None)
        self._named: dict[int, Named] = {}
        self._pending: list[_Task] = []
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="spot-share", daemon=True)
        self._thread.start()

    # -- on the training thread -----------------------------------------------------------------------------------

    def begin(self, name: str, owned: Owners, state: bytes, wait_s: float = 0.0, at: str = "") -> None:
        """Begin this rank's share of a snapshot; nothing happens if it has none.

        Args:
            name: of the snapshot.
            owned: tensors that only the optimizer changes, by the address of their storage; they must not change
                until :meth:`copied` returned.
            state: what only this rank knows, for the room that rank 0 has kept for it.
            wait_s: how long rank 0 may wait for a clean slot, seconds: :meth:`copied` waits as long.
            at: URL of the run at the memory node to which all hosts bring it; ``""`` if rank 0's host writes it.
        """
        number = self._across if at else self._number
        if number is None:
            return
        task = _Task(
            name=name,
            number=number,
            at=at if number.host else "",
            owned=owned,
            held=held_by(owned),
            versions=[
                [tensor._version for tensor in tensors if not tensor.is_inference()] for tensors in owned.values()
            ],
            copies={
                address: owned[address][0].untyped_storage().clone()  # type: ignore[no-untyped-call] # torch's
                for address in self._unsteady
                if address in owned
            },
            state=state,
            sample=sample(owned, name),
            wait_s=wait_s,
            thread=threading.get_ident(),
        )
        self._pending.append(task)
        self._tasks.put(task)

    def copied(self) -> None:
        """Return when the tensors may change: call it before every optimizer step, swap of weights, and at the end."""
        for task in self._pending:
            if not task.begun.wait(max(self._max_stall_s, task.wait_s)):
                with task.lock:
                    task.late = task.job is None
            if (job := task.job) is None:
                continue
            try:
                job.wait_cpu()
            except SpotError:
                continue  # the background thread reports it
            self._copier.fence()
            job.settle()
        self._pending.clear()

    def close(self, *, complete: bool = False) -> None:
        """Stop the threads, and leave the node.

        Args:
            complete: whether nobody needs the node of this host any more.
        """
        self.copied()
        self._tasks.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive() and self._host is not None:
            self._host.disconnect()  # what it waits for breaks off
            self._thread.join(_CLOSE_S)
        self._copier.close()
        host, self._host = self._host, None
        if host is not None:
            self._views.drop(host)
            if complete:
                leave(host, complete=True)
            host.disconnect()

    # -- on the background thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._write(task)
            except Exception:  # training must not wait for a thread that has ended
                logger.exception("lightning_spot: the share of %s was not written", task.name)
            finally:
                task.begun.set()
                task.owned, task.copies = {}, {}  # nothing is kept alive until the next one comes

    def _write(self, task: _Task) -> None:
        lease: Lease | None = None
        torn = ""
        try:
            host, lease = self._join(task)
            self._fill(host, lease, task)
        except SpotError as error:
            logger.debug("the share of %s: %s", task.name, error)
            torn = f"rank {task.number.share}: {error}"
            if isinstance(error, NodeUnreachable):
                self._leave()
        except BaseException as error:
            torn = f"rank {task.number.share}: {type(error).__name__}: {error}"
            raise
        finally:
            task.begun.set()
            if torn and task.job is not None:
                self._end(task.job)
            if lease is not None and self._host is not None:
                self._say(self._host, lease, torn)

    def _join(self, task: _Task) -> tuple[Host, Lease]:
        """Wait for the slot of a snapshot; through another connection, if the last one was lost."""
        try:
            if self._host is not None:
                return self._host, self._ask(self._host, task)
        except NodeUnreachable as error:
            logger.debug("another connection is made: %s", error)
            self._leave()
        self._host = self._connect()
        return self._host, self._ask(self._host, task)

    def _ask(self, host: Host, task: _Task) -> Lease:
        number = task.number
        return host.join(task.name, share=number.here, wait_s=_JOIN_S, at=task.at, host=number.host)

    def _say(self, host: Host, lease: Lease, torn: str) -> None:
        try:
            host.placed(lease, torn)
        except SpotError as error:  # it was given up meanwhile, or the node is gone: rank 0 knows
            logger.debug("a share is over: %s", error)

    def _fill(self, host: Host, lease: Lease, task: _Task) -> None:
        """Copy this rank's bytes into the slot; raises if they are not what they should be."""
        split, portion = self._check(lease, task)
        room = split.states.get(task.number.share)
        if room is not None and len(task.state) > room[1]:
            raise ShareMissing(f"its own state has {len(task.state)} bytes, there is room for {room[1]}")
        view = self._views.of(host, lease)
        pieces, watches = self._pieces(split, portion, task)
        known = self._views.content(view).take(lease.held)
        plan = self._unchanged.plan(Layout(lease.nbytes, (), tuple(pieces)), owners_of(task.owned, {}), known, view)
        with task.lock:
            if task.late:
                raise ShareMissing("training went on before its slot was there")
            kept = [
                piece._replace(storage=task.copies.get(piece.storage.data_ptr(), piece.storage))
                for piece in plan.pieces
            ]
            task.job = job = self._copier.start(kept, view, watches, self._schedule, task.thread)
        task.begun.set()
        plan.pieces.clear()
        if room is not None:
            place = portion.place(room[0]) if portion is not None else room[0]
            view.map[place : place + len(task.state)] = task.state
        self.copied_bytes += sum(piece.nbytes for piece in kept) + len(task.state)
        kept.clear()
        job.wait()
        self._check_steady(job, plan, view)
        self._views.content(view).sealed(Known(lease.id, (), plan.marks))

    def _check(self, lease: Lease, task: _Task) -> tuple[Split, Portion | None]:
        """What rank 0 said of the file, if its tensors are those of this rank; what the slot has of it, if not all."""
        shared = lease.shared
        assert shared is not None
        if shared.layout != self._split[0]:
            split, host = Split.from_json(shared.layout), task.number.host
            self._split = (shared.layout, split, Portion(split.portion(host)) if host else None)
        _, split, portion = self._split
        if difference := split.difference(task.held, task.number.share):
            raise ShareMissing(f"{difference}. {ALIKE}")
        if shared.digest != task.sample:
            raise ShareMissing(
                "its parameters, or the states of its optimizers, are not those of rank 0; a snapshot of both would be"
                f" of neither. {ALIKE}"
            )
        return split, portion

    def _pieces(self, split: Split, portion: Portion | None, task: _Task) -> tuple[list[Piece], list[Watch]]:
        """What of the file is this rank's to write, and the tensors that must not change meanwhile."""
        owned, named = list(task.owned.values()), {}
        pieces, watches = [], []
        for index, start, nbytes in split.share(task.number.share):
            storage = owned[index][0].untyped_storage()
            known = self._named.get(index)
            if known is None or not known.is_of(storage) or known.nbytes != storage.nbytes():
                known = Named(index, storage)
            named[index] = known
            place = split.places[index] + start
            at = portion.place(place) if portion is not None else place
            pieces.append(Piece(storage, at, nbytes, (), known, start))
            if storage.data_ptr() in task.copies:
                self._unchanged.distrusted.add(known)  # its count may be that of a later write
            else:
                counted = [tensor for tensor in owned[index] if not tensor.is_inference()]
                watches += [
                    Watch(tensor, version) for tensor, version in zip(counted, task.versions[index], strict=True)
                ]
        self._named = named
        return pieces, watches

    def _check_steady(self, job: CopyJob, plan: Plan, view: SlotView) -> None:
        if job.moved:
            self._unsteady |= job.moved
            self.torn += 1
            raise TornSnapshot(f"{len(job.moved)} tensors changed between two optimizer steps while they were copied")
        if found := self._unchanged.written_past_counts(plan, view):
            self.torn += 1
            raise TornSnapshot(f"{found} tensors were written to past torch's count of writes")

    def _end(self, job: CopyJob) -> None:
        """Nothing may come into the slot any more once it was said that the share is over."""
        try:
            job.wait()
        except SpotError as error:
            logger.debug("copies of a share that was given up: %s", error)

    def _leave(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._views.drop(host)
            host.disconnect()
