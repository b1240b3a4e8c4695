"""Parameters that each rank has for itself: those that DDP was told to leave alone, and trained ones in no shards.

A checkpoint has them, and what optimizers keep of them, as the first rank does: nothing makes the others' alike. So the
others keep theirs in their own state, as long as that is not large. So it is with what optimizers keep of parameters in
shards that is in no shards itself: plain tensors of this rank's part, or numbers that come of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_spot.capture.tensors import copies_of
from lightning_spot.config import format_names
from lightning_spot.exact import private
from lightning_spot.exact.module_state import MOST_BYTES
from lightning_spot.exact.optimizers import names_of
from lightning_spot.exact.rank_states import share_of
from lightning_spot.exact.sharded import holder_of, is_sharded
from lightning_spot.trees import laid_over, leaves, walk

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

_SCALARS = (bool, int, float, str, type(None))
_PARAMETERS, _OPTIMIZERS, _GROUPS = "parameters", "optimizers", "groups"
LEFT_OUT = "left_out"
"""Key, in the own state of a rank, of the names of those that are too large to be kept there."""


def capture_values(trainer: pl.Trainer) -> State:
    """Copies of what optimizers keep of parameters in shards for this rank alone, as far as can be told.

    Those of torch keep the same on all ranks, but for DTensors. Of another one, all that is in no shards may be it.
    """
    is_asked = any(map(_is_others, trainer.optimizers)) and trainer.world_size > 1
    if not is_asked or not is_sharded(trainer):
        return {}
    names = {id(parameter): name for parameter, name in _named(trainer)}
    states = [_values_of(optimizer, names) for optimizer in trainer.optimizers]
    if _nbytes(states) > MOST_BYTES:
        kept = {f"{name} ({', '.join(values)})" for state in states for name, values in state.items()}
        return {LEFT_OUT: sorted(kept)}
    groups = [
        [_copied({key: each for key, each in group.items() if key != "params"}) for group in _groups_of(optimizer)]
        for optimizer in trainer.optimizers
    ]
    return {_OPTIMIZERS: [_copied(state) for state in states], _GROUPS: groups}


def _values_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> State:
    """What each rank may have otherwise of an optimizer's state, by the names of parameters."""
    found = {
        names[id(parameter)]: {key: each for key, each in values.items() if _is_own(key, each)}
        for parameter, values in (optimizer.state.items() if _is_others(optimizer) else ())
        if isinstance(values, dict) and id(parameter) in names
    }
    return {name: values for name, values in found.items() if values}


def _groups_of(optimizer: torch.optim.Optimizer) -> list[State]:
    return optimizer.param_groups if _is_others(optimizer) else []


class OwnParameters:
    """Those of one model."""

    def __init__(self) -> None:
        self._candidates: dict[str, torch.Tensor] | None = None

    def capture(self, trainer: pl.Trainer) -> State:
        """Copies of this rank's, with what optimizers keep of them; the first rank's are in the checkpoint."""
        if self._candidates is None:
            self._candidates = _each_ranks_own(trainer) if trainer.world_size > 1 else {}
        own = {name: parameter for name, parameter in self._candidates.items() if parameter.requires_grad}
        if not own:
            return {}
        states = [
            {name: dict(optimizer.state[each]) for name, each in own.items() if each in optimizer.state}
            for optimizer in trainer.optimizers
        ]
        if _nbytes([own, *states]) > MOST_BYTES:
            return {LEFT_OUT: list(own)}
        if trainer.is_global_zero:
            return {}
        return {_PARAMETERS: _copied(own), _OPTIMIZERS: [_copied(state) for state in states]}

    def restore(self, trainer: pl.Trainer, saved: State) -> None:
        """Give this rank what :meth:`capture` found of it, once the checkpoint is loaded."""
        named = {name: parameter for parameter, name in _named(trainer)}
        for name, value in saved.get(_PARAMETERS, {}).items():
            if name in named and named[name].shape == value.shape:
                with torch.no_grad():
                    named[name].copy_(value)
        _give_back(trainer, saved.get(_OPTIMIZERS, ()))


def restore_values(trainer: pl.Trainer, saved: State) -> None:
    """Give optimizers what :func:`capture_values` found on this rank, as soon as they have loaded what all share."""
    _give_back(trainer, saved.get(_OPTIMIZERS, ()))
    for optimizer, groups in zip(trainer.optimizers, saved.get(_GROUPS, ()), strict=False):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            group.update(laid_over(group, values, _there))


def _give_back(trainer: pl.Trainer, optimizers: Sequence[State]) -> None:
    named = {name: parameter for parameter, name in _named(trainer)} if optimizers else {}
    for optimizer, states in zip(trainer.optimizers, optimizers, strict=False):
        for name, values in states.items():
            if name in named:
                state = optimizer.state[named[name]]
                state.update({key: _beside(state.get(key), named[name], value) for key, value in values.items()})


def what_is_the_first_ranks(parameters: State, values: State) -> Iterator[str]:
    """A sentence on those parameters, and one on those values, that were too large to be kept, if there are any."""
    if names := parameters.get(LEFT_OUT, ()):
        yield (
            f"each rank trains parameters of its own, and those above {MOST_BYTES >> 20} MiB are in snapshots as rank 0"
            f" has them: all ranks go on with its {format_names(names)}. Shard them as DTensors, which say which rank"
            " has what"
        )
    if names := values.get(LEFT_OUT, ()):
        yield (
            f"optimizers keep something for each rank by itself beside parameters in shards, and above"
            f" {MOST_BYTES >> 20} MiB that is in snapshots as rank 0 has it: all ranks go on with its"
            f" {format_names(names)}. Keep it as DTensors, such as zeros_like(parameter) gives"
        )


def what_other_ranks_kept(everyones: Sequence[State]) -> Iterator[str]:
    """One sentence on what such values of all ranks are for ranks of another number, if there are any."""
    first = everyones[0] if everyones else {}
    differ = {
        key
        for values in everyones[1:]
        for one, other in zip(_groups(first), _groups(values), strict=False)
        for key in one
        if not _equal(one[key], other.get(key))
    }
    kept = [*first.get(LEFT_OUT, ()), *chain.from_iterable(first.get(_OPTIMIZERS, ()))]
    names = [*dict.fromkeys(kept), *sorted(differ)]
    if names:
        yield (
            f"what optimizers keep for each rank by itself beside parameters in shards ({format_names(names)}) goes on"
            " as rank 0 had it: keep it as DTensors, which are resharded"
        )


def _groups(values: State) -> list[State]:
    return list(chain.from_iterable(values.get(_GROUPS, ())))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and (not isinstance(one, (bool, int, float, str)) or one == other)


def _is_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is none of torch's."""
    return not type(optimizer).__module__.startswith("torch.optim.")


def _is_own(key: Any, value: Any) -> bool:
    """Whether each rank may have another value; the number of steps is the same."""
    found = (each for path, each in walk(value, (key,)) if path[-1] != "step")
    return any(isinstance(each, (torch.Tensor, *_SCALARS)) and not isinstance(each, DTensor) for each in found)


def _each_ranks_own(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """The parameters that nothing makes alike, by name: DDP reduces their gradients no more than FSDP does."""
    if is_sharded(trainer):
        if share_of(trainer)[1] == 1:  # all ranks see the same batches
            return {}
        outside = holder_of(trainer).outside()
        return {name: parameter for parameter, name in _named(trainer) if id(parameter) in outside}
    ignored: Any = getattr(trainer.strategy.model, "parameters_to_ignore", ())
    are_all = average_now_and_then(trainer)
    return {name: parameter for parameter, name in _named(trainer) if are_all or name in ignored}


def average_now_and_then(trainer: pl.Trainer) -> bool:
    """Whether DDP's ranks train each by itself in between, as in post-local SGD."""
    kinds = {type(state).__name__ for state in hook_states(trainer)}
    return "PostLocalSGDState" in kinds or any(hasattr(optimizer, "averager") for optimizer in trainer.optimizers)


def hook_states(trainer: pl.Trainer) -> list[Any]:
    """What DDP's communication hooks keep from one step to the next."""
    hooks: Any = getattr(trainer.strategy.model, private.COMM_HOOKS.name, ())
    return [state for _, state in hooks if state is not None and not isinstance(state, ProcessGroup)]


def what_hooks_begin_anew(trainer: pl.Trainer) -> Iterator[str]:
    """One sentence on what DDP's communication hooks keep, if one keeps anything."""
    if kinds := sorted({type(state).__name__ for state in hook_states(trainer)}):
        yield (
            "what DDP's communication hook keeps from step to step is in no checkpoint and begins anew:"
            f" {', '.join(kinds)}"
        )


def _named(trainer: pl.Trainer) -> Iterator[tuple[torch.Tensor, str]]:
    module = trainer.lightning_module
    names = names_of(module)
    return ((parameter, names[id(parameter)]) for parameter in module.parameters())


def _nbytes(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in leaves(values, torch.Tensor))


def _copied(values: State) -> State:
    """Copies of tensors, also of those in dicts and lists; numbers and the like as they are, and nothing else."""
    values = {key: value for key, value in values.items() if not isinstance(value, DTensor)}
    tensors = {key: value.detach() for key, value in values.items() if isinstance(value, torch.Tensor)}
    inner = {key: _copied(value) for key, value in values.items() if isinstance(value, dict)}
    scalars = {key: value for key, value in values.items() if isinstance(value, _SCALARS)}
    lists = {key: _copied_list(value) for key, value in values.items() if type(value) in (list, tuple)}
    known = {key: value for key, value in lists.items() if value is not None}
    return {**copies_of(tensors), **inner, **scalars, **known}


def _copied_list(values: Sequence[Any]) -> Sequence[Any] | None:
    """The same of a list or a tuple; ``None`` where there is something else in it."""
    found = _copied({str(index): each for index, each in enumerate(values)})
    if len(found) < len(values):
        return None
    return type(values)(found[str(index)] for index in range(len(values)))  # type: ignore[call-arg] # one of the two


def _beside(rank_0s: Any, parameter: torch.Tensor, value: Any) -> Any:
    """A value of an optimizer's state where it keeps it: as it does that of rank 0, which was loaded.

    Counts of steps stay on the host, unless they are fused: these are on the GPU.
    """
    if isinstance(value, torch.Tensor) and not isinstance(rank_0s, torch.Tensor):
        return value.to(parameter.device) if value.shape == parameter.shape else value
    return laid_over(rank_0s, value, _there)


def _there(present: Any, value: Any) -> Any:
    """A value, on the device of what is in its place."""
    both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
    return value.to(present.device) if both else value
