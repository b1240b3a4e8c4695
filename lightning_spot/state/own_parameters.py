"""What each rank has for itself, and a checkpoint as rank 0 has it: named when a run goes on.

Parameters that DDP was told to leave alone, trained ones in no shards, what optimizers keep of parameters in shards
that is in no shards itself, and what DDP's communication hooks keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_spot.config import format_names
from lightning_spot.state import compat
from lightning_spot.state.optimizers import names_of
from lightning_spot.state.rank_states import share_of
from lightning_spot.state.sharded import holder_of, is_sharded
from lightning_spot.trees import walk

if TYPE_CHECKING:
    import lightning.pytorch as pl


def what_is_rank_0s(trainer: pl.Trainer) -> Iterator[str]:
    """One sentence each on parameters, on optimizers' values and on hooks, if ranks have such of their own."""
    if trainer.world_size == 1:
        return
    if names := _own_parameters(trainer):
        yield (
            "each rank trains parameters of its own, and snapshots have them as rank 0 has them: all ranks go on with"
            f" its {format_names(names)}. Shard them as DTensors, which say which rank has what"
        )
    if names := _own_values(trainer):
        yield (
            "optimizers keep something for each rank by itself beside parameters in shards, and snapshots have it as"
            f" rank 0 has it: all ranks go on with its {format_names(names)}. Keep it as DTensors, such as"
            " zeros_like(parameter) gives"
        )
    if kinds := sorted({type(state).__name__ for state in _hook_states(trainer)}):
        yield (
            "what DDP's communication hook keeps from step to step is in no checkpoint and begins anew:"
            f" {', '.join(kinds)}"
        )


def _own_parameters(trainer: pl.Trainer) -> list[str]:
    """Names of trained parameters that nothing makes alike: DDP reduces their gradients no more than FSDP does."""
    module = trainer.lightning_module
    names = names_of(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if is_sharded(trainer):
        outside = holder_of(trainer).outside() if share_of(trainer)[1] > 1 else set()  # else all see the same batches
        return [names[id(parameter)] for parameter in trained if id(parameter) in outside]
    ignored: Any = getattr(trainer.strategy.model, "parameters_to_ignore", ())
    are_all = average_now_and_then(trainer)
    return [name for name in (names[id(parameter)] for parameter in trained) if are_all or name in ignored]


def _own_values(trainer: pl.Trainer) -> list[str]:
    """Names of parameters of which an optimizer keeps values in no shards; torch's keep the same on all ranks."""
    others = [each for each in trainer.optimizers if not type(each).__module__.startswith("torch.optim.")]
    if not (others and is_sharded(trainer)):
        return []
    names = names_of(trainer.lightning_module)
    states = [
        (names.get(id(parameter), "?"), values) for each in others for parameter, values in each.state.items() if values
    ]
    return [name for name, values in states if any(_is_own(path, value) for path, value in walk(values))]


def _is_own(path: tuple[Any, ...], value: Any) -> bool:
    """Whether each rank may have another value; the number of steps is the same."""
    is_kept = isinstance(value, (torch.Tensor, int, float, str)) and not isinstance(value, DTensor)
    return is_kept and path[-1] != "step"


def average_now_and_then(trainer: pl.Trainer) -> bool:
    """Whether DDP's ranks train each by itself in between, as in post-local SGD."""
    kinds = {type(state).__name__ for state in _hook_states(trainer)}
    return "PostLocalSGDState" in kinds or any(hasattr(optimizer, "averager") for optimizer in trainer.optimizers)


def _hook_states(trainer: pl.Trainer) -> list[Any]:
    """What DDP's communication hooks keep from one step to the next."""
    hooks: Any = getattr(trainer.strategy.model, compat.COMM_HOOKS.name, ())
    return [state for _, state in hooks if state is not None and not isinstance(state, ProcessGroup)]
