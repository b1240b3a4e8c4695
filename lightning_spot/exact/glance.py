"""Whether the attributes of an object are what they were, seen at a glance: a snapshot looks at hundreds of modules."""

from __future__ import annotations

import operator
import types
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

_STEADY = frozenset(
    (bool, int, float, str, type(None), type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device)
)
"""Kinds of values that stay as they are, and that may be held for long: they keep no memory alive."""


class Glance:
    """The attributes of an object.

    Args:
        owner: that has them.
        names: of those that count, one or more.

    Attributes:
        count: of all attributes.
        values_of: those of these names, of an object's ``vars()``.
        values: as they were.
    """

    def __init__(self, owner: object, names: list[str]) -> None:
        self.count = len(vars(owner))
        self.values_of = operator.itemgetter(*names, names[0])  # of one name alone it gives no tuple
        self.values: tuple[Any, ...] = self.values_of(vars(owner))

    @classmethod
    def of(cls, owner: object, names: list[str]) -> Glance | None:
        """A glance at the attributes of these names; ``None`` where it would not tell: their values may change."""
        if not names or not all(_is_steady(vars(owner)[name]) for name in names):
            return None
        return cls(owner, names)

    def is_still_of(self, owner: object) -> bool:
        """Whether all of them have the values that they had, and no attribute has come or gone; if not, look closer."""
        now = vars(owner)
        if len(now) != self.count:
            return False
        try:
            values = self.values_of(now)
        except KeyError:
            return False
        return all(map(operator.is_, values, self.values))


class Glances:
    """Glances at many objects at once.

    Args:
        glances: at each of them.
    """

    def __init__(self, glances: Sequence[Glance]) -> None:
        self._counts = [glance.count for glance in glances]
        self._values_of = [glance.values_of for glance in glances]
        self._values = list(chain.from_iterable([glance.values for glance in glances]))

    def are_still_of(self, owners: Sequence[object]) -> bool:
        """Whether :meth:`Glance.is_still_of` holds for each of them, in their order."""
        now = list(map(vars, owners))
        if list(map(len, now)) != self._counts:
            return False
        try:
            found = [values_of(own) for values_of, own in zip(self._values_of, now, strict=True)]
        except KeyError:
            return False
        return all(map(operator.is_, chain.from_iterable(found), self._values))


def _is_steady(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_steady, value))
    return type(value) in _STEADY
