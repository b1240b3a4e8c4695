"""Ranks of a model in shards that believe to be on several hosts, and put snapshots together at a memory node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chain import NotPermitted
from lightning_spot.client.stores import open_store
from lightning_spot.exact.compare import differences
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.node import Node
from lightning_spot.sharded.reader import ImageReader, load_all
from tests.conftest import until
from tests.gated import MIB
from tests.network import Network
from tests.served import served
from tests.test_across import Machines
from tests.test_every_step import digest
from tests.test_sharded_fit import content, final, snapshots, without_what_came_later

Train = Callable[..., int]
STEPS = 30


@pytest.fixture
def train(warm_python: str) -> Train:
    """Train on some ranks; the exit code."""

    def run(root: Path, *arguments: object) -> int:
        root.mkdir(exist_ok=True)
        command = [warm_python, "-m", "tests.sharded_hosts", str(root), *map(str, arguments)]
        with open(root / "log", "a") as log:
            return subprocess.run(command, stdout=log, stderr=log, timeout=600, check=False).returncode

    return run


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[tuple[Node, str]]:
    """A memory node that carries runs on, and its URL."""
    node = Node(slots=None, memory_bytes=512 * MIB, open_store=open_store, allow=[str(tmp_path)])
    with served(node) as port:
        yield node, f"spot://127.0.0.1:{port}"


def held(node: Node) -> list[tuple[Manifest, dict[str, Any]]]:
    """Every snapshot in a node's memory."""
    found = [(slot.manifest, slot.view()) for slot in node.ring.committed() if slot.manifest is not None]
    return [(manifest, load_all(ImageReader(view, manifest))) for manifest, view in found]


def told(root: Path) -> dict[str, int]:
    return json.loads((root / "rank-0.json").read_text())  # type: ignore[no-any-return]


def check_states(root: Path) -> dict[str, str]:
    """Every snapshot holds the parameters of its step."""
    steps = dict(line.split() for line in (root / "steps").read_text().splitlines())
    for manifest in snapshots(root):
        assert digest(content(root, manifest)["state_dict"]) == steps[str(manifest.step)], manifest.name
    return steps


def log(root: Path) -> str:
    return (root / "log").read_text()


def test_ranks_of_two_hosts_put_the_snapshots_of_their_shards_together(
    train: Train, tmp_path: Path, memory: tuple[Node, str]
) -> None:
    root = tmp_path / "run"
    assert train(root, "--memory", memory[1], "--steps", 6) == 0, log(root)
    steps = check_states(root)
    account = told(root)
    assert account["missed"] == 0
    assert account["brought"] >= 5
    newest = snapshots(root)[0]
    assert newest.complete
    assert 0.4 < account["own"] / newest.nbytes < 0.6
    at_node = held(memory[0])
    assert len(at_node) >= 5
    for manifest, state in at_node:
        assert digest(state["state_dict"]) == steps[str(manifest.step)]


@pytest.mark.soak
def test_four_ranks_of_two_hosts_under_fsdp1_have_the_snapshots_of_one_host(
    train: Train, tmp_path: Path, memory: tuple[Node, str]
) -> None:
    root, alone = tmp_path / "run", tmp_path / "alone"
    assert train(root, "--memory", memory[1], "--flat", "--ranks", 4) == 0, log(root)
    assert train(alone, "--hosts", 1, "--flat", "--ranks", 4) == 0, log(alone)
    assert told(root)["missed"] == 0
    assert told(root)["brought"] >= 6
    whole = {manifest.name: manifest for manifest in snapshots(alone)}
    found = snapshots(root)
    assert len(found) >= 2
    for manifest in found:
        there, here = content(alone, whole[manifest.name]), content(root, manifest)
        assert list(differences(there["model"], here["model"])) == []
        assert list(differences(there["optimizer_0"], here["optimizer_0"])) == []


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_of_either_host_is_killed_in_the_middle_of_its_share(
    train: Train, tmp_path: Path, memory: tuple[Node, str], who: int
) -> None:
    """Also when the run goes on from an earlier snapshot, in a directory of its own."""
    options = ("--ranks", 4, "--memory", memory[1])
    assert train(tmp_path / "twin", *options) == 0
    root = tmp_path / "run"
    assert train(root, *options, "--kill", who, 6) != 0
    twin = snapshots(tmp_path / "twin")[0].run_id
    newest = max(manifest.step for manifest, _ in held(memory[0]) if manifest.run_id != twin)
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
def test_an_urgent_snapshot_is_brought_by_all_hosts(train: Train, tmp_path: Path, memory: tuple[Node, str]) -> None:
    root = tmp_path / "run"
    assert train(tmp_path / "twin", "--memory", memory[1]) == 0
    assert train(root, "--memory", memory[1], "--notice", 1, 5) == 143
    assert "is safe in" in log(root)
    assert train(root, "--memory", memory[1], "--seed", 99) == 0, log(root)
    assert list(differences(final(tmp_path / "twin"), final(root))) == []


class Sharded(Machines):
    """Two machines that train a model in shards, two ranks each, started by torchrun; and one with a memory node."""

    more: tuple[str, ...] = ()

    def train(self, name: str, steps: int) -> None:
        (self.root / name).mkdir(exist_ok=True)
        self.port += 1
        address = self.network.address["first"]
        self.ranks = []
        for number, host in enumerate(("first", "second")):
            command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"]
            command += [f"--master-addr={address}", f"--master-port={self.port}", "-m", "tests.sharded_hosts"]
            command += [str(self.root / name), "--ranks=4", "--nodes=2", f"--steps={steps}", f"--memory={self.url}"]
            command += self.more
            with open(self.root / name / f"log-{number}", "ab") as log:
                self.ranks.append(self.network.start(host, *command, log=log))

    def come_to(self, step: int) -> None:
        until(lambda: self.steps("run") >= step or self.ended(), f"step {step}", 200.0)
        assert not self.ended(), self.log()

    def ended(self) -> bool:
        return any(rank.poll() is not None for rank in self.ranks)

    def log(self) -> str:
        return "".join((self.root / "run" / f"log-{number}").read_text() for number in (0, 1))

    def end(self) -> None:
        """Both machines are lost, if one is: what is left there waits for the others."""
        for host in ("first", "second"):
            self.network.lose(host)

    def kill_rank(self) -> None:
        """One rank of the second machine."""
        found = [pid for pid in self.network.processes("second") if b"tests.sharded_hosts" in cmdline(pid)]
        (rank,) = [pid for pid in found if b"LOCAL_RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
        os.kill(rank, signal.SIGKILL)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharded]:
    try:
        with Network(f"ls-sharded-{os.getpid()}", ("first", "second", "memory"), tmp_path) as network:
            yield Sharded(network, tmp_path, monkeypatch)
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, undisturbed, on one machine."""
    root = tmp_path_factory.mktemp("twin")
    command = [sys.executable, "-m", "tests.sharded_hosts", str(root), "--ranks=4", "--hosts=1", f"--steps={STEPS}"]
    with open(root / "log", "wb") as log_file:
        assert subprocess.run(command, stdout=log_file, stderr=log_file, check=False).returncode == 0, log(root)
    return root


def staging(machines: Sharded) -> None:
    """A step has ended: its state is copied."""
    machines.come_to(machines.steps("run") + 1)


def sending(machines: Sharded) -> None:
    staging(machines)
    before = machines.network.received("memory")
    until(lambda: machines.network.received("memory") > before + 100_000, "a portion to be on its way", 100.0)


def committing(machines: Sharded) -> None:
    """Two portions have come since a step has ended, or nearly so."""
    staging(machines)
    before = machines.network.received("memory")
    until(lambda: machines.network.received("memory") > before + 900_000, "all of it to be there", 100.0)


def restoring(machines: Sharded) -> None:
    machines.end()
    machines.network.shape("memory", 4_000_000)  # it is read for seconds
    before = [machines.network.received(host) for host in ("first", "second")]
    machines.train("run", STEPS)

    def reads() -> bool:
        now = [machines.network.received(host) for host in ("first", "second")]
        return all(there > then + 200_000 for there, then in zip(now, before, strict=True))

    until(reads, "both to be at reading", 200.0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", [staging, sending, committing, restoring])
@pytest.mark.parametrize("what", ["a rank", "a machine", "the first machine", "the memory node", "a link"])
def test_machines_train_in_shards_and_something_is_lost(
    machines: Sharded, tmp_path: Path, twin: Path, what: str, when: Callable[[Sharded], None]
) -> None:
    network, root = machines.network, tmp_path / "run"
    for host in ("first", "second"):
        network.shape(host, 40_000_000)
    machines.train("run", STEPS)
    machines.come_to(8)
    when(machines)
    if what == "the memory node":
        before = machines.steps("run")
        network.lose("memory")
        until(lambda: machines.steps("run") > before + 3 or machines.ended(), "it to go on", 200.0)
        machines.start_node()
    elif what == "a link":
        network.cut("second")
        time.sleep(8.0)  # TCP gives nothing up in that time
        network.mend("second")
    else:
        machines.kill_rank() if what == "a rank" else network.lose("second" if what == "a machine" else "first")
        until(lambda: machines.ended(), "it to end", 100.0)
    if what in ("a rank", "a machine", "the first machine") or machines.ended():
        machines.end()
        machines.train("run", STEPS)
    assert machines.wait("run") == [0, 0], machines.log()
    check_states(root)
    assert list(differences(final(twin), final(root))) == []
