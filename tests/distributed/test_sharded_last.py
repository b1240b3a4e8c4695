"""The urgent snapshot of a sharded model, and that of its end, by four ranks of two hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot import EverySteps
from lightning_spot.capture import attempt as attempt_module
from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.layouts import ShardedCheckpointLayouter
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.local_server import LocalServer
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError, TierError
from lightning_spot.run.location import Location, RingSettings
from lightning_spot.session.coordinator import Coordinator, Decision, SnapshotSettings
from lightning_spot.session.topology import Topology
from lightning_spot.sharded.reader import ImageReader, load_all, read_folder
from lightning_spot.snapshot.manifest import snapshot_name
from lightning_spot.state.dump import Dump
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep
from tests.support.ranks import Group, OneRank, begun, rows
from tests.support.server import server_pid, snapshot_server

LAST_S = 100.0  # of what never takes so long
HOSTS = ((0, 2), (1, 3))
ROWS, COLUMNS = 512, 8
ENDS = [ROWS * COLUMNS * part // 4 for part in range(5)]
RANGES = tuple(itertools.pairwise(ENDS))
RING = RingSettings(slots=3, memory_bytes=2**26, server_idle_timeout_s=30.0, keep=Keep(newest=5), strict=False)
SETTINGS = SnapshotSettings(policy=EverySteps(1), ring=RING, on_full="wait", upload_timeout_s=LAST_S, copy_mode="eager")
HOW = Decision(writers=4, ranges=())


Phase = Callable[["Ranks", pytest.MonkeyPatch], None]


class Ranks:
    """Four ranks on two hosts, of which each has every other one."""

    def __init__(self, root: Path, servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.location = location = Location.of(root / "run", servers=servers or None)
        self.store, self.weights, talk = LocalStore(location.url), torch.rand(ROWS * COLUMNS), Group(4)
        self.frozen = torch.rand(ROWS * COLUMNS)
        host = location.open_host(RING)
        attempt = begun(location, host, RING, self._layouter(0))
        attempt.info = Topology(HOSTS, 0).told(attempt.info, apart=True)
        host.open_run(attempt.info)
        first = {name: os.environ[name] for name in ("LIGHTNING_SPOT_RUNTIME_DIR", "LIGHTNING_SPOT_SHM_DIR")}
        second = {name: str(Path(value) / "h1") for name, value in first.items()}
        for folder in second.values():
            Path(folder).mkdir(mode=0o700)
        self.trainers, self.ranks = [], list[Coordinator]()
        for rank in range(4):
            trainer = cast(Any, OneRank(world_size=4, num_nodes=2, global_rank=rank, global_step=1, max_steps=9))
            trainer.is_global_zero, trainer.callbacks = rank == 0, []
            trainer.current_epoch, trainer.optimizers, trainer.lightning_module = 0, (), torch.nn.Module()
            frozen = torch.nn.Parameter(self.frozen[slice(*RANGES[rank])].clone(), requires_grad=False)
            trainer.lightning_module.register_parameter("f", frozen)
            trainer.strategy = SimpleNamespace(model=trainer.lightning_module, broadcast=partial(talk.broadcast, rank))
            self.trainers.append(trainer)
            made = Coordinator(trainer, location, SETTINGS, cast(Any, None), dict)
            made._is_sharded, made._hosts = True, Topology(HOSTS, rank)
            for name, value in (second if rank in HOSTS[1] else first).items():
                monkeypatch.setenv(name, value)
            made.attempt = attempt if rank == 0 else self._joined(attempt, rank)
            self.ranks.append(made)
        for name, value in first.items():
            monkeypatch.setenv(name, value)
        self._talk, self._pool = talk, ThreadPoolExecutor(4)

    def _layouter(self, rank: int) -> Callable[[Any], ShardedCheckpointLayouter]:
        return lambda info: ShardedCheckpointLayouter(rank, 4, info.token)

    def _joined(self, first: Attempt, rank: int) -> Attempt:
        host, info = self.location.open_host(RING), Topology(HOSTS, rank).told(first.info, apart=True)
        host.open_run(info)
        more: dict[str, Any] = {"rank": rank, "is_guest": rank in HOSTS[1], "lineage": first.lineage}
        return Attempt(self.location, info, host, RING, self._layouter(rank)(info), **more)

    @property
    def attempt(self) -> Attempt:
        assert self.ranks[0].attempt is not None
        return self.ranks[0].attempt

    @property
    def host(self) -> LocalServer:
        host = self.attempt.writer.host
        assert isinstance(host, LocalServer)
        return host

    def write(self, step: int, how: Decision = HOW) -> None:
        """A snapshot of all ranks; each returns from it."""
        begun = [self._pool.submit(self._write, rank, step, how) for rank in range(4)]
        for future in begun:
            future.result(LAST_S)

    def _write(self, rank: int, step: int, how: Decision) -> None:
        self.trainers[rank].global_step = step
        parts = {"w": self.weights[slice(*RANGES[rank])].clone(), "f": self.trainers[rank].lightning_module.f.data}
        state = {name: rows(part.view(-1, COLUMNS), 4) for name, part in parts.items()}
        checkpoint = {"state_dict": state, "optimizer_states": [], "epoch": 0}
        dump = Dump(checkpoint=checkpoint, state={"rank": rank}, shared={})
        try:
            self.ranks[rank].write(dump, how, wait_s=LAST_S)
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
        ends = [self._pool.submit(each.finish, LAST_S, complete=True) for each in self.ranks]
        done = [end.result(LAST_S) for end in ends]
        return done[0]

    def close(self) -> None:
        self._pool.shutdown()


URGENT, LAST = replace(HOW, urgent=True), replace(HOW, complete=True)


def kill_before(call: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    host = ranks.host
    original = getattr(host, call)

    def kill_first(*arguments: Any, **more: Any) -> Any:
        os.kill(server_pid(host), signal.SIGKILL)
        return original(*arguments, **more)

    monkeypatch.setattr(host, call, kill_first)


def as_it_begins(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_before("lease", ranks, monkeypatch)


def as_it_is_filled(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_before("seal", ranks, monkeypatch)


def answers_late(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has leased the slot, and lives; that it does was not known in time."""
    host = ranks.host
    lease = host.lease

    def late(*arguments: Any, **more: Any) -> Any:
        lease(*arguments, **more)
        raise ServerUnreachableError("it does not answer") from TimeoutError()

    monkeypatch.setattr(host, "lease", late)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Ranks]]:
    monkeypatch.setattr(attempt_module, "OTHERS_S", 1.0)  # in which another host may commit the last one
    with snapshot_server(tmp_path) as (_, url), contextlib.ExitStack() as made:
        yield lambda at: made.enter_context(
            contextlib.closing(Ranks(tmp_path, url if at == "server" else "", monkeypatch))
        )


@pytest.mark.parametrize(
    ("at", "phase"),
    [
        ("storage", answers_late),
        ("server", as_it_begins),
        ("server", as_it_is_filled),
        pytest.param("server", answers_late, marks=pytest.mark.soak),
        pytest.param("storage", as_it_begins, marks=pytest.mark.soak),
        pytest.param("storage", as_it_is_filled, marks=pytest.mark.soak),
    ],
)
def test_a_server_lost_with_the_last_snapshot_leaves_one_before(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch, at: str, phase: Phase
) -> None:
    ranks = make(at)
    ranks.write(1, URGENT)
    phase(ranks, monkeypatch)
    ranks.write(2, LAST)
    assert not ranks.finish()  # which is an error in the last line of the run
    assert [manifest.name for manifest in ranks.store.survey().manifests] == [snapshot_name(1, 1)]
    ranks.check(snapshot_name(1, 1))


def test_where_rank_0_may_not_go_on_no_rank_does(make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``on_error="raise"``, others waited for its word."""
    ranks = make("storage")
    ranks.attempt._settings = replace(RING, strict=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise TierError("the state is too large", tier="memory")

    monkeypatch.setattr(ranks.host, "lease", refuse)
    begun = [ranks._pool.submit(ranks._write, rank, 1, LAST) for rank in range(4)]
    raised = [future.exception(LAST_S) for future in begun]
    assert [type(error) for error in raised] == [TierError] * 4
    assert "rank 0: the state is too large" in str(raised[3])
    ranks.finish()


@pytest.mark.parametrize("at", ["storage", "server"])
@pytest.mark.parametrize("who", [0, 3])
def test_one_that_a_rank_cannot_write_is_aborted_at_once(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch, at: str, who: int
) -> None:
    ranks, begin = make(at), SnapshotWriter.begin
    ranks.write(1, URGENT)

    def fails(writer: SnapshotWriter, content: Any, manifest: Any, **how: Any) -> Any:
        if manifest.shard.writer == who:
            raise SnapshotFailedError("none is left", reason=FailureReason.UNEXPECTED)
        return begin(writer, content, manifest, **how)

    monkeypatch.setattr(SnapshotWriter, "begin", fails)
    ranks.write(2, LAST)
    if who:
        assert f"rank {who}: none is left" in ranks.attempt.writer.why_aborted
    survey, asked = LocalStore.survey, list[str]()
    monkeypatch.setattr(LocalStore, "survey", lambda store: asked.append(store.url) or survey(store))
    assert not ranks.finish()
    assert len(asked) < 5  # it is not waited for: it will never be there
    ranks.check(snapshot_name(1, 1))


def test_all_ranks_wait_for_the_end_no_longer_than_was_said(
    make: Callable[[str], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = make("storage")
    waited: list[float] = []
    for each in ranks.ranks:
        each._settings = replace(SETTINGS, upload_timeout_s=3.0)
    monkeypatch.setattr(ranks.attempt, "failure", waited.append)
    ranks.write(1, LAST)
    assert waited == [3.0]
    ranks.finish()
