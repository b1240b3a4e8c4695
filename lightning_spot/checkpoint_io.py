"""SpotCheckpointIO: a user's own ``ModelCheckpoint`` saves through the same path as our snapshots."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.host_link import leave, tiers_of
from lightning_spot.capture.writer import SnapshotWriter, store_streamed
from lightning_spot.client.starting import start
from lightning_spot.client.stores import open_store
from lightning_spot.config import SERVER_SCHEMES, check_flag, check_number, directory_of, plain_scheme, scheme_of
from lightning_spot.errors import (
    FailureReason,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SpotError,
    TierError,
    TierReason,
)
from lightning_spot.renamed import refusing_old
from lightning_spot.run.attempts import folder_info
from lightning_spot.run.location import memory_limit_bytes
from lightning_spot.say import say
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.layout import lay_out_in_any_case
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.state.loadability import load_named
from lightning_spot.state.namespaces import SpotIO
from lightning_spot.store.fsspec_client import forget_listings
from lightning_spot.store.posix import why_not_writable
from lightning_spot.store.store import Store
from lightning_spot.untrusted import is_line, plain

_NEW_SERVER_S = 30.0


class SpotCheckpointIO(SpotIO):
    """Saves checkpoints into memory and lets the local server carry them to their path.

    ``save_checkpoint`` returns when the checkpoint is committed in memory, with its checksums: many times sooner than
    a plain save. The file then appears at its path whole or not at all. Errors show at the save itself where they can
    be known, else at the next call. Reading and the end of ``fit`` wait for what is under way. Where no training runs,
    ``trainer.save_checkpoint`` returns with the file at its path.

    Beside the files lies a hidden folder ``.lightning_spot`` with the manifest of each.

    Args:
        local_server: whether a process on this host holds what is saved (default). It is started by itself and
            outlives a killed trainer. With ``False`` the trainer's own memory holds it.
        slots: number of buffers for checkpoints in this host's memory, at least 2; default 3. Each holds one complete
            checkpoint.
        memory_limit: most memory for the slots, in bytes or with a unit (``"64GiB"``); default half of this host's
            memory.
        wait_timeout_s: most seconds that a save waits until an upload has freed a slot; default 600.
        upload_timeout_s: most seconds that a read, and the end of ``fit``, wait until all files are at their paths;
            default 600.
        server_idle_timeout_s: seconds after which the local server ends once its trainer has left and all files are at
            their paths; default 60. No later trainer uses it.

    Raises:
        SettingsError: if an argument cannot be used.

    Example::

        trainer = L.Trainer(
            plugins=[SpotCheckpointIO()],
            callbacks=[ModelCheckpoint("checkpoints", monitor="val_loss", save_top_k=3, save_last=True)],
        )
    """

    @refusing_old
    def __init__(
        self,
        *,
        local_server: bool = True,
        slots: int = 3,
        memory_limit: str | float | None = None,
        wait_timeout_s: float = 600.0,
        upload_timeout_s: float = 600.0,
        server_idle_timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        check_flag("local_server", local_server)
        check_number("slots", slots, 2, whole=True)  # one stays whole while the other is filled
        check_number("wait_timeout_s", wait_timeout_s, 0)
        check_number("upload_timeout_s", upload_timeout_s, 0)
        check_number("server_idle_timeout_s", server_idle_timeout_s, 0)
        self.local_server = bool(local_server)
        self.slots = int(slots)
        self.memory_bytes = memory_limit_bytes(memory_limit)
        self.wait_timeout_s = float(wait_timeout_s)
        self.upload_timeout_s = float(upload_timeout_s)
        self.server_idle_timeout_s = float(server_idle_timeout_s)
        self._writers: dict[str, FolderWriter] = {}
        self._fit = _FitWatch()

    def of_a_fit(self) -> dict[str, Any]:
        """See :class:`~lightning_spot.state.namespaces.Copied`."""
        return {"_writers": {}, "_fit": _FitWatch()}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Commit ``checkpoint`` in memory and have it carried to ``path``.

        Raises:
            TypeError: if ``storage_options`` is given; the server reads credentials from the environment.
            TierError: if an earlier checkpoint cannot be written to its place, or this one's place cannot be made.
            SpotError: if no memory could be had in time.
        """
        if storage_options is not None:
            raise TypeError("SpotCheckpointIO takes no storage_options: set credentials in the environment")
        parent, name = _split(path)
        if scheme_of(parent) in SERVER_SCHEMES or name.startswith("."):
            super().save_checkpoint(checkpoint, path)  # a spot:// URL is refused there
            return
        if not scheme_of(parent) and (why := why_not_writable(parent)):  # else it would show in the background
            raise TierError(f"checkpoint folder {parent} {why}", tier=parent)
        trains = self._fit.trains(checkpoint)
        if not trains and parent not in self._writers:
            write_now(checkpoint, _manifest(folder_info(parent), name, checkpoint), open_store(parent))
            forget_listings(parent)
            return
        writer = self._writer(parent)
        self._raise_failures(writer, parent)
        manifest = _manifest(writer.info, name, checkpoint)
        try:
            writer.on_the_ring(lambda _: writer.write(checkpoint, manifest, self.wait_timeout_s))
        except (ServerUnreachableError, SnapshotFailedError) as error:
            if error.reason not in (TierReason.UNREACHABLE, FailureReason.TOO_LARGE):
                raise
            text = "{error}. {path} is written directly to storage; training waits"
            say(logging.WARNING, "saved-past-memory", text, about=parent, error=error, path=path)
            late = self._try_flush(parent, writer)  # what is on its way is older
            if late and error.reason is FailureReason.TOO_LARGE:
                raise TierError("; ".join(late), tier=parent) from error
            writer.write_past_memory(checkpoint, manifest, open_store(parent))
        if not trains:
            self._flush(parent)
        forget_listings(parent)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, waiting for it first if it is still on its way.

        Where it holds objects that torch does not load with ``weights_only=True``, these stay placeholders.

        Args:
            path: where it is.
            *args: as in Lightning's ``TorchCheckpointIO``, whose arguments differ between versions.
            **kwargs: likewise.
        """
        parent, name = _split(path)
        self._flush(parent)
        return load_named(super().load_checkpoint, _joined(parent, name), *args, **kwargs)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint from memory, and from its path once what was saved there before is at its own.

        Returns at once. A checkpoint that replaces this one is on its way, perhaps: both are never missing.
        """
        parent, name = _split(path)
        path = _joined(parent, name)
        if (writer := self._writers.get(parent)) is not None and not name.startswith("."):
            writer.forget(name)
            try:
                writer.on_the_ring(lambda host: host.remove(name))
                return
            except SpotError as error:
                if not writer.link.is_loss(error):  # that was said
                    text = "{about} is removed without the local server ({error})"
                    say(logging.WARNING, "removed-alone", text, about=name, error=error)
            if problems := self._try_flush(parent, writer):
                text = "{about} could not be removed: {problems}"
                say(logging.WARNING, "not-removed", text, about=path, problems="; ".join(problems))
                return
        if scheme_of(parent) not in SERVER_SCHEMES:
            forget_listings(parent)
            open_store(parent).delete(Manifest(run="-", name=name, file="", step=0, attempt=0, nbytes=0))
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Return when every checkpoint is at its path.

        Raises:
            TierError: if one is not there within ``upload_timeout_s`` (the local server goes on trying), or was
                refused there since somebody else has saved a newer one.
        """
        self._fit.ended()
        problems: list[str] = []
        for parent, writer in list(self._writers.items()):
            left = self._try_flush(parent, writer)
            problems += [f"{line}; the local server goes on trying" for line in left] if self.local_server else left
            problems += writer.refused(again=True)
            if writer.host is not None:
                leave(writer.host, complete=not left)
            writer.close()
            forget_listings(parent)
            del self._writers[parent]
        super().teardown()
        if problems:
            raise TierError("checkpoints are not at their path: " + "; ".join(problems))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _writer(self, parent: str) -> FolderWriter:
        if parent not in self._writers:
            info = folder_info(parent)
            reopen = (lambda: self._open(parent, self._writers[parent].info)) if self.local_server else None
            self._writers[parent] = FolderWriter(parent, self._open(parent, info), info, reopen)
        return self._writers[parent]

    def _open(self, parent: str, info: RunInfo) -> Host:
        host: Host
        if self.local_server:
            try:
                # One server for all folders of this process; its first folder names it.
                host = start(
                    f"files:{os.getpid()}:{next(iter(self._writers), parent)}",
                    info.text,
                    slots=self.slots,
                    memory_bytes=self.memory_bytes,
                    server_idle_timeout_s=self.server_idle_timeout_s,
                )
                host.open_run(info)
                return host
            except (ServerUnreachableError, OSError) as error:
                text = "no snapshot server could be started on this host ({error}). Checkpoints go through this process"
                say(logging.WARNING, "no-local-server", text, about=info.durable_url, error=error)
        host = InProcessHost(slots=self.slots, memory_bytes=self.memory_bytes, open_store=open_store)
        host.open_run(info)
        return host

    def _raise_failures(self, writer: FolderWriter, parent: str) -> None:
        if (health := tiers_of(writer.link).get(parent)) is None:
            return
        if health.error:
            raise TierError(f"an earlier checkpoint could not be written to {parent}: {health.error}", tier=parent)
        if health.refused and (lines := writer.refused()):
            raise TierError("; ".join(lines), tier=parent)

    def _flush(self, parent: str) -> None:
        writer = self._writers.get(parent)
        if writer is not None and (problems := self._try_flush(parent, writer) or writer.refused()):
            raise TierError("; ".join(problems), tier=parent)

    def _try_flush(self, parent: str, writer: FolderWriter) -> list[str]:
        if (host := writer.link.wait(self.upload_timeout_s)) is None:
            return [f"{parent}: the snapshot server on this host is lost, and no new one came up"]
        try:
            return host.flush(self.upload_timeout_s)
        except ServerUnreachableError as error:
            writer.link.lose(host, error)
            return [f"{parent}: {error}"]
        except SpotError as error:
            return [f"{parent}: {error}"]


def _split(path: str | Path) -> tuple[str, str]:
    """Folder (absolute path or URL) and file name of a checkpoint; the same however the place is written."""
    text = str(path)
    if not scheme_of(text):
        absolute = Path(os.path.abspath(directory_of(text)))
        return str(absolute.parent), absolute.name
    scheme, _, below = text.rstrip("/").partition("://")
    folder, _, name = below.rpartition("/")
    return f"{plain_scheme(scheme)}://{folder.rstrip('/')}", name


def _joined(parent: str, name: str) -> str:
    """The plain path of a checkpoint, see :func:`_split`."""
    return f"{parent}{name}" if parent.endswith("/") else f"{parent}/{name}"


def _manifest(info: RunInfo, name: str, checkpoint: dict[str, Any]) -> Manifest:
    if not is_line(f"{info.name}/{name}"):
        raise SettingsError(
            f"{plain(name)} in {plain(info.name)} is not saved: a name holds a line end or control character. Rename it"
        )
    return Manifest(
        run=info.name,
        run_id=info.id,
        name=name,
        file="",
        step=int(checkpoint.get("global_step", 0)),
        epoch=int(checkpoint.get("epoch", 0)),
        attempt=info.attempt,
        nbytes=0,
        created_unix_s=time.time(),
        versions={"lightning_spot": __version__, "torch": str(torch.__version__)},
    )


class _FitWatch:
    """Whether a training is under way whose end will call :meth:`SpotCheckpointIO.teardown`.

    Lightning tells a CheckpointIO nothing of its trainer. But a checkpoint says how far its loops are: whether an epoch
    is under way, and after an exception, when it stays so for ever, whether training has gone on since.
    """

    def __init__(self) -> None:
        self._has_ended = False
        self._stands_at: Any = None

    def ended(self) -> None:
        """The plugin was torn down."""
        self._has_ended, self._stands_at = True, None

    def trains(self, checkpoint: dict[str, Any]) -> bool:
        """Whether training goes on; also said of a checkpoint that is not a Trainer's, by whoever calls us directly."""
        try:
            fit = checkpoint["loops"]["fit_loop"]
            epoch, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
            is_under_way = epoch["current"]["ready"] > epoch["current"]["completed"]
            place = epoch["total"]["ready"], batches["total"]["ready"]
        except (KeyError, TypeError):
            return True
        if not is_under_way:
            return False
        if self._has_ended:
            if self._stands_at in (None, place):
                self._stands_at = place
                return False
            self._has_ended = False
        return True


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

    def __init__(self, folder: str, host: Host, info: RunInfo, reconnect: Callable[[], Host] | None) -> None:
        super().__init__(host, reconnect)
        self.info = info
        self._folder = folder
        self._first_attempt = info.attempt
        self._refused: dict[str, Manifest] = {}
        self._warned_of: set[tuple[str, float]] = set()

    def on_the_ring(self, action: Callable[[Host], object]) -> None:
        """Do something with the ring; where it is lost meanwhile, once more with the one that takes its slots over.

        Raises:
            SpotError: if that fails.
        """
        for last_try in (False, True):
            if (host := self.link.wait(_NEW_SERVER_S)) is None:
                raise self.link.missing()
            try:
                action(host)
                return
            except ServerUnreachableError as error:
                self.link.lose(host, error)
                if last_try:
                    raise

    def write(self, checkpoint: dict[str, Any], manifest: Manifest, wait_s: float) -> None:
        """Commit a file in memory; it goes to the folder from there.

        Raises:
            SpotError: if it is not committed in the end; nothing that is saved already is touched.
        """
        self.begin(checkpoint, manifest, wait_s=wait_s, destinations=[self._folder]).result()
        self.forget(manifest.name)

    def write_past_memory(self, checkpoint: dict[str, Any], manifest: Manifest, store: Store) -> None:
        """Store a file from this process, under an attempt of its own: what a lost server still has is older.

        Raises:
            SpotError: if it is not there in the end.
        """
        self.info = replace(self.info, attempt=self.info.attempt + 1)
        write_now(checkpoint, replace(manifest, attempt=self.info.attempt), store)
        self.forget(manifest.name)
        self.link.ask(lambda host: host.open_run(self.info), None)

    def forget(self, name: str) -> None:
        """A file was saved anew, or is to be removed: nothing is to be said of what was saved before."""
        self._refused.pop(name, None)

    def refused(self, *, again: bool = False) -> list[str]:
        """What was refused at its place for good, one line a file; what was said before only with ``again``."""
        nothing: list[Manifest] = []
        for manifest in self.link.ask(lambda host: host.refused(), nothing):
            if manifest.attempt >= self._first_attempt:
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
    store_streamed(lay_out_in_any_case(checkpoint), manifest, store)
    try:
        store.sweep_files(manifest)
    except SpotError as error:
        text = "files that killed writers left at {about} stay until the next save: {error}"
        say(logging.WARNING, "leftovers-stay", text, about=store.url, error=error)
