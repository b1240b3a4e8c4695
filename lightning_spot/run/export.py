"""A snapshot that one process has opened is shared with others of its host and user, which read the same memory.

The first rank of each host opens the snapshot, once, and notes in a file of the runtime directory which descriptors it
has of it. The other ranks wait for that note, and open the same memory through ``/proc``. All ranks meet before the
first one goes on, so its descriptors stay open for as long as others may look for them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_spot.errors import MalformedError, SettingsError, SpotError, TierError
from lightning_spot.protocol.ownership import read_file, replace_file
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import find_record
from lightning_spot.protocol.wire import error_body, error_from_body
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.say import say
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Section
from lightning_spot.untrusted import LARGE_BYTES, read_object, sealed_json, unseal

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_FACTS = ("tier", "url", "fds", "in_memory", "sealed", "sections")


class NotExportedError(TierError):
    """What another process has opened cannot be had from it."""


@dataclass(frozen=True, slots=True)
class ExporterAddress:
    """How an exporter is reached.

    Attributes:
        host: the same for processes that can share memory.
        note: path of the file that says what it has opened.
        process: the exporter; ``None`` if nothing can be had from it.
    """

    host: str
    note: str = ""
    process: ProcessId | None = None


def this_host() -> str:
    """Tells hosts apart, whatever their names: one boot of one kernel, and one network of it."""
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NETWORK.stat().st_ino}"
    except OSError as error:
        logger.debug("it cannot be told which processes share a host: %s", error)
        return secrets.token_hex(16)


class Exporter:
    """Lets processes of its host and user have what this one has opened.

    Args:
        url: durable directory or URL of the run.

    Attributes:
        address: how it is reached.
    """

    def __init__(self, url: str) -> None:
        self.address = ExporterAddress(secrets.token_hex(16))
        try:
            record, process = find_record(url), ProcessId.of(os.getpid())
            if process is not None:
                self._note = record.folder / f"{record.key}.opened-{secrets.token_hex(8)}"
                self._say(0)
                # Containers of one machine do not see each other's processes.
                self.address = ExporterAddress(f"{this_host()} {process.namespace}", str(self._note), process)
        except (OSError, SettingsError) as error:
            logger.debug("no memory can be shared on this host: %s", error)

    def export(self, turn: int, what: OpenSnapshot | SpotError) -> None:
        """Let others have a snapshot, or why there is none, who ask for that turn.

        Args:
            turn: counts what was tried, from 1.
            what: the snapshot; it stays open until the others have opened it.
        """
        if self.address.process is None:
            return
        if isinstance(what, OpenSnapshot):
            said: dict[str, Any] = {name: getattr(what, name) for name in _FACTS}
        else:
            said = {"failed": error_body(what)}
        try:
            self._say(turn, said)
        except (OSError, SettingsError) as error:  # who asks finds nothing, and reads for itself
            say(logging.WARNING, "not-exported", "a snapshot cannot go to other ranks: {error}", error=error)
            self.close()

    def _say(self, turn: int, said: Mapping[str, Any] | None = None) -> None:
        replace_file(self._note, sealed_json({"turn": turn, **(said or {})}).encode())

    def close(self) -> None:
        """Let others have nothing more. A second call does nothing."""
        if self.address.process is not None:
            with contextlib.suppress(OSError):  # it is swept later
                self._note.unlink(missing_ok=True)


def import_snapshot(address: ExporterAddress, turn: int, manifest: Manifest) -> OpenSnapshot:
    """Open what an exporter of this host has opened. It was checked there; the memory is the same.

    Args:
        address: of the exporter.
        turn: see :meth:`Exporter.export`.
        manifest: of the snapshot.

    Raises:
        NotExportedError: if there is no way to that process, it has ended, or its note is damaged.
        SpotError: why it could not open the snapshot.
    """
    if (process := address.process) is None:
        raise NotExportedError("the rank that opens the snapshot cannot share its memory")
    fds: list[int] = []
    try:
        said = _awaited(process, address.note, turn)
        for number in said.get("fds", ()):
            path = f"/proc/{process.pid}/fd/{number}"
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        _check_alive(process)  # else its number may be another process' by now
    except (OSError, SettingsError, MalformedError) as error:
        for fd in fds:
            os.close(fd)
        raise NotExportedError(f"the rank that opens the snapshot cannot be asked ({error})") from error
    if "failed" in said:
        raise error_from_body(500, json.dumps(said["failed"]).encode(), "")
    sections = [Section(*section) for section in said["sections"]]
    return OpenSnapshot(manifest, said["tier"], said["url"], fds, said["in_memory"], said["sealed"], sections)


def _awaited(process: ProcessId, note: str, turn: int) -> dict[str, Any]:
    """What an exporter says of a turn, once it does."""
    while True:
        _check_alive(process)
        said = read_object(read_file(Path(note), LARGE_BYTES), LARGE_BYTES)
        if not unseal(said):
            raise MalformedError("its note has no checksum")
        if said["turn"] == turn:
            return said
        if said["turn"] > turn:
            raise ProcessLookupError("it has given it up")
        time.sleep(_POLL_S)


def _check_alive(process: ProcessId) -> None:
    if not process.alive:
        raise ProcessLookupError("it has ended")
