"""What places of a training share: tied weights, views of one tensor, one list under two names.

Values come back one by one, into what the program makes: its own ties hold, and those that training made or parted do
not. So a snapshot has the names of what shared memory, and a resumed run compares them with its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.capture.tensors import local_of, storage_address
from lightning_spot.state.change_detector import SCALARS

if TYPE_CHECKING:
    import lightning.pytorch as pl

Place = tuple[Any, ...]
"""The name of a module, of an attribute, and the keys of containers within that."""

Owners = Mapping[str, Mapping[str, Any]]
"""Attributes of modules, parameters and buffers among them, by the module's name; likewise of callbacks."""

Groups = list[list[str]]
"""Names of places that share memory, each place in at most one group."""

_MOST_ITEMS = 100_000
_DEEPEST = 8


def groups_of(inside: Owners, outside: Owners) -> Groups:
    """Which places share memory.

    Values of callbacks, data modules and optimizers count where a module shares them, and where they are views: one
    score with two names is replaced as a whole.

    Args:
        inside: attributes of modules.
        outside: attributes of everything else.
    """
    tensors: dict[int, list[tuple[torch.Tensor, str, bool]]] = defaultdict(list)
    containers: dict[int, list[str]] = defaultdict(list)
    for owners, is_inside in ((inside, True), (outside, False)):
        for place, value in _places(owners):
            name = ".".join(str(part) for part in place if part != "")
            if not isinstance(value, torch.Tensor):
                containers[id(value)] += [name] if is_inside else []
            elif address := storage_address(value):
                tensors[address].append((local_of(value), name, is_inside))
    found = [group for group in containers.values() if len(group) > 1]
    for sharers in tensors.values():
        if len(sharers) > 1:
            found += _overlapping(sorted((*_span(tensor), name, is_inside) for tensor, name, is_inside in sharers))
    return sorted(sorted(group) for group in found)


def _overlapping(sharers: Iterable[tuple[int, int, str, bool]]) -> Iterator[list[str]]:
    """Of tensors in one storage, in their order there, the names of those that have bytes in common."""
    group: list[tuple[int, int, str, bool]] = []
    for sharer in (*sharers, None):
        if sharer is not None and group and sharer[0] < max(stop for _, stop, _, _ in group):
            group.append(sharer)
            continue
        spans, are_inside = {each[:2] for each in group}, any(is_inside for *_, is_inside in group)
        if len(group) > 1 and (are_inside or len(spans) > 1):
            yield [name for _, _, name, _ in group]
        group = [sharer] if sharer is not None else []


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first byte in the storage, and the one behind its last."""
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _places(owners: Owners) -> Iterator[tuple[Place, Any]]:
    """Tensors, lists and dictionaries, wherever in the attributes they are; what is in one of two names, once."""
    seen: set[int] = set()
    waiting: list[tuple[Place, Any]] = [
        ((module, name), value) for module, own in owners.items() for name, value in own.items()
    ]
    while waiting and len(seen) < _MOST_ITEMS:
        place, value = waiting.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor) or kind in (list, dict):
            yield place, value
        if kind in (list, tuple, dict) and len(place) < _DEEPEST and id(value) not in seen:
            seen.add(id(value))
            items = list(value.items() if kind is dict else enumerate(value))
            # Keys of other kinds have names that no other process finds again.
            waiting += [((*place, key), item) for key, item in items if type(item) not in SCALARS and _is_name(key)]


def _is_name(key: Any) -> bool:
    return isinstance(key, (str, int))


def differing(saved: Groups, present: Groups) -> list[str]:
    """Names of what shares memory with others than it did, sorted."""
    names = {name for groups in (saved, present) for group in groups for name in group}
    then, now = _partners(saved), _partners(present)
    return sorted(name for name in names if then.get(name) != now.get(name))


def _partners(groups: Groups) -> dict[str, frozenset[str]]:
    return {name: frozenset(group) for group in groups for name in group}


def outside_of(trainer: pl.Trainer) -> Owners:
    """Attributes of callbacks but ours, of the data module, and states of a user's optimizers by parameter."""
    outside: dict[str, Mapping[str, Any]] = {}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    for number, callback in enumerate([*callbacks, *([data] if data is not None else [])]):
        if not type(callback).__module__.startswith("lightning_spot."):
            kind = type(callback).__qualname__.rpartition(".<locals>.")[2]
            outside[kind if kind not in outside else f"{kind}#{number}"] = vars(callback)
    for number, optimizer in enumerate(trainer.optimizers):
        if type(optimizer).__module__.startswith("torch."):
            continue  # whose states share nothing
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {index: optimizer.state[each] for index, each in enumerate(parameters) if each in optimizer.state}
        outside[f"optimizer {number}"] = {"state": states}
    return outside


def untrained_by_optimizers(trainer: pl.Trainer) -> list[str]:
    """Names of parameters to be trained that no optimizer has: training may have made them."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    named = trainer.lightning_module.named_parameters()
    return [name for name, parameter in named if parameter.requires_grad and id(parameter) not in held]
