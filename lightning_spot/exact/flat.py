"""A model whose parameters FSDP1 has in flat ones, each cut into equal parts: its state, without asking FSDP for one.

FSDP gathers what it is asked for. Here each rank takes what it has of each parameter out of its part of the flat one.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks, get_rank, get_world_size
from torch.nn import Module
from torch.optim import Optimizer

from lightning_spot.errors import SettingsError
from lightning_spot.exact import private
from lightning_spot.exact.parameter_names import clean, names_of
from lightning_spot.image.shards import ShardedTensor
from lightning_spot.sharded.flat import FlatShard, Range, Refused, ranges_of
from lightning_spot.sharded.metadata import dtype_of
from lightning_spot.sharded.reader import ImageReader, load

State = dict[str, Any]
Kinds = dict[str, dict[str, dict[str, str]]]
"""Of each optimizer's state for each parameter, by their names, what each of its values is."""

_STATE, _GROUPS, _NAMES = "state", "param_groups", "params"
_SCALAR, _PLAIN, _REFUSED = "scalar ", "plain", "refused "
_HOOKS = (private.STATE_DICT_HOOKS, private.STATE_DICT_PRE_HOOKS)
INSTEAD = "use ModelParallelStrategy with fully_shard (FSDP2), which knows of it"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What this rank has of a parameter.

    Attributes:
        names: of the parameter; tied ones have several.
        shape: of the whole parameter.
        ranges: of its elements, for each rank.
        flat: the flat parameter that it is in.
        own: the parameter itself, ``None`` if the module has it no more (``use_orig_params=False``).
        offset: in this rank's part of the flat one.
        numel: of this rank's elements.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    flat: Any
    own: Tensor | None
    offset: int
    numel: int

    @property
    def name(self) -> str:
        """The first one."""
        return self.names[0]

    @property
    def of_all(self) -> Tensor:
        """This rank's part of the flat parameter: also while that is whole, or has another precision."""
        flat = self.flat
        return getattr(flat, private.LOCAL_SHARD, flat.data)  # type: ignore[no-any-return] # at first, data

    def shard(self, of_all: Tensor) -> FlatShard:
        """What this rank has, of what is laid out as its part of the flat parameter is."""
        return self.shard_of(of_all.detach()[self.offset : self.offset + self.numel])

    def shard_of(self, local: Tensor) -> FlatShard:
        """The same, of this rank's elements."""
        return FlatShard(local.detach().reshape(-1), self.shape, self.ranges, get_rank())

    def scalar(self, value: Tensor) -> FlatShard:
        """Something that all ranks have that have some of the parameter: the first of them writes it."""
        first = next((rank for rank, (start, stop) in enumerate(self.ranges) if start < stop), 0)
        ranges = tuple((0, int(rank == first)) for rank in range(len(self.ranges)))
        local = value.detach().reshape(-1)
        return FlatShard(local if get_rank() == first else local[:0], (), ranges, get_rank())


class Flat:
    """How FSDP1 holds a model.

    Args:
        module: as the strategy has it, wrapped.

    Attributes:
        key: of the model's state in Lightning's sharded checkpoints.
    """

    key = "model"

    def __init__(self, module: Module) -> None:
        self._module = module
        self._parts = list(_parts_of(module))
        self._names = names_of(module)
        self._in: dict[int, list[Part]] = {}
        for part in self._parts:
            self._in.setdefault(id(part.flat if part.own is None else part.own), []).append(part)

    def names(self, parameter: Tensor) -> list[str]:
        """The names of the parameters that one of an optimizer's stands for."""
        parts = self._in.get(id(parameter))
        return [part.name for part in parts] if parts is not None else [self._names[id(parameter)]]

    def outside(self) -> set[int]:
        """Identities of the parameters that FSDP was told to ignore."""
        return {id(one) for one in self._module.parameters()} - self._in.keys()

    # -- to save --------------------------------------------------------------------------------------------------

    def model_state(self) -> State:
        """The live state of the model."""
        state: State = {}
        for name, value in live_state(self._module).items():
            parts = self._in.get(id(value))
            for part in parts or ():
                state.update((each, self._weight(part)) for each in part.names)
            if parts is None:
                state[clean(name)] = value
        return state

    def frozen(self, state: State) -> Iterable[Tensor]:
        """See :class:`~lightning_spot.exact.sharded.Holder`: flat ones, and those that FSDP leaves alone."""
        return (parameter for parameter in self._module.parameters() if not parameter.requires_grad)

    def _weight(self, part: Part) -> FlatShard | Refused:
        of_all, own = part.of_all, part.own
        place = of_all.data_ptr() + part.offset * of_all.element_size()
        is_here = own is not None and own.numel() == part.numel > 0  # else it is whole at present
        if is_here and own is not None and own.data_ptr() != place:
            return Refused("its data was replaced, and FSDP takes that over with the next forward only")
        return part.shard(of_all)

    def optimizer_state(self, optimizer: Optimizer) -> State:
        """The live state of an optimizer, as far as this rank has it; of one that has not stepped yet, none."""
        states: State = {}
        for parameter, values in optimizer.state.items():
            if not values:  # it was asked for, and nothing is kept
                continue
            parts = self._in.get(id(parameter))
            if parts is None:  # FSDP was told to ignore it
                states[self._names[id(parameter)]] = values
            for part in parts or ():
                states[part.name] = {key: _saved(part, parameter, value) for key, value in values.items()}
        groups = [
            {**group, _NAMES: [name for parameter in group[_NAMES] for name in self.names(parameter)]}
            for group in optimizer.param_groups
        ]
        return {_STATE: states, _GROUPS: groups}

    def kinds(self, state: State) -> Kinds:
        """What this rank has of the optimizers' states, to tell the ranks that have nothing of some parameter."""
        return {
            key: {
                name: {each: _kind(value) for each, value in values.items()} for name, values in items[_STATE].items()
            }
            for key, items in state.items()
            if key != self.key
        }

    def complete(self, state: State, kinds: Iterable[Kinds]) -> None:
        """Add to the optimizers' states what other ranks have of parameters of which this one has nothing."""
        known: Kinds = {}
        for one in kinds:
            for key, items in one.items():
                known.setdefault(key, {}).update(items)
        for key, items in state.items():
            if key == self.key:
                continue
            own, theirs = items[_STATE], known.get(key, {})
            for part in self._parts:
                if part.name not in own and not part.numel and part.name in theirs:
                    own[part.name] = {each: _missing(part, kind) for each, kind in theirs[part.name].items()}
            items[_STATE] = {name: dict(sorted(own[name].items(), key=_text_of_key)) for name in sorted(own)}

    # -- to load --------------------------------------------------------------------------------------------------

    def to_load(self) -> State:
        """The model's state, whose tensors are to be given their values."""
        return {name: None if isinstance(value, Refused) else value for name, value in self.model_state().items()}

    def load_optimizer(self, optimizer: Optimizer, reader: ImageReader, key: str) -> dict[int, State]:
        """The saved state of an optimizer, as this rank has it, by the numbers of its parameters.

        Args:
            optimizer: that it is for.
            reader: of the snapshot.
            key: of the optimizer there.
        """
        saved = _saved_of(reader, key)
        asked: dict[str, State] = {}
        states: dict[int, State] = {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group[_NAMES]]
        for number, parameter in enumerate(parameters):
            for name, part in self._named_parts(parameter):
                for each, tensor in saved.get(name, {}).items():
                    known = states.setdefault(number, {})
                    known[each], into = _room(part, parameter, tensor, known.get(each))
                    asked.setdefault(name, {})[each] = into
        load({key: {_STATE: asked}}, reader)
        for number, parameter in enumerate(parameters):
            for name, _ in self._named_parts(parameter):
                plain = {each: value for each, value in asked.get(name, {}).items() if not isinstance(value, FlatShard)}
                states.get(number, {}).update(plain)
        return states

    def _named_parts(self, parameter: Tensor) -> list[tuple[str, Part | None]]:
        """What this rank has of the parameters that one of an optimizer's stands for; ``None`` for all of it."""
        parts = self._in.get(id(parameter))
        if parts is None:
            return [(self._names[id(parameter)], None)]
        return [(part.name, part) for part in parts if part.numel or part.own is None]


def live_state(module: Module) -> State:
    """The state dict of a module with its own tensors; FSDP1 stays out of it, which would gather them."""
    with _without_gathering(module):
        return module.state_dict(keep_vars=True)


@contextlib.contextmanager
def _without_gathering(module: Module) -> Iterator[None]:
    kept = [(unit, name, name.of(unit)) for unit in units_of(module) for name in _HOOKS]
    for unit, name, _ in kept:
        name.set(unit, OrderedDict())
    try:
        yield
    finally:
        for unit, name, hooks in kept:
            name.set(unit, hooks)


def units_of(module: Module) -> list[Any]:
    """The modules that FSDP1 has wrapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was never imported, there are none
    return list(fsdp.FullyShardedDataParallel.fsdp_modules(module)) if fsdp is not None else []


def _parts_of(module: Module) -> Iterator[Part]:
    """What this rank has of each parameter in a flat one.

    Raises:
        SettingsError: if it is not known what the other ranks have.
    """
    places: dict[int, dict[str, None]] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        places.setdefault(id(submodule), {})[clean(name)] = None
    for unit in units_of(module):
        handle = private.HANDLE.of(unit)
        if handle is None:  # all of its parameters are in units of their own
            continue
        flat = private.FLAT_PARAMETER.of(handle)
        infos, shards = private.PARAM_INFOS.of(flat), private.SHARD_INFOS.of(flat)
        shapes, originals = private.SHAPES.of(flat), private.ORIGINALS.of(flat)
        ties: dict[tuple[int, str], list[tuple[Module, str]]] = {}
        for tie in private.SHARED_INFOS.of(flat):
            ties.setdefault((id(tie.prim_module), tie.prim_param_name), []).append((tie.module, tie.param_name))
        for number, ranges in enumerate(_ranges_of(handle)):
            info, here = infos[number], shards[number]
            owners = [(info.module, info.param_name), *ties.get((id(info.module), info.param_name), [])]
            yield Part(
                tuple(f"{place}.{name}".lstrip(".") for owner, name in owners for place in places[id(owner)]),
                tuple(shapes[number]),
                ranges,
                flat,
                originals[number] if originals is not None else None,
                here.offset_in_shard or 0,
                here.numel_in_shard or 0,
            )


def _ranges_of(handle: Any) -> list[tuple[Range, ...]]:
    """What each rank has of each parameter in a flat one."""
    flat, ranks = private.FLAT_PARAMETER.of(handle), range(get_world_size())
    what = ", ".join(private.FLAT_NAMES.of(flat)[:3])
    is_plain = all(extension is None for extension in private.EXTENSIONS.of(flat))
    if not is_plain or not all(private.CONTIGUITIES.of(flat)):
        raise SettingsError(
            f"FSDPStrategy is not supported where it shards DTensors or channels_last ({what}): {INSTEAD}"
        )
    if not private.IS_SHARDED.of(handle):
        return [((0, numel),) * len(ranks) for numel in private.NUMELS.of(flat)]
    if get_process_group_ranks(private.GROUP_OF_FLAT.of(handle)) != list(ranks):
        raise SettingsError(
            f"FSDPStrategy is not supported where only some ranks share the model, as with HYBRID_SHARD ({what}):"
            f" {INSTEAD}"
        )
    found = ranges_of(tuple(private.PADDED_NUMELS.of(flat)), tuple(private.IS_PADDING.of(flat)), len(ranks))
    for ranges, here in zip(found, private.SHARD_INFOS.of(flat), strict=True):
        start = here.intra_param_start_idx if here.in_shard else 0
        if ranges[private.RANK_OF_FLAT.of(handle)] != (start, start + here.numel_in_shard if here.in_shard else 0):
            raise SettingsError(
                f"torch {torch.__version__} lays flat parameters out in another way ({what}): {INSTEAD}"
            )
    return list(found)


def _saved(part: Part, parameter: Tensor, value: Any) -> Any:
    """A value of an optimizer's state for a parameter, as it is saved."""
    if not isinstance(value, Tensor):
        start, stop = part.ranges[0]  # rank 0 writes what is no tensor
        if start < stop or part.own is None or value is None or isinstance(value, (bool, str)):
            return value
        return Refused(f"it is a number, and rank 0, which writes those, has nothing of the parameter; {INSTEAD}")
    if value.shape == parameter.shape:
        return part.shard_of(value) if part.own is not None else part.shard(value)
    if value.dim() == 0:
        return part.scalar(value)
    return Refused(f"its shape, {tuple(value.shape)}, is not that of what this rank has of the parameter; {INSTEAD}")


def _kind(value: Any) -> str:
    """What has to be known of a value where it is not."""
    if isinstance(value, FlatShard):
        return f"{'' if value.shape else _SCALAR}{str(value.dtype).removeprefix('torch.')}"
    return f"{_REFUSED}{value.reason}" if isinstance(value, Refused) else _PLAIN


def _missing(part: Part, kind: str) -> Any:
    """Stands for a value that only other ranks have."""
    if kind == _PLAIN:
        return None
    if kind.startswith(_REFUSED):
        return Refused(kind.removeprefix(_REFUSED))
    nothing = torch.empty(0, dtype=getattr(torch, kind.removeprefix(_SCALAR)))
    return part.scalar(nothing) if kind.startswith(_SCALAR) else part.shard_of(nothing)


def _text_of_key(item: tuple[Any, Any]) -> str:
    return str(item[0])  # one that is no text is refused when it is laid out


def _saved_of(reader: ImageReader, key: str) -> dict[str, dict[str, ShardedTensor | None]]:
    """What is saved of an optimizer's state by the names of parameters; ``None`` for what is no tensor."""
    found: dict[str, dict[str, ShardedTensor | None]] = {}
    for path in reader.shards.paths:
        if path[:2] == (key, _STATE) and len(path) > 3:  # else there is none
            found.setdefault(str(path[2]), {})[str(path[3])] = reader.tensor(path)
    return found


def _room(part: Part | None, parameter: Tensor, saved: ShardedTensor | None, known: Any) -> tuple[Any, Any]:
    """A value of an optimizer's state that is still to be read, and what to read it into."""
    if saved is None:
        return None, None
    dtype = dtype_of(saved)
    if part is None or saved.shape != part.shape:
        value = torch.empty(saved.shape, dtype=dtype)
        return value, value
    if known is None:  # what pads a flat parameter stays zero
        known = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return known, part.shard(known) if part.own is None else part.shard_of(known)
