"""Ranks in one process: one that writes snapshots, a group of threads, and sharded states as they are on each rank."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.layouts import (
    CheckpointLayouter,
    Laid,
    RankLayouter,
    ShardedCheckpoint,
    ShardedCheckpointLayouter,
)
from lightning_spot.capture.tensors import by_storage
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.run.attempts import begin_attempt
from lightning_spot.run.identity import new_id
from lightning_spot.run.location import Location, RingSettings
from lightning_spot.run.survey import survey
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.runs import RunInfo
from lightning_spot.sharded.dtensors import box_of
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import JoinedImage, assemble, sections
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep
from tests.support.filled import fill
from tests.support.server import named_run

Shape = tuple[int, ...]
RING = RingSettings(slots=2, memory_bytes=2**20, server_idle_timeout_s=9.0, keep=Keep(newest=1), strict=False)


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


def manifest_of(rank: int = 0, writers: int = 1, step: int = 1) -> Manifest:
    """That of a snapshot, or of one rank's shard of it, before it is laid out."""
    name = snapshot_name(step, 1)
    shard = ShardOf(rank, writers) if writers > 1 else None
    name = shard_name(name, rank) if shard is not None else name
    return Manifest(run="run", name=name, step=step, attempt=1, nbytes=0, world_size=writers, shard=shard)


def begun(
    location: Location,
    host: Host,
    ring: RingSettings,
    layouter: Callable[[RunInfo], RankLayouter] = lambda _info: CheckpointLayouter(),
) -> Attempt:
    """An attempt, as rank 0 has it."""
    info, is_made = begin_attempt(survey(location), host, ring)
    attempt = Attempt(location, info, host, ring, layouter(info), lineage=new_id())
    attempt.hold_claim(is_made=is_made)
    return attempt


def sealed(laid: Laid) -> tuple[Manifest, bytearray]:
    """What a rank has written, in a slot with old bytes."""
    image = fill(laid.layout)
    return laid.manifest.sealed(memoryview(image), 2), image


def joined(shards: Sequence[tuple[Manifest, bytearray]]) -> tuple[bytearray, Manifest]:
    """A snapshot of its shards, or the one that there is."""
    if shards[0][0].shard is None:
        return shards[0][1], shards[0][0]
    manifests = [manifest for manifest, _ in shards]
    image = JoinedImage(sections(manifests), [memoryview(data) for _, data in shards])
    whole = assemble(manifests)
    data = bytearray(image[0 : len(image)])
    whole.verify(memoryview(data), "here")
    return data, whole


def snapshot(state: Any, mesh_shape: Shape) -> tuple[bytearray, Manifest]:
    """The image of a state of which ranks have each written a shard, one after the other."""
    world_size = int(torch.Size(mesh_shape).numel())
    shards = []
    for rank in range(world_size):
        with as_rank(rank, mesh_shape) as mesh:
            content = ShardedCheckpoint(on_rank(state, mesh), {"mine": rank}, {"epoch": 3, "rank": rank})
            layouter = ShardedCheckpointLayouter(rank, world_size)
            shards.append(sealed(layouter.lay_out(content, manifest_of(rank, world_size), {})))
    return joined(shards)


def at_rest(image: bytearray, manifest: Manifest, folder: Path) -> None:
    """Write the files of an image."""
    for file in manifest.files:
        (folder / file.name).write_bytes(image[file.offset : file.stop])


class Desk:
    """A writer over a ring in this process, and its durable tier."""

    def __init__(self, root: Path, memory_bytes: int = 2**28, host: type[InProcessHost] = InProcessHost) -> None:
        self.store = LocalStore(root / "run")
        self.host = host(slots=3, memory_bytes=memory_bytes, open_store=open_store)
        self.host.open_run(named_run("run", self.store.url, keep=Keep(newest=100)))
        self.writer = SnapshotWriter(self.host, lambda: self.host)
        self.weights: list[Any] = [torch.randn(300, 100) for _ in range(5)]
        self.buffer = torch.zeros(10)

    def checkpoint(self, note: str = "", **more: Any) -> dict[str, Any]:
        return {"note": note, "state": {"w": self.weights, "b": self.buffer}, **more}

    def owned(self) -> list[torch.Tensor]:
        """The tensors that the optimizer has."""
        return self.weights

    def begin(self, step: int, checkpoint: dict[str, Any], *, complete: bool = False) -> Any:
        owned = by_storage(self.owned())
        name = snapshot_name(step, 1, complete=complete)
        manifest = Manifest(run="run", name=name, step=step, attempt=1, nbytes=0, complete=complete)
        return self.writer.begin(checkpoint, manifest, owned=owned, wait_s=30.0)

    def saved(self, step: int, *, complete: bool = False) -> dict[str, Any]:
        assert self.host.flush(30) == []
        name = snapshot_name(step, 1, complete=complete)
        return torch.load(self.store.root / name / "model.ckpt", weights_only=True)

    def close(self) -> None:
        self.writer.close()
        self.host.leave(complete=True)


def same(saved: dict[str, Any], weights: list[torch.Tensor], buffer: torch.Tensor) -> bool:
    state = saved["state"]
    return torch.equal(state["b"], buffer) and all(map(torch.equal, state["w"], weights))


class Group:
    """A process group of threads, which counts the bytes that it moves."""

    def __init__(self, size: int) -> None:
        self.size, self.moved_bytes = size, 0
        self._barrier = threading.Barrier(size)
        self._said: Any = None

    def broadcast(self, rank: int, said: Any, src: int = 0) -> Any:
        self._barrier.wait(120)
        if rank == src:
            self._said = pickle.dumps(said)
            self.moved_bytes += len(self._said)
        self._barrier.wait(120)
        return pickle.loads(self._said)

    def abort(self) -> None:
        """Nobody is waited for any more: a rank has failed."""
        self._barrier.abort()


class Rank:
    """A trainer as far as an agreement sees it."""

    def __init__(self, group: Group, rank: int) -> None:
        self.world_size, self.global_rank, self.strategy = group.size, rank, self
        self._group = group

    def broadcast(self, said: Any, src: int = 0) -> Any:
        return self._group.broadcast(self.global_rank, said, src)


class OneRank(SimpleNamespace):
    """A trainer of one rank, as far as it is asked."""


def rank_of_this_thread() -> int:
    return int(threading.current_thread().name.removeprefix("rank-"))
