"""Portions of a snapshot that will never be whole: they take no room for good, and what is whole stays so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning_spot.client.spread_store import JointPortions, Missing, Seen, SpreadStore

from lightning_spot.client import spread_store
from lightning_spot.client.remote import NodeStore
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.portion import Portions, portion_of
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import Shared, SpreadPlace
from lightning_spot.memory.node import Node
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.tier import Gathering
from lightning_spot.tiers.local import LocalStore
from tests.support.server import served
from tests.support.small_trainer import RUN_ID, info_of

NBYTES = 10_000
HOSTS = (0, 1)


class Two:
    """Two nodes with room for two portions each: each host has its own. Nobody brings them further."""

    def __init__(self, root: Path, ends: contextlib.ExitStack, slots: int = 2, allow: Sequence[str] = ()) -> None:
        self.url = str(root / "run")
        self.nodes = [Node(slots=slots, memory_bytes=2**26, open_store=open_store, allow=allow) for _ in HOSTS]
        ports = [ends.enter_context(served(node)) for node in self.nodes]
        urls = tuple(f"spot://127.0.0.1:{port}/run@{RUN_ID}" for port in ports)
        self.stores, self.place = [NodeStore(url) for url in urls], SpreadPlace(1, urls)
        self.attempt, self.joint = 0, JointPortions(self.stores, self.place)
        self.next_attempt()

    def next_attempt(self) -> None:
        self.attempt += 1
        self.joint = JointPortions(self.stores, self.place)
        self.joint.know(self.info())
        for node in self.nodes:
            node.open_run(self.info())
        if self.info().durable_url is not None:
            LocalStore(self.url).claim(self.info().claim())  # as the trainer does

    def info(self) -> RunInfo:
        return replace(info_of(self.url, self.attempt), durable_url=None)

    def begin(self, step: int) -> Gathering:
        shared = Shared(name=snapshot_name(step, self.attempt), shares=1, digest="d", at=self.place.at)
        return self.joint.begin(shared, NBYTES, attempt=self.attempt, hosts=2)

    def bring(self, step: int, host: int, *, complete: bool = False) -> Manifest:
        """A host's portion to its node."""
        name = snapshot_name(step, self.attempt, complete=complete)
        memory, told = memoryview(bytearray([step]) * NBYTES), {"step": step, "attempt": self.attempt}
        plain = Manifest(run="run", run_id=RUN_ID, name=name, nbytes=NBYTES, complete=complete, **told)
        files = [FileSpan(f"__{host}_0.distcp", 0, NBYTES)]
        portion = portion_of(plain, files, memory, host=host, hosts=2, digest="d")
        self.stores[host].put(portion, memory, attempt=self.attempt)
        return portion

    def seal(self, gathering: Gathering) -> Manifest:
        attempt, step = self.attempt, int(gathering.shared.name.split("-")[1])
        name = gathering.shared.name
        manifest = Manifest(run="run", run_id=RUN_ID, name=name, step=step, attempt=attempt, nbytes=NBYTES)
        return self.joint.seal(gathering, manifest, lambda: None)

    def take(self, step: int) -> None:
        gathering = self.begin(step)
        for host in HOSTS:
            self.bring(step, host)
        self.seal(gathering)

    def held(self) -> list[list[int]]:
        """Steps at each node, oldest first."""
        return [
            sorted(slot.manifest.step for slot in node.ring.committed() if slot.manifest is not None)
            for node in self.nodes
        ]

    def whole(self) -> list[int]:
        return [manifest.step for manifest in open_store(self.place.at).survey().manifests]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(Portions, "read", lambda *_: Portions((((0, NBYTES),),), (1,)))
    with contextlib.ExitStack() as ends:
        yield Two(tmp_path, ends)


def test_a_spread_snapshot_is_as_large_as_its_files(two: Two) -> None:
    """Each portion begins at a part: one of 2 MB was said to have 17."""
    two.take(1)
    (manifest, *_) = open_store(two.place.at).survey().manifests
    assert manifest.stored_bytes == 2 * NBYTES < manifest.nbytes


def test_a_portion_that_comes_when_its_snapshot_was_given_up_takes_no_room(two: Two) -> None:
    two.take(1)
    gathering = two.begin(2)
    two.bring(2, 0)
    two.joint.give_up(gathering)
    two.bring(2, 1)  # nobody has told that host
    assert two.held() == [[1], [1]]
    two.take(3)
    two.take(4)
    assert two.whole()[0] == 4


def silent(*_: Any, **__: Any) -> None:
    raise ServerUnreachableError("its link is cut")


def test_a_node_that_was_not_told_that_a_snapshot_is_over_is_told_with_the_next_one(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.take(1)
    gathering = two.begin(2)
    two.bring(2, 1)
    with monkeypatch.context() as cut:
        cut.setattr(two.stores[1], "torn", silent)
        two.joint.give_up(gathering)
    assert two.held() == [[1], [1, 2]]
    two.take(3)
    assert two.whole()[0] == 3


@pytest.mark.parametrize("lost", HOSTS)
def test_a_portion_that_was_lost_with_its_node_is_not_waited_for(
    two: Two, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Who brought it does not know, and brings nothing again; meanwhile no other snapshot is taken."""
    two.take(1)
    gathering = two.begin(2)
    for host in HOSTS:
        two.bring(2, host)
    with monkeypatch.context() as cut:
        cut.setattr(spread_store, "GONE_S", 0.2)
        cut.setattr(spread_store, "BROUGHT_S", 0.2)
        cut.setattr(spread_store, "placed_portions", lambda urls, *_: [urls, urls[::-1]])
        for word in ("look", "torn"):
            cut.setattr(two.stores[lost], word, silent)
        with pytest.raises(
            SnapshotFailedError, match=f"of host {lost} .*is cut", check=FailureReason.SHARE_MISSING.caused
        ):
            two.seal(gathering)
    assert two.held()[1 - lost] == [1]
    assert two.whole() == [1]


def test_which_missing_portions_are_waited_for() -> None:
    at = [("a", "b"), ("b", "c"), ("c", "a")]
    lost = ServerUnreachableError("its link is cut")

    def look(missing: Missing, hosts: list[int], asked_s: float, *silent: str) -> list[int]:
        return missing.lost(Seen([], "", 0.0, dict.fromkeys(silent, lost)), hosts, asked_s, asked_s + 5.0)

    def made(replicas: int = 1) -> Missing:
        return Missing(at, replicas, gone_s=8.0, brought_s=15.0)

    slow = made()  # all nodes answer: the other hosts take their time
    assert [look(slow, [1, 2], now_s) for now_s in (0.0, 50.0)] == [[], []]
    own = made()
    assert [look(own, [0, 1], now_s, "a") for now_s in (0.0, 3.0)] == [[], [0]]
    seen = made()
    assert [look(seen, *told) for told in (([2], 0.0), ([1, 2], 1.0), ([1, 2], 4.0))] == [[], [], [1]]
    never = made()  # perhaps it is brought to another one
    assert [look(never, [2], now_s, "c") for now_s in (0.0, 9.0, 10.0)] == [[], [], [2]]
    answers = made()
    assert [look(answers, [2], now_s, *silent) for now_s, silent in ((0.0, "c"), (9.0, ""), (10.0, "c"))] == [[]] * 3
    elsewhere, twice = made(), made(2)
    assert [look(elsewhere, [2], now_s, "a") for now_s in (0.0, 50.0)] == [[], []]
    assert [look(twice, [2], now_s, *silent) for now_s, silent in ((0.0, "c"), (50.0, "c"))] == [[], []]


def test_what_other_hosts_bring_of_a_snapshot_that_was_declined_before_it_began_takes_no_room(two: Two) -> None:
    """Each host brings its portion by itself: nobody asks the first one, which has no slot, whether it takes part."""
    two.take(1)
    two.bring(2, 1)
    two.joint.decline(snapshot_name(2, 1), attempt=1, why="rank 0 has no slot")
    assert two.held() == [[1], [1, 2]]
    two.take(3)
    two.take(4)
    assert two.whole()[0] == 4


def test_a_host_whose_node_was_lost_while_it_led_a_snapshot_leaves_no_portions_of_that(two: Two) -> None:
    two.take(1)
    two.begin(2)
    two.bring(2, 0)
    two.joint = JointPortions(two.stores, two.place)  # of its next node, in the same attempt
    two.take(3)
    two.take(4)
    assert two.whole()[0] == 4


def test_a_snapshot_that_is_given_up_while_its_portions_are_counted_is_not_said_to_be_whole(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nodes that hear it would let go the one before, and the others what there is of this one."""
    look = JointPortions._look

    def late(joint: JointPortions, name: str) -> Any:
        seen = look(joint, name)
        if name == snapshot_name(2, 1) and len(seen.held) == 4:
            two.joint.give_up(gathering)
        return seen

    two.take(1)
    gathering = two.begin(2)
    for host in HOSTS:
        two.bring(2, host)
    monkeypatch.setattr(JointPortions, "_look", late)
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused):
        two.seal(gathering)
    assert two.held() == [[1], [1]]
    assert not any(slot.overtaken for node in two.nodes for slot in node.ring.committed())


@pytest.mark.parametrize("host", HOSTS)
def test_what_an_earlier_attempt_was_killed_over_leaves_room_for_the_next_one(two: Two, host: int) -> None:
    two.take(1)
    two.begin(2)
    two.bring(2, host)
    two.next_attempt()
    two.take(2)
    two.take(3)
    assert two.whole()[0] == 3


def test_what_an_attempt_goes_on_from_stays_until_a_newer_one_is_whole_whichever_nodes_answer_first(two: Two) -> None:
    """Who led it was lost before it could say that it is whole."""
    two.take(1)
    two.begin(2)
    for host in HOSTS:
        two.bring(2, host)
    found = open_store(two.place.at)
    assert isinstance(found, SpreadStore)
    assert [manifest.step for manifest in found.survey().manifests] == [2, 1]
    name = snapshot_name(2, two.attempt)
    two.next_attempt()
    found.hold(name, two.info())
    for node in HOSTS:  # rank 0 knows one of them yet
        place = SpreadPlace(1, two.place.urls[node : node + 1])
        shared = Shared(name=snapshot_name(3, two.attempt), shares=1, digest="d", at=place.at)
        JointPortions([two.stores[node]], place).begin(shared, NBYTES, attempt=two.attempt, hosts=2)
    assert two.whole()[0] == 2


def test_what_was_committed_stays_where_no_node_has_heard_it_and_the_next_one_goes_to_fewer(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link fails for a moment: words are lost, and a node is not among those of the next snapshot."""

    two.take(1)
    tiers = two.nodes[0].uploads.abroad.bringing
    one = tiers.tier(two.place.at, RUN_ID)
    assert isinstance(one, JointPortions)
    two.joint = one
    gathering = two.begin(2)
    for host in HOSTS:
        two.bring(2, host)
    with monkeypatch.context() as cut:
        cut.setattr(NodeStore, "whole", silent)
        two.seal(gathering)
    at = SpreadPlace(1, two.place.urls[1:]).at
    shared = Shared(name=snapshot_name(3, two.attempt), shares=1, digest="d", at=at)
    tiers.tier(at, RUN_ID).begin(shared, NBYTES, attempt=two.attempt, hosts=2)
    assert two.whole()[0] == 2


@pytest.mark.parametrize("by", ["torn", "placed", "decline"])
def test_a_host_that_takes_it_that_its_portion_is_lost_takes_none_from_a_node(
    two: Two, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Who leads has seen all of them by then, and is about to say that the snapshot is whole."""
    other, tell = JointPortions(two.stores, two.place), JointPortions._tell
    two.take(1)
    gathering = two.begin(2)
    for host in HOSTS:
        two.bring(2, host)

    def late(joint: JointPortions, told: Told, attempt: int) -> None:
        word: Callable[[], None] = {
            "torn": lambda: two.stores[1].torn(gathering.shared.name, "no answer", attempt=attempt),
            "placed": lambda: other.placed(gathering, 1, "no answer"),
            "decline": lambda: other.decline(gathering.shared.name, attempt=attempt, why="no answer"),
        }[by]
        word()
        tell(joint, told, attempt)

    monkeypatch.setattr(JointPortions, "_tell", late)
    two.seal(gathering)
    assert two.whole()[0] == 2


def test_what_was_said_to_be_whole_is_not_given_up(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node has let go what is older, and another one did not hear the word."""
    two.take(1)
    gathering = two.begin(2)
    for host in HOSTS:
        two.bring(2, host)
    with monkeypatch.context() as cut:
        cut.setattr(two.stores[1], "whole", lambda *_, **__: None)
        two.seal(gathering)
    two.joint.give_up(gathering)
    assert two.whole()[0] == 2


def test_a_portion_that_is_sent_once_more_is_still_of_a_snapshot_that_is_whole(two: Two) -> None:
    two.take(1)
    two.bring(1, 1)  # the answer to the first time was lost
    (slot,) = two.nodes[1].ring.committed()
    assert slot.whole


def test_a_node_that_comes_back_with_its_memory_knows_what_was_overtaken(two: Two, runtime_dir: Path) -> None:
    """Else it would have no room for the next one, and owe what no other node brings to the durable tier."""

    def node() -> Node:
        return Node(slots=2, memory_bytes=2**26, open_store=open_store, area=runtime_dir / "area")

    with contextlib.ExitStack() as ends:
        killed = node()
        two.stores[1] = NodeStore(f"spot://127.0.0.1:{ends.enter_context(served(killed))}/run@{RUN_ID}")
        two.nodes[1], two.joint = killed, JointPortions(two.stores, two.place)
        two.joint.know(two.info())
        killed.open_run(replace(info_of(two.url, 1), durable_url=None))
        two.take(1)
        two.take(2)
        killed.ring.area._lock_file.close()
        heir = node()
        ends.callback(heir.close)
        said = {slot.manifest.step: slot.overtaken for slot in heir.ring.committed() if slot.manifest is not None}
        assert said == {1: True, 2: False}
