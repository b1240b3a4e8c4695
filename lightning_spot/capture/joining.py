"""A rank of a sharded run that writes its part of the snapshots which another rank leads. It has no attempt."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lightning_spot.capture.contents import Owners
from lightning_spot.capture.host_link import leave, within
from lightning_spot.capture.sharded_writer import ShardedCheckpoint, ShardedWriter
from lightning_spot.capture.split import Ranks
from lightning_spot.errors import Fenced, ShareMissing, SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.host import Host
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

logger = logging.getLogger(__name__)


class Joining:
    """Writes the part of one rank, from 1 on, of every snapshot of an attempt.

    Args:
        host: connection of this rank to the node of its host, with run and attempt.
        connect: makes another one when it was lost.
        hosts: the ranks of each host, if there are several.
        copier: that copies.
        schedule: when what only the optimizer changes is copied.
        rank: this one.
        world_size: number of ranks.
        is_guest: whether this host's node was started for the ranks here only.
    """

    def __init__(
        self,
        host: Host,
        connect: Callable[[], Host],
        hosts: tuple[tuple[int, ...], ...],
        copier: Copier,
        schedule: Schedule,
        *,
        rank: int,
        world_size: int,
        is_guest: bool,
    ) -> None:
        self._run, self._attempt, self._is_guest = host.run, host.attempt, is_guest
        self._writer = ShardedWriter(host, connect, copier, schedule, rank=rank, world_size=world_size)
        self._writer.across.hosts = hosts

    def write(
        self,
        checkpoint: ShardedCheckpoint,
        *,
        owned: Owners,
        kept: Owners,
        step: int,
        complete: bool = False,
        wait_s: float,
        ranks: Ranks | None = None,
    ) -> None:
        """Begin to write this rank's part. If there is no such snapshot in the end, rank 0 says why.

        Args:
            checkpoint: as this rank has it.
            owned: tensors that only the optimizer changes, by the address of their storage.
            kept: further tensors that seldom change.
            step: Lightning's ``global_step``.
            complete: whether the run is at its end.
            wait_s: how long rank 0 may wait for a slot.
            ranks: that fill it, where several hosts bring it to a memory node.
        """
        name = snapshot_name(step, self._attempt, complete=complete)
        manifest = Manifest(run=self._run, name=name, step=step, attempt=self._attempt, nbytes=0, complete=complete)
        try:
            self._writer.begin(checkpoint, manifest, owned=owned, kept=kept, wait_s=wait_s, ranks=ranks)
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
        host = self._writer.link.wait(within(deadline_s))
        self._writer.close()
        if host is not None:
            if self._is_guest:
                leave(host, complete=True)  # it ends when all that it still sends is there
            host.disconnect()
