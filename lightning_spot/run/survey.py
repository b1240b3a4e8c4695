"""Asks every tier what it holds of a run: once at each start, all at the same time, within bounds.

What could not be read is one thing, what is not there another: storage is asked a few times before it counts
as unreadable, and what follows from that is decided in ``choice`` and ``attempts``, not here.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_spot import retry
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.starting import attach
from lightning_spot.client.stores import open_store
from lightning_spot.config import LARGEST
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
from lightning_spot.run.identity import Identity, ServerRun, identify, runs_of
from lightning_spot.run.location import Location
from lightning_spot.run.sources import HOST, STORAGE, MemorySource, ScatteredSource, Source, StoreSource
from lightning_spot.say import forget, say
from lightning_spot.snapshot.manifest import Manifest, Order, snapshot_order
from lightning_spot.store.commit import commit_left, look
from lightning_spot.store.fences import Claim, Rewind
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Holdings, Store
from lightning_spot.threads import both, in_background
from lightning_spot.untrusted import file_name, flag, integer, line

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
    """

    location: Location
    identity: Identity
    claim: Claim | None
    runs: dict[str, ServerRun] = field(default_factory=dict)
    answers: list[tuple[Source, Holdings]] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def durable(self) -> Holdings | None:
        """What storage holds; ``None`` if it could not be read."""
        return next((holdings for source, holdings in self.answers if source.tier == STORAGE), None)

    @property
    def candidates(self) -> list[tuple[Manifest, Source]]:
        """Snapshots with the tiers that hold them, best first: newest, then nearest; but for what is set aside."""
        found = [item for item in self._held() if not self._is_aside(item[0].order)]
        # Stable: at equal age the order of the tiers decides.
        return sorted(found, key=lambda item: item[0].order, reverse=True)

    @property
    def set_aside(self) -> list[str]:
        """Names of the snapshots that a rewind has set aside, at whatever tier."""
        return sorted({manifest.name for manifest, _ in self._held() if self._is_aside(manifest.order)})

    @property
    def rewinds(self) -> list[Rewind]:
        """Those that storage has."""
        return self.durable.rewinds if self.durable is not None else []

    def _held(self) -> list[tuple[Manifest, Source]]:
        return [(manifest, source) for source, holdings in self.answers for manifest in holdings.manifests]

    def _is_aside(self, order: Order | None) -> bool:
        return any(rewind.sets_aside(order) for rewind in self.rewinds)

    @property
    def unreadable(self) -> dict[str, str]:
        """Snapshots whose manifest is there but cannot be used, with tier and reason."""
        return {
            f"{name} at {source.tier}": why
            for source, holdings in self.answers
            for name, why in holdings.unreadable.items()
            if not self._is_aside(snapshot_order(name))
        }

    @property
    def seen_attempts(self) -> list[int]:
        """Highest attempt at each tier that answered."""
        claimed = [self.claim.attempt] if self.claim is not None else []
        return [
            *claimed,
            *(holdings.highest_attempt for _, holdings in self.answers),
            *(run.attempt for run in self.runs.values()),
        ]


def _misses_the_newest(holdings: Holdings) -> bool:
    """Whether a snapshot whose manifest cannot be used is newer than all that can."""
    nothing = (0, -1, False)
    best = max((manifest.order for manifest in holdings.manifests), default=nothing)
    return any((snapshot_order(name) or nothing) > best for name in holdings.unreadable)


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
    asked: dict[str, Callable[[], Any]] = {
        server: functools.partial(_server_runs, server, policy) for server in location.servers
    }
    asked[HOST] = lambda: retry.with_retries(lambda: _local_runs(location, begins=begins), policy, HOST)
    asked[STORAGE] = lambda: _Durable.ask(store, policy, commits=begins)
    answers, problems = ask_all(asked, policy.answer_s)
    durable: _Durable | None = answers.pop(STORAGE, None)
    listed = {tier: answers[tier] for tier in (HOST, *location.servers) if tier in answers}
    identity = identify(
        location=location.canonical,
        inode=durable.inode if durable is not None else 0,
        claim=durable.claim if durable is not None else None,
        runs=[run for runs in listed.values() for run in runs],
        host=os.uname().nodename,
        named=location.named,
    )
    runs = {tier: found[0] for tier, all_runs in listed.items() if (found := runs_of(identity.run_id, all_runs))}
    sources = {tier: _server_source(location, tier, run) for tier, run in runs.items()}
    listings = {
        tier: functools.partial(retry.with_retries, source.survey, policy, tier) for tier, source in sources.items()
    }
    holdings, more_problems = ask_all(listings, policy.answer_s)
    found_at: list[tuple[Source, Holdings]] = [(sources[tier], holdings[tier]) for tier in sources if tier in holdings]
    if durable is not None:
        found_at.append((StoreSource(store, STORAGE), durable.holdings))
    found_at += scattered(found_at)
    return Survey(
        location=location,
        identity=identity,
        claim=durable.claim if durable is not None else None,
        runs=runs,
        answers=found_at,
        problems={**problems, **more_problems},
    )


def look_again(found: Survey) -> Survey:
    """The same with what storage holds by now.

    An earlier attempt, whose server lives on elsewhere, writes there until this one has claimed it: what became durable
    between the first look and the claim is seen only after it.
    """
    store, policy = open_store(found.location.url), retry.DEFAULT_POLICY
    answers, problems = ask_all({STORAGE: lambda: _Durable.ask(store, policy, commits=True)}, policy.answer_s)
    answer: _Durable | None = answers.get(STORAGE)
    others: list[tuple[Source, Holdings]] = [
        (source, holdings)
        for source, holdings in found.answers
        if source.tier != STORAGE and not isinstance(source, ScatteredSource)
    ]
    if answer is None:
        return replace(found, answers=others, problems={**found.problems, **problems})
    found_at = [*others, (StoreSource(store, STORAGE), answer.holdings)]
    return replace(found, claim=answer.claim, answers=[*found_at, *scattered(found_at)])


class _MissesTheNewest(TierError):
    """The newest manifest cannot be read."""


@dataclass(frozen=True, slots=True)
class _Durable:
    """What storage answered."""

    holdings: Holdings
    claim: Claim | None
    inode: int

    @classmethod
    def ask(cls, store: Store, policy: RetryPolicy, *, commits: bool) -> _Durable:
        """Ask, again as the policy says, until all of it could be read."""
        answers: list[_Durable] = []

        def ask() -> _Durable:
            heard = threading.Event()
            once = functools.partial(cls._once, store, heard, commits=commits)
            answers.append(retry.unless_silent(once, heard, policy.silent_s, store.url))
            # A manifest that is damaged stays so: one more look tells it from a read that failed for a moment.
            if len(answers) == 1 and _misses_the_newest(answers[0].holdings):
                unreadable = answers[0].holdings.unreadable
                raise _MissesTheNewest("; ".join(f"{name}: {reason}" for name, reason in unreadable.items()))
            return answers[-1]

        try:
            return retry.with_retries(ask, policy, store.url)
        except _MissesTheNewest:
            return answers[0]
        except TierError as error:
            if error.reason is TierReason.NO_CREDENTIALS:
                raise SettingsError(str(error)) from error
            raise

    @classmethod
    def _once(cls, store: Store, heard: threading.Event, *, commits: bool) -> _Durable:
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
        for name in _left_of(holdings):
            found = _committed(store, name) if commits else None
            if found is not None:
                holdings.manifests.insert(0, found)
                break
            with suppress(CorruptSnapshotError, SnapshotNotFoundError):  # the one before is there
                holdings.shards += look(store, name).notes.values()
        return cls(holdings, claim, store.inode() if isinstance(store, LocalStore) else 0)


def _committed(store: Store, left: str) -> Manifest | None:
    """Commit a snapshot of which storage has all shards, if nobody was left to do so; ``None`` if it was not."""
    try:
        found = commit_left(store, left)
    except (CorruptSnapshotError, SnapshotFailedError, SnapshotNotFoundError) as error:  # the one before is there
        where = f"{left} at {store.url}"
        say(logging.WARNING, "snapshot-skipped", "snapshot {about} skipped: {reason}", about=where, reason=error)
        return None
    if found is not None:
        text = "all shards of {about} were uploaded, and nobody was left to commit it. It is committed now"
        say(logging.INFO, "late-commit", text, about=left)
    return found


def _left_of(holdings: Holdings) -> list[str]:
    """Snapshots that are not committed and newer than all that are: the newest of them, newest first."""
    nothing = (0, -1, False)
    newest = max((manifest.order for manifest in holdings.manifests), default=nothing)
    left = {name: order for name in holdings.unfinished if (order := snapshot_order(name) or nothing) > newest}
    return sorted(left, key=lambda name: left[name], reverse=True)[:_MOST_LEFT]


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


def _server_runs(server: str, policy: retry.RetryPolicy) -> list[ServerRun]:
    """Ask a snapshot server as often as storage: it may be minutes ahead of that."""
    client = ServerClient(parse_spot_url(server)[0])
    try:
        return retry.with_retries(lambda: _listed(client), policy, server)
    finally:
        client.close()


def _listed(client: ServerClient) -> list[ServerRun]:
    answer = client.call("GET", "/v1/runs", pulse=client.ping)
    with answered(str(client.address)):
        return [
            ServerRun(
                name=file_name(item, "name", None),
                id=file_name(item, "id"),
                location=line(item, "location"),
                attempt=integer(item, "attempt", None, 0, LARGEST),
                host=line(item, "host"),
                live=flag(item, "live"),
            )
            for item in answer["runs"]
        ]


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
