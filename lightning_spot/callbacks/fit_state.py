"""What Lightning leaves out of a checkpoint and an exact resume needs: captured on every rank, put back in its place.

Generators, the position in the data, metric states, means of ``self.log(on_epoch=True)``, logged values, buffers that
are in no ``state_dict``, gradients in mid-accumulation. Read from Lightning 2.5 and 2.6; ``tests/test_exact.py`` guards
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.callbacks import logged_values, loggers
from lightning_spot.callbacks.gradient_order import GradientOrder
from lightning_spot.callbacks.per_trainer import PerTrainer
from lightning_spot.callbacks.seams import Seams
from lightning_spot.capture.tensors import storage_address, tensors_in
from lightning_spot.recovery.position import PositionedLoader, Rewind, position_of, restore_owners, why_not_exact
from lightning_spot.recovery.randomness import State, capture_random, restore_random

KEY = "lightning_spot"
"""Key of the exact state in a checkpoint."""

VERSION = 1


class FitState(PerTrainer):
    """The exact state of one trainer's ``fit``, on this rank. One for each trainer: see :meth:`of`."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._undo: list[Callable[[], None]] = []
        self._steady: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._order = GradientOrder()
        self._saved: State | None = None
        self._random: State | None = None
        self._values: State | None = None
        self._val_total: dict[str, int] | None = None
        self._loaded = False
        self._begun = False
        self.rewind: Rewind = "auto"

    def attach(self) -> None:
        """Follow the training loaders, from ``setup`` on. A second call does nothing."""
        if self._undo:
            return
        strategy = self._trainer.strategy
        original = strategy.process_dataloader

        def process_dataloader(loader: object) -> object:
            processed = original(loader)
            if self._trainer.state.stage != RunningStage.TRAINING:
                return processed
            return PositionedLoader(processed, self._position_for, self._restore_step, self.rewind)

        strategy.process_dataloader = process_dataloader  # type: ignore[method-assign,assignment] # taken back in detach
        self._undo.append(lambda: strategy.__dict__.pop("process_dataloader", None))
        seams = Seams.of(self._trainer)
        seams.add(self)
        self._undo.append(lambda: seams.remove(self))

    def detach(self) -> None:
        """Let the trainer go. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._saved = self._random = self._values = self._val_total = None
        self._loaded = self._begun = False
        self._steady.clear()
        self._changed.clear()
        self._order.end()
        self._order = GradientOrder()

    def begin(self) -> None:
        """When training begins: note which buffers are as they were made, and need not be saved. Once for each fit."""
        if self._begun:
            return
        self._begun = True
        self._steady = {name: _mark(buffer) for name, buffer in self._trainer.lightning_module.named_buffers()}
        values = self._values
        self._order.begin(self._trainer, values["gradient_order"] if values is not None else [])
        if values is not None and values["should_stop"] and self._val_total is None:
            # Maybe not one more batch is fetched: what would wait for that is put back now.
            restore_random(values["random"], self._trainer.strategy.root_device)
            self.go_on()

    # -- capture --------------------------------------------------------------------------------------------------

    def dump(self, *, before_validation: bool = False, at_end: bool = False) -> Dump:
        """The whole state of this step.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        self._order.stepped(self._trainer)
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(False)
        total = _mark_before_validation(checkpoint) if before_validation else None
        return Dump(
            checkpoint=checkpoint,
            state=self.capture(at_end=at_end),
            validation_progress=total,
            versions=_versions(checkpoint),
            loggers=loggers.places_of(self._trainer, before_validation=before_validation, at_end=at_end),
        )

    def capture(self, *, at_end: bool = False) -> State:
        """The state of this rank, as values of its own that load with ``weights_only=True``.

        Args:
            at_end: whether the run has come to its end, outside any epoch.
        """
        trainer = self._trainer
        module = trainer.lightning_module
        loaders, ahead = _training_loaders(trainer), _fetched_ahead(trainer)
        done = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        return {
            "random": capture_random(trainer.strategy.root_device),
            "loaders": [position_of(loader, ahead, epoch_done=done, at_end=at_end) for loader in loaders],
            "buffers": self._buffers(module),
            "gradients": _gradients(trainer) if self._has_live_gradients() and not at_end else {},
            "gradient_order": self._order.saved(),
            "should_stop": trainer.should_stop,
            "scores": [_score(callback) for callback in _model_checkpoints(trainer)],
            **logged_values.capture(trainer),
        }

    def _buffers(self, module: pl.LightningModule) -> State:
        """Buffers that the checkpoint lacks: non-persistent ones that changed, and all others of ranks but the first.

        (Statistics of BatchNorm differ from rank to rank, and torch does not count their changes.)
        """
        buffers = dict(module.named_buffers())
        in_checkpoint = set(module.state_dict(keep_vars=True)) & set(buffers)
        self._changed |= {name for name in buffers if self._steady.get(name) != _mark(buffers[name])}
        lacking = self._changed - in_checkpoint
        if not self._trainer.is_global_zero:
            lacking |= in_checkpoint
        return {name: buffers[name].detach().clone() for name in sorted(lacking) if name in buffers}

    def _has_live_gradients(self) -> bool:
        """Whether the next step may build on gradients: in mid-accumulation, or where only the user knows."""
        loop = self._trainer.fit_loop.epoch_loop
        return not self._trainer.lightning_module.automatic_optimization or loop._should_accumulate()

    # -- resume ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the exact state of a checkpoint, if it has one; it is put back when training reaches its place."""
        shared = checkpoint.get(KEY)
        if shared is None or self._loaded:
            return
        self._loaded = True
        trainer = self._trainer
        loggers.continue_in(trainer, shared["loggers"])
        if shared["version"] != VERSION or shared["world_size"] != trainer.world_size:
            rank_zero_warn(
                f"lightning_spot: the snapshot was taken by {shared['world_size']} ranks, {trainer.world_size} go on:"
                " weights, optimizers and loops are restored; random numbers and the position in the data are not exact"
            )
            return
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is")
        self._saved = self._values = shared["ranks"][trainer.global_rank]
        self._random = self._saved["random"]
        self._val_total = shared["validation_progress"]

    def _position_for(self, loader: PositionedLoader) -> State | None:
        """Position at which ``loader`` begins its epoch: the saved one for the first epoch after a resume."""
        loaders = _training_loaders(self._trainer)
        index = next((number for number, item in enumerate(loaders) if item is loader), None)
        if index is None or self._saved is None or self._random is None:
            return None
        positions = self._saved["loaders"]
        if len(positions) != len(loaders):
            rank_zero_warn("lightning_spot: the number of training loaders has changed: their positions are not exact")
            return None
        return positions[index]  # type: ignore[no-any-return]

    def _restore_step(self) -> bool:
        if self._val_total is not None:
            return False  # a validation comes first, see before_validation
        return self._go_on_with_random()

    def _go_on_with_random(self) -> bool:
        """Also set the generators of the process and of the device; whether there was anything to set them to."""
        random, self._random = self._random, None
        self.go_on()
        if random is not None:
            restore_random(random, self._trainer.strategy.root_device)
        return random is not None

    def go_on(self) -> None:
        """Put back what belongs to the step, just before the next one begins. A second call does nothing."""
        values, self._values = self._values, None
        if values is None:
            return
        trainer = self._trainer
        module = trainer.lightning_module
        logged_values.restore(trainer, values)
        for loader in _training_loaders(trainer):
            restore_owners(loader)
        trainer.should_stop = values["should_stop"]
        for callback, (score, step) in zip(_model_checkpoints(trainer), values["scores"], strict=False):
            callback.current_score, callback._last_global_step_saved = score, step  # saved by Lightning, not loaded
        buffers, parameters = dict(module.named_buffers()), dict(module.named_parameters())
        with torch.no_grad():
            for name, saved in values["buffers"].items():
                if name in buffers and buffers[name].shape == saved.shape:
                    buffers[name].copy_(saved)
                    self._changed.add(name)
            for name, saved in values["gradients"].items():
                if name in parameters:
                    parameters[name].grad = saved.to(parameters[name].device)
        # Lightning leaves metric-driven schedulers alone at the end of an epoch it was restarted in: it does not have
        # the metrics. Here they are.
        trainer.fit_loop._restarting = False

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Of a run resumed in front of a validation: that validation draws the numbers it would have drawn."""
        total, self._val_total = self._val_total, None
        if total is None:
            return
        self._go_on_with_random()
        # The mark that made Lightning come here (see _mark_before_validation) is not part of the count.
        trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.load_state_dict(total)

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Of a run whose loaders could not be positioned: what else was saved is put back after its first batch."""
        self.go_on()
        self._order.stepped(trainer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Lightning's checkpoint of a step with the exact state of this rank; its tensors are still those of training.

    Attributes:
        checkpoint: of Lightning, the same on all ranks as far as rank 0's counts.
        state: of this rank.
        validation_progress: count of validation batches, if a validation follows the step; else ``None``.
        versions: torch's counts of the writes to the checkpoint's tensors.
        loggers: where each logger is, on rank 0.
    """

    checkpoint: dict[str, Any]
    state: State
    validation_progress: dict[str, int] | None
    versions: list[int]
    loggers: list[dict[str, Any]]

    @property
    def is_unchanged(self) -> bool:
        """Whether no tensor was written to meanwhile, as weight averaging does around a validation."""
        return self.versions == _versions(self.checkpoint)

    def gathered(self, trainer: pl.Trainer) -> dict[str, Any]:
        """The checkpoint with the states of all ranks, on rank 0. Every rank calls this at the same place."""
        self.checkpoint[KEY] = {
            "version": VERSION,
            "world_size": trainer.world_size,
            "validation_progress": self.validation_progress,
            "loggers": self.loggers,
            "ranks": _gather(trainer, self.state),
        }
        return self.checkpoint


def _versions(checkpoint: dict[str, Any]) -> list[int]:
    parts = (value for key, value in checkpoint.items() if key != KEY)
    return [tensor._version for part in parts for tensor in tensors_in(part)]


def _gather(trainer: pl.Trainer, state: State) -> list[State]:
    if trainer.world_size == 1:
        return [state]
    states: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(state, states)
    return states if states is not None else []


def _mark_before_validation(checkpoint: dict[str, Any]) -> dict[str, int]:
    """Make a checkpoint taken in front of a validation look as if that had begun: Lightning then runs it on resume.

    Returns:
        the count of validation batches that the mark replaced.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    total: dict[str, int] = dict(progress["total"])
    done = total["completed"]
    progress["total"] = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    progress["current"] = dict.fromkeys(("ready", "started", "processed", "completed"), 0)
    return total


def say_what_is_not_exact(trainer: pl.Trainer) -> None:
    """One warning for each training loader whose position cannot be restored exactly."""
    for reason in dict.fromkeys(filter(None, map(why_not_exact, _training_loaders(trainer)))):
        rank_zero_warn(f"lightning_spot: {reason}")


def _training_loaders(trainer: pl.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return list(combined.flattened) if combined is not None else []


def _fetched_ahead(trainer: pl.Trainer) -> int:
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _score(callback: ModelCheckpoint) -> tuple[torch.Tensor | None, int]:
    score = callback.current_score
    return score.detach().clone() if score is not None else None, callback._last_global_step_saved


def _gradients(trainer: pl.Trainer) -> State:
    named = trainer.lightning_module.named_parameters()
    return {name: parameter.grad.detach().clone() for name, parameter in named if parameter.grad is not None}


def _mark(buffer: torch.Tensor) -> tuple[int, int]:
    return storage_address(buffer), buffer._version
