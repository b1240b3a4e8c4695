"""What Lightning leaves out of a checkpoint and an exact resume needs: captured on every rank, put back in its place.

Generators, the position in the data, metric states, means of ``self.log(on_epoch=True)``, logged values, buffers that
are in no ``state_dict``, gradients in mid-accumulation, what hooks and callbacks changed. Read from Lightning 2.5 and
2.6; ``tests/test_exact.py`` and ``tests/test_exact_table.py`` guard it. A part that fails, since Lightning has changed,
is turned off with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.capture.tensors import storage_address
from lightning_spot.exact import logged_values, loggers, private, progress, pruned, shipped
from lightning_spot.exact.changed_values import ChangedValues
from lightning_spot.exact.checkpoint import checkpoint_of, checkpoint_through_save, leave_out_callbacks
from lightning_spot.exact.dump import KEY, VERSION, Dump, versions_of
from lightning_spot.exact.gradient_order import GradientOrder
from lightning_spot.exact.loaders import Loaders
from lightning_spot.exact.per_trainer import PerTrainer
from lightning_spot.exact.position import PositionedLoader, Rewind, why_not_exact
from lightning_spot.exact.randomness import State, capture_random, restore_random
from lightning_spot.exact.seams import Seams, is_tuning

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")


class FitState(PerTrainer):
    """The exact state of one trainer's ``fit``, on this rank. One for each trainer: see :meth:`of`."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._undo: list[Callable[[], object]] = []
        self._steady: dict[str, tuple[int, int]] = {}
        self._changed: set[str] = set()
        self._order = GradientOrder()
        self._hooked = ChangedValues()
        self._loaders: Loaders | None = None
        self._off: set[str] = set()
        self._callbacks: list[pl.Callback] = []
        self._saved: State | None = None
        self._random: State | None = None
        self._values: State | None = None
        self._val_total: dict[str, int] | None = None
        self._precise: dict[str, torch.Tensor] = {}
        self._loaded = False
        self._begun = False
        self._left_out = False
        self.rewind: Rewind = "auto"

    def attach(self) -> None:
        """Follow the training loaders, from ``setup`` on. A second call does nothing."""
        if self._undo:
            return
        for part, reason in private.problems(self._trainer).items():
            self._turn_off(part, reason)
        self._try(private.LOADERS, self._follow_loaders)
        self._callbacks = list(self._trainer.callbacks)  # type: ignore[attr-defined] # Lightning's Trainer has it
        self._begin_after_hooks()
        seams = Seams.of(self._trainer)
        seams.is_on = self.can(private.SEAMS)
        seams.add(self)
        self._undo.append(lambda: seams.remove(self))

    def _follow_loaders(self) -> None:
        loaders = Loaders(self._trainer, self._position_for, self._restore_step, lambda: self.rewind)
        self._undo.append(loaders.end)
        self._loaders = loaders
        self._try(private.REQUESTS, loaders.follow_requests)

    def can(self, part: str) -> bool:
        """Whether a part of :mod:`~lightning_spot.exact.private` can do its work; from :meth:`attach` on."""
        return part not in self._off

    def detach(self) -> None:
        """Let the trainer go. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._saved = self._random = self._values = self._val_total = None
        self._precise = {}
        self._loaded = self._begun = self._left_out = False
        self._steady.clear()
        self._changed.clear()
        self._order.end()
        self._order, self._hooked = GradientOrder(), ChangedValues()
        self._off.clear()
        self._loaders = None

    def _begin_after_hooks(self) -> None:
        """Have :meth:`_begin` called after ``on_train_start`` of all callbacks and of the module: they run anew."""
        strategy = self._trainer.strategy
        original = strategy.on_train_start

        def on_train_start() -> None:
            original()
            if not is_tuning(self._trainer, self._callbacks):
                self._begin()

        strategy.on_train_start = on_train_start  # type: ignore[method-assign] # taken back in detach
        self._undo.append(lambda: strategy.__dict__.pop("on_train_start", None))

    def _begin(self) -> None:
        """When training begins: give it what no later place would, and note how everything is. Once for each fit."""
        if self._begun:
            return
        self._begun = True
        trainer, values = self._trainer, self._values
        if values is not None:
            self._try(private.PRUNING, lambda: pruned.restore(trainer, values["pruned"] or {}))
        self._try(private.HOOKED, lambda: self._hooked.begin(trainer))
        if values is not None:
            if values["around_loaders"] is not None:
                self._try(private.LOADERS, lambda: self._followed.restore(values["around_loaders"]))
            _put(trainer.lightning_module, self._precise)
            for key, part in shipped.PARTS.items():
                if key in values["shipped"]:
                    self._try(part.what, lambda part=part, key=key: part.restore(trainer, values["shipped"][key]))  # type: ignore[misc]
            if values["hooked"] is not None:
                self._try(private.HOOKED, lambda: self._hooked.restore(trainer, values["hooked"]))
        self._steady = {name: _mark(buffer) for name, buffer in trainer.lightning_module.named_buffers()}
        order = values["gradient_order"] if values is not None else None
        self._try(private.BUCKETS, lambda: self._order.begin(trainer, order or []))
        loaders = self._loaders.training if self._loaders is not None else []
        say_what_is_not_exact(trainer, loaders, resumed=values is not None)
        if values is not None and values["should_stop"] and self._val_total is None:
            # Maybe not one more batch is fetched: what would wait for that is put back now.
            restore_random(values["random"], trainer.strategy.root_device)
            self.go_on()

    @property
    def _followed(self) -> Loaders:
        assert self._loaders is not None  # made in attach
        return self._loaders

    def _try(self, what: str, do: Callable[[], T]) -> T | None:
        """Do a part of the work that leans on Lightning's inside: if it fails, training goes on without that part."""
        if what in self._off:
            return None
        try:
            return do()
        except Exception as error:
            self._turn_off(what, f"{type(error).__name__}: {error}")
            return None

    def _turn_off(self, what: str, reason: str) -> None:
        self._off.add(what)
        without = private.WITHOUT.get(what, "a resume is not exact there")
        rank_zero_warn(
            f"lightning_spot: {what}: {without} ({reason}). Training goes on; please report it with the versions of"
            " Lightning and torch"
        )

    # -- capture --------------------------------------------------------------------------------------------------

    def dump(self, *, before_validation: bool = False, at_end: bool = False) -> Dump:
        """The whole state of this step.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        trainer = self._trainer
        self._order.stepped(trainer)
        checkpoint = self._try(private.SNAPSHOTS, lambda: checkpoint_of(trainer)) or checkpoint_through_save(trainer)
        self._say_left_out(leave_out_callbacks(checkpoint))
        self._try(private.PRUNING, lambda: pruned.as_it_acts(trainer, checkpoint))
        added = self._try("skipped batches", lambda: progress.even_out(checkpoint)) or {}
        mark = progress.mark_before_validation
        total = self._try(private.PROGRESS, lambda: mark(checkpoint)) if before_validation else None
        places = loggers.places_of
        return Dump(
            checkpoint=checkpoint,
            state={**self.capture(at_end=at_end), "added": added},
            validation_progress=total,
            versions=versions_of(checkpoint),
            loggers=self._try(
                private.LOGGERS, lambda: places(trainer, before_validation=before_validation, at_end=at_end)
            )
            or [],
        )

    def _say_left_out(self, names: list[str]) -> None:
        if names and not self._left_out:
            self._left_out = True
            rank_zero_warn(
                f"lightning_spot: hyperparameters that hold callbacks are not in snapshots: {', '.join(names)}. Resumes"
                " do not need them; save_hyperparameters(ignore=[...]) leaves them out of all checkpoints"
            )

    def capture(self, *, at_end: bool = False) -> State:
        """The state of this rank, as values of its own that load with ``weights_only=True``.

        Args:
            at_end: whether the run has come to its end, outside any epoch.
        """
        trainer = self._trainer
        module = trainer.lightning_module
        loaders = self._loaders  # None in a fit that takes no snapshots, such as fast_dev_run
        positions = self._try(private.LOADERS, lambda: loaders.positions(at_end=at_end)) if loaders is not None else []
        return {
            "random": capture_random(trainer.strategy.root_device),
            "loaders": positions,
            "around_loaders": self._try(private.LOADERS, loaders.capture) if loaders is not None else None,
            "buffers": self._buffers(module),
            "gradients": _gradients(trainer) if self._has_live_gradients() and not at_end else {},
            "gradient_order": self._order.saved(),
            "should_stop": trainer.should_stop,
            "hooked": self._try(private.HOOKED, lambda: self._hooked.capture(trainer)),
            "pruned": self._try(private.PRUNING, lambda: pruned.capture(trainer)),
            "shipped": self._shipped(),
            "metrics": self._try(private.METRICS, lambda: logged_values.metrics_of(module)) or {},
            **(self._try(private.LOGGED, lambda: logged_values.capture(trainer)) or {}),
        }

    def _shipped(self) -> State:
        parts = {
            key: self._try(part.what, lambda part=part: part.capture(self._trainer))  # type: ignore[misc]
            for key, part in shipped.PARTS.items()
        }
        return {key: saved for key, saved in parts.items() if saved is not None}

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
        if not self._trainer.lightning_module.automatic_optimization:
            return True
        return self._try(private.PROGRESS, lambda: bool(private.SHOULD_ACCUMULATE.of(loop)())) is not False

    # -- resume ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the exact state of a checkpoint, if it has one; it is put back when training reaches its place."""
        shared, trainer = checkpoint.get(KEY), self._trainer
        if self._loaded or not self._undo or shipped.is_of_a_tuner(trainer):
            return
        self._loaded = True
        if shared is None:
            rank_zero_warn(f"lightning_spot: {shipped.why_without_exact_state(trainer)}")
            return
        found = shared["ranks"][0]["shipped"].get("found")
        self._undo += self._try(private.TUNERS, lambda: shipped.rest_tuners(trainer, found)) or []
        self._try(private.LOGGERS, lambda: loggers.continue_in(trainer, shared["loggers"]))
        if shared["version"] != VERSION or shared["world_size"] != trainer.world_size:
            rank_zero_warn(
                f"lightning_spot: the snapshot was taken by {shared['world_size']} ranks (state {shared['version']}),"
                f" {trainer.world_size} go on (state {VERSION}): weights, optimizers and loops are restored; random"
                " numbers and the position in the data are not exact"
            )
            return
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is")
        self._saved = self._values = shared["ranks"][trainer.global_rank]
        self._random = self._saved["random"]
        self._val_total = shared["validation_progress"]
        around = self._saved["around_loaders"]
        if around is not None:
            self._try(private.LOADERS, lambda: self._followed.resume(around))
        self._precise = _more_precise(trainer.lightning_module, checkpoint)
        self._try("SpikeDetection", lambda: shipped.before_loading(trainer, checkpoint))

    def _position_for(self, loader: PositionedLoader) -> State | None:
        """Position at which ``loader`` begins its epoch: the saved one for the first epoch after a resume."""
        loaders = self._followed.training
        index = next((number for number, item in enumerate(loaders) if item is loader), None)
        if index is None or self._saved is None or self._random is None:
            return None
        positions = self._saved["loaders"]
        if positions is None:  # they were not known
            return None
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
        self._try(private.METRICS, lambda: logged_values.restore_metrics_of(module, values["metrics"]))
        if "logged" in values:
            self._try(private.LOGGED, lambda: logged_values.restore(trainer, values))
        if values["around_loaders"] is not None:
            self._try(private.LOADERS, lambda: self._followed.go_on(values["around_loaders"]))
        self._try("skipped batches", lambda: progress.restore(trainer, values["added"]))
        trainer.should_stop = values["should_stop"]
        _put(module, values["buffers"])
        self._changed |= set(values["buffers"])
        parameters = dict(module.named_parameters())
        for name, saved in values["gradients"].items():
            if name in parameters:
                parameters[name].grad = saved.to(parameters[name].device)
        # Lightning leaves metric-driven schedulers alone at the end of an epoch it was restarted in: it does not have
        # the metrics. Here they are.
        self._try(private.PROGRESS, lambda: private.RESTARTING.set(trainer.fit_loop, False))

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Of a run resumed in front of a validation: that validation draws the numbers it would have drawn."""
        total, self._val_total = self._val_total, None
        if total is None:
            return
        self._go_on_with_random()
        # The mark that made Lightning come here (see _mark_before_validation) is not part of the count.
        batches = private.VAL_BATCH_PROGRESS.of(self._trainer.fit_loop.epoch_loop.val_loop)
        batches.total.load_state_dict(total)

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Of a run whose loaders could not be positioned: what else was saved is put back after its first batch."""
        self.go_on()
        self._order.stepped(trainer)


def say_what_is_not_exact(trainer: pl.Trainer, loaders: list[Any], *, resumed: bool) -> None:
    """One warning for each thing that does not come back to where it was, with what to do."""
    reasons = [reason for loader in loaders for reason in why_not_exact(loader)]
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        reasons.append("val_check_interval by time: validations come when the clock says, not where they came before")
    if resumed:
        reasons += shipped.what_begins_anew(trainer)
    for reason in dict.fromkeys(reasons):
        rank_zero_warn(f"lightning_spot: {reason}")


def _more_precise(module: pl.LightningModule, checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights that Lightning rounds when it loads them: it converts a module to double precision only after that."""
    present = module.state_dict(keep_vars=True)
    saved = checkpoint.get("current_model_state", checkpoint.get("state_dict", {}))  # the first one of averaging ones
    return {
        name: value
        for name, value in saved.items()
        if value.is_floating_point() and name in present and value.element_size() > present[name].element_size()
    }


def _put(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Write into parameters and buffers of these names."""
    present = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    with torch.no_grad():
        for name, value in values.items():
            if name in present and present[name].shape == value.shape:
                present[name].copy_(value)


def _gradients(trainer: pl.Trainer) -> State:
    named = trainer.lightning_module.named_parameters()
    return {name: parameter.grad.detach().clone() for name, parameter in named if parameter.grad is not None}


def _mark(buffer: torch.Tensor) -> tuple[int, int]:
    return storage_address(buffer), private.writes_of(buffer)
