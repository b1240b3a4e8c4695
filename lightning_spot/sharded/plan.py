"""Which rank writes which box of which tensor of a sharded training state. Every rank finds the same, by itself.

A ``DTensor`` says of all ranks what they have of it: its placements over a mesh. So no rank has to ask another one,
and it is enough to compare the digests of what they found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from lightning_spot.errors import NotSerialisable
from lightning_spot.image.shards import Path

State = dict[str, Any]
"""Nested state: DTensors, tensors and plain values in dicts and lists."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and who writes it.

    Attributes:
        rank: global rank.
        offsets: of its first element in the tensor, in each dimension.
        sizes: of the box.
    """

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor of the state.

    Attributes:
        path: in the state.
        dtype: such as ``"float32"``.
        shape: of the whole tensor.
        chunks: that make up all of it.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who writes what. What is no tensor, and tensors that are not sharded, are written by rank 0.

    Attributes:
        world_size: number of ranks.
        tensors: in the order of the state.
        values: paths of everything else.
    """

    world_size: int
    tensors: tuple[TensorItem, ...]
    values: tuple[Path, ...]

    def to_json(self) -> str:
        """As plain JSON, the same on all ranks whose state is sharded alike."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Of all of it, 32 hexadecimal digits."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def lines(self) -> list[str]:
        """The items, one line each, for people."""
        tensors = [f"{_name(t.path)} ({t.dtype}, {t.shape}, {len(t.chunks)} shards)" for t in self.tensors]
        return [*tensors, *map(_name, self.values)]


class Planner:
    """Plans one state after another; a plan is made anew only where the state is put together in another way.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._form: list[Any] = []
        self._plan: Plan | None = None
        self._boxes: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def plan(self, state: State) -> tuple[Plan, dict[Path, Any]]:
        """Plan a state.

        Args:
            state: of this rank, nested.

        Returns:
            the plan, which is the same object as long as nothing has changed, and all items of the state by their
            paths.

        Raises:
            NotSerialisable: if a tensor is sharded in a way that is not known here.
        """
        flat, paths = flatten_state_dict(state)
        items = {paths[name]: value for name, value in flat.items()}
        form = [(path, _form_of(value)) for path, value in items.items()]
        if self._plan is None or form != self._form:
            self._plan, self._form = self._make(items), form
        return self._plan, items

    def _make(self, items: Mapping[Path, Any]) -> Plan:
        tensors: list[TensorItem] = []
        written = [0] * self._world_size
        for path, value in items.items():
            if not isinstance(value, torch.Tensor):
                continue
            shape = tuple(value.shape)
            chunks = []
            for ranks, offsets, sizes in self._boxes_of(path, value):
                rank = min(ranks, key=lambda rank: (written[rank], rank))
                written[rank] += prod(sizes) * value.element_size()
                chunks.append(Chunk(rank, offsets, sizes))
            tensors.append(TensorItem(path, _dtype_name(value.dtype), shape, tuple(chunks)))
        values = tuple(path for path, value in items.items() if not isinstance(value, torch.Tensor))
        return Plan(self._world_size, tuple(tensors), values)

    def _boxes_of(self, path: Path, tensor: torch.Tensor) -> list[tuple[list[int], tuple[int, ...], tuple[int, ...]]]:
        """The boxes of a tensor, each with the ranks that have it."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise NotSerialisable(
                    f"{_name(path)} is a {type(tensor).__name__}: sharded snapshots take plain tensors"
                    " and the DTensors of FSDP2 and tensor parallelism"
                )
            return [([0], (0,) * len(shape), shape)]
        found: dict[tuple[int, ...], tuple[list[int], tuple[int, ...]]] = {}
        for rank, coordinate in _coordinates(path, tensor):
            key = (tensor.shape, tensor.placements, tensor.device_mesh, *coordinate)
            if key not in self._boxes:
                self._boxes[key] = _box(tensor, coordinate)
            sizes, offsets = self._boxes[key]
            if prod(sizes) or not found:
                found.setdefault(offsets, ([], sizes))[0].append(rank)
        if len(found) > 1:  # the first rank's may be empty
            found = {offsets: box for offsets, box in found.items() if prod(box[1])}
        return [(ranks, offsets, sizes) for offsets, (ranks, sizes) in found.items()]


def _form_of(value: Any) -> Any:
    """What has to be the same for a plan to stay as it is."""
    if isinstance(value, DTensor):
        return (value.dtype, value.shape, value.placements, value.device_mesh)
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _coordinates(path: Path, tensor: DTensor) -> Iterator[tuple[int, list[int]]]:
    """Yield each rank of the run that has some of a tensor, with its place in the tensor's mesh.

    The mesh may be a part of one of more dimensions: along the others, ranks have the same.
    """
    mesh = tensor.device_mesh
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else _root_of(mesh)
    dims = list(range(mesh.ndim))
    if root is not mesh:
        names = root.mesh_dim_names or ()
        if not all(name in names for name in mesh.mesh_dim_names or (None,)):
            raise NotSerialisable(
                f"{_name(path)} is sharded over the mesh {mesh}, whose dimensions are none of those of"
                f" {root}: sharded snapshots do not know which rank has what of it. Shard it over a dimension of the"
                " mesh that Lightning made"
            )
        dims = [names.index(name) for name in mesh.mesh_dim_names or ()]
    for place in torch.nonzero(torch.ones_like(root.mesh)).tolist():
        yield int(root.mesh[tuple(place)]), [place[dim] for dim in dims]


def _root_of(mesh: Any) -> Any:
    """As torch up to 2.7 names it."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_root_mesh(mesh)


def _box(tensor: DTensor, coordinate: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and place of what a rank has of a tensor."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes, offsets = _compute_local_shape_and_global_offset(
        tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, tensor.placements
    )
    return tuple(map(int, sizes)), tuple(map(int, offsets))


def _name(path: Path) -> str:
    return ".".join(map(str, path))
