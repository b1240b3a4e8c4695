"""What ``torch.distributed.checkpoint`` wants to know of a sharded snapshot: its ``Metadata``, made from ours.

It is written as ``.metadata``, a pickle, for others; we read our own
:class:`~lightning_spot.snapshot.tensor_index.Shards`.
"""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_spot.errors import NotSerializableError
from lightning_spot.snapshot.tensor_index import Archived, Path, ShardedTensor, Shards

METADATA_FILE = ".metadata"
REST_FILE = "meta.pt"
"""What of a checkpoint is neither a model's state nor an optimizer's, in Lightning's sharded checkpoints."""

_VERSION = "1.0.0"  # of the format that torch's FileSystemWriter writes


def name_of(path: Path) -> str:
    """What torch calls an item."""
    return ".".join(map(str, path))


def dtype_of(tensor: ShardedTensor) -> torch.dtype:
    """The dtype of a tensor.

    Raises:
        NotSerializableError: if this version of torch does not know it.
    """
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise NotSerializableError(
            f"{name_of(tensor.path)} has dtype {tensor.dtype!r}, which torch {torch.__version__} does not know: use the"
            " version that wrote the snapshot"
        )
    return dtype


def metadata_of(shards: Shards) -> Metadata:
    """Torch's ``Metadata`` of a snapshot's items."""
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for tensor in shards.tensors:
        name = name_of(tensor.path)
        boxes = [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes)) for shard in tensor.shards]
        items[name] = TensorStorageMetadata(TensorProperties(dtype_of(tensor)), torch.Size(tensor.shape), boxes)
        for number, shard in enumerate(tensor.shards):
            places[MetadataIndex(name, shard.offsets, number)] = _info(shard.at)
    for path, at in shards.values:
        items[name_of(path)] = BytesStorageMetadata()
        places[MetadataIndex(name_of(path))] = _info(at)
    return Metadata(
        state_dict_metadata=items,
        planner_data={name_of(path): path for path in shards.paths},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=_VERSION,
    )


def pickled(shards: Shards) -> bytes:
    """The bytes of ``.metadata``."""
    return pickle.dumps(metadata_of(shards))


def _info(at: Archived) -> _StorageInfo:
    return _StorageInfo(at.file, at.offset, at.nbytes)
