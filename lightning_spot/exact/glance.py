"""Whether the attributes of an object are what they were, seen at a glance: a snapshot looks at hundreds of modules."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from lightning_spot.image.rows import hold

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
        names: of those that count.
        values: as they were.
    """

    def __init__(self, owner: object, names: list[str]) -> None:
        self.count = len(vars(owner))
        self.names = tuple(names)
        self.values = tuple(map(vars(owner).__getitem__, names))

    @classmethod
    def of(cls, owner: object, names: list[str]) -> Glance | None:
        """A glance at the attributes of these names; ``None`` where it would not tell: their values may change."""
        if not names or not all(_is_steady(vars(owner)[name]) for name in names):
            return None
        return cls(owner, names)

    def is_still_of(self, owner: object) -> bool:
        """Whether all of them have the values that they had, and no attribute has come or gone; if not, look closer."""
        return hold([vars(owner)], [self.count], [self.names], [self.values])


class Glances:
    """Glances at many objects at once.

    Args:
        glances: at each of them.
    """

    def __init__(self, glances: Sequence[Glance]) -> None:
        self._counts = [glance.count for glance in glances]
        self._names = [glance.names for glance in glances]
        self._values = [glance.values for glance in glances]

    def are_still_in(self, own: list[dict[str, Any]]) -> bool:
        """Whether :meth:`Glance.is_still_of` holds for each of them, in their order.

        Args:
            own: ``vars()`` of each.
        """
        return len(own) == len(self._counts) and hold(own, self._counts, self._names, self._values)


def _is_steady(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_steady, value))
    return type(value) in _STEADY
