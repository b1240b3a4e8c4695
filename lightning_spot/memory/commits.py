"""Makes filled slots snapshots: of what ranks of this host have written, of what came over the network."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_spot.errors import CorruptSnapshotError, FailureReason, SettingsError, SnapshotFailedError, SpotError
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import part_ranges
from lightning_spot.image.portion import is_whole
from lightning_spot.image.sealing import Sealing, sealing_threads
from lightning_spot.image.written import Ranges
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.claims import check_fence

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads

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
    """Commits the uploads of a node. All methods may be called from any thread.

    Args:
        uploads: of the node.
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

        Its parts go on to the next node as they are sealed. Where several ranks fill it, all are waited for first.

        Args:
            upload_id: the lease.
            manifest: without checksums.
            destinations: URLs of the directories that a user's file goes to, instead of the run's tiers.
            floats: where in it numbers lie that may be approximated on their way to a node behind.
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
