"""``prune``, ``rm`` and ``rewind``, as a user calls them: what is deleted, what stays, what the next start resumes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.cli import main
from lightning_spot.client.stores import open_store
from lightning_spot.goodput.ledger import AttemptRecord
from lightning_spot.goodput.records import write_record
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store import posix
from lightning_spot.store.fences import ATTEMPTS_DIR, Rewind
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep, retain
from lightning_spot.store.store import Store
from tests.conftest import Cli
from tests.integration.test_stores import put
from tests.support.faulty import Plan, faulty_calls
from tests.support.oracle import claim_of
from tests.support.server import RUN, RUN_ID, StartServer, committed, image_of, manifest_of, named_run, snapshot_server
from tests.support.snapshots import EachDurable
from tests.support.trainer import Dies, Net, Stop, StopAt, data, equal, state_of, trainer
from tests.support.waiting import new_process


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A run of two attempts: steps 1, 2, 3, then 3 and 4 of the second, which is gone."""
    url = str(tmp_path / "run") if request.param == "directory" else f"{request.getfixturevalue('s3')}/run"
    store = open_store(url)
    location = Location.of(url).canonical
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        store.claim(claim_of(attempt, run_id="a" * 12, location=location, host="gone"))
        for step in steps:
            put(store, step, attempt=attempt, created_unix_s=float(step), metrics={"loss": abs(step - 2.0)})
    return store


def there(store: Store) -> list[tuple[int, int]]:
    return [(each.attempt, each.step) for each in store.survey().manifests]


def resumed(store: Store) -> tuple[int, int]:
    """What the next start takes."""
    newest = survey(Location.of(store.url, local_server=False)).candidates[0][0]
    return newest.attempt, newest.step


def listed(cli: Cli, *arguments: object) -> list[dict[str, Any]]:
    """What ``ls`` has of each snapshot."""
    found: list[dict[str, Any]] = json.loads(cli("ls", *arguments, "-o", "json"))["snapshots"]
    return found


def begin(store: Store, attempt: int) -> None:
    store.claim(claim_of(attempt, run_id="a" * 12, location=Location.of(store.url).canonical, host="gone"))


ALL = [(2, 4), (2, 3), (1, 3), (1, 2), (1, 1)]


# -- prune ------------------------------------------------------------------------------------------------------------


def test_prune(store: Store, cli: Cli) -> None:
    assert json.loads(cli("prune", store.url, "--keep", "2", "--dry-run", "-o", "json"))["deleted"][0]["step"] == 3
    assert there(store) == ALL
    said = cli("prune", store.url, "--keep", "1", "--best", "1", "--monitor", "loss", "-o", "name")
    assert said.split() == [f"{store.url}@3", f"{store.url}@1"]
    assert there(store) == [(2, 4), (1, 2)]
    cli("prune", store.url, "--keep", "1")
    assert there(store) == [(2, 4)]
    cli("prune", store.url, "--keep", "1")
    assert there(store) == [(2, 4)]


def test_prune_keeps_to_lineages_and_rules(store: Store, cli: Cli) -> None:
    put(store, 9, attempt=3, lineage="b" * 12)
    cli("prune", store.url, "--keep", "1", "--every-n-steps", "2")
    assert there(store) == [(3, 9), (2, 4), (1, 2)]
    cli("prune", store.url, "--keep", "1", "--newer-than", "3d")
    assert there(store) == [(3, 9), (2, 4)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--keep", "0"],
        ["--keep", "1", "--best", "2"],
        ["--keep", "1", "--newer-than", "2"],
        ["--keep", "1", "--mode=max", "--monitor=a"],
    ],
)
def test_a_prune_that_names_no_policy_deletes_nothing(store: Store, arguments: list[str]) -> None:
    assert main(["prune", store.url, *arguments]) == 2
    assert main(["prune", f"{store.url}@4", "--keep", "1"]) == 2
    assert there(store) == ALL


def test_a_prune_deletes_nothing_where_the_newest_is_not_whole(store: Store, cli: Cli) -> None:
    newest = store.survey().manifests[0]
    folder = store.folder(newest.name, attempt=2, run_id="")  # type: ignore[attr-defined]
    folder.remove([newest.spans[0].name])
    cli("prune", store.url, "--keep", "1", code=2)
    assert there(store) == ALL


# -- rewind -----------------------------------------------------------------------------------------------------------


def test_a_rewind_sets_newer_snapshots_aside_until_one_is_stored(store: Store, cli: Cli) -> None:
    cli("rewind", f"{store.url}@2")
    assert resumed(store) == (1, 2)
    assert there(store) == ALL
    states = {(row["attempt"], row["step"]): row["state"] for row in listed(cli, store.url)}
    assert states == {each: "set aside" if each > (1, 2) else "persisted" for each in ALL}
    assert json.loads(cli("show", store.url, "-o", "json"))["step"] == 2
    cli("prune", store.url, "--keep", "1")  # what is aside is no newer snapshot
    assert there(store) == ALL[:-1]
    begin(store, 3)  # is killed before it has a snapshot
    assert resumed(store) == (1, 2)
    begin(store, 4)
    retain(store, Keep(newest=2), put(store, 3, attempt=4))
    assert there(store) == [(4, 3), (1, 2)]
    assert resumed(store) == (4, 3)
    assert main(["rewind", store.url, "--undo"]) == 2


def test_what_is_taken_after_a_rewind_counts_at_once(store: Store, cli: Cli) -> None:
    """Also where it is not stored yet, but in memory: it is of a later attempt."""
    cli("rewind", f"{store.url}@1")
    begin(store, 3)
    put(store, 2, attempt=3)
    assert resumed(store) == (3, 2)
    found = survey(Location.of(store.url, local_server=False))
    assert [(item.attempt, item.step) for item, _ in found.candidates] == [(3, 2), (1, 1)]


@pytest.mark.parametrize("by", ["retention", "prune"])
def test_a_rewind_before_a_deletion_is_seen(store: Store, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deleted was listed already, the snapshot that the rewind goes back to among it."""
    real, newest, oldest = type(store).has, put(store, 5, attempt=2), store.survey().manifests[-1]

    def has(self: Store, manifest: Manifest) -> bool:
        rewind = Rewind(2, oldest.order).file
        self.folder(ATTEMPTS_DIR, attempt=0, run_id="").write(rewind, memoryview(b"{}"))
        return real(self, manifest)

    monkeypatch.setattr(type(store), "has", has)
    if by == "retention":
        retain(store, Keep(newest=1), newest)
    else:
        assert main(["prune", store.url, "--keep", "1"]) == 2
    assert there(store) == [(2, 5), *ALL]


@pytest.mark.parametrize("store", ["directory"], indirect=True)
@pytest.mark.parametrize("by", ["retention", "prune"])
def test_a_rewind_during_a_deletion_is_seen(store: Store, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found the snapshot whole, the moment before that was to go."""
    real, newest, oldest = posix.remove, put(store, 5, attempt=2), store.survey().manifests[-1]

    def remove(path: Any) -> None:
        monkeypatch.undo()
        assert main(["rewind", f"{store.url}@{oldest.step}"]) == 0
        real(path)

    monkeypatch.setattr(posix, "remove", remove)
    if by == "retention":
        retain(store, Keep(newest=1), newest)
    else:
        assert main(["prune", store.url, "--keep", "1"]) == 2
    assert there(store) == [(2, 5), *ALL]
    assert resumed(store) == (oldest.attempt, oldest.step)


def test_a_second_rewind_takes_the_place_of_the_first(store: Store, cli: Cli) -> None:
    for step, expected in (("1", (1, 1)), (snapshot_name(3, 1), (1, 3)), ("3", (2, 3)), ("2", (1, 2))):
        cli("rewind", f"{store.url}@{step}")
        assert resumed(store) == expected
    begin(store, 3)  # it ends without a snapshot
    cli("rewind", f"{store.url}@3")
    assert resumed(store) == (2, 3)
    cli("rewind", store.url, "--undo")
    assert resumed(store) == (2, 4)
    assert store.survey().rewinds == []


def test_a_rewind_is_undone_of_a_run_without_snapshots(store: Store, cli: Cli) -> None:
    cli("rewind", f"{store.url}@1")
    for manifest in store.survey().manifests:
        store.delete(manifest)
    assert "no snapshot is left" in cli("rewind", store.url, "--undo")
    assert store.survey().rewinds == []


def test_a_late_upload_of_what_is_aside_deletes_nothing(store: Store, cli: Cli) -> None:
    cli("rewind", f"{store.url}@1")
    retain(store, Keep(newest=1), put(store, 5, attempt=2))
    assert there(store) == [(2, 5), *ALL]
    assert resumed(store) == (1, 1)


def test_a_rewind_to_what_is_gone_is_no_fresh_start(store: Store, cli: Cli) -> None:
    cli("rewind", f"{store.url}@1")
    store.delete(store.survey().manifests[-1])
    assert survey(Location.of(store.url, local_server=False)).candidates == []
    fits = trainer(SpotCheckpoint(store.url, local_server=False, run_name="run"))
    with pytest.raises(Exception, match="rewind"):
        fits.fit(Net(), data())
    assert len(there(store)) == 4


@pytest.mark.parametrize("command", ["rewind", "rm"])
def test_nothing_is_changed_while_a_trainer_may_be_at_work(store: Store, command: str, cli: Cli) -> None:
    now_s = time.time()
    begin(store, 3)
    store.claim(replace(claim_of(4), started_unix_s=now_s, host="elsewhere", pid=1))
    assert "elsewhere" in cli(command, f"{store.url}@2", code=2)
    record = AttemptRecord(attempt=4, begun_unix_s=now_s - 900.0, unix_s=now_s - 5.0)
    in_validation = replace(record, unix_s=now_s - 900.0, alive_unix_s=now_s - 9.0)
    for lives in (record, in_validation):
        write_record(store.url, lives)
        cli(command, f"{store.url}@2", code=2)
    assert there(store) == ALL
    assert store.survey().rewinds == []
    silent = replace(record, unix_s=now_s - 90.0, alive_unix_s=now_s - 80.0)
    for step, ended in ((2, silent), (3, replace(record, end="preempted"))):
        write_record(store.url, ended)
        cli(command, f"{store.url}@{step}")


def test_who_begins_with_the_last_deletion_keeps_the_claim(
    store: Store, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(store).delete

    def begins(self: Any, manifest: Manifest) -> None:
        real(self, manifest)
        if not there(store):
            begin(open_store(store.url), 3)

    monkeypatch.setattr(type(store), "delete", begins)
    cli("rm", store.url, "--all", code=2)
    assert store.claimed() == 3


@pytest.mark.parametrize("command", ["rewind", "rm"])
def test_who_begins_meanwhile_is_not_disturbed(
    store: Store, command: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(store).has if command == "rewind" else type(store).delete

    def begins(self: Any, *arguments: Any) -> Any:
        if self.claimed() < 3:
            begin(open_store(store.url), 3)
        return real(self, *arguments)

    monkeypatch.setattr(type(store), "has" if command == "rewind" else "delete", begins)
    cli(command, *([f"{store.url}@2"] if command == "rewind" else [store.url, "--all"]), code=2)
    assert store.survey().rewinds == []
    assert resumed(store) == (2, 4)


def test_no_rewind_to_what_is_not_whole(store: Store) -> None:
    oldest = store.survey().manifests[-1]
    assert main(["rewind", f"{store.url}@2"]) == 0
    store.folder(oldest.name, attempt=1, run_id="").remove([oldest.spans[0].name])  # type: ignore[attr-defined]
    assert main(["rewind", f"{store.url}@1"]) == 2
    assert resumed(store) == (1, 2)  # as before


def test_what_no_rewind_can_mean(store: Store) -> None:
    for arguments in ([store.url], [f"{store.url}@2", "--undo"], [f"{store.url}@7"], [store.url, "--undo"]):
        assert main(["rewind", *arguments]) == 2
    assert main(["rewind", "spot://127.0.0.1:1/run@2"]) == 2
    assert store.survey().rewinds == []


# -- rm ---------------------------------------------------------------------------------------------------------------


def test_rm_of_one_snapshot(store: Store, cli: Cli) -> None:
    cli("rm", f"{store.url}@3", "--dry-run")
    assert there(store) == ALL
    assert cli("rm", f"{store.url}@3", "-o", "name").split() == [f"{store.url}@3"]
    cli("rm", f"{store.url}@latest")
    assert there(store) == ALL[2:]
    assert main(["rm", store.url]) == 2
    assert main(["rm", f"{store.url}@2", "--all"]) == 2
    cli("rewind", f"{store.url}@2")
    for of_it in ("2", "latest"):  # from which the next start resumes
        assert main(["rm", f"{store.url}@{of_it}"]) == 2
    assert there(store) == ALL[2:]


def test_rm_of_a_run_leaves_nothing_of_it_and_all_else(store: Store, cli: Cli) -> None:
    write_record(store.url, AttemptRecord(attempt=2, begun_unix_s=1.0, end="killed"))
    cli("rewind", f"{store.url}@2")
    half = store.folder(snapshot_name(9, 2), attempt=2, run_id="")  # type: ignore[attr-defined]
    half.write("model.ckpt", memoryview(b"half"))
    broken = store.folder(snapshot_name(8, 2), attempt=2, run_id="")  # type: ignore[attr-defined]
    broken.write("manifest.json", memoryview(b"{"))
    attempts = store.folder("attempts", attempt=0, run_id="")  # type: ignore[attr-defined]
    attempts.write("mine.txt", memoryview(b"mine"))
    incomplete = {snapshot_name(8, 2), snapshot_name(9, 2)}
    assert incomplete <= {each["name"] for each in deleted(cli, "--dry-run", store.url)}
    assert there(store) == ALL
    assert incomplete <= {each["name"] for each in deleted(cli, store.url)}
    found = store.survey()
    assert (found.manifests, found.unreadable, found.unfinished, found.attempts) == ([], {}, [], ["mine.txt"])
    attempts.remove(["mine.txt"])
    assert main(["ls", store.url]) == 2


def deleted(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    """What a removal of a run says is gone."""
    found: list[dict[str, Any]] = json.loads(cli("rm", *arguments, "--all", "-o", "json"))["deleted"]
    return found


def test_a_removal_that_ends_early_leaves_no_older_claim_alone(tmp_path: Path) -> None:
    """It would count as the newest: the next attempt took a number that there was."""
    for at in range(1, 9):
        store, fault = LocalStore(tmp_path / str(at)), Plan("EIO", at=at, only=("unlink",))
        for attempt in (1, 2, 3):
            store.claim(claim_of(attempt))
        put(store, 1, attempt=3)
        with faulty_calls(fault, store.root / ATTEMPTS_DIR):
            main(["rm", store.url, "--all"])
        assert store.claimed() in (0, 3)
        if not fault.struck:
            assert at > 3
            return
    raise AssertionError("it does not end")


# -- trainings --------------------------------------------------------------------------------------------------------


def train(run: Path, *callbacks: pl.Callback, **more: Any) -> None:
    """Until something stops it; snapshots of every third step, all of which are stored."""
    new_process()
    usual = {"interval": EverySteps(3), "keep": 9, "on_full": "wait", "min_upload_interval_s": 0.0, "notices": None}
    with pytest.raises(Stop):
        trainer(SpotCheckpoint(str(run), **{**usual, **more}), *callbacks).fit(Net(), data())


def begins_at(run: Path, **more: Any) -> int:
    dies = Dies()
    train(run, dies, **more)
    return dies.step


@pytest.mark.parametrize("local_server", [True, False], ids=["server", "in-process"])
@pytest.mark.guarantee("G3")
def test_a_training_goes_back_and_on(tmp_path: Path, cli: Cli, local_server: bool) -> None:
    """Also where the server on this host has newer snapshots in memory; after kills, and until something is stored."""
    run, how = tmp_path / "run", {"local_server": local_server}
    train(run, EachDurable(run, 3), StopAt(11), **how)
    once, twin = tmp_path / "once.ckpt", tmp_path / "twin.ckpt"
    cli("cp", f"{run}@9", once)
    cli("rewind", f"{run}@3")
    assert [begins_at(run, **how), begins_at(run, **how)] == [3, 3]
    train(run, EachDurable(run, 3), StopAt(7), **how)  # that of step 6 is stored
    assert begins_at(run, **how) == 6
    store = LocalStore(run)
    assert [(each.attempt, each.step) for each in store.survey().manifests if each.step > 3] == [(4, 6)]
    train(run, EachDurable(run, 3), StopAt(10), **how)
    cli("cp", f"{run}@9", twin)
    first, second = (torch.load(path, weights_only=True) for path in (once, twin))
    assert equal(state_of(first), state_of(second))


def test_starts_before_a_rewind_do_not_count_against_it(tmp_path: Path, cli: Cli) -> None:
    """With ``on_resume_failure="older"`` they would have the snapshot before it taken."""
    run, how = tmp_path / "run", {"local_server": False, "on_resume_failure": "older"}
    train(run, EachDurable(run, 3), StopAt(10), **how)
    assert [begins_at(run, **how) for _ in range(2)] == [9, 9]
    cli("rewind", f"{run}@6")
    assert [begins_at(run, **how) for _ in range(3)] == [6, 6, 3]


def test_snapshot_servers_hold_what_is_set_aside(tmp_path: Path, cli: Cli, start_server: StartServer) -> None:
    run, server = tmp_path / "run", start_server("--allow-storage", str(tmp_path)).url
    how = {"servers": server}
    train(run, EachDurable(run, 3), StopAt(11), **how)
    assert max(row["step"] for row in listed(cli, run, "--server", server) if row["tier"] == server) >= 9
    cli("rewind", f"{run}@3", "--server", server)
    states = {row["state"] for row in listed(cli, run, "--server", server) if row["step"] > 3}
    assert states == {"set aside"}
    assert begins_at(run, **how) == 3
    cli("rewind", run, "--undo", "--server", server)
    assert begins_at(run, **how) >= 9


def test_rm_at_a_server_takes_nothing_else_away(tmp_path: Path, cli: Cli) -> None:
    """The server stores what is newest now, by rules that the command does not know; the next command need not wait."""
    run = tmp_path / "run"
    store, keep = LocalStore(str(run)), Keep(newest=3, every_n_steps=10)
    with snapshot_server(tmp_path) as (server, url):
        info = replace(named_run("run", run), id=RUN_ID, location=Location.of(str(run)).canonical, token="1", keep=keep)
        store.claim(replace(info.claim(), started_unix_s=1.0))

        def save(step: int) -> None:
            committed(server, RUN, manifest_of(step, created_unix_s=1.0), image_of(step, 1000))

        server.open_run(info)
        for step in (10, 20, 30, 40):
            save(step)
            assert server.flush(None, 30.0) == []
        server.open_run(replace(info, min_upload_interval_s=3600.0))
        save(45)
        save(46)
        cli("rm", f"{run}@46", "--server", url)
        assert {step for _, step in there(store)} >= {10, 20, 30, 40}
        cli("rm", f"{run}@40", "--server", url)
        assert {step for _, step in there(store)} >= {10, 20, 30}


@pytest.mark.parametrize("servers", [0, 1], ids=["local", "server"])
def test_rm_removes_at_every_tier(tmp_path: Path, cli: Cli, start_server: StartServer, servers: int) -> None:
    """What stayed in memory would be brought to storage again, and be resumed from."""
    run, asked, how = tmp_path / "run", list[str](), dict[str, Any]()
    if servers:
        server = start_server("--allow-storage", str(tmp_path)).url
        asked, how = ["--server", server], {"servers": server}
    train(run, EachDurable(run, 3), StopAt(11), **how)
    cli("rm", f"{run}@9", *asked)
    steps = {row["step"] for row in listed(cli, run, *asked)}
    assert 9 not in steps
    assert begins_at(run, **how) == max(steps)
    cli("rm", run, "--all", *asked)
    assert not run.exists()
    found = survey(Location.of(str(run), **how))
    assert (found.candidates, found.claim) == ([], None)
    assert begins_at(run, **how) == 0
