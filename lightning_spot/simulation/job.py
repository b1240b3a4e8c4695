"""A job, the tiers of its snapshots, and what it costs to interrupt it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_spot.errors import SettingsError
from lightning_spot.interval.costs import Costs, Failure, TierPace

Array = NDArray[np.float64]
Loss = Callable[[Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place in which snapshots are safe. It takes the newest one whenever it is free.

    Attributes:
        name: for people.
        drain_s: seconds it takes for one snapshot, and to read it back, at least 0.
        lag_s: from a snapshot's commit in the trainer's memory until the tier can begin with it, at least 0.
        survives: the worst failure that leaves its snapshots in place.
        price_per_hour: of having it, in any currency.
    """

    name: str
    drain_s: float = 0.0
    lag_s: float = 0.0
    survives: Failure = Failure.NODE
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if not (self.drain_s >= 0 and self.lag_s >= 0):
            raise SettingsError(f"a tier with drain_s={self.drain_s} and lag_s={self.lag_s} cannot be simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A training job. All times in seconds.

    Attributes:
        work_s: how long it trains undisturbed, without snapshots.
        steps: optimizer steps of it.
        stall_s: how long training waits for one snapshot, which is in memory when that ends.
        tiers: where its snapshots go, nearest first; one of them outlives every failure.
        restart_s: from the loss of a machine until machines run again; a process that crashed starts again at once.
        restore_s: from there until training goes on, without reading the snapshot.
        price_per_hour: of all its machines, in any currency.
        loss: the loss at a share of the work (0 to 1), any shape in, the same out.
    """

    work_s: float
    steps: int = 20_000
    stall_s: float = 1.0
    tiers: tuple[Tier, ...] = (Tier(name="storage"),)
    restart_s: float = 0.0
    restore_s: float = 0.0
    price_per_hour: float = 0.0
    loss: Loss | None = None

    def __post_init__(self) -> None:
        wrong = [name for name in ("work_s", "steps") if not getattr(self, name) > 0]
        wrong += [name for name in ("stall_s", "restart_s", "restore_s") if getattr(self, name) < 0]
        if wrong:
            raise SettingsError(f"a job with {wrong[0]}={getattr(self, wrong[0])} cannot be simulated")
        if all(tier.survives < Failure.NODE for tier in self.tiers):
            raise SettingsError("a job without storage cannot be simulated: nothing would outlive every failure")

    @property
    def whole_price_per_hour(self) -> float:
        """Of all its machines and tiers."""
        return self.price_per_hour + sum(tier.price_per_hour for tier in self.tiers)

    def costs(self, mtbf_s: float) -> Costs:
        """What a policy would measure in it."""
        paces = tuple(TierPace(drain_s=tier.drain_s, survives=tier.survives) for tier in self.tiers)
        return Costs(stall_s=self.stall_s, mtbf_s=mtbf_s, tiers=paces, total_steps=self.steps)


def chain(*tiers: Tier) -> tuple[Tier, ...]:
    """The memory of the job's own host and the given tiers behind it, nearest first.

    A tier gets a snapshot from the one before it, once it is whole there: so it is later by what that one takes, and
    cannot get a new one more often.
    """
    linked: list[Tier] = [Tier(name="memory of the host", survives=Failure.PROCESS)]
    for tier in tiers:
        before = linked[-1]
        lag_s = before.lag_s + before.drain_s
        linked.append(replace(tier, drain_s=max(tier.drain_s, before.drain_s), lag_s=lag_s))
    return tuple(linked)


def memory_node(snapshot_bytes: float, bytes_per_s: float, price_per_hour: float = 0.0) -> Tier:
    """A snapshot server on a machine of its own, ``bytes_per_s`` away."""
    drain_s = snapshot_bytes / bytes_per_s
    return Tier(name="snapshot server", drain_s=drain_s, survives=Failure.MACHINE, price_per_hour=price_per_hour)


def durable_tier(snapshot_bytes: float, bytes_per_s: float) -> Tier:
    """A bucket or file system that stores ``bytes_per_s``."""
    return Tier(name="storage", drain_s=snapshot_bytes / bytes_per_s)
