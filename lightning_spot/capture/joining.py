"""A rank of a sharded run that writes its part of the snapshots which another rank leads. It has no attempt."""

from __future__ import annotations

import logging
import time

from lightning_spot.capture.attempt import RingSettings
from lightning_spot.capture.contents import Owners
from lightning_spot.capture.sharded_writer import ShardedCheckpoint, ShardedWriter
from lightning_spot.client.embedded import attach
from lightning_spot.errors import Fenced, NodeUnreachable, ShareMissing, SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.host import Host
from lightning_spot.run.location import Location
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

logger = logging.getLogger(__name__)


class Joining:
    """Writes the part of one rank, from 1 on, of every snapshot of an attempt.

    Args:
        location: where the run is.
        settings: of the ring.
        run: as ``NAME@ID``.
        attempt: that rank 0 has begun.
        schedule: when what only the optimizer changes is copied.
        rank: this one.
        world_size: number of ranks, all on this host.

    Raises:
        NodeUnreachable: if the node on this host cannot be reached.
    """

    def __init__(
        self,
        location: Location,
        settings: RingSettings,
        run: str,
        attempt: int,
        schedule: Schedule,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._location, self._settings = location, settings
        self._run, self._attempt = run, attempt
        copier = Copier(buffer_bytes=settings.device_buffer_bytes)
        host = self._attach()
        self._writer = ShardedWriter(host, self._attach, copier, schedule, rank=rank, world_size=world_size)

    def write(
        self,
        checkpoint: ShardedCheckpoint,
        *,
        owned: Owners,
        kept: Owners,
        step: int,
        complete: bool = False,
        wait_s: float,
    ) -> None:
        """Begin to write this rank's part. If there is no such snapshot in the end, rank 0 says why.

        Args:
            checkpoint: as this rank has it.
            owned: tensors that only the optimizer changes, by the address of their storage.
            kept: further tensors that seldom change.
            step: Lightning's ``global_step``.
            complete: whether the run is at its end.
            wait_s: how long rank 0 may wait for a slot.
        """
        name = snapshot_name(step, self._attempt, complete=complete)
        manifest = Manifest(run=self._run, name=name, step=step, attempt=self._attempt, nbytes=0, complete=complete)
        try:
            self._writer.begin(checkpoint, manifest, owned=owned, kept=kept, wait_s=wait_s)
        except (ShareMissing, Fenced) as error:
            logger.debug("no part of %s is written: %s", name, error)
        except SpotError as error:
            self._writer.say_once(type(error).__name__, "this rank writes no part of %s: %s", name, error)

    def copied(self) -> None:
        """Return when the tensors may change."""
        self._writer.copied()

    def finish(self, wait_s: float) -> None:
        """Wait until what was begun is in place, and let the node go."""
        deadline_s = time.monotonic() + wait_s
        self._writer.settle(wait_s)
        self._writer.link.close()
        host = self._writer.link.wait(min(0.0, deadline_s - time.monotonic()))
        self._writer.close()
        if host is not None:
            host.disconnect()

    def _attach(self) -> Host:
        host = attach(self._location.url, self._run, self._settings.max_stall_s, revive=False)
        if host is None:
            raise NodeUnreachable(f"there is no memory node for {self._location.url} on this host")
        host.run, host.attempt = self._run, self._attempt
        return host
