"""Takes the snapshots of one ``fit``: asks at each seam whether one is due, and has it written."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_spot.capture.slot_pool import AHEAD_S
from lightning_spot.capture.unforeseen import failure_of
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.exact import namespaces
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.seams import Seam, Seams
from lightning_spot.fit import earlier
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.alike import check_one_optimizer
from lightning_spot.fit.beginning import Beginning
from lightning_spot.fit.harmless import STILL_ENDS, THE_END, Harmless
from lightning_spot.fit.pacing import Pacing
from lightning_spot.fit.resume import Resume
from lightning_spot.fit.together import ALONE, How, Together
from lightning_spot.fit.writing import SnapshotSettings, Writing
from lightning_spot.interval.costs import TierPace
from lightning_spot.memory.work import FOLLOWED_S
from lightning_spot.run.choice import say_what_is_left
from lightning_spot.run.location import Location

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

WAIT_FOR_SLOT_S = 600.0
_SEAMS = 64  # that are looked ahead at for another snapshot: of steps of a tenth of a second as many as count
_UNCOUNTED_BATCHES = 8  # after so many: a GAN may step its second network, with Lightning, in every fifth batch only
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
        writing: has them written.
        has_begun: whether :meth:`begin_training` was called.
        at_hand: the state of this rank.
        harmless: runs what training can do without.
    """

    def __init__(self, trainer: pl.Trainer, location: Location, settings: SnapshotSettings, resume: Resume) -> None:
        super().__init__(trainer)
        self.location = location
        self.settings = settings
        self.harmless = Harmless(strict=settings.ring.strict)
        self.pacing = Pacing(settings.policy, self.harmless)
        self.writing = writing = Writing(trainer, location, settings, self.pacing.state_dict)
        self.at_hand = AtHand(trainer, writing.together, self.harmless, strict=settings.ring.strict)
        self._resume = resume
        self._beginning = Beginning(trainer, location, settings.ring, resume, writing.in_shards)
        self._seen_step = -1
        self._steps_itself = self.has_begun = False
        self._has_counted = self._has_stepped = False  # whether global_step has moved; an optimizer, in this batch
        self._unknown, self._has_said_unknown = "", False  # class of an optimizer that Lightning was not given
        self._uncounted = 0  # batches in which an optimizer stepped, before global_step has moved
        self._undo: list[Callable[[], None]] = []

    @property
    def skipped(self) -> int:
        """Snapshots that were due and not taken, since no slot was free, or to take them failed."""
        return self.pacing.passed_over + self.writing.skipped

    # -- begin ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the ring, ask all tiers what they hold, and begin the next attempt of the run."""
        earlier.goes_on_at(self.location)
        found = Agreement(self._trainer).on_rank_zero(self._beginning.look)
        self._resume.when_decided(found, partial(self.writing.begin, self._beginning, self._resume))

    def begin_training(self) -> None:
        """Start counting, and listen for the places at which a snapshot can be taken."""
        trainer, writing, self.has_begun = self._trainer, self.writing, True
        check_one_optimizer(trainer)
        self._seen_step = trainer.global_step
        if writing.attempt is not None and self._resume.lineage is not None:
            writing.attempt.lineage = self._resume.lineage
        elif self._beginning.found is not None:
            say_what_is_left(self._beginning.found)
        self.pacing.begin(trainer, writing.number, self._resume.interval)
        writing.together.begin_training(writing.attempt)
        Seams.of(trainer).add(self)
        self._undo.append(lambda: Seams.of(trainer).remove(self))
        if writing.iterations is not None:
            writing.iterations.begin()
            self._undo.append(writing.iterations.end)
        self._steps_itself = namespaces.overrides(trainer.lightning_module, "optimizer_step")
        self._undo.append(self._follow_steps())

    def _follow_steps(self) -> Callable[[], None]:
        """See steps that Lightning does not: of optimizers that it does not wrap, or that it was not given.

        Returns:
            ends that.
        """
        trainer = self._trainer
        trained = {id(parameter) for parameter in trainer.lightning_module.parameters()}
        is_automatic = trainer.lightning_module.automatic_optimization

        def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
                return  # of an inner loop, or of another training
            self._has_stepped = True
            is_known = _is_of(trainer, optimizer)
            if not is_known:
                self._unknown = type(optimizer).__qualname__
            if not (is_automatic and is_known):  # of which Lightning's own hook comes behind the backward pass
                self.before_step()

        return register_optimizer_step_pre_hook(steps).remove

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
        if (iterations := self.writing.iterations) is not None:
            iterations.schedule.backward_ends()
        if self._steps_itself:
            self.before_step()

    def before_step(self) -> None:
        """The optimizer is about to step: wait for what is not copied yet."""
        if (iterations := self.writing.iterations) is not None:
            iterations.schedule.stepping()
        self.wait_copied()

    def disturbed(self) -> None:
        """Something else than training comes, in which weights may change: wait for what is not copied yet."""
        if (iterations := self.writing.iterations) is not None:
            iterations.schedule.disturbed()
        self.wait_copied()

    def wait_copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        self.harmless.run("waiting for what is copied", self._wait_copied, None)

    def _wait_copied(self) -> None:
        with self.pacing.stalling():
            self.writing.copied()

    def read(self, outputs: Any) -> None:
        """Look at the progress of the batch that is done."""
        self.harmless.run("reading the progress of training", lambda: self.pacing.read(self._trainer, outputs), None)

    def check_monitor(self) -> None:
        """Say so if the metric that the interval follows is not logged by now."""
        if self.writing.is_warm:
            check = partial(self.pacing.check_monitor, self._trainer, self._trainer.current_epoch)
            self.harmless.run("looking for the monitored metric", check, None)

    def end_training(self) -> None:
        """Take the last snapshot, of the finished run: after the module's own hook, which may change the weights."""
        self.wait_copied()
        if 0 < self._uncounted < _UNCOUNTED_BATCHES and not self._has_counted:
            self._say_uncounted()
        self.harmless.run(_AHEAD, self.writing.warm, None)  # of a run that only comes to its end there was no step
        self.check_monitor()
        self.harmless.run(THE_END, self.close, None, still=STILL_ENDS)
        self._undo.append(after_train_end(self._trainer, self._take_last))

    def _take_last(self) -> None:
        """Take the snapshot of the finished run. What fails costs it, as at a seam."""
        attempt = self.writing.attempt

        def take() -> bool:
            self._take(complete=True)
            return True

        if self._trainer.world_size > 1:
            take()
        elif not self.harmless.run("taking the last snapshot", take, False, still=STILL_ENDS) and attempt is not None:
            attempt.miss_end()

    def _at_seam(self, *, before_validation: bool) -> None:
        """Take a snapshot if one is due. What fails costs it; but of several ranks, others may wait for what comes."""
        trainer = self._trainer
        stepped, self._has_stepped = self._has_stepped, False
        if self._unknown and not self._has_said_unknown:
            self._say_unknown()
        if trainer.global_step == self._seen_step:
            self._uncounted += stepped and not self._has_counted
            if self._uncounted == _UNCOUNTED_BATCHES:
                self._say_uncounted()
            return
        self._seen_step, self._has_counted = trainer.global_step, True
        step = partial(self._after_step, before_validation=before_validation)
        if trainer.world_size > 1:
            step()
        elif not self.harmless.run("taking a snapshot", step, False) and self.writing.attempt is not None:
            self.writing.attempt.count_failure()

    def _say_unknown(self) -> None:
        """Say that a resume has nothing of an optimizer, unless the module may save it by itself."""
        self._has_said_unknown = True
        if not namespaces.overrides(self._trainer.lightning_module, "on_save_checkpoint"):
            rank_zero_warn(
                f"lightning_spot: {self._unknown} steps weights of the model, and configure_optimizers has not returned"
                " it. No snapshot has its state: a resume begins it again. Return it there"
            )

    def _say_uncounted(self) -> None:
        """Say that no snapshots are taken, since Lightning counts no steps.

        Raises:
            SettingsError: with ``strict``.
        """
        said = (
            f"Lightning has counted no step in {self._uncounted} batches, though optimizers have stepped. NO SNAPSHOT"
            " is taken before the end, and an interrupted run begins again. Step those of self.optimizers(), in hooks"
            " of backward too"
        )
        if self.settings.ring.strict:
            raise SettingsError(said)
        rank_zero_warn(f"lightning_spot: {said}")

    def _after_step(self, *, before_validation: bool) -> bool:
        trainer, run, iterations = self._trainer, self.harmless.run, self.writing.iterations
        if iterations is not None:
            run(_FOLLOWING, iterations.ends, None)
        run(_AHEAD, self.writing.warm, None)
        with self.pacing.stalling():
            self.writing.show_once()
        if how := How.heard(self.pacing.due(trainer, self._can_begin, self._paces)):
            self._take(before_validation=before_validation, how=how)
        self.pacing.look_ahead(trainer, self._can_begin)
        run("leasing a slot ahead", self._lease_ahead, None)
        if iterations is not None:
            run(_FOLLOWING, iterations.begins, None)
        return True

    def _lease_ahead(self) -> None:
        trainer, attempt = self._trainer, self.writing.attempt
        is_known = trainer.world_size == 1 or self.writing.in_shards is not None
        if attempt is not None and is_known and self.pacing.next_within(trainer, AHEAD_S):
            attempt.writer.next_comes()

    def _paces(self) -> tuple[TierPace, ...]:
        attempt = self.writing.attempt
        return attempt.safety.paces() if attempt is not None else ()

    def _can_begin(self) -> str:
        """See :meth:`Writing.how`."""
        how = self.harmless.run("asking whether a snapshot can begin", self.writing.how, None)
        return how.word() if how is not None else ""

    def _take(self, *, before_validation: bool = False, complete: bool = False, how: How = ALONE) -> None:
        """Begin a snapshot on every rank."""
        trainer, writing = self._trainer, self.writing
        if writing.attempt is None or not writing.attempt.fenced:  # else none is, and it is not for want of a slot
            self.pacing.taken(trainer.global_step)
        with self.pacing.stalling():
            dump = self.at_hand.state(before_validation=before_validation, at_end=complete)
            wait_s = WAIT_FOR_SLOT_S if self.settings.on_full == "wait" or complete else 0.0
            how = self._how_last() if complete else how
            followed = how == ALONE and not complete and self.pacing.next_within(trainer, FOLLOWED_S, seams=_SEAMS)
            writing.write(dump, complete=complete, wait_s=wait_s, how=how, followed=followed)

    def _how_last(self) -> How:
        """How the last snapshot is written. Where a rank cannot say so, all of them know."""
        ask = partial(self.writing.together.how_last, self.writing.attempt)
        return self.harmless.run("agreeing on the last snapshot", ask, ALONE, still=STILL_ENDS)

    # -- end ------------------------------------------------------------------------------------------------------

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
        writing = self.writing
        ends: list[Callable[[], object]] = [
            self.close,
            writing.together.close,
            self._beginning.let_go,
            partial(writing.finish_part, wait_s),
        ]
        bring = partial(writing.finish, wait_s, complete=complete)
        return self.harmless.run_all(THE_END, ends, bring, still=STILL_ENDS)


def _is_of(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> bool:
    """Whether Lightning was given an optimizer, or one that is made of it, as ``ZeroRedundancyOptimizer``."""
    return any(own is optimizer or any(part is optimizer for part in vars(own).values()) for own in trainer.optimizers)


class AtHand(OfTrainer):
    """The state of this rank that a snapshot is taken of: as it is now, or as it was in front of a validation.

    Args:
        trainer: whose state it is.
        together: writes snapshots with other ranks.
        harmless: runs what training can do without.
        strict: whether an error is raised that would only cost a snapshot.

    Attributes:
        keeps: whether the state in front of a validation is kept, for a stop in the middle.
    """

    def __init__(self, trainer: pl.Trainer, together: Together, harmless: Harmless, *, strict: bool) -> None:
        super().__init__(trainer)
        self.keeps = False
        self._together, self._harmless, self._strict = together, harmless, strict
        self._kept: Dump | None = None

    def state(self, *, before_validation: bool, at_end: bool = False) -> Dump | SpotError:
        """The state of this rank; or why it cannot be had, which costs a snapshot.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        try:
            return FitState.of(self._trainer).dump(before_validation=before_validation, at_end=at_end)
        except Exception as error:
            # Where ranks wait for each other in their optimizers' states, the others do not wait for what comes next.
            if self._strict or (self._trainer.world_size > 1 and self._together.hold_their_own):
                raise
            return failure_of(error)

    def newest(self, seam: Seam) -> Dump | None:
        """The newest state that a run can resume from exactly: in the middle of a validation, the one before it."""
        if seam is Seam.SANITY_CHECK:
            return None
        if seam is Seam.VALIDATION:
            kept, self._kept = self._kept, None
            return kept if kept is not None and kept.is_unchanged else None
        dump = self.state(before_validation=seam is Seam.BEFORE_VALIDATION)
        if isinstance(dump, SpotError):
            logger.warning("lightning_spot: no snapshot of step %d: %s", self._trainer.global_step, dump)
            return None
        return dump

    def before_validation(self) -> None:
        """Keep the state for the time of the validation, if it may be needed."""
        if self.keeps:
            self._kept = self._harmless.run("keeping the state in front of a validation", self._keep, None)

    def after_validation(self) -> None:
        """Let go what was kept."""
        self._kept = None

    def _keep(self) -> Dump:
        return FitState.of(self._trainer).dump(before_validation=True).kept()


def after_train_end(trainer: pl.Trainer, action: Callable[[], None]) -> Callable[[], None]:
    """Have ``action`` called once training has ended, also for the module, whose own hook follows those of callbacks.

    Returns:
        takes that back.
    """
    strategy: Any = trainer.strategy
    original = strategy.on_train_end  # the last that Lightning calls then

    def undo() -> None:
        vars(strategy).pop("on_train_end", None)

    def on_train_end() -> None:
        undo()
        original()
        action()

    strategy.on_train_end = on_train_end
    return undo
