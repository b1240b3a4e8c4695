"""Models in shards on two hosts whose snapshots are spread over servers: each node has some hosts' portions."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.cli.command import main
from lightning_spot.client.remote import NodeStore
from lightning_spot.client.stores import open_store
from lightning_spot.errors import FailureReason, FencedError, SnapshotFailedError, TierError
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory import flusher, work
from lightning_spot.memory.flusher import put_portion
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.node import Node
from lightning_spot.memory.tier import HasJoint, JointTier
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.tiers.local import LocalStore
from tests.distributed.test_sharded_across import Desk
from tests.support.server import served
from tests.support.small_trainer import RUN_ID, info_of
from tests.support.waiting import kept_port, until

MIB = 2**20
LAST_S = 60.0  # of what never takes so long


class Spread(Desk):
    """Each host brings its portion to one of the nodes, or to ``replicas``. No host has memory for the whole."""

    def __init__(self, root: Path, count: int, monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
        self.ends, self.root, self.replicas = [contextlib.ExitStack() for _ in range(count)], root, replicas
        self.kept, self.nodes = contextlib.ExitStack(), dict[int, Node]()
        self.ports = [self.kept.enter_context(kept_port()) for _ in range(count)]
        self.memories = {f"spot://127.0.0.1:{port}": number for number, port in enumerate(self.ports)}
        for number in range(count):
            self.start(number)
        super().__init__(root, "", monkeypatch, tuple(self.memories), 3 * MIB)
        self.store = LocalStore(self.url)
        self.most_own_bytes = 1000  # as all ranks were told
        self.all_work(count)

    def start(self, number: int) -> None:
        """Also at its address again, when it was lost; it is empty."""
        node = Node(slots=None, memory_bytes=64 * MIB, open_store=open_store, allow=[str(self.root)])
        self.nodes = {**self.nodes, number: node}
        self.ends[number].enter_context(served(node, self.ports[number]))

    def lose(self, number: int) -> None:
        self.ends[number].close()
        self.nodes = {other: node for other, node in self.nodes.items() if other != number}

    def all_work(self, count: int) -> None:
        """Go on when so many nodes are there."""
        until(lambda: self.hosts[0].carrier(self.replicas).count(" spot:") == count, f"{count} nodes", LAST_S)
        self.at = self.hosts[0].carrier(self.replicas)

    def flush(self) -> list[str]:
        """As a trainer has its nodes do at its end."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return [
                line for lines in pool.map(lambda node: node.flush("run", 60.0), self.nodes.values()) for line in lines
            ]

    def held(self) -> dict[tuple[int, int], list[int]]:
        """Steps of what each node holds of each host, newest first."""
        found: dict[tuple[int, int], list[int]] = {}
        for number, node in self.nodes.items():
            for slot in node.ring.committed():
                manifest = slot.manifest  # it may be let go meanwhile
                if manifest is not None and manifest.portion is not None:
                    found.setdefault((number, manifest.portion.host), []).append(manifest.step)
        return found

    def replicated(self, step: int) -> None:
        """Go on when all replicas of a snapshot are there: it counts when each portion is at one node."""
        portions = 2 * self.replicas  # of two hosts
        until(lambda: sum(steps[0] == step for steps in self.held().values()) == portions, "all replicas", LAST_S)

    def whole(self) -> list[int]:
        """Steps of the snapshots that a resume finds at nodes, newest first."""
        store = open_store(self.at)
        return [manifest.step for manifest in store.survey().manifests]

    def image(self, manifest: Manifest) -> tuple[memoryview, Manifest]:
        return self.read(open_store(self.at), manifest)

    def read(self, store: Any, manifest: Manifest) -> tuple[memoryview, Manifest]:
        whole = next(each for each in store.survey().manifests if each.name == manifest.name)
        image = memoryview(bytearray(whole.nbytes))
        store.fetch(whole, image)
        return image, whole

    def joint(self, attempt: int) -> JointTier:
        """What a node of that attempt makes of the snapshot servers."""
        store = open_store(self.at)
        assert isinstance(store, HasJoint)
        store.joint.know(info_of(self.url, attempt))
        return store.joint

    def lead(self, step: int) -> list[Any]:
        """Ranks of the first host begin."""
        begun = [self.begin(rank, step) for rank in (0, 2)]
        self.copied()
        return begun

    def follow(self, step: int) -> None:
        """Ranks of the second host do their part."""
        begun = [self.begin(rank, step) for rank in (1, 3)]
        self.copied()
        futures.wait(begun, LAST_S)

    def close(self) -> None:
        super().close()
        for end in (*self.ends, self.kept):
            end.close()


Make = Callable[..., Spread]


def fail(*_: Any, **__: Any) -> None:
    raise TierError("it does not answer")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with contextlib.ExitStack() as ends:

        def made(count: int = 2, replicas: int = 1) -> Spread:
            desk = Spread(tmp_path, count, monkeypatch, replicas)
            ends.callback(desk.close)
            return desk

        yield made


def test_each_host_brings_its_portion_to_a_node_of_its_own_and_the_nodes_carry_it_on(make: Make) -> None:
    desk = make()
    for step in range(1, 4):
        manifest = desk.take(step)
        desk.check(manifest)
        desk.weights += 1
    assert sorted(host for _, host in desk.held()) == [0, 1]
    assert sorted(number for number, _ in desk.held()) == [0, 1]
    assert desk.flush() == []
    assert desk.store.survey().manifests[0].step == 3
    image, there = desk.read(desk.store, manifest)
    assert (image, there) == desk.image(manifest)


def test_a_snapshot_that_is_not_whole_takes_the_place_of_none(make: Make) -> None:
    desk = make()
    desk.take(1)
    first = desk.lead(2)
    until(lambda: [2, 1] in desk.held().values(), "its first portion to be there", LAST_S)
    assert desk.whole() == [1]
    desk.hosts[1].decline(snapshot_name(2, 1), "no slot is free", desk.at)  # the second host never brings its own
    with pytest.raises(SnapshotFailedError, match="no slot is free", check=FailureReason.SHARE_MISSING.caused):
        first[0].result(LAST_S)
    until(lambda: sorted(desk.held().values()) == [[1], [1]], "what is torn to be dropped", LAST_S)
    desk.check(desk.take(3))
    assert desk.whole()[0] == 3


def test_who_leads_is_lost_before_it_has_said_that_a_snapshot_is_whole(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then that one and the one before are both there, of all hosts, and the next attempt finds both."""
    desk = make()
    desk.take(1)
    for node in desk.nodes.values():
        monkeypatch.setattr(node.spread, "whole", fail)
    desk.check(desk.take(2))
    assert sorted(desk.held().values()) == [[2, 1], [2, 1]]
    found = survey(Location.of(desk.url, servers=list(desk.memories), run_name="run"))
    spread = [manifest for manifest, source in found.candidates if " " in source.tier]
    assert [manifest.step for manifest in spread] == [2, 1]
    assert found.candidates[0][0].step == 2


@pytest.mark.parametrize("both", [False, True])
def test_nodes_that_did_not_hear_that_a_snapshot_is_whole_hear_it_with_the_next_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    desk = make()
    desk.take(1)
    with monkeypatch.context() as deaf:
        for node in list(desk.nodes.values())[: 1 + both]:
            deaf.setattr(node.spread, "whole", fail)
        desk.check(desk.take(2))
    assert sum(held == [2, 1] for held in desk.held().values()) >= 1 + both
    desk.take(3)
    desk.check(desk.take(4))
    older = [slot for node in desk.nodes.values() for slot in node.ring.committed()]
    assert all(slot.overtaken for slot in older if (manifest := slot.manifest) and manifest.step < 4)
    assert desk.flush() == []
    assert desk.store.survey().manifests[0].step == 4


def test_a_node_that_did_not_hear_what_is_to_be_brought_down_hears_it_from_who_leads_next(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing more went to the durable tier until that snapshot had left memory."""
    desk = make()
    monkeypatch.setattr(flusher, "put_portion", fail)
    with monkeypatch.context() as deaf:
        deaf.setattr(desk.nodes[0].spread, "whole", fail)
        desk.take(1)
    assert [slot.brings for node in desk.nodes.values() for slot in node.ring.committed()] == [False, True]
    heir = desk.joint(1)  # of the next node of the first host, say
    heir.begin(Shared(name=snapshot_name(2, 1), shares=4), MIB, attempt=1, hosts=2)
    assert [slot.brings for node in desk.nodes.values() for slot in node.ring.committed()] == [True, True]


def test_who_leads_next_lets_nothing_go_of_which_a_silent_node_may_know_that_it_is_whole(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who led was lost when it had told one node, which let go the one before it; the other let go that one itself."""
    desk = make()
    desk.take(1)
    with monkeypatch.context() as deaf:
        deaf.setattr(desk.nodes[1].spread, "whole", fail)
        desk.take(2)
    heir = desk.joint(1)  # of the next node of the first host
    with monkeypatch.context() as silent:
        silent.setattr(desk.nodes[0].spread, "look", fail)
        heir.begin(Shared(name=snapshot_name(3, 1), shares=4), MIB, attempt=1, hosts=2)
    assert desk.whole()[0] == 2


def test_a_lost_node_costs_no_snapshot_and_has_its_part_again_when_it_is_back(make: Make) -> None:
    desk = make()
    desk.take(1)
    desk.lose(1)
    desk.check(desk.take(2))  # nobody knows yet
    assert sorted(desk.held()) == [(0, 0), (0, 1)]
    desk.all_work(1)
    desk.check(desk.take(3))
    desk.start(1)
    desk.all_work(2)
    desk.check(desk.take(4))
    assert sorted(number for (number, _), steps in desk.held().items() if steps[0] == 4) == [0, 1]
    assert desk.flush() == []
    assert desk.store.survey().manifests[0].step == 4


def test_what_a_lost_node_was_to_bring_down_is_waited_for_no_longer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make()

    def fails(store: Any, portion: Manifest, *rest: Any, **more: Any) -> Manifest:
        if (1, portion.portion.host if portion.portion else 0) in desk.held():
            raise TierError("its bucket does not answer")
        return put_portion(store, portion, *rest, **more)

    monkeypatch.setattr(flusher, "put_portion", fails)
    desk.take(1)
    desk.take(2)
    first = desk.root / "run" / snapshot_name(1, 1)
    until(lambda: any(first.glob("portion-*.json")), "the other node to have brought its part", LAST_S)
    assert not desk.store.survey().manifests
    desk.lose(1)
    desk.check(desk.take(3))  # by the other node alone
    until(lambda: [each.step for each in desk.store.survey().manifests] == [3], "it at the durable tier", LAST_S)


def test_what_attempts_left_that_were_killed_in_a_snapshot_does_not_pile_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them has said that it is torn. What is whole stays, also if nobody has heard that it is."""
    desk = make()
    for node in desk.nodes.values():
        monkeypatch.setattr(node.spread, "whole", fail)
    desk.take(1)
    desk.take(2)
    begun = desk.lead(3)
    until(lambda: [3, 2, 1] in desk.held().values(), "its first portion to be there", LAST_S)
    for node in desk.nodes.values():
        node.open_run(info_of(desk.url, 2))
    desk.joint(2).begin(Shared(name=snapshot_name(3, 2), shares=4), MIB, attempt=2, hosts=2)
    assert sorted(desk.held().values()) == [[2, 1], [2, 1]]
    assert desk.whole() == [2, 1]
    with pytest.raises((SnapshotFailedError, FencedError)):
        begun[0].result(LAST_S)


def test_an_earlier_attempt_is_refused(make: Make) -> None:
    desk = make()
    manifest = desk.take(1)
    for node in desk.nodes.values():
        node.open_run(replace(info_of(desk.url, 2), token="another"))
    with pytest.raises((SnapshotFailedError, FencedError)):
        desk.take(2)
    for url in desk.at.split()[1:]:
        store = NodeStore(url)
        store.know(info_of(desk.url, 1))
        with pytest.raises(FencedError):
            store.torn(manifest.name, "why not", attempt=1)
        with pytest.raises(FencedError):
            store.whole(Told(manifest.name), attempt=1)
    desk.check(manifest)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_with_two_replicas_one_node_may_be_gone(make: Make, gone: int) -> None:
    desk = make(3, 2)
    desk.take(1)
    manifest = desk.take(2)
    desk.replicated(2)
    assert sorted(host for _, host in desk.held()) == [0, 0, 1, 1]
    desk.lose(gone)
    desk.check(manifest)
    desk.check(desk.take(3))


def test_a_replica_that_does_not_answer_for_long_delays_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make(3, 2)
    desk.take(1)
    (slow, _), goes_on = next(iter(desk.held())), threading.Event()
    node = desk.nodes[slow]
    commit = node.commit

    def slowly(upload: str, manifest: Manifest) -> Manifest:
        goes_on.wait(LAST_S)
        return commit(upload, manifest)

    monkeypatch.setattr(node, "commit", slowly)
    desk.check(desk.take(2))
    assert 2 not in [step for (number, _), steps in desk.held().items() if number == slow for step in steps]
    goes_on.set()
    desk.check(desk.take(3))


def test_damaged_bytes_of_one_replica_are_read_from_the_other(make: Make) -> None:
    desk = make(3, 2)
    manifest = desk.take(1)
    desk.replicated(1)
    node = next(node for number, node in desk.nodes.items() if (number, 1) in desk.held())
    slot = next(each for each in node.ring.committed() if each.manifest and each.manifest.portion.host == 1)
    slot.view()[5000] ^= 1
    desk.check(manifest)


def test_nodes_bring_down_what_they_have_when_all_trainers_are_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LEFT_S", 1.0)
    desk = make()
    for node in desk.nodes.values():
        monkeypatch.setattr(node.ring, "opened_s", {})
    desk.take(1)
    desk.take(2)
    manifest = desk.take(3)
    until(lambda: desk.store.survey().manifests[:1] and desk.store.survey().manifests[0].step == 3, "it", LAST_S)
    assert desk.read(desk.store, manifest)


def test_commands_say_what_portions_are_and_find_the_whole_over_nodes(
    make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    desk = make()
    manifest = desk.take(1)
    one, other = desk.memories
    run = f"{one}/run@{RUN_ID}"
    assert main(["ls", run]) == 0
    said = capsys.readouterr().out
    assert f"{manifest.name}-host-000" in said
    assert re.search(r"portion [12] of 2", said)
    assert "replicated" not in said
    assert main(["cp", run, str(tmp_path / "pulled")]) == 2
    assert "--server" in capsys.readouterr().err
    assert main(["verify", run, "--server", other]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"good {manifest.name} at {one} {other}", said)
    assert said.count("good") == 3
    assert main(["cp", run, "--server", other, str(tmp_path / "pulled")]) == 0
    image, whole = desk.image(manifest)
    for span in whole.files:
        assert (tmp_path / "pulled" / span.name).read_bytes() == image[span.offset : span.stop]
    assert main(["cp", run, "--server", other, "--consolidate", str(tmp_path / "one.ckpt")]) == 0
    assert main(["ls", desk.url, "--server", one, "--server", other, "--json"]) == 0
    states = [entry["state"] for entry in json.loads(capsys.readouterr().out.partition("[")[2].join("[]")[:-1])]
    assert "replicated" in states


def test_a_portion_of_a_newer_snapshot_that_is_not_whole_is_not_pulled(
    make: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    desk = make()
    desk.take(1)
    begun = desk.lead(2)
    until(lambda: [2, 1] in desk.held().values(), "its first portion to be there", LAST_S)
    one, other = desk.memories
    to = ["--server", other, str(tmp_path / "pulled")]
    assert main(["cp", f"{one}/run@{RUN_ID}", *to]) == 0
    assert "step 1, from" in capsys.readouterr().out
    desk.hosts[1].decline(snapshot_name(2, 1), "it is over", desk.at)
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused):
        begun[0].result(LAST_S)
