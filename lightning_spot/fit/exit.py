"""An exit: how a ``fit`` ends. What is brought to safety, in which order, what is said, how the process leaves.

A notice stops it at a seam, an exception breaks it off, or it comes to its end. In each case snapshots are brought to
safety first, then exact state, watchers and records let go. How long that may take is one :class:`Deadline`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.errors import PreemptedError, SpotError, TierError
from lightning_spot.exact import namespaces
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.rank_states import Rooms
from lightning_spot.exact.seams import Seam
from lightning_spot.fit import earlier
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.harmless import STILL_ENDS, THE_END, do_all
from lightning_spot.fit.ranks import is_requeued_by_slurm, requeue_slurm_job
from lightning_spot.fit.resume import Resume
from lightning_spot.fit.snapshotter import Snapshotter
from lightning_spot.fit.together import ALONE
from lightning_spot.image.manifest import Manifest
from lightning_spot.interval.deadline import Deadline
from lightning_spot.notices.notice import Notice
from lightning_spot.tiers.fsspec_client import forget_listings

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_spot.fit.snapshotter import Snapshotter
    from lightning_spot.fit.writing import Writing

logger = logging.getLogger(__name__)

_LEAVE = "all ranks leave, and the run goes on from the snapshot before"

EXIT_CODE = 143
"""128 + SIGTERM: what a process that was terminated exits with, and what job schedulers know as such."""

RANKS_WAIT_S = 300.0
"""How long ranks wait at least for the first one to secure the snapshot, where the notice names no end."""


class Exit(OfTrainer):
    """How one ``fit`` ends.

    Args:
        trainer: that fits.
        resume: what it went on from.
        snapshotters: those who take its snapshots; looked at when it ends.

    Attributes:
        deadline: by when all has to be safe; ``None`` while no notice stops the run.
    """

    def __init__(self, trainer: pl.Trainer, resume: Resume, snapshotters: list[Snapshotter]) -> None:
        super().__init__(trainer)
        self.deadline: Deadline | None = None
        self._resume = resume
        self._snapshotters = snapshotters
        self._is_complete = False

    def expect_stop(self) -> None:
        """Somebody watches for notices: the state in front of a validation is kept at hand from now on."""
        for snapshotter in self._snapshotters:
            snapshotter.at_hand.keeps = True

    def warn_of_passing_folder(self) -> None:
        """Say early, before ``ModelCheckpoint`` has chosen one, that what is saved at a notice will not be found again.

        Of a ``ModelCheckpoint`` that is given none, the folder is the logger's, which is another one in each start. In
        a bucket, Lightning does not find what is there.
        """
        found, loggers = _model_checkpoint(self._trainer), self._trainer.loggers
        if found is not None and "://" in str(found.dirpath or ""):
            # Lightning takes the scheme off what it lists, and looks for it on the disk.
            rank_zero_warn(
                f"lightning_spot: fit(ckpt_path='last') finds nothing in {found.dirpath}: Lightning looks on the disk."
                f" After a notice, pass ckpt_path={_preempted(found)!r}; or use SpotCheckpoint, which resumes by itself"
            )
        if found is None or found.dirpath or not loggers:
            return
        kinds = namespaces.classes("loggers", "CSVLogger", "TensorBoardLogger")
        if isinstance(loggers[0], kinds) and isinstance(loggers[0].version, str):
            return  # the user has named it: those that the logger counts are numbers
        rank_zero_warn(
            "lightning_spot: ModelCheckpoint has no dirpath, so its files are in the folder of the logger, and that is"
            " another one in each start: after a notice, fit(ckpt_path='last') would not find what was saved. Give it"
            " one, ModelCheckpoint('checkpoints'), or the logger the same version in each start"
        )

    def warn_of_short_grace(self, grace_period_s: float) -> bool:
        """Say early that a notice would come too late for an urgent snapshot.

        Args:
            grace_period_s: seconds that a notice leaves.

        Returns:
            whether enough was measured to tell.
        """
        measured = [safe_s for item in self._snapshotters if (safe_s := item.writing.safe_after_s()) is not None]
        for safe_s in measured:
            if safe_s > grace_period_s:
                rank_zero_warn(
                    f"lightning_spot: a notice leaves {grace_period_s:.0f} s, but a snapshot has needed {safe_s:.0f}"
                    " s until it is safe outside this machine: after a notice the run will resume from its last regular"
                    " snapshot. A snapshot server nearby, or a shorter interval, loses less"
                )
        return bool(measured)

    # -- the three ways -------------------------------------------------------------------------------------------

    def stop(
        self, notice: Notice, seam: Seam, *, cut_short: Callable[[], bool], part: Callable[[float], None]
    ) -> NoReturn:
        """Secure the state before the deadline of a notice and leave. Every rank calls it, at the same place.

        Args:
            notice: why.
            seam: where training is.
            cut_short: asked while waiting: whether to give up waiting at once.
            part: waits, so many seconds at most, until rank 0 has left; on rank 0, not at all.

        Raises:
            PreemptedError: always; the process exits with :data:`EXIT_CODE`.
        """
        trainer = self._trainer
        rank_zero_info(f"lightning_spot: {notice.text}; all ranks stop after step {trainer.global_step}")
        longest_s = max((item.settings.upload_timeout_s for item in self._snapshotters), default=0.0)
        self.deadline = deadline = Deadline.of(notice.deadline_s, longest_s)
        for snapshotter in self._snapshotters:
            bring = partial(secure, trainer, snapshotter, seam, deadline, cut_short)
            if safe := snapshotter.harmless.run("the urgent snapshot", bring, "", still=_LEAVE):
                rank_zero_info(f"lightning_spot: {safe}")
        if not self._snapshotters:
            _save_beside_model_checkpoint(trainer, seam)
        part(deadline.left_s if deadline.is_named else max(RANKS_WAIT_S, deadline.left_s))
        if trainer.is_global_zero and is_requeued_by_slurm(trainer):
            requeue_slurm_job()
        raise PreemptedError(notice.text, EXIT_CODE)

    def fail(self, error: BaseException) -> None:
        """Bring what is committed to safety. The state at hand may be in mid-step: it is no snapshot."""
        begun = [snapshotter for snapshotter in self._snapshotters if snapshotter.writing.attempt is not None]
        parts: list[Callable[[], object]] = [
            partial(snapshotter.harmless.run, THE_END, snapshotter.close, None, still=STILL_ENDS)
            for snapshotter in self._snapshotters
        ]
        parts += [
            partial(earlier.node_was_left, snapshotter.location, snapshotter.writing.number, error)
            for snapshotter in begun
        ]
        do_all(parts, self.let_go)
        if not isinstance(error, PreemptedError):  # of that, more was said
            for snapshotter in begun:
                is_none = snapshotter.writing.committed is None and not self._resume.snapshots
                can_go_on = not (is_none or _would_come_again(error))
                way_on = ". The same command goes on from the newest one" if can_go_on else ""
                if can_go_on and snapshotter.writing.committed is None and (chosen := self._resume.chosen) is not None:
                    way_on = f". The same command goes on from {chosen.name} again, as this start did"
                rank_zero_info(
                    f"lightning_spot: {type(error).__name__} has ended run {snapshotter.location.name!r} at step"
                    f" {self._trainer.global_step}; {snapshotter.writing.what_is_safe()}{way_on}"
                )
        for named in self._resume.all_named:
            earlier.interrupted(named, error)

    def complete(self) -> None:
        """Return when everything committed is durable, within the time allowed. A second call does nothing."""
        if self._is_complete:
            return
        self._is_complete = True
        self._finish(complete=True)
        for named in self._resume.all_named:
            earlier.finished(named)

    def let_go(self) -> None:
        """Let go of the rings, if nothing did before."""
        self._finish(complete=False)

    def _finish(self, *, complete: bool) -> None:
        for snapshotter in self._snapshotters:
            wait_s = snapshotter.settings.upload_timeout_s
            if self.deadline is not None:
                wait_s = min(wait_s, self.deadline.left_s)
            finish = partial(snapshotter.finish, wait_s, complete=complete)
            otherwise = False if complete else None
            durable = snapshotter.harmless.run(THE_END, finish, otherwise, still=STILL_ENDS)
            forget_listings(snapshotter.location.url)  # of what is read next in this program
            if durable is not None:
                self._say_end(snapshotter, durable=durable)

    def _say_end(self, snapshotter: Snapshotter, *, durable: bool) -> None:
        """Say that the run has ended, and where its last snapshot is: of what was seen there only.

        Raises:
            TierError: if it was not seen, with ``strict``.
        """
        location, step = snapshotter.location, self._trainer.global_step
        where = (
            f"step {step}" if step else f"the end of epoch {self._trainer.current_epoch}"
        )  # steps may not be counted
        if durable:
            rank_zero_info(
                f"lightning_spot: run {location.name!r} is complete at {where}; its last snapshot is in {location.url}"
            )
            return
        why = (
            f"run {location.name!r} has ended at {where}, but its last snapshot is not durable in {location.url}:"
            " the end of the training may be lost. Cure what the warnings above name, then give the same command again"
        )
        if snapshotter.settings.ring.strict:
            raise TierError(why, tier=location.url)
        logger.error("lightning_spot: %s", why)


def _would_come_again(error: BaseException) -> bool:
    """Whether the same command would meet an error again: settings that cannot be used, which it names by itself."""
    return isinstance(
        error, (SpotError, *namespaces.classes("fabric.utilities.exceptions", "MisconfigurationException"))
    )


def _model_checkpoint(trainer: pl.Trainer) -> Any:
    kinds = namespaces.classes("callbacks", "ModelCheckpoint")
    return next((item for item in trainer.checkpoint_callbacks if isinstance(item, kinds)), None)


def _preempted(found: Any) -> str:
    """The checkpoint that is saved at a notice."""
    return f"{found.dirpath}/{found.CHECKPOINT_NAME_LAST}-preempted{found.FILE_EXTENSION}"


def _save_beside_model_checkpoint(trainer: pl.Trainer, seam: Seam) -> None:
    """Save what ``fit(ckpt_path="last")`` will find, in the directory of the user's ``ModelCheckpoint``."""
    found = _model_checkpoint(trainer)
    if found is None or not found.dirpath or seam not in (Seam.AFTER_BATCH, Seam.BEFORE_VALIDATION):
        rank_zero_info("lightning_spot: nothing was saved now; the run resumes from its last checkpoint")
        return
    path = _preempted(found)
    dump = FitState.of(trainer).dump(before_validation=seam is Seam.BEFORE_VALIDATION)
    trainer.strategy.save_checkpoint(dump.gathered(trainer, Rooms()), path)
    trainer.strategy.barrier("lightning_spot.preempted")
    forget_listings(str(found.dirpath))
    rank_zero_info(f"lightning_spot: step {trainer.global_step} is saved in {path}")


# -- the urgent snapshot ----------------------------------------------------------------------------------------------


def secure(
    trainer: pl.Trainer, snapshotter: Snapshotter, seam: Seam, deadline: Deadline, cut_short: Callable[[], bool]
) -> str:
    """Bring the training state of all ranks to safety: an urgent snapshot if there is something new and time.

    Args:
        trainer: that fits.
        snapshotter: takes its snapshots.
        seam: where training is.
        deadline: by when all has to be safe.
        cut_short: asked while waiting: whether to give up waiting at once.

    Returns:
        one line on what is safe where, on rank 0; empty on the others.
    """
    writing, ranks, step = snapshotter.writing, Agreement(trainer), trainer.global_step
    attempt = writing.attempt
    # What each rank does by itself is agreed on: where it fails on one, the others would wait in what follows.
    ranks.together(partial(_stand_still, snapshotter))
    taken = ranks.everyones(lambda: _has_taken(writing, step, deadline.left_s / 2))[0]
    differs = taken and any(ranks.everyones(lambda: _differs(writing)))
    # Of a model in shards there is one of a step: what nodes and tiers have of it would get into a second one.
    is_one = writing.in_shards is not None and writing.begun_step == step
    dump = _newest(snapshotter, ranks, seam) if (differs or not taken) and not is_one else None
    if not all(ranks.gather(dump is not None)):
        dump = None
    plan = ranks.on_rank_zero(lambda: attempt.safety.plan(deadline) if attempt is not None else None)
    take = ranks.tell(plan is not None and plan.take)
    again: Callable[[], None] | None = None
    if dump is not None and take:
        ranks.together(writing.warm)  # of a run that was resumed in front of a validation there was no step yet
        former = attempt.writer.committed if attempt is not None else None
        how = writing.together.how_last(attempt)
        # In the place of one that differs, rank 0 takes it alone: the others' shares of that name are over.
        writing.write(dump, urgent=True, wait_s=deadline.wait_s, how=ALONE if differs else how)
        writing.together.copied()
        if writing.in_shards is None and attempt is not None:
            again = partial(writing.store, dump.checkpoint, wait_s=deadline.wait_s, ranks=None)
            # A share was missing, the node was lost, or more was found that differs.
            if not _has_taken(writing, step, deadline.left_s, former):
                attempt.writer.link.wait(deadline.left_s)
                again()
    if attempt is None or plan is None:
        return ""
    return attempt.safety.bring(deadline, plan, cut_short, again)


def _stand_still(snapshotter: Snapshotter) -> None:
    snapshotter.wait_copied()
    if (iterations := snapshotter.writing.iterations) is not None:  # none comes over which to spread it
        iterations.end()


def _newest(snapshotter: Snapshotter, ranks: Agreement, seam: Seam) -> Dump | None:
    """The newest state of this rank, see :meth:`AtHand.newest`; an error of one rank is an error of all."""
    take = partial(snapshotter.at_hand.newest, seam)
    # Where ranks wait for each other within their optimizers' states, the others do not come to what would follow.
    return take() if snapshotter.writing.together.hold_their_own else ranks.together(take)


def _has_taken(writing: Writing, step: int, wait_s: float, former: Manifest | None = None) -> bool:
    """Whether a snapshot of a step is committed. One that was begun may have been skipped, or be dropped yet.

    Args:
        writing: of this rank.
        step: of the snapshot.
        wait_s: how long to wait for one that is on its way, seconds.
        former: the newest one before, in whose place it comes if it is of the same step.
    """
    attempt = writing.attempt
    if attempt is None or writing.begun_step != step:
        return False
    if writing.in_shards is not None:
        return attempt.failure(wait_s) is None
    attempt.writer.settle(wait_s)
    committed = attempt.writer.committed
    return committed is not None and committed.step == step and committed is not former


def _differs(writing: Writing) -> bool:
    """Whether the snapshot that was just taken is not as this rank's state is. It was not meant to be the last."""
    attempt = writing.attempt
    if writing.in_shards is not None:
        return writing.in_shards.newest_differs(attempt)
    writer = attempt.writer if attempt is not None else writing.together.writer
    return writer is not None and writer.newest_differs()
