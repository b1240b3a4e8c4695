"""A folder of users' files as a run: which attempt a process that saves there is. Nothing is written for it."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_spot.errors import CorruptSnapshotError, TierError
from lightning_spot.image.manifest import MANIFEST_FILE, OWN_DIR, Manifest
from lightning_spot.memory.runs import EPOCH_UNIX_S, RunInfo, files_name
from lightning_spot.say import say
from lightning_spot.tiers.fsspec_client import open_filesystem, tier_errors, time_of

_MOST_READ = 2000
_READERS = 32

_attempts: dict[str, int] = {}  # attempts of this process, by folder
_attempts_lock = threading.Lock()


def folder_info(folder: str, now_unix_s: float | None = None) -> RunInfo:
    """A user's folder as a node knows it: the folder is a run, and whoever begins to save there is an attempt.

    The attempt is the time in seconds, or one more than that of any file that is there, or that was given here before.
    So what is left with the node of somebody before never replaces what is saved from now on.

    Args:
        folder: absolute path or URL.
        now_unix_s: the time; default now.
    """
    key = hashlib.sha256(folder.encode()).hexdigest()[:12]
    now = int(time.time() if now_unix_s is None else now_unix_s)
    highest = _highest_attempt(folder)
    with _attempts_lock:
        _attempts[key] = attempt = 1 + max(now - EPOCH_UNIX_S - 1, highest, _attempts.get(key, 0))
    return RunInfo(
        name=files_name(key),
        id=key,
        location=folder if "://" in folder else f"file://{folder}",
        attempt=attempt,
        token=secrets.token_hex(8),
        keep=1,
        durable_url=folder,
        is_claimed=False,
        pid=os.getpid(),
        host=os.uname().nodename,
    )


def _highest_attempt(folder: str) -> int:
    """Highest attempt of the files that have manifests in a folder; 0 if none, or if it cannot be read.

    Of very many the newest are read: a later attempt than theirs would have written something newer.
    """
    try:
        with tier_errors(folder):
            files, root = open_filesystem(folder)
            facts = (fact for fact in _listed(files, f"{root}/{OWN_DIR}") if fact["name"].endswith(f".{MANIFEST_FILE}"))
            newest = sorted(facts, key=time_of, reverse=True)
            with ThreadPoolExecutor(_READERS) as pool:
                return max(pool.map(lambda fact: _attempt_in(files, fact["name"]), newest[:_MOST_READ]), default=0)
    except TierError as error:
        text = "{error}; the clock alone orders what is saved there"
        say(logging.WARNING, "manifests-not-read", text, about=folder, error=error)
        return 0


def _listed(files: Any, folder: str) -> list[dict[str, Any]]:
    try:
        return list(files.ls(folder, detail=True))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _attempt_in(files: Any, path: str) -> int:
    try:
        return Manifest.from_json(files.cat_file(path)).attempt
    except (FileNotFoundError, CorruptSnapshotError):
        return 0
    except Exception as error:  # every file system has errors of its own: one manifest hides no other
        say(logging.WARNING, "manifest-not-read", "{about} cannot be read ({error})", about=path, error=error)
        return 0
