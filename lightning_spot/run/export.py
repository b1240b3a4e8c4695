"""A snapshot that one process has opened is shared with others of its host and user, which read the same memory.

The first rank of each host opens the snapshot, once, and says which descriptors it has of it. The other ranks open the
same memory through ``/proc``. All ranks meet before the first one goes on, so its descriptors stay open meanwhile.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from lightning_spot.errors import TierError
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Section

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")


class NotExportedError(TierError):
    """What another process has opened cannot be had from it."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a process has opened of a snapshot: its number, and what of :class:`OpenSnapshot` others need."""

    pid: int
    tier: str
    url: str
    fds: tuple[int, ...]
    in_memory: bool
    sealed: bool
    sections: tuple[Section, ...]


def this_host() -> str:
    """Tells hosts apart, whatever their names: one boot of one kernel, one network, and processes that see each other.

    Containers of one machine do not see each other's.
    """
    try:
        inodes = [(_NAMESPACES / name).stat().st_ino for name in ("net", "pid")]
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {inodes}"
    except OSError as error:
        logger.debug("it cannot be told which processes share a host: %s", error)
        return secrets.token_hex(16)


def exported(snapshot: OpenSnapshot) -> Exported:
    """What others need to have a snapshot that stays open until they have opened it."""
    fds, sections = tuple(snapshot.fds), tuple(snapshot.sections)
    return Exported(os.getpid(), snapshot.tier, snapshot.url, fds, snapshot.in_memory, snapshot.sealed, sections)


def import_snapshot(said: Exported, manifest: Manifest) -> OpenSnapshot:
    """Open what a process of this host has opened. It was checked there; the memory is the same.

    Args:
        said: what it has; it waits meanwhile.
        manifest: of the snapshot.

    Raises:
        NotExportedError: if it cannot be had.
    """
    snapshot = OpenSnapshot(manifest, said.tier, said.url, [], said.in_memory, said.sealed, list(said.sections))
    try:
        for number in said.fds:
            snapshot.fds.append(os.open(f"/proc/{said.pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        snapshot.close()
        raise NotExportedError(f"what another rank of this host has opened cannot be had ({error})") from error
    return snapshot
