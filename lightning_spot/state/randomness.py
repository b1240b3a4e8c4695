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

_OF_PROCESS = {
    "python": random.random.__self__,  # type: ignore[attr-defined] # a bound method
    "numpy": np.random.get_state.__self__,  # type: ignore[attr-defined] # likewise
    "torch": torch.default_generator,
}
"""What functions draw from that are given no generator."""


def capture_random(device: torch.device | None = None) -> State:
    """State of every process-wide generator that training draws from, as values that load with ``weights_only=True``.

    Args:
        device: whose generator counts, too, if it is a GPU.
    """
    state: State = {name: capture_generator(generator) for name, generator in _OF_PROCESS.items()}
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: State, device: torch.device | None = None) -> None:
    """Set what :func:`capture_random` returned."""
    for name, generator in _OF_PROCESS.items():
        restore_generator(generator, state[name])
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def capture_generator(generator: Any) -> Any:
    """State of a generator of torch, numpy or python, as values that load with ``weights_only=True``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return mapped(_plain, generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return mapped(_plain, generator.get_state(legacy=False))
    version, words, gauss = generator.getstate()
    return [version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss]  # a third of torch.tensor's time


def restore_generator(generator: Any, state: Any) -> None:
    """Set what :func:`capture_generator` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = mapped(_array, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(mapped(_array, state))
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))


def stamp_of(state: Any) -> Any:
    """A state of generators as values that are equal to those of the same state."""
    return mapped(lambda item: item.numpy().tobytes() if isinstance(item, torch.Tensor) else item, state)


def _plain(value: Any) -> Any:
    """Numpy's states hold arrays, which do not load ``weights_only``: tensors in their place."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.int64) if value.dtype == np.uint32 else value.view(np.int64).copy())
    return value.item() if isinstance(value, np.generic) else value


def _array(value: Any) -> Any:
    """The same, back. Words of 32 bits were widened, those of 64 bits (Philox, SFC64) only reinterpreted."""
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    return array.astype(np.uint32) if array.size == _MT19937_WORDS else array.view(np.uint64)


_MT19937_WORDS = 624


def is_of_process(generator: Any) -> bool:
    """Whether a generator is one of the process or of a device: who holds one does not keep a state with it."""
    return any(generator is each for each in (*_OF_PROCESS.values(), *torch.cuda.default_generators))
