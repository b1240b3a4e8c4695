"""When a job fails: lifetimes of machines as seen on spot markets, fleets of them, traces, and what else goes wrong."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from math import exp, gamma, inf, isfinite
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_spot.errors import SettingsError
from lightning_spot.interval.costs import PROCESS_MTBF_S, SERVER_MTBF_S

Array = NDArray[np.float64]


class Failure(IntEnum):
    """What a failure takes away; each takes what those before it take, too."""

    PROCESS = 0
    """The trainer's process. The server on its host stays, with all that is committed there."""
    MACHINE = 1
    """The trainer's machine, as a preemption does."""
    SERVER = 2
    """The machine at a time when the snapshot server is gone as well."""


class Lifetimes(Protocol):
    """How long one machine lives."""

    @property
    def mean_s(self) -> float:
        """Mean lifetime, seconds."""

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""


@dataclass(frozen=True, slots=True)
class Weibull:
    """A hazard that falls with age where ``k`` is below 1; 0.6 fits spot lifetimes of several clouds, 1 is constant."""

    mean_s: float
    k: float = 0.6

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""
        return random.weibull(self.k, shape) * (self.mean_s / gamma(1 + 1 / self.k))


Event = tuple[Array, NDArray[np.int64]]
"""Seconds from a start of the job to its next failure, and what that takes away (:class:`Failure`), each of shape
``(runs,)``."""


class Failures(Protocol):
    """When a job fails."""

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures."""

    def events(self, random: np.random.Generator, runs: int) -> Iterator[Event]:
        """The failures of ``runs`` independent runs, one of each at a time; endless."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A job on several machines, which fails when it loses one. Those that are left keep their age.

    Attributes:
        lifetimes: of each machine.
        machines: machines of the job.
        correlated: how many go at a time.
    """

    lifetimes: Lifetimes
    machines: int = 1
    correlated: int = 1

    @property
    def mtbf_s(self) -> float:
        """Each event takes ``correlated`` of ``machines`` machines, and each machine lives for the mean lifetime."""
        return self.lifetimes.mean_s * self.correlated / self.machines

    def events(self, random: np.random.Generator, runs: int) -> Iterator[Event]:
        """See :class:`Failures`. One machine's end takes others along, chosen at random."""
        left = self.lifetimes.draw(random, (runs, self.machines)) * self.correlated
        while True:
            up = left.min(axis=1)
            yield up, np.full(runs, Failure.MACHINE)
            left -= up[:, None]
            # The one that ends has nothing left and comes first; the others in an order of chance.
            order = np.where(left > 0, random.random(left.shape), -1.0).argsort(axis=1)[:, : self.correlated]
            fresh = self.lifetimes.draw(random, (runs, self.correlated)) * self.correlated
            np.put_along_axis(left, order, fresh, axis=1)


@dataclass(frozen=True, slots=True)
class Trace:
    """Times between recorded failures, one after the other; each run begins at another place, the first at the start.

    Attributes:
        uptimes_s: seconds from each start to the failure that ended it.
    """

    uptimes_s: tuple[float, ...]

    @property
    def mtbf_s(self) -> float:
        """Their mean."""
        return sum(self.uptimes_s) / len(self.uptimes_s)

    def events(self, random: np.random.Generator, runs: int) -> Iterator[Event]:
        """See :class:`Failures`."""
        recorded = np.array(self.uptimes_s)
        at = random.integers(0, len(recorded), runs)
        at[0] = 0
        while True:
            yield recorded[at % len(recorded)], np.full(runs, Failure.MACHINE)
            at += 1

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a CSV file with a column ``time`` (seconds, or ISO 8601): one row for each loss of a machine.

        Losses within three minutes of each other are one failure of the job.

        Raises:
            SettingsError: if the file is no such table.
        """
        try:
            with open(path, newline="") as file:
                times = sorted(_seconds(row["time"]) for row in csv.DictReader(file))
        except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:  # a short row has no time at all
            raise SettingsError(
                f"{path} cannot be used as a trace ({type(error).__name__}: {error}). Give a CSV file with a column"
                " 'time' (seconds or ISO 8601) and a row for each loss"
            ) from error
        events = [time for last, time in zip([-1e18, *times], times, strict=False) if time - last > _TOGETHER_S]
        gaps = [after - before for before, after in itertools.pairwise(events)]
        if not gaps:
            raise SettingsError(f"{path}: a trace needs two failures or more, at least three minutes apart")
        return cls(tuple(gaps))


@dataclass(frozen=True, slots=True)
class Mixed:
    """Losses of machines, and besides them crashes of the training process and of the snapshot server.

    The loss of a snapshot server alone takes nothing away: training goes on and the next snapshot goes to the durable
        tier.
    It matters where a machine is lost before the server is back and has a snapshot again.

    Attributes:
        machines: when machines are lost.
        process_mtbf_s: mean seconds between crashes of the process, at any time; infinite for never.
        server_mtbf_s: likewise of the snapshot server.
        server_back_s: from the loss of the snapshot server until another one has a snapshot.
    """

    machines: Failures
    process_mtbf_s: float = PROCESS_MTBF_S
    server_mtbf_s: float = SERVER_MTBF_S
    server_back_s: float = 0.0

    @property
    def mtbf_s(self) -> float:
        """Of machines and process: these stop the job."""
        return 1 / (1 / self.machines.mtbf_s + 1 / self.process_mtbf_s)

    @property
    def server_gone(self) -> float:
        """Probability that there is no snapshot server with a snapshot when a machine is lost."""
        return 1 - exp(-self.server_back_s / self.server_mtbf_s)

    def events(self, random: np.random.Generator, runs: int) -> Iterator[Event]:
        """See :class:`Failures`. Machines get older while a crashed process starts again."""
        own = np.random.default_rng(random.integers(2**63))  # machines are lost as they would be without crashes
        events = (up for up, _ in self.machines.events(random, runs))
        drawn, taken = [next(events)], np.zeros(runs, dtype=np.int64)  # each run comes to an uptime at another time
        left = drawn[0].copy()
        never = np.full(runs, inf)
        while True:
            crash = own.exponential(self.process_mtbf_s, runs) if self.process_mtbf_s < inf else never
            alone = np.where(own.random(runs) < self.server_gone, Failure.SERVER, Failure.MACHINE)
            lost = left <= crash
            up = np.where(lost, left, crash)
            yield up, np.where(lost, alone, Failure.PROCESS)
            left -= up
            taken += lost
            drawn += itertools.islice(events, max(0, taken.max() + 1 - len(drawn)))
            left[lost] = [drawn[taken[run]][run] for run in np.flatnonzero(lost)]


_TOGETHER_S = 180.0


def _seconds(text: str) -> float:
    try:
        value_s = float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
    if not isfinite(value_s):
        raise ValueError(f"{text!r} is no time")
    return value_s
