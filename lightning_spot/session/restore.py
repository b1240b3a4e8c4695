"""A snapshot opened once on each host for all ranks: what rank 0 tries, all try, and it counts when all have read it.

Rank 0 goes through the snapshots as a single rank would; each try is announced, so that all hosts read at the same
time. Where one rank cannot use it, all turn to the next one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lightning_spot.client.stores import open_store
from lightning_spot.errors import SpotError, TierError
from lightning_spot.run.export import Exporter, ExporterAddress, NotExportedError, import_snapshot
from lightning_spot.run.location import Location
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.run.sources import MemorySource, ScatteredSource, Source, StoreSource
from lightning_spot.run.survey import Survey
from lightning_spot.say import say
from lightning_spot.session.collectives import Agreement
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.store import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Try:
    """What all ranks are to try.

    Attributes:
        turn: counts the tries, from 1.
        manifest: of the snapshot, as JSON.
        stores: URL and tier of the stores that hold it, nearest first.
        shards: where none has all of it: URL and tier of a store, and the manifest of a shard there, as JSON.
    """

    turn: int
    manifest: str
    stores: tuple[tuple[str, str], ...]
    shards: tuple[tuple[str, str, str], ...] = ()


class SharedOpening:
    """The hosts of the ranks: on each of them its first rank opens a snapshot for all.

    Args:
        ranks: all of them; every rank makes this at the same time.
        location: of the run.
    """

    def __init__(self, ranks: Agreement, location: Location) -> None:
        self._ranks = ranks
        self._location = location
        self._exporter: Exporter | None = Exporter(ranks.size) if ranks.size > 1 else None
        addresses: list[ExporterAddress | None] = ranks.gather(
            self._exporter.address if self._exporter is not None else None
        )
        hosts = [address.host if address is not None else "" for address in addresses]
        leader = hosts.index(hosts[ranks.rank])
        self._leader = addresses[leader]
        self._leads = leader == ranks.rank
        if not self._leads:
            self.close()

    def close(self) -> None:
        """Give nothing to others any more."""
        if self._exporter is not None:
            self._exporter.close()
            self._exporter = None

    def open(self, tried: Try, source: Source | None = None, progress: Progress | None = None) -> OpenSnapshot:
        """Open the snapshot on this rank.

        Args:
            tried: what it is.
            source: where rank 0 has found it; other ranks look for themselves.
            progress: called with the number of bytes just checked.
        """
        manifest = Manifest.from_json(tried.manifest)
        if not self._leads and self._leader is not None:
            try:
                return import_snapshot(self._leader, tried.turn, manifest)
            except NotExportedError as error:
                text = "{error}; this rank reads the snapshot itself"
                say(logging.WARNING, "not-imported", text, about=tried.turn, error=error)
        if self._exporter is None:
            return self._open(tried, manifest, source, progress, shared=False)
        try:
            snapshot = self._open(tried, manifest, source, progress, shared=True)
        except Exception as error:
            problem = error if isinstance(error, SpotError) else SpotError(f"{type(error).__name__}: {error}")
            self._exporter.export(tried.turn, problem)
            raise
        self._exporter.export(tried.turn, snapshot)
        return snapshot

    def _open(
        self, tried: Try, manifest: Manifest, source: Source | None, progress: Progress | None, *, shared: bool
    ) -> OpenSnapshot:
        if source is not None:
            return source.open(manifest, progress, shared=shared)
        reasons = []
        memory = MemorySource(self._location.url, f"{manifest.run}@{manifest.run_id}")
        sources: list[Source] = [memory, *(StoreSource(open_store(url), tier) for url, tier in tried.stores)]
        if tried.shards:
            sources.append(_together(memory, tried))
        for place in sources:
            try:
                return place.open(manifest, shared=shared)
            except SpotError as error:
                reasons.append(str(error))
        raise TierError(f"{manifest.name} cannot be read on the host of rank {self._ranks.rank}: {'; '.join(reasons)}")


def _together(memory: MemorySource, tried: Try) -> ScatteredSource:
    """What the memory of this host has of a snapshot, and stores."""
    held: list[tuple[MemorySource | StoreSource, Manifest]] = []
    with contextlib.suppress(SpotError):
        held += ((memory, shard) for shard in memory.survey().shards)
    stores = {url: StoreSource(open_store(url), tier) for url, tier, _ in tried.shards}
    return ScatteredSource([*held, *((stores[url], Manifest.from_json(shard)) for url, _, shard in tried.shards)])


class Restore(Generic[T]):
    """Reads a snapshot on all ranks.

    Args:
        ranks: all of them.
        hosts: theirs.
        load: makes of an open snapshot what is wanted; on each rank.
    """

    def __init__(self, ranks: Agreement, hosts: SharedOpening, load: Callable[[OpenSnapshot], T]) -> None:
        self._ranks = ranks
        self._hosts = hosts
        self._load = load
        self._turn = 0

    def announce(
        self, found: Survey, source: Source, manifest: Manifest, progress: Progress | None = None
    ) -> OpenSnapshot:
        """On rank 0: open a snapshot on all ranks, which are told of it.

        Args:
            found: what the tiers hold.
            source: where rank 0 has found it.
            manifest: of the snapshot.
            progress: called with the number of bytes just checked.
        """
        self._turn += 1
        stores, shards = _stores(found, manifest, source), _shards(manifest, source)
        tried = Try(self._turn, manifest.to_json(), tuple(stores), tuple(shards))
        self._ranks.tell(tried)
        return self._open(tried, source, progress)

    def use(self, snapshot: OpenSnapshot) -> T:
        """Load it on every rank."""
        return self._ranks.together(lambda: self._load(snapshot))

    def follow(self) -> tuple[Any, T | None]:
        """On the other ranks: do what rank 0 announces, until it says what came of it.

        Returns:
            what it says, and what was loaded last.
        """
        loaded: T | None = None
        while isinstance(said := self._ranks.tell(), Try):
            try:
                snapshot = self._open(said)
                try:
                    loaded = self.use(snapshot)
                finally:
                    snapshot.close()
            except Exception as error:  # rank 0 knows, and decides
                logger.debug("a snapshot could not be used on all ranks: %r", error)
        return said, loaded

    def _open(self, tried: Try, source: Source | None = None, progress: Progress | None = None) -> OpenSnapshot:
        opened: list[OpenSnapshot] = []

        def open_here() -> OpenSnapshot:
            opened.append(self._hosts.open(tried, source, progress))
            return opened[0]

        try:
            return self._ranks.together(open_here)
        except BaseException:
            for snapshot in opened:  # another rank could not
                snapshot.close()
            raise


def _stores(found: Survey, manifest: Manifest, source: Source) -> Iterator[tuple[str, str]]:
    """The stores that hold this very snapshot; first the one it was found at."""
    holders = [other for held, other in found.candidates if held == manifest]
    for holder in sorted(holders, key=lambda other: other is not source):
        if isinstance(holder, StoreSource):
            yield holder.store.url, holder.tier


def _shards(manifest: Manifest, source: Source) -> Iterator[tuple[str, str, str]]:
    """The shards of a snapshot of which no tier has all, with the stores that have them."""
    for holder, shard in source.held(manifest) if isinstance(source, ScatteredSource) else ():
        if isinstance(holder, StoreSource):
            yield holder.store.url, holder.tier, shard.to_json()
