"""What an attempt has written is brought to safety before a deadline, and durable before ``fit`` returns, or named.

A node that is lost on the way is waited for; what was lost with it is written again from the state at hand, where this
rank has all of it. (Of a state in shards all ranks have waited for its last snapshot before.) "Durable" is said of what
the durable tier has shown only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_spot.capture.host_link import leave, within
from lightning_spot.capture.past_memory import PastMemory
from lightning_spot.capture.saying import SAY_S
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.tensors import Glances, tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_bytes
from lightning_spot.errors import ServerUnreachableError, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.interval.costs import Failure, TierPace
from lightning_spot.interval.deadline import Deadline, DeadlinePlan, plan_urgent
from lightning_spot.memory.host import InProcessHost
from lightning_spot.memory.joint import nodes_of
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.tier import TierHealth
from lightning_spot.run.survey import ask_all
from lightning_spot.staging.copy_job import Watches, watch
from lightning_spot.tiers.store import Holdings

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_NOTICES_S = 15.0  # a local server notices in this time, too, that the snapshot server is lost
_LOOK_S = 10.0
_OTHERS_S, _AGAIN_S = 30.0, 0.5
_BEFORE = "The run goes on from the one before it"
_IN_MEMORY = "committed in memory, and not known to be durable"
_GOES_ON = "The node that has it goes on trying"
_ENDS_HERE = "It is in the memory of this process only, and ends with it"


class Safety:
    """What is safe outside this machine, and how soon more can be.

    Args:
        writer: of the snapshots.
        min_upload_interval_s: least seconds between two snapshots brought to the durable tier.
    """

    def __init__(self, writer: SnapshotWriter, min_upload_interval_s: float = 0.0) -> None:
        self._writer = writer
        self._durable_every_s = min_upload_interval_s

    def plan(self, deadline: Deadline | None) -> DeadlinePlan:
        """Plan an urgent snapshot of the size of the last one (any size fits if there was none).

        Args:
            deadline: that it has to meet, ``None`` for none.
        """
        left_s = deadline.left_s if deadline is not None and deadline.is_named else None
        newest = self._writer.committed
        nbytes = newest.nbytes if newest is not None else 0
        nbytes = self._writer.across.own_nbytes or nbytes  # each host sends its own at the same time
        tiers = self._writer.link.ask(lambda host: host.tiers(), None)
        if tiers is None:
            return plan_urgent(nbytes, left_s, {})
        safe_step = self._safe_step(self._writer.link.ask(lambda host: host.safe_step(), None))
        speeds = {
            url: tier.flushed_bytes / tier.flush_s for url, tier in tiers.items() if tier.flush_s and not tier.carried
        }
        at = self._writer.across.at
        carrier = self._writer.link.ask(lambda host: host.carrier(), at).partition(" ")[0]
        is_lost = bool(at) and carrier not in at.split()
        # What is committed and not safe yet goes first; where only a lost snapshot server had it, the one before it.
        waits = newest is not None and (is_lost or safe_step < newest.step)
        return plan_urgent(nbytes, left_s, speeds, waiting_bytes=nbytes if waits else 0)

    def usual_s(self) -> float | None:
        """Measured seconds until a snapshot is safe; ``None`` before any was."""
        return self.plan(None).expected_s if self._writer.committed is not None else None

    def paces(self) -> tuple[TierPace, ...]:
        """How fast each working tier takes snapshots, as measured."""
        return paces_of(self._writer.link.ask(lambda host: host.tiers(), {}), self._durable_every_s)

    def bring(
        self,
        deadline: Deadline,
        plan: DeadlinePlan,
        cut_short: Callable[[], bool],
        again: Callable[[], None] | None = None,
    ) -> str:
        """Wait until the newest snapshot is committed, and safe at one tier below.

        Args:
            deadline: how long to wait at most.
            plan: what was expected.
            cut_short: asked while waiting: whether to give up at once.
            again: takes the newest snapshot once more, if it was dropped; ``None`` if that is not possible.

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
        if lost := self._lost(newest, deadline):
            return f"{what} is not known to be safe: {lost}; {self._bring_older(deadline, cut_short)}"
        nothing_owed = False
        while not cut_short():
            try:
                if self._safe_step(writer.host.safe_step() if writer.host is not None else None) >= newest.step:
                    return f"{what} is safe in {time.monotonic() - started_s:.1f} s{of}"
                if nothing_owed and (why := self._why_dropped(newest)):
                    if again is None:
                        return f"{what} was dropped ({why}); the run resumes from the snapshot before it"
                    again()
                    again = None
                    writer.settle(deadline.left_s)
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

    def _lost(self, newest: Manifest, deadline: Deadline) -> str:
        """Where the newest snapshot was, if only a server had it that is not known to have it now; else ``""``."""
        across = self._writer.across
        if not across.at:
            return ""
        why = across.why_lost(newest.name, deadline.left_s / 2)  # the rest is for what this host has
        return f"{across.at}, which had it, {why}" if why else ""

    def _bring_older(self, deadline: Deadline, cut_short: Callable[[], bool]) -> str:
        """Wait until what this host has is safe: it is owed again when the local server sees that another is lost.

        Returns:
            what is safe, for people.
        """
        link, carrier = self._writer.link, nodes_of(self._writer.across.at)[0]
        give_up_s = time.monotonic() + _NOTICES_S
        owed = True
        while owed and deadline.left_s > 0 and not cut_short():
            now = link.ask(lambda host: host.carrier(), carrier).partition(" ")[0]
            noticed = now != carrier or time.monotonic() > give_up_s
            owed = bool(link.ask(lambda host: host.flush(_POLL_S), ["unknown"])) or not noticed
            time.sleep(_POLL_S)
        safe_step = link.ask(lambda host: host.safe_step(), None)
        if safe_step is None:
            return "no other snapshot of this attempt is known to be safe"
        return f"step {safe_step} is safe"

    def _why_dropped(self, newest: Manifest) -> str:
        """Why the newest snapshot was dropped instead of being brought anywhere; ``""`` if it was not."""
        nothing: dict[str, TierHealth] = {}
        tiers = self._writer.link.ask(lambda host: host.tiers(), nothing)
        return next((tier.dropped for tier in tiers.values() if newest.name in tier.dropped), "")

    def _why_refused(self) -> str:
        """Why a tier takes nothing of this attempt any more, for good; ``""`` if none does so."""
        nothing: dict[str, TierHealth] = {}
        tiers = self._writer.link.ask(lambda host: host.tiers(), nothing)
        return next((tier.refused for tier in tiers.values() if tier.refused), "")

    def _safe_step(self, from_memory: int | None) -> int:
        """Newest step that is safe outside this machine, -1 if none is.

        Args:
            from_memory: as the ring knows it, ``None`` if it knows none.
        """
        past = self._writer.past_memory
        return max(-1 if from_memory is None else from_memory, past.step if past is not None else -1)


def paces_of(tiers: Mapping[str, TierHealth], min_upload_interval_s: float = 0.0) -> tuple[TierPace, ...]:
    """How fast each working tier takes snapshots; a snapshot server counts as fast until it has taken one.

    Args:
        tiers: how each is doing, by its URL.
        min_upload_interval_s: least seconds between two snapshots brought to the durable tier.
    """
    working = [tier for tier in tiers.values() if not tier.error and not tier.carried]
    paces = [
        TierPace(drain_s=tier.drain_s, survives=Failure.MACHINE)
        if tier.kind == "node"
        else TierPace(drain_s=max(tier.drain_s, min_upload_interval_s), survives=Failure.NODE)
        for tier in working
        if tier.flushed
    ]
    if any(tier.kind == "node" for tier in working) and all(pace.survives == Failure.NODE for pace in paces):
        paces.append(TierPace(drain_s=0.0, survives=Failure.MACHINE))
    return tuple(paces)


@dataclass(frozen=True, slots=True)
class LastState:
    """The state of the finished run, kept until it is durable. Holds references to its tensors, no copies.

    Attributes:
        checkpoint: the state; ``None`` where this rank has a part of it only.
        manifest: of its snapshot, not sealed.
        watches: of its tensors, to know whether they have changed since.
        glances: at them, likewise.
    """

    checkpoint: dict[str, Any] | None
    manifest: Manifest
    watches: Watches
    glances: Glances

    @classmethod
    def of(cls, checkpoint: dict[str, Any] | ShardedCheckpoint, manifest: Manifest) -> LastState:
        """Keep a state."""
        whole = None if isinstance(checkpoint, ShardedCheckpoint) else checkpoint
        return cls(whole, manifest, watch(tensors_in(whole)), Glances(tensors_in(whole)))

    @property
    def can_be_written(self) -> bool:
        """Whether it is there, and no tensor of it has changed."""
        if self.checkpoint is None or self.watches.changed():
            return False
        return not self.glances.are_others


class Ending:
    """Brings what is committed to safety at the end of an attempt.

    Args:
        writer: of the snapshots.
        past_memory: where those went that fit no memory here.
        url: durable directory of the run.
        info: of the attempt.
        last: the state of the finished run, ``None`` if it is not finished.
        untrained: whether the run was finished before: nothing was left to train, so nobody needs the node any more.

    Attributes:
        where: what was committed last is, for people; known after :meth:`bring`.
    """

    def __init__(
        self,
        writer: SnapshotWriter,
        past_memory: PastMemory,
        url: str,
        info: RunInfo,
        last: LastState | None,
        *,
        untrained: bool = False,
    ) -> None:
        self._writer = writer
        self._past_memory = past_memory
        self._url = url
        self._info = info
        self._last = last
        self._untrained, self._has_left = untrained, False
        self.where = _IN_MEMORY
        self._durable = f"durable in {url}"

    def bring(self, wait_s: float) -> bool | None:
        """Commit and flush what is under way, within ``wait_s``, and leave the ring.

        Returns:
            whether the snapshot of the finished run was seen at the durable tier; ``None`` if the run is not finished.
        """
        deadline_s = time.monotonic() + wait_s
        self._writer.settle(wait_s)
        if self._last is not None and not self._is_committed(self._last):
            self._commit_again(self._last, deadline_s)
        left = self._flush(deadline_s)
        elsewhere = self._past_memory.flush(within(deadline_s))
        durable: bool | None = None
        if self._last is not None:
            durable = self._comes(self._last.manifest.name, deadline_s)
            if not durable and not any(self._url in line for line in (*left, *elsewhere)):
                durable = self._write_here(self._last)
        if durable or not (left or elsewhere):
            self.where = self._durable if durable else self._where_newest_is(deadline_s)
        here = _ENDS_HERE if isinstance(self._writer.host, InProcessHost) else _GOES_ON
        for lines, way_on in ((left, here), ([] if durable else elsewhere, _GOES_ON)):
            for line in lines:
                self._writer.say_once(line, "not everything is durable yet: %s. %s", line, way_on)
        self.let_go(complete=bool(durable) or (self._untrained and not left))
        return durable

    def let_go(self, *, complete: bool = False) -> None:
        """Leave the ring. A second call does nothing.

        Args:
            complete: whether nobody needs it any more.
        """
        # What another thread is asking now breaks off: that is no loss, and no reason to start a new node.
        self._writer.link.close()
        if not self._has_left and (host := self._writer.host) is not None:
            leave(host, complete=complete)
            self._has_left = True

    def _where_newest_is(self, deadline_s: float) -> str:
        """Where what was committed last is, now that nothing is owed any more; why it is lost, if it is, is said.

        The durable tier is asked where that is in doubt: a ring or a node may have lost it, or the ring does not know
        that it is safe (it was dropped, or went past the ring), or a tier has refused something.
        """
        newest, link = self._writer.committed, self._writer.link
        if newest is None:
            return self._durable
        unknown: dict[str, TierHealth] = {}
        tiers = link.ask(lambda host: host.tiers(), unknown).values()
        safe_step = link.ask(lambda host: host.safe_step(), None)
        is_known = safe_step is not None and safe_step >= newest.step and not any(tier.refused for tier in tiers)
        in_doubt = bool(link.losses) or self._past_memory.is_at_a_node or not is_known
        is_there = self._see(newest.name, deadline_s) if in_doubt else True
        if is_there is None:
            return _IN_MEMORY
        if is_there:
            return self._durable
        why = f"the newest snapshot, {newest.name}, was lost with the snapshot server that had it. {_BEFORE}"
        if (fence := self._writer.fence) is not None:
            why = f"the newest snapshot, {newest.name}, is not in storage: {fence}"
        for tier in tiers:
            if newest.name in tier.dropped:
                why = f"the newest snapshot was damaged in memory and dropped ({tier.dropped}). {_BEFORE}"
            elif tier.refused:
                why = f"the newest snapshot, {newest.name}, was refused ({tier.refused})"
        self._writer.say_once(why, "%s", why)
        return "lost"

    def _is_committed(self, last: LastState) -> bool:
        committed = self._writer.committed
        return committed is not None and committed.name == last.manifest.name

    def _commit_again(self, last: LastState, deadline_s: float) -> None:
        """Take the snapshot of the end once more: there was no ring, or it was lost before it had committed."""
        if self._writer.link.wait(within(deadline_s)) is None or not last.can_be_written:
            return
        try:
            self._writer.begin(last.checkpoint, last.manifest, wait_s=within(deadline_s))
            self._writer.settle(within(deadline_s))
        except SpotError as error:
            logger.warning("lightning_spot: the last snapshot goes past the memory of this host: %s", error)

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
            why = "fit waits for up to %.0f s more (upload_timeout_s) until all is durable: %s"
            self._writer.say_once(f"waits at the end: {line}", why, wait_s, line)

    def _see(self, name: str, deadline_s: float) -> bool | None:
        """Whether the durable tier lists a snapshot now; ``None`` if it does not answer."""
        answers, problems = ask_all({self._url: open_store(self._url).survey}, max(_LOOK_S, within(deadline_s)))
        for reason in problems.values():
            logger.warning("lightning_spot: %s cannot be asked for the last snapshot (%s)", self._url, reason)
        holdings: Holdings | None = answers.get(self._url)
        if holdings is None:
            return None
        return any(manifest.name == name and manifest.run_id == self._info.id for manifest in holdings.manifests)

    def _comes(self, name: str, deadline_s: float) -> bool:
        """Whether the durable tier lists a snapshot. If a ring was lost, another host may have to commit it yet."""
        by_others = self._writer.link.losses > 0 and self._writer.across.is_by_itself
        until_s = min(deadline_s, time.monotonic() + _OTHERS_S) if by_others else 0.0
        while not (there := self._see(name, deadline_s)) and time.monotonic() < until_s:
            time.sleep(_AGAIN_S)
        return bool(there)

    def _write_here(self, last: LastState) -> bool:
        """Store the state of the end from this process: no ring has it."""
        if not last.can_be_written:
            return False
        try:
            self._past_memory.write_durably(last.checkpoint, last.manifest)
        except SpotError as error:
            logger.warning("lightning_spot: the last snapshot could not be written to %s: %s", self._url, error)
            return False
        return True
