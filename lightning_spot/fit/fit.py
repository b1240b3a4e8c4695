"""What our callbacks share in one trainer: its resume, its exit, and those who take its snapshots."""

from __future__ import annotations

import os
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
    _pid: int

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

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, whose end is not that of the ``fit``."""
        return os.getpid() != self._pid

    def callbacks(self, kind: type[C]) -> list[C]:
        """Our callbacks of one kind, also those that another one is composed of."""
        return [part for part in parts_of(self._trainer) if isinstance(part, kind)]

    def _renew(self) -> None:
        trainer = self._trainer
        self._has_begun, self._pid = False, os.getpid()
        self.snapshotters = []
        self.resume = Resume(trainer)
        self.exit = Exit(trainer, self.resume, self.snapshotters)
