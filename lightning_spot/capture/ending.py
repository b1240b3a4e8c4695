"""The end of an attempt: what is committed becomes durable before ``fit`` returns, or is named.

A node that is lost on the way is waited for; what was lost with it is written again from the state at hand, where this
rank has all of it. (Of a state in shards all ranks have waited for its last snapshot before.) "Durable" is said of what
the durable tier has shown only.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from lightning_spot.capture.host_link import leave, within
from lightning_spot.capture.past_memory import PastMemory
from lightning_spot.capture.saying import SAY_S
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.tensors import Glances, tensors_in
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.stores import open_store
from lightning_spot.errors import NodeUnreachable, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.health import TierHealth
from lightning_spot.memory.host import InProcessHost
from lightning_spot.memory.runs import RunInfo
from lightning_spot.run.survey import ask_all
from lightning_spot.staging.watches import Watches, watch
from lightning_spot.tiers.store import Holdings

logger = logging.getLogger(__name__)

_LOOK_S = 10.0
_OTHERS_S, _AGAIN_S = 30.0, 0.5
_BEFORE = "The run goes on from the one before it"
_IN_MEMORY = "committed in memory, and not known to be durable"
_GOES_ON = "The node that has it goes on trying"
_ENDS_HERE = "It is in the memory of this process only, and ends with it"


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
        why = f"the newest snapshot, {newest.name}, was lost with the memory node that had it. {_BEFORE}"
        if (fence := self._writer.fence) is not None:
            why = f"the newest snapshot, {newest.name}, is not at the durable tier: {fence}"
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
            except NodeUnreachable as error:
                self._writer.link.lose(host, error)
                if self._writer.host is host:  # there is no way to another
                    raise

    def _say_waits(self, left: list[str], wait_s: float) -> None:
        for line in left:
            why = "fit waits for up to %.0f s more (flush_timeout_s) until all is durable: %s"
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
