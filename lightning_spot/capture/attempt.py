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
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.host_link import SAY_S, leave, seconds_left, tiers_of
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
from lightning_spot.run.location import Location, RingSettings
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


class LastState(NamedTuple):
    """The state of the finished run, kept until it is durable. Holds references to its tensors, no copies.

    Attributes:
        checkpoint: the state; ``None`` where this rank has a part of it only.
        manifest: of its snapshot, not sealed.
        noted: how its tensors were.
    """

    checkpoint: dict[str, Any] | None
    manifest: Manifest
    noted: Noted


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
        writers_here: see above.
        writer: takes the snapshots.
        where: what was committed last is, for people; known after :meth:`finish`.
        uploaded_bytes: to snapshot servers and storage by this attempt; known after :meth:`finish`.
        skipped: snapshots that were due and not taken, since no slot was free, or to take them failed.
        failures: of those that nobody has foreseen.
        has_ended: whether the run is at its end: a snapshot of that was begun, or why there is none was said.
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
        self.lineage, self.writers_here = lineage, writers_here
        self.where = _IN_MEMORY
        self.skipped = self.uploaded_bytes = 0
        self.failures = UnexpectedFailures()
        self.has_ended = False
        self._settings, self._rank, self._is_guest = settings, rank, is_guest
        self._is_too_large, self._no_memory = False, Pause()
        self._last: LastState | None = None
        self._begun: Future[Manifest] | None = None
        self._claim: ClaimWatch | None = None
        self._has_left = False
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
        self._uploaded_before = 0 if rank else self._uploaded()

    def hold_claim(self, *, is_made: bool) -> None:
        """Hold the claim of storage until the end, on rank 0.

        Args:
            is_made: whether it was made when the attempt began.
        """
        fenced = functools.partial(setattr, weakref.proxy(self.writer), "fence")  # it is not kept alive
        self._claim = ClaimWatch(self.location.url, self.info.claim(), is_made=is_made, fenced=fenced)

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

    def warm(self, state: Any, part: float = 1.0) -> None:
        """Have slots made in the background, large enough for the tensors of ``state`` and what goes with them.

        Args:
            state: of the training.
            part: which part of it this rank writes, about.
        """
        gpus = (tensor.device.index for tensor in tensors_in(state) if tensor.device.type == "cuda")
        self.writer.warm(expected_nbytes(state, part), gpu=next(gpus, None), beyond=self._settings.beyond)

    # -- snapshots ------------------------------------------------------------------------------------------------

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

        (It is raised with ``on_error="raise"``.) If it was to be a shard, the ring has the reason: nobody waits for it.

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
        checkpoint = content if isinstance(content, dict) else None
        try:
            self.has_ended |= complete
            manifest = self._manifest(step, writers, persist=persist, complete=complete, **facts)
            if self.writer.fence is not None:  # noticed in the background, perhaps after the others have begun
                raise self.writer.fence
            if isinstance(content, SpotError):
                raise content
            if complete:
                self._last = LastState(checkpoint, manifest, Noted(tensors_in(checkpoint)))
            self._begun = self.writer.begin(content, manifest, owned=owned, wait_s=wait_s)
        except BaseException as raised:
            if manifest is not None:
                self.writer.fail(manifest, raised)
            if not isinstance(raised, Exception):
                raise
            error = failure_of(raised)
            self._begun = Future()
            self._begun.set_exception(error)
            self._not_begun(checkpoint, manifest, error)

    def _manifest(self, step: int, writers: int, *, persist: bool, complete: bool, **facts: Any) -> Manifest:
        """What a snapshot, or this rank's shard of it, is; size and checksums are not known yet."""
        attempt = self.info.attempt
        name, shard = snapshot_name(step, attempt, complete=complete), None
        if writers > 1:
            name, shard = shard_name(name, self._rank), ShardOf(self._rank, writers, persist=persist)
        return Manifest(
            run=self.info.name,
            run_id=self.info.id,
            lineage=self.lineage,
            name=name,
            step=step,
            attempt=attempt,
            nbytes=0,
            complete=complete,
            created_unix_s=time.time(),
            versions=versions(),
            shard=shard,
            **facts,
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
        self.writer.wait_all(wait_s)
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

    def _write_past_memory(self, checkpoint: dict[str, Any], manifest: Manifest, error: SpotError) -> None:
        text = "{error}. Until then snapshots go to {where} part by part, and training waits for each."
        say(logging.WARNING, "past-memory", text, error=error, where=self.location.url)
        try:
            self._store(checkpoint, manifest)
        except FencedError as fence:
            self.writer.fence = fence
            self._complain("fenced", fence)
        except SpotError as failure:
            self._complain("past-memory-failed", failure)

    def _store(self, checkpoint: dict[str, Any], manifest: Manifest) -> None:
        """Bring a snapshot that fits no memory here, or that no ring has, to storage, part by part: training waits.

        Raises:
            FencedError: if a later attempt has taken the run over.
            SpotError: if it is not there in the end.
        """
        store, claim = open_store(self.location.url), self.info.claim()
        standing = Standing(Owner(claim.attempt, claim.digest), claim)
        stored = on_behalf(store, standing, lambda: self.writer.store_past_memory(checkpoint, manifest, store))
        try:
            unseen = retain(store, self.info.keep, stored)
        except SpotError as error:  # the next one tries again
            text = "snapshots older than {snapshot} could not be deleted at {about}: {error}. The next one retries."
            say(logging.WARNING, "retention-failed", text, about=store.url, snapshot=stored.name, error=error)
        else:
            if unseen:
                say(logging.WARNING, "upload-not-listed", "{about} ({snapshot})", about=unseen, snapshot=stored.name)

    def _complain(self, key: str, error: SpotError, *, was_said: bool = False) -> None:
        if self._settings.strict:
            raise error
        if not was_said:
            effect = "The run ends all the same" if self.has_ended else "Training continues"
            text = "no snapshot now: {error}. {effect}."
            say(logging.WARNING, "no-snapshot", text, about=key, error=error, effect=effect)

    def _reopen(self) -> Host:
        # A ring in this process would have what this rank writes, and not what the others of this host do.
        must_share = self.writers_here > 1
        host = self.location.open_host(replace(self._settings, strict=must_share or self._settings.strict))
        try:
            host.open_run(self.info)
        except BaseException:
            leave(host)
            raise
        return host

    # -- what is safe outside this machine ------------------------------------------------------------------------

    def drain_s(self) -> float:
        """See :func:`drain_s_of`."""
        return drain_s_of(tiers_of(self.writer.link), self._settings.min_upload_interval_s or 0.0)

    def plan(self, deadline: Deadline) -> DeadlinePlan:
        """Plan an urgent snapshot of the size of the last one (any size fits if there was none).

        Args:
            deadline: that it has to meet.
        """
        newest, tiers = self.writer.committed, tiers_of(self.writer.link)
        nbytes = self.writers_here * newest.nbytes if newest is not None else 0
        speeds = [tier.flushed_bytes / tier.flush_s for tier in tiers.values() if tier.flush_s and not tier.carried]
        # What is committed and not safe yet goes first.
        waits = bool(tiers) and newest is not None and self._safe_step() < newest.step
        return plan_urgent(2 * nbytes if waits else nbytes, deadline.left_s if deadline.is_named else None, speeds)

    def secure(self, deadline: Deadline, plan: DeadlinePlan, cut_short: Callable[[], bool]) -> str:
        """Wait until the newest snapshot is committed, and safe at one tier below.

        Args:
            deadline: how long to wait at most.
            plan: what was expected.
            cut_short: asked while waiting: whether to give up at once.

        Returns:
            one line for people.
        """
        started_s, writer, link = time.monotonic(), self.writer, self.writer.link
        of = f" of {deadline.end_s - started_s:.0f} s" if deadline.is_named else ""
        writer.wait_all(deadline.left_s)
        if (newest := writer.committed) is None:
            return "no snapshot of this attempt is committed; the run resumes from what an earlier one left"
        what = f"step {newest.step} ({format_bytes(newest.stored_bytes)})"
        if not plan.take:
            what = f"a new snapshot would take {plan.expected_s or 0:.0f} s to be safe, too long; the newest is {what}"
        losses, owed = link.losses, ["not asked yet"]  # empty would say that nothing is owed any more
        while not cut_short():
            if self._safe_step() >= newest.step:
                return f"{what} is safe in {time.monotonic() - started_s:.1f} s{of}"
            if not owed and (why := self._why_not_taken(newest)):
                return f"{what} {why}"
            owed = link.ask(lambda host: host.flush(_POLL_S), ["no answer"])  # failing tiers are tried now
            if link.losses > losses:
                return f"{what} is committed in memory, and the snapshot server on this host is lost"
            if deadline.left_s == 0:
                break
            time.sleep(_POLL_S)
        return f"{what} is committed in memory, and safe nowhere else after {time.monotonic() - started_s:.1f} s{of}"

    def _safe_step(self) -> int:
        """Newest step that is safe outside this machine, -1 if none is."""
        known, past = self.writer.link.ask(lambda host: host.safe_step(), None), self.writer.past_memory
        return max(-1 if known is None else known, -1 if past is None else past.step)

    def _why_not_taken(self, newest: Manifest) -> str:
        """What happened to the newest snapshot instead of being brought anywhere, for people; ``""`` if nothing did."""
        tiers = tiers_of(self.writer.link).values()
        for tier in tiers:
            if tier.dropped_name in (newest.name, newest.snapshot):
                return f"was damaged in memory and dropped ({tier.dropped}). {_BEFORE}"
        return next((f"was refused ({tier.refused})" for tier in tiers if tier.refused), "")

    def _uploaded(self) -> int:
        """Bytes that the server of this host has brought to snapshot servers and storage, ever."""
        return sum(tier.flushed_bytes for tier in tiers_of(self.writer.link).values())

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Commit and flush what is under way, within ``wait_s``, leave the ring, and close.

        What other ranks have begun is in the ring of rank 0, or in that of another host, which brings it away.

        Args:
            wait_s: bound, seconds.
            complete: whether the run is at its end.

        Returns:
            on rank 0, whether the snapshot of the end was seen in storage; ``None`` if none was to be taken.
        """
        deadline_s = time.monotonic() + wait_s
        last = self._last if complete and not self._rank and not self.fenced else None
        # Nothing was left to train: nobody needs the server any more.
        bring = functools.partial(self._bring, last, deadline_s, untrained=complete and not self.has_ended)
        with contextlib.ExitStack() as ends:  # from the last one on, whatever fails in one
            if self._claim is not None:
                ends.callback(self._claim.close)
            ends.callback(self.writer.close)
            ends.callback(self._let_go)
            try:
                durable = self._once_more(bring)
            except Exception as error:
                self._complain("finish", failure_of(error))
                durable = False
        if self._rank:
            return None
        if self.has_ended and (self._last is None or self.fenced):
            return False  # it was begun and failed: ``None`` would say that none was to be taken
        return durable

    def _once_more(self, bring: Callable[[], bool | None]) -> bool | None:
        """Bring what is committed to safety; once more if that fails in a way that nobody has foreseen.

        A ring in this process ends with it, and all that is in it.
        """
        try:
            return bring()
        except Exception as error:
            failure = failure_of(error)
            if getattr(failure, "reason", None) not in _UNEXPECTED:
                raise
            durable = bring()
            self._complain("finish", failure)
            return durable

    def _bring(self, last: LastState | None, deadline_s: float, *, untrained: bool) -> bool | None:
        """Commit and flush what is under way, and leave the ring.

        Returns:
            whether the snapshot of the finished run was seen in storage; ``None`` if the run is not finished.
        """
        writer, url = self.writer, self.location.url
        writer.wait_all(seconds_left(deadline_s))
        left = self._flush(deadline_s) if self._is_guest or not self._rank else []
        durable: bool | None = None
        if not self._rank:
            self.uploaded_bytes = max(0, self._uploaded() - self._uploaded_before)
            if last is not None:
                durable = self._is_listed_in_time(last.manifest, deadline_s)
                if not durable and not any(url in line for line in left):
                    durable = self._write_here(last)
            if durable or not left:
                self.where = f"durable in {url}" if durable else self._where_newest_is(deadline_s)
        here = _ENDS_HERE if isinstance(writer.host, InProcessHost) else _GOES_ON
        for line in left:
            say(logging.WARNING, "not-persisted", "not persisted yet: {about}. {effect}.", about=line, effect=here)
        self._let_go(complete=bool(durable) or (untrained and not left))
        return durable

    def _let_go(self, *, complete: bool = False) -> None:
        """Leave the ring. A second call does nothing.

        Args:
            complete: whether nobody needs it any more.
        """
        # What another thread is asking now breaks off: that is no loss, and no reason to start a new server.
        self.writer.link.close()
        if self._has_left or (host := self.writer.host) is None:
            return
        if self._rank and not self._is_guest:
            host.disconnect()
        else:
            leave(host, complete=complete or self._is_guest)
        self._has_left = True

    def _flush(self, deadline_s: float) -> list[str]:
        """Flush; a ring that is lost meanwhile is waited for, since it takes over what the lost one left."""
        while True:
            host = self.writer.link.wait(seconds_left(deadline_s))
            if host is None:
                return []
            try:
                left = host.flush(min(SAY_S, seconds_left(deadline_s)))
                if left and (left_s := seconds_left(deadline_s)):
                    text = "fit waits for up to {wait_s:.0f} s more (upload_timeout_s) until all is persisted: {about}"
                    for line in left:
                        say(logging.WARNING, "upload-awaited", text, about=line, wait_s=left_s)
                    left = host.flush(left_s)
                return left
            except ServerUnreachableError as error:
                self.writer.link.lose(host, error)
                if self.writer.host is host:  # there is no way to another
                    raise

    def _is_listed_in_time(self, manifest: Manifest, deadline_s: float) -> bool:
        """Whether storage lists a snapshot. Of several ranks', another host may have to commit it yet."""
        pending = (Status.PENDING, "")
        until_s = min(deadline_s, time.monotonic() + OTHERS_S) if manifest.shard is not None else 0.0
        while not (there := self._is_listed(manifest.snapshot, deadline_s)) and time.monotonic() < until_s:
            status, _ = self.writer.link.ask(lambda host: host.wait_for(manifest.snapshot, 0.0), pending)
            if status is Status.ABORTED:  # one of them has failed: it will never be there
                return False
            time.sleep(_AGAIN_S)
        return bool(there)

    def _is_listed(self, name: str, deadline_s: float) -> bool | None:
        """Whether storage lists a snapshot now; ``None`` if it does not answer."""
        url = self.location.url
        answers, problems = ask_all({url: open_store(url).survey}, max(_LOOK_S, seconds_left(deadline_s)))
        for reason in problems.values():
            text = "{about} cannot be read ({error}), so it is unknown whether the last snapshot is there. Check it."
            say(logging.WARNING, "last-unknown", text, about=url, error=reason)
        holdings: Holdings | None = answers.get(url)
        if holdings is None:
            return None
        return any(manifest.name == name and manifest.run_id == self.info.id for manifest in holdings.manifests)

    def _write_here(self, last: LastState) -> bool:
        """Store the state of the end from this process, as no ring has it: unless a tensor of it has changed."""
        if last.checkpoint is None or not last.noted.are_unchanged:
            return False
        try:
            self._store(last.checkpoint, last.manifest)
        except SpotError as error:
            text = "the last snapshot could not be written to {about}: {error}. The run resumes from the one before it."
            say(logging.WARNING, "last-not-written", text, about=self.location.url, error=error)
            return False
        return True

    def _where_newest_is(self, deadline_s: float) -> str:
        """Where what was committed last is, now that nothing is owed any more. If it is lost, a warning says why.

        Storage is asked where that is in doubt: a ring or a server may have lost it, or the ring does not know
        that it is safe (it was dropped), or a tier has refused something.
        """
        newest, durable = self.writer.committed, f"durable in {self.location.url}"
        if newest is None:
            return durable
        in_doubt = self.writer.link.losses or self._safe_step() < newest.step or self._why_not_taken(newest)
        is_there = self._is_listed(newest.snapshot, deadline_s) if in_doubt else True
        if is_there is None:
            return _IN_MEMORY
        if is_there:
            return durable
        fence = self.writer.fence
        usual = f"is not in storage: {fence}" if fence else f"was lost with the snapshot server that had it. {_BEFORE}"
        why = f"the newest snapshot, {newest.snapshot}, {self._why_not_taken(newest) or usual}"
        say(logging.WARNING, "newest-lost", "{why}", about=newest.snapshot, why=why)
        return "lost"
