"""Small JSON records beside the snapshots of a run: how each attempt went."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import fsspec

from lightning_spot.errors import TierError
from lightning_spot.tiers.store import ATTEMPTS_DIR

logger = logging.getLogger(__name__)

_RECORD = re.compile(r"attempt-(\d+)\.progress\.json")


def write_record(run_url: str, attempt: int, record: dict[str, Any]) -> None:
    """Write how an attempt goes, in place of what was written before.

    Args:
        run_url: durable directory or fsspec URL of the run.
        attempt: its number.
        record: plain values.

    Raises:
        TierError: if the tier fails.
    """
    try:
        files, root = fsspec.core.url_to_fs(run_url)
        folder = f"{root}/{ATTEMPTS_DIR}"
        files.makedirs(folder, exist_ok=True)
        path = f"{folder}/attempt-{attempt:04d}.progress.json"
        data = json.dumps(record).encode()
        if "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)):
            files.pipe_file(f"{path}.new", data)  # a reader never sees half of it
            files.mv(f"{path}.new", path)
        else:
            files.pipe_file(path, data)
    except Exception as error:  # every fsspec implementation has errors of its own
        raise TierError(f"the record of attempt {attempt} cannot be written to {run_url}: {error}") from error


def read_records(run_url: str) -> list[dict[str, Any]]:
    """The records of all attempts of a run, the first attempt first. What cannot be read is left out, and logged.

    Raises:
        TierError: if the tier fails.
    """
    try:
        files, root = fsspec.core.url_to_fs(run_url)
        folder = f"{root}/{ATTEMPTS_DIR}"
        files.invalidate_cache(folder)
        names = files.ls(folder, detail=False) if files.isdir(folder) else []
        matches = ((name, _RECORD.fullmatch(name.rpartition("/")[2])) for name in names)
        found = [(int(match[1]), files.cat_file(name)) for name, match in matches if match is not None]
    except Exception as error:  # as above
        raise TierError(f"the records of attempts cannot be read from {run_url}: {error}") from error
    records = []
    for attempt, data in sorted(found):
        try:
            records.append(dict(json.loads(data)))
        except (ValueError, TypeError) as error:
            logger.warning("lightning_spot: the record of attempt %d in %s is damaged (%s)", attempt, run_url, error)
    return records
