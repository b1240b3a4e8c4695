"""Random number generators as plain values: captured at a step, set again when training goes on from it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

State = dict[str, Any]


def capture_random(device: torch.device | None = None) -> State:
    """State of every process-wide generator that training draws from, as values that load with ``weights_only=True``.

    Args:
        device: also the generator of this device, if it is a GPU.
    """
    state: State = {
        "python": _plain(random.getstate()),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: State, device: torch.device | None = None) -> None:
    """Set what :func:`capture_random` returned."""
    random.setstate(_python(state["python"]))
    np.random.set_state(_arrays(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def capture_own(owners: Sequence[Any]) -> State:
    """What objects (a loader, its samplers, its data set) draw from of their own.

    Returns:
        states of the generators that are their attributes, in order, and the seeds of those that make a new generator
        for each epoch (``DistributedSampler.seed``, which Lightning sets from the seed of the process).
    """
    return {
        "generators": [_capture(generator) for generator in _generators(owners)],
        "seeds": [owner.seed for owner in owners if _is_seeded(owner)],
    }


def restore_own(state: State, owners: Sequence[Any]) -> None:
    """Set what :func:`capture_own` returned; owners that have more or fewer generators by now keep theirs."""
    own = list(_generators(owners))
    if len(own) == len(state["generators"]):
        for generator, saved in zip(own, state["generators"], strict=True):
            _restore(generator, saved)
    seeded = [owner for owner in owners if _is_seeded(owner)]
    if len(seeded) == len(state["seeds"]):
        for owner, seed in zip(seeded, state["seeds"], strict=True):
            owner.seed = seed


def _is_seeded(owner: Any) -> bool:
    return isinstance(owner, Sampler) and isinstance(getattr(owner, "seed", None), int)


def _generators(owners: Sequence[Any]) -> Iterator[Any]:
    """Generators that are attributes of the owners, each once, in the order of their definition."""
    seen: set[int] = set()
    for owner in owners:
        for value in vars(owner).values() if hasattr(owner, "__dict__") else ():
            kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
            if isinstance(value, kinds) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _capture(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.getstate())


def _restore(generator: Any, state: Any) -> None:
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
    """Numpy's states hold arrays, which do not load ``weights_only``, and Python's 625 numbers; tensors are better."""
    if isinstance(state, tuple):
        version, internal, gauss = state
        return [version, torch.tensor(internal, dtype=torch.int64), gauss]
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.astype(np.int64) if state.dtype == np.uint32 else state.view(np.int64).copy())
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        # Words of 32 bits were widened; those of 64 bits (Philox, SFC64) were only reinterpreted, and may be negative.
        array = state.numpy()
        return array.astype(np.uint32) if array.size == _MT19937_WORDS else array.view(np.uint64)
    return state


_MT19937_WORDS = 624
