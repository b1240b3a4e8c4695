"""How what is committed gets to safety: before a deadline, at the end of an attempt, and where it fits no memory here.

"Durable" is logged only of what storage has listed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_spot.capture.host_link import SAY_S, leave, tiers_of, within
from lightning_spot.capture.tensors import Noted, tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_bytes
from lightning_spot.errors import ServerUnreachableError, SpotError
from lightning_spot.interval.deadline import Deadline, DeadlinePlan, plan_urgent
from lightning_spot.run.survey import ask_all
from lightning_spot.say import say
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.tier import TierHealth
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Status
from lightning_spot.store.fences import Owner, Standing
from lightning_spot.store.retention import retain
from lightning_spot.store.store import Holdings, on_behalf

_POLL_S = 0.05  # how often the ring, or a server, is asked while training ends
_LOOK_S = 10.0  # storage has at least so long to answer, also past the deadline
OTHERS_S, _AGAIN_S = 30.0, 0.5  # how long other hosts have to commit the last snapshot; how often it is looked for
_BEFORE = "The run resumes from the snapshot before it"
_IN_MEMORY = "committed in memory, and not known to be durable"
_GOES_ON = "The server that has it retries"
_ENDS_HERE = "It is only in the memory of this process, and lost when that ends"


def write_past_memory(writer: SnapshotWriter, url: str, checkpoint: Any, manifest: Manifest, info: RunInfo) -> None:
    """Bring a snapshot that fits no memory here to storage, part by part: training waits.

    Args:
        writer: makes its parts.
        url: durable directory of the run.
        checkpoint: what to save.
        manifest: what it is.
        info: of the attempt.

    Raises:
        FencedError: if a later attempt has taken the run over.
        SpotError: if it is not there in the end.
    """
    store, claim = open_store(url), info.claim()
    standing = Standing(Owner(claim.attempt, claim.digest), claim)
    stored = on_behalf(store, standing, lambda: writer.store_past_memory(checkpoint, manifest, store))
    try:
        unseen = retain(store, info.keep, stored)
    except SpotError as error:  # the next one tries again
        text = "snapshots older than {snapshot} could not be deleted at {about}: {error}. The next one retries."
        say(logging.WARNING, "retention-failed", text, about=store.url, snapshot=stored.name, error=error)
    else:
        if unseen:
            say(logging.WARNING, "upload-not-listed", "{about} ({snapshot})", about=unseen, snapshot=stored.name)


class Safety:
    """What is safe outside this machine, and how soon more can be.

    Args:
        writer: of the snapshots.
        min_upload_interval_s: least seconds between two snapshots brought to storage.

    Attributes:
        writers_here: ranks of this host that write about as much of a snapshot as this one.
    """

    def __init__(self, writer: SnapshotWriter, min_upload_interval_s: float = 0.0) -> None:
        self._writer = writer
        self._min_upload_interval_s = min_upload_interval_s
        self.writers_here = 1

    def plan(self, deadline: Deadline | None) -> DeadlinePlan:
        """Plan an urgent snapshot of the size of the last one (any size fits if there was none).

        Args:
            deadline: that it has to meet, ``None`` for none.
        """
        left_s = deadline.left_s if deadline is not None and deadline.is_named else None
        newest = self._writer.committed
        nbytes = self.writers_here * newest.nbytes if newest is not None else 0
        tiers = tiers_of(self._writer.link)
        speeds = [tier.flushed_bytes / tier.flush_s for tier in tiers.values() if tier.flush_s and not tier.carried]
        # What is committed and not safe yet goes first.
        safe_step = self._writer.link.ask(lambda host: host.safe_step(), None)
        waits = bool(tiers) and newest is not None and self._safe_step(safe_step) < newest.step
        return plan_urgent(2 * nbytes if waits else nbytes, left_s, speeds)

    def drain_s(self) -> float:
        """See :func:`drain_s_of`."""
        return drain_s_of(tiers_of(self._writer.link), self._min_upload_interval_s)

    def bring(self, deadline: Deadline, plan: DeadlinePlan, cut_short: Callable[[], bool]) -> str:
        """Wait until the newest snapshot is committed, and safe at one tier below.

        Args:
            deadline: how long to wait at most.
            plan: what was expected.
            cut_short: asked while waiting: whether to give up at once.

        Returns:
            one line for people.
        """
        started_s = time.monotonic()
        writer = self._writer
        of = f" of {deadline.end_s - started_s:.0f} s" if deadline.is_named else ""
        writer.settle(deadline.left_s)
        newest = writer.committed
        if newest is None:
            return "no snapshot of this attempt is committed; the run resumes from what an earlier one left"
        what = f"step {newest.step} ({format_bytes(newest.stored_bytes)})"
        if not plan.take:
            what = f"a new snapshot would take {plan.expected_s or 0:.0f} s to be safe, too long; the newest is {what}"
        nothing_owed = False
        while not cut_short():
            try:
                if self._safe_step(writer.host.safe_step() if writer.host is not None else None) >= newest.step:
                    return f"{what} is safe in {time.monotonic() - started_s:.1f} s{of}"
                if nothing_owed and (why := self._why_dropped(newest)):
                    return f"{what} was dropped ({why}); the run resumes from the snapshot before it"
                if nothing_owed and (why := self._why_refused()):
                    return f"{what} was refused ({why})"
                # Failing tiers are tried now.
                nothing_owed = writer.host is not None and not writer.host.flush(_POLL_S)
            except SpotError as error:
                return f"{what} is committed in memory; the snapshot server does not answer ({error})"
            if deadline.left_s == 0:
                break
            time.sleep(_POLL_S)
        return f"{what} is committed in memory, and safe nowhere else after {time.monotonic() - started_s:.1f} s{of}"

    def _why_dropped(self, newest: Manifest) -> str:
        """Why the newest snapshot was dropped instead of being brought anywhere; ``""`` if it was not."""
        tiers = tiers_of(self._writer.link).values()
        return next((tier.dropped for tier in tiers if tier.dropped_name in (newest.name, newest.snapshot)), "")

    def _why_refused(self) -> str:
        """Why a tier takes nothing of this attempt any more, for good; ``""`` if none does so."""
        return next((tier.refused for tier in tiers_of(self._writer.link).values() if tier.refused), "")

    def _safe_step(self, from_memory: int | None) -> int:
        """Newest step that is safe outside this machine, -1 if none is.

        Args:
            from_memory: as the ring knows it, ``None`` if it knows none.
        """
        past = self._writer.past_memory
        return max(-1 if from_memory is None else from_memory, past.step if past is not None else -1)


def drain_s_of(tiers: Mapping[str, TierHealth], min_upload_interval_s: float = 0.0) -> float:
    """Seconds from one snapshot to the next that the nearest working tier takes; 0 if none was measured.

    Snapshot servers count as fast until one has taken a snapshot.

    Args:
        tiers: how each is doing, by its URL.
        min_upload_interval_s: least seconds between two snapshots brought to storage.
    """
    working = [tier for tier in tiers.values() if not tier.error and not tier.carried]
    servers = [tier for tier in working if tier.kind == "server"]
    found = [tier.drain_s for tier in servers if tier.flushed]
    if servers and not found:
        return 0.0
    found += [max(tier.drain_s, min_upload_interval_s) for tier in working if tier.flushed and tier.kind != "server"]
    return min(found, default=0.0)


@dataclass(frozen=True, slots=True)
class LastState:
    """The state of the finished run, kept until it is durable. Holds references to its tensors, no copies.

    Attributes:
        checkpoint: the state; ``None`` where this rank has a part of it only.
        manifest: of its snapshot, not sealed.
        noted: how its tensors were.
    """

    checkpoint: Any
    manifest: Manifest
    noted: Noted

    @classmethod
    def of(cls, content: Any, manifest: Manifest) -> LastState:
        """Keep a state."""
        whole = content if isinstance(content, dict) else None
        return cls(whole, manifest, Noted(tensors_in(whole)))

    @property
    def can_be_written(self) -> bool:
        """Whether it is there, and no tensor of it has changed."""
        return self.checkpoint is not None and self.noted.are_unchanged


def uploaded_by(writer: SnapshotWriter) -> int:
    """Bytes that the server of a writer has brought to snapshot servers and storage so far."""
    return sum(tier.flushed_bytes for tier in tiers_of(writer.link).values())


class Ending:
    """Brings what is committed to safety at the end of an attempt.

    Args:
        writer: of the snapshots.
        url: durable directory of the run.
        info: of the attempt.
        last: the state of the finished run, ``None`` if it is not finished.
        untrained: whether the run was finished before: nothing was left to train, so nobody needs the server any more.

    Attributes:
        where: what was committed last is, for people; known after :meth:`bring`.
        uploaded_bytes: that the server of this host has brought to snapshot servers and storage, ever.
    """

    def __init__(
        self,
        writer: SnapshotWriter,
        url: str,
        info: RunInfo,
        last: LastState | None,
        *,
        untrained: bool = False,
    ) -> None:
        self._writer = writer
        self._url = url
        self._info = info
        self._last = last
        self._untrained, self._has_left = untrained, False
        self.where = _IN_MEMORY
        self.uploaded_bytes = 0
        self._durable = f"durable in {url}"

    def bring(self, wait_s: float) -> bool | None:
        """Commit and flush what is under way, within ``wait_s``, and leave the ring.

        Returns:
            whether the snapshot of the finished run was seen in storage; ``None`` if the run is not finished.
        """
        deadline_s = time.monotonic() + wait_s
        self._writer.settle(wait_s)
        left = self._flush(deadline_s)
        self.uploaded_bytes = uploaded_by(self._writer)
        durable: bool | None = None
        if self._last is not None:
            durable = self._comes(self._last.manifest, deadline_s)
            if not durable and not any(self._url in line for line in left):
                durable = self._write_here(self._last)
        if durable or not left:
            self.where = self._durable if durable else self._where_newest_is(deadline_s)
        here = _ENDS_HERE if isinstance(self._writer.host, InProcessHost) else _GOES_ON
        for line in left:
            say(logging.WARNING, "not-persisted", "not persisted yet: {about}. {effect}.", about=line, effect=here)
        self.let_go(complete=bool(durable) or (self._untrained and not left))
        return durable

    def let_go(self, *, complete: bool = False) -> None:
        """Leave the ring. A second call does nothing.

        Args:
            complete: whether nobody needs it any more.
        """
        # What another thread is asking now breaks off: that is no loss, and no reason to start a new server.
        self._writer.link.close()
        if not self._has_left and (host := self._writer.host) is not None:
            leave(host, complete=complete)
            self._has_left = True

    def _where_newest_is(self, deadline_s: float) -> str:
        """Where what was committed last is, now that nothing is owed any more. If it is lost, a warning says why.

        Storage is asked where that is in doubt: a ring or a server may have lost it, or the ring does not know
        that it is safe (it was dropped, or went past the ring), or a tier has refused something.
        """
        newest, link = self._writer.committed, self._writer.link
        if newest is None:
            return self._durable
        tiers = tiers_of(link).values()
        safe_step = link.ask(lambda host: host.safe_step(), None)
        is_known = safe_step is not None and safe_step >= newest.step and not any(tier.refused for tier in tiers)
        in_doubt = bool(link.losses) or not is_known
        is_there = self._see(newest.snapshot, deadline_s) if in_doubt else True
        if is_there is None:
            return _IN_MEMORY
        if is_there:
            return self._durable
        why = f"the newest snapshot, {newest.snapshot}, was lost with the snapshot server that had it. {_BEFORE}"
        if (fence := self._writer.fence) is not None:
            why = f"the newest snapshot, {newest.snapshot}, is not in storage: {fence}"
        for tier in tiers:
            if tier.dropped_name in (newest.name, newest.snapshot):
                why = f"the newest snapshot was damaged in memory and dropped ({tier.dropped}). {_BEFORE}"
            elif tier.refused:
                why = f"the newest snapshot, {newest.snapshot}, was refused ({tier.refused})"
        say(logging.WARNING, "newest-lost", "{why}", about=newest.snapshot, why=why)
        return "lost"

    def _flush(self, deadline_s: float) -> list[str]:
        """Flush; a ring that is lost meanwhile is waited for, since it takes over what the lost one left."""
        while True:
            host = self._writer.link.wait(within(deadline_s))
            if host is None:
                return []
            try:
                left = host.flush(min(SAY_S, within(deadline_s)))
                if left and within(deadline_s) > 0:
                    self._say_waits(left, within(deadline_s))
                    left = host.flush(within(deadline_s))
                return left
            except ServerUnreachableError as error:
                self._writer.link.lose(host, error)
                if self._writer.host is host:  # there is no way to another
                    raise

    def _say_waits(self, left: list[str], wait_s: float) -> None:
        for line in left:
            text = "fit waits for up to {wait_s:.0f} s more (upload_timeout_s) until all is persisted: {about}"
            say(logging.WARNING, "upload-awaited", text, about=line, wait_s=wait_s)

    def _see(self, name: str, deadline_s: float) -> bool | None:
        """Whether storage lists a snapshot now; ``None`` if it does not answer."""
        answers, problems = ask_all({self._url: open_store(self._url).survey}, max(_LOOK_S, within(deadline_s)))
        for reason in problems.values():
            text = "{about} cannot be read ({error}), so it is unknown whether the last snapshot is there. Check it."
            say(logging.WARNING, "last-unknown", text, about=self._url, error=reason)
        holdings: Holdings | None = answers.get(self._url)
        if holdings is None:
            return None
        return any(manifest.name == name and manifest.run_id == self._info.id for manifest in holdings.manifests)

    def _comes(self, manifest: Manifest, deadline_s: float) -> bool:
        """Whether storage lists a snapshot. Of several ranks', another host may have to commit it yet."""
        until_s = min(deadline_s, time.monotonic() + OTHERS_S) if manifest.shard is not None else 0.0
        while not (there := self._see(manifest.snapshot, deadline_s)) and time.monotonic() < until_s:
            if self._is_aborted(manifest):
                return False
            time.sleep(_AGAIN_S)
        return bool(there)

    def _is_aborted(self, manifest: Manifest) -> bool:
        """Whether a snapshot of several ranks will never be there, since one of them has failed."""
        pending = (Status.PENDING, "")
        return self._writer.link.ask(lambda host: host.wait_for(manifest.snapshot, 0.0), pending)[0] is Status.ABORTED

    def _write_here(self, last: LastState) -> bool:
        """Store the state of the end from this process: no ring has it."""
        if not last.can_be_written:
            return False
        try:
            write_past_memory(self._writer, self._url, last.checkpoint, last.manifest, self._info)
        except SpotError as error:
            text = "the last snapshot could not be written to {about}: {error}. The run resumes from the one before it."
            say(logging.WARNING, "last-not-written", text, about=self._url, error=error)
            return False
        return True
