"""Takes snapshots: lays the checkpoint out, leases a slot, copies beside training, guards, commits.

The training thread calls :meth:`SnapshotWriter.begin` and, before the tensors change, :meth:`~SnapshotWriter.copied`.
Everything else happens on one background thread. A snapshot that fits no memory is streamed
from the tensors, part by part, while training waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_spot.capture.background import CLOSE_S, Background
from lightning_spot.capture.copying import Copying, OpenedSnapshot, Pending
from lightning_spot.capture.host_link import HostLink, within
from lightning_spot.capture.mailbox import Mailbox
from lightning_spot.capture.saying import SAY_S, say_failing, say_waiting
from lightning_spot.capture.slot_pool import Leases, SlotMaker, SlotPool, give_back, say_backing
from lightning_spot.capture.split import Divided, Divider, SharingRanks
from lightning_spot.capture.tensors import NOBODY, Owners, owners_of
from lightning_spot.capture.unexpected import as_failure
from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    NotSerializableError,
    ServerUnreachableError,
    ShareFault,
    SnapshotFailedError,
    SpotError,
    fault_of,
)
from lightning_spot.image.floats import WIDTHS, Floats
from lightning_spot.image.layout import Layout, Layouter, lay_out_plain, outline_of
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.pieces import Piece
from lightning_spot.image.written import in_order
from lightning_spot.memory.host import Host
from lightning_spot.memory.joint import SpreadPlace, is_durable, nodes_of
from lightning_spot.say import recovered, say
from lightning_spot.staging.batch import SlotView
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 1024 * 1024


LEAST_BYTES = 64 * 1024
"""Less is sent as it is: counters of optimizers are floating-point numbers, too."""


def store_streamed(layout: Layout, manifest: Manifest, store: Store) -> Manifest:
    """Bring a laid-out checkpoint to a tier, part by part; its sealed manifest, once it is committed there.

    Args:
        layout: of the checkpoint; nothing changes it meanwhile.
        manifest: what it is; size and checksums are filled in.
        store: the tier.

    Raises:
        SpotError: if it is not there in the end.
    """
    manifest = replace(manifest, nbytes=layout.nbytes)
    return store.put_parts(manifest, stream_parts(layout, manifest.part_bytes), attempt=manifest.attempt)


def stream_parts(layout: Layout, part_bytes: int) -> Iterator[memoryview]:
    """Yield the file of a laid-out checkpoint in parts of ``part_bytes`` each, but the last.

    Args:
        layout: of the checkpoint; its storages may be on any device.
        part_bytes: size of a part.

    Yields:
        the next part; it is valid until the one after it is asked for.
    """
    part = bytearray(min(part_bytes, layout.nbytes))
    filled, sent = 0, 0
    for data in _in_order(layout):
        place = 0
        while place < len(data):
            count = min(len(part) - filled, len(data) - place)
            part[filled : filled + count] = data[place : place + count]
            filled, place = filled + count, place + count
            if filled == len(part):
                yield memoryview(part)
                sent, filled = sent + filled, 0
                if layout.nbytes - sent < len(part):
                    part = bytearray(layout.nbytes - sent)


def _in_order(layout: Layout) -> Iterator[memoryview]:
    """The bytes of the file from its first to its last, in pieces of any size."""
    items: list[tuple[int, bytes | bytearray | Piece]] = [
        *layout.frame,
        *((piece.offset, piece) for piece in layout.pieces),
    ]
    for _, item in sorted(items, key=lambda found: found[0]):
        if isinstance(item, Piece):
            yield from _bytes_of(item)
        else:
            yield memoryview(item)


def _bytes_of(piece: Piece) -> Iterator[memoryview]:
    """The bytes of a storage, chunk by chunk in one buffer; from a GPU they are copied first."""
    source = torch.empty(0, dtype=torch.uint8, device=piece.storage.device).set_(piece.storage)
    buffer = bytearray(min(_CHUNK_BYTES, piece.nbytes))
    target = torch.frombuffer(buffer, dtype=torch.uint8)
    for start in range(0, piece.nbytes, _CHUNK_BYTES):
        count = min(_CHUNK_BYTES, piece.nbytes - start)
        target[:count].copy_(source[start : start + count])
        yield memoryview(buffer)[:count]


class Across:
    """What a writer knows of them. It is asked on the training thread, and told on the writer's own.

    Args:
        link: to the ring of this host.
        waits: told that training waits for long, and for how long it may yet.

    Attributes:
        wanted: whether there are other hosts, and a snapshot server is to carry the run on.
        carrier: where hosts may bring the next snapshot, as known when the last one was committed; see
            :meth:`~lightning_spot.memory.host.Host.carrier`.
        brought: snapshots that hosts have brought together.
        at: URLs of the run at the snapshot servers to which the newest snapshot was brought, separated by spaces; one
            of them has it, or, of a :class:`~lightning_spot.memory.joint.SpreadPlace`, all together, and may have lost
            it since. ``""`` if this host has it, or storage.
        spread: where snapshots are spread over snapshot servers: at how many each portion is to be kept; else 0.
        hosts: the ranks of each host, if they bring a state in shards; that of rank 0 first.
        own_nbytes: what this host brings of such a snapshot, on rank 0; 0 before the first one.
    """

    def __init__(self, link: HostLink, waits: Callable[[SnapshotFailedError, float], None]) -> None:
        self.wanted = False
        self.carrier = ""
        self.brought = 0
        self.at = ""
        self.hosts: tuple[tuple[int, ...], ...] = ()
        self.own_nbytes = 0
        self.spread = 0
        self._link, self._waits = link, waits
        self._last: Pending | None = None
        self._gave_way: Pending | None = None

    @property
    def part(self) -> float:
        """Which part of a state in shards this host has, about, on rank 0."""
        return len(self.hosts[0]) / sum(map(len, self.hosts)) if self.hosts else 1.0

    @property
    def is_by_itself(self) -> bool:
        """Whether each host brings what it has of a state in shards to storage by itself."""
        return bool(self.hosts) and not self.wanted

    @property
    def is_under_way(self) -> bool:
        """Whether one is not committed yet."""
        return self._last is not None and not self._last.done.done()

    def has_given_way(self, pending: Pending) -> bool:
        """Whether a snapshot was given up for one that does not wait for other hosts: then nothing is wrong."""
        return self._gave_way is pending

    def begun(self, pending: Pending) -> None:
        """A snapshot is under way."""
        if _at(pending):
            self._last = pending

    def make_way(self, host: Host, at: str, wait_s: float) -> None:
        """Have no other one under way. What this host writes by itself does not wait for other hosts.

        Args:
            host: the ring.
            at: where hosts are to bring the next snapshot, ``""`` if this host writes it.
            wait_s: how long to wait for the one before.

        Raises:
            SnapshotFailedError: if that is not committed by then.
        """
        before, self._last = self._last, None
        if before is None or before.done.done():
            return
        if not at:
            self._gave_way = before
            give_back(host, before.lease)
            return
        full = SnapshotFailedError(
            f"{before.manifest.name} is still on its way to {_at(before)}", reason=FailureReason.RING_FULL
        )
        try:
            futures.wait([before.done], min(wait_s, SAY_S))
            if wait_s > SAY_S and not before.done.done():
                self._waits(full, wait_s - SAY_S)
            before.done.result(timeout=max(0.0, wait_s - SAY_S))
        except TimeoutError:
            self._last = before
            raise full from None
        except SpotError as error:
            logger.debug("%s: %s", before.manifest.name, error)

    def committed(self, pending: Pending) -> bool:
        """Note that a snapshot is committed; whether several hosts have brought it."""
        at = _at(pending)
        self.at = "" if is_durable(at) else at
        self.brought += bool(at)
        if self.wanted:
            self.look()
        return bool(at)

    def look(self) -> str:
        """Ask where hosts may bring the next snapshot."""
        self.carrier = self._link.ask(lambda host: host.carrier(self.spread), "")
        return self.carrier

    def close(self) -> None:
        """Let the slots of snapshots go: none comes after them."""
        self._last = self._gave_way = None

    def why_lost(self, name: str, wait_s: float) -> str:
        """Why none of the snapshot servers at :attr:`at` is known to have a snapshot any more; ``""`` if one has it.

        Args:
            name: of the snapshot.
            wait_s: how long to wait for their answers.
        """
        urls, reasons = nodes_of(self.at), []
        if SpreadPlace.read(self.at) is not None:
            return self._why_not_whole(name, urls, wait_s)
        for url in urls:
            try:
                if NodeStore(url).holds(name, wait_s / len(urls)):
                    return ""
                reasons.append("has it no more")
            except SpotError as error:
                reasons.append(f"cannot be asked ({error})")
        return "; the other one ".join(reasons)

    def _why_not_whole(self, name: str, urls: list[str], wait_s: float) -> str:
        """The same where it is spread over the servers."""
        missing: set[int] | None = None
        reasons = []
        for url in urls:
            try:
                portions = NodeStore(url).look(name, wait_s / len(urls))["portions"]
            except SpotError as error:
                reasons.append(f"{url} cannot be asked ({error})")
                continue
            for item in (item for item in portions if item["name"] == name):
                missing = (set(range(item["hosts"])) if missing is None else missing) - {item["host"]}
        if missing == set():
            return ""
        listed = "any host" if missing is None else f"host {', '.join(map(str, sorted(missing)))}"
        return "; ".join([f"have no portion of {listed} (any more)", *reasons])


def _at(pending: Pending) -> str:
    shared = pending.lease.shared
    return shared.at if shared is not None else ""


_NAMES = {getattr(torch, name): name for name in WIDTHS}
_Divide = Callable[[Layout], Divided]


class Outliner:
    """Makes layouts."""

    def __init__(self) -> None:
        self._layouter = Layouter()

    def lay_out(self, checkpoint: Any) -> Layout:
        """Lay ``checkpoint`` out.

        Raises:
            NotSerializableError: if it holds what cannot be pickled.
            MemoryError: if there is not the memory for it now; the next one may be laid out.
        """
        try:
            return self._layouter.lay_out(checkpoint)
        except MemoryError:
            raise
        except Exception as error:  # pickling runs the user's code, which may raise anything
            problem = f"{type(error).__name__}: {error}"
        try:
            layout = lay_out_plain(checkpoint)
        except MemoryError:
            raise
        except Exception as error:
            raise NotSerializableError(
                f"the training state cannot be serialised ({type(error).__name__}: {error}); look at what"
                " on_save_checkpoint, state_dict and hyperparameters put into the checkpoint"
            ) from error
        text = "checkpoints are serialized with plain torch.save, which is slower: {about}. Report it."
        say(logging.WARNING, "saved-slowly", text, about=problem)
        return layout


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


class Miss(NamedTuple):
    """Why a snapshot was missed, without the error, whose frames hold tensors.

    Attributes:
        why: for people.
        fault: of a share that is missing.
    """

    why: str
    fault: ShareFault | None


class SnapshotWriter:
    """Takes snapshots into a ring on this host.

    Args:
        host: the ring, its run already opened.
        reconnect: makes a new connection to the ring (and opens the run again) after the old one broke.
        look: looks at the outline of what was written; what it says is warned of once.
        copier: that copies; closed with the writer.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.
        approximates: whether servers may be sent approximations.

    Attributes:
        link: to the ring, which may be lost and found again.
        across: of what several hosts bring to a snapshot server.
        committed: manifest of the newest snapshot that is committed in memory, or was stored past it.
        past_memory: manifest of the newest that was stored past it: outside this host.
        torn: snapshots dropped because a tensor changed while it was copied.
        together: committed snapshots of which other ranks have written a share.
        posted: those for which they have sent what only they know.
        mailbox: where that comes, if any; closed with the writer.
        fence: the error that says that a later attempt has taken the run over; ``None`` as long as none did.
        missed: snapshots dropped because another rank's share of them did not come.
        last_miss: why the last one was.
        copied_bytes: written into slots so far; what a slot held already is not written again.
    """

    _leases_ahead, _leases_shared = True, False  # with DDP, whether ranks write together is known late

    def __init__(
        self,
        host: Host,
        reconnect: Callable[[], Host] | None = None,
        look: Callable[[Layout], str | None] = lambda _outline: None,
        copier: Copier | None = None,
        schedule: Schedule | None = None,
        *,
        approximates: bool = False,
    ) -> None:
        self._look = look
        self.link = HostLink(host, reconnect, lambda found: self._maker.again(found))
        self.mailbox: Mailbox | None = None
        self.committed: Manifest | None = None
        self.past_memory: Manifest | None = None
        self.fence: FencedError | None = None
        self.torn = 0
        self.together, self.posted, self.missed = 0, 0, 0
        self.last_miss = Miss("", None)
        self._failing = ""
        waits = functools.partial(say_waiting, self.link)  # a method would keep this alive
        self.across = Across(self.link, waits)
        self._leases = leases = Leases(self.link, say_backing, waits)
        copier = copier if copier is not None else Copier()
        try:
            self._tasks = Background("spot-writer", leases.give_back, lambda: leases.idle_s)
        except BaseException:  # nobody else closes what was given
            copier.close()
            raise
        self._copying = copying = Copying(copier, schedule)
        self._maker = SlotMaker(copying.views, copying.copier, self.link.lose)
        self._slots = SlotPool(self._maker, leases)
        self._approximates = approximates
        self.copied_bytes = 0
        self._pending: list[Pending] = []
        self._outliner, self._divider = Outliner(), Divider()

    # -- on the training thread -----------------------------------------------------------------------------------

    @property
    def host(self) -> Host | None:
        """The ring, ``None`` while there is none."""
        return self.link.host

    @property
    def ready(self) -> bool:
        """Whether a snapshot can begin now without waiting for its slot to be made."""
        return self._maker.ready

    def warm(self, nbytes: int, *, gpu: int | None = None, beyond: bool = False) -> None:
        """Make, map and (for a GPU) pin slots in the background, so that no snapshot meets a cold one.

        Args:
            nbytes: expected size of a snapshot.
            gpu: number of the GPU that tensors will come from, if they do.
            beyond: see :class:`SlotMaker`.
        """
        self._maker.beyond = beyond
        self._maker.first(self.host, nbytes, gpu=gpu)

    def next_comes(self) -> None:
        """The next snapshot comes within a second: its slot is leased meanwhile, unless other hosts take part."""
        host, last, others = self.host, self.committed, self.across.wanted or self.across.hosts
        if host and last and last is not self.past_memory and not others and self._leases_ahead and self.ready:
            self._tasks.put(lambda: self._slots.lease_ahead(host, last.nbytes, comes=True))

    def begin(
        self,
        checkpoint: Any,
        manifest: Manifest,
        *,
        owned: Owners = NOBODY,
        kept: Owners = NOBODY,
        wait_s: float = 0.0,
        destinations: list[str] | None = None,
        ranks: SharingRanks | None = None,
        followed: bool = False,
    ) -> Future[Manifest]:
        """Begin a snapshot. What is not in ``owned`` is copied before this returns.

        Args:
            checkpoint: what to save; the storages in ``owned`` must not change until :meth:`copied` returned.
            manifest: what it is; size and checksums are filled in.
            owned: tensors that only the optimizer changes, by the address of their storage.
            kept: further tensors whose counts of writes tell whether they changed, such as frozen parameters.
            wait_s: how long to wait for a clean slot, in all.
            destinations: tiers below, if not the run's.
            ranks: that fill it together with this one; each of them begins its share by itself.
            followed: whether another one is to follow in a moment, see :meth:`Host.seal`.

        Returns:
            a future that becomes the manifest once the snapshot is committed in memory.

        Raises:
            SpotError: if no snapshot can be begun now; nothing that is saved already is touched.
        """
        if (host := self.host) is None:
            raise self.link.missing()
        deadline_s = time.monotonic() + wait_s
        self._slots.wait_warm(host, wait_s)
        self.across.make_way(host, ranks.at if ranks is not None else "", within(deadline_s))
        if lost := self._copying.views.others(host):
            self.copied()
            for other in lost:
                self._copying.views.drop(other)
        divide = functools.partial(self._divider.divide, name=manifest.name, owned=owned, kept=kept, ranks=ranks)
        opened: OpenedSnapshot | None = None
        view: SlotView | None = None
        done: Future[Manifest] = Future()
        try:
            opened = self._open(host, checkpoint, manifest, within(deadline_s), divide)
            self._forget_done()
            if self._pending:  # the background is at these, and other ranks would wait for it
                self._leases.say_now()
            layout, lease, manifest = opened.layout, opened.lease, opened.manifest
            view = self._copying.views.of(host, lease)
            trusts = not manifest.complete
            plan = self._copying.plan(layout, lease, view, self._counted(owned, kept), trusts=trusts)
            if (sent := opened.sent) and plan.written is not None:
                plan.written = in_order([*plan.written, *sent.values()])
            self.copied_bytes += plan.nbytes
            job = self._copying.start(plan, view, owned)
            floats = floats_of(opened.whole, owned) if self._approximates else ()
            about = (outline_of(layout), plan, view, sent, floats, followed and ranks is None)
            pending = Pending(manifest, lease, job, done, destinations, *about)
            self._pending.append(pending)
            self.across.begun(pending)
            self._tasks.put(lambda: self._finish(host, pending), lambda error: self._end(host, pending, error))
        except BaseException as error:
            self._lay_out_anew(error)
            if opened and done.cancel():  # else the background has it already, and Ctrl-C came a moment late
                if view is not None:
                    self._copying.copier.give_up(view)
                self._forget_done()
                give_back(host, opened.lease)
            raise
        if job.stands_still and not self.across.is_under_way:  # that would be to wait for other hosts
            self.copied()
            futures.wait(
                [pending.done], host.server_call_timeout_s
            )  # what goes wrong, or takes longer, does so meanwhile
        return pending.done

    def copied(self) -> None:
        """Return when the tensors may change: call it before every optimizer step, swap of weights, and at the end."""
        for pending in self._pending:
            try:
                self._copying.copied(pending)
            except SpotError:
                continue  # the background thread reports it through the future
            except Exception as error:  # training goes on without it
                pending.job.fail(error)
        self._forget_done()

    def _forget_done(self) -> None:
        self._pending = [pending for pending in self._pending if not pending.done.done()]

    def check_all(self) -> None:
        """The next snapshot may be the last of this attempt: compare all of it that is not copied again."""
        self._copying.unchanged.checks_all = True

    def newest_differs(self) -> bool:
        """See :meth:`Unchanged.newest_differs`; a warning says so."""
        return self._copying.newest_differs()

    def settle(self, wait_s: float) -> None:
        """Wait until every snapshot begun so far is committed or given up."""
        self.copied()
        self._tasks.put(self._leases.give_back)
        deadline = time.monotonic() + wait_s
        for pending in list(self._pending):
            try:
                pending.done.result(timeout=max(0.0, deadline - time.monotonic()))
            except (SpotError, TimeoutError) as error:
                logger.debug("snapshot %s: %s", pending.manifest.name, error)

    def close(self) -> None:
        """Stop the threads. The host stays open: it is the caller's, unless it keeps a thread waiting."""
        self.link.close()
        if self.mailbox is not None:
            self.mailbox.close()
        done, made = self._tasks.close(CLOSE_S), self._maker.close(CLOSE_S)
        if not (done and made) and self.host is not None:
            self.host.disconnect()
            self._tasks.close(CLOSE_S)
            self._maker.close(CLOSE_S)
        with contextlib.ExitStack() as ends:  # from the last one on, whatever fails in one
            ends.callback(self.across.close)
            ends.callback(self._pending.clear)
            ends.callback(self._copying.close)

    def store_past_memory(self, checkpoint: Any, manifest: Manifest, store: Store) -> Manifest:
        """Bring a snapshot that fits no slot to a tier, part by part, or raise a ``SpotError``. Training waits for it.

        Args:
            checkpoint: what to save; nothing changes it meanwhile.
            manifest: what it is; size and checksums are filled in.
            store: the tier.
        """
        layout = self._outliner.lay_out(checkpoint)
        self.committed = self.past_memory = stored = store_streamed(layout, manifest, store)
        self.across.at = store.url if isinstance(store, NodeStore) else ""
        self._look_at(outline_of(layout))
        return stored

    def decline(self, name: str, why: str, at: str = "") -> None:
        """There will be no snapshot of that name: no other rank waits for it. See :meth:`Host.decline`."""
        self._leases.say_now()
        self.link.tell(lambda host: host.decline(name, why, at))

    def miss(self, error: SpotError) -> None:
        """Note that a snapshot was not taken because of another rank's share of it."""
        self.missed, self.last_miss = self.missed + 1, Miss(str(error), fault_of(error))

    # -- inside, on the training thread ---------------------------------------------------------------------------

    def _lay_out_anew(self, error: BaseException) -> None:
        """What was laid out in part is no base for the next one."""
        if not isinstance(error, SpotError):
            self._outliner = Outliner()

    def _open(self, host: Host, checkpoint: Any, manifest: Manifest, wait_s: float, divide: _Divide) -> OpenedSnapshot:
        """Lay a snapshot out, and take the slot for it."""
        deadline_s = time.monotonic() + wait_s
        whole = self._outliner.lay_out(checkpoint)
        shared, layout, sent = divide(whole)
        lease = self._slots.take(host, layout.nbytes, within(deadline_s), shared)
        return OpenedSnapshot(layout, lease, replace(manifest, nbytes=layout.nbytes), whole, sent)

    def _counted(self, owned: Owners, kept: Owners) -> Owners:
        """Tensors whose counts of writes tell whether they have changed."""
        return owners_of(owned, kept)

    # -- on the background thread ---------------------------------------------------------------------------------

    def _look_at(self, outline: Layout) -> None:
        if (problem := self._look(outline)) is not None:
            say(logging.ERROR, "not-resumable", "{about}", about=problem)

    def _commit(self, host: Host, pending: Pending) -> bool:
        """All bytes are in place: make it a snapshot; whether the next one needs a slot that is still to be made."""
        manifest, written, followed = pending.manifest, pending.plan.written, pending.followed
        return host.seal(pending.lease, manifest, pending.destinations, pending.floats, written, followed=followed)

    def _finish(self, host: Host, pending: Pending) -> None:
        if not pending.done.set_running_or_notify_cancel():
            return  # Ctrl-C: its slot was given back
        try:
            self._leases.say(host, pending.lease)
            self._copying.check(pending)
            if self.mailbox is not None:
                with pending.rooms() as rooms:
                    self.mailbox.put_into(rooms, pending.manifest.name)
            is_short = self._commit(host, pending)
            self._copying.sealed(pending)
        except BaseException as error:
            self._failed(host, pending, error)
        else:
            if self.committed is None or pending.manifest.order >= self.committed.order:
                self.committed = pending.manifest
            if self.across.committed(pending):
                self.past_memory = pending.manifest
            self.together += pending.lease.shared is not None
            self.posted += bool(pending.sent)
            recovered("snapshot-failed", "snapshots are committed again", about=self._failing)
            pending.done.set_result(pending.manifest)
            if not pending.manifest.complete:
                leases = self._leases_ahead and pending.is_here and (self._leases_shared or not pending.lease.shared)
                self._slots.look_ahead(host, pending.outline.nbytes, is_short=is_short, leases=leases)
            self._look_at(pending.tried)
            if pending.lease.backing != "process":
                say_failing(self.link)

    def _end(self, host: Host, pending: Pending, error: BaseException) -> None:
        """Whatever has failed beside what is expected to, nobody waits for a snapshot after, and its slot is free."""
        if not pending.done.done():
            try:
                self._failed(host, pending, error)
            finally:
                if not pending.done.done():
                    pending.done.set_exception(as_failure(error) if isinstance(error, Exception) else error)

    def _failed(self, host: Host, pending: Pending, error: BaseException) -> None:
        error = as_failure(error) if isinstance(error, Exception) else error  # who waits for it expects no other kind
        self.torn += FailureReason.TORN.caused(error)
        if not pending.job.is_done:  # the slot is given back: nothing is to come into it any more
            self._copying.copier.give_up(pending.view)
        if self.mailbox is not None:
            self.mailbox.over(pending.manifest.name)  # else what has come, or comes yet, would be kept until the end
        if isinstance(error, ServerUnreachableError):
            self.link.lose(host, error)
        else:
            give_back(host, pending.lease)
        if self.across.has_given_way(pending):
            pending.done.set_exception(error)
            return
        if isinstance(error, SnapshotFailedError) and error.reason is FailureReason.SHARE_MISSING:
            self.miss(error)
        if isinstance(error, FencedError):
            self.fence = error
        if FailureReason.TORN.caused(error):
            say(logging.WARNING, "snapshot-torn", "{error}. The next snapshot is tried.", error=error)
        elif not self.link.is_loss(error):  # which was logged
            self._failing = str(getattr(error, "reason", type(error).__name__))
            text = "snapshot {snapshot} was not committed: {error}. The next one is tried."
            say(
                logging.WARNING,
                "snapshot-failed",
                text,
                about=self._failing,
                snapshot=pending.manifest.name,
                error=error,
            )
        pending.done.set_exception(error)
