"""RemoteSnapshot: asynchronous snapshots to memory, at an interval, and from there to every tier below."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_spot._version import __version__
from lightning_spot.capture.place import Place, memory_limit_bytes
from lightning_spot.capture.tensors import optimizer_owned, tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import Fenced, RingFull, SettingsError, SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.interval.policy import EverySeconds, IntervalPolicy
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
        self._fenced, self._warmed, self._last_committed = False, False, None
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
        """Start counting, and hook in where Lightning's own hooks come too early or too late."""
        self._step = trainer.global_step
        self.interval.taken(self._step, time.monotonic())
        if is_overridden("on_train_batch_end", pl_module):
            self._follow_module_hook(trainer, pl_module)
        if not pl_module.automatic_optimization:
            self._guard_raw_optimizers(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a snapshot if one is due."""
        if not self._hooks_module:
            self._after_batch(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for what is not copied yet."""
        self._wait_copied()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Weight-averaging callbacks swap weights around validation."""
        self._wait_copied()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks may change weights here; and one-batch epochs have no other place for a snapshot."""
        self._wait_copied()
        if trainer.num_training_batches == 1:
            self._maybe_snapshot(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the last snapshot, of the finished run."""
        self._wait_copied()
        self._unhook()
        self._snapshot(trainer, complete=True)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Return when everything committed is durable (within ``flush_timeout_s``)."""
        self._finish(trainer, complete=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Bring what is committed to safety. The state at hand may be in mid-step: it is no snapshot."""
        self._unhook()
        self._finish(trainer, complete=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go, if nothing did before."""
        self._unhook()
        self._finish(trainer, complete=False)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _after_batch(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            if not self._warmed:
                self._warm(trainer)
            self._maybe_snapshot(trainer)

    def _maybe_snapshot(self, trainer: pl.Trainer) -> None:
        if self._is_due(trainer) and not (trainer.num_training_batches > 1 and _at_a_seam(trainer)):
            self._snapshot(trainer)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if self.interval.by_step:
            return self.interval.due(self._step, 0.0)
        due = trainer.is_global_zero and self._is_ready and self.interval.due(self._step, time.monotonic())
        return bool(trainer.strategy.broadcast(due)) if trainer.world_size > 1 else due

    @property
    def _is_ready(self) -> bool:
        """Whether a snapshot may begin: slots are still being made after the first step, and are waited for or not."""
        return self._writer is not None and (self._writer.ready or self.on_full == "wait")

    def _snapshot(self, trainer: pl.Trainer, *, complete: bool = False) -> None:
        """Begin a snapshot on every rank; rank 0 writes it."""
        step = trainer.global_step
        writer = self._writer
        if trainer.is_global_zero and (writer is None or self._fenced or not (self._is_ready or complete)):
            return
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
        self.interval.taken(step, time.monotonic())
        if writer is None:
            return
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
        wait_s = WAIT_FOR_SLOT_S if self.on_full == "wait" or complete else 0.0
        try:
            writer.begin(checkpoint, manifest, owned=optimizer_owned(trainer.optimizers), wait_s=wait_s)
        except RingFull as error:
            writer.say_once("full", "snapshot of step %d is skipped, and others may be: %s", step, error)
        except Fenced as error:
            self._fenced = True
            self._complain(writer, "fenced", error)
        except SpotError as error:
            self._complain(writer, type(error).__name__, error)

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
        writer.settle(self.flush_timeout_s)
        self._last_committed = writer.committed
        host = writer.host
        try:
            if host is not None:
                left = host.flush(max(0.0, deadline - time.monotonic()))
                for line in left:
                    writer.say_once(
                        line,
                        "not everything is durable after %.0f s: %s. The node on this host goes on trying",
                        self.flush_timeout_s,
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

    # -- where Lightning's hooks come too early or too late -------------------------------------------------------

    _hooks_module = False

    def _follow_module_hook(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take snapshots after the module's own ``on_train_batch_end``.

        It runs after all callbacks' and may change weights (clipping, target networks); a snapshot taken before it
        would count the batch as done without that change.
        """
        original = pl_module.on_train_batch_end

        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._after_batch(trainer)

        pl_module.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign] # taken back in _unhook
        self._hooks_module = True
        self._hooked.append(lambda: pl_module.__dict__.pop("on_train_batch_end", None))

    def _guard_raw_optimizers(self, trainer: pl.Trainer) -> None:
        """A step of an optimizer that Lightning does not wrap calls no hook of Lightning's; torch calls this one."""
        for optimizer in trainer.optimizers:
            handle = optimizer.register_step_pre_hook(lambda *_: self._wait_copied())
            self._hooked.append(handle.remove)

    def _unhook(self) -> None:
        while self._hooked:
            self._hooked.pop()()
        self._hooks_module = False


def _refuse_sharded(trainer: pl.Trainer) -> None:
    """Sharded strategies write their checkpoints themselves, in pieces that one rank cannot gather."""
    sharded = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if found := names.intersection(sharded):
        raise SettingsError(
            f"{found.pop()} is not supported yet: snapshots work on a single device and with DDP. Use Lightning's"
            " ModelCheckpoint with this strategy"
        )


def _at_a_seam(trainer: pl.Trainer) -> bool:
    """Whether this batch is the last of an epoch, or one after which validation runs.

    Lightning counts what follows such a batch (validation, plateau schedulers, epoch hooks) as done when it resumes
    from a checkpoint taken in its ``on_train_batch_end``. A snapshot that falls there is taken one batch later.
    """
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    return loop.batch_progress.is_last_batch or (fetcher is not None and loop._should_check_val_fx(fetcher))


def _versions() -> dict[str, str]:
    return {"lightning": version("lightning"), "lightning_spot": __version__, "torch": str(torch.__version__)}
