"""Uploads: slots on their way to become snapshots, filled on this host or received over the network."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator

from lightning_spot.errors import SnapshotNotFound
from lightning_spot.image.coming import Coming
from lightning_spot.memory.abroad import Abroad, Heard
from lightning_spot.memory.begins import Begins
from lightning_spot.memory.bringing import Below
from lightning_spot.memory.joint import is_by_itself
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.shares import SHARES_WAIT_S, Shares
from lightning_spot.memory.slots import Slot
from lightning_spot.memory.upload import Upload
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

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

        What it has filled, and this host's node brings to a durable tier, goes on: there may be nobody else to do it.
        So does what counts already, and is on its way to a further memory node.
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
            SnapshotNotFound: if there is none (given up, or never begun).
        """
        upload = self.known(upload_id)
        if upload is None:
            raise SnapshotNotFound(f"upload {upload_id!r} does not exist (any more)")
        upload.touched_s = time.monotonic()
        return upload

    def arriving(self, upload: Upload, start: int, stop: int, connection: socket.socket | None = None) -> None:
        """Bytes are about to be received into the slot; call :meth:`arrived` or :meth:`lost` afterwards.

        Raises:
            SnapshotNotFound: if nothing more may come.
            CorruptSnapshot: if they overlap others.
        """
        if upload.sealing:
            raise SnapshotNotFound(f"{upload.name} is being sealed: nothing more may come")
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
            SnapshotNotFound: if the upload is gone.
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
