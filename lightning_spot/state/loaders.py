"""The loaders of a trainer's ``fit``: followed from where Lightning asks for them, and asked for again as they were.

``train_dataloader()`` of a resumed run is called in another epoch, and after other numbers were drawn, than it was at
first; with ``reload_dataloaders_every_n_epochs`` Lightning would also count from there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_spot.patches import Patches
from lightning_spot.state import compat
from lightning_spot.state.dataloader import FollowedLoader, Follower, Positioned, follower_of, loader_itself
from lightning_spot.state.randomness import State, capture_random, restore_random

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_spot.state.fit_state import FitState


class Loaders:
    """The loaders of one fit; none where they are not followed, as in one that takes no snapshots.

    Args:
        fit: whose they are.
    """

    def __init__(self, fit: FitState) -> None:
        self._fit = fit
        self._requests: dict[str, State] = {}
        self._due: dict[str, State] = {}
        self._states: list[State | None] = []
        self._has_begun = False
        self._patches = Patches()

    @property
    def _trainer(self) -> pl.Trainer:
        return self._fit.trainer

    def follow(self) -> None:
        """Follow each loader for training or validation that Lightning asks for from now on."""
        compat.PROCESS_DATALOADER.wrap(self._patches, self._trainer.strategy, partial(partial, self._followed))

    def _followed(self, process: Callable[[object], object], loader: object) -> object:
        processed, fit, trainer = process(loader), self._fit, self._trainer
        if trainer.state.stage == "train":
            if fit.has_positions():  # given to loaders once these know their epoch: Lightning gives them before that
                compat.LOADER_STATES.set(trainer.fit_loop, [])
            return FollowedLoader(Positioned(processed, fit.position_for, fit.before_step, fit.data_resume))
        if trainer.state.stage in ("validate", "sanity_check"):
            return FollowedLoader(Follower(processed, self._before_validation))
        return processed

    def end(self) -> None:
        """Let the trainer go, and give it its loaders back: a ``CombinedLoader`` of the user's holds them, too."""
        self._patches.close()
        with suppress(AttributeError, ValueError):  # another Lightning may keep them elsewhere
            for loop in (self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop):
                _give_back(compat.COMBINED_LOADER.of(loop))

    @property
    def training(self) -> list[Positioned]:
        """Followers of the loaders that training draws from by now."""
        return [each for each in _followers(self._trainer.fit_loop) if isinstance(each, Positioned)]

    @property
    def validation(self) -> list[Follower]:
        """Followers of the loaders that validation draws from by now."""
        return _followers(self._trainer.fit_loop.epoch_loop.val_loop)

    # -- requests -------------------------------------------------------------------------------------------------

    def follow_requests(self) -> None:
        """Note the epoch and the random numbers with which Lightning asks for loaders."""
        fit_loop = self._trainer.fit_loop
        for name, loop in (("training", fit_loop), ("validation", fit_loop.epoch_loop.val_loop)):
            self._follow(name, loop)

    def _follow(self, name: str, loop: Any) -> None:
        def dataloader(original: Callable[[], Any]) -> Any:
            saved = self._due.pop(name, None)
            if saved is None or (self._has_begun and self._is_reload_due(saved)):
                self._requests[name] = self._request()
                if name == "validation":
                    self._states = []
                with self._fit.once.paused():
                    return original()
            if name == "validation":
                compat.LAST_VAL_RELOAD.set(loop, saved["reloaded"])
            return self._as_it_was(saved, original)

        compat.REQUEST_LOADER.wrap(self._patches, loop, partial(partial, dataloader))

    def _request(self) -> State:
        return {"epoch": self._trainer.current_epoch, "random": capture_random(), "data": self._data_state()}

    def _data_state(self) -> State:
        data = self._trainer.datamodule  # type: ignore[attr-defined] # Lightning's Trainer has it
        try:
            return dict(data.state_dict()) if data is not None else {}
        except Exception:  # it may be about loaders that are not made yet
            return {}

    def _set_data_state(self, state: State) -> None:
        if state:
            with suppress(Exception):
                self._trainer.datamodule.load_state_dict(dict(state))  # type: ignore[attr-defined]

    def _is_reload_due(self, saved: State) -> bool:
        every = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        return bool(every) and self._trainer.current_epoch - saved["reloaded"] >= every

    def _as_it_was(self, saved: State, request: Callable[[], Any]) -> Any:
        """Ask in the epoch, with the random numbers and the state of the data module, of the first time."""
        present = self._request()
        progress = compat.EPOCH_PROGRESS.of(self._trainer.fit_loop).current
        restore_random(saved["random"])
        progress.completed, epoch = saved["epoch"], progress.completed  # it is trainer.current_epoch
        self._set_data_state(saved["data"])
        try:
            return request()
        finally:
            progress.completed = epoch
            restore_random(present["random"])
            self._set_data_state(present["data"])

    # -- capture and resume -----------------------------------------------------------------------------------------

    def capture(self) -> State:
        """What is not a position: requests, loaders for validation, which of several loaders has ended once.

        That last is all of them where the epoch has no batches left: Lightning asks for one more if it goes on there,
        and one that had not ended would begin again for that. In the next epoch, none has ended.
        """
        fit_loop, val_loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.val_loop
        reloaded = {"training": compat.LAST_RELOAD.of(fit_loop), "validation": compat.LAST_VAL_RELOAD.of(val_loop)}
        consumed = getattr(_iterator(self._trainer), "_consumed", None)
        if consumed is not None and self._epoch_done:
            consumed = [True] * len(consumed)
        return {
            "requests": {
                name: request if name in self._due else {**request, "reloaded": reloaded[name]}
                for name, request in self._requests.items()
            },
            "validation": [follower.state() for follower in self.validation] or list(self._states),
            "consumed": list(consumed) if consumed is not None else None,
        }

    @property
    def _epoch_done(self) -> bool:
        """Whether the epoch has no batches left."""
        return bool(compat.NO_MORE_BATCHES.of(self._trainer.fit_loop.epoch_loop)())

    def positions(self, *, at_end: bool) -> list[State | None]:
        """Where each training loader is, see :meth:`Positioned.position`."""
        ahead, done = len(getattr(compat.DATA_FETCHER.of(self._trainer.fit_loop), "batches", ())), self._epoch_done
        return [each.position(ahead, epoch_done=done, at_end=at_end) for each in self.training]

    def ask_again(self) -> None:
        """Have Lightning ask for training loaders when training begins, also if it did before the checkpoint came.

        It does for ``estimated_stepping_batches``, which may be read in ``setup`` or, where a strategy loads after it,
        in ``configure_optimizers``. What it was given has begun at the start of an epoch.
        """
        fit_loop = self._trainer.fit_loop
        if (combined := compat.COMBINED_LOADER.of(fit_loop)) is None:
            return
        if (fetcher := compat.DATA_FETCHER.of(fit_loop)) is not None:
            fetcher.teardown()  # workers end
        _give_back(combined)
        compat.COMBINED_LOADER.set(fit_loop, None)

    def resume(self, saved: State) -> None:
        """Before loaders are asked for: ask as it was done when :meth:`capture` was called."""
        self._requests, self._due = dict(saved["requests"]), dict(saved["requests"])

    def restore(self, saved: State) -> None:
        """When training begins: count epochs from where loaders were asked for, and know which has ended."""
        self._has_begun = True
        for follower in self.training:
            follower.restore_own(begins=True)
        request = saved["requests"].get("training")
        if request is not None:
            compat.LAST_RELOAD.set(self._trainer.fit_loop, request["reloaded"])
        consumed = getattr(_iterator(self._trainer), "_consumed", None)
        if consumed is not None and saved["consumed"] is not None and len(consumed) == len(saved["consumed"]):
            consumed[:] = saved["consumed"]

    def go_on(self, saved: State) -> None:
        """Just before the step: set what loaders draw from of their own."""
        for training in self.training:
            training.restore_own(begins=False)
        if "validation" not in saved["requests"] and not self._trainer.validating:
            # Where an epoch that is resumed ends with a validation, Lightning asks before the epoch: the undisturbed
            # run asks when the validation begins, after other numbers were drawn.
            compat.VAL_COMBINED_LOADER.set(self._trainer.fit_loop.epoch_loop.val_loop, None)
            self._requests.pop("validation", None)
        self._states = list(saved["validation"])
        for follower in self.validation:
            self._before_validation(follower)

    def _before_validation(self, follower: Follower) -> None:
        """Set the own state of a loader for validation, once: it may be made long after training went on."""
        number = next((number for number, each in enumerate(self.validation) if each is follower), len(self._states))
        if number < len(self._states) and (state := self._states[number]) is not None:
            self._states[number] = None
            follower.restore(state, {id(item) for each in self.training for _, item in each.own.items()})


def _followers(loop: Any) -> list[Follower]:
    combined = getattr(loop, compat.COMBINED_LOADER.name, None)
    loaders = combined.flattened if combined is not None else []
    return [follower for loader in loaders if (follower := follower_of(loader)) is not None]


def _give_back(combined: Any) -> None:
    """Leave its own loaders to a ``CombinedLoader``, which may be the user's."""
    if combined is not None:
        combined.flattened = [loader_itself(loader) for loader in combined.flattened]


def _iterator(trainer: pl.Trainer) -> Any:
    return getattr(compat.COMBINED_LOADER.of(trainer.fit_loop), "_iterator", None)
