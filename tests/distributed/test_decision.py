"""How rank 0 decides on the next snapshot: which ranks write it, whether now, and whether storage is to have it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_spot import EverySteps
from lightning_spot.capture import layouts
from lightning_spot.capture import writer as writer_module
from lightning_spot.client.stores import open_store
from lightning_spot.errors import ServerUnreachableError, SettingsError, SnapshotFailedError
from lightning_spot.run.location import Location
from lightning_spot.server.host import InProcessHost
from lightning_spot.session import coordinator as fit_coordinator
from lightning_spot.session.coordinator import Coordinator, Decision, SnapshotSettings
from lightning_spot.session.topology import Topology
from tests.support.ranks import RING, OneRank
from tests.support.said import keys
from tests.support.server import named_run

ONE, TWO = ((0, 1, 2, 3),), ((0, 1), (2, 3))
SERVERS = ("spot://a:1", "spot://b:1")


class Writer:
    """What a decision asks of the writer."""

    def __init__(self) -> None:
        self.ready, self.is_under_way, self.aborted, self.why_aborted = True, False, 0, "rank 1: other weights"
        self.committed: Any = None
        self.dropped = 0
        self.destinations: list[str] = []
        host = SimpleNamespace(kept_at=lambda: self.destinations)
        self.link = SimpleNamespace(ask=lambda question, _: question(host))
        self.layouter = SimpleNamespace(why_alone="")


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "RANGE_BYTES", 1000)


def coordinator(
    tmp_path: Path,
    places: tuple[tuple[int, ...], ...],
    servers: tuple[str, ...] = (),
    *,
    sharded: bool = False,
    on_full: Any = "skip",
    **ring: Any,
) -> tuple[Coordinator, Writer]:
    """That of rank 0 of four."""
    weights = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    strategy = SimpleNamespace(model=None)
    trainer: Any = OneRank(strategy=strategy, optimizers=[optimizer], world_size=4, global_rank=0, is_global_zero=True)
    trainer.callbacks = []
    settings = SnapshotSettings(
        policy=EverySteps(1), ring=replace(RING, **ring), on_full=on_full, upload_timeout_s=1.0, copy_mode="eager"
    )
    resume: Any = SimpleNamespace()
    made, writer = (
        Coordinator(trainer, Location.of(tmp_path, servers=servers or None), settings, resume, dict),
        Writer(),
    )
    made._kept_alive = (trainer, optimizer)  # type: ignore[attr-defined]
    made._is_sharded, made._hosts = sharded, Topology(places)
    failures = SimpleNamespace(are_too_many=False)
    made.attempt = SimpleNamespace(writer=writer, fenced=False, failures=failures, lacks_memory=False)  # type: ignore[assignment]
    return made, writer


def test_ranks_of_one_place_write_ranges_and_all_know_it(tmp_path: Path) -> None:
    made, _ = coordinator(tmp_path, ONE)
    how = made.decide()
    assert how == Decision(writers=4, ranges=(1, 2, 3, 0))
    assert Decision.heard(json.loads(json.dumps(how.plain()))) == how


def test_rank_0_writes_alone_what_no_other_can_or_has_room_for(tmp_path: Path) -> None:
    made, writer = coordinator(tmp_path, ONE)
    writer.layouter.why_alone = "it is serialised with plain torch.save"
    assert made.decide() == Decision(writers=4, ranges=(0,))
    made.attempt.lacks_memory = True
    assert made.decide() == Decision()  # with what the others know, gathered: it is streamed to a server or storage
    made._is_sharded = True
    assert made.decide() == Decision(writers=4, ranges=())


def test_ranks_of_other_hosts_write_ranges_to_servers(tmp_path: Path) -> None:
    made, writer = coordinator(tmp_path, TWO, SERVERS[:1])
    assert made.decide() == Decision(writers=4, ranges=(1, 0))
    writer.destinations = list(SERVERS[:1])
    assert made.decide() == Decision(writers=4, ranges=(1, 2, 3, 0))
    assert coordinator(tmp_path, TWO)[0].decide() == Decision(writers=4, ranges=(1, 0))


def test_what_is_approximated_is_written_by_rank_0_alone(tmp_path: Path) -> None:
    assert coordinator(tmp_path, TWO, SERVERS, compression="topk")[0].decide() == Decision()
    sharded = coordinator(tmp_path, TWO, SERVERS, sharded=True, compression="topk")[0]
    with pytest.raises(SettingsError):
        sharded.look()


def test_one_snapshot_at_a_time_spans_several_hosts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, writer = coordinator(tmp_path, TWO)
    writer.is_under_way = True
    assert made.decide() is None
    assert keys(caplog) == {"upload-under-way"}
    writer.is_under_way = False
    assert made.decide() is not None
    for waits, places in (("skip", ONE), ("wait", TWO)):
        made, writer = coordinator(tmp_path, places, on_full=waits)
        writer.is_under_way = True
        assert made.decide() is not None


def test_rank_0_decides_which_snapshots_storage_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    spread, writer = coordinator(tmp_path, TWO, SERVERS, sharded=True, min_upload_interval_s=60.0)
    writer.destinations = list(SERVERS)
    none = Decision(writers=4, ranges=())
    found = []
    for _ in range(5):
        found.append(spread.decide())
        now_s[0] += 25.0
    assert found == [replace(none, persist=index % 3 == 0) for index in range(5)]
    apart, _ = coordinator(tmp_path, TWO, sharded=True, min_upload_interval_s=60.0)
    assert apart.decide() == none
    now_s[0] += 59.0
    assert apart.decide() is None  # it would count nowhere
    now_s[0] += 1.0
    assert apart.decide() == none


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_ranks_that_fail_again_have_rank_0_write_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool, sharded: bool
) -> None:
    """Of a sharded model it cannot."""
    made, writer = coordinator(tmp_path, ONE, strict=strict, sharded=sharded)
    all_write = Decision(writers=4, ranges=() if sharded else (1, 2, 3, 0))
    writer.aborted = 1
    assert made.decide() == all_write
    writer.committed = object()
    assert made.decide() == all_write
    writer.aborted = 3
    how = made.decide()
    assert how is not None
    if strict:
        with pytest.raises(SnapshotFailedError, match="rank 1: other weights"):
            Decision.heard(how.plain())
        return
    alone = all_write if sharded else Decision(writers=4, ranges=(0,))
    assert how == alone
    assert keys(caplog) == {"ranks-apart"}
    assert made.decide() == alone


def test_a_rank_that_cannot_join_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others went on into what they do together next, and its ring stayed connected."""
    made, _ = coordinator(tmp_path, ONE)
    host = InProcessHost(slots=2, memory_bytes=2**20, open_store=open_store)
    gone, heard = list[bool](), list[Exception]()
    monkeypatch.setattr(host, "leave", lambda *, complete: gone.append(complete))
    made.attempt, made._is_first = None, False
    made._resume = OneRank(trial=lambda: None)  # type: ignore[assignment]

    def together(do: Any) -> Any:
        try:
            return do()
        except RuntimeError as error:
            heard.append(error)
            raise

    info = named_run("run", str(tmp_path / "run"))
    ranks = SimpleNamespace(size=2, together=together, on_rank_zero=lambda _: None, tell=lambda _: (info, False, "1"))
    monkeypatch.setattr(fit_coordinator, "Agreement", lambda _: ranks)
    monkeypatch.setattr(Location, "open_host", lambda *_: host)
    monkeypatch.setattr(Topology, "meet", lambda *_: Topology(ONE))
    monkeypatch.setattr(writer_module, "LoneThread", Mock(side_effect=RuntimeError("can't start new thread")))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="new thread"):
        made.begin()
    assert made.attempt is None
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("spot-copier")]
    made.let_go()
    assert (len(heard), gone) == (1, [False])
    monkeypatch.undo()
    host.leave(complete=True)


def test_a_server_lost_between_its_two_tellings_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opened the run; the one that took its place was to be told of the other hosts, and no attempt began."""
    made, _ = coordinator(tmp_path, TWO, SERVERS)
    lost, new = (InProcessHost(slots=2, memory_bytes=2**20, open_store=open_store) for _ in range(2))
    left, told = [lost, new], list[int]()
    made.attempt, made._is_first = None, False
    made._resume = OneRank(trial=lambda: None)  # type: ignore[assignment]

    def meet(*_: Any) -> Topology:
        monkeypatch.setattr(lost, "open_run", Mock(side_effect=ServerUnreachableError("it has gone")))
        return Topology(TWO)

    info = named_run("run", str(tmp_path / "run"))
    ranks = SimpleNamespace(
        size=4, together=lambda do: do(), on_rank_zero=lambda _: None, tell=lambda _: (info, False, "1")
    )
    monkeypatch.setattr(fit_coordinator, "Agreement", lambda _: ranks)
    monkeypatch.setattr(Location, "open_host", lambda *_: left.pop(0))
    monkeypatch.setattr(Topology, "meet", meet)
    monkeypatch.setattr(new, "open_run", lambda info: told.append(info.hosts))
    made.begin()
    made.attempt.finish(0.0, complete=False)
    assert (told, left) == ([2], [])
