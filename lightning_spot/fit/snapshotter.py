"""Takes the snapshots of one ``fit``: begins the attempt, asks at each seam whether one is due, has it written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.leases import AHEAD_S
from lightning_spot.capture.owners import Owners
from lightning_spot.capture.split import Ranks
from lightning_spot.capture.tensors import by_storage, optimizer_owned
from lightning_spot.capture.unforeseen import failure_of
from lightning_spot.errors import SpotError
from lightning_spot.exact import namespaces
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.seams import Seams
from lightning_spot.exact.sharded import is_sharded
from lightning_spot.fit import earlier
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.at_hand import AtHand
from lightning_spot.fit.beginning import Beginning
from lightning_spot.fit.harmless import Harmless
from lightning_spot.fit.in_shards import InShards
from lightning_spot.fit.iterations import Iterations
from lightning_spot.fit.pacing import Pacing
from lightning_spot.fit.resume import Resume
from lightning_spot.fit.settings import SnapshotSettings
from lightning_spot.fit.together import ALONE, Together, checked
from lightning_spot.fit.train_end import after_train_end
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.interval.costs import TierPace
from lightning_spot.memory.unsealed import FOLLOWED_S
from lightning_spot.run.choice import say_what_is_left
from lightning_spot.run.location import Location

if TYPE_CHECKING:
    import lightning.pytorch as pl

WAIT_FOR_SLOT_S = 600.0
_SEAMS = 64  # that are looked ahead at for another snapshot: of steps of a tenth of a second as many as count
_FOLLOWING = "following the iterations of training"
_AHEAD = "making slots ahead"


class Snapshotter(OfTrainer):
    """Takes the snapshots of one ``fit``. Every rank has one, and rank 0 writes.

    Args:
        trainer: that fits.
        location: where the run is.
        settings: how snapshots are taken.
        resume: what the ``fit`` goes on from.

    Attributes:
        location: where the run is.
        settings: how snapshots are taken.
        pacing: decides when.
        attempt: that writes, on rank 0; ``None`` before it has begun and when it is finished.
        number: of the attempt, from 1, on every rank; 0 before it has begun.
        has_begun: whether :meth:`begin_training` was called.
        begun_step: ``global_step`` of the newest snapshot that was begun, -1 before the first.
        together: writes snapshots with other ranks.
        iterations: tells the copying where training is; on ranks that write.
        in_shards: has every rank write its part, where each has a part of the model; else ``None``.
        at_hand: the state of this rank.
        harmless: runs what training can do without.
    """

    def __init__(self, trainer: pl.Trainer, location: Location, settings: SnapshotSettings, resume: Resume) -> None:
        super().__init__(trainer)
        self.location = location
        self.settings = settings
        self.harmless = Harmless(strict=settings.ring.strict)
        self.pacing = Pacing(settings.policy, self.harmless)
        self.together = Together(trainer, settings.ring)
        self.at_hand = AtHand(trainer, self.together, self.harmless, strict=settings.ring.strict)
        self.attempt: Attempt | None = None
        self.number = 0
        self.begun_step = -1
        self.iterations: Iterations | None = None
        self.in_shards = InShards(trainer, location, settings.ring) if is_sharded(trainer) else None
        self._resume = resume
        self._beginning = Beginning(trainer, location, settings.ring, resume, self.in_shards)
        self._committed: Manifest | None = None
        self._where = ""
        self._skipped, self._torn, self._seen_step = 0, 0, -1
        self._is_warm = self._steps_itself = self.has_begun = False
        self._undo: list[Callable[[], None]] = []

    @property
    def committed(self) -> Manifest | None:
        """The newest snapshot of this attempt that is committed in memory."""
        return self.attempt.writer.committed if self.attempt is not None else self._committed

    @property
    def skipped(self) -> int:
        """Snapshots that were due and not taken, since no slot was free, or to take them failed."""
        return self.pacing.passed_over + (self.attempt.skipped if self.attempt is not None else self._skipped)

    @property
    def torn(self) -> int:
        """Snapshots that were dropped, since a tensor changed while it was copied."""
        return self.attempt.writer.torn if self.attempt is not None else self._torn

    # -- begin ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the ring, ask all tiers what they hold, and begin the next attempt of the run."""
        earlier.goes_on_at(self.location)
        found = Agreement(self._trainer).on_rank_zero(self._beginning.look)
        self._resume.when_decided(found, self._begin_attempt)

    def _begin_attempt(self) -> None:
        trainer = self._trainer
        if self.in_shards is not None or trainer.is_global_zero:
            self.iterations = Iterations(trainer, self.settings.partitions)
        schedule = self.iterations.schedule if self.iterations is not None else None
        self.attempt = attempt = Agreement(trainer).on_rank_zero(partial(self._beginning.attempt, schedule))
        named = (attempt.number, attempt.info.text, attempt.info.id) if attempt is not None else (0, "", "")
        self.number, run, self._resume.run_id = trainer.strategy.broadcast(named)
        self._resume.attempt = self.number
        if self.together.begin(attempt, self.location, run, self.number):
            self.iterations = Iterations(trainer, self.settings.partitions)
            self.together.write_with(self.iterations.schedule)
        if self.in_shards is not None and self.iterations is not None:
            self.in_shards.begin(attempt, run, self.number, self.iterations.schedule)

    def begin_training(self) -> None:
        """Start counting, and listen for the places at which a snapshot can be taken."""
        trainer, self.has_begun = self._trainer, True
        self._seen_step = trainer.global_step
        if self.attempt is not None and self._resume.lineage is not None:
            self.attempt.lineage = self._resume.lineage
        elif self._beginning.found is not None:
            say_what_is_left(self._beginning.found)
        self.pacing.begin(trainer, self.number, self._resume.interval)
        self.together.begin_training(self.attempt)
        Seams.of(trainer).add(self)
        self._undo.append(lambda: Seams.of(trainer).remove(self))
        if self.iterations is not None:
            self.iterations.begin()
            self._undo.append(self.iterations.end)
        self._steps_itself = namespaces.overrides(trainer.lightning_module, "optimizer_step")
        if not trainer.lightning_module.automatic_optimization:
            # A step of an optimizer that Lightning does not wrap calls no hook of Lightning's; torch calls this one.
            for optimizer in trainer.optimizers:
                self._undo.append(optimizer.register_step_pre_hook(lambda *_: self.before_step()).remove)

    # -- while training -------------------------------------------------------------------------------------------

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due."""
        self._at_seam(before_validation=False)
        loop = trainer.fit_loop.epoch_loop
        # Where an epoch ends, also within its batches, other callbacks' hooks come before ours.
        is_at_limit = 0 <= trainer.max_steps <= trainer.global_step  # right after a resume, the loop is not done then
        if loop.batch_progress.is_last_batch or loop.done or is_at_limit:
            self.disturbed()

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due: a resumed run begins with this validation."""
        self._at_seam(before_validation=True)
        self.at_hand.before_validation()
        self.disturbed()  # averaging callbacks exchange weights around a validation

    def after_backward(self) -> None:
        """All gradients of a micro-batch are there. A module's own ``optimizer_step`` may go past Lightning's hook."""
        if self.iterations is not None:
            self.iterations.schedule.backward_ends()
        if self._steps_itself:
            self.before_step()

    def before_step(self) -> None:
        """The optimizer is about to step: wait for what is not copied yet."""
        if self.iterations is not None:
            self.iterations.schedule.stepping()
        self.wait_copied()

    def disturbed(self) -> None:
        """Something else than training comes, in which weights may change: wait for what is not copied yet."""
        if self.iterations is not None:
            self.iterations.schedule.disturbed()
        self.wait_copied()

    def wait_copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        self.harmless.run("waiting for what is copied", self._wait_copied, None)

    def _wait_copied(self) -> None:
        with self.pacing.stalling():
            if self.attempt is not None:
                self.attempt.writer.copied()
            self.together.copied()
            if self.in_shards is not None:
                self.in_shards.copied()

    def read(self, outputs: Any) -> None:
        """Look at the progress of the batch that is done."""
        self.harmless.run("reading the progress of training", lambda: self.pacing.read(self._trainer, outputs), None)

    def check_monitor(self) -> None:
        """Say so if the metric that the interval follows is not logged by now."""
        if self._is_warm:
            check = partial(self.pacing.check_monitor, self._trainer, self._trainer.current_epoch)
            self.harmless.run("looking for the monitored metric", check, None)

    def end_training(self) -> None:
        """Take the last snapshot, of the finished run: after the module's own hook, which may change the weights."""
        self.wait_copied()
        self.harmless.run(_AHEAD, self.warm, None)  # of a run that only comes to its end there was no step
        self.check_monitor()
        self.close()
        self._undo.append(after_train_end(self._trainer, lambda: self._take(complete=True)))

    def _at_seam(self, *, before_validation: bool) -> None:
        """Take a snapshot if one is due. What fails costs it; but of several ranks, others may wait for what comes."""
        trainer = self._trainer
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        step = partial(self._after_step, before_validation=before_validation)
        if trainer.world_size > 1:
            step()
        elif not self.harmless.run("taking a snapshot", step, False) and self.attempt is not None:
            self.attempt.count_failure()

    def _after_step(self, *, before_validation: bool) -> bool:
        trainer, run = self._trainer, self.harmless.run
        if self.iterations is not None:
            run(_FOLLOWING, self.iterations.ends, None)
        run(_AHEAD, self.warm, None)
        if how := checked(self.pacing.due(trainer, self._can_begin, self._paces)):
            self._take(before_validation=before_validation, how=how)
        self.pacing.look_ahead(trainer, self._can_begin)
        run("leasing a slot ahead", self._lease_ahead, None)
        if self.iterations is not None:
            run(_FOLLOWING, self.iterations.begins, None)
        return True

    def _lease_ahead(self) -> None:
        trainer = self._trainer
        is_known = trainer.world_size == 1 or self.in_shards is not None
        if self.attempt is not None and is_known and self.pacing.next_within(trainer, AHEAD_S):
            self.attempt.writer.next_comes()

    def _paces(self) -> tuple[TierPace, ...]:
        return self.attempt.safety.paces() if self.attempt is not None else ()

    def _can_begin(self) -> str:
        """How the ranks may begin, ``""`` for not now: slots are made after the first step, and waited for or not."""
        return self.harmless.run("asking whether a snapshot can begin", self._way_to_begin, "")

    def _way_to_begin(self) -> str:
        attempt, waits = self.attempt, self.settings.on_full == "wait"
        if attempt is None or attempt.fenced or attempt.failures.are_too_many or not (attempt.writer.ready or waits):
            return ""
        shards = self.in_shards
        return shards.how(attempt, waits=waits) if shards is not None else self.together.how(attempt, waits=waits)

    def warm(self) -> None:
        """Have slots made in the background as soon as the first step showed how large a snapshot is. Once."""
        if self._is_warm:
            return
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        states = [list(optimizer.state.values()) for optimizer in optimizers]
        (self.attempt or self.in_shards or self.together).warm([*module.parameters(), *module.buffers(), states])
        self._is_warm = True

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _take(self, *, before_validation: bool = False, complete: bool = False, how: str = ALONE) -> None:
        """Begin a snapshot on every rank."""
        trainer = self._trainer
        self.pacing.taken(trainer.global_step)
        with self.pacing.stalling():
            dump = self.at_hand.state(before_validation=before_validation, at_end=complete)
            wait_s = WAIT_FOR_SLOT_S if self.settings.on_full == "wait" or complete else 0.0
            how = self.together.how_last(self.attempt) if complete else how
            followed = how == ALONE and not complete and self.pacing.next_within(trainer, FOLLOWED_S, seams=_SEAMS)
            self.write(dump, complete=complete, wait_s=wait_s, how=how, followed=followed)

    def write(
        self,
        dump: Dump | SpotError,
        *,
        complete: bool = False,
        urgent: bool = False,
        wait_s: float,
        how: str = ALONE,
        followed: bool = False,
    ) -> None:
        """Have a state written, by all ranks as they have agreed.

        Args:
            dump: the state; or why this rank does not have it: then the others are told, and there is no snapshot.
            complete: whether the run is at its end.
            urgent: whether training ends with it, for now.
            wait_s: how long to wait for a slot, seconds.
            how: the ranks write it together; :data:`~lightning_spot.fit.together.ALONE` where rank 0 writes all of it.
            followed: whether another one is to follow in a moment.
        """
        trainer = self._trainer
        self.begun_step = trainer.global_step
        if self.in_shards is not None:
            how, commit_s = "" if complete or urgent else how, self.settings.flush_timeout_s if complete else wait_s
            waits = {"wait_s": wait_s, "commit_s": commit_s}
            self.in_shards.write(self.attempt, dump, self.pacing.state_dict, complete=complete, how=how, **waits)
            return
        checkpoint = self._checkpoint(dump, how)
        if self.attempt is not None:
            ranks = self.together.ranks(how)
            self.store(checkpoint, complete=complete, wait_s=wait_s, ranks=ranks, followed=followed)
        elif how != ALONE:
            name = snapshot_name(trainer.global_step, self.number, complete=complete)
            self.together.share(dump, how, name, wait_s)

    def _checkpoint(self, dump: Dump | SpotError, how: str) -> dict[str, Any] | SpotError:
        """What rank 0 saves, or why it cannot."""
        checkpoint = self.together.checkpoint(dump, how)
        if self.attempt is not None and not isinstance(checkpoint, SpotError):
            try:
                checkpoint[KEY] |= {"interval": self.pacing.state_dict(), **self.attempt.origin}
            except Exception as error:
                return failure_of(error)
        return checkpoint

    def store(
        self,
        checkpoint: dict[str, Any] | SpotError,
        *,
        complete: bool = False,
        wait_s: float,
        ranks: Ranks | None,
        followed: bool = False,
    ) -> None:
        """Begin a snapshot on rank 0; on the others nothing happens. See :meth:`Attempt.write`."""
        trainer = self._trainer
        if self.attempt is not None and not self.attempt.fenced:
            owned: Owners = {}
            kept: Owners = {}
            try:
                owned, kept = optimizer_owned(trainer.optimizers), by_storage(trainer.lightning_module.parameters())
            except Exception as error:
                checkpoint = failure_of(error)
            self.attempt.write(
                checkpoint,
                owned=owned,
                kept=kept,
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                world_size=trainer.world_size,
                complete=complete,
                wait_s=wait_s,
                ranks=ranks,
                followed=followed,
            )

    # -- end ------------------------------------------------------------------------------------------------------

    def safe_after_s(self) -> float | None:
        """Measured seconds from a snapshot's begin until it is safe outside this machine; ``None`` before any was."""
        return self.attempt.safety.usual_s() if self.attempt is not None else None

    def close(self) -> None:
        """Listen no more. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Bring what is committed to safety and let the ring go. A second call does nothing.

        Args:
            wait_s: how long at most, seconds.
            complete: whether the run is at its end.

        Returns:
            whether the snapshot of the end was seen at the durable tier; ``None`` if none was to be taken.
        """
        attempt, self.attempt = self.attempt, None
        ends = [self.close, self.together.close, self._beginning.let_go]
        ends += [partial(self.in_shards.finish, wait_s)] if self.in_shards is not None else []
        bring = partial(self._bring, attempt, wait_s, complete=complete)
        return self.harmless.run_all("the end of snapshots", ends, bring, still="the run ends all the same")

    def _bring(self, attempt: Attempt | None, wait_s: float, *, complete: bool) -> bool | None:
        if attempt is None:
            return None
        durable = attempt.finish(wait_s, complete=complete)
        self._committed, self._where = attempt.writer.committed, attempt.where
        self._skipped, self._torn = attempt.skipped, attempt.writer.torn
        return durable

    def what_is_safe(self) -> str:
        """What a run that was ended goes on from, after :meth:`finish`, for people."""
        if (newest := self._committed) is None:
            return "this attempt has committed no snapshot"
        return f"its snapshot of step {newest.step} is {self._where}"
