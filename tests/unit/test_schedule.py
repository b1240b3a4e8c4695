"""The schedule: what it learns from iterations on a clock of its own, what it plans, and when it lets go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_spot.capture.partitions import LEAST_BYTES, Mode, ModeTrial
from lightning_spot.capture.schedule import (
    START,
    GradientWatch,
    HostClock,
    PlaceKind,
    Point,
    Profiler,
    Schedule,
    Timetable,
)

MIB = LEAST_BYTES
GRADIENTS = [30 * MIB, 10 * MIB, 30 * MIB, 2 * MIB]  # of parameters 0 to 3; ready from the last to the first
PIECES = [(100 + number, 3 * nbytes) for number, nbytes in enumerate(GRADIENTS)]  # a parameter with its two moments
PIECES_OF: tuple[Sequence[int], ...] = tuple(zip(*PIECES, strict=True))


class Training:
    """Iterations on a clock that is set: the forward pass takes 1 s a micro-batch, each gradient takes 2 s."""

    def __init__(self, copy_mode: str = "auto", batches: int = 1, *, may_stand: bool = False) -> None:
        self.now_s = self.used_s = 0.0
        self.batches = batches
        self.schedule = Schedule(copy_mode, HostClock(lambda: self.now_s, lambda: self.used_s, processors=2))
        self.schedule.begin(Gradients(), lambda: {100 + number: number for number in range(4)}, may_stand=may_stand)
        self.job = Job()

    def works(self, seconds: float, processors: float = 1.0) -> None:
        self.now_s += seconds
        self.used_s += processors * seconds

    def iteration(self, *, snapshot: bool = False, gradients: Sequence[int] = (3, 2, 1, 0)) -> Timetable | None:
        """One iteration, maybe with a snapshot; its plan."""
        schedule, self.job = self.schedule, Job()
        plan = schedule.timetable(*PIECES_OF) if snapshot else None
        if snapshot:
            schedule.attach(self.job.release)
        schedule.iteration_begins()
        self.works(0.5)
        for _ in range(self.batches):
            schedule.reached(PlaceKind.FORWARD)
            self.works(1.0)
            schedule.reached(PlaceKind.BACKWARD)
            for gradient in gradients:
                self.works(2.0)
                schedule.reached(PlaceKind.GRADIENT, gradient)
            schedule.reached(PlaceKind.BACKWARD_END)
        schedule.stepping()
        self.works(0.25)
        schedule.iteration_ends()
        return plan

    def profiled(self) -> Training:
        for _ in range(6):
            self.iteration()
        return self


class Gradients(GradientWatch):
    """Those of a model that is not there."""

    def __init__(self) -> None:
        super().__init__((), lambda _: None)

    def nbytes(self) -> list[int]:
        return GRADIENTS

    def keep(self, wanted: frozenset[int] | None) -> None:
        """None has hooks."""


class Job:
    def __init__(self) -> None:
        self.places: list[int] = []

    def release(self, place: int) -> None:
        self.places.append(place)


def bytes_of(plan: Timetable | None) -> list[int]:
    return [sum(span.nbytes for span in part.spans) for part in plan.partitions]


def test_everything_goes_at_once_until_iterations_are_known() -> None:
    training = Training("asymmetric")
    assert training.schedule.watched is None
    for _ in range(6):
        assert training.iteration(snapshot=True) is None
    assert training.iteration(snapshot=True) is not None


def test_eager_measures_nothing() -> None:
    training = Training("eager")
    assert training.schedule.watched == frozenset()
    for _ in range(10):
        assert training.iteration(snapshot=True) is None
    assert training.schedule.mode == "eager"


def test_asymmetric_gives_each_window_its_share() -> None:
    training = Training("asymmetric").profiled()
    plan = training.iteration(snapshot=True)
    total = sum(nbytes for _, nbytes in PIECES)
    assert sum(bytes_of(plan)) == total
    assert plan.limit_s == 9.5
    # All windows are idle by half, here: 0.5 s of loading, 1 s of forward in four, 8 s of backward.
    windows = [window.idle_s for window in training.schedule._profile.windows]  # type: ignore[union-attr]
    assert sum(windows) == pytest.approx(4.75)
    assert windows[:5] == pytest.approx([0.25, 0.125, 0.125, 0.125, 0.125])
    first, *rest = bytes_of(plan)
    assert first == pytest.approx(total * 0.5 / 9.5, abs=2)
    assert max(rest) > 3 * first
    assert plan.partitions[0].spans[0].piece == 0


def test_a_window_in_which_all_processors_work_gets_nothing() -> None:
    training = Training("asymmetric")
    real = training.works
    training.works = lambda seconds, processors=1.0: real(seconds, 2.0 if seconds == 1.0 else processors)  # type: ignore[method-assign]
    training.profiled()
    plan = training.iteration(snapshot=True)
    places = training.schedule._profile.places  # type: ignore[union-attr]
    assert places[Point(0, PlaceKind.FORWARD)] not in [part.point for part in plan.partitions]


def test_backward_lets_each_bucket_go_with_its_gradients() -> None:
    training = Training("backward").profiled()
    # Ready are 3 (2 MiB, the small first bucket), 2 (30 MiB, the second), 1 and 0 (the third).
    assert training.schedule.watched == frozenset({3, 2, 0})
    plan = training.iteration(snapshot=True)
    assert [[span.piece for span in part.spans] for part in plan.partitions] == [[3], [2], [0, 1]]
    places = training.schedule._profile.places  # type: ignore[union-attr]
    assert [part.point for part in plan.partitions] == [
        places[Point(0, PlaceKind.GRADIENT, gradient)] for gradient in (3, 2, 0)
    ]
    assert training.job.places[-1] >= plan.partitions[-1].point


def test_over_all_micro_batches() -> None:
    training = Training("backward", batches=3).profiled()
    plan = training.iteration(snapshot=True)
    places = training.schedule._profile.places  # type: ignore[union-attr]
    assert [part.point for part in plan.partitions] == [
        places[Point(batch, PlaceKind.GRADIENT, gradient)] for batch, gradient in ((0, 3), (1, 2), (2, 0))
    ]
    asymmetric = Training("asymmetric", batches=3).profiled()
    plan = asymmetric.iteration(snapshot=True)
    assert len(set(bytes_of(plan))) > 1
    places = asymmetric.schedule._profile.places  # type: ignore[union-attr]
    assert {batch for (batch, *_), place in places.items() if place in {p.point for p in plan.partitions}} >= {0, 1, 2}


def test_missing_micro_batches_and_gradients_block_nothing() -> None:
    training = Training("backward", batches=3).profiled()
    training.batches = 1
    training.iteration(snapshot=True, gradients=[2, 3])  # out of order, and two are missing
    job = training.job
    assert job.places == sorted(job.places)
    assert training.schedule._releases == []


def test_a_place_reached_twice_counts_once() -> None:
    """Checkpointed activations run the forward pass again; a second backward before the step comes after the first."""
    training = Training("backward").profiled()
    training.iteration(snapshot=True, gradients=[3, 3, 2, 3, 2, 1, 0, 0])
    assert training.job.places == sorted(set(training.job.places))


def test_what_follows_the_first_step_of_an_iteration_counts_not() -> None:
    """The closure of LBFGS, or a second optimizer: everything is copied by then."""
    training = Training("asymmetric").profiled()
    schedule = training.schedule
    schedule.timetable(*PIECES_OF)
    job = Job()
    schedule.attach(job.release)
    schedule.iteration_begins()
    schedule.reached(PlaceKind.FORWARD)
    schedule.stepping()
    told = list(job.places)
    schedule.reached(PlaceKind.BACKWARD)
    schedule.reached(PlaceKind.GRADIENT, 0)
    assert job.places == told


def test_small_states_are_copied_at_once() -> None:
    training = Training("asymmetric").profiled()
    assert training.schedule.timetable([100], [1000]) is None
    assert training.schedule.timetable([], []) is None


def test_storages_go_in_the_order_the_optimizer_overwrites_them() -> None:
    training = Training("asymmetric")
    training.schedule.begin(Gradients(), lambda: {each: number for number, (each, _) in enumerate(PIECES[::-1])})
    training.profiled()
    plan = training.iteration(snapshot=True)
    order = [span.piece for part in plan.partitions for span in part.spans]
    assert order == sorted(order, reverse=True)


COSTS = {"eager": (1.0, 0.5), "asymmetric": (1.1, 0.4), "backward": (1.2, 0.3), "blocking": (1.3, 0.1)}
"""Seconds that a snapshot adds to its own iteration, and to the one that follows."""


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("cheapest", ["eager", "asymmetric", "backward", "blocking"])
def test_auto_keeps_the_mode_that_costs_least_in_all(cheapest: Mode, every: int) -> None:
    costs = {**COSTS, cheapest: (1.25, 0.0)}
    training = Training("auto", may_stand=cheapest == "blocking").profiled()
    schedule = training.schedule
    assert schedule.mode is None
    used: list[Mode] = []
    left_s = 0.0
    for step in range(100 * every):
        if schedule.mode is not None:
            break
        own_s = 0.0
        if not step % every:
            schedule.timetable(*PIECES_OF)
            used.append(schedule._used)
            own_s, next_s = costs[used[-1]]
        training.works(0.5 * own_s + left_s)  # in the hook: the snapshot is part of the iteration that it begins
        left_s = next_s if not step % every else 0.0
        schedule.iteration_begins()
        training.works(1.0 + 0.5 * own_s)
        schedule.stepping()
        schedule.iteration_ends()
    assert used[:6] == ["eager", "eager", "asymmetric", "asymmetric", "backward", "backward"]
    assert ("blocking" in used) == (cheapest == "blocking")
    assert schedule.mode == cheapest
    assert schedule.watched == (frozenset() if cheapest in ("eager", "blocking") else frozenset({3, 2, 0}))
    for _ in range(5):
        plan = training.iteration(snapshot=True)
        assert (plan is None) == (cheapest == "eager")
        assert plan is None or plan.stands_still == (cheapest == "blocking")


def test_training_stands_still_only_where_it_may() -> None:
    training = Training("blocking", may_stand=True)
    assert training.schedule.watched == frozenset()
    plan = training.iteration(snapshot=True)
    assert plan.stands_still
    assert training.schedule.timetable([100], [1000]) is None  # so little is no matter
    assert Training("blocking").iteration(snapshot=True) is None


def test_disturbed_iterations_do_not_count() -> None:
    training = Training("auto").profiled()
    for _ in range(30):
        training.schedule.timetable(*PIECES_OF)
        training.schedule.iteration_begins()
        training.schedule.disturbed()
        training.works(5.0)
        training.schedule.iteration_ends()
    assert training.schedule.mode is None


def test_one_odd_iteration_decides_nothing() -> None:
    trial = ModeTrial(rounds=3)
    for seconds in (1.0, 50.0, 1.0):
        for mode, took_s in (("asymmetric", seconds), ("eager", 2.0), ("backward", 3.0)):
            for _ in range(2):
                trial.add(mode, took_s)
            assert trial.best is None or trial.best == "asymmetric"
    trial.add("eager", 1.0)
    assert trial.best == "asymmetric"


def test_a_point_that_few_iterations_reach_is_no_place() -> None:
    now_s = 0.0
    profiler = Profiler(HostClock(lambda: now_s, lambda: 0.0, processors=1))
    for number in range(5):
        profiler.begin()
        now_s += 1.0
        profiler.reached(Point(0, PlaceKind.FORWARD))
        if number == 0:
            profiler.reached(Point(0, PlaceKind.GRADIENT, 7))
        now_s += 1.0
        profiler.stepping()
    profile = profiler.profile()
    assert list(profile.places) == [START, Point(0, PlaceKind.FORWARD)]
    assert profile.length_s == 2.0
