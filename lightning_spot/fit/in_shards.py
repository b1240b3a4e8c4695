"""Snapshots of a ``fit`` in which each rank has a part of the model: every rank writes its own, on its own thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_spot.capture.attempt import Attempt, RingSettings
from lightning_spot.capture.joining import Joining
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.tensors import by_storage, optimizer_owned
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.flat import Kinds
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.sharded import holder_of, split
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.together import ALONE, GATHERED
from lightning_spot.run.location import Location
from lightning_spot.sharded.layout import state_archive
from lightning_spot.staging.schedule import Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl


class InShards(OfTrainer):
    """Has every rank write its part of the snapshots. Rank 0 has the attempt, and leads.

    Args:
        trainer: that fits.
        location: where the run is.
        ring: how the ring on this host is opened.
    """

    def __init__(self, trainer: pl.Trainer, location: Location, ring: RingSettings) -> None:
        super().__init__(trainer)
        self._location, self._ring = location, ring
        self._joining: Joining | None = None
        self._kinds: list[Kinds] | None = None
        self._missed = 0

    def check(self) -> None:
        """Refuse a ring that other processes cannot fill.

        Raises:
            SettingsError: if it is one.
        """
        if self._trainer.world_size > 1 and not self._location.embedded:
            raise SettingsError(
                "a sharded model needs a memory node on this host, which its ranks fill together: leave memory= as it"
                " is, or give memory='auto', and a dirpath that other processes see"
            )

    def begin(self, attempt: Attempt | None, run: str, number: int, schedule: Schedule) -> None:
        """Join the attempt. Every rank calls it; an error of one is an error of all.

        Args:
            attempt: on rank 0.
            run: as ``NAME@ID``.
            number: of the attempt.
            schedule: when what only the optimizer changes is copied.
        """
        trainer = self._trainer

        def join() -> Joining | None:
            holder_of(trainer)  # which may refuse the model
            if attempt is not None:
                return None
            rank, world_size = trainer.global_rank, trainer.world_size
            return Joining(self._location, self._ring, run, number, schedule, rank=rank, world_size=world_size)

        self._joining = Agreement(trainer).together(join)

    def how(self, attempt: Attempt) -> str:
        """On rank 0: how the next snapshot is written. If one was missed, a rank may have more than the others know."""
        missed, self._missed = self._missed, attempt.writer.missed
        return GATHERED if self._missed > missed else ALONE

    def write(
        self,
        attempt: Attempt | None,
        dump: Dump,
        interval: dict[str, Any],
        *,
        complete: bool,
        agreed: bool,
        wait_s: float,
    ) -> None:
        """Begin a snapshot. Every rank calls it, at the same place.

        Args:
            attempt: on rank 0.
            dump: the state of this rank.
            interval: what the interval has measured.
            complete: whether the run is at its end.
            agreed: whether ranks tell each other what they have to save, and how much room it needs. (So they do for
                the first one. Later on, a snapshot fails where one has more.)
            wait_s: how long to wait for a clean slot.
        """
        trainer = self._trainer
        holder = holder_of(trainer)
        state, rest = split(dump.apart(trainer), holder)
        most = 0
        if agreed or self._kinds is None:
            try:
                most, self._kinds = self._ask(dump, holder.kinds(state))
            except SpotError as error:  # of one rank, and so of all
                if self._ring.strict:
                    raise
                if attempt is not None:
                    attempt.writer.say_once("own state", "no snapshot now, training goes on: %s", error)
                return
        holder.complete(state, self._kinds)
        checkpoint = ShardedCheckpoint(state, dump.state, rest, most)
        step, owned = trainer.global_step, optimizer_owned(trainer.optimizers)
        frozen = by_storage(item for item in trainer.lightning_module.parameters() if not item.requires_grad)
        kept = {address: tensors for address, tensors in frozen.items() if address not in owned}
        if self._joining is not None:
            self._joining.write(checkpoint, owned=owned, kept=kept, step=step, complete=complete, wait_s=wait_s)
        elif attempt is not None and attempt.fenced:
            attempt.decline(step, "a later attempt has taken the run over", complete=complete)
        elif attempt is not None:
            rest[KEY].update(interval=interval, lineage=attempt.lineage)
            attempt.write(
                checkpoint,
                owned=owned,
                kept=kept,
                step=step,
                epoch=trainer.current_epoch,
                world_size=trainer.world_size,
                complete=complete,
                wait_s=wait_s,
            )

    def _ask(self, dump: Dump, kinds: Kinds) -> tuple[int, list[Kinds]]:
        """Length of the longest of the ranks' own states, and what each has of others. Every rank calls it."""
        agreement = Agreement(self._trainer)
        everyones = agreement.gather((agreement.together(lambda: len(state_archive(dump.state))), kinds))
        return max(nbytes for nbytes, _ in everyones), [kinds for _, kinds in everyones]

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self._joining is not None:
            self._joining.copied()

    def finish(self, wait_s: float) -> None:
        """Wait until what was begun is in place, and let the node go. A second call does nothing."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.finish(wait_s)
