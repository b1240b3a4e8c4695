"""Which ranks share a place for their shards, and whether storage is the same place for all hosts."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from itertools import repeat

from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.stores import open_store
from lightning_spot.errors import CorruptSnapshotError, SettingsError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.protocol.process import this_boot
from lightning_spot.protocol.record import find_record
from lightning_spot.retry import retried, within
from lightning_spot.run.location import Location
from lightning_spot.server.host import Host
from lightning_spot.server.runs import RunInfo
from lightning_spot.session.collectives import Agreement
from lightning_spot.store.fences import ATTEMPTS_DIR, Claim, claim_name, digest_of
from lightning_spot.store.store import Store

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
SEEN_S = 90.0
"""A network mount may show so late what another host has written."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a ``fit`` by the rings that they write into.

    Attributes:
        places: the ranks of each ring, that of rank 0 first: those of one host, or one whose ring is in its process.
        rank: this one.
    """

    places: tuple[tuple[int, ...], ...] = ((0,),)
    rank: int = 0

    @classmethod
    def meet(cls, ranks: Agreement, location: Location, host: Host | None) -> Topology:
        """Find out who is where. Every rank calls it.

        Args:
            ranks: all of them.
            location: of the run.
            host: the ring that this rank writes into.
        """
        mine = place_of(location) if isinstance(host, LocalServer) else secrets.token_hex(16)
        by_place: dict[str, list[int]] = {}
        for rank, place in enumerate(ranks.gather(mine)):
            by_place.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, by_place.values())), ranks.rank)

    @property
    def is_one_place(self) -> bool:
        """Whether all ranks write into one ring."""
        return len(self.places) == 1

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this place."""
        return next(ranks for ranks in self.places if self.rank in ranks)

    @property
    def is_guest(self) -> bool:
        """Whether this rank writes into another ring than rank 0."""
        return self.here != self.places[0]

    def told(self, info: RunInfo, *, apart: bool) -> RunInfo:
        """What the ring of this place is told of the run.

        Args:
            info: of the run.
            apart: whether each place has shards of its own, of a sharded model.
        """
        number = self.places.index(self.here)
        return replace(info, hosts=len(self.places), apart=number if apart else None)

    def check_storage(self, ranks: Agreement, url: str, info: RunInfo) -> None:
        """Refuse storage that is not one for all places, each of which puts its shards there. Every rank calls it.

        Args:
            ranks: all of them.
            url: durable directory of the run.
            info: of the attempt, whose claim rank 0 has written there.

        Raises:
            SettingsError: if one place doesn't see there what rank 0 has written, or can't write there itself.
        """
        leads = self.is_guest and self.here[0] == self.rank
        ranks.together(lambda: _check_storage(url, info) if leads else None)


def place_of(location: Location) -> str:
    """The same for ranks that would reach one local server: one kernel, and one runtime directory on it."""
    try:
        folder = find_record(location.url).folder.stat()
        return f"{this_boot()} {folder.st_dev} {folder.st_ino}"
    except (SpotError, OSError) as error:  # then it has no server, and no other rank has the same place
        logger.debug("no server can be had here: %s", error)
        return secrets.token_hex(16)


def _check_storage(url: str, info: RunInfo) -> None:
    store = open_store(url)

    def look() -> None:
        if not _is_claimed(store, info):
            raise TierError(f"the claim of attempt {info.attempt}, which rank 0 has written there, is not seen")

    try:
        retried(look, within(SEEN_S, repeat(_LOOK_S)), lambda error: isinstance(error, TierError))
    except TierError as error:
        raise SettingsError(
            f"{url} cannot be used from every host ({error}). Each host writes its shards there: give a bucket, or a"
            " directory that all hosts mount, or a snapshot server (servers='spot://host:7070')"
        ) from error


def _is_claimed(store: Store, info: RunInfo) -> bool:
    """Whether this attempt's claim is seen, by its name: a mount may list it late. Then it is written once more."""
    folder = store.folder(ATTEMPTS_DIR, attempt=info.attempt, run_id=info.id)
    try:
        claim = Claim.from_json(folder.read(claim_name(info.attempt)))
    except (SnapshotNotFoundError, CorruptSnapshotError):
        return False
    if claim.digest != digest_of(info.token):
        return False
    store.claim(claim)  # which changes nothing, and shows that this host may write
    return True
