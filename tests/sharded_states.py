"""Sharded states as they are on each rank of a run, in one process, and their snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_spot.image.manifest import Manifest
from lightning_spot.image.sealing import Sealing
from lightning_spot.sharded.dtensors import box_of
from lightning_spot.sharded.file_plan import ShardedImage, ShardedLayouter, state_archive

Shape = tuple[int, ...]


@contextlib.contextmanager
def as_rank(rank: int, mesh_shape: Shape) -> Iterator[DeviceMesh]:
    """Be a rank of a run whose collectives do nothing."""
    world_size = int(torch.Size(mesh_shape).numel())
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        names = ("data", "tensor")[: len(mesh_shape)]
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Sharded:
    """A tensor and how it is sharded: over the first or all dimensions of the mesh."""

    whole: torch.Tensor
    placements: tuple[Placement, ...]

    def on(self, mesh: DeviceMesh, *, empty: bool = False) -> DTensor:
        """What this rank has of it."""
        mesh = mesh if len(self.placements) == mesh.ndim else mesh["data"]
        placements = self.placements[: mesh.ndim]
        shape, stride = self.whole.shape, self.whole.stride()
        on_meta = DTensor.from_local(
            torch.empty(0, device="meta"), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        sizes, offsets = box_of(on_meta, coordinate)
        local = self.whole
        for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            local = local.narrow(dimension, min(offset, local.shape[dimension]), size)
        local = torch.zeros(sizes, dtype=local.dtype) if empty else local.clone().contiguous()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def rows(local: torch.Tensor, world_size: int) -> DTensor:
    """A tensor of which each rank has as many rows, without a process group.

    Args:
        local: those of this rank.
        world_size: how many ranks there are.
    """
    mesh = DeviceMesh("cpu", torch.arange(world_size), _init_backend=False, _rank=0)
    shape = torch.Size((local.shape[0] * world_size, *local.shape[1:]))
    meta = TensorMeta(shape, tuple(torch.empty(shape, device="meta").stride()), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)


def on_rank(state: Any, mesh: DeviceMesh, *, empty: bool = False) -> Any:
    """A state as one rank has it; with other values, if it is to be loaded."""
    if isinstance(state, dict):
        return {key: on_rank(value, mesh, empty=empty) for key, value in state.items()}
    if isinstance(state, list):
        return [on_rank(value, mesh, empty=empty) for value in state]
    if isinstance(state, Sharded):
        return state.on(mesh, empty=empty)
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state) if empty else state
    return "another" if empty else state


def whole(state: Any) -> Any:
    """A state without shards."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.whole if isinstance(state, Sharded) else state


def write(layouter: ShardedLayouter, state: Any, mesh: DeviceMesh, own: Any, sizes: Sequence[int]) -> ShardedImage:
    """What a rank writes."""
    rank = dist.get_rank()
    rest = {"epoch": 3, "rank": rank}
    return layouter.lay_out(on_rank(state, mesh), state_archive(own, sizes[rank]), sizes, rest)


def fill(image: bytearray, written: ShardedImage) -> None:
    """Copy what a rank writes into the image."""
    for offset, data in written.layout.frame:
        image[offset : offset + len(data)] = data
    for piece in written.layout.pieces:
        source = torch.empty(0, dtype=torch.uint8).set_(piece.storage)[piece.start :][: piece.nbytes]
        image[piece.offset : piece.offset + piece.nbytes] = source.numpy().tobytes()


def snapshot(state: Any, mesh_shape: Shape, garbage: int = 0xA5) -> tuple[bytearray, Manifest]:
    """The sealed image of a state that ranks have written, one after the other, into a slot with old bytes."""
    world_size = int(torch.Size(mesh_shape).numel())
    sizes = [4096 + 64 * rank for rank in range(world_size)]
    image, files, digests = bytearray(), (), set()
    for rank in range(world_size):
        with as_rank(rank, mesh_shape) as mesh:
            written = write(ShardedLayouter(rank, world_size), state, mesh, {"mine": rank}, sizes)
        digests.add(written.digest)
        if rank == 0:
            image, files = bytearray([garbage]) * written.layout.nbytes, written.files
        fill(image, written)
    assert len(digests) == 1
    manifest = Manifest(
        run="run", name="step-000000001-attempt-0001", step=1, attempt=1, nbytes=len(image), files=files
    )
    return image, Sealing(manifest, memoryview(image)).run(2)


def at_rest(image: bytearray, manifest: Manifest, folder: Path) -> None:
    """Write the files of an image."""
    for file in manifest.files:
        (folder / file.name).write_bytes(image[file.offset : file.stop])
