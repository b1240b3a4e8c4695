"""The attributes of one module: what has changed since training began, as values that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from lightning_spot.exact import namespaces, private
from lightning_spot.exact.further_kinds import MOST_ITEMS, enums_in, is_known_again, named, needs_its_like
from lightning_spot.exact.objects import Inside, may_hold_objects
from lightning_spot.exact.plain_values import (
    MOST_BYTES,
    SCALARS,
    NotPlain,
    copy_of,
    is_kept,
    is_same,
)

State = dict[str, Any]

OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of a module that are torch's."""


class Attributes:
    """The attributes of one module as they were.

    Args:
        part: the module.
        inside: looks into objects.

    Attributes:
        enums: classes of those that the program has made it with, by name.
        lost: names of what has changed, as ``Class.attribute``, and is not kept.
        has_made_data: whether a data set is among that, of another class than the one in its place before.
    """

    def __init__(self, part: nn.Module, inside: Inside) -> None:
        self._names = _own_names() if isinstance(part, namespaces.classes("", "LightningModule")) else OF_MODULES
        self._names |= {name for name in vars(part) if name.startswith(private.COMPOSABLE)}
        # Modules of torch keep nothing that their numbers would have to agree with.
        self._is_torchs = type(part).__module__.startswith("torch.nn")
        own = self._own(part)
        self._scalars = _scalars(own)
        self._marks = {} if self._is_torchs else _marks(own, inside)
        self._first = {} if self._is_torchs else _known(own)
        self._others = {} if self._is_torchs else _not_plain(part, own)
        self.enums = {} if self._is_torchs else named(kind for value in own.values() for kind in enums_in(value))
        held = {} if self._is_torchs else {name: value for name, value in own.items() if may_hold_objects(value)}
        self._inside = {name: seen for name, value in held.items() if (seen := inside.of(value)) is not None}
        self._since: tuple[State, State] | None = None
        self.lost: set[str] = set()
        self.has_made_data = False

    def changed(self, part: nn.Module, before: Collection[str], inside: Inside) -> State:
        """Copies of what has changed; of ``training`` only, where not all of it is plain.

        Args:
            part: the module.
            before: names of attributes that count as changed.
            inside: looks into objects.
        """
        own = self._own(part)
        scalars = _scalars(own)
        changed = {**changed_of(self._scalars, scalars), **those_of(before, scalars)}
        if self._is_torchs:
            return changed
        others = _not_plain(part, own)
        kinds = ((type(made), type(self._others.get(name))) for name, made in others.items())
        self.has_made_data |= any(
            new is not old and issubclass(new, Dataset) and issubclass(old, Dataset) for new, old in kinds
        )
        self._lose(part, self._changed_within(own, inside))
        self._lose(part, (name for name in others.keys() - self._others.keys() if hasattr(type(part), name)))
        try:
            if others.keys() != self._others.keys() or any(others[name] is not self._others[name] for name in others):
                raise NotPlain
            left = [MOST_BYTES, MOST_ITEMS]
            for name, value in own.items():
                if is_kept(type(value)) and self._is_to_be_kept(name, value, before, inside):
                    if self._is_kept_alone(name, value, inside, left, changed):
                        continue
                    self._lose(part, [name])
        except NotPlain:
            self._lose(part, self._changed_beside(part, own, inside))
            return {name: value for name, value in changed.items() if name == "training"}
        return changed

    def _is_to_be_kept(self, name: str, value: Any, before: Collection[str], inside: Inside) -> bool:
        return name in before or name not in self._marks or not is_same(self._marks[name], inside.mark(value))

    def _is_kept_alone(self, name: str, value: Any, inside: Inside, left: list[int], changed: State) -> bool:
        """Add a copy of a value to what has changed; ``False`` if only this value cannot be kept.

        That is so where the program has made it before training, and training changed what is in it.
        """
        is_as_made = name in self._first and self._first[name] is value
        if needs_its_like(value) and not (name in self._first and type(self._first[name]) is type(value)):
            raise NotPlain
        try:
            changed[name] = copy_of(value, left, self.enums)
        except NotPlain:
            is_written_to = name in self._marks and is_same(self._marks[name], inside.mark(value), loosely=True)
            if not (is_as_made or is_written_to):
                raise
            return False
        return True

    def _changed_within(self, own: State, inside: Inside) -> Iterator[str]:
        """Objects, and what holds some, in which something is otherwise than when they were first seen."""
        for name, before in self._inside.items():
            if name in own and not inside.is_as(before, own[name]):
                yield name

    def _changed_beside(self, part: nn.Module, own: State, inside: Inside) -> Iterator[str]:
        """What changes further, after something was made that cannot be kept: that alone may be made anew, in time."""
        scalars, marks = _scalars(own), _marks(own, inside)
        if self._since is None:
            self._since = scalars, marks
        for name, value in _not_plain(part, own).items():  # what was made since: it is looked into from now on
            if name not in self._others and (seen := inside.of(value)) is not None:
                self._inside.setdefault(name, seen)
        before_scalars, before_marks = self._since
        yield from (name for name in changed_of(before_scalars, scalars) if name != "training")
        yield from (name for name in marks if name not in before_marks or not is_same(before_marks[name], marks[name]))

    def _lose(self, part: nn.Module, names: Iterable[str]) -> None:
        self.lost |= {f"{type(part).__qualname__.rpartition('.<locals>.')[2]}.{name}" for name in names}

    def _own(self, part: nn.Module) -> State:
        return {name: value for name, value in vars(part).items() if name not in self._names}


def _scalars(own: State) -> State:
    return {name: value for name, value in own.items() if type(value) in SCALARS}


def _marks(own: State, inside: Inside) -> State:
    return {name: inside.mark(value) for name, value in own.items() if is_kept(type(value))}


def _known(own: State) -> State:
    """What is known again by being the same object: no tensors, or arrays, that would be kept alive for that."""
    return {name: value for name, value in own.items() if is_known_again(type(value))}


def _not_plain(part: nn.Module, own: State) -> State:
    """Everything else, but for methods that were put back in their own place, as Lightning does with DDP."""
    return {
        name: value
        for name, value in own.items()
        if not (type(value) in SCALARS or is_kept(type(value)) or _is_own_method(part, name, value))
    }


def _is_own_method(part: nn.Module, name: str, value: Any) -> bool:
    is_of_part = type(value) is MethodType and value.__self__ is part  # to a proxy of what is gone, isinstance fails
    return is_of_part and value.__func__ is getattr(type(part), name, None)


def _own_names() -> frozenset[str]:
    """Attributes that belong to Lightning."""
    if not _LIGHTNINGS:
        kind = namespaces.classes("", "LightningModule")[0]
        _LIGHTNINGS.append(frozenset({*vars(kind()), "_hparams", "_hparams_initial"}) - {"training"})
    return _LIGHTNINGS[0]


_LIGHTNINGS: list[frozenset[str]] = []


def changed_of(before: State, now: State) -> State:
    """What is in ``now`` and is not as before."""
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def those_of(names: Collection[str], values: State) -> State:
    """The values of these names, as far as there are some."""
    return {name: values[name] for name in names if name in values}
