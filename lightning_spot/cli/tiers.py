"""Which tiers a command asks, and what they hold."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from lightning_spot.cli.arguments import LATEST, check_given, location_of, split_run
from lightning_spot.client.remote import NodeStore
from lightning_spot.client.spread import SpreadStore
from lightning_spot.errors import SettingsError, SnapshotNotFoundError, SpotError
from lightning_spot.image.manifest import OWN_DIR, Manifest, snapshot_order
from lightning_spot.memory.tier import Listed
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.run.patience import Patience, of_tier
from lightning_spot.run.sources import MemorySource, Source, StoreSource
from lightning_spot.run.survey import spread_over, survey
from lightning_spot.tiers.store import Holdings

_NODE_LIKE = re.compile(r"[^/:]+:\d+(/|$)")
"""What a snapshot server's address looks like without its scheme: taken for a directory."""

_ONCE = Patience(tries=1, silent_s=6.0)


@dataclass(slots=True)
class Entry:
    """A snapshot at a tier.

    Attributes:
        manifest: what it is.
        source: where it is.
        state: ``"persisted"`` in storage; of one in memory ``"replicated"`` (at another tier, too), ``"uploading"`` (on
            its way to one) or ``"local"`` (neither). Of one host's portion of a snapshot which of them it is; of one
            whose portions are all at the servers that were asked ``"replicated"``: it outlives the machines that train.
    """

    manifest: Manifest
    source: Source
    state: str


@dataclass(slots=True)
class Found:
    """What the tiers answered.

    Attributes:
        entries: snapshots, newest first.
        unreadable: snapshots that are there but cannot be used, with tier and reason.
        problems: one line for each tier that did not answer.
        url: the run that was asked for.
        selected: step or name of the snapshot of it that was, if one was.
        is_known: whether a tier knows of a run there, or could not say.
        hint: what to do where none does, for people.
    """

    entries: list[Entry] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    url: str = ""
    selected: str | None = None
    is_known: bool = True
    hint: str = "give the directory or URL of one"


def ask(arguments: argparse.Namespace) -> Found:
    """Ask every tier the command line names.

    Raises:
        SettingsError: if a URL is malformed, names one of several runs of that name, or one snapshot and no run.
        SnapshotNotFoundError: if no tier that was asked answers, or no run was ever there: a wrong path is no run
            without snapshots.
    """
    url, selected = split_run(arguments.run)
    _check_names_a_run(url)
    found = _ask_nodes(url, arguments) if url.startswith("spot:") else _ask_run(url, arguments)
    found.url, found.selected = url, selected
    if not (found.is_known or found.entries or found.unreadable):
        hint = f"for a snapshot server write spot://{found.url}" if _NODE_LIKE.match(found.url) else found.hint
        if found.problems:  # one that did not answer may know of it
            silent = "; ".join(found.problems)
            raise SnapshotNotFoundError(
                f"no tier that answers knows of a run at {found.url!r}, and not all do: {silent}; {hint}"
            )
        raise SnapshotNotFoundError(f"no run is, or ever was, at {found.url!r}: {hint}")
    found.entries.sort(key=lambda entry: entry.manifest.order, reverse=True)
    return found


def look_again(found: Found, source: Source, *, forget: bool) -> None:
    """What a tier holds by now, in the place of what it was seen to hold before; nothing of it if that is forgotten."""
    entries = [entry for entry in found.entries if entry.source is not source]
    if not forget:
        try:
            entries.extend(_entries(source, source.survey()))
        except SpotError as error:
            found.problems.append(of_tier(source.tier, str(error)))
    found.entries = sorted(entries, key=lambda entry: entry.manifest.order, reverse=True)


def pick(found: Found, wanted: str | None) -> Entry:
    """The newest snapshot, or the newest of that name or step.

    Raises:
        SnapshotNotFoundError: if there is none; names what there is.
    """
    whole = [entry for entry in found.entries if entry.manifest.portion is None]
    for entry in whole:
        if wanted in (None, LATEST, entry.manifest.name, str(entry.manifest.step)):
            return entry
    names = ", ".join(sorted({entry.manifest.name for entry in whole})) or "nothing"
    if len(whole) < len(found.entries):
        names += " that is whole; portions of hosts, which lie at several snapshot servers, are one if all are given"
        names += " (--server)"
    what = f"no snapshot {wanted!r}" if wanted is not None else "no snapshot"
    bad = [f"{item} cannot be used ({why})" for item, why in found.unreadable.items()]
    raise SnapshotNotFoundError(
        "; ".join([f"{what} of {found.url} at any tier; there is {names}", *bad, *found.problems])
    )


def _check_names_a_run(url: str) -> None:
    """A directory of a run is easily given for it: nothing would be found below, or another one shown."""
    parts = url.split("/")
    for place, part in enumerate(parts):
        if place and snapshot_order(part) is not None:
            run = "/".join(parts[:place])
            raise SettingsError(f"{url!r} is one snapshot: write {run}@{part} (for ls, its run {run})")


def _ask_nodes(url: str, arguments: argparse.Namespace) -> Found:
    """Ask servers for a run by its name (``RUN``, or ``RUN@ID`` where several have it)."""
    check_given("/", arguments.server, arguments.run_name)
    address, path = parse_spot_url(url)
    run = arguments.run_name or path.split("/")[0]
    if not run:
        raise SettingsError(f"{url!r} names no run; write {address}/RUN")
    found = Found(
        is_known=False,
        hint="a server that was restarted knows only what it had in memory; ask by the run's URL",
    )
    nodes = [str(address), *(str(parse_spot_url(item)[0]) for item in arguments.server)]
    answers: list[tuple[Source, Holdings]] = []
    for node in nodes:
        source = StoreSource(NodeStore(f"{node}/{run}"), node)
        try:
            holdings = source.survey()
            answers.append((source, holdings))
            found.is_known = found.is_known or holdings.highest_attempt > 0
            found.entries.extend(_entries(source, holdings))
        except SettingsError:
            raise
        except SpotError as error:
            found.problems.append(of_tier(node, str(error)))
    for spread, holdings in spread_over(answers):
        found.entries[:0] = _entries(spread, holdings)
    if len(found.problems) == len(nodes):
        raise SnapshotNotFoundError("; ".join(found.problems))
    return found


def _ask_run(url: str, arguments: argparse.Namespace) -> Found:
    """Ask the tiers of a run by its durable directory, as a trainer does."""
    location = location_of(url, arguments.server, arguments.run_name)
    seen = survey(location, _ONCE, commits=False)
    found = Found(unreadable=seen.unreadable, problems=[of_tier(tier, why) for tier, why in seen.problems.items()])
    for source, holdings in seen.answers:
        try:
            found.entries.extend(_entries(source, holdings))
        except SpotError as error:
            found.problems.append(of_tier(source.tier, str(error)))
    if (Path(location.url) / OWN_DIR).is_dir():
        found.hint = "SpotCheckpointIO has saved plain checkpoint files there, which ls and load_from_checkpoint read"
    found.is_known = bool(seen.claim is not None or seen.runs or seen.durable is None)
    if not seen.answers and found.problems:
        raise SnapshotNotFoundError("; ".join(found.problems))
    return found


def _entries(source: Source, holdings: Holdings) -> list[Entry]:
    """The snapshots a tier holds, with their state; a server says of each where it is safe."""
    node = source if isinstance(source, MemorySource) else getattr(source, "store", None)
    if isinstance(node, (MemorySource, NodeStore)):
        listed = [item for item in node.listing() if not item.manifest.is_file]
        return [Entry(item.manifest, source, _state(item)) for item in listed]
    state = "replicated" if isinstance(source, StoreSource) and isinstance(source.store, SpreadStore) else "persisted"
    return [Entry(manifest, source, state) for manifest in holdings.manifests]


def _state(item: Listed) -> str:
    if (portion := item.manifest.portion) is not None:
        return f"portion {portion.host + 1} of {portion.hosts}"
    return "uploading" if item.dirty else "replicated" if item.safe else "local"
