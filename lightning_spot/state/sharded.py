"""The state of a model and its optimizers in shards, as FSDP2 and tensor parallelism have it: taken and given back.

Nothing here calls a collective, and no optimizer steps. (``torch.distributed.checkpoint`` has one step that has not
stepped yet when it is asked for its state.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn import Module

from lightning_spot.errors import ModelChangedError, NotSerializableError
from lightning_spot.patches import Patches
from lightning_spot.sharded.metadata import dtype_of
from lightning_spot.sharded.plan import EXTRA, EXTRA_SUFFIX, is_extra
from lightning_spot.sharded.reader import ImageReader, changed, load, load_all
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Image
from lightning_spot.snapshot.tensor_index import ShardedTensor
from lightning_spot.state import compat, namespaces
from lightning_spot.state.dump import KEY
from lightning_spot.state.optimizers import clean, keep_dtypes, names_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
_GROUPS, _STATE, _NAMES = "param_groups", "state", "params"


class Dtensors:
    """How ``ModelParallelStrategy`` holds a model: its parameters are DTensors.

    Args:
        module: as the strategy has it.
    """

    def __init__(self, module: Module) -> None:
        self._module = module

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        """Names of the parameters that optimizers have: after a validation the module has others until it is asked."""
        self._module.state_dict(keep_vars=True)  # FSDP2 puts its own back then
        return names_of(self._module)

    def name(self, parameter: torch.Tensor) -> str:
        """The name of one of an optimizer's parameters."""
        return self._names[id(parameter)]

    def model_state(self) -> State:
        """The live state of the model: its own tensors, since to detach a DTensor takes 0.1 ms."""
        state = {clean(name): value for name, value in self._module.state_dict(keep_vars=True).items()}
        self._names = names_of(self._module)
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        """The live state of an optimizer by the names of its parameters; of one that has not stepped yet, none."""
        names = self._names
        groups = [
            {**group, _NAMES: [names[id(parameter)] for parameter in group[_NAMES]]} for group in optimizer.param_groups
        ]
        try:
            state = {names[id(parameter)]: values for parameter, values in optimizer.state.items() if values}
        except KeyError:
            other = next(each for each, values in optimizer.state.items() if values and id(each) not in names)
            what = "a tensor that is none of the model's parameters" if isinstance(other, torch.Tensor) else repr(other)
            raise NotSerializableError(
                f"{type(optimizer).__name__} keeps a state of {what}: snapshots of a model in shards have what is kept"
                " of its parameters. Keep it in param_groups"
            ) from None
        return {_STATE: state, _GROUPS: groups}


def is_sharded(trainer: pl.Trainer) -> bool:
    """Whether each rank has a part of the model only."""
    return isinstance(trainer.strategy, namespaces.classes("strategies", "ModelParallelStrategy"))


def holder_of(trainer: pl.Trainer) -> Dtensors:
    """How the strategy of a trainer holds its model, once that is set up."""
    module: Any = trainer.strategy.model
    return Dtensors(module)


def shares_random(_: pl.Trainer) -> bool:
    """Whether torch has given all ranks the random numbers of rank 0, as it does when DTensors on GPUs first draw."""
    return compat.RNG_TRACKER.of(torch.distributed.tensor) is not None


def restore_shared_random(trainer: pl.Trainer, saved: bool) -> None:
    """Have it not do so again, if it had: ranks may have drawn other numbers since."""
    home = torch.distributed.tensor
    if saved and is_sharded(trainer) and compat.RNG_TRACKER.of(home) is None:
        mesh = trainer.strategy.device_mesh  # type: ignore[attr-defined] # ModelParallelStrategy has it
        compat.RNG_TRACKER.set(home, compat.MAKE_TRACKER.of(home)(mesh, run_state_sync=False))


@contextlib.contextmanager
def live_states(trainer: pl.Trainer) -> Iterator[None]:
    """Have a sharded strategy give its live tensors for a checkpoint: its own way copies them, and may step."""
    with Patches() as patches:
        if is_sharded(trainer):
            holder = holder_of(trainer)
            patches.wrap(trainer.strategy, "lightning_module_state_dict", lambda _: holder.model_state)
            patches.wrap(trainer.strategy, "optimizer_state", lambda _: holder.optimizer_state)
        yield


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """What Lightning would save; of a sharded strategy, with the live tensors."""
    with live_states(trainer):
        checkpoint: dict[str, Any] = compat.DUMP_CHECKPOINT.of(trainer)(False)
    return checkpoint


def checkpoint_through_save(trainer: pl.Trainer) -> dict[str, Any]:
    """The same by public names only."""
    caught: dict[str, Any] = {}
    with Patches() as patches, live_states(trainer):
        patches.wrap(
            trainer.strategy, "save_checkpoint", lambda _: lambda checkpoint, *_, **__: caught.update(checkpoint)
        )
        trainer.save_checkpoint("snapshot.ckpt", weights_only=False)
    return caught


def split(checkpoint: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    """What of a checkpoint is in shards, by the keys of Lightning's sharded checkpoints, and the rest.

    Extra states of modules are in both: torch looks for them among the shards, where keys of dicts become strings.
    """
    rest = dict(checkpoint)
    model: State = rest.pop(MODEL, {})
    extra = [name for name in model if name.endswith(EXTRA_SUFFIX)]  # of thousands, none as a rule
    rest[KEY] = {**rest[KEY], EXTRA: {name: model[name] for name in extra if is_extra(name)}}
    state: State = {MODEL: model}
    state.update({_key(number): item for number, item in enumerate(rest.pop(OPTIMIZERS, []))})
    return state, rest


def put_back(trainer: pl.Trainer, image: Image, manifest: Manifest, extra: State) -> None:
    """Give a model and its optimizers the state of a sharded snapshot, of any number of ranks. Every rank calls it.

    Args:
        trainer: whose model and optimizers are set up.
        image: of the snapshot, checked.
        manifest: of the snapshot.
        extra: what modules have given with ``get_extra_state``, by their names in the state dict.

    Raises:
        ModelChangedError: if it is the snapshot of another model.
    """
    reader = ImageReader(image, manifest)
    holder, module = holder_of(trainer), trainer.strategy.model
    assert module is not None  # it is set up
    model = get_model_state_dict(module)
    own = {name for name in model if is_extra(name)}
    if own != extra.keys():
        raise changed(reader.name, missing=sorted(own - extra.keys()), unexpected=sorted(extra.keys() - own))
    load({name: value for name, value in model.items() if name not in own}, reader, MODEL)
    _set_extra(module, extra)
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        _put_back_optimizer(holder, optimizer, reader, _key(number))


def _set_extra(module: Module, extra: State) -> None:
    """Give modules their extra state, as ``load_state_dict`` does."""
    for name, part in module.named_modules(remove_duplicate=False) if extra else ():
        key = f"{clean(name)}.{EXTRA_SUFFIX}".lstrip(".")
        if key in extra and type(part).set_extra_state is not Module.set_extra_state:
            part.set_extra_state(extra[key])


def _put_back_optimizer(holder: Dtensors, optimizer: torch.optim.Optimizer, reader: ImageReader, key: str) -> None:
    groups: list[dict[str, Any]] = load_all(reader, (key, _GROUPS))  # a learning rate may be a tensor
    saved = [sorted(group[_NAMES]) for group in groups]
    present = [list(map(holder.name, group[_NAMES])) for group in optimizer.param_groups]
    if saved != [sorted(names) for names in present]:
        before, now = set(chain.from_iterable(saved)), set(chain.from_iterable(present))
        raise ModelChangedError(
            f"the parameters of {key} have changed since snapshot {reader.name}: give each model a dirpath of its own,"
            " or start afresh with resume=False",
            reshaped=[],
            missing=sorted(now - before),
            unexpected=sorted(before - now),
        )
    parameters = {holder.name(each): each for group in optimizer.param_groups for each in group[_NAMES]}
    numbers = {name: number for number, name in enumerate(parameters)}
    for group, names in zip(groups, present, strict=True):
        group[_NAMES] = [numbers[name] for name in names]
    values = load_all(reader, (key, _STATE), lambda tensor: _empty_like(parameters[str(tensor.path[2])], tensor))
    state = {_STATE: {numbers[name]: value for name, value in values.items()}, _GROUPS: groups}
    optimizer.load_state_dict(state)
    dtypes = {str(tensor.path[1]): dtype_of(tensor) for tensor in reader.shards.tensors if tensor.path[0] == MODEL}
    keep_dtypes(optimizer, state, lambda parameter: dtypes.get(holder.name(parameter)))


def _empty_like(parameter: torch.Tensor, saved: ShardedTensor) -> torch.Tensor:
    """A tensor of an optimizer's state to load into: sharded as its parameter is, if it is of the same shape."""
    dtype = dtype_of(saved)
    if tuple(parameter.shape) == saved.shape:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.empty(saved.shape, dtype=dtype)


def _key(number: int) -> str:
    return f"optimizer_{number}"
