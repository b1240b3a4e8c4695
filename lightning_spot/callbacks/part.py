"""What our callbacks have in common: with any of them in the trainer, a resume is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.namespaces import SpotCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Part(SpotCallback):
    """A callback that keeps the exact state; :class:`SpotCheckpoint` is made of several, and each works alone.

    Attributes:
        resumes: whether it resumes runs.
    """

    resumes = False

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on exactly where the checkpoint was taken, also if the user named it in ``fit(ckpt_path=)``."""
        if trainer.state.fn == "fit":
            FitState.of(trainer).load(checkpoint)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Let the trainer's loaders and loops go."""
        FitState.of(trainer).detach()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the trainer's loaders and loops go."""
        FitState.of(trainer).detach()
