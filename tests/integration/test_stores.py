"""One conformance suite for every store: local, of fsspec, S3 over HTTP, a server; by ``make stores``, real servers."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs

from lightning_spot.client.remote import ServerStore
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
)
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, snapshot_name
from lightning_spot.store import posix
from lightning_spot.store.local import LocalStore
from lightning_spot.store.objects import ObjectStore
from lightning_spot.store.retention import Keep, retain
from lightning_spot.store.store import Holdings, Store
from tests.support.oracle import claim_of
from tests.support.real_stores import SERVERS, Server, use, why_missing
from tests.support.store import Kept, fetched, parts_of, put, snapshot
from tests.support.waiting import kept_port

pytestmark = pytest.mark.guarantee("G14")

REAL = {server.name: server for server in SERVERS}
FILES = ["local", "kept", "s3", *(pytest.param(name, marks=pytest.mark.stores) for name in REAL)]

WITH_SERVER = [*FILES, "server"]
"""For what a server does as well: it takes what is put, lists it, gives it back and removes it."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Starts each server once, when the first test asks for it."""
    with contextlib.ExitStack() as ended:

        @functools.cache
        def start(name: str) -> Server:
            if why := why_missing(REAL[name]):
                pytest.skip(why)
            server = REAL[name](tmp_path_factory.mktemp("server") / "files", ended.enter_context(kept_port()))
            ended.callback(server.end)
            server.start()
            return server

        yield start


@pytest.fixture(params=FILES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store | ServerStore:
    number = random.SystemRandom().randrange(10**9)
    name = f"run [1]*?+100%25#1 über-{number}"  # what a shell or a URL would take for more is a name like any other
    if request.param == "local":
        return open_store(str(tmp_path / name))
    if request.param == "kept":
        return open_store(f"kept://runs/{name}")
    if request.param in REAL:
        server = request.getfixturevalue("real")(request.param)
        use(server.environment(), request.getfixturevalue("monkeypatch"))
        return open_store(f"{server.bucket(f'bucket-{number}')}/runs/{name}")
    if request.param == "s3":
        return open_store(f"{request.getfixturevalue('s3')}/{name}")
    server = request.getfixturevalue("start_server")("--slots", "6")
    return ServerStore(f"{server.url}/run-{number}")


FILES_OF_ONE = (FileSpan(".metadata", 0, 300), FileSpan("__0_0.distcp", 4096, 9000), FileSpan("__1_0.distcp", 16384, 0))
"""A sharded snapshot: files of several parts, an empty one, and bytes that are in none."""


def sharded(step: int, **more: Any) -> tuple[Manifest, bytes]:
    manifest, data = snapshot(step, nbytes=17_000, part_bytes=4096, files=FILES_OF_ONE, **more)
    image = bytearray(len(data))
    for span in FILES_OF_ONE:
        image[span.offset : span.stop] = data[span.offset : span.stop]
    return replace(manifest, checksums=()).sealed(memoryview(image)), bytes(image)


def test_empty(store: Store) -> None:
    assert store.survey() == Holdings()
    assert store.claimed() == 0
    assert store.newest_claim() is None
    assert not store.has(snapshot(1)[0])


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_what_is_put_is_there(store: Store) -> None:
    manifest = put(store, 5)
    (found,) = store.survey().manifests
    assert replace(found, run="run") == manifest
    moved: list[int] = []
    buffer = bytearray(manifest.nbytes)
    store.fetch(found, memoryview(buffer), moved.append)
    manifest.verify(memoryview(buffer), "store")
    assert sum(moved) == manifest.nbytes


@pytest.mark.parametrize("part", [0, -1])
@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_a_chunk_unlike_the_committed_one_is_noticed_as_it_comes(store: Store, part: int) -> None:
    put(store, 5)
    (found,) = store.survey().manifests
    checksums = list(found.checksums)
    checksums[part] = "0" * 32
    with pytest.raises(CorruptSnapshotError, check=lambda error: error.part == (len(checksums) - 1 if part else 0)):
        store.fetch(replace(found, checksums=tuple(checksums)), memoryview(bytearray(found.nbytes)))
    with pytest.raises(CorruptSnapshotError):
        store.fetch(replace(found, checksums=()), memoryview(bytearray(found.nbytes)))


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_odd_sizes(store: Store, nbytes: int) -> None:
    manifest = put(store, 1, nbytes=nbytes)
    assert fetched(store, manifest) == snapshot(1, nbytes=nbytes)[1]


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_large_snapshot_in_many_parts(store: Store) -> None:
    manifest = put(store, 1, nbytes=20_000_001, part_bytes=8 * 1024 * 1024)
    manifest.verify(memoryview(fetched(store, manifest)), "store")


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_put_again_replaces(store: Store) -> None:
    put(store, 5, nbytes=1000)
    newer, data = snapshot(5, nbytes=400)
    store.put(newer, memoryview(data), attempt=1)
    assert len(store.survey().manifests) == 1
    assert fetched(store, newer) == data


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_a_snapshot_of_several_files(store: Store) -> None:
    manifest, image = sharded(5)
    view = memoryview(image)
    store.put(manifest, view, attempt=1)
    store.put(manifest, view, attempt=1)  # the server that takes over from a killed one does so
    (found,) = store.survey().manifests
    assert replace(found, run="run") == manifest
    assert isinstance(store, ServerStore) or store.has(found)
    moved: list[int] = []
    buffer = bytearray(b"\xaa" * manifest.nbytes)
    store.fetch(found, memoryview(buffer), moved.append)
    assert buffer == image
    assert sum(moved) == manifest.nbytes
    if not isinstance(store, ServerStore):
        fs, root = fsspec.core.url_to_fs(store.url)
        fs.invalidate_cache()
        for span in manifest.files:
            assert fs.cat_file(f"{root}/{manifest.path_of(span)}") == image[span.offset : span.stop]
        _write(store, f"{manifest.name}/__0_0.distcp", b"cut short")
        assert not store.has(manifest)
        with pytest.raises(CorruptSnapshotError, check=lambda error: error.part is None):
            fetched(store, manifest)
        fs.rm_file(f"{root}/{manifest.name}/__0_0.distcp")
        assert not store.has(manifest)
        with pytest.raises(SnapshotNotFoundError):
            fetched(store, manifest)
        store.put(manifest, view, attempt=1)
        assert fetched(store, manifest) == image
    for _ in range(2):
        store.delete(found)
        assert store.survey().manifests == []
    if not isinstance(store, ServerStore):
        assert _there(store) == []


def test_bytes_that_no_file_would_keep_are_refused(store: Store) -> None:
    manifest, image = sharded(5)
    damaged = image[:-1] + b"x"
    manifest = replace(manifest, checksums=()).sealed(memoryview(damaged))
    with pytest.raises(CorruptSnapshotError, check=lambda error: error.part is None):
        store.put(manifest, memoryview(damaged), attempt=1)
    assert store.survey().manifests == []


@pytest.mark.parametrize("what", ["delete", "sweep"])
def test_a_concurrent_deletion_by_another_server_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As servers do that have portions of the same snapshots: each keeps the newest ones only."""
    store = LocalStore(tmp_path / "run")
    old, current = put(store, 5), put(store, 6)
    folder, is_own = tmp_path / "run" / old.name, posix.is_own_directory
    if what == "sweep":
        (folder / MANIFEST_FILE).unlink()

    def removed_next(path: Path) -> bool:
        found = is_own(path)
        if path == folder:
            shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(posix, "is_own_directory", removed_next)
    if what == "delete":
        store.delete(old)
    else:
        store.sweep(current)
    assert [manifest.step for manifest in store.survey().manifests] == [6]
    assert not folder.exists()


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_fetch_of_what_is_not_there(store: Store) -> None:
    with pytest.raises((SnapshotNotFoundError, CorruptSnapshotError)):
        fetched(store, snapshot(5)[0])


def test_of_two_claims_of_a_number_the_first_holds(store: Store) -> None:
    mine, other = claim_of(2, token="mine"), claim_of(2, token="other")
    store.claim(mine)
    store.claim(mine)  # asked again: an answer may be lost
    with pytest.raises(FencedError):
        store.claim(other)
    with pytest.raises(FencedError):
        store.claim(claim_of(1))
    assert store.claimed() == 2
    store.claim(claim_of(3))
    assert store.claimed() == 3


def test_the_newest_claim_says_whose_the_run_is(store: Store) -> None:
    store.claim(claim_of(1, run_id="aaaaaaaaaaaa", location="file:///a"))
    store.claim(claim_of(2, run_id="bbbbbbbbbbbb", location="file:///b"))
    newest = store.newest_claim()
    assert (newest.attempt, newest.run_id, newest.location) == (2, "bbbbbbbbbbbb", "file:///b")


def test_the_highest_attempt_counts_claims_names_and_manifests(store: Store) -> None:
    """A run forked by copying a snapshot, or whose claims expired, does not begin at 1 again."""
    put(store, 5, attempt=3)
    assert (store.claimed(), store.survey().highest_attempt) == (0, 3)
    _write(store, f"{snapshot_name(6, 7)}/model.ckpt", b"not committed")
    assert store.survey().highest_attempt == 7
    store.claim(claim_of(9))
    assert store.survey().highest_attempt == 9


class Unlisted(LocalStore):
    """Answers to the listing of the run as if there was nothing."""

    def _names(self, below: str) -> list[str]:
        return super()._names(below) if below else []


def test_an_empty_listing_beside_claims_is_no_empty_run(tmp_path: Path) -> None:
    """A gateway's page, and an answer without a body, are read as an empty listing; the run began afresh."""
    store = LocalStore(tmp_path)
    put(store, 5)
    store.claim(claim_of(2))
    with pytest.raises(TierError):
        Unlisted(tmp_path).survey()


def test_parts_one_by_one(store: Store) -> None:
    manifest, data = snapshot(4)
    stored = store.put_parts(replace(manifest, checksums=()), parts_of(data), attempt=1)
    assert stored.checksums == manifest.checksums
    assert store.has(stored)
    assert fetched(store, stored) == data


@pytest.mark.parametrize("announced", [900, 1200])
def test_parts_that_are_not_what_was_announced(store: Store, announced: int) -> None:
    manifest, data = snapshot(4)
    with pytest.raises(SpotError):
        store.put_parts(replace(manifest, checksums=(), nbytes=announced), parts_of(data), attempt=1)
    assert store.survey().manifests == []
    assert _there(store) == []


def test_a_source_of_parts_that_fails(store: Store) -> None:
    manifest, data = snapshot(4)

    def parts() -> Iterator[memoryview]:
        yield memoryview(data)[:256]
        raise SnapshotFailedError("changed meanwhile", reason=FailureReason.TORN)

    with pytest.raises(SnapshotFailedError, check=FailureReason.TORN.caused):
        store.put_parts(replace(manifest, checksums=()), parts(), attempt=1)
    assert store.survey().manifests == []
    put(store, 5)


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_an_earlier_attempt_does_not_overwrite_a_later_ones_file(store: Store) -> None:
    """A dead trainer's server put an older ``last.ckpt`` over a newer one, seconds later."""
    newer = put(store, 9, attempt=2, name="last.ckpt", file="")
    older, data = snapshot(7, attempt=1, name="last.ckpt", file="")
    with pytest.raises(FencedError):
        store.put(older, memoryview(data), attempt=1)
    assert fetched(store, newer) == snapshot(9)[1]


@pytest.mark.parametrize("store", WITH_SERVER, indirect=True)
def test_a_file_of_a_users_own(store: Store) -> None:
    manifest = put(store, 7, name="epoch=3-step=7.ckpt", file="")
    assert store.survey().manifests == []  # it is no snapshot that a run resumes from by itself
    assert fetched(store, manifest) == snapshot(7)[1]
    store.delete(manifest)
    with pytest.raises(SpotError):
        fetched(store, manifest)


def test_retention_leaves_what_is_newer_and_what_cannot_be_read(store: Store) -> None:
    for step in (1, 2, 3, 8):
        put(store, step)
    _write(store, f"{snapshot_name(2, 1)}/{MANIFEST_FILE}", b"garbage")
    _write(store, f"{snapshot_name(4, 1)}/{MANIFEST_FILE}", b'{"format": 99}')
    retain(store, Keep(newest=1), put(store, 5))
    found = store.survey()
    assert [manifest.step for manifest in found.manifests] == [8, 5]
    assert set(found.unreadable) == {snapshot_name(2, 1), snapshot_name(4, 1)}
    assert "upgrade" in found.unreadable[snapshot_name(4, 1)]


def test_retention_deletes_nothing_where_the_newest_is_missing(store: Store) -> None:
    store.claim(claim_of(1))
    for step in (1, 2, 3):
        put(store, step)
    assert "is not listed there at once: nothing older is deleted" in retain(store, Keep(newest=1), snapshot(9)[0])
    assert "is not seen there as it was written" in retain(
        store, Keep(newest=1), replace(snapshot(3)[0], created_unix_s=9.0)
    )
    assert [manifest.step for manifest in store.survey().manifests] == [3, 2, 1]
    assert retain(store, Keep(newest=3), snapshot(3)[0]) == ""


def _write(store: Store, below: str, data: bytes) -> None:
    files, root = fsspec.core.url_to_fs(store.url)
    if isinstance(store, LocalStore):
        files.makedirs(f"{root}/{below}".rpartition("/")[0], exist_ok=True)
    files.pipe_file(f"{root}/{below}", data)


def test_what_a_crash_left_does_not_count_and_is_swept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spot.store.store.SETTLED_S", 0.0)
    _write(store, f"{snapshot_name(1, 1)}/model.ckpt", b"half")
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        _write(store, f"{snapshot_name(3, 1)}/{name}", b"half")
    _write(store, f"{snapshot_name(9, 1)}/model.ckpt", b"under way")
    _write(store, f"{snapshot_name(2, 1)}/{MANIFEST_FILE}", b'{"format": 1, "na')
    newest = put(store, 5)
    assert [manifest.step for manifest in store.survey().manifests] == [5]
    retain(store, Keep(newest=1), newest)
    left = {path.split("/")[-2] for path in _there(store) if path.endswith(("model.ckpt", "meta.pt", "distcp", "data"))}
    assert left == {newest.name, snapshot_name(9, 1)}  # what is newer may be on its way


@pytest.mark.parametrize("store", ["kept"], indirect=True)
def test_a_sweep_of_a_bucket_lists_what_is_unfinished_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a policy that keeps hundreds of snapshots, the first sweep of each attempt listed all of them."""
    for step in (1, 2, 4):
        put(store, step)
    _write(store, f"{snapshot_name(3, 1)}/model.ckpt", b"half")
    listed, ls = list[str](), Kept.ls

    def noted(files: Kept, path: str, **more: Any) -> Any:
        listed.append(path.rpartition("/")[2])
        return ls(files, path, **more)

    monkeypatch.setattr(Kept, "ls", noted)
    store.sweep(put(store, 5, attempt=2))
    assert {name for name in listed if name.startswith("step-")} == {snapshot_name(3, 1)}


def test_a_sweep_touches_nothing_that_it_does_not_understand(store: Store) -> None:
    """Uncommitted and older, of an earlier attempt: ours goes, what holds anything else stays as it is."""
    ours, with_more, unreadable = (snapshot_name(step, 1) for step in (1, 2, 3))
    stay = [f"{with_more}/model.ckpt", f"{with_more}/notes.txt", f"{unreadable}/{MANIFEST_FILE}"]
    stay += [f"{unreadable}/model.ckpt", "step-1/model.ckpt", "notes.txt", "logs/model.ckpt", "attempts/mine.txt"]
    stay += [f"{snapshot_name(1, 3)}/model.ckpt"]  # of a later attempt
    for below in (f"{ours}/model.ckpt", *stay):
        _write(store, below, b"?")
    retain(store, Keep(newest=1), put(store, 5, attempt=2))
    assert set(stay) <= {*_there(store)}
    assert f"{ours}/model.ckpt" not in _there(store)


def test_a_delete_leaves_what_others_put_beside(store: Store) -> None:
    manifest = put(store, 5)
    _write(store, f"{manifest.name}/notes.txt", b"mine")
    store.delete(manifest)
    assert _there(store) == [f"{manifest.name}/notes.txt"]


def test_claims_and_records_of_old_attempts_are_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_spot.store.fences.KEPT_ATTEMPTS", 3)
    for attempt in range(1, 7):
        store.claim(claim_of(attempt))
        _write(store, f"attempts/attempt-{attempt:04d}.progress.json", b"{}")
    store.sweep(put(store, 5, attempt=6))
    left = [path.rpartition("/")[2] for path in _there(store) if path.startswith("attempts/")]
    assert left == sorted(f"attempt-{attempt:04d}{end}" for attempt in (4, 5, 6) for end in (".json", ".progress.json"))
    assert store.claimed() == 6
    _write(store, "attempts/attempt-900000.progress.json", b"{}")  # of no attempt of this run
    store.sweep(put(store, 6, attempt=6))
    assert store.claimed() == 6, "a stray record made all claims old, and they were removed"


@pytest.fixture
def dead_writer() -> Callable[[], str]:
    """Gives the name that a process which has ended gave its temporary."""
    naming = "from lightning_spot.store import posix; print(posix.temporary_name(7, 'aaaaaaaaaaaa'), end='')"
    gone = subprocess.run([sys.executable, "-c", naming], check=True, capture_output=True, text=True)
    return lambda: gone.stdout


def test_no_writer_counts_as_ended_if_proc_is_another_namespaces(
    dead_writer: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below ``unshare --pid`` alone: a living process of ours is not listed there."""
    assert posix.writer_has_ended(dead_writer())
    read = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else read(path))
    assert not posix.writer_has_ended(dead_writer())


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_only_leftovers_of_killed_file_writers_are_swept(
    store: Store, dead_writer: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder where other processes save, too, an attempt says nothing of who lives."""
    mine = put(store, 1, name="mine.ckpt", file="")
    dead = [f"{folder}{dead_writer()}" for folder in ("", ".lightning_spot/")]
    lives = [f"{folder}{posix.temporary_name(1, 'aaaaaaaaaaaa')}" for folder in ("", ".lightning_spot/")]
    elsewhere = f".lightning-spot-tmp-0007-aaaaaaaaaaaa-{'f' * 32}"  # of another machine
    others = ["mine.ckpt", "notes.txt", ".lightning_spot/mine.ckpt.manifest.json", ".lightning_spot/notes.txt"]
    for below in [*dead, *lives, elsewhere, "notes.txt", ".lightning_spot/notes.txt"]:
        _write(store, below, b"half")
    store.sweep_files(mine)
    assert _there(store) == sorted([*lives, elsewhere, *others])
    monkeypatch.setattr("lightning_spot.store.store.SETTLED_S", 0.0)
    store.sweep_files(put(store, 2, name="mine.ckpt", file=""))
    assert _there(store) == sorted(others)
    store.delete(replace(snapshot(1)[0], name="mine.ckpt", file=""))
    assert _there(store) == [".lightning_spot/notes.txt", "notes.txt"]


@pytest.mark.parametrize("store", ["local", "kept"], indirect=True)
def test_a_clock_that_is_ahead_sweeps_nothing_that_lives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that another host of the run was writing seemed old to one whose clock was two hours ahead."""
    written = [f"{snapshot_name(4, 1)}/model.ckpt", f".lightning-spot-tmp-0001-aaaaaaaaaaaa-{'f' * 32}"]
    for below in written:
        _write(store, below, b"half")
    real_s = time.time
    monkeypatch.setattr(time, "time", lambda: real_s() + 7200)
    store.sweep_files(put(store, 1, name="mine.ckpt", file=""))
    store.sweep(put(store, 5))
    assert set(written) <= {*_there(store)}


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_leftovers_of_any_killed_writer_are_swept_at_once(store: Store, dead_writer: Callable[[], str]) -> None:
    """A trainer's claim has no run's name yet; the server that comes in a killed one's place is of the same attempt."""
    put(store, 4, attempt=7)
    claim = dead_writer().replace("-aaaaaaaaaaaa-", "--")
    dead = [f"attempts/{claim}", dead_writer(), f"{snapshot_name(4, 7)}/{dead_writer()}"]
    lives = [f"attempts/{posix.temporary_name(7, '')}"]
    for below in (*dead, *lives):
        _write(store, below, b"half")
    store.sweep(put(store, 5, attempt=7, run_id="aaaaaaaaaaaa"))
    left = [below for below in _there(store) if posix.temporary_owner(below.rpartition("/")[2]) is not None]
    assert left == lives


def test_a_deletion_spares_files_written_after_it_was_requested(store: Store) -> None:
    old = put(store, 1, name="x.ckpt", file="", run_id="aaaaaaaaaaaa")
    new = put(store, 2, name="x.ckpt", file="", run_id="aaaaaaaaaaaa", attempt=2)
    store.delete(old)
    assert store.has(new)
    store.delete(new)
    assert _there(store) == []


def _there(store: Store) -> list[str]:
    """Every file of a store, below its root."""
    files, root = fsspec.core.url_to_fs(store.url)
    files.invalidate_cache()
    return sorted(path.removeprefix(f"{root}/") for path in files.find(root))


def test_local_store_says_what_the_system_said(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(TierError, match=os.strerror(errno.ENOTDIR)):
        put(LocalStore(blocker / "run"), 1)


def test_a_full_disk_is_left_with_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for long would have one for each snapshot. What others have in such a folder stays."""
    root = tmp_path / "run"
    store = LocalStore(root)
    first = put(store, 1)
    kept = root / snapshot_name(3, 1) / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("kept")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_spot.store.posix.write_parts", fail)
    for step in (2, 3):
        manifest, data = snapshot(step)
        for write in (
            lambda manifest, data: store.put(manifest, data, attempt=1),
            lambda manifest, data: store.put_parts(replace(manifest, checksums=()), iter([data]), attempt=1),
            lambda manifest, data: store.folder(manifest.name, attempt=1, run_id="a" * 12).write("meta.pt", data),
        ):
            with pytest.raises(TierError, match=os.strerror(errno.ENOSPC)):
                write(manifest, memoryview(data))
    monkeypatch.undo()
    assert store.survey().manifests == [first]
    assert not (root / snapshot_name(2, 1)).exists()
    assert kept.read_text() == "kept"


@pytest.mark.parametrize("nbytes", [1000, 12 * 2**20], ids=["one-request", "in-parts"])
def test_the_same_snapshot_once_more_is_durable_all_the_time(
    nbytes: int, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was restarted while it sent one on does not know that it is there already."""
    store = ObjectStore(f"{s3}/run-again-{nbytes}")
    manifest, data = snapshot(1, nbytes=nbytes, part_bytes=2**20)
    store.put(manifest, memoryview(data), attempt=1)
    removed: list[str] = []
    monkeypatch.setattr(s3fs.S3FileSystem, "rm_file", lambda _fs, path: removed.append(path))
    assert store.put_parts(replace(manifest, checksums=()), parts_of(data, 2**20), attempt=1) == manifest
    assert removed == []
    assert fetched(store, manifest) == data
