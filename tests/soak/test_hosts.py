"""A trainer's host and two snapshot servers, each on a machine of its own: what is lost, cut and killed, and what is
left.

Machines are network namespaces; a lost one takes its processes and its memory with it. What the servers hold is all
there is: snapshots come to the durable tier too rarely to matter, but where a test is about that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client import starting
from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import SpotError
from lightning_spot.protocol.wire import Address
from lightning_spot.store.local import LocalStore
from tests.support.network import TOKEN, Network, listening, network_or_skip
from tests.support.oracle import Server, lines
from tests.support.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

TRAINER, LEFT, RIGHT = "trainer", "left", "right"
SLOW_BITS_PER_S = 100_000_000
ELEMENTS = 400_000  # 5 MB with moments and the buffer: 0.4 s over the slow link
WAIT_S = 120.0


@dataclass
class Cluster:
    """The machines, and the run that is trained on one of them."""

    network: Network
    root: Path
    monkeypatch: pytest.MonkeyPatch
    zygote: Server
    log: Path
    servers: dict[str, str] = field(default_factory=dict)
    attempts: int = 0
    reached: int = 0

    @property
    def run_dir(self) -> Path:
        return self.root / "bucket" / "run-1"

    @property
    def oracle(self) -> Path:
        return self.root / f"oracle-{self.attempts}"

    def start_server(self, host: str) -> None:
        log = self.root / f"{host}-{time.monotonic_ns()}.log"
        self.servers[host] = listening(self.network, host, 7070, log, "--allow-storage", str(self.root / "bucket"))

    def train(self, **more: Any) -> None:
        """Start the trainer: a snapshot at every step, kept at both servers."""
        self.attempts += 1
        request = {
            "dirpath": self.run_dir,
            "oracle": self.oracle,
            "elements": ELEMENTS,
            "pace_s": 0.02,
            "slots": 5,
            "servers": list(self.servers.values()),
            "replicas": 2,
            "min_upload_interval_s": 3600.0,
            "upload_timeout_s": WAIT_S,
            **more,
        }
        self.zygote.spawn(**request, machine=self.network.machine(TRAINER))

    def lose(self, *hosts: str) -> None:
        """Machines are gone."""
        for host in hosts:
            self.network.lose(host)
            if host == TRAINER:
                assert self.zygote.read() == "-9"

    def lines(self, word: str) -> list[list[str]]:
        return lines(self.oracle, word)

    def step(self) -> int:
        """That training is at."""
        return max((int(words[0]) for words in self.lines("begun")), default=0)

    def resumed(self) -> int:
        """The step that the attempt has resumed from; its state must be that step's."""
        ((step, _tier, whole),) = until(lambda: self.lines("from"), f"attempt {self.attempts} to train", WAIT_S)
        assert whole == "whole", self.log.read_text()
        self.reached = int(step)
        return self.reached

    def trains_on(self) -> None:
        """Training must get on, whatever there is beneath it."""
        before = self.step()
        until(lambda: self.step() >= before + 5, "training to go on", WAIT_S)

    def status(self) -> dict[str, Any]:
        """Of the server on the trainer's host; empty while it does not answer."""
        self.monkeypatch.setenv("LIGHTNING_SPOT_RUNTIME_DIR", str(self.network.folder(TRAINER)))
        try:
            record = starting.find_record(str(self.run_dir))
            return dict(ServerClient(Address(socket_path=str(record.http)), TOKEN).call("GET", "/v1/status"))
        except (SpotError, OSError):
            return {}

    def safe(self, host: str) -> int:
        """The newest step that the trainer's host knows to be at a server; 0 if none is."""
        url = self.servers[host]
        slots = [slot for slot in self.status().get("slots", ()) if slot["snapshot"]]
        at_it = (slot["snapshot"] for slot in slots if any(at.startswith(url) for at in slot["safe"]))
        return max((int(name.split("-")[1]) for name in at_it), default=0)

    def wait_safe(self, step: int, *hosts: str) -> int:
        """Wait until a snapshot of ``step``, or of a later one, is at each of these servers; the oldest of these."""

        def found() -> int:
            newest = min(self.safe(host) for host in hosts)
            return newest if newest >= step else 0

        return int(until(found, f"step {step} at {hosts}", WAIT_S))

    def sending(self, host: str) -> bool:
        """Whether a snapshot is on its way to a server."""
        url = self.servers[host]
        return any(any(at.startswith(url) for at in slot["dirty"]) for slot in self.status().get("slots", ()))

    def goes_on(self, promised: int) -> None:
        """Start again, from what was promised; lost once more, the run must come to its end, and be durable."""
        self.train()
        assert self.resumed() >= promised
        self.lose(TRAINER)
        step = max(self.step(), self.reached)
        self.train(max_steps=step + 10)
        self.resumed()
        assert self.zygote.read(600.0) == "0", self.log.read_text()
        newest = LocalStore(self.run_dir).survey().manifests[0]
        assert (newest.step, newest.complete) == (step + 10, True)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Cluster]:
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    (tmp_path / "bucket").mkdir()
    log = tmp_path / "trainers.log"
    with contextlib.closing(Server("tests.support.crash_trainer", log, warm_python)) as zygote:
        with network_or_skip("hosts", (TRAINER, LEFT, RIGHT)) as network:
            network.shape(TRAINER, bits_per_s=SLOW_BITS_PER_S)
            made = Cluster(network, tmp_path, monkeypatch, zygote, log)
            for host in (LEFT, RIGHT):
                made.start_server(host)
            yield made


def staging(_: Cluster) -> None:
    """A snapshot is taken at every step: any time is one at which one is copied."""


def sending(cluster: Cluster) -> None:
    until(lambda: cluster.sending(LEFT) and cluster.sending(RIGHT), "a snapshot on its way", WAIT_S)


def committing(cluster: Cluster) -> None:
    """The moment after one has arrived at one of them."""
    before = cluster.safe(LEFT)
    until(lambda: cluster.safe(LEFT) > before, "a snapshot to be committed", WAIT_S)


PHASES = (staging, sending, committing)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("also", [None, LEFT, RIGHT])
def test_the_trainers_machine_and_perhaps_a_server_are_lost(
    cluster: Cluster, phase: Callable[[Cluster], None], also: str | None
) -> None:
    cluster.train()
    cluster.resumed()
    promised = cluster.wait_safe(3, LEFT, RIGHT)
    phase(cluster)
    promised = max(promised, *(cluster.safe(host) for host in (LEFT, RIGHT) if host != also))
    cluster.lose(TRAINER, *([also] if also is not None else []))
    cluster.goes_on(promised)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", ["machine", "link"])
def test_a_server_is_lost_and_comes_back(cluster: Cluster, phase: Callable[[Cluster], None], fault: str) -> None:
    cluster.train()
    cluster.resumed()
    cluster.wait_safe(3, LEFT, RIGHT)
    phase(cluster)
    if fault == "machine":
        cluster.lose(LEFT)
    else:
        cluster.network.cut(LEFT)
    cluster.trains_on()
    cluster.wait_safe(cluster.step(), RIGHT)
    if fault == "machine":
        cluster.start_server(LEFT)
    else:
        cluster.network.mend(LEFT)
    cluster.wait_safe(cluster.step(), LEFT, RIGHT)
    cluster.trains_on()
    promised = cluster.wait_safe(1, LEFT)
    cluster.lose(TRAINER, RIGHT)  # the one that came back has it all by itself now
    cluster.goes_on(promised)


def test_the_trainers_link_is_cut(cluster: Cluster) -> None:
    cluster.train()
    cluster.resumed()
    cluster.wait_safe(3, LEFT, RIGHT)
    sending(cluster)
    cluster.network.cut(TRAINER)
    cluster.trains_on()
    cluster.network.mend(TRAINER)
    promised = cluster.wait_safe(cluster.step(), LEFT, RIGHT)
    cluster.lose(TRAINER)
    cluster.goes_on(promised)


def test_the_server_that_uploads_is_lost_before_it_has(cluster: Cluster) -> None:
    """Then the other one does; and what it has becomes durable with the trainer's machine gone as well."""
    cluster.train(min_upload_interval_s=0.0)
    cluster.resumed()
    cluster.wait_safe(3, LEFT, RIGHT)
    carrier = next(host for host, url in cluster.servers.items() if _carries(cluster, url))
    other = RIGHT if carrier == LEFT else LEFT
    cluster.lose(carrier)
    cluster.trains_on()
    until(lambda: _carries(cluster, cluster.servers[other]), "the other server to carry the run on", WAIT_S)
    promised = cluster.wait_safe(cluster.step(), other)
    cluster.lose(TRAINER)
    durable = LocalStore(cluster.run_dir)
    until(lambda: max((each.step for each in durable.survey().manifests), default=0) >= promised, "it there", WAIT_S)
    cluster.lose(other)
    cluster.start_server(other)
    cluster.start_server(carrier)
    cluster.goes_on(promised)


def test_the_machine_is_lost_again_while_it_restores(cluster: Cluster) -> None:
    cluster.train()
    cluster.resumed()
    promised = cluster.wait_safe(3, LEFT, RIGHT)
    cluster.lose(TRAINER)
    for host in (LEFT, RIGHT):
        cluster.network.shape(host, bits_per_s=SLOW_BITS_PER_S // 10)  # it is read for seconds
    before = cluster.network.received(TRAINER)
    cluster.train()
    until(lambda: cluster.network.received(TRAINER) > before + 10**6, "it to be at reading", WAIT_S)
    assert not cluster.lines("from")
    cluster.lose(TRAINER)
    cluster.goes_on(promised)


def _carries(cluster: Cluster, url: str) -> bool:
    runs = cluster.status().get("runs", {}).values()
    return any(at.startswith(url) and does == "carries it on" for run in runs for at, does in run["servers"].items())
