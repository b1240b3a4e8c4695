"""What a user has set for the snapshots of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_spot.capture.host_link import RingSettings
from lightning_spot.interval.policy import IntervalPolicy
from lightning_spot.staging.modes import Partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSettings:
    """How the snapshots of a run are taken.

    Attributes:
        policy: that decides when.
        ring: how the ring on this host is opened.
        on_full: what to do when all slots are dirty: ``"skip"`` this snapshot, or ``"wait"`` for the flusher.
        flush_timeout_s: how long the end waits until all is durable, seconds.
        partitions: how copying is spread over the iteration that follows.
    """

    policy: IntervalPolicy
    ring: RingSettings
    on_full: Literal["skip", "wait"]
    flush_timeout_s: float
    partitions: Partitions
