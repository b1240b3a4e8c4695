"""Portions at servers whose trainers are gone, or one of which is: they become durable, or go in bounded time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning_spot.client.spread_store import JointPortions

from lightning_spot.client.stores import open_store
from lightning_spot.errors import TierError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.portion import Portions
from lightning_spot.memory import flusher, replication, work
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import SpreadPlace
from lightning_spot.memory.node import Node
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.work import Job, Kind, Work
from lightning_spot.tiers.fences import Claim, digest_of
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.store import Store
from tests.faults.test_spread_room import HOSTS, NBYTES, Two
from tests.support.server import image_of, manifest_of
from tests.support.small_trainer import RUN_ID, info_of
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G18")

MANIFEST = Manifest(run="run", name=snapshot_name(1, 1), step=1, attempt=1, nbytes=1)


class Carried(Two):
    """Two nodes that bring down what they have; each host has its own."""

    def __init__(self, root: Path, ends: contextlib.ExitStack, min_upload_interval_s: float | None = None) -> None:
        self.min_upload_interval_s, self.store = min_upload_interval_s, LocalStore(str(root / "run"))
        super().__init__(root, ends, slots=4, allow=[str(root)])

    def info(self) -> RunInfo:
        return replace(info_of(self.url, self.attempt), min_upload_interval_s=self.min_upload_interval_s, spread=True)

    def bring_all(self, step: int) -> None:
        """Nobody is left to say that it is whole."""
        self.begin(step)
        for host in HOSTS:
            self.bring(step, host)

    def tell(self, node: int, step: int, **told: bool) -> None:
        self.stores[node].whole(Told(snapshot_name(step, self.attempt), **told), attempt=self.attempt)

    def durable(self) -> list[int]:
        return [manifest.step for manifest in self.store.survey().manifests]


Make = Callable[..., Carried]


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(Portions, "read", lambda *_: Portions((((0, NBYTES),),), (1,)))
    with contextlib.ExitStack() as ends:
        yield lambda min_upload_interval_s=None: Carried(tmp_path, ends, min_upload_interval_s)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run counts as left by its trainer at once."""
    monkeypatch.setattr(work, "LEFT_S", 0.3)


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("told", [(), (0,), (1,), HOSTS])
def test_what_is_whole_becomes_durable_whoever_was_told_so(carried: Make, told: tuple[int, ...]) -> None:
    nodes = carried()
    nodes.bring_all(1)
    for node in told:
        nodes.tell(node, 1)
    until(lambda: nodes.durable() == [1], "it at the durable tier")
    until(lambda: all(slot.safe for node in nodes.nodes for slot in node.ring.committed()), "all to know it")


def claim(nodes: Carried, attempt: int) -> None:
    """Another attempt claims the run at the durable tier, and its machines are lost before a node hears of it."""
    nodes.store.claim(
        Claim(
            attempt=attempt, run_id=RUN_ID, digest=digest_of(f"token-{attempt}"), location=nodes.url, started_unix_s=0.0
        )
    )


@pytest.mark.parametrize("told", [(), (0,), HOSTS])
def test_what_an_attempt_has_left_becomes_durable_although_another_one_has_come_and_gone(
    carried: Make, monkeypatch: pytest.MonkeyPatch, told: tuple[int, ...]
) -> None:
    """The nodes were refused, let go what they had, and ended as if all were safe."""
    monkeypatch.setattr(work, "LEFT_S", 600.0)
    nodes = carried(min_upload_interval_s=0.0)
    claim(nodes, 2)
    nodes.bring_all(1)
    for node in told:
        nodes.tell(node, 1, brings=True)
    time.sleep(0.5)
    assert nodes.durable() == []  # its trainer may live
    assert nodes.whole() == [1]
    monkeypatch.setattr(work, "LEFT_S", 0.1)
    for node in nodes.nodes:
        node.flush(None, 0.1)  # tried again soon
    until(lambda: nodes.durable() == [1], "it at the durable tier")
    until(lambda: all(slot.safe for node in nodes.nodes for slot in node.ring.committed()), "all to know it")


@pytest.mark.usefixtures("left")
def test_what_an_attempt_has_left_is_brought_nowhere_that_has_newer_of_the_next_one(carried: Make) -> None:
    nodes = carried(min_upload_interval_s=0.0)
    claim(nodes, 2)
    image = memoryview(image_of(1, NBYTES))
    nodes.store.put(manifest_of(1, 2).sealed(image), image, attempt=2)
    nodes.bring_all(9)
    for node in HOSTS:
        nodes.tell(node, 9, brings=True)
    until(lambda: all(slot.refused for node in nodes.nodes for slot in node.ring.committed()), "it to be refused")
    assert [(each.attempt, each.step) for each in nodes.store.survey().manifests] == [(2, 1)]
    nodes.next_attempt()
    nodes.next_attempt()  # the third, which may go on from it, as from all that nodes have
    until(lambda: nodes.durable() == [1, 9], "it at the durable tier")


@pytest.mark.usefixtures("left")
def test_the_rest_of_what_is_older_than_what_is_durable_is_not_waited_for_long(
    carried: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt had one node, which brought its portion; the other let its own go. That one waited for an hour,
    and a node that was told to end for as long as it may: it ended with an error, and all was durable."""
    monkeypatch.setattr(work, "SURPASSED_S", 2.0)
    nodes = carried(min_upload_interval_s=0.0)
    nodes.begin(3)
    nodes.bring(3, 0)
    nodes.tell(0, 3, brings=True)  # the next attempt goes on from it
    nodes.next_attempt()
    assert nodes.nodes[0].flush("run", 3.0) != []  # its rest may come yet
    image = memoryview(image_of(4, NBYTES))
    nodes.store.put(manifest_of(4, 2).sealed(image), image, attempt=2)
    assert nodes.nodes[0].flush("run", 60.0) == []
    assert nodes.nodes[0].settled


def test_a_killed_trainer_is_gone_although_the_node_of_its_host_lives(
    carried: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That went on asking the snapshot servers for a quarter of an hour, and they took it for the trainer's word."""
    monkeypatch.setattr(work, "LEFT_S", 4.0)
    monkeypatch.setattr(replication, "ASK_AGAIN_S", 0.1)
    nodes = carried()
    urls = tuple(url.rpartition("/")[0] for url in nodes.place.urls)
    host = Node(slots=2, memory_bytes=2**24, open_store=open_store)
    try:
        host.begin_session("trainer")
        host.open_run(replace(nodes.info(), nodes=urls, session="trainer"))
        nodes.bring_all(1)
        time.sleep(5.0)  # no less than that without a word
        assert nodes.durable() == []  # its trainer may say that another one is brought down
        host.end_session("trainer")
        until(lambda: nodes.durable() == [1], "it at the durable tier")
        assert host.routes.status(RUN_ID)["nodes"].keys() == {*nodes.place.urls}  # it looks after them all the same
    finally:
        host.close()


def test_a_killed_trainer_is_gone_for_a_node_that_has_whole_snapshots_of_it_too(
    carried: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fence refuses there would be put off for as long as the node of the trainer's host asks."""
    monkeypatch.setattr(replication, "ASK_AGAIN_S", 0.1)
    nodes = carried()
    memory, host = nodes.nodes[0], Node(slots=2, memory_bytes=2**24, open_store=open_store)
    try:
        host.begin_session("trainer")
        url = nodes.place.urls[0].rpartition("/")[0]
        host.open_run(replace(nodes.info(), spread=False, nodes=(url,), session="trainer"))
        until(
            lambda: memory.registry.runs[RUN_ID].info.token and not memory.registry.runs[RUN_ID].info.spread, "a word"
        )
        assert not memory.registry.runs[RUN_ID].info.left
        host.end_session("trainer")
        until(lambda: memory.registry.runs[RUN_ID].info.left, "it to be said")
        asked_s = memory.ring.opened_s[RUN_ID]
        opened_s = memory.registry.runs[RUN_ID].opened_s
        until(lambda: memory.registry.runs[RUN_ID].opened_s > opened_s, "it to be asked again")
        assert memory.ring.opened_s[RUN_ID] == asked_s
    finally:
        host.close()


@pytest.mark.parametrize("complete", [False, True])
def test_while_its_trainer_lives_nobody_brings_down_what_may_not_be_whole(carried: Make, complete: bool) -> None:
    """Of the end of a run, too: if that is taken once more, nobody would remove what is there of the first try."""
    nodes = carried()
    nodes.begin(1)
    nodes.bring(1, 0, complete=complete)
    assert [node.flush("run", 0.2) for node in nodes.nodes] == [[], []]
    time.sleep(0.2)
    assert not nodes.store.survey().unfinished
    assert nodes.nodes[0].settled


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("is_told", [False, True])
def test_what_is_not_whole_gives_way_to_others_in_the_end_and_may_still_become_whole(
    carried: Make, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Whoever comes later with the rest commits it; so does the next attempt, whoever brings that."""
    nodes = carried()
    nodes.take(1)
    nodes.begin(2)
    nodes.bring(2, 0)
    if is_told:
        nodes.tell(0, 2)
    monkeypatch.setattr(work, "FORSAKEN_S", 1.5)  # only now: what comes before may take longer
    until(lambda: nodes.durable() == [1], "the one before at the durable tier")
    until(lambda: forsaken(nodes) == [2], "it to be owed no longer")
    assert [nodes.nodes[0].ring.try_lease("another run", NBYTES) is not None for _ in range(5)] == [*[True] * 4, False]
    assert nodes.held() == [[], [1]]
    nodes.bring(2, 1)
    until(lambda: nodes.durable() == [2, 1], "it at the durable tier")


def forsaken(nodes: Carried) -> list[int]:
    """Steps of what the first node has, and does not expect to become whole."""
    slots = nodes.nodes[0].ring.committed()
    return [slot.manifest.step for slot in slots if slot.manifest is not None and slot.forsaken and not slot.dirty]


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("is_told", [False, True])
def test_what_a_node_has_stays_while_another_one_does_not_reach_the_durable_tier(
    carried: Make, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """However long that takes: together they have it, and a resume finds it there."""
    nodes, fails = carried(), True
    put = flusher.put_portion

    def outage(store: Store, portion: Manifest, *rest: Any, **more: Any) -> Manifest:
        if fails and portion.portion is not None and portion.portion.host == 1:
            raise TierError("its bucket does not answer")
        return put(store, portion, *rest, **more)

    monkeypatch.setattr(flusher, "put_portion", outage)
    monkeypatch.setattr(work, "FORSAKEN_S", 1.0)
    nodes.bring_all(1)
    if is_told:
        nodes.tell(0, 1, brings=True)
    until(lambda: forsaken(nodes) == [1], "the other node to be waited for no longer")
    assert nodes.whole() == [1]
    fails = False
    nodes.nodes[1].flush(None, 0.1)  # tried again soon
    until(lambda: nodes.durable() == [1], "it at the durable tier")


@pytest.mark.usefixtures("left")
def test_a_tier_that_works_again_is_not_said_to_fail_while_others_are_waited_for(
    carried: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new attempt would be told that this node brings nothing down, for as long as the others do not."""
    caplog.set_level("INFO")
    nodes, fails = carried(), [True]
    put, url = flusher.put_portion, nodes.url

    def outage(store: Store, portion: Manifest, *rest: Any, **more: Any) -> Manifest:
        if portion.portion is not None and (portion.portion.host == 1 or fails):
            raise TierError("its bucket does not answer")
        return put(store, portion, *rest, **more)

    monkeypatch.setattr(flusher, "put_portion", outage)
    nodes.bring_all(1)
    node = nodes.nodes[0]
    until(lambda: node.flusher.failing(url), "it to fail")
    fails.clear()
    node.flush(None, 0.1)  # tried again soon
    until(lambda: nodes.store.survey().unfinished, "this node's portion at the durable tier")
    until(lambda: not node.flusher.failing(url), "it to be known to work")
    until(lambda: not node.tiers()[url].error, "it to be said to work")
    keys = [(getattr(record, "spot_key", ""), record.levelname) for record in caplog.records]
    assert ("upload-failing", "INFO") in keys


def test_what_the_next_attempt_goes_on_from_stays_although_the_durable_tier_refuses_it_now(
    carried: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That attempt has claimed the run there, and has nothing newer yet: it would have to go back further."""
    nodes, fails = carried(min_upload_interval_s=0.0), [True]
    put = flusher.put_portion

    def outage(*given: Any, **more: Any) -> Manifest:
        if fails:
            raise TierError("its bucket does not answer")
        return put(*given, **more)

    monkeypatch.setattr(flusher, "put_portion", outage)
    nodes.take(1)
    nodes.store.claim(Claim(attempt=2, run_id=RUN_ID, digest="t", location=nodes.url, started_unix_s=0.0))
    fails.clear()
    for node in nodes.nodes:
        node.flush(None, 0.1)  # tried again soon
    until(lambda: all(node.flusher.work._later._waits for node in nodes.nodes), "it to be refused")
    for node in nodes.nodes:
        while node.ring.try_lease("another run", NBYTES) is not None:
            pass
    assert nodes.held() == [[1], [1]]
    assert nodes.whole() == [1]


@pytest.mark.usefixtures("left")
def test_what_gave_way_is_brought_down_when_it_is_told_to_be_whole(
    carried: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "FORSAKEN_S", 0.5)
    nodes = carried()
    nodes.begin(1)
    nodes.bring(1, 0)
    until(lambda: forsaken(nodes) == [1], "it to be owed no longer")
    (slot,) = nodes.nodes[0].ring.committed()
    nodes.bring(1, 1)
    until(lambda: nodes.durable() == [1], "it at the durable tier")
    assert not slot.safe
    nodes.tell(0, 1)
    until(lambda: bool(slot.safe), "all to know it")


def test_how_long_others_are_waited_for_begins_anew_with_what_comes_and_with_each_failure() -> None:
    """A durable tier that fails here may fail at the others, too."""
    waits, job = Work(Ring(slots=1, memory_bytes=2**20), lambda _: None), Job(Kind.PUT, "run", MANIFEST)
    begun_s = time.monotonic() + 100.0
    last_s = begun_s + work.FORSAKEN_S + 1e-3  # times are rounded
    assert not waits.later("/a", job, begun_s, 3)
    assert not waits.later("/a", job, last_s - 1.0, 3)
    assert waits.later("/a", job, last_s, 3)
    assert not waits.later("/a", job, last_s, 5)
    assert not waits.later("/a", job, last_s + work.FORSAKEN_S - 1.0, 5)
    waits = Work(Ring(slots=1, memory_bytes=2**20), lambda _: None)
    assert not waits.later("/a", job, time.monotonic() - work.FORSAKEN_S, 3)
    waits.failed("/a", job, "it does not answer")
    assert not waits.later("/a", job, time.monotonic() + 60.0, 3)
    assert waits.later("/a", job, time.monotonic() + work.LEFT_S + work.FORSAKEN_S, 3)


@pytest.mark.usefixtures("left")
def test_what_is_at_no_durable_tier_stays(carried: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "FORSAKEN_S", 0.5)
    nodes = carried()
    os.rename(tmp_path / "run", tmp_path / "away")
    (tmp_path / "run").write_text("no directory")
    nodes.bring_all(1)
    until(lambda: all(node.flusher.failing(nodes.url) for node in nodes.nodes), "both to have tried")
    time.sleep(1.0)
    assert nodes.whole() == [1]
    (tmp_path / "run").unlink()
    os.rename(tmp_path / "away", tmp_path / "run")
    for node in nodes.nodes:
        node.flush("run", 0.1)  # tried again soon
    until(lambda: nodes.durable() == [1], "it at the durable tier")


def test_what_is_lost_of_one_that_was_to_be_durable_keeps_no_later_one_from_being_so(carried: Make) -> None:
    """However often it is looked whether the rest of it has come, that is no time in which the tier is to rest."""
    nodes = carried(min_upload_interval_s=2.0)
    nodes.begin(1)
    nodes.bring(1, 0)
    nodes.tell(0, 1, brings=True)  # what the other node had of it is lost
    deadline_s, step = time.monotonic() + 60.0, 2
    while not nodes.durable() and time.monotonic() < deadline_s:
        nodes.take(step)
        step += 1
        time.sleep(0.2)
    assert nodes.durable()


def test_a_durable_tier_that_fails_keeps_no_portion_from_a_node(carried: Make, tmp_path: Path) -> None:
    nodes = carried()
    os.rename(tmp_path / "run", tmp_path / "away")
    (tmp_path / "run").write_text("no directory")
    nodes.take(1)
    until(lambda: nodes.nodes[0].flusher.failing(nodes.url), "it to fail")
    assert nodes.stores[0].open_run(nodes.info()).carries
    assert not nodes.stores[0].open_run(replace(nodes.info(), spread=False)).carries


def test_a_node_that_shuts_down_takes_no_further_portions_and_hears_when_it_is_not_needed(carried: Make) -> None:
    nodes = carried(min_upload_interval_s=3600.0)
    nodes.take(1)
    until(lambda: nodes.durable() == [1], "the first one at the durable tier")
    nodes.take(2)
    leaving, other = nodes.nodes[1], nodes.place.urls[0]
    leaving.drain()
    opened = nodes.stores[1].open_run(nodes.info())
    assert (opened.carries, opened.leaves) == (False, True)
    assert nodes.stores[1].open_run(replace(nodes.info(), spread=False)).carries  # of others, it stays what it was
    assert not leaving.settled
    place = SpreadPlace.read(SpreadPlace(1, (other,), nodes.place.urls[1:]).at)
    assert place == SpreadPlace(1, (other,), nodes.place.urls[1:])
    nodes.joint = JointPortions(nodes.stores, place)
    nodes.stores[1] = nodes.stores[0]  # who brought there brings elsewhere now
    nodes.take(3)
    until(lambda: leaving.settled, "nothing to be owed")  # it may be deleting what was durable before
    assert all(slot.overtaken for slot in leaving.ring.committed())
    assert nodes.durable() == [1]


def test_a_node_that_shuts_down_when_no_other_snapshot_follows_has_its_portions_brought_down_by_all(
    carried: Make,
) -> None:
    nodes = carried()
    nodes.take(1)
    nodes.begin(2)
    for host in HOSTS:
        nodes.bring(2, host)
        nodes.tell(host, 2)
    nodes.nodes[1].drain()
    nodes.nodes[1].flush(None, 0.3)  # as it does by itself: the others know nothing of that
    assert not [name for name in nodes.store.survey().unfinished if "000002" in name]
    for node in nodes.nodes:  # as the host of the trainer has them do
        node.flush("run", 0.3)
    until(lambda: nodes.durable()[:1] == [2], "it at the durable tier")
    until(lambda: nodes.nodes[1].flush("run", 1.0) == [] and nodes.nodes[1].settled, "nothing to be owed")
