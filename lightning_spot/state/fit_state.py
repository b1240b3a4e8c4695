"""The exact state of one trainer's ``fit``: followed from ``setup`` on, captured with a snapshot, put back in a resume.

``state_parts`` lists what there is to it, and at which stage of a resume each part is put back.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.config import format_names
from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.state import buffers, builtin_callbacks, compat, loggers, loops
from lightning_spot.state.checkpoint import checkpoint_of, checkpoint_through_save, leave_out_callbacks
from lightning_spot.state.dataloader import (
    DataResume,
    Positioned,
    differences,
    say_not_exact,
    why_not_exact,
    why_workers_are_not_exact,
)
from lightning_spot.state.dump import KEY, VERSION, Dump, in_present_form, read_checkpoint, with_ranks
from lightning_spot.state.elastic import OtherRanks
from lightning_spot.state.loadability import follow_named
from lightning_spot.state.loaders import Loaders
from lightning_spot.state.loops import StepBoundaries, is_tuning
from lightning_spot.state.module_state import PreTrainingEffects, UntrackedAttributes
from lightning_spot.state.optimizers import FixedSteps, keep_dtypes, names_of, precise_of
from lightning_spot.state.own_parameters import what_is_rank_0s
from lightning_spot.state.per_trainer import OfTrainer, PerTrainer
from lightning_spot.state.randomness import State, restore_random
from lightning_spot.state.rank_states import are_these, share_of
from lightning_spot.state.sharded import is_sharded
from lightning_spot.state.state_parts import Stage, StateParts

if TYPE_CHECKING:
    import lightning.pytorch as pl


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
        self._patches = Patches()
        self._is_attached = False
        self._callbacks: list[pl.Callback] = []
        self._renew()

    def _renew(self) -> None:
        self._parts = parts = StateParts(self._trainer)
        self.once = PreTrainingEffects(self._trainer, parts.switches, parts.hooked, parts.buffers)
        self.fixed_steps = FixedSteps()
        self._untracked = UntrackedAttributes()
        self._restoring = Restoring(self._trainer, parts)
        self._has_begun = False

    def attach(self) -> None:
        """Follow the training loaders, from ``setup`` on. A second call does nothing."""
        if self._is_attached:
            return
        self._is_attached = True
        run = self._parts.switches.run
        self._parts.switches.probe(self._trainer)
        run(compat.HOOKED, lambda: self._parts.hooked.note_limits(self._trainer))
        run(compat.LOADERS, self._follow_loaders)
        self.once.follow_tuners(self._patches)
        follow_named(self._trainer, self._patches)
        self._callbacks = list(self._trainer.callbacks)  # type: ignore[attr-defined] # Lightning's Trainer has it
        # After on_train_start of all callbacks and of the module, which are called again in a resumed run.
        self._patches.wrap(self._trainer.strategy, "on_train_start", partial(partial, self._after_train_start))
        seams = StepBoundaries.of(self._trainer)
        seams.is_on = self.can(compat.BOUNDARIES)
        seams.add(self)
        self._patches.callback(seams.remove, self)

    def _follow_loaders(self) -> None:
        restoring = self._restoring
        paused = self.once.paused
        positions = restoring.position_for, restoring.has_positions
        loaders = Loaders(self._trainer, *positions, restoring.before_step, lambda: self.data_resume, paused)
        self._patches.callback(loaders.end)
        self._parts.loaders = loaders
        self._parts.switches.run(compat.REQUESTS, loaders.follow_requests)

    def can(self, part: str) -> bool:
        """Whether a part of :mod:`~lightning_spot.state.compat` can do its work; from :meth:`attach` on."""
        return self._parts.switches.is_on(part)

    def detach(self) -> None:
        """Let the trainer go. A second call does nothing."""
        self._patches.close()
        self._is_attached = False
        self._parts.gradient_order.end()
        self._restoring.end()
        self._renew()

    def _after_train_start(self, on_train_start: Callable[[], None]) -> None:
        on_train_start()
        if not is_tuning(self._trainer, self._callbacks):
            self._begin()

    def _begin(self) -> None:
        """When training begins: give it what no later place would, and note how everything is. Once for each fit."""
        if self._has_begun:
            return
        self._has_begun = True
        trainer, parts, restoring, run = self._trainer, self._parts, self._restoring, self._parts.switches.run
        run(compat.LOGGERS, lambda: loggers.keep_whole(trainer, self._patches))
        run(compat.HOOKED, lambda: parts.hooked.begin(trainer))
        restoring.begin()
        due = restoring.due
        self.fixed_steps.check(trainer)
        parts.buffers.begin(parts.module)
        run(compat.BUCKETS, lambda: parts.gradient_order.begin(trainer, due.get("gradient_order", [])))
        run(compat.HOOKED, lambda: self._untracked.begin(trainer, restoring.untracked))
        parts.hooked.lost.update(restoring.lost)
        reasons = why_loaders_are_not_exact(parts.loaders) if parts.loaders is not None else []
        made = buffers.made_in_training(parts.module, due.get("buffers", {}))
        anew = [
            *builtin_callbacks.what_begins_anew(trainer),
            *self._untracked.begin_anew([*restoring.lost, *made]),
            *what_is_rank_0s(trainer),
            *parts.hooked.what_is_apart(),
        ]
        clock, alone = builtin_callbacks.what_goes_by_the_clock, builtin_callbacks.what_lightning_alone_keeps
        found = [*reasons, *clock(trainer), *alone(trainer), *(anew if due else [])]
        say_not_exact([*restoring.findings, *restoring.what_has_other_data(), *found])
        restoring.go_on_without_batch()

    # -- capture --------------------------------------------------------------------------------------------------

    def dump(self, *, before_validation: bool = False, at_end: bool = False) -> Dump:
        """The whole state of this step.

        Args:
            before_validation: whether a validation follows the step.
            at_end: whether the run has come to its end, outside any epoch.
        """
        trainer, parts, run = self._trainer, self._parts, self._parts.switches.run
        parts.gradient_order.stepped(trainer)
        # It calls the user's hooks, and ranks that share an optimizer's state wait for each other in it.
        checkpoint = run(compat.SNAPSHOTS, lambda: checkpoint_of(trainer), (AttributeError, TypeError))
        checkpoint = checkpoint or checkpoint_through_save(trainer)
        self._say_left_out(leave_out_callbacks(checkpoint))
        added = run("skipped batches", lambda: loops.even_out(checkpoint)) or {}
        mark = loops.mark_before_validation
        total = run(compat.PROGRESS, lambda: mark(checkpoint)) if before_validation else None
        places = loggers.places_of
        return Dump(
            checkpoint=checkpoint,
            state={**self._parts.capture(at_end=at_end), "added": added},
            validation_progress=total,
            loggers=run(compat.LOGGERS, lambda: places(trainer, before_validation=before_validation, at_end=at_end))
            or [],
            untracked=run(compat.HOOKED, lambda: self._untracked.names(trainer)) or [],
            lost=sorted(parts.hooked.lost),
        )

    def _say_left_out(self, names: list[str]) -> None:
        if names:
            text = (
                "hyperparameters that hold callbacks are not in snapshots: {about}. No resume needs them. Leave them"
                " out with save_hyperparameters(ignore=[...])."
            )
            say(logging.WARNING, "hyperparameters-left-out", text, about=", ".join(names), only_rank_zero=True)

    # -- resume ---------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], *, of_another_run: bool = False) -> None:
        """Take the exact state of a checkpoint, if it has one; it is put back when training reaches its place.

        Args:
            checkpoint: that Lightning loads.
            of_another_run: whether another run took it, whose logs stay its own.
        """
        if self._is_attached:  # or it is a fit whose state is not kept
            with_ranks(checkpoint, read_checkpoint)  # a file that the user named was read by Lightning
            self._restoring.load(checkpoint, of_another_run=of_another_run)

    def end_untrained(self) -> None:
        """At the end of ``fit``: of a run that was complete already, put back what a program may read now."""
        self._restoring.end_untrained()
        if not self._has_begun:
            say_not_exact(self._restoring.findings)

    def before_validation(self, trainer: pl.Trainer) -> None:
        """Of a run resumed in front of a validation: put back what that needs."""
        self._restoring.before_validation()

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Of a run whose loaders could not be positioned: what else was saved is put back after its first batch."""
        self._restoring.go_on()
        self._parts.gradient_order.stepped(trainer)


class Restoring(OfTrainer):
    """Puts the exact state of a checkpoint back in one ``fit``. Without a checkpoint, nothing here does anything.

    Args:
        trainer: that fits.
        parts: of its state.

    Attributes:
        untracked: names of attributes that the training before had changed, and that do not come back.
        lost: likewise, of modules.
        findings: what is known not to be exact before training begins.
    """

    def __init__(self, trainer: pl.Trainer, parts: StateParts) -> None:
        super().__init__(trainer)
        self.untracked: list[str] = []
        self.lost: list[str] = []
        self.findings: list[str] = []
        self._parts = parts
        self._run = parts.switches.run
        self._patches = Patches()
        self._values: State | None = None  # until the first step
        self._steps_are_over = False  # whether the run was to take no more of them
        self._has_begun = self._waits_for_begin = False
        self._positions: State | None = None
        self._random: State | None = None
        self._val_total: dict[str, int] | None = None
        self._loaded: dict[str, torch.Tensor] = {}  # weights, until hooks at the start of training are done
        self._others: OtherRanks | None = None  # where those that took the snapshot had other shares of the data

    @property
    def due(self) -> State:
        """The state that was loaded, until the first step; nothing of a run that begins."""
        return self._values or {}

    def load(self, checkpoint: dict[str, Any], *, of_another_run: bool = False) -> None:
        """Take the exact state of a checkpoint, if it has one that fits; see :meth:`FitState.load`."""
        shared, trainer = checkpoint.get(KEY), self._trainer
        if shared is None:
            self.findings.append(builtin_callbacks.why_without_exact_state(trainer))
            return
        shared = in_present_form(shared)
        is_known = shared["version"] == VERSION
        found = shared["ranks"][0]["found"] if is_known else {}
        self._run(compat.TUNERS, lambda: builtin_callbacks.rest_tuners(trainer, found, self._patches))
        if not is_known:
            self.findings.append(
                f"the exact state of the snapshot has version {shared['version']}, and this lightning_spot writes"
                f" {VERSION}: weights, optimizers and loops are restored; random numbers and the position in the data"
                " are not. Resume with the version of lightning_spot that took it"
            )
            return
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended and your dataloader is")
        self._values = self._positions = values = self._of_this_rank(shared)
        self._random = values["random"]
        self._val_total = shared["validation_progress"]
        if (loaders := self._parts.loaders) is not None:
            self._run(compat.LOADERS, loaders.ask_again)
        self._parts.restore(Stage.LOAD, values)
        is_over = 0 <= trainer.max_steps <= checkpoint["global_step"]
        is_over |= trainer.max_epochs is not None and 0 <= trainer.max_epochs <= checkpoint["epoch"]
        continued = partial(loggers.continue_in, of_another_run=of_another_run, is_over=is_over)
        self._run(compat.LOGGERS, lambda: continued(trainer, shared["loggers"]))
        # Of a run that was to go on, and is given less steps than it has taken, nothing is trained, and nothing ends.
        limits = (trainer.max_steps, shared["max_steps"])
        reached = all(0 <= limit <= checkpoint["global_step"] for limit in limits)
        stops = values["should_stop"] and self._run(compat.PROGRESS, lambda: loops.may_stop(trainer, checkpoint))
        self._steps_are_over = bool(stops) or reached
        self.untracked, self.lost = shared["untracked"], shared["lost"]
        self._loaded = {} if is_sharded(trainer) else buffers.loaded(trainer.lightning_module, checkpoint)
        if states := precise_of(checkpoint):
            self._keep_dtypes(states, buffers.dtypes_of(checkpoint))
        self._run("states of callbacks", lambda: builtin_callbacks.before_loading(trainer, checkpoint))
        self._run(compat.PROGRESS, lambda: self._enter_stopped(checkpoint))

    def _of_this_rank(self, shared: State) -> State:
        trainer, ranks = self._trainer, shared["ranks"]
        if are_these(shared, trainer):
            return ranks[trainer.global_rank]  # type: ignore[no-any-return]
        self._others = OtherRanks(ranks, trainer.global_rank, trainer.world_size, share_of(trainer), shared["shares"])
        return self._others.values(trainer)

    def begin(self) -> None:
        """When training begins: what no later place would put back."""
        trainer, values = self._trainer, self._values
        self._has_begun = True
        if values is None:
            return
        self._run(compat.PROGRESS, lambda: loops.forget_validations(trainer))
        self._restore_overwritten()
        self._parts.restore(Stage.TRAIN_START, values)
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
        buffers.keep_kinds(module, loaded)
        if written:
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
        trainer, once = self._trainer, Patches()
        self._patches.push(once)

        def load_optimizer_state_dict(load: Callable[[Mapping[str, Any]], None], checkpoint: Mapping[str, Any]) -> None:
            once.close()
            load(checkpoint)
            names = names_of(trainer.lightning_module)
            for optimizer, state in zip(trainer.optimizers, states, strict=False):
                keep_dtypes(optimizer, state, lambda parameter: dtypes.get(names.get(id(parameter), "")))

        once.wrap(trainer.strategy, "load_optimizer_state_dict", partial(partial, load_optimizer_state_dict))

    def end(self) -> None:
        """Let the strategy and the loops go."""
        self._patches.close()

    def _go_on_from(self, others: OtherRanks, values: State) -> None:
        """Of a run that other ranks have left: its epoch has more batches now, or less."""
        trainer = self._trainer
        done = max((done for each in self._followers if (done := each.batches_done()) is not None), default=None)
        if done is not None:
            done = int(min(done, trainer.num_training_batches))  # of which a limit, or another loader, leaves less
            self._run(compat.PROGRESS, lambda: loops.number_batches(trainer, done))
        ended = all(position is not None and position.get("exhausted") for position in values["loaders"] or [None])
        is_over = ended or (done is not None and done >= trainer.num_training_batches)
        others.gather_anew(values, is_over=is_over)
        # Batches that these ranks would have seen by now may end with a validation, where those of the others had none.
        is_place = is_over or bool(done and others.is_between_batches)
        if is_place and self._val_total is None and not self._steps_are_over and self._validates(should_stop=False):
            self._val_total = self._run(compat.PROGRESS, lambda: loops.validate_first(trainer, self._patches))
        say(logging.INFO, "ranks-changed", "{about}", about=others.line(trainer), only_rank_zero=True)
        self.findings += others.reasons

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

    def _enter_stopped(self, checkpoint: dict[str, Any]) -> None:
        """Of a run that takes no more steps: have Lightning come to the end of its epoch."""
        values, validates = self._values, self._val_total is not None
        if values is None or not self._steps_are_over or not loops.is_in_epoch(checkpoint):
            return
        loops.enter_epoch(self._trainer, self._patches, validates=validates, should_stop=values["should_stop"])

    @property
    def _followers(self) -> list[Positioned]:
        """Of the training loaders that there are."""
        return self._parts.loaders.training if self._parts.loaders is not None else []

    @property
    def _places(self) -> list[State | None] | None:
        """Where the training loaders of the snapshot were; ``None`` if that is not known."""
        return self._positions["loaders"] if self._positions is not None else None

    def position_for(self, follower: Positioned) -> State | None:
        """Position at which a loader begins its epoch: the saved one for the first epoch after a resume."""
        followers, places = self._followers, self._places
        index = next((number for number, each in enumerate(followers) if each is follower), None)
        if index is None or self._random is None or places is None or len(places) != len(followers):
            return None
        return places[index] if self._others is None else self._others.position(follower.loader, index)

    def what_has_other_data(self) -> list[str]:
        """Why training loaders do not begin where those of the snapshot were."""
        followers, places = self._followers, self._places
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
        self.go_on()
        if random is not None:
            restore_random(random, self._trainer.strategy.root_device)
        return random is not None

    def go_on(self) -> None:
        """Put back what belongs to the step. A second call does nothing."""
        values, self._values = self._values, None
        if values is None:
            return
        trainer = self._trainer
        self._run("skipped batches", lambda: loops.restore(trainer, values["added"]))
        self._parts.restore(Stage.FIRST_BATCH, values)
        # Lightning leaves metric-driven schedulers alone at the end of an epoch it was restarted in: it does not have
        # the metrics. Here they are.
        self._run(compat.PROGRESS, lambda: compat.RESTARTING.set(trainer.fit_loop, False))

    def end_untrained(self) -> None:
        """At the end of a ``fit`` that had nothing left to train: the program goes on as it did after training.

        It draws what it drew then, forecasts with buffers that no ``state_dict`` has, reads what was logged last. A
        further fit of this trainer takes what hooks changed as it finds it.
        """
        values = self._values
        if values is None:
            return
        if not self._has_begun:
            self._parts.restore(Stage.UNTRAINED, values)
        self._parts.restore(Stage.END, values)
        self._run(compat.PROGRESS, lambda: loops.end_restart(self._trainer))


def why_loaders_are_not_exact(loaders: Loaders) -> list[str]:
    """What of the loaders does not come back to where it was; of those for validation, what their workers draw."""
    reasons = [reason for loader in loaders.training for reason in why_not_exact(loader)]
    return reasons + [reason for loader in loaders.validation for reason in why_workers_are_not_exact(loader)]
