"""When the parts of a snapshot are copied in the iteration that follows it: measured, planned, and released in time."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple, ParamSpec, Protocol

import torch
from torch.nn.parameter import is_lazy

from lightning_spot import threads
from lightning_spot.capture.partitions import (
    BESIDE,
    LEAST_BYTES,
    MODES,
    CopyMode,
    Mode,
    ModeTrial,
    Partition,
    Window,
    bucket_ends,
    by_bucket,
    by_idle_time,
)
from lightning_spot.say import say

_FORWARD_SLICES = 4
"""A forward pass has no places of its own that could be watched without touching the model: its time is cut instead."""
P = ParamSpec("P")
BUCKET_BYTES = 25 * 1024 * 1024
"""What fills a bucket of gradients, where there is no DDP that says: its default."""
_PROFILED = 5
_MOST_BUCKETS = 32


class GradientWatch:
    """Hooks at the parameters of a model. Copies and pickles of a parameter do not have them.

    Nothing is hooked to modules: with a hook anywhere in it, torch takes other ways through some of them.

    Args:
        parameters: of the model; numbered in their order.
        ready: told the number of a parameter each time its gradient is accumulated, in the thread that computes it.

    Attributes:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], ready: Callable[[int], None]) -> None:
        self.parameters = list(parameters)
        self._ready = ready
        self._hooks: dict[int, Callable[[], None]] = {}
        self._wanted: frozenset[int] | None = frozenset()

    def nbytes(self) -> list[int]:
        """Bytes of each gradient; 0 for one of a lazy module that has no shape yet, which nobody may touch."""
        return [0 if is_lazy(item) else item.numel() * item.element_size() for item in self.parameters]

    def keep(self, wanted: frozenset[int] | None) -> None:
        """Listen to these parameters only.

        Args:
            wanted: their numbers; ``None`` for all that are trained.
        """
        if wanted == self._wanted:
            return
        self._wanted = wanted
        numbers = frozenset(range(len(self.parameters))) if wanted is None else wanted
        for number in self._hooks.keys() - numbers:
            self._hooks.pop(number)()
        for number in numbers - self._hooks.keys():
            parameter = self.parameters[number]
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call] # torch's
                    lambda _, number=number: self._ready(number)
                )
                self._hooks[number] = hook.remove

    def close(self) -> None:
        """Listen no more."""
        self.keep(frozenset())


_NONE = GradientWatch((), lambda _: None)


class PlaceKind(IntEnum):
    """What happens at a place of an iteration."""

    BEGIN = 0
    """The last optimizer step is over: data is loaded."""
    FORWARD = 1
    """The forward pass of the next micro-batch begins."""
    BACKWARD = 2
    """The backward pass begins."""
    GRADIENT = 3
    """The gradient of one parameter is accumulated."""
    BACKWARD_END = 4
    """All gradients of a micro-batch are there."""


class Point(NamedTuple):
    """What happens at a place of an iteration; the place itself is its number, see :attr:`Profile.places`.

    Attributes:
        batch: number of the micro-batch in it, from 0; -1 before the first.
        kind: what happens there.
        gradient: number of the parameter, for a gradient.
    """

    batch: int
    kind: PlaceKind
    gradient: int = -1


START = Point(-1, PlaceKind.BEGIN)


class Clock(Protocol):
    """Measures the time between two marks in the order of the work, which for a GPU is not that of the host."""

    def mark(self) -> Any:
        """Now."""

    def is_over(self, mark: Any) -> bool:
        """Whether the time since an earlier mark until this one can be told."""

    def between(self, first: Any, last: Any) -> tuple[float, float]:
        """Seconds between two marks, and how many of them were idle."""


class HostClock:
    """Time of this process. Idle is the share of its processors that nobody of it used.

    Args:
        now: wall clock, seconds.
        used: processor time of the whole process, seconds.
        processors: this process may use.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.process_time,
        processors: int | None = None,
    ) -> None:
        self._now, self._used = now, used
        self._processors = processors if processors is not None else threads.processors()

    def mark(self) -> tuple[float, float]:
        """Now."""
        return self._now(), self._used()

    def is_over(self, mark: tuple[float, float]) -> bool:
        """Always."""
        return True

    def between(self, first: tuple[float, float], last: tuple[float, float]) -> tuple[float, float]:
        """Seconds between two marks, and how many of them were idle."""
        seconds = last[0] - first[0]
        return seconds, max(0.0, seconds - (last[1] - first[1]) / self._processors)


@dataclass(frozen=True, slots=True)
class Profile:
    """An iteration as it usually goes.

    Attributes:
        places: number of each point, in the order in which they are usually reached.
        windows: the time from each to the next.
        length_s: of an iteration, until the optimizer steps.
        batches: micro-batches in it.
    """

    places: dict[Point, int]
    windows: tuple[Window, ...]
    length_s: float
    batches: int

    def gradients(self) -> list[int]:
        """Numbers of the parameters whose gradients became ready, in the order of the last micro-batch of each."""
        last = {point.gradient: place for point, place in self.places.items() if point.kind is PlaceKind.GRADIENT}
        return sorted(last, key=last.__getitem__)


class Profiler:
    """Records iterations. A point that is reached again (checkpointed activations) counts the first time.

    Args:
        clock: that measures.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[Point, Any] = {}
        self._whole: list[tuple[dict[Point, Any], Any]] = []

    def begin(self) -> None:
        """An iteration begins; one that has not come to its optimizer step is forgotten."""
        self._open = {START: self._clock.mark()}

    def reached(self, point: Point) -> None:
        """Training has come to ``point``."""
        if self._open and point not in self._open:
            self._open[point] = self._clock.mark()

    def stepping(self) -> None:
        """The optimizer is about to step for the first time in this iteration."""
        if self._open:
            self._whole.append((self._open, self._clock.mark()))
        self.forget()

    def forget(self) -> None:
        """The iteration at hand was no usual one."""
        self._open = {}

    def over(self) -> list[tuple[dict[Point, Any], Any]]:
        """What is recorded and over: the points of each iteration, and its end."""
        return [(points, end) for points, end in self._whole if self._clock.is_over(end)]

    def profile(self, keep: Callable[[Point], bool] = lambda _point: True) -> Profile:
        """What is usual: points that most iterations came to, and the medians of their times.

        Args:
            keep: whether a point is wanted; the time after one that is not belongs to the one before it.
        """
        between, over = self._clock.between, self.over()
        found: dict[Point, list[tuple[float, tuple[float, float]]]] = {}  # how late each was, and the time after it
        for points, end in over:
            kept = [(point, mark) for point, mark in points.items() if point is START or keep(point)]
            for (point, mark), (_, following) in pairwise([*kept, (START, end)]):  # any point: only ``end`` counts
                found.setdefault(point, []).append((between(points[START], mark)[0], between(mark, following)))
        usual = [point for point, times in found.items() if 2 * len(times) > len(over)]
        usual.sort(key=lambda point: (point is not START, median(late_s for late_s, _ in found[point]), point))
        windows = (_windows(place, point, [after for _, after in found[point]]) for place, point in enumerate(usual))
        length_s = median(between(points[START], end)[0] for points, end in over)
        batches = 1 + max((point.batch for point in usual), default=0)
        places = {point: place for place, point in enumerate(usual)}
        return Profile(places, tuple(chain.from_iterable(windows)), length_s, max(1, batches))


def _windows(place: int, point: Point, times: Sequence[tuple[float, float]]) -> Iterator[Window]:
    seconds, idle_s = median(found[0] for found in times), median(found[1] for found in times)
    slices = _FORWARD_SLICES if point.kind is PlaceKind.FORWARD else 1
    for number in range(slices):
        yield Window(place, seconds * number / slices, idle_s / slices)


@dataclass(frozen=True, slots=True)
class Timetable:
    """What is copied when.

    Attributes:
        partitions: in the order in which they go; their spans name pieces by number.
        limit_s: when they go at the latest, whatever has been reached, seconds from now.
        stands_still: whether training waits, instead, until all is copied and sealed, and helps with all processors.
    """

    partitions: tuple[Partition, ...]
    limit_s: float
    stands_still: bool = False


_STILL = Timetable((), 0.0, stands_still=True)


def _or_turn_off(method: Callable[P, None]) -> Callable[P, None]:
    """Catch what a method raises: training goes on, and nothing is spread over its iterations any more."""

    @functools.wraps(method)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            method(*arguments, **named)
        except Exception as error:
            schedule: Any = arguments[0]
            schedule.turn_off(error)

    return guarded


class Schedule:
    """Spreads copying over iterations. One iteration is that from one optimizer step to the next.

    Training tells it where it is. It measures some iterations, plans from them, and with ``"auto"`` tries each mode in
    some snapshots and keeps the one with the shortest iterations. From then on it measures nothing. A place that is not
    reached, or out of order, holds nothing back for long: a later one releases it, the time does, or the optimizer's
    step.

    Args:
        copy_mode: the user's setting.
        clock: measures iterations.
    """

    def __init__(self, copy_mode: CopyMode = "auto", clock: Clock | None = None) -> None:
        self.setting = copy_mode
        self._owned: Callable[[], Mapping[int, int]] = dict
        self._clock: Clock = clock if clock is not None else HostClock()
        self._gradients, self._bucket_bytes = _NONE, BUCKET_BYTES
        # In turn: a profiler until there is a profile; with "auto" a trial until a mode is kept.
        self._profile: Profile | None = None
        self._profiler: Profiler | None = None
        self._trial: ModeTrial | None = None
        self._kept: Mode | None = None
        self._used: Mode | None = None  # by the snapshot with which this iteration has begun
        self._buckets: dict[int, int] = {}  # by the number of the parameter
        self._ends: list[int] = []  # the parameter whose gradient completes each bucket
        self._last: tuple[Any, tuple[Partition, ...]] | None = None  # partitions, by what they were made of
        self._measured: deque[tuple[Any, Any, Mode | None]] = deque()  # iterations that a GPU may still be at
        self._over: Any = None  # mark of the end of the last iteration
        self._is_disturbed = False
        self._may_stand = False
        # Of the iteration at hand: the last place, the micro-batch, and whether the optimizer has not stepped yet.
        self._reached, self._batch, self._is_open = 0, -1, False
        self._releases: list[Callable[[int], None]] = []

    # -- told by training -----------------------------------------------------------------------------------------

    def begin(
        self,
        gradients: GradientWatch,
        owned: Callable[[], Mapping[int, int]] = dict,
        bucket_bytes: int = BUCKET_BYTES,
        clock: Clock | None = None,
        *,
        may_stand: bool = False,
    ) -> None:
        """Training begins, with the parameters of a model.

        Args:
            gradients: watches theirs; told which ones are wanted, and closed at the :meth:`end`.
            owned: finds the addresses of the storages that the optimizer will overwrite, first ones first, each with
                the number of the parameter to which it belongs. Asked where the pieces are not those of the last
                snapshot.
            bucket_bytes: what fills a bucket of gradients.
            clock: measures iterations from now on.
            may_stand: whether training may stand still for a snapshot: on a CPU, and nobody waits for it meanwhile.
        """
        self._gradients, self._owned, self._bucket_bytes = gradients, owned, bucket_bytes
        self._clock = clock if clock is not None else self._clock
        self._may_stand = may_stand
        self._reached, self._batch, self._is_open = 0, -1, False
        self._releases.clear()
        self._measure_anew()
        gradients.keep(self.watched)

    def end(self) -> None:
        """Training ends: what is copied from now on goes at once."""
        self._gradients.close()
        self.begin(_NONE)
        self._profiler = None

    @_or_turn_off
    def iteration_begins(self) -> None:
        """The optimizer has stepped, and a snapshot has begun or not."""
        self._reached, self._batch, self._is_open = 0, -1, True
        if self._profiler is not None:
            self._profiler.begin()

    @_or_turn_off
    def reached(self, kind: PlaceKind, gradient: int = -1) -> None:
        """Training has come to a place of its iteration. Called from the thread that comes there.

        Args:
            kind: of the place.
            gradient: number of the parameter, for a gradient.
        """
        self._batch += kind is PlaceKind.FORWARD
        if not self._is_open:
            return
        point = Point(self._batch, kind, gradient)
        if self._profiler is not None:
            self._profiler.reached(point)
        place = self._profile.places.get(point, 0) if self._profile is not None else 0
        if place > self._reached:
            self._reached = place
            for release in self._releases:
                release(place)

    @_or_turn_off
    def stepping(self) -> None:
        """The optimizer is about to step, or something else to change what is copied: nothing is held from here on."""
        if self._is_open and self._profiler is not None:
            self._profiler.stepping()
        self._is_open = False
        self._releases.clear()

    @_or_turn_off
    def disturbed(self) -> None:
        """Other work than training took time in this iteration: it does not count."""
        self._is_disturbed = True
        if self._profiler is not None:
            self._profiler.forget()

    @_or_turn_off
    def iteration_ends(self) -> None:
        """The optimizer has stepped; before a snapshot begins, which is part of the iteration that follows."""
        if self._trial is not None:
            self._measure(self._trial)
        if self._profiler is not None and len(self._profiler.over()) > _PROFILED:  # the first one is slow
            self._plan(self._profiler)
        self._gradients.keep(self.watched)

    def _measure(self, trial: ModeTrial) -> None:
        begun, self._over = self._over, self._clock.mark()
        used, self._used = self._used, None
        disturbed, self._is_disturbed = self._is_disturbed, False
        self._measured.append((None if disturbed else begun, self._over, used))
        while self._measured and self._clock.is_over(self._measured[0][1]):
            first, last, mode = self._measured.popleft()
            trial.add(mode, self._clock.between(first, last)[0] if first is not None else None)
        if trial.best is not None:
            self._kept, self._trial = trial.best, None

    def turn_off(self, error: Exception) -> None:
        """Copy all at once from now on. What is held goes when its time is up, or the optimizer steps."""
        self.setting = "eager"
        self._releases.clear()
        self._measure_anew()
        text = "copies are no longer spread over iterations ({error}). Training waits longer for them. Report it."
        say(logging.WARNING, "copying-at-once", text, error=f"{type(error).__name__}: {error}")

    # -- what is known ----------------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode | None:
        """The mode that is kept; ``None`` while that is not known."""
        if self.setting != "auto":
            return self.setting
        return self._kept

    @property
    def watched(self) -> frozenset[int] | None:
        """Numbers of the parameters of whose gradients it wants to hear; ``None`` for all of them."""
        if self.mode in ("eager", "blocking"):
            return frozenset()
        return frozenset(self._ends) if self._profile is not None else None

    # -- asked by whoever copies ------------------------------------------------------------------------------------

    def timetable(self, addresses: Iterable[int], sizes: Sequence[int]) -> Timetable | None:
        """When each of some pieces is to be copied; ``None`` for all of them at once.

        Args:
            addresses: of the storages; looked at only where they are needed.
            sizes: of the pieces, in bytes.
        """
        profile = self._profile
        if sum(sizes) < 2 * LEAST_BYTES or (profile is None and self._measures):
            return None
        mode = self._trial.take() if self._trial is not None else self.mode or "eager"
        self._used = mode
        if mode == "blocking" and self._may_stand:
            return _STILL
        if mode in ("eager", "blocking") or profile is None:
            return None
        addresses = list(addresses)
        key = (mode, *addresses, *sizes)
        if self._last is None or self._last[0] != key:
            self._last = (key, tuple(self._partitions(profile, mode, addresses, sizes)))
        return Timetable(self._last[1], profile.length_s)

    def attach(self, release: Callable[[int], None]) -> None:
        """Call ``release`` with each place that training comes to, until the optimizer steps; at once with the last.

        What was held for that place, or for one before it, may be copied then.
        """
        self._releases.append(release)
        if self._is_open and self._reached:
            release(self._reached)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """Whether iterations are measured."""
        return self.setting not in ("eager", "blocking")

    def _measure_anew(self) -> None:
        self._profiler = Profiler(self._clock) if self._measures else None
        self._profile = self._trial = self._kept = self._used = self._over = self._last = None
        self._buckets, self._ends = {}, []
        self._measured.clear()

    def _plan(self, profiler: Profiler) -> None:
        """Enough is recorded: keep the ends of buckets, and use the rest no more."""
        ready = profiler.profile().gradients()
        nbytes = self._gradients.nbytes()
        sizes = [nbytes[gradient] for gradient in ready]
        limit = max(self._bucket_bytes, sum(sizes) // _MOST_BUCKETS)
        begin = 0
        for bucket, end in enumerate(bucket_ends(sizes, limit, LEAST_BYTES)):
            self._buckets.update(dict.fromkeys(ready[begin : end + 1], bucket))
            self._ends.append(ready[end])
            begin = end + 1
        wanted = frozenset(self._ends)
        self._profile = profiler.profile(lambda point: point.kind is not PlaceKind.GRADIENT or point.gradient in wanted)
        self._profiler = None
        modes = MODES if self._may_stand else BESIDE
        if self.setting == "auto":
            self._trial = ModeTrial(modes, usual_s=self._profile.length_s)
            self._over, self._is_disturbed = self._clock.mark(), False

    def _partitions(
        self, profile: Profile, mode: Mode, addresses: Sequence[int], nbytes: Sequence[int]
    ) -> list[Partition]:
        owned = self._owned()
        due = {address: rank for rank, address in enumerate(owned)}
        order = sorted(range(len(addresses)), key=lambda number: due.get(addresses[number], len(due)))
        sizes = [nbytes[number] for number in order]
        points = self._bucket_places(profile)
        if mode == "asymmetric" or not points:
            made = by_idle_time(sizes, profile.windows, LEAST_BYTES)
        else:
            buckets = [self._buckets.get(owned.get(addresses[number], -1)) for number in order]
            made = by_bucket(sizes, buckets, points, LEAST_BYTES)
        return [
            replace(part, spans=tuple(replace(span, piece=order[span.piece]) for span in part.spans)) for part in made
        ]

    def _bucket_places(self, profile: Profile) -> list[int]:
        """Where each bucket's turn is: with several micro-batches, the first buckets go in the first ones."""
        places, latest = [], 0
        for bucket, gradient in enumerate(self._ends):
            batches = range(bucket * profile.batches // len(self._ends), profile.batches)
            found = [profile.places.get(Point(batch, PlaceKind.GRADIENT, gradient)) for batch in batches]
            latest = max(latest, next((place for place in found if place is not None), latest))
            places.append(latest)
        return places
