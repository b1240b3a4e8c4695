"""What the nodes of other hosts than rank 0's still owe of a run, from an attempt in which a rank 0 was there.

Rank 0 looks at its own host, memory nodes and the durable tier. Who launches ranks may deal them to the hosts in
another order than before: then the newest snapshot is in the memory of a host that nobody asks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_spot.client.starting import attach
from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.hosts import place_of
from lightning_spot.run import patience
from lightning_spot.run.location import Location

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


def bring_from_other_hosts(trainer: pl.Trainer, location: Location) -> None:
    """Have it brought to the tiers below before anybody looks there; what is not, is said. Every rank calls it.

    Args:
        trainer: whose ranks they are.
        location: of the run.
    """
    ranks = Agreement(trainer)
    if ranks.size == 1:
        return
    places = ranks.gather(place_of(location))
    if len(set(places)) == 1:  # all are on rank 0's host, which is asked by whoever looks
        return
    place = places[ranks.rank]
    leads = place != places[0] and places.index(place) == ranks.rank
    everyones = ranks.gather(_late(location) if leads else [])
    for rank, late in enumerate(everyones if ranks.rank == 0 else ()):
        for line in late:
            logger.warning(
                "lightning_spot: the node on the host of rank %d has not brought below all that an earlier attempt may"
                " have left there: %s. This attempt goes on from what is there. To go on from that host's snapshot,"
                " start the run with rank 0 on it",
                rank,
                line,
            )


def _late(location: Location) -> list[str]:
    """What the node of this host has not brought below in time, one line each."""
    try:
        host = attach(location.url, location.name)
    except NodeUnreachable as error:  # there is one, or slots of one
        return [str(error)]
    except (SpotError, OSError) as error:
        logger.debug("no node can be had here: %s", error)
        return []
    if host is None:
        return []
    try:
        # What hosts bring together is not waited for: no host has all of it.
        return host.flush(patience.PATIENCE.answer_s) if host.owes() else []
    except SpotError as error:
        return [str(error)]
    finally:
        host.disconnect()
