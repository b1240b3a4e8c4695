"""The simulator: against closed forms, and as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ettr
from benchmarks.intervals import Bathtub, floor_loss, power_loss
from lightning_spot.cli import main
from lightning_spot.config import parse_flag_bytes, parse_seconds
from lightning_spot.errors import SettingsError
from lightning_spot.simulation import simulator
from lightning_spot.simulation.failures import Fleet, Lifetimes, Mixed, Trace, Weibull
from lightning_spot.simulation.simulator import (
    POLICIES,
    Loss,
    SimulatedJob,
    Tier,
    chain,
    compare,
    exponential_loss,
    server_tier,
    simulate,
    storage_tier,
)

DAY_S = 86400.0
TIERS = (Tier(name="durable", drain_s=3.0),)


def test_times_add_up() -> None:
    tiers = chain(server_tier(1e9, 60e6), storage_tier(1e9, 3e6))
    job = SimulatedJob(work_s=DAY_S, stall_s=3.0, tiers=tiers, restore_s=60.0, restart_s=300.0)
    failures = Mixed(Fleet(Weibull(3600.0), 4, 2), 3600.0, 3600.0, 600.0)
    outcome = simulate(job, np.arange(200.0, DAY_S, 200.0), failures, runs=50)
    parts = outcome.stall_s + outcome.lost_s + outcome.down_s + outcome.restore_s
    assert outcome.total_s == pytest.approx(job.work_s + parts)
    assert (outcome.failures > 0).all()
    assert outcome.resumed.sum() == outcome.failures.sum()
    assert outcome.resumed_lost_s.sum() == pytest.approx(outcome.lost_s.sum())


def test_by_hand() -> None:
    """Snapshots at 100, 200, … s that take 1 s and are safe 5 s after they began; failures after 250 s, then 1000 s."""
    durable = Tier(name="durable", drain_s=4.0)
    job = SimulatedJob(work_s=500.0, stall_s=1.0, tiers=(durable,), restore_s=6.0, restart_s=30.0, loss=lambda x: 1 - x)
    taken = np.array([100.0, 200.0, 300.0, 400.0])
    outcome = simulate(job, taken, Trace((250.0, 1000.0)), runs=1)
    # At 250 s two stalls are over: 248 s of work, 200 of it safe.
    # Then 6 to restore, 4 to read, 300 of work, two stalls.
    assert outcome.total_s[0] == 250 + 30 + 10 + 302
    assert outcome.lost_s[0] == 48
    assert outcome.stall_s[0] == 4
    assert outcome.failures[0] == 1
    assert outcome.progress_lost[0] == pytest.approx(48 / 500)
    late = simulate(job, taken, Trace((204.0, 1000.0)), runs=1)  # 3 s after the second began: not safe yet
    assert late.lost_s[0] == 102


def test_a_job_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "MOST_FAILURES", 500)
    outcome = simulate(SimulatedJob(work_s=DAY_S), np.array([]), Fleet(Weibull(600.0, k=1)), runs=3)
    assert np.isinf(outcome.total_s).all()


@pytest.mark.parametrize("lifetimes", [Weibull(5000.0, k=1), Weibull(5000.0), Bathtub(5000.0)])
def test_lifetimes_have_their_mean(lifetimes: Lifetimes) -> None:
    assert lifetimes.draw(np.random.default_rng(1), (200_000,)).mean() == pytest.approx(5000.0, rel=0.03)


@pytest.mark.parametrize(("machines", "correlated"), [(1, 1), (8, 1), (16, 4)])
def test_a_fleet_fails_as_often_as_it_says(machines: int, correlated: int) -> None:
    fleet = Fleet(Weibull(36_000.0, k=1), machines, correlated)
    drawn = [up.mean() for _, (up, _) in zip(range(50), fleet.events(np.random.default_rng(2), 500), strict=False)]
    assert np.mean(drawn) == pytest.approx(fleet.mtbf_s, rel=0.03)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,node\n2026-01-01T00:00:00Z,a\n2026-01-01T00:01:00Z,b\n2026-01-01T01:00:00+00:00,c\n")
    assert Trace.read(path).uptimes_s == (3600.0,)
    path.write_text("time\n0\n100\n7200\n")
    assert Trace.read(path).uptimes_s == (7200.0,)
    for text in ("when\n1", "time\nsoon", "time\n5", "node,time\na\nb,1", "time\n0\n1\ninf", f"time\n{10**6 * 'x'}"):
        path.write_text(text)
        with pytest.raises(SettingsError, match=re.escape(str(path))):
            Trace.read(path)
    with pytest.raises(SettingsError, match=r"nothing\.csv"):
        Trace.read(tmp_path / "nothing.csv")


LOSSES = {
    "exponential-5": (exponential_loss(5), 0.8),
    "exponential-12": (exponential_loss(12), 0.7),
    "power": (power_loss(), 0.9),
    "floor": (floor_loss(), 0.9),
}
LIVES = {"exponential": Weibull(7200.0, k=1), "weibull": Weibull(7200.0), "bathtub": Bathtub(7200.0)}
EVERYDAY = {("exponential-5", "bathtub"), ("exponential-12", "weibull"), ("power", "exponential"), ("floor", "weibull")}


@pytest.mark.parametrize(
    ("loss", "most", "lifetimes"),
    [
        pytest.param(
            *LOSSES[loss],
            LIVES[lives],
            id=f"{loss}-{lives}",
            marks=[] if (loss, lives) in EVERYDAY else pytest.mark.soak,
        )
        for loss in LOSSES
        for lives in LIVES
    ],
)
def test_convergence_aware_keeps_what_it_promises(loss: Loss, most: float, lifetimes: Lifetimes) -> None:
    job = SimulatedJob(work_s=DAY_S, steps=8000, stall_s=2.0, tiers=TIERS, restart_s=600.0, restore_s=60.0, loss=loss)
    names = ("ConvergenceAware", "YoungDaly")
    ours, evenly = compare(job, Fleet(lifetimes), {name: POLICIES[name] for name in names}, runs=500, noise=0.02)
    assert ours.snapshots == pytest.approx(evenly.snapshots, rel=0.05)
    assert ours.total_s <= 1.01 * evenly.total_s
    assert ours.progress_lost <= most * evenly.progress_lost


# -- the command ------------------------------------------------------------------------------------------------------

QUICK = ["simulate", "--work", "6h", "--runs", "20"]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--server-speed", "600MB/s"]) == 0
    said = capsys.readouterr().out
    for name in (
        "YoungDaly",
        "every 1 min",
        "memory of the host",
        "snapshot server",
        "A snapshot server makes the run",
    ):
        assert name in said
    dear = ["--server-speed", "100MB/s", "--server-price", "5", "--price", "1"]
    assert main([*QUICK, *dear]) == 0
    assert "you need no snapshot server" in capsys.readouterr().out


def test_a_duration_has_a_unit() -> None:
    assert [parse_seconds(text) for text in ("90s", "1.5h", "0")] == [90.0, 5400.0, 0.0]
    for text, said in (("72", "'72'.*72s"), ("nan", "'nan'"), ("soon", "'soon'")):
        with pytest.raises(SettingsError, match=said):
            parse_seconds(text)


def test_a_size_may_have_a_unit() -> None:
    assert (parse_flag_bytes("600B"), parse_flag_bytes("64000000000")) == (600, 64 * 10**9)


def test_command_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "-o", "json", "--lifetime", "1h"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mtbf_s"] == pytest.approx(3600, rel=0.01)  # and a crash in a week
    for row in told["tiers"]["storage only"]:
        assert row["total_s"] == pytest.approx(6 * 3600 / row["goodput"])


@pytest.mark.parametrize("kind", ["steps", "ModelCheckpoint"])
def test_the_simulated_ratio_is_that_of_the_closed_form(kind: str) -> None:
    fixed = [way for way in ettr.ways_of(ettr.GPT2) if way.kind == kind]
    for way in fixed:
        found = ettr.ratios_of(way, ettr.GPT2[kind])
        assert found["simulated"] == pytest.approx(found["closed form"], abs=0.003)
    best = max(fixed, key=lambda way: ettr.exact(way, ettr.GPT2[kind]))
    assert best.every == ettr.best_every(ettr.GPT2[kind])
