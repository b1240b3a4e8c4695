"""Begins uploads: who may, which slot each takes, and what makes way for it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_spot.config import KEEP
from lightning_spot.errors import NodeUnreachable, SettingsError, ShareMissing, SnapshotNotFound, TierError
from lightning_spot.image.coming import Coming
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.memory.ahead import SlotsAhead
from lightning_spot.memory.bases import Base
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.leasing import lease
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.slots import Making
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.claims import check_fence

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads

logger = logging.getLogger(__name__)

_LEFT_S = 0.25  # less than a killed node's successor takes to begin; more than a sender takes from a part to the next


class Begins:
    """Begins the uploads of a node. All methods may be called from any thread.

    Args:
        uploads: of the node.
        ring: gives the slots.
        registry: tells who may write.
    """

    def __init__(self, uploads: Uploads, ring: Ring, registry: Registry) -> None:
        self._uploads, self._ring, self._registry = uploads, ring, registry
        self._lock = registry.lock
        self._ahead = SlotsAhead(ring)

    def close(self) -> None:
        """Make no more slots ahead."""
        self._ahead.close()

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
        making: Making = Making.NOW,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Upload:
        """Take a slot for a new snapshot; see :func:`leasing.lease` for what else it raises.

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
            making: see :func:`leasing.lease`.
            cancelled: asked while waiting: whether nobody wants the slot any more.

        Raises:
            Fenced: if ``attempt`` no longer holds the run.
            ShareMissing: if several hosts are to bring it, and bring a later one already.
            SnapshotNotFound: if this node does not know the run.
        """

        def gone() -> bool:
            return cancelled() or self._uploads.closing or bool(session and session not in self._registry.sessions)

        key = self._admit(run, attempt)
        if (known := self._uploads.known(upload_id)) is not None:
            return self._same(known, key, attempt, nbytes, name)
        if manifest is not None and (manifest.nbytes, manifest.name, key_of(manifest)) != (nbytes, name, key):
            raise SettingsError(f"{manifest.name} is not what is asked for a slot: {name} of {nbytes} bytes of {key!r}")
        joint = self._uploads.shares.joint(key, shared, layout_id) if shared is not None else None
        if shared is not None and shared.by_hosts:
            self._overtake(key, name)
        if manifest is not None:
            self._give_up_left(key, manifest)
        if manifest is not None or (shared is not None and shared.by_hosts):
            self._ahead.wait(key)
        slot = lease(
            self._ring,
            key,
            nbytes,
            wait_s,
            cancelled=gone,
            reuse=bool(session),
            making=making,
            make_way=self._uploads.abroad.make_way,
        )
        try:
            upload = Upload(upload_id or uuid.uuid4().hex, key, attempt, slot, nbytes, name, session, time.monotonic())
            upload.held, slot.held, slot.checked_s = slot.held, "", float("-inf")
            upload.joint = joint
            if manifest is not None and not manifest.is_file:
                upload.host = manifest.portion.host if manifest.portion is not None else None
                if upload.host is None and not self._ring.find(key, name):
                    upload.coming = Coming(replace(manifest, checksums=()), slot.view(nbytes))
                self._prepare(upload)
            elif upload.is_gathered:
                self._prepare(upload)
        except BaseException:  # nobody knows of the slot yet
            self._ring.abort(slot)
            raise
        begun = self._begin(upload, gone)
        if begun is upload and shared is not None and shared.at:
            try:
                self._uploads.abroad.begin(upload)
            except BaseException:
                self._uploads.abort(upload.id)
                raise
        return begun

    def make_another(self, upload: Upload) -> None:
        """Have a second slot made for the snapshots of a run while the first one is filled."""
        self._ahead.make(upload.run, upload.nbytes, 2)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _admit(self, run: str, attempt: int) -> str:
        """Refuse a writer whose attempt is not the latest, or who comes too late; the key of its run."""
        if self._uploads.closing:
            raise TierError("this node is shutting down and takes no new snapshots")
        known = self._registry.find(run)
        check_fence(known.info.name, attempt, self._registry.highest(known.info.key))
        self._uploads.expire()
        return known.info.key

    def _prepare(self, upload: Upload) -> None:
        """It comes over the network: from what it may be made, and where the next one goes."""
        upload.base = Base.newest(self._ring, upload.run, upload.host)
        info = self._registry.info(upload.run)
        self._ahead.make(upload.run, upload.nbytes, 1 + max(1, info.keep if info is not None else KEEP))

    def _begin(self, upload: Upload, gone: Callable[[], bool]) -> Upload:
        """Note an upload whose slot was leased, unless it is wanted no more.

        Meanwhile, who asked for it may have ended or asked twice, or a later attempt begun, which has given up what was
        noted by then.
        """
        with self._lock:
            known, highest = self._uploads.known(upload.id), self._registry.highest(upload.run)
            if known is None and highest <= upload.attempt and not gone():
                self._uploads.add(upload)
                return upload
        upload.ended = True
        upload.let_go()
        self._ring.abort(upload.slot)
        if known is not None:
            return self._same(known, upload.run, upload.attempt, upload.nbytes, upload.name)
        check_fence(upload.run, upload.attempt, highest)
        if upload.session and upload.session not in self._registry.sessions:
            raise NodeUnreachable("the connection of who asked for this slot has closed: another one is to be made")
        raise SnapshotNotFound("who asked for this slot has ended")

    def _same(self, known: Upload, key: str, attempt: int, nbytes: int, name: str) -> Upload:
        """The upload that was begun under an id before, if the very same is asked for once more."""
        if (known.run, known.attempt, known.nbytes, known.name) != (key, attempt, nbytes, name):
            raise SettingsError(f"upload {known.id} was begun for something else")
        known.touched_s = time.monotonic()
        return known

    def _overtake(self, key: str, name: str) -> None:
        """Hosts bring one snapshot of a run at a time: an older one that was not given up was led by who has gone.

        One that is older than what they bring comes late, such as over a connection that was cut: it is refused.
        """
        order = snapshot_order(name) or ()
        with self._lock:
            open_ones = [each for each in self._uploads.of_run(key) if each.is_gathered and not each.sealing]
            for upload in open_ones:
                if (snapshot_order(upload.name) or ()) > order:
                    raise ShareMissing(f"{name} was overtaken by {upload.name}")
            for upload in open_ones:
                self._uploads.shares.fail(upload, "another one was begun")
                self._uploads.abort(upload.id)

    def _give_up_left(self, key: str, newer: Manifest) -> None:
        """A host sends one snapshot of a run at a time: one that nobody is connected for was left by a killed node.

        The tiers below wait for the rest of it, and would take nothing newer. Of portions, those of one host are meant.
        """
        now, host = time.monotonic(), newer.portion.host if newer.portion is not None else None
        with self._lock:
            for upload in self._uploads.of_run(key):
                is_meant = upload.host == host and (upload.coming is not None or host is not None)
                is_left = is_meant and not upload.in_use and now - upload.touched_s > _LEFT_S
                if upload.joint is None and is_left:
                    logger.info("%s was left by its sender, and is given up for a newer one", upload.name)
                    self._uploads.abort(upload.id)
