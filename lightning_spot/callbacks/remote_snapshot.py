"""RemoteSnapshot: asynchronous snapshots to memory, at an interval, and from there to every tier below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_spot.callbacks import earlier
from lightning_spot.callbacks.fit import Fit, after_train_end, move_to_the_end, on_rank_zero, say_end, takes_part
from lightning_spot.callbacks.pacing import Pacing
from lightning_spot.callbacks.part import Part
from lightning_spot.callbacks.urgent import UrgentSnapshot
from lightning_spot.capture.attempt import Attempt, RingSettings, open_host
from lightning_spot.capture.host_link import leave
from lightning_spot.capture.tensors import optimizer_owned
from lightning_spot.config import FLUSH_TIMEOUT_S, IDLE_TIMEOUT_S, KEEP, MAX_STALL_S, read_environment
from lightning_spot.errors import SettingsError
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.seams import Seam, Seams
from lightning_spot.image.manifest import Manifest
from lightning_spot.interval.convergence import ConvergenceAware
from lightning_spot.interval.costs import TierPace
from lightning_spot.interval.deadline import Deadline
from lightning_spot.interval.policy import EverySeconds, IntervalPolicy
from lightning_spot.memory.host import Host
from lightning_spot.run.choice import doubt, say_what_is_left
from lightning_spot.run.location import Location, memory_limit_bytes
from lightning_spot.run.survey import Survey

if TYPE_CHECKING:
    import lightning.pytorch as pl

WAIT_FOR_SLOT_S = 600.0


class RemoteSnapshot(Part):
    """Takes snapshots beside training: into a ring in memory, from there to memory nodes and the durable tier.

    What the next forward pass may change is copied before the hook returns; parameters and optimizer state are copied
    while the next forward and backward run, and ``optimizer.step()`` waits for what is left.

    Args:
        dirpath: durable directory or fsspec URL of the run.
        memory: ``"auto"`` for a node on this host, which outlives a killed trainer; ``None`` for a ring inside the
            trainer's process only; one or several ``spot://host:port`` for memory nodes on other hosts besides.
        run: name of the run; default the last component of ``dirpath``.
        interval: when to take a snapshot; default :class:`ConvergenceAware`, which needs no setting.
        keep: snapshots each tier keeps, at least 1.
        slots: slots of the ring on this host, at least 2; default 2 and one for each tier below (the durable one, and
            a memory node). Each holds one snapshot: the host needs ``slots`` times the checkpoint's size of memory.
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
        urgent: takes a snapshot when the run has to stop.

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
        keep: int = KEEP,
        slots: int | None = None,
        memory_limit: str | int | None = None,
        on_full: Literal["skip", "wait"] = "skip",
        durable_every_s: float = 0.0,
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        max_stall_s: float = MAX_STALL_S,
        strict: bool = False,
    ) -> None:
        super().__init__()
        if keep < 1:
            raise SettingsError(f"keep={keep}: a tier keeps at least 1 snapshot")
        if slots is not None and slots < 2:
            raise SettingsError(f"slots={slots}: a ring needs 2 slots, one stays whole while the other is filled")
        if on_full not in ("skip", "wait"):
            raise SettingsError(f"on_full={on_full!r}: it is 'skip' or 'wait'")
        if not (durable_every_s >= 0 and max_stall_s > 0):
            raise SettingsError(f"{durable_every_s=} is 0 or more seconds, {max_stall_s=} more than 0")
        self.location = self._named = Location.of(dirpath, memory, run)
        if interval is not None and (isinstance(interval, type) or not callable(getattr(interval, "due", None))):
            raise SettingsError(f"interval={interval!r} is no policy; write EverySeconds(30) or EverySteps(100)")
        if read_environment().drill_dir is not None:
            interval = EverySeconds(1.0)  # a drill is short, and wants something to resume from
        self._pacing = Pacing(interval if interval is not None else ConvergenceAware())
        self.on_full = on_full
        self.flush_timeout_s = flush_timeout_s
        self._ring = RingSettings(
            slots=slots if slots is not None else 3 + bool(self.location.nodes),
            memory_bytes=memory_limit_bytes(memory_limit),
            idle_timeout_s=idle_timeout_s,
            keep=keep,
            strict=strict,
            durable_every_s=durable_every_s,
            max_stall_s=max_stall_s,
        )
        self.attempt = 0
        self._current: Attempt | None = None
        self._last_committed: Manifest | None = None
        self._host: Host | None = None
        self._found: Survey | None = None
        self._lineage: str | None = None
        self._step, self._begun_step = -1, -1
        self._warmed = False
        self._hooked: list[Callable[[], None]] = []
        self.urgent = UrgentSnapshot()

    def of_a_fit(self) -> dict[str, Any]:
        """See :class:`~lightning_spot.exact.namespaces.Copied`."""
        return {"_current": None, "_host": None, "_found": None, "_hooked": [], "urgent": UrgentSnapshot()}

    @property
    def stall_s(self) -> float:
        """Seconds that training has waited for snapshots in this ``fit``."""
        return self._pacing.stall_s

    @property
    def begun_step(self) -> int:
        """``global_step`` of the newest snapshot that was begun, -1 before the first."""
        return self._begun_step

    @property
    def interval(self) -> IntervalPolicy:
        """The policy that decides when a snapshot is taken."""
        return self._pacing.policy

    @property
    def last_committed_step(self) -> int | None:
        """``global_step`` of the newest snapshot of this attempt that is committed in memory."""
        committed = self._current.writer.committed if self._current is not None else self._last_committed
        return committed.step if committed is not None else None

    # -- Lightning's hooks, in the order in which they are called -------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the ring and begin the next attempt of the run (rank 0)."""
        if not takes_part(trainer, stage):
            return
        move_to_the_end(trainer, self)
        FitState.of(trainer).attach()
        self.urgent.clear()
        self._warmed, self._last_committed, self._begun_step, self.attempt = False, None, -1, 0
        self._lineage, self._found = None, None
        fit = Fit.of(trainer)
        fit.clear()
        self.location = fit.place_of(self._named)
        earlier.goes_on_at(self.location)
        doubtful = trainer.strategy.broadcast(on_rank_zero(trainer, lambda: self._look(fit)))
        if doubtful and fit.resumes:
            # No attempt begins, and claims the directory, before it is known that no resume depends on it.
            fit.after_decision(lambda: self._begin(trainer))
        else:
            self._begin(trainer)

    def _look(self, fit: Fit) -> bool:
        """Open the ring, and ask all tiers what they hold; whether that leaves a doubt."""
        self.location.check()
        self._host = open_host(self.location, self._ring)  # first: it takes over what a killed node left in memory
        self._found = fit.survey(self.location)
        return doubt(self._found) is not None

    def _begin(self, trainer: pl.Trainer) -> None:
        """Begin the next attempt (rank 0)."""

        def begin() -> None:
            host, self._host = self._host, None
            assert host is not None
            assert self._found is not None
            self._current = Attempt(self._found, host, self._ring, Fit.of(trainer).trial())

        on_rank_zero(trainer, begin)
        self.attempt = trainer.strategy.broadcast(self._current.number if self._current is not None else 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting, and listen for the places at which a snapshot can be taken."""
        self._step = trainer.global_step
        if self._current is not None and self._lineage is not None:
            self._current.lineage = self._lineage
        elif self._found is not None:
            say_what_is_left(self._found)
        self._pacing.begin(trainer, self.attempt)
        Seams.of(trainer).add(self)
        if not pl_module.automatic_optimization:
            self._guard_raw_optimizers(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Also go on with what the snapshot's attempt had measured."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if trainer.state.fn == "fit":
            self._pacing.load(checkpoint.get(KEY, {}).get("interval"))
            self._lineage = checkpoint.get(KEY, {}).get("lineage")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss."""
        self._pacing.read(trainer, outputs)
        Seams.of(trainer).batch_ended(self)

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due: a resumed run begins with this validation."""
        self._at_seam(trainer, before_validation=True)
        if self._begun_step != trainer.global_step:
            self.urgent.before_validation(trainer)
        self._wait_copied()  # averaging callbacks exchange weights around a validation

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due."""
        self._at_seam(trainer, before_validation=False)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Wait for what is not copied yet."""
        self._wait_copied()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The state that was kept for the time of the validation is not needed any more."""
        self.urgent.after_validation()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look whether the metric that the interval follows was logged in the epoch before."""
        if self._warmed:
            self._pacing.check_monitor(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Callbacks may change weights here."""
        self._wait_copied()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the last snapshot, of the finished run: after the module's own hook, which may change the weights."""
        self._wait_copied()
        self._pacing.check_monitor(trainer, trainer.current_epoch)
        self._unhook(trainer)
        self._hooked.append(after_train_end(trainer, lambda: self._snapshot(trainer, complete=True)))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Return when everything committed is durable (within ``flush_timeout_s``)."""
        self._finish(trainer, complete=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Bring what is committed to safety. The state at hand may be in mid-step: it is no snapshot."""
        self._unhook(trainer)
        if self._current is not None:
            earlier.node_was_left(self.location, self.attempt, exception)
        self._finish(trainer, complete=False)
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let go, if nothing did before."""
        self._unhook(trainer)
        self._finish(trainer, complete=False)
        super().teardown(trainer, pl_module, stage)

    def safe_after_s(self) -> float | None:
        """Measured seconds from a snapshot's begin until it is safe outside this machine; ``None`` before any was."""
        return self._current.safety.usual_s() if self._current is not None else None

    def expect_failure(self) -> None:
        """Take snapshots more often from now on: this machine is likely to be taken away."""
        self._pacing.expect_failure()

    def secure(self, trainer: pl.Trainer, seam: Seam, named_s: float | None, cut_short: Callable[[], bool]) -> str:
        """Bring the training state to safety: an urgent snapshot if there is something new and time for it.

        Every rank calls it, at the same place.

        Args:
            trainer: that is about to stop.
            seam: where it is.
            named_s: when this machine may end, on the monotonic clock; ``None`` if nobody knows.
            cut_short: asked while waiting: whether to give up waiting at once.

        Returns:
            one line on what is safe where, on rank 0; empty on the others.
        """
        self.urgent.deadline = Deadline.of(named_s, self.flush_timeout_s)
        self._wait_copied()
        is_taken = self._begun_step == trainer.global_step
        write = lambda dump, wait_s: self._write(trainer, dump, wait_s=wait_s)  # noqa: E731
        return self.urgent.secure(trainer, seam, self._current, write, cut_short, is_taken=is_taken)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _at_seam(self, trainer: pl.Trainer, *, before_validation: bool) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if not self._warmed:
            self._warm(trainer)
        if self._pacing.due(trainer, self._can_begin, self._paces):
            self._snapshot(trainer, before_validation=before_validation)

    def _paces(self) -> tuple[TierPace, ...]:
        return self._current.safety.paces() if self._current is not None else ()

    def _can_begin(self) -> bool:
        """Whether this rank writes and may begin: slots are made after the first step, and are waited for or not."""
        attempt = self._current
        return attempt is not None and not attempt.fenced and (attempt.writer.ready or self.on_full == "wait")

    def _snapshot(self, trainer: pl.Trainer, *, before_validation: bool = False, complete: bool = False) -> None:
        """Begin a snapshot on every rank; rank 0 writes it."""
        self._pacing.taken(trainer.global_step)
        with self._pacing.stalling():
            dump = FitState.of(trainer).dump(before_validation=before_validation, at_end=complete)
            wait_s = WAIT_FOR_SLOT_S if self.on_full == "wait" or complete else 0.0
            self._write(trainer, dump, complete=complete, wait_s=wait_s)

    def _write(self, trainer: pl.Trainer, dump: Dump, *, complete: bool = False, wait_s: float) -> None:
        checkpoint = dump.gathered(trainer)
        checkpoint[KEY]["interval"] = self._pacing.state_dict()
        self._begun_step = trainer.global_step
        if self._current is not None and not self._current.fenced:
            checkpoint[KEY]["lineage"] = self._current.lineage
            self._current.write(
                checkpoint,
                owned=optimizer_owned(trainer.optimizers),
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                world_size=trainer.world_size,
                complete=complete,
                wait_s=wait_s,
            )

    def _wait_copied(self) -> None:
        if self._current is not None:
            with self._pacing.stalling():
                self._current.writer.copied()

    def _warm(self, trainer: pl.Trainer) -> None:
        """Have slots made in the background as soon as the first step showed how large a snapshot is."""
        self._warmed = True
        if self._current is not None:
            module = trainer.lightning_module
            states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
            self._current.warm([*module.parameters(), *module.buffers(), states])

    def _finish(self, trainer: pl.Trainer, *, complete: bool) -> None:
        """Bring everything to safety, within the time allowed, and close. The second call does nothing."""
        attempt, self._current = self._current, None
        if self._host is not None:  # no attempt has begun
            leave(self._host)
            self._host = None
        if attempt is None:
            return
        deadline = self.urgent.deadline
        wait_s = min(self.flush_timeout_s, deadline.left_s) if deadline is not None else self.flush_timeout_s
        durable = attempt.finish(wait_s, complete=complete)
        self._last_committed = attempt.writer.committed
        if durable is not None:
            say_end(self.location, trainer.global_step, durable=durable)

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


def snapshots_of(trainer: pl.Trainer) -> list[RemoteSnapshot]:
    """The trainer's :class:`RemoteSnapshot`, alone or in a :class:`SpotCheckpoint`."""
    return Fit.of(trainer).parts(RemoteSnapshot)
