"""Callbacks that Lightning ships, where their ``state_dict`` is not all that a resume in mid-epoch needs.

Each has a function that captures and one that puts back; ``fit_state`` lists them. Read from Lightning 2.6.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fsspec
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.state import buffers, compat, logged_values, namespaces
from lightning_spot.store.fsspec_client import forget_listings

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]


def _callbacks(trainer: pl.Trainer, *names: str) -> Iterator[tuple[str, Any]]:
    """Callbacks of these kinds, each with a name that another attempt finds again."""
    kinds = namespaces.classes("callbacks", *names)
    seen: dict[str, int] = {}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    for callback in callbacks:
        if isinstance(callback, kinds):
            number = seen[callback.state_key] = seen.get(callback.state_key, 0) + 1
            yield f"{callback.state_key}#{number}", callback


# -- ModelCheckpoint: its state_dict is saved in full and loaded in part --------------------------------------------

_OF_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def capture_checkpoints(trainer: pl.Trainer) -> State:
    """What its ``state_dict`` has and does not load."""
    saved: State = {}
    for key, callback in _callbacks(trainer, "ModelCheckpoint"):
        score = callback.current_score
        saved[key] = {name: getattr(callback, name) for name in _OF_CHECKPOINTS if hasattr(callback, name)}
        saved[key]["current_score"] = score.detach().clone() if isinstance(score, torch.Tensor) else score
    return saved


def restore_checkpoints(trainer: pl.Trainer, saved: State) -> None:
    """Put that back."""
    for key, callback in _callbacks(trainer, "ModelCheckpoint"):
        for name, value in saved.get(key, {}).items():
            setattr(callback, name, value)


# -- metrics of callbacks, and buffers of averaged models that no checkpoint holds ----------------------------------


def _callback_modules(trainer: pl.Trainer) -> Iterator[tuple[str, nn.Module]]:
    for key, callback in _callbacks(trainer, "Callback"):
        for name, value in list(vars(callback).items()):
            if logged_values.is_metric(value) or isinstance(value, AveragedModel):
                yield f"{key}.{name}", value


def capture_modules(trainer: pl.Trainer) -> State:
    """States of metrics, and buffers that no checkpoint has, by the names of their attributes."""
    saved: State = {}
    for key, module in _callback_modules(trainer):
        metrics, lacking = {}, {}
        if logged_values.is_metric(module):
            metrics = logged_values.metrics_of(module.named_modules())
        else:
            kept = set(module.state_dict(keep_vars=True))
            lacking = {name: each.detach().clone() for name, each in module.named_buffers() if name not in kept}
        saved[key] = {"metrics": metrics, "buffers": lacking}
    return saved


def restore_modules(trainer: pl.Trainer, saved: State) -> None:
    """Put those back."""
    for key, module in _callback_modules(trainer):
        values = saved.get(key, {"metrics": {}, "buffers": {}})
        logged_values.restore_metrics(module.named_modules(), values["metrics"])
        buffers.Buffers().restore(module, values["buffers"])


def further_epochs(trainer: pl.Trainer) -> int:
    """How many epochs more than ``max_epochs`` there may be: one in which BatchNorm is updated, once ``fit`` starts."""
    return sum(1 for _ in _callbacks(trainer, "StochasticWeightAveraging"))


# -- the tuners: what they found is kept, and they do not look for it again ------------------------------------------


def tuners(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """The callbacks that try something before training begins, each with a name that another attempt finds again."""
    return _callbacks(trainer, "BatchSizeFinder", "LearningRateFinder")


def capture_found(trainer: pl.Trainer) -> State:
    """The values that the tuners have given to attributes."""
    parsing = namespaces.of(trainer, "utilities.parsing")
    saved: State = {}
    for key, callback in tuners(trainer):
        for name in _tuned(callback):
            if parsing.lightning_hasattr(trainer.lightning_module, name):
                saved.setdefault(key, {})[name] = parsing.lightning_getattr(trainer.lightning_module, name)
    return saved


def _tuned(callback: Any) -> list[str]:
    if isinstance(callback, namespaces.classes("callbacks", "BatchSizeFinder")):
        return [compat.BATCH_SIZE_NAME.of(callback)]
    return [compat.RATE_NAME.of(callback)] if compat.RATE_NAME.of(callback) else ["lr", "learning_rate"]


def rest_tuners(trainer: pl.Trainer, saved: State, patches: Patches) -> None:
    """Before a resumed fit starts: give it what its tuners found, and have them not look for it again."""
    for key, callback in tuners(trainer):
        for name, value in (saved or {}).get(key, {}).items():
            namespaces.of(trainer, "utilities.parsing").lightning_setattr(trainer.lightning_module, name, value)
        # Its trial would end with Lightning's own restore, and that would forget what is to be resumed.
        patches.wrap(callback, "on_fit_start", lambda _: lambda *_: None)


def before_loading(trainer: pl.Trainer, checkpoint: State) -> None:
    """Change in a checkpoint what a callback of Lightning cannot load, or would not. Every rank calls it."""
    states: State = checkpoint.get("callbacks", {})
    for _, callback in _callbacks(trainer, "SpikeDetection"):
        if not hasattr(callback, "running"):  # its load_state_dict of Lightning 2.6 asks for that, and raises
            states.pop(callback.state_key, None)
    for _, callback in _callbacks(trainer, "ModelCheckpoint"):
        saved = states.get(callback.state_key)
        if saved and callback.monitor is not None and saved.get("dirpath", callback.dirpath) != callback.dirpath:
            _keep_best(trainer, callback, saved)


def _keep_best(trainer: pl.Trainer, callback: Any, saved: State) -> None:
    """Have a ``ModelCheckpoint`` with another folder know the best models of the one before, if these are there.

    Lightning knows the best path only, and none of the scores: whatever comes next is the best.
    """
    known = [saved.get("best_model_path"), saved.get("last_model_path"), *saved.get("best_k_models", ())]
    paths = [path for path in dict.fromkeys(known) if path]
    there = trainer.strategy.broadcast([path for path in paths if _exists(path)])  # other hosts may not see it
    if not paths:
        return
    if saved.get("best_model_path") not in there:
        text = (
            "the best model of ModelCheckpoint in {about} is gone. It counts again from here on, in {now}."
            " Give it a dirpath that stays."
        )
        say(logging.WARNING, "best-model-gone", text, about=saved["dirpath"], only_rank_zero=True, now=callback.dirpath)
        saved["best_model_path"] = ""
        return
    best = {path: score for path, score in saved.get("best_k_models", {}).items() if path in there}
    worst = (min if callback.mode == "max" else max)(best, key=best.__getitem__, default="")
    saved.update(
        dirpath=callback.dirpath,
        best_k_models=best,
        kth_best_model_path=worst,
        kth_value=best.get(worst, saved.get("kth_value")),
    )
    if saved.get("last_model_path") not in there:
        saved["last_model_path"] = ""


def _exists(path: str) -> bool:
    forget_listings(path)
    files, inside = fsspec.core.url_to_fs(path)
    return bool(files.exists(inside))


def what_begins_anew(trainer: pl.Trainer) -> Iterator[str]:
    """One sentence for each callback that cannot go on where it was."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    has_begun = epochs.ready > epochs.processed  # else the first epoch that averages may be the one to come
    averaging = (callback for _, callback in _callbacks(trainer, "StochasticWeightAveraging"))
    if any(callback.swa_start < trainer.current_epoch + has_begun for callback in averaging):
        yield (
            "StochasticWeightAveraging: Lightning sets its learning rate, and updates BatchNorm, only where an epoch"
            " begins: the rest of this one goes on without that"
        )
    if any(True for _ in _callbacks(trainer, "ThroughputMonitor")):
        yield "ThroughputMonitor measures this attempt only: its totals begin at 0 after a resume"


def what_never_comes_back(trainer: pl.Trainer) -> Iterator[str]:
    """One sentence for each thing that comes when the clock says, and each callback that a resume cannot bring back."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval by time: validations come when the clock says, not where they came before"
    if any(getattr(callback, "_train_time_interval", None) for _, callback in _callbacks(trainer, "ModelCheckpoint")):
        yield "ModelCheckpoint(train_time_interval=): it saves when the clock says, not where it saved before"

    if any(True for _ in _callbacks(trainer, "ModelPruning")):
        yield (
            "ModelPruning: a resume has the weights as they were pruned, and neither the masks nor the weights behind"
            " them; with make_pruning_permanent=False it cannot load them at all"
        )
    if any(True for _ in _callbacks(trainer, "SpikeDetection")):
        yield "SpikeDetection: what it compares a loss with, and the batches that it has found, begin anew in a resume"


def is_tuned(trainer: pl.Trainer) -> bool:
    """Whether this ``fit`` is no training but a call of ``Tuner(trainer)``, which ends before its first step."""
    return any(getattr(callback, compat.ENDS_EARLY.name, False) for _, callback in tuners(trainer))


def is_of_a_tuner(trainer: pl.Trainer) -> bool:
    """Whether the checkpoint that is being loaded is what a tuner saved before its trial."""
    return os.path.basename(str(trainer.ckpt_path)).startswith((".lr_find_", ".scale_batch_size_"))


def why_without_exact_state(trainer: pl.Trainer) -> str:
    """What to say of a checkpoint that a fit goes on from, and that holds no exact state."""
    path = trainer.ckpt_path
    for _, callback in _callbacks(trainer, "OnExceptionCheckpoint"):
        if path is not None and str(callback.ckpt_path) == str(path):
            return (
                f"OnExceptionCheckpoint: Lightning goes on from its {path}, which was written in the middle of a step,"
                " and not from the newest snapshot: this is not exact. Remove the file or the callback"
            )
    return (
        f"{path} holds what Lightning saves and no more: the position in the data, random numbers and running means are"
        " not restored"
    )
