"""Values that are neither numbers nor tensors nor lists of them, as a checkpoint holds them, and back.

Sets, dictionaries of python's collections, arrays and numbers of numpy, enums, bytes, generators: modules keep them,
and ``torch.load(weights_only=True)`` does not load all of them.
"""

from __future__ import annotations

import functools
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from lightning_spot.exact.randomness import capture_generator, is_of_process, restore_generator

KEYED: frozenset[type] = frozenset((OrderedDict, defaultdict, Counter))
SETS: frozenset[type] = frozenset((set, frozenset))
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators whose state can be read."""

_OPEN = (np.generic, Enum, *GENERATORS)
_CLOSED: frozenset[type] = frozenset((np.ndarray, complex, bytes, bytearray))
_HOLDING: frozenset[type] = KEYED | SETS | frozenset((dict, list, tuple, deque))
_STEADY: frozenset[type] = frozenset((bool, int, float, str, type(None), complex, bytes))
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}
_DICTIONARIES: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KIND = "lightning_spot.kind"
MOST_WHOLE = 2**24
"""Bytes of arrays that are compared whole, in a value: as many as are kept; of what is beyond, some are."""

MOST_ITEMS = 100_000
DEEPEST = 8
_LEAST_WHOLE = 2**12

_SAMPLES = 4096


@functools.lru_cache(maxsize=1024)
def is_further(kind: type) -> bool:
    """Whether values of a kind are of these, and not of those that hold others.

    Arrays of a kind of their own are not: one may be mapped from a large file. The system's generator has no state.
    """
    return kind in _CLOSED or (issubclass(kind, _OPEN) and not issubclass(kind, random.SystemRandom))


def is_known_again(kind: type) -> bool:
    """Whether a value of a kind is one of these, but no array, or holds others: then it may be written to."""
    return kind in KEYED or kind in SETS or issubclass(kind, (Enum, *GENERATORS))


class Seen(NamedTuple):
    """How a value was.

    Attributes:
        kind: of it.
        content: equal as long as it is the same.
        holds: the value itself, where that can be known only as long as no other takes its address.
    """

    kind: type
    content: Any
    holds: Any = None


def is_steady(value: Any) -> bool:
    """Whether a value in a set stays as it is, and is known by what it is equal to."""
    kind: type = type(value)  # of a proxy of what is gone, isinstance fails
    if kind in (tuple, frozenset):
        return all(map(is_steady, value))
    return kind in _STEADY or issubclass(kind, Enum)


def enums_in(value: Any, depth: int = 0) -> Iterator[type[Enum]]:
    """Classes of the enums in a value, as deep as containers are kept."""
    kind: type = type(value)
    if issubclass(kind, Enum):
        yield kind
    elif kind in _HOLDING and depth <= DEEPEST and len(value) <= MOST_ITEMS:
        parts = (*value.keys(), *value.values()) if issubclass(kind, dict) else tuple(value)
        for part in parts:
            yield from enums_in(part, depth + 1)


def named(kinds: Iterable[type[Enum]]) -> dict[str, type[Enum]]:
    """Classes by the name by which an enum is saved; none of those that share one."""
    found: dict[str, set[type[Enum]]] = {}
    for kind in kinds:
        found.setdefault(kind.__qualname__, set()).add(kind)
    return {name: next(iter(each)) for name, each in found.items() if len(each) == 1}


def seen(value: Any, whole: list[int]) -> Seen:
    """What a value of a further kind is, to be compared later.

    Args:
        value: of such a kind.
        whole: bytes of arrays that may still be compared whole; a few always are.
    """
    if isinstance(value, GENERATORS):
        if is_of_process(value):
            return Seen(type(value), None, value)
        state = value.get_state() if isinstance(value, torch.Generator) else None
        content = state.numpy().tobytes() if state is not None else pickle.dumps(_state(value))
        return Seen(type(value), content, value)
    if isinstance(value, np.ndarray):
        if value.nbytes <= max(_LEAST_WHOLE, whole[0]) and not value.dtype.hasobject:
            whole[0] -= value.nbytes
            is_plain = value.flags.c_contiguous and value.nbytes
            data = value.reshape(-1).view(np.uint8).data if is_plain else value.tobytes()
            return Seen(type(value), (value.dtype.str, value.shape, xxhash.xxh3_128_digest(data)))
        some = b"" if value.dtype.hasobject else value.flat[:: -(-value.size // _SAMPLES)].tobytes()
        return Seen(type(value), (id(value), value.shape, some), value)
    if isinstance(value, np.generic):
        return Seen(type(value), value.tobytes())
    if isinstance(value, Enum):
        return Seen(type(value), id(value), value)
    return Seen(type(value), bytes(value) if isinstance(value, bytearray) else value)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else generator.getstate()


def needs_its_like(value: Any) -> bool:
    """Whether a process gets it only where it has one of this kind: no class is looked for by its name."""
    if type(value) is defaultdict:
        return value.default_factory is not None and value.default_factory not in _FACTORIES.values()
    return isinstance(value, (Enum, *GENERATORS))


def encoded(value: Any) -> dict[str, Any] | None:
    """A value of a further kind as plain ones; ``None`` if it cannot be."""
    if isinstance(value, GENERATORS):
        return {_KIND: "generator", "of": type(value).__qualname__, "state": capture_generator(value)}
    if isinstance(value, Enum):
        plain = type(value.value) in (bool, int, float, str)
        return {_KIND: "enum", "of": type(value).__qualname__, "value": value.value} if plain else None
    if isinstance(value, (np.ndarray, np.generic)):
        kind = value.dtype
        if kind.hasobject or kind.kind == "V":  # other packages' numbers are of that kind too, and have no name
            return None
        return {_KIND: "numpy", "dtype": kind.str, "shape": list(value.shape), "bytes": _bytes(value.tobytes())} | (
            {"number": True} if isinstance(value, np.generic) else {}
        )
    if isinstance(value, complex):
        return {_KIND: "complex", "parts": [value.real, value.imag]}
    return {_KIND: type(value).__name__, "bytes": _bytes(value)}


def _bytes(value: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


def of_items(value: Any, items: list[Any]) -> dict[str, Any]:
    """A set, or a dictionary of python's collections, with its items (keys and values by turns) as plain values."""
    found: dict[str, Any] = {_KIND: type(value).__name__, "items": items}
    if type(value) is defaultdict and value.default_factory is not None:
        found["factory"] = value.default_factory.__name__
    return found


def is_encoded(saved: Any) -> bool:
    """Whether :func:`encoded` or :func:`of_items` returned it."""
    return isinstance(saved, dict) and _KIND in saved


def items_of(saved: dict[str, Any]) -> list[Any]:
    """What :func:`of_items` was given."""
    return list(saved.get("items", ()))


def decoded(saved: dict[str, Any], items: list[Any], present: Any, enums: Mapping[str, type[Enum]]) -> Any:
    """The value that was :func:`encoded`; ``present`` where it cannot be made.

    Args:
        saved: as it was encoded.
        items: of a container, as values again.
        present: what stands in its place: a generator is set to the state, an enum gives its class.
        enums: classes of others that the program has, by name.
    """
    kind = saved[_KIND]
    if kind == "generator":
        if type(present).__qualname__ == saved["of"] and isinstance(present, GENERATORS):
            restore_generator(present, saved["state"])
        return present
    if kind == "enum":
        is_its_like = isinstance(present, Enum) and type(present).__qualname__ == saved["of"]
        its_class = type(present) if is_its_like else enums.get(saved["of"])
        return its_class(saved["value"]) if its_class is not None else present
    if kind == "numpy":
        array = np.frombuffer(saved["bytes"].numpy().tobytes(), saved["dtype"]).reshape(saved["shape"]).copy()
        return array[()] if saved.get("number") else array
    if kind == "complex":
        return complex(*saved["parts"])
    if kind in ("bytes", "bytearray"):
        data = saved["bytes"].numpy().tobytes()
        return data if kind == "bytes" else bytearray(data)
    if kind in ("set", "frozenset"):
        return set(items) if kind == "set" else frozenset(items)
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if kind == "defaultdict":
        factory = saved.get("factory")
        if factory is not None and factory not in _FACTORIES and type(present) is not defaultdict:
            return present
        return defaultdict(_FACTORIES.get(factory or ""), pairs)
    return _DICTIONARIES[kind](dict(pairs))


def is_generator(saved: Any) -> bool:
    """Whether it is the state of a generator: that is set again just before the first step."""
    return is_encoded(saved) and saved[_KIND] == "generator"
