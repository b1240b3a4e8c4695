"""SpotCheckpointIO: a user's own ``ModelCheckpoint`` saves through the same path as our snapshots."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.embedded import start
from lightning_spot.client.stores import open_store
from lightning_spot.config import IDLE_TIMEOUT_S
from lightning_spot.errors import (
    NodeUnreachable,
    SettingsError,
    SnapshotTooLarge,
    SpotError,
    TierError,
)
from lightning_spot.exact.namespaces import SpotIO
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.host import Host, InProcessHost
from lightning_spot.memory.runs import RunInfo
from lightning_spot.run.files import folder_info
from lightning_spot.run.location import AUTO, memory_limit_bytes

logger = logging.getLogger(__name__)

_NEW_NODE_S = 30.0


class SpotCheckpointIO(SpotIO):
    """Saves checkpoints into memory and lets a node on this host carry them to their path.

    ``save_checkpoint`` returns when the checkpoint is committed in memory, with its checksums: many times sooner than
    a plain save. The file then appears at its path whole or not at all. Errors show at the save itself where they can
    be known, else at the next call. Reading, removing and the end of ``fit`` wait for what is under way.

    Args:
        memory: ``"auto"`` for a node on this host, which outlives a killed trainer; ``None`` for a ring inside this
            process.
        slots: slots of the ring, at least 2.
        memory_limit: most memory for slots, such as ``"64GiB"``; default half of the host's.
        wait_timeout_s: how long a save waits for a clean slot, seconds.
        flush_timeout_s: how long reading and teardown wait for the flusher, seconds.
        idle_timeout_s: the node on this host ends when no trainer came for so long, seconds.

    Raises:
        SettingsError: if an argument cannot be used.

    Example::

        trainer = L.Trainer(
            plugins=[SpotCheckpointIO()],
            callbacks=[ModelCheckpoint("checkpoints", monitor="val_loss", save_top_k=3, save_last=True)],
        )
    """

    def __init__(
        self,
        *,
        memory: str | None = AUTO,
        slots: int = 3,
        memory_limit: str | int | None = None,
        wait_timeout_s: float = 600.0,
        flush_timeout_s: float = 600.0,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        super().__init__()
        if memory not in (AUTO, None):
            raise SettingsError(f"memory={memory!r}: SpotCheckpointIO takes 'auto' or None")
        if slots < 2:
            raise SettingsError(f"slots={slots}: a ring needs at least 2 slots")
        self.memory = memory
        self.slots = slots
        self.memory_bytes = memory_limit_bytes(memory_limit)
        self.wait_timeout_s = wait_timeout_s
        self.flush_timeout_s = flush_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self._writers: dict[str, FolderWriter] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Commit ``checkpoint`` in memory and have it carried to ``path``.

        Raises:
            TypeError: if ``storage_options`` is given; the node reads credentials from the environment.
            TierError: if an earlier checkpoint cannot be written to its place, or this one's place cannot be made.
            SpotError: if no memory could be had in time.
        """
        if storage_options is not None:
            raise TypeError("SpotCheckpointIO takes no storage_options: set credentials in the environment")
        parent, name = _split(path)
        if urlsplit(parent).scheme == "spot" or name.startswith("."):
            super().save_checkpoint(checkpoint, path)  # a node is memory already
            return
        _check_folder(parent)
        writer = self._writer(parent)
        self._raise_failures(writer, parent)
        manifest = Manifest(
            run=writer.info.name,
            run_id=writer.info.id,
            name=name,
            file="",
            step=int(checkpoint.get("global_step", 0)),
            epoch=int(checkpoint.get("epoch", 0)),
            attempt=writer.info.attempt,
            nbytes=0,
            created_unix_s=time.time(),
            versions={"lightning_spot": __version__, "torch": str(torch.__version__)},
        )
        try:
            self._commit(writer, checkpoint, manifest, parent)
        except (NodeUnreachable, SnapshotTooLarge) as error:
            logger.warning("lightning_spot: %s; saving %s past the memory of this host", error, path)
            self._save_past_memory(writer, checkpoint, manifest, parent)

    def _commit(self, writer: FolderWriter, checkpoint: dict[str, Any], manifest: Manifest, parent: str) -> None:
        """Commit in memory; where the node is lost meanwhile, at the one that takes its slots over."""
        for last_try in (False, True):
            try:
                writer.begin(checkpoint, manifest, wait_s=self.wait_timeout_s, destinations=[parent]).result()
                return
            except NodeUnreachable:
                if last_try or writer.link.wait(_NEW_NODE_S) is None:
                    raise

    def _save_past_memory(
        self, writer: FolderWriter, checkpoint: dict[str, Any], manifest: Manifest, parent: str
    ) -> None:
        """Save from this process, part by part, under an attempt of its own: what is still in memory is older."""
        writer.info = replace(writer.info, attempt=writer.info.attempt + 1)
        writer.store_past_memory(checkpoint, replace(manifest, attempt=writer.info.attempt), open_store(parent))
        writer.link.ask(lambda host: host.open_run(writer.info), None)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, waiting for it first if it is still on its way.

        Args:
            path: where it is.
            *args: as in Lightning's ``TorchCheckpointIO``, whose arguments differ between versions.
            **kwargs: likewise.
        """
        self._flush(_split(path)[0])
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint from memory, and from its path once what was saved there before is at its own.

        Returns at once. A checkpoint that replaces this one is on its way, perhaps: both are never missing.
        """
        parent, name = _split(path)
        if (writer := self._writers.get(parent)) is not None and not name.startswith("."):
            if self._remove(writer, name):
                return
            if problems := self._try_flush(parent, writer):
                logger.warning("lightning_spot: %s is not removed: %s", path, "; ".join(problems))
                return
        if urlsplit(parent).scheme != "spot":
            open_store(parent).delete(Manifest(run="-", name=name, file="", step=0, attempt=0, nbytes=0))
        super().remove_checkpoint(path)

    def _remove(self, writer: FolderWriter, name: str) -> bool:
        """Have the node remove a file; where it is lost, the one that takes its slots over. Whether that was done."""
        for _try in range(2):
            if (host := writer.link.wait(_NEW_NODE_S)) is None:
                return False
            try:
                host.remove(name)
                return True
            except NodeUnreachable as error:
                writer.link.lose(host, error)
            except SpotError as error:
                logger.warning("lightning_spot: %s is removed without the node (%s)", name, error)
                return False
        return False

    def teardown(self) -> None:
        """Return when every checkpoint is at its path.

        Raises:
            TierError: if one is not there within ``flush_timeout_s``; the node on this host goes on trying.
        """
        problems: list[str] = []
        for parent, writer in list(self._writers.items()):
            problems += self._try_flush(parent, writer)
            host = writer.host
            if host is not None:
                _quietly(lambda host=host, left=bool(problems): host.leave(complete=not left))  # type: ignore[misc]
            writer.close()
            del self._writers[parent]
        super().teardown()
        if problems:
            raise TierError("checkpoints are in memory but not at their path: " + "; ".join(problems))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _writer(self, parent: str) -> FolderWriter:
        if parent not in self._writers:
            info = folder_info(parent)
            reopen = (lambda: self._open(parent, self._writers[parent].info)) if self.memory else None
            self._writers[parent] = FolderWriter(self._open(parent, info), info, reopen)
        return self._writers[parent]

    def _open(self, parent: str, info: RunInfo) -> Host:
        host: Host
        if self.memory is not None and urlsplit(parent).scheme != "memory":
            try:
                # One node for all folders of this process; its first folder names it.
                host = start(
                    f"files:{os.getpid()}:{next(iter(self._writers), parent)}",
                    info.text,
                    slots=self.slots,
                    memory_bytes=self.memory_bytes,
                    idle_timeout_s=self.idle_timeout_s,
                )
                host.open_run(info)
                return host
            except (NodeUnreachable, OSError) as error:
                logger.warning("lightning_spot: no memory node on this host (%s); saving through this process", error)
        host = InProcessHost(slots=self.slots, memory_bytes=self.memory_bytes, open_store=open_store)
        host.open_run(info)
        return host

    def _raise_failures(self, writer: FolderWriter, parent: str) -> None:
        tiers = writer.link.ask(lambda host: host.tiers(), None) or {}
        if (health := tiers.get(parent)) is not None and health.error:
            raise TierError(f"an earlier checkpoint could not be written to {parent}: {health.error}", tier=parent)

    def _flush(self, parent: str) -> None:
        writer = self._writers.get(parent)
        if writer is not None and (problems := self._try_flush(parent, writer)):
            raise TierError("; ".join(problems), tier=parent)

    def _try_flush(self, parent: str, writer: FolderWriter) -> list[str]:
        if (host := writer.link.wait(self.flush_timeout_s)) is None:
            return [f"{parent}: the memory node on this host is lost, and no new one came up"]
        try:
            return host.flush(self.flush_timeout_s)
        except NodeUnreachable as error:
            writer.link.lose(host, error)
            return [f"{parent}: {error}"]
        except SpotError as error:
            return [f"{parent}: {error}"]


def _split(path: str | Path) -> tuple[str, str]:
    """Folder (absolute path or URL) and file name of a checkpoint."""
    text = str(path)
    if "://" not in text or text.startswith("file://"):
        absolute = Path(os.path.abspath(text.removeprefix("file://")))
        return str(absolute.parent), absolute.name
    folder, _, name = text.rstrip("/").rpartition("/")
    return folder, name


class FolderWriter(SnapshotWriter):
    """Writes the files of one folder.

    Args:
        host: the ring.
        info: what it was told of the folder.
        reconnect: see :class:`SnapshotWriter`.

    Attributes:
        info: as above; its attempt fences writers of earlier processes.
    """

    def __init__(self, host: Host, info: RunInfo, reconnect: Callable[[], Host] | None) -> None:
        super().__init__(host, reconnect)
        self.info = info


def _check_folder(parent: str) -> None:
    """Fail at the save, not in the background, where the folder cannot be written to."""
    if "://" in parent:
        return
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as error:
        raise TierError(f"checkpoint folder {parent} cannot be made: {error.strerror}", tier=parent) from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TierError(f"checkpoint folder {parent} is not writable", tier=parent)


def _quietly(leave: Callable[[], None]) -> None:
    try:
        leave()
    except SpotError as error:
        logger.debug("the node has gone already: %s", error)
