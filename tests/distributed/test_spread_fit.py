"""Trainings in shards on several hosts, whose snapshots are spread over snapshot servers; something of them is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_spot.exact.compare import differences
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory import reconcile
from lightning_spot.memory.node import Node
from tests.distributed.test_sharded_fit import check_states, final, snapshots, without_what_came_later
from tests.distributed.test_sharded_hosts import Train, aborted, log, train
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


def test_servers_too_small_for_a_snapshot_hold_it_together(train: Train, tmp_path: Path, nodes: Nodes) -> None:
    found, root = nodes(4, 12 * MIB), tmp_path / "run"
    options = ("--ranks", 4, "--hosts", 4, "--width", 1024, "--memory", ",".join(found))
    assert train(root, *options) == 0, log(root)
    check_states(root)
    assert aborted(root) == 0, log(root)
    newest = snapshots(root)[0]
    assert newest.complete
    assert newest.nbytes > 12 * MIB


def newest_whole(found: dict[str, Node]) -> int:
    """Step of the newest snapshot of which servers have all shards between them."""
    shards: dict[str, dict[int, Manifest]] = {}
    for node in found.values():
        for slot in node.ring.committed():
            if slot.manifest is not None and slot.shard is not None:
                shards.setdefault(slot.manifest.snapshot, {})[slot.shard.writer] = slot.manifest
    whole = [there for there in shards.values() if len(there) == there[min(there)].shard.writers]  # type: ignore[union-attr]
    return max(manifest.step for there in whole for manifest in there.values())


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.soak), 1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_rank_is_killed_and_fewer_go_on_from_the_servers(
    train: Train, tmp_path: Path, nodes: Nodes, who: int
) -> None:
    found, root = nodes(3), tmp_path / "run"
    options = ("--memory", ",".join(found), "--ranks")
    assert train(root, *options, 4, "--kill", who, 6) != 0
    newest = newest_whole(found)
    assert newest >= 4
    assert train(root, *options, 2, "--seed", 99) == 0, log(root)
    assert f"resumes at step {newest}" in log(root)
    check_states(root)
    assert snapshots(root)[0].complete


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1])
def test_a_training_is_killed_while_a_server_shuts_down(
    train: Train, tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    """Each server puts what it has into storage, the one that ends before it does."""
    found, root = nodes(2), tmp_path / "run"
    assert train(root, "--kill", who, 6, "--memory", ",".join(found)) != 0
    newest, leaving = newest_whole(found), list(found.values())[1]
    monkeypatch.setattr(reconcile, "LEFT_S", 1.0)
    leaving.drain()
    until(lambda: leaving.settled, "it to owe nothing", 60.0)
    leaving.ring.close(keep_unsafe=False)
    until(lambda: snapshots(root)[0].step == newest, "it in storage", 60.0)
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
def test_one_server_goes_on_from_what_several_had_stored(train: Train, tmp_path: Path, nodes: Nodes) -> None:
    found, root, again = nodes(2), tmp_path / "run", tmp_path / "again"
    options = ("--ranks", 4, "--memory")
    assert train(root, *options, ",".join(found)) == 0
    step = next(manifest.step for manifest in snapshots(root) if manifest.step < 8)
    assert train(without_what_came_later(root, again, step), *options, next(iter(found)), "--seed", 99) == 0
    assert f"resumes at step {step}" in log(again)
    assert list(differences(final(root), final(again))) == []
