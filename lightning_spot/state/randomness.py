"""Random number generators as plain values: captured at a step, set again when training goes on from it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_spot.trees import mapped

State = dict[str, Any]

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators whose state can be read."""


def capture_random() -> State:
    """State of every process-wide generator that training draws from, as values that load with ``weights_only=True``.

    But for a GPU's, see :meth:`Generators.capture`.
    """
    return Generators().capture()


class Generators:
    """The process-wide generators, for one snapshot after the other.

    Most stay as they are. The states of those are the same tensors each time, of which it is known how they are put
    together; nobody writes to them.
    """

    def __init__(self) -> None:
        self._words: tuple[int, ...] = ()  # of Python's
        self._key = b""  # of numpy's
        self._last: dict[str, torch.Tensor] = {}

    def capture(self, device: torch.device | None = None) -> State:
        """See :func:`capture_random`."""
        state: State = {
            "python": self._python(*random.getstate()),
            "numpy": self._numpy(np.random.get_state(legacy=False)),
            "torch": self._same("torch", torch.get_rng_state()),
        }
        if device is not None and device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
        return state

    def _python(self, version: int, words: tuple[int, ...], gauss: float | None) -> list[Any]:
        if words != self._words:
            self._words, self._last["python"] = words, _words(words)
        return [version, self._last["python"], gauss]

    def _numpy(self, state: Any) -> Any:
        words = state.get("state")
        if isinstance(words, dict) and isinstance(key := words.get("key"), np.ndarray):
            if (told := key.tobytes()) != self._key:
                self._key, self._last["numpy"] = told, _plain(key)
            state = {**state, "state": {**words, "key": self._last["numpy"]}}
        return _plain(state)

    def _same(self, kind: str, state: torch.Tensor) -> torch.Tensor:
        last = self._last.get(kind)
        if last is None or not torch.equal(last, state):
            last = self._last[kind] = state
        return last


def restore_random(state: State, device: torch.device | None = None) -> None:
    """Set what :func:`capture_random` returned."""
    random.setstate(_python(state["python"]))
    np.random.set_state(_arrays(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def capture_generator(generator: Any) -> Any:
    """State of a generator of torch, numpy or python, as values that load with ``weights_only=True``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    version, words, gauss = generator.getstate()
    return [version, _words(words), gauss]


def restore_generator(generator: Any, state: Any) -> None:
    """Set what :func:`capture_generator` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    else:
        generator.setstate(_python(state))


def _python(state: Any) -> Any:
    version, internal, gauss = state
    return version, tuple(internal.tolist()), gauss


def _plain(state: Any) -> Any:
    """Numpy's states hold arrays, which do not load ``weights_only``: tensors in their place."""
    return mapped(_tensor, state)


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64) if value.dtype == np.uint32 else value.view(np.int64).copy())
    return value.item() if isinstance(value, np.generic) else value


def _words(words: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.int64))  # a third of torch.tensor's time


def _arrays(state: Any) -> Any:
    return mapped(lambda value: _array(value) if isinstance(value, torch.Tensor) else value, state)


def _array(tensor: torch.Tensor) -> Any:
    # Words of 32 bits were widened; those of 64 bits (Philox, SFC64) were only reinterpreted, and may be negative.
    array = tensor.numpy()
    return array.astype(np.uint32) if array.size == _MT19937_WORDS else array.view(np.uint64)


_MT19937_WORDS = 624


def is_of_process(generator: Any) -> bool:
    """Whether a generator is one of the process or of a device: who holds one does not keep a state with it."""
    of_numpy = getattr(np.random.mtrand, "_rand", None)  # which its functions draw from
    of_python = random.random.__self__  # type: ignore[attr-defined] # a bound method
    own = (torch.default_generator, *torch.cuda.default_generators, of_python, of_numpy)
    return any(generator is each for each in own)
