"""Asks every tier what it holds of a run: once at each start, all at the same time, within bounds.

What could not be read is one thing, what is not there another: storage is asked a few times before it counts
as unreadable, and what follows from that is decided in ``choice`` and ``attempts``, not here.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_spot import retry
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.starting import attach
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    CorruptSnapshotError,
    ServerRefusedError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
    TierReason,
)
from lightning_spot.protocol.wire import answered, parse_spot_url
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.identity import Identity, ServerRun, identify
from lightning_spot.run.location import Location
from lightning_spot.run.sources import HOST, STORAGE, MemorySource, ScatteredSource, Source, StoreSource
from lightning_spot.say import forget, say
from lightning_spot.snapshot.manifest import Manifest, Order, snapshot_order
from lightning_spot.store.commit import commit_left, look
from lightning_spot.store.fences import Claim, claim_name
from lightning_spot.store.store import Holdings, Store
from lightning_spot.threads import both, in_background
from lightning_spot.untrusted import as_object, decoded

logger = logging.getLogger(__name__)

_MOST_LEFT = 100  # each is listed: seconds in all


@dataclass(slots=True)
class Survey:
    """What the tiers hold of a run.

    Attributes:
        location: that was asked about.
        identity: which run it is.
        claim: newest claim in storage.
        runs: what servers hold of this very run, by tier.
        answers: the tiers that answered, nearest first, with what they hold.
        problems: the tiers that could not be read, with the reason.
        claimed: attempt that this start has claimed in storage since; 0 if none. A listing that does not show its claim
            is older than that, or none.
    """

    location: Location
    identity: Identity
    claim: Claim | None
    runs: dict[str, ServerRun] = field(default_factory=dict)
    answers: list[tuple[Source, Holdings]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    claimed: int = 0

    @property
    def durable(self) -> Holdings | None:
        """What storage holds; ``None`` if it could not be read."""
        return next((holdings for source, holdings in self.answers if source.tier == STORAGE), None)

    @property
    def candidates(self) -> list[tuple[Manifest, Source]]:
        """Snapshots with the tiers that hold them, best first: newest, then nearest; but for what is set aside."""
        found = [item for item in self._held() if not self.is_aside(item[0].order)]
        # Stable: at equal age the order of the tiers decides.
        return sorted(found, key=lambda item: item[0].order, reverse=True)

    @property
    def set_aside(self) -> list[str]:
        """Names of the snapshots that a rewind has set aside, at whatever tier."""
        return sorted({manifest.name for manifest, _ in self._held() if self.is_aside(manifest.order)})

    def _held(self) -> list[tuple[Manifest, Source]]:
        return [(manifest, source) for source, holdings in self.answers for manifest in holdings.manifests]

    def is_aside(self, order: Order | None) -> bool:
        """Whether a rewind has set the snapshot of that order aside."""
        return self.durable is not None and self.durable.sets_aside(order)

    @property
    def unreadable(self) -> dict[str, str]:
        """Snapshots whose manifest is there but cannot be used, with tier and reason."""
        return {
            f"{name} at {source.tier}": why
            for source, holdings in self.answers
            for name, why in holdings.unreadable.items()
            if not self.is_aside(snapshot_order(name))
        }

    @property
    def seen_attempts(self) -> list[int]:
        """Highest attempt at each tier that answered."""
        claimed = [self.claim.attempt] if self.claim is not None else []
        held = [holdings.highest_attempt for _, holdings in self.answers]
        return [*claimed, *held, *(run.attempt for run in self.runs.values())]


def survey(location: Location, policy: RetryPolicy | None = None, *, begins: bool = True) -> Survey:
    """Ask every tier of a location what it holds. Takes no longer than the slowest of them, within bounds.

    Args:
        location: of the run.
        policy: of reading them.
        begins: whether an attempt is to begin. A snapshot of which storage has all shards is committed then, if nobody
            was left to do so.

    Raises:
        SettingsError: if a tier cannot be used as it was named; or an attempt is to begin, and the local server is of
            another version: it may have the newest snapshot.
    """
    forget()  # each start names again what it could not read
    policy = policy or retry.DEFAULT_POLICY
    store = open_store(location.url)
    asked = {server: functools.partial(_server_runs, server) for server in location.servers}
    servers = _patiently({HOST: functools.partial(_local_runs, location, begins=begins), **asked}, policy)
    answers, problems = ask_all(
        {**servers, STORAGE: lambda: _ask_storage(store, policy, commits=begins)}, policy.answer_s
    )
    stored, claim = answers.pop(STORAGE, _UNREAD)
    identity = identify(
        location=location.canonical,
        inode=store.inode() if stored is not None else 0,
        claim=claim,
        runs=[run for tier in servers for run in answers.get(tier, ())],
        host=os.uname().nodename,
        named=location.named,
    )
    known = {tier: [run for run in answers.get(tier, ()) if run.id == identity.run_id] for tier in servers}
    runs = {tier: each[0] for tier, each in known.items() if each}
    sources = {tier: _server_source(location, tier, run) for tier, run in runs.items()}
    holdings, more_problems = ask_all(
        _patiently({tier: source.survey for tier, source in sources.items()}, policy), policy.answer_s
    )
    held: list[tuple[Source, Holdings]] = [(sources[tier], holdings[tier]) for tier in sources if tier in holdings]
    return Survey(location, identity, claim, runs, _all_of(held, store, stored), {**problems, **more_problems})


def look_again(found: Survey) -> Survey:
    """The same with what storage holds by now.

    An earlier attempt, whose server lives on elsewhere, writes there until this one has claimed it: what became durable
    between the first look and the claim is seen only after it.
    """
    store, policy = open_store(found.location.url), retry.DEFAULT_POLICY
    ask = functools.partial(_ask_storage, store, policy, commits=True, claimed=found.claimed)
    answers, problems = ask_all({STORAGE: ask}, policy.answer_s)
    stored, claim = answers.get(STORAGE, (None, found.claim))
    elsewhere = [item for item in found.answers if item[0].tier != STORAGE and not isinstance(item[0], ScatteredSource)]
    return replace(
        found, claim=claim, answers=_all_of(elsewhere, store, stored), problems={**found.problems, **problems}
    )


_Stored = tuple[Holdings | None, Claim | None]
_UNREAD: _Stored = (None, None)


def _all_of(
    held: list[tuple[Source, Holdings]], store: Store, stored: Holdings | None
) -> list[tuple[Source, Holdings]]:
    """What servers hold, with what storage holds if it could be read, and what lies at none of them as a whole."""
    if stored is not None:
        held = [*held, (StoreSource(store, STORAGE), stored)]
    return [*held, *scattered(held)]


def _patiently(asked: Mapping[str, Callable[[], Any]], policy: RetryPolicy) -> dict[str, Callable[[], Any]]:
    """Ask servers as often as storage: one may be minutes ahead of that."""
    return {tier: functools.partial(retry.with_retries, ask, policy, tier) for tier, ask in asked.items()}


class _MissesTheNewest(TierError):
    """The newest manifest cannot be read."""


def _ask_storage(store: Store, policy: RetryPolicy, *, commits: bool, claimed: int = 0) -> _Stored:
    """Ask storage, again as the policy says, until all of it could be read, the claim of an attempt too."""
    answers: list[tuple[Holdings, Claim | None]] = []

    def ask() -> _Stored:
        heard = threading.Event()
        once = functools.partial(_ask_once, store, heard, commits=commits, claimed=claimed)
        answers.append(retry.unless_silent(once, heard, policy.silent_s, store.url))
        # A manifest that is damaged stays so: one more look tells it from a read that failed for a moment.
        if len(answers) == 1 and _newer(holdings := answers[0][0], holdings.unreadable):
            raise _MissesTheNewest("; ".join(f"{name}: {reason}" for name, reason in holdings.unreadable.items()))
        return answers[-1]

    try:
        return retry.with_retries(ask, policy, store.url)
    except _MissesTheNewest:
        return answers[0]
    except TierError as error:
        if error.reason is TierReason.NO_CREDENTIALS:
            raise SettingsError(str(error)) from error
        raise


def _ask_once(store: Store, heard: threading.Event, *, commits: bool, claimed: int) -> tuple[Holdings, Claim | None]:
    def newest_claim() -> Claim | None:
        try:
            return store.newest_claim()
        except CorruptSnapshotError as error:
            text = "{error}. The run is known by its directory only"
            say(logging.WARNING, "claims-damaged", text, about=store.url, error=error)
            return None
        finally:
            heard.set()  # to list snapshots, and to read all manifests, may take longer

    holdings, claim = both(store.survey, newest_claim, "spot-survey")
    if claimed and claim_name(claimed) not in holdings.attempts:
        why = f"{store.url} does not list {claim_name(claimed)}, which was just written: its listing is an older one"
        raise TierError(why, tier=store.url)
    for name in _newer(holdings, holdings.unfinished)[:_MOST_LEFT]:
        try:
            found = commit_left(store, name) if commits else look(store, name)
        except (CorruptSnapshotError, SnapshotFailedError, SnapshotNotFoundError) as error:  # the one before is there
            where = f"{name} at {store.url}"
            say(logging.WARNING, "snapshot-skipped", "snapshot {about} skipped: {reason}", about=where, reason=error)
            continue
        if found.manifest is not None:
            holdings.manifests.insert(0, found.manifest)
            break
        holdings.shards += found.notes.values()
    return holdings, claim


def _newer(holdings: Holdings, names: Iterable[str]) -> list[str]:
    """Those of some snapshots that are newer than all that can be used, newest first."""
    nothing = (0, -1, 0)
    newest = max((manifest.order for manifest in holdings.manifests), default=nothing)
    orders = {name: snapshot_order(name) or nothing for name in names}
    return sorted((name for name in orders if orders[name] > newest), key=orders.__getitem__, reverse=True)


def _local_runs(location: Location, *, begins: bool) -> list[ServerRun]:
    """What the local server holds, also that of an earlier attempt where this one uses none."""
    try:
        host = attach(location.url, location.name)
    except ServerRefusedError as error:
        if begins and error.reason is TierReason.PROTOCOL:
            raise SettingsError(str(error)) from error
        raise
    except SettingsError as error:
        if location.has_local_server:
            raise
        logger.debug("no server can ever have been on this host: %s", error)
        return []
    if host is None:
        return []
    try:
        return [replace(run, host="") for run in _listed(host.client)]
    finally:
        host.disconnect()


def _server_runs(server: str) -> list[ServerRun]:
    with closing(ServerClient(parse_spot_url(server)[0])) as client:
        return _listed(client)


def _listed(client: ServerClient) -> list[ServerRun]:
    answer = client.call("GET", "/v1/runs", pulse=client.ping)
    with answered(str(client.address)):
        return [decoded(ServerRun, as_object(item)) for item in answer["runs"]]


def _server_source(location: Location, tier: str, run: ServerRun) -> Source:
    text = f"{run.name}@{run.id}"
    if tier == HOST:
        return MemorySource(location.url, text)
    return StoreSource(ServerStore(f"{tier}/{text}"), tier)


def scattered(found_at: list[tuple[Source, Holdings]]) -> list[tuple[Source, Holdings]]:
    """The snapshots that count, but lie at no tier as a whole: shards of them are at several."""
    held = [
        (source, shard)
        for source, holdings in found_at
        if isinstance(source, MemorySource | StoreSource)
        for shard in holdings.shards
    ]
    source = ScatteredSource(held)
    holdings = source.survey()
    return [(source, holdings)] if holdings.manifests else []


def of_tier(tier: str, reason: str) -> str:
    """Why a tier could not be read, with its name; the reasons of servers have it in them."""
    return reason if "://" in tier and tier in reason else f"{tier}: {reason}"


def ask_all(asked: Mapping[str, Callable[[], Any]], wait_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Call all at once.

    Args:
        asked: by tier.
        wait_s: how long all answers together are waited for.

    Returns:
        what was answered in time, and why the others were not.

    Raises:
        SettingsError: if one of the tiers cannot be used as it was named.
    """
    answers: dict[str, Any] = {}
    problems: dict[str, str] = {}
    asked_now: dict[str, Future[Any]] = {}
    for tier, ask in asked.items():
        try:
            asked_now[tier] = in_background(ask, "spot-survey")
        except RuntimeError as error:  # no more threads can be had now: that tier was not asked
            problems[tier] = str(error)
    late = wait(asked_now.values(), wait_s).not_done
    for tier, answer in asked_now.items():
        if answer in late:
            problems[tier] = f"no answer within {wait_s:.0f} s"
            continue
        try:
            answers[tier] = answer.result()
        except SnapshotNotFoundError:
            answers[tier] = Holdings()
        except SettingsError:
            raise
        except SpotError as error:
            problems[tier] = str(error)
        except Exception as error:  # whatever a library raises: that tier could not be read
            text = "reading {about} failed unexpectedly"
            say(logging.ERROR, "survey-failed", text, about=tier, exc_info=True)
            problems[tier] = f"{type(error).__name__}: {error}"
    return answers, problems
