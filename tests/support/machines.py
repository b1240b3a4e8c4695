"""Machines that train together, each a network namespace: how something of them is lost, and what is left in the end.

A machine that is lost takes its processes and its memory with it. See ``tests/support/network.py``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from tests.support import training
from tests.support.link import Link
from tests.support.network import TOKEN, Network, listening, network_or_skip
from tests.support.program import Outcome, command
from tests.support.waiting import until

STEPS = 30
"""Of each training."""
HOSTS = ("first", "second")
_PROGRAM = b"tests.support.program"

Kind = TypeVar("Kind", bound="Machines")


class Machines:
    """Two machines that train, started by torchrun, and one with a snapshot server.

    Attributes:
        local: ranks of each machine.
        more: of ``train``.
        third: what is on the third machine.
        memories: machines with a snapshot server.
    """

    local = 1
    more: ClassVar[dict[str, Any]] = {}
    link = Link()
    third = "the snapshot server"
    memories: tuple[str, ...] = ("memory",)

    def __init__(self, network: Network, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network, self.root, self.port = network, root, 29500
        monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        self._monkeypatch = monkeypatch
        self.agents: list[subprocess.Popen[bytes]] = []
        self.urls: dict[str, str] = {}
        if self.link != Link():
            for host in network.address:
                network.shape(host, **asdict(self.link))
        self.start_servers(*self.memories)

    def start_servers(self, *hosts: str) -> None:
        """Start a snapshot server on each of these."""
        for host in hosts:
            self.urls[host] = listening(self.network, host, 7070, self.root / host, "--allow-storage", str(self.root))

    @property
    def count(self) -> int:
        """Ranks of the training."""
        return 2 * self.local

    @property
    def run(self) -> Outcome:
        return Outcome(self.root / "run")

    def train(self, name: str = "run", steps: int = STEPS) -> Outcome:
        """Start the ranks of each machine."""
        outcome = Outcome(self.root / name)
        outcome.root.mkdir(exist_ok=True)
        self.port += 1
        how = {"ranks": self.count, "machines": 2, "steps": steps, "servers": [*self.urls.values()], **self.more}
        self.agents = []
        for number, host in enumerate(HOSTS):
            torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            torchrun += [f"--nproc-per-node={self.local}", f"--master-port={self.port}"]
            torchrun += [f"--master-addr={self.network.address['first']}"]
            called = command("", training.train, outcome.root, **how)
            with open(outcome.root / f"log-{number}", "ab") as log:
                self.agents.append(self.network.start(host, *torchrun, *called[1:], log=log))
        return outcome

    def train_slowly_to(self, step: int) -> None:
        """What they send takes its time."""
        for host in HOSTS:
            self.network.shape(host, bits_per_s=40_000_000)
        self.train()
        self.come_to(step)

    def come_to(self, step: int) -> None:
        """Train until that step."""
        until(lambda: len(self.run.steps) >= step or self.ended(), f"step {step}", 200.0)
        assert not self.ended(), self.run.log

    def ended(self) -> bool:
        """Whether all ranks of a machine have."""
        return any(agent.poll() is not None for agent in self.agents)

    def wait(self, wait_s: float = 300.0) -> None:
        """Train to the end."""
        codes = [agent.wait(wait_s) for agent in self.agents]
        assert codes == [0, 0], self.run.log

    def cut_for_a_while(self, host: str = "second", seconds: float = 8.0) -> None:
        """The link of a host fails; TCP gives nothing up in that time."""
        self.network.cut(host)
        time.sleep(seconds)
        self.network.mend(host)

    def lose(self, what: str, steps: int = STEPS) -> None:
        """Something is lost. Training goes on without it, or is started again."""
        if what == "a link":
            self.cut_for_a_while()
        elif what == "the first server":
            servers = self._processes("first", b"lightning_spot.http.program")
            os.kill(servers[-1], signal.SIGKILL)  # the twin's may be there yet
        elif what == self.third:
            self.lose_third()
        elif what in ("a rank", "the first rank"):
            rank = b"RANK=%d" % (self.count - 1 if what == "a rank" else 0)
            host = "second" if what == "a rank" else "first"
            ranks = self._processes(host, _PROGRAM)
            (pid,) = [pid for pid in ranks if rank in _of(pid, "environ").split(b"\0")]
            os.kill(pid, signal.SIGKILL)
            until(self.ended, "it to end", 100.0)
        else:
            self.network.lose("second" if what == "a machine" else "first")
            until(self.ended, "it to end", 100.0)
        if what not in ("a link", "the first server", self.third) or self.ended():
            self.end()
            self.train(steps=steps)

    def lose_third(self) -> None:
        """The snapshot server is lost. It is back when training has gone on."""
        before = len(self.run.steps)
        self.network.lose("memory")
        until(lambda: len(self.run.steps) > before + 3 or self.ended(), "it to go on", 200.0)
        self.start_servers("memory")

    def end(self) -> None:
        """What trains on either machine ends, as a rank or a machine is lost; a local server that is there stays."""
        for host in HOSTS:
            for pid in self._processes(host, _PROGRAM):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait(60.0)

    def check(self, twin: Outcome) -> None:
        """The training is over: every snapshot holds the state of its step, and the last one that of a twin."""
        self.run.check_states()
        self.run.check_end(twin)

    def _processes(self, host: str, word: bytes) -> list[int]:
        """That run there, with a word in their command."""
        return [pid for pid in self.network.processes(host) if word in _of(pid, "cmdline")]


class Sharded(Machines):
    """They train a model in shards. Both machines are lost where one is, or a rank."""

    local = 2
    more: ClassVar[dict[str, Any]] = {"sharded": True}

    def end(self) -> None:
        for host in HOSTS:
            self.network.lose(host)


def _of(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # it has just ended


class Bucket(Sharded):
    """The third machine has a bucket in place of the snapshot server."""

    third, memories = "the bucket", ()
    more: ClassVar[dict[str, Any]] = {"sharded": True, "dirpath": "s3://bucket/run"}

    def start_servers(self, *hosts: str) -> None:
        address = self.network.address["memory"]
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{address}:5000",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            self._monkeypatch.setenv(name, value)
        with open(self.root / "moto", "wb") as log:
            self.network.start("memory", "-m", "moto.server", "-H", address, "-p", "5000", log=log)
        until(lambda: self.asks("import s3fs; s3fs.S3FileSystem().mkdir('bucket')"), "the bucket to be there", 100.0)

    def asks(self, *code: str) -> bool:
        """Whether some code that asks the bucket succeeds there."""
        with open(self.root / "asked", "ab") as log:
            return self.network.start("memory", "-c", *code, log=log).wait(100) == 0

    def lose_third(self) -> None:
        self.cut_for_a_while("memory")

    def check(self, twin: Outcome) -> None:
        copy = "import s3fs, sys; s3fs.S3FileSystem().get('bucket/run/', sys.argv[1] + '/', recursive=True)"
        assert self.asks(copy, str(self.run.root / "run")), (self.root / "asked").read_text()
        super().check(twin)


def variant(kind: type[Kind], **attributes: object) -> type[Kind]:
    """Such machines, some of whose attributes are others."""
    return type(kind.__name__, (kind,), attributes)


def started(
    kind: type[Kind], root: Path, monkeypatch: pytest.MonkeyPatch, python: str, prefix: str = ""
) -> Iterator[Kind]:
    """Machines of a kind, as a fixture yields them; the test is skipped where there can be none."""
    hosts = list(dict.fromkeys((*HOSTS, "memory", *kind.memories)))
    with network_or_skip(kind.__name__.lower(), hosts, python, prefix) as network:
        yield kind(network, root, monkeypatch)


# -- when something is lost -----------------------------------------------------------------------------------------


def at_once(machines: Machines) -> None:
    """At any moment."""


def staging(machines: Machines) -> None:
    """A step has ended: its state is copied."""
    machines.come_to(len(machines.run.steps) + 1)


def sending(machines: Machines) -> None:
    staging(machines)
    before = machines.network.received("memory")
    until(lambda: machines.network.received("memory") > before + 100_000, "a portion to be on its way", 100.0)


def committing(machines: Machines) -> None:
    """All of it has come since a step has ended, or nearly so."""
    staging(machines)
    memories = machines.memories or ("memory",)
    before = {name: machines.network.received(name) + 800_000 // len(memories) for name in memories}
    until(lambda: all(machines.network.received(each) > least for each, least in before.items()), "all of it", 100.0)


def restoring(machines: Machines) -> None:
    for host in HOSTS:
        machines.network.lose(host)
    machines.network.shape("memory", bits_per_s=4_000_000)  # it is read for seconds
    before = {host: machines.network.received(host) + 200_000 for host in HOSTS}
    machines.train()
    until(lambda: all(machines.network.received(each) > least for each, least in before.items()), "reading", 200.0)


PHASES: list[Callable[[Machines], None]] = [staging, sending, committing, restoring]


def flushing(machines: Machines) -> None:
    """A snapshot is about to lie at the durable tier: some of it is there, and not its manifest, or only just."""
    run, deadline_s = machines.run.root / "run", time.monotonic() + 100.0

    def begun() -> set[str]:
        return {folder.name for folder in run.glob("step-*")}

    before = begun()
    while not begun() - before:
        assert time.monotonic() < deadline_s, "no snapshot was brought to the durable tier"
        time.sleep(0.0005)
