"""Reads a sharded snapshot into a training state, on any number of ranks, from the bytes of its image.

``torch.distributed.checkpoint`` cuts what each rank needs; no collective, and nothing in the snapshot runs code.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import get_element, set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from lightning_spot.config import format_names
from lightning_spot.errors import (
    CorruptSnapshotError,
    ModelChangedError,
    NotSerializableError,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.image.safe_load import kind_of, placeholders_in, safe_load
from lightning_spot.image.shards import Image
from lightning_spot.image.tensor_index import Path as ItemPath
from lightning_spot.image.tensor_index import Shard, ShardedTensor, Shards, archived
from lightning_spot.sharded.dtensors import box_of, is_strided
from lightning_spot.sharded.metadata import REST_FILE, dtype_of, metadata_of, name_of
from lightning_spot.sharded.plan import EXTRA, State, is_extra

_MODEL, _OPTIMIZER = "state_dict", "optimizer_"
_OWN = "lightning_spot"  # exact state, which is that of the ranks there were


class ImageReader(StorageReader):
    """Reads from the image of a sharded snapshot, as ``torch.distributed.checkpoint`` asks.

    Args:
        image: of the snapshot, checked.
        manifest: of the snapshot.

    Attributes:
        name: of the snapshot.
        shards: what the snapshot holds.
        read_bytes: of tensors that were copied out of it.

    Raises:
        CorruptSnapshotError: if it is no sharded snapshot.
    """

    def __init__(self, image: Image, manifest: Manifest) -> None:
        self.shards = Shards.read(image, manifest)
        self.read_bytes = 0
        self.name = manifest.name
        self._image, self._manifest = image, manifest
        self._tensors = {tensor.path: tensor for tensor in self.shards.tensors}
        self._dtypes = {name_of(tensor.path): dtype_of(tensor) for tensor in self.shards.tensors}
        self._boxes: dict[MetadataIndex, Shard] = {
            MetadataIndex(name_of(tensor.path), shard.offsets): shard
            for tensor in self.shards.tensors
            for shard in tensor.shards
        }
        self._values = {name_of(value.path): value.at for value in self.shards.values}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: there is one snapshot."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the snapshot holds, in torch's terms."""
        return metadata_of(self.shards)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the places are known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it could be one of ours: an image has no path."""
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for to where it belongs."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                at = self._values[item.storage_index.fqn]
                planner.load_bytes(item, io.BytesIO(archived(self._image, self._manifest, at)))
            else:
                self._copy(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensor(self, path: ItemPath) -> ShardedTensor | None:
        """The tensor of that path; ``None`` if it is no tensor, or not there."""
        return self._tensors.get(path)

    def fill(self, path: ItemPath, parts: Iterable[tuple[tuple[int, ...], torch.Tensor]]) -> None:
        """Give what this rank has of a tensor its values. The tensor is in the snapshot, and of the same shape.

        Args:
            path: of the tensor.
            parts: boxes of it, each with the place of its first element in the tensor.
        """
        saved = self._tensors[path]
        dtype = dtype_of(saved)
        for offsets, target in parts:
            for shard in saved.shards:
                if (found := _overlap(offsets, target.shape, shard)) is None:
                    continue
                source = self._elements(shard, dtype)
                there = target
                for dimension, (start, stop) in enumerate(found):
                    source = source.narrow(dimension, start - shard.offsets[dimension], stop - start)
                    there = there.narrow(dimension, start - offsets[dimension], stop - start)
                there.copy_(source)
                self.read_bytes += source.numel() * source.element_size()

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> None:
        index = item.storage_index
        source = self._elements(self._boxes[MetadataIndex(index.fqn, index.offset)], self._dtypes[index.fqn])
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != source.shape:
            raise CorruptSnapshotError(
                f"{index.fqn}: {tuple(source.shape)} elements for {tuple(target.shape)}", where=index.fqn
            )
        target.copy_(source)
        self.read_bytes += source.numel() * source.element_size()
        planner.commit_tensor(item, target)

    def _elements(self, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        """A box of a tensor, in the memory that the image gave: it is only read."""
        if not shard.numel:
            return torch.empty(shard.sizes, dtype=dtype)
        data = archived(self._image, self._manifest, shard.at)[shard.data :]
        nbytes = shard.numel * dtype.itemsize
        if len(data) < nbytes:
            raise CorruptSnapshotError(f"a shard has {len(data)} of {nbytes} bytes", where=self._manifest.name)
        if not data.readonly:  # it may be there for this tensor only, which keeps it
            return torch.frombuffer(data, dtype=dtype, count=shard.numel).view(shard.sizes)
        # By its address, since torch warns of memory that cannot be written to. The tensor keeps what holds it.
        elements = numpy.frombuffer(data, numpy.uint8)
        memory: Any = (ctypes.c_char * nbytes).from_address(elements.ctypes.data)
        memory.kept = elements
        return torch.frombuffer(memory, dtype=dtype).view(shard.sizes)


def load(state: State, reader: ImageReader, whole: ItemPath | None = None) -> None:
    """Give the tensors of a state their values, in place, and replace what is no tensor.

    Args:
        state: nested; every item of it must be in the snapshot.
        reader: of the snapshot.
        whole: what in the snapshot begins with this path must be in the state, but for extra states of modules.

    Raises:
        ModelChangedError: if something is not there, or of another shape.
        CorruptSnapshotError: if a value cannot be read.
    """
    flat, paths = flatten_state_dict(state)
    _check(flat, reader, whole)
    rest: State = {}
    for_torch: list[str] = []
    for name, value in flat.items():
        if isinstance(value, DTensor) and any(map(is_strided, value.placements)):
            reader.fill(paths[name], _part_of(name, value))
        else:
            set_element(rest, paths[name], value)
            for_torch.append(name)
    _load_rest(rest, reader)
    for name in for_torch:
        if not isinstance(value := get_element(rest, paths[name]), torch.Tensor):
            set_element(state, paths[name], value)


def _part_of(name: str, tensor: DTensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """What this rank has of a tensor, and where that lies in it; nothing if it is none of those that have some."""
    places = torch.nonzero(tensor.device_mesh.mesh == torch.distributed.get_rank()).tolist()
    if not places:
        return
    local = tensor.to_local().detach()
    sizes, offsets = box_of(tensor, places[0])
    if tuple(local.shape) != sizes:
        raise NotSerializableError(
            f"{name} is sharded in a way that is not known here ({tensor.placements}): this rank has"
            f" {tuple(local.shape)} of it, and not {sizes}"
        )
    yield offsets, local


def _load_rest(state: State, reader: ImageReader) -> None:
    """What is cut as torch cuts it, as torch does it."""
    if not state:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is as it should be
        try:
            dcp_load(state, storage_reader=reader, planner=_SafePlanner(), no_dist=True)
        except CheckpointException as error:
            problem = next(iter(error.failures.values()))[0]
            raise (
                problem if isinstance(problem, SpotError) else CorruptSnapshotError(str(problem), where=reader.name)
            ) from None


def _check(flat: State, reader: ImageReader, whole: ItemPath | None) -> None:
    """Refuse the state of another model before half of it is loaded."""
    saved = {name_of(tensor.path): tensor.shape for tensor in reader.shards.tensors}
    names = saved.keys() | {name_of(value.path) for value in reader.shards.values}
    missing = sorted(flat.keys() - names)
    unexpected = sorted(
        name_of(path)
        for path in reader.shards.paths
        if whole and path[: len(whole)] == whole and name_of(path) not in flat and not is_extra(str(path[len(whole)]))
    )
    reshaped = [
        f"{name} {saved[name]}→{tuple(value.shape)}"
        for name, value in flat.items()
        if isinstance(value, torch.Tensor) and name in saved and tuple(value.shape) != saved[name]
    ]
    if missing or unexpected or reshaped:
        raise changed(reader.name, missing=missing, unexpected=unexpected, reshaped=reshaped)


def changed(
    snapshot: str,
    *,
    missing: Sequence[str],
    unexpected: Sequence[str],
    reshaped: Sequence[str] = (),
    way: str = "",
) -> ModelChangedError:
    """The error that the state of a snapshot is that of another model.

    Args:
        snapshot: its name.
        missing: what only the model has.
        unexpected: what only the snapshot has.
        reshaped: what both have, in another shape.
        way: to load it all the same, with a comma behind it, if there is one.
    """
    parts = [("new in the model", missing), ("gone from the model", unexpected), ("changed shape", reshaped)]
    listed = "; ".join(f"{what}: {format_names(names)}" for what, names in parts if names)
    return ModelChangedError(
        f"the model has changed since snapshot {snapshot}: {listed}. Use the model it was taken of, {way}or start"
        " afresh with resume=False. If it is of another training (the n-th fit of a process at one dirpath is the run"
        " fit-n), give each a dirpath of its own. Nothing was loaded, and the snapshot is left as it is",
        missing=[*missing],
        unexpected=[*unexpected],
        reshaped=[*reshaped],
    )


def _overlap(offsets: Sequence[int], sizes: Sequence[int], shard: Shard) -> list[tuple[int, int]] | None:
    """What a box and a shard have in common, first and last place in each dimension; ``None`` for nothing."""
    found = [
        (max(one, other), min(one + size, other + length))
        for one, size, other, length in zip(offsets, sizes, shard.offsets, shard.sizes, strict=True)
    ]
    return found if all(start < stop for start, stop in found) else None


def load_all(reader: ImageReader) -> State:
    """The whole state of a snapshot, in the memory of the CPU."""
    state: State = {}
    for tensor in reader.shards.tensors:
        set_element(state, tensor.path, torch.empty(tensor.shape, dtype=dtype_of(tensor)))
    for value in reader.shards.values:
        set_element(state, value.path, None)
    load(state, reader)
    return state


class _SafePlanner(DefaultLoadPlanner):
    """Torch's planner, that unpickles nothing but plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], load_value(value, name))


def load_value(data: io.BytesIO, name: str) -> Any:
    """Read the archive of a value; nothing in it runs code.

    Raises:
        CorruptSnapshotError: if it holds something else than plain values and tensors.
    """
    try:
        value = safe_load(data)
    except NotSerializableError as error:
        raise CorruptSnapshotError(f"{name}: {error}", where=name) from error
    for _, placeholder in placeholders_in(value):
        raise CorruptSnapshotError(
            f"{name} holds an object that is not loaded, a {kind_of(placeholder)}; to load the snapshot's directory"
            " with torch.distributed.checkpoint trusts it",
            where=name,
        )
    return value


def read_folder(folder: Path) -> tuple[memoryview, Manifest]:
    """Read a sharded snapshot from its directory and check every byte of it.

    Raises:
        SnapshotNotFoundError: if it is not there, or in part.
        CorruptSnapshotError: if it is damaged, or is not sharded.
    """
    try:
        manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes())
        image = memoryview(bytearray(manifest.nbytes))
        for span in manifest.files:
            with open(folder / span.name, "rb") as file:
                if file.readinto(image[span.offset : span.stop]) != span.nbytes:
                    raise CorruptSnapshotError(f"{folder / span.name} is cut short", where=str(folder))
    except OSError as error:
        raise SnapshotNotFoundError(f"{folder} cannot be read: {error}") from error
    if not manifest.files:
        raise CorruptSnapshotError(
            f"{folder} is no sharded snapshot: its checkpoint is one file already", where=str(folder)
        )
    manifest.verify(image, str(folder))
    return image.toreadonly(), manifest


def consolidated(image: memoryview, manifest: Manifest) -> dict[str, Any]:
    """The plain checkpoint of a sharded snapshot.

    Args:
        image: of the snapshot, checked.
        manifest: of the snapshot.

    Raises:
        CorruptSnapshotError: if it cannot be read.
        NotSerializableError: if it holds objects that torch does not load safely.
    """
    state = load_all(ImageReader(image, manifest))
    checkpoint = rest_of(image, manifest)
    extra = checkpoint.pop(_OWN, {}).get(EXTRA, {})
    model = state.pop(_MODEL, {})
    checkpoint[_MODEL] = {name: value for name, value in model.items() if not is_extra(name)} | extra
    optimizers = sorted(
        (key for key in state if key.startswith(_OPTIMIZER)), key=lambda key: int(key.rpartition("_")[2])
    )
    checkpoint["optimizer_states"] = [_by_number(state[key]) for key in optimizers]
    return checkpoint


def rest_of(image: memoryview, manifest: Manifest) -> dict[str, Any]:
    """What of the checkpoint is neither the model's state nor an optimizer's."""
    span = manifest.span_of(REST_FILE)
    rest: dict[str, Any] = safe_load(io.BytesIO(image[span.offset : span.stop]))
    for where, placeholder in placeholders_in(rest):
        raise NotSerializableError(
            f"{where} in {REST_FILE} of {manifest.name} is a {kind_of(placeholder)}, which is not loaded. Keep it out"
            " of hyperparameters and on_save_checkpoint, or load the directory with your own code"
        )
    return rest


def _by_number(state: State) -> State:
    """The state of an optimizer as ``torch.optim`` has it: parameters by their number instead of by their name."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state.get("param_groups", []):
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    values: Mapping[str, Any] = state.get("state", {})
    return {"state": {numbers[name]: value for name, value in values.items()}, "param_groups": groups}


def write_plain(folder: Path, target: Path) -> None:
    """Make the plain file of a sharded snapshot: whole, or not there.

    Raises:
        SpotError: if that is not possible; nothing is left behind.
    """
    checkpoint = consolidated(*read_folder(folder))
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    with open(temporary, "xb") as file:  # others may read it, as far as the user's umask lets them
        try:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink()
            raise


def main() -> int:
    """The command above."""
    folder, target = map(Path, sys.argv[1:])
    try:
        write_plain(folder, target)
    except (SpotError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
