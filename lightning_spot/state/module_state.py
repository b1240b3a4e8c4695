"""What hooks changed since training began and no checkpoint of Lightning holds: captured as plain values, put back.

A resumed run does not call ``on_train_epoch_start`` of the epoch it goes on in, and never those of earlier epochs. So
what they did is kept: which parameters are frozen, plain attributes of modules (``training``, a dropout's ``p``, a
counter, a list of outputs) and of their classes, settings of the Trainer. What did not change is not kept: there the
program's word counts. What is no plain value is named where training has changed it. A module that has made such a
thing again (a cache, a file) keeps all of its attributes for itself: they belong together. Where it has made a data set
of another class, modules within it do so, too: a resumed run trains the rest of the epoch with that of its start.
Values come back one by one into what the program makes: its own ties (of weights, of views of a tensor) hold, and those
that training made are named.

What changes in data modules, a user's callbacks and optimizers is named only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain, repeat
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.data import Dataset

from lightning_spot.capture.tensors import local_of, storage_address
from lightning_spot.config import format_names
from lightning_spot.patches import Patches
from lightning_spot.state import compat, namespaces
from lightning_spot.state.buffers import Buffers, Marks, marks_of
from lightning_spot.state.builtin_callbacks import tuners
from lightning_spot.state.change_detector import (
    SCALARS,
    STATEFUL,
    ChangeDetector,
    class_attributes,
    is_value,
    of_classes,
    own_classes,
)
from lightning_spot.state.logged_values import is_metric
from lightning_spot.state.per_trainer import OfTrainer
from lightning_spot.state.plain_values import NotPlain, are_alike, copy_of, is_generator, put
from lightning_spot.state.randomness import GENERATORS

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]
NamedModule = tuple[str, nn.Module]
Place = tuple[Any, ...]
"""The name of a module, of an attribute, and the keys of containers within that."""

Owners = Mapping[str, Mapping[str, Any]]
"""Attributes of modules, parameters and buffers among them, by the module's name; likewise of callbacks."""

Groups = list[list[str]]
"""Names of places that share memory, each place in at most one group."""

_MOST_SHARERS = 100_000
_DEEPEST = 8

_SETTINGS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
    "reload_dataloaders_every_n_epochs",
    "val_check_interval",
)
_LIMITS = ("max_epochs", "max_steps")
"""Settings that the loops have."""

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that are torch's."""

_HUNG: frozenset[type] = frozenset((list, dict, set, np.ndarray))
"""Kinds of what a program may hang on a module of torch, besides tensors: torch has such under private names."""

_COMPUTED = ("_g", "_orig")
"""What torch's weight norm, spectral norm and pruning call the parameters that they make an attribute of."""

_MOST_OF_OTHERS = 1000
"""Of a longer container of a callback's, only the length is looked at: it is named, but not kept."""

_KEEPS_ITS_OWN = ("state_dict", "on_save_checkpoint")
_OF_OPTIMIZERS = ("defaults", "param_groups", "state")
_SHIPPED = ("lightning.", "pytorch_lightning.", "lightning_spot.")

_NOT_THERE, _NOT_LOOKED_AT = object(), object()


# -- what has changed -------------------------------------------------------------------------------------------------


Names = set[tuple[str, ...]]
"""Of values that were changed: of parameters, settings of the Trainer, and attributes by the module's name."""


def names_in(captured: State) -> Names:
    """The names of what :meth:`ModuleState.capture` found to be changed."""
    attributes = captured["attributes"].items()
    return {
        *(("trains", name) for name in captured["trains"]),
        *(("settings", name) for name in captured["settings"]),
        *(("attributes", module, name) for module, own in attributes for name in own),
    }


class Attributes:
    """The attributes of one module, or of a class, as they were.

    Args:
        module: name of the module, by which they are known.
        part: the module, or a class of the user's.
        detector: stamps their values.

    Attributes:
        lost: names of what has changed, as ``Class.attribute``, and is not kept.
        has_made_data: whether a data set is among that, of another class than the one in its place before: what the
            modules within it have changed may fit that one only.
    """

    def __init__(self, module: str, part: Any, detector: ChangeDetector) -> None:
        self._module = module
        self._ignored = _not_the_users(part)
        # Modules of torch keep nothing of their own that their numbers would have to agree with.
        self._is_torchs = type(part).__module__.startswith("torch.nn")
        own = {name: value for name, value in vars(part).items() if name not in self._ignored}
        self._stamps = {name: self._stamp(name, value, detector) for name, value in own.items()}
        self._generators = {(name, type(value)) for name, value in own.items() if issubclass(type(value), GENERATORS)}
        self._not_plain = {
            name: None if is_value(value) else value for name, value in own.items() if not _is_plain(value)
        }
        self.lost: set[str] = set()
        self.has_made_data = False

    def changed(self, part: Any, before: Names, detector: ChangeDetector, *, keeps: bool = True) -> State:
        """Copies of what has changed; of ``training`` only, where something that is not plain was made again.

        Args:
            part: the module, or the class.
            before: names of what counts as changed.
            detector: stamps values.
            keeps: whether more than ``training`` may be kept.
        """
        kept: State = {}
        lost: set[str] = set()
        was_made = not keeps
        for name, value in list(vars(part).items()):  # others may write to it
            if name in self._ignored:
                continue
            is_as_before = self._stamps.get(name, _NOT_THERE) == self._stamp(name, value, detector)
            if is_as_before and ("attributes", self._module, name) not in before:
                continue
            try:
                if issubclass(type(value), GENERATORS) and (name, type(value)) not in self._generators:
                    raise NotPlain  # a process that has none there cannot have it drawn on
                kept[name] = copy_of(value)
            except NotPlain:
                if not is_as_before and not _is_own_method(part, name, value):
                    lost.add(name)
                    was_made |= self._is_made(name, value)
        if was_made:
            lost |= kept.keys() - {"training"}
            kept = {name: value for name, value in kept.items() if name == "training"}
        kind = part if isinstance(part, type) else type(part)
        self.lost |= {f"{kind.__qualname__.rpartition('.<locals>.')[2]}.{name}" for name in lost}
        return kept

    def _is_made(self, name: str, value: Any) -> bool:
        """Whether a value that is not plain is another one than there was, which may have been plain."""
        first = self._not_plain.get(name, _NOT_THERE)
        kinds = type(first), type(value)
        self.has_made_data |= kinds[0] is not kinds[1] and all(issubclass(kind, Dataset) for kind in kinds)
        return first is not None and first is not value

    def _stamp(self, name: str, value: Any, detector: ChangeDetector) -> Any:
        kind = type(value)
        is_hung = kind is torch.Tensor or (kind in _HUNG and not name.startswith("_"))
        return detector.stamp(value) if is_hung or kind in SCALARS or not self._is_torchs else _NOT_LOOKED_AT


def _is_plain(value: Any) -> bool:
    if type(value) in SCALARS:
        return True
    try:
        copy_of(value)
    except NotPlain:
        return False
    return True


def _is_own_method(part: nn.Module, name: str, value: Any) -> bool:
    """Whether a method was put back in its own place, as Lightning does with DDP."""
    is_of_part = type(value) is MethodType and value.__self__ is part  # to a proxy of what is gone, isinstance fails
    return is_of_part and value.__func__ is getattr(type(part), name, None)


def _not_the_users(part: Any) -> frozenset[str]:
    """Names of attributes of a module, or of a class, that a program does not set."""
    if isinstance(part, type):
        return frozenset(vars(part).keys() - class_attributes(part).keys())
    own = _own_names() if isinstance(part, namespaces.classes("", "LightningModule")) else _OF_MODULES
    parameters = compat.PARAMETERS.of(part).keys()
    computed = {name.removesuffix(end) for end in _COMPUTED for name in parameters if name.endswith(end)}
    return own | computed | {name for name in vars(part) if name.startswith(compat.COMPOSABLE)}


@cache
def _own_names() -> frozenset[str]:
    """Attributes that belong to Lightning."""
    kind = namespaces.classes("", "LightningModule")[0]
    return frozenset({*vars(kind()), "_hparams", "_hparams_initial"}) - {"training"}


class ModuleState:
    """Knows how everything was when training began, and so what was changed.

    Attributes:
        before: what was changed before that, and no resumed run repeats: it counts, too.
        lost: names of attributes that have changed, as ``Class.attribute``, and that no resumed run gets back.
    """

    def __init__(self) -> None:
        self.before: Names = set()
        self.lost: set[str] = set()
        self._trains: dict[str, bool] = {}
        self._modules: dict[str, Attributes] = {}
        self._settings: State = {}
        self._limits: State = {}  # that the program gave
        self._kinds: dict[str, type] = {}
        self._captured = 0
        self._registered: list[tuple[int, int, bool]] = []  # parameters and buffers, when sharing was looked at
        self._shared: Groups = []
        self._untrained: list[str] = []
        self._apart: list[str] = []  # what shares memory otherwise than in the training before

    def begin(self, trainer: pl.Trainer) -> None:
        """Note how everything is, after all ``on_train_start``: a resumed run calls those, too."""
        modules = dict(trainer.lightning_module.named_modules())
        self._trains = _trains(_registered(trainer.lightning_module))
        detector = ChangeDetector(modules.values(), restored=_restored(trainer))
        self._modules = {name: Attributes(name, part, detector) for name, part in _parts(modules.items())}
        self._settings = _settings(trainer)
        self._kinds = {name: type(part) for name, part in modules.items()}

    def capture(self, trainer: pl.Trainer, modules: Iterable[NamedModule]) -> State:
        """What differs by now, as values that load with ``weights_only=True``.

        Args:
            trainer: whose settings may differ.
            modules: all of the trainer's module.
        """
        before, known, modules = self.before, self._modules, list(modules)
        changed, detector = {}, ChangeDetector([part for _, part in modules], restored=_restored(trainer))
        makes_data: tuple[str, ...] = ()
        for name, part in _parts(modules):
            if name in known:
                within = makes_data and name.startswith(makes_data)
                changed[name] = known[name].changed(part, before, detector, keeps=not within)
                self.lost |= known[name].lost
                makes_data += (f"{name}." if name else "",) if known[name].has_made_data else ()
        others = (name for name, part in modules if self._kinds.get(name) is not type(part))
        self.lost |= {name for name in others if not issubclass(self._kinds.get(name, object), LazyModuleMixin)}
        keeps = any(type(each) not in SCALARS for own in changed.values() for each in own.values())
        registered = _registered(trainer.lightning_module)
        self._look_what_is_shared(trainer, registered.values(), keeps=keeps)

        def since(kind: str, first: State, now: State) -> State:
            return {
                name: value
                for name, value in now.items()
                if (kind, name) in before or first.get(name, _NOT_THERE) != value
            }

        trains = _trains(registered)
        return {
            "trains": since("trains", {**trains, **self._trains}, trains),
            "attributes": {name: values for name, values in changed.items() if values},
            "shared": self._shared,
            "untrained": self._untrained,
            "settings": since("settings", self._settings, _settings(trainer)),
            "limits": self._limits,
            "before": sorted(before),
        }

    def _look_what_is_shared(self, trainer: pl.Trainer, values: Iterable[torch.Tensor], *, keeps: bool) -> None:
        """Look where it may have changed, else in fewer and fewer snapshots: each tensor is asked for its address."""
        self._captured += 1
        registered = [(id(value), storage_address(value), value.requires_grad) for value in values]
        if keeps or registered != self._registered or self._captured & (self._captured - 1) == 0:
            self._registered, self._untrained = registered, untrained_by_optimizers(trainer)
            self._shared = groups_of(owners_of(trainer.lightning_module), outside_of(trainer))

    def restore(self, trainer: pl.Trainer, saved: State) -> None:
        """Put back what :meth:`capture` returned, after :meth:`begin`."""
        self.before |= {tuple(name) for name in saved["before"]}
        module = trainer.lightning_module
        parameters = dict(module.named_parameters())
        for name, trains in saved["trains"].items():
            if name in parameters:
                parameters[name].requires_grad_(trains)
        attributes = saved["attributes"]
        self._put(trainer, attributes, saved["shared"])
        if saved["shared"] is not None:
            restored = {_name_of((name, key)) for name, own in attributes.items() for key in own}
            tie(saved["shared"], owners_of(module), restored)
            others = set(saved["untrained"]).symmetric_difference(untrained_by_optimizers(trainer))
            shared = groups_of(owners_of(module), outside_of(trainer))
            self._apart = sorted({*differing(saved["shared"], shared), *others})
        for name, value in saved["settings"].items():
            if name not in _LIMITS and hasattr(trainer, name):
                setattr(trainer, name, value)

    def what_is_apart(self) -> Iterator[str]:
        """One sentence on what training had tied, parted or made again, and the program does not, if there is any."""
        if self._apart:
            yield (
                "training had changed what shares memory, or which parameters an optimizer has, and that is as the"
                f" program makes it now: {format_names(self._apart)}. Tie or replace them where they are made, or in"
                " on_train_start"
            )

    @staticmethod
    def _put(trainer: pl.Trainer, attributes: dict[str, State], shared: Groups | None = None) -> None:
        """Put values back, in place where they share memory now as they did in the training before, if that is told."""
        if not attributes:
            return
        module = trainer.lightning_module
        parts, now = dict(_parts(module.named_modules())), _partners(groups_of(owners_of(module), outside_of(trainer)))
        then = _partners(shared) if shared is not None else now
        tied = {place for place, group in now.items() if len(group & then.get(place, frozenset())) > 1}
        for name, values in attributes.items():
            for attribute, value in values.items():
                if name in parts:
                    place = _name_of((name, attribute))
                    put(parts[name], attribute, value, module.device, place=place, tied=tied)

    def note_limits(self, trainer: pl.Trainer) -> None:
        """Note how long the program has training go on, before hooks may change that."""
        self._limits = {name: value for name, value in _settings(trainer).items() if name in _LIMITS}

    def restore_limits(self, trainer: pl.Trainer, saved: State) -> None:
        """Put back how long training is to go on, as far as hooks had changed it: before its loops begin.

        Where the program gives another limit than it gave to the training before, that one counts.
        """
        given, before = self._limits, saved["limits"]
        names = [name for name in _LIMITS if name in saved["settings"] and given.get(name) == before.get(name)]
        limits = {name: saved["settings"][name] for name in names}
        self.before |= {("settings", name) for name in limits}
        if "max_epochs" in limits:
            trainer.fit_loop.max_epochs = limits["max_epochs"]
        if "max_steps" in limits:
            trainer.fit_loop.epoch_loop.max_steps = limits["max_steps"]

    def restore_generators(self, trainer: pl.Trainer, saved: State) -> None:
        """Set generators once more, just before the first step: a loader may draw from them when its epoch begins."""
        kept = saved["attributes"].items()
        generators = {name: {key: each for key, each in own.items() if is_generator(each)} for name, own in kept}
        self._put(trainer, generators)


def _trains(registered: Mapping[Place, torch.Tensor]) -> dict[str, bool]:
    """Which parameters are trained; one that has several names, by each. No buffer is."""
    return {_name_of(place): value.requires_grad for place, value in registered.items()}


def _parts(modules: Iterable[NamedModule]) -> Iterator[tuple[str, Any]]:
    """Modules whose attributes are the user's, and their classes that are; metrics have their own way."""
    classes: dict[str, type] = {}
    metrics: tuple[str, ...] = ()
    for name, part in modules:
        if is_metric(part):
            metrics += (f"{name}.",)
        elif not metrics or not name.startswith(metrics):
            yield name, part
            classes.update((f"class {each.__module__}.{each.__qualname__}", each) for each in own_classes(type(part)))
    yield from classes.items()


def _registered(module: nn.Module) -> dict[Place, torch.Tensor]:
    """Parameters and buffers, by each of their places."""
    return {
        (name, key): value
        for name, part in module.named_modules(remove_duplicate=False)
        for table in (compat.PARAMETERS.of(part), compat.BUFFERS.of(part))
        for key, value in table.items()
        if value is not None
    }


def owners_of(module: nn.Module) -> Owners:
    """Parameters, buffers and attributes of all modules, by each of their names, and of classes."""
    owners: dict[str, dict[str, Any]] = {}
    for (name, key), value in _registered(module).items():
        owners.setdefault(name, {})[key] = value
    for name, part in _parts(module.named_modules(remove_duplicate=False)):
        ignored = _not_the_users(part)
        own = {key: value for key, value in vars(part).items() if key not in ignored and type(value) not in SCALARS}
        owners.setdefault(name, {}).update(own)
    return owners


def _settings(trainer: pl.Trainer) -> State:
    values = {name: getattr(trainer, name, None) for name in (*_SETTINGS, *_LIMITS)}
    return {name: value for name, value in values.items() if type(value) in SCALARS}


# -- what places of a training share: tied weights, views of one tensor, one list under two names ---------------------


def groups_of(inside: Owners, outside: Owners) -> Groups:
    """Which places share memory.

    Values of callbacks, data modules and optimizers count where a module shares them, and where they are views: one
    score with two names is replaced as a whole.

    Args:
        inside: attributes of modules.
        outside: attributes of everything else.
    """
    tensors: dict[int, list[tuple[torch.Tensor, Place, bool]]] = defaultdict(list)
    containers: dict[int, list[Place]] = defaultdict(list)
    for owners, is_inside in ((inside, True), (outside, False)):
        for place, value in _places(owners):
            if not isinstance(value, torch.Tensor):
                containers[id(value)] += [place] if is_inside else []
            elif address := storage_address(value):
                tensors[address].append((local_of(value), place, is_inside))
    found = [group for group in containers.values() if len(group) > 1]
    for sharers in tensors.values():
        if len(sharers) > 1:
            found += _overlapping([(*_span(tensor), place, is_inside) for tensor, place, is_inside in sharers])
    return sorted(sorted(map(_name_of, group)) for group in found)


def _overlapping(sharers: list[tuple[int, int, Place, bool]]) -> Iterator[list[Place]]:
    """Of tensors in one storage, each with its first byte and the one behind its last, those with bytes in common."""
    group: list[tuple[int, int, Place, bool]] = []
    for sharer in (*sorted(sharers, key=lambda each: each[:2]), None):
        if sharer is not None and group and sharer[0] < max(stop for _, stop, _, _ in group):
            group.append(sharer)
            continue
        spans, are_inside = {each[:2] for each in group}, any(is_inside for *_, is_inside in group)
        if len(group) > 1 and (are_inside or len(spans) > 1):
            yield [place for _, _, place, _ in group]
        group = [sharer] if sharer is not None else []


def _name_of(place: Place) -> str:
    return ".".join(str(part) for part in place if part != "")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first byte in the storage, and the one behind its last."""
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _places(owners: Owners) -> Iterator[tuple[Place, Any]]:
    """Tensors, lists and dictionaries, wherever in the attributes they are; what is in one of two names, once."""
    seen: set[int] = set()
    waiting: list[tuple[Place, Any]] = [
        ((module, name), value) for module, own in owners.items() for name, value in own.items()
    ]
    while waiting and len(seen) < _MOST_SHARERS:
        place, value = waiting.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor) or kind in (list, dict):
            yield place, value
        if kind in (list, tuple, dict) and len(place) < _DEEPEST and id(value) not in seen:
            seen.add(id(value))
            items = list(value.items() if kind is dict else enumerate(value))
            # Keys of other kinds have names that no other process finds again.
            named = [(key, item) for key, item in items if isinstance(key, (str, int))]
            waiting += [((*place, key), item) for key, item in named if type(item) not in SCALARS]


def tie(groups: Groups, owners: Owners, restored: Collection[str]) -> None:
    """Have tensors be one again that were one in the training before, such as ``loss.detach()`` kept at two places.

    Args:
        groups: which places shared memory.
        owners: attributes of modules; each value that was put back is a tensor of its own by now.
        restored: attributes that were put back. What they shared with others is left apart.
    """
    present = {_name_of(place): value for place, value in _places(owners)}
    for group in groups:
        tensors: list[Any] = [
            present.get(name) for name in group if any(f"{name}.".startswith(f"{own}.") for own in restored)
        ]
        if len(tensors) != len(group) or not are_alike(tensors) or any(each.requires_grad for each in tensors):
            continue
        first, *others = tensors
        if all(each.stride() == first.stride() and torch.equal(each, first) for each in others):
            for tensor in others:
                tensor.set_(first)


def differing(saved: Groups, present: Groups) -> list[str]:
    """Names of what shares memory with others than it did, sorted."""
    names = {name for groups in (saved, present) for group in groups for name in group}
    then, now = _partners(saved), _partners(present)
    return sorted(name for name in names if then.get(name) != now.get(name))


def _partners(groups: Groups) -> dict[str, frozenset[str]]:
    return {name: frozenset(group) for group in groups for name in group}


def outside_of(trainer: pl.Trainer) -> Owners:
    """Attributes of callbacks but ours, of the data module, and states of a user's optimizers by parameter."""
    outside: dict[str, Mapping[str, Any]] = {}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    for number, callback in enumerate([*callbacks, *([data] if data is not None else [])]):
        if not type(callback).__module__.startswith("lightning_spot."):
            kind = type(callback).__qualname__.rpartition(".<locals>.")[2]
            outside[kind if kind not in outside else f"{kind}#{number}"] = vars(callback)
    for number, optimizer in enumerate(trainer.optimizers):
        if type(optimizer).__module__.startswith("torch."):
            continue  # whose states share nothing
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {index: optimizer.state[each] for index, each in enumerate(parameters) if each in optimizer.state}
        outside[f"optimizer {number}"] = {"state": states}
    return outside


def untrained_by_optimizers(trainer: pl.Trainer) -> list[str]:
    """Names of parameters to be trained that no optimizer has: training may have made them."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    named = trainer.lightning_module.named_parameters()
    return [name for name, parameter in named if parameter.requires_grad and id(parameter) not in held]


# -- what no state_dict holds ------------------------------------------------------------------------------------


class UntrackedAttributes:
    """Knows how attributes of data modules, a user's callbacks and optimizers were, and so which training has changed.

    No ``state_dict`` holds them: they come back as the script makes them, with Lightning's checkpoints too. They are
    noted beside each snapshot, by name and without their values, so that a resumed run says it before training goes on.
    """

    def __init__(self) -> None:
        self._stamps: dict[str, Any] = {}
        self._changed: set[str] = set()

    def begin(self, trainer: pl.Trainer, changed: Iterable[str]) -> None:
        """Note how they are, after all ``on_train_start``: a resumed run calls those, too.

        Args:
            trainer: that trains.
            changed: those that had changed when the snapshot was taken that this run goes on from.
        """
        self._stamps = dict(_attributes(trainer))
        self._changed = self._stamps.keys() & changed

    def names(self, trainer: pl.Trainer) -> list[str]:
        """Those that have changed by now, or had at an earlier snapshot, as ``Class.attribute``."""
        now = dict(_attributes(trainer))
        self._changed |= {name for name in now.keys() | self._stamps.keys() if self._stamps.get(name) != now.get(name)}
        return sorted(self._changed)

    def begin_anew(self, lost: Iterable[str]) -> Iterator[str]:
        """One sentence on those that a resumed run does not get back, if there are any.

        Args:
            lost: more of them, of modules.
        """
        if names := sorted({*self._changed, *lost}):
            yield (
                f"training had changed attributes that no state_dict holds, and they begin anew: {format_names(names)}."
                " Give the class a state_dict and a load_state_dict (a module: get_extra_state and set_extra_state) if"
                " training depends on them"
            )


def _attributes(trainer: pl.Trainer) -> Iterator[tuple[str, Any]]:
    """Each that can be watched, with the stamp of its value; of two of a class, each has its number."""
    seen: dict[str, int] = {}
    modules, restored = trainer.lightning_module.modules(), _restored(trainer)
    detector = ChangeDetector(modules, most_items=_MOST_OF_OTHERS, restored=restored)
    owners: list[Any] = [trainer.datamodule, *trainer.callbacks]  # type: ignore[attr-defined] # Lightning's Trainer has them
    owners = [owner for owner in owners if owner is not None and _is_to_be_named(owner)]
    own_kinds = [each for each in trainer.optimizers if not type(each).__module__.startswith("torch.")]
    for owner, saved in chain(zip(owners, repeat(())), zip(own_kinds, repeat(_OF_OPTIMIZERS))):
        kind = type(owner).__qualname__.rpartition(".<locals>.")[2]
        number = seen[kind] = seen.get(kind, 0) + 1
        for attribute, value in {**of_classes(owner), **vars(owner)}.items():
            name = f"{kind}.{attribute}" if number == 1 else f"{kind}#{number}.{attribute}"
            is_new = attribute == "_hparams" and not value  # Lightning makes an empty one where it is first read
            is_watched = is_value(value) or (isinstance(value, STATEFUL) and not is_metric(value))
            if attribute not in saved and is_watched and not is_new:
                yield name, detector.stamp(value)
    yield from _put_together(trainer)


def _restored(trainer: pl.Trainer) -> list[Any]:
    """What of :data:`STATEFUL` Lightning has in a checkpoint, besides modules."""
    schedulers = (each.scheduler for each in trainer.lr_scheduler_configs)
    return [*schedulers, getattr(trainer.precision_plugin, "scaler", None)]


def _put_together(trainer: pl.Trainer) -> Iterator[tuple[str, list[Any]]]:
    """What hooks may have replaced in the Trainer; their states would be loaded into what the script makes."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    yield "Trainer.callbacks", sorted(map(id, callbacks))
    yield "Trainer.optimizers", [type(each) for each in trainer.optimizers]
    if not any(isinstance(each, namespaces.classes("callbacks", "StochasticWeightAveraging")) for each in callbacks):
        schedulers = [[type(each.scheduler), each.interval, each.frequency] for each in trainer.lr_scheduler_configs]
        yield "Trainer.lr_scheduler_configs", schedulers


def _is_to_be_named(owner: Any) -> bool:
    """Whether a class is the user's own, and keeps no state of its own in the checkpoint."""
    bases = namespaces.classes("callbacks", "Callback") + namespaces.classes("", "LightningDataModule")
    for kind in type(owner).__mro__:
        if kind.__module__.startswith(_SHIPPED) and issubclass(kind, bases):
            # What Lightning's own callbacks change is theirs, also in a class that adds something.
            return kind in bases and not any(
                getattr(type(owner), hook, None) is not getattr(kind, hook, None) for hook in _KEEPS_ITS_OWN
            )
    return False


# -- before training begins ----------------------------------------------------------------------------------------


class PreTrainingEffects(OfTrainer):
    """What a run does once and a resumed one does not again (the sanity check, a tuner's trial): notes what it changed.

    :class:`ModuleState` begins when training begins, and would take that for the way in which every attempt begins.

    Args:
        trainer: whose ``fit`` it is.
        switches: which parts of the work are on.
        hooked: is told which values were changed in what happens once.
        buffers: is told which buffers were.
    """

    def __init__(self, trainer: pl.Trainer, switches: compat.Switches, hooked: ModuleState, buffers: Buffers) -> None:
        super().__init__(trainer)
        self._run = partial(switches.run, compat.HOOKED)
        self._hooked, self._buffers = hooked, buffers
        self._first: ModuleState | None = None
        self._before = ModuleState()
        self._since: Names = set()
        self._lost: set[str] = set()
        self._marks: Marks = {}

    def begins(self) -> None:
        """Note how everything is. Further calls do nothing until :meth:`ends`."""
        if self._first is None:
            self._since = set()
            self._run(self._begin)
            self._first = self._before

    def ends(self) -> None:
        """Note what was changed since :meth:`begins`, and not back. A second call does nothing."""
        first, self._first = self._first, None
        if first is not None:
            self._run(self._end)
            self._run(lambda: self._note_since(first))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens within, since a resumed run does it, too: to ask for loaders."""
        if self._first is not None:
            self._run(self._end)
        try:
            yield
        finally:
            if self._first is not None:
                self._run(self._begin)

    def _begin(self) -> None:
        self._before = ModuleState()
        self._before.begin(self._trainer)
        self._marks = marks_of(self._trainer.lightning_module)

    def _end(self) -> None:
        self._since |= names_in(self._captured(self._before))
        self._lost |= self._before.lost
        self._buffers.note_changed(self._trainer.lightning_module, self._marks)

    def _note_since(self, first: ModuleState) -> None:
        hooked, found = self._hooked, self._captured(first)
        hooked.before |= self._since & names_in(found)
        hooked.lost |= self._lost & first.lost

    def _captured(self, values: ModuleState) -> State:
        return values.capture(self._trainer, list(self._trainer.lightning_module.named_modules()))

    def follow_tuners(self, patches: Patches) -> None:
        """Note what their trials change."""
        for _, tuner in tuners(self._trainer):
            patches.wrap(tuner, "on_fit_start", partial(partial, self._around))

    def _around(self, trial: Callable[..., Any], *arguments: Any) -> None:
        self.begins()
        trial(*arguments)
        self.ends()
