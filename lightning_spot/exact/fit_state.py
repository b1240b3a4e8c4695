"""What Lightning leaves out of a checkpoint and an exact resume needs: captured on every rank for each snapshot.

Generators, the position in the data, metric states, means of ``self.log(on_epoch=True)``, logged values, buffers that
are in no ``state_dict``, gradients in mid-accumulation, what hooks and callbacks changed. Read from Lightning 2.6;
``tests/test_exact.py`` and ``tests/test_exact_table.py`` guard it. ``restoring`` puts it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.capture.tensors import copies_of
from lightning_spot.exact import logged_values, loggers, private, progress, shipped
from lightning_spot.exact.aliases import shared_with_weights, what_is_apart_from_weights
from lightning_spot.exact.buffers import Buffers
from lightning_spot.exact.checkpoint import checkpoint_of, checkpoint_through_save, leave_out_callbacks
from lightning_spot.exact.ddp import GradientOrder, shares_buffers
from lightning_spot.exact.dump import KEY, Dump, read_checkpoint, with_ranks
from lightning_spot.exact.epochs import DataResume
from lightning_spot.exact.loadability import follow_named
from lightning_spot.exact.loaders import Loaders
from lightning_spot.exact.made_of import FixedSteps
from lightning_spot.exact.module_state import ModuleState, PreTrainingEffects, UntrackedAttributes
from lightning_spot.exact.optimizers import toggled
from lightning_spot.exact.own_parameters import (
    OwnParameters,
    capture_values,
    what_hooks_begin_anew,
    what_is_the_first_ranks,
)
from lightning_spot.exact.per_trainer import PerTrainer
from lightning_spot.exact.position import why_not_exact, why_workers_are_not_exact
from lightning_spot.exact.randomness import Generators, State
from lightning_spot.exact.restoring import Restoring
from lightning_spot.exact.seams import Seams, is_tuning
from lightning_spot.exact.sharded import local_gradient

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


class FitState(PerTrainer):
    """The exact state of one trainer's ``fit``, on this rank. One for each trainer: see :meth:`of`.

    Attributes:
        data_resume: how a resumed epoch gets to its place in the data.
        once: is told when the sanity check begins and ends.
        fixed_steps: is told when the states of schedulers are loaded.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.data_resume: DataResume = "auto"
        self._undo: list[Callable[[], object]] = []
        self._callbacks: list[pl.Callback] = []
        self._renew()

    def _renew(self) -> None:
        self._switches = private.Switches()
        self._buffers = Buffers()
        self._generators = Generators()
        self._hooked = ModuleState()
        self.once = PreTrainingEffects(self._trainer, self._switches, self._hooked, self._buffers)
        self._order = GradientOrder()
        self.fixed_steps = FixedSteps()
        self._untracked = UntrackedAttributes()
        self._own = OwnParameters()
        self._restoring = Restoring(self._trainer, self._switches, self._hooked, self._buffers, self._own)
        self._begun = False
        self._left_out = self._waits_for_gradients = False
        self._dumps = 0
        self._with_weights: list[str] = []  # states of callbacks and optimizers that hold memory of weights

    def attach(self) -> None:
        """Follow the training loaders, from ``setup`` on. A second call does nothing."""
        if self._undo:
            return
        self._switches.probe(self._trainer)
        self._switches.run(private.HOOKED, lambda: self._hooked.note_limits(self._trainer))
        self._switches.run(private.LOADERS, self._follow_loaders)
        self._undo += [*self.once.follow_tuners(), follow_named(self._trainer)]
        self._callbacks = list(self._trainer.callbacks)  # type: ignore[attr-defined] # Lightning's Trainer has it
        self._begin_after_hooks()
        seams = Seams.of(self._trainer)
        seams.is_on = self.can(private.SEAMS)
        seams.add(self)
        self._undo.append(lambda: seams.remove(self))

    def _follow_loaders(self) -> None:
        restoring = self._restoring
        paused = self.once.paused
        positions = restoring.position_for, restoring.has_positions
        loaders = Loaders(self._trainer, *positions, restoring.before_step, lambda: self.data_resume, paused)
        self._undo.append(loaders.end)
        restoring.loaders = loaders
        self._switches.run(private.REQUESTS, loaders.follow_requests)

    def can(self, part: str) -> bool:
        """Whether a part of :mod:`~lightning_spot.exact.private` can do its work; from :meth:`attach` on."""
        return self._switches.is_on(part)

    def detach(self) -> None:
        """Let the trainer go. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self._order.end()
        self._restoring.end()
        self._renew()

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
        trainer, restoring = self._trainer, self._restoring
        self._undo += self._switches.run(private.LOGGERS, lambda: loggers.keep_whole(trainer)) or []
        self._switches.run(private.HOOKED, lambda: self._hooked.begin(trainer))
        restoring.begin()
        self.fixed_steps.check(trainer)
        self._buffers.begin(trainer.lightning_module)
        self._switches.run(private.BUCKETS, lambda: self._order.begin(trainer, restoring.gradient_order))
        self._switches.run(private.HOOKED, lambda: self._untracked.begin(trainer, restoring.untracked))
        self._hooked.lost.update(restoring.lost)
        reasons = why_loaders_are_not_exact(restoring.loaders) if restoring.loaders is not None else []
        anew = [
            *shipped.what_begins_anew(trainer),
            *self._untracked.begin_anew([*restoring.lost, *restoring.made_buffers()]),
        ]
        own = what_is_the_first_ranks(restoring.own_parameters, restoring.own_values)
        self._with_weights = restoring.with_weights
        anew += [
            *own,
            *what_is_apart_from_weights(trainer, self._with_weights),
            *what_hooks_begin_anew(trainer),
            *self._hooked.what_waits(),
            *self._hooked.what_is_apart(),
        ]
        first = [*reasons, *shipped.what_has_a_passing_folder(trainer)]
        say_what_is_not_exact(trainer, *((reasons, anew) if restoring.is_due else (first, [])))
        restoring.go_on_without_batch()

    # -- capture --------------------------------------------------------------------------------------------------

    def dump(self, *, before_validation: bool = False, at_end: bool = False) -> Dump:
        """The whole state of this step.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        trainer, run = self._trainer, self._switches.run
        self._order.stepped(trainer)
        # It calls the user's hooks, and ranks that share an optimizer's state wait for each other in it.
        checkpoint = run(private.SNAPSHOTS, lambda: checkpoint_of(trainer), (AttributeError, TypeError))
        checkpoint = checkpoint or checkpoint_through_save(trainer)
        self._say_left_out(leave_out_callbacks(checkpoint))
        self._dumps += 1
        if self._dumps & (self._dumps - 1) == 0:  # in fewer and fewer of them: it asks for the address of each tensor
            self._with_weights = sorted({*self._with_weights, *shared_with_weights(checkpoint)})
        added = run("skipped batches", lambda: progress.even_out(checkpoint)) or {}
        mark = progress.mark_before_validation
        total = run(private.PROGRESS, lambda: mark(checkpoint)) if before_validation else None
        places = loggers.places_of
        return Dump(
            checkpoint=checkpoint,
            state={**self.capture(at_end=at_end), "added": added, "with_weights": self._with_weights},
            validation_progress=total,
            loggers=run(private.LOGGERS, lambda: places(trainer, before_validation=before_validation, at_end=at_end))
            or [],
            untracked=run(private.HOOKED, lambda: self._untracked.names(trainer)) or [],
            lost=sorted(self._hooked.lost),
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
        trainer, run = self._trainer, self._switches.run
        module = trainer.lightning_module
        modules = list(module.named_modules())
        loaders = self._restoring.loaders  # None in a fit that takes no snapshots, such as fast_dev_run
        positions = run(private.LOADERS, lambda: loaders.positions(at_end=at_end)) if loaders is not None else []
        return {
            "random": self._generators.capture(trainer.strategy.root_device),
            "loaders": positions,
            "around_loaders": run(private.LOADERS, loaders.capture) if loaders is not None else None,
            "buffers": self._buffers.capture(module, is_first=trainer.is_global_zero),
            "shared_buffers": run(private.SHARING, lambda: shares_buffers(trainer)),
            "own_parameters": self._own.capture(trainer),
            "own_values": capture_values(trainer),
            "gradients": self._gradients() if self._has_live_gradients() and not at_end else {},
            "gradient_order": self._order.saved(),
            "should_stop": trainer.should_stop,
            "hooked": run(private.HOOKED, lambda: self._hooked.capture(trainer, modules)),
            "toggled": run(private.TOGGLES, lambda: toggled(module)) or {},
            "shipped": self._shipped(),
            "metrics": run(private.METRICS, lambda: logged_values.metrics_among(modules)) or {},
            **(run(private.LOGGED, lambda: logged_values.capture(trainer)) or {}),
        }

    def _shipped(self) -> State:
        parts = {
            key: self._switches.run(part.what, lambda part=part: part.capture(self._trainer))  # type: ignore[misc]
            for key, part in shipped.PARTS.items()
        }
        return {key: saved for key, saved in parts.items() if saved is not None}

    def _has_live_gradients(self) -> bool:
        """Whether the next step may build on gradients: in mid-accumulation, or where only the user knows."""
        loop = self._trainer.fit_loop.epoch_loop
        if not self._trainer.lightning_module.automatic_optimization:
            return True
        accumulates = self._switches.run(private.PROGRESS, lambda: bool(private.SHOULD_ACCUMULATE.of(loop)()))
        again = self._switches.run(private.AVERAGING, lambda: shipped.steps_without_backward(self._trainer))
        return accumulates is not False or bool(again)

    def _gradients(self) -> State:
        """Copies of the gradients: the next step adds to them while the snapshot is copied."""
        named = self._trainer.lightning_module.named_parameters()
        present = {
            name: local_gradient(parameter.grad.detach()) for name, parameter in named if parameter.grad is not None
        }
        copies = copies_of(present)
        if not self._waits_for_gradients and any(copies[name].device != present[name].device for name in present):
            self._waits_for_gradients = True
            logger.warning(
                "lightning_spot: rank %d: its GPU has no room for copies of the gradients that are there when a"
                " snapshot is taken: they go to the host at once, and training waits for that. With zero_grad() behind"
                " step() there are none",
                self._trainer.global_rank,
            )
        return copies

    # -- resume ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], *, of_another_run: bool = False) -> None:
        """Take the exact state of a checkpoint, if it has one; it is put back when training reaches its place.

        Args:
            checkpoint: that Lightning loads.
            of_another_run: whether another run took it, whose logs stay its own.
        """
        if not self._undo:  # a fit whose state is not kept
            return
        if (shared := checkpoint.get(KEY)) is not None:
            with_ranks(checkpoint, read_checkpoint)  # a file that the user named was read by Lightning
            found = shared["ranks"][0]["shipped"].get("found")
            rest = self._switches.run(private.TUNERS, lambda: shipped.rest_tuners(self._trainer, found))
            self._undo += rest or []
        self._restoring.load(checkpoint, of_another_run=of_another_run)
        undo = self._switches.run(private.PROGRESS, lambda: self._restoring.enter_stopped(checkpoint))
        self._undo += [undo] if undo is not None else []

    def end_epoch(self) -> None:
        """Where an epoch of training ends, before the module's own hook: put back what fits the data of the next."""
        self._switches.run(private.HOOKED, lambda: self._hooked.end_epoch(self._trainer))

    def end_untrained(self) -> None:
        """At the end of ``fit``: of a run that was complete already, put back what a program may read now."""
        self._restoring.end_untrained()

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Of a run resumed in front of a validation: put back what that needs."""
        self._restoring.before_validation()

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Of a run whose loaders could not be positioned: what else was saved is put back after its first batch."""
        self._restoring.go_on()
        self._order.stepped(trainer)


def why_loaders_are_not_exact(loaders: Loaders) -> list[str]:
    """What of the loaders does not come back to where it was; of those for validation, what their workers draw."""
    reasons = [reason for loader in loaders.training for reason in why_not_exact(loader)]
    return reasons + [reason for loader in loaders.validation for reason in why_workers_are_not_exact(loader)]


def say_what_is_not_exact(trainer: pl.Trainer, reasons: list[str], anew: list[str]) -> None:
    """One warning for each thing that does not come back to where it was, with what to do.

    Args:
        trainer: whose training begins.
        reasons: what is known of its loaders.
        anew: what is known of the rest, of a run that goes on from a snapshot.
    """
    always = [*shipped.what_goes_by_the_clock(trainer), *shipped.what_lightning_alone_keeps(trainer)]
    for reason in dict.fromkeys([*reasons, *always, *anew]):
        rank_zero_warn(f"lightning_spot: {reason}")
