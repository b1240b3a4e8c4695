"""When machines are taken away: lifetimes in the shapes that are seen on spot markets, fleets of them, and traces."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from math import gamma
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_spot.errors import SettingsError

Array = NDArray[np.float64]


class Lifetimes(Protocol):
    """How long one machine lives."""

    @property
    def mean_s(self) -> float:
        """Mean lifetime, seconds."""

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """A constant hazard: age does not matter."""

    mean_s: float

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""
        return random.exponential(self.mean_s, shape)


@dataclass(frozen=True, slots=True)
class Weibull:
    """A hazard that falls with age where ``k`` is below 1; 0.6 fits spot lifetimes of several clouds."""

    mean_s: float
    k: float = 0.6

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""
        return random.weibull(self.k, shape) * (self.mean_s / gamma(1 + 1 / self.k))


@dataclass(frozen=True, slots=True)
class Bathtub:
    """Many die young, few in the middle, the rest at an age limit, as in Google's class of at most 24 hours."""

    mean_s: float
    early: float = 0.3

    def draw(self, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Lifetimes of new machines, seconds."""
        young = random.exponential(0.05, shape)
        old = np.maximum(1 - random.exponential(0.1, shape), 0.0)
        drawn = np.where(random.random(shape) < self.early, young, old)
        mean = self.early * 0.05 + (1 - self.early) * (1 - 0.1 * (1 - np.exp(-10.0)))
        return drawn * (self.mean_s / mean)  # type: ignore[no-any-return]


class Failures(Protocol):
    """When a job fails."""

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures."""

    def uptimes(self, random: np.random.Generator, runs: int) -> Iterator[Array]:
        """From one start of the job to its next failure, seconds, for ``runs`` independent runs at a time; endless."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A job on several machines, which fails when it loses one. Those that are left keep their age.

    Attributes:
        lifetimes: of each machine.
        nodes: machines of the job.
        together: how many go at a time.
    """

    lifetimes: Lifetimes
    nodes: int = 1
    together: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.together <= self.nodes:
            raise SettingsError(f"together={self.together}: of {self.nodes} nodes, between 1 and all go at a time")

    @property
    def mtbf_s(self) -> float:
        """Each event takes ``together`` of ``nodes`` machines, and each machine lives for the mean lifetime."""
        return self.lifetimes.mean_s * self.together / self.nodes

    def uptimes(self, random: np.random.Generator, runs: int) -> Iterator[Array]:
        """See :class:`Failures`. One machine's end takes others along, chosen at random."""
        left = self.lifetimes.draw(random, (runs, self.nodes)) * self.together
        while True:
            up = left.min(axis=1)
            yield up
            left -= up[:, None]
            # The one that ends has nothing left and comes first; the others in an order of chance.
            order = np.where(left > 0, random.random(left.shape), -1.0).argsort(axis=1)[:, : self.together]
            fresh = self.lifetimes.draw(random, (runs, self.together)) * self.together
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

    def uptimes(self, random: np.random.Generator, runs: int) -> Iterator[Array]:
        """See :class:`Failures`."""
        recorded = np.array(self.uptimes_s)
        at = random.integers(0, len(recorded), runs)
        at[0] = 0
        while True:
            yield recorded[at % len(recorded)]
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
        except (OSError, KeyError, ValueError) as error:
            raise SettingsError(
                f"{path} cannot be used as a trace ({type(error).__name__}: {error}). It is a CSV file with a column"
                " 'time', in seconds or ISO 8601, and a row for each loss of a machine"
            ) from error
        events = [time for last, time in zip([-1e18, *times], times, strict=False) if time - last > _TOGETHER_S]
        gaps = [after - before for before, after in itertools.pairwise(events)]
        if not gaps:
            raise SettingsError(f"{path}: a trace needs two failures or more, at least three minutes apart")
        return cls(tuple(gaps))


_TOGETHER_S = 180.0


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
