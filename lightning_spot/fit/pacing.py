"""Between a trainer and an interval policy: measures what it decides from, and has all ranks agree with rank 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.config import format_seconds
from lightning_spot.exact.logged_values import last_value
from lightning_spot.fit.readings import LossReadings
from lightning_spot.interval.costs import Costs, FailureRate, RobustMean, TierPace
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.run.identity import JUMP

if TYPE_CHECKING:
    import lightning.pytorch as pl

Tiers = tuple[TierPace, ...]

LEARN_EVERY_S = 5.0
_MOST_STEPS_APART = 10_000
_RETRY_S = 0.5


class Pacing:
    """Says at each seam of one ``fit`` whether all ranks take a snapshot.

    Under DDP, rank 0 decides, and ranks talk at agreed steps only: each time rank 0 names the next one, half of the
    way to where a snapshot will be due. So there are some broadcasts between two snapshots, and none in most steps.

    Args:
        policy: that decides.

    Attributes:
        policy: that decides.
        stall_s: seconds that training has waited for snapshots.
        passed_over: snapshots that were due and never begun, since there was no slot for them yet; on rank 0.
    """

    def __init__(self, policy: IntervalPolicy) -> None:
        self.policy = policy
        self.stall_s = 0.0
        self.passed_over, self._is_refused = 0, False
        self._rate = FailureRate()
        self._stall, self._stalled_s = RobustMean(), -1.0
        self._readings = LossReadings()
        self._attempt = 0
        self._total_steps: float | None = None
        self._next_talk = 0
        self._begun = (0, 0.0)
        self._learned_s = -LEARN_EVERY_S
        self._ran_until_s = 0.0
        self._warned = False
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
        self._rate = FailureRate(nodes=trainer.num_nodes)
        total = float(trainer.estimated_stepping_batches)
        self._total_steps = total if 0 < total < float("inf") else None
        if saved is not None:
            self._rate.load_state_dict(saved["rate"])
            self._rate.failed(starts_between(saved["attempt"], attempt))
            self._stall.load_state_dict(saved["stall"])
            if saved["policy"] == type(self.policy).__name__:
                self.policy.load_state_dict(saved["state"])
        self._begun = (trainer.global_step, now_s)
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
        if reading is not None:
            self.policy.progress(*reading)

    def check_monitor(self, trainer: pl.Trainer, epochs: int) -> None:
        """Say once, after so many epochs, that the monitored metric is not logged."""
        monitor = self.policy.monitor
        if not monitor or self._warned or last_value(trainer, monitor) is not None:
            return
        if epochs < (trainer.check_val_every_n_epoch or 1):
            return  # the first validation is yet to come
        self._warned = True
        rank_zero_warn(
            f"lightning_spot: monitor={monitor!r} is not logged, so snapshots are taken as Young and Daly would. Logged"
            f" are: {', '.join(sorted(trainer.callback_metrics)) or 'none'}"
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
        if self.policy.by_step:
            if not self.policy.due(step, now_s):
                return ""
            begins = trainer.is_global_zero and self._affords(now_s)
            how = can_begin() if begins else ""
            self._is_refused = self._is_refused or (begins and not how)
            agreed: str = _agree(trainer, how)
            return agreed
        alone = trainer.world_size == 1
        if trainer.is_global_zero:
            self._learn(now_s, tiers)
            due = self.policy.due(step, now_s)
        if alone:
            return can_begin() if due else ""
        if step < self._next_talk:
            return ""
        decision = ("", 1)
        if trainer.is_global_zero:
            decision = (can_begin() if due else "", self._apart(step, now_s))
        agreed, apart = _agree(trainer, decision)
        self._next_talk = step + apart
        said: str = agreed
        return said

    def _count_passed_over(self, step: int) -> None:
        """Some snapshots could not begin when they were due: count those that never will, and say so once."""
        self._is_refused = False
        count = self.policy.passed_over(step)
        if count and not self.passed_over:
            rank_zero_info(
                f"lightning_spot: {count} snapshots that were due before that of step {step} are skipped: there was no"
                ' slot for them yet (on_full="wait" waits instead)'
            )
        self.passed_over += count

    def _affords(self, now_s: float) -> bool:
        """Whether a snapshot that is due by its step is within the budget for waiting."""
        if self._learn_stall() and (stall_s := self._stall.value) is not None:
            self.policy.learn(Costs(stall_s=stall_s, mtbf_s=self._rate.mtbf_s))
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
        if now_s - self._learned_s < LEARN_EVERY_S:
            return
        self._rate.ran(now_s - self._ran_until_s)
        self._learned_s = self._ran_until_s = now_s
        stall_s = self._stall.value
        if stall_s is not None:
            costs = Costs(stall_s=stall_s, mtbf_s=self._rate.mtbf_s, tiers=tiers(), total_steps=self._total_steps)
            self.policy.learn(costs)
            if 0 < self.policy.wanted_s(self._begun[0]) < (shortest_s := self.policy.shortest_s()):
                self._say_budget(shortest_s)

    def _apart(self, step: int, now_s: float) -> int:
        """Steps until ranks talk again: half of what is left until a snapshot is due, as fast as steps were so far."""
        steps = step - self._begun[0]
        if steps <= 0:
            return 1
        step_s = max((now_s - self._begun[1]) / steps, 1e-9)
        wait_s = self.policy.wait_s(step, now_s)
        wait_s = wait_s / 2 if wait_s > 0 else _RETRY_S  # due, but there is no slot yet
        return max(1, min(_MOST_STEPS_APART, int(wait_s / step_s)))


def _agree(trainer: pl.Trainer, of_rank_zero: Any) -> Any:
    return trainer.strategy.broadcast(of_rank_zero) if trainer.world_size > 1 else of_rank_zero


def starts_between(earlier: int, attempt: int) -> int:
    """How often a run was started after attempt ``earlier``, ``attempt`` included.

    Each start takes the next number, or one far above what was seen where the durable tier could not be read.
    """
    jumps, steps = divmod(max(0, attempt - earlier), JUMP)
    return jumps + steps
