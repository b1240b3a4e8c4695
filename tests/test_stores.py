"""One conformance suite for every store: local, any fsspec file system, S3 over HTTP, a memory node."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_spot.errors import CorruptSnapshot, Fenced, SettingsError, SnapshotNotFound, SpotError, TierError
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest, snapshot_name
from lightning_spot.memory.stores import open_store
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.store import Store, retain
from tests.oracle import claim_of


@pytest.fixture(params=["local", "memory", "s3", "node"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    name = f"run-{random.SystemRandom().randrange(10**9)}"
    if request.param == "local":
        return open_store(str(tmp_path / name))
    if request.param == "memory":
        return open_store(f"memory://{name}")
    if request.param == "s3":
        return open_store(f"{request.getfixturevalue('s3')}/{name}")
    node = request.getfixturevalue("start_node")("--slots", "6")
    return open_store(f"{node.url}/{name}")


def snapshot(
    step: int, *, attempt: int = 1, nbytes: int = 1000, part_bytes: int = 256, **more: Any
) -> tuple[Manifest, bytes]:
    data = random.Random(step).randbytes(nbytes)
    made = Manifest(
        run="run", name=snapshot_name(step, attempt), step=step, attempt=attempt, nbytes=nbytes, part_bytes=part_bytes
    )
    return replace(made, **more).sealed(memoryview(data)), data


def put(store: Store, step: int, *, by: int = 1, **more: Any) -> Manifest:
    manifest, data = snapshot(step, **more)
    store.put(manifest, memoryview(data), attempt=by)
    return manifest


def fetched(store: Store, manifest: Manifest) -> bytes:
    buffer = bytearray(manifest.nbytes)
    store.fetch(manifest, memoryview(buffer))
    return bytes(buffer)


def test_empty(store: Store) -> None:
    assert store.survey().manifests == []
    assert store.claimed() == 0


def test_what_is_put_is_there(store: Store) -> None:
    manifest = put(store, 5)
    (found,) = store.survey().manifests
    assert replace(found, run="run") == manifest
    moved: list[int] = []
    buffer = bytearray(manifest.nbytes)
    store.fetch(found, memoryview(buffer), moved.append)
    manifest.verify(memoryview(buffer), "store")
    assert sum(moved) == manifest.nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257])
def test_odd_sizes(store: Store, nbytes: int) -> None:
    manifest = put(store, 1, nbytes=nbytes)
    assert fetched(store, manifest) == snapshot(1, nbytes=nbytes)[1]


def test_large_snapshot_in_many_parts(store: Store) -> None:
    manifest = put(store, 1, nbytes=20_000_001, part_bytes=8 * 1024 * 1024)
    manifest.verify(memoryview(fetched(store, manifest)), "store")


def test_newest_first(store: Store) -> None:
    store.claim(claim_of(2, keep=100))
    for step, attempt in ((3, 1), (9, 1), (4, 2)):
        put(store, step, attempt=attempt, by=2)
    assert [(manifest.attempt, manifest.step) for manifest in store.survey().manifests] == [(2, 4), (1, 9), (1, 3)]


def test_put_again_replaces(store: Store) -> None:
    put(store, 5, nbytes=1000)
    newer, data = snapshot(5, nbytes=400)
    store.put(newer, memoryview(data), attempt=1)
    assert len(store.survey().manifests) == 1
    assert fetched(store, newer) == data


def test_delete_twice(store: Store) -> None:
    manifest = put(store, 5)
    store.delete(manifest)
    store.delete(manifest)
    assert store.survey().manifests == []


def test_fetch_of_what_is_not_there(store: Store) -> None:
    with pytest.raises((SnapshotNotFound, CorruptSnapshot)):
        fetched(store, snapshot(5)[0])


def test_claims_fence_earlier_attempts(store: Store) -> None:
    store.claim(claim_of(1))
    put(store, 5, by=1)
    store.claim(claim_of(2))
    assert store.claimed() == 2
    with pytest.raises(Fenced) as caught:
        put(store, 6, by=1)
    assert caught.value.current == 2
    assert [manifest.step for manifest in store.survey().manifests] == [5]
    put(store, 6, attempt=2, by=2)


def test_a_file_of_a_users_own(store: Store) -> None:
    manifest = put(store, 7, name="epoch=3-step=7.ckpt", file="")
    assert store.survey().manifests == []  # it is no snapshot that a run resumes from by itself
    assert fetched(store, manifest) == snapshot(7)[1]
    store.delete(manifest)
    with pytest.raises(SpotError):
        fetched(store, manifest)


def test_retention_keeps_the_newest(store: Store) -> None:
    for step in (1, 2, 3):
        put(store, step)
    newest = put(store, 4)
    retain(store, 2, newest)
    assert [manifest.step for manifest in store.survey().manifests] == [4, 3]
    retain(store, 0, newest)
    assert [manifest.step for manifest in store.survey().manifests] == [4]


def test_retention_deletes_nothing_where_the_newest_is_missing(store: Store) -> None:
    store.claim(claim_of(1, keep=100))
    for step in (1, 2, 3):
        put(store, step)
    retain(store, 1, snapshot(9)[0])
    assert [manifest.step for manifest in store.survey().manifests] == [3, 2, 1]


Breaker = Callable[[Store, Manifest], None]


def _write(store: Store, below: str, data: bytes) -> None:
    with fsspec.open(f"{store.url}/{below}", "wb") as file:
        file.write(data)


@pytest.mark.parametrize("store", ["local", "memory", "s3"], indirect=True)
def test_what_a_crash_left_does_not_count_and_is_swept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spot.tiers.store.SETTLED_S", 0.0)
    _write(store, f"{snapshot_name(1, 1)}/model.ckpt", b"half")
    _write(store, f"{snapshot_name(9, 1)}/model.ckpt", b"under way")
    _write(store, f"{snapshot_name(2, 1)}/{MANIFEST_FILE}", b'{"format": 1, "na')
    newest = put(store, 5)
    assert [manifest.step for manifest in store.survey().manifests] == [5]
    retain(store, 1, newest)
    fs, root = fsspec.core.url_to_fs(store.url)
    fs.invalidate_cache()
    left = {path.split("/")[-2] for path in fs.find(root) if path.endswith("model.ckpt")}
    assert left == {newest.name, snapshot_name(9, 1)}  # what is newer may be on its way


def test_local_store_says_what_the_system_said(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(TierError, match="Not a directory"):
        put(LocalStore(blocker / "run"), 1)


def test_local_store_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "run")
    first = put(store, 1)

    def fail(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TierError, match="No space left"):
        put(store, 2)
    monkeypatch.undo()
    assert store.survey().manifests == [first]
    assert not list(tmp_path.rglob(".lightning-spot-tmp-*"))


def test_truncated_file_is_found(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    manifest = put(store, 1)
    path = store.root / manifest.data_path
    os.truncate(path, 10)
    with pytest.raises(CorruptSnapshot, match="cut short"):
        fetched(store, manifest)


def test_unknown_file_system_is_named() -> None:
    with pytest.raises(SettingsError, match="nonsense"):
        open_store("nonsense://bucket/run")
