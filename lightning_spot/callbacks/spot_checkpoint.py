"""SpotCheckpoint: the one callback most users need. Snapshots, the interval and the resume, composed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_spot.callbacks.auto_resume import AutoResume
from lightning_spot.callbacks.goodput_monitor import GoodputMonitor
from lightning_spot.callbacks.part import move_to_the_end
from lightning_spot.callbacks.preemption_guard import PreemptionGuard
from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
from lightning_spot.config import DEVICE_BUFFER, FLUSH_TIMEOUT_S, IDLE_TIMEOUT_S, KEEP, MAX_STALL_S, check_flag
from lightning_spot.exact.epochs import Rewind
from lightning_spot.exact.namespaces import SpotCallback
from lightning_spot.fit.chosen import ResumedFrom
from lightning_spot.fit.failed_resumes import OnResumeFailure
from lightning_spot.fit.taking_part import takes_part
from lightning_spot.goodput.metric import Goodput
from lightning_spot.image.packing import Compression
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.notices.choose import Notices
from lightning_spot.notices.notice import Notice
from lightning_spot.run.location import Location
from lightning_spot.staging.modes import Partitions

if TYPE_CHECKING:
    import lightning.pytorch as pl


class SpotCheckpoint(SpotCallback):
    """Makes a training run survive its machine: snapshots beside training, and a resume by the same command.

    Args:
        dirpath: durable directory or fsspec URL of the run (``checkpoints/run-1``, ``s3://bucket/run-1``).
        memory: ``"auto"`` for a memory node on this host, started by itself, which outlives a killed trainer;
            ``None`` for none; one or several ``spot://host:port`` for memory nodes on other hosts besides. Of several,
            a run goes to one (to ``replicas``); runs spread over them, and go to the next when one fails. Those of a
            model in shards on several hosts are spread over all, see docs/scale.md.
        replicas: how many of the memory nodes each snapshot is kept at, so that one of them may be lost.
        run: name of the run; default the last component of ``dirpath``.
        interval: when to take a snapshot; default :class:`ConvergenceAware`, which needs no setting.
        keep: snapshots each tier keeps, at least 1.
        notices: sources of preemption notices, see :class:`PreemptionGuard`; ``None`` for none.
        grace_s: seconds between a notice that does not say and the end, see there.
        resume: whether to resume from the newest good snapshot. A ``ckpt_path`` given to ``fit`` always wins.
        rewind: how a resumed epoch gets to its place in the data, see :class:`AutoResume`.
        on_resume_failure: what a start does if resumes from the newest snapshot have failed, see there.
        slots: slots of the ring on this host, at least 2; default 2 and one for each tier below, and up
            to 2 more for a GPU whose snapshots overlap. Each takes the checkpoint's size of memory.
        memory_limit: most memory for slots, such as ``"64GiB"``; default half of the host's.
        on_full: what to do when all slots are dirty: ``"skip"`` this snapshot, or ``"wait"`` for the flusher.
        durable_every_s: at least so many seconds lie between two snapshots that are brought to the durable tier; 0
            brings it the newest one whenever it is free. So does ``None``, but for steps of which several are saved
            within 5 s: of these it gets one in 40 times as long as it takes to write, at least one in 30 s if it can be
            written in that time. The last one is brought there in any case, and what is there at a notice.
        compression: how what changed goes to a memory node on another host, ``"auto"``, ``"delta"``, ``None`` or, not
            exact, ``"topk"``; see :class:`RemoteSnapshot`.
        flush_timeout_s: how long ``fit`` waits at its end until all is durable, seconds.
        idle_timeout_s: the node on this host ends when no trainer came for so long, seconds.
        max_stall_s: how long a call to the node on this host may keep the training thread, seconds, more than 0; a
            node that does not answer in time is replaced.
        log_goodput: whether the loggers get ``spot/goodput`` and three more values, and the progress bar one.
        strict: raise where a warning and going on without snapshots would do.
        partitions: how copying is spread over the iteration that follows a snapshot, see :class:`RemoteSnapshot`.
        device_buffer: memory on each GPU through which the last bytes leave while the optimizer steps, or ``None``.

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

    def __init__(
        self,
        dirpath: str,
        *,
        memory: str | Sequence[str] | None = "auto",
        replicas: int = 1,
        run: str | None = None,
        interval: IntervalPolicy | None = None,
        keep: int = KEEP,
        notices: Notices = "auto",
        grace_s: float | None = None,
        resume: bool = True,
        rewind: Rewind = "auto",
        on_resume_failure: OnResumeFailure = "error",
        slots: int | None = None,
        memory_limit: str | float | None = None,
        on_full: Literal["skip", "wait"] = "skip",
        durable_every_s: float | None = None,
        compression: Compression = "auto",
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        max_stall_s: float = MAX_STALL_S,
        log_goodput: bool = True,
        strict: bool = False,
        partitions: Partitions = "auto",
        device_buffer: str | float | None = DEVICE_BUFFER,
    ) -> None:
        super().__init__()
        check_flag("resume", resume)
        check_flag("log_goodput", log_goodput)
        self.snapshots = RemoteSnapshot(
            dirpath,
            memory=memory,
            replicas=replicas,
            run=run,
            interval=interval,
            keep=keep,
            slots=slots,
            memory_limit=memory_limit,
            on_full=on_full,
            durable_every_s=durable_every_s,
            compression=compression,
            flush_timeout_s=flush_timeout_s,
            idle_timeout_s=idle_timeout_s,
            max_stall_s=max_stall_s,
            strict=strict,
            partitions=partitions,
            device_buffer=device_buffer,
        )
        # Both are made in any case: what cannot be used is an error also where it would not be used.
        resumes = AutoResume(dirpath, memory=memory, run=run, rewind=rewind, on_resume_failure=on_resume_failure)
        guard = PreemptionGuard(notices, grace_s=grace_s)
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
    def stall_s(self) -> float:
        """Seconds that training has waited for snapshots in this ``fit``."""
        return self.snapshots.stall_s

    @property
    def last_committed_step(self) -> int | None:
        """``global_step`` of the newest snapshot of this attempt that is committed in memory."""
        return self.snapshots.last_committed_step

    @property
    def skipped(self) -> int:
        """Snapshots of this ``fit`` that were due and not taken, since every slot was busy."""
        return self.snapshots.skipped

    @property
    def torn(self) -> int:
        """Snapshots of this ``fit`` that were dropped, since a tensor changed while it was copied."""
        return self.snapshots.torn

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


_FORWARDED = (
    "on_load_checkpoint",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)
"""Hooks that the parts are called for, in their order."""


_END = ("on_fit_end", "on_exception", "teardown")
"""Hooks that all of them are called for, even if one raises: each has something to let go."""


def _forwarded(hook: str) -> Callable[..., None]:
    def forward(self: SpotCheckpoint, *arguments: Any, **named: Any) -> None:
        calls = [partial(getattr(part, hook), *arguments, **named) for part in self.parts]
        if hook in _END:
            _call_each(calls)
        else:
            for call in calls:
                call()

    forward.__name__, forward.__qualname__ = hook, f"SpotCheckpoint.{hook}"
    forward.__doc__ = f"Forward ``{hook}`` to the parts."
    return forward


def _call_each(calls: list[partial[None]]) -> None:
    """Make all calls in their order, even if one raises."""
    if calls:
        try:
            calls[0]()
        finally:
            _call_each(calls[1:])


for _hook in (*_FORWARDED, *_END):
    setattr(SpotCheckpoint, _hook, _forwarded(_hook))
