"""GoodputMonitor: where the time of a run goes, over all its attempts: logged, in the progress bar, and at the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot, snapshots_of
from lightning_spot.config import format_seconds
from lightning_spot.errors import Preempted, SettingsError, TierError
from lightning_spot.exact import private
from lightning_spot.exact.namespaces import SpotCallback
from lightning_spot.goodput.ledger import Account, AttemptRecord, Spent, account_after
from lightning_spot.goodput.metric import Goodput
from lightning_spot.goodput.records import newest_record, write_record
from lightning_spot.run.location import Location

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""How long the end of ``fit`` waits for a record to be written, where the tier is slow."""


class GoodputMonitor(SpotCallback):
    """Measures productive, stalled, lost, restoring and down time over all attempts of a run.

    Every attempt keeps a small record beside the snapshots and writes it anew every ``heartbeat_s``, from a thread of
    its own: what a killed attempt did after its last heartbeat counts as down. Logged are ``goodput/goodput`` and the
    seconds ``goodput/productive_s``, ``stall_s``, ``lost_s``, ``restore_s``, ``down_s`` and ``total_s``.
    :class:`SpotCheckpoint` has one; beside :class:`RemoteSnapshot` it may be added by hand.

    Args:
        dirpath: durable directory or fsspec URL of the run; default that of the trainer's :class:`RemoteSnapshot`.
        log_every_s: seconds between two entries in the loggers.
        heartbeat_s: seconds between two writes of the record.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        metric: the :class:`Goodput` of the run so far.
    """

    def __init__(self, dirpath: str | None = None, *, log_every_s: float = 60.0, heartbeat_s: float = 10.0) -> None:
        super().__init__()
        if not (log_every_s > 0 and heartbeat_s > 0):
            raise SettingsError("GoodputMonitor: log_every_s and heartbeat_s are more than 0 seconds")
        self.metric = Goodput(sync_on_compute=False)  # rank 0 alone knows, and asks
        self._dirpath = Location.of(dirpath, None, None).url if dirpath is not None else None
        self._log_every_s, self._heartbeat_s = log_every_s, heartbeat_s
        self._record: AttemptRecord | None = None
        self._earlier = Account()
        self._snapshots: RemoteSnapshot | None = None
        self._url = ""
        self._logged_s = 0.0
        self._wake, self._stopping = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], None] = _nothing

    # -- Lightning's hooks ----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Read what earlier attempts noted (rank 0)."""
        if stage != "fit" or getattr(trainer, "fast_dev_run", False) or not trainer.is_global_zero:
            return
        snapshots = self._snapshots = next(iter(snapshots_of(trainer)), None)
        self._url = self._dirpath if self._dirpath is not None else snapshots.location.url if snapshots else ""
        if not self._url:
            raise SettingsError("GoodputMonitor needs a dirpath where the trainer has no SpotCheckpoint")
        now_s = time.time()
        previous = self._previous(snapshots.attempt if snapshots is not None else None)
        self._earlier = account_after(previous)
        number = snapshots.attempt if snapshots is not None else previous.attempt + 1 if previous is not None else 1
        self._record = record = AttemptRecord(attempt=number, begun_unix_s=now_s, unix_s=now_s, earlier=self._earlier)
        self._stopping = False
        self._wake.set()
        self._thread = threading.Thread(target=self._beat, args=(record,), name="spot-goodput", daemon=True)
        self._thread.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on time is productive."""
        record = self._record
        if record is None:
            return
        record.trained_unix_s = record.unix_s = time.time()
        record.from_step = record.step = trainer.global_step
        self._logged_s = time.monotonic()
        self._show(trainer)
        self._wake.set()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Note where training is."""
        record = self._record
        if record is None:
            return
        self._note(trainer, record)
        if time.monotonic() - self._logged_s >= self._log_every_s:
            self._logged_s = time.monotonic()
            self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole run, and say where its time went."""
        if self._record is None:
            return
        self._note(trainer, self._record)
        self._log(trainer)
        attempts = self._earlier.count + 1
        rank_zero_info(f"lightning_spot: {told(self.spent())}; {attempts} attempt{'s' if attempts > 1 else ''}")
        self._close("complete")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Note how it ended."""
        if self._record is not None:
            self._note(trainer, self._record)
        self._close("preempted" if isinstance(exception, Preempted) else "failed")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go, if nothing did before."""
        self._close("failed")

    # -- what is known --------------------------------------------------------------------------------------------

    def spent(self) -> Spent:
        """Where the time of the run went so far, on rank 0."""
        return self._earlier.spent(self._record)

    def _previous(self, number: int | None) -> AttemptRecord | None:
        """The record of the attempt before, which carries the account of all before it."""
        try:
            record = newest_record(self._url, before=number)
            return AttemptRecord.from_dict(record) if record is not None else None
        except (TierError, TypeError, ValueError) as error:
            logger.warning("lightning_spot: goodput begins anew: %s", error)
            return None

    def _note(self, trainer: pl.Trainer, record: AttemptRecord) -> None:
        record.step, record.unix_s = trainer.global_step, time.time()
        snapshots = self._snapshots
        if snapshots is not None:
            record.stall_s = snapshots.stall_s
            begun = snapshots.begun_step
            if begun >= 0 and (not record.snapshots or record.snapshots[-1][0] != begun):
                record.begin_snapshot(begun, record.unix_s)

    def _log(self, trainer: pl.Trainer) -> None:
        whole = self.spent()
        parts = {name: getattr(whole, name) for name in Spent.__slots__}
        self.metric.reset()
        self.metric.update(**parts)
        values = {"goodput": float(self.metric.compute()), **parts, "total_s": whole.total_s}
        step = private.BATCHES_THAT_STEPPED.of(trainer.fit_loop.epoch_loop)  # what Lightning itself logs by
        for target in trainer.loggers:
            target.log_metrics({f"goodput/{name}": value for name, value in values.items()}, step=step)

    def _show(self, trainer: pl.Trainer) -> None:
        """Have the progress bar show it; past ``self.log``, since what depends on time would make no resume exact."""
        bar = trainer.progress_bar_callback
        if bar is None:
            return
        original = bar.get_metrics

        def get_metrics(*arguments: Any) -> dict[str, Any]:
            return {**original(*arguments), "goodput": f"{self.spent().goodput:.3f}"}

        bar.get_metrics = get_metrics  # type: ignore[method-assign,assignment] # taken back in _close
        self._undo = lambda: bar.__dict__.pop("get_metrics", None)

    # -- the record -----------------------------------------------------------------------------------------------

    def _beat(self, record: AttemptRecord) -> None:
        stopping = False
        while not stopping:
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()
            stopping = self._stopping
            try:
                write_record(self._url, record.attempt, record.as_dict())
            except TierError as error:
                logger.debug("lightning_spot: %s", error)  # the flusher tells of a tier that fails

    def _close(self, end: str) -> None:
        self._undo()
        self._undo = _nothing
        if self._record is not None:
            self._record.end = end
        self._stopping = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_S)
        self._record = None


def told(whole: Spent) -> str:
    """One line for people."""
    parts = {"stall": whole.stall_s, "lost": whole.lost_s, "restore": whole.restore_s, "down": whole.down_s}
    shares = ", ".join(f"{name} {100 * seconds / max(whole.total_s, 1e-9):.1f} %" for name, seconds in parts.items())
    return f"goodput {100 * whole.goodput:.1f} % of {format_seconds(whole.total_s)} ({shares})"


def _nothing() -> None:
    pass
