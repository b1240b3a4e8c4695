"""The directory on tmpfs in which a server keeps its slots: the next one takes over what a killed one left.

::

    lock             locked by the server as long as it lives
    slot-3.img       the bytes of a slot
    slot-3.json      its commit record, renamed into place: without it the bytes are nothing
    slot-3.json.tmp  room for the next one: where the tmpfs is full by then, that is written all the same
    run-RUN.json     what a restarted server must know of a run: who may write it, and where it goes

Others of this host may write to the tmpfs, too. A directory counts by its owner, and is reached by its descriptor only:
see :mod:`~lightning_spot.protocol.ownership`. Where another user has taken its name, another one is made up.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError, SettingsError, TierError
from lightning_spot.protocol.ownership import (
    OwnDirectory,
    files_in,
    make_directory,
    open_file,
    own_directories,
    read_file,
)
from lightning_spot.protocol.record import AREA_LOCK, is_held
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.retry import retried
from lightning_spot.say import recovered, say
from lightning_spot.server.runs import Run, RunInfo, key_of, writer_of
from lightning_spot.server.slots import Mark, Slot, SlotState, file_version
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.untrusted import LARGE_JSON_BYTES, as_object, decoded, read_sealed, sealed_json

_OURS = re.compile(r"lock|slot-\d+\.(img|json(\.tmp)?)|run-.*\.json(\.tmp)?")
_MOST_NAMES = 100
_RECORD_BYTES, _PART_RECORD_BYTES = 4096, 64  # of a commit record, about, and of each part more
_LOOK_S, _POLL_S = 1.0, 0.01  # :func:`is_held` locks it for microseconds, a server for as long as it lives

Result = TypeVar("Result")

REOPEN_PAUSES_S = (0.2, 1.0, 4.0)
"""Pauses before a slot that could not be opened, such as for want of memory, is opened again."""


class SlotArea:
    """A locked directory for slots. Where a living server holds it, or another user has its name, another one is taken.

    Args:
        path: directory on tmpfs; made if need be. Others of its kind are called ``path-…``.

    Raises:
        TierError: if none can be made.
    """

    def __init__(self, path: Path) -> None:
        self._name = path
        self._directory, self._lock_file = next(_abandoned(path), None) or _made(path)
        self.path = self._directory.path
        self._noted: dict[str, Run] = {}

    @property
    def _here(self) -> Path:
        return self._directory.here

    def _record_of(self, slot: Slot) -> Path:
        return self._here / f"slot-{slot.index}.json"

    def image(self, slot: Slot) -> Path:
        """Where a slot's bytes go."""
        return self._here / f"slot-{slot.index}.img"

    def reserve(self, slot: Slot) -> None:
        """Take the room of a slot's first commit record while there is some; without it, that may not be written."""
        parts = -(-slot.capacity // PART_BYTES)
        with contextlib.suppress(OSError), open(_open_aside(_aside(self._record_of(slot))), "wb") as file:
            file.write(bytes(_RECORD_BYTES + parts * _PART_RECORD_BYTES))

    def has_record(self, slot: Slot) -> bool:
        """Whether the commit record of a slot is there; one for which there was no room before is written now."""
        record = self._record_of(slot)
        if not record.exists():
            self.record(slot)
        return record.exists()

    def record(self, slot: Slot) -> None:
        """Write the commit record of a slot whose bytes are here."""
        is_kept = slot.memory is not None and slot.memory.path is not None
        if slot.manifest is None or not (is_kept or slot.manifest.why_failed):
            return
        self._write(  # its keys are older than our names: the next server may be of another version
            self._record_of(slot).name,
            {
                "manifest": slot.manifest.to_dict(),
                "places": slot.commit.destinations,
                "safe": slot.safe,
                "refused": slot.refused,
                "settled": slot.durable_or_superseded,
                "sequence": slot.commit.sequence,
            },
        )

    def forget(self, slot: Slot) -> None:
        """Take the commit record of a slot away; its room is kept for the next one."""
        record = self._record_of(slot)
        try:
            os.replace(record, _aside(record))
        except OSError:  # there is none, or its room cannot be kept
            record.unlink(missing_ok=True)

    def keep_run(self, info: RunInfo, complete: bool) -> None:
        """Note what a restarted server must know of a run; nothing happens if that is noted."""
        left = Run(replace(info, session="", committed="", persisted="", lineage="", figures=None), complete)
        record = {"info": asdict(left.info), "complete": complete}
        if self._noted.get(info.key) != left and self._write(f"run-{info.key}.json", record):
            self._noted[info.key] = left

    def forget_run(self, key: str) -> None:
        """Remove what was noted of a run."""
        self._noted.pop(key, None)
        (self._here / f"run-{key}.json").unlink(missing_ok=True)

    def runs(self) -> Iterator[Run]:
        """What an earlier server noted of its runs."""
        return self._runs_in(self._directory)

    def _runs_in(self, directory: OwnDirectory) -> Iterator[Run]:
        for path in files_in(directory.here, "run-*.json"):
            try:
                record = read_sealed(read_file(path, LARGE_JSON_BYTES), LARGE_JSON_BYTES)
                info = decoded(RunInfo, as_object(record["info"]))
                yield Run(info, bool(record["complete"]))
            except (OSError, ValueError, KeyError, TypeError, CorruptSnapshotError) as error:
                text = "{about} cannot be read. The run that an earlier server noted there is not continued: {error}"
                say(logging.WARNING, "leftover-damaged", text, about=directory.path / path.name, error=error)

    def adopt(self) -> list[Slot]:
        """Slots that earlier servers committed, checked byte by byte; whatever else is here is removed.

        Those in the directories beside this one, which nobody holds any more, are brought here first.

        Raises:
            TierError: if one cannot be read now, for want of memory or of descriptors: all stay for the next server.
        """
        try:
            for other, lock in _abandoned(self._name):
                with other, lock:
                    self._take_in(other)
            slots = [slot for path in files_in(self._here, "slot-*.json") if (slot := self._reopen(path)) is not None]
        except BaseException:
            self._lock_file.close()
            raise
        kept = {f"slot-{slot.index}" for slot in slots}
        for leftover in self._here.iterdir():
            is_kept = leftover.stem in kept or leftover.name == AREA_LOCK or leftover.name.startswith("run-")
            if _OURS.fullmatch(leftover.name) and (leftover.suffix == ".tmp" or not is_kept):
                leftover.unlink(missing_ok=True)
        return sorted(self._newest_of_each(slots), key=lambda slot: slot.index)

    def _take_in(self, other: OwnDirectory) -> None:
        """Bring what lies in another directory here. Killed in between, it lies in both: never in none."""
        taken = {path.stem for path in files_in(self._here, "slot-*")}
        free = (name for number in itertools.count() if (name := f"slot-{number}") not in taken)
        try:
            for record in files_in(other.here, "slot-*.json"):
                name = next(free)
                for suffix in (".img", ".json"):  # the record last: it makes the bytes count
                    if record.with_suffix(suffix).exists():
                        os.link(record.with_suffix(suffix), self._here / f"{name}{suffix}")
            known = {left.info.key: left for left in self.runs()}
            for left in self._runs_in(other):
                newer = max(known.get(left.info.key, left), left, key=lambda each: each.info.attempt)
                self.keep_run(newer.info, newer.complete)
        except OSError as error:
            text = "{about} could not be moved to {here}. It stays for the next server: {error}"
            say(logging.WARNING, "leftover-not-taken", text, about=other.path, here=self.path, error=error)
            return
        _remove(other)

    def _newest_of_each(self, slots: list[Slot]) -> list[Slot]:
        """Of slots that hold a file of one name, or the same snapshot, the newest; the others are removed."""
        newest: dict[tuple[str, str], Slot] = {}
        for slot in sorted(slots, key=lambda slot: (file_version(slot.manifest), slot.commit.sequence)):
            older = newest.get((slot.run, slot.content.name))
            newest[slot.run, slot.content.name] = slot
            if older is not None and older.memory is not None:
                self.forget(older)
                older.memory.close()
        return list(newest.values())

    def close(self) -> None:
        """Let the directory go, and remove it if no slot is left in it."""
        if self._lock_file.closed:
            return
        if not files_in(self._here, "slot-*.json"):
            _remove(self._directory)
        self._lock_file.close()
        self._directory.close()

    def _reopen(self, record_path: Path) -> Slot | None:
        """The slot of a record, ``None`` if that or its bytes are damaged. What cannot be read now is not damaged."""
        return _patiently(functools.partial(self._reopen_now, record_path), self.path / record_path.name)

    def _reopen_now(self, record_path: Path) -> Slot | None:
        index = record_path.stem.removeprefix("slot-")
        if not index.isdecimal():
            return None
        slot = Slot(int(index))
        where = str(self.path / self.image(slot).name)
        try:
            record = read_sealed(read_file(record_path, LARGE_JSON_BYTES, linked=True), LARGE_JSON_BYTES)
            manifest = Manifest.from_dict(record["manifest"])
            if not manifest.why_failed:
                slot.memory = SlotMemory.reopen(self.image(slot))
                if manifest.nbytes > slot.capacity:
                    raise CorruptSnapshotError(f"{where} is shorter than its manifest says")
                with slot.view(manifest.nbytes) as view:
                    manifest.verify(view, where)
            slot.commit.destinations = tuple(record["places"]) if record["places"] is not None else None
            for mark in (Mark.REFUSED, Mark.SAFE):
                slot.seen.update(dict.fromkeys((str(url) for url in record[mark.value]), mark))
            slot.durable_or_superseded = bool(record.get("settled"))
            slot.commit.sequence = int(record["sequence"])
        except (FileNotFoundError, ValueError, KeyError, TypeError, CorruptSnapshotError) as error:
            text = "{about} of an earlier server is damaged. It is dropped; the snapshot before it counts: {error}"
            say(logging.WARNING, "leftover-damaged", text, about=where, error=error)
            if slot.memory is not None:
                slot.memory.close()
            return None
        except BaseException:
            if slot.memory is not None:
                slot.memory.path = None  # it stays where it is
                slot.memory.close()
            raise
        slot.manifest, slot.run, slot.state = manifest, key_of(manifest), SlotState.HELD
        slot.writer, slot.commit.at_s = writer_of(manifest), time.monotonic()
        text = "took over snapshot {about} of run {run} from an earlier server"
        say(logging.INFO, "leftover-taken", text, about=manifest.name, run=manifest.run)
        return slot

    def _write(self, name: str, record: dict[str, Any]) -> bool:
        """Write a record; whether it is there."""
        place = self._here / name
        try:
            with open(_open_aside(_aside(place)), "wb") as file:  # which does not cut it, so its room stays
                file.write(sealed_json(record).encode())
                file.truncate()
            os.replace(_aside(place), place)
        except OSError as error:
            # Committed all the same, as with memory files; an older record only knows less of what is safe.
            text = "{about} cannot be written: {error}. If this server ends, snapshots that only it has are lost."
            say(logging.WARNING, "slots-not-recorded", text, about=self.path, error=error)
            return False
        recovered("slots-not-recorded", "{about} can be written again", about=self.path)
        return True


def _aside(record: Path) -> Path:
    """Where a record is written before it is renamed into place."""
    return record.with_name(f"{record.name}.tmp")


def _open_aside(path: Path) -> int:
    """Open what is to be renamed into place, over what is there already."""
    try:
        return open_file(path, os.O_WRONLY | os.O_CREAT)
    except SettingsError:  # such as a record that another directory has, too, see ``_take_in``
        path.unlink()
        return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def left_in(directory: OwnDirectory) -> Iterator[Manifest]:
    """What is committed in a slot area, as far as its records can be read. Its bytes are not looked at."""
    for path in files_in(directory.here, "slot-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, CorruptSnapshotError):
            record = read_sealed(read_file(path, LARGE_JSON_BYTES, linked=True), LARGE_JSON_BYTES)
            yield Manifest.from_dict(record["manifest"])


def remove_abandoned(directory: OwnDirectory) -> bool:
    """Remove a slot area that no living server holds; whether it was removed."""
    lock = _lock(directory)
    if lock is None:
        return False
    with lock:
        _remove(directory)
    return True


def _abandoned(path: Path) -> Iterator[tuple[OwnDirectory, BinaryIO]]:
    """The directories of that name that no living server holds, each locked: the caller's to close.

    Raises:
        TierError: if it cannot be told of one now, such as for want of descriptors: its slots may be the newest.
    """
    for directory in own_directories(path):
        lock, where = None, directory.path
        try:
            lock = _patiently(functools.partial(_lock, directory), where)
        except SettingsError as error:  # it is none of a server's
            text = "{about} is not a directory of this server's. It stays as it is: {error}"
            say(logging.WARNING, "leftover-foreign", text, about=where, error=error)
        if lock is not None:
            yield directory, lock
        else:
            directory.close()


def _patiently(action: Callable[[], Result], where: Path) -> Result:
    """Read what an earlier server has left, and again where that fails in a way that may pass.

    Raises:
        TierError: if it does not pass.
    """
    passes = (OSError, MemoryError)

    def note(error: Exception, _pause_s: float) -> None:
        text = "{about} cannot be taken over now. It is retried: {error}"
        say(logging.WARNING, "leftover-read-again", text, about=where, error=str(error) or repr(error))

    try:
        return retried(action, REOPEN_PAUSES_S, lambda error: isinstance(error, passes), note)
    except passes as error:
        why = str(error) or type(error).__name__
        raise TierError(f"what an earlier server left in {where} cannot be read now: {why}") from error


def _made(path: Path) -> tuple[OwnDirectory, BinaryIO]:
    """A new one, locked: at ``path``, or by a name that nobody can foresee where something is there."""
    make_directory(path.parent)
    beside = (path.with_name(f"{path.name}-{secrets.token_hex(8)}") for _ in range(_MOST_NAMES))
    for name in itertools.chain([path], beside):
        with contextlib.suppress(FileExistsError, FileNotFoundError, SettingsError):  # others make and remove some, too
            os.mkdir(name, 0o700)
            directory = OwnDirectory(name)
            if (lock := _lock(directory)) is not None:
                return directory, lock
            directory.close()
    raise TierError(
        f"no directory for slots can be made at {path}: others hold it, or exchange what is made there. Set"
        " LIGHTNING_SPOT_SHM_DIR to another tmpfs"
    )


def _lock(directory: OwnDirectory) -> BinaryIO | None:
    """Lock a directory for slots; ``None`` if a living server holds it, or it was removed.

    Raises:
        SettingsError: if its lock is none.
    """
    path, deadline_s = directory.here / AREA_LOCK, time.monotonic() + _LOOK_S
    while True:
        try:
            lock = open(open_file(path, os.O_RDWR | os.O_CREAT), "r+b")  # noqa: SIM115 - open until the area is closed
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            if is_held(path) or time.monotonic() > deadline_s:
                return None
            time.sleep(_POLL_S)  # no server holds it: somebody looks whether one does
            continue
        with contextlib.suppress(FileNotFoundError):  # its holder has just removed it
            if os.path.samestat(os.fstat(lock.fileno()), path.lstat()):
                return lock
        lock.close()


def _remove(directory: OwnDirectory) -> None:
    """Remove what servers put into a directory, and the directory, unless something else lies in it."""
    with contextlib.suppress(OSError):
        for path in directory.here.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink(missing_ok=True)
        directory.path.rmdir()
