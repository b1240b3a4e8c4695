"""How a snapshot comes into its slot: only what is not there yet; at once what forward may change, the rest after it.

What is copied must not change meanwhile, and what is left out must be as the slot has it. Both are looked at when the
copy is over.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

from lightning_spot.capture.contents import CHECK_EVERY, CopyPlan, SealedContent, SlotViews, Unchanged
from lightning_spot.capture.tensors import Owners
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.image.floats import Floats
from lightning_spot.image.layout import Layout
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.host import Lease
from lightning_spot.say import say
from lightning_spot.staging.batch import SlotView
from lightning_spot.staging.copier import Copier, CopyJob, watch
from lightning_spot.staging.schedule import Schedule


@dataclass(slots=True)
class Pending:
    """A snapshot on its way.

    Attributes:
        manifest: what it will be.
        lease: its slot.
        job: copies that may go on until the next optimizer step.
        done: becomes the manifest when committed, or the error.
        destinations: tiers below, if not the run's.
        outline: of what is written, without the tensors.
        tried: what is tried to be read back, see :class:`~lightning_spot.capture.layouts.Laid`.
        plan: what is copied.
        view: its slot, as the writer sees it.
        floats: where in it numbers lie that may be approximated on their way to a snapshot server.
        followed: whether another one is to follow in a moment, see :meth:`Host.seal`.
    """

    manifest: Manifest
    lease: Lease
    job: CopyJob
    done: Future[Manifest]
    destinations: list[str] | None
    outline: Layout
    tried: Layout | None
    plan: CopyPlan
    view: SlotView
    floats: tuple[Floats, ...] = ()
    followed: bool = False

    def torn(self, found: int) -> SnapshotFailedError | None:
        """Why what was copied is worthless, if it is.

        Args:
            found: how many tensors were left out, and are not as they were thought to be.
        """
        name = self.manifest.snapshot
        if self.job.moved:
            return SnapshotFailedError(
                f"snapshot {name} was dropped: {len(self.job.moved)} tensors changed between two optimizer steps while"
                " they were copied. From now on these are copied before the step goes on",
                reason=FailureReason.TORN,
            )
        if found:
            return SnapshotFailedError(
                f"snapshot {name} was dropped: {found} tensors were not as they were thought to be",
                reason=FailureReason.TORN,
            )
        return None


class Copying:
    """Copies one snapshot after the other.

    Args:
        copier: that does.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.

    Attributes:
        copier: that does.
        views: of the slots.
        unchanged: finds what a slot has already.
    """

    def __init__(self, copier: Copier, schedule: Schedule | None) -> None:
        self.copier = copier
        self.views = SlotViews(copier)
        self.unchanged = Unchanged()
        self._schedule = schedule
        self._unsteady: frozenset[int] = frozenset()

    # -- on the training thread -----------------------------------------------------------------------------------

    def plan(self, layout: Layout, lease: Lease, view: SlotView, owners: Owners, *, trusts: bool) -> CopyPlan:
        """What of a layout is not in the slot yet.

        Args:
            layout: of the snapshot.
            lease: of the slot.
            view: of the slot.
            owners: tensors whose counts of writes tell whether they have changed.
            trusts: whether they are trusted. Those of the last snapshot are not: no later one checks them.
        """
        known = self.views.take(view, lease.held)
        plan = self.unchanged.plan(layout, owners, known if trusts else None, view)
        if plan.past_counts:
            say_past_counts(plan.past_counts)
        return plan

    def start(self, plan: CopyPlan, view: SlotView, owned: Owners) -> CopyJob:
        """Copy now what forward may change, and let the optimizer's own follow until its next step."""
        following = owned.keys() - self._unsteady - plan.at_once
        first = [piece for piece in plan.pieces if piece.storage.data_ptr() not in following]
        later = [piece for piece in plan.pieces if piece.storage.data_ptr() in following]
        watched = dict.fromkeys(piece.storage.data_ptr() for piece in later)  # each once, of however many pieces
        copied = self.copier.start(first, view)
        for offset, data in plan.frame:
            view.map[offset : offset + len(data)] = data
        copied.wait_cpu()
        self.copier.fence()  # before what may take longer: a GPU's training would wait for that too
        watches = watch(chain.from_iterable(map(owned.__getitem__, watched)))
        job = self.copier.start(later, view, watches, self._schedule)
        job.follow(copied)  # there may be nothing more to copy from its GPUs
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
            say_past_counts(1)
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
            SnapshotFailedError: if that is not what the tensors were.
        """
        found = self.unchanged.written_past_counts(pending.plan, pending.view)
        pending.job.wait()
        if (torn := pending.torn(found)) is not None:
            if not pending.job.moved:
                say_past_counts(found)
            raise torn

    def sealed(self, pending: Pending) -> None:
        """A slot holds a snapshot now: note what."""
        known = SealedContent(pending.lease.id, pending.outline.frame, pending.plan.marks)
        self.views.sealed(pending.view, known)


def say_past_counts(count: int) -> None:
    """Log that so many tensors were written to in a way that torch does not count."""
    text = (
        "{count} tensors were written to past torch's count of writes (tensor.data). The last {checked} snapshots may"
        " hold their earlier values. From now on they are copied each time."
    )
    say(logging.WARNING, "writes-uncounted", text, count=count, checked=CHECK_EVERY)
