"""How far an attempt got: a small file of this host, mapped into the trainer's memory and written at every step.

It outlives a killed trainer. The node on the host reads it as soon as its trainer is gone, the next attempt when it
begins, ``report`` at any time; the record at the durable tier is written every few seconds only.

Everything is kept twice and written in turn, each with a checksum, so that a kill in mid-write leaves the one before.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from lightning_spot.errors import SettingsError
from lightning_spot.goodput.ledger import MOST_SNAPSHOTS, Account, AttemptRecord
from lightning_spot.protocol.ownership import open_file, read_file
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import NodeRecord, find_record
from lightning_spot.untrusted import LARGE_BYTES, as_object, read_object

logger = logging.getLogger(__name__)

_FRAME = struct.Struct("<QII")  # a count, the length of what follows, its CRC-32
_STEP = struct.Struct("<qdd")  # step, time, stall
_STEP_AT, _STEP_BYTES = 16, 64
_REST_AT = _STEP_AT + 2 * _STEP_BYTES
_LEAST_REST_BYTES = 64 * 1024
_LONGEST_FILE_BYTES = LARGE_BYTES
_MOST_S, _MOST_TIMES = 60.0, 3.0  # steps take longer than before by so much; a record is written every ten seconds
_DAMAGE = (OSError, SettingsError, struct.error, OverflowError, ValueError, KeyError, TypeError, AttributeError)


class Reached:
    """Writes how far an attempt got. Of one thread.

    Args:
        run_url: durable directory or URL of the run.
        record: of the attempt.

    Raises:
        SettingsError: if this host has no place for it.
    """

    def __init__(self, run_url: str, record: AttemptRecord) -> None:
        self._run_url, self._attempt = run_url, record.attempt
        process = ProcessId.of(os.getpid())
        self._process = json.dumps(process.to_json() if process is not None else None)
        self._counts = {_STEP_AT: 0, _REST_AT: 0}
        self._earlier = _told(record.earlier)
        rest = self._rest(record)
        self._rest_bytes = max(_LEAST_REST_BYTES, 4 * len(rest))
        size = _REST_AT + 2 * self._rest_bytes
        place = find_record(run_url)
        try:
            with place.opened() as opened:
                path = _path(opened, record.attempt)
                path.unlink(missing_ok=True)  # of another run that was here: who reads it goes on reading that one
                with open(open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "rb+") as file:
                    try:
                        os.posix_fallocate(file.fileno(), 0, size)  # what is full shows here, not as a SIGBUS in a step
                        self._map = mmap.mmap(file.fileno(), size)
                    except OSError:
                        path.unlink(missing_ok=True)
                        raise
        except OSError as error:
            raise SettingsError(f"{_path(place, record.attempt)} cannot be written ({error.strerror})") from error
        self._map[:8] = self._rest_bytes.to_bytes(8, "little")
        self.keep(record)

    def note(self, record: AttemptRecord) -> None:
        """Note the step, its time and the stall: microseconds."""
        data = _STEP.pack(record.step, record.unix_s, record.stall_s)
        self._write(_STEP_AT, _STEP_BYTES, data)

    def keep(self, record: AttemptRecord) -> None:
        """Note the whole record: when it begins, trains, or ends."""
        self._earlier = _told(record.earlier)
        self.keep_own(record)

    def keep_own(self, record: AttemptRecord) -> None:
        """Note all of it but the attempts before: when it takes a snapshot. Those of a long run take 5 ms to tell."""
        self._write(_REST_AT, self._rest_bytes, self._rest(record))
        self.note(record)

    def remove(self) -> None:
        """The record is at the durable tier."""
        forget_reached(self._run_url, self._attempt)

    def _rest(self, record: AttemptRecord) -> bytes:
        """The record as JSON; the text of snapshots, of which there may be hundreds, is kept."""
        own = json.dumps(record.own_values())
        snapshots = ", ".join(map(_text_of, record.snapshots))
        rest = f'"snapshots": [{snapshots}], "earlier": {self._earlier}'
        return f'{{"record": {{{own[1:-1]}, {rest}}}, "process": {self._process}}}'.encode()

    def _write(self, begin: int, size: int, data: bytes) -> None:
        if len(data) > size - _FRAME.size:
            return  # the record has grown fourfold: what was kept before stands, and the step goes on
        count = self._counts[begin] = self._counts[begin] + 1
        at = begin + count % 2 * size
        self._map[at : at + _FRAME.size + len(data)] = _FRAME.pack(count, len(data), zlib.crc32(data)) + data


def _told(earlier: Account | None) -> str:
    return json.dumps(asdict(earlier) if earlier is not None else None)


@functools.lru_cache(maxsize=2 * MOST_SNAPSHOTS)
def _text_of(snapshot: tuple[int, float]) -> str:
    return json.dumps(snapshot)


def read_reached(run_url: str, attempt: int) -> AttemptRecord | None:
    """How far an attempt on this host got; ``None`` if nothing is left of it here.

    Its ``end`` is ``"killed"`` where it runs no more and did not say how it ended.
    """
    try:
        data = read_file(_path(find_record(run_url), attempt), _LONGEST_FILE_BYTES)
        size = int.from_bytes(data[:8], "little")
        rest, step = _newest(data, _REST_AT, size), _newest(data, _STEP_AT, _STEP_BYTES)
        if rest is None or step is None:
            return None
        kept = read_object(rest, len(rest))
        record = AttemptRecord.from_dict(as_object(kept["record"]))
        record.step, record.unix_s, record.stall_s = _STEP.unpack(step)
        process = ProcessId.from_json(kept["process"] or "")
    except _DAMAGE as error:  # a machine that crashed may leave anything, and no start depends on it
        logger.debug("nothing is left of attempt %d on this host: %s", attempt, error)
        return None
    if record.end == "running" and (process is None or not process.alive):
        record.end = "killed"
    return record


def forget_reached(run_url: str, attempt: int) -> None:
    """Remove what is left of an attempt on this host: the durable tier has it."""
    with contextlib.suppress(SettingsError):
        with find_record(run_url).opened() as opened:
            _path(opened, attempt).unlink(missing_ok=True)


def completed(run_url: str, record: AttemptRecord, snapshots: Iterable[tuple[int, float]]) -> AttemptRecord:
    """A record from the durable tier, with all that is known beyond it of an attempt that was killed.

    Args:
        run_url: durable directory or URL of the run.
        record: of an attempt; unchanged if it said itself how it ended.
        snapshots: step and time of those of the attempt that are left, at whatever tier.
    """
    if record.end != "running":
        return record
    here = read_reached(run_url, record.attempt)
    if here is not None and here.begun_unix_s == record.begun_unix_s:
        record = replace(here, earlier=record.earlier)
    snapshots = _by_its_clock(record, snapshots)
    newest_step, newest_s = max(snapshots, default=(-1, 0.0))
    if record.end in ("running", "killed") and newest_step > record.step:
        record = replace(record, step=newest_step, unix_s=max(record.unix_s, newest_s))
        if record.trained_unix_s is None:
            record = replace(record, trained_unix_s=record.begun_unix_s)
    known = {step for step, _ in record.snapshots}
    more = [item for item in snapshots if item[0] not in known]
    return replace(record, snapshots=sorted([*record.snapshots, *more])) if more else record


def _by_its_clock(record: AttemptRecord, snapshots: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Snapshots by the clock of the record, which nobody sets.

    They have the time of the machine. Where that was set ahead in mid-training, by days maybe, those that the record
    has, too, tell by how much; else these days would count as training. Where there is none of these, the pace of the
    steps that it has tells whether so much time can have passed; if not, as much counts as that takes.
    """
    noted, ahead_s = dict(record.snapshots), 0.0
    found: list[tuple[int, float]] = []
    listed = sorted(snapshots)
    if listed and not any(step in noted for step, _ in listed):
        expected_s = record.unix_s + _step_s(record) * max(0, listed[-1][0] - record.step)
        if listed[-1][1] - record.unix_s > _MOST_S + _MOST_TIMES * (expected_s - record.unix_s):
            ahead_s = listed[-1][1] - expected_s
    for step, at_s in listed:
        if step in noted:
            ahead_s = max(0.0, at_s - noted[step])
        found.append((step, at_s - ahead_s))
    return found


def _step_s(record: AttemptRecord) -> float:
    """Seconds that a step took, as far as is noted; 0 where none is."""
    steps = record.step - record.from_step
    return (record.unix_s - record.trained_unix_s) / steps if record.trained_unix_s is not None and steps > 0 else 0.0


def _path(record: NodeRecord, attempt: int) -> Path:
    return record.folder / f"{record.key}.attempt-{attempt:04d}.reached"


def _newest(data: bytes, begin: int, size: int) -> bytes | None:
    """The newer one of two that is whole."""
    found: list[tuple[int, bytes]] = []
    for at in (begin, begin + size):
        count, length, crc = _FRAME.unpack_from(data, at)
        content = data[at + _FRAME.size : at + _FRAME.size + length]
        if count and len(content) == length <= size and zlib.crc32(content) == crc:
            found.append((count, content))
    return max(found)[1] if found else None
