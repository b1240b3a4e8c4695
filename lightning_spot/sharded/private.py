"""The private names of torch that tell how a DTensor is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

SPEC = "_spec"
"""Attribute of a ``DTensor``, see :func:`spec_of`."""


def spec_of(value: Any) -> Any:
    """What says all of how a ``DTensor`` is sharded: another object if that changes. ``None`` of what has no such."""
    return getattr(value, SPEC, None) if isinstance(value, DTensor) else None


def root_of(mesh: Any) -> Any:
    """The mesh that another one is a part of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # as torch up to 2.7 names it

    return _mesh_resources.get_root_mesh(mesh)


def box_of(tensor: DTensor, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and place of what a rank has of a tensor, by its place in the tensor's mesh."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes, offsets = _compute_local_shape_and_global_offset(
        tuple(tensor.shape), tuple(tensor.device_mesh.shape), list(coordinate), tensor.placements
    )
    return tuple(map(int, sizes)), tuple(map(int, offsets))
