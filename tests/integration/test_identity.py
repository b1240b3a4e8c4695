"""Which run, which attempt, which lineage: two runs are never taken for one, and no restart goes back."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.stores import open_store
from lightning_spot.config import HIGHEST_ATTEMPT, MOST_SERVERS
from lightning_spot.errors import FencedError, SettingsError, TierError
from lightning_spot.run.attempts import ClaimWatch, begin_attempt
from lightning_spot.run.identity import JUMP, Identity, ServerRun, identify, new_id, next_attempt
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.runs import RunInfo, refusal
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.fences import Claim
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep, retain
from tests.support.ranks import RING
from tests.support.said import said
from tests.support.server import StartServer
from tests.support.snapshots import serverless
from tests.support.trainer import At, Net, Probe, Stop, StopAt, data, trainer
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G4")

HERE = "file:///data/run-1"


def claim(**more: Any) -> Claim:
    fields = {"attempt": 3, "run_id": "a" * 12, "digest": "t", "location": HERE, "started_unix_s": 0.0, "inode": 7}
    return Claim(**{**fields, **more})


def at_server(**more: Any) -> ServerRun:
    return ServerRun(**{"name": "run-1", "id": "b" * 12, "location": HERE, "attempt": 5, **more})


OLD = "file:///data/old"
IDENTITIES: dict[str, tuple[int, Claim | None, list[ServerRun], Identity]] = {
    "same": (7, claim(), [], Identity(run_id="a" * 12)),
    "restored": (9, claim(), [], Identity(run_id="a" * 12)),
    "moved": (7, claim(location=OLD), [], Identity(run_id="a" * 12)),
    "copied": (9, claim(location=OLD), [at_server()], Identity(run_id="new", copied_from=OLD)),
    "copied-object": (0, claim(location="s3://b/old", inode=0), [], Identity(run_id="new", copied_from="s3://b/old")),
    "claims-gone": (9, None, [at_server()], Identity(run_id="b" * 12)),
    "two-there": (9, None, [at_server(), at_server(id="c" * 12, attempt=8)], Identity(run_id="c" * 12)),
    "other-place": (9, None, [at_server(location="file:///data/run-2"), at_server(id="")], Identity(run_id="new")),
    "this-machine": (9, None, [at_server(host="me")], Identity(run_id="b" * 12)),
    "other-machine": (9, None, [at_server(host="other")], Identity(run_id="new", unsure=at_server(host="other"))),
    "nothing": (0, None, [], Identity(run_id="new")),
}


@pytest.mark.parametrize(("inode", "newest", "runs", "expected"), IDENTITIES.values(), ids=IDENTITIES)
def test_identity_is_in_the_claims_or_in_the_place(
    inode: int, newest: Claim | None, runs: list[ServerRun], expected: Identity
) -> None:
    found = identify(location=HERE, inode=inode, claim=newest, runs=runs, host="me", named=False, make_id=lambda: "new")
    assert found == expected


@pytest.mark.parametrize("spelled", ["s3a://b/team/run-1", "s3://b//team/run-1/", "S3://b/team//run-1//"])
def test_one_place_has_one_run_and_server_however_it_is_written(spelled: str) -> None:
    """It was taken for a copied run, and trained anew."""
    first, again = Location.of("s3://b/team/run-1"), Location.of(spelled)
    assert again == first
    assert refusal("s3a://b/team/run-1", ["s3://b/team"]) == ""
    assert Location.of("gcs://b/run-1", local_server=False) == Location.of("gs://b/run-1", local_server=False)


def test_a_run_may_have_as_many_servers_as_requests_have_room() -> None:
    servers = [f"spot://ip-10-0-{n}-12.eu-central-1.compute.internal:7070" for n in range(MOST_SERVERS + 1)]
    with pytest.raises(SettingsError, match=r"\b65\b.*\b64\b"):
        Location.of("/data/run-1", servers=servers)
    assert len(Location.of("/data/run-1", servers=servers[:-1]).servers) == MOST_SERVERS


def test_a_dirpath_is_what_an_object_of_the_file_system_names() -> None:
    class Folder:
        def __fspath__(self) -> str:
            return "/data/run-1"

    assert Location.of(Folder(), local_server=False).url == "/data/run-1"  # its str() named no folder of anybody's


def test_the_next_attempt_lies_above_all_that_was_seen() -> None:
    assert next_attempt([], durable_was_read=True) == 1
    assert next_attempt([2, 7, 3], durable_was_read=True) == 8
    assert next_attempt([2, 7, 3], durable_was_read=False) == 7 + JUMP


def snapshots(path: Path) -> list[Manifest]:
    return LocalStore(path).survey().manifests


def train(path: Path, stop: int | None = None, **more: Any) -> tuple[SpotCheckpoint, int]:
    """Train the run at ``path``; the callback, and the step it began at."""
    callback, probe = serverless(path, **more), Probe()
    run = trainer(callback, probe, *([StopAt(stop)] if stop is not None else []))
    if stop is not None:
        with pytest.raises(Stop):
            run.fit(Net(), data())
    else:
        run.fit(Net(), data())
    return callback, min(probe.states)


def run_ids(path: Path) -> set[str]:
    return {manifest.run_id for manifest in snapshots(path)}


def test_the_same_path_on_another_machine_is_another_run(tmp_path: Path, start_server: StartServer) -> None:
    """Two jobs in containers, each with a volume of its own at the same path, share a snapshot server."""
    server, path = start_server(), tmp_path / "run-1"
    other = RunInfo(name="run-1", id="b" * 12, location=f"file://{path}", attempt=4, token="t", host="another-machine")
    store = ServerStore(f"{server.url}/{other.text}")
    store.open_run(other)

    def spot(**more: Any) -> SpotCheckpoint:
        return SpotCheckpoint(str(path), interval=EverySteps(3), servers=server.url, notices=None, **more)

    for _ in range(2):  # the first refusal has not made it a run of its own
        with pytest.raises(SettingsError, match=r"run-1@b+.*another-machine.*run_name='run-1'.*resume=False"):
            trainer(spot()).fit(Net(), data())
    named = spot(run_name="run-1")
    with pytest.raises(Stop):
        trainer(named, StopAt(2)).fit(Net(), data())
    assert named.attempt == 5


def test_a_copied_directory_is_a_run_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run-1", 10)
    shutil.copytree(tmp_path / "run-1", tmp_path / "fork")
    fork, first = train(tmp_path / "fork", 20)
    assert (first, fork.attempt) == (9, 2)
    assert [facts["source"] for facts in said(caplog, "run-copied")] == [f"file://{tmp_path / 'run-1'}"]
    assert len(run_ids(tmp_path / "fork")) == 1
    assert run_ids(tmp_path / "fork").isdisjoint(run_ids(tmp_path / "run-1"))
    caplog.clear()
    assert train(tmp_path / "fork", 30)[1] == 18
    assert train(tmp_path / "run-1", 20)[1] == 9  # the fork did not fence it
    assert not said(caplog, "run-copied")


def test_a_moved_directory_is_the_same_run(tmp_path: Path) -> None:
    train(tmp_path / "run-1", 10)
    before = run_ids(tmp_path / "run-1")
    (tmp_path / "run-1").rename(tmp_path / "elsewhere")
    moved, first = train(tmp_path / "elsewhere", 20, run_name="run-1")
    assert (first, moved.attempt) == (9, 2)
    assert run_ids(tmp_path / "elsewhere") == before


def test_attempts_that_begin_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    found = survey(Location.of(str(tmp_path / "run-1"), local_server=False))

    def begin() -> RunInfo:
        own = replace(found, identity=replace(found.identity, run_id=new_id()))  # each has looked by itself
        host = InProcessHost(slots=2, memory_bytes=2**24, open_store=open_store)
        try:
            info, _ = begin_attempt(own, host, RING)
            assert info.id in [run["id"] for run in host._server.listed()]
            return info
        finally:
            host.leave(complete=True)

    begun = [begin() for _ in range(3)]
    assert [info.attempt for info in begun] == [1, 2, 3]  # all have seen the same
    assert len({info.id for info in begun}) == 1  # else snapshot servers would take them for three runs, and fence none
    store = LocalStore(tmp_path / "run-1")
    assert store.claimed() == 3
    newest = store.newest_claim()
    assert newest is not None
    with pytest.raises(FencedError):
        store.claim(replace(newest, digest="another"))


def test_an_unreadable_tier_leaves_a_gap_and_is_claimed_later(tmp_path: Path) -> None:
    path = tmp_path / "run-1"
    train(path, 7)
    found = replace(survey(Location.of(str(path), local_server=False)), claim=None, answers=[])
    host = InProcessHost(slots=2, memory_bytes=2**24, open_store=open_store)
    info, is_claimed = begin_attempt(found, host, RING)
    watch = ClaimWatch(str(path), info.claim(), is_made=is_claimed, fenced=lambda error: pytest.fail(str(error)))
    try:
        assert info.attempt == JUMP
        assert not is_claimed
        assert LocalStore(path).claimed() == 1  # nothing is claimed at once where nothing could be read
        until(lambda: LocalStore(path).claimed() == JUMP, "the claim")
    finally:
        host.leave(complete=True)
        watch.close()


def test_a_fresh_start_leaves_what_it_did_not_resume_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run-1"
    train(path, 10, keep=2)
    before = snapshots(path)
    assert len(before) == 2
    assert train(path, 20, resume=False, keep=1)[1] == 0
    assert [(left["count"], left["step"]) for left in said(caplog, "snapshots-left")] == [(2, 9)]
    assert train(path, 25, keep=1)[1] == 18  # newer than all of the attempt before
    kept = snapshots(path)
    assert [manifest.name for manifest in kept[1:]] == [manifest.name for manifest in before]
    assert len({manifest.lineage for manifest in kept}) == 2
    assert "" not in {manifest.lineage for manifest in kept}


def test_lineage_is_inherited_by_who_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "run-1"
    train(path, 10, keep=10)
    train(path, 20, keep=10)
    (lineage,) = {manifest.lineage for manifest in snapshots(path)}
    chosen = snapshots(path)[-1]
    callback = serverless(path, keep=10)
    with pytest.raises(Stop):
        trainer(callback, StopAt(12)).fit(Net(), data(), ckpt_path=str(path / chosen.data_path))
    newest = snapshots(path)[0]
    assert (newest.attempt, newest.lineage) == (3, lineage)
    checkpoint = torch.load(path / newest.data_path, weights_only=True)
    assert checkpoint["lightning_spot"]["lineage"] == lineage


# -- starts beside what an earlier attempt still writes, with odd numbers and paths ------------------------------------


class LateWriter(Net):
    """Its set-up takes long, and meanwhile the server of an earlier attempt ends a write that it had begun."""

    def __init__(self, run: Path, newest: Manifest, image: bytes) -> None:
        super().__init__()
        begun, self._go, self._done = threading.Event(), threading.Event(), threading.Event()

        def parts() -> Any:
            begun.set()
            self._go.wait(120)
            yield memoryview(image)

        def write() -> None:
            store = LocalStore(run)
            retain(store, Keep(newest=1), store.put_parts(newest, parts(), attempt=newest.attempt))
            self._done.set()

        threading.Thread(target=write, daemon=True).start()
        assert begun.wait(120)

    def setup(self, stage: str) -> None:
        self._go.set()
        assert self._done.wait(120)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_snapshot_persisted_while_an_attempt_begins_is_resumed(tmp_path: Path, keep: int) -> None:
    run = tmp_path / "run-1"
    train(run, 10, keep=3)
    store = LocalStore(run)
    newest = store.survey().manifests[0]
    image = (run / newest.data_path).read_bytes()
    store.delete(newest)
    if keep == 1:
        store.delete(store.survey().manifests[-1])
    probe = Probe()
    with pytest.raises(Stop):
        trainer(serverless(run, keep=keep), probe, StopAt(11)).fit(LateWriter(run, newest, image), data())
    assert min(probe.states) == newest.step == 9


@pytest.mark.parametrize("stray", ["step-000000001-attempt-999999999", "attempts/attempt-999999999.json"])
def test_an_attempt_number_above_the_limit_is_an_error(tmp_path: Path, stray: str) -> None:
    (tmp_path / "run-1" / stray).mkdir(parents=True)
    with pytest.raises(SettingsError, match="999999999"):
        trainer(serverless(tmp_path / "run-1")).fit(Net(), data())
    assert next_attempt([HIGHEST_ATTEMPT - 1], durable_was_read=True) == HIGHEST_ATTEMPT


def test_training_without_a_server_finds_an_earlier_servers_data(tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    train(run, 10, local_server=True)
    newest = LocalStore(run).survey().manifests[0]
    shutil.rmtree(run / newest.name)  # in memory only, as after a kill
    assert train(run, 11, local_server=False)[1] == newest.step == 9


@pytest.mark.parametrize("strict", [False, True])
def test_a_run_without_its_last_snapshot_in_storage_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    run = tmp_path / "run-1"

    def breaks() -> None:
        shutil.rmtree(run)
        run.write_text("no directory")

    spot = serverless(run, upload_timeout_s=1.0, on_error="raise" if strict else "warn")
    fit = trainer(spot, At(3, breaks, "on_train_batch_end"), max_epochs=1).fit
    if strict:
        with pytest.raises(TierError, match=re.escape(str(run))):
            fit(Net(), data())
    else:
        fit(Net(), data())
        assert said(caplog, "not-persisted")
        last = [record for record in caplog.records if record.name.startswith("lightning_spot")][-1]
        assert last.levelname == "ERROR"
        assert "does not have its last snapshot" in last.getMessage()
