"""SpotCheckpoint: the one callback most users need. Snapshots, the interval and the resume, composed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_spot.callbacks.auto_resume import AutoResume
from lightning_spot.callbacks.fit_callback import move_to_the_end
from lightning_spot.callbacks.goodput_monitor import GoodputMonitor
from lightning_spot.callbacks.preemption_guard import PreemptionGuard
from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
from lightning_spot.capture.partitions import CopyMode
from lightning_spot.config import (
    DEVICE_BUFFER,
    KEEP,
    SERVER_CALL_TIMEOUT_S,
    SERVER_IDLE_TIMEOUT_S,
    UPLOAD_TIMEOUT_S,
    check_flag,
)
from lightning_spot.events import OnEvent
from lightning_spot.goodput.metric import Goodput
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.preemption.notice import Notice
from lightning_spot.preemption.watcher import Notices
from lightning_spot.renamed import refusing_old
from lightning_spot.run.location import Location
from lightning_spot.say import say
from lightning_spot.session.coordinator import OnError
from lightning_spot.session.preflight import takes_part
from lightning_spot.session.selection import OnResumeFailure, ResumedFrom
from lightning_spot.state.dataloader import DataResume
from lightning_spot.state.namespaces import SpotCallback
from lightning_spot.store.retention import Keep

if TYPE_CHECKING:
    import lightning.pytorch as pl

Part = TypeVar("Part", bound=SpotCallback)


class SpotCheckpoint(SpotCallback):
    """Makes a training run survive its machine: snapshots beside training, and a resume by the same command.

    Args:
        dirpath: directory, or URL in a bucket, in which the run is stored, such as ``checkpoints/run-1`` or
            ``s3://bucket/run-1``.
        servers: ``spot://host:port`` of one or several snapshot servers on other hosts, to which the server on this
            host sends each snapshot; default none. Of several servers, a run uses one (with ``replicas``, so many),
            and the next one if that fails. Shards of a model on several hosts are spread over all of them.
        local_server: whether a process on this host holds the snapshots (default). It is started by itself and
            outlives a killed trainer. With ``False`` the trainer's own memory holds them.
        replicas: number of snapshot servers that keep a copy of each snapshot, at least 1 (default), at most as many
            as ``servers`` names. With 2, one of them may be lost.
        run_name: name of the run; default the last component of ``dirpath``.
        interval: policy that decides when a snapshot is taken; default :class:`ConvergenceAware`, which measures what
            it needs.
        keep: number of newest snapshots that are kept in storage and at each server, at least 1; default 2. Or
            :class:`Keep`, or its arguments as a mapping: storage keeps others as well, such as the best.
        notices: sources of preemption notices. ``"auto"`` (default) watches signals, the file that
            ``LIGHTNING_SPOT_NOTICE_FILE`` names, and the cloud that this machine is detected to be on. ``None``: no
            source. Or one or several of ``"aws"``, ``"gcp"``, ``"azure"``, ``"alibaba"``, ``"signal"``,
            ``"file:PATH"``, a function, or an object of your own.
        grace_period_s: seconds from a notice to the end of the machine, if the notice does not name them; default
            ``LIGHTNING_SPOT_GRACE_PERIOD_S``, or unknown.
        resume: whether a start resumes from the newest good snapshot (default). ``False`` starts afresh and keeps the
            old snapshots. A ``ckpt_path`` that is given to ``fit`` always wins.
        data_resume: how a resumed epoch returns to its position in the data. ``"replay"`` loads the earlier batches of
            the epoch again, which is exact even with random augmentation in workers. ``"seek"`` only draws their
            indices. ``"auto"`` (default) seeks if the loader has no workers, which is exact, too, and else replays.
        on_resume_failure: what a start does if two earlier starts resumed from the newest snapshot and ended without a
            snapshot of their own: ``"error"`` (default) resumes from it again, with a warning; ``"older"`` resumes
            from the snapshot before it, as far as ``keep`` has left any.
        slots: number of buffers that each rank has for its part of a snapshot in this host's memory, at least 2. All
            ranks of a host together need up to ``slots`` times the size of a checkpoint. With fewer slots, more
            snapshots are skipped while uploads are slow. Default 3, and one more for each replica at ``servers``; for a
            GPU, up to 2 beyond that.
        memory_limit: most memory for the slots, in bytes or with a unit (``"64GiB"``); default half of this host's
            memory.
        on_full: what happens if a snapshot is due and every slot is in use: ``"skip"`` that snapshot (default), or
            ``"wait"`` until an upload has freed a slot.
        min_upload_interval_s: least seconds between two snapshots that are uploaded to storage, at least 0; those
            between them stay in memory. With 0, storage gets the newest one whenever the last upload has ended.
            ``None`` (default) does so, too, unless several snapshots are taken within 5 s: then the pause between two
            uploads is 40 times as long as an upload takes, 30 s at most if an upload takes less. The last snapshot of a
            run, and the one at a notice, is uploaded in any case.
        compression: how changes since the last snapshot are sent to a snapshot server, without loss: ``"auto"``
            (default) compresses them on slow links, ``"always"`` always, ``"off"`` never. Unchanged bytes are not
            sent. The server holds a plain checkpoint file in any case.
        lossy: ``"topk"`` sends 9 of 10 snapshots to snapshot servers as approximations, with 1 % of the changed
            numbers. It is **not exact**, and a resume from such a snapshot warns. Default ``None``.
        upload_timeout_s: most seconds that ``fit`` waits at its end until storage has the last snapshot; default 300.
        server_idle_timeout_s: seconds after which the local server ends if no trainer comes; default 900.
        server_call_timeout_s: most seconds that a call to the local server may block training, more than 0; default 5.
            A server that does not answer in time is replaced.
        log_goodput: whether the loggers receive the goodput of the run every 60 s, and the progress bar shows it;
            default ``True``.
        on_error: what happens if snapshots cannot be taken at all: ``"warn"`` and train without them (default), or
            ``"raise"`` the error.
        on_event: function that is called on rank 0 with an :class:`Event` when the run is preempted, resumed, degraded,
            recovered or finished; default none. Training waits for it, but if the run is degraded or recovered: then a
            thread of its own calls it. An exception in it is a warning.
        webhook: URL to which each event is sent as JSON, in the background; the field ``text`` is what a chat shows.
            Default ``LIGHTNING_SPOT_WEBHOOK``, or none. Such a URL is a secret: prefer the variable.
        copy_mode: when the state of a snapshot is copied out of the model. ``"eager"`` copies all of it at once,
            beside the next iteration. ``"asymmetric"`` copies parts of it through the next iteration, larger ones where
            the hardware was measured to be idle for longer. ``"backward"`` copies it during the next backward pass, as
            gradients become ready. ``"blocking"`` has training wait and copies with all processors; for one process
            that trains on a CPU only, elsewhere it is ``"eager"``. ``"auto"`` (default) tries the modes that are
            possible and keeps the one with the shortest iterations.
        device_buffer: memory on each GPU for the end of a copy, in bytes or with a unit; default ``"64MiB"``. What is
            not in host memory yet when the optimizer steps is copied there, so that the step need not wait. ``None``
            for none.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        snapshots: the part that takes the snapshots.
        parts: all of them, in the order in which their hooks are called.

    Example::

        from lightning_spot import SpotCheckpoint

        trainer = L.Trainer(callbacks=[SpotCheckpoint("checkpoints/run-1")])
        trainer.fit(model, datamodule)  # the same line starts, and after a preemption resumes
    """

    @refusing_old
    def __init__(
        self,
        dirpath: str,
        *,
        servers: str | Sequence[str] | None = None,
        local_server: bool = True,
        replicas: int = 1,
        run_name: str | None = None,
        interval: IntervalPolicy | None = None,
        keep: int | Keep | Mapping[str, Any] = KEEP,
        notices: Notices = "auto",
        grace_period_s: float | None = None,
        resume: bool = True,
        data_resume: DataResume = "auto",
        on_resume_failure: OnResumeFailure = "error",
        slots: int | None = None,
        memory_limit: str | float | None = None,
        on_full: Literal["skip", "wait"] = "skip",
        min_upload_interval_s: float | None = None,
        compression: Literal["auto", "always", "off"] = "auto",
        lossy: Literal["topk"] | None = None,
        upload_timeout_s: float = UPLOAD_TIMEOUT_S,
        server_idle_timeout_s: float = SERVER_IDLE_TIMEOUT_S,
        server_call_timeout_s: float = SERVER_CALL_TIMEOUT_S,
        log_goodput: bool = True,
        on_error: OnError = "warn",
        on_event: OnEvent | None = None,
        webhook: str | None = None,
        copy_mode: CopyMode = "auto",
        device_buffer: str | float | None = DEVICE_BUFFER,
    ) -> None:
        given = locals()
        super().__init__()
        check_flag("resume", resume)
        check_flag("log_goodput", log_goodput)
        self.snapshots = _with_its_own(RemoteSnapshot, given)
        # All are made in any case: what cannot be used is an error also where it would not be used.
        resumes, guard = _with_its_own(AutoResume, given), _with_its_own(PreemptionGuard, given)
        self._resume = resumes if resume else None
        self._guard = guard if notices is not None else None
        self._goodput = GoodputMonitor(log_every_s=60.0 if log_goodput else None)
        parts = (self._resume, self._guard, self.snapshots, self._goodput)
        self.parts: list[SpotCallback] = [part for part in parts if part is not None]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.url!r})"

    @property
    def location(self) -> Location:
        """Where the run is."""
        return self.snapshots.location

    @property
    def attempt(self) -> int:
        """Number of this attempt of the run, from 1."""
        return self.snapshots.attempt

    @property
    def interval(self) -> IntervalPolicy:
        """The policy that decides when a snapshot is taken."""
        return self.snapshots.interval

    @property
    def blocked_s(self) -> float:
        """Seconds that training has waited for snapshots in this ``fit``."""
        return self.snapshots.blocked_s

    @property
    def last_committed_step(self) -> int | None:
        """``global_step`` of the newest snapshot of this attempt that is committed in memory."""
        return self.snapshots.last_committed_step

    @property
    def num_skipped(self) -> int:
        """Snapshots of this ``fit`` that were due and not taken, since every slot was busy."""
        return self.snapshots.num_skipped

    @property
    def num_dropped(self) -> int:
        """Snapshots of this ``fit`` that were dropped: a tensor changed while it was copied, or a rank has failed."""
        return self.snapshots.num_dropped

    @property
    def resumed_from(self) -> ResumedFrom | None:
        """What this ``fit`` was resumed from, or ``None``."""
        return self._resume.resumed_from if self._resume is not None else None

    @property
    def goodput(self) -> Goodput:
        """Where the time of the run goes, on rank 0."""
        return self._goodput.metric

    @property
    def notice(self) -> Notice | None:
        """The notice that ended the last ``fit``, or ``None``."""
        return self._guard.notice if self._guard is not None else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the parts up, and be the last in the trainer's list."""
        if takes_part(trainer, stage):
            move_to_the_end(trainer, self)
        for part in self.parts:
            part.setup(trainer, pl_module, stage)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        """Forward it; and that training has begun, where a callback that changed the list kept it from us."""
        if self.snapshots.is_passed_over:
            self.on_train_start(trainer, pl_module)
        for part in self.parts:
            part.on_train_batch_start(trainer, pl_module, *batch)


def _with_its_own(kind: type[Part], given: Mapping[str, Any]) -> Part:
    """A part, with those of the arguments that it takes."""
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters})


_FORWARDED = (
    "on_load_checkpoint",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_exception",
    "teardown",
)
"""Hooks that the parts are called for, in their order."""


def _forwarded(hook: str) -> Callable[..., None]:
    def forward(self: SpotCheckpoint, *arguments: Any, **named: Any) -> None:
        for part in self.parts:
            getattr(part, hook)(*arguments, **named)

    forward.__name__, forward.__qualname__ = hook, f"SpotCheckpoint.{hook}"
    forward.__doc__ = f"Forward ``{hook}`` to the parts."
    return forward


for _hook in _FORWARDED:
    setattr(SpotCheckpoint, _hook, _forwarded(_hook))


class RequestedSpotCheckpoint(SpotCheckpoint):
    """That of ``LIGHTNING_SPOT``: leaves where the program has a callback of its own.

    The arguments are those of :class:`SpotCheckpoint`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._asked, self.parts = self.parts, []  # the program's own, set up earlier, finds no other one

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the parts up, or leave the trainer's list."""
        others = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        if any(isinstance(each, (SpotCheckpoint, RemoteSnapshot)) for each in others):
            trainer.callbacks = others  # type: ignore[attr-defined] # Lightning goes on in the old list meanwhile
            text = "The program has a callback of its own, so LIGHTNING_SPOT={about} is not used"
            say(logging.INFO, "own-callback", text, about=self.location.url, only_rank_zero=True)
        else:
            self.parts = self._asked
            super().setup(trainer, pl_module, stage)
