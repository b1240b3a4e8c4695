"""How the ranks of one ``fit`` write its snapshots: rank 0 decides, and each rank writes its shard.

The decision comes with the agreement that a snapshot is due, a step ahead. Then no rank waits for another: each writes
its shard into the ring of its host, or says there why it can't, and the snapshot counts when all shards are there. Only
for an urgent snapshot, or that of the end, all ranks wait until rank 0 knows what became of it.

With DDP all ranks hold the same model. Those that share a place, or whose hosts send to snapshot servers, each write a
range of ``model.ckpt``; what only one rank knows is a file of that rank's own. Of a sharded model, each rank writes
files of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.device import DeviceClock
from lightning_spot.capture.host_link import leave, say_found, seconds_left
from lightning_spot.capture.layouts import (
    CheckpointLayouter,
    RankCheckpoint,
    RankLayouter,
    ShardedCheckpoint,
    ShardedCheckpointLayouter,
    ranges_for,
)
from lightning_spot.capture.partitions import CopyMode
from lightning_spot.capture.schedule import BUCKET_BYTES, GradientWatch, PlaceKind, Schedule
from lightning_spot.capture.tensors import Owners, by_storage, optimizer_owned, overwritten, owned_nbytes
from lightning_spot.capture.unexpected import Pause, failure_of
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.config import read_environment, why_weak
from lightning_spot.errors import FailureReason, ServerUnreachableError, SettingsError, SnapshotFailedError, SpotError
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.run.attempts import begin_attempt
from lightning_spot.run.identity import new_id
from lightning_spot.run.location import Location, RingSettings
from lightning_spot.say import say
from lightning_spot.server.host import Host
from lightning_spot.server.runs import RunInfo
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.resume import Resume
from lightning_spot.session.topology import Topology
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.state.dump import KEY, Dump, gather
from lightning_spot.state.logged_values import LoggedNumbers
from lightning_spot.state.per_trainer import OfTrainer
from lightning_spot.state.replicas import average_now_and_then
from lightning_spot.state.sharded import is_sharded, split

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")

_APART_S = 30.0  # between two that several places put to storage, where nothing else is asked for
_COMMIT_S = 300.0  # until it is known whether an urgent one, or that of the end, is there
_MOST_ABORTED = 2

OnError = Literal["warn", "raise"]
"""What is done where going on without snapshots would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSettings:
    """How the snapshots of a run are taken.

    Attributes:
        policy: that decides when.
        ring: how the ring on this host is opened.
        on_full: what to do when all slots are dirty: ``"skip"`` this snapshot, or ``"wait"`` for a free one.
        upload_timeout_s: how long the end waits until all is durable, seconds.
        copy_mode: how copying is spread over the iteration that follows.
    """

    policy: IntervalPolicy
    ring: RingSettings
    on_full: Literal["skip", "wait"]
    upload_timeout_s: float
    copy_mode: CopyMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How a snapshot is written, as rank 0 has decided for all ranks.

    Attributes:
        writers: ranks that write a shard of it; 1 if rank 0 writes all of it, and has what only other ranks know.
        ranges: ranks that each write a range of ``model.ckpt``; none of a sharded model.
        persist: whether storage is to have it.
        urgent: whether training ends with it, for now.
        complete: whether the run is at its end.
        problem: why there is none, and training ends instead; ``""`` if nothing is in the way.
    """

    writers: int = 1
    ranges: tuple[int, ...] = (0,)
    persist: bool = True
    urgent: bool = False
    complete: bool = False
    problem: str = ""

    @property
    def is_last(self) -> bool:
        """Whether training ends with it, so that all ranks wait for what becomes of it."""
        return self.urgent or self.complete

    def plain(self) -> dict[str, Any]:
        """It as plain values, for the other ranks."""
        return asdict(self)

    @classmethod
    def heard(cls, values: dict[str, Any]) -> Decision:
        """What rank 0 has decided, of its plain values, see :meth:`plain`.

        Raises:
            SnapshotFailedError: on all ranks, if training ends instead.
        """
        if values["problem"]:
            raise SnapshotFailedError(values["problem"], reason=FailureReason.SHARD_MISSING)
        return cls(**{**values, "ranges": tuple(values["ranges"])})


class Coordinator(OfTrainer):
    """Has the ranks of one ``fit`` write its snapshots. Every rank has one.

    Args:
        trainer: that fits.
        location: where the run is.
        settings: how snapshots are taken.
        resume: what the ``fit`` goes on from.
        interval: what the interval has measured, for a later attempt.

    Attributes:
        attempt: that writes; ``None`` before it has begun and when it is finished.
        number: of the attempt, from 1; 0 before it has begun.
        begun_step: ``global_step`` of the newest snapshot that was begun, -1 before the first.
        uploaded_bytes: to snapshot servers and storage by this attempt; known after :meth:`finish`.
        schedule: of what this rank copies; told where training is.
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
        self.attempt: Attempt | None = None
        self.number, self.begun_step = 0, -1
        self.schedule = Schedule(settings.copy_mode)
        self._is_warm = False
        self.uploaded_bytes = self._begun = self._skipped = self._dropped = 0
        self._location, self._settings, self._resume, self._interval = location, settings, resume, interval
        self._is_sharded, self._is_first = is_sharded(trainer), trainer.is_global_zero
        self._hosts = Topology()
        self._host: Host | None = None
        self._committed: Manifest | None = None
        self._where = ""
        self._persisted_s = float("-inf")
        self._newest: Manifest | None = None  # that was committed, when so many had been aborted
        self._aborted_before = 0
        self._apart = Pause()
        self._logged = LoggedNumbers(settings.ring.keep.monitor)

    # -- what became of it ----------------------------------------------------------------------------------------

    @property
    def committed(self) -> Manifest | None:
        """The newest snapshot of this attempt that is committed in memory; only rank 0 knows."""
        if not self._is_first:
            return None
        return self.attempt.writer.committed if self.attempt is not None else self._committed

    @property
    def skipped(self) -> int:
        """Snapshots that were begun and not taken, since no slot was free, or to take them failed."""
        return self.attempt.skipped if self.attempt is not None else self._skipped

    @property
    def taken(self) -> int:
        """Snapshots that were begun and taken."""
        return max(0, self._begun - self.skipped - self.dropped)

    @property
    def dropped(self) -> int:
        """Snapshots that never count: a tensor changed while it was copied, or, on rank 0, another rank has failed."""
        return self.attempt.writer.dropped if self.attempt is not None else self._dropped

    def what_is_safe(self) -> str:
        """What a run that was ended goes on from, after :meth:`finish`, for people."""
        if (newest := self._committed) is None:
            return "this attempt has committed no snapshot"
        return f"its snapshot of step {newest.step} is {self._where}"

    # -- begin and end --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """On rank 0: open the ring, and ask all tiers what they hold."""
        self._location.check()
        if why := why_weak(read_environment().token):
            say(logging.WARNING, "token-weak", "{why}", about=self._location.url, why=why)
        if self._is_sharded and self._settings.ring.compression == "topk":
            raise SettingsError("what several ranks write is not approximated: leave lossy= out with a sharded model")
        # First: it takes over what a killed server left in memory.
        self._host = self._location.open_host(self._settings.ring)
        self._resume.look(self._location)

    def begin(self) -> None:
        """Begin the next attempt of the run, once it is decided what it goes on from. Every rank calls it."""
        resume, ranks = self._resume, Agreement(self._trainer)
        info, is_claimed, lineage = ranks.tell(ranks.on_rank_zero(self._claim))
        self.number = resume.attempt = info.attempt
        resume.run_id = info.id
        if ranks.size > 1:
            ranks.together(lambda: self._is_first or self._at_ring(lambda host: host.open_run(info)))
            self._hosts = hosts = Topology.meet(ranks, self._location, self._host)
            if not hosts.is_one_place and not self._location.servers and is_claimed:
                hosts.check_storage(ranks, self._location.url, info)
            if not hosts.is_one_place:
                info = hosts.told(info, apart=self._is_sharded)
                ranks.together(lambda: self._host is None or self._at_ring(lambda host: host.open_run(info)))
        ranks.together(lambda: self._take_part(info, lineage, is_claimed=is_claimed))

    def _claim(self) -> tuple[RunInfo, bool, str]:
        """On rank 0: take the next attempt, at the ring and in storage; whether that is claimed; and a new lineage."""
        found = self._resume.found
        assert found is not None
        info, is_claimed = self._at_ring(lambda host: begin_attempt(found, host, self._settings.ring))
        self._resume.found = replace(found, claimed=info.attempt if is_claimed else 0)
        return info, is_claimed, new_id()

    def _at_ring(self, use: Callable[[Host], T]) -> T:
        """Use the ring of this host; if its server is lost meanwhile (one that was left ends by itself), a new one."""
        self._host = self._host or self._location.open_host(self._settings.ring)
        try:
            return use(self._host)
        except ServerUnreachableError as error:
            self.let_go()
            if not self._location.has_local_server:
                raise
            text = "the snapshot server on this host is lost ({error}). A new one is started"
            say(logging.WARNING, "local-server-lost", text, url=self._location.url, error=error)
        self._host = self._location.open_host(self._settings.ring)
        used = use(self._host)
        say_found(self._host)
        return used

    def _take_part(self, info: RunInfo, lineage: str, *, is_claimed: bool) -> None:
        """Write snapshots from now on, until :meth:`finish`."""
        assert self._host is not None
        attempt = Attempt(
            *(self._location, info, self._host, self._settings.ring, self._layouter(info)),
            look=self._resume.trial(),
            schedule=self.schedule,
            rank=self._trainer.global_rank,
            lineage=lineage,
            writers_here=len(self._hosts.here),
            is_guest=self._hosts.is_guest,
        )
        self.attempt, self._host = attempt, None
        if self._is_first:
            attempt.hold_claim(is_made=is_claimed)

    def _layouter(self, info: RunInfo) -> RankLayouter:
        if self._is_sharded:
            return ShardedCheckpointLayouter(self._trainer.global_rank, self._trainer.world_size, info.token)
        return CheckpointLayouter(info.token)

    def let_go(self) -> None:
        """Let go of the ring if no attempt has begun."""
        host, self._host = self._host, None
        if host is not None:
            leave(host)

    def warm(self) -> None:
        """Have slots made in the background as soon as the first step showed how large a snapshot is. Once."""
        if self._is_warm or self.attempt is None:
            return
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        states = [list(optimizer.state.values()) for optimizer in optimizers]
        self.attempt.warm([*module.parameters(), *module.buffers(), states], self._part())
        self._is_warm = True

    def _part(self) -> float:
        """About which part of the tensors this rank writes."""
        rank, size = self._trainer.global_rank, self._trainer.world_size
        if self._is_sharded or size == 1:
            return 1 / size
        all_do = self._hosts.is_one_place or self._location.servers
        ranges = ranges_for(self._owned_nbytes(), range(size) if all_do else self._hosts.places[0])
        return 1 / len(ranges) if rank in ranges else 0.0

    def _owned_nbytes(self) -> int:
        return owned_nbytes(optimizer_owned(self._trainer.optimizers))

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Bring what the attempt has committed to safety. A second call does nothing.

        Args:
            wait_s: how long at most, seconds.
            complete: whether the run is at its end.

        Returns:
            see :meth:`Attempt.finish`.
        """
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return None
        durable = attempt.finish(wait_s, complete=complete)
        if self._is_first:
            self._committed, self._where = attempt.writer.committed, attempt.where
        self._skipped, self._dropped = attempt.skipped, attempt.writer.dropped
        self.uploaded_bytes = attempt.uploaded_bytes
        return durable

    # -- the decision ---------------------------------------------------------------------------------------------

    def decide(self) -> Decision | None:
        """On rank 0: how the ranks write the next snapshot, ``None`` if there is none now.

        Slots are made after the first step, and waited for or not.
        """
        attempt, waits = self.attempt, self._settings.on_full == "wait"
        if attempt is None or attempt.fenced or attempt.failures.are_too_many or not (attempt.writer.ready or waits):
            return None
        if not self._hosts.is_one_place and attempt.writer.is_under_way and not waits:
            say(logging.WARNING, "upload-under-way", "a snapshot is skipped while the one before is uploaded")
            return None
        persist = self._is_persisted()
        if not persist and not self._location.servers:  # it would count nowhere
            return None
        if persist:
            self._persisted_s = time.monotonic()
        problem = self._after_aborts(attempt.writer)  # first: ranges depend on it
        return replace(self._decision(attempt), persist=persist, problem=problem)

    def decide_last(self, *, urgent: bool = False, complete: bool = False) -> Decision:
        """How an urgent snapshot is written, or that of the end. Every rank calls it, at the same place."""

        def mine() -> Decision:
            assert self.attempt is not None
            return replace(self._decision(self.attempt), urgent=urgent, complete=complete)

        return Agreement(self._trainer).everyones(mine)[0]

    def _decision(self, attempt: Attempt) -> Decision:
        size = self._trainer.world_size
        if size == 1 or self._settings.ring.compression == "topk":  # what several ranks write is not approximated
            return Decision()
        if attempt.lacks_memory and not self._is_sharded:  # one rank can write past memory
            return Decision()
        return Decision(writers=size, ranges=() if self._is_sharded else self._ranges(attempt))

    def _ranges(self, attempt: Attempt) -> tuple[int, ...]:
        """The ranks that write a range of the one file: those whose shards come to one place."""
        none = list[str]()
        if self.hold_their_own or not self._apart.is_over or attempt.writer.layouter.why_alone:
            return (0,)
        meet = self._hosts.is_one_place
        if not meet and self._location.servers:
            meet = bool(attempt.writer.link.ask(lambda host: host.kept_at(), none))
        return ranges_for(self._owned_nbytes(), range(self._trainer.world_size) if meet else self._hosts.places[0])

    @property
    def hold_their_own(self) -> bool:
        """Whether ranks are known to hold other parameters, or other states of optimizers, than rank 0."""
        trainer = self._trainer
        if getattr(trainer.strategy.model, "parameters_to_ignore", ()):
            return True  # those that DDP ignores
        # ZeroRedundancyOptimizer has each state on one rank only.
        are_partitioned = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)
        return are_partitioned or average_now_and_then(trainer)

    def _is_persisted(self) -> bool:
        """Whether storage is to have the next snapshot: where several places put it there, all have to know."""
        servers = self._location.servers
        if self._hosts.is_one_place or (servers and not (self._is_sharded and len(servers) > 1)):
            return True
        apart_s = self._settings.ring.min_upload_interval_s
        apart_s = apart_s if apart_s is not None else _APART_S if servers else 0.0
        return time.monotonic() - self._persisted_s >= apart_s

    def _after_aborts(self, writer: SnapshotWriter) -> str:
        """Act on two snapshots in a row that ranks could not write together: for a while, rank 0 writes one file alone.

        Returns:
            why training ends, with ``on_error="raise"``; else ``""``.
        """
        if writer.committed is not self._newest:
            self._newest, self._aborted_before = writer.committed, writer.aborted
        if writer.aborted - self._aborted_before < _MOST_ABORTED:
            return ""
        self._aborted_before = writer.aborted
        if not self._is_sharded:
            self._apart.begin()
        problem = f"ranks cannot write snapshots together: {writer.why_aborted}"
        if self._settings.ring.strict:
            return problem
        then = "They go on trying" if self._is_sharded else "For some minutes rank 0 writes the model alone"
        say(logging.WARNING, "ranks-apart", "{why}. {then}", only_rank_zero=True, why=problem, then=then)
        return ""

    # -- snapshots ------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Training begins: have what is copied spread over its iterations."""
        trainer = self._trainer
        device = trainer.strategy.root_device
        # With a hook at a parameter that it keeps in the memory of the CPU, FSDP waits for each gradient to come there.
        parameters = (item for item in trainer.lightning_module.parameters() if item.device.type == device.type)
        watch = GradientWatch(parameters, partial(self.schedule.reached, PlaceKind.GRADIENT))
        numbers = {id(parameter): number for number, parameter in enumerate(watch.parameters)}
        self.schedule.begin(
            watch,
            lambda: overwritten(trainer.optimizers, numbers),
            int(getattr(trainer.model, "bucket_bytes_cap", BUCKET_BYTES)),  # DDP's
            DeviceClock(device.index or 0) if device.type == "cuda" else None,
            may_stand=device.type == "cpu" and trainer.world_size == 1,
        )

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self.attempt is not None:
            self.attempt.writer.copied()

    def write(self, dump: Dump | SpotError, how: Decision, *, wait_s: float) -> None:
        """Write a snapshot. Every rank calls it, at the same place; if training ends with it, all wait for it.

        Args:
            dump: the state; or why this rank does not have it: then there is no snapshot.
            how: it is written.
            wait_s: how long to wait for a slot, seconds.
        """
        trainer, ranks, deadline_s = self._trainer, Agreement(self._trainer), time.monotonic() + wait_s
        self._begun += self.begun_step != trainer.global_step
        self.begun_step = trainer.global_step
        attempt = self.attempt
        if attempt is not None and self._is_first and not self._hosts.is_one_place and not how.is_last:
            attempt.writer.wait_all(wait_s)  # one at a time spans several places
        begin = partial(self._begin, dump, how, wait_s)
        if ranks.size == 1 or not how.is_last:
            begin()
            return
        ranks.together(begin)  # else ranks would wait for one that has raised an error
        self.copied()
        commit_s = self._settings.upload_timeout_s if how.complete else wait_s
        left_s = min(seconds_left(deadline_s), commit_s, _COMMIT_S)
        ranks.on_rank_zero(lambda: attempt.failure(left_s) if attempt is not None else None)

    def _begin(self, dump: Dump | SpotError, how: Decision, wait_s: float) -> None:
        trainer = self._trainer
        owned: Owners = {}
        metrics: dict[str, float] = {}
        try:
            content: Any = self._content(dump, how)
            metrics = self._logged.now(trainer) if self._is_first else {}
            owned = optimizer_owned(trainer.optimizers)
        except Exception as error:
            content = failure_of(error)
        if self.attempt is None or (how.writers == 1 and not self._is_first):
            return
        self.attempt.write(
            content,
            owned=owned,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            world_size=trainer.world_size,
            writers=how.writers,
            complete=how.complete,
            metrics=metrics,
            persist=how.persist,
            wait_s=wait_s,
        )

    def _content(
        self, dump: Dump | SpotError, how: Decision
    ) -> dict[str, Any] | RankCheckpoint | ShardedCheckpoint | SpotError:
        """What this rank saves, or why it cannot. Every rank calls it, at the same place."""
        trainer = self._trainer
        gathers = how.writers == 1 and not self._is_sharded
        if isinstance(dump, SpotError):
            if gathers:
                gather(trainer, dump)  # the others are in it
            return dump
        content: dict[str, Any] | RankCheckpoint | ShardedCheckpoint
        if self._is_sharded:
            state, values = split(dump.complete([]))
            content = ShardedCheckpoint(state, dump.state, values)
        elif gathers:
            content = values = dump.complete(gather(trainer, dump.state))
        else:
            values = dump.complete([dump.state]) if self._is_first else dump.checkpoint
            nbytes = owned_nbytes(by_storage(trainer.lightning_module.parameters()))
            content = RankCheckpoint(values, dump.state, nbytes, how.ranges)
        if self.attempt is not None and self._is_first:
            attempt = self.attempt
            values[KEY] |= {"interval": self._interval(), "lineage": attempt.lineage, "run_id": attempt.info.id}
        return content
