"""The state of a model and its optimizers in shards, as strategies with DTensors have it: taken and given back.

Nothing here calls a collective, and no optimizer steps. (``torch.distributed.checkpoint`` has one step that has not
stepped yet when it is asked for its state.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_spot.errors import ModelChanged
from lightning_spot.exact import namespaces
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.shards import ShardedTensor
from lightning_spot.sharded.metadata import dtype_of
from lightning_spot.sharded.reader import ImageReader, load

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
_GROUPS, _STATE, _NAMES = "param_groups", "state", "params"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and activation checkpointing


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether each rank has a part of the model only."""
    return isinstance(trainer.strategy, namespaces.classes("strategies", "ModelParallelStrategy"))


@contextlib.contextmanager
def live_states(trainer: pl.Trainer) -> Iterator[None]:
    """Have a sharded strategy give its live tensors for a checkpoint: its own way copies them, and may step."""
    if not is_sharded(trainer):
        yield
        return
    strategy: Any = trainer.strategy
    module: Module = strategy.model
    strategy.lightning_module_state_dict = lambda: model_state_of(module)
    strategy.optimizer_state = lambda optimizer: state_of(module, optimizer)
    try:
        yield
    finally:
        vars(strategy).pop("lightning_module_state_dict", None)
        vars(strategy).pop("optimizer_state", None)


def model_state_of(module: Module) -> State:
    """The live state of a model: its own tensors, since to detach a DTensor takes 0.1 ms."""
    return {_named(name): value for name, value in module.state_dict(keep_vars=True).items()}


def state_of(module: Module, optimizer: torch.optim.Optimizer) -> State:
    """The live state of an optimizer by the names of its parameters; of one that has not stepped yet, none."""
    names = _names_of(module)
    groups = [
        {**group, _NAMES: [names[id(parameter)] for parameter in group[_NAMES]]} for group in optimizer.param_groups
    ]
    return {_STATE: {names[id(parameter)]: values for parameter, values in optimizer.state.items()}, _GROUPS: groups}


def _names_of(module: Module) -> dict[int, str]:
    """Names of parameters as in a state dict, by their identity: without those of wrappers."""
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), _named(name))
    return names


def _named(name: str) -> str:
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def split(checkpoint: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    """What of a checkpoint is in shards, by the keys of Lightning's sharded checkpoints, and the rest."""
    rest = dict(checkpoint)
    state: State = {MODEL: rest.pop(MODEL, {})}
    state.update({_key(number): item for number, item in enumerate(rest.pop(OPTIMIZERS, []))})
    return state, rest


def put_back(trainer: pl.Trainer, image: memoryview, manifest: Manifest) -> None:
    """Give a model and its optimizers the state of a sharded snapshot, of any number of ranks. Every rank calls it.

    Args:
        trainer: whose model and optimizers are set up.
        image: of the snapshot, checked.
        manifest: of the snapshot.

    Raises:
        ModelChanged: if it is the snapshot of another model.
    """
    reader = ImageReader(image, manifest)
    strategy: Any = trainer.strategy
    module = strategy.model
    load({MODEL: get_model_state_dict(module)}, reader, whole=(MODEL,))
    for number, optimizer in enumerate(strategy.optimizers):
        _put_back_optimizer(module, optimizer, reader, _key(number))


def _put_back_optimizer(module: Module, optimizer: torch.optim.Optimizer, reader: ImageReader, key: str) -> None:
    names = _names_of(module)
    parameters = {names[id(one)]: one for group in optimizer.param_groups for one in group[_NAMES]}
    numbers = {name: number for number, name in enumerate(parameters)}
    groups = _groups_of(reader, key)
    saved = [name for group in groups for name in group[_NAMES]]
    if saved != list(parameters):
        raise ModelChanged(
            f"the parameters of {key} have changed since snapshot {reader.name}: give each model a dirpath of its own,"
            " or start afresh with resume=False",
            reshaped=[],
            missing=sorted(parameters.keys() - set(saved)),
            unexpected=sorted(set(saved) - parameters.keys()),
        )
    state: State = {}
    for tensor in reader.shards.tensors:
        if tensor.path[:2] == (key, _STATE):
            parameter = parameters[str(tensor.path[2])]
            set_element(state, tensor.path, _empty_like(parameter, tensor))
    for path in (value.path for value in reader.shards.values if value.path[:2] == (key, _STATE)):
        set_element(state, path, None)
    load(state, reader)
    values = {numbers[name]: value for name, value in state.get(key, {}).get(_STATE, {}).items()}
    for group in groups:
        group[_NAMES] = [numbers[name] for name in group[_NAMES]]
    optimizer.load_state_dict({_STATE: values, _GROUPS: groups})


def _empty_like(parameter: torch.Tensor, saved: ShardedTensor) -> torch.Tensor:
    """A tensor of an optimizer's state to load into: sharded as its parameter is, if it is of the same shape."""
    dtype = dtype_of(saved)
    if tuple(parameter.shape) == saved.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.empty(saved.shape, dtype=dtype)


def _groups_of(reader: ImageReader, key: str) -> list[dict[str, Any]]:
    """The groups of an optimizer's parameters, as they were saved."""
    groups: dict[int, dict[str, Any]] = {}
    for path, value in reader.values_below((key, _GROUPS)):
        groups.setdefault(int(path[2]), {})[str(path[3])] = value
    return [groups[number] for number in sorted(groups)]


def _key(number: int) -> str:
    return f"optimizer_{number}"


def local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def gradient_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, of what this rank has of it."""
    local = local.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
