"""Tokens for some runs: who may do what, what of a server they show, how they end, and that no secret is to be seen."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import read_environment
from lightning_spot.errors import ServerRefusedError, SettingsError
from lightning_spot.http.routes import Service
from lightning_spot.protocol.credentials import Rights, Scope, current_secrets, scope_of
from lightning_spot.protocol.record import find_record
from lightning_spot.protocol.wire import Address, parse_spot_url
from lightning_spot.server.slots import Slot
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.parts import checksum
from tests.integration.test_fit import stopped
from tests.support import folders
from tests.support.said import said_about
from tests.support.server import StartServer, committed, image_of, manifest_of, served
from tests.support.uploads import server_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G30")

SECRET, OTHER_SECRET = "a-secret-of-a-server", "another-one-of-a-server"
MINE, FOREIGN = "0123456789ab", "ba9876543210"
WRITE = Scope(prefix="team-a", rights=Rights.WRITE, expires_unix_s=int(time.time()) + 3600)
SCOPES = {
    "write": WRITE,
    "read": replace(WRITE, rights=Rights.READ),
    "other": replace(WRITE, prefix="team-b"),
    "expired": replace(WRITE, expires_unix_s=int(time.time()) - 1),
}
TOKENS = {
    "secret": SECRET,
    "none": "",
    "forged": WRITE.token("no-secret-of-the-server"),
    **{name: scope.token(SECRET) for name, scope in SCOPES.items()},
}


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "covered", "others"),
    [
        ("run-1", ["run-1", "run-1-fit-2", "run-1.x", "run-1_x", "run-1=x"], ["run-10", "run", "run-2", "x-run-1"]),
        ("team-", ["team-", "team-a", "team-1"], ["team", "tea", "teams"]),
        ("0", ["0", "0-x"], ["00", "1"]),
    ],
)
def test_a_prefix_covers_whole_parts_of_names(prefix: str, covered: list[str], others: list[str]) -> None:
    scope = replace(WRITE, prefix=prefix)
    assert [name for name in covered + others if scope.covers(name)] == covered


def test_a_token_is_what_its_secret_has_signed() -> None:
    token = WRITE.token(SECRET)
    assert re.fullmatch(r"spot1\.[\w-]+\.[\w-]{43}", token)
    assert scope_of(token, [OTHER_SECRET, SECRET]) == WRITE
    assert scope_of(SECRET, [OTHER_SECRET, SECRET]) is None
    for place in range(len(token)):
        forged = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        with pytest.raises(ServerRefusedError) as caught:
            scope_of(forged, [SECRET])
        assert caught.value.is_for_the_token
        assert forged not in str(caught.value)
    others = ["", ".", "..", "spot1..", "spot1.e30.", token[:-1], token + "=", token.replace("spot1", "spot2"), "é"]
    for given in others:
        with pytest.raises(ServerRefusedError):
            scope_of(given, [SECRET])


def test_a_token_holds_until_it_expires() -> None:
    token = WRITE.token(SECRET)
    assert scope_of(token, [SECRET], WRITE.expires_unix_s - 0.001) == WRITE
    with pytest.raises(ServerRefusedError, check=lambda error: error.status == 401):
        scope_of(token, [SECRET], WRITE.expires_unix_s)


def test_claims_of_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for claims in (
        {},
        {"prefix": "x", "rights": "all", "expires": 9**9},
        {"prefix": "../x", "rights": "read", "expires": 1},
    ):
        monkeypatch.setattr(json, "dumps", lambda *_, claims=claims, **__: repr(claims).replace("'", '"'))
        token = WRITE.token(SECRET)
        monkeypatch.undo()
        with pytest.raises(ServerRefusedError, check=lambda error: error.status == 401):
            scope_of(token, [SECRET])


def test_a_secret_that_could_be_found_out_signs_nothing() -> None:
    with pytest.raises(SettingsError, match=r"\b16\b") as caught:
        WRITE.token("only-15-letters")
    assert "letters" not in str(caught.value)


def test_the_command_prints_a_token(cli: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("token", "--run", "team-a", "--rights", "read", "--expires", "2h")
    assert "LIGHTNING_SPOT_TOKEN_FILE" in cli(*given, code=2)
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", SECRET)
    scope = scope_of(cli(*given).strip(), [SECRET])
    assert scope is not None
    assert (scope.prefix, scope.rights) == ("team-a", Rights.READ)
    assert abs(scope.expires_unix_s - time.time() - 7200) < 60
    assert "'../x'" in cli("token", "--run", "../x", "--rights", "read", code=2)
    assert "--expires" in cli(*given[:-1], "0", code=2)


# -- who may do what ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SnapshotServer, int]]:
    """A server with a run of each team, which have a snapshot each."""
    below = str(tmp_path_factory.mktemp("below"))
    server = server_of(flush_to=below)
    with served(server, secrets=(OTHER_SECRET, SECRET)) as port:
        client = ServerClient(Address("127.0.0.1", port), SECRET)
        for name, identity in (("team-a-1", MINE), ("team-b-1", FOREIGN)):
            run = f"{name}@{identity}"
            client.call("POST", f"/v1/runs/{run}/open", {"attempt": 1, "token": ""})
            committed(server, run, manifest_of(1, run_id=identity, run=name), image_of(1, 1000))
            assert client.call("POST", "/v1/flush", {"run": run, "wait_s": 30.0})["unreached"] == []
        yield server, port


def routes() -> list[tuple[str, str]]:
    """Every request that a server knows: one that is added is asked, too."""
    found = Service(server_of(), None).application().router.routes()
    return sorted({(each.method, each.resource.canonical) for each in found if each.resource is not None})


OPEN_TO_ALL = {"/healthz", "/readyz"}
OF_SOME_RUNS = {"/metrics", "/v1/runs", "/v1/status"}
"""What every valid token may ask: it shows what that covers."""
OF_THE_SERVER = {"/", "/open/{link}", "/v1/links", "/v1/page", "/v1/sessions"}
"""The status page, which shows all runs, and what is for this host."""


def asked(port: int, token: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    data = json.dumps(body or {}).encode()
    headers = {"Authorization": f"Bearer {token}", "Spot-Digest": checksum(data)} if token else {}
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(100_000).decode(errors="replace")
    finally:
        connection.close()


def wanted(kind: str, method: str, path: str) -> int:
    """The status with which a request is denied; 0 if it is not."""
    if path in OPEN_TO_ALL or kind == "secret":
        return 0
    if kind in ("none", "forged", "expired"):
        return 401
    if kind == "read" and method not in ("GET", "HEAD"):
        return 403
    return 403 if path in OF_THE_SERVER or (kind == "other" and path not in OF_SOME_RUNS) else 0


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize(("method", "route"), routes(), ids=str)
def test_each_request_is_denied_to_whom_it_should(
    shared: tuple[SnapshotServer, int], method: str, route: str, kind: str
) -> None:
    server, port = shared
    run = f"team-a-1@{MINE}"
    upload = server.uploads.lease(run, 1, 1000) if "{upload}" in route else None
    path = (
        route.replace("{run}", run).replace("{path}", "no-such-file").replace("{upload}", upload.id if upload else "")
    )
    body = {"attempt": 1, "token": "", "run": run, "wait_s": 0.0}
    status, text = asked(port, TOKENS[kind], method, path, body)
    if upload is not None and upload.id in server.uploads:
        server.uploads.abort(upload.id)
    denied = status if status in (401, 403) and ("token" in text or method == "HEAD") else 0
    assert denied == wanted(kind, method, route), text
    if denied:
        assert not any(token in text for token in TOKENS.values() if token)
    if kind in ("none", "forged", "expired") and route not in OPEN_TO_ALL:
        assert "team" not in text


def test_the_table_knows_a_request_without_a_run() -> None:
    """Those that name none are denied unless they show what a token covers, whatever is added."""
    without = {path for _, path in routes() if "{" not in path} - OPEN_TO_ALL
    assert without == OF_SOME_RUNS | OF_THE_SERVER - {"/open/{link}"} | {"/v1/flush"}


@pytest.mark.parametrize("kind", ["read", "write", "secret"])
def test_a_request_that_is_added_is_denied(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds one has to think of whom it may be for."""

    async def new(_request: web.Request) -> web.Response:
        return web.json_response({})

    real = Service.application

    def application(self: Service) -> web.Application:
        app = real(self)
        app.router.add_get("/v1/new", new)
        return app

    monkeypatch.setattr(Service, "application", application)
    with served(server_of(), secrets=(SECRET,)) as port:
        assert asked(port, TOKENS[kind], "GET", "/v1/new")[0] == (200 if kind == "secret" else 403)
        assert asked(port, TOKENS[kind], "GET", "/v1/nothing")[0] == (404 if kind == "secret" else 403)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_run_is_not_reached_by_its_identity(shared: tuple[SnapshotServer, int], kind: str) -> None:
    """Whatever name stands before it, a run is found by that."""
    server, port = shared
    for run in (f"team-a-1@{FOREIGN}", f"team-a-new@{FOREIGN}", FOREIGN, f"team-b-1@{FOREIGN}", "team-b-1"):
        for method, path in (
            ("GET", f"/v1/runs/{run}/snapshots"),
            ("GET", f"/v1/files/{run}/last.ckpt"),
            ("POST", f"/v1/runs/{run}/open"),
            ("POST", f"/v1/runs/{run}/uploads"),
            ("DELETE", f"/v1/files/{run}/x"),
        ):
            body = {"attempt": 2, "token": "", "nbytes": 10}
            status, text = asked(port, TOKENS[kind], method, path, body)
            assert status == 403, (run, method, text)
    assert server.claimed(f"team-b-1@{FOREIGN}") == 1
    upload = server.uploads.lease(f"team-b-1@{FOREIGN}", 1, 1000)
    assert asked(port, TOKENS[kind], "DELETE", f"/v1/uploads/{upload.id}")[0] == 403
    assert upload.id in server.uploads
    server.uploads.abort(upload.id)
    for body in ({"run": f"team-b-1@{FOREIGN}"}, {}):
        assert asked(port, TOKENS[kind], "POST", "/v1/flush", {**body, "wait_s": 0.0})[0] == 403


@pytest.mark.parametrize(("kind", "name"), [("read", "team-a-1"), ("write", "team-a-1"), ("other", "team-b-1")])
def test_listings_show_what_a_token_covers(shared: tuple[SnapshotServer, int], kind: str, name: str) -> None:
    _, port = shared
    everything = [asked(port, SECRET, "GET", path)[1] for path in sorted(OF_SOME_RUNS)]
    assert all("team-a-1" in text and "team-b-1" in text for text in everything)
    metrics, runs, status = (asked(port, TOKENS[kind], "GET", path)[1] for path in sorted(OF_SOME_RUNS))
    assert [run["name"] for run in json.loads(runs)["runs"]] == [name]
    shown = json.loads(status)
    assert [run.partition("@")[0] for run in shown["runs"]] == [name]
    assert {slot["run"] for slot in shown["slots"]} == {name}
    assert len(shown["tiers"]) == 1
    assert shown["flush_to"] is None
    assert ({"team-a-1": "team-b-1", "team-b-1": "team-a-1"}[name]) not in metrics + runs + status
    assert name in metrics


@pytest.mark.parametrize(
    ("path", "look"), [("/v1/runs", 0), ("/v1/runs/team-a-1/snapshots", 0), ("/v1/runs/team-a-1/snapshots", 1)]
)
def test_what_leaves_memory_while_it_is_listed(path: str, look: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each look at what is in memory: by who asks whether a token covers it, and by who lists it."""
    server = server_of()
    ring, run, leaving = server.ring, f"team-a-1@{MINE}", list[threading.Thread]()
    listed = ring.contents

    def contents(*arguments: Any) -> list[Slot]:
        found = listed(*arguments)
        if threading.current_thread() not in leaving:
            leaving.append(threading.Thread(target=server.remove, args=(run, found[0].content.name) if found else ()))
            if len(leaving) == look + 1:
                leaving[-1].start()
                leaving[-1].join(0.5)  # it is quicker, or waits its turn
        return found

    with served(server, secrets=(SECRET,)) as port:
        client = ServerClient(Address("127.0.0.1", port), SECRET)
        client.call("POST", f"/v1/runs/{run}/open", {"attempt": 1, "token": ""})
        committed(server, run, manifest_of(1, run_id=MINE, run="team-a-1"), image_of(1, 1000))
        monkeypatch.setattr(ring, "contents", contents)
        assert asked(port, TOKENS["read"], "GET", path)[0] == 200
        leaving[look].join()
        monkeypatch.undo()
        assert ring.contents() == []


def test_each_denied_request_is_in_the_log(start_server: StartServer) -> None:
    server = start_server("--drain-timeout", "0", environment={"LIGHTNING_SPOT_TOKEN": SECRET})
    port = parse_spot_url(server.url)[0].port
    for kind in ("forged", "expired", "other", "read", "none"):
        asked(port, TOKENS[kind], "POST", f"/v1/runs/team-a-1@{MINE}/open", {"attempt": 1, "token": ""})
    server.stop()
    log = server.log.read_text()
    for what, why in (
        ("POST /v1/runs/{run}/open", "another token"),
        ("POST /v1/runs/{run}/open", "expired"),
        (f"POST /v1/runs/team-a-1@{MINE}/open", "runs team-b… only"),
        (f"POST /v1/runs/team-a-1@{MINE}/open", "reading only"),
        ("POST /v1/runs/{run}/open", "asks for a token"),
    ):
        assert re.search(rf"denied a request \({re.escape(what)}, .*{why}.*, from 127\.0\.0\.1\)", log), (
            what,
            why,
            log,
        )
    assert not any(token in log for token in TOKENS.values() if token)


# -- changing the secret -----------------------------------------------------------------------------------------------


def test_a_secret_is_changed_without_a_gap(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's file has both, then each client's the new one, then the server's the new one only."""
    at_server, at_client = tmp_path / "server", tmp_path / "client"
    for path in (at_server, at_client):
        path.write_text(f"{SECRET}\n")
    server = start_server(environment={"LIGHTNING_SPOT_TOKEN_FILE": str(at_server)})
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN_FILE", str(at_client))
    client, signed = (
        ServerClient(parse_spot_url(server.url)[0]),
        ServerClient(parse_spot_url(server.url)[0], TOKENS["read"]),
    )
    for at_server_now, at_client_now in (
        (f"{OTHER_SECRET}\n{SECRET}\n", f"{SECRET}\n"),
        (f"{OTHER_SECRET}\n{SECRET}\n", f"{OTHER_SECRET}\n"),
        (f"{OTHER_SECRET}\n", f"{OTHER_SECRET}\n"),
        ("", f"{OTHER_SECRET}\n"),  # a file that holds none leaves what was, and opens nothing
    ):
        at_server.write_text(at_server_now)
        at_client.write_text(at_client_now)
        client.call("GET", "/v1/runs")
        assert scope_of(TOKENS["read"], current_secrets()) if SECRET in at_client_now else True
        if SECRET in at_server_now:
            signed.call("GET", "/v1/runs")
        else:
            with pytest.raises(ServerRefusedError, check=lambda error: error.status == 401):
                signed.call("GET", "/v1/runs")
    with pytest.raises(ServerRefusedError):
        ServerClient(parse_spot_url(server.url)[0], SECRET).call("GET", "/v1/runs")
    log = server.log.read_text()
    assert "stays in use" in log
    assert SECRET not in log
    assert OTHER_SECRET not in log


def test_a_file_that_cannot_be_read_any_more_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN_FILE", str(path))
    assert current_secrets() == (SECRET,)
    for text in ("\n", f"{SECRET}\n{OTHER_SECRET}\nthird-secret-of-one"):
        path.write_text(text)
        assert current_secrets() == (SECRET,)
    path.unlink()
    assert current_secrets() == (SECRET,)
    assert said_about(caplog, "credentials-not-read") == [str(path)]
    path.write_text(OTHER_SECRET)
    assert current_secrets() == (OTHER_SECRET,) == read_environment().secrets
    path.write_text("a\nb\nc")
    with pytest.raises(SettingsError, match=r"\b3\b"):
        read_environment()


# -- where secrets are not ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_with_a_scoped_token_shows_it_nowhere(
    start_server: StartServer,
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither in command lines, the environment of the server that it starts, logs, nor files."""
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET)
    server = start_server("--allow-storage", str(tmp_path), environment={"LIGHTNING_SPOT_TOKEN_FILE": str(secret_file)})
    token = replace(WRITE, prefix="run-1").token(SECRET)
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", token)
    stopped(tmp_path, servers=server.url)
    runs = ServerClient(parse_spot_url(server.url)[0]).call("GET", "/v1/runs")["runs"]
    assert [run["name"] for run in runs] == ["run-1"]
    store = ServerStore(f"{server.url}/run-1")
    until(lambda: 15 in {manifest.step for manifest in store.survey().manifests}, "the newest snapshot at the server")
    local = find_record(str(tmp_path / "run-1")).process()
    assert local is not None
    servers = [str(server.process.pid), str(local.pid)]
    shown = [server.log.read_bytes(), caplog.text.encode()]
    shown += [_of(pid, name) for pid in servers for name in ("cmdline", "environ")]
    files = [*folders.files_below(runtime_dir), *folders.files_below(tmp_path / "run-1")]
    shown += [path.read_bytes() for path in files if path.is_file()]
    assert not any(given.encode() in text for text in shown for given in (token, SECRET))


def _of(pid: str, name: str) -> bytes:
    try:
        return Path("/proc", pid, name).read_bytes()
    except OSError:  # it has ended
        return b""
