"""Several snapshot servers: where runs go, snapshots kept at two of them, and what is left when one is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_spot import SpotCheckpoint
from lightning_spot.client import remote
from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import SettingsError, TierError
from lightning_spot.retry import RetryPolicy
from lightning_spot.run import attempts
from lightning_spot.run.choice import open_newest
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import survey
from lightning_spot.say import listen
from lightning_spot.server import reconcile, worker
from lightning_spot.server.placement import placed
from lightning_spot.server.runs import RunInfo, check_prefix, refusal
from lightning_spot.server.slots import Commit, Mark, Slot, SlotState, View, evictable
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep
from tests.faults.test_crash import kill_server, newest_durable
from tests.support.oracle import Server, check_checkpoint
from tests.support.said import said, said_about
from tests.support.server import (
    FIRST,
    MIB,
    RUN,
    RUN_ID,
    SECOND,
    THIRD,
    MakeBench,
    MakeWithServers,
    OverHttp,
    StartServer,
    WithServers,
    image_of,
    is_kept,
    manifest_of,
    served,
)
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G18")

SERVERS = [f"spot://10.0.0.{number}:7070" for number in range(8)]


def at_both(bench: WithServers, step: int, *bases: str) -> None:
    for base in bases or (FIRST, SECOND):
        until(lambda base=base: bench.held(base)[:1] == [step], f"{base} to have step {step}")


# -- where a run goes -------------------------------------------------------------------------------------------------


def test_runs_spread_evenly_and_only_those_of_a_lost_server_move() -> None:
    runs = [f"{number:012x}" for number in range(2000)]
    first = Counter(placed(SERVERS, run)[0] for run in runs)
    assert min(first.values()) > 0.8 * len(runs) / len(SERVERS)
    assert max(first.values()) < 1.2 * len(runs) / len(SERVERS)
    lost = SERVERS[3]
    for run in runs:
        order = placed(SERVERS, run)
        assert placed(reversed(SERVERS), run) == order
        assert placed([server for server in SERVERS if server != lost], run) == tuple(
            server for server in order if server != lost
        )
    heirs = Counter(placed(SERVERS, run)[1] for run in runs if placed(SERVERS, run)[0] == lost)
    assert len(heirs) == len(SERVERS) - 1  # not one neighbour that gets it all


def test_where_a_run_goes_does_not_change_with_the_version() -> None:
    """A host with another version would look for it elsewhere first, and two hosts of a run would part."""
    assert placed(SERVERS[:4], "1" * 12) == tuple(SERVERS[number] for number in (0, 1, 3, 2))


@pytest.mark.parametrize("servers", [None, SERVERS[0], SERVERS[:1], [SERVERS[0], SERVERS[0]]])
def test_more_replicas_than_servers_are_refused(servers: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"replicas=2|servers="):
        SpotCheckpoint(str(tmp_path), servers=servers, replicas=2)


def test_the_server_of_this_machine_is_no_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All hosts of a job are servers for each other, and all have the same list."""
    for other in ("192.0.2.1", "[2001:db8::1]", "127.0.0.1", "localhost", "no-such-host.invalid"):
        assert not attempts.is_here(other)
    own = socket.getaddrinfo("127.0.0.1", None, type=socket.SOCK_DGRAM)
    monkeypatch.setattr(attempts.socket, "getaddrinfo", lambda host, *_, **__: own if host == "10.0.0.0" else [])
    monkeypatch.setattr(attempts.ipaddress.IPv4Address, "is_loopback", False)  # as if a network card had it
    assert attempts.elsewhere(SERVERS[:3], 2) == tuple(SERVERS[1:3])
    assert not said_about(caplog, "replicas-here")
    assert attempts.elsewhere(SERVERS[:2], 2) == (SERVERS[1],)
    assert said_about(caplog, "replicas-here") == [SERVERS[1]]
    assert attempts.elsewhere(SERVERS[:1], 1) == (SERVERS[0],)  # better than none


def test_an_address_that_is_bound_here_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts.ipaddress.IPv4Address, "is_loopback", False)
    assert attempts.is_here("127.0.0.1")  # as if it were an address of a network card
    assert not attempts.is_here("192.0.2.1")


# -- one of them carries a run on to storage -------------------------------------------------------------------------


def test_the_server_behind_carries_a_run_on(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST, SECOND)
    for step in range(1, 4):
        bench.save(step, wait_s=60)
        assert bench.flush() == []
        assert bench.durable()[0] == step  # "clean" is said only once it is
    assert bench.tier().tries == []  # the bytes left this host once
    assert bench.by_server(FIRST).puts() == [1, 2, 3]
    assert bench.behind[FIRST].sent_bytes == 3000
    assert bench.behind[SECOND].opened == 0
    (newest, *_) = bench.server.ring.contents(RUN_ID)
    assert sorted(newest.safe) == sorted([bench.tier().url, f"{FIRST}/{RUN}"])
    assert [(run["carries"], run["state"]) for run in bench.servers[FIRST].listed()] == [(True, "stopped")]
    bench.save(4, wait_s=60, complete=True)
    assert bench.flush() == []
    assert [run["state"] for run in bench.servers[FIRST].listed()] == ["complete"]  # no trainer has told it so
    bench.open(attempt=2, servers=(FIRST, SECOND))
    until(lambda: [run["attempt"] for run in bench.servers[FIRST].listed()] == [2], "it to know of the next attempt")
    assert [run["state"] for run in bench.servers[FIRST].listed()] == ["stopped"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_servers_that_may_not_write_leave_uploads_to_the_host(with_servers: MakeWithServers, replicas: int) -> None:
    bench = with_servers(allow=[])
    bench.start(FIRST, SECOND, replicas=replicas)
    bench.save(1)
    assert bench.flush() == []
    at_both(bench, 1, *(FIRST, SECOND)[:replicas])
    assert bench.tier().puts() == [1]
    for base in (FIRST, SECOND)[:replicas]:
        until(
            lambda base=base: bench.servers[base].ring.contents(RUN_ID)[0].durable_or_superseded,
            "the servers to be told what is durable",
        )
    assert bench.tier().url in bench.server.status()["runs"][RUN]["why_not"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_servers_failure_moves_its_work_to_the_next(with_servers: MakeWithServers, replicas: int) -> None:
    bench = with_servers()
    bench.start(FIRST, SECOND, replicas=replicas)
    bench.by_server(FIRST).open.clear()
    bench.save(1)
    at_both(bench, 1, *(FIRST, SECOND)[:replicas])
    bench.behind[FIRST].server = None  # with its memory, before any of it was durable
    assert bench.flush() == []
    assert bench.durable() == [1]
    assert bench.behind[SECOND].arrived == [1]  # once: a replica had it
    bench.save(2)
    assert bench.flush() == []
    assert bench.by_server(SECOND).puts() == [1, 2]
    assert bench.tier().tries == []


def test_who_waits_for_a_run_has_its_servers_asked_at_once(
    with_servers: MakeWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice leaves no time to wait until they are asked anyway."""
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 1000.0)
    bench = with_servers()
    bench.start(FIRST, SECOND)
    bench.save(1)
    assert bench.flush() == []
    for server in bench.server.reconciler.servers[RUN_ID].all:
        server.answered_s -= 5.0
    asked = bench.behind[FIRST].opened
    assert bench.server.flush(RUN, 0.0) == []
    until(lambda: bench.behind[FIRST].opened > asked, "the server to be asked")


@pytest.mark.parametrize("idle_s", [0.01, 1.0])
def test_nothing_is_kept_of_servers_that_a_new_list_leaves_out(
    with_servers: MakeWithServers, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    monkeypatch.setattr(worker, "IDLE_S", idle_s)
    bench = with_servers()
    bench.start(FIRST, SECOND)
    bench.save(1)
    assert bench.flush() == []
    bench.open(attempt=2, servers=(SECOND,))
    bench.save(2, attempt=2)
    assert bench.flush() == []
    until(lambda: f"{FIRST}/{RUN}" not in bench.server.tiers(), "the first one to be forgotten")
    assert f"{SECOND}/{RUN}" in bench.server.tiers()


def test_a_server_whose_durable_tier_fails_is_stood_in_for(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST)
    bench.by_server(FIRST).fail(TierError("its credentials have expired"))
    bench.save(1)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]
    assert "expired" in bench.server.status()["runs"][RUN]["why_not"]
    bench.by_server(FIRST).fail(None)
    until(lambda: bench.server.status()["runs"][RUN]["kept_at"], "it to be handed back")


@pytest.mark.parametrize(("lacks", "replicas"), [("room", 1), ("rights", 2)])
def test_a_server_that_cannot_carry_a_run_on_is_passed_over(
    with_servers: MakeWithServers, lacks: str, replicas: int
) -> None:
    bench = with_servers()
    if lacks == "room":
        bench.behind[FIRST].full = True
    else:
        bench.servers[FIRST].close()
        bench.servers[FIRST] = bench.behind[FIRST].server = bench.make_server(FIRST, [])
    bench.start(FIRST, SECOND, replicas=replicas)
    until(lambda: bench.server.status()["runs"][RUN]["kept_at"], "a server to carry the run on")
    bench.save(1)
    assert bench.flush() == []
    at_both(bench, 1, *(FIRST, SECOND)[-replicas:])
    assert bench.by_server(SECOND).puts() == [1]
    assert lacks == "room" or bench.tier().tries == []


def test_a_removed_snapshot_is_gone_everywhere(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST)
    bench.save(1)
    sealed = bench.save(2)
    assert bench.flush() == []
    bench.server.remove(RUN, sealed.name)
    assert bench.flush() == []
    bench.servers[FIRST].flush(None, 10)
    assert bench.durable() in ([1], [])
    assert bench.servers[FIRST].ring.find(RUN_ID, sealed.name) is None


def test_old_snapshots_are_removed_by_whoever_writes(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST, keep=Keep(newest=2))
    for step in range(1, 6):
        bench.save(step, wait_s=60)
        assert bench.flush() == []
    bench.servers[FIRST].flush(None, 10)
    assert bench.durable() == [5, 4]
    assert not [tried for tried in bench.tier().tries if tried.startswith("delete")]


# -- two replicas -----------------------------------------------------------------------------------------------------


def test_each_snapshot_is_at_two_servers_and_one_uploads_it(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST, SECOND, THIRD, replicas=2)
    for step in (1, 2):
        bench.save(step, wait_s=60)
        assert bench.flush() == []
        assert bench.durable()[0] == step
        at_both(bench, step)
    assert bench.held(THIRD) == []
    assert bench.by_server(FIRST).puts() == [1, 2]  # what is durable left one of them, once
    assert bench.by_server(SECOND).tries == []
    assert bench.tier().tries == []
    assert [run["carries"] for base in (FIRST, SECOND) for run in bench.servers[base].listed()] == [True, False]
    status = bench.server.status()["runs"][RUN]["servers"]
    assert list(status.values()) == ["carries it on", "holds it", "spare"]
    assert (known := bench.behind[SECOND].known) is not None
    assert not known.carry  # nor after a restart, until it is asked to
    # Both are told, or know, what is durable: neither keeps it for ever.
    until(lambda: bench.servers[SECOND].ring.contents(RUN_ID)[0].durable_or_superseded, "the second server to be told")


def test_a_slow_replica_gets_the_newest_and_slows_no_other(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.behind[SECOND].open.clear()
    bench.start(FIRST, SECOND, replicas=2)
    until(lambda: len(_used(bench)) == 2, "both servers")
    bench.save(1)
    until(lambda: bench.behind[SECOND].waiting, "the second one to be at the first snapshot")
    for step in range(2, 9):  # more than there are slots
        bench.save(step, wait_s=60)
        until(lambda step=step: bench.held(FIRST)[:1] == [step], "the first server")
        assert bench.flush() == []  # and who waits for them to be durable does not wait for a further replica
    assert bench.durable()[0] == 8
    assert bench.held(SECOND) == []
    bench.behind[SECOND].open.set()
    at_both(bench, 8, SECOND)
    assert set(bench.behind[SECOND].arrived) <= {1, 2, 8}  # what was superseded meanwhile was passed over


def test_what_each_server_has_is_kept_to_send_it_changes_only() -> None:
    """The newest that a slow one has is older than what the other one has."""
    slots = [Slot(index, SlotState.HELD, run=RUN_ID, commit=Commit(index)) for index in range(5)]
    for slot, at in zip(slots, ([FIRST, SECOND], [SECOND], [FIRST], [FIRST], []), strict=True):
        slot.manifest, slot.seen = manifest_of(slot.index), dict.fromkeys([*at, "/durable"], Mark.SAFE)
    view = View(slots)
    assert view.bases == {slots[1], slots[3]}
    assert [slot.index for slot in evictable([view], 0.0)] == [0, 2, 1, 3, 4]  # the newest, and what servers have, last


@pytest.mark.parametrize("lost", [FIRST, SECOND])
def test_a_lost_server_is_one_warning_and_gets_the_newest_later(
    with_servers: MakeWithServers, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = with_servers()
    bench.start(FIRST, SECOND, replicas=2)
    bench.save(1)
    at_both(bench, 1)
    assert bench.flush() == []
    caplog.clear()
    left = SECOND if lost == FIRST else FIRST
    away, bench.behind[lost].server = bench.behind[lost].server, None
    for step in (2, 3, 4):
        bench.save(step, wait_s=60)
        assert bench.flush() == []
        assert bench.durable()[0] == step
        assert bench.held(left)[0] == step
    assert bench.tier().tries == []  # another server carries the run on: this host need not
    assert bench.server.tiers()[f"{lost}/{RUN}"].error
    bench.behind[lost].server = away
    at_both(bench, 4)
    assert bench.held(lost) == [4, 1]
    assert not bench.server.tiers()[f"{lost}/{RUN}"].error
    assert [(facts["used"], facts["wanted"]) for facts in said(caplog, "server-lost")] == [(1, 2)]
    bench.save(5, wait_s=60)
    at_both(bench, 5)
    assert bench.flush() == []
    assert bench.by_server(left).puts().count(5) + bench.by_server(lost).puts().count(5) == 1


def test_nothing_is_logged_under_the_rings_lock(with_servers: MakeWithServers) -> None:
    """A slow reader of standard error held everything up, the event loop too."""
    bench, is_free = with_servers(), dict[str, bool]()

    def takes_lock() -> bool:
        with contextlib.ExitStack() as ends:
            return bench.server.ring.lock.acquire(timeout=5.0) and bool(ends.callback(bench.server.ring.lock.release))

    def look(key: str, _about: str, _line: str, is_over: bool) -> None:
        with ThreadPoolExecutor(1) as pool:
            is_free[f"{key} over" if is_over else key] = pool.submit(takes_lock).result()

    with contextlib.ExitStack() as ends:
        ends.callback(listen(look))
        bench.start(FIRST)
        bench.save(1)
        assert bench.flush() == []
        bench.tier().fail(TierError("made"))
        away, bench.behind[FIRST].server = bench.behind[FIRST].server, None
        bench.save(2, wait_s=60)
        until(lambda: {"server-lost", "upload-failing"} <= is_free.keys(), "both to fail")
        bench.tier().fail(None)
        assert bench.flush() == []
        bench.behind[FIRST].server = away
        until(lambda: {"server-lost over", "upload-failing over"} <= is_free.keys(), "both to work")
    assert all(is_free.values()), is_free


def test_a_server_that_comes_back_empty_is_sent_the_newest(with_servers: MakeWithServers, tmp_path: Path) -> None:
    """It was away too short a time for anybody to notice."""
    bench = with_servers()
    bench.start(FIRST, SECOND, replicas=2)
    bench.by_server(FIRST).open.clear()  # nothing becomes durable meanwhile
    bench.save(1)
    at_both(bench, 1)
    until(lambda: f"{SECOND}/{RUN}" in bench.server.ring.contents(RUN_ID)[0].safe, "the host to know")
    emptied = bench.servers[SECOND]
    bench.servers[SECOND] = bench.behind[SECOND].server = bench.make_server(SECOND, [str(tmp_path)])
    emptied.close()
    at_both(bench, 1)
    assert [run["carries"] for run in bench.servers[SECOND].listed()] == [False]


def test_a_replica_keeps_nothing_below_itself(tmp_path: Path) -> None:
    """Its operator has it flush what names no durable URL: a replica is no such run."""
    other = tmp_path / "other"
    server = SnapshotServer(
        slots=None, memory_bytes=2**20, flush_to=str(other), open_store=lambda _url: pytest.fail("written")
    )
    info = RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="t", durable_url=str(tmp_path), carry=False)
    try:
        opened = server.open_run(info)
        assert not opened.carries
        assert opened.why_not
        assert server.ring.tiers(RUN_ID).own == ()
    finally:
        server.close()


def _used(bench: WithServers) -> list[str]:
    states = bench.server.status()["runs"][RUN]["servers"]
    return [url for url, state in states.items() if state in ("carries it on", "holds it")]


# -- recovery ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[tuple[SnapshotServer, str]]]:
    """Two servers on ports of loopback that hold steps 1 and 2 of a run of this host, which is durable nowhere."""
    servers = [
        SnapshotServer(slots=None, memory_bytes=8 * MIB, open_store=lambda _url: pytest.fail("written"))
        for _ in range(2)
    ]
    info = RunInfo(
        name="run", id=RUN_ID, location=f"file://{tmp_path / 'run'}", attempt=1, token="t", keep=Keep(newest=2)
    )
    with served(servers[0]) as first, served(servers[1]) as second:
        urls = [f"spot://127.0.0.1:{port}" for port in (first, second)]
        for url in urls:
            store = ServerStore(f"{url}/{RUN}")
            store.open_run(info)
            for step in (1, 2):
                image = memoryview(image_of(step, MIB))
                store.put(manifest_of(step, nbytes=MIB).sealed(image), image, attempt=1)
        yield list(zip(servers, urls, strict=True))


def _recovered(tmp_path: Path, urls: list[str]) -> tuple[int, bytes, str]:
    found = survey(Location.of(str(tmp_path / "run"), servers=urls), RetryPolicy(tries=1))
    assert found.identity.run_id == RUN_ID

    def use(snapshot: OpenSnapshot) -> bytes:
        return os.pread(snapshot.fds[0], snapshot.manifest.nbytes, 0)

    recovered = open_newest(found, use, RetryPolicy(tries=1))
    return recovered[0].manifest.step, recovered[1], recovered[0].tier


def test_the_newest_snapshot_is_found_with_one_replica_gone(
    pair: list[tuple[SnapshotServer, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # and listens to nobody
        urls = [f"spot://127.0.0.1:{gone.getsockname()[1]}", pair[1][1]]
        assert _recovered(tmp_path, urls) == (2, image_of(2, MIB), pair[1][1])
    assert said_about(caplog, "not-read") == [urls[0]]


def test_a_replica_that_returns_damaged_chunks_is_skipped(
    pair: list[tuple[SnapshotServer, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = pair[0][0].ring.contents(RUN_ID)[0]
    with damaged.view() as image:
        image[MIB // 2] ^= 1
    assert _recovered(tmp_path, [url for _, url in pair]) == (2, image_of(2, MIB), pair[1][1])
    assert len(said_about(caplog, "snapshot-skipped")) == 1


# -- what a server may write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "prefix", "allowed"),
    [
        ("s3://bucket/prefix/run-1", "s3://bucket/prefix", True),
        ("s3://bucket/prefix/run-1", "s3://bucket/prefix/", True),
        ("s3://bucket/prefix", "s3://bucket/prefix", True),
        ("s3://bucket/run", "s3://bucket", True),
        ("S3://bucket/run", "s3://bucket", True),
        ("s3://bucket/prefix-evil/run", "s3://bucket/prefix", False),
        ("s3://bucket-evil/prefix/run", "s3://bucket", False),
        ("s3://bucket/prefix/../other", "s3://bucket/prefix", False),
        ("s3://bucket/prefix/./run", "s3://bucket/prefix", False),
        ("s3://bucket/prefix//run", "s3://bucket/prefix", False),
        ("s3://bucket", "s3://bucket/prefix", False),
        ("s3://bucket/prefix\\..\\other", "s3://bucket/prefix", False),
        ("s3://bucket/prefix?x=/../y", "s3://bucket/prefix", False),
        ("simplecache::s3://bucket/prefix/run", "s3://bucket/prefix", False),
        ("gs://bucket/prefix/run", "s3://bucket/prefix", False),
        ("/data/runs/run-1", "/data/runs", True),
        ("file:///data/runs/run-1", "/data/runs", True),
        ("/data/runs-evil/run-1", "/data/runs", False),
        ("/data/runs/../../etc", "/data/runs", False),
        ("data/runs/run-1", "/data/runs", False),
        ("", "/data/runs", False),
    ],
)
def test_prefixes_have_no_gaps(url: str, prefix: str, allowed: bool) -> None:
    assert (refusal(url, [prefix]) == "") is allowed


def test_a_symlink_does_not_lead_out_of_a_prefix(tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path)
    assert refusal(str(tmp_path / "allowed/link/other"), [str(tmp_path / "allowed")])


def test_a_prefix_that_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(SettingsError):
        check_prefix("somewhere/relative")


# -- as processes -----------------------------------------------------------------------------------------------------


def test_killed_the_moment_the_server_has_it(start_server: StartServer, tmp_path: Path, warm_python: str) -> None:
    durable, server = tmp_path / "run-1", start_server("--allow-storage", str(tmp_path))

    def held() -> int:
        runs = server.client().call("GET", "/v1/status")["runs"].values()
        return max((run["newest"].get("committed", {"step": 0})["step"] for run in runs), default=0)

    with contextlib.closing(Server("tests.support.crash_trainer", tmp_path / "trainers.log", warm_python)) as trainers:
        request = {"dirpath": durable, "oracle": tmp_path / "oracle", "elements": 3000}
        pid = trainers.spawn(**request, ballast=2_000_000, alarm_s=120, servers=[server.url])
        step = until(held, "the snapshot server to have one")
        os.kill(pid, signal.SIGKILL)
        assert trainers.read() == "-9"
        kill_server(durable)
    until(lambda: newest_durable(durable) >= (1, step), "the snapshot server to make it durable")
    newest = LocalStore(durable).survey().manifests[0]
    with open(durable / newest.data_path, "rb") as file:
        check_checkpoint(file, newest.step)


def test_a_server_that_was_stopped_is_passed_over(
    make_bench: MakeBench,
    start_server: StartServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP breaks no connection."""
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.5)
    monkeypatch.setattr(remote, "ASK_S", 2.0)
    first, second = (start_server("--allow-storage", str(tmp_path)) for _ in range(2))
    bench = make_bench(kind=OverHttp, slots=4)
    try:
        bench.open(servers=(first.url, second.url))
        until(lambda: is_kept(bench.server.status()["runs"][RUN]), "the server")
        bench.save(1)
        assert bench.flush(60) == []
        first.process.send_signal(signal.SIGSTOP)
        bench.save(2)
        assert bench.flush(60) == []
        assert LocalStore(bench.tier().url).survey().manifests[0].step == 2
        assert bench.tier().tries == []
        assert bench.server.status()["runs"][RUN]["kept_at"][0].startswith(second.url)
    finally:
        first.process.send_signal(signal.SIGCONT)
