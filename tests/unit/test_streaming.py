"""A snapshot is read from a server while it arrives: every byte is checked, once, and little is in memory."""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_spot.errors import CorruptSnapshotError, ServerUnreachableError
from lightning_spot.run import sources
from lightning_spot.run.sources import Streamed, StreamReader
from lightning_spot.session.selection import _load
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.state.dump import read_checkpoint

pytestmark = pytest.mark.guarantee("G1")

PART_BYTES = 1 << 16


class Strange:
    """A class that torch does not load."""


class Far:
    """Holds a file, and counts what is asked of it."""

    url = "far"

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)
        unsealed = Manifest(
            run="r", name=snapshot_name(1, 1), step=1, attempt=1, nbytes=len(content), part_bytes=PART_BYTES
        )
        self.manifest = unsealed.sealed(memoryview(content))
        self.asked: list[int] = []
        self.gone = False
        self.under_way = self.most_under_way = 0
        self._lock = threading.Lock()

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        with self._lock:
            self.asked.append(start // PART_BYTES)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.gone:
                raise ServerUnreachableError("the server has gone", tier=self.url)
            into[:] = self.content[start : start + len(into)]
            manifest.verify_range(start, into, self.url)
        finally:
            with self._lock:
                self.under_way -= 1

    def reader(self) -> StreamReader:
        return StreamReader(self, self.manifest, self.url)

    def load(self) -> dict[str, torch.Tensor]:
        return _load(Streamed(self.manifest, "far", self, self.url), trusts=False, is_shared=False)


def saved(*more: object) -> bytes:
    file = io.BytesIO()
    torch.save({**{f"t{i}": torch.full((50_000,), float(i)) for i in range(20)}, "more": more}, file)
    return file.getvalue()


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranges of one small part each; and no thread is left."""
    monkeypatch.setattr(sources, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(Manifest.ranges, "__defaults__", (PART_BYTES,))
    before = set(threading.enumerate())  # a server that another test served in this process has threads of that name
    yield
    assert not [item for item in set(threading.enumerate()) - before if item.name.startswith("spot-stream")]


def test_torch_loads_bytes_as_they_arrive_and_almost_none_twice() -> None:
    far = Far(saved())
    loaded = far.load()
    assert all(bool((loaded[f"t{i}"] == i).all()) for i in range(20))
    parts = len(far.manifest.checksums)
    assert set(far.asked) == set(range(parts))
    assert len(far.asked) <= parts + 4 * 6  # what was under way when torch turned from the file's ends to its middle
    assert far.most_under_way <= 4


def test_each_byte_counts_once_however_torch_jumps() -> None:
    far, moved = Far(saved()), list[int]()
    _load(Streamed(far.manifest, "far", far, far.url, moved.append), trusts=False, is_shared=False)
    assert sum(moved) == len(far.content)


def test_what_torch_refuses_is_not_read_twice() -> None:
    far = Far(saved(Strange()))
    assert float(far.load()["t3"][0]) == 3.0
    assert len(far.asked) <= len(far.manifest.checksums) + 4 * 6


def test_any_order_gives_the_very_bytes(seed: int) -> None:
    chance = random.Random(seed)
    content = chance.randbytes(40 * PART_BYTES + 123)
    with Far(content).reader() as reader:
        for _ in range(60):
            start, count = chance.randrange(len(content)), chance.choice([1, 100, PART_BYTES, 3 * PART_BYTES])
            reader.seek(start)
            assert reader.read(count) == content[start : start + count]
        reader.seek(0)
        assert reader.read() == content
        reader.finish()


@pytest.mark.parametrize("nbytes", [0, 1, PART_BYTES, 2 * PART_BYTES + 1])
def test_small_files(nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    with Far(content).reader() as reader:
        assert reader.read() == content
        reader.finish()


def test_a_part_that_nobody_reads_is_checked_all_the_same() -> None:
    far = Far(bytes(30 * PART_BYTES))
    far.content[20 * PART_BYTES] ^= 1
    with far.reader() as reader:
        assert reader.read(10) == bytes(10)
        reader.seek(-10, io.SEEK_END)
        reader.read()
        with pytest.raises(CorruptSnapshotError, match="part 20"):
            reader.finish()


def test_damage_and_loss_are_raised_as_such_not_as_torch_errors() -> None:
    far = Far(saved())
    far.content[len(far.content) // 2] ^= 1
    with pytest.raises(CorruptSnapshotError, match="part 30"):
        far.load()
    far = Far(saved())
    far.gone = True
    with pytest.raises(ServerUnreachableError, match="has gone"):
        far.load()


def test_what_was_refused_once_is_never_handed_out() -> None:
    far = Far(random.Random(1).randbytes(30 * PART_BYTES))
    far.content[12 * PART_BYTES + 5] ^= 1
    with far.reader() as reader:
        for start in (12 * PART_BYTES, 12 * PART_BYTES, 11 * PART_BYTES, 0, 12 * PART_BYTES + 10):
            reader.seek(start)
            with pytest.raises(CorruptSnapshotError, match="part 12"):
                reader.read(13 * PART_BYTES - start)
        reader.seek(13 * PART_BYTES)
        assert reader.read(100) == far.content[13 * PART_BYTES :][:100]
        with pytest.raises(CorruptSnapshotError, match="part 12"):
            reader.finish()


def test_a_checkpoint_reads_the_same_from_a_stream_and_a_file() -> None:
    content = saved(Strange(), {"a": (1, 2.5)})
    whole = read_checkpoint(io.BytesIO(content))
    assert repr(whole["more"]) == repr(Far(content).load()["more"])
