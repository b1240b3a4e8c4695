"""An inert object that stands for one of a class which is not loaded: it names the class, its place, and what to do."""

from __future__ import annotations

import collections
import reprlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from lightning_spot.errors import NotSerializableError
from lightning_spot.untrusted import plain

ADVICE = (
    "Name its class in torch.serialization.add_safe_globals before fit, or pass weights_only=False to trainer.fit, if"
    " you trust what wrote the snapshots; better keep plain values there"
)

SHORT = reprlib.Repr()
"""Describes what a file holds: the full ``repr`` of what holds one thing many times may have no end."""
SHORT.maxother = SHORT.maxstring = 120


class Placeholder:
    """Stands for an object of a class that is not loaded. To use it raises :class:`NotSerializableError`.

    Args:
        kind: full name of its class, or of the function that makes it.
        parts: what the file has of it: arguments, state, items.
    """

    __slots__ = ("_kind", "_parts", "_where")

    def __init__(self, kind: str, *parts: Any) -> None:
        self._kind = kind
        self._parts = list(parts)
        self._where = ""

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        return f"<{self._kind}{''.join(f' {SHORT.repr(part)}' for part in self._parts)}, not loaded>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # python asks for these to find out what an object can do
        _refuse(self)


def _refuse(placeholder: Placeholder, *_: Any) -> NoReturn:
    where = f"{placeholder._where} of the snapshot" if placeholder._where else "what is used here"
    raise NotSerializableError(f"{plain(where)} is a {plain(placeholder._kind)}, which was not loaded. {ADVICE}")


for _name in (
    *("__call__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__bool__"),
    *("__int__", "__float__", "__index__", "__fspath__", "__enter__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__"),
):
    setattr(Placeholder, _name, _refuse)


def kind_of(placeholder: Placeholder) -> str:
    """Full name of the class, or of the function that makes the object."""
    return placeholder._kind


def parts_of(placeholder: Placeholder) -> list[Any]:
    """What the file has of the object: arguments, state, items."""
    return placeholder._parts


def placeholders_in(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Placeholder]]:
    """Each placeholder in a nested value, and its place; an object that contains one counts at its own place."""
    seen = set() if seen is None else seen
    if isinstance(value, Placeholder):
        yield path, value
        return
    if isinstance(value, (torch.Tensor, str, bytes, int, float)) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield from placeholders_in(key, f"a key of {path}", seen)
            yield from placeholders_in(item, f"{path}.{key}" if path else str(key), seen)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for index, item in enumerate(value):
            yield from placeholders_in(item, f"{path}[{index}]", seen)
    for name, item in ({} if isinstance(value, type) else getattr(value, "__dict__", {})).items():
        yield from placeholders_in(item, f"{path}.{name}", seen)


def remember_places(value: Any) -> None:
    """Have each placeholder in a nested value know where it is, for the error that its use raises."""
    for where, placeholder in placeholders_in(value):
        placeholder._where = placeholder._where or where
