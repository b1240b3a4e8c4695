"""Snapshots that several hosts bring to one place, each its portion: what the node of each of these hosts does.

The first host begins an upload at a memory node; the others join it by the snapshot's name (see ``visits``). The
ranks of each host fill a slot of its own node, which holds that host's portion only. When all of these are done, the
portion is sent; when all portions are there, the first host has the memory node commit it. No host has all of it.
With replicas this is done at several memory nodes at a time. The snapshot counts when the one that carries the run on
has committed it, or, if that fails, another one; the next one does not wait for the others, and goes past who is late.

Without a memory node, the place is the durable tier. There, no host asks another one: each is told by its own ranks
what of the snapshot is its own, and whichever finds that all of it is there commits it (see ``joint_store``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from lightning_spot.errors import Fenced, NodeUnreachable, SettingsError, ShareMissing, SnapshotNotFound, SpotError
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Portion, PortionImage, Portions
from lightning_spot.image.written import Ranges
from lightning_spot.memory import portions as held_portions
from lightning_spot.memory.bringing import Below, Bringing
from lightning_spot.memory.chain import LeftBehind
from lightning_spot.memory.joint import Shared, is_by_itself, is_durable, nodes_of, urls_of
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import parse_run
from lightning_spot.memory.tier import Gathering, JointTier, Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.memory.visits import Visits
from lightning_spot.tiers.store import Store

if TYPE_CHECKING:
    from lightning_spot.memory.uploads import Uploads

logger = logging.getLogger(__name__)

_OPEN_S = 30.0
_TELL_S = 120.0  # so long do the other hosts wait for a snapshot to begin
_AGAIN_S = 1.0

Heard = Callable[[str, Manifest | None, float, Sent | None, Exception | None], None]
"""Told of each snapshot that this host has led: URL, manifest of its portion if it was brought, seconds, what was sent,
the error."""

_Begun = tuple[JointTier, Gathering]
_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class _Lead:
    """An upload that this host leads.

    Attributes:
        run: its key.
        name: of the snapshot.
        ranges: that this host brings.
        nbytes: of the image.
        hosts: how many bring it.
        portion: how the ranges lie in the slot; ``None`` where that holds the whole image.
        begun: for each place, by the URL of the run there, what was begun there, once it has.
        left: those of them at which it is not over.
        brought: as one of them has committed it.
    """

    run: str
    name: str
    ranges: Ranges
    nbytes: int
    hosts: int
    portion: Portion | None = None
    begun: dict[str, Future[_Begun]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    brought: Manifest | None = None

    @classmethod
    def of(cls, upload: Upload, shared: Shared, urls: Sequence[str]) -> _Lead:
        """The lead of an upload that is brought to some places.

        Raises:
            SettingsError: if its layout does not say what each host brings, or its slot is none for that.
        """
        nbytes = shared.image_nbytes or upload.nbytes
        portions = Portions.read(shared.layout, nbytes)
        ranges = portions.rest(nbytes)
        portion = Portion(ranges) if shared.image_nbytes else None
        if portion is not None and portion.nbytes != upload.nbytes:
            raise SettingsError(
                f"the first host brings {portion.nbytes} bytes of {shared.name}, its slot is for {upload.nbytes}"
            )
        begun: dict[str, Future[_Begun]] = {url: Future() for url in urls}
        return cls(upload.run, shared.name, ranges, nbytes, portions.hosts, portion, begun, set(urls))

    def image(self, upload: Upload) -> PortionImage | memoryview:
        """The image, as far as it lies in the slot."""
        memory = upload.slot.view(upload.nbytes)
        return PortionImage(self.portion, memory, self.nbytes) if self.portion is not None else memory


class Abroad:
    """The joint uploads of a host. Methods may be called from any thread.

    Args:
        uploads: of this host's node.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of memory nodes and durable tiers.
        heard: see :data:`Heard`.
        below: what the node does at durable tiers.

    Attributes:
        bringing: sends what lies in the slots of this host.
        visits: the snapshots that other hosts lead.
    """

    def __init__(
        self,
        uploads: Uploads,
        ring: Ring,
        registry: Registry,
        open_store: Callable[[str], Store],
        heard: Heard,
        below: Below,
    ) -> None:
        self._uploads, self._ring, self._registry, self._heard = uploads, ring, registry, heard
        self.bringing = Bringing(uploads, ring, registry, open_store, below)
        self.visits = Visits(self.bringing)
        self._changed = threading.Condition()
        self._leads: dict[str, _Lead] = {}

    def busy(self) -> set[str]:
        """URLs of runs to which a snapshot is on its way."""
        with self._changed:
            return {url for lead in self._leads.values() for url in lead.left}

    def wait_brought(self, run: str | None, wait_s: float) -> list[str]:
        """Wait until nothing is on its way that nobody else has as a whole; what is in the end, one line each.

        That is what goes to a durable tier, and what this host has of snapshots that another one leads.

        Args:
            run: key of the run; ``None`` for any.
            wait_s: how long to wait.
        """
        deadline_s = time.monotonic() + wait_s

        def late() -> list[str]:
            leads = [lead for lead in self._leads.values() if run in (None, lead.run)]
            return [f"{url}: {lead.name} is on its way" for lead in leads for url in lead.left if is_by_itself(url)]

        with self._changed:
            self._changed.wait_for(lambda: not late(), wait_s)
            led = late()
        return [*led, *self.visits.wait(run, max(0.0, deadline_s - time.monotonic()))]

    def begin(self, upload: Upload) -> None:
        """Have an upload begun at its places, in the background: at memory nodes, the other hosts wait for that.

        A memory node to which an earlier one is still on its way is passed over now, and not when this one was
        announced: it is done a moment after the first one, and free again long before the next snapshot.

        Raises:
            SettingsError: if its layout does not say what each host brings.
        """
        assert upload.joint is not None
        shared, busy = upload.joint.shared, self.busy()
        first, *others = urls_of(shared.at)
        lead = _Lead.of(upload, shared, [first, *(url for url in others if url not in busy)])
        with self._changed:
            self._leads[upload.id] = lead
        for url in others:
            if url in busy:
                why = "an earlier one is still on its way there"
                self.decline(upload.run, url, shared.name, upload.attempt, why)
        for url in lead.begun:
            _background(lambda url=url: self._begin(upload, lead, url))  # type: ignore[misc]

    def seal(self, upload: Upload, manifest: Manifest) -> Manifest:
        """Send what this host brings, and have the snapshot committed once the others have brought theirs.

        Returns:
            the sealed manifest, as soon as the memory node that carries the run on has committed it, or, if that fails,
            another one.

        Raises:
            ShareMissing: if none does in the end; the slot is freed, here and there.
            Fenced: if a later attempt holds the run, as one of them says.
        """
        lead = self._leads.get(upload.id)
        if lead is None:
            raise SnapshotNotFound(f"upload {upload.id!r} does not exist (any more)")
        self._uploads.bring(upload)
        sending = {_background(lambda url=url: self._send(lead, url, upload, manifest)): url for url in lead.begun}  # type: ignore[misc]
        first = next(iter(sending))
        waiting = set(sending)
        while waiting:
            _, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            ended = [each for each in sending if each.done()]
            for each in ended:
                if isinstance(each.exception(), Fenced):
                    each.result()
            done = [each for each in ended if each.exception() is None]
            if done and first in done:
                return first.result()
            if done and first in ended:
                why = f"it has not got {manifest.name}, which another node has: {first.exception()}"
                self._heard(sending[first], None, 0.0, None, LeftBehind(why, tier=sending[first]))
                return done[0].result()
        for each, url in sending.items():
            error = each.exception()
            if isinstance(error, SpotError | futures.TimeoutError):
                why = str(error) or "it did not begin there in time"
                raise ShareMissing(f"{manifest.name} did not come together at {url}: {why}") from error
            each.result()
        raise ShareMissing(f"{manifest.name} was to be brought to no memory node")

    def end(self, upload: Upload) -> None:
        """An upload is over. If it was given up, so it is there. Nothing happens if this host does not lead it."""
        with self._changed:
            lead = self._leads.pop(upload.id, None)
            self._changed.notify_all()
        if lead is not None and upload.given_up:
            for begun in lead.begun.values():
                _background(lambda begun=begun: _give_up(begun))  # type: ignore[misc]

    def decline(self, run: str, at: str, name: str, attempt: int, why: str, host: int = 0) -> None:
        """Tell the other hosts, in the background, that there will be no snapshot of a name.

        A place is told once the one before has begun there: it takes it that none before comes any more either. It is
        told again while it does not answer: ranks may wait for that snapshot.

        Args:
            run: as in URLs.
            at: see :class:`~lightning_spot.memory.joint.Shared`.
            name: of the snapshot.
            attempt: that would have written it.
            why: for people.
            host: see :meth:`~lightning_spot.memory.host.Host.decline`.
        """
        key = self._registry.key(run)

        def tell(url: str) -> None:
            futures.wait(self._beginning(url, name), _OPEN_S)
            deadline_s = time.monotonic() + _TELL_S
            while not self._uploads.closing:
                try:
                    self.bringing.tier(url, key).decline(name, attempt=attempt, why=why, host=host)
                    return
                except SpotError as error:  # they wait in vain for a while
                    logger.debug("%s could not be told: %s", url, error)
                    if not isinstance(error, NodeUnreachable) or time.monotonic() > deadline_s:
                        return
                time.sleep(_AGAIN_S)

        for url in urls_of(at):
            _background(lambda url=url: tell(url))  # type: ignore[misc]

    def _beginning(self, url: str, name: str) -> list[Future[_Begun]]:
        """What has begun, or is being begun, at a place, but for a snapshot of a name."""
        with self._changed:
            leads = [lead for lead in self._leads.values() if lead.name != name]
            return [lead.begun[url] for lead in leads if url in lead.begun]

    # -- at each place --------------------------------------------------------------------------------------------

    def _begin(self, upload: Upload, lead: _Lead, url: str) -> None:
        assert upload.joint is not None
        shared, begun = upload.joint.shared, lead.begun[url]
        try:
            tier = self.bringing.tier(url, upload.run)
            begun.set_result((tier, tier.begin(shared, lead.nbytes, attempt=upload.attempt, hosts=lead.hosts)))
        except Exception as error:
            self._heard(url, None, 0.0, None, error)  # before anybody asks where the next one goes
            begun.set_exception(error)
            if all(each.done() and each.exception() is not None for each in lead.begun.values()):
                self._uploads.shares.fail(upload, f"{url}: {error}")
            self.decline(upload.run, url, shared.name, upload.attempt, str(error))

    def _send(self, lead: _Lead, url: str, upload: Upload, manifest: Manifest) -> Manifest:
        """Bring the portion to one place, and have the snapshot committed there."""
        began_s, begun = time.monotonic(), lead.begun[url]
        try:
            if manifest.nbytes != lead.nbytes:
                raise SettingsError(f"{manifest.name} has {manifest.nbytes} bytes, and was begun for {lead.nbytes}")
            tier, gathering = begun.result(_OPEN_S)
            gathering = replace(gathering, files=_within(manifest.files, lead.ranges), manifest=manifest)
            sent = self.bringing.bring(tier, gathering, upload, lead.ranges, lead.portion, lead.image(upload))
            sealed = tier.seal(gathering, _named(manifest, url), lambda: self.bringing.check(upload))
        except Exception as error:
            self._ended(lead, url, upload, None)
            _background(lambda: _give_up(begun))
            if not (begun.done() and begun.exception() is error):
                self._heard(url, None, 0.0, None, error)
            raise
        sealed = replace(sealed, run=manifest.run)
        self._ended(lead, url, upload, sealed)
        own = replace(manifest, nbytes=sum(nbytes for _, nbytes in lead.ranges))
        # Of nodes over which it is spread, the first one stands for all: they are brought theirs at the same time.
        at, took_s = (nodes_of(url) or [url])[0], time.monotonic() - began_s
        self._heard(at, own, took_s, None if is_durable(url) else sent, None)
        return sealed

    def _ended(self, lead: _Lead, url: str, upload: Upload, sealed: Manifest | None) -> None:
        """It is over at a place, as ``sealed`` if it was committed there. After the last one, the slot is free."""
        with self._changed:
            lead.left.discard(url)
            lead.brought = lead.brought or sealed
            brought, is_last, counts = lead.brought, not lead.left, next(iter(lead.begun)) not in lead.left
            self._changed.notify_all()
        if brought is not None and counts:
            held_portions.surpass(self._ring, upload.run, brought)
        if is_last and brought is not None:
            self.bringing.done(upload, lead.ranges)
        elif is_last:
            self._uploads.brought(upload, whole=False)


def _background(work: Callable[[], _Result]) -> Future[_Result]:
    """Do something on a thread of its own."""
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="spot-joint", daemon=True).start()
    return done


def _give_up(begun: Future[_Begun]) -> None:
    """Give up what was begun at a place, once it is known whether it was."""
    if begun.exception() is not None:
        return
    tier, gathering = begun.result()
    try:
        tier.give_up(gathering)
    except SpotError as error:  # then the other hosts wait in vain for a while
        logger.debug("%s could not be given up: %s", gathering.shared.name, error)


def _within(files: Sequence[FileSpan], ranges: Ranges) -> tuple[FileSpan, ...]:
    """The files that lie in ranges of an image."""
    return tuple(file for file in files if any(0 <= file.offset - start < nbytes for start, nbytes in ranges))


def _named(manifest: Manifest, at: str) -> Manifest:
    """The manifest without checksums, as the place knows its run: a memory node may have another name for it."""
    if is_by_itself(at):
        return replace(manifest, checksums=())
    name, identity = parse_run(at.rpartition("/")[2])
    return replace(manifest, run=name, run_id=identity or manifest.run_id, checksums=())
