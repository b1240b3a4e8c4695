"""SpotCheckpoint: the one callback most users need. Snapshots, the interval and the resume, composed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_spot.callbacks.auto_resume import AutoResume, ResumedFrom, say_resumed
from lightning_spot.callbacks.goodput_monitor import GoodputMonitor
from lightning_spot.callbacks.preemption_guard import PreemptionGuard
from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
from lightning_spot.config import FLUSH_TIMEOUT_S, IDLE_TIMEOUT_S, KEEP, MAX_STALL_S
from lightning_spot.exact.position import Rewind
from lightning_spot.goodput.metric import Goodput
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.notices.choose import Notices
from lightning_spot.notices.notice import Notice


class SpotCheckpoint(RemoteSnapshot):
    """Makes a training run survive its machine: snapshots beside training, and a resume by the same command.

    Args:
        dirpath: durable directory or fsspec URL of the run (``checkpoints/run-1``, ``s3://bucket/run-1``).
        memory: ``"auto"`` for a memory node on this host, started by itself, which outlives a killed trainer;
            ``None`` for none; one or several ``spot://host:port`` for memory nodes on other hosts besides.
        run: name of the run; default the last component of ``dirpath``.
        interval: when to take a snapshot; default :class:`ConvergenceAware`, which needs no setting.
        keep: snapshots each tier keeps, at least 1.
        notices: sources of preemption notices, see :class:`PreemptionGuard`; ``None`` for none.
        grace_s: seconds between a notice that does not say and the end, see there.
        resume: whether to resume from the newest good snapshot. A ``ckpt_path`` given to ``fit`` always wins.
        rewind: how a resumed epoch gets to its place in the data, see :class:`AutoResume`.
        slots: slots of the ring on this host, at least 2; default 2 and one for each tier below. Each takes the
            checkpoint's size of memory.
        memory_limit: most memory for slots, such as ``"64GiB"``; default half of the host's.
        on_full: what to do when all slots are dirty: ``"skip"`` this snapshot, or ``"wait"`` for the flusher.
        durable_every_s: at least so many seconds lie between two snapshots that are brought to the durable tier; 0
            brings it the newest one whenever it is free. The last one is brought there in any case.
        flush_timeout_s: how long ``fit`` waits at its end until all is durable, seconds.
        idle_timeout_s: the node on this host ends when no trainer came for so long, seconds.
        max_stall_s: how long a call to the node on this host may keep the training thread, seconds, more than 0; a
            node that does not answer in time is replaced.
        strict: raise where a warning and going on without snapshots would do.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        attempt: number of this attempt of the run, from 1.

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
        run: str | None = None,
        interval: IntervalPolicy | None = None,
        keep: int = KEEP,
        notices: Notices = "auto",
        grace_s: float | None = None,
        resume: bool = True,
        rewind: Rewind = "auto",
        slots: int | None = None,
        memory_limit: str | int | None = None,
        on_full: Literal["skip", "wait"] = "skip",
        durable_every_s: float = 0.0,
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        max_stall_s: float = MAX_STALL_S,
        strict: bool = False,
    ) -> None:
        super().__init__(
            dirpath,
            memory=memory,
            run=run,
            interval=interval,
            keep=keep,
            slots=slots,
            memory_limit=memory_limit,
            on_full=on_full,
            durable_every_s=durable_every_s,
            flush_timeout_s=flush_timeout_s,
            idle_timeout_s=idle_timeout_s,
            max_stall_s=max_stall_s,
            strict=strict,
        )
        self._resume = AutoResume(dirpath, memory=memory, run=run, rewind=rewind) if resume else None
        self._goodput = GoodputMonitor()
        self._guard = PreemptionGuard(notices, grace_s=grace_s) if notices is not None else None

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
        """Start the node (which takes over what a killed one left), watch for notices, look for a snapshot."""
        if self._resume is not None:
            self._resume.setup(trainer, pl_module, stage)
        super().setup(trainer, pl_module, stage)
        if self._guard is not None:
            self._guard.setup(trainer, pl_module, stage)
        self._goodput.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where the run goes on."""
        if self._guard is not None:
            self._guard.on_train_start(trainer, pl_module)
        super().on_train_start(trainer, pl_module)
        if self._resume is not None:
            self._resume.on_train_start(trainer, pl_module)
        if self.resumed_from is not None:
            say_resumed(self.resumed_from, self.location.name, self.attempt)
        self._goodput.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss, and note where training is."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._goodput.on_train_batch_end(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Flush, and say so when there was nothing left to train."""
        super().on_fit_end(trainer, pl_module)
        if self._resume is not None:
            self._resume.on_fit_end(trainer, pl_module)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on there are places at which to stop."""
        if self._guard is not None:
            self._guard.on_sanity_check_start(trainer, pl_module)

    def on_validation_batch_end(self, trainer: pl.Trainer, *arguments: Any, **named: Any) -> None:
        """Stop here if all ranks do."""
        if self._guard is not None:
            self._guard.on_validation_batch_end(trainer, *arguments, **named)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop here if all ranks do."""
        if self._guard is not None:
            self._guard.on_validation_end(trainer, pl_module)
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the last snapshot, whatever happens."""
        if self._guard is not None:
            self._guard.on_train_end(trainer, pl_module)
        super().on_train_end(trainer, pl_module)
        self._goodput.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Bring what is committed to safety, then stop watching."""
        super().on_exception(trainer, pl_module, exception)
        if self._guard is not None:
            self._guard.on_exception(trainer, pl_module, exception)
        self._goodput.on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go, if nothing did before."""
        super().teardown(trainer, pl_module, stage)
        if self._guard is not None:
            self._guard.teardown(trainer, pl_module, stage)
        self._goodput.teardown(trainer, pl_module, stage)
