"""Shards of a snapshot at storage: whoever sees all notes commits it, and nothing of an aborted one stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_spot.client.stores import open_store
from lightning_spot.errors import CorruptSnapshotError, FencedError, SnapshotFailedError, TierError
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.snapshot.files import MODEL_FILE, is_note, note_name
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, snapshot_name
from lightning_spot.snapshot.shards import Image, assemble
from lightning_spot.store import commit
from lightning_spot.store.commit import Look, Shard, commit_left, look, put_shards
from lightning_spot.store.fences import Claim, Owner, digest_of
from lightning_spot.store.store import Folder, Store
from tests.support.faulty import Plan, faulty_calls
from tests.support.oracle import claim_of
from tests.support.server import RUN_ID
from tests.support.shards import apart_shard, checkpoint_of, failed_shard, sealed_apart, sealed_shard, shard_image
from tests.support.store import Kept, fetched

pytestmark = pytest.mark.guarantee("G3")

WRITERS = 4
NAME = snapshot_name(1, 1)


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    where = str(tmp_path / "run") if request.param == "directory" else f"kept:/{tmp_path}/run"
    return open_store(where)


def shards_of(*writers: int, **fields: Any) -> list[Shard]:
    """Shards of a sharded model."""
    found = [sealed_apart(1, writer, WRITERS, **fields) for writer in writers]
    return [(each, memoryview(shard_image(each))) for each in found]


def ranges_of(*writers: int) -> list[Shard]:
    """Shards of a checkpoint of which each writer has a range, but the last one."""
    found = []
    for writer in writers:
        own = sealed_apart(1, writer, WRITERS)
        manifest = sealed_shard(1, writer, WRITERS - 1) if writer < WRITERS - 1 else own
        manifest = replace(manifest, shard=replace(manifest.shard, writers=WRITERS))
        found.append((manifest, memoryview(shard_image(manifest))))
    return found


def put_failed(store: Store, writer: int) -> Look:
    return put_shards(store, [(failed_shard(1, writer, WRITERS), memoryview(b""))], attempt=1)


def sizes(store: Store) -> dict[str, int]:
    return store.folder(NAME, attempt=1, run_id=RUN_ID).sizes()  # type: ignore[attr-defined, no-any-return]


# Rank 0's host has all ranges of a checkpoint.
PLACES = [(0, 1, 2), (3,)]


@pytest.mark.parametrize("shards", [shards_of, ranges_of])
@pytest.mark.parametrize("order", [PLACES, PLACES[::-1]], ids=["first host first", "first host last"])
def test_the_last_place_commits(store: Store, order: list[tuple[int, ...]], shards: Callable[..., list[Shard]]) -> None:
    found = Look()
    for place in order:
        assert found.manifest is None
        found = put_shards(store, shards(*place), attempt=1)
    assert found.manifest == assemble(each for each, _ in shards(*range(WRITERS)))
    assert store.has(found.manifest)
    assert set(sizes(store)) == {MANIFEST_FILE, *(span.name for span in found.manifest.files)}
    image = fetched(store, found.manifest)
    if shards is ranges_of:
        span = found.manifest.span_of(MODEL_FILE)
        assert bytes(image[span.offset : span.stop]) == checkpoint_of(1, WRITERS - 1)
    for place in order:  # once more
        assert put_shards(store, shards(*place), attempt=1).manifest == found.manifest


def test_no_note_stays_beside_a_manifest(store: Store) -> None:
    """A place that has all shards of a snapshot stores it as one."""
    shards = shards_of(*range(WRITERS))
    put_shards(store, shards[:2], attempt=1)
    whole = assemble(each for each, _ in shards)
    store.put(whole, memoryview(b"".join(bytes(image[:]) for _, image in shards)), attempt=1)
    assert not any(map(is_note, sizes(store)))
    folder = store.folder(NAME, attempt=1, run_id=RUN_ID)  # type: ignore[attr-defined]
    folder.write(note_name(2), memoryview(shards[2][0].to_json().encode()))  # of one that looked before that
    assert put_shards(store, shards[2:], attempt=1).manifest == whole
    assert not any(map(is_note, sizes(store)))


def test_a_snapshot_is_committed_though_notes_stay(tmp_path: Path) -> None:
    store, shards = open_store(str(tmp_path)), shards_of(*range(WRITERS))
    put_shards(store, shards[:2], attempt=1)
    whole = assemble(each for each, _ in shards)
    with faulty_calls(Plan("EIO", span=0, only=("unlink",)), tmp_path):
        store.put(whole, memoryview(b"".join(bytes(image[:]) for _, image in shards)), attempt=1)
    assert store.has(whole)


def test_ranges_wait_for_a_place_that_has_all_of_them(store: Store) -> None:
    assert put_shards(store, ranges_of(1, 2, 3), attempt=1).manifest is None
    assert MODEL_FILE not in sizes(store)
    noted = look(store, NAME).notes.values()
    assert [each.snapshot for each in noted] == [NAME]  # that of the last one, which has none
    assert put_shards(store, ranges_of(0, 1, 2), attempt=1).manifest is not None


def test_one_that_failed_takes_back_what_others_brought(store: Store) -> None:
    put_shards(store, shards_of(0, 1, 2), attempt=1)
    assert "rank 3" in put_failed(store, 3).why_aborted
    assert note_name(0) in sizes(store)
    for _ in range(2):
        assert "rank 3" in put_shards(store, shards_of(0, 1), attempt=1).why_aborted
        noted = {name for name in sizes(store) if is_note(name)}
        assert noted == {*(note_name(writer, failed=True) for writer in (0, 1, 3)), note_name(2)}
    assert commit_left(store, NAME).manifest is None
    assert "rank" in put_shards(store, shards_of(2), attempt=1).why_aborted
    assert sizes(store) == {}  # no place is left that has not seen it


@pytest.fixture
def left(store: Store, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """All shards are there, and nobody is left to commit the snapshot."""
    with monkeypatch.context() as broken:
        broken.setattr(commit, "assemble", _fails)
        with pytest.raises(TierError):
            put_shards(store, shards_of(*range(WRITERS)), attempt=1)
    assert len(look(store, NAME).notes) == WRITERS
    return assemble(each for each, _ in shards_of(*range(WRITERS)))


def test_what_nobody_is_left_to_commit_is_committed_by_who_looks(store: Store, left: Manifest) -> None:
    assert look(store, NAME).manifest is None
    assert commit_left(store, NAME).manifest == left
    assert look(store, NAME).manifest == left
    assert note_name(0) not in sizes(store)


def test_a_failure_counts_whatever_else_its_writer_has(store: Store, left: Manifest) -> None:
    folder = store.folder(NAME, attempt=1, run_id=RUN_ID)  # type: ignore[attr-defined]
    folder.write(note_name(3, failed=True), memoryview(failed_shard(1, 3, WRITERS).to_json().encode()))
    assert look(store, NAME).why_aborted
    assert commit_left(store, NAME).manifest is None
    assert not store.has(left)


def test_strangers_notes_cost_no_more_than_some_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the bucket makes no resume read gigabytes, or thousands of objects."""
    store, sizes_read, read = open_store(str(tmp_path / "run")), list[int](), Folder.read
    put_shards(store, shards_of(*range(WRITERS - 1)), attempt=1)
    for number in range(200, 500):
        (tmp_path / "run" / NAME / note_name(number, failed=True)).write_text("{}")
    for number in range(10, 20):
        with open(tmp_path / "run" / NAME / note_name(number), "wb") as file:
            file.truncate(60 * 2**20)

    def counted(folder: Folder, name: str) -> bytes:
        data = read(folder, name)
        sizes_read.append(len(data))
        return data

    monkeypatch.setattr(Folder, "read", counted)
    assert len(look(store, NAME).notes) == WRITERS - 1
    assert sum(sizes_read) <= 128 * 2**20
    assert len(sizes_read) < 100


def test_who_cannot_write_there_knows_that_all_of_it_is_there(
    store: Store, left: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, method in ((type(store), "note"), (Folder, "write_all"), (Folder, "remove")):
        monkeypatch.setattr(owner, method, _fails)
    assert commit_left(store, NAME).manifest == left


def test_damaged_bytes_leave_nothing(store: Store) -> None:
    shards = shards_of(*range(WRITERS))
    shards[2][1][5] ^= 1  # type: ignore[index]
    with pytest.raises(CorruptSnapshotError):
        put_shards(store, shards, attempt=1)
    assert sizes(store) == {}


def test_what_is_damaged_while_it_is_written_is_not_committed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, write_all = shards_of(*range(WRITERS)), Folder.write_all

    def damaging(folder: Folder, contents: Mapping[str, Image]) -> None:
        shards[2][1][5] ^= 1  # type: ignore[index]
        write_all(folder, contents)

    monkeypatch.setattr(Folder, "write_all", damaging)
    with pytest.raises(CorruptSnapshotError):
        put_shards(store, shards, attempt=1)
    assert sizes(store) == {}


def test_shards_that_do_not_fit_are_no_snapshot(store: Store) -> None:
    put_shards(store, shards_of(0, 1, 2), attempt=1)
    with pytest.raises(SnapshotFailedError):
        put_shards(store, shards_of(3, lineage="2" * 12), attempt=1)
    assert look(store, NAME).manifest is None
    seen = survey(Location.of(store.url, local_server=False))
    assert seen.durable is not None  # a resume that commits what was left finds the others all the same
    assert seen.durable.manifests == []


def test_of_shards_that_do_not_fit_on_a_disk_none_stays(tmp_path: Path) -> None:
    """What stayed of each snapshot kept a full disk full."""
    for at in range(1, 30):
        store, shards = open_store(str(tmp_path / str(at))), shards_of(0, 1, 2)
        fault = Plan("ENOSPC", at=at, span=0, only=("fsync",))
        with faulty_calls(fault, tmp_path / str(at)), contextlib.suppress(TierError):
            put_shards(store, shards, attempt=1)
        there = {span.name in sizes(store) for each, _ in shards for span in each.files}
        assert len(there) == 1, f"some of them stay, at {at}"
        if not fault.struck:
            assert at > 3
            return
    raise AssertionError("it does not end")


def test_a_later_attempt_fences(store: Store) -> None:
    store.claim(Claim(attempt=2, run_id=RUN_ID))
    with pytest.raises(FencedError):
        put_shards(store, shards_of(*range(WRITERS)), attempt=1)
    assert sizes(store) == {}


@pytest.mark.parametrize("when", ["before the manifest", "with the manifest"])
def test_the_loser_of_two_starts_leaves_nothing_to_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its number is taken when all of a snapshot is there; the next start committed it."""
    store = open_store(f"kept:/{tmp_path}/run")
    store.claim(claim_of(1, token="mine", run_id=RUN_ID))
    store.owner = Owner(1, digest_of("mine"))
    put_shards(store, shards_of(0, 1, 2), attempt=1)
    pipe, write_all = Kept.pipe_file, Folder.write_all

    def taken() -> None:
        monkeypatch.undo()
        files, root = fsspec.core.url_to_fs(store.url)
        files.pipe_file(
            f"{root}/attempts/attempt-0001.json", claim_of(1, token="other", run_id=RUN_ID).to_json().encode()
        )

    def noted(self: Folder, contents: Mapping[str, Image]) -> None:
        write_all(self, contents)
        if any(map(is_note, contents)):
            taken()

    def committed(self: Kept, path: str, value: bytes, **more: Any) -> None:
        pipe(self, path, value, **more)
        if path.endswith(MANIFEST_FILE):
            taken()

    patched = (Folder, "write_all", noted) if when == "before the manifest" else (Kept, "pipe_file", committed)
    monkeypatch.setattr(*patched)
    with pytest.raises(FencedError):
        put_shards(store, shards_of(3), attempt=1)
    assert not any(map(is_note, sizes(store)))
    assert open_store(store.url).survey().manifests == []
    assert commit_left(open_store(store.url), NAME).manifest is None


@pytest.mark.parametrize("left", ["a file", "a note", "a note over ours"])
def test_shards_of_two_starts_are_not_mixed(tmp_path: Path, left: str) -> None:
    """Where a claim takes another one's place, both starts have the same names, and files of the same sizes."""
    store = open_store(f"kept:/{tmp_path}/run")
    store.claim(claim_of(1, token="mine", run_id=RUN_ID))
    store.owner = Owner(1, digest_of("mine"))
    folder = store.folder(NAME, attempt=1, run_id=RUN_ID)  # type: ignore[attr-defined]
    if left == "a note over ours":
        put_shards(store, shards_of(0, 1), attempt=1)
    manifest, image = _of_another_start(0)
    folder.write_all({span.name: image[span.offset : span.stop] for span in manifest.files})
    if left != "a file":
        folder.write(note_name(0), memoryview(manifest.to_json().encode()))
    found = put_shards(store, shards_of(*range(WRITERS)), attempt=1).manifest
    assert found == assemble(each for each, _ in shards_of(*range(WRITERS)))
    assert fetched(store, found)


def _of_another_start(writer: int) -> Shard:
    manifest = apart_shard(1, writer, WRITERS)
    image = shard_image(manifest)
    for span in manifest.files:
        image[span.offset : span.stop] = image[span.offset : span.stop][::-1]
    return manifest.sealed(memoryview(image)), memoryview(image)


def _fails(*_: Any, **__: Any) -> Any:
    raise TierError("the tier fails")
