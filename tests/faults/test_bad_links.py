"""Machines whose links are slow, delay and lose packets, and are cut for a while: what is left is exact yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_spot.client.remote import ServerStore
from tests.distributed.test_sharded_bucket import Bucket
from tests.distributed.test_together import check_run
from tests.support.link import Link
from tests.support.machines import PHASES, STEPS, Machines, Sharded, flushing, started, twin, twins, variant
from tests.support.network import TOKEN, listening, network_or_skip
from tests.support.server import RUN_ID
from tests.support.waiting import until
from tests.support.wire_pair import RUN, Sender, state

pytestmark = pytest.mark.guarantee("G20")

__all__ = ["twin", "twins"]

FAR = Link(delay_ms=40.0, jitter_ms=10.0, loss=0.005)
"""Another continent, by a line that loses packets."""
SLOW = Link(bits_per_s=200_000_000)
CUT_S = 20.0
WAIT_S = 800.0  # a snapshot at each step, which crosses the far link a dozen times: on a busy machine minutes
LINKS = [pytest.param(FAR, id="far"), pytest.param(SLOW, id="slow")]


@pytest.mark.parametrize("cut_s", [0.0, 2.0])
def test_a_snapshot_gets_to_a_memory_node_by_a_far_link_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_s: float
) -> None:
    """Also if the link is cut while it is sent."""
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    images = [bytes(state(step, 300_000)) for step in (1, 2)]
    images[1] = images[0][:200_000] + images[1][200_000:]
    sent: list[int] = []

    def bring() -> list[bytes]:
        sender, read = Sender(tmp_path, url), []
        try:
            sender.open(durable=False, nodes=(url,))
            until(lambda: sender.node.routes.status(RUN_ID)["node"], "the chain", 60.0)
            sent.extend(sender.bring(step, image) for step, image in enumerate(images, 1))
            store = ServerStore(f"{url}/{RUN}")
            for manifest in sorted(store.survey().manifests, key=lambda manifest: manifest.step):
                image = bytearray(manifest.nbytes)
                store.fetch(manifest, memoryview(image))
                read.append(bytes(image))
        finally:
            sender.close()
        return read

    with network_or_skip("far", ("near", "memory")) as network, ThreadPoolExecutor(1) as thread:
        for host in network.address:
            network.shape(host, **asdict(FAR))
        url = listening(network, "memory", 7070, tmp_path / "node", "--allow-storage", str(tmp_path))
        brought = thread.submit(network.there, "near", bring)
        if cut_s:
            until(lambda: network.received("memory") > 50_000 or brought.done(), "it to be on its way", 60.0)
            assert not brought.done()
            network.cut("near")
            time.sleep(cut_s)
            network.mend("near")
        assert brought.result(60.0) == images
    assert cut_s or sent[1] < 0.6 * len(images[1])  # of the second one, what has changed


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Link:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, link: Link) -> Iterator[Machines]:
    yield from started(variant(Machines, link=link), tmp_path, monkeypatch, warm_python)


@pytest.fixture(params=[Sharded, Bucket])
def sharded(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: str,
    link: Link,
) -> Iterator[Sharded]:
    yield from started(variant(request.param, link=link), tmp_path, monkeypatch, warm_python)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("when", [*PHASES, flushing])
def test_two_machines_train_by_bad_links_and_one_is_cut(
    machines: Machines, tmp_path: Path, when: Callable[[Machines], None]
) -> None:
    machines.train("twin", STEPS)
    assert machines.wait("twin", WAIT_S) == [0, 0]
    machines.train("run", STEPS)
    machines.come_to(8)
    when(machines)
    machines.cut_for_a_while("second", CUT_S)
    assert machines.wait("run", WAIT_S) == [0, 0], machines.log()
    check_run(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("when", [*PHASES, flushing])
def test_machines_train_in_shards_by_bad_links_and_one_is_cut(
    sharded: Sharded, twin: Path, when: Callable[[Sharded], None]
) -> None:
    if when is flushing and isinstance(sharded, Bucket):
        pytest.skip("each host brings its files to the bucket at once: there is no other phase than sending")
    sharded.train("run", STEPS)
    sharded.come_to(8)
    when(sharded)
    sharded.cut_for_a_while("second", CUT_S)
    assert sharded.wait("run", WAIT_S) == [0, 0], sharded.log()
    sharded.check(twin)
