"""A job and what it costs to interrupt it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_spot.errors import SettingsError
from lightning_spot.interval.costs import Costs

Array = NDArray[np.float64]
Loss = Callable[[Array], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place outside the machine in which snapshots are safe.

    Attributes:
        name: for people.
        bytes_per_s: how fast a snapshot gets there, and back.
        price_per_hour: of having it, in any currency.
    """

    name: str
    bytes_per_s: float
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job. All times in seconds.

    Attributes:
        work_s: how long it trains undisturbed, without snapshots.
        steps: optimizer steps of it.
        stall_s: how long training waits for one snapshot.
        safe_s: from a snapshot's begin until it is safe outside the machine.
        drain_s: how long the slowest tier takes for one.
        restart_s: from a failure until machines run again.
        restore_s: from there until training goes on.
        price_per_hour: of all its machines and tiers, in any currency.
        loss: the loss at a share of the work (0 to 1), any shape in, the same out.
    """

    work_s: float
    steps: int = 20_000
    stall_s: float = 1.0
    safe_s: float = 1.0
    drain_s: float = 0.0
    restart_s: float = 0.0
    restore_s: float = 0.0
    price_per_hour: float = 0.0
    loss: Loss | None = None

    def __post_init__(self) -> None:
        wrong = [name for name in ("work_s", "steps") if not getattr(self, name) > 0]
        times = ("stall_s", "safe_s", "drain_s", "restart_s", "restore_s")
        wrong += [name for name in times if getattr(self, name) < 0]
        if wrong:
            raise SettingsError(f"a job with {wrong[0]}={getattr(self, wrong[0])} cannot be simulated")

    def costs(self, mtbf_s: float) -> Costs:
        """What a policy would measure in it."""
        return Costs(stall_s=self.stall_s, mtbf_s=mtbf_s, drain_s=self.drain_s, total_steps=self.steps)


def with_tiers(job: Job, state_bytes: float, tiers: list[Tier]) -> Job:
    """The same job with other tiers: safe as soon as the fastest has it, drained when the slowest has.

    Args:
        job: what else there is.
        state_bytes: size of a snapshot.
        tiers: at least one.
    """
    seconds = [state_bytes / tier.bytes_per_s for tier in tiers]
    return replace(
        job,
        safe_s=job.stall_s + min(seconds),
        drain_s=max(seconds),
        restore_s=job.restore_s + min(seconds),
        price_per_hour=job.price_per_hour + sum(tier.price_per_hour for tier in tiers),
    )
