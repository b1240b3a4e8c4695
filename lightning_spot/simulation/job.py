"""A job to simulate: its work, its tiers, its loss curve; and what to expect of it, without a simulation.

docs/intervals.md derives the expectations. ``period_s`` is the time from the begin of one snapshot to that of the next:
the work between them, and the time that training waits for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_spot.errors import SettingsError
from lightning_spot.interval.adaptive import YoungDaly
from lightning_spot.interval.costs import Costs, Failure, TierPace

Array = NDArray[np.float64]
Loss = Callable[[Array], Array]


def exponential_loss(rate: float) -> Loss:
    """``exp(-rate * x)``: ``rate`` is COCI's a times the run's length."""
    return lambda x: np.exp(-rate * x)


def power_loss(exponent: float = 0.5, offset: float = 0.01) -> Loss:
    """``(1 + x / offset) ** -exponent``: heavy-tailed, as scaling laws are."""
    return lambda x: (1 + x / offset) ** -exponent


def floor_loss(rate: float = 30.0) -> Loss:
    """A fall that is over early: the rest of the run is a plateau."""
    return lambda x: 0.5 + 0.5 * np.exp(-rate * x)


def stepwise_loss(drops: tuple[float, ...] = (0.3, 0.6, 0.8)) -> Loss:
    """A learning rate that is cut now and then: the loss falls anew after each cut."""
    begins = np.array([0.0, *drops])
    sizes = 0.5 ** np.arange(len(begins))

    def loss(x: Array) -> Array:
        since = np.maximum(np.asarray(x)[..., None] - begins, 0.0)
        return (sizes * np.exp(-12 * since)).sum(axis=-1)  # type: ignore[no-any-return]

    return loss


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
    survives: Failure = Failure.SERVER
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
        if all(tier.survives < Failure.SERVER for tier in self.tiers):
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


def server_tier(snapshot_bytes: float, bytes_per_s: float, price_per_hour: float = 0.0) -> Tier:
    """A snapshot server on a machine of its own, ``bytes_per_s`` away."""
    drain_s = snapshot_bytes / bytes_per_s
    return Tier(name="snapshot server", drain_s=drain_s, survives=Failure.MACHINE, price_per_hour=price_per_hour)


def storage_tier(snapshot_bytes: float, bytes_per_s: float) -> Tier:
    """A bucket or file system that stores ``bytes_per_s``."""
    return Tier(name="storage", drain_s=snapshot_bytes / bytes_per_s)


def lost_s(period_s: float, drain_s: float, lag_s: float = 0.0) -> float:
    """Mean running time that a failure takes away, to first order.

    Half a period, and the time until a snapshot is safe; where the tier is always busy, half of that time again, since
    the newest one waits for the one under way.
    """
    waits_s = drain_s / 2 if drain_s > period_s else 0.0
    return period_s / 2 + lag_s + drain_s + waits_s


def overhead(period_s: float, stall_s: float, mtbf_s: float, drain_s: float) -> float:
    """Share of the time that snapshots and failures take, to first order."""
    return stall_s / period_s + lost_s(period_s, drain_s) / mtbf_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What to expect of a run whose machines are lost now and then.

    Attributes:
        stall_s: training waits for one snapshot at most (if nothing overlaps).
        uploaded_s: from a snapshot's begin until it is outside of this machine.
        interval_s: from one snapshot to the next, as Young and Daly's rule chooses it.
        overhead: share of the time spent waiting for snapshots.
        loss_s: work that a preemption without notice takes away, on average.
        total: share of the time that both cost.
        behind_s: how much training the newest snapshot at each tier is behind, on average, by the tier's name.
    """

    stall_s: float
    uploaded_s: float
    interval_s: float
    overhead: float
    loss_s: float
    total: float
    behind_s: dict[str, float]


def outlook(job: SimulatedJob, mtbf_s: float) -> Outlook:
    """Say what to expect of a job that loses a machine every ``mtbf_s`` seconds."""
    costs = job.costs(mtbf_s)
    policy = YoungDaly()
    policy.learn(costs)
    interval_s, near_s = policy.interval_s(0), costs.drain_s
    return Outlook(
        stall_s=job.stall_s,
        uploaded_s=job.stall_s + near_s,
        interval_s=interval_s,
        overhead=job.stall_s / interval_s,
        loss_s=lost_s(interval_s, near_s),
        total=overhead(interval_s, job.stall_s, mtbf_s, near_s),
        behind_s={tier.name: lost_s(interval_s, tier.drain_s, tier.lag_s) for tier in job.tiers},
    )
