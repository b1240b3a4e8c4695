"""What a checkpoint has of the exact state for this rank, and when each part of it is put back.

:meth:`Restoring.load` when Lightning loads the checkpoint; :meth:`Restoring.begin` once all hooks at the start of
training are done; :meth:`Restoring.position_for` when a loader begins its epoch; the rest just before the first step,
or before the validation that the run was stopped in front of. A complete run has no such place: see
:meth:`Restoring.end_untrained`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_spot.config import format_names
from lightning_spot.exact import (
    buffers,
    logged_values,
    loggers,
    private,
    progress,
    shipped,
)
from lightning_spot.exact.buffers import Buffers
from lightning_spot.exact.ddp import restore_sharing
from lightning_spot.exact.dump import KEY, VERSION
from lightning_spot.exact.loaders import Loaders
from lightning_spot.exact.made_of import differences
from lightning_spot.exact.module_state import ModuleState
from lightning_spot.exact.optimizers import keep_dtypes, precise_of, restore_toggled
from lightning_spot.exact.other_ranks import OtherRanks
from lightning_spot.exact.own_parameters import OwnParameters, restore_values
from lightning_spot.exact.parameter_names import names_of
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.position import PositionedLoader, batches_done, loader_itself, other_batches
from lightning_spot.exact.randomness import State, restore_random
from lightning_spot.exact.rank_states import are_these, share_of
from lightning_spot.exact.sharded import gradient_like, is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Restoring(OfTrainer):
    """Puts the exact state of a checkpoint back in one ``fit``. Without a checkpoint, nothing here does anything.

    Args:
        trainer: that fits.
        switches: which parts of the work are on.
        hooked: what hooks change.
        module_buffers: those of the module.
        own: parameters that each rank has for itself.

    Attributes:
        loaders: of the fit; ``None`` where they cannot be followed.
        untracked: names of attributes that the training before had changed, and that do not come back.
        lost: likewise, of modules.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        switches: private.Switches,
        hooked: ModuleState,
        module_buffers: Buffers,
        own: OwnParameters,
    ) -> None:
        super().__init__(trainer)
        self.loaders: Loaders | None = None
        self.untracked: list[str] = []
        self.lost: list[str] = []
        self._switches = switches
        self._hooked = hooked
        self._buffers = module_buffers
        self._own = own
        self._values: State | None = None  # until the first step
        self._steps_are_over = False  # whether the run was to take no more of them
        self._has_begun = self._waits_for_begin = False
        self._positions: State | None = None
        self._random: State | None = None
        self._val_total: dict[str, int] | None = None
        self._precise: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}  # weights, until hooks at the start of training are done
        self._loads: Callable[[Mapping[str, Any]], None] | None = None
        self._others: OtherRanks | None = None  # where those that took the snapshot had other shares of the data

    @property
    def is_due(self) -> bool:
        """Whether a state was loaded and the first step is still to come."""
        return self._values is not None

    @property
    def gradient_order(self) -> list[int]:
        """The order of gradients that was saved, until the first step."""
        return self._values["gradient_order"] if self._values is not None else []

    @property
    def own_parameters(self) -> State:
        """What was saved of the parameters that this rank has for itself, until the first step."""
        found: State = (self._values or {}).get("own_parameters", {})
        return found

    @property
    def own_values(self) -> State:
        """Likewise what optimizers keep for this rank alone."""
        return (self._values or {}).get("own_values", {})  # type: ignore[no-any-return]

    @property
    def with_weights(self) -> list[str]:
        """States of callbacks and optimizers that held memory of weights, until the first step."""
        return (self._values or {}).get("with_weights", [])  # type: ignore[no-any-return] # not of an earlier version

    def made_buffers(self) -> list[str]:
        """Names of saved buffers that do not come back, since training had made them; until the first step."""
        saved = self._values["buffers"] if self._values is not None else {}
        return list(buffers.made_in_training(self._trainer.lightning_module, saved))

    def load(self, checkpoint: dict[str, Any], *, of_another_run: bool = False) -> None:
        """Take the exact state of a checkpoint, if it has one that fits; see :meth:`FitState.load`."""
        shared, trainer = checkpoint.get(KEY), self._trainer
        if shared is None:
            rank_zero_warn(f"lightning_spot: {shipped.why_without_exact_state(trainer)}")
            return
        if shared["version"] != VERSION:
            rank_zero_warn(
                f"lightning_spot: the snapshot has its exact state in form {shared['version']}, this version of"
                f" lightning_spot has {VERSION}: weights, optimizers and loops are restored; random numbers and the"
                " position in the data are not exact"
            )
            return
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is")
        self._values = self._positions = values = self._of_this_rank(shared)
        self._random = values["random"]
        self._val_total = shared["validation_progress"]
        if values["hooked"] is not None:  # before Lightning asks whether there is anything left to train
            self._switches.run(private.HOOKED, lambda: self._hooked.restore_limits(trainer, values["hooked"]))
        is_over = 0 <= trainer.max_steps <= checkpoint["global_step"]
        is_over |= trainer.max_epochs is not None and 0 <= trainer.max_epochs <= checkpoint["epoch"]
        continued = partial(loggers.continue_in, of_another_run=of_another_run, is_over=is_over)
        self._switches.run(private.LOGGERS, lambda: continued(trainer, shared["loggers"]))
        # Of a run that was to go on, and is given less steps than it has taken, nothing is trained, and nothing ends.
        limits = (trainer.max_steps, shared["max_steps"])
        reached = all(0 <= limit <= checkpoint["global_step"] for limit in limits)
        stops = values["should_stop"] and self._switches.run(
            private.PROGRESS, lambda: progress.may_stop(trainer, checkpoint)
        )
        self._steps_are_over = bool(stops) or reached
        self.untracked, self.lost = shared["untracked"], shared["lost"]
        if (loaders := self.loaders) is not None:
            self._switches.run(private.LOADERS, loaders.ask_again)
        self._of_loaders(values, Loaders.resume)
        # Strategies with shards have had optimizers loaded by now; hooks look at them next.
        restore_values(trainer, self.own_values)
        self._precise = buffers.more_precise(trainer.lightning_module, checkpoint)
        self._loaded = {} if is_sharded(trainer) else buffers.loaded(trainer.lightning_module, checkpoint)
        if states := precise_of(checkpoint):
            self._keep_dtypes(states, buffers.dtypes_of(checkpoint))
        self._switches.run("states of callbacks", lambda: shipped.before_loading(trainer, checkpoint))

    def _of_this_rank(self, shared: State) -> State:
        trainer, ranks = self._trainer, shared["ranks"]
        if are_these(shared, trainer):
            return ranks[trainer.global_rank]  # type: ignore[no-any-return]
        share, shares = share_of(trainer), shared.get("shares")  # which earlier versions did not say
        self._others = OtherRanks(ranks, trainer.global_rank, trainer.world_size, share, shares)
        return self._others.values(trainer)

    def begin(self) -> None:
        """When training begins: what no later place would put back."""
        trainer, values = self._trainer, self._values
        self._has_begun = True
        if values is None:
            return
        self._switches.run(private.PROGRESS, lambda: progress.forget_validations(trainer))
        self._of_loaders(values, Loaders.restore)
        self._restore_overwritten()
        buffers.put(trainer.lightning_module, self._precise)
        self._own.restore(trainer, self.own_parameters)
        for key, part in shipped.PARTS.items():
            if key in values["shipped"]:
                self._switches.run(part.what, lambda part=part, key=key: part.restore(trainer, values["shipped"][key]))  # type: ignore[misc]
        self._restore_hooked(values)
        if self._others is not None:
            self._go_on_from(self._others, values)
        if self._val_total is not None and not self._validates(should_stop=values["should_stop"]):
            self._count_validations()

    def _restore_overwritten(self) -> None:
        """Put back what hooks at the start have written over."""
        module, loaded, self._loaded = self._trainer.lightning_module, self._loaded, {}
        lost = buffers.differing(module, loaded)
        written = sorted(name for name, (_, is_rounded) in lost.items() if not is_rounded)
        buffers.put(module, {name: value for name, (value, _) in lost.items()})
        buffers.keep_kinds(module, {**self._precise, **loaded})
        if written:
            rank_zero_warn(
                f"lightning_spot: hooks at the start of training have written over restored values of"
                f" {format_names(written)}: those of the snapshot are put back. Initialise weights where the module is"
                " made"
            )

    def _keep_dtypes(self, states: list[State], dtypes: dict[str, torch.dtype]) -> None:
        """Give optimizers back what torch rounds, as soon as Lightning has had them load it: hooks look at them next.

        Args:
            states: of the optimizers, as they were saved.
            dtypes: that the weights had then, by name.
        """
        trainer, strategy = self._trainer, self._trainer.strategy
        load = strategy.load_optimizer_state_dict

        def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
            self.end()
            load(checkpoint)
            names = names_of(trainer.lightning_module)
            for optimizer, state in zip(trainer.optimizers, states, strict=False):
                keep_dtypes(optimizer, state, lambda parameter: dtypes.get(names.get(id(parameter), "")))

        self._loads = load_optimizer_state_dict
        strategy.load_optimizer_state_dict = load_optimizer_state_dict  # type: ignore[method-assign] # until it is called

    def end(self) -> None:
        """Let the strategy go."""
        own = vars(self._trainer.strategy)
        if self._loads is not None and own.get("load_optimizer_state_dict") is self._loads:
            del own["load_optimizer_state_dict"]

    def _restore_hooked(self, values: State, *, untrained: bool = False) -> None:
        if (saved := values["hooked"]) is not None:
            restore = self._hooked.restore
            self._switches.run(private.HOOKED, lambda: restore(self._trainer, saved, untrained=untrained))
        if kept := values.get("toggled"):
            self._switches.run(private.TOGGLES, lambda: restore_toggled(self._trainer.lightning_module, kept))

    def _go_on_from(self, others: OtherRanks, values: State) -> None:
        """Of a run that other ranks have left: its epoch has more batches now, or less."""
        trainer = self._trainer
        loaders = self.loaders.training if self.loaders is not None else []
        done = max((done for loader in loaders if (done := batches_done(loader)) is not None), default=None)
        if done is not None:
            done = int(min(done, trainer.num_training_batches))  # of which a limit, or another loader, leaves less
            self._switches.run(private.PROGRESS, lambda: progress.number_batches(trainer, done))
        ended = all(position is not None and position.get("exhausted") for position in values["loaders"] or [None])
        is_over = ended or (done is not None and done >= trainer.num_training_batches)
        others.gather_anew(values, is_over=is_over)
        # Batches that these ranks would have seen by now may end with a validation, where those of the others had none.
        is_place = is_over or bool(done and others.is_between_batches)
        if is_place and self._val_total is None and not self._steps_are_over and self._validates(should_stop=False):
            self._val_total = self._switches.run(private.PROGRESS, lambda: progress.validate_first(trainer))
        rank_zero_info(f"lightning_spot: {others.line(trainer)}")
        for reason in dict.fromkeys(others.reasons):
            rank_zero_warn(f"lightning_spot: {reason}")

    def go_on_without_batch(self) -> None:
        """Of a run that was to stop: maybe not one more batch is fetched, so what waits for one is put back now.

        So it is where a loader without a length was asked for one already, and its epoch has none.
        """
        values = self._values
        if values is None or self._val_total is not None:
            return
        if self._waits_for_begin:
            self._go_on_with_random()  # the epoch after this one begins at its start
        elif self._steps_are_over:
            restore_random(values["random"], self._trainer.strategy.root_device)
            self.go_on()

    def enter_stopped(self, checkpoint: dict[str, Any]) -> Callable[[], None] | None:
        """Of a run that takes no more steps: have Lightning come to the end of its epoch; how to take that back."""
        values, validates = self._values, self._val_total is not None
        if values is None or not self._steps_are_over or not progress.is_in_epoch(checkpoint):
            return None
        return progress.enter_epoch(self._trainer, validates=validates, should_stop=values["should_stop"])

    def position_for(self, loader: PositionedLoader) -> State | None:
        """Position at which ``loader`` begins its epoch: the saved one for the first epoch after a resume."""
        loaders = self.loaders.training if self.loaders is not None else []
        index = next((number for number, item in enumerate(loaders) if item is loader), None)
        if index is None or self._positions is None or self._random is None:
            return None
        positions = self._positions["loaders"]
        if positions is None:  # they were not known
            return None
        if len(positions) != len(loaders):
            rank_zero_warn("lightning_spot: the number of training loaders has changed: their positions are not exact")
            return None
        if self._others is not None:
            return self._others.position(loader, index)
        changed = differences(positions[index] or {}, loader_itself(loader))
        if reasons := [*changed, *other_batches(loader, positions[index])]:
            rank_zero_warn(f"lightning_spot: {'. '.join(reasons)}")
        return positions[index]  # type: ignore[no-any-return]

    def has_positions(self) -> bool:
        """Whether a snapshot has told where training loaders were."""
        return self._positions is not None and bool(self._positions["loaders"])

    def before_step(self, has_batch: bool = True) -> bool:
        """Just before the first step, unless a validation comes first; whether generators were set.

        Args:
            has_batch: whether the epoch has one more batch to step on.
        """
        if self._val_total is not None:
            return False  # see before_validation
        if not (has_batch or self._has_begun):
            # Of a loader without a length, Lightning asks for a batch before it looks where in its epoch it is.
            self._waits_for_begin = True
            return False
        return self._go_on_with_random()

    def before_validation(self) -> None:
        """Of a run stopped in front of a validation: that validation draws the numbers it would have drawn."""
        if self._val_total is not None:
            self._go_on_with_random()
            self._count_validations()

    def _validates(self, *, should_stop: bool) -> bool:
        """Whether a run stopped in front of a validation begins with it: it may have been told to validate no more."""
        comes = self._switches.run(
            private.SEAMS, lambda: progress.is_validation_due(self._trainer, should_stop=should_stop)
        )
        return comes is not False

    def _count_validations(self) -> None:
        """Take the mark out that makes Lightning begin with a validation (see mark_before_validation)."""
        total, self._val_total = self._val_total, None
        batches = private.VAL_BATCH_PROGRESS.of(self._trainer.fit_loop.epoch_loop.val_loop)
        batches.total.load_state_dict(total)

    def _go_on_with_random(self) -> bool:
        """Also set the generators of the process and of the device; whether there was anything to set them to."""
        random, self._random = self._random, None
        self.go_on()
        if random is not None:
            restore_random(random, self._trainer.strategy.root_device)
        return random is not None

    def go_on(self) -> None:
        """Put back what belongs to the step. A second call does nothing."""
        values, self._values = self._values, None
        if values is None:
            return
        trainer, run = self._trainer, self._switches.run
        module = trainer.lightning_module
        run(private.METRICS, lambda: logged_values.restore_metrics_of(module, values["metrics"]))
        if "logged" in values:
            run(private.LOGGED, lambda: logged_values.restore(trainer, values))
        self._of_loaders(values, Loaders.go_on)
        run("skipped batches", lambda: progress.restore(trainer, values["added"]))
        trainer.should_stop = values["should_stop"]
        self._buffers.restore(module, values["buffers"])
        run(private.SHARING, lambda: restore_sharing(trainer, values["shared_buffers"]))
        if values["hooked"] is not None:
            run(private.HOOKED, lambda: self._hooked.restore_generators(trainer, values["hooked"]))
        parameters = dict(module.named_parameters())
        for name, saved in values["gradients"].items():
            if name in parameters:
                parameters[name].grad = gradient_like(parameters[name], saved)
        # Lightning leaves metric-driven schedulers alone at the end of an epoch it was restarted in: it does not have
        # the metrics. Here they are.
        run(private.PROGRESS, lambda: private.RESTARTING.set(trainer.fit_loop, False))

    def end_untrained(self) -> None:
        """At the end of a ``fit`` that had nothing left to train: what was logged last is there, as after training.

        So are the generators: what the program draws from now on is what it drew after training. And the
        buffers that no ``state_dict`` has, with which it may forecast. And what hooks changed: a further fit of this
        trainer takes it as it finds it.
        """
        values = self._values
        if values is None:
            return
        if not self._has_begun:
            self._own.restore(self._trainer, self.own_parameters)
            self._restore_hooked(values, untrained=True)
        self._buffers.restore(self._trainer.lightning_module, values["buffers"])
        restore_random(values["random"], self._trainer.strategy.root_device)
        self._switches.run(private.PROGRESS, lambda: progress.end_restart(self._trainer))
        if "logged" in values:
            self._switches.run(private.LOGGED, lambda: logged_values.restore_last(self._trainer, values))

    def _of_loaders(self, values: State, stage: Callable[[Loaders, State], None]) -> None:
        """Do one stage of the loaders' own resume."""
        loaders, saved = self.loaders, values["around_loaders"]
        if loaders is not None and saved is not None:
            self._switches.run(private.LOADERS, lambda: stage(loaders, saved))
