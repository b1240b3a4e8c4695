"""Several snapshot servers: where runs go, snapshots kept at two of them, and what is left when one is lost."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from lightning_spot import SpotCheckpoint
from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import CorruptSnapshotError, SettingsError
from lightning_spot.retry import RetryPolicy
from lightning_spot.run import attempts
from lightning_spot.run.choice import open_newest
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.survey import survey
from lightning_spot.server.placement import placed
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.slots import Commit, Mark, Slot, SlotState, View, reusable
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.coming import Coming
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.retention import Keep
from tests.support.chain import FIRST, RUN, SECOND, THIRD, Chained, chained
from tests.support.said import said, said_about
from tests.support.server import MIB, RUN_ID, image_of, manifest_of, served
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G18")

NODES = [f"spot://10.0.0.{number}:7070" for number in range(8)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Chained]]:
    with chained(tmp_path, monkeypatch) as make_one:
        yield make_one


def held(bench: Chained, base: str) -> list[int]:
    """Steps that a snapshot server has."""
    return [manifest.step for slot in bench.nodes[base].committed(RUN) if (manifest := slot.manifest)]


def at_both(bench: Chained, step: int, *bases: str) -> None:
    for base in bases or (FIRST, SECOND):
        until(lambda base=base: held(bench, base)[:1] == [step], f"{base} to have step {step}")


# -- where a run goes -------------------------------------------------------------------------------------------------


def test_runs_spread_evenly_and_only_those_of_a_lost_server_move() -> None:
    runs = [f"{number:012x}" for number in range(2000)]
    first = Counter(placed(NODES, run)[0] for run in runs)
    assert min(first.values()) > 0.8 * len(runs) / len(NODES)
    assert max(first.values()) < 1.2 * len(runs) / len(NODES)
    lost = NODES[3]
    for run in runs:
        order = placed(NODES, run)
        assert placed(reversed(NODES), run) == order
        assert placed([node for node in NODES if node != lost], run) == tuple(node for node in order if node != lost)
    heirs = Counter(placed(NODES, run)[1] for run in runs if placed(NODES, run)[0] == lost)
    assert len(heirs) == len(NODES) - 1  # not one neighbour that gets it all


def test_where_a_run_goes_does_not_change_with_the_version() -> None:
    """A host with another version would look for it elsewhere first, and two hosts of a run would part."""
    assert placed(NODES[:4], "1" * 12) == tuple(NODES[number] for number in (0, 1, 3, 2))


@pytest.mark.parametrize("servers", [None, NODES[0], NODES[:1]])
def test_more_replicas_than_nodes_are_refused(servers: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"replicas=2 .*servers"):
        SpotCheckpoint(str(tmp_path), servers=servers, replicas=2)


def test_a_node_that_is_named_twice_is_no_second_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="twice"):
        SpotCheckpoint(str(tmp_path), servers=[NODES[0], NODES[0]], replicas=2)


def test_the_node_of_this_machine_is_no_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All hosts of a job are nodes for each other, and all have the same list."""
    for other in ("192.0.2.1", "[2001:db8::1]", "127.0.0.1", "localhost", "no-such-host.invalid"):
        assert not attempts.is_here(other)
    own = socket.getaddrinfo("127.0.0.1", None, type=socket.SOCK_DGRAM)
    monkeypatch.setattr(attempts.socket, "getaddrinfo", lambda host, *_, **__: own if host == "10.0.0.0" else [])
    monkeypatch.setattr(attempts, "_is_own", lambda _family, address: address[0] == "127.0.0.1")
    assert attempts.elsewhere(NODES[:3], 2) == tuple(NODES[1:3])
    assert not said_about(caplog, "replicas-here")
    assert attempts.elsewhere(NODES[:2], 2) == (NODES[1],)
    assert said_about(caplog, "replicas-here") == [NODES[1]]
    assert attempts.elsewhere(NODES[:1], 1) == (NODES[0],)  # better than none


def test_an_address_that_is_bound_here_is_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts.ipaddress.IPv4Address, "is_loopback", False)
    assert attempts.is_here("127.0.0.1")  # as if it were an address of a network card
    assert not attempts.is_here("192.0.2.1")


def test_lightning_cli_takes_several_nodes_and_replicas(tmp_path: Path) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(SpotCheckpoint, "spot")
    written = {"dirpath": str(tmp_path), "servers": NODES[:2], "replicas": 2}
    given = parser.parse_object({"spot": {"class_path": "lightning_spot.SpotCheckpoint", "init_args": written}})
    assert (given.spot.init_args.servers, given.spot.init_args.replicas) == (NODES[:2], 2)


# -- two replicas -----------------------------------------------------------------------------------------------------


def test_each_snapshot_is_at_two_servers_and_one_uploads_it(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND, THIRD, replicas=2)
    for step in (1, 2):
        bench.save(step, wait_s=10)
        assert bench.flush() == []
        assert bench.durable()[0] == step
        at_both(bench, step)
    assert held(bench, THIRD) == []
    assert bench.by_node(FIRST).puts() == [1, 2]  # what is durable left one of them, once
    assert bench.by_node(SECOND).tries == []
    assert bench.tier().tries == []
    assert [run["carries"] for base in (FIRST, SECOND) for run in bench.nodes[base].listed()] == [True, False]
    status = bench.node.status()["runs"][RUN]["servers"]
    assert list(status.values()) == ["carries it on", "holds it", "spare"]
    assert (known := bench.behind[SECOND].known) is not None
    assert not known.carry  # nor after a restart, until it is asked to
    # Both are told, or know, what is durable: neither keeps it for ever.
    until(lambda: bench.nodes[SECOND].committed(RUN)[0].settled, "the second node to be told")


def test_of_what_a_replica_was_told_the_newest_is_remembered(make: Callable[..., Chained]) -> None:
    """One for each snapshot stayed for as long as the run lasted."""
    bench = make()
    bench.start(FIRST, SECOND, replicas=2)
    servers = bench.node.reconciler.servers[RUN_ID]
    for step in (1, 2, 3):
        sealed = bench.save(step, wait_s=10)
        assert bench.flush() == []
        at_both(bench, step)
        (replica,) = (each for each in servers.used if not each.uploads)
        until(lambda known=replica, name=sealed.name: name in str(known.told), "the replica to be told")
    assert len(replica.told) == 1


def test_a_slow_replica_gets_the_newest_and_slows_no_other(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.behind[SECOND].open.clear()
    bench.start(FIRST, SECOND, replicas=2)
    until(lambda: len(_used(bench)) == 2, "both nodes")
    bench.save(1)
    until(lambda: bench.behind[SECOND].waiting, "the second one to be at the first snapshot")
    for step in range(2, 9):  # more than there are slots
        bench.save(step, wait_s=30)
        until(lambda step=step: held(bench, FIRST)[:1] == [step], "the first node")
        assert bench.flush() == []  # and who waits for them to be durable does not wait for a further replica
    assert bench.durable()[0] == 8
    assert held(bench, SECOND) == []
    bench.behind[SECOND].open.set()
    at_both(bench, 8, SECOND)
    assert set(bench.behind[SECOND].arrived) <= {1, 2, 8}  # what was superseded meanwhile was passed over


def test_what_each_node_has_is_kept_to_send_it_changes_only() -> None:
    """The newest that a slow one has is older than what the other one has."""
    slots = [Slot(index, SlotState.COMMITTED, run=RUN_ID, commit=Commit(index)) for index in range(5)]
    for slot, at in zip(slots, ([FIRST, SECOND], [SECOND], [FIRST], [FIRST], []), strict=True):
        slot.manifest, slot.seen = manifest_of(slot.index), dict.fromkeys([*at, "/durable"], Mark.SAFE)
    view = View(slots)
    assert view.bases == {slots[1], slots[3]}
    assert [slot.index for slot in reusable([view], 0.0)] == [0, 2, 1, 3, 4]  # the newest, and what nodes have, last


@pytest.mark.parametrize("lost", [FIRST, SECOND])
def test_a_lost_server_is_one_warning_and_gets_the_newest_later(
    make: Callable[..., Chained], lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.start(FIRST, SECOND, replicas=2)
    bench.save(1)
    at_both(bench, 1)
    assert bench.flush() == []
    caplog.clear()
    left = SECOND if lost == FIRST else FIRST
    away, bench.behind[lost].node = bench.behind[lost].node, None
    for step in (2, 3, 4):
        bench.save(step, wait_s=10)
        assert bench.flush() == []
        assert bench.durable()[0] == step
        assert held(bench, left)[0] == step
    assert bench.tier().tries == []  # another node carries the run on: this host need not
    assert bench.node.tiers()[f"{lost}/{RUN}"].error
    bench.behind[lost].node = away
    at_both(bench, 4)
    assert held(bench, lost) == [4, 1]
    assert not bench.node.tiers()[f"{lost}/{RUN}"].error
    assert [(facts["used"], facts["wanted"]) for facts in said(caplog, "server-lost")] == [(1, 2)]
    bench.save(5, wait_s=10)
    at_both(bench, 5)
    assert bench.flush() == []
    assert bench.by_node(left).puts().count(5) + bench.by_node(lost).puts().count(5) == 1


def test_a_node_that_comes_back_empty_is_sent_the_newest(make: Callable[..., Chained], tmp_path: Path) -> None:
    """It was away too short a time for anybody to notice."""
    bench = make()
    bench.start(FIRST, SECOND, replicas=2)
    bench.by_node(FIRST).open.clear()  # nothing becomes durable meanwhile
    bench.save(1)
    at_both(bench, 1)
    until(lambda: f"{SECOND}/{RUN}" in bench.node.committed(RUN)[0].safe, "the host to know")
    emptied = bench.nodes[SECOND]
    bench.nodes[SECOND] = bench.behind[SECOND].node = bench.make_node(SECOND, [str(tmp_path)])
    emptied.close()
    at_both(bench, 1)
    assert [run["carries"] for run in bench.nodes[SECOND].listed()] == [False]


def test_a_third_node_takes_the_place_of_a_lost_one(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND, THIRD, replicas=2)
    bench.save(1)
    at_both(bench, 1)
    bench.behind[FIRST].node = None
    bench.save(2, wait_s=10)
    at_both(bench, 2, SECOND, THIRD)
    assert bench.flush() == []
    assert bench.durable()[0] == 2
    assert bench.tier().tries == []


def test_a_snapshot_only_a_replica_has_is_persisted_after_a_loss(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND, replicas=2)
    bench.by_node(FIRST).open.clear()
    bench.save(1)
    at_both(bench, 1)
    bench.behind[FIRST].node = None
    assert bench.flush() == []
    assert bench.durable() == [1]
    assert bench.by_node(SECOND).puts() == [1]
    assert bench.behind[SECOND].arrived == [1]  # it had it: nothing was sent again


def test_both_gone_the_host_writes_itself_and_hands_back(make: Callable[..., Chained]) -> None:
    bench = make()
    away = {base: bench.behind[base].node for base in (FIRST, SECOND)}
    for base in away:
        bench.behind[base].node = None
    bench.start(FIRST, SECOND, replicas=2)
    bench.save(1)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]
    for base, node in away.items():
        bench.behind[base].node = node
    at_both(bench, 1)
    until(lambda: bench.node.status()["runs"][RUN]["carried"], "a node to carry the run on", 40)
    bench.save(2, wait_s=10)
    at_both(bench, 2)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]


def test_if_neither_may_write_the_host_does_once(make: Callable[..., Chained]) -> None:
    bench = make(allow=[])
    bench.start(FIRST, SECOND, replicas=2)
    bench.save(1)
    assert bench.flush() == []
    at_both(bench, 1)
    assert bench.tier().puts() == [1]
    for base in (FIRST, SECOND):
        until(lambda base=base: bench.nodes[base].committed(RUN)[0].settled, "the nodes to be told what is durable")


def test_the_one_that_may_write_is_asked_where_the_other_may_not(make: Callable[..., Chained], tmp_path: Path) -> None:
    bench = make()
    bench.nodes[FIRST].close()
    bench.nodes[FIRST] = bench.behind[FIRST].node = bench.make_node(FIRST, [])
    bench.start(FIRST, SECOND, replicas=2)
    until(lambda: bench.node.status()["runs"][RUN]["carried"], "the second node to carry the run on")
    bench.save(1)
    assert bench.flush() == []
    at_both(bench, 1)
    assert bench.by_node(SECOND).puts() == [1]
    assert bench.tier().tries == []


def test_a_replica_keeps_nothing_below_itself(make: Callable[..., Chained], tmp_path: Path) -> None:
    """Its operator has it flush what names no durable URL: a replica is no such run."""
    other = tmp_path / "other"
    node = SnapshotServer(
        slots=None, memory_bytes=2**20, flush_to=str(other), open_store=lambda _url: pytest.fail("written")
    )
    info = RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="t", durable_url=str(tmp_path), carry=False)
    try:
        opened = node.open_run(info)
        assert not opened.carries
        assert opened.why_not
        assert node.ring.tiers(RUN_ID).own == ()
    finally:
        node.close()


def test_a_chunk_damaged_on_its_way_to_a_replica_is_sent_again(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND, replicas=2)
    until(lambda: len(_used(bench)) == 2, "both nodes")
    real, refused = bench.behind[FIRST].send, []

    def send(coming: Coming, **more: Any) -> Manifest:
        if not refused:
            refused.append(coming.manifest.step)
            raise CorruptSnapshotError("part 0 arrives damaged")
        return real(coming, **more)

    bench.behind[FIRST].send = send  # type: ignore[method-assign]
    bench.save(1)
    at_both(bench, 1)
    assert refused == [1]
    assert bench.flush() == []


def test_a_later_attempt_at_either_replica_fences(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND, replicas=2)
    bench.save(1)
    at_both(bench, 1)
    assert bench.flush() == []
    later = RunInfo(name="run", id=RUN_ID, location="", attempt=5, token="other", durable_url=bench.tier().url)
    bench.nodes[SECOND].open_run(later)
    bench.save(2, wait_s=10)
    bench.flush(1.0)
    assert held(bench, SECOND) == [1]


def _used(bench: Chained) -> list[str]:
    states = bench.node.status()["runs"][RUN]["servers"]
    return [url for url, state in states.items() if state in ("carries it on", "holds it")]


# -- recovery ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[tuple[SnapshotServer, str]]]:
    """Two nodes on ports of loopback that hold steps 1 and 2 of a run of this host, which is durable nowhere."""
    nodes = [
        SnapshotServer(slots=None, memory_bytes=8 * MIB, open_store=lambda _url: pytest.fail("written"))
        for _ in range(2)
    ]
    info = RunInfo(
        name="run", id=RUN_ID, location=f"file://{tmp_path / 'run'}", attempt=1, token="t", keep=Keep(newest=2)
    )
    with served(nodes[0]) as first, served(nodes[1]) as second:
        urls = [f"spot://127.0.0.1:{port}" for port in (first, second)]
        for url in urls:
            store = ServerStore(f"{url}/{RUN}")
            store.open_run(info)
            for step in (1, 2):
                image = memoryview(image_of(step, MIB))
                store.put(manifest_of(step, nbytes=MIB).sealed(image), image, attempt=1)
        yield list(zip(nodes, urls, strict=True))


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
    damaged = pair[0][0].committed(RUN)[0]
    with damaged.view() as image:
        image[MIB // 2] ^= 1
    assert _recovered(tmp_path, [url for _, url in pair]) == (2, image_of(2, MIB), pair[1][1])
    assert len(said_about(caplog, "snapshot-skipped")) == 1
