"""When the parts of a snapshot are copied in the iteration that follows it: measured, planned, and released in time."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol

from lightning_spot.staging.modes import BESIDE, MODES, Drift, Mode, ModeTrial, Partitions
from lightning_spot.staging.partitions import LEAST_BYTES, Partition, bucket_ends, by_bucket, by_idle_time
from lightning_spot.staging.profile import Clock, HostClock, Kind, Point, Profile, Profiler

logger = logging.getLogger(__name__)

P = ParamSpec("P")

BUCKET_BYTES = 25 * 1024 * 1024
"""What fills a bucket of gradients, where there is no DDP that says: its default."""

_PROFILED = 5
_MOST_BUCKETS = 32


class Held(Protocol):
    """Copies that wait for their place in the iteration."""

    def release(self, place: int) -> None:
        """Training has come to a place: what was held for it, or for one before it, may be copied."""


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


def _told(method: Callable[P, None]) -> Callable[P, None]:
    """Have training go on where it cannot be followed: then nothing is spread over its iterations any more."""

    @functools.wraps(method)
    def told(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            method(*arguments, **named)
        except Exception as error:
            schedule: Any = arguments[0]
            schedule.turn_off(error)

    return told


class Schedule:
    """Spreads copying over iterations. One iteration is that from one optimizer step to the next.

    Training tells it where it is. It measures some iterations, plans from them, and with ``"auto"`` tries each mode in
    some snapshots and keeps the one with the shortest iterations. When iterations take another time than before, it
    begins anew. A place that is not reached, or out of order, holds nothing back for long: a later one releases it, the
    time does, or the optimizer's step.

    Args:
        partitions: the user's setting.
        clock: measures iterations.

    Attributes:
        owned: finds the addresses of the storages that the optimizer will overwrite, first ones first, each with the
            number of the parameter to which it belongs. Asked where the pieces are not those of the last snapshot.
    """

    def __init__(self, partitions: Partitions = "auto", clock: Clock | None = None) -> None:
        self.setting = partitions
        self.owned: Callable[[], Mapping[int, int]] = dict
        self._clock: Clock = clock if clock is not None else HostClock()
        self._gradient_bytes: Callable[[], Sequence[int]] = tuple
        self._bucket_bytes = BUCKET_BYTES
        self._profile: Profile | None = None
        self._profiler: Profiler | None = None
        self._trial: ModeTrial | None = None
        self._kept: Mode | None = None
        self._used: Mode | None = None
        self._buckets: dict[int, int] = {}
        self._ends: list[int] = []
        self._last: tuple[Any, tuple[Partition, ...]] | None = None
        self._measured: deque[tuple[Any, Any, Mode | None]] = deque()
        self._over: Any = None
        self._is_disturbed = False
        self._may_stand = False
        self._reached, self._batch, self._is_open = 0, -1, False
        self._jobs: list[Held] = []
        self._drift = Drift()

    # -- told by training -----------------------------------------------------------------------------------------

    def begin(
        self,
        gradient_bytes: Callable[[], Sequence[int]],
        bucket_bytes: int = BUCKET_BYTES,
        clock: Clock | None = None,
        *,
        may_stand: bool = False,
    ) -> None:
        """Training begins, with the parameters of a model.

        Args:
            gradient_bytes: tells those of each parameter; asked when iterations are known.
            bucket_bytes: what fills a bucket of gradients.
            clock: measures iterations from now on.
            may_stand: whether training may stand still for a snapshot: on a CPU, and nobody waits for it meanwhile.
        """
        self._gradient_bytes, self._bucket_bytes = gradient_bytes, bucket_bytes
        self._clock = clock if clock is not None else self._clock
        self._may_stand = may_stand
        self._reached, self._batch, self._is_open = 0, -1, False
        self._jobs.clear()
        self._drift = Drift()
        self._measure_anew()

    def end(self) -> None:
        """Training ends: what is copied from now on goes at once."""
        self.begin(tuple, self._bucket_bytes)
        self._profiler = None

    @_told
    def iteration_begins(self) -> None:
        """The optimizer has stepped, and a snapshot has begun or not."""
        self._reached, self._batch, self._is_open = 0, -1, True
        if self._profiler is not None:
            self._profiler.begin()

    @_told
    def batch_begins(self) -> None:
        """The forward pass of the next micro-batch begins."""
        self._batch += 1
        self._at(Kind.FORWARD)

    @_told
    def backward_begins(self) -> None:
        """The backward pass begins."""
        self._at(Kind.BACKWARD)

    @_told
    def gradient_ready(self, gradient: int) -> None:
        """The gradient of a parameter is accumulated. Called from the thread that computes it."""
        self._at(Kind.GRADIENT, gradient)

    @_told
    def backward_ends(self) -> None:
        """All gradients of a micro-batch are there."""
        self._at(Kind.BACKWARD_END)

    @_told
    def stepping(self) -> None:
        """The optimizer is about to step, or something else to change what is copied: nothing is held from here on."""
        if self._is_open and self._profiler is not None:
            self._profiler.stepping()
        self._is_open = False
        self._jobs.clear()

    @_told
    def disturbed(self) -> None:
        """Other work than training took time in this iteration: it does not count."""
        self._is_disturbed = True
        if self._profiler is not None:
            self._profiler.forget()

    @_told
    def iteration_ends(self) -> None:
        """The optimizer has stepped; before a snapshot begins, which is part of the iteration that follows."""
        if not self._measures:
            return
        begun, self._over = self._over, self._clock.mark()
        used, self._used = self._used, None
        disturbed, self._is_disturbed = self._is_disturbed, False
        if begun is not None:
            self._measured.append((None if disturbed else begun, self._over, used))
        while self._measured and self._clock.is_over(self._measured[0][1]):
            first, last, mode = self._measured.popleft()
            self._learn(self._clock.between(first, last)[0] if first is not None else None, mode)
        if self._profiler is not None and self._profiler.iterations() > _PROFILED:  # the first one is slow
            self._plan(self._profiler)

    def turn_off(self, error: Exception) -> None:
        """Copy all at once from now on. What is held goes when its time is up, or the optimizer steps."""
        self.setting = "eager"
        self._jobs.clear()
        self._measure_anew()
        logger.warning(
            "lightning_spot: copying is not spread over iterations any more, training goes on: %s: %s",
            type(error).__name__,
            error,
        )

    # -- asked by whoever watches gradients -------------------------------------------------------------------------

    @property
    def mode(self) -> Mode | None:
        """The mode that is kept; ``None`` while that is not known."""
        if self.setting != "auto":
            return self.setting
        return self._kept

    @property
    def watched(self) -> frozenset[int] | None:
        """Numbers of the parameters of whose gradients it wants to hear; ``None`` for all of them."""
        if self.mode in ("eager", "still"):
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
        mode = self._next_mode()
        if mode == "still" and self._may_stand:
            return _STILL
        if mode in ("eager", "still") or profile is None:
            return None
        addresses = list(addresses)
        key = (mode, *addresses, *sizes)
        if self._last is None or self._last[0] != key:
            self._last = (key, tuple(self._partitions(profile, mode, addresses, sizes)))
        return Timetable(self._last[1], profile.length_s)

    def attach(self, job: Held) -> None:
        """Tell ``job`` from now on, until the optimizer steps; training may be in the middle of the iteration."""
        self._jobs.append(job)
        if self._is_open and self._reached:
            job.release(self._reached)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """Whether iterations are measured."""
        return self.setting not in ("eager", "still")

    def _measure_anew(self) -> None:
        self._profiler = Profiler(self._clock) if self._measures else None
        self._profile = self._trial = self._kept = self._used = self._over = self._last = None
        self._buckets, self._ends = {}, []
        self._measured.clear()

    def _at(self, kind: Kind, gradient: int = -1) -> None:
        if not self._is_open:
            return
        point = Point(self._batch, kind, gradient)
        if self._profiler is not None:
            self._profiler.reached(point)
        place = self._profile.places.get(point, 0) if self._profile is not None else 0
        if place > self._reached:
            self._reached = place
            for job in self._jobs:
                job.release(place)

    def _plan(self, profiler: Profiler) -> None:
        """Enough is recorded: keep the ends of buckets, and use the rest no more."""
        ready = profiler.profile().gradients()
        nbytes = self._gradient_bytes()
        sizes = [nbytes[gradient] for gradient in ready]
        limit = max(self._bucket_bytes, sum(sizes) // _MOST_BUCKETS)
        begin = 0
        for bucket, end in enumerate(bucket_ends(sizes, limit, LEAST_BYTES)):
            self._buckets.update(dict.fromkeys(ready[begin : end + 1], bucket))
            self._ends.append(ready[end])
            begin = end + 1
        wanted = frozenset(self._ends)
        self._profile = profiler.profile(lambda point: point.kind is not Kind.GRADIENT or point.gradient in wanted)
        self._profiler = None
        modes = MODES if self._may_stand else BESIDE
        self._trial = ModeTrial(modes, usual_s=self._profile.length_s) if self.setting == "auto" else None

    def _learn(self, seconds: float | None, mode: Mode | None) -> None:
        trial = self._trial
        if trial is not None:
            trial.add(mode, seconds)
            if trial.best is not None:
                self._kept, self._trial = trial.best, None
        elif self._profile is not None and seconds is not None and self._drift.add(seconds):
            self._measure_anew()

    def _next_mode(self) -> Mode:
        mode = self._trial.take() if self._trial is not None else self.mode
        self._used = chosen = mode or "eager"
        return chosen

    def _partitions(
        self, profile: Profile, mode: Mode, addresses: Sequence[int], nbytes: Sequence[int]
    ) -> list[Partition]:
        owned = self.owned()
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
            found = [profile.places.get(Point(batch, Kind.GRADIENT, gradient)) for batch in batches]
            latest = max(latest, next((place for place in found if place is not None), latest))
            places.append(latest)
        return places
