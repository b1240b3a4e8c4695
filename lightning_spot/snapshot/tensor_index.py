"""Where the tensors of a sharded snapshot lie in its files, as JSON that anybody can read without running code.

``.metadata`` says the same to ``torch.distributed.checkpoint``, as a pickle. Each piece of a tensor, and each plain
value, is an archive of its own, as ``torch.save`` writes them, within one of the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Image
from lightning_spot.untrusted import LARGE_JSON_BYTES, plain, read_json

SHARDS_FILE = "shards.json"
_FORMAT = 1
_MOST_DIMENSIONS = 64

Path = tuple[str | int, ...]
"""Keys and places in lists that lead to an item of the nested state."""


@dataclass(frozen=True, slots=True)
class Archived:
    """Where an archive lies.

    Attributes:
        file: that holds it.
        offset: of its first byte in that file.
        nbytes: its length.
    """

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor.

    Attributes:
        offsets: of its first element in the tensor, in each dimension.
        sizes: of the box.
        at: its archive.
        data: offset of its elements in the archive, row after row.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: Archived
    data: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor, in one or several boxes that make up all of it.

    Attributes:
        path: in the state.
        dtype: such as ``"float32"``.
        shape: of the whole tensor.
        shards: its boxes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Shards:
    """All items of a sharded snapshot's state.

    Attributes:
        world_size: number of ranks that wrote it.
        tensors: with the places of their boxes.
        values: everything else, with the place of its archive.
    """

    world_size: int
    tensors: tuple[ShardedTensor, ...]
    values: tuple[tuple[Path, Archived], ...]

    @property
    def paths(self) -> list[Path]:
        """Those of all items."""
        return [*(tensor.path for tensor in self.tensors), *(path for path, _ in self.values)]

    def to_json(self) -> bytes:
        """As JSON: files by their number, paths as lists."""
        files: dict[str, int] = {}

        def place(at: Archived) -> list[int]:
            return [files.setdefault(at.file, len(files)), at.offset, at.nbytes]

        tensors = [
            [item.path, item.dtype, item.shape, [[s.offsets, s.sizes, place(s.at), s.data] for s in item.shards]]
            for item in self.tensors
        ]
        values = [[path, place(at)] for path, at in self.values]
        fields = {"format": _FORMAT, "world_size": self.world_size, "tensors": tensors, "values": values}
        return json.dumps({**fields, "files": list(files)}, separators=(",", ":")).encode()

    @classmethod
    def read(cls, image: Image, manifest: Manifest) -> Shards:
        """Read those of a sharded snapshot; every place in them is checked.

        Args:
            image: of the snapshot.
            manifest: of the snapshot.

        Raises:
            CorruptSnapshotError: if they are not there, or contradict themselves or the manifest.
        """
        span = manifest.span_of(SHARDS_FILE)
        try:
            fields = read_json(image[span.offset : span.stop], LARGE_JSON_BYTES)
            return _checked(fields, {file.name: file.nbytes for file in manifest.files}, manifest.nbytes)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            why = plain(error if type(error) is ValueError else f"{type(error).__name__}: {error}")
            raise CorruptSnapshotError(
                f"{manifest.run}/{manifest.name} is no sharded snapshot that can be read: {SHARDS_FILE} contradicts"
                f" itself or the manifest ({why}); another copy is needed",
                where=manifest.name,
            ) from error


def archived(image: Image, manifest: Manifest, at: Archived) -> memoryview:
    """The bytes of an archive in the image of a snapshot."""
    span = manifest.span_of(at.file)
    return image[span.offset + at.offset : span.offset + at.offset + at.nbytes]


def _checked(fields: Any, sizes_of_files: dict[str, int], most_bytes: int) -> Shards:
    """Read the JSON of one snapshot: what a stranger may have written."""
    _require(fields["format"] == _FORMAT, f"format {fields['format']!r}; upgrade lightning_spot")
    files = fields["files"]

    def archive(file: Any, offset: Any, nbytes: Any) -> Archived:
        at = Archived(files[_number(file)], _number(offset), _number(nbytes))
        _require(at.offset + at.nbytes <= sizes_of_files[at.file], f"an archive reaches beyond {at.file}")
        return at

    def box(shape: tuple[int, ...], offsets: Any, sizes: Any, at: Any, data: Any) -> Shard:
        shard = Shard(_numbers(offsets), _numbers(sizes), archive(*at), _number(data))
        _require(len(shape) == len(shard.offsets) == len(shard.sizes), "a shard has other dimensions than its tensor")
        ends = zip(shard.offsets, shard.sizes, shape, strict=True)
        _require(all(offset + size <= whole for offset, size, whole in ends), "a shard reaches beyond its tensor")
        _require(shard.data <= shard.at.nbytes, "a shard's elements lie beyond its archive")
        return shard

    def tensor(path: Any, dtype: Any, shape: Any, shards: Any) -> ShardedTensor:
        _require(isinstance(dtype, str), "a dtype is no name")
        whole = _numbers(shape)
        found = tuple(box(whole, *shard) for shard in shards)
        _require(sum(shard.numel for shard in found) == prod(whole), f"shards of {path} do not make up all of it")
        _require(len({shard.offsets for shard in found}) == len(found) > 0, f"a shard of {path} is there twice")
        return ShardedTensor(_path(path), dtype, whole, found)

    tensors = tuple(tensor(*item) for item in fields["tensors"])
    values = tuple((_path(path), archive(*at)) for path, at in fields["values"])
    archives = [*(shard.at for tensor in tensors for shard in tensor.shards), *(at for _, at in values)]
    _require(sum(at.nbytes for at in archives) <= most_bytes, "archives overlap")
    found = Shards(_number(fields["world_size"]), tensors, values)
    _check_paths(found.paths)
    return found


def _check_paths(paths: list[Path]) -> None:
    """Refuse paths that no nested state has: who puts it together makes a list as long as its last place says."""
    names = [".".join(map(str, path)) for path in paths]
    _require(len(set(names)) == len(names), "an item is there twice")
    kinds: dict[Path, type] = {(): str}
    for path in paths:
        for depth, key in enumerate(path):
            _require(kinds.setdefault(path[:depth], type(key)) is type(key), f"{path} is in a list and in a dict")
            _require(isinstance(key, str) or 0 <= key < len(paths), f"{path} is a place that no list has")
    _require(kinds.keys().isdisjoint(paths), "an item holds another one")


def _path(path: Any) -> Path:
    keys = tuple(path)
    _require(all(type(key) in (str, int) for key in keys) and len(keys) > 0, "a path is no list of keys")
    return keys


def _numbers(numbers: Any) -> tuple[int, ...]:
    _require(isinstance(numbers, list) and len(numbers) <= _MOST_DIMENSIONS, "sizes are no list of numbers")
    return tuple(map(_number, numbers))


def _number(number: Any) -> int:
    _require(type(number) is int and 0 <= number < 2**62, f"{number!r} is no number of elements or bytes")
    return int(number)


def _require(is_met: bool, otherwise: str) -> None:
    if not is_met:
        raise ValueError(otherwise)
