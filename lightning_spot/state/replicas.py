"""What the ranks of a training have each for itself, and what DDP keeps to itself.

A checkpoint has parameters and values as rank 0 has them; where ranks differ, that is named when a run goes on:
parameters that DDP was told to leave alone, trained ones in no shards, what optimizers keep of parameters in shards
that is in no shards itself, and what DDP's communication hooks keep. So is an order of sums that cannot be had again.

DDP notes the order in which gradients became ready in a run's first step, and rebuilds its buckets after it, once. They
decide in which order ranks add each element up, so with more than two of them a resumed run would round its first step
in another way than an undisturbed one: its DDP is new and has its first buckets. Before that step, a backward pass
without values goes through DDP in the recorded order, and DDP rebuilds the buckets it had. (torch 2.6 to 2.13:
``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_spot.config import format_names
from lightning_spot.state import compat
from lightning_spot.state.dump import KEY, share_of
from lightning_spot.state.optimizers import names_of
from lightning_spot.state.sharded import MODEL, OPTIMIZERS, is_sharded
from lightning_spot.trees import walk

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


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
    if trainer.world_size > 2 and _orders_anew(trainer.model):
        yield (
            "DDP adds the gradients of the first step up in another order than an undisturbed run does, with"
            " static_graph=True or a communication hook on more than two ranks: last bits may differ. Leave that out if"
            " they matter"
        )


def what_is_in_shards(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """One sentence on tensors in shards that callbacks or hooks have put into a checkpoint, if there are any.

    Args:
        checkpoint: as rank 0 has written it, which each rank has read. The model and its optimizers do not count.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS, KEY)}
    found = [path for path, value in walk(rest) if isinstance(value, DTensor) and not _is_whole(value)]
    if names := [".".join(map(str, path)) for path in found]:
        yield (
            "callbacks or hooks have put tensors in shards into the checkpoint, which has them as rank 0 has them: all"
            f" ranks go on with its part of {format_names(names)}. Put full_tensor() of them there"
        )


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _own_parameters(trainer: pl.Trainer) -> list[str]:
    """Names of trained parameters that nothing makes alike: DDP reduces their gradients no more than FSDP does."""
    module = trainer.lightning_module
    names = names_of(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if is_sharded(trainer):
        differ = share_of(trainer)[1] > 1  # else all see the same batches
        return [names[id(parameter)] for parameter in trained if differ and not isinstance(parameter, DTensor)]
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


# -- what DDP keeps to itself -----------------------------------------------------------------------------------------


class GradientOrder:
    """Records the order in the first step of a run, and has DDP see it again after a resume."""

    def __init__(self) -> None:
        self._indices: dict[int, None] = {}
        self._begin_step = 0
        self._hooks: list[Callable[[], None]] = []

    def saved(self) -> list[int]:
        """Indices into ``parameters()`` in the order of the first step; empty where it plays no role."""
        return [] if self._hooks else list(self._indices)

    def begin(self, trainer: pl.Trainer, saved: list[int]) -> None:
        """When training begins: rehearse what was saved, or record.

        Args:
            trainer: whose model it is.
            saved: of a snapshot; empty in a fresh run.
        """
        ddp = trainer.model
        if not isinstance(ddp, DistributedDataParallel) or not _rebuilds(ddp):
            return
        parameters = list(ddp.parameters())
        if saved and all(index < len(parameters) for index in saved):
            _rehearse(ddp, [parameters[index] for index in saved])
            self._indices = dict.fromkeys(saved)
            return
        self._begin_step = trainer.global_step
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._ready, index)
                )
                self._hooks.append(hook.remove)

    def stepped(self, trainer: pl.Trainer) -> None:
        """A batch is done, and maybe the first step."""
        if self._hooks and trainer.global_step > self._begin_step:
            self.end()
            wanted = sum(parameter.requires_grad for parameter in trainer.lightning_module.parameters())
            if len(self._indices) != wanted:
                self._indices.clear()

    def end(self) -> None:
        """Stop recording."""
        while self._hooks:
            self._hooks.pop()()

    def _ready(self, index: int, _: torch.Tensor) -> None:
        self._indices.pop(index, None)  # of several backward passes the last counts: DDP looks at the one it reduces in
        self._indices[index] = None


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether DDP rebuilds buckets, and nobody's communication hook would take the rehearsal for a step."""
    return not (ddp.find_unused_parameters or ddp.static_graph or compat.COMM_HOOKS.of(ddp))


def _orders_anew(model: Any) -> bool:
    """Whether DDP rebuilds buckets in a way that cannot be rehearsed."""
    is_ddp = isinstance(model, DistributedDataParallel)
    return is_ddp and (model.static_graph or not model.find_unused_parameters) and not _rebuilds(model)


def _rehearse(ddp: DistributedDataParallel, parameters: list[torch.nn.Parameter]) -> None:
    reducer = compat.REDUCER.of(ddp)
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    _pass_without_values(parameters)
    logger.debug("the order in which %d gradients become ready was rehearsed", len(parameters))


def _pass_without_values(parameters: list[torch.nn.Parameter]) -> None:
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        total = torch.zeros((), device=parameters[0].device)
        for parameter in reversed(parameters):  # autograd runs what was made last first
            total = total + parameter.flatten()[:0].sum().to(total)  # of no element: no value can spoil it
    total.backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def mark_used(trainer: pl.Trainer) -> None:
    """In mid-accumulation, have DDP average all gradients there are, where it looks for those of unused parameters.

    It leaves alone what no batch of the window has used, and a DDP that is made again for a resume has seen none.
    """
    trained = (parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad)
    used = [parameter for parameter in trained if parameter.grad is not None]
    if used and isinstance(ddp := trainer.model, DistributedDataParallel) and ddp.find_unused_parameters:
        _pass_without_values(used)  # of which it notes what has a gradient, and no more before the next forward pass


def shares_buffers(trainer: pl.Trainer) -> bool | None:
    """Whether DDP gives all ranks the buffers of rank 0 before the next step; ``None`` without DDP.

    It does not behind a step that only gathered gradients, nor behind the first one by hand. From then on each rank has
    statistics of its own, and a DDP that is made again for a resume would take them away.
    """
    ddp = trainer.model
    return bool(compat.SHARES_BUFFERS.of(ddp)) if isinstance(ddp, DistributedDataParallel) else None


def restore_sharing(trainer: pl.Trainer, saved: bool | None) -> None:
    """Have it do as :func:`shares_buffers` found."""
    if saved is not None and isinstance(trainer.model, DistributedDataParallel):
        compat.SHARES_BUFFERS.set(trainer.model, saved)
