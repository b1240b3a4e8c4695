"""Brings snapshots that were begun to their end, and notes what became of them: a writer's background thread."""

from __future__ import annotations

import functools
from collections.abc import Callable

from lightning_spot.capture.across import Across
from lightning_spot.capture.background import Background
from lightning_spot.capture.copying import Copying
from lightning_spot.capture.host_link import HostLink
from lightning_spot.capture.leases import Leases, give_back, say_backing
from lightning_spot.capture.mail import Mailbox
from lightning_spot.capture.pending import Pending
from lightning_spot.capture.saying import SayOnce, SayWhyNot, say_failing, say_waiting
from lightning_spot.capture.supply import Supply
from lightning_spot.capture.unforeseen import as_failure
from lightning_spot.capture.warming import SlotMaker
from lightning_spot.errors import Fenced, NodeUnreachable, ShareMissing, SpotError, TornSnapshot
from lightning_spot.image.layout import Layout
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.host import Host
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule


class Finishing:
    """What a writer of snapshots has, and does on its background thread. The training thread's part is its own.

    Its arguments are those of :class:`~lightning_spot.capture.writer.SnapshotWriter`.

    Attributes:
        link: to the ring, which may be lost and found again.
        across: of what several hosts bring to a memory node.
        committed: manifest of the newest snapshot that is committed in memory, or was stored past it.
        past_memory: manifest of the newest that was stored past it: outside this host.
        torn: snapshots dropped because a tensor changed while it was copied.
        together: committed snapshots of which other ranks have written a share.
        posted: those for which they have sent what only they know.
        mailbox: where that comes, if any; closed with the writer.
        fence: the error that says that a later attempt has taken the run over; ``None`` as long as none did.
        say_once: warns once for each key.
        missed: snapshots dropped because another rank's share of them did not come, and why the last one was.
    """

    _leases_ahead, _leases_shared = True, False  # with DDP, whether ranks write together is known late

    def __init__(
        self,
        host: Host,
        reconnect: Callable[[], Host] | None,
        look: Callable[[Layout], str | None],
        copier: Copier | None,
        schedule: Schedule | None,
    ) -> None:
        self._look = look
        self.say_once = SayOnce()
        self.link = HostLink(host, reconnect, lambda found: self._maker.again(found))
        self.mailbox: Mailbox | None = None
        self.committed: Manifest | None = None
        self.past_memory: Manifest | None = None
        self.fence: Fenced | None = None
        self.torn = 0
        self.together, self.posted, self.missed, self.missed_because = 0, 0, 0, ""
        self._say_why_not = SayWhyNot(self.say_once)
        waits = functools.partial(say_waiting, self.say_once, self.link)  # a method would keep this alive
        self.across = Across(self.link, waits)
        self._leases = leases = Leases(self.link, functools.partial(say_backing, self.say_once), waits)
        copier = copier if copier is not None else Copier()
        try:
            self._tasks = Background("spot-writer", leases.give_back, lambda: leases.idle_s)
        except BaseException:  # nobody else closes what was given
            copier.close()
            raise
        self._copying = copying = Copying(copier, schedule, self.say_once)
        self._maker = SlotMaker(copying.views, copying.copier, self.link.lose)
        self._supply = Supply(self._maker, leases)

    def miss(self, error: SpotError) -> None:
        """Note that a snapshot was not taken because of another rank's share of it."""
        self.missed, self.missed_because = self.missed + 1, str(error)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _look_at(self, outline: Layout) -> None:
        if (problem := self._look(outline)) is not None:
            self.say_once(problem, "%s", problem)

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
            self._say_why_not.committed()
            pending.done.set_result(pending.manifest)
            if not pending.manifest.complete:
                leases = self._leases_ahead and pending.is_here and (self._leases_shared or not pending.lease.shared)
                self._supply.look_ahead(host, pending.outline.nbytes, is_short=is_short, leases=leases)
            self._look_at(pending.tried)
            if pending.lease.backing != "process":
                say_failing(self.say_once, self.link)

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
        self.torn += isinstance(error, TornSnapshot)
        if not pending.job.is_done:  # the slot is given back: nothing is to come into it any more
            self._copying.copier.give_up(pending.view)
        if self.mailbox is not None:
            self.mailbox.over(pending.manifest.name)  # else what has come, or comes yet, would be kept until the end
        if isinstance(error, NodeUnreachable):
            self.link.lose(host, error)
        else:
            give_back(host, pending.lease)
        if self.across.has_given_way(pending):
            pending.done.set_exception(error)
            return
        if isinstance(error, ShareMissing):
            self.miss(error)
        if isinstance(error, Fenced):
            self.fence = error
        if isinstance(error, TornSnapshot):
            self.say_once("torn", "%s", error)
        elif not self.link.is_loss(error):  # of which it was said
            self._say_why_not(pending.manifest.name, str(error))
        pending.done.set_exception(error)
