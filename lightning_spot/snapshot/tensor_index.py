"""Where the tensors of a sharded snapshot lie in its files, as JSON that anybody can read without running code.

``.metadata`` says the same to ``torch.distributed.checkpoint``, as a pickle. Each piece of a tensor, and each plain
value, is an archive of its own, as ``torch.save`` writes them, within one of the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.files import FileSpan
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
class StoredValue:
    """Something else than a tensor.

    Attributes:
        path: in the state.
        at: its archive.
    """

    path: Path
    at: Archived


@dataclass(frozen=True, slots=True)
class Shards:
    """All items of a sharded snapshot's state.

    Attributes:
        world_size: number of ranks that wrote it.
        tensors: with the places of their boxes.
        values: everything else.
    """

    world_size: int
    tensors: tuple[ShardedTensor, ...]
    values: tuple[StoredValue, ...]

    @property
    def paths(self) -> list[Path]:
        """Those of all items."""
        return [*(tensor.path for tensor in self.tensors), *(value.path for value in self.values)]

    def to_json(self) -> bytes:
        """As JSON: files by their number, paths as lists."""
        files: dict[str, int] = {}

        def place(at: Archived) -> list[int]:
            return [files.setdefault(at.file, len(files)), at.offset, at.nbytes]

        tensors = [
            [item.path, item.dtype, item.shape, [[s.offsets, s.sizes, place(s.at), s.data] for s in item.shards]]
            for item in self.tensors
        ]
        values = [[item.path, place(item.at)] for item in self.values]
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
        files = {file.name: file for file in manifest.files}
        if SHARDS_FILE not in files:
            _refuse(manifest, f"it has no {SHARDS_FILE}")
        span = files[SHARDS_FILE]
        try:
            return _Checked(manifest, files).read(read_json(image[span.offset : span.stop], LARGE_JSON_BYTES))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            _refuse(manifest, f"{SHARDS_FILE} cannot be read ({type(error).__name__}: {error})")


def archived(image: Image, manifest: Manifest, at: Archived) -> memoryview:
    """The bytes of an archive in the image of a snapshot."""
    span = manifest.span_of(at.file)
    return image[span.offset + at.offset : span.offset + at.offset + at.nbytes]


class _Checked:
    """Reads the JSON of one snapshot: what a stranger may have written."""

    def __init__(self, manifest: Manifest, files: dict[str, FileSpan]) -> None:
        self._manifest = manifest
        self._spans = files
        self._files: list[str] = []

    def read(self, fields: Any) -> Shards:
        if fields["format"] != _FORMAT:
            _refuse(self._manifest, f"{SHARDS_FILE} has format {fields['format']!r}; upgrade lightning_spot")
        self._files = [name for name in fields["files"] if self._is(name in self._spans, f"{name!r} is not there")]
        tensors = tuple(self._tensor(*item) for item in fields["tensors"])
        values = tuple(StoredValue(self._path(path), self._place(*at)) for path, at in fields["values"])
        shards = Shards(self._number(fields["world_size"]), tensors, values)
        self._check_paths(shards.paths)
        archives = [*(shard.at for tensor in tensors for shard in tensor.shards), *(value.at for value in values)]
        self._is(sum(at.nbytes for at in archives) <= self._manifest.nbytes, "archives overlap")
        return shards

    def _check_paths(self, paths: list[Path]) -> None:
        """Refuse paths that no nested state has: who puts it together makes a list as long as its last place says."""
        names = [".".join(map(str, path)) for path in paths]
        self._is(len(set(names)) == len(names), "an item is there twice")
        kinds: dict[Path, type] = {(): str}
        for path in paths:
            for depth, key in enumerate(path):
                self._is(kinds.setdefault(path[:depth], type(key)) is type(key), f"{path} is in a list and in a dict")
                self._is(isinstance(key, str) or 0 <= key < len(paths), f"{path} is a place that no list has")
        self._is(kinds.keys().isdisjoint(paths), "an item holds another one")

    def _tensor(self, path: Any, dtype: Any, shape: Any, shards: Any) -> ShardedTensor:
        self._is(isinstance(dtype, str), "a dtype is no name")
        whole = self._numbers(shape)
        found = tuple(self._shard(whole, *shard) for shard in shards)
        self._is(sum(shard.numel for shard in found) == prod(whole), f"shards of {path} do not make up all of it")
        self._is(len({shard.offsets for shard in found}) == len(found) > 0, f"a shard of {path} is there twice")
        return ShardedTensor(self._path(path), dtype, whole, found)

    def _shard(self, shape: tuple[int, ...], offsets: Any, sizes: Any, at: Any, data: Any) -> Shard:
        shard = Shard(self._numbers(offsets), self._numbers(sizes), self._place(*at), self._number(data))
        self._is(len(shape) == len(shard.offsets) == len(shard.sizes), "a shard has other dimensions than its tensor")
        ends = zip(shard.offsets, shard.sizes, shape, strict=True)
        self._is(all(offset + size <= whole for offset, size, whole in ends), "a shard reaches beyond its tensor")
        self._is(shard.data <= shard.at.nbytes, "a shard's elements lie beyond its archive")
        return shard

    def _place(self, file: Any, offset: Any, nbytes: Any) -> Archived:
        name = self._files[self._number(file)]
        at = Archived(name, self._number(offset), self._number(nbytes))
        self._is(at.offset + at.nbytes <= self._spans[name].nbytes, f"an archive reaches beyond {name}")
        return at

    def _path(self, path: Any) -> Path:
        keys = tuple(path)
        self._is(all(type(key) in (str, int) for key in keys) and len(keys) > 0, "a path is no list of keys")
        return keys

    def _numbers(self, numbers: Any) -> tuple[int, ...]:
        self._is(isinstance(numbers, list) and len(numbers) <= _MOST_DIMENSIONS, "sizes are no list of numbers")
        return tuple(self._number(number) for number in numbers)

    def _number(self, number: Any) -> int:
        self._is(type(number) is int and 0 <= number < 2**62, f"{number!r} is no number of elements or bytes")
        return int(number)

    def _is(self, holds: bool, otherwise: str) -> bool:
        if not holds:
            _refuse(self._manifest, f"{SHARDS_FILE} contradicts itself or the manifest: {otherwise}")
        return True


def _refuse(manifest: Manifest, why: str) -> NoReturn:
    raise CorruptSnapshotError(
        f"{manifest.run}/{manifest.name} is no sharded snapshot that can be read: {plain(why)}; another copy is needed",
        where=manifest.name,
    )
