"""The state of this rank that a snapshot is taken of: as it is now, or as it was in front of a validation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_spot.capture.unforeseen import failure_of
from lightning_spot.errors import SpotError
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.seams import Seam
from lightning_spot.fit.harmless import Harmless
from lightning_spot.fit.together import Together

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


class AtHand(OfTrainer):
    """The state at hand.

    Args:
        trainer: whose state it is.
        together: writes snapshots with other ranks.
        harmless: runs what training can do without.
        strict: whether an error is raised that would only cost a snapshot.

    Attributes:
        keeps: whether the state in front of a validation is kept, for a stop in the middle.
    """

    def __init__(self, trainer: pl.Trainer, together: Together, harmless: Harmless, *, strict: bool) -> None:
        super().__init__(trainer)
        self.keeps = False
        self._together, self._harmless, self._strict = together, harmless, strict
        self._kept: Dump | None = None

    def state(self, *, before_validation: bool, at_end: bool = False) -> Dump | SpotError:
        """The state of this rank; or why it cannot be had, which costs a snapshot.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        try:
            return FitState.of(self._trainer).dump(before_validation=before_validation, at_end=at_end)
        except Exception as error:
            # Where ranks wait for each other in their optimizers' states, the others do not wait for what comes next.
            if self._strict or (self._trainer.world_size > 1 and self._together.hold_their_own):
                raise
            return failure_of(error)

    def newest(self, seam: Seam) -> Dump | None:
        """The newest state that a run can resume from exactly: in the middle of a validation, the one before it."""
        if seam is Seam.SANITY_CHECK:
            return None
        if seam is Seam.VALIDATION:
            kept, self._kept = self._kept, None
            return kept if kept is not None and kept.is_unchanged else None
        dump = self.state(before_validation=seam is Seam.BEFORE_VALIDATION)
        if isinstance(dump, SpotError):
            logger.warning("lightning_spot: no snapshot of step %d: %s", self._trainer.global_step, dump)
            return None
        return dump

    def before_validation(self) -> None:
        """Keep the state for the time of the validation, if it may be needed."""
        if self.keeps:
            self._kept = self._harmless.run("keeping the state in front of a validation", self._keep, None)

    def after_validation(self) -> None:
        """Let go what was kept."""
        self._kept = None

    def _keep(self) -> Dump:
        return FitState.of(self._trainer).dump(before_validation=True).kept()
