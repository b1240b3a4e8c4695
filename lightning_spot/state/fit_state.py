"""The exact state of one trainer's ``fit``, on one rank: followed from ``setup``, captured with snapshots, put back.

Generators, the position in the data, metric states, means of ``self.log(on_epoch=True)``, logged values, buffers that
are in no ``state_dict``, gradients in mid-accumulation, what hooks and callbacks changed: what Lightning leaves out of
a checkpoint and an exact resume needs, as one flat table (:data:`PARTS`). Read from Lightning 2.6;
``tests/integration/test_exact.py`` and ``tests/integration/test_exact_table.py`` guard it.
"""

from __future__ import annotations

import enum
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.capture.tensors import copies_of, local_of
from lightning_spot.config import format_names
from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.state import buffers, builtin_callbacks, compat, logged_values, loggers, loops
from lightning_spot.state.builtin_callbacks import (
    capture_checkpoints,
    capture_found,
    capture_modules,
    restore_checkpoints,
    restore_modules,
)
from lightning_spot.state.dataloader import (
    DataResume,
    Positioned,
    differences,
    say_not_exact,
    why_not_exact,
    why_workers_are_not_exact,
)
from lightning_spot.state.dump import (
    KEY,
    VERSION,
    Dump,
    are_these,
    in_present_form,
    share_of,
    with_ranks,
)
from lightning_spot.state.elastic import OtherRanks
from lightning_spot.state.loadability import follow_named, leave_out_callbacks
from lightning_spot.state.loaders import Loaders
from lightning_spot.state.logged_values import (
    capture_last,
    capture_results,
    is_in_epoch,
    restore_in_epoch,
    restore_last,
    restore_results,
)
from lightning_spot.state.loops import BoundaryListener, is_tuning
from lightning_spot.state.module_state import ModuleState, PreTrainingEffects, UntrackedAttributes
from lightning_spot.state.optimizers import FixedSteps, keep_dtypes, names_of, precise_of, restore_toggled, toggled
from lightning_spot.state.per_trainer import PerTrainer
from lightning_spot.state.randomness import State, capture_random, restore_random
from lightning_spot.state.replicas import (
    GradientOrder,
    mark_used,
    restore_sharing,
    shares_buffers,
    what_is_in_shards,
    what_is_rank_0s,
)
from lightning_spot.state.sharded import (
    checkpoint_of,
    checkpoint_through_save,
    is_sharded,
    restore_shared_random,
    shares_random,
)
from lightning_spot.state.sharded_gradients import (
    gradient_like,
    have_wait,
    keep_partial_sums,
    keep_unsynced,
    partial_sums_of,
    placements_apart,
    plain_placements,
    unsynced_of,
    which_wait,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Stage(enum.Enum):
    """When parts of a rank's state are put back. Each loader asks for its position by itself, as its epoch begins.

    Attributes:
        LOAD: Lightning has loaded the checkpoint; it has not asked for loaders yet, nor whether there is more to train.
        TRAIN_START: all hooks at the start of training are done, which a resumed run calls, too.
        FIRST_BATCH: the first step comes next, or the validation that the run was stopped in front of; or ``fit`` ends,
            and no step was taken.
    """

    LOAD = enum.auto()
    TRAIN_START = enum.auto()
    FIRST_BATCH = enum.auto()


class FitState(PerTrainer):
    """The exact state of one trainer's ``fit``, on this rank. One for each fit: see :meth:`of`.

    Attributes:
        data_resume: how a resumed epoch gets to its place in the data.
        switches: which parts can do their work.
        buffers: of the module.
        hooked: what hooks change.
        once: is told when the sanity check begins and ends.
        fixed_steps: is told when the states of schedulers are loaded.
        gradient_order: in which DDP's gradients become ready.
        loaders: of the fit, as far as they are followed.
        modules: all modules in that of the trainer, with their names, while a capture is under way.
        at_end: whether what is captured is that of a run at its end, outside any epoch.
        has_begun: whether training has.
        listeners: are told of each batch that is done, one after the other.
        patches: that are undone when the fit is over.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.data_resume: DataResume = "auto"
        self.switches = compat.Switches()
        self.buffers = buffers.Buffers()
        self.hooked = ModuleState()
        self.once = PreTrainingEffects(trainer, self.switches, self.hooked, self.buffers)
        self.fixed_steps = FixedSteps()
        self.gradient_order = GradientOrder()
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.at_end = self.has_begun = False
        self.patches = Patches()
        self.listeners: list[BoundaryListener] = [self]
        self.loaders = Loaders(self)
        self._run = self.switches.run
        self._untracked = UntrackedAttributes()
        self._callbacks: list[pl.Callback] = []
        self._is_attached = False
        # Of a checkpoint that the fit goes on from:
        self._values: State | None = None  # until the first step
        self._findings: list[str] = []  # what is known not to be exact before training begins
        self._changed: list[str] = []  # names of attributes that the training before had changed, and that are lost
        self._lost: list[str] = []  # likewise, of modules
        self._steps_are_over = False  # whether the run was to take no more of them
        self._waits_for_begin = False
        self._places: list[State | None] | None = None  # of the training loaders of the snapshot
        self._random: State | None = None
        self._val_total: dict[str, int] | None = None
        self._loaded: dict[str, torch.Tensor] = {}  # weights, until hooks at the start of training are done
        self._others: OtherRanks | None = None  # where those that took the snapshot had other shares of the data

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer that fits."""
        return self._trainer

    @property
    def module(self) -> pl.LightningModule:
        """Its module."""
        return self._trainer.lightning_module

    def attach(self) -> None:
        """Follow the training loaders, from ``setup`` on. A second call does nothing."""
        if self._is_attached:
            return
        self._is_attached = True
        trainer, run = self._trainer, self._run
        self.switches.probe(trainer)
        run(compat.HOOKED, lambda: self.hooked.note_limits(trainer))
        run(compat.LOADERS, self.loaders.follow)
        run(compat.REQUESTS, self.loaders.follow_requests)
        self.patches.callback(self.loaders.end)
        self.once.follow_tuners(self.patches)
        follow_named(trainer, self.patches)
        self._callbacks = list(trainer.callbacks)  # type: ignore[attr-defined] # Lightning's Trainer has it
        # After on_train_start of all callbacks and of the module, which are called again in a resumed run.
        self.patches.wrap(trainer.strategy, "on_train_start", partial(partial, self._after_train_start))
        self.patches.callback(self.listeners.clear)  # another library may have wrapped what this replaces, and keep it
        loop, around = trainer.fit_loop.epoch_loop, partial(partial, self._on_advance_end)
        run(compat.BOUNDARIES, lambda: compat.ADVANCE_END.wrap(self.patches, loop, around))

    def _on_advance_end(self, on_advance_end: Callable[[Any], None], data_fetcher: Any) -> None:
        """Tell listeners in front of the validation that follows a batch, or else behind all that follows it."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if is_tuning(trainer, self._callbacks):
            on_advance_end(data_fetcher)
            return
        # A checkpoint of Lightning's own, taken after the last validation of an epoch, comes here once more.
        validates = compat.SHOULD_VALIDATE.of(loop)(data_fetcher) and not compat.SKIP_NEXT_VAL.of(loop)
        for listener in self.listeners if validates else ():
            listener.before_validation(trainer)
        on_advance_end(data_fetcher)
        for listener in self.listeners if not validates else ():
            listener.after_batch(trainer)

    def listen(self, listener: BoundaryListener) -> None:
        """Tell ``listener`` from now on, after those before it. A second call does nothing: hooks may come twice."""
        if listener not in self.listeners:
            self.listeners.append(listener)

    def batch_ended(self, listener: BoundaryListener) -> None:
        """Where this Lightning does not show the ends of batches, tell ``listener`` in ``on_train_batch_end``."""
        if not self.can(compat.BOUNDARIES) and listener in self.listeners:
            listener.after_batch(self._trainer)

    def can(self, part: str) -> bool:
        """Whether a part of :mod:`~lightning_spot.state.compat` can do its work; from :meth:`attach` on."""
        return self.switches.is_on(part)

    def detach(self) -> None:
        """Let the trainer go: another ``fit`` has a state of its own. A second call does nothing."""
        self.patches.close()
        self.gradient_order.end()
        self.forget()

    def _after_train_start(self, on_train_start: Callable[[], None]) -> None:
        on_train_start()
        if not is_tuning(self._trainer, self._callbacks):
            self._begin()

    def _begin(self) -> None:
        """When training begins: give it what no later place would, and note how everything is. Once for each fit."""
        if self.has_begun:
            return
        self.has_begun = True
        trainer, run, due = self._trainer, self._run, self._values or {}
        run(compat.LOGGERS, lambda: loggers.keep_whole(trainer, self.patches))
        run(compat.HOOKED, lambda: self.hooked.begin(trainer))
        if due:
            self._begin_again(due)
        self.fixed_steps.check(trainer)
        self.buffers.begin(self.module)
        run(compat.BUCKETS, lambda: self.gradient_order.begin(trainer, due.get("gradient_order", [])))
        run(compat.HOOKED, lambda: self._untracked.begin(trainer, self._changed))
        self.hooked.lost.update(self._lost)
        found = [*self._findings, *self._what_has_other_data()]
        found += [reason for loader in self.loaders.training for reason in why_not_exact(loader)]
        found += [reason for loader in self.loaders.validation for reason in why_workers_are_not_exact(loader)]
        found += builtin_callbacks.what_never_comes_back(trainer)
        if due:
            made = buffers.made_in_training(self.module, due.get("buffers", {}))
            found += builtin_callbacks.what_begins_anew(trainer)
            found += self._untracked.begin_anew([*self._lost, *made])
            found += what_is_rank_0s(trainer)
            found += self.hooked.what_is_apart()
        say_not_exact(found)
        self._go_on_without_batch()

    # -- capture --------------------------------------------------------------------------------------------------

    def dump(self, *, before_validation: bool = False, at_end: bool = False) -> Dump:
        """The whole state of this step.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        trainer, run = self._trainer, self._run
        self.gradient_order.stepped(trainer)
        # It calls the user's hooks, and ranks that share an optimizer's state wait for each other in it.
        checkpoint = run(compat.SNAPSHOTS, lambda: checkpoint_of(trainer), (AttributeError, TypeError))
        checkpoint = checkpoint or checkpoint_through_save(trainer)
        leave_out_callbacks(checkpoint)
        added = run("skipped batches", lambda: loops.even_out(checkpoint)) or {}
        mark = loops.mark_before_validation
        total = run(compat.PROGRESS, lambda: mark(checkpoint)) if before_validation else None
        places = partial(loggers.places_of, trainer, before_validation=before_validation, at_end=at_end)
        return Dump(
            checkpoint=checkpoint,
            state={**self.capture(at_end=at_end), "added": added},
            shared={
                "version": VERSION,
                "world_size": trainer.world_size,
                "shares": self._shares,
                "max_steps": trainer.max_steps,
                "validation_progress": total,
                "loggers": run(compat.LOGGERS, places) or [],
                "untracked": run(compat.HOOKED, lambda: self._untracked.names(trainer)) or [],
                "lost": sorted(self.hooked.lost),
            },
        )

    @cached_property
    def _shares(self) -> int:
        """Of the data; to cut its part out of a mesh takes longer than all else that goes with a snapshot."""
        return share_of(self._trainer)[1]

    def capture(self, *, at_end: bool = False) -> State:
        """The state of this rank, as values of its own that load with ``weights_only=True``.

        Args:
            at_end: whether the run has come to its end, outside any epoch.
        """
        self.at_end, self.modules = at_end, list(self.module.named_modules())
        try:
            return {part.name: self._do(part, part.capture, self) for part in PARTS}
        finally:
            self.modules = []  # training may drop some

    def _do(self, part: StatePart, do: Callable[..., Any], *arguments: Any) -> Any:
        return do(*arguments) if part.requires is None else self._run(part.requires, partial(do, *arguments))

    def gradients(self) -> State:
        """Copies of those on which the next step may build: it adds to them while the snapshot is copied."""
        if self.at_end or not self._has_live_gradients():
            return {}
        named = self.module.named_parameters()
        return self._copied({name: local_of(each.grad.detach()) for name, each in named if each.grad is not None})

    def _copied(self, present: dict[str, torch.Tensor]) -> State:
        copies = copies_of(present)
        if any(copies[name].device != present[name].device for name in present):
            text = (
                "the GPU of rank {about} has no memory for copies of gradients. Training waits for their copies to the"
                " host. Call zero_grad() after step(): then there are none."
            )
            say(logging.WARNING, "no-gradient-copies", text, about=self._trainer.global_rank)
        return copies

    def gradient_placements(self) -> State:
        """How gradients are sharded, where that is not how their parameters are."""
        if self.at_end or not is_sharded(self._trainer) or not self._has_live_gradients():
            return {}
        named = self.module.named_parameters()
        return dict(placements_apart((name, each, each.grad) for name, each in named if each.grad is not None))

    def unsynced_gradients(self) -> State:
        """Copies of whole gradients that FSDP2 has not added up over ranks, and which modules it is not to do so of."""
        if self.at_end or not is_sharded(self._trainer):
            return {}
        found = unsynced_of(self.module) if self._has_live_gradients() else {}
        copies = self._copied({name: local_of(gradient.detach()) for name, gradient in found.items()})
        values = {name: {"local": copies[name], "placements": plain_placements(each)} for name, each in found.items()}
        sums = self._copied(partial_sums_of(self.module)) if self._has_live_gradients() else {}
        waits, copies_wait = which_wait(self.module), which_wait(self.module, compat.ALL_REDUCES)
        return {"gradients": values, "waits": waits, "sums": sums, "copies_wait": copies_wait}

    def _has_live_gradients(self) -> bool:
        """Whether the next step may build on gradients: in mid-accumulation, or where only the user knows."""
        if not self.module.automatic_optimization:
            return True
        loop = self._trainer.fit_loop.epoch_loop
        return self._run(compat.PROGRESS, lambda: bool(compat.SHOULD_ACCUMULATE.of(loop)())) is not False

    # -- resume ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], *, of_another_run: bool = False) -> None:
        """Take the exact state of a checkpoint, if it has one; it is put back when training reaches its place.

        Args:
            checkpoint: that Lightning loads.
            of_another_run: whether another run took it, whose logs stay its own.
        """
        if not self._is_attached:
            return  # it is a fit whose state is not kept
        with_ranks(checkpoint)  # a file that the user named was read by Lightning
        shared, trainer = checkpoint.get(KEY), self._trainer
        if shared is None:
            self._findings.append(builtin_callbacks.why_without_exact_state(trainer))
            return
        shared = in_present_form(shared)
        is_known = shared["version"] == VERSION
        found = shared["ranks"][0]["found"] if is_known else {}
        self._run(compat.TUNERS, lambda: builtin_callbacks.rest_tuners(trainer, found, self.patches))
        if not is_known:
            self._findings.append(
                f"the exact state of the snapshot has version {shared['version']}, and this lightning_spot writes"
                f" {VERSION}: weights, optimizers and loops are restored; random numbers and the position in the data"
                " are not. Resume with the version of lightning_spot that took it"
            )
            return
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is")
        self._findings += what_is_in_shards(checkpoint) if trainer.world_size > 1 else ()
        self._values = values = self._of_this_rank(shared)
        self._places = values["loaders"]
        self._random = values["random"]
        self._val_total = shared["validation_progress"]
        self._run(compat.LOADERS, self.loaders.ask_again)
        self.restore(Stage.LOAD, values)
        is_over = 0 <= trainer.max_steps <= checkpoint["global_step"]
        is_over |= trainer.max_epochs is not None and 0 <= trainer.max_epochs <= checkpoint["epoch"]
        continued = partial(loggers.continue_in, of_another_run=of_another_run, is_over=is_over)
        self._run(compat.LOGGERS, lambda: continued(trainer, shared["loggers"]))
        # Of a run that was to go on, and is given less steps than it has taken, nothing is trained, and nothing ends.
        limits = (trainer.max_steps, shared["max_steps"])
        reached = all(0 <= limit <= checkpoint["global_step"] for limit in limits)
        stops = values["should_stop"] and self._run(compat.PROGRESS, lambda: loops.may_stop(trainer, checkpoint))
        self._steps_are_over = bool(stops) or reached
        self._changed, self._lost = shared["untracked"], shared["lost"]
        self._loaded = {} if is_sharded(trainer) else buffers.loaded(trainer.lightning_module, checkpoint)
        if states := precise_of(checkpoint):
            self._keep_dtypes(states, buffers.dtypes_of(checkpoint))
        self._run("states of callbacks", lambda: builtin_callbacks.before_loading(trainer, checkpoint))
        stopped = partial(self._enter_stopped, checkpoint, should_stop=values["should_stop"])
        self._run(compat.PROGRESS, stopped)

    def _of_this_rank(self, shared: State) -> State:
        trainer, ranks = self._trainer, shared["ranks"]
        if are_these(shared, trainer):
            return ranks[trainer.global_rank]  # type: ignore[no-any-return]
        self._others = OtherRanks(ranks, trainer.global_rank, trainer.world_size, share_of(trainer), shared["shares"])
        return self._others.values(trainer)

    def _begin_again(self, values: State) -> None:
        """When training begins: put back what no later place would."""
        trainer = self._trainer
        self._run(compat.PROGRESS, lambda: loops.forget_validations(trainer))
        self._restore_overwritten()
        self.restore(Stage.TRAIN_START, values)
        if self._others is not None:
            self._go_on_from(self._others, values)
        if self._val_total is not None and not self._validates(should_stop=values["should_stop"]):
            self._count_validations()

    def _restore_overwritten(self) -> None:
        """Put back what hooks at the start have written over."""
        loaded, self._loaded = self._loaded, {}
        if written := buffers.put_loaded(self.module, loaded):
            text = (
                "hooks at the start of training overwrote restored values of {about}. Those of the snapshot are put"
                " back. Initialise weights in __init__ or configure_model."
            )
            say(logging.WARNING, "weights-put-back", text, about=format_names(written), only_rank_zero=True)

    def _keep_dtypes(self, states: list[State], dtypes: dict[str, torch.dtype]) -> None:
        """Give optimizers back what torch rounds, as soon as Lightning has had them load it: hooks look at them next.

        Args:
            states: of the optimizers, as they were saved.
            dtypes: that the weights had then, by name.
        """
        trainer = self._trainer

        def load_optimizer_state_dict(load: Callable[[Mapping[str, Any]], None], checkpoint: Mapping[str, Any]) -> None:
            load(checkpoint)
            names = names_of(trainer.lightning_module)
            for optimizer, state in zip(trainer.optimizers, states, strict=False):
                keep_dtypes(optimizer, state, lambda parameter: dtypes.get(names.get(id(parameter), "")))

        self.patches.once(trainer.strategy, "load_optimizer_state_dict", load_optimizer_state_dict)

    def _go_on_from(self, others: OtherRanks, values: State) -> None:
        """Of a run that other ranks have left: its epoch has more batches now, or less."""
        trainer = self._trainer
        places = (each.batches_done() for each in self.loaders.training)
        done = max((place for place in places if place is not None), default=None)
        if done is not None:
            done = int(min(done, trainer.num_training_batches))  # of which a limit, or another loader, leaves less
            self._run(compat.PROGRESS, lambda: loops.number_batches(trainer, done))
        ended = all(position is not None and position.get("exhausted") for position in values["loaders"] or [None])
        is_over = ended or (done is not None and done >= trainer.num_training_batches)
        others.gather_anew(values, is_over=is_over)
        # Batches that these ranks would have seen by now may end with a validation, where those of the others had none.
        is_place = is_over or bool(done and others.is_between_batches)
        if is_place and self._val_total is None and not self._steps_are_over and self._validates(should_stop=False):
            self._val_total = self._run(compat.PROGRESS, lambda: loops.validate_first(trainer, self.patches))
        say(logging.INFO, "ranks-changed", "{about}", about=others.line(trainer), only_rank_zero=True)
        self._findings += others.reasons

    def _go_on_without_batch(self) -> None:
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
            self._go_on()

    def _enter_stopped(self, checkpoint: dict[str, Any], *, should_stop: bool) -> None:
        """Of a run that takes no more steps: have Lightning come to the end of its epoch."""
        validates = self._val_total is not None
        if self._steps_are_over and loops.is_in_epoch(checkpoint):
            loops.enter_epoch(self._trainer, self.patches, validates=validates, should_stop=should_stop)

    def position_for(self, follower: Positioned) -> State | None:
        """Position at which a loader begins its epoch: the saved one for the first epoch after a resume."""
        followers, places = self.loaders.training, self._places
        index = next((number for number, each in enumerate(followers) if each is follower), None)
        if index is None or self._random is None or places is None or len(places) != len(followers):
            return None
        return places[index] if self._others is None else self._others.position(follower.loader, index)

    def _what_has_other_data(self) -> list[str]:
        """Why training loaders do not begin where those of the snapshot were."""
        followers, places = self.loaders.training, self._places
        if not followers or places is None:
            return []
        if len(places) != len(followers):
            return ["the number of training loaders has changed: their positions are not exact"]
        both = zip(followers, places, strict=True) if self._others is None else ()
        return [reason for each, saved in both for reason in differences(saved, each.loader)]

    def has_positions(self) -> bool:
        """Whether a snapshot has told where training loaders were."""
        return bool(self._places)

    def before_step(self, has_batch: bool = True) -> bool:
        """Just before the first step, unless a validation comes first; whether generators were set.

        Args:
            has_batch: whether the epoch has one more batch to step on.
        """
        if self._val_total is not None:
            return False  # see before_validation
        if not (has_batch or self.has_begun):
            # Of a loader without a length, Lightning asks for a batch before it looks where in its epoch it is.
            self._waits_for_begin = True
            return False
        return self._go_on_with_random()

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Of a run stopped in front of a validation: that validation draws the numbers it would have drawn."""
        if self._val_total is not None:
            self._go_on_with_random()
            self._count_validations()

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Of a run whose loaders could not be positioned: what else was saved is put back after its first batch."""
        self._go_on()
        self.gradient_order.stepped(trainer)

    def _validates(self, *, should_stop: bool) -> bool:
        """Whether a run stopped in front of a validation begins with it: it may have been told to validate no more."""
        comes = self._run(compat.BOUNDARIES, lambda: loops.is_validation_due(self._trainer, should_stop=should_stop))
        return comes is not False

    def _count_validations(self) -> None:
        """Take the mark out that makes Lightning begin with a validation (see mark_before_validation)."""
        total, self._val_total = self._val_total, None
        batches = compat.VAL_BATCH_PROGRESS.of(self._trainer.fit_loop.epoch_loop.val_loop)
        batches.total.load_state_dict(total)

    def _go_on_with_random(self) -> bool:
        """Also set the generators of the process and of the device; whether there was anything to set them to."""
        random, self._random = self._random, None
        self._go_on()
        if random is not None:
            restore_random(random, self._trainer.strategy.root_device)
        return random is not None

    def _go_on(self) -> None:
        """Put back what belongs to the step. A second call does nothing."""
        values, self._values = self._values, None
        if values is None:
            return
        trainer = self._trainer
        self._run("skipped batches", lambda: loops.restore(trainer, values["added"]))
        self.restore(Stage.FIRST_BATCH, values)
        # Lightning leaves metric-driven schedulers alone at the end of an epoch it was restarted in: it does not have
        # the metrics. Here they are.
        self._run(compat.PROGRESS, lambda: compat.RESTARTING.set(trainer.fit_loop, False))

    def end_untrained(self) -> None:
        """At the end of a ``fit`` that had nothing left to train: the program goes on as it did after training.

        It draws what it drew then, forecasts with buffers that no ``state_dict`` has, reads what was logged last. A
        further fit of this trainer takes what hooks changed as it finds it.
        """
        if (values := self._values) is not None:
            if not self.has_begun:
                self.restore(Stage.TRAIN_START, values)
            self._go_on_with_random()
            self._run(compat.PROGRESS, lambda: loops.end_restart(self._trainer))
        if not self.has_begun:
            say_not_exact(self._findings)

    def restore(self, stage: Stage, values: State) -> None:
        """Put back what :meth:`capture` found, as far as it belongs to a stage.

        Args:
            stage: that has come.
            values: of this rank.
        """
        for part in PARTS:
            restore, saved = part.restore.get(stage), values.get(part.name)
            if restore is not None and saved is not None:
                self._do(part, restore, self, saved)

    def restore_gradients(self, saved: State) -> None:
        """Give parameters the gradients that they had."""
        parameters = dict(self.module.named_parameters())
        for name, value in saved.items():
            if name in parameters:
                parameters[name].grad = gradient_like(parameters[name], value)
        mark_used(self._trainer)

    def restore_gradient_placements(self, saved: State) -> None:
        """Have those that were not sharded as their parameters are be so again."""
        parameters = dict(self.module.named_parameters())
        for name, placements in saved.items():
            if name in parameters and (gradient := parameters[name].grad) is not None:
                parameters[name].grad = gradient_like(parameters[name], local_of(gradient), placements)

    def restore_unsynced_gradients(self, saved: State) -> None:
        """Have FSDP2 keep the gradients that it kept, and go on to do so."""
        if not saved:
            return
        saved = {"sums": {}, "copies_wait": saved["waits"], **saved}  # earlier snapshots have none
        have_wait(self.module, saved["waits"], saved["copies_wait"])
        keep_partial_sums(self.module, saved["sums"])
        if self._trainer.strategy.reduce_boolean_decision(bool(saved["gradients"]), all=False):
            keep_unsynced(self.module, saved["gradients"])


Capture = Callable[[FitState], Any]
Restore = Callable[[FitState, Any], object]


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of a rank's state.

    Attributes:
        name: its key there.
        requires: the part of :mod:`~lightning_spot.state.compat` that it is off without, or what to call it where it
            fails; ``None`` for one that needs no private name, and whose failure is one of the snapshot.
        capture: returns it as values that load with ``weights_only=True``; ``None`` if there is none.
        restore: puts that back, at each of its stages.
    """

    name: str
    requires: str | None
    capture: Capture
    restore: Mapping[Stage, Restore] = field(default_factory=dict)


def _of(function: Callable[[pl.Trainer], Any]) -> Capture:
    return lambda fit: function(fit.trainer)


def _to(function: Callable[[pl.Trainer, Any], object], stage: Stage) -> Mapping[Stage, Restore]:
    return {stage: lambda fit, saved: function(fit.trainer, saved)}


def _random(trainer: pl.Trainer) -> State:
    return capture_random(trainer.strategy.root_device)


def _metrics(fit: FitState) -> State:
    return logged_values.metrics_of(fit.modules)


def _restore_metrics(trainer: pl.Trainer, saved: State) -> None:
    logged_values.restore_metrics(trainer.lightning_module.named_modules(), saved)


def _restore_stop(trainer: pl.Trainer, saved: bool) -> None:
    trainer.should_stop = saved


def _changed_buffers(fit: FitState) -> State:
    return fit.buffers.capture(fit.module, is_first=fit.trainer.is_global_zero)


def _restore_buffers(fit: FitState, saved: State) -> None:
    fit.buffers.restore(fit.module, saved)


_AROUND_LOADERS: Mapping[Stage, Restore] = {
    Stage.LOAD: lambda fit, saved: fit.loaders.resume(saved),
    Stage.TRAIN_START: lambda fit, saved: fit.loaders.restore(saved),
    Stage.FIRST_BATCH: lambda fit, saved: fit.loaders.go_on(saved),
}
_HOOKED: Mapping[Stage, Restore] = {
    Stage.LOAD: lambda fit, saved: fit.hooked.restore_limits(fit.trainer, saved),
    Stage.TRAIN_START: lambda fit, saved: fit.hooked.restore(fit.trainer, saved),
    Stage.FIRST_BATCH: lambda fit, saved: fit.hooked.restore_generators(fit.trainer, saved),
}

PARTS = (
    StatePart("random", None, _of(_random)),  # set last of all: see _go_on_with_random
    StatePart("shared_random", compat.SHARED_RANDOM, _of(shares_random), _to(restore_shared_random, Stage.FIRST_BATCH)),
    StatePart("loaders", compat.LOADERS, lambda fit: fit.loaders.positions(at_end=fit.at_end)),
    StatePart("around_loaders", compat.LOADERS, lambda fit: fit.loaders.capture(), _AROUND_LOADERS),
    StatePart("metrics", compat.METRICS, _metrics, _to(_restore_metrics, Stage.FIRST_BATCH)),
    StatePart("logged", compat.LOGGED, _of(capture_last), _to(restore_last, Stage.FIRST_BATCH)),
    StatePart("results", compat.LOGGED, _of(capture_results), _to(restore_results, Stage.FIRST_BATCH)),
    StatePart("in_epoch", compat.LOGGED, _of(is_in_epoch), _to(restore_in_epoch, Stage.FIRST_BATCH)),
    StatePart(
        "checkpoints",
        "ModelCheckpoint's last score",
        _of(capture_checkpoints),
        _to(restore_checkpoints, Stage.TRAIN_START),
    ),
    StatePart(
        "modules", "metrics and averages of callbacks", _of(capture_modules), _to(restore_modules, Stage.TRAIN_START)
    ),
    StatePart("found", "what the tuners found", _of(capture_found)),  # see rest_tuners
    StatePart("should_stop", None, lambda fit: fit.trainer.should_stop, _to(_restore_stop, Stage.FIRST_BATCH)),
    StatePart("buffers", None, _changed_buffers, {Stage.FIRST_BATCH: _restore_buffers}),
    StatePart("shared_buffers", compat.SHARING, _of(shares_buffers), _to(restore_sharing, Stage.FIRST_BATCH)),
    StatePart("hooked", compat.HOOKED, lambda fit: fit.hooked.capture(fit.trainer, fit.modules), _HOOKED),
    StatePart("toggled", compat.TOGGLES, _of(toggled), _to(restore_toggled, Stage.TRAIN_START)),
    StatePart("gradients", None, FitState.gradients, {Stage.FIRST_BATCH: FitState.restore_gradients}),
    StatePart(
        "gradient_placements",
        None,
        FitState.gradient_placements,
        {Stage.FIRST_BATCH: FitState.restore_gradient_placements},
    ),
    StatePart(
        "unsynced_gradients",
        compat.UNSYNCED,
        FitState.unsynced_gradients,
        {Stage.FIRST_BATCH: FitState.restore_unsynced_gradients},
    ),
    StatePart("gradient_order", None, lambda fit: fit.gradient_order.saved()),
)
"""All parts, in the order in which they are captured, and put back within a stage."""
