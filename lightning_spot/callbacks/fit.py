"""What the callbacks of one ``fit`` share: who they are, what was found at the tiers, when a resume is decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.callbacks import earlier
from lightning_spot.callbacks.part import Part
from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.exact import private
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import PerTrainer
from lightning_spot.exact.resumable import Trial
from lightning_spot.exact.shipped import is_tuned
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey, look_again, survey

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")
C = TypeVar("C")


class Fit(PerTrainer):
    """Shared by our callbacks in one trainer, whether :class:`SpotCheckpoint` holds them or the user lists them.

    Attributes:
        snapshots: what the tiers held of the run when this ``fit`` began, newest first; on rank 0.
        restore_s: seconds that finding and reading the snapshot took that this ``fit`` goes on from; 0 without.
        trusts: whether this ``fit`` loads objects of any class (``weights_only=False``).
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.trusts = False
        self.restore_s = 0.0
        self.snapshots: list[Manifest] = []
        self._found: Survey | None = None
        self._then: list[Callable[[], None]] = []

    def parts(self, kind: type[C]) -> list[C]:
        """Our callbacks of one kind."""
        found = [part for item in self._trainer.callbacks for part in getattr(item, "parts", (item,))]  # type: ignore[attr-defined]
        return [part for part in found if isinstance(part, kind)]

    @property
    def resumes(self) -> bool:
        """Whether one of them resumes the run, if this Lightning lets it."""
        able = FitState.of(self._trainer).can(private.RESUME)
        return able and any(part.resumes for part in self.parts(Part))

    def place_of(self, named: Location) -> Location:
        """Where the run of this ``fit`` is: a second one in this process has a run of its own, if runs are resumed."""
        return earlier.place_of(named) if self.resumes else named

    def survey(self, location: Location) -> Survey:
        """Ask all tiers; what was found is kept for :meth:`found`. On rank 0."""
        self._found = survey(location)
        self.snapshots = [manifest for manifest, _ in self._found.candidates]
        return self._found

    def found(self, location: Location) -> Survey:
        """What is there now; what another callback has found at nodes at this start is kept. On rank 0."""
        found, self._found = self._found, None
        if found is None or found.location != location:
            return survey(location)
        return look_again(found) if found.durable is not None else found

    def after_decision(self, action: Callable[[], None]) -> None:
        """Have ``action`` called when it is decided what to resume from, on every rank."""
        self._then.append(action)

    def decided(self) -> None:
        """It is decided: do what waited for it."""
        while self._then:
            self._then.pop(0)()

    def trial(self) -> Trial:
        """Finds out whether the snapshots of this ``fit`` can be resumed from."""
        return Trial(self._trainer, lambda: self.trusts)

    def clear(self) -> None:
        """Forget what an earlier ``fit`` left."""
        self.trusts = False
        self.restore_s = 0.0
        self.snapshots, self._found = [], None
        self._then.clear()


def on_rank_zero(trainer: pl.Trainer, find: Callable[[], T]) -> T | None:
    """Run ``find`` on rank 0; an error there is raised on every rank, so that none waits for ever.

    Returns:
        what it found on rank 0, ``None`` on the others.
    """
    found: T | None = None
    error: SpotError | None = None
    if trainer.is_global_zero:
        try:
            found = find()
        except SpotError as problem:
            error = problem
    if (shared := trainer.strategy.broadcast(str(error) if error is not None else None)) is not None:
        raise error if error is not None else SpotError(shared)
    return found


def _refuse_sharded(trainer: pl.Trainer) -> None:
    """Sharded strategies write their checkpoints themselves, in pieces that one rank cannot gather."""
    sharded = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if found := names.intersection(sharded):
        raise SettingsError(
            f"{found.pop()} is not supported yet: snapshots work on a single device and with DDP. Use Lightning's"
            " ModelCheckpoint with this strategy"
        )


def say_end(location: Location, step: int, *, durable: bool) -> None:
    """Say that a run has ended, and where its last snapshot is: of what was seen there only."""
    if durable:
        rank_zero_info(
            f"lightning_spot: run {location.name!r} is complete at step {step}; its last snapshot is in {location.url}"
        )
    else:
        rank_zero_warn(
            f"lightning_spot: run {location.name!r} has ended at step {step}, but its last snapshot was not seen in"
            f" {location.url}: see the warnings above for the reason"
        )


def after_train_end(trainer: pl.Trainer, action: Callable[[], None]) -> Callable[[], None]:
    """Have ``action`` called once training has ended, also for the module, whose own hook follows those of callbacks.

    Returns:
        takes that back.
    """
    strategy = trainer.strategy
    original = strategy.on_train_end  # the last that Lightning calls then

    def undo() -> None:
        vars(strategy).pop("on_train_end", None)

    def on_train_end() -> None:
        undo()
        original()
        action()

    strategy.on_train_end = on_train_end  # type: ignore[method-assign] # taken back
    return undo


def is_kept(trainer: pl.Trainer, stage: str | None) -> bool:
    """Whether a stage is a training whose state is to be kept."""
    return stage == "fit" and not getattr(trainer, "fast_dev_run", False) and not is_tuned(trainer)


def takes_part(trainer: pl.Trainer, stage: str) -> bool:
    """Whether a ``setup`` is that of a training whose state is to be kept.

    Raises:
        SettingsError: if it is, and its strategy is a sharded one.
    """
    if not is_kept(trainer, stage):
        return False
    _refuse_sharded(trainer)
    return True


def move_to_the_end(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Have a callback's hooks called after those of all others, which may change weights in theirs.

    Lightning keeps the end of its list for ``ModelCheckpoint`` and its kin. It goes on in the old list meanwhile.
    """
    present = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    if any(item is callback for item in present):
        trainer.callbacks = [*(item for item in present if item is not callback), callback]  # type: ignore[attr-defined]
