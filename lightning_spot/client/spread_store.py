"""Snapshots whose portions lie at several snapshot servers: brought there by each host, and read as one store.

No host asks another. Each knows which servers its portion goes to, and sends it there as any snapshot is sent. The
first host looks at all servers until all portions are there; then, and only then, the snapshot counts, and it says so
to all.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from lightning_spot.client.part_lanes import CONNECTIONS
from lightning_spot.client.remote import NodeStore, Telling, Word, at_all, fetch_ranges
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    ServerUnreachableError,
    SettingsError,
    ShareFault,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
)
from lightning_spot.image import notes
from lightning_spot.image.coming import Coming
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, Order, snapshot_order
from lightning_spot.image.packing import Compression
from lightning_spot.image.portion import Image, PortionImage, Portions, missing, place_of, portion_of, starts, whole_of
from lightning_spot.image.written import Ranges
from lightning_spot.memory.held_portions import Told
from lightning_spot.memory.joint import Shared, SpreadPlace
from lightning_spot.memory.joint_store import ByItself, check_gaps
from lightning_spot.memory.placement import placed_portions
from lightning_spot.memory.ring import Glance
from lightning_spot.memory.runs import RunInfo, parse_run
from lightning_spot.memory.tier import Gathering, JointTier, Sent
from lightning_spot.retry import growing
from lightning_spot.say import say
from lightning_spot.tiers.fences import Claim, Owner
from lightning_spot.tiers.store import Holdings, Progress, newest_first

logger = logging.getLogger(__name__)

_MOST_NAMED = 32  # at once; the rest is named the next time

_MOST_SENT = 4
_MOST_DECIDED = 64

WAIT_S = 120.0
"""So much longer than the first one, and three times the time that it took, other hosts may take."""

GONE_S, BROUGHT_S = 8.0, 15.0
"""See :class:`Missing`; to the second one comes three times what a portion took. Who is silent is asked for 5 s."""

_LOOK_S = (0.05, 0.5, 1.5)  # the first pause, the longest, and by what they grow
_OTHERS_S = 10.0  # at least: where that makes its first slot, it may take long

Held = tuple[NodeStore, Manifest]
"""A portion, and the server that has it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen:
    """What is at the servers.

    Attributes:
        held: portions, as :meth:`~lightning_spot.memory.held_portions.Spread.look` tells them.
        torn: why the snapshot that was asked for will never be whole; ``""`` if nobody says so.
        rests_s: how long storage is still to be left alone.
        problems: of the servers that do not answer, by their URLs.
    """

    held: list[dict[str, Any]]
    torn: str
    rests_s: float
    problems: dict[str, SpotError]


class Missing:
    """The portions of one snapshot that are at no server that answers: which of them nobody will bring any more.

    A server whose host is gone says nothing, and what it had is not brought again by whoever has brought it.

    Args:
        order: for each host, by its number, the URLs of the servers to which its portion is brought: first those at
            which it is to be kept, then those that take the place of one that does not work.
        replicas: at how many it is kept.
        gone_s: a portion that was at a server is lost, if it is at none for so long.
        brought_s: so long may it take to bring one past servers that do not answer.
    """

    def __init__(self, order: Sequence[Sequence[str]], replicas: int, *, gone_s: float, brought_s: float) -> None:
        self._first = [set(urls[:replicas]) for urls in order]
        self._gone_s, self._brought_s = gone_s, brought_s
        self._was = {0}  # the first host asks when its own is there
        self._since_s: dict[int, float] = {}

    def lost(self, seen: Seen, missing: Iterable[int], asked_s: float, now_s: float) -> list[int]:
        """Hosts whose portions will not come.

        Args:
            seen: at servers now.
            missing: hosts whose portions are at none of them.
            asked_s: when that was asked, seconds.
            now_s: when all have answered, or were waited for.
        """
        missing, before = set(missing), self._since_s
        self._was |= set(range(len(self._first))) - missing
        late = {host for host in missing if host in self._was or self._first[host] <= seen.problems.keys()}
        self._since_s = {host: before.get(host, asked_s) for host in late}
        bounds = {host: self._gone_s if host in self._was else self._brought_s for host in late}
        return sorted(host for host in late if now_s - self._since_s[host] >= bounds[host])


def whole_names(held: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names of the snapshots of which all portions are among these."""
    hosts: dict[tuple[str, str, int], set[int]] = {}
    for item in held:
        hosts.setdefault((item["name"], item["digest"], item["hosts"]), set()).add(item["host"])
    return (name for (name, _, count), there in hosts.items() if len(there) == count)


def never_whole(held: Sequence[Mapping[str, Any]], begun: str, over: set[str]) -> list[str]:
    """Names of snapshots of the attempt that begins another one, of which nobody will ever say that they are whole.

    One may be declined before it begins, or given up (``over``) while a server does not hear it; and who leads may have
    lost its server, and begin the next one from another.
    """
    whole = {*(set(whole_names(held)) - over), *(item["name"] for item in held if item["whole"])}
    earlier = {item["name"] for item in held if order_of(begun)[0] == order_of(item["name"])[0]}
    return sorted(name for name in earlier - whole if order_of(name) < order_of(begun))


def left_torn(held: Sequence[Mapping[str, Any]], attempt: int) -> list[str]:
    """Names of snapshots of which an earlier attempt, that was killed, has left some portions only.

    Nobody else says so of them, and their memory is needed. What was told to be whole is not among them: a server that
    is lost now may come back with the rest.
    """
    whole = {*whole_names(held), *(item["name"] for item in held if item["whole"])}
    earlier = {item["name"] for item in held if order_of(item["name"])[0] < attempt}
    return sorted(earlier - whole)


def told_of(seen: Seen, name: str, lineage: str = "", *, brings: bool) -> Told:
    """What is to be said of a snapshot that is whole, and of those before it.

    Args:
        seen: what is at the servers.
        name: of the snapshot.
        lineage: its own; by default, as the portion of the first host says.
        brings: whether it is to be brought to storage.
    """
    lineages = {item["name"]: item["lineage"] for item in seen.held if item["lineage"]}
    lineage = lineage or lineages.get(name, "")
    older = {item["name"] for item in seen.held if order_of(item["name"]) < order_of(name)}
    left = {each for each in whole_names(seen.held) if each in older and lineages.get(each, lineage) != lineage}
    return Told(name, brings, tuple(sorted(older - left)[:_MOST_NAMED]), tuple(sorted(left)[:_MOST_NAMED]))


def is_to_be_brought(seen: Seen, manifest: Manifest) -> bool:
    """Whether servers are to bring a snapshot to storage: if none that they were to bring is on its way.

    One that is not whole any more, since a server was lost, is waited for no longer.
    """
    whole = set(whole_names(seen.held))
    on_its_way = any(item["brings"] and item["name"] in whole for item in seen.held)
    return manifest.complete or not (on_its_way or seen.rests_s > 0)


def order_of(name: str) -> Order:
    """Where a snapshot comes among others.

    Raises:
        SettingsError: if the name is none of a snapshot.
    """
    order = snapshot_order(name)
    if order is None:
        raise SettingsError(f"{name!r} names no snapshot")
    return order


class Known:
    """What a host knows of the snapshots of a run, over whichever servers these are spread. From any thread.

    Args:
        nodes: by their URLs.

    Attributes:
        told: name of the newest that servers were told to be whole, and whether it is to be brought to storage.
        telling: tells servers what was decided.
    """

    def __init__(self, nodes: dict[str, NodeStore]) -> None:
        self.told = ("", False)
        self.telling = Telling()
        self._nodes = WeakValueDictionary(nodes)  # as long as a place is made of them
        self._portions: list[Manifest] = []
        self._decided: dict[str, bool] = {}  # by the snapshot's name: whether it is whole, or over
        self._lock = threading.Lock()

    def share(self, nodes: Mapping[str, NodeStore]) -> dict[str, NodeStore]:
        """The same servers, as far as they are known: it was learned how fast they are."""
        with self._lock:
            return {url: self._nodes.setdefault(url, node) for url, node in nodes.items()}

    def sent(self, portion: Manifest) -> None:
        """A portion of this host is at servers."""
        with self._lock:
            self._portions = [*self._portions[-_MOST_SENT + 1 :], portion]

    def find(self, name: str) -> Manifest | None:
        """One of the newest portions that this host has sent."""
        with self._lock:
            return next((portion for portion in self._portions if portion.name == name), None)

    def decide(self, name: str, *, whole: bool) -> bool:
        """Whether a snapshot is whole, or over, as is wanted now. What was decided first stands: servers act upon it.

        Told that it is whole, some let go what is older; told that it is over, they drop what they have of it.
        """
        with self._lock:
            while len(self._decided) >= _MOST_DECIDED:
                del self._decided[next(iter(self._decided))]
            return self._decided.setdefault(name, whole) is whole

    def given_up(self) -> set[str]:
        """Names of snapshots that this host has given up."""
        with self._lock:
            return {name for name, is_whole in self._decided.items() if not is_whole}


class _Sending(Coming):
    """A portion that is whole here, and on its way to a server as long as that is not given up."""

    def stop(self) -> None:
        """Send no further part of it."""
        self._given_up = True


class JointPortions(ByItself):
    """Implements :class:`~lightning_spot.memory.tier.JointTier` for one run that is spread over snapshot servers.

    Args:
        nodes: of this run: those to which portions are brought, and those besides that may have earlier ones.
        place: which they are.

    Attributes:
        sent: how went what this host has brought.
        wait_s: see :data:`WAIT_S`.
    """

    def __init__(self, nodes: Sequence[NodeStore], place: SpreadPlace) -> None:
        self._nodes, self._place = {node.url: node for node in nodes}, place
        self._known = Known(dict(self._nodes))
        self._lock = threading.Lock()
        self._took_s: dict[str, float] = {}
        self.sent = Sent()
        self.wait_s = WAIT_S

    def know(self, info: RunInfo) -> None:
        """See :meth:`JointTier.know`."""
        for node in self._nodes.values():
            node.know(replace(info, spread=True))

    def follow(self, earlier: JointTier) -> None:
        """See :meth:`Changes.follow`."""
        if isinstance(earlier, JointPortions):
            self._known = earlier._known
            self._nodes = self._known.share(self._nodes)

    def tells_until(self, stops: Callable[[], bool]) -> None:
        """See :meth:`Changes.tells_until`."""
        self._known.telling.stops = stops

    def begin(self, shared: Shared, nbytes: int, *, attempt: int, hosts: int) -> Gathering:
        """See :meth:`JointTier.begin`. Every host begins by itself; what is whole is told once more."""
        begun = super().begin(shared, nbytes, attempt=attempt, hosts=hosts)
        seen, over = self._look(shared.name), self._known.given_up()
        if whole := max(set(whole_names(seen.held)) - over, key=order_of, default=""):
            # The server of this host may have said so, before it was lost, and not all have heard it.
            is_said = any(item["brings"] for item in seen.held if item["name"] == whole)
            brings = is_said or self._known.told == (whole, True)
            self._tell(told_of(seen, whole, brings=brings), attempt)
        left = [] if seen.problems else left_torn(seen.held, attempt)  # a silent server may have the rest
        for name in left:
            self._tear(name, f"attempt {attempt} has the run since", attempt, over=True)
        for name in never_whole(seen.held, shared.name, over):
            # Of what this server has not given up itself, a silent one may have the rest, and know that it is whole.
            if (name in over or not seen.problems) and self._known.decide(name, whole=False):
                self._tear(name, f"{shared.name} has begun since", attempt, over=True)
        return begun

    def bring(
        self,
        gathering: Gathering,
        image: Image,
        ranges: Ranges,
        earlier: Glance | None,
        goes_on: Callable[[], None],
        compression: Compression = "auto",
    ) -> Sent:
        """See :meth:`JointTier.bring`: send this host's portion to as many servers as it is to be kept at."""
        began_s = time.monotonic()
        portion, memory = self._sealed(gathering, image, ranges)
        goes_on()
        assert portion.portion is not None
        urls, replicas = self._place.urls, self._place.replicas
        order = placed_portions(urls, portion.run_id, portion.portion.hosts, replicas)
        targets, wanted = iter(order[portion.portion.host]), min(replicas, len(urls))

        comings = [_Sending(portion, memory) for _ in range(wanted)]

        def send(coming: _Sending) -> SpotError | None:
            return self._send(targets, coming, gathering)

        pool = ThreadPoolExecutor(wanted, thread_name_prefix="spot-portion")
        try:
            problems = _results([pool.submit(send, coming) for coming in comings], began_s)
        finally:  # also where one fails as nobody has foreseen: the slot is free in a moment
            for coming in comings:
                coming.stop()
            pool.shutdown(wait=False)
        if fenced := next((error for error in problems if isinstance(error, FencedError)), None):
            raise fenced
        if all(problems):
            raise SnapshotFailedError(
                f"no snapshot server takes this host's portion of {portion.snapshot}: {problems[0]}",
                reason=FailureReason.SHARE_MISSING,
            )
        goes_on()
        self._known.sent(portion)
        self._took_s = {portion.snapshot: time.monotonic() - began_s}
        self.sent = Sent()
        for node in self._nodes.values():
            self.sent.add(node.sent)
        return self.sent

    def placed(self, gathering: Gathering, host: int, torn: str = "", fault: ShareFault | None = None) -> None:
        """See :meth:`JointTier.placed`. What was brought shows by itself."""
        if torn:
            attempt, _, _ = order_of(gathering.shared.name)
            self.decline(gathering.shared.name, attempt=attempt, why=torn, host=host)

    def seal(self, gathering: Gathering, manifest: Manifest, goes_on: Callable[[], None]) -> Manifest:
        """See :meth:`JointTier.seal`."""
        name, hosts = manifest.name, Portions.read(gathering.shared.layout, gathering.nbytes).hosts
        takes_s = 3 * self._took_s.get(name, 0.0)
        bound_s, began_s, pauses = self.wait_s + takes_s, time.monotonic(), growing(*_LOOK_S)
        urls, replicas = self._place.urls, self._place.replicas
        order = placed_portions(urls, manifest.run_id, hosts, replicas)
        absent = Missing(order, replicas, gone_s=GONE_S, brought_s=BROUGHT_S + takes_s)
        while True:
            asked_s = time.monotonic()
            seen = self._look(name)
            torn, mine = seen.torn, [item for item in seen.held if item["name"] == name]
            if other := next((item["host"] for item in mine if item["digest"] != gathering.shared.digest), None):
                torn = f"host {other} has another model, or other optimizers. All ranks must build the same"
            missing = sorted(set(range(hosts)) - {item["host"] for item in mine})
            if not missing and not torn:
                break
            lost = absent.lost(seen, missing, asked_s, time.monotonic())
            if torn or lost or time.monotonic() - began_s >= bound_s:
                why = torn or _why_missing(name, missing, lost, seen, bound_s)
                self._give_up(name, manifest.attempt, why)
                raise SnapshotFailedError(why, reason=FailureReason.SHARE_MISSING)
            goes_on()
            time.sleep(next(pauses))
        brings = is_to_be_brought(seen, manifest)
        if not self._known.decide(name, whole=True):
            raise SnapshotFailedError(f"{name} was given up", reason=FailureReason.SHARE_MISSING)
        self._tell(told_of(seen, name, manifest.lineage, brings=brings), manifest.attempt)
        return replace(manifest, checksums=())

    def give_up(self, gathering: Gathering) -> None:
        """See :meth:`JointTier.give_up`."""
        attempt, _, _ = order_of(gathering.shared.name)
        self._give_up(gathering.shared.name, attempt, "the first host has given it up")

    def decline(self, name: str, *, attempt: int, why: str, host: int = 0) -> None:
        """See :meth:`JointTier.decline`; nothing is said where that host's portion is there."""
        if host and any(item["name"] == name and item["host"] == host for item in self._look(name).held):
            return
        self._say_torn(name, attempt, why, over=False)

    def hold(self, name: str, info: RunInfo) -> None:
        """Have servers keep a snapshot from which an attempt goes on until a newer one is whole.

        Who led it may have been lost before it could say that it is whole. Then what one server has of it would count
        as left by that attempt, wherever another one is not asked. This one may have just begun: not all know it.
        """

        def tell(node: NodeStore) -> None:
            node.open_run(replace(info, nodes=(), replicas=1, session="", spread=True))
            node.whole(Told(name), attempt=info.attempt)

        for problem in self._say("whole", tell):
            if not isinstance(problem, SnapshotNotFoundError):  # it has nothing of it
                text = "a snapshot server does not know that the run resumed from {about}: {problem}"
                say(logging.WARNING, "resume-unknown", text, about=name, problem=problem)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _sealed(self, gathering: Gathering, image: Image, ranges: Ranges) -> tuple[Manifest, memoryview]:
        """The manifest of this host's portion, and its bytes."""
        name, layout, own = gathering.shared.name, gathering.shared.layout, notes.read_own(gathering.shared.layout)
        if not isinstance(image, PortionImage):
            raise SettingsError(f"{name} lies in memory as a whole, and is not spread over servers")
        files, portions = gathering.files or own.files, Portions.read(layout, gathering.nbytes)
        host = 1 + portions.ranges.index(ranges) if ranges in portions.ranges else 0
        check_gaps(image, ranges, files)
        places = sorted((image.portion.place(file.offset), file) for file in files)
        spans = [FileSpan(file.name, place, file.nbytes) for place, file in places]
        memory = image.memory[: image.portion.nbytes]
        plain = gathering.manifest or self._plain(name)
        plain = replace(plain, nbytes=len(memory))
        return portion_of(plain, spans, memory, host=host, hosts=portions.hosts, digest=gathering.shared.digest), memory

    def _plain(self, name: str) -> Manifest:
        """What another host than the first one knows of a snapshot."""
        run, run_id = parse_run(next(iter(self._nodes)).rpartition("/")[2])
        attempt, step, _ = order_of(name)
        complete = "-complete" in name
        return Manifest(run=run, run_id=run_id, name=name, step=step, attempt=attempt, nbytes=0, complete=complete)

    def _send(self, targets: Iterator[str], coming: _Sending, gathering: Gathering) -> SpotError | None:
        """Send a portion to the next server that takes it; why none did."""
        problem: SpotError | None = None
        while not coming.given_up:
            with self._lock:
                url = next(targets, None)
            if url is None:
                return problem or ServerUnreachableError("there is no further snapshot server")
            try:
                self._nodes[url].send(
                    coming,
                    attempt=coming.manifest.attempt,
                    earlier=lambda _run, name: self._earlier(name, gathering),
                )
                return None
            except FencedError as error:
                return error
            except SpotError as error:
                if not coming.given_up:
                    text = "{about} does not take {name} ({error}). The next server is tried"
                    say(logging.INFO, "server-refused", text, about=url, name=coming.manifest.name, error=error)
                problem = error
        return problem

    def _earlier(self, name: str, gathering: Gathering) -> Glance | None:
        known = self._known.find(name)
        return gathering.earlier(known) if known is not None else None

    def _give_up(self, name: str, attempt: int, why: str) -> None:
        """As the one who leads it: what is there of it goes."""
        if self._known.decide(name, whole=False):
            self._say_torn(name, attempt, why, over=True)

    def _say_torn(self, name: str, attempt: int, why: str, *, over: bool) -> None:
        problems = self._tear(name, why, attempt, over=over)
        if len(problems) == len(self._nodes):
            raise problems[0]

    def _look(self, name: str) -> Seen:
        """What is at the servers that answer."""
        answers: list[dict[str, Any]] = []
        problems = at_all(self._nodes.values(), lambda node: answers.append(node.look(name)))
        held = [item for answer in answers for item in answer["portions"]]
        torn = next((str(answer["torn"]) for answer in answers if answer["torn"]), "")
        return Seen(held, torn, max((answer["rests_s"] for answer in answers), default=0.0), problems)

    def _tell(self, told: Told, attempt: int) -> None:
        self._known.told = (told.name, told.brings)
        for problem in self._say("whole", lambda node: node.whole(told, attempt=attempt)):
            if isinstance(problem, FencedError):
                raise problem
            logger.debug("a snapshot server was not told that %s is whole: %s", told.name, problem)

    def _tear(self, name: str, why: str, attempt: int, *, over: bool) -> list[SpotError]:
        """Tell all servers that a snapshot will never be whole, and, from who leads it, that it is ``over``."""
        return self._say(f"{name} {over}", lambda node: node.torn(name, why, attempt=attempt, over=over))

    def _say(self, about: str, word: Word) -> list[SpotError]:
        """Tell all servers something, also who hears it later; see :meth:`Telling.tell`."""
        return self._known.telling.tell(self._nodes.values(), about, word)


def _why_missing(name: str, missing: Sequence[int], lost: Sequence[int], seen: Seen, bound_s: float) -> str:
    """Why a snapshot is given up of which portions are missing, those that are ``lost`` among them."""
    silent = f" ({'; '.join(map(str, seen.problems.values()))})" if seen.problems else ""
    if lost:
        return f"the portion of {name} of host {', '.join(map(str, lost))} was lost with its snapshot server{silent}"
    listed = ", ".join(map(str, missing))
    return f"host {listed} has not brought its portion of {name} within {bound_s:.0f} s{silent}"


def _results(sending: Sequence[Future[SpotError | None]], began_s: float) -> list[SpotError | None]:
    """What became of a portion at each server, none of which delays the others: who is far behind gets the next one."""
    waiting = set(sending)
    while waiting:
        done, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
        if waiting and any(each.result() is None for each in done):
            futures.wait(waiting, max(_OTHERS_S, time.monotonic() - began_s))
            break
    late = ServerUnreachableError("it takes much longer there than at another server")
    return [each.result() if each.done() else late for each in sending]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A snapshot of which all portions are there.

    Attributes:
        holders: of the portion of each host.
        begins: where in the whole each portion begins, see :func:`~lightning_spot.image.portion.starts`.
    """

    holders: list[list[Held]]
    begins: list[int]


class SpreadStore:
    """A run's snapshots that are spread over servers; implements :class:`~lightning_spot.tiers.store.Store`.

    They come there portion by portion only, see :attr:`joint`.

    Args:
        url: see :class:`~lightning_spot.memory.joint.SpreadPlace`.
    """

    owner: Owner | None = None

    def __init__(self, url: str) -> None:
        place = SpreadPlace.read(url)
        if place is None:
            raise SettingsError(f"{url!r} names no snapshot servers over which a snapshot is spread")
        self.url, self.place = url, place
        self.nodes = [NodeStore(each) for each in place.urls]
        self._held: dict[str, _Whole] = {}  # by its name
        self._silent: set[str] = set()  # URLs of servers that did not answer when something was read from them last

    @functools.cached_property
    def joint(self) -> JointPortions:
        """See :class:`~lightning_spot.memory.tier.HasJoint`."""
        return JointPortions([*self.nodes, *map(NodeStore, self.place.besides)], self.place)

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`: what is whole at the servers that answer."""
        asked = self._ask_all(lambda node: [(node, portion) for portion in node.survey().portions])
        found = [held for answer in asked if not isinstance(answer, SpotError) for held in answer]
        problems = [answer for answer in asked if isinstance(answer, SpotError)]
        if len(problems) == len(asked):
            raise TierError(f"no snapshot server answers: {problems[0]}", tier=self.url)
        manifests = self.know(found)
        return Holdings(manifests, {}, max((portion.attempt for _, portion in found), default=0))

    def know(self, found: Iterable[Held]) -> list[Manifest]:
        """Take note of portions; the snapshots of which all are among them, newest first."""
        by_snapshot: dict[tuple[str, str], dict[int, list[Held]]] = {}
        for node, portion in found:
            assert portion.portion is not None
            hosts = by_snapshot.setdefault((portion.snapshot, portion.portion.digest), {})
            hosts.setdefault(portion.portion.host, []).append((node, portion))
        manifests = []
        for (name, _digest), hosts in by_snapshot.items():
            by_host = [hosts[host] for host in sorted(hosts)]
            portions = [held[0][1] for held in by_host]
            if late := missing(portions):
                text = "{about} is incomplete at the snapshot servers: none has the part of host {host}"
                say(logging.INFO, "snapshot-incomplete", text, about=name, host=late)
                continue
            try:
                manifests.append(whole_of(portions))
            except CorruptSnapshotError as error:
                say(logging.WARNING, "snapshot-skipped", "{error}", about=name, error=error)
                continue
            # Of two replicas only those that are the same count.
            holders = [
                [held for held in each if held[1].checksums == portion.checksums]
                for each, portion in zip(by_host, portions, strict=True)
            ]
            self._held[name] = _Whole(holders, starts(portions))
        return newest_first(manifests)

    def hold(self, name: str, info: RunInfo) -> None:
        """See :meth:`JointPortions.hold`; nothing happens if it was not found whole here."""
        if name in self._held:
            self.joint.hold(name, info)

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        return any(each.name == manifest.name and each.checksums == manifest.checksums for each in self._manifests())

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        self._check_known(manifest)
        fetch_ranges(self.read, manifest, self._in_turn(manifest), into, progress, CONNECTIONS * len(self.nodes))

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read one of ``manifest.ranges()``, and check it; from any thread. Errors are those of :meth:`fetch`."""
        self._check_known(manifest)
        for begin in range(0, len(into), manifest.part_bytes):
            self._read_part(manifest, start + begin, into[begin : begin + manifest.part_bytes])

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        for node in self.nodes:
            for portion in node.survey().portions:
                if portion.snapshot == manifest.name:
                    node.delete(portion)

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        return max(node.claimed() for node in self.nodes)

    def newest_claim(self) -> Claim | None:
        """See :meth:`NodeStore.newest_claim`."""
        return max((node.newest_claim() for node in self.nodes), key=lambda claim: claim.attempt if claim else 0)

    def check_owner(self) -> None:
        """Nothing to do: servers know who has opened a run."""

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        for node in self.nodes:
            node.claim(claim)

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """No process has all of such a snapshot."""
        raise TierError(f"{manifest.name} comes to {self.url} portion by portion only", tier=self.url)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`put`."""
        raise TierError(f"{manifest.name} comes to {self.url} portion by portion only", tier=self.url)

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """Nothing to do: a server frees unfinished uploads by itself."""

    def sweep_files(self) -> None:
        """See :meth:`sweep`."""

    # -- inside ---------------------------------------------------------------------------------------------------

    def _manifests(self) -> list[Manifest]:
        return self.survey().manifests

    def _check_known(self, manifest: Manifest) -> None:
        """Know where its portions are."""
        if manifest.name not in self._held:
            self.survey()
        if manifest.name not in self._held:
            raise SnapshotNotFoundError(f"{manifest.name} is not whole at {self.url} (any more)")

    def _in_turn(self, manifest: Manifest) -> list[tuple[int, int]]:
        """The ranges of a snapshot, in an order in which all servers are asked at the same time."""
        begins = self._held[manifest.name].begins
        by_place = {bounds: place_of(bounds[0], begins) for bounds in manifest.ranges()}
        return sorted(by_place, key=lambda bounds: (by_place[bounds][1], by_place[bounds][0]))

    def _read_part(self, manifest: Manifest, start: int, into: memoryview) -> None:
        whole = self._held[manifest.name]
        host, within = place_of(start, whole.begins)
        problem: SpotError | None = None
        holders = whole.holders[host]
        first = within // manifest.part_bytes % len(holders)  # each replica is read as much as the others
        # Each part would else wait again for a server whose link is cut.
        in_turn = sorted((*holders[first:], *holders[:first]), key=lambda held: held[0].url in self._silent)
        for node, portion in in_turn:
            nbytes = min(len(into), portion.nbytes - within)
            try:
                node.read(portion, within, into[:nbytes])
                self._silent.discard(node.url)
                into[nbytes:] = bytes(len(into) - nbytes)
                manifest.verify_range(start, into, node.url)
                return
            except SpotError as error:
                problem = error
                if isinstance(error, ServerUnreachableError):
                    self._silent.add(node.url)
        raise problem or SnapshotNotFoundError(f"{manifest.name} has left {self.url}")

    def _ask_all(self, ask: Callable[[NodeStore], T]) -> list[T | SpotError]:
        def one(node: NodeStore) -> T | SpotError | Any:
            try:
                return ask(node)
            except SnapshotNotFoundError:
                return []
            except SpotError as error:
                return error

        with ThreadPoolExecutor(len(self.nodes)) as pool:
            return list(pool.map(one, self.nodes))
