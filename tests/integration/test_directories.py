"""A run in a directory: links, names like patterns, what cannot be read, what others put there, starts after many."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import CorruptSnapshotError, FencedError, SpotError, TierError
from lightning_spot.goodput.ledger import AttemptRecord, account_after
from lightning_spot.goodput.records import newest_record
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import MANIFEST_FILE, snapshot_name
from lightning_spot.snapshot.parts import verify_file
from lightning_spot.store.fences import claim_name, digest_of
from lightning_spot.store.local import LocalStore
from lightning_spot.store.posix import temporary_name
from lightning_spot.store.retention import Keep, retain
from lightning_spot.store.store import Holdings
from tests.integration.test_stores import fetched, put, snapshot
from tests.support import faulty
from tests.support.faulty import Plan, faulty_calls
from tests.support.oracle import claim_of

pytestmark = pytest.mark.guarantee("G14")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "garbage": lambda path: path.write_text('{"format": 2, "na'),
    "newer": lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99})),
    "loop": lambda path: (path.unlink(), path.symlink_to(path)),
    "link to nowhere": lambda path: (path.unlink(), path.symlink_to(path.parent / "not-there")),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "another's": lambda path: path.write_text(snapshot(77)[0].to_json()),
}


@pytest.mark.parametrize("spoil", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_manifest_is_named_and_hides_no_other(store: LocalStore, spoil: Callable[[Path], object]) -> None:
    good, bad = put(store, 1), put(store, 2)
    spoil(store.root / bad.manifest_path)
    found = store.survey()
    assert found.manifests == [good]
    assert list(found.unreadable) == [bad.name]
    assert found.unreadable[bad.name]
    retain(store, Keep(newest=1), put(store, 5))
    assert os.path.lexists(store.root / bad.manifest_path), "what could not be read was deleted"
    assert (store.root / bad.data_path).exists()


@pytest.mark.parametrize("kind", ["EIO", "EACCES", "ESTALE"])
def test_a_disk_that_fails_for_one_manifest(store: LocalStore, kind: str) -> None:
    """One EIO on one manifest made the run start at step 0."""
    put(store, 1)
    put(store, 2)
    calls = Plan()
    with faulty_calls(calls, store.root / snapshot_name(2, 1)):
        store.survey()
    for at in range(1, calls.calls + 1):
        with faulty_calls(Plan(kind, at=at, span=0), store.root / snapshot_name(2, 1)):
            found = store.survey()
        assert [manifest.step for manifest in found.manifests] == [1]
        assert list(found.unreadable) == [snapshot_name(2, 1)]
        with faulty_calls(Plan("EIO", at=at), store.root / snapshot_name(2, 1)):
            assert [manifest.step for manifest in store.survey().manifests] == [2, 1], "once is tried again"


@pytest.mark.parametrize("method", ["survey", "claimed", "newest_claim"])
@pytest.mark.parametrize("kind", ["EIO", "EACCES", "ESTALE"])
def test_what_cannot_be_listed_is_an_error_and_not_empty(store: LocalStore, method: str, kind: str) -> None:
    store.claim(claim_of(1))
    put(store, 1)
    with faulty_calls(Plan(kind, span=0, only=("listdir",)), store.root), pytest.raises(TierError):
        getattr(store, method)()


def test_a_link_that_leads_nowhere_is_an_error_and_not_empty(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "not-mounted" / "run")
    store = LocalStore(tmp_path / "run")
    with pytest.raises(TierError, match=re.escape(str(tmp_path / "run"))):
        store.survey()
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError):
        LocalStore(tmp_path / "file").survey()
    assert LocalStore(tmp_path / "nothing").survey() == Holdings()


def test_claims_that_are_all_damaged_are_an_error_and_not_none(store: LocalStore) -> None:
    for attempt in (1, 2):
        store.claim(claim_of(attempt, run_id=f"run{attempt}"))
    (store.root / "attempts" / "attempt-0002.json").write_text("")  # killed where there are no hard links
    newest = store.newest_claim()
    assert newest.run_id == "run1"
    assert store.claimed() == 2
    (store.root / "attempts" / "attempt-0001.json").write_text("{")
    with pytest.raises(SpotError):
        store.newest_claim()


def test_a_linked_run_is_used_but_links_in_it_are_not_followed(tmp_path: Path) -> None:
    real = tmp_path / "large-disk" / "run"
    real.mkdir(parents=True)
    (tmp_path / "run").symlink_to(real)
    store = LocalStore(tmp_path / "run")
    moved = put(store, 1)
    (tmp_path / "archive").mkdir()
    os.rename(real / moved.name, tmp_path / "archive" / moved.name)
    (real / moved.name).symlink_to(tmp_path / "archive" / moved.name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.ckpt").write_text("not ours")
    (real / snapshot_name(2, 1)).symlink_to(tmp_path / "elsewhere")
    assert [manifest.step for manifest in store.survey().manifests] == [1]
    assert fetched(store, moved) == snapshot(1)[1]
    retain(store, Keep(newest=1), put(store, 5, attempt=2, by=2))
    store.delete(moved)
    assert sorted(path.name for path in (tmp_path / "archive" / moved.name).iterdir()) == [MANIFEST_FILE, "model.ckpt"]
    assert (tmp_path / "elsewhere" / "model.ckpt").read_text() == "not ours"
    with pytest.raises(TierError, match=snapshot_name(2, 1)):
        put(store, 2)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_of_two_claims_at_once_the_first_holds(store: LocalStore, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """The other one comes when this one has seen that the number is free."""
    real = os.link

    def link(*paths: Any) -> None:
        monkeypatch.setattr(os, "link", real if links else none)
        LocalStore(store.root).claim(claim_of(1, token="first"))
        os.link(*paths)

    def none(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(FencedError):
        store.claim(claim_of(1, token="second"))
    assert store.newest_claim().digest == digest_of("first")


def test_temporaries_of_killed_writers_are_swept_and_no_others(store: LocalStore) -> None:
    store.claim(claim_of(1))
    current = put(store, 5, attempt=3, by=3, run_id="aaaaaaaaaaaa")
    folders = [store.root, store.root / "attempts", store.root / current.name]
    dead = [folder / temporary_name(2, "aaaaaaaaaaaa") for folder in folders]
    live = [folder / temporary_name(3, "aaaaaaaaaaaa") for folder in folders]
    of_another_run = [store.root / temporary_name(1, "bbbbbbbbbbbb")]
    old = [store.root / temporary_name(1, "bbbbbbbbbbbb"), store.root / ".lightning-spot-tmp-of-another-version"]
    for path in (*dead, *live, *of_another_run, *old):
        path.write_text("half")
    for path in old:
        os.utime(path, (1.0, 1.0))
    store.sweep(current)
    assert not [path for path in (*dead, *old) if path.exists()]
    assert all(path.exists() for path in (*live, *of_another_run))


def test_a_snapshot_that_is_being_written_is_not_swept(store: LocalStore) -> None:
    """Two servers may write for one attempt for a moment, when one hands over to the other."""
    folder = store.root / snapshot_name(4, 1)
    folder.mkdir(parents=True)
    (folder / "model.ckpt").write_bytes(b"about to be committed")
    current = put(store, 5)
    store.sweep(current)
    assert (folder / "model.ckpt").exists()
    for path in (folder / "model.ckpt", folder):
        os.utime(path, (1.0, 1.0))
    store.sweep(current)
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["EIO", "short"])
def test_verification_reads_so_that_a_failing_disk_is_an_error(store: LocalStore, kind: str) -> None:
    """Through a mapping it was a SIGBUS, which ends the process."""
    manifest = put(store, 1)
    fd = os.open(store.root / manifest.data_path, os.O_RDONLY)
    try:
        with faulty_calls(Plan(kind, at=2, only=("preadv",)), store.root):
            fails = pytest.raises(TierError, match=os.strerror(errno.EIO))
            with contextlib.nullcontext() if kind == "short" else fails:
                verify_file(fd, manifest.nbytes, manifest.checksums, manifest.part_bytes, "here")
        os.truncate(store.root / manifest.data_path, manifest.nbytes - 1)
        with pytest.raises(CorruptSnapshotError, check=lambda error: error.part is None):
            verify_file(fd, manifest.nbytes, manifest.checksums, manifest.part_bytes, "here")
        assert not store.has(manifest)
    finally:
        os.close(fd)
    put(store, 1)
    assert fetched(store, manifest) == snapshot(1)[1]


@pytest.mark.parametrize("is_first", [True, False], ids=["first save", "later save"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_save_that_fails_leaves_a_file_that_is_known_as_ours(tmp_path: Path, call: str, is_first: bool) -> None:
    """Where the file was there and its manifest was not, a server refused all later saves and the deletion."""
    for at in range(1, 20):
        store, fault = LocalStore(tmp_path / str(at)), Plan("EIO", at=at, span=1, only=(call,))
        first = put(store, 1, name="last.ckpt", file="") if not is_first else None
        second, image = snapshot(2, name="last.ckpt", file="")
        with faulty_calls(fault, store.root), contextlib.suppress(TierError):
            store.put(second, memoryview(image), attempt=1)
        held = (tmp_path / str(at) / "last.ckpt").read_bytes() if store._size("last.ckpt") is not None else None
        assert held in (image, snapshot(1)[1] if first is not None else None), "the file is not whole"
        assert not store.has(second) or held == image
        assert first is None or not store.has(first) or held != image
        lent = LocalStore(store.url, beneath=[str(tmp_path)])
        third = put(lent, 3, name="last.ckpt", file="")
        assert fetched(lent, third) == snapshot(3)[1]
        lent.delete(third)
        assert store._size("last.ckpt") is None
        if not fault.struck:
            assert at > 3
            return
    raise AssertionError("it does not end")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_of_several_files_that_do_not_fit_none_stays(store: LocalStore, call: str) -> None:
    """What stayed kept the disk full, so that no later snapshot was stored, where there had been room again."""
    manifest, image = snapshot(1)
    several = replace(manifest, files=(FileSpan("__0_0.distcp", 0, 9), FileSpan("__1_0.distcp", 9, len(image) - 9)))
    with faulty_calls(Plan("ENOSPC", at=1 if call == "replace" else 2, only=(call,)), store.root):
        with pytest.raises(TierError):
            store.put(several, memoryview(image), attempt=1)
    assert not (store.root / several.name).exists()
    store.put(several, memoryview(image), attempt=1)
    assert fetched(store, several) == image


# -- an attempt after many --------------------------------------------------------------------------------------------


def test_the_thousandth_attempt_starts_like_the_second(tmp_path: Path) -> None:
    """The record of each attempt was read, one after another: 500 at 50 ms were 25 s before training began."""
    calls = {}
    for attempts in (1, 1000):
        earlier(root := tmp_path / f"after-{attempts}", attempts)
        read = faulty.use(Plan())
        assert survey(Location.of(f"faulty-objects:/{root}", local_server=False)).claim.attempt == attempts
        newest = newest_record(f"faulty-objects:/{root}", before=attempts + 1)
        calls[attempts] = read.calls
    assert calls[1000] <= calls[1] + 2, calls
    assert account_after(newest).count == 1000


def earlier(root: Path, attempts: int) -> None:
    """Claims and records of attempts of 10 s each, each carrying on what was before it."""
    (root / "attempts").mkdir(parents=True)
    begun_s, previous = time.time() - 10.0 * attempts, None
    for number in range(1, attempts + 1):
        at_s = begun_s + 10.0 * (number - 1)
        claim = claim_of(number, run_id="0123456789ab", location=f"faulty-objects:/{root}")
        (root / "attempts" / claim_name(number)).write_text(claim.to_json())
        previous = AttemptRecord(
            attempt=number, begun_unix_s=at_s, trained_unix_s=at_s + 1, from_step=number, step=number + 1,
            unix_s=at_s + 9, restore_s=0.25, earlier=account_after(previous),
        )  # fmt: skip
        path = root / "attempts" / f"attempt-{number:04d}.progress.json"
        path.write_text(json.dumps(asdict(previous)) if number >= attempts - 3 else "{}")  # it takes its time


def test_what_is_carried_on_is_bounded_and_adds_up(tmp_path: Path) -> None:
    earlier(tmp_path / "run", 300)
    newest = newest_record(str(tmp_path / "run"), before=300)
    assert newest.attempt == 299
    account = account_after(newest)
    assert account.count == 299
    assert len(account.latest) == 64
    whole = account.spent(None)
    assert whole.total_s == pytest.approx(299 * 10.0 - 1.0)
    assert (whole.restore_s, whole.startup_s) == (pytest.approx(0.25 * 299), pytest.approx(0.75 * 299))
    assert whole.down_s == pytest.approx(298.0)
    assert len(json.dumps(asdict(newest))) < 50_000
