"""Makes the slots of a ring before they are needed, so that no snapshot meets a cold one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning_spot.capture.leases import give_back
from lightning_spot.capture.views import SlotViews
from lightning_spot.errors import NodeUnreachable, RingFull, SnapshotTooLarge, SpotError, TierError
from lightning_spot.memory.host import Host, Lease
from lightning_spot.staging.copier import Copier

logger = logging.getLogger(__name__)

_ALLOCATE_S, _ALLOCATED_BYTES_PER_S = 60.0, 200e6  # a slot's pages are made by the kernel at 3 GB/s; swapping is slower


def make_slots(
    host: Host,
    nbytes: int,
    cuda: bool,
    views: SlotViews,
    copier: Copier,
    lose: Callable[[Host, SpotError], None],
) -> None:
    """Have every slot of a ring made, mapped and (for a GPU) pinned; nobody waits for it.

    Args:
        host: the ring.
        nbytes: expected size of a snapshot.
        cuda: whether tensors will come from a GPU.
        views: of the slots.
        copier: that pins them.
        lose: called if the ring is lost meanwhile.
    """
    leases: list[Lease] = []
    try:
        while True:
            leases.append(host.lease(nbytes, 0.0, limit_s=_ALLOCATE_S + nbytes / _ALLOCATED_BYTES_PER_S))
            view = views.of(host, leases[-1])
            if cuda:
                copier.pin(view)
    except NodeUnreachable as error:
        lose(host, error)
    except (RingFull, SnapshotTooLarge, TierError) as error:
        logger.debug("warmed %d slots: %s", len(leases), error)
    except Exception:
        logger.exception("lightning_spot: slots could not be warmed")
    finally:
        for lease in leases:
            give_back(host, lease)
