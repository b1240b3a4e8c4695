"""What nodes are told of snapshots that are spread over them, and a node that ends without having heard it."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import pytest
from lightning_spot.client.spread_store import JointPortions

from lightning_spot.client.remote import NodeStore
from lightning_spot.client.stores import open_store
from lightning_spot.image.manifest import snapshot_name
from lightning_spot.memory import work
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import Shared, SpreadPlace
from lightning_spot.memory.node import Node
from lightning_spot.memory.slots import Slot
from tests.faults.test_spread_left import Carried, Make, carried, left
from tests.faults.test_spread_room import HOSTS, NBYTES, silent
from tests.support.server import served
from tests.support.small_trainer import RUN_ID
from tests.support.waiting import until

__all__ = ["carried", "left"]


class Deaf:
    """Links to nodes that are cut: these hear no words."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.urls: set[str] = set()
        for word in ("whole", "torn"):
            self._cut(monkeypatch, word)

    def _cut(self, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
        tell = getattr(NodeStore, word)

        def told(store: NodeStore, *args: object, **more: object) -> None:
            (silent if store.url in self.urls else tell)(store, *args, **more)

        monkeypatch.setattr(NodeStore, word, told)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Deaf:
    return Deaf(monkeypatch)


def by_host(nodes: Carried) -> JointPortions:
    """As the node of the first host makes it, which lives on beside training."""
    joint = nodes.nodes[0].uploads.abroad.bringing.tier(nodes.place.at, RUN_ID)
    assert isinstance(joint, JointPortions)
    return joint


def slots(nodes: Carried, node: int) -> list[Slot]:
    return nodes.nodes[node].ring.committed()


@pytest.mark.parametrize("cut", [(1,), HOSTS])
def test_nodes_that_did_not_hear_that_the_last_snapshot_is_whole_hear_it_when_they_answer(
    carried: Make, deaf: Deaf, cut: tuple[int, ...]
) -> None:
    """No other one begins, with which it would be told again."""
    nodes = carried()
    nodes.joint = by_host(nodes)
    deaf.urls = {nodes.place.urls[node] for node in cut}
    nodes.take(1)
    assert [slot.whole for node in HOSTS for slot in slots(nodes, node)] == [node not in cut for node in HOSTS]
    deaf.urls = set()
    until(lambda: all(slot.whole for node in HOSTS for slot in slots(nodes, node)), "all to have heard it")
    until(lambda: nodes.durable() == [1], "it at the durable tier")


def test_a_node_that_did_not_hear_that_the_last_snapshot_is_over_has_its_memory_back(carried: Make, deaf: Deaf) -> None:
    nodes = carried()
    nodes.joint = by_host(nodes)
    gathering = nodes.begin(1)
    nodes.bring(1, 1)
    deaf.urls = {nodes.place.urls[1]}
    nodes.joint.give_up(gathering)
    assert nodes.held() == [[], [1]]
    deaf.urls = set()
    until(lambda: nodes.held() == [[], []], "its memory to be free")


def test_a_word_that_is_told_again_is_the_newest(carried: Make, deaf: Deaf) -> None:
    nodes = carried()
    nodes.joint = by_host(nodes)
    deaf.urls = {nodes.place.urls[1]}
    nodes.take(1)
    told = [slot.manifest.name for slot in slots(nodes, 0) if slot.manifest and slot.whole]
    nodes.begin(2)
    for host in HOSTS:
        nodes.bring(2, host)
    nodes.joint._tell(Told(snapshot_name(2, 1), overtaken=(snapshot_name(1, 1),)), 1)
    deaf.urls = set()
    until(lambda: any(slot.whole for slot in slots(nodes, 1)), "it to have heard something")
    said = {slot.manifest.step: (slot.whole, slot.overtaken) for slot in slots(nodes, 1) if slot.manifest}
    assert told
    assert said == {1: (False, True), 2: (True, False)}


def test_nothing_is_told_again_when_a_later_attempt_has_the_run(carried: Make, deaf: Deaf) -> None:
    nodes = carried()
    nodes.joint = joint = by_host(nodes)
    deaf.urls = {nodes.place.urls[1]}
    nodes.take(1)
    nodes.next_attempt()
    deaf.urls = set()
    until(lambda: not joint._known.telling.unheard, "it to be given up")
    assert [slot.whole for slot in slots(nodes, 1)] == [False]


def test_a_word_that_comes_late_has_nothing_brought_down_that_was_overtaken(carried: Make) -> None:
    """All nodes must bring the same snapshot: the others would not bring this one."""
    nodes = carried(min_upload_interval_s=3600.0)
    nodes.take(1)
    until(lambda: nodes.durable() == [1], "the first one at the durable tier")
    nodes.take(2)
    nodes.take(3)
    nodes.tell(1, 2, brings=True)
    assert [slot.brings for slot in slots(nodes, 1) if slot.manifest and slot.manifest.step == 2] == [False]


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("complete", [False, True])
def test_a_node_that_shuts_down_brings_down_first_what_nobody_has_told_it_to_be_whole(
    carried: Make, complete: bool
) -> None:
    """The word of the last snapshot was lost, and its trainer is gone."""
    nodes = carried()
    name = snapshot_name(1, 1, complete=complete)
    nodes.joint.begin(Shared(name=name, shares=1, digest="d", at=nodes.place.at), NBYTES, attempt=1, hosts=2)
    for host in HOSTS:
        nodes.bring(1, host, complete=complete)
    nodes.stores[0].whole(Told(name, brings=True), attempt=1)
    leaving = nodes.nodes[1]
    leaving.drain()
    assert not leaving.settled
    until(lambda: leaving.settled, "nothing to be owed")
    until(lambda: nodes.durable() == [1], "it at the durable tier")


def test_a_node_that_shuts_down_waits_so_long_only_for_a_trainer_that_lives(
    carried: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who led a snapshot may live, and never say what became of it; what is here of it is at the durable tier then."""
    nodes = carried()
    nodes.begin(1)
    nodes.bring(1, 1)
    leaving = nodes.nodes[1]
    assert leaving.settled
    leaving.drain()
    assert not leaving.settled
    monkeypatch.setattr(work, "LEFT_S", 0.5)

    def asked() -> bool:
        leaving.ring.opened_s[RUN_ID] = time.monotonic()  # how it is, by the trainer's host
        return leaving.settled

    until(asked, "nothing to be owed")
    assert nodes.store.survey().unfinished == [snapshot_name(1, 1)]
    nodes.bring(1, 0)
    nodes.tell(0, 1, brings=True)
    until(lambda: nodes.durable() == [1], "it at the durable tier")


@pytest.mark.usefixtures("left")
def test_a_node_that_comes_back_without_leave_to_write_keeps_what_it_has_until_it_may(
    carried: Make, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume finds it there; it keeps no node from ending, and the next one on its host has it."""

    def node(*allow: str) -> Node:
        return Node(slots=4, memory_bytes=2**26, open_store=open_store, area=runtime_dir / "area", allow=allow)

    nodes = carried(min_upload_interval_s=3600.0)
    for allow in ((), (str(tmp_path),)):
        with contextlib.ExitStack() as ends:
            heir = node(*allow)
            monkeypatch.setattr(heir, "close", functools.partial(heir.close, keep_unsafe=True))  # as its program does
            url = f"spot://127.0.0.1:{ends.enter_context(served(heir))}/run@{RUN_ID}"
            nodes.place = SpreadPlace(1, (nodes.place.urls[0], url))
            nodes.stores[1], nodes.nodes[1] = NodeStore(url), heir
            nodes.stores[1].know(nodes.info())
            if not allow:
                heir.open_run(nodes.info())
                nodes.bring_all(1)
                nodes.tell(0, 1, brings=True)
                nodes.tell(1, 1, brings=True)
                heir.drain()
                assert heir.settled
            assert nodes.whole() == [1]
            if allow:
                until(lambda: nodes.durable() == [1], "it at the durable tier")
            else:
                assert not nodes.durable()
