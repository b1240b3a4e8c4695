"""The private names of torch that tell how a DTensor is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def spec_of(value: Any) -> Any:
    """What says all of how a ``DTensor`` is sharded: another object if that changes. ``None`` of what has no such."""
    return getattr(value, "_spec", None) if isinstance(value, DTensor) else None


def root_of(mesh: Any) -> Any:
    """The mesh that another one is a part of, or itself."""
    return mesh._get_root_mesh()


def box_of(tensor: DTensor, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and place of what a rank has of a tensor, by its place in the tensor's mesh.

    It is counted as shards are cut: over the dimensions of the mesh from left to right, but FSDP2 cuts what tensor
    parallelism has left (*strided* shards) afterwards, from right to left. (Torch itself, up to 2.13, takes one rank's
    for another one's where these are not even, such as 7 rows over 3 x 2.)
    """
    sizes, offsets = list(tensor.shape), [0] * tensor.ndim
    placements: tuple[Any, ...] = tensor.placements
    ways = list(zip(placements, tensor.device_mesh.shape, coordinate, strict=True))
    strided = [way for way in ways if isinstance(way[0], _StridedShard)]
    plain = [way for way in ways if isinstance(way[0], Shard) and not isinstance(way[0], _StridedShard)]
    for placement, count, number in (*plain, *reversed(strided)):
        whole = sizes[placement.dim]
        each = -(-whole // count)
        start = min(whole, each * number)
        offsets[placement.dim] += start
        sizes[placement.dim] = min(each, whole - start)
    return tuple(sizes), tuple(offsets)
