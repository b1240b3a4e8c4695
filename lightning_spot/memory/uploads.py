"""Uploads: slots on their way to become snapshots, filled on this host or received over the network."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_spot.config import KEEP
from lightning_spot.errors import (
    CorruptSnapshot,
    SettingsError,
    ShareMissing,
    SnapshotNotFound,
    SpotError,
    TierError,
)
from lightning_spot.image.coming import Coming
from lightning_spot.image.floats import Floats
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.sealing import Sealing, sealing_threads
from lightning_spot.image.written import Ranges
from lightning_spot.memory.ahead import SlotsAhead
from lightning_spot.memory.bases import Base
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.shares import Shares
from lightning_spot.memory.slots import Slot
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.store import check_fence

logger = logging.getLogger(__name__)

UPLOAD_IDLE_S = 120.0
"""An upload over the network that receives nothing for so long is given up and its slot freed."""


class Uploads:
    """The uploads of a node. All methods may be called from any thread.

    Args:
        ring: gives the slots.
        registry: tells who may write.
        committed: called with each snapshot that was committed.

    Attributes:
        closing: whether the node is shutting down, and takes no new snapshots.
        shares: of uploads that several ranks fill.
    """

    def __init__(self, ring: Ring, registry: Registry, committed: Callable[[str, Manifest], None]) -> None:
        self.closing = False
        self._uploads: dict[str, Upload] = {}
        self._ring = ring
        self._registry = registry
        self._committed = committed
        self._lock = registry.lock
        self._ahead = SlotsAhead(ring)
        self.shares = Shares(registry, self._notify, self._free_if_given_up)

    def __len__(self) -> int:
        return len(self._uploads)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._uploads))

    def close(self) -> None:
        """Take no new snapshots, and send on nothing that is not here yet."""
        self.closing = True
        with self._lock:
            for upload in self._uploads.values():
                if upload.coming is not None:
                    upload.coming.give_up()
            self.shares.close()
        self._ahead.close()

    def end_session(self, session: str) -> None:
        """The connection of a trainer has closed: its half-filled slots are freed."""
        with self._lock:
            for upload in [item for item in self._uploads.values() if item.session == session]:
                self.abort(upload.id)
            self.shares.end_session(session)

    def lease(
        self,
        run: str,
        attempt: int,
        nbytes: int,
        *,
        name: str = "",
        manifest: Manifest | None = None,
        wait_s: float = 0.0,
        session: str = "",
        upload_id: str = "",
        shared: Shared | None = None,
        layout_id: str = "",
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Upload:
        """Take a slot for a new snapshot; see :meth:`Ring.lease` for what else it raises.

        Args:
            run: the run, as in URLs.
            attempt: who writes.
            nbytes: size of the snapshot.
            name: of the snapshot; if given, nothing else can be committed in the slot.
            manifest: of the snapshot, without checksums, if it will come over the network: its parts go on to the
                tiers below as they arrive, and nothing else can be committed in the slot.
            wait_s: how long to wait for a slot.
            session: live connection of the trainer, if it is on this host. When it closes the slot is freed.
            upload_id: 32 hexadecimal digits chosen by who asks, so that it can ask once more, or give the upload up,
                when the answer was lost; ``""`` has one made.
            shared: if several ranks of this host will fill it, see :meth:`Shares.joint`.
            layout_id: of the layout that is meant, likewise.
            cancelled: asked while waiting: whether nobody wants the slot any more.

        Raises:
            Fenced: if ``attempt`` no longer holds the run.
            SnapshotNotFound: if this node does not know the run.
        """

        def gone() -> bool:
            return cancelled() or self.closing or bool(session and session not in self._registry.sessions)

        key = self._admit(run, attempt)
        if (known := self._uploads.get(upload_id)) is not None:
            return self._same(known, key, attempt, nbytes, name)
        if manifest is not None and (manifest.nbytes, manifest.name, key_of(manifest)) != (nbytes, name, key):
            raise SettingsError(f"{manifest.name} is not what is asked for a slot: {name} of {nbytes} bytes of {key!r}")
        joint = self.shares.joint(key, shared, layout_id) if shared is not None else None
        if manifest is not None:
            self._ahead.wait(key)
        slot = self._ring.lease(key, nbytes, wait_s, cancelled=gone)
        upload = Upload(upload_id or uuid.uuid4().hex, key, attempt, slot, nbytes, name, session, time.monotonic())
        upload.held, slot.held, slot.checked_s = slot.held, "", float("-inf")
        upload.joint = joint
        if manifest is not None and not manifest.is_file:
            if not self._ring.find(key, name):
                upload.coming = Coming(replace(manifest, checksums=()), slot.view(nbytes))
            upload.base = Base.newest(self._ring, key)
            info = self._registry.info(key)
            self._ahead.make(key, nbytes, 1 + max(1, info.keep if info is not None else KEEP))
        return self._begin(upload, gone)

    def find(self, upload_id: str) -> Upload:
        """The upload of that id, marked as alive.

        Raises:
            SnapshotNotFound: if there is none (given up, or never begun).
        """
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise SnapshotNotFound(f"upload {upload_id!r} does not exist (any more)")
        upload.touched_s = time.monotonic()
        return upload

    def arriving(self, upload: Upload, start: int, stop: int) -> None:
        """Bytes are about to be received into the slot."""
        if upload.coming is not None:
            upload.coming.arriving(start, stop)

    def arrived(self, upload: Upload, start: int, stop: int, digest: str) -> None:
        """Bytes were received; they go on to the tiers below if they are a part of a snapshot."""
        upload.received[start] = (stop - start, digest)
        if upload.coming is None:
            return
        upload.coming.arrived(start, digest)
        with self._lock:
            if upload.slot.coming is None and self._uploads.get(upload.id) is upload:
                self._offer(upload.slot, upload.coming)

    def seal(
        self,
        upload_id: str,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
        written: Ranges | None = None,
    ) -> Manifest:
        """Commit a slot that was filled on this host: write the zip's CRCs, checksum every part, commit.

        Its parts go on to the next node as they are sealed. Where several ranks fill it, all are waited for first.

        Args:
            upload_id: the lease.
            manifest: without checksums.
            destinations: URLs of the directories that a user's file goes to, instead of the run's tiers.
            floats: where in it numbers lie that may be approximated on their way to a node behind.
            written: what was written since the slot was filled as :attr:`Upload.held`, ``None`` for all.

        Returns:
            the sealed manifest.

        Raises:
            ShareMissing: if a rank's bytes are not there in the end; the slot is freed.
        """
        try:
            self.shares.wait(self.find(upload_id))
        except ShareMissing:
            self.abort(upload_id)
            raise
        with self._lock:
            upload = self.find(upload_id)
            self._check(upload, manifest)
            if manifest.nbytes > upload.slot.capacity:
                raise CorruptSnapshot(f"{manifest.name} has {manifest.nbytes} bytes, its slot {upload.slot.capacity}")
            upload.sealing, upload.slot.floats = True, floats
        # The view lives as long as the sealing: who sends its parts on may be at it when this call is done.
        before = upload.before(manifest, written)
        sealing = Sealing(replace(manifest, checksums=()), upload.slot.view(manifest.nbytes), before)
        try:
            if not manifest.is_file:
                self._offer(upload.slot, sealing)
            began_s = time.monotonic()
            sealed = sealing.run(sealing_threads())
            upload.slot.checked_s = began_s if before is None else float("-inf")
            committed = self._commit(upload, sealed, tuple(destinations) if destinations is not None else None)
            sealing.commit(committed)
        finally:
            sealing.give_up()
            with self._lock:
                self._offer(upload.slot, None)
                upload.sealing = False
                self._free_if_given_up(upload)
        return committed

    def commit(self, upload_id: str, manifest: Manifest) -> Manifest:
        """Commit a slot that was received in parts: every part must be there with the checksum of the manifest.

        Raises:
            CorruptSnapshot: if a part is missing or differs; the slot is freed.
        """
        upload = self.find(upload_id)
        if manifest.nbytes != upload.nbytes:
            self.abort(upload_id)
            raise SettingsError(
                f"{manifest.name} has {manifest.nbytes} bytes, this upload was opened for {upload.nbytes}"
            )
        if not manifest.checksums and manifest.nbytes:
            manifest = replace(
                manifest, checksums=tuple(upload.received[start][1] for start in sorted(upload.received))
            )
        for index, start in enumerate(range(0, manifest.nbytes, manifest.part_bytes)):
            nbytes = min(manifest.part_bytes, manifest.nbytes - start)
            if upload.received.get(start) != (nbytes, manifest.checksums[index]):
                self.abort(upload_id)
                raise CorruptSnapshot(
                    f"part {index} of {manifest.name} was lost or damaged on its way; it is sent again", part=index
                )
        committed = self._commit(upload, manifest, None)
        if upload.coming is not None:
            upload.coming.commit(committed)
            self._offer(upload.slot, None)
        return committed

    def fence(self, run: str, attempt: int) -> None:
        """Send nothing on that earlier attempts are still sending: it will not be committed."""
        with self._lock:
            for upload in self._uploads.values():
                if upload.run == run and upload.attempt < attempt and upload.coming is not None:
                    upload.coming.give_up()

    def abort(self, upload_id: str) -> None:
        """Give an upload up; its slot becomes free. Nothing happens if it is gone."""
        with self._lock:
            upload = self._uploads.pop(upload_id, None)
            if upload is None:
                return
            upload.ended = upload.given_up = True
            if upload.coming is not None:
                upload.coming.give_up()
                self._offer(upload.slot, None)
            for connection in upload.streams:
                with contextlib.suppress(OSError):  # it has broken already
                    connection.shutdown(socket.SHUT_RDWR)
            self.shares.ended(upload)
            self._free_if_given_up(upload)

    @contextlib.contextmanager
    def streaming(self, upload: Upload, connection: socket.socket) -> Iterator[None]:
        """Note that a connection receives into the slot of an upload.

        Raises:
            SnapshotNotFound: if the upload is gone.
        """
        with self._lock:
            self.find(upload.id)
            upload.streams.add(connection)
        try:
            yield
        finally:
            with self._lock:
                upload.streams.discard(connection)
                self._free_if_given_up(upload)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _admit(self, run: str, attempt: int) -> str:
        """Refuse a writer whose attempt is not the latest, or who comes too late; the key of its run."""
        if self.closing:
            raise TierError("this node is shutting down and takes no new snapshots")
        known = self._registry.find(run)
        check_fence(known.info.name, attempt, self._registry.highest(known.info.key))
        self._expire()
        return known.info.key

    def _begin(self, upload: Upload, gone: Callable[[], bool]) -> Upload:
        """Note an upload whose slot was leased, unless who asked for it has ended, or has asked twice, meanwhile."""
        with self._lock:
            known = self._uploads.get(upload.id)
            if known is None and not gone():
                self._uploads[upload.id] = upload
                self.shares.begun(upload)
                return upload
        upload.ended = True
        upload.let_go()
        self._ring.abort(upload.slot)
        if known is not None:
            return self._same(known, upload.run, upload.attempt, upload.nbytes, upload.name)
        raise SnapshotNotFound("who asked for this slot has ended")

    def _same(self, known: Upload, key: str, attempt: int, nbytes: int, name: str) -> Upload:
        """The upload that was begun under an id before, if the very same is asked for once more."""
        if (known.run, known.attempt, known.nbytes, known.name) != (key, attempt, nbytes, name):
            raise SettingsError(f"upload {known.id} was begun for something else")
        return known

    def _offer(self, slot: Slot, coming: Coming | None) -> None:
        """Let the parts of a snapshot that is coming in go on to the tiers below, or no longer."""
        with self._ring.changed:
            slot.coming = coming
            self._ring.notify()

    def _notify(self) -> None:
        with self._ring.changed:
            self._ring.notify()

    def _commit(self, upload: Upload, manifest: Manifest, places: tuple[str, ...] | None) -> Manifest:
        with self._lock:
            self.find(upload.id)  # its trainer may have been killed meanwhile
            self._check(upload, manifest)
            try:
                with self._ring.changed:  # who leases the slot next learns what is in it, and nothing of before
                    self._ring.commit(upload.slot, manifest, places)
                    upload.slot.held, upload.slot.held_as = upload.id, manifest
            except BaseException:
                self.abort(upload.id)
                raise
            self._uploads.pop(upload.id, None)
            upload.ended = True
            self.shares.ended(upload)
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
                or (upload.coming is not None and replace(manifest, checksums=()) != upload.coming.manifest)
            ):
                raise SettingsError(
                    f"{manifest.name} of attempt {manifest.attempt} of run {manifest.run!r} is not what this upload was"
                    f" opened for: {upload.name or 'a snapshot'} of attempt {upload.attempt} of {upload.run!r}"
                )
        except SpotError:
            self.abort(upload.id)
            raise

    def _free_if_given_up(self, upload: Upload) -> None:
        """Free the slot of a given-up upload, but not while late bytes could still reach the next snapshot in it."""
        upload.let_go()
        if upload.given_up and not upload.in_use:
            self._ring.abort(upload.slot)

    def _expire(self) -> None:
        """Free slots of network uploads whose sender fell silent."""
        now = time.monotonic()
        for upload in list(self._uploads.values()):
            if not upload.session and now - upload.touched_s > UPLOAD_IDLE_S:
                logger.warning("an upload for run %s received nothing for %.0f s; given up", upload.run, UPLOAD_IDLE_S)
                self.abort(upload.id)
