"""Whether attributes are as they were: a stamp of each value, equal to a later one if nothing was written to it.

What an object holds is looked at as well, to some depth: what training changes in a meter, a metric or a teacher of a
module no checkpoint has. Where an object is found by a path of its own, its class stands for it.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
import types
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from lightning_spot.state import namespaces
from lightning_spot.state.compat import BUFFERS, PARAMETERS, writes_of
from lightning_spot.state.logged_values import is_metric
from lightning_spot.state.randomness import GENERATORS, capture_generator, is_of_process, stamp_of

logger = logging.getLogger(__name__)

SCALARS: frozenset[type] = frozenset((bool, int, float, str, bytes, type(None)))
"""Kinds of values that are their own stamp."""

STATEFUL = (nn.Module, GradScaler, LRScheduler)
"""Kinds of torch's objects that training changes, and that a program may keep to itself."""

_CONTAINERS = (list, tuple, dict, deque)
_VALUES = (*_CONTAINERS, torch.Tensor, np.ndarray, np.generic, Enum, set, frozenset, complex, bytearray, *GENERATORS)
_PROXIES = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_CLOSED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, *_PROXIES)
PACKAGES = frozenset(
    ("asyncio", "concurrent", "fsspec", "lightning_spot", "logging", "multiprocessing", "pathlib", "threading")
)
"""Of whose objects nothing is looked at: those of a process, and caches of files."""

_LIBRARIES = frozenset(("abc", "builtins", "lightning", "pytorch_lightning", "torch", "torchmetrics", "typing"))
_MOST_ITEMS = 100_000
_MOST_OF_OBJECTS = 64
"""Attributes of an object that are looked at, and items of a container in there: it may be a tokenizer's vocabulary."""
_MOST_TENSORS = 8
_MOST_BYTES = 2**20
"""Of an array that is compared whole; of a larger one, and of tensors whose writes torch does not count, some are."""
_SAMPLES = 4096
_SHORT = 16  # items that are compared of a longer container at each end, if not all of them are
_DEEPEST = 3  # of objects
_DEEPEST_NESTED = 8  # of containers


def is_value(value: Any) -> bool:
    """Whether a value is known by what is in it, whatever holds it; no object of a class of the user's."""
    return type(value) in SCALARS or issubclass(type(value), _VALUES)


def own_classes(kind: type) -> Iterator[type]:
    """The classes of the user's that a class is made of."""
    yield from (each for each in kind.__mro__ if each.__module__.split(".")[0] not in _LIBRARIES)


def class_attributes(kind: type) -> dict[str, Any]:
    """What a class holds for all of its instances, but for functions and the like."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc_"))
        and not hasattr(type(value), "__get__")
        and not isinstance(value, (type, types.ModuleType))
    }


def of_classes(item: Any) -> Mapping[str, Any]:
    """What the classes of the user's hold that an object is of."""
    return ChainMap(*map(class_attributes, own_classes(type(item))))


class ChangeDetector:
    """Stamps values, each object once, whoever holds it: one is made for each look at all of them.

    Tensors of the module that is trained do not count: they are in a checkpoint, whoever else knows them.

    Args:
        modules: all parts of that module.
        most_items: of one value, with all that is in it; of a container with more its length and ends are looked at.
        looks: whether objects and generators are looked into; if not, they count as their class, since they are found
            by paths of their own.
        restored: objects whose states are in a checkpoint, whoever else knows them.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        most_items: int = _MOST_ITEMS,
        looks: bool = True,
        restored: Iterable[Any] = (),
    ) -> None:
        self._modules, self._most_items, self._looks = modules, most_items, looks
        self._trained: set[int] | None = None
        self._known: dict[int, Any] = {id(each): _Same(each) for each in restored}
        self._left = 0

    def stamp(self, value: Any) -> Any:
        """What a value is now. It keeps no tensor and no user's object alive."""
        self._left = self._most_items
        return self._stamp(value, 0, 0)

    def _stamp(self, value: Any, depth: int, nested: int) -> Any:
        kind: type = type(value)
        if kind in SCALARS:
            return value
        try:
            if issubclass(kind, torch.Tensor):
                return _Same(value), None if self._is_trained(value) else writes_of(value)
            if issubclass(kind, _CONTAINERS):
                return self._container(value, depth, nested + 1)
            if issubclass(kind, _VALUES):
                return kind, _content(value) if self._looks or not issubclass(kind, GENERATORS) else None
            return self._object(value, depth) if self._looks else _shape_of(value)
        except Exception as error:  # of the user's class: its len(), its iteration, its attributes
            logger.debug("lightning_spot: a %s cannot be looked into: %s", kind.__qualname__, error)
            return _Same(value)

    def _container(self, value: Any, depth: int, nested: int) -> Any:
        kind, length = type(value), len(value)
        self._left -= length
        if self._left < 0 or nested > _DEEPEST_NESTED or (depth and length > _MOST_OF_OBJECTS):
            ends = None if self._looks else self._ends(value.values() if isinstance(value, dict) else value)
            return kind, length, _Same(value) if ends is None else ends
        if length > _SHORT and not isinstance(value, dict) and SCALARS.issuperset(map(type, value)):
            return kind, list(value)
        if isinstance(value, dict):
            items = list(value.items())  # others may write to it
            return kind, [(self._stamp(key, depth, nested), self._stamp(item, depth, nested)) for key, item in items]
        return kind, [self._stamp(item, depth, nested) for item in list(value)]

    def _ends(self, value: Any) -> list[Any]:
        """Some of what is in a container: its first items and its last ones, but for what is in these."""
        found = [*islice(value, _SHORT), *islice(reversed(value), _SHORT)]
        opaque = [isinstance(each, _CONTAINERS) or not is_value(each) for each in found]
        return [_Same(each) if is_so else self._stamp(each, 0, 0) for each, is_so in zip(found, opaque, strict=True)]

    def _object(self, value: Any, depth: int) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = _Same(value)  # it may hold itself
            if depth <= _DEEPEST and _is_open(value):
                self._known[id(value)] = _Same(value), self._look(value, depth + 1)
        return self._known[id(value)]

    def _look(self, value: Any, depth: int) -> Any:
        if isinstance(value, nn.Module) and not is_metric(value):
            found = [each for each in (*value.parameters(), *value.buffers()) if not self._is_trained(each)]
            some = found[:: max(1, len(found) // _MOST_TENSORS)][:_MOST_TENSORS]
            return [(_Same(each), writes_of(each), some_of(each)) for each in some]
        own = list(vars(value).items())[:_MOST_OF_OBJECTS]
        return [(name, self._stamp(item, depth, 0)) for name, item in own]

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        if self._trained is None:
            tables = [table for part in self._modules for table in (PARAMETERS.of(part), BUFFERS.of(part))]
            self._trained = {id(each) for table in tables for each in table.values()}
        return id(tensor) in self._trained


class _Same:
    """Equal to what is of the same object, which it keeps alive only if there is no other way to know it."""

    def __init__(self, value: Any) -> None:
        try:
            self._of: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._of = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (value := self._of()) is not None and other._of() is value

    __hash__ = object.__hash__


def _content(value: Any) -> Any:
    """What one of ``_VALUES`` contains, that is no container and no tensor."""
    if isinstance(value, GENERATORS):
        return _Same(value) if is_of_process(value) else stamp_of(capture_generator(value))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or type(value) is not np.ndarray:  # one of a kind of its own may be mapped from a file
            return value.shape, _Same(value)
        part = value if value.nbytes <= _MOST_BYTES else value.flat[:: -(-value.size // _SAMPLES)]
        return value.dtype.str, value.shape, xxhash.xxh3_128_digest(part.tobytes())
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (set, frozenset)):
        is_plain = len(value) <= _SAMPLES and all(type(item) in SCALARS or isinstance(item, Enum) for item in value)
        return frozenset(value) if is_plain else (len(value), _Same(value))
    return bytes(value) if isinstance(value, bytearray) else value


def some_of(tensor: torch.Tensor) -> bytes:
    """Some of a tensor's numbers, on the host: averages are written past torch's counts, too."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return b""
    flat = tensor.detach().resolve_conj().reshape(-1)
    return flat[:: -(-max(1, flat.numel()) // _SAMPLES)].contiguous().view(torch.uint8).numpy().tobytes()


def _is_open(value: Any) -> bool:
    """Whether an object is looked into: one of the user's, or a module that is no part of the one that is trained."""
    if issubclass(type(value), _CLOSED) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    package = type(value).__module__.split(".")[0]
    if package in PACKAGES or isinstance(value, namespaces.classes("", "LightningModule", "LightningDataModule")):
        return False
    return isinstance(value, STATEFUL) or package not in ("lightning", "pytorch_lightning", "torch")


def is_handle(value: Any) -> bool:
    """Whether a value is something to be closed that no other process could be given, and nothing to iterate over."""
    if not callable(getattr(value, "close", None)) or hasattr(value, "__next__"):
        return False
    try:
        value.__reduce_ex__(2)
    except Exception:
        return True
    return False


def _shape_of(value: Any) -> Any:
    """What an object is that is not looked into: its class, and of an iterator the place where it shows that.

    An open file or connection is ``None``, which it takes the place of where a sample is read first.
    """
    if is_handle(value):
        return None
    place: Any = None
    if type(value) is itertools.count:
        place = repr(value)
    elif inspect.isgenerator(value):
        own = inspect.getgeneratorlocals(value).items()
        place = inspect.getgeneratorstate(value), [item for item in own if type(item[1]) in SCALARS]
    elif hasattr(value, "__next__"):
        place = operator.length_hint(value, -1)
    return type(value), place
