"""Which rank writes which box of which tensor of a sharded training state, and where. Every rank finds the same.

A ``DTensor`` says of all ranks what they have of it: its placements over a mesh. No rank has to ask another one, and it
is enough to compare the digests of what they found.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from lightning_spot.errors import NotSerializableError
from lightning_spot.sharded.dtensors import box_of, root_of, spec_of
from lightning_spot.sharded.metadata import name_of
from lightning_spot.snapshot.files import FILE_ALIGNMENT_BYTES
from lightning_spot.snapshot.layout import Entry, lay_out
from lightning_spot.snapshot.parts import checksum
from lightning_spot.snapshot.tensor_index import Archived, Path, ShardedTensor, Shards
from lightning_spot.snapshot.tensor_index import Shard as Box

ALIGNMENT = 64
"""Bytes of which the offset of every archive in its file is a multiple, and so that of every tensor's elements."""

_LEAF, _MAPPING, _LIST = range(3)
_SCALARS = frozenset((str, int, float, bool, type(None)))


_Form = tuple[Any, list[tuple[int, Any]]]
"""Keys of a mapping, or length of a list; and the form of each mapping and list in it, with its number among them."""


EXTRA_SUFFIX = "_extra_state"
"""How torch names, in a state dict, what a module gives with ``get_extra_state``."""


EXTRA = "extra_state"
"""Key of all of these in the exact state of a snapshot."""


def is_extra(name: str) -> bool:
    """Whether an item of a model's state dict is the extra state of a module."""
    return name.endswith(EXTRA_SUFFIX) and name.rpartition(".")[2] == EXTRA_SUFFIX


class Items:
    """Finds the items of one state after the other, for one thread.

    Attributes:
        paths: of the items found last, in the order of the state; the same object as long as all keys are the same.
        other_keys: that are no text, and where; directories of torch make text of them. (What modules give with
            ``get_extra_state`` is in the rest of the checkpoint, too, as it is.)
    """

    def __init__(self) -> None:
        self.paths: tuple[Path, ...] = ()
        self.other_keys: list[tuple[Path, Any]] = []
        self._form: Any = None
        self._kinds: dict[type, int] = {}

    def of(self, state: Mapping[str, Any]) -> list[Any]:
        """The items of a state.

        Raises:
            NotSerializableError: if torch would give two of them the same name.
        """
        found: list[Any] = []
        form = self._collect(state, found, is_list=False)
        if form != self._form:
            paths: list[Path] = []
            self.other_keys = []
            _add_paths(form, (), paths, self.other_keys)
            _check_names(paths)
            self.paths, self._form = tuple(paths), form
        return found

    def _collect(self, value: Any, found: list[Any], *, is_list: bool) -> _Form:
        """Add the items of a mapping or list; the form that tells it from all that are put together in another way."""
        inner: list[tuple[int, _Form]] = []
        kinds = self._kinds
        for number, item in enumerate(value if is_list else value.values()):
            kind = kinds.get(type(item))
            if kind is None:
                kind = kinds[type(item)] = _kind(type(item))
            # Torch would leave an empty dict out, and who looks for it after a resume would miss it.
            if kind == _LEAF or (kind == _LIST and _is_one_item(item)) or (kind == _MAPPING and not item):
                found.append(item)
            else:
                inner.append((number, self._collect(item, found, is_list=kind == _LIST)))
        return len(value) if is_list else tuple(value), inner


def _kind(what: type) -> int:
    if issubclass(what, Mapping):
        return _MAPPING
    return _LIST if issubclass(what, list) else _LEAF


def _is_one_item(values: list[Any]) -> bool:
    """Whether a list is one item: it holds no tensors, and nothing that is taken apart."""
    if _SCALARS.issuperset(map(type, values)):  # as the names of thousands of parameters
        return True
    return not any(
        isinstance(value, (torch.Tensor, Mapping)) or (isinstance(value, list) and not _is_one_item(value))
        for value in values
    )


def _add_paths(form: _Form, path: Path, paths: list[Path], other_keys: list[tuple[Path, Any]]) -> None:
    keys, inner = form
    below = dict(inner)
    names: list[str | int] = [*range(keys)] if isinstance(keys, int) else [str(key) for key in keys]
    if not isinstance(keys, int) and not any(is_extra(part) for part in path if isinstance(part, str)):
        other_keys += [(path, key) for key in keys if not isinstance(key, str)]
    for number, key in enumerate(names):
        if number in below:
            _add_paths(below[number], (*path, key), paths, other_keys)
        else:
            paths.append((*path, key))


def _check_names(paths: list[Path]) -> None:
    seen: dict[str, Path] = {}
    for path in paths:
        name = name_of(path)
        if (other := seen.setdefault(name, path)) is not path:
            raise NotSerializableError(
                f"two items of the training state have the name {name!r} for torch.distributed.checkpoint: at"
                f" {list(other)} and at {list(path)}. Give one of them another key in the state_dict"
            )


State = dict[str, Any]
"""Nested state: DTensors, tensors and plain values in dicts and lists."""

_Held = tuple[list[int], tuple[int, ...], tuple[int, ...]]
"""Ranks that have a box of a tensor, the offsets of its first element, and its sizes."""


def tensors_file(rank: int) -> str:
    """Name of the file with the tensors that a rank writes."""
    return f"__{rank}_0.distcp"


def aligned(place: int, alignment: int) -> int:
    """The next multiple."""
    return -(-place // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Form:
    """The archive of a box of a tensor, but for its elements. All boxes of that dtype and size have the same.

    Attributes:
        frame: ``(offset, bytes)`` of what is around the elements.
        data: offset of the elements.
        data_nbytes: their length.
        nbytes: length of the archive.
    """

    frame: tuple[Entry, ...]
    data: int
    data_nbytes: int
    nbytes: int


@functools.lru_cache(maxsize=4096)
def form_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Form:
    """The archive of a box of so many elements."""
    # Memory that nobody touches: the kernel gives no page for it.
    layout = lay_out(torch.empty(sizes, dtype=dtype))
    if not layout.pieces:
        return Form(layout.frame, 0, 0, layout.nbytes)
    piece = layout.pieces[0]
    return Form(layout.frame, piece.offset, piece.nbytes, layout.nbytes)


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a tensor that a rank writes.

    Attributes:
        number: of the tensor in the plan.
        path: of the tensor.
        sizes: of the box.
        form: of its archive.
        offset: of the archive in the rank's file.
        pad: zeros behind it, up to the next one.
    """

    number: int
    path: Path
    sizes: tuple[int, ...]
    form: Form
    offset: int
    pad: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who writes what, and where. What is no tensor, and tensors that are not sharded, are written by rank 0.

    Attributes:
        world_size: number of ranks.
        tensors: in the order of the state, with the places of the boxes that make up each.
        values: paths of everything else.
        sizes: of the file with each rank's tensors; 0 for a rank that writes none.
        by_rank: the boxes that each rank writes.
    """

    world_size: int
    tensors: tuple[ShardedTensor, ...]
    values: tuple[Path, ...]
    sizes: tuple[int, ...]
    by_rank: tuple[tuple[Placed, ...], ...]

    def digest(self, token: str) -> str:
        """Of all of it, the same on all ranks whose state is sharded alike; another torch may place it otherwise.

        Args:
            token: what has to be the same, too.
        """
        shards = Shards(self.world_size, self.tensors, ()).to_json()
        return checksum(shards + json.dumps([self.values, self.sizes, token]).encode())


class Planned(NamedTuple):
    """A state and its plan.

    Attributes:
        plan: of it.
        tensors: those of the state, in the order of the plan's.
        values: everything else, likewise.
    """

    plan: Plan
    tensors: list[torch.Tensor]
    values: list[Any]


class Planner:
    """Plans one state after another; a plan is made anew only where the state is put together in another way.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._items = Items()
        self._paths: tuple[Path, ...] = ()
        self._seen: list[tuple[Any, Any] | None] = []
        self._plan: Plan | None = None
        self._is_tensor: list[bool] = []
        self._is_value: list[bool] = []
        self._boxes: dict[Any, list[_Held]] = {}

    def plan(self, state: State) -> Planned:
        """Plan a state.

        Args:
            state: of this rank, nested.

        Returns:
            what there is; the plan is the same object as long as nothing has changed.

        Raises:
            NotSerializableError: if a tensor is sharded in a way that is not known here, two items have one name, or a
                key is no text.
        """
        items = self._items.of(state)
        plan = self._plan
        if plan is None or self._paths is not self._items.paths or not self._are_alike(items):
            plan = self._make(items)
        return Planned(plan, list(compress(items, self._is_tensor)), list(compress(items, self._is_value)))

    def _are_alike(self, items: list[Any]) -> bool:
        """Whether all items have the form of those that were planned: most are sharded by the same object."""
        for number, (seen, item) in enumerate(zip(self._seen, items, strict=True)):
            if seen is None:
                if isinstance(item, torch.Tensor):
                    return False
                continue
            spec, form = seen
            if spec is not None and spec_of(item) is spec:
                continue
            if form != _form_of(item):
                return False
            if spec is not None:
                self._seen[number] = _seen(item)
        return True

    def _make(self, items: list[Any]) -> Plan:
        self._plan = None
        paths = self._items.paths
        for path, key in self._items.other_keys:  # a resume would not give back what was there
            raise NotSerializableError(
                f"{name_of(path)} has the key {key!r}, and in snapshots of a model in shards all keys are text"
            )
        which = [isinstance(item, torch.Tensor) for item in items]
        tensors = [*zip(compress(paths, which), compress(items, which), strict=True)]
        boxes: list[list[Box]] = [[] for _ in tensors]
        by_rank = [*map(tuple, self._place(tensors, boxes))]
        self._seen = [_seen(item) if is_one else None for item, is_one in zip(items, which, strict=True)]
        self._paths, self._is_tensor, self._is_value = paths, which, list(map(operator.not_, which))
        self._plan = plan = Plan(
            self._world_size,
            tuple(
                ShardedTensor(path, str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(of_one))
                for (path, value), of_one in zip(tensors, boxes, strict=True)
            ),
            tuple(compress(paths, self._is_value)),
            tuple(placed[-1].offset + placed[-1].form.nbytes if placed else 0 for placed in by_rank),
            tuple(by_rank),
        )
        return plan

    def _place(self, tensors: list[tuple[Path, torch.Tensor]], boxes: list[list[Box]]) -> Iterator[list[Placed]]:
        """Deal the boxes of all tensors to the ranks; those of each rank, placed in its file."""
        dealt: list[list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = [[] for _ in range(self._world_size)]
        written = [0] * self._world_size
        for number, (path, value) in enumerate(tensors):
            for ranks, offsets, sizes in self._boxes_of(path, value):
                rank = min(ranks, key=lambda rank: (written[rank], rank))
                written[rank] += prod(sizes) * value.dtype.itemsize
                dealt[rank].append((number, offsets, sizes))
        for rank, of_one in enumerate(dealt):
            name, at, found = tensors_file(rank), 0, list[Placed]()
            for place, (number, offsets, sizes) in enumerate(of_one):
                path, value = tensors[number]
                form = form_of(value.dtype, sizes)
                end = at + form.nbytes
                following = aligned(end, ALIGNMENT if place < len(of_one) - 1 else FILE_ALIGNMENT_BYTES)
                found.append(Placed(number, path, sizes, form, at, following - end))
                boxes[number].append(Box(offsets, sizes, Archived(name, at, form.nbytes), form.data))
                at = following
            yield found

    def _boxes_of(self, path: Path, tensor: torch.Tensor) -> list[_Held]:
        """The boxes of a tensor, each with the ranks that have it."""
        if kind := _kind_without_elements(tensor):
            raise NotSerializableError(
                f"{name_of(path)} is a {kind} tensor, which sharded snapshots cannot hold. Make it a dense tensor, or"
                " register it as a buffer with persistent=False"
            )
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise NotSerializableError(
                    f"{name_of(path)} is a {type(tensor).__name__}: sharded snapshots take plain tensors"
                    " and the DTensors of FSDP2 and tensor parallelism"
                )
            return [([0], (0,) * len(shape), shape)]
        key = (shape, tensor.placements, tensor.device_mesh)
        if key not in self._boxes:
            self._boxes[key] = _boxes(path, tensor)
        return self._boxes[key]


def _seen(tensor: torch.Tensor) -> tuple[Any, Any]:
    """What is known of a tensor that was planned: its :func:`spec_of`, and its :func:`_form_of`.

    (Not the tensor: ``module.cpu()`` fails for a ``DTensor`` to which there is a weak reference.)
    """
    return spec_of(tensor), _form_of(tensor)


def _kind_without_elements(tensor: torch.Tensor) -> str:
    """What a tensor is instead of elements of one size, side by side; ``""`` if it is no more than that."""
    if tensor.is_nested:
        return "nested"
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.").removesuffix("strided")


def _form_of(value: Any) -> Any:
    """What has to be the same for a plan to stay as it is."""
    if isinstance(value, DTensor):
        return (value.dtype, value.shape, value.placements, value.device_mesh)
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None


def _coordinates(path: Path, tensor: DTensor) -> Iterator[tuple[int, list[int]]]:
    """Yield each rank of the run that has some of a tensor, with its place in the tensor's mesh.

    The mesh may be a part of one of more dimensions: along the others, ranks have the same.
    """
    mesh = tensor.device_mesh
    root = root_of(mesh)
    dims = list(range(mesh.ndim))
    if root is not mesh:
        names = root.mesh_dim_names or ()
        if not all(name in names for name in mesh.mesh_dim_names or (None,)):
            raise NotSerializableError(
                f"{name_of(path)} is sharded over the mesh {mesh}, whose dimensions are none of those of {root}. Shard"
                " it over a dimension of the mesh that Lightning made"
            )
        dims = [names.index(name) for name in mesh.mesh_dim_names or ()]
    places = torch.nonzero(torch.ones_like(root.mesh)).tolist()
    for rank, place in zip(root.mesh.flatten().tolist(), places, strict=True):
        yield rank, [place[dim] for dim in dims]


def _boxes(path: Path, tensor: DTensor) -> list[_Held]:
    """The boxes of a tensor, each with the ranks that have it; the same for all that are sharded alike."""
    found: dict[tuple[int, ...], tuple[list[int], tuple[int, ...]]] = {}
    known: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for rank, coordinate in _coordinates(path, tensor):
        place = tuple(coordinate)
        if place not in known:
            known[place] = box_of(tensor, coordinate)
        sizes, offsets = known[place]
        if prod(sizes) or not found:
            found.setdefault(offsets, ([], sizes))[0].append(rank)
    if len(found) > 1:  # the first rank's may be empty
        found = {offsets: box for offsets, box in found.items() if prod(box[1])}
    return [(ranks, offsets, sizes) for offsets, (ranks, sizes) in found.items()]
