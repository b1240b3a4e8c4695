"""Snapshots that another host leads: what the node of a host that takes part does, at each place they go to."""

from __future__ import annotations

import functools
import logging
import threading
import time
from dataclasses import dataclass, field, replace

from lightning_spot.errors import Fenced, NodeUnreachable, SettingsError, ShareMissing, SpotError
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.memory.bringing import Bringing
from lightning_spot.memory.joint import Shared, urls_of
from lightning_spot.memory.joint_store import JointStore
from lightning_spot.memory.shares import HOST_SILENT_S
from lightning_spot.memory.tier import Gathering, JointTier
from lightning_spot.memory.upload import Upload

logger = logging.getLogger(__name__)

_JOIN_S = 120.0
_LATER_S = 600.0  # for a snapshot to begin at a node that may have the one before for long
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
        told: at a durable tier: what the ranks of this host say of the snapshot.
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
    what is at one node waits for its turn at the others until the next one has begun, or its slot is needed. What other
    hosts bring to a durable tier is not waited for.

    Args:
        bringing: sends the portions.

    Attributes:
        finishing: how many snapshots are at a durable tier as far as they are this host's, and not known to be whole.
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
            told: at a durable tier: what a rank of this host says of the snapshot.
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
        """Let slots go from which nothing is sent until other nodes have their turn; whether there were any."""
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
            logger.info("%s has not come together at %s: %s", visit.name, url, error)
        finally:
            with self._changed:
                self.finishing -= 1

    def _begun(self, visit: _Visit, url: str, gathering: Gathering) -> tuple[Upload, Portion]:
        """The snapshot has begun at a node; the slot for it, which is leased when it has at the first one.

        Raises:
            ShareMissing: if the portion is at another node already, and its slot not here any more.
        """
        name, portions = visit.name, Portions.read(gathering.shared.layout, gathering.nbytes)
        if visit.host > len(portions.ranks):
            raise SettingsError(f"{name} is brought by {portions.hosts} hosts; there is none of number {visit.host}")
        portion = Portion(portions.ranges[visit.host - 1])
        with self._changed:
            if visit.over:
                raise ShareMissing(f"{name} has begun there when this host had brought it elsewhere")
            visit.joined.add(url)
            self._changed.notify_all()
        with visit.leasing:
            if visit.upload is None:
                shared = replace(gathering.shared, shares=1 + portions.ranks[visit.host - 1], by_hosts=False, at="")
                wait_s = _WAIT_FOR_SLOT_S if visit.told is None else _JOIN_S  # no slot elsewhere waits for this one
                visit.upload = self._bringing.uploads.begins.lease(
                    visit.run, visit.attempt, portion.nbytes, name=name, wait_s=wait_s, shared=shared
                )
                visit.portion = portion
                with self._changed:
                    self._newest[visit.key] = visit
                    self._changed.notify_all()
                self._bringing.uploads.begins.make_another(visit.upload)
            elif visit.portion is None or visit.portion.ranges != portion.ranges:
                raise SettingsError(f"{name} has another layout at {url} than at the other memory nodes")
            return visit.upload, portion

    def _ended(self, visit: _Visit, url: str, error: BaseException | None) -> None:
        """Nothing more is sent to a place; after the last one, free the slot."""
        if error is not None:
            logger.info("this host brings nothing to %s at %s: %s", visit.name, url, error)
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
        why, deadline_s = f"host {visit.host}: {error or type(error).__name__}", time.monotonic() + HOST_SILENT_S
        while not self._bringing.uploads.closing:
            try:
                tier = self._bringing.tier(url, visit.key)
                if gathering is not None:
                    tier.placed(gathering, visit.host, why)
                elif not isinstance(error, Fenced | ShareMissing):  # which that place has said itself
                    tier.decline(visit.name, attempt=visit.attempt, why=why)
                return
            except SpotError as problem:  # it was given up there, or does not answer
                logger.debug("%s could not be told that %s is torn: %s", url, visit.name, problem)
                if not isinstance(problem, NodeUnreachable) or time.monotonic() > deadline_s:
                    return
            time.sleep(_AGAIN_S)
