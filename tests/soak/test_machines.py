"""Machines that train together, and one thing of them is lost in one phase of a snapshot or of a resume.

Each thing that may be lost, at each time, is a test. Training goes on or is started again, and ends as its twin does,
bit for bit.

==================  =====================================================================================
lost                a rank; the second machine (all its processes and memory); the first machine, which
                    has rank 0; the snapshot server, or the bucket; the link of the second machine, for some seconds
when                staging, sending, committing, flushing, restoring, or any moment of training
trained             DDP and FSDP2, each on two and on four ranks
where               with a snapshot server; FSDP2 also with several, or by way of a bucket; DDP also with neither
links               good; far, and losing packets; slow
==================  =====================================================================================

What happens on one host is in ``test_trainings.py``. Each machine is a network namespace; one that is lost takes its
processes and its memory with it. See ``tests/support/network.py``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from lightning_spot.state.compare import differences
from tests.support.link import FAR, Link
from tests.support.network import TOKEN, Network, listening, network_or_skip
from tests.support.program import Outcome, command
from tests.support.training import train
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
            called = command("", train, outcome.root, **how)
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


# -- when something is lost -------------------------------------------------------------------------------------------


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


SLOW = Link(bits_per_s=200_000_000)
CUT_S = 20.0
WAIT_S = 800.0  # a snapshot at each step, which crosses the far link a dozen times: on a busy machine minutes

Twin = Callable[..., Outcome]
When = Callable[[Machines], None]

Apart = variant(Machines, memories=())
Zero = variant(Machines, memories=(), more={"optimizer": "zero"})
Spread = variant(Sharded, memories=("memory", "other"))
Twice = variant(Sharded, memories=("memory", "other", "another"), more={"sharded": True, "replicas": 2})
KINDS: dict[str, type[Machines]] = {
    "ddp on two ranks": Machines,
    "ddp on four": variant(Machines, local=2),
    "shards on two ranks": variant(Sharded, local=1),
    "shards on four": Sharded,
    "shards and servers": Spread,
    "shards and a bucket": Bucket,
    "no server": Apart,
    "no server and zero": Zero,
}
LOST = ("a rank", "a machine", "the first machine", "a link")
WHENS = (at_once, *PHASES, flushing)
CELLS = [
    *((kind, what, when) for kind in list(KINDS)[:6] for what in (*LOST, KINDS[kind].third) for when in WHENS),
    *((kind, what, at_once) for kind in list(KINDS)[6:] for what in (*LOST, "the first rank", "the first server")),
]
EVERYDAY = [("ddp on two ranks", "the first machine", flushing)]


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, kind: type[Machines] | str, link: Link | None
) -> Iterator[Machines]:
    made = KINDS[kind] if isinstance(kind, str) else kind
    yield from started(variant(made, link=link) if link is not None else made, tmp_path, monkeypatch, warm_python)


@pytest.fixture
def link() -> Link | None:
    return None


def twin_of(machines: Machines, twin: Twin) -> Outcome:
    """The same training on one machine, undisturbed."""
    how = {key: machines.more[key] for key in ("sharded", "optimizer") if key in machines.more}
    return twin(train, ranks=machines.count, steps=STEPS, **how)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "what", "when"),
    [
        pytest.param(
            *cell, marks=[] if cell in EVERYDAY else pytest.mark.soak, id=f"{cell[0]}-{cell[1]}-{cell[2].__name__}"
        )
        for cell in CELLS
    ],
)
def test_machines_train_and_something_is_lost(machines: Machines, twin: Twin, what: str, when: When) -> None:
    if isinstance(machines, Sharded):
        machines.train_slowly_to(8)
    else:
        machines.train()
        machines.come_to(12)
    when(machines)
    machines.lose(what)
    machines.wait()
    machines.check(twin_of(machines, twin))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [Twice])
@pytest.mark.parametrize("when", [*PHASES, flushing])
@pytest.mark.parametrize("what", ["a machine", "the first machine"])
def test_with_replicas_a_machine_and_a_server_are_lost_at_once(
    machines: Machines, twin: Twin, what: str, when: When
) -> None:
    """It goes on from the servers that are left, with what a resume found there."""
    machines.train_slowly_to(8)
    when(machines)
    machines.network.lose("memory")
    machines.lose(what)
    until(lambda: machines.run.resumed or machines.ended(), "it to go on", 200.0)
    machines.start_servers("memory")
    machines.wait()
    machines.check(twin_of(machines, twin))


@pytest.mark.soak
@pytest.mark.guarantee("G20")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("link", [FAR, SLOW], ids=["far", "slow"])
@pytest.mark.parametrize("when", [*PHASES, flushing])
@pytest.mark.parametrize("kind", ["ddp on two ranks", "shards on four", "shards and a bucket"])
def test_machines_train_by_bad_links_and_one_is_cut(machines: Machines, twin: Twin, when: When) -> None:
    if when is flushing and isinstance(machines, Bucket):
        pytest.skip("each host brings its files to the bucket at once: there is no other phase than sending")
    machines.train()
    machines.come_to(8)
    when(machines)
    machines.cut_for_a_while(seconds=CUT_S)
    machines.wait(WAIT_S)
    machines.check(twin_of(machines, twin))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [variant(Machines, more={"lossy": "topk", "min_upload_interval_s": 3600.0})])
@pytest.mark.parametrize("what", ["a rank", "the first rank", "the first machine", "the snapshot server", "a link"])
def test_two_machines_send_approximations_and_something_is_lost(machines: Machines, twin: Twin, what: str) -> None:
    """A run that went on from an approximation says so; each other one ends with the bits of its twin."""
    machines.train(steps=60)
    machines.come_to(12)
    machines.lose(what, 60)
    machines.wait()
    log = machines.run.log
    said = "is not exact (lossy='topk')" in log
    assert said == bool(re.search(r"resumes at .*-inexact", log))
    assert bool(differences(twin(train, steps=60, lossy="topk").final(), machines.run.final())) == said
    if not said:
        machines.run.check_states()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [variant(Sharded, more={"sharded": True, "loses_server": True})])
def test_the_first_host_loses_its_server_at_the_last_snapshot(machines: Machines) -> None:
    """Of the last step there is the regular one."""
    machines.train()
    machines.wait()
    assert "does not have its last snapshot" in machines.run.log
    newest = machines.run.snapshots[0]
    assert (newest.step, newest.complete) == (STEPS, False)
    machines.run.check_states()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Apart, pytest.param(Machines, marks=pytest.mark.soak)])
def test_machines_that_know_no_ipv4(
    kind: type[Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str
) -> None:
    for machines in started(kind, tmp_path, monkeypatch, warm_python, "fd79::"):
        machines.train(steps=400)
        machines.come_to(10)
        machines.lose("a rank", len(machines.run.steps) + 5)
        machines.wait()
        assert re.search(r"resumes at step \d+ .* from (host|storage|spot://\[fd79::3\])", machines.run.log)
        assert machines.run.accounts(2)[0]["aborted"] == 0
        machines.run.check_states()
