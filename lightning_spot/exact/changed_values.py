"""What hooks changed since training began and no checkpoint of Lightning holds: captured as plain values, put back.

A resumed run does not call ``on_train_epoch_start`` of the epoch it goes on in, and never those of earlier epochs. So
what they did is kept: which parameters are frozen, plain attributes of modules (``training``, a dropout's ``p``, a
counter, a list of outputs), settings of the Trainer. What did not change is not kept: there the program's word counts.
A module that also made anything else meanwhile (a cache, a file) keeps its attributes for itself: they belong together.
What such a module goes on to change, and what changes within objects that it holds, is lost for a resumed run: its
names are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from torch import nn
from torchmetrics import Metric

from lightning_spot.exact import namespaces, private
from lightning_spot.exact.further_kinds import is_generator
from lightning_spot.exact.glance import Glance, Glances
from lightning_spot.exact.objects import Inside, may_hold_objects
from lightning_spot.exact.plain_values import (
    MOST_BYTES,
    MOST_ITEMS,
    SCALARS,
    NotPlain,
    copy_of,
    is_kept,
    is_same,
    mark,
    put,
)
from lightning_spot.exact.tree import keys_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]
NamedModule = tuple[str, nn.Module]

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
OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that are torch's."""


@dataclass(slots=True)
class Names:
    """Names of values that were changed.

    Attributes:
        trains: of parameters.
        attributes: of attributes, by the module's name.
        settings: of the Trainer's settings.
    """

    trains: set[str] = field(default_factory=set)
    attributes: dict[str, set[str]] = field(default_factory=dict)
    settings: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, saved: State | None) -> Names:
        """Those in what :meth:`saved`, or :meth:`ChangedValues.capture`, returned; none of ``None``."""
        if saved is None:
            return cls()
        attributes = {module: set(names) for module, names in saved["attributes"].items()}
        return cls(set(saved["trains"]), attributes, set(saved["settings"]))

    def saved(self) -> State:
        """The names as values that load with ``weights_only=True``, always in one order."""
        attributes = {module: sorted(names) for module, names in sorted(self.attributes.items())}
        return {"trains": sorted(self.trains), "attributes": attributes, "settings": sorted(self.settings)}

    def update(self, more: Names) -> None:
        """Add those of ``more``."""
        self.trains |= more.trains
        self.settings |= more.settings
        for module, names in more.attributes.items():
            self.attributes.setdefault(module, set()).update(names)

    def common(self, other: Names) -> Names:
        """Those that are in both."""
        attributes = {
            module: names & other.attributes[module]
            for module, names in self.attributes.items()
            if module in other.attributes
        }
        return Names(self.trains & other.trains, attributes, self.settings & other.settings)


class ChangedValues:
    """Knows how everything was when training began, and so what was changed.

    Attributes:
        before: what was changed before that, and no resumed run repeats: it counts, too.
        lost: names of attributes that have changed, as ``Class.attribute``, and that no resumed run gets back.
    """

    def __init__(self) -> None:
        self.before = Names()
        self.lost: set[str] = set()
        self._trains: dict[str, bool] = {}
        self._modules: dict[str, _Attributes] = {}
        self._trained = _Trained(())
        self._glances = _Glanced({})
        self._settings: State = {}

    def begin(self, trainer: pl.Trainer) -> None:
        """Note how everything is, after all ``on_train_start``: a resumed run calls those, too."""
        modules = list(trainer.lightning_module.named_modules())
        self._trains = _trains(modules)
        self._trained = _Trained(modules)
        inside = Inside()
        self._modules = {name: _Attributes(part, inside) for name, part in _parts(modules)}
        self._glances = _Glanced(self._modules)
        self._settings = _settings(trainer)

    def capture(self, trainer: pl.Trainer, modules: Sequence[NamedModule]) -> State:
        """What differs by now, as values that load with ``weights_only=True``.

        Args:
            trainer: whose settings may differ.
            modules: all of the trainer's module.
        """
        before, known = self.before, self._modules
        attributes = before.attributes
        parts = _parts(modules) if attributes else self._glances.closer(list(_parts(modules)))
        changed, inside = {}, Inside()
        for name, part in parts:
            if name in known:
                changed[name] = known[name].changed(part, attributes.get(name, ()), inside)
                self.lost |= known[name].lost
        settings = _settings(trainer)
        return {
            "trains": self._trains_now(modules),
            "attributes": {name: values for name, values in changed.items() if values},
            "settings": {**_changed(self._settings, settings), **_of(before.settings, settings)},
            "before": before.saved(),
        }

    def _trains_now(self, modules: Sequence[NamedModule]) -> dict[str, bool]:
        """Which parameters are trained, of those of which it is to be kept."""
        names = self.before.trains
        if not names and self._trained.are_those_of(modules):
            return {}
        now = _trains(modules).items()
        return {name: trains for name, trains in now if self._trains.get(name, trains) != trains or name in names}

    def restore(self, trainer: pl.Trainer, saved: State) -> None:
        """Put back what :meth:`capture` returned, after :meth:`begin`."""
        self.before.update(Names.of(saved.get("before")))
        module = trainer.lightning_module
        parameters = dict(module.named_parameters())
        for name, trains in saved["trains"].items():
            if name in parameters:
                parameters[name].requires_grad_(trains)
        parts = dict(_parts(list(module.named_modules())))
        for name, values in saved["attributes"].items():
            for attribute, value in values.items():
                if name in parts:
                    put(parts[name], attribute, value, module.device)
        for name, value in saved["settings"].items():
            if hasattr(trainer, name):
                setattr(trainer, name, value)

    def restore_generators(self, trainer: pl.Trainer, saved: State) -> None:
        """Set generators once more, just before the first step: a loader may draw from them when its epoch begins."""
        parts = dict(trainer.lightning_module.named_modules())
        for name, values in saved["attributes"].items():
            for attribute, value in values.items():
                if name in parts and is_generator(value):
                    put(parts[name], attribute, value, trainer.lightning_module.device)


class _Trained:
    """Which parameters are trained, in a row.

    Args:
        modules: that have them.
    """

    def __init__(self, modules: Sequence[NamedModule]) -> None:
        self._row = self._of(modules)

    def are_those_of(self, modules: Sequence[NamedModule]) -> bool:
        """Whether the same are, in modules of the same names."""
        return self._row == self._of(modules)

    @staticmethod
    def _of(modules: Sequence[NamedModule]) -> tuple[list[Any], ...]:
        tables = private.PARAMETERS.of_each([part for _, part in modules])
        parameters = chain.from_iterable([table.values() for table in tables])
        trains = [parameter is not None and parameter.requires_grad for parameter in parameters]
        return [name for name, _ in modules], list(map(len, tables)), keys_of(tables), trains


class _Glanced:
    """The modules at which a glance is enough, as long as nothing changes.

    Args:
        known: all modules, by name.
    """

    def __init__(self, known: dict[str, _Attributes]) -> None:
        self._names = list(known)
        self._has_one = [each.glance is not None for each in known.values()]
        self._glances = Glances([each.glance for each in known.values() if each.glance is not None])

    def closer(self, parts: Sequence[NamedModule]) -> Sequence[NamedModule]:
        """Those that a closer look is needed at."""
        if [name for name, _ in parts] != self._names:
            return parts
        if not self._glances.are_still_of([part for _, part in compress(parts, self._has_one)]):
            return parts
        return [part for part, has_one in zip(parts, self._has_one, strict=True) if not has_one]


class _Attributes:
    """The attributes of one module as they were.

    Args:
        part: the module.
        inside: looks into objects.

    Attributes:
        glance: that tells, as long as nothing changes; ``None`` where none would.
        lost: names of what has changed, as ``Class.attribute``, and is not kept.
    """

    def __init__(self, part: nn.Module, inside: Inside) -> None:
        self._names = _own_names() if isinstance(part, namespaces.classes("", "LightningModule")) else OF_MODULES
        # Modules of torch keep nothing that their numbers would have to agree with.
        self._is_torchs = type(part).__module__.startswith("torch.nn")
        own = self._own(part)
        self._scalars = _scalars(own)
        self._marks = {} if self._is_torchs else _marks(own)
        self._others = {} if self._is_torchs else _not_plain(own)
        held = {} if self._is_torchs else {name: value for name, value in own.items() if may_hold_objects(value)}
        self._inside = {name: seen for name, value in held.items() if (seen := inside.of(value)) is not None}
        self._since: tuple[State, State] | None = None
        self.glance = Glance.of(part, list(own))
        self.lost: set[str] = set()

    def changed(self, part: nn.Module, before: Collection[str], inside: Inside) -> State:
        """Copies of what has changed; of ``training`` only, where not all of it is plain.

        Args:
            part: the module.
            before: names of attributes that count as changed.
            inside: looks into objects.
        """
        if self.glance is not None and not before and self.glance.is_still_of(part):
            return {}
        own = self._own(part)
        scalars = _scalars(own)
        changed = {**_changed(self._scalars, scalars), **_of(before, scalars)}
        if self._is_torchs:
            return changed
        others = _not_plain(own)
        self._lose(part, self._changed_within(own, inside))
        try:
            if others.keys() != self._others.keys() or any(others[name] is not self._others[name] for name in others):
                raise NotPlain
            left = [MOST_BYTES, MOST_ITEMS]
            for name, value in own.items():
                if is_kept(type(value)) and self._is_to_be_kept(name, value, before):
                    changed[name] = copy_of(value, left)
        except NotPlain:
            self._lose(part, self._changed_beside(own, inside))
            return {name: value for name, value in changed.items() if name == "training"}
        return changed

    def _is_to_be_kept(self, name: str, value: Any, before: Collection[str]) -> bool:
        return name in before or name not in self._marks or not is_same(self._marks[name], mark(value))

    def _changed_within(self, own: State, inside: Inside) -> Iterator[str]:
        """Objects, and what holds some, in which something is otherwise than when they were first seen."""
        for name, before in self._inside.items():
            if name in own and not inside.is_as(before, own[name]):
                yield name

    def _changed_beside(self, own: State, inside: Inside) -> Iterator[str]:
        """What changes further, after something was made that cannot be kept: that alone may be made anew, in time."""
        scalars, marks = _scalars(own), _marks(own)
        if self._since is None:
            self._since = scalars, marks
        for name, value in _not_plain(own).items():  # what was made since: it is looked into from now on
            if name not in self._others and (seen := inside.of(value)) is not None:
                self._inside.setdefault(name, seen)
        before_scalars, before_marks = self._since
        yield from (name for name in _changed(before_scalars, scalars) if name != "training")
        yield from (name for name in marks if name not in before_marks or not is_same(before_marks[name], marks[name]))

    def _lose(self, part: nn.Module, names: Iterable[str]) -> None:
        self.lost |= {f"{type(part).__qualname__.rpartition('.<locals>.')[2]}.{name}" for name in names}

    def _own(self, part: nn.Module) -> State:
        return {name: value for name, value in vars(part).items() if name not in self._names}


def _scalars(own: State) -> State:
    return {name: value for name, value in own.items() if type(value) in SCALARS}


def _marks(own: State) -> State:
    return {name: mark(value) for name, value in own.items() if is_kept(type(value))}


def _not_plain(own: State) -> State:
    """Everything else."""
    return {name: value for name, value in own.items() if type(value) not in SCALARS and not is_kept(type(value))}


def _trains(modules: Iterable[NamedModule]) -> dict[str, bool]:
    """Which parameters are trained; one that has several names, by each."""
    return {
        f"{name}.{key}" if name else key: parameter.requires_grad
        for name, part in modules
        for key, parameter in private.PARAMETERS.of(part).items()
        if parameter is not None
    }


def _parts(modules: Sequence[NamedModule]) -> Iterable[NamedModule]:
    """Modules whose attributes are the user's: metrics have their own way."""
    kinds = {type(part) for _, part in modules}
    return _without_metrics(modules) if any(issubclass(kind, Metric) for kind in kinds) else modules


def _without_metrics(modules: Iterable[NamedModule]) -> Iterator[NamedModule]:
    metrics: tuple[str, ...] = ()
    for name, part in modules:
        if isinstance(part, Metric):
            metrics += (f"{name}.",)
        elif not metrics or not name.startswith(metrics):
            yield name, part


def _own_names() -> frozenset[str]:
    """Attributes that belong to Lightning."""
    if not _LIGHTNINGS:
        kind = namespaces.classes("", "LightningModule")[0]
        _LIGHTNINGS.append(frozenset({*vars(kind()), "_hparams", "_hparams_initial"}) - {"training"})
    return _LIGHTNINGS[0]


_LIGHTNINGS: list[frozenset[str]] = []


def _changed(before: State, now: State) -> State:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def _of(names: Collection[str], values: State) -> State:
    return {name: values[name] for name in names if name in values}


def _settings(trainer: pl.Trainer) -> State:
    values = {name: getattr(trainer, name, None) for name in _SETTINGS}
    return {name: value for name, value in values.items() if type(value) in SCALARS}
