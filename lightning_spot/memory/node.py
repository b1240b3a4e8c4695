"""A memory node without its network: runs, attempts and uploads over a ring and a flusher.

The HTTP service puts this on a socket; with ``memory=None`` a trainer holds one in its own process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_spot.config import check_run_name
from lightning_spot.errors import (
    CorruptSnapshot,
    Fenced,
    RunBusy,
    SettingsError,
    SnapshotNotFound,
    SpotError,
    TierError,
)
from lightning_spot.image.archive import write_crcs
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.flusher import Flusher
from lightning_spot.memory.prefixes import check_prefix, refusal
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import Opened, Run, RunInfo, key_of, parse_run
from lightning_spot.memory.uploads import Upload
from lightning_spot.tiers.store import Claim, Store, check_fence

logger = logging.getLogger(__name__)

IN_PROCESS = "in-process"
"""The session of a trainer that holds the node in its own process."""

UPLOAD_IDLE_S = 120.0
"""An upload over the network that receives nothing for so long is given up and its slot freed."""


class Node:
    """Runs, attempts and uploads. All methods may be called from any thread.

    Args:
        slots: slots of the ring.
        memory_bytes: most bytes all slots together may hold.
        open_store: makes the store of a destination URL.
        flush_to: URL below which runs are flushed that name no durable URL, or one that is not allowed.
        area: tmpfs directory for slots.
        allow: prefixes of durable URLs that a trainer may have this node write to (and ``flush_to``); ``None`` for
            any, at the node of the trainer's own host.
    """

    def __init__(
        self,
        *,
        slots: int,
        memory_bytes: int,
        open_store: Callable[[str], Store],
        flush_to: str | None = None,
        area: Path | None = None,
        allow: Sequence[str] | None = (),
    ) -> None:
        self.allow = [check_prefix(prefix) for prefix in allow] if allow is not None else None
        self.flush_to = flush_to.rstrip("/") if flush_to else None
        self.runs: dict[str, Run] = {}
        self.uploads: dict[str, Upload] = {}
        self.closing = False
        self._lock = threading.RLock()
        self._open_store = open_store
        self.draining = False
        self._sessions: dict[str, str] = {}
        self.ring = Ring(slots=slots, memory_bytes=memory_bytes, area=area, failing=self._failing)
        self.flusher = Flusher(self.ring, open_store, self._writer, self._keep)
        self._resume_flushing()

    # -- runs and attempts ----------------------------------------------------------------------------------------

    def open_run(self, info: RunInfo) -> Opened:
        """Let an attempt write a run; from now on earlier attempts' writes are refused.

        Args:
            info: what is said of the run. An attempt of 0 lets this node choose the next.

        Raises:
            RunBusy: if a live trainer on this host holds the run.
            Fenced: if a later attempt holds the run, or another one of the same number.
        """
        check_run_name(info.name)
        if self.draining and info.key not in self.runs:
            raise TierError("this node is shutting down and takes no new runs")
        urls, opened = self._destinations(info)
        reachable = self._claims(urls) if not info.attempt else {}
        with self._lock:
            known = self.runs.get(info.key)
            if known is not None:
                self._check_free(known, info)
            taken = max([self._highest(info.key), *reachable.values()])
            info = replace(info, attempt=info.attempt or taken + 1, keep=max(1, info.keep))
            check_fence(info.name, info.attempt, taken)
            self.runs[info.key] = Run(info, urls)
        for url in urls:
            if url in reachable:
                self._claim(url, info)
            self.flusher.serve(url)
        return replace(opened, attempt=info.attempt)

    def find_run(self, text: str) -> Run:
        """The run that ``NAME@ID`` or, if only one has it, ``NAME`` names.

        Raises:
            SnapshotNotFound: if this node does not know it.
            SettingsError: if several runs have that name.
        """
        name, identity = parse_run(text)
        if (exact := self.runs.get(identity or name)) is not None:
            return exact
        found = [] if identity else [run for run in list(self.runs.values()) if run.info.name == name]
        if len(found) > 1:
            listed = ", ".join(run.info.text for run in found)
            raise SettingsError(f"several runs are named {name!r} at this node; say which one: {listed}")
        if not found:
            raise SnapshotNotFound(
                f"this node does not know run {text!r} (it may have been restarted); open the run again"
            )
        return found[0]

    def listed(self) -> list[dict[str, Any]]:
        """Every run known here, also those of which only snapshots are left, as JSON-ready values."""
        with self._lock:
            runs = list(self.runs.values())
            carried = [(run, self._destinations(run.info)[1]) for run in runs]
            live = {run.info.key for run in runs if run.info.session in self._sessions}
        found = {
            run.info.key: {
                "name": run.info.name,
                "id": run.info.id,
                "location": run.info.location,
                "attempt": self._highest(run.info.key),
                "live": run.info.key in live,
                "complete": run.complete,
                "durable_url": run.info.durable_url,
                "carries": opened.carries,
            }
            for run, opened in carried
        }
        for slot in self.ring.committed():
            if slot.manifest is not None and (key := key_of(slot.manifest)) not in found:
                found[key] = {
                    "name": slot.manifest.run,
                    "id": slot.manifest.run_id,
                    "location": "",
                    "attempt": self._highest(key),
                    "live": False,
                    "complete": False,
                    "durable_url": None,
                    "carries": False,
                }
        return list(found.values())

    def key(self, text: str) -> str:
        """What a run named in a URL is kept under; a run that is not known has the key it would have."""
        try:
            return self.find_run(text).info.key
        except SnapshotNotFound:
            name, identity = parse_run(text)
            return identity or name

    def _highest(self, key: str) -> int:
        """Highest attempt known of a run: opened, or of a snapshot that is held."""
        known = self.runs.get(key)
        held = [slot.manifest.attempt for slot in self.ring.committed(key) if slot.manifest]
        return max([known.info.attempt if known else 0, *held])

    def _check_free(self, run: Run, info: RunInfo) -> None:
        held = run.info
        owner = self._sessions.get(held.session)
        another = owner is not None and (not owner or owner != self._sessions.get(info.session))
        if held.session and held.session != info.session and another:
            raise RunBusy(
                f"run {held.name!r} is being written by a live trainer on this host (pid {held.pid}). Two runs must not"
                " share one name: give this one another dirpath or run=, or end the other first",
                run=held.name,
                pid=held.pid,
            )
        if held.attempt == info.attempt and held.token and info.token and held.token != info.token:
            raise Fenced(
                f"attempt {info.attempt} of run {held.name!r} is another trainer's (on {held.host or 'another host'}):"
                " two were started at once. Stop one of them",
                run=held.name,
                attempt=info.attempt,
                current=held.attempt,
            )

    def close_run(self, run: str, *, complete: bool) -> None:
        """The trainer leaves; ``complete`` says that the run has reached its end."""
        with self._lock, contextlib.suppress(SnapshotNotFound):
            known = self.find_run(run)
            known.info, known.complete = replace(known.info, session=""), complete

    def claimed(self, run: str) -> int:
        """The attempt that holds a run, here or at the tiers below; 0 if none."""
        known = self.runs.get(self.key(run))
        urls = known.destinations if known is not None else self._below_flush_to(run)
        return max([self._highest(self.key(run)), *self._claims(urls).values()])

    def begin_session(self, session: str, owner: str = "") -> None:
        """A trainer on this host is connected.

        Args:
            session: its connection.
            owner: its process; sessions of one process never stand in each other's way. ``""`` where it is not known.
        """
        with self._lock:
            self._sessions[session] = owner

    def end_session(self, session: str) -> None:
        """The connection of a trainer has closed (it ended or was killed): its half-filled slots are freed."""
        with self._lock:
            self._sessions.pop(session, None)
            for upload in [item for item in self.uploads.values() if item.session == session]:
                self.abort(upload.id)
            for run in self.runs.values():
                if run.info.session == session:
                    run.info = replace(run.info, session="")

    @property
    def busy(self) -> bool:
        """Whether a trainer is connected, an upload under way, or something dirty that a working tier will take."""
        dirty = {url for slot in self.ring.committed() for url in slot.dirty}
        return bool(self._sessions or self.uploads or any(not self._failing(url) for url in dirty))

    @property
    def connected(self) -> bool:
        """Whether a trainer on this host is connected."""
        return bool(self._sessions)

    @property
    def settled(self) -> bool:
        """Whether no upload is under way and nothing waits for a tier."""
        return not self.uploads and not any(slot.dirty for slot in self.ring.committed())

    @property
    def finished(self) -> bool:
        """Whether every run this node served has said that it is complete, and all is safe below."""
        dirty = any(slot.dirty for slot in self.ring.committed())
        return bool(self.runs) and all(run.complete for run in self.runs.values()) and not dirty and not self.busy

    # -- uploads --------------------------------------------------------------------------------------------------

    def lease(self, run: str, attempt: int, nbytes: int, *, wait_s: float = 0.0, session: str = "") -> Upload:
        """Take a slot for a new snapshot; see :meth:`Ring.lease` for what it raises.

        Raises:
            Fenced: if ``attempt`` no longer holds the run.
        """
        if self.closing:
            raise TierError("this node is shutting down and takes no new snapshots")
        key = self._admit(run, attempt)
        self._expire()
        slot = self.ring.lease(max(1, nbytes), wait_s)  # an empty file has a slot, too
        upload = Upload(uuid.uuid4().hex, key, attempt, slot, nbytes, session, time.monotonic())
        with self._lock:
            if session and session != IN_PROCESS and session not in self._sessions:
                self.ring.abort(slot)
                raise SnapshotNotFound("the trainer's session has ended; nobody would fill this slot")
            self.uploads[upload.id] = upload
        return upload

    def find_upload(self, upload_id: str) -> Upload:
        """The upload of that id, marked as alive.

        Raises:
            SnapshotNotFound: if there is none (given up, or never begun).
        """
        upload = self.uploads.get(upload_id)
        if upload is None:
            raise SnapshotNotFound(f"upload {upload_id!r} does not exist (any more)")
        upload.touched_s = time.monotonic()
        return upload

    def seal(self, upload_id: str, manifest: Manifest, destinations: list[str] | None = None) -> Manifest:
        """Commit a slot that was filled on this host: write the zip's CRCs, checksum every part, commit.

        Args:
            upload_id: the lease.
            manifest: without checksums.
            destinations: overrides the run's, for a file that has a place of its own.

        Returns:
            the sealed manifest.
        """
        with self._lock:
            upload = self.find_upload(upload_id)
            self._check_writer(upload)
            if manifest.nbytes > upload.slot.capacity:
                raise CorruptSnapshot(f"{manifest.name} has {manifest.nbytes} bytes, its slot {upload.slot.capacity}")
            upload.sealing = True
        try:
            with upload.slot.view(manifest.nbytes) as image:
                write_crcs(image)
                sealed = manifest.sealed(image)
        finally:
            with self._lock:
                upload.sealing = False
                self._free_if_given_up(upload)
        return self._commit(upload, sealed, destinations)

    def commit(self, upload_id: str, manifest: Manifest) -> Manifest:
        """Commit a slot that was received in parts: every part must be there with the checksum of the manifest.

        Raises:
            CorruptSnapshot: if a part is missing or differs; the slot is freed.
        """
        upload = self.find_upload(upload_id)
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
        return self._commit(upload, manifest, None)

    def abort(self, upload_id: str) -> None:
        """Give an upload up; its slot becomes free. Nothing happens if it is gone."""
        with self._lock:
            upload = self.uploads.pop(upload_id, None)
            if upload is None:
                return
            upload.given_up = True
            for connection in upload.streams:
                with contextlib.suppress(OSError):  # it has broken already
                    connection.shutdown(socket.SHUT_RDWR)
            self._free_if_given_up(upload)

    def _free_if_given_up(self, upload: Upload) -> None:
        """Free the slot of a given-up upload, but not while late bytes could still reach the next snapshot in it."""
        if upload.given_up and not upload.in_use:
            self.ring.abort(upload.slot)

    @contextlib.contextmanager
    def streaming(self, upload: Upload, connection: socket.socket) -> Iterator[None]:
        """Note that a connection receives into the slot of an upload.

        Raises:
            SnapshotNotFound: if the upload is gone.
        """
        with self._lock:
            self.find_upload(upload.id)
            upload.streams.add(connection)
        try:
            yield
        finally:
            with self._lock:
                upload.streams.discard(connection)
                self._free_if_given_up(upload)

    def remove(self, run: str, name: str) -> None:
        """Remove a snapshot or file here at once, and at the tiers below in the background.

        Raises:
            SnapshotNotFound: if it is nowhere.
        """
        manifest, urls = self.ring.drop(self.key(run), name)
        for url in urls:
            self.flusher.delete(url, manifest)

    # -- the whole ------------------------------------------------------------------------------------------------

    def flush(self, run: str | None, wait_s: float) -> list[str]:
        """Bring everything dirty to the tiers below; see :meth:`Flusher.wait_clean`."""
        return self.flusher.wait_clean(self.key(run) if run else None, wait_s)

    def close(self, *, keep_dirty: bool = False) -> None:
        """Stop flushing and give the memory back."""
        self.closing = True
        self.flusher.close()
        self.ring.close(keep_dirty=keep_dirty)

    def status(self) -> dict[str, Any]:
        """Everything a person wants to see, as JSON-ready values."""
        return {
            **self.ring.status(),
            "flush_to": self.flush_to,
            "runs": {
                run.info.text: {
                    "attempt": run.info.attempt,
                    "destinations": run.destinations,
                    "pid": run.info.pid,
                    "live": bool(run.info.session),
                }
                for run in self.runs.values()
            },
            "tiers": {url: asdict(health) for url, health in self.flusher.health.items()},
            "pid": os.getpid(),
        }

    # -- inside ---------------------------------------------------------------------------------------------------

    def _commit(self, upload: Upload, manifest: Manifest, destinations: list[str] | None) -> Manifest:
        with self._lock:
            self.find_upload(upload.id)  # its trainer may have been killed meanwhile
            self._check_writer(upload)
            if key_of(manifest) != upload.run or manifest.attempt > upload.attempt:
                self.abort(upload.id)
                raise SettingsError(
                    f"{manifest.name} of attempt {manifest.attempt} of run {manifest.run!r} is not what this upload was"
                    f" opened for: attempt {upload.attempt} of {upload.run!r}"
                )
            run = self.runs.get(upload.run)
            urls = destinations if destinations is not None else run.destinations if run else []
            self.ring.commit(upload.slot, manifest, urls)
            self.uploads.pop(upload.id, None)
        self.ring.trim(upload.run, self._keep(upload.run))
        for url in urls:
            self.flusher.serve(url)
        return manifest

    def _check_writer(self, upload: Upload) -> None:
        """Refuse, and free the slot, if a later attempt has taken over since the lease."""
        try:
            check_fence(upload.run, upload.attempt, self._highest(upload.run))
        except SpotError:
            self.abort(upload.id)
            raise

    def _admit(self, run: str, attempt: int) -> str:
        """Refuse a writer whose attempt is not the latest; the key of its run."""
        with self._lock:
            known = self.find_run(run)
            check_fence(known.info.name, attempt, known.info.attempt)
            return known.info.key

    def _expire(self) -> None:
        """Free slots of network uploads whose sender fell silent."""
        now = time.monotonic()
        for upload in list(self.uploads.values()):
            if not upload.session and now - upload.touched_s > UPLOAD_IDLE_S:
                logger.warning("an upload for run %s received nothing for %.0f s; given up", upload.run, UPLOAD_IDLE_S)
                self.abort(upload.id)

    def _claims(self, urls: list[str]) -> dict[str, int]:
        claims = {}
        for url in urls:
            try:
                claims[url] = self._open_store(url).claimed()
            except SettingsError:
                raise
            except SpotError as error:
                logger.warning("%s does not answer (%s); going on without it for now", url, error)
        return claims

    def _claim(self, url: str, info: RunInfo) -> None:
        try:
            self._open_store(url).claim(_claim_of(info, url))
        except SpotError as error:
            logger.warning("attempt %d could not be recorded at %s: %s", info.attempt, url, error)

    def _destinations(self, info: RunInfo) -> tuple[list[str], Opened]:
        """Where a run goes from here, and whether that includes its durable tier."""
        urls = [f"{node}/{info.text}" for node in info.nodes]
        if info.durable_url is None:
            below = self._below_flush_to(info.text)
            return [*urls, *below], Opened(0, bool(below), "" if below else "no durable URL was named")
        why_not = self.allowed(info.durable_url)
        if not why_not:
            return [*urls, info.durable_url], Opened(0, True)
        return [*urls, *self._below_flush_to(info.text)], Opened(0, False, why_not)

    def allowed(self, url: str) -> str:
        """Why this node may not write to a durable URL, for people; ``""`` if it may."""
        if self.allow is None:
            return ""
        return refusal(url, [*self.allow, *([self.flush_to] if self.flush_to else [])])

    def _below_flush_to(self, text: str) -> list[str]:
        return [f"{self.flush_to}/{text}"] if self.flush_to else []

    def _resume_flushing(self) -> None:
        """Go on with what a killed node left dirty."""
        for slot in self.ring.committed():
            for url in slot.dirty:
                self.flusher.serve(url)

    def _failing(self, url: str) -> bool:
        return self.flusher.failing(url)

    def _writer(self, key: str) -> int:
        known = self.runs.get(key)
        return known.info.attempt if known else 0

    def _keep(self, key: str) -> int:
        known = self.runs.get(key)
        return known.info.keep if known else 2


def _claim_of(info: RunInfo, url: str) -> Claim:
    return Claim(
        attempt=info.attempt,
        run_id=info.id,
        token=info.token,
        location=info.location or url,
        started_unix_s=time.time(),
        host=info.host,
        pid=info.pid,
        keep=info.keep,
    )
