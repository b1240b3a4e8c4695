"""What hooks changed since training began and no checkpoint of Lightning holds: captured as plain values, put back.

A resumed run does not call ``on_train_epoch_start`` of the epoch it goes on in, and never those of earlier epochs. So
what they did is kept: which parameters are frozen, plain attributes of modules (``training``, a dropout's ``p``, a
counter, a list of outputs), settings of the Trainer. What did not change is not kept: there the program's word counts.
A module that also made anything else meanwhile (a cache, a file) keeps its attributes for itself: they belong together.
What such a module goes on to change, and what changes within objects that it holds, is lost for a resumed run: its
names are known. Where it has made a data set of another class (in ``on_train_epoch_end``), a resumed run trains
the rest of the epoch with that of its start: what modules within it have changed fits the next one, and comes back when
that is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torchmetrics import Metric

from lightning_spot.exact import private
from lightning_spot.exact.attributes import Attributes, State, changed_of, those_of
from lightning_spot.exact.further_kinds import is_generator
from lightning_spot.exact.objects import Inside
from lightning_spot.exact.plain_values import SCALARS, put

if TYPE_CHECKING:
    import lightning.pytorch as pl

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

NamedModule = tuple[str, Module]


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
        self._modules: dict[str, Attributes] = {}
        self._settings: State = {}
        self._limits: State = {}  # that the program gave
        self._makes_data: set[str] = set()  # modules of which data sets are not as they were when attributes were saved
        self._waiting: dict[str, State] = {}  # attributes of modules, until the next data sets are made
        self._kinds: dict[str, type] = {}

    def begin(self, trainer: pl.Trainer) -> None:
        """Note how everything is, after all ``on_train_start``: a resumed run calls those, too."""
        modules = list(trainer.lightning_module.named_modules())
        self._trains = _trains(modules)
        inside = _inside(modules)
        self._modules = {name: Attributes(part, inside) for name, part in _parts(modules)}
        self._settings = _settings(trainer)
        self._kinds = _kinds(modules)

    def capture(self, trainer: pl.Trainer, modules: Sequence[NamedModule]) -> State:
        """What differs by now, as values that load with ``weights_only=True``.

        Args:
            trainer: whose settings may differ.
            modules: all of the trainer's module.
        """
        before, known = self.before, self._modules
        attributes = before.attributes
        changed, inside = {}, _inside(modules)
        for name, part in _parts(modules):
            if name in known:
                changed[name] = known[name].changed(part, attributes.get(name, ()), inside)
                self.lost |= known[name].lost
                self._makes_data |= {name} if known[name].has_made_data else set()
        settings = _settings(trainer)
        others = _kinds(modules).items() - self._kinds.items()
        self.lost |= {name for name, _ in others if not issubclass(self._kinds.get(name, object), LazyModuleMixin)}
        for name, values in self._waiting.items():
            changed[name] = {**changed.get(name, {}), **values}
        return {
            "trains": self._trains_now(modules),
            "attributes": {name: values for name, values in changed.items() if values},
            "made_data": sorted(self._makes_data),
            "settings": {**changed_of(self._settings, settings), **those_of(before.settings, settings)},
            "limits": self._limits,
            "before": before.saved(),
        }

    def _trains_now(self, modules: Sequence[NamedModule]) -> dict[str, bool]:
        """Which parameters are trained, of those of which it is to be kept."""
        names = self.before.trains
        now = _trains(modules).items()
        return {name: trains for name, trains in now if self._trains.get(name, trains) != trains or name in names}

    def restore(self, trainer: pl.Trainer, saved: State, *, untrained: bool = False) -> None:
        """Put back what :meth:`capture` returned, after :meth:`begin`.

        Args:
            trainer: whose module it is.
            saved: what was captured.
            untrained: whether nothing is left to train.
        """
        self.before.update(Names.of(saved.get("before")))
        module = trainer.lightning_module
        parameters = dict(module.named_parameters())
        for name, trains in saved["trains"].items():
            if name in parameters:
                parameters[name].requires_grad_(trains)
        attributes = saved["attributes"]
        if not untrained:
            self._makes_data = set(saved.get("made_data", ()))  # which earlier versions did not say
            waits = {name: values for name, values in attributes.items() if self._fits_other_data(name)}
            self._waiting = {name: {**values} for name, values in waits.items()}
            modes = {
                name: {"training": own.pop("training")} for name, own in self._waiting.items() if "training" in own
            }
            attributes = {name: values for name, values in attributes.items() if name not in waits} | modes
        self._put(module, attributes)
        for name, value in saved["settings"].items():
            if name not in _LIMITS and hasattr(trainer, name):
                setattr(trainer, name, value)

    def _fits_other_data(self, name: str) -> bool:
        return any(not owner or name == owner or name.startswith(f"{owner}.") for owner in self._makes_data)

    def what_waits(self) -> Iterator[str]:
        """One sentence on data sets that a resumed run does not have, if there are any."""
        if self._makes_data:
            names = sorted({name or "the LightningModule" for name in self._makes_data})
            yield (
                f"data sets of {', '.join(names)} were wrapped in training, and no snapshot has them: the rest of this"
                " epoch is trained on those of this start. Make them in train_dataloader, from the epoch's number"
            )

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Before hooks make the data sets of the next epoch: what fits these comes back. A second call does nothing."""
        waiting, self._waiting = self._waiting, {}
        self._makes_data.clear()
        self._put(trainer.lightning_module, waiting)

    def _put(self, module: pl.LightningModule, attributes: dict[str, State]) -> None:
        parts = dict(_parts(module.named_modules()))
        for name, values in attributes.items():
            for attribute, value in values.items():
                if name in parts:
                    put(parts[name], attribute, value, module.device, self._enums(name))

    def _enums(self, name: str) -> dict[str, type[Enum]]:
        return self._modules[name].enums if name in self._modules else {}

    def note_limits(self, trainer: pl.Trainer) -> None:
        """Note how long the program has training go on, before hooks may change that."""
        self._limits = {name: value for name, value in _settings(trainer).items() if name in _LIMITS}

    def restore_limits(self, trainer: pl.Trainer, saved: State) -> None:
        """Put back how long training is to go on, as far as hooks had changed it: before its loops begin.

        Where the program gives another limit than it gave to the training before, that one counts.
        """
        given = self._limits
        before = saved.get("limits", given)
        names = [name for name in _LIMITS if name in saved["settings"] and given.get(name) == before.get(name)]
        limits = {name: saved["settings"][name] for name in names}
        self.before.settings |= limits.keys()
        if "max_epochs" in limits:
            trainer.fit_loop.max_epochs = limits["max_epochs"]
        if "max_steps" in limits:
            trainer.fit_loop.epoch_loop.max_steps = limits["max_steps"]

    def restore_generators(self, trainer: pl.Trainer, saved: State) -> None:
        """Set generators once more, just before the first step: a loader may draw from them when its epoch begins."""
        parts = dict(trainer.lightning_module.named_modules())
        for name, values in saved["attributes"].items():
            for attribute, value in values.items():
                if name in parts and is_generator(value):
                    put(parts[name], attribute, value, trainer.lightning_module.device, self._enums(name))


def _kinds(modules: Iterable[NamedModule]) -> dict[str, type]:
    return {name: type(part) for name, part in modules}


def _trains(modules: Iterable[NamedModule]) -> dict[str, bool]:
    """Which parameters are trained; one that has several names, by each."""
    return {
        f"{name}.{key}" if name else key: parameter.requires_grad
        for name, part in modules
        for key, parameter in private.PARAMETERS.of(part).items()
        if parameter is not None
    }


def _inside(modules: Sequence[NamedModule]) -> Inside:
    return Inside([part for _, part in modules])


def _parts(modules: Iterable[NamedModule]) -> Iterator[NamedModule]:
    """Modules whose attributes are the user's: metrics have their own way."""
    metrics: tuple[str, ...] = ()
    for name, part in modules:
        if isinstance(part, Metric):
            metrics += (f"{name}.",)
        elif not metrics or not name.startswith(metrics):
            yield name, part


def _settings(trainer: pl.Trainer) -> State:
    values = {name: getattr(trainer, name, None) for name in (*_SETTINGS, *_LIMITS)}
    return {name: value for name, value in values.items() if type(value) in SCALARS}
