"""Who owns a run's directory: nothing is put, deleted or read on behalf of an attempt whose claim is not there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client import starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.stores import open_store
from lightning_spot.config import HIGHEST_ATTEMPT, PROTOCOL_VERSION, take_environment
from lightning_spot.errors import FencedError, SettingsError, SpotError, TierError, TierReason
from lightning_spot.http.routes import OPEN_PATH, Service
from lightning_spot.protocol.wire import ATTEMPT_HEADER, PROTOCOL_HEADER, attempt_text
from lightning_spot.run import attempts
from lightning_spot.run.attempts import ClaimWatch
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.runs import RunInfo, parse_run, refusal
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import OWN_DIR, Manifest, snapshot_name
from lightning_spot.store.fences import ATTEMPTS_DIR, Owner, claim_name, digest_of
from lightning_spot.store.fsspec_client import open_filesystem, tier_errors
from lightning_spot.store.local import LocalStore
from lightning_spot.store.objects import ObjectStore
from lightning_spot.store.posix import Beneath
from lightning_spot.store.store import Writer
from tests.integration.test_server import put_file
from tests.support.oracle import claim_of
from tests.support.server import OTHER_ID, RUN_ID, RunningServer, StartServer, served
from tests.support.small_trainer import image_of
from tests.support.store import Kept
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G15")

DATA = b"written by the server"


def snapshot(step: int, data: bytes = b"x" * 100, **more: Any) -> Manifest:
    made = Manifest(run="run", name=snapshot_name(step, 1), step=step, attempt=1, nbytes=len(data), lineage="a" * 12)
    return replace(made, **more).sealed(memoryview(data))


class Lent:
    """A server that may write below a directory, and who asks it to."""

    def __init__(self, server: RunningServer, root: Path) -> None:
        self.server, self.url, self.root = server, server.url, root
        self.opened: dict[str, RunInfo] = {}
        self.client = ServerClient(ServerStore(f"{server.url}/any").client.address)

    def open(self, run: str, place: Path, *, claimed: bool) -> RunInfo:
        info = RunInfo(
            name=run, id="", location=f"file://{place}", attempt=1, token=f"secret of {run}", durable_url=str(place)
        )
        ServerStore(f"{self.url}/{run}").open_run(info)
        self.opened[run] = info
        if claimed:
            LocalStore(place).claim(info.claim())
        return info

    def put(self, run: str, name: str, data: bytes = DATA) -> list[str]:
        """Save a file, and have it brought down; what was not."""
        put_file(self.server, run, name, data, self.opened[run])
        return self.flush()

    def delete(self, run: str, name: str) -> None:
        self.client.speak_for(1, self.opened[run].token)
        self.client.call("DELETE", f"/v1/files/{run}/{name}", {"unseen": True})
        self.flush()

    def flush(self) -> list[str]:
        answer = self.client.call("POST", "/v1/flush", {"wait_s": 0.5}, timeout_s=20.0)
        return [str(line) for line in answer["unreached"]]


@pytest.fixture
def lent(start_server: StartServer, tmp_path: Path) -> Lent:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "outside").mkdir()
    return Lent(
        start_server("--allow-storage", str(tmp_path / "allowed"), "--drain-timeout", "0"), tmp_path / "allowed"
    )


def test_a_server_does_nothing_where_the_attempt_has_not_claimed(lent: Lent) -> None:
    victim = lent.root / "victim"
    victim.mkdir()
    (victim / "notes.txt").write_bytes(DATA)
    lent.open("thief", victim, claimed=False)
    assert lent.put("thief", "new.txt") != []
    with pytest.raises(TierError, check=TierReason.UNCLAIMED.caused):
        lent.delete("thief", "notes.txt")
    assert [path.name for path in victim.iterdir()] == ["notes.txt"]


def test_files_that_have_no_manifest_of_ours_stay(lent: Lent) -> None:
    place = lent.root / "run"
    lent.open("run", place, claimed=True)
    (place / "config.yaml").write_text("lr: 0.1")
    (place / "notes.txt").write_text("precious")
    lent.put("run", "config.yaml")
    lent.delete("run", "notes.txt")
    assert (place / "config.yaml").read_text() == "lr: 0.1"
    assert (place / "notes.txt").read_text() == "precious"
    assert lent.put("run", "own.txt") == []
    assert lent.put("run", "own.txt", DATA[::-1]) == []
    assert (place / "own.txt").read_bytes() == DATA[::-1]
    lent.delete("run", "own.txt")
    until(lambda: not (place / "own.txt").exists(), "it to be deleted")


@pytest.mark.parametrize("what", ["run", "above", OWN_DIR])
def test_a_directory_that_is_swapped_for_a_link_leads_nowhere(lent: Lent, what: str) -> None:
    place, outside = lent.root / "above" / "run", lent.root.parent / "outside"
    lent.open("run", place, claimed=True)
    swapped = {"run": place, "above": place.parent, OWN_DIR: place / OWN_DIR}[what]
    if swapped.exists():
        os.rename(swapped, lent.root / "away")
    if what == "above":
        (outside / "run").mkdir()
    LocalStore(outside if what == "run" else outside / "run").claim(claim_of(1, token="secret of run"))  # as in the run
    before = sorted(path for path in outside.rglob("*"))
    swapped.symlink_to(outside)
    assert lent.put("run", "pwned.txt") != []
    assert sorted(path for path in outside.rglob("*")) == before


def test_a_directory_that_was_moved_away_is_not_written_to(tmp_path: Path) -> None:
    """What is given out is a descriptor, which would follow it wherever it goes."""
    lent, place = tmp_path / "lent", tmp_path / "lent" / "run"
    place.mkdir(parents=True)
    beneath = Beneath(place, [str(lent)])
    (beneath.path() / "before").write_bytes(DATA)
    os.rename(place, tmp_path / "moved")
    assert not beneath.path().exists()
    (beneath.path(make=True) / "after").write_bytes(DATA)
    assert (place / "after").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["before"]


@pytest.mark.parametrize("name", [OWN_DIR, ATTEMPTS_DIR, snapshot_name(1, 1)])
def test_no_run_lies_in_a_folder_of_ours(name: str) -> None:
    """What is saved in it would be taken for a manifest, or a claim."""
    for place in (f"/runs/victim/{name}", f"/runs/victim/{name}/below", f"s3://bucket/victim/{name}"):
        assert name in refusal(place, ["/runs", "s3://bucket"])
    with pytest.raises(SpotError):
        parse_run(name)


@pytest.mark.parametrize("name", [OWN_DIR, ATTEMPTS_DIR, snapshot_name(1, HIGHEST_ATTEMPT)])
def test_no_file_is_named_like_a_folder_of_ours(lent: Lent, name: str) -> None:
    """By the name of a snapshot, attempts are counted: no later start would find a number."""
    place = lent.root / "run"
    lent.open("run", place, claimed=True)
    with pytest.raises(SettingsError):
        lent.put("run", name)
    assert lent.flush() == []
    assert not [path for path in place.iterdir() if path.is_file()]
    assert LocalStore(place).survey().highest_attempt == 1


def test_a_claim_holds_no_token(tmp_path: Path) -> None:
    info = RunInfo(name="run", id="", location="file:///run", attempt=1, token="a secret")
    LocalStore(tmp_path).claim(info.claim())
    noted = json.loads((tmp_path / ATTEMPTS_DIR / claim_name(1)).read_text())
    assert "a secret" not in str(noted)
    assert noted["digest"] == digest_of("a secret")


@pytest.mark.parametrize("scheme", ["", "kept://runs"])
def test_nobody_writes_or_deletes_without_a_claim(tmp_path: Path, scheme: str) -> None:
    store = open_store(f"{scheme}{tmp_path}/run")
    store.owner = Owner(1, digest_of("first"))
    for act in (lambda: store.put(snapshot(1), memoryview(b"x" * 100), attempt=1), lambda: store.delete(snapshot(1))):
        with pytest.raises(TierError, check=TierReason.UNCLAIMED.caused):
            act()


def test_a_server_claims_for_its_own_trainer_what_that_could_not(tmp_path: Path) -> None:
    host = InProcessHost(slots=2, memory_bytes=2**20, open_store=open_store)
    info = RunInfo(
        name="run", id="", location=f"file://{tmp_path}/run", attempt=3, token="t", durable_url=str(tmp_path / "run")
    )
    host.open_run(info)
    image = image_of(1, 10_000)
    lease = host.lease(len(image), 5.0)
    lease.map[: len(image)] = image
    host.seal(lease, replace(snapshot(1, image), name=snapshot_name(1, 3), attempt=3, checksums=()))
    assert host.flush(30.0) == []
    claim = LocalStore(tmp_path / "run").newest_claim()
    assert (claim.attempt, claim.digest) == (3, digest_of("t"))
    host.leave(complete=True)


def test_a_claim_is_created_exclusively_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is there and the creation, another trainer comes."""
    url = f"kept://runs/{os.urandom(6).hex()}"
    store, pipe = open_store(url), Kept.pipe_file

    def later(files: Kept, path: str, value: bytes, **more: Any) -> None:
        monkeypatch.setattr(Kept, "pipe_file", pipe)
        open_store(url).claim(claim_of(1, token="first"))
        pipe(files, path, value, **more)

    monkeypatch.setattr(Kept, "pipe_file", later)
    with pytest.raises(FencedError):
        store.claim(claim_of(1, token="second"))
    claim = store.newest_claim()
    assert claim.digest == digest_of("first")


class Careless(ObjectStore):
    """A store whose creation is not exclusive, and slow: of two that look at once, both write, and the last stays."""

    gate = threading.Barrier(1)

    def _create(self, below: str, data: bytes, by: Writer) -> None:
        self.gate.wait(30.0)  # all have looked
        self._fs.pipe_file(self._path(below), data)


def starts_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the trainers that start at once, and get one number, may write in the end."""
    url = f"kept://runs/{os.urandom(6).hex()}"
    monkeypatch.setattr(Careless, "gate", threading.Barrier(count))
    stores, wrote, lost = [Careless(url) for _ in range(count)], list[int](), list[BaseException]()
    mine = [claim_of(1, token=f"start {number}") for number in range(count)]

    def start(number: int) -> None:
        store = stores[number]
        store.owner = Owner(1, mine[number].digest)
        try:
            store.claim(mine[number])
        except FencedError as error:
            lost.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for number, store in enumerate(stores):
        try:
            store.put(snapshot(number), memoryview(b"x" * 100), attempt=1)
            wrote.append(number)
        except FencedError as error:
            lost.append(error)
    assert [manifest.step for manifest in stores[0].survey().manifests] == wrote
    return len(wrote)


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=pytest.mark.soak)])
def test_only_one_of_many_trainers_that_start_at_once_writes(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    assert [starts_at_once(8, monkeypatch) for _ in range(rounds)] == [1] * rounds


def test_a_trainer_is_told_that_its_number_is_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "CLAIM_LOOK_S", 0.01)
    url, told = str(tmp_path / "run"), list[FencedError]()
    mine = claim_of(1, token="mine")
    LocalStore(url).claim(mine)
    watch = ClaimWatch(url, mine, is_made=True, fenced=told.append)
    path = tmp_path / "run" / ATTEMPTS_DIR / claim_name(1)
    path.unlink()
    until(path.exists, "the claim to be made again")
    path.write_text(claim_of(1, token="another").to_json())
    until(lambda: told, "it to be told")
    watch.close()
    assert told[0].current == 1


def begun(url: str, attempt: int, run_id: str) -> RunInfo:
    info = RunInfo(name="run", id=run_id, location=url, attempt=attempt, token=run_id, durable_url=url)
    LocalStore(url).claim(info.claim())
    return info


def test_a_server_of_a_removed_run_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """Attempts of a run that is begun at an emptied directory are counted from 1 again."""
    url, host = str(tmp_path / "run"), InProcessHost(slots=2, memory_bytes=2**20, open_store=open_store)
    host.open_run(begun(url, 5, RUN_ID))
    shutil.rmtree(url)
    after = begun(url, 1, OTHER_ID)
    image = image_of(20, 10_000)
    lease = host.lease(len(image), 5.0)
    lease.map[: len(image)] = image
    host.seal(lease, replace(snapshot(20, image), name=snapshot_name(20, 5), run_id=RUN_ID, attempt=5, checksums=()))
    host.flush(5.0)
    assert LocalStore(url).newest_claim() == replace(after.claim(), inode=LocalStore(url).inode())
    assert LocalStore(url).survey().manifests == []
    host.leave(complete=False)


def test_a_trainer_of_a_removed_run_is_told_of_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "CLAIM_LOOK_S", 0.01)
    url, told = str(tmp_path / "run"), list[FencedError]()
    mine = begun(url, 5, RUN_ID).claim()
    shutil.rmtree(url)
    begun(url, 1, OTHER_ID)
    watch = ClaimWatch(url, mine, is_made=True, fenced=told.append)
    until(lambda: told, "it to be told")
    watch.close()
    assert LocalStore(url).claimed() == 1


def test_the_server_of_a_killed_start_gets_the_next_credentials(
    s3: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had those with which the first one began, and nothing became durable."""
    url, keys = f"{s3}/run", {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in keys:
        monkeypatch.delenv(name)

    def start(attempt: int) -> LocalServer:
        host = starting.start(url, "run", slots=2, memory_bytes=2**24, server_idle_timeout_s=60.0)
        told: dict[str, Any] = {"location": url, "durable_url": url, "attempt": attempt, "token": f"t{attempt}"}
        host.open_run(RunInfo(name="run", id="", **told))
        return host

    image, first = image_of(1, 10_000), start(1)
    lease = first.lease(len(image), 5.0)
    lease.map[: len(image)] = image
    first.seal(lease, replace(snapshot(1, image), checksums=()))
    assert "no credentials" in " ".join(first.flush(2.0))
    first.disconnect()
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    second = start(2)
    assert second.flush(60.0) == []
    assert [manifest.step for manifest in open_store(url).survey().manifests] == [1]
    second.leave(complete=True)


def test_a_trainers_environment_omits_the_servers_own_variables() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {"AWS_PROFILE": "old", "AWS_SESSION_TOKEN": "old", "LIGHTNING_SPOT_TOKEN": "old"})
        given = {"AWS_PROFILE": "new", "LIGHTNING_SPOT_TOKEN": "next"}
        assert take_environment({**given, "PATH": "/elsewhere", "LIGHTNING_SPOT_SHM_DIR": "/elsewhere"})
        assert os.environ == given
        assert not take_environment(given)


@pytest.mark.parametrize("error", [PermissionError("x"), OSError("ExpiredToken: The provided token has expired.")])
def test_credentials_are_read_again_if_a_store_rejects_them(error: Exception) -> None:
    """A login tool renews them in a file, which a session reads once."""
    before = open_filesystem("kept://runs/any")[0]
    with pytest.raises(TierError), tier_errors("kept://runs/any"):
        raise OSError("the line is broken")
    assert open_filesystem("kept://runs/any")[0] is before
    with pytest.raises(TierError), tier_errors("kept://runs/any"):
        raise error
    assert open_filesystem("kept://runs/any")[0] is not before


# -- the attempt's own token, at servers -------------------------------------------------------------------------------

VICTIM = RunInfo(name="run", id="0123456789ab", location="", attempt=2, token="of this attempt")
NAME = snapshot_name(1, 2)
CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/runs/{run}/close"): {"session": ""},
    ("POST", "/v1/runs/{run}/figures"): {},
    ("POST", "/v1/runs/{run}/uploads"): {"attempt": 2, "nbytes": 100},
    ("POST", "/v1/runs/{run}/fail"): {"attempt": 2},
    ("POST", "/v1/runs/{run}/awaited"): {"name": NAME},
    ("DELETE", "/v1/files/{run}/{path}"): {},
}
REFUSED, FENCED, UNKNOWN = "whose token this request does not have", "has taken over", "open the run again"


@pytest.fixture(scope="module")
def tokened() -> Iterator[int]:
    """Port of a server with two runs: one whose attempt has a token, and one whose attempt has none."""
    server = SnapshotServer(slots=2, memory_bytes=2**20, open_store=lambda _url: pytest.fail("written"))
    server.open_run(VICTIM)
    server.open_run(replace(VICTIM, name="nobody", id="", token=""))
    with served(server) as port:
        yield port


def asked(port: int, how: tuple[str, str], run: str, shown: str | None) -> tuple[int, str]:
    """Status and text of what a server answers to one of these requests."""
    method, path = how
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION), **({ATTEMPT_HEADER: shown} if shown is not None else {})}
    connection.request(method, path.format(run=run, path=NAME), json.dumps(CHANGES[how]), headers)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_table_has_every_request_that_changes_a_run() -> None:
    server = SnapshotServer(slots=2, memory_bytes=2**20, open_store=lambda _url: pytest.fail("written"))
    routes = Service(server, None).application().router.routes()
    known = {(each.method, each.resource.canonical) for each in routes if each.resource is not None}
    changes = {each for each in known if each[0] not in ("GET", "HEAD") and "{run}" in each[1]}
    assert changes - {("POST", OPEN_PATH)} == set(CHANGES)


@pytest.mark.parametrize("how", CHANGES, ids=" ".join)
def test_a_run_is_changed_by_its_attempt_only(tokened: int, how: tuple[str, str]) -> None:
    for shown, status, why in (
        (None, 403, REFUSED),
        ("", 403, REFUSED),
        ("2:", 403, REFUSED),
        ("2:of another attempt", 403, REFUSED),
        ("2:" + digest_of(VICTIM.token), 403, REFUSED),  # which a claim shows to whoever reads the directory
        ("x:" + VICTIM.token, 403, REFUSED),
        ("9" * 500 + ":x", 403, REFUSED),
        (attempt_text(1, "of the one before"), 409, FENCED),
        (attempt_text(3, "of the next one"), 404, UNKNOWN),
    ):
        got = asked(tokened, how, "run", shown)
        assert got[0] == status, (shown, got)
        assert why in got[1]
        assert VICTIM.token not in got[1]
    for run, right in (("run", attempt_text(2, VICTIM.token)), ("nobody", None)):
        got = asked(tokened, how, run, right)
        assert not any(why in got[1] for why in (REFUSED, FENCED, UNKNOWN)), got


def test_leftovers_of_an_unclaimed_attempt_are_never_done_later(lent: Lent) -> None:
    """A stranger who opened the run as its next attempt had it done with the claim of the trainer's own next one."""
    place = lent.root / "victim"
    victim = lent.open("run", place, claimed=True)
    store, thief = ServerStore(f"{lent.url}/run"), ServerStore(f"{lent.url}/run")
    store.know(victim)
    store.put(snapshot(1), memoryview(b"x" * 100), attempt=1)
    assert lent.flush() == []
    there = sorted(str(path) for path in lent.root.rglob("*"))
    thief.open_run(replace(victim, attempt=2, token="a stranger's"))
    with pytest.raises(TierError, check=TierReason.UNCLAIMED.caused):
        thief.delete(snapshot(1))
    forged = snapshot(9, name=snapshot_name(9, 2), attempt=2)
    thief.put(forged, memoryview(b"x" * 100), attempt=2)
    again = replace(victim, attempt=3, token="the trainer's again")
    LocalStore(place).claim(again.claim())
    store.open_run(again)
    lent.flush()
    found = {str(path) for path in lent.root.rglob("*")}
    assert found - {str(place / ATTEMPTS_DIR / claim_name(3))} == set(there)


def test_a_late_request_body_changes_nothing_of_a_later_attempt(tokened: int) -> None:
    run, head = f"late@{'b' * 12}", b""
    store = ServerStore(f"spot://127.0.0.1:{tokened}/{run}")
    first = replace(VICTIM, name="late", id="b" * 12, attempt=1, token="of 1")
    store.open_run(first)
    with socket.create_connection(("127.0.0.1", tokened), timeout=30) as connection:
        shown = f"{ATTEMPT_HEADER}: {attempt_text(1, 'of 1')}\r\n{PROTOCOL_HEADER}: {PROTOCOL_VERSION}"
        head = f"POST /v1/runs/{run}/close HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n{shown}\r\n\r\n".encode()
        connection.sendall(head)
        until(lambda: _is_waiting_for_a_body(connection), "the head to be looked at")
        store.open_run(replace(first, attempt=2, token="of 2"))
        connection.sendall(b"{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 409")


def _is_waiting_for_a_body(connection: socket.socket) -> bool:
    connection.settimeout(0.3)
    try:
        raise AssertionError(connection.recv(65536))
    except TimeoutError:
        connection.settimeout(30)
        return True
