"""Ranks of one training (DDP on gloo) that believe to be on several hosts, each of which sends what its ranks write."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot.client.server_client import ServerClient
from lightning_spot.exact.compare import differences
from lightning_spot.image.files import MODEL_FILE
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.node import Node
from lightning_spot.protocol.wire import parse_spot_url
from tests.distributed.test_together import accounts, check_ends, check_run, check_states, load, manifests, train
from tests.support.machines import Machines, lose, started
from tests.support.server import MIB, RunningNode, snapshot_server
from tests.support.trainer import digest
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G10")

__all__ = ["train"]

Train = Callable[..., int]
HOSTS = ("--ranks", 2, "--hosts", 2)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[Node, str]]:
    """A snapshot server that carries runs on, and its URL."""
    with snapshot_server(tmp_path, memory_bytes=512 * MIB) as node:
        yield node


def whole_at(node: Node, but: str = "") -> list[tuple[Manifest, bytes]]:
    """Every snapshot of which a server has all shards, and its image; not of the run whose identity is ``but``."""
    ring, found = node.ring, []
    for run in {slot.run for slot in ring.committed()} - {but}:
        for held, manifest in ring.readable(run):
            if manifest.shard is None and not manifest.complete:
                with ring.reading(held) as image:
                    found.append((manifest, bytes(image[0 : manifest.nbytes])))
    return found


def held(node: Node, but: str = "") -> dict[int, dict[str, Any]]:
    """The checkpoints of these, by their step, as torch reads them."""
    found = {}
    for manifest, image in whole_at(node, but):
        nbytes = manifest.span_of(MODEL_FILE).nbytes
        found[manifest.step] = torch.load(io.BytesIO(image[:nbytes]), weights_only=True)
    return found


def test_ranks_of_two_hosts_send_snapshots_to_one_server(
    train: Train, tmp_path: Path, memory: tuple[Node, str]
) -> None:
    root = tmp_path / "run"
    assert train(root, "--steps", 8, *HOSTS, "--memory", memory[1]) == 0
    check_states(root)
    assert accounts(root, 2)[0]["aborted"] == 0
    steps = dict(line.split() for line in (root / "steps").read_text().splitlines())
    snapshots = held(memory[0])
    assert len(snapshots) >= 2
    for step, snapshot in snapshots.items():
        assert digest(snapshot["state_dict"]) == steps[str(step)]
    assert len(load(root, manifests(root)[0])["lightning_spot"]["ranks"]) == 2


@pytest.mark.soak
def test_ranks_of_two_hosts_each_write_a_range(train: Train, tmp_path: Path, memory: tuple[Node, str]) -> None:
    root = tmp_path / "run"
    assert train(root, "--steps", 3, *HOSTS, "--width", 4096, "--memory", memory[1]) == 0
    check_states(root)
    copied = [account["copied"] for account in accounts(root, 2)]
    assert 0.9 < copied[0] / copied[1] < 1.2


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_of_either_host_is_killed_within_its_shard(
    train: Train, tmp_path: Path, memory: tuple[Node, str], who: int
) -> None:
    hosts = ("--ranks", 4, "--hosts", 2, "--steps", 8, "--memory", memory[1])
    assert train(tmp_path / "twin", *hosts) == 0
    assert accounts(tmp_path / "twin", 4)[0]["aborted"] == 0
    assert train(tmp_path / "run", *hosts, "--kill", who, 6) != 0
    newest = max(held(memory[0], but=manifests(tmp_path / "twin")[0].run_id))
    assert train(tmp_path / "run", *hosts) == 0
    assert newest >= 4
    check_run(tmp_path)


@pytest.mark.soak
def test_an_urgent_snapshot_is_sent_by_all_hosts(train: Train, tmp_path: Path, memory: tuple[Node, str]) -> None:
    options = (*HOSTS, "--memory", memory[1])
    assert train(tmp_path / "twin", *options) == 0
    assert train(tmp_path / "run", *options, "--notice", 1, 3) == 143  # others hear of it within a few steps
    assert manifests(tmp_path / "run")[0].step > 3
    check_states(tmp_path / "run")
    assert train(tmp_path / "run", *options) == 0
    check_ends(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_the_snapshot_server_is_lost_and_training_goes_on(
    tmp_path: Path, start_node: Callable[..., RunningNode], count: int, replicas: int
) -> None:
    """Where there is another one, hosts go on to bring snapshots there."""
    root = tmp_path / "run"
    root.mkdir()
    nodes = {node.url: node for node in (start_node("--allow-storage", str(tmp_path)) for _ in range(count))}
    steps = root / "steps"
    command = [sys.executable, "-m", "tests.support.together_trainer", str(root), *map(str, HOSTS), "--steps", "40"]
    command += ["--memory", ",".join(nodes), "--replicas", str(replicas), *(["--hold", "15"] if count > 1 else [])]
    with open(root / "log", "a") as log_file:
        training = subprocess.Popen(command, stdout=log_file, stderr=log_file)
    until(lambda: steps.exists() and len(steps.read_text().splitlines()) >= 14, "it to train", 300.0)
    if replicas == 2:
        assert all(has_snapshots(url) for url in nodes)
    nodes[carrying(nodes)].stop(signal.SIGKILL)
    (root / "go").touch()
    assert training.wait(300) == 0, (root / "log").read_text()
    check_states(root)
    assert manifests(root)[0].complete
    assert accounts(root, 2)[0]["aborted"] <= 3


def run_at(url: str) -> tuple[dict[str, Any], list[Any]]:
    """What a node says of its one run, and its slots."""
    status = ServerClient(parse_spot_url(f"{url}/run")[0]).call("GET", "/v1/status")
    return next(iter(status["runs"].values()), {}), status["slots"]


def has_snapshots(url: str) -> bool:
    return any(slot["snapshot"] for slot in run_at(url)[1])


def carrying(urls: Iterable[str]) -> str:
    """The node that brings the run to its durable tier."""
    return next(url for url in urls if run_at(url)[0].get("destinations"))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Machines]:
    yield from started(Machines, tmp_path, monkeypatch, warm_python)


# -- no snapshot server: each host puts its shards to storage ---------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["", "--zero"])
def test_a_rank_of_another_host_is_killed_before_its_shard(train: Train, tmp_path: Path, optimizer: str) -> None:
    """The rank is gone in the iteration in which it writes: there is no snapshot of it, or a whole one."""
    options = (*HOSTS, "--steps", 8, *filter(None, [optimizer]))
    assert train(tmp_path / "twin", *options) == 0
    assert accounts(tmp_path / "twin", 2)[0]["aborted"] == 0
    assert train(tmp_path / "run", *options, "--kill", 1, 6) != 0
    until(lambda: any(each.step >= 4 for each in manifests(tmp_path / "run")), "the servers to bring what was left")
    assert train(tmp_path / "run", *options) == 0
    check_run(tmp_path)


class Apart(Machines):
    """Two machines that train, and no snapshot server."""

    def start_node(self) -> None:
        self.url = "auto"


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Machines]:
    yield from started(Apart, tmp_path, monkeypatch, warm_python)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("optimizer", ["", "--zero"])
@pytest.mark.parametrize(
    "what", ["a rank", "the first rank", "a machine", "the first machine", "the first node", "a link"]
)
def test_two_machines_without_a_server_lose_something(
    apart: Machines, tmp_path: Path, what: str, optimizer: str
) -> None:
    apart.more = tuple(filter(None, [optimizer]))
    apart.train("twin", 30)
    assert apart.wait("twin") == [0, 0]
    assert accounts(tmp_path / "twin", 2)[0]["aborted"] == 0
    apart.train("run", 30)
    until(lambda: apart.steps("run") >= 12, "it to train", 120.0)
    lose(apart, what, 30)
    assert apart.wait("run") == [0, 0]
    check_run(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ["a rank", "the first rank", "the first machine", "the snapshot server", "a link"])
def test_two_machines_send_approximations_and_something_is_lost(machines: Machines, tmp_path: Path, what: str) -> None:
    """A run that went on from an approximation says so; each other one ends with the bits of its twin."""
    machines.more = ("--lossy", "topk", "--durable-every", "3600")
    machines.train("twin", 60)
    assert machines.wait("twin") == [0, 0]
    machines.train("run", 60)
    until(lambda: machines.steps("run") >= 12, "it to train", 120.0)
    lose(machines, what, 60)
    assert machines.wait("run") == [0, 0]
    log = (tmp_path / "run" / "log-0").read_text()
    said = "is not exact (lossy='topk')" in log
    assert said == bool(re.search(r"resumes at .*-inexact", log))
    ends = [load(root, manifests(root)[0]) for root in (tmp_path / "twin", tmp_path / "run")]
    assert bool(differences(*ends)) == said
    if not said:
        check_states(tmp_path / "run")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Apart, pytest.param(Machines, marks=pytest.mark.soak)])
def test_machines_that_know_no_ipv4(
    kind: type[Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str
) -> None:
    for machines in started(kind, tmp_path, monkeypatch, warm_python, "fd79::"):
        machines.train("run", 400)
        until(lambda: machines.steps("run") >= 10, "it to train", 120.0)  # noqa: B023
        lose(machines, "a rank")
        assert machines.wait("run") == [0, 0]
        log = (tmp_path / "run" / "log-0").read_text()
        assert re.search(r"resumes at step \d+ .* from (storage|spot://\[fd79::3\])", log)
        assert accounts(tmp_path / "run", 2)[0]["aborted"] == 0
        check_states(tmp_path / "run")
