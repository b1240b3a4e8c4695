"""Machines that train together, each a network namespace: how something of them is lost, and what is left in the end.

A machine that is lost takes its processes and its memory with it. See ``tests/support/network.py``.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import pytest

from lightning_spot.exact.compare import differences
from tests.distributed.test_sharded_fit import check_states, final
from tests.support.link import Link
from tests.support.network import TOKEN, Network, listening, network_or_skip
from tests.support.waiting import until

STEPS = 30
"""Of each training."""

Kind = TypeVar("Kind", bound="Machines")


class Machines:
    """Two machines that train, and one with a snapshot server."""

    local = 1
    """Ranks of each machine."""
    more: tuple[str, ...] = ()
    link = Link()

    def __init__(self, network: Network, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network, self.root, self.port = network, root, 29500
        monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        self._monkeypatch = monkeypatch
        self.ranks: list[subprocess.Popen[bytes]] = []
        if self.link != Link():
            for host in network.address:
                network.shape(host, **asdict(self.link))
        self.start_node()

    def start_node(self) -> None:
        """Start the snapshot server."""
        self.url = listening(self.network, "memory", 7070, self.root / "node", "--allow-storage", str(self.root))

    @property
    def count(self) -> int:
        """Ranks of the training."""
        return 2 * self.local

    def train(self, name: str, steps: int) -> None:
        """Start the ranks of each machine."""
        (self.root / name).mkdir(exist_ok=True)
        self.port += 1
        together = {"WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.local, "TORCHELASTIC_RUN_ID": "run"}
        together |= {"MASTER_ADDR": self.network.address["first"], "MASTER_PORT": self.port}
        self.ranks = []
        for rank in range(self.count):
            machine, local = divmod(rank, self.local)
            for key, value in {**together, "RANK": rank, "GROUP_RANK": machine, "LOCAL_RANK": local}.items():
                self._monkeypatch.setenv(key, str(value))
            arguments = (f"--ranks={self.count}", "--nodes=2", f"--steps={steps}", f"--memory={self.url}")
            with open(self.root / name / f"log-{rank}", "ab") as log:
                command = ("-m", "tests.support.together_trainer", str(self.root / name), *arguments, *self.more)
                self.ranks.append(self.network.start(("first", "second")[machine], *command, log=log))

    def steps(self, name: str) -> int:
        path = self.root / name / "steps"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def cut_for_a_while(self, host: str, seconds: float = 8.0) -> None:
        """The link of a host fails; TCP gives nothing up in that time."""
        self.network.cut(host)
        time.sleep(seconds)
        self.network.mend(host)

    def come_to(self, step: int) -> None:
        """Train until that step."""
        until(lambda: self.steps("run") >= step or self.ended(), f"step {step}", 200.0)
        assert not self.ended(), self.log()

    def ended(self) -> bool:
        """Whether a rank has, or, under a launcher, all ranks of a machine."""
        return any(rank.poll() is not None for rank in self.ranks)

    def end(self) -> None:
        """Both machines are lost, if one is: what is left there waits for the others."""
        for host in ("first", "second"):
            self.network.lose(host)

    def log(self) -> str:
        return "".join(log.read_text() for log in sorted((self.root / "run").glob("log-*")))

    def wait(self, name: str, wait_s: float = 300.0) -> list[int]:
        codes = [rank.wait(wait_s) for rank in self.ranks]
        print((self.root / name / "log-0").read_text())
        return codes


class Sharded(Machines):
    """Two machines that train a model in shards, started by torchrun; and one with a snapshot server."""

    local = 2
    third = "the snapshot server"

    def train(self, name: str, steps: int) -> None:
        (self.root / name).mkdir(exist_ok=True)
        self.port += 1
        address = self.network.address["first"]
        self.ranks = []
        for number, host in enumerate(("first", "second")):
            command = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            command += [f"--nproc-per-node={self.local}", f"--master-addr={address}", f"--master-port={self.port}"]
            command += [
                "-m",
                "tests.support.sharded_hosts",
                str(self.root / name),
                f"--ranks={self.count}",
                "--nodes=2",
            ]
            command += [f"--steps={steps}", f"--memory={self.url}", *self.more]
            with open(self.root / name / f"log-{number}", "ab") as log:
                self.ranks.append(self.network.start(host, *command, log=log))

    def train_slowly_to(self, step: int) -> None:
        """What they send takes its time."""
        for host in ("first", "second"):
            self.network.shape(host, bits_per_s=40_000_000)
        self.train("run", STEPS)
        self.come_to(step)

    def lose(self, what: str) -> None:
        """Something is lost. Training goes on without it, or is started again."""
        if what == "a link":
            self.cut_for_a_while("second")
        elif what == self.third:
            self.lose_third()
        else:
            self.kill_rank() if what == "a rank" else self.network.lose("second" if what == "a machine" else "first")
            until(self.ended, "it to end", 100.0)
        if what not in ("a link", self.third) or self.ended():
            self.end()
            self.train("run", STEPS)

    def lose_third(self) -> None:
        """The snapshot server is lost. It is back when training has gone on."""
        before = self.steps("run")
        self.network.lose("memory")
        until(lambda: self.steps("run") > before + 3 or self.ended(), "it to go on", 200.0)
        self.start_node()

    def kill_rank(self) -> None:
        """The last rank, which is on the second machine."""
        found = [
            pid for pid in self.network.processes("second") if b"tests.support.sharded_hosts" in _of(pid, "cmdline")
        ]
        last = f"RANK={self.count - 1}".encode()
        (rank,) = [pid for pid in found if last in _of(pid, "environ").split(b"\0")]
        os.kill(rank, signal.SIGKILL)

    def check(self, twin: Path) -> None:
        """Every snapshot of the training, which is over, holds the state of its step, and the last one that of a twin.

        Args:
            twin: where the same was trained undisturbed.
        """
        check_states(self.root / "run")
        assert list(differences(final(twin), final(self.root / "run"))) == []


def lose(machines: Machines, what: str, steps: int | None = None) -> None:
    """Something is lost while two machines train; where a rank is, the training is started again.

    It goes to that step, or five steps further than it had come.
    """
    if what == "a link":
        machines.cut_for_a_while("second")
        return
    if what == "the snapshot server":
        machines.network.lose("memory")
        return
    if what == "the first node":
        there = machines.network.processes("first")
        nodes = [pid for pid in there if b"--embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(nodes[-1], signal.SIGKILL)  # the twin's may be there yet
        return
    if what in ("a rank", "the first rank"):  # what else runs on its machine stays
        machines.ranks[-1 if what == "a rank" else 0].kill()
    else:
        machines.network.lose("second" if what == "a machine" else "first")
    for rank in machines.ranks:  # the other one fails in a collective, or hangs there
        rank.send_signal(signal.SIGKILL)
        rank.wait()
    machines.train("run", machines.steps("run") + 5 if steps is None else steps)


def _of(pid: int, what: str) -> bytes:
    return Path(f"/proc/{pid}/{what}").read_bytes()


def variant(kind: type[Kind], **attributes: object) -> type[Kind]:
    """Such machines, some of whose attributes are others."""
    return type(kind.__name__, (kind,), attributes)


def started(
    kind: type[Kind], root: Path, monkeypatch: pytest.MonkeyPatch, python: str, prefix: str = ""
) -> Iterator[Kind]:
    """Machines of a kind, as a fixture yields them; the test is skipped where there can be none."""
    with network_or_skip(kind.__name__.lower(), ("first", "second", "memory"), python, prefix) as network:
        yield kind(network, root, monkeypatch)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Callable[[int], Path]:
    """The same training in shards on so many ranks, undisturbed, on one machine."""

    @functools.cache
    def of(ranks: int) -> Path:
        root = tmp_path_factory.mktemp("twin")
        command = [warm_python, "-m", "tests.support.sharded_hosts", str(root), f"--ranks={ranks}", "--hosts=1"]
        with open(root / "log", "wb") as log:
            done = subprocess.run([*command, f"--steps={STEPS}"], stdout=log, stderr=log, check=False)
        assert done.returncode == 0, (root / "log").read_text()
        return root

    return of


@pytest.fixture(scope="module")
def twin(twins: Callable[[int], Path]) -> Path:
    """On four ranks."""
    return twins(4)


# -- when something is lost -----------------------------------------------------------------------------------------


def training(machines: Machines) -> None:
    """At any moment."""


def staging(machines: Machines) -> None:
    """A step has ended: its state is copied."""
    machines.come_to(machines.steps("run") + 1)


def sending(machines: Machines) -> None:
    staging(machines)
    before = machines.network.received("memory")
    until(lambda: machines.network.received("memory") > before + 100_000, "a portion to be on its way", 100.0)


def committing(machines: Machines) -> None:
    """Two portions have come since a step has ended, or nearly so."""
    staging(machines)
    before = machines.network.received("memory")
    until(lambda: machines.network.received("memory") > before + 900_000, "all of it to be there", 100.0)


def restoring(machines: Machines) -> None:
    machines.end()
    machines.network.shape("memory", bits_per_s=4_000_000)  # it is read for seconds
    before = [machines.network.received(host) for host in ("first", "second")]
    machines.train("run", STEPS)

    def reads() -> bool:
        now = [machines.network.received(host) for host in ("first", "second")]
        return all(there > then + 200_000 for there, then in zip(now, before, strict=True))

    until(reads, "both to be at reading", 200.0)


PHASES: list[Callable[[Machines], None]] = [staging, sending, committing, restoring]


def flushing(machines: Machines) -> None:
    """A snapshot is about to lie at the durable tier: some of it is there, and not its manifest, or only just."""
    run, deadline_s = machines.root / "run" / "run", time.monotonic() + 100.0

    def begun() -> set[str]:
        return {folder.name for folder in run.glob("step-*")}

    before = begun()
    while not begun() - before:
        assert time.monotonic() < deadline_s, "no snapshot was brought to the durable tier"
        time.sleep(0.0005)
