"""What several places of a module share: tied weights, views of one tensor, aliases of a list.

Values come back one by one, into what the program makes. So what training has tied, and what the attributes that are
kept share, is noted by its places, and tied again once the values are back.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_spot.capture.tensors import local_of, storage_address
from lightning_spot.config import format_names
from lightning_spot.state.change_detector import SCALARS
from lightning_spot.trees import at

if TYPE_CHECKING:
    import lightning.pytorch as pl

Place = tuple[Any, ...]
"""The name of a module, of an attribute, and the keys of containers within that."""

Owners = Mapping[str, Mapping[str, Any]]
"""Attributes of modules, parameters and buffers among them, by the module's name."""

State = dict[str, Any]

_KINDS = (torch.Tensor, nn.Parameter)
_MOST_ITEMS = 100_000
_MOST_SHARERS = 64
_DEEPEST = 8


class Sharing:
    """Knows what was shared when training began, and so what training has tied, or parted."""

    def __init__(self) -> None:
        self._first: dict[Place, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._pairs: set[frozenset[Place]] = set()

    def begin(self, registered: Mapping[Place, torch.Tensor]) -> None:
        """Note what parameters and buffers share."""
        self._first = {place: (weakref.ref(value), storage_address(value)) for place, value in registered.items()}
        self._pairs = {frozenset((place, of)) for place, of, _ in self._found(list(registered.items()), ())}

    def noted(
        self,
        look: Callable[[], Owners],
        registered: Mapping[Place, torch.Tensor],
        kept: Collection[Place],
        optimizers: Callable[[], Collection[torch.optim.Optimizer]],
    ) -> tuple[list[State], list[str]]:
        """What is to be tied again, as plain values, and names of what cannot be.

        Args:
            look: returns the owners of everything; called if there may be anything.
            registered: parameters and buffers.
            kept: places of attributes that are kept, with more in them than a number.
            optimizers: returns those that may hold parameters which training has made.
        """
        others = {place: value for place, value in registered.items() if not self._is_as_first(place, value)}
        if not kept and not others:
            return [], []
        owners = look()
        groups = [group for optimizer in optimizers() for group in optimizer.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        anew = {place for place, value in others.items() if self._is_made(place, value) and id(value) not in trained}
        apart = [f"{name_of(place)} (a parameter made in training)" for place in sorted(anew)]
        records = []
        for place, of, view in self._found(list(_places(owners)), kept):
            is_registered = place in registered and of in registered
            is_new = is_registered and frozenset((place, of)) not in self._pairs
            if not is_new and place[:2] not in kept and of[:2] not in kept:
                continue
            if view is _PART or any(type(item) is tuple for item in _around(owners, place)):
                apart.append(f"{name_of(place)} (shares memory with {name_of(of)})")
            else:
                records.append({"place": list(place), "of": list(of), "view": view})
        return records, apart

    def _is_as_first(self, place: Place, value: torch.Tensor) -> bool:
        first = self._first.get(place)
        return first is not None and first[0]() is value and first[1] == storage_address(value)

    def _is_made(self, place: Place, value: torch.Tensor) -> bool:
        """Whether a parameter is none of those that were there."""
        is_one_of_first = any(first() is value for first, _ in self._first.values())
        return type(value) is nn.Parameter and place in self._first and not is_one_of_first

    def _found(self, places: list[tuple[Place, Any]], kept: Collection[Place]) -> Iterator[tuple[Place, Place, Any]]:
        """Each place that shares, the one it shares with, and which view it is of that: ``None`` if both are one."""

        def order(item: tuple[Place, Any]) -> tuple[bool, bool]:
            first = self._first.get(item[0])
            return first is None or first[0]() is not item[1], item[0][:2] in kept

        same: dict[int, list[Place]] = defaultdict(list)
        storages: dict[int, list[tuple[Place, torch.Tensor]]] = defaultdict(list)
        for place, value in sorted(places, key=order):  # what is there from the start, or is not kept, comes first
            same[id(value)].append(place)
            if len(same[id(value)]) == 1 and type(value) in _KINDS and value.numel() and (at := storage_address(value)):
                storages[at].append((place, value))
        for first, *others in same.values():
            yield from ((place, first, None) for place in others)
        for sharers in storages.values():
            if len(sharers) > 1:
                yield from _views(sharers)


_PART = object()


def _views(sharers: list[tuple[Place, torch.Tensor]]) -> Iterator[tuple[Place, Place, Any]]:
    """Tensors within others of their storage; ``_PART`` for one that another holds in part."""
    spans = sorted(((*_span(value), place, value) for place, value in sharers), key=lambda item: (item[0], -item[1]))
    _, end, of, base = spans[0]
    for start, stop, place, value in spans[1:]:
        if start >= end:
            end, of, base = stop, place, value
        elif stop <= end and value.dtype == base.dtype and base.stride() == _stride_of_copy(base):
            view = [value.storage_offset() - base.storage_offset(), list(value.shape), list(value.stride())]
            yield place, of, [*view, list(base.stride())]
        else:
            yield place, of, _PART


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first byte in the storage, and the one behind its last."""
    last = sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _stride_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def _places(owners: Owners) -> Iterator[tuple[Place, Any]]:
    """Tensors, lists and dictionaries, wherever in the attributes they are."""
    left = _MOST_ITEMS
    waiting: list[tuple[Place, Any]] = [
        ((module, name), value) for module, own in owners.items() for name, value in own.items()
    ]
    while waiting and left > 0:
        place, value = waiting.pop()
        left -= 1
        kind = type(value)
        if issubclass(kind, torch.Tensor) or kind in (list, dict):
            yield place, value
        if kind in (list, tuple, dict) and len(place) < _DEEPEST and len(value) <= left:
            items = value.items() if kind is dict else enumerate(value)
            waiting += [((*place, key), item) for key, item in list(items) if type(item) not in SCALARS]


def _around(owners: Owners, place: Place) -> Iterator[Any]:
    """The containers around what is at a place."""
    value = owners[place[0]][place[1]]
    for key in place[2:]:
        yield value
        value = value[key]


def name_of(place: Place) -> str:
    """A place for people."""
    return ".".join(str(part) for part in place if part != "")


class Holders:
    """What attributes of modules share as the program makes them."""

    def __init__(self, owners: Owners) -> None:
        self._count = Counter(_key(value) for _, value in _places(owners))

    def are_several(self, value: Any) -> bool:
        """Whether more than one place has this tensor, list or dictionary, or memory of it."""
        return self._count[_key(value)] > 1


def _key(value: Any) -> tuple[bool, int]:
    at = storage_address(value) if isinstance(value, torch.Tensor) else 0
    return bool(at), at or id(value)


def tie(parts: Mapping[str, Any], records: list[State]) -> Iterator[str]:
    """Tie what was noted, once values are back; names of what could not be tied.

    Args:
        parts: modules by name.
        records: what :meth:`Sharing.noted` returned.
    """
    for record in records:
        place, of = tuple(record["place"]), tuple(record["of"])
        try:
            _set(parts, place, _view(_get(parts, of), record["view"]))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            yield f"{name_of(place)} (shares memory with {name_of(of)})"


def are_tied(record: State, registered: Mapping[Place, torch.Tensor]) -> bool:
    """Whether two parameters or buffers are tied as a record says."""
    place, of = (registered.get(tuple(record[name])) for name in ("place", "of"))
    if place is None or of is None:
        return False
    return place is of or 0 < storage_address(place) == storage_address(of)


def _get(parts: Mapping[str, Any], place: Place) -> Any:
    value = getattr(parts[place[0]], place[1])
    for key in place[2:]:
        value = value[key]
    return value


def _view(value: Any, view: list[Any] | None) -> Any:
    if view is None:
        return value
    offset, shape, stride, stride_of_all = view
    if list(value.stride()) != stride_of_all:
        raise ValueError("it lies in memory in another way")
    return value.detach().as_strided(shape, stride, value.storage_offset() + offset)


def _set(parts: Mapping[str, Any], place: Place, value: Any) -> None:
    if len(place) > 2:
        _get(parts, place[:-1])[place[-1]] = value
        return
    part, name = parts[place[0]], place[1]
    if isinstance(getattr(part, name, None), nn.Parameter) and not isinstance(value, nn.Parameter):
        getattr(part, name).data = value
    else:
        setattr(part, name, value)


# -- what callbacks and optimizers share, with the module or with each other ------------------------------------------


class SharedOutside:
    """Tensors of callbacks, data modules and optimizers, each with that of another one in the same memory.

    Whoever loads a state may have copies: what shares memory in the state that was saved tells nothing of them. One
    tensor with two names, none of them of the module, does not count: programs replace such (a score, the best one),
    and write to views.

    Args:
        trainer: whose callbacks, data and optimizers they are.
        look: returns the owners of its module.
    """

    def __init__(self, trainer: pl.Trainer, look: Callable[[], Owners]) -> None:
        self._trainer, self._look = trainer, look
        self._found: list[tuple[Place, Place, bool]] = []
        self._times = 0

    def saved(self) -> list[tuple[str, ...]]:
        """The names of both, and ``"same"`` where both are one tensor, which is no parameter or buffer."""
        self._times += 1
        if self._times & (self._times - 1) == 0:  # in fewer and fewer snapshots: each tensor is asked for its address
            self._found = sorted(self._find(), key=str)
        owners: dict[str, Any] = {}
        if any(is_same for _, _, is_same in self._found):
            named = dict(self._trainer.lightning_module.named_modules())
            owners = {**{name: vars(part) for name, part in named.items()}, **_outside(self._trainer)}
        return [
            (name_of(place), name_of(of), *([_SAME] if is_same else []))
            for place, of, is_same in self._found
            if not is_same or at(owners, place) is at(owners, of)
        ]

    def _find(self) -> Iterator[tuple[Place, Place, bool]]:
        outside, module = _outside(self._trainer), self._trainer.lightning_module
        tensors = _tensors({**self._look(), **outside})
        registered = {id(each) for each in (*module.parameters(), *module.buffers())}
        sharers: dict[int, list[Place]] = defaultdict(list)
        for place in sorted(tensors, key=lambda place: place[0] in outside):  # names of the module's come first
            sharers[storage_address(tensors[place])].append(place)
        for place in (place for place in tensors if place[0] in outside):
            tensor = tensors[place]
            for of in sharers[storage_address(tensor)][:_MOST_SHARERS]:
                is_same = tensors[of] is tensor and id(tensor) not in registered
                if of != place and not (is_same and of[0] in outside) and _overlap(tensor, tensors[of]):
                    yield place, of, is_same
                    break

    def tie(self, shared: Collection[Sequence[str]]) -> tuple[list[str], list[str]]:
        """When training begins: have be one tensor again what :meth:`saved` named so.

        Args:
            shared: what it returned.

        Returns:
            the names of what is one tensor again, and one sentence on those pairs that are apart, if there are any.
        """
        if not shared:
            return [], []
        outside = _outside(self._trainer)
        tensors = {name_of(place): (place, tensor) for place, tensor in _tensors({**self._look(), **outside}).items()}
        tied, apart = [], []
        for name, of, *same in shared:
            if name not in tensors or of not in tensors:
                continue
            (place, mine), (_, other) = tensors[name], tensors[of]
            if same and _replace(outside, place, other):
                tied.append(name)
            elif storage_address(mine) != storage_address(other):
                apart.append(name)
        return tied, [
            f"{format_names(sorted(apart))} shared memory with other tensors of the training, and are copies now. Tie"
            " them in on_train_start"
        ] * bool(apart)


_SAME = "same"


def _replace(owners: Owners, place: Place, value: Any) -> bool:
    """Put a value at a place in something that can be changed."""
    holder: Any = at(owners, place[:-1])
    if not isinstance(holder, (dict, list)):
        return False
    holder[place[-1]] = value
    return True


def _outside(trainer: pl.Trainer) -> Owners:
    """Attributes of callbacks, but for ours, of the data module, and states of optimizers by the parameter's number."""
    outside: dict[str, Mapping[str, Any]] = {}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    for number, callback in enumerate([*callbacks, *([data] if data is not None else [])]):
        if not type(callback).__module__.startswith("lightning_spot."):
            kind = type(callback).__qualname__.rpartition(".<locals>.")[2]
            outside[kind if kind not in outside else f"{kind}#{number}"] = vars(callback)
    for number, optimizer in enumerate(trainer.optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {index: optimizer.state[each] for index, each in enumerate(parameters) if each in optimizer.state}
        outside[f"optimizer {number}"] = {"state": states}
    return outside


def _tensors(owners: Owners) -> dict[Place, torch.Tensor]:
    """Tensors that have a storage, and whose places have names that other processes find again."""
    return {
        place: value
        for place, value in _places(owners)
        if isinstance(value, torch.Tensor) and storage_address(value) and all(map(_is_name, place))
    }


def _is_name(key: Any) -> bool:
    return isinstance(key, (str, int))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have bytes in common."""
    (start, stop), (first, last) = _span(local_of(one)), _span(local_of(other))
    return start < last and first < stop
