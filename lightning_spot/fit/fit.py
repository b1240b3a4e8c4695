"""What our callbacks share in one trainer: its resume, its exit, and those who take its snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import PerTrainer
from lightning_spot.fit.alike import check_alike
from lightning_spot.fit.exit import Exit
from lightning_spot.fit.resume import Resume
from lightning_spot.fit.snapshotter import Snapshotter
from lightning_spot.fit.taking_part import parts_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

C = TypeVar("C")


class Fit(PerTrainer):
    """One ``fit``, whether :class:`SpotCheckpoint` holds our callbacks or the user lists them.

    Attributes:
        resume: what it goes on from.
        exit: how it ends.
        snapshotters: those who take its snapshots, one for each :class:`RemoteSnapshot`.
    """

    resume: Resume
    exit: Exit
    snapshotters: list[Snapshotter]
    _has_begun: bool

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._renew()

    def begin(self) -> None:
        """Follow the training, from ``setup`` on. A second call does nothing. Every rank calls it.

        Raises:
            SettingsError: if ranks differ.
        """
        if not self._has_begun:
            check_alike(self._trainer)
            self._has_begun = True
        FitState.of(self._trainer).attach()

    def end(self) -> None:
        """Let the trainer's loaders and loops go. A second call does nothing."""
        FitState.of(self._trainer).detach()
        self.resume.let_go()
        self._renew()

    def leave(self) -> None:
        """See :meth:`PerTrainer.leave`."""
        for snapshotter in self.snapshotters:
            snapshotter.close()
            snapshotter.writing.attempt = None

    def callbacks(self, kind: type[C]) -> list[C]:
        """Our callbacks of one kind, also those that another one is composed of."""
        return [part for part in parts_of(self._trainer) if isinstance(part, kind)]

    def _renew(self) -> None:
        trainer = self._trainer
        self._has_begun = False
        self.snapshotters = []
        self.resume = Resume(trainer)
        self.exit = Exit(trainer, self.resume, self.snapshotters)
