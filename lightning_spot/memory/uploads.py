"""Uploads: slots on their way to become snapshots, filled on this host or received over the network."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from lightning_spot.config import KEEP
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
    fault_of,
)
from lightning_spot.image.coming import Coming
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_order
from lightning_spot.image.written import Ranges
from lightning_spot.memory import held_portions
from lightning_spot.memory.joint import Shared, is_by_itself, is_durable, nodes_of, urls_of
from lightning_spot.memory.push import Begun, Below, Bringing, Filled, Lead, Leads, Passed, Visits
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.replication import LeftBehind
from lightning_spot.memory.ring import Base, Ring, SlotsAhead
from lightning_spot.memory.runs import key_of, parse_run
from lightning_spot.memory.shares import SHARES_WAIT_S, Shares
from lightning_spot.memory.slots import Making, Slot
from lightning_spot.memory.tier import Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.retry import retried, within
from lightning_spot.say import say
from lightning_spot.threads import in_background
from lightning_spot.tiers.fences import check_fence
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


_LEFT_S = 0.25  # less than a killed server's successor takes to begin; more than a sender takes from a part to the next


class Begins:
    """Begins the uploads of a server. All methods may be called from any thread.

    Args:
        uploads: of the server.
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
            SnapshotNotFoundError: if this server does not know the run.
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
            raise TierError("this server is shutting down and takes no new snapshots")
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
        """A host sends one snapshot of a run at a time: one that nobody is connected for was left by a killed server.

        The tiers below wait for the rest of it, and would take nothing newer. Of portions, those of one host are meant.
        """
        now, host = time.monotonic(), newer.portion.host if newer.portion is not None else None
        with self._lock:
            for upload in self._uploads.of_run(key):
                is_meant = upload.host == host and (upload.coming is not None or host is not None)
                is_left = is_meant and not upload.in_use and now - upload.touched_s > _LEFT_S
                if upload.joint is None and is_left:
                    text = "{about} was abandoned by its sender. Its slot is free for a newer upload."
                    say(logging.INFO, "upload-superseded", text, about=upload.name)
                    self._uploads.abort(upload.id)


UPLOAD_IDLE_S = 120.0
"""An upload over the network that receives nothing for so long is given up and its slot freed."""
HOSTS_GONE_S = 60.0
"""Likewise what several hosts bring, if none of them sends, nor asks how this server is, which they do every 10 s."""


class Uploads:
    """The uploads of a server. All methods may be called from any thread.

    Args:
        ring: gives the slots.
        registry: tells who may write.
        open_store: makes the stores of places to which several hosts bring a snapshot together.
        heard: see :data:`~lightning_spot.memory.uploads.Heard`.
        below: what the server does at storage to which hosts bring snapshots.

    Attributes:
        closing: whether the server is shutting down, and takes no new snapshots.
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

        What it has filled, and the local server brings to storage, goes on: there may be nobody else to do it.
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
                text = "an upload of run {about} got nothing for {silent_s:.0f} s. It is aborted. Check its sender."
                say(logging.WARNING, "upload-silent", text, about=upload.run, silent_s=silent_s)
                self.abort(upload.id)

    def _is_silent(self, upload: Upload, now_s: float, unconnected_s: float | None) -> bool:
        silent_s = now_s - upload.touched_s
        most_s = UPLOAD_IDLE_S if upload.joint is None else SHARES_WAIT_S  # ranks take their time to fill it
        if upload.in_use or silent_s > most_s or (upload.joint is not None and not upload.is_gathered):
            return silent_s > most_s
        if upload.is_gathered:  # hosts that live ask how this server is, also before they send anything
            silent_s, most_s = min(silent_s, now_s - self._ring.opened_s.get(upload.run, 0.0)), HOSTS_GONE_S
        return silent_s > (most_s if unconnected_s is None else unconnected_s)


def _check_is_meant(manifest: Manifest | None, key: str, name: str, nbytes: int) -> None:
    if manifest is not None and (manifest.nbytes, manifest.name, key_of(manifest)) != (nbytes, name, key):
        raise SettingsError(f"{manifest.name} is not what is asked for a slot: {name} of {nbytes} bytes of {key!r}")


_OPEN_S = 30.0
_TELL_S = 120.0  # so long do the other hosts wait for a snapshot to begin
_AGAIN_S = 1.0

Heard = Callable[[str, Manifest | None, float, Sent | None, Exception | None], None]
"""Told of each snapshot that this host has led: URL, manifest of its portion if it was brought, seconds, what was sent,
the error."""

T = TypeVar("T")


class Abroad:
    """The joint uploads of a host. Methods may be called from any thread.

    Args:
        uploads: of the local server.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of snapshot servers and storage.
        heard: see :data:`Heard`.
        below: what the server does at storage.

    Attributes:
        bringing: sends what lies in the slots of this host.
        visits: the snapshots that other hosts lead.
    """

    def __init__(
        self,
        uploads: Filled,
        ring: Ring,
        registry: Registry,
        open_store: Callable[[str], Store],
        heard: Heard,
        below: Below,
    ) -> None:
        self._uploads, self._ring, self._registry, self._heard = uploads, ring, registry, heard
        self.bringing = Bringing(uploads, ring, registry, open_store, below)
        self.visits = Visits(self.bringing)
        self._leads = Leads()

    def busy(self) -> set[str]:
        """URLs of runs to which a snapshot is on its way."""
        return self._leads.busy()

    def wait_brought(self, run: str | None, wait_s: float) -> list[str]:
        """Wait until nothing is on its way that nobody else has as a whole; what is in the end, one line each.

        That is what goes to storage, and what this host has of snapshots that another one leads.

        Args:
            run: key of the run; ``None`` for any.
            wait_s: how long to wait.
        """
        deadline_s = time.monotonic() + wait_s
        led = self._leads.wait(run, wait_s)
        return [*led, *self.visits.wait(run, max(0.0, deadline_s - time.monotonic()))]

    def begin(self, upload: Upload) -> None:
        """Have an upload begun at its places, in the background: at snapshot servers, the other hosts wait for that.

        At a snapshot server to which an earlier one is on its way, and which does not carry the run on, its turn is
        later.

        Raises:
            SettingsError: if its layout does not say what each host brings.
        """
        lead = Lead.of(upload)
        self._leads.add(lead)
        for url in lead.begun:
            _background(partial(self._begin, lead, url), partial(self._not_begun, lead, url))

    def make_way(self) -> bool:
        """Let slots go from which nothing is sent until further servers have their turn; whether there were any."""
        passing = self._leads.make_way()
        for lead in passing:
            self.bringing.done(lead.upload, lead.ranges)
        return self.visits.make_way() or bool(passing)

    def is_brought(self, upload: Upload) -> bool:
        """Whether a place has committed a snapshot that this host leads, and others are still to have it."""
        lead = self._leads.find(upload)
        return lead is not None and lead.brought is not None

    def seal(self, upload: Upload, manifest: Manifest) -> Manifest:
        """Send what this host brings, and have the snapshot committed once the others have brought theirs.

        Returns:
            the sealed manifest, as soon as the snapshot server that carries the run on has committed it, or, if that
            fails, another one.

        Raises:
            SnapshotFailedError: if none does in the end; the slot is freed, here and there.
            FencedError: if a later attempt holds the run, as one of them says.
        """
        lead = self._leads.find(upload)
        if lead is None:
            raise SnapshotNotFoundError(f"upload {upload.id!r} does not exist (any more)")
        self._uploads.bring(upload)
        sending = {
            _background(partial(self._send, lead, url, manifest), partial(self._not_sent, lead, url)): url
            for url in lead.begun
        }
        first = next(iter(sending))
        waiting = set(sending)
        while waiting:
            _, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            ended = [each for each in sending if each.done()]
            for each in ended:
                if isinstance(each.exception(), FencedError):
                    each.result()
            done = [each for each in ended if each.exception() is None]
            if done and first in done:
                return first.result()
            if done and first in ended:
                why = f"it has not got {manifest.name}, which another server has: {first.exception()}"
                self._heard(sending[first], None, 0.0, None, LeftBehind(why, tier=sending[first]))
                return done[0].result()
        for each, url in sending.items():
            error = each.exception()
            if isinstance(error, SpotError | TimeoutError):
                why = str(error) or "it did not begin there in time"
                raise SnapshotFailedError(
                    f"{manifest.name} did not come together at {url}: {why}",
                    reason=FailureReason.SHARE_MISSING,
                    fault=fault_of(error),
                ) from error
            each.result()
        raise SnapshotFailedError(
            f"{manifest.name} was to be brought to no snapshot server", reason=FailureReason.SHARE_MISSING
        )

    def end(self, upload: Upload) -> None:
        """An upload is over. If it was given up, so it is there. Nothing happens if this host does not lead it."""
        lead = self._leads.end(upload)
        if lead is not None and upload.given_up:
            for begun in lead.begun.values():
                _background(partial(_give_up, begun))

    def decline(self, run: str, at: str, name: str, attempt: int, why: str, host: int = 0) -> None:
        """Tell the other hosts, in the background, that there will be no snapshot of a name.

        A place is told at once, and again while it does not answer: ranks may wait for that snapshot.

        Args:
            run: as in URLs.
            at: see :class:`~lightning_spot.memory.joint.Shared`.
            name: of the snapshot.
            attempt: that would have written it.
            why: for people.
            host: see :meth:`~lightning_spot.memory.host.Host.decline`.
        """
        key = self._registry.key(run)

        def tell(url: str) -> None:
            try:
                retried(
                    lambda: self.bringing.tier(url, key).decline(name, attempt=attempt, why=why, host=host),
                    within(_TELL_S, (_AGAIN_S,)),
                    lambda error: isinstance(error, ServerUnreachableError) and not self._uploads.closing,
                )
            except SpotError as error:  # they wait in vain for a while
                logger.debug("%s could not be told: %s", url, error)

        for url in urls_of(at):
            _background(partial(tell, url))

    # -- at each place --------------------------------------------------------------------------------------------

    def _begin(self, lead: Lead, url: str) -> None:
        upload, shared, begun = lead.upload, lead.shared, lead.begun[url]
        try:
            self._leads.wait_turn(lead, url, lambda: self.bringing.check(upload))
            tier = self.bringing.tier(url, upload.run)
            begun.set_result((tier, tier.begin(shared, lead.nbytes, attempt=upload.attempt, hosts=lead.hosts)))
        except Exception as error:
            self._not_begun(lead, url, error)

    def _not_begun(self, lead: Lead, url: str, error: Exception) -> None:
        upload, begun = lead.upload, lead.begun[url]
        if not isinstance(error, Passed):
            self._heard(url, None, 0.0, None, error)  # before anybody asks where the next one goes
        begun.set_exception(error)
        if all(each.done() and each.exception() is not None for each in lead.begun.values()):
            self._uploads.shares.fail(upload, f"{url}: {error}")
        self.decline(upload.run, url, lead.shared.name, upload.attempt, str(error))

    def _send(self, lead: Lead, url: str, manifest: Manifest) -> Manifest:
        """Bring the portion to one place, and have the snapshot committed there."""
        upload, begun = lead.upload, lead.begun[url]
        self._leads.await_turn(lead, url)
        began_s = time.monotonic()
        try:
            if manifest.nbytes != lead.nbytes:
                raise SettingsError(f"{manifest.name} has {manifest.nbytes} bytes, and was begun for {lead.nbytes}")
            tier, gathering = begun.result(_OPEN_S)
            gathering = replace(gathering, files=_within(manifest.files, lead.ranges), manifest=manifest)
            sent = self.bringing.bring(tier, gathering, upload, lead.ranges, lead.portion, lead.image)
            sealed = tier.seal(gathering, _named(manifest, url), lambda: self.bringing.check(upload))
        except Exception as error:
            self._ended(lead, url, None)
            _background(partial(_give_up, begun))
            if not (begun.done() and begun.exception() is error):
                self._heard(url, None, 0.0, None, error)
            raise
        sealed = replace(sealed, run=manifest.run)
        self._ended(lead, url, sealed)
        own = replace(manifest, nbytes=sum(nbytes for _, nbytes in lead.ranges))
        # Of servers over which it is spread, the first one stands for all: they are brought theirs at the same time.
        at, took_s = (nodes_of(url) or [url])[0], time.monotonic() - began_s
        self._heard(at, own, took_s, None if is_durable(url) else sent, None)
        return sealed

    def _not_sent(self, lead: Lead, url: str, _: Exception) -> None:
        begun = lead.begun[url]
        self._ended(lead, url, None)
        if begun.done():
            _background(partial(_give_up, begun))

    def _ended(self, lead: Lead, url: str, sealed: Manifest | None) -> None:
        """It is over at a place, as ``sealed`` if it was committed there. After the last one, the slot is free."""
        ended = self._leads.ended(lead, url, sealed)
        if ended.brought is not None and ended.counts:
            held_portions.surpass(self._ring, lead.upload.run, ended.brought)
        if ended.is_last and ended.brought is not None:
            self.bringing.done(lead.upload, lead.ranges)
        elif ended.is_last:
            self._uploads.brought(lead.upload, whole=False)


def _background(work: Callable[[], T], failed: Callable[[SpotError], object] | None = None) -> Future[T]:
    """Do something beside; where no more threads can be had, it has failed, and that is called with why."""
    try:
        return in_background(work, "spot-joint")
    except RuntimeError as error:
        problem = SnapshotFailedError(f"it needs a thread of its own: {error}", reason=FailureReason.UNEXPECTED)
        text = "a snapshot of several hosts failed: {error}. Raise the limit of processes (ulimit -u)."
        say(logging.WARNING, "no-threads", text, about="several hosts", error=problem)
        if failed is not None:
            failed(problem)
        none: Future[T] = Future()
        none.set_exception(problem)
        return none


def _give_up(begun: Future[Begun]) -> None:
    """Give up what was begun at a place, once it is known whether it was."""
    if begun.exception() is not None:
        return
    tier, gathering = begun.result()
    try:
        tier.give_up(gathering)
    except SpotError as error:  # then the other hosts wait in vain for a while
        logger.debug("%s could not be given up: %s", gathering.shared.name, error)


def _within(files: Sequence[FileSpan], ranges: Ranges) -> tuple[FileSpan, ...]:
    """The files that lie in ranges of an image."""
    return tuple(file for file in files if any(0 <= file.offset - start < nbytes for start, nbytes in ranges))


def _named(manifest: Manifest, at: str) -> Manifest:
    """The manifest without checksums, as the place knows its run: a snapshot server may have another name for it."""
    if is_by_itself(at):
        return replace(manifest, checksums=())
    name, identity = parse_run(at.rpartition("/")[2])
    return replace(manifest, run=name, run_id=identity or manifest.run_id, checksums=())
