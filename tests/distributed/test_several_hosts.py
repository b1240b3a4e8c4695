"""Hosts that have shards of one snapshot each: it counts once servers, or storage, have all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.server import reconcile, registry, runs
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.shards import Status, assemble
from lightning_spot.store.commit import look
from lightning_spot.store.local import LocalStore
from tests.support.server import MIB, RUN, RUN_ID, ServerBehind, committed
from tests.support.shards import apart_shard, failed_shard, sealed_apart, shard_image
from tests.support.store import GatedStore
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G10")

SERVERS = ("spot://first:7070", "spot://second:7070", "spot://third:7070")
HOSTS = 2


class Hosts:
    """The rings of some hosts, one rank each, and what lies behind them, all in this process.

    Attributes:
        hosts: their local servers.
        behind: the snapshot servers, by their URLs.
    """

    def __init__(self, root: Path, servers: tuple[str, ...], **more: Any) -> None:
        self.tier, self.servers, self.more = str(root / "tier"), servers, more
        self.gates: dict[int, GatedStore] = {}
        self.behind = {url: ServerBehind(f"{url}/{RUN}", self._server(root)) for url in servers}
        self.root = root
        self.hosts = [self._host(number) for number in range(HOSTS)]
        store = LocalStore(self.tier)
        for number in range(HOSTS):
            info = self.info(number)
            if not number:
                store.claim(info.claim())
            self.open(number)

    def info(self, host: int, attempt: int = 1) -> RunInfo:
        plain: dict[str, Any] = {"hosts": HOSTS, "servers": self.servers, "host": f"host-{host}", "pid": 1}
        info = RunInfo(name="run", id=RUN_ID, location=f"file://{self.tier}", attempt=attempt, token=f"token-{attempt}")
        return replace(info, durable_url=self.tier, session=f"trainer-{host}", **{**plain, **self.more})

    def open(self, host: int, attempt: int = 1) -> None:
        self.hosts[host].registry.begin_session(f"trainer-{host}")
        info = self.info(host, attempt)
        self.hosts[host].open_run(replace(info, apart=host if self.more.get("apart") else None))

    def write(self, step: int, *hosts: int, **fields: Any) -> None:
        """Have hosts commit their shards of a snapshot, by default all of them."""
        for host in hosts or range(HOSTS):
            manifest = apart_shard(step, host, **fields)
            who = {"session": f"trainer-{host}", "writer": host}
            committed(self.hosts[host], RUN, manifest, shard_image(manifest), **who, wait_s=60)

    def fail(self, step: int, host: int) -> None:
        self.hosts[host].uploads.fail(RUN, 1, failed_shard(step, host, HOSTS))

    def status(self, step: int, host: int = 0) -> Status:
        return self.hosts[host].wait_for(RUN, snapshot_name(step, 1), 0.0)[0]

    def wait_committed(self, step: int, *hosts: int) -> None:
        for host in hosts or range(HOSTS):
            until(lambda host=host: self.status(step, host) is Status.COMMITTED, f"step {step} to count at host {host}")

    def at_servers(self, step: int) -> set[int]:
        """Writers whose shards of a snapshot are at servers."""
        name = snapshot_name(step, 1)
        servers = [behind.server for behind in self.behind.values() if behind.server is not None]
        return {writer for server in servers for writer in server.ring.registers(RUN_ID, name)}

    def durable(self) -> list[int]:
        return [manifest.step for manifest in LocalStore(self.tier).survey().manifests]

    def close(self) -> None:
        for server in [*self.hosts, *(behind.server for behind in self.behind.values() if behind.server is not None)]:
            server.close()

    def _server(self, root: Path) -> SnapshotServer:
        return SnapshotServer(slots=None, memory_bytes=64 * MIB, allow=[str(root)], open_store=LocalStore)

    def _host(self, number: int) -> SnapshotServer:
        def store(url: str) -> Any:
            if url.startswith("spot://"):
                return self.behind[url.rpartition("/")[0]]
            return self.gates.setdefault(number, GatedStore(url))

        return SnapshotServer(slots=3, memory_bytes=64 * MIB, allow=None, open_store=store)


def whole_of(step: int) -> Manifest:
    return assemble(sealed_apart(step, host) for host in range(HOSTS))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hosts]]:
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(reconcile, "FIRST_AWAY_S", 0.1)
    made: list[Hosts] = []

    def make_one(*servers: str, **more: Any) -> Hosts:
        made.append(Hosts(tmp_path, servers, **more))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


@pytest.fixture
def left_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reconcile, registry, runs):
        monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", 0.5)


# -- at snapshot servers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["at one server", "at servers of their own"])
def test_a_snapshot_counts_once_all_shards_are_at_servers(make: Callable[..., Hosts], apart: bool) -> None:
    hosts = make(*SERVERS[:2], apart=apart)
    for step in (1, 2, 3):
        hosts.write(step, 1)
        assert hosts.status(step, 1) is Status.PENDING
        hosts.write(step, 0)
        hosts.wait_committed(step)
    used = [behind for behind in hosts.behind.values() if behind.arrived]
    assert len(used) == (2 if apart else 1)
    until(lambda: 3 in hosts.durable(), "step 3 to be durable")
    assert LocalStore(hosts.tier).has(whole_of(3))
    for number, host in enumerate(hosts.hosts):
        assert host.flush(RUN, 30) == []
        assert next(slot.manifest.step for slot in host.ring.contents(RUN_ID) if slot.manifest) == 3, number


def test_an_incomplete_snapshot_never_replaces_the_one_before(make: Callable[..., Hosts]) -> None:
    hosts = make(SERVERS[0])
    hosts.write(1, persist=False)
    hosts.wait_committed(1)
    for step in (2, 3):
        hosts.write(step, 0, persist=False)
        until(lambda step=step: hosts.at_servers(step) == {0}, "the shard to be at the server")
    assert hosts.at_servers(1) == {0, 1}
    server = hosts.behind[SERVERS[0]].server
    server.ring.forget_run(RUN_ID)
    assert hosts.at_servers(1) == {0, 1}
    hosts.write(3, 1, persist=False)
    hosts.wait_committed(3)
    until(lambda: not hosts.at_servers(2), "what was overtaken to be forgotten")
    assert hosts.status(2) is Status.ABORTED
    assert hosts.durable() == []  # nobody wants them there


def test_a_shard_that_failed_is_known_to_all_hosts(make: Callable[..., Hosts]) -> None:
    hosts = make(*SERVERS[:2], apart=True)
    hosts.write(1)
    hosts.wait_committed(1)
    hosts.write(2, 0)
    hosts.fail(2, 1)
    until(lambda: hosts.status(2, 0) is Status.ABORTED, "the other host to know")
    assert "no memory" in hosts.hosts[0].wait_for(RUN, snapshot_name(2, 1), 0.0)[1]
    hosts.write(3)
    hosts.wait_committed(3)
    assert hosts.hosts[0].flush(RUN, 30) == []
    assert 2 not in hosts.durable()


def test_no_host_waits_for_a_failure_that_a_server_brings(make: Callable[..., Hosts]) -> None:
    hosts = make(SERVERS[0])
    hosts.write(1)
    hosts.wait_committed(1)
    until(lambda: hosts.durable() == [1], "the first to be durable")
    hosts.write(2, 0)
    hosts.fail(2, 1)
    until(lambda: hosts.status(2, 0) is Status.ABORTED, "the other host to know")
    for number, host in enumerate(hosts.hosts):
        host.close_run(RUN, f"trainer-{number}", complete=True)
        host.end_session(f"trainer-{number}")
        assert host.flush(RUN, 20) == []
        until(lambda host=host: host.finished, f"host {number} to be needed no more")


def test_a_host_lost_before_all_shards_leaves_the_one_before(make: Callable[..., Hosts], left_soon: None) -> None:
    hosts = make(*SERVERS[:2], apart=True)
    hosts.write(1, persist=False)
    hosts.wait_committed(1)
    hosts.write(2, 0)
    until(lambda: hosts.at_servers(2) == {0}, "the shard to be at a server")
    for host in hosts.hosts:
        host.close()
    until(lambda: hosts.durable() == [1], "the one before to be durable")


# -- at storage, without servers --------------------------------------------------------------------------------------


def test_a_failure_is_told_by_storage(make: Callable[..., Hosts]) -> None:
    hosts = make()
    hosts.write(1, 0)
    hosts.fail(1, 1)
    until(lambda: hosts.status(1, 0) is Status.ABORTED, "the other host to know")
    until(lambda: "__0_0.distcp" not in look(LocalStore(hosts.tier), snapshot_name(1, 1)).sizes, "its files to be gone")
    hosts.write(2)
    hosts.wait_committed(2)
    assert hosts.durable() == [2]
