"""Between a trainer and an interval policy: measures what it decides from, and has all ranks agree with rank 0."""

from __future__ import annotations

import contextlib
import difflib
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.config import format_count, format_seconds
from lightning_spot.exact.logged_values import last_value, last_values
from lightning_spot.exact.private import writes_of
from lightning_spot.fit.harmless import Harmless
from lightning_spot.fit.word import Word
from lightning_spot.interval.costs import Costs, FailureRate, RobustMean, TierPace
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.run.identity import starts_between
from lightning_spot.staging.device import Cuda, Device

if TYPE_CHECKING:
    import lightning.pytorch as pl

Tiers = tuple[TierPace, ...]

LEARN_EVERY_S = 5.0
_MOST_STEPS_APART = 10_000
_UNSEEN_STEPS = 100  # within which a metric of steps was logged
_RETRY_S = 0.5

READ_EVERY_S = 0.1
_MOST_ARRIVING = 64  # so many readings a host may be ahead of its GPU; where it is further, some are left out

Reading = tuple[int, float]
"""A step, and the value around it."""


class Pacing:
    """Says at each seam of one ``fit`` whether all ranks take a snapshot.

    Of several ranks, rank 0 decides, one step ahead, and says so: what it has said is there when training comes to the
    next seam, and nobody waits for it. Where all ranks know by the step when one is due, it does so in the step before.
    Else it speaks at agreed steps only, and names the next one each time, half of the way to where a snapshot will be
    due. So there are some words between two snapshots, and none in most steps.

    Args:
        policy: that decides.
        harmless: runs what training can do without.

    Attributes:
        policy: that decides.
        stall_s: seconds that training has waited for snapshots.
        passed_over: snapshots that were due and never begun, since there was no slot for them yet; on rank 0.
    """

    def __init__(self, policy: IntervalPolicy, harmless: Harmless | None = None) -> None:
        self.policy = policy
        self._harmless = harmless or Harmless()
        self.stall_s = 0.0
        self.passed_over, self._is_refused = 0, False
        self._rate = FailureRate()
        self._stall, self._stalled_s = RobustMean(), -1.0
        self._readings = Readings()
        self._attempt = 0
        self._total_steps: float | None = None
        self._next_talk = 0
        self._seen_step, self._seen_s, self._stride = 0, 0.0, 1
        self._laps_s = (0.0, 0.0)
        """What a step has taken, the last two times; with whatever came between them."""
        self._begun = (0, 0.0)
        self._learned_s = -LEARN_EVERY_S
        self._ran_until_s = 0.0
        self._warned, self._has_validated = False, False
        self._taken_s = 0.0
        self._said_budget = False

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
        self._seen_step, self._seen_s, self._word = trainer.global_step, now_s, Word(trainer)
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
        self._learned_s = -LEARN_EVERY_S

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
            reading = self._readings.read_at_times(lambda: last_value(trainer, monitor), trainer.global_step)
            is_late = trainer.global_step == self._begun[0] + _UNSEEN_STEPS and not trainer.enable_validation
            if self._has_validated or is_late:  # an epoch may take days
                self._has_validated = False
                self._check_monitor(trainer, monitor)
        if reading is not None:
            self.policy.progress(*reading)

    def validated(self) -> None:
        """A validation of the training is over: what is logged in one is known when the next batch is."""
        self._has_validated = True

    def check_monitor(self, trainer: pl.Trainer, epochs: int) -> None:
        """Say once, after so many epochs, that the monitored metric is not logged."""
        monitor = self.policy.monitor
        if monitor and epochs >= (trainer.check_val_every_n_epoch or 1):  # else the first validation is yet to come
            self._check_monitor(trainer, monitor)

    def _check_monitor(self, trainer: pl.Trainer, monitor: str) -> None:
        logged = {} if self._warned else last_values(trainer)
        if self._warned or monitor in logged:
            return
        self._warned = True
        near = difflib.get_close_matches(monitor, logged, 1)
        rank_zero_warn(
            f"lightning_spot: monitor={monitor!r} is not logged so far, and until it is, snapshots are taken as Young"
            f" and Daly would.{f' Is {near[0]!r} meant?' if near else ''} Logged are:"
            f" {', '.join(sorted(logged)) or 'none'}"
        )

    # -- the decision ---------------------------------------------------------------------------------------------

    def taken(self, step: int) -> None:
        """A snapshot of ``step`` was begun, on every rank."""
        if self._is_refused:
            self._count_passed_over(step)
        self._taken_s = time.monotonic()
        self.policy.taken(step, self._taken_s)
        self._stalled_s = 0.0

    def due(self, trainer: pl.Trainer, can_begin: Callable[[], str], tiers: Callable[[], Tiers]) -> str:
        """Whether all ranks take a snapshot now, and how: on all of them, what ``can_begin`` says on rank 0.

        Args:
            trainer: that is at a seam after an optimizer step.
            can_begin: whether there is a slot for it, and how it is taken; ``""`` if not. Asked on rank 0.
            tiers: how fast each tier takes snapshots; asked on rank 0, now and then.

        Returns:
            ``""`` if none is taken.
        """
        step, now_s = trainer.global_step, time.monotonic()
        self._note_step(step, now_s)
        if trainer.is_global_zero:  # here, since the step after a snapshot has waited for the rest of it by now
            self._harmless.run("learning what snapshots cost", partial(self._learn, now_s, tiers), None)
        if trainer.world_size == 1:
            return self._decide(step, now_s, can_begin)
        if self.policy.by_step:
            if not self.policy.due(step, now_s):
                return ""
            if not self._word.is_under_way:  # the first one, or training has made larger steps than before
                self._say(trainer, step, now_s, can_begin)
        elif not self._word.is_under_way:
            return ""
        how, self._next_talk = self._word.hear()
        if how is None:  # something was in its way, which may be over by now
            self._say(trainer, step, now_s, can_begin)
            how, self._next_talk = self._word.hear()
        return str(how)

    def look_ahead(self, trainer: pl.Trainer, can_begin: Callable[[], str]) -> None:
        """Have rank 0 say what all ranks do at the next seam. Called at the end of each, if there are several ranks.

        Args:
            trainer: see :meth:`due`.
            can_begin: likewise.
        """
        if trainer.world_size == 1 or self._word.is_under_way:
            return
        step, now_s = trainer.global_step, time.monotonic()
        if self.policy.due(step + self._stride, now_s) if self.policy.by_step else step >= self._next_talk:
            # A validation, or what the first step compiles, makes one step long, and all of them on the average.
            self._say(trainer, step + self._stride, now_s + self._stride * min(self._laps_s), can_begin)

    def next_within(self, trainer: pl.Trainer, most_s: float, *, seams: int = 1) -> bool:
        """Whether a snapshot is due at one of the next seams, and that comes in time; known of intervals in steps only.

        Args:
            trainer: that is at a seam, on rank 0.
            most_s: what counts as in time, seconds.
            seams: how many are looked at.
        """
        if not self.policy.by_step:
            return False
        now_s, lap_s = time.monotonic(), self._stride * max(self._laps_s)
        return any(
            number * lap_s < most_s
            and self.policy.due(trainer.global_step + number * self._stride, now_s)
            and now_s + number * lap_s - self._taken_s >= self.policy.shortest_s()
            for number in range(1, seams + 1)
        )

    def _note_step(self, step: int, now_s: float) -> None:
        if (steps := step - self._seen_step) > 0:
            self._laps_s = (self._laps_s[1], (now_s - self._seen_s) / steps)
        self._stride, self._seen_step, self._seen_s = max(self._stride, steps), step, now_s

    def _say(self, trainer: pl.Trainer, step: int, at_s: float, can_begin: Callable[[], str]) -> None:
        """Have rank 0 say how a snapshot is taken at ``step``, to which training comes at ``at_s``."""
        word: tuple[str | None, int] = ("", 0)
        if trainer.is_global_zero:
            was_refused = self._is_refused
            how: str | None = self._decide(step, at_s, can_begin)
            if self._is_refused and not was_refused and step > trainer.global_step:
                how = None  # what is in its way may be over when it is due: all ask once more then, and wait for that
            word = (how, 0 if self.policy.by_step else trainer.global_step + self._apart(trainer.global_step))
        self._word.say(word)

    def _decide(self, step: int, at_s: float, can_begin: Callable[[], str]) -> str:
        """How a snapshot is taken at a step, ``""`` if none is; on rank 0, for whose word the others wait."""
        return self._harmless.run("deciding on a snapshot", partial(self._decision, step, at_s, can_begin), "")

    def _decision(self, step: int, at_s: float, can_begin: Callable[[], str]) -> str:
        if not self.policy.due(step, at_s) or (self.policy.by_step and not self._affords(at_s)):
            return ""
        how = can_begin()
        self._is_refused = self._is_refused or (self.policy.by_step and not how)
        return how

    def _count_passed_over(self, step: int) -> None:
        """Some snapshots could not begin when they were due: count those that never will, and say so once."""
        self._is_refused = False
        count = self.policy.passed_over(step)
        if count and not self.passed_over:
            rank_zero_info(
                f"lightning_spot: skipped {format_count(count, 'snapshot')} due before that of step {step}: there was"
                ' no slot yet (on_full="wait" waits instead)'
            )
        self.passed_over += count

    def _affords(self, now_s: float) -> bool:
        """Whether a snapshot that is due by its step is within the budget for waiting."""
        shortest_s = self.policy.shortest_s()
        if now_s - self._taken_s >= shortest_s:
            return True
        self._say_budget(shortest_s)
        return False

    def _say_budget(self, shortest_s: float) -> None:
        if not self._said_budget:
            self._said_budget = True
            rank_zero_info(
                f"lightning_spot: training waits {1000 * (self._stall.value or 0.0):.1f} ms for a snapshot: the"
                f" interval grows to {format_seconds(shortest_s)}, for max_overhead, and follows what is measured"
            )

    @property
    def blocked_each_s(self) -> float:
        """Seconds that training waits for one snapshot, as far as is known."""
        return self._stall.value or 0.0

    def _learn_stall(self) -> bool:
        """Note what the last snapshot has cost; whether there is something new."""
        if self._stalled_s < 0:
            return False
        self._stall.add(self._stalled_s)  # the optimizer step after it has waited for the rest of the copy
        self._stalled_s = -1.0
        return True

    def _learn(self, now_s: float, tiers: Callable[[], Tiers]) -> None:
        """Tell the policy what was measured, every few seconds, and when a snapshot has shown what it costs."""
        if self._learn_stall():
            self._learned_s = -LEARN_EVERY_S
            if self.policy.by_step and (stall_s := self._stall.value) is not None:
                self.policy.learn(Costs(stall_s=stall_s, mtbf_s=self._rate.mtbf_s))
        if self.policy.by_step or now_s - self._learned_s < LEARN_EVERY_S:
            return
        self._rate.ran(now_s - self._ran_until_s)
        self._learned_s = self._ran_until_s = now_s
        stall_s = self._stall.value
        if stall_s is not None:
            costs = Costs(stall_s=stall_s, mtbf_s=self._rate.mtbf_s, tiers=tiers(), total_steps=self._total_steps)
            self.policy.learn(costs)
            if 0 < self.policy.wanted_s(self._begun[0]) < (shortest_s := self.policy.shortest_s()):
                self._say_budget(shortest_s)

    def _apart(self, step: int) -> int:
        """Steps until rank 0 speaks again: half of the way to where a snapshot is due.

        As fast as steps were so far, or as slow as they have become.
        """
        now_s = time.monotonic()
        step_s = max(self._step_s(step, now_s), *self._laps_s)
        if not step_s:
            return 1
        wait_s = self.policy.wait_s(step, now_s)
        wait_s = wait_s / 2 if wait_s > 0 else _RETRY_S  # due, but there is no slot yet
        return max(1, min(_MOST_STEPS_APART, int(wait_s / step_s)))

    def _step_s(self, step: int, now_s: float) -> float:
        """Seconds that a step takes, 0 before there was any."""
        steps = step - self._begun[0]
        return max((now_s - self._begun[1]) / steps, 1e-9) if steps > 0 else 0.0


class Readings:
    """Means of the training loss over short times, or the values of a logged metric.

    On a GPU a value stays there, and its copy to the host is looked at when it has arrived: some steps later.

    Args:
        device: calls the GPUs.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = device if device is not None else Cuda()
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._read_s = time.monotonic()
        self._value: float | None = None
        self._arriving: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._sent: tuple[torch.Tensor, int] | None = None

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
        mean, self._sum, count, self._count = self._sum, None, self._count, 0
        mean = mean.double() / count
        if not _is_on_gpu(mean):
            return step, float(mean)
        arrived = self._arrived()
        self._send(mean, step)
        return arrived

    def read_at_times(self, read: Callable[[], torch.Tensor | float | None], step: int) -> Reading | None:
        """A logged metric, looked at as often as the loss; a value that was read before is no new reading."""
        if not self._is_time():
            return None
        value = read()
        if not isinstance(value, torch.Tensor) or not _is_on_gpu(value):
            return self._new(None if value is None else (step, float(value)))
        arrived = self._arrived()
        if self._sent is None or self._sent[0] is not value or self._sent[1] != writes_of(value):
            self._sent = value, writes_of(value)
            self._send(value, step)
        return self._new(arrived)

    def _is_time(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._read_s < READ_EVERY_S:
            return False
        self._read_s = now_s
        return True

    def _send(self, value: torch.Tensor, step: int) -> None:
        if len(self._arriving) < _MOST_ARRIVING:
            self._arriving.append((step, *self._device.to_host(value.detach())))

    def _arrived(self) -> Reading | None:
        """The next one of those that were sent, if it is there."""
        if not self._arriving or not self._device.is_over(self._arriving[0][2]):
            return None
        step, host, _ = self._arriving.popleft()
        return step, float(host)

    def _new(self, reading: Reading | None) -> Reading | None:
        if reading is None or reading[1] == self._value:
            return None
        self._value = reading[1]
        return reading


def _is_on_gpu(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"
