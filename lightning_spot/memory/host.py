"""What a trainer asks of the ring on its host, and the ring in the trainer's process (``local_server=False``)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_spot.config import SERVER_CALL_TIMEOUT_S
from lightning_spot.errors import FailureReason, SettingsError, ShareFault, SnapshotFailedError
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.written import Ranges
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.node import IN_PROCESS, Node
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.slots import Making
from lightning_spot.memory.tier import TierHealth
from lightning_spot.tiers.store import Store


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot to fill.

    Attributes:
        id: of the upload.
        map: the slot's memory, shared with the server; at least ``nbytes`` long.
        nbytes: size of the snapshot.
        backing: ``"tmpfs"``, ``"memfd"``, or ``"process"`` for a ring inside the trainer.
        slot: its place in the ring.
        held: id of the upload as which the slot was filled before, if nothing else was written into it since; else
            ``""``.
        share: which of several ranks' shares this is, 0 for the rank that leased the slot.
        shared: what that one said of the snapshot, if several ranks fill it.
        is_said: whether the ring knows of that: a slot may be leased before it is known for which snapshot.
    """

    id: str
    map: mmap.mmap
    nbytes: int
    backing: str
    slot: int = 0
    held: str = ""
    share: int = 0
    shared: Shared | None = None
    is_said: bool = True


class Host(Protocol):
    """A ring on this host, as its trainer sees it. Methods may be called from any thread.

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
        self,
        nbytes: int,
        wait_s: float,
        *,
        limit_s: float | None = None,
        shared: Shared | None = None,
        making: Making = Making.NOW,
    ) -> Lease:
        """Take a slot, waiting up to ``wait_s`` for a clean one.

        Args:
            nbytes: size of the snapshot.
            wait_s: how long to wait for a slot to become clean.
            limit_s: how long the answer may take beyond that; default ``server_call_timeout_s``.
            shared: if other ranks of this host, each with a connection of its own, will fill it too.
            making: whether its memory is made for it, see :class:`Making`.

        Raises:
            SnapshotFailedError: if there is none in time.
        """

    def say(self, lease: Lease) -> None:
        """Say for which snapshot a slot was leased, and have the other ranks of this host join it.

        To say it again does nothing. Who leased the slot with ``shared`` has said it.
        """

    def join(
        self, name: str, *, share: int, digest: str = "", wait_s: float, at: str = "", host: int = 0, told: str = ""
    ) -> Lease:
        """Take a share of a snapshot whose slot another rank leases; it may be asked for before.

        Args:
            name: of the snapshot.
            share: from 1; 0 is the rank's that leases the slot.
            digest: must be the one that rank has given; ``""`` if the caller compares it.
            wait_s: how long to wait until the slot is leased.
            at: if another host leads it: URL of the run at the snapshot server, or storage, to which the hosts
                bring it. The slot then holds the portion of this host.
            host: number of this host among these, from 1.
            told: at storage: the layout, which says what this host brings; all its ranks say the same.

        Raises:
            SnapshotFailedError: if there will be no such snapshot: given up, declined, overtaken by a later one, begun
                with another digest, or not in time.
        """

    def placed(self, lease: Lease, torn: str = "", fault: ShareFault | None = None) -> None:
        """Say that the bytes of a share are in place, or, with ``torn``, why they never will be.

        It must be said of every lease that :meth:`join` gave: until then the slot is not used for anything else.
        Nothing may be written into it any more.

        Args:
            lease: of the share.
            torn: why, for people.
            fault: what rank 0 has to know of that.
        """

    def decline(self, name: str, why: str, at: str = "", host: int = 0, share: int = 1) -> None:
        """Say that there will be no snapshot of that name, so that no rank waits for its share.

        Args:
            name: of the snapshot.
            why: for people.
            at: URL of the run where other hosts would have brought their portions.
            host: number of this one, if the ring was lost that was to bring its portion.
            share: in that portion, of the rank that says so: nothing comes of it if that share is in this ring, or the
                portion is there.
        """

    def seal(
        self,
        lease: Lease,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
        written: Ranges | None = None,
        *,
        followed: bool = False,
    ) -> bool:
        """Commit a filled slot in memory; when this returns the snapshot counts.

        Args:
            lease: of the slot.
            manifest: without checksums.
            destinations: tiers of a user's file, instead of the run's.
            floats: where in it numbers lie that may be approximated on their way to a snapshot server.
            written: what was written since the slot was filled as ``lease.held``, ``None`` for all.
            followed: whether another snapshot is to follow within :data:`~lightning_spot.memory.work.FOLLOWED_S`: the
                storage leaves most of these out.

        Returns:
            whether the next snapshot would need a slot that is still to be made.

        Raises:
            SnapshotFailedError: if other ranks fill it too, and the bytes of one of them will not come.
        """

    def abort(self, lease: Lease, *, untouched: bool = False) -> None:
        """Give a slot back unfilled; ``untouched`` if nothing was written into it, so that it holds what it held."""

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

    def carrier(self, spread: int = 0) -> str:
        """Where several hosts may bring the next snapshot: URLs of the run at snapshot servers, separated by spaces.

        The first is that of the one that carries the run on to its storage. Its other replicas follow; the ring
        goes past those to which an earlier snapshot is still on its way when that one begins. ``""`` while none carries
        it on.

        Args:
            spread: if snapshots are spread over all snapshot servers: at how many of them each portion is to be kept;
                the answer is a :class:`~lightning_spot.memory.joint.SpreadPlace`.
        """

    def refused(self) -> list[Manifest]:
        """Files of the run that a tier has refused for good, since a newer one is at their place."""

    def safe_step(self) -> int | None:
        """Newest step of this attempt that is safe at a tier below, as far as memory knows."""

    def leave(self, *, complete: bool) -> None:
        """Let the run go; ``complete`` when it has reached its end."""

    def disconnect(self) -> None:
        """Close every connection, so that calls under way fail at once: the ring counts as lost."""


def newest_safe_step(held: Iterable[tuple[Manifest, Sequence[str]]], attempt: int) -> int | None:
    """Newest step of which an attempt has a snapshot that is safe; ``None`` if there is none.

    What an earlier attempt left may be of a later step, and is another state; a user's file is no snapshot.

    Args:
        held: what a ring holds, with the tiers at which it is safe.
        attempt: its number.
    """
    own = (manifest for manifest, safe in held if safe and manifest.attempt == attempt and not manifest.is_file)
    return max((manifest.step for manifest in own), default=None)


class InProcessHost:
    """A ring and flusher in the trainer's own process: nothing of it outlives a killed trainer.

    Args:
        slots: slots of the ring.
        memory_bytes: limit of their memory.
        open_store: makes the stores of the tiers below.
    """

    server_call_timeout_s = SERVER_CALL_TIMEOUT_S

    def __init__(self, *, slots: int, memory_bytes: int, open_store: Callable[[str], Store]) -> None:
        self.run = ""
        self.attempt = 0
        self.memory_bytes = memory_bytes
        self.released: Callable[[mmap.mmap], None] | None = None  # never called: views keep the memory mapped
        self._node = Node(slots=slots, memory_bytes=memory_bytes, open_store=open_store, allow=None)
        self._node.begin_session(IN_PROCESS)

    def open_run(self, info: RunInfo) -> Opened:
        """See :meth:`Host.open_run`."""
        pace_s = (
            info.min_upload_interval_s or 0.0
        )  # what is in this memory goes with the trainer: the next tier gets what it can
        opened = self._node.open_run(replace(info, session=IN_PROCESS, min_upload_interval_s=pace_s))
        self.run, self.attempt = info.text, opened.attempt
        return opened

    def lease(
        self,
        nbytes: int,
        wait_s: float,
        *,
        limit_s: float | None = None,
        shared: Shared | None = None,
        making: Making = Making.NOW,
    ) -> Lease:
        """See :meth:`Host.lease`. No other process gets at this ring."""
        if shared is not None and (shared.shares > 1 or shared.at):
            raise SettingsError("a ring inside the trainer (local_server=False) cannot be filled by several ranks")
        upload = self._node.lease(self.run, self.attempt, nbytes, wait_s=wait_s, session=IN_PROCESS, making=making)
        memory = upload.slot.memory
        assert memory is not None
        return Lease(upload.id, memory.map, nbytes, "process", upload.slot.index, upload.held, 0, shared)

    def say(self, lease: Lease) -> None:
        """See :meth:`Host.say`."""
        raise SettingsError("a ring inside the trainer (local_server=False) cannot be filled by several ranks")

    def join(
        self, name: str, *, share: int, digest: str = "", wait_s: float, at: str = "", host: int = 0, told: str = ""
    ) -> Lease:
        """See :meth:`Host.join`."""
        raise SnapshotFailedError(
            f"there is no share of {name} to write: its slot is in another process' memory",
            reason=FailureReason.SHARE_MISSING,
        )

    def placed(self, lease: Lease, torn: str = "", fault: ShareFault | None = None) -> None:
        """See :meth:`Host.placed`."""
        raise SnapshotFailedError(
            "a ring inside the trainer (local_server=False) has no shares", reason=FailureReason.SHARE_MISSING
        )

    def decline(self, name: str, why: str, at: str = "", host: int = 0, share: int = 1) -> None:
        """See :meth:`Host.decline`; nobody waits."""

    def carrier(self, spread: int = 0) -> str:
        """See :meth:`Host.carrier`; it is not asked for, since other ranks cannot fill this ring."""
        return ""

    def seal(
        self,
        lease: Lease,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
        written: Ranges | None = None,
        *,
        followed: bool = False,
    ) -> bool:
        """See :meth:`Host.seal`."""
        self._node.seal(lease.id, manifest, destinations, floats, written, followed=followed)
        return self._node.ring.is_short(self._node.registry.key(self.run), lease.nbytes)

    def abort(self, lease: Lease, *, untouched: bool = False) -> None:
        """See :meth:`Host.abort`."""
        self._node.abort(lease.id, untouched=untouched)

    def flush(self, wait_s: float) -> list[str]:
        """See :meth:`Host.flush`."""
        return self._node.flush(None, wait_s)

    def check(self) -> None:
        """See :meth:`Host.check`; it lives as long as the trainer."""

    def remove(self, name: str) -> None:
        """See :meth:`Host.remove`."""
        self._node.remove(self.run, name, unseen=True)

    def tiers(self) -> dict[str, TierHealth]:
        """See :meth:`Host.tiers`."""
        return self._node.tiers()

    def refused(self) -> list[Manifest]:
        """See :meth:`Host.refused`."""
        return self._node.flusher.refused(self._node.registry.key(self.run))

    def safe_step(self) -> int | None:
        """See :meth:`Host.safe_step`."""
        committed = self._node.committed(self.run)
        return newest_safe_step(((slot.manifest, slot.safe) for slot in committed if slot.manifest), self.attempt)

    def leave(self, *, complete: bool) -> None:
        """See :meth:`Host.leave`."""
        self._node.close_run(self.run, IN_PROCESS, complete=complete)
        self._node.close()

    def disconnect(self) -> None:
        """See :meth:`Host.disconnect`; there is no connection."""
