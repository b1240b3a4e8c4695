"""Tells the copying where training is in its iteration, from Lightning's hooks and the gradients of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spot.capture.tensors import overwritten
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.staging.device import DeviceClock
from lightning_spot.staging.modes import Partitions
from lightning_spot.staging.schedule import BUCKET_BYTES, GradientWatch, Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Iterations(OfTrainer):
    """The iterations of one ``fit``, on the rank that writes.

    Args:
        trainer: that fits.
        partitions: how copying is spread over an iteration.

    Attributes:
        schedule: that is told.
    """

    def __init__(self, trainer: pl.Trainer, partitions: Partitions) -> None:
        super().__init__(trainer)
        self.schedule = Schedule(partitions)
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
