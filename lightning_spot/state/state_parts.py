"""The exact state of one rank as one flat table: what is captured for each snapshot, and when it is put back.

Generators, the position in the data, metric states, means of ``self.log(on_epoch=True)``, logged values, buffers that
are in no ``state_dict``, gradients in mid-accumulation, what hooks and callbacks changed: what Lightning leaves out of
a checkpoint and an exact resume needs. Read from Lightning 2.6; ``tests/integration/test_exact.py`` and
``tests/integration/test_exact_table.py`` guard it.

What DDP keeps to itself: the order in which gradients became ready in a run's first step, and who has buffers.

DDP rebuilds its buckets after that step, once. They decide in which order ranks add each element up, so with more than
two of them a resumed run would round its first step in another way than an undisturbed one: its DDP is new and has its
first buckets. Before that step, a backward pass without values goes through DDP in the recorded order, and DDP rebuilds
the buckets it had. (torch 2.6 to 2.13: ``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``.)
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_spot.capture.tensors import copies_of, local_of
from lightning_spot.say import say
from lightning_spot.state import compat, logged_values
from lightning_spot.state.buffers import Buffers
from lightning_spot.state.builtin_callbacks import (
    capture_checkpoints,
    capture_found,
    capture_modules,
    restore_checkpoints,
    restore_modules,
)
from lightning_spot.state.loaders import Loaders
from lightning_spot.state.logged_values import (
    capture_last,
    capture_results,
    is_in_epoch,
    restore_in_epoch,
    restore_last,
    restore_results,
)
from lightning_spot.state.module_state import ModuleState
from lightning_spot.state.optimizers import restore_toggled, toggled
from lightning_spot.state.per_trainer import OfTrainer
from lightning_spot.state.randomness import State, capture_random, restore_random
from lightning_spot.state.sharded import gradient_like

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch


logger = logging.getLogger(__name__)


class GradientOrder:
    """Records the order in the first step of a run, and has DDP see it again after a resume."""

    def __init__(self) -> None:
        self._indices: dict[int, None] = {}
        self._known = False
        self._begin_step = 0
        self._hooks: list[Callable[[], None]] = []

    def saved(self) -> list[int]:
        """Indices into ``parameters()`` in the order of the first step; empty where it plays no role."""
        return list(self._indices) if self._known else []

    def begin(self, trainer: pl.Trainer, saved: list[int]) -> None:
        """When training begins: rehearse what was saved, or record.

        Args:
            trainer: whose model it is.
            saved: of a snapshot; empty in a fresh run.
        """
        ddp = trainer.model
        if not isinstance(ddp, DistributedDataParallel) or not _rebuilds(ddp):
            return
        parameters = list(ddp.parameters())
        if saved and all(index < len(parameters) for index in saved):
            _rehearse(ddp, [parameters[index] for index in saved])
            self._indices, self._known = dict.fromkeys(saved), True
            return
        self._begin_step = trainer.global_step
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._ready, index)
                )
                self._hooks.append(hook.remove)

    def stepped(self, trainer: pl.Trainer) -> None:
        """A batch is done, and maybe the first step."""
        if self._hooks and trainer.global_step > self._begin_step:
            self.end()
            wanted = sum(parameter.requires_grad for parameter in trainer.lightning_module.parameters())
            self._known = len(self._indices) == wanted

    def end(self) -> None:
        """Stop recording."""
        while self._hooks:
            self._hooks.pop()()

    def _ready(self, index: int, _: torch.Tensor) -> None:
        self._indices.pop(index, None)  # of several backward passes the last counts: DDP looks at the one it reduces in
        self._indices[index] = None


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether DDP rebuilds buckets, and nobody's communication hook would take the rehearsal for a step."""
    return not (ddp.find_unused_parameters or ddp.static_graph or compat.COMM_HOOKS.of(ddp))


def _rehearse(ddp: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> None:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    reducer = compat.REDUCER.of(ddp)
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    with torch.enable_grad():
        total = torch.zeros((), device=parameters[0].device)
        for parameter in reversed(parameters):  # autograd runs what was made last first
            total = total + parameter.flatten()[:0].sum().to(total)  # of no element: no value can spoil it
    total.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    logger.debug("the order in which %d gradients become ready was rehearsed", len(parameters))


def shares_buffers(trainer: pl.Trainer) -> bool | None:
    """Whether DDP gives all ranks the buffers of rank 0 before the next step; ``None`` without DDP.

    It does not behind a step that only gathered gradients, nor behind the first one by hand. From then on each rank has
    statistics of its own, and a DDP that is made again for a resume would take them away.
    """
    ddp = trainer.model
    return bool(compat.SHARES_BUFFERS.of(ddp)) if isinstance(ddp, DistributedDataParallel) else None


def restore_sharing(trainer: pl.Trainer, saved: bool | None) -> None:
    """Have it do as :func:`shares_buffers` found."""
    if saved is not None and isinstance(trainer.model, DistributedDataParallel):
        compat.SHARES_BUFFERS.set(trainer.model, saved)


class Stage(enum.Enum):
    """When parts of a rank's state are put back. Each loader asks for its position by itself, as its epoch begins.

    Attributes:
        LOAD: Lightning has loaded the checkpoint; it has not asked for loaders yet, nor whether there is more to train.
        TRAIN_START: all hooks at the start of training are done, which a resumed run calls, too.
        FIRST_BATCH: the first step comes next, or the validation that the run was stopped in front of.
        UNTRAINED: ``fit`` ends, and training has not begun since the run was complete: a further fit may follow.
        END: ``fit`` ends, and no step was taken: the program goes on as after training.
    """

    LOAD = enum.auto()
    TRAIN_START = enum.auto()
    FIRST_BATCH = enum.auto()
    UNTRAINED = enum.auto()
    END = enum.auto()


class StateParts(OfTrainer):
    """The exact state of this rank in one ``fit``: what its parts have noted, captured together, put back by stages.

    Args:
        trainer: that fits.

    Attributes:
        switches: which parts can do their work.
        buffers: of the module.
        hooked: what hooks change.
        gradient_order: in which DDP's gradients become ready.
        loaders: of the fit; ``None`` where they are not followed, as in one that takes no snapshots.
        at_end: whether what is captured is that of a run at its end, outside any epoch.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.switches = compat.Switches()
        self.buffers = Buffers()
        self.hooked = ModuleState()
        self.gradient_order = GradientOrder()
        self.loaders: Loaders | None = None
        self.at_end = False
        self._modules: list[tuple[str, torch.nn.Module]] | None = None

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer that fits."""
        return self._trainer

    @property
    def module(self) -> pl.LightningModule:
        """Its module."""
        return self._trainer.lightning_module

    @property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """All modules in it, with their names; found once for each capture."""
        return self._modules if self._modules is not None else list(self.module.named_modules())

    def capture(self, *, at_end: bool = False) -> State:
        """The state of this rank, as values of its own that load with ``weights_only=True``.

        Args:
            at_end: whether the run has come to its end, outside any epoch.
        """
        self.at_end, self._modules = at_end, self.modules
        try:
            return {part.name: self._run(part, partial(part.capture, self)) for part in PARTS}
        finally:
            self._modules = None

    def restore(self, stage: Stage, values: State) -> None:
        """Put back what :meth:`capture` found, as far as it belongs to a stage.

        Args:
            stage: that has come.
            values: of this rank.
        """
        for part in PARTS:
            restore, saved = part.restore.get(stage), values.get(part.name)
            if restore is not None and saved is not None:
                self._run(part, partial(restore, self, saved))

    def _run(self, part: StatePart, do: Callable[[], Any]) -> Any:
        return self.switches.run(part.requires, do) if part.requires is not None else do()

    # -- parts of which more has to be known ----------------------------------------------------------------------

    def random(self) -> State:
        """Generators of the process and of the device."""
        return capture_random(self._trainer.strategy.root_device)

    def positions(self) -> list[State | None]:
        """Where training loaders are."""
        return self.loaders.positions(at_end=self.at_end) if self.loaders is not None else []

    def around_loaders(self) -> State | None:
        """What else belongs to loaders."""
        return self.loaders.capture() if self.loaders is not None else None

    def metrics(self) -> State:
        """States of metrics in the module."""
        return logged_values.metrics_of(self.modules)

    def changed_buffers(self) -> State:
        """Buffers that the checkpoint lacks."""
        return self.buffers.capture(self.module, is_first=self._trainer.is_global_zero)

    def gradients(self) -> State:
        """Copies of those on which the next step may build: it adds to them while the snapshot is copied."""
        if self.at_end or not self._has_live_gradients():
            return {}
        named = self.module.named_parameters()
        present = {name: local_of(parameter.grad.detach()) for name, parameter in named if parameter.grad is not None}
        copies = copies_of(present)
        if any(copies[name].device != present[name].device for name in present):
            text = (
                "the GPU of rank {about} has no memory for copies of gradients. Training waits for their copies to the"
                " host. Call zero_grad() after step(): then there are none."
            )
            say(logging.WARNING, "no-gradient-copies", text, about=self._trainer.global_rank)
        return copies

    def _has_live_gradients(self) -> bool:
        """Whether the next step may build on gradients: in mid-accumulation, or where only the user knows."""
        loop = self._trainer.fit_loop.epoch_loop
        if not self.module.automatic_optimization:
            return True
        accumulates = self.switches.run(compat.PROGRESS, lambda: bool(compat.SHOULD_ACCUMULATE.of(loop)()))
        return accumulates is not False

    def restore_gradients(self, saved: State) -> None:
        """Give parameters the gradients that they had."""
        parameters = dict(self.module.named_parameters())
        for name, value in saved.items():
            if name in parameters:
                parameters[name].grad = gradient_like(parameters[name], value)


Capture = Callable[[StateParts], Any]
Restore = Callable[[StateParts, Any], object]


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
    return lambda parts: function(parts.trainer)


def _to(function: Callable[[pl.Trainer, Any], object], *stages: Stage) -> Mapping[Stage, Restore]:
    return dict.fromkeys(stages, lambda parts, saved: function(parts.trainer, saved))


def _restore_random(trainer: pl.Trainer, saved: State) -> None:
    restore_random(saved, trainer.strategy.root_device)


def _restore_metrics(trainer: pl.Trainer, saved: State) -> None:
    logged_values.restore_metrics(trainer.lightning_module.named_modules(), saved)


def _restore_stop(trainer: pl.Trainer, saved: bool) -> None:
    trainer.should_stop = saved


def _restore_buffers(parts: StateParts, saved: State) -> None:
    parts.buffers.restore(parts.module, saved)


def _to_loaders(function: Callable[[Loaders, Any], object]) -> Restore:
    return lambda parts, saved: function(parts.loaders, saved) if parts.loaders is not None else None


_AROUND_LOADERS = {
    Stage.LOAD: _to_loaders(Loaders.resume),
    Stage.TRAIN_START: _to_loaders(Loaders.restore),
    Stage.FIRST_BATCH: _to_loaders(Loaders.go_on),
}
_HOOKED: Mapping[Stage, Restore] = {
    Stage.LOAD: lambda parts, saved: parts.hooked.restore_limits(parts.trainer, saved),
    Stage.TRAIN_START: lambda parts, saved: parts.hooked.restore(parts.trainer, saved),
    Stage.FIRST_BATCH: lambda parts, saved: parts.hooked.restore_generators(parts.trainer, saved),
    Stage.UNTRAINED: lambda parts, saved: parts.hooked.restore(parts.trainer, saved),
}

PARTS = (
    # Before a step, generators are set last of all: see Restoring.
    StatePart("random", None, StateParts.random, _to(_restore_random, Stage.END)),
    StatePart("loaders", compat.LOADERS, StateParts.positions),
    StatePart("around_loaders", compat.LOADERS, StateParts.around_loaders, _AROUND_LOADERS),
    StatePart("metrics", compat.METRICS, StateParts.metrics, _to(_restore_metrics, Stage.FIRST_BATCH)),
    StatePart("logged", compat.LOGGED, _of(capture_last), _to(restore_last, Stage.FIRST_BATCH, Stage.END)),
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
    StatePart("should_stop", None, lambda parts: parts.trainer.should_stop, _to(_restore_stop, Stage.FIRST_BATCH)),
    StatePart(
        "buffers", None, StateParts.changed_buffers, dict.fromkeys((Stage.FIRST_BATCH, Stage.END), _restore_buffers)
    ),
    StatePart("shared_buffers", compat.SHARING, _of(shares_buffers), _to(restore_sharing, Stage.FIRST_BATCH)),
    StatePart("hooked", compat.HOOKED, lambda parts: parts.hooked.capture(parts.trainer, parts.modules), _HOOKED),
    StatePart("toggled", compat.TOGGLES, _of(toggled), _to(restore_toggled, Stage.TRAIN_START, Stage.UNTRAINED)),
    StatePart("gradients", None, StateParts.gradients, {Stage.FIRST_BATCH: StateParts.restore_gradients}),
    StatePart("gradient_order", None, lambda parts: parts.gradient_order.saved()),
)
"""All parts, in the order in which they are captured, and put back within a stage."""
