"""AutoResume: restores the newest good snapshot of a run from any tier when ``fit`` begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from lightning_spot.callbacks.fit_callback import FitCallback
from lightning_spot.config import check_choice
from lightning_spot.renamed import refusing_old
from lightning_spot.run.location import Location
from lightning_spot.session.preflight import takes_part
from lightning_spot.session.resume import Resume
from lightning_spot.session.selection import OnResumeFailure, ResumedFrom
from lightning_spot.session.session import FitSession
from lightning_spot.state.dataloader import DATA_RESUMES, DataResume
from lightning_spot.state.fit_state import FitState

if TYPE_CHECKING:
    import lightning.pytorch as pl


class AutoResume(FitCallback):
    """Restores the newest snapshot whose checksums hold, from whichever tier has it.

    Nothing is restored when the user passes ``ckpt_path`` to ``fit``: that always wins. When every tier has answered
    and none has a snapshot, training starts afresh, which is said once. When storage cannot be read, or there
    are snapshots and none can be used, ``fit`` raises: a resume that could not read is no fresh start.

    :class:`~lightning_spot.SpotCheckpoint` documents the arguments.

    Raises:
        SettingsError: if an argument cannot be used.

    Example::

        trainer = L.Trainer(callbacks=[AutoResume("s3://bucket/run-1", servers="spot://10.0.0.5:7070")])
    """

    resumes = True

    @refusing_old
    def __init__(
        self,
        dirpath: str,
        *,
        servers: str | Sequence[str] | None = None,
        local_server: bool = True,
        run_name: str | None = None,
        data_resume: DataResume = "auto",
        on_resume_failure: OnResumeFailure = "error",
    ) -> None:
        super().__init__()
        check_choice("data_resume", data_resume, DATA_RESUMES)
        self.data_resume: DataResume = data_resume
        check_choice("on_resume_failure", on_resume_failure, get_args(OnResumeFailure))
        self.on_resume_failure = on_resume_failure
        self.location = self._named = Location.of(
            dirpath, servers=servers, local_server=local_server, run_name=run_name
        )
        self._resume: Resume | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location.url!r})"

    def of_a_fit(self) -> dict[str, Any]:
        """See :class:`~lightning_spot.state.namespaces.Copied`."""
        return {"_resume": None}

    @property
    def resumed_from(self) -> ResumedFrom | None:
        """What was restored in the last ``fit``, or ``None``."""
        return self._resume.chosen if self._resume is not None else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Put the choice where Lightning looks for a checkpoint to resume from."""
        if stage == "fit":
            self._resume = None
        if not takes_part(trainer, stage):
            return
        fit = FitSession.of(trainer)
        fit.begin()  # first: what one rank refuses, all do
        FitState.of(trainer).data_resume = self.data_resume
        self._resume = fit.resume
        fit.resume.on_failure = self.on_resume_failure
        self.location = fit.resume.take_over(self._named)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where the run goes on; there is something to train."""
        fit = FitSession.of(trainer)
        fit.resume.say_where()
        if (chosen := fit.resume.chosen) is not None:
            message = f"training continues from {chosen.tier}, {chosen.name}"
            fit.emit("resumed", message, snapshot=chosen.name, tier=chosen.tier, exact=chosen.exact)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say so when the run had ended already: Lightning trains nothing then, without a word."""
        super().on_fit_end(trainer, pl_module)
        FitState.of(trainer).end_untrained()
        FitSession.of(trainer).resume.say_if_complete()
