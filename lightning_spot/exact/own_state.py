"""What a loader draws from of its own: generators of its samplers, its data set, its transforms; counters, orders.

Found by a walk through attributes, so that each has a path (``"dataset.transform.rng"``) under which another process
finds it again. In a worker the walk begins at the data set and the collate function.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_spot.exact.change_detector import ChangeDetector, class_attributes, own_classes
from lightning_spot.exact.data_changes import digest_of, is_as, mark_of
from lightning_spot.exact.indices import is_stateful
from lightning_spot.exact.randomness import GENERATORS, State, capture_generator, restore_generator

MOST_NUMBERS = 2**17
"""Longest list, array or tensor of numbers (an order, weights) of a sampler that is kept where it changes."""

_SCALARS = frozenset((bool, int, float, str, type(None)))
_CLOSED = (str, bytes, bytearray, torch.Tensor, np.ndarray, torch.nn.Module, type, types.ModuleType, weakref.ref)
_EPOCHS = frozenset(("epoch", "_epoch", "current_epoch"))
_PACKAGES = frozenset(("multiprocessing", "threading", "logging", "pathlib", "torch.multiprocessing"))
_NONE = object()
_DEEPEST = 6
_MOST_ITEMS = 64
_MOST_OBJECTS = 2000


class OwnState:
    """The own state of one loader, in this process.

    Args:
        roots: where the walk begins, by name.
        by_state: whether what has a ``load_state_dict`` comes back by it.
    """

    def __init__(self, roots: Mapping[str, Any], *, by_state: bool = False) -> None:
        self._roots = dict(roots)
        self._by_state = by_state or is_stateful(roots.get(""))
        self._first = {path: _copies(_values(item)) for path, item in self.items() if _is_holder(path, item)}
        self._marks = {name: mark_of(value) for name, value in self._data()}

    @classmethod
    def of(cls, loader: Any) -> OwnState:
        """The state of ``loader``; what changed is measured from the first time this process asked for it."""
        own = cls({"": loader})
        with suppress(TypeError):  # it cannot be a key
            own._first, own._marks = _KNOWN.setdefault(loader, (own._first, own._marks))
        return own

    def capture(self) -> State:
        """Generators, seeds of samplers that make a new generator for each epoch, and values that have changed."""
        state: State = {"generators": {}, "seeds": {}, "values": {}}
        for path, item in self.items():
            if _is_generator(item):
                state["generators"][path] = capture_generator(item)
            elif _is_holder(path, item):
                if _is_seeded(item):
                    state["seeds"][path] = item.seed
                if changed := _changed(self._first.get(path, {}), _values(item)):
                    state["values"][path] = changed
        return state

    def restore(self, state: State) -> None:
        """Set what :meth:`capture` returned, as far as it is still there."""
        for path, item in self.items():
            if _is_generator(item):
                if path in state["generators"]:
                    restore_generator(item, state["generators"][path])
                continue
            if path in state["seeds"] and _is_seeded(item):
                item.seed = state["seeds"][path]
            for name, value in state["values"].get(path, {}).items():
                _put(item, name, value)

    def drawn(self) -> Any:
        """Where generators are, equal to a later one if none was drawn from; those that come back are left out."""
        detector, found = ChangeDetector(()), list(self.items())
        back = tuple(f"{path}." for path, item in found if self._comes_back(item))
        generators = [(path, item) for path, item in found if _is_generator(item) and not path.startswith(back)]
        return [(path, detector.stamp(item)) for path, item in generators]

    def _comes_back(self, item: Any) -> bool:
        return self._by_state and hasattr(item, "load_state_dict")

    def changed_data(self) -> dict[str, str]:
        """Digests of the data's attributes that are not as they were at first; those that come back are left out."""
        return {
            name: digest_of(value) for name, value in self._data() if not is_as(self._marks.get(name, _NONE), value)
        }

    def differing_data(self, saved: Mapping[str, str]) -> list[str]:
        """Names of attributes that another process had changed, and that are not as they were there."""
        present = {name: value for name, value in self._data() if name in saved}
        return [name for name, told in saved.items() if name not in present or digest_of(present[name]) != told]

    def _data(self) -> Iterator[tuple[str, Any]]:
        """Attributes that no snapshot holds: of data sets and collate functions, and what is not kept of samplers."""
        for path, item in self.items():
            if self._comes_back(item) or not (_is_holder(path, item) or path == "collate_fn"):
                continue
            kept = _values(item)
            of_classes = ChainMap(*map(class_attributes, own_classes(type(item))))
            for name, value in {**of_classes, **getattr(item, "__dict__", {})}.items():
                if name not in kept and name != "seed" and not (_is_generator(value) or _is_holder("", value)):
                    yield f"{path}.{name}" if path else name, value

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every object within reach, each once, nearest first."""
        seen: set[int] = set()
        waiting = [(name, root, 0) for name, root in self._roots.items()]
        while waiting and len(seen) < _MOST_OBJECTS:
            path, item, depth = waiting.pop(0)
            if type(item) in _SCALARS or id(item) in seen or (isinstance(item, _CLOSED) and depth):
                continue
            seen.add(id(item))
            yield path, item
            if depth < _DEEPEST and not _is_generator(item):
                waiting += [(f"{path}.{name}" if path else name, part, depth + 1) for name, part in _parts(item)]


_KNOWN: weakref.WeakKeyDictionary[Any, tuple[dict[str, State], dict[str, Any]]] = weakref.WeakKeyDictionary()


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """What belongs to an object: its attributes, or its items where they are few."""
    if isinstance(item, (list, tuple)):
        if len(item) <= _MOST_ITEMS:
            yield from ((str(number), part) for number, part in enumerate(item))
    elif isinstance(item, dict):
        if len(item) <= _MOST_ITEMS:
            yield from ((str(key), part) for key, part in item.items())
    elif isinstance(item, functools.partial):
        yield from (("func", item.func), ("args", item.args), ("keywords", item.keywords))
    elif isinstance(item, types.MethodType):
        yield "self", item.__self__
    elif not isinstance(item, (types.FunctionType, types.BuiltinFunctionType)) and _is_open(type(item)):
        attributes = getattr(item, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((name, part) for name, part in list(attributes.items()) if not _is_iterator(item, name))


def _is_iterator(item: Any, name: str) -> bool:
    return isinstance(item, DataLoader) and name in ("_iterator", "multiprocessing_context")


def _is_open(kind: type) -> bool:
    module = kind.__module__
    if module.startswith(("lightning.", "pytorch_lightning.")):
        return issubclass(kind, (Sampler, Dataset, DataLoader))
    return module.split(".")[0] not in _PACKAGES


def _is_generator(item: Any) -> bool:
    return isinstance(item, GENERATORS)


def _is_holder(path: str, item: Any) -> bool:
    return _is_data(item) or isinstance(item, Sampler) or path.rpartition(".")[2] in ("sampler", "batch_sampler")


def _is_data(item: Any) -> bool:
    """Whether an object is a data set; those that are none of torch's may be told their epoch as well."""
    has_epoch = callable(getattr(item, "set_epoch", None)) and not isinstance(item, Sampler)
    return isinstance(item, Dataset) or has_epoch


def _is_seeded(holder: Any) -> bool:
    return isinstance(holder, Sampler) and isinstance(getattr(holder, "seed", None), int)


# -- plain values of samplers and data sets ---------------------------------------------------------------------------


def _values(holder: Any) -> State:
    """Numbers, strings, orders, weights of samplers; of data sets the epoch only: the rest may be an open file's."""
    attributes = getattr(holder, "__dict__", {}).items()
    if _is_data(holder):
        return {name: int(value) for name, value in attributes if name in _EPOCHS and _is_epoch(value)}
    kept = {name: value for name, value in attributes if type(value) in _SCALARS or _is_order(value)}
    if _is_seeded(holder):
        kept.pop("seed", None)  # kept in any case, see capture
    return kept


def _is_epoch(value: Any) -> bool:
    """Whether a value can be an epoch: streams that share it with their workers have it in a tensor."""
    return type(value) is int or (isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype == torch.int64)


def _is_order(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= MOST_NUMBERS and type(value[0]) in (int, float) and len(set(map(type, value))) == 1
    if isinstance(value, np.ndarray):
        return 0 < value.size <= MOST_NUMBERS and value.dtype.kind in "if"
    return isinstance(value, torch.Tensor) and 0 < value.numel() <= MOST_NUMBERS and not value.is_complex()


def _copies(values: State) -> State:
    return {
        name: copy.copy(value) if not isinstance(value, torch.Tensor) else value.clone()
        for name, value in values.items()
    }


def _changed(first: State, now: State) -> State:
    changed = {name: value for name, value in now.items() if name not in first or not _same(first[name], value)}
    return {name: value if type(value) in _SCALARS else _tensor(value) for name, value in changed.items()}


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return bool(np.array_equal(left, right)) if isinstance(left, np.ndarray) else bool(left == right)


def _tensor(order: Any) -> torch.Tensor:
    if isinstance(order, torch.Tensor):
        return order.detach().cpu().clone()
    return torch.from_numpy(np.array(order))


def _put(holder: Any, name: str, value: Any) -> None:
    """Set a value, in place where an iterator may hold it."""
    present = getattr(holder, "__dict__", {}).get(name)
    if not isinstance(value, torch.Tensor):
        if type(present) in _SCALARS:
            setattr(holder, name, value)
        elif isinstance(present, torch.Tensor):
            present.fill_(value)
    elif isinstance(present, list):
        present[:] = value.tolist()
    elif isinstance(present, np.ndarray) and present.shape == tuple(value.shape):
        present[...] = value.numpy()
    elif isinstance(present, torch.Tensor) and present.shape == value.shape:
        present.copy_(value)
