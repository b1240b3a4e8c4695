"""Ranks train in processes of their own, on one host or several, with snapshot servers and without; some are disturbed.

DDP and FSDP2. A rank is killed, gets a notice, goes on from a file; a server is too small, is lost, or leaves.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot.cli import history, main
from lightning_spot.protocol.record import find_record
from lightning_spot.run.location import Location
from lightning_spot.server import reconcile
from lightning_spot.server.host import Host
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.sharded.reader import ImageReader, load_all
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import Manifest
from tests.support.program import Outcome, run, start
from tests.support.ranks import joined
from tests.support.server import MIB, StartServer, snapshot_server
from tests.support.trainer import digest
from tests.support.training import train
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G10")

Twin = Callable[..., Outcome]
soak = partial(pytest.param, marks=pytest.mark.soak)


@dataclass(frozen=True)
class Place:
    """Where ranks train, and what.

    Attributes:
        how: arguments of ``train``.
        servers: how many snapshot servers there are, each of so much memory.
    """

    how: dict[str, Any]
    servers: int = 0
    memory_bytes: int = 512 * MIB


PLACES = {
    "one host": Place({}),
    "ranges": Place({"width": 4096}),
    "rings of their own": Place({"local_server": False}),
    "two hosts": Place({"hosts": 2}),
    "two hosts and zero": Place({"hosts": 2, "optimizer": "zero"}),
    "two hosts and a server": Place({"hosts": 2}, servers=1),
    "shards": Place({"sharded": True, "hosts": 2}),
    "shards and a server": Place({"sharded": True, "hosts": 2}, servers=1),
    "shards and servers": Place({"sharded": True, "hosts": 2}, servers=3),
    "shards twice": Place({"sharded": True, "hosts": 2, "replicas": 2}, servers=3),
    "small servers": Place(
        {"sharded": True, "hosts": 4, "ranks": 4, "width": 1024, "min_upload_interval_s": None},
        4,
        memory_bytes=12 * MIB,
    ),
}


class Training:
    """Trainings at one place, and its servers by their URLs."""

    def __init__(self, python: str, root: Path, place: str, twin: Twin, ends: contextlib.ExitStack) -> None:
        self.root, self.place = root, PLACES[place]
        self._python, self._twin, self._ends = python, twin, ends
        self.servers: dict[str, SnapshotServer] = {}
        self.add_servers(self.place.servers)

    def add_servers(self, count: int) -> list[str]:
        """Start snapshot servers; all that there are now."""
        for _ in range(count):
            server, url = self._ends.enter_context(snapshot_server(self.root, memory_bytes=self.place.memory_bytes))
            self.servers[url] = server
        return list(self.servers)

    def run(self, name: str = "run", *, code: int | None = 0, **more: Any) -> Outcome:
        how = {"servers": list(self.servers), **self.place.how, **more}
        return run(self._python, train, self.root / name, code=code, **how)

    def twin(self, **more: Any) -> Outcome:
        """The same, undisturbed, on one host: the bits are the same."""
        how = {key: value for key, value in self.place.how.items() if key in ("sharded", "optimizer", "width")}
        return self._twin(train, **how, **more)

    def at_servers(self) -> dict[int, dict[str, Any]]:
        """The parameters in each snapshot of which servers have all shards between them, by their steps."""
        shards: dict[str, dict[int, tuple[Manifest, bytearray]]] = {}
        for slot in [slot for server in self.servers.values() for slot in server.ring.contents()]:
            if slot.manifest is not None and slot.shard is not None and not slot.manifest.why_failed:
                shards.setdefault(slot.manifest.snapshot, {})[slot.shard.writer] = slot.manifest, bytearray(slot.view())
        whole = [there for there in shards.values() if len(there) == there[min(there)][0].shard.writers]  # type: ignore[union-attr]
        return dict(map(self._parameters, whole))

    def _parameters(self, shards: dict[int, tuple[Manifest, bytearray]]) -> tuple[int, dict[str, Any]]:
        image, manifest = joined([shards[writer] for writer in sorted(shards)])
        if self.place.how.get("sharded"):
            return manifest.step, load_all(ImageReader(memoryview(image), manifest))["state_dict"]
        model = manifest.span_of(MODEL_FILE)
        loaded = torch.load(io.BytesIO(image[model.offset : model.stop]), weights_only=True)
        return manifest.step, loaded["state_dict"]


@pytest.fixture
def training(warm_python: str, tmp_path: Path, twin: Twin, place: str) -> Iterator[Training]:
    with contextlib.ExitStack() as ends:
        yield Training(warm_python, tmp_path, place, twin, ends)


@pytest.mark.parametrize(
    "place",
    ["one host", "two hosts and a server", "shards", "shards and a server", "small servers", soak("two hosts")],
)
def test_snapshots_hold_the_parameters_of_their_steps(training: Training, place: str) -> None:
    done, how = training.run(steps=6), training.place.how
    done.check_states()
    first, second, *_ = done.accounts(how.get("ranks", 2))
    assert first["aborted"] == 0, done.log
    newest = done.snapshots[0]
    assert (newest.step, newest.complete) == (6, True)
    if training.servers:
        there = training.at_servers()
        assert len(there) >= 2 or place == "small servers"
        for step, parameters in there.items():
            assert digest(parameters) == done.steps[step]
        assert place != "small servers" or newest.nbytes > training.place.memory_bytes
    elif "hosts" in how:  # it counts in storage only: each step does
        assert [manifest.step for manifest in done.snapshots] == [6, 6, 5, 4, 3, 2, 1]
    else:  # of so few bytes the second one writes no range: only what it alone knows
        assert first["copied"] > 3 * newest.nbytes > second["copied"] > 0


@pytest.mark.parametrize(
    ("place", "ranks", "who"),
    [
        ("one host", 2, 1),
        ("rings of their own", 2, 1),
        ("two hosts", 2, 1),
        ("two hosts and zero", 2, 1),
        *(
            soak(place, 4, who)
            for place in ("ranges", "two hosts and a server", "shards", "shards and a server")
            for who in (0, 1, 3)
        ),
    ],
)
def test_a_rank_is_killed_and_the_run_goes_on_exactly(training: Training, place: str, ranks: int, who: int) -> None:
    """It is gone in the iteration in which it writes: there is no snapshot of that, or a whole one."""
    killed = training.run(ranks=ranks, kill=[who, 6], code=None)
    before, least = killed.snapshots, 4
    if training.servers:
        least = max(training.at_servers())
        assert least >= 4
    elif "hosts" in training.place.how:
        until(lambda: killed.snapshots[0].step >= 4, "the servers to bring what was left")
    done = training.run(ranks=ranks, seed=99)
    assert done.resumed[-1] >= max(least, before[0].step if before else 0)
    assert all(manifest in done.snapshots for manifest in before)
    assert max(manifest.attempt for manifest in done.snapshots) == 2
    done.check_states()
    done.check_end(training.twin(ranks=ranks))


@pytest.mark.parametrize("place", ["one host", "shards and a server"])
def test_all_ranks_go_back_after_a_rewind(training: Training, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers, and the memory of each host, have newer snapshots still; the bits are those of the undisturbed run."""
    monkeypatch.setattr(history, "SILENT_S", 0.0)  # the ranks are gone
    killed = training.run(kill=[1, 6], code=None)
    until(lambda: len(killed.snapshots) > 1, "servers to bring what was left")
    to = killed.snapshots[-1]
    servers = [word for url in training.servers for word in ("--server", url)]
    assert main(["rewind", f"{training.root / 'run' / 'run'}@{to.name}", *servers]) == 0
    done = training.run(seed=99)
    assert done.resumed[-1] == to.step
    assert {each.attempt for each in done.snapshots if each.order > to.order} == {2}
    done.check_states()
    done.check_end(training.twin())


@pytest.mark.parametrize(
    ("place", "who"), [("shards and servers", 1), *(soak("shards and servers", who) for who in (0, 3))]
)
def test_fewer_ranks_go_on_from_what_servers_have_between_them(training: Training, who: int) -> None:
    training.run(ranks=4, kill=[who, 6], code=None)
    newest = max(training.at_servers())
    assert newest >= 4
    done = training.run(seed=99)
    assert done.resumed == [newest]
    done.check_states()
    assert done.snapshots[0].complete


@pytest.mark.soak
@pytest.mark.parametrize("place", [place for place in PLACES if place != "small servers"])
def test_an_urgent_snapshot_is_taken_by_all_ranks(training: Training, place: str) -> None:
    stopped = training.run(notice=[1, 5], code=143)
    assert "is safe in" in stopped.log
    stopped.check_states()
    done = training.run(seed=99)
    assert done.resumed[-1] > 5
    done.check_end(training.twin())


def test_a_file_that_the_user_names_is_gone_on_from_exactly(warm_python: str, tmp_path: Path, twin: Twin) -> None:
    """What only another rank knew lies beside it."""
    whole = twin(train)
    named = next(each for each in whole.snapshots if each.step == 4)
    path = whole.root / "run" / named.name / MODEL_FILE
    run(warm_python, train, tmp_path / "run", ckpt=path).check_end(whole)
    alone = tmp_path / "alone.ckpt"
    alone.write_bytes(path.read_bytes())
    failed = run(warm_python, train, tmp_path / "alone", ckpt=alone, code=None)
    assert "has no states of ranks 1 to 1 beside it" in failed.log


# -- servers ----------------------------------------------------------------------------------------------------------
@pytest.mark.soak
@pytest.mark.parametrize("place", ["shards"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_training_is_killed_while_a_server_shuts_down(
    training: Training, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    """Each server puts what it has into storage, the one that ends before it does."""
    training.add_servers(2)
    killed = training.run(kill=[who, 6], code=None)
    newest, leaving = max(training.at_servers()), list(training.servers.values())[1]
    monkeypatch.setattr(reconcile, "HEARTBEAT_TIMEOUT_S", 1.0)
    leaving.drain()
    until(lambda: leaving.drained, "it to owe nothing")
    leaving.ring.close(keep_unsafe=False)
    until(lambda: killed.snapshots[0].step == newest, "it in storage")
    training.servers.clear()
    training.add_servers(2)
    done = training.run(seed=99)
    assert done.resumed[-1] == newest
    done.check_states()


@pytest.mark.soak
@pytest.mark.guarantee("G18")
@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_draining_server_leaves_a_training_without_loss(
    warm_python: str,
    tmp_path: Path,
    start_server: StartServer,
    sharded: bool,
    replicas: int,
    leaving: int,
) -> None:
    """It is told to end by SIGTERM while several hosts train with it."""
    servers = [start_server("--allow-storage", str(tmp_path), "--drain-timeout", "120s") for _ in range(1 + replicas)]
    done, how = Outcome(tmp_path / "run"), {"servers": [server.url for server in servers], "replicas": replicas}
    training = start(warm_python, train, done.root, sharded=sharded, steps=60, hosts=2, **how)
    until(lambda: training.poll() is not None or len(done.steps) >= 8, "it to train", 120.0)
    assert training.poll() is None, done.log
    servers[leaving].process.send_signal(signal.SIGTERM)
    assert servers[leaving].process.wait(90.0) == 0, servers[leaving].log.read_text()
    assert training.wait(300.0) == 0, done.log
    done.check_states()
    assert (done.snapshots[0].step, done.snapshots[0].complete) == (60, True)


# -- a server that ends by itself -------------------------------------------------------------------------------------


def train_beside_a_server_that_leaves(root: Path) -> None:
    """As ``train``, on two ranks; once rank 1 has connected to its server, that is gone."""
    opened = Location.open_host

    def leaves(location: Location, settings: Any) -> Host:
        host = opened(location, settings)
        if os.environ.get("LOCAL_RANK") == "1":
            Location.open_host = opened  # type: ignore[method-assign]
            process = find_record(location.url).process()
            assert process is not None
            assert process.kill(30.0)
        return host

    Location.open_host = leaves  # type: ignore[method-assign]
    train(root)


def test_a_rank_whose_server_leaves_as_it_begins_has_another_one(tmp_path: Path, warm_python: str) -> None:
    """The server that an attempt has left ended just then, and the next attempt with it, on all ranks."""
    outcome = run(warm_python, train_beside_a_server_that_leaves, tmp_path)
    outcome.check_states()
    assert outcome.final()
