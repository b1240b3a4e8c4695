"""A snapshot server sends the parts of a snapshot on while it still receives it, and commits below only what it has."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import FencedError, SettingsError, SnapshotNotFoundError
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.upload import Upload
from lightning_spot.snapshot import coming
from lightning_spot.snapshot.coming import Coming
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum, part_ranges
from lightning_spot.store.fences import ATTEMPTS_DIR
from lightning_spot.store.local import LocalStore
from tests.support.folders import files_below, size_of
from tests.support.server import MIB, RUN, RUN_ID, Bench, StartServer, image_of, manifest_of
from tests.support.store import GatedStore
from tests.support.waiting import until

PART = 1000
NBYTES = 3 * PART + 10


class Watched(GatedStore):
    """Says which parts it has taken."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.taken = 0

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        def noted() -> Iterator[memoryview]:
            for part in parts:
                yield part
                self.taken += 1

        return super().put_parts(manifest, noted(), attempt=attempt)


class Receiving(Bench):
    """A snapshot server that receives a snapshot part by part."""

    def store(self, url: str) -> GatedStore:
        return self.stores.setdefault(url, Watched(url))

    def watched(self) -> Watched:
        store = self.tier()
        assert isinstance(store, Watched)
        return store

    def begin(self, step: int = 1) -> Upload:
        self.manifest = replace(manifest_of(step, 1, NBYTES), part_bytes=PART)
        self.image = image_of(step, NBYTES)
        return self.server.lease(RUN, 1, NBYTES, manifest=self.manifest)

    def receive(self, upload: Upload, *numbers: int, image: bytes | None = None) -> None:
        ranges = list(part_ranges(NBYTES, PART))
        for start, stop in [ranges[number] for number in numbers]:
            self.server.uploads.arriving(upload, start, stop)
            data = (image or self.image)[start:stop]
            with upload.slot.view(NBYTES) as view:
                view[start:stop] = data
            self.server.uploads.arrived(upload, start, checksum(data))

    def commit(self, upload: Upload) -> Manifest:
        return self.server.commit(upload.id, self.manifest.sealed(memoryview(self.image)))

    def durable(self) -> list[int]:
        found = LocalStore(self.tier().url).survey().manifests
        for manifest in found:
            buffer = bytearray(manifest.nbytes)
            LocalStore(self.tier().url).fetch(manifest, memoryview(buffer))
            manifest.verify(memoryview(buffer), "durable")
            assert bytes(buffer) == image_of(manifest.step, manifest.nbytes)
        return [manifest.step for manifest in found]

    def files(self) -> list[str]:
        return [path.name for path in files_below(Path(self.tier().url)) if path.parent.name != ATTEMPTS_DIR]


@pytest.fixture
def bench(make_bench: Callable[..., Receiving]) -> Receiving:
    made = make_bench(kind=Receiving)
    made.open()
    return made


def test_parts_go_on_to_the_durable_tier_as_they_arrive(bench: Receiving) -> None:
    upload = bench.begin()
    bench.receive(upload, 0)
    until(lambda: bench.watched().taken == 1, "the first part to be taken before the second has come")
    bench.receive(upload, 2, 3)  # the second one comes over another connection, later
    bench.receive(upload, 1)
    until(lambda: bench.watched().taken == 4, "all parts")
    assert bench.durable() == []  # nothing counts there before it does here
    bench.commit(upload)
    assert bench.flush() == []
    assert bench.durable() == [1]
    assert bench.tier().puts() == [1]  # the put of the committed snapshot is the one that was under way


def test_what_is_given_up_is_given_up_below_too(bench: Receiving) -> None:
    upload = bench.begin()
    bench.receive(upload, 0, 1)
    until(lambda: bench.watched().taken == 2, "two parts to be taken")
    bench.server.abort(upload.id)
    until(lambda: not bench.files(), "nothing to be left")
    assert bench.flush() == []
    assert not bench.server.reconciler.health[bench.tier().url].failures_total
    upload = bench.begin(2)  # the slot is good for the next one
    bench.receive(upload, 0, 1, 2, 3)
    bench.commit(upload)
    assert bench.flush() == []
    assert bench.durable() == [2]


def test_a_chunk_that_arrives_twice_is_not_sent_on_before_commit(bench: Receiving) -> None:
    """It was damaged on its way the first time, which only its sender can tell."""
    upload = bench.begin()
    bench.receive(upload, 0, 1, image=bytes(NBYTES))
    until(lambda: bench.watched().taken == 2, "damaged parts to be taken")
    bench.receive(upload, 0, 1, 2, 3)
    bench.commit(upload)
    assert bench.flush() == []
    assert bench.durable() == [1]
    assert bench.watched().taken == 2


def test_a_part_that_changes_in_memory_is_not_made_durable(bench: Receiving) -> None:
    """The tier would note the checksum of the changed bytes, and take them for good ones."""
    upload = bench.begin()
    bench.receive(upload, 1)
    until(lambda: bench.tier().tries, "the put to begin")
    with upload.slot.view(NBYTES) as view:
        view[PART] ^= 1
    bench.receive(upload, 0, 2, 3)
    bench.commit(upload)
    bench.flush()
    assert bench.durable() == []


def test_a_sender_that_falls_silent_holds_nothing_up(bench: Receiving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coming, "QUIET_S", 0.2)
    upload = bench.begin()
    bench.receive(upload, 0)
    until(lambda: bench.watched().taken == 1, "a part to be taken")
    bench.save(2)
    assert bench.flush() == []
    assert bench.durable() == [2]
    bench.receive(upload, 1, 2, 3)  # and what it sends in the end is not lost
    bench.commit(upload)
    assert bench.committed() == [1, 2]


def test_what_a_killed_server_was_sending_holds_nothing_up(bench: Receiving) -> None:
    """Its successor is of the same attempt. The durable tier waited two minutes for the rest of what was under way."""
    upload = bench.begin(1)
    bench.receive(upload, 0)
    until(lambda: bench.watched().taken == 1, "the first part to be taken")
    upload.touched_s -= 1.0
    successors = bench.begin(2)
    bench.receive(successors, 0, 1, 2, 3)
    bench.commit(successors)
    assert bench.flush() == []
    assert bench.durable() == [2]
    with pytest.raises(SnapshotNotFoundError):
        bench.server.uploads.find(upload.id)


@pytest.mark.parametrize("why", ["it is connected", "it has just hung up", "it is of another run"])
def test_a_sender_that_may_continue_does_not_count_as_killed(bench: Receiving, why: str) -> None:
    """Between two connections, and in front of its commit, nobody is connected for a moment."""
    upload = bench.begin(1)
    manifest, image = bench.manifest, bench.image
    upload.touched_s -= 1.0
    with contextlib.ExitStack() as connected, socket.socket() as connection:
        connected.enter_context(bench.server.uploads.streaming(upload, connection))
        upload.touched_s -= 1.0
        if why == "it has just hung up":
            connected.close()
        elif why == "it is of another run":
            connected.close()
            upload.touched_s -= 1.0
            upload.run = f"other@{RUN_ID}"
        newer = bench.begin(2)
        upload.run = newer.run
        assert bench.server.uploads.find(upload.id) is upload
        bench.manifest, bench.image = manifest, image
        bench.receive(upload, 0, 1, 2, 3)
    bench.commit(upload)
    assert bench.committed() == [1]


def test_a_later_attempt_does_not_wait_for_uploads_of_an_earlier(bench: Receiving) -> None:
    upload = bench.begin()
    bench.receive(upload, 0)
    until(lambda: bench.watched().taken == 1, "a part to be taken")
    bench.open(attempt=2)
    bench.save(3, attempt=2)
    assert bench.flush() == []
    assert bench.durable() == [3]
    bench.receive(upload, 1, 2, 3)
    with pytest.raises(FencedError):
        bench.commit(upload)


def test_an_upload_commits_only_what_it_said_it_would(bench: Receiving) -> None:
    upload = bench.begin()
    bench.receive(upload, 0, 1, 2, 3)
    bench.manifest = replace(bench.manifest, epoch=7)
    with pytest.raises(SettingsError, match="is not what this upload was opened for"):
        bench.commit(upload)
    with pytest.raises(SettingsError, match="not what is asked"):
        bench.server.lease(RUN, 1, NBYTES - 1, manifest=bench.manifest)
    assert bench.flush() == []
    assert bench.durable() == []


def test_a_frame_that_is_no_part_is_not_sent_on() -> None:
    manifest = replace(manifest_of(1, 1, NBYTES), part_bytes=PART)
    found = Coming(manifest, memoryview(bytearray(NBYTES)))
    found.arriving(0, PART)
    found.arrived(0, "0" * 32)
    found.arriving(PART // 2, PART)
    assert found.given_up
    with pytest.raises(SnapshotNotFoundError, match="given up"):
        next(found.parts_in_order())


def test_over_the_network(start_server: StartServer, tmp_path: Path) -> None:
    """A sender that waits, in the middle of a snapshot, for its beginning to be at the durable tier."""
    durable = tmp_path / "durable"
    server = start_server("--allow-storage", str(tmp_path))
    store = ServerStore(f"{server.url}/{RUN}")
    info = RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="t", durable_url=str(durable))
    assert store.open_run(info).carries
    LocalStore(durable).claim(info.claim())
    image = image_of(1, 2 * MIB)
    manifest = replace(manifest_of(1, 1, len(image)), part_bytes=MIB)
    seen = threading.Event()

    def parts() -> Iterator[memoryview]:
        yield memoryview(image)[:MIB]
        until(lambda: any(size_of(path) >= MIB for path in files_below(durable)), "the first part at the tier")
        seen.set()
        yield memoryview(image)[MIB:]

    sealed = store.put_parts(manifest, parts(), attempt=1)
    assert seen.is_set()
    until(lambda: LocalStore(durable).has(sealed), "the snapshot at the tier")
    buffer = bytearray(len(image))
    LocalStore(durable).fetch(sealed, memoryview(buffer))
    assert bytes(buffer) == image
