"""What is to be done for a run, at each of its destinations: what should be there, minus what was seen there.

Nothing here does anything, asks anybody or knows the time. What was seen is noted by whoever has seen it; what failed,
or was lost on its way, is not seen, and so it is to be done still. Times are monotonic seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from lightning_spot.config import names_server
from lightning_spot.retry import pause_after
from lightning_spot.server.runs import HEARTBEAT_TIMEOUT_S, Opened, RunInfo, key_of
from lightning_spot.server.slots import Group, Mark, Slot, Tiers, View
from lightning_spot.server.tier import TierHealth
from lightning_spot.snapshot.manifest import Manifest, Order, ShardOf
from lightning_spot.snapshot.shards import Status, registers_of, status
from lightning_spot.store.store import put_together

FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
FIRST_AWAY_S, LAST_AWAY_S = 1.0, 30.0
ASK_AGAIN_S = 10.0
"""How often a server is asked how things are: one that does not carry the run on, and one that takes long about it."""

FIRST_LOOK_S, LAST_LOOK_S = 0.2, 2.0
QUICK_S = 5.0
"""Snapshots of a run that come within so many seconds of each other are thinned at storage; none waits longer."""

SURPASSED_S = 30.0
"""Where storage has something newer of its run, a shard waits only so long for others: they are brought at once."""

APART_FACTOR = 40
"""Snapshots in quick succession go to storage at most so often, in times that one takes: training pays little."""

MOST_APART_S = 30.0
"""Of snapshots in quick succession, storage takes one at least so often, if it is fast enough."""

_MOST_FAILURES = 3
_LAST_WAIT_S = 30.0
_TOGETHER_S = 0.5  # ranks of one host have their shards at most so long after each other


# -- what is to be done -----------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    """What is to be done at a destination, in the order in which it is."""

    ASK = "ask"
    """Ask a server whether it works, and takes the run; it hears what is durable."""
    LOOK = "look"
    """Ask a server what it has: which registers, and what it has made durable."""
    DELETE = "delete"
    """Delete a snapshot or file."""
    RETAIN = "retain"
    """Delete the snapshots at storage that the run does not keep."""
    SEND = "send"
    """Send a snapshot or file to a server, each shard by itself."""
    PUT = "put"
    """Write a snapshot or file of which all is here to storage."""
    PUT_SHARDS = "put shards"
    """Write what is here of a snapshot to storage; the place that sees all of it there commits it."""

    @property
    def is_question(self) -> bool:
        """Whether no bytes are sent: it does not wait for these."""
        return self in (Kind.ASK, Kind.LOOK)

    @property
    def is_upload(self) -> bool:
        """Whether bytes are."""
        return self in (Kind.SEND, Kind.PUT, Kind.PUT_SHARDS)


Key = tuple[str, str, str]
"""What failures are counted under: the kind of an action, the run, and the snapshot."""

WORKER: Key = ("work", "", "")
"""Counts what fails of a worker itself."""

Lane = tuple[str, bool]
"""What a worker does: the URL of its destination, and whether it only asks there."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do at a destination.

    Attributes:
        kind: what.
        url: where.
        run: key of the run.
        due_s: not before then; 0 for at once.
        manifest: of the snapshot it is about, or of the first of its shards.
        slots: whose contents are brought there.
        sequence: of the commit that is brought.
        again: whether it was tried before, and failed or waits for others.
    """

    kind: Kind
    url: str
    run: str
    due_s: float = 0.0
    manifest: Manifest | None = None
    slots: tuple[Slot, ...] = ()
    sequence: int = 0
    again: bool = False

    @property
    def about(self) -> Manifest:
        """The snapshot or file that it is about; there is one."""
        assert self.manifest is not None
        return self.manifest

    @property
    def name(self) -> str:
        """Of the snapshot."""
        return self.manifest.snapshot if self.manifest is not None else ""

    @property
    def lane(self) -> Lane:
        """Which worker does it."""
        return self.url, self.kind.is_question

    @property
    def key(self) -> Key:
        """What failures are counted under."""
        return (self.kind.value, self.run, "" if self.kind is Kind.RETAIN else self.name)

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Sorts what may be done at one destination: the lowest comes first.

        What is tried again comes last. Else the oldest comes first: if each place left out others of the snapshots that
        several bring together, none would ever be complete.
        """
        kind = len(Kind) if self.kind.is_upload else list(Kind).index(self.kind)
        return (kind, self.again, self.sequence)


# -- what should be ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Desired:
    """What a run is to have.

    Attributes:
        info: as it was opened; ``None`` if nothing is known of it.
        presumed_gone_s: when its trainer counts as gone: then each place brings down what it has of the newest
            snapshots. Until then the trainer says which ones these are, since all places must bring the same.
        urgent: whether somebody waits for it to be safe: nothing is put off.
        leaves: whether this server is about to end.
        is_abandoned: whether its trainer is known to be gone.
        is_stuck: tells of a writer whether it has no memory for one more snapshot until what is here has gone on.
    """

    info: RunInfo | None = None
    presumed_gone_s: float = float("inf")
    urgent: bool = False
    leaves: bool = False
    is_abandoned: bool = False
    is_stuck: Callable[[int], bool] = lambda _writer: False

    @property
    def is_live(self) -> bool:
        """Whether its trainer is connected to this server."""
        return self.info is not None and bool(self.info.session)

    @property
    def is_spread(self) -> bool:
        """Whether several hosts write it."""
        return self.info is not None and self.info.hosts > 1

    def must_be_exact(self, manifest: Manifest | None) -> bool:
        """Whether a snapshot is to be at servers exactly: where somebody waits for it, or nothing newer will come."""
        if manifest is None or manifest.complete or manifest.is_file or self.urgent or not self.is_live:
            return True
        return (self.info is not None and self.info.compression != "topk") or self.is_stuck(0)


def presumed_gone_s(info: RunInfo | None, asked_s: float, leaves_s: float | None) -> float:
    """When the trainer of a run counts as gone: some time after its last heartbeat, or after this server began to end.

    Args:
        info: of the run.
        asked_s: when the host of its trainer asked for it last: the heartbeat.
        leaves_s: since when this server is about to end, ``None`` if it is not.
    """
    if info is not None and info.session:
        asked_s = float("inf")
    return min(asked_s, leaves_s if leaves_s is not None else asked_s) + HEARTBEAT_TIMEOUT_S


# -- what was seen ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tried:
    """How something went that is still to be done: it failed, or it waits for what others bring.

    Attributes:
        failures: in a row.
        failed_s: when it failed last.
        why: it did, for people.
        waits_since_s: since when nothing more has come there of what it waits for, and nothing failed.
        looks_s: when it is looked at again whether more has come.
        there: files of the snapshot that were there then, of all places.
    """

    failures: int = 0
    failed_s: float = 0.0
    why: str = ""
    waits_since_s: float | None = None
    looks_s: float = 0.0
    there: int = 0

    @property
    def due_s(self) -> float:
        """When it is tried again."""
        return max(self.failed_s + _retry_pause_s(self.failures), self.looks_s)

    def fails(self, why: str, now_s: float) -> None:
        """It has failed. Other places may not be reached either: what is waited for may still come."""
        self.failures, self.failed_s, self.why = self.failures + 1, now_s, why
        self.waits_since_s = now_s if self.waits_since_s is not None else None


def _retry_pause_s(failures: int) -> float:
    return pause_after(failures, FIRST_RETRY_S, LAST_RETRY_S) if failures else 0.0


@dataclass(eq=False, slots=True)
class Deletion:
    """Something that is not to be at a destination any more.

    Attributes:
        manifest: what.
        behind: files of its run that were owed there when this was asked for, name and commit: they are brought first.
            What replaces it may be among them: if the machine went between the two, neither would be there. Files that
            come later are not waited for: while one is always under way, nothing would ever go.
    """

    manifest: Manifest
    behind: dict[str, int]


@dataclass(eq=False, slots=True)
class Destination:
    """What was seen at a destination: a directory at storage, or a server, by its URL.

    Attributes:
        url: of it.
        health: how it is doing, for people; its errors are below.
        tried: what was tried there and is still to be done, by its key.
        failing: what has failed since the last success, and why, for people; the latest failure comes last.
        failed_s: when that was.
        deletions: what is not to be there any more.
        newest: what was brought there last, of each run whose older snapshots are still to go.
        uploaded_s: when the last upload of each run that succeeded began, and how long it took.
    """

    url: str
    health: TierHealth = field(default_factory=TierHealth)
    tried: dict[Key, Tried] = field(default_factory=dict)
    failing: dict[Key, str] = field(default_factory=dict)
    failed_s: float = 0.0
    deletions: list[Deletion] = field(default_factory=list)
    newest: dict[str, Manifest] = field(default_factory=dict)
    uploaded_s: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """What fails there at present, for people.

        What failed may have made way for something newer, which was not tried yet: the destination fails all the same.
        """
        whys = [each.why for each in self.tried.values() if each.why] or list(self.failing.values())[-1:]
        return "; ".join(whys[-3:])

    def waits(self, key: Key) -> bool:
        """Whether an upload waits for what others bring."""
        return key in self.tried and self.tried[key].waits_since_s is not None

    def due_s(self, key: Key) -> float:
        """When something may be tried, 0 for at once: what did not fail waits only if several other things have."""
        own = self.tried[key].due_s if key in self.tried else 0.0
        others = len(self.failing.keys() - {key})
        return max(own, self.failed_s + _retry_pause_s(others - 1)) if others > 1 else own

    def shorten(self) -> None:
        """Let everything be tried again soon, but not at once: who hurries may do so many times a second."""
        for each in self.tried.values():
            each.failures = min(each.failures, 1)
        self.failing = dict(list(self.failing.items())[-2:])  # with two, :meth:`due_s` makes the first pause

    def done(self, action: Action) -> None:
        """Something was done, or is not to be tried again."""
        self._succeeded(action)
        if action.kind is Kind.DELETE:
            self.deletions[:] = [each for each in self.deletions if each.manifest is not action.manifest]
        if action.kind is Kind.RETAIN and self.newest.get(action.run) is action.manifest:
            del self.newest[action.run]
        if action.kind.is_upload:
            for each in (each for each in self.deletions if key_of(each.manifest) == action.run):
                if each.behind.get(action.name, action.sequence + 1) <= action.sequence:  # by default it is not behind
                    del each.behind[action.name]

    def took(self, put: Manifest, began_s: float, seconds: float) -> None:
        """Something was brought there; see :meth:`TierHealth.took`."""
        self.health.took(put, seconds)
        self.uploaded_s[key_of(put)] = began_s, seconds

    def failed(self, action: Action, text: str, now_s: float) -> None:
        """Something failed."""
        self.health.failures_total += 1
        self.tried.setdefault(action.key, Tried()).fails(text, now_s)
        self.failing.pop(action.key, None)
        self.failing[action.key], self.failed_s = text, now_s

    def waits_for(self, action: Action, there: int, now_s: float) -> float:
        """An upload waits for others'. It is looked at less and less often.

        Args:
            action: the upload; the destination works.
            there: files that are there now, of all places.
            now_s: the time.

        Returns:
            since when nothing more has come.
        """
        known = self._succeeded(action)
        since_s = known.waits_since_s if known is not None and known.there == there else None
        since_s = since_s if since_s is not None else now_s
        looks_s = _looks_again_s(now_s, since_s, _LAST_WAIT_S)
        self.tried[action.key] = Tried(waits_since_s=since_s, looks_s=looks_s, there=there)
        return since_s

    def only(self, wanted: set[Key]) -> None:
        """Forget how all actions went but these: the others are not wanted any more.

        Where nothing is to be done any more, what failed before is no reason to pause.
        """
        self.tried = {key: each for key, each in self.tried.items() if key in wanted}
        if not wanted:
            self.failing.clear()

    @property
    def is_blank(self) -> bool:
        """Whether nothing is known of any run there."""
        return not (self.newest or self.uploaded_s or self.deletions or self.tried)

    def forget(self, run: str) -> None:
        """Forget a run."""
        self.newest.pop(run, None)
        self.uploaded_s.pop(run, None)

    def _succeeded(self, action: Action) -> Tried | None:
        self.failing.clear()
        return self.tried.pop(action.key, None)


class Role(enum.Enum):
    """What a server does for a run, or is being asked to do."""

    NONE = "spare"
    KEEPS = "holds it"
    UPLOADS = "carries it on"
    """It keeps the run, and brings it on to storage."""


@dataclass(eq=False, slots=True)
class Server:
    """What was seen of a server that a run may be kept at.

    Attributes:
        url: of the run there.
        role: what it does for the run.
        asked: what it is being asked to do now, if it is being asked.
        answered_s: when it answered last.
        is_due: whether it is to be asked at once, whenever it answered.
        looked_s: when it was looked at last what it has.
        away_until_s: not asked before then, unless the run is kept there.
        failures: in a row.
        why: what was wrong last.
        why_not: why it does not upload, ``""`` if it was not asked to, or does.
        shown: registers that it has shown, by name of the snapshot.
    """

    url: str
    role: Role = Role.NONE
    asked: Role = Role.NONE
    answered_s: float = 0.0
    is_due: bool = False
    looked_s: float = float("-inf")
    away_until_s: float = 0.0
    failures: int = 0
    why: str = ""
    why_not: str = ""
    shown: dict[str, list[Manifest]] = field(default_factory=dict)

    @property
    def used(self) -> bool:
        """Whether the run is kept there."""
        return self.role is not Role.NONE

    @property
    def is_out(self) -> bool:
        """Whether it is known not to bring the run on: it refuses, or does not work."""
        return bool(self.why_not) if self.used else self.failures > 0

    @property
    def is_sound(self) -> bool:
        """Whether the run is kept there, and it has not just failed."""
        return self.used and not (self.is_due and self.failures)


class Servers:
    """The servers that a run may be kept at, in the order in which they are taken.

    One of those at which it is kept is asked to bring it on to storage, so that the bytes leave it once; while none
    does, this server does. A run stays where it is, as long as that works.

    Args:
        info: of the run; ``replicas`` of its ``servers`` are used.
        why_not: why no server brings it on, for people.
    """

    def __init__(self, info: RunInfo, why_not: str = "no server has answered yet") -> None:
        self.info = info
        self.why_not = why_not
        self.all = [Server(f"{url.rstrip('/')}/{info.text}") for url in info.servers]
        self.replicas = min(max(1, info.replicas), len(self.all))

    @property
    def used(self) -> list[Server]:
        """Those at which the run is kept."""
        return [each for each in self.all if each.used]

    @property
    def uploader(self) -> Server | None:
        """The one that brings it on to storage."""
        return next((each for each in self.all if each.role is Role.UPLOADS), None)

    @property
    def is_nobody(self) -> bool:
        """Whether no server brings the run on, and none is left that was not asked to."""
        is_short = len(self.used) < self.replicas
        return self.uploader is None and all(each.is_out for each in self.all if each.used or is_short)

    def find(self, url: str) -> Server | None:
        """The one of a URL."""
        return next((each for each in self.all if each.url == url), None)

    def tiers(self) -> Tiers:
        """Where the run's snapshots go now."""
        own, carried = [each.url for each in self.used], list[str]()
        if self.info.durable_url is not None:
            (own if self.is_nobody else carried).append(self.info.durable_url)  # while no server does, from here
        if not own and not carried and self.all:
            carried.append(self.all[0].url)  # nobody takes it now: it is owed to whoever will
        return Tiers(tuple(own), tuple(carried))

    def is_to_upload(self, server: Server, now_s: float) -> bool:
        """Whether a server is to be asked to bring the run on: one only is, the first that does not refuse."""
        if self.uploader is not None or any(each.asked is Role.UPLOADS for each in self.all):
            return self.uploader is server
        before = self.all[: self.all.index(server)]
        return all(each.is_out or (each.away_until_s > now_s and not each.used) for each in before)

    def asks(self, server: Server, now_s: float) -> None:
        """A server is being asked to keep the run, and perhaps to bring it on."""
        server.asked = Role.UPLOADS if self.is_to_upload(server, now_s) else Role.KEEPS

    def answered(self, server: Server, opened: Opened, now_s: float) -> None:
        """A server has taken the run."""
        before, upload = self.uploader, server.asked is Role.UPLOADS
        server.why_not = (opened.why_not or "it does not say why") if upload and not opened.carries else ""
        server.role = Role.UPLOADS if upload and opened.carries else Role.KEEPS
        server.asked, server.answered_s, server.is_due = Role.NONE, now_s, False
        if upload:
            self.why_not = server.why_not
        self._ask_others(server, before)

    def lost(self, server: Server, why: str, now_s: float) -> None:
        """A server does not work."""
        before = self.uploader
        server.asked = server.role = Role.NONE
        server.failures, server.why, server.why_not = server.failures + 1, why, ""
        server.away_until_s = now_s + pause_after(server.failures, FIRST_AWAY_S, LAST_AWAY_S)
        if before is server or not self.used:
            self.why_not = f"{server.url}: {why}"
        self._ask_others(server, before)

    def heard(self, server: Server, why: str, now_s: float) -> None:
        """How something went that was done at a server: ``why`` it failed, ``""`` if it did not."""
        if not server.used:
            return
        if not why:
            server.failures = 0
            return
        # One failed upload may be a broken connection: the server is lost if it does not answer either, or answers but
        # fails several times in a row.
        if server.failures + 1 >= _MOST_FAILURES:
            self.lost(server, why, now_s)
        else:
            server.failures, server.why, server.is_due = server.failures + 1, why, True

    def registers(self, name: str) -> dict[int, ShardOf]:
        """What all servers have shown of a snapshot."""
        return registers_of(self._shown(name))

    def _shown(self, name: str) -> list[Manifest]:
        return [manifest for each in self.all for manifest in each.shown.get(name, ())]

    def committed(self, known: Mapping[str, Collection[Order]]) -> Iterator[tuple[str, Order]]:
        """Lineage and order of what is committed over all servers, by what these show, and not known yet.

        A server may show what fits nothing: it counts only if it can be put together.
        """
        for name in {name for each in self.all for name in each.shown}:
            shards = self._shown(name)
            lineage, order = shards[0].lineage, shards[0].order
            is_whole = status(registers_of(shards), order) is Status.COMMITTED
            if is_whole and order not in known.get(lineage, ()) and put_together(shards):
                yield lineage, order

    def _ask_others(self, server: Server, before: Server | None) -> None:
        """Ask the others at once: they hear that another one brings the run on now, or whether they are to do so."""
        is_another = self.uploader is not before
        for other in self.used:
            if other is not server and (is_another or (self.uploader is None and not other.why_not)):
                other.is_due = True


@dataclass(frozen=True, slots=True)
class Observed:
    """All that was seen of a run.

    Attributes:
        run: its key.
        view: what its slots hold, and owe.
        tiers: where its snapshots go.
        destinations: what was seen at each, by URL.
        servers: that it may be kept at, if it has any.
    """

    run: str
    view: View
    tiers: Tiers
    destinations: Mapping[str, Destination]
    servers: Servers | None = None


# -- the difference ---------------------------------------------------------------------------------------------------


def actions(desired: Desired, seen: Observed, now_s: float) -> list[Action]:
    """Everything that is to be done for a run now or later, with what should be done first at each destination first.

    Args:
        desired: what should be.
        seen: what was seen.
        now_s: the time.
    """
    found = [*_uploads(desired, seen), *_removals(desired, seen)]
    if seen.servers is not None:
        found += _questions(desired, seen, seen.servers, now_s)
    return sorted((_paused(each, seen.destinations.get(each.url)) for each in found), key=lambda action: action.rank)


def _paused(action: Action, at: Destination | None) -> Action:
    """When something may be done, by what failed at its destination, and what waits for others there."""
    if at is None or action.kind.is_question:
        return action
    return replace(action, due_s=max(action.due_s, at.due_s(action.key)), again=action.key in at.tried)


def awaited(desired: Desired, seen: Observed) -> set[str]:
    """URLs that are waited for: not where only a retention fails, nor a spare replica is missing."""
    states = {slot: group.state for group in seen.view.groups for slot in group.slots}
    found = {
        url
        for slot, urls in seen.view.owed.items()
        for url in urls
        if _is_awaited(desired, seen, slot, url, states.get(slot, Status.COMMITTED))
    }
    for url, destination in seen.destinations.items():
        if any(key_of(each.manifest) == seen.run for each in destination.deletions):
            found.add(url)
        is_retained = desired.info is not None and seen.run in destination.newest
        if is_retained and (Kind.RETAIN.value, seen.run, "") not in destination.tried:
            found.add(url)
    return found


def _is_awaited(desired: Desired, seen: Observed, slot: Slot, url: str, state: Status) -> bool:
    """Whether anybody waits for what a slot owes to a destination.

    A further replica of what is durable is not waited for, and a shard at storage only if its snapshot is meant to be
    there. Where that is not complete, and no more comes of its trainer, or this server is about to end, it is waited
    for until storage has what this server has of it: who has the rest commits it.
    """
    info, shard, is_pending = desired.info, slot.shard, state is Status.PENDING
    if names_server(url):
        return not (info is not None and info.replicas > 1 and slot.is_durable)
    if slot.manifest is None or shard is None:
        return True
    if url in seen.tiers.carried and (is_pending or not shard.persist):
        return False  # another server brings it there, if anybody does
    if state is not Status.COMMITTED and info is not None and info.hosts == 1:
        return False  # it never is there without the rest, which is to come here
    if is_pending or desired.leaves or not desired.is_live:
        key = (Kind.PUT_SHARDS.value, seen.run, slot.manifest.snapshot)
        destination = seen.destinations.get(url)
        return destination is None or not destination.waits(key)
    return shard.persist and not shard.failed


# -- bytes ------------------------------------------------------------------------------------------------------------


def _uploads(desired: Desired, seen: Observed) -> Iterator[Action]:
    """What is to be brought somewhere of all that is committed here."""
    files = [slot for slot in seen.view.owed if slot.snapshot is None]
    for slot in files:
        for url in _brings(desired, seen, slot):
            yield _upload(url, seen.run, [slot], Kind.SEND if names_server(url) else Kind.PUT)
    # Servers get what is whole here first: shards of incomplete snapshots keep coming, and would hold it up for ever.
    whole = [group for group in seen.view.groups if group.is_here and group.manifest.shard is not None]
    whole_to = {url for group in whole for url in _owed(desired, seen, group)}
    for group in seen.view.groups:
        for url, slots in _owed(desired, seen, group).items():
            if not names_server(url):
                if group.state is Status.ABORTED and desired.info is not None and not desired.is_spread:
                    continue  # why it failed: all of it was to come here, and no other place waits for it at storage
                action = _upload(url, seen.run, group.slots, Kind.PUT if group.is_here else Kind.PUT_SHARDS)
                yield replace(action, due_s=_storage_due_s(desired, seen, url, group))
            elif group.is_here or url not in whole_to:
                yield _upload(url, seen.run, slots, Kind.SEND)


def _owed(desired: Desired, seen: Observed, group: Group) -> dict[str, list[Slot]]:
    """Slots of a snapshot by the destination that they are to be brought to from here."""
    found: dict[str, list[Slot]] = {}
    for slot in group.slots:
        for url in _brings(desired, seen, slot):
            found.setdefault(url, []).append(slot)
    return found


def _brings(desired: Desired, seen: Observed, slot: Slot) -> Iterator[str]:
    """URLs that this server must bring by itself what a slot holds."""
    for url in seen.view.owed.get(slot, ()):
        is_ours = slot.commit.destinations is not None or url not in seen.tiers.carried
        if is_ours and (slot.seen.get(url) is not Mark.INEXACT or desired.must_be_exact(slot.manifest)):
            yield url


def _upload(url: str, run: str, slots: Iterable[Slot], kind: Kind) -> Action:
    slots = tuple(slots)
    return Action(kind, url, run, 0.0, slots[0].manifest, slots, max(slot.commit.sequence for slot in slots))


def _storage_due_s(desired: Desired, seen: Observed, url: str, group: Group) -> float:
    """When storage may take what is here of a snapshot at the soonest, 0 for at once."""
    if not group.is_here:
        return _shards_due_s(desired, group)
    if not group.persist and not desired.urgent:
        return desired.presumed_gone_s
    return 0.0 if group.manifest.complete else _pace_due_s(desired, seen, url, group.slots[0])


def _shards_due_s(desired: Desired, group: Group) -> float:
    """When storage may take shards of a snapshot not all of which is here.

    =====================================================  =========================================================
    The rest is to come here, or storage needs none of it  when the trainer counts as gone
    Others have the rest; the trainer is here, or done     once this host's other ranks have had time to put theirs
    Others have the rest; no trainer is here, one waits    at once
    Others have the rest; no trainer is here               once they are known to have it, or the trainer counts as gone
    =====================================================  =========================================================
    """
    if not (group.persist or desired.urgent) or (desired.info is not None and not desired.is_spread):
        return desired.presumed_gone_s
    if desired.is_spread and (desired.is_live or (group.manifest.complete and not desired.urgent)):
        return max(slot.commit.at_s for slot in group.slots) + _TOGETHER_S
    if desired.is_spread and desired.urgent:
        return 0.0
    return desired.presumed_gone_s if group.state is Status.PENDING else 0.0


def _pace_due_s(desired: Desired, seen: Observed, url: str, slot: Slot) -> float:
    """When storage may take a snapshot at the soonest, so that two are far enough apart."""
    info, destination = desired.info, seen.destinations.get(url)
    if info is None or destination is None or seen.run not in destination.uploaded_s or desired.urgent:
        return 0.0
    begun_s, took_s = destination.uploaded_s[seen.run]
    if info.min_upload_interval_s is not None:
        return begun_s + info.min_upload_interval_s
    # With memory for one, the next one waits until it is safe.
    if slot.commit.after_s > QUICK_S or not info.session or desired.is_stuck(slot.writer):
        return 0.0
    return min(begun_s + min(took_s * APART_FACTOR, MOST_APART_S), slot.commit.at_s + QUICK_S)


# -- what is not to be there any more ---------------------------------------------------------------------------------


def _removals(desired: Desired, seen: Observed) -> Iterator[Action]:
    for url, destination in seen.destinations.items():
        # The latest first. A deletion waits for the files that it is behind, also for one that was saved again since.
        # Where such a file was deleted before it was ever uploaded, it waits for what that later deletion waits for.
        coming = {*owed_files(seen.view, url)}
        for each in reversed([each for each in destination.deletions if key_of(each.manifest) == seen.run]):
            if each.behind.keys().isdisjoint(coming):
                yield Action(Kind.DELETE, url, seen.run, manifest=each.manifest)
            else:
                coming.add(each.manifest.name)
        # What a run keeps is not guessed: if it is forgotten, that waits until it is opened again.
        if (newest := destination.newest.get(seen.run)) is not None and desired.info is not None:
            yield Action(Kind.RETAIN, url, seen.run, manifest=newest)


def owed_files(view: View, url: str) -> dict[str, int]:
    """Name and commit of each file of a run that is owed at a destination."""
    owed = [slot for slot, urls in view.owed.items() if slot.snapshot is None and url in urls]
    return {slot.content.name: slot.commit.sequence for slot in owed}


# -- questions to servers ---------------------------------------------------------------------------------------------


def _questions(desired: Desired, seen: Observed, servers: Servers, now_s: float) -> Iterator[Action]:
    for server, due_s in _asks(servers, now_s):
        yield Action(Kind.ASK, server.url, seen.run, due_s)
    groups = seen.view.groups if desired.is_spread else ()
    pending = [slot for group in groups if group.state is Status.PENDING for slot in group.slots]
    for server in servers.all:
        behind = unknown(desired, seen, server) if not server.is_due else []
        if waiting := pending + behind:
            newest_s = max(slot.commit.at_s for slot in waiting)
            due_s = 0.0 if desired.urgent and behind else _looks_again_s(server.looked_s, newest_s, LAST_LOOK_S)
            yield Action(Kind.LOOK, server.url, seen.run, due_s if server.used else max(due_s, server.away_until_s))


def _looks_again_s(looked_s: float, since_s: float, most_s: float) -> float:
    """When something is looked at again: soon after it has changed, and less and less often after that.

    Args:
        looked_s: when it was looked at last.
        since_s: when it changed.
        most_s: between two looks.
    """
    return max(0.0, looked_s + min(most_s, max(FIRST_LOOK_S, (looked_s - since_s) / 4)))


def _asks(servers: Servers, now_s: float) -> Iterator[tuple[Server, float]]:
    """Which servers are to be asked how things are, and when.

    Also where nothing is owed: a server that was stopped breaks no connection, and one that is lost has lost what
    counted as safe there.
    """
    idle = [each for each in servers.all if each.asked is Role.NONE]
    for server in idle:
        if server.used:
            yield server, 0.0 if server.is_due else server.answered_s + ASK_AGAIN_S
    spare = sorted((each for each in idle if not each.used), key=lambda each: max(each.away_until_s, now_s))
    lacking = servers.replicas - (len(servers.all) - len(spare))
    for server in spare[: max(0, lacking)]:
        yield server, server.away_until_s if server.away_until_s > now_s else 0.0


def expected(seen: Observed, server: Server, *, durable_too: bool) -> list[Slot]:
    """Slots with the newest snapshots that were safe at a server: if it has lost them, they are owed again.

    Args:
        seen: what was seen.
        server: which.
        durable_too: also those that are durable: it may have let them go since, or have come back empty.
    """
    return [
        slot
        for slot in seen.view.newest
        if slot.seen.get(server.url) is Mark.SAFE
        and not slot.content.why_failed
        and (durable_too or not slot.is_durable)
    ]


def newest_durable(seen: Observed) -> Manifest | None:
    """The newest snapshot that is known to be durable: a server that does not bring it there may let it go."""
    durable = (slot.snapshot for slot in seen.view.slots if slot.is_durable)
    # One that is not exact says nothing of the exact ones before it.
    found = [each for each in durable if each is not None and each.exact and not each.why_failed]
    return max(found, key=lambda each: each.order, default=None)


def unknown(desired: Desired, seen: Observed, server: Server) -> list[Slot]:
    """Slots with snapshots that a server has, and uploads, of which it is not known yet that they are durable.

    Those that storage is not meant to have are waited for only where nothing newer comes.
    """
    if server.role is not Role.UPLOADS:
        return []
    durable_url = seen.servers.info.durable_url if seen.servers is not None else None
    all_too = desired.urgent or desired.is_abandoned
    return [
        slot
        for slot, urls in seen.view.owed.items()
        if durable_url in urls
        and slot.commit.destinations is None
        and slot.seen.get(server.url) is Mark.SAFE
        and (all_too or slot.shard is None or slot.shard.persist)
    ]
