"""An urgent snapshot: the newest state from which a run can go on exactly, taken if it can be safe in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spot.capture.attempt import Attempt
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.seams import Seam
from lightning_spot.interval.deadline import Deadline

if TYPE_CHECKING:
    import lightning.pytorch as pl


class UrgentSnapshot:
    """Takes one, and knows by when everything has to be safe.

    Attributes:
        is_expected: whether somebody watches for notices: the state in front of a validation is kept at hand then.
        deadline: by when all has to be safe; ``None`` while nothing stops the run.
    """

    def __init__(self) -> None:
        self.is_expected = False
        self.deadline: Deadline | None = None
        self._held: Dump | None = None

    def clear(self) -> None:
        """Forget what an earlier ``fit`` left."""
        self.is_expected, self.deadline, self._held = False, None, None

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Keep the state at hand: in the middle of a validation there is none to go on from."""
        if self.is_expected:
            self._held = FitState.of(trainer).dump(before_validation=True)

    def after_validation(self) -> None:
        """Let the state go that was kept for the time of the validation."""
        self._held = None

    def secure(
        self,
        trainer: pl.Trainer,
        seam: Seam,
        attempt: Attempt | None,
        write: Callable[[Dump, float], None],
        cut_short: Callable[[], bool],
        *,
        is_taken: bool,
    ) -> str:
        """Bring the training state to safety before :attr:`deadline`. Every rank calls it, at the same place.

        Args:
            trainer: that is about to stop.
            seam: where it is.
            attempt: that writes snapshots; ``None`` on other ranks than the first.
            write: takes a snapshot, within seconds.
            cut_short: asked while waiting: whether to give up waiting at once.
            is_taken: whether a snapshot of this step has begun already.

        Returns:
            one line on what is safe where, on rank 0; empty on the others.
        """
        deadline = self.deadline
        assert deadline is not None
        dump = None if is_taken else self._dump(trainer, seam)
        plan = attempt.safety.plan(deadline) if attempt is not None else None
        take = trainer.strategy.broadcast(plan is not None and plan.take)
        if dump is not None and take:
            write(dump, deadline.left_s)
        if attempt is None or plan is None:
            return ""
        return attempt.safety.bring(deadline, plan, cut_short)

    def _dump(self, trainer: pl.Trainer, seam: Seam) -> Dump | None:
        """The newest state that a run can resume from exactly."""
        if seam is Seam.SANITY_CHECK:
            return None
        if seam is Seam.VALIDATION:
            held, self._held = self._held, None
            return held if held is not None and held.is_unchanged else None
        return FitState.of(trainer).dump(before_validation=seam is Seam.BEFORE_VALIDATION)
