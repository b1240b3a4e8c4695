"""Ranks of a model in shards that believe to be on several hosts, and put snapshots together at a snapshot server."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.exact.compare import differences
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.node import Node
from lightning_spot.sharded.reader import ImageReader, load_all
from tests.distributed.test_across import whole_at
from tests.distributed.test_sharded_fit import check_states, final, snapshots, without_what_came_later
from tests.distributed.test_together import run_trainer
from tests.support.machines import STEPS, Sharded, started
from tests.support.server import MIB, snapshot_server
from tests.support.trainer import digest

Train = Callable[..., int]


@pytest.fixture
def train(warm_python: str) -> Train:
    """Train on some ranks; the exit code."""

    return functools.partial(run_trainer, warm_python, "tests.support.sharded_hosts")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[Node, str]]:
    """A snapshot server that carries runs on, and its URL."""
    with snapshot_server(tmp_path, memory_bytes=512 * MIB) as server:
        yield server


def held(node: Node, but: str = "") -> list[tuple[Manifest, dict[str, Any]]]:
    """Every snapshot of which a server has all shards; not of the run whose identity is ``but``."""
    return [(manifest, load_all(ImageReader(memoryview(image), manifest))) for manifest, image in whole_at(node, but)]


def aborted(root: Path) -> int:
    return json.loads((root / "rank-0.json").read_text())["aborted"]  # type: ignore[no-any-return]


def log(root: Path) -> str:
    return (root / "log").read_text()


def test_two_hosts_have_their_shards_at_one_server(train: Train, tmp_path: Path, memory: tuple[Node, str]) -> None:
    root = tmp_path / "run"
    assert train(root, "--memory", memory[1], "--steps", 6) == 0, log(root)
    steps = check_states(root)
    assert aborted(root) == 0
    assert snapshots(root)[0].complete
    at_node = held(memory[0])
    assert len(at_node) >= 2
    for manifest, state in at_node:
        assert digest(state["state_dict"]) == steps[str(manifest.step)]


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_of_either_host_is_killed_within_its_shard(
    train: Train, tmp_path: Path, memory: tuple[Node, str], who: int
) -> None:
    """Also when the run goes on from an earlier snapshot, in a directory of its own."""
    options = ("--ranks", 4, "--memory", memory[1])
    assert train(tmp_path / "twin", *options) == 0
    root = tmp_path / "run"
    assert train(root, *options, "--kill", who, 6) != 0
    twin = snapshots(tmp_path / "twin")[0].run_id
    newest = max(manifest.step for manifest, _ in held(memory[0], but=twin))
    assert newest >= 4
    assert train(root, *options, "--seed", 99) == 0, log(root)
    assert f"resumes at step {newest}" in log(root)
    check_states(root)
    again = without_what_came_later(root, tmp_path / "again", 4)
    assert train(again, *options, "--seed", 99) == 0, log(again)
    assert "resumes at step 4" in log(again)
    for each in (root, again):
        assert list(differences(final(tmp_path / "twin"), final(each))) == []


@pytest.mark.soak
def test_an_urgent_snapshot_is_sent_by_all_hosts(train: Train, tmp_path: Path, memory: tuple[Node, str]) -> None:
    root = tmp_path / "run"
    assert train(tmp_path / "twin", "--memory", memory[1]) == 0
    assert train(root, "--memory", memory[1], "--notice", 1, 5) == 143
    assert "is safe in" in log(root)
    assert train(root, "--memory", memory[1], "--seed", 99) == 0, log(root)
    assert list(differences(final(tmp_path / "twin"), final(root))) == []


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Sharded]:
    yield from started(Sharded, tmp_path, monkeypatch, warm_python)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_first_host_loses_its_server_at_the_last_snapshot(machines: Sharded, tmp_path: Path) -> None:
    """Of the last step there is the regular one."""
    machines.more = ("--lose-node",)
    machines.train("run", STEPS)
    assert machines.wait("run") == [0, 0], machines.log()
    assert "does not have its last snapshot" in machines.log()
    newest = snapshots(tmp_path / "run")[0]
    assert (newest.step, newest.complete) == (STEPS, False)
    check_states(tmp_path / "run")
