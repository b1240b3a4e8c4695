"""How a host brings its portion of a snapshot to where all hosts do, whether it leads that snapshot or takes part.

At a place to which an earlier snapshot is on its way, and which does not carry the run on, the newest one has its turn
later: the one before passes. So of a row of snapshots that come faster than a server takes them, that server has the
last.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple, Protocol

from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SpotError,
    TierError,
    fault_of,
)
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.image.written import Ranges
from lightning_spot.memory import held_portions
from lightning_spot.memory.joint import Shared, is_by_itself, is_durable, urls_of
from lightning_spot.memory.joint_store import JointStore
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.shares import HOST_SILENT_S, Shares
from lightning_spot.memory.slots import HeldPortion
from lightning_spot.memory.tier import Changes, Gathering, HasJoint, JointTier, Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.retry import retried, within
from lightning_spot.say import say
from lightning_spot.tiers.fences import Owner, check_fence
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_MOST_PLACES = 8  # of a run, over other servers each time one is lost, or comes back


@dataclass(frozen=True, slots=True)
class Below:
    """What a server is asked, and told, of storage to which hosts bring snapshots by themselves.

    Attributes:
        refuses: why it may not write to a URL, ``""`` if it may.
        committed: that it has committed a snapshot: URL, key of the run, manifest.
        owner: on whose behalf it acts there: URL, key of the run.
    """

    refuses: Callable[[str], str]
    committed: Callable[[str, str, Manifest], None]
    owner: Callable[[str, str], Owner | None]


class Filled(Protocol):
    """The uploads of a server, as far as what lies in their slots is sent on from there.

    Attributes:
        closing: whether the server is shutting down.
        shares: of uploads that several ranks fill.
    """

    closing: bool
    shares: Shares

    def lease_portion(self, run: str, attempt: int, nbytes: int, wait_s: float, shared: Shared) -> Upload:
        """Take a slot for this host's portion of a snapshot that another one leads."""

    def bring(self, upload: Upload) -> None:
        """What ranks have put into a slot is about to be sent on: nobody else gets the slot meanwhile."""

    def brought(self, upload: Upload, *, whole: bool) -> bool:
        """It was sent on, or (``whole=False``) never will be; whether the slot is still there for it."""


class Bringing:
    """The way from the slots of a host to snapshot servers and storage. Methods may be called from any thread.

    Args:
        uploads: of the local server.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of snapshot servers and storage.
        below: what the server does for it.
    """

    def __init__(
        self,
        uploads: Filled,
        ring: Ring,
        registry: Registry,
        open_store: Callable[[str], Store],
        below: Below,
    ) -> None:
        self.uploads, self.ring, self.registry = uploads, ring, registry
        self._open_store, self._below = open_store, below
        self._lock = threading.Lock()
        self._tiers: dict[tuple[str, str], JointTier] = {}

    def tier(self, url: str, run: str) -> JointTier:
        """A place to which hosts bring snapshots together.

        Args:
            url: of the run there.
            run: its key.

        Raises:
            SettingsError: if no hosts can.
            TierError: if this server may not write there.
        """
        tier = self._tier(url, run)
        if isinstance(tier, JointStore):
            tier.store.owner = self._below.owner(url, run)
        if (info := self.registry.info(run)) is not None:
            tier.know(replace(info, nodes=(), session=""))
        return tier

    def _tier(self, url: str, run: str) -> JointTier:
        with self._lock:
            known = self._tiers.get((url, run))
        if known is not None:
            return known
        if is_durable(url) and (why := self._below.refuses(url)):
            raise TierError(f"this server may not write to {url}: {why}", tier=url)
        store = self._open_store(url)  # for seconds, with libraries to import: who asks how the tiers are does not wait
        tier: JointTier
        if isinstance(store, HasJoint):
            tier = store.joint  # it has learned how fast the server is
        else:
            tier = JointStore(store, run, functools.partial(self._below.committed, url, run))
        with self._lock:
            for (_url, key), earlier in self._tiers.items():
                if key == run and isinstance(tier, Changes):
                    tier.follow(earlier)
            if isinstance(tier, Changes):
                tier.tells_until(lambda: self.uploads.closing)
            tier = self._tiers.setdefault((url, run), tier)
            places = [place for place, each in self._tiers.items() if place[1] == run and isinstance(each, Changes)]
            for place in places[:-_MOST_PLACES]:  # what they have learned, all others of that run know
                del self._tiers[place]
            return tier

    def forget(self, run: str) -> None:
        """Keep nothing of a run."""
        with self._lock:
            for place in [place for place in self._tiers if place[1] == run]:
                del self._tiers[place]

    def calm(self, run: str) -> None:
        """Forget what kept an earlier attempt of a run from storage: this one may do without this way."""
        with self._lock:
            tiers = [tier for (_url, key), tier in self._tiers.items() if key == run]
        for tier in tiers:
            if isinstance(tier, JointStore):
                tier.why = ""

    def failing(self) -> dict[str, str]:
        """URLs of storage that fail at present, and why."""
        with self._lock:
            tiers = list(self._tiers.items())
        return {url: tier.why for (url, _run), tier in tiers if isinstance(tier, JointStore) and tier.why}

    def bring(
        self,
        tier: JointTier,
        gathering: Gathering,
        upload: Upload,
        ranges: Ranges,
        portion: Portion | None,
        image: PortionImage | memoryview,
    ) -> Sent:
        """Send ranges of an image that lie in a slot.

        Args:
            tier: where to.
            gathering: what is brought together there.
            upload: whose slot it is.
            ranges: what this host brings.
            portion: how they lie in the slot; ``None`` where that holds the whole image.
            image: as far as it is in the slot.
        """
        earlier = None
        if (base := gathering.base) is not None:
            is_apart = portion is not None
            earlier = held_portions.find(self.ring, upload.run, ranges, base, is_apart=is_apart)
        find = functools.partial(held_portions.find_alone, self.ring, upload.run)
        gathering = replace(gathering, earlier=find)
        info = self.registry.info(upload.run)
        compression = info.compression if info is not None else "auto"
        return tier.bring(gathering, image, ranges, earlier, lambda: self.check(upload), compression)

    def done(self, upload: Upload, ranges: Ranges) -> None:
        """All that was to be sent of a slot was: it is free, and what is in it remembered."""
        if self.uploads.brought(upload, whole=True):
            held = HeldPortion(upload.run, upload.name, ranges)
            held_portions.hold(self.ring, upload.slot, held, upload.id)

    def check(self, upload: Upload) -> None:
        """Raise if an upload was given up meanwhile, or a later attempt has begun; else it is alive."""
        if upload.ended:
            raise SnapshotFailedError(f"{upload.name} was given up", reason=FailureReason.SHARE_MISSING)
        self.check_attempt(upload.run, upload.attempt, upload.name)
        upload.touched_s = time.monotonic()

    def check_attempt(self, run: str, attempt: int, name: str) -> None:
        """Raise if nothing more is to be done for a snapshot: a later attempt has begun, or this server ends."""
        check_fence(run, attempt, self.registry.highest(run))
        if self.uploads.closing:
            raise SnapshotFailedError(
                f"{name} is not brought further: this server is shutting down", reason=FailureReason.SHARE_MISSING
            )


_LOOK_S = 1.0  # how often what waits for its turn looks whether it is still wanted

Begun = tuple[JointTier, Gathering]


class Passed(SnapshotFailedError):
    """A snapshot is not brought to a place, for no fault of that place."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=FailureReason.SHARE_MISSING)


@dataclass(eq=False, slots=True)
class Lead:
    """An upload that this host leads.

    Attributes:
        upload: that.
        shared: what was said of it.
        ranges: that this host brings.
        nbytes: of the image.
        hosts: how many bring it.
        portion: how the ranges lie in the slot; ``None`` where that holds the whole image.
        begun: for each place, by the URL of the run there, what was begun there, once it has.
        left: those of them at which it is not over.
        waits: those of them at which it waits for its turn.
        brought: as one of them has committed it.
    """

    upload: Upload
    shared: Shared
    ranges: Ranges
    nbytes: int
    hosts: int
    portion: Portion | None
    begun: dict[str, Future[Begun]]
    left: set[str]
    waits: set[str] = field(default_factory=set)
    brought: Manifest | None = None

    @classmethod
    def of(cls, upload: Upload) -> Lead:
        """The lead of an upload that several hosts bring to some places.

        Raises:
            SettingsError: if its layout does not say what each host brings, or its slot is none for that.
        """
        assert upload.joint is not None
        shared = upload.joint.shared
        nbytes = shared.image_nbytes or upload.nbytes
        portions = Portions.read(shared.layout, nbytes)
        ranges = portions.rest(nbytes)
        portion = Portion(ranges) if shared.image_nbytes else None
        if portion is not None and portion.nbytes != upload.nbytes:
            raise SettingsError(
                f"the first host brings {portion.nbytes} bytes of {shared.name}, its slot is for {upload.nbytes}"
            )
        urls = urls_of(shared.at)
        return cls(upload, shared, ranges, nbytes, portions.hosts, portion, {url: Future() for url in urls}, set(urls))

    @property
    def carrier(self) -> str:
        """URL of the run at the place that carries it on."""
        return next(iter(self.begun))

    @property
    def image(self) -> PortionImage | memoryview:
        """The image, as far as it lies in the slot."""
        memory = self.upload.slot.view(self.upload.nbytes)
        return PortionImage(self.portion, memory, self.nbytes) if self.portion is not None else memory


class Ended(NamedTuple):
    """What it means that a snapshot is over at a place.

    Attributes:
        brought: as some place has committed it; ``None`` if none has so far.
        counts: whether it is over at the place that carries the run on.
        is_last: whether it is over at all places now.
    """

    brought: Manifest | None
    counts: bool
    is_last: bool


class Leads:
    """The uploads that a host leads, in the order in which they began. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leads: dict[str, Lead] = {}

    def find(self, upload: Upload) -> Lead | None:
        """The lead of an upload, if it is not over."""
        return self._leads.get(upload.id)

    def busy(self) -> set[str]:
        """URLs of runs to which a snapshot is on its way, or waits for its turn."""
        with self._changed:
            return {url for lead in self._leads.values() for url in lead.left}

    def add(self, lead: Lead) -> None:
        """One begins: at other places than the one that carries the run on, after those that are on their way there."""
        with self._changed:
            lead.waits = (lead.left & self.busy()) - {lead.carrier}
            self._leads[lead.upload.id] = lead
            self._changed.notify_all()

    def end(self, upload: Upload) -> Lead | None:
        """An upload is over, here and everywhere; its lead, if it had one."""
        with self._changed:
            lead = self._leads.pop(upload.id, None)
            self._changed.notify_all()
            return lead

    def ended(self, lead: Lead, url: str, sealed: Manifest | None) -> Ended:
        """It is over at a place, as ``sealed`` if it was committed there. To say it again means nothing."""
        with self._changed:
            is_new = url in lead.left
            lead.left.discard(url)
            lead.waits.discard(url)
            lead.brought = lead.brought or sealed
            self._changed.notify_all()
            return Ended(lead.brought, lead.carrier not in lead.left, is_new and not lead.left)

    def wait(self, run: str | None, wait_s: float) -> list[str]:
        """Wait until nothing is on its way to storage; what is in the end, one line each.

        Args:
            run: key of the run; ``None`` for any.
            wait_s: how long to wait.
        """

        def late() -> list[str]:
            leads = [lead for lead in self._leads.values() if run in (None, lead.upload.run)]
            return [
                f"{url}: {lead.shared.name} is on its way" for lead in leads for url in lead.left if is_by_itself(url)
            ]

        with self._changed:
            self._changed.wait_for(lambda: not late(), wait_s)
            return late()

    # -- whose turn it is -----------------------------------------------------------------------------------------

    def wait_turn(self, lead: Lead, url: str, goes_on: Callable[[], None]) -> None:
        """Wait until nothing earlier is on its way to a place.

        Args:
            lead: what is to begin there.
            url: of the place.
            goes_on: called now and then; what it raises ends this.

        Raises:
            Passed: if it is not to begin there any more.
        """
        try:
            while not self._has_turn(lead, url):
                goes_on()
        except SpotError as error:
            raise error if isinstance(error, Passed) else Passed(str(error)) from error
        finally:
            with self._changed:
                lead.waits.discard(url)
                self._changed.notify_all()

    def await_turn(self, lead: Lead, url: str) -> None:
        """Wait until :meth:`wait_turn` has ended."""
        with self._changed:
            self._changed.wait_for(lambda: url not in lead.waits)

    def make_way(self) -> list[Lead]:
        """Those that count already, and only wait for their turn, begin nowhere any more: they are over."""
        with self._changed:
            passing = [lead for lead in self._leads.values() if lead.brought and lead.left and lead.left <= lead.waits]
            for lead in passing:
                lead.left.clear()
                lead.waits.clear()
            self._changed.notify_all()
            return passing

    # -- inside ---------------------------------------------------------------------------------------------------

    def _has_turn(self, lead: Lead, url: str) -> bool:
        """Whether one may begin at a place, after a look at what is there before it.

        Raises:
            Passed: if it is not to begin there any more.
        """
        with self._changed:
            if url in lead.waits and self._is_awaited(lead, url):
                self._changed.wait(_LOOK_S)
            if url not in lead.left:
                raise Passed(f"its slot was needed before {url} had its turn")
            if url not in lead.waits:
                return True
            carrier = lead.begun[lead.carrier]
            if carrier.done() and carrier.exception() is not None:  # ranks of other hosts wait for it
                raise Passed(f"it has begun nowhere, and {url} has another one on its way")
            later = list(self._leads.values())[len(self._before(lead)) + 1 :]
            if overtaken := [other for other in later if url in other.left]:
                raise Passed(f"{overtaken[-1].shared.name} came before {url} had its turn")
            if self._is_awaited(lead, url):
                return False
            lead.waits.discard(url)  # from now on its slot does not make way
            return True

    def _is_awaited(self, lead: Lead, url: str) -> bool:
        return any(url in other.left for other in self._before(lead))

    def _before(self, lead: Lead) -> list[Lead]:
        """Those that began before one. Called under the lock."""
        return list(takewhile(lambda other: other is not lead, self._leads.values()))


_JOIN_S = 120.0
_LATER_S = 600.0  # for a snapshot to begin at a server that may have the one before for long
_WAIT_FOR_SLOT_S = 5.0
_OTHERS_S = 5.0  # for it to begin there, once this host has brought it to one, and the next one has begun
_AGAIN_S = 1.0
_BEYOND = 2**46  # no image is so long: a host that brings the middle of one does not know where it ends


@dataclass(eq=False, slots=True)
class _Visit:
    """A snapshot that this host takes part in. Fields change under the lock of all visits.

    Attributes:
        run: as in URLs.
        key: of the run.
        attempt: that writes.
        name: of the snapshot.
        host: number of this host, from 1.
        told: at storage: what the ranks of this host say of the snapshot.
        carrier: URL of the first place to which it is brought.
        left: URLs of places to which this host has still to bring it.
        joined: those of them at which it has begun.
        upload: of this host's portion, once it has begun at one of them.
        portion: what is in its slot.
        brought: whether one of them has the portion.
        over: whether nothing more comes.
        leasing: held while the slot is asked for.
    """

    run: str
    key: str
    attempt: int
    name: str
    host: int
    told: Shared | None
    carrier: str
    left: set[str]
    joined: set[str] = field(default_factory=set)
    upload: Upload | None = None
    portion: Portion | None = None
    brought: bool = False
    over: bool = False
    leasing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def on_its_way(self) -> set[str]:
        """URLs of places to which it is on its way: those at which it may never begin count until one has it."""
        return self.joined if self.brought else self.left

    @property
    def is_told(self) -> bool:
        """Whether it has begun at a further place, or will not."""
        return self.over or bool(self.joined) or not self.left


class Visits:
    """The snapshots that a host takes part in. Methods may be called from any thread.

    Each place has a thread, so that a slow one delays no other. The slot is kept until nothing more is sent from it:
    what is at one server waits for its turn at the others until the next one has begun, or its slot is needed. What
    other hosts bring to storage is not waited for.

    Args:
        bringing: sends the portions.

    Attributes:
        finishing: how many snapshots are at storage as far as they are this host's, and not known to be whole.
    """

    def __init__(self, bringing: Bringing) -> None:
        self.finishing = 0
        self._bringing = bringing
        self._changed = threading.Condition()
        self._visits: dict[tuple[str, str], _Visit] = {}
        self._newest: dict[str, _Visit] = {}

    def join(
        self, run: str, attempt: int, name: str, at: str, host: int, told: Shared | None = None, layout_id: str = ""
    ) -> None:
        """Take part in a snapshot that another host leads: a slot for this host's portion is there in a moment.

        Args:
            run: as in URLs.
            attempt: that writes.
            name: of the snapshot.
            at: see :class:`~lightning_spot.memory.joint.Shared`.
            host: number of this host, from 1.
            told: at storage: what a rank of this host says of the snapshot.
            layout_id: of the layout that was given last, if that is meant and ``told`` has none.

        Raises:
            SettingsError: if that layout is not here (any more).
        """
        key, urls = self._bringing.registry.key(run), urls_of(at)
        if told is not None:
            told = self._bringing.uploads.shares.joint(key, told, layout_id).shared
        if self._bringing.uploads.shares.is_over(run, name):
            return  # who asks is told so
        with self._changed:
            if (run, name) in self._visits:
                return
            visit = self._visits[run, name] = _Visit(run, key, attempt, name, host, told, urls[0], set(urls))
        for url in urls:
            try:
                threading.Thread(target=self._visit, args=(visit, url), name="spot-joint", daemon=True).start()
            except RuntimeError as error:  # no more can be had: ranks hear that there will be no share, and say so
                self._ended(visit, url, error)

    def make_way(self) -> bool:
        """Let slots go from which nothing is sent until other servers have their turn; whether there were any."""
        with self._changed:
            waiting = [
                each for each in self._visits.values() if each.brought and each.left and not (each.joined or each.over)
            ]
            for visit in waiting:
                self._close(visit)
        for visit in waiting:
            self._done(visit)
        return bool(waiting)

    def wait(self, run: str | None, wait_s: float) -> list[str]:
        """Wait until this host has brought what it has; what is on its way in the end, one line each.

        Args:
            run: key of the run; ``None`` for any.
            wait_s: how long to wait.
        """

        def late() -> list[str]:
            visits = [visit for visit in self._visits.values() if run in (None, visit.key)]
            return [f"{url}: {visit.name} is on its way" for visit in visits for url in visit.on_its_way]

        with self._changed:
            self._changed.wait_for(lambda: not late(), wait_s)
            return late()

    def _visit(self, visit: _Visit, url: str) -> None:
        tier: JointTier | None = None
        gathering: Gathering | None = None
        try:
            if visit.told is not None:  # ranks wait for the slot: nothing is asked of the tier before they have it
                gathering = Gathering(visit.name, _BEYOND, None, visit.told)
            else:
                tier = self._bringing.tier(url, visit.key)
                wait_s = _JOIN_S if url == visit.carrier else _LATER_S
                gathering = tier.join(visit.name, attempt=visit.attempt, host=visit.host, wait_s=wait_s)
            upload, portion = self._begun(visit, url, gathering)
            tier = tier or self._bringing.tier(url, visit.key)
            self._bring(tier, gathering, upload, portion)
            tier.placed(gathering, visit.host)
        except BaseException as error:
            self._ended(visit, url, error)
            self._tell(visit, url, gathering, error)
            if not isinstance(error, SpotError):
                raise
        else:
            if isinstance(tier, JointStore):
                self._finish(visit, url, tier, gathering)
            else:
                self._ended(visit, url, None)

    def _bring(self, tier: JointTier, gathering: Gathering, upload: Upload, portion: Portion) -> None:
        self._bringing.uploads.shares.wait(upload)
        self._bringing.uploads.bring(upload)
        image = PortionImage(portion, upload.slot.view(portion.nbytes), gathering.nbytes)
        self._bringing.bring(tier, gathering, upload, portion.ranges, portion, image)

    def _finish(self, visit: _Visit, url: str, tier: JointStore, gathering: Gathering) -> None:
        """Commit what has come together, should nobody else be left to do it. No slot is kept for that."""
        with self._changed:
            self.finishing += 1
        try:
            self._ended(visit, url, None)
            goes_on = functools.partial(self._bringing.check_attempt, visit.key, visit.attempt, visit.name)
            tier.finish(gathering, visit.host, goes_on)
        except SpotError as error:
            text = "{about} is not complete at {url}: {error}"
            say(logging.INFO, "push-failed", text, about=visit.name, url=url, error=error)
        finally:
            with self._changed:
                self.finishing -= 1

    def _begun(self, visit: _Visit, url: str, gathering: Gathering) -> tuple[Upload, Portion]:
        """The snapshot has begun at a server; the slot for it, which is leased when it has at the first one.

        Raises:
            SnapshotFailedError: if the portion is at another server already, and its slot not here any more.
        """
        name, portions = visit.name, Portions.read(gathering.shared.layout, gathering.nbytes)
        if visit.host > len(portions.ranks):
            raise SettingsError(f"{name} is brought by {portions.hosts} hosts; there is none of number {visit.host}")
        portion = Portion(portions.ranges[visit.host - 1])
        with self._changed:
            if visit.over:
                raise SnapshotFailedError(
                    f"{name} has begun there when this host had brought it elsewhere",
                    reason=FailureReason.SHARE_MISSING,
                )
            visit.joined.add(url)
            self._changed.notify_all()
        with visit.leasing:
            if visit.upload is None:
                shared = replace(gathering.shared, shares=1 + portions.ranks[visit.host - 1], by_hosts=False, at="")
                wait_s = _WAIT_FOR_SLOT_S if visit.told is None else _JOIN_S  # no slot elsewhere waits for this one
                visit.upload = self._bringing.uploads.lease_portion(
                    visit.run, visit.attempt, portion.nbytes, wait_s, shared
                )
                visit.portion = portion
                with self._changed:
                    self._newest[visit.key] = visit
                    self._changed.notify_all()
            elif visit.portion is None or visit.portion.ranges != portion.ranges:
                raise SettingsError(f"{name} has another layout at {url} than at the other snapshot servers")
            return visit.upload, portion

    def _ended(self, visit: _Visit, url: str, error: BaseException | None) -> None:
        """Nothing more is sent to a place; after the last one, free the slot."""
        if error is not None:
            text = "this host sends nothing of {about} to {url}: {error}"
            say(logging.INFO, "push-failed", text, about=visit.name, url=url, error=error)
        with self._changed:
            visit.left.discard(url)
            visit.joined.discard(url)
            visit.brought |= error is None
            self._changed.notify_all()
            if visit.brought:
                self._changed.wait_for(lambda: visit.is_told or self._newest.get(visit.key) is not visit)
                self._changed.wait_for(lambda: visit.is_told, _OTHERS_S)
            if visit.over or visit.joined or (visit.left and not visit.brought):
                return
            self._close(visit)
        if visit.brought:
            self._done(visit)
        else:
            self._failed(visit, str(error) or type(error).__name__)

    def _close(self, visit: _Visit) -> None:
        """Nothing more comes of it. Called under the lock."""
        visit.over = True
        del self._visits[visit.run, visit.name]
        if self._newest.get(visit.key) is visit:
            del self._newest[visit.key]
        self._changed.notify_all()

    def _done(self, visit: _Visit) -> None:
        """What was to be sent of its slot was."""
        assert visit.upload is not None
        assert visit.portion is not None
        self._bringing.done(visit.upload, visit.portion.ranges)

    def _failed(self, visit: _Visit, why: str) -> None:
        """Free the slot, and let no rank wait for it."""
        uploads = self._bringing.uploads
        try:
            if visit.upload is not None:
                uploads.brought(visit.upload, whole=False)
            else:
                uploads.shares.decline(visit.run, visit.attempt, visit.name, why)
        except SpotError as problem:  # a later attempt has begun, or the run is not known any more
            logger.debug("nobody waits for %s: %s", visit.name, problem)

    def _tell(self, visit: _Visit, url: str, gathering: Gathering | None, error: BaseException) -> None:
        """Tell a place that this host brings nothing; again while it does not answer: all other hosts wait for it.

        Args:
            visit: the snapshot.
            url: of the place.
            gathering: what has begun there; ``None`` if it is not known whether anything has.
            error: why this host brings nothing.
        """
        why = f"host {visit.host}: {error or type(error).__name__}"

        def tell() -> None:
            tier = self._bringing.tier(url, visit.key)
            if gathering is not None:
                tier.placed(gathering, visit.host, why, fault_of(error))
            elif not (
                isinstance(error, FencedError) or FailureReason.SHARE_MISSING.caused(error)
            ):  # which that place has said itself
                tier.decline(visit.name, attempt=visit.attempt, why=why)

        def again(problem: Exception) -> bool:
            return isinstance(problem, ServerUnreachableError) and not self._bringing.uploads.closing

        try:
            retried(tell, within(HOST_SILENT_S, (_AGAIN_S,)), again)
        except SpotError as problem:  # it was given up there, or does not answer
            logger.debug("%s could not be told that %s is torn: %s", url, visit.name, problem)
