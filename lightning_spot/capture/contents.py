"""How a snapshot comes into its slot, all of it: at once what forward may change, the rest before the optimizer steps.

What is copied must not change meanwhile. Torch counts the writes to a tensor, and the counts are compared when the copy
is over; a write that goes past them (``tensor.data``, some kernels) goes unnoticed.
"""

from __future__ import annotations

import functools
import itertools
import mmap
from concurrent.futures import Future
from dataclasses import dataclass

from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier, CopyJob
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.tensors import Owners, Watches
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.server.host import Host, Lease
from lightning_spot.snapshot.layout import Layout
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.ranges import Floats


class SlotViews:
    """Views of slots, by ring and place in it. One slot is used by one thread at a time, which leased it.

    Args:
        copier: pins slots, and unpins them before they are unmapped.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._views: dict[Host, dict[int, SlotView]] = {}

    def of(self, host: Host, lease: Lease) -> SlotView:
        """The view of a leased slot; made again if the slot has other memory than last time."""
        if host not in self._views:
            self._views[host] = {}
            host.released = functools.partial(self._release, host)
        views = self._views[host]
        view = views.get(lease.slot)
        if view is None or view.map is not lease.map:
            if view is not None:
                self._copier.unpin(view)
            view = views[lease.slot] = SlotView(lease.map)
        return view

    def others(self, host: Host | None) -> list[Host]:
        """Rings beside ``host`` of which there are views: they were lost."""
        return [other for other in list(self._views) if other is not host]

    def drop(self, host: Host) -> None:
        """Let the slots of a ring go; nothing may be copied into them any more."""
        host.released = None
        for view in self._views.pop(host, {}).values():
            self._copier.unpin(view)

    def _release(self, host: Host, shared: mmap.mmap) -> None:
        """The ring has replaced a slot: let its memory go before it is unmapped."""
        views = self._views.get(host, {})
        for slot in [slot for slot, view in list(views.items()) if view.map is shared]:  # another thread may add one
            self._copier.unpin(views.pop(slot))


@dataclass(slots=True)
class Pending:
    """A snapshot on its way.

    Attributes:
        manifest: what it will be.
        lease: its slot.
        first: copies that were ordered before it was begun. They are waited for as well: a GPU may still be reading,
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
    floats: tuple[Floats, ...] = ()


class Copying:
    """Copies one snapshot after the other.

    Args:
        copier: that does.
        schedule: when what only the optimizer changes is copied; ``None`` for at once.

    Attributes:
        copier: that does.
        views: of the slots.
    """

    def __init__(self, copier: Copier, schedule: Schedule | None) -> None:
        self.copier = copier
        self.views = SlotViews(copier)
        self._schedule = schedule
        self._unsteady: frozenset[int] = frozenset()

    # -- on the training thread -----------------------------------------------------------------------------------

    def start(self, layout: Layout, view: SlotView, owned: Owners) -> tuple[CopyJob, CopyJob]:
        """Copy now what forward may change, and let the optimizer's own follow until its next step; both copies."""
        following = owned.keys() - self._unsteady
        first = [piece for piece in layout.pieces if piece.storage.data_ptr() not in following]
        later = [piece for piece in layout.pieces if piece.storage.data_ptr() in following]
        watched = dict.fromkeys(piece.storage.data_ptr() for piece in later)  # each once, of however many pieces
        copied = self.copier.start(first, view)
        for offset, data in layout.frame:
            view.map[offset : offset + len(data)] = data
        copied.wait_cpu()
        self.copier.fence()  # before what may take longer: a GPU's training would wait for that too
        watches = Watches(itertools.chain.from_iterable(map(owned.__getitem__, watched)))
        return copied, self.copier.start(later, view, watches, self._schedule)

    def copied(self, pending: Pending) -> None:
        """Return when the tensors of a snapshot may change."""
        pending.job.wait_cpu()
        self.copier.fence()
        pending.job.settle()
        self._unsteady |= pending.job.moved

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
