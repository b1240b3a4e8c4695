"""Objects that no checkpoint holds, such as a meter of a module: whether what is in them has changed."""

from __future__ import annotations

import logging
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_spot.capture.tensors import Glances
from lightning_spot.exact import namespaces
from lightning_spot.exact.further_kinds import MOST_ITEMS
from lightning_spot.exact.plain_values import SCALARS, is_kept, is_same, mark, without
from lightning_spot.exact.private import writes_of

logger = logging.getLogger(__name__)

_PROXIES = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_CLOSED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, *_PROXIES)
_PACKAGES = frozenset(("asyncio", "concurrent", "lightning_spot", "logging", "multiprocessing", "pathlib", "threading"))
_CONTAINERS = (list, tuple, dict, deque)
_DEEPEST = 3
_MOST_ITEMS = 64
_MOST_TENSORS = 8


class Inside:
    """What is in objects, as far as it is seen: plain values, tensors, generators, and other objects, to some depth.

    Each object is looked at once, whoever holds it. Tensors of the module that is trained are not: they are in a
    checkpoint, whoever else knows them.

    Args:
        modules: all parts of that module.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._modules = modules
        self._trained: set[int] | None = None
        self._seen: dict[int, Any] = {}
        self._verdicts: dict[int, tuple[Any, bool]] = {}

    def is_as(self, before: Any, value: Any) -> bool:
        """Whether a value has in it what was seen before.

        Args:
            before: what :meth:`of` returned; that of another time.
            value: see there.
        """
        known, verdict = self._verdicts.get(id(value), (None, False))
        if known is not before:  # hundreds of modules may hold one and the same configuration
            verdict = _is_same(before, self.of(value))
            self._verdicts[id(value)] = before, verdict
        return verdict

    def of(self, value: Any, depth: int = 0) -> Any:
        """What is in a value; ``None`` where nothing of it is looked at.

        Args:
            value: an object, or a container of some.
            depth: of objects around it.
        """
        if depth > _DEEPEST or type(value) in SCALARS or issubclass(type(value), _CLOSED):
            return None
        if id(value) not in self._seen:
            self._seen[id(value)] = None  # it may hold itself
            try:
                self._seen[id(value)] = self._look(value, depth)
            except Exception as error:  # of the user's class: its len(), its iteration, its attributes
                logger.debug("lightning_spot: a %s cannot be looked into: %s", type(value).__qualname__, error)
        return self._seen[id(value)]

    def _look(self, value: Any, depth: int) -> Any:
        if isinstance(value, _CONTAINERS):
            if len(value) > _MOST_ITEMS:
                return None
            items = list(value.items() if isinstance(value, dict) else enumerate(list(value)))  # others may write to it
            found = ((key, self.of(item, depth + 1)) for key, item in items if may_hold_objects(item))
            return {key: seen for key, seen in found if seen is not None} or None
        if not _is_open(value):
            return None
        if isinstance(value, nn.Module) and not isinstance(value, Metric):
            return self._tensors(value)
        return {name: self._part(item, depth) for name, item in list(vars(value).items())[:_MOST_ITEMS]}

    def _part(self, value: Any, depth: int) -> Any:
        kind: type = type(value)
        if kind in SCALARS or is_kept(kind):
            return self.mark(value, most=_MOST_ITEMS)
        return self.of(value, depth + 1)

    def mark(self, value: Any, *, most: int = MOST_ITEMS) -> Any:
        """See :func:`~lightning_spot.exact.plain_values.mark`."""
        return without(mark(value, most=most), self._is_trained)

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        if self._trained is None:
            self._trained = {id(each) for part in self._modules for each in _own_tensors(part)}
        return id(tensor) in self._trained

    def _tensors(self, module: nn.Module) -> _Tensors:
        """Some of those of a module, but none that is trained."""
        found = [each for each in (*module.parameters(), *module.buffers()) if not self._is_trained(each)]
        return _Tensors(found[:: max(1, len(found) // _MOST_TENSORS)][:_MOST_TENSORS])


def may_hold_objects(value: Any) -> bool:
    """Whether a value is an object that no checkpoint holds, or a container in which there may be some."""
    return issubclass(type(value), _CONTAINERS) or not (type(value) in SCALARS or is_kept(type(value)))


def _is_open(value: Any) -> bool:
    if not isinstance(getattr(value, "__dict__", None), dict):
        return False
    package = type(value).__module__.split(".")[0]
    if package in _PACKAGES or isinstance(value, namespaces.classes("", "LightningModule", "LightningDataModule")):
        return False
    return isinstance(value, nn.Module) or package not in ("lightning", "pytorch_lightning", "torch")


class _Tensors:
    """Some tensors of a module that is not a part of the one that holds it, such as a teacher in a list."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors, self.counts = tensors, list(map(writes_of, tensors))
        self._glances = Glances(tensor for tensor in tensors if tensor.device.type == "cpu")

    def are_those_of(self, other: _Tensors) -> bool:
        """Whether they are the same, as far as torch's counts and a few bytes tell."""
        same = len(self.tensors) == len(other.tensors) and all(
            left is right for left, right in zip(self.tensors, other.tensors, strict=True)
        )
        return same and self.counts == other.counts and not self._glances.are_others


def _own_tensors(part: nn.Module) -> Iterator[torch.Tensor]:
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)


def _is_same(before: Any, now: Any) -> bool:
    """Whether two results of :meth:`Inside.of` are of the same values."""
    if isinstance(before, _Tensors):
        return isinstance(now, _Tensors) and before.are_those_of(now)
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in before)
    return is_same(before, now)
