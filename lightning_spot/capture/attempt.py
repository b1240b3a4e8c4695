"""One attempt of a run, on the rank that writes it: its number, its ring, its writer, its end."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.safety import Safety
from lightning_spot.capture.tensors import tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import Fenced, RingFull, SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.host import Host, run_info
from lightning_spot.run.location import Location

_OUTLINE_BYTES = 4 * 1024 * 1024  # everything in a checkpoint that is no tensor, generously
_PER_TENSOR_BYTES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSettings:
    """What a ring on this host is opened with.

    Attributes:
        slots: of the ring.
        memory_bytes: limit of their memory.
        idle_timeout_s: its node ends when no trainer came for so long.
        keep: snapshots that each tier keeps.
        strict: whether to raise where a warning would do.
    """

    slots: int
    memory_bytes: int
    idle_timeout_s: float
    keep: int
    strict: bool


class Attempt:
    """One attempt of a run. Made once ``fit`` begins; :meth:`finish` ends it.

    Args:
        location: where the run goes.
        settings: of the ring.

    Raises:
        SpotError: if the run cannot be opened.

    Attributes:
        number: of the attempt, from 1.
        writer: takes the snapshots.
        fenced: whether a later attempt has taken the run over.
    """

    def __init__(self, location: Location, settings: RingSettings) -> None:
        location.check()
        self.location = location
        self.fenced = False
        self._settings = settings
        host = self._open_host()
        self.number = host.open_run(run_info(location.name, location.destinations, settings.keep, 0)).attempt
        self.writer = SnapshotWriter(host, self._reopen if location.embedded else None)
        self.safety = Safety(self.writer)

    def warm(self, state: Any) -> None:
        """Have slots made in the background, large enough for the tensors of ``state`` and what goes with them."""
        tensors = list(tensors_in(state))
        nbytes = sum(tensor.numel() * tensor.element_size() + _PER_TENSOR_BYTES for tensor in tensors)
        self.writer.warm(nbytes + _OUTLINE_BYTES, cuda=any(tensor.device.type == "cuda" for tensor in tensors))

    def write(
        self,
        checkpoint: dict[str, Any],
        *,
        owned: set[int],
        step: int,
        epoch: int,
        world_size: int,
        complete: bool = False,
        wait_s: float,
    ) -> None:
        """Begin a snapshot. What keeps it from being taken is said once, or raised with ``strict``.

        Args:
            checkpoint: what to save.
            owned: addresses of storages that only the optimizer changes.
            step: Lightning's ``global_step``.
            epoch: Lightning's ``current_epoch``.
            world_size: number of ranks.
            complete: whether the run is at its end.
            wait_s: how long to wait for a clean slot.
        """
        manifest = Manifest(
            run=self.location.name,
            name=snapshot_name(step, self.number, complete=complete),
            step=step,
            attempt=self.number,
            nbytes=0,
            epoch=epoch,
            complete=complete,
            created_unix_s=time.time(),
            world_size=world_size,
            versions=_versions(),
        )
        try:
            self.writer.begin(checkpoint, manifest, owned=owned, wait_s=wait_s)
        except RingFull as error:
            self.writer.say_once("full", "snapshot of step %d is skipped, and others may be: %s", step, error)
        except Fenced as error:
            self.fenced = True
            self._complain("fenced", error)
        except SpotError as error:
            self._complain(type(error).__name__, error)

    def finish(self, wait_s: float, *, complete: bool) -> None:
        """Commit and flush what is under way, within ``wait_s``, and close."""
        deadline = time.monotonic() + wait_s
        self.writer.settle(wait_s)
        host = self.writer.host
        try:
            if host is not None:
                left = host.flush(max(0.0, deadline - time.monotonic()))
                for line in left:
                    self.writer.say_once(
                        line, "not everything is durable yet: %s. The node on this host goes on trying", line
                    )
                host.leave(complete=complete and not left)
        except SpotError as error:
            self._complain("finish", error)
        finally:
            self.writer.close()

    def _complain(self, key: str, error: SpotError) -> None:
        if self._settings.strict:
            raise error
        self.writer.say_once(key, "no snapshot now, training goes on: %s", error)

    def _open_host(self) -> Host:
        settings = self._settings
        return self.location.open_host(
            slots=settings.slots,
            memory_bytes=settings.memory_bytes,
            idle_timeout_s=settings.idle_timeout_s,
            strict=settings.strict,
        )

    def _reopen(self) -> Host:
        host = self._open_host()
        host.open_run(run_info(self.location.name, self.location.destinations, self._settings.keep, self.number))
        return host


@functools.cache  # read from files, and the training thread asks
def _versions() -> dict[str, str]:
    return {"lightning": version("lightning"), "lightning_spot": __version__, "torch": str(torch.__version__)}
