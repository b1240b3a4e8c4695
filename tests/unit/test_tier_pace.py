"""Each tier at its own pace, as policies, simulator and closed forms know it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.closed_form import FailureClass, expected_total_s, shares_of
from lightning_spot import COCI, ConvergenceAware, EverySeconds, OverheadBudget, RemoteSnapshot, YoungDaly
from lightning_spot.capture.attempt import drain_s_of
from lightning_spot.interval.costs import Costs
from lightning_spot.interval.policy import ByTime
from lightning_spot.server.tier import TierHealth
from lightning_spot.simulation.failures import Event, Failure, Failures, Fleet, Mixed, Weibull
from lightning_spot.simulation.simulator import SimulatedJob, Tier, chain, simulate
from tests.support.server import StartServer
from tests.support.trainer import Net, data, trainer

pytestmark = pytest.mark.guarantee("G19")

DAY_S = 86400.0


def tiers(server_s: float | None, durable_s: float) -> tuple[Tier, ...]:
    """The host's memory, a snapshot server if one is wanted, and a durable tier."""
    server = [] if server_s is None else [Tier(name="server", drain_s=server_s, survives=Failure.MACHINE)]
    return chain(*server, Tier(name="durable", drain_s=durable_s))


def evenly(work_s: float, count: int) -> Any:
    return np.arange(1, count + 1) * (work_s / count)


# -- policies ---------------------------------------------------------------------------------------------------------

seconds = st.floats(1e-2, 1e4)


@given(
    seconds, seconds, seconds, st.floats(1.0, 1e3), st.sampled_from([OverheadBudget, YoungDaly, ConvergenceAware, COCI])
)
def test_the_pace_is_that_of_the_nearest_tier_off_the_machine(
    stall_s: float, mtbf_s: float, near_s: float, slower: float, policy: type[ByTime]
) -> None:
    near = Tier(name="near", drain_s=near_s, survives=Failure.MACHINE)
    of_host = Tier(name="host", drain_s=near_s / 2, survives=Failure.PROCESS)
    far = Tier(name="far", drain_s=near_s * slower, survives=Failure.SERVER)

    def interval_s(*tiers: Tier) -> float:
        found = policy()
        found.learn(SimulatedJob(work_s=DAY_S, stall_s=stall_s, tiers=tiers).costs(mtbf_s))
        return found.interval_s(1)

    assert interval_s(of_host, near, far) == interval_s(near) >= near_s
    assert interval_s(of_host, far) == interval_s(far) >= interval_s(near)
    assert interval_s(of_host) == interval_s()


# -- what is measured -------------------------------------------------------------------------------------------------


def paced_by(min_upload_interval_s: float = 0.0, **found: TierHealth) -> float:
    """Seconds that the measured tiers ask to have between two snapshots."""
    return drain_s_of(found, min_upload_interval_s)


def test_the_measured_pace_is_that_of_the_server_while_it_works() -> None:
    bucket = TierHealth(kind="durable", flushed=2, drain_s=12.5)
    server = TierHealth(kind="server", flushed=10, drain_s=1.7)
    assert paced_by(bucket=bucket, server=server) == 1.7
    assert paced_by(bucket=bucket, server=TierHealth(kind="server")) == 0.0  # nothing is known of it yet
    assert paced_by(bucket=bucket, server=server, reserve=TierHealth(kind="server")) == 1.7
    assert paced_by(bucket=bucket, server=replace(server, error="gone")) == 12.5
    assert paced_by(bucket=bucket) == 12.5
    assert paced_by(60.0, bucket=bucket) == 60.0  # more often, and nothing newer would leave the machine
    assert paced_by(60.0, bucket=bucket, server=server) == 1.7
    assert paced_by(bucket=TierHealth()) == 0.0
    assert paced_by() == 0.0


class Learning(EverySeconds):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.costs: list[Costs] = []

    def learn(self, costs: Costs) -> None:
        self.costs.append(costs)


def test_a_training_tells_its_policy_how_fast_its_server_is(tmp_path: Path, start_server: StartServer) -> None:
    policy = Learning()
    snapshots = RemoteSnapshot(
        str(tmp_path / "run-1"),
        servers=start_server().url,
        interval=policy,
        min_upload_interval_s=3600.0,
        server_idle_timeout_s=10.0,
    )
    trainer(snapshots, Pause(0.05), max_epochs=2).fit(Net(), data())
    assert 0 < policy.costs[-1].drain_s < 30  # and not the hour of the durable tier


class Pause(pl.Callback):
    """Makes a step last."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(self.seconds)


# -- the simulator against closed forms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_s", "durable_s", "process_mtbf_s", "server_mtbf_s"),
    [
        (16.7, 125.0, 7 * DAY_S, 30 * DAY_S),
        (16.7, 125.0, 4 * 3600.0, 30 * DAY_S),
        (16.7, 125.0, 4 * 3600.0, 7200.0),  # a snapshot server on a spot machine
        (None, 125.0, 4 * 3600.0, math.inf),
        (None, 12.5, 1800.0, math.inf),
    ],
)
def test_several_classes_of_failures(
    server_s: float | None, durable_s: float, process_mtbf_s: float, server_mtbf_s: float
) -> None:
    interval_s, stall_s = 82.0, 1.0
    count = int(5 * DAY_S / interval_s)
    job = SimulatedJob(
        work_s=count * interval_s, stall_s=stall_s, tiers=tiers(server_s, durable_s), restore_s=60.0, restart_s=600.0
    )
    failures = Mixed(Fleet(Weibull(3600.0, k=1)), process_mtbf_s, server_mtbf_s, 620.0)
    outcome = simulate(job, evenly(job.work_s, count), failures, runs=1000)
    classes = []
    for kind, share in shares_of(failures).items():
        tier = next(tier for tier in job.tiers if tier.survives >= kind)
        restart_s = 600.0 if kind >= Failure.MACHINE else 0.0
        found = FailureClass(share=share, drain_s=tier.drain_s, lag_s=tier.lag_s, restore_s=60.0 + tier.drain_s)
        classes.append(replace(found, restart_s=restart_s))
    expected = expected_total_s(job.work_s, interval_s, stall_s, failures.mtbf_s, classes)
    assert outcome.total_s.mean() == pytest.approx(expected, rel=0.01)


# -- the simulator by hand, and its properties ------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """The same failures for every run: each after so many seconds, and what it takes away."""

    listed: tuple[tuple[float, Failure], ...]
    mtbf_s: float = 3600.0

    def events(self, random: np.random.Generator, runs: int) -> Iterator[Event]:
        for up_s, kind in (*self.listed, (1e12, Failure.MACHINE)):
            yield np.full(runs, up_s), np.full(runs, int(kind))


def lost_by(job: SimulatedJob, taken: Any, *listed: tuple[float, Failure]) -> float:
    return float(simulate(job, taken, Listed(listed), runs=1).lost_s[0])


def test_a_failure_goes_back_to_the_nearest_surviving_tier() -> None:
    """Snapshots each 10 s; a snapshot server takes 15 s for one, a bucket 40 s, both the newest when they are free."""
    job = SimulatedJob(work_s=1000.0, stall_s=0.0, tiers=tiers(15.0, 40.0))
    taken = np.arange(10.0, 1000.0, 10.0)
    assert lost_by(job, taken, (99.0, Failure.PROCESS)) == 9  # 90 is in memory
    assert lost_by(job, taken, (99.0, Failure.MACHINE)) == 29  # begun at 10, 25, 40, 55, 70: that one is there since 85
    without = replace(job, tiers=tiers(None, 40.0))
    assert lost_by(without, taken, (99.0, Failure.MACHINE)) == 49  # begun at 10 and 50: that one is there since 90
    assert lost_by(without, taken, (89.0, Failure.MACHINE)) == 79
    assert lost_by(without, taken, (49.0, Failure.MACHINE)) == 49  # the first one is not there yet
    assert (
        lost_by(job, taken, (106.0, Failure.SERVER)) == 56
    )  # at the server first: begun at 25 and 65, there since 105
    assert lost_by(job, taken, (104.0, Failure.SERVER)) == 94


def test_tiers_catch_up_while_machines_come_back() -> None:
    """The second failure takes host and server, right after the first: what the bucket has got meanwhile counts."""
    taken = np.arange(10.0, 1000.0, 10.0)
    twice = ((99.0, Failure.MACHINE), (1.0, Failure.SERVER))
    job = SimulatedJob(work_s=1000.0, stall_s=0.0, tiers=tiers(15.0, 40.0), restart_s=60.0)
    assert lost_by(job, taken, *twice) == 29  # the server's snapshot at 70 became durable in those 60 s
    assert lost_by(replace(job, restart_s=30.0), taken, *twice) == 89  # and not in 30 s


@given(st.lists(st.floats(0.5, 50.0), min_size=3, max_size=60), st.floats(0.0, 60.0), st.floats(1.0, 1000.0))
def test_with_uneven_snapshots_a_tier_is_close_to_its_simulation(
    gaps: list[float], drain_s: float, at_s: float
) -> None:
    """Against a simulation of every transfer: at most one transfer apart, and never ahead of what is in memory."""
    taken = np.cumsum(gaps)
    job = SimulatedJob(work_s=float(taken[-1]) + 1000.0, stall_s=0.0, tiers=(Tier(name="durable", drain_s=drain_s),))
    work_s = min(at_s, job.work_s - 1.0)
    kept_s = work_s - lost_by(job, taken, (work_s, Failure.MACHINE))
    at_best = [place for place in (0.0, *taken) if place + drain_s <= work_s or place == 0.0]
    assert kept_s <= max(at_best) + 1e-9
    assert kept_s >= -1e-9 + transfer_by_transfer(taken, drain_s, work_s - drain_s)


def transfer_by_transfer(taken: Any, drain_s: float, until_s: float) -> float:
    """What a tier has at a time that takes the newest whenever it is free."""
    free_s, has = 0.0, 0.0
    while True:
        waiting = [place for place in taken if has < place <= free_s] or [place for place in taken if place > has][:1]
        if not waiting:
            return has
        free_s = max(free_s, waiting[-1]) + drain_s
        if free_s > until_s:
            return has
        has = float(waiting[-1])


# -- the mix of failures ----------------------------------------------------------------------------------------------


def drawn(failures: Failures, count: int, runs: int) -> tuple[Any, Any]:
    pairs = [pair for _, pair in zip(range(count), failures.events(np.random.default_rng(3), runs), strict=False)]
    return np.array([up for up, _ in pairs]), np.array([kinds for _, kinds in pairs])


def test_failures_come_as_often_as_they_say() -> None:
    mixed = Mixed(Fleet(Weibull(3600.0, k=1), 4), 1800.0, 7200.0, 1000.0)
    ups, kinds = drawn(mixed, 200, 500)
    assert ups.mean() == pytest.approx(mixed.mtbf_s, rel=0.02)
    assert sum(shares_of(mixed).values()) == pytest.approx(1.0)
    for kind, share in shares_of(mixed).items():
        assert (kinds == kind).mean() == pytest.approx(share, rel=0.03)


def test_machines_are_lost_as_they_would_be_without_crashes() -> None:
    """They get older while the process starts again; ages are kept."""
    fleet = Fleet(Weibull(3600.0), 3, 2)
    random = np.random.default_rng(3)
    random.integers(2**63)
    alone = np.array([up for _, (up, _) in zip(range(60), fleet.events(random, 20), strict=False)])
    ups, kinds = drawn(Mixed(fleet, 900.0), 400, 20)
    for run in range(20):
        lost = kinds[:, run] != Failure.PROCESS
        between = np.diff(np.cumsum(ups[:, run])[lost], prepend=0.0)
        assert between[:60] == pytest.approx(alone[:, run])
