"""Small JSON records beside the snapshots of a run: how each attempt went."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_spot.errors import MalformedError
from lightning_spot.goodput.ledger import AttemptRecord
from lightning_spot.say import say
from lightning_spot.tiers.fences import ATTEMPTS_DIR
from lightning_spot.tiers.fsspec_client import make_parent, open_filesystem, tier_errors
from lightning_spot.tiers.object_files import write_small
from lightning_spot.tiers.posix import temporary_name
from lightning_spot.untrusted import plain, read_sealed, sealed_json

_RECORD = re.compile(r"attempt-(\d{1,9})\.progress\.json")
_READERS = 16
_MOST_DAMAGED = 8
_MOST_BYTES = 2**22


def write_record(run_url: str, attempt: int, record: dict[str, Any]) -> None:
    """Write how an attempt goes, in place of what was written before. A reader never sees half of it.

    Args:
        run_url: durable directory or fsspec URL of the run.
        attempt: its number.
        record: plain values.

    Raises:
        TierError: if the tier fails.
    """
    data = sealed_json(record).encode()
    with tier_errors(run_url):
        files, root = open_filesystem(run_url)
        path = f"{root}/{ATTEMPTS_DIR}/attempt-{attempt:04d}.progress.json"
        make_parent(files, path)
        write_small(files, path, data, f"{root}/{ATTEMPTS_DIR}/{temporary_name(attempt, '')}")


def newest_record(run_url: str, before: int | None = None) -> AttemptRecord | None:
    """The record of the newest attempt, ``None`` if there is none: one listing and one read, however many there are.

    Args:
        run_url: durable directory or fsspec URL of the run.
        before: only attempts before this one.

    Raises:
        TierError: if the tier fails.
    """
    with tier_errors(run_url):
        files, paths = _listed(run_url)
        older = [item for item in paths if before is None or item[0] < before]
        for attempt, path in reversed(older[-_MOST_DAMAGED:]):
            if (record := _read(files, path, attempt)) is not None:
                return record
    return None


def read_records(run_url: str) -> list[AttemptRecord]:
    """The records of all attempts that are listed, the first first. What is damaged is left out, and logged.

    Raises:
        TierError: if the tier fails.
    """
    with tier_errors(run_url):
        files, paths = _listed(run_url)
        with ThreadPoolExecutor(_READERS) as pool:
            found = pool.map(lambda item: _read(files, item[1], item[0]), paths)
            return [record for record in found if record is not None]


def _listed(run_url: str) -> tuple[Any, list[tuple[int, str]]]:
    files, root = open_filesystem(run_url)
    try:
        found = files.ls(f"{root}/{ATTEMPTS_DIR}", detail=True)
    except FileNotFoundError:
        return files, []
    names = [item["name"] for item in found if item["type"] == "file"]  # a pipe of that name would keep us for ever
    matches = ((str(name), _RECORD.fullmatch(str(name).rpartition("/")[2])) for name in names)
    return files, sorted((int(match[1]), name) for name, match in matches if match is not None)


def _read(files: Any, path: str, attempt: int) -> AttemptRecord | None:
    try:
        record = AttemptRecord.from_dict(read_sealed(files.cat_file(path, start=0, end=_MOST_BYTES + 1), _MOST_BYTES))
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
            about=plain(path),
            attempt=attempt,
            error=error,
        )
        return None
