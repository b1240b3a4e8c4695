"""Which tiers a command asks, and what they hold."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from lightning_spot.errors import SettingsError, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.embedded import attach
from lightning_spot.memory.remote import NodeStore
from lightning_spot.memory.stores import open_store
from lightning_spot.memory.wire import parse_spot_url
from lightning_spot.run.location import AUTO, Location
from lightning_spot.run.sources import DURABLE, MEMORY, MemorySource, Source, StoreSource


@dataclass(slots=True)
class Entry:
    """A snapshot at a tier.

    Attributes:
        manifest: what it is.
        source: where it is.
        state: ``"durable"``, ``"dirty"`` (in memory, on its way) or ``"safe"`` (in memory, and at a tier below).
    """

    manifest: Manifest
    source: Source
    state: str


@dataclass(slots=True)
class Found:
    """What the tiers answered.

    Attributes:
        entries: snapshots, newest first.
        problems: one line for each tier that did not answer.
    """

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def ask(arguments: argparse.Namespace) -> Found:
    """Ask every tier the command line names.

    Raises:
        SettingsError: if a URL is malformed.
        SnapshotNotFound: if the only tier asked does not answer or there is no such run.
    """
    found = Found()
    sources = _sources(arguments)
    for source in sources:
        try:
            found.entries.extend(_entries(source, arguments))
        except SettingsError:
            raise
        except SpotError as error:
            found.problems.append(f"{source.tier}: {error}")
    if len(found.problems) == len(sources):
        raise SnapshotNotFound("; ".join(found.problems))
    found.entries.sort(key=lambda entry: entry.manifest.order, reverse=True)
    return found


def pick(found: Found, wanted: str | None) -> Entry:
    """The newest snapshot, or the newest of that name or step.

    Raises:
        SnapshotNotFound: if there is none; names what there is.
    """
    for entry in found.entries:
        if wanted is None or wanted in (entry.manifest.name, str(entry.manifest.step)):
            return entry
    names = ", ".join(sorted({entry.manifest.name for entry in found.entries})) or "nothing"
    what = f"no snapshot {wanted!r}" if wanted is not None else "no snapshot"
    raise SnapshotNotFound("; ".join([f"{what} at any tier; there is {names}", *found.problems]))


def _sources(arguments: argparse.Namespace) -> list[Source]:
    url = str(arguments.url)
    if url.startswith("spot:"):
        address, path = parse_spot_url(url)
        run = arguments.run or path.split("/")[0]
        if not run:
            raise SettingsError(f"{url!r} names no run; write {address}/RUN")
        nodes = [str(address), *(str(parse_spot_url(item)[0]) for item in arguments.memory)]
        return [StoreSource(NodeStore(f"{node}/{run}"), node) for node in nodes]
    location = Location.of(url, arguments.memory or AUTO, arguments.run)
    sources: list[Source] = [MemorySource(location.url, location.name)]
    sources += [StoreSource(NodeStore(f"{node}/{location.name}"), node) for node in location.nodes]
    return [*sources, StoreSource(open_store(location.url), DURABLE)]


def _entries(source: Source, arguments: argparse.Namespace) -> list[Entry]:
    if isinstance(source, StoreSource) and isinstance(source.store, NodeStore):
        return [Entry(manifest, source, _state(dirty, safe)) for manifest, dirty, safe in source.store.held()]
    if source.tier == MEMORY:
        location = Location.of(arguments.url, AUTO, arguments.run)
        host = attach(location.url, location.name, revive=False)
        if host is None:
            return []
        try:
            return [Entry(manifest, source, _state(dirty, safe)) for manifest, dirty, safe in host.held()]
        finally:
            host.session.close()
    return [Entry(manifest, source, DURABLE) for manifest in source.survey().manifests]


def _state(dirty: list[str], safe: list[str]) -> str:
    return "dirty" if dirty else "safe" if safe else "memory only"
