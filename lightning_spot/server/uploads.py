"""Uploads: slots on their way to become snapshots, filled on this host or received over the network.

Each has one writer. Of a snapshot that several ranks write, each puts its shard, or why it will have none: a register
that is written once.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    TierError,
)
from lightning_spot.say import say
from lightning_spot.server.registry import Registry
from lightning_spot.server.ring import Ring
from lightning_spot.server.runs import is_own_folder, key_of, writer_of
from lightning_spot.server.slots import Making, Resident, Slot
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.ranges import Floats
from lightning_spot.store.fences import check_fence

_OTHER_ENDS_S = 10.0
UPLOAD_IDLE_S = 120.0
"""An upload over the network that receives nothing for so long is given up and its slot freed."""


class Received:
    """The parts of an upload that came over the network. Any thread may call it.

    Attributes:
        checked: xxh3-128 of each part that is here, by its first byte. A part that is being written is not among them.
    """

    def __init__(self) -> None:
        self.checked: dict[int, str] = {}
        self._writers: dict[int, socket.socket | None] = {}
        self._closed = False
        self._changed = threading.Condition()

    def begin(self, start: int, connection: socket.socket | None = None) -> None:
        """A part is about to be written: it is not checked any more. A connection that still writes it is closed.

        Raises:
            CorruptSnapshotError: if that goes on.
            SnapshotNotFoundError: if nothing more may come.
        """
        with self._changed:
            while start in self._writers:  # its sender has lost that connection, and we have not heard of it yet
                other = self._writers[start]
                with contextlib.suppress(OSError):
                    if other is not None:
                        other.shutdown(socket.SHUT_RDWR)
                if not self._changed.wait(_OTHER_ENDS_S):
                    raise CorruptSnapshotError(f"the part at {start} still comes over another connection")
            if self._closed:
                raise SnapshotNotFoundError("this upload is being committed: nothing more may come")
            self.checked.pop(start, None)
            self._writers[start] = connection

    def end(self, start: int, digest: str | None) -> None:
        """A part is written no more; with its checksum, if that is what was announced."""
        with self._changed:
            self._writers.pop(start, None)
            if digest is not None:
                self.checked[start] = digest
            self._changed.notify_all()

    def close(self) -> dict[int, str]:
        """Let nothing more come; what is here and checked."""
        with self._changed:
            self._closed = True
            return dict(self.checked)


class UploadState(enum.Enum):
    """What has become of an upload."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    """Its slot is freed once nothing writes into it any more: late bytes must not reach the next snapshot there."""


@dataclass(slots=True)
class Upload:
    """A slot on its way to become a snapshot, a shard of one, or a user's file.

    Attributes:
        id: names it in requests.
        run: key of its run.
        attempt: its writer.
        slot: being filled.
        nbytes: size announced.
        session: the trainer's connection, if it is on this host.
        touched_s: when something was heard of it last (monotonic).
        writer: number of the rank that writes it; 0 where one writes all.
        announced: manifest without checksums, if it comes over the network: nothing else can be committed then.
        received: what came over the network.
        base: from which parts may be made, if it comes over the network and an earlier snapshot is here. It is let go
            with the last stream.
        state: what has become of it.
        streams: connections that receive into the slot at the moment.
        sealing: whether it is being checksummed.
    """

    id: str
    run: str
    attempt: int
    slot: Slot
    nbytes: int
    session: str
    touched_s: float
    writer: int = 0
    announced: Manifest | None = None
    received: Received = field(default_factory=Received)
    base: Resident | None = None
    state: UploadState = UploadState.OPEN
    streams: set[socket.socket] = field(default_factory=set)
    sealing: bool = False

    @property
    def name(self) -> str:
        """What it was announced as, for people."""
        return self.announced.name if self.announced is not None else self.id

    @property
    def part_bytes(self) -> int:
        """Size of the parts that come over the network."""
        return self.announced.part_bytes if self.announced is not None else PART_BYTES

    def end_of(self, start: int) -> int:
        """Where the part ends that begins at a place; the place itself if none does."""
        return start if start % self.part_bytes else min(start + self.part_bytes, self.nbytes)

    @property
    def in_use(self) -> bool:
        """Whether something still writes into the slot."""
        return self.sealing or bool(self.streams)


class Uploads:
    """The uploads of a server. All methods may be called from any thread.

    Args:
        ring: gives the slots, and holds what is committed.
        registry: tells who may write.
        committed: called with each snapshot, shard or file that was committed, and the key of its run.

    Attributes:
        closing: whether the server is shutting down, and takes no new snapshots.
    """

    def __init__(self, ring: Ring, registry: Registry, committed: Callable[[str, Manifest], None]) -> None:
        self.closing = False
        self._uploads: dict[str, Upload] = {}
        self._writers: dict[str, set[tuple[str, int, int]]] = {}  # run, attempt and rank, by the session
        self._ring, self._registry, self._committed = ring, registry, committed
        self._lock = registry.lock

    def __len__(self) -> int:
        return len(self._uploads)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._uploads))

    def status(self) -> list[dict[str, Any]]:
        """What comes over the network now, as JSON-ready values."""
        with self._lock:
            return [
                {
                    "run": of.run,
                    "name": of.name,
                    "nbytes": each.nbytes,
                    "received_bytes": sum(each.end_of(start) - start for start in list(each.received.checked)),
                }
                for each in self._uploads.values()
                if (of := each.announced) is not None
            ]

    def close(self) -> None:
        """Take no new snapshots."""
        self.closing = True

    # -- they begin -----------------------------------------------------------------------------------------------

    def lease(
        self,
        run: str,
        attempt: int,
        nbytes: int,
        *,
        manifest: Manifest | None = None,
        wait_s: float = 0.0,
        session: str = "",
        upload_id: str = "",
        making: Making = Making.NOW,
        writer: int = 0,
        committed: str = "",
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Upload:
        """Take a slot for a new snapshot, shard or file.

        Args:
            run: the run, as in URLs.
            attempt: who writes.
            nbytes: size of it.
            manifest: without checksums, if it will come over the network: nothing else can be committed in the slot.
            wait_s: how long to wait for a slot.
            session: live connection of the trainer, if it is on this host. When it closes the slot is freed.
            upload_id: 32 hexadecimal digits chosen by who asks, so that it can ask once more, or give the upload up,
                when the answer was lost; ``""`` has one made.
            making: whether its memory is made, see :class:`Making`.
            writer: number of the rank on this host that will fill it.
            committed: name of the newest snapshot of the run that counts, as who asks knows; ``""`` for none.
            cancelled: asked while waiting: whether nobody wants the slot any more.

        Raises:
            FencedError: if ``attempt`` no longer writes the run.
            SnapshotFailedError: if it can never fit, or no slot became available in time.
            SnapshotNotFoundError: if this server does not know the run.
            TierError: if the host has no memory for it.
        """

        def gone() -> bool:
            return cancelled() or self.closing or bool(session and session not in self._registry.sessions)

        key = self._admit(run, attempt)
        self._ring.raise_watermark(key, committed)
        upload_id, announced = upload_id or uuid.uuid4().hex, _unsealed(manifest)
        if (known := self._uploads.get(upload_id)) is not None:
            return _same(known, (key, attempt, nbytes, announced))
        if announced is not None:
            if (announced.nbytes, key_of(announced)) != (nbytes, key):
                raise SettingsError(f"{announced.name} is not what is asked for a slot: {nbytes} bytes of {key!r}")
            writer = writer_of(announced)
        # On the trainer's own host, superseded snapshots go first: to make memory would take processors from training.
        ask = functools.partial(self._ring.try_lease, key, nbytes, reuse=bool(session), making=making, writer=writer)
        slot = self._slot(ask, key, writer, wait_s, gone)
        try:
            upload = Upload(upload_id, key, attempt, slot, nbytes, session, time.monotonic(), writer, announced)
        except BaseException:  # nobody knows of the slot yet
            self._ring.abort(slot)
            raise
        return self._begin(upload, gone)

    def _admit(self, run: str, attempt: int) -> str:
        """Refuse a writer whose attempt is not the latest, or who comes too late; the key of its run."""
        if self.closing:
            raise TierError("this server is shutting down and takes no new snapshots")
        known = self._registry.find(run)
        check_fence(known.info.name, attempt, self._registry.highest(known.info.key))
        self.expire()
        return known.info.key

    def _slot(
        self, ask: Callable[[], Slot | None], key: str, writer: int, wait_s: float, gone: Callable[[], bool]
    ) -> Slot:
        """Take the slot that the ring is asked for, waiting until it has one; see :meth:`lease`."""
        ring, deadline_s = self._ring, time.monotonic() + wait_s
        while True:
            seen = ring.changes
            if (slot := ask()) is not None:
                return slot
            if ring.is_jammed(key, writer):
                raise SnapshotFailedError(
                    "the memory for slots holds the shards of some ranks of a snapshot, and has no room for the others;"
                    " raise memory_limit=",
                    reason=FailureReason.TOO_LARGE,
                )
            with ring.changed:
                while seen == ring.changes:
                    if not ring.wait(deadline_s, gone):
                        raise SnapshotFailedError(ring.why_full(key), reason=FailureReason.RING_FULL)

    def _begin(self, upload: Upload, gone: Callable[[], bool]) -> Upload:
        """Note an upload whose slot was leased, unless it is wanted no more.

        Meanwhile, who asked for it may have ended or asked twice, or a later attempt begun, which has given up what was
        noted by then.
        """
        with self._lock:
            known, highest = self._uploads.get(upload.id), self._registry.highest(upload.run)
            if known is None and highest <= upload.attempt and not gone():
                self._uploads[upload.id], announced = upload, upload.announced
                if upload.session:  # it may end before it asks for the next slot
                    writer = (upload.run, upload.attempt, upload.writer)
                    self._writers.setdefault(upload.session, set()).add(writer)
                if announced is not None and not announced.is_file:
                    upload.base = self._ring.pin_base(
                        upload.run, upload.writer if announced.shard is not None else None
                    )
                return upload
        upload.state = UploadState.ABORTED
        self._let_go(upload)
        if known is not None:
            return _same(known, (upload.run, upload.attempt, upload.nbytes, upload.announced))
        check_fence(upload.run, upload.attempt, highest)
        if upload.session and upload.session not in self._registry.sessions:
            raise ServerUnreachableError(
                "the connection of who asked for this slot has closed: another one is to be made"
            )
        raise SnapshotNotFoundError("who asked for this slot has ended")

    # -- they are filled ------------------------------------------------------------------------------------------

    def find(self, upload_id: str) -> Upload:
        """The upload of that id, marked as alive.

        Raises:
            SnapshotNotFoundError: if there is none (given up, or never begun).
        """
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise SnapshotNotFoundError(f"upload {upload_id!r} does not exist (any more)")
        upload.touched_s = time.monotonic()
        return upload

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
                self._let_go(upload)

    # -- they become snapshots ------------------------------------------------------------------------------------

    def seal(
        self,
        upload_id: str,
        manifest: Manifest,
        destinations: list[str] | None = None,
        floats: tuple[Floats, ...] = (),
    ) -> Manifest:
        """Commit a slot that was filled on this host: checksum every part, commit.

        Args:
            upload_id: the lease.
            manifest: without checksums.
            destinations: URLs of the directories that a user's file goes to, instead of the run's tiers.
            floats: where in it numbers lie that may be approximated on their way to a server behind.

        Returns:
            the sealed manifest.
        """
        with self._or_abort(upload_id) as upload:
            with self._lock:
                self._check(upload, manifest)
                if manifest.nbytes > upload.slot.capacity:
                    raise CorruptSnapshotError(
                        f"{manifest.name} has {manifest.nbytes} bytes, its slot {upload.slot.capacity}"
                    )
                upload.sealing, upload.slot.commit.floats = True, floats
            try:
                began_s = time.monotonic()
                sealed = manifest.sealed(upload.slot.view(manifest.nbytes))
                upload.slot.commit.checked_s = began_s
                self._commit(upload, sealed, tuple(destinations) if destinations is not None else None)
            finally:
                with self._lock:
                    upload.sealing = False
                    self._let_go(upload)
        return sealed

    def commit(self, upload_id: str, manifest: Manifest) -> Manifest:
        """Commit a slot that was received in parts: every part must be there with the checksum of the manifest.

        Nothing more may come from here on: what was checked stays what it is.

        Raises:
            CorruptSnapshotError: if a part is missing or differs. The slot is freed, as with the errors below.
            SettingsError: if it is not what the upload was opened for.
            SnapshotFailedError: if it is a shard that has failed, or is there as another one.
        """
        with self._or_abort(upload_id) as upload:
            if (manifest.nbytes, manifest.part_bytes) != (upload.nbytes, upload.part_bytes):
                raise SettingsError(
                    f"{manifest.name} has {manifest.nbytes} bytes in parts of {manifest.part_bytes}, this upload was"
                    f" opened for {upload.nbytes} in parts of {upload.part_bytes}"
                )
            received = upload.received.close()
            starts = range(0, manifest.nbytes, manifest.part_bytes)
            if not manifest.checksums:
                manifest = replace(manifest, checksums=tuple(received.get(start, "") for start in starts))
            for index, (start, noted) in enumerate(zip(starts, manifest.checksums, strict=True)):
                if received.get(start) != noted:
                    raise CorruptSnapshotError(
                        f"part {index} of {manifest.name} was lost or damaged on its way; it is sent again", part=index
                    )
            self._commit(upload, manifest, None)
        return manifest

    def fail(self, run: str, attempt: int, manifest: Manifest) -> None:
        """Put the register of a writer that will never have its shard; what it has put before stands.

        Args:
            run: the run, as in URLs.
            attempt: who writes.
            manifest: of the shard; its ``shard.failed`` says why.

        Raises:
            FencedError: if ``attempt`` no longer writes the run.
            SettingsError: if it is no such manifest, or of another run or attempt.
            SnapshotNotFoundError: if this server does not know the run.
        """
        key = self._admit(run, attempt)
        if not manifest.why_failed or key_of(manifest) != key or manifest.attempt > attempt:
            raise SettingsError(f"{manifest.name} is no shard of attempt {attempt} of {run!r} that failed")
        with self._lock:
            check_fence(run, attempt, self._registry.highest(key))
            self._ring.fail(key, manifest)
        self._committed(key, manifest)

    @contextlib.contextmanager
    def _or_abort(self, upload_id: str) -> Iterator[Upload]:
        """Whatever fails of a commit, the slot is freed."""
        try:
            yield self.find(upload_id)
        except BaseException:
            self.abort(upload_id)
            raise

    def _commit(self, upload: Upload, manifest: Manifest, destinations: tuple[str, ...] | None) -> None:
        with self._lock:
            self.find(upload.id)  # its trainer may have been killed meanwhile
            self._check(upload, manifest)
            with self._ring.changed:
                self._ring.check_fits(upload.run, manifest)
                self._ring.commit(upload.slot, manifest, destinations)
            del self._uploads[upload.id]
            upload.state = UploadState.COMMITTED
            self._let_go(upload)
        self._committed(upload.run, manifest)

    def _check(self, upload: Upload, manifest: Manifest) -> None:
        """Refuse what the upload was not opened for, and a writer that is no longer the latest."""
        check_fence(manifest.run, upload.attempt, self._registry.highest(upload.run))
        if (
            key_of(manifest) != upload.run
            or manifest.attempt > upload.attempt
            or writer_of(manifest) != upload.writer
            or upload.announced not in (None, _unsealed(manifest))
            or manifest.why_failed  # no bytes say so, see :meth:`fail`
        ):
            raise SettingsError(
                f"{manifest.name} of attempt {manifest.attempt} of run {manifest.run!r} is not what this upload was"
                f" opened for: {upload.name} of attempt {upload.attempt} of {upload.run!r}"
            )
        if manifest.is_file and is_own_folder(manifest.name):
            raise SettingsError(
                f"{manifest.name!r} cannot name a file: a run has a directory of that name. Save it under another"
            )

    # -- they end -------------------------------------------------------------------------------------------------

    def abort(self, upload_id: str) -> None:
        """Give an upload up; its slot becomes free. Nothing happens if it is gone."""
        with self._lock:
            upload = self._uploads.pop(upload_id, None)
            if upload is None:
                return
            upload.state = UploadState.ABORTED
            for connection in upload.streams:
                with contextlib.suppress(OSError):  # it has broken already
                    connection.shutdown(socket.SHUT_RDWR)
            self._let_go(upload)

    def end_session(self, session: str) -> None:
        """The connection of a rank has closed: its half-filled slots are freed, and the others need not wait for it."""
        with self._lock:
            gone = [item for item in self._uploads.values() if item.session == session]
            for upload in gone:
                self.abort(upload.id)
            for run, attempt, writer in self._writers.pop(session, ()):
                self._ring.fail_missing(run, attempt, writer, "it ended before its shard was there")

    def fence(self, run: str, attempt: int) -> None:
        """Give up shards that earlier attempts are still sending: who sends them may be gone.

        All else of theirs is refused when it is to be committed.
        """
        with self._lock:
            for upload in list(self._uploads.values()):
                is_earlier = upload.run == run and upload.attempt < attempt
                if is_earlier and upload.announced is not None and upload.announced.shard is not None:
                    self.abort(upload.id)

    def expire(self, unconnected_s: float | None = None) -> None:
        """Free slots of network uploads whose sender fell silent.

        Args:
            unconnected_s: for how long, where nobody is connected to send parts of it: so it is of a sender that has
                been killed; ``None`` for as long as with a connection.
        """
        now_s = time.monotonic()
        for upload in list(self._uploads.values()):
            silent_s = now_s - upload.touched_s
            most_s = UPLOAD_IDLE_S if upload.in_use or unconnected_s is None else unconnected_s
            if not upload.session and silent_s > most_s:
                text = "an upload of run {about} got nothing for {silent_s:.0f} s. It is aborted. Check its sender."
                say(logging.WARNING, "upload-silent", text, about=upload.run, silent_s=silent_s)
                self.abort(upload.id)

    def _let_go(self, upload: Upload) -> None:
        """Let go of the base of an upload that has ended, and free the slot of an aborted one, once nothing uses it."""
        if upload.state is UploadState.OPEN or upload.in_use:
            return
        if upload.base is not None:
            self._ring.unpin(upload.base)
            upload.base = None
        if upload.state is UploadState.ABORTED:
            self._ring.abort(upload.slot)


def _unsealed(manifest: Manifest | None) -> Manifest | None:
    return replace(manifest, checksums=()) if manifest is not None else None


def _same(known: Upload, asked: tuple[str, int, int, Manifest | None]) -> Upload:
    """The upload that was begun under an id before, if the very same is asked for once more."""
    if (known.run, known.attempt, known.nbytes, known.announced) != asked:
        raise SettingsError(f"upload {known.id} was begun for something else")
    known.touched_s = time.monotonic()
    return known
