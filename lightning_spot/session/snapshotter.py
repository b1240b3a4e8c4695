"""Takes the snapshots of one ``fit``: asks at each step boundary whether one is due, and has it written."""

from __future__ import annotations

import contextlib
import difflib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_spot.capture.device import Cuda
from lightning_spot.capture.schedule import PlaceKind
from lightning_spot.capture.slot_pool import AHEAD_S
from lightning_spot.capture.unexpected import STILL_ENDS, THE_END, BestEffort, failure_of
from lightning_spot.config import format_bytes, format_seconds
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.interval.costs import Costs, FailureRate, RobustMean
from lightning_spot.interval.policy import ByTime, IntervalPolicy
from lightning_spot.patches import Patches
from lightning_spot.run.choice import say_what_is_left
from lightning_spot.run.identity import starts_between
from lightning_spot.run.location import Location
from lightning_spot.say import say
from lightning_spot.server.runs import Figures, Histogram
from lightning_spot.session.collectives import Agreement, AsyncBroadcast
from lightning_spot.session.coordinator import Coordinator, Decision, SnapshotSettings
from lightning_spot.session.preflight import check_one_optimizer
from lightning_spot.session.resume import Resume
from lightning_spot.state import namespaces
from lightning_spot.state.dump import Dump
from lightning_spot.state.fit_state import FitState
from lightning_spot.state.logged_values import last_values
from lightning_spot.state.loops import StepBoundary
from lightning_spot.state.per_trainer import OfTrainer

if TYPE_CHECKING:
    import lightning.pytorch as pl

LEARN_EVERY_S = 5.0
_MOST_STEPS_APART = 10_000
_UNSEEN_STEPS = 100  # within which a metric of steps was logged
_RETRY_S = 0.5

READ_EVERY_S = 0.1

Reading = tuple[int, float]
"""A step, and the value around it."""


WAIT_FOR_SLOT_S = 600.0
_UNCOUNTED_BATCHES = 8  # after so many: a GAN may step its second network, with Lightning, in every fifth batch only
_AHEAD = "making slots ahead"


class Announcement(NamedTuple):
    """What rank 0 tells all ranks ahead of a step: whether they take a snapshot there, and how; as plain values.

    Attributes:
        how: it is taken; ``None`` if none is.
        is_asked_again: rank 0 knows better at the step itself, when a slot may be free: all ranks ask it again there,
            and wait for the answer.
        next_step: at which rank 0 makes the next announcement; of no meaning where the step says when one is due.
    """

    how: Any
    is_asked_again: bool
    next_step: int


class Pacing:
    """Says at each step boundary of one ``fit`` whether all ranks take a snapshot.

    Of several ranks, rank 0 decides, and announces it one step ahead: an :class:`Announcement` has arrived when
    training comes to the next step boundary, and nobody waits for it. Where all ranks know by the step when a snapshot
    is due, there is one announcement for each. Else there are some between two snapshots, and each names the step of
    the next one: half of the way to where a snapshot will be due.

    Args:
        policy: that decides.
        best_effort: runs what training can do without.

    Attributes:
        policy: that decides.
        stall_s: seconds that training has waited for snapshots.
        blocked: how long it has waited for each of them.
        passed_over: snapshots that were due and never begun, since there was no slot for them yet; on rank 0.
    """

    def __init__(self, policy: IntervalPolicy, best_effort: BestEffort | None = None) -> None:
        self.policy = policy
        self._best_effort = best_effort or BestEffort()
        self.stall_s, self.blocked = 0.0, Histogram()
        self.passed_over, self._is_overdue = 0, False
        self._rate = FailureRate()
        self._stall, self._stalled_s = RobustMean(), -1.0
        self._readings = Readings()
        self._attempt = 0
        self._total_steps: float | None = None
        self._next_announcement = 0
        self._seen_step, self._seen_s, self._stride = 0, 0.0, 1
        self._laps_s = (0.0, 0.0)
        """What a step has taken, the last two times; with whatever came between them."""
        self._begun = (0, 0.0)
        self._learned_s, self._ran_until_s, self._taken_s = float("-inf"), 0.0, 0.0
        self._has_validated = False

    # -- lifetime -------------------------------------------------------------------------------------------------

    def begin(self, trainer: pl.Trainer, attempt: int, saved: dict[str, Any] | None) -> None:
        """When training begins.

        Args:
            trainer: that trains.
            attempt: of the run.
            saved: what an earlier attempt had measured, see :meth:`state_dict`.
        """
        now_s = time.monotonic()
        self._attempt = attempt
        self._rate = FailureRate(machines=trainer.num_nodes)
        total = float(trainer.estimated_stepping_batches)
        self._total_steps = total if 0 < total < float("inf") else None
        if saved is not None:
            self._rate.load_state_dict(saved["rate"])
            self._rate.failed(starts_between(saved["attempt"], attempt))
            self._stall.load_state_dict(saved["stall"])
            if saved["policy"] == type(self.policy).__name__:
                self.policy.load_state_dict(saved["state"])
        self._begun = (trainer.global_step, now_s)
        self._seen_step, self._seen_s, self._announced = trainer.global_step, now_s, AsyncBroadcast(trainer)
        self._ran_until_s = self._taken_s = now_s
        self.policy.taken(trainer.global_step, now_s)

    def state_dict(self) -> dict[str, Any]:
        """What a later attempt goes on with, as plain values."""
        return {
            "attempt": self._attempt,
            "rate": self._rate.state_dict(),
            "stall": self._stall.state_dict(),
            "policy": type(self.policy).__name__,
            "state": self.policy.state_dict(),
        }

    def expect_failure(self) -> None:
        """This machine is likely to be taken away: rank 0, which decides, reckons with it from now on."""
        self._rate.advised()
        self._learned_s = float("-inf")

    # -- what is measured -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Training waits for a snapshot as long as this lasts."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started_s
            self.stall_s += seconds
            if self._stalled_s >= 0:
                self._stalled_s += seconds

    def read(self, trainer: pl.Trainer, outputs: Any) -> None:
        """Look at the progress of the batch that is done; rank 0 does."""
        monitor = self.policy.monitor
        if monitor == "" or not trainer.is_global_zero:
            return
        if monitor is None:
            reading = self._readings.add(outputs, trainer.global_step)
        else:
            reading = self._readings.read_at_times(lambda: last_values(trainer).get(monitor), trainer.global_step)
            is_late = trainer.global_step == self._begun[0] + _UNSEEN_STEPS and not trainer.enable_validation
            if self._has_validated or is_late:  # an epoch may take days
                self._has_validated = False
                self._check_monitor(trainer, monitor)
        if reading is not None:
            self.policy.progress(*reading)

    def validated(self) -> None:
        """A validation of the training is over: what is logged in one is known when the next batch is."""
        self._has_validated = True

    def _check_monitor(self, trainer: pl.Trainer, monitor: str) -> None:
        """Say that the monitored metric is not logged."""
        if monitor in (logged := last_values(trainer)):
            return
        near = difflib.get_close_matches(monitor, logged, 1)
        text = "monitor={about!r} is not logged so far. Until it is, snapshots are taken at Young and Daly's interval."
        text += (" Did you mean {near!r}?" if near else "") + " Logged are: {logged}"
        names = ", ".join(sorted(logged)) or "none"
        facts: dict[str, Any] = {"near": near[0] if near else "", "logged": names, "step": trainer.global_step}
        say(logging.WARNING, "monitor-not-logged", text, about=monitor, only_rank_zero=True, **facts)

    # -- the decision ---------------------------------------------------------------------------------------------

    def taken(self, step: int) -> None:
        """A snapshot of ``step`` was begun, on every rank."""
        if self._is_overdue:  # those that never will be taken are counted
            self._is_overdue = False
            self.passed_over += self.policy.passed_over(step)
        self._taken_s = time.monotonic()
        self.policy.taken(step, self._taken_s)
        self._stalled_s = 0.0

    def due(self, trainer: pl.Trainer, decide: Callable[[], Any], drain_s: Callable[[], float]) -> Any:
        """Whether all ranks take a snapshot now, and how: on all of them, what ``decide`` says on rank 0.

        Args:
            trainer: that is at a step boundary after an optimizer step.
            decide: how it is taken, as plain values; ``None`` if there is no slot for it. Asked on rank 0.
            drain_s: how long the nearest tier takes for a snapshot, see :class:`Costs`; asked on rank 0, now and then.

        Returns:
            ``None`` if none is taken.
        """
        step, now_s = trainer.global_step, time.monotonic()
        if (steps := step - self._seen_step) > 0:
            self._laps_s = (self._laps_s[1], (now_s - self._seen_s) / steps)
        self._stride, self._seen_step, self._seen_s = max(self._stride, steps), step, now_s
        if trainer.is_global_zero:  # here, since the step after a snapshot has waited for the rest of it by now
            self._best_effort.run("learning what snapshots cost", partial(self._learn, now_s, drain_s), None)
        if trainer.world_size == 1:
            return self._decide(step, now_s, decide)
        if self.policy.by_step and not self.policy.due(step, now_s):
            return None
        if not self._announced.is_under_way:
            if not self.policy.by_step:
                return None
            self._announce(trainer, step, now_s, decide)  # the first one, or steps are larger than they were
        told = Announcement(*self._announced.hear())
        if told.is_asked_again:
            self._announce(trainer, step, now_s, decide)
            told = Announcement(*self._announced.hear())
        self._next_announcement = told.next_step
        return told.how

    def look_ahead(self, trainer: pl.Trainer, decide: Callable[[], Any]) -> None:
        """Announce what all ranks do at the next step boundary. Called at the end of each, if there are several ranks.

        Args:
            trainer: see :meth:`due`.
            decide: likewise.
        """
        if trainer.world_size == 1 or self._announced.is_under_way:
            return
        now_s, step = time.monotonic(), trainer.global_step
        by_step, next_step = self.policy.by_step, step + self._stride
        if self.policy.due(next_step, now_s) if by_step else step >= self._next_announcement:
            # A validation, or what the first step compiles, makes one step long, and all of them on the average.
            self._announce(trainer, next_step, now_s + self._stride * min(self._laps_s), decide)

    def next_within(self, trainer: pl.Trainer, most_s: float) -> bool:
        """Whether a snapshot is due at the next step boundary, and that comes in time; known of intervals in steps.

        Args:
            trainer: that is at a step boundary, on rank 0.
            most_s: what counts as in time, seconds.
        """
        now_s, lap_s = time.monotonic(), self._stride * max(self._laps_s)
        if not self.policy.by_step or lap_s >= most_s:
            return False
        return self.policy.due(trainer.global_step + self._stride, now_s) and self._affords(now_s + lap_s)

    def _announce(self, trainer: pl.Trainer, step: int, at_s: float, decide: Callable[[], Any]) -> None:
        """Have rank 0 announce how a snapshot is taken at ``step``, to which training comes at ``at_s``."""
        told = Announcement(None, False, 0)
        if trainer.is_global_zero:
            was_overdue = self._is_overdue
            how = self._decide(step, at_s, decide)
            is_asked_again = self._is_overdue and not was_overdue and step > trainer.global_step
            told = Announcement(how, is_asked_again, trainer.global_step + self._apart(trainer.global_step))
        self._announced.say(told)

    def _decide(self, step: int, at_s: float, decide: Callable[[], Any]) -> Any:
        """How a snapshot is taken at a step, ``None`` if none is; on rank 0, for whose word the others wait."""
        return self._best_effort.run("deciding on a snapshot", partial(self._decision, step, at_s, decide), None)

    def _decision(self, step: int, at_s: float, decide: Callable[[], Any]) -> Any:
        if not self.policy.due(step, at_s) or (self.policy.by_step and not self._affords(at_s)):
            return None
        how = decide()
        self._is_overdue = self._is_overdue or (self.policy.by_step and not how)
        return how

    def _affords(self, now_s: float) -> bool:
        """Whether a snapshot that is due by its step is within the budget for waiting."""
        return now_s - self._taken_s >= self.policy.shortest_s()

    @property
    def interval(self) -> str:
        """The interval between snapshots at present, for people."""
        policy = self.policy
        return format_seconds(policy.interval_s(self._seen_step)) if isinstance(policy, ByTime) else repr(policy)

    @property
    def blocked_each_s(self) -> float:
        """Seconds that training waits for one snapshot, as far as is known."""
        return self._stall.value or 0.0

    def _learn(self, now_s: float, drain_s: Callable[[], float]) -> None:
        """Tell the policy what was measured, every few seconds, and when a snapshot has shown what it costs."""
        by_step = self.policy.by_step
        if self._stalled_s >= 0:  # the optimizer step after the last one has waited for the rest of the copy
            self.blocked.observe(self._stalled_s)
            self._stall.add(self._stalled_s)
            self._stalled_s = -1.0
        elif by_step or now_s - self._learned_s < LEARN_EVERY_S:
            return
        self._rate.ran(now_s - self._ran_until_s)
        self._learned_s = self._ran_until_s = now_s
        if (stall_s := self._stall.value) is not None:
            took_s, mtbf_s = 0.0 if by_step else drain_s(), self._rate.mtbf_s
            self.policy.learn(Costs(stall_s=stall_s, mtbf_s=mtbf_s, drain_s=took_s, total_steps=self._total_steps))

    def _apart(self, step: int) -> int:
        """Steps until the next announcement: half of the way to where a snapshot is due.

        As fast as steps were so far, or as slow as they have become.
        """
        now_s = time.monotonic()
        step_s = max((now_s - self._begun[1]) / max(1, step - self._begun[0]), *self._laps_s, 1e-9)
        wait_s = self.policy.wait_s(step, now_s)
        wait_s = wait_s / 2 if wait_s > 0 else _RETRY_S  # due, but there is no slot yet
        return max(1, int(min(_MOST_STEPS_APART, wait_s / step_s)))


class Readings:
    """Means of the training loss over short times, or the values of a logged metric.

    On a GPU a value stays there: its copy to the host is looked at when it has arrived, some steps later. One is under
    way at a time.

    Args:
        device: calls the GPUs.
    """

    def __init__(self, device: Cuda | None = None) -> None:
        self._device: Cuda = device if device is not None else Cuda()
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._read_s = time.monotonic()
        self._value: float | None = None
        self._arriving: tuple[int, torch.Tensor, Any] | None = None

    def add(self, outputs: Any, step: int) -> Reading | None:
        """The outputs of a training step; returns a step and the mean loss around it when there is a new one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        loss = loss.detach()
        self._sum = loss.clone() if self._sum is None else self._sum + loss
        self._count += 1
        if not self._is_time():
            return None
        mean, self._sum, self._count = self._sum.double() / self._count, None, 0
        return self._read(mean, step)

    def read_at_times(self, read: Callable[[], torch.Tensor | float | None], step: int) -> Reading | None:
        """A logged metric, looked at as often as the loss; a value that was read before is no new reading."""
        if not self._is_time() or (value := read()) is None:
            return None
        reading = self._read(value, step)
        if reading is None or reading[1] == self._value:
            return None
        self._value = reading[1]
        return reading

    def _is_time(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._read_s < READ_EVERY_S:
            return False
        self._read_s = now_s
        return True

    def _read(self, value: torch.Tensor | float, step: int) -> Reading | None:
        """A value; of those on a GPU, the one before it, if that has arrived."""
        if not isinstance(value, torch.Tensor) or not is_on_gpu(value):
            return step, float(value)
        arrived: Reading | None = None
        if self._arriving is not None:
            of_step, host, copied = self._arriving
            if not self._device.is_over(copied):
                return None
            arrived = of_step, float(host)
        self._arriving = (step, *self._device.to_host(value.detach()))
        return arrived


def is_on_gpu(value: torch.Tensor) -> bool:
    """Whether reading a value would wait for a GPU."""
    return value.device.type == "cuda"


class Snapshotter(OfTrainer):
    """Takes the snapshots of one ``fit``. Every rank has one, and rank 0 writes.

    Args:
        trainer: that fits.
        location: where the run is.
        settings: how snapshots are taken.
        resume: what the ``fit`` goes on from.

    Attributes:
        location: where the run is.
        settings: how snapshots are taken.
        pacing: decides when.
        writing: has them written.
        has_begun: whether :meth:`begin_training` was called.
        keeps_state: whether the state in front of a validation is kept, for a stop in the middle.
        best_effort: runs what training can do without.
    """

    def __init__(self, trainer: pl.Trainer, location: Location, settings: SnapshotSettings, resume: Resume) -> None:
        super().__init__(trainer)
        self.location = location
        self.settings = settings
        self.best_effort = BestEffort(strict=settings.ring.strict)
        self.pacing = Pacing(settings.policy, self.best_effort)
        self.writing = Coordinator(trainer, location, settings, resume, self.pacing.state_dict)
        self.keeps_state = False
        self._kept_state: Dump | None = None
        self._resume = resume
        self._seen_step = -1
        self._steps_itself = self.has_begun = False
        self._has_counted = self._has_stepped = False  # whether global_step has moved; an optimizer, in this batch
        self._has_said_first = False
        self._uncounted = 0  # batches in which an optimizer stepped, before global_step has moved
        self._patches = Patches()

    @property
    def skipped(self) -> int:
        """Snapshots that were due and not taken, since no slot was free, or to take them failed."""
        return self.pacing.passed_over + self.writing.skipped

    # -- begin ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the ring, ask all tiers what they hold, and begin the next attempt of the run."""
        Agreement(self._trainer).on_rank_zero(self.writing.look)
        self._resume.when_decided(self.writing.begin)

    def begin_training(self) -> None:
        """Start counting, and listen for the places at which a snapshot can be taken."""
        trainer, writing, self.has_begun = self._trainer, self.writing, True
        check_one_optimizer(trainer)
        self._seen_step = trainer.global_step
        if writing.attempt is not None and self._resume.lineage is not None:
            writing.attempt.lineage = self._resume.lineage
        elif self._resume.found is not None:
            say_what_is_left(self._resume.found)
        self.pacing.begin(trainer, writing.number, self._resume.interval)
        FitState.of(trainer).listen(self)
        writing.follow()
        self._patches.callback(writing.schedule.end)
        self._steps_itself = namespaces.overrides(trainer.lightning_module, "optimizer_step")
        self._follow_steps()

    def _follow_steps(self) -> None:
        """See steps that Lightning does not: of optimizers that it does not wrap, or that it was not given."""
        trainer = self._trainer
        trained = {id(parameter) for parameter in trainer.lightning_module.parameters()}
        is_automatic = trainer.lightning_module.automatic_optimization

        @cache
        def say_unknown(kind: str) -> None:  # unless the module may save it by itself
            if not namespaces.overrides(trainer.lightning_module, "on_save_checkpoint"):
                text = (
                    "{about} updates weights of the model, and configure_optimizers does not return it. No snapshot has"
                    " its state: a resume starts it again. Return it there"
                )
                say(logging.WARNING, "optimizer-not-returned", text, about=kind, only_rank_zero=True)

        def steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
                return  # of an inner loop, or of another training
            self._has_stepped = True
            is_known = _is_of(trainer, optimizer)
            if not is_known:
                say_unknown(type(optimizer).__qualname__)
            if not (is_automatic and is_known):  # of which Lightning's own hook comes behind the backward pass
                self.before_step()

        self._patches.callback(register_optimizer_step_pre_hook(steps).remove)

    # -- while training -------------------------------------------------------------------------------------------

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due."""
        self._at_seam(before_validation=False)
        loop = trainer.fit_loop.epoch_loop
        # Where an epoch ends, also within its batches, other callbacks' hooks come before ours.
        is_at_limit = 0 <= trainer.max_steps <= trainer.global_step  # right after a resume, the loop is not done then
        if loop.batch_progress.is_last_batch or loop.done or is_at_limit:
            self.disturbed()

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if one is due: a resumed run begins with this validation."""
        self._at_seam(before_validation=True)
        if self.keeps_state:
            self._kept_state = self.best_effort.run("keeping the state in front of a validation", self._keep, None)
        self.disturbed()  # averaging callbacks exchange weights around a validation

    def after_backward(self) -> None:
        """All gradients of a micro-batch are there. A module's own ``optimizer_step`` may go past Lightning's hook."""
        self.writing.schedule.reached(PlaceKind.BACKWARD_END)
        if self._steps_itself:
            self.before_step()

    def before_step(self) -> None:
        """The optimizer is about to step: wait for what is not copied yet."""
        self.writing.schedule.stepping()
        self.wait_copied()

    def disturbed(self) -> None:
        """Something else than training comes, in which weights may change: wait for what is not copied yet."""
        self.writing.schedule.disturbed()
        self.wait_copied()

    def wait_copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        self.best_effort.run("waiting for what is copied", self._wait_copied, None)

    def _wait_copied(self) -> None:
        with self.pacing.stalling():
            self.writing.copied()

    def read(self, outputs: Any) -> None:
        """Look at the progress of the batch that is done."""
        self.best_effort.run("reading the progress of training", lambda: self.pacing.read(self._trainer, outputs), None)

    def end_training(self) -> None:
        """Take the last snapshot, of the finished run: after the module's own hook, which may change the weights."""
        self.wait_copied()
        if 0 < self._uncounted < _UNCOUNTED_BATCHES and not self._has_counted:
            self._say_uncounted()
        self.best_effort.run(_AHEAD, self.writing.warm, None)  # of a run that only comes to its end there was no step
        self.best_effort.run(THE_END, self.close, None, still=STILL_ENDS)
        # The module's own hook follows those of callbacks; the strategy's is the last that Lightning calls then.
        self._patches.wrap(self._trainer.strategy, "on_train_end", partial(partial, self._on_train_end))

    def _on_train_end(self, original: Callable[[], None]) -> None:
        self.close()
        original()
        self._take_last()

    def _take_last(self) -> None:
        """Take the snapshot of the finished run. What fails costs it, as at a seam."""
        agree, run = partial(self.writing.decide_last, complete=True), self.best_effort.run
        how = run("agreeing on the last snapshot", agree, None, still=STILL_ENDS)
        if how is not None and self._trainer.world_size > 1:
            self._take(how)
        elif how is not None:  # else a rank can't say so, and all of them know
            run("taking the last snapshot", partial(self._take, how), None, still=STILL_ENDS)
        if self.writing.attempt is not None:  # whatever came of it, which was said, unless that has ended training
            self.writing.attempt.has_ended = True

    def _at_seam(self, *, before_validation: bool) -> None:
        """Take a snapshot if one is due. What fails costs it; but of several ranks, others may wait for what comes."""
        trainer = self._trainer
        stepped, self._has_stepped = self._has_stepped, False
        if trainer.global_step == self._seen_step:
            self._uncounted += stepped and not self._has_counted
            if self._uncounted == _UNCOUNTED_BATCHES:
                self._say_uncounted()
            return
        self._seen_step, self._has_counted = trainer.global_step, True
        step = partial(self._after_step, before_validation=before_validation)
        if trainer.world_size > 1:
            step()
        elif not self.best_effort.run("taking a snapshot", step, False) and self.writing.attempt is not None:
            self.writing.attempt.count_failure()

    def _say_uncounted(self) -> None:
        """Say that no snapshots are taken, since Lightning counts no steps.

        Raises:
            SettingsError: with ``strict``.
        """
        text = (
            "Lightning has counted no step in {batches} batches, though optimizers have stepped. NO SNAPSHOT is taken"
            " before the end. Step those of self.optimizers(), in hooks of backward too"
        )
        if self.settings.ring.strict:
            raise SettingsError(text.format(batches=self._uncounted))
        say(logging.WARNING, "steps-not-counted", text, only_rank_zero=True, batches=self._uncounted)

    def _after_step(self, *, before_validation: bool) -> bool:
        trainer, run, schedule = self._trainer, self.best_effort.run, self.writing.schedule
        schedule.iteration_ends()
        run(_AHEAD, self.writing.warm, None)
        if (how := self.pacing.due(trainer, self._decide, self._drain_s)) is not None:
            self._take(Decision.heard(how), before_validation=before_validation)
        self.pacing.look_ahead(trainer, self._decide)
        run("leasing a slot ahead", self._lease_ahead, None)
        if not self._has_said_first:
            run("logging the first snapshot", self._say_first, None)
        schedule.iteration_begins()
        return True

    def _say_first(self) -> None:
        """Log the first snapshot of the attempt, on rank 0, once it is committed."""
        if (first := self.writing.committed) is None:
            return
        self._has_said_first = True
        text = (
            "first snapshot: step {step}, {size}, training blocked for {blocked_ms:.1f} ms. It is in memory of this"
            " host and is uploaded to {about}. Interval: {interval}"
        )
        blocked_ms, size = 1000 * (self.pacing.blocked_each_s or self.pacing.stall_s), format_bytes(first.nbytes)
        facts: dict[str, Any] = {"step": first.step, "size": size, "interval": self.pacing.interval}
        say(logging.INFO, "first-snapshot", text, about=self.location.url, blocked_ms=blocked_ms, **facts)

    def _lease_ahead(self) -> None:
        if (attempt := self.writing.attempt) is not None and self.pacing.next_within(self._trainer, AHEAD_S):
            attempt.writer.next_comes()

    def _drain_s(self) -> float:
        attempt = self.writing.attempt
        return attempt.drain_s() if attempt is not None else 0.0

    def _decide(self) -> dict[str, Any] | None:
        """See :meth:`Coordinator.decide`."""
        how = self.writing.decide()
        return how.plain() if how is not None else None

    def _take(self, how: Decision, *, before_validation: bool = False) -> None:
        """Begin a snapshot on every rank."""
        trainer, writing = self._trainer, self.writing
        is_fenced = trainer.is_global_zero and writing.attempt is not None and writing.attempt.fenced
        if not is_fenced:  # else none is, and it is not for want of a slot
            self.pacing.taken(trainer.global_step)
        with self.pacing.stalling():
            dump = self._state(before_validation=before_validation, at_end=how.complete)
            wait_s = WAIT_FOR_SLOT_S if self.settings.on_full == "wait" or how.complete else 0.0
            writing.write(dump, how, wait_s=wait_s)

    # -- the state of this rank -----------------------------------------------------------------------------------

    def _state(self, *, before_validation: bool, at_end: bool = False) -> Dump | SpotError:
        """The state of this rank as it is now; or why it cannot be had, which costs a snapshot.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        try:
            return FitState.of(self._trainer).dump(before_validation=before_validation, at_end=at_end)
        except Exception as error:
            # Where ranks wait for each other in their optimizers' states, the others do not wait for what comes next.
            if self.settings.ring.strict or (self._trainer.world_size > 1 and self.writing.hold_their_own):
                raise
            return failure_of(error)

    def newest_state(self, seam: StepBoundary) -> Dump | None:
        """The newest state that a run can resume from exactly: in the middle of a validation, the one before it."""
        if seam is StepBoundary.SANITY_CHECK:
            return None
        if seam is StepBoundary.VALIDATION:
            kept, self._kept_state = self._kept_state, None
            return kept if kept is not None and kept.is_unchanged else None
        dump = self._state(before_validation=seam is StepBoundary.BEFORE_VALIDATION)
        if isinstance(dump, SpotError):
            text = "no snapshot of step {step}: {error}"
            say(logging.WARNING, "no-urgent-snapshot", text, step=self._trainer.global_step, error=dump)
            return None
        return dump

    def _keep(self) -> Dump:
        return FitState.of(self._trainer).dump(before_validation=True).kept()

    def validated(self) -> None:
        """A validation is over: let the state go that was kept for the time of it."""
        self._kept_state = None
        if not self._trainer.sanity_checking:
            self.pacing.validated()

    # -- end ------------------------------------------------------------------------------------------------------

    def report(self, figures: Figures) -> None:
        """Tell the local server what was measured; without one, nobody asks. Any thread may call it."""
        host = attempt.writer.host if (attempt := self.writing.attempt) is not None else None
        if host is not None:
            with contextlib.suppress(SpotError):  # whoever takes the next snapshot finds that it is lost
                host.report(figures)

    def close(self) -> None:
        """Listen no more. A second call does nothing."""
        self._patches.close()

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Bring what is committed to safety and let the ring go. A second call does nothing.

        Args:
            wait_s: how long at most, seconds.
            complete: whether the run is at its end.

        Returns:
            whether the snapshot of the end was seen in storage; ``None`` if none was to be taken.
        """
        writing, run = self.writing, partial(self.best_effort.run, THE_END, otherwise=None, still=STILL_ENDS)
        durable: list[bool | None] = []
        with ExitStack() as ends:  # from the last one on, whatever fails in one
            ends.callback(lambda: durable.append(writing.finish(wait_s, complete=complete)))
            ends.callback(run, writing.let_go)
            ends.callback(run, self.close)
        if not self._has_said_first:  # a short run
            run(self._say_first)
        return durable[0]


def _is_of(trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> bool:
    """Whether Lightning was given an optimizer, or one that is made of it, as ``ZeroRedundancyOptimizer``."""
    return any(own is optimizer or any(part is optimizer for part in vars(own).values()) for own in trainer.optimizers)
