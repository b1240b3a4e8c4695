"""Looks at rows of thousands of objects, to find out whether all of them are those that were there before.

Objects are told apart by what they are, not by what they hold. Compiled where there is a compiler: the loops of Python
take ten times as long, and a snapshot has twenty of them.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

try:
    from lightning_spot.image import _rows
except ImportError:  # installed where there was no compiler
    _compiled: Any = None
else:
    _compiled = _rows

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes of tensors that say of themselves what torch says of them."""

_NO_OVERRIDE: Any = getattr(torch._C, "_disabled_torch_function_impl", None)
_past_overrides: Callable[[], Any] = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)


def identities(objects: list[Any]) -> object:
    """What is equal to that of other objects if they are the same, as long as all of them live."""
    return list(map(id, objects)) if _compiled is None else _compiled.identities(objects)


def kinds_of(objects: list[Any]) -> set[type]:
    """The classes of objects, each once."""
    found: set[type] = set(map(type, objects)) if _compiled is None else _compiled.kinds_of(objects)
    return found


def are_of_kinds(objects: list[Any], kinds: list[type]) -> bool:
    """Whether each is of the class of its place."""
    if _compiled is None:
        return len(objects) == len(kinds) and all(map(operator.is_, map(type, objects), kinds))
    return bool(_compiled.are_of_kinds(objects, kinds))


def unwrapped(objects: list[Any], name: str) -> list[Any]:
    """Of each an attribute; the object itself where it is a plain tensor, or has none."""
    if _compiled is None:
        return [each if type(each) in PLAIN else getattr(each, name, each) for each in objects]
    found: list[Any] = _compiled.unwrapped(objects, name, torch.Tensor, torch.nn.Parameter)
    return found


def have(objects: list[Any], name: str, values: list[Any]) -> bool:
    """Whether each has the value of its place as an attribute."""
    if _compiled is None:
        return all([value is getattr(each, name) for each, value in zip(objects, values, strict=True)])
    return bool(_compiled.have(objects, name, values))


def numbers(objects: list[Any], name: str) -> object:
    """What is equal to that of other objects if each has the same whole number as an attribute; see :func:`each_of`."""
    if _compiled is None:
        return [getattr(each, name) for each in objects]
    return _compiled.numbers(objects, name)


def each_of(said: Any) -> list[int]:
    """The whole numbers of :func:`numbers`, one by one."""
    return list(memoryview(said).cast("q")) if isinstance(said, bytes) else list(said)


def said_of(values: list[int]) -> object:
    """What :func:`numbers` says of objects with these."""
    return values if _compiled is None else array("q", values).tobytes()


def called(objects: list[Any], name: str) -> list[Any]:
    """What a method of each gives, called without arguments."""
    if _compiled is None:
        return [getattr(each, name)() for each in objects]
    found: list[Any] = _compiled.called(objects, name)
    return found


def are_given_by(givers: list[Callable[[], Any]], objects: list[Any]) -> bool:
    """Whether each is what the weak reference of its place gives."""
    if _compiled is None:
        return all([giver() is each for giver, each in zip(givers, objects, strict=True)])
    return bool(_compiled.are_given_by(givers, objects))


class Entries:
    """What is in a row of tables: the keys, the values by their identity, all in their order. Only keys are kept alive.

    Args:
        tables: dictionaries, or what torch has in their place in a scripted module.
    """

    __slots__ = ("_keys", "_said")

    def __init__(self, tables: list[Any]) -> None:
        self._keys = [list(table.keys()) for table in tables]  # so that no other key takes the place of one
        self._said = _entries(tables)

    def are_in(self, tables: list[Any]) -> bool:
        """Whether the same is in others; if not, it may be by other keys that are equal."""
        return _entries(tables) == self._said


def _entries(tables: list[Any]) -> object:
    if _compiled is not None:
        try:
            return _compiled.entries(tables)
        except TypeError:  # not all are plain dictionaries
            pass
    keys = list(chain.from_iterable([table.keys() for table in tables]))
    return list(map(len, tables)), keys, list(map(id, values_in(tables)))


def values_in(tables: list[Any]) -> list[Any]:
    """All values of tables, one after the other.

    Args:
        tables: see :class:`Entries`.
    """
    if _compiled is not None:
        try:
            found: list[Any] = _compiled.values_in(tables)
            return found
        except TypeError:  # not all are plain dictionaries
            pass
    return list(chain.from_iterable([table.values() for table in tables]))


def under(tables: list[dict[str, Any]], key: str) -> list[Any]:
    """Of each dictionary the value under a key; ``None`` where one has none."""
    if _compiled is not None:
        try:
            found: list[Any] = _compiled.under(tables, key)
            return found
        except TypeError:  # not all are plain dictionaries
            pass
    return [table.get(key) for table in tables]


def hold(tables: list[dict[str, Any]], lengths: list[int], keys: list[tuple[str, ...]], values: list[Any]) -> bool:
    """Whether each dictionary is as long as it is to be, and has its values, a tuple of them, under its keys.

    Args:
        tables: the dictionaries.
        lengths: of each.
        keys: some of each.
        values: under them.
    """
    if _compiled is not None:
        try:
            return bool(_compiled.hold(tables, lengths, keys, values))
        except TypeError:  # not all are plain dictionaries
            pass
    if list(map(len, tables)) != lengths:
        return False
    rows = zip(tables, keys, values, strict=True)
    return all(
        [key in own and own[key] is value for own, names, were in rows for key, value in zip(names, were, strict=True)]
    )


def versions_of(tensors: list[torch.Tensor]) -> object:
    """Torch's counts of the writes to tensors, as :func:`numbers`.

    Raises:
        RuntimeError: if one of them was made in inference mode, and has none.
    """
    with _asking(tensors):
        return numbers(tensors, "_version")


def which_train(tensors: list[torch.Tensor]) -> object:
    """Of each, whether it is trained, as :func:`numbers`."""
    with _asking(tensors):
        return numbers(tensors, "requires_grad")


@contextmanager
def _asking(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Ask past the class of tensors. Torch asks that first: of a DTensor, which adds nothing, it takes twice as long.

    A class that may say something else is asked all the same.
    """
    kinds = kinds_of(tensors) - PLAIN
    add_nothing = bool(kinds) and all(getattr(kind, "__torch_function__", None) is _NO_OVERRIDE for kind in kinds)
    with _past_overrides() if add_nothing else nullcontext():
        yield
