"""How far an attempt got: a small file of this host, which its trainer writes once a second.

It outlives a killed trainer. The node on the host reads it as soon as its trainer is gone, the next attempt when it
begins, ``report`` at any time; the record at the durable tier is written every few seconds only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lightning_spot.errors import SettingsError
from lightning_spot.goodput.ledger import AttemptRecord
from lightning_spot.protocol.ownership import read_file, replace_file
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import NodeRecord, find_record
from lightning_spot.untrusted import LARGE_BYTES, as_object, read_object

logger = logging.getLogger(__name__)

_MOST_S, _MOST_TIMES = 60.0, 3.0  # steps take longer than before by so much; a record is written every ten seconds
_DAMAGE = (OSError, SettingsError, ValueError, KeyError, TypeError, AttributeError)


def keep_reached(run_url: str, record: AttemptRecord) -> None:
    """Keep how far the attempt of this process got, in place of what was kept before. A reader never sees half of it.

    Args:
        run_url: durable directory or URL of the run.
        record: of the attempt. The account of those before it is not kept: the durable tier has it.

    Raises:
        SettingsError: if this host has no place for it.
        OSError: likewise.
    """
    process = ProcessId.of(os.getpid())
    kept = {
        "record": replace(record, earlier=None).as_dict(),
        "process": process.to_json() if process is not None else None,
    }
    with find_record(run_url).opened() as opened:
        replace_file(_path(opened, record.attempt), json.dumps(kept).encode())


def read_reached(run_url: str, attempt: int) -> AttemptRecord | None:
    """How far an attempt on this host got, but for those before it; ``None`` if nothing is left of it here.

    Its ``end`` is ``"killed"`` where it runs no more and did not say how it ended.
    """
    try:
        kept = read_object(read_file(_path(find_record(run_url), attempt), LARGE_BYTES), LARGE_BYTES)
        record = AttemptRecord.from_dict(as_object(kept["record"]))
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
    if record.end not in ("running", "killed"):
        return record
    here = read_reached(run_url, record.attempt) if record.end == "running" else None
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
