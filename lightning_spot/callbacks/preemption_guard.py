"""PreemptionGuard: watches for notices, stops all ranks after the same step, secures the state, and exits cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_spot.callbacks.fit_callback import FitCallback
from lightning_spot.capture.unexpected import BestEffort
from lightning_spot.config import check_number
from lightning_spot.errors import PreemptedError
from lightning_spot.patches import Patches
from lightning_spot.preemption.notice import Notice
from lightning_spot.preemption.signals import SignalSource, is_of_dead_worker
from lightning_spot.preemption.watcher import Notices, Watcher, open_sources
from lightning_spot.renamed import refusing_old
from lightning_spot.session.preflight import takes_part
from lightning_spot.session.ranks import Place, StopAgreement, end_restarts_here
from lightning_spot.session.session import FitSession
from lightning_spot.state import compat
from lightning_spot.state.fit_state import FitState
from lightning_spot.state.loops import StepBoundary

if TYPE_CHECKING:
    import lightning.pytorch as pl

_FIRST_RANK_S = 3600.0  # for the first rank to bring the last snapshot to safety, before a signal ends another one


class PreemptionGuard(FitCallback):
    """Stops training in time when its machine, or its process, is about to be taken away.

    On a notice to any rank, all ranks go on to one agreed place (the end of a batch, or of a validation batch), take an
    urgent snapshot if it can be safe before the deadline, and exit with code 143. A run that is started again resumes
    exactly there. It works with :class:`RemoteSnapshot`, or alone beside a ``ModelCheckpoint``: then a checkpoint
    ``last-preempted.ckpt`` is saved in its directory, from which ``fit(ckpt_path="last")`` goes on. Give it that
    directory: its own choice is another one in each start. In a bucket Lightning finds no ``"last"``: pass the URL of
    the file, as the warning at the start says.

    :class:`~lightning_spot.SpotCheckpoint` documents the arguments.

    Raises:
        SettingsError: if a source is not known.
        PreemptedError: from ``fit``, which ends the process once the state is secured after a notice.

    Attributes:
        notice: what made the last ``fit`` stop, or ``None``.

    Example::

        trainer = L.Trainer(callbacks=[PreemptionGuard(), ModelCheckpoint("checkpoints", save_last=True)])
        trainer.fit(model, ckpt_path="last")
    """

    @refusing_old
    def __init__(self, notices: Notices = "auto", *, grace_period_s: float | None = None) -> None:
        super().__init__()
        if grace_period_s is not None:
            check_number("grace_period_s", grace_period_s, 0, above=True)
        open_sources(notices)  # an unknown source is an error here, not on the machine that is taken away
        self.notices = notices
        self.grace_period_s = float(grace_period_s) if grace_period_s is not None else None
        self.notice: Notice | None = None
        self._watcher: Watcher | None = None
        self._stop: StopAgreement | None = None
        self._is_advised = False
        self._place = Place(0)
        self._patches = Patches()
        self._best_effort = BestEffort()

    def of_a_fit(self) -> dict[str, Any]:
        """See :class:`~lightning_spot.state.namespaces.Copied`."""
        return {"_watcher": None, "_stop": None, "_place": Place(0), "_patches": Patches()}

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to watch, long before training begins."""
        if not takes_part(trainer, stage):
            return
        fit = FitSession.of(trainer)
        fit.begin()
        fit.at_end.append(self._end)
        if not any(part.writes for part in fit.callbacks(FitCallback)):
            fit.warn_of_passing_folder()
        self.notice, self._place, self._is_advised = None, Place(0), False
        self._watcher = watcher = Watcher(open_sources(self.notices))
        if trainer.world_size > 1 and not FitState.of(trainer).can(compat.STORE):
            self._watcher = None
            return
        watcher.start()
        self._stop = StopAgreement.of(trainer, lambda: _plain(watcher.notice, self.grace_period_s))
        self._keep_signals(trainer, watcher)
        self._patches.wrap(trainer.fit_loop, "run", lambda run: partial(self._run, trainer, watcher, run))

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on there are places at which to stop."""
        super().on_sanity_check_start(trainer, pl_module)
        self._pass(trainer, Place(0, 0, evaluating=True), StepBoundary.SANITY_CHECK)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Listen for the places at which training can stop, before those who take snapshots there."""
        if self._stop is None:
            return
        FitState.of(trainer).listen(self)
        fit = FitSession.of(trainer)
        fit.expect_stop()
        if self._watcher is not None and (cloud := self._watcher.cloud) is not None:
            fit.warn_of_local_dirpath(cloud)

    def before_validation(self, trainer: pl.Trainer) -> None:
        """The end of a batch; the validation that follows can be interrupted, too."""
        self._place = Place(self._place.batch + 1)
        self._pass(trainer, Place(self._place.batch, evaluating=True), StepBoundary.BEFORE_VALIDATION)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """The end of a batch, where no better place is to be had."""
        FitState.of(trainer).batch_ended(self)

    def after_batch(self, trainer: pl.Trainer) -> None:
        """The end of a batch."""
        self._pass(trainer, Place(self._place.batch + 1), StepBoundary.AFTER_BATCH)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """The end of a validation batch, also of the sanity check."""
        if self._place.evaluating:
            place = Place(self._place.batch, self._place.evaluated + 1, evaluating=True)
            boundary = StepBoundary.SANITY_CHECK if trainer.sanity_checking else StepBoundary.VALIDATION
            self._pass(trainer, place, boundary)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ranks with fewer validation batches than others stop here."""
        if self._place.evaluating and self._stop is not None:
            last = Place(self._place.batch, 2**62)
            if self._stop.passed(last):
                self._leave(trainer, StepBoundary.SANITY_CHECK if trainer.sanity_checking else StepBoundary.VALIDATION)
            self._place = Place(self._place.batch)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _pass(self, trainer: pl.Trainer, place: Place, seam: StepBoundary) -> None:
        """Go on past ``place``, unless this is where all ranks stop."""
        self._place = place
        if self._stop is not None and self._stop.passed(place):
            self._leave(trainer, seam)
        self._best_effort.run("looking for workers of loaders, and for advice", lambda: self._look(trainer), None)

    def _look(self, trainer: pl.Trainer) -> None:
        if (watcher := self._watcher) is None:
            return
        watcher.signals.expect_workers()
        if not self._is_advised and watcher.advice is not None:
            self._is_advised = True
            if (snapshotter := FitSession.of(trainer).snapshotter) is not None:
                snapshotter.pacing.expect_failure()

    def _leave(self, trainer: pl.Trainer, seam: StepBoundary) -> None:
        """Secure the state and exit, on every rank."""
        assert self._stop is not None
        assert self._watcher is not None
        watcher, facts = self._watcher, self._stop.facts or {}
        watcher.accept()
        grace_period_s = facts.pop("left_s")
        self.notice = Notice(**facts, seen_s=self._stop.called_s, grace_period_s=grace_period_s)
        if watcher.notice is not None and watcher.notice.source != SignalSource.name:
            end_restarts_here()
        FitSession.of(trainer).stop(
            self.notice, seam, cut_short=lambda: watcher.signals.repeated > 0, wait_for_first=self._stop.wait_for_first
        )

    def _run(self, trainer: pl.Trainer, watcher: Watcher, original: Callable[[], None]) -> None:
        """Train, and tell a signal to the whole process group from the fault of a worker that dies of its own."""
        try:
            original()
        except RuntimeError as error:
            if not (is_of_dead_worker(error) and watcher.signals.is_told_to_end()) or watcher.notice is None:
                raise
            self.notice = watcher.notice
            FitSession.of(trainer).workers_ended(watcher.notice, error)

    def _keep_signals(self, trainer: pl.Trainer, watcher: Watcher) -> None:
        """Have our handlers stand where Lightning would put its own, which hang or crash with several ranks."""
        watcher.signals.install()
        if not FitState.of(trainer).can(compat.SIGNALS):
            return

        def register_signal_handlers(original: Callable[[], None]) -> None:
            watcher.signals.restore()  # so that Lightning remembers the user's handlers, not ours
            original()
            watcher.signals.install()

        def restore_signal_handlers(original: Callable[[], None]) -> None:
            original()
            watcher.signals.hold()  # what is committed is still being uploaded

        compat.REGISTER_HANDLERS.wrap(self._patches, trainer, partial(partial, register_signal_handlers))
        compat.RESTORE_HANDLERS.wrap(self._patches, trainer, partial(partial, restore_signal_handlers))

    def _end(self, trainer: pl.Trainer, error: BaseException | None) -> None:
        """Stop watching, once what is committed is in safety: until then a signal does not end the process."""
        self._patches.close()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.signals.restore()
            watcher.stop()
        if (stop := self._stop) is not None:
            if error is None and watcher is not None and watcher.signals.is_held:
                stop.wait_for_first(_FIRST_RANK_S)
            stop.leave(at_exit=isinstance(error, PreemptedError) and FitSession.of(trainer).deadline is not None)
        self._stop = None
        if watcher is not None:
            watcher.signals.pass_on()


def _plain(notice: Notice | None, grace_period_s: float | None) -> dict[str, Any] | None:
    """A notice as the ranks tell it to each other: clocks differ, so it names the seconds that are left."""
    if notice is None:
        return None
    grace_period_s = notice.grace_period_s if notice.grace_period_s is not None else grace_period_s
    left_s = notice.seen_s + grace_period_s - time.monotonic() if grace_period_s is not None else None
    return {"source": notice.source, "kind": notice.kind, "text": notice.text, "left_s": left_s}
