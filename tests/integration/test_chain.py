"""The chain: trainer, node on its host, snapshot server, durable tier; who writes what, and who is left to do it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chain as benchmark
from lightning_spot.client import remote, starting
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import FencedError, SettingsError, SnapshotNotFoundError, TierError
from lightning_spot.protocol.wire import Address
from lightning_spot.server import reconcile
from lightning_spot.server.runs import RunInfo, check_prefix, refusal
from lightning_spot.snapshot import coming
from lightning_spot.snapshot.manifest import snapshot_name
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep
from tests.support.chain import FIRST, RUN, SECOND, Chained, OverHttp, chained
from tests.support.proxy import Proxy
from tests.support.server import MIB, RUN_ID, Bench, RunningNode, manifest_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G18")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Chained]]:
    with chained(tmp_path, monkeypatch) as make_one:
        yield make_one


def test_the_node_behind_carries_a_run_on(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND)
    for step in range(1, 4):
        bench.save(step, wait_s=10)
        assert bench.flush() == []
        assert bench.durable()[0] == step  # "clean" is said only once it is
    assert bench.tier().tries == []  # the bytes left this host once
    assert bench.by_node(FIRST).puts() == [1, 2, 3]
    assert bench.behind[FIRST].sent.bytes == 3000
    assert bench.behind[SECOND].opened == 0
    (newest, *_) = bench.node.committed(RUN)
    assert sorted(newest.safe) == sorted([bench.tier().url, f"{FIRST}/{RUN}"])
    assert [(run["carries"], run["complete"]) for run in bench.nodes[FIRST].listed()] == [(True, False)]
    bench.save(4, wait_s=10, complete=True)
    assert bench.flush() == []
    assert [run["complete"] for run in bench.nodes[FIRST].listed()] == [True]  # no trainer has told it so
    bench.open(attempt=2, servers=(FIRST, SECOND))
    until(lambda: [run["attempt"] for run in bench.nodes[FIRST].listed()] == [2], "it to know of the next attempt")
    assert [run["complete"] for run in bench.nodes[FIRST].listed()] == [False]


def test_a_server_that_may_not_write_leaves_uploads_to_the_host(make: Callable[..., Chained]) -> None:
    bench = make(allow=[])
    bench.start(FIRST)
    bench.save(1)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]
    assert [manifest.step for slot in bench.nodes[FIRST].committed(RUN) if (manifest := slot.manifest)] == [1]
    status = bench.node.status()["runs"][RUN]
    assert "--allow-storage" in status["why_not"]
    assert bench.tier().url in status["why_not"]


def test_one_nodes_failure_moves_its_work_to_the_next(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, SECOND)
    bench.by_node(FIRST).open.clear()
    bench.save(1)
    until(lambda: bench.nodes[FIRST].committed(RUN), "the first node to have it")
    bench.behind[FIRST].node = None  # with its memory, before any of it was durable
    assert bench.flush() == []
    assert bench.durable() == [1]
    assert bench.by_node(SECOND).puts() == [1]
    assert bench.tier().tries == []
    bench.save(2)
    assert bench.flush() == []
    assert bench.by_node(SECOND).puts() == [1, 2]


def test_without_any_node_the_host_writes_itself_and_hands_back(make: Callable[..., Chained]) -> None:
    bench = make()
    down, bench.behind[FIRST].node = bench.behind[FIRST].node, None
    bench.start(FIRST)
    bench.save(1)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]
    bench.behind[FIRST].node = down
    until(lambda: bench.node.status()["runs"][RUN]["carried"], "the node to carry the run on", 40)
    bench.save(2)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]
    assert bench.by_node(FIRST).puts()[-1] == 2


def test_a_node_that_lost_its_memory_is_sent_the_newest_again(make: Callable[..., Chained], tmp_path: Path) -> None:
    bench = make()
    bench.start(FIRST)
    bench.by_node(FIRST).open.clear()
    bench.save(1)
    until(lambda: bench.nodes[FIRST].committed(RUN), "the node to have it")
    until(lambda: f"{FIRST}/{RUN}" in bench.node.committed(RUN)[0].safe, "the host to know")
    lost, gate, bench.far[FIRST] = bench.nodes[FIRST], bench.by_node(FIRST).open, {}
    bench.nodes[FIRST] = bench.behind[FIRST].node = bench.make_node(FIRST, [str(tmp_path)])
    assert bench.flush() == []
    assert bench.durable() == [1]
    assert bench.tier().tries == []
    gate.set()
    lost.close()


def test_a_node_is_asked_also_where_nothing_is_owed(make: Callable[..., Chained]) -> None:
    """That it was lost was noticed at the next snapshot only."""
    bench = make()
    bench.start(FIRST, SECOND)
    bench.save(1)
    assert bench.flush() == []
    bench.behind[FIRST].node = None
    until(lambda: bench.node.status()["runs"][RUN]["carrier"] == f"{SECOND}/{RUN}", "the next one to carry the run on")


def test_who_waits_for_a_run_has_its_nodes_asked_at_once(
    make: Callable[..., Chained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice leaves no time to wait until they are asked anyway."""
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 1000.0)
    bench = make()
    bench.start(FIRST, SECOND)
    bench.save(1)
    assert bench.flush() == []
    for server in bench.node.reconciler.servers[RUN_ID].all:
        server.asked_s -= 5.0
    asked = bench.behind[FIRST].opened
    assert bench.node.flush(RUN, 0.0) == []
    until(lambda: bench.behind[FIRST].opened > asked, "the node to be asked")


def test_a_node_whose_durable_tier_fails_is_stood_in_for(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST)
    bench.by_node(FIRST).fail(TierError("its credentials have expired"))
    bench.save(1)
    assert bench.flush() == []
    assert bench.tier().puts() == [1]
    assert "expired" in bench.node.status()["runs"][RUN]["why_not"]
    bench.by_node(FIRST).fail(None)
    until(lambda: bench.node.status()["runs"][RUN]["carried"], "it to be handed back", 60)


def test_a_node_without_room_is_passed_over(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.behind[FIRST].full = True
    bench.start(FIRST, SECOND)
    bench.save(1)
    assert bench.flush() == []
    assert bench.by_node(SECOND).puts() == [1]


def test_a_removed_snapshot_is_gone_everywhere(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST)
    bench.save(1)
    sealed = bench.save(2)
    assert bench.flush() == []
    bench.node.remove(RUN, sealed.name)
    assert bench.flush() == []
    bench.nodes[FIRST].flush(None, 10)
    assert bench.durable() in ([1], [])
    assert bench.nodes[FIRST].ring.find(RUN_ID, sealed.name) is None


def test_old_snapshots_are_removed_by_whoever_writes(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST, keep=Keep(newest=2))
    for step in range(1, 6):
        bench.save(step, wait_s=10)
        assert bench.flush() == []
    bench.nodes[FIRST].flush(None, 10)
    assert bench.durable() == [5, 4]
    assert not [tried for tried in bench.tier().tries if tried.startswith("delete")]


def test_a_later_attempt_fences_through_the_whole_chain(make: Callable[..., Chained]) -> None:
    bench = make()
    bench.start(FIRST)
    bench.save(1)
    assert bench.flush() == []
    other = RunInfo(name="run", id=RUN_ID, location="", attempt=5, token="other", durable_url=bench.tier().url)
    bench.nodes[FIRST].open_run(other)
    bench.save(2)
    bench.flush(2.0)
    assert bench.durable()[0] == 1 or bench.tier().puts()  # never through the node
    assert [manifest.step for slot in bench.nodes[FIRST].committed(RUN) if (manifest := slot.manifest)] == [1]
    with pytest.raises(FencedError):
        bench.behind[FIRST].open_run(RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="token-1"))


def test_parts_go_on_while_later_ones_are_still_being_sealed(
    make: Callable[..., Chained], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.start(FIRST)
    until(lambda: bench.node.status()["runs"][RUN]["server"], "the chain")
    nbytes, sealed = 4 * 8 * MIB, []
    real = coming.checksum

    def checksum(data: memoryview) -> str:
        if len(sealed) == 2:  # the third part is not sealed before one has arrived behind
            until(lambda: bench.behind[FIRST].sent.bytes, "a part to be sent on")
        sealed.append(len(data))
        return real(data)

    monkeypatch.setattr(coming, "checksum", checksum)
    bench.save(1, nbytes=nbytes)
    assert bench.flush() == []
    assert bench.behind[FIRST].sent.bytes == nbytes


# -- what a node may write --------------------------------------------------------------------------------------------


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

TRAINER = """
import sys
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.client import starting
from lightning_spot.server.runs import RunInfo
from lightning_spot.store.local import LocalStore
from tests.support.server import image_of, manifest_of, RUN_ID
url, node, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
host = starting.start(url, f"run@{RUN_ID}", slots=4, memory_bytes=2**30, server_idle_timeout_s=60)
info = RunInfo(name="run", id=RUN_ID, location="file://" + url, attempt=1, token="t", durable_url=url, servers=(node,))
host.open_run(info)
LocalStore(url).claim(info.claim())
for line in sys.stdin:
    step = int(line)
    lease = host.lease(nbytes, 30.0)
    lease.map[:nbytes] = image_of(step, nbytes)
    host.seal(lease, manifest_of(step, 1, nbytes))
    print(step, flush=True)
"""


class Trainer:
    """A process that commits snapshots at the node of its host."""

    def __init__(self, durable: Path, node: str, nbytes: int) -> None:
        command = [sys.executable, "-c", TRAINER, str(durable), node, str(nbytes)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.durable = durable

    def order(self, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """``kill -9`` for the trainer and for the node on its host."""
        record = starting.find_record(str(self.durable))
        node = ServerClient(Address(socket_path=str(record.http))).call("GET", "/v1/status")["pid"]
        os.kill(node, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        until(lambda: not record.running(), "the local server to be gone")


def test_killed_the_moment_the_memory_node_has_it(start_node: Callable[..., RunningNode], tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    node = start_node("--allow-storage", str(tmp_path))
    trainer = Trainer(durable, node.url, 8 * MIB)
    trainer.order(1)
    store = ServerStore(f"{node.url}/{RUN}")
    until(lambda: _held(store), "the snapshot server to have it")
    trainer.kill()
    found = until(lambda: LocalStore(durable).survey().manifests, "the snapshot server to make it durable")
    assert [manifest.name for manifest in found] == [snapshot_name(1, 1)]
    buffer = bytearray(found[0].nbytes)
    LocalStore(durable).fetch(found[0], memoryview(buffer))
    found[0].verify(memoryview(buffer), "durable")


def test_a_memory_node_that_was_stopped_is_passed_over(
    make_bench: Callable[..., Bench],
    start_node: Callable[..., RunningNode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP breaks no connection."""
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.5)
    monkeypatch.setattr(remote, "_ASK_S", 2.0)
    first, second = (start_node("--allow-storage", str(tmp_path)) for _ in range(2))
    bench = make_bench(kind=OverHttp, slots=4)
    try:
        bench.open(servers=(first.url, second.url))
        until(lambda: bench.node.status()["runs"][RUN]["server"], "the chain")
        bench.save(1)
        assert bench.flush(60) == []
        first.process.send_signal(signal.SIGSTOP)
        bench.save(2)
        assert bench.flush(60) == []
        assert LocalStore(bench.tier().url).survey().manifests[0].step == 2
        assert bench.tier().tries == []
        assert bench.node.status()["runs"][RUN]["server"].startswith(second.url)
    finally:
        first.process.send_signal(signal.SIGCONT)


def test_a_restarted_memory_node_is_told_of_the_run_again(
    make_bench: Callable[..., Bench], start_node: Callable[..., RunningNode], tmp_path: Path, port: int
) -> None:
    node = start_node("--allow-storage", str(tmp_path), listen=f"127.0.0.1:{port}")
    bench = make_bench(kind=OverHttp, slots=4)
    bench.open(servers=(node.url,))
    bench.save(1)
    assert bench.flush(60) == []
    node.stop(signal.SIGKILL)
    start_node("--allow-storage", str(tmp_path), listen=node.url.removeprefix("spot://"))
    bench.save(2)
    assert bench.flush(60) == []
    assert LocalStore(bench.tier().url).survey().manifests[0].step == 2
    assert ServerStore(f"{node.url}/{RUN}").claimed() == 1


def test_bytes_leave_the_trainers_host_once(start_node: Callable[..., RunningNode], tmp_path: Path) -> None:
    nbytes = 24 * MIB
    node = start_node("--allow-storage", str(tmp_path))
    line = Proxy(node.url, 1)
    trainer = Trainer(tmp_path / "durable", line.url, nbytes)
    try:
        for step in (1, 2):
            trainer.order(step)
            name = snapshot_name(step, 1)
            until(lambda name=name: (tmp_path / "durable" / name / "manifest.json").exists(), "it to be durable")
        assert line.taken_bytes <= 1.02 * 2 * nbytes
        assert line.taken_bytes >= 2 * nbytes
    finally:
        trainer.kill()
        line.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_one_gb_is_safe_as_soon_as_over_sockets_with_checksums() -> None:
    """From the first copied byte on. `benchmarks/chain.py` shows what that is in bytes over bandwidth."""
    try:
        with benchmark.Link(f"ls-test-{os.getpid()}") as link:
            found = benchmark.measure(link, rounds=7)
    except benchmark.NotPermitted as reason:
        pytest.skip(f"no shaped link here: {reason}")
    finally:
        assert f"ls-test-{os.getpid()}" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    ideal_s = found["nbytes"] * 8 / benchmark.BITS_PER_S
    raw, safe = statistics.median(found["raw_s"]) / ideal_s, statistics.median(found["safe_s"]) / ideal_s
    # Each beside its own plain transfer with a copy and checksums: what else this machine does slows both of them.
    ratios = [safe_s / checked_s for safe_s, checked_s in zip(found["safe_s"], found["checked_s"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"plain sockets {raw:.2f}, safe {safe:.2f} x bytes / bandwidth, {ratio:.2f} x sockets that check: {ratios}")
    assert ratio <= benchmark.TARGET


def _held(store: ServerStore) -> Any:
    try:
        return store.listing()
    except TierError:
        return []


def test_a_node_that_forgot_a_run_is_told_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ServerStore(f"{FIRST}/{RUN}")
    told: list[Any] = []

    def call(_method: str, path: str, body: Any = None, **_more: Any) -> dict[str, Any]:
        if path.endswith("/open"):
            told.append(body)
            return {"attempt": 3, "carries": True, "why_not": ""}
        if path.endswith("/uploads") and not told:
            raise SnapshotNotFoundError("this node does not know the run")
        return {}

    monkeypatch.setattr(store.client, "call", call)
    store.know(
        RunInfo(name="run", id=RUN_ID, location="", attempt=3, token="t", keep=Keep(newest=7), durable_url="s3://b/run")
    )
    store._lease(manifest_of(1), 3)
    assert [(body["keep"]["newest"], body["durable_url"], body["token"]) for body in told] == [(7, "s3://b/run", "t")]
