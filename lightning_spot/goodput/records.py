"""Records of attempts: where the time of each went.

The trainer writes its record to a file of this host once a second, and to storage every few seconds. The file outlives
a killed trainer: the local server reads it when its trainer is gone, the next attempt when it begins, ``report`` at any
time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from lightning_spot.config import directory_of, scheme_of
from lightning_spot.errors import MalformedError, SettingsError, TierError
from lightning_spot.goodput.ledger import AttemptRecord, Spent, account_after
from lightning_spot.protocol.ownership import read_file, replace_file
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import ServerRecord, find_record
from lightning_spot.say import recovered, say
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.fences import ATTEMPTS_DIR
from lightning_spot.store.local import LocalStore
from lightning_spot.store.objects import ObjectStore
from lightning_spot.store.store import Folder
from lightning_spot.untrusted import LARGE_JSON_BYTES, as_object, read_object, read_sealed, sealed_json

logger = logging.getLogger(__name__)

_RECORD = re.compile(r"attempt-(\d{1,9})\.progress\.json", re.ASCII)
_MOST_DAMAGED = 8
_MOST_BYTES = 2**22
_LOOK_EVERY = 6  # beats: each look lists the run in storage


def write_record(run_url: str, record: AttemptRecord) -> None:
    """Write how an attempt goes, in place of what was written before. A reader never sees half of it.

    Args:
        run_url: durable directory or fsspec URL of the run.
        record: of the attempt.

    Raises:
        TierError: if the tier fails.
    """
    _folder(run_url).write(_name(record.attempt), memoryview(sealed_json(asdict(record)).encode()))


def newest_record(run_url: str, before: int | None = None) -> AttemptRecord | None:
    """The record of the newest attempt, ``None`` if there is none: one listing and one read, however many there are.

    Args:
        run_url: durable directory or fsspec URL of the run.
        before: only attempts before this one.

    Raises:
        TierError: if the tier fails.
    """
    return newest_in(_folder(run_url), before)


def newest_in(folder: Folder, before: int | None = None) -> AttemptRecord | None:
    """As :func:`newest_record`, in the folder of a run's attempts."""
    older = [attempt for attempt in _attempts(folder) if before is None or attempt < before]
    reads = (_read(folder, attempt) for attempt in reversed(older[-_MOST_DAMAGED:]))
    found = (record for record in reads if record is not None)
    newest = next(found, None)
    if newest is not None and newest.earlier is None:  # the first one; or its trainer could not read the one before
        with contextlib.suppress(TierError):
            previous = next(found, None)
            newest.earlier = account_after(_ended(previous)) if previous is not None else None
    return newest


def _ended(previous: AttemptRecord) -> AttemptRecord:
    """The record of an attempt that another one follows: there is one trainer of a run at a time."""
    return replace(previous, end="killed") if previous.end == "running" else previous


def read_records(run_url: str) -> list[AttemptRecord]:
    """The records of the latest attempts, the first first, as the newest one carries them on.

    Raises:
        TierError: if the tier fails.
    """
    newest = newest_record(run_url)
    return newest.known if newest is not None else []


def _folder(run_url: str) -> Folder:
    store = ObjectStore(run_url) if scheme_of(run_url) else LocalStore(directory_of(run_url))
    return store.folder(ATTEMPTS_DIR, attempt=0, run_id="")


def _name(attempt: int) -> str:
    return f"attempt-{attempt:04d}.progress.json"


def _attempts(folder: Folder) -> list[int]:
    return sorted(int(match[1]) for name in folder.sizes() if (match := _RECORD.fullmatch(name)) is not None)


def _read(folder: Folder, attempt: int) -> AttemptRecord | None:
    try:
        record = AttemptRecord.from_dict(read_sealed(folder.read(_name(attempt), 0, _MOST_BYTES + 1), _MOST_BYTES))
        if record.attempt != attempt:
            raise MalformedError(f"it is that of attempt {record.attempt}")
        return record
    except FileNotFoundError:
        return None  # removed meanwhile
    except MalformedError as error:
        say(
            logging.WARNING,
            "goodput-damaged",
            "the record of attempt {attempt}, {about}, is damaged: {error}. The time of that attempt is not counted.",
            about=_name(attempt),
            attempt=attempt,
            error=error,
        )
        return None


_DAMAGE = (OSError, SettingsError, ValueError, KeyError, TypeError, AttributeError)


def keep_reached(run_url: str, record: AttemptRecord) -> None:
    """Keep how far the attempt of this process got, in place of what was kept before. A reader never sees half of it.

    Args:
        run_url: durable directory or URL of the run.
        record: of the attempt. The account of those before it is not kept: storage has it.

    Raises:
        SettingsError: if this host has no place for it.
        OSError: likewise.
    """
    process = ProcessId.of(os.getpid())
    kept = {"record": asdict(replace(record, earlier=None)), "process": process.to_json() if process else None}
    with find_record(run_url).opened() as opened:
        replace_file(_path(opened, record.attempt), json.dumps(kept).encode())


def read_reached(run_url: str, attempt: int) -> AttemptRecord | None:
    """How far an attempt on this host got, but for those before it; ``None`` if nothing is left of it here.

    Its ``end`` is ``"killed"`` where it runs no more and did not say how it ended.
    """
    try:
        kept = read_object(read_file(_path(find_record(run_url), attempt), LARGE_JSON_BYTES), LARGE_JSON_BYTES)
        record = AttemptRecord.from_dict(as_object(kept["record"]))
        process = ProcessId.from_json(kept["process"] or "")
    except _DAMAGE as error:  # a machine that crashed may leave anything, and no start depends on it
        logger.debug("nothing is left of attempt %d on this host: %s", attempt, error)
        return None
    if record.end == "running" and (process is None or not process.alive):
        record.end = "killed"
    return record


def forget_reached(run_url: str, attempt: int) -> None:
    """Remove what is left of an attempt on this host: storage has it."""
    with contextlib.suppress(SettingsError), find_record(run_url).opened() as opened:
        _path(opened, attempt).unlink(missing_ok=True)


def completed(run_url: str, record: AttemptRecord, snapshots: Iterable[Manifest]) -> AttemptRecord:
    """A record from storage, with what is known beyond it of an attempt that did not say how it ended.

    Args:
        run_url: durable directory or URL of the run.
        record: of an attempt.
        snapshots: of the run, at whatever tier.
    """
    if record.end == "running":
        here = read_reached(run_url, record.attempt)
        if here is not None and here.begun_unix_s == record.begun_unix_s:
            record = replace(here, earlier=record.earlier)
    own = (each for each in snapshots if each.attempt == record.attempt)
    newest = max(own, key=lambda each: each.step, default=None)
    if newest is None or newest.step <= record.step:
        return record
    since_s = record.trained_unix_s if record.trained_unix_s is not None else record.begun_unix_s
    unix_s = max(record.unix_s, newest.created_unix_s)
    return replace(record, trained_unix_s=since_s, step=newest.step, unix_s=unix_s)


def _path(record: ServerRecord, attempt: int) -> Path:
    return record.folder / f"{record.key}.attempt-{attempt:04d}.reached"


_fits: set[int] = set()
"""Numbers of the processes, this one and those it was forked from, that have begun to fit."""


def begin_unix_s() -> float:
    """When the attempt of a ``fit`` that begins now began: with the process, if that fits for the first time.

    At a prompt, or in a notebook, a process waits for its user before that.
    """
    process = ProcessId.of(os.getpid())
    is_first, now_s = os.getpid() not in _fits, time.time()
    _fits.add(os.getpid())
    return now_s - process.age_s if is_first and process is not None and not hasattr(sys, "ps1") else now_s


CLOSE_S = 5.0
"""How long the end of ``fit`` waits for a record to be written, where the tier is slow."""
KEEP_S = 1.0
"""So much of a killed attempt may be missing, and the step that it was in."""


class Journal:
    """The record of one attempt, and the account of those before it. Of the training thread, on rank 0.

    Args:
        run_url: durable directory or URL of the run.
        attempt: its number.
        snapshots: of earlier attempts, at whatever tier: they tell how far one got whose machine is gone.
        heartbeat_s: seconds between two writes to storage.
        begun_unix_s: when the attempt began, see :func:`begin_unix_s`.
        newest_persisted: looks up step and time of the newest snapshot in storage, ``None`` if there is none.
        tell: tells servers what was measured, at each of these writes.

    Attributes:
        record: of this attempt; it has the account of those before it.
        persisted: what ``newest_persisted`` has found last; ``None`` before it has found one.
    """

    def __init__(
        self,
        run_url: str,
        attempt: int,
        *,
        snapshots: Iterable[Manifest] = (),
        heartbeat_s: float,
        begun_unix_s: float,
        newest_persisted: Callable[[], tuple[int, float] | None] = lambda: None,
        tell: Callable[[Journal], object] = lambda _: None,
    ) -> None:
        self.persisted: tuple[int, float] | None = None
        self._newest_persisted, self._tell = newest_persisted, tell
        self._url, self._heartbeat_s = run_url, heartbeat_s
        self._ahead_s = time.time() - time.monotonic()  # days by which a clock is set meanwhile are no training
        self._snapshots, self._has_followed, self._left = snapshots, False, 0
        self.record = AttemptRecord(attempt=attempt, begun_unix_s=begun_unix_s, unix_s=self._now())
        try:
            self._follow()
        except TierError as error:
            text = "{error}. Goodput counts from this attempt on, until it is read"
            say(logging.WARNING, "goodput-restarted", text, about=run_url, error=error)
        self._is_kept, self._kept_s = True, 0.0  # on this host
        self._keep()
        self._wake, self._stopping = threading.Event(), False
        self._wake.set()
        self._thread = threading.Thread(target=self._beat, name="spot-goodput", daemon=True)
        self._thread.start()

    @property
    def spent(self) -> Spent:
        """Where the time of the run went so far."""
        return self.record.before.spent(self.record)

    def train(self, step: int, taken_unix_s: float | None = None, restore_s: float = 0.0) -> None:
        """Training begins.

        Args:
            step: where it begins.
            taken_unix_s: when the snapshot was taken from which it is resumed.
            restore_s: seconds that the resume took.
        """
        record = self.record
        record.trained_unix_s = record.unix_s = self._now()
        record.from_step = record.step = step
        record.from_unix_s, record.restore_s = taken_unix_s, restore_s
        self._keep()
        self._wake.set()

    def note(self, step: int, blocked_s: float, snapshots: int) -> None:
        """Note where training is; costs microseconds, and once a second some more.

        Args:
            step: of the optimizer.
            blocked_s: seconds that training has waited for snapshots.
            snapshots: how many it has taken.
        """
        record = self.record
        record.step, record.unix_s = step, self._now()
        record.blocked_s, record.snapshots = blocked_s, snapshots
        if time.monotonic() - self._kept_s >= KEEP_S:
            self._keep()

    def close(self, end: str) -> None:
        """Note how the attempt ended, and wait for that to be written."""
        self.record.end = end
        self._keep()
        self.leave()
        self._thread.join(CLOSE_S)

    def hurry(self) -> None:
        """Write now, and tell servers, without waiting for it."""
        self._wake.set()

    def leave(self) -> None:
        """Keep the record no longer, and wait for nothing: what was noted last stands."""
        self._stopping = True
        self._wake.set()

    def _now(self) -> float:
        return self._ahead_s + time.monotonic()

    def _follow(self) -> None:
        """Carry on the account of the attempts before, as the newest of them has it.

        Raises:
            TierError: if its record cannot be read.
        """
        if (previous := newest_record(self._url, before=self.record.attempt)) is not None:
            previous = completed(self._url, previous, self._snapshots)
            self._left, self.record.earlier = previous.attempt, account_after(_ended(previous))
        self._has_followed = True

    def _keep(self) -> None:
        if not self._is_kept:
            return
        self._kept_s = time.monotonic()
        try:
            keep_reached(self._url, self.record)
        except (SettingsError, OSError) as error:
            self._is_kept = False
            say(
                logging.WARNING,
                "goodput-coarse",
                "{error}. If this trainer is killed, up to {seconds:.0f} s of its work count as down",
                about=self._url,
                seconds=self._heartbeat_s,
                error=error,
            )

    def _beat(self) -> None:
        stopping, beats = False, 0
        while not stopping:
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()
            stopping = self._stopping
            try:
                self._tell(self)
            except Exception as error:  # training needs none of it
                logger.debug("servers are not told what was measured: %r", error)
            try:
                self.record.alive_unix_s = time.time()  # who looks at it has the clock of now, see check_idle
                if not self._has_followed:
                    with contextlib.suppress(TierError):
                        self._follow()
                write_record(self._url, self.record)
                if self._left:  # what it left on this host is in storage now
                    forget_reached(self._url, self._left)
                    self._left = 0
            except TierError as error:
                logger.debug("%s", error)  # its uploader tells of a tier that fails
            except Exception as error:  # such as want of memory: there may be some again at the next beat
                why = f"{type(error).__name__}: {error}"
                text = "goodput cannot be recorded now: {why}"
                say(logging.WARNING, "goodput-failing", text, about=self._url, why=why)
            else:
                recovered("goodput-failing", "goodput is recorded again", about=self._url)
                if stopping:
                    forget_reached(self._url, self.record.attempt)
            if beats % _LOOK_EVERY == 0 and not stopping:
                try:
                    self.persisted = self._newest_persisted()
                except Exception as error:  # a storage that fails is warned of by those who upload
                    logger.debug("it is not known which snapshot is the newest in storage: %r", error)
            beats += 1
