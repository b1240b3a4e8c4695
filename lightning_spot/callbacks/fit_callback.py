"""What our callbacks have in common: with any of them in the trainer, a resume is exact and an exit is orderly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_spot.session.session import FitSession
from lightning_spot.state.fit_state import FitState
from lightning_spot.state.namespaces import SpotCallback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class FitCallback(SpotCallback):
    """A callback that keeps the exact state; :class:`SpotCheckpoint` is made of several, and each works alone.

    Attributes:
        resumes: whether it resumes runs.
        writes: whether it writes to where the run is.
    """

    resumes = False
    writes = False

    def in_common(self) -> dict[str, Any]:
        """Of what it was told: what must be the same on all ranks, by the names of its arguments."""
        return {}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on exactly where the checkpoint was taken, also if the user named it in ``fit(ckpt_path=)``."""
        if trainer.state.fn == "fit":
            FitSession.of(trainer).resume.load(checkpoint)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Return when everything committed is durable, within the time allowed."""
        FitSession.of(trainer).complete()

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A resumed run makes no sanity check: what it changes is to be kept."""
        FitState.of(trainer).once.begins()

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What follows happens in a resumed run, too."""
        FitState.of(trainer).once.ends()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Bring what is committed to safety, and let the trainer go."""
        FitSession.of(trainer).end(exception)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the trainer go, if nothing did before."""
        FitSession.of(trainer).end()


def move_to_the_end(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Have a callback's hooks called after those of all others, which may change weights in theirs.

    Lightning keeps the end of its list for ``ModelCheckpoint`` and its kin. It goes on in the old list meanwhile.
    """
    present = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    if any(item is callback for item in present):
        trainer.callbacks = [*(item for item in present if item is not callback), callback]  # type: ignore[attr-defined]
