"""What this program has trained before: the n-th ``fit`` at one ``dirpath`` is the run ``dirpath/fit-n``.

So no second training (a fold, another model, a second phase) is given the first one's weights, and each finds its own
run again when the program is killed and started again. Where each ``fit`` has processes of its own (``ddp_spawn``,
``ddp_notebook``), what those before it have finished stands in a small file of this host. A ``fit`` that an exception
ended is not counted: the next one goes on from there, and says so.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections import Counter
from dataclasses import replace
from pathlib import Path

from lightning_spot.errors import SettingsError
from lightning_spot.protocol.ownership import read_file, replace_file
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import ServerRecord, find_record
from lightning_spot.run.location import Location
from lightning_spot.say import say
from lightning_spot.untrusted import SMALL_JSON_BYTES, integer, line, read_object

_finished: Counter[str] = Counter()
_interrupted: dict[str, str] = {}
_GIVEN_UP = "TrialPruned"  # Optuna's word for a trial that shall not go on


def next_at(named: Location) -> Location:
    """Where the run is of the ``fit`` that begins, of those at the location that the user named: the first is there."""
    if named.canonical not in _finished:
        _finished[named.canonical] = _finished_by_others(named)
    number = _finished[named.canonical] + 1
    if number == 1:
        return named
    return replace(named, url=f"{named.url.rstrip('/')}/fit-{number}", name=f"{named.name}-fit-{number}")


def finished(named: Location) -> None:
    """A ``fit`` has come to its end, of those at the location that the user named."""
    _finished[named.canonical] += 1
    _interrupted.pop(named.canonical, None)
    _tell_others(named)


def interrupted(named: Location, error: BaseException) -> None:
    """An exception has ended a ``fit`` there."""
    if is_given_up(error):
        finished(named)
    else:
        _interrupted[named.canonical] = type(error).__name__


def is_given_up(error: BaseException) -> bool:
    """Whether an exception ends a training for good, which nobody starts again."""
    return any(kind.__name__ == _GIVEN_UP for kind in type(error).__mro__)


def what_interrupted(named: Location) -> str | None:
    """Name of the exception that ended the last ``fit`` there, in this process."""
    return _interrupted.get(named.canonical)


def forget() -> None:
    """Be as a new process is."""
    _finished.clear()
    _interrupted.clear()


def _program() -> ProcessId | None:
    """The program that has started this process to train in it; ``None`` where this is the program."""
    parent = multiprocessing.parent_process()
    return ProcessId.of(parent.pid) if parent is not None and parent.pid is not None else None


def _finished_by_others(named: Location) -> int:
    """How many fits other processes of the same program have finished there."""
    if (program := _program()) is None:
        return 0
    try:
        kept = read_object(read_file(_note(find_record(named.canonical)), SMALL_JSON_BYTES))
        theirs = ProcessId.from_json(line(kept, "program", None))
        return integer(kept, "finished", None, 0, 2**31) if theirs == program else 0
    except (OSError, SettingsError):  # nothing is there, or what a crash has left
        return 0


def _tell_others(named: Location) -> None:
    """Note for the next process of the program how many there are. Every rank of a host writes the same."""
    if (program := _program()) is None:
        return
    kept = {"program": program.to_json(), "finished": _finished[named.canonical]}
    try:
        with find_record(named.canonical).opened() as record:
            replace_file(_note(record), json.dumps(kept).encode())
    except (OSError, SettingsError) as error:
        text = "the next fit of this program at {about} is taken for this one ({error}). Give it a dirpath of its own"
        say(logging.WARNING, "fit-not-noted", text, about=named.url, error=error)


def _note(record: ServerRecord) -> Path:
    return record.folder / f"{record.key}.fits"
