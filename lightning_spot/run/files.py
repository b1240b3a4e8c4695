"""A folder of users' files as a run: which attempt a process that saves there is. Nothing is written for it."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_spot.errors import CorruptManifest, TierError
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.memory.runs import RunInfo
from lightning_spot.tiers.filesystem import open_filesystem, tier_errors

logger = logging.getLogger(__name__)

_EPOCH_UNIX_S = 1_577_836_800  # 2020-01-01: attempts are numbers below 10**9
_HIDDEN = re.compile(rf"\..+\.{re.escape(MANIFEST_FILE)}")
_MOST_READ = 64
_READERS = 16


def folder_info(folder: str, now_unix_s: float | None = None) -> RunInfo:
    """What a node is told of a folder: to it, the folder is a run, and each process that saves there an attempt.

    The attempt is the time in seconds, or one more than that of any file that is there. So what a dead process left
    with its node never replaces what a later one has saved.

    Args:
        folder: absolute path or URL.
        now_unix_s: the time; default now.
    """
    key = hashlib.sha256(folder.encode()).hexdigest()[:12]
    now = int(time.time() if now_unix_s is None else now_unix_s)
    return RunInfo(
        name=f"files-{key}",
        id=key,
        location=folder if "://" in folder else f"file://{folder}",
        attempt=max(now - _EPOCH_UNIX_S, 1 + _highest_attempt(folder)),
        token=secrets.token_hex(8),
        keep=1,
        durable_url=folder,
        pid=os.getpid(),
        host=os.uname().nodename,
    )


def _highest_attempt(folder: str) -> int:
    """Highest attempt of the files that have manifests in a folder; 0 if none, or if it cannot be read."""
    try:
        with tier_errors(folder):
            files, root = open_filesystem(folder)
            names = [str(path).rpartition("/")[2] for path in _listed(files, root)]
            hidden = [name for name in names if _HIDDEN.fullmatch(name)][:_MOST_READ]
            with ThreadPoolExecutor(_READERS) as pool:
                return max(pool.map(lambda name: _attempt_in(files, f"{root}/{name}"), hidden), default=0)
    except TierError as error:
        logger.warning("lightning_spot: %s; the clock alone orders what is saved there", error)
        return 0


def _listed(files: Any, root: str) -> list[Any]:
    try:
        return list(files.ls(root, detail=False))
    except FileNotFoundError:
        return []


def _attempt_in(files: Any, path: str) -> int:
    try:
        return Manifest.from_json(files.cat_file(path)).attempt
    except (FileNotFoundError, CorruptManifest):
        return 0
