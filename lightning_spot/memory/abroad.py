"""Snapshots that several hosts bring to one place, each its portion: what the node of each of these hosts does.

The first host begins an upload at a snapshot server; the others join it by the snapshot's name (see ``push``). The
ranks of each host fill a slot of its own node, which holds that host's portion only. When all of these are done, the
portion is sent; when all portions are there, the first host has the snapshot server commit it. No host has all of it.
With replicas this is done at several snapshot servers at a time. The snapshot counts when the one that carries the run
on has committed it, or, if that fails, another one; the next one does not wait for the others. At these, of what has
come since, the newest has its turn (see ``push``).

Without a snapshot server, the place is the durable tier. There, no host asks another one: each is told by its own ranks
what of the snapshot is its own, and whichever finds that all of it is there commits it (see ``joint_store``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    fault_of,
)
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.written import Ranges
from lightning_spot.memory import portions as held_portions
from lightning_spot.memory.joint import is_by_itself, is_durable, nodes_of, urls_of
from lightning_spot.memory.push import Begun, Below, Bringing, Filled, Lead, Leads, Passed, Visits
from lightning_spot.memory.registry import Registry
from lightning_spot.memory.replication import LeftBehind
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import parse_run
from lightning_spot.memory.tier import Sent
from lightning_spot.memory.upload import Upload
from lightning_spot.threads import in_background
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

_OPEN_S = 30.0
_TELL_S = 120.0  # so long do the other hosts wait for a snapshot to begin
_AGAIN_S = 1.0

Heard = Callable[[str, Manifest | None, float, Sent | None, Exception | None], None]
"""Told of each snapshot that this host has led: URL, manifest of its portion if it was brought, seconds, what was sent,
the error."""

T = TypeVar("T")


class Abroad:
    """The joint uploads of a host. Methods may be called from any thread.

    Args:
        uploads: of the local server.
        ring: likewise.
        registry: likewise.
        open_store: makes the stores of snapshot servers and durable tiers.
        heard: see :data:`Heard`.
        below: what the node does at durable tiers.

    Attributes:
        bringing: sends what lies in the slots of this host.
        visits: the snapshots that other hosts lead.
    """

    def __init__(
        self,
        uploads: Filled,
        ring: Ring,
        registry: Registry,
        open_store: Callable[[str], Store],
        heard: Heard,
        below: Below,
    ) -> None:
        self._uploads, self._ring, self._registry, self._heard = uploads, ring, registry, heard
        self.bringing = Bringing(uploads, ring, registry, open_store, below)
        self.visits = Visits(self.bringing)
        self._leads = Leads()

    def busy(self) -> set[str]:
        """URLs of runs to which a snapshot is on its way."""
        return self._leads.busy()

    def wait_brought(self, run: str | None, wait_s: float) -> list[str]:
        """Wait until nothing is on its way that nobody else has as a whole; what is in the end, one line each.

        That is what goes to a durable tier, and what this host has of snapshots that another one leads.

        Args:
            run: key of the run; ``None`` for any.
            wait_s: how long to wait.
        """
        deadline_s = time.monotonic() + wait_s
        led = self._leads.wait(run, wait_s)
        return [*led, *self.visits.wait(run, max(0.0, deadline_s - time.monotonic()))]

    def begin(self, upload: Upload) -> None:
        """Have an upload begun at its places, in the background: at snapshot servers, the other hosts wait for that.

        At a snapshot server to which an earlier one is on its way, and which does not carry the run on, its turn is
        later.

        Raises:
            SettingsError: if its layout does not say what each host brings.
        """
        lead = Lead.of(upload)
        self._leads.add(lead)
        for url in lead.begun:
            _background(partial(self._begin, lead, url), partial(self._not_begun, lead, url))

    def make_way(self) -> bool:
        """Let slots go from which nothing is sent until further nodes have their turn; whether there were any."""
        passing = self._leads.make_way()
        for lead in passing:
            self.bringing.done(lead.upload, lead.ranges)
        return self.visits.make_way() or bool(passing)

    def is_brought(self, upload: Upload) -> bool:
        """Whether a place has committed a snapshot that this host leads, and others are still to have it."""
        lead = self._leads.find(upload)
        return lead is not None and lead.brought is not None

    def seal(self, upload: Upload, manifest: Manifest) -> Manifest:
        """Send what this host brings, and have the snapshot committed once the others have brought theirs.

        Returns:
            the sealed manifest, as soon as the snapshot server that carries the run on has committed it, or, if that
            fails, another one.

        Raises:
            SnapshotFailedError: if none does in the end; the slot is freed, here and there.
            FencedError: if a later attempt holds the run, as one of them says.
        """
        lead = self._leads.find(upload)
        if lead is None:
            raise SnapshotNotFoundError(f"upload {upload.id!r} does not exist (any more)")
        self._uploads.bring(upload)
        sending = {
            _background(partial(self._send, lead, url, manifest), partial(self._not_sent, lead, url)): url
            for url in lead.begun
        }
        first = next(iter(sending))
        waiting = set(sending)
        while waiting:
            _, waiting = futures.wait(waiting, return_when=futures.FIRST_COMPLETED)
            ended = [each for each in sending if each.done()]
            for each in ended:
                if isinstance(each.exception(), FencedError):
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
            if isinstance(error, SpotError | TimeoutError):
                why = str(error) or "it did not begin there in time"
                raise SnapshotFailedError(
                    f"{manifest.name} did not come together at {url}: {why}",
                    reason=FailureReason.SHARE_MISSING,
                    fault=fault_of(error),
                ) from error
            each.result()
        raise SnapshotFailedError(
            f"{manifest.name} was to be brought to no snapshot server", reason=FailureReason.SHARE_MISSING
        )

    def end(self, upload: Upload) -> None:
        """An upload is over. If it was given up, so it is there. Nothing happens if this host does not lead it."""
        lead = self._leads.end(upload)
        if lead is not None and upload.given_up:
            for begun in lead.begun.values():
                _background(partial(_give_up, begun))

    def decline(self, run: str, at: str, name: str, attempt: int, why: str, host: int = 0) -> None:
        """Tell the other hosts, in the background, that there will be no snapshot of a name.

        A place is told at once, and again while it does not answer: ranks may wait for that snapshot.

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
            deadline_s = time.monotonic() + _TELL_S
            while not self._uploads.closing:
                try:
                    self.bringing.tier(url, key).decline(name, attempt=attempt, why=why, host=host)
                    return
                except SpotError as error:  # they wait in vain for a while
                    logger.debug("%s could not be told: %s", url, error)
                    if not isinstance(error, ServerUnreachableError) or time.monotonic() > deadline_s:
                        return
                time.sleep(_AGAIN_S)

        for url in urls_of(at):
            _background(partial(tell, url))

    # -- at each place --------------------------------------------------------------------------------------------

    def _begin(self, lead: Lead, url: str) -> None:
        upload, shared, begun = lead.upload, lead.shared, lead.begun[url]
        try:
            self._leads.wait_turn(lead, url, lambda: self.bringing.check(upload))
            tier = self.bringing.tier(url, upload.run)
            begun.set_result((tier, tier.begin(shared, lead.nbytes, attempt=upload.attempt, hosts=lead.hosts)))
        except Exception as error:
            self._not_begun(lead, url, error)

    def _not_begun(self, lead: Lead, url: str, error: Exception) -> None:
        upload, begun = lead.upload, lead.begun[url]
        if not isinstance(error, Passed):
            self._heard(url, None, 0.0, None, error)  # before anybody asks where the next one goes
        begun.set_exception(error)
        if all(each.done() and each.exception() is not None for each in lead.begun.values()):
            self._uploads.shares.fail(upload, f"{url}: {error}")
        self.decline(upload.run, url, lead.shared.name, upload.attempt, str(error))

    def _send(self, lead: Lead, url: str, manifest: Manifest) -> Manifest:
        """Bring the portion to one place, and have the snapshot committed there."""
        upload, begun = lead.upload, lead.begun[url]
        self._leads.await_turn(lead, url)
        began_s = time.monotonic()
        try:
            if manifest.nbytes != lead.nbytes:
                raise SettingsError(f"{manifest.name} has {manifest.nbytes} bytes, and was begun for {lead.nbytes}")
            tier, gathering = begun.result(_OPEN_S)
            gathering = replace(gathering, files=_within(manifest.files, lead.ranges), manifest=manifest)
            sent = self.bringing.bring(tier, gathering, upload, lead.ranges, lead.portion, lead.image)
            sealed = tier.seal(gathering, _named(manifest, url), lambda: self.bringing.check(upload))
        except Exception as error:
            self._ended(lead, url, None)
            _background(partial(_give_up, begun))
            if not (begun.done() and begun.exception() is error):
                self._heard(url, None, 0.0, None, error)
            raise
        sealed = replace(sealed, run=manifest.run)
        self._ended(lead, url, sealed)
        own = replace(manifest, nbytes=sum(nbytes for _, nbytes in lead.ranges))
        # Of nodes over which it is spread, the first one stands for all: they are brought theirs at the same time.
        at, took_s = (nodes_of(url) or [url])[0], time.monotonic() - began_s
        self._heard(at, own, took_s, None if is_durable(url) else sent, None)
        return sealed

    def _not_sent(self, lead: Lead, url: str, _: Exception) -> None:
        begun = lead.begun[url]
        self._ended(lead, url, None)
        if begun.done():
            _background(partial(_give_up, begun))

    def _ended(self, lead: Lead, url: str, sealed: Manifest | None) -> None:
        """It is over at a place, as ``sealed`` if it was committed there. After the last one, the slot is free."""
        ended = self._leads.ended(lead, url, sealed)
        if ended.brought is not None and ended.counts:
            held_portions.surpass(self._ring, lead.upload.run, ended.brought)
        if ended.is_last and ended.brought is not None:
            self.bringing.done(lead.upload, lead.ranges)
        elif ended.is_last:
            self._uploads.brought(lead.upload, whole=False)


def _background(work: Callable[[], T], failed: Callable[[SpotError], object] | None = None) -> Future[T]:
    """Do something beside; where no more threads can be had, it has failed, and that is called with why."""
    try:
        return in_background(work, "spot-joint")
    except RuntimeError as error:
        problem = SnapshotFailedError(f"it needs a thread of its own: {error}", reason=FailureReason.UNEXPECTED)
        logger.info("what belongs to a snapshot of several hosts is not done: %s", problem)
        if failed is not None:
            failed(problem)
        none: Future[T] = Future()
        none.set_exception(problem)
        return none


def _give_up(begun: Future[Begun]) -> None:
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
    """The manifest without checksums, as the place knows its run: a snapshot server may have another name for it."""
    if is_by_itself(at):
        return replace(manifest, checksums=())
    name, identity = parse_run(at.rpartition("/")[2])
    return replace(manifest, run=name, run_id=identity or manifest.run_id, checksums=())
