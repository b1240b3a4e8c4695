"""Snapshots that another host leads: what the node of a host that takes part does, at each memory node they go to."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace

from lightning_spot.errors import SettingsError, ShareMissing, SpotError
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.memory.bringing import Bringing
from lightning_spot.memory.tier import Gathering, JointTier
from lightning_spot.memory.upload import Upload

logger = logging.getLogger(__name__)

_JOIN_S = 120.0
_WAIT_FOR_SLOT_S = 5.0
_OTHERS_S = 5.0  # for a snapshot to begin at the other nodes, once this host has brought it to one


@dataclass(eq=False, slots=True)
class _Visit:
    """A snapshot that this host takes part in. Fields change under the lock of all visits.

    Attributes:
        run: as in URLs.
        attempt: that writes.
        name: of the snapshot.
        host: number of this host, from 1.
        left: URLs of memory nodes to which this host has still to bring it.
        joined: those of them at which it has begun.
        upload: of this host's portion, once it has begun at one of them.
        portion: what is in its slot.
        brought: whether one of them has the portion.
        over: whether nothing more comes.
        leasing: held while the slot is asked for.
    """

    run: str
    attempt: int
    name: str
    host: int
    left: set[str]
    joined: set[str] = field(default_factory=set)
    upload: Upload | None = None
    portion: Portion | None = None
    brought: bool = False
    over: bool = False
    leasing: threading.Lock = field(default_factory=threading.Lock)


class Visits:
    """The snapshots that a host takes part in. Methods may be called from any thread.

    Each memory node has a thread, so that a slow one delays no other. The slot is let go once nothing is sent from it:
    a node at which the snapshot does not begin is not waited for.

    Args:
        bringing: sends the portions.
    """

    def __init__(self, bringing: Bringing) -> None:
        self._bringing = bringing
        self._changed = threading.Condition()
        self._visits: dict[tuple[str, str], _Visit] = {}

    def join(self, run: str, attempt: int, name: str, at: str, host: int) -> None:
        """Take part in a snapshot that another host leads: a slot for this host's portion is there in a moment.

        Args:
            run: as in URLs.
            attempt: that writes.
            name: of the snapshot.
            at: URLs of the run at the memory nodes, separated by spaces.
            host: number of this host, from 1.
        """
        with self._changed:
            if (run, name) in self._visits:
                return
            visit = self._visits[run, name] = _Visit(run, attempt, name, host, set(at.split()))
        for url in at.split():
            threading.Thread(target=self._visit, args=(visit, url), name="spot-joint", daemon=True).start()

    def _visit(self, visit: _Visit, url: str) -> None:
        tier: JointTier | None = None
        gathering: Gathering | None = None
        try:
            tier = self._bringing.tier(url)
            gathering = tier.join(visit.name, attempt=visit.attempt, host=visit.host, wait_s=_JOIN_S)
            upload, portion = self._begun(visit, url, gathering)
            self._bringing.uploads.shares.wait(upload)
            self._bringing.uploads.bring(upload)
            image = PortionImage(portion, upload.slot.view(portion.nbytes), gathering.nbytes)
            self._bringing.bring(tier, gathering, upload, portion.ranges, portion, image)
            tier.placed(gathering, visit.host)
        except BaseException as error:
            self._ended(visit, url, error)
            if tier is not None and gathering is not None:
                self._tell(tier, gathering, visit.host, error)
            if not isinstance(error, SpotError):
                raise
        else:
            self._ended(visit, url, None)

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
                shared = replace(gathering.shared, shares=1 + portions.ranks[visit.host - 1], by_hosts=False)
                visit.upload = self._bringing.uploads.lease(
                    visit.run, visit.attempt, portion.nbytes, name=name, wait_s=_WAIT_FOR_SLOT_S, shared=shared
                )
                visit.portion = portion
                self._bringing.uploads.make_another(visit.upload)
            elif visit.portion is None or visit.portion.ranges != portion.ranges:
                raise SettingsError(f"{name} has another layout at {url} than at the other memory nodes")
            return visit.upload, portion

    def _ended(self, visit: _Visit, url: str, error: BaseException | None) -> None:
        """Nothing more is sent to a node; after the last one, free the slot."""
        if error is not None:
            logger.info("this host brings nothing to %s at %s: %s", visit.name, url, error)
        with self._changed:
            visit.left.discard(url)
            visit.joined.discard(url)
            visit.brought |= error is None
            self._changed.notify_all()
            if visit.brought:
                self._changed.wait_for(lambda: visit.over or visit.joined or not visit.left, _OTHERS_S)
            if visit.over or visit.joined or (visit.left and not visit.brought):
                return
            visit.over = True
            del self._visits[visit.run, visit.name]
        if visit.brought:
            assert visit.upload is not None
            assert visit.portion is not None
            self._bringing.done(visit.upload, visit.portion.ranges)
        else:
            self._failed(visit, str(error) or type(error).__name__)

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

    def _tell(self, tier: JointTier, gathering: Gathering, host: int, error: BaseException) -> None:
        try:
            tier.placed(gathering, host, f"host {host}: {error or type(error).__name__}")
        except SpotError as problem:  # it was given up there, or does not answer: the first host notices
            logger.debug("%s could not be told that it is torn: %s", gathering.upload, problem)
