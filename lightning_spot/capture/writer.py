"""Takes snapshots: lays out what this rank writes, leases a slot, copies beside training, guards, commits.

What forward may change is copied at once, the rest before the optimizer steps. What is copied must not change
meanwhile. Torch counts the writes to a tensor, and the counts are compared when the copy is over; a write that goes
past them (``tensor.data``, some kernels) goes unnoticed.

Every rank has a writer, and waits for no other one. The training thread calls :meth:`SnapshotWriter.begin` and, before
the tensors change, :meth:`~SnapshotWriter.copied`. Everything else happens on one background thread; there rank 0
learns whether the shards of all ranks are there. A snapshot that fits no memory is streamed from the tensors, part by
part, while training waits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_spot.capture.batch import CopyJob, SlotView
from lightning_spot.capture.copier import Copier, LoneThread
from lightning_spot.capture.host_link import HostLink, say_failing, seconds_left
from lightning_spot.capture.layouts import CheckpointLayouter, Laid, RankLayouter
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.slot_pool import SlotPool, give_back
from lightning_spot.capture.tensors import NOBODY, Owners, Watches
from lightning_spot.capture.unexpected import as_failure
from lightning_spot.errors import FailureReason, FencedError, ServerUnreachableError, SnapshotFailedError, SpotError
from lightning_spot.say import UNEXPECTED, recovered, say
from lightning_spot.server.host import Host, Lease
from lightning_spot.server.slots import Making
from lightning_spot.snapshot.layout import Layout, filled
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import part_ranges
from lightning_spot.snapshot.ranges import WIDTHS, Floats
from lightning_spot.snapshot.shards import Status
from lightning_spot.store.store import Store

CLOSE_S = 10.0
"""At the end, threads beside training are waited for so long, twice: then what they wait for is broken off."""

_AGAIN_S = 0.1
_Failed = Callable[[BaseException], None]
_COUNTS_S, _TIMES = 60.0, 3.0  # the shards of all ranks are waited for so long, and so many times as long as last time
_SLICE_S = 2.0
_RING_S = 30.0  # so long does the last shard of a rank wait for the ring that replaces a lost one

LEAST_BYTES = 64 * 1024
"""Less is sent as it is: counters of optimizers are floating-point numbers, too."""


def store_streamed(layout: Layout, manifest: Manifest, store: Store) -> Manifest:
    """Bring a laid-out checkpoint to a tier, part by part; its sealed manifest, once it is committed there.

    Args:
        layout: of the checkpoint; its storages may be on any device, and nothing changes it meanwhile.
        manifest: what it is; size and checksums are filled in.
        store: the tier.

    Raises:
        SpotError: if it is not there in the end.
    """
    manifest = replace(manifest, nbytes=layout.nbytes)
    ranges = part_ranges(layout.nbytes, manifest.part_bytes)
    parts = (memoryview(filled(layout.cut(start, stop))) for start, stop in ranges)
    return store.put_parts(manifest, parts, attempt=manifest.attempt)


_NAMES = {getattr(torch, name): name for name in WIDTHS}


def floats_of(layout: Layout, owned: Owners) -> tuple[Floats, ...]:
    """Where weights and moments lie in a file; not what is small, of another type, or not the optimizers' own.

    Args:
        layout: of the file.
        owned: tensors that only optimizers change, by the address of their storage.
    """
    found = []
    for piece in layout.pieces:
        tensors = owned.get(piece.storage.data_ptr(), ()) if piece.nbytes >= LEAST_BYTES else ()
        names = {_NAMES.get(tensor.dtype) for tensor in tensors}
        if len(names) == 1 and (name := names.pop()) is not None:
            found.append(Floats(piece.offset, piece.nbytes // WIDTHS[name] * WIDTHS[name], name))
    return tuple(found)


@dataclass(slots=True)
class Pending:
    """A snapshot on its way.

    Attributes:
        manifest: what it will be.
        lease: its slot.
        first: copies that were enqueued before it was begun. They are waited for as well: a GPU may still be reading,
            on another stream, storages that only the snapshot holds, and this keeps them alive.
        job: copies that may go on until the next optimizer step.
        done: becomes the manifest when committed, or the error.
        destinations: tiers below, if not the run's.
        tried: what is tried to be read back, see :class:`~lightning_spot.capture.layouts.Laid`.
        view: its slot, as the writer sees it.
        floats: where in it numbers lie that may be approximated on their way to a snapshot server.
    """

    manifest: Manifest
    lease: Lease
    first: CopyJob
    job: CopyJob
    done: Future[Manifest]
    destinations: list[str] | None
    tried: Layout | None
    view: SlotView
    floats: tuple[Floats, ...]


class Background:
    """Does tasks in turn on a thread of its own, until :meth:`close`.

    Args:
        name: of the thread.
        idle: called when nothing has come for a while, and at the end.
        idle_s: how long that is, asked each time; ``None`` for ever.
    """

    def __init__(
        self,
        name: str,
        idle: Callable[[], None] = lambda: None,
        idle_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._idle, self._idle_s, self._is_over = idle, idle_s, False
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], _Failed | None]] = queue.SimpleQueue()
        self._thread = LoneThread(target=self._run, name=name)
        self._thread.start()

    def put(self, task: Callable[[], None], failed: _Failed | None = None) -> None:
        """Have something done after all that was put before.

        Args:
            task: what.
            failed: called with the error if it raises one, wherever that comes up: somebody may wait for what it does.
                Without, the error is logged, as is what this raises.
        """
        self._tasks.put((task, failed))

    def close(self, wait_s: float) -> bool:
        """Do what was put so far, and no more; whether the thread has ended, after ``wait_s`` seconds at most."""
        self.put(self._end)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _end(self) -> None:
        self._is_over = True
        self._idle()

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._do_next()
            except Exception:  # nobody is to wait for a thread that has ended
                say(logging.ERROR, "unexpected", UNEXPECTED, about="a task during training", exc_info=True)
                if not self._is_over:
                    time.sleep(_AGAIN_S)  # it may be of no task, and the same again

    def _do_next(self) -> None:
        do, failed = self._idle, None
        with contextlib.suppress(queue.Empty):
            do, failed = self._tasks.get(timeout=self._idle_s())
        try:
            do()
        except BaseException as error:
            if failed is None:
                raise
            failed(error)


class SnapshotWriter:
    """Takes what one rank writes of snapshots into a ring on its host.

    Args:
        host: the ring, its run already opened.
        reconnect: makes a new connection to the ring (and opens the run again) after the old one broke.
        look: looks at the outline of each checkpoint that was written; what it says is warned of once.
        copier: that copies; closed with the writer.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.
        layouter: lays out what this rank writes; ``None`` for all of a checkpoint.
        rank: this one.
        approximates: whether servers may be sent approximations.

    Attributes:
        link: to the ring, which may be lost and found again.
        layouter: see above.
        committed: manifest of the newest snapshot that counts, or was stored past the ring. Of several ranks' it is
            that of this one's shard, and only rank 0 waits until the snapshot counts.
        past_memory: manifest of the newest that was stored past the ring: outside this host.
        dropped: snapshots that were begun, and will never count: a tensor changed while it was copied, or as follows.
        aborted: snapshots of several ranks that this one has written its shard of, and that will never count.
        why_aborted: of the last of these, for people.
        fence: the error that says that a later attempt has taken the run over; ``None`` as long as none did.
        copied_bytes: written into slots so far.
    """

    def __init__(
        self,
        host: Host,
        reconnect: Callable[[], Host] | None = None,
        look: Callable[[Layout], str | None] = lambda _outline: None,
        copier: Copier | None = None,
        schedule: Schedule | None = None,
        layouter: RankLayouter | None = None,
        *,
        rank: int = 0,
        approximates: bool = False,
    ) -> None:
        self._look = look
        self.link = HostLink(host, reconnect, lambda found: self._slots.make(found, Making.NOW))
        self.layouter: RankLayouter = layouter or CheckpointLayouter()
        self.committed: Manifest | None = None
        self.past_memory: Manifest | None = None
        self.fence: FencedError | None = None
        self.dropped = self.aborted = self.copied_bytes = 0
        self.why_aborted = ""
        self._failing = ""  # reason that was logged last: cleared in the log by the next commit
        self._rank, self._counted_s = rank, 0.0  # seconds until the last snapshot of several ranks counted
        self._copier = copier if copier is not None else Copier()
        self._schedule = schedule
        self._unsteady: frozenset[int] = frozenset()  # addresses that once moved during a copy: copied at once since
        self._slots = slots = SlotPool(self.link, self._copier, rank)
        try:
            self._tasks = Background("spot-writer", slots.give_back_ahead, lambda: slots.idle_s)
        except BaseException:  # nobody else closes what was given
            self._copier.close()
            raise
        self._approximates = approximates
        self._pending: list[Pending] = []

    # -- on the training thread -----------------------------------------------------------------------------------

    @property
    def host(self) -> Host | None:
        """The ring, ``None`` while there is none."""
        return self.link.host

    @property
    def ready(self) -> bool:
        """Whether a snapshot can begin now without waiting for its slot to be made."""
        return self._slots.ready

    @property
    def is_under_way(self) -> bool:
        """Whether what was begun last is neither committed nor given up yet."""
        return bool(self._pending) and not self._pending[-1].done.done()

    def warm(self, nbytes: int, *, gpu: int | None = None, beyond: bool = False) -> None:
        """Make, map and (for a GPU) pin slots in the background, so that no snapshot meets a cold one.

        Args:
            nbytes: expected size of what this rank writes.
            gpu: number of the GPU that tensors will come from, if they do.
            beyond: see :class:`SlotPool`.
        """
        self._slots.beyond = beyond
        self._slots.warm(self.host, nbytes, gpu)

    def next_comes(self) -> None:
        """The next snapshot comes within a second: its slot is leased meanwhile."""
        host, last = self.host, self.committed
        if host and last and last is not self.past_memory and self.ready:
            self._tasks.put(lambda: self._slots.lease_ahead(host, last.nbytes, comes=True))

    def begin(
        self,
        content: Any,
        manifest: Manifest,
        *,
        owned: Owners = NOBODY,
        wait_s: float = 0.0,
        destinations: list[str] | None = None,
    ) -> Future[Manifest]:
        """Begin a snapshot, or this rank's shard of one. What is not in ``owned`` is copied before this returns.

        Args:
            content: what to save, as the layouter takes it; the storages in ``owned`` must not change until
                :meth:`copied` returned.
            manifest: what it is; size, files and checksums are filled in.
            owned: tensors that only the optimizer changes, by the address of their storage.
            wait_s: how long to wait for a clean slot, in all.
            destinations: tiers below, if not the run's.

        Returns:
            a future that becomes the manifest once the snapshot is committed in memory; on other ranks than 0, once
            their shard is there.

        Raises:
            SpotError: if none can be begun now; nothing that is saved already is touched. If it was to be a shard, the
                caller has to :meth:`fail` it.
        """
        deadline_s = time.monotonic() + wait_s
        # Nothing comes after the last one. What one rank writes alone goes another way.
        is_last = manifest.complete and manifest.shard is not None
        if is_last:
            self.link.ask(lambda host: host.check(), None)  # one that was just killed is noticed now
        host = self.link.wait(min(wait_s, _RING_S)) if is_last else self.host
        if host is None:
            raise self.link.missing()
        self._slots.wait_warm(host, wait_s)
        if lost := self._slots.views.others(host):
            self.copied()
            for other in lost:
                self._slots.views.drop(other)
        lease: Lease | None = None
        view: SlotView | None = None
        done: Future[Manifest] = Future()
        try:
            laid = self.layouter.lay_out(content, manifest, owned)
            layout = laid.layout
            lease = self._slots.take(host, layout.nbytes, seconds_left(deadline_s))
            self._forget_done()
            view = self._slots.views.of(host, lease)
            self.copied_bytes += layout.nbytes
            first, job = self._copy(layout, view, owned)
            floats = floats_of(layout, owned) if self._approximates else ()
            pending = Pending(
                manifest=laid.manifest,
                lease=lease,
                first=first,
                job=job,
                done=done,
                destinations=destinations,
                tried=laid.tried,
                view=view,
                floats=floats,
            )
            self._pending.append(pending)
            self._tasks.put(lambda: self._finish(host, pending), lambda error: self._failed(host, pending, error))
        except BaseException:
            if lease is not None and done.cancel():  # else the background has it already, and Ctrl-C came a moment late
                if view is not None:
                    self._copier.give_up(view)
                self._forget_done()
                give_back(host, lease)
            raise
        if job.stands_still:
            self.copied()  # what goes wrong below, or takes longer, does so beside training
            futures.wait([pending.done], host.server_call_timeout_s)
        return pending.done

    def _copy(self, layout: Layout, view: SlotView, owned: Owners) -> tuple[CopyJob, CopyJob]:
        """Copy now what forward may change, and let the optimizer's own follow until its next step; both copies."""
        following = owned.keys() - self._unsteady
        first = [piece for piece in layout.pieces if piece.storage.data_ptr() not in following]
        later = [piece for piece in layout.pieces if piece.storage.data_ptr() in following]
        watched = dict.fromkeys(piece.storage.data_ptr() for piece in later)  # each once, of however many pieces
        at_once = self._copier.start(first, view)
        for offset, data in layout.frame:
            view.map[offset : offset + len(data)] = data
        at_once.wait_cpu()
        self._copier.fence()  # before what may take longer: a GPU's training would wait for that too
        watches = Watches(itertools.chain.from_iterable(map(owned.__getitem__, watched)))
        return at_once, self._copier.start(later, view, watches, self._schedule)

    def fail(self, manifest: Manifest, error: BaseException) -> None:
        """Put into the ring why this rank will have no shard of a snapshot; nothing if one rank writes all of it.

        Args:
            manifest: of the shard, as far as it is known.
            error: why.
        """
        if manifest.shard is not None:
            why = str(error) if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"
            self.link.tell(lambda host: host.fail(manifest, why))

    def copied(self) -> None:
        """Return when the tensors may change: call it before every optimizer step, swap of weights, and at the end."""
        for pending in self._pending:
            try:
                pending.job.wait_cpu()
                self._copier.fence()
                pending.job.validate()
                self._unsteady |= pending.job.moved
            except SpotError:
                continue  # the background thread reports it through the future
            except Exception as error:  # training goes on without it
                pending.job.fail(error)
        self._forget_done()

    def _forget_done(self) -> None:
        self._pending = [pending for pending in self._pending if not pending.done.done()]

    def wait_all(self, wait_s: float) -> None:
        """Wait until every snapshot begun so far is committed or given up."""
        self.copied()
        self._tasks.put(self._slots.give_back_ahead)
        futures.wait([pending.done for pending in self._pending], wait_s)

    def close(self) -> None:
        """Stop the threads. The host stays open: it is the caller's, unless it keeps a thread waiting."""
        self.link.close()
        done, made = self._tasks.close(CLOSE_S), self._slots.close(CLOSE_S)
        if not (done and made) and self.host is not None:
            self.host.disconnect()
            self._tasks.close(CLOSE_S)
            self._slots.close(CLOSE_S)
        with contextlib.ExitStack() as ends:  # from the last one on, whatever fails in one
            ends.callback(self._pending.clear)
            for host in self._slots.views.others(None):
                ends.callback(self._slots.views.drop, host)
            ends.callback(self._copier.close)

    def store_past_memory(self, checkpoint: Any, manifest: Manifest, store: Store) -> Manifest:
        """Bring a snapshot that fits no slot to a tier, part by part, or raise a ``SpotError``. Training waits for it.

        Args:
            checkpoint: what to save; nothing changes it meanwhile.
            manifest: what it is; size and checksums are filled in.
            store: the tier.
        """
        laid = self.layouter.lay_out(checkpoint, manifest, NOBODY)
        self.committed = self.past_memory = stored = store_streamed(laid.layout, laid.manifest, store)
        self._look_at(laid)
        return stored

    # -- on the background thread ---------------------------------------------------------------------------------

    def _look_at(self, laid: Laid | Pending) -> None:
        if laid.tried is not None and (problem := self._look(laid.tried)) is not None:
            say(logging.ERROR, "not-resumable", "{about}", about=problem)

    def _finish(self, host: Host, pending: Pending) -> None:
        if not pending.done.set_running_or_notify_cancel():
            return  # Ctrl-C: its slot was given back
        manifest = pending.manifest
        self._check(pending)
        is_short = host.seal(pending.lease, manifest, pending.destinations, pending.floats)
        try:
            if manifest.shard is not None and self._rank == 0:
                self._wait_until_it_counts(manifest.snapshot)
        except SpotError as error:
            self._say_failed(manifest, error)
            pending.done.set_exception(error)
        else:
            if self.committed is None or manifest.order >= self.committed.order:
                self.committed = manifest
            recovered("snapshot-failed", "snapshots are committed again", about=self._failing)
            pending.done.set_result(manifest)
        if not manifest.complete:
            self._slots.look_ahead(host, manifest.nbytes, is_short=is_short)
        self._look_at(pending)
        if self._rank == 0 and pending.lease.backing != "process":
            say_failing(self.link)

    def _check(self, pending: Pending) -> None:
        """Wait until all of a snapshot is in its slot.

        Raises:
            SnapshotFailedError: if that is not what the tensors were.
        """
        try:
            pending.first.wait()
        finally:
            pending.job.wait()
        if moved := pending.job.moved:
            raise SnapshotFailedError(
                f"snapshot {pending.manifest.snapshot} was dropped: {len(moved)} tensors changed between two optimizer"
                " steps while they were copied. From now on these are copied before the step goes on",
                reason=FailureReason.TORN,
            )

    def _wait_until_it_counts(self, name: str) -> None:
        """Wait for the shards of the other ranks; a ring that is lost meanwhile may be found again with what it had.

        Raises:
            SpotError: if there is no such snapshot, or not in time.
        """
        began_s = time.monotonic()
        deadline_s = began_s + _COUNTS_S + _TIMES * self._counted_s
        status, why = Status.PENDING, ""
        while status is Status.PENDING and seconds_left(deadline_s) and not self.link.is_closed:
            if (host := self.link.wait(seconds_left(deadline_s))) is None:
                raise self.link.missing()
            try:
                status, why = host.wait_for(name, min(_SLICE_S, seconds_left(deadline_s)))
            except ServerUnreachableError as error:
                self.link.lose(host, error)
                if self.link.host is host:  # there is no way to another
                    raise
        if status is Status.COMMITTED:
            self._counted_s = time.monotonic() - began_s
            return
        why = why or f"the shards of all ranks are not there after {time.monotonic() - began_s:.0f} s"
        if status is Status.ABORTED or not self.link.is_closed:  # at the end, the others may bring theirs yet
            self.aborted += 1
            self.dropped += 1
            self.why_aborted = why
        raise SnapshotFailedError(why, reason=FailureReason.SHARD_MISSING)

    def _failed(self, host: Host, pending: Pending, error: BaseException) -> None:
        """Whatever has failed, also in here: nobody waits for the snapshot after, and its slot is free."""
        if pending.done.done():
            raise error
        error = as_failure(error) if isinstance(error, Exception) else error  # who waits for it expects no other kind
        try:
            self.dropped += FailureReason.TORN.caused(error)
            if not pending.job.is_done:  # the slot is given back: nothing is to come into it any more
                self._copier.give_up(pending.view)
            if isinstance(error, ServerUnreachableError):
                self.link.lose(host, error)
            else:
                give_back(host, pending.lease)
            self.fail(pending.manifest, error)
            self._say_failed(pending.manifest, error)
        finally:
            pending.done.set_exception(error)

    def _say_failed(self, manifest: Manifest, error: BaseException) -> None:
        if isinstance(error, FencedError):
            self.fence = error
        if FailureReason.TORN.caused(error):
            say(logging.WARNING, "snapshot-torn", "{error}. The next snapshot is tried.", error=error)
        elif not self.link.is_loss(error):  # which was logged
            self._failing = str(getattr(error, "reason", type(error).__name__))
            text = "snapshot {snapshot} was not committed: {error}. The next one is tried."
            facts: dict[str, Any] = {"snapshot": manifest.snapshot, "error": error}
            say(logging.WARNING, "snapshot-failed", text, about=self._failing, **facts)
