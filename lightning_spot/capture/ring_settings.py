"""What the ring on this host is opened with, and its opening."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spot.config import MAX_STALL_S
from lightning_spot.image.packing import Compression
from lightning_spot.memory.host import Host
from lightning_spot.run.location import Location


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSettings:
    """What a ring on this host is opened with.

    Attributes:
        slots: of the ring.
        beyond: whether it may have more of them for a GPU whose snapshots overlap.
        memory_bytes: limit of their memory.
        idle_timeout_s: its node ends when no trainer came for so long.
        keep: snapshots that each tier keeps.
        strict: whether to raise where a warning would do.
        durable_every_s: least seconds between two snapshots brought to the durable tier, see :class:`RunInfo`.
        compression: how what changed goes to memory nodes behind, see :class:`RunInfo`.
        replicas: how many of them each snapshot is kept at.
        max_stall_s: how long a call to the ring may keep the training thread.
        device_buffer_bytes: of the buffer on each GPU, see :class:`~lightning_spot.staging.copier.Copier`; 0 for none.
    """

    slots: int
    memory_bytes: int
    idle_timeout_s: float
    keep: int
    strict: bool
    durable_every_s: float | None = None
    compression: Compression = "auto"
    replicas: int = 1
    max_stall_s: float = MAX_STALL_S
    device_buffer_bytes: int = 0
    beyond: bool = False


def open_host(location: Location, settings: RingSettings) -> Host:
    """The ring on this host; one that an earlier node left in memory is taken over."""
    return location.open_host(
        slots=settings.slots,
        memory_bytes=settings.memory_bytes,
        idle_timeout_s=settings.idle_timeout_s,
        max_stall_s=settings.max_stall_s,
        strict=settings.strict,
    )
