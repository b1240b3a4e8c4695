"""What the nodes of several hosts still owe of a run is brought to the tiers below, where every host can read it.

Each host reads a snapshot by itself, and a node gives what it has in memory to its own host only. Who launches ranks
may also deal them to the hosts in another order than before: then the newest snapshot is where rank 0 does not look.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.starting import attach
from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.hosts import place_of
from lightning_spot.run import patience
from lightning_spot.run.location import Location

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

_LONGEST_S = 600.0


def bring_below(trainer: pl.Trainer, location: Location) -> None:
    """Have it brought there before anybody looks; what is not, is said. Every rank calls it.

    Args:
        trainer: whose ranks they are.
        location: of the run.
    """
    ranks = Agreement(trainer)
    if ranks.size == 1:
        return
    places = ranks.gather(place_of(location))
    if len(set(places)) == 1:  # this host's node is asked by whoever looks
        return
    leads = places.index(places[ranks.rank]) == ranks.rank
    everyones = ranks.gather(_late(location) if leads else [])
    for rank, late in enumerate(everyones if ranks.rank == 0 else ()):
        for line in late:
            logger.warning(
                "lightning_spot: the node on the host of rank %d has not brought below all that an earlier attempt may"
                " have left there: %s. This attempt goes on from what every host can read. To go on from that host's"
                " snapshot, mend that and start again",
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
        return _flushed(host)
    except SpotError as error:
        return [str(error)]
    finally:
        host.disconnect()


def _flushed(host: EmbeddedHost) -> list[str]:
    """Have a node bring what it owes; what is late is waited for as long as nothing fails."""
    deadline_s, late = time.monotonic() + _LONGEST_S, list[str]()
    while host.owes():  # what hosts bring together is not: no host has all of it
        late = host.flush(patience.PATIENCE.answer_s)
        if not late or time.monotonic() > deadline_s or any(tier.error for tier in host.tiers().values()):
            return late
    return []
