"""One attempt of a run, as one rank has it: its number, its ring, its writer, and how it ends.

Every rank has one. That of rank 0 claims storage, and sees to the end: everything that was written is uploaded before a
deadline, or named. A snapshot server that is lost meanwhile is waited for; what was lost with it is written to storage
from the state at hand, if this rank has all of it.
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
from typing import Any

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.ending import Ending, LastState, Safety, uploaded_by, write_past_memory
from lightning_spot.capture.host_link import RingSettings, leave, open_host, within
from lightning_spot.capture.layouts import CheckpointLayouter, RankLayouter
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.tensors import Owners, expected_nbytes, tensors_in
from lightning_spot.capture.unexpected import Pause, UnexpectedFailures, failure_of
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    NotSerializableError,
    SpotError,
    TierReason,
)
from lightning_spot.run.attempts import ClaimWatch, begin_attempt
from lightning_spot.run.identity import new_id
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey
from lightning_spot.say import say
from lightning_spot.server.host import Host
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.layout import Layout
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name

logger = logging.getLogger(__name__)


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


class Attempt:
    """One attempt of a run, on one rank. Made once ``fit`` begins; :meth:`finish` ends it.

    :meth:`begin` makes that of rank 0, :meth:`join` those of the others.

    Args:
        location: of the run.
        info: what the tiers are told of the attempt.
        host: ring on this host, its run opened.
        settings: of the ring.
        layouter: of what this rank writes.
        look: looks at the outline of each checkpoint, see :class:`SnapshotWriter`.
        schedule: when the parts of each snapshot are copied; ``None`` for at once.
        rank: this one.
        is_guest: whether it is on another host than rank 0, whose ring it has to see to at the end.

    Attributes:
        info: see above.
        is_claimed: whether storage was claimed when it began.
        lineage: of the training state: that of the snapshot it was resumed from, or a new one; the same on all ranks.
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
        rank: int = 0,
        is_guest: bool = False,
    ) -> None:
        self.location, self.info = location, info
        self.lineage = new_id()
        self.is_claimed = self._is_too_large = False
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
        self.safety = Safety(self.writer, settings.min_upload_interval_s or 0.0)

    @classmethod
    def begin(
        cls,
        found: Survey,
        host: Host,
        settings: RingSettings,
        layouter: Callable[[RunInfo], RankLayouter] = lambda info: CheckpointLayouter(info.token),
        look: Callable[[Layout], str | None] = lambda _outline: None,
        schedule: Schedule | None = None,
    ) -> Attempt:
        """Begin an attempt, on rank 0.

        Args:
            found: what the tiers hold of the run.
            host: ring on this host; let go here if the attempt cannot begin.
            settings: of the ring.
            layouter: makes the layouter, once it is known what the tiers are told.
            look: see above.
            schedule: see above.

        Raises:
            SpotError: if the attempt cannot begin.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(leave, host)
            info, is_claimed = begin_attempt(
                found,
                host,
                keep=settings.keep,
                min_upload_interval_s=settings.min_upload_interval_s,
                compression=settings.compression,
                replicas=settings.replicas,
            )
            attempt = cls(found.location, info, host, settings, layouter(info), look, schedule)
            undo.callback(attempt.writer.close)
            fenced = functools.partial(setattr, weakref.proxy(attempt.writer), "fence")  # it is not kept alive
            attempt._claim = ClaimWatch(found.location.url, info.claim(), is_made=is_claimed, fenced=fenced)
            attempt.is_claimed = is_claimed
            undo.pop_all()
        return attempt

    @classmethod
    def join(cls, location: Location, info: RunInfo, host: Host, settings: RingSettings, **how: Any) -> Attempt:
        """Take part in an attempt, on another rank than 0.

        Args:
            location: of the run.
            info: of the attempt, as rank 0 has it.
            host: ring on this host, its run opened; let go here if this rank cannot take part.
            settings: of the ring.
            **how: further arguments of the class.
        """
        try:
            return cls(location, info, host, settings, **how)
        except BaseException:
            host.disconnect()
            raise

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
        step: int,
        epoch: int,
        world_size: int,
        writers: int = 1,
        complete: bool = False,
        metrics: Mapping[str, float] | None = None,
        persist: bool = True,
        wait_s: float,
    ) -> None:
        """Begin a snapshot, or this rank's shard of it. What keeps it from being taken is said once, or raised.

        (It is raised with ``on_error="raise"``.)

        Args:
            content: what to save, as the layouter takes it; or, an error, why that is not known.
            owned: tensors that only the optimizer changes, by the address of their storage.
            step: Lightning's ``global_step``.
            epoch: Lightning's ``current_epoch``.
            world_size: number of ranks.
            writers: how many of them write it.
            complete: whether the run is at its end.
            metrics: values that were logged last, by name; on rank 0.
            persist: whether storage is to have it, of several ranks'.
            wait_s: how long to wait for a clean slot.
        """
        manifest: Manifest | None = None
        is_tried = False
        try:
            self._ended |= complete
            manifest = self._manifest(step, epoch, world_size, writers, complete=complete, persist=persist)
            manifest = replace(manifest, metrics=dict(metrics or {}))
            if self.writer.fence is not None:  # noticed in the background, perhaps after the others have begun
                raise self.writer.fence
            if isinstance(content, SpotError):
                raise content
            if complete:
                self._last = LastState.of(content, manifest)
            is_tried = True
            self._begun = self.writer.begin(content, manifest, owned=owned, wait_s=wait_s)
        except Exception as raised:
            if manifest is not None and not is_tried:  # what the writer has tried it has said itself
                self.writer.fail(manifest, raised)
            error = failure_of(raised)
            self._begun = Future()
            self._begun.set_exception(error)
            self._not_begun(content if isinstance(content, dict) else None, manifest, error)

    def _manifest(
        self, step: int, epoch: int, world_size: int, writers: int, *, complete: bool, persist: bool
    ) -> Manifest:
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
            epoch=epoch,
            complete=complete,
            created_unix_s=time.time(),
            world_size=world_size,
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
