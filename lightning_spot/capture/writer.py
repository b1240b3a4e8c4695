"""Takes snapshots: lays the checkpoint out, leases a slot, copies beside training, guards, commits.

The training thread calls :meth:`SnapshotWriter.begin` and, before the tensors change, :meth:`~SnapshotWriter.copied`.
Everything else happens on one background thread (see ``finishing``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from lightning_spot.capture.finishing import Finishing
from lightning_spot.capture.floating import floats_of
from lightning_spot.capture.host_link import within
from lightning_spot.capture.leases import give_back
from lightning_spot.capture.outline import Outliner
from lightning_spot.capture.owners import NOBODY, Owners, owners_of
from lightning_spot.capture.pending import Opened, Pending
from lightning_spot.capture.split import Divided, Divider, Ranks
from lightning_spot.capture.streaming import store_streamed
from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import SpotError
from lightning_spot.image.layout import Layout, outline_of
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.written import in_order
from lightning_spot.memory.host import Host
from lightning_spot.staging.copier import Copier, SlotView
from lightning_spot.staging.schedule import Schedule
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_Divide = Callable[[Layout], Divided]


class SnapshotWriter(Finishing):
    """Takes snapshots into a ring on this host. See :class:`Finishing` for what it has besides.

    Args:
        host: the ring, its run already opened.
        reconnect: makes a new connection to the ring (and opens the run again) after the old one broke.
        look: looks at the outline of what was written; what it says is warned of once.
        copier: that copies; closed with the writer.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.
        approximates: whether nodes may be sent approximations.

    Attributes:
        copied_bytes: written into slots so far; what a slot held already is not written again.
    """

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
        super().__init__(host, reconnect, look, copier, schedule)
        self._approximates = approximates
        self.copied_bytes = 0
        self._pending: list[Pending] = []
        self._outliner, self._divider = Outliner(self.say_once), Divider()

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
            self._tasks.put(lambda: self._supply.lease_ahead(host, last.nbytes, comes=True))

    def begin(
        self,
        checkpoint: Any,
        manifest: Manifest,
        *,
        owned: Owners = NOBODY,
        kept: Owners = NOBODY,
        wait_s: float = 0.0,
        destinations: list[str] | None = None,
        ranks: Ranks | None = None,
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
        self._supply.wait_warm(host, wait_s)
        self.across.make_way(host, ranks.at if ranks is not None else "", within(deadline_s))
        if lost := self._copying.views.others(host):
            self.copied()
            for other in lost:
                self._copying.views.drop(other)
        divide = functools.partial(self._divider.divide, name=manifest.name, owned=owned, kept=kept, ranks=ranks)
        opened: Opened | None = None
        view: SlotView | None = None
        done: Future[Manifest] = Future()
        try:
            opened = self._open(host, checkpoint, manifest, within(deadline_s), divide)
            self._forget_done()
            if self._pending:  # the background is at these, and other ranks would wait for it
                self._leases.say_now()
            layout, lease, manifest = opened.layout, opened.lease, opened.manifest
            view = self._copying.views.of(host, lease)
            trusts = not (manifest.complete or manifest.is_again)
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
            futures.wait([pending.done], host.max_stall_s)  # what goes wrong, or takes longer, does so meanwhile
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
        done, made = self._tasks.close(_CLOSE_S), self._maker.close(_CLOSE_S)
        if not (done and made) and self.host is not None:
            self.host.disconnect()
            self._tasks.close(_CLOSE_S)
            self._maker.close(_CLOSE_S)
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

    # -- inside ---------------------------------------------------------------------------------------------------

    def _lay_out_anew(self, error: BaseException) -> None:
        """What was laid out in part is no base for the next one."""
        if not isinstance(error, SpotError):
            self._outliner = Outliner(self.say_once)

    def _open(self, host: Host, checkpoint: Any, manifest: Manifest, wait_s: float, divide: _Divide) -> Opened:
        """Lay a snapshot out, and take the slot for it."""
        deadline_s = time.monotonic() + wait_s
        whole = self._outliner.lay_out(checkpoint)
        shared, layout, sent = divide(whole)
        lease = self._supply.take(host, layout.nbytes, within(deadline_s), shared)
        return Opened(layout, lease, replace(manifest, nbytes=layout.nbytes), whole, sent)

    def _counted(self, owned: Owners, kept: Owners) -> Owners:
        """Tensors whose counts of writes tell whether they have changed."""
        return owners_of(owned, kept)
