"""Writes the files of one folder that a user named, and knows which of them did not get to their place for good."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_spot.capture.streamed_file import store_streamed
from lightning_spot.capture.writer import Outliner, SnapshotWriter
from lightning_spot.errors import SpotError, TierError, TierReason
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.host import Host
from lightning_spot.memory.runs import RunInfo
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)


class FolderWriter(SnapshotWriter):
    """Writes the files of one folder.

    Args:
        folder: absolute path or URL.
        host: the ring.
        info: what it was told of the folder.
        reconnect: see :class:`SnapshotWriter`.

    Attributes:
        info: as above; its attempt fences writers of earlier processes.
    """

    _leases_ahead = False  # files come seldom

    def __init__(self, folder: str, host: Host, info: RunInfo, reconnect: Callable[[], Host] | None) -> None:
        super().__init__(host, reconnect)
        self.info = info
        self._folder = folder
        self._first_attempt = info.attempt
        self._refused: dict[str, Manifest] = {}
        self._stored_past: dict[str, int] = {}  # attempt of what went past the ring, by name
        self._warned_of: set[tuple[str, float]] = set()

    def write(self, checkpoint: dict[str, Any], manifest: Manifest, wait_s: float) -> None:
        """Commit a file in memory; it goes to the folder from there.

        Raises:
            SpotError: if it is not committed in the end; nothing that is saved already is touched.
        """
        self.begin(checkpoint, manifest, wait_s=wait_s, destinations=[self._folder]).result()
        self.forget(manifest.name)

    def write_past_memory(self, checkpoint: dict[str, Any], manifest: Manifest, store: Store) -> None:
        """Store a file from this process, under an attempt of its own: what is still in memory is older.

        Raises:
            SpotError: if it is not there in the end.
        """
        self.info = replace(self.info, attempt=self.info.attempt + 1)
        newer = replace(manifest, attempt=self.info.attempt)
        try:
            self.store_past_memory(checkpoint, newer, store)
        except TierError as error:
            if error.reason is not TierReason.OVERTAKEN:
                raise
            # By what is in memory: that was on its way before this attempt was begun, and now is over.
            self.store_past_memory(checkpoint, newer, store)
        self.forget(manifest.name)
        self._stored_past[manifest.name] = self.info.attempt
        self.link.ask(lambda host: host.open_run(self.info), None)
        _sweep(store)

    def forget(self, name: str) -> None:
        """A file was saved anew, or is to be removed: nothing is to be said of what was saved before."""
        self._refused.pop(name, None)

    def refused(self, *, again: bool = False) -> list[str]:
        """What was refused at its place for good, one line a file; what was said before only with ``again``."""
        nothing: list[Manifest] = []
        for manifest in self.link.ask(lambda host: host.refused(), nothing):
            if manifest.attempt >= max(self._first_attempt, self._stored_past.get(manifest.name, 0)):
                self._refused[manifest.name] = manifest
        lines = []
        for manifest in self._refused.values():
            version = (manifest.name, manifest.created_unix_s)
            if again or version not in self._warned_of:
                self._warned_of.add(version)
                lines.append(
                    f"{manifest.name} of step {manifest.step} is not in {self._folder}: somebody who began to save"
                    " there later has written a file of that name. Give each training a folder of its own"
                )
        return lines


def write_now(checkpoint: dict[str, Any], manifest: Manifest, store: Store) -> None:
    """Store a file from this process; when this returns it is there.

    Raises:
        SpotError: if it is not; what was there before is there still.
    """
    outliner = Outliner(lambda _key, message, *facts: logger.warning(message, *facts))
    store_streamed(outliner.lay_out(checkpoint), manifest, store)
    _sweep(store)


def _sweep(store: Store) -> None:
    try:
        store.sweep_files()
    except SpotError as error:
        logger.warning("lightning_spot: what killed writers left at %s stays for now: %s", store.url, error)
