"""A snapshot of several writers: a range of ``model.ckpt`` from each, and what only one rank knows from the others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from lightning_spot.snapshot.files import MODEL_FILE, FileSpan
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import LEAST_PART_BYTES, assemble
from tests.support.server import RUN_ID

PART = LEAST_PART_BYTES
LAST_BYTES, OWN_BYTES = 1000, 100


def shard_manifest(step: int, writer: int, writers: int = 2, *, attempt: int = 1, **fields: Any) -> Manifest:
    """The manifest of a writer's shard, not sealed: rank 0 has the end of the file."""
    start = (writer - 1) * PART if writer else (writers - 1) * PART
    files = [FileSpan(MODEL_FILE, 0, PART if writer else LAST_BYTES)]
    if writer:
        files.append(FileSpan(f"rank-{writer:05d}.pt", PART, OWN_BYTES))
    name = shard_name(snapshot_name(step, attempt), writer)
    plain: dict[str, Any] = {"run": "run", "run_id": RUN_ID, "lineage": "1" * 12, "name": name, "step": step}
    plain |= {"attempt": attempt, "nbytes": PART * len(files), "files": tuple(files), "part_bytes": PART}
    return Manifest(**{**plain, "shard": ShardOf(writer, writers, "plan", start), **fields})


def shard_image(manifest: Manifest) -> bytearray:
    """The bytes of a shard; those of its files are of its step and writer."""
    chance = random.Random(1000 * manifest.step + manifest.shard.writer)
    image = bytearray(manifest.nbytes)
    for span in manifest.files:
        image[span.offset : span.stop] = chance.randbytes(span.nbytes)
    return image


def sealed_shard(step: int, writer: int, writers: int = 2, **fields: Any) -> Manifest:
    manifest = shard_manifest(step, writer, writers, **fields)
    return manifest.sealed(memoryview(shard_image(manifest)))


def failed_shard(step: int, writer: int, writers: int = 2, why: str = "no memory", **fields: Any) -> Manifest:
    manifest = shard_manifest(step, writer, writers, **fields)
    return replace(manifest, nbytes=0, files=(), shard=replace(manifest.shard, start=0, failed=why))


def checkpoint_of(step: int, writers: int = 2) -> bytes:
    """``model.ckpt`` of all of them."""
    shards = [shard_manifest(step, writer, writers) for writer in (*range(1, writers), 0)]
    return b"".join(bytes(shard_image(shard)[: shard.files[0].nbytes]) for shard in shards)


def whole_of(step: int, writers: int = 2) -> Manifest:
    """The manifest of the snapshot."""
    return assemble(sealed_shard(step, writer, writers) for writer in range(writers))


def apart_shard(step: int, writer: int, writers: int = 2, *, persist: bool = True, **fields: Any) -> Manifest:
    """The manifest of a shard of a sharded model, not sealed: it has files of its own only."""
    files = (FileSpan(f"__{writer}_0.distcp", 0, 3000), FileSpan(f"rank-{writer:05d}.pt", 4096, OWN_BYTES))
    shard = ShardOf(writer, writers, "plan", persist=persist)
    return shard_manifest(step, writer, writers, **{"files": files, "nbytes": PART, "shard": shard, **fields})


def sealed_apart(step: int, writer: int, writers: int = 2, **fields: Any) -> Manifest:
    manifest = apart_shard(step, writer, writers, **fields)
    return manifest.sealed(memoryview(shard_image(manifest)))
