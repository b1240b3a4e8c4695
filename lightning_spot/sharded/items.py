"""The items of a nested state with their paths, as ``torch.distributed.checkpoint`` flattens it.

A training state has the same keys each time, so its paths are made once, and its items are only collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_spot.errors import NotSerializableError
from lightning_spot.image.shards import Path

_LEAF, _MAPPING, _LIST = range(3)
_SCALARS = frozenset((str, int, float, bool, type(None)))


_Form = tuple[Any, list[tuple[int, Any]]]
"""Keys of a mapping, or length of a list; and the form of each mapping and list in it, with its number among them."""


EXTRA_SUFFIX = "_extra_state"
"""How torch names, in a state dict, what a module gives with ``get_extra_state``."""


EXTRA = "extra_state"
"""Key of all of these in the exact state of a snapshot."""


def is_extra(name: str) -> bool:
    """Whether an item of a model's state dict is the extra state of a module."""
    return name.endswith(EXTRA_SUFFIX) and name.rpartition(".")[2] == EXTRA_SUFFIX


class Items:
    """Finds the items of one state after the other, for one thread.

    Attributes:
        paths: of the items found last, in the order of the state; the same object as long as all keys are the same.
        other_keys: that are no text, and where; directories of torch make text of them. (What modules give with
            ``get_extra_state`` is in the rest of the checkpoint, too, as it is.)
    """

    def __init__(self) -> None:
        self.paths: tuple[Path, ...] = ()
        self.other_keys: list[tuple[Path, Any]] = []
        self._form: Any = None
        self._kinds: dict[type, int] = {}

    def of(self, state: Mapping[str, Any]) -> list[Any]:
        """The items of a state.

        Raises:
            NotSerializableError: if torch would give two of them the same name.
        """
        found: list[Any] = []
        form = self._collect(state, found, is_list=False)
        if form != self._form:
            paths: list[Path] = []
            self.other_keys = []
            _name(form, (), paths, self.other_keys)
            _check_names(paths)
            self.paths, self._form = tuple(paths), form
        return found

    def _collect(self, value: Any, found: list[Any], *, is_list: bool) -> _Form:
        """Add the items of a mapping or list; the form that tells it from all that are put together in another way."""
        inner: list[tuple[int, _Form]] = []
        kinds = self._kinds
        for number, item in enumerate(value if is_list else value.values()):
            kind = kinds.get(type(item))
            if kind is None:
                kind = kinds[type(item)] = _kind(type(item))
            # Torch would leave an empty dict out, and who looks for it after a resume would miss it.
            if kind == _LEAF or (kind == _LIST and _is_one_item(item)) or (kind == _MAPPING and not item):
                found.append(item)
            else:
                inner.append((number, self._collect(item, found, is_list=kind == _LIST)))
        return len(value) if is_list else tuple(value), inner


def _kind(what: type) -> int:
    if issubclass(what, Mapping):
        return _MAPPING
    return _LIST if issubclass(what, list) else _LEAF


def _is_one_item(values: list[Any]) -> bool:
    """Whether a list is one item: it holds no tensors, and nothing that is taken apart."""
    if _SCALARS.issuperset(map(type, values)):  # as the names of thousands of parameters
        return True
    return not any(
        isinstance(value, (torch.Tensor, Mapping)) or (isinstance(value, list) and not _is_one_item(value))
        for value in values
    )


def _name(form: _Form, path: Path, paths: list[Path], other_keys: list[tuple[Path, Any]]) -> None:
    keys, inner = form
    below = dict(inner)
    names: list[str | int] = [*range(keys)] if isinstance(keys, int) else [str(key) for key in keys]
    if not isinstance(keys, int) and not any(is_extra(part) for part in path if isinstance(part, str)):
        other_keys += [(path, key) for key in keys if not isinstance(key, str)]
    for number, key in enumerate(names):
        if number in below:
            _name(below[number], (*path, key), paths, other_keys)
        else:
            paths.append((*path, key))


def _check_names(paths: list[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in paths:
        name = ".".join(map(str, path))
        if (other := seen.setdefault(name, path)) is not path:
            raise NotSerializableError(
                f"two items of the training state have the name {name!r} for torch.distributed.checkpoint: at"
                f" {list(other)} and at {list(path)}. Give one of them another key in the state_dict"
            )
