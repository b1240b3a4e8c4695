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
    FailureReason,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    TierError,
)
from lightning_spot.image.coming import Coming
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.memory.abroad import Abroad, Heard
from lightning_spot.memory.ahead import SlotsAhead
from lightning_spot.memory.bases import Base
from lightning_spot.memory.joint import Shared, is_by_itself
from lightning_spot.memory.push import Below
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import key_of
from lightning_spot.memory.shares import SHARES_WAIT_S, Shares
from lightning_spot.memory.slots import Making, Slot
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.claims import check_fence
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # how often who waits looks whether it should go on waiting


def _lease(
    ring: Ring,
    run: str,
    nbytes: int,
    wait_s: float,
    *,
    cancelled: Callable[[], bool],
    reuse: bool,
    making: Making,
    make_way: Callable[[], bool] = lambda: False,
) -> Slot:
    """Take a slot for a snapshot of ``nbytes`` and mark it as being filled.

    Args:
        ring: whose slot.
        run: key of the run.
        nbytes: size of the snapshot.
        wait_s: how long to wait for a slot.
        cancelled: asked while waiting: whether nobody wants the slot any more.
        reuse: see :meth:`Ring.try_lease`.
        making: whether its memory is made, see :class:`Making`.
        make_way: has slots let go that are kept for what may be left undone; whether there were any.

    Raises:
        SnapshotFailedError: if it can never fit, or no slot became available in time.
        TierError: if the host has no memory for it.
    """
    deadline = time.monotonic() + wait_s
    while True:
        seen = ring.changes
        if (slot := ring.try_lease(run, nbytes, reuse=reuse, making=making)) is not None:
            return slot
        if not making.is_ahead and make_way():
            continue
        with ring.changed:
            while seen == ring.changes:
                left = deadline - time.monotonic()
                if left <= 0 or cancelled():
                    raise SnapshotFailedError(ring.why_full(run, nbytes), reason=FailureReason.RING_FULL)
                ring.changed.wait(min(left, _LOOK_S))


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
        """Take a slot for a new snapshot; see :func:`_lease` for what else it raises.

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
            making: see :func:`_lease`.
            cancelled: asked while waiting: whether nobody wants the slot any more.

        Raises:
            FencedError: if ``attempt`` no longer holds the run.
            SnapshotFailedError: if several hosts are to bring it, and bring a later one already.
            SnapshotNotFoundError: if this node does not know the run.
        """

        def gone() -> bool:
            return cancelled() or self._uploads.closing or bool(session and session not in self._registry.sessions)

        key = self._admit(run, attempt)
        if (known := self._uploads.known(upload_id)) is not None:
            return self._same(known, key, attempt, nbytes, name)
        _check_is_meant(manifest, key, name, nbytes)
        joint = self._uploads.shares.joint(key, shared, layout_id) if shared is not None else None
        if shared is not None and shared.by_hosts:
            self._overtake(key, name)
        if manifest is not None:
            self._give_up_left(key, manifest)
        if manifest is not None or (shared is not None and shared.by_hosts):
            self._ahead.wait(key)
        slot = _lease(
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
            raise ServerUnreachableError(
                "the connection of who asked for this slot has closed: another one is to be made"
            )
        raise SnapshotNotFoundError("who asked for this slot has ended")

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
                    raise SnapshotFailedError(
                        f"{name} was overtaken by {upload.name}", reason=FailureReason.SHARE_MISSING
                    )
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


UPLOAD_IDLE_S = 120.0
"""An upload over the network that receives nothing for so long is given up and its slot freed."""
HOSTS_GONE_S = 60.0
"""Likewise what several hosts bring, if none of them sends, nor asks how this node is, which they do every 10 s."""


class Uploads:
    """The uploads of a node. All methods may be called from any thread.

    Args:
        ring: gives the slots.
        registry: tells who may write.
        open_store: makes the stores of places to which several hosts bring a snapshot together.
        heard: see :data:`~lightning_spot.memory.abroad.Heard`.
        below: what the node does at durable tiers to which hosts bring snapshots.

    Attributes:
        closing: whether the node is shutting down, and takes no new snapshots.
        begins: begins them.
        shares: of uploads that several ranks fill.
        abroad: of uploads that several hosts bring to one place.
    """

    def __init__(
        self,
        ring: Ring,
        registry: Registry,
        open_store: Callable[[str], Store],
        heard: Heard,
        below: Below,
    ) -> None:
        self.closing = False
        self._uploads: dict[str, Upload] = {}
        self._ring = ring
        self._registry = registry
        self._lock = registry.lock
        self.begins = Begins(self, ring, registry)
        self.shares = Shares(registry, self._notify, self.free_if_given_up)
        self.abroad = Abroad(self, ring, registry, open_store, heard, below)

    def __len__(self) -> int:
        """Those under way, and snapshots that this host has brought its part of, and that are still to be committed."""
        return len(self._uploads) + self.abroad.visits.finishing

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
        self.begins.close()

    def end_session(self, session: str) -> None:
        """The connection of a trainer has closed: its half-filled slots are freed.

        What it has filled, and the local server brings to a durable tier, goes on: there may be nobody else to do it.
        So does what counts already, and is on its way to a further snapshot server.
        """
        with self._lock:
            for upload in [item for item in self._uploads.values() if item.session == session]:
                at = upload.joint.shared.at if upload.joint is not None else ""
                if not (upload.sealing and (is_by_itself(at) or self.abroad.is_brought(upload))):
                    self.abort(upload.id)
            self.shares.end_session(session)

    def known(self, upload_id: str) -> Upload | None:
        """The upload of that id, if there is one."""
        return self._uploads.get(upload_id)

    def of_run(self, key: str) -> list[Upload]:
        """The uploads of a run."""
        return [upload for upload in list(self._uploads.values()) if upload.run == key]

    def add(self, upload: Upload) -> None:
        """An upload has begun. Call it under the registry's lock."""
        self._uploads[upload.id] = upload
        self.shares.begun(upload)

    def find(self, upload_id: str) -> Upload:
        """The upload of that id, marked as alive.

        Raises:
            SnapshotNotFoundError: if there is none (given up, or never begun).
        """
        upload = self.known(upload_id)
        if upload is None:
            raise SnapshotNotFoundError(f"upload {upload_id!r} does not exist (any more)")
        upload.touched_s = time.monotonic()
        return upload

    def arriving(self, upload: Upload, start: int, stop: int, connection: socket.socket | None = None) -> None:
        """Bytes are about to be received into the slot; call :meth:`arrived` or :meth:`lost` afterwards.

        Raises:
            SnapshotNotFoundError: if nothing more may come.
            CorruptSnapshotError: if they overlap others.
        """
        if upload.sealing:
            raise SnapshotNotFoundError(f"{upload.name} is being sealed: nothing more may come")
        upload.received.begin(start, stop, connection)
        if upload.coming is not None:
            upload.coming.arriving(start, stop)

    def lost(self, upload: Upload, start: int) -> None:
        """Bytes were not received, or are not what was announced: there is nothing at that place now."""
        upload.received.end(start, None)

    def arrived(self, upload: Upload, start: int, digest: str) -> None:
        """Bytes were received; they go on to the tiers below if they are a part of a snapshot."""
        upload.received.end(start, digest)
        if upload.coming is None:
            return
        upload.coming.arrived(start, digest)
        with self._lock:
            if upload.slot.coming is None and self._uploads.get(upload.id) is upload:
                self.offer(upload.slot, upload.coming)

    def fence(self, run: str, attempt: int) -> None:
        """Send nothing on that earlier attempts are still sending: it will not be committed.

        Of what hosts bring together, or portion by portion, the slot is free: who brings it may be gone, and nobody
        else gives it up.
        """
        with self._lock:
            for upload in list(self._uploads.values()):
                if upload.run != run or upload.attempt >= attempt:
                    continue
                if upload.coming is not None:
                    upload.coming.give_up()
                if upload.is_gathered:
                    self.shares.fail(upload, f"attempt {attempt} has begun")
                if (upload.is_gathered and not upload.sealing) or upload.host is not None:
                    self.abort(upload.id)

    def abort(self, upload_id: str, *, untouched: bool = False) -> None:
        """Give an upload up; its slot becomes free. Nothing happens if it is gone.

        Args:
            upload_id: of the upload.
            untouched: whether its trainer has written nothing into the slot, which holds what it held before.
        """
        with self._lock:
            upload = self._uploads.pop(upload_id, None)
            if upload is None:
                return
            upload.ended = upload.given_up = True
            if untouched and not upload.in_use and upload.joint is None:
                upload.slot.held = upload.held
            if upload.coming is not None:
                upload.coming.give_up()
                self.offer(upload.slot, None)
            for connection in upload.streams:
                with contextlib.suppress(OSError):  # it has broken already
                    connection.shutdown(socket.SHUT_RDWR)
            self.shares.ended(upload)
            self.abroad.end(upload)
            self.free_if_given_up(upload)

    def end(self, upload: Upload) -> None:
        """An upload has become a snapshot. Call it under the registry's lock."""
        self._uploads.pop(upload.id, None)
        upload.ended = True
        self.shares.ended(upload)
        self.abroad.end(upload)

    def lease_portion(self, run: str, attempt: int, nbytes: int, wait_s: float, shared: Shared) -> Upload:
        """Take a slot for this host's portion of a snapshot that another one leads; a second one is made meanwhile.

        Args:
            run: the run, as in URLs.
            attempt: who writes.
            nbytes: of the portion.
            wait_s: how long to wait for a slot.
            shared: what is said of the snapshot.
        """
        upload = self.begins.lease(run, attempt, nbytes, name=shared.name, wait_s=wait_s, shared=shared)
        self.begins.make_another(upload)
        return upload

    def bring(self, upload: Upload) -> None:
        """What ranks have put into a slot is about to be sent on: nobody else gets the slot meanwhile."""
        with self._lock:
            self.find(upload.id)
            upload.sealing = True

    def brought(self, upload: Upload, *, whole: bool) -> bool:
        """It was sent on, or (``whole=False``) never will be; whether the slot is still there for it."""
        with self._lock:
            was_sealing, upload.sealing = upload.sealing, False
            if not upload.ended and whole:
                self.end(upload)
                return True
            if not upload.ended:
                self.abort(upload.id)
            elif was_sealing:
                self.free_if_given_up(upload)
            return False

    @contextlib.contextmanager
    def streaming(self, upload: Upload, connection: socket.socket) -> Iterator[None]:
        """Note that a connection receives into the slot of an upload.

        Raises:
            SnapshotNotFoundError: if the upload is gone.
        """
        with self._lock:
            self.find(upload.id)
            upload.streams.add(connection)
        try:
            yield
        finally:
            with self._lock:
                upload.touched_s = time.monotonic()
                upload.streams.discard(connection)
                self.free_if_given_up(upload)

    # -- inside ---------------------------------------------------------------------------------------------------

    def offer(self, slot: Slot, coming: Coming | None) -> None:
        """Let the parts of a snapshot that is coming in go on to the tiers below, or no longer."""
        with self._ring.changed:
            slot.coming = coming
            self._ring.notify()

    def _notify(self) -> None:
        with self._ring.changed:
            self._ring.notify()

    def free_if_given_up(self, upload: Upload) -> None:
        """Free the slot of a given-up upload, but not while late bytes could still reach the next snapshot in it."""
        upload.let_go()
        if upload.given_up and not upload.in_use:
            self._ring.abort(upload.slot)

    def expire(self, unconnected_s: float | None = None) -> None:
        """Free slots of network uploads whose sender fell silent.

        Args:
            unconnected_s: for how long, where nobody is connected to send parts of it: so it is of a sender that has
                been killed; ``None`` for as long as with a connection.
        """
        now_s = time.monotonic()
        for upload in list(self._uploads.values()):
            if not upload.session and self._is_silent(upload, now_s, unconnected_s):
                silent_s = now_s - upload.touched_s
                logger.warning("an upload for run %s received nothing for %.0f s; given up", upload.run, silent_s)
                self.abort(upload.id)

    def _is_silent(self, upload: Upload, now_s: float, unconnected_s: float | None) -> bool:
        silent_s = now_s - upload.touched_s
        most_s = UPLOAD_IDLE_S if upload.joint is None else SHARES_WAIT_S  # ranks take their time to fill it
        if upload.in_use or silent_s > most_s or (upload.joint is not None and not upload.is_gathered):
            return silent_s > most_s
        if upload.is_gathered:  # hosts that live ask how this node is, also before they send anything
            silent_s, most_s = min(silent_s, now_s - self._ring.opened_s.get(upload.run, 0.0)), HOSTS_GONE_S
        return silent_s > (most_s if unconnected_s is None else unconnected_s)


def _check_is_meant(manifest: Manifest | None, key: str, name: str, nbytes: int) -> None:
    if manifest is not None and (manifest.nbytes, manifest.name, key_of(manifest)) != (nbytes, name, key):
        raise SettingsError(f"{manifest.name} is not what is asked for a slot: {name} of {nbytes} bytes of {key!r}")
