"""The ranks of one ``fit`` that write its snapshots together: who takes part, and whether the next one is written so.

Where all ranks hold the same parameters (DDP), those on the host of rank 0 write a share each, through the node there,
and each writes what only it knows. Rank 0 decides for each snapshot, and its word comes with the agreement that one is
due. It writes alone where that cannot be: the first snapshot, which shows how much room the others need, and the one
after a share was missing. For an urgent one and that of the end, what only one rank knows is gathered: should a share
of these be missing, rank 0 has all that it needs to write them alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.capture.attempt import Attempt, RingSettings
from lightning_spot.capture.share import ShareWriter
from lightning_spot.capture.split import ALIKE, Owners, Ranks
from lightning_spot.client.embedded import EmbeddedHost, attach
from lightning_spot.errors import NodeUnreachable, ShareMissing, SpotError
from lightning_spot.exact import namespaces
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.rank_states import Rooms, packed
from lightning_spot.fit.agreement import Agreement
from lightning_spot.run.location import Location
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

ALONE, TOGETHER, GATHERED = "alone", "together", "together, with the states of all ranks gathered"
_MOST_FAILURES = 2


class Together(OfTrainer):
    """Writing snapshots together, on every rank.

    Args:
        trainer: that fits.
        settings: of the ring.

    Attributes:
        rooms: for the states of the other ranks, on rank 0.
        writer: of this rank's shares; ``None`` on rank 0, and where it writes none.
    """

    def __init__(self, trainer: pl.Trainer, settings: RingSettings) -> None:
        super().__init__(trainer)
        self.rooms = Rooms()
        self.writer: ShareWriter | None = None
        self._settings = settings
        self._members: list[int] = []
        self._failures, self._missed, self._taken = 0, 0, 0

    # -- begin and end --------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt | None, location: Location, run: str, number: int) -> bool:
        """Find out which ranks can take part. Every rank calls it, when the attempt has begun.

        Args:
            attempt: on rank 0.
            location: of the run.
            run: the run, as ``NAME@ID``.
            number: of the attempt.

        Returns:
            whether this rank writes shares, beside rank 0.
        """
        trainer = self._trainer
        is_ddp = isinstance(trainer.strategy, namespaces.classes("strategies", "DDPStrategy"))
        if trainer.world_size == 1 or not location.embedded or not is_ddp:
            return False
        host = self._connect(location, run, number) if attempt is None else None
        there = isinstance(attempt.writer.host, EmbeddedHost) if attempt is not None else host is not None
        everyones = Agreement(trainer).gather(there)
        self._members = [rank for rank, is_there in enumerate(everyones) if is_there]
        if not everyones[0] or len(self._members) == 1:
            self._members = []
        if host is None:
            return False
        if not self._members:
            host.disconnect()
            return False

        def reconnect() -> EmbeddedHost:
            found = self._connect(location, run, number)
            if found is None:
                raise NodeUnreachable("there is no memory node on this host at present")
            return found

        self._hold = (host, reconnect)
        return True

    def write_with(self, schedule: Schedule) -> None:
        """On a rank beside rank 0: write shares from now on, each part at its time."""
        copier = Copier(buffer_bytes=self._settings.device_buffer_bytes)
        host, reconnect = self._hold
        self.writer = ShareWriter(host, reconnect, self._members.index(self._trainer.global_rank), copier, schedule)

    def close(self) -> None:
        """Write no more shares. A second call does nothing."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    def _connect(self, location: Location, run: str, number: int) -> EmbeddedHost | None:
        try:
            host = attach(location.url, location.name, self._settings.max_stall_s, revive=False)
        except SpotError as error:
            logger.debug("no share of snapshots is written here: %s", error)
            return None
        if host is not None:
            host.run, host.attempt = run, number
        return host

    # -- snapshots ------------------------------------------------------------------------------------------------

    def how(self, attempt: Attempt) -> str:
        """On rank 0: how the next snapshot is written, or why training ends, for all ranks."""
        writer = attempt.writer
        if not self._members:
            return ALONE
        if self._hold_their_own:
            self._members = []
            return ALONE
        if writer.together > self._taken:
            self._taken, self._failures = writer.together, 0
        if writer.missed > self._missed:
            self._missed = writer.missed
            self._failures += 1
            differ = ALIKE in writer.missed_because
            if self._failures < _MOST_FAILURES and not differ:
                return ALONE
            self._members = []
            problem = f"ranks cannot write snapshots together: {writer.missed_because}"
            if self._settings.strict and differ:
                return problem
            rank_zero_warn(f"lightning_spot: {problem}. From now on rank 0 writes them alone")
            return ALONE
        if self._writes_own_states and len(self.rooms.known) < self._trainer.world_size - 1:
            return ALONE
        return TOGETHER

    def how_last(self, attempt: Attempt | None) -> str:
        """How an urgent snapshot is written, or that of the end; every rank calls this at the same place.

        Args:
            attempt: on rank 0.
        """
        together = attempt is not None and not attempt.fenced and self.how(attempt) == TOGETHER
        return GATHERED if self._trainer.strategy.broadcast(together) else ALONE

    def checkpoint(self, dump: Dump, how: str) -> dict[str, Any]:
        """The checkpoint of a snapshot, on rank 0; every rank calls this at the same place."""
        if how == TOGETHER and self._writes_own_states:
            return dump.shared(self._trainer, self.rooms) if self._trainer.is_global_zero else dump.checkpoint
        return dump.gathered(self._trainer, self.rooms)

    def ranks(self, how: str) -> Ranks | None:
        """On rank 0: who fills the snapshot; ``None`` if it does so alone."""
        if how == ALONE:
            return None
        return Ranks(len(self._members), self.rooms.known if how == TOGETHER and self._writes_own_states else {})

    def share(self, dump: Dump, how: str, owned: Owners, name: str, wait_s: float) -> None:
        """On another rank: begin its share of a snapshot that is written together."""
        if self.writer is not None:
            writes_state = how == TOGETHER and self._writes_own_states
            self.writer.begin(name, owned, packed(dump.state) if writes_state else b"", wait_s)

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self.writer is not None:
            self.writer.copied()

    @property
    def _hold_their_own(self) -> bool:
        """Whether ranks are known to hold other parameters, or other states of optimizers, than rank 0."""
        trainer = self._trainer
        if getattr(trainer.strategy.model, "parameters_to_ignore", ()):
            return True  # those that DDP was told to ignore
        # Of torch: ZeroRedundancyOptimizer shares the states out, PostLocalSGDOptimizer averages now and then.
        names = ("consolidate_state_dict", "averager")
        return any(hasattr(optimizer, name) for optimizer in trainer.optimizers for name in names)

    @property
    def _writes_own_states(self) -> bool:
        return len(self._members) == self._trainer.world_size


def checked(said: str) -> str:
    """What rank 0 has said of the next snapshot.

    Raises:
        ShareMissing: on all ranks, if it ends the training.
    """
    if said not in ("", ALONE, TOGETHER, GATHERED):
        raise ShareMissing(said)
    return said
