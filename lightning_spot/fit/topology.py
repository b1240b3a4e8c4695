"""Which ranks share a host, and how each reaches the server of its host, or starts one there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings, leave
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.starting import attach, start
from lightning_spot.errors import ServerUnreachableError, SpotError
from lightning_spot.fit.collectives import Agreement
from lightning_spot.image.manifest import MOST_HOSTS
from lightning_spot.memory.runs import RunInfo
from lightning_spot.protocol.record import find_record
from lightning_spot.run.export import this_host
from lightning_spot.run.location import Location

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Topology:
    """The ranks of a ``fit`` by their hosts.

    Attributes:
        ranks: that reach the server of their host, by host, that of rank 0 first.
        can_bring: whether all do, on several hosts, and may bring snapshots together to a snapshot server or, of a
            model in shards, to storage.
        mine: connection of this rank, from 1 on, to the server of its host; ``None`` if it has none.
        is_guest: whether this rank is on another host than rank 0.
        connect: makes the connection once more.
        count: how many hosts there are.
        token: of the attempt.
        why_not: of the first rank that reaches no server, why; ``""`` if all do.
        spread: where the snapshots of a model in shards are spread over snapshot servers: at how many each host's
            portion is to be kept; else 0.
    """

    ranks: tuple[tuple[int, ...], ...] = ((),)
    can_bring: bool = False
    mine: EmbeddedHost | None = None
    is_guest: bool = False
    connect: Callable[[], EmbeddedHost] = lambda: _nobody()
    count: int = 1
    token: str = field(default="", repr=False)
    why_not: str = ""
    spread: int = 0

    @classmethod
    def meet(
        cls,
        agreement: Agreement,
        location: Location,
        settings: RingSettings,
        attempt: Attempt | None,
        run: str,
        number: int,
        *,
        in_shards: bool = False,
    ) -> Topology:
        """Find out who is where. Every rank calls it, when the attempt has begun.

        Args:
            agreement: of the ranks.
            location: of the run.
            settings: of the ring.
            attempt: on rank 0.
            run: the run, as ``NAME@ID``.
            number: of the attempt.
            in_shards: whether each rank has a part of the model.
        """
        info = agreement.tell(attempt.info if attempt is not None else None)
        places = agreement.gather(place_of(location))
        is_guest = places[agreement.rank] != places[0]
        may_bring = settings.compression != "topk" if location.servers else in_shards

        def connect() -> EmbeddedHost:
            if is_guest:
                return _open(location, settings, info)
            host = attach(location.url, location.name, settings.server_call_timeout_s, revive=False)
            if host is None:
                raise ServerUnreachableError("there is no snapshot server on this host at present")
            host.run, host.attempt = run, number
            return host

        mine: EmbeddedHost | None = None
        problem = "it is on another host than rank 0" if attempt is None else "its server is not reached by other ranks"
        if attempt is None and (may_bring or not is_guest):
            try:
                mine = connect()
            except (SpotError, OSError) as error:
                logger.debug("no share of snapshots is written here: %s", error)
                problem = str(error)
        here = isinstance(attempt.writer.host, EmbeddedHost) if attempt is not None else mine is not None
        problems = agreement.gather("" if here else problem)
        everyones = [not each for each in problems]
        by_place: dict[str, list[int]] = {}
        for rank, (place, is_there) in enumerate(zip(places, everyones, strict=True)):
            if is_there and everyones[0]:
                by_place.setdefault(place, []).append(rank)
        ranks = tuple(map(tuple, by_place.values())) or ((),)
        can_bring = may_bring and all(everyones) and 1 < len(ranks) <= MOST_HOSTS
        why_not = next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), "")
        spread = info.replicas if in_shards and can_bring and len(info.nodes) > info.replicas else 0
        return cls(ranks, can_bring, mine, is_guest, connect, len(set(places)), info.token, why_not, spread)

    def warmed_by(self, rank: int) -> float:
        """About the part of a snapshot for which a rank is to have a slot made, as the first one of another host."""
        ranks = next((each for each in self.ranks[1:] if self.can_bring and each[0] == rank), ())
        return len(ranks) / sum(map(len, self.ranks)) if ranks else 0.0

    def leave(self) -> None:
        """On a rank that writes no share: let the server of its host go."""
        if self.mine is not None:
            if self.is_guest:
                leave(self.mine, complete=True)
            self.mine.disconnect()
            self.mine = None


def _open(location: Location, settings: RingSettings, info: RunInfo) -> EmbeddedHost:
    """The server of a host that rank 0 is not on; it brings nothing anywhere but what the ranks here write."""
    host = start(
        location.url,
        location.name,
        slots=settings.slots,
        memory_bytes=settings.memory_bytes,
        server_idle_timeout_s=settings.server_idle_timeout_s,
        server_call_timeout_s=settings.server_call_timeout_s,
    )
    try:
        host.open_run(replace(info, nodes=(), durable_url=None, carry=False))
    except BaseException:
        host.disconnect()
        raise
    return host


def place_of(location: Location) -> str:
    """The same for ranks that would reach one local server: one kernel, and one runtime directory on it."""
    try:
        folder = find_record(location.url).folder.stat()
    except (SpotError, OSError) as error:  # then it has no server, and no other rank has the same place
        logger.debug("no server can be had here: %s", error)
        return secrets.token_hex(16)
    return f"{this_host().partition(' ')[0]} {folder.st_dev} {folder.st_ino}"


def _nobody() -> EmbeddedHost:
    raise ServerUnreachableError("there is no snapshot server on this host")
