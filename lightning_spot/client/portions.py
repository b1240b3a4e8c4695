"""What each host does of a snapshot that is spread over memory nodes: it brings its portion to some of them.

No host asks another. Each knows which nodes its portion goes to, and sends it there as any snapshot is sent. The first
host looks at all nodes until all portions are there; then, and only then, the snapshot counts, and it says so to all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lightning_spot.client.decided import Known
from lightning_spot.client.remote import NodeStore
from lightning_spot.client.seen import (
    Missing,
    Seen,
    is_to_be_brought,
    left_torn,
    never_whole,
    order_of,
    told_of,
    whole_names,
)
from lightning_spot.client.telling import Word, at_all
from lightning_spot.errors import Fenced, NodeUnreachable, SettingsError, ShareMissing, SnapshotNotFound, SpotError
from lightning_spot.image import notes
from lightning_spot.image.coming import Coming
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.packing import Compression
from lightning_spot.image.portion import Image, PortionImage, Portions
from lightning_spot.image.spread import portion_of
from lightning_spot.image.written import Ranges
from lightning_spot.memory.bases import Glance
from lightning_spot.memory.by_itself import ByItself, check_gaps
from lightning_spot.memory.joint import Shared, SpreadPlace
from lightning_spot.memory.placement import placed_portions
from lightning_spot.memory.runs import RunInfo, parse_run
from lightning_spot.memory.spread import Told
from lightning_spot.memory.tier import Gathering, JointTier, Sent

logger = logging.getLogger(__name__)

WAIT_S = 120.0
"""So much longer than the first one, and three times the time that it took, other hosts may take."""

GONE_S, BROUGHT_S = 8.0, 15.0
"""See :class:`Missing`; to the second one comes three times what a portion took. Who is silent is asked for 5 s."""

_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 0.5
_OTHERS_S = 10.0  # at least: where that makes its first slot, it may take long


class _Sending(Coming):
    """A portion that is whole here, and on its way to a node as long as that is not given up."""

    def stop(self) -> None:
        """Send no further part of it."""
        self._given_up = True


class JointPortions(ByItself):
    """Implements :class:`~lightning_spot.memory.tier.JointTier` for one run that is spread over memory nodes.

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
            # The node of this host may have said so, before it was lost, and not all have heard it.
            is_said = any(item["brings"] for item in seen.held if item["name"] == whole)
            brings = is_said or self._known.told == (whole, True)
            self._tell(told_of(seen, whole, brings=brings), attempt)
        left = [] if seen.problems else left_torn(seen.held, attempt)  # a silent node may have the rest
        for name in left:
            self._tear(name, f"attempt {attempt} has the run since", attempt, over=True)
        for name in never_whole(seen.held, shared.name, over):
            # Of what this node has not given up itself, a silent one may have the rest, and know that it is whole.
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
        """See :meth:`JointTier.bring`: send this host's portion to as many nodes as it is to be kept at."""
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
        if fenced := next((error for error in problems if isinstance(error, Fenced)), None):
            raise fenced
        if all(problems):
            raise ShareMissing(f"no memory node takes this host's portion of {portion.snapshot}: {problems[0]}")
        goes_on()
        self._known.sent(portion)
        self._took_s = {portion.snapshot: time.monotonic() - began_s}
        self.sent = Sent()
        for node in self._nodes.values():
            self.sent.add(node.sent)
        return self.sent

    def placed(self, gathering: Gathering, host: int, torn: str = "") -> None:
        """See :meth:`JointTier.placed`. What was brought shows by itself."""
        if torn:
            attempt, _, _ = order_of(gathering.shared.name)
            self.decline(gathering.shared.name, attempt=attempt, why=torn, host=host)

    def seal(self, gathering: Gathering, manifest: Manifest, goes_on: Callable[[], None]) -> Manifest:
        """See :meth:`JointTier.seal`."""
        name, hosts = manifest.name, Portions.read(gathering.shared.layout, gathering.nbytes).hosts
        takes_s = 3 * self._took_s.get(name, 0.0)
        bound_s, began_s, pause_s = self.wait_s + takes_s, time.monotonic(), _FIRST_LOOK_S
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
                raise ShareMissing(why)
            goes_on()
            time.sleep(pause_s)
            pause_s = min(_LAST_LOOK_S, 1.5 * pause_s)
        brings = is_to_be_brought(seen, manifest)
        if not self._known.decide(name, whole=True):
            raise ShareMissing(f"{name} was given up")
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
        """Have nodes keep a snapshot from which an attempt goes on until a newer one is whole.

        Who led it may have been lost before it could say that it is whole. Then what one node has of it would count as
        left by that attempt, wherever another one is not asked. This one may have just begun: not all nodes know it.
        """

        def tell(node: NodeStore) -> None:
            node.open_run(replace(info, nodes=(), replicas=1, session="", spread=True))
            node.whole(Told(name), attempt=info.attempt)

        for problem in self._say("whole", tell):
            level = logging.DEBUG if isinstance(problem, SnapshotNotFound) else logging.WARNING  # it has nothing of it
            logger.log(level, "a memory node was not told that %s is gone on from: %s", name, problem)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _sealed(self, gathering: Gathering, image: Image, ranges: Ranges) -> tuple[Manifest, memoryview]:
        """The manifest of this host's portion, and its bytes."""
        name, layout, own = gathering.shared.name, gathering.shared.layout, notes.read_own(gathering.shared.layout)
        if not isinstance(image, PortionImage):
            raise SettingsError(f"{name} lies in memory as a whole, and is not spread over nodes")
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
        """Send a portion to the next node that takes it; why none did."""
        problem: SpotError | None = None
        while not coming.given_up:
            with self._lock:
                url = next(targets, None)
            if url is None:
                return problem or NodeUnreachable("there is no further memory node")
            try:
                self._nodes[url].send(
                    coming,
                    attempt=coming.manifest.attempt,
                    earlier=lambda _run, name: self._earlier(name, gathering),
                )
                return None
            except Fenced as error:
                return error
            except SpotError as error:
                if not coming.given_up:
                    logger.info("%s does not take %s, another node is tried: %s", url, coming.manifest.name, error)
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
        """What is at the nodes that answer."""
        answers: list[dict[str, Any]] = []
        problems = at_all(self._nodes.values(), lambda node: answers.append(node.look(name)))
        held = [item for answer in answers for item in answer["portions"]]
        torn = next((str(answer["torn"]) for answer in answers if answer["torn"]), "")
        return Seen(held, torn, max((answer["rests_s"] for answer in answers), default=0.0), problems)

    def _tell(self, told: Told, attempt: int) -> None:
        self._known.told = (told.name, told.brings)
        for problem in self._say("whole", lambda node: node.whole(told, attempt=attempt)):
            if isinstance(problem, Fenced):
                raise problem
            logger.debug("a memory node was not told that %s is whole: %s", told.name, problem)

    def _tear(self, name: str, why: str, attempt: int, *, over: bool) -> list[SpotError]:
        """Tell all nodes that a snapshot will never be whole, and, from who leads it, that it is ``over``."""
        return self._say(f"{name} {over}", lambda node: node.torn(name, why, attempt=attempt, over=over))

    def _say(self, about: str, word: Word) -> list[SpotError]:
        """Tell all nodes something, also who hears it later; see :meth:`Telling.tell`."""
        return self._known.telling.tell(self._nodes.values(), about, word)


def _why_missing(name: str, missing: Sequence[int], lost: Sequence[int], seen: Seen, bound_s: float) -> str:
    """Why a snapshot is given up of which portions are missing, those that are ``lost`` among them."""
    silent = f" ({'; '.join(map(str, seen.problems.values()))})" if seen.problems else ""
    if lost:
        return f"the portion of {name} of host {', '.join(map(str, lost))} was lost with its memory node{silent}"
    listed = ", ".join(map(str, missing))
    return f"host {listed} has not brought its portion of {name} within {bound_s:.0f} s{silent}"


def _results(sending: Sequence[Future[SpotError | None]], began_s: float) -> list[SpotError | None]:
    """What became of a portion at each node, none of which delays the others: who is far behind gets the next one."""
    waiting = set(sending)
    while waiting:
        done, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
        if waiting and any(each.result() is None for each in done):
            futures.wait(waiting, max(_OTHERS_S, time.monotonic() - began_s))
            break
    late = NodeUnreachable("it takes much longer there than at another node")
    return [each.result() if each.done() else late for each in sending]
