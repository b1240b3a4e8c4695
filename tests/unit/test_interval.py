"""Interval policies: bounds, invariances, and every way in which COCI's published rule fails."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

from lightning_spot import COCI, ConvergenceAware, OverheadBudget, YoungDaly
from lightning_spot.interval.adaptive import FIRST_S, young_daly_s
from lightning_spot.interval.convergence import WIDEST, LossCurve, Price, spread
from lightning_spot.interval.costs import Costs, FailureRate, RobustMean
from lightning_spot.interval.policy import IntervalPolicy

pytestmark = pytest.mark.guarantee("G25")

STEPS = 4000
STEP_S = 10.0
COSTS = Costs(stall_s=2.0, mtbf_s=7200.0, total_steps=STEPS)

Loss = Callable[[float], float]


def schedule(policy: IntervalPolicy, loss: Loss, costs: Costs = COSTS, step_s: float = STEP_S) -> list[int]:
    """Steps at which a run of ``STEPS`` steps takes its snapshots."""
    policy.learn(costs)
    policy.taken(0, 0.0)
    taken = []
    for step in range(1, STEPS + 1):
        policy.progress(step, loss(step / STEPS))
        if policy.due(step, step * step_s):
            policy.taken(step, step * step_s)
            taken.append(step)
    return taken


@functools.cache
def usual(sigma: float) -> list[int]:
    """The schedule that others are compared with."""
    return schedule(ConvergenceAware(), noisy(falling, sigma))


def noisy(loss: Loss, sigma: float, seed: int = 0) -> Loss:
    random = np.random.default_rng(seed)
    return lambda x: loss(x) + sigma * random.standard_normal()


def falling(x: float) -> float:
    return math.exp(-6 * x)


# -- the optimum of Young and Daly ------------------------------------------------------------------------------------

positive = st.floats(1e-3, 1e5)


@given(positive, positive, st.floats(1.0, 10.0))
@example(4380.0, 1951.0, 1.125)
def test_the_interval_grows_with_cost_and_with_reliability(stall_s: float, mtbf_s: float, factor: float) -> None:
    assert young_daly_s(stall_s, mtbf_s) <= young_daly_s(stall_s * factor, mtbf_s) * (1 + 1e-9)
    if (stall_s < 2 * mtbf_s) is (stall_s < 2 * mtbf_s * factor):  # Daly's estimate jumps by a ninth between the two
        assert young_daly_s(stall_s, mtbf_s) <= young_daly_s(stall_s, mtbf_s * factor) * (1 + 1e-9)


@given(st.floats(1e-4, 0.5), st.floats(100.0, 1e6))
def test_it_is_the_best_there_is(ratio: float, mtbf_s: float) -> None:
    """Against a minimisation of the exact expected time (Daly 2006, eq. 20) by scipy."""
    stall_s = ratio * mtbf_s

    def expected(log_work_s: float) -> float:
        work_s = math.exp(log_work_s)
        return math.expm1((work_s + stall_s) / mtbf_s) / work_s

    limits = (math.log(stall_s / 100), math.log(mtbf_s * 10))
    best = optimize.minimize_scalar(expected, bounds=limits, method="bounded").fun
    assert expected(math.log(young_daly_s(stall_s, mtbf_s))) <= best * 1.02


@given(positive, positive, st.floats(0.001, 0.5), st.floats(0, 1e4))
def test_budget_and_drain_are_kept(stall_s: float, mtbf_s: float, share: float, drain_s: float) -> None:
    costs = Costs(stall_s=stall_s, mtbf_s=mtbf_s, drain_s=drain_s, total_steps=STEPS)
    policies = [OverheadBudget(share), YoungDaly(share), ConvergenceAware(max_overhead=share)]
    for policy in policies:
        policy.learn(costs)
        interval_s = policy.interval_s(1)
        assert stall_s / interval_s <= share * (1 + 1e-9)
        assert interval_s >= drain_s


def test_before_anything_was_measured_a_snapshot_comes_soon() -> None:
    for policy in (OverheadBudget(), YoungDaly(), ConvergenceAware(), COCI()):
        policy.taken(0, 100.0)
        assert not policy.due(1, 100.0 + FIRST_S - 0.1)
        assert policy.due(2, 100.0 + FIRST_S)


# -- ConvergenceAware -------------------------------------------------------------------------------------------------


def lost_progress(taken: list[int], loss: Loss) -> float:
    """Mean progress that a failure at a random moment takes away."""
    saved = np.concatenate([[0], taken])
    moments = np.arange(1, STEPS)
    last = saved[np.searchsorted(saved, moments, side="right") - 1]
    return float(np.mean([loss(a / STEPS) - loss(b / STEPS) for a, b in zip(last, moments, strict=True)]))


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_less_progress_is_lost_for_as_many_snapshots(sigma: float) -> None:
    ours = usual(sigma)
    evenly = schedule(YoungDaly(), falling)
    assert abs(len(ours) - len(evenly)) <= 0.05 * len(evenly)
    assert lost_progress(ours, falling) <= 0.75 * lost_progress(evenly, falling)


def test_max_regret_bounds_the_rise() -> None:
    costly = Costs(stall_s=30.0, mtbf_s=7200.0, total_steps=STEPS)
    even = schedule(YoungDaly(0.5), falling, costly)
    rework = []
    for max_regret in (0.5, 0.01, 0.0001):
        taken = schedule(ConvergenceAware(max_regret=max_regret, max_overhead=0.5), falling, costly)
        gaps = np.diff([0, *taken]) * STEP_S
        cost = len(taken) * costly.stall_s + (gaps**2).sum() / 2 / costly.mtbf_s
        gaps_even = np.diff([0, *even]) * STEP_S
        cost_even = len(even) * costly.stall_s + (gaps_even**2).sum() / 2 / costly.mtbf_s
        rise = (cost - cost_even) / (STEPS * STEP_S)
        assert rise <= max_regret + 0.002
        rework.append(rise)
    assert rework[0] > rework[2]


SAME_AS_YOUNG_DALY: dict[str, Loss] = {
    "plateau": lambda x: 1.0,
    "noisy_plateau": noisy(lambda x: 1.0, 0.1),
    "rising": lambda x: math.exp(x),
    "nothing_but_noise_around_zero": noisy(lambda x: 0.0, 1.0),
    "nan": lambda x: math.nan,
    "infinite": lambda x: math.inf,
    "zero": lambda x: 0.0,
    "too_few_points": lambda x: falling(x) if x < 10 / STEPS else math.nan,
    "negative_and_rising": lambda x: -1 + x,
}


@pytest.mark.parametrize("name", [*SAME_AS_YOUNG_DALY, "no_known_end"])
def test_exactly_young_daly_where_progress_cannot_be_seen(name: str) -> None:
    loss = SAME_AS_YOUNG_DALY.get(name, falling)
    costs = replace(COSTS, total_steps=None) if name == "no_known_end" else COSTS
    assert schedule(ConvergenceAware(), loss, costs) == schedule(YoungDaly(), lambda x: 0.0, costs)


def test_exactly_young_daly_after_a_restart_of_the_learning_rate() -> None:
    policy = ConvergenceAware()
    policy.learn(COSTS)
    even_s = YoungDaly().interval_s(0) if policy._costs is None else policy._even_s
    stretched, restarted = [], []
    for step in range(1, STEPS):
        x = step / STEPS
        policy.progress(step, falling(x) if x < 0.5 else 0.6 + 0.1 * (x - 0.5))
        policy.due(step, step * STEP_S)
        (stretched if x < 0.5 else restarted).append(policy.interval_s(step) / even_s)
    assert min(stretched) == pytest.approx(1 / WIDEST)
    assert set(restarted[400:]) == {1.0}


EVERYDAY = {(1.0, -2.0), (1e-6, -0.5), (1e6, 100.0)}


@pytest.mark.parametrize(
    ("scale", "shift"),
    [
        pytest.param(scale, shift, marks=[] if (scale, shift) in EVERYDAY else pytest.mark.soak)
        for scale in (1.0, 1e-6, 1e6)
        for shift in (0.0, -0.5, -2.0, 100.0)
    ],
)
def test_scale_and_offset_of_the_loss_change_nothing(shift: float, scale: float) -> None:
    plain = usual(0.02)
    loss = noisy(falling, 0.02)
    changed = schedule(ConvergenceAware(), lambda x: scale * (loss(x) + shift))
    assert len(plain) == len(changed)
    assert np.abs(np.array(plain) - np.array(changed)).max() <= 1  # rounding


def test_a_metric_that_is_to_grow() -> None:
    loss, accuracy = usual(0.0), lambda x: 1 - falling(x)
    assert np.abs(np.array(loss) - schedule(ConvergenceAware(mode="max"), accuracy)).max() <= 1
    assert schedule(ConvergenceAware(), accuracy) == schedule(YoungDaly(), falling)


@pytest.mark.parametrize("unit", [1 / 3600, *(pytest.param(unit, marks=pytest.mark.soak) for unit in (1 / 60, 1000.0))])
def test_the_unit_of_time_changes_nothing(unit: float) -> None:
    costs = Costs(stall_s=2.0 * unit, mtbf_s=7200.0 * unit, total_steps=STEPS)
    for make in (YoungDaly, ConvergenceAware, COCI):
        plain = schedule(make(), falling)
        changed = schedule(make(), falling, costs, STEP_S * unit)
        assert len(plain) == len(changed)
        assert np.abs(np.array(plain) - np.array(changed)).max() <= 1


def test_outliers_change_little() -> None:
    plain = usual(0.02)
    spikes = noisy(falling, 0.02)
    found = schedule(ConvergenceAware(), lambda x: spikes(x) + (1e6 if round(x * STEPS) % 97 == 0 else 0))
    assert lost_progress(found, falling) <= 1.1 * lost_progress(plain, falling)


def test_it_goes_on_where_a_snapshot_was_taken() -> None:
    first = ConvergenceAware()
    first.learn(COSTS)
    second = ConvergenceAware()
    for step in range(1, STEPS // 3):
        first.progress(step, falling(step / STEPS))
        first.due(step, step * STEP_S)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.learn(COSTS)
    assert second.interval_s(STEPS // 3) == pytest.approx(first.interval_s(STEPS // 3), rel=0.02)
    assert first.interval_s(STEPS // 3) != first._even_s


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=30, max_size=200))
@settings(max_examples=50)
def test_no_metric_breaks_it(values: list[float]) -> None:
    for policy in (ConvergenceAware(), COCI(profile_threshold=10, fit_interval=5)):
        policy.learn(Costs(stall_s=1.0, mtbf_s=3600.0, total_steps=200))
        even_s = YoungDaly()
        even_s.learn(Costs(stall_s=1.0, mtbf_s=3600.0, total_steps=200))
        for step, value in enumerate(values, 1):
            policy.progress(step, value)
            wait_s = policy.wait_s(step, 10.0 * step)
            assert math.isfinite(wait_s)
            if isinstance(policy, ConvergenceAware):
                assert 1 / WIDEST <= policy.interval_s(step) / even_s.interval_s(step) * (1 + 1e-9) <= WIDEST + 1e-6


# -- the fit ----------------------------------------------------------------------------------------------------------


def test_readings_take_no_more_memory_as_a_run_grows() -> None:
    curve = LossCurve()
    for step in range(0, 300_000, 3):
        curve.add(step, falling(step / 300_000), 300_000)
    state = curve.state_dict()
    assert len(state["closed"]) <= 64
    assert len(state["open"]) <= 65
    assert curve.fit is not None


@given(
    st.lists(st.floats(0, 1e6), min_size=8, max_size=64),
    st.floats(0.5, 2.0),
    st.floats(0.001, 0.1),
    st.floats(0.0, 0.05),
)
def test_spread_keeps_its_bounds(speed: list[float], snapshots: float, half: float, most: float) -> None:
    price = Price(stall=half, rework=half)
    stretch = spread(np.array(speed), snapshots=snapshots, price=price, most_rise=most)
    assert ((stretch >= 1 / WIDEST - 1e-9) & (stretch <= WIDEST + 1e-9)).all()
    even = bool((stretch == 1).all())
    assert even or (1 / stretch).mean() == pytest.approx(snapshots, rel=1e-3)
    assert even or price.rise(stretch).mean() <= most + 1e-9


# -- what COCI's published rule does not survive ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rising", "plateau", "loss_through_zero", "nan"])
def test_coci_falls_back_to_young(name: str) -> None:
    loss = SAME_AS_YOUNG_DALY.get(name, lambda x: 0.005 - x)
    assert schedule(COCI(), loss) == schedule(COCI("ccm"), falling)


def test_coci_on_a_plateau_never_stops() -> None:
    taken = schedule(COCI(), noisy(lambda x: 1.0, 1e-3))
    assert len(taken) >= 0.5 * len(schedule(COCI("ccm"), falling))


def test_coci_fits_a_long_run() -> None:
    """``curve_fit`` from its default start silently returns (1, 1) there."""
    policy = COCI()
    schedule(policy, falling)
    assert policy._theta[0] == pytest.approx(-6 / (STEPS * STEP_S), rel=0.01)


def test_coci_goes_on_after_two_slots_within_one_step() -> None:
    rare = Costs(stall_s=0.01, mtbf_s=600.0, total_steps=STEPS)
    taken = schedule(COCI(), falling, rare)
    assert len(taken) > 1000  # slots every 3.5 s, steps of 10 s; the published rule takes one of 59
    assert max(np.diff(taken[: len(taken) // 2])) <= 2


def test_coci_slots_are_equal_drops_of_the_loss() -> None:
    policy = COCI("manual", snapshot_cost_s=2.0, slope=-6 / (STEPS * STEP_S), offset=0.0, failure_rate_per_s=1 / 7200)
    losses = np.exp(-6 * np.array(schedule(policy, lambda x: math.nan)) / STEPS)
    drops = -np.diff(losses)[5:]  # behind the first plan
    assert np.median(drops[:20]) == pytest.approx(np.median(drops[-20:]), rel=0.3)  # steps are coarse


@pytest.mark.filterwarnings("error")
def test_coci_slots_end_with_a_run_whose_loss_falls_to_nothing() -> None:
    """The last drop was of a loss of zero: its slot was never to come."""
    policy = COCI("manual", snapshot_cost_s=1.0, slope=-1.0, offset=0.0, failure_rate_per_s=1 / 3600)
    policy.learn(Costs(stall_s=1.0, mtbf_s=3600.0, total_steps=1000))
    policy.wait_s(0, 0.0)
    assert 0 < policy.wait_s(100, 60.0) < 1  # the run takes 600 s
    assert policy.wait_s(120, 72.0) < 0
    policy.taken(120, 72.0)
    assert policy.wait_s(121, 72.6) == pytest.approx(600.0 - 72.6)


# -- what is measured -------------------------------------------------------------------------------------------------


def test_the_robust_mean_forgets_outliers() -> None:
    mean = RobustMean()
    assert mean.value is None
    for value in (5.0, *[0.1] * 6, math.nan, 100.0, *[0.1] * 6):
        mean.add(value)
    assert mean.value == pytest.approx(0.1)


def test_the_failure_rate_learns_from_events() -> None:
    rate = FailureRate(machines=2)
    assert rate.mtbf_s == 3600.0
    rate.ran(3600.0)
    assert rate.mtbf_s == 7200.0
    rate.failed(3)
    assert rate.mtbf_s == 1800.0
    again = FailureRate(machines=2)
    again.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    assert again.mtbf_s == rate.mtbf_s
    rate.advised()
    assert rate.mtbf_s == 600.0
    rate.failed(1000)
    assert rate.mtbf_s < 600.0
