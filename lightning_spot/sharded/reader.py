"""Reads a sharded snapshot into a training state, on any number of ranks, from the bytes of its image.

Each rank takes what it has of a tensor out of the boxes that were saved: no collective, and nothing in the snapshot
runs code.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from lightning_spot.config import format_names
from lightning_spot.errors import (
    CorruptSnapshotError,
    ModelChangedError,
    NotSerializableError,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.sharded.dtensors import box_of
from lightning_spot.sharded.metadata import REST_FILE, dtype_of, name_of
from lightning_spot.sharded.plan import EXTRA, State, is_extra
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest
from lightning_spot.snapshot.safe_load import kind_of, placeholders_in, safe_load
from lightning_spot.snapshot.shards import Image
from lightning_spot.snapshot.tensor_index import Path as ItemPath
from lightning_spot.snapshot.tensor_index import Shard, ShardedTensor, Shards, archived
from lightning_spot.store.local import LocalStore

_MODEL, _OPTIMIZER = "state_dict", "optimizer_"
_OWN = "lightning_spot"  # exact state, which is that of the ranks there were
_NO_SHAPE = ("no tensor",)


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
"""Names of the kinds of numbers in safetensors (https://github.com/huggingface/safetensors#format)."""
_TEXTS = "__metadata__"  # in its header, beside the names of tensors
_SMALL_BYTES = 2**30  # of an export: a mask that is expanded may be more than a small model


class ImageReader:
    """Reads tensors and values out of the image of a sharded snapshot.

    Args:
        image: of the snapshot, checked.
        manifest: of the snapshot.

    Attributes:
        name: of the snapshot.
        shards: what the snapshot holds.
        tensors: of these, the tensors by name.
        values: everything else by name.

    Raises:
        CorruptSnapshotError: if it is no sharded snapshot, or tensors are larger than what holds them.
        NotSerializableError: if this version of torch does not know a dtype of it.
    """

    def __init__(self, image: Image, manifest: Manifest) -> None:
        self.shards = Shards.read(image, manifest)
        self.name = manifest.name
        self.tensors = {name_of(tensor.path): tensor for tensor in self.shards.tensors}
        self.values = {name_of(path): at for path, at in self.shards.values}
        self._dtypes = {name: dtype_of(tensor) for name, tensor in self.tensors.items()}
        self._image, self._manifest = image, manifest
        for name, tensor in self.tensors.items():  # first: there is memory only for what the snapshot holds
            for shard in tensor.shards:
                there, nbytes = shard.at.nbytes - shard.data, shard.numel * self._dtypes[name].itemsize
                if there < nbytes:
                    raise CorruptSnapshotError(f"a shard of {name} has {there} of {nbytes} bytes", where=manifest.name)

    def value(self, name: str) -> Any:
        """What was saved that is no tensor; see :func:`load_value`."""
        return load_value(io.BytesIO(archived(self._image, self._manifest, self.values[name])), name)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Give a tensor its values, or what this rank has of it. It is in the snapshot, and of the same shape.

        Args:
            name: of the tensor.
            tensor: that gets them.
        """
        part = _part_of(name, tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.ndim, tensor.detach())
        if part is None:
            return
        offsets, target = part
        for shard in self.tensors[name].shards:
            if (found := _overlap(offsets, target.shape, shard)) is None:
                continue
            source = self._elements(shard, self._dtypes[name])
            target[_slices(found, offsets)].copy_(source[_slices(found, shard.offsets)])

    def _elements(self, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        """A box of a tensor, in the memory that the image gave: it is only read."""
        if not shard.numel:
            return torch.empty(shard.sizes, dtype=dtype)
        data = archived(self._image, self._manifest, shard.at)[shard.data :]
        if not data.readonly:  # it may be there for this tensor only, which keeps it
            return torch.frombuffer(data, dtype=dtype, count=shard.numel).view(shard.sizes)
        # By its address, since torch warns of memory that cannot be written to. The tensor keeps what holds it.
        elements = numpy.frombuffer(data, numpy.uint8)
        memory: Any = (ctypes.c_char * (shard.numel * dtype.itemsize)).from_address(elements.ctypes.data)
        memory.kept = elements
        return torch.frombuffer(memory, dtype=dtype).view(shard.sizes)


def load(state: State, reader: ImageReader, key: str) -> None:
    """Give the tensors of a state dict their values, in place.

    Args:
        state: by name.
        reader: of the snapshot.
        key: under which the snapshot has the same, and besides extra states of modules only.

    Raises:
        ModelChangedError: if something is not there, or of another shape; then nothing is loaded.
    """
    saved: dict[ItemPath, Any] = {tensor.path: tensor.shape for tensor in reader.shards.tensors}
    names = {str(name) for path in reader.shards.paths if path[0] == key for name in path[1:2]}
    missing = sorted(f"{key}.{name}" for name in state.keys() - names)
    unexpected = sorted(f"{key}.{name}" for name in names - state.keys() if not is_extra(name))
    reshaped = [
        f"{key}.{name} {there}→{shape}"
        for name, value in state.items()
        if name in names
        and (there := saved.get((key, name), _NO_SHAPE)) != (shape := tuple(getattr(value, "shape", _NO_SHAPE)))
    ]
    if missing or unexpected or reshaped:
        raise changed(reader.name, missing=missing, unexpected=unexpected, reshaped=reshaped)
    for name, value in state.items():
        if (key, name) in saved:
            reader.fill(f"{key}.{name}", value)


def _part_of(name: str, tensor: DTensor) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """What this rank has of a tensor, behind its place in it; ``None`` if it is none of those that have some."""
    places = torch.nonzero(tensor.device_mesh.mesh == torch.distributed.get_rank()).tolist()
    if not places:
        return None
    local = tensor.to_local().detach()
    sizes, offsets = box_of(tensor, places[0])
    if tuple(local.shape) != sizes:
        raise NotSerializableError(
            f"{name} is sharded in a way that is not known here ({tensor.placements}): this rank has"
            f" {tuple(local.shape)} of it, and not {sizes}"
        )
    return offsets, local


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


def _slices(found: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Places in a tensor, as places in what begins at these offsets in it."""
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(found, offsets, strict=True))


def on_cpu(tensor: ShardedTensor) -> torch.Tensor:
    """What a whole tensor is read into, in the memory of the CPU."""
    return torch.empty(tensor.shape, dtype=dtype_of(tensor))


def load_all(reader: ImageReader, path: ItemPath = (), room: Callable[[ShardedTensor], torch.Tensor] = on_cpu) -> Any:
    """All that was saved below a path, put together as it was; nothing, if that was all.

    Args:
        reader: of the snapshot.
        path: where it was; by default the whole state.
        room: makes what a tensor is read into.
    """
    state: State = {}
    for tensor in reader.shards.tensors:
        if tensor.path[: len(path)] == path:
            made = room(tensor)
            reader.fill(name_of(tensor.path), made)
            set_element(state, tensor.path, made)
    for place, _ in reader.shards.values:
        if place[: len(path)] == path:
            set_element(state, place, reader.value(name_of(place)))
    found: Any = state
    for key in path:
        found = found.get(key, {})
    return found


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
    except OSError as error:
        raise SnapshotNotFoundError(f"{folder} cannot be read: {error}") from error
    if not manifest.files:
        raise CorruptSnapshotError(
            f"{folder} is no sharded snapshot: its checkpoint is one file already", where=str(folder)
        )
    place, image = folder.absolute(), memoryview(bytearray(manifest.nbytes))
    LocalStore(place.parent).fetch(replace(manifest, name=place.name), image)  # it may have been renamed
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
    with _whole(target) as file:
        torch.save(checkpoint, file)


# -- safetensors ------------------------------------------------------------------------------------------------------


def weights_of(snapshot: Path) -> dict[str, Any]:
    """The model's state in a checkpoint file, or in a directory of a sharded snapshot.

    Raises:
        SpotError: if it cannot be read.
    """
    if snapshot.is_dir():
        checkpoint = consolidated(*read_folder(snapshot))
    else:
        with open(snapshot, "rb") as file:
            checkpoint = safe_load(file)
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict):
        raise CorruptSnapshotError("it is no checkpoint of Lightning's: it has no state_dict", where=str(snapshot))
    return state


def write_tensors(file: BinaryIO, state: Mapping[str, Any], metadata: Mapping[str, str], most_bytes: int) -> None:
    """Write tensors. Of those that are the same memory, the first by its name is written; the others name it.

    That is how the library's ``load_model`` reads them. Tensors that share parts of their memory are written each.

    Args:
        file: opened for writing.
        state: tensors by name; all else is left out.
        metadata: texts for the header.
        most_bytes: that the tensors may have.

    Raises:
        CorruptSnapshotError: if they have more: a forged file may name one number as the items of a tensor without end.
        NotSerializableError: if the format has no such tensors.
    """
    said, first = dict(metadata), dict[tuple[Any, ...], str]()
    written: list[tuple[str, torch.Tensor]] = []
    for name, tensor in sorted(state.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES or name == _TEXTS:
            raise NotSerializableError(f"safetensors has no place for {name}, {tensor.layout} of {tensor.dtype}")
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and (same := first.setdefault(memory, name)) != name:
            said[name] = same
        else:
            written.append((name, tensor))
    written.sort(key=lambda item: -item[1].element_size())  # so that each begins at a multiple of its element's size
    header: dict[str, Any] = {_TEXTS: said}
    end = 0
    for name, tensor in written:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    if end > most_bytes:
        raise CorruptSnapshotError(
            f"its weights would take {end} bytes, and may take {most_bytes}: tensors in it are expanded, or it is"
            " forged. Clone expanded tensors before they are saved"
        )
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in written:
        if tensor.numel():
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def write_weights(snapshot: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """Write the weights of a snapshot as safetensors: whole, or not there.

    Raises:
        SpotError: if that is not possible; nothing is left behind.
    """
    state = weights_of(snapshot)
    nbytes = sum(path.stat().st_size for path in (snapshot.iterdir() if snapshot.is_dir() else [snapshot]))
    with _whole(target) as file:
        write_tensors(file, state, metadata, max(nbytes, _SMALL_BYTES))


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one once all of it is written. Others may read it, as by the umask."""
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    with open(temporary, "xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink()
            raise


def main() -> int:
    """``plain FOLDER TARGET``, or ``safetensors SNAPSHOT TARGET STEP RUN``: for commands, which know no torch."""
    form, (source, target), said = sys.argv[1], map(Path, sys.argv[2:4]), sys.argv[4:]
    try:
        if form == "plain":
            write_plain(source, target)
        else:
            write_weights(source, target, {"format": "pt", "step": said[0], "run": said[1]})
    except (SpotError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
