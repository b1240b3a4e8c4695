"""RemoteSnapshot: asynchronous snapshots to memory, at an interval, and from there to every tier below."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_spot._version import __version__
from lightning_spot.callbacks.fit_state import Dump, FitState, say_what_is_not_exact
from lightning_spot.callbacks.seams import Seam, Seams
from lightning_spot.capture.place import Place, memory_limit_bytes
from lightning_spot.capture.safety import LEAVE_S, bring_to_safety, plan_for
from lightning_spot.capture.tensors import optimizer_owned, tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.config import DRILL_VARIABLE
from lightning_spot.errors import Fenced, RingFull, SettingsError, SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.interval.policy import EverySeconds, Hastened, IntervalPolicy
from lightning_spot.memory.host import Host

WAIT_FOR_SLOT_S = 600.0
_OUTLINE_BYTES = 4 * 1024 * 1024  # everything in a checkpoint that is no tensor, generously
_PER_TENSOR_BYTES = 1024


class RemoteSnapshot(Checkpoint):
    """Takes snapshots beside training: into a ring in memory, from there to memory nodes and the durable tier.

    What the next forward pass may change is copied before the hook returns; parameters and optimizer state are copied
    while the next forward and backward run, and ``optimizer.step()`` waits for what is left.

    Args:
        dirpath: durable directory or fsspec URL of the run.
        memory: ``"auto"`` for a node on this host, which outlives a killed trainer; ``None`` for a ring inside the
            trainer's process only; one or several ``spot://host:port`` for memory nodes on other hosts besides.
        run: name of the run; default the last component of ``dirpath``.
        interval: when to take a snapshot; default every 60 seconds.
        keep: snapshots each tier keeps, at least 1.
        slots: slots of the ring on this host, at least 2. Each holds one snapshot: the host needs ``slots`` times the
            checkpoint's size of memory.
        memory_limit: most memory for slots, such as ``"64GiB"``; default half of the host's.
        on_full: what to do when all slots are dirty: ``"skip"`` this snapshot, or ``"wait"`` for the flusher.
        flush_timeout_s: how long ``fit`` waits at its end until all is durable, seconds.
        idle_timeout_s: the node on this host ends when no trainer came for so long, seconds.
        strict: raise where a warning and going on without snapshots would do.

    Raises:
        SettingsError: if an argument cannot be used.

    Attributes:
        attempt: number of this attempt of the run, from 1.
        holds: whether the state in front of a validation is kept at hand during it, for an urgent snapshot.

    Example::

        trainer = L.Trainer(callbacks=[RemoteSnapshot("s3://bucket/run-1", memory="spot://10.0.0.5:7070")])
    """

    def __init__(
        self,
        dirpath: str,
        *,
        memory: str | Sequence[str] | None = "auto",
        run: str | None = None,
        interval: IntervalPolicy | None = None,
        keep: int = 2,
        slots: int = 3,
        memory_limit: str | int | None = None,
        on_full: Literal["skip", "wait"] = "skip",
        flush_timeout_s: float = 300.0,
        idle_timeout_s: float = 900.0,
        strict: bool = False,
    ) -> None:
        super().__init__()
        if keep < 1:
            raise SettingsError(f"keep={keep}: a tier keeps at least 1 snapshot")
        if slots < 2:
            raise SettingsError(f"slots={slots}: a ring needs 2 slots, one stays whole while the other is filled")
        if on_full not in ("skip", "wait"):
            raise SettingsError(f"on_full={on_full!r}: it is 'skip' or 'wait'")
        self.place = Place.of(dirpath, memory, run)
        self.interval: IntervalPolicy = interval if interval is not None else EverySeconds(60)
        if DRILL_VARIABLE in os.environ:
            self.interval = EverySeconds(1.0)  # a drill is short, and wants something to resume from
        self.keep = keep
        self.slots = slots
        self.memory_bytes = memory_limit_bytes(memory_limit)
        self.on_full = on_full
        self.flush_timeout_s = flush_timeout_s
        self.idle_timeout_s = idle_timeout_s
        self.strict = strict
        self.attempt = 0
        self._writer: SnapshotWriter | None = None
        self._step = -1
        self._fenced = False
        self._warmed = False
        self._hooked: list[Callable[[], None]] = []
        self.holds = False
        self._held: Dump | None = None
        self._begun_step = -1
        self._deadline_s: float | None = None

    @property
    def last_committed_step(self) -> int | None:
        """``global_step`` of the newest snapshot of this attempt that is committed in memory."""
        committed = self._writer.committed if self._writer is not None else self._last_committed
        return committed.step if committed is not None else None

    _last_committed: Manifest | None = None

    # -- Lightning's hooks, in the order in which they are called -------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the ring and begin the next attempt of the run (rank 0)."""
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        _refuse_sharded(trainer)
        FitState.of(trainer).attach()
        self._fenced, self._warmed, self._last_committed = False, False, None
        self._held, self._begun_step, self._deadline_s = None, -1, None
        problem: SpotError | None = None
        if trainer.is_global_zero:
            try:
                self._open()
            except SpotError as error:
                problem = error
        shared = trainer.strategy.broadcast((self.attempt, str(problem) if problem is not None else None))
        self.attempt = shared[0]
        if shared[1] is not None:
            raise problem if problem is not None else SpotError(shared[1])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting, and listen for the places at which a snapshot can be taken."""
        self._step = trainer.global_step
        self.interval.taken(self._step, time.monotonic())
        FitState.of(trainer).begin()
        Seams.of(trainer).add(self)
        say_what_is_not_exact(trainer)
        if not pl_module.automatic_optimization:
            self._guard_raw_optimizers(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Also go on exactly from a snapshot that the user named in ``fit(ckpt_path=)``."""
        if trainer.state.fn == TrainerFn.FITTING:
            FitState.of(trainer).load(checkpoint)

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due: a resumed run begins with this validation."""
        self._at_seam(trainer, before_validation=True)
        if self.holds and self._begun_step != trainer.global_step:
            self._held = FitState.of(trainer).dump(before_validation=True)

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due."""
        self._at_seam(trainer, before_validation=False)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for what is not copied yet."""
        self._wait_copied()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Weight-averaging callbacks swap weights around validation."""
        self._wait_copied()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What was held is of the past."""
        self._held = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks may change weights here."""
        self._wait_copied()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the last snapshot, of the finished run."""
        self._wait_copied()
        self._unhook(trainer)
        self._snapshot(trainer, complete=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Return when everything committed is durable (within ``flush_timeout_s``)."""
        self._finish(trainer, complete=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Bring what is committed to safety. The state at hand may be in mid-step: it is no snapshot."""
        self._unhook(trainer)
        self._finish(trainer, complete=False)
        FitState.of(trainer).detach()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go, if nothing did before."""
        self._unhook(trainer)
        self._finish(trainer, complete=False)
        FitState.of(trainer).detach()

    def safe_after_s(self) -> float | None:
        """Measured seconds from a snapshot's begin until it is safe outside this machine; ``None`` before any was."""
        writer = self._writer
        return plan_for(writer, None).expected_s if writer is not None and writer.committed is not None else None

    def hurry(self) -> None:
        """Take snapshots more often from now on: this machine is likely to be taken away. Every rank calls it."""
        self.interval = Hastened(self.interval)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _at_seam(self, trainer: pl.Trainer, *, before_validation: bool) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not self._warmed:
            self._warm(trainer)
        if self._is_due(trainer):
            self._snapshot(trainer, before_validation=before_validation)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        """Whether all ranks take a snapshot now; rank 0 has the clock and knows whether there is a slot for it."""
        by_step = self.interval.by_step
        if by_step and not self.interval.due(self._step, 0.0):
            return False
        due = self._can_begin and (by_step or self.interval.due(self._step, time.monotonic()))
        return bool(trainer.strategy.broadcast(due)) if trainer.world_size > 1 else due

    @property
    def _can_begin(self) -> bool:
        """Whether this rank writes and may begin: slots are made after the first step, and are waited for or not."""
        writer = self._writer
        return writer is not None and not self._fenced and (writer.ready or self.on_full == "wait")

    def _snapshot(self, trainer: pl.Trainer, *, before_validation: bool = False, complete: bool = False) -> None:
        """Begin a snapshot on every rank; rank 0 writes it."""
        held = FitState.of(trainer).dump(before_validation=before_validation, at_end=complete)
        checkpoint = held.gathered(trainer)
        self.interval.taken(trainer.global_step, time.monotonic())
        if self._writer is not None and not self._fenced:
            wait_s = WAIT_FOR_SLOT_S if self.on_full == "wait" or complete else 0.0
            self._write(self._writer, trainer, checkpoint, complete=complete, wait_s=wait_s)
        self._begun_step = trainer.global_step

    def _write(
        self,
        writer: SnapshotWriter,
        trainer: pl.Trainer,
        checkpoint: dict[str, Any],
        *,
        complete: bool = False,
        wait_s: float,
    ) -> None:
        step = trainer.global_step
        manifest = Manifest(
            run=self.place.run,
            name=snapshot_name(step, self.attempt, complete=complete),
            step=step,
            attempt=self.attempt,
            nbytes=0,
            epoch=trainer.current_epoch,
            complete=complete,
            created_unix_s=time.time(),
            world_size=trainer.world_size,
            versions=_versions(),
        )
        try:
            writer.begin(checkpoint, manifest, owned=optimizer_owned(trainer.optimizers), wait_s=wait_s)
        except RingFull as error:
            writer.say_once("full", "snapshot of step %d is skipped, and others may be: %s", step, error)
        except Fenced as error:
            self._fenced = True
            self._complain(writer, "fenced", error)
        except SpotError as error:
            self._complain(writer, type(error).__name__, error)

    # -- before a deadline ----------------------------------------------------------------------------------------

    def secure(self, trainer: pl.Trainer, seam: Seam, deadline_s: float | None, hurried: Callable[[], bool]) -> str:
        """Bring the training state to safety: an urgent snapshot if there is something new and time for it.

        Every rank calls it, at the same place.

        Args:
            trainer: that is about to stop.
            seam: where it is.
            deadline_s: when this machine may end, on the monotonic clock; ``None`` if nobody knows.
            hurried: asked while waiting: whether to give up waiting at once.

        Returns:
            one line on what is safe where, on rank 0; empty on the others.
        """
        self._deadline_s = deadline_s if deadline_s is not None else time.monotonic() + self.flush_timeout_s
        self._wait_copied()
        writer = self._writer
        dump = self._urgent_dump(trainer, seam)
        plan = plan_for(writer, deadline_s) if writer is not None and not self._fenced else None
        take = trainer.strategy.broadcast(plan is not None and plan.take)
        if dump is not None and take:
            checkpoint = dump.gathered(trainer)
            if writer is not None:
                wait_s = max(0.0, self._deadline_s - time.monotonic())
                self._write(writer, trainer, checkpoint, wait_s=wait_s)
            self._begun_step = trainer.global_step
        if writer is None:
            return ""
        return bring_to_safety(writer, deadline_s, self._deadline_s, plan, hurried)

    def _urgent_dump(self, trainer: pl.Trainer, seam: Seam) -> Dump | None:
        """The newest state that a run can resume from exactly; ``None`` if a snapshot of it has begun already."""
        if self._begun_step == trainer.global_step or seam is Seam.SANITY_CHECK:
            return None
        if seam is Seam.VALIDATION:
            held, self._held = self._held, None
            return held if held is not None and held.is_unchanged else None
        return FitState.of(trainer).dump(before_validation=seam is Seam.BEFORE_VALIDATION)

    def _complain(self, writer: SnapshotWriter, key: str, error: SpotError) -> None:
        if self.strict:
            raise error
        writer.say_once(key, "no snapshot now, training goes on: %s", error)

    def _wait_copied(self) -> None:
        if self._writer is not None:
            self._writer.copied()

    def _warm(self, trainer: pl.Trainer) -> None:
        """Have slots made in the background as soon as the first step showed how large a snapshot is."""
        self._warmed = True
        if self._writer is None:
            return
        tensors = [*trainer.lightning_module.parameters(), *trainer.lightning_module.buffers()]
        for optimizer in trainer.optimizers:
            tensors.extend(tensors_in(list(optimizer.state.values())))
        nbytes = sum(tensor.numel() * tensor.element_size() + _PER_TENSOR_BYTES for tensor in tensors)
        cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._writer.warm(nbytes + _OUTLINE_BYTES, cuda=cuda)

    # -- opening and closing --------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.place.check()
        host = self._open_host()
        self.attempt = host.open_run(self.place.destinations, self.keep)
        self._writer = SnapshotWriter(host, self._reopen if self.place.embedded else None)

    def _open_host(self) -> Host:
        return self.place.open_host(
            slots=self.slots,
            memory_bytes=self.memory_bytes,
            idle_timeout_s=self.idle_timeout_s,
            strict=self.strict,
        )

    def _reopen(self) -> Host:
        host = self._open_host()
        host.open_run(self.place.destinations, self.keep, self.attempt)
        return host

    def _finish(self, trainer: pl.Trainer, *, complete: bool) -> None:
        """Commit and flush what is under way, within the time allowed, and close. The second call does nothing."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        deadline = time.monotonic() + self.flush_timeout_s
        if self._deadline_s is not None:
            deadline = min(deadline, self._deadline_s - LEAVE_S)
        writer.settle(max(0.0, deadline - time.monotonic()))
        self._last_committed = writer.committed
        host = writer.host
        try:
            if host is not None:
                left = host.flush(max(0.0, deadline - time.monotonic()))
                for line in left:
                    writer.say_once(
                        line,
                        "not everything is durable yet: %s. The node on this host goes on trying",
                        line,
                    )
                host.leave(complete=complete and not left)
        except SpotError as error:
            self._complain(writer, "finish", error)
        finally:
            writer.close()
        if complete and self._last_committed is not None:
            rank_zero_info(
                f"lightning_spot: run {self.place.run!r} is complete at step {self._last_committed.step};"
                f" its last snapshot is in {self.place.dirpath}"
            )

    # -- where Lightning has no hook ------------------------------------------------------------------------------

    def _guard_raw_optimizers(self, trainer: pl.Trainer) -> None:
        """A step of an optimizer that Lightning does not wrap calls no hook of Lightning's; torch calls this one."""
        for optimizer in trainer.optimizers:
            handle = optimizer.register_step_pre_hook(lambda *_: self._wait_copied())
            self._hooked.append(handle.remove)

    def _unhook(self, trainer: pl.Trainer) -> None:
        Seams.of(trainer).remove(self)
        while self._hooked:
            self._hooked.pop()()


def _refuse_sharded(trainer: pl.Trainer) -> None:
    """Sharded strategies write their checkpoints themselves, in pieces that one rank cannot gather."""
    sharded = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if found := names.intersection(sharded):
        raise SettingsError(
            f"{found.pop()} is not supported yet: snapshots work on a single device and with DDP. Use Lightning's"
            " ModelCheckpoint with this strategy"
        )


def _versions() -> dict[str, str]:
    return {"lightning": version("lightning"), "lightning_spot": __version__, "torch": str(torch.__version__)}
