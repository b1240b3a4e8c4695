"""What a trainer asks of the ring on its host, and the ring in the trainer's process (``local_server=False``)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_spot.config import SERVER_CALL_TIMEOUT_S
from lightning_spot.server.runs import Figures, Opened, RunInfo, writer_of
from lightning_spot.server.slots import Making
from lightning_spot.server.snapshot_server import IN_PROCESS, SnapshotServer
from lightning_spot.server.tier import Tier, TierHealth
from lightning_spot.snapshot.manifest import Manifest, Order, snapshot_order
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.snapshot.shards import Status, failed


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot to fill.

    Attributes:
        id: of the upload.
        map: the slot's memory, shared with the server; at least ``nbytes`` long.
        nbytes: size of the snapshot, or of the shard of it.
        backing: ``"tmpfs"``, ``"memfd"``, or ``"process"`` for a ring inside the trainer.
        slot: its place in the ring.
    """

    id: str
    map: mmap.mmap
    nbytes: int
    backing: str
    slot: int = 0


class Host(Protocol):
    """A ring on this host, as one rank sees it, over a connection of its own. Methods may be called from any thread.

    Several ranks write a snapshot as shards, each into slots of its own. A shard of a writer is there, or failed, once
    and for all; when all are there, the snapshot counts. Only :meth:`wait_for` waits for other ranks.

    Every call ends: one that is not answered within ``server_call_timeout_s``, beyond what it was told to wait, raises
    :class:`~lightning_spot.errors.ServerUnreachableError`. Only :meth:`seal` may take longer, by the snapshot's size.

    Attributes:
        run: the run, as ``NAME@ID``.
        attempt: the attempt that writes, 0 before :meth:`open_run`.
        server_call_timeout_s: see above, seconds.
        memory_bytes: most bytes that all its slots together may hold.
        released: called with the memory of a slot that is not used any more, before it is unmapped: whoever has made
            views of it lets them go.
    """

    run: str
    attempt: int
    server_call_timeout_s: float
    memory_bytes: int
    released: Callable[[mmap.mmap], None] | None

    def open_run(self, info: RunInfo) -> Opened:
        """Let an attempt write a run here; at a new ring, let it go on.

        Raises:
            RunBusyError: if another live trainer on this host writes the run.
            FencedError: if a later attempt, or another one of that number, is known here.
        """

    def lease(
        self, nbytes: int, wait_s: float, *, limit_s: float | None = None, making: Making = Making.NOW, writer: int = 0
    ) -> Lease:
        """Take a slot, waiting up to ``wait_s`` until one can be had.

        Args:
            nbytes: size of the snapshot, or of the shard.
            wait_s: how long to wait for that.
            limit_s: how long the answer may take beyond that; default ``server_call_timeout_s``.
            making: whether its memory is made for it, see :class:`Making`.
            writer: number of the rank that will fill it: each has as many slots as the ring has for a run.

        Raises:
            SnapshotFailedError: if there is none in time.
        """

    def seal(
        self,
        lease: Lease,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
    ) -> bool:
        """Commit a filled slot in memory; when this returns the snapshot counts, or the shard is there.

        Args:
            lease: of the slot.
            manifest: without checksums.
            destinations: tiers of a user's file, instead of the run's.
            floats: where in it numbers lie that may be approximated on their way to a snapshot server.

        Returns:
            whether the next snapshot would need a slot that is still to be made.

        Raises:
            SnapshotFailedError: if that writer has failed, or written something else, already.
        """

    def fail(self, manifest: Manifest, why: str) -> None:
        """Say that a shard will never be there, so that nobody waits for its snapshot.

        Nothing happens if that writer has said so already, or its shard is there.

        Args:
            manifest: of the shard, as far as it is known; ``manifest.shard`` says whose it is.
            why: for people.
        """

    def wait_for(self, name: str, wait_s: float) -> tuple[Status, str]:
        """Wait until a snapshot counts or never will, as this ring and the tiers below it know.

        Args:
            name: of the snapshot.
            wait_s: how long to wait.

        Returns:
            how it is then, and why it was aborted, for people; else ``""``.
        """

    def abort(self, lease: Lease) -> None:
        """Give a slot back unfilled."""

    def flush(self, wait_s: float) -> list[str]:
        """Bring everything to the tiers below; returns what was not reached in time, one line each."""

    def check(self) -> None:
        """Raise if this very ring is lost, also where another one has come in its place.

        Raises:
            ServerUnreachableError: if it is gone, does not answer, or knows this trainer no more.
        """

    def remove(self, name: str) -> None:
        """Remove a file from memory, and from the run's tiers in the background, whether or not it is in memory."""

    def tiers(self) -> dict[str, TierHealth]:
        """How each tier below is doing, by its URL."""

    def kept_at(self) -> list[str]:
        """URLs of the run at the snapshot servers that its snapshots go to at present; none if they go to storage."""

    def refused(self) -> list[Manifest]:
        """Files of the run that a tier has refused for good, since a newer one is at their place."""

    def safe_step(self) -> int | None:
        """Newest step of this attempt that is safe at a tier below, as far as memory knows."""

    def report(self, figures: Figures) -> None:
        """Say what the trainer has measured."""

    def leave(self, *, complete: bool) -> None:
        """Let the run go; ``complete`` when it has reached its end."""

    def disconnect(self) -> None:
        """Close every connection, so that calls under way fail at once: the ring counts as lost."""


def newest_safe_step(
    found: Iterable[tuple[Manifest, Sequence[str]]], attempt: int, committed: Order | None
) -> int | None:
    """Newest step of which an attempt has a snapshot that is safe; ``None`` if there is none.

    What an earlier attempt left may be of a later step, and is another state; a user's file is no snapshot.

    Args:
        found: what a ring holds, with the tiers at which it is safe.
        attempt: its number.
        committed: the newest snapshot that counts, as far as the ring knows: a shard says nothing of the others.
    """
    steps = [
        manifest.step
        for manifest, safe in found
        if safe and manifest.attempt == attempt and not manifest.is_file
        # A shard counts as soon as its snapshot is known to.
        if manifest.shard is None or (committed is not None and manifest.order <= committed)
    ]
    return max(steps, default=None)


class InProcessHost:
    """A ring and its workers in the trainer's own process: nothing of it outlives a killed trainer.

    Args:
        slots: most slots of each writer of a run.
        memory_bytes: limit of their memory.
        open_store: makes the stores of the tiers below.
    """

    server_call_timeout_s = SERVER_CALL_TIMEOUT_S

    def __init__(self, *, slots: int, memory_bytes: int, open_store: Callable[[str], Tier]) -> None:
        self.run = ""
        self.attempt = 0
        self.memory_bytes = memory_bytes
        self.released: Callable[[mmap.mmap], None] | None = None  # never called: views keep the memory mapped
        self._server = SnapshotServer(slots=slots, memory_bytes=memory_bytes, open_store=open_store, allow=None)
        self._server.registry.begin_session(IN_PROCESS)

    def open_run(self, info: RunInfo) -> Opened:
        """See :meth:`Host.open_run`."""
        # What is in this memory goes with the trainer: the next tier gets what it can.
        pace_s = info.min_upload_interval_s or 0.0
        opened = self._server.open_run(replace(info, session=IN_PROCESS, min_upload_interval_s=pace_s))
        self.run, self.attempt = info.text, opened.attempt
        return opened

    def lease(
        self, nbytes: int, wait_s: float, *, limit_s: float | None = None, making: Making = Making.NOW, writer: int = 0
    ) -> Lease:
        """See :meth:`Host.lease`."""
        upload = self._server.uploads.lease(
            self.run, self.attempt, nbytes, wait_s=wait_s, session=IN_PROCESS, making=making, writer=writer
        )
        memory = upload.slot.memory
        assert memory is not None
        return Lease(upload.id, memory.map, nbytes, "process", upload.slot.index)

    def seal(
        self,
        lease: Lease,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
    ) -> bool:
        """See :meth:`Host.seal`."""
        self._server.uploads.seal(lease.id, manifest, destinations, floats)
        return self._server.ring.is_short(self._server.registry.key(self.run), lease.nbytes, writer_of(manifest))

    def fail(self, manifest: Manifest, why: str) -> None:
        """See :meth:`Host.fail`."""
        self._server.uploads.fail(self.run, self.attempt, failed(manifest, why))

    def wait_for(self, name: str, wait_s: float) -> tuple[Status, str]:
        """See :meth:`Host.wait_for`."""
        return self._server.wait_for(self.run, name, wait_s)

    def abort(self, lease: Lease) -> None:
        """See :meth:`Host.abort`."""
        self._server.uploads.abort(lease.id)

    def flush(self, wait_s: float) -> list[str]:
        """See :meth:`Host.flush`."""
        return self._server.flush(None, wait_s)

    def check(self) -> None:
        """See :meth:`Host.check`; it lives as long as the trainer."""

    def remove(self, name: str) -> None:
        """See :meth:`Host.remove`."""
        self._server.remove(self.run, name, unseen=True)

    def tiers(self) -> dict[str, TierHealth]:
        """See :meth:`Host.tiers`."""
        return self._server.tiers()

    def kept_at(self) -> list[str]:
        """See :meth:`Host.kept_at`."""
        return self._server.kept_at(self._server.registry.key(self.run))

    def refused(self) -> list[Manifest]:
        """See :meth:`Host.refused`."""
        return self._server.reconciler.refused(self._server.registry.key(self.run))

    def safe_step(self) -> int | None:
        """See :meth:`Host.safe_step`."""
        key, ring = self._server.registry.key(self.run), self._server.ring
        found = ((manifest, resident.safe) for resident, manifest in ring.readable(key))
        return newest_safe_step(found, self.attempt, snapshot_order(ring.newest_committed(key)))

    def report(self, figures: Figures) -> None:
        """See :meth:`Host.report`."""
        self._server.report(self.run, figures)

    def leave(self, *, complete: bool) -> None:
        """See :meth:`Host.leave`."""
        self._server.close_run(self.run, IN_PROCESS, complete=complete)
        self._server.close()

    def disconnect(self) -> None:
        """See :meth:`Host.disconnect`; there is no connection."""
