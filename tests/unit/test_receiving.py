"""A snapshot from elsewhere is received into memory, or onto the disk where the host has no memory for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_spot.errors import CorruptSnapshotError, TierError
from lightning_spot.run import reading
from lightning_spot.run.sources import StoreSource
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.objects import ObjectStore
from tests.support.oracle import claim_of
from tests.support.said import said
from tests.support.store import put, snapshot

pytestmark = pytest.mark.guarantee("G1")

NBYTES = 5_000_000


@pytest.fixture
def source(tmp_path: Path) -> StoreSource:
    store = ObjectStore(f"kept:/{tmp_path}/run")
    store.claim(claim_of(1))
    return StoreSource(store, "durable")


def stored(source: StoreSource, nbytes: int = NBYTES) -> tuple[Manifest, bytes]:
    made = {"nbytes": nbytes, "part_bytes": 1 << 20}
    return put(source.store, 1, **made), snapshot(1, **made)[1]


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, NBYTES])
@pytest.mark.parametrize("room", [None, 10 * NBYTES, 0], ids=["unknown", "enough", "none"])
def test_every_byte_is_received(
    source: StoreSource,
    nbytes: int,
    room: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reading, "available_bytes", lambda: room)
    manifest, data = stored(source, nbytes)
    moved: list[int] = []
    snapshot = source.open(manifest, moved.append)
    try:
        assert sum(moved) == nbytes
        assert snapshot.in_memory == (room != 0 or nbytes == 0)
        assert bool(said(caplog, "received-on-disk")) != snapshot.in_memory
        with snapshot.reader() as reader:
            assert reader.read() == data
    finally:
        snapshot.close()


def test_room_nowhere_is_one_clear_error(source: StoreSource, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = stored(source)

    def full(*_of: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reading, "available_bytes", lambda: 0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierError, match=r"\b5000000\b.*No space left"):
        source.open(manifest)


def test_an_error_stays_itself_if_its_traceback_holds_the_image(source: StoreSource) -> None:
    """It was that of memory which cannot be unmapped, and no older snapshot was taken."""

    def use(part: memoryview) -> None:
        raise CorruptSnapshotError(f"{len(part)} bytes that nobody can read")

    manifest, _ = stored(source)
    snapshot = source.open(manifest)
    try:
        with pytest.raises(CorruptSnapshotError, match="10 bytes"), snapshot.image() as image:
            use(image[10:20])
    finally:
        snapshot.close()


def test_a_view_of_an_image_stays_valid_as_long_as_it_is_held(source: StoreSource) -> None:
    manifest, data = stored(source)
    snapshot = source.open(manifest)
    with snapshot.image() as image:
        part = image[10:20]
    del image
    snapshot.close()
    assert part == data[10:20]
