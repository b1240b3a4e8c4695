"""How a snapshot comes into its slot: only what is not there yet; at once what forward may change, the rest after it.

What is copied must not change meanwhile, and what is left out must be as the slot has it. Both are looked at when the
copy is over.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from lightning_spot.capture.contents import PAST_COUNTS, Known, Plan, Unchanged
from lightning_spot.capture.on_gpus import OnGpus
from lightning_spot.capture.owners import Owners
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
        put: has something done on its background thread.

    Attributes:
        copier: that does.
        views: of the slots.
        on_gpus: finds what a slot has already of what lies there.
        unchanged: finds what a slot has already.
    """

    def __init__(
        self,
        copier: Copier,
        schedule: Schedule | None,
        say_once: SayOnce,
        put: Callable[[Callable[[], None]], None],
    ) -> None:
        self.copier = copier
        self.views = SlotViews(copier)
        self.on_gpus = OnGpus(copier, put)
        self.unchanged = Unchanged(self.on_gpus)
        self._schedule, self._say_once = schedule, say_once
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
            self._say_past_counts(plan.past_counts, CHECK_EVERY)
        return plan

    def start(self, plan: Plan, view: SlotView, owned: Owners) -> CopyJob:
        """Copy now what forward may change, and let the optimizer's own follow until its next step."""
        following = owned.keys() - self._unsteady - plan.at_once
        first = [piece for piece in plan.pieces if piece.storage.data_ptr() not in following]
        later = [piece for piece in plan.pieces if piece.storage.data_ptr() in following]
        watched = dict.fromkeys(piece.storage.data_ptr() for piece in later)  # each once, of however many pieces
        plan.looks.begin_at_once()
        copied = self.copier.start(first, view)
        for offset, data in plan.frame:
            view.map[offset : offset + len(data)] = data
        copied.wait_cpu()
        self.copier.fence()  # before what may take longer: a GPU's training would wait for that too
        watches = watch(chain.from_iterable(map(owned.__getitem__, watched)))
        job = self.copier.start(later, view, watches, self._schedule)
        job.follow(copied)  # there may be nothing more to copy from its GPUs
        plan.looks.begin()
        plan.pieces = ()  # no storage is kept alive longer than its copy takes
        return job

    def copied(self, pending: Pending) -> None:
        """Return when the tensors of a snapshot may change."""
        self.unchanged.written_past_counts(pending.plan, pending.view)
        pending.plan.looks.close()
        pending.job.wait_cpu()
        self.copier.fence()
        pending.job.settle()
        self._unsteady |= pending.job.moved

    def give_up(self, view: SlotView, plan: Plan | None) -> None:
        """Return when nothing is copied any more for a snapshot that there will not be.

        Args:
            view: of its slot.
            plan: what was to be copied there, if that was known.
        """
        self.copier.give_up(view)
        if plan is not None:
            plan.looks.end()

    def newest_differs(self) -> bool:
        """See :meth:`Unchanged.newest_differs`."""
        if differs := self.unchanged.newest_differs():
            self._say_past_counts(1, CHECK_EVERY)
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
        found += self.unchanged.looked(pending.plan.looks)
        if (torn := pending.torn(found)) is not None:
            if not pending.job.moved:
                self._say_past_counts(found, pending.plan.looks.within)
            raise torn

    def sealed(self, pending: Pending) -> None:
        """A slot holds a snapshot now: note what."""
        known = Known(pending.lease.id, pending.outline.frame, pending.plan.marks)
        self.views.content(pending.view).sealed(known)

    def _say_past_counts(self, count: int, within: int) -> None:
        self._say_once("past-counts", PAST_COUNTS, count, within)
