"""Parameters that each rank has for itself: those that DDP was told to leave alone, and trained ones in no shards.

A checkpoint has them, and what optimizers keep of them, as the first rank does: nothing makes the others' alike. So the
others keep theirs in their own state, as long as that is not large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from lightning_spot.capture.tensors import copies_of
from lightning_spot.exact import private
from lightning_spot.exact.data_shares import share_of
from lightning_spot.exact.parameter_names import names_of
from lightning_spot.exact.plain_values import MOST_BYTES
from lightning_spot.exact.sharded import holder_of, is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

_SCALARS = (bool, int, float, str, type(None))
_PARAMETERS, _OPTIMIZERS = "parameters", "optimizers"
LEFT_OUT = "left_out"
"""Key, in the own state of a rank, of the names of those that are too large to be kept there."""
_MOST_NAMED = 8


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
        if sum(map(_nbytes, [own, *states])) > MOST_BYTES:
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
        for optimizer, states in zip(trainer.optimizers, saved.get(_OPTIMIZERS, ()), strict=False):
            for name, values in states.items():
                if name in named:
                    state = optimizer.state[named[name]]
                    state.update({key: _beside(state.get(key), named[name], value) for key, value in values.items()})


def what_is_the_first_ranks(saved: State) -> Iterator[str]:
    """One sentence on those that were too large to be kept, if there are any."""
    if names := saved.get(LEFT_OUT, ()):
        more = len(names) - _MOST_NAMED
        listed = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield (
            f"each rank trains parameters of its own, and those above {MOST_BYTES >> 20} MiB are in snapshots as rank 0"
            f" has them: all ranks go on with its {listed}. Shard them as DTensors, which say which rank has what"
        )


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
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(_nbytes, values.values())) if isinstance(values, dict) else 0


def _copied(values: State) -> State:
    """Copies of tensors, also of those in dicts; numbers and the like as they are, and nothing else."""
    tensors = {key: value.detach() for key, value in values.items() if isinstance(value, torch.Tensor)}
    inner = {key: _copied(value) for key, value in values.items() if isinstance(value, dict)}
    scalars = {key: value for key, value in values.items() if isinstance(value, _SCALARS)}
    return {**copies_of(tensors), **inner, **scalars}


def _beside(rank_0s: Any, parameter: torch.Tensor, value: Any) -> Any:
    """A value of an optimizer's state where it keeps it: as it does that of rank 0, which was loaded.

    Counts of steps stay on the host, unless they are fused: these are on the GPU.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(rank_0s, torch.Tensor):
        return value.to(rank_0s.device)
    return value.to(parameter.device) if value.shape == parameter.shape else value
