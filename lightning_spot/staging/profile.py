"""Where the time of an iteration goes, from one optimizer step to the next: measured over several of them. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

from lightning_spot import threads
from lightning_spot.staging.partitions import Window

_FORWARD_SLICES = 4
"""A forward pass has no places of its own that could be watched without touching the model: its time is cut instead."""


class Kind(IntEnum):
    """What happens at a place of an iteration."""

    BEGIN = 0
    """The last optimizer step is over: data is loaded."""
    FORWARD = 1
    BACKWARD = 2
    GRADIENT = 3
    """The gradient of one parameter is ready."""
    BACKWARD_END = 4


class Point(NamedTuple):
    """A place of an iteration.

    Attributes:
        batch: number of the micro-batch in it, from 0; -1 before the first.
        kind: what happens there.
        gradient: number of the parameter, for a gradient.
    """

    batch: int
    kind: Kind
    gradient: int = -1


START = Point(-1, Kind.BEGIN)


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
        last = {point.gradient: place for point, place in self.places.items() if point.kind is Kind.GRADIENT}
        return sorted(last, key=last.__getitem__)


class Profiler:
    """Records iterations. A point that is reached again (checkpointed activations) counts the first time.

    Args:
        clock: that measures.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[Point, Any] | None = None
        self._whole: list[tuple[dict[Point, Any], Any]] = []

    def begin(self) -> None:
        """An iteration begins; one that has not come to its optimizer step is forgotten."""
        self._open = {START: self._clock.mark()}

    def reached(self, point: Point) -> None:
        """Training has come to ``point``."""
        if self._open is not None and point not in self._open:
            self._open[point] = self._clock.mark()

    def stepping(self) -> None:
        """The optimizer is about to step for the first time in this iteration."""
        if self._open is not None:
            self._whole.append((self._open, self._clock.mark()))
            self._open = None

    def forget(self) -> None:
        """The iteration at hand was no usual one."""
        self._open = None

    def iterations(self) -> int:
        """How many are recorded and over."""
        return sum(self._clock.is_over(end) for _, end in self._whole)

    def profile(self, keep: Callable[[Point], bool] = lambda _point: True) -> Profile:
        """What is usual: points that most iterations came to, and the medians of their times.

        Args:
            keep: whether a point is wanted; the time after one that is not belongs to the one before it.
        """
        over = [(points, end) for points, end in self._whole if self._clock.is_over(end)]
        offsets: dict[Point, list[float]] = {}
        times: dict[Point, list[tuple[float, float]]] = {}
        for points, end in over:
            kept = [(point, mark) for point, mark in points.items() if point is START or keep(point)]
            for (point, mark), (_, following) in pairwise([*kept, (START, end)]):
                offsets.setdefault(point, []).append(self._clock.between(points[START], mark)[0])
                times.setdefault(point, []).append(self._clock.between(mark, following))
        usual = [point for point, found in offsets.items() if 2 * len(found) > len(over)]
        usual.sort(key=lambda point: (median(offsets[point]), point))
        usual.sort(key=lambda point: point is not START)
        windows = tuple(window for place, point in enumerate(usual) for window in _windows(place, point, times[point]))
        length_s = median(self._clock.between(points[START], end)[0] for points, end in over)
        batches = 1 + max((point.batch for point in usual), default=0)
        return Profile({point: place for place, point in enumerate(usual)}, windows, length_s, max(1, batches))


def _windows(place: int, point: Point, times: Sequence[tuple[float, float]]) -> Iterator[Window]:
    seconds, idle_s = median(found[0] for found in times), median(found[1] for found in times)
    slices = _FORWARD_SLICES if point.kind is Kind.FORWARD else 1
    for number in range(slices):
        yield Window(place, seconds * number / slices, idle_s / slices)
