"""Ranks of one training (DDP on gloo) that believe to be on several hosts, and bring snapshots to a snapshot server."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_spot.capture.host_link import RingSettings
from lightning_spot.capture.writer import Miss
from lightning_spot.client.node_client import NodeClient
from lightning_spot.exact.compare import differences
from lightning_spot.fit.together import ALONE, TOGETHER, Together
from lightning_spot.fit.topology import Topology
from lightning_spot.image.manifest import MOST_HOSTS
from lightning_spot.image.packing import Compression
from lightning_spot.memory.node import Node
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.run.location import Location
from tests.distributed.test_together import accounts, check_ends, check_run, check_states, load, manifests, train
from tests.support.machines import Machines, lose, started
from tests.support.said import keys, said
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


def held(node: Node, but: str = "") -> dict[int, dict[str, Any]]:
    """Every snapshot in a node's memory, by its step, as torch reads it; not of the run whose identity is ``but``."""
    return {
        slot.manifest.step: torch.load(io.BytesIO(slot.view()), weights_only=True)
        for slot in node.ring.committed()
        if slot.manifest is not None and not slot.manifest.complete and slot.manifest.run_id != but
    }


def test_ranks_of_two_hosts_bring_the_snapshots_of_a_training_to_a_memory_node(
    train: Train, tmp_path: Path, memory: tuple[Node, str]
) -> None:
    root = tmp_path / "run"
    assert train(root, "--steps", 8, *HOSTS, "--memory", memory[1]) == 0
    check_states(root)
    first, second = accounts(root, 2)
    assert first["missed"] == 0
    assert first["brought"] >= 5
    nbytes = manifests(root)[0].nbytes
    assert 0.45 < second["copied"] / first["brought"] / nbytes < 0.55
    steps = dict(line.split() for line in (root / "steps").read_text().splitlines())
    snapshots = held(memory[0])
    assert len(snapshots) >= first["brought"]
    for step, snapshot in snapshots.items():
        assert digest(snapshot["state_dict"]) == steps[str(step)]
        assert len(snapshot["lightning_spot"]["ranks"]) == 2


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_of_either_host_is_killed_in_the_middle_of_its_share(
    train: Train, tmp_path: Path, memory: tuple[Node, str], who: int
) -> None:
    hosts = ("--ranks", 4, "--hosts", 2, "--steps", 8, "--memory", memory[1])
    assert train(tmp_path / "twin", *hosts) == 0
    told = accounts(tmp_path / "twin", 4)
    assert told[0]["missed"] == 0
    copied = [account["copied"] for account in told[2:]]  # rank 1 has a share of the last one, too
    assert max(copied) <= 1.05 * min(copied)
    assert train(tmp_path / "run", *hosts, "--kill", who, 6) != 0
    newest = max(held(memory[0], but=manifests(tmp_path / "twin")[0].run_id))
    assert train(tmp_path / "run", *hosts) == 0
    assert newest >= 4
    check_run(tmp_path)


@pytest.mark.soak
def test_an_urgent_snapshot_does_not_wait_for_other_hosts(
    train: Train, tmp_path: Path, memory: tuple[Node, str]
) -> None:
    options = (*HOSTS, "--memory", memory[1])
    assert train(tmp_path / "twin", *options) == 0
    assert train(tmp_path / "run", *options, "--notice", 1, 3) == 143  # others hear of it within a few steps
    assert manifests(tmp_path / "run")[0].step > 3
    check_states(tmp_path / "run")
    assert train(tmp_path / "run", *options) == 0
    check_ends(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("turned", [(), ("--turned",)], ids=["the same rank 0", "another rank 0"])
def test_the_newest_snapshot_is_in_the_memory_of_one_host_and_all_go_on_from_it(
    train: Train, tmp_path: Path, turned: tuple[str, ...]
) -> None:
    root = tmp_path / "run"
    assert train(tmp_path / "twin", *HOSTS) == 0
    assert train(root, *HOSTS, "--durable-every", 1000, "--kill", 0, 8) != 0
    assert max(manifest.step for manifest in manifests(root)) <= 2
    assert train(root, *HOSTS, *turned) == 0, (root / "log").read_text()
    (resumed,) = re.findall(r"resumes at step (\d+)", (root / "log").read_text())
    assert int(resumed) >= 6
    check_run(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_the_memory_node_is_lost_and_training_goes_on(
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
    told = accounts(root, 2)[0]
    assert told["brought"] >= (30 if count > 1 else 5), told
    assert told["missed"] <= 3, told


def run_at(url: str) -> tuple[dict[str, Any], list[Any]]:
    """What a node says of its one run, and its slots."""
    status = NodeClient(parse_spot_url(f"{url}/run")[0]).call("GET", "/v1/status")
    return next(iter(status["runs"].values()), {}), status["slots"]


def has_snapshots(url: str) -> bool:
    return any(slot["snapshot"] for slot in run_at(url)[1])


def carrying(urls: Iterable[str]) -> str:
    """The node that brings the run to its durable tier."""
    return next(url for url in urls if run_at(url)[0].get("destinations"))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Machines]:
    yield from started(Machines, tmp_path, monkeypatch, warm_python)


# -- no snapshot server: what other hosts' ranks know is sent to rank 0
# ----------------------------------------------------


@pytest.mark.parametrize("optimizer", ["", "--zero"])
def test_a_rank_of_another_host_is_killed_before_what_it_knows_was_sent(
    train: Train, tmp_path: Path, optimizer: str
) -> None:
    """The rank is gone in the iteration in which its state leaves: there is no snapshot of it, or a whole one."""
    options = (*HOSTS, "--steps", 8, *filter(None, [optimizer]))
    assert train(tmp_path / "twin", *options) == 0
    (first, _) = accounts(tmp_path / "twin", 2)
    assert first["missed"] == 0
    assert first["posted"] >= 5
    assert train(tmp_path / "run", *options, "--kill", 1, 6) != 0
    until(
        lambda: any(manifest.step >= 4 for manifest in manifests(tmp_path / "run")), "the node to bring what was left"
    )
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
def test_two_machines_train_without_a_memory_node_and_something_is_lost(
    apart: Machines, tmp_path: Path, what: str, optimizer: str
) -> None:
    apart.more = tuple(filter(None, [optimizer]))
    apart.train("twin", 30)
    assert apart.wait("twin") == [0, 0]
    told = accounts(tmp_path / "twin", 2)[0]
    assert told["missed"] == 0
    assert told["posted"] >= 20
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
    machines.more = ("--compression", "topk", "--durable-every", "3600")
    machines.train("twin", 60)
    assert machines.wait("twin") == [0, 0]
    assert accounts(tmp_path / "twin", 2)[0]["posted"] >= 40
    machines.train("run", 60)
    until(lambda: machines.steps("run") >= 12, "it to train", 120.0)
    lose(machines, what, 60)
    assert machines.wait("run") == [0, 0]
    log = (tmp_path / "run" / "log-0").read_text()
    said = "is not exact (compression='topk')" in log
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
    """Without a server, the newest snapshot is on the first machine only: the second one reads it from there."""
    for machines in started(kind, tmp_path, monkeypatch, warm_python, "fd79::"):
        machines.more = ("--durable-every", "3600")
        machines.train("run", 400)
        until(lambda: machines.steps("run") >= 10, "it to train", 120.0)  # noqa: B023
        lose(machines, "a rank")
        assert machines.wait("run") == [0, 0]
        log = (tmp_path / "run" / "log-0").read_text()
        assert re.search(r"resumes at step \d+ .* from (host|spot://\[fd79::3\])", log)
        assert "does not reach rank 0" not in log
        assert accounts(tmp_path / "run", 2)[0]["missed"] == 0
        check_states(tmp_path / "run")


class OnTwoRanks(SimpleNamespace):
    """A trainer, as far as it is asked for its ranks."""


@pytest.mark.parametrize(
    ("hosts", "compression", "why"),
    [
        (Topology(count=2), "topk", r".*Leave lossy="),
        (Topology(count=MOST_HOSTS + 1), "auto", f"at most {MOST_HOSTS} hosts"),
        (Topology(count=2, why_not="rank 1: no room"), "auto", ".*one has none: rank 1: no room"),
    ],
)
def test_where_the_first_host_sends_everything_by_itself_a_warning_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hosts: Topology,
    compression: Compression,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Topology, "meet", lambda *_: hosts)
    ring = RingSettings(
        slots=2, memory_bytes=2**20, server_idle_timeout_s=9.0, keep=1, strict=False, compression=compression
    )
    trainer: Any = OnTwoRanks(strategy=DDPStrategy(), world_size=2, global_rank=0)
    attempt: Any = SimpleNamespace(writer=SimpleNamespace(across=SimpleNamespace()))
    together = Together(trainer, ring)
    assert not together.begin(attempt, Location.of(tmp_path, servers="spot://a:1"), "run", 1)
    (facts,) = said(caplog, "sent-by-one-host")
    assert re.match(why, facts["why"])


def test_hosts_go_on_together_after_misses_that_are_noticed_late_and_ask_who_carries_the_run_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = RingSettings(slots=2, memory_bytes=2**20, server_idle_timeout_s=9.0, keep=1, strict=False)
    trainer: Any = OnTwoRanks(strategy=SimpleNamespace(model=None), optimizers=[], world_size=2, global_rank=0)
    together = Together(trainer, ring)
    together._hosts = Topology(ranks=((0,), (1,)), can_bring=True)
    together.rooms.put(1, b"own")
    carrier = "spot://a:1/run"
    state = SimpleNamespace(is_under_way=False, carrier=carrier, brought=0)
    writer = SimpleNamespace(together=0, posted=0, missed=0, last_miss=Miss("a:1 does not answer", None), across=state)
    attempt: Any = SimpleNamespace(writer=writer)
    assert together.how(attempt) == replace(TOGETHER, at=carrier)
    assert together.how(attempt) == replace(
        TOGETHER, at=carrier
    )  # begun before the one before it is known to be missed
    for missed in (1, 2):
        writer.missed, state.carrier = missed, carrier
        assert together.how(attempt) == ALONE
        assert not keys(caplog)
        assert state.carrier == ""
    assert together.how(attempt) == ALONE
    state.carrier = carrier
    assert together.how(attempt) == replace(TOGETHER, at=carrier)
    state.carrier = ""
    assert together.how(attempt) == ALONE
    writer.missed, state.carrier = 3, carrier
    assert together.how(attempt) == ALONE
    assert keys(caplog) == {"hosts-apart"}
    assert together._hosts.can_bring
