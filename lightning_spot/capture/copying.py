"""How a snapshot comes into its slot: only what is not there yet; at once what forward may change, the rest after it.

What is copied must not change meanwhile, and what is left out must be as the slot has it. Both are looked at when the
copy is over.
"""

from __future__ import annotations

from lightning_spot.capture.contents import PAST_COUNTS, Known, Plan, Unchanged
from lightning_spot.capture.owners import Owners
from lightning_spot.capture.parting import Parting
from lightning_spot.capture.pending import Pending
from lightning_spot.capture.saying import SayOnce
from lightning_spot.capture.turns import CHECK_EVERY
from lightning_spot.capture.views import SlotViews
from lightning_spot.image.layout import Layout
from lightning_spot.memory.host import Lease
from lightning_spot.staging.copier import Copier, CopyJob, SlotView, watch
from lightning_spot.staging.schedule import Schedule


class Copying:
    """Copies one snapshot after the other.

    Args:
        copier: that does.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.
        say_once: of the same writer.

    Attributes:
        copier: that does.
        views: of the slots.
        unchanged: finds what a slot has already.
    """

    def __init__(self, copier: Copier, schedule: Schedule | None, say_once: SayOnce) -> None:
        self.copier = copier
        self.views = SlotViews(copier)
        self.unchanged = Unchanged()
        self._schedule, self._say_once = schedule, say_once
        self._parting = Parting()
        self._unsteady: frozenset[int] = frozenset()

    # -- on the training thread -----------------------------------------------------------------------------------

    def plan(self, layout: Layout, lease: Lease, view: SlotView, owners: Owners, *, trusts: bool) -> Plan:
        """What of a layout is not in the slot yet.

        Args:
            layout: of the snapshot.
            lease: of the slot.
            view: of the slot.
            owners: tensors whose counts of writes tell whether they have changed.
            trusts: whether they are trusted. Those of the last snapshot are not: no later one checks them.
        """
        known = self.views.content(view).take(lease.held)
        plan = self.unchanged.plan(layout, owners, known if trusts else None, view)
        if plan.past_counts:
            self._say_past_counts(plan.past_counts)
        return plan

    def start(self, plan: Plan, view: SlotView, owned: Owners) -> CopyJob:
        """Copy now what forward may change, and let the optimizer's own follow until its next step."""
        parted = self._parting.part(plan.pieces, owned, self._unsteady | plan.at_once)
        first = self.copier.start(parted.first, view)
        for offset, data in plan.frame:
            view.map[offset : offset + len(data)] = data
        first.wait_cpu()
        self.copier.fence()  # before what may take longer: a GPU's training would wait for that too
        job = self.copier.start(parted.later, view, watch(parted.owners), self._schedule)
        job.follow(first)  # there may be nothing more to copy from its GPUs
        plan.pieces = ()  # no storage is kept alive longer than its copy takes
        return job

    def copied(self, pending: Pending) -> None:
        """Return when the tensors of a snapshot may change."""
        self.unchanged.written_past_counts(pending.plan, pending.view)
        pending.job.wait_cpu()
        self.copier.fence()
        pending.job.settle()
        self._unsteady |= pending.job.moved

    def newest_differs(self) -> bool:
        """See :meth:`Unchanged.newest_differs`."""
        if differs := self.unchanged.newest_differs():
            self._say_past_counts(1)
        return differs

    def close(self) -> None:
        """Let the slots go. Nothing is copied any more."""
        self.copier.close()
        for host in self.views.others(None):
            self.views.drop(host)

    # -- on the background thread ---------------------------------------------------------------------------------

    def check(self, pending: Pending) -> None:
        """Wait until all of a snapshot is in its slot.

        Raises:
            TornSnapshot: if that is not what the tensors were.
        """
        found = self.unchanged.written_past_counts(pending.plan, pending.view)
        pending.job.wait()
        if (torn := pending.torn(found)) is not None:
            if not pending.job.moved:
                self._say_past_counts(found)
            raise torn

    def sealed(self, pending: Pending) -> None:
        """A slot holds a snapshot now: note what."""
        known = Known(pending.lease.id, pending.outline.frame, pending.plan.marks)
        self.views.content(pending.view).sealed(known)

    def _say_past_counts(self, count: int) -> None:
        self._say_once("past-counts", PAST_COUNTS, count, CHECK_EVERY)
