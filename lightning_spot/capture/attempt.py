"""One attempt of a run, on the rank that writes it: its number, its ring, its writer."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_spot._version import __version__
from lightning_spot.capture.ending import Ending, LastState, Safety
from lightning_spot.capture.host_link import RingSettings, leave, open_host, within
from lightning_spot.capture.owners import Owners
from lightning_spot.capture.past_memory import PastMemory
from lightning_spot.capture.sharded_writer import ShardedCheckpoint, ShardedWriter
from lightning_spot.capture.split import SharingRanks
from lightning_spot.capture.tensors import expected_nbytes, tensors_in
from lightning_spot.capture.unforeseen import UnforeseenFailures, failure_of
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    NotSerializableError,
    SnapshotFailedError,
    SpotError,
    TierReason,
)
from lightning_spot.image.layout import Layout
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.host import Host
from lightning_spot.run.attempts import ClaimWatch, begin_attempt
from lightning_spot.run.identity import new_id
from lightning_spot.run.survey import Survey
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

logger = logging.getLogger(__name__)

_UNFORESEEN = (TierReason.SERVER_FAILED, FailureReason.UNFORESEEN)


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
    """One attempt of a run. Made once ``fit`` begins; :meth:`finish` ends it.

    Args:
        found: what the tiers hold of the run.
        host: ring on this host; let go here if the attempt cannot begin.
        settings: of the ring.
        look: looks at the outline of each snapshot, see :class:`SnapshotWriter`.
        schedule: when the parts of each snapshot are copied; ``None`` for at once.
        sharded_over: number of ranks that each write their part; 0 if one rank writes all.

    Raises:
        SpotError: if the attempt cannot begin.

    Attributes:
        info: what the tiers were told of it.
        is_claimed: whether the durable tier was claimed when it began.
        lineage: of the training state: that of the snapshot it was resumed from, or a new one.
        writer: takes the snapshots.
        where: what was committed last is, for people; known after :meth:`finish`.
        skipped: snapshots that were due and not taken, since no slot was free, or to take them failed.
        failures: of those that nobody has foreseen.
    """

    def __init__(
        self,
        found: Survey,
        host: Host,
        settings: RingSettings,
        look: Callable[[Layout], str | None] = lambda _outline: None,
        schedule: Schedule | None = None,
        sharded_over: int = 0,
    ) -> None:
        self.location = found.location
        self.lineage = new_id()
        self.where = ""
        self.skipped = 0
        self.failures = UnforeseenFailures()
        self._settings = settings
        self._last: LastState | None = None
        self._ended = False
        self._begun: Future[Manifest] | None = None
        try:
            self.info, self.is_claimed = begin_attempt(
                found,
                host,
                keep=settings.keep,
                min_upload_interval_s=settings.min_upload_interval_s,
                compression=settings.compression,
                replicas=settings.replicas,
            )
        except BaseException:
            leave(host)
            raise
        try:
            self.writer = self._writer(host, look, schedule, sharded_over)
        except BaseException:  # no thread can be had now
            leave(host)
            raise
        fenced = functools.partial(setattr, weakref.proxy(self.writer), "fence")  # it is not kept alive
        try:
            self._claim = ClaimWatch(self.location.url, self.info.claim(), is_made=self.is_claimed, fenced=fenced)
        except BaseException:
            self.writer.close()
            leave(host)
            raise
        self._past_memory = PastMemory(self.writer, self.location.url, self.info)
        self.safety = Safety(self.writer, settings.min_upload_interval_s or 0.0)

    def _writer(
        self, host: Host, look: Callable[[Layout], str | None], schedule: Schedule | None, sharded_over: int
    ) -> SnapshotWriter:
        copier = Copier(buffer_bytes=self._settings.device_buffer_bytes)
        reopen = self._reopen if self.location.has_local_server else None
        if sharded_over:
            token = self.info.token
            return ShardedWriter(host, reopen, copier, schedule, look, world_size=sharded_over, token=token)
        topk = self._settings.compression == "topk"
        return SnapshotWriter(host, reopen, look, copier, schedule, approximates=topk)

    @property
    def number(self) -> int:
        """Number of the attempt, from 1."""
        return self.info.attempt

    @property
    def fenced(self) -> bool:
        """Whether a later attempt has taken the run over, as far as was noticed."""
        return self.writer.fence is not None

    @property
    def origin(self) -> dict[str, str]:
        """What a checkpoint has of where it comes from."""
        return {"lineage": self.lineage, "run_id": self.info.id}

    def warm(self, state: Any) -> None:
        """Have slots made in the background, large enough for the tensors of ``state`` and what goes with them."""
        gpus = (tensor.device.index for tensor in tensors_in(state) if tensor.device.type == "cuda")
        nbytes = expected_nbytes(state, self.writer.across.part)
        self.writer.warm(nbytes, gpu=next(gpus, None), beyond=self._settings.beyond)

    def write(
        self,
        checkpoint: dict[str, Any] | ShardedCheckpoint | SpotError,
        *,
        owned: Owners,
        kept: Owners,
        step: int,
        epoch: int,
        world_size: int,
        complete: bool = False,
        wait_s: float,
        ranks: SharingRanks | None = None,
        followed: bool = False,
    ) -> None:
        """Begin a snapshot. What keeps it from being taken is said once, or raised with ``strict``.

        Args:
            checkpoint: what to save; or why that is not known. (Other ranks that are to take part hear of it.)
            owned: tensors that only the optimizer changes, by the address of their storage.
            kept: further tensors whose counts of writes tell whether they changed.
            step: Lightning's ``global_step``.
            epoch: Lightning's ``current_epoch``.
            world_size: number of ranks.
            complete: whether the run is at its end.
            wait_s: how long to wait for a clean slot.
            ranks: that fill it together with this one.
            followed: whether another one is to follow in a moment, see :meth:`Host.seal`.
        """
        manifest: Manifest | None = None
        is_asked = False  # a writer of a state in shards tells the other ranks by itself, once it is
        try:
            self._ended |= complete
            manifest = self._manifest(step, epoch, world_size, complete=complete)
            if self.writer.fence is not None:  # heard of beside training, perhaps after the other ranks were told
                raise self.writer.fence
            if isinstance(checkpoint, SpotError):
                raise checkpoint
            if complete:
                self._last = LastState.of(checkpoint, manifest)
            how: dict[str, Any] = {"owned": owned, "kept": kept, "ranks": ranks, "followed": followed}
            is_asked = isinstance(checkpoint, ShardedCheckpoint)
            self._begun = self.writer.begin(checkpoint, manifest, wait_s=wait_s, **how)
        except Exception as raised:
            error = failure_of(raised)
            self._begun = Future()
            self._begun.set_exception(error)
            is_shared = ranks is not None or isinstance(self.writer, ShardedWriter)
            if is_shared and not is_asked:
                self.decline(step, str(error), complete=complete, at=ranks.at if ranks is not None else "")
            whole = checkpoint if isinstance(checkpoint, dict) else None
            self._not_begun(whole, manifest, error, ranks)
            if self.writer.mailbox is not None:
                self.writer.mailbox.over(snapshot_name(step, self.number, complete=complete))

    def _manifest(self, step: int, epoch: int, world_size: int, *, complete: bool) -> Manifest:
        """What a snapshot is; size and checksums are not known yet."""
        return Manifest(
            run=self.info.name,
            run_id=self.info.id,
            lineage=self.lineage,
            name=snapshot_name(step, self.number, complete=complete),
            step=step,
            attempt=self.number,
            nbytes=0,
            epoch=epoch,
            complete=complete,
            created_unix_s=time.time(),
            world_size=world_size,
            versions=versions(),
        )

    def count_failure(self) -> None:
        """Count a snapshot that was not taken, for a reason that nobody has foreseen and that was said."""
        self.skipped += 1
        if self.failures.add(self.writer.committed):
            self.writer.say_once("pause", "one snapshot after the other fails: none is taken for some minutes")

    def failure(self, wait_s: float) -> BaseException | None:
        """What kept the snapshot that was begun last from being committed; ``None`` if it is, or may yet be.

        Args:
            wait_s: how long to wait for one that is on its way, seconds.
        """
        self.writer.settle(wait_s)
        begun = self._begun
        return begun.exception() if begun is not None and begun.done() else None

    def decline(self, step: int, why: str, *, complete: bool, at: str = "") -> None:
        """Of a sharded run: tell the other ranks that there will be no snapshot of a step.

        Args:
            step: of the snapshot.
            why: for people.
            complete: whether the run is at its end.
            at: URL of the run at the snapshot server to which other hosts would have brought their parts.
        """
        self.writer.decline(snapshot_name(step, self.number, complete=complete), why, at)

    def _not_begun(
        self, checkpoint: dict[str, Any] | None, manifest: Manifest | None, error: SpotError, ranks: SharingRanks | None
    ) -> None:
        """Say why there is no snapshot, and find another way for it where there is one.

        Args:
            checkpoint: what was to be saved; ``None`` where this process does not have all of it.
            manifest: of it, as far as that was made.
            error: what was in the way.
            ranks: that were to fill it together with this one.
        """
        reason = getattr(error, "reason", None)
        if reason is FailureReason.RING_FULL:
            self.skipped += 1
            cause = "full" if self.writer.ready else "slots not made"  # another cause, later, is said too
            step = manifest.step if manifest is not None else 0
            self.writer.say_once(cause, "snapshot of step %d is skipped, and others may be: %s", step, error)
        elif isinstance(error, FencedError):
            self.writer.fence = error
            self._complain("fenced", error)
        elif reason in (FailureReason.TOO_LARGE, TierReason.FAILED):  # this host has no memory for it
            if checkpoint is None or manifest is None:  # no single process has all of it
                self._complain("past-memory-failed", error)
            elif self._has_all(manifest.name, ranks):
                self._write_past_memory(checkpoint, manifest, error)
            else:  # rank 0 alone takes the next one
                self.writer.miss(error)
        elif reason in _UNFORESEEN:
            self._complain(f"failed: {error}", error)
            self.count_failure()
        else:
            if isinstance(error, NotSerializableError):
                self._last = None  # to try again at the end would be in vain
            if reason is FailureReason.SHARE_MISSING:
                self.writer.miss(error)
            # That the node is lost was said when it was.
            self._complain(str(reason or type(error).__name__), error, was_said=self.writer.link.is_loss(error))

    def _has_all(self, name: str, ranks: SharingRanks | None) -> bool:
        """Whether all of a checkpoint is here; what other ranks send is waited for, and put into its rooms."""
        if ranks is None:
            return True
        if ranks.shares > 1 or self.writer.mailbox is None:
            return False
        try:
            self.writer.mailbox.put_into({rank: room.numpy().data for rank, room in ranks.sent.items()}, name)
        except SnapshotFailedError as error:
            if error.reason is not FailureReason.SHARE_MISSING:
                raise
            logger.debug("%s: %s", name, error)
            return False
        return True

    def miss_end(self) -> None:
        """Note that the run is at its end, and that there is no snapshot of it: why not was said."""
        self._ended = True

    def finish(self, wait_s: float, *, complete: bool) -> bool | None:
        """Commit and flush what is under way, within ``wait_s``, and close.

        Args:
            wait_s: bound, seconds.
            complete: whether the run is at its end.

        Returns:
            whether the snapshot of the end was seen at the durable tier; ``None`` if none was to be taken.
        """
        last = self._last if complete and not self.fenced else None
        untrained = complete and not self._ended
        ending = Ending(self.writer, self._past_memory, self.location.url, self.info, last, untrained=untrained)
        deadline_s = time.monotonic() + wait_s
        with contextlib.ExitStack() as ends:  # from the last one on, whatever fails in one
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
                self.where = ending.where

    def _bring(self, ending: Ending, deadline_s: float) -> bool | None:
        """Bring what is committed to safety; once more if that fails in a way that nobody has foreseen.

        A ring in this process ends with it, and all that is in it.
        """
        try:
            return ending.bring(within(deadline_s))
        except Exception as error:
            failure = failure_of(error)
            if getattr(failure, "reason", None) not in _UNFORESEEN:
                raise
            durable = ending.bring(within(deadline_s))
            self._complain("finish", failure)
            return durable

    def _write_past_memory(self, checkpoint: dict[str, Any], manifest: Manifest, error: SpotError) -> None:
        self.writer.say_once(
            "past-memory",
            "%s. Until then snapshots go to %s part by part, which is slower, and training waits for each",
            error,
            " or ".join([*self.info.nodes, self.location.url]),
        )
        try:
            self._past_memory.write(checkpoint, manifest)
        except FencedError as fence:
            self.writer.fence = fence
            self._complain("fenced", fence)
        except SpotError as failure:
            self._complain("past-memory-failed", failure)

    def _complain(self, key: str, error: SpotError, *, was_said: bool = False) -> None:
        if self._settings.strict:
            raise error
        if not was_said:
            goes_on = "the run ends all the same" if self._ended else "training goes on"
            self.writer.say_once(key, "no snapshot now, %s: %s", goes_on, error)

    def _reopen(self) -> Host:
        host = open_host(self.location, self._settings)
        try:
            host.open_run(self.info)
        except BaseException:
            leave(host)
            raise
        return host
