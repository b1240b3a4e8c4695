"""Whether the attributes of an object are what they were, seen at a glance: a snapshot looks at hundreds of modules."""

from __future__ import annotations

import operator
import types
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
    """

    def __init__(self, owner: object, names: list[str]) -> None:
        self._count = len(vars(owner))
        self._values_of = operator.itemgetter(*names, names[0])  # of one name alone it gives no tuple
        self._values = self._values_of(vars(owner))

    @classmethod
    def of(cls, owner: object, names: list[str]) -> Glance | None:
        """A glance at the attributes of these names; ``None`` where it would not tell: their values may change."""
        if not names or not all(_is_steady(vars(owner)[name]) for name in names):
            return None
        return cls(owner, names)

    def is_still_of(self, owner: object) -> bool:
        """Whether all of them have the values that they had, and no attribute has come or gone; if not, look closer."""
        now = vars(owner)
        if len(now) != self._count:
            return False
        try:
            values = self._values_of(now)
        except KeyError:
            return False
        return all(map(operator.is_, values, self._values))


def _is_steady(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_steady, value))
    return type(value) in _STEADY
