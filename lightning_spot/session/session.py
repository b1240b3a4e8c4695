"""What our callbacks share in one trainer: its resume, the snapshotters, and how the ``fit`` ends.

A notice stops a ``fit`` at a step boundary, an exception breaks it off, or it comes to its end. In each case snapshots
are uploaded first; then exact state, watchers and the server are let go. One :class:`Deadline` bounds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lightning_spot.capture.unexpected import STILL_ENDS, THE_END
from lightning_spot.config import read_environment
from lightning_spot.errors import PreemptedError, SpotError, TierError
from lightning_spot.events import CLOSE_S, EventKind, Events
from lightning_spot.interval.deadline import Deadline
from lightning_spot.preemption.notice import Notice
from lightning_spot.preemption.signals import is_of_dead_worker
from lightning_spot.run.location import local_file_system
from lightning_spot.say import say, show
from lightning_spot.session import run_lookup
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.preflight import check_alike, parts_of
from lightning_spot.session.ranks import is_requeued_by_slurm, requeue_slurm_job
from lightning_spot.session.resume import Resume
from lightning_spot.session.snapshotter import Snapshotter
from lightning_spot.state import namespaces
from lightning_spot.state.dump import Dump, gather
from lightning_spot.state.fit_state import FitState
from lightning_spot.state.loops import StepBoundary
from lightning_spot.state.per_trainer import PerTrainer
from lightning_spot.state.sharded import is_sharded
from lightning_spot.store.fsspec_client import forget_listings

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_spot.session.coordinator import Coordinator

_LEAVE = "all ranks leave, and the run goes on from the snapshot before"

EXIT_CODE = 143
"""128 + SIGTERM: what a process that was terminated exits with, and what job schedulers know as such."""

RANKS_WAIT_S = 300.0
"""How long ranks wait at least for the first one to secure the snapshot, where the notice names no end."""


C = TypeVar("C")


class FitSession(PerTrainer):
    """One ``fit``, whether :class:`SpotCheckpoint` holds our callbacks or the user lists them.

    Every rank has one. It begins with the first of our callbacks' ``setup``, and ends with :meth:`end`.

    Attributes:
        resume: what it goes on from.
        snapshotter: takes its snapshots; ``None`` if no callback does.
        deadline: by when all has to be safe; ``None`` while no notice stops the run.
        summarize: logs the summary of the run; where the end is an error, that comes last.
        at_end: called with the trainer, and the error that ends the ``fit``, once snapshots are uploaded and everything
            else is let go; the last one first.
        report: has servers told at once what was measured, without waiting for it.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._renew()

    def _renew(self) -> None:
        self._has_begun, self._is_complete, self._pid = False, False, os.getpid()
        self.snapshotter: Snapshotter | None = None
        self.resume = Resume(self._trainer)
        self.deadline: Deadline | None = None
        self.summarize: Callable[[], object] = lambda: None
        self.at_end: list[Callable[[pl.Trainer, BaseException | None], None]] = []
        self._events = Events()
        self.report: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """Follow the training, from ``setup`` on. A second call does nothing. Every rank calls it.

        Raises:
            SettingsError: if ranks differ.
        """
        if not self._has_begun:
            show()
            check_alike(self._trainer)
            self._has_begun = True
            self._events = self._open_events()
        FitState.of(self._trainer).attach()

    def callbacks(self, kind: type[C]) -> list[C]:
        """Our callbacks of one kind, also those that another one is composed of."""
        return [part for part in parts_of(self._trainer) if isinstance(part, kind)]

    # -- events ---------------------------------------------------------------------------------------------------

    def _open_events(self) -> Events:
        """Tell of events from now on, on rank 0."""
        if not self._trainer.is_global_zero:
            return Events()
        environment = read_environment()
        told = (part.tells for part in parts_of(self._trainer) if hasattr(part, "tells"))
        on_event, webhook = next(told, (None, None))
        webhook = webhook or environment.webhook if environment.drill_dir is None else None
        return Events(on_event, webhook, self._now)

    def _now(self) -> tuple[str, int, int]:
        """Name of the run, number of the attempt and step."""
        trainer, resume = self._of(), self.resume
        name = resume.location.name if resume.location is not None else ""
        return name, resume.attempt, trainer.global_step if trainer is not None else 0

    def emit(self, kind: EventKind, message: str, **detail: Any) -> None:
        """Tell an event, see :meth:`Events.emit`."""
        self._events.emit(kind, message, **detail)

    # -- notices --------------------------------------------------------------------------------------------------

    def expect_stop(self) -> None:
        """Somebody watches for notices: the state in front of a validation is kept at hand from now on."""
        if self.snapshotter is not None:
            self.snapshotter.keeps_state = True

    def warn_of_passing_folder(self) -> None:
        """Say early, before ``ModelCheckpoint`` has chosen one, that what is saved at a notice will not be found again.

        Of a ``ModelCheckpoint`` that is given none, the folder is the logger's, which is another one in each start. In
        a bucket, Lightning does not find what is there: it looks for it on the disk.
        """
        found, loggers = _model_checkpoint(self._trainer), self._trainer.loggers
        if found is None:
            return
        if "://" in str(found.dirpath or ""):
            where, instead = "in a bucket, and Lightning looks on the disk", f"pass ckpt_path={_preempted(found)!r}"
        elif found.dirpath or not loggers or isinstance(getattr(loggers[0], "version", None), str):
            return  # the user has named a version: those that a logger counts are numbers
        else:
            where, instead = "in the logger's folder, which changes at each start", "set dirpath, or the version"
        text = (
            "ModelCheckpoint writes {where}: after a notice, fit(ckpt_path='last') finds nothing. Then {instead}; or"
            " use SpotCheckpoint, which resumes by itself"
        )
        facts: dict[str, Any] = {"where": where, "instead": instead}
        say(logging.WARNING, "last-not-found", text, about=found.dirpath, only_rank_zero=True, **facts)

    def warn_of_local_dirpath(self, cloud: str) -> None:
        """Warn, on a VM of a cloud, of a run that is stored on the disk of the VM only.

        Args:
            cloud: that was found.
        """
        if self.snapshotter is None or read_environment().drill_dir is not None:
            return
        url = self.snapshotter.location.url
        if (kind := local_file_system(url)) is not None:
            text = (
                "dirpath {about} is on a local file system ({kind}) of a VM ({cloud}), and lost with it. Use a bucket,"
                " or a disk that outlives the VM"
            )
            say(logging.WARNING, "dirpath-local", text, about=url, only_rank_zero=True, kind=kind, cloud=cloud)

    # -- the end --------------------------------------------------------------------------------------------------

    def stop(
        self,
        notice: Notice,
        seam: StepBoundary,
        *,
        cut_short: Callable[[], bool],
        wait_for_first: Callable[[float], None],
    ) -> NoReturn:
        """Secure the state before the deadline of a notice and leave. Every rank calls it, at the same place.

        Args:
            notice: why.
            seam: where training is.
            cut_short: asked while waiting: whether to give up waiting at once.
            wait_for_first: waits, so many seconds at most, until rank 0 has left; on rank 0, not at all.

        Raises:
            PreemptedError: always; the process exits with :data:`EXIT_CODE`.
        """
        trainer, snapshotter, safe = self._trainer, self.snapshotter, ""
        text = "{notice}; all ranks stop after step {step}"
        say(logging.INFO, "stopping", text, only_rank_zero=True, notice=notice.text, step=trainer.global_step)
        longest_s = snapshotter.settings.upload_timeout_s if snapshotter is not None else 0.0
        self.deadline = deadline = Deadline.of(notice.deadline_s, longest_s)
        self.report()
        if snapshotter is None:
            _save_beside_model_checkpoint(trainer, seam)
        else:
            bring = partial(secure, trainer, snapshotter, seam, deadline, cut_short)
            safe = snapshotter.best_effort.run("the urgent snapshot", bring, "", still=_LEAVE)
            if safe:
                say(logging.INFO, "secured", "{safe}", about=snapshotter.location.url, only_rank_zero=True, safe=safe)
        wait_for_first(deadline.left_s if deadline.is_named else max(RANKS_WAIT_S, deadline.left_s))
        raise self._preempted(notice, safe)

    def workers_ended(self, notice: Notice, error: BaseException) -> NoReturn:
        """Leave, since the signal of a notice has ended workers of a loader, too. In mid-step nothing can be secured.

        Args:
            notice: that came by a signal.
            error: that training met where it waited for a worker.

        Raises:
            PreemptedError: always; the process exits with :data:`EXIT_CODE`.
        """
        text = (
            "{notice}. The signal has ended workers of a DataLoader, too, so no snapshot can be taken now. Send signals"
            " to the main process only"
        )
        say(logging.WARNING, "workers-ended", text, notice=notice.text)
        raise self._preempted(notice, "") from error

    def _preempted(self, notice: Notice, safe: str) -> PreemptedError:
        """What ends the process; the job's scheduler is asked for another turn."""
        if self._trainer.is_global_zero and is_requeued_by_slurm(self._trainer):
            requeue_slurm_job()
        self.emit("preempted", f"{notice.text}; {safe}" if safe else notice.text, source=notice.source)
        return PreemptedError(notice.text, EXIT_CODE)

    def complete(self) -> None:
        """Return when everything committed is durable, within the time allowed. A second call does nothing."""
        if self._is_complete:
            return
        self._is_complete = True
        self._finish(complete=True)
        if self.resume.named is not None:
            run_lookup.finished(self.resume.named)

    def end(self, error: BaseException | None = None) -> None:
        """Upload what is committed, and let the trainer go; the one way out. A second call does nothing.

        The state of a ``fit`` that an exception ends may be in mid-step: no snapshot is taken of it.

        Args:
            error: that ends the ``fit``.
        """
        if os.getpid() != self._pid:  # a forked child, whose end is not that of the fit
            return
        try:
            with ExitStack() as ends:  # from the last one on, whatever fails in one
                ends.callback(self._renew)
                for leave in self.at_end:
                    ends.callback(leave, self._trainer, error)
                ends.callback(self._close_events)
                ends.callback(self.resume.let_go)
                ends.callback(FitState.of(self._trainer).detach)
                if error is not None:
                    self._interrupt(error, ends)
                ends.callback(self._finish, complete=error is not None and run_lookup.is_given_up(error))
        except BaseException as raised:
            raised.__context__ = raised.__context__ or error  # a stack drops what is being handled around it
            raise

    def _close_events(self) -> None:
        """Wait some seconds until events are sent, as far as a notice leaves them."""
        deadline = self.deadline
        self._events.close(min(CLOSE_S, deadline.left_s) if deadline is not None and deadline.is_named else CLOSE_S)

    def _interrupt(self, error: BaseException, ends: ExitStack) -> None:
        """Say what an exception has ended, once snapshots are uploaded, and note it for the next ``fit``."""
        if self.resume.named is not None:
            ends.callback(run_lookup.interrupted, self.resume.named, error)
        snapshotter = self.snapshotter
        if snapshotter is None or snapshotter.writing.attempt is None or not self._trainer.is_global_zero:
            return
        if self.deadline is None or not isinstance(error, PreemptedError):  # else more was said
            ends.callback(self._say_interrupted, error, snapshotter)

    def _say_interrupted(self, error: BaseException, snapshotter: Snapshotter) -> None:
        is_none = snapshotter.writing.committed is None and not self.resume.snapshots
        can_go_on = not (is_none or _would_come_again(error))
        way_on = ". The same command goes on from the newest one" if can_go_on else ""
        if can_go_on and snapshotter.writing.committed is None and (chosen := self.resume.chosen) is not None:
            way_on = f". The same command goes on from {chosen.name} again, as this start did"
        text = "{error} has ended run {about!r} at step {step}; {safe}{way_on}"
        step, safe = self._trainer.global_step, snapshotter.writing.what_is_safe()
        facts: dict[str, Any] = {"error": _what(error), "step": step, "safe": safe, "way_on": way_on}
        say(logging.INFO, "run-interrupted", text, about=snapshotter.location.name, only_rank_zero=True, **facts)

    def _finish(self, *, complete: bool) -> None:
        if (snapshotter := self.snapshotter) is None:
            return
        wait_s = snapshotter.settings.upload_timeout_s
        if self.deadline is not None:
            wait_s = min(wait_s, self.deadline.left_s)
        finish = partial(snapshotter.finish, wait_s, complete=complete)
        otherwise = False if complete else None
        durable = snapshotter.best_effort.run(THE_END, finish, otherwise, still=STILL_ENDS)
        forget_listings(snapshotter.location.url)  # of what is read next in this program
        if durable is not None:
            self._say_end(snapshotter, durable=durable)

    def _say_end(self, snapshotter: Snapshotter, *, durable: bool) -> None:
        """Say that the run has ended, and where its last snapshot is: of what was seen there only.

        Raises:
            TierError: if it was not seen, with ``strict``.
        """
        location, step = snapshotter.location, self._trainer.global_step
        # Steps may not be counted.
        where = f"step {step}" if step else f"the end of epoch {self._trainer.current_epoch}"
        facts: dict[str, Any] = {"about": location.url, "name": location.name, "where": where}
        self.emit("finished", f"its last snapshot is {'' if durable else 'not '}in {location.url}", persisted=durable)
        if durable:
            text = "run {name!r} is complete at {where}; its last snapshot is in {about}"
            say(logging.INFO, "run-complete", text, only_rank_zero=True, **facts)
            return
        self.summarize()
        text = (
            "run {name!r} has ended at {where}, but {about} does not have its last snapshot, which may be lost. Fix"
            " what the warnings name, then run the same command again"
        )
        if snapshotter.settings.ring.strict:
            raise TierError(text.format(**facts), tier=location.url)
        say(logging.ERROR, "end-not-durable", text, **facts)


def _would_come_again(error: BaseException) -> bool:
    """Whether the same command would meet an error again: settings that cannot be used, which it names by itself."""
    return isinstance(
        error, (SpotError, *namespaces.classes("fabric.utilities.exceptions", "MisconfigurationException"))
    )


def _what(error: BaseException) -> str:
    """What has ended a run, for people."""
    if isinstance(error, PreemptedError):
        return "a signal to the process group"
    return "a DataLoader worker that died" if is_of_dead_worker(error) else type(error).__name__


def _model_checkpoint(trainer: pl.Trainer) -> Any:
    kinds = namespaces.classes("callbacks", "ModelCheckpoint")
    return next((item for item in trainer.checkpoint_callbacks if isinstance(item, kinds)), None)


def _preempted(found: Any) -> str:
    """The checkpoint that is saved at a notice."""
    return f"{found.dirpath}/{found.CHECKPOINT_NAME_LAST}-preempted{found.FILE_EXTENSION}"


def _save_beside_model_checkpoint(trainer: pl.Trainer, seam: StepBoundary) -> None:
    """Save what ``fit(ckpt_path="last")`` will find, in the directory of the user's ``ModelCheckpoint``."""
    found = _model_checkpoint(trainer)
    if found is None or not found.dirpath or seam not in (StepBoundary.AFTER_BATCH, StepBoundary.BEFORE_VALIDATION):
        text = "nothing was saved now; the run resumes from its last checkpoint"
        say(logging.INFO, "secured", text, only_rank_zero=True)
        return
    path = _preempted(found)
    dump = FitState.of(trainer).dump(before_validation=seam is StepBoundary.BEFORE_VALIDATION)
    trainer.strategy.save_checkpoint(dump.complete(gather(trainer, dump.state)), path)
    trainer.strategy.barrier("lightning_spot.preempted")
    forget_listings(str(found.dirpath))
    text = "step {step} is saved in {about}"
    say(logging.INFO, "secured", text, about=path, only_rank_zero=True, step=trainer.global_step)


# -- the urgent snapshot ----------------------------------------------------------------------------------------------


def secure(
    trainer: pl.Trainer, snapshotter: Snapshotter, seam: StepBoundary, deadline: Deadline, cut_short: Callable[[], bool]
) -> str:
    """Bring the training state of all ranks to safety: an urgent snapshot if there is something new and time.

    What each rank does by itself is agreed on: where it fails on one, the others would wait in what follows.

    Args:
        trainer: that fits.
        snapshotter: takes its snapshots.
        seam: where training is.
        deadline: by when all has to be safe.
        cut_short: asked while waiting: whether to give up waiting at once.

    Returns:
        one line on what is safe where, on rank 0; empty on the others.
    """
    ranks, attempt = Agreement(trainer), snapshotter.writing.attempt
    ranks.together(partial(_stand_still, snapshotter))
    dump = _not_taken_yet(trainer, snapshotter, ranks, seam, deadline)
    plan = ranks.on_rank_zero(lambda: attempt.plan(deadline) if attempt is not None else None)
    is_time = ranks.tell(plan is not None and plan.take)
    if dump is not None and is_time:
        _take_urgent(snapshotter.writing, ranks, dump, deadline)
    return attempt.secure(deadline, plan, cut_short) if attempt is not None and plan is not None else ""


def _not_taken_yet(
    trainer: pl.Trainer, snapshotter: Snapshotter, ranks: Agreement, seam: StepBoundary, deadline: Deadline
) -> Dump | None:
    """The newest state of this rank if all ranks have one that no snapshot has, and can write one; else ``None``."""
    writing, step = snapshotter.writing, trainer.global_step
    is_taken = ranks.everyones(lambda: _has_taken(writing, step, deadline.left_s / 2))[0]
    # Of several files, or several ranks': what places have of the snapshot of a step would get into a second one.
    is_one = (ranks.size > 1 or is_sharded(trainer)) and writing.begun_step == step
    dump = None
    if not is_taken and not is_one:  # an error of one rank is an error of all
        take = partial(snapshotter.newest_state, seam)
        # Where ranks wait for each other within their optimizers' states, the others do not come to what would follow.
        dump = take() if writing.hold_their_own else ranks.together(take)
    return dump if all(ranks.gather(dump is not None)) else None


def _take_urgent(writing: Coordinator, ranks: Agreement, dump: Dump, deadline: Deadline) -> None:
    """Take an urgent snapshot; of one rank, once more if the server is lost that has it."""
    ranks.together(writing.warm)  # of a run that was resumed in front of a validation there was no step yet
    former, attempt = writing.committed, writing.attempt
    write = partial(writing.write, dump, writing.decide_last(urgent=True), wait_s=deadline.wait_s)
    write()
    writing.copied()
    if ranks.size > 1 or attempt is None:
        return
    # The server was lost, or more was found that differs.
    if not _has_taken(writing, writing.begun_step, deadline.left_s) or writing.committed is former:
        attempt.writer.link.wait(deadline.left_s)
        write()


def _stand_still(snapshotter: Snapshotter) -> None:
    snapshotter.wait_copied()
    snapshotter.writing.schedule.end()  # none comes over which to spread it


def _has_taken(writing: Coordinator, step: int, wait_s: float) -> bool:
    """Whether a snapshot of a step is committed. One that was begun may have been skipped, or be dropped yet.

    Args:
        writing: of this rank.
        step: of the snapshot.
        wait_s: how long to wait for one that is on its way, seconds.
    """
    attempt = writing.attempt
    if attempt is None or writing.begun_step != step:
        return False
    attempt.writer.wait_all(wait_s)
    committed = writing.committed
    return committed is not None and committed.step == step
