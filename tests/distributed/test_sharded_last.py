"""The urgent snapshot of a model in shards, and that of its end: all ranks take it once more where it is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning_spot.capture.sharded_writer import Joining
from lightning_spot.fit.in_shards import InShards
from lightning_spot.fit.together import How

from lightning_spot.capture import contents
from lightning_spot.capture.attempt import Attempt, LastState
from lightning_spot.capture.host_link import RingSettings, open_host
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.starting import attach
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, TierError
from lightning_spot.exact.dump import Dump
from lightning_spot.exact.sharded import Dtensors
from lightning_spot.fit.topology import Topology, _open
from lightning_spot.image.manifest import snapshot_name
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.sharded.reader import ImageReader, load_all, read_folder
from lightning_spot.tiers.local import LocalStore
from tests.support.ranks import rows
from tests.support.server import snapshot_server
from tests.support.waiting import until

LAST_S = 100.0  # of what never takes so long
HOSTS = ((0, 2), (1, 3))
ROWS, COLUMNS = 512, 8
ENDS = [ROWS * COLUMNS * part // 4 for part in range(5)]
RANGES = tuple(itertools.pairwise(ENDS))
SETTINGS = RingSettings(slots=3, memory_bytes=2**26, server_idle_timeout_s=30.0, keep=5, strict=False)


class Rank(SimpleNamespace):
    """A trainer of one rank, as far as its snapshots in shards ask it."""


Phase = Callable[["Ranks", pytest.MonkeyPatch], None]


class Talk:
    """What ranks, each on a thread, tell each other."""

    def __init__(self) -> None:
        self._all, self._said = threading.Barrier(4, timeout=LAST_S), cast(Any, None)

    def of(self, rank: int) -> Callable[..., Any]:
        def broadcast(said: Any, src: int = 0) -> Any:
            if rank == src:
                self._said = said
            self._all.wait()
            heard = self._said
            self._all.wait()
            return heard

        return broadcast

    def abort(self) -> None:
        self._all.abort()


class Ranks:
    """Four ranks on two hosts, of which each has every other one."""

    def __init__(self, root: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.location = location = Location.of(root / "run", servers=memory if memory != "auto" else None)
        self.store, self.weights, talk = LocalStore(location.url), torch.rand(ROWS * COLUMNS), Talk()
        self.frozen = torch.rand(ROWS * COLUMNS)
        self.attempt = Attempt(survey(location), open_host(location, SETTINGS), SETTINGS, sharded_over=4)
        across = self.attempt.writer.across
        across.wanted, across.hosts = bool(location.servers), HOSTS
        first = {name: os.environ[name] for name in ("LIGHTNING_SPOT_RUNTIME_DIR", "LIGHTNING_SPOT_SHM_DIR")}
        for name, value in first.items():
            (folder := Path(value) / "h1").mkdir(mode=0o700)
            monkeypatch.setenv(name, str(folder))
        guests = {rank: _open(location, SETTINGS, self.attempt.info) for rank in HOSTS[1]}
        for name, value in first.items():
            monkeypatch.setenv(name, value)
        self.trainers, self.in_shards = [], list[InShards]()
        for rank in range(4):
            trainer = cast(Any, Rank(world_size=4, num_nodes=2, global_rank=rank, global_step=1, max_steps=9))
            trainer.current_epoch, trainer.optimizers, trainer.lightning_module = 0, (), torch.nn.Module()
            frozen = torch.nn.Parameter(self.frozen[slice(*RANGES[rank])].clone(), requires_grad=False)
            trainer.lightning_module.register_parameter("f", frozen)
            trainer.strategy = SimpleNamespace(model=trainer.lightning_module, broadcast=talk.of(rank))
            self.trainers.append(trainer)
            in_shards = InShards(trainer, location, SETTINGS)
            in_shards._hosts = Topology(HOSTS, can_bring=True, is_guest=rank in HOSTS[1])
            if rank:
                host = guests.get(rank) or self.attached()
                token = self.attempt.info.token
                in_shards._joining = Joining(host, self.attached, HOSTS, rank=rank, world_size=4, token=token)
            self.in_shards.append(in_shards)
        self._talk, self._pool = talk, ThreadPoolExecutor(4)

    def attached(self) -> EmbeddedHost:
        """A connection to the node of the first host."""
        host = attach(self.location.url, self.location.name, revive=False)
        if host is None:
            raise ServerUnreachableError("there is no snapshot server on this host at present")
        host.run, host.attempt = self.attempt.info.text, 1
        return host

    @property
    def host(self) -> EmbeddedHost:
        host = self.attempt.writer.host
        assert isinstance(host, EmbeddedHost)
        return host

    @property
    def pid(self) -> int:
        """Of the node of the first host."""
        return int(self.host._call("GET", "/v1/status")["pid"])

    def write(self, step: int, *, complete: bool = False, how: How | None = None, commit_s: float = LAST_S) -> None:
        """A snapshot of all ranks, an urgent one if nothing else is said; each returns from it."""
        begun = [self._pool.submit(self._write, rank, step, complete, how, commit_s) for rank in range(4)]
        for future in begun:
            future.result(LAST_S)

    def _write(self, rank: int, step: int, complete: bool, how: How | None, commit_s: float = LAST_S) -> None:
        self.trainers[rank].global_step = step
        parts = {"w": self.weights[slice(*RANGES[rank])].clone(), "f": self.trainers[rank].lightning_module.f.data}
        state = {name: rows(part.view(-1, COLUMNS), 4) for name, part in parts.items()}
        checkpoint = {"state_dict": state, "optimizer_states": [], "epoch": 0}
        dump = Dump(
            checkpoint=checkpoint, state={"rank": rank}, validation_progress=None, loggers=[], untracked=[], lost=[]
        )
        attempt = self.attempt if rank == 0 else None
        try:
            waits = {"wait_s": LAST_S, "commit_s": commit_s}
            self.in_shards[rank].write(attempt, dump, dict, complete=complete, how=how, **waits)
        except TierError:  # one of all
            raise
        except BaseException:
            self._talk.abort()
            raise

    def check(self, name: str) -> None:
        """A snapshot is durable, and whole."""
        image, manifest = read_folder(self.store.root / name)
        saved = load_all(ImageReader(image, manifest))["state_dict"]
        assert torch.equal(saved["w"].view(-1), self.weights)
        assert torch.equal(saved["f"].view(-1), self.frozen)

    def finish(self) -> bool | None:
        """As at the end of a training."""
        for in_shards in self.in_shards:
            in_shards.finish(LAST_S)
        return self.attempt.finish(LAST_S, complete=True)

    def close(self) -> None:
        self._pool.shutdown()


def kill_before(call: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ranks.host
    original = getattr(host, call)

    def kill_first(*arguments: Any, **more: Any) -> Any:
        os.kill(ranks.pid, signal.SIGKILL)
        return original(*arguments, **more)

    monkeypatch.setattr(host, call, kill_first)


def as_it_begins(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_before("lease", ranks, monkeypatch)


def as_it_is_filled(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_before("seal", ranks, monkeypatch)


def answers_late(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has leased the slot, and lives; that it does was not known in time."""
    host = ranks.host
    lease = host.lease

    def late(*arguments: Any, **more: Any) -> Any:
        lease(*arguments, **more)
        raise ServerUnreachableError("it does not answer") from TimeoutError()

    monkeypatch.setattr(host, "lease", late)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Ranks]]:
    with snapshot_server(tmp_path) as (_, url), contextlib.ExitStack() as made:
        yield lambda memory: made.enter_context(contextlib.closing(Ranks(tmp_path, memory or url, monkeypatch)))


@pytest.mark.parametrize(
    ("memory", "phase"),
    [
        ("auto", answers_late),
        ("", as_it_begins),
        ("", as_it_is_filled),
        pytest.param("", answers_late, marks=pytest.mark.soak),
        pytest.param("auto", as_it_begins, marks=pytest.mark.soak),
        pytest.param("auto", as_it_is_filled, marks=pytest.mark.soak),
    ],
)
def test_where_the_node_of_the_first_host_is_lost_with_the_last_snapshot_the_one_before_stands(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch, memory: str, phase: Phase
) -> None:
    ranks = make(memory)
    ranks.write(1)
    phase(ranks, monkeypatch)
    ranks.write(2, complete=True)
    assert not ranks.finish()  # which is an error in the last line of the run
    assert [manifest.name for manifest in ranks.store.survey().manifests] == [snapshot_name(1, 1)]
    ranks.check(snapshot_name(1, 1))


@pytest.mark.parametrize(("memory", "who"), [("auto", 0), ("auto", 3), ("", 2)])
def test_a_regular_snapshot_at_the_step_of_a_notice_is_compared_whole_on_every_rank(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch, memory: str, who: int
) -> None:
    """A byte that was written past the counts was left for a later one, and none comes: it is said."""
    monkeypatch.setattr(contents, "CHECK_BYTES", 1)
    monkeypatch.setattr(contents, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(contents, "_looks_alike", lambda _piece, _view: True)
    monkeypatch.setattr(
        contents.ShareTurns, "next", lambda _, among: among - 1
    )  # another share than the first number's
    frozen = lambda holder, _state: [one for one in holder._module.parameters() if not one.requires_grad]  # noqa: E731
    monkeypatch.setattr(Dtensors, "frozen", frozen)
    ranks = make(memory)
    found = [False] * 4
    for step in range(1, 30):
        ranks.frozen[RANGES[who][0]] = 1000.0 + step
        ranks.trainers[who].lightning_module.f.data[0] = 1000.0 + step
        until(lambda: ranks.in_shards[0].how(ranks.attempt, waits=True), "where to bring it", LAST_S)
        ranks.write(step, how=ranks.in_shards[0].how(ranks.attempt, waits=True))
        for in_shards in ranks.in_shards:
            in_shards.copied()
        assert ranks.attempt.failure(LAST_S) is None
        found = [each.newest_differs(None if rank else ranks.attempt) for rank, each in enumerate(ranks.in_shards)]
        if any(found):
            break
    assert found == [rank == who for rank in range(4)]
    ranks.finish()


def test_where_rank_0_may_not_go_on_no_rank_does(make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``strict``, others waited for its word."""
    ranks = make("auto")
    ranks.attempt._settings = replace(SETTINGS, strict=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise TierError("the state is too large", tier="memory")

    monkeypatch.setattr(ranks.host, "lease", refuse)
    begun = [ranks._pool.submit(ranks._write, rank, 1, True, None) for rank in range(4)]
    raised = [future.exception(LAST_S) for future in begun]
    assert [type(error) for error in raised] == [TierError] * 4
    assert "rank 0: the state is too large" in str(raised[3])
    ranks.finish()


@pytest.mark.parametrize("memory", ["auto", ""])
def test_the_others_hear_of_what_fails_before_rank_0_asks_its_writer(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    """They waited for its slot."""
    ranks, of, failures = (
        make(memory),
        LastState.of,
        [SnapshotFailedError("none is left", reason=FailureReason.UNEXPECTED)],
    )
    ranks.write(1)

    def fails_once(*what: Any) -> LastState:
        if failures:
            raise failures.pop()
        return of(*what)

    told: list[str] = []
    decline = ranks.attempt.writer.decline
    monkeypatch.setattr(ranks.attempt.writer, "decline", lambda *what: (told.append(what[0]), decline(*what)))
    monkeypatch.setattr(LastState, "of", fails_once)
    ranks.write(2, complete=True)
    assert told == [snapshot_name(2, 1, complete=True)]
    ranks.finish()
    ranks.check(snapshot_name(1, 1))


def test_all_ranks_wait_for_the_end_no_longer_than_was_said(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make("auto")
    waited: list[float] = []
    monkeypatch.setattr(ranks.attempt, "failure", waited.append)
    ranks.write(1, complete=True, commit_s=3.0)
    assert waited == [3.0]
    ranks.finish()
