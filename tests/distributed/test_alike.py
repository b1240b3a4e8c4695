"""Before ranks talk to each other: they are alike, and no host of theirs has what nobody else knows of."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spot import AutoResume, EverySeconds, EverySteps, RemoteSnapshot, SpotCheckpoint
from lightning_spot.client import starting
from lightning_spot.errors import ServerUnreachableError, SettingsError, SpotError, TierError
from lightning_spot.interval.costs import Costs
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.server.tier import TierHealth
from lightning_spot.session import preflight, resume, topology
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.preflight import check_alike, check_one_model, check_one_optimizer
from lightning_spot.session.resume import bring_below
from lightning_spot.session.topology import Topology
from lightning_spot.store.local import LocalStore
from tests.distributed.test_restore import put
from tests.support.oracle import claim_of
from tests.support.ranks import Group, Rank, rank_of_this_thread
from tests.support.said import said, said_about
from tests.support.small_trainer import info_of, take
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G11")


class WithCallbacks(Rank):
    """A trainer as far as it is asked for its ranks and callbacks."""

    callbacks: list[Any]


def on_ranks(size: int, action: Callable[[WithCallbacks], Any]) -> list[Any]:
    """What it gives on each rank, or the error that it raises."""
    group = Group(size)

    def run(rank: int) -> Any:
        threading.current_thread().name = f"rank-{rank}"
        try:
            return action(WithCallbacks(group, rank))
        except SettingsError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def checked(*callbacks: Callable[[], Any]) -> list[Any]:
    """What ranks with these callbacks say of each other."""

    def check(trainer: WithCallbacks) -> None:
        trainer.callbacks = [callbacks[trainer.global_rank]()]
        check_alike(trainer)  # type: ignore[arg-type]

    return on_ranks(len(callbacks), check)


def spot(**settings: Any) -> Callable[[], SpotCheckpoint]:
    return lambda: SpotCheckpoint("/tmp/run", **{"notices": None, **settings})


OTHER_SETTINGS = [
    (spot(interval=EverySteps(9)), spot(interval=EverySteps(7)), "(interval=…)", "EverySteps(n=9)", "EverySteps(n=7)"),
    (spot(interval=EverySteps(10)), spot(), "(interval=…)", "EverySteps(n=10)", "ConvergenceAware()"),
    (spot(servers="spot://a:1"), spot(), "(servers=…)", "spot://a:1", "None"),
    (spot(servers=["spot://a:1", "spot://b:1"]), spot(servers="spot://a:1"), "(servers=…)", "spot://b:1", "spot://a:1"),
    (spot(), spot(local_server=False), "(local_server=…)", "True", "False"),
    (spot(), spot(resume=False), "our callbacks", "AutoResume, RemoteSnapshot", "RemoteSnapshot"),
]


@pytest.mark.parametrize(("one", "other", "what", "first", "last"), OTHER_SETTINGS)
def test_ranks_with_other_settings_are_told_the_first_difference(
    one: Any, other: Any, what: str, first: str, last: str
) -> None:
    check_told(checked(one, one, other), (what, first, last))


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_waits_for_one_without_our_callback_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    """Nothing was said of it, on any rank, until the process group gave up after half an hour."""
    monkeypatch.setattr(preflight, "LATE_S", 0.01 if late else 60.0)
    gather = preflight.Agreement.gather

    def wait(agreement: preflight.Agreement, mine: Any) -> list[Any]:
        if late:
            until(lambda: sorted(said_about(caplog, "ranks-late")) == ["0", "1"], "both ranks to say it")
        return gather(agreement, mine)

    monkeypatch.setattr(preflight.Agreement, "gather", wait)
    assert checked(spot(), spot()) == [None, None]
    assert sorted(said_about(caplog, "ranks-late")) == (["0", "1"] if late else [])
    assert not [
        each for each in threading.enumerate() if isinstance(each, threading.Timer) and not each.finished.is_set()
    ]


def test_ranks_with_other_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "versions", lambda: {"torch": f"2.{rank_of_this_thread()}"})
    found = checked(spot(), spot())
    assert len(set(found)) == 1
    assert "the version of torch is 2.0 on rank 0 and 2.1 on rank 1" in found[0]


def test_settings_of_one_rank_or_of_one_host_may_differ() -> None:
    learned = EverySteps(3)
    learned.taken(6, 0.0)
    servers = ["spot://a:1", "spot://b:1"]
    assert checked(spot(servers=servers), spot(servers=servers[::-1])) == [None, None]  # all use them in one order
    one = spot(interval=EverySteps(3), memory_limit="1GiB", run_name="at-12-00-00")
    other = spot(interval=learned, memory_limit="2GiB", run_name="at-12-00-01", log_goodput=True)
    assert checked(one, other) == [None, None]
    assert checked(spot(interval=EverySeconds(3)), spot(interval=EverySeconds(4))) == [None, None]
    assert checked(lambda: AutoResume("/tmp/one"), lambda: AutoResume("/tmp/other")) == [None, None]
    assert checked(lambda: RemoteSnapshot("/tmp/alone")) == [None]


def test_ranks_whose_trainers_would_step_elsewhere_are_named() -> None:
    def check(trainer: WithCallbacks) -> None:
        trainer.callbacks = [spot()()]
        vars(trainer)["accumulate_grad_batches"] = 1 + (trainer.global_rank == 1)
        check_alike(trainer)  # type: ignore[arg-type]

    found = on_ranks(3, check)
    assert len(set(found)) == 1
    assert "Trainer(accumulate_grad_batches=…) is 1 on rank 0 and 2 on rank 1" in found[0]


def built(**more: torch.nn.Module | torch.Tensor) -> torch.nn.Module:
    """A model with some modules more, or buffers."""
    made = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.LazyLinear(1), torch.nn.LazyBatchNorm1d()
    )
    made.register_buffer("nested", torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]))  # has no shape
    for name, item in more.items():
        made.add_module(name, item) if isinstance(item, torch.nn.Module) else made.register_buffer(name, item)
    return made


def bfloat16(module: torch.nn.Module) -> torch.nn.Module:
    module[0].bfloat16()  # type: ignore[index]
    return module


def frozen(module: torch.nn.Module) -> torch.nn.Module:
    module[0].bias.requires_grad_(False)  # type: ignore[index]
    return module


def without_shapes_that_differ(module: torch.nn.Module) -> torch.nn.Module:
    module.register_buffer("cache", torch.zeros(id(module) % 97), persistent=False)
    module.register_parameter("own", torch.nn.Parameter(torch.zeros(id(module) % 89 + 1)))
    module._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
    return module


OTHER_MODELS: list[tuple[Callable[[], torch.nn.Module], Callable[[], torch.nn.Module], tuple[str, ...]]] = [
    (built, lambda: built(more=torch.nn.Linear(1, 1)), ("more.weight", "none", "torch.float32 (1, 1)")),
    (lambda: built(more=torch.zeros(3)), lambda: built(more=torch.zeros(4)), ("more", "(3,)", "torch.float32 (4,)")),
    (built, lambda: bfloat16(built()), ("0.weight", "torch.float32 (2, 3)", "torch.bfloat16 (2, 3)")),
    (built, lambda: frozen(built()), ("0.bias", "torch.float32 (2,)", "torch.float32 (2,), frozen")),
    (lambda: without_shapes_that_differ(built()), lambda: without_shapes_that_differ(built()), ()),
]


def check_told(found: list[Any], facts: tuple[str, ...]) -> None:
    """Each of three ranks has raised an error that says what is so on rank 0, and so on rank 2; or none has."""
    assert len(set(found)) == 1
    if not facts:
        assert found[0] is None
        return
    what, first, last = facts
    for fact in (f"{what} is ", f"{first} on rank 0", f" {last} on rank 2"):
        assert fact in found[0]


@pytest.mark.parametrize(("one", "other", "facts"), OTHER_MODELS)
def test_the_first_difference_between_rank_models_is_named(
    one: Callable[[], torch.nn.Module], other: Callable[[], torch.nn.Module], facts: tuple[str, ...]
) -> None:
    def check(trainer: WithCallbacks) -> None:
        made = [one, one, other][trainer.global_rank]()
        vars(trainer)["lightning_module"] = made
        check_one_model(trainer)  # type: ignore[arg-type]

    check_told(on_ranks(3, check), facts)


class Learning(EverySteps):
    """A user's own policy, which shows what it has learned."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.stall_s = 0.0

    def learn(self, costs: Costs) -> None:
        self.stall_s = costs.stall_s


def test_learned_policy_values_of_a_former_fit_are_no_setting() -> None:
    one, other = spot(interval=Learning(3))(), spot(interval=Learning(3))()
    assert one.interval is not other.interval
    one.interval.learn(Costs(stall_s=0.5, mtbf_s=3600.0))  # rank 0 only measures
    assert checked(lambda: one, lambda: other) == [None, None]
    found = checked(spot(interval=Learning(3)), spot(interval=Learning(4)))
    assert "SpotCheckpoint(interval=…) is Learning(n=3, stall_s=0.0) on rank 0" in found[0]


# -- what another host has ---------------------------------------------------------------------------------------------


class ServerOf:
    """The server of a host, which has a newer snapshot than the durable tier."""

    def __init__(self, store: LocalStore, *, fails: bool) -> None:
        self.store, self.fails, self.disconnected = store, fails, False
        self.turns = 2

    def owes(self) -> bool:
        return self.turns > 0

    def flush(self, wait_s: float) -> list[str]:
        assert wait_s > 0
        if self.fails:
            return [f"{self.store.url}: No space left on device"]
        self.turns -= 1
        if self.turns:
            return [f"{self.store.url}: it takes long"]
        put(self.store, 9)
        return []

    def tiers(self) -> dict[str, TierHealth]:
        return {self.store.url: TierHealth(error="No space left on device" if self.fails else "")}

    def disconnect(self) -> None:
        self.disconnected = True


@pytest.mark.parametrize("fails", [False, True])
def test_the_former_rank_0_host_uploads_before_the_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    store, location = LocalStore(str(tmp_path / "run")), Location.of(tmp_path / "run", local_server=False)
    store.claim(claim_of(1))
    put(store, 3)
    server, asked = ServerOf(store, fails=fails), list[int]()

    def attach(url: str, _run: str) -> Any:
        assert url == location.url
        asked.append(rank := rank_of_this_thread())
        if rank == 4:
            raise TierError("there is none", tier="here")
        if rank == 6:
            raise ServerUnreachableError("it stands still", tier="there")
        return server if rank == 2 else None

    monkeypatch.setattr(resume, "attach", attach)
    monkeypatch.setattr(resume, "place_of", lambda _: f"host {rank_of_this_thread() // 2}")
    on_ranks(8, lambda trainer: bring_below(trainer, location))  # type: ignore[arg-type]
    assert sorted(asked) == [0, 2, 4, 6]  # the first rank of each host
    late = {facts["rank"]: facts["about"] for facts in said(caplog, "not-uploaded")}
    assert late[6] == "it stands still"
    assert server.disconnected
    newest, _ = survey(location).candidates[0]
    assert newest.step == (3 if fails else 9)
    assert late.keys() == ({2, 6} if fails else {6})
    assert ("No space left" in str(late.get(2))) == fails


def test_upload_works_if_the_server_has_two_runs_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that was emptied, and begun anew, has another run at the same server."""
    location = Location.of(tmp_path / "run")
    host = starting.start(location.url, location.name, slots=4, memory_bytes=2**26, server_idle_timeout_s=60.0)
    try:
        host.open_run(replace(info_of(location.url, 1), id="a" * 12, location="of a former run"))
        host.open_run(replace(info_of(location.url, 1), min_upload_interval_s=3600.0))
        for step in (1, 2):
            take(host, step, 1000)
            until(lambda step=step: step == 2 or host.safe_step() == 1, "the first to be durable")
        monkeypatch.setattr(resume, "place_of", lambda _: f"host {rank_of_this_thread()}")
        on_ranks(2, lambda trainer: bring_below(trainer, location))  # type: ignore[arg-type]
        assert LocalStore(location.url).survey().manifests[0].step == 2
    finally:
        host.leave(complete=True)


def test_ranks_share_a_place_if_proc_is_another_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below ``unshare --pid`` alone: each rank took itself for a host, and all told one server so."""
    location, read = Location.of(str(tmp_path / "run")), os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "1" if path == "/proc/self" else read(path))
    assert topology.place_of(location) == topology.place_of(location)


@pytest.mark.parametrize("sees", [True, False])
def test_a_directory_one_host_cannot_see_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    """Rank 0 wrote to its own disk, and a resume failed on the other hosts."""
    monkeypatch.setattr(topology, "SEEN_S", 0.0)
    info = info_of(str(tmp_path / "run"), 1)
    LocalStore(str(tmp_path / "run")).claim(info.claim())
    asked = list[int]()

    def open_store(url: str) -> LocalStore:
        asked.append(rank_of_this_thread())
        return LocalStore(url if sees else f"{url}-of-another-host")

    monkeypatch.setattr(topology, "open_store", open_store)

    def check(trainer: Any) -> str:
        ranks = Agreement(trainer)
        try:
            Topology(((0, 1), (2, 3)), ranks.rank).check_storage(ranks, str(tmp_path / "run"), info)
        except SpotError as error:
            return str(error)
        return ""

    found = on_ranks(4, check)
    assert asked == [2]  # the first rank of the other host
    assert all("a directory that all hosts mount" in error for error in found) != sees
    assert any(found) != sees


def test_storage_that_answers_slowly_is_looked_at_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks were counted, so that the time they took came on top."""
    looks = list[int]()

    class Slow(LocalStore):
        def folder(self, *given: Any, **more: Any) -> Any:
            looks.append(1)
            time.sleep(0.2)
            return super().folder(*given, **more)

    monkeypatch.setattr(topology, "SEEN_S", 0.5)
    monkeypatch.setattr(topology, "open_store", Slow)
    info = info_of(str(tmp_path / "run"), 1)

    def check(trainer: Any) -> None:
        ranks = Agreement(trainer)
        with pytest.raises(SpotError):
            Topology(((0,), (1,)), ranks.rank).check_storage(ranks, str(tmp_path / "run"), info)

    on_ranks(2, check)
    assert 1 <= len(looks) <= 3


def test_a_single_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resume, "attach", SimpleNamespace)
    on_ranks(1, lambda trainer: bring_below(trainer, Location.of(tmp_path, local_server=False)))  # type: ignore[arg-type]


def trained_with(module: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[torch.nn.Module, list[Any]]:
    return module, list(optimizers)


def with_one(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **more: Any) -> tuple[torch.nn.Module, list[Any]]:
    module = built()
    return trained_with(module, kind(module[:2].parameters(), lr=0.1, **more))  # type: ignore[call-arg,index] # torch's


def with_groups() -> tuple[torch.nn.Module, list[Any]]:
    module = built()
    return trained_with(
        module, torch.optim.AdamW([{"params": module[0].parameters()}, {"params": module[1].parameters()}])
    )  # type: ignore[index]


def with_own() -> tuple[torch.nn.Module, list[Any]]:
    module = without_shapes_that_differ(built())
    parameters = list(module[:2].parameters())  # type: ignore[index] # it is a Sequential
    own = [module.get_parameter("own")] if rank_of_this_thread() else []
    return trained_with(module, torch.optim.AdamW([*parameters, *own]))


Trained = Callable[[], tuple[torch.nn.Module, list[Any]]]
OTHER_OPTIMIZERS: list[tuple[Trained, Trained, tuple[str, ...]]] = [
    (with_one, lambda: with_one(torch.optim.SGD), ("optimizer 0", "AdamW", "SGD")),
    (with_one, with_groups, ("the place of 1.weight", "group 0 of optimizer 0", "group 1 of optimizer 0")),
    (with_one, lambda: trained_with(built()), ("optimizer 0", "AdamW", "none")),
    (with_one, lambda: with_one(amsgrad=True), ()),
    (with_own, with_own, ()),
]


@pytest.mark.parametrize(("one", "other", "facts"), OTHER_OPTIMIZERS)
def test_the_first_difference_between_rank_optimizers_is_named(
    one: Trained, other: Trained, facts: tuple[str, ...]
) -> None:
    def check(trainer: WithCallbacks) -> None:
        vars(trainer)["lightning_module"], vars(trainer)["optimizers"] = [one, one, other][trainer.global_rank]()
        check_one_optimizer(trainer)  # type: ignore[arg-type]

    check_told(on_ranks(3, check), facts)
