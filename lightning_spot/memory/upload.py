"""One upload: a slot on its way to become a snapshot, and its commit."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import part_ranges
from lightning_spot.image.portion import is_whole
from lightning_spot.image.sealing import Sealing, sealing_threads
from lightning_spot.image.written import Before, Ranges
from lightning_spot.memory.joint import Joint
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Base, Ring
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.slots import Slot
from lightning_spot.tiers.fences import check_fence

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads

_OTHER_ENDS_S = 10.0


class Received:
    """Which ranges of an upload came over the network: a range is checked once its last write is, and not before.

    Ranges never overlap: what was checked is written again as a whole, or not at all. Any thread may call it.

    Attributes:
        checked: ``offset -> (nbytes, xxh3-128)`` of those that are here.
    """

    def __init__(self) -> None:
        self.checked: dict[int, tuple[int, str]] = {}
        self._stops: dict[int, int] = {}  # of all ranges that were ever begun
        self._starts: list[int] = []  # of these, in order
        self._writers: dict[int, socket.socket | None] = {}
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._starts)

    def begin(self, start: int, stop: int, connection: socket.socket | None = None) -> None:
        """A range is about to be written: it is not checked any more. A connection that still writes it is closed.

        Raises:
            CorruptSnapshotError: if it overlaps another range.
            SnapshotNotFoundError: if nothing more may come.
        """
        with self._changed:
            self._admit(start, stop)
            while start in self._writers:  # its sender has lost that connection, and we have not heard of it yet
                other = self._writers[start]
                with contextlib.suppress(OSError):
                    if other is not None:
                        other.shutdown(socket.SHUT_RDWR)
                if not self._changed.wait(_OTHER_ENDS_S):
                    raise CorruptSnapshotError(f"bytes {start}–{stop} still come over another connection")
            if self._closed:
                raise SnapshotNotFoundError("this upload is being committed: nothing more may come")
            self.checked.pop(start, None)
            self._writers[start] = connection

    def end(self, start: int, digest: str | None) -> None:
        """A range is written no more; with its checksum, if that is what was announced."""
        with self._changed:
            self._writers.pop(start, None)
            if digest is not None:
                self.checked[start] = (self._stops[start] - start, digest)
            self._changed.notify_all()

    def close(self) -> dict[int, tuple[int, str]]:
        """Let nothing more come; what is here and checked."""
        with self._changed:
            self._closed = True
            return dict(self.checked)

    def _admit(self, start: int, stop: int) -> None:
        if self._stops.get(start) == stop:
            return
        at = bisect_left(self._starts, start)
        before = self._stops[self._starts[at - 1]] if at else 0
        after = self._starts[at] if at < len(self._starts) else stop
        if before > start or after < stop or after == start:
            raise CorruptSnapshotError(f"bytes {start}–{stop} overlap another part of this upload, which came before")
        insort(self._starts, start)
        self._stops[start] = stop


@dataclass(slots=True)
class Upload:
    """A slot on its way to become a snapshot.

    Attributes:
        id: names it in requests.
        run: key of its run.
        attempt: its writer.
        name: of the snapshot it was opened for, ``""`` if that was not said.
        slot: being filled.
        nbytes: size announced.
        session: the trainer's connection, if it is on this host.
        touched_s: when something was heard of it last (monotonic).
        received: what came over the network.
        held: the upload as which the slot was filled before, if nothing else was written into it since; else ``""``.
        base: from which parts may be made, if it comes over the network and an earlier snapshot is here.
        coming: hands these parts to whoever sends them on, if it was said what they are of.
        host: whose portion of a snapshot it is, if it is that of one of several hosts.
        joint: who fills it, if several ranks do.
        streams: connections that receive into the slot at the moment.
        sealing: whether it is being checksummed.
        ended: whether it was committed or given up.
        given_up: whether its slot is to be freed once nothing writes into it any more.
    """

    id: str
    run: str
    attempt: int
    slot: Slot
    nbytes: int
    name: str
    session: str
    touched_s: float
    received: Received = field(default_factory=Received)
    held: str = ""
    base: Base | None = None
    streams: set[socket.socket] = field(default_factory=set)
    coming: Coming | None = None
    host: int | None = None
    joint: Joint | None = None
    sealing: bool = False
    ended: bool = False
    given_up: bool = False

    @property
    def is_gathered(self) -> bool:
        """Whether several hosts send it."""
        return self.joint is not None and self.joint.shared.by_hosts

    @property
    def in_use(self) -> bool:
        """Whether something still writes into the slot; other hosts do so by streams only."""
        writing = self.joint is not None and bool(self.joint.writing) and not self.is_gathered
        return self.sealing or bool(self.streams) or writing

    def before(self, manifest: Manifest, written: Ranges | None) -> Before | None:
        """What is known of the slot, which is about to be sealed; ``None`` if nothing is.

        Args:
            manifest: as which it will be.
            written: what was written since it was filled as :attr:`held`, ``None`` for all.
        """
        was = self.slot.held_as
        self.slot.seals += 1
        if written is None or not self.held or was is None or self.joint is not None:
            return None
        if was.part_bytes != manifest.part_bytes:
            return None
        whole = min(was.nbytes, manifest.nbytes) // manifest.part_bytes
        return Before(written, was.checksums[:whole], self.slot.seals)

    def let_go(self) -> None:
        """Let the base go, if nothing reads it any more and nothing will."""
        if self.base is not None and self.ended and not self.in_use:
            self.base.let_go()
            self.base = None


_CLOSE_S = 10.0
_LOOK_S = 0.01


def gather(upload: Upload, manifest: Manifest) -> None:
    """Check that every byte has come once, and that nothing more can come.

    Args:
        upload: being sealed, so that no further frame is begun.
        manifest: of the snapshot.

    Raises:
        CorruptSnapshotError: otherwise.
    """
    _end_streams(upload)
    if manifest.nbytes != upload.nbytes:
        raise CorruptSnapshotError(f"{manifest.name} has {manifest.nbytes} bytes, this upload was for {upload.nbytes}")
    if not is_whole(upload.received.close(), upload.nbytes):
        raise CorruptSnapshotError(f"what the hosts have sent of {manifest.name} is not every byte of it once")


def _end_streams(upload: Upload) -> None:
    """All hosts have said that they are done: what still comes is a mistake, and must not come in unseen."""
    deadline_s = time.monotonic() + _CLOSE_S
    while streams := list(upload.streams):
        for connection in streams:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        if time.monotonic() > deadline_s:
            raise CorruptSnapshotError(f"hosts are still sending {upload.name}, and have said that they are done")
        time.sleep(_LOOK_S)


class Commits:
    """Commits the uploads of a server. All methods may be called from any thread.

    Args:
        uploads: of the server.
        ring: holds what is committed.
        registry: tells who may write.
        committed: called with each snapshot that was committed.
    """

    def __init__(
        self,
        uploads: Uploads,
        ring: Ring,
        registry: Registry,
        committed: Callable[[str, Manifest], None],
    ) -> None:
        self._uploads, self._ring, self._registry = uploads, ring, registry
        self._committed = committed
        self._lock = registry.lock

    def seal(
        self,
        upload_id: str,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
        written: Ranges | None = None,
        *,
        followed: bool = False,
    ) -> Manifest:
        """Commit a slot that was filled on this host: checksum every part, commit.

        Its parts go on to the next server as they are sealed. Where several ranks fill it, all are waited for first.

        Args:
            upload_id: the lease.
            manifest: without checksums.
            destinations: URLs of the directories that a user's file goes to, instead of the run's tiers.
            floats: where in it numbers lie that may be approximated on their way to a server behind.
            written: what was written since the slot was filled as :attr:`Upload.held`, ``None`` for all.
            followed: whether another snapshot is to follow within :data:`~lightning_spot.memory.work.FOLLOWED_S`.

        Returns:
            the sealed manifest.

        Raises:
            SnapshotFailedError: if a rank's bytes are not there in the end; the slot is freed.
        """
        upload = self._uploads.find(upload_id)
        try:
            self._uploads.shares.wait(upload)
        except SnapshotFailedError as error:
            if error.reason is FailureReason.SHARE_MISSING:
                self._uploads.abort(upload_id)
            raise
        if upload.joint is not None and upload.joint.shared.at:
            return self._uploads.abroad.seal(upload, manifest)
        with self._lock:
            upload = self._uploads.find(upload_id)
            self._check(upload, manifest)
            if manifest.nbytes > upload.slot.capacity:
                raise CorruptSnapshotError(
                    f"{manifest.name} has {manifest.nbytes} bytes, its slot {upload.slot.capacity}"
                )
            upload.sealing, upload.slot.floats = True, floats
        # The view lives as long as the sealing: who sends its parts on may be at it when this call is done.
        before = upload.before(manifest, written)
        sealing = Sealing(replace(manifest, checksums=()), upload.slot.view(manifest.nbytes), before)
        try:
            if upload.is_gathered:
                gather(upload, manifest)
            if not manifest.is_file:
                self._uploads.offer(upload.slot, sealing)
            began_s = time.monotonic()
            sealed = sealing.run(sealing_threads())
            upload.slot.checked_s = began_s if before is None else float("-inf")
            places = tuple(destinations) if destinations is not None else None
            committed = self._commit(upload, sealed, places, followed=followed)
            sealing.commit(committed)
        except BaseException:
            if upload.is_gathered:  # nobody can mend it
                self._uploads.abort(upload.id)
            raise
        finally:
            sealing.give_up()
            with self._lock:
                self._uploads.offer(upload.slot, None)
                upload.sealing = False
                self._uploads.free_if_given_up(upload)
        return committed

    def commit(self, upload_id: str, manifest: Manifest) -> Manifest:
        """Commit a slot that was received in parts: every part must be there with the checksum of the manifest.

        Nothing more may come from here on: what was checked stays what it is.

        Raises:
            CorruptSnapshotError: if a part is missing or differs; the slot is freed.
        """
        upload = self._uploads.find(upload_id)
        if manifest.nbytes != upload.nbytes:
            self._uploads.abort(upload_id)
            raise SettingsError(
                f"{manifest.name} has {manifest.nbytes} bytes, this upload was opened for {upload.nbytes}"
            )
        received = upload.received.close()
        ranges = list(part_ranges(manifest.nbytes, manifest.part_bytes))
        if not manifest.checksums:
            checksums = tuple(received.get(start, (0, ""))[1] for start, _ in ranges)
            manifest = replace(manifest, checksums=checksums)
        for index, ((start, stop), noted) in enumerate(zip(ranges, manifest.checksums, strict=True)):
            if received.get(start) != (stop - start, noted):
                self._uploads.abort(upload_id)
                raise CorruptSnapshotError(
                    f"part {index} of {manifest.name} was lost or damaged on its way; it is sent again", part=index
                )
        committed = self._commit(upload, manifest, None)
        if upload.coming is not None:
            upload.coming.commit(committed)
            self._uploads.offer(upload.slot, None)
        return committed

    # -- inside ---------------------------------------------------------------------------------------------------

    def _commit(
        self,
        upload: Upload,
        manifest: Manifest,
        places: tuple[str, ...] | None,
        *,
        followed: bool = False,
    ) -> Manifest:
        with self._lock:
            self._uploads.find(upload.id)  # its trainer may have been killed meanwhile
            self._check(upload, manifest)
            try:
                with self._ring.changed:  # who leases the slot next learns what is in it, and nothing of before
                    upload.slot.followed = followed
                    self._ring.commit(upload.slot, manifest, places)
                    upload.slot.held, upload.slot.held_as = upload.id, manifest
            except BaseException:
                self._uploads.abort(upload.id)
                raise
            self._uploads.end(upload)
            upload.let_go()
        self._committed(upload.run, manifest)
        return manifest

    def _check(self, upload: Upload, manifest: Manifest) -> None:
        """Refuse what the upload was not opened for, and a writer that is no longer the latest; its slot is freed."""
        try:
            check_fence(manifest.run, upload.attempt, self._registry.highest(upload.run))
            if (
                key_of(manifest) != upload.run
                or manifest.attempt > upload.attempt
                or upload.name not in ("", manifest.name)
                or upload.host != (manifest.portion.host if manifest.portion is not None else None)
                or (upload.coming is not None and replace(manifest, checksums=()) != upload.coming.manifest)
            ):
                raise SettingsError(
                    f"{manifest.name} of attempt {manifest.attempt} of run {manifest.run!r} is not what this upload was"
                    f" opened for: {upload.name or 'a snapshot'} of attempt {upload.attempt} of {upload.run!r}"
                )
        except SpotError:
            self._uploads.abort(upload.id)
            raise
