"""One client cannot spend a server: what each may make it hold is bounded, and something is left for others."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spot.client.encoding import OutgoingPart
from lightning_spot.client.part_streams import PartStream
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.stores import open_store
from lightning_spot.config import MOST_PART_BYTES
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    ServerRefusedError,
    SettingsError,
    SnapshotFailedError,
    TierReason,
)
from lightning_spot.http import routes, upload_requests
from lightning_spot.http.limits import Quota, client_at
from lightning_spot.http.metrics import not_ready
from lightning_spot.protocol.wire import NO_DIGEST, PartKind
from lightning_spot.run.attempts import folder_info
from lightning_spot.server import registry, ring, snapshot_server
from lightning_spot.server.registry import MOST_AHEAD
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.delta import MOST_RANGES, Coding, decode
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import snapshot_name
from lightning_spot.snapshot.parts import checksum
from lightning_spot.store.fences import Claim, digest_of
from tests.integration.test_service_limits import request
from tests.support.server import committed
from tests.support.small_trainer import image_of as archive_of
from tests.support.store import GatedStore
from tests.support.uploads import asked, begin, commit, open_run, part_of, plain_of, send, server_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G30")

RUN_ID = "0123456789ab"
ANOTHER = "127.0.0.2"
"""An address of loopback that another client has."""


def say(
    client: ServerClient, method: str, path: str, body: Any, source: str = "127.0.0.1", nbytes: int | None = None
) -> socket.socket:
    """Send a request from an address of loopback, or its beginning, and leave its answer for later."""
    address = (client.address.host, client.address.port)
    connection = socket.create_connection(address, timeout=30, source_address=(source, 0))
    connection.sendall(request(method, path, json.dumps(body).encode(), nbytes=nbytes))
    return connection


def status_of(connection: socket.socket, within_s: float = 30.0) -> int:
    """Status of an answer, 0 if there is none in time."""
    with connection:
        connection.settimeout(within_s)
        try:
            return int(connection.recv(65536).split(b" ")[1])
        except TimeoutError:
            return 0


# -- a share for everybody ---------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=200))
def test_whoever_comes_new_finds_room_beside_the_greedy(most: int, moves: list[tuple[int, int, bool]]) -> None:
    quota, held = Quota(most, "places"), [0] * 6
    for who, amount, takes in moves:
        if takes and quota.take(str(who), amount):
            held[who] += amount
        elif not takes and held[who] >= amount:
            quota.give_back(str(who), amount)
            held[who] -= amount
        assert quota.held == sum(held) <= most
    while any([quota.take(str(who)) for who in range(6)]):
        pass
    if most - quota.held >= 1:
        assert quota.take("new")


def test_a_lone_client_has_half() -> None:
    quota = Quota(1024, "places")
    assert sum(quota.take("one") for _ in range(2000)) == 512
    assert sum(quota.take("another") for _ in range(2000)) == 256
    with (
        pytest.raises(ServerRefusedError, check=lambda error: error.status == 503),
        quota.holding("third", 300),
    ):
        pytest.fail("it may not")
    with quota.holding("third", 100):
        assert quota.held == 868
    assert quota.held == 768


@pytest.mark.parametrize(
    ("family", "peer", "client"),
    [
        (socket.AF_INET, ("10.0.0.5", 4), "10.0.0.5"),
        (socket.AF_INET6, ("::ffff:10.0.0.5", 4, 0, 0), "10.0.0.5"),
        (socket.AF_INET6, ("2001:db8:0:7::1%eth0", 4, 0, 2), "2001:db8:0:7::/64"),
        (socket.AF_INET6, ("2001:db8:0:7:ffff::2", 4, 0, 0), "2001:db8:0:7::/64"),
    ],
)
def test_who_is_one_client(family: int, peer: tuple[Any, ...], client: str) -> None:
    assert client_at(SimpleNamespace(family=family, getpeername=lambda: peer)) == client


def test_a_process_is_a_client_of_a_unix_socket() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert client_at(here).startswith("pid ")


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "part_bytes"), [(MOST_PART_BYTES * 2, MOST_PART_BYTES + 1), (2**20, 1), (2**26, 2**13)]
)
def test_parts_of_a_size_that_nobody_sends_are_refused(nbytes: int, part_bytes: int) -> None:
    plain = plain_of(1, nbytes, part_bytes=part_bytes)
    with asked(server_of()) as client:
        open_run(client)
        with pytest.raises((SettingsError, CorruptSnapshotError)):
            begin(client, nbytes, name=plain.name, manifest=plain.to_dict())


def test_a_slot_holds_no_more_names_than_bytes() -> None:
    """A server keeps the manifest of each slot in memory of its own, and lists it to whoever asks."""
    spans = tuple(FileSpan(f"__{number}_0.distcp", 0, 0) for number in range(3000))
    empty = plain_of(1, 1, files=spans[:50])
    with asked(server_of()) as client:
        open_run(client)
        begin(client, 1, name=empty.name, manifest=empty.to_dict())
        with pytest.raises(SettingsError, match="files"):
            begin(client, 1, name=empty.name, manifest=replace(empty, files=spans).to_dict())


def test_where_no_memory_is_left_beside_the_slots_parts_go_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_requests, "SCRATCH_BYTES", 1000)
    base, new = bytes(4096), bytes(4095) + b"x"
    delta = struct.pack(">BIII", Coding.PLAIN, 1, 4095, 4096) + b"x"
    with asked(server_of()) as client:
        open_run(client)
        commit(client, 1, base)
        upload = begin(client, len(new), manifest=plain_of(2, len(new)).to_dict())
        refused = OutgoingPart(0, len(new), checksum(new), PartKind.DELTA, delta)  # what was refused has taken nothing
        assert send(client, upload, *[refused] * 3, part_of(new)) == [*[NO_DIGEST] * 3, checksum(new)]


@pytest.mark.parametrize("coding", list(Coding))
def test_a_delta_has_no_more_ranges_than_anybody_sends(coding: Coding) -> None:
    count = MOST_RANGES + 1
    bounds = b"".join(struct.pack(">II", 2 * place, 2 * place + 1) for place in range(count))
    base = bytes(64 * count)
    with pytest.raises(CorruptSnapshotError, match=str(count)):
        decode(struct.pack(">BI", coding, count) + bounds + bytes(count), base, memoryview(bytearray(base)))


@pytest.mark.parametrize("picks", [struct.pack("<IBH", 0, 4, 0) * 2, struct.pack("<IBHHI", 0, 4, 1, 0, 7) * 2])
def test_numbers_that_are_put_again_and_again_are_none(picks: bytes) -> None:
    base = bytes(256)
    with pytest.raises(CorruptSnapshotError):
        decode(struct.pack(">BI", Coding.PICKED, 0) + picks, base, memoryview(bytearray(base)))


# -- streams -----------------------------------------------------------------------------------------------------------


def test_one_client_does_not_take_all_threads_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_requests, "MOST_STREAMS", 8)
    with asked(server_of()) as client, ExitStack() as stack:
        open_run(client)
        for _ in range(4):
            stack.callback(PartStream(client, begin(client, 4096)).close)
        upload = begin(client, 4096)
        with pytest.raises(ServerRefusedError, check=TierReason.TOO_MANY_STREAMS.caused):
            PartStream(client, upload)
        address = (client.address.host, client.address.port)
        with socket.create_connection(address, timeout=30, source_address=(ANOTHER, 0)) as other:
            other.sendall(request("POST", f"/v1/uploads/{upload}/stream", headers="Upgrade: spot-parts\r\n"))
            assert other.recv(65536).startswith(b"HTTP/1.1 101 ")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_are_bounded_and_nobody_else_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """720 of them made the list unreadable that every trainer asks for when it begins."""
    monkeypatch.setattr(registry, "MOST_RUNS", 16)
    server = server_of()
    with asked(server) as client:
        assert status_of(say(client, "POST", "/v1/runs/victim/open", {"attempt": 1}, ANOTHER)) == 200
        open_run(client, "kept")
        data = commit(client, 1, b"only here", "kept")
        for number in range(40):
            open_run(client, f"run-{number}")
        names = [run["name"] for run in client.call("GET", "/v1/runs")["runs"]]
        assert {"victim", "kept", "run-39"} <= set(names)
        assert len(names) <= 16
        assert [slot.manifest for slot in server.ring.contents("kept")] == [data]


def test_no_run_is_forgotten_that_has_something_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_RUNS", 8)
    with asked(server_of()) as client:
        for number in range(4):
            open_run(client, f"run-{number}")
            commit(client, 1, b"only here", f"run-{number}")
        with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
            open_run(client, "one-more")
        open_run(client, "run-2", persisted=snapshot_name(1, 1))
        open_run(client, "one-more")  # what is durable need not be here
        assert status_of(say(client, "POST", "/v1/runs/victim/open", {"attempt": 1}, ANOTHER)) == 200
        names = {run["name"] for run in client.call("GET", "/v1/runs")["runs"]}
        assert names == {"run-0", "run-1", "run-3", "one-more", "victim"}


@pytest.mark.parametrize(("name", "most"), [("host", 255), ("token", 255), ("location", 1024), ("durable_url", 1024)])
def test_what_is_said_of_a_run_is_short(name: str, most: int) -> None:
    with asked(server_of()) as client:
        open_run(client, **{name: "x" * most})
        with pytest.raises(SettingsError, match=rf"\b{most}\b"):
            open_run(client, **{name: "x" * (most + 1)})


def test_a_restarted_server_knows_no_more_runs_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = server_of(area=tmp_path / "area")
    for number in range(20):
        before.open_run(RunInfo(name=f"run-{number:02}", id="", location="", attempt=1, token=""))
    image = archive_of(1, 4096)
    committed(before, "run-19", plain_of(1, len(image), "run-19"), image)
    before.close(keep_unsafe=True)
    monkeypatch.setattr(snapshot_server, "MOST_RUNS", 8)
    after = server_of(area=tmp_path / "area")
    assert "run-19" in after.registry.runs
    assert len(after.registry.runs) == len(list((tmp_path / "area").glob("run-*.json"))) == 8
    after.close()


@pytest.mark.parametrize("known", [0, 7])
def test_no_attempt_jumps_ahead_of_its_claim(tmp_path: Path, known: int) -> None:
    """One request with attempt 10**9 fenced a run for ever."""
    url = f"file://{tmp_path}/run"
    info = RunInfo(name="run", id=RUN_ID, location=url, attempt=known, token="t", durable_url=url)
    server = server_of(allow=[f"file://{tmp_path}"])
    if known:
        server.open_run(info)
    far = replace(info, attempt=known + MOST_AHEAD + 1, token="u")
    with pytest.raises(ServerRefusedError, check=lambda error: error.status == 409):
        server.open_run(far)
    with pytest.raises(ServerRefusedError, check=lambda error: error.status == 409):
        server.open_run(replace(far, durable_url=None))
    assert server.claimed(f"run@{RUN_ID}") == known
    claim = Claim(run_id=RUN_ID, attempt=far.attempt, digest=digest_of("u"), location=url, started_unix_s=1.0)
    open_store(url).claim(claim)
    assert server.open_run(far).attempt == far.attempt
    assert server.open_run(replace(info, attempt=far.attempt + MOST_AHEAD, token="v")).attempt
    server.close()


def test_attempts_by_the_clock_are_no_jump(tmp_path: Path) -> None:
    server = server_of(allow=None)
    info = folder_info(str(tmp_path))
    assert server.open_run(info).attempt == info.attempt
    for far in (replace(info, attempt=info.attempt + 2 * MOST_AHEAD), replace(info, id=RUN_ID)):
        with pytest.raises(ServerRefusedError, check=lambda error: error.status == 409):
            server.open_run(replace(far, token="another"))
    server.close()


# -- who waits ---------------------------------------------------------------------------------------------------------


def test_one_client_does_not_keep_others_from_waiting_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """By however many names it calls its run."""
    monkeypatch.setattr(upload_requests, "MOST_WAITING", 8)
    with asked(server_of(memory_bytes=10)) as client, ExitStack() as stack:
        for run in (f"greedy@{RUN_ID}", "other"):
            open_run(client, run)
        upload = begin(client, 10, f"greedy@{RUN_ID}")
        lease = {"attempt": 1, "nbytes": 10, "wait_s": 60}
        for number in range(20):
            one = stack.enter_context(say(client, "POST", f"/v1/runs/x{number}@{RUN_ID}/uploads", lease))
            one.settimeout(0.5)
            with suppress(TimeoutError):
                assert b"has its share" in one.recv(65536)
                break
        else:
            raise AssertionError("as many as may wait have no end")
        others = [
            stack.enter_context(say(client, "POST", path, lease, source))
            for path, source in (("/v1/runs/other/uploads", "127.0.0.1"), (f"/v1/runs/x@{RUN_ID}/uploads", ANOTHER))
        ]
        for other in others:
            other.settimeout(0.2)
            with pytest.raises(TimeoutError):
                other.recv(1)
        client.call("DELETE", f"/v1/uploads/{upload}")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/flush", {}),
        ("DELETE", "/v1/files/run/file", {}),
        ("POST", "/v1/runs/far/open", {"attempt": 2 * MOST_AHEAD}),
    ],
    ids=["flushes", "deletions", "attempts far ahead"],
)
def test_who_asks_much_of_a_slow_tier_keeps_nobody_waiting(
    method: str, path: str, body: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of them held every thread on which a server answers."""
    monkeypatch.setattr(upload_requests, "MOST_WAITING", 4)
    monkeypatch.setattr(routes, "MOST_LOOKS", 4)
    done, begun = threading.Event(), threading.Semaphore(0)

    def slow(*_: Any) -> list[str]:
        begun.release()
        assert done.wait(120)
        return []

    server = server_of(flush_to="below", open_store=lambda _: SimpleNamespace(claimed=lambda: len(slow())))
    monkeypatch.setattr(server, "flush", slow)
    monkeypatch.setattr(server, "check_owner", slow)
    with asked(server) as client, ExitStack() as stack:
        stack.callback(done.set)
        open_run(client)
        for _ in range(2):  # half of all, as long as it is alone
            stack.enter_context(say(client, method, path, body))
            assert begun.acquire(timeout=120)
        assert status_of(say(client, method, path, body)) == 503
        assert client.call("GET", "/v1/runs", timeout_s=30)["runs"]
        open_run(client, "other")  # asks no storage
        stack.enter_context(say(client, method, path, body, ANOTHER))
        assert begun.acquire(timeout=120)
        assert not begun.acquire(blocking=False)


def test_who_hangs_up_waits_for_no_flush(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(upload_requests, "MOST_WAITING", 2)
    store, begun = GatedStore(tmp_path / "run"), threading.Semaphore(0)
    server = server_of(flush_to=str(tmp_path), open_store=lambda _: store)
    store.open.clear()
    flush = server.flush

    def noted(*given: Any) -> list[str]:
        begun.release()
        return flush(*given)

    monkeypatch.setattr(server, "flush", noted)
    with asked(server) as client, ExitStack() as stack:
        stack.callback(store.open.set)
        open_run(client)
        commit(client, 1, b"not stored yet")
        with say(client, "POST", "/v1/flush", {"wait_s": 3600}):
            assert begun.acquire(timeout=120)
            assert status_of(say(client, "POST", "/v1/flush", {"wait_s": 0})) == 503
        until(lambda: status_of(say(client, "POST", "/v1/flush", {"wait_s": 0})) == 200, "its place to be free")


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_bodies_that_do_not_come_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODIES_BYTES", 2**20)
    path, half = "/v1/runs/run/open", {"attempt": 1, "x": "x" * 245_000}
    with asked(server_of()) as client, ExitStack() as stack:
        for _ in range(20):  # what is only announced takes nobody's room
            stack.enter_context(say(client, "POST", path, {}, nbytes=250_000))
        for _ in range(2):
            stack.enter_context(say(client, "POST", path, half, nbytes=250_000))
        until(
            lambda: status_of(say(client, "POST", path, half, nbytes=250_000), within_s=0.1) == 503,
            "a share to be used",
        )
        open_run(client)  # what is short is always read
        assert status_of(say(client, "POST", path, half, ANOTHER)) == 200


@pytest.mark.parametrize("nbytes", [2**16, 2**23])
def test_a_refused_request_is_answered_while_its_body_arrives(nbytes: int) -> None:
    """The rest of it was taken for a head that is too long, and the connection was reset."""
    with asked(server_of()) as client:
        for _ in range(3):
            with pytest.raises(ServerRefusedError, check=lambda error: error.status == 404):
                client.call("POST", "/v1/no-such", {"x": "x" * nbytes})
        for _ in range(3):
            with pytest.raises(ServerRefusedError, match="262144"):
                client.call("POST", "/v1/flush", {"x": "x" * max(nbytes, 2**19)})
        assert client.call("GET", "/v1/runs")["runs"] == []


def test_a_body_holds_no_millions_of_lists() -> None:
    bomb = b'{"manifest": [' + b"[]," * (2**21) + b"0]}"
    with asked(server_of()) as client:
        open_run(client)
        upload = begin(client, 10)
        address = (client.address.host, client.address.port)
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(request("POST", f"/v1/uploads/{upload}/commit", bomb))
            assert b"values" in connection.recv(65536)


# -- open files --------------------------------------------------------------------------------------------------------


def test_slots_are_bounded_by_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "open_files", lambda: 32)
    server = server_of()
    for run in ("greedy", "other", "third", "fourth"):
        server.open_run(RunInfo(name=run, id="", location="", attempt=1, token=""))
    held = [server.uploads.lease("greedy", 1, 10) for _ in range(4)]
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        server.uploads.lease("greedy", 1, 10)
    assert not_ready(server) == []
    for run, slots in (("other", 2), ("third", 1), ("fourth", 1)):
        held += [server.uploads.lease(run, 1, 10) for _ in range(slots)]
    assert not_ready(server) == ["8 of 8 slots are in use, as open files allow"]
    server.uploads.abort(held[0].id)
    assert not_ready(server) == []
    server.close()
