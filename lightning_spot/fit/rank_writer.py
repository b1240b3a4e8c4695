"""What one rank writes of the snapshots of a ``fit``: rank 0's attempt, its part of a shared file, or its own shard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings, leave, open_host
from lightning_spot.capture.split import SharingRanks
from lightning_spot.capture.tensors import Owners, by_storage, optimizer_owned, overwritten
from lightning_spot.capture.unexpected import failure_of
from lightning_spot.config import read_environment, why_weak
from lightning_spot.errors import ServerUnreachableError, SpotError
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.sharded import is_sharded
from lightning_spot.fit.collectives import Agreement
from lightning_spot.fit.in_shards import InShards, check_read_everywhere
from lightning_spot.fit.resume import Resume
from lightning_spot.fit.together import ALONE, How, Together
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.memory.host import Host
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey
from lightning_spot.say import say
from lightning_spot.staging.device import DeviceClock
from lightning_spot.staging.partitions import CopyMode
from lightning_spot.staging.schedule import BUCKET_BYTES, GradientWatch, Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RankWriter(OfTrainer):
    """What this rank writes of the snapshots of one ``fit``. Every rank has one.

    Args:
        trainer: that fits.
        location: where the run is.
        settings: how snapshots are taken.
        resume: what the ``fit`` goes on from.
        interval: what the interval has measured, for a later attempt.

    Attributes:
        found: what the tiers hold, on rank 0; ``None`` before they were asked.
        attempt: that writes, on rank 0; ``None`` before it has begun and when it is finished.
        number: of the attempt, from 1, on every rank; 0 before it has begun.
        begun_step: ``global_step`` of the newest snapshot that was begun, -1 before the first.
        together: writes snapshots with other ranks.
        in_shards: has every rank write its part, where each has a part of the model; else ``None``.
        iterations: tells the copying where training is; on ranks that write.
        is_warm: whether slots are being made, or are there.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        location: Location,
        settings: SnapshotSettings,
        resume: Resume,
        interval: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(trainer)
        self.found: Survey | None = None
        self.attempt: Attempt | None = None
        self.number = 0
        self.begun_step = -1
        self.uploaded_bytes = self._begun = 0
        self.together = Together(trainer, settings.ring)
        self.in_shards = InShards(trainer, location, settings.ring) if is_sharded(trainer) else None
        self.iterations: Iterations | None = None
        self.is_warm = False
        self._location, self._settings, self._resume, self._interval = location, settings, resume, interval
        self._host: Host | None = None
        self._committed: Manifest | None = None
        self._where = ""
        self._skipped, self._torn = 0, 0

    # -- what became of it ----------------------------------------------------------------------------------------

    @property
    def committed(self) -> Manifest | None:
        """The newest snapshot of this attempt that is committed in memory."""
        return self.attempt.writer.committed if self.attempt is not None else self._committed

    @property
    def skipped(self) -> int:
        """Snapshots that were begun and not taken, since no slot was free, or to take them failed."""
        return self.attempt.skipped if self.attempt is not None else self._skipped

    @property
    def taken(self) -> int:
        """Snapshots that were begun and taken, on rank 0."""
        return max(0, self._begun - self.skipped - self.torn)

    @property
    def torn(self) -> int:
        """Snapshots that were dropped, since a tensor changed while it was copied."""
        return self.attempt.writer.torn if self.attempt is not None else self._torn

    def safe_after_s(self) -> float | None:
        """Measured seconds from a snapshot's begin until it is safe outside this machine; ``None`` before any was."""
        return self.attempt.safety.usual_s() if self.attempt is not None else None

    def what_is_safe(self) -> str:
        """What a run that was ended goes on from, after :meth:`finish`, for people."""
        if (newest := self._committed) is None:
            return "this attempt has committed no snapshot"
        return f"its snapshot of step {newest.step} is {self._where}"

    # -- begin and end --------------------------------------------------------------------------------------------

    def look(self) -> Survey:
        """On rank 0: open the ring, and ask all tiers what they hold."""
        self._location.check()
        if why := why_weak(read_environment().token):
            say(logging.WARNING, "token-weak", "{why}", about=self._location.url, why=why)
        if self.in_shards is not None:
            self.in_shards.check()
        # First: it takes over what a killed server left in memory.
        self._host = open_host(self._location, self._settings.ring)
        self.found = self._resume.look(self._location)
        return self.found

    def begin(self) -> None:
        """Begin the next attempt of the run, once it is decided what it goes on from. Every rank calls it."""
        trainer, resume = self._trainer, self._resume
        if self.in_shards is not None or trainer.is_global_zero:
            self.iterations = Iterations(trainer, self._settings.copy_mode)
        schedule = self.iterations.schedule if self.iterations is not None else None
        self.attempt = attempt = Agreement(trainer).on_rank_zero(partial(self._begin_attempt, schedule))
        named = (attempt.number, attempt.info.text, attempt.info.id) if attempt is not None else (0, "", "")
        self.number, run, resume.run_id = trainer.strategy.broadcast(named)
        resume.attempt, resume.info = self.number, attempt.info if attempt is not None else None
        if self.in_shards is None and trainer.world_size > 1 and not self._location.servers and resume.is_wanted():
            self._check_place(attempt, run)
        if self.together.begin(attempt, self._location, run, self.number):
            self.iterations = Iterations(trainer, self._settings.copy_mode)
            self.together.write_with(self.iterations.schedule)
        if self.in_shards is not None and self.iterations is not None:
            self.in_shards.begin(attempt, run, self.number, self.iterations.schedule)

    def _begin_attempt(self, schedule: Schedule | None) -> Attempt:
        """On rank 0: begin the attempt; ``schedule`` says when what only the optimizer changes is copied."""
        host, self._host = self._host, None
        assert host is not None
        try:
            return self._attempt_at(host, schedule)
        except ServerUnreachableError as error:  # the tiers were asked since it was opened
            if not self._location.has_local_server:
                raise
            text = "the snapshot server on this host is lost ({error}). A new one is started"
            say(logging.WARNING, "local-server-lost", text, url=self._location.url, error=error)
            return self._attempt_at(open_host(self._location, self._settings.ring), schedule)

    def _attempt_at(self, host: Host, schedule: Schedule | None) -> Attempt:
        assert self.found is not None
        return Attempt(
            self.found,
            host,
            self._settings.ring,
            self._resume.trial(),
            schedule=schedule,
            sharded_over=self._trainer.world_size if self.in_shards is not None else 0,
        )

    def let_go(self) -> None:
        """Let go of what was found, whose connections stay open else, and of the ring if no attempt has begun."""
        self.found = None
        host, self._host = self._host, None
        if host is not None:
            leave(host)

    def _check_place(self, attempt: Attempt | None, run: str) -> None:
        """Refuse storage that some host could not resume from, if it can be told by now. Every rank calls it."""
        ranks = Agreement(self._trainer)
        token = ranks.tell(attempt.info.token if attempt is not None and attempt.is_claimed else "")
        if token:
            check_read_everywhere(ranks, self._location, run, self.number, token)

    def warm(self) -> None:
        """Have slots made in the background as soon as the first step showed how large a snapshot is. Once."""
        if self.is_warm:
            return
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        states = [list(optimizer.state.values()) for optimizer in optimizers]
        (self.attempt or self.in_shards or self.together).warm([*module.parameters(), *module.buffers(), states])
        self.is_warm = True

    def show_once(self) -> None:
        """Show other ranks what this one needs of a snapshot. Every rank calls it after each step: the first counts."""
        (self.in_shards or self.together).show_once()

    def finish_part(self, wait_s: float) -> None:
        """Bring this rank's part of a model in shards to safety. A second call does nothing."""
        if self.in_shards is not None:
            self.in_shards.finish(wait_s)

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Bring what the attempt has committed to safety. A second call does nothing.

        Args:
            wait_s: how long at most, seconds.
            complete: whether the run is at its end.

        Returns:
            see :meth:`Attempt.finish`; ``None`` on other ranks than 0.
        """
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return None
        durable = attempt.finish(wait_s, complete=complete)
        self._committed, self._where = attempt.writer.committed, attempt.where
        self._skipped, self._torn = attempt.skipped, attempt.writer.torn
        self.uploaded_bytes = attempt.uploaded_bytes
        return durable

    # -- snapshots ------------------------------------------------------------------------------------------------

    def how(self) -> How | None:
        """On rank 0: how the ranks may begin the next snapshot, ``None`` for not now.

        Slots are made after the first step, and waited for or not.
        """
        attempt, waits = self.attempt, self._settings.on_full == "wait"
        if attempt is None or attempt.fenced or attempt.failures.are_too_many or not (attempt.writer.ready or waits):
            return None
        shards = self.in_shards
        return shards.how(attempt, waits=waits) if shards is not None else self.together.how(attempt, waits=waits)

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self.attempt is not None:
            self.attempt.writer.copied()
        self.together.copied()
        if self.in_shards is not None:
            self.in_shards.copied()

    def write(
        self,
        dump: Dump | SpotError,
        *,
        complete: bool = False,
        urgent: bool = False,
        wait_s: float,
        how: How = ALONE,
        followed: bool = False,
    ) -> None:
        """Have a state written, by all ranks as they have agreed.

        Args:
            dump: the state; or why this rank does not have it: then the others are told, and there is no snapshot.
            complete: whether the run is at its end.
            urgent: whether training ends with it, for now.
            wait_s: how long to wait for a slot, seconds.
            how: the ranks write it together; :data:`~lightning_spot.fit.together.ALONE` where rank 0 writes all of it.
            followed: whether another one is to follow in a moment.
        """
        trainer = self._trainer
        self.begun_step = trainer.global_step
        self._begun += 1
        if self.in_shards is not None:
            waits = {"wait_s": wait_s, "commit_s": self._settings.upload_timeout_s if complete else wait_s}
            said = None if complete or urgent else how
            self.in_shards.write(self.attempt, dump, self._interval, complete=complete, how=said, **waits)
            return
        checkpoint = self._checkpoint(dump, how)
        if self.attempt is not None:
            ranks = self.together.ranks(how)
            self.store(checkpoint, complete=complete, wait_s=wait_s, ranks=ranks, followed=followed)
        elif how != ALONE:
            name = snapshot_name(trainer.global_step, self.number, complete=complete)
            self.together.share(dump, how, name, wait_s)

    def _checkpoint(self, dump: Dump | SpotError, how: How) -> dict[str, Any] | SpotError:
        """What rank 0 saves, or why it cannot."""
        checkpoint = self.together.checkpoint(dump, how)
        if self.attempt is not None and not isinstance(checkpoint, SpotError):
            try:
                checkpoint[KEY] |= {"interval": self._interval(), **self.attempt.origin}
            except Exception as error:
                return failure_of(error)
        return checkpoint

    def store(
        self,
        checkpoint: dict[str, Any] | SpotError,
        *,
        complete: bool = False,
        wait_s: float,
        ranks: SharingRanks | None,
        followed: bool = False,
    ) -> None:
        """Begin a snapshot on rank 0; on the others nothing happens. See :meth:`Attempt.write`."""
        trainer, attempt = self._trainer, self.attempt
        if attempt is None:
            return
        owned: Owners = {}
        kept: Owners = {}
        try:
            owned, kept = optimizer_owned(trainer.optimizers), by_storage(trainer.lightning_module.parameters())
        except Exception as error:
            checkpoint = failure_of(error)
        attempt.write(
            checkpoint,
            owned=owned,
            kept=kept,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            world_size=trainer.world_size,
            complete=complete,
            wait_s=wait_s,
            ranks=ranks,
            followed=followed,
        )


OnError = Literal["warn", "raise"]
"""What is done where going on without snapshots would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSettings:
    """How the snapshots of a run are taken.

    Attributes:
        policy: that decides when.
        ring: how the ring on this host is opened.
        on_full: what to do when all slots are dirty: ``"skip"`` this snapshot, or ``"wait"`` for the flusher.
        upload_timeout_s: how long the end waits until all is durable, seconds.
        copy_mode: how copying is spread over the iteration that follows.
    """

    policy: IntervalPolicy
    ring: RingSettings
    on_full: Literal["skip", "wait"]
    upload_timeout_s: float
    copy_mode: CopyMode


class Iterations(OfTrainer):
    """The iterations of one ``fit``, on the rank that writes.

    Args:
        trainer: that fits.
        copy_mode: how copying is spread over an iteration.

    Attributes:
        schedule: that is told.
    """

    def __init__(self, trainer: pl.Trainer, copy_mode: CopyMode) -> None:
        super().__init__(trainer)
        self.schedule = Schedule(copy_mode)
        self._gradients: GradientWatch | None = None

    def begin(self) -> None:
        """Training begins."""
        trainer = self._trainer
        device = trainer.strategy.root_device
        # With a hook at a parameter that it keeps in the memory of the CPU, FSDP waits for each gradient to come there.
        parameters = (item for item in trainer.lightning_module.parameters() if item.device.type == device.type)
        watch = GradientWatch(parameters, self.schedule.gradient_ready)
        numbers = {id(parameter): number for number, parameter in enumerate(watch.parameters)}
        self.schedule.owned = lambda: overwritten(trainer.optimizers, numbers)
        self.schedule.begin(
            watch.nbytes,
            int(getattr(trainer.model, "bucket_bytes_cap", BUCKET_BYTES)),  # DDP's
            DeviceClock(device.index or 0) if device.type == "cuda" else None,
            may_stand=device.type == "cpu" and trainer.world_size == 1,
        )
        watch.keep(self.schedule.watched)
        self._gradients = watch

    def end(self) -> None:
        """Let the model go."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        self.schedule.end()
        self.schedule.owned = dict

    def ends(self) -> None:
        """The optimizer has stepped: one iteration is over."""
        self.schedule.iteration_ends()
        if self._gradients is not None:
            self._gradients.keep(self.schedule.watched)

    def begins(self) -> None:
        """The next one begins: a snapshot has begun, or none is due."""
        self.schedule.iteration_begins()
