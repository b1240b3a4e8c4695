"""One attempt of a run, as one rank has it: its number, its ring, its writer, and how it ends.

Every rank has one. That of rank 0 holds the claim of storage, and sees to the end: everything that was written is
uploaded before a deadline, or named. A snapshot server that is lost meanwhile is waited for; what was lost with it is
written to storage from the state at hand, if this rank has all of it. "Durable" is logged only of what storage has
listed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.host_link import SAY_S, RingSettings, leave, open_host, tiers_of, within
from lightning_spot.capture.layouts import RankLayouter
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.tensors import Noted, Owners, expected_nbytes, tensors_in
from lightning_spot.capture.unexpected import Pause, UnexpectedFailures, failure_of
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_bytes
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    NotSerializableError,
    ServerUnreachableError,
    SpotError,
    TierReason,
)
from lightning_spot.interval.deadline import Deadline, DeadlinePlan, plan_urgent
from lightning_spot.run.attempts import ClaimWatch
from lightning_spot.run.location import Location
from lightning_spot.run.survey import ask_all
from lightning_spot.say import say
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.tier import TierHealth
from lightning_spot.snapshot.layout import Layout
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import Status
from lightning_spot.store.fences import Owner, Standing
from lightning_spot.store.retention import retain
from lightning_spot.store.store import Holdings, on_behalf

logger = logging.getLogger(__name__)

_POLL_S = 0.05  # how often the ring, or a server, is asked while training ends
_LOOK_S = 10.0  # storage has at least so long to answer, also past the deadline
OTHERS_S, _AGAIN_S = 30.0, 0.5  # how long other hosts have to commit the last snapshot; how often it is looked for
_BEFORE = "The run resumes from the snapshot before it"
_IN_MEMORY = "committed in memory, and not known to be durable"
_GOES_ON = "The server that has it retries"
_ENDS_HERE = "It is only in the memory of this process, and lost when that ends"
_UNEXPECTED = (TierReason.SERVER_FAILED, FailureReason.UNEXPECTED)


@functools.cache  # read from files, and the training thread asks
def versions() -> dict[str, str]:
    """Of what writes a snapshot: this package, torch and Lightning."""
    present = {"lightning_spot": __version__, "torch": str(torch.__version__)}
    for name in ("lightning", "pytorch-lightning"):  # the same by two names, and one may be there alone
        try:
            return {"lightning": version(name), **present}
        except PackageNotFoundError:
            continue
    return present


# -- what is safe outside this machine, and the end ------------------------------------------------------------------


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
        writers_here: ranks of this host that write about as much of a snapshot as this one.
    """

    def __init__(self, writer: SnapshotWriter, min_upload_interval_s: float = 0.0, writers_here: int = 1) -> None:
        self._writer = writer
        self._min_upload_interval_s = min_upload_interval_s
        self.writers_here = writers_here

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
                if left and (left_s := within(deadline_s)):
                    text = "fit waits for up to {wait_s:.0f} s more (upload_timeout_s) until all is persisted: {about}"
                    for line in left:
                        say(logging.WARNING, "upload-awaited", text, about=line, wait_s=left_s)
                    left = host.flush(left_s)
                return left
            except ServerUnreachableError as error:
                self._writer.link.lose(host, error)
                if self._writer.host is host:  # there is no way to another
                    raise

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


# -- the attempt ------------------------------------------------------------------------------------------------------


class Attempt:
    """One attempt of a run, on one rank, from when it is known to the tiers until :meth:`finish`.

    Args:
        location: of the run.
        info: what the tiers are told of the attempt.
        host: ring on this host, its run opened.
        settings: of the ring.
        layouter: of what this rank writes.
        look: looks at the outline of each checkpoint, see :class:`SnapshotWriter`.
        schedule: when the parts of each snapshot are copied; ``None`` for at once.
        lineage: of a training that begins afresh; the same on all ranks.
        rank: this one.
        writers_here: ranks of this host that write about as much of a snapshot as this one.
        is_guest: whether it is on another host than rank 0, whose ring it has to see to at the end.

    Attributes:
        info: see above.
        lineage: of the training state: that of the snapshot it was resumed from, or the one given.
        writer: takes the snapshots.
        safety: what is safe outside this machine.
        where: what was committed last is, for people; known after :meth:`finish`.
        uploaded_bytes: to snapshot servers and storage by this attempt; known after :meth:`finish`.
        skipped: snapshots that were due and not taken, since no slot was free, or to take them failed.
        failures: of those that nobody has foreseen.
    """

    def __init__(
        self,
        location: Location,
        info: RunInfo,
        host: Host,
        settings: RingSettings,
        layouter: RankLayouter,
        look: Callable[[Layout], str | None] = lambda _outline: None,
        schedule: Schedule | None = None,
        *,
        lineage: str,
        rank: int = 0,
        writers_here: int = 1,
        is_guest: bool = False,
    ) -> None:
        self.location, self.info = location, info
        self.lineage = lineage
        self._is_too_large = False
        self._no_memory = Pause()
        self.where = ""
        self.skipped = self.uploaded_bytes = 0
        self.failures = UnexpectedFailures()
        self._settings, self._rank, self._is_guest = settings, rank, is_guest
        self._last: LastState | None = None
        self._ended = False
        self._begun: Future[Manifest] | None = None
        self._claim: ClaimWatch | None = None
        self.writer = SnapshotWriter(
            host,
            self._reopen if location.has_local_server else None,
            look,
            Copier(buffer_bytes=settings.device_buffer_bytes),
            schedule,
            layouter,
            rank=rank,
            approximates=settings.compression == "topk",
        )
        self._uploaded_before = uploaded_by(self.writer) if not rank else 0
        self.safety = Safety(self.writer, settings.min_upload_interval_s or 0.0, writers_here)

    def hold_claim(self, *, is_made: bool) -> None:
        """Hold the claim of storage until the end, on rank 0.

        Args:
            is_made: whether it was made when the attempt began.
        """
        fenced = functools.partial(setattr, weakref.proxy(self.writer), "fence")  # it is not kept alive
        self._claim = ClaimWatch(self.location.url, self.info.claim(), is_made=is_made, fenced=fenced)

    @property
    def number(self) -> int:
        """Number of the attempt, from 1."""
        return self.info.attempt

    @property
    def fenced(self) -> bool:
        """Whether a later attempt has taken the run over, as far as was noticed."""
        return self.writer.fence is not None

    @property
    def lacks_memory(self) -> bool:
        """Whether the memory of this host is too small for the shard of this rank, or was a moment ago.

        One rank can write the checkpoint all the same, past memory.
        """
        return self._is_too_large or not self._no_memory.is_over

    @property
    def origin(self) -> dict[str, str]:
        """What a checkpoint has of where it comes from."""
        return {"lineage": self.lineage, "run_id": self.info.id}

    def warm(self, state: Any, part: float = 1.0) -> None:
        """Have slots made in the background, large enough for the tensors of ``state`` and what goes with them.

        Args:
            state: of the training.
            part: which part of it this rank writes, about.
        """
        gpus = (tensor.device.index for tensor in tensors_in(state) if tensor.device.type == "cuda")
        self.writer.warm(expected_nbytes(state, part), gpu=next(gpus, None), beyond=self._settings.beyond)

    def write(
        self,
        content: Any,
        *,
        owned: Owners,
        wait_s: float,
        step: int,
        writers: int = 1,
        complete: bool = False,
        persist: bool = True,
        **facts: Any,
    ) -> None:
        """Begin a snapshot, or this rank's shard of it. What keeps it from being taken is said once, or raised.

        (It is raised with ``on_error="raise"``.)

        Args:
            content: what to save, as the layouter takes it; or, an error, why that is not known.
            owned: tensors that only the optimizer changes, by the address of their storage.
            wait_s: how long to wait for a clean slot.
            step: Lightning's ``global_step``.
            writers: how many ranks write it.
            complete: whether the run is at its end.
            persist: whether storage is to have it, of several ranks'.
            **facts: more that its manifest says, see :class:`Manifest`: epoch, number of ranks, metrics.
        """
        manifest: Manifest | None = None
        try:
            self._ended |= complete
            manifest = replace(self._manifest(step, writers, complete=complete, persist=persist), **facts)
            if self.writer.fence is not None:  # noticed in the background, perhaps after the others have begun
                raise self.writer.fence
            if isinstance(content, SpotError):
                raise content
            if complete:
                self._last = LastState.of(content, manifest)
            self._begun = self.writer.begin(content, manifest, owned=owned, wait_s=wait_s)
        except Exception as raised:
            if manifest is not None:  # once more, where the writer has tried it: the first word counts
                self.writer.fail(manifest, raised)
            error = failure_of(raised)
            self._begun = Future()
            self._begun.set_exception(error)
            self._not_begun(content if isinstance(content, dict) else None, manifest, error)

    def _manifest(self, step: int, writers: int, *, complete: bool, persist: bool) -> Manifest:
        """What a snapshot, or this rank's shard of it, is; size and checksums are not known yet."""
        name, shard = snapshot_name(step, self.number, complete=complete), None
        if writers > 1:
            name, shard = shard_name(name, self._rank), ShardOf(self._rank, writers, persist=persist)
        return Manifest(
            run=self.info.name,
            run_id=self.info.id,
            lineage=self.lineage,
            name=name,
            step=step,
            attempt=self.number,
            nbytes=0,
            complete=complete,
            created_unix_s=time.time(),
            versions=versions(),
            shard=shard,
        )

    def count_failure(self) -> None:
        """Count a snapshot that was not taken, for a reason that nobody has foreseen and that was said."""
        self.skipped += 1
        if self.failures.add(self.writer.committed):
            text = "one snapshot after the other fails. None is taken for some minutes, then they are tried again."
            say(logging.WARNING, "snapshots-paused", text)

    def failure(self, wait_s: float) -> BaseException | None:
        """What kept the snapshot that was begun last from being committed; ``None`` if it is, or may yet be.

        Args:
            wait_s: how long to wait for one that is on its way, seconds.
        """
        self.writer.settle(wait_s)
        begun = self._begun
        return begun.exception() if begun is not None and begun.done() else None

    def _not_begun(self, checkpoint: dict[str, Any] | None, manifest: Manifest | None, error: SpotError) -> None:
        """Say why there is no snapshot, and find another way for it where there is one.

        Args:
            checkpoint: what was to be saved; ``None`` where this rank does not have all of it.
            manifest: of it, as far as that was made.
            error: what was in the way.
        """
        reason = getattr(error, "reason", None)
        if reason is FailureReason.RING_FULL:
            self.skipped += 1
            cause = "full" if self.writer.ready else "slots not made"  # another cause, later, is said too
            step = manifest.step if manifest is not None else 0
            text = "snapshot of step {step} skipped, others may be: {error}. Increase slots= or the interval."
            say(logging.WARNING, "slots-full", text, about=cause, step=step, error=error)
        elif isinstance(error, FencedError):
            self.writer.fence = error
            self._complain("fenced", error)
        elif reason in (FailureReason.TOO_LARGE, TierReason.FAILED):  # this host has no memory for it
            if checkpoint is None or manifest is None:  # no single process has all of it
                self._is_too_large |= reason is FailureReason.TOO_LARGE
                if reason is TierReason.FAILED:  # of this moment: there may be some again
                    self._no_memory.begin()
                self._complain("past-memory-failed", error)
            else:
                self._write_past_memory(checkpoint, manifest, error)
        elif reason in _UNEXPECTED:
            self._complain(f"failed: {error}", error)
            self.count_failure()
        else:
            if isinstance(error, NotSerializableError):
                self._last = None  # to try again at the end would be in vain
            # That the server is lost was said when it was.
            self._complain(str(reason or type(error).__name__), error, was_said=self.writer.link.is_loss(error))

    def miss_end(self) -> None:
        """Note that the run is at its end, and that there is no snapshot of it: why not was said."""
        self._ended = True

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Commit and flush what is under way, within ``wait_s``, and close.

        Args:
            wait_s: bound, seconds.
            complete: whether the run is at its end.

        Returns:
            on rank 0, whether the snapshot of the end was seen in storage; ``None`` if none was to be taken.
        """
        if self._rank:
            self._part(wait_s)
            return None
        last = self._last if complete and not self.fenced else None
        untrained = complete and not self._ended
        ending = Ending(self.writer, self.location.url, self.info, last, untrained=untrained)
        deadline_s = time.monotonic() + wait_s
        with contextlib.ExitStack() as ends:  # from the last one on, whatever fails in one
            if self._claim is not None:
                ends.callback(self._claim.close)
            ends.callback(self.writer.close)
            ends.callback(ending.let_go)
            try:
                durable = self._bring(ending, deadline_s)
                if self._ended and self.fenced:
                    return False
                return durable if self._last is not None or not self._ended else False
            except Exception as error:
                self._complain("finish", failure_of(error))
                return False
            finally:
                self.where, self.uploaded_bytes = ending.where, max(0, ending.uploaded_bytes - self._uploaded_before)

    def _part(self, wait_s: float) -> None:
        """The end on another rank: what it has begun is in its ring, and a ring of another host brings it away."""
        deadline_s, writer = time.monotonic() + wait_s, self.writer
        with contextlib.ExitStack() as ends:
            ends.callback(writer.close)
            writer.settle(wait_s)
            nothing: list[str] = []
            late = writer.link.ask(lambda host: host.flush(within(deadline_s)), nothing) if self._is_guest else nothing
            for line in late:
                text = "not persisted yet: {about}. The local server retries."
                say(logging.WARNING, "not-persisted", text, about=line)
            writer.link.close()
            if (host := writer.host) is not None:
                ends.callback(host.disconnect)
                if self._is_guest:
                    leave(host, complete=True)

    def _bring(self, ending: Ending, deadline_s: float) -> bool | None:
        """Bring what is committed to safety; once more if that fails in a way that nobody has foreseen.

        A ring in this process ends with it, and all that is in it.
        """
        try:
            return ending.bring(within(deadline_s))
        except Exception as error:
            failure = failure_of(error)
            if getattr(failure, "reason", None) not in _UNEXPECTED:
                raise
            durable = ending.bring(within(deadline_s))
            self._complain("finish", failure)
            return durable

    def _write_past_memory(self, checkpoint: dict[str, Any], manifest: Manifest, error: SpotError) -> None:
        text = "{error}. Until then snapshots go to {where} part by part, and training waits for each."
        say(logging.WARNING, "past-memory", text, error=error, where=self.location.url)
        try:
            write_past_memory(self.writer, self.location.url, checkpoint, manifest, self.info)
        except FencedError as fence:
            self.writer.fence = fence
            self._complain("fenced", fence)
        except SpotError as failure:
            self._complain("past-memory-failed", failure)

    def _complain(self, key: str, error: SpotError, *, was_said: bool = False) -> None:
        if self._settings.strict:
            raise error
        if not was_said:
            effect = "The run ends all the same" if self._ended else "Training continues"
            text = "no snapshot now: {error}. {effect}."
            say(logging.WARNING, "no-snapshot", text, about=key, error=error, effect=effect)

    def _reopen(self) -> Host:
        # A ring in this process would have what this rank writes, and not what the others of this host do.
        must_share = self.safety.writers_here > 1
        host = open_host(self.location, replace(self._settings, strict=must_share or self._settings.strict))
        try:
            host.open_run(self.info)
        except BaseException:
            leave(host)
            raise
        return host
