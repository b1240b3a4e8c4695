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
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_spot.errors import NotSerializableError
from lightning_spot.sharded.dtensors import box_of, root_of, spec_of
from lightning_spot.sharded.metadata import name_of
from lightning_spot.snapshot.layout import Layout, lay_out, outline_of
from lightning_spot.snapshot.parts import checksum
from lightning_spot.snapshot.tensor_index import Archived, Path, ShardedTensor, Shards
from lightning_spot.snapshot.tensor_index import Shard as Box

ALIGNMENT = 64
"""Bytes of which the offset of every archive in its file is a multiple, and so that of every tensor's elements."""

_LEAF, _MAPPING, _LIST = range(3)
_SCALARS = frozenset((str, int, float, bool, type(None)))


EXTRA_SUFFIX = "_extra_state"
"""How torch names, in a state dict, what a module gives with ``get_extra_state``."""


EXTRA = "extra_state"
"""Key of all of these in the exact state of a snapshot."""


def is_extra(name: str) -> bool:
    """Whether an item of a model's state dict is the extra state of a module."""
    return name.endswith(EXTRA_SUFFIX) and name.rpartition(".")[2] == EXTRA_SUFFIX


def items_of(state: Mapping[str, Any]) -> tuple[list[Path], list[Any]]:
    """Paths and items of a state, in its order.

    What modules give with ``get_extra_state`` is in the rest of the checkpoint, too, as it is.

    Raises:
        NotSerializableError: if a key is no text: directories of torch make text of it, and a resume would not give
            back what was there.
    """
    paths: list[Path] = []
    items: list[Any] = []
    _collect(state, (), paths, items)
    return paths, items


def _collect(value: Any, path: Path, paths: list[Path], items: list[Any]) -> None:
    for key, item in enumerate(value) if isinstance(value, list) else value.items():
        if not isinstance(value, list) and not isinstance(key, str):
            if not any(map(is_extra, map(str, path))):
                raise NotSerializableError(
                    f"{name_of(path)} has the key {key!r}, and in snapshots of a model in shards all keys are text"
                )
            key = str(key)
        kind = _kind(item.__class__)
        # Torch would leave an empty dict out, and who looks for it after a resume would miss it.
        if kind == _LEAF or (kind == _LIST and _is_one_item(item)) or (kind == _MAPPING and not item):
            paths.append((*path, key))
            items.append(item)
        else:
            _collect(item, (*path, key), paths, items)


@functools.cache
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


@functools.lru_cache(maxsize=4096)
def archive_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Layout, int]:
    """The archive of a box of so many elements, but for these, and where these begin. All such boxes have the same."""
    layout = lay_out(torch.empty(sizes, dtype=dtype))  # memory that nobody touches: the kernel gives no page for it
    return outline_of(layout), layout.pieces[0].offset if layout.pieces else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who writes what, and where. What is no tensor, and tensors that are not sharded, are written by rank 0.

    Attributes:
        world_size: number of ranks.
        tensors: in the order of the state, with the places of the boxes that make up each.
        values: paths of everything else.
        sizes: of the file with each rank's tensors; 0 for a rank that writes none.
        by_rank: the boxes that each rank writes, in the order of its file, each with the number of its tensor.
    """

    world_size: int
    tensors: tuple[ShardedTensor, ...]
    values: tuple[Path, ...]
    sizes: tuple[int, ...]
    by_rank: tuple[tuple[tuple[int, Box], ...], ...]

    def digest(self, token: str) -> str:
        """Of all of it, the same on all ranks whose state is sharded alike; another torch may place it otherwise.

        Args:
            token: what has to be the same, too.
        """
        shards = Shards(self.world_size, self.tensors, ()).to_json()
        return checksum(shards + json.dumps([self.values, self.sizes, token]).encode())


class Planner:
    """Plans one state after another; a plan is made anew only where the state is put together in another way.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._plan: Plan | None = None
        self._planned: tuple[list[Path], list[Any]] = [], []  # its paths, and the form of each item
        self._boxes: dict[Any, list[_Held]] = {}

    def plan(self, state: State) -> tuple[Plan, list[torch.Tensor], list[Any]]:
        """Plan a state.

        Args:
            state: of this rank, nested.

        Returns:
            the plan, which is the same object as long as nothing has changed; the tensors of the state, in the order of
            the plan's; and everything else, likewise.

        Raises:
            NotSerializableError: if a tensor is sharded in a way that is not known here, two items have one name, or a
                key is no text.
        """
        paths, items = items_of(state)
        forms = [*map(_form_of, items)]
        is_tensor = [form is not None for form in forms]
        is_value = [*map(operator.not_, is_tensor)]
        tensors, values = [*compress(items, is_tensor)], [*compress(items, is_value)]
        if self._plan is None or self._planned != (paths, forms):
            self._plan = None
            _check_names(paths)
            named = [*zip(compress(paths, is_tensor), tensors, strict=True)]
            self._plan = self._make(named, [*compress(paths, is_value)])
        self._planned = paths, forms
        return self._plan, tensors, values

    def _make(self, tensors: list[tuple[Path, torch.Tensor]], values: list[Path]) -> Plan:
        """Deal the boxes of all tensors to the ranks, and place them in the ranks' files."""
        found: list[ShardedTensor] = []
        by_rank: list[list[tuple[int, Box]]] = [[] for _ in range(self._world_size)]
        written, sizes = [0] * self._world_size, [0] * self._world_size
        for number, (path, value) in enumerate(tensors):
            boxes: list[Box] = []
            for ranks, offsets, of_box in self._boxes_of(path, value):
                rank = min(ranks, key=lambda rank: (written[rank], rank))
                written[rank] += prod(of_box) * value.dtype.itemsize
                (archive, data), at = archive_of(value.dtype, of_box), aligned(sizes[rank], ALIGNMENT)
                boxes.append(Box(offsets, of_box, Archived(tensors_file(rank), at, archive.nbytes), data))
                by_rank[rank].append((number, boxes[-1]))
                sizes[rank] = at + archive.nbytes
            found.append(ShardedTensor(path, str(value.dtype).removeprefix("torch."), tuple(value.shape), tuple(boxes)))
        return Plan(self._world_size, tuple(found), tuple(values), tuple(sizes), tuple(map(tuple, by_rank)))

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


def _kind_without_elements(tensor: torch.Tensor) -> str:
    """What a tensor is instead of elements of one size, side by side; ``""`` if it is no more than that."""
    if tensor.is_nested:
        return "nested"
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.").removesuffix("strided")


def _form_of(value: Any) -> Any:
    """What has to be the same for a plan to stay as it is; ``None`` of what is no tensor. Most are the same object.

    (Not the tensor: ``module.cpu()`` fails for a ``DTensor`` to which there is a weak reference.)
    """
    if isinstance(value, DTensor):
        return spec_of(value) or (value.dtype, value.shape, value.placements, value.device_mesh)
    return (value.dtype, value.is_nested or value.shape) if isinstance(value, torch.Tensor) else None


def _coordinates(path: Path, tensor: DTensor) -> Iterator[tuple[int, tuple[int, ...]]]:
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
        yield rank, tuple([place[dim] for dim in dims])


def _boxes(path: Path, tensor: DTensor) -> list[_Held]:
    """The boxes of a tensor, each with the ranks that have it; the same for all that are sharded alike."""
    box_at = functools.cache(functools.partial(box_of, tensor))
    found: dict[tuple[int, ...], tuple[list[int], tuple[int, ...]]] = {}
    for rank, place in _coordinates(path, tensor):
        sizes, offsets = box_at(place)
        if prod(sizes) or not found:
            found.setdefault(offsets, ([], sizes))[0].append(rank)
    if len(found) > 1:  # the first rank's may be empty
        found = {offsets: box for offsets, box in found.items() if prod(box[1])}
    return [(ranks, offsets, sizes) for offsets, (ranks, sizes) in found.items()]
