"""Trainings in shards on several hosts, whose snapshots are spread over snapshot servers; something of them is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_spot.errors import TierError
from lightning_spot.exact.compare import differences
from lightning_spot.image.manifest import snapshot_name
from lightning_spot.memory import work
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.node import Node
from tests.distributed.test_sharded_fit import check_states, final, snapshots, without_what_came_later
from tests.distributed.test_sharded_hosts import Train, log, told, train
from tests.support.server import snapshot_server
from tests.support.waiting import until

__all__ = ["train"]

MIB = 2**20

Nodes = Callable[..., dict[str, Node]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Starts snapshot servers that carry runs on; they are given by their URLs."""
    with contextlib.ExitStack() as ends:

        def start(count: int, memory_bytes: int = 512 * MIB) -> dict[str, Node]:
            made = (snapshot_server(tmp_path, memory_bytes=memory_bytes) for _ in range(count))
            return {url: node for node, url in map(ends.enter_context, made)}

        yield start


def test_nodes_that_are_each_too_small_for_a_snapshot_hold_it_together(
    train: Train, tmp_path: Path, nodes: Nodes
) -> None:
    found, root = nodes(4, 12 * MIB), tmp_path / "run"
    options = ("--ranks", 4, "--hosts", 4, "--width", 1024, "--memory", ",".join(found))
    assert train(root, *options) == 0, log(root)
    check_states(root)
    assert told(root)["missed"] == 0, log(root)
    newest = snapshots(root)[0]
    assert newest.complete
    assert newest.nbytes > 12 * MIB


def newest_whole(found: dict[str, Node]) -> int:
    """Step of the newest snapshot of which all portions are in memory."""
    held: dict[str, set[int]] = {}
    hosts, steps = {}, {}
    for node in found.values():
        for slot in node.ring.committed():
            if slot.manifest is not None and slot.manifest.portion is not None:
                held.setdefault(slot.manifest.snapshot, set()).add(slot.manifest.portion.host)
                hosts[slot.manifest.snapshot] = slot.manifest.portion.hosts
                steps[slot.manifest.snapshot] = slot.manifest.step
    return max(steps[name] for name, there in held.items() if len(there) == hosts[name])


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.soak), 1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_rank_is_killed_in_the_middle_of_its_share_and_fewer_go_on_from_the_nodes(
    train: Train, tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    found, root = nodes(3), tmp_path / "run"
    options = ("--memory", ",".join(found), "--ranks")
    assert train(root, *options, 4, "--kill", who, 6) != 0
    newest, told = newest_whole(found), heard(found, monkeypatch)
    assert newest >= 4
    assert train(root, *options, 2, "--seed", 99) == 0, log(root)
    assert f"resumes at step {newest}" in log(root)
    assert told[0] == Told(snapshot_name(newest, 1))  # that it is gone on from
    check_states(root)
    assert snapshots(root)[0].complete


def heard(found: dict[str, Node], monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What nodes are told of snapshots that are whole, from now on."""
    told: list[Told] = []
    for node in found.values():
        whole = node.spread.whole

        def note(run: str, attempt: int, said: Told, whole: Callable[..., None] = whole) -> None:
            told.append(said)
            whole(run, attempt, said)

        monkeypatch.setattr(node.spread, "whole", note)
    return told


def test_a_node_shuts_down_with_the_last_snapshot_of_a_fit_of_which_it_did_not_hear_that_it_is_whole(
    train: Train, tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other one follows with which it would hear it, and the fit waited in vain until its time was over."""
    found, root, lost = nodes(2), tmp_path / "run", list[str]()
    leaving = list(found.values())[1]
    whole = leaving.spread.whole

    def hears(run: str, attempt: int, told: Told) -> None:
        if "complete" in told.name and len(lost) < 2:
            lost.append(told.name)
            leaving.drain()
            raise TierError("its link is cut")
        whole(run, attempt, told)

    monkeypatch.setattr(leaving.spread, "whole", hears)
    assert train(root, "--steps", 4, "--memory", ",".join(found)) == 0, log(root)
    assert len(lost) == 2
    assert "is complete at step 4" in log(root)
    newest = snapshots(root)[0]
    assert newest.complete
    until(lambda: leaving.settled, "it to owe nothing")
    assert train(root, "--steps", 6, "--memory", ",".join(nodes(2)), "--seed", 99) == 0, log(root)
    assert "resumes at step 4" in log(root)
    check_states(root)


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1])
def test_a_training_is_killed_and_a_node_shuts_down_and_what_it_had_is_gone_on_from(
    train: Train, tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    """Nobody is left to say what is whole: each node brings down what it has, the one that ends before it does."""
    found, root = nodes(2), tmp_path / "run"
    assert train(root, "--kill", who, 6, "--memory", ",".join(found)) != 0
    newest, leaving = newest_whole(found), list(found.values())[1]
    for node in found.values():  # its word, or that of the one before, may have been on its way
        for slot in node.ring.committed():
            slot.whole = slot.brings = False
    monkeypatch.setattr(work, "LEFT_S", 1.0)
    leaving.drain()
    until(lambda: leaving.settled, "it to owe nothing", 60.0)
    leaving.ring.close(keep_unsafe=False)
    until(lambda: snapshots(root)[0].step == newest, "it at the durable tier", 60.0)
    assert train(root, "--memory", ",".join(nodes(2)), "--seed", 99) == 0, log(root)
    assert f"resumes at step {newest}" in log(root)
    check_states(root)


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_urgent_snapshot_is_spread_by_all_hosts(train: Train, tmp_path: Path, nodes: Nodes, replicas: int) -> None:
    options = ("--memory", ",".join(nodes(3)), "--replicas", replicas)
    root = tmp_path / "run"
    assert train(tmp_path / "twin", *options) == 0
    assert train(root, *options, "--notice", 1, 5) == 143
    assert "is safe in" in log(root)
    assert train(root, *options, "--seed", 99) == 0, log(root)
    assert list(differences(final(tmp_path / "twin"), final(root))) == []


@pytest.mark.soak
def test_what_spread_nodes_brought_down_is_gone_on_from_exactly_with_one_node(
    train: Train, tmp_path: Path, nodes: Nodes
) -> None:
    found, root, again = nodes(2), tmp_path / "run", tmp_path / "again"
    options = ("--ranks", 4, "--memory")
    assert train(root, *options, ",".join(found)) == 0
    step = next(manifest.step for manifest in snapshots(root) if manifest.step < 8)
    assert train(without_what_came_later(root, again, step), *options, next(iter(found)), "--seed", 99) == 0
    assert f"resumes at step {step}" in log(again)
    assert list(differences(final(root), final(again))) == []
