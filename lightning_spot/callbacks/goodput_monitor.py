"""GoodputMonitor: where the time of a run goes, over all its attempts: logged, in the progress bar, and at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
from lightning_spot.capture.unexpected import failure_of
from lightning_spot.client.stores import open_store
from lightning_spot.config import check_number, format_bytes, format_count, format_seconds
from lightning_spot.errors import PreemptedError, SettingsError
from lightning_spot.goodput.ledger import Spent, lost_steps
from lightning_spot.goodput.metric import Goodput
from lightning_spot.goodput.records import Journal, begin_unix_s
from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.server.runs import Figures
from lightning_spot.session.preflight import takes_part
from lightning_spot.session.session import FitSession
from lightning_spot.session.snapshotter import Snapshotter
from lightning_spot.state.loggers import logged_step
from lightning_spot.state.namespaces import SpotCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl

_BADPUT = ("blocked_s", "lost_s", "restore_s", "startup_s", "down_s")
_NO_STEP = -1.0  # logged before the first snapshot: no logger gets a new column in the middle of a run


class GoodputMonitor(SpotCallback):
    """Measures productive, stalled, lost, starting, restoring and down time over all attempts of a run.

    Every attempt keeps a small record beside the snapshots and writes it anew every ``heartbeat_s``, from a thread of
    its own. At every step it notes in memory of this host how far it got, which outlives a killed trainer. Where the
    machine is gone too, the snapshots tell. Logged are ``spot/goodput``, the seconds
    ``spot/badput_{blocked,lost,restore,startup,down}_s``, ``spot/last_committed_step``, ``spot/last_persisted_step``
    (-1 before the first snapshot) and ``spot/snapshot_blocked_ms``. :class:`SpotCheckpoint` has one; a
    :class:`RemoteSnapshot` needs one beside it.

    Args:
        log_every_s: seconds between two entries in the loggers; ``None`` for none there, nor in the progress bar.
        heartbeat_s: seconds between two writes of the record.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        metric: the :class:`Goodput` of the run so far.
    """

    def __init__(self, *, log_every_s: float | None = 60.0, heartbeat_s: float = 10.0) -> None:
        super().__init__()
        if log_every_s is not None:
            check_number("log_every_s", log_every_s, 0, above=True)
        check_number("heartbeat_s", heartbeat_s, 0, above=True)
        self.metric = Goodput(sync_on_compute=False)  # rank 0 alone knows, and asks
        self._log_every_s = float(log_every_s) if log_every_s is not None else None
        self._heartbeat_s = float(heartbeat_s)
        self._journal: Journal | None = None
        self._ended: Journal | None = None
        self._begun_unix_s = self._logged_s = 0.0
        self._patches = Patches()

    def of_a_fit(self) -> dict[str, Any]:
        """See :class:`~lightning_spot.state.namespaces.Copied`."""
        return {"_journal": None, "_ended": None, "_patches": Patches()}

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Read what earlier attempts noted (rank 0)."""
        if not (takes_part(trainer, stage) and trainer.is_global_zero):
            return
        fit = FitSession.of(trainer)
        if not fit.callbacks(RemoteSnapshot):
            raise SettingsError("GoodputMonitor needs a RemoteSnapshot in the same Trainer, whose run it measures")
        self._begun_unix_s, self._journal, self._ended = begin_unix_s(), None, None
        fit.at_end.append(self._end)
        if fit.snapshotter is not None and fit.snapshotter.writing.number:
            self._begin(trainer)  # else the attempt begins later in setup, or when it is decided what to resume from

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on time is productive."""
        fit = FitSession.of(trainer)
        if not trainer.is_global_zero or fit.snapshotter is None:
            return
        with self._measuring():
            journal, chosen = self._journal or self._begin(trainer), fit.resume.chosen
            taken_s = chosen.created_unix_s if chosen is not None else None
            journal.train(trainer.global_step, taken_s, fit.resume.took_s)
            self._log(trainer)  # from the first row on: no logger gets a new column in the middle of a run
            self._show(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Note where training is."""
        if self._journal is not None:
            with self._measuring():
                self._note(trainer)
                if self._log_every_s is not None and time.monotonic() - self._logged_s >= self._log_every_s:
                    self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole run, and say where its time went."""
        if self._journal is not None:
            with self._measuring():
                self._note(trainer)
                self._log(trainer)
                self._close("complete")
                FitSession.of(trainer).summarize = partial(self._say_summary, _snapshotter(trainer))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the summary, once everything is uploaded."""
        if self._ended is not None:
            FitSession.of(trainer).complete()
            self._say_summary(_snapshotter(trainer))

    def _end(self, trainer: pl.Trainer, error: BaseException | None) -> None:
        """Note how it ended, if nothing did before: with an error, or nothing was left to train."""
        is_preempted = isinstance(error, PreemptedError)
        if error is not None:
            with self._measuring():
                self._note(trainer)
        with self._measuring():
            self._close("complete" if error is None else "preempted" if is_preempted else "failed")
        if is_preempted and self._ended is not None:
            self._say_summary(_snapshotter(trainer))

    # -- what is known --------------------------------------------------------------------------------------------

    def spent(self) -> Spent:
        """Where the time of the run went so far, on rank 0; nothing outside of a ``fit``."""
        return self._journal.spent if self._journal is not None else Spent()

    @contextlib.contextmanager
    def _measuring(self) -> Iterator[None]:
        """What fails is turned off, and training goes on."""
        try:
            yield
        except Exception as error:
            failure = failure_of(error)
            text = "goodput is not measured any more: {failure}. Training continues"
            say(logging.WARNING, "goodput-stopped", text, failure=failure)
            journal, self._journal = self._journal, None
            if journal is not None:
                journal.leave()

    def _begin(self, trainer: pl.Trainer) -> Journal:
        fit, snapshotter = FitSession.of(trainer), _snapshotter(trainer)
        self._journal = journal = Journal(
            snapshotter.location.url,
            snapshotter.writing.number,
            snapshots=fit.resume.snapshots,
            heartbeat_s=self._heartbeat_s,
            begun_unix_s=self._begun_unix_s,
            newest_persisted=partial(_newest_in, snapshotter.location.url),
            tell=partial(_tell, fit, snapshotter),
        )
        fit.report = journal.hurry
        return journal

    def _note(self, trainer: pl.Trainer) -> None:
        if self._journal is not None:
            snapshotter = _snapshotter(trainer)
            self._journal.note(trainer.global_step, snapshotter.pacing.stall_s, snapshotter.writing.taken)

    def _log(self, trainer: pl.Trainer) -> None:
        whole, snapshotter, self._logged_s = self.spent(), _snapshotter(trainer), time.monotonic()
        self.metric.reset()
        self.metric.update(**{name: getattr(whole, name) for name in Spent.__slots__})
        values = {"goodput": float(self.metric.compute())}
        values |= {f"badput_{name}": getattr(whole, name) for name in _BADPUT}
        committed = snapshotter.writing.committed
        persisted = self._journal.persisted if self._journal is not None else None
        values["last_committed_step"] = _NO_STEP if committed is None else float(committed.step)
        values["last_persisted_step"] = _NO_STEP if persisted is None else float(persisted[0])
        values["snapshot_blocked_ms"] = 1000 * snapshotter.pacing.blocked_each_s
        if self._log_every_s is None:
            return
        step = logged_step(trainer)  # what Lightning itself logs by
        for target in trainer.loggers:
            target.log_metrics({f"spot/{name}": value for name, value in values.items()}, step=step)

    def _show(self, trainer: pl.Trainer) -> None:
        """Have the progress bar show it; past ``self.log``, since what depends on time would make no resume exact."""
        bar = trainer.progress_bar_callback
        if bar is None or self._log_every_s is None:
            return

        def get_metrics(original: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
            return {**original(*arguments), "goodput": f"{self.spent().goodput:.3f}"}

        self._patches.wrap(bar, "get_metrics", partial(partial, get_metrics))

    def _close(self, end: str) -> None:
        self._patches.close()
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close(end)
            self._ended = journal

    def _say_summary(self, snapshotter: Snapshotter) -> None:
        """Log where the time of the run went, and what became of the snapshots of this attempt."""
        journal, self._ended = self._ended, None
        if journal is None or journal.record.trained_unix_s is None:
            return
        with self._measuring():
            whole, writing = journal.spent, snapshotter.writing
            lost = sum(lost_steps(journal.record.known))
            lines = [
                "goodput {goodput:.1%} of {total} in {attempts}",
                "  steps      {step} done, {lost_steps} done again",
                "  time       " + ", ".join(f"{name.removesuffix('_s')} {{{name}:.1f}} s" for name in _BADPUT),
                "  snapshots  {taken} taken, {skipped} skipped, {dropped} dropped, {uploaded} uploaded",
            ]
            facts: dict[str, Any] = {**{name: getattr(whole, name) for name in _BADPUT}, **_counts(snapshotter)}
            say(
                logging.INFO,
                "run-summary",
                "\n".join(lines),
                about=snapshotter.location.name,
                goodput=whole.goodput,
                total=format_seconds(whole.total_s),
                attempts=format_count(journal.record.before.count + 1, "attempt"),
                step=journal.record.step,
                lost_steps=lost,
                uploaded=format_bytes(writing.uploaded_bytes),
                uploaded_bytes=writing.uploaded_bytes,
                **facts,
            )


def _snapshotter(trainer: pl.Trainer) -> Snapshotter:
    """What takes the snapshots of a ``fit``, while one is measured."""
    found = FitSession.of(trainer).snapshotter
    assert found is not None
    return found


def _counts(snapshotter: Snapshotter) -> dict[str, float]:
    writing = snapshotter.writing
    return {"taken": writing.taken, "skipped": snapshotter.skipped, "dropped": writing.dropped}


def _newest_in(url: str) -> tuple[int, float] | None:
    """Step and time of the newest snapshot in the storage of a run that a resume takes as persisted."""
    holdings = open_store(url).survey()
    newest = next((each for each in holdings.manifests if each.exact and not holdings.sets_aside(each.order)), None)
    return (newest.step, newest.created_unix_s) if newest is not None else None


def _tell(fit: FitSession, snapshotter: Snapshotter, journal: Journal) -> None:
    """Tell the local server what was measured. Any thread may call it."""
    is_noticed = fit.deadline is not None
    end = "preempted" if is_noticed and journal.record.end == "running" else journal.record.end
    whole, persisted = journal.spent, journal.persisted or (-1, 0.0)
    snapshotter.report(
        Figures(
            snapshots=_counts(snapshotter),
            blocked=snapshotter.pacing.blocked,
            seconds={name.removesuffix("_s"): getattr(whole, name) for name in Spent.__slots__},
            attempts=dict(Counter([*(each.end for each in journal.record.before.latest), end])),
            notices=int(is_noticed),
            persisted_step=persisted[0],
            persisted_unix_s=persisted[1],
        )
    )
