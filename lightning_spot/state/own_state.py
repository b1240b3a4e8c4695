"""What a loader draws from or changes of its own: generators, and values of its samplers, its data and their objects.

Found by a walk through attributes, so that each has a path (``"dataset.transform.rng"``) under which another process
finds it again. In a worker the walk begins at the data set and the collate function. An attribute that training or
reading has changed comes back if it is a plain value, as far as all that has changed in its object is: what is beside
a file, a queue or a cache would not fit these. What does not come back is named.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_spot.state import namespaces
from lightning_spot.state.change_detector import PACKAGES, SCALARS, ChangeDetector, is_handle, of_classes
from lightning_spot.state.plain_values import NotPlain, copy_of, whole, written
from lightning_spot.state.randomness import (
    GENERATORS,
    State,
    capture_generator,
    capture_random,
    restore_generator,
    restore_random,
)
from lightning_spot.trees import leaves

_CLOSED = (str, bytes, bytearray, torch.Tensor, np.ndarray, type, types.ModuleType, weakref.ref)
_NOT_LOOKED_INTO = PACKAGES | {"pandas"}
"""Packages of objects without attributes of the user's: the cells of a table are in none, its caches are."""

_EPOCHS = frozenset(("epoch", "_epoch", "current_epoch"))
_OF_TORCH = frozenset((*vars(nn.Module()), *vars(DataLoader(TensorDataset(torch.zeros(1))))))
"""Attributes of torch's loaders and modules, which are not the user's."""

_FOUND = (*GENERATORS, Dataset, Sampler)
"""What is found by its own path, and is no value of the object that has it."""

_APART = frozenset(("dataset", "sampler", "batch_sampler", "collate_fn"))
"""Parts of a loader that its own state may leave out."""

_DEEPEST = 6
_MOST_ITEMS = 64
_MOST_OBJECTS = 2000
_MOST_BYTES, _MOST_KEPT_BYTES = 2**20, 2**22
"""Of the tensors, arrays and long lists of one attribute that is kept, and of all of a loader."""

_MOST_COMPARED = {True: 2**17, False: 2**12}
"""Longest container of a sampler, and of other objects, that is compared item by item."""

_MOST_KEPT = 2**12
"""Items of a container that is kept; a longer list may hold numbers."""


class OwnState:
    """The own state of one loader, in this process.

    Args:
        roots: where the walk begins, by name.
        by_state: whether what has a ``load_state_dict`` comes back by it.

    """

    def __init__(self, roots: Mapping[str, Any], *, by_state: bool = False) -> None:
        self._roots = dict(roots)
        self._by_state = by_state or is_stateful(roots.get(""))
        self._first = {path: _stamps(item, own) for path, item, own in self._owners()}
        self._drawn = self._draws()

    @classmethod
    def of(cls, loader: Any) -> OwnState:
        """The state of ``loader``; what changed is measured from the first time this process asked for it."""
        own = cls({"": loader})
        with suppress(TypeError):  # it cannot be a key
            own._first = _KNOWN.setdefault(loader, own._first)
        return own

    def capture(self) -> State:
        """Generators, seeds of samplers that make a new generator for each epoch, and plain values that changed."""
        found = list(self.items())
        return {
            "generators": {path: capture_generator(item) for path, item in found if isinstance(item, GENERATORS)},
            "seeds": {path: item.seed for path, item in found if _is_seeded(item)},
            "values": {path: kept for path, _, kept in self._changed() if kept},
        }

    def restore(self, state: State, *, values: bool = True, but: Collection[int] = ()) -> None:
        """Set what :meth:`capture` returned, as far as it is still there.

        Args:
            state: that was captured.
            values: whether plain values are set, too.
            but: identities of objects that stay as they are.
        """
        for path, item in self.items():
            if id(item) in but:
                continue
            if isinstance(item, GENERATORS):
                if path in state["generators"]:
                    restore_generator(item, state["generators"][path])
                continue
            if path in state["seeds"] and _is_seeded(item):
                item.seed = state["seeds"][path]
            for name, value in state["values"].get(path, {}).items() if values else ():
                _put(item, name, value)

    def capture_all(self) -> State:
        """What :meth:`capture` returns, and the generators of the process."""
        return {**capture_random(), "own": self.capture()}

    def restore_all(self, state: State) -> None:
        """Set what :meth:`capture_all` returned."""
        restore_random(state)
        self.restore(state["own"])

    def changed_data(self) -> list[str]:
        """Names of attributes that are not as they were at first, and that neither a state nor a snapshot holds."""
        return sorted(_name(path, name) for path, lost, _ in self._changed() for name in lost)

    def has_changed(self) -> bool:
        """Whether numbers were drawn, or an attribute changed, but for epochs, which programs tell data."""
        changed = (name for _, lost, kept in self._changed() for name in (*lost, *kept))
        return self._draws() != self._drawn or any(name not in _EPOCHS for name in changed)

    def _draws(self) -> Any:
        """Where generators are that do not come back by a state."""
        detector = ChangeDetector(())
        found = (
            (path, item) for path, item, comes_back in self._walk() if isinstance(item, GENERATORS) and not comes_back
        )
        return [(path, detector.stamp(item)) for path, item in found]

    def _changed(self) -> Iterator[tuple[str, State, State]]:
        """Of each object the attributes that have changed: those that do not come back, and copies of those that do."""
        left = _MOST_KEPT_BYTES
        for path, item, own in self._owners():
            first = self._first.get(path, {})
            stamps = _stamps(item, own).items()
            changed = {name: own[name] for name, stamp in stamps if name not in first or first[name] != stamp}
            if changed:
                kept = _copies(item, changed, left)
                left -= sum(tensor.nbytes for tensor in leaves(kept, torch.Tensor))
                yield path, {} if kept else changed, kept

    def _owners(self) -> Iterator[tuple[str, Any, State]]:
        """Each object whose attributes count, with these; of what comes back by its state, the epoch only."""
        for path, item, comes_back in self._walk():
            if not _is_owner(path, item):
                continue
            own = {name: value for name, value in _attributes(item).items() if not isinstance(value, _FOUND)}
            if comes_back:
                own = {name: value for name, value in own.items() if name in _EPOCHS and _is_epoch(value)}
            if own:
                yield path, item, own

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every object within reach, each once, nearest first."""
        return ((path, item) for path, item, _ in self._walk())

    def _walk(self) -> Iterator[tuple[str, Any, bool]]:
        """The same, and of each whether it comes back by a state of its own, or of what it is in."""
        seen: set[int] = set()
        waiting = deque((name, root, 0, False) for name, root in self._roots.items())
        while waiting and len(seen) < _MOST_OBJECTS:
            path, item, depth, within = waiting.popleft()
            if type(item) in SCALARS or id(item) in seen or (_is_closed(item) and depth):
                continue
            seen.add(id(item))
            comes_back = within or (self._by_state and hasattr(item, "load_state_dict"))
            yield path, item, comes_back
            if depth < _DEEPEST and not isinstance(item, GENERATORS):
                waiting += [
                    (_name(path, name), part, depth + 1, comes_back and (path != "" or name not in _APART))
                    for name, part in _parts(item)
                ]


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its position itself, as torchdata's ``StatefulDataLoader`` does."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


_KNOWN: weakref.WeakKeyDictionary[Any, dict[str, dict[str, Any]]] = weakref.WeakKeyDictionary()


def _name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """What belongs to an object: its attributes, or its items where they are few."""
    if isinstance(item, (list, tuple, dict)):
        if len(item) <= _MOST_ITEMS:
            yield from ((str(key), part) for key, part in (item.items() if isinstance(item, dict) else enumerate(item)))
    elif isinstance(item, functools.partial):
        yield from (("func", item.func), ("args", item.args), ("keywords", item.keywords))
    elif isinstance(item, types.MethodType):
        yield "self", item.__self__
    elif not isinstance(item, (types.FunctionType, types.BuiltinFunctionType)) and _is_open(type(item)):
        at_work = ("_iterator", "multiprocessing_context") if isinstance(item, DataLoader) else ()
        yield from ((name, part) for name, part in _fields(item).items() if name not in at_work)


def _fields(item: Any) -> State:
    """The attributes of an object itself, also those that have slots."""
    own = getattr(item, "__dict__", {})
    slots = {name: getattr(item, name) for name in _slots(type(item)) if hasattr(item, name)}  # type: ignore[arg-type] # a class
    return {**slots, **(own if isinstance(own, dict) else {})}


@functools.lru_cache
def _slots(kind: Any) -> tuple[str, ...]:
    """Names of the slots of an object of a class."""
    named = (vars(each).get("__slots__", ()) for each in kind.__mro__ if each.__module__ != "builtins")
    names = chain.from_iterable([each] if isinstance(each, str) else each for each in named)
    return tuple(name for name in names if not name.startswith("__"))


def _is_open(kind: type) -> bool:
    module = kind.__module__
    if module.startswith(("lightning.", "pytorch_lightning.")):
        return issubclass(kind, (Sampler, Dataset, DataLoader))
    return module.split(".")[0] not in _NOT_LOOKED_INTO


def _is_closed(item: Any) -> bool:
    """Whether an object is not looked into: modules with weights and Trainers are not part of how data are read."""
    if isinstance(item, nn.Module):
        return any(True for _ in chain(item.parameters(), item.buffers()))
    return isinstance(item, (*_CLOSED, *namespaces.classes("", "Trainer")))  # a data module has it


def _is_owner(path: str, item: Any) -> bool:
    """Whether the attributes of an object are values of the loader's: of containers, what they hold is looked at."""
    kind = type(item)
    if isinstance(item, (list, tuple, dict, functools.partial, types.MethodType, *GENERATORS)) or not _is_open(kind):
        return False
    if isinstance(item, (DataLoader, Dataset, Sampler, nn.Module)) or path.endswith("sampler"):
        return True
    has_a_state = namespaces.classes("", "LightningDataModule")  # by which a program keeps it
    return not kind.__module__.startswith("torch.") and not isinstance(item, has_a_state)


def _attributes(item: Any) -> State:
    """What an object holds that a program may change; of its class, too."""
    of_torch = _OF_TORCH if isinstance(item, (nn.Module, DataLoader)) else ()
    own = {name: value for name, value in _fields(item).items() if name not in of_torch}
    return {**of_classes(item), **own}


def _is_seeded(holder: Any) -> bool:
    return isinstance(holder, Sampler) and isinstance(getattr(holder, "seed", None), int)


def _is_epoch(value: Any) -> bool:
    """Whether a value can be an epoch: streams that share it with their workers have it in a tensor."""
    return type(value) is int or (isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype == torch.int64)


# -- plain values -----------------------------------------------------------------------------------------------------


def _stamps(item: Any, own: State) -> State:
    """How the attributes of an object are; of a seeded sampler without the seed, which is kept in any case."""
    most = _MOST_COMPARED[isinstance(item, Sampler)]
    detector = ChangeDetector((), most_items=most, looks=False)
    return {name: detector.stamp(value) for name, value in own.items() if not (name == "seed" and _is_seeded(item))}


def _copies(item: Any, changed: State, left: int) -> State:
    """Copies of what has changed in an object; none, if some is no plain value, or beside a file or an iterator."""
    own = _fields(item)
    if not changed.keys() <= own.keys() or any(map(_is_opaque, own.values())):
        return {}
    try:
        return {name: copy_of(value, min(left, _MOST_BYTES), _MOST_KEPT) for name, value in changed.items()}
    except NotPlain:
        return {}


def _is_opaque(value: Any) -> bool:
    """Whether a value does not show what has changed in it: an open file, and iterators but for a count."""
    return is_handle(value) or (hasattr(value, "__next__") and type(value) is not count)


def _put(holder: Any, name: str, saved: Any) -> None:
    """Set a value, in place where an iterator may hold it, and past a class of the user's that forbids it."""
    value = whole(saved)
    with suppress(RuntimeError):  # of a tensor whose elements lie in the same memory
        value = written(_fields(holder).get(name), value)
    if name in _slots(type(holder)):  # type: ignore[arg-type] # a class
        object.__setattr__(holder, name, value)
    else:
        vars(holder)[name] = value
