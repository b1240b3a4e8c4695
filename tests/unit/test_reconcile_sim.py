"""Hosts, snapshot servers and storage with a clock of their own, stepped by chance over what is to be done.

Each place has real slots, and does what :func:`lightning_spot.server.reconcile.actions` says. Requests are lost, not
answered, late or come twice; places are killed, come back empty or with their slots; servers are cut off, storage
fails; trainers fail to write a shard, are killed, and go on from the newest snapshot that is left. Defects that are
planted in that are found.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_spot.server import reconcile
from lightning_spot.server.reconcile import Action, Desired, Destination, Kind, Observed, Role, Servers
from lightning_spot.server.runs import Opened, RunInfo
from lightning_spot.server.slots import Commit, Known, Mark, Slot, SlotState, Tiers, View
from lightning_spot.snapshot.manifest import Manifest, Order, ShardOf, order_name, shard_name, snapshot_order
from lightning_spot.snapshot.shards import Status, failed, registers_of, status, why_aborted
from lightning_spot.store.retention import Keep
from tests.support.server import RUN_ID
from tests.support.shards import failed_shard, shard_manifest

STORAGE = "/storage"
LINEAGE = "1" * 12
KEEP = 2


@functools.lru_cache(maxsize=4096)
def made(step: int, writer: int, writers: int, attempt: int, what: str) -> Manifest:
    """A writer's shard; ``what``: ``good``, of ``other`` ranks' plan, ``failed``, or not ``kept`` at storage."""
    if what == "failed":
        return failed_shard(step, writer, writers, attempt=attempt)
    manifest = shard_manifest(step, writer, writers, attempt=attempt)
    digest, persist = ("other" if what == "other" else "plan"), what != "unkept"
    checksums = ("0" * 32,) * (manifest.nbytes // manifest.part_bytes)
    return replace(manifest, shard=replace(manifest.shard, digest=digest, persist=persist), checksums=checksums)


SEEN = "aborted, as was seen at storage"


@dataclass(eq=False)
class Storage:
    """A directory: folders of snapshots, with files, notes, and in the end a manifest."""

    committed: dict[str, list[Manifest]] = field(default_factory=dict)
    files: dict[str, dict[int, Manifest]] = field(default_factory=dict)
    notes: dict[str, dict[int, Manifest]] = field(default_factory=dict)
    ever: dict[str, dict[int, ShardOf]] = field(default_factory=dict)
    fails: bool = False

    def registers(self, name: str) -> dict[int, ShardOf]:
        return registers_of(self.notes.get(name, {}).values())

    def take(self, name: str, shards: tuple[Manifest, ...]) -> dict[int, ShardOf]:
        """As :func:`lightning_spot.store.commit.put_shards` does; the registers that were found."""
        if name in self.committed:
            return {}
        is_aborted = bool(why_aborted(self.registers(name)))
        for each in shards:
            if each.why_failed or not is_aborted:
                self.notes.setdefault(name, {})[each.shard.writer] = each
            if not (each.why_failed or is_aborted):
                self.files.setdefault(name, {})[each.shard.writer] = each
        found = self.registers(name)
        if why_aborted(found):
            self.take_back(name, [each for each in shards if not each.why_failed])
        elif status(found, (0, 0, 0)) is Status.COMMITTED:
            self.commit(name, [self.notes[name][writer] for writer in sorted(found)])
        return found

    def take_back(self, name: str, shards: list[Manifest]) -> None:
        """Of an aborted snapshot: its writers count as failed; once all do, nothing is left."""
        for each in shards:
            self.files.get(name, {}).pop(each.shard.writer, None)
            self.notes.setdefault(name, {})[each.shard.writer] = failed(each, SEEN)
        found = self.registers(name)
        if not self.files.get(name, True):
            del self.files[name]
        if found and len([each for each in found.values() if each.failed]) == next(iter(found.values())).writers:
            self.notes.pop(name)

    def commit(self, name: str, shards: list[Manifest]) -> None:
        self.committed[name] = shards
        self.ever[name] = registers_of(shards)
        self.files.pop(name, None)
        self.notes.pop(name, None)


@dataclass(eq=False)
class Place:
    """A host's ring, or a server."""

    name: str
    info: RunInfo
    slots: list[Slot] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    destinations: dict[str, Destination] = field(default_factory=dict)
    servers: Servers | None = None
    tiers: Tiers = field(default_factory=Tiers)
    asked_s: float = 0.0
    urgent: bool = False
    sequence: int = 0
    busy: dict[tuple[str, bool], tuple[Action, tuple[Manifest, ...]]] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        return self.name.startswith("host")

    def view(self) -> View:
        if self.servers is not None:
            self.tiers = self.servers.tiers()
        return View(self.slots, self.tiers, self.known)

    def put(self, manifest: Manifest, now_s: float) -> None:
        if all(slot.manifest.name != manifest.name for slot in self.slots):
            self.sequence += 1
            slot = Slot(
                self.sequence, SlotState.HELD, run=RUN_ID, writer=manifest.shard.writer, reserved_bytes=manifest.nbytes
            )
            slot.manifest, slot.commit = manifest, Commit(self.sequence, now_s)
            self.slots.append(slot)

    def mark(self, slot: Slot, manifest: Manifest, url: str, mark: Mark) -> None:
        if slot.manifest is not manifest:
            return
        slot.seen[url] = mark
        of_it = [each for each in self.slots if each.manifest.snapshot == manifest.snapshot]
        shards = registers_of(each.manifest for each in of_it)
        is_whole = status(shards, manifest.order) is Status.COMMITTED
        if mark is Mark.SAFE and is_whole and all(each.seen.get(url) is Mark.SAFE for each in of_it):
            self.committed(manifest.order)

    def committed(self, order: Order) -> None:
        self.known.committed.setdefault(LINEAGE, set()).add(order)

    def newest_known(self) -> Order | None:
        return max(self.known.committed.get(LINEAGE, ()), default=None)


class World:
    """Everything there is.

    Args:
        seed: of all chance.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        self.now_s = 1000.0
        self.attempt, self.step = 1, 0
        self.writers = chance.choice([1, 2, 2, 3])
        self.hosts = chance.choice([1, self.writers])
        self.replicas = chance.choice([1, 1, 2])
        count = chance.choice([0, 1, 2, 3])
        names = [f"spot://server-{number}" for number in range(count)]
        self.storage = Storage()
        self.servers = {name: Place(name, self.info(carry=False)) for name in names}
        self.rings: list[Place] = []
        for host in range(self.hosts):
            place = Place(f"host-{host}", self.info(servers=tuple(names), session="live"))
            self.rings.append(place)
            self.open(place, apart=chance.random() < 0.5)
        self.cut: set[tuple[str, str]] = set()
        self.late: list[tuple[str, Manifest]] = []
        self.written: dict[str, Manifest] = {}  # what each register was written as, by name
        self.ever: dict[str, dict[int, ShardOf]] = {}  # registers that servers or storage ever had
        self.failures = 0.3  # of requests
        self.problem = ""

    def info(self, **more: object) -> RunInfo:
        info = RunInfo(name="run", id=RUN_ID, location=STORAGE, attempt=1, token="t", durable_url=STORAGE)
        return replace(info, keep=Keep(newest=KEEP), replicas=self.replicas, hosts=self.hosts, **more)  # type: ignore[arg-type]

    def open(self, place: Place, *, apart: bool) -> None:
        if place.info.servers:
            number = self.rings.index(place) if apart else 0
            servers = (*place.info.servers[number:], *place.info.servers[:number])
            place.info = replace(place.info, servers=servers)
            place.servers = Servers(place.info)
        else:
            place.tiers = Tiers((STORAGE,))

    @property
    def all(self) -> list[Place]:
        return [*self.rings, *self.servers.values()]

    # -- what is there --------------------------------------------------------------------------------------------

    def registers(self, *, safe_only: bool = False) -> dict[str, dict[int, ShardOf]]:
        """Registers of all snapshots over all places, or those that outlive hosts."""
        found: dict[str, dict[int, ShardOf]] = {}
        for place in self.servers.values() if safe_only else self.all:
            for slot in place.slots:
                found.setdefault(slot.manifest.snapshot, {})[slot.writer] = slot.shard
        for name, notes in self.storage.notes.items():
            found.setdefault(name, {}).update(registers_of(each for each in notes.values() if each.why_failed != SEEN))
        for name, shards in self.storage.committed.items():
            found.setdefault(name, {}).update(registers_of(shards))
        return found

    def recoverable(self) -> Order:
        """Of the newest snapshot that a start would find."""
        orders = [
            order_of(name) for name, shards in self.registers().items() if status(shards, (0, 0, 0)) is Status.COMMITTED
        ]
        return max(orders, default=(0, 0, 0))

    def observed(self, place: Place) -> Observed:
        view = place.view()
        return Observed(RUN_ID, view, place.tiers, place.destinations, place.servers)

    def desired(self, place: Place) -> Desired:
        is_abandoned = place.info.left or (bool(place.info.servers) and not place.info.session)
        gone_s = reconcile.presumed_gone_s(place.info, place.asked_s, None)
        return Desired(info=place.info, presumed_gone_s=gone_s, urgent=place.urgent, is_abandoned=is_abandoned)

    def actions(self, place: Place) -> list[Action]:
        return reconcile.actions(self.desired(place), self.observed(place), self.now_s)

    # -- what happens ---------------------------------------------------------------------------------------------

    def happen(self) -> None:
        """One thing, by chance."""
        before = self.recoverable()
        odds = {self.write: 3, self.work: 12, self.evict: 2, self.pass_time: 3, self.arrive: 1}
        (what,) = self.chance.choices([*odds], [*odds.values()])
        what()
        if self.recoverable() < before:
            self.problem = self.problem or f"{what.__name__} lost {before}: a start would find {self.recoverable()}"
        self.check()
        if self.chance.random() < 0.06:
            self.fault()

    def write(self) -> None:
        """A step: each writer has its shard, or has none; some may have it much later, or never."""
        host = self.chance.choice(self.rings)
        if not host.info.session:
            return
        self.step += 1
        kept = self.chance.random() < 0.8
        for writer in range(self.writers):
            place = self.rings[writer % self.hosts]
            odds = self.chance.random()
            if not place.info.session or odds < 0.05:
                continue  # it was killed before that
            what = "failed" if odds < 0.12 else "other" if odds < 0.15 else "good" if kept else "unkept"
            manifest = made(self.step, writer, self.writers, self.attempt, what)
            self.written[manifest.name] = manifest
            place.put(manifest, self.now_s)

    def work(self, place: Place | None = None) -> bool:
        """A place begins the next thing, or ends what it has begun; whether there was anything."""
        place = place or self.chance.choice(self.all)
        if place.busy and self.chance.random() < 0.6:
            lane = self.chance.choice(list(place.busy))
            self.end(place, *place.busy.pop(lane))
            return True
        for slot in place.view().superfluous(KEEP, self.now_s):
            place.slots.remove(slot)
        ready = [each for each in self.actions(place) if each.due_s <= self.now_s]
        lanes = dict.fromkeys(each.lane for each in ready)
        free = [lane for lane in lanes if lane not in place.busy]
        if not free:
            return False
        lane = self.chance.choice(free)
        action = next(each for each in ready if each.lane == lane)
        if action.kind is Kind.ASK and place.servers is not None:
            server = place.servers.find(action.url)
            place.servers.asks(server, self.now_s)
        elif not action.kind.is_question:
            place.destinations.setdefault(action.url, Destination(action.url))
        for slot in action.slots:
            slot.readers += 1
        manifests = tuple(slot.manifest for slot in action.slots)
        place.busy[lane] = action, manifests
        return True

    def end(self, place: Place, action: Action, manifests: tuple[Manifest, ...]) -> None:
        """What a place has begun comes to its end, in one of several ways."""
        for slot in action.slots:
            slot.readers -= 1
        reached = not self.storage.fails if action.url == STORAGE else (place.name, base_of(action.url)) not in self.cut
        odds = self.chance.random()
        does, hears = reached and odds >= self.failures / 2, reached and odds >= self.failures
        if does and self.chance.random() < 0.1 and action.kind is Kind.SEND:
            self.late += [(base_of(action.url), manifest) for manifest in manifests]  # it comes a second time
        noted = getattr(self, action.kind.name.lower())(place, action, manifests) if does else None
        if hears and noted is not None:
            noted()
        elif action.kind.is_question:
            if place.servers is not None and (server := place.servers.find(action.url)) is not None:
                if action.kind is Kind.ASK:
                    place.servers.lost(server, "it does not answer", self.now_s)
                elif server.used:
                    place.servers.heard(server, "it does not answer", self.now_s)
                else:
                    server.away_until_s = max(server.away_until_s, self.now_s + reconcile.ASK_AGAIN_S)
        else:
            place.destinations[action.url].failed(action, "it failed", self.now_s)
            self.heard(place, action, "it failed")

    def heard(self, place: Place, action: Action, why: str) -> None:
        if place.servers is not None and (server := place.servers.find(action.url)) is not None:
            place.servers.heard(server, why, self.now_s)

    def done(self, place: Place, action: Action) -> None:
        place.destinations[action.url].done(action)
        self.heard(place, action, "")

    def shown(self, name: str, shards: dict[int, ShardOf]) -> None:
        self.ever.setdefault(name, {}).update(shards)

    def arrive(self) -> None:
        """What was sent long ago comes once more."""
        if self.late:
            name, manifest = self.late.pop(self.chance.randrange(len(self.late)))
            self.servers[name].put(manifest, self.now_s)
            self.shown(manifest.snapshot, registers_of([manifest]))

    def evict(self) -> None:
        """A place needs memory."""
        place = self.chance.choice(self.all)
        if idle := place.view().evictable(self.now_s):
            place.slots.remove(idle[0])

    def pass_time(self) -> None:
        self.now_s += self.chance.choice([0.1, 0.5, 2.0, 12.0, 40.0])

    def fault(self) -> None:
        """Something breaks, or works again."""
        host, server = self.chance.choice(self.rings), self.chance.choice([*self.servers, ""])
        odds = self.chance.random()
        if odds < 0.2:
            self.storage.fails = not self.storage.fails
        elif odds < 0.45 and server:
            self.cut ^= {(host.name, server)}
        elif odds < 0.6 and server:
            self.restart(self.servers[server], empty=self.chance.random() < 0.5)
        elif odds < 0.75:
            self.restart(host, empty=self.chance.random() < 0.3)
        elif odds < 0.9:
            self.kill_trainers()
        else:
            host.urgent = not host.urgent

    def restart(self, place: Place, *, empty: bool) -> None:
        """Its server was killed: its slots are left, or lost, and nothing else."""
        for action, _ in place.busy.values():
            for slot in action.slots:
                slot.readers -= 1
        place.busy.clear()
        place.slots[:] = [] if empty else place.slots
        place.known, place.destinations, place.asked_s = Known(), {}, self.now_s
        for slot in place.slots:  # what it did not write down
            slot.seen = {url: mark for url, mark in slot.seen.items() if mark is not Mark.INEXACT}
        if place.servers is not None:
            place.servers = Servers(place.info)
        elif not place.is_host:
            place.tiers, place.info = Tiers(), replace(place.info, carry=False)

    def kill_trainers(self) -> None:
        """All of them; they begin again at once, or not."""
        goes_on = self.chance.random() < 0.7
        self.attempt += goes_on
        for place in self.rings:
            place.info = replace(place.info, session="live" if goes_on else "", attempt=self.attempt)
            place.asked_s = self.now_s

    # -- what is done ---------------------------------------------------------------------------------------------

    def send(self, place: Place, action: Action, manifests: tuple[Manifest, ...]) -> Callable[[], None]:
        server = self.servers[base_of(action.url)]
        for manifest in manifests:
            server.put(manifest, self.now_s)
            self.shown(manifest.snapshot, registers_of([manifest]))

        def note() -> None:
            for slot, manifest in zip(action.slots, manifests, strict=True):
                place.mark(slot, manifest, action.url, Mark.SAFE)
            self.done(place, action)

        return note

    def put(self, place: Place, action: Action, manifests: tuple[Manifest, ...]) -> Callable[[], None]:
        name = action.about.snapshot
        self.storage.commit(name, list(manifests))
        self.shown(name, registers_of(manifests))

        def note() -> None:
            if STORAGE not in place.tiers.carried:
                place.destinations[STORAGE].newest[RUN_ID] = action.about
            self.safe(place, action, manifests)

        return note

    def safe(self, place: Place, action: Action, manifests: tuple[Manifest, ...]) -> None:
        for slot, manifest in zip(action.slots, manifests, strict=True):
            place.mark(slot, manifest, STORAGE, Mark.SAFE)
        place.committed(action.about.order)
        self.done(place, action)

    def put_shards(self, place: Place, action: Action, manifests: tuple[Manifest, ...]) -> Callable[[], None]:
        name, storage = action.about.snapshot, self.storage
        to = place.destinations[STORAGE]
        registers = storage.take(name, manifests)
        self.shown(name, registers)

        def note() -> None:
            place.known.seen_registers[name] = registers
            if name in storage.committed:
                if STORAGE not in place.tiers.carried:
                    to.newest[RUN_ID] = action.about
                self.safe(place, action, manifests)
            elif why_aborted(registers):
                for slot, manifest in zip(action.slots, manifests, strict=True):
                    place.mark(slot, manifest, STORAGE, Mark.REFUSED)
            else:
                since_s = to.waits_for(action, len(registers), self.now_s)
                waited_s = self.now_s - max(since_s, self.desired(place).presumed_gone_s)
                newer = any(order_of(each) > action.about.order for each in storage.committed)
                if waited_s >= reconcile.SURPASSED_S and newer:
                    to.done(action)
                    for slot, manifest in zip(action.slots, manifests, strict=True):
                        place.mark(slot, manifest, STORAGE, Mark.REFUSED)

        return note

    def retain(self, place: Place, action: Action, _: tuple[Manifest, ...]) -> Callable[[], None]:
        for name in sorted(self.storage.committed, key=order_of)[:-KEEP]:
            if order_of(name) < action.about.order:
                del self.storage.committed[name]
        return lambda: self.done(place, action)

    def ask(self, place: Place, action: Action, _: tuple[Manifest, ...]) -> Callable[[], None]:
        server, servers = self.servers[base_of(action.url)], place.servers
        mine = servers.find(action.url)
        upload = mine.asked is Role.UPLOADS
        server.info = replace(server.info, carry=upload or (server.info.carry and place is not self.rings[0]))
        server.tiers = Tiers((STORAGE,)) if server.info.carry else Tiers()
        server.asked_s = self.now_s
        if (order := place.newest_known()) is not None and server.slots:
            server.committed(order)
        if (durable := reconcile.newest_durable(self.observed(place))) is not None:
            for slot in server.slots:
                slot.durable_or_superseded |= slot.snapshot is not None and slot.snapshot.order <= durable.order
        listed = {slot.manifest.name for slot in server.slots}

        def note() -> None:
            for slot in reconcile.expected(self.observed(place), mine, durable_too=not mine.used):
                if slot.manifest.name not in listed:
                    del slot.seen[action.url]
            servers.answered(mine, Opened(1, upload), self.now_s)

        return note

    def look(self, place: Place, action: Action, _: tuple[Manifest, ...]) -> Callable[[], None]:
        servers, server, committed = place.servers, self.servers[base_of(action.url)], set(self.storage.committed)
        mine = servers.find(action.url)
        listed = {slot.manifest.name: slot for slot in server.slots}
        shown: dict[str, list[Manifest]] = {}
        for slot in server.slots:
            shown.setdefault(slot.manifest.snapshot, []).append(slot.manifest)

        def note() -> None:
            for slot in reconcile.unknown(self.desired(place), self.observed(place), mine):
                manifest = slot.manifest
                there = listed.get(manifest.name)
                is_safe = manifest.snapshot in committed if there is None else there.seen.get(STORAGE) is Mark.SAFE
                if is_safe:
                    place.mark(slot, manifest, STORAGE, Mark.SAFE)
                    place.committed(manifest.order)
                elif there is None and not self.storage.fails:
                    del slot.seen[action.url]
            mine.shown, mine.looked_s = shown, self.now_s
            for _lineage, order in servers.committed({}):
                place.committed(order)
            for group in place.view().groups:
                name = group.manifest.snapshot
                if group.state is Status.PENDING and (found := servers.registers(name)):
                    place.known.seen_registers[name] = found

        return note

    # -- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        for name, shards in self.registers().items():
            wrong = [each for each in shards.values() if self.written_as(name, each.writer) != each]
            if wrong:
                self.problem = self.problem or f"a register of {name} is another one than was written"
        for name, made_of in self.storage.committed.items():
            if status(registers_of(made_of), (0, 0, 0)) is not Status.COMMITTED:
                self.problem = self.problem or f"{name} at storage is no whole snapshot of one plan"
        for place in self.all:
            for order in place.known.committed.get(LINEAGE, ()):
                name = order_name(order)
                ever = {**self.ever.get(name, {}), **self.storage.ever.get(name, {})}
                if status(ever, order) is not Status.COMMITTED:
                    self.problem = self.problem or f"{place.name} counts {name}, of which not all was ever safe"

    def written_as(self, name: str, writer: int) -> ShardOf | None:
        found = self.written.get(shard_name(name, writer))
        return found.shard if found is not None else None

    def settle(self, rounds: int = 45) -> None:
        """No more faults: everything that is desired comes to be in a bounded number of rounds.

        In some of the worlds no server is ever reached again; in others one has come back empty, while storage fails.
        """
        self.failures, self.storage.fails = 0.0, False
        self.cut.clear()
        self.late.clear()
        how = self.chance.choice(["plain", "alone", "emptied"])
        if how == "alone":
            self.cut = {(place.name, server) for place in self.rings for server in self.servers}
        for place in self.rings:
            place.info, place.urgent = replace(place.info, session="live", attempt=self.attempt), False
        self.step += 1
        for writer in range(self.writers):  # the last one, of the end of the run, is a good one
            manifest = made(self.step, writer, self.writers, self.attempt, "good")
            self.written[manifest.name] = manifest
            self.rings[writer % self.hosts].put(manifest, self.now_s)
        for number in range(rounds):
            if how == "emptied":
                self.storage.fails = number < 18
                if number == 8 and self.servers:
                    self.restart(self.servers[self.chance.choice([*self.servers])], empty=True)
                if number == 17:
                    self.problem = self.problem or next(self.not_sent(), "")
            before = self.recoverable()
            for place in self.all:
                self.work_off(place)
            if self.recoverable() < before:
                self.problem = self.problem or f"{before} was lost while nothing failed"
            self.check()
            self.now_s += 5.0
        self.problem = self.problem or next(self.left_over(), "")

    def work_off(self, place: Place) -> None:
        """A place does everything that is to be done now."""
        for _ in range(100):
            while place.busy:
                self.end(place, *place.busy.popitem()[1])
            if not self.work(place):
                return
        self.problem = self.problem or f"{place.name} is never done: {self.actions(place)[:1]}"

    def not_sent(self) -> Iterator[str]:
        """What of the last snapshot is not at the servers that it is to be at."""
        last = made(self.step, 0, self.writers, self.attempt, "good")
        for place in self.rings:
            for slot in place.slots:
                if slot.manifest.snapshot == last.snapshot and place.servers is not None:
                    for server in place.servers.used:
                        there = [each.manifest for each in self.servers[base_of(server.url)].slots]
                        if slot.manifest not in there:
                            yield f"{slot.manifest.name} is not at {server.url}"

    def left_over(self) -> Iterator[str]:
        """What is not as it should be in the end."""
        last = made(self.step, 0, self.writers, self.attempt, "good")
        if last.snapshot not in self.storage.committed:
            yield f"{last.snapshot} is not at storage"
        lacking = min(self.replicas, len(self.servers)) if not self.cut else 0
        for place in self.rings:
            used = place.servers.used if place.servers is not None else []
            if len(used) != lacking:
                yield f"{place.name} uses {len(used)} servers of {lacking}"
            for slot in place.slots:
                absent = slot.lacks([*(each.url for each in used), STORAGE])
                if absent and slot.manifest.snapshot == last.snapshot:
                    yield f"{slot.manifest.name} is not known to be at {absent}"
        for place in self.all:
            names = {slot.manifest.snapshot for slot in place.slots}
            if len(names) > KEEP + 2 + 16:
                yield f"{place.name} holds {len(names)} snapshots"


def base_of(url: str) -> str:
    return url.rpartition("/")[0]


order_of = functools.lru_cache(maxsize=4096)(snapshot_order)


def simulate(seed: int, steps: int = 70) -> str:
    """What went wrong with a seed; ``""`` if nothing did."""
    world = World(seed)
    for number in range(steps):
        world.happen()
        if world.problem:
            return f"seed {seed}, step {number}: {world.problem}"
    world.settle()
    return f"seed {seed}, in the end: {world.problem}" if world.problem else ""


pytestmark = pytest.mark.guarantee("G3")

FIRST = [range(first, first + 50) for first in range(0, 200, 50)]
THOUSANDS = [
    pytest.param(range(first, first + 1000), marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
    for first in range(0, 10_000, 1000)
]


@pytest.mark.parametrize("seeds", [*FIRST, *THOUSANDS], ids=str)
def test_whatever_happens_nothing_is_lost_mixed_or_left_over(seeds: range) -> None:
    assert [problem for seed in seeds if (problem := simulate(seed))] == []


def nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def anything_may_go(view: View, _now_s: float) -> list[Any]:
    return [slot for slot in view.slots if not slot.readers]


def what_is_owed_may_go(view: View, now_s: float) -> list[Any]:
    groups = {slot for group in view.groups if group.is_evictable(now_s) for slot in group.slots}
    newest = {slot for slot in view.newest if Mark.SAFE not in slot.seen.values()}
    return [slot for slot in view.slots if (slot in groups or slot in newest) and not slot.readers]


def all_writers_whatever_they_say(servers: Servers, _known: Any) -> Any:
    for name, shown in {name: shown[0] for each in servers.all for name, shown in each.shown.items()}.items():
        if shown.shard is not None and len(servers.registers(name)) == shown.shard.writers:
            yield shown.lineage, shown.order


def without(kind: Kind, real: Any = reconcile.actions) -> Any:
    return lambda *about: [action for action in real(*about) if action.kind is not kind]


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (reconcile, "expected", nothing),
        (reconcile, "unknown", nothing),
        (reconcile, "actions", without(Kind.PUT_SHARDS)),
        (reconcile, "actions", without(Kind.LOOK)),
        (Servers, "is_nobody", property(lambda _: False)),
        (Servers, "committed", all_writers_whatever_they_say),
        (View, "evictable", anything_may_go),
        (View, "evictable", what_is_owed_may_go),
    ],
    ids=[
        "what a server lost is not sent again",
        "it is not learned what is durable",
        "shards are not brought to storage",
        "no register is looked at",
        "nobody stands in for a server",
        "plans are not compared",
        "the newest gives way",
        "the newest gives way before it is safe",
    ],
)
def test_a_planted_defect_is_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, defect: Any) -> None:
    monkeypatch.setattr(owner, name, defect)
    assert any(simulate(seed) for seed in range(150))
